"""The fake executor: what it answers, and that it refuses what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_for_tests import Patch

from bench.case import Case
from bench.errors import UsageError
from bench.executors import Images, Job, Lane, Settings, build_executor
from bench.executors.fake import ANSWERS, FakeExecutor
from bench.origin import EXECUTORS
from bench.record import MEASURED, Outcome, Status
from bench.sweep import __main__ as sweep


def answer(case: Case, stopping: bool = False) -> Outcome:
    return FakeExecutor(Settings()).run(Job(case, ""), lambda event: None, lambda: stopping)


def test_it_answers_ok_with_figures_that_follow_from_the_batch_size(monkeypatch: Patch) -> None:
    monkeypatch.delenv(ANSWERS, raising=False)
    small, large = answer(Case(batch_size=64)), answer(Case(batch_size=128))
    assert small.status is large.status is Status.OK
    assert small.measurement.epoch_time_s > large.measurement.epoch_time_s  # type: ignore[operator]
    assert small.measurement.images_per_s == 50_000 / small.measurement.epoch_time_s  # type: ignore[operator]
    assert answer(Case(batch_size=64, seed=3)).measurement == small.measurement


def test_it_downloads_nothing(tmp_path: Path) -> None:
    found = FakeExecutor(Settings()).prepare(Lane(), Images("cifar10", tmp_path / "data"))
    assert (found.train_images, found.test_images, found.fingerprint) == (50_000, 10_000, "")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("status", list(Status))
def test_it_answers_what_it_is_told(monkeypatch: Patch, status: Status) -> None:
    monkeypatch.setenv(ANSWERS, f"batch_size=64:{status}")
    outcome = answer(Case(batch_size=64))
    assert outcome.status is status
    assert (outcome.measurement.epoch_time_s is not None) == (status in MEASURED)
    assert (outcome.measurement.first_bad_step is not None) == (status is Status.DIVERGED)
    assert bool(outcome.reason) == (status is not Status.OK)
    assert answer(Case(batch_size=128)).status is Status.OK


def test_the_first_rule_that_matches_counts_where_it_is_not_stopped(monkeypatch: Patch) -> None:
    rules = (
        "seed=1:error batch_size=64:oom model=a.b:c:killed loss_scale=none:timeout compile=on:ok"
    )
    monkeypatch.setenv(ANSWERS, rules)
    assert answer(Case(seed=1, batch_size=64)).status is Status.ERROR
    assert answer(Case(batch_size=64)).status is Status.OOM
    assert answer(Case(model="a.b:c")).status is Status.KILLED
    assert answer(Case(precision="fp16", loss_scale=1.0)).status is Status.TIMEOUT
    assert answer(Case(compile="default", batch_size=64)).status is Status.OOM
    assert answer(Case(), stopping=True).status is Status.INTERRUPTED


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("oom", "no axis ''"),
        ("batch=64:oom", "no axis 'batch'; did you mean 'batch_size'?"),
        ("batch_siz=64:oom", "did you mean 'batch_size'?"),
        ("batch_size=64:om", "no status 'om'; did you mean 'oom'?"),
        ("batch_size=64", "no axis ''"),
        ("batch_size=64:", "no status ''"),
        ("batch_size=some:oom", "batch_size 'some': a batch size is a whole number"),
        ("batch_size:oom", "batch_size '': a batch size is a whole number"),
    ],
)
def test_a_rule_that_is_none(
    monkeypatch: Patch, tmp_path: object, rules: str, message: str
) -> None:
    monkeypatch.setenv(ANSWERS, rules)
    with pytest.raises(UsageError, match=ANSWERS) as error:
        FakeExecutor(Settings())
    assert message in str(error.value)
    flags = f"--executor fake --device cpu --dataset synthetic --out {tmp_path}".split()
    assert sweep.main(flags) == 2


def test_the_registry_builds_what_it_names() -> None:
    for name in EXECUTORS.keys() - {"ray"}:  # which starts a cluster, in test_ray.py
        executor = build_executor(name, Settings(timeout_s=1))
        executor.kill()
