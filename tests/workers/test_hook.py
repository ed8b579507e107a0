"""Steps that are seen of a training that tells of none, in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.workers.hook import arm
from bench.workers.script import LOST, SAMPLED, Teller

N = 12

# with Python 3.13 the last step of a compiled optimizer was seen when it ended, as others are
SEEN_LATE = 2 if sys.version_info < (3, 13) else 1


class Task:
    """A network, its input, and the loss of a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net, self.x = nn.Linear(8, 8), torch.randn(4, 8)

    def loss(self) -> torch.Tensor:
        return self.net(self.x).square().mean()


def plain(task: Task) -> None:
    optimizer = torch.optim.Adam(task.net.parameters(), 1e-3)
    optimizer.step()  # before there are gradients, as to create its state
    for _ in range(N):
        task.loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulate(task: Task) -> None:
    optimizer = torch.optim.SGD(task.net.parameters(), 1e-3)
    for i in range(3 * N):
        task.loss().backward()
        if i % 3 == 2:
            optimizer.step()


def skip(task: Task) -> None:
    """A scaler skips every fourth step."""
    optimizer = torch.optim.SGD(task.net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for i in range(N):
        loss = task.loss() * (float("inf") if i % 4 == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def in_turn(task: Task) -> None:
    critic, maker = (torch.optim.SGD(task.net.parameters(), 1e-3) for _ in range(2))
    for i in range(N):
        task.loss().backward()
        (maker if i % 3 == 2 else critic).step()


def together(task: Task) -> None:
    """Two optimizers, of which one rests at every other step."""
    first, second = (torch.optim.SGD([weight], 1e-3) for weight in task.net.parameters())
    for i in range(N):
        task.loss().backward()
        first.step()
        if i % 2:
            second.step()


def one_after_another(task: Task) -> None:
    for steps in (4, N - 4):
        optimizer = torch.optim.SGD(task.net.parameters(), 1e-3)
        for _ in range(steps):
            task.loss().backward()
            optimizer.step()


def by_groups(task: Task) -> None:
    optimizer = torch.optim.AdamW([{"params": [w]} for w in task.net.parameters()], 1e-3)
    groups = optimizer.param_groups
    for _ in range(N):
        task.loss().backward()
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups


def with_closures(task: Task) -> None:
    optimizer = torch.optim.LBFGS(task.net.parameters(), max_iter=4)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = task.loss()
        loss.backward()
        return loss

    for _ in range(N):
        optimizer.step(evaluate)


def within_backward(task: Task) -> None:
    for weight in task.net.parameters():
        optimizer = torch.optim.SGD([weight], 1e-3)
        weight.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())  # type: ignore[misc]
    for _ in range(N):
        task.loss().backward()


def forks(task: Task) -> None:
    plain(task)
    if not (pid := os.fork()):
        plain(task)
        os._exit(0)
    os.waitpid(pid, 0)


def from_threads(task: Task) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier, Lock

    turn, both = Lock(), Barrier(2, timeout=60)

    def run() -> None:
        with turn:
            plain(task)
        both.wait()  # a thread that has ended leaves its id to the next

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(run), threads.submit(run)]:
            one.result()


def compiled(task: Task) -> None:
    optimizer = torch.optim.Adam(task.net.parameters(), 1e-3)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(N):
        task.loss().backward()
        step()
        optimizer.zero_grad()


def run(train: Callable[[Task], None], folder: Path) -> None:
    with (folder / "happened").open("w") as happened:
        arm(Teller(str(folder / "steps")), lambda what: happened.write(f"{what} "))
        train(Task())


