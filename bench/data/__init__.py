"""CIFAR-10, real or synthetic, as uint8 arrays on disk that every worker maps into memory.

``prepare`` runs once per sweep and decodes a dataset into a cache; ``load`` opens the result.
``bench.data.batches`` moves the arrays to the device. Nothing else here imports torch.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, BinaryIO

from bench.data import download, synthetic
from bench.data.download import Progress, progress_bar
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

# Part of the cache key: increase it whenever the same source files decode to something else.
FORMAT = 1

KEPT = 12
"""Number of most recently used cache entries to keep. One of CIFAR-10 takes 184 MB, and each source
path has its own: without a limit, 420 test runs and clones of one day left 69 GB."""

DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class DatasetInfo:
    """Description of a decoded dataset, part of every record.

    ``fingerprint`` is the first 16 hex digits of the SHA-256 over the bytes of train images,
    train labels, test images and test labels, in that order: images as uint8 (N, C, H, W), labels
    as uint8 or, with more than 256 classes, uint16. ``train_images`` is the number per epoch.
    ``source`` is the layout that the images were read from, ``folder`` the place of the arrays.
    ``distinct`` is the number of different training images if an epoch repeats them.
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
    arrays have N = 0 if the source holds no test images. CIFAR-10 is (N, 3, 32, 32). Large
    synthetic images may be fewer than the images of an epoch."""

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
    """Decode the dataset ``name`` into the cache unless it is there, and return its description.

    ``data_dir`` (``./data`` when None) or one of its sub-folders holds the images; if it has none
    of the layouts, the canonical archive is downloaded into it from ``url`` or the canonical
    address. ``cache_dir`` is `find_cache` when None. ``input``, such as ``3x224x224``, and
    ``classes`` describe synthetic images; the defaults are CIFAR-10's.

    Cache entries are keyed by the path, size and modification time of every file read, and appear
    atomically, so that two sweeps may prepare the same dataset at once. A truncated or modified
    entry is made again. Beyond the ``KEPT`` most recently used entries, those that were not used
    for a day are removed.

    Raises UsageError for an unknown name, an unreadable or invalid file, a download that fails and
    a cache that cannot be written.
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
    """Return the layout of the images in ``data_dir`` (``./data`` when None), or None if there are
    none. Nothing is decoded."""
    source = _look(data_dir)
    return None if source is None else source.layout


def count_classes(name: str, data_dir: Path | None) -> int:
    """Return the number of classes of the dataset ``name``: 10, or the number of class folders."""
    source = None if name == SYNTHETIC else _look(data_dir)
    return CLASSES if source is None else source.classes


def count_images(name: str, data_dir: Path | None) -> int | None:
    """Return the training images per epoch of dataset ``name``; None if only decoding can tell."""
    source = None if name == SYNTHETIC else _look(data_dir)
    with suppress(OSError, ValueError, KeyError, UsageError):
        if source is not None:  # decoded before?
            meta = (find_cache() / f"{name}-{_key(source)}" / "meta.json").read_text("utf-8")
            return int(json.loads(meta)["train_images"])
    # an epoch of synthetic images has as many as CIFAR-10, which is downloaded if there is none
    canonical = source is None or source.layout in (CIFAR10.folder, CIFAR10.name)
    return synthetic.IMAGES["train"] if canonical else None


def _look(data_dir: Path | None) -> Source | None:
    folder = data_dir or Path("data")
    return detect(folder) if folder.is_dir() else None


def load(folder: str | Path) -> Dataset:
    """Open the dataset that ``prepare`` wrote to ``folder`` (``DatasetInfo.folder``), mapped, not
    read. Raises UsageError: the folder does not hold a whole dataset."""
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
    with suppress(OSError):  # used now, for `_remove_unused`; another user's cache is read-only
        os.utime(folder)
    return Dataset(info, *arrays)


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def verify(folder: Path) -> DatasetInfo:
    """Check the dataset that ``prepare`` wrote to ``folder``, and return its description. The
    arrays are read (184 MB of CIFAR-10 in 0.15 s) only if the modification time of one has changed
    since the last check. Raises UsageError: the folder does not hold a whole dataset, or another
    one than was decoded."""
    dataset = load(folder)
    file = folder / "meta.json"
    meta, written = json.loads(file.read_text(encoding="utf-8")), _look_when_written(folder)
    if meta.get("written") != written:
        if hash_arrays(dataset) != dataset.info.fingerprint:
            raise UsageError(f"{folder} holds other images than were decoded; prepare it again")
        with suppress(OSError):  # another user's cache may be read-only, which is enough
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
    """Refuse a file as the folder of images. Raises UsageError: ``data_dir`` is a file."""
    if data_dir.exists() and not data_dir.is_dir():
        raise UsageError(f"--data-dir {data_dir} is a file; give the folder that holds it")


def find_cache() -> Path:
    """Return the user's cache folder, for decoded images. A user without a home folder that can be
    written to, as a container's numeric one, has a temporary one."""
    name = "gpu-precision-bench"
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / name
    with suppress(RuntimeError):  # neither HOME nor an entry in passwd
        place = Path.home() / ".cache" / name
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        if there == place or (there.is_dir() and os.access(there, os.W_OK)):
            return place
    return Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"


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
        # With the lock, a second sweep need not decode, and the holder may remove what a killed one
        # left; the rename makes sure that readers see only whole entries.
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
    """Remove entries that are not among the `KEPT` most recently used ones and were not used for a
    day; newer ones may be needed by the next case of a running sweep."""
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
            # numpy pads the header so that the first axis can grow in place.
            file.seek(0)
            _write_header(file, number, *source.shape)
        every = np.concatenate(labels)
        np.save(folder / f"{split}_labels.npy", every)
        digest.update(every.data)
        counts[split] = number
    for array in _ARRAYS:  # without it a power cut could leave a folder with empty files
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
