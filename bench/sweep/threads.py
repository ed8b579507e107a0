"""The threads of cases on a CPU: as many as cores are free when their folder is begun.

The threads of an operation wait for each other by spinning. Beside one busy process on two cores a
step of dpn-small (batch 32) took 0.5 to 0.9 s with two threads and 0.18 s with one; on idle cores
0.10 s and 0.16 s.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.environment.host import THREADS
from bench.limits import BUSY_CORES
from bench.processes import OtherWork, count_cores, usable_cpus
from bench.store.reader import read_rows
from bench.store.table import RECORDS
from bench.text import count

_WATCHED_S = 1.0


@contextmanager
def hold_threads(out: Path | None) -> Iterator[None]:
    """Choose the threads of the workers that are started in the block, and say how many they are.

    A folder ``out`` with rows of a CPU keeps theirs, and a variable that the user has set holds.
    """
    name = THREADS[0]
    number = None if {*THREADS} & {*os.environ} else _choose_threads(out)
    if number is None:
        yield
        return
    print(
        f"note: an operation takes {count(number, 'thread')}, as many as cores were free when the "
        f"folder was begun; {name} sets another number",
        file=sys.stderr,
        flush=True,
    )
    os.environ[name] = str(number)
    try:
        yield
    finally:
        del os.environ[name]


def _choose_threads(out: Path | None) -> int | None:
    """Return the number of threads; None for torch's default."""
    if out is not None and (out / RECORDS).is_file():
        for row in (row for row in reversed(read_rows(out)) if row.device == "cpu"):
            kept = re.search(rf"\b{THREADS[0]}=([0-9]+)", row.variables)
            return int(kept[1]) if kept else None
    others = OtherWork()
    with others.watch():
        time.sleep(_WATCHED_S)
    # daemons of an idle machine use some
    number = max(1, int(count_cores() - others.cores() + BUSY_CORES))
    return number if number < len(usable_cpus()) else None
