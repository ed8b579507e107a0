"""The figures there are: what each is called, where its data comes from and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.questions.batch_sizes import DROP, NEAR
from bench.questions.reasons import choose_pairs, name_pair
from bench.report.document import Report
from bench.report.figures import data, drawing
from bench.report.figures.groups import Group, Grouping, Steps, group_cases, read_steps, split_lines
from bench.study.quantities import QUANTITIES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from bench.diagnosis.explanation import Explanation
    from bench.questions.lines import Line

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
    question: str
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


def _title(group: Group, frame: pd.DataFrame) -> str:
    return group.title


def _title_with_batch(group: Group, frame: pd.DataFrame) -> str:
    """Add to a title the batch sizes that are the same along each line."""
    if not len(frame):
        return group.title
    sizes = " and ".join(map(str, frame["batch size"].unique()))
    return f"{group.title}, batch size {sizes}" if group.title else f"Batch size {sizes}"


def each_group(
    take: Callable[[Group], pd.DataFrame],
    title: Callable[[Group, pd.DataFrame], str] = _title,
    least: int = 1,
) -> Callable[[View], Parts]:
    """A panel a group; none at all where no panel has ``least`` rows."""

    def take_all(view: View) -> Parts:
        parts = [(group, take(group)) for group in view.grouping.groups]
        if max((len(frame) for _, frame in parts), default=0) >= least:
            yield from ((title(*part), part[1]) for part in parts)

    return take_all


def each_run(take: Callable[[Group, Report, Steps], pd.DataFrame]) -> Callable[[View], Parts]:
    """A panel a group, of the steps of its runs at one batch size."""
    return lambda view: each_group(
        lambda group: take(group, view.report, view.steps), _title_with_batch
    )(view)


def each_pair(take: Callable[[Explanation], pd.DataFrame]) -> Callable[[View], Parts]:
    """A panel a pair of cases that is explained in full."""
    return lambda view: (
        (name_pair(why), take(why)) for why in choose_pairs(view.report.explanations)
    )


def each_width(take: Callable[[Sequence[Line]], pd.DataFrame]) -> Callable[[View], Parts]:
    """A panel for the lines of cases on one GPU and on several that differ only in precision."""
    return lambda view: (
        (title, take(part)) for title, part in split_lines(view.report.lines, view.report)
    )


def _take_rates(view: View) -> Parts:
    for group in view.grouping.groups:
        frame, heading = data.take_rates(group, view.report, view.steps)
        yield " · ".join(filter(None, (group.place, heading))), frame


def _take_changes(view: View) -> Parts:
    yield "Speed: right is faster", data.take_changes(view.report, "epoch_time_s", inverse=True)
    yield "Memory: left is less", data.take_changes(view.report, "memory_bytes")
    yield "Energy of an epoch: left is less", data.take_changes(view.report, "energy_per_epoch_j")


def _take_switches(view: View) -> Parts:
    for effect in view.report.effects:
        if effect.before == "off":
            frame, pairs = data.take_switch(view.report, effect)
            if len(frame):
                some = f", {len(frame)} of {pairs} pairs" if pairs > len(frame) else ""
                yield f"{effect.axis.replace('_', ' ')}: off → {effect.after}{some}", frame


def _by_batch(quantity: str, least: int = 2) -> Callable[[View], Parts]:
    return each_group(data.by_batch(QUANTITIES[quantity]), least=least)


_OTHERS = "Each precision at its main loss scale"

_ONE_RUN = "One run of each case: of its repeats, the one whose epoch time is the median."

_SAME_IMAGES = (
    "Published curves are dashed; beside one, each point is the mean of as many images as its own, "
    "which are those of 50 steps."
)

SKETCHES: tuple[Sketch, ...] = (
    Sketch(
        CHANGES,
        "How much does each change speed up or save?",
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
        "What does each switch do, case by case?",
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
        "Which kinds of work make one step shorter than the other?",
        "From one step time to the other",
        "By kind of work, what changed most first; the parts add up to the difference. A tick is "
        "where a part would end at the rates measured on this machine.",
        "change (ms)",
        each_pair(data.take_waterfall),
        drawing.draw_waterfall,
        baseline=False,
    ),
    Sketch(
        "roofline",
        "How near is each kind of work to the limits of this machine?",
        "Kinds of work under what this machine was measured to do",
        "Higher is faster, and the line is the limit: a large copy on the slope, a large matrix "
        "product on the level. A larger point takes more of its step; lines join a kind of work "
        "before and after. What has no FLOP stands in the grey strip, as far below the slope as "
        "it moves fewer bytes a second than a copy.",
        data.SPEED,
        each_pair(data.take_roofline),
        drawing.draw_roofline,
        baseline=False,
    ),
    Sketch(
        "epoch-time",
        "How long does an epoch take at each batch size?",
        "Epoch time",
        f"Lower is better. {_OTHERS}.",
        data.TIME,
        _by_batch("epoch_time_s"),
        drawing.draw_batches,
    ),
    Sketch(
        "images-per-s",
        "How many images a second are trained at each batch size?",
        "Images per second",
        f"Higher is better. {_OTHERS}.",
        "images/s",
        each_group(data.take_speeds, least=2),
        drawing.draw_speeds,
        explain={
            data.MARK: "A ring marks the knee, the smallest batch size within "
            f"{100 * NEAR:.0f} % of the best; a wide band marks a cliff, a drop of more than "
            f"{100 * DROP:.0f} %.",
        },
    ),
    Sketch(
        "memory",
        "How much memory does each batch size take?",
        "Memory",
        f"Lower is better. {_OTHERS}.",
        data.MEMORY,
        each_group(data.take_memory, least=2),
        drawing.draw_memory,
        explain={
            data.START: "The grey band is what the process needs before the first step: Python, "
            "torch and its libraries, the network and the dataset.",
            data.CARD: "A cross on the line of the card marks a batch that ran out of memory.",
            data.LIMIT: "A cross on the line of the memory limit marks a batch that ran out of "
            "memory.",
            data.LINE: "Where memory is a line, it goes on dashed to batch sizes that did not "
            "run, up to where it is predicted to end.",
        },
    ),
    Sketch(
        "speed-up",
        "How much faster than fp32 is each precision?",
        "Speed-up over fp32",
        "Higher is better. Each case is compared with fp32 at the same batch size and settings. "
        f"{_OTHERS}.",
        "speed-up (×)",
        _by_batch("speedup", least=1),
        drawing.draw_speedup,
    ),
    Sketch(
        "gpu-scaling",
        "How much faster are several GPUs than one?",
        "Speed-up over one GPU",
        "Higher is better. Of weak scaling the batch of each GPU stays, of strong scaling that of "
        "all together; on a CPU they are processes.",
        data.WIDER,
        each_width(data.take_scaling),
        drawing.draw_scaling,
        baseline=False,
    ),
    Sketch(
        "scaling-tax",
        "Does a precision keep its lead on more GPUs?",
        "Precision's scaling tax",
        "How much faster than fp32 each precision is on as many GPUs: a line that falls loses its "
        "lead to the exchange of gradients.",
        data.OVER_FP32,
        each_width(data.take_tax),
        drawing.draw_speedup,
        baseline=False,
    ),
    Sketch(
        "loss-curve",
        "How does the loss fall during training?",
        "Loss during training",
        f"Mean cross-entropy of the images since the previous point. {_ONE_RUN} {_SAME_IMAGES}",
        "loss",
        each_run(data.take_curves),
        drawing.draw_curve("loss"),
    ),
    Sketch(
        "accuracy-curve",
        "How does the accuracy rise during training?",
        "Accuracy during training",
        "Share of the images since the previous point that were predicted correctly, of whole "
        f"epochs. {_ONE_RUN} {_SAME_IMAGES}",
        "accuracy (%)",
        each_run(data.take_whole_curves),
        drawing.draw_curve("accuracy (%)"),
    ),
    Sketch(
        "learning-rate",
        "Which learning rate has each step?",
        "Learning rate of each step",
        "The cases with different learning rates, at all their settings, named by the values of "
        "what the heading says. Of learning rates that look alike, the first is shown.",
        data.LR,
        _take_rates,
        drawing.draw_rates,
        baseline=False,
    ),
    Sketch(
        "loss-by-scale",
        "Which static loss scale learns best?",
        "Loss by static loss scale",
        "Mean cross-entropy over a whole epoch, at the largest batch size with several scales.",
        "loss",
        each_group(data.take_scales, _title_with_batch),
        drawing.draw_scales,
    ),
    Sketch(
        "time-memory",
        "Which settings are best in time and memory together?",
        "Time against memory",
        "Lower left is better. All settings are shown. On the dashed line, the Pareto front, are "
        "the cases that no other case beats in both; where there is room, they are labelled with "
        "their batch size and with what differs from the other settings.",
        data.TIME,
        each_group(data.take_trade, lambda group, frame: group.place),
        drawing.draw_trade,
        baseline=False,
    ),
    Sketch(
        "step-time",
        "How much do the times of single steps differ?",
        "Distribution of step times",
        "Box: quartiles and median. Whiskers: up to 1.5 times the interquartile range. Dots: "
        f"outliers. {_ONE_RUN}",
        "step time (ms)",
        each_run(data.take_steps),
        drawing.draw_steps,
    ),
    Sketch(
        "energy",
        "How much energy does an epoch take?",
        "Energy of an epoch",
        f"Lower is better. {_OTHERS}.",
        "energy (J)",
        _by_batch("energy_per_epoch_j"),
        drawing.draw_batches,
    ),
)
