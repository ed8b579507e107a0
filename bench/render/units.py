"""What the cases of a report count: images, or the units of a user's workload."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from bench.workloads import IMAGES

if TYPE_CHECKING:
    import pandas as pd

    from bench.render.model import Table

SEVERAL = "units"  # the word for several kinds at once; the notes say which model has which


def find_units(cases: pd.DataFrame) -> str:
    """The word for what ``cases`` count."""
    found = set(cases["unit"].fillna("").replace("", IMAGES))
    return found.pop() if len(found) == 1 else SEVERAL if found else IMAGES


def count_in(text: str, units: str) -> str:
    """Say ``units`` in a text of ours that says images: a label, a help, a caption.

    Items, of which batches consist, may have several units each: a text of ours says items where it
    means them, and they are called images where images are counted.

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
    """The same table, its words, heads and notes saying ``units``."""
    heads = tuple(
        replace(head, label=count_in(head.label, units), help=count_in(head.help, units))
        for head in table.heads
    )
    words, notes = (tuple(count_in(t, units) for t in said) for said in (table.words, table.notes))
    return replace(table, heads=heads, words=words, notes=notes)


def describe_units(cases: pd.DataFrame) -> str:
    """Which model counts what, where they differ; empty where they do not."""
    if find_units(cases) != SEVERAL:
        return ""
    pairs = cases[["model", "unit"]].drop_duplicates()
    words = (f"{unit or IMAGES} of {model}" for model, unit in pairs.itertuples(index=False))
    return f"Units are {', '.join(words)}."
