"""Write a sweep's folder. A sweep is a folder::

    records.csv    one row per case and repeat, appended as each ends; see `SYNC_S`
    steps.csv      one row per training step, joined by record_id
    epochs.csv     one row per epoch of cases that train several, joined by record_id; only where
                   there are such cases
    work.csv       what the operations of a step compute and move, and with --profile their times,
                   joined by record_id
    ranks.csv      one row per process of cases that train on several GPUs, joined by record_id;
                   only where there are such cases
    config.json    the resolved configuration
    logs/          what each worker printed
    checkpoints/   with --checkpoint and several epochs, the last and the best of each run

One writer at a time holds a lock on the folder. An incomplete last line, left by a power cut, is
set aside and never parsed.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.errors import StoreError, UsageError
from bench.record import COLUMNS, SCHEMA, Column, EpochRow, RankRow, Record, Step, WorkRow, flatten
from bench.store.reader import read_config
from bench.store.table import (
    CONFIG,
    EPOCHS,
    LOGS,
    RANKS,
    RECORDS,
    STEPS,
    TABLES,
    WORK,
    Cells,
    read_text,
    spell_config,
    write_lines,
)
from bench.text import clean, read_time, replace_durably, replace_file, sync_folder

_BLOCK = 1 << 16

SYNC_S = 1.0
"""When `Store.append` returns, a run that took this many s is on the disk, with all before it, and
so is the first run after such a time. A power cut may lose shorter runs of the last second, or of
the half minute for which the kernel keeps unsynced data. Waiting for the disk took a fifth of the
CPU time of 10,000 runs that train nothing, and takes 5 ms a file on a slow disk."""


_NUMBERS = [c.name for c in COLUMNS.values() if c.optional and c.type in (int, float)]


def _leave_out_unreadable(values: dict[str, Any]) -> dict[str, Any]:
    """Clear what is no number, as NaN, and give the reason under ``missing``: one such cell would
    make a reader refuse the whole file. Whatever is a number is kept, however odd."""
    numbers = ((name, number) for name in _NUMBERS if (number := values[name]) is not None)
    odd = {name: number for name, number in numbers if not math.isfinite(number)}
    why = (f"{name}: read as {value}" for name, value in odd.items())
    missing = "; ".join(filter(None, (values["missing"], *why)))
    return {**values, **dict.fromkeys(odd), "missing": missing}


def _flatten(
    record_id: str, rows: Sequence[Step | EpochRow | WorkRow | RankRow], name: str
) -> Iterator[list[Any]]:
    """Lay rows out as lines of the file ``name``, without numbers that no reader accepts."""
    columns = list(TABLES[name].values())[1:]
    for row in rows:
        line: list[Any] = [record_id]
        for column in columns:
            cell = getattr(row, column.name)
            doubtful = column.type is float and column.optional and cell is not None
            line.append(None if doubtful and not math.isfinite(cell) else cell)
        yield line


class Store:
    """The only writer of a sweep's folder, made if absent; a context manager that holds its lock.

    It waits ``wait_s`` for another writer to finish, and ``on_wait`` is called with who that is.
    Raises UsageError: another sweep holds the folder, it cannot be written, or its records are not
    of this harness.
    """

    def __init__(
        self, folder: Path, wait_s: float = 0, on_wait: Callable[[str], None] = lambda who: None
    ) -> None:
        self.folder = folder
        self.set_aside: list[str] = []
        self._holder = folder / ".holder"
        # a store may be closed by a thread other than the one that opened it
        from filelock import FileLock

        self._lock = FileLock(folder / ".lock", thread_local=False)
        self._files: dict[str, io.FileIO] = {}
        self._old: dict[str, Cells] = {}  # tables with other columns, until `migrate`
        self._synced = -math.inf  # when all were last on the disk, by time.monotonic()
        self._late = set[str]()  # files whose last rows may not be on the disk
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            self._acquire(wait_s, on_wait)
            self._holder.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
            for name, columns in TABLES.items():
                if name in (RECORDS, STEPS) or (folder / name).exists():
                    self._files[name] = self._open(name, columns)
        except (OSError, NotImplementedError) as error:  # filelock's, where locks do not work
            self._close()
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--out {folder}: cannot be written ({why}); choose a folder that can"
            ) from error
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def append(
        self,
        record: Record,
        steps: Sequence[Step] = (),
        epochs: Sequence[EpochRow] = (),
        work: Sequence[WorkRow] = (),
        ranks: Sequence[RankRow] = (),
    ) -> None:
        """Write a record with all its rows, which a power cut then leaves, as far as `SYNC_S` says.
        The rows of the other files go first, so that a record never stands without its curves.
        Raises StoreError: the disk is full or the file cannot be written; earlier rows are intact.
        """
        self.migrate()
        took = read_time(record.finished_at) - read_time(record.started_at)
        durably = max(took, time.monotonic() - self._synced) >= SYNC_S
        tables = ((STEPS, steps), (EPOCHS, epochs), (WORK, work), (RANKS, ranks))
        lines = {
            name: write_lines(_flatten(record.record_id, rows, name))
            for name, rows in tables
            if rows
        }
        lines[RECORDS] = write_lines([_leave_out_unreadable(flatten(record)).values()])
        for name in self._late - lines.keys() if durably else ():
            _append(self._files[name], b"", durably)
        for name, data in lines.items():
            _append(self._find(name), data, durably)
        self._late |= lines.keys()
        if durably:
            self._synced = time.monotonic()
            self._late.clear()

    def migrate(self) -> None:
        """Rewrite files with other columns in the current ones, so that rows can be appended; what
        was there is kept beside them. Raises StoreError: they cannot be written."""
        for name, cells in self._old.items():
            try:
                shutil.copy2(self.folder / name, self.folder / f"{name}.before-{SCHEMA}")
                _write_table(self.folder / name, cells)
            except OSError as error:
                raise StoreError(f"{self.folder / name}: {error.strerror}") from error
            self._files.pop(name).close()
            self._find(name)
        self._old.clear()

    def _find(self, name: str) -> io.FileIO:
        """Return the file that rows are appended to; it is made if there is none yet."""
        if name not in self._files:
            try:
                self._files[name] = self._open(name, TABLES[name])
            except OSError as error:
                raise StoreError(f"{self.folder / name}: {error.strerror}") from error
        return self._files[name]

    def read_config(self) -> dict[str, Any]:
        return read_config(self.folder)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved configuration beside the records. Raises StoreError: it cannot be
        written."""
        try:
            replace_file(self.folder / CONFIG, spell_config(config))
        except OSError as error:
            raise StoreError(f"{self.folder / CONFIG}: {error.strerror}") from error

    def _acquire(self, wait_s: float, on_wait: Callable[[str], None]) -> None:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            if wait_s:
                on_wait(self._read_holder())
                with suppress(Timeout):
                    self._lock.acquire(timeout=wait_s)
                    return
            raise UsageError(
                f"--out {self.folder}: in use by {self._read_holder()}; "
                "wait for it with --wait, or choose another --out"
            ) from None

    def _read_holder(self) -> str:
        try:
            return clean(self._holder.read_text(errors="replace"))[:200]
        except OSError:
            return "another sweep"

    def _close(self) -> None:
        for name, file in self._files.items():
            with suppress(OSError):  # all was written without an error
                if name in self._late:
                    os.fsync(file.fileno())
            file.close()
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()

    def _open(self, name: str, columns: dict[str, Column]) -> io.FileIO:
        """Open a file for appending. An incomplete last line is set aside."""
        path = self.folder / name
        if torn := find_torn_tail(path):
            aside = path.with_name(f"{name}.torn-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
            aside.write_bytes(torn)
            os.truncate(path, path.stat().st_size - len(torn))
            self.set_aside.append(f"{name}: an unfinished last line was set aside as {aside.name}")
        header = write_lines([columns])
        if path.exists() and path.stat().st_size:
            with path.open("rb") as there:
                if there.read(len(header)) != header:
                    self._old[name] = read_text(path, columns)
        file = io.FileIO(path, "a")
        if not file.seek(0, os.SEEK_END):
            _append(file, header, durably=True)
            sync_folder(self.folder)
        return file


def _append(file: io.FileIO, data: bytes, durably: bool) -> None:
    """Append ``data`` to ``file`` or leave no trace. If ``durably``, wait until it is on the disk.
    Raises StoreError: it cannot be written."""
    end = file.seek(0, os.SEEK_END)
    try:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        if durably:
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):  # else the rest is a torn line, set aside next time
            file.truncate(end)
        raise StoreError(
            f"{file.name}: {error.strerror}; the rows before are intact, "
            "and the same command continues from them once there is space"
        ) from error


def _write_table(path: Path, cells: Cells) -> None:
    """Write a table with all columns, so that old rows line up with new ones. The file is replaced
    whole and durably. Raises OSError: it cannot be written."""
    with replace_durably(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(cells)
        writer.writerows(zip(*cells.values(), strict=True))
        text.detach()  # flushes it, and leaves the file open


def find_torn_tail(path: Path) -> bytes:
    """Return what an unfinished write left at the end of a file; empty if it ends properly. That is
    a line without its end, or one with NUL bytes, whose pages were not written."""
    if not path.exists():
        return b""
    with path.open("rb") as file:
        start = end = file.seek(0, os.SEEK_END)
        tail = b""
        while start and tail.find(b"\n", 0, -1) < 0:
            start = max(0, start - _BLOCK)
            file.seek(start)
            tail = file.read(min(_BLOCK, end - start)) + tail
            end = start
    last = tail[tail.rfind(b"\n", 0, -1) + 1 :]
    return b"" if last.endswith(b"\n") and b"\0" not in last else last
