"""Temporary folders; if a process is killed, the next one removes those that it left."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

_YOUNG_S = 60  # a younger folder may not be locked yet


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary folder of some ``kind``, locked while in use. Making one removes those of the
    same kind that processes of this user left on this machine."""

    def __init__(self, kind: str) -> None:
        prefix = f"bench-{kind}-{socket.gethostname()}-"  # other machines may share the directory
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):  # it is another user's, or in use
                if time.time() - left.lstat().st_mtime > _YOUNG_S:
                    os.close(_lock(left))
                    shutil.rmtree(left)
        super().__init__(prefix=prefix, ignore_cleanup_errors=True)
        with suppress(OSError):  # a file system without locks
            weakref.finalize(self, os.close, _lock(Path(self.name)))


def _lock(folder: Path) -> int:
    """Lock a folder by a descriptor, which is returned. Raises OSError: another has the lock."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held
