"""A section of a report: its columns, where it is cut, and what is said of the rest."""

from __future__ import annotations

import math

from bench.render.model import NOTHING, Cell, Level, Table
from bench.render.section import Column, Section, Sheet, join
from bench.report.document import SECTIONS

NUMBER: Column[int] = Column("number", "number", "itself", lambda row: row)


def fill(rows: list[int], *columns: Column[int], **sheet: object) -> Table:
    section = Section("some", "What is it?", lambda found: found, Level.TABLE)
    (table,) = section.tabulate([Sheet("Some", columns or [NUMBER], rows, **sheet)])  # type: ignore[arg-type]
    return table


def test_a_table_has_the_question_and_the_level_of_its_section() -> None:
    table = fill([1])
    assert (table.name, table.question, table.level) == ("some", "What is it?", Level.TABLE)
    assert fill([1], name="other").name == "other"


def test_without_rows_there_is_no_table() -> None:
    section = Section("some", "What is it?", lambda found: [Sheet("Some", [NUMBER], found)])
    assert list(section.tabulate([])) == []
    assert len(section.fill(Sheet("Some", [NUMBER], [], empty=())).heads) == 1


def test_a_row_says_a_cell_or_words_or_a_number_or_nothing() -> None:
    said = {1: "words", 2: 3, 3: None, 4: Cell("2 s", 2.0)}
    table = fill([*said], Column("it", "it", "", lambda row: said[row]))
    assert [row[0] for row in table.rows] == [
        Cell("words"), Cell("3", 3), Cell(NOTHING), Cell("2 s", 2.0)
    ]  # fmt: skip


def test_a_column_writes_its_numbers_and_nan_is_nothing() -> None:
    half = Column[int](
        "half", "half", "", lambda row: row / 2 or math.nan, write="{:.1f} GiB".format
    )
    assert [row[0] for row in fill([3, 0], half).rows] == [Cell("1.5 GiB", 1.5), Cell(NOTHING)]


def test_a_column_that_says_nothing_is_left_out_unless_it_is_there_always() -> None:
    silent = Column[int]("silent", "silent", "", lambda row: None)
    always = Column[int]("always", "always", "", lambda row: "", always=True)
    assert [head.name for head in fill([1], NUMBER, silent, always).heads] == ["number", "always"]
    zero = Column[int]("zero", "zero", "", lambda row: "0")
    assert [head.name for head in fill([1], NUMBER, zero, empty=("0",)).heads] == ["number"]
    assert len(fill([1], NUMBER, silent, empty=()).heads) == 2


def test_what_may_wrap_is_words_unless_it_is_said_to_be_a_number() -> None:
    columns = [
        Column[int](f"{wrap}{number}", "", "", lambda row: row, number=number, wrap=wrap)
        for wrap, number in ((False, None), (True, None), (True, True))
    ]
    assert [head.number for head in fill([1], *columns).heads] == [True, False, True]


def test_groups_begin_where_parts_do() -> None:
    assert join([("a", [1, 2]), ("b", [3])]) == ([1, 2, 3], {0: "a", 2: "b"})
    assert fill([1, 1, 2], groups={0: "", 2: ""}).groups == {2: ""}, "none before the first row"


def test_every_section_asks_a_question_of_its_own() -> None:
    assert all(section.question.endswith("?") for section in SECTIONS)
    assert len({section.question for section in SECTIONS}) == len(SECTIONS)
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)
