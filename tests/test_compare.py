"""`bench.compare` from stored records to verdicts, documents and return codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.axis import Value
from bench.case import SAME_QUESTION, Case, spell_value
from bench.compare.__main__ import main
from bench.compare.comparison import compare, explain_unmatched, parse_axis, take_values
from bench.compare.side import read_side
from bench.record import Record, Status
from bench.study.quantities import METRICS
from bench.verdict.ratio import Verdict
from tests.planted.comparisons import (
    BASE,
    BF16,
    CARD,
    CASE,
    COMPARISONS,
    FASTER,
    FP16,
    HERE,
    SLOWER,
    SMALL,
    at,
    measured_on,
    record,
    runs,
    trained,
)
from tests.planted.records import ROOT, write_sweep

Write = Callable[[str, Sequence[Record]], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a sweep into a folder of the working directory, and name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe: tables are as wide as they need

    def write(name: str, records: Sequence[Record]) -> str:
        return str(write_sweep(Path(name), records))

    return write


@pytest.fixture
def machine(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Compare into JSON and read it."""

    def run(*argv: str, code: int = 0) -> Any:
        assert main([*argv, "--format", "json"]) == code
        out, err = capsys.readouterr()
        print(err, file=sys.stderr)
        return json.loads(out)

    return run


def verdicts(document: Any, metric: str = "epoch_time_s") -> list[str]:
    return [finding["verdict"] for finding in document["metrics"][metric]]


def test_evidence_is_adjusted_over_the_cases_of_a_metric(
    write: Write, machine: Callable[..., Any]
) -> None:
    cases = [replace(CASE, batch_size=2**n) for n in range(2, 6)]
    a = write("a", [r for case in cases for r in runs(case, BASE)])
    b = write("b", runs(cases[0], SLOWER) + [r for c in cases[1:] for r in runs(c, BASE)])
    first = machine(a, b)["metrics"]["epoch_time_s"][0]
    assert first["p_adjusted"] == pytest.approx(4 * first["p"])


# -------------------------------------------------------------------- conditions and environments


def test_other_networks_of_one_name_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = replace(CASE, model="mynet:build")
    parts = {"parameters": "parameters", "structure": "layers", "source": "source files"}
    told = {f"model_{part}": what for part, what in parts.items()}
    for column, what in (*told.items(), ("start_fingerprint", "starting weights")):
        a, b = (
            write(name, runs(mine, BASE, environment=replace(HERE, **{column: name})))
            for name in (f"a-{column}", f"b-{column}")
        )
        assert main([a, b]) == 2
        assert capsys.readouterr() == (
            "",
            f"error: A and B trained different networks: mynet:build changed in {what}; "
            "to compare them anyway, add --mix\n",
        )


