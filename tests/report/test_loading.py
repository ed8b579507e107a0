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
from bench.questions.loading import Comparison, Loaded, find_enough, write_enough
from bench.record import Record, Status
from bench.render import markdown, text
from bench.render.model import Table
from bench.report import jsonfile
from bench.report.__main__ import main as report
from bench.report.document import Report, build
from bench.store.writer import Store
from bench.study.sweeps import read_sweeps
from bench.verdict import Ratio
from bench.worker.channel import Channel
from bench.worker.measurement import measure
from tests.planted.records import GIB, make_record, measured, write_sweep

DEVICE = Case(precision="fp16", loss_scale=128.0)
TORCH = replace(DEVICE, loader="torch", workers=2)


CPU = {"cpu": "X, 4 cores"}
DEVICE_TIMES = [30.0, 30.1, 29.9, 30.05, 29.95]


def runs(case: Case, ratio: float = 1.0) -> list[Record]:
    """Five runs of a case, at so many times the time of the device's loader."""
    found = {"loader_first_batch_s": 0.5, "loader_samples_per_s": 3000.0}
    return [
        make_record(
            case,
            repeat=number,
            **measured(ratio * time_s, GIB, **CPU),
            **({} if case.loader == "device" else found),
        )
        for number, time_s in enumerate(DEVICE_TIMES, 1)
    ]


def read(folder: Path) -> Report:
    return build(read_sweeps([folder]))


def find(report: Report) -> Table | None:
    return next((table for table in report.tables if table.name == "loading"), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workers from none to five, one case that died, and cases that differ in something else."""
    loaded = {0: 4.0, 2: 2.0, 4: 1.001, 5: 0.8}
    died = make_record(
        replace(TORCH, workers=8), status=Status.KILLED, reason="a DataLoader worker died", **CPU
    )
    others = [
        replace(TORCH, lr=0.5),
        replace(TORCH, compile="default"),
        replace(DEVICE, batch_size=64),
    ]
    records = [
        *runs(DEVICE),
        *(r for n, ratio in loaded.items() for r in runs(replace(TORCH, workers=n), ratio)),
        died,
        *(record for case in others for record in runs(case, 3.0)),
    ]
    return write_sweep(tmp_path_factory.mktemp("loading") / "sweep", records)


@pytest.fixture(scope="module")
def loading(folder: Path) -> Report:
    return read(folder)


@pytest.mark.slow
def test_the_share_is_what_the_device_does_not_take(loading: Report) -> None:
    table = find(loading)
    assert table is not None
    assert [head.name for head in table.heads][:3] == ["loader", "workers", "epoch_time_s"]
    names = [head.name for head in table.heads]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [row["loader"].text for row in rows] == ["device", *["torch"] * 5]
    assert [row["workers"].text for row in rows] == ["–", "0", "2", "4", "5", "8"]
    shares = [row["share"].value for row in rows[1:-1]]
    assert shares == pytest.approx([1 - 1 / ratio for ratio in (4.0, 2.0, 1.001, 0.8)])
    assert rows[2]["share"].text == "50.0"
    assert rows[4]["share"].text == "-25.0", "faster than the device"
    low, high = map(float, rows[2]["interval"].text.split(" to "))
    # two means of five whose spread is 0.26 %: their ratio is ±0.38 %, and the share half of that
    assert (low, high) == pytest.approx((49.8, 50.2), abs=0.06)
    assert rows[2]["first_batch"].value == 0.5
    assert rows[2]["alone"].text == "3,000"
    assert (rows[-1]["epoch_time_s"].text, rows[-1]["share"].text) == ("killed", "–")
    assert list(table.groups.values()) == ["fp16 · batch size 128 · lr 0.01"]
    assert table.notes[0] == (
        "fp16 · batch size 128 · lr 0.01: from 4 workers on, the loader no longer matters."
    )


@pytest.mark.slow
def test_cases_that_differ_in_more_are_no_pair(tmp_path: Path) -> None:
    records = [*runs(DEVICE), *runs(replace(TORCH, batch_size=64))]
    assert find(read(write_sweep(tmp_path / "sweep", records))) is None


def test_more_workers_than_cores_are_doubted(loading: Report) -> None:
    torch_ = loading.cases[loading.cases["loader"] == "torch"]
    doubted = torch_.groupby("workers")["crowded"].all().to_dict()
    assert doubted == {0: False, 2: False, 4: False, 5: True, 8: True}
    assert any("--workers" in str(warning) for warning in loading.warnings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "settings", "doubted"),
    [(15, {}, True), (16, {}, False), (7, {"accumulate": 2}, True), (8, {"accumulate": 2}, False)],
)
def test_steps_that_workers_prepared_ahead_are_doubted(
    steps: int, settings: dict[str, Any], doubted: bool, tmp_path: Path
) -> None:
    """Four workers prepare eight micro-batches; a whole epoch is what it is."""
    case = replace(TORCH, workers=4, **settings)
    for part, expected in ((100, doubted), (steps, False)):
        counts = {"measured_steps": steps, "steps_per_epoch": part}
        records = [replace_counts(record, counts) for record in runs(case)]
        report = read(write_sweep(tmp_path / str(part), records))
        assert bool(report.cases["prepared"].any()) == expected
        assert any("Raise --steps" in str(warning) for warning in report.warnings) == expected


def replace_counts(record: Record, counts: dict[str, int]) -> Record:
    return replace(record, measurement=replace(record.measurement, **counts))


@pytest.mark.slow
def test_losses_of_a_users_own_data_are_not_compared_between_loaders(tmp_path: Path) -> None:
    own = [
        replace(case, workload=name, model=name, dataset="own" if name == "m:f" else "cifar10")
        for name in ("images", "m:f")
        for case in (DEVICE, TORCH)
    ]
    own = [replace(case, model="dpn92") if case.workload == "images" else case for case in own]
    records = [
        make_record(case, repeat=n, **measured(30.0 + n, GIB, train_loss=2.0 + n / 9, **CPU))
        for case in own
        for n in range(1, 4)
    ]
    report = read(write_sweep(tmp_path / "sweep", records))
    (effect,) = [effect for effect in report.effects if effect.axis == "loader"]
    assert len(effect.pairs) == 2
    assert effect.loss is not None
    assert effect.loss.pairs == 1


@pytest.mark.parametrize("format", [text, markdown, jsonfile])
def test_pages_have_the_table_and_its_sentence(loading: Report, format: Any) -> None:
    full = {"full": True} if format is text else {}
    page = " ".join(format.render(loading, **full).split())
    assert "from 4 workers on, the loader no longer matters." in page
    assert "50.0" in page


# -------------------------------------------------------------------------------- enough workers


def load(workers: int, value: float, reach: float | None = 0.005, **way: Any) -> Loaded:
    """A case at ``value`` times the device's time, ± ``reach``; None for too few repeats."""
    ends = (None, None) if reach is None else (value - reach, value + reach)
    lack = "needs 3 repeats a side, has 1" if reach is None else ""
    ratio = Ratio(value, *ends, p=1e-9, p_adjusted=1e-9, lack=lack)
    case = replace(TORCH, workers=workers, **way)
    return Loaded(SimpleNamespace(**asdict(case)), ratio, estimated=False)


def tell(*loaded: Loaded) -> list[str]:
    comparison = Comparison(SimpleNamespace(**asdict(DEVICE)), loaded)
    axes = ("precision", "persistent_workers")
    return [write_enough(enough, axes) for enough in find_enough(comparison)]


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({0: 4.0, 2: 2.0, 4: 1.001, 8: 1.0}, "from 4 workers on, the loader no longer matters."),
        ({0: 4.0, 2: 1.0, 4: 1.3, 8: 1.0}, "from 8 workers on"),  # at 2 it was chance
        ({0: 1.0, 2: 0.9}, "the loader does not matter, even without workers."),
        ({0: 4.0, 2: 2.0}, "the loader matters with every number of workers tried (0, 2)."),
        ({0: 1.5}, "the loader matters with every number of workers tried (0)."),
        ({2: 1.5, 4: 1.0}, "from 4 workers on, the loader no longer matters."),
        ({2: 1.5, 4: 1.021}, "the loader matters with every number of workers tried (2, 4)."),
    ],
)
def test_from_how_many_workers_on_it_no_longer_matters(ratios: dict[int, float], said: str) -> None:
    (told,) = tell(*(load(workers, ratio) for workers, ratio in ratios.items()))
    assert told.startswith(f"fp16: {said}")


