"""`bench.compare` from stored records to verdicts, documents and return codes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.case import AXES, SAME_QUESTION, Case
from bench.compare.__main__ import main
from bench.compare.gates import OUTCOME_FINDINGS
from bench.errors import UsageError
from bench.flags import parse_percent
from bench.record import COLUMNS, Measurement, Record, Status
from bench.study.metrics import METRICS
from tests.planted.comparisons import (
    APEX,
    BASE,
    BF16,
    CASE,
    FASTER,
    FP16,
    HERE,
    SLOWER,
    SMALL,
    at,
    losses,
    measured_on,
    record,
    runs,
)
from tests.planted.records import write_sweep

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
        return json.loads(capsys.readouterr().out)

    return run


def verdicts(document: Any, metric: str = "epoch_time_s") -> list[str]:
    return [finding["verdict"] for finding in document["metrics"][metric]]


# ------------------------------------------------------------------------------------- the answer


def test_each_case_gets_its_ratio_and_verdict(write: Write, machine: Callable[..., Any]) -> None:
    a = write("a", runs(CASE, BASE) + runs(SMALL, BASE) + runs(FP16, BASE))
    b = write(
        "b",
        runs(FP16, [0.9 * t for t in BASE]) + runs(CASE, SLOWER) + runs(SMALL, reversed(BASE)),
    )
    document = machine(a, b)
    assert verdicts(document) == ["slower", "same", "faster"]
    slower = document["metrics"]["epoch_time_s"][0]
    assert slower["case"]["batch_size"] == 128
    assert (slower["a"], slower["b"]) == (list(BASE), pytest.approx(SLOWER))
    assert (slower["n_a"], slower["n_b"]) == (5, 5)
    assert slower["speed"] == pytest.approx(1 / 1.08)
    assert slower["low"] < 1 / 1.08 < slower["high"]
    assert 0 < slower["p"] < slower["p_adjusted"] < 0.001
    assert slower["remarks"] == ["synthetic", "fake"]


def test_chosen_metrics_are_compared_alone(write: Write, machine: Callable[..., Any]) -> None:
    rows = [
        record(CASE, i, measurement=Measurement(epoch_time_s=i, test_loss=2.0)) for i in (1, 2, 3)
    ]
    a = write("a", rows)
    assert list(machine(a, a, "--metric", "test_loss", "train_loss")["metrics"]) == [
        "test_loss",
        "train_loss",
    ]


def test_metrics_are_columns_of_a_record() -> None:
    assert {metric.column for metric in METRICS.values()} <= set(COLUMNS)
    assert all(name == metric.name for name, metric in METRICS.items())


def test_the_margin_decides(write: Write, machine: Callable[..., Any]) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert verdicts(machine(a, b, "--margin", "20%")) == ["same"]
    assert verdicts(machine(a, b, "--margin", "8%")) == ["ambiguous"]
    assert verdicts(machine(a, b, "--margin", "0.5%")) == ["slower"]


def test_evidence_is_adjusted_over_the_cases_of_a_metric(
    write: Write, machine: Callable[..., Any]
) -> None:
    cases = [replace(CASE, batch_size=2**n) for n in range(2, 6)]
    a = write("a", [r for case in cases for r in runs(case, BASE)])
    b = write("b", runs(cases[0], SLOWER) + [r for c in cases[1:] for r in runs(c, BASE)])
    first = machine(a, b)["metrics"]["epoch_time_s"][0]
    assert first["p_adjusted"] == pytest.approx(4 * first["p"])


# ------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize(
    ("a", "b", "judged", "lack"),
    [
        ([0, 0, 0], [0, 0, 0], "no verdict", "one seed: differs by 2.4 %, no verdict"),
        ([0], [0], "no verdict", "one seed: differs by 2.4 %, no verdict"),
        ([0, 1, 2], [0, 0, 0], "no verdict", "one seed in B: differs by 2.4 %, no verdict"),
        ([0, 0, 1], [0, 1, 1], "no verdict", "two seeds: needs three"),
        ([0, 0, 1], [0, 1, 2], "no verdict", "two seeds in A: needs three"),
        ([0, 1, 2], [0, 1, 2], "higher", ""),
        ([0, 1, 2], [5, 6, 7], "higher", ""),
    ],
)
def test_a_loss_is_judged_over_seeds(
    write: Write,
    machine: Callable[..., Any],
    a: list[int],
    b: list[int],
    judged: str,
    lack: str,
) -> None:
    one = write("a", losses([2.05 + 1e-4 * seed for seed in a], a))
    two = write("b", losses([2.10 + 1e-4 * seed for seed in b], b))
    code = int(judged == "higher")
    document = machine(one, two, "--fail-on", "higher:1%", code=code or 1)
    (finding,) = document["metrics"]["train_loss"]
    assert (finding["verdict"], finding["lack"]) == (judged, lack)
    assert (finding["seeds_a"], finding["seeds_b"]) == (a, b)
    assert bool(document["failures"]["higher:1%"]) == (judged == "higher")
    # bytes do not depend on the seed
    assert document["metrics"]["peak_device_bytes"][0]["exact"] == (len(a) > 2)


# -------------------------------------------------------------------- conditions and environments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("model_parameters", "parameters"),
        ("model_structure", "layers"),
        ("model_source", "source files"),
        ("start_fingerprint", "starting weights"),
    ],
)
def test_other_networks_of_one_name_are_refused(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    machine: Callable[..., Any],
    column: str,
    what: str,
) -> None:
    mine = replace(CASE, model="mynet:build")
    a = write("a", runs(mine, BASE, environment=replace(HERE, **{column: "before"})))
    b = write("b", runs(mine, BASE, environment=replace(HERE, **{column: "after"})))
    assert main([a, b]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: A and B trained different networks: mynet:build changed in {what}; "
        "to compare them anyway, add --mix\n"
    )
    assert verdicts(machine(a, b, "--mix")) == ["same"]
    unknown = write("c", runs(mine, BASE))  # of an older schema
    assert main([a, unknown]) == 0
    elsewhere = write("d", runs(CASE, BASE, environment=replace(HERE, **{column: "after"})))
    assert main([a, elsewhere]) == 0  # no case in both


# ---------------------------------------------------------------------------------- outcomes, sides


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (["ok"] * 3, ["ok"] * 3, ""),
        (["ok"] * 3, ["oom"] * 3, "broken"),
        (["ok"] * 3, ["ok", "ok", "error"], "broken"),
        (["ok"] * 3, ["diverged"] * 3, "broken"),
        (["diverged"], ["timeout"], "broken"),
        (["ok", "oom"], ["oom", "oom"], "broken"),
        (["oom"] * 3, ["ok"] * 3, "fixed"),
        (["oom"], ["error"], "changed"),
        (["oom"], ["oom"], ""),
    ],
)
def test_outcome_changes_are_findings(
    write: Write, machine: Callable[..., Any], before: list[str], after: list[str], change: str
) -> None:
    def sweep(statuses: list[str]) -> list[Record]:
        return [record(CASE, i, status=Status(s)) for i, s in enumerate(statuses, 1)]

    a, b = write("a", sweep(before)), write("b", sweep(after))
    document = machine(a, b, "--fail-on", "broken", code=int(change == "broken"))
    assert [outcome["change"] for outcome in document["outcomes"]] == [change]
    assert bool(document["failures"]["broken"]) == (change == "broken")


# ------------------------------------------------------------------------- two values of one axis


def test_values_may_be_left_out_where_there_are_only_two(
    write: Write, machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(BF16, FASTER))
    assert verdicts(machine(a, b, "--axis", "precision")) == ["faster"]
    assert verdicts(machine(b, a, "--axis", "precision")) == ["slower"]
    both = write("c", [*runs(CASE, BASE), *runs(BF16, FASTER)])
    assert verdicts(machine(both, "--axis", "precision")) == ["faster"]


DDP = at(CASE, parallel="ddp", world_size=2)
SYNCED = [at(DDP, device="cuda", sync_bn=on) for on in (False, True)]
LOADED = at(CASE, loader="torch", workers=4)
PINNED = [at(LOADED, device="cuda", pin_memory=pinned) for pinned in (False, True)]

ANY_AXIS: dict[str, tuple[Case, Case, str, str]] = {
    "model": (at(CASE, model="dpn-small"), CASE, "dpn-small", "dpn92"),
    "dataset": (CASE, at(CASE, dataset="cifar10"), "synthetic", "cifar10"),
    "precision": (CASE, at(FP16, loss_scale=64.0, skip_overflow=True), "fp32", "fp16"),
    "loss_scale": (FP16, at(FP16, loss_scale="dynamic"), "128", "dynamic"),
    "skip_overflow": (FP16, at(FP16, skip_overflow=True), "off", "on"),
    "opt_level": (at(APEX, opt_level="O1"), at(APEX, opt_level="O2"), "O1", "O2"),
    "fp8_recipe": (
        at(CASE, precision="fp8"),
        at(CASE, precision="fp8", fp8_recipe="rowwise"),
        "tensorwise",
        "rowwise",
    ),
    "batch_size": (CASE, SMALL, "128", "64"),
    "accumulate": (CASE, at(CASE, accumulate=4), "1", "4"),
    "memory_limit": (CASE, at(CASE, memory_limit="21GiB"), "none", "21GiB"),
    "lr": (CASE, at(CASE, lr=0.1), "0.01", "0.1"),
    "optimizer": (CASE, at(CASE, optimizer="adamw", lr=0.001), "sgd", "adamw"),
    "lr_scaling": (CASE, at(CASE, lr_scaling="linear", base_batch=64), "none", "linear"),
    "base_batch": (
        at(CASE, lr_scaling="sqrt"),
        at(CASE, lr_scaling="sqrt", base_batch=64),
        "128",
        "64",
    ),
    "lr_warmup": (CASE, at(CASE, lr_warmup="5%"), "0", "5%"),
    "schedule": (CASE, at(CASE, schedule="cosine"), "constant", "cosine"),
    "epochs": (CASE, at(CASE, epochs=2), "1", "2"),
    "steps": (CASE, at(CASE, steps=20), "none", "20"),
    "fraction": (CASE, at(CASE, fraction=0.1), "1", "0.1"),
    "until": (CASE, at(CASE, until=0.01), "none", "0.01"),
    "evaluate": (CASE, at(CASE, evaluate=True), "off", "on"),
    "checkpoint": (CASE, at(CASE, checkpoint=True), "off", "on"),
    "profile": (CASE, at(CASE, profile=True), "off", "on"),
    "cudnn_benchmark": (CASE, at(CASE, cudnn_benchmark=True), "off", "on"),
    "compile": (CASE, at(CASE, compile="default"), "off", "default"),
    "cuda_graphs": (CASE, at(CASE, cuda_graphs=True), "off", "on"),
    "channels_last": (CASE, at(CASE, channels_last=True), "off", "on"),
    "freeze": (CASE, at(CASE, freeze="bn"), "none", "bn"),
    "start": (CASE, at(CASE, start="w.pt"), "none", "w.pt"),
    "loader": (CASE, at(CASE, loader="torch", workers=2), "device", "torch"),
    "workers": (at(CASE, loader="torch"), at(CASE, loader="torch", workers=4), "0", "4"),
    "pin_memory": (PINNED[0], PINNED[1], "off", "on"),
    "persistent_workers": (LOADED, at(LOADED, persistent_workers=True), "off", "on"),
    "prefetch": (LOADED, at(LOADED, prefetch=4), "2", "4"),
    "input": (CASE, at(CASE, input="3x64x64"), "none", "3x64x64"),
    "classes": (CASE, at(CASE, classes=100), "none", "100"),
    "seed": (CASE, at(CASE, seed=7), "0", "7"),
    "workload": (CASE, at(CASE, workload="mine:net"), "images", "mine:net"),
    "device": (CASE, at(CASE, device="cuda"), "cpu", "cuda"),
    "parallel": (CASE, at(CASE, parallel="ddp", world_size=2), "none", "ddp"),
    "world_size": (DDP, at(DDP, world_size=4), "2", "4"),
    "grad_compression": (DDP, at(DDP, grad_compression="fp16"), "none", "fp16"),
    "bucket_mb": (DDP, at(DDP, bucket_mb=50), "25", "50"),
    "sync_bn": (SYNCED[0], SYNCED[1], "off", "on"),
}


@pytest.mark.parametrize("axis", ANY_AXIS)
def test_any_axis_is_compared_with_all_others_equal(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    """An axis without effect is the same; cases that differ elsewhere too stay unmatched."""
    assert set(ANY_AXIS) == set(AXES)
    one, two, *texts = ANY_AXIS[axis]
    free = axis in ("lr", "optimizer")
    other = at(two, **({"batch_size": 2} if free else {"lr": 0.5}))
    sweep = write("sweep", [r for case in (one, two, other) for r in runs(case, BASE)])
    document = machine(sweep, "--axis", axis, *texts)
    (finding,) = document["metrics"]["epoch_time_s"]
    assert (finding["verdict"], finding["speed"]) == ("same", pytest.approx(1))
    assert len(document["only_in_b"]) == 1
    assert finding["case_a"][axis] != finding["case_b"][axis]
    a, b = write("a", runs(one, BASE)), write("b", runs(two, BASE))
    if axis in SAME_QUESTION:  # how a case was measured parts no two folders
        assert verdicts(machine(a, b)) == ["same"]
        return
    # two folders that differ in the axis: the message names the command, and the command answers
    assert main([a, b, "--full"]) == 0
    said = f"to compare these values: python -m bench.compare a b --axis {axis} "
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("no case in both")]
    assert said + " ".join(texts) in line
    command = shlex.split(line.partition("bench.compare ")[2])
    assert verdicts(machine(*command)) == ["same"]


def test_a_profile_is_no_other_case(write: Write, machine: Callable[..., Any]) -> None:
    """Two folders that differ in --profile alone are compared, and so are runs beside them."""
    a = write("a", [*runs(CASE, BASE), *runs(SMALL, BASE)])
    b = write("b", runs(replace(CASE, profile=True), SLOWER))
    document = machine(a, b)
    assert verdicts(document) == ["slower"]
    (finding,) = document["metrics"]["epoch_time_s"]
    assert "profile" not in finding["case"]
    assert (finding["case_a"]["profile"], finding["case_b"]["profile"]) == (False, True)
    assert [case["batch_size"] for case in document["only_in_a"]] == [64]
    # where both ran both, each is compared with its like
    both = write("c", [*runs(CASE, BASE), *runs(replace(CASE, profile=True), SLOWER)])
    assert verdicts(machine(both, both)) == ["same", "same"]
    assert verdicts(machine(a, both)) == ["same"]


def test_two_values_of_an_axis_are_refused_of_other_networks(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two sweeps, networks of one name must still agree."""
    mine = at(CASE, model="mynet:small")
    a = write("a", runs(mine, BASE, environment=replace(HERE, model_structure="x")))
    b = write("b", runs(at(mine, lr=0.1), BASE, environment=replace(HERE, model_structure="y")))
    assert main([a, b, "--axis", "lr"]) == 2
    assert "lr 0.01 and lr 0.1 trained different networks" in capsys.readouterr().err
    assert main([a, b, "--axis", "lr", "--mix"]) == 0


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


