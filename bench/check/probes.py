"""The functions of the checks: what each measures of a training, and the bounds for it.

They follow Karpathy's "A Recipe for Training Neural Networks" (2019). The check ``a-b`` of
`bench.check.checks.CHECKS` is the function ``check_a_b``. Each starts the training of a case anew
as often as it needs it, as a worker sets it up.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, repeat
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.base.limits import LEAST_GAIN
from bench.check.checks import (
    CHECKS,
    NOT_RUN,
    Check,
    CheckResult,
    Finding,
    InapplicableError,
    OutOfTimeError,
)
from bench.networks.data.batches import Supply, count_items, stream
from bench.networks.workloads import count_classes
from bench.schema.case import Case
from bench.training.building import open_workload
from bench.training.loop import Training, train_epoch
from bench.training.switches import keep_switches
from bench.training.timing import StepClock
from bench.workers.preparation import set_up

MOST_STEPS = 60
"""The most steps, overflows included: a dynamic scale starts at up to 2^32 and is halved each time.
"""

PATIENCE = 4
"""Factor for more first steps: a badly initialised wide head increases the loss at first."""


class Subject:
    """A case, its data, and its training from the start.

    ``folder`` holds the dataset that `bench.networks.data.prepare` left; a user's workload needs
    none. ``classes`` is the number of classes, None if the workload computes a loss of its own. At
    ``until``, a time.monotonic(), the next step raises `OutOfTimeError`."""

    def __init__(self, case: Case, folder: str, steps: int, until: float) -> None:
        self.case, self.folder, self.steps, self.until = case, folder, steps, until
        self.device = torch.device(case.device)
        with keep_switches({}):
            self.classes = count_classes(open_workload(case, folder))

    def start(self, **settings: Any) -> tuple[Supply, Training]:
        """Return the batches and the training, as a worker sets them up, for the case with some
        ``settings`` changed."""
        self.refuse_late()
        batches, training = set_up(replace(self.case, **settings), self.folder)
        take = training.step

        def step(batch: Any) -> Any:
            self.refuse_late()
            return take(batch)

        training.step = step  # type: ignore[method-assign]
        return batches, training

    def refuse_late(self) -> None:
        if time.monotonic() > self.until:
            raise OutOfTimeError

    def start_plain(self, **settings: Any) -> tuple[Supply, Training]:
        """As `start`, with the network as it was written, so that hooks see its layers."""
        return self.start(compile=Case.compile, **settings)

    @cached_property
    def batch(self) -> Any:
        return next(stream(self.start()[0]))

    def guess(self, first: float) -> float:
        """Return the loss of guessing: ln(classes), or the ``first`` loss without classes."""
        return first if self.classes is None else math.log(self.classes)

    @cached_property
    def first_losses(self) -> list[float]:
        """The losses of the first steps, each on a batch of its own: ``steps``, or up to `PATIENCE`
        times as many if the loss is not below that of guessing by then."""
        batches, training = self.start()
        supply, losses = stream(batches), list[float]()
        while len(losses) < PATIENCE * self.steps and not self._has_learnt(losses):
            new = [training.step(batch)[0] for batch in islice(supply, self.steps)]
            losses += torch.stack(new).tolist()
            if not math.isfinite(losses[-1]):
                break
        return losses

    def _has_learnt(self, losses: Sequence[float]) -> bool:
        """Return whether the last third of the losses is below guessing by twice `LEAST_GAIN`."""
        if not losses:
            return False
        guess = self.guess(losses[0])
        return fmean(losses[-(len(losses) // 3) :]) < guess - 2 * LEAST_GAIN * abs(guess)


def answer(check: Check, subject: Subject) -> CheckResult:
    """Run a check. Any exception of the training counts as a failure."""
    try:
        finding: Finding = globals()[f"check_{check.name.replace('-', '_')}"](subject)
    except InapplicableError as error:
        return CheckResult(check, "skipped", why=str(error))
    except OutOfTimeError:
        return CheckResult(check, NOT_RUN, why="the time is over")
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return CheckResult(check, "FAIL", why=why)
    return CheckResult(check, "pass" if finding.passed else "FAIL", finding)


def answer_all(
    connection: Connection, case: Case, folder: str, steps: int, until: float, names: Sequence[str]
) -> None:
    """Send the `CheckResult` of each of these checks as it is found, from a process that was forked
    with torch imported."""
    subject = Subject(case, folder, steps, until)
    for name in names:
        connection.send(answer(CHECKS[name], subject))


def pick_items(batch: Any, order: Sequence[int]) -> Any:
    """Return a batch's items at these places; a tensor without a row for each stays as it is."""
    items = count_items(batch)

    def pick(t: Tensor) -> Tensor:
        return t[[*order]] if t.dim() and len(t) == items else t

    return tree_map_only(Tensor, pick, batch)


