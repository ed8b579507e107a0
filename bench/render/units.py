"""What the cases of a report count, images or a user's own, and what their times are of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.study.quantities import is_number
from bench.text import capitalize
from bench.workloads import IMAGES

if TYPE_CHECKING:
    from bench.render.cells import Row
    from bench.render.model import Table

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
    said = "item" if units == IMAGES else "image"

    def name(match: re.Match[str]) -> str:
        word = units if match[0].endswith("s") else units.removesuffix("s")
        return word.capitalize() if match[0][0].isupper() else word

    return re.sub(rf"\b{said}s?\b", name, text, flags=re.IGNORECASE)


def find_period(cases: Iterable[Row]) -> str:
    """Return what the times of ``cases`` are of: an epoch, or where all are of commands that tell
    of none, a run or as many items."""
    timed = [case for case in cases if is_number(case.epoch_time_s)]
    if not timed or any(case.command == "" for case in timed):
        return EPOCH
    if all(case.unit == "runs" for case in timed):
        return "run"
    if any(is_number(case.steps_per_epoch) for case in timed):
        return EPOCH
    known = [int(case.train_images) for case in timed if is_number(case.train_images)]
    return f"{max(known):,} items" if known else "run"


def say_period(text: str, period: str) -> str:
    """Replace the epoch in a text of the harness by what times are of.

    >>> say_period("Epoch time (s)", "run"), say_period("12 s an epoch", "10,000 items")
    ('Run time (s)', '12 s for 10,000 items')
    """
    if period == EPOCH:
        return text
    if period == "run":
        words = {"an epoch": "a run", "epoch": "run"}
    else:
        words = {
            "of an epoch": f"of {period}",
            "an epoch": f"for {period}",
            "epoch time": f"time of {period}",
            "the epoch": period,
            "a whole epoch": period,
            "epoch": period,
        }

    def name(match: re.Match[str]) -> str:
        word = words[match[1].lower()] + (match[2] if period == "run" else "")
        return capitalize(word) if match[0][0].isupper() else word

    return re.sub(rf"\b({'|'.join(words)})(s?)\b", name, text, flags=re.IGNORECASE)


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
