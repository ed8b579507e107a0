"""Records that tests write: few words for what matters, the rest as a sweep has it."""

from __future__ import annotations

from typing import Any

from bench.case import Case
from bench.record import Environment, Measurement, Record, Status

ENVIRONMENT = {
    "gpu": "NVIDIA Imaginary",
    "driver": "580.1",
    "torch": "2.13.0",
    "code": "0123456789ab",
    "dataset_fingerprint": "fedcba9876543210",
    "train_images": 50_000,
}


def make_record(case: Case | None = None, **values: Any) -> Record:
    """A record of ``case``: fields of Record, Measurement and Environment by name."""

    def take(kind: type) -> dict[str, Any]:
        return {name: values.pop(name) for name in list(values) if name in kind.__annotations__}

    measurement = Measurement(**take(Measurement))
    environment = Environment(**{**ENVIRONMENT, **take(Environment)})
    identity = {
        "record_id": f"{values.get('repeat', 1):08x}{values.get('attempt', 1):08x}",
        "repeat": 1,
        "run_seed": values.get("repeat", 1) - 1,
        "sentinel": False,
        "probe": False,
        "anchor": "",
        "lane": "",
        "lanes_beside": 0,
        "attempt": 1,
        "status": Status.OK,
        "reason": "",
        "inferred": False,
        "executor": "subprocess",
        "started_at": "2026-11-20T10:00:00.000Z",
        "finished_at": "2026-11-20T10:01:00.000Z",
        "retries": 0,
        "log": "",
    }
    return Record(
        **{**identity, **values},
        case=case or Case(),
        measurement=measurement,
        environment=environment,
    )
