"""GPUs that NVML does not read: what is found of such a machine, said of it, and kept in its rows.

None of them was at hand. What they say is from the sources of torch 2.13 and of HIP, and what AMD
SMI says from those of its Python package 7.0.2.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic, perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest_for_tests import Capture, Patch

from bench.case import Case
from bench.data import prepare
from bench.doctor import earlier
from bench.doctor.judgement import Level, judge, write_warnings
from bench.doctor.machine import Machine, examine_machine
from bench.environment import host
from bench.environment.asking import ProcessAnswer
from bench.environment.device import Platform
from bench.environment.host import has_cuda
from bench.environment.response import describe_device
from bench.errors import UnsupportedError, UsageError
from bench.executors import Job, Lane, Settings
from bench.executors import subprocess as room
from bench.executors.subprocess import SubprocessExecutor
from bench.failure import classify
from bench.gpu import kinds
from bench.gpu.amdsmi import _RESIDENCIES, Amdsmi, AmdsmiMissingError
from bench.gpu.cards import find_cards
from bench.gpu.device import Depth, Reading, Unreadable
from bench.gpu.kinds import DEVICES, has_amd, name_uuid, read_build
from bench.gpu.nvml import EFFECTS
from bench.gpu.opening import find_neighbours, open_device
from bench.precision import PRECISIONS, Arithmetic
from bench.record import Environment, Measurement, Outcome, Status, read_missing
from bench.report.__main__ import main as report
from bench.store.reader import read_records
from bench.sweep.__main__ import main as sweep
from bench.training.accelerator import ACCELERATORS, Accelerator, find_accelerator
from bench.training.yardstick import list_arithmetics
from bench.worker import epochs as measurement_epochs
from bench.worker.measurement import measure
from bench.worker.messages import Assignment, Channel, Finished, PhaseEntered
from tests.planted.records import make_record, write_sweep

SERIAL = "6a1b2c3d4e5f6071"
ROCM = SimpleNamespace(
    name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-",
    total_memory=205_822_885_888, uuid=SimpleNamespace(bytes=list(SERIAL.encode())),
)  # fmt: skip
VERSION = """__version__ = '2.13.0+rocm7.0'
cuda: Optional[str] = None
hip: Optional[str] = '7.0.51831-7c9236b16'
rocm: Optional[str] = '7.0.0'
xpu: Optional[str] = None
"""


def plant_build(patch: Patch, folder: Path, version: str) -> None:
    """Have the installed torch be of another build, as far as its version.py tells."""
    (folder / "version.py").write_text(version)
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    patch.setattr(kinds, "find_spec", lambda name: spec)
    read_build.cache_clear()


class AmdSmiLibraryException(Exception):  # noqa: N818  (its name in the package)
    def __init__(self, err_code: int, err_info: str) -> None:
        super().__init__(err_code)
        self.err_code, self.err_info = err_code, err_info

    def __str__(self) -> str:
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


UNSUPPORTED = AmdSmiLibraryException(2, "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported")
BUSY = AmdSmiLibraryException(30, "AMDSMI_STATUS_BUSY - Device busy")


class FakeAmdsmi:
    """The functions of amdsmi 7.0.2 that are asked, with the keys and units of its
    amdsmi_interface.py; of a GPU of ``SERIAL``, and others. ``fail`` maps calls to their errors."""

    AmdSmiException = AmdSmiLibraryException
    amdsmi_wrapper = SimpleNamespace(AMDSMI_STATUS_NOT_SUPPORTED=2, AMDSMI_STATUS_BUSY=30)
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)
    AmdSmiClkType = SimpleNamespace(GFX=1, MEM=4)
    AmdSmiTemperatureType = SimpleNamespace(EDGE=0, HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    def __init__(self, *serials: str, **fail: Exception) -> None:
        self.serials, self.fail = serials or (SERIAL,), fail
        self.processes: list[dict[str, Any]] = []
        self.residencies: dict[str, Any] = {"ppt_residency_acc": 7, "hbm_thm_residency_acc": 0}
        self.asked: list[str] = []

    def list(self, pid: int, vram: int | str, mem: int = 0) -> None:
        used = {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": vram}
        self.processes.append({"name": "N/A", "pid": pid, "mem": mem, "memory_usage": used})

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[..., Any]] = {
            "amdsmi_init": lambda: None,
            "amdsmi_get_processor_handles": lambda: [*self.serials],
            "amdsmi_get_gpu_enumeration_info": lambda h: {"hip_id": 0, "hip_uuid": f"GPU-{h}"},
            "amdsmi_get_gpu_asic_info": lambda h: {"asic_serial": f"0x{int(h, 16):016X}"},
            "amdsmi_get_gpu_memory_total": lambda h, kind: 206_141_652_992,
            "amdsmi_get_gpu_memory_usage": lambda h, kind: 297_795_584,
            "amdsmi_get_energy_count": lambda h: {
                "energy_accumulator": 2_000_000, "counter_resolution": 15.259, "timestamp": 1,
            },
            "amdsmi_get_power_info": lambda h: {
                "current_socket_power": 749, "average_socket_power": "N/A", "power_limit": 750,
            },
            "amdsmi_get_power_cap_info": lambda h: {"power_cap": 750_000_000},
            "amdsmi_get_clock_info": lambda h, kind: {"clk": {1: 2100, 4: 1300}[kind]},
            "amdsmi_get_temp_metric": lambda h, where, metric: {0: 61, 1: 67}[where],
            "amdsmi_get_gpu_metrics_info": lambda h: {
                **self.residencies, "prochot_residency_acc": "N/A",
            },
            "amdsmi_get_gpu_process_list": lambda h: self.processes,
        }  # fmt: skip
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self.asked.append(name)
            if name in self.fail:
                raise self.fail[name]
            return answers[name](*arguments)

        return call


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    """A machine with an AMD GPU and torch for ROCm, which calls it cuda."""
    plant_build(monkeypatch, tmp_path, VERSION)
    monkeypatch.setattr(torch.version, "hip", read_build()["hip"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ROCM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3_005_000)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    yield
    monkeypatch.undo()
    read_build.cache_clear()


def examine(answer: ProcessAnswer, *devices: str) -> Machine:
    def ask(*_: Any, look: Callable[[ProcessAnswer, int], None], **__: Any) -> ProcessAnswer:
        look(answer, os.getpid())
        return answer

    return examine_machine(devices, watch_s=0.0, ask=ask)[0]


class Script:
    """A worker that trained: it says so, and ends."""

    pid, pids, failed_rank, note = os.getpid(), (), "", ""

    def messages(self) -> Iterator[Any]:
        yield from (PhaseEntered(phase) for phase in ("warmup", "epoch", "evaluation"))
        # as `bench.worker` has them
        sizes = {"peak_allocated_bytes": 3 * 2**30, "peak_reserved_bytes": 4 * 2**30}
        times = {"epoch_time_s": 8.0, "measured_time_s": 8.0, "measured_steps": 391}
        yield Finished(measurement=Measurement(**sizes, **times, images_per_s=6250.0))

    def send(self) -> None: ...

    def end(self, patiently: bool) -> int:
        return 0


def run(case: Case, gpu_uuid: str | None, patch: Patch) -> Outcome:
    patch.setattr(room, "start_worker", lambda *_: Script())
    job = Job(case, gpu_uuid=gpu_uuid)
    return SubprocessExecutor(Settings()).run(job, lambda event: None, lambda: False)


UNREAD = (
    *("power_limit_w", "energy_j", "mean_power_w", "sm_clock_mhz", "temperature_c", "neighbours"),
    *("throttle_during", "peak_device_bytes", "peak_process_bytes", "baseline_device_bytes"),
)


# ------------------------------------------------------------------------------------------- ROCm


def test_a_build_for_rocm_finds_its_gpu_without_torch(
    rocm: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    nodes = tmp_path / "nodes"
    assert not has_amd(nodes)
    for node, simds in (("0", 0), ("1", 1216)):
        (nodes / node).mkdir(parents=True)
        (nodes / node / "properties").write_text(f"cpu_cores_count 96\nsimd_count {simds}\n")
        assert has_amd(nodes) is (simds > 0)
    for there in (True, False):
        monkeypatch.setattr(host, "has_amd", lambda there=there: there)
        assert has_cuda.__wrapped__() is there


@pytest.mark.parametrize(
    ("held", "hip", "name"),
    [
        (SERIAL.encode(), True, f"GPU-{SERIAL}"),
        (b"XX".ljust(16, b"\0"), True, "GPU-XX"),  # of a GPU that has none
        (bytes(range(200, 216)), True, f"GPU-{uuid.UUID(bytes=bytes(range(200, 216)))}"),
        (SERIAL.encode(), False, f"GPU-{uuid.UUID(bytes=SERIAL.encode())}"),
    ],
)
def test_a_gpu_is_named_as_rocminfo_does(held: bytes, hip: bool, name: str) -> None:
    assert name_uuid(uuid.UUID(bytes=held), hip) == name


def test_what_torch_for_rocm_says_is_kept_by_its_own_name(rocm: None) -> None:
    found = describe_device("cuda")
    assert found.error == ""
    known = {name: value for name, value in found.environment.items() if value is not None}
    assert {"torch", "torch_threads", "torch_interop_threads"} < known.keys()
    assert {n: v for n, v in known.items() if not n.startswith("torch")} == {
        "hip": "7.0.51831-7c9236b16",
        "miopen": "3005000",
        "gpu": "AMD Instinct MI300X",
        "gpu_uuid": f"GPU-{SERIAL}",
        "gpu_memory_bytes": 205_822_885_888,
        "capability": "gfx942",
    }


def test_a_rocm_build_without_a_gpu_is_not_sent_to_nvidia(rocm: None, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = describe_device("cuda")
    assert "check rocminfo and HIP_VISIBLE_DEVICES, or use --device cpu" in found.error
    machine = examine(ProcessAnswer(devices={"cuda": found}), "cuda")
    (driver,) = (remark for remark in judge(machine) if remark.topic == "driver")
    assert (driver.level, driver.fix) == (Level.NOTE, "rocminfo; echo $HIP_VISIBLE_DEVICES")
    assert "finds no usable GPU" in driver.what


def test_its_architecture_is_no_compute_capability(rocm: None) -> None:
    """9.4 would be a Hopper's."""
    platform = Platform(Environment(**describe_device("cuda").environment))
    assert {name for name, kind in PRECISIONS.items() if platform.refuse(kind)} == {"tf32", "fp8"}
    assert not any(map(platform.find_emulation, PRECISIONS.values()))
    measured = list_arithmetics(torch.device("cuda"))
    assert measured == [Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16]


