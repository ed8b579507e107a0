"""The first screen: what a report prints on a terminal, whatever was measured."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from bench.case import Case
from bench.questions.notices import choose_next
from bench.record import Record, Status
from bench.render.model import (
    Answer,
    Cell,
    Document,
    Head,
    Level,
    NextStep,
    Notice,
    Table,
)
from bench.render.text import WIDTH, draw
from bench.report.__main__ import main as report_main
from bench.report.document import Report, build
from bench.study.sweeps import read_sweeps
from tests.planted.documents import Made
from tests.planted.records import make_record, measured, write_sweep
from tests.planted.results import read_results
from tests.planted.sweeps import Folders, make_card

CARD = {"gpu": "A card", "torch": "2.13"}


def screen_of(report: Document, width: int = WIDTH) -> str:
    """The first screen on a terminal of so many columns, which no line exceeds."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, force_terminal=False)
    draw(report, console)
    lines = buffer.getvalue().splitlines()
    command = [line for line in lines if line.startswith("  ")]  # broken between words alone
    assert max((cell_len(line) for line in lines if line not in command), default=0) <= width
    draw(report, console, full=True)
    assert [line for line in buffer.getvalue().splitlines() if line != line.rstrip()] == []
    return "".join(f"{line}\n" for line in lines)


def read(*folders: Path) -> Report:
    return build(read_sweeps(folders), None)


def ran(case: Case, *times: float, **values: Any) -> list[Record]:
    return [
        make_record(case, repeat=i, **{**CARD, **measured(time, 2**30), **values})
        for i, time in enumerate(times, 1)
    ]


WORDS = st.text(max_size=400) | st.sampled_from(
    ["a" * 300, "· " * 90, "長い" * 80, "x, y; z. " * 40]
)


@st.composite
def documents(draw_from: st.DrawFn) -> Document:
    def take(most: int, strategy: st.SearchStrategy[Any] = WORDS) -> list[Any]:
        found: list[Any] = draw_from(st.lists(strategy, max_size=most))
        return found

    def make_table() -> Table:
        heads = tuple(
            Head(str(i), label, number=draw_from(st.booleans()), keep=keep, wrap=keep > 4)
            for i, label in enumerate(take(9) or ["a"])
            for keep in [draw_from(st.integers(1, 9))]
        )
        cells = st.tuples(*(WORDS.map(Cell) for _ in heads))
        rows = tuple(take(3, cells)) * draw_from(st.sampled_from([1, 1, 40]))
        groups = dict.fromkeys(range(0, len(rows), 3), "group")
        level = draw_from(st.sampled_from(list(Level)))
        return Table("t", draw_from(WORDS), heads, rows, (), groups, tuple(take(3)), level)

    notices = st.builds(Notice, st.text(min_size=1, max_size=50), WORDS, WORDS, WORDS)
    answers = st.builds(Answer, WORDS, st.lists(WORDS, max_size=6).map(tuple))
    commands = st.lists(WORDS, min_size=1, max_size=30).map(shlex.join)
    return Made(
        draw_from(WORDS),
        draw_from(WORDS),
        (),
        tuple(take(1)),
        tuple(take(9, answers)),
        tuple(take(9, notices)),
        tuple(make_table() for _ in range(draw_from(st.integers(0, 3)))),
        tuple(take(3)),
        draw_from(WORDS),
        draw_from(st.none() | st.builds(NextStep, WORDS, commands)),
    )


@settings(deadline=None, max_examples=30)
@given(documents(), st.sampled_from([40, 80, 100, 200]))
def test_no_line_of_any_document_is_wider_than_the_terminal(document: Document, width: int) -> None:
    screen_of(document, width)


def make_document(**parts: Any) -> Document:
    table = Table("overview", "Overview", (Head("a", "case"),), ((Cell("fp32"),),), ())
    given: dict[str, Any] = {
        "origin": (),
        "answers": (Answer("", ("It is fast.",)),),
        "warnings": (),
        "tables": (table, Table("b", "Beside", table.heads, table.rows, (), level=Level.TABLE)),
        "next_step": None,
    }
    given |= parts
    return Made("t", "t: A card", (), notes=(), outcomes="1 case in 1 run: 1 ok.", **given)


