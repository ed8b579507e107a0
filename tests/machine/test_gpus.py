"""The card is a fake pynvml that raises the real exceptions of nvidia-ml-py."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pynvml
import pytest

from bench.base.errors import UsageError
from bench.base.processes import list_children, read_cpu_time
from bench.machine import gpus as gpu
from bench.machine.gpus import Depth, HostReadings, Reading, Unreadable
from bench.machine.nvml import (
    EFFECTS,
    OF_WHOLE,
    THROTTLES,
    UNKNOWN,
    Card,
    Nvml,
    NvmlProblem,
    check_nvml,
    find_cards,
    find_neighbours,
    open_device,
    select_visible,
    spell_uuid,
    throttle_names,
)
from bench.schema.case import Case
from bench.schema.record import Environment
from bench.sweep.preflight import refuse_places
from bench.workers.examination import Platform
from tests.machines_for_tests import ANSWERS, GPU, Board, FakeNvml, error

OTHER = "GPU-11112222-d72c-4106-c12f-20bd9faed9f6"
GONE = 2**22 - 7  # near Linux's largest pid: nobody has it


@pytest.fixture
def child():
    """A process of ours that has started, and waits for its input."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()  # before that it has hardly any memory of its own
        yield process
        process.kill()


def read(device, depth=Depth.EDGE):
    (reading,) = device.read(depth)
    return reading


def watch(*compute, **fail):
    """A card on which these processes compute, watched for this one."""
    nvml = FakeNvml(**fail)
    nvml.compute = [*compute]
    device = Nvml(GPU, nvml)
    device.watch(os.getpid())
    return nvml, device


def list_others(device):
    return [process.pid for process in read(device).others]


def test_a_full_reading_in_si_units():
    nvml = FakeNvml()
    device = open_device(GPU, nvml)
    reading = read(device)
    assert reading == Reading(
        reading.time_ns, device_bytes=3_000_000, process_bytes=None, energy_j=12345.678,
        power_w=76.5, power_limit_w=700.0, sm_clock_mhz=1980, memory_clock_mhz=3201,
        temperature_c=32, throttle=(), others=(),
    )  # fmt: skip
    device.close()
    assert nvml.open == 0


def test_a_reading_costs_no_more_than_its_depth():
    nvml = FakeNvml()
    device = Nvml(GPU, nvml)
    nvml.calls.clear()
    read(device, Depth.FAST)
    assert [call[0] for call in nvml.calls] == ["nvmlDeviceGetMemoryInfo"]
    read(device, Depth.SLOW)
    assert nvml.called("nvmlDeviceGetPowerUsage") == 1
    assert nvml.called("nvmlDeviceGetTotalEnergyConsumption") == 0
    read(device, Depth.EDGE)
    assert nvml.called("nvmlDeviceGetTotalEnergyConsumption") == 1


@pytest.mark.parametrize(
    ("code", "reason", "lack"),
    [
        ("LIB_RM_VERSION_MISMATCH", "differ in version; reboot to fix this", NvmlProblem.MISMATCH),
        ("LIBRARY_NOT_FOUND", "no NVIDIA driver", NvmlProblem.NO_DRIVER),
        ("DRIVER_NOT_LOADED", "not loaded", NvmlProblem.NOT_LOADED),
        ("NO_PERMISSION", "no permission", NvmlProblem.NO_PERMISSION),
        (None, "nvidia-ml-py is not installed", NvmlProblem.NOT_INSTALLED),
    ],
)
def test_a_driver_that_does_not_start(code, reason, lack):
    nvml = FakeNvml(nvmlInit=error(code) if code else ModuleNotFoundError())
    found, sentence = check_nvml(nvml)
    assert found is lack
    assert reason in sentence
    assert reason in open_device(GPU, nvml).why("energy_j")
    cards, why = find_cards(nvml, {})
    assert cards == []
    assert reason in why
    assert find_neighbours(GPU, nvml) is None


def test_a_card_that_cannot_be_opened_is_unseen_and_nvml_is_shut_down():
    nvml = FakeNvml()
    device = open_device(OTHER, nvml)
    assert isinstance(device, Unreadable)
    assert device.why("energy_j") == "NVML: Not Found"
    assert nvml.open == 0
    assert type(open_device(None)) is HostReadings


CALLS = {
    "energy_j": "nvmlDeviceGetTotalEnergyConsumption",
    "device_bytes": "nvmlDeviceGetMemoryInfo",
    "power_w": "nvmlDeviceGetPowerUsage",
    "power_limit_w": "nvmlDeviceGetEnforcedPowerLimit",
    "sm_clock_mhz": "nvmlDeviceGetClockInfo",
    "memory_clock_mhz": "nvmlDeviceGetClockInfo",
    "temperature_c": "nvmlDeviceGetTemperature",
    "throttle": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "others": "nvmlDeviceGetComputeRunningProcesses",
}


