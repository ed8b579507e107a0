"""What a folder of results gives away about the machine and who used it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bench.store.cells import RECORDS
from bench.text import name_first

if TYPE_CHECKING:
    import pandas as pd

_PATH = re.compile(r"(?<![\w.:/~-])/[\w.-]+(?:/[\w.@+-]+)+")
"""An absolute path of two parts or more, which is no part of an address."""

_PUBLIC = ("/proc/", "/sys/", "/dev/", "/usr/")
_MOST = 3


def list_given_away(folder: Path, records: pd.DataFrame) -> Iterator[str]:
    """Name what identifies a machine or a person: host, GPU and variables of the folder's records,
    and paths in its text files."""
    for column, what in (
        ("host", "the host name"),
        ("gpu_uuid", "the UUID of the GPU"),
        ("variables", "environment variables"),
    ):
        if found := sorted({*records[column]} - {""}):
            yield f"{what} {name_first(found, _MOST)}"
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    for file in files:
        if file.suffix not in (".json", ".txt", ".log", ".html") and file.name != RECORDS:
            continue
        found = _PATH.findall(file.read_text(encoding="utf-8", errors="replace"))
        if paths := sorted({path for path in found if not path.startswith(_PUBLIC)}):
            yield f"paths in {file.name}: {name_first(paths, _MOST)}"
