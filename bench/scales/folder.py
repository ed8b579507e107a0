"""Write a map as `bench.scale_map` reads it, and as files for people beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bench.case import format_value
from bench.errors import UsageError
from bench.questions.loss_scales import SCALES, summarize_scale_map, tell_scale_map
from bench.questions.scale_drawing import draw_scale_map, rasterize_scale_map
from bench.render.markdown import escape, table_lines
from bench.scale_map import GRADIENTS, MAP, TRAININGS, VERSION, ScaleMap, Tally
from bench.store.cells import write_lines
from bench.text import replace_file

SUMMARY, FIGURE, PICTURE = "scales.md", "scales.svg", "scales.png"


def refuse_existing(out: Path) -> None:
    """Refuse a folder that holds a map: nothing measured is overwritten. Raises UsageError: it
    does."""
    for name in (MAP, GRADIENTS, TRAININGS):
        if (out / name).exists():
            raise UsageError(
                f"--out {out}: holds a {name} already; choose another folder, or read it with "
                f"--show {out}"
            )


def write_map(scales: ScaleMap) -> None:
    """Write all cases measured so far; each file is replaced whole. Raises UsageError: the folder
    cannot be written."""
    head = {
        "version": VERSION,
        "command": scales.command,
        "started_at": scales.started_at,
        "tolerance": scales.tolerance,
        "environment": scales.environment,
        "cases": [_describe(case) for case in scales.cases],
    }
    try:
        scales.folder.mkdir(parents=True, exist_ok=True)
        # the head last: it names no case whose rows are not there
        replace_file(scales.folder / GRADIENTS, write_lines(_gradients(scales)))
        replace_file(scales.folder / TRAININGS, write_lines(_trainings(scales)))
        text = json.dumps(head, indent=2, allow_nan=False) + "\n"
        replace_file(scales.folder / MAP, text)
    except OSError as error:
        raise UsageError(f"--out {scales.folder}: {error.strerror}; choose another") from error


def write_pages(scales: ScaleMap) -> None:
    lines = ["# Loss-scale map", ""]
    for line in summarize_scale_map(scales).splitlines():
        lines += [escape(line), ""]
    for table in SCALES.lay_out(tell_scale_map(scales)):
        lines += table_lines(table)
    replace_file(scales.folder / SUMMARY, "\n".join(lines) + "\n")
    replace_file(scales.folder / FIGURE, draw_scale_map(scales))
    replace_file(scales.folder / PICTURE, rasterize_scale_map(scales))


def _describe(case: Any) -> dict[str, Any]:
    plain = {f.name: getattr(case, f.name) for f in fields(case)}
    del plain["gradients"], plain["trainings"]
    return {
        **plain,
        "overflows": {repr(s): asdict(first) for s, first in case.overflows.items()},
        "peaks": [peak if math.isfinite(peak) else None for peak in case.peaks],
    }


def _gradients(scales: ScaleMap) -> Iterator[tuple[Any, ...]]:
    counts = [f.name for f in fields(Tally)]
    yield "case", "step", "scale", "layer", "gradient", *counts
    for number, case in enumerate(scales.cases, 1):
        for row in case.gradients:
            tally = (getattr(row.tally, name) for name in counts)
            yield number, row.step, row.scale, row.layer, row.kind.value, *tally


def _trainings(scales: ScaleMap) -> Iterator[tuple[Any, ...]]:
    yield "case", "loss_scale", "step", "loss", "scale", "overflowed"
    for number, case in enumerate(scales.cases, 1):
        for training in case.trainings:
            rows = zip(training.losses, training.scales, training.overflowed, strict=True)
            for step, (loss, scale, overflowed) in enumerate(rows, 1):
                shown = format_value(loss) if math.isfinite(loss) else None
                yield number, training.setting, step, shown, scale, overflowed
