"""What is recommended, against what, and how sure that is; tests/golden has whole screens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.answers.elsewhere import find_fastest
from bench.answers.recommendation import name_places
from bench.answers.render.table import quantity_cell
from bench.report.document import Report, build
from bench.report.figures import list_panels
from bench.report.files import write_json
from bench.results.study.sweeps import read_sweep
from bench.schema.case import Case
from bench.schema.record import Record, Status
from bench.schema.rules import settle
from tests.planted.records import FP16, FP32, GIB, at, make_record, ran, write_sweep
from tests.planted.results import read_report, tell
from tests.planted.scripts import counted, script

BF16 = Case(precision="bf16")
AMP = Case(precision="bf16-amp", batch_size=256)
SHARED = {"neighbours_computing": 1}
SLOW, FAST = ran(FP32, (200, 201, 199), 10), ran(FP16, (100, 100.5, 99.5), 6)
SMALL = [*ran(AMP, (57, 57.1, 56.9), 8), *ran(at(64, FP32)[0], (89, 89.1, 88.9), 5)]
LARGE = at(256, FP32)[0]
OOM = {"status": Status.OOM, "gpu": "A card", "torch": "2.13"}


def once(case: Case, time_s: float = 50.0, gib: float = 4, **values: Any) -> list[Record]:
    return ran(case, (time_s,), gib, **values)


def cut(case: Case, status: Status) -> Record:
    """A run without a result."""
    return make_record(case, **{**OOM, "status": status})


def search_limits() -> Iterator[Record]:
    """Batch sizes under two limits and none."""
    for limit, fits in ((None, 512), ("9GiB", 256), ("21GiB", 512)):
        for size in (256, 512, 1024):
            case = Case(batch_size=size, memory_limit=limit)
            yield from once(case) if size <= fits else [make_record(case, **OOM)]


ANSWERS: dict[str, tuple[Sequence[Record], list[str]]] = {
    "none can be trusted": (
        once(BF16, 50, 6, **SHARED),
        ["Every case has a warning, so none is recommended. Lowest time: bf16 at batch size 128, "
         "50.00 s: shared."],
    ),
    "far apart beside other programs": (
        [*ran(BF16, (50, 60, 55), **SHARED), *ran(FP32, (240, 330, 400), **SHARED),
         *ran(FP16, (110, 130, 150), **SHARED)],
        ["none is recommended. Lowest time: bf16 at batch size 128, 55.00 s: shared, noisy. Even "
         "so, by any two of their runs, fp32 at batch size 128 took at least 4.0 times as long."],
    ),
    "far apart in one run": (
        [*once(BF16, 50, **SHARED), *once(FP32, 350, **SHARED)],
        ["Lowest time: bf16 at batch size 128, 50.00 s: shared."],
    ),
    "the slowest alone can be trusted": (
        [*once(BF16, 50, **SHARED), *once(FP32, 60, **SHARED), *ran(FP16, (160, 161, 159))],
        ["Half of the cases or more have a warning, so none is recommended. Lowest time: bf16 at "
         "batch size 128, 50.00 s: shared."],
    ),
    "the slower of two can be trusted": (
        [*once(BF16, 50, **SHARED), *ran(FP16, (160, 161, 159))],
        ["Half of the cases or more have a warning, so none is recommended. Lowest time: bf16 at "
         "batch size 128, 50.00 s: shared."],
    ),
    "the one that can be trusted is as fast": (
        [*once(BF16, 50, **SHARED), *once(FP32, 60, **SHARED), *ran(FP16, (52, 52.1, 51.9))],
        ["in fp16 at batch size 128: 52.00 s an epoch"],
    ),
    "what fits is told of each way to save memory": (
        [*once(AMP), make_record(replace(AMP, batch_size=512), **OOM),
         *once(replace(AMP, batch_size=512, recompute="blocks")),
         make_record(replace(AMP, batch_size=1024, recompute="blocks"), **OOM)],
        ["Largest batch size that fits: bf16-amp 256 (512 does not), bf16-amp with recompute "
         "blocks 512 (1024 does not)."],
    ),
    "no time": ([cut(FP32, Status.ERROR)], ["No case was timed."]),
    "single runs on a busy CPU": (
        [*once(replace(FP32, device="cpu"), 200, other_cores=1.0),
         *once(replace(BF16, device="cpu"), 66, other_cores=0.0)],
        ["Lowest time: bf16 at batch size 128, 66.00 s an epoch. Single runs on a CPU, whose times "
         "other programs change, are not ranked; use --repeats 3."],
    ),
    "a loss scale that is not the default": (
        [*SLOW, *FAST, *ran(replace(FP16, loss_scale=64.0), (90, 91, 89), 6)],
        ["in fp16 at batch size 128 (loss scale 64): 90.00 s an epoch, against 200.0 s in fp32",
         "Slower is fp16 · loss scale 128 (100.0 s)."],
    ),
    "a warned baseline": (
        [*SMALL, *ran(LARGE, (96, 96.1, 95.9), 10, **SHARED)],
        ["against 96.00 s in fp32 (1.68 times as fast; 95 %: 1.68 to 1.69; a time with a warning)"],
    ),
    # nobody would train with fp32 at 256, which takes longer than at 64
    "a baseline that is slow at the batch size": (
        [*SMALL, *ran(LARGE, (148, 148.1, 147.9), 10),
         *ran(replace(AMP, batch_size=64), (62.9, 63, 62.8))],
        ["against 89.00 s in fp32 at batch size 64 (1.56 times as fast; 95 %: 1.55 to 1.57), with "
         "8.00 instead of 5.00 GiB.",
         "At equal batch sizes it is 1.41 (64) and 2.60 (256) times as fast as fp32, so the gain "
         "differs by batch size."],
    ),
    "a baseline that is slow at the only equal batch size": (
        [*SMALL, *ran(LARGE, (148, 148.1, 147.9), 10)],
        ["in fp32 at batch size 64 (1.56 times as fast; 95 %: 1.55 to 1.57), with 8.00 instead of "
         "5.00 GiB. At an equal batch size it is 2.60 (256) times as fast as fp32."],
    ),
    "a baseline that is slow at the batch size, in runs that other programs disturbed": (
        [*SMALL, *ran(LARGE, (148, 148.1, 147.9), 10, **SHARED)],
        ["in fp32 at batch size 64 (1.56 times as fast"],
    ),
    # what is faster elsewhere, but with a warning, takes no baseline's place
    "a baseline that is fast elsewhere by chance": (
        [*ran(AMP, (57, 57.1, 56.9), 8), *ran(at(64, FP32)[0], (89, 89.1, 88.9), **SHARED),
         *ran(LARGE, (148, 148.1, 147.9), 10)],
        ["against 148.0 s in fp32 (2.60 times as fast; 95 %: 2.59 to 2.61)"],
    ),
    "a baseline that is a little faster at another batch size": (
        [*SMALL, *ran(LARGE, (96, 96.1, 95.9), 10)],
        ["against 96.00 s in fp32 (1.68 times as fast; 95 %: 1.68 to 1.69), with 8.00 instead of "
         "10.0 GiB."],
    ),
    "a baseline whose batch sizes may be as fast": (
        [*ran(AMP, (57, 57.1, 56.9), 8), *ran(at(64, FP32)[0], (89, 70, 100), 5),
         *ran(LARGE, (118, 90, 130), 10)],
        ["against 118.0 s in fp32 (2.07 times as fast"],
    ),
    "a baseline at another batch size": (
        SMALL, ["89.00 s in fp32 at batch size 64 (1.56 times as fast; 95 %: 1.55 to 1.57)"],
    ),
    # medians, by which nothing changed
    "one of three runs took ten times as long": (
        [*ran(FP32, (100, 101, 1000)), *ran(FP16, (100, 100.5, 99))],
        ["100.0 s an epoch, against 101.0 s in fp32 (1.01 times as fast; 95 %: 0.022 to 46.20, not "
         "certain).", "Medians of 3 runs, which spread by up to ±445.5 %."],
    ),
    "a difference that may be chance": (
        [*ran(FP16, (100, 104, 96)), *ran(BF16, (106, 114, 98))],
        ["Perhaps slower is bf16 (106.0 s)."],
    ),
    # three runs tell how much a time varies; one or two do not
    "noisy, in three runs": (
        [*ran(BF16, (50, 50.4, 49.6), warmup_steady=False), *ran(FP32, (100, 101, 99))],
        ["50.00 s an epoch, against 100.0 s in fp32 (2.00 times as fast; 95 %: 1.95 to 2.05).",
         "Medians of 3 runs, which spread by up to ±1.0 %."],
    ),
    "noisy, in two runs": (
        [*ran(BF16, (50, 50.4), warmup_steady=False), *ran(FP32, (100, 101, 99))],
        ["Half of the cases or more have a warning, so none is recommended. Lowest time: bf16 at "
         "batch size 128, 50.20 s: noisy."],
    ),
    "an unknown time, in three runs": (
        [*ran(replace(BF16, steps=2), (50, 51, 49), measured_steps=2, steps_per_epoch=391),
         *ran(FP32, (90,))],
        ["Half of the cases or more have a warning, so none is recommended."],
    ),
    "the case that measured most": (
        [*once(FP32, 100), *once(replace(FP32, fraction=0.1), 70)],
        ["Only one setting was timed, fp32 at batch size 128: 100.0 s an epoch."],
    ),
    "rows that may be anything": (
        [row for size in (64, 128) for row in once(at(size, FP16)[0], size, executor="x")],
        ["none is recommended. Lowest time: fp16 at batch size 64, 64.00 s: not measured by this"],
    ),
    # what was cut off at its largest batch is not known to fit; what cannot run has no batch size
    "cut off": (
        [*once(at(64, FP32)[0]), *once(at(256, FP32)[0]), make_record(at(512, FP32)[0], **OOM),
         *once(at(128, BF16)[0], 60), cut(at(256, BF16)[0], Status.INTERRUPTED),
         cut(replace(BF16, precision="fp8"), Status.UNSUPPORTED)],
        ["Largest batch size that fits: fp32 256 (512 does not), bf16 at least 128."],
    ),
    "limits": (
        [*search_limits()],
        ["Largest batch size that fits: fp32 under 9GiB 256 (512 does not), fp32 under 21GiB 512 "
         "(1024 does not), fp32 512 (1024 does not)."],
    ),
    # they stand beside the plain batch, and do not make 1000 fit
    "micro-batches": (
        [*once(LARGE, 50, 10), *once(replace(LARGE, accumulate=4), 55, 4),
         *once(Case(batch_size=1000, accumulate=3), 52, 14),
         make_record(Case(batch_size=1000), **OOM)],
        ["Largest batch size that fits: fp32 256 (1000 does not)."],
    ),
}  # fmt: skip
"""Rows, and what is said of them."""


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_recommended(name: str, tmp_path: Path) -> None:
    rows, expected = ANSWERS[name]
    (answer,) = read_report(tmp_path, rows).answers
    answered = " ".join(answer.sentences)
    assert [text for text in expected if text not in answered] == [], answered


@pytest.mark.parametrize(
    ("settings", "axis", "values", "heading"),
    [
        ({"model": "gpt-tiny"}, "length", (64, 16), "gpt-tiny on synthetic, length "),
        ({"dataset": "synthetic"}, "input", ("3x64x64", "3x32x32"), "dpn92 on synthetic, input "),
    ],
)
def test_data_of_another_shape_are_not_chosen_for_their_time(
    settings: dict[str, Any], axis: str, values: Sequence[Any], heading: str, tmp_path: Path
) -> None:
    large, small = (settle(settings | {axis: value}) for value in values)
    rows = [*ran(large, (200, 201, 199)), *ran(replace(large, precision="bf16"), (100, 101, 99))]
    rows += [*ran(small, (20, 20.1, 19.9)), *ran(replace(small, precision="bf16"), (30, 31, 29))]
    found = {one.about: one.sentences[0] for one in read_report(tmp_path, rows).answers}
    assert found.keys() == {f"A card, {heading}{value}" for value in values}
    large_one, small_one = (found[f"A card, {heading}{value}"] for value in values)
    assert " on A card in bf16 at batch size 128: 100.0 s" in large_one
    assert " on A card in fp32 at batch size 128: 20.00 s" in small_one


def test_an_epoch_elsewhere_is_of_images_of_one_shape_and_a_card_without_a_limit() -> None:
    def find(**axes: Any) -> Any:
        case = Case(model="dpn-small", dataset="synthetic", device="cpu", **axes)
        like: Any = SimpleNamespace(**vars(case), gpu="", epoch_time_s=1e9)
        return find_fastest(like, ["profile"], [])

    assert find() is not None, "results/ has such rows"
    assert find(input="3x64x64") is None
    assert find(memory_limit="2GiB") is find(power_limit=300) is None


def test_what_is_learnt_is_held_against_fp32_at_an_equal_batch_size(tmp_path: Path) -> None:
    amp, small = once(AMP, 57, test_accuracy=0.4), once(at(64, FP32)[0], 89, test_accuracy=0.5)
    large = once(LARGE, 148, test_accuracy=0.41)
    (other,) = read_report(tmp_path / "1", [*amp, *small]).answers
    assert "After the epoch" not in " ".join(other.sentences)
    (both,) = read_report(tmp_path / "2", [*amp, *small, *large]).answers
    text = " ".join(both.sentences)
    assert "in fp32 at batch size 64" in text
    assert "its test accuracy is 40.0 %, and fp32's 41.0 %" in text


def test_repeats_of_one_command_lack_a_seed(tmp_path: Path) -> None:
    rows = [*counted(script(), [0.02, 0.0201, 0.0199], train_loss=2.0)]
    rows += counted(script(precision="bf16-amp"), [0.01, 0.0101, 0.0099], train_loss=2.0)
    rows = [replace(row, run_seed=row.repeat) for row in rows]
    (answer,) = read_report(tmp_path, rows).answers
    text = " ".join(answer.sentences)
    assert "Over 3 runs its training loss" in text
    assert "how far others differ ({seed} in --command tells them to the script)." in text


def test_two_runs_each_are_no_single_runs(tmp_path: Path) -> None:
    cases = [replace(one, device="cpu") for one in (FP32, BF16)]
    rows = [row for case in cases for row in ran(case, (50.0, 51.0))]
    (answer,) = read_report(tmp_path, rows).answers
    assert "Fewer than 3 runs on a CPU, whose times " in " ".join(answer.sentences)


def test_where_all_fits_the_largest_that_ran_is_nobody_s_largest(tmp_path: Path) -> None:
    rows = [*once(FP32), *once(BF16), *once(at(256, FP32)[0]), *once(at(256, BF16)[0])]
    (answer,) = read_report(tmp_path, rows).answers
    assert "Largest" not in " ".join(answer.sentences)


def test_a_command_without_a_batch_size_that_lacked_memory_has_no_largest(tmp_path: Path) -> None:
    one, two = (settle({"command": "python t.py {x}", "vary": f"x={x}"}) for x in "ab")
    (answer,) = read_report(tmp_path, [*ran(one, (1, 1, 1)), make_record(two, **OOM)]).answers
    assert "Largest" not in " ".join(answer.sentences)


def test_a_command_with_a_batch_size_and_no_precision_is_trained_at_that(tmp_path: Path) -> None:
    rows = [row for size in (4, 8) for row in counted(script(size, precision="own"), [0.01] * 3)]
    (answer,) = read_report(tmp_path, rows).answers
    assert "Run train.py on A card at batch size 8: " in answer.sentences[0]


def test_a_faster_value_of_the_user_s_own_is_not_recommended_where_its_loss_is_unknown(
    tmp_path: Path,
) -> None:
    """It may train something else, such as fewer layers."""
    cases = [script(vary=f"rate={rate}") for rate in "12"]
    times = ([0.01, 0.0101, 0.0099], [0.005, 0.0051, 0.0049])

    def read(name: str, aim: str = "", **values: Any) -> str:
        rows = [one for pair in zip(cases, times, strict=True) for one in counted(*pair, **values)]
        sweep = read_sweep(write_sweep(tmp_path / name, rows))
        (answer,) = build([sweep], tmp_path, aim=aim).answers
        return " ".join(answer.sentences)

    unknown = read("unknown", train_loss=None)
    assert "Lowest time: fp32 at batch size 64 (rate 2), ≈0.7812 s" in unknown
    assert "Whether another rate trains as well is not known, so none is recommended" in unknown
    for recommended in (read("loss", train_loss=2.0), read("time", "time", train_loss=None)):
        assert "Run train.py on A card in fp32 at batch size 64 (rate 2): " in recommended
        assert "training loss" not in recommended


def test_a_faster_value_of_the_user_s_own_that_learns_less_is_told_with_both_losses(
    tmp_path: Path,
) -> None:
    slow, fast = (script(vary=f"rate={rate}") for rate in "12")
    rows = [*counted(slow, [0.01, 0.0101, 0.0099], train_loss=1.4)]
    rows += counted(fast, [0.005, 0.0051, 0.0049], train_loss=8.5)
    (answer,) = read_report(tmp_path, rows).answers
    assert (
        "The training loss is 8.500 in fp32 at batch size 64 (rate 2), and 1.400 in fp32 at batch "
        "size 64 (rate 1): look at what each learns before you choose by time." in answer.sentences
    )


def test_a_script_s_losses_stand_in_its_table_with_the_steps_that_they_are_of(
    tmp_path: Path,
) -> None:
    """A script that tells of no epoch has no part of one, which would say less than a whole."""
    rows = [*counted(script(64), [0.01], train_loss=2.5)]
    rows += counted(script(128), [0.01], steps=110, train_loss=2.25)
    report = read_report(tmp_path, rows)
    assert tell(report, "overview", "batch_size train_loss") == ["64 | 2.500", "128 | 2.250"]
    assert "Each loss is the mean over as many steps as were measured, 50 to 100." in str(
        [table.notes for table in report.tables if table.name == "overview"]
    )
    loss = {"train_loss": 2.5}
    part = [row for size in (64, 128) for row in counted(script(size), [0.01], epoch=500, **loss)]
    report = read_report(tmp_path / "told", part)
    assert tell(report, "overview", "batch_size train_loss") == ["64", "128"]


def test_no_time_chooses_a_learning_rate(tmp_path: Path) -> None:
    low, high = (replace(FP16, lr=lr) for lr in (0.001, 0.1))
    rows = ran(low, (50, 50.1, 49.9), train_loss=2.3) + ran(high, (50.3, 50, 50.1), train_loss=1.3)
    (answer,) = read_report(tmp_path, rows).answers
    assert answer.sentences[:2] == (
        "Train dpn92 on A card in fp16 at batch size 128 (lr 0.001) or fp16 at batch size 128 "
        "(lr 0.1), whose times cannot be told apart: 50.00 s and 50.10 s an epoch.",
        "The training loss is 2.300 in fp16 at batch size 128 (lr 0.001), and 1.300 in fp16 at "
        "batch size 128 (lr 0.1): look at what each learns before you choose by time.",
    )


def test_all_that_the_first_sentence_names_together_is_marked(tmp_path: Path) -> None:
    """In tables, in JSON and in figures, and nothing else is."""
    times = {(0.001, FP16): (50, 50.1, 49.9), (0.1, FP16): (50.3, 50, 50.1)}
    times |= {(lr, FP32): (100, 101, 99) for lr in (0.001, 0.1)}
    rows = [row for (lr, case), of in times.items() for row in ran(replace(case, lr=lr), of)]
    report = read_report(tmp_path, rows)
    assert "(lr 0.001) or fp16 at batch size 128 (lr 0.1), whose" in report.answers[0].sentences[0]
    tables = json.loads(write_json(report))["tables"]
    marked = {
        table["name"]: [c["value"] for row in table["rows"] for c in row if c.get("recommended")]
        for table in tables
    }
    both = [50.0, 50.1]
    assert {name: values for name, values in marked.items() if values} == {
        "times": both, "costs": [4 * GIB, 4 * GIB], "overview": both
    }  # fmt: skip
    (panel, *_) = list_panels(report)
    assert panel.chosen == {row.cell for row in report.results if row.precision == "fp16"}


def test_of_many_networks_each_has_all_that_is_as_good(tmp_path: Path) -> None:
    names = ("dpn92", "dpn26", "dpn-small", "nets:build")
    cases = [Case(model=name, lr=lr) for name in names for lr in (0.001, 0.1)]
    report = read_report(tmp_path, [row for case in cases for row in ran(case, (50, 50.1, 49.9))])
    (answer,) = report.answers
    assert answer.sentences[0].startswith(
        "Train in fp32 at batch size 128 (lr 0.001) or fp32 at batch size 128 (lr 0.1): dpn"
    )
    assert len(tell(report, "places", "setting")) == len(cases)


@pytest.mark.parametrize(
    ("times", "opening"),
    [
        (
            [0.01, 0.0101, 0.0099],
            "in fp32 at batch size 64 (rate 2) or fp32 at batch size 64 (rate 1), whose times "
            "cannot be told apart: ≈1.547 s and ≈1.562 s for 10,000 items, the first against "
            "≈3.125 s in tf32",
        ),
        ([0.012, 0.0121, 0.0119], "in fp32 at batch size 64 (rate 2): ≈1.547 s for 10,000 items"),
    ],
)
def test_of_the_user_s_own_values_that_take_as_long_none_is_preferred(
    times: list[float], opening: str, tmp_path: Path
) -> None:
    rows = [*counted(script(vary="rate=1"), times, train_loss=2.0)]
    rows += counted(script(vary="rate=2"), [0.0099, 0.0100, 0.0098], train_loss=2.0)
    rows += counted(script(vary="rate=2", precision="tf32"), [0.02, 0.0201, 0.0199], train_loss=2.0)
    rows += counted(script(vary="rate=3"), [0.02, 0.0201, 0.0199], train_loss=2.0)
    (answer,) = read_report(tmp_path, rows).answers
    text = " ".join(answer.sentences)
    assert f"Run train.py on A card {opening}" in text, text
    assert text.count("rate 2") == 1, text  # no sentence says it again


ALIKE: dict[str, tuple[str, Sequence[Record], str]] = {
    "a quarter more time for a thousandth of the memory": (
        "memory", [*once(BF16, 100, 4.000), *once(FP16, 125, 3.996)], "in bf16 at batch size 128",
    ),
    "another loss scale for 2 % of the energy": (
        "energy",
        [*once(FP16, 100, energy_j=102.0),
         *once(replace(FP16, loss_scale=256.0), 99.8, energy_j=100.0)],
        "in fp16 at batch size 128 (loss scale 128)",
    ),
    "twice the memory for a thousandth of the energy": (
        "energy",
        [*once(FP16, 100, 4, energy_j=100.2), *once(at(256, FP16)[0], 96, 8, energy_j=100.0)],
        "in fp16 at batch size 128",
    ),
    "a hundredth of the time by a recipe that rounds the weights": (
        "", [*once(FP16, 100), *once(Case(precision="fp16-amp", loss_scale="dynamic"), 101)],
        "in fp16-amp at batch size 128",
    ),
}  # fmt: skip
"""What is recommended for an aim where another setting has hardly less of it."""


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_no_difference_costs_nothing_else(name: str, tmp_path: Path) -> None:
    aim, rows, expected = ALIKE[name]
    (answer,) = replace(read_report(tmp_path, rows), aim=aim).answers
    assert expected in answer.sentences[0]


@pytest.mark.parametrize(
    ("gibs", "varies", "expected"),
    [
        ((4.0, 4.1, 4.15), False, ", with 4.10 instead of 5.00 GiB."),
        ((4.0, 4.1, 4.9), True, ", with 4.10 instead of 5.00 GiB."),
        ((4.0, 4.1, 5.1), True, "."),
    ],
)
def test_memory_that_does_not_repeat_has_a_range_and_is_no_gain_within_it(
    gibs: Sequence[float], varies: bool, expected: str, tmp_path: Path
) -> None:
    ours = [ran(FP16, (50,), gib)[0] for gib in gibs]
    ours = [replace(row, repeat=i) for i, row in enumerate(ours, 1)]
    report = read_report(tmp_path, [*ours, *ran(FP32, (100, 100, 100), 5)])
    (answer,) = report.answers
    assert answer.sentences[0].endswith(expected)
    case = next(row for row in report.results if row.precision == "fp16")
    assert case.memory_varies == varies
    assert case.trusted
    shown = f" ({gibs[0]:.2f}–{gibs[-1]:.2f})" if varies else ""
    assert quantity_cell("memory_bytes", case, spread=True).text == f"4.10{shown}"


def test_of_what_was_measured_twice_all_are_counted(tmp_path: Path) -> None:
    """Those with a warning too: what was left out is what differed."""
    part = replace(FP32, fraction=0.2)
    rows = [*once(FP32, 100), *once(part, 100.3), *once(FP16, 50)]
    rows += [*once(replace(FP16, fraction=0.2), 54, neighbours_computing=1)]
    (answer,) = read_report(tmp_path, rows).answers
    assert (
        "One run each; 1 of 2 settings measured more than once agreed within 0.3 %; "
        "fp16 at batch size 128 differed by 8.0 %."
    ) in " ".join(answer.sentences)


def test_a_precision_that_is_much_slower_is_named_though_its_time_has_a_warning(
    tmp_path: Path,
) -> None:
    """On a CPU without bfloat16."""
    cpu = {"neighbours_computing": 1}
    fast = ran(replace(FP32, device="cpu"), (100, 101, 99))
    slow = ran(Case(precision="bf16-amp", device="cpu"), (370, 371, 369), **cpu)
    mine = ran(replace(FP32, batch_size=256, device="cpu"), (150, 151, 149))
    (answer,) = read_report(tmp_path, [*fast, *slow, *mine]).answers
    assert (
        "Slower is bf16-amp (370.0 s, 3.7 times as long, a time with a warning)."
        in answer.sentences
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("matmul=ieee conv=tf32", "(torch's default for convolutions; 2.00"),
        ("matmul=tf32 conv=tf32", "(torch's default for convolutions, and in matrix products; 2"),
    ],
)
def test_tf32_is_torch_s_default_only_where_that_is_what_the_rows_set(
    flags: str, expected: str, tmp_path: Path
) -> None:
    rows = [*once(Case(precision="tf32"), 100, flags=flags), *once(FP16, 50)]
    (answer,) = read_report(tmp_path, rows).answers
    assert expected in answer.sentences[0]


def test_settings_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    rows = [*ran(at(64, FP16)[0], (63.0, 60.1, 66.5), 3), *ran(FP16, (60.0, 57.0, 63.0), 4)]
    rows += ran(at(256, FP16)[0], (57.0, 54.0, 60.0), 6)
    (answer,) = read_report(tmp_path, rows).answers
    text = " ".join(answer.sentences)
    assert "in fp16 at batch size 256: 57.00 s an epoch" in text
    assert "Batch sizes 64, 128 and 256 cannot be told apart within 10 %: 256 is " in text
    assert "recommended for its lowest time; 64 needs least memory" in text
    assert "Throughput only: at another batch size tune the learning rate again, and" in text


def test_what_another_folder_found_on_the_card_is_cited(tmp_path: Path) -> None:
    """results/reference has this card, compiled, in a bare loop."""
    card = {"gpu": "NVIDIA H200"}
    rows = [*once(FP32, 40.0, **card), *once(FP16, 12.0, **card), *once(BF16, 6.0, **card)]
    (answer,) = read_report(tmp_path, rows[:2]).answers
    assert answer.sentences[-1] == (
        "Not tried: --compile, --cudnn-benchmark and --channels-last, which may change the order. "
        "With compile default, cudnn benchmark on, fp16 at batch size 512 took 6.790 s on such a "
        "card (h200-lab, in a bare loop)."
    )
    (answer,) = read_report(tmp_path / "faster", rows).answers
    assert answer.sentences[-1].endswith("which may change the order.")


@pytest.mark.parametrize(
    ("aim", "expected"),
    [
        ("", "in bf16 at batch size 128"),
        ("memory", "in fp16 at batch size 64"),
        ("energy", "in fp32 at batch size 128"),  # that of the fastest was measured for a second
    ],
)
def test_what_is_recommended_for_an_aim(aim: str, expected: str, tmp_path: Path) -> None:
    short = {"energy_j": 10.0, "measured_time_s": 1.0}
    rows = [*once(FP32, 200, 10, energy_j=800.0), *once(BF16, 50, 6, **short)]
    rows += once(at(64, FP16)[0], 100, 3, energy_j=900.0)
    (answer,) = replace(read_report(tmp_path, rows), aim=aim).answers
    assert expected in " ".join(answer.sentences)


def test_without_a_value_of_the_aim_nothing_is_recommended(tmp_path: Path) -> None:
    (answer,) = replace(read_report(tmp_path, once(FP32)), aim="energy").answers
    assert answer.sentences[0] == "No case that can be trusted has a value for --for energy."


CARD_1 = {"gpu_uuid": "GPU-1", "gpu": "A card"}


def read_two(folder: Path, **second: Any) -> Report:
    """A report on two sweeps of a card, of which each measured a setting that the other has, and
    one that it has not."""
    size = at(256, FP32)[0]
    rows = {
        "card-1": [*once(FP32, 100, **CARD_1), *once(FP16, 40, **CARD_1)],
        "card-2": [*once(FP32, 100.3, **{**CARD_1, **second}),
                   *once(size, 98, **{**CARD_1, **second})],
    }  # fmt: skip
    return build(
        [read_sweep(write_sweep(folder / name, records)) for name, records in rows.items()]
    )


def test_one_card_measured_in_two_folders_has_one_answer(tmp_path: Path) -> None:
    """An H100's two folders, of nine and of thirteen cases, had two."""
    report = read_two(tmp_path, variables="NCCL_VERSION=2.28.3-1")  # which changes no result
    (answer,) = report.answers
    text = " ".join(answer.sentences)
    assert "Train dpn92 on A card in fp16 at batch size 128: 40.00 s an epoch" in text
    assert "One run each; 1 setting measured more than once agreed within 0.3 %." in text
    assert len(report.settings) == 3
    assert tell(report, "overview", "precision sweep epoch_time_s") == [
        "fp32 | …1 | 100.0", "fp32 | …2 | 100.3", "fp32 | …2 | 98.00", "fp16 | …1 | 40.00",
    ]  # fmt: skip


