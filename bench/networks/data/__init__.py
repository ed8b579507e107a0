"""CIFAR-10, real or synthetic, as uint8 arrays on disk that every worker maps into memory.

``prepare`` runs once per sweep and decodes a dataset into a cache; ``load`` opens the result.
``bench.networks.data.batches`` moves the arrays to the device. Nothing else here imports torch.
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
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError
from bench.base.processes import provide_home
from bench.base.progress import watch
from bench.base.text import first_line
from bench.networks.data import synthetic
from bench.networks.data.cifar10 import (
    CIFAR10_IMAGES,
    CIFAR10_SHAPE,
    CLASSES,
    ImageSource,
    detect,
    download,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SYNTHETIC = "synthetic"

DATASETS: dict[str, str] = {
    "cifar10": "CIFAR-10 from --data-dir, downloaded there when absent",
    SYNTHETIC: "seeded images that can be learnt, as CIFAR-10's or of --input; says nothing about "
    "CIFAR-10",
}

# Part of the cache key: increase it whenever the same source files decode to something else.
_FORMAT = 2

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
class ImageArrays:
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
    input: str | None = None,
    classes: int | None = None,
) -> DatasetInfo:
    """Decode the dataset ``name`` into the cache unless it is there, and return its description.

    ``data_dir`` (``./data`` when None) or one of its sub-folders holds the images; if it has none,
    the archive of CIFAR-10 is downloaded into it. ``cache_dir`` is `find_cache` when None.
    ``input``, such as ``3x224x224``, and ``classes`` describe synthetic images; the defaults are
    CIFAR-10's.

    Cache entries are keyed by the path, size and modification time of every file read, and appear
    atomically, so that two sweeps may prepare the same dataset at once. A truncated entry is made
    again. Beyond the ``KEPT`` most recently used entries, those that were not used for a day are
    removed.

    Raises UsageError for an unreadable or invalid file, a download that fails and a cache that
    cannot be written.
    """
    if name == SYNTHETIC:
        shape = synthetic.parse_shape(input) if input else CIFAR10_SHAPE
        source = synthetic.source(shape, classes or CLASSES)
    else:
        place = data_dir or Path("data")
        source = detect(place) or download(place)
    folder = (cache_dir or find_cache()).absolute() / f"{name}-{_key(source)}"
    try:
        return load(folder).info
    except UsageError:
        return _store(source, name, folder)


def find_layout(data_dir: Path | None) -> str | None:
    """Return the layout of the images in ``data_dir`` (``./data`` when None), or None if there are
    none. Nothing is decoded. Raises UsageError: it is a file."""
    source = detect(data_dir or Path("data"))
    return source.layout if source else None


def load(folder: str | Path) -> ImageArrays:
    """Open the dataset that ``prepare`` wrote to ``folder`` (``DatasetInfo.folder``), mapped, not
    read. Raises UsageError: the folder does not hold a whole dataset."""
    import numpy as np

    folder = Path(folder)
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        info = DatasetInfo(**meta, folder=str(folder))
        arrays = [np.load(folder / f"{array}.npy", mmap_mode="r") for array in _ARRAYS]
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UsageError(
            f"{folder} does not hold a prepared dataset ({first_line(error)}); prepare it again"
        ) from error
    with suppress(OSError):  # used now, for `_remove_unused`; another user's cache is read-only
        os.utime(folder)
    return ImageArrays(info, *arrays)


_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def find_cache() -> Path:
    """Return the user's cache folder, for decoded images."""
    provide_home()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "precision-bench")


def _key(source: ImageSource) -> str:
    identity: list[object] = [_FORMAT, source.layout, source.recipe]
    for file in source.files:
        stat = file.stat()
        identity.append((str(file.absolute()), stat.st_size, stat.st_mtime_ns))
    return sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _store(source: ImageSource, name: str, folder: Path) -> DatasetInfo:
    from filelock import FileLock

    partial = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # With the lock, a second sweep need not decode, and the holder may remove what a killed one
        # left; the rename makes sure that readers see only whole entries.
        with FileLock(f"{folder}.lock"):
            with suppress(UsageError):
                return load(folder).info
            for leftover in (partial, folder):
                rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            try:
                decode(source, name, partial)
                partial.rename(folder)
            finally:
                rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot write the decoded images to {folder.parent} ({first_line(error)}); "
            "point XDG_CACHE_HOME at a folder with 400 MB free"
        ) from error
    with suppress(OSError):  # another process removes them too
        _remove_unused(folder.parent)
    return load(folder).info


def _remove_unused(cache: Path) -> None:
    """Remove entries that are not among the `KEPT` most recently used ones and were not used for a
    day; newer ones may be needed by the next case of a running sweep."""
    used = {meta.parent: meta.parent.stat().st_mtime for meta in cache.glob("*/meta.json")}
    for entry in sorted(used, key=used.__getitem__)[:-KEPT]:
        if used[entry] < time.time() - DAY_S:
            rmtree(entry, ignore_errors=True)


def decode(source: ImageSource, name: str, folder: Path) -> None:
    """Decode a dataset into ``folder``, to be read by every worker."""
    import numpy as np

    digest, counts = sha256(), dict.fromkeys(CIFAR10_IMAGES, 0)
    for split in CIFAR10_IMAGES:
        chunks = [(np.empty((0, *source.shape), np.uint8), np.empty(0, np.uint8))]
        with watch(f"decoding the {split} images of {name}", "image") as show:
            for images, labels in source.read(split):
                chunks.append((images, labels))
                counts[split] += len(labels)
                show(counts[split], 0)
        for kind, parts in zip(("images", "labels"), zip(*chunks, strict=True), strict=True):
            array = np.concatenate(parts)
            digest.update(array.data)
            np.save(folder / f"{split}_{kind}.npy", array)
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
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
