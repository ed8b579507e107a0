"""A real card: what NVML says of a torch allocation and of training-like work."""

import os

import pytest

from bench.machine.gpus import Depth
from bench.machine.monitor import Monitor
from bench.machine.nvml import Nvml, find_cards, open_device

CARDS, WHY = find_cards()  # asks the driver, so that torch is imported only where there is a card
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CARDS, reason=f"no CUDA device: {WHY}")]
if CARDS:
    torch = pytest.importorskip("torch")


@pytest.fixture
def uuid():
    return "GPU-" + str(torch.cuda.get_device_properties(0).uuid)


def work(seconds):
    """Multiply matrices until the clock says so."""
    import time

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def test_torchs_card_is_found_by_uuid(uuid):
    properties = torch.cuda.get_device_properties(0)
    card = next(card for card in CARDS if card.uuid.split("-", 1)[1] == uuid.split("-", 1)[1])
    assert card.name == properties.name
    assert card.capability == (properties.major, properties.minor)
    # NVML counts what the driver keeps for itself, CUDA does not
    assert 0.9 < properties.total_memory / card.memory_bytes <= 1


def test_a_reading_is_complete_or_says_why(uuid):
    device = open_device(uuid)
    assert isinstance(device, Nvml)
    torch.zeros(1, device="cuda")
    device.watch(os.getpid())
    (reading,) = device.read(Depth.EDGE)
    quantities = {name: getattr(reading, name) for name in vars(reading)}
    print(quantities)
    for name, value in quantities.items():
        assert value is not None or device.why(name), name
    assert reading.device_bytes > 0
    device.close()


def test_work_takes_energy_and_clocks_are_read(uuid):
    monitor = Monitor(open_device(uuid))
    monitor.watch(os.getpid())
    work(1)
    monitor.enter("warmup")
    monitor.enter("epoch")
    work(2)
    monitor.enter("evaluation")
    seen = monitor.close()
    print(seen)
    assert seen.values["energy_j"] > 0
    assert 0 < seen.values["mean_power_w"] <= seen.values["power_limit_w"] * 1.2
    assert seen.values["sm_clock_mhz"] > 0
    assert seen.values["memory_clock_mhz"] > 0
    assert "slowdown" not in seen.values["throttle_during"]