@pytest.mark.parametrize("quantity", CALLS)
@pytest.mark.parametrize("fault", [error("NOT_SUPPORTED"), AttributeError], ids=str)
def test_what_the_driver_or_pynvml_does_not_tell_is_none_with_a_reason(quantity, fault):
    device = Nvml(GPU, FakeNvml(**{CALLS[quantity]: fault}))
    reading = read(device)
    assert getattr(reading, quantity) is None
    assert device.why(quantity).startswith("NVML: ")
    others = [other for other, call in CALLS.items() if call != CALLS[quantity]]
    assert None not in [getattr(reading, other) for other in others]


def test_a_passing_fault_is_asked_again():
    nvml = FakeNvml(nvmlDeviceGetPowerUsage=error("GPU_IS_LOST"))
    device = Nvml(GPU, nvml)
    assert read(device).power_w is None
    assert device.why("power_w") == "NVML: GPU is lost"
    del nvml.fail["nvmlDeviceGetPowerUsage"]
    assert read(device).power_w == 76.5


def test_other_processes_may_be_unreadable(monkeypatch):
    for method in ("children", "cpu_times", "memory_info"):
        monkeypatch.setattr(psutil.Process, method, Mock(side_effect=psutil.AccessDenied(1)))
    nvml, device = watch((os.getpid(), 2_000), (1, 3_000))
    assert [process.pid for process in read(device).others] == [1]
    assert list_children(os.getpid()) == []
    assert read_cpu_time() == 0
    assert find_neighbours(GPU, nvml)


def test_what_cannot_be_is_unknown_and_the_rest_is_read():
    """As under WSL, where a name was not UTF-8, and the largest number listed as a pid."""
    for name in ("\x87\ufffd card", UnicodeDecodeError("utf-8", b"\x87", 0, 1, "invalid")):
        ((card,), why) = find_cards(FakeNvml(nvmlDeviceGetName=name), {})
        assert (card.name, card.uuid, why) == (UNKNOWN, GPU, "")
    _, device = watch((2**32 - 1, 5), (os.getpid(), 2_000))
    assert (read(device).process_bytes, read(device).others) == (2_000, ())


def test_throttle_bits_are_those_of_nvml():
    for name, bit in vars(pynvml).items():
        if name.startswith("nvmlClocksThrottleReason") and not name.endswith(("None", "All")):
            assert bit in THROTTLES, name
    slowed = {bit for bit, (_, effect) in THROTTLES.items() if effect == "slowed"}
    reasons = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown")
    assert slowed == {getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in reasons}
    assert len(EFFECTS) == len(THROTTLES)
    assert throttle_names(0x1 | 0x4) == ("software power cap",)
    named = ("hardware slowdown", "hardware thermal slowdown", "reason 0x800")
    assert throttle_names(0x8 | 0x40 | 0x800) == named


