"""Which arithmetic an operation ran in, by its error against float64.

Where the bounds come from
--------------------------
Errors are relative: the norm of the difference over the norm of the exact result, for normally
distributed inputs. With u = 2^-p for p significant bits, and mantissas m spread evenly on a
logarithmic scale (so that E[m^2] = 3 / (2 ln 2)), rounding to nearest leaves

    q(p) = u * sqrt(2 ln 2 / 9) = 0.392 u

of a value's norm. Both factors of a product are rounded, errors of different products add like
their products do, and an output stored in p bits is rounded once more:

    inputs alone                       sqrt(2) q(p) = 0.555 u
    inputs and output                  sqrt(3) q(p) = 0.680 u
    inputs truncated, not rounded      1.46 u (most of it a common shrinking by 1.33 u)

which is 2.7e-4 for TF32 (11 bits; 2.9e-4 simulated) and 7.1e-4 truncated (7.7e-4), 3.3e-4 for
fp16 (11 bits; 3.6e-4), 2.7e-3 for bf16 (8 bits; 2.9e-3). Where n partial sums are rounded as well,
each to p bits, that is q(p) * sqrt(3 + n / 2): of K products in fp16, n = K / 16 as tensor cores
make them, 1.2e-3 for K = 1152 (1.3e-3); or up to 64 shorter ones, as where a gradient is summed
over a kernel's taps or a batch's images. fp32 keeps 24 bits: 1e-7 to 1e-6 by K, and 2.4e-6 by
Winograd F(4,3).

Winograd multiplies transformed tiles (Lavin and Gray, arXiv:1509.09308): in 11 bits their rounding
costs a factor of 1.7 for F(2,3) and 9 for F(4,3), 6.1e-4 and 3.2e-3 as simulated. It is fp16
arithmetic all the same; so are sums kept in fp16, which for F(2,3) may look alike. Both are then
named. In TF32, where the product of the tiles is a matmul of its own (mlx pull request 4242 met
that), F(4,3) is as far off as bf16.

Of what torchao converts to fp8 the factors differ: with one in e4m3 (4 bits) or both, and the other
in e5m2 (3 bits), which tensorwise scaling has for the gradient of an output, that is

    q(a, b) = sqrt(q(a)^2 + q(b)^2), stored in bf16 or wider

3.5e-2 for two in e4m3 (3.8e-2 simulated, also with torchao's scales, by tensor or by row, of which
no value falls below the least normal number), 5.5e-2 for e4m3 by e5m2 (6.0e-2). What is not
converted runs in bf16.

Each band reaches from a little below the least of its figures to a little above the largest. An
error in no band, or in those of two arithmetics, is unclear. In none it contradicts no label; in
two, only those that neither obeys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from bench.precision import Arithmetic

BITS = {
    Arithmetic.FLOAT32: 24,
    Arithmetic.TFLOAT32: 11,
    Arithmetic.FLOAT16: 11,
    Arithmetic.BFLOAT16: 8,
    Arithmetic.FLOAT8: 4,
}
"""Significant bits of each."""

_WRONG = 0.05
"""The relative error from which a result is no rounding of the right one."""

_WRONG_FP8 = 0.15
"""That of a product in fp8: 1.46 u, as for truncated inputs, is 0.18 for one in e5m2."""


@dataclass(frozen=True)
class Band:
    """Relative errors from ``low`` to ``high`` that ``arithmetic`` has, computed in one ``way``."""

    arithmetic: Arithmetic
    low: float
    high: float
    way: str = ""


F43 = Band(Arithmetic.FLOAT16, 2.2e-3, 4.5e-3, "Winograd F(4,3)")


def _bands(dtype: torch.dtype, products: int, winograd: bool) -> list[Band]:
    """The bands of a sum of so many ``products`` whose result is computed into ``dtype``."""
    bf16 = Band(Arithmetic.BFLOAT16, 1.7e-3, 8e-3)
    if dtype == torch.float32:
        fp32, tf32 = Band(Arithmetic.FLOAT32, 0.0, 2e-5), Band(Arithmetic.TFLOAT32, 1.8e-4, 9.5e-4)
        tiles = [replace(F43, arithmetic=Arithmetic.TFLOAT32)] if winograd else []
        return [fp32, tf32, *tiles, bf16]
    if dtype == torch.bfloat16:
        return [bf16]
    if dtype != torch.float16:
        return []
    partial_sums = max(products / 16, min(products, 64))
    summed = 0.392 * 2**-11 * math.sqrt(3 + partial_sums / 2)
    bands = [
        Band(Arithmetic.FLOAT16, 1.8e-4, 5e-4),
        Band(Arithmetic.FLOAT16, 5e-4, 1.25 * summed, "sums in float16"),
    ]
    if winograd:
        bands += [Band(Arithmetic.FLOAT16, 5.2e-4, 7.5e-4, "Winograd F(2,3)"), F43]
    return bands


@dataclass(frozen=True)
class OperationProof:
    """What one operation ran in. ``ways`` are more than one where its error fits several; where
    these are of several arithmetics, it is unclear, and ``candidates`` are these."""

    operation: str
    arithmetic: Arithmetic
    error: float
    ways: tuple[str, ...] = ()
    candidates: tuple[Arithmetic, ...] = ()

    @property
    def bits(self) -> int | None:
        """Significant bits of its inputs, at most; None where nothing is known of them."""
        possible = self.candidates or (self.arithmetic,)
        return max((BITS[a] for a in possible if a in BITS), default=None)

    def __str__(self) -> str:
        way = ("; " if self.candidates else " with ") + " or ".join(self.ways) if self.ways else ""
        return f"{self.operation}: {self.arithmetic}{way} (error {self.error:.1e})"


def name_arithmetic(
    operation: str,
    error: float,
    dtype: torch.dtype,
    products: int,
    winograd: bool = False,
    fp8_bits: tuple[int, int] | None = None,
) -> OperationProof:
    """Name the arithmetic from an operation's relative error.

    ``dtype`` is that of the layer's forward pass, of a gradient as well: autocast hands it out in
    its parameter's float32 after computing it in half, so its own says nothing. An element of the
    result sums so many ``products``; ``fp8_bits`` are those of the factors of a converted layer.
    """
    if not error < (_WRONG_FP8 if fp8_bits else _WRONG):  # NaN too
        return OperationProof(operation, Arithmetic.WRONG, error)
    bands = _bands(dtype, products, winograd)
    if fp8_bits:
        expected = 0.392 * math.hypot(*(2.0**-p for p in fp8_bits))
        bands.append(Band(Arithmetic.FLOAT8, 0.85 * expected, 1.25 * expected))
    fits = [b for b in bands if b.low <= error <= b.high]
    candidates = tuple(dict.fromkeys(b.arithmetic for b in fits))
    if len(candidates) > 1:
        ways = tuple(f"{b.arithmetic} by {b.way}" if b.way else str(b.arithmetic) for b in fits)
        return OperationProof(operation, Arithmetic.UNCLEAR, error, ways, candidates)
    if not fits:
        return OperationProof(operation, Arithmetic.UNCLEAR, error)
    plain = any(not b.way for b in fits)
    ways = () if plain else tuple(b.way for b in fits)
    return OperationProof(operation, fits[0].arithmetic, error, ways)
