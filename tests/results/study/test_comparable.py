"""Only times of the same are compared: what a row's time is of, and which rows say nothing of each
other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cards.document import build as build_cards
from bench.compare.__main__ import main as compare
from bench.report.document import build as build_report
from bench.report.figures import list_panels
from bench.report.files import write_json
from bench.results.study.comparable import (
    Period,
    find_factor,
    find_period,
    list_mixed,
    list_unlike,
    refuse_learnt,
    refuse_pair,
    refuse_together,
    restate,
    take_alike,
)
from bench.results.study.sweeps import read_sweep, read_sweeps
from bench.schema.case import Case
from bench.schema.record import COMPARABLE, Record, Status
from bench.validate.__main__ import main as validate
from tests.planted.records import GIB, make_record, measured, ran, write_sweep
from tests.planted.results import read_report, read_results, tell
from tests.planted.scripts import counted, script, stepped, untold
from tests.pytest_for_tests import Capture

BF16 = script(precision="bf16")
NOT_TOLD = "call bench.step(items=len(x)) in the script, and items a second are compared."


def mix(*parts: Sequence[Record]) -> list[Record]:
    """Several rows as repeats of one case."""
    rows = [row for part in parts for row in part]
    for repeat, row in enumerate(rows, 1):
        row.repeat, row.record_id = repeat, f"{row.record_id}-{repeat}"
    return rows


def again(rows: Sequence[Record]) -> list[Record]:
    """Rows as reruns at the end of a sweep, which show its drift."""
    for row in rows:
        row.sentinel, row.record_id = True, f"{row.record_id}-s"
    return [*rows]


FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)
THREE = [0.01, 0.01005, 0.00995]

SAID: dict[str, tuple[Sequence[Record], list[str], list[str]]] = {
    # every row with what it says: rows, sentences, and what each row shows of time and unit
    "epochs of other sizes, the larger does more items a second": (
        [*counted(script(64), [0.010] * 3, epoch=30), *counted(script(256), [0.028] * 3, epoch=30)],
        ["Run train.py on A card in fp32 at batch size 256: 1.094 s for 10,000 items"],
        ["≈1.562", "1.094"],
    ),
    "an epoch, and a row that --steps ended before its end": (
        [*counted(script(64), THREE, epoch=30), *counted(script(256), [0.028] * 3)],
        ["in fp32 at batch size 256: 1.094 s for 10,000 items"],
        ["≈1.562 (1.555–1.570)", "1.094"],
    ),
    "equal epochs stay epochs": (
        [*counted(script(), THREE, epoch=30), *counted(BF16, [0.005] * 3, epoch=30)],
        ["in bf16 at batch size 64: 0.1500 s an epoch"],
        ["0.3000 (0.2985–0.3015)", "0.1500"],
    ),
    "items and runs": (
        [*counted(script(), THREE), *untold(BF16, [0.5, 0.502, 0.498])],
        [f"Times of 10,000 items and a run say nothing of each other: let every run take more "
         f"steps, and {NOT_TOLD}"],
        ["≈1.562 (1.555–1.570) | 10,000 items", "0.5000 (0.4980–0.5020) | a run | label unproven"],
    ),
    "items and steps": (
        [*counted(script(), THREE), *stepped(BF16, THREE)],
        [f"Times of 10,000 items and 10,000 steps say nothing of each other: {NOT_TOLD}"],
        ["≈1.562 (1.555–1.570) | 10,000 items", "≈100.0 (99.5–100.5) | 10,000 steps"],
    ),
    "runs at two batch sizes": (
        [*untold(script(4), [0.1] * 3), *untold(script(32), [0.2] * 3)],
        [f"A run with another batch size may do more or less, so its time is not compared: "
         f"{NOT_TOLD}"],
        ["0.1000 | label unproven", "0.2000 | label unproven"],
    ),
    "steps at two batch sizes": (
        [*stepped(script(4), THREE), *stepped(script(32), [0.02] * 3)],
        ["A step with another batch size may do more or less, so its time is not compared:"],
        ["≈100.0 (99.5–100.5)", "≈200.0"],
    ),
    "runs with a variable of one's own": (
        [*untold(script(vary="rate=4 x=1"), [0.1] * 3), *untold(script(vary="rate=8 x=1"), [0.2])],
        ["A run with another rate may do more or less, so its time is not compared:"],
        ["0.1000 | label unproven", "0.2000 | label unproven"],
    ),
    "runs of two precisions": (
        [*untold(script(), [0.5] * 3), *untold(BF16, [0.25] * 3)],
        ["in bf16 at batch size 64: 0.2500 s a run, against 0.5000 s in fp32 (2.00 times as fast"],
        ["0.5000 | label unproven", "0.2500 | label unproven"],
    ),
    "a repeat that went on from another": (
        [*mix(counted(script(), [0.01]), untold(script(), [0.5, 0.5])), *counted(BF16, THREE)],
        ["Only one setting can be compared, bf16 at batch size 64: ≈1.562 s for 10,000 items."],
        ["≈1.562 | other steps, label unproven, 1 of 3 runs", "≈1.562 (1.555–1.570)"],
    ),
    "a run that read what an earlier one wrote, and tells nothing": (
        [*untold(script(), THREE), *untold(BF16, [0.001], carried="last.pt")],
        ["Only one setting can be compared, fp32 at batch size 64: 0.01000 s a run."],
        ["0.01000 (0.00995–0.01005) | label unproven", "0.001000 | went on, label unproven"],
    ),
    "what went on and counts its steps is compared, and not recommended": (
        [*counted(script(), THREE), *counted(BF16, [0.001] * 3, carried="last.pt")],
        ["Half of the cases or more have a warning, so none is recommended. Lowest time: bf16 at "
         "batch size 64, ≈0.1562 s: went on."],
        ["≈1.562 (1.555–1.570)", "≈0.1562 | went on"],
    ),
    "a repeat of half of the steps": (
        [*mix(counted(script(), [0.01]), counted(script(), [0.01], steps=30)),
         *counted(BF16, [0.02] * 3)],
        ["Only one setting can be compared, bf16 at batch size 64: ≈3.125 s for 10,000 items."],
        ["≈1.562 | other steps", "≈3.125"],
    ),
    "a drift rerun, which is no repeat": (
        [*counted(script(), THREE[:2]), *again(untold(script(), [0.5])),
         *counted(BF16, [0.02] * 2)],
        ["Run train.py on A card in fp32 at batch size 64: ≈1.566 s for 10,000 items"],
        ["≈1.566 (1.562–1.570)", "≈3.125"],
    ),
    "repeats that --steps ended, after warm-ups of any length": (
        [*mix(counted(script(steps=50), [0.01]), counted(script(steps=50), [0.01], warmup_steps=7)),
         *counted(script(precision="bf16", steps=50), [0.02] * 3)],
        ["Run train.py on A card in fp32 at batch size 64: ≈1.562 s for 10,000 items"],
        ["≈1.562", "≈3.125"],
    ),
    "a repeat without a warm-up, which leaves out its first step and the sampled one": (
        [*mix(counted(script(), [0.01] * 2),
              counted(script(), [0.01], warmup_steps=None, measured_steps=58)),
         *counted(BF16, [0.02] * 3)],
        ["Run train.py on A card in fp32 at batch size 64: ≈1.562 s for 10,000 items"],
        ["≈1.562", "≈3.125"],
    ),
    "a batch that was halved": (
        [*counted(script(64), [0.01] * 3), *counted(script(256), [0.009] * 3, items=64)],
        ["Only one setting can be compared, fp32 at batch size 64: ≈1.562 s for 10,000 items."],
        ["≈1.562", "≈1.406 | steps of 64 items"],
    ),
    "a batch that a tenth was taken from": (
        [*counted(script(64), [0.01] * 3), *counted(script(200), [0.01] * 3, items=180)],
        ["Only one setting can be compared, fp32 at batch size 64: ≈1.562 s for 10,000 items."],
        ["≈1.562", "≈0.5556 | steps of 180 items"],
    ),
    "a batch that one was taken from": (
        [*counted(script(64), [0.01] * 3), *counted(script(200), [0.01] * 3, items=199)],
        ["Only one setting can be compared, fp32 at batch size 64: ≈1.562 s for 10,000 items."],
        ["≈1.562", "≈0.5025 | steps of 199 items"],
    ),
    "tokens, of which one of three has fewer": (
        [*counted(script(8), [0.01] * 3, items=1024), *counted(script(16), [0.02] * 3, items=2048),
         *counted(script(64), [0.01] * 3, items=2048)],
        ["Run train.py on A card in fp32 at batch size 8: 0.09766 s for 10,000 items."],
        ["0.09766", "0.09766", "0.04883 | steps of 2,048 items"],
    ),
    "tokens of two lengths": (
        [*counted(script(8, vary="rate=128"), [0.01] * 3, items=1024, train_loss=2),
         *counted(script(8, vary="rate=256"), [0.01] * 3, items=2048, train_loss=2)],
        ["in fp32 at batch size 8 (rate 256): 0.04883 s for 10,000 items."],
        ["0.09766", "0.04883"],
    ),
    "tokens of which it is not known which are right": (
        [*counted(script(8), [0.01] * 3, items=1024), *counted(script(16), [0.01] * 3, items=1024)],
        ["No time can be compared with another: steps of 1,024 items: its batch size is 8."],
        ["0.09766 | steps of 1,024 items", "0.09766 | steps of 1,024 items"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_only_times_of_the_same_are_compared(name: str, tmp_path: Path) -> None:
    rows, sentences, times = SAID[name]
    report = read_report(tmp_path, rows)
    answered = " ".join(sentence for answer in report.answers for sentence in answer.sentences)
    assert [text for text in sentences if text not in answered] == [], answered
    assert (" s " in sentences[0]) == ("Run " in answered or "Only one setting" in answered)
    assert "--compile" not in answered, "a command takes no such flag"
    assert tell(report, "overview", "epoch_time_s period remarks") == times


@pytest.mark.parametrize(
    ("name", "effects"),
    [
        ("items and runs", ["precision: fp32 → bf16"]),  # of its memory
        ("runs at two batch sizes", ["batch size: 4 → 32"]),
        ("epochs of other sizes, the larger does more items a second",
         ["batch size: 64 → 256 | ≈1.43×"]),
        ("a batch that was halved", []),
        ("a repeat that went on from another", []),
    ],
)  # fmt: skip
def test_no_effect_is_of_times_that_say_nothing_of_each_other(
    name: str, effects: list[str], tmp_path: Path
) -> None:
    assert (
        tell(read_report(tmp_path, SAID[name][0]), "effects", "change speedup verdict") == effects
    )


@pytest.mark.parametrize(
    ("period", "expected"),
    [
        (Period("runs", 1, whole=False), "a run"),
        (Period("items", 10_000, whole=False), "10,000 items"),
        (Period("images", 50_000, whole=True), "an epoch of 50,000 images"),
        (Period("images", 0, whole=True), "an epoch"),
        (Period("steps", 0, whole=False), "0 steps"),
    ],
)
def test_a_period_says_what_it_is_of(period: Period, expected: str) -> None:
    assert str(period) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "factor"), [(60, 30, 2.0), (0, 30, 1.0), (60, 0, 1.0), (30, 60, 0.5)]
)
def test_a_time_is_restated_for_the_items_of_the_other(
    ours: int, theirs: int, factor: float
) -> None:
    a, b = (SimpleNamespace(period=Period("items", number, True)) for number in (ours, theirs))
    assert find_factor(a, b) == factor


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("runs updates steps items", "items"),
        ("runs updates steps", "steps"),
        ("runs updates", "updates"),
        ("runs", "runs"),
        ("images steps", "images"),
        ("", ""),
    ],
)
def test_those_are_taken_that_tell_most_and_those_without_a_time(given: str, kept: str) -> None:
    rows: list[Any] = [
        SimpleNamespace(timed=True, period=Period(what, 1, whole=False)) for what in given.split()
    ]
    none: Any = SimpleNamespace(timed=False, period=Period("runs", 1, whole=False))
    assert take_alike([none, *rows]) == [none, *(r for r in rows if r.period.what == kept)]


def row(case: Case = FP32, **values: Any) -> Any:
    """A run or a result that measured a whole epoch of known data, unless its values say
    otherwise."""
    known = {"timed": True, "period": Period("items", 1, whole=True), "part": 1.0}
    own = {"part_known": True, "dataset_fingerprint": "a", "carried": ""}
    plain: dict[str, Any] = {**known, **own, "steps_apart": "", "items_apart": ""}
    return SimpleNamespace(**{**vars(case), **plain, **values})


NO_PAIR: list[tuple[dict[str, Any], str]] = [
    # what forbids to compare a row with one of which nothing is said, and how that is called
    ({}, ""),
    ({"steps_apart": "other steps"}, "other steps"),
    ({"items_apart": "steps of 64 items"}, "steps of 64 items"),
    ({"carried": "last.pt", "period": Period("runs", 1, whole=False)}, "went on from"),
    ({"carried": "last.pt"}, ""),  # which counts what it did
    ({"period": Period("steps", 1, whole=False)}, "say nothing of each other"),
    ({"period": Period("steps", 1, whole=False), "timed": False}, ""),
]


@pytest.mark.parametrize(("values", "why"), NO_PAIR)
def test_what_forbids_a_pair_does_so_on_either_side(values: dict[str, Any], why: str) -> None:
    for found in (refuse_pair(row(**values), row()), refuse_pair(row(), row(**values))):
        assert (bool(found), why in found) == (bool(why), True), found


SYNTHETIC = Case(dataset="synthetic", input="3x64x64")
OTHER_DATA = "losses on other data say nothing of each other"
LESS = (
    "less than an epoch does not show what it does to learning; let the script train for one, and "
    "tell of it by bench.epoch(loss=…)"
)
LEARNT: list[tuple[Any, Any, str, str]] = [
    # two rows, the axis that they differ in, and why what they learnt is not compared
    (row(), row(), "", ""),
    (row(), row(dataset_fingerprint="b"), "", f"{OTHER_DATA}: dataset_fingerprint differs"),
    (row(), row(dataset_fingerprint=""), "", ""),  # it ended before its worker could look
    (row(SYNTHETIC), row(replace(SYNTHETIC, input=None)), "", f"{OTHER_DATA}: input differs"),
    (row(), row(replace(FP32, dataset="synthetic"), dataset_fingerprint="b"), "",
     f"{OTHER_DATA}: dataset_fingerprint, dataset differs"),
    (row(), row(replace(FP32, accumulate=2)), "accumulate", ""),
    (row(workload="own:make"), row(replace(FP32, accumulate=2), workload="own:make"), "accumulate",
     f"{OTHER_DATA}: accumulate differs"),  # whose random numbers are drawn for each micro-batch
    (row(), row(part=0.5), "", "1 and 0.5 of an epoch cannot be compared; use --fraction 1"),
    (row(command="python a.py"), row(part=0.5, command="python a.py"), "",
     "1 and 0.5 of an epoch cannot be compared; end both by --steps"),
    (row(), row(part=0.5, part_known=False), "", ""),
    (row(part=0.5, part_known=False), row(), "lr", ""),
    (row(part=0.5), row(part=0.5), "", ""),  # no change of what it learns by
    (row(part=0.5), row(part=0.5), "machine", ""),
    (row(part=0.5), row(part=0.5), "compile", ""),
    (row(part=0.5), row(part=0.5), "lr",
     "less than an epoch does not show what it does to learning; use --fraction 1"),
    (row(part=0.5, command="python a.py"), row(part=0.5, command="python a.py"), "lr",
     LESS),
    (row(), row(), "lr", ""),
    # an own axis is a setting, but where its values are versions of the code
    *(
        (row(part=0.5, command=command), row(part=0.5, command=command), "{one}", why)
        for command, why in (
            ("python {one}/train.py", ""),
            ("python -u '{one:a=/x y/a,b=/x y/b}/train it.py' --seed {seed}", ""),
            ("env PYTHONPATH={one}/src python -m mine.train", ""),
            ("sh -c 'cd {one} && python train.py'", ""),
            ("python train.py --depth {one}", LESS),
            ("python train.py --data {one}/a.csv", LESS),
            ("python train.py --config {one}/model.py", LESS),
            ("python train-{one}.py", LESS),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "axis", "why"), LEARNT)
def test_what_was_learnt_is_compared_on_equal_data_and_equal_parts(
    a: Any, b: Any, axis: str, why: str
) -> None:
    assert refuse_learnt(a, b, axis) == why
    if not axis:
        assert bool(refuse_learnt(a, b, "")) == bool(why)


TOLD = {"gpu": "A card", "torch": "2.13", "model_structure": "a", "model_source": "a",
        "dataset_fingerprint": "a", "power_limit_w": 700.0}  # fmt: skip
DIFFER: list[tuple[dict[str, Any], str]] = [
    # what two rows differ in beside their precision, and where nonetheless they stand together: a
    # sweep goes on, a report pairs them, two folders are compared, cards stand in one group
    ({}, "resume report compare cards"),
    ({"power_limit_w": 500.0}, "resume report compare cards"),
    ({"torch": "2.12"}, "compare cards"),  # a folder is of one version, and of cards the major one
    ({"torch": "1.13"}, "compare"),
    ({"gpu": "B card"}, "compare cards"),  # what both are for
    ({"variables": "A=1"}, "compare cards"),
    ({"model_source": "b"}, "compare cards"),  # two machines may have two versions of the harness
    ({"model_structure": "b"}, ""),
    ({"dataset_fingerprint": "b"}, "compare"),  # which says it
]


@pytest.mark.parametrize(("other", "together"), DIFFER)
def test_rows_stand_together_by_one_rule_but_for_what_each_question_is_of(
    other: dict[str, Any], together: str, tmp_path: Path, capsys: Capture
) -> None:
    values = {**measured(10.0, 4 * GIB), **TOLD}
    first, second = make_record(FP32, **values), make_record(FP16, **{**values, **other})
    both = read_sweep(write_sweep(tmp_path / "both", [first, second]))
    questions = list[str]()
    if not [*list_unlike(both.rows[:1], FP16, second.environment, COMPARABLE)]:
        questions.append("resume")
    report = build_report([both])
    if tell(report, "effects", "change"):
        questions.append("report")
    assert bool("Mixed environments" in {one.label for one in report.warnings}) is (
        "resume" not in questions
    )
    folders = [
        write_sweep(tmp_path / name, [make_record(FP32, **{**values, **more, "gpu_uuid": name})])
        for name, more in (("a", {}), ("b", {"cpu": "x", **other}))
    ]
    if not compare([*map(str, folders)]) and "1 case in both" in capsys.readouterr().out:
        questions.append("compare")
    if len(build_cards(read_sweeps(folders), tmp_path).groups) == 1:
        questions.append("cards")
    assert " ".join(questions) == together


def test_files_say_of_what_a_time_is(tmp_path: Path) -> None:
    text = write_json(read_report(tmp_path, SAID["items and runs"][0]))
    assert '"period": "10,000 items"' in text
    assert '"period": "a run"' in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a batch that was halved", "steps of 64 items: its batch size is 256"),
        ("a repeat that went on from another", "other steps: repeats took 60, 0 and 0"),
        ("tokens of two lengths", ""),
    ],
)
def test_a_folder_whose_rows_are_not_what_they_say_contradicts_itself(
    name: str, expected: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = write_sweep(tmp_path / "sweep", SAID[name][0])
    validate([str(folder)])
    output = capsys.readouterr().out
    (line,) = (line for line in output.splitlines() if "the epoch agrees with its setting" in line)
    assert ("FAULT" in line, expected in output) == (bool(expected), True), output


def test_the_figure_has_rates_of_items_alone(tmp_path: Path) -> None:
    runs, items = (
        "runs at two batch sizes",
        "an epoch, and a row that --steps ended before its end",
    )
    for name, panels in ((runs, 0), (items, 1), ("a batch that was halved", 0)):
        assert len(list_panels(read_report(tmp_path / name, SAID[name][0]))) == panels


def test_where_no_command_was_timed_nothing_is_said_of_an_epoch(tmp_path: Path) -> None:
    rows = [make_record(script(size), status=Status.ERROR, reason="x") for size in (4, 8)]
    heads = [head.label for one in read_report(tmp_path, rows).tables for head in one.heads]
    assert "time (s)" in heads
    assert "epoch" not in " ".join(heads)


def test_no_drift_is_of_another_unit(tmp_path: Path) -> None:
    last = untold(script(), [5.0])
    last[0].sentinel = True
    report = read_report(tmp_path, [*counted(script(), THREE), *last])
    assert "Drift" not in [one.label for one in report.warnings]


EPOCHS = counted(script(), THREE, epoch=30)

SIDES: dict[str, tuple[str, Sequence[Record], Sequence[Record], list[str]]] = {
    "an epoch and what --steps cut": (
        "", EPOCHS, counted(script(), THREE),
        ["B is 1.00 times as fast as A",
         "the time of B is given for an epoch of 1,920 items, as that of A is"],
    ),
    "items and a run": (
        "", counted(script(), THREE), untold(script(), THREE),
        [f"! Times of 10,000 items and a run say nothing of each other: let every run take more "
         f"steps, and {NOT_TOLD}"],
    ),
    "a side that went on from a checkpoint": (
        "", EPOCHS, mix(counted(script(), [0.01], epoch=30), untold(script(), [0.5, 0.5])),
        ["! Not compared: other steps: repeats took 60, 0 and 0"],
    ),
    "runs at two batch sizes": (
        "--axis batch_size 4 32", untold(script(4), THREE), untold(script(32), THREE),
        ["! A run with another batch size may do more or less"],
    ),
    "two precisions that nobody looked at": (
        "--axis precision fp32 bf16", untold(script(), THREE), untold(BF16, [0.005] * 3),
        ["bf16 is 2.00 times as fast as fp32", "! Whether a command ran in the number format of "
         "its label was not looked at: both sides may have done the same work. Call bench.step"],
    ),
    "two data sets": (
        "--axis dataset cifar10 synthetic", ran(Case(), (100, 101, 99)),
        ran(Case(dataset="synthetic"), (20, 20.2, 19.8), train_images=10_000),
        ["is 1.00 times as fast", "is given for an epoch of 50,000 images, as that of"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_sides_are_compared_in_equal_units_alone(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    axis, a, b, sentences = SIDES[name]
    write_sweep(tmp_path / "a", a)
    write_sweep(tmp_path / "b", b)
    assert compare([str(tmp_path / "a"), str(tmp_path / "b"), *axis.split()]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert [text for text in sentences if text not in output] == [], output
    assert ("times as fast" in output) == ("times as fast" in sentences[0])


def test_cards_tell_of_what_their_times_are_and_compare_no_others(tmp_path: Path) -> None:
    """One tells its items, and one runs alone, at two batch sizes."""
    for name, rows in (("a", counted(script(), THREE)), ("b", SAID["runs at two batch sizes"][0])):
        write_sweep(tmp_path / name, rows)
    found = build_cards(read_sweeps([tmp_path / "a", tmp_path / "b"]), tmp_path)
    text = " ".join(sentence for answer in found.answers for sentence in answer.sentences)
    assert "1.562 s for 10,000 items, in fp32 (batch size 64)" in text
    assert "0.1000 s a run, in fp32 (batch size 4)" in text
    assert "0.2000 s a run, in fp32 (batch size 32)" in text
    assert ("unit runs, not items" in text, "times as fast" in text) == (True, False)


def test_no_metric_is_chosen_that_a_side_lacks(tmp_path: Path, capsys: Capture) -> None:
    lacks = dict.fromkeys(("peak_device_bytes", "peak_reserved_bytes"))
    write_sweep(tmp_path / "a", ran(script(), (1, 2, 3), **lacks, energy_j=3.0))
    write_sweep(tmp_path / "b", ran(script(), (1, 2, 3), peak_allocated_bytes=None))
    assert compare([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    output = capsys.readouterr().out
    assert "Memory" not in output.replace("memory", "Memory")
    assert "Energy" not in output


def test_a_network_is_compared_with_rows_of_the_same_data_on_the_same_device(
    tmp_path: Path,
) -> None:
    """A folder may have its rows on other data; a torch or a card is of the whole device."""
    values = {**measured(10.0, 4 * GIB), **TOLD}
    row = make_record(FP32, **values)
    rows = read_sweep(write_sweep(tmp_path / "one", [row])).rows
    now = replace(row.environment, torch="1.0", model_structure="other")

    def list_named(case: Case) -> set[str]:
        return {name for name, _, _ in list_unlike(rows, case, now, COMPARABLE)}

    assert list_named(FP32) == {"torch", "model_structure"}
    assert list_named(replace(FP32, dataset="another")) == {"torch"}
    assert list_named(replace(FP32, device="cpu" if FP32.device == "cuda" else "cuda")) == set()


@pytest.mark.parametrize(
    ("first", "second", "mixed"),
    [
        ({"variables": "A=1"}, {"variables": "A=2"}, ["variables: A=1 A=2"]),
        ({"variables": "A=1"}, {}, ["variables: A=1 none"]),
        ({"variables": "A=1"}, {"torch": ""}, []),  # it ended before its worker could look
        ({"variables": "A=1", "torch": ""}, {"torch": ""}, []),
        ({"gpu": "B card"}, {}, ["gpu: B card A card"]),
        ({"gpu": "B card"}, {"gpu": ""}, []),
        ({"model_source": "b"}, {}, ["model_source: b a"]),
    ],
)
def test_rows_are_mixed_where_what_is_known_of_them_differs(
    first: dict[str, Any], second: dict[str, Any], mixed: list[str], tmp_path: Path
) -> None:
    rows = [
        make_record(FP32, repeat=n, **{**TOLD, **more}) for n, more in ((1, first), (2, second))
    ]
    read = read_sweep(write_sweep(tmp_path / "sweep", rows)).rows
    assert [f"{name}: {' '.join(values)}" for name, values, _ in list_mixed(read)] == mixed
    assert [*list_mixed(read[:1])] == []


def test_a_period_is_of_what_a_row_knows() -> None:
    def find(case: Case, **known: Any) -> Period:
        unknown = {"train_images": math.nan, "unit": "", "steps_per_epoch": math.nan}
        return find_period(row(case, **{**unknown, **known}))

    assert find(FP32) == Period("images", 0.0, whole=True)
    assert find(FP32, train_images=60) == Period("images", 60.0, whole=True)
    own = script(8)
    assert find(own, unit="items", train_images=60) == Period("items", 60.0, whole=False)
    assert find(own, unit="items", steps_per_epoch=9).whole
    amount = (8, 1, 1, 1, 1.0, None, own.command)
    assert find(own, unit="runs", train_images=1) == Period("runs", 1.0, False, amount)


def test_what_may_change_how_much_a_run_does_is_named_alone() -> None:
    """A precision changes how long it takes, and not how much it does."""
    one, other = (
        row(
            replace(FP32, batch_size=size, precision=name), period=Period("runs", 1, False, (size,))
        )
        for size, name in ((4, "fp32"), (32, "bf16"))
    )
    what = "A run with another batch size may do more or less, so its time is not compared"
    assert refuse_together((one, other)).startswith(f"{what}: call bench.step")
    assert refuse_together((one, one)) == ""


UNFIT: list[tuple[list[Record], str, str]] = [
    # rows, and of the first case why neither its steps nor its items are what they should be
    (counted(script(64), THREE), "", ""),
    ([*counted(script(256), THREE, step_items=1), *counted(script(64), THREE)], "",
     "steps of 1 items: its batch size is 256"),
    ([*counted(script(256), THREE, step_items=0), *counted(script(64), THREE)], "", ""),
    (mix(counted(script(), [0.01]), counted(script(), [0.01], steps=30)),
     "other steps: repeats took 60 and 30", ""),
    # what did not end has no time, and a network of the harness ends where it is known well enough
    (mix(counted(script(), [0.01]), counted(script(), [0.01], steps=30, status=Status.ERROR,
                                            epoch_time_s=None, images_per_s=None)), "", ""),
    (mix(*(ran(Case(until=0.01), [1.0], measured_steps=n, steps_per_epoch=400) for n in (20, 30))),
     "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "steps", "items"), UNFIT)
def test_what_a_script_did_is_held_to_its_repeats_and_its_batch_size(
    rows: list[Record], steps: str, items: str, tmp_path: Path
) -> None:
    runs, _ = read_results(read_sweep(write_sweep(tmp_path / "sweep", rows)))
    assert (runs[0].steps_apart, runs[0].items_apart) == (steps, items)


def test_times_of_other_numbers_of_items_are_restated_for_one_number() -> None:
    """Of one network and its data: of a script in any sweep, of images in one."""

    def timed(time_s: float, number: int, case: Case = FP32, **values: Any) -> Any:
        ends = {"epoch_time_low_s": time_s - 1, "epoch_time_high_s": time_s + 1}
        unit = "images" if case.command is None else "items"
        about = {"epoch_time_s": time_s, "train_images": number, "sweep": "a", **ends}
        return row(case, **{"period": Period(unit, number, whole=True), **about, **values})

    def tell(one: Any) -> tuple[float, float, float, int, bool]:
        ends = (one.epoch_time_low_s, one.epoch_time_s, one.epoch_time_high_s)
        return *ends, one.period.number, one.period.whole

    own = script(8)
    equal = [timed(10, 50), timed(20, 50)]
    images = [timed(10, 1000, replace(FP32, model="b")), timed(20, 4000, replace(FP32, model="b"))]
    apart = [timed(10, 1000, replace(FP32, model="c", dataset=name)) for name in ("x", "y")]
    apart += [timed(10, 2000, replace(FP32, model="c", dataset="x"), sweep="b")]
    scripts = [timed(10, 1000, own), timed(20, 4000, own, sweep="b")]
    none = [
        timed(10, 70, own, timed=False),
        timed(9, 0, own, period=Period("items", 0, whole=True)),
    ]
    runs = [*none, *equal, *images, *apart, *scripts]
    before = [tell(one) for one in runs]
    restate(runs)
    assert [tell(one) for one in (*none, *equal)] == before[:4]
    assert [tell(one) for one in apart] == before[6:9]
    scaled = [(90, 100, 110, 10_000, False), (47.5, 50, 52.5, 10_000, False)]
    assert [tell(one) for one in images] == [tell(one) for one in scripts] == scaled
    assert {one.train_images for one in (*images, *scripts)} == {10_000}
