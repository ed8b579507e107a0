"""A sweep's records as asv results of the commit that measured them.

Several repeats of a case become their median, and the worst of their outcomes.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import product
from math import isnan, nan
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.environment import get_env_name
from asv.machine import Machine, MachineCollection
from asv.repo import NoSuchNameError, get_repo
from asv.results import Results, iter_results
from asv.runner import BENCHMARK_RUN_SCRIPT, BenchmarkResult
from asv.util import ProcessError, UserError, check_output, load_json, write_json

from bench.asv.host import GRID, Host, conditions, describe_grid, expand, place, rank
from bench.case import Case
from bench.cores import parse_cpu
from bench.errors import UsageError
from bench.origin import find_origin
from bench.preset import load_config as load_preset_file
from bench.preset import load_preset
from bench.store.reader import read_rows
from bench.store.rows import Row, find_mixed, group, latest
from bench.store.table import CONFIG

PREFIX = "cases.track_"
_ONE_RESULT = attrgetter("commit", "host", "python", "gpu", "driver", "torch")


def load_config() -> Any:
    """Return asv's configuration from the working directory. Raises UsageError: there is none."""
    try:
        return Config.load()
    except UserError as error:
        raise UsageError(f"{error} Run it in the root of the project") from error


def import_sweep(folder: Path, config: Any) -> list[Path]:
    """Write a sweep's records as asv results. Returns the files, one per commit and machine."""
    measured = read_measured(folder)
    cases = list(dict.fromkeys(row.case for row in measured))
    grid = describe_grid(_name_grid(folder, cases), cases)
    benchmarks = _discover(config, grid)
    known = _benchmarks_file(config)
    for name, benchmark in (load_json(str(known)) if known.is_file() else {}).items():
        wanted = benchmarks.get(name, {}).get("param_names")
        if wanted and benchmark["param_names"] != wanted:  # type: ignore[index]
            raise UsageError(
                f"{folder}: varies {', '.join(wanted)}, and the results asv has vary "
                f"{', '.join(benchmark['param_names'])}; one site cannot show both"
            )
    results = [
        _file(rows, grid, benchmarks, folder, config) for rows in group(measured, _ONE_RESULT)
    ]
    for result, machine in results:
        result.save(config.results_dir)
        path = Path(config.results_dir) / machine["machine"] / "machine.json"
        if not path.is_file():
            write_json(str(path), machine, Machine.api_version)
    if not known.is_file():
        write_json(str(known), benchmarks, Benchmarks.api_version)
    widen_benchmarks(config)
    return [Path(config.results_dir) / result._filename for result, _ in results]


def read_measured(folder: Path) -> list[Row]:
    """Return the rows of a sweep that become results: the final attempt of each run of its cases.
    Raises UsageError: there are none, they are not measurements, or rows that asv would take for
    one result were made in different environments."""
    measured = latest(read_rows(folder))
    if not measured:
        raise UsageError(f"{folder}: has no records yet")
    for executor in dict.fromkeys(row.executor for row in measured):
        if find_origin(executor) == "unknown":
            raise UsageError(
                f"{folder}: its records come from the {executor} executor and are not known to be "
                "measurements"
            )
    for rows in group(measured, _ONE_RESULT):
        if mixed := find_mixed(rows):
            raise UsageError(
                f"{folder}: has rows of one case that differ in {', '.join(mixed)}, which asv "
                "cannot tell apart; measure each into its own --out and import those"
            )
    return measured


def widen_benchmarks(config: Any) -> None:
    """Let asv show every case that has results: it knows only the grid of the last run, and would
    not show results of another preset."""
    file = _benchmarks_file(config)
    if not file.is_file():
        return
    benchmarks = load_json(str(file), api_version=Benchmarks.api_version)
    for result in iter_results(config.results_dir):
        for name in result.get_result_keys(benchmarks):
            known, found = benchmarks[name]["params"], result.get_result_params(name)
            if found and len(found) == len(known):
                benchmarks[name]["params"] = [
                    sorted({*a, *b}, key=lambda text: rank(ast.literal_eval(text)))
                    for a, b in zip(known, found, strict=True)
                ]
    write_json(str(file), benchmarks, Benchmarks.api_version)


def _benchmarks_file(config: Any) -> Path:
    return Path(Benchmarks.get_benchmark_file_path(config.results_dir))