def test_the_doctor_says_once_what_is_not_read(rocm: None) -> None:
    machine = examine(ProcessAnswer(devices={"cuda": describe_device("cuda")}), "cuda")
    found = judge(machine)
    said = " ".join(f"{remark.what} {remark.fix}" for remark in found)
    assert "built for HIP 7.0.51831-7c9236b16, computes on AMD Instinct MI300X" in said
    assert not {"driver", "NVML package"} & {remark.topic for remark in found if remark.level}
    assert "NVIDIA driver" not in said
    (unread,) = (remark for remark in found if remark.topic == "readings")
    assert unread.level is Level.NOTE
    assert unread.what.startswith("memory in use, power, clocks, temperature and other processes")
    assert "pip install -e '.[amd]'" in unread.what
    assert sum(unread.what in line for line in write_warnings(machine)) == 1
    assert not any(line.endswith("; ") for line in write_warnings(machine))


def test_its_gpus_cannot_be_told_apart(rocm: None) -> None:
    executor = SubprocessExecutor(Settings())
    assert find_cards()[0] == []
    assert find_neighbours(f"GPU-{SERIAL}") is None
    assert executor.open_lanes("cuda", 1) == (Lane(),)
    with pytest.raises(UsageError, match="--lanes: torch is built for ROCm, and NVML lists no AMD"):
        executor.open_lanes("cuda", 2)
    with pytest.raises(UnsupportedError, match="world size 2 takes 2 GPUs: torch is built for ROC"):
        executor.gather(Lane(), "cuda", 2)


