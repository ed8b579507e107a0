from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.questions.notices import warn
from bench.record import SCHEMA, Record, Status, Step
from bench.render.cells import is_estimate
from bench.report.document import build
from bench.store.attempts import number_groups
from bench.study import columns, doubts, quantities, summaries
from bench.study.columns import Columns
from bench.study.quantities import QUANTITIES
from bench.study.sweeps import read_sweep, read_sweeps
from bench.text import write_number
from tests.planted.records import GIB, REFERENCE, make_record, measured, write_sweep
from tests.planted.situations.notices import EACH_DOUBT

FP32, FP16 = Case(), Case(precision="fp16", loss_scale=128.0)


def frame_of(folder: Path, *records: Record) -> Any:
    return summaries.read([read_sweep(write_sweep(folder, records))])


def cases_of(folder: Path, *records: Record) -> Any:
    return summaries.summarize(summaries.latest(frame_of(folder, *records)))


def notices_of(frame: Any) -> dict[str, str]:
    return {n.label: n.text for n in warn(frame, summaries.summarize(summaries.latest(frame)))}


LOST = {"status": Status.ERROR, "reason": "boom", "gpu": "A card", "torch": "2.13"}


def ran(case: Case, time_s: float, memory: float = GIB, **values: Any) -> Record:
    common = {"gpu": "A card", "torch": "2.13", "gpu_memory_bytes": 24 * GIB}
    return make_record(case, **{**common, **measured(time_s, memory), **values})


def pick(cases: Any, case: Case) -> Any:
    rows = cases[(cases["precision"] == case.precision) & (cases["batch_size"] == case.batch_size)]
    assert len(rows) == 1
    return rows.iloc[0]


def test_speedup_and_memory_saved_are_against_fp32_at_the_same_batch(tmp_path: Path) -> None:
    wide = Case(precision="fp16", loss_scale=128.0, batch_size=256)
    cases = cases_of(
        tmp_path, ran(FP32, 200, 10 * GIB), ran(FP16, 80, 6 * GIB), ran(wide, 70, 9 * GIB)
    )
    assert pick(cases, FP16)["speedup"] == 2.5
    assert pick(cases, FP16)["memory_saved"] == pytest.approx(0.4)
    assert math.isnan(pick(cases, wide)["speedup"])  # no fp32 at 256
    assert math.isnan(pick(cases, FP32)["speedup"])  # a baseline has none itself


def repeat(times: Sequence[float], case: Case = FP32, **values: Any) -> list[Record]:
    return [ran(case, t, repeat=i, **values) for i, t in enumerate(times, 1)]


def test_repeats_become_a_median_with_their_range(tmp_path: Path) -> None:
    """The MAD of these, which the committed CPU sweep has, is 1.55: 76.6 goes unseen in it."""
    row = pick(cases_of(tmp_path, *repeat((88.8, 76.6, 90.4))), FP32)
    ends = ["epoch_time_s_low", "epoch_time_s", "epoch_time_s_high"]
    assert row[ends].tolist() == [76.6, 88.8, 90.4]
    assert row["images_per_s_high"] == pytest.approx(50_000 / 76.6)
    assert (row["repeats"], row["runs"], row["seeds"], row["spread"]) == (3, 3, 3, "range")
    assert math.isnan(row["coverage"])
    assert row["noisy"]


def test_a_rate_agrees_with_the_time_beside_it(tmp_path: Path) -> None:
    """Of an even number of repeats, the median of rates is not the rate at the median time."""
    energy = {"energy_j": 5000.0, "flop_per_image": 1e9}
    rows = repeat((300, 100), **energy)
    rows += repeat((300, 100), FP16, **{**energy, "measured_images": None})
    cases = cases_of(tmp_path, *rows)
    row = pick(cases, FP32)
    assert row["epoch_time_s"] == 200
    assert row["images_per_s"] == pytest.approx(50_000 / 200)
    assert row["achieved_flops"] == pytest.approx(1e9 * 50_000 / 200)
    assert row["images_per_j"] == pytest.approx(10)
    ends = [row["images_per_s_low"], row["images_per_s_high"]]
    assert ends == pytest.approx([50_000 / 300, 50_000 / 100])
    assert math.isnan(pick(cases, FP16)["images_per_j"])


