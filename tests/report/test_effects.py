"""What each change of an axis does, checked by hand and by property."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench import verdict
from bench.case import Case
from bench.compare.__main__ import main as compare_main
from bench.limits import STEADY
from bench.questions.effects import Effect
from bench.record import BESIDE, Record, Status
from bench.report.__main__ import main
from bench.report.document import Report, build
from bench.study.estimate import LOSS, TIME
from bench.study.sweeps import read_sweeps
from bench.verdict import Verdict
from tests.planted.records import GIB, make_record, measured, write_sweep
from tests.planted.sweeps import EFFECTS, MODELS

Run = Callable[..., tuple[int, str, str]]

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)


def ran(case: Case, times: Sequence[float], gib: float = 4, **values: Any) -> list[Record]:
    card = {"gpu": "A card", "torch": "2.13"}
    return [
        make_record(case, repeat=i, **{**card, **measured(time, gib * GIB), **values})
        for i, time in enumerate(times, 1)
    ]


def report_of(folder: Path, *rows: list[Record], **options: Any) -> Report:
    sweep = write_sweep(folder, [record for part in rows for record in part])
    return build(read_sweeps([sweep]), **options)


def pick(report: Report, axis: str, after: str) -> Effect:
    (found,) = [e for e in report.effects if (e.axis, e.after) == (axis, after)]
    return found


def speed(effect: Effect) -> float:
    assert effect.time is not None
    assert effect.time.ratio.value is not None
    return 1 / effect.time.ratio.value


def test_a_small_sweep_by_hand(tmp_path: Path) -> None:
    """fp16 is 2 and 3 times as fast at two batch sizes: sqrt(6) in the geometric mean."""
    report = report_of(
        tmp_path,
        ran(FP32, (100,), 8),
        ran(replace(FP32, batch_size=256), (90,), 16),
        ran(FP16, (50,), 4),
        ran(replace(FP16, batch_size=256), (30,), 4),
    )
    assert report.axes == ("precision", "batch_size")
    effect = pick(report, "precision", "fp16")
    assert (effect.before, len(effect.pairs)) == ("fp32", 2)
    assert speed(effect) == pytest.approx(math.sqrt(6))
    assert effect.time is not None
    assert (1 / effect.time.highest, 1 / effect.time.lowest) == pytest.approx((2, 3))
    assert effect.memory is not None
    assert effect.memory.ratio.value == pytest.approx(math.sqrt(4 / 8 * 4 / 16))
    assert effect.time.ratio.judge(STEADY) is Verdict.NONE  # single runs
    batch = pick(report, "batch_size", "256")
    assert speed(batch) == pytest.approx(math.sqrt(100 / 90 * 50 / 30))


def test_one_pair_has_the_interval_of_compare(tmp_path: Path) -> None:
    """Welch's, as `bench.compare` gives it: a single pair, a single change."""
    a, b = (100.0, 101.5, 99.2, 100.3), (49.0, 52.0, 50.5)
    report = report_of(tmp_path, ran(FP32, a), ran(FP16, b))
    (expected,) = verdict.compare([(a, b)])
    time = pick(report, "precision", "fp16").time
    assert time is not None
    for name in ("value", "low", "high", "p", "p_adjusted"):
        assert getattr(time.ratio, name) == pytest.approx(getattr(expected, name), rel=1e-9)


