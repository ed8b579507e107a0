"""What loss scales do to gradients: a loss-scale map in a sentence a case, and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.answers.render.table import Cell, Column, Section, Sheet, join
from bench.results.scale_map import (
    HOW,
    Fate,
    GradientKind,
    ScaleCase,
    ScaledTraining,
    ScaleMap,
    Window,
    find_window,
)


def write_scale(scale: float) -> str:
    """Return a scale as text: ``128``, ``2^16``.

    >>> write_scale(128.0), write_scale(65536.0), write_scale(0.5), write_scale(3e4)
    ('128', '2^16', '0.5', '30000')
    """
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and exponent > 10:
        return f"2^{exponent - 1}"
    return repr(scale).removesuffix(".0")


def summarize_scale_map(scales: ScaleMap) -> str:
    """Return a line for each case."""
    return "\n".join(
        f"{case.label}: {_summarize(case, find_window(case, scales.tolerance))}."
        for case in scales.cases
    )


def _summarize(case: ScaleCase, window: Window) -> str:
    if case.diverged:
        return (
            f"training in fp32 itself diverged at step {case.diverged}, so nothing can be said of "
            "loss scales: use a smaller --lr"
        )
    if window.low is None or window.high is None or window.use is None:
        return "no scale is safe; try others with --scales, or use bf16-amp"
    narrow = ", or rather a dynamic scale, as the window is narrow" if window.narrow else ""
    use = f"use {write_scale(window.use)}{narrow}" if window.needed else "no loss scale is needed"
    return f"{use}: scales from {write_scale(window.low)} to {write_scale(window.high)} are safe"


_Line = tuple[ScaleCase, Window, float]  # a case, and a scale of it


def tabulate_scale_map(scales: ScaleMap) -> Iterator[Sheet]:
    """Yield what each scale does to the gradients of each case, and what trainings came to."""
    judged = [(case, find_window(case, scales.tolerance)) for case in scales.cases]
    rows, groups = join(
        (case.label, [(case, window, scale) for scale in case.scales]) for case, window in judged
    )

    def write_share(kind: GradientKind, fate: Fate, line: _Line) -> Cell:
        share = line[0].share(fate, line[2], kind)
        return Cell(f"{100 * share:.3g}", share)

    def judge(line: _Line) -> str:
        _, window, scale = line
        use = scale == window.use and window.needed
        return window.verdicts[scale] + ", use this" * use

    columns: list[Column[_Line]] = [
        Column("scale", "scale", "loss scale", lambda line: line[2], write=write_scale),
        *(
            Column(f"{kind}_{fate}", f"{kind}s {word} (%)", "a share of the values that are not "
                   "zero before", partial(write_share, kind, fate), better="lower")
            for kind in GradientKind
            for fate, word in ((Fate.FLUSHED, "underflow"), (Fate.OVERFLOWED, "overflow"))
        ),
        Column("judgement", "verdict", "what the rule makes of it", judge, wrap=True),
    ]  # fmt: skip
    notes = [
        "Of the gradients of all layers' outputs and weights, at the step where the share is "
        "largest; underflow is rounding to zero. scales.json has each layer.",
        HOW,
    ]
    words = summarize_scale_map(scales).splitlines()
    yield Sheet("Loss scales: underflow and overflow of gradients", columns, rows, notes, groups,
                words, empty=())  # fmt: skip
    yield _tabulate_trainings(scales)


def _tabulate_trainings(scales: ScaleMap) -> Sheet:
    rows, groups = join(
        (case.label, [(case, one) for one in case.trainings]) for case in scales.cases
    )

    def subtract(row: tuple[ScaleCase, ScaledTraining]) -> float | None:
        case, training = row
        fp32 = case.training("")
        difference = training.losses[-1] - fp32.losses[-1] if fp32 else math.nan
        return difference if training.setting and math.isfinite(difference) else None

    columns: list[Column[Any]] = [
        Column("setting", "loss scale", "static, or the rule of a dynamic one",
               lambda row: row[1].setting or "none, in fp32", number=False),
        Column("loss", "last loss", "of the last step's batch", lambda row: row[1].losses[-1],
               write="{:.4f}".format, better="lower"),
        Column("difference", "minus fp32", "difference of that loss from the one in fp32",
               subtract, write="{:+.4f}".format),
        Column("overflows", "steps with overflow", "skipped under a dynamic scale",
               lambda row: sum(row[1].overflowed)),
    ]  # fmt: skip
    note = "All start from the same weights and use the same batches; a static scale skips no step."
    return Sheet("Training by loss scale", columns, rows, [note], groups, name="scales-trainings")


SCALES = Section("scales", "Which loss scales are safe?", tabulate_scale_map)
