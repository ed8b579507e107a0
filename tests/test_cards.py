"""All cards beside each other: which may be compared, at which settings, and which is faster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cards.__main__ import main
from bench.cards.document import Cards, build
from bench.cards.entries import Entry
from bench.cards.prices import read_prices
from bench.case import Case
from bench.compare.__main__ import main as compare
from bench.errors import UsageError
from bench.record import Record, Status
from bench.study.estimate import TIME
from bench.study.sweeps import REFERENCE, list_results, read_sweeps
from tests.planted.records import GIB, ROOT, make_record, measured, write_sweep

CARDS = {"NVIDIA A": 1.0, "NVIDIA B": 1.5, "NVIDIA C": 2.0}
"""Cards of one recipe, torch and code, and how much slower they are than the first."""

SPEEDS = {"fp32": 1.0, "tf32": 2.0, "fp16": 4.0}


SETTINGS = ((128, "off"), (256, "off"), (128, "default"))
"""Batch size and compile mode of the cases of each precision."""


def list_rows(
    card: str, slower: float, settings: Sequence[tuple[int, str]] = SETTINGS, **about: Any
) -> Iterator[Record]:
    """Three repeats of each case, and a batch that does not fit."""
    axes = {name: about.pop(name) for name in list(about) if name in Case.__annotations__}
    environment = {
        "gpu": card,
        "gpu_uuid": f"GPU-{card}",
        "gpu_memory_bytes": 24 * GIB,
        "driver": "580.1",
        "torch": "2.13.0+cu130",
        "code": "0123456789ab",
        "dataset_fingerprint": "feed",
        "train_images": 50000,
    } | about
    for precision, speed in SPEEDS.items():
        scale = 128.0 if precision == "fp16" else None
        for batch, mode in settings:
            case = Case(
                precision=precision, loss_scale=scale, batch_size=batch, compile=mode, **axes
            )
            share = (1.0 if batch == 128 else 0.9) * (0.5 if mode == "default" else 1.0)
            for repeat in (1, 2, 3):
                # each card spreads as much as it is slow
                time = 100 * slower / speed * share * (1 + 0.002 * slower * (repeat - 2))
                values = measured(time, batch * GIB / 32, energy_j=300 * time, train_loss=2.0)
                yield make_record(case, repeat=repeat, **(values | environment))
        large = Case(precision=precision, loss_scale=scale, batch_size=512, **axes)
        yield make_record(large, status=Status.OOM, reason="OutOfMemoryError", **environment)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("cards")
    return [
        write_sweep(root / card.split()[1].lower(), list_rows(card, slower))
        for card, slower in CARDS.items()
    ]


@pytest.fixture(scope="module")
def found(folders: list[Path]) -> Cards:
    return build(read_sweeps([*folders, REFERENCE]), Path())


def find_entry(found: Cards, card: str, precision: str) -> Entry:
    (entry,) = (
        entry
        for group in found.groups
        for entry in group.entries
        if (entry.card, entry.precision) == (card, precision)
    )
    return entry


def test_cards_of_one_recipe_stand_together_the_fastest_first(found: Cards) -> None:
    first, published = found.groups
    assert first.cards == [*CARDS]
    assert published.cards == ["NVIDIA TITAN RTX"]
    assert "torch 1, not 2" in published.tell_apart(first)
    assert "published figures, not measured" in published.tell_apart(first)
    assert first.tell_apart(first) == []


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"torch": "3.0.0"}, "torch 3, not 2"),
        ({"code": "ba9876543210"}, "code ba98765, not 0123456"),
        ({"code": ""}, "code unknown (other), not 0123456"),
        ({"lr": 0.1}, "lr 0.1, not 0.01"),
        ({"optimizer": "adamw"}, "optimizer adamw, not sgd"),
        ({"model": "dpn-small"}, "model dpn-small, not dpn92"),
        ({"memory_limit": "8GiB"}, "memory limit 8GiB, not none"),
        ({"executor": "fake"}, "not measured (fake executor), not measured"),
    ],
)
def test_what_may_not_be_compared_stands_apart_with_the_reason(
    about: dict[str, Any], reason: str, folders: list[Path], tmp_path: Path
) -> None:
    other = write_sweep(tmp_path / "other", list_rows("NVIDIA D", 1.2, **about))
    found = build(read_sweeps([*folders, other]), Path())
    assert [group.cards for group in found.groups] == [[*CARDS], ["NVIDIA D"]]
    assert reason in found.groups[1].tell_apart(found.groups[0])
    assert reason in list(found.tables[0].groups.values())[-1]
    assert not found.groups[1].duels


def test_another_patch_of_torch_or_another_driver_may_be_compared(
    folders: list[Path], tmp_path: Path
) -> None:
    about = {"torch": "2.11.0+cu126", "driver": "550.2", "cuda": "12.6"}
    other = write_sweep(tmp_path / "other", list_rows("NVIDIA D", 1.2, **about))
    (group,) = build(read_sweeps([*folders, other]), Path()).groups
    assert group.cards == ["NVIDIA A", "NVIDIA D", "NVIDIA B", "NVIDIA C"]


def test_folders_of_one_gpu_are_one_card_and_two_gpus_of_one_name_are_two(
    folders: list[Path], tmp_path: Path
) -> None:
    again = write_sweep(tmp_path / "again", list_rows("NVIDIA A", 1.0, [(64, "off")]))
    twin = write_sweep(tmp_path / "twin", list_rows("NVIDIA A", 1.1, gpu_uuid="GPU-other"))
    (group,) = build(read_sweeps([folders[0], again]), Path()).groups
    assert group.cards == ["NVIDIA A"]
    (group,) = build(read_sweeps([folders[0], twin]), Path()).groups
    assert group.cards == ["NVIDIA A · a", "NVIDIA A · twin"]
    assert {effect.after for _, effect in group.duels} == {"NVIDIA A · a"}


def test_an_entry_is_at_one_setting_and_at_its_own_fastest(found: Cards) -> None:
    entry = find_entry(found, "NVIDIA B", "fp16")
    assert entry.equal is not None
    assert entry.best is not None
    # of two plain settings that all have, the larger batch; compiled is not plain
    assert (entry.equal.batch_size, entry.equal.compile) == (256, "off")
    assert entry.equal.epoch_time_s == pytest.approx(100 * 1.5 / 4 * 0.9)
    assert (entry.best.batch_size, entry.best.compile) == (128, "default")
    assert entry.best.epoch_time_s == pytest.approx(100 * 1.5 / 4 / 2)
    assert entry.bounds == (256, 512)
    times = {name: row.epoch_time_s for name, row in entry.base.items()}
    assert times == pytest.approx({"fp32": 135.0, "tf32": 67.5})


def test_the_setting_is_one_that_most_cards_and_precisions_have(tmp_path: Path) -> None:
    sizes = {"a": (128, 512), "b": (128, 256), "c": (128, 256)}
    folders = [
        write_sweep(tmp_path / name, list_rows(f"NVIDIA {name}", 1.0, [(s, "off") for s in held]))
        for name, held in sizes.items()
    ]
    (group,) = build(read_sweeps(folders), Path()).groups
    assert group.setting.batch_size == 128


def test_a_case_with_a_doubt_is_the_fastest_only_where_no_other_is(tmp_path: Path) -> None:
    noisy = {"step_time_median_s": 0.1, "step_time_mad_s": 0.05}
    rows = [
        replace(row, measurement=replace(row.measurement, **noisy))
        if row.case.compiled and row.case.precision != "fp32"
        else row
        for row in list_rows("NVIDIA A", 1.0)
    ]
    found = build(read_sweeps([write_sweep(tmp_path / "a", rows)]), Path())
    best = find_entry(found, "NVIDIA A", "fp16").best
    assert best is not None
    assert (best.batch_size, best.compile) == (256, "off")
    best = find_entry(found, "NVIDIA A", "fp32").best
    assert best is not None
    assert best.compile == "default"


def test_what_a_precision_brings_is_in_its_row(found: Cards) -> None:
    table = found.tables[0]
    names = [head.name for head in table.heads]
    cards = [card for card in CARDS for _ in SPEEDS]
    rows = {
        (card, row[0].text): dict(zip(names, row, strict=True))
        for card, row in zip(cards, table.rows, strict=False)  # the published card comes after
    }
    row = rows["NVIDIA B", "fp16"]
    assert (row["over_fp32"].text, row["over_tf32"].text) == ("4.00", "2.00")
    assert rows["NVIDIA B", "tf32"]["over_fp32"].text == "2.00"
    assert rows["NVIDIA B", "tf32"]["over_tf32"].text == "–"
    assert row["best"].text == "128, compile default"
    assert row["bounds"].text == "256 (not 512)"
    assert row["memory_bytes"].value == 8 * GIB
    assert row["images_per_j"].value == pytest.approx(50000 / (300 * 18.75), rel=1e-3)
    headings = [heading.partition(" · ")[0] for heading in table.groups.values()]
    assert headings == [*(f"1. {card}" for card in CARDS), "2. NVIDIA TITAN RTX"]


def test_each_card_is_judged_against_each_slower_one(found: Cards) -> None:
    duels = {(p, e.after, e.before): e.time for p, e in found.groups[0].duels}
    assert len(duels) == 9  # three pairs of cards in three precisions
    for (_, fast, slow), time in duels.items():
        assert time is not None
        assert time.pairs == 3
        assert 1 / (time.ratio.value or 0) == pytest.approx(CARDS[slow] / CARDS[fast], rel=1e-3)
    table = found.tables[1]
    assert (table.name, len(table.rows)) == ("duels", 9)
    assert {row[2].text for row in table.rows} == {"faster"}


def test_a_verdict_on_two_cards_is_that_of_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One case of each precision: both judge three ratios as one family."""
    a, b = (
        write_sweep(tmp_path / card[-1], list_rows(card, CARDS[card], [(128, "off")]))
        for card in ("NVIDIA A", "NVIDIA B")
    )
    (group,) = build(read_sweeps([a, b]), Path()).groups
    compare([str(b), str(a), "--metric", "epoch_time_s", "--format", "json"])
    judged = {
        row["case"]["precision"]: row
        for row in json.loads(capsys.readouterr().out)["metrics"]["epoch_time_s"]
    }
    assert len(group.duels) == len(judged) == 3
    for precision, effect in group.duels:
        assert effect.time is not None
        ours = TIME.lay_out(effect.time.ratio)
        for name in ("speed", "low", "high", "p_adjusted"):
            assert ours[name] == pytest.approx(judged[precision][name]), name