def test_doubts_with_one_remedy_are_one_line_and_three_are_shown() -> None:
    fix = "Close other programs, or use --repeats 5 or more."
    notices = [
        Notice("Noisy", "found", fix, "6 of 18 runs"),
        Notice("Throttled", "found", "Improve the cooling.", "1 of 18 runs"),
        Notice("Spread", "found", fix),
        Notice("Extrapolated", "found", "Use --fraction 1.", level=Level.DETAIL),
        *(Notice(f"N{i}", "found", f"Use --flag {i}.") for i in range(3)),
    ]
    lines = screen_of(make_document(warnings=tuple(notices))).splitlines()
    assert [line for line in lines if line.startswith("!")] == [
        "! Noisy (6 of 18 runs), spread: close other programs, or use --repeats 5 or more.",
        "! Throttled (1 of 18 runs): improve the cooling.",
        "! N0: use --flag 0.",
    ]


def test_a_command_is_broken_so_that_it_can_be_pasted() -> None:
    words = ["python", "-m", "bench.sweep", "--out", "a folder/--b", "--batch-size"]
    words += [str(2**i) for i in range(8)] + ["--data-dir", "d" * 60, "--repeats", "3"]
    said = screen_of(make_document(next_step=NextStep("do it", shlex.join(words))))
    pasted = said.partition("Next: do it.\n")[2].partition("\n\n")[0]
    assert shlex.split(pasted.replace("\\\n", " ")) == words
    assert "\\\n" in pasted


FP16 = Case(precision="fp16", loss_scale=128.0)
GOOD = [*ran(Case(), 100, 100.1, 99.9), *ran(FP16, 50, 50.1, 49.9)]
SINGLE = [*ran(Case(), 100), *ran(FP16, 50)]


def lose(status: Status) -> Record:
    return make_record(FP16, **CARD, status=status, reason="boom")


def steps_of(*folders: Path) -> NextStep:
    sweeps = read_sweeps(folders)
    step = choose_next(sweeps, read_results(*sweeps)[1])
    assert step
    return step


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (SINGLE, "--repeats 3 shows which differences are real"),
        ([*ran(Case(), 1, 1, 1), lose(Status.ERROR)], "--retry error runs again what failed"),
        ([*GOOD[:3], lose(Status.INTERRUPTED)], "run the same command again"),
        (GOOD, "page with figures"),
    ],
)
def test_the_next_step_is_what_helps(records: list[Record], said: str, tmp_path: Path) -> None:
    assert said in steps_of(write_sweep(tmp_path / "s", records)).why


def test_two_sweeps_are_compared_and_profiles_explained(tmp_path: Path, planted: Folders) -> None:
    both = steps_of(*(write_sweep(tmp_path / name, GOOD) for name in ("a", "b")))
    assert both.command.startswith("python -m bench.compare ")
    assert steps_of(planted["profiled"]).command.startswith("python -m bench.why ")


def test_a_screen_of_one_s_own_network_says_nothing_of_others(tmp_path: Path) -> None:
    case = Case(model="mine:make", workload="mine:make", dataset="own", device="cpu")
    cpu = {**make_card("NVIDIA H200"), "gpu": "", "cpu": "AMD EPYC", "cuda": "", "cudnn": ""}
    values = measured(10, 2**30, peak_device_bytes=None, peak_process_bytes=2**30)
    rows = [make_record(case, **{**cpu, **values, "unit": "tokens"})]
    said = screen_of(read(write_sweep(tmp_path / "s", rows)))
    assert not re.search(r"CIFAR|GPU|images", said)


def test_what_was_asked_for_and_failed_is_on_the_first_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no case is recommended, since all are in doubt."""
    lost = {"missing": "eval_time_s: ValueError: no luck", "warmup_steady": False}
    write_sweep(tmp_path / "s", ran(Case(evaluate=True), 10.0, warmup_steps=9, **lost))
    assert report_main([str(tmp_path / "s")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Every case has a warning" in said
    assert "! Not all done (the only run): --evaluate failed: ValueError: no luck." in said