def test_the_second_sweep_may_follow_a_flag(write: Write, machine: Callable[..., Any]) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert verdicts(machine(a, "--margin", "20%", b)) == ["same"]


# ------------------------------------------------------------------------------------ equivalence


# ------------------------------------------------------------------------------------ return codes


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("slower:5%", 1),
        ("slower", 1),
        ("slower:10%", 0),
        ("slower:8%", 0),  # 8 % slower, but not shown to be more
        ("faster:5%", 0),
        ("broken", 0),
        ("missing", 0),
        ("unjudged", 0),
    ],
)
def test_fail_on_a_verdict(
    write: Write, capsys: pytest.CaptureFixture[str], gate: str, code: int
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert main([a, b, "--fail-on", gate]) == code
    fails = f"fail: {gate}: fp32 · batch size 128: epoch time: speed 0.9259×\n"
    assert capsys.readouterr().err == fails * code


def test_fail_on_is_judged_against_its_own_margin(write: Write) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert main([a, b, "--margin", "20%", "--fail-on", "slower:5%"]) == 1
    assert main([a, b, "--margin", "20%", "--fail-on", "slower"]) == 0
    assert main([b, a, "--fail-on", "slower:5%", "--fail-on", "faster:5%"]) == 1


@pytest.mark.parametrize("gate", ["slower:5%", "slower", "broken", "unjudged"])
def test_a_gate_on_sweeps_that_share_nothing_fails(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any], gate: str
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(replace(CASE, lr=0.1), BASE))
    (result,) = machine(a, b, "--fail-on", gate, code=1)["gates"]
    command = "python -m bench.compare a b --axis lr 0.01 0.1"
    why = f"they share no value of lr; to compare these values: {command}"
    assert (result["passed"], result["judged"], result["why_unjudged"]) == (False, 0, [why])
    assert main([a, b, "--fail-on", gate]) == 1
    assert f"fail: {gate}: no case could be judged: {why}\n" in capsys.readouterr().err


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


