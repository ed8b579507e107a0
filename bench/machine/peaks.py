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
    such arithmetic, that no source gives a dense figure, or that cards of that name differ. If a
    source gives only a figure with sparsity, this is half of it.
    """

    names: str
    source: str
    capability: str
    memory: int | None
    clock: int | None
    bandwidth: float | None
    float32: float | None
    tfloat32: float | None
    float16: float | None
    bfloat16: float | None
    float8: float | None = None


# GeForce cards accumulate in fp32, torch's default, at half the rate of fp16, so the lower of the
# two figures is given. TITAN RTX and the professional cards do both at the same rate. Sheets and
# papers are NVIDIA's. Where a sheet prints fewer figures than these, the others are its SMs times
# its clock times what an SM of that generation does in a clock: tests/machine/test_peaks.py.
_RTX_BLACKWELL = "RTX Blackwell paper"
_RTX_PRO = "RTX PRO Blackwell paper"
# fmt: off
PEAKS = (
    Peak("GB200", "Blackwell sheet", "10.0", 186, None, 8, 80, 1250, 2500, 2500, 5000),
    # tf32 is printed as 2.2 PFLOP/s with sparsity, rounded: as in GB200, it is half of fp16's
    Peak("B200", "Blackwell sheet", "10.0", 180, None, 7.7, 75, 1125, 2250, 2250, 4500),
    Peak("B300( SXM6 AC)?", "Blackwell Ultra", "10.3", 270, None, 7.7, 75, 1125, 2250, 2250, 4500),
    # of tensor cores DGX Spark's sheet says only what fp4 does with sparsity
    Peak("GB10", "DGX Spark sheet", "12.1", 128, None, 0.273, None, None, None, None),
    Peak("RTX PRO 6000 Blackwell Workstation Edition", _RTX_PRO, "12.0", 96, None, 1.792, 125,
         251.9, 503.8, 503.8, 1007.6),
    Peak("RTX PRO 6000 Blackwell Max-Q Workstation Edition", _RTX_PRO, "12.0", 96, None, 1.792,
         109.7, 219.4, 438.9, 438.9, 877.7),
    Peak("GeForce RTX 5090", _RTX_BLACKWELL, "12.0", 32, None, 1.792, 104.8, 104.8, 209.5, 209.5,
         419),
    Peak("GeForce RTX 5080", _RTX_BLACKWELL, "12.0", 16, None, 0.96, 56.3, 56.3, 112.6, 112.6,
         225.1),
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
    Peak("GeForce RTX 4070", "Ada paper", "8.9", 12, None, 0.504, 29.1, 29.1, 58.3, 58.3, 116.6),
    Peak("GeForce RTX 3090", "Ampere GA102 paper", "8.6", 24, None, 0.936, 35.6, 35.6, 71, 71),
    # NVML has the same name for the 10 GB that the paper describes, and for a later one of 12 GB
    Peak("GeForce RTX 3080", "Ampere GA102 paper", "8.6", None, None, None, 29.8, 29.8, 59.5, 59.5),
    # its sheet prints one figure of tensor cores, 222.2 with sparsity
    Peak("RTX A5000", "RTX A5000 sheet", "8.6", 24, None, 0.768, 27.8, 55.5, 111.1, 111.1),
    # its bandwidth is printed as 320+ GB/s: 256 bit at 10 Gbit/s each
    Peak("T4", "T4 sheet", "7.5", 16, 1590, 0.32, 8.1, None, 65, None),
    Peak("TITAN RTX", "TITAN RTX page, Turing", "7.5", 24, None, 0.672, 16.3, None, 130.5, None),
    # Founders Edition; reference cards, of the same name, are 6 % slower
    Peak("GeForce RTX 2080 Ti", "Turing paper", "7.5", 11, None, 0.616, 14.2, None, 56.9, None),
    # without tensor cores: torch's products in fp16 accumulate in fp32, of which no rate is printed
    Peak("GeForce GTX 1080 Ti", "Turing paper", "6.1", 11, None, 0.484, 11.3, None, None, None),
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
