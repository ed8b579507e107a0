"""What loading costs: shares and workers found where they were planted, in words and numbers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loads_for_tests import ITEM_S, STEP_S

from bench.case import Case
from bench.data import loader
from bench.questions.loading import Comparison, Loaded, describe_enough
from bench.record import Record
from bench.report.__main__ import main as report
from bench.store.writer import Store
from bench.verdict.ratio import Ratio
from bench.worker.measurement import measure
from bench.worker.messages import Channel, Job
from tests.planted.records import make_record, ran

DEVICE = Case(precision="fp16", loss_scale=128.0)
TORCH = replace(DEVICE, loader="torch", workers=2)


# -------------------------------------------------------------------------------- enough workers


def load(
    workers: int, value: float, reach: float | None = 0.005, repeats: int = 3, **way: Any
) -> Loaded:
    """A case at ``value`` times the device's time, ± ``reach``; None for too few repeats."""
    ends = (None, None) if reach is None else (value - reach, value + reach)
    lack = "needs 3 repeats a side, has 1" if reach is None else ""
    ratio = Ratio(value, *ends, p=1e-9, p_adjusted=1e-9, lack=lack)
    case = replace(TORCH, workers=workers, **way)
    return Loaded(SimpleNamespace(**asdict(case), repeats=repeats), ratio, estimated=False)


def say_enough(*loaded: Loaded) -> list[str]:
    comparison = Comparison(SimpleNamespace(**asdict(DEVICE), repeats=5), loaded)
    return list(describe_enough(comparison, ("precision",)))


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({0: 4.0, 2: 2.0, 4: 1.001, 8: 1.0}, "from 4 workers on, the loader no longer matters."),
        ({0: 4.0, 2: 1.0, 4: 1.3, 8: 1.0}, "from 8 workers on"),  # at 2 it was chance
        ({0: 1.0, 2: 0.9}, "the loader does not matter, even without workers."),
        ({0: 4.0, 2: 2.0}, "the loader matters with every number of workers tried (0, 2)."),
        ({0: 1.5}, "the loader matters with every number of workers tried (0)."),
        ({2: 1.5, 4: 1.0}, "from 4 workers on, the loader no longer matters."),
        ({2: 1.5, 4: 1.03}, "the loader matters with every number of workers tried (2, 4)."),
    ],
)
def test_from_how_many_workers_on_it_no_longer_matters(ratios: dict[int, float], said: str) -> None:
    (told,) = say_enough(*(load(workers, ratio) for workers, ratio in ratios.items()))
    assert told.startswith(f"fp16: {said}")


def test_what_runs_do_not_show_is_not_certain() -> None:
    for unsure in (load(4, 1.0, reach=None), load(4, 1.0, reach=0.05)):
        (told,) = say_enough(load(2, 2.0), unsure)
        assert told.startswith("fp16: from 4 workers on, the loader no longer matters, but that is")
        assert told.endswith("not certain; use --repeats 5.")
    for unsure in (load(4, 1.3, reach=0.6), load(4, 1.3, reach=None), load(4, 1.021)):
        (told,) = say_enough(load(2, 2.0), unsure)
        assert "matters with every number of workers tried (2, 4), but that is not" in told


def test_repeats_that_were_run_are_not_asked_for() -> None:
    (told,) = say_enough(load(2, 2.0, repeats=10), load(4, 1.0, reach=0.05, repeats=5))
    assert told.endswith("the loader no longer matters, but that is not certain.")


def test_a_case_without_a_time_was_not_tried() -> None:
    died = Loaded(SimpleNamespace(**asdict(replace(TORCH, workers=8))), Ratio(lack="killed"), False)
    (told,) = say_enough(load(2, 2.0), load(4, 1.0), died)
    assert told == "fp16: from 4 workers on, the loader no longer matters."


# ------------------------------------------------------------------------ a share that is planted


HERE = {"gpu": "A card", "torch": "2.13"}  # as `ran` has it


def run(case: Case, ratio: float = 1.0) -> list[Record]:
    """Five runs at so many times the time of no loader."""
    times = [ratio * time_s for time_s in (30.0, 30.1, 29.9, 30.05, 29.95)]
    return ran(case, times, loader_first_batch_s=0.5, loader_samples_per_s=3000.0)


def test_a_planted_loader_bound_share_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch takes twice as long to load as to train: by turns, at once, and four at a time. A
    busy machine adds to each time; the shares are those of the times that were taken."""
    monkeypatch.setattr(loader, "ALONE_S", 0.1)
    slow = "loads_for_tests:Slow"
    plain = Case(model=slow, workload=slow, dataset="own", device="cpu", batch_size=4, steps=5)
    cases = [plain, *(replace(plain, loader="torch", workers=n) for n in (0, 1, 4))]
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
    # a queue filled while steps were slow can hide the work of one process for five steps
    assert shares[0] > 0.4, "0.67 on an idle machine"
    assert shares[0] > shares[2], "0.67 and 0 on an idle machine"
