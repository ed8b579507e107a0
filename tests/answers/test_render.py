"""Text on a terminal, of which no line is too wide; cells of Markdown and LaTeX."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from bench.answers.render import documents as markdown
from bench.answers.render.table import (
    Answer,
    Cell,
    Document,
    Head,
    NextStep,
    Notice,
    Prominence,
    Table,
)
from bench.answers.render.terminal import WIDTH, draw, draw_table, make_plain


def make(**parts: Any) -> Document:
    """A document of parts that are given."""
    opening = tuple(table for table in parts["tables"] if table.level is not Prominence.DETAIL)
    return cast(Document, SimpleNamespace(constants=(), opening=opening, **parts))


def screen_of(report: Document, width: int = WIDTH) -> str:
    """The first screen on a terminal of so many columns, which no line but a command exceeds."""
    console = make_plain(width)
    draw(report, console)
    screen = console.export_text()
    lines = [line for line in screen.splitlines() if not line.startswith("  ")]
    assert max(map(cell_len, lines), default=0) <= width
    draw(report, console, full=True)
    return screen


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
        level = draw_from(st.sampled_from(list(Prominence)))
        return Table("t", draw_from(WORDS), heads, rows, (), groups, tuple(take(3)), level)

    notices = st.builds(Notice, st.text(min_size=1, max_size=50), WORDS, WORDS, WORDS)
    answers = st.builds(Answer, WORDS, st.lists(WORDS, max_size=6).map(tuple))
    commands = st.lists(WORDS, min_size=1, max_size=30).map(shlex.join)
    return make(
        title=draw_from(WORDS),
        subject=draw_from(WORDS),
        answers=tuple(take(9, answers)),
        warnings=tuple(take(9, notices)),
        tables=tuple(make_table() for _ in range(draw_from(st.integers(0, 3)))),
        notes=tuple(take(3)),
        outcomes=draw_from(WORDS),
        next_step=draw_from(st.none() | st.builds(NextStep, WORDS, commands)),
    )


@settings(deadline=None, max_examples=30)
@given(documents(), st.sampled_from([40, 80, 100, 200]))
def test_no_line_of_any_document_is_wider_than_the_terminal(document: Document, width: int) -> None:
    screen_of(document, width)


def make_document(**parts: Any) -> Document:
    table = Table("overview", "Overview", (Head("a", "case"),), ((Cell("fp32"),),), ())
    given: dict[str, Any] = {
        "answers": (Answer("", ("It is fast.",)),),
        "warnings": (),
        "tables": (
            table,
            Table("b", "Beside", table.heads, table.rows, (), level=Prominence.TABLE),
        ),
        "next_step": None,
    }
    given |= {"title": "t", "subject": "t: A card", "notes": (), "outcomes": "1 run: 1 ok."}
    return make(**given | parts)


def test_warnings_with_one_remedy_are_one_line_and_three_are_shown() -> None:
    fix = "Close other programs, or use --repeats 5 or more."
    notices = [
        Notice("Noisy", "found", fix, "6 of 18 runs"),
        Notice("Throttled", "found", "Improve the cooling.", "1 of 18 runs"),
        Notice("Spread", "found", fix),
        Notice("Extrapolated", "found", "Use --fraction 1.", level=Prominence.DETAIL),
        *(Notice(f"N{i}", "found", f"Use --flag {i}.") for i in range(3)),
    ]
    lines = screen_of(make_document(warnings=tuple(notices))).splitlines()
    assert [line for line in lines if line.startswith("!")] == [
        "! Noisy (6 of 18 runs), Spread: Close other programs, or use --repeats 5 or more.",
        "! Throttled (1 of 18 runs): Improve the cooling.",
        "! N0: Use --flag 0.",
    ]


def test_a_command_is_whole_so_that_it_can_be_pasted() -> None:
    words = ["python", "-m", "bench.sweep", "--out", "a folder/--b", "--data-dir", "d" * 90]
    screen = screen_of(make_document(next_step=NextStep("do it", shlex.join(words))))
    assert f"Next: do it.\n  {shlex.join(words)}\n" in screen


@given(st.text())
def test_markdown_cells_stay_one_cell(text: str) -> None:
    line = markdown._row(iter([text, "next"]))
    assert "\n" not in line
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


@given(st.text())
def test_latex_leaves_no_special_character_bare(text: str) -> None:
    escaped = markdown.escape_latex(text)
    bare = re.sub(r"\\(?:[&%$#_{}]|text\w+\{\})|\$\\\w+\$|\$\^\\circ\$|\{\[\}|\{\]\}", "", escaped)
    assert not set(bare) & set("&%$#_{}~^\\<>|[]")
    assert "\n" not in escaped


def test_heads_take_more_lines_before_cells_do_and_no_cell_is_cut() -> None:
    heads = (
        Head("case", "case", number=False),
        Head("time", "epoch time (s), range"),
        Head("remarks", "what to know", number=False, wrap=True),
        Head("left", "left out first", keep=1),
    )
    sentence = "slow steps made it longer by 12 % and more"
    rows = (
        (Cell("fp32"), Cell("≈33.14"), Cell(sentence), Cell("7")),
        (Cell("fp16"), Cell("≈9.14"), Cell(""), Cell("8")),
    )
    table = Table("t", "Results", heads, rows, (), {0: "NVIDIA H200 · cifar10", 1: "another card"})

    def draw_at(width: int) -> list[str]:
        console = make_plain(width)
        draw_table(table, console)
        return console.export_text().splitlines()

    assert draw_at(90) == [
        "Results",
        " case  epoch time (s), range  what to know                                left out first",
        " " + "─" * 87,
        " NVIDIA H200 · cifar10",
        " fp32                 ≈33.14  slow steps made it longer by 12 % and more               7",
        "",
        " another card",
        " fp16                  ≈9.14                                                           8",
    ]
    assert draw_at(46) == [
        "Results",
        "         epoch time                   left out",
        " case    (s), range  what to know        first",
        " " + "─" * 45,
        " NVIDIA H200 · cifar10",
        " fp32        ≈33.14  slow steps made         7",
        "                     it longer by",
        "                     12 % and more",
        "",
        " another card",
        " fp16         ≈9.14                          8",
    ]
    assert draw_at(30)[-2:] == ["  Not shown at this width:", "  left out first."]
