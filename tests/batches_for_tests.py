"""Batches of random images, and a plain reference to hold them against: one image at a time, in
numpy, in double precision."""

import numpy as np
import torch

from bench.networks.data.batches import Batches
from tests.training_for_tests import list_batches


def reference(image, top, left, flip):
    """Crop the padded image at (top, left), mirror it perhaps, scale to 0..1 and normalise."""
    padded = np.zeros((3, 40, 40))
    padded[:, 4:36, 4:36] = image
    crop = padded[:, top : top + 32, left : left + 32]
    if flip:
        crop = crop[:, :, ::-1]
    mean = np.array([0.4914, 0.4822, 0.4465])[:, None, None]
    std = np.array([0.2023, 0.1994, 0.2010])[:, None, None]
    return (crop / 255 - mean) / std


def make(n, batch_size=4, seed=0, device="cpu", **kwargs):
    """Random images, each labelled with its own number."""
    images = np.random.default_rng(n).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(n)
    return images, Batches(
        images, labels, batch_size=batch_size, device=device, seed=seed, **kwargs
    )


def assert_each_is_one_augmentation(images, batches, epoch=0):
    for x, y in list_batches(batches, epoch):
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert x.is_contiguous()
        for got, label in zip(x.cpu().numpy(), y.cpu().numpy(), strict=True):
            image = images[label]
            matches = [
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (False, True)
                # the middle pixel tells most candidates apart for less than a whole image
                if abs(reference(image, top, left, flip)[:, 16, 16] - got[:, 16, 16]).max() < 2e-6
                and abs(reference(image, top, left, flip) - got).max() < 2e-6
            ]
            assert len(matches) == 1
