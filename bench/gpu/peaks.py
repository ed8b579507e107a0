"""Peak dense FLOP/s of cards by arithmetic, and their memory bandwidth in bytes/s.

Both are from NVIDIA's data sheets and white papers. A measured value above them is wrong, or it
measures something else, such as a cache. The peak of a card that is not listed is not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from bench.precision import Arithmetic


@dataclass(frozen=True)
class Peak:
    """One card's peaks at boost clock, in TFLOP/s, dense, tensor cores accumulating in fp32.

    ``names`` is a pattern for the whole NVML name without ``NVIDIA``, so that a MIG instance or a
    laptop card of the same name does not match. ``bandwidth`` is the memory's, in TB/s. ``float32``
    is IEEE arithmetic, without tensor cores. None means that the card has no such arithmetic. If a
    source gives only a figure with sparsity, this is half of it.
    """

    names: str
    source: str
    bandwidth: float
    float32: float
    tfloat32: float | None
    float16: float
    bfloat16: float | None
    float8: float | None = None


# GeForce cards accumulate in fp32, torch's default, at half the rate of fp16, so the lower of the
# two figures is given. TITAN RTX and the professional cards do both at the same rate.
PEAKS = (
    Peak("H200", "NVIDIA H200 datasheet (SXM)", 4.8, 67, 494.5, 989.5, 989.5, 1979),
    Peak("H200 NVL", "NVIDIA H200 datasheet (NVL)", 4.8, 60, 417.5, 835.5, 835.5, 1670.5),
    Peak("H100 80GB HBM3", "NVIDIA H100 datasheet (SXM)", 3.35, 67, 494.5, 989.5, 989.5, 1979),
    Peak("H100 PCIe", "NVIDIA H100 datasheet (PCIe)", 2.0, 51, 378, 756.5, 756.5, 1513),
    Peak("H100 NVL", "NVIDIA H100 datasheet (NVL)", 3.9, 60, 417.5, 835.5, 835.5, 1670.5),
    Peak("A100-(SXM4|PCIE)-40GB", "NVIDIA A100 datasheet", 1.555, 19.5, 156, 312, 312),
    Peak("A100-SXM4-80GB", "NVIDIA A100 datasheet", 2.039, 19.5, 156, 312, 312),
    Peak("A100 80GB PCIe", "NVIDIA A100 datasheet", 1.935, 19.5, 156, 312, 312),
    Peak("A30", "NVIDIA A30 datasheet", 0.933, 10.3, 82, 165, 165),
    Peak("A40", "NVIDIA A40 datasheet", 0.696, 37.4, 74.8, 149.7, 149.7),
    Peak("A10", "NVIDIA A10 datasheet", 0.6, 31.2, 62.5, 125, 125),
    Peak("RTX A6000", "NVIDIA Ampere GA102 whitepaper", 0.768, 38.7, 77.4, 154.8, 154.8),
    # dense fp16 is printed as 362.05, yet 733 with sparsity: 142 SMs at 2.52 GHz give 366.4
    Peak("L40S", "NVIDIA L40S datasheet", 0.864, 91.6, 183, 366.5, 366.5, 733),
    Peak("L4", "NVIDIA L4 datasheet", 0.3, 30.3, 60, 121, 121, 242.5),
    Peak(
        "RTX 6000 Ada Generation", "NVIDIA Ada whitepaper", 0.96, 91.1, 182.1, 364.2, 364.2, 728.5
    ),
    Peak("GeForce RTX 4090", "NVIDIA Ada whitepaper", 1.008, 82.6, 82.6, 165.2, 165.2, 330.3),
    Peak("GeForce RTX 4080", "NVIDIA Ada whitepaper", 0.7168, 48.7, 48.7, 97.5, 97.5, 194.9),
    Peak("GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper", 0.936, 35.6, 35.6, 71, 71),
    # its bandwidth is printed as 320+ GB/s: 256 bit at 10 Gbit/s each
    Peak("T4", "NVIDIA T4 datasheet", 0.32, 8.1, None, 65, None),
    Peak("TITAN RTX", "NVIDIA TITAN RTX page; Turing whitepaper", 0.672, 16.3, None, 130.5, None),
    Peak("V100-SXM2-(16|32)GB", "NVIDIA V100 datasheet (SXM2)", 0.9, 15.7, None, 125, None),
    Peak("V100-PCIE-(16|32)GB", "NVIDIA V100 datasheet (PCIe)", 0.9, 14, None, 112, None),
)


@cache
def list_peaks(gpu: str) -> dict[str, float]:
    """Return the data-sheet peaks of a card, by NVML's name, such as ``NVIDIA H200`` or ``Tesla
    T4``, in FLOP/s and bytes/s, keyed by the record's column with the measured rate, such as
    ``rate_float16`` and ``rate_copy``; empty if the card is unknown."""
    name = re.sub(r"^((NVIDIA|Tesla) )+", "", gpu)
    peak = next((peak for peak in PEAKS if re.fullmatch(peak.names, name)), None)
    found = {f"rate_{arithmetic}": getattr(peak, arithmetic, None) for arithmetic in Arithmetic}
    found["rate_copy"] = peak and peak.bandwidth
    return {column: tera * 1e12 for column, tera in found.items() if tera}
