"""The state of the card while a worker trains, phase by phase, as columns of a `Measurement`.

The process that started the worker reads the device: memory every 15 ms, energy at the boundaries
of phases, and the rest five times a second. Notes say what these readings may have missed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Literal, get_args

from bench.gpu.device import Depth, Device, Process, Reading
from bench.gpu.nvml import EFFECTS

Phase = Literal["baseline", "setup", "warmup", "epoch", "evaluation"]
"""In this order. Evaluation is everything that follows the epoch, if only the worker's exit."""

_REPEATED = ("epoch", "evaluation")
"""The phases that a worker enters again for each epoch; their values span all epochs."""


def _union(seen: Sequence[tuple[str, ...]]) -> str:
    return "; ".join(dict.fromkeys(name for names in seen for name in names))


Part = Literal["whole", "first", "last"]
"""A part of a phase: all of it, or its first or last quarter by time."""


@dataclass(frozen=True)
class _Column:
    """A column that reduces one quantity over one phase, or a quarter of it."""

    quantity: str
    phase: Phase
    reduce: Callable[[Any], Any]
    part: Part = "whole"


_COLUMNS = {
    "setup_process_bytes": _Column("process_bytes", "setup", max),
    "warmup_process_bytes": _Column("process_bytes", "warmup", max),
    "warmup_device_bytes": _Column("device_bytes", "warmup", max),
    "peak_process_bytes": _Column("process_bytes", "epoch", max),
    "peak_device_bytes": _Column("device_bytes", "epoch", max),
    "baseline_device_bytes": _Column("device_bytes", "baseline", lambda values: values[0]),
    "power_limit_w": _Column("power_limit_w", "epoch", min),
    "sm_clock_mhz": _Column("sm_clock_mhz", "epoch", median),
    "sm_clock_first_mhz": _Column("sm_clock_mhz", "epoch", median, "first"),
    "sm_clock_last_mhz": _Column("sm_clock_mhz", "epoch", median, "last"),
    "memory_clock_mhz": _Column("memory_clock_mhz", "epoch", median),
    "temperature_c": _Column("temperature_c", "epoch", max),
    "temperature_first_c": _Column("temperature_c", "epoch", median, "first"),
    "temperature_last_c": _Column("temperature_c", "epoch", median, "last"),
    "throttle_before": _Column("throttle", "baseline", _union),
    "throttle_during": _Column("throttle", "epoch", _union),
    "throttle_after": _Column("throttle", "evaluation", _union),
}
ENERGY = ("energy_j", "energy_source", "mean_power_w")
_NEIGHBOURS = ("neighbours", "neighbours_computing", "neighbours_drawing", "neighbours_late")
MONITORED = (*_COLUMNS, *ENERGY, *_NEIGHBOURS)
"""The fields of `Measurement` a monitor fills."""

_MEMORY = ("device_bytes", "process_bytes")


@dataclass
class Observation:
    """The result of a monitor.

    Every name of `MONITORED` is either in ``values`` or in ``missing`` with its reason; in the
    throttle columns and ``neighbours`` an empty string means that none was seen. ``verdict`` says
    why the measurement is invalid; empty if it is valid.
    """

    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""


@dataclass
class _Stay:
    """One stay in a phase: the reading at its start, and the later ones up to that at its end."""

    opened: Reading | None = None
    readings: list[Reading] = field(default_factory=list)
    ended: bool = False

    @property
    def all(self) -> list[Reading]:
        return [self.opened, *self.readings] if self.opened else self.readings

    @property
    def ends(self) -> tuple[Reading, Reading] | None:
        if not (self.ended and self.opened and self.readings):
            return None
        return self.opened, self.readings[-1]


@dataclass
class _Window:
    """A phase, with every stay in it, in order. A worker enters most phases once."""

    stays: list[_Stay] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)

    def open(self, reading: Reading | None) -> None:
        self.stays.append(_Stay(reading))

    def close(self, readings: Sequence[Reading]) -> None:
        self.add(readings, Depth.EDGE)
        self.stays[-1].ended = True

    def add(self, readings: Sequence[Reading], depth: Depth) -> None:
        for reading in readings:
            for quantity in _MEMORY:
                value = getattr(reading, quantity)
                if value is not None:
                    self.peaks[quantity] = max(value, self.peaks.get(quantity, 0))
        if depth > Depth.FAST:  # memory, read 67 times a second for hours, is kept only as its peak
            self.stays[-1].readings += readings

    @property
    def entered(self) -> bool:
        return bool(self.stays)

    @property
    def readings(self) -> list[Reading]:
        """All readings except those at the start of a stay."""
        return [reading for stay in self.stays for reading in stay.readings]

    def quarter(self, part: Part) -> list[Reading]:
        """Return the readings of a part of the phase; time between stays does not count."""
        moments: list[tuple[int, Reading]] = []
        passed = 0
        for stay in filter(lambda stay: stay.all, self.stays):
            start = stay.all[0].time_ns
            moments += [(passed + r.time_ns - start, r) for r in stay.all]
            passed = moments[-1][0]
        if part == "first":
            return [r for moment, r in moments if moment <= passed / 4]
        if part == "last":
            return [r for moment, r in moments if passed - moment <= passed / 4]
        return [r for _, r in moments]

    def values(self, quantity: str, part: Part = "whole") -> list[Any]:
        # memory at the opening edge is still that of the previous phase
        readings = self.readings if quantity in _MEMORY else self.quarter(part)
        values = [v for r in readings if (v := getattr(r, quantity)) is not None]
        return [*values, self.peaks[quantity]] if quantity in self.peaks else values


