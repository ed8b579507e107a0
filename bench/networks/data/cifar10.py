"""CIFAR-10 on disk: where it is found, its download, and its decoding.

It is read from the archive of its authors, packed or unpacked, or from the Parquet files of the
Hugging Face hub. Importing this module is cheap; numpy, pyarrow and PIL are imported only for
decoding.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias

from bench.base.errors import UsageError
from bench.base.progress import watch
from bench.base.text import first_line, name_first

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    # images (n, *shape) and their labels (n,)
    Chunk: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.unsignedinteger]]

Shape = tuple[int, int, int]  # of an image: channels, height and width
CIFAR10_SHAPE = (3, 32, 32)
CLASSES = 10
CIFAR10_IMAGES = {"train": 50_000, "test": 10_000}

FOLDER, ARCHIVE, PARQUET = "cifar-10-batches-py", "cifar-10-python.tar.gz", "parquet"
"""The layouts, by their names in records; they are searched for in this order, each in --data-dir
itself and then in its sub-folders by name."""

URL = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}"

# These sums are those published in torchvision.datasets.CIFAR10.
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
_BATCHES = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}

_CHUNK = 1000  # images decoded at a time: 3 MB

_REMEDIES = (
    "give --data-dir a folder that holds CIFAR-10 (cifar-10-batches-py, its archive or Parquet) or "
    "train on --dataset synthetic"
)

_TIMEOUT_S = 30.0  # without a byte


@dataclass(frozen=True)
class ImageSource:
    """One dataset, found but not yet read.

    ``files`` are all files that will be read; they key the cache, or ``recipe`` does if the images
    are generated. ``read`` yields the ``"train"`` or ``"test"`` images in chunks. ``epoch`` is the
    minimum number of training images per epoch: if there are fewer, they are repeated.
    """

    layout: str
    files: tuple[Path, ...]
    read: Callable[[str], Iterator[Chunk]]
    classes: int = CLASSES
    shape: Shape = CIFAR10_SHAPE
    epoch: int = 0
    recipe: str = ""


def detect(folder: Path) -> ImageSource | None:
    """Find CIFAR-10 in ``folder`` or one of its sub-folders; return None if it is not there. Raises
    UsageError: ``folder`` is a file, a batch or a shard is missing, or a file is at the first look
    something else."""
    if folder.is_file():
        raise UsageError(f"--data-dir {folder} is a file; give the folder that holds it")
    places = [folder, *sorted(folder.glob("[!.]*/"))]
    for place in places:
        if any((place / name).is_file() for name in _BATCHES):
            if lacking := [name for name in _BATCHES if not (place / name).is_file()]:
                raise UsageError(f"{place} lacks {', '.join(lacking)}; unpack {ARCHIVE} again")
            batches = tuple(place / name for name in _BATCHES)
            _refuse_foreign(*batches)
            return ImageSource(FOLDER, batches, partial(_read_folder, place))
    for place in places:
        if (packed := place / ARCHIVE).is_file():
            _refuse_foreign(packed)
            return ImageSource(ARCHIVE, (packed,), partial(_read_archive, packed))
    for place in places:
        if train := sorted(place.glob("*train*.parquet")):
            # "latest-train.parquet" holds no test images
            test = sorted(set(place.glob("*test*.parquet")) - set(train))
            shards = {"train": train, "test": test}
            for paths in shards.values():
                _refuse_parts(paths)
                _refuse_foreign(*paths)
            return ImageSource(PARQUET, (*train, *test), partial(_read_parquet, shards))
    return None


_FOREIGN = {
    b"version https://git-lfs": "a pointer of git-lfs, and not what it points to: run git lfs pull",
    b"<": "a web page, such as that of an error or a login: download the file again",
}
"""What a file is that begins so."""


def _refuse_foreign(*paths: Path) -> None:
    """Raises UsageError: a file is empty, a pointer or a web page, or Parquet without its end."""
    for path in paths:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
            file.seek(max(0, path.stat().st_size - 4))
            whole = path.suffix != ".parquet" or start[:4] == file.read(4) == b"PAR1"
        what = next((kind for begin, kind in _FOREIGN.items() if start.startswith(begin)), "")
        if what or not start or not whole:
            incomplete = "not whole: download it again" if start else "empty: download it again"
            raise UsageError(f"{path} is {what or incomplete}")


def _refuse_parts(paths: list[Path]) -> None:
    """Raises UsageError: of the shards of a split, as ``train-00000-of-00002.parquet``, one is
    missing, or there are those of several copies, whose images would count twice."""
    numbered = {path: re.match(r"(.*-)(\d+)(-of-(\d+)\.parquet)$", path.name) for path in paths}
    copies: dict[tuple[str, ...], list[Path]] = {}
    for path, parts in numbered.items():
        copies.setdefault((parts[1], parts[3]) if parts else (), []).append(path)
    if {()} < {*copies} or len(copies) > 1:
        (one, *_), (other, *_), *_ = copies.values()
        raise UsageError(
            f"{one.parent} holds {one.name} and {other.name}, of two copies; keep the files of one"
        )
    for (start, end), shards in ((copy, found) for copy, found in copies.items() if copy):
        names = [f"{start}{i:05}{end}" for i in range(int(re.findall(r"\d+", end)[0]))]
        if lacking := [name for name in names if name not in {path.name for path in shards}]:
            raise UsageError(
                f"{shards[0].parent} lacks {name_first(lacking, 3)}; download all {len(names)} "
                "shards"
            )


def download(folder: Path) -> ImageSource:
    """Download the archive into ``folder``, where it appears once it is whole. Raises UsageError:
    it cannot be downloaded, or is truncated or altered."""
    from http.client import HTTPException
    from urllib.request import urlopen

    part, packed = folder / f"{ARCHIVE}.{os.getpid()}.part", folder / ARCHIVE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            urlopen(URL, timeout=_TIMEOUT_S) as response,
            part.open("wb") as file,
            watch(f"downloading {ARCHIVE}", "MB") as show,
        ):
            size = int(response.headers.get("Content-Length") or 0)
            while data := response.read(1 << 20):
                file.write(data)
                show(file.tell() // 10**6, size // 10**6)
        with part.open("rb") as file:
            _check_sum(file, ARCHIVE_MD5)
        part.replace(packed)
    except (OSError, HTTPException, ValueError) as error:
        raise UsageError(
            f"cannot download CIFAR-10 from {URL} to {folder} ({first_line(error)}); {_REMEDIES}"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return ImageSource(ARCHIVE, (packed,), partial(_read_archive, packed))


def _check_sum(file: IO[bytes], md5: str) -> None:
    """Check the md5 sum of an open file, and seek to its start. Raises ValueError: it differs."""
    found = hashlib.file_digest(file, "md5").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    if found != md5:
        raise ValueError(f"it is truncated or altered: its md5 is {found}, not {md5}")


def _list_batches(split: str) -> list[str]:
    return [name for name in _BATCHES if name.startswith("test") == (split == "test")]


def _read_folder(folder: Path, split: str) -> Iterator[Chunk]:
    for name in _list_batches(split):
        try:
            with (folder / name).open("rb") as file:
                _check_sum(file, _BATCHES[name])
                chunk = _read_batch(file)
        except (OSError, ValueError) as error:
            raise _refuse(folder / name, error) from error
        yield chunk


def _read_archive(path: Path, split: str) -> Iterator[Chunk]:
    try:
        with path.open("rb") as file:
            _check_sum(file, ARCHIVE_MD5)
            with tarfile.open(fileobj=file) as tar:
                for name in _list_batches(split):
                    member = tar.extractfile(f"{FOLDER}/{name}")
                    assert member is not None
                    yield _read_batch(member)
    except (OSError, ValueError) as error:
        raise _refuse(path, error) from error


def _read_batch(file: IO[bytes]) -> Chunk:
    """Read a batch whose sum has been checked, so that unpickling runs no code but its own."""
    import numpy as np

    batch = pickle.load(file, encoding="bytes")
    # one row per image: 1024 red values, then green, then blue, row by row
    images = np.ascontiguousarray(batch[b"data"]).reshape(-1, *CIFAR10_SHAPE)
    return images, np.array(batch[b"labels"], np.uint8)


def _read_parquet(shards: dict[str, list[Path]], split: str) -> Iterator[Chunk]:
    import numpy as np
    import pyarrow.parquet as pq

    for path in shards[split]:
        try:
            with pq.ParquetFile(path) as file:
                column = "img" if "img" in file.schema_arrow.names else "image"
                for batch in file.iter_batches(_CHUNK, columns=[column, "label"]):
                    rows = batch.to_pydict()
                    pixels = np.stack([decode_image(image["bytes"]) for image in rows[column]])
                    images, labels = pixels.transpose(0, 3, 1, 2), np.array(rows["label"])
                    if not np.isin(labels, range(CLASSES)).all():
                        raise ValueError(f"it has labels outside 0 to {CLASSES - 1}")
                    yield np.ascontiguousarray(images), labels.astype(np.uint8)
        except Exception as error:  # of pyarrow, PIL and numpy
            raise _refuse(path, error) from error


def decode_image(data: bytes) -> NDArray[np.uint8]:
    """Decode a PNG or JPEG to uint8 (32, 32, 3). Raises ValueError: it has another shape. A broken
    image raises whatever PIL does."""
    from io import BytesIO

    import numpy as np
    from PIL import Image

    with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
        if (image.size, image.mode) != ((32, 32), "RGB"):
            found = f"{image.width}×{image.height} {image.mode}"
            raise ValueError(f"an image is {found}, not 32×32 RGB")
        return np.asarray(image)


def _refuse(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{path} is not CIFAR-10 as its authors or the Hugging Face hub publish it "
        f"({first_line(error)}); download it again"
    )
