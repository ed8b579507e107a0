"""The pictures of a check: the network's inputs, its predictions and losses, and its layers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.render.table import COLOURS, GRID, INK, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from bench.check.layers import Spread
    from bench.check.subject import FirstSteps, Predictions, Subject

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""CIFAR-10's class names by label, from batches.meta in its archive."""

MOST_IMAGES = 32
FIRST, LAST = (light for light, _ in list(COLOURS.values())[:2])

_RC: Any = {
    **STYLE,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw_pictures(subject: Subject, folder: Path) -> list[Path]:
    """Draw what the checks have computed, as batch.png, losses.png, predictions.png and layers.png;
    a workload without images of a dataset has losses.png and layers.png only. Return the files
    written."""
    import matplotlib as mpl

    drawn = []

    def save(name: str, draw: Callable[[], Figure]) -> None:
        with mpl.rc_context(_RC):
            file = folder / f"{name}.png"
            draw().savefig(file, dpi=110, facecolor="white")
            drawn.append(file)

    known = vars(subject)  # only what was computed: drawing trains nothing
    if subject.images is not None and "batch" in known:
        save("batch", lambda: draw_batch(subject))
    first, blind = known.get("first_steps"), known.get("blind_losses")
    if first is not None:
        save("losses", lambda: draw_losses(first.losses, blind or ()))
        if first.predictions is not None:
            save("predictions", lambda: draw_predictions(first.predictions, subject))
        save("layers", lambda: draw_layers(first))
    return drawn


def _name_class(subject: Subject, label: Tensor) -> str:
    """Return a label, with its class name if the dataset is CIFAR-10 in one of its own layouts."""
    assert subject.images is not None
    info = subject.images.data.info
    known = info.name == "cifar10" and info.source != "folders"
    return f"{int(label)} {NAMES[label]}" if known else f"{int(label)}"


def _show(ax: Axes, image: Any) -> None:
    from bench.data.batches import MEAN, STD

    image = image.float().cpu().permute(1, 2, 0)
    ax.imshow((image * image.new_tensor(STD) + image.new_tensor(MEAN)).clamp(0, 1).numpy())
    ax.set_axis_off()


def _canvas(title: str, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width, height), layout="constrained")
    canvas.suptitle(textwrap.fill(title, 100), fontsize=10, x=0.01, ha="left")
    return canvas


def draw_batch(subject: Subject) -> Figure:
    x, y = subject.batch
    n = min(MOST_IMAGES, len(x))
    rows = math.ceil(n / 8)
    title = f"The first {n} images of the first batch, denormalised, with their labels"
    canvas = _canvas(f"{title}: do they agree?", 8, 0.6 + 1.2 * rows)
    for i, ax in enumerate(canvas.subplots(rows, 8, squeeze=False).flat):
        ax.set_axis_off()
        if i < n:
            _show(ax, x[i])
            ax.set_title(_name_class(subject, y[i]), fontsize=8)
    return canvas


def draw_losses(losses: Sequence[float], blind: Sequence[float]) -> Figure:
    canvas = _canvas("Loss of the first steps", 6, 3.2)
    ax = canvas.add_subplot()
    for of, colour, label, width in (
        (losses, LAST, "inputs", None),
        (blind, FIRST, "blank inputs", 1),
    ):
        if of:
            # a gap where a loss is not finite: an axis cannot show it
            shown = [loss if math.isfinite(loss) else math.nan for loss in of]
            ax.plot(shown, color=colour, label=label, linewidth=width)
    ax.set(xlabel="step", ylabel="loss")
    ax.grid(linewidth=0.6)
    ax.legend()
    return canvas