def test_networks_that_are_unknown_elsewhere_or_mixed_on_purpose_are_compared(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    """Of two values of an axis, networks of one name must still agree."""
    mine = replace(CASE, model="mynet:build")
    a = write("a", runs(mine, BASE, environment=replace(HERE, model_structure="x")))
    other = replace(HERE, model_structure="y")
    b = write("b", runs(mine, BASE, environment=other) + runs(at(mine, lr=0.1), BASE,
              environment=other))  # fmt: skip
    assert verdicts(machine(a, b, "--mix")) == ["same"]
    assert main([a, b, "--axis", "lr", "0.01", "0.1"]) == 2
    assert "lr 0.01 and lr 0.1 trained different networks" in capsys.readouterr().err
    assert main([a, b, "--axis", "lr", "0.01", "0.1", "--mix"]) == 0
    unknown = write("c", runs(mine, BASE))  # of an older schema
    assert main([a, unknown]) == 0
    elsewhere = write("d", runs(CASE, BASE, environment=other))
    assert main([a, elsewhere]) == 0  # no case in both


# ---------------------------------------------------------------------------------- outcomes, sides


def test_outcome_changes_are_findings(write: Write, machine: Callable[..., Any]) -> None:
    changes = {
        ("ok ok ok", "ok ok ok"): "",
        ("ok ok ok", "oom oom oom"): "broken",
        ("ok ok ok", "ok ok error"): "broken",
        ("ok ok ok", "diverged diverged diverged"): "broken",
        ("diverged", "timeout"): "broken",
        ("ok oom", "oom oom"): "broken",
        ("diverged diverged", "ok oom"): "broken",
        ("oom oom oom", "ok ok ok"): "fixed",
        ("oom", "error"): "changed",
        ("oom", "oom"): "",
        ("ok ok", "ok interrupted"): "interrupted",
        ("ok ok", "lost"): "interrupted",
        ("ok ok", "oom interrupted"): "broken",
    }
    a, b = (
        write(
            name,
            [
                record(at(CASE, batch_size=2 + n), i, status=Status(status))
                for n, ends in enumerate(changes)
                for i, status in enumerate(ends[side].split(), 1)
            ],
        )
        for side, name in enumerate("ab")
    )
    document = machine(a, b, "--fail-on", "broken", code=1)
    assert [outcome["change"] for outcome in document["outcomes"]] == list(changes.values())
    assert len(document["failures"]["broken"]) == 7
    assert machine(b, b, "--fail-on", "broken")["failures"] == {"broken": []}


# ------------------------------------------------------------------------- two values of one axis


def test_values_may_be_left_out_where_there_are_only_two(
    write: Write, machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(BF16, FASTER))
    assert verdicts(machine(a, b, "--axis", "precision")) == ["faster"]
    assert verdicts(machine(b, a, "--axis", "precision")) == ["slower"]


DDP = at(CASE, parallel="ddp", world_size=2)

ANY_AXIS: dict[str, tuple[Case, Value]] = {
    "precision": (CASE, "fp16"),
    "loss_scale": (FP16, "dynamic"),
    "batch_size": (CASE, 64),
    "lr": (CASE, 0.1),
    "optimizer": (CASE, "adamw"),
    "lr_warmup": (CASE, "5%"),
    "until": (CASE, 0.01),
    "profile": (CASE, True),
    "compile": (CASE, "default"),
    "workers": (at(CASE, loader="torch"), 4),
    "workload": (CASE, "mine:net"),
    "device": (CASE, "cuda"),
    "world_size": (DDP, 4),
}
"""Of an axis of each kind a case, and another value."""

FOLLOWING: dict[str, dict[str, Value]] = {
    "precision": {"loss_scale": 64.0},
    "optimizer": {"lr": 0.001},
}
"""What a case has besides that value."""


@pytest.mark.parametrize("axis", ANY_AXIS)
def test_any_axis_is_compared_with_all_others_equal(write: Write, axis: str) -> None:
    """An axis without effect is the same; cases that differ elsewhere too stay unmatched."""
    one, after = ANY_AXIS[axis]
    two = at(one, **{axis: after}, **FOLLOWING.get(axis, {}))
    texts = [spell_value(getattr(case, axis)) for case in (one, two)]
    free = axis in ("lr", "optimizer")
    other = at(two, **({"batch_size": 2} if free else {"lr": 0.5}))
    sweep = write("sweep", [r for case in (one, two, other) for r in runs(case, BASE)])
    side = read_side("A", Path(sweep))
    a, b = take_values(side, None, *parse_axis([axis, *texts]))
    compared = compare(a, b, [METRICS["epoch_time_s"]], axis)
    ((finding,),) = compared.metrics.values()
    assert (finding.ratio.value, finding.ratio.judge(0.02)) == (pytest.approx(1), Verdict.SAME)
    assert len(compared.alone(b)) == 1
    before, after = (end.case for end in compared.ends(finding.match))
    assert getattr(before, axis) != getattr(after, axis)
    # as two sweeps that differ in the axis
    lone = replace(b, runs=[run for run in b.runs if run.cell == finding.match.b])
    parted = compare(a, lone, [METRICS["epoch_time_s"]])
    if axis in SAME_QUESTION:  # how a case was measured parts no two folders
        assert len(parted.matched) == 1
        return
    said = f"python -m bench.compare sweep sweep --axis {axis} {' '.join(texts)}"
    assert explain_unmatched(parted).endswith(f"; to compare these values: {said}")


def test_what_was_measured_until_sure_is_compared_with_its_like(
    write: Write, machine: Callable[..., Any]
) -> None:
    """Though each side needed another number of steps, and one has the whole epoch besides."""

    def until_sure(steps: int, times: Sequence[float]) -> list[Record]:
        rows = trained(at(CASE, until=0.01), steps, 390, times)
        return [replace(row, case=at(row.case, steps=None)) for row in rows]

    b = [*until_sure(33, SLOWER), *measured_on(CASE, 1.0, BASE)]
    document = machine(write("a", until_sure(30, BASE)), write("b", b))
    (finding,) = document["metrics"]["epoch_time_s"]
    assert finding["verdict"] == "slower"
    assert [case["until"] for case in document["only_in_b"]] == [None]


def test_a_profile_is_no_other_case(write: Write, machine: Callable[..., Any]) -> None:
    """Folders that differ in --profile alone are compared; one with both, each with its like."""
    a = write("a", [*runs(CASE, BASE), *runs(SMALL, BASE)])
    document = machine(a, write("b", runs(replace(CASE, profile=True), SLOWER)))
    assert verdicts(document) == ["slower"]
    (finding,) = document["metrics"]["epoch_time_s"]
    assert "profile" not in finding["case"]
    assert (finding["case_a"]["profile"], finding["case_b"]["profile"]) == (False, True)
    assert [case["batch_size"] for case in document["only_in_a"]] == [64]
    both = write("c", [*runs(CASE, BASE), *runs(replace(CASE, profile=True), SLOWER)])
    assert verdicts(machine(both, both)) == ["same", "same"]
    assert verdicts(machine(a, both)) == ["same"]


def test_repeats_of_one_seed_are_not_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    """There are three of each, of which `--repeats 3` would add none."""
    cpu = ROOT / "results" / "cpu-epyc-20261120"
    assert main([str(cpu), "--axis", "precision", "fp32", "bf16-amp"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "these repeats have fewer; run both again with --repeats 3, into a new --out and" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a"],
            "a: name a second sweep to compare with, or two values to compare within this "
            "one, such as --axis precision fp32 fp16; what varies: precision (fp32, fp16, "
            "bf16-amp); batch_size (128, 64)",
        ),
        (["one"], "nothing varies within this one"),
        (
            ["a", "--axis", "precision", "fp32", "bf16"],
            "no case with precision bf16 in a; it has fp32, fp16, bf16-amp",
        ),
        (["a", "--axis", "precision", "fp32", "bf61"], "--axis precision 'bf61': did you mean"),
        (
            ["a", "--axis", "precison", "fp32", "fp16"],
            "--axis 'precison': did you mean 'precision'",
        ),
        (["a", "--axis", "precision", "fp32"], "give two values of precision"),
        (["a", "--axis", "precision", "fp32", "fp32"], "give two different values of precision"),
        (["a", "--axis", "precision"], "name two values, as a has fp32, fp16, bf16-amp"),
        (["a", "--axis", "lr"], "--axis lr: needs two values, and a has 0.01"),
        (["one", "one", "--axis", "precision"], "leave --axis out to compare equal cases"),
        (["one", "a", "--axis", "precision"], "name two values, as one has fp32 and a has fp32, "),
        (["--axis", "precision", "fp32", "fp16", "a"], "required: A"),
        (["a", "--equivalence-margin", "2"], "--equivalence-margin '2': a margin is a percentage"),
    ],
)
def test_what_cannot_be_compared_says_what_can(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write("a", [r for case in (CASE, FP16, BF16, SMALL) for r in runs(case, BASE)])
    write("one", runs(CASE, BASE))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


# ------------------------------------------------------------------------------------ return codes


def test_each_gate_is_judged_against_its_own_margin(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    passing = ["slower:10%", "slower:8%", "faster:5%", "broken", "missing", "unjudged"]
    # 8 % slower, but not shown to be more
    gates = [word for gate in ["slower:5%", "slower", *passing] for word in ("--fail-on", gate)]
    assert main([a, b, *gates]) == 1
    fails = [f"fail: {gate}: fp32 · batch size 128: epoch time: speed 0.9259×\n"
             for gate in ("slower:5%", "slower")]  # fmt: skip
    assert capsys.readouterr().err == "".join(fails)
    assert main([a, b, *gates[4:]]) == 0
    capsys.readouterr()
    found = machine(a, b, "--margin", "20%", *gates, code=1)["gates"]
    assert {gate["gate"] for gate in found if not gate["passed"]} == {"slower:5%"}


def test_times_of_two_machines_are_compared_whatever_the_recipe(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    """Another rate and optimizer, and source files of another version of the harness."""
    there = replace(CARD, gpu="NVIDIA H200", model_source="b")
    ours = write("a", runs(CASE, BASE, environment=replace(CARD, model_source="a")))
    other = replace(CASE, lr=3e-4, optimizer="adamw")
    theirs = write("b", runs(other, [x / 2 for x in BASE], environment=there))
    metrics = machine(ours, theirs)["metrics"]
    assert metrics["epoch_time_s"][0]["speed"] == pytest.approx(2)
    assert [row["verdict"] for row in metrics.get("train_loss", [])] in ([], ["no verdict"])
    said = " ".join(capsys.readouterr().out.split())
    assert main([ours, theirs]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "They differ in lr (0.01 and 0.0003), optimizer (sgd and adamw): what is learnt" in said


def test_a_gate_on_sweeps_that_share_nothing_fails(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(replace(CASE, compile="default"), BASE))
    command = "python -m bench.compare a b --axis compile off default"
    why = f"they share no value of compile; to compare these values: {command}"
    gates = [word for gate in ("slower", "broken", "unjudged") for word in ("--fail-on", gate)]
    for result in machine(a, b, *gates, code=1)["gates"]:
        assert (result["passed"], result["judged"], result["why_unjudged"]) == (False, 0, [why])
    assert f"fail: broken: no case could be judged: {why}\n" in capsys.readouterr().err


def test_a_suggested_comparison_is_one_that_can_be_made(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of networks whose source files differ with --mix; of two devices, none by an axis."""

    a = write("a", runs(CASE, BASE, environment=replace(CARD, model_source="a")))

    def explain(name: str, **environment: str) -> str:
        b = replace(CASE, compile="default")
        b = runs(b, BASE, environment=replace(CARD, **environment))
        assert main([a, write(name, b)]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "--mix" not in explain("same", model_source="a")
    command = ["a", "edited", "--axis", "compile", "off", "default", "--mix"]
    assert f"python -m bench.compare {' '.join(command)}" in explain("edited", model_source="b")
    assert main(command) == 0
    capsys.readouterr()
    said = explain("elsewhere", model_source="a", gpu="NVIDIA H200")
    assert "to compare their devices, sweep both with the same --compile" in said
    assert "--axis" not in said
    # but of a GPU and a CPU the device is an axis
    cpu = runs(replace(CASE, device="cpu"), BASE, environment=replace(HERE, cpu="Z"))
    cuda = write("cuda", runs(replace(CASE, device="cuda"), BASE, environment=CARD))
    assert main([cuda, write("cpu", cpu)]) == 0
    assert "--axis device cuda cpu" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-on", "slowr:5%"], "--fail-on 'slowr:5%': did you mean 'slower'?"),
        (["--fail-on", "zzz"], "right values: faster, slower, less, more, lower, higher, broken"),
        (["--fail-on", "slower:"], "a percentage from 0 to 1000 %, such as 2%"),
        (["--fail-on", "slower:5"], "a percentage from 0 to 1000 %, such as 2%"),
        (["--fail-on", "slower:x%"], "a percentage"),
        (["--fail-on", "broken:5%"], "'broken' takes no percentage; leave '5%' out"),
        (["--fail-on", "slower", "--metric", "energy_j"], "add --metric epoch_time_s or"),
        (["--margin=-2%"], "--margin '-2%': a margin is a percentage"),
        (["--margin=nan%"], "a percentage"),
        (["--margin", "2%%"], "a percentage"),
        (["--metric", "epoch_time"], "--metric 'epoch_time': did you mean 'epoch_time_s'?"),
        (["--format", "jsn"], "--format 'jsn': did you mean 'json'?"),
        (["--colour"], "unknown argument '--colour'"),
        (["-o", "absent/file"], "-o absent/file: No such file or directory; choose a place"),
    ],
)
def test_usage_errors_are_one_line(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    a = write("a", runs(CASE, BASE))
    assert main([a, a, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_sides_without_records_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    a, empty = write("a", runs(CASE, BASE)), write("empty", [])
    assert main([a, empty]) == 2
    assert capsys.readouterr().err == (
        "error: empty: no records yet; compare sweeps that have run\n"
    )
    assert main([a, "nowhere"]) == 2
    assert "nowhere: no records there" in capsys.readouterr().err
    assert main([]) == 2
    assert "required: A" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("cases", [1, 60])
def test_a_comparison_fits_the_width(
    cases: int, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 columns, whatever happened; and every case has its row."""
    sizes = [at(CASE, batch_size=2 + i, lr=0.01 * (1 + i % 7)) for i in range(cases)]
    a = write("a", [row for case in sizes for row in runs(case, BASE)])
    lost = [record(at(CASE, batch_size=999), 1, None, status=Status.OOM)]
    b = write("b", [*(row for case in sizes for row in runs(case, SLOWER[:2])), *lost])
    assert main([a, b]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) > cases
    assert max(map(len, lines)) <= 100
    assert "no verdict" in lines[1]
    assert "--repeats 3" in out


@pytest.mark.parametrize("columns", [60])
def test_two_states_of_a_switch_fit_the_terminal(
    columns: int,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of table and line: environments, conditions, losses, equivalence, spoilt times."""
    rows = COMPARISONS["every table"].sweeps["a"]
    sweep = write("a_folder_with_a_long_name_" * 4, rows)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([sweep, "--axis", "channels_last", "--full"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > columns] == []
    assert "equivalent within 2 %" in " ".join(out.split())
    remedy = "Close other programs and run again, with a new --out"
    assert " ".join(out.split()).count(remedy) == 1, "said once"
    assert "above 1 is faster" in " ".join(out.split())
    for verdict in ("ambiguous", "cannot tell"):
        assert verdict in out


HOSTILE = "x|y\x1b[31m\x9b2J`<script>\u202e*_"


def test_hostile_text_is_disarmed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    environment = replace(HERE, torch=HOSTILE)
    a = write("a", runs(CASE, BASE))
    b = write("b", runs(CASE, BASE, environment=environment))
    assert main([a, b, "--full"]) == 0
    text = capsys.readouterr().out
    assert main([a, b, "--format", "md"]) == 0
    markdown = capsys.readouterr().out
    for out in (text, markdown):
        assert all(c.isprintable() or c == "\n" for c in out)
    said, row = [line for line in markdown.splitlines() if "script" in line]
    assert "<" not in said
    assert "<" not in row
    assert row.replace("\\|", "").count("|") == 5
    assert "\\`" in row
    assert main([a, b, "--format", "json"]) == 0
    assert capsys.readouterr().out.isascii()
