"""`python -m bench.why` on sweeps with made-up profiles."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.answers.explanation import describe
from bench.answers.step_time import explain_pairs
from bench.profile.step import StepWork
from bench.profile.timeline import read_trace
from bench.report.__main__ import main as report
from bench.results.store.reader import read_records
from bench.results.store.writer import Store
from bench.results.study.axes import find_varying
from bench.results.study.profiled import read_steps
from bench.results.study.sweeps import read_sweeps
from bench.schema.case import Case
from bench.schema.record import Status
from bench.schema.work import WorkKind
from bench.sweep.__main__ import main as sweep_main
from bench.training.profiling import MOST
from bench.why import main
from tests.frames_for_tests import read_work
from tests.planted.records import list_committed, make_run, write_sweep
from tests.planted.results import read_results
from tests.planted.steps import make_profiled, make_row, make_step, write_profiled
from tests.pytest_for_tests import Capture


def make_network(precision: str, times: float = 1.0, idle: float = 2.0) -> StepWork:
    """A step of a network in fp32 or fp16, its work so many times that of batch size 128."""
    low = precision == "fp16"
    format, size = ("float16", 0.5) if low else ("float32", 1.0)
    rows = [
        make_row(
            WorkKind.MATMUL, "mm", (5.0 if low else 60.0) * times,
            format=format, flop=3e12 * times, bytes=4e9 * size * times,
        ),
        make_row(
            WorkKind.NORMALISATION, "native_batch_norm", (10.0 if low else 18.0) * times,
            format=format, bytes=64e9 * size * times,
        ),
    ]  # fmt: skip
    if low:
        rows.append(
            make_row(
                WorkKind.CAST, "_to_copy", 3.0, format="float32→float16", bytes=12e9, calls=160
            )
        )
    busy = sum(1e3 * (row.time_s or 0) for row in rows)
    return make_step(busy + idle, rows)


def make_case(precision: str, batch: int = 128, **axes: Any) -> Case:
    scale = 128.0 if precision == "fp16" else None
    return Case(precision=precision, loss_scale=scale, batch_size=batch, profile=True, **axes)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fp32 and fp16 at two batch sizes, and fp16 compiled at one of them."""
    runs = [
        (make_case(precision, batch), make_network(precision, batch / 128))
        for precision in ("fp32", "fp16")
        for batch in (128, 256)
    ]
    compiled = make_network("fp16", idle=0.5)
    runs.append((make_case("fp16", compile="default"), replace(compiled, step_s=12e-3)))
    return write_profiled(tmp_path_factory.mktemp("why") / "sweep", runs)


def find(parts: Iterable[dict[str, Any]], name: str, key: str = "name") -> dict[str, Any]:
    """The one part of a list that has this name."""
    (found,) = (part for part in parts if part[key] == name)
    return found


