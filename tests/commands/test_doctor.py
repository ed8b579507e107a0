"""The doctor: what is gathered of a machine, and what is said of machines described in files.

Those files, in ``recordings/``, say themselves which of them was recorded and which were made.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.base.processes import Quota
from bench.doctor import __main__ as doctor
from bench.doctor.__main__ import main, write_json
from bench.machine.nvml import NvmlProblem
from bench.profile.rates import DeviceRates
from bench.schema.precision import Apex, find_apex
from bench.schema.record import Environment
from bench.workers.examination import Cpu, Machine, Platform, describe
from bench.workers.judgement import Remark, Severity, judge, write_warnings
from tests.machines_for_tests import GPU, RECORDINGS, FakeNvml, read_machine
from tests.pytest_for_tests import Capture, Patch

FINE, NOTE, UNBELIEVABLE = Severity


@pytest.fixture
def healthy() -> Machine:
    return read_machine(RECORDINGS / "healthy.json")


def matter(machine: Machine) -> dict[str, Remark]:
    """The findings above fine, by topic."""
    return {f.topic: f for f in judge(machine) if f.level > FINE}


# -------------------------------------------------------------------------------- what is said

SAID: dict[str, list[tuple[Severity, str, str, str]]] = {
    "healthy": [],
    "steal": [
        (UNBELIEVABLE, "CPU", "the hypervisor gave 11 % of this machine's CPU time to others",
         "measure at another time, or on a machine with dedicated cores"),
        (NOTE, "images", "CIFAR-10 is not in /home/user/bench/data: a sweep would download 170 MB "
         "to there", "give its folder with --data-dir, or use --dataset synthetic"),
    ],
    "capped": [
        (NOTE, "persistence", "persistence mode is off: the driver starts again for each case and "
         "loses settings", "sudo nvidia-smi -i 0 -pm 1"),
        (NOTE, "power limit", "350 W, where this card's default is 700 W",
         "sudo nvidia-smi -i 0 -pl 700"),
        (NOTE, "clocks", "clocks are fixed (applications clocks; application clock 1500 MHz, "
         "default 1980 MHz): steadier, but not comparable with the default",
         "sudo nvidia-smi -i 0 -rgc; sudo nvidia-smi -i 0 -rac"),
        (NOTE, "governor", "CPU frequency governor powersave: clocks rise and fall with the load",
         "sudo cpupower frequency-set -g performance"),
    ],
    "shared": [
        (UNBELIEVABLE, "neighbours",
         "other processes compute on the card: pid 4242 (python), 21.5 GB",
         "end them or wait (nvidia-smi lists them); --allow-shared measures anyway"),
    ],
    "mig": [
        (NOTE, "MIG",
         "MIG divides the card: power and energy cannot be read for one of its slices",
         "sudo nvidia-smi -i 0 -mig 0"),
    ],
    "unprivileged": [
        (NOTE, "readings", "these cannot be read: energy (NVML: Insufficient Permissions), power "
         "(NVML: Insufficient Permissions), reasons for throttling (NVML: Insufficient "
         "Permissions), other processes (NVML: Not Supported), the memory of a process (NVML: Not "
         "Supported)", "run as root; in a container: docker run --gpus all --pid=host -e "
         "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        (NOTE, "shared memory", "0.1 GB free for /dev/shm", "docker run --shm-size=1g"),
    ],
    "mismatched": [
        (UNBELIEVABLE, "driver", "the NVIDIA driver and its library differ in version; reboot to "
         "fix this", "sudo reboot"),
    ],
    "old-driver": [
        (UNBELIEVABLE, "torch", "torch 2.11.0+cu130 finds no usable GPU (CUDA initialization: The "
         "NVIDIA driver on your system is too old (found version 12040))",
         "update the driver, or install a build of torch for CUDA 12"),
        (NOTE, "variables", "CUDA_LAUNCH_BLOCKING=1 is set and changes results (waits for each "
         "kernel: much slower)", "unset CUDA_LAUNCH_BLOCKING"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_recorded_machine(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    machine = read_machine(RECORDINGS / f"{name}.json")
    found = [f for f in judge(machine) if f.level > FINE]
    assert [(f.level, f.topic, f.what, f.fix) for f in found] == SAID[name]
    unbelievable = any(level is UNBELIEVABLE for level, *_ in SAID[name])
    monkeypatch.setattr(doctor, "examine", lambda **_: machine)
    monkeypatch.setattr(doctor, "measure_machine", lambda found: found)
    assert main([]) == int(unbelievable)
    output = capsys.readouterr().out
    for finding in found:
        line = next(line for line in output.splitlines() if finding.what in line)
        assert line.startswith("WRONG " if finding.level is UNBELIEVABLE else "note  ")
        assert f"  fix: {finding.fix}" in output.splitlines()[output.splitlines().index(line) + 1]
    (tmp_path / "again.json").write_text(write_json(machine, judge(machine)))
    assert read_machine(tmp_path / "again.json") == machine


@pytest.mark.parametrize(
    ("others", "steal", "level"),
    [
        (1.5, 0, FINE),
        (1.7, 0, NOTE),
        (4.1, 0, UNBELIEVABLE),
        (0, 0.02, NOTE),
        (0, 0.06, UNBELIEVABLE),
    ],
)
def test_how_busy_is_too_busy(
    healthy: Machine, others: float, steal: float, level: Severity
) -> None:
    """Of 16 cores."""
    busy = replace(healthy, cpu=replace(healthy.cpu, others=others, steal=steal))
    assert max(f.level for f in judge(busy) if f.topic == "CPU") is level


def test_a_quota_is_what_limits(healthy: Machine) -> None:
    """Below one core even one thread is stopped for a part of its time."""
    for allowed, level in ((0.3, UNBELIEVABLE), (1.5, NOTE), (4.0, FINE)):
        quota = Quota(allowed, "/sys/fs/cgroup/cpu.max")
        cpu = replace(healthy.cpu, cores=2, quota=quota, others=0.2)
        found = matter(replace(healthy, cpu=cpu))
        assert ("CPU quota" in found) is (level > FINE)
        if level > FINE:
            assert found["CPU quota"].level is level
            assert "docker run --cpus" in found["CPU quota"].fix
        if allowed < 1:
            assert found["CPU"].level is UNBELIEVABLE, "0.2 of 0.3 cores"


def test_a_rate_that_could_not_be_measured(healthy: Machine) -> None:
    rates = {"cuda": DeviceRates(reasons={"rate_copy": "CUDA out of memory"})}
    found = matter(replace(healthy, device_rates=rates))["rates"]
    assert found.what == "rate_copy could not be measured: CUDA out of memory"
    assert found.fix == "measure again with nothing else on it: python -m bench.doctor"


def test_a_card_that_is_throttled_at_rest(healthy: Machine) -> None:
    gpus = [replace(healthy.gpus[0], throttle=("hardware thermal slowdown",))]
    found = matter(replace(healthy, gpus=gpus))["clocks"]
    what = "the card is throttled before it has any work: hardware thermal slowdown"
    fix = "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
    assert (found.level, found.what, found.fix) == (UNBELIEVABLE, what, fix)


REFUSED = "device cuda: torch 2.13.0+cpu is a CPU build; install a CUDA build"
CPU_BUILD = {"cuda": Platform(Environment(torch="2.13.0+cpu"), error=REFUSED)}


@pytest.mark.parametrize(
    ("topic", "level", "what", "fix", "change"),
    [
        ("driver", NOTE, "", "sudo modprobe nvidia", {"nvml": NvmlProblem.NOT_LOADED}),
        ("driver", NOTE, "", "install the NVIDIA driver", {"nvml": NvmlProblem.NO_DRIVER}),
        ("driver", NOTE, "", "echo $CUDA_VISIBLE_DEVICES", {"no_gpu": "none is visible"}),
        ("torch", UNBELIEVABLE, "gone", "pip install 'torch>=2.9'", {"torch_error": "gone"}),
        ("torch", UNBELIEVABLE, "is a CPU build", "install a CUDA build", {"devices": CPU_BUILD}),
        ("disk", NOTE, "0.1 GB free", "--out", {"results_free_bytes": 10**8}),
        ("packages", UNBELIEVABLE, ": rich", "-m pip install rich", {"missing": ["rich"]}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_each_lack_has_its_fix(
    healthy: Machine, topic: str, level: Severity, what: str, fix: str, change: dict[str, Any]
) -> None:
    gone = {"gpus": ()} if topic == "driver" else {}
    finding = matter(replace(healthy, **gone, **change))[topic]
    assert finding.level is level
    assert what in finding.what
    assert fix in finding.fix


def test_a_card_slowed_at_rest(healthy: Machine) -> None:
    (gpu,) = healthy.gpus
    hot = replace(gpu, throttle=("hardware thermal slowdown",))
    assert matter(replace(healthy, gpus=(hot,)))["clocks"].level is UNBELIEVABLE


def test_only_the_card_that_torch_uses_is_judged(healthy: Machine) -> None:
    (gpu,) = healthy.gpus
    other = replace(gpu, card=replace(gpu.card, uuid="GPU-other", index=1, power_limit_w=100.0))
    assert not matter(replace(healthy, gpus=(other, gpu)))


# ------------------------------------------------------------------------------ before a sweep


def test_a_sweep_says_nothing_of_what_has_no_part_in_its_numbers(healthy: Machine) -> None:
    assert write_warnings(healthy) == []
    assert write_warnings(replace(healthy, data_layout=None, shm_free_bytes=0)) == []
    shared = read_machine(RECORDINGS / "shared.json")
    assert write_warnings(replace(shared, devices={"cpu": shared.devices["cpu"]})) == []


def test_a_sweep_says_the_worst_first() -> None:
    machine = read_machine(RECORDINGS / "capped.json")
    shared = read_machine(RECORDINGS / "shared.json")
    (gpu,) = machine.gpus
    both = replace(machine, gpus=(replace(gpu, others=shared.gpus[0].others),))
    first, *others = write_warnings(both)
    assert first.startswith("warning: other processes compute on the card: pid 4242")
    assert all(line.startswith("note: ") for line in others)


# ------------------------------------------------------------------------------- what is gathered


def test_a_card_is_read_while_our_own_process_holds_it() -> None:
    nvml = FakeNvml()
    nvml.compute = [(1, 5_000)]

    def use(device: str) -> Platform:
        nvml.compute.append((os.getpid(), 2_000))
        return Platform(Environment(gpu="NVIDIA H200", gpu_uuid=GPU, capability="9.0"))

    (gpu,) = describe(["cuda"], use, nvml).gpus
    assert gpu.lacks == {}
    assert [p.pid for p in gpu.others] == [1]
    assert gpu.card.driver_cuda == (13, 1)
    assert nvml.open == 0, "all is closed"


def test_a_card_that_torch_cannot_use_is_read_all_the_same() -> None:
    machine = replace(
        describe(["cuda"], None, FakeNvml()), torch_error="no torch", cpu=Cpu(cores=2)
    )
    assert [gpu.lacks for gpu in machine.gpus] == [{}]
    assert matter(machine)["torch"].level is UNBELIEVABLE


def test_a_login_toolkit_called_apex_is_not_nvidias_and_is_not_imported(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_apex() == Apex("", amp=False)


def test_what_runs_with_apex_is_told(healthy: Machine) -> None:
    for apex in (None, Apex("", amp=True)):
        machine = replace(healthy, apex=apex)
        (gpu,) = (f.what for f in judge(machine) if f.what.startswith("the GPU"))
        missing = "cannot run fp16-apex (NVIDIA apex is not installed"
        assert (missing in gpu) is (apex is None)
        assert "fp16-apex" in gpu


# --------------------------------------------------------------------------------- this machine


@pytest.mark.slow
def test_this_machine(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """For real: torch in its own process, and all of it as JSON."""
    monkeypatch.chdir(tmp_path)
    assert main(["--format", "json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    facts = found["facts"]
    assert facts["devices"]["cpu"]["environment"]["torch_threads"] >= 1
    assert facts["variables"]["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
    assert facts["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert all(f["topic"] and f["level"] for f in found["findings"])
    assert found["findings"]
