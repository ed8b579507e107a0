"""Every number that the commands say of committed and planted sweeps, as one JSON file.

    python tests/oracle/dump.py TREE OUT.json

It runs what is in TREE, a checkout of any commit, and asks it only what a user can ask: the files
that its commands write. So that two commits can be compared, planted sweeps are written by the
`tests.planted` of TREE, in the form in which that commit reads them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ASKED = {
    "report csv": ("report", "--format", "csv"),
    "report json": ("report", "--format", "json"),
    "validate json": ("validate", "--format", "json"),
}
"""What each sweep is asked."""

AXES = ("precision", "batch_size", "loss_scale", "compile", "cudnn_benchmark")
"""Axes of which two values are compared where a committed sweep has them."""


def ask(command: str, *arguments: str) -> str:
    """Return what a command writes. A refusal and a fault are answers too: they are compared."""
    main: Callable[[Sequence[str]], int] = importlib.import_module(f"bench.{command}.__main__").main
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as left:
        code = int(left.code or 0) if isinstance(left.code, int) else 1
    except Exception as error:
        return json.dumps({"raised": traceback.format_exception_only(error)[-1].strip()})
    return out.getvalue() or json.dumps({"rc": code})


def list_values(folder: Path, axis: str) -> list[str]:
    """Return the values of an axis in a sweep, as its report has them."""
    import csv

    rows = csv.DictReader(io.StringIO(ask("report", str(folder), "--format", "csv")))
    return [*dict.fromkeys(row[axis] for row in rows if row.get(axis))]


def answer(tree: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """Yield a name and what was answered, for each sweep and each question."""
    from tests.planted.comparisons import COMPARISONS
    from tests.planted.records import list_committed, write_sweep
    from tests.planted.sweeps import SWEEPS, Folders

    committed = {f"results/{folder.name}": folder for folder in list_committed("records.csv")}
    for file in sorted((tree / "results" / "reference").glob("*.csv")):
        if not file.stem.endswith("-curve"):
            committed[f"results/reference/{file.name}"] = file
    planted = Folders(scratch / "planted")
    folders = {**committed, **{f"planted/{name}": planted[name] for name in SWEEPS}}
    for name, folder in folders.items():
        for question, (command, *flags) in ASKED.items():
            yield f"{question}: {name}", ask(command, str(folder), *flags)
    for name, folder in committed.items():
        for axis in AXES:
            values = list_values(folder, axis)
            for other in values[1:]:
                asked = f"--axis {axis} {values[0]} {other}"
                said = ask("compare", str(folder), *asked.split(), "--format", "json")
                yield f"compare json: {name} {asked}", said
    for name, comparison in COMPARISONS.items():
        place = scratch / "compare" / name[:60].replace("/", "-")
        for sweep, rows in comparison.sweeps.items():
            write_sweep(place / sweep, rows)
        os.chdir(place)
        said = ask("compare", *comparison.command.split(), "--format", "json")
        os.chdir(tree)
        yield f"compare json: {name}", said


def main(tree: Path, out: Path) -> None:
    os.chdir(tree)
    sys.path[:1] = [str(tree), str(tree / "tests")]  # in place of this folder
    with tempfile.TemporaryDirectory() as scratch:
        said: dict[str, Any] = dict(answer(tree, Path(scratch)))
        # a folder of this run is not a difference
        said = {name: text.replace(scratch, "SCRATCH") for name, text in said.items()}
    out.write_text(json.dumps(said, indent=0, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