def see(
    train: Callable[[Task], None], folder: Path, start: str = "fork"
) -> tuple[list[list[Any]], str]:
    """Return the lines that are told of a training, and what happened."""
    context: Any = multiprocessing.get_context(start)
    process = context.Process(target=run, args=(train, folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = (folder / "steps").read_text().splitlines()
    return [json.loads(line) for line in lines], (folder / "happened").read_text()


def who(lines: list[list[Any]]) -> dict[str, Any]:
    return {name: value for line in lines if line[0] == "who" for name, value in line[1].items()}


@pytest.mark.parametrize(
    ("train", "untimed", "losses", "expected"),
    [
        (plain, 1, N, {}),
        (accumulate, 1, 0, {"passes": 3}),
        (skip, 1, N, {}),
        (in_turn, 2, N, {"in_turn": True}),
        (together, 1, N, {}),
        (one_after_another, 2, N, {}),
        (by_groups, 1, N, {}),
        (within_backward, 1, N, {}),
        (forks, 1, N, {}),
        pytest.param(compiled, SEEN_LATE, N, {}, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_what_ends_a_backward_pass(
    train: Callable[[Task], None],
    untimed: int,
    losses: int,
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    lines, _ = see(train, tmp_path)
    steps = [line for line in lines if line[0] == "step"]
    assert len(steps) == N
    assert sum(time_s is None for _, _, time_s, _, _ in steps) == untimed
    assert sum(loss is not None for *_, loss in steps) == losses
    found = who(lines)
    assert {name: found[name] for name in ("passes", "in_turn") if name in found} == expected


def test_closures_take_one_step(tmp_path: Path) -> None:
    lines, _ = see(with_closures, tmp_path)
    assert sum(line[0] == "step" for line in lines) == N
    assert who(lines)["passes"] > 1


def test_the_loss_is_that_which_was_not_scaled(tmp_path: Path) -> None:
    lines, happened = see(skip, tmp_path)
    losses = [line[-1] for line in lines if line[0] == "step"]
    assert 0 < losses[0] < 1
    assert [loss == float("inf") for loss in losses] == [i % 4 == 3 for i in range(N)]
    assert happened.split() == ["torch", "backward", "step"]


def find_products(lines: list[list[Any]]) -> float:
    """Return the FLOP of the counted step that are known to be of products."""
    ((_, work),) = [line for line in lines if line[0] == "work"]
    assert work["failure"] == ""
    return sum(row[4] for row in work["work"] if row[0] == "matmul")


def closes(task: Task) -> None:
    optimizer = torch.optim.SGD(task.net.parameters(), 1e-3)

    def evaluate() -> torch.Tensor:
        loss = task.loss()
        loss.backward()
        return loss

    for _ in range(N):
        optimizer.step(closure=evaluate)


def test_what_a_closure_runs_is_no_part_of_the_optimizer(tmp_path: Path) -> None:
    lines, _ = see(closes, tmp_path, start="spawn")  # as below
    assert find_products(lines) == 2 * 2 * 4 * 8 * 8


def test_one_step_is_counted_and_its_memory_known(tmp_path: Path) -> None:
    # in a process of its own: the networks of other tests would count
    lines, _ = see(plain, tmp_path, start="spawn")
    # forward, and the gradients of the weights: none is needed of the input
    assert find_products(lines) == 2 * 2 * 4 * 8 * 8
    ((_, memory),) = [line for line in lines if line[0] == "memory"]
    weights = 4 * (8 * 8 + 8)
    assert memory["weights_bytes"] == memory["gradients_bytes"] == weights
    assert memory["optimizer_bytes"] == 2 * weights + 2 * 4  # its count of steps, a weight


def test_backward_passes_of_several_threads_are_not_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    see(from_threads, tmp_path)
    assert "several threads run backward passes" in capfd.readouterr().err


def test_a_hook_that_fails_ends_no_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        arm(Teller(str(tmp_path / "gone" / "steps")), lambda what: None)
        plain(Task())
        (tmp_path / "done").touch()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert (process.exitcode, (tmp_path / "done").exists()) == (0, True)
    assert capfd.readouterr().err.count(f"{LOST}: FileNotFoundError") == 1


@pytest.mark.slow
def test_a_network_that_is_first_compiled_in_the_counted_step_is_compiled(tmp_path: Path) -> None:
    def train(task: Task) -> None:
        calls = 0

        def backend(graph: Any, _: Any) -> Any:
            def run(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                return graph(*args)

            return run

        optimizer, plain = torch.optim.SGD(task.net.parameters(), 1e-3), task.net
        for i in range(N):
            task.net = torch.compile(plain, backend=backend) if i >= SAMPLED else plain  # type: ignore[assignment]
            task.loss().backward()
            optimizer.step()
        (tmp_path / "calls").write_text(str(calls))

    lines, _ = see(train, tmp_path)
    assert int((tmp_path / "calls").read_text()) == N - SAMPLED
    (work,) = (line[1] for line in lines if line[0] == "work")
    assert work["failure"] == "compiled code does not show its operations"


@pytest.mark.slow
def test_no_graph_breaks_where_a_backward_pass_is_compiled(tmp_path: Path) -> None:
    def train(task: Task) -> None:
        optimizer = torch.optim.SGD(task.net.parameters(), 1e-3)

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> None:
            loss = task.net(x).square().mean()
            loss.backward()
            optimizer.step()

        for _ in range(N):
            step(task.x)
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        (tmp_path / "breaks").write_text(str(breaks))

    process = multiprocessing.get_context("fork").Process(target=lambda: train(Task()))
    process.start()
    process.join()
    before = int((tmp_path / "breaks").read_text())
    lines, _ = see(train, tmp_path)
    assert int((tmp_path / "breaks").read_text()) <= before
    assert sum(line[0] == "step" for line in lines) == N