class Monitor:
    """A sampler of a device, from before the worker starts until after it has ended.

    The baseline is read when the monitor is created, so create it before the worker. Then `watch`
    the worker's pid, `enter` each phase as the worker reports it, and `close`. All of them may be
    called from any thread. As a context manager it stops sampling whatever happens.
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
        self._windows: dict[str, _Window] = {phase: _Window() for phase in get_args(Phase)}
        self._phase: str = "baseline"
        self._windows["baseline"].open(None)
        self._windows["baseline"].add(device.read(Depth.EDGE), Depth.EDGE)
        self._closed = False
        self._fault = ""
        self._thread = threading.Thread(target=self._sample, name="monitor", daemon=True)
        self._thread.start()

    def watch(self, pid: int) -> None:
        """Watch the worker, which has just started, and enter its set-up."""
        with self._lock:
            self._device.watch(pid)
        self.enter("setup")

    def enter(self, phase: Phase) -> None:
        """End the current phase and enter the next, with a full reading in between.

        Epoch and evaluation may be entered again, alternately, for each further epoch. Warm-up
        should end after its memory was freed, and the epoch right after its last synchronisation,
        as memory at the boundary counts for the phase that ends.
        """
        entered = self._windows[phase].entered
        if entered and (phase == self._phase or phase not in _REPEATED):
            raise ValueError(f"phase {phase!r} is entered a second time")
        with self._lock:
            readings = self._device.read(Depth.EDGE)
            self._windows[self._phase].close(readings)
            self._phase = phase
            self._windows[phase].open(readings[-1] if readings else None)

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
        if self._whole and not self._windows["epoch"].entered:
            self._windows["epoch"] = self._windows["warmup"]
        seen = Observation(notes=list(self._device.notes))
        if self._fault:
            seen.notes.append(f"sampling stopped early: {self._fault}")
        for name, column in _COLUMNS.items():
            values = self._windows[column.phase].values(column.quantity, column.part)
            if values:
                seen.values[name] = column.reduce(values)
            else:
                seen.missing[name] = self._why(column.quantity, column.phase)
        self._subtract_baseline(seen)
        for phase, bound in (("warmup", warmup_reserved_bytes), ("peak", reserved_bytes)):
            for kind in ("device", "process"):
                self._bound(seen, f"{phase}_{kind}_bytes", bound)
        self._energy(seen)
        if self._whole and measured_s is not None and "mean_power_w" in seen.values:
            seen.values["energy_j"] = seen.values["mean_power_w"] * measured_s
        doubts = [*self._throttling(seen), *self._neighbours(seen, allow_shared)]
        seen.verdict = "; ".join(doubts)
        return seen

    def stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        self._thread.join()
        self._windows[self._phase].add(self._device.read(Depth.EDGE), Depth.EDGE)
        self._device.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _sample(self) -> None:
        ticks = 0
        try:
            while not self._stop.wait(self._fast_s):  # always waits: a slow driver costs readings
                ticks += 1
                depth = Depth.FAST if ticks % self._slow_every else Depth.SLOW
                with self._lock:
                    self._windows[self._phase].add(self._device.read(depth), depth)
        except Exception as error:
            self._fault = repr(error)

    def _why(self, quantity: str, phase: Phase) -> str:
        if not self._windows[phase].entered:
            return f"{phase} was not reached"
        return self._device.why(quantity) or f"not read during {phase}"

    def _subtract_baseline(self, seen: Observation) -> None:
        baseline = seen.values.get("baseline_device_bytes")
        for name in ("warmup_device_bytes", "peak_device_bytes"):
            if name not in seen.values:
                continue
            raw = seen.values.pop(name)
            if baseline is None:
                seen.missing[name] = "no baseline: " + seen.missing["baseline_device_bytes"]
            elif raw < baseline:
                seen.missing[name] = "the card held less than its baseline: another process ended"
            else:
                seen.values[name] = raw - baseline

    def _bound(self, seen: Observation, name: str, bound: int | None) -> None:
        """Raise a sampled peak to the allocator's known peak."""
        sampled = seen.values.get(name)
        if sampled is None or bound is None or sampled >= bound:
            return
        baseline = seen.values.get("baseline_device_bytes") or 0
        total = self._device.total_bytes
        if total and baseline + bound > total:
            seen.notes.append(
                f"{name}: the allocator held {bound} B, more than the card had free: "
                "the driver spilled to host memory"
            )
        else:
            seen.values[name] = bound
            seen.notes.append(
                f"{name}: the allocator's {bound} B; readings saw {sampled} B, so a spike fell "
                "between them and the true peak is at least this"
            )

    def _energy(self, seen: Observation) -> None:
        """Fill the energy columns, summed over the stays in the epoch phase."""
        epoch = self._windows["epoch"]
        ends = [stay.ends for stay in epoch.stays]
        known = [pair for pair in ends if pair]
        if not known or len(known) < len(ends):
            reason = "epoch did not end" if epoch.entered else "epoch was not reached"
            seen.missing |= dict.fromkeys(ENERGY, reason)
            return
        seconds = sum(last.time_ns - first.time_ns for first, last in known) / 1e9
        counted = [(first.energy_j, last.energy_j) for first, last in known]
        gains = [b - a for a, b in counted if a is not None and b is not None]
        energy, source, doubt = None, "counter", ""
        if len(gains) < len(counted):
            doubt = self._device.why("energy_j") or "the counter was not read at both ends"
        elif min(gains) < 0:
            doubt = "the energy counter went backwards"
        elif not sum(gains):
            doubt = f"the energy counter did not move in {seconds:.3g} s"
        else:
            energy = sum(gains)
        if doubt:
            powers = [
                [(r.time_ns / 1e9, r.power_w) for r in stay.all if r.power_w is not None]
                for stay in epoch.stays
            ]
            number = sum(map(len, powers))
            if all(powers) and number > 1 and any(power for part in powers for _, power in part):
                energy = sum(
                    integrate(part, first.time_ns / 1e9, last.time_ns / 1e9)
                    for part, (first, last) in zip(powers, known, strict=True)
                )
                source = "integrated"
                seen.notes.append(f"energy integrated from {number} power readings: {doubt}")
        if energy is None or seconds <= 0:
            seen.missing |= dict.fromkeys(ENERGY, doubt or "the epoch took no time")
        else:
            seen.values |= dict(zip(ENERGY, (energy, source, energy / seconds), strict=True))

    def _throttling(self, seen: Observation) -> list[str]:
        readings = self._windows["epoch"].values("throttle")
        counts = Counter(name for names in readings for name in names)

        def those(effect: str) -> str:
            named = (
                f"{name} ({n} of {len(readings)} readings)"
                for name, n in counts.items()
                if EFFECTS.get(name, "unknown") == effect
            )
            return ", ".join(named)

        for effect, note in (
            ("capped", "power-capped during the epoch"),
            ("set", "clocks were limited by a setting"),
            ("unknown", "throttled for a reason this version does not know"),
        ):
            if those(effect):
                seen.notes.append(f"{note}: {those(effect)}")
        return [f"throttled during the epoch: {those('slowed')}"] if those("slowed") else []

    def _neighbours(self, seen: Observation, allow_shared: bool) -> list[str]:
        """Fill the neighbour columns; return the doubt, if any computed before the epoch ended."""
        during: dict[int, Process] = {}
        after: dict[int, Process] = {}
        known = False
        for phase, window in self._windows.items():
            found = after if phase == "evaluation" else during
            for reading in window.readings:
                known |= reading.others is not None
                for other in reading.others or ():
                    largest = found.get(other.pid, other)
                    found[other.pid] = max(largest, other, key=lambda p: p.bytes or 0)
        if not known:
            seen.missing |= dict.fromkeys(_NEIGHBOURS, self._why("others", "baseline"))
            return []
        everyone = after | during

        def those(processes: dict[int, Process], display: bool) -> str:
            return "; ".join(str(p) for p in processes.values() if p.display is display)

        if those(everyone, True):
            seen.notes.append(f"the card also drives a display: {those(everyone, True)}")
        late = {pid: p for pid, p in after.items() if pid not in during}
        seen.values |= {
            "neighbours": "; ".join(map(str, everyone.values())),
            "neighbours_computing": sum(not p.display for p in during.values()),
            "neighbours_drawing": sum(p.display for p in everyone.values()),
            "neighbours_late": sum(not p.display for p in late.values()),
        }
        if those(late, False):
            seen.notes.append(f"another process started after the epoch: {those(late, False)}")
        shared = those(during, False)
        if shared and allow_shared:
            seen.notes.append(f"the card was shared: {shared}")
        elif shared:
            return [f"the card was shared: {shared}"]
        return []


def integrate(powers: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Return the energy in J from ``start`` to ``end``, by the trapezoid rule. ``powers`` are one
    or more (time in s, power in W), in order of time and within the interval. The first one also
    holds from ``start`` on, and the last one up to ``end``."""
    points = [(start, powers[0][1]), *powers, (end, powers[-1][1])]
    return sum((t1 - t0) * (p0 + p1) / 2 for (t0, p0), (t1, p1) in pairwise(points))
