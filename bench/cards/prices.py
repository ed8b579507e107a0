"""Prices per hour of cards, from a file of the user's."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.errors import UsageError, nearest

UNIT = "unit"
"""The key of the currency; all others are cards."""


@dataclass(frozen=True)
class Prices:
    """Prices per hour, by the name of a card or a part of it; ``unit`` is the currency."""

    unit: str
    of_hour: Mapping[str, float]

    def find(self, card: str) -> float | None:
        """Return the price per hour of a card, or None: by the longest name that is a part of the
        card's name, in whole words, so that A10 does not match an A100."""
        held = [name for name in self.of_hour if _is_named(name, card)]
        return self.of_hour[max(held, key=len)] if held else None


def read_prices(file: Path, cards: Iterable[str]) -> Prices:
    """Read lines such as ``"H100 80GB" = 2.49`` (TOML), and ``unit = "EUR"``.

    Raises UsageError: the file cannot be read, a price is not a number above 0, or a name matches
    none of ``cards``.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--price {file}: {error.strerror}; give a file of prices") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--price {file}: {error}") from None
    unit, known = table.pop(UNIT, "unit of money"), [*dict.fromkeys(cards)]
    if not isinstance(unit, str):
        raise UsageError(f'--price {file}: {UNIT} should be text, such as "EUR"')
    for name, price in table.items():
        if type(price) not in (int, float) or not 0 < price < math.inf:
            raise UsageError(f"--price {file}: {name!r} should be a price of an hour above 0")
        if not any(_is_named(name, card) for card in known):
            raise UsageError(f"--price {file}: no card is {name!r}; {nearest(name, known)}")
    return Prices(unit, table)


def _is_named(name: str, card: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", card, re.IGNORECASE))
