"""A row's label is what ran: the work of its own step says so, whatever the network made of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_for_tests import Capture

from bench.check.__main__ import main as check
from bench.report.__main__ import main as report
from bench.sweep.__main__ import main as sweep
from bench.work import Kind, Label, Work, share_formats

pytestmark = pytest.mark.usefixtures("unreported")

SHORT = "--dataset synthetic --batch-size 8 --steps 3 --repeats 1 --device cpu"


def run(out: Path, model: str, *precisions: str) -> dict[str, dict[str, str]]:
    """The rows of a sweep by precision, without the sentinel."""
    flags = [*SHORT.split(), "--model", f"models_for_tests:{model}", "--out", str(out)]
    sweep([*flags, "--precision", *precisions])
    with (out / "records.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["sentinel"] == "off"]
    return {row["precision"]: row for row in rows}


def test_a_network_of_float64_has_no_row_of_another_name(tmp_path: Path, capsys: Capture) -> None:
    rows = run(tmp_path, "doubles", "fp32", "bf16-amp", "fp16-amp")
    for precision, row in rows.items():
        assert row["status"] == "invalid", row
        assert row["labelled_flop_share"] == "0"
        assert row["reason"] == (
            f"labelled {precision}, but 100 % of the FLOP of a step ran in float64 "
            "(the weight stem.weight is float64)"
        )
    capsys.readouterr()
    assert report([str(tmp_path)]) == 0
    assert "times as fast" not in capsys.readouterr().out


@pytest.mark.parametrize("model", ["halves", "casts_itself"])
def test_a_network_that_casts_itself_is_what_it_cast_to(tmp_path: Path, model: str) -> None:
    rows = run(tmp_path, model, "fp32", "bf16-amp")
    assert rows["fp32"]["status"] == "invalid"
    assert "ran in bfloat16 (most of it in matrix products: " in rows["fp32"]["reason"]
    assert (rows["bf16-amp"]["status"], rows["bf16-amp"]["labelled_flop_share"]) == ("ok", "1")


def test_a_head_in_fp32_is_no_fault_and_its_share_is_in_the_row(tmp_path: Path) -> None:
    rows = run(tmp_path, "single_head", "fp32", "bf16-amp")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert rows["fp32"]["labelled_flop_share"] == "1"
    head = 3 * 32 * 10 / (2 * 3072 * 32 + 3 * 32 * 10)  # the pixels need no gradient
    assert float(rows["bf16-amp"]["labelled_flop_share"]) == pytest.approx(1 - head, abs=1e-6)


@pytest.mark.parametrize(("model", "passes"), [("doubles", False), ("single_head", True)])
def test_a_check_says_it_too(tmp_path: Path, capsys: Capture, model: str, passes: bool) -> None:
    flags = f"--model models_for_tests:{model} --precision bf16-amp --device cpu"
    others = [name for name in json.loads(NAMES) if name != "arithmetic"]
    code = check([*flags.split(), "--skip", *others, "--out", str(tmp_path / "check")])
    said = capsys.readouterr().out
    assert (code == 0) is passes, said
    assert ("ran in float64 (the weight stem.weight is float64)" in said) is not passes


NAMES = (
    '["batch", "initial-loss", "averaging", "own-pixels", "overfit", "first-steps", "baseline",'
    ' "seed", "gradients", "batchnorm", "activations", "memory", "graphs", "evaluation"]'
)


@given(st.dictionaries(st.sampled_from(["float32", "float16", "float64"]), st.floats(1, 1e15)))
def test_shares_are_of_all_that_is_multiplied(flop: dict[str, float]) -> None:
    work = {Label(Kind.MATMUL, "mm", name): Work(1, f, 1.0) for name, f in flop.items()}
    moved = {Label(Kind.ELEMENTWISE, "relu", "float64"): Work(1, 5.0, 1e18)}
    shares = share_formats({**work, **moved})
    assert sum(shares.values()) == pytest.approx(1 if flop else 0)
    assert [*shares.values()] == sorted(shares.values(), reverse=True)
    assert shares.keys() == flop.keys()
