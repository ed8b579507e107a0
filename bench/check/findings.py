"""The functions of the checks: what each measures of a training, and the bounds for it.

They follow Karpathy's "A Recipe for Training Neural Networks" (2019). The check ``a-b`` of
`bench.check.checks.CHECKS` is the function ``check_a_b``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from itertools import islice, repeat
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.check.checks import Finding, InapplicableError
from bench.check.subject import GAIN, Subject, evaluating, take_items, take_steps
from bench.data import Dataset
from bench.data.batches import PADDING, Batches, count_items, stream
from bench.precision import LEAST_LABELLED, list_formats
from bench.training.counting import count_step, judge_formats
from bench.training.loop import Training, copy_state
from bench.training.trial import read_bits
from bench.work import share_formats


def _find_faults(wrong: Sequence[str], unit: str, **data: Any) -> Finding:
    return Finding(len(wrong), unit, high=0, named=tuple(wrong), data=data)


# ------------------------------------------------------------------------------------ the images


def check_batch(subject: Subject) -> Finding:
    """Look up every image of the first batch, and its label, in the dataset.

    Without augmentation, each image must equal one of the dataset, byte for byte, with its label.
    With augmentation, it must be one of the 162 crops and mirrored crops of that image.
    """
    batches, _ = subject.start()
    if subject.images is None or not isinstance(batches, Batches):
        raise InapplicableError("the workload has no images of --dataset")
    plain = copy(batches)
    plain.augment = False
    (x, y), (as_they_are, labels) = next(stream(batches)), next(stream(plain))
    originals = _to_bytes(as_they_are, batches)
    known = _find_images(subject.images.data, originals, labels)
    wrong = [
        f"image {i} (label {int(y[i])})"
        for i in range(len(y))
        if i not in known
        or int(y[i]) != int(labels[i])
        or (batches.augment and not _is_crop(_to_bytes(x[i : i + 1], batches)[0], originals[i]))
    ]
    return _find_faults(wrong, f"of {len(y)} images not the dataset's")


def _to_bytes(x: Tensor, batches: Batches) -> Tensor:
    """Undo the normalisation. Return int16 (N, 3, 32, 32), -1 for values that are not bytes."""
    pixels = x / batches.scale + batches.mean
    whole = pixels.round()
    # fp32 is exact to 2e-5 of a pixel; values that never were bytes lie anywhere between two
    fits = ((pixels - whole).abs() < 0.01) & (whole >= 0) & (whole <= 255)
    return torch.where(fits, whole, -1).to(torch.int16).cpu()


def _find_images(data: Dataset, images: Tensor, labels: Tensor) -> set[int]:
    whole = data.train_images
    flat = whole.reshape(len(whole), -1)
    wanted = images.numpy().astype(np.int16).reshape(len(images), -1)
    corners = np.ascontiguousarray(flat[:, ::307]).astype(np.int16)  # a few pixels exclude most
    return {
        i
        for i, image in enumerate(wanted)
        for at in np.flatnonzero((corners == image[::307]).all(axis=1))
        if (flat[at] == image).all() and int(data.train_labels[at]) == int(labels[i])
    }


def _is_crop(image: Tensor, original: Tensor) -> bool:
    windows = pad(original, [PADDING] * 4).unfold(1, 32, 1).unfold(2, 32, 1)
    return any(
        bool((windows == view[:, None, None]).all(dim=(0, 3, 4)).any())
        for view in (image, image.flip(-1))
    )


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
    return Finding(loss, unit, guess - _INITIAL, guess + _INITIAL, data={"guess": guess})


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

    In evaluation mode, a random sum of each sample's outputs is differentiated with respect to the
    float inputs and the outputs of `nn.Embedding` layers of the whole batch. A step is taken first:
    the outputs of a head that is initialised to zero depend on no input.
    """
    _, training = subject.start(compiled=False)
    take_steps(training, repeat(subject.batch), 1)
    scale = float(training.current_scale()) / count_items(subject.batch)  # as in a batch's mean
    batch = take_items(subject.batch, _SAMPLES)
    items = count_items(batch)
    with evaluating(training.model), _watch(training, items) as (inputs, outputs):
        training.compute_loss(batch)
    if not inputs:
        raise InapplicableError("the network has no float inputs and no nn.Embedding")
    if not outputs:
        raise InapplicableError("the network returns no row for each sample")
    rng = torch.Generator().manual_seed(0)
    sums = sum(
        (t.float() * torch.randn(t.shape, generator=rng).to(t.device)).flatten(1).sum(1)
        for t in outputs
    )
    assert isinstance(sums, torch.Tensor)
    wrong = []
    for i in range(items):
        gradients = _scaled_gradients(sums[i], inputs, scale)
        # NaN is not 0 either
        reached = torch.stack([g.flatten(1).ne(0).any(dim=1) for g in gradients]).any(dim=0)
        others = [str(j) for j in range(items) if j != i and reached[j]]
        if not all(g.isfinite().all() for g in gradients):
            wrong.append(f"the gradient of sample {i} is not finite")
        elif others:
            wrong.append(f"the output for sample {i} depends on {', '.join(others)}")
        elif not reached[i]:
            wrong.append(f"the output for sample {i} does not depend on it")
    return _find_faults(wrong, f"of {items} samples at fault")


