"""Small datasets in every layout, written the way their owners write them."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.networks.data import cifar10


@dataclass
class Pictures:
    """A split's truth: images uint8 (N, 3, 32, 32) and labels 0 to 9."""

    images: np.ndarray
    labels: np.ndarray


def draw(n: int, seed: int = 0) -> Pictures:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    return Pictures(images, rng.integers(0, 10, n).astype(np.uint8))


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is how the canonical batches hold them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, obj: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]

    dispatch[bytes] = save_bytes


def pickle_as_python2(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    # numpy 2 moved the module; the canonical files predate that
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def write_batches(folder: Path, train: list[Pictures], test: Pictures, monkeypatch: Any) -> None:
    """Write ``folder`` as cifar-10-batches-py, and have its sums expected."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{i + 1}" for i in range(len(train))), "test_batch"]
    sums = {}
    for name, part in zip(names, [*train, test], strict=True):
        batch = {
            b"batch_label": name.encode(),
            b"labels": part.labels.tolist(),
            b"data": part.images.reshape(-1, 3072),
            b"filenames": [b"%d.png" % i for i in range(len(part.labels))],
        }
        (folder / name).write_bytes(data := pickle_as_python2(batch))
        sums[name] = hashlib.md5(data).hexdigest()
    monkeypatch.setattr(cifar10, "_BATCHES", sums)


def pack(folder: Path, monkeypatch: Any) -> bytes:
    """A .tar.gz of ``folder``, under its own name, whose sum is then expected."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, folder.name)
    data = file.getvalue()
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", hashlib.md5(data).hexdigest())
    return data


def encode(image: np.ndarray, format: str = "PNG", mode: str = "RGB") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).convert(mode).save(file, format, quality=95)
    return file.getvalue()


def write_parquet(
    path: Path, part: Pictures, column: str = "img", format: str = "PNG", **kwargs: Any
) -> None:
    """Write one shard as the Hugging Face hub has them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encode(image, format), "path": None} for image in part.images]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array(part.labels.tolist(), pa.int64())
    table = pa.table({column: pa.array(images, kind), "label": labels})
    pq.write_table(table, path, **kwargs)
