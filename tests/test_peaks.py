import re

import pytest

from bench.gpu.peaks import PEAKS, find_peak, peak_bandwidth, peak_flops


@pytest.mark.parametrize(
    ("gpu", "arithmetic", "flops", "bandwidth"),
    [
        ("NVIDIA H200", "bfloat16", 989.5e12, 4.8e12),
        ("NVIDIA H100 PCIe", "tfloat32", 378e12, 2e12),
        ("NVIDIA A100-PCIE-40GB", "float16", 312e12, 1.555e12),
        ("Tesla T4", "float16", 65e12, 0.32e12),
        ("NVIDIA TITAN RTX", "float16", 130.5e12, 0.672e12),
    ],
)
def test_known_cards(gpu, arithmetic, flops, bandwidth):
    assert peak_flops(gpu, arithmetic) == pytest.approx(flops)
    assert peak_bandwidth(gpu) == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    "gpu",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA A10G",
        "NVIDIA A1000",
        "",
    ],
)
def test_namesakes_and_unknown_cards_have_no_peak(gpu):
    assert find_peak(gpu) is None
    assert peak_flops(gpu, "float32") is None
    assert peak_bandwidth(gpu) is None


def test_cards_lack_what_came_after_them():
    for gpu in ("Tesla T4", "TITAN RTX", "Tesla V100-PCIE-32GB"):
        assert peak_flops(gpu, "tfloat32") is peak_flops(gpu, "bfloat16") is None
    for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA A10", "Tesla T4"):
        assert peak_flops(gpu, "float8") is None


@pytest.mark.parametrize("peak", PEAKS, ids=lambda peak: peak.names)
def test_every_card_is_plausible(peak):
    re.compile(peak.names)
    assert peak.source
    assert 5 < peak.float32 < 200
    # FLOP a byte: fewest with HBM, most with GDDR beside a large cache
    assert 9 < peak.float32 / peak.bandwidth < 110
    # tensor cores do fp16 at twice the rate of TF32, and never slower than fp32 without them
    assert peak.float16 / peak.float32 >= 1.99
    if peak.tfloat32 is not None:
        assert peak.bfloat16 == peak.float16
        assert peak.float16 / peak.tfloat32 == pytest.approx(2, rel=0.02)
        assert peak.tfloat32 >= peak.float32
    if peak.float8 is not None:
        assert peak.float8 / peak.float16 == pytest.approx(2, rel=0.01)
