"""The cases of a preset, each trained once per commit, by `bench.sweep` of that commit.

asv starts a process for every figure of every case. Those of one commit share a working folder:
the first to need a case trains it and leaves the answer there, the others read it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.figures import DIED, FIGURES, STATUSES, Figure

# Made by bench.publish.asv.plugin from the preset: the grid is the working tree's for every commit,
# because asv knows a case only by its place in the grid.
GRID: dict[str, Any] = json.loads(os.environ.get("BENCH_ASV_GRID", "{}"))
PHASES = 4  # set-up, warm-up, epoch, evaluation: a sweep gives each the same deadline
PREPARATION_S = 900  # the first case may have to fetch and decode its images
GRACE_S = 10
LIMIT_S = GRID.get("phase_s", 0) * PHASES + PREPARATION_S
"""What one case may take; asv, which would leave the sweep's worker behind, is told a bit more."""


def setup_cache() -> None:
    """Cache nothing: asv gives the benchmarks that share this a folder to work in."""


setup_cache.pretty_source = ""  # type: ignore[attr-defined]


def answer(values: tuple[Any, ...]) -> dict[str, Any] | None:
    """What came of the case at ``values``: its status, reason and figures; None if there is none.

    The first to ask trains it. What ends before it can answer counts as died: a case that hangs
    costs one timeout, not one for each figure.
    """
    case = next((case for case in GRID["cases"] if case["values"] == list(values)), None)
    if case is None:
        return None
    folder = Path(case["slug"])
    file = folder / "answer.json"
    if not file.exists():
        folder.mkdir()
        file.write_text(json.dumps({"status": DIED, "reason": "the sweep left no record"}))
        trained = train(case["axes"], folder)
        file.write_text(json.dumps(trained))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def train(axes: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Sweep one case into ``folder``, by the commit's own harness, and read the record."""
    config = folder / "case.toml"
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in axes.items())
    config.write_text(f"[[grid]]\n{lines}")
    command = ["-m", "bench.sweep", "--config", str(config), "--out", str(folder), *GRID["flags"]]
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as sweep:
        try:
            output, _ = sweep.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            end(sweep)
            return {"status": "timeout", "reason": f"the sweep ran past {LIMIT_S:g} s"}
    print(output)  # asv shows it with --show-stderr
    try:
        try:
            from bench.results.store import read_records
        except ImportError:  # a commit before the layers
            from bench.results.store import read_records  # type: ignore[import-not-found, no-redef]

        row: dict[Any, Any] = read_records(folder).iloc[-1].to_dict()
    except Exception as error:  # whatever an older commit's harness does, it is no figure
        last = (output.strip().splitlines() or [repr(error)])[-1]
        return {"status": DIED, "reason": last}
    figures = {figure.name: figure.value(row) for figure in FIGURES}
    return {"status": row["status"], "reason": row["reason"], "figures": figures}


def end(sweep: subprocess.Popen[str]) -> None:
    """Ask a sweep to stop, which ends its worker; kill it if it does not."""
    sweep.terminate()
    with suppress(subprocess.TimeoutExpired):
        sweep.wait(GRACE_S)
    sweep.kill()


def _benchmark(figure: Figure) -> Callable[..., float]:
    def track(*values: Any) -> float:
        found = answer(values)
        if found is None:
            return math.nan  # the preset has no such case
        if figure.name == "status":
            return STATUSES.index(found["status"])
        value = found.get("figures", {}).get(figure.name)
        if value is None:
            raise RuntimeError(f"{found['status']}: {found['reason']}")
        return float(value)

    track.__name__ = f"track_{figure.name}"
    vars(track).update(
        pretty_name=figure.pretty_name,
        unit=figure.unit,
        version=figure.version,
        timeout=LIMIT_S + 60,
        param_names=GRID["names"],
        params=GRID["params"],
        pretty_source=figure.help,
    )
    return track


if GRID:
    globals().update({f"track_{figure.name}": _benchmark(figure) for figure in FIGURES})
