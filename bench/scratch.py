"""Temporary folders; if a process is killed, the next one removes those that it left."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

_YOUNG_S = 60  # a younger folder may not be locked yet
_KEPT = (OSError, Timeout, NotImplementedError)  # the last if the file system has no locks


class Scratch(tempfile.TemporaryDirectory[str]):
    """A temporary folder of some ``kind``, locked while in use. Making one removes those of the
    same kind that processes of this user left on this machine."""

    def __init__(self, kind: str) -> None:
        prefix = f"bench-{kind}-{socket.gethostname()}-"  # other machines may share the directory
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(*_KEPT):
                if _is_ours(left):
                    with _lock(left):
                        shutil.rmtree(left)
        super().__init__(prefix=prefix, ignore_cleanup_errors=True)
        held = _lock(Path(self.name))
        with suppress(*_KEPT):
            held.acquire()
        self._release = weakref.finalize(self, held.release, force=True)

    def cleanup(self) -> None:
        self._release()  # NFS keeps open files
        super().cleanup()


def _is_ours(folder: Path) -> bool:
    """Return whether this user's `Scratch` made it long enough ago. Raises OSError: it is gone."""
    about = folder.lstat()
    old = time.time() - about.st_mtime > _YOUNG_S
    own = about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode)
    return old and own and (folder / ".lock").is_file()


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", timeout=0, thread_local=False)