@pytest.mark.parametrize(
    ("kind", "message", "status"),
    [
        ("OutOfMemoryError", "HIP out of memory. Tried to allocate 2.00 GiB", Status.OOM),
        ("RuntimeError", "HIP error: out of memory", Status.OOM),
        ("RuntimeError", "HIP error: HIPBLAS_STATUS_ALLOC_FAILED", Status.OOM),
        ("RuntimeError", "HIP error: invalid device function", Status.UNSUPPORTED),
    ],
)
def test_failures_have_their_meaning(kind: str, message: str, status: Status) -> None:
    assert classify([kind, "Exception"], message).status is status


# ---------------------------------------------------------------------------------------- AMD SMI


def test_amd_smi_reads_a_gpu_in_si_units() -> None:
    fake = FakeAmdsmi()
    fake.list(os.getpid(), 268_435_456)
    fake.list(1, 0, mem=4096)
    fake.list(2, "N/A", mem=8192)
    gpu = Amdsmi(f"GPU-{SERIAL}", fake)
    gpu.watch(os.getpid())
    (reading,) = gpu.read(Depth.EDGE)
    assert gpu.total_bytes == 206_141_652_992
    assert [(p.pid, p.bytes) for p in reading.others] == [(1, 4096), (2, 8192)]
    assert replace(reading, time_ns=0, others=None) == Reading(
        0, device_bytes=297_795_584, process_bytes=268_435_456, energy_j=30.518, power_w=749.0,
        power_limit_w=750.0, sm_clock_mhz=2100, memory_clock_mhz=1300, temperature_c=67,
        throttle=None,  # counters say nothing the first time
    )  # fmt: skip
    assert gpu.read(Depth.SLOW)[-1].throttle == ()
    fake.residencies |= {"ppt_residency_acc": 9, "hbm_thm_residency_acc": 1}
    named = gpu.read(Depth.SLOW)[-1].throttle
    assert named == ("software power cap", "hardware thermal slowdown")
    assert {EFFECTS[name] for name in named} == {"capped", "slowed"}
    assert set(_RESIDENCIES.values()) <= EFFECTS.keys()
    fake.asked.clear()
    gpu.read(Depth.FAST)
    assert fake.asked == ["amdsmi_get_gpu_memory_usage"]


