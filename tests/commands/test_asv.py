"""What asv tracks: figures of a record, the grid of a preset, and one training a case."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.planted.records import ROOT
from tests.pytest_for_tests import Patch

pytest.importorskip("asv", reason="asv is not installed (the 'asv' extra)")

from asv.util import UserError
from asv_runner.discovery import disc_benchmarks

from bench.base.errors import UsageError
from bench.publish.asv import plugin
from bench.publish.asv.plugin import describe_grid, lay_out
from bench.schema.axis import Value
from bench.schema.case import Case
from bench.schema.preset import load_preset, parse_preset, preset_names
from bench.schema.record import Status
from benchmarks import overhead
from benchmarks.figures import ABSENT, FIGURES, MEASURED, STATUSES

NAN = math.nan
ROW = {
    "status": "ok",
    "reason": "",
    "epoch_time_s": 20.0,
    "measured_time_s": 5.0,
    "energy_j": 700.0,
    "train_loss": 1.5,
    "train_accuracy": 0.25,
    "peak_device_bytes": NAN,
    "peak_process_bytes": 3e9,
    "peak_reserved_bytes": 2e9,
}


# ------------------------------------------------------------------------------------ the figures


def test_figures_of_a_measured_case() -> None:
    found = {figure.name: figure.value(ROW) for figure in FIGURES}
    assert found == {
        "epoch_time": 20,
        "peak_memory": 3e9,
        "train_loss": 1.5,
        "top1_error": 75,
        "energy": 2800,  # of a whole epoch, of which a quarter was measured
        "status": 0,
    }


def test_every_outcome_has_a_number_of_its_own() -> None:
    assert set(STATUSES) == {*map(str, Status), "died"}
    # the numbers stand in users' histories: append, never move
    assert STATUSES[:6] == ("ok", "diverged", "invalid", "unsupported", "oom_suspected", "oom")


def test_only_what_was_measured_is_a_number() -> None:
    figures = {figure.name: figure for figure in FIGURES}
    for number, status in enumerate(STATUSES):
        row = {**ROW, "status": status}
        assert figures["status"].value(row) == number
        value = figures["epoch_time"].value(row)
        if status in MEASURED:
            assert value == 20
        elif status in ABSENT:
            assert math.isnan(value)
        else:
            assert value is None  # asv's word for failed


# --------------------------------------------------------------------------------------- the grid

ON_GPU: dict[str, list[Value]] = {"device": ["cuda"]}
TO_FIND = ("memory", "scaling")  # with batch sizes that a search finds
PLANNED = [name for name in preset_names() if name not in TO_FIND]


@pytest.mark.parametrize("name", TO_FIND)
def test_a_batch_size_that_is_yet_to_be_found_is_no_parameter(name: str) -> None:
    with pytest.raises(UsageError, match="looks for the largest batch; give a number"):
        load_preset(name).cases({}, ON_GPU)


@pytest.mark.parametrize("name", PLANNED)
def test_every_case_of_a_preset_has_a_place_of_its_own_and_a_commit_is_told_it(name: str) -> None:
    cases = load_preset(name).cases({}, ON_GPU)
    laid = lay_out(cases)
    places = [tuple(case["values"]) for case in laid["cases"]]
    assert len(set(places)) == len(cases)
    assert set(places) <= set(product(*laid["params"]))
    for case in cases:
        (axes,) = (c["axes"] for c in lay_out([case])["cases"])
        lines = "".join(f"{axis} = {json.dumps(value)}\n" for axis, value in axes.items())
        preset = parse_preset(f"[[grid]]\n{lines}".encode(), "told")
        assert preset.cases({}, ON_GPU) == [case]


def test_the_preset_is_the_user_s(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.delenv("BENCH_PRESET", raising=False)
    for there, name in ((False, "cpu"), (True, "rtx-titan")):
        monkeypatch.setattr(plugin, "has_cuda", lambda there=there: there)
        assert Path(plugin.choose_preset().name).stem == name
    (mine := tmp_path / "mine.toml").write_text("[[grid]]\nbatch_size = 2\n")
    for given, name in (("precision", "precision"), (str(mine), "mine")):
        monkeypatch.setenv("BENCH_PRESET", given)
        assert Path(plugin.choose_preset().name).stem == name
    monkeypatch.setenv("BENCH_PRESET", "rtx-titn")  # one line of asv's
    with pytest.raises(UserError, match="did you mean 'rtx-titan'"):
        plugin.setup()


# -------------------------------------------------------------------------- one training per case


@pytest.fixture
def cases(monkeypatch: Patch, tmp_path: Path) -> Any:
    """The benchmarks of a grid of two cases, in asv's shared folder."""
    small = Case(dataset="synthetic", batch_size=8, device="cpu")
    two = [small, replace(small, batch_size=16, precision="bf16")]
    monkeypatch.setenv("BENCH_ASV_GRID", json.dumps(describe_grid("two", two)))
    monkeypatch.chdir(tmp_path)
    import benchmarks.cases

    yield importlib.reload(benchmarks.cases)
    monkeypatch.delenv("BENCH_ASV_GRID")
    importlib.reload(benchmarks.cases)