def test_ends_are_of_the_run_of_repeats_or_from_five_on_an_interval(tmp_path: Path) -> None:
    alone, five, many = FP32, *(replace(FP32, batch_size=size) for size in (5, 13))
    part, parts = (Case(fraction=0.5, batch_size=size) for size in (64, 65))
    within = {"epoch_time_low_s": 9.5, "epoch_time_high_s": 10.8}
    cases = cases_of(
        tmp_path,
        ran(alone, 10),
        *repeat((10, 12, 11, 19, 13), five),
        *repeat(range(10, 23), many),
        ran(part, 10, **within),
        *repeat((10, 10.1), parts, **within),
    )
    assert math.isnan(pick(cases, alone)["epoch_time_s_low"])
    assert pick(cases, alone)[["repeats", "spread"]].tolist() == [1, "none"]
    names = ["epoch_time_s_low", "epoch_time_s_high", "spread", "coverage"]
    assert pick(cases, five)[names].tolist() == [10, 19, "prediction interval", 5 / 6]
    assert pick(cases, many)[names[:2]].tolist() == [11, 21]
    assert pick(cases, many)["coverage"] >= 0.95
    assert pick(cases, part)[names].tolist() == [9.5, 10.8, "within the run", 0.95]
    assert pick(cases, part)["images_per_s_low"] == pytest.approx(50_000 / 10.8)
    assert not pick(cases, part)["noisy"]  # one run does not tell how repeats differ
    # repeats are told by each other, not by what each says of itself
    assert pick(cases, parts)[names[:2]].tolist() == [10, 10.1]


def test_the_share_of_tensors_stands_beside_the_memory_saved(tmp_path: Path) -> None:
    context = 2 * GIB
    rows = [
        ran(case, 10, context + tensors, peak_allocated_bytes=tensors)
        for case, tensors in ((FP32, 4 * GIB), (FP16, 2 * GIB))
    ]
    row = pick(cases_of(tmp_path, *rows), FP16)
    assert row["memory_saved"] == pytest.approx(1 / 3)
    assert row["tensors_saved"] == pytest.approx(1 / 2)


def test_what_counts_of_the_runs_of_a_case(tmp_path: Path) -> None:
    cases = [replace(FP32, batch_size=64 + n) for n in range(6)]
    repaired, sunk, mixed, diverged, marked, lost = cases
    found = cases_of(
        tmp_path,
        # the latest attempt, even if it failed
        make_record(repaired, **LOST), ran(repaired, 10, attempt=2),
        ran(sunk, 10), make_record(sunk, attempt=2, **LOST),
        ran(mixed, 10), make_record(mixed, repeat=2, **LOST),
        ran(diverged, 10), ran(diverged, 9, repeat=2, status=Status.DIVERGED),
        ran(marked, 100), ran(marked, 103, sentinel=True),
        # before it knew its card: the sweep's only one
        make_record(lost, status=Status.KILLED, reason="SIGKILL"),
    )  # fmt: skip
    names = ["status", "epoch_time_s", "repeats", "runs", "diverged"]
    assert {case.batch_size: pick(found, case)[names].tolist() for case in cases} == {
        64: ["ok", 10, 1, 1, False],
        65: ["error", pytest.approx(math.nan, nan_ok=True), 1, 1, False],
        66: ["ok", 10, 1, 2, False],
        67: ["ok", 10, 1, 2, True],
        68: ["ok", 100, 1, 1, False],
        69: ["killed", pytest.approx(math.nan, nan_ok=True), 1, 1, False],
    }
    assert found["batch_size"][doubts.trusted(found)].tolist() == [64, 66, 68]
    assert set(found["machine"]) == {"A card"}


