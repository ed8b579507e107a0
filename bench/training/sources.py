"""The files that make a training what it is: a user's programs, what configures them and what they
read, as the processes of a case opened them.

A row says by one hash, ``model_source``, which version of them ran. Cases open different files: two
are of one version if those that both opened are the same. The folder of a sweep keeps the files of
each version.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from bench.base.inject import Files, Opened, Seen, find_opened, parse_listing
from bench.base.inject.sitecustomize import MOST_BYTES
from bench.schema.failure import is_harness, is_library

if TYPE_CHECKING:
    from torch import nn

_UNSEEN = [".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".h5", ".hdf5", ".npz", ".onnx", ".tar"]
"""Ends of names of what libraries write themselves, so that Python does not see it opened."""

_COMPILED = re.compile(r"/torchinductor_|/bench-compiled-")

_SAMPLE_BYTES = 1 << 16
_MOST_ENTRIES = 10_000  # of a folder


def judge_opened(
    opened: Sequence[Opened],
    roots: Iterable[Path],
    but: Collection[Path],
    began_ns: int = 0,
    since_ns: int = 0,
) -> Seen:
    """Tell what a case is made of from what else it opened: of the user's own files, in ``roots``
    and the repositories that hold these, and his modules elsewhere, without what lies in ``but``.
    What it wrote itself is none of it. ``began_ns`` is when the case began, and ``since_ns`` when
    the folder was."""
    scripts = [one.path.parent for one in opened if one.how == "runs" and not _is_tool(one.path)]
    place = _Place([Path.cwd(), *scripts, *roots], but)
    own = [one for one in opened if place.has(one.path)]
    wrote = dict.fromkeys(one.path for one in own if one.how == "wrote" and _is_filled(one.path))
    if began_ns:
        folders = dict.fromkeys(one.path if one.how == "made" else one.path.parent for one in own)
        new = (path for folder in [Path.cwd(), *folders] for path in _list_new(folder, began_ns))
        wrote |= dict.fromkeys(path for path in new if place.has(path))
    writes = ("wrote", "added", "made")
    written = {one.resolve() for one in [*wrote, *(o.path for o in own if o.how in writes)]}
    seen = Seen()
    for one in own:
        if one.how in writes or not (one.path.is_file() or one.content):
            continue
        name = name_file(one.path)
        if 0 < since_ns <= one.changed_ns < began_ns:
            seen.read[name] = one.changed_ns
        if one.path.resolve() not in written:
            content = one.content or _hash_then(one)
            known = seen.files.setdefault(name, content)
            if content not in known.split("+"):  # edited between two of its processes
                seen.files[name] = f"{known}+{content}"
    seen.wrote = sorted(map(name_file, wrote))
    return seen


def _is_filled(path: Path) -> bool:
    """Return whether it is a file with a content to lose, unlike a lock."""
    return path.is_file() and path.stat().st_size > 0


def name_file(path: Path) -> str:
    with suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


class _Place:
    """Where a user's own files are: ``roots``, and the repositories that these lie in."""

    def __init__(self, roots: Iterable[Path], but: Collection[Path]) -> None:
        self._but = {path.absolute() for path in but}
        found = dict.fromkeys(root.absolute() for root in roots)
        around = (_find_repository(root) for root in [*found])
        self._roots = [*found, *filter(None, around)]
        self._temporary = Path(tempfile.gettempdir())

    def has(self, path: Path) -> bool:
        if self._but & {path, *path.parents}:
            return False
        if is_library(path) or is_harness(path) or _is_tool(path) or _COMPILED.search(str(path)):
            return False
        root = next((root for root in self._roots if root in path.parents), None)
        if root is None:
            known = path.suffix == ".py" and self._temporary not in path.parents
            return known and not any(part.startswith(".") for part in path.parts)
        return not any(part.startswith(".") for part in path.relative_to(root).parts)


def _is_tool(path: Path) -> bool:
    """Return whether it lies beside a Python, as torchrun does."""
    return path.parent.name in ("bin", "Scripts") and (path.parent / "python3").exists()


def _find_repository(folder: Path) -> Path | None:
    home = Path.home()  # which some keep in a repository
    around = [one for one in (folder, *folder.parents) if one not in (home, *home.parents)]
    return next((one for one in around if (one / ".git").exists()), None)


def _list_new(folder: Path, since_ns: int) -> Iterator[Path]:
    """Yield files of a folder that libraries have written since."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False):
            if Path(entry.name).suffix in _UNSEEN and entry.stat().st_mtime_ns >= since_ns:
                yield Path(folder, entry.name)


def hash_content(path: Path) -> str:
    """Return a hash of a file: of a large one of its size, its first and its last bytes. Raises
    OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MOST_BYTES:
            return sha256(file.read()).hexdigest()[:12]
        digest = sha256(str(size).encode() + file.read(_SAMPLE_BYTES))
        file.seek(size - _SAMPLE_BYTES)
        digest.update(file.read())
        return digest.hexdigest()[:12]


def _hash_then(one: Opened) -> str:
    """Return the hash of a file as it was opened; of one that was changed since, another."""
    now = look_at(one.path)
    if now and (now.changed_ns, now.size) == (one.changed_ns, one.size):
        return now.content
    return f"{one.changed_ns:x}"


def look_at(path: Path) -> Opened | None:
    """Return a file as if a process had opened it now; None if it cannot be read."""
    with suppress(OSError):
        stat = path.stat()
        return Opened("read", path.absolute(), stat.st_mtime_ns, stat.st_size, hash_content(path))
    return None


def judge_process(
    lines: Sequence[str], before: Collection[str], module: str, but: Collection[Path]
) -> Seen:
    """Tell what a ``module`` of the user's is made of, in this process, which had imported others
    ``before``, from the ``lines`` of `bench.base.inject.watch`."""
    opened = find_opened(parse_listing(lines))
    known = {one.path for one in opened}
    for name in dict.fromkeys([module, *sys.modules.keys() - {*before}]):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).absolute() not in known and (found := look_at(Path(file))):
            opened.append(found)
    return judge_opened(opened, list_roots(), but)


def list_roots() -> list[Path]:
    """Return the folders of this process's own path that are no library's."""
    folders = (Path(folder) for folder in sys.path if folder)
    return [one for one in folders if one.is_dir() and not is_library(one / "x.py")]


def identify_model(model: nn.Module) -> tuple[str, str]:
    """Return the ``parameters`` and the ``structure`` of a
    `bench.workers.fingerprint.Fingerprint`."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        _hash(f"{key} {tuple(t.shape)} {t.dtype}".encode() for key, t in tensors),
        _hash([re.sub(r"0x[0-9a-fA-F]+", "", repr(model)).encode()]),
    )


def _hash(parts: Iterable[bytes]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]


# ------------------------------------------------------------------------------------- versions


def name_contents(paths: Iterable[Path]) -> dict[str, str]:
    """Return the hashes of files that can be read, by their names."""
    found = ((path, look_at(path)) for path in paths)
    return {name_file(path.absolute()): one.content for path, one in found if one}


def hash_files(files: Files) -> str:
    """Return the first 12 hex digits of a SHA-256 of names and contents, wherever they lie; empty
    for none."""
    contents = sorted((Path(name).name, content) for name, content in files.items())
    return sha256(repr(contents).encode()).hexdigest()[:12] if contents else ""


def list_edited(before: Files, now: Files) -> list[str]:
    """Return the files that both have, with another content."""
    return [name for name, content in before.items() if now.get(name, content) != content]
