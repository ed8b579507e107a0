"""Number formats that gradients are rounded to, and the values that each of them loses.

Rounding is to nearest, ties to even. The fate of a value that is multiplied by a scale and then
rounded depends only on where the unscaled value lies among three `Bounds`, so that one pass over
the values counts their fates for every format and every scale. The bounds are float32 numbers,
found in exact arithmetic: no product is rounded on the way.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from typing import NamedTuple

from bench.scale_map import Tally


@dataclass(frozen=True)
class Format:
    """A binary floating-point format, torch's ``dtype``: ``digits`` significant bits, with the
    leading one, a smallest normal number of 2 to the ``least_exponent``, and a largest finite
    number."""

    name: str
    dtype: str
    digits: int
    least_exponent: int
    largest: float

    @property
    def smallest(self) -> Fraction:
        return Fraction(2) ** (self.least_exponent - self.digits + 1)

    def flushes(self, value: Fraction) -> bool:
        """Return whether ``value``, at least 0, rounds to zero; half the smallest does (ties to
        even)."""
        return value <= self.smallest / 2

    def denormalises(self, value: Fraction) -> bool:
        """Return whether ``value`` rounds to less than the smallest normal number, zero included.
        Half way between it and the largest subnormal is a tie, and the normal number is even."""
        return value < Fraction(2) ** self.least_exponent - self.smallest / 2

    def overflows(self, value: Fraction) -> bool:
        """Return whether ``value`` rounds beyond the largest finite number.

        Half way to the next number is a tie. It rounds up if the largest is odd, as it is if its
        digits are all ones: fp16 overflows from 65520 on. The largest of e4m3 is even, because the
        code after it is a NaN: 464 still rounds to 448.
        """
        step = Fraction(2) ** (math.frexp(self.largest)[1] - self.digits)
        limit = Fraction(self.largest) + step / 2
        odd = Fraction(self.largest) / step % 2 == 1
        return value >= limit if odd else value > limit


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp16", "float16", 11, -14, 65504.0),
        Format("bf16", "bfloat16", 8, -126, (2 - 2**-7) * 2.0**127),
        # the two of Micikevicius et al. 2022, arXiv:2209.05433, table 1. e4m3 has no inf: a value
        # beyond 448 becomes NaN in older versions of torch and 448 in newer; here it overflows
        Format("e4m3", "float8_e4m3fn", 4, -6, 448.0),
        Format("e5m2", "float8_e5m2", 3, -14, 57344.0),
    )
}


def to_float32(value: float) -> float:
    """Round ``value`` to float32, as torch does with a scale that multiplies a float32 loss. Raises
    OverflowError: it is beyond float32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


_INFINITY = 0x7F80_0000  # bits of float32's inf; those of finite numbers from 0 rise up to it


def _of_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


class Bounds(NamedTuple):
    """Three float32 numbers that determine the fates of values at one scale.

    A value above 0 is flushed below ``kept``, subnormal from there to below ``normal``, normal to
    below ``overflowing``, and overflows from there on. A bound is inf if no float32 is that large.
    """

    kept: float
    normal: float
    overflowing: float


def find_bounds(format: Format, scale: float) -> Bounds:
    """Find the bounds of unscaled values, by bisection over all float32 numbers; ``scale`` is above
    0 and a float32 number (`to_float32`)."""
    factor, bits = Fraction(scale), range(_INFINITY)
    tests = (
        lambda n: not format.flushes(Fraction(_of_bits(n)) * factor),
        lambda n: not format.denormalises(Fraction(_of_bits(n)) * factor),
        lambda n: format.overflows(Fraction(_of_bits(n)) * factor),
    )
    return Bounds(*(_of_bits(bisect_left(bits, True, key=test)) for test in tests))


class Cells:
    """The cells between the bounds of all formats and scales, over float32 numbers: cell i holds
    the values from ``cuts[i - 1]`` to below ``cuts[i]``. NaN is in the last cell, zero alone in
    cell 0."""

    def __init__(self, formats: Sequence[str], scales: Sequence[float]) -> None:
        self._bounds = {
            (name, scale): find_bounds(FORMATS[name], scale) for name in formats for scale in scales
        }
        self.cuts = sorted({_of_bits(1), math.inf, *chain(*self._bounds.values())})
        self._index = {cut: index for index, cut in enumerate(self.cuts)}

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def read(self, counts: Sequence[int], format: str, scale: float) -> Tally:
        ends = [0, 1, *(self._index[cut] + 1 for cut in self._bounds[format, scale]), len(counts)]
        return Tally(*(sum(counts[start:end]) for start, end in pairwise(ends)))
