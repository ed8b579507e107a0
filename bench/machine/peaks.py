"""Data sheets of cards: peak dense FLOP/s by arithmetic, bandwidth, memory, capability and clock.

All are from NVIDIA's data sheets and white papers. A measured value above a peak is wrong, or it
measures something else, such as a cache. What of a card is not listed is not guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from bench.schema.precision import Arithmetic


@dataclass(frozen=True)
class Peak:
    """One card's peaks at boost clock, in TFLOP/s, dense, tensor cores accumulating in fp32.

    ``names`` is a pattern for the whole NVML name without ``NVIDIA``, so that a MIG instance or a
    laptop card of the same name does not match. ``capability`` is the compute capability, and
    ``memory`` what is sold, in GiB. ``clock`` is the highest SM clock, in MHz, at which its SMs do
    ``float32``; None where it is not known, or cards go beyond it. ``bandwidth`` is the memory's,
    in TB/s. ``float32`` is IEEE arithmetic, without tensor cores. None means that the card has no
    such arithmetic. If a source gives only a figure with sparsity, this is half of it.
    """

    names: str
    source: str
    capability: str
    memory: int
    clock: int | None
    bandwidth: float
    float32: float
    tfloat32: float | None
    float16: float
    bfloat16: float | None
    float8: float | None = None


# GeForce cards accumulate in fp32, torch's default, at half the rate of fp16, so the lower of the
# two figures is given. TITAN RTX and the professional cards do both at the same rate. Sheets and
# papers are NVIDIA's.
# fmt: off
PEAKS = (
    Peak("B200", "HGX B200 sheet", "10.0", 180, None, 8, 80, 1125, 2250, 2250, 4500),
    Peak("H200", "H200 sheet (SXM)", "9.0", 141, 1980, 4.8, 67, 494.5, 989.5, 989.5, 1979),
    Peak("H200 NVL", "H200 sheet (NVL)", "9.0", 141, 1785, 4.8, 60, 417.5, 835.5, 835.5, 1670.5),
    Peak("H100 80GB HBM3", "H100 sheet, SXM", "9.0", 80, 1980, 3.35, 67, 494.5, 989.5, 989.5, 1979),
    Peak("H100 PCIe", "H100 sheet (PCIe)", "9.0", 80, 1755, 2.0, 51, 378, 756.5, 756.5, 1513),
    Peak("H100 NVL", "H100 sheet (NVL)", "9.0", 94, 1785, 3.9, 60, 417.5, 835.5, 835.5, 1670.5),
    Peak("A100-(SXM4|PCIE)-40GB", "A100 sheet", "8.0", 40, 1410, 1.555, 19.5, 156, 312, 312),
    Peak("A100-SXM4-80GB", "A100 sheet", "8.0", 80, 1410, 2.039, 19.5, 156, 312, 312),
    Peak("A100 80GB PCIe", "A100 sheet", "8.0", 80, 1410, 1.935, 19.5, 156, 312, 312),
    Peak("A30", "A30 sheet", "8.0", 24, 1440, 0.933, 10.3, 82, 165, 165),
    Peak("A40", "A40 sheet", "8.6", 48, 1740, 0.696, 37.4, 74.8, 149.7, 149.7),
    Peak("A10", "A10 sheet", "8.6", 24, 1695, 0.6, 31.2, 62.5, 125, 125),
    Peak("RTX A6000", "Ampere GA102 paper", "8.6", 48, None, 0.768, 38.7, 77.4, 154.8, 154.8),
    # dense fp16 is printed as 362.05, yet 733 with sparsity: 142 SMs at 2.52 GHz give 366.4
    Peak("L40S", "L40S sheet", "8.9", 48, 2520, 0.864, 91.6, 183, 366.5, 366.5, 733),
    Peak("L4", "L4 sheet", "8.9", 24, 2040, 0.3, 30.3, 60, 121, 121, 242.5),
    Peak("RTX 6000 Ada Generation", "Ada", "8.9", 48, None, 0.96, 91.1, 182.1, 364.2, 364.2, 728.5),
    Peak("GeForce RTX 4090", "Ada paper", "8.9", 24, None, 1.008, 82.6, 82.6, 165.2, 165.2, 330.3),
    Peak("GeForce RTX 4080", "Ada paper", "8.9", 16, None, 0.7168, 48.7, 48.7, 97.5, 97.5, 194.9),
    Peak("GeForce RTX 3090", "Ampere GA102 paper", "8.6", 24, None, 0.936, 35.6, 35.6, 71, 71),
    # its bandwidth is printed as 320+ GB/s: 256 bit at 10 Gbit/s each
    Peak("T4", "T4 sheet", "7.5", 16, 1590, 0.32, 8.1, None, 65, None),
    Peak("TITAN RTX", "TITAN RTX page, Turing", "7.5", 24, None, 0.672, 16.3, None, 130.5, None),
    Peak("V100-SXM2-16GB", "V100 sheet (SXM2)", "7.0", 16, 1530, 0.9, 15.7, None, 125, None),
    Peak("V100-SXM2-32GB", "V100 sheet (SXM2)", "7.0", 32, 1530, 0.9, 15.7, None, 125, None),
    Peak("V100-PCIE-16GB", "V100 sheet (PCIe)", "7.0", 16, 1380, 0.9, 14, None, 112, None),
    Peak("V100-PCIE-32GB", "V100 sheet (PCIe)", "7.0", 32, 1380, 0.9, 14, None, 112, None),
)
# fmt: on


@cache
def find_peak(gpu: str) -> Peak | None:
    """Return the data sheet of a card, by NVML's name; None if it is not listed."""
    name = re.sub(r"^((NVIDIA|Tesla) )+", "", gpu)
    return next((peak for peak in PEAKS if re.fullmatch(peak.names, name)), None)


@cache
def list_peaks(gpu: str) -> dict[str, float]:
    """Return the data-sheet peaks of a card, by NVML's name, such as ``NVIDIA H200`` or ``Tesla
    T4``, in FLOP/s and bytes/s, keyed by the record's column with the measured rate, such as
    ``rate_float16`` and ``rate_copy``; empty if the card is unknown."""
    peak = find_peak(gpu)
    found = {f"rate_{arithmetic}": getattr(peak, arithmetic, None) for arithmetic in Arithmetic}
    found["rate_copy"] = peak and peak.bandwidth
    return {column: tera * 1e12 for column, tera in found.items() if tera}
