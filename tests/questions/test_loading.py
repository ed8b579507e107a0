"""What loading costs: shares and workers found where they were planted, in words and numbers."""

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
from bench.record import Record, Status
from bench.report.__main__ import main as report
from bench.store.writer import Store
from bench.worker import Channel, Job
from bench.worker.measurement import measure
from tests.planted.records import FP16, make_record, ran
from tests.planted.results import read_report, tell

BY_TORCH = replace(FP16, loader="torch")


def run(case: Case, ratio: float = 1.0, wobble: float = 0.001, repeats: int = 5) -> list[Record]:
    """Runs at so many times the time of no loader."""
    return ran(case, [30 * ratio * (1 + wobble * n * (-1) ** n) for n in range(repeats)])


def test_the_share_of_each_number_of_workers(tmp_path: Path) -> None:
    """A case that died was not tried."""
    rows = run(FP16)
    for workers, ratio in {0: 4.0, 2: 2.0, 4: 1.0}.items():
        rows += run(replace(BY_TORCH, workers=workers), ratio)
    died = replace(BY_TORCH, workers=16)
    rows.append(make_record(died, status=Status.KILLED, gpu="A card", torch="2.13"))
    assert tell(read_report(tmp_path, rows), "loading", "loader workers share interval") == [
        "device",
        "torch | 0 | 75.0 | 74.9 to 75.1",
        "torch | 2 | 50.0 | 49.8 to 50.2",
        "torch | 4 | 0.0 | -0.4 to 0.4",
        "torch | 16",
    ]


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
    (table,) = [table for table in document["tables"] if table["name"] == "loading"]
    names = [head["name"] for head in table["heads"]]
    rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
    train_s, *times = (row["epoch_time_s"]["value"] for row in rows)
    shares = [row["share"]["value"] for row in rows[1:]]
    own = [max(0, 1 - train_s / time_s) for time_s in times]
    assert shares == pytest.approx(own, abs=0.05)
    assert train_s > STEP_S * 4000 / 4
    assert times[0] > (STEP_S + 4 * ITEM_S) * 4000 / 4, "one after the other"
    assert shares[0] > 0.4, "0.67 on an idle machine"
    assert shares[0] > shares[1], "0.67 and 0 on an idle machine"
