"""The command that measures the harness itself."""

from __future__ import annotations

import re

import pytest

from bench import overhead
from bench.flags import join_flags
from bench.record import BESIDE, Measurement

SMALL = ["--device", "cpu", "--model", "dpn-small", "--fraction", "0.003", "--batch-size", "64"]


@pytest.mark.slow
def test_last_line_is_the_ratio_with_its_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(join_flags(SMALL, ["--pairs", "2"])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("dpn-small, fp32 · batch size 64, synthetic, fraction 0.003, on ")
    pairs = [re.fullmatch(r"pair \d: bare (\S+) s, harness (\S+) s, ratio (\S+)", x) for x in lines]
    ratios = sorted(float(pair[2]) / float(pair[1]) for pair in pairs if pair)
    last = re.fullmatch(
        r"overhead: harness / bare = (\S+) \(median of 2; (\S+) to (\S+)\)", lines[-1]
    )
    assert last
    assert [float(x) for x in last.groups()] == pytest.approx([sum(ratios) / 2, *ratios], abs=0.01)
    beside = re.fullmatch(r"seconds beside training: (\S+) \((.+)\)", lines[-2])
    assert beside
    parts = dict(part.rsplit(" ", 1) for part in beside[2].split(", "))
    assert [*parts] == [*BESIDE.values()]
    assert float(beside[1]) == pytest.approx(sum(map(float, parts.values())), abs=0.05)
    assert float(parts["imports"]) > 0


@pytest.mark.slow
def test_the_turns_alternate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever goes first may find a cooler machine."""
    order: list[str] = []

    def time_bare(*_: object) -> float:
        order.append("bare")
        return 2.0

    def measure_case(*_: object) -> Measurement:
        order.append("harness")
        return Measurement(measured_time_s=2.02, imports_s=len(order), data_s=0.5)

    monkeypatch.setattr(overhead, "time_bare", time_bare)
    monkeypatch.setattr(overhead, "measure_case", measure_case)
    assert overhead.main(join_flags(SMALL, ["--pairs", "3"])) == 0
    assert order == ["bare", "harness", "harness", "bare", "bare", "harness"]
    *_, beside, ratio = capsys.readouterr().out.splitlines()
    assert ratio == "overhead: harness / bare = 1.0100 (median of 3; 1.0100 to 1.0100)"
    # of 2, 3 and 6 s of imports the median
    assert beside.startswith("seconds beside training: 3.50 (process start 0.00, imports 3.00, ")
    assert overhead.main(join_flags(SMALL, ["--pairs", "1"])) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "overhead: harness / bare = 1.0100 (one pair: its spread is unknown; use --pairs 5)"
    )


@pytest.mark.slow
def test_a_workload_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "examples.two_losses:tiny", "--batch-size", "16", "--steps", "2"]
    assert overhead.main(["--device", "cpu", *flags, "--pairs", "1"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("examples.two_losses:tiny, fp32 · batch size 16, own, ")
    assert last.startswith("overhead: harness / bare = ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs 0: give a whole number of at least 1"),
        (["--precision", "fp32", "bf16"], "2 cases are given; give one value for each axis"),
        (["--batch-size", "60000"], "batch size 60000 is above the dataset's 50000 images"),
        (["--pears", "1"], "unknown argument '--pears'; did you mean '--pairs'?"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main(join_flags(SMALL, flags)) == 2
    assert message in capsys.readouterr().err
