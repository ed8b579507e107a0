"""A card's folder: which one a run continues, what is known of each phase, and its limits.

A folder is flat and small, so that it can be sent and committed as it is: at most `MOST_FILES`
files of at most `MOST_BYTES` each, with plain names. During a run it also has ``logs/``; `tidy`
folds the important parts into `LOG`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.plain import read_value
from bench.record import Status
from bench.store.cells import CONFIG, LOGS, RANKS, RECORDS, STEPS, WORK
from bench.store.reader import read_records
from bench.store.scale_map import GRADIENTS, MAP, TRAININGS
from bench.text import replace_file

STATE, CHECKS, LOG, PAGE = "card.json", "checks.json", "log.txt", "report.html"
FIGURE, LOCK = "images-per-s.png", ".card.lock"
FILES = (STATE, RECORDS, STEPS, WORK, RANKS, CONFIG, CHECKS, LOG, PAGE, FIGURE)
MAP_FILES = (MAP, GRADIENTS, TRAININGS)
"""Files of `bench.scales`, which are kept within `CHECKS`."""

DERIVED = (PAGE, FIGURE)
"""Files made from the records, which a folder that is too large can do without."""

MOST_FILES = len(FILES)
MOST_BYTES = 16 * 2**20
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LOG_BYTES = 4 * 2**20  # kept of the end of the log
_TAIL_BYTES = 32 * 2**10  # kept of the end of a failed worker's log
_FAILURES = (Status.ERROR, Status.KILLED, Status.TIMEOUT, Status.OOM_SUSPECTED)
VERSION = 1


class State(StrEnum):
    """How far a phase has come."""

    DONE = "done"
    DOUBTFUL = "doubtful"
    """It has run, and its result casts doubt on the numbers."""
    CUT = "cut"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    ABSENT = "absent"
    """This version of the harness, or this machine, does not support it."""

    @property
    def finished(self) -> bool:
        """Whether it is not run again."""
        return self in (State.DONE, State.DOUBTFUL, State.ABSENT)


@dataclass
class Entry:
    """The outcome of a phase: its state, total seconds, return code and a line about it."""

    state: State
    seconds: float = 0.0
    returncode: int | None = None
    line: str = ""


@dataclass
class Card:
    """The state of a folder, from the file `STATE`, which only this class reads and writes.
    ``identity`` is what all measurements of a folder must share: the columns that `bench.sweep`
    compares, the dataset and the fraction."""

    folder: Path
    rehearsal: bool
    identity: dict[str, Any]
    started_at: str = ""
    seconds: float = 0.0
    complete: bool = False
    phases: dict[str, Entry] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    tests_code: str = ""

    def write(self) -> None:
        values = {"version": VERSION, **asdict(self)}
        del values["folder"]
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        replace_file(self.folder / STATE, text)

    @classmethod
    def read(cls, folder: Path) -> Card:
        """Read a folder's state. Raises UsageError: it is missing or not of this version."""
        try:
            values = json.loads((folder / STATE).read_text())
            if values.pop("version") != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            values["phases"] = read_value(dict[str, Entry], values["phases"])
            return cls(folder=folder, **values)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{folder / STATE}: cannot be read ({error}); move it away") from error

    def finished(self, phase: str) -> bool:
        return phase in self.phases and self.phases[phase].state.finished

    def done(self, *phases: str) -> bool:
        """Whether all of these phases have ended well."""
        return all(p in self.phases and self.phases[p].state is State.DONE for p in phases)

    def read_checks(self) -> dict[str, Any]:
        """Return the answers of the checks, by their names; empty if they cannot be read."""
        try:
            checks: dict[str, Any] = json.loads((self.folder / CHECKS).read_text())
        except (OSError, ValueError):
            return {}
        return checks

    def write_checks(self, name: str, answer: object) -> None:
        checks = {**self.read_checks(), name: answer}
        text = json.dumps(checks, indent=1, ensure_ascii=False) + "\n"
        (self.folder / CHECKS).write_text(text)


def read_cards(parent: Path) -> list[Card]:
    """Return the cards in the folders of ``parent``, the newest first, except unreadable ones."""
    cards = []
    for file in parent.glob(f"*/{STATE}"):
        with suppress(UsageError):
            cards.append(Card.read(file.parent))
    return sorted(cards, key=lambda card: card.started_at, reverse=True)


