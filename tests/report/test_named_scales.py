"""Dynamic loss scales by name, in the report: told apart, and never taken for a number."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.precision import POLICIES
from bench.report.__main__ import main as report
from bench.store.reader import read_records
from bench.store.runs import read_cases
from bench.study.axes import order_values
from bench.sweep.__main__ import main as sweep


@pytest.mark.usefixtures("unreported")
def test_every_rule_has_its_row_and_only_numbers_a_place_on_the_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through a sweep; the figure of loss by static scale has the two static ones."""
    out = str(tmp_path / "out")
    scales = ["64", "128", *POLICIES]
    axes = ["--precision", "fp16-amp", "--batch-size", "64", "--loss-scale", *scales]
    how = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--out", out]
    assert sweep([*axes, *how]) == 0
    stored = [case.loss_scale for case in read_cases(read_records(Path(out)))]
    assert stored == [64.0, 128.0, *POLICIES]
    capsys.readouterr()
    for format in ("text", "html"):
        assert report([out, "--format", format]) == 0
        said = capsys.readouterr().out
        assert all(name in said for name in POLICIES)


def test_rules_come_after_the_numbers() -> None:
    scales = ["dynamic", "128", "dynamic-apex", "", "64"]
    assert order_values("loss_scale", scales) == ["", "64", "128", "dynamic", "dynamic-apex"]
