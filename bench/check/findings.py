"""The functions of the checks: what each measures of a training, and the bounds for it.

They follow Karpathy's "A Recipe for Training Neural Networks" (2019). The check ``a-b`` of
`bench.check.checks.CHECKS` is the function ``check_a_b``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice, repeat
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.case import Case
from bench.check.checks import Finding, InapplicableError
from bench.check.subject import GAIN, Subject, take_items, take_steps, watch_gradients
from bench.data.batches import count_items, stream
from bench.training.loop import Training


def _find_faults(wrong: Sequence[str], unit: str) -> Finding:
    return Finding(len(wrong), unit, high=0, named=tuple(wrong))


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
    half = max(2, count_items(subject.batch) // 2)
    once, twice = (_first_step(subject, take_items(subject.batch, half, n)) for n in (1, 2))
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


def check_own_pixels(subject: Subject) -> Finding:
    """Check that the output for each sample depends on the input of that sample only.

    In fp32 and evaluation mode, a random sum of each sample's outputs is differentiated with
    respect to the float inputs and the outputs of `nn.Embedding` layers of the whole batch. A step
    is taken first: the outputs of a head that is initialised to zero depend on no input.
    """
    plain = {name: getattr(Case, name) for name in ("loss_scale", "opt_level")}
    _, training = subject.start_plain(precision="fp32", **plain)
    training.step(subject.batch)
    batch = take_items(subject.batch, _SAMPLES)
    items = count_items(batch)
    inputs, outputs = _see(training, batch, items)
    if not inputs:
        raise InapplicableError("the network has no float inputs and no nn.Embedding")
    if not outputs:
        raise InapplicableError("the network returns no row for each sample")
    rng = torch.Generator().manual_seed(0)
    sums = torch.stack(
        [
            (t.float() * torch.randn(t.shape, generator=rng).to(t.device)).flatten(1).sum(1)
            for t in outputs
        ]
    ).sum(0)
    wrong = []
    for i in range(items):
        gradients = torch.autograd.grad(
            sums[i], inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        # NaN is not 0 either
        reached = torch.stack([g.flatten(1).ne(0).any(dim=1) for g in gradients]).any(dim=0)
        if others := [str(j) for j in range(items) if j != i and reached[j]]:
            wrong.append(f"the output for sample {i} depends on {', '.join(others)}")
        elif not reached[i]:
            wrong.append(f"the output for sample {i} does not depend on it")
    return _find_faults(wrong, f"of {items} samples at fault")


def _see(training: Training, batch: Any, items: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the inputs, as leaves, and the outputs of the network that have a row for each of the
    ``items`` of a batch."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    forward = training.forward

    def is_of_samples(t: Tensor) -> bool:
        return t.is_floating_point() and t.dim() > 0 and len(t) == items

    def cut(t: Tensor) -> Tensor:
        if is_of_samples(t):
            t = t.detach().clone().requires_grad_()
            inputs.append(t)
        return t

    def watched(*given: Any, **named: Any) -> Any:
        given, named = tree_map_only(Tensor, cut, (given, named))
        found = forward(*given, **named)
        outputs.extend(t for t in tree_leaves(found) if isinstance(t, Tensor) and is_of_samples(t))
        return found

    training.forward = watched
    for layer in training.model.modules():
        if isinstance(layer, nn.Embedding):
            layer.register_forward_hook(lambda _, given, out: cut(out))
    training.model.eval()
    training.compute_loss(batch)
    return inputs, outputs


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
    few = take_items(subject.batch, _OVERFIT_IMAGES)
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
    """Measure how far the loss in the last third of the first steps is below the untrained
    network's. Both are of the same batches, so that differences between batches cancel."""
    steps = len(subject.first_steps.losses)
    return _find_gain(subject, subject.untrained_losses, f"lower after {steps} steps")


