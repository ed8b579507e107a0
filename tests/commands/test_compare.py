"""`bench.compare` from stored records to verdicts, documents and return codes; tests/golden has
whole screens of some planted comparisons."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.compare.__main__ import main
from bench.results.study.quantities import METRICS
from bench.results.study.warnings import WARNINGS
from bench.results.verdict import EquivalenceVerdict, Verdict
from bench.schema.case import Case, spell_value
from bench.schema.record import Measurement, Record, Status
from tests.planted.comparisons import (
    BASE,
    CARD,
    CASE,
    COMPARISONS,
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
from tests.planted.records import write_sweep
from tests.planted.scripts import counted, script
from tests.planted.warnings import WARNED, list_planted

Write = Callable[[str, Sequence[Record]], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a sweep into a folder of the working directory, and name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe: tables are as wide as they need

    def write(name: str, records: Sequence[Record]) -> str:
        return str(write_sweep(Path(name), records))

    return write


def test_a_folder_is_named_where_its_records_are_given(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write("a", [*runs(CASE, (1.0,)), *runs(FP16, (1.0,))])).resolve() / "records.csv"
    assert main([str(file), "--axis", "precision"]) == 0
    assert " in a: 1 case with both values of precision" in capsys.readouterr().out


def test_a_clock_of_what_one_side_alone_measured_is_not_compared(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {at(CASE, device="cuda"): 1980.0, at(CASE, device="cuda", batch_size=512): 1500.0}
    rows = [runs(case, BASE, environment=CARD, sm_clock_mhz=mhz) for case, mhz in cases.items()]
    small, large = rows
    failed = [replace(row, status=Status.OOM, measurement=Measurement()) for row in large]
    assert main([write("a", small + large), write("b", small + failed)]) == 0
    assert "sm_clock_mhz" not in capsys.readouterr().out


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


def count(texts: Iterable[str]) -> str:
    return ", ".join(f"{text} ×{n}" if n > 1 else text for text, n in Counter(texts).items())


def tell(document: dict[str, Any]) -> Iterator[str]:
    """What a comparison's JSON has of findings: of each metric its verdicts, with the ratio or the
    speed and the numbers of runs; what learnt as well, over how many seeds; and what differs."""
    if document["axis"]:
        yield f"axis: {document['axis']}"
    for metric, findings in document["metrics"].items():
        verdicts = []
        for found in findings:
            ratio = found.get("speedup") or found.get("ratio")
            value = "" if ratio is None else f" {ratio:.3g}"
            verdicts.append(f"{found['verdict']}{value} ({len(found['a'])}:{len(found['b'])})")
        if verdicts:
            yield f"{metric}: {count(verdicts)}"
    for metric, findings in document["equivalence"].items():
        verdicts = [f"{found['verdict']} over {found['seeds']}" for found in findings]
        if verdicts:
            yield f"{metric}: {count(verdicts)}"
    spoilt = [
        text
        for findings in document["metrics"].values()
        for f in findings
        for text in f["warnings"]
    ]
    if spoilt:
        yield f"spoilt: {', '.join(dict.fromkeys(spoilt))}"
    if document["differ"]:
        yield f"differ: {', '.join(name for name, *_ in document['differ'])}"
    if changed := [one["change"] for one in document["outcomes"] if one["change"]]:
        yield f"outcomes: {count(changed)}"
    if origins := {*document["origins"]} - {"measured"}:
        yield f"origin: {', '.join(origins)}"
    if alone := [
        f"{side} {len(document[f'only_in_{side}'])}" for side in "ab" if document[f"only_in_{side}"]
    ]:
        yield f"only in: {', '.join(alone)}"
    for gate in document["gates"]:
        judged = f"{gate['judged']} judged, {gate['unjudged']} not"
        judged += f", {gate['undecided']} undecided" if gate["undecided"] else ""
        yield f"{gate['gate']} {'passed' if gate['passed'] else 'failed'}: {judged}"


@pytest.mark.parametrize("name", COMPARISONS)
def test_what_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    planted = COMPARISONS[name]
    planted.write(tmp_path)
    code = main([*planted.command.split(), "--format", "json"])
    found = [*tell(json.loads(capsys.readouterr().out))]
    assert "; ".join([*found, f"rc {code}"] if code else found) == planted.finds


def test_every_verdict_is_found_somewhere() -> None:
    found = " ".join(planted.finds for planted in COMPARISONS.values())
    words = {metric.word(verdict) for metric in METRICS.values() for verdict in Verdict}
    assert {
        word
        for word in (*words, *(claim.value for claim in EquivalenceVerdict))
        if word not in found
    } == set()


def test_other_networks_of_one_name_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = replace(CASE, model="mynet:build")
    ours = replace(CASE, model="dpn92")
    parts = {"parameters": "parameters", "structure": "layers", "source": "source files"}
    columns = {f"model_{part}": what for part, what in parts.items()}
    for column, what in (*columns.items(), ("start_fingerprint", "starting weights")):
        a, b = (
            write(name, runs(ours, BASE, environment=replace(HERE, **{column: name})))
            for name in (f"a-{column}", f"b-{column}")
        )
        assert main([a, b]) == 2
        assert capsys.readouterr() == (
            "",
            f"error: A and B trained different networks: dpn92 changed in {what}; "
            "to compare them anyway, add --mix\n",
        )
        assert main([a, b, "--mix"]) == 0
        # two versions of one's own are compared, and that they differ is told
        a, b = (
            write(name, runs(mine, BASE, environment=replace(HERE, **{column: name})))
            for name in (f"c-{column}", f"d-{column}")
        )
        capsys.readouterr()
        assert main([a, b]) == 0
        assert f"! They differ: the {what} of the network." in capsys.readouterr().out


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
        ("oom", "error"): "",
        ("ok ok", "ok interrupted"): "",
        ("ok ok", "lost"): "",
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
    assert len(document["gates"][0]["failures"]) == 7
    assert machine(b, b, "--fail-on", "broken")["gates"][0]["failures"] == []


def test_what_broke_is_told_with_its_reason(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "AttributeError: no zero_grads"
    a = write("a", [record(CASE, 1)])
    b = write("b", [record(CASE, 1, status=Status.ERROR, reason=reason)])
    assert main([a, b]) == 0
    assert f"(ok → error: {reason})." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("axis", "one", "two"),
    [
        ("precision", CASE, at(CASE, precision="fp16", loss_scale=64.0)),  # which has its own scale
        ("until", CASE, at(CASE, until=0.01)),
        ("optimizer", CASE, at(CASE, optimizer="adamw", lr=0.001)),
        ("world_size", *(at(CASE, parallel="ddp", world_size=n) for n in (2, 4))),
    ],
)
def test_any_axis_is_compared_with_all_others_equal(
    write: Write, machine: Callable[..., Any], axis: str, one: Case, two: Case
) -> None:
    """An axis without effect is the same; cases that differ elsewhere too stay unmatched."""
    cases = (one, two, at(two, batch_size=2))
    sweep = write("sweep", [r for case in cases for r in runs(case, BASE)])
    document = machine(
        sweep, "--axis", axis, *(spell_value(getattr(case, axis)) for case in cases[:2])
    )
    (finding,) = document["metrics"]["epoch_time_s"]
    assert (finding["speedup"], finding["verdict"]) == (pytest.approx(1), "same")
    assert finding["case"][axis] != finding["case_b"][axis]
    assert len(document["only_in_b"]) == 1


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
    assert document["only_in_b"] == [], "its whole epoch is of a case that was compared"


def test_of_equal_fractions_that_ended_elsewhere_the_whole_epoch_is_not_taken(
    write: Write, machine: Callable[..., Any]
) -> None:
    """One side went on until it was sure, and evaluated a whole epoch too."""

    def cut(steps: int, times: Sequence[float], **axes: Any) -> list[Record]:
        rows = trained(at(CASE, **axes), steps, 390, times)
        return [replace(row, case=at(row.case, steps=None, fraction=0.2)) for row in rows]

    whole = measured_on(replace(CASE, evaluate=True), 1.0, BASE)
    b = [*cut(66, SLOWER, until=0.01), *whole]
    document = machine(write("a", cut(78, BASE)), write("b", b))
    assert verdicts(document) == ["slower"]
    assert document["only_in_a"] == document["only_in_b"] == []


def test_a_profile_is_no_other_case(write: Write, machine: Callable[..., Any]) -> None:
    """Folders that differ in --profile alone are compared; one with both, each with its like."""
    a = write("a", [*runs(CASE, BASE), *runs(SMALL, BASE)])
    document = machine(a, write("b", runs(replace(CASE, profile=True), SLOWER)))
    assert verdicts(document) == ["slower"]
    assert document["only_in_a"] == ["fp32 · batch size 64"]
    both = write("c", [*runs(CASE, BASE), *runs(replace(CASE, profile=True), SLOWER)])
    assert verdicts(machine(both, both)) == ["same", "same"]
    assert verdicts(machine(a, both)) == ["same"]


def test_each_gate_is_judged_against_its_own_margin(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    passing = ["slower:10%", "slower:8%", "faster:5%", "broken", "missing", "unjudged"]
    # 8 % slower, but not shown to be more
    gates = [word for gate in ["slower:5%", "slower", *passing] for word in ("--fail-on", gate)]
    assert main([a, b, *gates]) == 1
    fails = [f"fail: {gate}: fp32 · batch size 128: epoch time: speed-up 0.9259×\n"
             for gate in ("slower:5%", "slower")]  # fmt: skip
    may_be = (
        "warning: --fail-on slower:8%: 1 of 1 cases may still be so, as their intervals reach "
        "beyond it: more --repeats tell\n"
    )
    assert capsys.readouterr().err == "".join([*fails, may_be])
    assert main([a, b, *gates[4:]]) == 0
    capsys.readouterr()
    found = machine(a, b, "--margin", "20%", *gates, code=1)["gates"]
    assert {gate["gate"] for gate in found if not gate["passed"]} == {"slower:5%"}


def test_a_gate_on_times_that_scatter_is_not_judged(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, (10.0, 30.0, 20.0, 25.0, 15.0)))
    assert main([a, b, "--fail-on", "slower:5%"]) == 1
    expected = "not judged: slower:5%: its interval rules nothing out: more --repeats tell\n"
    assert capsys.readouterr().err == expected


def test_a_gate_names_what_a_time_is_of(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(n, counted(script(), [s, s * 1.01, s])) for n, s in (("a", 0.01), ("b", 0.02)))
    assert main([a, b, "--fail-on", "slower:5%"]) == 1
    assert ": time of 10,000 items: speed-up 0.5000×" in capsys.readouterr().err


def test_times_of_two_machines_are_compared_whatever_the_recipe(
    write: Write, machine: Callable[..., Any]
) -> None:
    """Another rate and optimizer, and source files of another version of the harness."""
    there = replace(CARD, gpu="NVIDIA H200", model_source="b")
    ours = write("a", runs(CASE, BASE, environment=replace(CARD, model_source="a")))
    other = replace(CASE, lr=3e-4, optimizer="adamw")
    theirs = write("b", runs(other, [x / 2 for x in BASE], environment=there))
    metrics = machine(ours, theirs)["metrics"]
    assert metrics["epoch_time_s"][0]["speedup"] == pytest.approx(2)
    assert [row["verdict"] for row in metrics.get("train_loss", [])] in ([], ["no verdict"])


def test_two_values_of_an_axis_that_two_torches_ran_have_no_verdict(
    write: Write, machine: Callable[..., Any]
) -> None:
    """Within a folder; two folders may have been measured to compare the torches."""
    older, newer = (replace(CARD, torch=version) for version in ("2.12.0", "2.13.0"))
    ours = runs(CASE, BASE, environment=older)
    theirs = runs(FP16, [x / 2 for x in BASE], environment=newer)
    pair = ("--axis", "precision", "fp32", "fp16")
    (mixed,) = machine(write("both", [*ours, *theirs]), *pair)["metrics"]["epoch_time_s"]
    reason = "the sides ran with another torch: measure both with one"
    assert (mixed["verdict"], mixed["lack"]) == ("no verdict", reason)
    again = [*ours, *runs(CASE, BASE, environment=newer), *theirs]
    assert verdicts(machine(write("again", again), *pair)) == ["faster"]
    folders = write("a", ours), write("b", theirs)
    assert verdicts(machine(*folders, *pair)) == ["faster"]


def test_what_follows_from_the_compared_axis_is_named(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loss of each optimizer is one at its learning rate, and a time of ddp that of its GPUs."""
    adamw = replace(CASE, optimizer="adamw", lr=3e-4)
    both = str(write("a", [*runs(CASE, BASE), *runs(adamw, BASE)]))
    assert main([both, "--axis", "optimizer"]) == 0
    assert f"! They differ: lr ({CASE.lr:g} and 0.0003).\n" in capsys.readouterr().out
    ddp = replace(CASE, parallel="ddp", world_size=2)
    both = str(write("b", [*runs(CASE, BASE), *runs(ddp, BASE)]))
    assert main([both, "--axis", "parallel"]) == 0
    assert "! They differ: world_size (1 and 2).\n" in capsys.readouterr().out


