"""Every layout decodes to the pixels that were written, once, and every broken file is named."""

import os
import pwd
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.base.errors import UsageError
from bench.networks import data
from bench.networks.data import cifar10, find_cache, find_layout, load, prepare
from bench.networks.data.cifar10 import ARCHIVE, FOLDER
from bench.networks.weights import parse_start
from bench.workers.examination import Machine, examine
from bench.workers.judgement import Severity, judge
from tests.networks.data.layouts_for_tests import draw, encode, pack, write_batches, write_parquet


def read(tmp_path):
    info = prepare("cifar10", data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    return load(info.folder)


def refused(tmp_path, *words):
    """The one line it is refused with, which holds ``words``; nothing is left in the cache."""
    with pytest.raises(UsageError) as raised:
        read(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    cache = tmp_path / "cache"
    assert not cache.exists() or [p for p in cache.iterdir() if p.suffix != ".lock"] == []


def same(dataset, train, test):
    for name, truth in (("train", train), ("test", [test])):
        images = getattr(dataset, f"{name}_images")
        labels = getattr(dataset, f"{name}_labels")
        np.testing.assert_array_equal(images, np.concatenate([part.images for part in truth]))
        np.testing.assert_array_equal(labels, np.concatenate([part.labels for part in truth]))
        assert images.dtype == labels.dtype == np.uint8
    return True


@pytest.fixture
def parts():
    return [draw(7, seed=1), draw(5, seed=2)], draw(4, seed=3)


def test_canonical_batches(tmp_path, parts, monkeypatch):
    write_batches(tmp_path / "data/other-name", parts[0], parts[1], monkeypatch)
    dataset = read(tmp_path)
    assert same(dataset, *parts)
    info = dataset.info
    assert (info.source, info.train_images, info.test_images, info.classes) == (FOLDER, 12, 4, 10)


def test_a_damaged_batch_or_archive_is_named_and_not_unpickled(tmp_path, parts, monkeypatch):
    write_batches(tmp_path / "data", parts[0], parts[1], monkeypatch)
    path = tmp_path / "data" / "data_batch_2"
    whole = path.read_bytes()
    path.write_bytes(b"cos\nsystem\n" + whole)
    refused(tmp_path, path, "truncated or altered", "md5", "download it again")
    path.unlink()
    refused(tmp_path, f"{tmp_path / 'data'} lacks data_batch_2; unpack")
    path.write_bytes(whole)
    packed = pack(tmp_path / "data", monkeypatch)
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    (tmp_path / "data" / ARCHIVE).write_bytes(packed[:-1])
    refused(tmp_path, ARCHIVE, "truncated or altered")


@pytest.mark.parametrize("column", ["img", "image"])
def test_parquet_shards_in_order_of_names(tmp_path, parts, column, monkeypatch):
    monkeypatch.setattr(cifar10, "_CHUNK", 4)
    train, test = parts
    for i in (1, 0):
        path = tmp_path / f"data/cifar10/train-0000{i}-of-00002.parquet"
        write_parquet(path, train[i], column, row_group_size=3)
    write_parquet(tmp_path / "data/cifar10/test-00000-of-00001.parquet", test, column)
    dataset = read(tmp_path)
    assert same(dataset, train, test)
    assert dataset.info.source == "parquet"


PNG = encode(draw(1).images[0])
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text": ["a"], "label": [1]}, "'image'"),
        ({"img": [1.5], "label": [1]}, "subscriptable"),
        ({"img": pa.array([{"bytes": PNG}], IMAGE), "label": [10]}, "labels outside 0 to 9"),
        ({"img": pa.array([{"bytes": encode(np.tile(draw(1).images[0], 2))}]), "label": [1]},
         "64×32 RGB, not 32×32 RGB"),
    ],
)  # fmt: skip
def test_parquet_of_something_else_is_named(tmp_path, columns, expected):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/train.parquet"
    pq.write_table(pa.table(columns), path)
    refused(tmp_path, f"{path} is not CIFAR-10", expected)


def test_files_without_images_are_named(tmp_path):
    write_parquet(tmp_path / "data/train.parquet", draw(0))
    refused(tmp_path, f"{tmp_path / 'data'} holds no training images")


def test_truncated_parquet_is_named(tmp_path):
    path = tmp_path / "data/train.parquet"
    write_parquet(path, draw(20))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + whole[-8:])
    refused(tmp_path, f"{path} is not CIFAR-10")


