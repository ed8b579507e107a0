"""The units that the cases of a report count: images, or those of a user's workload."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.workloads import IMAGES

if TYPE_CHECKING:
    from bench.render.cells import Row
    from bench.render.model import Table

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


def count_table_in(table: Table, units: str) -> Table:
    """Return the same table with ``units`` in its words, heads and notes."""
    heads = tuple(
        replace(head, label=count_in(head.label, units), help=count_in(head.help, units))
        for head in table.heads
    )
    words, notes = (tuple(count_in(t, units) for t in said) for said in (table.words, table.notes))
    return replace(table, heads=heads, words=words, notes=notes)


def describe_units(cases: Iterable[Row]) -> str:
    """Return which model counts what, if they differ; else empty."""
    words = dict.fromkeys(f"{case.unit or IMAGES} of {case.model}" for case in cases)
    return f"Items are {', '.join(words)}." if find_units(cases) == SEVERAL else ""
