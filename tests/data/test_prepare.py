"""The cache: decoded once, found again, whole or absent, shared by sweeps that run at once."""

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import bench
from bench import data
from bench.data import DATASETS, find_cache, load, prepare
from bench.data.progress import progress_bar
from bench.errors import UsageError
from bench.models.weights import parse_start
from bench.processes import provide_home

ROOT = Path(bench.__file__).parents[1]
SHARED = ROOT.parent / "shared" / "cifar10"


@pytest.fixture
def folder(tmp_path, write_parquet, draw):
    write_parquet(tmp_path / "data/train.parquet", draw(30, seed=1))
    write_parquet(tmp_path / "data/test.parquet", draw(10, seed=2))
    return tmp_path / "data"


@pytest.fixture
def decodings(monkeypatch):
    """How often anything was decoded."""
    calls = []
    decode = data.decode
    monkeypatch.setattr(data, "decode", lambda *a: (calls.append(a), decode(*a)))
    return calls


def test_second_call_decodes_nothing(folder, tmp_path, decodings):
    first = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == first
    assert load(first.folder).info == first
    assert len(decodings) == 1


def test_changed_source_is_decoded_again(folder, tmp_path, decodings, write_parquet, draw):
    first = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    # another size, and the same time of modification
    modified = (folder / "train.parquet").stat().st_mtime_ns
    write_parquet(folder / "train.parquet", draw(31, seed=3))
    os.utime(folder / "train.parquet", ns=(modified, modified))
    second = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    assert (first.train_images, second.train_images) == (30, 31)
    assert first.fingerprint != second.fingerprint
    # the same size, and another time of modification
    os.utime(folder / "train.parquet", ns=(1, 1))
    third = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    assert third.folder != second.folder
    assert third.fingerprint == second.fingerprint
    assert len(decodings) == 3


def test_fingerprint_is_of_what_it_says(folder, tmp_path):
    from hashlib import sha256

    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    dataset = load(info.folder)
    arrays = (dataset.train_images, dataset.train_labels, dataset.test_images, dataset.test_labels)
    together = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    assert info.fingerprint == sha256(together).hexdigest()[:16]


def test_arrays_are_mapped_and_read_only(folder, tmp_path):
    dataset = load(prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache").folder)
    assert isinstance(dataset.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        dataset.train_images[0] = 0


@pytest.mark.parametrize("array", ["train_images", "test_labels", "meta"])
def test_damaged_entry_is_made_again(folder, tmp_path, decodings, array):
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    path = next(Path(info.folder).glob(f"{array}.*"))
    for size in (0, path.stat().st_size - 2):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(UsageError, match="does not hold a prepared dataset"):
            load(info.folder)
        assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
        load(info.folder)
    assert len(decodings) == 3


@pytest.mark.parametrize("array", ["train_images", "test_labels"])
def test_an_entry_that_was_written_to_is_made_again(folder, tmp_path, decodings, array):
    """Of the right size still: a byte of it is another."""
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    path = Path(info.folder) / f"{array}.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
    assert path.read_bytes() == content
    assert len(decodings) == 2


def test_an_entry_is_read_only_where_it_was_written_to(folder, tmp_path, decodings, monkeypatch):
    """As where the cache was copied, or was decoded before its times were kept."""
    hashed = []
    hash_arrays = data.hash_arrays
    monkeypatch.setattr(data, "hash_arrays", lambda d: (hashed.append(d), hash_arrays(d))[1])
    info = prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")
    assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
    assert hashed == []
    os.utime(Path(info.folder) / "train_images.npy", ns=(1, 1))
    for _ in range(2):
        assert prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache") == info
    assert len(hashed) == 1
    assert len(decodings) == 1


def test_the_cache_keeps_the_entries_used_last(folder, tmp_path, monkeypatch, draw, write_parquet):
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


def test_clones_share_the_synthetic_images(tmp_path, monkeypatch):
    """Made of the file's text, wherever it lies and whenever it was written."""
    from bench.data import synthetic

    key = data._key(synthetic.source())
    copy = tmp_path / "synthetic.py"
    copy.write_bytes(Path(synthetic.__file__).read_bytes())
    monkeypatch.setattr(synthetic, "__file__", str(copy))
    assert data._key(synthetic.source()) == key
    assert data._key(synthetic.source(classes=20)) != key
    copy.write_text(copy.read_text() + "# another recipe")
    assert data._key(synthetic.source()) != key


def test_load_names_a_folder_without_a_dataset(tmp_path):
    with pytest.raises(UsageError, match="absent does not hold a prepared dataset"):
        load(tmp_path / "absent")


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


def test_where_the_cache_is(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    info = prepare("cifar10", data_dir=folder)
    assert Path(info.folder).parent == tmp_path / "xdg" / "gpu-precision-bench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    info = prepare("cifar10", data_dir=folder)
    assert Path(info.folder).parent == tmp_path / "home" / ".cache" / "gpu-precision-bench"


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


def test_default_data_dir(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    info = prepare("cifar10", data_dir=None, cache_dir=Path("cache"))
    assert info.train_images == 30
    assert Path(info.folder).is_absolute()


def test_cache_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UsageError, match=r"cannot write .* XDG_CACHE_HOME"):
        prepare("cifar10", data_dir=folder, cache_dir=tmp_path / "cache")


def test_unknown_dataset():
    with pytest.raises(UsageError, match="unknown dataset 'cifar'; did you mean 'cifar10'"):
        prepare("cifar", data_dir=None)


def test_data_dir_that_is_a_file(folder):
    with pytest.raises(UsageError, match="is a file; give the folder"):
        prepare("cifar10", data_dir=folder / "train.parquet")


def test_progress_counts_images(folder, tmp_path, capsys):
    seen = []
    info = prepare(
        "cifar10", data_dir=folder, cache_dir=tmp_path / "a", progress=lambda *a: seen.append(a)
    )
    assert seen == [("decoding train images", 30, None), ("decoding test images", 10, None)]
    with progress_bar() as progress:
        assert prepare(
            "cifar10", data_dir=folder, cache_dir=tmp_path / "b", progress=progress
        ).fingerprint == (info.fingerprint)
        progress("downloading", 5, 10)
    assert capsys.readouterr().out == ""


def test_import_is_cheap():
    """``--help`` lists the datasets without numpy, torch or anything that decodes."""
    code = "import sys, bench.data; print(*bench.data.DATASETS); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    output = subprocess.check_output(command, text=True).splitlines()
    assert output[0].split() == list(DATASETS) == ["cifar10", "synthetic"]
    heavy = {"numpy", "torch", "pandas", "pyarrow", "PIL", "rich", "tenacity", "filelock"}
    assert heavy & set(output[1].split()) == set()


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