TRAIN, TEST = "train-00000-of-00002.parquet", "test-00000-of-00001.parquet"
SECOND = "train-00001-of-00002.parquet"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({TRAIN: b""}, f"lacks {SECOND}; download all 2 shards"),
        ({"cifar10-" + TRAIN: b""}, f"lacks cifar10-{SECOND}"),
        ({"train.parquet": b"", "test-00001-of-00002.parquet": b""}, "lacks test-00000-of-00002"),
        ({TRAIN: b"", SECOND: b"", "train.parquet": b""}, "train.parquet, of two copies; keep the"),
        ({TRAIN: b"", SECOND: b"", "train-00000-of-00001.parquet": b""}, "of two copies"),
        ({"train.parquet": b"version https://git-lfs.github.com/spec/v1\n"}, "run git lfs pull"),
        ({TRAIN: b"", SECOND: b"version https://git-lfs.github.com/spec/v1\n"}, "git lfs pull"),
        ({ARCHIVE: b"version https://git-lfs.github.com/spec/v1\n"}, "run git lfs pull"),
        ({"train.parquet": b"<!DOCTYPE html><p>Sign in"}, "a web page"),
        ({"train.parquet": None}, "train.parquet is empty"),
        ({"train.parquet": b"PAR1 and no end"}, "train.parquet is not whole: download it again"),
        ({"train.parquet": b"", TEST: b"PAR1 and no end"}, f"{TEST} is not whole"),
    ],
)
def test_what_is_not_whole_is_refused_by_the_sweep_and_the_doctor(tmp_path, files, expected):
    """In one line with the fix, and before anything is decoded; b"" stands for whole files."""
    (tmp_path / "data").mkdir()
    for name, content in files.items():
        path = tmp_path / "data" / name
        if content == b"":
            write_parquet(path, draw(3))
        else:
            path.write_bytes(content or b"")
    refused(tmp_path, expected)
    machine = examine([], data_dir=tmp_path / "data", ask=lambda *asked: Machine())
    (remark,) = (one for one in judge(machine) if one.topic == "images")
    assert (remark.level, expected in remark.what) == (Severity.UNBELIEVABLE, True)
    assert "\n" not in remark.what


def test_what_is_no_dataset(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/plot.png").write_bytes(PNG)
    assert find_layout(tmp_path) is find_layout(tmp_path / "absent") is None
    with pytest.raises(UsageError, match="is a file; give the folder"):
        find_layout(tmp_path / "figures/plot.png")


@pytest.fixture
def server(tmp_path, monkeypatch, parts):
    """The folder of what is downloaded, which is the archive."""
    served = tmp_path / "served"
    served.mkdir()
    write_batches(tmp_path / FOLDER, parts[0], parts[1], monkeypatch)
    (served / ARCHIVE).write_bytes(pack(tmp_path / FOLDER, monkeypatch))
    monkeypatch.setattr(cifar10, "URL", (served / ARCHIVE).as_uri())
    return served


def test_what_is_absent_is_downloaded_once(tmp_path, parts, server):
    assert same(read(tmp_path), *parts)
    assert [path.name for path in (tmp_path / "data").iterdir()] == [ARCHIVE]
    (server / ARCHIVE).unlink()
    assert same(read(tmp_path), *parts)


def test_a_download_that_fails_names_both_remedies_and_leaves_nothing(tmp_path, server):
    (server / ARCHIVE).write_bytes(b"<html>Sign in to the network</html>")
    remedies = ("--data-dir", "--dataset synthetic", cifar10.URL)
    start = f"cannot download CIFAR-10 from {cifar10.URL} to {tmp_path / 'data'} ("
    refused(tmp_path, start, "it is truncated or altered", *remedies)
    (server / ARCHIVE).unlink()
    refused(tmp_path, "No such file", *remedies)
    assert list((tmp_path / "data").iterdir()) == []


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "data/train.parquet", draw(30, seed=1))
    write_parquet(tmp_path / "data/test.parquet", draw(10, seed=2))
    return tmp_path / "data"


def test_an_unchanged_source_is_decoded_once(folder, tmp_path, monkeypatch):
    calls = []
    decode = data.decode
    monkeypatch.setattr(data, "decode", lambda *a: (calls.append(a), decode(*a)))
    first = read(tmp_path).info
    assert read(tmp_path).info == first
    assert len(calls) == 1
    file = folder / "train.parquet"
    modified = file.stat().st_mtime_ns
    write_parquet(file, draw(31, seed=3))
    os.utime(file, ns=(modified, modified))  # another size, and the same time of modification
    second = read(tmp_path).info
    assert (first.train_images, second.train_images) == (30, 31)
    assert first.fingerprint != second.fingerprint
    os.utime(file, ns=(1, 1))  # the same size, and another time of modification
    third = read(tmp_path).info
    assert third.folder != second.folder
    assert third.fingerprint == second.fingerprint
    assert len(calls) == 3


