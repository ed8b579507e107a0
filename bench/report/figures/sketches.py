"""The figures there are: what each is called, where its data comes from and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.questions.batch_sizes import DROP, NEAR
from bench.questions.gpus import find_taxes
from bench.questions.reasons import choose_pairs, name_pair
from bench.report.document import Report
from bench.report.figures import drawing
from bench.report.figures.data import (
    CARD,
    LIMIT,
    LINE,
    LR,
    MARK,
    MEMORY,
    OVER_FP32,
    SPEED,
    START,
    TIME,
    WIDER,
    by_batch,
    take_changes,
    take_curves,
    take_memory,
    take_rates,
    take_roofline,
    take_scales,
    take_scaling,
    take_speeds,
    take_steps,
    take_switch,
    take_tax,
    take_trade,
    take_waterfall,
    take_whole_curves,
)
from bench.report.figures.groups import Group, Grouping, Steps, group_cases, read_steps, split_lines
from bench.study.quantities import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

CHANGES = "changes"
"""The figure of the effects, which stands beside their table."""


@dataclass(frozen=True)
class View:
    """A report, cut into panels once for all figures."""

    report: Report
    grouping: Grouping
    steps: Steps


def view_report(report: Report) -> View:
    """Cut a report into panels."""
    return View(report, group_cases(report), read_steps(report))


Parts = Iterator[tuple[str, "pd.DataFrame"]]
"""The title of each panel, and its data; no data for a panel that is not drawn."""


@dataclass(frozen=True)
class Sketch:
    """How a figure is made: the data of its panels, and the drawing of one.

    ``value`` is the column that is the point of it; ``baseline`` is whether its cases are those at
    the baseline of their panel; ``explain`` are sentences for the caption where a column is there.
    """

    name: str
    title: str
    caption: str
    value: str
    take: Callable[[View], Parts]
    draw: Callable[[Axes, pd.DataFrame, pd.DataFrame], None]
    baseline: bool = True
    explain: Mapping[str, str] = field(default_factory=dict)

    def describe(self, columns: Iterable[str]) -> str:
        """The caption of a figure whose data has these columns."""
        return " ".join([self.caption, *(self.explain[c] for c in columns if c in self.explain)])


def each_group(take: Callable[[Group], pd.DataFrame], least: int = 1) -> Callable[[View], Parts]:
    """A panel a group, of cases at its baseline; none at all where no panel has ``least`` rows."""

    def take_all(view: View) -> Parts:
        parts = [(group.title, take(group)) for group in view.grouping.groups]
        if max((len(data) for _, data in parts), default=0) >= least:
            yield from parts

    return take_all


def each_run(
    take: Callable[[Group, Report, Steps], pd.DataFrame],
) -> Callable[[View], Parts]:
    """A panel a group, of the steps of its runs at one batch size."""

    def take_all(view: View) -> Parts:
        for group in view.grouping.groups:
            data = take(group, view.report, view.steps)
            yield add_batch(group.title, data), data

    return take_all


def add_batch(title: str, data: pd.DataFrame) -> str:
    """Add to a title the batch sizes that are the same along each line."""
    if not len(data):
        return title
    sizes = " and ".join(map(str, data["batch size"].unique()))
    return f"{title}, batch size {sizes}" if title else f"Batch size {sizes}"


def _take_trades(view: View) -> Parts:
    for group in view.grouping.groups:
        yield group.place, take_trade(group)


def _take_rates(view: View) -> Parts:
    for group in view.grouping.groups:
        data, heading = take_rates(group, view.report, view.steps)
        yield " · ".join(filter(None, (group.place, heading))), data


def _take_scales(view: View) -> Parts:
    for group in view.grouping.groups:
        data = take_scales(group)
        yield add_batch(group.title, data), data


def _take_changes(view: View) -> Parts:
    yield "Speed: right is faster", take_changes(view.report, "epoch_time_s", inverse=True)
    yield "Memory: left is less", take_changes(view.report, "memory_bytes")
    yield "Energy of an epoch: left is less", take_changes(view.report, "energy_per_epoch_j")


def _take_waterfalls(view: View) -> Parts:
    for why in choose_pairs(view.report.explanations):
        yield name_pair(why), take_waterfall(why)


def _take_rooflines(view: View) -> Parts:
    for why in choose_pairs(view.report.explanations):
        yield name_pair(why), take_roofline(why)


def _take_scaling(view: View) -> Parts:
    for title, part in split_lines(view.report.lines, view.report):
        yield title, take_scaling(part)


def _take_taxes(view: View) -> Parts:
    for title, part in split_lines(view.report.lines, view.report):
        yield title, take_tax(find_taxes(part))


def _take_switches(view: View) -> Parts:
    for effect in view.report.effects:
        if effect.before == "off":
            data, pairs = take_switch(view.report, effect)
            if len(data):
                title = f"{effect.axis.replace('_', ' ')}: off → {effect.after}"
                yield title + (f", {len(data)} of {pairs} pairs" if pairs > len(data) else ""), data


_OTHERS = "Each precision at its main loss scale"

_ONE_RUN = "One run of each case: of its repeats, the one whose epoch time is the median."

_SAME_IMAGES = (
    "Published curves are dashed; beside one, each point is the mean of as many images as its own, "
    "which are those of 50 steps."
)

SKETCHES: tuple[Sketch, ...] = (
    Sketch(
        CHANGES,
        "The same as a picture: speed and memory of each change",
        "Ratio after the change to before, with everything else equal: the geometric mean of "
        "pairs of cases that differ only in this, those of the table.",
        "ratio",
        _take_changes,
        drawing.draw_changes,
        baseline=False,
    ),
    Sketch(
        "switches",
        "What each switch does",
        "A row is a pair of cases that differ only in the switch, with the speed-up at the right "
        "end; the largest speed-up is at the top.",
        "speed (×)",
        _take_switches,
        drawing.draw_pairs,
        baseline=False,
    ),
    Sketch(
        "waterfall",
        "From one step time to the other",
        "By kind of work, what changed most first; the parts add up to the difference. A tick is "
        "where a part would end at the rates measured on this machine.",
        "change (ms)",
        _take_waterfalls,
        drawing.draw_waterfall,
        baseline=False,
    ),
    Sketch(
        "roofline",
        "Kinds of work under what this machine was measured to do",
        "Higher is faster, and the line is the limit: a large copy on the slope, a large matrix "
        "product on the level. A larger point takes more of its step; lines join a kind of work "
        "before and after. What has no FLOP stands in the grey strip, as far below the slope as "
        "it moves fewer bytes a second than a copy.",
        SPEED,
        _take_rooflines,
        drawing.draw_roofline,
        baseline=False,
    ),
    Sketch(
        "epoch-time",
        "Epoch time",
        f"Lower is better. {_OTHERS}.",
        TIME,
        each_group(by_batch(QUANTITIES["epoch_time_s"]), 2),
        drawing.draw_batches,
    ),
    Sketch(
        "images-per-s",
        "Images per second",
        f"Higher is better. {_OTHERS}.",
        "images/s",
        each_group(take_speeds, 2),
        drawing.draw_speeds,
        explain={
            MARK: f"A ring marks the knee, the smallest batch size within {100 * NEAR:.0f} % of "
            f"the best; a wide band marks a cliff, a drop of more than {100 * DROP:.0f} %.",
        },
    ),
    Sketch(
        "memory",
        "Memory",
        f"Lower is better. {_OTHERS}.",
        MEMORY,
        each_group(take_memory, 2),
        drawing.draw_memory,
        explain={
            START: "The grey band is what the process needs before the first step: Python, torch "
            "and its libraries, the network and the dataset.",
            CARD: "A cross on the line of the card marks a batch that ran out of memory.",
            LIMIT: "A cross on the line of the memory limit marks a batch that ran out of memory.",
            LINE: "Where memory is a line, it goes on dashed to batch sizes that did not run, up "
            "to where it is predicted to end.",
        },
    ),
    Sketch(
        "speed-up",
        "Speed-up over fp32",
        "Higher is better. Each case is compared with fp32 at the same batch size and settings. "
        f"{_OTHERS}.",
        "speed-up (×)",
        each_group(by_batch(QUANTITIES["speedup"])),
        drawing.draw_speedup,
    ),
    Sketch(
        "gpu-scaling",
        "Speed-up over one GPU",
        "Higher is better. Of weak scaling the batch of each GPU stays, of strong scaling that of "
        "all together; on a CPU they are processes.",
        WIDER,
        _take_scaling,
        drawing.draw_scaling,
        baseline=False,
    ),
    Sketch(
        "scaling-tax",
        "Precision's scaling tax",
        "How much faster than fp32 each precision is on as many GPUs: a line that falls loses its "
        "lead to the exchange of gradients.",
        OVER_FP32,
        _take_taxes,
        drawing.draw_tax,
        baseline=False,
    ),
    Sketch(
        "loss-curve",
        "Loss during training",
        f"Mean cross-entropy of the images since the previous point. {_ONE_RUN} {_SAME_IMAGES}",
        "loss",
        each_run(take_curves),
        drawing.draw_curve("loss"),
    ),
    Sketch(
        "accuracy-curve",
        "Accuracy during training",
        "Share of the images since the previous point that were predicted correctly, of whole "
        f"epochs. {_ONE_RUN} {_SAME_IMAGES}",
        "accuracy (%)",
        each_run(take_whole_curves),
        drawing.draw_curve("accuracy (%)"),
    ),
    Sketch(
        "learning-rate",
        "Learning rate of each step",
        "The cases with different learning rates, at all their settings, named by the values of "
        "what the heading says. Of learning rates that look alike, the first is shown.",
        LR,
        _take_rates,
        drawing.draw_rates,
        baseline=False,
    ),
    Sketch(
        "loss-by-scale",
        "Loss by static loss scale",
        "Mean cross-entropy over a whole epoch, at the largest batch size with several scales.",
        "loss",
        _take_scales,
        drawing.draw_scales,
    ),
    Sketch(
        "time-memory",
        "Time against memory",
        "Lower left is better. All settings are shown. On the dashed line, the Pareto front, are "
        "the cases that no other case beats in both; where there is room, they are labelled with "
        "their batch size and with what differs from the other settings.",
        TIME,
        _take_trades,
        drawing.draw_trade,
        baseline=False,
    ),
    Sketch(
        "step-time",
        "Distribution of step times",
        "Box: quartiles and median. Whiskers: up to 1.5 times the interquartile range. Dots: "
        f"outliers. {_ONE_RUN}",
        "step time (ms)",
        each_run(take_steps),
        drawing.draw_steps,
    ),
    Sketch(
        "energy",
        "Energy of an epoch",
        f"Lower is better. {_OTHERS}.",
        "energy (J)",
        each_group(by_batch(QUANTITIES["energy_per_epoch_j"]), 2),
        drawing.draw_batches,
    ),
)
