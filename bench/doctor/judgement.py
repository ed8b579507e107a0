"""The assessment of a machine's facts, with commands that fix what makes numbers unreliable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import partial

from bench.apex import Apex, refuse_apex
from bench.cores import RAISE_QUOTA
from bench.diagnosis.step import find_emulated
from bench.doctor.rates import check_rates, describe_rates
from bench.environment.host import THREADS, VARIABLES, describe_install
from bench.environment.machine import Gpu, Machine, Platform
from bench.gpu.device import Process
from bench.gpu.nvml import EFFECTS, NvmlProblem, find_card
from bench.precision import FP8_INSTALL, PRECISIONS, TRAINED
from bench.text import clean, count

GB = 1e9


class Level(IntEnum):
    FINE = 0
    NOTE = 1
    UNBELIEVABLE = 2


@dataclass(frozen=True)
class Remark:
    """A remark on the machine, and the command that fixes it, empty if none is needed. ``numbers``
    is false if it does not affect the numbers that a sweep measures."""

    level: Level
    topic: str
    what: str
    fix: str = ""
    numbers: bool = True


_fine, _note, _wrong = (partial(Remark, level) for level in Level)

_START_FIXES: dict[NvmlProblem, str] = {
    NvmlProblem.NOT_INSTALLED: "pip install nvidia-ml-py",
    NvmlProblem.NO_DRIVER: "install the NVIDIA driver; in a container: docker run --gpus all",
    NvmlProblem.NOT_LOADED: "sudo modprobe nvidia",
    NvmlProblem.NO_PERMISSION: "check who may use it: ls -l /dev/nvidia*; in a container: "
    "docker run --gpus all",
    NvmlProblem.MISMATCH: "sudo reboot",
    NvmlProblem.OTHER: "nvidia-smi",
}


def _judge_driver(m: Machine) -> Iterator[Remark]:
    if "cuda" not in m.devices:
        return
    if m.gpus:
        card = m.gpus[0].card
        runs = "" if card.driver_cuda is None else f", runs CUDA up to {_dots(card.driver_cuda)}"
        yield _fine("driver", f"{card.driver or 'of an unknown version'}{runs}")
    elif m.nvml is NvmlProblem.NO_DRIVER and not _cuda_build(m):
        yield _fine("driver", f"{m.nvml_reason}: only the CPU can be measured")
    elif m.nvml is not None:
        remark = _wrong if m.nvml is NvmlProblem.MISMATCH else _note
        yield remark("driver", m.nvml_reason, _START_FIXES[m.nvml])
    else:
        fix = "unset CUDA_VISIBLE_DEVICES" if m.cuda_visible_devices is not None else "nvidia-smi"
        yield _note("driver", m.no_gpu, fix)


def _judge_torch(m: Machine) -> Iterator[Remark]:
    if m.torch_error:
        yield _wrong("torch", m.torch_error, "pip install 'torch>=2.9'")
        return
    version = next((d.environment.torch or "" for d in m.devices.values()), "")
    cuda = m.devices.get("cuda")
    if cuda is None or (cuda.error and not m.gpus and not cuda.environment.gpu):
        threads = m.devices["cpu"].environment.torch_threads if "cpu" in m.devices else None
        beside = "" if threads is None else f" with {threads} threads"
        yield _fine("torch", f"{version}, computes on the CPU{beside}")
    elif cuda.error:
        yield _wrong("torch", _shorten(cuda.error), _fix_torch(m, cuda))
    else:
        built = f"built for CUDA {cuda.environment.cuda}"
        yield _fine("torch", f"{version}, {built}, computes on {cuda.environment.gpu}")


def _shorten(error: str) -> str:
    return error.partition("; ")[0].removeprefix("device cuda: ")


def _fix_torch(m: Machine, cuda: Platform) -> str:
    built = cuda.environment.cuda
    runs = m.gpus[0].card.driver_cuda if m.gpus else None
    if built is None:
        return "install a CUDA build of torch; pytorch.org/get-started gives the command"
    if runs and int(built.partition(".")[0]) > runs[0]:
        return (
            f"update the driver, which runs CUDA up to {_dots(runs)}, or install a build of torch "
            f"for CUDA {runs[0]}"
        )
    return "nvidia-smi; echo $CUDA_VISIBLE_DEVICES"


def _cuda_build(m: Machine) -> bool:
    return "cuda" in m.devices and m.devices["cuda"].environment.cuda is not None


def _judge_cards(m: Machine) -> Iterator[Remark]:
    """Judge the card that torch uses, or all cards if that is not known."""
    if "cuda" not in m.devices:
        return
    uuid = m.devices["cuda"].environment.gpu_uuid or ""
    used = find_card(uuid, [gpu.card for gpu in m.gpus])
    for gpu in m.gpus:
        if used in (None, gpu.card):
            for judge in (_judge_card, _judge_sharing, _judge_readings, _judge_power):
                yield from judge(gpu)


def _judge_card(gpu: Gpu) -> Iterator[Remark]:
    card = gpu.card
    facts = (
        card.name,
        f"{card.memory_bytes / GB:.0f} GB" if card.memory_bytes else None,
        card.capability and f"compute capability {_dots(card.capability)}",
        {True: "ECC on", False: "ECC off", None: None}[card.ecc],
    )
    yield _fine("card", ", ".join(filter(None, facts)))
    if card.mig:
        what = "MIG divides the card: nothing can be read of one of its instances"
        yield _note("MIG", what, f"sudo nvidia-smi -i {card.index} -mig 0")
    if card.persistence_mode is False:
        yield _note(
            "persistence",
            "persistence mode is off: the driver starts again for each case and loses its settings",
            f"sudo nvidia-smi -i {card.index} -pm 1",
        )
    if card.pcie and card.pcie.width < card.pcie.max_width:
        what = f"{card.pcie}: half the lanes or fewer, so copies to the card are slow"
        yield _note("PCIe", what, "move the card to a slot with all lanes")


def _judge_sharing(gpu: Gpu) -> Iterator[Remark]:
    if gpu.others is None:
        cannot = f"other processes on the card cannot be listed ({gpu.lacks.get('others', '')})"
        what = f"{cannot}, so a shared card would not be noticed"
        yield _note("neighbours", what, "list them on the host: nvidia-smi")
        return
    if computing := _name_processes(gpu.others, display=False):
        fix = "end them or wait (nvidia-smi lists them); --allow-shared measures anyway"
        yield _wrong("neighbours", f"other processes compute on the card: {computing}", fix)
    if drawing := _name_processes(gpu.others, display=True):
        fix = "for steady numbers: sudo systemctl isolate multi-user.target"
        yield _note("neighbours", f"the card also drives a display: {drawing}", fix)
    if not gpu.others:
        yield _fine("neighbours", "no other process uses the card")


def _name_processes(processes: Iterable[Process], display: bool) -> str:
    return "; ".join(
        f"pid {p.pid}{f' ({p.name})' if p.name else ''}"
        + (f", {p.bytes / GB:.1f} GB" if p.bytes else "")
        for p in processes
        if p.display is display
    )


_READINGS = {
    "energy_j": "the energy counter",
    "power_w": "power",
    "power_limit_w": "the power limit",
    "device_bytes": "memory in use",
    "sm_clock_mhz": "clocks",
    "temperature_c": "temperature",
    "throttle": "reasons for throttling",
}


def _judge_readings(gpu: Gpu) -> Iterator[Remark]:
    reasons: dict[str, list[str]] = {}
    for quantity, name in _READINGS.items():
        if quantity in gpu.lacks:
            reasons.setdefault(gpu.lacks[quantity], []).append(name)
    for reason, names in reasons.items():
        also = "; energy is then integrated from power" if names == ["the energy counter"] else ""
        fix = (
            "if permission is missing: run as root; in a container: "
            "-e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
        yield _note("readings", f"{', '.join(names)} cannot be read ({reason}){also}", fix)
    if read := [name for quantity, name in _READINGS.items() if quantity not in gpu.lacks]:
        yield _fine("readings", f"{', '.join(read)} can be read")
    if gpu.process_bytes is not None:
        yield _fine("memory", "the memory of a process can be read")
    elif gpu.tried:
        lack = gpu.lacks.get("process_bytes", "")
        what = f"the memory of a process cannot be read ({lack}); that of the whole card is used "
        yield _note("memory", f"{what}instead", "in a container: docker run --pid=host")


def _judge_power(gpu: Gpu) -> Iterator[Remark]:
    card = gpu.card
    limit, usual = card.power_limit_w, card.default_power_limit_w
    if limit is not None and usual is not None and abs(limit / usual - 1) > 0.01:
        yield _note(
            "power limit",
            f"{limit:.0f} W, where this card's default is {usual:.0f} W: not comparable with "
            "other cards of its kind",
            f"sudo nvidia-smi -i {card.index} -pl {usual:.0f}",
        )
    elif limit is not None:
        yield _fine("power limit", f"{limit:.0f} W, the default")
    if slowed := [name for name in gpu.throttle or () if EFFECTS.get(name) == "slowed"]:
        what = f"the card is throttled before it has any work: {', '.join(slowed)}"
        fix = "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
        yield _wrong("clocks", what, fix)
    held = [name for name in gpu.throttle or () if EFFECTS.get(name) == "set"]
    clock, default = card.application_clock_mhz, card.default_application_clock_mhz
    if clock is not None and default is not None and clock != default:
        held.append(f"application clock {clock} MHz, default {default} MHz")
    if held:
        yield _note(
            "clocks",
            f"clocks are fixed ({'; '.join(held)}): steadier, but not comparable with cards at "
            "default clocks",
            f"sudo nvidia-smi -i {card.index} -rgc; sudo nvidia-smi -i {card.index} -rac",
        )


OTHERS_NOTED, OTHERS_HEAVY = 0.1, 0.25
"""Fractions of the cores used by other processes that give a note, and that are too much."""

STEAL_NOTED, STEAL_HEAVY = 0.01, 0.05
"""The same for the fraction of CPU time that the hypervisor gave to other machines."""


def _judge_cpu(m: Machine) -> Iterator[Remark]:
    cpu = m.cpu
    of, cores = count(cpu.cores, "core"), float(cpu.cores)
    if cpu.quota is not None and cpu.quota.cores < cpu.cores:
        cores = cpu.quota.cores
        what = f"{cpu.quota.file} allows {cores:.3g} of {of}: that is what is measured"
        # less than a core stops even one thread, for 70 of every 100 ms at 0.3
        stopped = cores < 1
        halted = ", and every step is stopped for a part of its time" if stopped else ""
        yield (_wrong if stopped else _note)("CPU quota", what + halted, f"raise it: {RAISE_QUOTA}")
        of = f"{cores:.3g} cores"
    used = f"other processes used {cpu.others:.2g} of {of}"
    share = cpu.others / cores
    if share > OTHERS_NOTED:
        remark = _wrong if share > OTHERS_HEAVY else _note
        what = f"{used} in {cpu.watched_s:.2g} s"
        yield remark("CPU", what, "find them with top, and end them")
    if cpu.steal > STEAL_NOTED:
        remark = _wrong if cpu.steal > STEAL_HEAVY else _note
        yield remark(
            "CPU",
            f"the hypervisor gave {100 * cpu.steal:.0f} % of this machine's CPU time to others",
            "measure at another time, or on a machine with dedicated cores; watch the column st "
            "of: vmstat 1",
        )
    if share <= OTHERS_NOTED and cpu.steal <= STEAL_NOTED:
        yield _fine("CPU", f"{cpu.name}; {used}")
    if cpu.governor is not None and cpu.governor != "performance":
        what = f"CPU frequency governor {cpu.governor}: clocks rise and fall with the load"
        yield _note("governor", what, "sudo cpupower frequency-set -g performance")


def _judge_places(m: Machine) -> Iterator[Remark]:
    if (free := m.results_free_bytes) is not None:
        what = f"{free / GB:.1f} GB free for {m.results}"
        fix = "free some space there, or choose another folder with --out"
        yield _note("disk", what, fix) if free < 1 * GB else _fine("disk", what)
    if (free := m.shm_free_bytes) is not None:
        what = f"{free / GB:.1f} GB free in /dev/shm"
        if free < 0.5 * GB:
            what += ": too little for the data loaders of your own model"
            yield _note("shared memory", what, "docker run --shm-size=1g", numbers=False)
        else:
            yield _fine("shared memory", what, numbers=False)
    if m.data_layout:
        what = f"CIFAR-10 found in {m.data_dir} ({m.data_layout})"
        yield _fine("images", what, numbers=False)
    elif m.data_fault:
        what, _, fix = m.data_fault.partition("; ")
        yield _note("images", what, fix or "give another folder with --data-dir", numbers=False)
    else:
        what = f"CIFAR-10 is not in {m.data_dir}: a sweep would download 170 MB to there"
        fix = "give its folder with --data-dir, or use --dataset synthetic"
        yield _note("images", what, fix, numbers=False)


def _judge_precisions(m: Machine) -> Iterator[Remark]:
    for device, platform in m.devices.items():
        if platform.error:
            continue
        rates = m.yardsticks[device].rates if device in m.yardsticks else {}
        ways: dict[str, list[str]] = {"runs": [], "emulates, slowly,": [], "cannot run": []}
        slow: dict[str, list[str]] = {}
        for precision in map(PRECISIONS.__getitem__, TRAINED):
            lacks = precision.float8 and not m.torchao
            lacks |= precision.apex and bool(refuse_apex(m.apex, device))
            why = find_emulated(precision.arithmetic, rates)
            way = "emulates, slowly," if why or platform.find_emulation(precision) else "runs"
            if lacks or platform.refuse(precision):
                way = "cannot run"
            elif why:
                slow.setdefault(why, []).append(precision.name)
            ways[way].append(precision.name)
        told = "; ".join(f"{way} {', '.join(names)}" for way, names in ways.items() if names)
        where = "the CPU" if device == "cpu" else "the GPU"
        yield _fine("precisions", f"{where} {told}", numbers=False)
        for why, names in slow.items():
            fix = "leave out of --precision what is too slow, or lower --fraction or --batch-size"
            yield _note("precisions", f"{why}, which slows {', '.join(names)}", fix, numbers=False)


def _judge_packages(m: Machine) -> Iterator[Remark]:
    # the remarks on torch and, below, on NVML's package say more about these two
    if missing := [name for name in m.missing if name not in ("nvidia-ml-py", "torch")]:
        what = f"not installed: {', '.join(missing)}; nothing can be measured without"
        yield _wrong("packages", what, describe_install(missing), numbers=False)
    if m.nvidia_ml_py is None:
        what = "nvidia-ml-py is not installed: memory, power and clocks of a card cannot be read"
        counts = bool(m.gpus) or _cuda_build(m)
        yield _note("NVML package", what, "pip install nvidia-ml-py", numbers=counts)
    elif m.pynvml is not None and int(m.pynvml.partition(".")[0] or 0) < 12:
        what = f"the deprecated package pynvml {m.pynvml} overwrites nvidia-ml-py {m.nvidia_ml_py}"
        fix = "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"
        yield _note("NVML package", what, fix, numbers=bool(m.gpus))
    else:
        yield _fine("NVML package", f"nvidia-ml-py {m.nvidia_ml_py}")
    yield from _judge_apex(m.apex)
    what = f"torchao {m.torchao}; fp8 converts with it" if m.torchao else FP8_INSTALL
    yield _fine("torchao", what, numbers=False)


def _judge_apex(apex: Apex | None) -> Iterator[Remark]:
    if apex is None:
        yield _fine("apex", "not installed; fp16-apex alone needs it", numbers=False)
        return
    if why := refuse_apex(apex, "cuda"):
        what, _, fix = why.partition(": ")
        yield _note("apex", f"{what}, so that fp16-apex cannot run", fix, numbers=False)
        return
    yield _fine("apex", f"apex {apex.version} has amp; fp16-apex runs it", numbers=False)


def _judge_variables(m: Machine) -> Iterator[Remark]:
    changing = {name: value for name, value in m.variables.items() if name not in THREADS}
    for name, value in changing.items():
        does = next((text for known, text in VARIABLES.items() if fnmatchcase(name, known)), "")
        what = f"{name}={value} is set and changes results ({does})"
        yield _note("variables", what, f"unset {name}")
    if not changing:
        yield _fine("variables", "no variable that changes results is set")


def _judge_models(m: Machine) -> Iterator[Remark]:
    for name, found in m.models.items():
        if isinstance(found, str) and found:
            yield _wrong("model", found, numbers=False)
        else:
            yield _fine("model", f"{name} can be imported and built", numbers=False)


def _judge_rates(m: Machine) -> Iterator[Remark]:
    for device, yardstick in m.yardsticks.items():
        gpu = m.devices[device].environment.gpu
        if said := describe_rates(yardstick, gpu):
            yield _fine("rates", f"measured now: {said}", numbers=False)
        for column, why in yardstick.reasons.items():
            what = f"{column.replace('_', ' ')} could not be measured: {why}"
            yield _note("rates", what, "try again with more memory free", numbers=False)
        for what, fix in check_rates(yardstick, gpu):
            yield _note("rates", what, fix)
    if m.slower:
        fix = "find what else uses the machine, with top or nvidia-smi, and end it"
        yield _note("rates", f"measured now: {m.slower}", fix)


_JUDGES = (
    _judge_driver,
    _judge_torch,
    _judge_cards,
    _judge_cpu,
    _judge_places,
    _judge_precisions,
    _judge_packages,
    _judge_variables,
    _judge_models,
    _judge_rates,
)


def judge(machine: Machine) -> list[Remark]:
    """Return the remarks on a machine, in the order of the topics, whatever their level."""
    return [remark for judge in _JUDGES for remark in judge(machine)]


def _dots(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


MOST_LINES = 5
"""The most findings shown before a sweep. More than a few are not read."""


def write_warnings(machine: Machine) -> list[str]:
    """Return what a sweep prints before it starts: a line for each problem, the worst first."""
    found = [f for f in judge(machine) if f.numbers and f.level > Level.FINE]
    found.sort(key=lambda finding: -finding.level)
    lines = [
        f"{'warning' if f.level is Level.UNBELIEVABLE else 'note'}: "
        + "; ".join(filter(None, [clean(f.what), clean(f.fix)]))
        for f in found[:MOST_LINES]
    ]
    more = len(found) - len(lines)
    return [*lines, f"note: {more} more; python -m bench.doctor shows them"] if more else lines
