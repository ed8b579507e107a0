"""Synthetic images: the same everywhere, of CIFAR's shape, learnt in part and not at once."""

import numpy as np
import pytest

from bench.networks.data import load, prepare


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    info = prepare("synthetic", data_dir=None, cache_dir=tmp_path_factory.mktemp("cache"))
    return load(info.folder)


def test_shape(dataset):
    info = dataset.info
    assert (info.name, info.source, info.classes) == ("synthetic", "synthetic", 10)
    assert dataset.train_images.shape == (info.train_images, 3, 32, 32) == (50_000, 3, 32, 32)
    assert dataset.test_images.shape == (info.test_images, 3, 32, 32) == (10_000, 3, 32, 32)
    for labels in (dataset.train_labels, dataset.test_labels):
        counts = np.bincount(labels, minlength=10)
        assert len(counts) == 10
        assert counts.min() > 0.9 * counts.mean()
    # two halves of 0 to 127 add up: 255 would mean that they wrap around
    assert dataset.train_images[:5_000].max() <= 254
    assert dataset.train_images[:5_000].std() > 30


def test_fingerprint_is_the_same_everywhere(dataset):
    assert dataset.info.fingerprint == "f6ee63be6ee190c4"


def test_no_test_image_is_a_training_image(dataset):
    train = {image.tobytes() for image in dataset.train_images[:10_000]}
    assert not train & {image.tobytes() for image in dataset.test_images}
