"""The download, against a server on loopback that misbehaves in every way servers do."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from layouts_for_tests import draw, pack, write_batches

from bench.data import download, load, prepare
from bench.errors import UsageError

NAME = "cifar-10-python.tar.gz"


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


@pytest.fixture
def body():
    return np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def fetch(server, body, tmp_path):
    """Download ``body`` from the server, whose faults the test sets; the file's bytes."""
    server.body = body

    def fetch(md5=None, **kwargs):
        path = tmp_path / "data" / NAME
        download.fetch(server.url, path, md5 or hashlib.md5(body).hexdigest(), **kwargs)
        return path.read_bytes()

    return fetch


@pytest.fixture
def part(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / (NAME + ".part")


def test_whole_download_which_is_not_fetched_again(fetch, body, server, tmp_path):
    seen = []
    assert fetch(progress=lambda *args: seen.append(args)) == body
    assert {what for what, _, _ in seen} == {f"downloading {NAME}"}
    done = [done for _, done, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1:] == (len(body), len(body))
    assert not (tmp_path / "data" / (NAME + ".part")).exists()
    assert fetch() == body
    assert server.ranges == [None]


@pytest.mark.parametrize(
    ("have", "faults", "ranges"),
    [
        (150_000, [], [150_000]),
        (300_000, [], [300_000]),  # it is whole
        (300_004, [], [300_004, 0]),  # longer than the file: from the start
        (1000, ["elsewhere"], [1000, 0]),
        (0, ["short", 503, "short"], [0, 150_000, 150_000, 225_000]),
    ],
)
def test_interrupted_download_resumes(fetch, body, server, part, have, faults, ranges):
    part.write_bytes((body + b"more")[:have])
    server.faults = faults
    assert fetch() == body
    assert server.ranges == [f"bytes={start}-" if start else None for start in ranges]


def test_server_that_cannot_resume_starts_again(fetch, body, server, part):
    part.write_bytes(b"not the start of the body")
    server.resumes = False
    assert fetch() == body


def test_refusal_is_final(fetch, server):
    server.faults = [404]
    with pytest.raises(UsageError, match=r"404.*--data-dir .*--dataset synthetic"):
        fetch()
    assert len(server.ranges) == 1


def test_failure_for_good_keeps_what_came(fetch, body, server, part):
    server.faults = ["short"] + [503] * 9
    with pytest.raises(UsageError, match=r"503.*150,000 bytes kept: the same command resumes"):
        fetch()
    assert len(server.ranges) == download.ATTEMPTS
    assert part.read_bytes() == body[:150_000]
    server.faults = []
    assert fetch() == body
    assert server.ranges[-1] == "bytes=150000-"


def test_wrong_checksum_deletes_what_came_and_says_so(fetch, server, tmp_path):
    with pytest.raises(UsageError, match=r"md5 .*deleted; .*--data-dir .*--dataset synthetic"):
        fetch(md5="0" * 32)
    assert [path.suffix for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_silent_server_times_out(fetch, monkeypatch, server):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.05)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(UsageError, match=r"timed out.*--data-dir .*--dataset synthetic"):
            fetch()


def test_no_server_names_both_remedies(tmp_path, server):
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
    with pytest.raises(UsageError) as raised:
        prepare("cifar10", data_dir=tmp_path / "data", cache_dir=tmp_path / "cache", url=url)
    message = str(raised.value)
    for word in (url, str(tmp_path / "data"), "refused", "--data-dir", "--dataset synthetic"):
        assert word in message
    assert "\n" not in message


def test_two_downloads_at_once_ask_once(server, body, tmp_path):
    server.body = body
    code = "import sys; from bench.data.download import fetch; from pathlib import Path\n"
    code += "fetch(sys.argv[1], Path(sys.argv[2]), sys.argv[3])"
    md5 = hashlib.md5(body).hexdigest()
    command = [sys.executable, "-c", code, server.url, tmp_path / NAME, md5]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert (tmp_path / NAME).read_bytes() == body
    assert server.ranges == [None]


def test_prepare_downloads_what_is_absent(server, tmp_path):
    archive = write_batches(tmp_path / "cifar-10-batches-py", [draw(6)], [draw(3)])
    server.body = pack(tmp_path / "cifar-10-batches-py")
    archive = replace(archive, md5=hashlib.md5(server.body).hexdigest(), url="http://127.0.0.1:9/")
    where = {"data_dir": tmp_path / "data", "cache_dir": tmp_path / "cache", "archive": archive}
    info = prepare("cifar10", url=server.url, **where)
    assert (info.source, info.train_images, info.test_images) == (NAME, 6, 3)
    np.testing.assert_array_equal(load(info.folder).train_images, draw(6).images)
    assert prepare("cifar10", **where) == info
    assert len(server.ranges) == 1
