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

import io
import json
import math
import mmap
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.base.errors import StoreError, UsageError
from bench.base.text import clean, read_time, replace_file, sync_folder
from bench.results.store.table import (
    CONFIG,
    EPOCHS,
    LOGS,
    RANKS,
    RECORDS,
    STEPS,
    TABLES,
    WORK_FILE,
    read_columns,
    write_lines,
)
from bench.schema.record import SCHEMA, EpochRow, RankRow, Record, Step, WorkRow, flatten

SYNC_S = 1.0
"""When `Store.append` returns, a run that took this many s is on the disk, and so is the first run
after such a time. A power cut may lose shorter runs of the half minute for which the kernel keeps
unsynced data. Waiting for the disk took a fifth of the CPU time of 10,000 runs that train nothing,
and takes 5 ms a file on a slow disk."""


class Store:
    """The only writer of a sweep's folder, made if absent; a context manager that holds its lock.

    Raises UsageError: another sweep holds the folder, it cannot be written, or its records are not
    of this version of the harness.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.set_aside: list[str] = []
        self._holder = folder / ".holder"
        # a store may be closed by a thread other than the one that opened it
        from filelock import FileLock

        self._lock = FileLock(folder / ".lock", thread_local=False)
        self._files: dict[str, io.FileIO] = {}
        self._synced = -math.inf  # by time.monotonic()
        try:
            (folder / LOGS).mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._holder.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
            for name in TABLES:
                if name in (RECORDS, STEPS) or (folder / name).exists():
                    self._open(name)
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
        The rows of the other files go first, so that a record never stands without its curves. What
        is no number, as NaN, is left out, and of the record said under ``missing``.

        Raises StoreError: the disk is full or the file cannot be written; earlier rows are intact.
        """
        took = read_time(record.finished_at) - read_time(record.started_at)
        durably = max(took, time.monotonic() - self._synced) >= SYNC_S
        for name, rows in ((STEPS, steps), (EPOCHS, epochs), (WORK_FILE, work), (RANKS, ranks)):
            if rows:
                names = [*TABLES[name]][1:]
                cells = ([record.record_id, *(getattr(row, n) for n in names)] for row in rows)
                self._append(name, write_lines(cells), durably)
        values = flatten(record)
        numbers = [(name, value) for name, value in values.items() if isinstance(value, float)]
        odd = [f"{name}: read as {value}" for name, value in numbers if not math.isfinite(value)]
        values["missing"] = "; ".join(filter(None, [values["missing"], *odd]))
        self._append(RECORDS, write_lines([values.values()]), durably)
        if durably:
            self._synced = time.monotonic()

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the resolved configuration beside the records. Raises StoreError: it cannot be
        written."""
        # a line an entry: with an indent, json takes 3 s for 10,000 cases
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(of)}" for key, of in config.items())
        try:
            replace_file(self.folder / CONFIG, f"{{\n{lines}\n}}\n")
        except OSError as error:
            raise StoreError(f"{self.folder / CONFIG}: {error.strerror}") from error

    def _acquire(self) -> None:
        from filelock import Timeout

        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"--out {self.folder}: in use by {self._read_holder()}; "
                "wait until that ends, or choose another --out"
            ) from None

    def _read_holder(self) -> str:
        try:
            return clean(self._holder.read_text(errors="replace"))[:200]
        except OSError:
            return "another sweep"

    def _close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # all was written without an error
                os.fsync(file.fileno())
            file.close()
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()

    def _open(self, name: str) -> io.FileIO:
        """Open a file for appending. An incomplete last line is set aside."""
        path, header = self.folder / name, write_lines([TABLES[name]])
        if torn := find_torn_tail(path):
            aside = path.with_name(f"{name}.torn-{datetime.now(UTC):%Y%m%dT%H%M%S%f}")
            aside.write_bytes(torn)
            os.truncate(path, path.stat().st_size - len(torn))
            self.set_aside.append(f"{name}: an unfinished last line was set aside as {aside.name}")
        file = io.FileIO(path, "a+")
        file.seek(0)
        if (there := file.read(len(header))) and there != header:
            file.close()
            read_columns(path, TABLES[name])  # says what is wrong, if it can be read by no version
            raise UsageError(
                f"--out {self.folder}: {name} has other columns than this version of schema "
                f"{SCHEMA} writes; choose another --out: what reads one folder reads both"
            )
        self._files[name] = file
        if not there:
            self._append(name, header, durably=True)
            sync_folder(self.folder)
        return file

    def _append(self, name: str, data: bytes, durably: bool) -> None:
        """Append ``data`` to a file, made if there is none, or leave no trace. If ``durably``, wait
        until it is on the disk. Raises StoreError: it cannot be written."""
        try:
            file = self._files.get(name) or self._open(name)
            end = file.seek(0, os.SEEK_END)
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                if durably:
                    os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # else the rest is a torn line, set aside next time
                    file.truncate(end)
                raise
        except OSError as error:
            raise StoreError(
                f"{self.folder / name}: {error.strerror}; the rows before are intact, "
                "and the same command continues from them once there is space"
            ) from error


def find_torn_tail(path: Path) -> bytes:
    """Return what an unfinished write left at the end of a file; empty if it ends properly. That is
    a line without its end, or one with NUL bytes, whose pages were not written."""
    if not path.exists() or not path.stat().st_size:
        return b""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        last = data[data.rfind(b"\n", 0, -1) + 1 :]
    return b"" if last.endswith(b"\n") and b"\0" not in last else last
