"""A rehearsed training step of a precision and a loss scaling, and the launches it may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from bench.case import format_value
from bench.precision import POLICIES, PRECISIONS, Precision

if TYPE_CHECKING:
    from bench.rehearsal.dispatch import Breach

_BUDGETED = ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp")

BUDGETS: dict[tuple[str, bool], dict[str, int]] = {
    subject: dict(zip(_BUDGETED, launches, strict=True))
    for subject, launches in {
        ("dpn-small", False): (183, 183, 201, 237, 188, 224),
        ("dpn-small", True): (230, 230, 248, 284, 235, 271),
        ("dpn26", False): (317, 317, 335, 395, 322, 382),
        ("dpn92", False): (1051, 1051, 1077, 1265, 1060, 1248),
    }.items()
}
"""Launches that a step may take, by model and whether it is compiled, then by precision.

The most that any loss scaling takes, plus four to ten; torch 2.9 and 2.13 count the same. A change
that needs more raises them here, and says what it gains.
"""


def skip(precision: Precision) -> str:
    """Return why a precision has no budget and is not rehearsed; empty if it is rehearsed."""
    if precision.apex:
        return "apex needs an NVIDIA GPU, and its steps wait for the GPU"
    if precision.float8:
        return "its kernels are torchao's, and on a CPU they are emulated by others"
    return ""


@dataclass(frozen=True)
class Policy:
    """How fp16's narrow range is handled: a loss scale, and whether overflows are skipped."""

    loss_scale: float | str | None = None
    skip_overflow: bool = False

    def __str__(self) -> str:
        scale = format_value(self.loss_scale) or "none"
        return f"{scale}, skipping" if self.skip_overflow else scale


def policies(precision: Precision) -> list[Policy]:
    if not precision.scales_loss:
        return [Policy()]
    return [Policy(128.0), Policy(128.0, skip_overflow=True), *map(Policy, POLICIES)]


@dataclass(frozen=True)
class Rehearsal:
    """One rehearsed step: its kernel launches, its budget, and the rules that it broke. ``budget``
    is None for a model without one, whose launches are counted and not judged."""

    precision: str
    policy: Policy
    compile: bool
    launches: int
    budget: int | None
    breaches: tuple[Breach, ...]


def rehearse(
    model: str = "dpn-small",
    precisions: Iterable[str] = tuple(PRECISIONS),
    compile: Iterable[bool] = (False, True),
    batch_size: int = 2,
) -> list[Rehearsal]:
    """Run a step of every precision and policy on the CPU, and check it for what a GPU does badly.

    Args:
        precisions: names of `PRECISIONS`; those that `skip` excludes are left out.
        compile: whether ``torch.compile`` traces the network (see `bench.rehearsal.__main__`).
        batch_size: images per step; launches do not depend on it.

    Raises UsageError: there is no such model.
    """
    import torch

    from bench.rehearsal.dispatch import Breach, Rule, Watch
    from bench.training.loop import Training
    from bench.training.loss_scale import build_loss_scale
    from bench.workloads.images import Images

    device, workload, rows = torch.device("cpu"), Images(model), list[Rehearsal]()
    known = [PRECISIONS[name] for name in precisions if not skip(PRECISIONS[name])]
    for compiled, precision in product(compile, known):
        watch = Watch()
        with watch:  # from the start, to track what is made in host memory and what is moved
            network = workload.build_model()
            training = Training(network, precision, device, lr=0.01, workload=workload)
            batch = workload.make_batch(batch_size, device, torch.Generator())
        if compiled:
            torch._dynamo.reset()
            traced = torch.compile(training.model, backend="aot_eager", dynamic=False)
            training.forward = watch.without_calls(traced)
        training.step(batch)  # a first step compiles, and makes the masters' gradients
        budget = BUDGETS.get((model, compiled), {}).get(precision.name)
        for policy in policies(precision):
            training.loss_scale = build_loss_scale(policy.loss_scale, device, policy.skip_overflow)
            watch.judge()
            with watch:
                training.step(batch)
            launches, breaches = watch.launches, list(watch.breaches)
            if budget is not None and launches > budget:
                excess = f"{launches} where {budget} are allowed"
                breaches.append(Breach(Rule.LAUNCHES, *watch.busiest(), excess))
            found = Rehearsal(precision.name, policy, compiled, launches, budget, tuple(breaches))
            rows.append(found)
    return rows
