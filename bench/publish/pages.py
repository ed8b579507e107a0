"""The pages of the published folder: of each sweep, of all cards, and the index to them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.base.errors import StoreError
from bench.base.progress import Progress, watch
from bench.base.text import last_line, replace_file
from bench.publish.asv.site import publish_commits
from bench.results.store.reader import list_results
from bench.schema.flags import writable

INDEX = Path(__file__).parents[1] / "report" / "templates" / "index.html"
_CARDS = "cards.html"
ASV_CONFIG = Path("asv.conf.json")


def publish(results: Path, out: Path) -> Path:
    """Write all pages into ``out``, and last the index, which is returned. Raises UsageError:
    ``out`` cannot be written, or as `publish_commits` does; StoreError: the disk is full."""
    import jinja2

    index = out / "index.html"
    shutil.rmtree(out / "sweeps", ignore_errors=True)  # a sweep may have been removed since
    with writable("--out", out):
        index.unlink(missing_ok=True)
        (out / "sweeps").mkdir(parents=True)
    with watch("building the asv site"):
        tracked = ASV_CONFIG.is_file() and publish_commits(out / "asv")
    pages, readable = [], []
    with Progress(len(paths := [*list_results(results)]), "page") as progress:
        for path in paths:
            name = path.name.removesuffix(".csv")
            file = f"sweeps/{name}.html"
            progress.begin(file)
            if failed := write_page("report", [path], out / file):
                file = ""
            else:
                readable.append(path)
            progress.end()
            pages.append((name, file, failed))
    cards = readable and not write_page("cards", readable, out / _CARDS)
    template = jinja2.Environment(autoescape=True).from_string(INDEX.read_text("utf-8"))
    page = template.render(tracked=tracked, cards=_CARDS if cards else None, pages=pages)
    with writable("--out", out):
        replace_file(index, page)
    return index


def write_page(command: str, sources: Sequence[Path], file: Path) -> str:
    """Write a command's page about some sweeps. Returns why there is none, or an empty text. Raises
    StoreError: the disk is full."""
    words = ["-m", f"bench.{command}", *map(str, sources), "--format", "html", "-o", str(file)]
    answer = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    failed = last_line(answer.stderr) if answer.returncode else ""
    if os.strerror(errno.ENOSPC) in failed:
        raise StoreError(failed.removeprefix("error: "))
    if failed:
        print(f"{sources[0]}: no {command}: {failed}")
    return failed
