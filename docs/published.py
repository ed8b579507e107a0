"""The tables and the picture of published figures, made from `results/reference`.

`python docs/published.py` writes `docs/published-light.svg` and `docs/published-dark.svg`;
`tests/test_readme.py` holds them and the table against the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from bench.base.text import write_range
from bench.card import STATE
from bench.results.store.reader import read_beside, read_records
from bench.results.store.table import RECORDS
from bench.results.study.runs import make_results, read_runs
from bench.results.study.sweeps import read_sweep
from bench.results.study.warnings import SHORT_ENERGY_S
from bench.schema.case import AXES, SAME_QUESTION, Case
from bench.schema.record import Status, Step

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results" / "reference"
GIB = 2**30
PRECISIONS = ("fp32", "tf32", "bf16", "bf16-amp", "fp16-amp", "fp16")


@dataclass(frozen=True)
class Source:
    """One set of figures, and which of its rows the README shows.

    Those are the rows of `PRECISIONS` at ``batch_sizes``, at the main loss scale and the default
    memory layout, by the optimizer of most of them, on one GPU, that ran to their end or ran out of
    memory; of repeats the first, and of parts of one epoch the largest. ``file`` is in `REFERENCE`,
    or the folder of a sweep.
    """

    file: str | Path
    name: str
    how: str
    batch_sizes: tuple[int, ...]
    cudnn_benchmark: bool | None  # None for rows of both, which say so
    memory_column: str
    memory: str  # what that column measures

    def read(self) -> pd.DataFrame:
        """The rows that the README shows."""
        rows = read_records(REFERENCE / self.file)
        keep = (
            rows["precision"].isin(PRECISIONS)
            & rows["batch_size"].isin(self.batch_sizes)
            & ~rows["channels_last"]
            & ~rows["cuda_graphs"]
            & rows["loss_scale"].isin(["", "128", "dynamic"])
            & (rows["parallel"] == Case.parallel)
            & (rows["repeat"] == 1)
            & rows["status"].isin([Status.OK, Status.OOM])
        )
        if self.cudnn_benchmark is not None:
            keep &= rows["cudnn_benchmark"] == self.cudnn_benchmark
        rows = rows[keep & ~rows["sentinel"] & ~rows["probe"] & rows["truncated_after"].isna()]
        rows = rows[rows["optimizer"] == rows["optimizer"].mode()[0]]
        rows = rows.sort_values(["fraction", "evaluate"], ascending=False, kind="stable")
        rows = rows.drop_duplicates([axis for axis in AXES if axis not in SAME_QUESTION])
        return rows.sort_values("batch_size", kind="stable")

    def describe(self, rows: pd.DataFrame) -> str:
        """Which GPU and versions measured it, how much of an epoch, and how."""
        row = rows.iloc[0]
        measured = rows["measured_images"] / rows["train_images"]  # which --until ends earlier
        whole, parts = rows["fraction"] == 1, measured.fillna(rows["fraction"])
        epochs = ["whole epochs"] if whole.any() else []
        if not whole.all():
            part = write_range(parts[~whole], lambda part: f"{100 * part:.0f}")
            epochs.append(f"≈ estimated from {part} % of an epoch")
        how = f"{', '.join(epochs)}, {self.how}"
        if row["optimizer"] != Case.optimizer:
            how += f"; {row['optimizer']} at lr {row['lr']:g}"
        return f"{row['gpu']}, torch {row['torch']}, cuDNN {row['cudnn']}; {how}"


SOURCES = (
    Source(
        "rtx-titan-2019.csv",
        "TITAN RTX, 2019",
        "the first of a process, autotuning included; one run each",
        (128, 256, 512, 640),
        True,
        "peak_device_bytes",
        "of the whole card, as published",
    ),
    Source(
        "h200-lab.csv",
        "H200, 2026",
        "after warm-up; one run each",
        (512,),
        True,
        "peak_reserved_bytes",
        "of torch's allocator",
    ),
)


@dataclass(frozen=True)
class Bar:
    """One case: what it is, and what was measured; None where it ran out of memory."""

    source: str
    label: str
    batch_size: int
    epoch_s: float | None
    images_per_s: float | None
    speedup: float | None  # over fp32 at the same batch size
    over_tf32: float | None
    rough_tf32: bool  # whether either time of that was measured on a part of an epoch
    memory_bytes: float | None
    energy_j: float | None  # of the epoch; None if it was measured for a few seconds only
    test_accuracy: float | None  # as a fraction, after the epoch
    estimated: bool
    warned: bool  # whether a report would not rely on its time
    base: bool  # what the others at this batch size are compared with


def read_bars(source: Source) -> list[Bar]:
    """The cases of a source: by batch size, the slowest first."""
    rows = source.read()
    # plain ones last: they are what others are compared with
    bases = rows.sort_values(["compile", "cudnn_benchmark"], ascending=False, key=_is_more)
    fp32, tf32 = (
        {row.batch_size: row for row in bases.itertuples() if row.precision == name}
        for name in ("fp32", "tf32")
    )
    plain = {row.Index for row in fp32.values()}
    cases = make_results(read_runs([read_sweep(REFERENCE / source.file)]))
    warned = {run.record_id for case in cases if not case.trusted for run in case.every}
    bars = [
        Bar(
            source.name,
            row.precision
            + " + autotuned" * bool(source.cudnn_benchmark is None and row.cudnn_benchmark)
            + " + torch.compile" * (row.compile != Case.compile),
            row.batch_size,
            _known(row.epoch_time_s),
            _known(row.images_per_s),
            _compare(row, fp32.get(row.batch_size)),
            _compare(row, beside := tf32.get(row.batch_size)),
            row.fraction < 1 or (beside is not None and beside.fraction < 1),
            _known(getattr(row, source.memory_column)),
            _known(row.energy_j * row.train_images / row.measured_images)
            if row.measured_time_s > SHORT_ENERGY_S
            else None,
            _known(row.test_accuracy),
            row.fraction < 1,
            row.record_id in warned,
            row.Index in plain,
        )
        for row in rows.itertuples()
    ]
    return sorted(bars, key=lambda bar: (bar.batch_size, bar.images_per_s or 0))


def _is_more(column: pd.Series[Any]) -> pd.Series[Any]:
    """Whether a value is not the default of its axis."""
    return column != getattr(Case, str(column.name))


def _compare(row: Any, base: Any) -> float | None:
    """How many times as fast a row is as ``base``; None without one."""
    return None if base is None else _known(base.epoch_time_s / row.epoch_time_s)


def _known(value: float) -> float | None:
    return None if pd.isna(value) else float(value)


@dataclass(frozen=True)
class Card:
    """What `make card` measured on a GPU, and when."""

    folder: Path
    identity: dict[str, Any]
    started_at: str


def find_card(results: Path) -> Card | None:
    """The card whose table the README shows: the newest with all cases of 2019; or none yet."""
    cards = []
    for file in results.glob(f"*/{STATE}"):
        state = json.loads(file.read_text())
        measured = state["phases"].get("rtx-titan", {}).get("state") == "done"
        if measured and state["identity"].get("gpu") and (file.parent / RECORDS).is_file():
            cards.append(Card(file.parent, state["identity"], state["started_at"]))
    return max(cards, key=lambda card: card.started_at, default=None)


def find_source(card: Card) -> Source:
    """What `make card` measured on a GPU, beside which the README shows 2019."""
    return Source(
        card.folder,
        f"{card.identity['gpu'].removeprefix('NVIDIA ')}, {card.started_at[:4]}",
        "after warm-up; one run each; cudnn.benchmark off, not compiled unless a row says so",
        (128, 256, 512, 640),
        None,
        "peak_device_bytes",
        "of the card, over its baseline",
    )


SHOWN = 256
"""The batch size of the README's table."""