def test_images_per_money_follow_the_price_of_an_hour(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('unit = "EUR"\n"NVIDIA" = 1.0\n"nvidia b" = 3\n')
    args = [*map(str, folders), "--price", str(prices), "--format", "md"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "million images per EUR" in out
    assert "| 3.200 |" in out  # B in fp16: 50000 / 18.75 s, times 3600 s, for 3 EUR
    assert "| 14.40 |" in out  # A in fp16: 50000 / 12.5 s, for 1 EUR


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a = ", "Invalid value"),
        ('"NVIDIA A" = 0', "a price of an hour above 0"),
        ('"NVIDIA A" = true', "a price of an hour above 0"),
        ('"NVIDIA A" = "2"', "a price of an hour above 0"),
        ('"NVIDIA Z" = 2.0', "did you mean 'NVIDIA "),
        ("unit = 2", "unit should be text"),
    ],
)
def test_a_wrong_price_is_refused_in_a_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_prices(file, CARDS)


def test_usage_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--format", "htm"]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path), "--price", str(tmp_path / "none")]) == 2
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2  # there is no results/ here


def test_faults_of_a_folder_are_named(found: Cards) -> None:
    assert "faults in code" in found.faults["a"]
    assert found.faults["rtx-titan-2019"] == "all checks passed"
    assert found.warnings[0].label == "Faults"
    assert "a: faults in code" in found.warnings[0].found


def test_committed_folders_and_planted_cards_make_a_page(
    folders: list[Path], tmp_path: Path
) -> None:
    page = tmp_path / "cards.html"
    real = [*map(str, list_results(ROOT / "results"))]
    assert main([*real, *map(str, folders), "--format", "html", "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    for said in (
        "NVIDIA H100 80GB HBM3",
        "NVIDIA TITAN RTX",
        "Card against card",
        "apart from 1: ",
        "known faults in code",
    ):
        assert said in text