def take_steps(training: Training, batches: Iterable[Any], steps: int) -> Tensor:
    """Take steps until ``steps`` did not overflow, at most `MOST_STEPS`. Return the losses of all
    steps taken: float32 (taken,)."""
    losses, good = [], 0
    for batch in islice(batches, MOST_STEPS):
        loss, _, overflowed, _ = training.step(batch)
        losses.append(loss)
        good += not overflowed
        if good == steps:
            break
    return torch.stack(losses)


# ---------------------------------------------------------------------------------- the first loss

_AT_LEAST = 128  # images: the mean of their losses then varies by about 0.02 between batches
_INITIAL = 0.5


def check_initial_loss(subject: Subject) -> Finding:
    """Compare the first step's loss, over at least 128 images, with that of guessing, ln(classes).

    Logits with a standard deviation of s around equal ones add about s²/2 to it: the bound of 0.5
    allows for s = 1.
    """
    if subject.classes is None:
        raise InapplicableError("the workload's own loss has no number of classes")
    batches, training = subject.start()
    losses = []
    for batch in islice(stream(batches), math.ceil(_AT_LEAST / batches.batch_size)):
        training.reset()
        losses.append(training.step(batch)[0])
    loss, guess = float(torch.stack(losses).mean()), math.log(subject.classes)
    unit = f"(ln {subject.classes} = {guess:.3f})"
    return Finding(loss, unit, guess - _INITIAL, guess + _INITIAL)


