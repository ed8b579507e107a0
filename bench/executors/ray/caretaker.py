"""Ends a local cluster when the process that started it has ended, however it ended.

`python -m bench.executors.ray.caretaker FOLDER` waits for the end of standard input. Ray's own
reaper leaves the agents of a node where its driver was killed: two processes were there 50 s later,
and the next `ray.init` may join what is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARK = "BENCH_RAY_CLUSTER"
"""Environment variable of all processes of a local cluster: the cluster's folder."""

_TITLE = b"ray::"
_PATIENCE_S = 5.0
_POLL_S = 0.1


def find_marked(folder: str) -> Iterator[int]:
    """Yield the ids of the processes of the cluster in ``folder`` and of those that they started.

    Ray's own processes may overwrite their environment with their title, but write logs there. A
    user's processes that only read there, such as a `tail -f` of a log, are not included.
    """
    mark = os.fsencode(f"{MARK}={folder}")
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0") or (
                (place / "cmdline").read_bytes().startswith(_TITLE) and _writes_into(place, folder)
            ):
                yield int(place.name)


def _writes_into(place: Path, folder: str) -> bool:
    for descriptor in (place / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(descriptor.readlink()).startswith(f"{folder}/"):
                opened = (place / "fdinfo" / descriptor.name).read_text().partition("flags:")[2]
                if int(opened.split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def end_marked(folder: str) -> None:
    """SIGKILL the processes of the cluster in ``folder`` until none is left, then remove it."""
    until = time.monotonic() + _PATIENCE_S
    # a process that is killed while it starts another leaves that one to the next pass
    while (found := {*find_marked(folder)}) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