def write_short_table(card: Card) -> str:
    """The README's table: of this card, at one batch size."""
    source = replace(find_source(card), batch_sizes=(SHOWN,))
    return _write_table([source], but=2)  # one GPU at one batch size


def write_table(card: Card) -> str:
    """The whole table, in Markdown: this card above 2019, with what their figures are below."""
    return _write_table([find_source(card), SOURCES[0]])


def _write_table(sources: Sequence[Source], but: int = 0) -> str:
    """Write it without the first ``but`` columns."""
    heads = [*HEADS]
    bars = [bar for source in sources for bar in read_bars(source)]
    cells = [[*_cells(bar)] for bar in bars]
    # no column of what no source has, as accuracy until a whole epoch was evaluated
    kept = [i for i in range(but, len(heads)) if any(row[i] != "–" for row in cells)]
    lines = [" | ".join(["", *(heads[i] for i in kept), ""]).strip()]
    lines.append("|" + "".join(":---|" if heads[i] in TEXTS else "---:|" for i in kept))
    lines += [" | ".join(["", *(row[i] for i in kept), ""]).strip() for row in cells]
    lines.append("")
    lines += [f"- {source.describe(source.read())}; memory {source.memory}." for source in sources]
    if any("?" in cell for row in cells for cell in row):
        lines.append("- ?: a time with a warning, which the report has.")
    return "\n".join(lines) + "\n"


