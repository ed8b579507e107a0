"""What an epoch costs by two prices, in numbers known by hand, and what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cards.__main__ import main as cards_main
from bench.compare.__main__ import main as compare_main
from bench.report.__main__ import main as report_main
from bench.schema.case import Case
from bench.schema.record import Record
from tests.planted.records import FP16, FP32, ran, write_sweep
from tests.planted.results import read_report
from tests.planted.scripts import script
from tests.pytest_for_tests import Capture


def list_rows(case: Case = FP32, time_s: float = 3600, **values: object) -> list[Record]:
    """A run of one hour on one GPU, at 1 kW."""
    return ran(case, (time_s,), **{"energy_j": 3.6e6, **values})


def read_cost(tmp_path: Path, rows: Sequence[Record], *prices: str) -> tuple[str, float | None]:
    """The cost of the first of some rows: the text in the report's overview, and the number in its
    CSV."""
    folder, out = write_sweep(tmp_path / "sweep", rows), tmp_path / "report"
    for format in ("json", "csv"):
        assert report_main([str(folder), *prices, "-o", f"{out}.{format}"]) == 0
    with Path(f"{out}.csv").open() as file:
        first = next(csv.DictReader(file))
    found = json.loads(Path(f"{out}.json").read_text())
    (table,) = (one for one in found["tables"] if one["name"] == "overview")
    places = [head["name"] for head in table["heads"]]
    text = table["rows"][0][places.index("cost")]["text"] if "cost" in places else ""
    assert found["cases"][0]["cost"] == (float(first["cost"]) if first["cost"] else None)
    return text, found["cases"][0]["cost"]


COSTS: dict[str, tuple[list[Record], str, str, float | None]] = {
    "an hour": (list_rows(), "--price 2.5/h", "2.500", 2.5),
    "half an hour": (list_rows(time_s=1800), "--price 2.5/h", "1.250", 1.25),
    "a kWh": (list_rows(), "--kwh 0.3", "0.3000", 0.3),
    "both": (list_rows(), "--price 2.5/h --kwh 0.30", "2.800", 2.8),
    "the hour alone where the energy is not known": (
        list_rows(energy_j=None), "--price 2.5/h --kwh 0.3", "2.500*", 2.5,
    ),
    "energy that is not known": (
        [*list_rows(energy_j=None), *list_rows(FP16)], "--kwh 0.3", "–", None,
    ),
    "four GPUs": (
        list_rows(replace(FP32, parallel="ddp", world_size=4)), "--price 2.5/h --kwh 0.3", "10.30",
        10.3,
    ),
    "four GPUs that a command used": (list_rows(script(), gpus=4), "--price 2/h", "8.000", 8.0),
    "a machine without a GPU, however many processes": (
        list_rows(replace(FP32, device="cpu", parallel="ddp", world_size=4), cpu="X"),
        "--price 2.5/h", "2.500", 2.5,
    ),
    "the price of the longest name": (
        list_rows(gpu="H100 NVL"), "--price 9/h h100=2/h 100=3/h", "2.000", 2.0,
    ),
    "a MIG slice, by the price of a GPU": (
        [*list_rows(gpu="A100 MIG 1g.5gb"), *list_rows(FP16)], "--price 2/h A100=2/h", "–", None,
    ),
    "a MIG slice, by its own": (
        list_rows(gpu="A100 MIG 1g.5gb"), "--price A100=2/h 1g.5gb=0.3/h", "0.3000", 0.3,
    ),
    "a machine that has no price of its own": (
        [*list_rows(gpu="B card"), *list_rows(FP16, gpu="H100")],
        "--price H100=2/h --kwh 0.3", "–", None,
    ),
}  # fmt: skip
"""Rows, the prices, and the cost of the first of them."""


@pytest.mark.parametrize("name", COSTS)
def test_cost(name: str, tmp_path: Path) -> None:
    rows, prices, text, cost = COSTS[name]
    assert read_cost(tmp_path, rows, *prices.split()) == (text, cost and pytest.approx(cost))


def test_a_cost_is_that_of_the_whole_of_what_was_measured_in_part(tmp_path: Path) -> None:
    part = {"measured_images": 12_500, "energy_j": 0.9e6}
    rows = list_rows(replace(FP32, fraction=0.25), **part)
    text, cost = read_cost(tmp_path, rows, "--price", "2/h", "--kwh", "1")
    assert (text, cost) == ("≈3.000", pytest.approx(3))


def test_the_price_of_an_energy_that_was_not_measured(tmp_path: Path, capsys: Capture) -> None:
    folder = write_sweep(tmp_path / "sweep", list_rows(replace(FP32, device="cpu"), energy_j=None))
    assert report_main([str(folder), "--kwh", "0.3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --kwh: no energy was measured")


def test_nothing_is_said_of_money_without_a_price(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", list_rows())
    report_main([str(folder), "-o", str(tmp_path / "r.json")])
    assert "cost" not in json.loads((tmp_path / "r.json").read_text())["cases"][0]
    assert "money" not in [t.name for t in read_report(tmp_path / "again", list_rows()).tables]


def test_the_first_screen_of_several_settings(tmp_path: Path, capsys: Capture) -> None:
    cases = [replace(case, batch_size=size) for case in (FP32, FP16) for size in (128, 256)]
    rows = [row for number, case in enumerate(cases, 1) for row in list_rows(case, 3600 * number)]
    rows += list_rows(replace(FP32, batch_size=512), neighbours_computing=1)
    assert report_main([str(write_sweep(tmp_path / "sweep", rows)), "--price", "2/h"]) == 0
    table = capsys.readouterr().out.partition("Cost of an epoch (? has a warning)\n")[2]
    lines = [line.split() for line in table.splitlines()[2:4]]
    assert lines == [["fp32", "2.000", "4.000", "2.000?"],
                     ["fp16", "6.000", "8.000", "–"]]  # fmt: skip
    assert table.splitlines()[4].strip() == "Cost: 2 an hour of each GPU (or machine without one)."


def test_a_slice_without_a_price_of_its_own_is_told_how_to_give_one(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = write_sweep(tmp_path / "sweep", list_rows(gpu="A100 MIG 1g.5gb"))
    note = "Of a MIG slice, a part of a GPU, it is known by its own price: add MIG=1/h."
    for more, asks in (([], True), (["MIG=1/h"], False)):
        assert report_main([str(folder), "--price", "2/h", *more, "-o", f"{tmp_path}/r.md"]) == 0
        assert (note in (tmp_path / "r.md").read_text()) is asks


def test_two_sides(tmp_path: Path, capsys: Capture) -> None:
    rows = [*list_rows(FP32), *list_rows(FP16, 1800, energy_j=None)]
    folder = write_sweep(tmp_path / "sweep", rows)
    asked = [str(folder), "--axis", "precision", "--price", "2.5/h", "--kwh", "0.3"]
    assert compare_main(asked) == 0
    out = capsys.readouterr().out
    assert "2.800, 1.250*" in out
    assert (
        "Cost: 2.5 an hour of each GPU (or machine without one) and 0.3 a kWh of the energy "
        "that was measured, of GPUs alone. * without the energy, which is not known: compare it "
        "with none that has it. The first is of fp32, the second of fp16." in out
    )
    assert compare_main([*asked, "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["metrics"]["epoch_time_s"]
    assert found["cost"] == [pytest.approx(2.8), pytest.approx(1.25)]


def test_cards(tmp_path: Path, capsys: Capture) -> None:
    dear, cheap = (
        write_sweep(tmp_path / name, list_rows(gpu=name, time_s=time_s))
        for name, time_s in (("H100", 1800), ("A100", 3600))
    )
    asked = [str(dear), str(cheap), "--price", "H100=6/h", "A100=2/h", "--full"]
    assert cards_main(asked) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(" fp32 ")]
    ours = [row[row.index("size") + 2 :] for row in rows if "128" in row]
    assert [(row[0], row[2]) for row in ours] == [("1,800", "3.000"), ("3,600", "2.000")]
    assert "Cost: 6 an hour of each H100 and 2 an hour of each A100." in out


REFUSED = {
    "--price 2.49": "--price '2.49': give the price of an hour, such as 2.49/h",
    "--price 2.49/d": "--price '2.49/d': give the price of an hour",
    "--price $2/h": "--price '$2/h': give the price of an hour",
    "--price -1/h": "--price '-1/h': give the price of an hour",
    "--price =2/h": "--price '=2/h': give the price of an hour",
    "--price H100=": "--price 'H100=': give the price of an hour",
    "--price 2/h 3/h": "--price: give one price of all machines, not two",
    "--price H1OO=2/h": "--price: no machine has 'H1OO' in its name; right values: H100",
    "--kwh 0,30": "--kwh '0,30': give the price of a kWh, such as 0.30",
    "--kwh 0": "--kwh '0': give the price of a kWh, such as 0.30",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_price_that_cannot_be_used(flags: str, tmp_path: Path, capsys: Capture) -> None:
    folder = str(write_sweep(tmp_path / "sweep", list_rows(gpu="H100")))
    for main, places in ((report_main, [folder]), (cards_main, [folder]),
                         (compare_main, [folder, folder])):  # fmt: skip
        flag, *words = flags.split()
        asked = [f"{flag}={words[0]}"] if "-1" in words[0] else [flag, *words]
        assert main([*places, *asked]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {REFUSED[flags]}")
