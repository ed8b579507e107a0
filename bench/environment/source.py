"""The harness's own source: its hash and its commit."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath

_ROOT = Path(__file__).parents[1]


def read_commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


@cache
def hash_code() -> str:
    """Return the first 12 hex digits of the SHA-256 over the harness's own Python source."""
    files = sorted(_ROOT.rglob("*.py"))
    return _hash((path.relative_to(_ROOT), path.read_bytes()) for path in files)


def _hash(files: Iterable[tuple[PurePath, bytes]]) -> str:
    digest = sha256()
    for path, content in files:
        digest.update(path.as_posix().encode())
        digest.update(content)
    return digest.hexdigest()[:12]


@cache
def hash_commit(commit: str) -> str | None:
    """Return `hash_code` at a commit; None if this is not a clone that has it."""
    command = ["git", "-C", str(_ROOT), "archive", "--format=tar", commit]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = {PurePosixPath(member.name): member for member in tar if member.isfile()}
        code = sorted(path for path in files if path.suffix == ".py")
        return _hash((p, tar.extractfile(files[p]).read()) for p in code)  # type: ignore[union-attr]
