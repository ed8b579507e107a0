"""What a sweep finds out and refuses before it trains anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.case import AXES, Case, check_batches, format_value
from bench.data import DatasetInfo, prepare, progress_bar
from bench.environment import Platform, describe_host, probe, with_dataset
from bench.errors import UsageError
from bench.gpu import find_neighbours
from bench.models import check_model
from bench.options import Options
from bench.precision import PRECISIONS
from bench.record import COMPARABLE, Environment
from bench.schedule import choose_seed
from bench.store import Past, Run, clean, read_history, read_records


def refuse_unwritable(out: Path | None) -> None:
    """Refuse an --out that no folder can be made at, before anything costs time.

    Raises:
        UsageError: it is a file, or nothing can be written there.
    """
    place = (out or Path("results")).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"--out {out}: {place} is a file; choose a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {place} cannot be written to; choose a folder that can")


def probe_platforms(cases: Sequence[Case], options: Options) -> dict[str, Platform]:
    """Ask about each device the cases name, and refuse what was asked of it by name in vain.

    Raises:
        UsageError: torch cannot use the device; a precision given as a flag cannot run there; or
            others use the card and --allow-shared is not given.
    """
    for model in dict.fromkeys(case.model for case in cases):
        check_model(model)
    devices = {case.device for case in cases}
    if options.executor == "fake":
        return {device: Platform(describe_host()) for device in devices}
    platforms = {device: probe(device) for device in devices}
    for case in cases:
        reason = platforms[case.device].refuse(PRECISIONS[case.precision])
        if reason and "precision" in options.axes:
            raise UsageError(f"--precision {case.precision}: {reason}; leave it out")
    for platform in platforms.values():
        uuid = platform.environment.gpu_uuid
        if uuid and not options.allow_shared:
            refuse_neighbours(uuid)
    return platforms


def refuse_neighbours(uuid: str) -> None:
    """Refuse a card that others use.

    Raises:
        UsageError: it names their processes.
    """
    # what draws a desktop does not count: it is noted in the records
    if neighbours := [p for p in find_neighbours(uuid) or () if not p.display]:
        who = ", ".join(map(str, neighbours))
        raise UsageError(f"the GPU is in use by {who}; end them, or measure with --allow-shared")


def prepare_datasets(cases: Sequence[Case], options: Options) -> dict[str, DatasetInfo]:
    """Decode every dataset the cases name, once, and check the batch sizes against it.

    Raises:
        UsageError: a dataset cannot be had or read, or a batch size does not fit it.
    """
    with progress_bar() as progress:
        datasets = {
            name: prepare(name, data_dir=options.data_dir, url=options.data_url, progress=progress)
            for name in dict.fromkeys(case.dataset for case in cases)
        }
    for case in cases:
        check_batches(case, datasets[case.dataset].train_images)
    return datasets


def default_out(platforms: Mapping[str, Platform]) -> Path:
    """results/ and the GPU and the time."""
    names = (platform.environment.gpu or "cpu" for platform in platforms.values())
    words = "-".join("".join(c if c.isalnum() else " " for c in n).lower() for n in names).split()
    return Path("results") / f"{'-'.join(words)}-{datetime.now():%Y%m%d-%H%M%S}"


def read_past(
    out: Path,
    cases: Sequence[Case],
    options: Options,
    platforms: Mapping[str, Platform],
    datasets: Mapping[str, DatasetInfo],
) -> tuple[dict[Run, Past], dict[Run, Past]]:
    """What the records hold: the runs whose rows this sweep's can be compared with, and all.

    Raises:
        UsageError: some cannot be compared, and --mix is not given; it says in which respects.
    """
    frame = read_records(out)
    comparable, differing = frame["repeat"] >= 0, dict[str, None]()
    for device, dataset in dict.fromkeys((case.device, case.dataset) for case in cases):
        environment = with_dataset(platforms[device].environment, datasets[dataset])
        here = (frame["device"] == device) & (frame["dataset"] == dataset)
        for name in COMPARABLE:
            now = clean(getattr(environment, name) or "")
            unlike = here & (frame[name] != now)
            comparable &= ~unlike
            for before in frame[name][unlike].unique():
                differing[f"{name} was {before or 'none'}, now {now or 'none'}"] = None
    if differing and not options.mix:
        raise UsageError(
            f"--out {out}: holds rows that would not be comparable: {'; '.join(differing)}; "
            "choose another --out, or add to them with --mix"
        )
    past = read_history(frame)
    return (read_history(frame[comparable]) if differing else past), past


def refuse_other_seeds(
    out: Path, plan: Sequence[Run], done: Mapping[Run, Past], same_seed: bool
) -> None:
    """Refuse to call a run done that was made with another seed than it would have now.

    Raises:
        UsageError: the rows there are of --same-seed and this sweep is not, or the reverse.
    """
    other = (run for run in plan if run in done and done[run].seed != choose_seed(run, same_seed))
    if next(other, None) is not None:
        there, mend = (
            ("a seed each", "leave --same-seed out")
            if same_seed
            else ("one seed", "give --same-seed")
        )
        raise UsageError(f"--out {out}: its repeats have {there}; {mend}, or choose another --out")


def describe_config(
    cases: Sequence[Case],
    options: Options,
    platforms: Mapping[str, Platform],
    datasets: Mapping[str, DatasetInfo],
    earlier: Sequence[str],
) -> dict[str, Any]:
    """The resolved configuration: what was asked for, by which commands, on what.

    Args:
        earlier: the commands that made the rows already there.
    """
    return {
        "command": "\n".join(dict.fromkeys([*earlier, options.command])),
        "preset": options.preset.name,
        "repeats": options.repeats,
        "cases": [{name: format_value(getattr(case, name)) for name in AXES} for case in cases],
        "environment": {
            device: _known(platform.environment) for device, platform in platforms.items()
        },
        "datasets": {
            name: {k: v for k, v in asdict(info).items() if k != "folder"}
            for name, info in datasets.items()
        },
    }


def _known(environment: Environment) -> dict[str, Any]:
    return {name: value for name, value in asdict(environment).items() if value is not None}