def _name_grid(folder: Path, cases: Sequence[Case]) -> str:
    """Return the preset that a sweep ran, or its own name if flags changed the cases: a line on the
    site must not join figures of different questions."""
    own = folder.resolve().name
    try:
        asked = json.loads((folder / CONFIG).read_text("utf-8"))["preset"]
        preset = load_preset_file(Path(asked)) if asked.endswith(".toml") else load_preset(asked)
        return Path(preset.name).stem if set(cases) <= set(expand(preset)) else own
    except (OSError, ValueError, KeyError, UsageError):
        return own


def _discover(config: Any, grid: Mapping[str, Any]) -> dict[str, Any]:
    env = {**os.environ, GRID: json.dumps(grid)}
    env["PYTHONPATH"] = env["ASV_PYTHONPATH"] = str(Path.cwd())
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "benchmarks.json"
        script = [BENCHMARK_RUN_SCRIPT, "discover", str(Path(config.benchmark_dir).resolve())]
        check_output([sys.executable, *script, str(answer)], env=env, cwd=scratch, dots=False)
        found = json.loads(answer.read_text())
    return {benchmark["name"]: benchmark for benchmark in found}


def _file(
    rows: Sequence[Row],
    grid: Mapping[str, Any],
    benchmarks: Mapping[str, Any],
    folder: Path,
    config: Any,
) -> tuple[Any, dict[str, Any]]:
    """Make the asv result of one commit on one machine, and describe that machine."""
    where = vars(rows[0])
    commit, date = _find_commit(where["commit"], folder, config)
    python = ".".join(where["python"].split(".")[:2])
    here = conditions(where["gpu"], where["driver"], where["torch"], grid["preset"])
    machine = _describe_machine(where, config)
    parameters = {**machine, "python": python, **here}
    name = get_env_name(Host.tool_name, python, here, {})
    result = Results(parameters, here, commit, date, python, name, {})
    there = Path(config.results_dir) / result._filename
    if there.exists() or any(
        old.commit_hash == commit and old.params == parameters
        for old in iter_results(config.results_dir)
    ):
        raise UsageError(
            f"{folder}: asv has results of commit {commit[:8]} under the same parameters "
            f"({there}); remove these results to import the sweep"
        )
    started = datetime.fromisoformat(min(row.started_at for row in rows))
    for benchmark in benchmarks.values():
        if benchmark["name"].startswith(PREFIX):
            values = _values(rows, benchmark["name"].removeprefix(PREFIX), grid)
            count = len(values)
            outcome = BenchmarkResult(values, [None] * count, [None] * count, 0, "", None)
            result.add_result(benchmark, outcome, started_at=started)
    return result, machine


def _values(rows: Sequence[Row], name: str, grid: Mapping[str, Any]) -> list[float | None]:
    from benchmarks.figures import FIGURES

    (figure,) = (figure for figure in FIGURES if figure.name == name)
    found: dict[tuple[Any, ...], list[float | None]] = {}
    for row in rows:
        at = tuple(place(row.case, grid["names"]))
        found.setdefault(at, []).append(figure.value(vars(row)))
    together: Any = max if name == "status" else _median
    return [together(found.get(at, [nan])) for at in product(*grid["params"])]


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the numbers; without any, None (failed) if all are None, else NaN."""
    given = [value for value in values if value is not None]
    numbers = [value for value in given if not isnan(value)]
    return median(numbers) if numbers else (nan if given else None)


def _find_commit(name: str, folder: Path, config: Any) -> tuple[str, int]:
    """Return a commit's hash and date, in JavaScript's ms. Raises UsageError: it is unknown."""
    if not name or name.endswith("+dirty"):
        raise UsageError(
            f"{folder}: measured by {f'edited source ({name})' if name else 'no known commit'}, so "
            "it belongs to no commit; commit the source and run the sweep again"
        )
    repo = get_repo(config)
    try:
        commit = repo.get_hash_from_name(name)
        return commit, repo.get_date(commit)
    except (NoSuchNameError, ProcessError):
        raise UsageError(f"{folder}: commit {name} is not in this repository; fetch it") from None


def _describe_machine(row: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return asv's description of a machine if it knows it, else one from the record."""
    host = row["host"]
    known = Path(config.results_dir) / host / "machine.json"
    if known.is_file():
        machine: dict[str, Any] = load_json(str(known))
        machine.pop("version", None)
        return machine
    try:
        if host == Machine.get_unique_machine_name():
            return dict(MachineCollection.load(host))
    except UserError:
        return dict(Machine.get_defaults())
    cpu, cores = parse_cpu(row["cpu"])
    blank = {"arch": "", "ram": "", "num_cpu": str(cores or "")}
    return {"machine": host, "os": row["os"], "cpu": cpu, **blank}
