"""`python -m bench.scales`: show which loss scales are safe, and what each does to gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.processes import leave
from bench.base.progress import Progress, watch
from bench.base.text import read_clock
from bench.machine.host import choose_device, refuse_missing
from bench.networks.data import find_layout, load
from bench.results.scale_map import (
    MAP,
    TOLERANCE,
    ScaleMap,
    read_scale_map,
    write_map,
)
from bench.scales.document import SCALES, tabulate_scale_map
from bench.schema.axis import Value, read_scale, refuse_scale
from bench.schema.case import AXES, Case
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
from bench.sweep.options import Options
from bench.sweep.preflight import check_here, refuse_unwritable
from bench.sweep.versions import Versions

POWERS = tuple(2.0**k for k in range(25))
"""The default scales: the powers of two from 1 to 2^24, which round nothing as factors."""

_STEPS = 20

NARROW = ("fp16", "fp16-amp", "bf16", "bf16-amp")
"""Precisions whose gradients can flush and overflow, and that a loss scale is chosen for: fp8
scales each tensor by itself, and apex's fp16 has the gradients of fp16."""

_TAKEN = ("precision", "batch_size", "model", "workload", "dataset", "lr", "seed", "device")
_FEW_STEPS = "it trains a few steps of whole batches in fp32, and at loss scales of its own"


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.scales",
        absent={
            **{name: _FEW_STEPS for name in AXES if name not in _TAKEN},
            **OF_OTHER_IMAGES,
            **OF_SWEEPS,
        },
        description="Find out which loss scales are safe: train for some steps in fp32, and count "
        "for each scale how many gradient values would be flushed to zero or overflow in the "
        "format of --precision. A network is trained on images of 3x32x32; --workload brings its "
        "own data.",
    )
    add = parser.add_argument
    some = "loss scales, such as 128 or 2^16 (2^0 to 2^24)"
    add("--scales", nargs="+", metavar="S", type=parse_scale, default=POWERS, help=some)
    add(
        "--steps",
        type=lambda text: parse_whole("--steps", text, 1),
        default=_STEPS,
        metavar="N",
        help=f"steps of each training ({_STEPS})",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    add("--allow-shared", action="store_true", help="run on a GPU that others use")
    out = "folder to write the map to (default: results/scales-TIME)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--show", type=Path, metavar="DIR", help="show the map of a folder, and end")
    defaults = (
        "one value or several; defaults: fp16, batch size 128, and on a GPU dpn92, else dpn-small; "
        "synthetic images where there is no CIFAR-10"
    )
    add_axes(parser, defaults)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    given = build_parser().parse(argv)
    if given.show is not None:
        scales = read_scale_map(given.show)
        if scales is None:
            raise UsageError(
                f"--show {given.show}: there is no {MAP}; give a folder of this command"
            )
        show(scales)
        return 0
    cases = choose_cases(read_axes(given), given.data_dir)
    out = given.out or Path("results") / f"scales-{datetime.now():%Y%m%d-%H%M%S}"
    refuse_unwritable(out)
    if (out / MAP).exists():
        raise UsageError(f"--out {out}: holds a map already; choose another, or --show {out}")
    refuse_missing(["torch", "numpy", "pandas"])
    asked = Options(data_dir=given.data_dir, allow_shared=given.allow_shared)
    inputs = check_here(cases, asked)
    # there may be several networks
    environment = asdict(replace(inputs, models={}, versions=Versions()).describe(cases[0]))
    known = {name: value for name, value in environment.items() if value is not None}
    scales = ScaleMap(out, given.invocation, read_clock(), TOLERANCE, known, ())

    with watch("starting torch"):
        import torch

        from bench.scales.session import measure

    tried = sorted(set(given.scales))
    with Progress(len(inputs.plan.cases), "case") as progress:
        for case in inputs.plan.cases:
            folder = inputs.data(case).folder
            try:
                found = measure(case, load(folder) if folder else None, tried, given.steps)
            except torch.OutOfMemoryError as error:
                raise UsageError(
                    f"{case.model}, batch size {case.batch_size} ran out of memory; use a smaller "
                    f"--batch-size; what was measured before is in {out}"
                ) from error
            scales = replace(scales, cases=(*scales.cases, found))
            write_map(scales)
            progress.end()
    show(scales)
    return 0


def choose_cases(axes: Mapping[str, list[Value]], data_dir: Path | None) -> list[Case]:
    """Return what to train. Raises UsageError: the axes do not go together, or a precision has no
    loss scale to choose."""
    device = choose_device(axes)
    for name in axes.get("precision", []):
        if name not in NARROW:
            raise UsageError(
                f"--precision {name}: no loss scale is chosen for it; right values: "
                f"{', '.join(NARROW)}"
            )
    defaults: dict[str, list[Value]] = {
        "precision": ["fp16"],
        "batch_size": [128],
        "model": ["dpn92" if device == "cuda" else "dpn-small"],
        "dataset": ["cifar10" if data_dir or find_layout(None) else "synthetic"],
    }
    return grid({**defaults, **axes, "device": [device]})


def parse_scale(text: str) -> float:
    """Parse a loss scale: ``128``, ``2^16``. Raises UsageError: it is none, see `refuse_scale`."""
    try:
        scale = read_scale(text)
    except ValueError:
        scale = 0.0
    if why := refuse_scale(scale):
        raise UsageError(f"--scales {text[:60]!r}: {why}, such as 128 or 2^16")
    return scale


def show(scales: ScaleMap) -> None:
    """Print the tables, the answer first, as wide as the terminal or COLUMNS."""
    from bench.answers.render.terminal import draw_table, draw_text, open_console

    console = open_console()
    for table in SCALES.lay_out(tabulate_scale_map(scales)):
        draw_table(table, console)
        console.print()
    of = scales.cases[0]
    draw_text(f"On {of.dataset}, {of.device}. In {scales.folder}: {MAP}.", console)


if __name__ == "__main__":
    leave(main())
