"""What each change of an axis does: what is paired with what, in numbers known by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median, variance
from typing import Any

import pytest
from scipy import stats

from bench.compare.__main__ import main as compare_main
from bench.report.document import Report
from bench.results.study.effects import Effect
from bench.schema.case import Case
from bench.schema.record import Record, Status
from bench.schema.rules import settle
from tests.planted.records import FP16, FP32, at, learn, ran, some_steps
from tests.planted.results import read_report, tell
from tests.pytest_for_tests import Capture

WIDE32, WIDE16 = at(256, FP32, FP16)
THREE, HALF = (100, 101, 99), (50, 51, 49)
FEW, SEEDS = {"train_loss": 2.2}, (1.0, 1.1, 1.2, 1.3)


def runs(*cases: tuple[Case, float], **values: Any) -> list[Record]:
    """A run of each case, with its time."""
    return [row for case, time in cases for row in ran(case, (time,), **values)]


PAIRED: dict[str, tuple[list[Record], list[str]]] = {
    "the default scale where it ran, else the lowest; no opt level": (
        runs(
            (FP32, 100), (WIDE32, 100),
            (FP16, 50), (replace(FP16, batch_size=256, loss_scale=512.0), 10),
            (replace(FP16, batch_size=256, loss_scale=64.0), 50),
            (Case(precision="fp16-apex", loss_scale=128.0, opt_level="O1"), 10),
            (Case(precision="fp16-apex", loss_scale=128.0), 25),
        ),
        [
            "precision: fp32 → fp16 | 2.00× | 1 of 2",
            "precision: fp32 → fp16-apex | 4.00× | 1",
            "loss scale: 64 → 512 | 5.00× | 1",
            "batch size: 128 → 256 | 1.00× | 1",
            "opt level: none → O1 | 2.50× | 1",
        ],
    ),
    "a case in two environments": (
        [*runs((FP32, 200), torch="2.12"), *ran(FP32, (100,), attempt=2),
         *runs((FP32, 100), gpu="B card")],
        ["machine: A card · torch 2.12 → A card · torch 2.13 | 2.00× | 1",
         "machine: A card · torch 2.12 → B card | 2.00× | 1"],
    ),
    "a case on two cards": (
        [*ran(FP32, THREE, gpu="A card"), *ran(FP32, HALF, gpu="B card", gpu_memory_bytes=9)],
        ["machine: A card → B card | 2.00× | faster | 1"],
    ),
    "a way on as many GPUs": (
        runs((FP32, 100), (replace(FP32, parallel="ddp"), 101),
             (replace(FP32, parallel="ddp", world_size=8), 20)),
        ["parallel: none → ddp | 0.99× | 1", "world size: 1 → 8 | 5.05× | 1"],
    ),
    "pairs with repeats without the others": (
        [*ran(FP32, THREE), *ran(FP16, HALF),
         *(row for case in at(256, FP32, FP16) for row in ran(case, (90, 90)))],
        [
            "precision: fp32 → fp16 | 2.00× | faster | 1 of 2",
            "batch size: 128 → 256 | 0.56, 1.11× | differs by precision | 2",
        ],
    ),
    "steps of as many images": (
        [*some_steps(FP32, 20, 400, 100), *some_steps(WIDE32, 20, 200, 50),
         *some_steps(WIDE32, 10, 200, 40)],
        ["batch size: 128 → 256 | ≈2.50× | 1"],
    ),
    "of parts of which none are equal the largest": (
        [*some_steps(FP32, 20, 400, 100), *some_steps(FP32, 60, 400, 120),
         *some_steps(WIDE32, 4, 200, 60), *some_steps(WIDE32, 20, 200, 50)],
        ["batch size: 128 → 256 | ≈2.40× | 1"],
    ),
}  # fmt: skip
"""Rows, and of each change its speed, verdict, pairs and remarks."""

LEARNT: dict[str, tuple[list[Record], list[str]]] = {
    "parts before a whole epoch": (
        [*ran(FP32, (110,), train_loss=1.5), *ran(replace(FP32, fraction=0.1), (100,), **FEW),
         *ran(replace(FP16, fraction=0.1), (50,), train_loss=2.1)],
        ["precision: fp32 → fp16"],  # which is of no whole epoch, and of one seed
    ),
    "unequal images": (
        [*some_steps(FP32, 20, 400, 100, **FEW),
         *some_steps(WIDE32, 20, 200, 50, **FEW)],
        ["batch size: 128 → 256"],
    ),
    "equal images, but of two batch sizes before the end of an epoch": (
        [*some_steps(FP32, 20, 400, 100, **FEW),
         *some_steps(WIDE32, 10, 200, 40, **FEW)],
        ["batch size: 128 → 256"],
    ),
    "what diverged": (
        [*ran(FP32, (100,), train_loss=2.0),
         *ran(FP16, (50,), status=Status.DIVERGED, train_loss=9.0)],
        ["precision: fp32 → fp16"],
    ),
    "each pair with a seed of its own": (
        [*learn(FP32, {0: 2.0, 1: 9.0}), *learn(FP16, {0: 2.1}),
         *learn(WIDE32, {7: 2.5, 1: 8.0}), *learn(WIDE16, {7: 2.7})],
        ["precision: fp32 → fp16", "batch size: 128 → 256"],
    ),
    "worse at one batch size and better at the other": (
        [*learn(FP32, SEEDS), *learn(WIDE32, SEEDS),
         *learn(FP16, [1.1 * x for x in SEEDS]), *learn(WIDE16, [x / 1.1 for x in SEEDS])],
        [
            "precision: fp32 → fp16 | 0.0 % | training loss: cannot tell",
            "batch size: 128 → 256 | -9.1 %",
        ],
    ),
}  # fmt: skip
"""Rows, and of each change the difference of the losses, and whether it learns as well."""


@pytest.mark.parametrize("name", PAIRED)
def test_what_is_paired_with_what(name: str, tmp_path: Path) -> None:
    rows, expected = PAIRED[name]
    report = read_report(tmp_path, rows)
    assert tell(report, "effects", "change speedup verdict pairs warnings") == expected


@pytest.mark.parametrize("name", LEARNT)
def test_which_losses_are_compared(name: str, tmp_path: Path) -> None:
    rows, expected = LEARNT[name]
    assert tell(read_report(tmp_path, rows), "effects", "change loss learnt") == expected


def settled(time_s: float, **settings: Any) -> list[Record]:
    return ran(settle(settings), (time_s,))


SGD = [*settled(100), *settled(101, lr=0.5)]


@pytest.mark.parametrize(
    ("axis", "rows", "changes", "words"),
    [
        ("compile", [*settled(100), *settled(80, compile="default"),
                     *settled(50, compile="default", dynamic="on")],
         ["compile: off → default | 1.25×"], []),
        ("optimizer", [*SGD, *settled(80, optimizer="adamw"),
                       *settled(50, optimizer="adamw", lr=0.5)],
         ["optimizer: adamw → sgd | 0.80×"], []),
        ("optimizer", [*SGD, *settled(80, optimizer="adamw", lr=0.5),
                       *settled(50, optimizer="adamw", lr=0.25)],
         [], ["Optimizer adamw ran with several values of lr, of which none is the usual one, and "
              "is in no change; give one by --where lr=VALUE."]),
    ],
)  # fmt: skip
def test_of_several_values_of_what_follows_the_usual_one_is_paired(
    axis: str, rows: list[Record], changes: list[str], words: list[str], tmp_path: Path
) -> None:
    """Without a word there was no compile: off → default where several --dynamic ran, and no
    optimizer where several lr did."""
    report = read_report(tmp_path, rows)
    found = tell(report, "effects", "change speedup")
    assert [one for one in found if one.startswith(f"{axis}: ")] == changes
    (table,) = (one for one in report.tables if one.name == "effects")
    assert [*table.words] == words


def pick(report: Report, axis: str, after: str) -> Effect:
    (found,) = [e for e in report.effects if (e.axis, e.after) == (axis, after)]
    return found


def test_the_energy_of_a_part_is_that_of_a_whole_epoch(tmp_path: Path) -> None:
    """A tenth of an epoch takes a tenth of the energy; memory that repeats is exact."""
    rows = [
        *ran(FP32, THREE, 8, energy_j=1000.0, measured_images=50000),
        *ran(replace(FP16, fraction=0.1), HALF, 4, energy_j=50.0, measured_images=5000),
    ]
    report = read_report(tmp_path, rows)
    assert tell(report, "effects", "speedup verdict interval memory energy") == [
        "≈2.00× | faster | 1.91–2.10 | -50.0 % | ≈-50.0 %"
    ]


def test_report_and_compare_say_the_same(tmp_path: Path, capsys: Capture) -> None:
    """Of one change: ratio, interval and p of the time."""
    rows = [*ran(FP32, (100.0, 101.5, 99.2, 100.3)), *ran(FP16, (49.0, 52.0, 50.5))]
    (effect,) = read_report(tmp_path, rows).effects
    asked = ["--axis", "precision", "fp32", "fp16", "--format", "json"]
    assert compare_main([str(tmp_path / "sweep"), *asked]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["metrics"]["epoch_time_s"]
    assert effect.time is not None
    ratio = effect.time.ratio
    assert (1 / (ratio.value or 0), 1 / (ratio.high or 0), ratio.p) == pytest.approx(
        (compared["speedup"], compared["speedup_low"], compared["p"])
    )


UNLIKE: list[tuple[str, tuple[Any, Any], dict[str, Any], str]] = [
    # an axis and its values, other axes, and why losses before and after are not compared
    ("precision", ("fp32", "bf16"), {}, ""),
    ("precision", ("fp32", "bf16"), {"fraction": 0.5}, ""),  # as many steps of the same images
    ("lr", (0.01, 0.1), {}, ""),
    ("lr", (0.01, 0.1), {"fraction": 0.5}, "less than an epoch does not show what it does to lear"),
    ("dataset", ("cifar10", "synthetic"), {}, "losses on other data say nothing of each other: da"),
    ("accumulate", (1, 2), {}, ""),
    ("accumulate", (1, 2), {"workload": "nets:mix", "model": "nets:mlp"}, "other data"),
]


@pytest.mark.parametrize(("axis", "ends", "axes", "lack"), UNLIKE)
def test_report_and_compare_say_the_same_of_losses_that_say_nothing(
    axis: str, ends: tuple[Any, Any], axes: dict[str, Any], lack: str, tmp_path: Path,
    capsys: Capture,
) -> None:  # fmt: skip
    rows = [*chain(*(learn(Case(**{**axes, axis: end}), SEEDS) for end in ends))]
    cells = tell(read_report(tmp_path, rows), "effects", "loss")
    assert cells == ["" if lack else "0.0 %"]
    asked = ["--axis", axis, *map(str, ends), "--metric", "train_loss", "--format", "json"]
    assert compare_main([str(tmp_path / "sweep"), *asked]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["metrics"]["train_loss"]
    assert bool(compared["lack"]) is bool(lack)
    assert lack in compared["lack"]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (2.000, 2.001, "equivalent"),
        (2.300, 2.301, "cannot tell"),  # of 0.98 ln 10, 2.2565, and more both guess
        (2.258, 2.255, "cannot tell"),  # one guesses, and the other hardly does not
        (2.300, 2.000, "better"),
        (2.000, 2.300, "worse"),
    ],
)
def test_report_and_compare_say_the_same_of_losses_of_guessing(
    before: float, after: float, verdict: str, tmp_path: Path, capsys: Capture
) -> None:
    losses = ([base * (1 + x) for x in (0, 1e-4, 2e-4, 3e-4)] for base in (before, after))
    rows = [*chain(*(learn(case, mine) for case, mine in zip((FP32, FP16), losses, strict=True)))]
    assert tell(read_report(tmp_path, rows), "effects", "learnt") == [f"training loss: {verdict}"]
    asked = ["--axis", "precision", "fp32", "fp16", "--format", "json"]
    assert compare_main([str(tmp_path / "sweep"), *asked]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["equivalence"]["train_loss"]
    assert compared["verdict"] == verdict


def test_pairs_that_differ_are_listed_and_not_averaged(tmp_path: Path) -> None:
    """1.35, 1.50 and 2.60 times as fast have a mean of 1.74, which is none of them."""
    rows = []
    for size, half in ((64, 74.0), (128, 66.7), (256, 38.5)):
        rows += ran(replace(FP32, batch_size=size), THREE)
        rows += ran(replace(FP16, batch_size=size), (half, half * 1.01, half * 0.99))
    cells = tell(read_report(tmp_path, rows), "effects", "change speedup verdict interval")
    assert cells[0] == "precision: fp32 → fp16 | 1.35, 1.50, 2.60× | faster, differs by batch size"


def test_the_mean_over_two_pairs_by_hand(tmp_path: Path) -> None:
    """Pairs of unlike noise: the variances add, and Satterthwaite's freedom follows the noisier."""
    samples = (
        ((100.0, 101.0, 99.0), (50.0, 50.2, 49.9)),
        ((80.0, 86.0, 75.0), (60.0, 63.0, 57.5)),
    )
    rows = []
    for batch, (a, b) in zip((128, 256), samples, strict=True):
        rows += [ran(replace(FP32, batch_size=batch), a), ran(replace(FP16, batch_size=batch), b)]
    time = pick(read_report(tmp_path, [*chain(*rows)]), "precision", "fp16").time
    assert time is not None
    logs = [[[math.log(x) for x in side] for side in pair] for pair in samples]
    parts = [1.346 * variance(side) / 3 for pair in logs for side in pair]  # of medians of three
    errors = [parts[0] + parts[1], parts[2] + parts[3]]
    shift = sum(median(b) - median(a) for a, b in logs) / 2
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
    rows = [
        *ran(small, [100.0, 101.0, 102.0][:repeats], **WAITS, measured_steps=40),
        *ran(large, [90.0] * 3),
        *(row for half in halves for row in ran(half, [50.0, 51.0, 52.0][:repeats])),
    ]
    report = read_report(tmp_path, rows)
    assert [result.unsettled for result in report.results] == [True, False, False, False]
    compared = [result.speedup == result.speedup for result in report.results[2:]]
    assert compared == [repeats == 3, True]
    assert pick(report, "precision", "fp16").time.pairs == (2 if repeats == 3 else 1)  # type: ignore[union-attr]
    answer = " ".join(report.answers[0].sentences)
    assert ("waits for the host and does not settle" in answer) == (repeats == 1), answer
    assert "Not settled" in {notice.label for notice in report.warnings}


