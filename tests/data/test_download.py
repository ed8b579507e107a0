"""The download, against a server on loopback that misbehaves in every way servers do."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from bench.data import download, load, prepare
from bench.errors import UsageError

NAME = "cifar-10-python.tar.gz"


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


def test_whole_download(fetch, body, server, tmp_path):
    seen = []
    assert fetch(progress=lambda *args: seen.append(args)) == body
    assert server.ranges == [None]
    assert {what for what, _, _ in seen} == {f"downloading {NAME}"}
    done = [done for _, done, _ in seen]
    assert done == sorted(done)
    assert seen[-1][1:] == (len(body), len(body))
    assert not (tmp_path / "data" / (NAME + ".part")).exists()


def test_file_that_is_there_is_not_fetched_again(fetch, server):
    fetch()
    fetch()
    assert len(server.ranges) == 1


@pytest.mark.parametrize(
    ("have", "faults", "then"),
    [
        (1, [], []),
        (150_000, [], []),
        (299_999, [], []),
        (300_000, [], []),  # it is whole
        (300_004, [], [None]),  # longer than the file: from the start
        (1000, ["elsewhere"], [None]),
    ],
)
def test_interrupted_download_resumes(fetch, body, server, part, have, faults, then):
    part.write_bytes((body + b"more")[:have])
    server.faults = faults
    assert fetch() == body
    assert server.ranges == [f"bytes={have}-", *then]


def test_server_that_cannot_resume_starts_again(fetch, body, server, part):
    part.write_bytes(b"not the start of the body")
    server.resumes = False
    assert fetch() == body


def test_short_body_is_continued(fetch, body, server):
    server.faults = ["short", "short"]
    assert fetch() == body
    assert server.ranges == [None, "bytes=150000-", "bytes=225000-"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_asked_again(fetch, body, server, status):
    server.faults = [status, status]
    assert fetch() == body
    assert len(server.ranges) == 3


@pytest.mark.parametrize("status", [403, 404])
def test_refusal_is_final(fetch, server, status):
    server.faults = [status]
    with pytest.raises(UsageError, match=rf"{status}.*--data-dir .*--dataset synthetic"):
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


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "cifar", "http://[::1"])
def test_address_that_is_none(tmp_path, url):
    with pytest.raises(UsageError):
        download.fetch(url, tmp_path / "x", "0" * 32)
    assert not (tmp_path / "x").exists()


def test_folder_that_cannot_be_written_is_not_retried(fetch, server, tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(UsageError, match="data"):
        fetch()
    assert server.ranges == []


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


def test_prepare_downloads_what_is_absent(server, tmp_path, write_batches, pack, draw):
    archive = write_batches(tmp_path / "cifar-10-batches-py", [draw(6)], [draw(3)])
    server.body = pack(tmp_path / "cifar-10-batches-py")
    archive = replace(archive, md5=hashlib.md5(server.body).hexdigest(), url="http://127.0.0.1:9/")
    where = {"data_dir": tmp_path / "data", "cache_dir": tmp_path / "cache", "archive": archive}
    info = prepare("cifar10", url=server.url, **where)
    assert (info.source, info.train_images, info.test_images) == (NAME, 6, 3)
    np.testing.assert_array_equal(load(info.folder).train_images, draw(6).images)
    assert prepare("cifar10", **where) == info
    assert len(server.ranges) == 1


def test_mirror_of_something_else_is_refused(server, tmp_path, write_batches, pack, draw):
    archive = write_batches(tmp_path / "cifar-10-batches-py", [draw(6)], [draw(3)])
    server.body = pack(tmp_path / "cifar-10-batches-py")
    with pytest.raises(UsageError, match=archive.md5):
        prepare("cifar10", data_dir=tmp_path / "data", url=server.url, archive=archive)
    assert not (tmp_path / "data" / NAME).exists()


def test_without_the_package_that_tries_again_a_line_says_how_to_have_it(fetch, monkeypatch):
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(UsageError, match=r"-m pip install tenacity; or give --data-dir") as told:
        fetch()
    assert "\n" not in str(told.value)
