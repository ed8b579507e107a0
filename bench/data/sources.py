"""Layouts of CIFAR-10 on disk: detection and decoding.

Importing this module is cheap; numpy, pyarrow and PIL are imported only for decoding.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.text import name_first

if TYPE_CHECKING:
    from io import BufferedReader
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    # images (n, *shape) and their labels (n,)
    Chunk: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.unsignedinteger]]
    # its place, for messages; the PNG or JPEG; its label
    Encoded: TypeAlias = tuple[str, bytes, int]

# Searched in this order, each in --data-dir itself and then in its sub-folders by name.
FOLDERS = "folders"
LAYOUTS = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "parquet", FOLDERS)

Shape = tuple[int, int, int]  # of an image: channels, height and width
SHAPE = (3, 32, 32)  # of CIFAR's images
CLASSES = 10  # of CIFAR-10; class folders may have another number


@dataclass(frozen=True)
class Archive:
    """The canonical archive: its address and its files, with md5 sums."""

    name: str = "cifar-10-python.tar.gz"
    folder: str = "cifar-10-batches-py"
    url: str = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    # The sums are those published in torchvision.datasets.CIFAR10.
    md5: str = "c58f30108f718f92721af3b95e74349a"
    train: dict[str, str] = field(
        default_factory=lambda: {
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        }
    )
    test: dict[str, str] = field(
        default_factory=lambda: {"test_batch": "40351d587109b95175f43aff81a1287e"}
    )


CIFAR10 = Archive()


@dataclass(frozen=True)
class Source:
    """One dataset on disk, found but not yet read.

    ``files`` are all files that will be read; they key the cache, or ``recipe`` does if the images
    are generated. ``read(split, scratch)`` yields the ``"train"`` or ``"test"`` images in chunks,
    so that memory stays bounded; ``scratch`` is a folder it may create and fill, the same for both
    splits. ``epoch`` is the minimum number of training images per epoch: if there are fewer, they
    are repeated.
    """

    layout: str
    files: tuple[Path, ...]
    classes: int
    read: Callable[[str, Path], Iterator[Chunk]]
    shape: Shape = SHAPE
    epoch: int = 0
    recipe: str = ""


def detect(folder: Path, archive: Archive = CIFAR10) -> Source | None:
    """Find a dataset in ``folder`` or one of its sub-folders, in the order of ``LAYOUTS``; return
    None if there is none. Class folders in a sub-folder must be below ``train/``, since otherwise
    any folder of pictures would be taken for a class. Raises UsageError: a part of it is missing,
    or cannot be read."""
    source = _detect(folder, archive)
    for path in source.files if source else ():
        with _reading(path, "make it readable, or download it again"):
            small = path.stat().st_size < 200
            pointer = small and path.read_bytes().startswith(_POINTER)
        if pointer:
            raise UsageError(f"{path} is git-lfs's pointer to a file; run git lfs pull beside it")
    return source


_POINTER = b"version https://git-lfs"


def _detect(folder: Path, archive: Archive) -> Source | None:
    places = [folder, *_folders(folder)]
    for place in places:
        if any((place / name).is_file() for name in [*archive.train, *archive.test]):
            return _batches(place, archive)
    for place in places:
        if (place / archive.name).is_file():
            return _packed(place / archive.name, archive)
    for place in places:
        if train := sorted(place.glob("*train*.parquet")):
            # "latest-train.parquet" holds no test images
            return _parquet(train, sorted(set(place.glob("*test*.parquet")) - set(train)))
    for place in places:
        if train_classes := _classes(place / "train"):
            return _class_folders(train_classes, _classes(place / "test"))
    direct = _classes(folder)
    # A single folder of pictures is not a dataset.
    return _class_folders(direct, {}) if len(direct) > 1 else None


# cifar-10-batches-py, and the archive that holds it


def _batches(folder: Path, archive: Archive) -> Source:
    files = tuple(folder / name for name in (*archive.train, *archive.test))
    return Source(archive.folder, files, CLASSES, lambda split, _: _read(folder, archive, split))


def _packed(path: Path, archive: Archive) -> Source:
    def read(split: str, scratch: Path) -> Iterator[Chunk]:
        if not scratch.exists():
            unpack(path, archive.md5, scratch)
        return _read(scratch / archive.folder, archive, split)

    return Source(archive.name, (path,), CLASSES, read)


def unpack(path: Path, md5: str, folder: Path) -> None:
    """Unpack the tar archive at ``path`` into ``folder`` if its sum is ``md5``. tarfile's ``data``
    filter refuses members that would land outside ``folder``, links out of it and devices. Raises
    UsageError for those and for an invalid archive."""
    remedy = "delete it to download it again, or download it yourself"
    with _reading(path, remedy):
        file = path.open("rb")
    with file:
        check_md5(file, md5, path, remedy)
        try:
            with tarfile.open(fileobj=file) as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise UsageError(f"{path} cannot be unpacked ({one_line(error)}); {remedy}") from error


def check_md5(file: BufferedReader, md5: str, name: object, remedy: str) -> None:
    """Check that the rest of ``file`` has the sum ``md5``, then seek to its start. Raises
    UsageError: it has another sum."""
    found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    file.seek(0)
    if found != md5:
        raise UsageError(f"{name} is truncated or altered (md5 {found}, not {md5}); {remedy}")


class _Unpickler(pickle.Unpickler):
    """Allows only the three names that a canonical batch needs, for a uint8 array."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy as np

        admitted = {
            # numpy 2 moved the function; an array refers to its current place
            ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
        }
        if (module, name) not in admitted:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return admitted[module, name]


