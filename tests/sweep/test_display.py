"""What a person sees while a sweep runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.schema.case import Case
from bench.schema.record import Record, Status
from bench.sweep.display import Display
from bench.workers.job import PhaseEntered, StepTaken
from tests.planted.records import make_record
from tests.pytest_for_tests import Capture, Patch

CASE = Case(precision="fp16", loss_scale=128.0, batch_size=512, fraction=0.2, dataset="synthetic")


def record(status: Status = Status.OK, reason: str = "", executor: str = "subprocess") -> Record:
    measured = status in (Status.OK, Status.DIVERGED)
    values = {"epoch_time_s": 11.002, "peak_device_bytes": 14 * 2**30, "train_accuracy": 0.2905}
    values = {**values, "train_loss": 2.0531 if status is Status.OK else None} if measured else {}
    return make_record(CASE, status=status, reason=reason, executor=executor, **values)


def test_plain_lines_where_there_is_no_terminal(capsys: Capture, monkeypatch: Patch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Display(
        Path("results/x"), runs=2, done=7, planned=[(CASE, 1, False), (CASE, 1, True)]
    ) as display:
        display.start(CASE, 1, False)
        display.hear(PhaseEntered("epoch"), "")
        for clock[0] in (10.0, 31.0, 32.0):
            display.hear(StepTaken("epoch", step=3, total=20, memory_bytes=2**30), "")
        display.conclude(record())
        display.start(CASE, 2, True)
        display.conclude(record(Status.OOM, "OutOfMemoryError:\x1b[2J tried\nto [bold]allocate"))
    name = "fp16 · loss scale 128 · batch size 512"
    assert capsys.readouterr().err.splitlines() == [
        "2 to run, 1 of them a drift check, 7 already there, into results/x",
        f"{name}: epoch, step 4 of 20, 1.00 GiB",
        f"[1/2] {name}: ≈11.00 s an epoch, 14.00 GiB, loss 2.053, accuracy 29.0 %; about 32 s left",
        f"[2/2] {name} · again, for drift: oom: OutOfMemoryError: [2J tried to [bold]allocate",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"unit": "items", "number": 10_000}, "35.07 s for 10,000 items"),
        ({"unit": "items", "number": 480, "steps_per_epoch": 6},
         "35.07 s for an epoch of 480 items"),
        ({"unit": "steps", "number": 10_000}, "35.07 s for 10,000 steps"),
        ({"unit": "runs", "number": 1}, "35.07 s a run"),
        ({"unit": "runs", "number": 1, "missing": "eval_time_s: ValueError: no luck"},
         "35.07 s a run, --evaluate failed: ValueError: no luck"),
    ],
)  # fmt: skip
def test_a_run_says_of_what_its_time_is_and_what_failed(
    values: dict[str, Any], expected: str, capsys: Capture
) -> None:
    case, number = Case(command="python train.py", dataset="own"), values.pop("number")
    values |= {"epoch_time_s": 35.07, "measured_images": number, "train_images": number}
    with Display(Path("x"), 1, 0) as display:
        display.start(case, 1, False)
        display.conclude(make_record(case, status=Status.OK, **values))
    assert capsys.readouterr().err.endswith(f": {expected}\n")


@pytest.mark.parametrize(("steps", "expected"), [(3, "takes too few steps"), (4, "trains")])
def test_a_probe_whose_limit_did_not_hold_yet_has_not_shown_that_it_trains(
    steps: int, expected: str, capsys: Capture
) -> None:
    case = Case(command="python t.py {batch_size}", memory_limit="1GiB", device="cpu")
    values = {"unit": "items", "measured_steps": steps, "warmup_process_bytes": 2**29}
    row = make_record(case, status=Status.OK, probe=True, peak_process_bytes=2**28, **values)
    with Display(Path("x"), None, 0) as display:
        display.start(case, 1, False)
        display.conclude(row)
    assert f": {expected}, 0.50 GiB" in capsys.readouterr().err


def test_what_is_left_is_told_by_case(capsys: Capture, monkeypatch: Patch) -> None:
    """A case of 37 s before one of 242, twice; and two that have not run yet."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    small, large = CASE, replace(CASE, batch_size=2048)
    planned = [(case, repeat, False) for repeat in (1, 2) for case in (small, large)]
    with Display(Path("x"), runs=4, done=0, planned=planned) as display:
        for case, took in ((small, 37), (large, 242), (small, 37), (large, 242)):
            display.start(case, 1, False)
            clock[0] += took
            display.conclude(replace(record(), case=case))
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.partition("; ")[2] for line in lines] == [
        "", "about 4.7 min left", "about 4 min left", ""
    ]  # fmt: skip
    others = [replace(CASE, batch_size=size) for size in (1, 2, 3, 4)]
    with Display(Path("x"), 4, 0, planned=[(case, 1, False) for case in others]) as display:
        for case in others:
            display.start(case, 1, False)
            clock[0] += 60
            display.conclude(replace(record(), case=case))
    lines = capsys.readouterr().err.splitlines()[1:]
    assert [line.partition("; ")[2] for line in lines] == [
        "", "about 2 min left if the others take as long",
        "about 60 s left if the others take as long", "",
    ]  # fmt: skip
