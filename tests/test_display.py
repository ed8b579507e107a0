"""What a person sees while a sweep runs."""

from __future__ import annotations

from pathlib import Path

from bench.case import Case
from bench.record import Record, Status
from bench.sweep.display import Display
from bench.worker import PhaseEntered, StepTaken
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
    monkeypatch.setattr("bench.sweep.display.time.monotonic", lambda: clock[0])
    with Display(Path("results/x"), runs=2, done=7) as display:
        display.begin(CASE, 1, False)
        display.show(PhaseEntered("epoch"))
        for clock[0] in (10.0, 31.0, 32.0):
            display.show(StepTaken("epoch", step=3, total=20, memory_bytes=2**30))
        display.end(record())
        display.begin(CASE, 2, True)
        display.end(record(Status.OOM, "OutOfMemoryError:\x1b[2J tried\nto [bold]allocate"))
    name = "fp16 · loss scale 128 · batch size 512"
    assert capsys.readouterr().err.splitlines() == [
        "2 to run, 7 already there, into results/x",
        f"{name}: epoch, step 4 of 20, 1.00 GiB",
        f"[1/2] {name}: ≈11.00 s an epoch, 14.00 GiB, loss 2.053, accuracy 29.0 %; about 32 s left",
        f"[2/2] {name} · again, for drift: oom: OutOfMemoryError: [2J tried to [bold]allocate",
    ]


def test_a_terminal_gets_a_live_line(monkeypatch: Patch) -> None:
    """Through a real terminal: case, phase, step and memory stand in one line."""
    import os
    import pty
    import sys
    import termios

    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        termios.tcsetwinsize(terminal, (50, 160))
        monkeypatch.setenv("TERM", "xterm")
        with Display(Path("x"), 1, 0) as display:
            display.begin(CASE, 1, False)
            display.show(PhaseEntered("warmup"))
            display.show(StepTaken("epoch", step=9, total=20, memory_bytes=3 * 2**30))
            display.end(record())
        terminal.flush()
        shown = ""
        while "accuracy" not in shown:  # a terminal hands on piece by piece
            shown += os.read(leader, 1 << 20).decode()
    os.close(leader)
    for text in ("batch size 512", "warmup", "step 10 of 20", "3.00 GiB"):
        assert text in shown


def test_a_command_that_tells_of_no_epochs_has_none(capsys: Capture) -> None:
    case = Case(command="python train.py", dataset="own")
    told = {"epoch_time_s": 35.07, "measured_images": 10_000, "train_images": 10_000}
    with Display(Path("x"), 1, 0) as display:
        display.begin(case, 1, False)
        display.end(make_record(case, status=Status.OK, unit="items", **told))
    assert capsys.readouterr().err.endswith(": 35.07 s for 10,000 items\n")
