"""Small datasets in every layout, written the way their owners write them, and a server."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bench.data import download
from bench.data.sources import Archive


@dataclass
class Pictures:
    """A split's truth: images uint8 (N, 3, 32, 32) and labels 0 to 9."""

    images: np.ndarray
    labels: np.ndarray


@pytest.fixture
def draw() -> Callable[..., Pictures]:
    def draw(n: int, seed: int = 0) -> Pictures:
        rng = np.random.default_rng(seed)
        images = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
        return Pictures(images, rng.integers(0, 10, n).astype(np.uint8))

    return draw


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is how the canonical batches hold them."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, obj: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes


def python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    # numpy 2 moved the module; the canonical files predate that
    return file.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


@pytest.fixture(name="python2_pickle")
def python2_pickle_fixture() -> Callable[[Any], bytes]:
    return python2_pickle


@pytest.fixture
def write_batches() -> Callable[..., Archive]:
    def write(
        folder: Path, train: list[Pictures], test: list[Pictures], **replaced: bytes
    ) -> Archive:
        """Write ``folder`` as cifar-10-batches-py; ``replaced`` are whole files by name."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"data_batch_{i + 1}" for i in range(len(train))]
        sums = {}
        for name, part in zip([*names, "test_batch"], [*train, *test], strict=True):
            batch = {
                b"batch_label": name.encode(),
                b"labels": part.labels.tolist(),
                b"data": part.images.reshape(-1, 3072),
                b"filenames": [b"%d.png" % i for i in range(len(part.labels))],
            }
            data = replaced.get(name, python2_pickle(batch))
            (folder / name).write_bytes(data)
            sums[name] = hashlib.md5(data).hexdigest()
        test_sums = {"test_batch": sums.pop("test_batch")}
        return Archive(url="http://127.0.0.1:9/", train=sums, test=test_sums)

    return write


@pytest.fixture
def pack() -> Callable[[Path], bytes]:
    def pack(folder: Path) -> bytes:
        """A .tar.gz of ``folder``, under its own name."""
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
            tar.add(folder, folder.name)
        return file.getvalue()

    return pack


def encode(image: np.ndarray, format: str = "PNG", mode: str = "RGB") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).convert(mode).save(file, format, quality=95)
    return file.getvalue()


@pytest.fixture(name="encode", scope="session")
def encode_fixture() -> Callable[..., bytes]:
    return encode


@pytest.fixture
def write_parquet() -> Callable[..., None]:
    def write(
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

    return write


@dataclass
class Server:
    """What a loopback server sends, what it does wrong, and what it was asked."""

    url: str
    body: bytes = b""
    resumes: bool = True
    # one per request, first come first served: an HTTP status, or the bytes after which to hang up
    faults: list[int | str] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "FIRST_WAIT_S", 0)
    monkeypatch.setattr(download, "TIMEOUT_S", 5)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.ranges.append(asked)
            fault = state.faults.pop(0) if state.faults else None
            if isinstance(fault, int):
                self.send_error(fault)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            size = len(state.body)
            if asked and state.resumes and start >= size:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{size}")
                self.end_headers()
                return
            if asked and state.resumes:
                self.send_response(206)
                shift = 1 if fault == "elsewhere" else 0
                self.send_header("Content-Range", f"bytes {start + shift}-{size - 1}/{size}")
            else:
                start = 0
                self.send_response(200)
            self.send_header("Content-Length", str(size - start))
            self.end_headers()
            sent = state.body[start:]
            if fault == "short":
                sent = sent[: len(sent) // 2]
            self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{http.server_port}/cifar-10-python.tar.gz")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()
