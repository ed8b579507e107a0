"""Records as a sweep stores them, in few words, and the folder of a sweep that has them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.results.store.writer import Store
from bench.schema.case import Case
from bench.schema.record import (
    Environment,
    EpochRow,
    Measurement,
    RankRow,
    Record,
    Status,
    Step,
    WorkRow,
)

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
GIB, MIB = 2**30, 2**20
ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference" / "rtx-titan-2019.csv"


def list_committed(file: str) -> list[Path]:
    """The folders of results/ of which ``file`` is committed; `make sweep` puts its own there. Of a
    copy within the repository, as of `make mutations`, those of the repository."""
    command = ["git", "ls-files", "--full-name", f":/results/*/{file}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [(ROOT / name).parent for name in sorted(listed.splitlines())]


Row = (
    Record
    | tuple[Record, list[Step]]
    | tuple[Record, list[Step], list[EpochRow]]
    | tuple[Record, list[Step], list[EpochRow], list[WorkRow]]
    | tuple[Record, list[Step], list[EpochRow], list[WorkRow], list[RankRow]]
)
"""A record, and what stands beside it where it comes with it."""

HOSTILE = "Tesla <V100> | 32_GB & \\co"
CARDS = {  # bytes of memory
    "NVIDIA H200": 150_754_820_096,
    "NVIDIA RTX 6000 Ada": 51_527_024_640,
    HOSTILE: 34_079_637_504,
}

IMAGINARY = {
    "gpu": "NVIDIA Imaginary",
    "driver": "580.1",
    "torch": "2.13.0",
    "code": "0123456789ab",
    "dataset_fingerprint": "fedcba9876543210",
    "train_images": 50_000,
}
"""The machine of `make_run`."""


def make_record(case: Case, **values: Any) -> Record:
    """A record of ``case``: fields of Record, Measurement and Environment by name, or either whole.

    Of a case that ended well in one attempt at its first repeat, unless they say otherwise.
    """

    def take(kind: type) -> dict[str, Any]:
        return {name: values.pop(name) for name in list(values) if name in kind.__annotations__}

    values.setdefault("measurement", Measurement(**take(Measurement)))
    values.setdefault("environment", Environment(**take(Environment)))
    repeat, attempt = values.setdefault("repeat", 1), values.setdefault("attempt", 1)
    identity: dict[str, Any] = {
        "record_id": f"{case.slug()}-r{repeat}-a{attempt}{'-s' if values.get('sentinel') else ''}",
        "run_seed": case.seed + repeat - 1,
        "sentinel": False,
        "probe": False,
        "lane": "",
        "lanes_beside": 0,
        "status": Status.OK,
        "reason": "",
        "inferred": False,
        "executor": "subprocess",
        "started_at": "2026-11-20T10:00:00+00:00",
        "finished_at": "2026-11-20T10:01:00+00:00",
        "retries": 0,
        "log": "",
    }
    return Record(**{**identity, **values}, case=case)


def make_card(name: str) -> dict[str, Any]:
    """The environment of one of `CARDS`."""
    return {
        "gpu": name,
        "gpu_uuid": f"GPU-{list(CARDS).index(name)}",
        "gpu_memory_bytes": CARDS[name],
        "driver": "580.95.05",
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "cudnn": "91900",
        "code": "abc123",
        "dataset_fingerprint": "feed",
        "train_images": 50000,
        "test_images": 10000,
    }


def make_run(case: Case | None = None, **values: Any) -> Record:
    """The same on a machine that is known, with an identifier as a sweep gives it."""
    identifier = f"{values.get('repeat', 1):08x}{values.get('attempt', 1):08x}"
    return make_record(case or Case(), **{**IMAGINARY, "record_id": identifier, **values})


def write_sweep(
    folder: Path, rows: Iterable[Row], command: str | None = None, preset: str = ""
) -> Path:
    """Write records, and what stands beside them where they come with it, as a sweep's folder."""
    with Store(folder) as store:
        for row in rows:
            store.append(*(row if isinstance(row, tuple) else (row,)))
        if command is not None:
            store.write_config({"command": command, "preset": preset})
    return folder


def measured(time_s: float, memory: float, images: int = 50000, **values: Any) -> dict[str, Any]:
    """The measurement of a case that ended well, of an epoch of ``images``."""
    return {
        "epoch_time_s": time_s,
        "measured_time_s": time_s,
        "measured_images": images,
        "images_per_s": images / time_s,
        "warmup_steps": 40,
        "warmup_steady": True,
        "peak_device_bytes": int(memory),
        "peak_reserved_bytes": int(memory * 0.95),
        "peak_allocated_bytes": int(memory * 0.9),
        "train_images": images,
        "test_images": 10000,
        **values,
    }


def ran(case: Case, times: Sequence[float], gib: float = 4, **values: Any) -> list[Record]:
    """Repeats of a case on one card, each with an epoch time in s."""
    card = {"gpu": "A card", "torch": "2.13"}
    return [
        make_record(case, repeat=i, **{**card, **measured(time, gib * GIB), **values})
        for i, time in enumerate(times, 1)
    ]


def at(batch: int, *cases: Case) -> list[Case]:
    """Cases with another batch size."""
    return [replace(case, batch_size=batch) for case in cases]


def learn(case: Case, losses: Mapping[int, float] | Sequence[float], **values: Any) -> list[Record]:
    """A run of each seed, with its loss; of the repeats of one where values have a run_seed."""
    seeds = losses if isinstance(losses, Mapping) else dict(enumerate(losses))
    rows = ran(case, [100 + i for i in range(len(seeds))], **values)
    for row, (seed, loss) in zip(rows, seeds.items(), strict=True):
        row.measurement.train_loss, row.run_seed = loss, values.get("run_seed", seed)
    return rows


def some_steps(case: Case, steps: int, of: int, time_s: float, **values: Any) -> list[Record]:
    """A run of so many steps of an epoch."""
    counts = {"measured_steps": min(steps, of), "steps_per_epoch": of}
    return ran(replace(case, steps=steps), (time_s,), **counts, **values)