def _read(folder: Path, archive: Archive, split: str) -> Iterator[Chunk]:
    import numpy as np

    for name, md5 in (archive.train if split == "train" else archive.test).items():
        path = folder / name
        remedy = f"unpack {archive.name} again"
        with _reading(path, remedy), path.open("rb") as file:
            check_md5(file, md5, path, remedy)
            try:
                batch = _Unpickler(file, encoding="bytes").load()
                labels = np.array(batch[b"labels"])
                # one row per image: 1024 red values, then green, then blue, row by row
                images = np.ascontiguousarray(batch[b"data"]).reshape(len(labels), 3, 32, 32)
                if images.dtype != np.uint8:
                    raise ValueError(f"{images.dtype} pixels, not uint8")
                if not np.isin(labels, range(CLASSES)).all():
                    raise ValueError(f"labels outside 0 to {CLASSES - 1}")
            except Exception as error:  # unpickling can raise any exception
                raise UsageError(
                    f"{path} is not a CIFAR-10 batch ({one_line(error)}); {remedy}"
                ) from error
        yield images, labels.astype(np.uint8)


# Parquet, as on the Hugging Face hub


def _parquet(train: list[Path], test: list[Path]) -> Source:
    for files in (train, test):
        _refuse_lacking(files)

    def read(split: str, scratch: Path) -> Iterator[Chunk]:
        return _decode(row for path in (train if split == "train" else test) for row in _rows(path))

    return Source("parquet", (*train, *test), CLASSES, read)


def _refuse_lacking(files: list[Path]) -> None:
    """Refuse some of the shards of a split, which are named train-00000-of-00002.parquet."""
    found: dict[tuple[str, int], set[int]] = {}
    for path in files:
        if named := re.search(r"^(.*)-(\d+)-of-(\d+)", path.name):
            found.setdefault((named[1], int(named[3])), set()).add(int(named[2]))
    for (split, of), shards in found.items():
        if lacking := [f"{split}-{n:05}" for n in range(of) if n not in shards]:
            raise UsageError(
                f"{files[0].parent} lacks {name_first(lacking, 3)} of {of} Parquet files; "
                "download them too"
            )


