"""A row's label is what ran: the work of its own step says so, whatever the network made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report.__main__ import main as report
from bench.results.store.reader import read_records
from bench.schema.case import Case
from bench.schema.work import Label, Work, WorkKind
from bench.sweep.__main__ import main as sweep
from bench.training.labels import judge_label
from tests.pytest_for_tests import Capture

TF32, IEEE = {"conv": "tf32", "matmul": "tf32"}, {"conv": "ieee", "matmul": "ieee"}
READ = {
    "float32": Label(WorkKind.MATMUL, "mm", "float32"),
    "bfloat16": Label(WorkKind.MATMUL, "mm", "bfloat16"),
}
HELD: list[tuple[str, dict[str, int], dict[str, str] | None, str]] = [
    # what is labelled, the FLOP by what they read, torch's flags where no probe tells how float32
    # is rounded, and the standing
    ("fp32", {"float32": 1}, None, "proven"),
    ("fp32", {"float32": 1}, IEEE, "proven"),
    ("fp32", {"float32": 1}, TF32, "invalid"),
    ("tf32", {"float32": 1}, None, "proven"),
    ("tf32", {"float32": 1}, TF32, "proven"),
    ("tf32", {"float32": 1}, IEEE, "invalid"),
    ("bf16-amp", {"float32": 49, "bfloat16": 51}, None, "proven"),
    ("bf16-amp", {"float32": 51, "bfloat16": 49}, None, "invalid"),
    ("bf16-amp", {"float32": 51, "bfloat16": 49}, TF32, "invalid"),
    ("fp16", {"bfloat16": 1}, None, "invalid"),
    ("fp16", {}, None, "unproven"),
]


@pytest.mark.parametrize(("label", "flop", "flags", "standing"), HELD)
def test_flags_decide_on_float32_only_where_no_probe_does(
    label: str, flop: dict[str, int], flags: dict[str, str] | None, standing: str
) -> None:
    work = {READ[name]: Work(1, float(number), 1.0) for name, number in flop.items()}
    assert judge_label(work, Case(precision=label, device="cuda"), flags).standing == standing


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_rows_of_networks_that_choose_their_own_arithmetic(tmp_path: Path, capsys: Capture) -> None:
    """Weights of float64, an autocast of the network's own, a head that is fp32 on purpose, and all
    but the head."""
    flags = "--dataset synthetic --batch-size 8 --steps 3 --repeats 1 --device cpu"
    flags += " --precision fp32 bf16-amp --model"
    names = ("doubles", "casts_itself", "single_head", "single_stem")
    models = [f"models_for_tests:{name}" for name in names]
    sweep([*flags.split(), *models, "--out", str(tmp_path)])
    rows = read_records(tmp_path)
    rows["model"] = rows["model"].str.removeprefix("models_for_tests:")
    found = {(row.model, row.precision): row for row in rows.itertuples()}
    for precision in ("fp32", "bf16-amp"):
        row = found["doubles", precision]
        assert (row.status, row.labelled_flop_share) == ("invalid", 0)
        assert row.reason == (
            f"labelled {precision}, but 100 % of the FLOP of a step ran in float64 "
            "(most of it in matrix products: mm)"
        )
    row = found["casts_itself", "fp32"]
    assert row.status == "invalid"
    assert "ran in bfloat16 (most of it in matrix products: " in row.reason
    for case in (("casts_itself", "bf16-amp"), ("single_head", "fp32")):
        assert (found[case].status, found[case].labelled_flop_share) == ("ok", 1)
    head = 3 * 32 * 10 / (2 * 3072 * 32 + 3 * 32 * 10)  # the pixels need no gradient
    row = found["single_head", "bf16-amp"]
    assert (row.status, row.labelled_flop_share) == ("ok", pytest.approx(1 - head, abs=1e-6))
    row = found["single_stem", "bf16-amp"]
    assert (row.status, row.labelled_flop_share) == ("invalid", pytest.approx(head, abs=1e-6))
    capsys.readouterr()
    assert report([str(tmp_path), "--format", "json"]) == 0
    (table,) = (t for t in json.loads(capsys.readouterr().out)["tables"] if t["name"] == "places")
    shown = {row[0]["text"].split()[0]: row[1]["text"] for row in table["rows"]}
    few = "at batch size 8 (lowest of fewer than 3 runs on a CPU, which are not ranked)"
    assert shown.pop("models_for_tests:doubles").partition(" (")[2].startswith("invalid")
    assert shown.pop("models_for_tests:casts_itself") == f"bf16-amp {few}"
    assert shown.pop("models_for_tests:single_stem") == f"fp32 {few}"
