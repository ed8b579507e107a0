"""The arithmetic that an operation ran in, derived from its error against float64.

Where the bounds come from
--------------------------
Errors are relative: the norm of the difference over the norm of the exact result, for normally
distributed inputs. With u = 2^-p for p significant bits, and mantissas m spread evenly on a
logarithmic scale (so that E[m^2] = 3 / (2 ln 2)), rounding to nearest leaves

    q(p) = u * sqrt(2 ln 2 / 9) = 0.392 u

of a value's norm. Both factors of a product are rounded, the errors of different products add up as
the products do, and an output stored in p bits is rounded once more:

    inputs alone                       sqrt(2) q(p) = 0.555 u
    inputs and output                  sqrt(3) q(p) = 0.680 u
    inputs truncated, not rounded      1.46 u (mostly a common reduction by 1.33 u)

These are 2.7e-4 for TF32 (11 bits; simulated: 2.9e-4), 7.1e-4 for truncated TF32 (7.7e-4), 3.3e-4
for fp16 (11 bits; 3.6e-4) and 2.7e-3 for bf16 (8 bits; 2.9e-3). If n partial sums are rounded to p
bits as well, the error is q(p) * sqrt(3 + n / 2). For K products in fp16, tensor cores make n =
K / 16: 1.2e-3 for K = 1152 (1.3e-3). There may also be up to 64 shorter partial sums, if a gradient
is summed over a kernel's taps or a batch's images. fp32 has 24 bits: 1e-7 to 1e-6 depending on K,
and 2.4e-6 with Winograd F(4,3).

Winograd multiplies transformed tiles (Lavin and Gray, arXiv:1509.09308). In 11 bits their rounding
raises the error by a factor of 1.7 for F(2,3) and 9 for F(4,3): 6.1e-4 and 3.2e-3 in simulations.
This is still fp16 arithmetic, as are sums in fp16. In TF32, if the product of the tiles is a
separate matmul (seen in mlx pull request 4242), the error of F(4,3) is as large as that of bf16.

In layers that torchao converts to fp8, the factors may differ: e4m3 (4 bits), and for the gradient
of an output with tensorwise scaling e5m2 (3 bits). Their error is

    q(a, b) = sqrt(q(a)^2 + q(b)^2), stored in bf16 or wider

which is 3.5e-2 for e4m3 by e4m3 (simulated: 3.8e-2, also with torchao's scales by tensor or by row,
where no value falls below the smallest normal number) and 5.5e-2 for e4m3 by e5m2 (6.0e-2). Layers
that are not converted run in bf16.

Each band reaches from a little below its lowest figure to a little above its highest. An error in
no band, or in bands of two arithmetics, is unclear. In no band it contradicts no label; in two, it
contradicts only labels that neither arithmetic satisfies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bench.schema.precision import BITS, Arithmetic

_WRONG = 0.05
"""Relative error from which a result is wrong rather than rounded."""

_WRONG_FP8 = 0.15
"""The same for a product in fp8: 1.46 u, for truncated inputs, is 0.18 in e5m2."""


Band = tuple[Arithmetic, float, float]
"""An arithmetic, and the lowest and highest relative error of what it computes."""


def _bands(dtype: torch.dtype, products: int, winograd: bool) -> list[Band]:
    """Return the bands for a sum of ``products`` products with a result of ``dtype``."""
    tiles = (2.2e-3, 4.5e-3)  # of Winograd F(4,3) in 11 bits
    bf16 = (Arithmetic.BFLOAT16, 1.7e-3, 8e-3)
    if dtype == torch.float32:
        bands = [(Arithmetic.FLOAT32, 0.0, 2e-5), (Arithmetic.TFLOAT32, 1.8e-4, 9.5e-4), bf16]
        return [*bands, (Arithmetic.TFLOAT32, *tiles)] if winograd else bands
    if dtype == torch.bfloat16:
        return [bf16]
    if dtype != torch.float16:
        return []
    partial_sums = max(products / 16, min(products, 64))
    summed = 0.392 * 2**-11 * math.sqrt(3 + partial_sums / 2)
    bands = [(Arithmetic.FLOAT16, 1.8e-4, max(5e-4, 1.25 * summed))]
    if winograd:
        bands += [(Arithmetic.FLOAT16, 5.2e-4, 7.5e-4), (Arithmetic.FLOAT16, *tiles)]
    return bands


@dataclass(frozen=True)
class OperationProof:
    """The arithmetic of one operation. If its error fits bands of several arithmetics, it is
    unclear, and these are the ``candidates``."""

    operation: str
    arithmetic: Arithmetic
    error: float
    candidates: tuple[Arithmetic, ...] = ()

    @property
    def bits(self) -> int | None:
        """Maximum significant bits of its inputs; None if unknown."""
        possible = self.candidates or (self.arithmetic,)
        return max((BITS[a] for a in possible if a in BITS), default=None)

    def __str__(self) -> str:
        either = f", {' or '.join(self.candidates)}" if self.candidates else ""
        return f"{self.operation}: {self.arithmetic}{either} (error {self.error:.1e})"


def name_arithmetic(
    operation: str,
    error: float,
    dtype: torch.dtype,
    products: int,
    winograd: bool = False,
    fp8_bits: tuple[int, int] | None = None,
) -> OperationProof:
    """Determine the arithmetic from an operation's relative error.

    ``dtype`` is always the dtype of the layer's forward output: autocast computes a gradient in
    half precision but returns it in its parameter's float32. An element of the result sums
    ``products`` products; ``fp8_bits`` are the bits of the factors of a converted layer.
    """
    if not error < (_WRONG_FP8 if fp8_bits else _WRONG):  # NaN too
        return OperationProof(operation, Arithmetic.WRONG, error)
    bands = _bands(dtype, products, winograd)
    if fp8_bits:
        expected = 0.392 * math.hypot(*(2.0**-p for p in fp8_bits))
        bands.append((Arithmetic.FLOAT8, 0.85 * expected, 1.25 * expected))
    fits = list(
        dict.fromkeys(arithmetic for arithmetic, low, high in bands if low <= error <= high)
    )
    if len(fits) == 1:
        return OperationProof(operation, fits[0], error)
    return OperationProof(operation, Arithmetic.UNCLEAR, error, tuple(fits))
