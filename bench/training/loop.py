"""One epoch of training, written as a plain training loop.

No NVML, CSV or command line here. Nothing in a step waits for the device: losses, correct
predictions and overflows stay there until the epoch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Case
from bench.errors import UsageError
from bench.optimization import scale_lr
from bench.precision import Precision, autocast, cast, find_formats
from bench.training.loss_scale import build_loss_scale
from bench.training.optimizers import build_optimizer, clear_state
from bench.training.timing import StepClock

CLASSES = 10


class Training:
    """A network with everything a step changes: weights, optimizer state, loss scale.

    Args:
        model: on the CPU, in float32.
        lr: learning rate of every step, unless `set_lr` says otherwise.
        optimizer: one of `OPTIMIZERS`.
        loss_scale: an axis value: None, a positive number or the name of one of `POLICIES`.
        opt_level: one of `OPT_LEVELS`, for apex.
        classes: logits that the model gives for an image.
    """

    apex: str | None = None
    """What of NVIDIA apex trains: its version and interface; None where it does not."""

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        *,
        lr: float,
        optimizer: str = "sgd",
        loss_scale: float | str | None = None,
        skip_overflow: bool = False,
        channels_last: bool = False,
        compile: bool = False,
        opt_level: str | None = None,
        classes: int = CLASSES,
    ) -> None:
        self._classes = classes
        # kept on the CPU, so that remembering the start costs no device memory
        self._start = {name: value.clone() for name, value in model.state_dict().items()}
        self._loss_scale_setting, self._skip_overflow = loss_scale, skip_overflow
        self._opt_level, self._optimizer_name = opt_level, optimizer
        self.lr, self.precision, self.device = lr, precision, device
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._equip()
        # dynamic=False: the last, smaller batch compiles for itself during warm-up instead of
        # turning the full batch's code into the slower general one
        self.forward = torch.compile(model, dynamic=False) if compile else model
        self.reset()

    def _move(self) -> None:
        self.model.to(self.device, memory_format=self.memory_format)  # type: ignore[call-overload]

    def _equip(self) -> None:
        """Cast the network and move it, and make masters and optimizer."""
        cast(self.model, self.precision)
        self._move()
        # the masters are what the optimizer steps: fp32 copies, or the weights themselves where the
        # precision has none or where the cast left them in fp32 (affine BatchNorm)
        self.masters = [
            p.detach().float().clone().requires_grad_()
            if self.precision.masters and p.dtype != torch.float32
            else p
            for p in self.parameters
        ]
        # one list of (master, weight) for each dtype: in torch 2.9 and 2.10 a multi-tensor copy
        # on CUDA writes the whole list as if it had its first destination's dtype, and later
        # versions launch one kernel per tensor for a mixed list (pytorch pull request 173531)
        copied: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for master, weight in zip(self.masters, self.parameters, strict=True):
            if master is not weight:
                copied.setdefault(weight.dtype, []).append((master, weight))
        self._copied = list(copied.values())
        self.optimizer = build_optimizer(self._optimizer_name, self.masters, self.lr)

    @classmethod
    def of(
        cls, case: Case, model: nn.Module, device: torch.device, classes: int = CLASSES
    ) -> Training:
        """The training that ``case`` asks for.

        Raises:
            UnsupportedError: it needs what is not installed.
        """
        formats = find_formats(case.precision, case.opt_level)
        if formats.apex:
            from bench.training.apex import ApexTraining  # which extends this class

            cls = ApexTraining
        return cls(
            model,
            formats,
            device,
            lr=scale_lr(case.lr, case.lr_scaling, case.batch_size, case.base_batch),
            optimizer=case.optimizer,
            loss_scale=case.loss_scale,
            skip_overflow=case.skip_overflow,
            channels_last=case.channels_last,
            compile=case.compile,
            opt_level=case.opt_level,
            classes=classes,
        )

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to the start: weights, BatchNorm statistics, optimizer, lr and loss scale.

        Warm-up steps train the model; without this, the epoch after them is not one from scratch.
        """
        self.model.load_state_dict(self._start)
        if self.precision.masters:
            named = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
            for master, (name, weight) in zip(self.masters, named, strict=True):
                start = weight if self.precision.rounds_start else self._start[name]
                master.copy_(start)
                master.grad = None
        self.model.zero_grad(set_to_none=True)
        clear_state(self.optimizer)
        self.set_lr(self.lr)
        self.loss_scale = build_loss_scale(
            self._loss_scale_setting, self.device, self._skip_overflow
        )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the steps from here on."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def step(self, x: Tensor | Iterable[Tensor], y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Train on one batch, whole or in micro-batches, and update once.

        The loss of a micro-batch of n images of N counts n / N, so that the gradients of all of
        them sum to that of the mean loss over the batch. autograd sums them in the weight's
        ``.grad``, in its dtype, as for apex and torch.amp: fp16 weights sum in fp16. BatchNorm
        normalises each micro-batch by its own statistics, which makes the result another one.

        Args:
            x: images, float32 (N, 3, 32, 32), on the device; or micro-batches of them, in order.
            y: labels, int64 (N,).

        Returns:
            Mean loss (float32), images predicted right (int64) and whether the scaled gradients
            overflowed (bool), each of shape () and still on the device.
        """
        losses, hits, done = [], [], 0
        for part in (x,) if isinstance(x, Tensor) else x:
            labels = y[done : done + len(part)]
            done += len(part)
            logits = self.classify(part)
            loss = F.cross_entropy(logits, labels)
            if len(part) < len(y):
                loss = loss * (len(part) / len(y))
            self.backward(loss, last=done == len(y))
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(dim=1) == labels).sum())
        overflowed = self.update()
        return reduce(torch.add, losses), reduce(torch.add, hits), overflowed

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backpropagate the scaled loss, float32 of shape (), and add to the gradients.

        Args:
            last: whether an update follows, rather than another micro-batch.
        """
        self.loss_scale.scale(loss).backward()

    def current_scale(self) -> Tensor:
        """What the next loss is multiplied by, float32 of shape ()."""
        return self.loss_scale.current()

    def classify(self, x: Tensor) -> Tensor:
        """Logits of images as a step computes them: (N, 3, 32, 32) to (N, classes), float32.

        Raises:
            UsageError: the model returns another shape.
        """
        if self.precision.masters:
            x = x.to(getattr(torch, self.precision.weights))
        with autocast(self.precision, self.device):
            logits: Tensor = self.forward(x.contiguous(memory_format=self.memory_format))
        if logits.shape != (len(x), self._classes):
            raise UsageError(
                f"the model returned {tuple(logits.shape)} for {len(x)} images; "
                f"it must return ({len(x)}, {self._classes})"
            )
        return logits.float()

    @torch.no_grad()
    def update(self) -> Tensor:
        """Step the optimizer, through the masters where there are any, and clear all gradients.

        The rule, for each weight that has a gradient: copy the gradient to its master in fp32,
        step the master, and round the master to the weight's dtype. A weight in fp32 is its own
        master and is not copied. A weight without a gradient is left as it is, momentum included.

        Returns:
            Whether the scaled gradients overflowed: bool, of shape ().
        """
        for master, weight in chain.from_iterable(self._copied):
            if weight.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.empty_like(master)
        moving = [[pair for pair in group if pair[1].grad is not None] for group in self._copied]
        for pairs in filter(None, moving):
            torch._foreach_copy_([m.grad for m, _ in pairs], [w.grad for _, w in pairs])  # type: ignore[misc]
            for _, weight in pairs:
                weight.grad = None  # its memory is free before the optimizer steps
        overflowed = self.loss_scale.step(self.optimizer, self.masters)
        for pairs in filter(None, moving):
            torch._foreach_copy_([w for _, w in pairs], [m for m, _ in pairs])
        self.model.zero_grad(set_to_none=True)
        return overflowed

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Mean loss and fraction right over ``batches``, in evaluation mode."""
        self.model.eval()
        losses, hits, images = [], [], 0
        for x, y in batches:
            logits = self.classify(x)
            losses.append(F.cross_entropy(logits, y, reduction="sum"))
            hits.append((logits.argmax(dim=1) == y).sum())
            images += len(y)
        self.model.train()
        return float(torch.stack(losses).sum()) / images, int(torch.stack(hits).sum()) / images


@dataclass(frozen=True)
class Epoch:
    """What the steps of an epoch left behind, one value a step."""

    images: list[int]
    losses: list[float]
    correct: list[int]
    overflowed: list[bool]
    loss_scales: list[float]


def train_epoch(
    training: Training,
    batches: Iterable[tuple[Tensor | Iterable[Tensor], Tensor]],
    clock: StepClock,
    on_step: Callable[[int, Tensor], None],
    rates: Sequence[float] | None = None,
) -> Callable[[], Epoch]:
    """Train on ``batches``; the epoch's readings are fetched from the device when asked for.

    Args:
        batches: images and labels, as `Training.step` takes them.
        on_step: told each step's index and loss (float32, (), on the device).
        rates: the learning rate of each step, at least as many as batches; by default all have
            that of the training.

    Returns:
        A function that waits for the device and returns the `Epoch`, so that the caller decides
        what its clock sees.
    """
    images: list[int] = []
    results: list[tuple[Tensor, ...]] = []
    clock.tick()
    for index, (x, y) in enumerate(batches):
        if rates is not None:
            training.set_lr(rates[index])
        scale = training.current_scale()
        results.append((*training.step(x, y), scale))
        clock.tick()
        images.append(len(y))
        on_step(index, results[-1][0])

    def fetch() -> Epoch:
        columns = zip(*results, strict=True)
        losses, correct, overflowed, scales = (torch.stack(c).tolist() for c in columns)
        return Epoch(images, losses, correct, overflowed, scales)

    return fetch
