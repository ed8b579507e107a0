"""NVIDIA apex: what is said where it cannot train, and that its amp trains as it did.

The real one needs a GPU; a stand-in keeps the contract here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.base.errors import UnsupportedError
from bench.networks.data import DatasetInfo
from bench.networks.data.batches import Divided
from bench.networks.workloads import Workload
from bench.schema.case import Case
from bench.schema.precision import Apex, find_formats, refuse_apex
from bench.schema.record import Status
from bench.schema.work import WorkKind
from bench.training.apex import ApexTraining
from bench.training.formats import set_flags
from bench.training.loop import Training
from bench.workers.executors import Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Job
from tests.apex_for_tests import install
from tests.pytest_for_tests import Patch
from tests.training_for_tests import CPU, LR, batch, in_parts, pass_through, small, training

Start = Callable[..., Training]
LEVELS = ("O1", "O2")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: Patch) -> Iterator[Start]:
    """Begin a training by the stand-in, as a worker does by what is installed."""
    monkeypatch.syspath_prepend(str(install(tmp_path)))
    forget()

    def begin(opt_level: str | None, scale: float | str, **axes: float | None) -> Training:
        case = Case(
            precision="fp16-apex", loss_scale=scale, opt_level=opt_level, lr=LR, device="cpu"
        )
        set_flags(find_formats(case.precision, case.opt_level))
        return ApexTraining(replace(case, **axes), small(), CPU, Workload())  # type: ignore[arg-type]

    yield begin
    forget()


def forget() -> None:
    """Take out of this process what of apex was imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def spoil(item: int) -> Divided:
    """A batch in micro-batches, one of whose images gives gradients that are no number."""
    x, y = batch()
    x[item] = torch.inf
    return in_parts(x, y, 7, 7, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_a_reset_is_a_fresh_start(level: str, start: Start) -> None:
    """With masters, momentum and scale: the same losses come out."""
    ours = start(level, "dynamic")
    begun = [master.detach().clone() for master in ours.masters]
    first = [float(ours.step(batch(seed=seed))[0]) for seed in range(3)]
    assert bool(ours.step(spoil(0))[2])
    ours.reset()
    assert float(ours.current_scale()) == 2**16
    assert all(map(torch.equal, begun, ours.masters))
    assert [float(ours.step(batch(seed=seed))[0]) for seed in range(3)] == first


@pytest.mark.parametrize("item", [0, 15])
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", LEVELS)
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
    begun = [master.detach().clone() for master in ours.masters]
    assert all(map(torch.equal, begun, theirs.masters)), "from rounded weights"
    for seed in range(3):
        (loss, *_, norm), (their_loss, *_, their_norm) = (
            one.step(in_parts(*batch(seed=seed), 7, 7, 2)) for one in (ours, theirs)
        )
        assert float(loss) == pytest.approx(float(their_loss), abs=2e-3)
        if norm is not None and their_norm is not None:
            assert float(norm) == pytest.approx(float(their_norm), rel=2e-3)
            assert float(norm) > (clip_grad or 0.0)
    moved, right = (
        torch.cat([(m - b).detach().flatten() for m, b in zip(one.masters, begun, strict=True)])
        for one in (theirs, ours)
    )
    assert float((moved - right).norm() / right.norm()) < 5e-3


def test_what_is_lacking_is_said_with_what_to_do(start: Start, tmp_path: Path) -> None:
    assert "NVIDIA apex is not installed: build a commit of NVIDIA/apex" in refuse_apex(
        None, "cuda"
    )
    old = Apex("0.9.10", amp=False)
    assert "the installed apex 0.9.10 has no amp.initialize: build" in refuse_apex(old, "cuda")
    assert refuse_apex(old, "cpu").startswith("NVIDIA apex needs an NVIDIA GPU")
    with pytest.raises(UnsupportedError, match="cannot follow dynamic-apex: give --loss-scale dyn"):
        start("O1", "dynamic-apex")
    (tmp_path / "apex" / "amp" / "__init__.py").write_text("raise ImportError('no amp_C')")
    lacking = r"^NVIDIA apex cannot be imported \(no amp_C\); build it for this torch$"
    with pytest.raises(UnsupportedError, match=lacking):
        start("O1", "dynamic")


@pytest.mark.slow
def test_a_worker_trains_with_what_is_installed(
    data: DatasetInfo, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Through a real process, to the row: what trained, and the work and the profile of a step."""
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
    assert {step.loss_scale for step in outcome.steps} == {128.0}
    assert outcome.measurement.profiled_steps
    assert WorkKind.OPTIMIZER in {row.kind for row in outcome.work}
