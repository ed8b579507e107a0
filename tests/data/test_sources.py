"""Every layout decodes to the pixels that were written, and every broken file is named."""

import hashlib
import os
import pickle
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts_for_tests import (
    draw,
    encode,
    pack,
    pickle_as_python2,
    write_batches,
    write_folders,
    write_parquet,
)

from bench.data import find_layout, load, prepare, sources
from bench.data.sources import CIFAR10
from bench.errors import UsageError


def read(tmp_path, data_dir, **kwargs):
    return load(
        prepare("cifar10", data_dir=data_dir, cache_dir=tmp_path / "cache", **kwargs).folder
    )


def refused(tmp_path, data_dir, *words, **kwargs):
    """The one line it is refused with, which holds ``words``; nothing is left in the cache."""
    with pytest.raises(UsageError) as raised:
        read(tmp_path, data_dir, **kwargs)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    cache = tmp_path / "cache"
    assert not cache.exists() or [p for p in cache.iterdir() if p.suffix != ".lock"] == []
    return message


def same(dataset, train, test):
    for name, truth in (("train", train), ("test", test)):
        images = getattr(dataset, f"{name}_images")
        labels = getattr(dataset, f"{name}_labels")
        np.testing.assert_array_equal(images, np.concatenate([part.images for part in truth]))
        np.testing.assert_array_equal(labels, np.concatenate([part.labels for part in truth]))
        assert images.dtype == labels.dtype == np.uint8
    return True


# cifar-10-batches-py


@pytest.fixture
def parts():
    return [draw(7, seed=1), draw(5, seed=2)], [draw(4, seed=3)]


@pytest.mark.parametrize("place", ["data", "data/other-name"])
def test_canonical_batches(tmp_path, parts, place):
    folder = tmp_path / place
    archive = write_batches(folder, *parts)
    for data_dir in (folder, tmp_path / "data"):
        dataset = read(tmp_path, data_dir, archive=archive)
        assert same(dataset, *parts)
        assert dataset.info.source == "cifar-10-batches-py"
        assert (dataset.info.train_images, dataset.info.test_images) == (12, 4)
        assert dataset.info.classes == 10