class TestProcesses:
    def test_the_worker_is_told_from_a_neighbour(self):
        _, device = watch((os.getpid(), 2_000), (1, 5_000))
        reading = read(device)
        assert (reading.process_bytes, device.is_used()) == (2_000, True)
        assert not watch((1, 5_000))[1].is_used()
        assert [(p.pid, p.bytes) for p in reading.others] == [(1, 5_000)]
        assert reading.others[0].name

    def test_descendants_are_the_worker_too(self, request):
        """Also one that comes later, and once it has ended."""
        nvml, device = watch()
        child = request.getfixturevalue("child")
        nvml.compute = [(os.getpid(), 2_000), (child.pid, 500)]
        assert (read(device).process_bytes, read(device).others) == (2_500, ())
        nvml.compute = [(os.getpid(), 2_000), (child.pid, None)]
        assert read(device).process_bytes is None, "a part is not told as the whole"
        nvml.compute = [(os.getpid(), 2_000), (child.pid, 500)]
        child.kill()
        child.wait()
        assert read(device).others == ()

    @pytest.mark.parametrize("compute", [[(os.getpid(), None)], [(os.getpid(), 0)], []])
    def test_memory_the_driver_does_not_tell_is_none_never_zero(self, compute):
        _, device = watch(*compute)
        assert read(device).process_bytes is None
        assert device.why("process_bytes") == "the driver does not report the memory of the process"

    def test_a_desktop_is_no_neighbour(self):
        """On Windows it computes too, with its memory unknown."""
        nvml, device = watch((1, None), (3, 5))
        nvml.graphics = [(1, None), (2, 100)]
        assert list_others(device) == [3]

    def test_a_program_that_draws_and_holds_a_context_is_no_neighbour(self):
        """C+G in nvidia-smi, with its memory known, as on Linux; the worker may draw too."""
        nvml, device = watch((1, 5_000), (os.getpid(), 2_000), (3, 5))
        nvml.graphics = [(1, 5_000), (os.getpid(), 2_000)]
        assert list_others(device) == [3]
        assert read(device).process_bytes == 2_000

    def test_a_worker_under_a_host_pid_is_recognised_and_a_second_stranger_is_not(self):
        nvml = FakeNvml()
        nvml.compute = [(GONE + 1, 7)]
        device = Nvml(GPU, nvml)
        assert len(read(device).others) == 1  # here before the worker: a neighbour
        device.watch(os.getpid())
        nvml.compute.append((GONE, 2_000))
        assert read(device).process_bytes == 2_000
        assert list_others(device) == [GONE + 1]
        nvml.compute.append((GONE + 2, 1))
        assert list_others(device) == [GONE + 1, GONE + 2]
        _, device = watch((GONE, 5), (GONE + 1, 5))  # two at once
        assert read(device).process_bytes is None

    def test_neighbours_before_a_sweep(self, monkeypatch):
        """One of another container is not taken for this process; one that draws is none."""
        nvml = FakeNvml()
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        nvml.graphics = [(1, 5_000)]
        card = {"cuda": Platform(Environment(gpu_uuid=GPU))}
        options: Any = SimpleNamespace(allow_shared=False, here=True)
        refuse_places(card, [], options)
        nvml.compute = [(GONE, 5 << 29)]
        with pytest.raises(UsageError, match=rf"in use by pid {GONE} \(2\.5 GiB\); end them"):
            refuse_places(card, [], options)
        assert nvml.open == 0

    def test_a_card_of_others_that_a_command_may_choose_gets_no_power_limit(self, monkeypatch):
        nvml = FakeNvml(cards=(GPU, OTHER))
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        nvml.ours = {OTHER: [(GONE, 5 << 29)]}
        card = {"cuda": Platform(Environment(gpu_uuid=GPU))}
        options: Any = SimpleNamespace(allow_shared=False, here=True, lanes=None, dry_run=True)
        expected = (
            f"^--power-limit: others use {OTHER}, which a --command may choose: name the GPUs that "
            "it is to use by CUDA_VISIBLE_DEVICES$"
        )
        with pytest.raises(UsageError, match=expected):
            refuse_places(card, [Case(command="true", power_limit=300)], options)

    def test_a_notebook_that_holds_memory_of_the_card(self, monkeypatch):
        """It is refused at once, whoever else is there: each row would be invalid."""
        nvml = FakeNvml()
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        nvml.compute = [(GONE, 7), (os.getpid(), 5 << 30)]
        card = {"cuda": Platform(Environment(gpu_uuid=GPU))}
        options: Any = SimpleNamespace(allow_shared=False, here=True)
        with pytest.raises(UsageError, match="this process uses the GPU itself"):
            refuse_places(card, [], options)
        options.allow_shared = True
        refuse_places(card, [], options)


class TestCards:
    def test_facts(self):
        nvml = FakeNvml()
        cards, why = find_cards(nvml, {})
        (card,) = cards
        assert card == Card(
            GPU, "NVIDIA H200", 0, 140_000_000_000, (9, 0), driver="580.65", driver_cuda=(13, 1),
            mig=False, ecc=True, persistence_mode=True,
            power_limit_w=700.0, default_power_limit_w=700.0, application_clock_mhz=1980,
            default_application_clock_mhz=1980,
        )  # fmt: skip
        assert why == ""
        assert nvml.open == 0

    def test_facts_a_driver_lacks_are_none(self):
        needed = {"nvmlInit", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount"}
        needed |= {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"}
        nvml = FakeNvml(**dict.fromkeys(ANSWERS.keys() - needed, AttributeError))
        ((card,), _) = find_cards(nvml, {})
        assert card == Card(GPU, "NVIDIA H200", 0, driver="580.65")

    def test_a_card_kept_from_this_user_is_passed_over(self):
        cards, _ = find_cards(FakeNvml(cards=(None, GPU)), {})
        assert [card.uuid for card in cards] == [GPU]
        assert find_cards(FakeNvml(cards=()), {}) == ([], "no GPU is there")
        hidden = find_cards(FakeNvml(), {"CUDA_VISIBLE_DEVICES": "-1"})
        assert hidden == ([], "CUDA_VISIBLE_DEVICES='-1' names no card")


A100 = Board("NVIDIA A100-SXM4-40GB", 40, (8, 0), 400, mig=True)
ONE, THREE = ("MIG-aaaa", "A100 MIG 1g.5gb", 4.75), ("MIG-bbbb", "A100 MIG 3g.20gb", 19.6)
DIVIDED = {GPU: replace(A100, slices=(ONE, THREE)), OTHER: Board("NVIDIA H200")}


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("MIG-bbbb", ["MIG-bbbb"]),
        ("MIG-b", ["MIG-bbbb"]),
        ("MIG-aaaa,MIG-bbbb", ["MIG-aaaa"]),  # CUDA offers one
        ("0", ["MIG-aaaa"]),
        (GPU, ["MIG-aaaa"]),
        (None, ["MIG-aaaa"]),  # and no whole card beside a slice
        ("1", [OTHER]),
        ("MIG-cccc", []),
        ("MIG-", []),  # two
    ],
)
def test_of_a_divided_card_cuda_offers_a_slice(visible, chosen):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    cards, _ = find_cards(FakeNvml((GPU, OTHER), DIVIDED), environ)
    assert [card.uuid for card in cards] == chosen
    if chosen[:1] == ["MIG-bbbb"]:
        (card,) = cards
        assert (card.name, card.memory_bytes) == (THREE[1], round(19.6 * 2**30))
        assert (card.mig, card.capability, card.part_of) == (True, (8, 0), GPU)
        assert card.power_limit_w is None, "that is the whole card's"