def check_averaging(subject: Subject) -> Finding:
    """Compare the first step on a batch with that on the same batch with every image twice.

    BatchNorm's mean and variance are the same, so a mean loss gives the same step, a summed loss
    twice that. Dropout draws new masks for the copies: independent noise alone would give 0.71.
    """
    items = count_items(subject.batch)
    half = [*range(min(items, max(2, items // 2)))]
    once, twice = (_first_step(subject, pick_items(subject.batch, half * n)) for n in (1, 2))
    return Finding(twice / once if once else math.nan, "(1 = the same step)", 0.6, math.sqrt(2))


def _first_step(subject: Subject, batch: Any) -> float:
    """Return the norm of the first step's change of all weights; overflowing steps are repeated."""
    _, training = subject.start()
    before = [master.detach().clone() for master in training.masters]
    take_steps(training, repeat(batch), 1)
    moved = torch._foreach_sub([m.detach() for m in training.masters], before)
    return float(torch.nn.utils.get_total_norm(moved))


# ----------------------------------------------------------------------------------- who sees whom

_SAMPLES = 7  # rarely the length of a text, whose positions would be taken for samples
_ROUNDING = 1e-6  # of an output; float32 has 1.2e-7


def check_own_pixels(subject: Subject) -> Finding:
    """Check that the output for each sample depends on that sample, and on no other.

    In fp32 and evaluation mode, each sample in turn is replaced by the one that differs most from
    it: its own output changes, and those of the others do not. A step is taken first: the outputs
    of a head that is initialised to zero depend on nothing.
    """
    items = min(_SAMPLES, count_items(subject.batch))
    if items < 2:
        raise InapplicableError("a batch has one sample: none can replace it")
    plain = {name: getattr(Case, name) for name in ("loss_scale", "opt_level")}
    _, training = subject.start_plain(precision="fp32", **plain)
    try:
        training.step(subject.batch)
    except Exception as error:
        if subject.case.precision == "fp32":
            raise
        raise InapplicableError("it looks in fp32, in which the network fails") from error
    training.model.eval()
    batch = pick_items(subject.batch, range(items))
    given, before = _read_rows(training, batch, range(items))
    apart, wrong = torch.cdist(given, given), list[str]()
    if not apart.any():
        raise InapplicableError("all samples are equal: none can replace another")
    # by the spread: an offset would hide a change if it were compared with the output itself
    least = 1e-3 * (before.amax(0) - before.amin(0)) + _ROUNDING * before.abs().amax(0)
    for i, other in enumerate(apart.argmax(1).tolist()):
        order = [other if j == i else j for j in range(items)]
        change = (_read_rows(training, batch, order)[1] - before).abs()
        changed = (change > least).any(1).tolist()
        if others := [str(j) for j in range(items) if j != i and changed[j]]:
            wrong.append(f"the output for {', '.join(others)} depends on sample {i}")
        elif not changed[i]:
            wrong.append(f"the output for sample {i} does not depend on it")
    return Finding(len(wrong), f"of {items} samples at fault", high=0, named=tuple(wrong))


def _read_rows(training: Training, batch: Any, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return what the network is given and what it returns for each sample of a batch whose samples
    are taken in this order: float64 (samples, values) each. If it is given no row for each sample,
    the first is of the batch."""
    forward = training.forward
    rows: tuple[list[Tensor], list[Tensor]] = [], []
    picked = pick_items(batch, order)

    def watched(*given: Any, **named: Any) -> Any:
        found = forward(*given, **named)
        for kept, values in zip(rows, ((given, named), found), strict=True):
            kept.extend(_list_rows(values, len(order)))
        return found

    training.forward = watched
    torch.manual_seed(0)  # for a network that draws
    with torch.no_grad():
        training.compute_loss(picked)
    training.forward = forward
    given, found = rows
    if not found:
        raise InapplicableError("the network returns no row for each sample")
    return torch.cat(given or _list_rows(picked, len(order)), dim=1), torch.cat(found, dim=1)


def _list_rows(values: Any, items: int) -> list[Tensor]:
    """Return the tensors with a row for each item: float64 (items, values)."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.dim()]
    return [t.detach().double().reshape(items, -1) for t in tensors if len(t) == items]


# --------------------------------------------------------------------------------------- learning

_OVERFIT_IMAGES, _OVERFIT_STEPS, _OVERFIT_LOSS = 32, 200, 0.1


def check_overfit(subject: Subject) -> Finding:
    """Train on one small batch until its loss is near zero.

    A loss of 0.1 gives each image's label a probability of 90 %. Dropout keeps the training loss
    higher, so the loss in evaluation mode counts as well. With frozen weights the rest may be
    unable to learn a batch by heart, and for a workload's own loss 0.1 may mean nothing: in these
    cases it is enough to halve the first loss.
    """
    _, training = subject.start()
    frozen = sum(not p.requires_grad for p in training.model.parameters())
    few = pick_items(subject.batch, range(min(_OVERFIT_IMAGES, count_items(subject.batch))))
    losses: list[float] = []
    for _ in range(_OVERFIT_STEPS):
        losses.append(float(training.step(few)[0]))
        half = losses[0] - abs(losses[0]) / 2
        bound = max(_OVERFIT_LOSS, half) if frozen else _OVERFIT_LOSS
        bound = half if subject.classes is None else bound
        if losses[-1] <= bound or not math.isfinite(losses[-1]):
            break
    loss = losses[-1]
    if math.isfinite(loss) and loss > bound:
        loss = min(loss, training.evaluate([few])[0])
    unit = f"after {len(losses)} steps on {count_items(few)} samples"
    named = f"{frozen} weights are frozen; --skip overfit if that is intended"
    return Finding(loss, unit, high=bound, named=(named,) if frozen else ())


def check_first_steps(subject: Subject) -> Finding:
    """Measure how far the loss in the last third of the first steps is below that of guessing."""
    losses = subject.first_losses
    guess = subject.guess(losses[0])
    return _find_gain(subject, [guess] * len(losses), f"below guessing after {len(losses)} steps")


def check_baseline(subject: Subject) -> Finding:
    """Measure how far the loss in the last third of the first steps is below that of the same steps
    with the same labels, but with every input blank."""
    batches, training = subject.start()
    see = training.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        inputs, named = tree_map_only(Tensor, torch.zeros_like, (inputs, named))
        return see(*inputs, **named)

    training.forward = forward
    steps = islice(stream(batches), len(subject.first_losses))
    blind = torch.stack([training.step(batch)[0] for batch in steps]).tolist()
    if not all(map(math.isfinite, blind)) and math.isfinite(subject.first_losses[-1]):
        # such as one that divides each image by its own deviation
        raise InapplicableError("blank inputs give the network no finite loss")
    return _find_gain(subject, blind, "lower than with blank inputs")


def _find_gain(subject: Subject, others: Sequence[float], unit: str) -> Finding:
    losses = subject.first_losses
    last = len(losses) // 3
    gain = fmean(o - own for o, own in zip(others[-last:], losses[-last:], strict=True))
    return Finding(gain, unit, LEAST_GAIN * abs(subject.guess(losses[0])))


# --------------------------------------------------------------------------------- the same again

_AGAIN = 3
_NEAR = 0.1


def check_seed(subject: Subject, exact: bool | None = None) -> Finding:
    """Train three steps twice from one seed, and compare the weights and the losses.

    On a CPU, or with ``exact``, both must be bitwise equal. On CUDA some kernels add in no fixed
    order: the distance of the master weights may be a tenth of their distance to those of a third
    training, from the same start on other batches.
    """
    exact = subject.device.type == "cpu" if exact is None else exact
    losses, weights, masters = zip(*(_train(subject, 0) for _ in range(2)), strict=True)
    if exact:
        distance = _distance(*weights)
        if distance == 0 and not torch.equal(*losses):
            distance = float((losses[0] - losses[1]).abs().max())
        return Finding(distance, f"apart after {_AGAIN} steps", high=0)
    other = _distance(masters[0], _train(subject, 1)[2])
    unit = f"apart, {other:.2g} with other batches"
    # weights that do not move show nothing
    return Finding(_distance(*masters), unit, high=_NEAR * other or math.nan)


def _train(subject: Subject, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take three steps without overflow. Return losses, the network's state and masters, flat."""
    batches, training = subject.start()
    losses = take_steps(training, stream(batches, epoch), _AGAIN)
    # without its modules' extra state
    state = [t for t in training.model.state_dict().values() if isinstance(t, Tensor)]
    floating = [t for t in state if t.is_floating_point()]
    flat = [
        torch.cat([t.detach().double().flatten() for t in s]) for s in (floating, training.masters)
    ]
    return losses, flat[0], flat[1]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


# -------------------------------------------------------------------------------------- the layers

_GRADIENT_STEPS = 10
"""Steps without overflow in which a weight must receive a gradient once. If a head or the last
BatchNorm of a block starts at zero, the layers before it receive none in the first step."""


def check_gradients(subject: Subject) -> Finding:
    """Find trainable weights without a finite, non-zero gradient in ten steps without overflow."""
    batches, training = subject.start_plain()
    usable = dict[str, Tensor]()  # on the device

    def receive(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        usable[name] = usable[name] | (weight.grad.isfinite().all() & weight.grad.any())

    for name, weight in training.model.named_parameters():
        if weight.requires_grad:
            usable[name] = torch.zeros((), dtype=torch.bool, device=subject.device)
            weight.register_post_accumulate_grad_hook(partial(receive, name=name))
    take_steps(training, stream(batches), _GRADIENT_STEPS)
    without = tuple(name for name, once in usable.items() if not once)
    frozen = sum(not p.requires_grad for p in training.model.parameters())
    unit = f"of {len(usable)} weights, {frozen} frozen"
    return Finding(len(usable) - len(without), unit, low=len(usable), named=without)


# ------------------------------------------------------------------------------ what stays behind

_HELD_STEPS = 10
_KEPT_BYTES = {"cpu": 64, "cuda": 4 * 512}
"""Bytes that a step may keep: loss, correct predictions, overflow and loss scale. They take 12 to
17 bytes on a CPU, and on a GPU four blocks of 512, the least that torch allocates. The logits of a
batch of 64 take 2,560."""


def check_memory(subject: Subject) -> Finding:
    """Measure how many more bytes are held after each step: on a CPU by the tensors that Python
    holds, elsewhere of all that is allocated on the device."""
    batches, training = subject.start_plain()
    allocated = list[int]()

    def look(index: int, loss: Tensor) -> None:
        gc.collect()  # what only a reference cycle holds is no leak
        if subject.device.type == "cuda":
            allocated.append(torch.cuda.memory_allocated())
            return
        # by type: isinstance reads an object's __class__, which for some of torch's gives a warning
        tensors = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
        strided = (t for t in tensors if t.layout is torch.strided)
        allocated.append(sum(t.untyped_storage().nbytes() for t in strided))

    steps = islice(stream(batches), _HELD_STEPS)
    # gc then skips what exists already: scanning torch's 300,000 objects took 0.3 s each time
    gc.collect()
    gc.freeze()
    try:
        train_epoch(training, steps, StepClock(subject.device), look)
    finally:
        gc.unfreeze()
    most = _KEPT_BYTES[subject.device.type]
    return Finding(growth(allocated), "bytes more after each step", high=most)


def growth(sizes: Sequence[int]) -> float:
    """Return the mean growth per step in the second half: momentum and the like arise in the first.

    >>> growth([0, 5, 5, 5, 6, 7])
    1.0
    """
    half = len(sizes) // 2
    return (sizes[-1] - sizes[half]) / (len(sizes) - 1 - half)
