"""What the cases of a sweep share: proof, FLOP and the work of a step, by all they depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.results.store.reader import read_beside, read_records
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.schema.record import PROVEN, KnownResults, Record, Status, WorkRow, read_missing
from bench.sweep.__main__ import main as sweep
from bench.sweep.folder import SHARED, Known
from tests.planted.records import make_run

CASE = Case("dpn-small", "synthetic", batch_size=32, device="cpu")
LINE = WorkRow("matmul", "mm", "float32", 3, 3200.0, 1064.0, None, None, "", 100.0, 2.0)
TIMED = [
    replace(LINE, time_s=0.5, exclusive_s=0.25, kernels="0.5 mm"),
    WorkRow("other", "", "", 1, None, None, 0.5),
]
MEASURED: dict[str, Any] = {
    "arithmetic": "float32",
    "proof_layer": "a layer",
    "conv_error": 1.25e-7,
    "weight_grad_error": 2.5e-7,
    "matmul_error": 3e-7,
    "missing": "input_grad_error: it is frozen; energy_j: no sensor",
    "proof_notes": "a remark; with a semicolon",
    "flags": "conv=ieee",
    "flop_per_image": 100.0,
    "model_parameters": "0123",
}


def found(case: Case = CASE, **values: Any) -> Record:
    return make_run(case, **{"record_id": "first", **MEASURED, **values})


def ask(known: Known, case: Case = CASE, **environment: Any) -> KnownResults:
    return known.recall(case, found(case, **environment).environment)


def learn(*records: Record, work: list[WorkRow] = TIMED) -> Known:
    known = Known()
    for record in records:
        known.learn(record, work)
    return known


PARTS = {"proof": "first", "flop": "first", "work": "first"}


def test_all_that_was_found_is_known_to_the_next_case() -> None:
    known = ask(learn(found(), found(record_id="second")))
    assert known.sources == PARTS
    columns = (*PROVEN, "proof_notes", "flags", "flop_per_image")
    assert known.values == {name: MEASURED.get(name) for name in columns}
    assert known.missing == {"input_grad_error": "it is frozen"}
    assert known.work == [LINE], "its time is not that of another case"


def test_the_work_of_another_batch_size_is_further_along_the_line() -> None:
    rows = learn(found())
    known = ask(rows, replace(CASE, batch_size=96))
    assert known.sources == PARTS
    assert known.work == [replace(LINE, flop=9600.0, bytes=1192.0)]
    assert ask(rows, replace(CASE, batch_size=2)).work[0].bytes == 1004.0
    assert "work" not in ask(rows, replace(CASE, batch_size=1)).sources
    assert "proof" not in ask(rows, replace(CASE, batch_size=8)).sources, "of eight images"


def test_of_anything_else_it_is_found_anew() -> None:
    known = learn(found())
    names = ("parameters", "structure", "source")
    changes: dict[str, Any] = {f"model_{name}": "4567" for name in names}
    changes |= {"torch": "2.14.0", "gpu": "NVIDIA Other", "gpu_uuid": "GPU-1", "driver": "590.1"}
    changes |= {"cpu": "another", "code": "4567", "variables": "A=1"}
    for name, value in [*changes.items(), ("model_parameters", None)]:
        assert ask(known, **{name: value}) == KnownResults(), name


HALF, EIGHT = (replace(CASE, precision=name) for name in ("fp16", "fp8"))


@pytest.mark.parametrize(
    ("case", "change", "parts"),
    [
        (CASE, {"seed": 3, "lr": 0.5, "epochs": 2, "profile": True}, "proof flop work"),
        (CASE, {"precision": "bf16-amp"}, "flop"),
        (CASE, {"channels_last": True}, "flop"),
        (CASE, {"freeze": "backbone"}, ""),
        (CASE, {"model": "dpn26"}, ""),
        (CASE, {"input": "3x64x64"}, ""),
        (CASE, {"device": "cuda"}, "flop"),  # the device itself is a part of the environment
        (CASE, {"compile": True}, "flop work"),
        (CASE, {"optimizer": "adamw"}, "proof flop"),
        (CASE, {"batch_size": 64, "accumulate": 2}, "proof flop"),
        (CASE, {"loader": "torch"}, "proof flop"),
        (replace(HALF, loss_scale=128.0), {"loss_scale": 64.0}, "proof flop work"),
        (replace(HALF, loss_scale=128.0), {"loss_scale": "dynamic"}, "proof flop"),
        (EIGHT, {}, "proof flop work"),
        (EIGHT, {"batch_size": 64}, "flop"),  # which layers run in fp8 depends on it
    ],
)
def test_each_part_depends_on_some_axes(case: Case, change: dict[str, Any], parts: str) -> None:
    known = learn(found(case))
    assert [*ask(known, replace(case, **change)).sources] == parts.split()


def test_a_row_that_is_not_ok_is_no_source() -> None:
    assert ask(learn(*(found(status=s) for s in Status if s is not Status.OK))) == KnownResults()


def test_neither_is_what_a_row_has_from_another_nor_what_failed_there() -> None:
    known = learn(
        found(shared="proof: a; flop: a; work: a"),
        found(arithmetic=None, record_id="unproven"),
        found(flop_per_image=None, record_id="second"),
    )
    assert ask(known).sources == {"proof": "second", "flop": "unproven", "work": "unproven"}


# -------------------------------------------------------------------------- with real training

SWEEP = "--model tests.models_for_tests:good --dataset synthetic --device cpu --steps 2 --repeats 1"


def run(out: Path, *more: str) -> pd.DataFrame:
    assert (
        sweep(join_flags([*SWEEP.split(), "--precision", "fp32"], more, ["--out", str(out)])) == 0
    )
    return read_records(out)


@pytest.mark.usefixtures("unreported")
def test_a_sweep_proves_and_counts_once(tmp_path: Path) -> None:
    """And the rows say the same as one that found all itself, as a case does that is tried again. A
    sweep that is started again takes what its folder has."""
    run(tmp_path, "--batch-size", "16", "18")
    file = tmp_path / "records.csv"
    *above, last = file.read_text().splitlines()
    file.write_text("\n".join([*above, last.replace(",ok,", ",error,"), ""]))
    rows = run(tmp_path, "--batch-size", "17", "18", "--retry", "error")
    assert rows[["batch_size", "attempt"]].values.tolist() == [[16, 1], [18, 1], [17, 1], [18, 2]]
    first, shared, later, alone = rows["record_id"]
    given = dict.fromkeys(("proof", "flop", "work"), first)
    shared_from = [read_missing(cell, SHARED) for cell in rows["shared"]]
    assert shared_from == [{}, given, given, {}]
    columns = [*PROVEN, "proof_notes", "flags", "flop_per_image", "step_bytes"]
    taken, own = (rows[rows["record_id"] == name][columns] for name in (shared, alone))
    pd.testing.assert_frame_equal(taken.reset_index(drop=True), own.reset_index(drop=True))
    work = read_beside(tmp_path, WorkRow)
    mine, its = work[shared], work[alone]
    assert mine == its
    assert {one.flop_per_item for one in work[later]} == {one.flop_per_item for one in its}
    assert len(mine) > 10
