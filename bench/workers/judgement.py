"""The assessment of a machine's facts, with commands that fix what makes numbers unreliable."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from fnmatch import fnmatchcase
from functools import partial

from bench.base.processes import RAISE_QUOTA
from bench.base.text import clean, count
from bench.machine.host import THREADS, VARIABLES, describe_install
from bench.machine.nvml import EFFECTS, OF_WHOLE, UNSUPPORTED, NvmlProblem, find_card
from bench.profile.rates import DeviceRates
from bench.schema.precision import FP8_INSTALL, PRECISIONS, TRAINED, Precision, refuse_apex
from bench.workers.examination import Gpu, Machine, Platform
from bench.workers.rating import check_rates, describe_rates, find_threads

GB = 1e9


class Severity(IntEnum):
    FINE = 0
    NOTE = 1
    UNBELIEVABLE = 2


@dataclass(frozen=True)
class Remark:
    """A remark on the machine, and the command that fixes it, empty if none is needed. ``numbers``
    is false if it does not affect the numbers that a sweep measures."""

    level: Severity
    topic: str
    what: str
    fix: str = ""
    numbers: bool = True


_fine, _note, _wrong = (partial(Remark, level) for level in Severity)


def judge(machine: Machine) -> list[Remark]:
    """Return the remarks on a machine, in the order of the topics, whatever their level."""
    judges = (_judge_torch, _judge_cards, _judge_cpu, _judge_places, _judge_software)
    remarks = [remark for judge in judges for remark in judge(machine)]
    wrong = {remark.topic for remark in remarks if remark.level is Severity.UNBELIEVABLE}
    return [*remarks, *_judge_rates(machine, wrong)]


def write_warnings(machine: Machine) -> list[str]:
    """Return what a sweep prints before it starts: a line for each problem, the worst first."""
    found = [f for f in judge(machine) if f.numbers and f.level > Severity.FINE]
    found.sort(key=lambda finding: -finding.level)
    words = {Severity.NOTE: "note", Severity.UNBELIEVABLE: "warning"}
    return [f"{words[f.level]}: {clean(f.what)}; {clean(f.fix)}" for f in found]


_DRIVER_FIXES: dict[NvmlProblem, str] = {
    NvmlProblem.NOT_INSTALLED: "pip install nvidia-ml-py",
    NvmlProblem.NO_DRIVER: "install the NVIDIA driver; in a container: docker run --gpus all",
    NvmlProblem.NOT_LOADED: "sudo modprobe nvidia",
    NvmlProblem.NO_PERMISSION: "check who may use it: ls -l /dev/nvidia*; in a container: "
    "docker run --gpus all",
    NvmlProblem.MISMATCH: "sudo reboot",
    NvmlProblem.OTHER: "nvidia-smi",
}


def _judge_torch(m: Machine) -> Iterator[Remark]:
    cuda, cpu = m.devices.get("cuda"), m.devices.get("cpu")
    built = cuda and cuda.environment.cuda
    if cuda and not m.gpus and (m.nvml is not NvmlProblem.NO_DRIVER or built):
        remark = _wrong if m.nvml is NvmlProblem.MISMATCH else _note
        fix = "nvidia-smi; echo $CUDA_VISIBLE_DEVICES" if m.nvml is None else _DRIVER_FIXES[m.nvml]
        yield remark("driver", m.nvml_reason or m.no_gpu, fix)
    if m.torch_error:
        yield _wrong("torch", m.torch_error, "pip install 'torch>=2.9'")
    elif cuda and cuda.error and (m.gpus or cuda.environment.gpu):
        what, _, fix = cuda.error.removeprefix("device cuda: ").partition("; ")
        newest = m.gpus[0].card.driver_cuda if m.gpus else None
        if built and newest and int(built.partition(".")[0]) > newest[0]:
            fix = f"update the driver, or install a build of torch for CUDA {newest[0]}"
        yield _wrong("torch", what, fix)
    elif cuda and not cuda.error:
        about = cuda.environment
        built = f"built for CUDA {about.cuda}, driver {about.driver}"
        yield _fine("torch", f"{about.torch}, {built}, computes on {about.gpu}")
    elif cpu:
        about = cpu.environment
        how = f"computes on the CPU with {about.torch_threads} threads"
        yield _fine("torch", f"{about.torch}, {how}")


_READINGS = {
    "energy_j": "energy",
    "power_w": "power",
    "power_limit_w": "the power limit",
    "device_bytes": "memory in use",
    "process_bytes": "the memory of a process",
    "sm_clock_mhz": "clocks",
    "temperature_c": "temperature",
    "throttle": "reasons for throttling",
    "others": "other processes",
}


def _judge_cards(m: Machine) -> Iterator[Remark]:
    """Judge the card that torch uses, or all cards if that is not known."""
    if "cuda" not in m.devices:
        return
    uuid = m.devices["cuda"].environment.gpu_uuid or ""
    used = find_card(uuid, [gpu.card for gpu in m.gpus])
    for gpu in m.gpus:
        if used in (None, gpu.card):
            yield from _judge_card(gpu)


def _judge_card(gpu: Gpu) -> Iterator[Remark]:
    card = gpu.card
    smi = f"sudo nvidia-smi -i {card.index}"
    limit, usual = card.power_limit_w, card.default_power_limit_w
    read = [name for quantity, name in _READINGS.items() if quantity not in gpu.lacks]
    size = f", {card.memory_bytes / GB:.0f} GB" if card.memory_bytes else ""
    yield _fine("card", f"{card.name}{size}; can be read: {', '.join(read)}")
    if card.mig:
        yield _note(
            "MIG",
            "MIG divides the card: power and energy cannot be read for one of its slices",
            f"{smi} -mig 0",
        )
    if card.persistence_mode is False:
        yield _note(
            "persistence",
            "persistence mode is off: the driver starts again for each case and loses settings",
            f"{smi} -pm 1",
        )
    if gpu.others:
        who = [f"pid {p.pid} ({p.name or '?'}), {(p.bytes or 0) / GB:.1f} GB" for p in gpu.others]
        yield _wrong(
            "neighbours",
            f"other processes compute on the card: {'; '.join(who)}",
            "end them or wait (nvidia-smi lists them); --allow-shared measures anyway",
        )
    lacks = {n: why for n, why in gpu.lacks.items() if n in _READINGS}
    # root cannot read what a card never tells; processes may only be hidden from a container
    processes = ("others", "process_bytes")
    never = [n for n, w in lacks.items() if w in (UNSUPPORTED, OF_WHOLE) and n not in processes]
    if never:
        names = ", ".join(_READINGS[name] for name in never)
        yield _note("readings", f"this card does not tell: {names}", numbers=False)
    if others := [f"{_READINGS[n]} ({why})" for n, why in lacks.items() if n not in never]:
        yield _note(
            "readings",
            f"these cannot be read: {', '.join(others)}",
            "run as root; in a container: docker run --gpus all --pid=host -e "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if limit is not None and usual is not None and abs(limit / usual - 1) > 0.01:
        yield _note(
            "power limit",
            f"{limit:.0f} W, where this card's default is {usual:.0f} W",
            f"{smi} -pl {usual:.0f}",
        )
    if slowed := [name for name in gpu.throttle or () if EFFECTS.get(name) == "slowed"]:
        yield _wrong(
            "clocks",
            f"the card is throttled before it has any work: {', '.join(slowed)}",
            "check cooling and power supply: nvidia-smi -q -d PERFORMANCE,TEMPERATURE",
        )
    fixed = [name for name in gpu.throttle or () if EFFECTS.get(name) == "set"]
    clock, default = card.application_clock_mhz, card.default_application_clock_mhz
    if clock is not None and default is not None and clock != default:
        fixed.append(f"application clock {clock} MHz, default {default} MHz")
    if fixed:
        yield _note(
            "clocks",
            f"clocks are fixed ({'; '.join(fixed)}): steadier, but not comparable with the default",
            f"{smi} -rgc; {smi} -rac",
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
        # less than a core stops even one thread, for 70 of every 100 ms at 0.3
        remark = _wrong if cores < 1 else _note
        yield remark(
            "CPU quota",
            f"{cpu.quota.file} allows {cores:.3g} of {of}: that is what is measured",
            f"raise it: {RAISE_QUOTA}",
        )
        of = f"{cores:.3g} cores"
    share, used = cpu.others / cores, f"other processes used {cpu.others:.2g} of {of}"
    if share > OTHERS_NOTED:
        remark = _wrong if share > OTHERS_HEAVY else _note
        yield remark("CPU", used, "find them with top; end those that are yours, or wait")
    else:
        yield _fine("CPU", f"{cpu.name}; {used}")
    if cpu.steal > STEAL_NOTED:
        remark = _wrong if cpu.steal > STEAL_HEAVY else _note
        yield remark(
            "CPU",
            f"the hypervisor gave {100 * cpu.steal:.0f} % of this machine's CPU time to others",
            "measure at another time, or on a machine with dedicated cores",
        )
    if cpu.governor not in (None, "performance"):
        yield _note(
            "governor",
            f"CPU frequency governor {cpu.governor}: clocks rise and fall with the load",
            "sudo cpupower frequency-set -g performance",
        )


def _judge_places(m: Machine) -> Iterator[Remark]:
    disk, shared = m.results_free_bytes, m.shm_free_bytes
    if disk is not None and disk < GB:
        fix = "free some, or give another --out"
        yield _note("disk", f"{disk / GB:.1f} GB free for {m.results}", fix)
    if shared is not None and shared < GB / 2:
        what, fix = f"{shared / GB:.1f} GB free for /dev/shm", "docker run --shm-size=1g"
        yield _note("shared memory", what, fix, numbers=False)
    if m.data_layout:
        yield _fine("images", f"CIFAR-10 found in {m.data_dir} ({m.data_layout})")
    elif m.data_error:
        fix = "do that, give another --data-dir, or use --dataset synthetic"
        yield _wrong("images", m.data_error, fix, numbers=False)
    else:
        yield _note(
            "images",
            f"CIFAR-10 is not in {m.data_dir}: a sweep would download 170 MB to there",
            "give its folder with --data-dir, or use --dataset synthetic",
            numbers=False,
        )


def _judge_software(m: Machine) -> Iterator[Remark]:
    for device, platform in m.devices.items():
        if not platform.error:
            yield _fine("precisions", _tell_precisions(m, device, platform))
    if m.missing:
        names, fix = ", ".join(m.missing), describe_install(m.missing)
        yield _wrong("packages", f"not installed: {names}", fix, numbers=False)
    for name, value in m.variables.items():
        if name not in THREADS:
            does = next(text for known, text in VARIABLES.items() if fnmatchcase(name, known))
            what = f"{name}={value} is set and changes results ({does})"
            yield _note("variables", what, f"unset {name}")


def _tell_precisions(m: Machine, device: str, platform: Platform) -> str:
    """Say which precisions a device runs, emulates or cannot run, and why."""
    rates = m.device_rates.get(device, DeviceRates()).columns
    platform = replace(platform, environment=replace(platform.environment, **rates))
    ways: dict[tuple[str, str], list[str]] = {}
    for precision in map(PRECISIONS.__getitem__, TRAINED):
        slow = platform.find_emulation(precision, convolves=True)
        lack = platform.refuse(precision) or _find_lack(m, device, precision)
        way = "cannot run" if lack else "emulates, slowly," if slow else "runs"
        ways.setdefault((way, lack or slow), []).append(precision.name)
    parts = [
        f"{way} {', '.join(names)}{f' ({why})' if why else ''}"
        for (way, why), names in sorted(ways.items(), reverse=True)
    ]
    return f"the {'GPU' if device == 'cuda' else 'CPU'} {'; '.join(parts)}"


def _find_lack(m: Machine, device: str, precision: Precision) -> str:
    if precision.float8 and not m.torchao:
        return FP8_INSTALL
    return refuse_apex(m.apex, device) if precision.apex else ""


def _judge_rates(m: Machine, wrong: Collection[str]) -> Iterator[Remark]:
    """Judge the rates, beside the topics of what is wrong."""
    for device, device_rates in m.device_rates.items():
        gpu = m.devices[device].environment.gpu
        number = find_threads(m) if device == "cpu" else None
        how = f"measured now with {count(number, 'thread')}" if number else "measured now"
        what = f"{how}: {describe_rates(device_rates, gpu) or 'none'}"
        if ("CPU" if device == "cpu" else "neighbours") in wrong:
            what += "; other work slowed this"
            yield _note("rates", what, "measure again when that has ended: python -m bench.doctor")
        else:
            yield _fine("rates", what)
        for column, why in device_rates.reasons.items():
            what = f"{column} could not be measured: {why}"
            fix = "measure again with nothing else on it: python -m bench.doctor"
            yield _note("rates", what, fix, numbers=False)
        for what, fix in check_rates(device_rates, gpu):
            yield _note("rates", what, fix)
