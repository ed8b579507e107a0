"""`python -m bench.scales`: show which loss scales are safe, and what each does to gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from bench.environment.host import refuse_missing
from bench.errors import UsageError
from bench.flags import command
from bench.processes import leave
from bench.questions.loss_scales import SCALES, tabulate_scale_map
from bench.scale_map import GRADIENTS, MAP, TRAININGS, ScaleMap, read_scale_map
from bench.scales.map import measure_map
from bench.scales.options import build_parser, read_options
from bench.sweep.preflight import refuse_unwritable


@command
def main(argv: Sequence[str]) -> int:
    given = build_parser().parse(argv)
    if given.show is not None:
        scales = read_scale_map(given.show)
        if scales is None:
            raise UsageError(
                f"--show {given.show}: there is no {MAP}; give a folder of this command"
            )
    else:
        options = read_options(given)
        refuse_unwritable(options.out)
        for name in (MAP, GRADIENTS, TRAININGS):
            if (options.out / name).exists():
                raise UsageError(
                    f"--out {options.out}: holds a {name} already; choose another folder, or read "
                    f"it with --show {options.out}"
                )
        refuse_missing(["torch", "numpy", "pandas"])
        scales = measure_map(options, partial(print, file=sys.stderr, flush=True))
    show(scales)
    return 0


def show(scales: ScaleMap) -> None:
    """Print the tables, the answer first, as wide as the terminal or COLUMNS."""
    from bench.render.text import draw_table, draw_text, open_console

    console = open_console()
    on = [
        f"Dataset: {case.dataset}. Device: {case.device}. Gradients: {case.way.value}."
        for case in scales.cases
    ]
    files = ", ".join((MAP, GRADIENTS, TRAININGS))
    for line in dict.fromkeys(on):
        draw_text(line, console)
    for table in SCALES.lay_out(tabulate_scale_map(scales)):
        console.print()
        draw_table(table, console)
    console.print()
    draw_text(f"In {scales.folder}: {files}.", console)


if __name__ == "__main__":
    leave(main())