# ------------------------------------------------------------------------------ every benchmark


def run_here(*command: str) -> float:
    """A command within this process, which knows the fake."""
    name, *words = [word for word in command if word != "with_fake"]
    assert importlib.import_module(f"{name}.__main__").main(words) == 0
    return 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("fake")
def test_every_benchmark_runs(cases: Any, monkeypatch: Patch) -> None:
    """Found by asv's own rules and run as asv runs them, but small, and in one process."""

    def start_with_fake(command: list[str], **options: Any) -> subprocess.Popen[str]:
        python, _, *words = command
        return subprocess.Popen([python, "-m", "with_fake", *words], **options)

    monkeypatch.setitem(cases.GRID, "flags", ["--executor", "fake"])  # the sweep is a real one
    known = SimpleNamespace(**{**vars(subprocess), "Popen": start_with_fake})
    monkeypatch.setattr("benchmarks.cases.subprocess", known)
    monkeypatch.setattr(overhead, "GRID", {})
    monkeypatch.setattr(overhead, "compare", lambda device, pairs: float(pairs))
    monkeypatch.setattr("benchmarks.speed.SIDE", 2)
    monkeypatch.setattr("benchmarks.speed.measure", run_here)
    figures, caches = {}, {}
    for benchmark in disc_benchmarks(str(ROOT / "benchmarks")):
        if (shared := benchmark.setup_cache_key) not in caches:
            caches[shared] = benchmark.do_setup_cache()
        benchmark.set_cache(caches[shared])
        if benchmark.params:
            benchmark.set_param_idx(0)
        assert not benchmark.do_setup(), "asv would leave it out"
        figures[benchmark.name] = benchmark.do_run()
    of_a_case = {f"cases.track_{figure.name}" for figure in FIGURES}
    assert figures.keys() == of_a_case | {
        "overhead.Overhead.track_time_ratio",
        "speed.track_cpu_s",
    }
    # a fake has no energy and predicts nothing
    untold = {name for name, figure in figures.items() if not math.isfinite(figure)}
    assert untold == {"cases.track_energy", "cases.track_top1_error"}
    assert figures["cases.track_status"] == STATUSES.index("ok")
    assert figures["cases.track_epoch_time"] == 10 + 1000 / 8  # the fake's


@pytest.mark.thorough
def test_the_harness_is_held_against_a_bare_loop() -> None:
    assert 0.1 < overhead.compare("cpu", pairs=1) < 10


def test_a_model_beside_the_user_is_found_behind_the_commit_s_files(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """asv starts its processes in a folder of its own, where a user's model is not."""
    here, commit, elsewhere = (tmp_path / name for name in ("here", "commit", "elsewhere"))
    for folder in (here, commit, elsewhere):
        folder.mkdir()
    (here / "mynet.py").touch()
    for folder in (here, commit):
        (folder / "bench.py").write_text(f"place = {folder.name!r}")
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    host: Any = plugin.Host.__new__(plugin.Host)
    host._build_root, host._global_env_vars = str(commit), {}
    code = "import bench, mynet; print(bench.place)"
    assert host.run(["-c", code], cwd=str(elsewhere)).strip() == "commit"
