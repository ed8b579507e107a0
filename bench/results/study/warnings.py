"""Warnings about a run: when each applies, and what helps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.base.limits import (
    BUSY_CORES,
    LEAST_BUSY,
    MIN_REPEATS,
    STEADY,
    VARIES,
    waits_for_host,
)
from bench.base.text import count, name_first, write_percent
from bench.machine.nvml import EFFECTS
from bench.networks.data.loader import PREFETCH
from bench.networks.workloads import OWN
from bench.results.store.rows import Row
from bench.results.study.quantities import over
from bench.results.study.remedies import (
    LONGER,
    MORE_REPEATS,
    QUIETER,
    SPARE_HOST,
    Remedy,
    Way,
    is_whole,
    say,
)
from bench.schema.case import Case
from bench.schema.precision import EMULATE_FP8, MOSTLY_LABELLED, PRECISIONS, Arithmetic
from bench.schema.record import MEASURED, RELIABLE, Status, describe_unmet, read_missing

NOISY_STEPS = 0.05
"""Step times are called noisy if their MAD is above this share of their median."""

FEW_STEPS = 4
"""With fewer measured steps than this, their spread says nothing."""

SHORT_ENERGY_S = 7.5
"""An energy over fewer seconds has a warning: NVML's readings are 0.1 s apart, the first and the
last include power from before and after, and a card draws less power before it is warm. On an
H200, parts of 1.6 to 2.4 s drew 1 to 5 % less power than whole epochs, parts of 7.5 s and more at
most 1 %."""

LEAST_ENERGY_S, READS_LOW = 1.6, 0.05
"""The fewest seconds of which is known how much too low such an energy may be, and how much."""


def bound_energy(run: Any) -> float:
    """Return the most that an epoch's energy may be, in J; NaN where that is not known."""
    seconds = run.measured_time_s / run.epochs
    low = READS_LOW if seconds < SHORT_ENERGY_S else 0.0
    return float((1 + low) * run.energy_per_epoch_j) if seconds >= LEAST_ENERGY_S else math.nan


SLOW_STEP = 1.2
"""A step that takes more than this many median ones is slow. Of 40 steps of an H100 four took 1.3
to 1.5, which added 3 % to the time, while half of all steps were within 0.05 % of the median."""

LEAST_KNOWN = 0.5
"""An epoch time is not known if half its 95 % interval is larger than this share of it."""


def _has_unlike_steps(run: Row) -> bool:
    """Return whether the steps of a script had other numbers of items, such as tokens, each: then
    they take other times."""
    return run.command is not None and run.unit == "items" and math.isnan(run.step_items)


def has_trend(run: Row) -> bool:
    """Return whether steps or the SM clock changed from the first quarter of an epoch to the last,
    by more than `STEADY` and the noise of the steps.

    The noise is two standard errors of the difference of two medians. For a normal distribution,
    the standard error of a median is 1.2533 times that of a mean, and the standard deviation is
    1.4826 times the median absolute deviation.
    """
    noise = 2 * 1.2533 * 1.4826 * run.step_noise * over(2, run.measured_steps / 4) ** 0.5
    slower = over(run.step_time_last_s, run.step_time_first_s) - 1
    clock = over(run.sm_clock_last_mhz, run.sm_clock_first_mhz) - 1
    sinks = abs(slower) > STEADY + (noise if noise == noise else 0.0)
    return bool(clock < -STEADY or (sinks and not _has_unlike_steps(run)))


def _has_slow_steps(run: Row) -> bool:
    """Return whether slow steps, which the median absolute deviation does not see, made the
    measured time longer by more than `STEADY` than median steps take."""
    longer = over(over(run.measured_time_s, run.measured_steps), run.step_time_median_s) - 1
    slow = run.step_time_max_s > SLOW_STEP * run.step_time_median_s
    return bool(slow and longer > STEADY and not (run.noisy or _has_unlike_steps(run)))


def _is_noisy(run: Row) -> bool:
    """Return whether steps vary, or have a trend, or did not settle in the warm-up and are too few
    to show whether they did since, or leave the epoch time less certain than ``--until`` asks, and
    than `STEADY`, or than `LEAST_KNOWN`. Steps with other numbers of items vary without
    noise."""
    untold, unlike = math.isnan(run.step_time_first_s), _has_unlike_steps(run)
    unsteady = untold and not run.warmup_steady and run.warmup_steps == run.warmup_steps
    missed = run.until is not None and run.epoch_time_error > max(run.until, STEADY)
    error = over((run.epoch_time_high_s - run.epoch_time_low_s) / 2, run.epoch_time_s)
    varies = (run.step_noise > NOISY_STEPS or unsteady) and not unlike
    noisy = missed or error > LEAST_KNOWN or varies or has_trend(run)
    return bool(noisy and run.status in MEASURED)


