"""Batches against a plain reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.networks.data.batches import Batches
from tests.batches_for_tests import assert_each_is_one_augmentation, make, reference
from tests.training_for_tests import list_batches


@given(
    n=st.integers(1, 9),
    batch_size=st.integers(1, 10),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_every_training_image_is_one_augmentation_of_its_own(n, batch_size, seed, epoch):
    images, batches = make(n, batch_size, seed)
    assert_each_is_one_augmentation(images, batches, epoch)
    labels = np.concatenate([y.numpy() for _, y in list_batches(batches, epoch)])
    assert sorted(labels) == list(range(n))
    sizes = [len(y) for _, y in list_batches(batches, epoch)]
    assert len(sizes) == len(batches)
    assert set(sizes[:-1]) <= {batch_size}


def test_seed_and_epoch_decide_every_draw():
    def batch(seed, epoch):
        return next(list_batches(make(50, batch_size=50, seed=seed)[1], epoch))

    (x, y), again = batch(0, 0), batch(0, 0)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    # 2**32 apart: the CPU generator reads only the low half of a seed
    for seed, epoch in ((1, 0), (0, 1), (1, 1), (2**32, 0)):
        assert not torch.equal(y, batch(seed, epoch)[1])


def test_batch_size_changes_no_image():
    by_size = []
    for batch_size in (1, 7, 64):
        batches = list(list_batches(make(21, batch_size)[1]))
        by_size.append([torch.cat(part) for part in zip(*batches, strict=True)])
    for x, y in by_size[1:]:
        assert torch.equal(x, by_size[0][0])
        assert torch.equal(y, by_size[0][1])


def test_steps_cut_an_epoch_short():
    _, batches = make(20, batch_size=8)
    whole = list(list_batches(batches))
    assert [len(y) for _, y in whole] == [8, 8, 4]
    for steps in (0, 2, 9):
        cut = list(list_batches(batches, steps=steps))
        assert len(cut) == min(steps, 3)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(cut, whole, strict=False))


@pytest.mark.filterwarnings("error")  # torch warns of mapped arrays, which are read-only
@pytest.mark.parametrize("batch_size", [None, 3])
def test_evaluation_is_every_image_in_order_and_as_it_is(batch_size, tmp_path):
    images, _ = make(12)
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")[2:12:3]
    batches = Batches(mapped, np.arange(12)[2:12:3], batch_size=2, device="cpu", seed=0)
    assert batches.images.dtype == torch.uint8
    x, y = (torch.cat(part) for part in zip(*batches.evaluation(batch_size), strict=True))
    assert y.tolist() == [2, 5, 8, 11]
    for got, label in zip(x.numpy(), y, strict=True):
        np.testing.assert_allclose(got, reference(images[label], 4, 4, False), atol=2e-6)
