"""Reasons to doubt a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TYPE_CHECKING

from bench.case import Case
from bench.cores import RAISE_QUOTA, parse_cpu
from bench.data.loader import PREFETCH
from bench.gpu.nvml import EFFECTS
from bench.interval import estimate_repeats, find_half_width
from bench.limits import MIN_REPEATS, MOST_REPEATS, STEADY, STRAGGLES, is_shared
from bench.precision import (
    EMULATE_FP8,
    MOSTLY_LABELLED,
    PRECISIONS,
    Arithmetic,
    is_dynamic,
)
from bench.record import Status, describe_unmet
from bench.study.quantities import over
from bench.text import write_seconds

if TYPE_CHECKING:
    from bench.study.runs import Result, Run

    Runs = Sequence[Run]

NOISY_STEPS = 0.05
"""Step times are called noisy if their MAD is above this share of their median."""

FEW_STEPS = 4
"""With fewer measured steps than this, their spread says nothing."""

MOST_SKIPPED = 0.1
"""Skipping more than this share of the steps is reported: a dynamic scale that has settled skips
one in two thousand."""

SHORT_ENERGY_S = 2.0
"""An energy measured over fewer seconds is doubted: NVML's readings are 0.1 s apart, the first and
the last include power from before and after, and a card draws less power before it is warm. On an
H200, parts of 1.6 to 2.4 s drew 1 to 5 % less power than whole epochs, parts of 7.5 s and more at
most 1 %."""

LEAST_BUSY = 0.9
"""A GPU that runs kernels for less than this share of a step waits for the host. DPN-92 on an H100:
0.95 to 0.99 at batch sizes that fill it, 0.69 and 0.75 at batch size 128 in half precision."""

SPARE_HOST = "a larger --batch-size, --cuda-graphs on or --compile"

LEAST_KNOWN = 0.5
"""An epoch time is not known if half its 95 % interval is larger than this share of it."""


@dataclass(frozen=True)
class Trend:
    """Something that may change from the first quarter of an epoch to the last.

    ``most`` is the largest change that raises no doubt, as a share of the first quarter; ``noise``
    returns what is tolerated on top of it.
    """

    label: str
    first: str
    last: str
    most: float
    noise: Callable[[Run], float] = lambda run: 0.0
    signs: tuple[int, ...] = (1, -1)  # doubt a rise (1), a fall (-1) or both

    def measure(self, run: Run) -> float:
        """Return the change from the first quarter to the last; NaN where either is unknown."""
        return over(getattr(run, self.last), getattr(run, self.first)) - 1

    def find(self, run: Run) -> bool:
        """Return whether it changed by more than is tolerated."""
        change, believed = self.measure(run), self.most + self.noise(run)
        return any(sign * change > believed for sign in self.signs)

    def describe(self, runs: Runs) -> str:
        """Describe the largest change among the runs that changed too much; empty if none did."""
        changes = [self.measure(run) for run in runs if self.find(run)]
        if not changes:
            return ""
        largest = max(changes, key=abs)
        alike = len({change > 0 for change in changes}) == 1
        word = ("rose" if largest > 0 else "fell") if alike else "changed"
        most = "up to " if len(changes) > 1 else ""
        return f"{self.label} {word} by {most}{100 * abs(largest):.1f} %"


def _quarter_noise(run: Run) -> float:
    """Return the difference of the medians of two quarters of the steps due to noise, as a share.

    It is two standard errors of the difference of two medians. For a normal distribution, the
    standard error of a median is 1.2533 times that of a mean, and the standard deviation is 1.4826
    times the median absolute deviation.
    """
    noise = 2 * 1.2533 * 1.4826 * run.step_noise * over(2, run.measured_steps / 4) ** 0.5
    return noise if noise == noise else 0.0


TRENDS = (
    Trend("step times", "step_time_first_s", "step_time_last_s", STEADY, _quarter_noise),
    Trend("the SM clock", "sm_clock_first_mhz", "sm_clock_last_mhz", STEADY, signs=(-1,)),
)
"""Quantities that should be equal at both ends of an epoch, with the change that is tolerated."""


def _meets(effect: str) -> Callable[[Run], bool]:
    """Return a function that finds runs with a throttle reason of this effect."""
    reasons = re.compile("|".join(name for name, its in EFFECTS.items() if its == effect))
    return lambda run: bool(reasons.search(run.throttle_during))


def _measure_error(run: Run) -> float:
    """Return half the 95 % interval of the epoch time within the run, as a share of it."""
    return over((run.epoch_time_high_s - run.epoch_time_low_s) / 2, run.epoch_time_s)


def _is_short(run: Run) -> bool:
    """Find parts of an epoch of too few steps to estimate noise; a run that ``--until`` ended has
    measured its own."""
    return run.measured_steps < FEW_STEPS and run.part < 1 and not run.ended


def _is_ahead(run: Run) -> bool:
    """Find parts of an epoch most of which may have used batches that the DataLoader's workers had
    prepared before: an epoch may wait longer for it."""
    ahead = 2 * run.workers * PREFETCH / run.accumulate
    return bool(run.measured_steps < min(run.steps_per_epoch, ahead))


def _describe_unknown_time(runs: Runs) -> str:
    """Describe the least certain run, and the lower bound of its epoch time if it was profiled."""
    errors = [(run.epoch_time_error, _measure_error(run), -1.0) for run in runs]
    least = [next(error for error in known if error == error) for known in errors]
    worst, floor = max(zip(least, (run.busy_epoch for run in runs), strict=True))
    if worst < 0:
        return f"down to {min(run.measured_steps for run in runs):.0f} steps"
    said = f"±{100 * worst:.2g} %" if worst < 1 else "not known within 100 %"
    return f"{said}; the GPU's kernels alone take {write_seconds(floor)}" if floor > 0 else said


def _quote(column: str) -> Callable[[Runs], str]:
    return lambda runs: _list_reasons(getattr(run, column) for run in runs)


def _list_reasons(texts: Iterable[str]) -> str:
    said = list(dict.fromkeys(text for text in texts if text))
    more = f"; and {len(said) - 3:,} other reasons" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def _name_longer(runs: Runs, whole: str = "--epochs") -> str:
    """Name the flags that make these runs measure longer, such as ``a larger --steps or --epochs``.
    ``whole`` is the flag for runs that measured whole epochs; empty for none."""
    said = {
        "--fraction": any(r.part < 1 and not (r.cut_by_steps or r.ended) for r in runs),
        "--steps": any(run.cut_by_steps for run in runs),
        whole: any(run.part == 1 for run in runs),
    }
    larger = " or ".join(flag for flag, needed in said.items() if flag and needed)
    smaller = "a smaller --until" if any(run.ended for run in runs) else ""
    return " or ".join(filter(None, [larger and f"a larger {larger}", smaller]))


def _measure_longer(before: str, after: str) -> Callable[[Runs], str]:
    return lambda runs: f"{before} {_name_longer(runs)}{after}"


def _measure_more(runs: Runs) -> str:
    fewer = ", fewer --workers" if any(map(_is_ahead, runs)) else ""
    return f"Use {_name_longer(runs)}{fewer}, or close other programs."


REPEAT = "{repeat}"
"""Stands in a remedy for the end of a sentence that `advise_repeats` writes."""

FEWEST_ADVISED = 5
"""Fewest repeats that are advised: their range holds the median of as many more in 83 % of
sweeps."""


def advise_repeats(cases: Iterable[Sequence[float]]) -> str:
    """Return the end of a sentence that advises to repeat cases, given by the times of their runs:
    as often as would tell the time of each within ±`STEADY`, counted as bench.compare does."""
    needed, most = float(FEWEST_ADVISED), 0
    for times in cases:
        most = max(most, len(times))
        if len(times) > 1:
            reach = find_half_width([(variance(times), len(times))]) / fmean(times)
            needed = max(needed, estimate_repeats(reach, STEADY, len(times)))
    if math.isinf(needed):
        return f"; --repeats {MOST_REPEATS} would not tell them within ±{100 * STEADY:.0f} %"
    return f", or use --repeats {max(int(needed), most + 2)} or more"


def _lengthen_for_energy(runs: Runs) -> str:
    # no more epochs: the sensor is read at both ends of each, so each would be as short
    longer = _name_longer(runs, whole="")
    whole = any(run.part == 1 for run in runs)
    more = "more --repeats, which show the error of whole epochs" * whole
    return f"Use {', or '.join(filter(None, [longer, more]))}."


def _find_straggler(runs: Runs) -> str:
    shown = "See its rank in ranks.csv; python -m bench.doctor shows what else uses the"
    if not any(run.device == "cuda" for run in runs):
        return f"{shown} CPU."
    return (
        f"{shown} GPUs and the CPU, and nvidia-smi -q -d PERFORMANCE,TEMPERATURE whether one of "
        "them is slowed."
    )


def _steady(runs: Runs) -> str:
    """Advise how to make step times vary less; steps that wait for the host vary with it."""
    cores = [parse_cpu(run.cpu or "")[1] for run in runs if run.device == "cpu"]
    if any(allowed is not None and allowed < 1 for allowed in cores):
        return (
            "A CPU quota stops each step for a part of its time: raise it to a core or more, by "
            f"{RAISE_QUOTA}."
        )
    bound = {run.host_bound for run in runs}
    if bound == {True}:
        return f"Use {SPARE_HOST}."
    waiting = f"; where a step waits for the host, {SPARE_HOST}" if True in bound else ""
    return f"Close other programs{REPEAT}{waiting}."


def _use_setting(runs: Runs) -> str:
    return (
        f"{' and '.join(dict.fromkeys(run.unaffected for run in runs))} changed no loss: see "
        "whether the network, its loss and its optimizer use it; that of a --workload is given the "
        "lr in build_optimizer."
    )


def _list_unknown(runs: Runs) -> str:
    return " and ".join(dict.fromkeys(run.executor for run in runs if run.kind == "unknown"))


def _describe_foreign(runs: Runs) -> str:
    said = []
    if any(run.kind == "published" for run in runs):
        said.append(
            "Of what was published, each is the cold first epoch of a process, while a sweep times "
            "a warm one"
        )
    if unknown := _list_unknown(runs):
        what = "These rows" if not said else "Others"
        said.append(f"{what} come from the {unknown} executor, which this version does not know")
    return ". ".join(said)


def _mend_foreign(runs: Runs) -> str:
    said = []
    if any(run.kind == "published" for run in runs):
        said.append("python -m bench.sweep --preset rtx-titan measures the same cases here.")
    if unknown := _list_unknown(runs):
        said.append(
            f"Read them with the version that wrote them, or measure without --executor {unknown}."
        )
    return " ".join(said)


def _use_cifar10(runs: Runs) -> str:
    given = [f"--{n}" for n in ("input", "classes") if any(getattr(run, n) for run in runs)]
    without = f" without {' and '.join(given)}" if given else ""
    return f"Use --dataset cifar10{without} to train on them."


def _measure_whole(runs: Runs) -> str:
    said = {
        "--fraction 1": any(run.fraction < 1 for run in runs),
        "--steps none": any(run.cut_by_steps for run in runs),
        "--until none": any(run.ended for run in runs),
    }
    flags = " and ".join(flag for flag, needed in said.items() if needed)
    return f"Use {flags} to measure whole epochs."


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt a run.

    A ``fatal`` doubt keeps a case from being called the fastest. ``fix`` is a sentence with the
    flag or command that helps, or writes one for the doubted runs; ``detail`` adds their details.
    """

    name: str
    remark: str  # beside the row
    warning: str | Callable[[Runs], str]  # at the top
    fix: str | Callable[[Runs], str]
    find: Callable[[Run], bool]
    fatal: bool = True
    detail: Callable[[Runs], str] = lambda runs: ""

    def advise(self, runs: Runs, repeat: str | None = None) -> str:
        """Return how to fix the measurement of these runs, all of which have this doubt. How often
        to ``repeat`` their cases is by default said without knowing their spread."""
        fix = self.fix if isinstance(self.fix, str) else self.fix(runs)
        return fix.replace(REPEAT, advise_repeats([]) if repeat is None else repeat)

    def warn(self, runs: Runs) -> str:
        """Return the warning about these runs, with its details."""
        detail = self.detail(runs)
        said = self.warning if isinstance(self.warning, str) else self.warning(runs)
        return f"{said}{f' ({detail})' if detail else ''}."


