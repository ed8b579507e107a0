"""What each change of an axis does, checked by hand and by property."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bench.case import Case
from bench.compare.__main__ import main as compare_main
from bench.questions.effects import EFFECTS, Effect
from bench.record import Record
from bench.report.__main__ import main
from bench.report.document import Report, build
from bench.study.sweeps import read_sweeps
from bench.verdict.difference import adjust
from bench.verdict.seeds import compare_seeds
from tests.planted.records import ran, write_sweep

Run = Callable[..., tuple[int, str, str]]

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)


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


def test_p_values_are_adjusted_over_all_changes(tmp_path: Path) -> None:
    cases = [replace(FP32, batch_size=64 * 2**i) for i in range(4)]
    report = report_of(
        tmp_path, *(ran(c, (100 - i, 101 - i, 102 - i)) for i, c in enumerate(cases))
    )
    ratios = [effect.time.ratio for effect in report.effects if effect.time]
    assert len(ratios) == 3
    expected = adjust([ratio.p for ratio in ratios if ratio.p is not None])
    assert [ratio.p_adjusted for ratio in ratios] == pytest.approx(expected)
    assert ratios[0].p_adjusted != ratios[0].p


@settings(max_examples=5, deadline=None)  # each makes a report
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
    (table,) = EFFECTS.tabulate(report)
    (row,) = [row for row in table.rows if "channels last" in row[0].text]
    assert "1.00×" in [cell.text for cell in row]


@pytest.mark.parametrize(
    ("first", "reach"),
    [
        # 4.303 (t of 2 degrees of freedom) × 0.01 (deviation of 0.1, 0.11, 0.09) / sqrt(3)
        (0, 4.3027 * 0.01 / math.sqrt(3)),
        # other seeds are not paired; Welch: 2.776 (t of 4) × the root of both variances over 3
        (10, 2.7764 * math.sqrt((0.01 + 0.0091) / 3)),
    ],
)
def test_a_difference_of_loss_by_hand(first: int, reach: float, tmp_path: Path) -> None:
    losses = ((2.0, 2.1, 2.2), (2.1, 2.21, 2.29))
    rows = [ran(case, (100, 101, 102)) for case in (FP32, FP16)]
    for part, values, start in zip(rows, losses, (0, first), strict=True):
        for row, loss in zip(part, values, strict=True):
            row.measurement.train_loss, row.run_seed = loss, row.run_seed + start
    loss = pick(report_of(tmp_path, *rows), "precision", "fp16").loss
    assert loss is not None
    assert loss.difference == pytest.approx(0.1)
    assert loss.reach == pytest.approx(reach, rel=1e-3)
    sides = [dict(enumerate([[x] for x in x], s)) for x, s in zip(losses, (0, first), strict=True)]
    (expected,) = compare_seeds([(sides[0], sides[1])])
    assert loss.ratio.low == pytest.approx(expected.low)


def test_single_runs_of_one_change_take_no_verdict_from_another(tmp_path: Path) -> None:
    """fp16 has repeats at 128 alone, and bf16 nowhere: it is over 128 that both are compared."""
    three, one = (100.0, 101.0, 102.0), (100.0,)
    bf16 = Case(precision="bf16")
    rows = [ran(case, three) for case in (FP32, FP16)] + [ran(bf16, one)]
    rows += [ran(replace(case, batch_size=256), one) for case in (FP32, FP16, bf16)]
    report = report_of(tmp_path, *rows)
    fp16, other = (pick(report, "precision", after).time for after in ("fp16", "bf16"))
    assert fp16 is not None
    assert other is not None
    assert (fp16.pairs, other.pairs) == (1, 1)
    assert fp16.ratio.p is not None


def test_a_case_with_a_loss_of_zero_is_judged_by_its_difference(tmp_path: Path) -> None:
    """And of all its repeats: what would be left out is the best of them."""
    rows = [ran(case, (100, 101, 102)) for case in (FP32, FP16)]
    for part in rows:
        for row, loss in zip(part, (2.0, 2.1, 2.2), strict=True):
            row.measurement.train_loss = loss
    rows[1][0].measurement.train_loss = 0.0
    effect = pick(report_of(tmp_path, *rows), "precision", "fp16")
    assert effect.time is not None
    assert effect.loss is not None
    assert effect.loss.difference == pytest.approx(-2.0 / 3)


# ------------------------------------------------------------------------------------- overview


def test_by_an_axis_groups_by_it(tmp_path: Path, report: Run) -> None:
    cases = [replace(c, batch_size=b) for c in (FP32, FP16) for b in (64, 128)]
    folder = write_sweep(tmp_path, [row for case in cases for row in ran(case, (100,))])
    _, out, _ = report(folder, "--by", "batch-size")
    lines = [line.strip() for line in out.splitlines()]
    first, second = lines.index("batch size 64"), lines.index("batch size 128")
    assert first < second
    assert [lines[first + i].split()[0] for i in (1, 2)] == ["fp32", "fp16"]


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


WAITS = {"busy_s": 0.03, "step_time_median_s": 0.05, "step_time_mad_s": 0.005}


@pytest.mark.parametrize("repeats", [1, 3])
def test_nothing_is_compared_with_steps_that_wait_and_do_not_settle(
    repeats: int, tmp_path: Path
) -> None:
    """fp32 at batch size 128 waits for the host, and its step times vary by 10 %: a single run of
    it is no baseline, and three are."""
    small, large = replace(FP32, profile=True), replace(FP32, batch_size=256)
    halves = [replace(case, precision="fp16", loss_scale=128.0) for case in (small, large)]
    report = report_of(
        tmp_path,
        ran(small, [100.0, 101.0, 102.0][:repeats], **WAITS, measured_steps=40),
        ran(large, [90.0] * 3),
        *(ran(half, [50.0, 51.0, 52.0][:repeats]) for half in halves),
    )
    assert [result.unsettled for result in report.results] == [True, False, False, False]
    told = [result.speedup == result.speedup for result in report.results[2:]]
    assert told == [repeats == 3, True]
    assert pick(report, "precision", "fp16").time.pairs == (2 if repeats == 3 else 1)  # type: ignore[union-attr]
    said = " ".join(report.answers[0].sentences)
    assert ("waits for the host and does not settle" in said) == (repeats == 1), said
    assert "Not settled" in {notice.label for notice in report.warnings}