@pytest.mark.parametrize(
    ("axis", "before", "after"),
    [
        ("precision", FP32, FP16),
        ("compile", FP32, replace(FP32, compile="default")),
        ("batch_size", FP32, replace(FP32, batch_size=256)),
    ],
)
def test_report_and_compare_say_the_same(
    axis: str, before: Case, after: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one change: ratio, interval, p and verdict of each metric that both judge."""
    rows = [*ran(before, (100.0, 101.5, 99.2, 100.3)), *ran(after, (49.0, 52.0, 50.5))]
    folder = write_sweep(tmp_path, rows)
    assert main([str(folder), "--format", "json"]) == 0
    (effect,) = json.loads(capsys.readouterr().out)["effects"]
    values = (effect["before"], effect["after"])
    assert compare_main([str(folder), "--axis", axis, *values, "--format", "json"]) == 0
    compared = json.loads(capsys.readouterr().out)["metrics"]
    shared = effect["metrics"].keys() & compared.keys()
    assert "epoch_time_s" in shared
    for name in shared:
        (finding,) = compared[name]
        told = [key for key in ("speed", "ratio", "low", "high", "p", "exact") if key in finding]
        assert [effect["metrics"][name][key] for key in told] == [
            pytest.approx(finding[key]) for key in told
        ]
        assert effect["metrics"][name]["verdict"] == finding["verdict"]


@pytest.mark.slow
def test_p_values_are_adjusted_over_all_changes(tmp_path: Path) -> None:
    noisy = (100, 103, 98)
    cases = [replace(FP32, batch_size=64 * 2**i) for i in range(4)]
    report = report_of(tmp_path, *(ran(case, noisy) for case in cases))
    ratios = [effect.time.ratio for effect in report.effects if effect.time]
    assert len(ratios) == 3
    assert [ratio.p for ratio in ratios] == pytest.approx([1, 1, 1])
    tested = report_of(
        tmp_path / "b", *(ran(c, (100 - i, 101 - i, 102 - i)) for i, c in enumerate(cases))
    )
    ratios = [effect.time.ratio for effect in tested.effects if effect.time]
    expected = verdict.adjust([ratio.p for ratio in ratios if ratio.p is not None])
    assert [ratio.p_adjusted for ratio in ratios] == pytest.approx(expected)
    assert ratios[0].p_adjusted != ratios[0].p


@pytest.mark.slow
def test_planted_effects_are_found(switches: Path) -> None:
    """Three networks on two machines, two precisions, two switches: each axis acts on its own."""
    report = build(read_sweeps([switches]))
    assert report.axes == (
        "machine",
        "model",
        "precision",
        "batch_size",
        "compile",
        "channels_last",
    )
    for axis, after, pairs in (
        ("precision", "bf16-amp", 48),
        ("compile", "default", 48),
        ("channels_last", "on", 48),
    ):
        effect = pick(report, axis, after)
        assert len(effect.pairs) == pairs
        assert speed(effect) == pytest.approx(1 / EFFECTS[axis], rel=1e-6)
    assert speed(pick(report, "model", "dpn26")) == pytest.approx(1 / MODELS["dpn26"], rel=1e-6)
    assert speed(pick(report, "machine", "AMD EPYC")) == pytest.approx(1 / 60, rel=1e-6)
    last = pick(report, "channels_last", "on").time
    assert last is not None
    assert last.ratio.judge(STEADY) is Verdict.SAME
    compiled = pick(report, "compile", "default").time
    assert compiled is not None
    assert compiled.ratio.judge(STEADY) is Verdict.LOWER


@pytest.mark.slow
@settings(max_examples=8, deadline=None)  # each makes a report: 1.4 s
@given(
    base=st.floats(1e-3, 1e5),
    factors=st.lists(st.floats(0.1, 10), min_size=1, max_size=4, unique=True),
    wobble=st.lists(st.floats(0.9, 1.1), min_size=3, max_size=5),
)
def test_an_axis_without_effect_shows_one(
    base: float, factors: list[float], wobble: list[float]
) -> None:
    """Whatever the batch size does, a switch that changes nothing shows 1.00× and no loss."""
    rows = [
        ran(
            Case(batch_size=64 * 2**i, channels_last=last),
            [base * factor * w for w in wobble],
            train_loss=2.0,
        )
        for i, factor in enumerate(factors)
        for last in (False, True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = report_of(Path(folder), *rows)
    effect = pick(report, "channels_last", "on")
    assert speed(effect) == pytest.approx(1, abs=1e-9)
    assert effect.time is not None
    assert effect.time.lowest == pytest.approx(1)
    assert effect.time.highest == pytest.approx(1)
    assert effect.loss is not None
    assert effect.loss.difference == 0
    if effect.time.ratio.low is not None and effect.time.ratio.high is not None:
        assert effect.time.ratio.low <= 1 <= effect.time.ratio.high
    (table,) = [table for table in report.tables if table.name == "effects"]
    (row,) = [row for row in table.rows if "channels last" in row[0].text]
    assert "1.00×" in [cell.text for cell in row]


def test_pairs_agree_in_all_else(tmp_path: Path) -> None:
    """Cases that differ in two things are no pair: here nothing is."""
    report = report_of(tmp_path, ran(FP32, (100,)), ran(replace(FP16, compile="default"), (50,)))
    assert report.axes == ("precision", "compile")
    assert report.effects == ()


def test_how_much_was_measured_keeps_no_pair_apart(tmp_path: Path) -> None:
    """Times are of whole epochs; the losses of different parts are not held against each other."""
    part = replace(FP32, fraction=0.1)
    report = report_of(
        tmp_path, ran(part, (100,), train_loss=2.2), ran(FP16, (50,), train_loss=2.0)
    )
    assert report.axes == ("precision",)
    effect = pick(report, "precision", "fp16")
    assert speed(effect) == pytest.approx(2)
    assert effect.estimated
    assert effect.loss is None
    (table,) = [table for table in report.tables if table.name == "effects"]
    assert "≈2.00×" in [cell.text for cell in table.rows[0]]


def test_precisions_are_compared_at_their_main_loss_scale(tmp_path: Path) -> None:
    scales = [ran(replace(FP16, loss_scale=s), (t,)) for s, t in ((64.0, 10), (128.0, 50))]
    report = report_of(tmp_path, ran(FP32, (100,)), *scales)
    effect = pick(report, "precision", "fp16")
    assert (len(effect.pairs), speed(effect)) == (1, pytest.approx(2))
    assert speed(pick(report, "loss_scale", "128")) == pytest.approx(0.2)


def test_what_is_compared_with_what(tmp_path: Path) -> None:
    """Precisions with fp32, numbers with the next below, dynamic scales last, switches with off."""
    cases = [
        Case(precision="bf16"),
        Case(precision="tf32"),
        FP32,
        *(replace(FP32, batch_size=b) for b in (512, 256)),
        replace(FP32, compile="default"),
        *(replace(FP16, loss_scale=s) for s in ("dynamic", 256.0, 128.0)),
    ]
    report = report_of(tmp_path, *(ran(case, (100,)) for case in cases))
    assert [(e.axis, e.before, e.after) for e in report.effects] == [
        ("precision", "fp32", "tf32"),
        ("precision", "fp32", "fp16"),
        ("precision", "fp32", "bf16"),
        ("loss_scale", "128", "256"),
        ("loss_scale", "256", "dynamic"),
        ("batch_size", "128", "256"),
        ("batch_size", "256", "512"),
        ("compile", "off", "default"),
    ]


def test_what_failed_is_in_no_pair(tmp_path: Path) -> None:
    lost = ran(FP16, (50,), status=Status.INVALID, reason="throttled")
    assert report_of(tmp_path, ran(FP32, (100,)), lost).effects == ()


def test_the_loss_of_what_diverged_is_not_compared(tmp_path: Path) -> None:
    rows = ran(FP16, (50,), status=Status.DIVERGED, train_loss=9.0)
    report = report_of(tmp_path, ran(FP32, (100,), train_loss=2.0), rows)
    effect = pick(report, "precision", "fp16")
    assert set(effect.estimates) == {TIME.name, "memory_bytes"}
    assert effect.doubts == ("diverged",)


@pytest.mark.slow
def test_a_difference_of_loss_needs_seeds(tmp_path: Path) -> None:
    """Three repeats of one seed are one reading; three seeds are paired one by one."""

    def learnt(case: Case, losses: Sequence[float], same: bool) -> list[Record]:
        rows = ran(case, (100, 101, 102))
        for row, loss in zip(rows, losses, strict=True):
            row.measurement.train_loss = loss
            row.run_seed = 0 if same else row.run_seed
        return rows

    losses = ((2.0, 2.1, 2.2), (2.1, 2.21, 2.29))
    for same in (True, False):
        rows = [learnt(c, x, same) for c, x in zip((FP32, FP16), losses, strict=True)]
        effect = pick(report_of(tmp_path / str(same), *rows), "precision", "fp16")
        assert effect.loss is not None
        assert effect.loss.difference == pytest.approx(0.1)
        assert (effect.loss.reach is None) is same
        assert (effect.loss.ratio.judge(STEADY) is Verdict.NONE) is same
    # by hand: 4.303 (t of 2 degrees of freedom) × 0.01 (deviation of 0.1, 0.11, 0.09) / sqrt(3)
    assert effect.loss.reach == pytest.approx(4.3027 * 0.01 / math.sqrt(3), rel=1e-4)
    (expected,) = verdict.compare_seeds(
        [({s: [x] for s, x in enumerate(losses[0])}, {s: [x] for s, x in enumerate(losses[1])})]
    )
    assert effect.loss.ratio.low == pytest.approx(expected.low)


def test_losses_of_other_seeds_are_not_paired(tmp_path: Path) -> None:
    rows = []
    for case, losses, first in ((FP32, (2.0, 2.1, 2.2), 0), (FP16, (2.1, 2.2, 2.3), 10)):
        part = ran(case, (100, 101, 102))
        for row, loss in zip(part, losses, strict=True):
            row.measurement.train_loss, row.run_seed = loss, row.run_seed + first
        rows.append(part)
    loss = pick(report_of(tmp_path, *rows), "precision", "fp16").loss
    assert loss is not None
    # Welch by hand: 2.776 (t of 4 degrees of freedom) × sqrt(2 × 0.01 / 3)
    assert loss.reach == pytest.approx(2.7764 * math.sqrt(0.02 / 3), rel=1e-4)


def test_equal_losses_of_equal_seeds_are_the_same(tmp_path: Path) -> None:
    """Channels-last on one thread trains to the last digit alike: that is no wide interval."""
    rows = []
    for last in (False, True):
        part = ran(replace(FP32, channels_last=last), (100, 101, 102))
        for row, loss in zip(part, (2.0, 2.4, 2.8), strict=True):
            row.measurement.train_loss = loss
        rows.append(part)
    loss = pick(report_of(tmp_path, *rows), "channels_last", "on").estimates[LOSS.name]
    assert loss.ratio.exact
    assert loss.reach == 0


@pytest.mark.slow
def test_json_holds_the_effects(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path, [*ran(FP32, (100, 101, 99)), *ran(FP16, (50, 51, 49))])
    document = json.loads(report(folder, "--format", "json")[1])
    (effect,) = document["effects"]
    assert (effect["axis"], effect["before"], effect["after"]) == ("precision", "fp32", "fp16")
    assert effect["metrics"]["epoch_time_s"]["verdict"] == "faster"
    assert effect["metrics"]["epoch_time_s"]["speed"] == pytest.approx(2, rel=1e-3)


# ------------------------------------------------------------------------------------- start-up


def starting(case: Case, times: Sequence[float], firsts: Sequence[float]) -> list[Record]:
    """Runs that start in 2 s, and warm up in 2 s and their first steps."""
    rows = ran(case, times, setup_time_s=2.0)
    for row, first in zip(rows, firsts, strict=True):
        row.measurement.first_steps_time_s = first
        row.measurement.warmup_time_s = 2.0 + first
    return rows


def test_the_time_beside_training_is_shown_by_machine(tmp_path: Path) -> None:
    """The median of each part over all runs that say it, and of their sum."""
    parts = dict.fromkeys(BESIDE, 0.25)
    rows = ran(FP32, (20.1, 20, 19.9), **parts)
    rows[1].measurement.imports_s = 2.0
    rows[2].measurement.imports_s = 4.0
    rows += ran(FP16, (10.0,))  # as by an older harness
    (table,) = [table for table in report_of(tmp_path, rows).tables if table.name == "beside"]
    assert [head.label for head in table.heads] == ["runs", *BESIDE.values(), "all of these"]
    found = {head.name: cell.text for head, cell in zip(table.heads, table.rows[0], strict=True)}
    assert found.pop("runs") == "3"
    assert found.pop("imports_s") == "2.00"
    assert found.pop("all") == "4.00"
    assert set(found.values()) == {"0.25"}


def prices(report: Run, folder: Path) -> list[list[str]]:
    _, out, _ = report(folder, "--full")
    return [line.split() for line in out[out.index("What compiling") :].splitlines()]


@pytest.mark.slow
def test_compiling_pays_off_after_so_many_epochs(tmp_path: Path, report: Run) -> None:
    """30 s more at the start, 4 s less an epoch: 8 epochs. With a cache 2 s more: one."""
    off = starting(FP32, (20.1, 20, 19.9), (1, 1, 1))
    on = starting(replace(FP32, compile="default"), (16.1, 16, 15.9), (3, 31, 3))
    on[2].measurement.setup_time_s = 9.0  # a slow start of one repeat is noise
    plain = starting(FP16, (20,), (1,))
    never = starting(replace(FP16, compile="default"), (21,), (31,))
    rows = prices(report, write_sweep(tmp_path, [*off, *on, *never, *plain]))
    lines = [" ".join(row) for row in rows]
    assert "compile default fp32 3.000 33.00 5.000 4.000 8 epochs 1 epoch" in lines
    assert "compile default fp16 3.000 33.00 – -1.000 never –" in lines
    assert "Without 3 repeats of both cases" in " ".join(word for row in rows for word in row)


@pytest.mark.slow
def test_the_epochs_until_it_pays_off_have_the_range_of_the_times(
    tmp_path: Path, report: Run
) -> None:
    """Times that may be equal say nothing; those that differ give the fewest and the most."""
    off = starting(FP32, (21, 20, 19), (1, 1, 1))
    on = starting(replace(FP32, compile="default"), (16.6, 16, 15.4), (31, 3, 3))
    plain = starting(FP16, (21, 20, 19), (1, 1, 1))
    equal = starting(replace(FP16, compile="default"), (20.9, 19.9, 18.9), (31, 3, 3))
    rows = prices(report, write_sweep(tmp_path, [*off, *on, *plain, *equal]))
    (fp32,) = [row for row in rows if row[:3] == ["compile", "default", "fp32"]]
    (ratio,) = verdict.compare([((21, 20, 19), (16.6, 16, 15.4))])
    assert ratio.low is not None
    assert ratio.high is not None
    fewest, most = (math.ceil(30 / (20 * (1 - end))) for end in (ratio.low, ratio.high))
    assert fp32[-5:-2] == ["8", "epochs", f"({fewest}–{most})"]
    (fp16,) = [row for row in rows if row[:3] == ["compile", "default", "fp16"]]
    assert fp16[-2:] == ["cannot", "tell"]


@pytest.mark.slow
def test_each_mode_is_priced_against_none(tmp_path: Path, report: Run) -> None:
    """Modes are switches of their own; autotuning and capturing find nothing in a cache."""
    modes = {
        mode: starting(replace(FP32, compile=mode), (16.1, 16, 15.9), (31, 3, 3))
        for mode in ("default", "max-autotune")
    }
    off = starting(FP32, (20.1, 20, 19.9), (1, 1, 1))
    graphs = starting(replace(FP32, cuda_graphs=True), (10.1, 10, 9.9), (3, 3, 3))
    rows = prices(report, write_sweep(tmp_path, [*off, *graphs, *chain(*modes.values())]))
    text = [" ".join(row) for row in rows]
    assert text[0].startswith("What compiling and capturing costs")
    for mode in modes:
        assert any(f"compile {mode} " in line and "8 epochs" in line for line in text)
    (line,) = [line for line in text if line.startswith("cuda graphs")]
    assert "3.000 5.000 – 10.00 1 epoch" in line
    assert not any("max-autotune" in line and "default" in line for line in text)


@pytest.mark.slow
def test_pairs_that_disagree_are_told(tmp_path: Path, report: Run) -> None:
    """Channels-last brings nothing in fp32 and 1.11× in fp16: no mean hides that."""
    rows = []
    for case, factor in ((FP32, 1.0), (FP16, 0.9)):
        rows += ran(case, (100, 100.1, 99.9))
        times = [factor * t for t in (100.05, 100.1, 99.9)]
        rows += ran(replace(case, channels_last=True), times)
    folder = write_sweep(tmp_path, rows)
    built = build(read_sweeps([folder]))
    effect = pick(built, "channels_last", "on")
    assert effect.time is not None
    assert effect.time.mixed
    (table,) = [table for table in built.tables if table.name == "effects"]
    (row,) = [row for row in table.rows if "channels last" in row[0].text]
    assert [cell.text for cell in row][2] == "mixed"
    assert row[-1].text == "1.00× at fp32, 1.11× at fp16"
    assert "Mixed: pairs differ" in report(folder, "--full")[1]
    precision = pick(built, "precision", "fp16").time
    assert precision is not None
    assert precision.mixed  # 1.00× without channels-last, 1.11× with it


# ------------------------------------------------------------------------------------- overview


def overview(report: Report) -> list[list[str]]:
    return [[cell.text for cell in row] for row in report.tables[0].rows]


def test_one_overview_whatever_varies(tmp_path: Path) -> None:
    """A column an axis that varies; what is the same is said once, above."""
    cases = [
        replace(FP16, compile=mode, channels_last=last, cudnn_benchmark=True, fraction=fraction)
        for mode, last, fraction in (
            ("off", False, 0.1),
            ("default", False, 0.2),
            ("off", True, 0.3),
            ("default", True, 1.0),
        )
    ]
    report = report_of(tmp_path, *(ran(case, (100,)) for case in cases))
    (table,) = [table for table in report.tables if table.name == "overview"]
    assert [head.name for head in table.heads][:3] == ["compile", "channels_last", "epoch_time_s"]
    assert [row[:2] for row in overview(report)] == [
        ["off", "off"],
        ["off", "on"],
        ["default", "off"],
        ["default", "on"],
    ]
    assert [row[2][0] for row in overview(report)] == ["≈", "≈", "≈", "1"]
    assert report.constants[0] == (
        "All cases: dpn92 · cifar10 · fp16 · batch size 128 · cudnn benchmark · loss scale 128."
    )


def test_fraction_has_a_column_only_where_nothing_else_tells_rows_apart(tmp_path: Path) -> None:
    part = replace(FP32, fraction=0.5)
    report = report_of(tmp_path, ran(FP32, (100,)), ran(part, (99,)))
    assert [head.name for head in report.tables[0].heads][:2] == ["fraction", "epoch_time_s"]


@pytest.mark.slow
def test_neighbours_differ_in_one_thing(switches: Path) -> None:
    report = build(read_sweeps([switches]))
    (table,) = [table for table in report.tables if table.name == "overview"]
    assert sorted(table.groups.values()) == sorted(
        f"{place} · {model}" for place in ("NVIDIA H200", "AMD EPYC") for model in MODELS
    )
    starts = {*table.groups}
    rows = [[cell.text for cell in row[:4]] for row in table.rows]
    changed = [
        sum(x != y for x, y in zip(rows[i - 1], rows[i], strict=True))
        for i in range(1, len(rows))
        if i not in starts
    ]
    assert sum(n == 1 for n in changed) >= len(changed) / 2
    assert rows[: len(rows) // 6] == sorted(
        rows[: len(rows) // 6],
        key=lambda r: (r[0] != "fp32", int(r[1]), [x != "off" for x in r[2:]]),
    )


def test_by_an_axis_groups_by_it(tmp_path: Path, report: Run) -> None:
    cases = [replace(c, batch_size=b) for c in (FP32, FP16) for b in (64, 128)]
    folder = write_sweep(tmp_path, [row for case in cases for row in ran(case, (100,))])
    _, out, _ = report(folder, "--by", "batch-size")
    lines = [line.strip() for line in out.splitlines()]
    first, second = lines.index("batch size 64"), lines.index("batch size 128")
    assert first < second
    assert [lines[first + i].split()[0] for i in (1, 2)] == ["fp32", "fp16"]


@pytest.mark.slow
def test_where_chooses_cases_and_keeps_their_partners(tmp_path: Path, report: Run) -> None:
    cases = [replace(c, batch_size=b) for c in (FP32, FP16) for b in (64, 128)]
    folder = write_sweep(
        tmp_path, [r for c in cases for r in ran(c, (100 if c.precision == "fp32" else 50,))]
    )
    code, out, _ = report(folder, "--format", "json", "--where", "precision=fp16", "batch-size=64")
    (case,) = json.loads(out)["cases"]
    assert code == 0
    assert (case["precision"], case["batch_size"], case["speedup"]) == ("fp16", 64, 2)
    code, out, _ = report(folder, "--format", "json", "--where", "batch_size=64,128")
    assert len(json.loads(out)["cases"]) == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--where", "precision=fp61"], "did you mean 'fp16'?"),
        (["--where", "precision=bf16"], "no case has it; there is fp32"),
        (["--where", "precison=fp32"], "did you mean 'precision'?"),
        (["--where", "precision"], "write AXIS=VALUE"),
        (["--by", "precison"], "did you mean 'precision'?"),
    ],
)
def test_bad_choices_are_one_line_and_rc_2(
    tmp_path: Path, report: Run, flags: list[str], said: str
) -> None:
    folder = write_sweep(tmp_path, ran(FP32, (100,)))
    code, out, err = report(folder, *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_outcomes_are_counted_at_the_end(tmp_path: Path, report: Run) -> None:
    lost = make_record(FP16, status=Status.OOM, reason="2 GiB", gpu="A card", torch="2.13")
    folder = write_sweep(tmp_path, [*ran(FP32, (100, 101)), lost])
    _, out, _ = report(folder, "--full")
    assert out.splitlines()[-1] == "2 cases in 3 runs: 1 ok, 1 out of memory."


# -------------------------------------------------------------------------------------- 80 columns


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 60, 120])
def test_text_is_no_wider_than_asked(
    switches: Path, report: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = report(switches, "--full")
    assert max(map(len, out.splitlines())) <= columns
    assert re.search(r"NVIDIA H200 · dpn92\n", out)
    if columns >= 80:
        assert "60.00 (59.88–60.12)" in out
    assert ("Not shown at this width: " in out) is (columns < 120)


@pytest.mark.slow
def test_where_nothing_asks_for_a_width_every_column_is_shown(switches: Path, report: Run) -> None:
    _, out, _ = report(switches, "--full")
    assert "Not shown" not in out


# ------------------------------------------------------------------------------- what is no pair


def test_the_mean_over_two_pairs_by_hand(tmp_path: Path) -> None:
    """Pairs of unlike noise: the variances add, and Satterthwaite's freedom follows the noisier."""
    samples = (
        ((100.0, 101.0, 99.0), (50.0, 50.2, 49.9)),
        ((80.0, 86.0, 75.0), (60.0, 63.0, 57.5)),
    )
    rows = []
    for batch, (a, b) in zip((128, 256), samples, strict=True):
        rows += [ran(replace(FP32, batch_size=batch), a), ran(replace(FP16, batch_size=batch), b)]
    time = pick(report_of(tmp_path, *rows), "precision", "fp16").time
    assert time is not None
    logs = [[[math.log(x) for x in side] for side in pair] for pair in samples]
    parts = [variance(side) / 3 for pair in logs for side in pair]
    errors = [parts[0] + parts[1], parts[2] + parts[3]]
    shift = sum(fmean(b) - fmean(a) for a, b in logs) / 2
    error = math.sqrt(sum(errors)) / 2
    freedoms = [
        sum(pair) ** 2 / (pair[0] ** 2 / 2 + pair[1] ** 2 / 2) for pair in (parts[:2], parts[2:])
    ]
    freedom = sum(errors) ** 2 / sum(e**2 / f for e, f in zip(errors, freedoms, strict=True))
    reach = stats.t.ppf(0.975, freedom) * error
    assert time.ratio.low == pytest.approx(math.exp(shift - reach))
    assert time.ratio.high == pytest.approx(math.exp(shift + reach))


@pytest.mark.slow
def test_environments_are_not_mixed(tmp_path: Path) -> None:
    """Cases under another torch are no pair; nor are machines where it is open which is meant."""
    other = {"torch": "2.12"}
    apart = report_of(tmp_path / "a", ran(FP32, (100,)), ran(FP16, (50,), **other))
    assert apart.effects == ()
    mixed = write_sweep(
        tmp_path / "b",
        [
            *ran(FP32, (200,), **other),
            *ran(FP32, (100,), attempt=2),
            *ran(FP32, (100,), gpu="B card"),
        ],
    )
    assert build(read_sweeps([mixed])).effects == ()


@pytest.mark.slow
def test_what_was_not_measured_is_in_no_mean(tmp_path: Path) -> None:
    """Published figures beside measured ones are compared with each other alone, or not at all."""
    theirs = [replace(case, batch_size=256) for case in (FP32, FP16)]
    published = [
        ran(case, (time,), executor="published", gpu="Old card")
        for case, time in zip(theirs, (200, 150), strict=True)
    ]
    both = report_of(tmp_path / "a", ran(FP32, (100,)), ran(FP16, (50,)), *published)
    effect = pick(both, "precision", "fp16")
    assert (len(effect.pairs), speed(effect)) == (1, pytest.approx(2))
    alone = report_of(tmp_path / "b", *published)
    assert speed(pick(alone, "precision", "fp16")) == pytest.approx(200 / 150)


def test_numbers_are_compared_with_the_next_below_that_was_run(tmp_path: Path) -> None:
    """One network at 64 and 256, the other at 128 and 512: two steps, a pair each."""
    sizes = {"dpn92": (64, 256), "dpn26": (128, 512)}
    rows = [
        ran(Case(model=model, batch_size=batch), (100 if i == 0 else 80,))
        for model, batches in sizes.items()
        for i, batch in enumerate(batches)
    ]
    effects = [e for e in report_of(tmp_path, *rows).effects if e.axis == "batch_size"]
    assert [(e.before, e.after, len(e.pairs)) for e in effects] == [
        ("64", "256", 1),
        ("128", "512", 1),
    ]


def test_equal_parts_of_an_epoch_are_preferred(tmp_path: Path) -> None:
    """fp32 ran whole and in part, fp16 in part: the parts are compared, with their losses."""
    part32, part16 = replace(FP32, fraction=0.1), replace(FP16, fraction=0.1)
    report = report_of(
        tmp_path,
        ran(FP32, (110,), train_loss=1.5),
        ran(part32, (100,), train_loss=2.2),
        ran(part16, (50,), train_loss=2.1),
    )
    effect = pick(report, "precision", "fp16")
    assert speed(effect) == pytest.approx(2)
    assert effect.loss is not None
    assert effect.loss.difference == pytest.approx(-0.1)


def some_steps(case: Case, steps: int, of: int, time_s: float, **values: Any) -> list[Record]:
    counts = {"measured_steps": steps, "steps_per_epoch": of}
    return ran(replace(case, steps=steps), (time_s,), **counts, **values)


@pytest.mark.slow
def test_times_of_a_few_steps_are_compared_over_equal_parts_of_an_epoch(tmp_path: Path) -> None:
    """20 steps at batch size 256 are of twice as many images as at 128; 10 are of as many.

    What a batch size does to the loss is not told before the end of an epoch.
    """
    large = replace(FP32, batch_size=256)
    unequal = report_of(
        tmp_path / "unequal",
        some_steps(FP32, 20, 400, 100, train_loss=2.2),
        some_steps(large, 20, 200, 50, train_loss=2.0),
    )
    effect = pick(unequal, "batch_size", "256")
    assert speed(effect) == pytest.approx(2)
    assert effect.estimated
    assert effect.loss is None
    equal = report_of(
        tmp_path / "equal",
        some_steps(FP32, 20, 400, 100, train_loss=2.2),
        some_steps(large, 20, 200, 50, train_loss=2.0),
        some_steps(large, 10, 200, 40, train_loss=2.1),
    )
    effect = pick(equal, "batch_size", "256")
    assert speed(effect) == pytest.approx(2.5)
    assert effect.loss is None


def test_cases_that_differ_only_in_their_steps_are_compared_all_the_same(tmp_path: Path) -> None:
    """They are no two environments of which none is meant: whole epochs go first."""
    report = report_of(
        tmp_path,
        ran(FP32, (100,), train_loss=1.5),
        some_steps(FP32, 20, 400, 90, train_loss=2.2),
        ran(FP16, (50,), train_loss=1.4),
        some_steps(FP16, 20, 400, 45, train_loss=2.0),
    )
    effect = pick(report, "precision", "fp16")
    assert (len(effect.pairs), speed(effect)) == (1, pytest.approx(2))
    assert not effect.estimated
    assert effect.loss is not None
    assert effect.loss.difference == pytest.approx(-0.1)


def test_pairs_with_repeats_are_judged_without_the_others(tmp_path: Path) -> None:
    rows = [ran(FP32, (100, 101, 99)), ran(FP16, (50, 51, 49))]
    rows += [ran(replace(c, batch_size=256), (t, t)) for c, t in ((FP32, 90), (FP16, 90))]
    report = report_of(tmp_path, *rows)
    effect = pick(report, "precision", "fp16")
    assert effect.time is not None
    assert (effect.time.pairs, len(effect.pairs)) == (1, 2)
    assert effect.time.ratio.judge(STEADY) is Verdict.LOWER
    (table,) = [table for table in report.tables if table.name == "effects"]
    assert "1 of 2" in [cell.text for cell in table.rows[0]]


def test_memory_and_energy_of_whole_epochs(tmp_path: Path) -> None:
    """A tenth of an epoch takes a tenth of the energy; memory that repeats exactly is exact."""
    part = replace(FP16, fraction=0.1)
    rows = [
        ran(FP32, (100, 101, 99), 8, energy_j=1000.0, measured_images=50000),
        ran(part, (50, 51, 49), 4, energy_j=50.0, measured_images=5000),
    ]
    effect = pick(report_of(tmp_path, *rows), "precision", "fp16")
    assert effect.energy is not None
    assert effect.energy.ratio.value == pytest.approx(0.5)
    assert effect.energy.ratio.lack  # a meter that repeats to the last digit was not read again
    assert effect.memory is not None
    assert effect.memory.ratio.exact


# ------------------------------------------------------------------------------- like with like

AMP = Case(precision="fp16-amp", loss_scale="dynamic")


def at(batch: int, *cases: Case) -> list[Case]:
    return [replace(case, batch_size=batch) for case in cases]


def table_of(report: Report, name: str) -> list[dict[str, str]]:
    """The rows of a table, by the names of their heads."""
    return [
        {head.name: cell.text for head, cell in zip(table.heads, row, strict=True)}
        for table in report.tables
        if table.name == name
        for row in table.rows
    ]


def test_precisions_are_compared_at_the_batch_sizes_that_all_have(tmp_path: Path) -> None:
    """fp16 at three batch sizes is slower in the mean than fp16-amp at one, and faster at that."""
    times = {128: (100, 50), 256: (90, 30), 512: (80, 25)}
    rows = [
        ran(case, (time,), 8, energy_j=float(time))
        for batch, both in times.items()
        for case, time in zip(at(batch, FP32, FP16), both, strict=True)
    ]
    report = report_of(tmp_path, *rows, *(ran(case, (31,)) for case in at(256, AMP)))
    fp16, amp = (pick(report, "precision", name) for name in ("fp16", "fp16-amp"))
    assert (speed(fp16), speed(amp)) == (pytest.approx(90 / 30), pytest.approx(90 / 31))
    assert (len(fp16.pairs), fp16.over, amp.over) == (3, "batch size 256", "batch size 256")
    assert not fp16.apart
    row = next(row for row in table_of(report, "effects") if "→ fp16" in row["change"])
    assert (row["pairs"], row["over"]) == ("1 of 3", "batch size 256")
    # energy is that of fp16 and fp32 alone, and so over all of their pairs
    assert row["energy"].endswith("(3 of 3)")
    (said, *_) = report.answers[0].sentences
    assert said.startswith(
        "All else equal (batch size 256), fp16 trains 3.00 times as fast as fp32"
    )
    (table,) = [table for table in report.tables if table.name == "effects"]
    assert any("--where precision=fp32,fp16 compares these two" in note for note in table.notes)
    # where all ran the same, nothing has to be said of it
    alone = report_of(tmp_path / "alone", *rows)
    fp16 = pick(alone, "precision", "fp16")
    assert speed(fp16) == pytest.approx((100 / 50 * 90 / 30 * 80 / 25) ** (1 / 3))
    assert fp16.over == ""
    assert "over" not in table_of(alone, "effects")[0]


def test_precisions_without_a_batch_size_in_common_are_not_ranked(tmp_path: Path) -> None:
    cases = [*at(128, FP32, FP16), *at(512, FP32, AMP)]
    report = report_of(
        tmp_path, *(ran(c, (t,)) for c, t in zip(cases, (90, 30, 80, 20), strict=True))
    )
    fp16, amp = (pick(report, "precision", name) for name in ("fp16", "fp16-amp"))
    assert (speed(fp16), speed(amp)) == (pytest.approx(3), pytest.approx(4))
    assert (fp16.over, amp.over) == ("batch size 128", "batch size 512")
    assert fp16.apart
    said, apart, *_ = report.answers[0].sentences
    assert said == (
        "All else equal, fp16 trains 3.00 times as fast as fp32 at batch size 128; "
        "fp16-amp 4.00 times at batch size 512."
    )
    assert apart == "They have no settings in common, and are not to be ranked."
    (table,) = [table for table in report.tables if table.name == "effects"]
    assert any("do not rank them" in note for note in table.notes)


def test_repeats_are_alike_too(tmp_path: Path) -> None:
    """An interrupted sweep: three repeats of fp16 at two batch sizes, of fp16-amp at one."""
    slow, fast, once = (100, 101, 99), (50, 51, 49), (20,)
    rows = [ran(case, slow) for batch in (128, 256) for case in at(batch, FP32)]
    rows += [ran(at(128, FP16)[0], fast), ran(at(256, FP16)[0], [t / 2 for t in fast])]
    rows += [ran(at(128, AMP)[0], fast), ran(at(256, AMP)[0], once)]
    report = report_of(tmp_path, *rows)
    for name in ("fp16", "fp16-amp"):
        effect = pick(report, "precision", name)
        assert (speed(effect), effect.over) == (pytest.approx(2, rel=0.01), "batch size 128")
        assert effect.time is not None
        assert effect.time.ratio.judge(STEADY) is Verdict.LOWER


def test_steps_of_a_number_say_what_each_is_over(tmp_path: Path) -> None:
    """fp32 ends at 256, so that the last step is of fp16 alone."""
    cases = [*at(128, FP32, FP16), *at(256, FP32, FP16), *at(512, FP16)]
    report = report_of(tmp_path, *(ran(case, (100,)) for case in cases))
    found = {e.after: (e.over, e.apart) for e in report.effects if e.axis == "batch_size"}
    assert found == {"256": ("fp32, fp16", False), "512": ("fp16", False)}


def test_doubts_are_of_the_cases_that_are_compared(tmp_path: Path) -> None:
    cases = [*at(128, FP32, FP16), *at(256, FP32, FP16, AMP)]
    rows = [ran(case, (100,), warmup_steady=case.batch_size == 256) for case in cases]
    report = report_of(tmp_path, *rows)
    assert pick(report, "precision", "fp16").doubts == ()
    assert pick(report, "batch_size", "256").doubts == ("noisy",)


def seeded(case: Case, losses: dict[int, float]) -> list[Record]:
    """A run of each seed."""
    rows = ran(case, [100 + seed for seed in losses])
    for row, (seed, loss) in zip(rows, losses.items(), strict=True):
        row.measurement.train_loss, row.run_seed = loss, seed
    return rows


def test_a_difference_of_loss_is_over_seeds_that_both_sides_ran(tmp_path: Path) -> None:
    """Each batch size shows next to no difference; a seed that only fp32 ran is far off."""
    small, large = at(128, FP32, FP16), at(256, FP32, FP16)
    rows = [
        seeded(small[0], {0: 2.000, 1: 2.100, 2: 2.200}),
        seeded(small[1], {0: 1.998, 1: 2.098}),
        seeded(large[0], {0: 2.300, 1: 2.350, 2: 2.600}),
        seeded(large[1], {0: 2.300}),
    ]
    report = report_of(tmp_path, *rows)
    loss = pick(report, "precision", "fp16").loss
    assert loss is not None
    assert loss.difference == pytest.approx((-0.002 + 0.0) / 2)
    assert (loss.lowest, loss.highest) == (pytest.approx(1.998 / 2), pytest.approx(1))
    (by_batch,) = [t for t in report.tables if t.name == "matched"]
    column = [head.name for head in by_batch.heads].index("loss")
    assert [row[column].text for row in by_batch.rows] == ["-0.002", "0.000"]


def test_pairs_without_a_seed_in_common_are_each_of_their_own(tmp_path: Path) -> None:
    """No seed is in all four cases; each pair has one of its own."""
    small, large = at(128, FP32, FP16), at(256, FP32, FP16)
    rows = [
        seeded(small[0], {0: 2.0, 1: 9.0}),
        seeded(small[1], {0: 2.1}),
        seeded(large[0], {7: 2.5, 1: 8.0}),
        seeded(large[1], {7: 2.7}),
    ]
    loss = pick(report_of(tmp_path, *rows), "precision", "fp16").loss
    assert loss is not None
    assert loss.difference == pytest.approx((0.1 + 0.2) / 2)


# ------------------------------------------------------------------- less than an epoch, the host


def test_before_the_end_of_an_epoch_no_learning_is_a_result(tmp_path: Path, report: Run) -> None:
    """Neither accuracy nor loss by batch size or loss scale; precisions at equal steps are told."""
    learnt = {"train_loss": 2.5, "train_accuracy": 0.31, "test_accuracy": 0.33}
    scaled = replace(FP16, loss_scale=64.0)
    cases = [*at(128, FP32, FP16), *at(256, FP32, FP16, scaled), *at(512, FP32)]
    part = [ran(replace(case, fraction=0.2), (100,), **learnt) for case in cases]
    shown = report_of(tmp_path / "part", *part)
    heads = {head.name for table in shown.tables for head in table.heads}
    assert not heads & {"train_loss", "train_accuracy", "test_accuracy"}
    assert {e.axis for e in shown.effects if e.loss} == {"precision"}
    note = next(note for note in shown.notes if "of an epoch was measured" in note)
    assert "Loss and accuracy are shown of whole epochs only" in note
    assert note.endswith("Use --fraction 1 to measure whole epochs.")
    document = json.loads(report(tmp_path / "part", "--format", "json")[1])
    assert {case["train_accuracy"] for case in document["cases"]} == {0.31}, "raw values stay"
    # whole epochs show all of it
    whole = report_of(tmp_path / "whole", *(ran(case, (100,), **learnt) for case in cases))
    heads = {head.name for table in whole.tables for head in table.heads}
    assert heads >= {"train_loss", "train_accuracy", "test_accuracy"}
    assert {e.axis for e in whole.effects if e.loss} == {"precision", "batch_size", "loss_scale"}
    assert not any("whole epochs only" in note for note in whole.notes)


def test_a_host_bound_case_says_so_beside_its_speed_up(tmp_path: Path) -> None:
    """The GPU runs kernels for 34 of 45 ms; without a profile nobody knows."""
    small, large = at(128, FP32, FP16), at(512, FP32, FP16)
    step = {"step_time_median_s": 0.1, "busy_s": 0.098, "profiled_step_s": 0.11}
    waits = {"step_time_median_s": 0.045, "busy_s": 0.034, "profiled_step_s": 0.087}
    rows = [(small[0], 100, step), (small[1], 45, waits), (large[0], 100, step), (large[1], 60, {})]
    report = report_of(tmp_path, *(ran(case, (time,), **values) for case, time, values in rows))
    effect = pick(report, "precision", "fp16")
    assert effect.doubts == ("host-bound",)
    said, _, fastest, *_ = report.answers[0].sentences
    busy = "host-bound: GPU busy for 76 % of a step"
    assert f"fp16 · batch size 128 is {busy}" in said
    assert busy in fastest
    remarks = {row["batch_size"]: row["remarks"] for row in table_of(report, "overview")[2:]}
    assert remarks == {"128": "host-bound", "512": ""}
    plain = [(case, time, {}) for case, time, _ in rows]
    unknown = report_of(tmp_path / "b", *(ran(c, (t,), **values) for c, t, values in plain))
    assert pick(unknown, "precision", "fp16").doubts == ()


# ------------------------------------------------------------------------------------- learning


def lessons(tmp_path: Path, losses: dict[Case, Sequence[float]], **values: Any) -> dict[str, str]:
    rows = []
    for case, of_seeds in losses.items():
        part = ran(case, [100 + i for i in range(len(of_seeds))], **values)
        for row, loss in zip(part, of_seeds, strict=True):
            row.measurement.train_loss = loss
        rows.append(part)
    (found,) = learnt_table(report_of(tmp_path, *rows))
    return found


def test_equivalence_has_to_hold_in_every_case(tmp_path: Path) -> None:
    """Ten per cent worse at one batch size and better at the other is no equivalence."""
    seeds, large = (1.0, 1.1, 1.2, 1.3), replace(FP32, batch_size=256)
    losses = {
        FP32: seeds,
        large: seeds,
        FP16: [1.1 * x for x in seeds],
        replace(FP16, batch_size=256): [x / 1.1 for x in seeds],
    }
    found = lessons(tmp_path, losses)
    assert found["verdict"] == "cannot tell"
    assert found["remarks"] == "not in every case, from 0.909 to 1.100 over the cases"


def test_equal_losses_of_guessing_show_nothing(tmp_path: Path) -> None:
    seeds = (2.309, 2.304, 2.311)
    found = lessons(tmp_path, {FP32: seeds, FP16: seeds})
    assert found["verdict"] == "cannot tell"
    assert "guessing" in found["remarks"]


@pytest.mark.slow
def test_what_was_learnt_in_a_few_steps_is_of_part_of_an_epoch(tmp_path: Path) -> None:
    seeds, counts = (1.0, 1.1, 1.2, 1.3), {"measured_steps": 20, "steps_per_epoch": 400}
    few = {replace(case, steps=20): seeds for case in (FP32, FP16)}
    assert lessons(tmp_path / "few", few, **counts)["remarks"] == "after 5 % of an epoch"
    whole = {replace(case, steps=500): seeds for case in (FP32, FP16)}
    counts["measured_steps"] = 400
    assert "remarks" not in lessons(tmp_path / "whole", whole, **counts)  # there are none


@pytest.mark.slow
def test_what_diverged_is_not_left_out_in_silence(tmp_path: Path) -> None:
    seeds = (1.0, 1.1, 1.2)
    rows = []
    for case in (FP32, FP16):
        for batch in (128, 256):
            part = ran(replace(case, batch_size=batch), (100, 101, 102))
            for row, loss in zip(part, seeds, strict=True):
                row.measurement.train_loss = loss
                if case is FP16 and batch == 256:
                    row.status, row.reason = Status.DIVERGED, "the loss became NaN"
            rows.append(part)
    (found,) = learnt_table(report_of(tmp_path, *rows))
    assert found["pairs"] == "1 of 2"


def learnt_table(report: Report) -> list[dict[str, str]]:
    """The rows of the table on learning, by the names of their heads."""
    tables = [table for table in report.tables if table.name == "learning"]
    return [
        {head.name: cell.text for head, cell in zip(table.heads, row, strict=True)}
        for table in tables
        for row in table.rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "wobble", "verdict"),
    [
        (1.0, 0.001, "equivalent"),
        (1.1, 0.001, "worse"),
        (0.9, 0.001, "better"),
        (1.0, 0.05, "cannot tell"),
    ],
)
def test_whether_a_precision_learns_as_well(
    tmp_path: Path, factor: float, wobble: float, verdict: str
) -> None:
    """Over two batch sizes and five seeds; seeds differ by far more than the margin."""
    rows = []
    for case in (FP32, FP16):
        for batch in (128, 256):
            part = ran(replace(case, batch_size=batch), (100, 101, 102, 103, 104))
            for i, row in enumerate(part):
                loss = (1.0 + batch / 1000) * (1 + 0.1 * i)
                if case is FP16:
                    loss *= factor * (1 + wobble * (-1) ** i)
                row.measurement.train_loss = loss
                row.measurement.test_accuracy = 0.5
            rows.append(part)
    found = learnt_table(report_of(tmp_path, *rows))
    assert [(row["change"], row["metric"], row["verdict"]) for row in found] == [
        ("fp32 → fp16", "training loss", verdict),
        ("fp32 → fp16", "test top-1 error", "equivalent"),
    ]
    assert found[0]["seeds"] == "5"
    assert (found[0].get("needed", "–") != "–") is (verdict == "cannot tell")


def test_one_seed_says_nothing_of_learning(tmp_path: Path) -> None:
    rows = [ran(case, (100,), train_loss=2.0) for case in (FP32, FP16)]
    assert learnt_table(report_of(tmp_path, *rows)) == []


def test_what_stands_for_a_precision_is_chosen_in_each_group(tmp_path: Path) -> None:
    """The default scale where it ran, else the lowest; no skipped overflows; no opt level."""
    apex = Case(precision="fp16-apex", loss_scale=128.0)
    large = replace(FP32, batch_size=256)
    report = report_of(
        tmp_path,
        ran(FP32, (100,)),
        ran(large, (100,)),
        ran(replace(FP16, skip_overflow=True), (10,)),
        ran(FP16, (50,)),
        ran(replace(FP16, batch_size=256, loss_scale=512.0), (10,)),
        ran(replace(FP16, batch_size=256, loss_scale=64.0), (50,)),
        ran(replace(apex, opt_level="O1"), (10,)),
        ran(apex, (25,)),
    )
    fp16 = pick(report, "precision", "fp16")
    assert (len(fp16.pairs), speed(fp16)) == (2, pytest.approx(2))
    assert speed(pick(report, "precision", "fp16-apex")) == pytest.approx(4)
