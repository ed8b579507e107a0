"""`python -m bench.scales`: show which loss scales are safe, and what each does to gradients."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from bench.case import Case, check_batches
from bench.data import load, prepare, progress_bar
from bench.environment import ask, refuse_missing, with_inputs
from bench.errors import UsageError
from bench.fingerprint import check_outputs
from bench.flags import run_command
from bench.precision import PRECISIONS
from bench.report.model import Table
from bench.report.scalemap import (
    MAP,
    ScaleMap,
    Way,
    read_scale_map,
    scale_map_tables,
    summarize_scale_map,
)
from bench.scales.folder import FIGURE, SUMMARY, refuse_existing, write_map, write_pages
from bench.scales.options import Options, build_parser, read_options
from bench.sweep.preflight import refuse_neighbours, refuse_unwritable


def main(argv: Sequence[str] | None = None) -> int:
    """Make a map, or show one; the return code."""
    return run_command(run, argv)


def run(argv: Sequence[str]) -> int:
    """Do what the command line says; the return code.

    Raises:
        UsageError: it cannot be done.
    """
    given = build_parser().parse(argv)
    if given.show is not None:
        scales = read_scale_map(given.show)
        if scales is None:
            raise UsageError(
                f"--show {given.show}: there is no {MAP}; give a folder of this command"
            )
        show(scales)
        return 0
    options = read_options(given, shlex.join(["python", "-m", "bench.scales", *argv]))
    refuse_unwritable(options.out)
    refuse_existing(options.out)
    refuse_missing(["torch", "numpy", "pandas", "seaborn"])
    scales = measure_all(options)
    write_pages(scales)
    show(scales)
    return 0


# --------------------------------------------------------------------------------------- measure


def measure_all(options: Options) -> ScaleMap:
    """Find out what the questions name, refuse what cannot be trained, and measure.

    Each case is stored as it ends.

    Raises:
        UsageError: a device, model or dataset cannot be used, or memory ran out.
    """
    first = options.questions[0]
    models = list(dict.fromkeys(q.model for q in options.questions))
    answer = ask([first.device], models)
    platform = answer.platform(first.device)
    if first.way is Way.TRAINED:
        for name in first.precisions:
            if why := platform.refuse(PRECISIONS[name]):
                raise UsageError(f"--precision {name}: {why}")
    uuid = platform.environment.gpu_uuid
    if uuid and not options.allow_shared:
        refuse_neighbours(uuid)
    with progress_bar() as progress:
        info = prepare(first.dataset, data_dir=options.data_dir, progress=progress)
    for model in models:
        check_outputs(model, answer.fingerprint(model), info.classes)
    for question in options.questions:
        check_batches(Case(batch_size=question.batch_size), info.train_images)
    environment = with_inputs(platform.environment, info, None)
    scales = ScaleMap(
        options.out,
        options.command,
        datetime.now(UTC).isoformat(timespec="seconds"),
        first.tolerance,
        {k: v for k, v in asdict(environment).items() if v is not None},
        (),
    )

    import torch

    from bench.scales.measurement import measure

    data = load(info.folder)
    for question in options.questions:
        try:
            for answered in measure(question, data, say):
                scales = replace(scales, cases=(*scales.cases, answered))
                write_map(scales)
        except torch.OutOfMemoryError as error:
            kept = f"; what was measured before is in {options.out}" if scales.cases else ""
            raise UsageError(
                f"{question.model}, batch size {question.batch_size} ran out of memory; "
                f"use a smaller --batch-size{kept}"
            ) from error
    return scales


def say(text: str) -> None:
    """Say what is done now."""
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------ show


def show(scales: ScaleMap) -> None:
    """Print the sentences and the tables."""
    for table in scale_map_tables(scales):
        print("\n".join(write_table(table)))
        print()
    for case in dict.fromkeys((c.dataset, c.device, c.way.value) for c in scales.cases):
        print(f"images: {case[0]}; device: {case[1]}; gradients: {case[2]}")
    print(summarize_scale_map(scales))
    print(f"{scales.folder}: {SUMMARY}, {FIGURE}, and the counts as CSV")


def write_table(table: Table) -> Iterable[str]:
    """A table as lines of text."""
    columns = zip(*([cell.text for cell in row] for row in table.rows), strict=True)
    widths = [
        max(len(head.label), *map(len, cells))
        for head, cells in zip(table.heads, columns, strict=True)
    ]
    yield table.title
    for texts in [[h.label for h in table.heads], *([c.text for c in row] for row in table.rows)]:
        cells = (
            text.rjust(width) if head.number else text.ljust(width)
            for text, width, head in zip(texts, widths, table.heads, strict=True)
        )
        yield "  " + "  ".join(cells).rstrip()
    for note in table.notes:
        yield from textwrap.wrap(note, 100, initial_indent="  ", subsequent_indent="  ")


if __name__ == "__main__":
    sys.exit(main())
