"""The files of a loss-scale map."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from bench.case import format_value
from bench.errors import UsageError
from bench.plain import read_value
from bench.scale_map import Gradients, Kind, ScaleCase, ScaledTraining, ScaleMap, Tally
from bench.store.table import write_lines
from bench.text import replace_file

MAP, GRADIENTS, TRAININGS = "scales.json", "gradients.csv", "trainings.csv"
"""The files of a map: what was asked for and where it ran; counts of gradient values; losses."""

VERSION = 1
"""The version of these files; a reader refuses any other."""

_TOLD = ("command", "started_at", "tolerance", "environment")  # of a map, once for all its cases


# -------------------------------------------------------------------------------------------- read


def read_scale_map(folder: Path) -> ScaleMap | None:
    """Read a map; None if the folder holds none. Raises UsageError: it cannot be read; the message
    names the file."""
    file = folder / MAP
    if not file.is_file():
        return None
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
        if head["version"] != VERSION:
            raise UsageError(
                f"{file}: version {head['version']}, this reads {VERSION}; run bench.scales again"
            )
        file = folder / GRADIENTS
        gradients = {n: _read_gradients(rows) for n, rows in _read_rows(file).items()}
        file = folder / TRAININGS
        trainings = {n: _read_trainings(rows) for n, rows in _read_rows(file).items()}
        file = folder / MAP
        cases = tuple(
            _read_case(case, gradients.get(str(number), ()), trainings.get(str(number), ()))
            for number, case in enumerate(head["cases"], 1)
        )
        return ScaleMap(folder, **{name: head[name] for name in _TOLD}, cases=cases)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; give a folder of bench.scales") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is not as bench.scales writes it ({type(error).__name__}: {error}); "
            "run bench.scales again"
        ) from error


Row = dict[str, str]


def _read_rows(file: Path) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, strict=True):
            groups[row["case"]].append(row)
    return groups


def _read_gradients(rows: Sequence[Row]) -> tuple[Gradients, ...]:
    return tuple(
        Gradients(
            int(row["step"]),
            float(row["scale"]),
            row["layer"],
            Kind(row["gradient"]),
            Tally(*(int(row[f.name]) for f in fields(Tally))),
        )
        for row in rows
    )


def _read_trainings(rows: Sequence[Row]) -> tuple[ScaledTraining, ...]:
    settings: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        settings[row["loss_scale"]].append(row)
    return tuple(
        ScaledTraining(
            setting,
            tuple(float(row["loss"] or "nan") for row in steps),
            tuple(float(row["scale"]) for row in steps),
            tuple(row["overflowed"] == "on" for row in steps),
        )
        for setting, steps in settings.items()
    )


def _read_case(
    head: Mapping[str, Any], gradients: tuple[Gradients, ...], trainings: tuple[ScaledTraining, ...]
) -> ScaleCase:
    peaks = [math.nan if peak is None else peak for peak in head["peaks"]]
    case: ScaleCase = read_value(ScaleCase, {**head, "peaks": peaks})
    return replace(case, gradients=gradients, trainings=trainings)


# ------------------------------------------------------------------------------------------- write


def write_map(scales: ScaleMap) -> None:
    """Write all cases measured so far; each file is replaced whole. Raises UsageError: the folder
    cannot be written."""
    told = {name: getattr(scales, name) for name in _TOLD}
    head = {"version": VERSION, **told, "cases": [_describe(case) for case in scales.cases]}
    try:
        scales.folder.mkdir(parents=True, exist_ok=True)
        # the head last, so that it names no case whose rows are missing
        replace_file(scales.folder / GRADIENTS, write_lines(_gradients(scales)))
        replace_file(scales.folder / TRAININGS, write_lines(_trainings(scales)))
        text = json.dumps(head, indent=2, allow_nan=False) + "\n"
        replace_file(scales.folder / MAP, text)
    except OSError as error:
        raise UsageError(f"--out {scales.folder}: {error.strerror}; choose another") from error


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
