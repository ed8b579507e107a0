"""`python -m bench.fit`: find the largest batch size that fits in memory.

A few batch sizes are tried, each for a few steps in a process of its own. Each such probe is a row
of the results; see docs/batch-size.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain

from bench.base.errors import UsageError, choose
from bench.base.plain import dump_document
from bench.base.processes import leave
from bench.machine.host import list_devices
from bench.schema.axis import Value
from bench.schema.case import UNFITTED, Case, lay_out, list_varying
from bench.schema.command import list_places
from bench.schema.flags import (
    ABSENT,
    Parser,
    add_axes,
    add_flag,
    add_format,
    command,
    describe,
    parse_percent,
    parse_whole,
    read_axes,
)
from bench.schema.goals import FREE_MARGIN
from bench.schema.grid import AUTO
from bench.schema.preset import Preset
from bench.sweep.largest_batch import ANSWERED, STEP, LargestBatch
from bench.sweep.options import add_running, choose_dataset, read_running
from bench.sweep.probing import describe_largest_batch, find_largest

DEFAULT_PRECISIONS = {"cuda": ["fp32", "fp16", "bf16-amp"], "cpu": ["fp32", "bf16-amp"]}
"""The default precisions, by device."""

_KEYS = (
    *("largest", "smallest_failing", "thrashes_from", "recommended"),
    *("line", "available_bytes", "margin", "probes", "ending"),
)
"""Attributes of a `bench.sweep.largest_batch.LargestBatch` in the JSON."""


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.fit",
        absent=ABSENT["fit"],
        usage="%(prog)s [--precision NAME …] [--command TEXT] [--memory-limit SIZE] […]",
        description=describe(__doc__),
    )
    group = parser.add_argument_group("what to find")
    add_flag(
        group,
        "--step",
        "N",
        f"look for it in steps of N images, or items of a --workload or --command ({STEP})",
        partial(parse_whole, least=1, most=10_000),
        STEP,
    )
    add_flag(
        group,
        "--margin",
        "P%",
        f"recommend a batch size that leaves this share of memory free ({100 * FREE_MARGIN:g}%%)",
        _parse_margin,
        FREE_MARGIN,
    )
    add_format(group)
    add_axes(
        parser,
        "each takes one value or several, and each combination is searched; default precisions: "
        f"{' '.join(DEFAULT_PRECISIONS['cuda'])} on a GPU, "
        f"{' '.join(DEFAULT_PRECISIONS['cpu'])} on a CPU; without "
        "images in --data-dir, synthetic ones, which take as much memory; a --command has a "
        "value for each of its placeholders but {batch_size}",
    )
    add_running(parser)
    return parser


def write_text(largest_batches: Mapping[Case, LargestBatch], _: int) -> str:
    named = list_varying(largest_batches, but="batch_size")
    lines = [
        f"{family.label(named)}: {describe_largest_batch(found)}\n"
        for family, found in largest_batches.items()
    ]
    return "".join(lines)


def write_json(largest_batches: Mapping[Case, LargestBatch], step: int) -> str:
    """Write every search, with its settings but for the batch size."""
    searches = []
    for family, found in largest_batches.items():
        case = lay_out(family)
        del case["batch_size"]
        searches.append({"case": case, **{name: getattr(found, name) for name in _KEYS}})
    return dump_document("fit", 1, {"step": step, "searches": searches})


@command
def main(argv: Sequence[str]) -> int:
    """Find the largest batch sizes.

    Returns 0; 1 if none was found, a search ended without an answer or the disk is full; 2 for a
    usage error; 130 or 143 if it was stopped.
    """
    given = build_parser().parse(argv)
    write = choose("--format", given.format, {"text": write_text, "json": write_json})
    axes = read_axes(given)
    known = (DEFAULT_PRECISIONS[str(device)] for device in list_devices(axes))
    # not treated as flags: settings that this machine cannot run become rows that say so
    chosen: dict[str, list[Value]] = {
        "precision": [*dict.fromkeys(chain.from_iterable(known))],
        "batch_size": [AUTO],
        "dataset": [choose_dataset(given)],
    }
    if "command" in axes:
        _refuse_command(axes)
        chosen = {"batch_size": [AUTO]}
    options = read_running(given, axes, Preset("fit", "", (chosen,)))
    largest_batches, loop = find_largest(options, given.step, given.margin)
    print(write(largest_batches, given.step), end="")
    if loop.stopped or any(
        largest_batch.ending is None for largest_batch in largest_batches.values()
    ):
        print(f"not finished; to continue: {loop.resume}", file=sys.stderr)
    if loop.stopped:
        return 128 + loop.stopped
    found = any(largest_batch.largest is not None for largest_batch in largest_batches.values())
    return (
        0
        if found
        and all(largest_batch.ending in ANSWERED for largest_batch in largest_batches.values())
        else 1
    )


def _refuse_command(axes: Mapping[str, Sequence[Value]]) -> None:
    """Refuse a command that batch sizes cannot be put into, or with a placeholder that only other
    commands have a flag for. Raises UsageError."""
    for places in map(list_places, map(str, axes["command"])):
        if "batch_size" not in places:
            raise UsageError(
                "--command has no {batch_size}, where each size to try is put; write it after the "
                "script's own flag, such as --batch-size {batch_size}"
            )
        if "batch_size" in axes:
            raise UsageError("--vary batch_size: bench.fit chooses the sizes; leave it out")
        if left := [name for name in places if name in UNFITTED and name not in axes]:
            raise UsageError(
                f"--command: {{{left[0]}}} has no value; write the value itself in the command"
            )


def _parse_margin(flag: str, text: str) -> float:
    margin = parse_percent(f"{flag} {text!r}", text)
    if margin >= 1:
        raise UsageError(f"{flag} {text!r}: nothing fits then; give less than 100%")
    return margin


if __name__ == "__main__":
    leave(main())
