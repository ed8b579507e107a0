"""What loss scales do to gradients: a loss-scale map in sentences and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.precision import is_dynamic
from bench.render.model import NOTHING, Cell, Head, Table
from bench.scale_map import (
    GRADIENTS,
    HEADROOM,
    LAYER_TOLERANCE,
    Fate,
    Kind,
    ScaleCase,
    ScaledTraining,
    ScaleMap,
    Way,
    Window,
    find_window,
)


def write_scale(scale: float) -> str:
    """A scale for people: ``128``, ``2^16``.

    >>> write_scale(128.0), write_scale(65536.0), write_scale(0.5), write_scale(3e4)
    ('128', '2^16', '0.5', '30000')
    """
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and exponent > 10:
        return f"2^{exponent - 1}"
    return repr(scale).removesuffix(".0")


def write_share(share: float, limit: float = 0.0) -> str:
    """A share in per cent; what is not quite 0 or 100 is not written so.

    Args:
        limit: what is above this is written with as many digits as it takes to show it.

    >>> write_share(0.0), write_share(1e-7), write_share(0.0312), write_share(0.99999)
    ('0 %', '< 0.01 %', '3.1 %', '> 99.9 %')
    >>> write_share(0.0104), write_share(0.0104, 0.01)
    ('1 %', '1.04 %')
    """
    if 0 < share < 1e-4:
        return "< 0.01 %"
    if 0.999 < share < 1:
        return "> 99.9 %"
    digits = 2 if share < 0.01 else 1
    while share > limit and float(f"{100 * share:.{digits}f}") <= 100 * limit and digits < 6:
        digits += 1
    return f"{100 * share:.{digits}f}".rstrip("0").rstrip(".") + " %"


def summarize_scale_map(scales: ScaleMap) -> str:
    """A sentence or a few for each case, one case a line."""
    return "\n".join(_summarize(case, scales.tolerance) for case in scales.cases)


def _summarize(case: ScaleCase, tolerance: float) -> str:
    window, told = find_window(case, tolerance), []
    if case.diverged:
        return (
            f"{case.label}: training in fp32 itself diverged at step {case.diverged}, so nothing "
            "can be said of loss scales: use a smaller --lr."
        )
    if window.low is None or window.high is None or window.use is None:
        told.append(
            f"no scale is safe: {write_scale(case.scales[0])}, the smallest one tried, overflows "
            f"at {_overflow(case, case.scales[0])}; try smaller scales with --scales, or use "
            "bf16-amp"
            if case.scales[0] in case.overflows
            else f"no scale is safe: {_tell_lost(case, window, case.scales[0])}; try others with "
            "--scales, or use bf16-amp"
        )
        return f"{case.label}: {told[0]}."
    span = (
        f"scales from {write_scale(window.low)} to {write_scale(window.high)} are"
        if window.low < window.high
        else f"of those tried only the scale {write_scale(window.low)} is"
    )
    told.append(
        f"{span} safe: no overflow {tell_seen(case)}, and at most "
        f"{write_share(case.lost(window.low))} of the gradient values are flushed to zero"
    )
    if not window.needed:
        told.append("No loss scale is needed")
    elif window.narrow:
        told.append(
            f"Use {write_scale(window.use)}; the window is narrow, so prefer a dynamic scale"
        )
    else:
        told.append(f"Use {write_scale(window.use)}")
    if window.needed and 1.0 in case.scales and case.subnormal(1.0) > case.subnormal(window.use):
        told.append(
            f"At {write_scale(window.use)}, {write_share(case.subnormal(window.use))} of the "
            "values are subnormal (kept with fewer digits); without a loss scale, "
            f"{write_share(case.subnormal(1.0))} are"
        )
    below = [s for s in case.scales if s < window.low]
    shown = [s for s in dict.fromkeys((*below[:1], 128.0, *below[-1:])) if s in below]
    losing = [_tell_lost(case, window, s) for s in sorted(shown)]
    told += [text[0].upper() + text[1:] for text in losing]
    if window.ceiling is not None:
        told.append(f"Scale {write_scale(window.ceiling)} overflows at {_overflow(case)}")
    return f"{case.label}: " + ". ".join(told) + "."


def _tell_lost(case: ScaleCase, window: Window, scale: float) -> str:
    """What a scale loses; of one layer, where that alone is too much."""
    lost = case.lost(scale)
    if lost <= window.enough and scale in window.starved:
        layer, share = window.starved[scale]
        return f"at scale {write_scale(scale)}, layer {layer} loses {write_share(share)}"
    return f"scale {write_scale(scale)} flushes {write_share(lost, window.enough)}"


def tell_seen(case: ScaleCase) -> str:
    """The steps at which every scale was looked at for an overflow."""
    trained = {t.scales[0] for t in case.trainings if t.setting and not is_dynamic(t.setting)}
    if case.way is Way.ROUNDED or trained.issuperset(case.scales):
        return f"in {case.steps} steps"
    return f"at {name_steps(case.at)}"


def name_steps(steps: Sequence[int]) -> str:
    """For people: ``step 1``, ``steps 1, 5 and 20``."""
    *most, last = map(str, steps)
    return f"steps {', '.join(most)} and {last}" if most else f"step {last}"


def _overflow(case: ScaleCase, scale: float | None = None) -> str:
    first = case.overflows[min(case.overflows) if scale is None else scale]
    return f"step {first.step}" + (f" ({first.where})" if first.where else "")


def scale_map_tables(scales: ScaleMap) -> list[Table]:
    """The windows, then for each case its scales, its trainings and its layers that lose most."""
    tables = [_tabulate_windows(scales)]
    for number, case in enumerate(scales.cases, 1):
        name = f"-{number}" if len(scales.cases) > 1 else ""
        tables += [
            _tabulate_scales(case, find_window(case, scales.tolerance), name),
            _tabulate_trainings(case, name),
            _tabulate_layers(case, find_window(case, scales.tolerance), name),
        ]
    return tables


def scale_cell(scale: float | None) -> Cell:
    return Cell(NOTHING) if scale is None else Cell(write_scale(scale), scale)


def _share_cell(share: float) -> Cell:
    return Cell(write_share(share), share)


def _tabulate_windows(scales: ScaleMap) -> Table:
    heads = (
        Head("precision", "precision", "number format", False),
        Head("model", "model", "network", False, wrap=True),
        Head("batch_size", "batch size", "images per step"),
        Head("low", "safe from", "smallest safe scale"),
        Head("high", "safe to", "largest safe scale"),
        Head("use", "use", "recommended scale"),
        Head("lost", "flushed at that scale", "share of gradient values rounded to zero", keep=4),
        Head("lost_at_1", "flushed at scale 1", "the same without a loss scale", keep=3),
        Head("ceiling", "overflows from", "smallest scale tried that overflowed", keep=5),
    )
    rows = []
    for case in scales.cases:
        window = find_window(case, scales.tolerance)
        lost = Cell(NOTHING) if window.use is None else _share_cell(case.lost(window.use))
        alone = _share_cell(case.lost(1.0)) if 1.0 in case.scales else Cell(NOTHING)
        rows.append(
            (
                Cell(case.precision),
                Cell(case.model),
                Cell(str(case.batch_size), case.batch_size),
                scale_cell(window.low),
                scale_cell(window.high),
                scale_cell(window.use) if window.needed else Cell("none needed"),
                lost,
                alone,
                scale_cell(window.ceiling),
            )
        )
    notes = [
        "Flushed: rounded to zero. Safe: this scale and all smaller ones never overflow, and it "
        f"flushes at most {write_share(scales.tolerance)} more of the values than the best scale, "
        f"and of no single layer more than {write_share(LAYER_TOLERANCE)} beyond its best scale. "
        f"Use: the largest safe scale at which gradients {HEADROOM} times as large would still "
        "not overflow.",
        *dict.fromkeys(case.way.meaning for case in scales.cases),
    ]
    return Table("scales", "Safe loss scales", heads, tuple(rows), tuple(notes))


def _judge(case: ScaleCase, window: Window, scale: float) -> str:
    if case.diverged:
        return "fp32 itself diverged"
    if window.ceiling is not None and scale >= window.ceiling:
        return "overflows" if scale in case.overflows else "above an overflow"
    if window.low is None or window.high is None or not window.low <= scale <= window.high:
        lost = case.lost(scale)
        if lost <= window.enough and scale in window.starved:
            return f"layer {window.starved[scale][0]} loses too much"
        # the column beside it may round to the tolerance
        exact = write_share(lost, window.enough)
        return "flushes too much" + (f": {exact}" if exact != write_share(lost) else "")
    return "safe, use this" if scale == window.use and window.needed else "safe"


def _tabulate_scales(case: ScaleCase, window: Window, name: str) -> Table:
    heads = (
        Head("scale", "scale", "loss scale"),
        Head("output_lost", "outputs flushed", "share rounded to zero", better="lower"),
        Head("output_subnormal", "outputs subnormal", "share kept with fewer digits", keep=5),
        Head("output_overflowed", "outputs overflow", "share beyond the largest value", keep=7),
        Head("weight_lost", "weights flushed", "share rounded to zero", better="lower"),
        Head("weight_subnormal", "weights subnormal", "share kept with fewer digits", keep=3),
        Head("weight_overflowed", "weights overflow", "share beyond the largest value", keep=7),
        Head("first_overflow", "first overflow", "step, from 1", keep=4),
        Head("judgement", "verdict", "what the rule makes of it", False, wrap=True),
    )
    fates = (Fate.FLUSHED, Fate.SUBNORMAL, Fate.OVERFLOWED)
    rows = []
    for scale in case.scales:
        first = case.overflows.get(scale)
        rows.append(
            (
                scale_cell(scale),
                *(_share_cell(case.share(f, scale, k)) for k in Kind for f in fates),
                Cell(NOTHING) if first is None else Cell(f"step {first.step}", first.step),
                Cell(_judge(case, window, scale)),
            )
        )
    most = " Each share is that of the step where it is largest." if len(case.at) > 1 else ""
    notes = [
        "Share of the gradient values of all layers' outputs and of all layers' weights, at "
        f"{name_steps(case.at)}. Values that are zero before scaling are left out.{most}",
        "Flushed: rounded to zero. Subnormal: kept with fewer digits. Overflow: beyond the largest "
        f"finite value; checked {tell_seen(case)}. What a network keeps in fp32, such as "
        "BatchNorm's parameters, is not rounded.",
    ]
    return Table(
        f"scales-gradients{name}", f"Gradients by loss scale: {case.label}", heads, tuple(rows),
        tuple(notes),
    )  # fmt: skip


def _describe_trace(training: ScaledTraining) -> str:
    """Where the scale changed: ``2^16, 2^15 from step 2``."""
    told, before = [], None
    for step, scale in enumerate(training.scales, 1):
        if scale != before:
            told.append(write_scale(scale) + (f" from step {step}" if step > 1 else ""))
        before = scale
    shown = told if len(told) <= 5 else [*told[:3], "…", told[-1]]
    return ", ".join(shown)


def _name_setting(setting: str) -> str:
    try:
        return write_scale(float(setting))
    except ValueError:
        return setting or "none, in fp32"


def _tabulate_trainings(case: ScaleCase, name: str) -> Table:
    heads = (
        Head("setting", "loss scale", "static, or the rule of a dynamic one", False),
        Head("loss", f"loss at step {case.steps}", "of that step's batch", better="lower"),
        Head("difference", "minus fp32", "difference of that loss from the one in fp32", keep=6),
        Head("overflows", "steps with overflow", "skipped under a dynamic scale", keep=5),
        Head("first", "first overflow", "step, from 1", keep=4),
        Head("trace", "scale during training", "where it changed", False, wrap=True),
    )
    fp32 = case.training("")
    rows = []
    for training in case.trainings:
        loss = training.losses[-1]
        difference = loss - fp32.losses[-1] if fp32 else math.nan
        first = training.first_overflow
        rows.append(
            (
                Cell(_name_setting(training.setting)),
                Cell(f"{loss:.4f}", loss) if math.isfinite(loss) else Cell("not finite"),
                Cell(f"{difference:+.4f}", difference)
                if training.setting and math.isfinite(difference)
                else Cell(NOTHING),
                Cell(str(training.overflows), training.overflows),
                Cell(NOTHING) if first is None else Cell(f"step {first}", first),
                Cell(_describe_trace(training) if training.setting else NOTHING),
            )
        )
    notes = (
        "All trainings start from the same weights and use the same batches. A static scale skips "
        "no step: after an overflow the weights are inf or NaN.",
    )
    return Table(
        f"scales-trainings{name}", f"Training by loss scale: {case.label}", heads, tuple(rows),
        notes,
    )  # fmt: skip


MOST_LAYERS = 8
"""Layers that the table names; the CSV file has all."""


def _tabulate_layers(case: ScaleCase, window: Window, name: str) -> Table:
    shown = [s for s in dict.fromkeys((1.0, 128.0, window.use)) if s in case.scales]
    if not shown:
        shown = [case.scales[0]]
    heads = (
        Head("layer", "layer", "its name in the network", False),
        Head("kind", "gradient", "of the layer's output or its weights", False),
        *(
            Head(
                f"lost_{s:g}",
                f"flushed at {write_scale(s)}",
                "rounded to zero",
                keep=9 if s == shown[-1] else 4,
            )
            for s in shown
        ),
    )
    lost = {kind: case.by_layer(Fate.FLUSHED, kind) for kind in Kind}
    pairs = [
        (layer, kind) for layer in case.layers for kind in Kind if (layer, shown[0]) in lost[kind]
    ]
    worst = sorted(
        pairs, key=lambda pair: [lost[pair[1]][pair[0], s] for s in reversed(shown)], reverse=True
    )[:MOST_LAYERS]
    rows = tuple(
        (Cell(layer), Cell(kind.value), *(_share_cell(lost[kind][layer, s]) for s in shown))
        for layer, kind in worst
    )
    notes = (
        f"The {len(rows)} of {len(pairs)} gradients with the largest shares in the last column; "
        f"equal ones are sorted by the column before it. {GRADIENTS} has all.",
    )
    return Table(
        f"scales-layers{name}", f"Layers with the most values flushed to zero: {case.label}",
        heads, rows, notes,
    )  # fmt: skip
