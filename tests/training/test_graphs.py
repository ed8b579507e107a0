"""A captured step trains as one that is not; what records it is played by the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from bench.base.errors import UsageError
from bench.networks.data import prepare
from bench.schema.axis import Value
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.training import graphs
from bench.training.graphs import WARMUP_STEPS
from bench.training.loop import Epoch, Training
from tests.training_for_tests import batch, pass_through, run_case, training


class Played:
    """Runs what it recorded from where it was recorded; how often is counted."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, run: Callable[[], object]) -> None:
        for _ in range(WARMUP_STEPS):
            run()
        self._run = run

    def replay(self) -> None:
        self.replays += 1
        self._run()


RATES = [2**-4, 2**-7, 2**-2, 2**-6]  # which float32 holds: in it the device has them
LAST = 6  # items of the smaller last batch


def train(ours: Training, rates: Sequence[float] = RATES) -> Epoch:
    sizes = [16, 16, 16, LAST]
    batches = [batch(size, seed=seed) for seed, size in enumerate(sizes)]
    return pass_through(ours, batches, rates)


def captured(recorder: Played, *steps: int, **settings: Any) -> Training:
    """A training that was warmed up and began anew, with its step captured on another batch."""
    ours = training(cuda_graphs=True, **settings)
    ours.capture(batch(seed=99), recorder)
    for size in steps:
        ours.step(batch(size, seed=98))
    ours.reset()
    return ours


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32"},
        {"precision": "bf16-amp"},
        {"precision": "fp16", "optimizer": "adamw"},
        {"precision": "fp16", "clip_grad": 0.5},
    ],
)
def test_losses_are_those_of_steps_one_by_one(settings: dict[str, Any]) -> None:
    """Bit for bit, the last batch, the learning rates and the clipping included; so are the
    weights."""
    recorder = Played()
    ours = captured(recorder, 16, LAST, **settings)
    before = recorder.replays
    plain = training(**settings)
    assert train(ours) == train(plain)
    assert recorder.replays - before == 3, "the last batch is a step of its own"
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, ours.model.state_dict()[name]), name


def test_what_overflows_is_counted() -> None:
    found = train(captured(Played(), precision="fp16", loss_scale=2.0**24))
    assert found.overflowed == train(training("fp16", loss_scale=2.0**24)).overflowed
    assert any(found.overflowed)


def test_a_replay_finds_all_where_it_was() -> None:
    """A graph writes to addresses: of rates, weights, optimizer, masters and their gradients."""
    seen: list[list[int]] = []

    class Looking(Played):
        def replay(self) -> None:
            group = ours.optimizer.param_groups[0]
            found = [group["lr"], *ours.model.state_dict().values(), *ours.masters]
            found += [m.grad for m in ours.masters if m.grad is not None]
            found += [t for state in ours.optimizer.state.values() for t in state.values()]
            # a number would be recorded as it was; so would a tensor's address, if it moved
            assert all(isinstance(one, Tensor) for one in found)
            seen.append([one.data_ptr() for one in found])
            super().replay()

    ours = training("fp16", cuda_graphs=True, optimizer="adamw")
    ours.capture(batch(), Looking())
    scale = ours.loss_scale
    for _ in range(2):
        ours.step(batch())
        ours.step(batch(LAST))
        ours.evaluate([batch()])
        ours.reset()
        ours.step(batch())
    assert all(one == seen[0] for one in seen)
    assert all(group["capturable"] for group in ours.optimizer.param_groups)
    assert ours.loss_scale is scale


def test_a_batch_of_other_contents_is_a_step_of_its_own() -> None:
    """A number in a batch, its dtype or its shape is part of what was recorded."""

    recorder = Played()
    x, y = batch()
    kept = graphs.Captured(
        lambda part: (part[0].sum(), None, part[1].any(), None), (x, y, 2), recorder
    )
    assert kept.fits((x + 1, y, 2))
    assert not kept.fits((x, y, 3))
    assert not kept.fits((x.half(), y, 2))
    assert not kept.fits((x[:4], y[:4], 2))
    assert not kept.fits((x, y))
    loss, correct, *_ = kept.step((x + 1, y, 2))
    assert (loss, correct) == ((x + 1).sum(), None)
    kept.step((x, y, 2))
    assert loss == (x + 1).sum(), "a result is not written over"


def test_the_worker_captures_once_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finds what it does without: the losses of the same steps, the same work."""
    made: list[Played] = []
    monkeypatch.setattr(graphs, "CudaGraph", lambda: made.append(Played()) or made[-1])
    case = Case(
        model="models_for_tests:good", dataset="synthetic", precision="fp16", loss_scale=128.0,
        batch_size=64, steps=3, evaluate=True, schedule="cosine", device="cpu",
    )  # fmt: skip
    folder = prepare("synthetic", data_dir=None).folder
    plain, found = (run_case(replace(case, cuda_graphs=on), folder) for on in (False, True))
    assert len(made) == 1
    assert made[0].replays >= 3
    assert [replace(step, time_s=None) for step in found.steps] == [
        replace(step, time_s=None) for step in plain.steps
    ]
    assert found.measurement.test_loss == plain.measurement.test_loss
    assert found.measurement.step_bytes == plain.measurement.step_bytes + 4  # the learning rate
    assert found.measurement.peak_allocated_bytes is None
    assert "what a graph holds" in found.missing["peak_allocated_bytes"]


def test_what_breaks_a_capture_is_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending the capture fails too; out of memory stays out of memory. No GPU is asked."""

    @contextmanager
    def within(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    for name in ("CUDAGraph", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, within)
    steps = iter([None] * WARMUP_STEPS)

    def run() -> None:
        if next(steps, 1):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        graphs.CudaGraph().capture(run)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu"}, "--device cpu"),
        ({"precision": "fp16", "loss_scale": "dynamic"}, "--loss-scale dynamic"),
        ({"compile": "reduce-overhead"}, "--compile reduce-overhead"),
        ({"accumulate": 2}, "--accumulate 2"),
        ({"precision": "fp16", "loss_scale": 128.0, "compile": "default"}, ""),
    ],
)
def test_what_cannot_be_captured_is_refused(settings: dict[str, Value], expected: str) -> None:
    asked = {name: [value] for name, value in {"device": "cuda", **settings}.items()}
    grid({**asked, "cuda_graphs": [False]})
    if not expected:
        assert [case.cuda_graphs for case in grid({**asked, "cuda_graphs": [True]})] == [True]
        return
    with pytest.raises(UsageError) as refused:
        grid({**asked, "cuda_graphs": [True]})
    assert "--cuda-graphs" in str(refused.value)
    assert expected in str(refused.value)
