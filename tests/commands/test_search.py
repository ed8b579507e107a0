"""`bench.search`: rungs against a plain re-implementation, trials by the fake and for real."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.answers.halving import find_trials, spell_case
from bench.report.__main__ import main as report
from bench.results.store.reader import read_beside, read_records, read_rows
from bench.results.store.rows import latest, read_history
from bench.results.store.table import RECORDS
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.schema.goals import SEARCH_METRICS, Halving, read_halving
from bench.schema.grid import grid
from bench.schema.optimization import OPTIMIZERS
from bench.schema.record import EpochRow, Outcome, Status
from bench.search import __main__ as search
from bench.search.options import AROUND, parse_arguments
from bench.search.trials import INSTALL, Ladder
from bench.sweep import __main__ as sweep
from bench.workers.job import END, GO_ON, Channel, EpochEnded, Job, Message
from bench.workers.measurement import measure
from tests import fake_executor as fake
from tests.frames_for_tests import read_epochs, read_steps

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small"]
RANGE = ["--lr", "0.001..10", "--samples", "12", "--seed", "3"]

Report = Sequence[float | None]


def run(out: Path, *flags: str, rc: int = 0) -> pd.DataFrame:
    assert search.main(join_flags(FAKE, flags, ["--out", str(out)])) == rc
    return read_records(out)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that has ended, to be read."""
    run(out := tmp_path_factory.mktemp("searched") / "out", *RANGE)
    return out


def read_rule(out: Path) -> Halving:
    halving = read_halving(json.loads((out / "config.json").read_text())["halving"])
    assert halving is not None
    return halving


def test_rules_are_read_whatever_stands_beside_them() -> None:
    """Else a search would go on by other rules than those that ended its earlier trials."""
    halving = Halving("test_loss", 9, 1, 3)
    assert read_halving(asdict(halving) | {"trials": [], "combinations": 2.5}) == halving
    assert read_halving(["test_loss", 9, 1, 3, []]) is None


# ------------------------------------------------------------------------------------- the rungs


class Rungs:
    """ASHA's rule of stopping, in exact arithmetic: at a rung, whoever is below a percentile ends.

    The percentile of those that came there before, linear between two of them, leaves one in
    ``reduction`` above it.
    """

    def __init__(self, halving: Halving) -> None:
        self.halving = halving
        self.there: dict[int, list[Fraction]] = {rung: [] for rung in halving.rungs}
        self.doubtful = False  # where floats may round to the other side

    def judge(self, epoch: int, value: float | None) -> bool:
        if value is None or epoch == self.halving.epochs:
            return True
        if epoch not in self.there:
            return False
        good = Fraction(value) * (1 if self.halving.higher else -1)
        before, self.there[epoch] = self.there[epoch], [*self.there[epoch], good]
        if not before:
            return False
        ordered = sorted(before)
        place = (len(ordered) - 1) * (1 - Fraction(1, self.halving.reduction))
        low = ordered[int(place)]
        high = ordered[min(int(place) + 1, len(ordered) - 1)]
        bar = low + (high - low) * (place - int(place))
        self.doubtful |= good == bar and low != high
        return good < bar


@st.composite
def halvings(draw: st.DrawFn) -> Halving:
    epochs = draw(st.integers(2, 30))
    return Halving(
        draw(st.sampled_from(list(SEARCH_METRICS))),
        epochs,
        grace=draw(st.integers(1, epochs - 1)),
        reduction=draw(st.integers(2, 5)),
    )


VALUES = st.none() | st.integers(0, 20).map(float) | st.floats(0, 100, width=32)


@given(halvings(), st.data())
def test_the_rungs_decide_as_the_rule_has_it(halving: Halving, data: st.DataObject) -> None:
    """One trial after the other, as a search on one GPU runs them."""
    plain, curves, decided = Rungs(halving), list[Report](), []
    for _ in range(data.draw(st.integers(1, 8))):
        # made anew from what ended, as for each trial of a search
        judge, curve = Ladder(halving, curves).add(), list[float | None]()
        for epoch in range(1, halving.epochs + 1):
            curve.append(data.draw(VALUES))
            expected = plain.judge(epoch, curve[-1])
            assume(not plain.doubtful)
            assert judge(epoch, curve[-1]) == expected
            if expected:
                break
        curves.append(curve)
        decided.append(len(curve))
    assert max(decided[:1]) == halving.epochs or curves[0][-1] is None, "the first is never ended"