def test_quantities_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {("A card", "float32"): 50e12}
    monkeypatch.setattr(columns, "peak_flops", lambda *pair: known.get(pair))
    record = ran(
        FP32,
        100,
        10 * GIB,
        images_per_s=None,
        measured_images=10_000,
        energy_j=600.0,
        flop_per_image=17e9,
        arithmetic="float32",
        step_time_median_s=0.2,
        step_time_mad_s=0.004,
    )
    row = pick(cases_of(tmp_path, record), FP32)
    assert row["images_per_s"] == 500
    assert row["energy_per_epoch_j"] == 3000  # a fifth of the images was measured
    assert row["images_per_j"] == pytest.approx(10_000 / 600)
    assert row["fragmentation"] == pytest.approx(1 - 0.9 / 0.95, abs=1e-9)
    assert row["achieved_flops"] == pytest.approx(8.5e12)
    assert row["peak_share"] == pytest.approx(0.17)
    assert row["step_noise"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("arithmetic", "peak"),
    [
        ("tfloat32/float32", 494.5e12),  # no kernel took one of the gradients in TF32
        ("float16/unclear", 989.5e12),
        ("unclear/float16", math.nan),  # what the forward pass ran in is not known
        ("", 989.5e12),  # not probed: what the label says
    ],
)
def test_the_peak_is_that_of_the_most_expensive_forward_pass(
    tmp_path: Path, arithmetic: str, peak: float
) -> None:
    record = ran(FP16, 100, gpu="NVIDIA H200", flop_per_image=17e9, arithmetic=arithmetic)
    row = pick(cases_of(tmp_path, record), FP16)
    assert row["peak_share"] == pytest.approx(8.5e12 / peak, nan_ok=True)


def test_what_was_reached_is_held_against_what_the_device_was_measured_to_do(
    tmp_path: Path,
) -> None:
    rates = {"rate_float16": 17e12, "rate_bfloat16": 10e12, "rate_float8": 20e12, "rate_copy": 4e12}
    about: dict[str, Any] = {"flop_per_image": 17e9, "arithmetic": "float16", **rates}
    about |= {"step_bytes": 10**11, "step_time_median_s": 0.1}
    plain, mixed, fused, unknown = (replace(FP16, batch_size=2 + n) for n in range(4))
    fused = replace(fused, compile="default")  # it moves less than was counted
    cases = cases_of(
        tmp_path,
        ran(plain, 100, **about),  # 8.5 TFLOP/s
        ran(mixed, 100, **{**about, "arithmetic": "float8", "fp8_flop_share": 0.5}),
        ran(fused, 100, **about),
        ran(unknown, 100, **{**about, "arithmetic": "tfloat32", "rate_copy": None}),
    )
    shares = {case: pick(cases, case)[["measured_share", "copy_share"]].tolist()
              for case in (plain, mixed, fused, unknown)}  # fmt: skip
    assert shares[plain] == pytest.approx([0.5, 0.25])
    assert shares[mixed][0] == pytest.approx(8.5 / (1 / (0.5 / 20 + 0.5 / 10)))
    assert math.isnan(shares[fused][1])
    assert all(map(math.isnan, shares[unknown]))


def test_nothing_is_held_against_a_rate_above_the_data_sheet(tmp_path: Path) -> None:
    shares = {"rate_float16": "measured_share", "rate_copy": "copy_share"}
    about: dict[str, Any] = {"flop_per_image": 17e9, "arithmetic": "float16", "step_bytes": 10**11}
    about |= {"step_time_median_s": 0.1, "gpu": "NVIDIA H100 80GB HBM3"}
    about |= {"rate_float16": 700e12, "rate_copy": 3e12}
    cases = {name: replace(FP16, batch_size=2 + n) for n, name in enumerate(["", *shares])}
    rows = [
        ran(case, 100, **about | ({name: 5e15} if name else {})) for name, case in cases.items()
    ]
    found = cases_of(tmp_path, *rows)
    for wrong, case in cases.items():
        row = pick(found, case)
        assert row["wrong_rates"] == bool(wrong)
        assert {name: math.isnan(row[share]) for name, share in shares.items()} == {
            name: name == wrong for name in shares
        }


