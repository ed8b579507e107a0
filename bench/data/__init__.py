"""CIFAR-10, real or synthetic, as uint8 arrays on disk that every worker maps into memory.

``prepare`` runs once per sweep and decodes a dataset into a cache; ``load`` opens what it wrote.
``bench.data.batches`` moves the arrays to the device. Nothing else here imports torch.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, BinaryIO

from bench.data import download, synthetic
from bench.data.progress import Progress, progress_bar
from bench.data.sources import CIFAR10, CLASSES, LAYOUTS, SHAPE, Archive, Source, detect, one_line
from bench.errors import UsageError, nearest
from bench.text import replace_durably, sync_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DATASETS", "SYNTHETIC", "Dataset", "DatasetInfo", "load", "prepare", "progress_bar"]

SYNTHETIC = "synthetic"

DATASETS: dict[str, str] = {
    "cifar10": "CIFAR-10 from --data-dir, downloaded there when absent",
    SYNTHETIC: "seeded images that can be learnt, as CIFAR-10's or of --input; says nothing about "
    "CIFAR-10",
}

# Part of the cache key: raise it whenever the same source files would decode to something else.
FORMAT = 1

KEPT = 12
"""Entries of the cache, those used last. Each is 184 MB as of CIFAR-10, and every path that images
are read from has its own: without a limit, 420 test runs and clones of one day left 69 GB."""

DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class DatasetInfo:
    """What was decoded: every record carries it.

    ``fingerprint`` is the first 16 hex digits of the SHA-256 over the bytes of train images,
    train labels, test images and test labels, in that order: images as uint8 (N, C, H, W), labels
    as uint8 or, of more than 256 classes, uint16. ``train_images`` are those of an epoch.
    ``source`` is the layout the images were read from, ``folder`` where the arrays are.
    ``distinct`` is how many training images there are where an epoch visits each several times.
    """

    name: str
    fingerprint: str
    train_images: int
    test_images: int
    classes: int
    source: str
    folder: str
    distinct: int | None = None


@dataclass(frozen=True)
class Dataset:
    """Read-only arrays mapped from disk: images uint8 (N, C, H, W), RGB; labels (N,). The test
    arrays have N = 0 where the source holds no test images. CIFAR-10 is (N, 3, 32, 32). Large
    synthetic images may be fewer than an epoch has."""

    info: DatasetInfo
    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.unsignedinteger]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.unsignedinteger]


def prepare(
    name: str,
    *,
    data_dir: Path | None,
    cache_dir: Path | None = None,
    url: str | None = None,
    progress: Progress | None = None,
    archive: Archive = CIFAR10,
    input: str | None = None,
    classes: int | None = None,
) -> DatasetInfo:
    """Decode the dataset ``name`` into the cache unless it is there, and say what it is.

    ``data_dir`` (``./data`` when None) holds the images, or is the parent of the folder that does;
    where it holds none of the layouts, the canonical archive is downloaded into it from ``url`` or
    the canonical address. ``cache_dir`` is ``$XDG_CACHE_HOME/gpu-precision-bench`` when None
    (``~/.cache`` where the variable is not set). ``input``, such as ``3x224x224``, and ``classes``
    are those of synthetic images, where they are not to be CIFAR-10's.

    Entries of the cache are keyed by the path, size and modification time of every file read, and
    appear whole or not at all, so that two sweeps may prepare the same dataset at once. One that
    was truncated, or that somebody wrote to, is made again. Beyond the ``KEPT`` entries that were
    used last, those that were not used for a day are removed.

    Raises UsageError for an unknown name, a file that cannot be read or is not what its name
    promises, a download that fails and a cache that cannot be written.
    """
    if name not in DATASETS:
        raise UsageError(f"unknown dataset {name!r}; {nearest(name, list(DATASETS))}")
    if name == SYNTHETIC:
        shape = synthetic.parse_shape(input) if input else SHAPE
        source = synthetic.source(shape, classes or CLASSES)
    else:
        source = _find(data_dir or Path("data"), url, progress, archive)
    folder = (cache_dir or find_cache()).absolute() / f"{name}-{_key(source)}"
    try:
        return verify(folder)
    except UsageError:
        return _store(source, name, folder, progress)


def find_layout(data_dir: Path | None) -> str | None:
    """The layout of the images in ``data_dir`` (``./data`` when None); None where there are none.
    Nothing is decoded."""
    source = _look(data_dir)
    return None if source is None else source.layout


def count_classes(name: str, data_dir: Path | None) -> int:
    """Classes of the dataset ``name``: CIFAR-10's 10, or those of the user's own class folders."""
    source = None if name == SYNTHETIC else _look(data_dir)
    return CLASSES if source is None else source.classes


def count_images(name: str, data_dir: Path | None) -> int | None:
    """Training images of an epoch of the dataset ``name``; None where only decoding would tell."""
    source = None if name == SYNTHETIC else _look(data_dir)
    with suppress(OSError, ValueError, KeyError, UsageError):
        if source is not None:  # decoded before?
            meta = (find_cache() / f"{name}-{_key(source)}" / "meta.json").read_text("utf-8")
            return int(json.loads(meta)["train_images"])
    # synthetic images are as many as CIFAR-10's, which are downloaded where there are none
    canonical = source is None or source.layout in (CIFAR10.folder, CIFAR10.name)
    return synthetic.IMAGES["train"] if canonical else None


def _look(data_dir: Path | None) -> Source | None:
    folder = data_dir or Path("data")
    return detect(folder) if folder.is_dir() else None


def load(folder: str | Path) -> Dataset:
    """Open what ``prepare`` wrote to ``folder`` (``DatasetInfo.folder``), mapped, not read. Raises
    UsageError where the folder does not hold a whole dataset."""
    import numpy as np

    folder = Path(folder)
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        meta.pop("written", None)
        info = DatasetInfo(**meta, folder=str(folder))
        arrays = [np.load(folder / f"{array}.npy", mmap_mode="r") for array in _ARRAYS]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UsageError(
            f"{folder} does not hold a prepared dataset ({one_line(error)}); prepare it again"
        ) from error
    with suppress(OSError):  # used now, as `_store` reads it; another user's cache is read only
        os.utime(folder)
    return Dataset(info, *arrays)


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def verify(folder: Path) -> DatasetInfo:
    """What ``prepare`` wrote to ``folder``, if it is still that. The arrays are read (184 MB of
    CIFAR-10 in 0.15 s) only where one was written to since they were last known to be right, as
    their times of modification say. Raises UsageError where the folder does not hold a whole
    dataset, or not the one it held."""
    dataset = load(folder)
    file = folder / "meta.json"
    meta, written = json.loads(file.read_text(encoding="utf-8")), _look_when_written(folder)
    if meta.get("written") != written:
        if hash_arrays(dataset) != dataset.info.fingerprint:
            raise UsageError(f"{folder} holds other images than were decoded; prepare it again")
        with suppress(OSError):  # another user's cache can be read, and that is enough
            _write_meta(file, {**meta, "written": written})
    return dataset.info


def hash_arrays(dataset: Dataset) -> str:
    digest = sha256()
    for array in _ARRAYS:
        digest.update(getattr(dataset, array).data)
    return digest.hexdigest()[:16]


def _look_when_written(folder: Path) -> dict[str, int]:
    return {array: (folder / f"{array}.npy").stat().st_mtime_ns for array in _ARRAYS}


def _write_meta(file: Path, meta: dict[str, Any]) -> None:
    with replace_durably(file) as opened:
        opened.write(json.dumps(meta, indent=2).encode() + b"\n")


def _find(folder: Path, url: str | None, progress: Progress | None, archive: Archive) -> Source:
    refuse_file(folder)
    source = detect(folder, archive)
    if source is None:
        download.fetch(url or archive.url, folder / archive.name, archive.md5, progress=progress)
        source = detect(folder, archive)
    assert source is not None, f"{folder / archive.name} is one of {LAYOUTS}"
    return source


def refuse_file(data_dir: Path) -> None:
    """Raises UsageError: images are to be had from a file, or downloaded into one."""
    if data_dir.exists() and not data_dir.is_dir():
        raise UsageError(f"--data-dir {data_dir} is a file; give the folder that holds it")


def find_cache() -> Path:
    """The folder of what is made once for a user: of decoded images, and what devices can do."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-precision-bench"