def draw_predictions(predictions: Predictions, subject: Subject) -> Figure:
    rows = math.ceil(len(predictions.images) / 2)
    title = (
        "Predictions over the first steps, in evaluation mode: the right class is the thick line"
    )
    canvas = _canvas(title, 8, 0.6 + 1.25 * rows)
    grid = canvas.subplots(rows, 4, squeeze=False, width_ratios=[1, 3, 1, 3])
    for ax in grid.flat:
        ax.set_axis_off()
    for i, (image, right) in enumerate(zip(predictions.images, predictions.labels, strict=True)):
        picture, ax = grid.reshape(-1, 2)[i]
        _show(picture, image)
        picture.set_title(_name_class(subject, right), fontsize=8)
        ax.set_axis_on()
        curves = predictions.probabilities[:, i].numpy()
        ax.plot(predictions.steps, curves, color=GRID, linewidth=0.9)
        ax.plot(predictions.steps, curves[:, right], color=LAST, linewidth=2.4)
        ax.set(ylim=(0, 1), yticks=(0, 0.5, 1))
        ax.set_xticks(predictions.steps[:: len(predictions.steps) // 4])
        ax.tick_params(labelsize=7)
    return canvas


_MOST_NAMES = 45


def draw_layers(first: FirstSteps) -> Figure:
    width = max(8.0, min(20.0, 0.19 * len(first.readings[0].gradients)))
    title = "Layers, from input to output: median (point), half (bar) and 98 % (line) of the values"
    canvas = _canvas(title, width, 11)
    outputs, dead, gradients, updates = canvas.subplots(4, 1, height_ratios=[3, 1.2, 3, 1.8])
    for at, (reading, colour) in enumerate(zip(first.readings, (FIRST, LAST), strict=False)):
        when = f"step {reading.step}"
        shift = 0.3 * at - 0.15
        _draw_spreads(outputs, [a.spread for a in reading.activations], shift, colour, when)
        places = [i + shift for i in range(len(reading.activations))]
        dead.bar(places, [a.dead for a in reading.activations], 0.3, color=colour)
        _draw_spreads(gradients, [g.spread for g in reading.gradients], shift, colour, when)
        moves = [(i + shift, g.update) for i, g in enumerate(reading.gradients)]
        finite = [(place, move) for place, move in moves if 0 < move < math.inf]
        updates.scatter([p for p, _ in finite], [m for _, m in finite], s=10, color=colour)
    outputs.set(ylabel="output", yscale="symlog", xticks=[])
    dead.set(ylabel="dead channels", ylim=(0, 1))
    dead.axhline(0.5, color=INK, linewidth=0.8, linestyle=":")
    gradients.set_yscale("log", nonpositive="clip")
    gradients.set(ylabel="gradient's magnitude", xticks=[])
    updates.set(ylabel="update / weight", yscale="log")
    updates.axhline(1e-3, color=INK, linewidth=0.8, linestyle=":")
    _name(dead, [a.layer for a in first.readings[0].activations])
    _name(updates, [g.weight for g in first.readings[0].gradients])
    outputs.legend(loc="upper left", ncols=2)
    for ax in (outputs, dead, gradients, updates):
        ax.grid(axis="y", linewidth=0.6)
        ax.margins(x=0.01)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return canvas


def _draw_spreads(
    ax: Axes, spreads: Sequence[Spread], shift: float, colour: str, label: str
) -> None:
    # a layer that is not finite has no place on the axis; without any other, nothing is drawn
    shown = [(i + shift, s.quantiles) for i, s in enumerate(spreads) if not s.not_finite]
    if not shown:
        return
    places, quantiles = zip(*shown, strict=True)
    low, lower, middle, upper, high = zip(*quantiles, strict=True)
    ax.vlines(places, low, high, color=colour, linewidth=0.8)
    ax.vlines(places, lower, upper, color=colour, linewidth=3)
    ax.scatter(places, middle, s=7, color=colour, zorder=3, label=label)


def _name(ax: Axes, names: Sequence[str]) -> None:
    every = -(-len(names) // _MOST_NAMES) if len(names) > 2 * _MOST_NAMES else 1
    ax.set_xticks(range(0, len(names), every), names[::every], rotation=90, fontsize=6)