def check_baseline(subject: Subject) -> Finding:
    """Measure how far the loss in the last third of the first steps is below that with blank
    inputs. Both see the same labels in the same order."""
    blind = subject.blind_losses
    if not all(map(math.isfinite, blind)) and math.isfinite(subject.first_steps.losses[-1]):
        # such as one that divides each image by its own deviation
        raise InapplicableError("blank inputs give the network no finite loss")
    return _find_gain(subject, blind, "lower than with blank inputs")


def _find_gain(subject: Subject, others: Sequence[float], unit: str) -> Finding:
    losses = subject.first_steps.losses
    last = len(losses) // 3
    gain = fmean(o - own for o, own in zip(others[-last:], losses[-last:], strict=True))
    return Finding(gain, unit, GAIN * abs(subject.guess(losses[0])))


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
    held = [t for t in state if t.is_floating_point()]
    flat = [torch.cat([t.detach().double().flatten() for t in s]) for s in (held, training.masters)]
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
    with watch_gradients(training) as received:
        take_steps(training, stream(batches), _GRADIENT_STEPS)
    without = tuple(name for name, usable in received.items() if not usable)
    frozen = sum(not p.requires_grad for p in training.model.parameters())
    unit = f"of {len(received)} weights, {frozen} frozen"
    return Finding(len(received) - len(without), unit, low=len(received), named=without)


_DEAD = 0.5


def check_activations(subject: Subject) -> Finding:
    """Find layers that are dead or not finite after the first steps. A layer is dead if more than
    half of its channels hold one value for all images; none is in `dpn-small` on CIFAR-10."""
    layers = subject.first_steps.layers
    named = [f"{a.layer} ({a.dead:.0%} dead)" for a in layers if a.dead > _DEAD]
    named += [f"{a.layer} (not finite)" for a in layers if not a.finite]
    worst = max((a.dead for a in layers), default=0.0)
    return _find_faults(named, f"of {len(layers)} layers; at most {worst:.0%} dead")


def check_batchnorm(subject: Subject) -> Finding:
    """Find BatchNorms whose running statistics a step leaves unchanged. One whose weight and bias
    have ``requires_grad`` off is frozen on purpose."""
    _, training = subject.start()
    kept = {
        name: module
        for name, module in training.model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }
    frozen = [
        name
        for name, module in kept.items()
        if module.affine and not any(p.requires_grad for p in module.parameters())
    ]

    def read() -> dict[str, Tensor]:
        return {n: torch.stack([m.running_mean, m.running_var]) for n, m in kept.items()}  # type: ignore[list-item]

    before = read()
    training.step(subject.batch)
    still = [n for n, after in read().items() if n not in frozen and after.equal(before[n])]
    return _find_faults(still, f"of {len(kept)} layers stand still, {len(frozen)} frozen")


# ------------------------------------------------------------------------------ what stays behind

_KEPT_BYTES = {"cpu": 64, "cuda": 4 * 512}
"""Bytes that a step may keep: loss, correct predictions, overflow and loss scale. They take 12 to
17 bytes on a CPU, and on a GPU four blocks of 512, the least that torch allocates. The logits of a
batch of 64 take 2,560."""


def check_memory(subject: Subject) -> Finding:
    most = _KEPT_BYTES[subject.device.type]
    return Finding(growth(subject.retained.held_bytes), "bytes more after each step", high=most)


def check_graphs(subject: Subject) -> Finding:
    """Count how many more tensors with an autograd graph are held after each step. Once backward
    has freed what the graph saved, such a leak takes few bytes, and no memory count includes the
    graph's nodes, but they slow the loop down all the same."""
    return Finding(growth(subject.retained.graphs), "tensors more after each step", high=0)


def growth(held: Sequence[int]) -> float:
    """Return the mean growth per step in the second half: momentum and the like arise in the first.

    >>> growth([0, 5, 5, 5, 6, 7])
    1.0
    """
    half = len(held) // 2
    return (held[-1] - held[half]) / (len(held) - 1 - half)