def _key(source: Source) -> str:
    identity: list[object] = [FORMAT, source.layout, source.recipe]
    for file in source.files:
        try:
            stat = file.stat()
        except OSError as error:
            raise UsageError(
                f"cannot read {file} ({error.strerror}); complete {file.parent} or remove it"
            ) from error
        identity.append((str(file.absolute()), stat.st_size, stat.st_mtime_ns))
    return sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _store(source: Source, name: str, folder: Path, progress: Progress | None) -> DatasetInfo:
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The lock spares a second sweep the decoding and lets the holder clear what a killed one
        # left behind; that readers see whole entries only is the rename's doing.
        with FileLock(f"{folder}.lock"):
            with suppress(UsageError):
                return verify(folder)
            partial = folder.with_name(folder.name + ".partial")
            for leftover in (partial, folder):
                rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            try:
                decode(source, name, partial, progress)
                partial.rename(folder)
                sync_folder(folder.parent)
            finally:
                rmtree(partial, ignore_errors=True)
        _remove_unused(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write the decoded images to {folder.parent} ({one_line(error)}); "
            "point XDG_CACHE_HOME at a folder with 400 MB free"
        ) from error
    return load(folder).info


def _remove_unused(new: Path) -> None:
    """Remove the entries that were not among the `KEPT` used last, nor used for a day: the next
    case of a sweep that runs may need one."""
    used = {}
    for meta in new.parent.glob("*/meta.json"):
        with suppress(OSError):  # another process removes them too
            used[meta.parent] = meta.parent.stat().st_mtime
    for entry in sorted(used.keys() - {new}, key=used.__getitem__)[: -(KEPT - 1)]:
        if used[entry] < time.time() - DAY_S:
            rmtree(entry, ignore_errors=True)


