"""`bench.advise`: its policy on known grids, its command by the fake and for real."""

from __future__ import annotations

import json
import math
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_executor as fake
import numpy as np
import pytest
from advice_for_tests import ITEMS, Grid, advise, find_regret, follow, list_grids
from hypothesis import given
from hypothesis import strategies as st
from pandas import read_csv

from bench.advise.__main__ import main, parse_budget
from bench.advise.answer import Answer, describe_progress
from bench.advise.settings import believe, guess, list_changes, make_setting, relate, strip
from bench.advise.standing import (
    LEARN_PART,
    LEARN_SEEDS,
    MOST_REPEATS,
    Budget,
    Result,
    Space,
    Standing,
    choose,
    learn,
)
from bench.case import Case
from bench.environment.host import describe_host
from bench.environment.machine import Platform
from bench.errors import UsageError
from bench.flags import join_flags
from bench.limits import NEAR
from bench.record import Outcome, Status
from bench.store.reader import read_records
from bench.sweep import __main__ as sweep
from bench.verdict import GUESSING
from bench.worker.messages import Job

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

GRIDS = {grid.name: grid for grid in list_grids()}

Loss = Callable[[Case, int], float]


def search(
    grid: Grid, budget_s: float, loss: Loss | None = None, **space: Any
) -> tuple[list[Result], Standing]:
    """What is run on a grid, noise of which repeats by its seed, and what that shows."""
    chance, spent = random.Random(1), 0.0
    settings = [grid.now, *(setting for setting in grid.times if setting != grid.now)]
    about = {"judged": loss is not None, "items": ITEMS, **space}
    what = Space(settings, [guess(setting) for setting in settings], **about)
    results: list[Result] = []
    while case := choose(Standing(results, what), Budget(budget_s, budget_s - spent)):
        result = grid.run(case, chance)
        if loss and result.learns:
            seed = sum(run.case == case for run in results)
            result = replace(result, seed=seed, loss=loss(result.setting, seed))
        results.append(result)
        spent += result.took_s
    return results, Standing(results, what)


def measure(times: Mapping[Case, Sequence[float]], **space: Any) -> Standing:
    """What runs of some settings show, the first of which is used now."""
    known = [
        Result(setting, Status.OK, 9, time_s=time, value=time)
        for setting, runs in times.items()
        for time in runs
    ]
    return Standing(known, Space([*times], [0.0] * len(times), **{"judged": False, **space}))


def answer(standing: Standing, budget_s: float = 600) -> Answer:
    return Answer(standing, {}, {}, "python -m bench.advise", budget_s)


# ------------------------------------------------------------------------------- how good it is


@pytest.mark.parametrize(
    "name", [n for n, grid in GRIDS.items() if len(grid.times) > 10 and grid.noise < 0.1]
)
def test_a_quarter_of_the_grid_s_time_finds_what_is_within_a_tenth(name: str) -> None:
    """In most searches, and more often than settings in a random order: what runs cost is luck, and
    one search of twelve finds little. Runs may take three times as long as is expected. Of six
    settings a quarter would be one or two; where runs differ by 10 %, it is too few."""
    grid = GRIDS[name]
    budget = grid.whole_s / 4
    near, by_chance = (
        sum(find_regret(grid, way(grid, budget, seed)[0]) <= NEAR for seed in range(7))
        for way in (advise, follow)
    )
    assert near >= max(4, by_chance)


def test_of_batches_within_a_tenth_the_smallest_is_advised() -> None:
    times = {Case(batch_size=n): [60 * gain] * 3 for n, gain in ((128, 1.3), (256, 1.08), (512, 1))}
    standing = measure(times)
    assert standing.advised == Case(batch_size=256)
    first, rule, *_ = answer(standing).write()
    assert first.startswith("Train with fp32, batch size 256, of 3 settings measured: 1.20× (")
    lowest = "that of fp32, batch size 512, 1.08× ("
    assert rule.startswith(f"It has the smallest batch within 10 % of the lowest time, {lowest}")
    assert measure(times, aim="time").advised == Case(batch_size=512)


def test_it_is_the_rule_of_reports() -> None:
    """On the recorded cards, from their true times."""
    for name, grid in GRIDS.items():
        timed = {s: [t] * 5 for s, t in grid.times.items() if t}
        if not name.startswith(("planted", "shared")):
            chosen = measure({grid.now: timed.pop(grid.now), **timed}).advised
            assert chosen
            assert chosen.batch_size == grid.right.batch_size