def explain(*arguments: object, capsys: Capture) -> list[dict[str, Any]]:
    assert main([*map(str, arguments), "--format", "json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["explanations"]
    return found


def test_by_default_each_precision_is_explained_against_fp32(sweep: Path, capsys: Capture) -> None:
    found = explain(sweep, capsys=capsys)
    pairs = [(one["a"]["name"], one["b"]["name"], one["items"]) for one in found]
    assert pairs == [("fp32", "fp16", 128), ("fp32", "fp16", 256)]
    first = found[0]
    assert first["speedup"] == pytest.approx(80 / 20)
    assert first["speedup_low"] < 4 < first["speedup_high"]
    # 5 ms of products, 8 of traffic, and 3 of casts, whose floor is as long
    assert first["ceiling"]["speedup"] == pytest.approx(80 / (5 + 8 + 3), rel=1e-3)
    changes = {one["name"]: one["after_s"] - one["before_s"] for one in first["changes"]}
    assert changes["matmul"] == pytest.approx(-55e-3)
    assert changes["cast"] == pytest.approx(3e-3)
    assert sum(changes.values()) == pytest.approx(20e-3 - 80e-3, abs=1e-5)
    shares = {one["name"]: one["share"] for one in first["reasons"]}
    assert shares["memory"] == pytest.approx(8 / 20, abs=0.01)
    assert shares["below_copy"] == pytest.approx((10 - 8) / 20, abs=0.01)
    assert find(first["reasons"], "memory")["cures"] == ["--compile default"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--axis", "precision", "fp16", "fp32", "--where", "batch_size=256"], ["fp16", "fp32"]),
        (["--axis", "compile", "on", "off"], ["compile default", "compile off"]),
    ],
)
def test_any_two_values_of_any_axis(
    sweep: Path, options: list[str], names: list[str], capsys: Capture
) -> None:
    (found,) = explain(sweep, *options, capsys=capsys)
    assert [found["a"]["name"], found["b"]["name"]] == names


def test_of_two_batch_sizes_the_first_is_scaled_to_as_many_items(
    sweep: Path, capsys: Capture
) -> None:
    options = ("--axis", "batch_size", "--where", "precision=fp32")
    (found,) = explain(sweep, *options, capsys=capsys)
    assert found["items"] == 256
    assert found["a"]["step_s"] == pytest.approx(160e-3, rel=1e-3)
    assert found["speedup"] == pytest.approx(160 / 158)
    assert [found["a"]["name"], found["b"]["name"]] == ["batch size 128", "batch size 256"]
    launch = find(found["reasons"], "launch")
    assert launch["after_s"] - launch["before_s"] == pytest.approx(-2e-3, rel=0.01)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--axis", "precision", "fp32", "bf16"], "no two profiled cases differ in "
         "precision fp32 bf16 alone"),
        (["--axis", "channels-last"], "or for another --axis"),
        (
            ["--axis", "precision", "fp16"],
            "give two different values of precision or none, after the sweeps",
        ),
        (["--where", "batch_size=64"], "no case has it; there is 128, 256"),
    ],
)  # fmt: skip
def test_errors_are_one_line_that_says_what_is_there(
    sweep: Path, options: list[str], expected: str, capsys: Capture
) -> None:
    assert main([str(sweep), *options]) == 2
    error = capsys.readouterr().err
    assert expected.format(sweep) in error
    assert error.count("\n") == 1


def test_without_a_profile_it_says_how_to_get_one(tmp_path: Path, capsys: Capture) -> None:
    write_sweep(tmp_path, [make_run(Case(), step_time_median_s=0.1, epoch_time_s=1.0)])
    assert main([str(tmp_path)]) == 2
    assert "run its command again with --profile" in capsys.readouterr().err


def test_why_one_of_two_is_left_out_is_said(tmp_path: Path, capsys: Capture) -> None:
    with Store(tmp_path / "sweep") as store:
        for name, status, reason in (("fp32", "ok", ""), ("fp16", "invalid", "it ran in float32")):
            step = make_network(name)
            record = make_profiled(make_case(name), step, status=Status(status), reason=reason)
            store.append(record, work=step.work)
    assert main([str(tmp_path / "sweep")]) == 2
    error = capsys.readouterr().err
    assert "differ in precision alone: fp16 is invalid: it ran in float32; ask for" in error
    assert error.count("\n") == 1


def test_a_step_that_took_no_time_is_not_explained(tmp_path: Path, capsys: Capture) -> None:
    with Store(tmp_path / "sweep") as store:
        for name, step_s in (("fp32", 0.1), ("fp16", 0.0)):
            step = make_network(name)
            record = make_profiled(make_case(name), step, step_time_median_s=step_s)
            store.append(record, work=step.work)
    assert report([str(tmp_path / "sweep"), "--full"]) == 0
    assert "2 cases in 2 runs: 2 ok" in capsys.readouterr().out
    assert main([str(tmp_path / "sweep")]) == 2
    assert "no two profiled cases" in capsys.readouterr().err