def test_what_runs_do_not_show_is_not_certain() -> None:
    for unsure in (load(4, 1.0, reach=None), load(4, 1.0, reach=0.05)):
        (told,) = tell(load(2, 2.0), unsure)
        assert told.startswith("fp16: from 4 workers on, the loader no longer matters, but there")
        assert told.endswith("--repeats 5.")
    (told,) = tell(load(2, 2.0), load(4, 1.3, reach=0.6))
    assert "matters with every" in told, "no repeat says that it does not"


def test_each_way_of_loading_has_its_answer() -> None:
    kept = load(2, 1.0, persistent_workers=True)
    one, two = tell(load(0, 3.0), load(2, 1.4), load(4, 1.0), kept)
    assert one == "fp16: from 4 workers on, the loader no longer matters."
    assert two == "fp16 · persistent workers: from 2 workers on, the loader no longer matters."


def test_a_case_without_a_time_was_not_tried() -> None:
    died = Loaded(SimpleNamespace(**asdict(replace(TORCH, workers=8))), Ratio(lack="killed"), False)
    (told,) = tell(load(2, 2.0), load(4, 1.0), died)
    assert told == "fp16: from 4 workers on, the loader no longer matters."


# ------------------------------------------------------------------------ a share that is planted


TRIES = 3  # a busy machine may stop a step anywhere


@pytest.mark.slow
def test_a_planted_loader_bound_share_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch takes twice as long to load as to train: by turns, at once, and four at a time.

    The sleeps are long beside what a busy machine adds to them.
    """
    monkeypatch.setattr(loader, "ALONE_S", 0.1)
    slow = "loads_for_tests:slow"
    plain = Case(
        model=slow, workload=slow, dataset="own", device="cpu", batch_size=4, steps=5
    )  # fmt: skip
    cases = [plain, *(replace(plain, loader="torch", workers=n) for n in (0, 1, 4))]
    for number in range(TRIES):
        folder = tmp_path / f"sweep-{number}"
        with Store(folder) as store:
            for case in cases:
                found = measure(case, "", Channel(), time.monotonic())
                values = {k: v for k, v in asdict(found.measurement).items() if v is not None}
                store.append(make_record(case, **values, cpu="A CPU, 2 cores", torch="2"))
        assert report([str(folder), "--format", "json"]) == 0
        document = json.loads(capsys.readouterr().out)
        (table,) = [table for table in document["tables"] if table["name"] == "loading"]
        names = [head["name"] for head in table["heads"]]
        rows = [dict(zip(names, row, strict=True)) for row in table["rows"]]
        train_s, load_s = rows[0]["epoch_time_s"]["value"] / (4000 / 4), 4 * ITEM_S
        assert train_s > STEP_S
        shares = [row["share"]["value"] for row in rows[1:]]
        expected = [load_s / (load_s + train_s), 1 - train_s / load_s, 0]
        if shares == pytest.approx(expected, abs=0.05):
            break
    assert shares == pytest.approx(expected, abs=0.05)