@pytest.mark.parametrize(
    ("noise", "budget_s", "sizes"),
    [(0.01, 400, (128,)), (0.05, 400, (128,)), (0.01, 900, (64, 128, 256))],
)
def test_of_equal_settings_nothing_but_the_batch_size_changes(
    noise: float, budget_s: float, sizes: tuple[int, ...]
) -> None:
    """But for the batch size, of which the smallest is advised: however lucky another was, anything
    else is changed in at most one search of ten."""
    now = Case(batch_size=128)
    precisions, switches = ("fp32", "tf32", "fp16", "bf16-amp"), (False, True)
    times: dict[Case, float | None] = {
        make_setting(now, {"precision": name, "channels_last": last, "batch_size": size}): 60.0
        for name in precisions
        for last in switches
        for size in sizes
    }
    kept = 0
    for seed in range(20):
        grid = Grid("", now, times, noise=noise)
        chosen, _ = advise(grid, budget_s, seed)
        kept += list_changes(chosen, now) in ([], ["batch_size"])
    assert kept >= 18


def test_what_is_not_certain_is_said() -> None:
    now, noisy = Case(batch_size=128), Case(batch_size=128, channels_last=True)
    standing = measure({now: [100, 104, 97, 101], noisy: [88, 104, 92]})
    assert standing.best == noisy
    assert standing.advised == now
    first, rule, unsure, *_ = answer(standing).write()
    assert first == "Stay with fp32, batch size 128, of 2 settings measured."
    assert rule.startswith("It changes less than fp32, batch size 128, channels last on, 1.06× (")
    assert rule.endswith(") as fast as it: no more than chance or 2 %.")
    assert unsure.startswith(
        "Not certain: fp32, batch size 128, channels last on may be better, by"
    )


def test_the_progress_and_the_answer_say_one_number() -> None:
    """That of the runs: the belief halves what one lucky run shows."""
    now, lucky = Case(batch_size=128), Case(batch_size=64)
    standing = measure({now: [100], lucky: [43]})
    gain = re.search(r"2.33× \(.*?\) as fast as", next(answer(standing).write()))
    assert gain
    said = f"so far: fp32, batch size 64, {gain[0]} now; 9 s left"
    assert describe_progress(standing, 9) == said


def test_a_change_that_gains_nothing_is_not_advised() -> None:
    """The larger batch is faster; the precision and the switch beside it do nothing."""
    now = Case()
    times: dict[Case, float | None] = {}
    for size in (128, 256):
        for precision in ("fp32", "bf16-amp"):
            for last in (False, True):
                setting = replace(now, batch_size=size, precision=precision, channels_last=last)
                times[setting] = 60.0 if size == 128 else 30.0
    _, standing = search(Grid("", now, times, noise=0.001), 500)
    assert standing.advised == replace(now, batch_size=256)


# -------------------------------------------------------------------------- what it runs, in turn


def test_it_measures_the_present_setting_first_and_repeats_what_matters() -> None:
    grid = GRIDS["H100, DPN-92"]
    results, standing = search(grid, 450)
    runs = [strip(result.case) for result in results]
    assert runs[0] == grid.now
    repeated = {setting for setting in runs if runs.count(setting) > 1}
    assert repeated >= {grid.now, standing.best}
    assert max(map(runs.count, runs)) <= MOST_REPEATS
    assert runs[: len({*runs})] == [*dict.fromkeys(runs)], "repeats come last"
    value, low, high = standing.compare(standing.best or grid.now, grid.now)
    assert low < value < high < 0.5


def test_no_batch_is_tried_above_one_that_did_not_fit() -> None:
    grid = GRIDS["planted: each by itself"]
    results, _ = search(grid, grid.whole_s / 2)
    refused: dict[tuple[str, str], int] = {}
    for result in results:
        setting = result.setting
        # what does not fit as it is does not compiled either, and not the other way round
        for compiled in {"off", setting.compile}:
            assert setting.batch_size < refused.get((setting.precision, compiled), 10**6)
        if result.status is Status.OOM:
            refused[setting.precision, setting.compile] = setting.batch_size
    assert refused, "the grid has walls"


