"""All cards beside each other: which may be compared, at which settings, and which is faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.answers.render.documents import table_lines
from bench.base.installation import HOME
from bench.cards.__main__ import main
from bench.cards.document import Cards, build
from bench.results.study.sweeps import REFERENCE, read_sweeps
from bench.schema.case import Case
from bench.schema.record import Record, Status
from tests.planted.records import GIB, ROOT, make_record, measured, write_sweep
from tests.test_golden import keep

CARDS = {"NVIDIA A": 1.0, "NVIDIA B": 1.5, "NVIDIA C": 2.0}
"""Cards of one recipe, torch and code, and how much slower they are than the first."""

SPEEDS = {"fp32": 1.0, "tf32": 2.0, "fp16": 4.0}
SETTINGS = ((128, "off"), (256, "off"), (128, "default"))
"""Batch size and compile mode of the cases of each precision."""


def describe(card: str) -> dict[str, Any]:
    return {
        "gpu": card,
        "gpu_uuid": f"GPU-{card}",
        "gpu_memory_bytes": 24 * GIB,
        "driver": "580.1",
        "torch": "2.13.0+cu130",
        "code": "0123456789ab",
        "dataset_fingerprint": "feed",
        "train_images": 50000,
    }


def list_rows(
    card: str, slower: float, settings: Sequence[tuple[int, str]] = SETTINGS, **about: Any
) -> Iterator[Record]:
    """Three repeats of each case, and a batch that does not fit."""
    axes = {name: about.pop(name) for name in list(about) if name in Case.__annotations__}
    environment = describe(card) | about
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


APART: dict[str, dict[str, Any]] = {
    "torch 3, not 2": {"torch": "3.0.0"},
    "model dpn-small, not dpn92": {"model": "dpn-small"},
    "memory limit 8GiB, not none": {"memory_limit": "8GiB"},
    "not known to be measured, not measured": {"executor": "x"},
    "other images": {"dataset_fingerprint": "beef"},
    "what one of them trained is not recorded": {"model_structure": "other"},
    "other number of images": {"train_images": 10000},
}
"""What other cards differ in, by the reason why they stand apart."""


def test_what_may_not_be_compared_stands_apart_with_the_reason(
    folders: list[Path], tmp_path: Path
) -> None:
    others = [
        write_sweep(
            tmp_path / f"other-{i}", list_rows(f"NVIDIA {reason}", 1.2, [(128, "off")], **about)
        )
        for i, (reason, about) in enumerate(APART.items())
    ]
    found = build(read_sweeps([*folders, *others]), Path())
    first, *apart = found.groups
    assert first.cards == [*CARDS]
    assert len(first.pairs) == 9
    assert sorted(group.cards for group in apart) == sorted([f"NVIDIA {r}"] for r in APART)
    headings = [*found.tables[0].groups.values()]
    for group in apart:
        reason = group.cards[0].removeprefix("NVIDIA ")
        assert reason in group.tell_apart(first)
        (heading,) = (one for one in headings if f"NVIDIA {reason} · " in one)
        assert reason in heading.partition("apart from 1: ")[2]
        assert not group.pairs


def test_a_card_of_two_groups_is_named_once(folders: list[Path], tmp_path: Path) -> None:
    other = write_sweep(tmp_path, list_rows("NVIDIA A", 1.0, dataset_fingerprint="beef"))
    found = build(read_sweeps([*folders, other]), Path())
    one, two = (f"NVIDIA A · dataset fingerprint {images}" for images in ("feed", "beef"))
    assert [group.cards for group in found.groups] == [[one, *[*CARDS][1:]], [two]]
    assert found.subject == "3 cards: NVIDIA A, NVIDIA B, NVIDIA C"


def test_a_card_is_a_gpu_and_what_trained_without_one_comes_last(
    folders: list[Path], tmp_path: Path
) -> None:
    axes = {"device": "cpu", "model": "dpn-small", "gpu": "", "gpu_uuid": ""}
    rows = list_rows("none", 9.0, [(128, "off")], cpu="A CPU", **axes)
    other = write_sweep(tmp_path / "other", rows)
    found = build(read_sweeps([other, *folders, REFERENCE]), Path())
    devices = [group.setting.device for group in found.groups]
    assert devices == ["cuda", "cuda", "cpu"]
    assert found.title == "4 cards and 1 machine without a GPU"
    assert build(read_sweeps([other]), Path()).title == "1 machine without a GPU"


def test_what_changes_no_step_may_differ_between_cards(folders: list[Path], tmp_path: Path) -> None:
    """Versions, the recipe, and the source of the harness."""
    about = {"torch": "2.11.0+cu126", "driver": "550.2", "cuda": "12.6", "lr": 0.1}
    about |= {"optimizer": "adamw", "code": "ba9876543210", "model_source": "other"}
    other = write_sweep(tmp_path / "other", list_rows("NVIDIA D", 1.2, **about))
    (group,) = build(read_sweeps([*folders, other]), Path()).groups
    assert group.cards == ["NVIDIA A", "NVIDIA D", "NVIDIA B", "NVIDIA C"]


def test_a_card_that_stepped_a_slow_optimizer_is_apart(folders: list[Path], tmp_path: Path) -> None:
    other = write_sweep(tmp_path / "other", list_rows("NVIDIA D", 1.2, optimizer="muon"))
    first, apart = build(read_sweeps([*folders, other]), Path()).groups
    assert apart.cards == ["NVIDIA D"]
    assert apart.tell_apart(first) == ["slow optimizer muon, not none"]


def test_folders_of_one_gpu_are_one_card_and_two_gpus_of_one_name_are_two(
    folders: list[Path], tmp_path: Path
) -> None:
    again = write_sweep(tmp_path / "again", list_rows("NVIDIA A", 1.0, [(64, "off")]))
    twin = write_sweep(tmp_path / "twin", list_rows("NVIDIA A", 1.1, gpu_uuid="GPU-other"))
    (group,) = build(read_sweeps([folders[0], again]), Path()).groups
    assert group.cards == ["NVIDIA A"]
    (group,) = build(read_sweeps([folders[0], twin]), Path()).groups
    assert group.cards == ["NVIDIA A · a", "NVIDIA A · twin"]
    assert {pair.fast for pair in group.pairs} == {"NVIDIA A · a"}


def test_no_ratio_of_a_card_is_across_two_versions_of_torch(tmp_path: Path) -> None:
    """fp16 of the old torch, twice as fast, was held against fp32 of the new one."""
    sides = (("2.12", 0.5, ("fp32", "fp16")), ("2.13", 1.0, ("fp32",)))
    rows = [
        replace(row, record_id=f"{torch}{row.record_id}")
        for torch, slower, precisions in sides
        for row in list_rows("NVIDIA A", slower, [(128, "off")], torch=torch)
        if row.case.precision in precisions
    ]
    found = build(read_sweeps([write_sweep(tmp_path / "a", rows)]), Path())
    (group,) = found.groups
    assert found.title == "1 card"
    assert [(entry.card, entry.precision, [*entry.over]) for entry in group.entries] == [
        ("NVIDIA A · torch 2.12", "fp32", []),
        ("NVIDIA A · torch 2.12", "fp16", ["fp32"]),
        ("NVIDIA A · torch 2.13", "fp32", []),
    ]


def test_an_entry_is_at_one_setting_and_at_its_own_fastest(found: Cards) -> None:
    entries = {(e.card, e.precision): e for group in found.groups for e in group.entries}
    entry = entries["NVIDIA B", "fp16"]
    # of two plain settings that all have, the larger batch; compiled is not plain
    assert (entry.equal.batch_size, entry.equal.compile) == (256, "off")
    assert entry.equal.epoch_time_s == pytest.approx(100 * 1.5 / 4 * 0.9)
    assert (entry.best.batch_size, entry.best.compile) == (128, "default")
    assert entry.best.epoch_time_s == pytest.approx(100 * 1.5 / 4 / 2)
    assert {name: speed.value for name, speed in entry.over.items()} == pytest.approx(
        {"fp32": 4.0, "tf32": 2.0}
    )


def test_each_card_is_judged_against_each_slower_one(found: Cards) -> None:
    pairs = {(d.precision, d.fast, d.slow): d for d in found.groups[0].pairs}
    assert len(pairs) == len(found.groups[0].pairs) == 9  # 3 pairs of cards in 3 precisions
    for (_, fast, slow), pair in pairs.items():
        assert [row.batch_size for row in pair.cases] == [256, 256]
        assert pair.speedup.value == pytest.approx(CARDS[slow] / CARDS[fast], rel=1e-3)
    (answer, _) = found.answers
    assert "NVIDIA A: 12.50 s an epoch, in fp16" in answer.sentences[0]
    assert "2.00 [1.98–2.02] times as fast as NVIDIA C at batch size 256" in answer.sentences[0]


def test_cards_without_a_precision_or_the_setting_are_judged_by_what_they_have(
    tmp_path: Path,
) -> None:
    """C has no fp16, and ran at 128 alone, where the others also ran."""
    rows = [row for row in list_rows("NVIDIA C", 2.0) if row.case.precision != "fp16"]
    sets = {
        "b": list_rows("NVIDIA B", 1.5),
        "a": list_rows("NVIDIA A", 1.0),
        "c": [row for row in rows if row.case.batch_size == 128],
    }
    folders = [write_sweep(tmp_path / name, rows) for name, rows in sets.items()]
    (group,) = build(read_sweeps(folders), Path()).groups
    assert group.setting.batch_size == 128  # all have it, and 256 only two
    pairs = [(d.precision, d.fast[-1] + d.slow[-1]) for d in group.pairs]
    assert sorted(pairs) == [
        ("fp16", "AB"), ("fp32", "AB"), ("fp32", "AC"), ("fp32", "BC"),
        ("tf32", "AB"), ("tf32", "AC"), ("tf32", "BC"),
    ]  # fmt: skip


def plant_oddities(root: Path) -> list[Path]:
    """Parts of an epoch, warnings, a scale that failed, folders of one card, another lr."""
    noisy = {"step_time_median_s": 0.1, "step_time_mad_s": 0.05}
    part = {"measured_images": 10000, "measured_steps": 79, "steps_per_epoch": 391}
    plain = [(128, "off")]

    def change(rows: Iterable[Record], **values: Any) -> Iterator[Record]:
        for row in rows:
            timed = row.status is Status.OK
            yield replace(row, measurement=replace(row.measurement, **values)) if timed else row

    def fp16(card: str, scale: float | str, **about: Any) -> Record:
        case = Case(precision="fp16", loss_scale=scale, batch_size=128)
        return make_record(case, **{**about, **describe(card)})

    sets = {
        "whole": [row for row in list_rows("NVIDIA B", 1.5) if row.case.precision != "fp16"],
        "part": change(list_rows("NVIDIA A", 1.0, plain, fraction=0.2), **part),
        "noisy": change(list_rows("NVIDIA A", 0.9, plain), **noisy),
        "failed": [fp16("NVIDIA B", 128.0, status=Status.ERROR, reason="RuntimeError: no"),
                   fp16("NVIDIA B", "dynamic", **measured(40, GIB))],
        "other": change(list_rows("NVIDIA C", 0.5, plain, lr=0.1, epochs=2), **noisy),
    }  # fmt: skip
    return [write_sweep(root / name, rows) for name, rows in sets.items()]


def test_a_page_of_oddities_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = build(read_sweeps([*plant_oddities(tmp_path), REFERENCE]), Path())
    tables = [table for table in found.tables if table.name in ("cards", "pairs")]
    lines = [found.title, *(f"{a.about}: {' '.join(a.sentences)}" for a in found.answers)]
    lines += [line for table in tables for line in table_lines(table)]
    keep("cards/oddities.md", "\n".join([*lines, *(w.line for w in found.warnings), ""]))


def test_the_command_adds_the_card_of_2019_and_leaves_out_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path / "results" / "good", list_rows("NVIDIA A", 1.0))
    (tmp_path / "results" / "broken").mkdir()
    (tmp_path / "results" / "broken" / "records.csv").write_text("what\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--full"]) == 0
    out, err = capsys.readouterr()
    assert "NVIDIA TITAN RTX" in out
    # a wheel has no Makefile
    assert "measure your own card, and send it in.\n  python -m bench.card\n" in out
    assert "left out: " in err
    assert "broken" in err
    assert main(["results", "--full"]) == 0
    assert capsys.readouterr() == (out, err)
    assert main(["results/broken"]) == 2
    monkeypatch.chdir(tmp_path / "results")
    assert main([]) == 2  # there is no results/ here
    assert f"{HOME}/tree/main/results" in capsys.readouterr().err


def test_the_best_epoch_is_the_best_and_the_rule_s_choice_is_beside_it() -> None:
    """Of the card of 2019 the table said 212.3 s, at batch size 128, where 203.8 is there."""
    published = ROOT / "results" / "reference" / "rtx-titan-2019.csv"
    ((group,),) = [build(read_sweeps([published]), Path()).groups]
    (fp32,) = (entry for entry in group.entries if entry.precision == "fp32")
    assert fp32.best.epoch_time_s == pytest.approx(203.8, abs=0.1)
    assert fp32.chosen is not None
    assert (fp32.best.batch_size, fp32.chosen.batch_size) == (256, 128)


def test_a_baseline_that_is_faster_at_another_batch_size_is_named() -> None:
    """In results/ fp32 takes 148 s at batch size 256, by chance, and 89 s at 64."""
    sweep = ROOT / "results" / "cpu-epyc-20261120"
    ((group,),) = [build(read_sweeps([sweep]), Path()).groups]
    fp32, amp = group.entries
    assert (fp32.slow, [row.batch_size for row in amp.slow]) == ((), [64])
    assert amp.over["fp32"].value == pytest.approx(2.6, abs=0.01)
