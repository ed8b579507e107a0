"""Live bars in real terminals, and what is told where there is none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.base import progress
from bench.base.progress import Progress, watch
from tests.pytest_for_tests import Capture, Patch
from tests.terminal_for_tests import Terminal

TESTS = Path(__file__).parents[1]
FLAGS = ["--precision", "fp32", "--device", "cpu", "--dataset", "synthetic", "--executor", "fake"]
FLAGS += ["--no-report", "--repeats", "1"]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Terminal]:
    """A sweep of twelve runs of up to half a second, told of in a terminal."""
    command = [
        sys.executable,
        TESTS / "slow_sweep.py",
        *FLAGS,
        "--batch-size",
        *map(str, range(2, 14)),
    ]
    environment = {"BENCH_TEST_DELAY_S": "0.5", "PYTHONPATH": str(TESTS.parent)}
    terminal = Terminal([*command, "--out", tmp_path / "out"], environment=environment)
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()


def is_running(lines: list[str]) -> bool:
    """Whether some runs have ended, and another is in the middle of its steps."""
    ended = any(line.startswith("[1/") for line in lines)
    return ended and " runs " in lines[-2] and " of 40, 3.00 GiB" in lines[-1]


def test_a_terminal_has_what_runs_below_what_has_ended(sweep: Terminal) -> None:
    *above, total, running = sweep.read(is_running)
    assert any(line.startswith("[1/") for line in above)
    assert " of 12 runs " in total
    assert "━" in total
    assert running.startswith("fp32 · batch size ")
    sweep.resize(24, 60)
    *_, total, running = sweep.read(lambda lines: is_running(lines) and len(lines[-1]) <= 60)
    assert " of 12 runs " in total
    lines = sweep.finish()
    assert sweep.process.returncode == 0
    assert [sum(f"[{n}/12]" in line for line in lines) for n in range(1, 13)] == [1] * 12
    assert not any("━" in line or " of 40" in line for line in lines), "the bars are gone"
    assert not sweep.screen.cursor.hidden


def test_ctrl_c_is_told_of_among_the_bars(sweep: Terminal) -> None:
    sweep.read(is_running)
    sweep.write(b"\x03")
    lines = sweep.finish()
    assert sweep.process.returncode == 128 + signal.SIGINT
    assert b"stopping: what is done is kept; again to stop at once" in sweep.written
    text = "".join(lines)
    assert "; to continue: " in text
    assert "━" not in text
    assert "Traceback" not in text


def test_a_killed_sweep_leaves_the_cursor(sweep: Terminal) -> None:
    sweep.read(is_running)
    sweep.process.kill()
    sweep.finish()
    assert not sweep.screen.cursor.hidden


def run_in_terminal(code: str, **environment: str) -> Terminal:
    terminal = Terminal([sys.executable, "-c", code], environment=environment)
    terminal.finish()
    assert terminal.process.returncode == 0, terminal.lines
    return terminal


PRINTS = """
from time import sleep
from bench.base.progress import Progress, watch
with Progress(2, "check") as bars:
    bars.begin("first: what it is")
    with watch("reading", "image") as show:
        show(1200, 5000)
        sleep(0.6)
    print("printed")
    bars.end()
"""


def test_output_stays_above_the_bars_and_they_go() -> None:
    terminal = run_in_terminal(PRINTS)
    assert terminal.lines == ["printed"]
    for text in (b"0 of 2 checks", b"first: what it is", b"reading", b"image 1,200 of 5,000"):
        assert text in terminal.written
    assert b"\x1b[38" in terminal.written or b"\x1b[9" in terminal.written, "colours"


def test_a_phase_without_steps_has_no_bar() -> None:
    code = """
from time import sleep
from bench.base.progress import Progress
with Progress(None) as bars:
    bars.begin("fp32")
    bars.show(3, 12)
    bars.enter("evaluation")
    sleep(30)
"""
    terminal = Terminal([sys.executable, "-c", code])
    (line,) = terminal.read(lambda lines: "evaluation" in "".join(lines))
    terminal.process.kill()
    terminal.finish()
    assert line.startswith("fp32")
    assert "━" not in line


def test_how_long_is_left_is_told_where_it_is_known() -> None:
    code = """
from time import sleep
from bench.base.progress import Progress
for bars in (Progress(5, "run"), Progress(None, "run", limit_s=300)):
    with bars:
        bars.begin("first")
        bars.end(left_s=120)
        sleep(1.2)
"""
    written = run_in_terminal(code).written.decode()
    assert "1 of 5 runs" in written
    assert "about 2 min left" in written
    assert written.count(" left") == written.count("1 of 5 runs"), (
        "a budget says what is left of it"
    )
    assert " s of 5 min" in written


def test_no_colour_where_that_is_asked_and_no_bars_where_they_cannot_be() -> None:
    coloured = run_in_terminal(PRINTS, NO_COLOR="1").written
    assert b"0 of 2 checks" in coloured
    assert not any(code in coloured for code in (b"\x1b[38", b"\x1b[3", b"\x1b[9"))
    assert run_in_terminal(PRINTS, TERM="dumb").written == b"printed\r\n"


def test_what_tells_of_nothing_is_told_of_where_there_is_no_terminal(
    monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.0)
    errors = ""
    with watch("decoding"):
        while not errors:  # by a thread, once a second
            errors = capsys.readouterr().err
    assert errors.startswith("decoding: ")
    assert errors.endswith(" s\n")


def test_lines_are_whole_and_plain_where_there_is_no_terminal(capsys: Capture) -> None:
    with Progress(3, "run") as bars:
        bars.say("a \x1b[2J line " + "of words " * 40)
        bars.begin("name")
        bars.show(1, 2, "beside")
        bars.end()
    assert capsys.readouterr().err == "a  [2J line " + ("of words " * 40).strip() + "\n"


def test_a_sweep_in_the_background_writes_plain_lines(monkeypatch: Patch) -> None:
    terminal = sys.__stderr__
    assert terminal is not None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
    assert not progress.Progress(None).live
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())
    assert progress.Progress(None).live