@pytest.mark.parametrize("call", ["amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_asic_info"])
def test_a_gpu_is_found_among_several(call: str) -> None:
    fake = FakeAmdsmi("0123456789abcdef", SERIAL, **{call: UNSUPPORTED})
    assert Amdsmi(f"GPU-{SERIAL.upper()}", fake)._card == SERIAL
    with pytest.raises(AmdsmiMissingError, match="amdsmi knows no GPU GPU-XX"):
        Amdsmi("GPU-XX", fake)
    assert Amdsmi("GPU-XX", FakeAmdsmi())._card == SERIAL, "there is but one"


def test_what_amd_smi_does_not_tell_is_none_with_its_reason() -> None:
    fake = FakeAmdsmi(amdsmi_get_energy_count=UNSUPPORTED, amdsmi_get_clock_info=BUSY)
    fake.residencies = {}
    gpu = Amdsmi(f"GPU-{SERIAL}", fake)
    for _ in range(2):
        (reading,) = gpu.read(Depth.EDGE)
    known = (reading.energy_j, reading.sm_clock_mhz, reading.throttle, reading.power_w)
    assert known == (None, None, None, 749.0)
    assert gpu.why("energy_j") == "amdsmi: AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported"
    assert gpu.why("sm_clock_mhz") == "amdsmi: AMDSMI_STATUS_BUSY - Device busy"
    assert "does not report why its clocks are reduced" in gpu.why("throttle")
    counts = Counter(fake.asked)
    assert (counts["amdsmi_get_energy_count"], counts["amdsmi_get_clock_info"]) == (1, 4)
    assert counts["amdsmi_get_gpu_metrics_info"] == 1


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ("raise KeyError('libamd_smi.so')", "amdsmi cannot load libamd_smi.so; install ROCm's"),
        ("raise ModuleNotFoundError('amdsmi')", "amdsmi is not installed: pip install -e '"),
    ],
)
def test_an_amd_gpu_without_amd_smi_is_unread(
    rocm: None, there: str, reason: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "amdsmi.py").write_text(f"print('libamd_smi.so is not there')\n{there}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    device = open_device(f"GPU-{SERIAL}")
    assert isinstance(device, Unreadable)
    assert device.reason.startswith(reason)
    assert device.notes[0].endswith(device.reason)
    assert capsys.readouterr().out == ""


def test_a_case_on_rocm_has_what_amd_smi_reads(
    rocm: None, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    opened = partial(open_device, amdsmi=FakeAmdsmi())
    monkeypatch.setattr(room, "open_device", opened)
    m = run(Case(), f"GPU-{SERIAL}", monkeypatch).measurement
    assert (m.power_limit_w, m.sm_clock_mhz, m.temperature_c) == (750.0, 2100, 67)
    assert (m.neighbours, m.throttle_during, m.baseline_device_bytes) == ("", "", 297_795_584)
    assert "are not read" not in (m.notes or "")
    about = Environment(**describe_device("cuda").environment)
    write_sweep(tmp_path / "out", [make_record(Case(), measurement=m, environment=about)])
    assert report([str(tmp_path / "out"), "--full"]) == 0
    said = capsys.readouterr().out
    assert "Memory: peak of the device over its baseline (AMD SMI)." in said
    assert "NVML" not in said


# ------------------------------------------------------------------------------ Apple's and Intel's


@pytest.fixture
def apple(monkeypatch: Patch) -> None:
    """As `torch.backends.mps` and `torch.mps` tell of a Mac."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Max", raising=False)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 51_539_607_552)


@pytest.fixture
def arc(monkeypatch: Patch) -> None:
    """As `torch.xpu.get_device_properties` tells of an Intel GPU."""
    card = SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics", total_memory=12_168_933_376,
        driver_version="1.6.33578+15", has_fp16=True, has_bfloat16_conversions=False,
    )  # fmt: skip
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: card)


# names, GiB, and why they are not read
GPUS = {
    "cuda": ("AMD Instinct MI300X", 191.7, "amdsmi is not installed: pip install"),
    "mps": ("Apple M3 Max", 48.0, "on an Apple GPU only powermetrics"),
    "xpu": ("Intel(R) Arc(TM) B580 Graphics", 11.3, "on an Intel GPU no supported"),
}


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """A machine with a GPU of that name, by torch."""
    request.getfixturevalue({"cuda": "rocm", "mps": "apple", "xpu": "arc"}[request.param])
    return str(request.param)


def test_a_machine_without_the_gpu_says_so_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    flags = ["--device", "mps", "--dataset", "synthetic", "--repeats", "1"]
    assert sweep([*flags, "--out", str(tmp_path / "out")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "out").exists()
    for device, line in (("mps", said), ("xpu", f"error: {describe_device('xpu').error}")):
        assert line.startswith(f"error: device {device}: torch ")
        assert line.endswith("install a build of torch for it, or use --device cpu")


@pytest.mark.parametrize("device", ["mps", "xpu"], indirect=True)
def test_the_doctor_names_it(device: str) -> None:
    name, _, reason = GPUS[device]
    answers = {kind: describe_device(kind) for kind in ("cuda", device, "cpu")}
    machine = examine(ProcessAnswer(devices=answers), "cuda", device, "cpu")
    assert machine.device == device
    said = [f"{remark.topic}: {remark.what}" for remark in judge(machine)]
    assert f"torch: computes on {name} with --device {device}, not yet seen on hardware" in said
    assert not any("only the CPU can be measured" in line for line in said)
    (unread,) = (line for line in said if line.startswith("readings: "))
    assert reason in unread
    (runs,) = (line for line in said if line.startswith("precisions: the GPU"))
    runs, _, rest = runs.partition("; ")
    assert "fp32, fp16, fp16-amp" in runs
    assert ("emulates, slowly, bf16, bf16-amp" in rest) is (device == "xpu")
    assert rest.endswith("cannot run tf32, fp16-apex, fp8")


@pytest.mark.parametrize("device", GPUS, indirect=True)
def test_a_case_on_it_runs_without_readings_and_says_so(
    device: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    name, gib, reason = GPUS[device]
    about = Environment(**describe_device(device).environment)
    case = Case(device=device)
    outcome = run(case, about.gpu_uuid, monkeypatch)
    m = outcome.measurement
    assert (outcome.status, outcome.retries) == (Status.OK, 0)
    assert {column: getattr(m, column) for column in UNREAD} == dict.fromkeys(UNREAD)
    why = read_missing(m.missing or "")
    assert {why[column] for column in UNREAD} == {why["temperature_c"]}
    assert why["temperature_c"].startswith(reason)
    assert (m.notes or "").count("are not read") == 1
    write_sweep(tmp_path / "out", [make_record(case, measurement=m, environment=about)])
    assert report([str(tmp_path / "out"), "--full"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"{name} ({gib} GiB)" in said
    assert said.count("are not read") == 1
    assert "4.00" in said.split(), "what the allocator held stands for the memory"
    if device == "cuda":
        (read,) = read_records(tmp_path / "out").to_dict("records")
        assert (read["hip"], read["miopen"], read["cuda"]) == (about.hip, "3005000", "")
        assert "HIP 7.0.51831-7c9236b16" in said
        assert "MIOpen 3005000" in said
        assert "cuDNN 3" not in said


def test_what_it_can_do_is_not_taken_for_what_the_cpu_can() -> None:
    cpu = Environment(host="mac", cpu="Apple M3 Max, 16 cores")
    files = {earlier._find_file(one, ()) for one in (cpu, replace(cpu, gpu="Apple M3 Max"))}
    assert len(files) == 2


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--cuda-graphs on", "--cuda-graphs on with --device mps is not measured; leave out one"),
        ("--memory-limit 4GiB", "--memory-limit 4GiB with --device mps is not measured"),
        ("--profile on", "--profile on with --device mps is not measured; leave out one"),
        ("--parallel ddp --world-size 2", "--parallel ddp with --device mps is not measured"),
        ("--loader torch --pin-memory on", "--pin-memory on with --device mps is not measured"),
        ("--batch-size auto", "--batch-size auto: how much fits is not looked for with --device m"),
        ("--lanes 2", "--lanes: --device mps has one lane; leave it out"),
    ],
)
def test_what_needs_cuda_is_refused(flags: str, line: str, capsys: Capture, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    fixed = ["--device", "mps", "--dataset", "synthetic", "--precision", "fp32", "--out", out]
    assert sweep([*fixed, *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize("name", ["fit", "check", "crosscheck", "scales", "advise", "search"])
def test_other_commands_name_what_does(name: str, capsys: Capture) -> None:
    more = {"advise": ["--budget", "1m"], "search": ["--out", "/nowhere"]}
    main = import_module(f"bench.{name}" if name == "fit" else f"bench.{name}.__main__").main
    assert main(["--device", "xpu", *more.get(name, [])]) == 2
    assert f"--device xpu: bench.{name} runs on cuda or cpu" in capsys.readouterr().err


class Planted:
    """An accelerator that the CPU stands in for: its clock ticks as the host's does."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.peak = 7

    def note(self, what: str, value: Any = None) -> Callable[..., Any]:
        return lambda *_: self.did.append(what) or value

    def make_event(self) -> Any:
        event = SimpleNamespace(moment=0.0, query=lambda: True)

        def record() -> None:
            self.did.append("event")
            event.moment = perf_counter()

        event.record = record
        event.elapsed_time = lambda later: 1e3 * (later.moment - event.moment)
        return event

    def read_stats(self, device: torch.device) -> dict[str, int]:
        kinds = {"allocated": self.peak * 10**9, "reserved": (self.peak + 1) * 10**9}
        return {f"{kind}_bytes.all.peak": size for kind, size in kinds.items()}

    def reset(self, device: torch.device) -> None:
        self.did.append("reset")
        self.peak = 3


def test_a_training_asks_its_accelerator(monkeypatch: Patch) -> None:
    """That of this CPU is planted; what is measured is real."""
    planted = Planted()
    found = Accelerator(
        synchronize=planted.note("synchronize"),
        make_event=planted.make_event,
        empty_cache=planted.note("empty"),
        read_stats=planted.read_stats,
        reset_peaks=planted.reset,
        held_bytes=lambda: 5,
        get_random=planted.note("random", torch.get_rng_state()),
        set_random=planted.note("set random"),
    )
    monkeypatch.setitem(ACCELERATORS, "cpu", found)
    clock = measurement_epochs.time.perf_counter
    stand_in = SimpleNamespace(perf_counter=lambda: planted.did.append("clock") or clock())
    monkeypatch.setattr(measurement_epochs, "time", stand_in)
    case = Case(
        model="tests.models_for_tests:good", dataset="synthetic", device="cpu", batch_size=32,
        steps=3, fraction=0.01, checkpoint=True,
    )  # fmt: skip
    data = prepare("synthetic", data_dir=None)
    m = measure(Assignment(case, data.folder, monotonic()), Channel()).measurement
    assert (m.warmup_allocated_bytes, m.warmup_reserved_bytes) == (7 * 10**9, 8 * 10**9)
    assert (m.peak_allocated_bytes, m.peak_reserved_bytes) == (3 * 10**9, 4 * 10**9)
    assert "CPU memory" not in (m.missing or "")
    assert m.resume_exact
    assert {"random", "set random", "empty"} <= {*planted.did}
    first = planted.did.index("clock")
    last = planted.did.index("clock", first + 1)
    assert planted.did[first - 1] == "synchronize", "all else is done when the clock starts"
    assert planted.did[last - 1] == "synchronize", "and the epoch when it stops"
    assert planted.did[first:last].count("event") == 1 + m.measured_steps
    assert planted.did[first:last].count("synchronize") == 1, "no step waits for the device"
    assert m.measured_time_s is not None
    assert 0 < (m.step_time_median_s or 0) < m.measured_time_s
    assert planted.did.index("empty") < planted.did.index("reset") < first


def test_tensors_in_graphs_of_torch_compile_are_not_counted(monkeypatch: Patch) -> None:
    """A replay asks torch's allocator for nothing, so the peak since warm-up is without them."""
    planted = Planted()
    stand_in = Accelerator(read_stats=planted.read_stats, reset_peaks=planted.reset)
    monkeypatch.setitem(ACCELERATORS, "cpu", stand_in)
    monkeypatch.setattr(Case, "own_graphs", True)
    case = Case(
        model="tests.models_for_tests:good", dataset="synthetic", device="cpu", batch_size=32,
        steps=2, fraction=0.01,
    )  # fmt: skip
    data = prepare("synthetic", data_dir=None)
    found = measure(Assignment(case, data.folder, monotonic()), Channel())
    m = found.measurement
    assert (m.peak_allocated_bytes, m.peak_reserved_bytes) == (None, 4 * 10**9)
    assert "what a graph holds" in found.missing["peak_allocated_bytes"]
    assert m.warmup_allocated_bytes == 7 * 10**9, "which has the steps before they were recorded"


def test_each_accelerator_names_functions_that_torch_has() -> None:
    """Those of this build, which has none of the devices: a name that is not there raises."""
    assert ACCELERATORS.keys() == {*DEVICES}
    for device in ("cuda", "xpu"):
        module = getattr(torch, device)
        one = ACCELERATORS[device]
        assert (one.synchronize, one.read_stats) == (module.synchronize, module.memory_stats)
    assert find_accelerator(torch.device("meta")).make_event is None
