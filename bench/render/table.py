"""The parts of a report in any format: cells, tables, answers, notices."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import cycle
from typing import Any

from bench.axis import Value
from bench.case import AXES, Case
from bench.precision import PRECISIONS
from bench.record import Status
from bench.study.axes import MACHINE, Machines
from bench.study.doubts import DOUBTS
from bench.study.quantities import is_number
from bench.study.runs import Spread
from bench.text import ESTIMATE as ESTIMATE
from bench.text import capitalize, write_number
from bench.workloads import IMAGES

NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: the text for people, and the value behind it for machines. The text of a
    number that is ``estimated`` begins with `bench.text.ESTIMATE`."""

    text: str
    value: float | str | None = None
    estimated: bool = False


@dataclass(frozen=True)
class Head:
    """The head of a column. A ``number`` is aligned right; ``better`` is lower, higher or empty. If
    a page is too narrow, the columns with the lowest ``keep`` are left out first; those with 9
    never are. A column that may ``wrap`` gets no more than the width that is left."""

    name: str
    label: str
    help: str = ""
    number: bool = True
    better: str = ""
    keep: int = 9
    wrap: bool = False


class Level(Enum):
    """The prominence of a table: what the first screen shows of it."""

    ANSWER = "its words, as answers"
    TABLE = "its rows"
    DETAIL = "nothing: a document shows it in full, and a terminal by --full"