def test_a_schedule_of_which_only_the_beginning_ran_is_doubted(tmp_path: Path) -> None:
    part, whole = (Case(schedule="cosine", fraction=share) for share in (0.1, 1.0))
    cases = cases_of(
        tmp_path, ran(part, 10), ran(whole, 10), ran(replace(part, schedule="constant"), 9)
    )
    told = cases.set_index(["schedule", "fraction"])["unscheduled"].to_dict()
    assert told == {("cosine", 0.1): True, ("cosine", 1.0): False, ("constant", 0.1): False}


def test_memory_is_read_by_one_measure_a_machine(tmp_path: Path) -> None:
    bare = {"peak_device_bytes": None}
    cases = cases_of(tmp_path, ran(FP32, 10, 4 * GIB, **bare), ran(FP16, 10, 4 * GIB, **bare))
    assert set(cases["memory_measure"]) == {"peak_reserved_bytes"}
    mixed = cases_of(tmp_path / "mixed", ran(FP32, 10, 4 * GIB), ran(FP16, 10, 4 * GIB, **bare))
    assert math.isnan(pick(mixed, FP16)["memory_bytes"])  # not the allocator's beside the device's


def test_a_fatal_doubt_is_not_trusted(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, *EACH_DOUBT).set_index("model")
    for (model, row), trusted in zip(cases.iterrows(), doubts.trusted(cases), strict=True):
        found = [name for name in doubts.DOUBTS if row[name]]
        assert len(found) == (not model.startswith(("m:no_", "m:none", "m:little"))), model
        assert trusted == (not any(doubts.DOUBTS[name].fatal for name in found)), model


CARD = sorted((Path(__file__).parents[2] / "results").glob("nvidia-h100-*"))


@pytest.mark.parametrize("folder", CARD, ids=lambda folder: folder.name[-6:])
def test_isolated_spikes_of_a_card_are_no_trend_and_its_drifts_are(folder: Path) -> None:
    """Steps as recorded: half precision at batch size 128 drifts, 43 → 56 ms; others have spikes.

    These rows are of schema 6, whose ends of an epoch are means.
    """
    frame = summaries.read([read_sweep(folder)])
    drifts = frame[frame["trend"]]
    assert not drifts.empty
    assert set(drifts["batch_size"]) == {128}
    assert set(drifts["precision"]) <= {"fp16", "bf16-amp"}
    assert "fp16" in set(drifts["precision"])


def test_spikes_in_rows_of_an_older_schema_are_no_trend(tmp_path: Path) -> None:
    """Their means are replaced by the medians of their steps, where these are beside them."""
    spiked = [0.1] * 38 + [0.2] * 2
    steps = [Step(i, 128, 2.0, 30, time_s) for i, time_s in enumerate(spiked)]
    means = {"step_time_first_s": 0.1, "step_time_last_s": 0.12, "measured_steps": 40}
    folder = write_sweep(tmp_path, [(ran(FP32, 10, **means), steps)])
    file = folder / "records.csv"
    head, row = file.read_text().splitlines()
    for schema, trend in ((SCHEMA, True), (6, False)):
        file.write_text(f"{head}\n{schema},{row.partition(',')[2]}\n")
        assert bool(summaries.read([read_sweep(folder)])["trend"].iloc[0]) is trend
    (folder / "steps.csv").unlink()
    assert summaries.read([read_sweep(folder)])["trend"].iloc[0], "then the means are all there is"


def test_a_trend_is_said_in_numbers(tmp_path: Path) -> None:
    trend = {"step_time_first_s": 0.1, "step_time_last_s": 0.104, "measured_steps": 400}
    clock = {"sm_clock_first_mhz": 2000, "sm_clock_last_mhz": 1900}
    frame = frame_of(tmp_path / "a", ran(FP32, 10, **trend), ran(FP16, 10, **clock))
    (text,) = notices_of(frame).values()
    assert "step times rose by 4.0 %; the SM clock fell by 5.0 %" in text
    (steps, _) = doubts.TRENDS
    for last, said in (
        ((104, 110), "rose by up to 10.0 %"),
        ((110, 84), "changed by up to 16.0 %"),
    ):
        ends = [{**trend, "step_time_last_s": ms / 1e3} for ms in last]
        rows = [ran(case, 10, **end) for case, end in zip((FP32, FP16), ends, strict=True)]
        frame = frame_of(tmp_path / said[:4], *rows)
        assert steps.describe(Columns(frame)) == f"step times {said}"


