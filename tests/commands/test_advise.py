"""`bench.advise`: which setting is measured next, its command by the fake and for real."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from bench.advise.__main__ import main
from bench.advise.advisor import Advice
from bench.advise.findings import Findings, change, list_changes, list_levers, strip
from bench.answers.advice import parse_budget
from bench.answers.report_data import ReportData, gather
from bench.base.errors import UsageError
from bench.base.limits import NEAR
from bench.results.store.reader import read_records
from bench.results.store.rows import Row
from bench.results.study.sweeps import read_sweep
from bench.schema.case import Case, format_value
from bench.schema.flags import join_flags
from bench.schema.record import Outcome, Record, Status, flatten
from bench.schema.rules import settle
from bench.sweep import __main__ as sweep
from bench.sweep.options import parse_arguments
from bench.workers.executors import Stopping
from bench.workers.job import Job
from tests import fake_executor as fake
from tests.planted.records import ROOT, make_run, write_sweep
from tests.planted.scripts import counted
from tests.pytest_for_tests import Capture, Patch
from tests.schemas_for_tests import read_document

NOW = Case(batch_size=128)
LEVERS = list_levers(NOW, {"cuda_graphs": [False]}, 50_000)


def show(times: dict[Case, Sequence[float]], now: Case = NOW) -> Findings:
    """What runs of some settings show."""
    findings = Findings(now, LEVERS, {})
    for setting, of in times.items():
        for time in of:
            findings.add(setting, Row(flatten(make_run(setting, epoch_time_s=time))))
    return findings


def search(
    take: Callable[[Case], float | None], levers: Mapping[str, Sequence[Any]] = LEVERS
) -> Findings:
    """Measure whatever is asked for; None does not fit."""
    findings = Findings(NOW, levers, {})
    while setting := next((s for s in findings.explore() if s not in findings.runs), None):
        time = take(setting)
        status = Status.OOM if time is None else Status.OK
        run = make_run(setting, status=status, epoch_time_s=time)
        findings.add(setting, Row(flatten(run)))
    return findings


# -------------------------------------------------------------------------------- what it measures


def test_each_lever_is_tried_at_the_best_so_far() -> None:
    """fp16 is faster only in a batch that keeps the GPU busy; compiling gains, channels-last does
    not; beyond 512 nothing fits."""

    def take(setting: Case) -> float | None:
        if setting.batch_size > 512:
            return None
        work = 10.0 if setting.precision in ("fp16", "fp16-amp") else 20.0
        waits = 5000.0 / setting.batch_size
        gain = 0.8 if setting.compile == "default" else 1.0
        return max(work, waits) * gain * (1.05 if setting.channels_last else 1.0)

    findings = search(take)
    asked = list(findings.runs)
    assert asked[0] == NOW
    assert findings.advised == change(replace(NOW, batch_size=512, compile="default"),
                                      "precision", "fp16-amp", {})  # fmt: skip
    assert len(asked) < 35
    assert max(setting.batch_size for setting in asked) == 1024, "no larger than one that failed"


def test_nothing_is_changed_where_nothing_helps() -> None:
    findings = search(lambda setting: 60.0)
    assert findings.advised == NOW
    assert len(findings.runs) < 35


def test_of_batches_within_a_tenth_the_smallest_is_advised() -> None:
    sizes = {128: 78.0, 256: 64.8, 512: 60.0}
    near = (0.999, 1.0, 1.001)
    findings = show({replace(NOW, batch_size=n): [t * x for x in near] for n, t in sizes.items()})
    assert findings.advised == replace(NOW, batch_size=256)
    first, rule, lowest, *_ = answer(findings)
    assert first.startswith("Train with fp32, batch size 256, of 3 settings measured: 1.20×")
    assert rule == (
        "It is recommended as the smallest batch shown to be within 10 % of the lowest time."
    )
    assert lowest == (
        "The lowest time is that of fp32, batch size 512, 1.08× (1.08 to 1.08) as fast as what is "
        "advised."
    )


def test_of_equal_settings_the_one_that_changes_least_is_advised() -> None:
    findings = show({NOW: [100, 101, 99], replace(NOW, channels_last=True): [98.5, 99.5, 99.4]})
    assert findings.advised == NOW
    assert answer(findings)[0] == "Stay with fp32, batch size 128, of 2 settings measured."


def test_the_present_and_the_best_settings_are_repeated() -> None:
    times = {NOW: [100.0], replace(NOW, compile="default"): [50.0, 51.0]}
    slow = replace(NOW, cudnn_benchmark=True)
    assert show({**times, slow: [120.0]}).list_unrepeated() == list(times)


def test_on_a_recorded_card_it_finds_what_is_within_a_tenth() -> None:
    """Of a sweep of DPN-92 on an H200."""
    with (ROOT / "results" / "reference" / "h200-lab.csv").open(newline="") as file:
        lines = [row for row in csv.DictReader(file) if row["epoch_time_s"]]
    axes = ("precision", "batch_size", "compile", "channels_last")
    times = {tuple(row[axis] for axis in axes): float(row["epoch_time_s"]) for row in lines}

    def take(setting: Case) -> float | None:
        return times.get(tuple(format_value(getattr(setting, axis)) for axis in axes))

    sizes = {int(row["batch_size"]) for row in lines}
    advised = search(take, {**LEVERS, "batch_size": [*sizes]}).advised
    assert advised
    assert (take(advised) or 1e9) <= (1 + NEAR) * min(times.values())


@pytest.mark.parametrize("warned", [64, 32, None])
def test_what_rests_on_a_doubted_run_may_be_chance(warned: int | None, tmp_path: Path) -> None:
    """Of the lowest time, or of the advised setting."""
    records = list[Record]()
    for size, time in ((128, 200.0), (64, 96.0), (32, 100.0)):
        for turn in range(3):
            case = replace(NOW, batch_size=size)
            shared: dict[str, Any] = {"neighbours_computing": 1} if size == warned else {}
            shared |= {"repeat": turn + 1, "epoch_time_s": time + turn / 10}
            records.append(make_run(case, **shared))
    measured = read_sweep(write_sweep(tmp_path, records))
    findings = Findings(NOW, LEVERS, {})
    for row in measured.rows:
        findings.add(row.case, row)
    command = "python -m bench.advise --budget=90s --model dpn92"
    advice = Advice(findings, {}, tmp_path, command, found=gather(ReportData, [measured]))
    lines = [*advice.write()]
    chance = ["which may be chance" in line for line in lines if "× (" in line]
    assert chance == {64: [False, True], 32: [True, True], None: [False, False]}[warned]
    warnings = [line for line in lines if line.startswith("! ")]
    assert len(warnings) == (warned is not None)
    assert all("3 of 9 runs compared have a warning (shared)." in line for line in warnings)
    # in the same folder these runs would stay
    following = f"Next: python -m bench.advise --model dpn92 --out {tmp_path}-again --budget 3m"
    assert (lines[-1] == following) == bool(warned)
    found = read_document(advice.write_json())
    gain = found["gain"]
    ends = f"{gain['speedup']:.2f}× ({gain['speedup_low']:.2f} to {gain['speedup_high']:.2f}"
    assert ends in lines[0]
    assert gain["chance"] == ("which may be chance" in lines[0])
    assert found["warnings"] == ["shared"] * bool(warned)
    assert f"Next: {found['next']}" == (following if warned else "Next: None")


def test_what_follows_from_a_change_is_no_change() -> None:
    assert list_changes(Case(precision="fp16", loss_scale=128.0), Case()) == ["precision"]
    assert list_changes(Case(loss_scale=64.0), Case(loss_scale=128.0)) == ["loss_scale"]


def answer(findings: Findings) -> list[str]:
    return list(Advice(findings, {}, Path("results/x"), "").write())


def test_of_a_setting_its_longest_runs_count() -> None:
    findings = Findings(NOW, LEVERS, {})
    for fraction, time in ((0.02, 300.0), (0.5, 100.0), (0.5, 102.0), (0.02, 300.0)):
        case = replace(NOW, fraction=fraction)
        findings.add(case, Row(flatten(make_run(case, epoch_time_s=time))))
    assert findings.times == {NOW: [100.0, 102.0]}
    assert findings.cases == {NOW: replace(NOW, fraction=0.5)}
    assert len(findings.rows) == 2


# --------------------------------------------------------------------------------- a user's script

TEXT = "t.py {batch_size} {precision:fp32=,bf16-amp=--amp} {clip}"
SCRIPT = strip(settle({"command": TEXT, "batch_size": 64, "vary": "clip=0", "device": "cpu"}))
GIVEN: dict[str, list[Any]] = {"command": [TEXT], "vary": ["clip=0", "clip=1"]}
CLIPPED, HALVED = (replace(SCRIPT, **one) for one in ({"vary": "clip=1"}, {"batch_size": 32}))


def test_the_levers_of_a_command_are_its_placeholders() -> None:
    levers = list_levers(SCRIPT, GIVEN, 0)
    assert [*levers] == ["precision", "batch_size", "{clip}"]
    assert [*levers["precision"]] == ["fp32", "bf16-amp"]
    assert [*levers["{clip}"]] == ["0", "1"]
    assert (levers["batch_size"][0], levers["batch_size"][-1]) == (16, 2048)
    assert list_levers(SCRIPT, GIVEN | {"batch_size": [64]}, 0)["batch_size"] == [64]
    assert change(SCRIPT, "{clip}", "1", GIVEN) == CLIPPED
    assert change(SCRIPT, "precision", "fp16", GIVEN) is None, "the command has no words for it"
    assert list_changes(SCRIPT, CLIPPED) == ["{clip}"]


@pytest.mark.parametrize(
    ("loss", "for_time", "advised"),
    [(None, False, SCRIPT), (None, True, CLIPPED), (0.5, False, CLIPPED)],
)
def test_a_flag_of_ones_own_is_advised_where_its_loss_is_known(
    loss: float | None, for_time: bool, advised: Case
) -> None:
    findings = Findings(SCRIPT, list_levers(SCRIPT, GIVEN, 0), GIVEN, for_time)
    for setting, rate in ((SCRIPT, 100.0), (CLIPPED, 200.0)):
        for n in range(3):
            values = {"images_per_s": rate + n, "unit": "items", "train_loss": loss}
            case = replace(setting, steps=8)
            findings.add(case, Row(flatten(make_run(case, **values))))
    assert findings.advised == advised
    unadvised = "Values of clip are measured and none is advised" in " ".join(answer(findings))
    assert unadvised == (advised == SCRIPT)


@pytest.mark.parametrize("loss", [1.5, 1.0])
def test_a_clearly_higher_loss_of_what_is_advised_is_told(loss: float, tmp_path: Path) -> None:
    findings = Findings(SCRIPT, list_levers(SCRIPT, GIVEN, 0), GIVEN)
    rows = counted(SCRIPT, [0.02, 0.0201, 0.0199], train_loss=1.0)
    rows += counted(CLIPPED, [0.01, 0.0101, 0.0099], steps=90, train_loss=loss)
    measured = read_sweep(write_sweep(tmp_path, rows))
    for row in measured.rows:
        findings.add(row.case, row)
    found = gather(ReportData, [measured])
    lines = [*Advice(findings, {}, tmp_path, "", found=found).write()]
    assert lines[0].startswith("Train with fp32, batch size 64, clip 1, ")
    assert (
        "The training loss is 1.500 in fp32 at batch size 64 (clip 1), and 1.000 in fp32 at batch "
        "size 64 (clip 0), over another number of steps: look at what each learns before you "
        "choose by time." in lines
    ) == (loss > 1.0)


def test_times_of_runs_and_of_items_are_not_compared() -> None:
    findings = Findings(SCRIPT, list_levers(SCRIPT, GIVEN, 0), GIVEN)
    for setting, unit in ((SCRIPT, "items"), (HALVED, "runs")):
        values = {"images_per_s": 100.0, "unit": unit}
        findings.add(setting, Row(flatten(make_run(setting, **values))))
    assert [*findings.times] == [SCRIPT]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("t.py {batch_size}", "give the one that you use as --now batch_size=N"),
        ("t.py {precision} --now precision=x", "--now precision 'x': "),
        ("t.py", "nothing in it has two values to try; put in braces what may vary"),
        ("t.py {precision}", "{precision} has no value; give --precision VALUE"),
        ("t.py --now clip=1", "--now 'clip=1': give AXIS=VALUE"),
    ],
)
def test_commands_that_cannot_be_advised_on_are_one_line(
    given: str, expected: str, capsys: Capture
) -> None:
    text, sign, flags = given.partition(" --now ")
    now = [sign.strip(), flags] if sign else []
    assert main(["--device", "cpu", "--command", text, *now]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


TRAINING = """
import sys
import torch