def test_canonical_archive_is_read_where_it_lies(tmp_path, parts):
    archive = write_batches(tmp_path / "cifar-10-batches-py", *parts)
    data = pack(tmp_path / "cifar-10-batches-py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / archive.name).write_bytes(data)
    archive = replace(archive, md5=hashlib.md5(data).hexdigest())
    dataset = read(tmp_path, tmp_path / "data", archive=archive)
    assert same(dataset, *parts)
    assert dataset.info.source == "cifar-10-python.tar.gz"
    assert [path.name for path in (tmp_path / "data").iterdir()] == [archive.name]
    assert {path.suffix for path in Path(dataset.info.folder).iterdir()} == {".npy", ".json"}


@pytest.mark.parametrize(("damage", "reason"), [("altered", "md5"), ("missing", "No such file")])
def test_damaged_batch_is_named(tmp_path, parts, damage, reason):
    archive = write_batches(tmp_path / "data", *parts)
    path = tmp_path / "data" / "data_batch_2"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.unlink() if damage == "missing" else path.write_bytes(data)
    refused(tmp_path, tmp_path / "data", path, reason, archive=archive)


def test_damaged_archive_is_named(tmp_path, parts):
    archive = write_batches(tmp_path / "cifar-10-batches-py", *parts)
    path = tmp_path / "data" / archive.name
    path.parent.mkdir()
    path.write_bytes(pack(tmp_path / "cifar-10-batches-py")[:-1])
    refused(tmp_path, tmp_path / "data", path, "md5", "truncated", archive=archive)
    path.write_bytes(b"<html>Sign in to the network</html>")
    html = replace(archive, md5=hashlib.md5(path.read_bytes()).hexdigest())
    refused(tmp_path, tmp_path / "data", path, "cannot be unpacked", archive=html)


class Shout:
    """Unpickling this runs a shell command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_pickle_that_would_run_a_command_is_refused(tmp_path, parts):
    witness = tmp_path / "it-ran"
    evil = pickle_as_python2({b"labels": [], b"data": Shout(witness)})
    archive = write_batches(tmp_path / "data", *parts, data_batch_1=evil)
    refused(tmp_path, tmp_path / "data", "data_batch_1", "system is not allowed", archive=archive)
    assert not witness.exists()
    pickle.loads(evil)  # and it would have
    assert witness.exists()


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ([1, 2], "indices"),
        ({b"labels": [1], b"data": np.zeros((1, 3071), np.uint8)}, "reshape"),
        ({b"labels": [1], b"data": np.zeros((1, 3072), np.float32)}, "float32"),
        ({b"labels": [10], b"data": np.zeros((1, 3072), np.uint8)}, "labels outside 0 to 9"),
    ],
)
def test_pickle_of_something_else_is_named(tmp_path, parts, batch, reason):
    data = pickle_as_python2(batch)
    archive = write_batches(tmp_path / "data", *parts, test_batch=data)
    refused(tmp_path, tmp_path / "data", "test_batch", reason, archive=archive)


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("../escaped", tarfile.REGTYPE, ""),
        ("link", tarfile.SYMTYPE, "../../outside"),
        ("link", tarfile.LNKTYPE, "../../outside"),
        ("pipe", tarfile.FIFOTYPE, ""),
    ],
)
def test_archive_that_leaves_its_folder_is_refused(tmp_path, name, kind, target):
    path = tmp_path / "some.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member)
    with pytest.raises(UsageError, match=r"some\.tar\.gz cannot be unpacked"):
        sources.unpack(path, hashlib.md5(path.read_bytes()).hexdigest(), tmp_path / "deep" / "into")
    assert [found for found in tmp_path.rglob("*") if not found.is_dir()] == [path]


# Parquet


@pytest.mark.parametrize("column", ["img", "image"])
def test_parquet_shards_in_order_of_names(tmp_path, parts, column):
    train, test = parts
    for i in (1, 0):
        path = tmp_path / f"data/cifar10/train-0000{i}-of-00002.parquet"
        write_parquet(path, train[i], column, row_group_size=3)
    write_parquet(tmp_path / "data/cifar10/test-00000-of-00001.parquet", test[0], column)
    for data_dir in (tmp_path / "data", tmp_path / "data/cifar10"):
        dataset = read(tmp_path, data_dir)
        assert same(dataset, train, test)
        assert dataset.info.source == "parquet"


def test_half_of_the_shards_is_refused(tmp_path):
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", draw(3))
    with pytest.raises(UsageError, match=r"data lacks train-00000 of 2 Parquet files; download"):
        find_layout(tmp_path / "data")
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", draw(3))
    write_parquet(tmp_path / "data/test-00000-of-00003-0a1b.parquet", draw(3))
    refused(tmp_path, tmp_path / "data", "data lacks test-00001, test-00002 of 3 Parquet files")


@pytest.mark.parametrize(
    "name", ["train-00000-of-00001.parquet", "data_batch_2", "train/cat/1.png", CIFAR10.name]
)
def test_what_git_lfs_has_not_fetched_is_refused(tmp_path, name):
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    for other in CIFAR10.train if name in CIFAR10.train else ():
        path.with_name(other).write_bytes(bytes(300))
    oid = "oid sha256:" + 64 * "0"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 119705255\n")
    said = f"{path} is git-lfs's pointer to a file; run git lfs pull beside it"
    with pytest.raises(UsageError, match=said):
        find_layout(tmp_path / "data")


def test_parquet_of_jpegs_is_close(tmp_path):
    """A name that holds both words is training data."""
    smooth = draw(3)
    smooth.images[:] = np.arange(32)[:, None] * 4 + np.array([0, 60, 120])[:, None, None]
    write_parquet(tmp_path / "data/latest-train.parquet", smooth, format="JPEG")
    dataset = read(tmp_path, tmp_path / "data")
    difference = dataset.train_images.astype(int) - smooth.images
    assert abs(difference).max() <= 8
    assert dataset.info.test_images == len(dataset.test_images) == len(dataset.test_labels) == 0


def test_more_images_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 10)
    write_parquet(tmp_path / "data/train.parquet", train := draw(21))
    np.testing.assert_array_equal(read(tmp_path, tmp_path / "data").train_images, train.images)


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_truncated_parquet_is_named(tmp_path, keep):
    path = tmp_path / "data/train.parquet"
    write_parquet(path, draw(20))
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, tmp_path / "data", path, "not a whole Parquet file")


def test_parquet_of_something_else_says_what_is_wanted(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "data").mkdir()
    path = tmp_path / "data/train.parquet"
    png = pa.array([{"bytes": b"", "path": ""}])
    for columns, words in (
        ({"text": ["a"], "label": [1]}, ["columns text, label"]),
        ({"img": [1.5], "label": [1]}, ["'img' of type double"]),
        ({"img": png, "label": ["cat"]}, ["'label' of type string"]),
        ({"img": pa.array([None], png.type), "label": [1]}, ["row 0", "no image bytes"]),
        ({"img": png, "label": pa.array([None], pa.int64())}, ["row 0", "no label"]),
        ({"img": png, "label": [10]}, ["row 0", "label 10", "0 to 9"]),
        ({"img": png, "label": [-1]}, ["row 0", "label -1"]),
        ({"img": png.slice(0, 0), "label": pa.array([], pa.int64())}, ["no training images"]),
    ):
        pq.write_table(pa.table(columns), path)
        refused(tmp_path, tmp_path / "data", tmp_path / "data", *words)


# Class folders


def test_class_folders(tmp_path):
    root = tmp_path / "data" / "mine"
    train = write_folders(root / "train", {"cat": 3, "bird": 1, "dog": 2})
    test = write_folders(root / "test", {"dog": 1})
    (root / "train/cat/notes.txt").write_text("not an image")
    (root / "train/cat/._000.png").write_text("not an image either")
    for data_dir in (root, tmp_path / "data"):
        dataset = read(tmp_path, data_dir)
        assert dataset.info.source == "folders"
        assert dataset.info.classes == 3
        # classes in turn, labelled in order of names: bird 0, cat 1, dog 2
        assert dataset.train_labels.tolist() == [0, 1, 2, 1, 2, 1]
        order = [train[name] for name in ("bird", "cat", "dog", "cat", "dog", "cat")]
        for image, truth, i in zip(dataset.train_images, order, [0, 0, 0, 1, 1, 2], strict=True):
            np.testing.assert_array_equal(image, truth[i])
        np.testing.assert_array_equal(dataset.test_images, test["dog"])
        assert dataset.test_labels.tolist() == [2]


def test_a_folder_of_pictures_is_no_dataset(tmp_path):
    write_folders(tmp_path / "data" / "figures", {"plots": 2, "scans": 1})
    assert sources.detect(tmp_path / "data") is None
    assert sources.detect(tmp_path / "data" / "figures" / "plots") is None
    assert sources.detect(tmp_path / "absent") is None
    shutil.rmtree(tmp_path / "data" / "figures" / "scans")
    assert sources.detect(tmp_path / "data" / "figures") is None


def test_test_class_unknown_to_train_is_refused(tmp_path):
    write_folders(tmp_path / "data/train", {"cat": 2, "dog": 1})
    write_folders(tmp_path / "data/test", {"fish": 1})
    refused(tmp_path, tmp_path / "data", tmp_path / "data/test/fish", "expected: cat, dog")


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_broken_image_is_named(format, data):
    """Cut anywhere, or with any byte changed: it decodes, or it is one clear error."""
    whole = encode(np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8), format)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] = data.draw(st.integers(0, 255))
    for broken in (whole[:at], bytes(changed)):
        try:
            assert len(sources.decode_pixels(broken, "x.png")) == 3072
        except UsageError as error:
            message = str(error)
            assert message.startswith("x.png is ")
            assert "expected: 32×32 RGB" in message
            assert "\n" not in message


@pytest.fixture
def odd_one(tmp_path):
    """The place of an image among others, in class folders without one called train."""
    write_folders(tmp_path / "data", {"cat": 2, "dog": 1})
    return tmp_path / "data/dog/zzz.JPEG"


def test_truncated_image_is_named(tmp_path, odd_one):
    whole = encode(draw(1).images[0], "JPEG")
    odd_one.write_bytes(whole)
    info = read(tmp_path, tmp_path / "data").info
    assert (info.source, info.train_images, info.test_images) == ("folders", 4, 0)
    shutil.rmtree(tmp_path / "cache")
    odd_one.write_bytes(whole[: len(whole) // 2])
    refused(tmp_path, tmp_path / "data", odd_one, "not a whole PNG or JPEG")


def test_image_of_another_shape_is_named(tmp_path, odd_one):
    image = draw(1).images[0]
    odd_one.write_bytes(encode(np.tile(image, 2)))
    refused(tmp_path, tmp_path / "data", odd_one, "64×32 RGB", "expected: 32×32 RGB")
    odd_one.write_bytes(encode(image, mode="L"))
    refused(tmp_path, tmp_path / "data", odd_one, "32×32 L", "expected: 32×32 RGB")


def test_unreadable_file_is_named(tmp_path, odd_one):
    odd_one.symlink_to("nowhere")
    refused(tmp_path, tmp_path / "data", odd_one, "No such file")
    odd_one.unlink()
    odd_one.mkdir()
    refused(tmp_path, tmp_path / "data", odd_one, "Is a directory")


# Which of several


def test_order_of_layouts(tmp_path, parts):
    data = tmp_path / "data"
    archive = write_batches(data / "zzz", *parts)
    packed = pack(data / "zzz")
    (data / archive.name).write_bytes(packed)
    archive = replace(archive, folder="zzz", md5=hashlib.md5(packed).hexdigest())
    write_parquet(data / "train.parquet", draw(3))
    write_folders(data / "train", {"cat": 2, "dog": 1})
    found = []
    for remove in (data / "zzz", data / archive.name, data / "train.parquet", data / "train"):
        found.append(read(tmp_path, data, archive=archive).info.source)
        shutil.rmtree(remove) if remove.is_dir() else remove.unlink()
    assert found == ["zzz", *sources.LAYOUTS[1:]]
    assert sources.detect(data, archive) is None
