"""Which runs are made, in which order, and which need not be."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case, grid
from bench.record import Status
from bench.schedule import Wall, plan_runs, remaining_runs
from bench.store import Past, Run

CASES = grid({"precision": ["fp32", "bf16"], "batch_size": [64, 128, 256]})
SMALL, MIDDLE, LARGE = CASES[:3]


def test_single_runs_are_the_cases() -> None:
    assert plan_runs(CASES, 1) == [(case, 1, False) for case in CASES]


def test_repeats_are_interleaved_and_end_with_a_sentinel() -> None:
    runs = plan_runs(CASES, 3)
    assert [(case, repeat) for case, repeat, sentinel in runs if not sentinel] == [
        (case, repeat) for repeat in (1, 2, 3) for case in CASES
    ]
    assert runs[-1] == (SMALL, 1, True)
    assert sum(sentinel for _, _, sentinel in runs) == 1


@given(st.integers(1, 9), st.integers(1, 5))
def test_no_run_is_planned_twice(cases: int, repeats: int) -> None:
    runs = plan_runs([Case(seed=i) for i in range(cases)], repeats)
    assert len(set(runs)) == len(runs) == cases * repeats + (repeats > 1)


@given(st.dictionaries(st.sampled_from(plan_runs(CASES, 2)), st.sampled_from(list(Status))))
def test_what_has_an_outcome_is_done_unless_it_was_interrupted(
    outcomes: dict[tuple[Case, int, bool], Status],
) -> None:
    runs = plan_runs(CASES, 2)
    history = {run: Past(status, 1) for run, status in outcomes.items()}
    left = remaining_runs(runs, history, [])
    assert left == closed([r for r in runs if outcomes.get(r, "interrupted") == "interrupted"])
    left = remaining_runs(runs, history, [Status.ERROR, Status.OOM])
    again = ("interrupted", "error", "oom")
    assert left == closed([r for r in runs if outcomes.get(r, "error") in again])


def closed(left: list[Run]) -> list[Run]:
    """Whatever is run, the sentinel comes after it: an earlier one closes the sweep no longer."""
    sentinel = plan_runs(CASES, 2)[-1]
    return [*left, sentinel] if left and sentinel not in left else left


def test_what_was_inferred_remains_where_nothing_may_be_skipped() -> None:
    runs = plan_runs(CASES[:2], 1)
    history = {runs[0]: Past(Status.OOM, 1), runs[1]: Past(Status.OOM, 1, inferred=True)}
    assert remaining_runs(runs, history, []) == []
    assert remaining_runs(runs, history, [], retry_inferred=True) == [runs[1]]


def test_a_wall_stands_behind_the_batch_that_ran_out() -> None:
    wall = Wall({})
    assert wall.blocks(LARGE) is None
    wall.note(MIDDLE, Status.OOM)
    assert wall.blocks(SMALL) is None
    assert wall.blocks(MIDDLE) is None
    assert wall.blocks(LARGE) == 128
    wall.note(LARGE, Status.OOM)
    assert wall.blocks(LARGE) == 128, "the smallest counts"


def test_a_wall_stands_for_cases_alike_in_all_else() -> None:
    wall = Wall({})
    wall.note(SMALL, Status.OOM)
    others = [
        {"precision": "bf16"},
        {"model": "dpn26"},
        {"compile": True},
        {"channels_last": True},
        {"seed": 1},
        {"device": "cpu"},
    ]
    for other in others:
        assert wall.blocks(replace(LARGE, **other)) is None  # type: ignore[arg-type]


def test_only_a_proven_oom_makes_a_wall() -> None:
    wall = Wall({})
    for status in set(Status) - {Status.OOM}:
        wall.note(SMALL, status)
    assert wall.blocks(LARGE) is None


def test_a_wall_is_remembered_but_not_inferred_from_inferences() -> None:
    def past(inferred: bool) -> Wall:
        return Wall({(MIDDLE, 1, False): Past(Status.OOM, 1, inferred)})

    assert past(inferred=False).blocks(LARGE) == 128
    assert past(inferred=True).blocks(LARGE) is None
