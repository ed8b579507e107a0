"""Text as it stands in files and on terminals."""

from __future__ import annotations

import re

# also what a terminal obeys beyond ASCII (U+009B starts a sequence) and what turns text around
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_FORMULA = tuple("=+-@＝＋－＠")  # the wide ones too: some spreadsheets read them alike


def clean(text: str) -> str:
    """Make ``text`` one line of printable UTF-8, as every text cell is stored."""
    return _CONTROL.sub(" ", text).strip()


def write_text(text: str) -> str:
    """Make ``text`` a cell that no spreadsheet takes for a formula; for every CSV written."""
    text = clean(text)
    # a spreadsheet runs a cell that starts like this; the apostrophe makes it text there
    return f"'{text}" if text.startswith((*_FORMULA, "'")) else text


def last_line(text: str) -> str:
    """The last line of a program's output that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def count(number: int, thing: str) -> str:
    """Write a number of things: ``1 epoch``, ``1,200 epochs``."""
    return f"{number:,} {thing}" + ("s" if number != 1 else "")
