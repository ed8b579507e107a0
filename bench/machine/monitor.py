"""The state of the card while a worker trains, phase by phase, as columns of a `Measurement`.

The process that started the worker reads the device: memory every 15 ms, energy at the boundaries
of phases, and the rest five times a second. Notes say what these readings may have missed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, pairwise
from statistics import median
from typing import Any, Literal

from bench.machine.gpus import Depth, Device, GpuProcess, Reading
from bench.machine.nvml import EFFECTS

MonitorPhase = Literal["baseline", "setup", "warmup", "epoch", "evaluation"]
"""In this order. Evaluation is everything that follows the epoch, if only the worker's exit."""


def _union(seen: Sequence[Sequence[str]]) -> str:
    return "; ".join(dict.fromkeys(name for names in seen for name in names))


_WHOLE, _FIRST, _LAST = (0.0, 1.0), (0.0, 0.25), (0.75, 1.0)
_Column = tuple[str, MonitorPhase, Callable[[Any], Any], tuple[float, float]]

# column: the quantity, the phase, what its values come to, and which part of the phase by time
_COLUMNS: Mapping[str, _Column] = {
    "warmup_process_bytes": ("process_bytes", "warmup", max, _WHOLE),
    "warmup_device_bytes": ("device_bytes", "warmup", max, _WHOLE),
    "peak_process_bytes": ("process_bytes", "epoch", max, _WHOLE),
    "peak_device_bytes": ("device_bytes", "epoch", max, _WHOLE),
    "baseline_device_bytes": ("device_bytes", "baseline", max, _WHOLE),
    "power_limit_w": ("power_limit_w", "epoch", min, _WHOLE),
    "sm_clock_mhz": ("sm_clock_mhz", "epoch", median, _WHOLE),
    "sm_clock_first_mhz": ("sm_clock_mhz", "epoch", median, _FIRST),
    "sm_clock_last_mhz": ("sm_clock_mhz", "epoch", median, _LAST),
    "memory_clock_mhz": ("memory_clock_mhz", "epoch", median, _WHOLE),
    "temperature_c": ("temperature_c", "epoch", max, _WHOLE),
    "throttle_during": ("throttle", "epoch", _union, _WHOLE),
}
ENERGY_COLUMNS = ("energy_j", "mean_power_w")
_LEAST_POWERS = 10  # between which power is summed: 2 s, as some drivers tell the mean of a second
_SUMMED = "the card has no counter of energy: it is the power, read five times a second, over time"
_PASSING = (
    0.05  # a reason to slow down, met in a smaller share of the readings, hardly changes time
)
_NEIGHBOURS = ("neighbours", "neighbours_computing")
MONITORED = (*_COLUMNS, *ENERGY_COLUMNS, *_NEIGHBOURS)
"""The fields of `Measurement` a monitor fills."""

_MEMORY = ("device_bytes", "process_bytes")


@dataclass
class Observation:
    """The result of a monitor.

    Every name of `MONITORED` is either in ``values`` or in ``missing`` with its reason; in the
    throttle columns and ``neighbours`` an empty string means that none was seen. ``verdict`` says
    why the measurement is invalid; empty if it is valid. ``cards`` are the places of the cards that
    it is of, where a command chose among several.
    """

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""
    cards: list[int] = field(default_factory=list)


@dataclass
class _Stay:
    """One stay in a phase: the reading that ended the phase before it, the later ones up to that
    at its end, and the peaks of memory among these. A worker enters most phases once."""

    phase: MonitorPhase
    opened: list[Reading] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    ended: bool = False