def test_no_batch_is_tried_that_the_line_of_memory_says_does_not_fit() -> None:
    """1 GiB, and 10 MiB an image: 5 GiB hold 409 images."""
    now = Case(batch_size=64)
    sizes = (32, 64, 128, 256, 512, 1024)
    times: dict[Case, float | None] = {replace(now, batch_size=n): 60 / n for n in sizes}
    settings = [now, *(setting for setting in times if setting != now)]
    space = Space(settings, [0.0] * len(sizes), "time", room_bytes=5 * 2**30, judged=False)
    results: list[Result] = []
    while case := choose(Standing(results, space), Budget(1000, 1000 - 7 * len(results))):
        used, time = 2**30 + case.batch_size * 10 * 2**20, 6000 / case.batch_size
        results.append(Result(case, Status.OK, 7.0, time_s=time, value=time, room_bytes=used))
    assert {result.case.batch_size for result in results} <= {32, 64, 128, 256}
    assert Standing(results, space).best == replace(now, batch_size=256)


def test_a_search_ends_where_nothing_is_promised() -> None:
    """Though the budget would do for all."""
    grid = GRIDS["planted: nothing helps"]
    _, standing = search(grid, 100 * grid.whole_s)
    assert len(standing.tried) < len(grid.times) / 2


@given(st.integers(0, 3), st.floats(1, 2000))
def test_a_budget_is_overdrawn_by_its_last_run_at_most(number: int, budget_s: float) -> None:
    """Which may take longer than is expected."""
    grid = list(GRIDS.values())[number]
    results, _ = search(grid, budget_s)
    assert sum(result.took_s for result in results[:-1]) <= budget_s


@pytest.mark.parametrize(
    ("epoch_s", "batch_size", "part", "takes_s"),
    [
        (5000.0, 16, 0.0026, 10 + 5000 * (0.0026 + 6 * 16 / ITEMS)),  # 8 steps
        (5000.0, 128, 0.02, 10 + 5000 * (0.02 + 6 * 128 / ITEMS)),  # and 6 to warm up
        (200.0, 128, 0.05, 10 + 10 + 200 * 6 * 128 / ITEMS),  # 10 s
        (None, 128, 0.02, 10.0),  # the shortest, where nothing is known
    ],
)
def test_a_run_of_a_long_epoch_is_short(
    epoch_s: float | None, batch_size: int, part: float, takes_s: float
) -> None:
    """Of an epoch as much as takes 10 s, and at least 8 steps; repeats measure as much."""
    now = Case(batch_size=batch_size)
    space = Space([now], [0.0], epoch_s=lambda setting: epoch_s, items=ITEMS)
    case = Standing([], space).measure(now)
    assert case.fraction == part
    assert Standing([], space).predict_s(case) == pytest.approx(takes_s)
    known = [Result(case, Status.OK, 20, time_s=200.0, value=200.0)]
    known += [Result(case, Status.OK, 30, time_s=1.0, value=1.0)]
    again = Standing(known, space).measure(now)
    assert again.fraction == 0.05
    assert Standing(known, space).predict_s(case) == 25


def test_what_follows_from_a_change_is_no_change() -> None:
    assert list_changes(Case(precision="fp16", loss_scale=128.0), Case()) == ["precision"]
    assert list_changes(Case(loss_scale=64.0), Case(loss_scale=128.0)) == ["loss_scale"]


# ------------------------------------------------------------------------------------- learning


def learns_worse(setting: Case, seed: int) -> float:
    """By 5 %, in plain fp16."""
    return (2.1 if setting.precision == "fp16" else 2.0) + 0.001 * seed


def test_what_learns_worse_is_not_advised() -> None:
    grid = GRIDS["H100, DPN-92"]
    results, standing = search(grid, 5000, learns_worse)
    assert {setting.precision for setting in standing.rejected} == {"fp16"}
    assert standing.advised
    assert standing.advised.precision != "fp16"
    said = "\n".join(answer(standing).write())
    learnt = [result.case for result in results if result.learns]
    at = f"over 20 % of an epoch at batch size {grid.now.batch_size}"
    assert f"Its training loss {at}: equivalent: ratio 1.0000, " in said
    assert "over 5 paired seeds, within the margin of 1 %." in said
    assert re.search("Not advised: .*fp16, .* \\(learns worse: ratio 1.05", said)
    assert {learnt.count(case) for case in learnt} == {LEARN_SEEDS}
    # a larger batch takes fewer steps: learning is compared after equal ones
    assert {(case.batch_size, case.fraction) for case in learnt} == {
        (grid.now.batch_size, LEARN_PART)
    }