# --------------------------------------------------------------------------------------- break-even

COMPILED = replace(FP32, compile="default")
ON_CPU = replace(FP32, device="cpu")
ANY_SHAPE = replace(COMPILED, dynamic="auto")
OFF, ON, ONCE = (20.1, 20, 19.9), (16.1, 16, 15.9), (1, 1, 1)


def start(
    case: Case, times: Sequence[float], firsts: Sequence[float], **values: Any
) -> list[Record]:
    """Runs that start in 2 s and their first steps, with these times of an epoch."""
    rows = ran(case, times, setup_time_s=2.0, **values)
    for row, first in zip(rows, firsts, strict=True):
        row.measurement.first_steps_time_s = first
    return rows


PAID: dict[str, tuple[list[Record], list[str]]] = {
    # 4 s an epoch, and the second repeat of three found the code of the first in a cache
    "the slowest first steps": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, ON, (31.5, 3, 3))],
        [
            "Compile default: in fp32 · batch size 128 it takes 30.50 s longer to start and saves "
            "4.000 s an epoch, so that it pays off after 8 to 9 epochs."
        ],
    ),
    "as far as the saving is known": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, (17, 16, 15), (61, 3, 3))],
        [
            "Compile default: in fp32 · batch size 128 it takes 60.00 s longer to start and saves "
            "4.000 s an epoch, so that it pays off after 8 to 83 epochs."
        ],
    ),
    "for any shape": (
        [*start(FP32, OFF, ONCE), *start(ANY_SHAPE, ON, (31.5, 3, 3))],
        [
            "Compile default: in fp32 · batch size 128 · dynamic auto it takes 30.50 s longer to "
            "start and saves 4.000 s an epoch, so that it pays off after 8 to 9 epochs."
        ],
    ),
    "for each shape and for any": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, ON, (31.5, 3, 3)),
         *start(ANY_SHAPE, ON, (61, 3, 3))],
        [
            "Compile default: in fp32 · batch size 128 it takes 30.50 s longer to start and saves "
            "4.000 s an epoch, so that it pays off after 8 to 9 epochs; in fp32 · batch size 128 · "
            "dynamic auto it takes 60.00 s longer to start and saves 4.000 s an epoch, so that it "
            "pays off after 14 to 17 epochs."
        ],
    ),
    "of too few repeats to show a saving": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, ON[:2], (31, 31))],
        [
            "Compile default: in fp32 · batch size 128 it takes 30.00 s longer to start and saves "
            "3.950 s an epoch (of 2 runs), so that it pays off after 8 epochs."
        ],
    ),
    "of too few repeats on a CPU": (
        [*start(ON_CPU, OFF, ONCE), *start(replace(ON_CPU, compile="default"), ON[:1], (31,))], [],
    ),
    "less than matters in one run": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, (19.8,), (31,))], [],
    ),
    "no saving": ([*start(FP32, ON, ONCE), *start(COMPILED, OFF, (31, 31, 31))], []),
    "less than matters": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, (19.9, 19.8, 19.7), (31, 31, 31))], [],
    ),
    "its start is not known": (
        [*start(FP32, OFF, ONCE), *ran(COMPILED, ON, setup_time_s=None)], [],
    ),
    "it starts no later": ([*start(FP32, OFF, ONCE), *start(COMPILED, ON, ONCE)], []),
    "a time with a warning": (
        [*start(FP32, OFF, ONCE), *start(COMPILED, ON, (31, 31, 31), neighbours_computing=1)], [],
    ),
}  # fmt: skip
"""Rows, and the sentences on what takes longer to start."""


@pytest.mark.parametrize("name", PAID)
def test_when_a_later_start_has_paid_off(name: str, tmp_path: Path) -> None:
    rows, expected = PAID[name]
    report = read_report(tmp_path, rows)
    (table,) = (t for t in report.tables if t.name == "effects")
    assert list(table.words) == expected
    # who follows the recommendation knows what each start costs
    starts = [one for one in report.answers[0].sentences if "longer to start" in one]
    costs = [one.partition(" it takes ")[2].partition(";")[0].rstrip(".") for one in expected]
    assert starts == [f"Compile default takes {cost}." for cost in costs]
