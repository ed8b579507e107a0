"""A small network and its training, and what must hold after steps, on any device.

The checks are functions here so that what runs on a card has run on a CPU first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.networks.data.batches import Divided, Supply
from bench.networks.workloads import IMAGES, Workload
from bench.schema.case import Case
from bench.schema.optimization import OPTIMIZERS
from bench.schema.precision import PRECISIONS, TRAINED
from bench.schema.record import Outcome
from bench.training.formats import set_flags
from bench.training.loop import Epoch, Training, train_epoch
from bench.training.timing import StepClock
from bench.workers.fingerprint import Fingerprint, Request, examine_model
from bench.workers.job import Channel, Job
from bench.workers.measurement import measure

CPU = torch.device("cpu")
LR = 0.05
MOMENTUM, WEIGHT_DECAY = OPTIMIZERS["sgd"].momentum, OPTIMIZERS["sgd"].weight_decay
OURS = [
    n for n in TRAINED if not (PRECISIONS[n].apex or PRECISIONS[n].float8 or PRECISIONS[n].pure)
]


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 10)
    )


def examine(
    name: str, kind: str = "model", length: int | None = None, **settings: Any
) -> Fingerprint:
    """What is found of a model or workload; ``settings`` are of its `Request`, and of its case."""
    case = {key: settings.pop(key) for key in ("input", "classes") if key in settings}
    workload = name if kind == "workload" else IMAGES
    asked = Case(name, workload=workload, length=length, **case)
    return examine_model(Request(asked, **{key: tuple(settings[key]) for key in settings}))


def batch(size: int = 16, seed: int = 1, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 32, 32, generator=rng)
    return x.to(device), torch.randint(10, (size,), generator=rng).to(device)


def list_batches(supply: Supply, epoch: int = 0, steps: int | None = None) -> Iterator[Any]:
    """The micro-batches of an epoch, one after the other: its batches, where none is divided."""
    return (part for batch in supply.divide(epoch, steps) for part in batch.parts)


def in_parts(x: Tensor, y: Tensor, *sizes: int) -> Divided:
    """A batch in micro-batches of these sizes."""
    return Divided(len(x), zip(x.split(sizes), y.split(sizes), strict=True))


def training(
    precision: str = "fp32",
    device: torch.device = CPU,
    seed: int = 0,
    build: Callable[[int], nn.Module] = small,
    workload: Workload | None = None,
    **axes: Any,
) -> Training:
    """A network made of a seed, with its precision's default loss scale unless told otherwise."""
    formats = PRECISIONS[precision]
    axes = {"lr": LR, "loss_scale": formats.default_loss_scale, **axes}
    set_flags(formats)
    case = Case(precision=precision, device=device.type, **axes)
    return Training(case, build(seed), device, workload or Workload())


def pass_through(
    ours: Training, batches: Iterable[Any], rates: Sequence[float] | None = None
) -> Epoch:
    """Train on some batches, as in an epoch."""
    return train_epoch(ours, batches, StepClock(CPU), lambda step, loss: None, rates)()


def distance(a: nn.Module, b: nn.Module) -> float:
    """Relative distance of two networks' parameters, in float64."""
    one, other = (
        torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (a, b)
    )
    return float((one - other).norm() / other.norm())


def run_case(case: Case, folder: str = "") -> Outcome:
    """What a worker measures of a case, in this process."""
    return measure(Job(case, folder, asked_at=time.monotonic()), Channel())


def differing_masters(ours: Training) -> list[str]:
    """The weights that are not bitwise their fp32 masters cast to the weight's dtype."""
    names = [name for name, p in ours.model.named_parameters() if p.requires_grad]
    return [
        name
        for name, master, weight in zip(names, ours.masters, ours.parameters, strict=True)
        if master.dtype != torch.float32 or not torch.equal(weight, master.to(weight.dtype))
    ]


ROUNDINGS, SUMS, TERMS = 16, 7, 3600
UNIT = {"float32": 2.0**-24, "tfloat32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next number: the relative error of one rounding."""


def step_bound(precision: str) -> float:
    """How far the update of one step may be from float64's, relative to its norm.

    To first order each rounding to the format adds at most one unit to the relative error. In
    `small` there are 14: image, two weights and two biases; the outputs of convolution, BatchNorm
    and classifier; the gradients of logits, of the classifier's weight, bias and input, of
    BatchNorm's input, and of the convolution's weight. ReLU rounds nothing. Two are left over, for
    gradients that fp16 loses: those below 2^-24, where the scaled ones are near 1.

    The sums are in fp32 whatever the format. One of n terms adds sqrt(n) units of fp32 if roundings
    are as often up as down (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 2.8).
    There are seven: in convolution and classifier and the gradients of their weights, in
    BatchNorm's mean, variance and gradient; the longest is over 16 images of 15 by 15 positions.
    """
    unit = UNIT[PRECISIONS[precision].arithmetic]
    return ROUNDINGS * unit + SUMS * math.sqrt(TERMS) * UNIT["float32"]


def step_error(precision: str, device: torch.device = CPU) -> float:
    """Relative distance of the masters' first update from the same update in float64.

    The float64 step starts from the fp32 weights that were there before any was rounded, on the
    CPU, by torch's plain optimizer. A first step has the rule ``w -= lr * (gradient + decay * w)``:
    the momentum is still empty.
    """
    ours = training(precision, device, loss_scale=128.0 if "fp16" in precision else None)
    exact = small().double()
    before = [p.detach().clone() for p in exact.parameters()]
    begun = [master.detach().cpu().double() for master in ours.masters]
    optimizer = torch.optim.SGD(exact.parameters(), LR, MOMENTUM, weight_decay=WEIGHT_DECAY)
    x, y = batch()
    F.cross_entropy(exact(x.double()), y).backward()
    optimizer.step()
    ours.step((x.to(device), y.to(device)))
    updates = [
        (master.detach().cpu().double() - begin, end.detach() - start)
        for master, begin, start, end in zip(
            ours.masters, begun, before, exact.parameters(), strict=True
        )
    ]
    mine, theirs = (torch.cat([pair[i].flatten() for pair in updates]) for i in range(2))
    return float((mine - theirs).norm() / theirs.norm())