def test_networks_that_guess_have_not_learnt_as_well() -> None:
    grid, guess = GRIDS["H100, DPN-92"], math.log(10)
    _, standing = search(grid, 5000, lambda setting, seed: guess, classes=10)
    assert GUESSING in "\n".join(answer(standing).write())


def test_what_could_not_be_compared_is_said_and_what_it_would_take() -> None:
    grid = GRIDS["H100, DPN-92"]
    _, standing = search(grid, 60, learns_worse)
    found = answer(standing, 60)
    said = list(found.write())
    assert any("Whether it learns as well was not compared: 5 seeds" in line for line in said)
    assert any(line.startswith("Batches of ") for line in said)
    assert said[-1] == "Next: python -m bench.advise --budget 2m"


def test_seeds_are_begun_where_all_fit_and_then_finished_one_by_one() -> None:
    """Fewer of them would say nothing."""
    now, other = Case(batch_size=128), Case(batch_size=128, channels_last=True)
    standing = measure({now: [100.0] * MOST_REPEATS, other: [50.0] * MOST_REPEATS}, judged=True)

    def find_next(begun: int, left_s: float) -> Case | None:
        """With so many seeds of the two, in turn."""
        runs = [
            Result(learn((now, other)[n % 2]), Status.OK, 30, seed=n // 2, loss=2.0)
            for n in range(begun)
        ]
        return choose(Standing([*standing.known, *runs], standing.space), Budget(1000, left_s))

    assert find_next(0, 1000) == learn(now)
    assert find_next(0, 40) is None
    assert find_next(3, 40) == learn(other)
    assert find_next(2 * LEARN_SEEDS, 1000) is None


def test_what_diverges_is_named_and_not_advised() -> None:
    now = Case(batch_size=128)
    fast = make_setting(now, {"precision": "fp16"})
    results = [
        Result(now, Status.OK, 10, 5, 60.0, 60.0),
        Result(fast, Status.DIVERGED, 10, 5, 20.0, 20.0),
    ]
    found = answer(Standing(results, Space([now, fast], [0.0, 0.0], judged=False)))
    said = "\n".join(found.write())
    assert "Not advised: fp16, batch size 128 (the loss became inf or NaN)." in said
    assert found.advised is None


# --------------------------------------------------------------------------------------- belief


def test_belief_is_that_of_the_textbook() -> None:
    """Against the same posterior by plain inversion in float64."""
    settings = [Case(batch_size=n, compile=c) for n in (64, 128, 256) for c in ("off", "default")]
    covariance = relate(settings)
    seen = {0: (1.0, 0.05), 3: (0.4, 0.02)}
    found = believe(covariance, [0.0] * 6, seen)
    whole = covariance + 100.0
    inverse = np.linalg.inv(whole[np.ix_([0, 3], [0, 3])] + np.diag([0.05**2, 0.02**2]))
    across = whole[:, [0, 3]]
    assert found.mean == pytest.approx(across @ inverse @ np.array([1.0, 0.4]), abs=1e-6)
    left = np.diag(whole - across @ inverse @ across.T)
    assert found.error == pytest.approx(np.sqrt(left), rel=1e-4)
    assert np.linalg.eigvalsh(covariance).min() > -1e-9


def test_an_expected_gain_is_the_mean_of_what_is_below_the_best() -> None:
    settings = [Case(), Case(compile="default")]
    found = believe(relate(settings), [0.0, -0.1], {0: (0.0, 0.01)})
    chance = np.random.default_rng(0)
    drawn = found.mean[1] + found.error[1] * chance.standard_normal(400_000)
    expected = np.maximum(0.0 - drawn, 0).mean()
    assert found.expect_gain([0.0, 0.0])[1] == pytest.approx(expected, rel=0.02)


# -------------------------------------------------------------------------------- its command line

FAKE = ["--executor", "fake", "--device", "cuda", "--dataset", "synthetic", "--model", "dpn92"]
FEW = ["--precision", "fp32", "fp16", "--batch-size", "128", "256", "--compile", "off"]
FIXED = ["--cuda-graphs", "off", "--channels-last", "off", "--cudnn-benchmark", "off"]


@pytest.fixture(autouse=True)
def _plain_fake(monkeypatch: Patch) -> None:
    monkeypatch.delenv(fake.ANSWERS, raising=False)
    monkeypatch.delenv(fake.MEMORY, raising=False)


def run(out: Path, *flags: str, rc: int = 0) -> None:
    words = join_flags(FAKE, FEW, FIXED, flags, ["--out", str(out)])
    assert main(words) == rc


def test_the_command_says_what_to_train_with(tmp_path: Path, capsys: Capture) -> None:
    """The fake takes 10 s and 1000 s over the batch size, in any precision."""
    run(tmp_path, "--budget", "1m")
    told = capsys.readouterr()
    first, *rest = told.out.splitlines()
    assert first.startswith("Train with fp32, batch size 256, of 4 settings measured: 1.28× (")
    assert "as fast as what you have now (fp32, batch size 128), with 200 % of its memory." in first
    assert any("Batches of 256 take fewer steps an epoch" in line for line in rest)
    assert "so far: fp32, batch size 256, 1.28×" in told.err
    (whole,) = (line for line in rest if line.startswith("Measure it whole: "))
    again = shlex.split(whole)[6:]
    flags = "--model dpn92 --dataset synthetic --device cuda --batch-size 128 256"
    assert any(f"python -m bench.search {flags} compares them" in line for line in rest)
    rows = read_records(tmp_path)
    assert set(rows["status"]) == {"ok"}

    # the same command has nothing left to measure, and says the same
    run(tmp_path, "--budget", "1m")
    assert capsys.readouterr().out.splitlines()[0] == first
    assert len(read_records(tmp_path)) == len(rows)
    words = join_flags(again, ["--executor", "fake", "--out", str(tmp_path / "whole")])
    assert sweep.main(words) == 0
    (row,) = read_records(tmp_path / "whole").to_dict("records")
    assert (row["precision"], row["batch_size"], row["fraction"]) == ("fp32", 256, 1)


def test_doubts_are_of_the_runs_that_were_compared(tmp_path: Path, capsys: Capture) -> None:
    """Of a run with which another program computed, of looks, and of rows that are not compared."""
    run(tmp_path, "--budget", "1m")
    told = capsys.readouterr().out
    rows = read_records(tmp_path)
    plain = (rows["precision"] == "fp32") & (rows["until"] == "0.01")
    compared = rows["record_id"][plain].tolist()
    assert "Doubts about" not in told

    lines = read_csv(tmp_path / "records.csv", dtype=str, keep_default_na=False)
    ours = lines["record_id"].isin(compared[:1])
    others = (lines["precision"] == "fp16") & (lines["batch_size"] == "128")
    lines.loc[ours | others, "other_cores"] = "1.5"
    lines.to_csv(tmp_path / "records.csv", index=False)
    run(tmp_path, "--budget", "1m")
    said = "Doubts about the runs compared"
    told = capsys.readouterr().out
    assert f"{said}: 1 shared; python -m bench.report {tmp_path} says" in told
    run(tmp_path, "--budget", "1m", "--format", "json")
    assert json.loads(capsys.readouterr().out)["doubts"] == {"shared": 1}


def test_json_has_the_setting_and_what_is_known_of_it(tmp_path: Path, capsys: Capture) -> None:
    run(tmp_path, "--format=json", "--now=precision=fp16,batch_size=128", "--loss-scale=512")
    told = json.loads(capsys.readouterr().out)
    assert told["setting"]["batch_size"] == "256"
    assert (told["now"]["precision"], told["now"]["loss_scale"]) == ("fp16", "512")
    assert told["ratio"] == pytest.approx((10 + 1000 / 256) / (10 + 1000 / 128))
    assert told["epoch_time_s"] == pytest.approx(10 + 1000 / 256)
    assert told["memory_share"] == 2.0
    assert told["learning"] is None
    assert told["sentences"][0].startswith(
        "Train with fp16, batch size 256, of 4 settings measured: "
    )
    rows = read_records(tmp_path)
    assert set(rows["loss_scale"][rows["precision"] == "fp32"]) == {""}, "that of fp16 alone"


@pytest.mark.parametrize(
    ("answers", "flags", "said"),
    [
        ("precision=fp32:oom precision=fp16:error", "", "no setting could be measured."),
        ("", "--budget 0.01s", "only fp32, batch size 128 was measured."),
        ("", "--for energy", "the energy of an epoch is not measured"),  # the fake has none
    ],
)
def test_where_too_little_was_measured_there_is_no_answer(
    answers: str, flags: str, said: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv(fake.ANSWERS, answers)
    run(tmp_path, *flags.split(), rc=3)
    assert capsys.readouterr().out.startswith(f"No advice: {said}")
    if flags:
        assert len(read_records(tmp_path)) == 1, "no more are made"


def test_energy_is_that_of_whole_epochs(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Though parts of unlike length are measured."""
    plain = fake.FakeExecutor.run

    def spend(self: Any, job: Job, *heard: Any) -> Outcome:
        outcome = plain(self, job, *heard)
        m = outcome.measurement
        m.measured_time_s = job.case.fraction * m.epoch_time_s
        m.energy_j = 300 * m.measured_time_s / (2 if job.case.precision == "fp16" else 1)
        return outcome

    monkeypatch.setattr(fake.FakeExecutor, "run", spend)
    run(tmp_path, "--for", "energy", "--format", "json")
    told = json.loads(capsys.readouterr().out)
    assert (told["setting"]["precision"], told["setting"]["batch_size"]) == ("fp16", "256")
    assert told["ratio"] == pytest.approx((10 + 1000 / 256) / (10 + 1000 / 128) / 2)


def test_memory_can_be_what_counts(tmp_path: Path, capsys: Capture) -> None:
    """The fake takes a MiB an image."""
    run(tmp_path, "--for", "memory", "--batch-size", "64", "128")
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "Train with fp32, batch size 64, of 4 settings measured: 50 % of the memory"
    )


def test_a_precision_that_would_be_emulated_is_not_tried_unasked(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A CPU that has no such instructions may still be faster in it: on one, 1.57 times."""
    examine, answer = fake.FakeExecutor.examine, Platform(describe_host(), bf16_native=False)

    def examine_old(self: fake.FakeExecutor, lane: Any, devices: Any, *rest: Any) -> Any:
        found = examine(self, lane, devices, *rest)
        return replace(found, devices=dict.fromkeys(devices, answer))

    monkeypatch.setattr(fake.FakeExecutor, "examine", examine_old)
    words = [*FAKE[:2], *FAKE[4:], "--device", "cpu", "--compile", "off", "--batch-size", "128"]
    assert main([*words, "--budget", "1m", "--out", str(tmp_path)]) in (0, 3)
    said = " ".join(capsys.readouterr().out.split())
    tries = "--precision fp32 bf16-amp tries it"
    assert f"bf16-amp (this CPU has no bf16 arithmetic; {tries})" in said
    assert set(read_records(tmp_path)["precision"]) == {"fp32"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--budget", "soon"], "--budget 'soon': give a time above 0, such as 90s, 10m or 1h"),
        (["--budget", "0s"], "--budget '0s': give a time above 0"),
        (["--now", "precison=fp16"], "--now 'precison=fp16': give AXIS=VALUE; did you mean"),
        (["--for", "speed"], "--for 'speed'"),
        (["--batch-size", "32..auto"], "--batch-size 32..auto: give numbers"),
        (["--until", "1%"], "--until: bench.advise does not take it, because it decides"),
        (["--lanes", "2"], "--lanes: bench.advise measures one case at a time"),
        (
            ["--precision=fp32", "--compile=off", "--channels-last=off", "--batch-size=64"],
            "flags fix all that bench.advise tries; leave one out, or give it several values",
        ),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: Capture
) -> None:
    run(tmp_path / "out", *flags, rc=2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "out").exists()


def test_a_budget_is_a_time() -> None:
    assert [parse_budget("--budget", text) for text in ("90s", "10m", "1.5 h")] == [90, 600, 5400]
    with pytest.raises(UsageError, match="--budget"):
        parse_budget("--budget", "-1s")


@pytest.mark.slow
def test_advice_for_a_network_of_one_s_own(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Real training, of some seconds: an answer, rows that say how they were measured."""
    for most in ("MOST_REPEATS", "MIN_REPEATS"):
        monkeypatch.setattr(f"bench.advise.standing.{most}", 1)
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
    assert (rows["until"] != "").all()
    assert math.isfinite(rows["epoch_time_s"].min())
