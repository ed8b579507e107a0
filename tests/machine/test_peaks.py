"""The peaks of cards, against what NVIDIA's sheets and papers print of the same cards otherwise:
the number of SMs, their clock, and figures with sparsity."""

from __future__ import annotations

import pytest

from bench.machine.peaks import find_peak, list_peaks
from bench.schema.precision import Arithmetic

FLOAT32, TFLOAT32, FLOAT16, BFLOAT16, FLOAT8 = (
    f"rate_{one}"
    for one in (
        Arithmetic.FLOAT32,
        Arithmetic.TFLOAT32,
        Arithmetic.FLOAT16,
        Arithmetic.BFLOAT16,
        Arithmetic.FLOAT8,
    )
)


@pytest.mark.parametrize(
    ("gpu", "arithmetic", "flops", "bandwidth"),
    [
        ("NVIDIA H200", "bfloat16", 989.5e12, 4.8e12),
        ("NVIDIA H200 NVL", "float16", 835.5e12, 4.8e12),
        ("NVIDIA H100 PCIe", "tfloat32", 378e12, 2e12),
        ("NVIDIA A100-PCIE-40GB", "float8", None, 1.555e12),
        ("Tesla T4", "bfloat16", None, 0.32e12),
        ("NVIDIA TITAN RTX", "float16", 130.5e12, 0.672e12),
        # what no source tells, or not of which card of that name
        ("NVIDIA GB10", "bfloat16", None, 0.273e12),
        ("NVIDIA GeForce GTX 1080 Ti", "float16", None, 0.484e12),
        ("NVIDIA GeForce RTX 3080", "bfloat16", 59.5e12, None),
        # namesakes, and one that is not listed
        ("NVIDIA H200 MIG 1g.18gb", "float32", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float32", None, None),
        ("NVIDIA GeForce RTX 5090 D", "float32", None, None),
        ("NVIDIA GeForce RTX 4070 Ti", "float32", None, None),
        ("NVIDIA A1000", "float32", None, None),
    ],
)
def test_peaks_of_cards(gpu, arithmetic, flops, bandwidth):
    peaks = list_peaks(gpu)
    assert peaks.get(f"rate_{arithmetic}") == (flops and pytest.approx(flops))
    assert peaks.get("rate_copy") == (bandwidth and pytest.approx(bandwidth))


# FLOP that an SM does in a clock: without tensor cores, and with them, accumulating in fp32
PASCAL = {FLOAT32: 256}
TURING = {FLOAT32: 128, FLOAT16: 512}
TITAN = {FLOAT32: 128, FLOAT16: 1024}
GEFORCE = {FLOAT32: 256, TFLOAT32: 256, FLOAT16: 512, BFLOAT16: 512}
GEFORCE_8 = GEFORCE | {FLOAT8: 1024}
PRO = {FLOAT32: 256, TFLOAT32: 512, FLOAT16: 1024, BFLOAT16: 1024}
PRO_8 = PRO | {FLOAT8: 2048}

SMS: dict[str, tuple[dict[str, int], int, int]] = {
    "GeForce GTX 1080 Ti": (PASCAL, 28, 1582),
    "GeForce RTX 2080 Ti": (TURING, 68, 1635),
    "TITAN RTX": (TITAN, 72, 1770),
    "GeForce RTX 3080": (GEFORCE, 68, 1710),
    "GeForce RTX 3090": (GEFORCE, 82, 1695),
    "RTX A5000": (PRO, 64, 1695),
    "RTX A6000": (PRO, 84, 1800),
    "GeForce RTX 4070": (GEFORCE_8, 46, 2475),
    "GeForce RTX 4080": (GEFORCE_8, 76, 2505),
    "GeForce RTX 4090": (GEFORCE_8, 128, 2520),
    "RTX 6000 Ada Generation": (PRO_8, 142, 2505),
    "GeForce RTX 5080": (GEFORCE_8, 84, 2617),
    "GeForce RTX 5090": (GEFORCE_8, 170, 2407),
    "RTX PRO 6000 Blackwell Workstation Edition": (PRO_8, 188, 2617),
    "RTX PRO 6000 Blackwell Max-Q Workstation Edition": (PRO_8, 188, 2280),
}
"""What an SM does, the number of SMs, and their boost clock in MHz."""


@pytest.mark.parametrize("gpu", SMS)
def test_peaks_are_those_of_all_sms_at_boost_clock(gpu: str) -> None:
    each, sms, clock = SMS[gpu]
    peaks = list_peaks(f"NVIDIA {gpu}")
    peaks.pop("rate_copy", None)
    assert peaks.keys() == each.keys(), "none more, such as one with sparsity"
    for column, flop in each.items():  # 1 %: sheets round
        assert peaks[column] == pytest.approx(flop * sms * clock * 1e6, rel=0.01), column


SPARSE = {
    "NVIDIA GB200": {TFLOAT32: 2.5e15, FLOAT16: 5e15, BFLOAT16: 5e15, FLOAT8: 10e15},
    "NVIDIA B200": {FLOAT16: 4.5e15, BFLOAT16: 4.5e15, FLOAT8: 9e15},
    "NVIDIA B300 SXM6 AC": {FLOAT16: 36e15 / 8, FLOAT8: 72e15 / 8},
    "NVIDIA RTX A5000": {FLOAT16: 222.2e12},
}
"""What sheets print of tensor cores, with sparsity: of one card, or of eight of a machine."""


@pytest.mark.parametrize("gpu", SPARSE)
def test_peaks_are_dense_where_a_sheet_prints_those_with_sparsity(gpu: str) -> None:
    for column, flops in SPARSE[gpu].items():
        assert 2 * list_peaks(gpu)[column] == pytest.approx(flops), column


@pytest.mark.parametrize("gpu", ["NVIDIA GB200", "NVIDIA B200", "NVIDIA B300 SXM6 AC"])
def test_tf32_has_half_the_rate_of_fp16_and_fp8_twice(gpu: str) -> None:
    peaks = list_peaks(gpu)
    assert 4 * peaks[TFLOAT32] == 2 * peaks[FLOAT16] == 2 * peaks[BFLOAT16] == peaks[FLOAT8]


def test_a_card_of_two_sizes_under_one_name_has_no_memory() -> None:
    sheet = find_peak("NVIDIA GeForce RTX 3080")
    assert sheet is not None
    assert (sheet.capability, sheet.memory, sheet.bandwidth) == ("8.6", None, None)