def _rows(path: Path) -> Iterator[Encoded]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    right = "expected: columns 'img' (or 'image') of struct<bytes, path> and 'label' of integers"
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            column = next((name for name in ("img", "image") if name in schema.names), None)
            if column is None or "label" not in schema.names:
                raise UsageError(f"{path} has columns {', '.join(schema.names)}; {right}")
            image, kind = schema.field(column).type, schema.field("label").type
            if not (pa.types.is_struct(image) and image.get_field_index("bytes") >= 0):
                raise UsageError(f"{path} has {column!r} of type {image}; {right}")
            if not pa.types.is_integer(kind):
                raise UsageError(f"{path} has 'label' of type {kind}; {right}")
            row = 0
            for batch in file.iter_batches(CHUNK, columns=[column, "label"]):
                labels = batch.column("label").to_pylist()
                for struct, label in zip(batch.column(column).to_pylist(), labels, strict=True):
                    data = (struct or {}).get("bytes")
                    if data is None or label is None:
                        missing = "label" if data is not None else "image bytes"
                        raise UsageError(f"{path}, row {row}, has no {missing}; {right}")
                    if not 0 <= label < CLASSES:
                        raise UsageError(
                            f"{path}, row {row}, has label {label}; CIFAR-10 has 0 to {CLASSES - 1}"
                        )
                    yield f"{path}, row {row},", data, label
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise UsageError(
            f"{path} is not a whole Parquet file ({one_line(error)}); download it again"
        ) from error


# Class folders


def _class_folders(train: dict[str, list[Path]], test: dict[str, list[Path]]) -> Source:
    labels = {name: label for label, name in enumerate(train)}
    if len(labels) > 256:
        folder = next(iter(train.values()))[0].parent.parent
        raise UsageError(f"{folder} holds {len(labels)} class folders; at most 256 are supported")
    if odd := next((name for name in test if name not in labels), None):
        folder = test[odd][0].parent
        raise UsageError(f"{folder} has no matching folder in train; expected: {', '.join(labels)}")

    def read(split: str, scratch: Path) -> Iterator[Chunk]:
        folders = train if split == "train" else test
        # Alternate the classes, so that the first n images of the split are balanced.
        turns = zip_longest(*([(path, labels[name]) for path in folders[name]] for name in folders))
        return _decode(_load(*image) for turn in turns for image in turn if image is not None)

    files = (path for folders in (train, test) for paths in folders.values() for path in paths)
    return Source(FOLDERS, tuple(files), len(train), read)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each sub-folder that holds any, by its name, sorted by name."""
    found = {
        place.name: [p for p in _entries(place) if p.suffix.lower() in (".png", ".jpg", ".jpeg")]
        for place in _folders(folder)
    }
    return {name: paths for name, paths in found.items() if paths}


def _load(path: Path, label: int) -> Encoded:
    with _reading(path, "make it readable or remove it"):
        return str(path), path.read_bytes(), label


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir()]


def _entries(folder: Path) -> list[Path]:
    """Return the sorted entries of ``folder`` without hidden ones; empty if it is not readable."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


# Decoding


CHUNK = 1000  # images decoded at a time: 3 MB


def _decode(encoded: Iterable[Encoded]) -> Iterator[Chunk]:
    import numpy as np

    encoded = iter(encoded)
    while group := list(islice(encoded, CHUNK)):
        # 50 to 200 µs per image; two threads were slower: they exchange the GIL at every image
        pixels = b"".join(decode_pixels(data, where) for where, data, _ in group)
        images = np.frombuffer(pixels, np.uint8).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
        labels = np.array([label for *_, label in group], np.uint8)
        yield np.ascontiguousarray(images), labels


def decode_pixels(data: bytes, where: str) -> bytes:
    """Decode a 32×32 RGB image to 32 rows of 32 RGB values. Raises UsageError: it is not one."""
    from io import BytesIO

    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            if image.size == (32, 32) and image.mode == "RGB":
                return image.tobytes()
            width, height, mode = *image.size, image.mode
    except Exception as error:  # broken images raise OSError, SyntaxError, struct.error, …
        reason = f"is not a whole PNG or JPEG ({one_line(error)})"
        raise UsageError(f"{where} {reason}; expected: 32×32 RGB images") from error
    raise UsageError(f"{where} is {width}×{height} {mode}; expected: 32×32 RGB images")


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error}); {remedy}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
