"""`python -m bench.scales`: show which loss scales are safe, and what each does to gradients."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial

from bench.data import load
from bench.environment.asking import ask, with_inputs
from bench.environment.packages import refuse_missing
from bench.errors import UsageError
from bench.flags import command
from bench.precision import PRECISIONS
from bench.processes import leave
from bench.questions.loss_scales import SCALES, summarize_scale_map, tell_scale_map
from bench.questions.scale_drawing import draw_scale_map, rasterize_scale_map
from bench.render.markdown import escape, table_lines
from bench.scale_map import ScaleMap, Way
from bench.scales.options import Options, build_parser, read_options
from bench.store.scale_map import GRADIENTS, MAP, TRAININGS, read_scale_map, write_map
from bench.sweep.folder import refuse_unwritable
from bench.sweep.preflight import gather_inputs, list_examined, refuse_neighbours
from bench.text import replace_file

SUMMARY, FIGURE, PICTURE = "scales.md", "scales.svg", "scales.png"


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
        refuse_missing(["torch", "numpy", "pandas", "seaborn"])
        scales = measure_all(options)
        write_pages(scales)
    show(scales)
    return 0


def measure_all(options: Options) -> ScaleMap:
    """Find out what the questions name, refuse what cannot be trained, and measure; each case is
    stored as it ends. Raises UsageError: a device, model or dataset cannot be used, or memory ran
    out."""
    first, cases = options.questions[0], [question.case for question in options.questions]
    answer = ask([first.case.device], list_examined(cases))
    inputs = gather_inputs(cases, answer, data_dir=options.data_dir)
    platform = inputs.platforms[first.case.device]
    if first.way is Way.TRAINED:
        for name in first.precisions:
            if why := platform.refuse(PRECISIONS[name]):
                raise UsageError(f"--precision {name}: {why}")
    uuid = platform.environment.gpu_uuid
    if uuid and not options.allow_shared:
        refuse_neighbours(uuid)
    environment = asdict(with_inputs(platform.environment, inputs.data(cases[0]), None))
    known = {name: value for name, value in environment.items() if value is not None}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    scales = ScaleMap(options.out, options.command, now, first.tolerance, known, ())

    import torch

    from bench.scales.measurement import measure

    for question in options.questions:
        folder = inputs.data(question.case).folder
        data = load(folder) if folder else None
        try:
            for answered in measure(question, data, partial(print, file=sys.stderr, flush=True)):
                scales = replace(scales, cases=(*scales.cases, answered))
                write_map(scales)
        except torch.OutOfMemoryError as error:
            kept = f"; what was measured before is in {options.out}" if scales.cases else ""
            raise UsageError(
                f"{question.case.model}, batch size {question.case.batch_size} ran out of memory; "
                f"use a smaller --batch-size{kept}"
            ) from error
    return scales


def write_pages(scales: ScaleMap) -> None:
    lines = ["# Loss-scale map", ""]
    for line in summarize_scale_map(scales).splitlines():
        lines += [escape(line), ""]
    for table in SCALES.lay_out(tell_scale_map(scales)):
        lines += table_lines(table)
    replace_file(scales.folder / SUMMARY, "\n".join(lines) + "\n")
    replace_file(scales.folder / FIGURE, draw_scale_map(scales))
    replace_file(scales.folder / PICTURE, rasterize_scale_map(scales))


def show(scales: ScaleMap) -> None:
    """Print the tables and the sentences, as wide as the terminal or COLUMNS."""
    from rich.console import Console

    from bench.render.text import WIDTH, draw_table, style_text

    asked = sys.stdout.isatty() or os.environ.get("COLUMNS")
    console = Console(width=None if asked else WIDTH)
    for table in SCALES.lay_out(tell_scale_map(scales)):
        draw_table(table, console)
        console.print()
    on = [
        f"Dataset: {case.dataset}. Device: {case.device}. Gradients: {case.way.value}."
        for case in scales.cases
    ]
    files = ", ".join((SUMMARY, FIGURE, PICTURE, GRADIENTS, TRAININGS))
    said = summarize_scale_map(scales).splitlines()
    for line in (*dict.fromkeys(on), *said, f"In {scales.folder}: {files}."):
        console.print(style_text(line))


if __name__ == "__main__":
    leave(main())
