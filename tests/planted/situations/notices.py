"""What is warned of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.case import Case
from bench.record import Record, Status
from tests.planted.records import make_record, ran
from tests.planted.situations.situation import FP32, LOST, at, learn, plant


def close(time_s: float, hour: int, attempt: int = 1) -> list[Record]:
    """The first case again, at the end of a command."""
    values = {"sentinel": True, "attempt": attempt}
    return ran(FP32, (time_s,), started_at=f"2026-11-20T{hour:02}:00:00.000Z", **values)


CALM = (100, 100.1, 99.9)
CUT = make_record(at(8, FP32)[0], **LOST, status=Status.INTERRUPTED)
FAST_FIRST = [*ran(FP32, (100, 100.4, 99.8)), *close(86, 12)]

STEADY = {"step_time_first_s": 0.100, "step_time_last_s": 0.1015}
DOUBTED: dict[str, dict[str, Any]] = {
    "none": {},
    "foreign": {"executor": "x"},
    "published": {"executor": "published"},
    "invalid": {"status": Status.INVALID, "reason": "mislabelled"},
    "diverged": {"status": Status.DIVERGED},
    "throttled": {"throttle_during": "hardware thermal slowdown"},
    "capped": {"throttle_during": "software power cap"},
    "contended": {"neighbours": "pid 1: 5 B", "neighbours_computing": 1},
    "shared_cores": {"other_cores": 0.5},
    "noisy": {"warmup_steady": False},
    "noisy_steps": {"step_time_median_s": 0.1, "step_time_mad_s": 0.006},
    "trend": {"step_time_first_s": 0.100, "step_time_last_s": 0.103},
    "trend_down": {"step_time_first_s": 0.103, "step_time_last_s": 0.100},
    "trend_of_clocks": {"sm_clock_first_mhz": 1980, "sm_clock_last_mhz": 1900},
    "host_bound": {"busy_s": 0.034, "step_time_median_s": 0.045},
    "unclear": {"arithmetic": "unclear"},
    "unclear_half": {"arithmetic": "float16/unclear"},
    "switched_late": {"switched_within": "cudnn.benchmark=True"},
    "unmet": {"missing": "eval_time_s: ValueError: no luck; energy_j: the case ran on a CPU"},
    "no_unmet": {"missing": "energy_j: the case ran on a CPU; test_loss: it is inf or NaN"},
    "unproven": {"flags": "conv=ieee matmul=ieee"},
    "energy": {"energy_j": 900.0, "measured_time_s": 1.9},
    "no_sharing_by_a_desktop": {"neighbours": "pid 1 (Xorg): 5 B", "neighbours_drawing": 1,
                                "neighbours_computing": 0},
    "no_trend": STEADY,
    "no_trend_of_clocks": {"sm_clock_first_mhz": 1900, "sm_clock_last_mhz": 1980},
    # forty noisy steps: the means of ten differ by as much without any trend
    "no_trend_of_noise": {"step_time_first_s": 0.100, "step_time_last_s": 0.103,
                          "step_time_median_s": 0.1, "step_time_mad_s": 0.004,
                          "measured_steps": 40},
    "no_warm_up": {"warmup_steps": None, "warmup_steady": None},
    "no_sentence": {"notes": "the card was shared; steps rose; throttled; unclear; noisy",
                    "reason": "throttled: the card was shared"},
}  # fmt: skip
"""A doubt, or what is none, by what a record of it has."""

EACH_DOUBT = [
    row for name, values in DOUBTED.items() for row in ran(Case(model=f"m:{name}"), (10,), **values)
]

NOTICES = {
    "lucky sentinel": plant(
        "It equals the first run to the last digit; the other runs do not: nothing is steady.",
        "doubts", ran(FP32, (100, 88, 108)), close(100, 12),
    ),
    "steady": plant(
        "Steady within 2 %.", "doubts", ran(FP32, (100, 100.3, 99.8, 100.1, 100)), close(100.2, 12),
    ),
    "fast first": plant("It drifted by 14 %.", "doubts", FAST_FIRST),
    "against the one before": plant(
        "Each is within 2 % of the runs, but the second is 3 % above the first.",
        "doubts", ran(FP32, CALM), close(98.5, 12), close(101.5, 14, 2),
    ),
    "repeats of a seed": plant(
        "They are a check of determinism: the same to the last digit in one of two cases.",
        "doubts",
        *(learn(case, losses, run_seed=0)
          for case, losses in ((FP32, (2.05, 2.05, 2.05)),
                               (at(256, FP32)[0], (2.05, 2.05012, 2.05)))),
    ),
    "each doubt": plant(
        "Each network has the doubt of its name, or none.", "overview doubts", EACH_DOUBT,
    ),
    "same command": plant(
        "What the same command runs again needs no flag.",
        "doubts",
        ran(FP32, (1, 1, 1)), [CUT, replace(CUT, case=at(16, FP32)[0], status=Status.LOST)],
    ),
    "failed": plant(
        "What failed needs one.",
        "doubts",
        ran(FP32, (1, 1, 1)), [CUT, replace(CUT, case=at(32, FP32)[0], status=Status.ERROR)],
    ),
}  # fmt: skip
