"""Learning rates: each schedule is the formula that its description gives, to the last step."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.rules import check_batches
from bench.training.loop import Training, train_epoch
from bench.training.optimizers import learning_rates
from bench.training.timing import StepClock
from tests.training_for_tests import CPU, batch, small, training

AFTER = {
    "constant": lambda j, steps: 1.0,
    "linear": lambda j, steps: 1 - j / steps,
    "cosine": lambda j, steps: (1 + cos(pi * j / steps)) / 2,
    "polynomial": lambda j, steps: (1 - j / steps) ** 2,
}
"""The part of the base rate in step j of so many after the warm-up."""


def one_cycle(i: int, steps: int) -> float:
    """torch's defaults: from 1 / 25 to 1 at 0.3 of the steps, and to a 250,000th at the last."""
    top, last = 0.3 * steps - 1, steps - 1
    low, high, done = (1 / 25, 1.0, i / top) if 0 <= i <= top else (1 / 250_000, 1.0, 0.0)
    if i > top:
        done = (last - i) / (last - top)
    return low + (high - low) * (1 - cos(pi * done)) / 2


@given(st.sampled_from([*AFTER]), st.integers(1, 60), st.integers(0, 60), st.floats(1e-4, 100))
def test_every_step_is_the_formula(name: str, steps: int, warmup: int, lr: float) -> None:
    case = Case(schedule=name, lr_warmup=str(warmup), lr=lr)
    if warmup > steps:
        with pytest.raises(UsageError, match=rf"--lr-warmup {warmup} .* at most {steps}"):
            learning_rates(case, steps)
        return
    rates = learning_rates(case, steps)
    rising = [lr * (i + 1) / (warmup + 1) for i in range(warmup)]
    after = steps - warmup
    assert rates[warmup:][:1] in ([], [lr]), "the first after the warm-up has all of it"
    assert rates == pytest.approx(
        [*rising, *(lr * AFTER[name](j, after) for j in range(after))], rel=1e-9, abs=1e-12
    )


@given(st.integers(1, 200), st.floats(1e-4, 100))
def test_one_cycle_is_its_formula(steps: int, lr: float) -> None:
    rates = learning_rates(Case(schedule="onecycle", lr=lr), steps)
    assert rates == pytest.approx([lr * one_cycle(i, steps) for i in range(steps)], rel=1e-9)


def test_the_base_is_scaled_by_the_batch() -> None:
    case = Case(lr=0.1, batch_size=256, parallel="ddp", world_size=2, base_batch=128)
    for rule, base in (("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)):
        scaled = replace(case, lr_scaling=rule)
        assert learning_rates(scaled, 2) == pytest.approx([base, base])
        assert Training(scaled, small(), CPU, Workload()).lr == pytest.approx(base)


def test_a_warm_up_past_the_end_is_refused_before_training() -> None:
    """Counted over all epochs: 10 batches of 100 images."""
    case = Case(batch_size=100, lr_warmup="20")
    check_batches(replace(case, epochs=2), 1000)
    with pytest.raises(UsageError, match="longer than the training's 10 steps"):
        check_batches(case, 1000)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_each_step_of_an_epoch_has_its_rate(optimizer: str) -> None:
    """A float of Python's, set before the step: at 0 nothing moves, and a reset restores it."""
    ours = training(optimizer=optimizer)
    base = ours.lr
    used: list[float] = []
    made = ours.update
    ours.update = lambda: (used.append(ours.optimizer.param_groups[0]["lr"]), made())[1]  # type: ignore[method-assign]
    rates = [0.0, 0.3, 0.1, 0.7]
    batches = [batch(seed=seed) for seed in range(3)]
    moved = []
    before = ours.parameters[0].detach().clone()

    def look(*_: object) -> None:
        moved.append(bool((ours.parameters[0] != before).any()))

    train_epoch(ours, batches, StepClock(CPU), look, rates)
    assert used == rates[:3]
    assert all(type(rate) is float for rate in used)
    assert moved == [False, True, True]
    ours.reset()
    assert ours.optimizer.param_groups[0]["lr"] == base