def test_without_ray_tune_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune.schedulers", None)
    assert search.main([*FAKE, *RANGE, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {INSTALL} (")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------ the trials


def draw(*flags: str) -> list[Case]:
    return [*parse_arguments(join_flags(FAKE, flags)).cases]


RATES = [f"{n / 50:g}" for n in range(1, 51)]
DRAWN = st.integers(2, 40)


@given(DRAWN, DRAWN, st.integers(0, 2**31 - 1), st.sampled_from([["0.01..1"], RATES]))
def test_a_longer_search_begins_with_the_same_trials(
    one: int, other: int, seed: int, rates: list[str]
) -> None:
    few, many = (
        parse_arguments([*FAKE, "--seed", str(seed), "--samples", str(n), "--lr", *rates])
        for n in sorted((one, other))
    )
    assert many.cases[: len(few.cases)] == few.cases
    assert many.halving.trials[: len(few.cases)] == few.halving.trials
    assert len(set(many.cases)) == max(one, other)
    assert all(0.01 <= case.lr <= 1 for case in many.cases)


def test_without_a_learning_rate_each_optimizer_has_its_own_range() -> None:
    cases = draw("--optimizer", "sgd", "adamw", "--samples", "40")
    assert {case.optimizer for case in cases} == {"sgd", "adamw"}
    for case in cases:
        assert 1 / AROUND <= case.lr / OPTIMIZERS[case.optimizer].lr <= AROUND


def test_a_dry_run_says_which_trials_and_how_many_epochs(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert search.main([*FAKE, *RANGE, "--dry-run", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "runs: 12, of 12 cases with --repeats 1",
        "   1  fp32 · batch size 128 · lr 4.61",
    ]
    assert lines[-1] == (
        "rungs: after 1 and 3 of 9 epochs, by test_accuracy, about one in 3 goes on; "
        "12 to 108 epochs in all"
    )
    assert not any("--lr" in line for line in lines), "rates that are drawn, nobody gave"
    assert not out.exists()


# ----------------------------------------------------------------------------- a search by the fake


def follow_rule(halving: Halving, cases: Sequence[Case]) -> Iterator[int]:
    """After how many epochs each trial of the fake has to end."""
    plain = Rungs(halving)
    for case in cases:
        rows = (fake.learn(case, epoch) for epoch in range(halving.epochs))
        values = (None if row.train_loss is None else row.test_accuracy for row in rows)
        yield next(n for n, value in enumerate(values, 1) if plain.judge(n, value))


def test_every_trial_is_a_record_and_ends_by_the_rule(tmp_path: Path, capsys: Capture) -> None:
    frame = run(tmp_path, *RANGE)
    cases, epochs = [row.case for row in read_rows(tmp_path)], read_epochs(tmp_path)
    trained = epochs.groupby("record_id")["epoch"].count()[frame["record_id"]].tolist()
    halving = read_rule(tmp_path)
    assert trained == list(follow_rule(halving, cases))
    assert {1, 9} <= set(trained), "some end early, and some do not"
    ended = frame["truncated_after"].fillna(9).tolist()
    assert ended == trained
    assert [row.record_id for row in latest(read_rows(tmp_path))] == [
        record for record, n in zip(frame["record_id"], trained, strict=True) if n == 9
    ]
    captured = capsys.readouterr()
    assert "ended after 1 of 9 epochs" in captured.err
    best = max(
        (fake.learn(case, 8).test_accuracy or 0, case)
        for case, n in zip(cases, trained, strict=True)
        if n == 9
    )
    assert f"Best: batch size {best[1].batch_size} · lr {best[1].lr}, test accuracy" in captured.out
    assert f"{sum(trained)} epochs were trained where 12 whole trials take" in captured.out
    assert "Confirm the best on seeds" in captured.out
    diverged = frame[frame["status"] == "diverged"]
    assert (diverged["truncated_after"] == 1).all()
    assert len(diverged) == sum(case.lr > fake.LARGEST_LR for case in cases) > 0


def test_where_every_trial_was_whole_nothing_is_said_to_be_saved(
    tmp_path: Path, capsys: Capture
) -> None:
    run(tmp_path, "--samples", "2", "--lr", "0.001", "0.1", "--batch-size", "32", "--seed", "1")
    assert not any(row.truncated for row in read_rows(tmp_path))
    output = capsys.readouterr().out
    assert "Best: " in output
    assert "epochs were trained" not in output


def test_the_same_command_goes_on_where_it_was_stopped(
    searched: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """What each trial is compared with is the same as without the interruption."""
    whole = read_records(searched)
    with monkeypatch.context() as patch:
        fake.stop_at(6, patch)
        cut = run(tmp_path / "cut", *RANGE, rc=130)
    assert cut["status"].tolist()[5:] == ["interrupted"]
    frame = run(tmp_path / "cut", *RANGE)
    columns = ["batch_size", "lr", "truncated_after", "status"]
    done = frame[frame["status"] != "interrupted"].reset_index(drop=True)
    pd.testing.assert_frame_equal(done[columns], whole[columns])
    assert done["attempt"].tolist() == [1] * 5 + [2] + [1] * 6
    assert len(run(tmp_path / "cut", *RANGE)) == len(frame), "nothing is left to do"


@pytest.mark.parametrize(
    ("answers", "rc", "outcome"),
    [("precision=fp32:oom", 1, "out of memory"), ("", 130, "interrupted")],
)
def test_where_no_trial_is_whole_none_is_the_best(
    answers: str, rc: int, outcome: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv(fake.ANSWERS, answers)
    if not answers:
        fake.stop_at(1, monkeypatch)
    run(tmp_path, *RANGE, rc=rc)
    output = capsys.readouterr().out
    assert "\nNo trial has trained all its epochs.\n\n" in output
    assert outcome in output
    assert "epochs were trained where" not in output


def edit_torch(out: Path, version: str) -> None:
    """Have the rows that are there be of another torch."""
    frame = pd.read_csv(out / RECORDS, dtype=str, keep_default_na=False)
    frame.assign(torch=version).to_csv(out / RECORDS, index=False)


def test_trials_of_another_torch_are_not_ranked_with_those_of_now(
    searched: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    shutil.copytree(searched, out := tmp_path / "out")
    edit_torch(out, "1.0")
    assert len(run(out, *RANGE, rc=2)) == 12
    assert "torch was 1.0, now " in capsys.readouterr().err
    with monkeypatch.context() as patch:
        fake.stop_at(4, patch)
        run(out, *RANGE, "--mix", "--format", "json", rc=130)
    found = json.loads(capsys.readouterr().out)
    assert [one["status"] for one in found["trials"]] == ["ok"] * 3 + ["interrupted"]
    assert found["left_out"] == [f"torch was 1.0, now {torch.__version__}"]
    frame = run(out, *RANGE, "--mix")[12:]
    output = " ".join(capsys.readouterr().out.split())
    assert "Earlier trials are left out, which cannot be ranked with these: torch was 1.0" in output
    done = frame[frame["status"] != "interrupted"]["truncated_after"].reset_index(drop=True)
    pd.testing.assert_series_equal(done, read_records(searched)["truncated_after"])


def test_several_lanes_share_the_rungs(tmp_path: Path) -> None:
    """Which trial comes first to a rung is chance; every trial has its row, and some end early."""
    frame = run(tmp_path, *RANGE, "--lanes", "3", "--samples", "24")
    assert {row.case for row in read_rows(tmp_path)} == set(draw(*RANGE, "--samples", "24"))
    assert len(frame) == 24
    assert set(frame["lane"]) == {"fake0", "fake1", "fake2"}
    trials = find_trials(read_rows(tmp_path), read_beside(tmp_path, EpochRow), read_rule(tmp_path))
    assert {len(trial.curve) for trial in trials} >= {1, 9}
    assert trials[0].last > trials[-1].last


def test_trials_are_never_compared_by_two_rules(searched: Path, capsys: Capture) -> None:
    before = len(read_records(searched))
    for flags in ("--metric test_loss", "--grace 2", "--batch-size 32", "--seed 4"):
        for start in ((), ("--dry-run",)):
            assert len(run(searched, *RANGE, *flags.split(), *start, rc=2)) == before
            assert "has a search by another --metric" in capsys.readouterr().err


def test_a_batch_above_one_without_memory_is_not_tried(tmp_path: Path, monkeypatch: Patch) -> None:
    """Whatever its learning rate: that takes no memory."""
    monkeypatch.setenv(fake.ANSWERS, "batch_size=256:oom batch_size=512:oom")
    frame = run(tmp_path, *RANGE, "--batch-size", "64", "256", "512")
    first = frame[frame["batch_size"] == 256].index[0]
    for index, row in frame[frame["status"] == "oom"].iterrows():
        assert row["inferred"] == (row["batch_size"] == 512 and index > first)
    assert frame["inferred"].any()
    assert (frame[frame["batch_size"] == 64]["status"] != "oom").all()


def test_nothing_measured_is_a_failure(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(fake.ANSWERS, "device=cpu:error")
    few = [*RANGE, "--samples", "3"]
    assert (run(tmp_path, *few, rc=1)["status"] == "error").all()
    monkeypatch.delenv(fake.ANSWERS)
    frame = run(tmp_path, *few, "--retry", "error")
    assert frame["attempt"].tolist() == [1] * 3 + [2] * 3


def test_a_metric_that_nobody_measures_ends_the_search(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    row = EpochRow(0, 1.0, 2.0, 0.5)  # without a test accuracy
    monkeypatch.setattr(fake, "learn", lambda case, epoch: replace(row, epoch=epoch))
    assert len(run(tmp_path, *RANGE, rc=2)) == 1, "its row is kept"
    assert "--metric test_accuracy is not known of these trials" in capsys.readouterr().err


# ------------------------------------------------------------------- beside whole cases, and after


def test_a_truncated_trial_is_in_no_table_of_whole_cases(searched: Path, tmp_path: Path) -> None:
    frame = read_records(searched)
    truncated = frame[frame["truncated_after"].notna()]
    assert len(truncated) > 0
    assert report([str(searched), "--format", "json", "-o", str(tmp_path / "report.json")]) == 0
    document = json.loads((tmp_path / "report.json").read_text())
    assert len(document["cases"]) == len(frame) - len(truncated)
    assert document["answers"][0]["sentences"][0].startswith("Best: "), "of every format"
    tables = {table["name"]: table for table in document["tables"]}
    assert len(tables["overview"]["rows"]) == len(frame) - len(truncated)
    trials = pd.DataFrame(tables["search"]["rows"])
    trials.columns = [head["name"] for head in tables["search"]["heads"]]
    rates = [cell["value"] for cell in trials["lr"]]
    assert sorted(rates) == sorted(frame["lr"]), "as numbers"
    rows = read_rows(searched)
    assert not set(read_history(rows)) & {(row.case, 1, False) for row in rows if row.truncated}


def test_a_sweep_trains_a_truncated_case_whole(tmp_path: Path, monkeypatch: Patch) -> None:
    """What was ended early is not done; what was whole is."""
    frame = run(tmp_path, *RANGE, "--samples", "5")
    assert frame["truncated_after"].notna().tolist() == [False, False, False, True, True]
    monkeypatch.setattr(sweep, "print_report", lambda out: None)
    whole, *_, truncated = (row.case for row in read_rows(tmp_path))
    for case, new in ((whole, 0), (truncated, 1)):
        own = ["--seed", "3", "--executor", "fake", "--out", str(tmp_path)]
        assert sweep.main(join_flags(spell_case(case), own)) == 0
        assert len(read_records(tmp_path)) == len(frame) + new
    assert "halving" in json.loads((tmp_path / "config.json").read_text())


# ------------------------------------------------------------------------------------ for real


class Ending(Channel):
    """A parent that lets no more than ``epochs`` be trained."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.rows: list[EpochRow] = []

    def ask(self, message: Message) -> object:
        if isinstance(message, EpochEnded):
            self.rows.append(message.row)
        return END if len(self.rows) == self.epochs else GO_ON


def train(channel: Channel) -> Outcome:
    axes = {"workload": ["models_for_tests:rows"], "device": ["cpu"], "schedule": ["cosine"]}
    axes |= {"batch_size": [16], "lr": [0.3], "epochs": [4], "evaluate": [True]}
    (case,) = grid(axes)
    with torch.random.fork_rng():
        return measure(Job(case, asked_at=time.monotonic(), judged=True), channel)


def test_a_truncated_training_is_the_beginning_of_the_whole() -> None:
    """Under a schedule of all epochs, bit for bit; and what it measured is of what it trained."""

    def forget_times(rows: Sequence[EpochRow]) -> list[EpochRow]:
        return [replace(row, time_s=0.0, eval_time_s=None) for row in rows]

    channel = Ending(2)
    whole, part = train(Channel()), train(channel)
    m = part.measurement
    assert (m.truncated_after, whole.measurement.truncated_after) == (2, None)
    assert forget_times(part.epochs) == forget_times(whole.epochs[:2]) == forget_times(channel.rows)
    assert [s.loss for s in part.steps] == [s.loss for s in whole.steps[:8]]
    assert [s.lr for s in part.steps] == [s.lr for s in whole.steps[:8]]
    assert (m.measured_steps, whole.measurement.measured_steps) == (8, 16)
    assert m.measured_time_s == pytest.approx(sum(row.time_s for row in part.epochs))
    assert m.test_accuracy == part.epochs[1].test_accuracy
    assert m.arithmetic == whole.measurement.arithmetic, "what follows the epochs follows"


@pytest.mark.slow
def test_a_real_search_ends_trials_by_the_metric_that_workers_send(
    tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out"
    flags = "--workload models_for_tests:rows --device cpu --batch-size 16 --epochs 4 --seed 0"
    flags += " --reduction 2 --lr 1e-6 1 --metric test_loss --samples 2"
    assert search.main([*flags.split(), "--out", str(out)]) == 0
    assert "Best: lr 1," in capsys.readouterr().out
    frame, epochs, plain = read_records(out), read_epochs(out), Rungs(read_rule(out))
    ends = frame["truncated_after"].fillna(4).tolist()
    for record, ended_at in zip(frame["record_id"], ends, strict=True):
        losses = epochs[epochs["record_id"] == record]["test_loss"]
        judged = [n for n, loss in enumerate(losses, 1) if plain.judge(n, loss)]
        assert judged[-1] == len(losses) == ended_at
    assert (frame["lr"].tolist(), ends) == ([1, 1e-6], [4, 1])
    steps = read_steps(out).groupby("record_id")["step"].count()
    assert steps[frame["record_id"]].tolist() == [4 * ended_at for ended_at in ends]


# ------------------------------------------------------------------------ of a script of one's own


SCRIPT = """
import os, sys
from pathlib import Path
import bench

rate, momentum, tells, epochs = float(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:]
if "torch" in tells:
    import torch
weight, speed, epoch = 1.0, 0.0, 0
while epoch < float(epochs):
    epoch += 1
    for _ in range(5):
        speed = momentum * speed + weight
        weight -= rate * speed
        bench.step(items=4, loss=weight**2 / 2 if abs(weight) < 1e9 else float("inf"))
    if epoch == 2 and Path("pid").exists():  # of the search, which the third trial of it kills
        Path("trials").open("a").write("x")
        if len(Path("trials").read_text()) == 2:
            os.kill(int(Path("pid").read_text()), 9)
    if "loss" in tells:
        bench.epoch(loss=weight**2 / 2)
    if "shares" in tells:
        bench.epoch(accuracy=1 / (1 + weight**2))
"""
AXES_OF_SCRIPT = ["--lr", "0.01", "0.4", "--vary", "momentum", "0", "0.5", "0.1"]
RULES = "--metric test_loss --reduction 2 --epochs 4 --device cpu --seed 5"


def words_of(folder: Path, tells: str, *flags: str, ends: str = "inf") -> list[str]:
    (folder / "t.py").write_text(SCRIPT)
    command = f"{sys.executable} t.py {{lr}} {{momentum}} {tells} {ends}"
    rules = [*RULES.split(), "--out", str(folder / "out")]
    return join_flags(AXES_OF_SCRIPT, rules, ["--command", command], flags)


def search_script(
    folder: Path, tells: str, *flags: str, ends: str = "inf", rc: int = 0
) -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert search.main(words_of(folder, tells, *flags, ends=ends)) == rc
    return read_records(folder / "out")


@pytest.fixture(scope="module")
def searched_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The search of a script that trains until it is ended."""
    search_script(folder := tmp_path_factory.mktemp("script"), "loss,shares")
    return folder / "out"


@pytest.mark.slow
def test_trials_of_a_script_are_ended_by_what_it_tells(
    searched_script: Path, capsys: Capture
) -> None:
    """Over an axis of the harness and one of its own, by the rule; rows have what was judged."""
    frame, epochs = read_records(searched_script), read_epochs(searched_script)
    plain = Rungs(rule := read_rule(searched_script))
    assert [*rule.trials[0]] == ["lr", "{momentum}"]
    ends = frame["truncated_after"].tolist()
    for record, ended_at in zip(frame["record_id"], ends, strict=True):
        losses = epochs[epochs["record_id"] == record]["test_loss"]
        judged = [n for n, loss in enumerate(losses, 1) if plain.judge(n, loss)]
        assert judged[-1] == len(losses) == ended_at
    assert {1, 4} <= {*ends}
    assert frame["status"].eq("ok").all()
    steps = read_steps(searched_script).groupby("record_id")["step"].max()
    assert steps[frame["record_id"]].le([5 * n - 1 for n in ends]).all(), "none of later epochs"
    trials = find_trials(read_rows(searched_script), read_beside(searched_script, EpochRow), rule)
    assert (trials[0].row.lr, trials[0].row.vary, trials[0].whole) == (0.4, "momentum=0.1", True)
    assert not trials[-1].whole
    assert trials[-1].row.lr == 0.01
    search.print_findings(searched_script, rule, "text")
    output = capsys.readouterr().out
    assert "Best: lr 0.4 · momentum 0.1, test loss " in output
    assert "--vary momentum 0.1 --seed 6 --device cpu --repeats 5" in output
    assert report([str(searched_script)]) == 0
    assert "lr 0.4 · momentum 0.1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_of_a_script_that_was_killed_goes_on(searched_script: Path) -> None:
    """And ends as if it had not been."""
    folder = searched_script.parent / "killed"
    folder.mkdir()
    words = shlex.join([sys.executable, "-m", "bench.search", *words_of(folder, "loss,shares")])
    started = ["sh", "-c", f"echo $$ > pid; exec {words}"]
    variables = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(started, cwd=folder, env=variables, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert 0 < len(read_records(folder / "out")) < 6
    (folder / "pid").unlink()
    columns = ["lr", "vary", "truncated_after", "status", "test_loss", "attempt"]
    frame = search_script(folder, "loss,shares")[columns]
    pd.testing.assert_frame_equal(frame, read_records(searched_script)[columns])


@pytest.mark.slow
def test_trials_of_a_script_are_ranked_beside_those_of_one_torch_alone(
    tmp_path: Path, capsys: Capture
) -> None:
    """Which it has shows when it runs: the first trial is kept, and the next start refuses. Another
    value of --vary may be another Python: that is what was asked."""
    rates = ("--lr", "0.01", "0.02", "0.04", "0.08")
    grid = (*rates, "--epochs", "2", "--vary", "momentum", "0")
    search_script(tmp_path, "loss,torch", *grid, "--samples", "2")
    edit_torch(tmp_path / "out", "1.0")
    for there in (3, 3):
        assert len(search_script(tmp_path, "loss,torch", *grid, rc=2)) == there
        assert "torch was 1.0, now " in capsys.readouterr().err
    frame = search_script(tmp_path, "loss,torch", *grid, "--mix")
    assert frame["torch"].tolist() == ["1.0"] * 2 + [torch.__version__] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tells", "flags", "epochs", "fix"),
    [
        ("nothing", "", None, "the command does not tell it; tell it by bench.epoch(loss=…) after"),
        ("shares", "", 1, "tell it by bench.epoch(loss=…) after each epoch, or give --metric test"),
        ("loss", "--metric test_accuracy", 1, "(accuracy=…) after each epoch, or give --metric te"),
    ],
)
def test_a_metric_that_a_script_does_not_tell_is_said_after_one_trial(
    tells: str, flags: str, epochs: int | None, fix: str, tmp_path: Path, capsys: Capture
) -> None:
    """After its first epoch, if it tells of that."""
    search_script(tmp_path, tells, *flags.split(), ends="3", rc=2)
    (row,) = read_rows(tmp_path / "out")
    assert row.number("truncated_after") == epochs
    error = capsys.readouterr().err.splitlines()[-1]
    assert "is not known of these trials" in error
    assert fix in error
    search_script(tmp_path, tells, *flags.split(), ends="3", rc=2)
    assert capsys.readouterr().err.splitlines()[-1] == error
    assert len(read_rows(tmp_path / "out")) == 1, "none was run to say it again"


@pytest.mark.slow
def test_trials_of_a_script_that_fail_or_diverge_are_rows_beside_the_others(
    tmp_path: Path, capsys: Capture
) -> None:
    flags = ["--lr", "0.4", "1e9", "--vary", "momentum", "0", "none"]
    frame = search_script(tmp_path, "loss", *flags, ends="{epochs}")
    found = {
        (row["lr"], row["vary"]): (row["status"], row["truncated_after"])
        for _, row in frame.iterrows()
    }
    assert found[0.4, "momentum=0"][0] == Status.OK
    assert found[1e9, "momentum=0"] == (Status.DIVERGED, 1)
    failed = frame[frame["status"] == "error"]
    assert failed["vary"].tolist() == ["momentum=none"] * 2
    assert not failed["reason"].str.contains("of 4 epochs").any(), "none began"
    captured = capsys.readouterr()
    assert "Best: lr 0.4 · momentum 0, test loss" in captured.out
    assert "ended after 1 of 4 epochs, diverged: the loss was inf or NaN from step " in captured.err


@pytest.mark.slow
def test_a_script_that_ends_by_itself_is_whole(tmp_path: Path, capsys: Capture) -> None:
    """Whether it is told the number of epochs or not."""
    flags = ["--lr", "0.4", "--vary", "momentum", "0", "0.0", "--grace", "3"]  # as good
    for ends, epochs in (("{epochs}", "4"), ("3", "9")):
        (folder := tmp_path / epochs).mkdir()
        search_script(folder, "loss", *flags, "--epochs", epochs, ends=ends)
        assert not any(row.truncated for row in read_rows(folder / "out"))
        output = capsys.readouterr().out
        assert f"after {ends if ends == '3' else 4} epochs." in output
        assert "epochs were trained where" not in output, "nothing was saved"
        assert output.count(" whole\n") == 2
        assert "did not choose them ({seed} in --command tells them to the script), then" in output


@pytest.mark.slow
def test_a_script_whose_steps_are_seen_is_searched_by_its_one_line(
    tmp_path: Path, capsys: Capture
) -> None:
    example = Path(__file__).parents[2] / "examples" / "epochs.py"
    command = f"{sys.executable} {example} --lr {{lr}} --epochs {{epochs}}"
    flags = "--lr 1e-6 0.05 --epochs 2 --reduction 2 --seed 0 --device cpu"
    words = ["--command", command, *flags.split(), "--out", str(tmp_path / "out")]
    assert search.main(words) == 0
    assert "Best: lr 0.05, test accuracy " in capsys.readouterr().out
    frame = read_records(tmp_path / "out")
    assert (frame["lr"].tolist(), frame["truncated_after"].tolist()[1:]) == ([0.05, 1e-6], [1])
    assert frame["steps_per_epoch"].eq(50).all()


def test_rates_of_a_script_are_drawn_from_the_range_that_is_given() -> None:
    command = ["--command", "python t.py {lr} {batch_size}", "--batch-size", "8", "16"]
    given = ["--device", "cpu", "--epochs", "3", "--lr", "0.01..1", "--samples", "6"]
    asked = parse_arguments([*command, *given])
    assert len({case.lr for case in asked.cases}) == 6
    assert all(0.01 <= case.lr <= 1 and case.epochs == 1 for case in asked.cases)
    assert [*asked.halving.trials[0]] == ["batch_size", "lr"]


@pytest.mark.parametrize(
    ("places", "flags", "expected"),
    [
        ("{lr}", "--lr 0.01..1", "the --command has no {epochs}; give --epochs N"),
        ("{epochs} {lr}", "--lr 0.1 1 --metric train_accuracy", "a --command does not tell it"),
        ("{epochs} {lr}", "--epochs 3", "{lr} has no value; give --lr VALUE"),
        ("{epochs}", "--lr 0.01..1", "--lr is given, but the command has no {lr}"),
        ("{epochs} {x}", "--vary x 1", "another axis or --vary several values"),
        ("{epochs} {samples}", "--vary samples 1 2", "this is the name of a flag"),
        ("{epochs} {batch_size}", "--batch-size auto", "only bench.sweep looks for the largest"),
        ("{epochs} {lr}", "--lr 1 2 --evaluate", "--evaluate is given, but the command has no"),
        ("{epochs} {lr}", "--lr 1 2 --command t.py", "trials of one command; give one"),
    ],
)
def test_commands_that_cannot_be_searched_are_one_line(
    places: str, flags: str, expected: str, capsys: Capture
) -> None:
    command = ["--command", f"python t.py {places}"]
    assert search.main(["--device", "cpu", *command, *flags.split()]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
