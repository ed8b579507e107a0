"""`python -m bench.crosscheck`: check time and memory against a bare training loop.

One case is measured by the harness and by a bare loop, in turn, each in fresh processes. The loop
and a separate memory poller share no code with the harness, except what is trained: the network's
definition, or the workload's network, batches and loss. The ratios of seconds, of the memory of
tensors, and of the GPU memory outside torch's allocator must be within 1 % of 1. What the allocator
holds without using it is left out: it depends on the order of allocations, not on the work.

With --overhead, the loop is built from the harness's own parts, for any case: the same network,
images, warm-up and steps, but no sampler, events, step clock or records. The last line printed is
the ratio of the epoch times and its spread; the line before it is the time of the harness's process
that is neither warm-up nor training, and its parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from bench.axis import Value
from bench.case import Case, axis_flag
from bench.crosscheck import agreement, overhead
from bench.crosscheck.turns import take_turns
from bench.data import SYNTHETIC
from bench.environment.asking import ASK_S
from bench.environment.host import list_devices
from bench.errors import UsageError
from bench.executors import Job, Lane, Settings, build_executor
from bench.flags import Parser, add_axes, command, describe, parse_whole, read_axes
from bench.grid import grid
from bench.precision import PRECISIONS
from bench.processes import leave
from bench.sweep.preflight import gather_inputs, list_examined
from bench.text import join_words
from bench.workloads import IMAGES

_SUPPORTED = ("model", "workload", "precision", "batch_size", "fraction", "device")
"""Axes that the bare loop supports. It would ignore any other, and measure a different case."""
_NAMED = join_words([*map(axis_flag, _SUPPORTED)])

MODELS = ("dpn92", "dpn26", "dpn-small")
PRECISIONS_HERE = ("fp32", "bf16-amp")  # those whose plain torch idiom is two lines


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.crosscheck",
        usage="%(prog)s [--overhead] [--AXIS VALUE] [--pairs N] [--data-dir DIR] [--json]",
        description=describe(__doc__),
    )
    add = parser.add_argument
    add("--overhead", action="store_true", help="measure what the harness adds to an epoch")
    add(
        "--pairs",
        type=lambda text: parse_whole("--pairs", text, 1),
        metavar="N",
        help="pairs to measure (3, with --overhead 5)",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is, for --overhead")
    add("--json", action="store_true", help="print JSON on standard output")
    add_axes(
        parser,
        f"of the case; without --overhead {_NAMED}; default on a GPU: dpn92, bf16-amp, batch 256, "
        "fraction 0.2, with --overhead fp16, batch 512, fraction 0.5",
    )
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Cross-check. Return 0 if both agree, 1 if they do not, 2 for a usage error. On a CPU, which
    can only rehearse, and with ``--overhead`` it is 0 instead of 1."""
    given = build_parser().parse(argv)
    axes = read_axes(given)
    case = choose_case(axes, given.overhead)
    if given.data_dir and not given.overhead:
        raise UsageError("--data-dir: the bare loop makes its own images; add --overhead")
    with closing(build_executor("subprocess", Settings(allow_shared=True))) as executor:
        asked = executor.examine(Lane(), [case.device], list_examined([case]), ASK_S)
        inputs = gather_inputs([case], asked, axes, given.data_dir)
        platform, data = inputs.platforms[case.device], inputs.data(case)
        if "precision" not in axes and platform.discourage(PRECISIONS[case.precision]):
            case = replace(case, precision="fp32")
        case, environment = inputs.settle(case), platform.environment
        where = environment.gpu or environment.cpu
        say = partial(print, file=sys.stderr if given.json else sys.stdout, flush=True)
        say(f"{case.model}, {case.label()}, {case.dataset}, fraction {case.fraction:g}, on {where}")
        job = Job(case, data.folder, environment.gpu_uuid)
        if given.overhead:
            turns = take_turns(executor, job, overhead.time_bare, given.pairs or 5)
            answer, code = overhead.measure_overhead(turns, say), 0
        else:
            time_bare = partial(agreement.time_bare, samples=data.train_images)
            unit = inputs.describe(case).unit or "images"
            pairs = take_turns(executor, job, time_bare, given.pairs or 3)
            answer = agreement.compare(pairs, job, unit, say)
            code = 0 if answer["agree"] or answer["rehearsal"] else 1
    if given.json:
        print(json.dumps({"case": asdict(case), "on": where, **answer}, indent=2))
    return code


def choose_case(axes: Mapping[str, list[Value]], overhead: bool) -> Case:
    """Return the one case to measure. Raises UsageError: several are given, or one that the bare
    loop cannot train."""
    device = list_devices(axes)
    if device == ["cpu"]:
        usual: dict[str, Value] = {"model": "dpn-small", "fraction": 0.1 if overhead else 0.05}
    elif overhead:
        usual = {"precision": "fp16", "batch_size": 512, "fraction": 0.5}
    else:
        usual = {"precision": "bf16-amp", "batch_size": 256, "fraction": 0.2}
    usual["dataset"] = SYNTHETIC
    taken = {name: values for name, values in axes.items() if overhead or name in _SUPPORTED}
    cases = grid({name: [value] for name, value in usual.items()} | {"device": device} | taken)
    if len(cases) > 1:
        raise UsageError(f"{len(cases)} cases are given; give one value for each axis")
    (case,) = cases
    for name in axes.keys() - taken.keys():
        if axes[name] != [getattr(case, name)]:
            raise UsageError(
                f"{axis_flag(name)}: bench.crosscheck does not take it, because the bare loop "
                f"supports {_NAMED}; add --overhead, or leave it out"
            )
    if overhead:
        return case
    if case.workload == IMAGES and case.model not in MODELS:
        raise UsageError(
            f"--model {case.model!r}: the bare loop can only train {', '.join(MODELS)}; give your "
            "own as a --workload"
        )
    if case.precision not in PRECISIONS_HERE:
        right = " or ".join(PRECISIONS_HERE)
        raise UsageError(f"--precision {case.precision}: the bare loop can only train {right}")
    return case


if __name__ == "__main__":
    leave(main())
