"""Formatting and writing of text for files and terminals."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

ESTIMATE = "≈"
"""Mark before each number that was not measured but derived from measurements."""

# also terminal controls beyond ASCII (U+009B starts a sequence), and changes of text direction
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
_FORMULA = tuple("=+-@＝＋－＠")  # full-width ones too: some spreadsheets treat them alike


GIB = 2**30


def write_number(value: float) -> str:
    """Format with four significant digits, grouped thousands, and an exponent only from a billion.

    >>> write_number(12345.6), write_number(33.1449), write_number(0.01234567)
    ('12,346', '33.14', '0.01235')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3e}"
    digits = 3 - math.floor(math.log10(abs(value))) if value else 1
    return f"{value:.{min(digits, 6)}f}"


class Explained(str, Enum):
    """Words of a fixed set, as spelled in files; each has a ``meaning`` to show to readers."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Explained:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    __str__ = str.__str__  # as StrEnum has it, which Python 3.10 lacks


def clean(text: str) -> str:
    """Make ``text`` one line of printable UTF-8, as every text cell is stored."""
    # nearly all text is printable, and checking that takes a fifth of the time
    return (text if text.isprintable() else _CONTROL.sub(" ", text)).strip()


def is_whole(text: str) -> bool:
    """Return whether ``text`` was decoded without a loss: without characters that stand for bytes
    which were no UTF-8."""
    return text.isprintable() and "\ufffd" not in text


def make_printable(text: str) -> str:
    """Do as `clean`, and drop any other unprintable or direction-changing character."""
    text = clean(text)
    return text if text.isprintable() else "".join(c for c in text if c.isprintable())


def capitalize(text: str) -> str:
    """Make the first letter a capital, and leave the others as they are.

    >>> capitalize("GPU shared"), capitalize("memory of the GPU")
    ('GPU shared', 'Memory of the GPU')
    """
    return text[:1].upper() + text[1:]


def write_percent(share: float) -> str:
    """Format 0.02 as ``2 %``."""
    return f"{100 * share:.4g} %"


def write_range(values: Iterable[float], write: Callable[[float], str]) -> str:
    """Format at least one number as a range.

    >>> write_range([7, 3, 5], str), write_range([5, 5], str)
    ('3 to 7', '5')
    """
    known = list(values)
    return " to ".join(dict.fromkeys(map(write, (min(known), max(known)))))


def write_text(text: str) -> str:
    """Make ``text`` a CSV cell that no spreadsheet takes for a formula."""
    text = clean(text)
    # a spreadsheet runs a cell that starts like this; the apostrophe makes it text there
    return f"'{text}" if text.startswith((*_FORMULA, "'")) else text


def replace_file(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, text as UTF-8: an interrupt or a full disk leaves the
    old content. It does not wait for the disk, so a power cut may undo it. Raises OSError: the file
    cannot be written."""
    temporary = file.with_name(f".{file.name}.part")  # of no user: .env may stand beside env
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make names just created in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def count(number: int, thing: str) -> str:
    """Format a number of things: ``1 epoch``, ``1,200 epochs``."""
    return f"{number:,} {thing}" + ("s" if number != 1 else "")


def write_seconds(seconds: float) -> str:
    """Format a time for people, with two digits, in seconds, minutes or hours.

    >>> write_seconds(0.318), write_seconds(89), write_seconds(5380), write_seconds(43000)
    ('0.32 s', '89 s', '90 min', '12 h')
    """
    size, unit = next(
        (size, unit) for size, unit in ((3600, "h"), (60, "min"), (0, "s")) if seconds >= 1.5 * size
    )
    return f"{float(f'{seconds / (size or 1):.2g}'):g} {unit}"


def read_clock() -> str:
    """Return the current time as records have it, UTC to the millisecond."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_time(text: str) -> float:
    """Return seconds since 1970; 0 if the text is no time, as in a file edited by hand."""
    with suppress(ValueError):
        return max(datetime.fromisoformat(text).timestamp(), 0.0)
    return 0.0


def name_first(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Name the first ``most``, and say how many more there are.

    >>> name_first(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def join_words(words: Sequence[str]) -> str:
    """Join at least one word as in a sentence.

    >>> join_words(["a", "b", "c"]), join_words(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def read_whole(text: str, least: int, most: int | None = None) -> int | None:
    """Return a whole number in ASCII digits; None if ``text`` is not one from ``least`` to
    ``most``.

    >>> read_whole("12", 1), read_whole("12", 1, 9), read_whole("1e3", 1)
    (12, None, None)
    """
    # a text of any length would take long to convert
    if not (text.isascii() and text.isdigit() and len(text) <= max(9, len(str(most)))):
        return None
    return int(text) if least <= int(text) <= (most or math.inf) else None


def read_number(text: str) -> float:
    """Return a finite number; NaN for other text.

    >>> read_number("0.5"), read_number("inf")
    (0.5, nan)
    """
    with suppress(ValueError):
        if text.isascii() and math.isfinite(value := float(text)):
            return value
    return math.nan


def read_percent(text: str) -> float:
    """Return ``2%`` as 0.02; NaN for other text."""
    number, sign, rest = text.strip().partition("%")
    return read_number(number) / 100 if sign and not rest else math.nan


_UNITS = {
    "TiB": 2**40,
    "TB": 10**12,
    "GiB": 2**30,
    "GB": 10**9,
    "MiB": 2**20,
    "MB": 10**6,
    "KiB": 2**10,
    "kB": 10**3,
    "B": 1,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]+)")


def parse_bytes(text: str) -> int:
    """Parse an amount of memory. Raises ValueError: it is not one; says what is right.

    >>> parse_bytes("21GiB"), parse_bytes("1.5 GB")
    (22548578304, 1500000000)
    """
    found = _SIZE.fullmatch(text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if not found or found[2].lower() not in units:
        raise ValueError(f"give a number with a unit ({', '.join(_UNITS)}), such as 21GiB")
    return round(float(found[1]) * units[found[2].lower()])


def write_bytes(number: int) -> str:
    """Format an amount of memory exactly, in the largest unit that gives a whole number.

    >>> write_bytes(21 * 2**30), write_bytes(24 * 10**9), write_bytes(1536 * 2**20)
    ('21GiB', '24GB', '1536MiB')
    """
    unit = next(name for name, factor in _UNITS.items() if number % factor == 0)
    return f"{number // _UNITS[unit]}{unit}"