def test_times_of_a_slow_optimizer_are_compared_by_the_axis_alone(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its step is no kernel of half a millisecond."""
    ours = write("a", runs(CASE, BASE, environment=CARD))
    theirs = write("b", runs(replace(CASE, optimizer="muon"), BASE, environment=CARD))
    main([ours, theirs, "--metric", "epoch_time_s"])
    output = " ".join(capsys.readouterr().out.split())
    assert "the sides differ in optimizer; give --axis optimizer and its two values" in output


def test_times_that_a_report_does_not_trust_are_not_relied_on(
    write: Write, machine: Callable[..., Any]
) -> None:
    """Of each warning that is planted: a case that keeps a report from trusting it says it here."""
    folder = write("a", [*list_planted(WARNED)])
    (found,) = machine(folder, folder, "--metric", "epoch_time_s")["metrics"].values()
    rows = [(row["case"]["seed"], row["warnings"]) for row in found]
    warned = {seed: {text.partition(" in ")[0] for text in spoilt} for seed, spoilt in rows}
    outcomes = {"invalid", "diverged"}  # which are told as such
    for seed, planted in enumerate(WARNED.values()):
        fatal = {name for name in planted.warnings.split() if WARNINGS[name].fatal}
        assert warned.get(seed, set()) == {WARNINGS[name].remark for name in fatal - outcomes}, (
            planted
        )


def test_what_changed_of_a_script_is_not_said_of_a_network(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [
        write(name, counted(script(), [0.01] * 3, model_source=name * 16)) for name in ("a", "b")
    ]
    assert main(sides) == 0
    assert "! They differ: the source files of the script." in capsys.readouterr().out


def test_a_gate_on_sweeps_that_share_nothing_fails(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(replace(CASE, compile="default"), BASE))
    gates = [word for gate in ("slower", "broken", "unjudged") for word in ("--fail-on", gate)]
    for result in machine(a, b, *gates, code=1)["gates"]:
        assert (result["passed"], result["judged"]) == (False, 0)
    errors = capsys.readouterr().err
    assert "not judged: broken: no case is in both\n" in errors
    assert main([a, b]) == 0
    assert "no case in both; --axis NAME compares" in capsys.readouterr().out


WRONG = [
    (["a"], "a: name a second sweep, or --axis NAME and two of its values"),
    (["a", "--axis", "precision", "fp32", "bf16"], "that were measured, one of each sweep if "
     "there are two; there is fp32, fp16"),
    (["a", "--axis", "precision", "fp32", "fp32"], "give two different values of precision"),
    (["one", "one", "--axis", "precision"], "there is fp32 and fp32"),
    (["a", "empty"], "empty: no records of a sweep yet; compare sweeps that have run"),
    (["a", "nowhere"], "nowhere: no records there"),
    (["a", "a", "--fail-on", "slowr:5%"], "--fail-on 'slowr:5%': did you mean 'slower'?"),
    (["a", "a", "--fail-on", "slower:5"], "a percentage from 0 to 1000 %, such as 2%"),
    (["a", "a", "--equivalence-margin", "2"], "--equivalence-margin '2': a margin is a percent"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_cannot_be_compared_is_one_line_that_says_what_can(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write("a", [r for case in (CASE, FP16, SMALL) for r in runs(case, BASE)])
    write("one", runs(CASE, BASE))
    write("empty", [])
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err


def test_a_comparison_fits_the_width(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal's, whatever happened; and every case has its row."""
    monkeypatch.setenv("COLUMNS", "60")
    cases = [at(CASE, batch_size=2 + i, lr=0.01 * (1 + i % 7)) for i in range(30)]
    a = write("a_folder_with_a_long_name_" * 4, [r for case in cases for r in runs(case, BASE)])
    lost = [record(at(CASE, batch_size=999), 1, None, status=Status.OOM)]
    b = write("b", [*(r for case in cases for r in runs(case, SLOWER[:2])), *lost])
    assert main([a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(cases)
    assert max(map(len, lines)) <= 60
