"""What loading costs is in the times of an epoch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from loads_for_tests import ITEM_S, STEP_S
from pytest_for_tests import Capture, Patch

from bench.case import Case
from bench.data import loader
from bench.report.__main__ import main as report
from bench.store.writer import Store
from bench.worker import Channel, Job
from bench.worker.measurement import measure
from tests.planted.records import make_record


@pytest.mark.slow
def test_a_planted_loader_bound_share_is_found(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A batch takes twice as long to load as to train: by turns, and four at a time. A busy
    machine adds to each time; the shares are those of the times that were taken."""
    monkeypatch.setattr(loader, "ALONE_S", 0.1)
    slow = "loads_for_tests:Slow"
    plain = Case(model=slow, workload=slow, dataset="own", device="cpu", batch_size=4, steps=5)
    cases = [plain, *(replace(plain, loader="torch", workers=n) for n in (0, 4))]
    with Store(tmp_path / "sweep") as store:
        for case in cases:
            found = measure(Job(case, asked_at=time.monotonic()), Channel())
            values = {k: v for k, v in asdict(found.measurement).items() if v is not None}
            store.append(make_record(case, **values, cpu="A CPU, 2 cores", torch="2"))
    capsys.readouterr()  # what the worker said of its epochs
    assert report([str(tmp_path / "sweep"), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    train_s, *times = (row["epoch_time_s"] for row in document["cases"])
    shares = [1 - train_s / time_s for time_s in times]
    assert train_s > STEP_S * 4000 / 4
    assert times[0] > (STEP_S + 4 * ITEM_S) * 4000 / 4, "one after the other"
    assert shares[0] > 0.4, "0.67 on an idle machine"
    assert shares[0] > shares[1], "0.67 and 0 on an idle machine"