net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(int(sys.argv[2]))))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
while True:
    loss = net(torch.randn(int(sys.argv[1]), 512)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_advice_for_an_unedited_script(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Its runs end after some steps; a depth of 1 takes an eighth of the work of 8, and the steps'
    losses are seen."""
    monkeypatch.setattr("bench.advise.findings.MIN_REPEATS", 1)
    monkeypatch.setattr("bench.advise.advisor.MOST_S", 0.5)
    (tmp_path / "t.py").write_text(TRAINING)
    words = ["--command", f"{sys.executable} {tmp_path}/t.py {{batch_size}} {{depth}}"]
    words += ["--vary", "depth", "8", "1", "--batch-size", "64", "--device", "cpu"]
    assert main([*words, "--budget", "3m", "--out", str(tmp_path / "out")]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Train with batch size 64, depth 1, of 2 settings measured: ")
    rows = read_records(tmp_path / "out")
    assert {*rows["status"]} == {"ok"}
    (anew,) = [line for line in rest if "bench.sweep" in line and "depth 1" in line]
    words = shlex.split(anew)[3:]
    assert parse_arguments(words).axes["vary"] == ["depth=1"]
    assert "--precision" not in words


# -------------------------------------------------------------------------------- its command line

pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--device", "cuda", "--dataset", "synthetic", "--model", "dpn92"]
FEW = ["--precision", "fp32", "fp16", "--batch-size", "128", "256", "--compile", "off"]
FIXED = ["--cuda-graphs", "off", "--channels-last", "off", "--cudnn-benchmark", "off"]


def run(out: Path, *flags: str, rc: int = 0) -> None:
    words = join_flags(FAKE, FEW, FIXED, flags, ["--out", str(out)])
    assert main(words) == rc


def test_the_command_says_what_to_train_with(tmp_path: Path, capsys: Capture) -> None:
    """The fake takes 10 s and 1000 s over the batch size, in any precision."""
    run(tmp_path / "out", "--budget", "1m", "--loss-scale", "512")
    captured = capsys.readouterr()
    first, *rest = captured.out.splitlines()
    assert first == (
        "Train with fp32, batch size 256, of 4 settings measured: 1.28× as fast as what you have "
        "now (fp32, batch size 128), with 200 % of its memory."
    )
    assert "so far: fp32, batch size 256; " in captured.err
    shown = [line.partition(": ")[0] for line in captured.err.splitlines() if line[:1] == "["]
    names = [one.partition("] ")[2] for one in shown]
    assert len({*names}) == len(names) > 4, "each once, the first by its few steps"
    rows = read_records(tmp_path / "out")
    assert set(rows["status"]) == {"ok"}
    now = rows[(rows["precision"] == "fp32") & (rows["batch_size"] == 128)]
    first_run, *others = zip(now["fraction"], now["repeat"], strict=True)
    assert first_run == (0.02, 1), "eight steps, by which the length of others is chosen"
    assert others == [(0.56, 1), (0.56, 2), (0.56, 3)]
    assert set(rows["loss_scale"][rows["precision"] == "fp16"]) == {"512"}
    assert rows.groupby(["precision", "batch_size"])["repeat"].max().max() == 3

    # the same command has nothing left to measure, and says the same
    run(tmp_path / "out", "--budget", "1m", "--loss-scale", "512")
    assert capsys.readouterr().out.splitlines()[0] == first
    assert len(read_records(tmp_path / "out")) == len(rows)
    lines = [shlex.split(line) for line in rest if "python -m bench.sweep" in line]
    run(tmp_path / "out", "--budget", "1m", "--loss-scale", "512", "--format", "json")
    found = read_document(capsys.readouterr().out)
    assert found["now"]["name"] == "fp32, batch size 128"
    assert found["advised"]["name"] == "fp32, batch size 256"
    assert found["gain"]["speedup"] == pytest.approx(1.28, abs=0.005)
    assert found["gain"]["speedup_low"] is None, "times without any spread"
    assert found["gain"]["memory"] == pytest.approx(2)
    assert [one["status"] for one in found["tried"]] == ["ok"] * 4
    assert len(found["tried"][0]["times_s"]) == 3
    assert [shlex.split(command) for command in found["whole"][:2]] == lines
    commands = [line[3:] for line in lines]
    for words in commands:
        small = ["--executor", "fake", "--repeats", "1", "--no-report"]
        assert sweep.main(join_flags(words, small)) == 0
    whole = read_records(tmp_path / "out-whole")
    assert whole["batch_size"].tolist() == [128, 256]
    assert set(whole["fraction"]) == {1.0}, "also where a preset takes a part"


@pytest.mark.parametrize(
    ("answers", "flags"),
    [("precision=fp32:oom precision=fp16:error", ""), ("", "--budget 0.01s")],
)
def test_where_too_little_was_measured_there_is_no_answer(
    answers: str, flags: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(fake.ANSWERS, answers)
    run(tmp_path, *flags.split(), rc=3)
    output = capsys.readouterr().out
    assert output.startswith("No advice: ")
    assert ("Did not train: fp32, batch size 128 (oom: " in output) == bool(answers)
    assert ("Next: python -m bench.advise" in output) == bool(flags)
    if flags:
        assert "0 settings measured, and it takes two: the budget was over before a run" in output
        assert output.endswith(" --budget 10m\n")
        assert not len(read_records(tmp_path))
    run(tmp_path, *flags.split(), "--format", "json", rc=3)
    found = read_document(capsys.readouterr().out)
    assert (found["advised"], found["gain"], found["time_of"]) == (None, None, "an epoch")
    assert (found["next"] or "").startswith("python -m bench.advise" if flags else "")


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_outlasts_the_budget_is_stopped(
    first: bool, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """The first, or the second, which is told to go on for as long as it is let."""
    real = fake.FakeExecutor.run

    def wait(self: fake.FakeExecutor, job: Job, on_event: Any, stopping: Stopping) -> Outcome:
        if first or job.case.precision != "fp32":
            while not stopping():
                sleep(0.01)
        return real(self, job, on_event, stopping)

    monkeypatch.setattr(fake.FakeExecutor, "run", wait)
    run(tmp_path, "--batch-size", "128", "--budget", "3s", rc=3)
    output = capsys.readouterr().out
    *_, row = read_records(tmp_path).to_dict("records")
    assert (row["status"], row["reason"]) == ("interrupted", "the time for it was over")
    why = "0 settings measured, and it takes two: a run takes at least " if first else "1 setting "
    assert output.startswith(f"No advice: {why}")
    assert output.endswith(" --budget 1m\n")


def test_the_next_budget_has_time_for_ten_runs(tmp_path: Path) -> None:
    command = "python -m bench.advise --budget 2m"
    advice = Advice(show({NOW: [100.0]}), {}, tmp_path, command, pending=True, run_s=90)
    first, *_, last = advice.write()
    assert first == (
        "No advice: 1 setting measured, and it takes two: a run takes 1.5 min; the last command "
        "here has more time."
    )
    assert last == f"Next: python -m bench.advise --out {tmp_path} --budget 15m"


def test_a_budget_is_a_time() -> None:
    assert [parse_budget("--budget", text) for text in ("90s", "10m", "1.5 h")] == [90, 600, 5400]
    with pytest.raises(UsageError, match="--budget"):
        parse_budget("--budget", "-1s")


@pytest.mark.slow
def test_advice_for_a_network_of_one_s_own(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Real training, of some seconds: an answer, rows that say how they were measured."""
    monkeypatch.setattr("bench.advise.findings.MIN_REPEATS", 1)
    words = ["--model", "models_for_tests:good", "--dataset", "synthetic", "--device", "cpu"]
    words += ["--precision", "fp32", "--compile", "off", "--batch-size", "64", "128"]
    words += ["--channels-last", "off", "--now", "batch_size=64", "--budget", "90s"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        ("Train with fp32, batch size 128, of 2 ", "Stay with fp32, batch size 64, of 2 ")
    )
    rows = read_records(tmp_path)
    assert {64, 128} == set(rows["batch_size"])
    assert set(rows["until"]) == {""}, "on a CPU it would only be missed"
    assert (rows["epoch_time_s"] > 0).all()
