"""The cache: decoded once, found again, whole or absent, shared by sweeps that run at once."""

import os
import pwd
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from layouts_for_tests import draw, write_parquet

import bench
from bench import data
from bench.data import find_cache, load, prepare
from bench.data.download import progress_bar
from bench.errors import UsageError
from bench.models.weights import parse_start
from bench.processes import provide_home

ROOT = Path(bench.__file__).parents[1]
SHARED = ROOT.parent / "shared" / "cifar10"


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "data/train.parquet", draw(30, seed=1))
    write_parquet(tmp_path / "data/test.parquet", draw(10, seed=2))
    return tmp_path / "data"


def test_an_unchanged_source_is_decoded_once(folder, tmp_path, monkeypatch, capsys):
    calls = []
    decode = data.decode
    monkeypatch.setattr(data, "decode", lambda *a: (calls.append(a), decode(*a)))
    with progress_bar() as progress:
        about = {"data_dir": folder, "cache_dir": tmp_path / "cache", "progress": progress}
        first = prepare("cifar10", **about)
        assert prepare("cifar10", **about) == load(first.folder).info == first
    assert len(calls) == 1
    assert capsys.readouterr().out == ""
    # another size, and the same time of modification
    file = folder / "train.parquet"
    modified = file.stat().st_mtime_ns
    write_parquet(file, draw(31, seed=3))
    os.utime(file, ns=(modified, modified))
    second = prepare("cifar10", **about)
    assert (first.train_images, second.train_images) == (30, 31)
    assert first.fingerprint != second.fingerprint
    # the same size, and another time of modification
    os.utime(file, ns=(1, 1))
    third = prepare("cifar10", **about)
    assert third.folder != second.folder
    assert third.fingerprint == second.fingerprint
    assert len(calls) == 3


def test_fingerprint_is_of_the_arrays_which_are_mapped_and_read_only(folder, tmp_path):
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    dataset = load(info.folder)
    arrays = (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)
    together = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    assert info.fingerprint == sha256(together).hexdigest()[:16]
    assert isinstance(dataset.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        dataset.train_images[0] = 0


@pytest.mark.parametrize("size", [0, -2])
@pytest.mark.parametrize("array", ["train_images", "test_labels", "meta"])
def test_damaged_entry_is_made_again(folder, tmp_path, array, size):
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    path = next(Path(info.folder).glob(f"{array}.*"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UsageError, match="does not hold a prepared dataset"):
        load(info.folder)
    assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
    load(info.folder)


@pytest.mark.parametrize("array", ["train_images", "test_labels"])
def test_an_entry_that_was_written_to_is_made_again(folder, tmp_path, array):
    """Of the right size still: a byte of it is another."""
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    path = Path(info.folder) / f"{array}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
    assert path.read_bytes() == content


def test_the_cache_keeps_the_entries_used_last(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "KEPT", 2)
    cache = tmp_path / "cache"

    def decode(images):
        write_parquet(folder / "train.parquet", draw(images, seed=images))
        return Path(prepare("cifar10", data_dir=folder, cache_dir=cache).folder)

    first, second = decode(20), decode(21)
    os.utime(first, (1, 1))  # long ago, but a case opens it
    os.utime(second, (2, 2))
    load(first)
    third = decode(22)
    assert {path for path in cache.iterdir() if path.is_dir()} == {first, third}
    fourth = decode(23)  # all others were used today: a sweep that runs may need them
    assert {path for path in cache.iterdir() if path.is_dir()} == {first, third, fourth}
    assert load(first).info.train_images == 20


def test_interrupted_preparation_leaves_no_entry(folder, tmp_path):
    def interrupt(*args):
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt):
        prepare("cifar10", data_dir=folder, cache_dir=cache, progress=interrupt)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    # and one that had no time to clean up
    stale = next(cache.iterdir()).with_suffix(".partial")
    stale.mkdir()
    (stale / "train_images.npy").write_bytes(b"half")
    info = prepare("cifar10", data_dir=folder, cache_dir=cache)
    assert load(info.folder).info.train_images == 30
    assert not stale.exists()


PREPARE = """
import sys
import time
from pathlib import Path
from bench import data
decode = data.decode
def slowly(source, name, folder, progress):
    print("decoding", flush=True)
    time.sleep(0.5)
    decode(source, name, folder, progress)
data.decode = slowly
print(data.prepare("cifar10", data_dir=Path(sys.argv[1]), cache_dir=Path(sys.argv[2])))
"""


def test_two_processes_at_once(folder, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", PREPARE, folder, cache]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    infos = {output.splitlines()[-1] for output in outputs}
    assert len(infos) == 1
    assert sum(output.count("decoding") for output in outputs) == 1
    assert len([path for path in cache.iterdir() if path.suffix != ".lock"]) == 1
    assert load(next(path for path in cache.iterdir() if path.is_dir())).info.train_images == 30


def test_where_the_cache_and_the_images_are_by_default(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    info = prepare("cifar10", data_dir=None)
    assert info.train_images == 30
    assert Path(info.folder).parent == tmp_path / "xdg" / "gpu-precision-bench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert find_cache() == tmp_path / "home" / ".cache" / "gpu-precision-bench"
    assert Path(prepare("cifar10", data_dir=None, cache_dir=Path("cache")).folder).is_absolute()


def test_a_user_without_a_home_has_a_temporary_cache(tmp_path, monkeypatch):
    """As a container's numeric one: without HOME and an entry in passwd, or with one of others."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"gpu-precision-bench-{os.getuid()}"
    monkeypatch.setenv("HOME", "/dev/null")
    assert find_cache() == own
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert find_cache() == own
    with pytest.raises(ValueError, match="~ stands for no folder"):
        parse_start("~/weights.pt")
    provide_home()
    assert find_cache() == own / ".cache" / "gpu-precision-bench"
    assert parse_start("~/weights.pt") == f"{own}/weights.pt"


def test_cache_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .* XDG_CACHE_HOME"):
        prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")


def test_what_is_no_dataset_is_refused(folder):
    with pytest.raises(UsageError, match="unknown dataset 'cifar'; did you mean 'cifar10'"):
        prepare("cifar", data_dir=None)
    with pytest.raises(UsageError, match="is a file; give the folder"):
        prepare("cifar10", data_dir=folder / "train.parquet")


@pytest.mark.skipif(not SHARED.is_dir(), reason="no real images: ../shared/cifar10 is absent")
def test_real_images():
    """60,000 real images, 6,000 of each class, with the channel means CIFAR-10 is known by."""
    from bench.data.batches import MEAN

    # decoded where other tests find them too
    info = prepare("cifar10", data_dir=SHARED)
    assert prepare("cifar10", data_dir=SHARED.parent) == info
    dataset = load(info.folder)
    assert (info.train_images, info.test_images, info.source) == (50_000, 10_000, "parquet")
    assert np.bincount(dataset.train_labels).tolist() == [5_000] * 10
    assert np.bincount(dataset.test_labels).tolist() == [1_000] * 10
    means = dataset.train_images[::10].mean(axis=(0, 2, 3), dtype=np.float64) / 255
    np.testing.assert_allclose(means, MEAN, atol=0.006)