class Monitor:
    """A sampler of a device, from before the worker starts until after it has ended.

    The baseline is read when the monitor is created, so create it before the worker. Then `watch`
    the worker's pid, `enter` each phase as the worker reports it, and `close`. As a context manager
    it stops sampling whatever happens.
    """

    def __init__(
        self, device: Device, fast_s: float = 0.015, slow_s: float = 0.2, whole: bool = False
    ) -> None:
        """Read the baseline and start sampling: memory every ``fast_s``, all of `Depth.SLOW` every
        ``slow_s``. The monitor owns ``device`` from here on and closes it. With ``whole`` it is of
        a command: of all that the worker starts, and of its warm-up if it enters no epoch, as one
        that does not tell its steps."""
        self._device, self._whole = device, whole
        device.whole = whole
        self._fast_s = fast_s
        self._slow_every = max(1, round(slow_s / fast_s))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stays = [_Stay("baseline")]
        self._read(Depth.EDGE)
        self._thread = threading.Thread(target=self._sample, name="monitor", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Watch the worker, which has just started, and enter its set-up."""
        with self._lock:
            self._device.watch(pid)
        self.enter("setup")

    def enter(self, phase: MonitorPhase) -> None:
        """End the current phase and enter the next, with a full reading in between.

        Epoch and evaluation may be entered again, alternately, for each further epoch. Warm-up
        should end after its memory was freed, and the epoch right after its last synchronisation,
        as memory at the boundary counts for the phase that ends.
        """
        with self._lock:
            readings = self._read(Depth.EDGE)
            self._stays[-1].ended = bool(self._stays[-1].opened and readings)
            self._stays.append(_Stay(phase, readings[-1:]))

    def close(
        self,
        reserved_bytes: int | None = None,
        warmup_reserved_bytes: int | None = None,
        allow_shared: bool = False,
        measured_s: float | None = None,
    ) -> Observation:
        """Stop sampling and return the observation.

        ``reserved_bytes`` is the peak of the worker's allocator in the epoch, a lower bound of the
        true peak, and ``warmup_reserved_bytes`` its peak in warm-up. With ``allow_shared``,
        neighbours are noted but do not make the measurement invalid. Of a command, the energy is
        that of ``measured_s`` at the mean power of the epoch phase, in which it also does other
        things than steps.
        """
        self.stop()
        if self._whole and not self._list("epoch"):
            self._stays += [replace(stay, phase="epoch") for stay in self._list("warmup")]
        seen = Observation()
        for name, (quantity, phase, reduce, part) in _COLUMNS.items():
            if values := self._values(quantity, phase, part):
                seen.values[name] = reduce(values)
            else:
                seen.missing[name] = self._why(quantity, phase)
        self._correct(seen, "warmup", warmup_reserved_bytes)
        self._correct(seen, "peak", reserved_bytes)
        self._energy(seen)
        seen.notes += filter(None, [self._device.note])
        if self._whole and measured_s is not None and "mean_power_w" in seen.values:
            seen.values["energy_j"] = seen.values["mean_power_w"] * measured_s
        warnings = [self._throttling(seen), self._neighbours(seen, allow_shared)]
        seen.verdict = "; ".join(filter(None, warnings))
        return seen

    def stop(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._read(Depth.EDGE)
            self._device.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _sample(self) -> None:
        ticks = 0
        while not self._stop.wait(self._fast_s):  # always waits: a slow driver costs readings
            ticks += 1
            with self._lock:
                self._read(Depth.FAST if ticks % self._slow_every else Depth.SLOW)

    def _read(self, depth: Depth) -> list[Reading]:
        readings, stay = [*self._device.read(depth)], self._stays[-1]
        for reading in readings:
            for quantity in _MEMORY:
                if (value := getattr(reading, quantity)) is not None:
                    stay.peaks[quantity] = max(value, stay.peaks.get(quantity, 0))
        if depth > Depth.FAST:  # memory, read 67 times a second for hours, is kept only as its peak
            stay.readings += readings
        return readings

    def _list(self, phase: MonitorPhase) -> list[_Stay]:
        return [stay for stay in self._stays if stay.phase == phase]

    def _values(
        self, quantity: str, phase: MonitorPhase, part: tuple[float, float] = _WHOLE
    ) -> list[Any]:
        """Return the values of a part of a phase; time between stays does not count."""
        stays, moments, passed = self._list(phase), list[tuple[int, Reading]](), 0
        if phase != "baseline" and quantity in _MEMORY:
            # at the opening edge it is still that of the previous phase
            return [stay.peaks[quantity] for stay in stays if quantity in stay.peaks]
        for stay in stays:
            readings = [*stay.opened, *stay.readings]
            moments += [(passed + r.time_ns - readings[0].time_ns, r) for r in readings]
            passed = moments[-1][0] if moments else 0
        first, last = part[0] * passed, part[1] * passed
        values = [getattr(r, quantity) for moment, r in moments if first <= moment <= last]
        known = [value for value in values if value is not None]
        return known[:1] if phase == "baseline" else known

    def _why(self, quantity: str, phase: MonitorPhase) -> str:
        if not self._list(phase):
            return f"{phase} was not reached"
        return self._device.why(quantity) or f"not read during {phase}"

    def _correct(self, seen: Observation, when: str, bound: int | None) -> None:
        """Subtract the baseline of the device, and raise sampled peaks to the allocator's own."""
        values, baseline = seen.values, seen.values.get("baseline_device_bytes")
        device = f"{when}_device_bytes"
        if device in values:
            values[device] -= baseline or 0
            if baseline is None or values[device] < 0:
                del values[device]
                why = "what the card held before the worker is not known, or was more than later"
                seen.missing[device] = why
        for name in (device, f"{when}_process_bytes"):
            if bound is not None and name in values:
                values[name] = max(values[name], bound)  # a spike between two readings

    def _energy(self, seen: Observation) -> None:
        """Fill the energy columns, summed over the stays in the epoch phase."""
        epochs = self._list("epoch")
        if not epochs or not all(stay.ended for stay in epochs):
            reason = "epoch did not end" if epochs else "epoch was not reached"
            seen.missing |= dict.fromkeys(ENERGY_COLUMNS, reason)
            return
        ends = [(stay.opened[0], stay.readings[-1]) for stay in epochs]
        seconds = sum(last.time_ns - first.time_ns for first, last in ends) / 1e9
        gains = [
            last.energy_j - first.energy_j
            for first, last in ends
            if first.energy_j is not None and last.energy_j is not None
        ]
        energy = sum(gains)
        if not gains and (summed := self._sum_power(epochs)):
            seen.notes.append(_SUMMED)
            energy = summed
        elif len(gains) < len(ends) or min(gains) < 0 or not energy:
            why = self._device.why("energy_j")
            why = why or "the energy counter was not read, stood still or went back"
            seen.missing |= dict.fromkeys(ENERGY_COLUMNS, why)
            return
        seen.values |= {"energy_j": energy, "mean_power_w": energy / seconds}

    def _sum_power(self, epochs: Sequence[_Stay]) -> float:
        """Return the energy of stays in J: power over time, by the trapezoidal rule; 0 if too few
        readings have it."""
        energy, number = 0.0, 0
        for stay in epochs:
            read = [r for r in (*stay.opened, *stay.readings) if r.power_w is not None]
            for one, next in pairwise(read):
                assert one.power_w is not None
                assert next.power_w is not None
                energy += (one.power_w + next.power_w) / 2 * (next.time_ns - one.time_ns) / 1e9
                number += 1
        return energy if number >= _LEAST_POWERS else 0.0

    def _throttling(self, seen: Observation) -> str:
        """Return the warning if heat or the power supply held the clocks down. What hardly any
        reading met is noted instead."""
        readings = self._values("throttle", "epoch")
        counts = Counter(name for names in readings for name in names)
        met = {name: f"{name} ({n} of {len(readings)} readings)" for name, n in counts.items()}
        slowed = [name for name in met if EFFECTS.get(name) == "slowed"]
        passing = [n for n in slowed if counts[n] < max(2, _PASSING * len(readings))]
        if passing:
            seen.values["throttle_during"] = _union([[n for n in met if n not in passing]])
            seen.notes.append(f"passing: {', '.join(map(met.__getitem__, passing))}")
        lasting = [met[name] for name in slowed if name not in passing]
        return f"throttled during the epoch: {', '.join(lasting)}" if lasting else ""

    def _neighbours(self, seen: Observation, allow_shared: bool) -> str:
        """Fill the neighbour columns; return the warning, if any computed before the epoch
        ended."""
        known = [
            reading.others
            for stay in self._stays
            if stay.phase != "evaluation"
            for reading in stay.readings
            if reading.others is not None
        ]
        if not known:
            seen.missing |= dict.fromkeys(_NEIGHBOURS, self._why("others", "baseline"))
            return ""
        during = dict[int, GpuProcess]()
        for other in chain.from_iterable(known):
            largest = during.get(other.pid, other)
            during[other.pid] = max(largest, other, key=lambda p: p.bytes or 0)
        who = "; ".join(map(str, during.values()))
        seen.values |= {"neighbours": who, "neighbours_computing": len(during)}
        shared = f"the card was shared: {who}" if who else ""
        if shared and allow_shared:
            seen.notes.append(shared)
        return "" if allow_shared else shared


# How what cards were observed to do comes together. The rest, memory, is that of the first.
_TOGETHER: Mapping[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("energy_j", "mean_power_w", "power_limit_w", "neighbours_computing"), sum),
    **dict.fromkeys(("sm_clock_mhz", "sm_clock_first_mhz", "sm_clock_last_mhz"), min),
    "memory_clock_mhz": min,
    "temperature_c": max,
    **dict.fromkeys(("throttle_during", "neighbours"), lambda seen: "; ".join(filter(None, seen))),
}


