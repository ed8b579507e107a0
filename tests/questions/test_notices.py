"""What a report says first: drift, spread, determinism, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.case import Case
from bench.questions.notices import Steadiness, choose_next, find_drifts, warn
from bench.record import Record, Status
from bench.render.table import NextStep
from bench.store.rows import latest
from bench.study.runs import Run, make_results, read_runs
from bench.study.sweeps import read_sweep, read_sweeps
from tests.planted.records import GIB, make_record, measured, write_sweep
from tests.planted.results import read_results
from tests.planted.sweeps import Folders

FP32 = Case()
WHERE = ("sweep", "A card")


def ran(time_s: float, repeat: int = 1, case: Case = FP32, **values: Any) -> Record:
    card = {"gpu": "A card", "torch": "2.13"}
    return make_record(case, **{**card, **measured(time_s, GIB), "repeat": repeat, **values})


def close(time_s: float, hour: int, attempt: int = 1, lane: str = "") -> Record:
    started = f"2026-11-20T{hour:02}:00:00.000Z"
    return ran(time_s, sentinel=True, attempt=attempt, started_at=started, lane=lane)


def runs(times: Sequence[float]) -> list[Record]:
    return [ran(time, i) for i, time in enumerate(times, 1)]


def lose(size: int, status: Status) -> Record:
    return make_record(Case(batch_size=size), status=status, gpu="A card", torch="2.13")


def read(folder: Path, records: Sequence[Record]) -> list[Run]:
    return read_runs([read_sweep(write_sweep(folder / "sweep", records))])


def notices_of(every: Sequence[Run]) -> dict[str, str]:
    found = warn(every, make_results(latest(every)))
    return {notice.label: notice.text for notice in found}


def test_drift_is_judged_against_all_runs_and_their_spread(tmp_path: Path) -> None:
    """103 is 3 % above the median of both; only where runs agree does it tell anything."""
    calm = read(tmp_path / "calm", [*runs((100, 100.2, 99.9)), close(103, 12)])
    (drift,) = find_drifts(calm)[WHERE]
    assert drift.steadiness is Steadiness.DRIFTED
    assert drift.change == pytest.approx(0.03)
    # Student's t for two degrees of freedom, the standard deviation, one run more than three
    assert drift.margin == pytest.approx(4.302653 * 0.152753 * (4 / 3) ** 0.5 / 100, rel=1e-5)
    assert "3.0 % longer than the median of its 3 runs" in notices_of(calm)["Drift"]
    noisy = read(tmp_path / "noisy", [*runs((100, 94, 107)), close(103, 12)])
    (drift,) = find_drifts(noisy)[WHERE]
    assert drift.steadiness is Steadiness.UNKNOWN
    assert drift.change == pytest.approx(0.03)
    assert "--repeats 5 or more" in notices_of(noisy)["Drift not known"]


NOTED: dict[str, tuple[list[Record], dict[str, str]]] = {
    "a sentinel equal to the first run, where runs are not": (
        [*runs((100, 88, 108)), close(100, 12)],
        {"Spread": "1 of the 1 cases", "Drift not known": "may explain up to ±50.0 %"},
    ),
    # each is within 2 % of the runs, but the second is 3 % above the first
    "a sentinel against the one before": (
        [*runs((100, 100.1, 99.9)), close(98.5, 12), close(101.5, 14, 2)],
        {"Drift": "3.0 % longer than the one of 2026-11-20 12:00 UTC"},
    ),
    "repeats of a seed, alike in one of two cases": (
        [row for case, losses in ((FP32, (2.05, 2.05)), (Case(batch_size=256), (2.05, 2.05012)))
         for n, loss in enumerate(losses, 1)
         for row in [ran(100 + n / 10, n, case, run_seed=0, train_loss=loss)]],
        {"Determinism": "in 1 of 2 cases; in the others they differ by up to 0.00012."},
    ),
    "what the same command runs again": (
        [*runs((1, 1)), lose(8, Status.INTERRUPTED), lose(16, Status.LOST)],
        {"No result": "2 of 4 runs. 1 interrupted, 1 lost. The same command runs them again."},
    ),
    "what needs a flag": (
        [*runs((1, 1)), lose(8, Status.INTERRUPTED), lose(16, Status.ERROR)],
        {"No result": "2 of 4 runs. 1 interrupted, 1 error. Run them again with --retry error."},
    ),
}  # fmt: skip
"""Rows, and of each notice its label and a part of it."""


@pytest.mark.parametrize("name", NOTED)
def test_what_is_noted(name: str, tmp_path: Path) -> None:
    rows, expected = NOTED[name]
    found = notices_of(read(tmp_path, rows))
    assert found.keys() == expected.keys()
    assert {label: text for label, text in expected.items() if text not in found[label]} == {}


def test_a_sentinel_is_held_against_the_attempts_that_count(tmp_path: Path) -> None:
    """Of the second run a first attempt was throttled; of the third the last one failed."""
    lost = make_record(
        FP32, repeat=3, attempt=2, status=Status.ERROR, reason="boom", gpu="A card", torch="2.13"
    )
    again = [ran(180, 2, status=Status.INVALID), *runs((100, 101, 60)), lost]
    again[2] = ran(101, 2, attempt=2)
    (drift,) = find_drifts(read(tmp_path, [*again, close(100.5, 12)]))[WHERE]
    assert drift.against == "the median of its 2 runs"
    assert drift.change == pytest.approx(0)


def test_a_sentinel_is_held_against_runs_on_its_own_lane(tmp_path: Path) -> None:
    """Of two lanes one takes 10 % longer, and each repeats to 0.1 %: nothing drifted."""
    pace = {"a": 100.0, "b": 110.0}
    lanes = [("a", 0.1), ("b", 0.1), ("a", -0.1), ("b", -0.1)]
    made = [ran(pace[lane] + wobble, n, lane=lane) for n, (lane, wobble) in enumerate(lanes, 1)]
    quiet = read(tmp_path / "quiet", [*made, close(110, 12, lane="b")])
    (drift,) = find_drifts(quiet)[WHERE]
    assert drift.against == "the median of its 2 runs"
    assert drift.change == pytest.approx(0)
    # two degrees of freedom: four runs around two means
    assert drift.margin == pytest.approx(4.302653 * 0.141421 * (3 / 2) ** 0.5 / 110, rel=1e-5)
    two = [close(100, 12, lane="a"), close(110, 14, attempt=2, lane="b")]
    found = find_drifts(read(tmp_path / "two", [*made, *two]))[WHERE]
    assert [drift.change for drift in found] == pytest.approx([0, 0])


# ------------------------------------------------------------------------------- the next step

GOOD = runs((100, 100.1, 99.9))


def steps_of(*folders: Path) -> NextStep:
    sweeps = read_sweeps(folders)
    step = choose_next(sweeps, read_results(*sweeps)[1])
    assert step
    return step


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (runs((100,)), "--repeats 3 shows which differences are real"),
        ([*GOOD, lose(8, Status.ERROR)], "--retry error runs again what failed"),
        ([*GOOD, lose(8, Status.INTERRUPTED)], "run the same command again"),
        (GOOD, "page with figures"),
    ],
)
def test_the_next_step_is_what_helps(records: list[Record], said: str, tmp_path: Path) -> None:
    assert said in steps_of(write_sweep(tmp_path / "s", records)).why


def test_two_sweeps_are_compared_and_profiles_explained(tmp_path: Path, planted: Folders) -> None:
    both = steps_of(*(write_sweep(tmp_path / name, GOOD) for name in ("a", "b")))
    assert both.command.startswith("python -m bench.compare ")
    assert steps_of(planted["profiled"]).command.startswith("python -m bench.why ")


def test_nothing_follows_from_nothing(tmp_path: Path) -> None:
    """As where a sweep was killed before its first case, while it looked at the machine."""
    sweep = read_sweep(write_sweep(tmp_path / "killed", []))
    assert choose_next([sweep], []) is None