@pytest.mark.parametrize("text", ["2%", " 2% ", "2.0%", "2 %"])
def test_percentages(text: str) -> None:
    assert parse_percent("", text) == 0.02


@pytest.mark.parametrize("text", ["", "%", "2", "0.02", "inf%", "1e4%", "２%", "5%%", "2%x"])
def test_no_percentages(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent("--margin", text)


# --------------------------------------------------------------------------------------- documents


@pytest.mark.parametrize("cases", [1, 60])
def test_a_comparison_fits_one_screen(
    cases: int, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 lines of 100 columns, whatever happened."""
    sizes = [at(CASE, batch_size=2 + i, lr=0.01 * (1 + i % 7)) for i in range(cases)]
    a = write("a", [row for case in sizes for row in runs(case, BASE)])
    lost = [record(at(CASE, batch_size=999), 1, None, status=Status.OOM)]
    b = write("b", [*(row for case in sizes for row in runs(case, SLOWER[:2])), *lost])
    assert main([a, b]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "no verdict" in lines[1]
    assert "--repeats 3" in out
    assert ("more rows are left out; --full has them" in " ".join(out.split())) == (cases > 1)


def test_tables_fit_the_terminal(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = at(CASE, model="a_package.of_networks:build_the_large_one")
    cases = [at(c, compile=mode) for c in (CASE, long) for mode in ("off", "default")]
    a = write("a", [r for case in cases for r in measured_on(case, 0.5, BASE)])
    b = write("b", [r for case in cases for r in measured_on(case, 0.5, SLOWER[:2])])
    assert main([a, b, "--full"]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main([a, b, "--full"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    # nothing is left out: only breaks and gaps differ
    kept = [sorted("".join(out.replace("─", "").split())) for out in (narrow, wide)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_two_states_of_a_switch_fit_the_terminal(
    columns: int,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of table and line: environments, conditions, losses, equivalence, spoilt times."""
    noise: dict[str, Any] = {"other_cores": 3.0, "warmup_steps": 4, "warmup_steady": False}
    far = replace(HERE, gpu="NVIDIA GeForce RTX 4090 Laptop GPU", torch="2.11.0+cu130.with.more")
    rows = [
        record(
            at(case, channels_last=on),
            i,
            environment=far if on else HERE,
            measurement=Measurement(
                epoch_time_s=time * (1 + i / 7), train_loss=2 + i / 9, test_accuracy=i / 9, **noise
            ),
        )
        for case in (CASE, at(SMALL, compile="default"), at(BF16, model="a_package.networks:large"))
        for on in (False, True)
        for i, time in enumerate(BASE, 1)
    ]
    sweep = write("a_folder_with_a_long_name_" * 4, rows)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([sweep, "--axis", "channels_last", "--full"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > columns] == []
    assert "equivalent within 2 %" in " ".join(out.split())
    assert " ".join(out.split()).count("a new --out keeps the old rows") == 1, "said once"
    assert out.count("channels last") == 2, "only where the sides are introduced"
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
    (row,) = [line for line in markdown.splitlines() if "script" in line]
    assert "<" not in row
    assert row.replace("\\|", "").count("|") == 5
    assert "\\`" in row
    assert main([a, b, "--format", "json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_help_costs_no_heavy_import() -> None:
    code = (
        "import sys; from bench.compare.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert all(word in done.stdout for word in OUTCOME_FINDINGS)


@pytest.mark.slow
def test_a_closed_pipe_is_no_fault(write: Write) -> None:
    a = write("a", runs(CASE, BASE))
    command = f"{sys.executable} -m bench.compare {a} {a} | true"
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
