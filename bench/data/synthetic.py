"""Images that can be learnt without CIFAR-10: class-conditional, seeded, of its shape or another.

Everything is integer arithmetic on a seeded bit stream, so the fingerprint is the same everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data.sources import CLASSES, SHAPE, Shape, Source

if TYPE_CHECKING:
    from bench.data.sources import Chunk

IMAGES = {"train": 50_000, "test": 10_000}
SEED = 2019
PATTERNS = 8  # a class
CELLS = 4  # a side
CHUNK = 2_000

LARGEST, MOST_CLASSES = 2**24, 2**16
"""Values of an image, 3x2048x2048 among them, of which 150 MB still hold nine; and classes, more
than the 21,843 of ImageNet-21k."""

_INPUT = re.compile(r"([0-9]{1,5})x([0-9]{1,5})x([0-9]{1,5})")


def parse_shape(text: str) -> Shape:
    """Read ``3x224x224``: channels, height and width. Raises ValueError: it is no such text, the
    image is empty or too large, or its channels come last."""
    found = _INPUT.fullmatch(text)
    channels, height, width = map(int, found.groups()) if found else (0, 0, 0)
    if not 1 <= channels * height * width <= LARGEST:
        raise ValueError(
            "the shape of an image is channels, height and width, such as 3x224x224, of at most "
            f"{LARGEST:,} values"
        )
    if width in (1, 3) and channels >= 8 and height >= 8:
        # of 224x224x3 a network for 224 channels would be built and measured without a word
        raise ValueError(f"channels come first; did you mean {width}x{channels}x{height}?")
    return channels, height, width


def count_images(split: str, shape: Shape) -> int:
    """How many images there are: at most as many bytes of them as of CIFAR's shape.

    >>> count_images("train", (3, 32, 32)), count_images("train", (3, 224, 224))
    (50000, 1020)
    """
    return min(IMAGES[split], IMAGES[split] * math.prod(SHAPE) // math.prod(shape))


def source(shape: Shape = SHAPE, classes: int = CLASSES) -> Source:
    """The synthetic dataset. This file is its recipe: editing it makes a new cache entry, and every
    clone and environment of the same one shares an entry. Larger images are fewer, so that they
    take no more memory than CIFAR-10, and an epoch visits them again until it has had 50,000."""
    plain = (shape, classes) == (SHAPE, CLASSES)
    layout = "synthetic" if plain else f"synthetic, {'x'.join(map(str, shape))}, {classes} classes"
    return Source(
        layout,
        (),
        classes,
        lambda split, scratch: generate(split, shape, classes),
        shape,
        IMAGES["train"],
        sha256(Path(__file__).read_bytes()).hexdigest(),
    )


def generate(split: str, shape: Shape = SHAPE, classes: int = CLASSES) -> Iterator[Chunk]:
    """Yield the ``"train"`` or ``"test"`` images in chunks.

    An image is one of its class's patterns (4×4 cells; of 32×32 pixels each has 8×8, which a crop
    leaves in place), mixed with a pattern of any class, plus uniform noise. Its own pattern makes
    up 6 to 14 sixteenths of the mix; where that is less than half, the image looks like another
    class. Measured with three convolutions, ten classes, batch 128, SGD at lr 0.05: loss 2.32,
    2.09, 1.57 and 1.37 over steps 0-9, 20-29, 60-69 and 100-109, 59 % of the test images right
    after 120.
    """
    import numpy as np

    channels, height, width = shape
    kind = np.uint8 if classes <= 256 else np.uint16
    rows, columns = (np.arange(side) * CELLS // side for side in (height, width))
    rng = np.random.Generator(np.random.SFC64(SEED))
    size = (classes * PATTERNS, channels, CELLS, CELLS)
    patterns = rng.integers(0, 128, size, dtype=np.uint16)

    # The same patterns for both splits, but never the same images.
    rng = np.random.Generator(np.random.SFC64([SEED, sorted(IMAGES).index(split)]))
    images_there = count_images(split, shape)
    chunk = max(1, CHUNK * math.prod(SHAPE) // math.prod(shape))
    for start in range(0, images_there, chunk):
        n = min(chunk, images_there - start)
        labels = rng.integers(0, classes, n)
        own = labels * PATTERNS + rng.integers(0, PATTERNS, n)
        other = rng.integers(0, classes * PATTERNS, n)
        share = rng.integers(6, 15, n).astype(np.uint16).reshape(-1, 1, 1, 1)
        images = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        images >>= 1
        mixed = patterns[own] * share // 16 + patterns[other] * (16 - share) // 16
        images += mixed.astype(np.uint8)[:, :, rows][:, :, :, columns]
        yield images, labels.astype(kind)
