"""NVIDIA apex: what is said where it cannot train, and that its amp trains as it did.

The real one needs a GPU; a stand-in keeps the contract here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from apex_for_tests import install, install_here
from pytest_for_tests import Patch
from torch import Tensor
from training_for_tests import (
    CPU,
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    batch,
    in_parts,
    pass_through,
    small,
    training,
)

from bench.case import Case
from bench.data import DatasetInfo
from bench.data.batches import Divided
from bench.errors import UnsupportedError
from bench.executors import Settings
from bench.executors.subprocess import SubprocessExecutor
from bench.precision import OPT_LEVELS, Apex, find_formats, refuse_apex, set_flags
from bench.record import Status
from bench.training.building import make_training
from bench.training.loop import Training
from bench.work import Kind
from bench.worker import Job

Start = Callable[..., Training]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: Patch) -> Start:
    """Begin a training by the stand-in, as a worker does by what is installed."""

    def begin(opt_level: str | None, scale: float | str, **axes: float | None) -> Training:
        install_here(monkeypatch, tmp_path / "here")
        case = Case(
            precision="fp16-apex", loss_scale=scale, opt_level=opt_level, lr=LR, device="cpu"
        )
        set_flags(find_formats(case.precision, case.opt_level))
        return make_training(replace(case, **axes), small(), CPU)  # type: ignore[arg-type]

    return begin


def rounded(opt_level: str) -> list[Tensor]:
    """The weights as this level starts from them."""
    made = []
    for i, p in enumerate(small().parameters()):
        whole = opt_level in ("O0", "O1") or (i in (2, 3) and opt_level != "O3")  # BatchNorm's
        made.append(p.detach() if whole else p.detach().half().float())
    return made


# -------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", OPT_LEVELS)
def test_a_step_is_the_rule_in_float64(level: str, scale: float | str, start: Start) -> None:
    """Given the scaled gradients that the weights hold in the end, of micro-batches at every other
    step: unscaled, on masters in fp32.

    O3 has no masters: its weights and momentum are rounded to fp16 at each step.
    """
    ours = start(level, scale)
    used = float(ours.current_scale())
    assert used == (2**16 if scale == "dynamic" else scale)
    grads: dict[int, Tensor] = {}
    sums: dict[int, Tensor] = {}
    for i, p in enumerate(ours.parameters):
        p.register_hook(lambda g, i=i: sums.update({i: sums.get(i, 0) + g.double() / used}))
        p.register_post_accumulate_grad_hook(
            lambda p, i=i: grads.__setitem__(i, p.grad.double() / used)  # type: ignore[union-attr]
        )
    exact = [p.double() for p in rounded(level)]
    speed = [torch.zeros_like(e) for e in exact]
    for seed in range(5):
        x, y = batch(seed=seed)
        sums.clear()
        assert not ours.step(in_parts(x, y, *[(16,), (7, 7, 2)][seed % 2]))[2]
        for i, p in enumerate(ours.parameters):
            near = 4 * (2.0**-11 if p.dtype == torch.float16 else 2.0**-24)
            assert float((grads[i] - sums[i]).norm()) <= near * float(sums[i].norm())
        for i, e in enumerate(exact):
            speed[i] = MOMENTUM * speed[i] + grads[i] + WEIGHT_DECAY * e
            exact[i] = e - LR * speed[i]
    assert float(ours.current_scale()) == used
    unit = 2.0**-10 if level == "O3" else 2.0**-22
    for master, weight, e, v in zip(ours.masters, ours.parameters, exact, speed, strict=True):
        assert master.dtype == (torch.float16 if level == "O3" else torch.float32)
        near = 8 * unit * (float(e.abs().max()) + LR * float(v.abs().max()))
        torch.testing.assert_close(master.detach().double(), e, rtol=0, atol=near)
        assert torch.equal(weight, master.to(weight.dtype))
        assert weight.grad is None


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_masters_start_from_the_weights_as_they_were_cast(level: str, start: Start) -> None:
    """And again after a warm-up, with momentum and scale: the same losses come out."""
    ours = start(level, "dynamic")
    first = [float(ours.step(batch(seed=seed))[0]) for seed in range(3)]
    assert bool(ours.step(spoil(0))[2])
    ours.reset()
    assert float(ours.current_scale()) == 2**16
    for master, e in zip(ours.masters, rounded(level), strict=True):
        assert torch.equal(master.float(), e)
    assert [float(ours.step(batch(seed=seed))[0]) for seed in range(3)] == first


def spoil(item: int) -> Divided:
    """A batch in micro-batches, one of whose images gives gradients that are no number."""
    x, y = batch()
    x[item] = torch.inf
    return in_parts(x, y, 7, 7, 2)


@pytest.mark.parametrize("item", [0, 15])
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", OPT_LEVELS)
def test_an_overflow_in_one_micro_batch_is_one_of_the_step(
    level: str, scale: float | str, item: int, start: Start
) -> None:
    """From the first step on, told once, whichever it is in. A dynamic scale falls once, and the
    skipped step leaves nothing. With a static one it reaches the weights."""
    ours = start(level, scale)
    before = [p.detach().clone() for p in ours.parameters]
    epoch = pass_through(ours, [spoil(item), spoil(item)])
    assert epoch.overflowed == [True, True]
    used = [2**16, 2**15, 2**14] if scale == "dynamic" else [128] * 3
    assert [*epoch.loss_scales, float(ours.current_scale())] == used
    skipped = scale == "dynamic"
    assert all(map(torch.equal, before, ours.parameters)) is skipped
    assert all(bool(torch.isfinite(p).all()) for p in ours.parameters) is skipped
    if skipped:
        assert not ours.step(batch())[2]
        assert not all(map(torch.equal, before, ours.parameters))


@pytest.mark.parametrize("clip_grad", [None, 0.5])
def test_our_fp16_takes_the_same_steps(clip_grad: float | None, start: Start) -> None:
    """As O2, its level by default; clipped or not: the real one agreed bitwise."""
    theirs = start(None, 128.0, clip_grad=clip_grad)
    ours = training("fp16", loss_scale=128.0, clip_grad=clip_grad)
    for seed in range(3):
        (loss, *_, norm), (their_loss, *_, their_norm) = (
            one.step(in_parts(*batch(seed=seed), 7, 7, 2)) for one in (ours, theirs)
        )
        assert float(loss) == pytest.approx(float(their_loss), abs=2e-3)
        if norm is not None and clip_grad is not None:
            assert float(norm) == pytest.approx(float(their_norm), rel=2e-3)  # type: ignore[arg-type]
            assert norm > clip_grad
    begun = rounded("O2")
    moved, right = (
        torch.cat([(m - b).detach().flatten() for m, b in zip(one.masters, begun, strict=True)])
        for one in (theirs, ours)
    )
    assert float((moved - right).norm() / right.norm()) < 5e-3


# ------------------------------------------------------------------------------- what it lacks


@pytest.mark.parametrize(
    ("apex", "said"),
    [
        (None, "NVIDIA apex is not installed: build a commit of NVIDIA/apex"),
        (Apex("0.9.10", amp=False), "the installed apex 0.9.10 has no amp.initialize: build"),
    ],
)
def test_what_is_lacking_is_said_with_what_to_do(apex: Apex | None, said: str) -> None:
    assert said in refuse_apex(apex, "cuda")
    assert refuse_apex(apex, "cpu").startswith("NVIDIA apex needs an NVIDIA GPU")


def test_a_rule_that_apex_does_not_have(start: Start) -> None:
    with pytest.raises(UnsupportedError, match="cannot follow dynamic-apex: give --loss-scale dyn"):
        start("O1", "dynamic-apex")


# ------------------------------------------------------------------------------ cases and outcomes


@pytest.mark.slow
def test_a_worker_trains_with_what_is_installed(
    data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Through a real process, to the row: what trained, the scale of each step, and the
    work and the profile of a step."""
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    case = Case(
        "training_for_tests:small", "synthetic", precision="fp16-apex", loss_scale=128.0,
        batch_size=64, fraction=0.01, profile=True, device="cpu",
    )  # fmt: skip
    executor = SubprocessExecutor(Settings(timeout_s=300, allow_shared=True))
    job = Job(case, data.folder, None, tmp_path / "log")
    outcome = executor.run(job, lambda event: None, lambda: False)
    assert outcome.status is Status.OK, outcome.reason
    assert outcome.measurement.apex == "apex.amp"
    assert outcome.measurement.arithmetic == "float16"
    assert outcome.measurement.overflow_steps == 0
    assert {step.loss_scale for step in outcome.steps} == {128.0}
    assert outcome.measurement.step_bytes
    assert outcome.measurement.profiled_steps
    assert Kind.OPTIMIZER in {row.kind for row in outcome.work}