@dataclass(frozen=True)
class Table:
    """Rows under heads, with a title above and notes below that must never be separated from the
    numbers. ``words`` are sentences between the title and the rows, which the rows support.
    ``groups`` maps the first row of each group to its heading, empty if a line is enough.
    ``question`` is what the table answers, as a reader would ask."""

    name: str
    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    groups: Mapping[int, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    level: Level = Level.DETAIL
    question: str = ""

    def take(self, columns: Iterable[int]) -> Table:
        """Return the same table with these of its columns."""
        kept = list(columns)
        return replace(
            self,
            heads=tuple(self.heads[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def drop_empty(
        self, empty: Collection[str] = ("", NOTHING), but: Collection[str] = ()
    ) -> Table:
        """Return the same table without the columns whose cells are all in ``empty``, except the
        columns named in ``but``."""
        return self.take(
            i
            for i, head in enumerate(self.heads)
            if head.name in but or any(row[i].text not in empty for row in self.rows)
        )


@dataclass(frozen=True)
class Answer:
    """A few sentences on one machine, the most important first."""

    about: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Notice:
    """Something to know before believing the numbers."""

    label: str
    found: str  # as sentences
    remedy: str = ""  # a sentence with the flag or the command that helps; empty for none
    where: str = ""  # how much of the data it affects: ``6 of 18 runs``; may be empty
    level: Level = Level.TABLE  # `Level.DETAIL` if a first screen says it in another way

    @property
    def text(self) -> str:
        """All of it except the label."""
        return " ".join(filter(None, (self.where and f"{self.where}.", self.found, self.remedy)))

    @property
    def line(self) -> str:
        """The label and the text."""
        return f"{self.label}: {self.text}"


@dataclass(frozen=True)
class NextStep:
    """What to do next, as a sentence, and the command line that does it; empty for none."""

    why: str
    command: str = ""


Document = Any
"""What is written in a format: an object with the parts of a document, each may be computed on
demand: texts ``title``, ``subject`` (what was measured) and ``outcomes`` (how cases ended);
sentences ``constants``, ``origin`` (what comes first if nothing was measured) and ``notes``;
``answers``, the ``next_step`` or None, ``warnings`` (most serious first), all ``tables``, and the
``opening`` ones, which a first screen shows in part."""


# -------------------------------------------------------------------------------------------- cells


Row = Any  # a run or a result, its cells and quantities as attributes


def mark_part(*rows: Row) -> str:
    """Return the mark of an estimate if one of these cases measured less than an epoch."""
    return ESTIMATE if any(row.part < 1 for row in rows) else ""


def number_cell(
    value: float | None, write: Callable[[float], str] = write_number, estimated: bool = False
) -> Cell:
    """Return the cell of a number that is not a quantity of a case, with the mark of an estimate;
    `NOTHING` if there is no number."""
    if value is None or not is_number(value):
        return Cell(NOTHING)
    return Cell(f"{ESTIMATE * estimated}{write(value)}", value, estimated)


def write_tenths(share: float) -> str:
    """Write a share in per cent with one decimal, without the % sign: 0.0312 as ``3.1``."""
    return f"{100 * share:z.1f}"  # 0.0, not -0.0


def write_ends(
    ends: Iterable[float | None] | None, write: Callable[[float], str], between: str = "–"
) -> str | None:
    """Write the two ends of an interval; None if they are not known, as None or NaN."""
    known = [end for end in ends or () if end is not None and not math.isnan(end)]
    return between.join(map(write, known)) if len(known) == 2 else None


def write_signed(value: float, decimals: int) -> str:
    """Write a difference with its sign, or without one if it rounds to zero."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else text[1:]


def write_ratio(value: float) -> str:
    """Write a ratio with two decimals, or two significant digits below a tenth."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def name_spread(cases: Iterable[Row]) -> str:
    """Return the suffix of the times' column head, which names the kind of their spread."""
    kinds = {case.spread for case in cases} - {Spread.NONE.value}
    words = {Spread.WITHIN.value: " [within the run]", Spread.RANGE.value: ", range"}
    return ", spread" if len(kinds) > 1 else "".join(map(words.__getitem__, kinds))


def outcome(status: str, inferred: bool = False) -> str:
    """Name an outcome without a time: out of memory in words, others by their status."""
    names = {Status.OOM.value: "out of memory", Status.OOM_SUSPECTED.value: "out of memory?"}
    return names.get(status, status) + (" (inferred)" if inferred else "")


def remarks(row: Row, but: Iterable[str] = ()) -> str:
    """Return what a reader must know before believing a row, except the doubts in ``but``."""
    said = [d.remark for d in DOUBTS.values() if d.name not in but and getattr(row, d.name)]
    if row.runs > row.repeats:
        said.append(f"{row.repeats} of {row.runs} runs")
    if row.apart:
        said.append(row.apart)
    return ", ".join(said)


def name_place(row: Row, axes: Collection[str], machines: Machines) -> str:
    """Name a case as `name_case`, after its machine if that is among the axes."""
    where = [machines[row.sweep, row.machine]] if MACHINE in axes else []
    return " · ".join([*where, name_case(row, axes)])


def name_case(row: Row, axes: Iterable[str]) -> str:
    """Return the `Case.label` of a run or a result, by those of some axes that a `Case` has. Their
    values are spelled as in CSV, so no `Case` is parsed for it."""
    values: dict[str, Value] = {}
    for name in (name for name in axes if name in AXES):
        value = getattr(row, name)
        values[name] = None if value == "" else value
    return Case(**values).label(values)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- units


EPOCH = "epoch"
"""What times are of unless all are of commands that tell of no epoch."""

SEVERAL = "items"  # the word for several kinds at once; the notes say which model has which


def find_units(cases: Iterable[Row]) -> str:
    """Return the word for what ``cases`` count."""
    found = {case.unit or IMAGES for case in cases}
    return found.pop() if len(found) == 1 else SEVERAL if found else IMAGES


def count_in(text: str, units: str) -> str:
    """Replace images by ``units`` in a label, a help or a caption of the harness.

    A batch consists of items, each of which may have several units. A text of the harness says
    items where it means them; they are called images if images are counted.

    >>> count_in("images/s", "tokens"), count_in("Images per second", "tokens")
    ('tokens/s', 'Tokens per second')
    >>> count_in("items per step", "tokens"), count_in("items per step", "images")
    ('items per step', 'images per step')
    """
    said = "items" if units == IMAGES else "images"
    for old, new in ((said, units), (said[:-1], units.removesuffix("s"))):
        text = text.replace(old, new).replace(old.capitalize(), new.capitalize())
    return text


def find_period(cases: Iterable[Row]) -> str:
    """Return what the times of ``cases`` are of: an epoch, or where all are of commands that tell
    of none, a run or as many items."""
    timed = [case for case in cases if is_number(case.epoch_time_s)]
    told = any(case.command == "" or is_number(case.steps_per_epoch) for case in timed)
    if told or not timed:
        return EPOCH
    known = [int(c.train_images) for c in timed if is_number(c.train_images) and c.unit != "runs"]
    return f"{max(known):,} items" if known else "run"


def say_period(text: str, period: str) -> str:
    """Replace the epoch in a text of the harness by what times are of.

    >>> say_period("Epoch time (s)", "run"), say_period("12 s an epoch", "10,000 items")
    ('Run time (s)', '12 s for 10,000 items')
    """
    words = {"an epoch": "a run", "epoch": "run"}
    if period not in (EPOCH, "run"):
        words = {"of an epoch": f"of {period}", "an epoch": f"for {period}"}
        words |= {"epoch time": f"time of {period}", "the epoch": period, "epoch": period}
    for old, new in words.items() if period != EPOCH else ():
        text = text.replace(old, new).replace(capitalize(old), capitalize(new))
    return text


def word_table(table: Table, units: str, period: str = EPOCH) -> Table:
    """Return the same table with ``units`` and ``period`` in its title, words, heads and notes."""

    def say(text: str) -> str:
        return say_period(count_in(text, units), period)

    heads = tuple(replace(h, label=say(h.label), help=say(h.help)) for h in table.heads)
    words, notes = (tuple(map(say, said)) for said in (table.words, table.notes))
    title = say_period(table.title, period)
    return replace(table, title=title, heads=heads, words=words, notes=notes)


def describe_units(cases: Iterable[Row]) -> str:
    """Return which model counts what, if they differ; else empty."""
    pairs = dict.fromkeys((case.unit or IMAGES, case.model) for case in cases)
    said = ", ".join(f"{unit} of {model}" for unit, model in pairs)
    return f"Items are {said}." if len({unit for unit, _ in pairs}) > 1 else ""


# ------------------------------------------------------------------------------------------ palette


INK, GRID = "#15181c", "#c9ced6"

STYLE = {
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture everywhere
    "grid.color": GRID,
    "text.parse_math": False,  # a name may hold mathtext markup
}
"""The settings of matplotlib for all figures."""

PALETTE: tuple[tuple[str, str], ...] = (
    ("#4f5b69", "#aeb9c7"),
    ("#a85507", "#f0a848"),
    ("#1a5fc0", "#70abff"),
    ("#0b7480", "#3ec6d2"),
    ("#a8195c", "#f47cb0"),
    ("#6a3cc2", "#b498ff"),
    ("#2f7a1f", "#7fce6a"),
    ("#7a5c00", "#d9bf4a"),
    ("#b3261e", "#ff8a80"),
    ("#3f51b5", "#9fa8ff"),
    ("#8c4a2f", "#d9a48c"),
)
"""Colours on light and on dark; each at least 4.5 : 1 against its background."""

_SHAPES = "osD^vPX*<>hpd"  # matplotlib's markers

COLOURS: dict[str, tuple[str, str]] = dict(zip(PRECISIONS, cycle(PALETTE), strict=False))
"""Precision -> its colour on light and on dark."""

MARKERS: dict[str, str] = dict(zip(PRECISIONS, cycle(_SHAPES), strict=False))
"""Precision -> its marker, for readers who do not see the colours."""