def decode(source: Source, name: str, folder: Path, progress: Progress | None) -> None:
    """Decode a dataset into ``folder``, to be read by every worker."""
    import numpy as np

    digest = sha256()
    scratch = folder / "unpacked"
    counts = {}
    for split in ("train", "test"):
        with (folder / f"{split}_images.npy").open("w+b") as file:
            labels, number = [np.empty(0, np.uint8)], 0
            _write_header(file, 0, *source.shape)
            for images, chunk_labels in source.read(split, scratch):
                file.write(images.data)
                digest.update(images.data)
                labels.append(chunk_labels)
                number += len(chunk_labels)
                if progress is not None:
                    progress(f"decoding {split} images", number, None)
            # numpy pads the header for exactly this: the first axis may grow in place.
            file.seek(0)
            _write_header(file, number, *source.shape)
        every = np.concatenate(labels)
        np.save(folder / f"{split}_labels.npy", every)
        digest.update(every.data)
        counts[split] = number
    for array in _ARRAYS:  # else a power cut could leave a whole folder of files that hold nothing
        with (folder / f"{array}.npy").open("rb") as file:
            os.fsync(file.fileno())
    rmtree(scratch, ignore_errors=True)
    if not counts["train"]:
        raise UsageError(f"{source.files[0].parent} holds no training images")
    info = DatasetInfo(
        name=name,
        fingerprint=digest.hexdigest()[:16],
        train_images=max(source.epoch, counts["train"]),
        test_images=counts["test"],
        classes=source.classes,
        source=source.layout,
        folder="",
        distinct=counts["train"] if counts["train"] < source.epoch else None,
    )
    meta = {k: v for k, v in asdict(info).items() if k != "folder" and v is not None}
    _write_meta(folder / "meta.json", {**meta, "written": _look_when_written(folder)})


def _write_header(file: BinaryIO, *shape: int) -> None:
    import numpy as np

    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
