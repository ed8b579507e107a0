"""Which runs are made, in which order, and which need not be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.results.store.rows import LatestAttempt, PlannedRun, find_width, plan_runs
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.record import Status
from bench.sweep.execution import OomSkips, remaining_runs
from bench.sweep.options import parse_arguments, plan_cases

CASES = grid({"precision": ["fp32", "bf16"], "batch_size": [64, 128, 256]})
SMALL, MIDDLE, LARGE = CASES[:3]


@pytest.mark.parametrize(
    ("command", "repeats"),
    [
        ("--preset quick", 3),  # sets its own steps, and has to be done in a minute
        ("--preset quick --precision fp32 --batch-size 16", 3),  # some of its cases
        ("--preset quick --lr 0.1", 3),  # which it does not say
        ("--preset quick --model dpn92", 1),  # which takes longer
        ("--preset quick --precision fp32 fp16", 1),  # of which one may be emulated
        ("--preset precision", 1),
        ("--preset precision --fraction 0.1", 3),
        ("--preset precision --fraction 0.1 0.5", 1),  # the half epochs are not cheap
        ("--preset precision --steps 20 --fraction 0.5", 3),
        ("--preset precision --steps 21", 1),
        ("--preset precision --steps 5 none", 1),  # whole epochs are among them
    ],
)
def test_cheap_parts_of_an_epoch_are_repeated_by_default(command: str, repeats: int) -> None:
    options = parse_arguments([*command.split(), "--device", "cpu"])
    assert options.repeats == repeats
    cases = plan_cases(options).cases
    assert len(plan_runs(cases, options.repeats)) == len(cases) * repeats + (repeats > 1)


def test_several_epochs_are_whole_where_the_preset_measures_a_part() -> None:
    for flags, steps in (("--epochs 3", None), ("--epochs 1", 12), ("--fraction 1", None)):
        options = parse_arguments(["--preset", "quick", *flags.split(), "--device", "cpu"])
        cases = plan_cases(options).cases
        assert {(case.steps, case.fraction) for case in cases} == {(steps, 1.0)}
    with pytest.raises(UsageError, match="leave out"):
        plan_cases(parse_arguments(["--epochs", "3", "--fraction", "0.5", "--device", "cpu"]))


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9))
def test_the_width_of_repeats_is_students(times: list[float]) -> None:
    from scipy.stats import t

    logs = np.log(times)
    expected = np.expm1(t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5)
    assert find_width(times) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert find_width(times[:1]) == math.inf


@given(st.integers(1, 9), st.integers(1, 5))
def test_repeats_are_interleaved_and_end_with_a_sentinel(number: int, repeats: int) -> None:
    cases = [Case(seed=i) for i in range(number)]
    planned = [(case, repeat, False) for repeat in range(1, repeats + 1) for case in cases]
    assert plan_runs(cases, repeats) == planned + [(cases[0], 1, True)] * (repeats > 1)


@given(st.dictionaries(st.sampled_from(plan_runs(CASES, 2)), st.sampled_from(list(Status))))
def test_what_has_an_outcome_is_done_unless_it_was_cut_off(
    outcomes: dict[tuple[Case, int, bool], Status],
) -> None:
    runs = plan_runs(CASES, 2)
    history = {run: LatestAttempt(status, 1) for run, status in outcomes.items()}
    left = remaining_runs(runs, history, [])
    cut_off = ("interrupted", "lost")
    assert left == closed([r for r in runs if outcomes.get(r, "lost") in cut_off])
    left = remaining_runs(runs, history, [Status.ERROR, Status.OOM])
    again = (*cut_off, "error", "oom")
    assert left == closed([r for r in runs if outcomes.get(r, "error") in again])


def closed(left: list[PlannedRun]) -> list[PlannedRun]:
    """Whatever is run, the drift check comes after it: an earlier one closes no sweep."""
    sentinel = plan_runs(CASES, 2)[-1]
    return [*left, sentinel] if left and sentinel not in left else left


def test_a_wall_stands_for_cases_alike_in_all_else_and_after_a_proven_oom_alone() -> None:
    skips = OomSkips({})
    for status in set(Status) - {Status.OOM}:
        skips.note(SMALL, status)
    assert skips.blocks(LARGE) is None
    for size in (SMALL, LARGE):
        skips.note(size, Status.OOM)
    assert skips.blocks(SMALL) is None, "which ran"
    assert skips.blocks(LARGE) == 64, "the smallest counts"
    others = {
        "precision": "bf16",
        "model": "dpn26",
        "compile": "default",
        "device": "cpu",
        "memory_limit": "8GiB",
    }
    for axis, value in {**others, "channels_last": True, "seed": 1}.items():
        assert skips.blocks(replace(LARGE, **{axis: value})) is None


def test_a_wall_is_remembered_but_not_inferred_from_inferences() -> None:
    def past(inferred: bool) -> OomSkips:
        return OomSkips({(MIDDLE, 1, False): LatestAttempt(Status.OOM, 1, inferred)})

    assert past(inferred=False).blocks(LARGE) == 128
    assert past(inferred=True).blocks(LARGE) is None