@pytest.mark.parametrize(
    ("until", "values", "told"),
    [
        (None, {"epoch_time_low_s": 8.0, "epoch_time_high_s": 12.0}, ""),
        (None, {"epoch_time_low_s": 0.6, "epoch_time_high_s": 90.0}, "not known within 100 %"),
        (0.01, {"epoch_time_error": 0.009}, ""),
        (0.01, {"epoch_time_error": 0.12}, "known within 12 %"),
        (0.05, {"epoch_time_error": 55.8}, "not known within 100 %"),
    ],
)
def test_an_epoch_that_is_hardly_known_has_no_interval(
    until: float | None, values: dict[str, float], told: str, tmp_path: Path
) -> None:
    steps = {"measured_steps": 40, "steps_per_epoch": 400}
    row = ran(replace(FP32, fraction=0.1, until=until), 10, **values, **steps)
    frame = frame_of(tmp_path, row)
    cases = summaries.summarize(summaries.latest(frame))
    assert cases["unknown"].tolist() == [bool(told)]
    said = [text for text in notices_of(frame).values() if "vary too much" in text]
    assert len(said) == bool(told)
    assert all(told in text and "a larger --fraction" in text for text in said)
    shown = cases["epoch_time_s_high"].notna().tolist()
    assert shown == ["epoch_time_high_s" in values and not told]


def test_what_was_interrupted_measured_no_part_of_an_epoch(tmp_path: Path) -> None:
    stopped = make_record(Case(fraction=0.01), status=Status.INTERRUPTED, gpu="A card")
    sweep = read_sweep(write_sweep(tmp_path, [ran(Case(fraction=0.02), 10), stopped]))
    made = build([sweep])
    (note,) = (note for note in made.notes if "of an epoch was measured" in note)
    assert "Only 2 % of an epoch" in note


def test_a_few_steps_of_an_epoch_are_a_part_of_it(tmp_path: Path) -> None:
    """As far as they are: --steps above the epoch measures all of it, and a failed run nothing."""
    few, all_of_it = Case(steps=2), Case(steps=500, batch_size=256)
    counts = {"measured_steps": 2, "steps_per_epoch": 391}
    frame = cases_of(
        tmp_path,
        ran(few, 10, repeat=1, **counts),
        make_record(few, repeat=2, status=Status.OOM, gpu="A card", torch="2.13"),
        ran(all_of_it, 10, measured_steps=196, steps_per_epoch=196),
    )
    row, whole = pick(frame, few), pick(frame, all_of_it)
    assert row["part"] == pytest.approx(2 / 391)
    assert (row["runs"], row["repeats"]) == (2, 1)
    assert row["extrapolated"]
    assert row["few"]
    assert is_estimate(QUANTITIES["epoch_time_s"], row)
    assert whole["part"] == 1
    assert not whole["extrapolated"]
    assert not is_estimate(QUANTITIES["epoch_time_s"], whole)


FEW = {"measured_steps": 20, "steps_per_epoch": 400}
RISING = {"step_time_first_s": 0.1, "step_time_last_s": 0.2}
SHORT = {"energy_j": 9.0, "measured_time_s": 1.0}


@pytest.mark.parametrize(
    ("cases", "values", "label", "fix"),
    [
        ([Case(fraction=0.1)], RISING, "Trend", "Use a larger --fraction, or"),
        ([Case(steps=20)], {**FEW, **RISING}, "Trend", "Use a larger --steps, or"),
        ([Case(epochs=2)], RISING, "Trend", "Use a larger --epochs, or"),
        ([Case(fraction=0.02), Case(steps=20)], {**FEW, **RISING}, "Trend",
         "Use a larger --fraction or --steps, or"),
        ([Case(fraction=0.1)], {}, "Extrapolated", "Use --fraction 1 to"),
        ([Case(steps=20)], FEW, "Extrapolated", "Use --steps none to"),
        ([Case(fraction=0.5, steps=20)], FEW, "Extrapolated",
         "Use --fraction 1 and --steps none to"),
        ([Case(steps=20)], {**FEW, **SHORT}, "Short energy", "Use a larger --steps."),
        ([Case(epochs=2)], SHORT, "Short energy", "Use --repeats 5 or more, which"),
    ],
)  # fmt: skip
def test_advice_names_the_flag_that_was_used(
    tmp_path: Path, cases: list[Case], values: dict[str, Any], label: str, fix: str
) -> None:
    notices = notices_of(frame_of(tmp_path, *(ran(case, 10, **values) for case in cases)))
    assert fix in notices[label]