def test_a_change_is_told_of_one_card_though_each_folder_has_one_side(tmp_path: Path) -> None:
    """Of two folders that have both the pairs of each are told, and none across them."""
    report = read_two(tmp_path)
    assert tell(report, "effects", "change speedup pairs") == [
        "precision: fp32 → fp16 | 2.50× | 1",
        "batch size: 128 → 256 | 1.02× | 1",
    ]
    both = {
        name: [*once(FP32, 100, **CARD_1), *once(FP16, time, **CARD_1)]
        for name, time in (("card-3", 50), ("card-4", 25))
    }
    folders = [read_sweep(write_sweep(tmp_path / name, rows)) for name, rows in both.items()]
    assert tell(build(folders), "effects", "change speedup pairs") == [
        "precision: fp32 → fp16 | 2.00, 4.00× | 2"
    ]
    sides = (("card-5", once(FP32, 100, **CARD_1)), ("card-6", once(FP16, 25, **CARD_1)))
    folders = [read_sweep(write_sweep(tmp_path / name, rows)) for name, rows in sides]
    assert tell(build(folders), "effects", "change speedup pairs") == [
        "precision: fp32 → fp16 | 4.00× | 1"
    ]


@pytest.mark.parametrize(
    "second", [{"gpu_uuid": "GPU-2"}, {"gpu_uuid": ""}, {"torch": "2.14"}, {"variables": "A=1"}]
)
def test_rows_of_another_card_or_version_are_another_place(
    second: dict[str, str], tmp_path: Path
) -> None:
    abouts = [answer.about for answer in read_two(tmp_path, **second).answers]
    assert abouts == ["A card · card-1", "A card · card-2"]