def test_the_work_is_of_the_profile_in_the_middle_and_the_time_of_all_repeats(
    tmp_path: Path,
) -> None:
    step = make_network("fp32")
    usual = next(row.time_s or 0 for row in step.work if row.operation == "mm")
    case = make_case("fp32")
    with Store(tmp_path / "sweep") as store:
        # the first profile held a pause of the machine
        for repeat, (length, factor) in enumerate([(5.0, 20), (0.1, 1), (0.11, 1.1)], 1):
            work = [replace(row, time_s=factor * (row.time_s or 0)) for row in step.work]
            store.append(make_profiled(case, step, repeat, profiled_step_s=length), work=work)
        unprofiled = make_profiled(case, step, 4, profiled_step_s=None, busy_s=None)
        store.append(unprofiled, work=[replace(row, time_s=None) for row in step.work])
    sweeps = read_sweeps([tmp_path / "sweep"])
    (found,) = read_steps(read_results(*sweeps)[1], sweeps).values()
    assert len(found.times) == 4
    assert found.step.profile.step_s == 0.11
    times = {row.operation: row.time_s for row in found.step.work}
    assert times["mm"] == pytest.approx(1.1 * usual)


@pytest.mark.parametrize("folder", list_committed("work.csv"), ids=lambda f: f.name)
def test_no_bound_of_a_committed_sweep_is_below_what_it_measured(folder: Path) -> None:
    """All pairs of values of each axis, either way, where there are profiles."""
    sweeps = read_sweeps([folder])
    _, results = read_results(*sweeps)
    steps = read_steps(results, sweeps)
    bounded = 0
    for axis in find_varying(results):
        values = {getattr(one.run, axis) for one in steps.values()}
        for before, after in itertools.permutations(sorted(values, key=str), 2):
            for why in explain_pairs(steps, results, axis, (before, after)):
                assert why.reasons, [*describe(why)]
                if why.ceiling is None:  # compiled code moves less than is counted
                    assert why.a.case.compiled or why.b.case.compiled
                    continue
                assert why.ceiling.speedup >= (why.speedup.value or 0)
                bounded += 1
    assert bounded >= 4 or not any(one.step.profile for one in steps.values())


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_a_real_profile_is_explained(tmp_path: Path, capsys: Capture) -> None:
    """fp32 → bf16-amp on this CPU: what is left over of either step is within 5 %. Each trace is
    kept, and its work stands beside the records."""
    out = tmp_path / "sweep"
    command = (
        "--model dpn-small --dataset synthetic --precision fp32 bf16-amp --batch-size 16 --steps 2 "
        f"--repeats 1 --device cpu --trace --out {out}"
    )
    assert sweep_main(command.split()) == 0
    capsys.readouterr()
    files = [*(out / "traces").iterdir()]
    assert len(files) == 2
    assert all(read_trace(file).operators for file in files)
    records, work = read_records(out), read_work(out)
    assert records["profiled_steps"].between(1, MOST).all()
    assert work["time_s"].sum() == pytest.approx(records["busy_s"].sum())
    # on a CPU operators follow each other, and there are no kernels
    assert work["exclusive_s"].tolist() == pytest.approx(work["time_s"].tolist(), nan_ok=True)
    assert set(work["kernels"]) == {""}
    (found,) = explain(out, capsys=capsys)
    assert [found["a"]["name"], found["b"]["name"]] == ["fp32", "bf16-amp"]
    for side in (found["a"], found["b"]):
        assert abs(side["left_over_s"]) < 0.05 * side["step_s"]
        assert {"grouped_convolution", "normalisation", "optimizer"} <= {*side["parts"]}
    changed = sum(one["after_s"] - one["before_s"] for one in found["changes"])
    assert changed == pytest.approx(found["b"]["step_s"] - found["a"]["step_s"])
    assert "cast" in {one["name"] for one in found["changes"]}
