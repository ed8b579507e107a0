"""What the tests of Ray share: waiting, and finding the processes of a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "BENCH_TEST_CLUSTER"
"""Environment variable of all processes of a test's cluster: the cluster's folder."""

PATIENCE_S = 240.0  # for what is done in a second or two where nothing else runs


def wait_for(what: Callable[[], Any]) -> Any:
    """What ``what`` returns, once that is true."""
    until = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.1)
    return found


def find_marked(folder: str, title: str = "") -> list[int]:
    """The processes of the cluster in ``folder`` and what they started; those with a ``title``.

    Ray's own overwrite their environment with their title, but write logs there.
    """
    found = []
    mark = os.fsencode(f"{MARK}={folder}")
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (place / "cmdline").read_bytes()
            if title.encode() in line and (
                mark in (place / "environ").read_bytes().split(b"\0")
                or (line.startswith(b"ray::") and any(_list_files(place, folder)))
            ):
                found.append(int(place.name))
    return found


def _list_files(place: Path, folder: str) -> Iterator[bool]:
    for descriptor in (place / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(descriptor.readlink()).startswith(f"{folder}/")