def test_a_card_with_mig_on_and_no_slice_is_none_that_cuda_offers():
    cards, why = find_cards(FakeNvml((GPU,), {GPU: A100}), {})
    assert cards == []
    assert why == "MIG is on, and no slice is made of the card: sudo nvidia-smi mig -cgi 0 -C"


def test_a_slice_is_read_without_what_is_of_the_whole_card():
    nvml = FakeNvml((GPU,), DIVIDED)
    nvml.compute = [(os.getpid(), 2_000)]
    device = open_device("MIG-aaaa", nvml)
    device.watch(os.getpid())
    reading = read(device)
    assert (reading.device_bytes, reading.process_bytes) == (3_000_000, 2_000)
    assert reading.sm_clock_mhz == 1980
    for name in ("energy_j", "power_w", "power_limit_w"):
        assert getattr(reading, name) is None
        assert device.why(name) == OF_WHOLE


@pytest.mark.parametrize("uuid", ["aaaa", GPU.removeprefix("GPU-")])
def test_cuda_tells_a_slice_by_its_own_uuid_or_by_its_card_s(uuid):
    cards, _ = find_cards(FakeNvml((GPU,), DIVIDED), {"CUDA_VISIBLE_DEVICES": "MIG-aaaa"})
    assert spell_uuid(uuid, cards) == "MIG-aaaa"
    assert spell_uuid("dddd", cards) == "GPU-dddd"


FOUR = [
    Card(uuid, f"card {i}", i)
    for i, uuid in enumerate(("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"))
]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        (" 3 , 0", [3, 0]),
        ("GPU-bb", [2]),
        ("GPU-aa", []),
        ("1,9,2", [1]),  # up to the first that is none
        ("1,GPU-aa22", []),  # a card twice
    ],
)
def test_cuda_visible_devices(visible, chosen):
    assert [card.index for card in select_visible(FOUR, visible)] == chosen


def test_a_host_without_a_worker_and_after_it(child):
    host = HostReadings()
    assert read(host).process_bytes is None
    host.watch(os.getpid())  # with the child, found at an edge
    together = read(host, Depth.EDGE).process_bytes
    host.whole = True  # of a command only what this process starts
    assert 1_000_000 < read(host, Depth.EDGE).process_bytes < together - 1_000_000
    host.watch(child.pid)
    host.whole = False
    child.kill()
    child.wait()
    assert read(host).process_bytes is None
    assert host.why("process_bytes") == "the worker had ended"
    assert host.why("power_w") == "the case ran on a CPU"


SHARES = """
import os, sys, time
held = bytearray(os.urandom(1 << 20)) * 200
print(flush=True)
input()
for _ in range(3):
    if not os.fork():
        own = bytearray(os.urandom(1 << 20)) * 10
        print(flush=True)
        time.sleep(600)
time.sleep(600)
"""


def test_pages_that_processes_share_are_counted_once(monkeypatch):
    """Of 200 MiB that four have, and 10 MiB more in three; and the note where that is not told."""
    command = [sys.executable, "-S", "-c", SHARES]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            process.stdout.readline()
            host, untold = HostReadings(), HostReadings()
            host.watch(process.pid)
            process.stdin.write(b"\n")
            process.stdin.flush()
            for _ in range(3):
                process.stdout.readline()
            assert 230 < read(host, Depth.EDGE).process_bytes / 2**20 < 280
            assert host.note == ""
            monkeypatch.setattr(gpu, "read_memory_share", lambda _: None)
            untold.watch(process.pid)
            assert 830 < read(untold, Depth.EDGE).process_bytes / 2**20 < 900
            assert "counted in the memory of each" in untold.note
        finally:
            os.killpg(process.pid, signal.SIGKILL)