TEXTS = ("GPU", "precision")
"""Heads of columns that are no numbers."""

HEADS = (
    *("GPU", "batch size", "precision", "one epoch", "images/s"),
    *("over IEEE fp32", "over TF32", "memory", "energy", "test accuracy after it"),
)


def _cells(bar: Bar) -> Iterator[str]:
    about = "≈" if bar.estimated else ""
    yield from (bar.source, str(bar.batch_size), bar.label)
    warning = "?" * bar.warned
    yield "out of memory" if bar.epoch_s is None else f"{about}{bar.epoch_s:.1f} s{warning}"
    yield "–" if bar.images_per_s is None else f"{about}{bar.images_per_s:,.0f}{warning}"
    yield "–" if bar.speedup is None or bar.base else f"{about}{bar.speedup:.2f}×{warning}"
    own = bar.over_tf32 is None or bar.base or bar.label == "tf32"
    yield "–" if own else f"{'≈' * bar.rough_tf32}{bar.over_tf32:.2f}×"
    yield "–" if bar.memory_bytes is None else f"{bar.memory_bytes / GIB:.1f} GiB"
    yield "–" if bar.energy_j is None else f"{about}{bar.energy_j / 1000:.1f} kJ"
    known = bar.test_accuracy is not None and not bar.estimated
    yield f"{100 * bar.test_accuracy:.1f} %" if known else "–"


# --------------------------------------------------------------------------------------- learning

H100 = ROOT / "results" / "nvidia-h100-80gb-hbm3-20261122-112118"
H200 = ROOT / "results" / "nvidia-h200-20261126-040407"


