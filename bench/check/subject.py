"""The training of one case, started anew as often as the checks need it.

It is set up as a worker sets it up to measure the case.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bench.case import Case
from bench.data.batches import count_items, stream
from bench.training.building import open_workload
from bench.training.loop import Training, train_epoch
from bench.training.switches import keep_switches
from bench.training.timing import StepClock
from bench.worker.preparation import set_up
from bench.workloads import count_classes

if TYPE_CHECKING:
    from bench.data.batches import Supply

MOST_STEPS = 60
"""The most steps, overflows included: a dynamic scale starts at up to 2^32 and is halved each time.
"""

GAIN = 0.02
"""The least gain that counts as learning, as a share of ln(classes), the loss of guessing. For ten
classes it is 0.046; `dpn-small` on CIFAR-10 gains 0.28 in 60 steps of batch 64 (three seeds: 0.24
to 0.28), and with its labels shuffled -0.04, standard error 0.01."""

PATIENCE = 4
"""Factor for more first steps: a badly initialised wide head increases the loss at first."""

_RETAINED_STEPS = 10


class Activations(NamedTuple):
    """The output of a layer in one step. ``dead`` is the share of channels that hold the same value
    at every position of every image, in the layer's input or output, whichever is larger."""

    layer: str
    dead: float
    finite: bool


_JUDGED = 16
"""Values that a channel must have to be called dead: if a ReLU passes half of the images, 16 values
are all zero by chance once in 65,536."""


def dead_share(values: Tensor) -> float:
    """Return the share of channels, (N, channels, …), with one value in all positions and images.

    It is 0 if there are too few values to tell.

    >>> dead_share(torch.stack([torch.zeros(16), torch.arange(16.0)], dim=1))
    0.5
    """
    channels = values.detach().transpose(0, 1).flatten(1)
    if channels.shape[1] < _JUDGED:
        return 0.0
    return float((channels.amin(dim=1) == channels.amax(dim=1)).float().mean())


@contextmanager
def read_layers(training: Training) -> Iterator[list[Activations]]:
    """Read every layer, in the order reached, in the step that is taken inside the block."""
    layers: list[Activations] = []

    def see(module: nn.Module, given: tuple[Any, ...], out: object, name: str) -> None:
        if _has_channels(out):
            dead = max(dead_share(t) for t in (*given[:1], out) if _has_channels(t))
            layers.append(Activations(name, dead, bool(out.isfinite().all())))

    with ExitStack() as hooks:
        for name, module in training.model.named_modules():
            if not list(module.children()):
                hook = partial(see, name=name or "model")
                hooks.enter_context(module.register_forward_hook(hook))
        yield layers


def _has_channels(value: object) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor):
        return False
    return value.is_floating_point() and value.dim() >= 2 and value.numel() > 0


@contextmanager
def watch_gradients(training: Training) -> Iterator[dict[str, Tensor]]:
    """Yield for each trainable weight whether any step inside the block gave it a usable gradient,
    finite and not all zeros: bool, (), on the device."""
    never = torch.zeros((), dtype=torch.bool, device=training.device)
    received = {n: never for n, p in training.model.named_parameters() if p.requires_grad}

    def receive(weight: Tensor, name: str) -> None:
        assert weight.grad is not None
        received[name] = received[name] | (weight.grad.isfinite().all() & weight.grad.any())

    with ExitStack() as hooks:
        for name, weight in training.model.named_parameters():
            if name in received:
                hook = partial(receive, name=name)
                hooks.enter_context(weight.register_post_accumulate_grad_hook(hook))
        yield received


def list_tensors() -> list[Tensor]:
    """List the tensors that Python holds."""
    # by type: isinstance reads an object's __class__, which for some of torch's gives a warning
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor)]


class FirstSteps(NamedTuple):
    """The losses of the first steps of training, each on a batch of its own, and the layers in the
    step after them."""

    losses: list[float]
    layers: list[Activations]


