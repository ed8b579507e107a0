"""`python -m bench.check`: check that a training is sound, with a figure for each check."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.answers.advice import parse_budget
from bench.base.errors import UsageError, choose
from bench.base.processes import leave
from bench.check.checks import CHECKS, head, run_checks
from bench.machine.host import choose_device, refuse_missing
from bench.schema.axis import Value
from bench.schema.case import SAME_QUESTION, Case
from bench.schema.flags import (
    OF_OTHER_IMAGES,
    OF_SWEEPS,
    Parser,
    add_axes,
    command,
    parse_whole,
    read_axes,
)
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.preset import default_preset, load_preset
from bench.sweep.options import Options
from bench.sweep.preflight import check_here
from bench.workers.server import Process

_STEPS, FEWEST_CHECKED = 60, 20

BUDGET_S = 60.0
"""Time of all checks, in s. On two busy cores they took 92 to 384 s for small networks."""

_FEW_STEPS = (
    "it trains a few steps of whole batches, made on the device, all at --lr, of a whole network "
    "from scratch"
)


def build_parser() -> Parser:
    names = "".join(f"\n  {check.name:<14}{check.shows}" for check in CHECKS.values())
    parser = Parser(
        prog="python -m bench.check",
        usage="%(prog)s [--precision NAME …] [--AXIS VALUE …] […]",
        absent={
            **dict.fromkeys(("accumulate", "memory_limit"), _FEW_STEPS),
            **dict.fromkeys(("lr_scaling", "base_batch", "lr_warmup", "schedule"), _FEW_STEPS),
            "clip_grad": "a clipped step would hide a summed loss, which it looks for",
            **dict.fromkeys(("epochs", *SAME_QUESTION, "cuda_graphs"), _FEW_STEPS),
            **dict.fromkeys(("freeze", "start", "loader", "workers"), _FEW_STEPS),
            **OF_OTHER_IMAGES,
            **OF_SWEEPS,
        },
        description="Check that a training is sound before it is measured: for every precision "
        "asked for, short runs of the harness's own training, each with a figure and the bounds it "
        "must lie within. A network is trained on images of 3x32x32; --workload brings its own "
        "data. Return code 1: a check failed, or none ran. 2: a wrong flag or model.",
        epilog=f"checks:{names}",
    )
    add = parser.add_argument
    add(
        "--steps",
        type=lambda text: parse_whole("--steps", text, FEWEST_CHECKED),
        default=_STEPS,
        metavar="N",
        help=f"first steps to look at ({_STEPS}); four times as many where the loss falls late",
    )
    add(
        "--budget",
        type=partial(parse_budget, "--budget"),
        default=BUDGET_S,
        metavar="TIME",
        help="when to end, such as 10m or 600s, with what is not run yet named (60s)",
    )
    add("--skip", nargs="+", default=[], metavar="CHECK", help="leave these checks out")
    add("--data-dir", metavar="DIR", type=Path, help="where CIFAR-10 is (./data)")
    add_axes(
        parser,
        "one value or several; defaults: as in a sweep (on a CPU: dpn-small, synthetic images, "
        "batch size 64)",
    )
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Run the checks. Return 0, 1 if one failed or none ran, or 2 for a usage error, found before
    training."""
    began, given = time.monotonic(), build_parser().parse(argv)
    for name in given.skip:
        choose("--skip", name, CHECKS)
    axes = read_axes(given)
    cases = choose_cases(axes)
    refuse_missing(["torch", "numpy"])
    inputs = check_here(cases, Options(axes, data_dir=given.data_dir, allow_shared=True))
    cases = inputs.plan.cases
    for case in cases:
        if why := inputs.platforms[case.device].find_emulation(PRECISIONS[case.precision]):
            print(f"warning: {case.precision}: {why}, so it may be slow", file=sys.stderr)
    names = [name for name in CHECKS if name not in given.skip]
    failed = False
    for done, case in enumerate(cases, 1):
        print(head(case, cases), flush=True)
        until = began + given.budget * done / len(cases)
        # where a slow machine took long to examine the network, half of it is for the checks
        until = max(until, time.monotonic() + given.budget / 2 / len(cases))
        about = (case, inputs.data(case).folder, given.steps, until, names)
        with Process("bench.check.probes:answer_all", *about) as process:
            failed |= not run_checks(process, names)
    return int(failed)


def choose_cases(axes: Mapping[str, list[Value]]) -> list[Case]:
    device = choose_device(axes)
    if any(PRECISIONS[str(name)].apex for name in axes.get("precision", [])):
        # amp.initialize is meant to run once per process: at O1 each call patches torch again
        raise UsageError(
            "apex's amp starts once in a process and the checks start many times; check fp16, "
            "which is the recipe of O2"
        )
    first = load_preset(default_preset(str(device))).grids[0]
    defaults = {name: list(first[name][:1]) for name in ("model", "dataset") if name in first}
    if device == "cpu":
        defaults["batch_size"] = [64]
    return grid({**defaults, **axes, "device": [device]})


if __name__ == "__main__":
    leave(main())