@pytest.mark.usefixtures("folder")
def test_fingerprint_is_of_the_arrays_which_are_mapped_and_read_only(tmp_path):
    dataset = read(tmp_path)
    arrays = (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)
    together = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    assert dataset.info.fingerprint == sha256(together).hexdigest()[:16]
    assert isinstance(dataset.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        dataset.train_images[0] = 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("array", ["train_images", "test_labels", "meta"])
def test_damaged_entry_is_made_again(tmp_path, array):
    info = read(tmp_path).info
    path = next(Path(info.folder).glob(f"{array}.*"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UsageError, match="does not hold a prepared dataset"):
        load(info.folder)
    assert read(tmp_path).info == info


def test_the_cache_keeps_the_entries_used_last(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "KEPT", 2)
    cache = tmp_path / "cache"

    def decode(images):
        write_parquet(folder / "train.parquet", draw(images, seed=images))
        return Path(read(tmp_path).info.folder)

    first, second = decode(20), decode(21)
    os.utime(first, (1, 1))  # long ago, but a case opens it
    os.utime(second, (2, 2))
    load(first)
    third = decode(22)
    assert {path for path in cache.iterdir() if path.is_dir()} == {first, third}
    fourth = decode(23)  # all others were used today: a sweep that runs may need them
    assert {path for path in cache.iterdir() if path.is_dir()} == {first, third, fourth}


@pytest.mark.usefixtures("folder")
def test_interrupted_preparation_leaves_no_entry(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *args: pytest.exit("interrupted"))
        with pytest.raises(pytest.exit.Exception):
            read(tmp_path)
    cache = tmp_path / "cache"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    stale = next(cache.iterdir()).with_suffix(".partial")  # one had no time to clean up
    stale.mkdir()
    assert read(tmp_path).info.train_images == 30
    assert not stale.exists()


PREPARE = """
import sys
import time
from pathlib import Path
from bench.networks import data
decode = data.decode
def slowly(source, name, folder):
    print("decoding", flush=True)
    time.sleep(0.5)
    decode(source, name, folder)
data.decode = slowly
print(data.prepare("cifar10", data_dir=Path(sys.argv[1]), cache_dir=Path(sys.argv[2])))
"""


def test_two_processes_at_once(folder, tmp_path):
    command = [sys.executable, "-c", PREPARE, folder, tmp_path / "cache"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum(output.count("decoding") for output in outputs) == 1


@pytest.mark.usefixtures("folder")
def test_where_the_cache_and_the_images_are_by_default(tmp_path, monkeypatch):
    """Without HOME in the user's own, and without an entry in passwd, as a container's numeric
    user, below a temporary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    info = prepare("cifar10", data_dir=None)
    assert info.train_images == 30
    assert Path(info.folder).parent == tmp_path / "xdg" / "precision-bench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "")  # so that it is unset again after the test if it was before
    monkeypatch.delenv("HOME")
    assert find_cache().is_relative_to(pwd.getpwuid(os.getuid()).pw_dir)
    assert os.environ.pop("HOME") == pwd.getpwuid(os.getuid()).pw_dir
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ValueError, match="~ stands for no folder"):
        parse_start("~/weights.pt")
    own = tmp_path / f"precision-bench-{os.getuid()}"
    assert find_cache() == own / ".cache" / "precision-bench"
    assert parse_start("~/weights.pt") == f"{own}/weights.pt"


@pytest.mark.usefixtures("folder")
def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .* XDG_CACHE_HOME"):
        read(tmp_path)


def test_real_images(cifar10):
    """60,000 real images, 6,000 of each class, with the channel means CIFAR-10 is known by."""
    from bench.networks.data.batches import MEAN

    # decoded where other tests find them too
    info = prepare("cifar10", data_dir=cifar10)
    assert prepare("cifar10", data_dir=cifar10.parent) == info
    dataset = load(info.folder)
    assert (info.train_images, info.test_images, info.source) == (50_000, 10_000, "parquet")
    assert np.bincount(dataset.train_labels).tolist() == [5_000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1_000] * 10
    means = dataset.train_images[::10].mean(axis=(0, 2, 3), dtype=np.float64) / 255
    np.testing.assert_allclose(means, MEAN, atol=0.006)