class Retained(NamedTuple):
    """Bytes held, and tensors held with an autograd graph, after every step. On a CPU the bytes are
    those of the tensors that Python holds, elsewhere all that is allocated on the device."""

    held_bytes: list[int]
    graphs: list[int]


class Subject:
    """A case, its data, and its training from the start.

    ``folder`` holds the dataset that `bench.data.prepare` left; a user's workload needs none.
    ``classes`` is the number of classes, None if the workload computes a loss of its own.
    """

    def __init__(self, case: Case, folder: str, steps: int) -> None:
        self.case, self.folder, self.steps = case, folder, steps
        self.device = torch.device(case.device)
        with keep_switches({}):
            self.classes = count_classes(open_workload(case, folder))

    def start(self, **settings: Any) -> tuple[Supply, Training]:
        """Return the batches and the training, as a worker sets them up, for the case with some
        ``settings`` changed."""
        _, batches, training = set_up(replace(self.case, **settings), self.folder)
        return batches, training

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
    def first_steps(self) -> FirstSteps:
        """The first steps: ``steps``, or up to `PATIENCE` times as many if the loss is not below
        that of guessing by then."""
        batches, training = self.start_plain()
        supply, losses = stream(batches), list[float]()
        while len(losses) < PATIENCE * self.steps and not self._has_learnt(losses):
            new = [training.step(batch)[0] for batch in islice(supply, self.steps)]
            losses += torch.stack(new).tolist()
            if not math.isfinite(losses[-1]):
                break
        with read_layers(training) as layers:
            training.step(next(supply))
        return FirstSteps(losses, layers)

    def _has_learnt(self, losses: Sequence[float]) -> bool:
        """Return whether the last third of the losses is below guessing by twice `GAIN`."""
        if not losses:
            return False
        guess = self.guess(losses[0])
        return fmean(losses[-(len(losses) // 3) :]) < guess - 2 * GAIN * abs(guess)

    @cached_property
    def untrained_losses(self) -> list[float]:
        """The loss of the untrained network on each batch of the last third of the first steps."""
        batches, training = self.start()
        steps = len(self.first_steps.losses)
        with torch.no_grad():
            losses = [
                training.compute_loss(batch).loss
                for batch in islice(stream(batches), steps - steps // 3, steps)
            ]
        return torch.stack(losses).tolist()

    @cached_property
    def blind_losses(self) -> list[float]:
        """The losses of the same steps with the same labels, but with every input blank."""
        batches, training = self.start()
        see = training.forward

        def forward(*inputs: Any, **named: Any) -> Any:
            inputs, named = tree_map_only(Tensor, torch.zeros_like, (inputs, named))
            return see(*inputs, **named)

        training.forward = forward
        steps = islice(stream(batches), len(self.first_steps.losses))
        return torch.stack([training.step(batch)[0] for batch in steps]).tolist()

    @cached_property
    def retained(self) -> Retained:
        batches, training = self.start_plain()
        cuda, found = self.device.type == "cuda", Retained([], [])

        def look(index: int, loss: Tensor) -> None:
            gc.collect()  # what only a reference cycle holds is no leak
            tensors = list_tensors()
            strided = (t for t in tensors if t.layout is torch.strided and not cuda)
            held = sum(t.untyped_storage().nbytes() for t in strided)
            found.held_bytes.append(torch.cuda.memory_allocated() if cuda else held)
            found.graphs.append(sum(t.grad_fn is not None for t in tensors))

        steps = islice(stream(batches), _RETAINED_STEPS)
        # gc then skips what exists already: scanning torch's 300,000 objects took 0.3 s each time
        gc.collect()
        gc.freeze()
        try:
            train_epoch(training, steps, StepClock(self.device), look)
        finally:
            gc.unfreeze()
        return found


def take_items(batch: Any, size: int, times: int = 1) -> Any:
    """Return the first ``size`` items of a batch, repeated ``times`` times. Tensors without a row
    per item stay as they are."""
    items = count_items(batch)

    def take(t: Tensor) -> Tensor:
        return torch.cat([t[:size]] * times) if t.dim() and len(t) == items else t

    return tree_map_only(Tensor, take, batch)


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
