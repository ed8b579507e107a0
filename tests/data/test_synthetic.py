"""Synthetic images: the same everywhere, of CIFAR's shape, learnt in part and not at once."""

import numpy as np
import pytest
import torch
from torch import nn
from training_for_tests import list_batches

from bench.data import load, prepare
from bench.data.batches import Batches


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


def test_a_small_network_learns_part_of_it(dataset):
    torch.manual_seed(0)
    layers = []
    for channels, wider in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels, wider, 3, 2, 1), nn.BatchNorm2d(wider), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    images, labels = dataset.train_images[:10_000], dataset.train_labels[:10_000]
    losses = []
    for x, y in list_batches(
        Batches(images, labels, batch_size=64, device="cpu", seed=0), steps=60
    ):
        loss = nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[:5]) > 2.2  # ln 10 is 2.3
    assert np.mean(losses[10:20]) > 1.8  # not at once
    assert np.mean(losses[-10:]) < 2.0
    images, labels = dataset.test_images[:1_000], dataset.test_labels[:1_000]
    test = Batches(images, labels, batch_size=250, device="cpu", seed=0)
    network.eval()
    with torch.no_grad():
        right = sum(int((network(x).argmax(1) == y).sum()) for x, y in test.evaluation())
    assert 0.2 < right / 1_000 < 0.9