def test_mixed_environments_are_said(tmp_path: Path) -> None:
    other = ran(FP16, 10, torch="2.12", variables="CUDA_LAUNCH_BLOCKING=1")
    notices = notices_of(frame_of(tmp_path, ran(FP32, 10), other))
    assert list(notices) == ["Mixed environments"]
    for said in ("torch 2.13 or 2.12", "variables none or CUDA_LAUNCH_BLOCKING=1"):
        assert said in notices["Mixed environments"]


def test_two_models_or_datasets_are_no_mixed_environment(tmp_path: Path) -> None:
    hashes = ("model_parameters", "model_structure", "model_source")
    small = ran(Case(model="dpn-small"), 10, **dict.fromkeys(hashes, "aaa"))
    large = ran(Case(model="dpn92"), 90, **dict.fromkeys(hashes, "bbb"))
    lost = make_record(Case(model="dpn92", batch_size=256), status=Status.ERROR, reason="boom")
    frame = frame_of(tmp_path / "a", small, large, lost)
    assert frame["model_source"].tolist() == ["aaa", "bbb", "bbb"]
    assert "Mixed environments" not in notices_of(frame)
    edited = ran(Case(model="dpn-small", batch_size=256), 9, **dict.fromkeys(hashes, "ccc"))
    (text,) = notices_of(frame_of(tmp_path / "edited", small, large, edited)).values()
    assert "model source aaa or ccc" in text


def test_published_figures_stand_beside_what_they_match(tmp_path: Path) -> None:
    published = summaries.summarize(summaries.latest(summaries.read([read_sweep(REFERENCE)])))
    wide = Case(precision="fp16", loss_scale=128.0, batch_size=512)
    other_scale = Case(precision="fp16", loss_scale=32.0, batch_size=128)
    strange = Case(model="dpn26", batch_size=256)
    synthetic = Case(dataset="synthetic", precision="fp16", loss_scale=128.0, batch_size=640)
    rows = [ran(c, 10) for c in (FP32, wide, other_scale, strange, synthetic)]
    cases = summaries.set_beside(cases_of(tmp_path, *rows), published)
    assert pick(cases, FP32)["published_epoch_time_s"] == 212.328
    assert pick(cases, wide)["published_epoch_time_s"] == 140.061
    for case in (other_scale, strange, synthetic):
        assert pick(cases, case)["published_status"] == ""
    beside_itself = summaries.set_beside(published, published)
    assert (beside_itself["published_status"] == "").all()


def test_sweeps_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_sweep(tmp_path / lab / "run", [ran(FP32, 10)]) for lab in ("a", "b")]
    assert [sweep.name for sweep in read_sweeps([*paths, paths[0]])] == ["a/run", "b/run"]


@given(st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 2), st.booleans()), max_size=30))
def test_group_numbers_agree_exactly_where_rows_do(rows: list[tuple[str, int, bool]]) -> None:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    numbers = number_groups(frame, ["a", "b", "c"]).tolist()
    for i, first in enumerate(rows):
        for j, second in enumerate(rows):
            assert (numbers[i] == numbers[j]) == (first == second)


@given(st.floats(1e-3, 1e12))
def test_written_numbers_keep_four_digits(value: float) -> None:
    text = write_number(value)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-3)


def test_every_quantity_says_what_it_is() -> None:
    for quantity in quantities.QUANTITIES.values():
        assert quantity.help
        assert quantity.better in ("lower", "higher")
        assert quantity.write(1.5 * quantity.scale)
