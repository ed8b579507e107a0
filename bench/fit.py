"""`python -m bench.fit`: find the largest batch size that fits in memory.

A few batch sizes are tried, each for a few steps in a process of its own. Each such probe is a row
of the results; see docs/batch-size.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from bench.axis import Value
from bench.case import Case, format_value, list_varying
from bench.environment.host import list_devices
from bench.errors import UsageError
from bench.flags import (
    OF_SWEEPS,
    Parser,
    add_axes,
    add_flag,
    command,
    describe,
    parse_percent,
    parse_whole,
    read_axes,
)
from bench.grid import AUTO
from bench.preset import Preset
from bench.processes import leave
from bench.render.table import NOTHING, Cell, Head, Table, number_cell
from bench.sweep.options import Options, add_running, choose_dataset, read_running
from bench.sweep.probing import find_largest
from bench.wall import ANSWERED, APART, LONG_STEPS, MARGIN, STEP, Ending, Wall
from bench.workloads import IMAGES

PRECISIONS = {"cuda": ["fp32", "fp16", "bf16-amp"], "cpu": ["fp32", "bf16-amp"]}
"""The default precisions, by device."""

_MIB = 2**20
_WIDTH = 140  # columns if there is no terminal and COLUMNS is not set


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.fit",
        absent=dict.fromkeys(("batch_size", *APART), "it chooses what its runs measure")
        | OF_SWEEPS,
        usage="%(prog)s [--precision NAME …] [--memory-limit SIZE] [--out DIR] […]",
        description=describe(__doc__),
    )
    group = parser.add_argument_group("what to find")
    add, whole = partial(add_flag, group), partial(parse_whole, least=1, most=10_000)
    largest = "look for it in steps of N images, or items of a --workload"
    add("--step", "N", f"{largest} ({STEP})", whole, STEP)
    free = "recommend a batch size that leaves this share of memory free"
    add("--margin", "P%", f"{free} ({100 * MARGIN:g}%%)", _parse_margin, MARGIN)
    group.add_argument("--json", action="store_true", help="print JSON on standard output")
    names = {device: " ".join(known) for device, known in PRECISIONS.items()}
    add_axes(
        parser,
        "each takes one value or several, and each combination is searched; default precisions: "
        f"{names['cuda']} on a GPU, {names['cpu']} on a CPU; without images in --data-dir, "
        "synthetic ones, which take as much memory",
    )
    add_running(parser)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Find the largest batch sizes.

    Returns 0; 1 if none was found, a search ended without an answer or the disk is full; 2 for a
    usage error; 130 or 143 if it was stopped.
    """
    given = build_parser().parse(argv)
    options = _read_options(given)
    walls, loop = find_largest(options, given.step, given.margin)
    print_walls(walls, given.step, given.json)
    if loop.stopped or any(wall.ending is None for wall in walls.values()):
        print(f"not finished; to continue: {loop.resume}", file=sys.stderr)
    if loop.stopped:
        return 128 + loop.stopped
    found = any(wall.largest is not None for wall in walls.values())
    return 0 if found and all(wall.ending in ANSWERED for wall in walls.values()) else 1


def _parse_margin(flag: str, text: str) -> float:
    margin = parse_percent(f"{flag} {text!r}", text)
    if margin >= 1:
        raise UsageError(f"{flag} {text!r}: nothing fits then; give less than 100%")
    return margin


def _read_options(given: argparse.Namespace) -> Options:
    axes = read_axes(given)
    devices = list_devices(axes)
    known = dict.fromkeys(name for device in devices for name in PRECISIONS[str(device)])
    # not treated as flags: settings that this machine cannot run become rows that say so
    chosen: dict[str, list[Value]] = {"precision": [*known], "batch_size": [AUTO]}
    chosen["dataset"] = [choose_dataset(given)]
    return read_running(given, axes, Preset("fit", "", (chosen,)))


def print_walls(walls: Mapping[Case, Wall], step: int, as_json: bool) -> None:
    """Print a table, or JSON: memory in bytes, batch sizes in images or items."""
    from bench.render.text import draw_table, open_console

    if as_json:
        axes = list_varying(walls, but="batch_size")
        told = [
            {name: text for name in axes if (text := format_value(getattr(family, name)))}
            | asdict(wall)
            | {"step": step}
            for family, wall in walls.items()
        ]
        print(json.dumps(told, indent=2))
        return
    draw_table(tabulate(walls, step), open_console(_WIDTH))


def tabulate(walls: Mapping[Case, Wall], step: int) -> Table:
    axes = list_varying(walls, but="batch_size")
    known = [n for n in axes if any(getattr(family, n) is not None for family in walls)]
    margins = {wall.margin for wall in walls.values()} or {MARGIN}
    item = "item" if any(family.workload != IMAGES for family in walls) else "image"
    heads = (
        *(Head(name, name.replace("_", " "), number=False) for name in known),
        Head("largest", "largest that trains"),
        Head("smallest_failing", "smallest that does not"),
        Head("thrashes_from", "retries from", keep=5),
        Head("recommended", f"recommended ({100 * min(margins):g} % free)"),
        Head("fixed", "fixed memory (MiB)", keep=3),
        Head("per_image", f"MiB per {item}", keep=4),
        Head("probes", "probes", keep=2),
        Head("ending", "remarks", number=False, keep=6, wrap=True),
    )
    rows = tuple(_write_row(family, wall, known) for family, wall in walls.items())
    sure = all(wall.confirmed for wall in walls.values())
    note = (f"The largest that trains was confirmed by a run of {LONG_STEPS} steps.",) * sure
    table = Table("fit", f"Largest batch size, in steps of {step}", heads, rows, note)
    return table.drop_empty(
        but=[head.name for head in heads if head.name not in ("ending", "thrashes_from")]
    )


def _write_row(family: Case, wall: Wall, axes: Sequence[str]) -> tuple[Cell, ...]:
    ending, known = wall.ending, [format_value(getattr(family, name)) or NOTHING for name in axes]
    remark = "the search has not ended" if ending is None else ending.meaning
    remark = "" if ending is Ending.FOUND else remark
    if wall.largest is not None and not wall.confirmed:
        remark = f"not confirmed: {remark}"
    fixed, each = Cell(NOTHING), Cell(NOTHING)
    if line := wall.line:
        fixed = Cell(f"{line.fixed_bytes / _MIB:,.0f}", line.fixed_bytes)
        each = Cell(f"{line.bytes_per_image / _MIB:.3g}", line.bytes_per_image)
    sizes = (wall.largest, wall.smallest_failing, wall.thrashes_from, wall.recommended)
    return (
        *map(Cell, known),
        *(number_cell(size, str) for size in sizes),
        fixed,
        each,
        number_cell(wall.probes, str),
        Cell(remark, remark or None),
    )


if __name__ == "__main__":
    leave(main())