class Monitors:
    """A monitor of each card of a case, with the methods of a `Monitor`: of energy and power the
    sum is observed, the clocks of the slowest, the temperature of the hottest, and the memory of
    the first. With ``whole`` they are cards that a command may use, and what counts is what
    happened on those on which its processes were seen or, where none was, as under WSL, on those
    that it ``named``, by their places."""

    named: Collection[int] = ()

    def __init__(self, cards: Sequence[Device], whole: bool) -> None:
        self._cards, self._whole = cards, whole
        self._monitors = [Monitor(card, whole=whole) for card in cards]

    def watch(self, pids: Sequence[int]) -> None:
        """Watch the worker's processes: one on each card, or a single one on all."""
        for monitor, pid in zip(self._monitors, cycle(pids), strict=False):  # a CPU has the first
            monitor.watch(pid)

    def enter(self, phase: MonitorPhase) -> None:
        for monitor in self._monitors:
            monitor.enter(phase)

    def close(self, *given: Any) -> Observation:
        """Return what was observed, as `Monitor.close` does."""
        seen = [monitor.close(*given) for monitor in self._monitors]
        listed = [i for i, card in enumerate(self._cards) if not self._whole or card.is_used()]
        places = listed or sorted(self.named)
        used = [seen[i] for i in places]
        if not used:
            why = "no process of the command was seen on a GPU"
            return Observation(missing=dict.fromkeys(MONITORED, why))
        values = dict(used[0].values)
        for name, join in _TOGETHER.items():
            if all(name in one.values for one in used):
                values[name] = join([one.values[name] for one in used])
            else:
                values.pop(name, None)
        missing = {k: why for one in used for k, why in one.missing.items() if k not in values}
        notes = [*dict.fromkeys(note for one in used for note in one.notes)]
        if self._whole and len(self._cards) > 1:
            how = "its processes were seen on" if listed else "its script told of"
            notes.append(f"{how} GPU {', '.join(map(str, places))}, by NVML's count")
        verdict = "; ".join(dict.fromkeys(one.verdict for one in used if one.verdict))
        return Observation(values, missing, notes, verdict, places)

    def __enter__(self) -> Monitors:
        return self

    def __exit__(self, *_: object) -> None:
        for monitor in self._monitors:
            monitor.stop()