MIXED: dict[str, tuple[dict[str, str], dict[str, str], list[str]]] = {
    "torch, by which the rest differs": (
        {"torch": "2.12", "cudnn": "9.1"}, {"torch": "2.13", "cudnn": "9.2"},
        ["torch 2.12", "torch 2.13"],
    ),
    "the harness": ({"code": "aa"}, {"code": "bb"}, ["code aa", "code bb"]),
    "variables": ({"variables": "A=1"}, {}, ["variables A=1", "variables none"]),
    "an edited network": (
        {"model_source": "aa"}, {"model_source": "bb"}, ["model source aa", "model source bb"]
    ),
    "an edited file to start from": (
        {"start_fingerprint": "aa"}, {"start_fingerprint": "bb"},
        ["start fingerprint aa", "start fingerprint bb"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_nothing_is_chosen_across_what_ran_rows_of_one_folder(name: str, tmp_path: Path) -> None:
    """fp16, measured with an old torch alone, was the choice against fp32 of the new one. A row
    that ended before it read its own is of the next row's."""
    old, new, ran_on = MIXED[name]
    lost = cut(AMP, Status.ERROR)
    lost.environment.torch = ""
    rows = [*ran(FP32, (100, 101, 99), **old), *ran(FP16, (40, 41, 39), **old), lost]
    rows += [*ran(FP32, (90, 91, 89), **new), *ran(BF16, (45, 46, 44), **new)]
    report = read_report(tmp_path, rows)
    first, second = report.answers
    assert [first.about, second.about] == [f"A card · {one}" for one in ran_on]
    assert "in fp16 at batch size 128: 40.00 s an epoch, against 100.0 s" in first.sentences[0]
    assert "in bf16 at batch size 128: 45.00 s an epoch, against 90.00 s" in second.sentences[0]
    assert "fp16" not in " ".join(second.sentences)
    assert {row.ran_on for row in report.results if row.status is Status.ERROR} == {second.about}


def test_one_network_and_one_card_are_counted_once() -> None:
    """Four folders of a network were "each of 4 networks", and two of a card two machines."""

    def place(machine: str, network: str, uuid: str) -> Any:
        case = SimpleNamespace(best=SimpleNamespace(gpu_uuid=uuid))
        return SimpleNamespace(machine=machine, name=network, tried=[case])

    places = [place("H100 · a", "dpn92", "1"), place("H100 · b", "dpn92", "1")]
    assert name_places(places) == "what to train dpn92 with"
    places += [place("H200", "dpn92", "2"), place("CPU", "dpn92", "")]
    assert name_places(places) == "what to train dpn92 with, on each of 3 machines"
    places += [place("H200", "vgg", "2")]
    assert name_places(places) == "what to train each of 2 networks with, on each of 3 machines"


def test_of_many_networks_each_setting_is_told_once_with_what_it_is_for(tmp_path: Path) -> None:
    """Single runs on a CPU are not ranked, in no table either."""
    cards = ("A card", "B card", "C card")
    rows = [
        row
        for card in cards
        for case, time_s in ((FP32, 200), (FP16, 100))
        for row in ran(case, (time_s, time_s * 1.001, time_s * 0.999), gpu=card)
    ]
    for case, time_s in ((FP32, 900.0), (FP16, 800.0)):
        rows += once(replace(case, device="cpu"), time_s, cpu="A CPU")
    report = read_report(tmp_path, rows)
    (answer,) = report.answers
    named = ", ".join(f"dpn92 on cifar10 · {card}" for card in cards)
    assert answer.sentences[:2] == (
        f"Train in fp16 at batch size {FP16.batch_size}: {named}.",
        "For 1 of 4 none is recommended.",
    )
    cells = tell(report, "places", "place setting")
    assert "not ranked" in cells[-1]
    assert "not ranked" not in "".join(cells[:-1])