def _is_unknown(run: Row) -> bool:
    """Return whether the epoch time, which a run that failed has none of, is of too few steps to
    tell, or of batches that the DataLoader's workers may have prepared before: an epoch may wait
    longer for it."""
    short = run.measured_steps < FEW_STEPS and run.part < 1 and run.until is None
    ahead = 2 * run.workers * PREFETCH / run.accumulate
    few = short or run.measured_steps < min(run.steps_per_epoch, ahead)
    return bool(few and run.status in MEASURED)


def _meets(effect: str) -> Callable[[Row], bool]:
    """Return a function that finds runs with a throttle reason of this effect."""
    reasons = re.compile("|".join(name for name, its in EFFECTS.items() if its == effect))
    return lambda run: bool(reasons.search(run.throttle_during))


def _is_ours(run: Any) -> bool:
    return run.case.command is None


def _scales_statically(run: Any) -> bool:
    return isinstance(run.case.loss_scale, float)


@dataclass(frozen=True)
class WarningRule:
    """A warning about runs.

    A ``fatal`` warning keeps a case from being called the fastest, but ``chance``, which changes
    one run and another in its own way, does so only until `MIN_REPEATS` runs tell how much: then it
    is in their interval. ``fix`` is the flag or command that helps, by the sentence, as far as a
    run can have it; ``detail`` returns what a run says of it, and where it is ``telling`` that
    stands in place of the remark."""

    name: str
    remark: str  # beside the row
    warning: str  # at the top
    fix: Remedy
    find: Callable[[Row], bool]
    fatal: bool = True
    chance: bool = False
    detail: Callable[[Row], str] = lambda run: ""
    telling: bool = False

    def label(self, runs: Sequence[Row]) -> str:
        """Return its name above the tables."""
        details = [*filter(None, dict.fromkeys(map(self.detail, runs)))]
        return name_first(details, 2, "; ") if self.telling and details else self.remark

    def mark(self, run: Row) -> str:
        """Return its name beside a row."""
        name = self.detail(run).partition(":")[0] if self.telling else ""
        return name or self.remark

    def forbids(self, repeats: int) -> bool:
        """Return whether it forbids to rely on a time of so many runs."""
        return self.fatal and not (self.chance and repeats >= MIN_REPEATS)

    def warn(self, runs: Sequence[Row]) -> str:
        """Return the warning about these runs, with its details."""
        details = [] if self.telling else [*filter(None, dict.fromkeys(map(self.detail, runs)))]
        detail = f" ({name_first(details, 3, '; ')})" if details else ""
        return f"{self.warning}{detail}."


