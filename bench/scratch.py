"""Temporary folders, which the kill of a process leaves behind, and the next process removes."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

_YOUNG_S = 60  # one that is younger may not be locked yet
_IN_USE = (OSError, Timeout, NotImplementedError)  # the last where a file system has no locks


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary folder of some ``kind``, locked as long as this process lives; those of the same
    kind that are not locked any more are removed."""

    def __init__(self, kind: str) -> None:
        prefix = f"bench-{kind}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(*_IN_USE):  # or another user's, or gone
                if time.time() - left.stat().st_mtime > _YOUNG_S:
                    with _lock(left):
                        shutil.rmtree(left)
        super().__init__(prefix=prefix)
        held = _lock(Path(self.name))
        with suppress(*_IN_USE):
            held.acquire()
        weakref.finalize(self, held.release, force=True)


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", blocking=False, thread_local=False)