_ALL = (
    Doubt("invalid", "invalid",
          "The measurement failed a check and cannot be trusted",
          "Remove the cause, then run them again with --retry invalid.",
          lambda r: r.status == Status.INVALID, detail=_quote("reason")),
    Doubt("emulated", "emulated",
          "fp8 was emulated on a CPU, so time and memory say nothing about a GPU",
          f"Measure --precision fp8 on a GPU, without {EMULATE_FP8}.",
          lambda r: PRECISIONS[r.precision].float8 and r.timed and r.device == "cpu"),
    Doubt("diverged", "diverged",
          "The loss became inf or NaN; time and memory are still valid",
          "Use a lower --lr or, for a static loss scale, --loss-scale dynamic.",
          lambda r: r.status == Status.DIVERGED),
    Doubt("throttled", "throttled",
          "The GPU lowered its clocks to protect itself",
          "Improve the cooling (nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows the reason), then "
          "run them again with --retry invalid.",
          _meets("slowed"), detail=_quote("throttle_during")),
    Doubt("capped", "power cap",
          "The GPU ran at its power limit, so its times depend on that limit",
          "Compare only with runs at the same limit, which nvidia-smi -q -d POWER shows.",
          _meets("capped"), fatal=False),
    # only processes that computed during the epoch count: no desktop, none that came later
    Doubt("contended", "shared",
          "Another program used the device or the cores of the run",
          f"Close other programs{REPEAT}.",
          lambda r: is_shared(r.neighbours_computing, r.other_cores), detail=_quote("neighbours")),
    Doubt("beside", "beside other lanes",
          "Cases ran beside other lanes, with which they share power, cooling and the CPU: alone "
          "they may take less time, and a speed-up over one of them may be too high",
          "Use --lanes 1 with another --out: it runs one case at a time.",
          lambda r: r.lanes_beside > 0, fatal=False),
    Doubt("noisy", "noisy",
          "Step times did not settle during warm-up, or vary by more than "
          f"{100 * NOISY_STEPS:.0f} % around their median",
          _steady,
          lambda r: (not r.warmup_steady and r.warmup_steps == r.warmup_steps)
          or r.step_noise > NOISY_STEPS),
    Doubt("trend", "trend",
          "Speed changed between the first and the last quarter of the measured steps",
          _measure_longer("Use", f"{REPEAT}."),
          lambda r: any(trend.find(r) for trend in TRENDS),
          detail=lambda r: "; ".join(filter(None, (trend.describe(r) for trend in TRENDS)))),
    Doubt("unknown", "epoch not known",
          "The measured steps are too few, vary too much, or used batches that a loader had "
          "prepared before, to know the time of an epoch as well as --until asks, or within "
          f"{100 * LEAST_KNOWN:.0f} %",
          _measure_more,
          lambda r: r.missed or _measure_error(r) > LEAST_KNOWN or _is_short(r) or _is_ahead(r),
          detail=_describe_unknown_time),
    Doubt("host_bound", "host-bound",
          f"The GPU ran kernels for less than {100 * LEAST_BUSY:.0f} % of a step and waited "
          "for the host, so these times say little about the GPU",
          f"Use {SPARE_HOST}; python -m bench.why shows what it waited for.",
          lambda r: r.busy_share < LEAST_BUSY, fatal=False,
          detail=lambda runs: f"down to {100 * min(run.busy_share for run in runs):.0f} %"),
    Doubt("unsettled", "not settled",
          "Steps waited for the host and did not settle: another run may take another time, and "
          f"with fewer than {MIN_REPEATS} runs nothing is compared with it",
          f"Use {SPARE_HOST}.",
          lambda r: r.host_bound and (r.noisy or r.trend or r.unknown)),
    Doubt("unclear", "unclear arithmetic",
          "Which arithmetic ran is not certain: the numeric probe failed, or found a rounding "
          "error between those of two number formats, or the network ran a part of its FLOP in "
          "another format than the label's",
          "The columns missing, proof_layer, *_error and labelled_flop_share of the records show "
          "why; a smaller --batch-size leaves memory for the probe, and with --cudnn-benchmark on "
          "or off cuDNN may choose another algorithm.",
          # flags are read back right before the probe
          lambda r: Arithmetic.UNCLEAR in r.arithmetic.split("/")
          or (r.flags != "" and r.arithmetic == "" and r.command == "")
          or r.labelled_flop_share < MOSTLY_LABELLED, fatal=False),
    Doubt("switched_late", "switches changed",
          "The user's code set torch's switches within steps, so that these runs may not be what "
          "their axes say",
          "Set them nowhere but by flags, such as --precision and --cudnn-benchmark.",
          lambda r: r.switched_within != "", detail=_quote("switched_within")),
    Doubt("unmet", "not all done",
          "What was asked for beside training failed",
          lambda runs: f"{_list_reasons(describe_unmet(run.missing) for run in runs)}. Remove the "
          "cause, of which the logs in the folder tell more, then run them again with --retry ok.",
          lambda r: describe_unmet(r.missing) != "", fatal=False),
    Doubt("skipped", "steps skipped",
          f"More than {100 * MOST_SKIPPED:.0f} % of the steps were skipped because their "
          "gradients overflowed, so that less was learnt",
          _measure_longer("Use a smaller static --loss-scale, or", ": a dynamic scale settles."),
          lambda r: is_dynamic(r.loss_scale)
          and over(r.overflow_steps, r.measured_steps) > MOST_SKIPPED, fatal=False),
    Doubt("without_effect", "no effect",
          "With another value of a setting, and the same seed, all losses were the same to the "
          "last digit, so it had no effect",
          _use_setting, lambda r: r.unaffected != "", fatal=False, detail=_quote("unaffected")),
    Doubt("straggling", "straggler",
          f"One of the processes worked more than {100 * STRAGGLES:.0f} % longer than the "
          "median of the others, and all waited for it",
          _find_straggler,
          lambda r: r.straggle > STRAGGLES, fatal=False),
    Doubt("beyond", "beyond the data sheet",
          "More FLOP or bytes a second than the data sheet of the card allows, which are left "
          "out: the data come from a cache, or the times are wrong",
          "Use a larger --batch-size, and check the times: python -m benchmarks.overhead "
          "measures a case beside a bare loop.",
          # compiled code moves less than is counted
          lambda r: r.of_peaks > 1 or (r.of_bandwidth > 1 and r.compile == Case.compile),
          fatal=False),
    Doubt("energy", "short energy",
          f"Energy was measured over less than {SHORT_ENERGY_S:.0f} s, too short for the "
          "sensor, and for the card to become as warm as in an epoch",
          _lengthen_for_energy,
          # per epoch: the sensor is read at both ends of each
          lambda r: r.energy_j == r.energy_j and r.measured_time_s < SHORT_ENERGY_S * r.epochs,
          fatal=False),
    Doubt("extrapolated", "extrapolated",
          "Only part of an epoch was measured; figures of whole ones, marked ≈, are extrapolated",
          _measure_whole,
          lambda r: r.part < 1 and r.timed and r.command == "", fatal=False),
    Doubt("synthetic", "synthetic images",
          "Loss and accuracy say nothing about real images",
          _use_cifar10,
          lambda r: r.dataset == "synthetic" and r.timed, fatal=False),
    Doubt("foreign", "not measured by this harness", _describe_foreign, _mend_foreign,
          lambda r: r.kind != "measured", fatal=False),
)  # fmt: skip

DOUBTS: dict[str, Doubt] = {doubt.name: doubt for doubt in _ALL}

SAID_BELOW = ("extrapolated", "synthetic", "foreign")
"""Doubts that are reported below the tables or marked at each number, not beside each row."""


def list_below(results: Sequence[Result]) -> list[str]:
    """Return the doubts that are reported below the tables for these. Some rows of an unknown
    executor among others are marked each."""
    marked = "unknown" in {r.kind for r in results} and not all(r.foreign for r in results)
    return [name for name in SAID_BELOW if not (marked and name == "foreign")]
