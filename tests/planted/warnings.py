"""A sweep in which every warning is to be had, and beside each what is none; and every outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.schema.case import Case
from bench.schema.record import Status
from tests.planted.records import Row, make_card, make_record, ran


class Planted(NamedTuple):
    """Axes and measurements of a run, and the warnings of it."""

    warnings: str
    values: Mapping[str, Any]
    axes: Mapping[str, Any] = MappingProxyType({})


HALF_WAY = {"step_time_median_s": 0.1, "step_time_mad_s": 0.004, "measured_steps": 40}
AHEAD = {"loader": "torch", "workers": 4}
PART = {"measured_steps": 40, "steps_per_epoch": 400}

WARNED = {
    "sound": Planted("", {}),
    "foreign": Planted("foreign", {"executor": "x"}),
    "published": Planted("foreign", {"executor": "published"}),
    "invalid": Planted("invalid", {"status": Status.INVALID, "reason": "mislabelled"}),
    "diverged": Planted("diverged", {"status": Status.DIVERGED}),
    "slowed": Planted("throttled", {"throttle_during": "hardware thermal slowdown"}),
    "capped": Planted("capped", {"throttle_during": "software power cap"}),
    "shared_card": Planted("contended", {"neighbours": "pid 1: 5 B", "neighbours_computing": 1}),
    "shared_cores": Planted("contended", {"other_cores": 0.5}),
    "a_desktop": Planted("", {"neighbours": "pid 1 (Xorg): 5 B", "neighbours_computing": 0}),
    "lanes": Planted("beside", {"lanes_beside": 3}),
    "warmup": Planted("noisy", {"warmup_steady": False}),
    "no_warmup": Planted("", {"warmup_steps": None, "warmup_steady": None}),
    "steps": Planted("noisy", {"step_time_median_s": 0.1, "step_time_mad_s": 0.006}),
    "slower": Planted("noisy", {"step_time_first_s": 0.100, "step_time_last_s": 0.103}),
    "faster": Planted("noisy", {"step_time_first_s": 0.103, "step_time_last_s": 0.100}),
    "steady": Planted("", {"step_time_first_s": 0.100, "step_time_last_s": 0.1015}),
    # forty noisy steps: the means of ten differ by as much without any trend
    "noise": Planted("", {"step_time_first_s": 0.100, "step_time_last_s": 0.103, **HALF_WAY}),
    "clock_down": Planted("noisy", {"sm_clock_first_mhz": 1980, "sm_clock_last_mhz": 1900}),
    "clock_up": Planted("", {"sm_clock_first_mhz": 1900, "sm_clock_last_mhz": 1980}),
    # four workers prepare eight micro-batches ahead
    "prepared": Planted("unknown extrapolated",
                        {"measured_steps": 15, "steps_per_epoch": 100}, AHEAD),
    "half_prepared": Planted("extrapolated", {"measured_steps": 8, "steps_per_epoch": 100},
                             {**AHEAD, "accumulate": 2}),
    "waits": Planted("host_bound", {"busy_s": 0.034, "step_time_median_s": 0.045}),
    "waits_unevenly": Planted("host_bound noisy unsettled", {
        "busy_s": 0.034, "step_time_median_s": 0.045, "step_time_mad_s": 0.006}),
    "unclear": Planted("unclear", {"arithmetic": "unclear"}),
    "half_unclear": Planted("unclear", {"arithmetic": "float16/unclear"}),
    "not_probed": Planted("unclear", {"flags": "conv=ieee matmul=ieee"}),
    "switched": Planted("unclear", {"switched_within": "cudnn.benchmark=True"}),
    "upcast": Planted("unclear", {"labelled_flop_share": 0.875}),
    "not_evaluated": Planted("unmet", {
        "missing": "eval_time_s: ValueError: no luck; energy_j: the case ran on a CPU"}),
    "nothing_asked": Planted("", {
        "missing": "energy_j: the case ran on a CPU; test_loss: it is inf or NaN"}),
    "beyond": Planted("beyond", {"flop_per_image": 1e12}),
    "short": Planted("energy", {"energy_j": 900.0, "measured_time_s": 7.0}),
    # the sensor is read at both ends of each epoch
    "short_epochs": Planted("energy", {"energy_j": 100.0, "measured_time_s": 3.0}, {"epochs": 3}),
    "part": Planted("extrapolated", PART, {"fraction": 0.1}),
    "made_up": Planted("synthetic", {}, {"dataset": "synthetic"}),
    "emulated": Planted("emulated", {"gpu": "", "cpu": "A CPU"},
                        {"precision": "fp8", "device": "cpu"}),
    "compiles": Planted("compiled", {"compiled_within": 2}),
    "compiles_again": Planted("recompiled", {"recompilations": 3, "epoch_recompilations": 2},
                              {"compile": "default"}),
    "compiled_again": Planted("", {"recompilations": 1, "epoch_recompilations": 0},
                              {"compile": "default"}),
    "words": Planted("", {"notes": "the card was shared; steps rose; throttled; unclear; noisy",
                          "reason": "throttled: the card was shared"}),
    "settled": Planted("", {
        "warmup_steady": False, "step_time_first_s": 0.100, "step_time_last_s": 0.1015}),
    "slow": Planted("slow_steps", {
        "step_time_median_s": 0.1, "step_time_max_s": 0.14, "measured_steps": 40,
        "measured_time_s": 4.12}),
    "one_slow": Planted("", {
        "step_time_median_s": 0.1, "step_time_max_s": 0.14, "measured_steps": 40,
        "measured_time_s": 4.04}),
}  # fmt: skip
"""By what is wrong, or only looks so: a run that has its place as its seed."""

FAILED = [status for status in Status if status not in ("ok", "diverged", "invalid")]


def list_planted(warned: Mapping[str, Planted]) -> Iterator[Row]:
    """A run of each, on a card."""
    card = make_card("NVIDIA H200")
    for seed, name in enumerate(WARNED):
        if name in warned:
            _, values, axes = WARNED[name]
            yield from ran(Case(seed=seed, **axes), (10,), **{**card, **values})


def list_warned() -> Iterator[Row]:
    """A sweep with every warning and every outcome."""
    card = make_card("NVIDIA H200")
    yield from list_planted({name: one for name, one in WARNED.items() if one.warnings})
    for repeat, gib in enumerate((4.0, 4.5), 1):
        (run,) = ran(Case(seed=101), (10,), gib, **card)
        yield replace(run, repeat=repeat)
    for seed, status in enumerate(FAILED, 102):
        yield make_record(Case(seed=seed), status=status, reason=f"as of {status}", **card)


def list_drifted() -> Iterator[Row]:
    """A sweep on a machine that was not left alone: the first case drifted, one spreads where the
    card was slower, one had another torch and computed faster than its rates; and repeats have the
    same seed."""
    first, wide, other = (Case(batch_size=size) for size in (128, 256, 512))
    seed = {"run_seed": 0, "train_loss": 2.05}
    yield from ran(first, (100, 100.4, 99.8), rate_float32=50e12, power_limit_w=700.0, **seed)
    later = {"started_at": "2026-11-20T11:00:00.000Z", "power_limit_w": 300.0}
    yield from ran(wide, (60, 75, 66), rate_float32=30e12, **later, **seed)
    loaded = {"rate_float32": 88e6, "flop_per_image": 1e9}
    yield from ran(other, (50, 50.1, 49.9), **{**seed, **loaded, "torch": "2.12"})
    yield from ran(first, (86,), sentinel=True, started_at="2026-11-20T12:00:00.000Z", **seed)