@contextmanager
def _watch(training: Training, items: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect the inputs (as leaves) and outputs of the network that have a row for each sample."""
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
    with ExitStack() as hooks:
        for layer in training.model.modules():
            if isinstance(layer, nn.Embedding):
                hooks.enter_context(layer.register_forward_hook(lambda _, given, out: cut(out)))
        hooks.callback(setattr, training, "forward", forward)
        yield inputs, outputs


def _scaled_gradients(output: Tensor, inputs: list[Tensor], scale: float) -> Sequence[Tensor]:
    """Return gradients, scaled as a step's against underflow in fp16; less if not finite."""
    while True:
        gradients = torch.autograd.grad(
            output * scale, inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        if scale <= 1 or all(g.isfinite().all() for g in gradients):
            return gradients
        scale /= 2


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
        bound = _bound_overfit(subject, losses[0], frozen > 0)
        if losses[-1] <= bound or not math.isfinite(losses[-1]):
            break
    loss = losses[-1]
    if math.isfinite(loss) and loss > bound:
        loss = min(loss, training.evaluate([few])[0])
    what = "images" if subject.images else "items"
    unit = f"after {len(losses)} steps on {count_items(few)} {what}"
    named: tuple[str, ...] = ()
    if frozen:
        unit = f"after {len(losses)} steps, {frozen} frozen"
        named = (f"{frozen} weights are frozen; --skip overfit if that is intended",)
    return Finding(loss, unit, high=bound, named=named, data={"losses": losses})


def _bound_overfit(subject: Subject, first: float, frozen: bool) -> float:
    if not math.isfinite(first):
        return _OVERFIT_LOSS
    half = first - abs(first) / 2
    if subject.classes is None:
        return half
    return max(_OVERFIT_LOSS, half) if frozen else _OVERFIT_LOSS


def check_first_steps(subject: Subject) -> Finding:
    """Measure how far the loss in the last third of the first steps is below the untrained
    network's. Both are of the same batches, so that differences between batches cancel."""
    losses, before = subject.first_steps.losses, subject.untrained_losses
    return _find_gain(subject, before, f"lower after {len(losses)} steps", losses=losses)


def check_baseline(subject: Subject) -> Finding:
    """Measure how far the loss in the last third of the first steps is below that with blank
    inputs. Both see the same labels in the same order."""
    blind = subject.blind_losses
    if not all(map(math.isfinite, blind)) and math.isfinite(subject.first_steps.losses[-1]):
        # such as one that divides each image by its own deviation
        raise InapplicableError("blank inputs give the network no finite loss")
    unit = f"lower than with blank {'images' if subject.images else 'inputs'}"
    return _find_gain(subject, blind, unit, blank_losses=blind)


def _find_gain(subject: Subject, others: Sequence[float], unit: str, **data: Any) -> Finding:
    losses = subject.first_steps.losses
    last = len(losses) // 3
    gain = fmean(o - own for o, own in zip(others[-last:], losses[-last:], strict=True))
    return Finding(gain, unit, GAIN * abs(subject.guess(losses[0])), data=data)


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


def check_arithmetic(subject: Subject) -> Finding:
    """Find the share of the FLOP of a step that runs in the format of the precision."""
    batches, training = subject.start(compiled=False)
    work = count_step(training, batches, subject.case)
    share, other = judge_formats(work, training.precision, training.model)
    if share is None:
        raise InapplicableError("a step multiplies nothing")
    formats = " or ".join(list_formats(training.precision))
    return Finding(
        share,
        f"of the FLOP in {formats}",
        low=LEAST_LABELLED,
        named=(other,) if other else (),
        data=dict(share_formats(work)),
    )


def _train(subject: Subject, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take three steps without overflow. Return losses, the network's state and masters, flat."""
    batches, training = subject.start()
    losses = take_steps(training, stream(batches, epoch), _AGAIN)
    held = [t for t in _list_tensors(training.model).values() if t.is_floating_point()]
    flat = [torch.cat([t.detach().double().flatten() for t in s]) for s in (held, training.masters)]
    return losses, flat[0], flat[1]


def _list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network's state, without its modules' extra state."""
    return {n: t for n, t in model.state_dict().items() if isinstance(t, Tensor)}


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


# -------------------------------------------------------------------------------------- the layers


def check_gradients(subject: Subject) -> Finding:
    """Find trainable weights without a finite, non-zero gradient in ten steps without overflow."""
    received = subject.first_steps.received
    _, training = subject.start()
    frozen = [n for n, p in training.model.named_parameters() if not p.requires_grad]
    without = tuple(name for name, usable in received.items() if not usable)
    weights, more = ("", f", {len(frozen)} frozen") if frozen else (" weights", "")
    return Finding(
        len(received) - len(without),
        f"of {len(received)}{weights} receive gradients{more}",
        low=len(received),
        named=without,
        data={"frozen": frozen, "readings": [r.gradients for r in subject.first_steps.readings]},
    )


_DEAD = 0.5


def check_activations(subject: Subject) -> Finding:
    """Find layers that are dead or not finite in the last of the first steps. A layer is dead if
    more than half of its channels hold one value for all images; none is in `dpn-small` on
    CIFAR-10."""
    readings = subject.first_steps.readings
    last = readings[-1].activations
    named = [f"{a.layer} ({a.dead:.0%} dead)" for a in last if a.dead > _DEAD]
    named += [f"{a.layer} (not finite)" for a in last if a.spread.not_finite]
    worst = max((a.dead for a in last), default=0.0)
    unit = f"of {len(last)} layers; at most {worst:.0%} dead"
    return _find_faults(named, unit, readings=[r.activations for r in readings])


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
    weights = f", {len(frozen)} frozen" if frozen else ""
    return _find_faults(still, f"of {len(kept)} layers stand still{weights}", frozen=frozen)


# ------------------------------------------------------------------------------ what stays behind

_KEPT_BYTES = {"cpu": 64, "cuda": 4 * 512}
"""Bytes that a step may keep: loss, correct predictions, overflow and loss scale. They take 12 to
17 bytes on a CPU, and on a GPU four blocks of 512, the least that torch allocates. The logits of a
batch of 64 take 2,560."""


def check_memory(subject: Subject) -> Finding:
    held = subject.retained.held_bytes
    most = _KEPT_BYTES[subject.device.type]
    return Finding(growth(held), "bytes more after each step", high=most, data={"held": held})


def check_graphs(subject: Subject) -> Finding:
    """Count how many more tensors with an autograd graph are held after each step. Once backward
    has freed what the graph saved, such a leak takes few bytes, and no memory count includes the
    graph's nodes, but they slow the loop down all the same."""
    graphs = subject.retained.graphs
    return Finding(growth(graphs), "tensors more after each step", high=0, data={"held": graphs})


def growth(held: Sequence[int]) -> float:
    """Return the mean growth per step in the second half: momentum and the like arise in the first.

    >>> growth([0, 5, 5, 5, 6, 7])
    1.0
    """
    half = len(held) // 2
    return (held[-1] - held[half]) / (len(held) - 1 - half)


def check_evaluation(subject: Subject) -> Finding:
    """Check that evaluation keeps no graph, does not train, and leaves the training as it was."""
    batches, training = subject.start(compiled=False)
    training.step(subject.batch)
    before = copy_state(_list_tensors(training.model))
    seen: list[tuple[bool, bool]] = []

    def look(model: nn.Module, _: Any, out: Any) -> None:
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        seen.append((any(t.requires_grad for t in tensors), model.training))

    with training.model.register_forward_hook(look):
        training.evaluate(islice(batches.evaluation(), 2))
    after = _list_tensors(training.model)
    faults = {
        "its outputs carry a graph": any(graph for graph, _ in seen),
        "the network is in training mode within it": any(trains for _, trains in seen),
        "it leaves the network in evaluation mode": not training.model.training,
        **{
            f"it changes {name}": read_bits(t) != read_bits(after[name])
            for name, t in before.items()
        },
    }
    wrong = [fault for fault, found in faults.items() if found]
    return _find_faults(wrong, f"faults in {len(seen)} batches")