def write_learning() -> str:
    """How DPN-92's loss falls by each recipe, in Markdown, in the page's windows of fifty steps."""
    lines = [
        "| recipe | measured on | precision | batch size | first step | steps 1–50 | 51–100 "
        "| highest |",
        "|:---|:---|:---|---:|---:|---:|---:|---:|",
    ]
    for name, where, file in (
        ("2019, not published", "TITAN RTX, torch 1.0", REFERENCE / "rtx-titan-2019.csv"),
        ("SGD, 0.01", "H100, torch 2.11", H100 / RECORDS),
        ("AdamW, 3e-4", "H200, torch 2.11", H200 / RECORDS),
    ):
        records, steps = read_records(file), read_beside(file, Step)
        records = records[records["precision"].isin(["fp32", "fp16"])]
        records = records[records["fraction"] == records["fraction"].max()]
        for row in records.sort_values("batch_size", kind="stable").itertuples():
            mine = pd.DataFrame(steps.get(row.record_id, []))
            if len(mine) and row.batch_size <= 512 and row.loss_scale in ("", "128"):
                cells = _mean_losses(mine["step"], mine["loss"], row.executor == "published")
                line = (name, where, row.precision, str(row.batch_size), *cells)
                lines.append(f"| {' | '.join(line)} |")
    ours = pd.read_csv(REFERENCE / "dpn92-adamw-cpu-curve.csv")
    for batch_size, mine in ours.groupby("images"):
        cells = _mean_losses(mine["step"], mine["loss"])
        lines.append(
            f"| AdamW, 3e-4 | CPU, torch 2.13 | fp32 | {batch_size} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def _mean_losses(steps: pd.Series, losses: pd.Series, published: bool = False) -> Iterator[str]:
    """The loss of the first step, its means over the two windows, and the highest of all steps.

    Of the page these means are all there is, each at the last step of its window.
    """
    for first, last in ((0, 0), (1, 50), (51, 100)):
        mine = losses[steps.between(first, last)]
        few = "" if published or len(mine) in (0, last - first + 1) else f" ({len(mine)} steps)"
        yield f"{mine.mean():.2f}{few}" if len(mine) else "–"
    yield "–" if published else f"{losses.max():.2f} at step {losses.idxmax() - losses.index[0]}"


# ---------------------------------------------------------------------------------------- picture

THEMES = {
    "light": {"ink": "#1f2328", "dim": "#59636e", "fp32": "#818b98", "bar": "#1a5fc0"},
    "dark": {"ink": "#f0f6fc", "dim": "#9198a1", "fp32": "#8b949e", "bar": "#70abff"},
}
WIDTH, LEFT, RIGHT = 860, 250, 150  # of the drawing; of the labels; of the figures, in px
ROW, BAR, HEAD, GAP = 26, 18, 52, 18  # heights in px


def draw(theme: str) -> str:
    """The picture as SVG on a transparent ground: bars of images/s, each GPU on its own scale."""
    colours = THEMES[theme]
    parts: list[str] = []
    y = 0
    for source in SOURCES:
        bars = read_bars(source)
        most = max(bar.images_per_s or 0 for bar in bars)
        parts.append(
            _text(
                0, y + 18, f"{source.name}: images per second (each GPU on its own scale)", "head"
            )
        )
        parts.append(_text(0, y + 38, source.describe(source.read()), "dim"))
        y += HEAD
        for bar in bars:
            label = f"{bar.label}, batch size {bar.batch_size}"
            parts.append(_text(LEFT - 10, y + 14, label, "ink", "end"))
            length = round((WIDTH - LEFT - RIGHT) * (bar.images_per_s or 0) / most, 1)
            if bar.images_per_s is None:
                figure = "out of memory"
            else:
                kind = "fp32" if bar.base else "bar"
                parts.append(
                    f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{length}" height="{BAR}"/>'
                )
                figure = next(f for i, f in enumerate(_cells(bar)) if i == 4)
                if bar.speedup is not None and not bar.base:
                    figure += f"  ({bar.speedup:.2f}× fp32)"
            parts.append(_text(LEFT + length + 6, y + 14, figure, "ink"))
            y += ROW
        y += GAP
    height = y - GAP
    style = (
        'text{font:13px -apple-system,"Segoe UI",Helvetica,Arial,sans-serif}'
        f".head{{font-size:15px;font-weight:600}}.head,.ink{{fill:{colours['ink']}}}"
        f".dim{{fill:{colours['dim']}}}.fp32{{fill:{colours['fp32']}}}.bar{{fill:{colours['bar']}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n<style>{style}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def write_pictures(folder: Path) -> list[Path]:
    """Write the picture for each of `THEMES` into ``folder``."""
    files = [folder / f"published-{theme}.svg" for theme in THEMES]
    for theme, file in zip(THEMES, files, strict=True):
        file.write_text(draw(theme), encoding="utf-8")
    return files


if __name__ == "__main__":
    for path in write_pictures(Path(__file__).parent):
        print(path)
    print(write_table())
