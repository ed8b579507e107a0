"""The measurement of a loss-scale map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime

from bench.data import load
from bench.environment.machine import examine
from bench.errors import UsageError
from bench.executors import Images
from bench.fingerprint import list_requests
from bench.precision import PRECISIONS
from bench.scale_map import ScaleMap, Way, write_map
from bench.scales.options import Options
from bench.sweep import options as sweep
from bench.sweep.preflight import check


def measure_map(options: Options, say: Callable[[str], None]) -> ScaleMap:
    """Examine what the questions name, refuse what cannot be trained, and measure. Each case is
    stored as it ends; ``say`` is called with lines on the progress. Raises UsageError: a device,
    model or dataset cannot be used, or memory ran out."""
    first, cases = options.questions[0], [question.case for question in options.questions]
    machine = examine([first.case.device], list_requests(cases))
    asked = sweep.Options(data_dir=options.data_dir, allow_shared=options.allow_shared)
    inputs = check(sweep.Plan(cases), machine, asked, Images.prepare, every=True)
    platform = inputs.platforms[first.case.device]
    if first.way is Way.TRAINED:
        for name in first.precisions:
            if why := platform.refuse(PRECISIONS[name]):
                raise UsageError(f"--precision {name}: {why}")
    environment = asdict(replace(inputs, models={}).describe(cases[0]))  # there may be several
    known = {name: value for name, value in environment.items() if value is not None}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    scales = ScaleMap(options.out, options.command, now, first.tolerance, known, ())

    import torch

    from bench.scales.measurement import measure

    for question in options.questions:
        folder = inputs.data(question.case).folder
        data = load(folder) if folder else None
        try:
            for answered in measure(question, data, say):
                scales = replace(scales, cases=(*scales.cases, answered))
                write_map(scales)
        except torch.OutOfMemoryError as error:
            kept = f"; what was measured before is in {options.out}" if scales.cases else ""
            raise UsageError(
                f"{question.case.model}, batch size {question.case.batch_size} ran out of memory; "
                f"use a smaller --batch-size{kept}"
            ) from error
    return scales
