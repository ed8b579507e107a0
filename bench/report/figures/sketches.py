"""The list of all figures: the name of each, the source of its data and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import pandas as pd
from matplotlib.axes import Axes

from bench.diagnosis.explanation import Explanation
from bench.limits import NEAR
from bench.questions.batch_sizes import DROP
from bench.questions.reasons import choose_pairs, name_pair
from bench.report.document import Report
from bench.report.figures import drawing, frames
from bench.report.figures.frames import Parts
from bench.report.figures.groups import Group, View


@dataclass(frozen=True)
class Sketch:
    """The definition of a figure: the data of its panels, and how one is drawn."""

    name: str
    question: str
    title: str
    caption: str
    value: str  # its main column
    take: Callable[[View], Parts]
    draw: Callable[[Axes, pd.DataFrame, pd.DataFrame, str], None]
    baseline: bool = True  # whether its cases are at the baseline of their panel
    explain: Mapping[str, str] = field(default_factory=dict)  # by column, what the caption adds


def each_group(
    take: Callable[[Group, View], pd.DataFrame], least: int = 1
) -> Callable[[View], Parts]:
    """Make a panel per group, at its baseline; none at all if no panel has ``least`` rows. If each
    line has one batch size, the title gives it."""

    def take_all(view: View) -> Parts:
        parts = [(group, take(group, view)) for group in view.groups]
        for group, data in parts if max((len(d) for _, d in parts), default=0) >= least else ():
            title = " · ".join(filter(None, (group.place, group.baseline)))
            if frames.BATCH in data.columns[1:]:
                sizes = " and ".join(map(str, data[frames.BATCH].unique()))
                title = f"{title}, batch size {sizes}" if title else f"Batch size {sizes}"
            yield title, data

    return take_all


def _by_batch(quantity: str, least: int = 2) -> Callable[[View], Parts]:
    return each_group(lambda group, _: frames.take_quantity(group, quantity), least)


def _each_pair(take: Callable[[Explanation], pd.DataFrame]) -> Callable[[View], Parts]:
    """Make a panel per pair of cases that is explained in full."""
    return lambda v: ((name_pair(w), take(w)) for w in choose_pairs(v.report.pairs))


_OTHERS = "Each precision at its main loss scale"

_RANGES = (
    "A bar is the range in the overview, of the runs or within the only one; shorter ones are not "
    "drawn."
)

_ONE_RUN = "One run of each case: of its repeats, the one whose epoch time is the median."

_SAME_IMAGES = (
    "Published curves are dashed; beside one, each point is the mean of as many images as its own, "
    "which are those of 50 steps."
)

CHANGES = "changes"  # the figure of the effects, which stands beside their table

SKETCHES: tuple[Sketch, ...] = (
    Sketch(
        CHANGES, "How much does each change speed up or save?",
        "The same as a picture: speed and memory of each change",
        "Ratio after the change to before, with everything else equal: the geometric mean of "
        "pairs of cases that differ only in this, those of the table.",
        "ratio", frames.take_changes, drawing.draw_changes, baseline=False,
    ),
    Sketch(
        "waterfall", "Which kinds of work make one step shorter than the other?",
        "From one step time to the other",
        "By kind of work, the largest change first; the parts add up to the difference. A tick is "
        "where a part would end at the rates measured on this machine.",
        frames.CHANGE, _each_pair(frames.take_waterfall), drawing.draw_waterfall, baseline=False,
    ),
    Sketch(
        "images-per-s", "How many images a second are trained at each batch size?",
        "Images per second", f"Higher is better. {_OTHERS}.",
        "images/s", each_group(frames.take_speeds, least=2), drawing.draw_speeds,
        explain={
            frames.HIGH: _RANGES,
            frames.MARK: "A ring marks the knee, the smallest batch size within "
            f"{100 * NEAR:.0f} % of the best; a wide band marks a cliff, a drop of more than "
            f"{100 * DROP:.0f} %.",
        },
    ),
    Sketch(
        "memory", "How much memory does each batch size take?", "Memory",
        f"Lower is better. {_OTHERS}.",
        frames.MEMORY, each_group(frames.take_memory, least=2), drawing.draw_memory,
        explain={
            frames.START: "The grey band is what the process needs before the first step: Python, "
            "torch and its libraries, the network and the dataset.",
            frames.CARD: "A cross on the line of the card marks a batch that ran out of memory.",
            frames.LIMIT: "A cross on the line of the memory limit marks a batch that ran out of "
            "memory.",
            frames.LINE: "Where memory grows linearly, a dashed line continues to batch "
            "sizes that did not run, up to the predicted limit.",
        },
    ),
    Sketch(
        "speed-up", "How much faster than fp32 is each precision?", "Speed-up over fp32",
        "Higher is better. Each case is compared with fp32 at the same batch size and settings. "
        f"{_OTHERS}.",
        "speed-up (×)", _by_batch("speedup", least=1), drawing.draw_speedup,
    ),
    Sketch(
        "gpu-scaling", "How much faster are several GPUs than one?", "Speed-up over one GPU",
        "Higher is better. Weak scaling keeps the batch per GPU, strong scaling the total batch; "
        "on a CPU, processes take the place of GPUs.",
        frames.WIDER, frames.take_scaling, drawing.draw_scaling, baseline=False,
    ),
    Sketch(
        "scaling-tax", "Does a precision keep its lead on more GPUs?", "Precision's scaling tax",
        "How much faster than fp32 each precision is on as many GPUs: a line that falls loses its "
        "lead to the exchange of gradients.",
        frames.OVER_FP32, frames.take_tax, drawing.draw_speedup, baseline=False,
    ),
    Sketch(
        "loss-curve", "How does the loss fall during training?", "Loss during training",
        f"Mean cross-entropy of the images since the previous point. {_ONE_RUN} {_SAME_IMAGES}",
        frames.LOSS, each_group(frames.take_curves), drawing.draw_curves,
    ),
    Sketch(
        "accuracy-curve", "How does the accuracy rise during training?", "Accuracy during training",
        "Share of the images since the previous point that were predicted correctly, of whole "
        f"epochs. {_ONE_RUN} {_SAME_IMAGES}",
        frames.ACCURACY, each_group(partial(frames.take_curves, whole=True)), drawing.draw_curves,
    ),
    Sketch(
        "time-memory", "Which settings are best in time and memory together?",
        "Time against memory",
        "Lower left is better. All settings are shown. On the dashed line, the Pareto front, are "
        "the cases that no other case beats in both, labelled with their batch size.",
        frames.TIME, frames.take_trade, drawing.draw_trade, baseline=False,
    ),
    Sketch(
        "energy", "How much energy does an epoch take?", "Energy of an epoch",
        f"Lower is better. {_OTHERS}.",
        "energy (J)", _by_batch("energy_per_epoch_j"), drawing.draw_batches,
    ),
)  # fmt: skip


def list_sketches(report: Report) -> list[Sketch]:
    """Return the figures that a document shows."""
    return [s for s in SKETCHES if s.name in report.figures or not report.figures]