def choose_card(
    parent: Path, name: str, identity: Mapping[str, Any], *, rehearsal: bool, new: bool = False
) -> tuple[Card, str]:
    """Return the card to use and a remark on older ones, or "". Unless ``new``, it is the newest of
    the same identity, preferably an incomplete one; if there is none, a new one called ``name``."""
    cards = [card for card in read_cards(parent) if card.rehearsal == rehearsal]
    same = [card for card in cards if card.identity == dict(identity)]
    remark = ""
    if not new:
        if unfinished := [card for card in same if not card.complete]:
            return unfinished[0], f"continuing in {unfinished[0].folder}"
        if same:
            return same[0], f"{same[0].folder} is complete; --new measures everything again"
        gpu = [card for card in cards if card.identity.get("gpu") == identity.get("gpu")]
        if gpu:
            differing = (
                f"{key} was {gpu[0].identity.get(key)}, now {value}"
                for key, value in identity.items()
                if gpu[0].identity.get(key) != value
            )
            remark = f"not continuing in {gpu[0].folder}: {'; '.join(differing)}"
    folder, number = parent / name, 2
    while folder.exists():
        folder, number = parent / f"{name}-{number}", number + 1
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Card(folder, rehearsal, dict(identity), started_at=started), remark


def fold_map(card: Card) -> None:
    """Move the files of a loss-scale map into `CHECKS`, and delete its pages."""
    texts = {name: (card.folder / name).read_text(encoding="utf-8") for name in MAP_FILES}
    card.write_checks("scales", texts)
    for file in card.folder.glob("scales.*"):
        file.unlink()
    for name in MAP_FILES:
        (card.folder / name).unlink(missing_ok=True)


def unfold_map(card: Card) -> None:
    texts = card.read_checks().get("scales", {})
    for name in MAP_FILES:
        if name in texts:
            (card.folder / name).write_text(texts[name], encoding="utf-8")


def tidy(folder: Path) -> list[str]:
    """Delete what the limits do not allow, and fold the logs of failed cases into `LOG`.
    Measurements are never deleted; return a line for each limit that is broken."""
    with (folder / LOG).open("a", encoding="utf-8") as log:
        for file in _list_loose_ends(folder):
            log.write(f"\n== {file.relative_to(folder)} ==\n{_tail(file, _TAIL_BYTES)}\n")
    shutil.rmtree(folder / LOGS, ignore_errors=True)
    for name in (LOCK, ".lock", ".holder", f".{STATE}", f".{CONFIG}", *MAP_FILES):
        (folder / name).unlink(missing_ok=True)
    for torn in folder.glob("*.torn-*"):
        torn.unlink()
    if (folder / LOG).stat().st_size > _LOG_BYTES:
        kept = _tail(folder / LOG, _LOG_BYTES)
        (folder / LOG).write_text(f"[the beginning is left out]\n{kept}", encoding="utf-8")
    return check_limits(folder)


def check_limits(folder: Path) -> list[str]:
    """Delete derived files above the limit; return a line for each limit that is still broken."""
    for name in DERIVED:
        if (folder / name).is_file() and (folder / name).stat().st_size > MOST_BYTES:
            (folder / name).unlink()
    entries, problems = sorted(folder.iterdir()), []
    for entry in entries:
        if entry.is_symlink() or not entry.is_file():
            problems.append(f"{entry.name}: is not a plain file")
        if not _NAME.fullmatch(entry.name):
            problems.append(f"{entry.name}: has unusual characters in its name")
        if entry.is_file() and entry.stat().st_size > MOST_BYTES:
            problems.append(f"{entry.name}: is larger than {MOST_BYTES // 2**20} MiB")
    if len(entries) > MOST_FILES:
        extra = ", ".join(entry.name for entry in entries if entry.name not in FILES)
        problems.append(f"{len(entries)} files, where {MOST_FILES} are allowed; move away {extra}")
    return problems


def _list_loose_ends(folder: Path) -> Iterator[Path]:
    """Yield the files to keep from the logs: those of failed cases, and torn lines."""
    logs: set[str] = set()
    with suppress(UsageError):
        frame = read_records(folder)
        logs = set(frame["log"][frame["status"].isin([*map(str, _FAILURES)])])
    yield from (folder / name for name in sorted(filter(None, logs)) if (folder / name).is_file())
    yield from sorted(folder.glob("*.torn-*"))


def _tail(file: Path, size: int) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode(errors="replace")