_ALL = (
    WarningRule("carried", "went on",
          "A run read files that an earlier one had written: it may have gone on from there, or "
          "had less to do",
          say("Put {out} in --command where it writes, which is a folder that each run has for "
              "itself; if it keeps a cache, run the command once before the sweep, with a new "
              "--out."),
          lambda r: r.carried != "", detail=lambda r: r.carried and f"went on: {r.carried}",
          telling=True),
    WarningRule("invalid", "invalid",
          "The measurement failed a check and cannot be trusted",
          say("Remove the cause, then run them again with --retry invalid."),
          lambda r: r.status == Status.INVALID,
          detail=lambda r: f"invalid: {r.reason}" if r.status == Status.INVALID else "",
          telling=True),
    WarningRule("emulated", "emulated",
          "fp8 was emulated on a CPU, so time and memory say nothing about a GPU",
          say(f"Measure --precision fp8 on a GPU, without {EMULATE_FP8}."),
          lambda r: PRECISIONS[r.precision].float8 and r.timed and r.device == "cpu"
          and r.command is None),
    WarningRule("diverged", "diverged",
          "The loss became inf or NaN; time and memory are still valid",
          Remedy("Use", (Way("a lower --lr"), Way("--loss-scale dynamic", _scales_statically)),
                 "Let the script use a lower learning rate."),
          lambda r: r.status == Status.DIVERGED),
    WarningRule("throttled", "throttled",
          "The GPU lowered its clocks to protect itself",
          say("Improve the cooling (nvidia-smi -q -d PERFORMANCE,TEMPERATURE shows the reason), "
              "then run them again with --retry invalid."),
          _meets("slowed"), detail=lambda r: r.throttle_during),
    WarningRule("capped", "power cap",
          "The GPU ran at its power limit, so its times depend on that limit",
          say("Compare only with runs at the same limit, which nvidia-smi -q -d POWER shows."),
          _meets("capped"), fatal=False),
    WarningRule("uneven", "other steps",
          "Repeats of one setting took other numbers of steps: a later one may go on from what an "
          "earlier one left, and none of them is compared",
          say("Let each run begin anew, or end all after as many steps by --steps."),
          lambda r: r.steps_apart != "", detail=lambda r: r.steps_apart, telling=True),
    WarningRule("mislabelled", "other batch size",
          "Steps had another number of items than their batch size says, so these rows are not "
          "compared",
          say("Let the script keep the batch size that it is given; if that is of a micro-batch, "
              "give it by --vary."),
          lambda r: r.items_apart != "", detail=lambda r: r.items_apart, telling=True),
    # only processes that computed during the epoch count: no desktop, none that came later
    WarningRule("contended", "shared",
          "Another program used the device or the cores of the run",
          say("Close other programs, and measure again with a new --out."),
          lambda r: r.neighbours_computing > 0 or r.other_cores > BUSY_CORES,
          detail=lambda r: r.neighbours),
    WarningRule("beside", "beside other lanes",
          "Cases ran beside other lanes, with which they share power, cooling and the CPU: alone "
          "they may take less time, and a speed-up over one of them may be too high",
          say("Use --lanes 1 with another --out: it runs one case at a time."),
          lambda r: r.lanes_beside > 0, fatal=False),
    WarningRule("noisy", "noisy",
          f"Step times vary by more than {100 * NOISY_STEPS:.0f} % around their median, they or "
          f"the SM clock drift by more than {100 * STEADY:.0f} % from the first quarter to the "
          "last, they did not settle during warm-up and are too few to show that they did since, "
          f"or they tell the time of an epoch neither as well as --until asks nor within "
          f"{100 * LEAST_KNOWN:.0f} %",
          QUIETER, _is_noisy, chance=True),
    WarningRule("memory_varies", "memory varies",
          f"The memory of repeats differs by more than {100 * VARIES:.0f} %: on a CPU the C "
          "library keeps freed memory for later, in one run more than in another",
          Remedy("", (Way("plan with the upper end of its range,"), MORE_REPEATS)),
          lambda r: r.memory_varies, fatal=False),
    WarningRule("slow_steps", "slow steps",
          f"Slow steps, of more than {SLOW_STEP:g} times the median one, made the measured time "
          f"longer by more than {100 * STEADY:.0f} %; another run may have more of them, or fewer",
          QUIETER, _has_slow_steps, fatal=False),
    WarningRule("unknown", "time not known",
          f"The measured steps are fewer than {FEW_STEPS}, or used batches that a loader had "
          "prepared before, so that an epoch may take another time",
          # fewer workers prepare less, of which no more than a few steps are too few all the same
          Remedy("Use", (*LONGER, Way("fewer --workers", lambda r: r.case.workers > 0
                                      and r.measured_steps >= FEW_STEPS)),
                 "Let the script take more steps."),
          _is_unknown),
    WarningRule("host_bound", "host-bound",
          f"The GPU ran kernels for less than {100 * LEAST_BUSY:.0f} % of a step and waited "
          "for the host, so these times say little about the GPU",
          Remedy("Use", SPARE_HOST, end="; python -m bench.why shows what it waited for."),
          lambda r: waits_for_host(r.busy_step_s, r.step_time_median_s), fatal=False),
    WarningRule("unsettled", "not settled",
          "Steps waited for the host and did not settle: another run may take another time, and "
          f"with fewer than {MIN_REPEATS} runs nothing is compared with it",
          Remedy("Use", SPARE_HOST),
          lambda r: r.host_bound and (r.noisy or r.unknown), chance=True),
    WarningRule("unclear", "unclear arithmetic",
          "Which arithmetic ran is not certain: the numeric probe failed, or found a rounding "
          "error between those of two number formats, or the network ran a part of its FLOP in "
          "another format than the label's, or the user's code set torch's switches within steps",
          Remedy("The columns missing, proof_layer, *_error, labelled_flop_share and "
                 "switched_within of the records show why;",
                 (Way("a smaller --batch-size", _is_ours),),
                 "For a --command, bench.report --full says which of these it is.",
                 " leaves memory for the probe."),
          # flags are read back right before the probe
          lambda r: Arithmetic.UNCLEAR in r.arithmetic.split("/")
          or (r.flags != "" and r.arithmetic == "" and r.command is None)
          or r.labelled_flop_share < MOSTLY_LABELLED or r.switched_within != "", fatal=False,
          detail=lambda r: r.switched_within or (
              f"{write_percent(r.labelled_flop_share)} of the FLOP in the label's format"
              if r.labelled_flop_share < MOSTLY_LABELLED else "")),
    WarningRule("compiled", "compiles itself",
          "The user's own code calls torch.compile, so that compile off says nothing of what it "
          "compiles",
          Remedy("Return the network as it is written, and use", (Way("--compile"),)),
          lambda r: r.compiled_within > 0, fatal=False,
          detail=lambda r: count(int(r.compiled_within), "graph")),
    WarningRule("recompiled", "compiled again",
          "Code was compiled within measured steps, whose time holds it, as for batches of other "
          "shapes than in the warm-up, or more often than torch allows, after which it runs as "
          "written",
          Remedy("Use", (Way("--dynamic on"),),
                 "If an optimizer or your own code calls torch.compile, have it called with "
                 "dynamic=True, and let the first steps run all that later ones do."),
          lambda r: r.epoch_recompilations > 0 or r.uncompiled > 0,
          detail=lambda r: "not compiled any more" if r.uncompiled > 0 else
          count(int(r.epoch_recompilations), "time")),
    WarningRule("unproven", "label unproven",
          "Whether a command ran in the number format of its label was not looked at",
          say("Call bench.step in the script, as docs/own-script.md says: the operations of a step "
              "are then counted, but for compiled ones and those of other libraries."),
          lambda r: r.command is not None and r.precision != OWN and r.status in RELIABLE
          and math.isnan(r.labelled_flop_share), fatal=False,
          detail=lambda r: read_missing(r.missing).get("labelled_flop_share", "")),
    WarningRule("unmet", "not all done",
          "What was asked for beside training failed",
          say("Remove the cause, of which the logs in the folder tell more, then run them again "
              "with --retry ok."),
          lambda r: describe_unmet(r.missing) != "", fatal=False,
          detail=lambda r: describe_unmet(r.missing), telling=True),
    WarningRule("beyond", "beyond the data sheet",
          "More FLOP or bytes a second than the data sheet of the card allows, which are left "
          "out: the data come from a cache, or the times are wrong",
          Remedy("Use", (Way("a larger --batch-size", _is_ours),),
                 "Look whether the script calls bench.step once a step, after the optimizer's.",
                 ", and check the times: in a checkout python -m benchmarks.overhead measures a "
                 "case beside a bare loop."),
          # compiled code moves less than is counted
          lambda r: r.of_peaks > 1 or (r.of_bandwidth > 1 and r.compile == Case.compile),
          fatal=False),
    WarningRule("energy", "short energy",
          f"Energy was measured over less than {SHORT_ENERGY_S:g} s, too short for the "
          "sensor, and for the card to become as warm as in an epoch",
          # no more epochs or repeats: the sensor is read at both ends of each, which is as short
          Remedy("Use", (*LONGER, Way("its energy as a lower bound, where a whole epoch takes no "
                                      "longer", is_whole)),
                 "Let the script take more steps."),
          lambda r: not math.isnan(r.energy_j) and r.measured_time_s < SHORT_ENERGY_S * r.epochs,
          fatal=False),
    WarningRule("extrapolated", "extrapolated",
          "Only part of an epoch was measured; figures of whole ones, marked ≈, are extrapolated",
          say("Use --fraction 1 without --steps and --until to measure whole epochs."),
          lambda r: r.part < 1 and r.timed and r.command is None, fatal=False),
    WarningRule("synthetic", "synthetic data",
          "Loss and accuracy say nothing about real data",
          Remedy("use", (Way("--dataset cifar10 without --input and --classes"),
                         Way("a --workload of your own"))),
          lambda r: r.dataset == "synthetic" and r.timed, fatal=False),
    WarningRule("foreign", "not measured by this harness",
          "These are published figures, each the cold first epoch of a process where a sweep times "
          "a warm one, or come from an executor that this version does not know",
          say("python -m bench.sweep measures here; --preset rtx-titan the published cases."),
          lambda r: r.kind != "measured", fatal=False),
)  # fmt: skip

WARNINGS: dict[str, WarningRule] = {warning.name: warning for warning in _ALL}

SAID_BELOW = ("extrapolated", "synthetic", "foreign", "memory_varies")
"""Warnings that are reported with the tables or marked at each number, not beside each row."""
