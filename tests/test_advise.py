"""`bench.advise`: its policy on known grids, its command by the fake and for real."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import fake_executor as fake
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pandas import read_csv

from bench.advise.__main__ import main
from bench.advise.answer import Answer, describe_progress
from bench.advise.belief import believe, guess, relate
from bench.advise.options import parse_budget
from bench.advise.policy import MOST_REPEATS, Budget, choose
from bench.advise.space import make_setting
from bench.advise.standing import (
    LEARN_PART,
    LEARN_SEEDS,
    Aim,
    Result,
    Space,
    Standing,
    Trial,
    list_changes,
)
from bench.case import Case
from bench.environment.host import describe_host
from bench.environment.machine import Platform
from bench.errors import UsageError
from bench.flags import join_flags
from bench.record import Status
from bench.store.reader import read_records
from bench.verdict import GUESSING, UNCHECKED
from benchmarks.advice import Grid, advise, find_regret, follow, list_grids

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

GRIDS = {grid.name: grid for grid in list_grids()}

Loss = Callable[[Case, int], float]


def search(
    grid: Grid, budget_s: float, loss: Loss | None = None, **space: Any
) -> tuple[list[Result], Standing]:
    """What the policy runs on a grid, noise of which repeats by its seed, and what that shows."""
    chance, spent, settings = random.Random(1), 0.0, list(grid.times)
    prior = [guess(setting) for setting in settings]
    what = Space(grid.now, settings, prior, **{"judged": loss is not None} | space)
    results: list[Result] = []
    while trial := choose(Standing(results, what), Budget(budget_s, budget_s - spent)):
        result = grid.run(trial, chance)
        if loss and trial.aim is Aim.LEARN:
            seed = trial.repeat - 1
            result = replace(result, seed=seed, loss=loss(trial.setting, seed))
        results.append(result)
        spent += result.took_s
    return results, Standing(results, what)


def answer(standing: Standing, budget_s: float = 600) -> Answer:
    return Answer(standing, "time", {}, {}, "python -m bench.advise", budget_s)


# ------------------------------------------------------------------------------- how good it is


@pytest.mark.parametrize(
    "name", [n for n, grid in GRIDS.items() if len(grid.times) > 10 and grid.noise < 0.1]
)
def test_a_quarter_of_the_grid_s_time_finds_what_is_within_three_percent(name: str) -> None:
    """In most searches, and better than the grid in its order or in a random one: what runs cost is
    luck, and one search of twelve finds little. Runs may take three times as long as is expected.
    Of six settings a quarter would be one or two; where runs differ by 10 %, it is too few to
    advise a change."""
    grid = GRIDS[name]
    budget = grid.whole_s / 4
    chosen = [advise(grid, budget, seed)[0] for seed in range(7)]
    regret = median(find_regret(grid, case) for case in chosen)
    assert regret < max(0.03, 1.5 * grid.noise)
    both = [follow(grid, budget, seed, mix) for seed in range(4) for mix in (False, True)]
    assert regret <= median(find_regret(grid, case) for case in both)


@pytest.mark.parametrize(
    ("noise", "budget_s", "sizes"),
    [(0.01, 400, (128,)), (0.05, 400, (128,)), (0.1, 60, (64, 128, 256, 512)), (0.1, 100, (128,))],
)
def test_of_equal_settings_the_present_one_stays_the_advice(
    noise: float, budget_s: float, sizes: tuple[int, ...]
) -> None:
    """However lucky another was: a change is advised in at most one search of ten."""
    now = Case(batch_size=128)
    precisions, switches = ("fp32", "tf32", "fp16", "bf16-amp"), (False, True)
    times: dict[Case, float | None] = {
        make_setting(now, {"precision": name, "channels_last": last, "batch_size": size}): 60.0
        for name in precisions
        for last in switches
        for size in sizes
    }
    changed = 0
    for seed in range(20):
        grid = Grid("", now, times, noise=noise, start_s=6.0 + seed / 100)
        chosen, _ = advise(grid, budget_s, seed)
        changed += chosen != now
    assert changed <= 2


def test_what_is_seen_to_be_better_is_advised_beside_what_may_be_better_still() -> None:
    now, sure, unsure = Case(batch_size=128), Case(batch_size=64), Case(batch_size=32)
    times = {now: [100, 104, 97, 101], sure: [80, 83, 79, 81], unsure: [66, 92, 70]}
    known = [
        Result(Trial(setting, Aim.MEASURE, n), Status.OK, 9, time_s=time, value=time)
        for setting, runs in times.items()
        for n, time in enumerate(runs, 1)
    ]
    standing = Standing(known, Space(now, list(times), [0.0] * 3, judged=False))
    assert standing.best == unsure
    assert standing.advised == sure
    lines = list(answer(standing).write())
    assert lines[0].startswith("Train with fp32, batch size 64: 1.24× (")
    assert any("Not certain: fp32, batch size 32 may be better, by up to" in one for one in lines)


def test_of_one_run_each_the_progress_and_the_answer_say_one_number() -> None:
    """The belief halves what one lucky run shows; and that run does not differ from itself."""
    now, lucky = Case(batch_size=128), Case(batch_size=64)
    known = [
        Result(Trial(setting, Aim.MEASURE), Status.OK, 9, time_s=time, value=time, error=0.4)
        for setting, time in ((now, 100), (lucky, 43))
    ]
    standing = Standing(known, Space(now, [now, lucky], [0.0, 0.0], judged=False))
    gain = "fp32, batch size 64, 2.3×"
    assert describe_progress(standing, 9) == f"best so far: {gain}; 9 s left"
    first, *rest = answer(standing).write()
    assert first.startswith("Stay with fp32, batch size 128: the one other setting measured, ")
    assert f"{gain.replace('64, ', '64, has ')} the speed" in first
    unsure = "fp32, batch size 64 may be better, by how much is not known from 1 run"
    assert any(f"Not certain: {unsure}." in line for line in rest)


def test_where_the_loader_is_the_limit_its_workers_come_next() -> None:
    """And where it is not, the precision does."""
    now = Case(batch_size=128, loader="torch")
    settings = [
        make_setting(now, {"workers": workers, "precision": precision})
        for workers in (0, 2, 4)
        for precision in ("fp32", "bf16-amp")
    ]
    space = Space(now, settings, [guess(setting) for setting in settings], judged=False)

    def find_next(loading_s: float) -> Case:
        first = Result(
            Trial(now, Aim.LOOK), Status.OK, 20, time_s=60, value=60, loading_s=loading_s
        )
        trial = choose(Standing([first], space), Budget(600, 580))
        assert trial is not None
        return trial.setting

    assert find_next(55).workers == 4
    assert find_next(2).precision == "bf16-amp"


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
    assert standing.best == replace(now, batch_size=256)


# -------------------------------------------------------------------------- what it runs, in turn


def test_it_looks_at_the_present_setting_first_and_repeats_what_matters() -> None:
    grid = GRIDS["H100, DPN-92"]
    results, standing = search(grid, 450)
    trials = [result.trial for result in results]
    assert trials[0] == Trial(grid.now, Aim.LOOK)
    measured = [trial for trial in trials if trial.aim is Aim.MEASURE]
    assert {trial.setting for trial in measured} >= {grid.now, standing.best}
    assert trials.index(measured[0]) == len({trial.setting for trial in trials})
    assert len(set(trials)) == len(trials), "a run is made once"
    ratio = standing.compare(standing.best or grid.now)
    assert ratio.low
    assert ratio.high
    assert ratio.low < ratio.high < 0.5


def test_no_batch_is_tried_above_one_that_did_not_fit() -> None:
    grid = GRIDS["planted: each by itself"]
    results, _ = search(grid, grid.whole_s / 2)
    refused: dict[tuple[str, str], int] = {}
    for result in results:
        setting = result.trial.setting
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
    space = Space(now, list(times), [0.0] * len(sizes), room_bytes=5 * 2**30, judged=False)
    results: list[Result] = []
    while trial := choose(Standing(results, space), Budget(1000, 1000 - 7 * len(results))):
        size = trial.setting.batch_size
        time = 60 / size * 100
        used = 2**30 + size * 10 * 2**20
        measured = Result(trial, Status.OK, 7.0, time_s=time, value=time, room_bytes=used)
        results.append(measured)
    assert {result.trial.setting.batch_size for result in results} <= {32, 64, 128, 256}
    assert Standing(results, space).best == replace(now, batch_size=256)


@given(st.integers(0, 3), st.floats(1, 2000))
def test_a_budget_is_overdrawn_by_its_last_run_at_most(number: int, budget_s: float) -> None:
    """Which may take longer than is expected."""
    grid = list(GRIDS.values())[number]
    results, _ = search(grid, budget_s)
    assert sum(result.took_s for result in results[:-1]) <= budget_s


@pytest.mark.parametrize(
    ("epoch_s", "batch_size", "looked", "measured", "takes_s"),
    [
        (5000.0, 16, 0.0026, 0.004, 40.0),  # 8 steps; 20 s
        (5000.0, 128, 0.02, 0.02, 76.8 + 100),  # 8 steps, and 6 to warm up
        (None, 128, 0.02, 0.02, 10.0),  # the shortest, where nothing is known
    ],
)
def test_a_run_of_a_long_epoch_is_short(
    epoch_s: float | None, batch_size: int, looked: float, measured: float, takes_s: float
) -> None:
    """Of an epoch as much as takes 10 s, or 20, and at least 8 steps; repeats measure as much."""
    now = Case(batch_size=batch_size)
    space = Space(now, [now], [0.0], epoch_s=lambda setting: epoch_s, items=50_000)
    first = Trial(now, Aim.LOOK)
    assert Standing([], space).find_case(first).fraction == looked
    trial = Trial(now, Aim.MEASURE)
    known = [Result(first, Status.OK, 20, time_s=epoch_s, value=epoch_s)]
    assert Standing(known, space).find_case(trial).fraction == measured
    assert Standing(known, space).predict_s(trial) == pytest.approx(takes_s)
    if epoch_s:
        known.append(Result(trial, Status.OK, 20, time_s=1.0, value=1.0))
        assert Standing(known, space).find_case(replace(trial, repeat=2)).fraction == measured


def test_what_follows_from_a_change_is_no_change() -> None:
    assert list_changes(Case(precision="fp16", loss_scale=128.0), Case()) == ["precision"]
    assert list_changes(Case(loss_scale=64.0), Case(loss_scale=128.0)) == ["loss_scale"]


def test_a_look_and_a_measurement_that_differ_are_noise() -> None:
    """What was only looked at counts no more in its time, but it does in how much runs differ."""
    now, other = Case(batch_size=128), Case(batch_size=64)
    space = Space(now, [now, other], [0.0, 0.0], judged=False)

    def stand(looked_s: float) -> Standing:
        runs = [(now, Aim.LOOK, 100.0), (now, Aim.MEASURE, 100.0)]
        runs += [(other, Aim.LOOK, looked_s), (other, Aim.MEASURE, 80.0)]
        known = [Result(Trial(s, aim), Status.OK, 9, time_s=t, value=t) for s, aim, t in runs]
        return Standing(known, space)

    assert stand(80.0).advised == other
    assert stand(100.0).advised == now
    assert stand(100.0).values == stand(80.0).values


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
    assert "It learns as well: the training loss is equivalent within 1 % (5 seeds" in said
    assert "Learns worse, and is not advised: fp16" in said
    learnt = [result.trial for result in results if result.trial.aim is Aim.LEARN]
    assert max(trial.repeat for trial in learnt) == LEARN_SEEDS
    # a larger batch takes fewer steps: learning is compared after equal ones
    assert {trial.setting.batch_size for trial in learnt} == {grid.now.batch_size}
    assert {standing.find_case(trial).fraction for trial in learnt} == {LEARN_PART}


def test_networks_that_guess_have_not_learnt_as_well() -> None:
    grid, guess = GRIDS["H100, DPN-92"], math.log(10)
    for classes, told in ((10, GUESSING), (None, UNCHECKED)):
        _, standing = search(grid, 5000, lambda setting, seed: guess, classes=classes)
        said = "\n".join(answer(standing).write())
        assert told in said
        assert ("learns as well:" in said) == (classes is None)


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
    times = {now: 100.0, other: 50.0}
    space = Space(now, list(times), [0.0, 0.0])
    measured = [
        Result(Trial(setting, Aim.MEASURE, n), Status.OK, 10, time_s=time, value=time)
        for setting, time in times.items()
        for n in range(1, MOST_REPEATS + 1)
    ]
    begun = [
        Result(Trial(setting, Aim.LEARN, seed), Status.OK, 30, seed=seed - 1, loss=2.0)
        for setting, seed in ((now, 1), (other, 1), (now, 2))
    ]

    def find_next(known: Sequence[Result], left_s: float) -> Trial | None:
        return choose(Standing(known, space), Budget(1000, left_s))

    assert find_next(measured, 1000) == Trial(now, Aim.LEARN)
    assert find_next(measured, 40) is None
    assert find_next(measured + begun, 40) == Trial(other, Aim.LEARN, 2)


def test_what_diverges_is_named_and_not_advised() -> None:
    now = Case(batch_size=128)
    fast = make_setting(now, {"precision": "fp16"})
    results = [
        Result(Trial(now, Aim.LOOK), Status.OK, 10, 5, 5, 60.0, 0.01, 60.0),
        Result(Trial(fast, Aim.LOOK), Status.DIVERGED, 10, 5, 5, 20.0, 0.01, 20.0),
    ]
    found = answer(Standing(results, Space(now, [now, fast], [0.0, 0.0], judged=False)))
    said = "\n".join(found.write())
    assert "Did not train: fp16, batch size 128 (the loss became inf or NaN)." in said
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
    assert found.expect_gain(0.0)[1] == pytest.approx(expected, rel=0.02)


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
    assert first.startswith("Train with fp32, batch size 256: ")
    assert "1.28×" in first
    assert "as fast as what you have now (fp32, batch size 128)" in first
    assert any("Batches of 256 take fewer steps an epoch" in line for line in rest)
    assert "best so far: fp32, batch size 256, 1.28×" in told.err
    before, _, _ = told.err.partition("[1] ")
    bounds = "and each of its phases at most --timeout (60 min); no other begins that does not fit"
    takes = "takes its start and 14 steps or more, of unknown length"
    assert f"{takes}, {bounds} in --budget (60 s)\n" in before
    flags = "--model dpn92 --dataset synthetic --device cuda --batch-size 128 256"
    assert any(f"python -m bench.search {flags} compares them" in line for line in rest)
    rows = read_records(tmp_path)
    assert set(rows["status"]) == {"ok"}

    # the same command has nothing left to measure, and says the same
    run(tmp_path, "--budget", "1m")
    assert capsys.readouterr().out.splitlines()[0] == first
    assert len(read_records(tmp_path)) == len(rows)


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
    lines.loc[ours | (lines["precision"] == "fp16"), "other_cores"] = "1.5"
    lines.to_csv(tmp_path / "records.csv", index=False)
    run(tmp_path, "--budget", "1m")
    said = f"Doubts about the {len(compared)} runs that were compared"
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
    assert told["sentences"][0].startswith("Train with fp16, batch size 256: ")
    rows = read_records(tmp_path)
    assert set(rows["loss_scale"][rows["precision"] == "fp32"]) == {""}, "that of fp16 alone"


@pytest.mark.parametrize(
    ("answers", "flags", "said"),
    [
        ("precision=fp32:oom precision=fp16:error", "", "no setting could be measured."),
        ("", "--budget 0.01s", "only what you have now (fp32, batch size 128) was measured"),
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


def test_a_price_buys_images(tmp_path: Path, capsys: Capture) -> None:
    run(tmp_path, "--for", "images-per-price", "--price", "2")
    bought = 50_000 * 3600 / (10 + 1000 / 256) / 2
    assert f"{bought:,.0f} images for a price of 1" in capsys.readouterr().out


def test_memory_can_be_what_counts(tmp_path: Path, capsys: Capture) -> None:
    """The fake takes a MiB an image."""
    run(tmp_path, "--for", "memory", "--batch-size", "64", "128")
    assert capsys.readouterr().out.startswith("Train with fp32, batch size 64: ")


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
        (["--for", "images-per-price"], "--for images-per-price needs the price of an hour"),
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
        monkeypatch.setattr(f"bench.advise.policy.{most}", 1)
    words = ["--model", "models_for_tests:good", "--dataset", "synthetic", "--device", "cpu"]
    words += ["--precision", "fp32", "--compile", "off", "--batch-size", "64", "128"]
    words += ["--channels-last", "off", "--now", "batch_size=64", "--budget", "90s"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        ("Train with fp32, batch size 128: ", "Stay with fp32, batch size 64: ")
    )
    rows = read_records(tmp_path)
    assert {64, 128} == set(rows["batch_size"])
    assert (rows["until"] != "").all()
    assert math.isfinite(rows["epoch_time_s"].min())
