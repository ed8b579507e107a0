"""Peak dense FLOP/s of cards by arithmetic, from NVIDIA's data sheets and white papers.

A card that is not listed has no peak: it is not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """One card's peaks at boost clock, in TFLOP/s, dense, tensor cores accumulating in fp32.

    ``names`` is a pattern for the whole of NVML's name, less ``NVIDIA``, so that a MIG instance or
    a laptop's namesake does not match. ``float32`` is IEEE arithmetic, without tensor cores. None
    where the card has no such arithmetic. Where a paper gives a figure with sparsity only, this is
    half of it.
    """

    names: str
    source: str
    float32: float
    tfloat32: float | None
    float16: float
    bfloat16: float | None
    float8: float | None = None


# GeForce cards accumulate in fp32, as torch does by default, at half the rate they do in fp16, so
# theirs is the lower of the two figures. TITAN RTX and the professional cards do both alike.
PEAKS = (
    Peak("H200", "NVIDIA H200 datasheet (SXM)", 67, 494.5, 989.5, 989.5, 1979),
    Peak("H200 NVL", "NVIDIA H200 datasheet (NVL)", 60, 417.5, 835.5, 835.5, 1670.5),
    Peak("H100 80GB HBM3", "NVIDIA H100 datasheet (SXM)", 67, 494.5, 989.5, 989.5, 1979),
    Peak("H100 PCIe", "NVIDIA H100 datasheet (PCIe)", 51, 378, 756.5, 756.5, 1513),
    Peak("H100 NVL", "NVIDIA H100 datasheet (NVL)", 60, 417.5, 835.5, 835.5, 1670.5),
    Peak(
        "A100-SXM4-[48]0GB|A100-PCIE-40GB|A100 80GB PCIe",
        "NVIDIA A100 datasheet",
        19.5,
        156,
        312,
        312,
    ),
    Peak("A30", "NVIDIA A30 datasheet", 10.3, 82, 165, 165),
    Peak("A40", "NVIDIA A40 datasheet", 37.4, 74.8, 149.7, 149.7),
    Peak("A10", "NVIDIA A10 datasheet", 31.2, 62.5, 125, 125),
    Peak("RTX A6000", "NVIDIA Ampere GA102 whitepaper", 38.7, 77.4, 154.8, 154.8),
    # dense fp16 is printed as 362.05, yet 733 with sparsity: 142 SMs at 2.52 GHz give 366.4
    Peak("L40S", "NVIDIA L40S datasheet", 91.6, 183, 366.5, 366.5, 733),
    Peak("L4", "NVIDIA L4 datasheet", 30.3, 60, 121, 121, 242.5),
    Peak("RTX 6000 Ada Generation", "NVIDIA Ada whitepaper", 91.1, 182.1, 364.2, 364.2, 728.5),
    Peak("GeForce RTX 4090", "NVIDIA Ada whitepaper", 82.6, 82.6, 165.2, 165.2, 330.3),
    Peak("GeForce RTX 4080", "NVIDIA Ada whitepaper", 48.7, 48.7, 97.5, 97.5, 194.9),
    Peak("GeForce RTX 3090", "NVIDIA Ampere GA102 whitepaper", 35.6, 35.6, 71, 71),
    Peak("T4", "NVIDIA T4 datasheet", 8.1, None, 65, None),
    Peak("TITAN RTX", "NVIDIA TITAN RTX page; Turing whitepaper", 16.3, None, 130.5, None),
    Peak("V100-SXM2-(16|32)GB", "NVIDIA V100 datasheet (SXM2)", 15.7, None, 125, None),
    Peak("V100-PCIE-(16|32)GB", "NVIDIA V100 datasheet (PCIe)", 14, None, 112, None),
)


def find_peak(gpu: str) -> Peak | None:
    """Find a card by NVML's name, such as ``NVIDIA H200`` or ``Tesla T4``; None if unknown."""
    name = re.sub(r"^((NVIDIA|Tesla) )+", "", gpu)
    return next((peak for peak in PEAKS if re.fullmatch(peak.names, name)), None)


def peak_flops(gpu: str, arithmetic: str) -> float | None:
    """Peak FLOP/s of a card, dense.

    Args:
        gpu: NVML's name of it.
        arithmetic: what products are rounded to: float32, tfloat32, float16, bfloat16 or float8.

    Returns:
        None for a card that is not known or has no such arithmetic.
    """
    peak = find_peak(gpu)
    tflops: float | None = getattr(peak, arithmetic, None)
    return None if tflops is None else tflops * 1e12
