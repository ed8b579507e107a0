"""Memory as a straight line over the batch size: a fixed part, and bytes for each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True)
class MemoryLine:
    """Weights, optimizer state and context do not depend on the batch; activations do."""

    fixed_bytes: float
    bytes_per_image: float

    def predict(self, batch_size: int) -> float:
        return self.fixed_bytes + self.bytes_per_image * batch_size

    def find_largest(self, available_bytes: float, step: int = 1) -> int:
        """The largest multiple of ``step`` predicted to fit; 0 where none does."""
        images = (available_bytes - self.fixed_bytes) / self.bytes_per_image
        return max(0, math.floor(images / step) * step)


def fit_line(points: Sequence[tuple[int, float]]) -> MemoryLine | None:
    """Fit the least-squares line through (batch size, bytes); None where there are fewer than two
    batch sizes, or memory does not grow with them."""
    if len({size for size, _ in points}) < 2:
        return None
    slope, fixed = linear_regression(*zip(*points, strict=True))
    return MemoryLine(fixed, slope) if slope > 0 else None
