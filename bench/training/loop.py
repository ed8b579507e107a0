"""One epoch of training, written as a plain training loop.

There is no NVML, CSV or command line here. Nothing in a step waits for the device: losses, correct
predictions and overflows stay on it until the epoch ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bench.networks.data.batches import Divided, count_items
from bench.networks.freezing import freeze
from bench.networks.workloads import Loss, Network, Workload
from bench.schema.axis import OWN_GRAPHS
from bench.schema.case import Case, whole_batch
from bench.schema.optimization import scale_lr
from bench.schema.precision import find_formats
from bench.training.float8 import Conversion, convert
from bench.training.formats import autocast, cast
from bench.training.graphs import Captured, CudaGraph, StepResults
from bench.training.loss_scale import build_loss_scale, clip
from bench.training.memory import find_local
from bench.training.optimizers import build_optimizer, clear_state, copy_to_host, list_special
from bench.training.recompute import Recompute
from bench.training.timing import StepClock


class Exchange:
    """The exchange of a training in a single process, which exchanges nothing."""

    def begin(self, batch: Any) -> float:
        """Begin a step on this process's part of ``batch``; return the weight of its mean loss."""
        return 1.0

    def run(self, compute: Callable[[], Loss], last: bool) -> Loss:
        """Compute a loss; the ``last`` one of a step sums the gradients of all processes."""
        return compute()


class Training:
    """A network with everything a step changes: weights, optimizer state, loss scale.

    ``model`` is on the CPU, in float32; all that is done to it follows from the ``case``. The
    ``workload`` has the loss, and says which layers stay in fp32. ``lr`` is the learning rate of
    every step, until `set_lr` changes it.
    """

    captured: Captured | None = None
    """The step as a CUDA graph, if `capture` recorded one."""

    apex: str | None = None
    """Version and interface of NVIDIA apex, if it trains."""

    conversion: Conversion | None = None
    """The part of the network that runs in fp8; None in other precisions."""

    brings_optimizer = False
    """Whether the optimizer is the workload's own."""

    start_note = ""
    """A note for the reader on the weights that it starts from."""

    sharded = ""
    """A note for the reader on how the network is sharded over processes."""

    identity: tuple[str, str] | None = None
    """What `bench.training.sources.identify_model` told of a user's network before it was cast or
    frozen."""

    switched: Mapping[str, Any] = {}
    """torch's switches that the user's code had changed, before they were set back."""

    def __init__(
        self, case: Case, model: nn.Module, device: torch.device, workload: Workload
    ) -> None:
        self.case, self.model, self.device, self.workload = case, model, device, workload
        self.precision = find_formats(case.precision, case.opt_level)
        self.lr = scale_lr(case.lr, case.lr_scaling, whole_batch(case), case.base_batch)
        self.memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
        self.exchange = Exchange()
        model.train()  # a factory may return it as it is evaluated, as that of pretrained weights
        self._still = freeze(model, case.freeze, workload.find_head)
        # kept on the CPU, so that the initial state takes no device memory
        self._start = deepcopy(model.state_dict())
        self._start_unsaved = deepcopy(list_unsaved(model))
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self._equip()
        self.recomputes = Recompute(case.recompute, workload.blocks).apply(model)
        # by default the last, smaller batch is compiled separately during warm-up instead of
        # replacing the full batch's code by slower general code
        self.forward = (
            torch.compile(model, dynamic=case.any_shape, mode=case.compile)
            if case.compiled
            else model
        )
        self.reset()

    def _move(self) -> None:
        self.model.to(self.device, memory_format=self.memory_format)  # type: ignore[call-overload]

    def _equip(self) -> None:
        cast(self.model, self.precision, self.workload.keeps_fp32)
        if self.precision.float8:
            self.conversion = convert(self.case, self.model, self.device, self.workload)
        self._move()
        # the optimizer steps the masters: fp32 copies, or the weights themselves if the precision
        # has none or the cast left them in fp32 (affine BatchNorm)
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
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        own = self.workload.build_optimizer(self.masters, self.lr)
        self.brings_optimizer = own is not None
        name = self.case.optimizer
        if own is None:
            special = {id(p) for p in list_special(name, self.model, self.workload)}
            pairs = zip(self.masters, self.parameters, strict=True)
            chosen = [master for master, weight in pairs if id(weight) in special]
            own_graphs = self.case.cuda_graphs
            self.optimizer = build_optimizer(name, self.masters, self.lr, own_graphs, chosen)
        else:
            self.optimizer = own
        # a workload's own optimizer may have groups with other learning rates, such as a tenth
        self._ratios = [
            1.0 if own is None else float(group["lr"]) / self.lr
            for group in self.optimizer.param_groups
        ]

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial weights, BatchNorm statistics, optimizer, lr and loss scale.
        Warm-up steps train the model; without a reset, the next epoch would not be from scratch."""
        self._load(self._start, self._start_unsaved)
        if self.precision.masters:
            named = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
            for master, (name, weight) in zip(self.masters, named, strict=True):
                master.copy_(weight if self.precision.rounds_start else self._start[name])
                if self.captured is None:  # a captured step writes to it in place
                    master.grad = None
        self.model.zero_grad(set_to_none=True)
        if self.brings_optimizer:
            self._make_optimizer()  # its state need not start at zero: NAdam's does not
        else:
            clear_state(self.optimizer)
        self.set_lr(self.lr)
        if self.captured is None:  # a captured step holds it too, and a static scale is constant
            self.loss_scale = build_loss_scale(self.case.loss_scale, self.device)

    def _load(self, state: Mapping[str, Any], unsaved: Mapping[str, Tensor]) -> None:
        # a module may keep, and change, the extra state that it is given
        self.model.load_state_dict(deepcopy(state))
        for name, buffer in list_unsaved(self.model).items():
            # one that appears or grows while it trains is a cache
            if name in unsaved and unsaved[name].shape == buffer.shape:
                buffer.copy_(unsaved[name])

    def state(self) -> dict[str, Any]:
        """Return everything that steps change, as device tensors in plain containers, not copied.
        Masters that are the weights themselves are not repeated. Raises UsageError: the training
        keeps state that cannot be read."""
        return {
            "model": self.model.state_dict(),
            "unsaved": list_unsaved(self.model),
            "masters": [master.detach() for master, _ in chain.from_iterable(self._copied)],
            "optimizer": self.optimizer.state_dict(),
            "loss_scale": self.loss_scale.state(),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of a training with the same settings; the optimizer may keep
        its tensors and write to them."""
        self._load(state["model"], state.get("unsaved", {}))
        apart = [master for master, _ in chain.from_iterable(self._copied)]
        for master, kept in zip(apart, state["masters"], strict=True):
            master.copy_(kept)
            master.grad = None
        self.model.zero_grad(set_to_none=True)
        self.optimizer.load_state_dict(state["optimizer"])
        copy_to_host(self.optimizer)
        self.loss_scale.restore(state["loss_scale"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the following steps; groups of a workload's own optimizer keep
        their ratio to it."""
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio)
            else:
                group["lr"] = lr * ratio

    def capture(self, batch: Any, recorder: CudaGraph | None = None) -> None:
        """Record a step on ``batch``, in one piece, and replay it for all batches like it.
        Recording trains on ``batch`` several times. Other batches, such as a smaller last one, are
        trained on as before."""
        self.captured = Captured(self._step, _join(batch), recorder)

    def step(self, batch: Any) -> StepResults:
        """Train on one batch, whole or in micro-batches, and update once.

        The loss of a micro-batch of n of N items is weighted by n / N, so that their gradients sum
        to the gradient of the mean loss over the batch. autograd sums them in the weight's
        ``.grad``, in its dtype, as with apex and torch.amp: fp16 weights sum in fp16. BatchNorm
        normalises each micro-batch by its own statistics, so the result differs from a whole batch.

        If several processes share the batch, the gradients are those of the mean loss over all of
        it. Return the results of this process's part, which may be empty: mean loss (float32),
        units predicted correctly (int64, or None if the workload does not say), whether the
        scaled gradients overflowed (bool) and, if they are clipped, the norm that the unscaled ones
        had before (float32), each of shape () and still on the device.
        """
        if self.captured is None:
            return self._step(batch)
        whole = _join(batch)
        return self.captured.step(whole) if self.captured.fits(whole) else self._step(whole)

    def _step(self, batch: Any) -> StepResults:
        size, parts = count_items(batch), batch.parts if isinstance(batch, Divided) else [batch]
        weight = self.exchange.begin(batch)
        losses, hits, done = [], [], 0
        for part in parts:
            done += (items := count_items(part))
            last = done == size
            found = self.exchange.run(partial(self.compute_loss, part), last)
            loss = found.loss if items == size else found.loss * (items / size)
            self.backward(loss if weight == 1 else loss * weight, last=last)
            losses.append(_keep(loss))
            hits.append(found.correct)
        if not size:  # other processes wait for gradients from this one too
            found = self.exchange.run(self._compute_nothing, True)
            self.backward(found.loss)
            losses, hits = [found.loss.detach()], [found.correct]
        return reduce(torch.add, losses), _sum(hits), *self.update()

    def _compute_nothing(self) -> Loss:
        """Return a loss of 0 for no items, which gives each weight a gradient of 0."""
        zeros = [(weight * 0).sum().float() for weight in self.parameters]
        none = torch.zeros((), dtype=torch.int64, device=self.device)
        return Loss(torch.stack(zeros).sum(), none)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backpropagate the scaled loss, float32 of shape (), and add to the gradients; ``last``
        says that an update follows."""
        self.loss_scale.scale(loss).backward()

    def current_scale(self) -> Tensor:
        return self.loss_scale.current()

    def compute(self, *inputs: Any, **named: Any) -> Any:
        """Return the network's outputs, computed as in a step; a `Network`."""
        outputs = self._run(self.forward, *inputs, **named)
        if self.case.compile not in OWN_GRAPHS:
            return outputs
        # the next step's graph overwrites outputs, and torch raises an error if an old one is read:
        # scalars, which may be kept (a loss that the network itself computes), are copied
        return tree_map_only(Tensor, lambda x: x if x.numel() > 1 else x.clone(), outputs)

    def compute_loss(self, batch: Any, compiled: bool = True) -> Loss:
        """Return the workload's loss of a batch, float32 of shape (); if not ``compiled``, the
        network runs op by op."""
        network: Network = self.compute if compiled else partial(self._run, self.model)
        found = self.workload.compute_loss(network, batch)
        return found if isinstance(found, Loss) else Loss(found)

    def _run(self, forward: Network, *inputs: Any, **named: Any) -> Any:
        """Cast inputs as in 2019's recipe before the network, and outputs to fp32 after it."""

        def prepare(x: Tensor) -> Tensor:
            if self.precision.casts and x.is_floating_point():
                x = x.to(getattr(torch, self.precision.weights))
            return x.contiguous(memory_format=self.memory_format) if x.dim() == 4 else x

        inputs, named = tree_map_only(Tensor, prepare, (inputs, named))
        with autocast(self.precision, self.device):
            outputs = forward(*inputs, **named)
        return tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, outputs)

    @torch.no_grad()
    def update(self) -> tuple[Tensor, Tensor | None]:
        """Step the optimizer, through masters if there are any, and clear all gradients; return
        whether the scaled gradients overflowed, and the norm of the unscaled ones if they are
        clipped, each of shape ().

        For each weight with a gradient, copy the gradient to its master in fp32, step the master,
        and round the master to the weight's dtype. A weight in fp32 is its own master and is not
        copied. A weight without a gradient stays unchanged, momentum included.

        A workload's own optimizer finds unscaled gradients even where it is fused: its step may do
        more with them than that of torch, such as clip them.
        """
        for master, weight in chain.from_iterable(self._copied):
            if weight.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.empty_like(master)
        moving = [[pair for pair in group if pair[1].grad is not None] for group in self._copied]
        for pairs in filter(None, moving):
            _copy([m.grad for m, _ in pairs], [w.grad for _, w in pairs])
            for _, weight in pairs:
                weight.grad = None  # frees its memory before the optimizer steps
        norm: Tensor | None = None

        def look() -> None:
            nonlocal norm
            if self.case.clip_grad is not None:
                norm = clip(self.masters, self.case.clip_grad)

        watched = self.brings_optimizer or self.case.clip_grad is not None
        overflowed = self.loss_scale.step(self.optimizer, self.masters, look if watched else None)
        for pairs in filter(None, moving):
            _copy([w for _, w in pairs], [m for m, _ in pairs])
        self.model.zero_grad(set_to_none=True)
        return overflowed, norm

    def resume(self) -> None:
        """Put the network back in training mode after an evaluation; frozen BatchNorm layers stay
        in evaluation mode."""
        self.model.train()
        for layer in self._still:
            layer.eval()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> tuple[float, float | None]:
        """Return mean loss and accuracy (None if the workload does not say) over ``batches``, in
        evaluation mode."""
        self.model.eval()
        losses, hits, items = [], [], 0
        for batch in batches:
            found, size = self.compute_loss(batch), count_items(batch)
            losses.append(found.loss.to(torch.float64) * size)
            hits.append(found.correct)
            items += size
        self.resume()
        correct = _sum(hits)
        return (
            float(torch.stack(losses).sum()) / items,
            None if correct is None else int(correct) / self.workload.count_units(items),
        )


def _copy(to: Sequence[Tensor | None], origin: Sequence[Tensor | None]) -> None:
    # of DTensors, for which torch has no such copy, the parts of this process
    torch._foreach_copy_([*map(find_local, to)], [*map(find_local, origin)])


def list_unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a network leaves out of its state_dict: those not persistent."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def _join(batch: Any) -> Any:
    """Return a batch in one piece; a `Divided` one must have one part."""
    (part,) = batch.parts if isinstance(batch, Divided) else [batch]
    return part


def _keep(loss: Tensor) -> Tensor:
    """Detach a loss to keep until the epoch ends. It is copied if it shares larger memory: the
    results of torch's mse_loss and smooth_l1_loss use the memory of all elements' losses."""
    loss = loss.detach()
    return loss.clone() if loss.untyped_storage().nbytes() > loss.nbytes else loss


def _sum(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return reduce(torch.add, known) if len(known) == len(parts) else None


@dataclass(frozen=True)
class Epoch:
    """Results of the steps of an epoch, one value per step. ``images`` counts the workload's units;
    ``correct`` is empty if the workload does not say, ``norms`` if no gradients are clipped."""

    images: list[int]
    losses: list[float]
    correct: list[int]
    overflowed: list[bool]
    loss_scales: list[float]
    norms: list[float] = field(default_factory=list)


def merge(parts: Sequence[Epoch]) -> Epoch:
    """Merge the parts of an epoch from several processes; losses are means over all units."""
    if len(parts) == 1:
        return parts[0]
    first, images = parts[0], [list(ns) for ns in zip(*(one.images for one in parts), strict=True)]
    losses = zip(*(one.losses for one in parts), strict=True)
    counted = all(len(one.correct) == len(images) for one in parts)
    return Epoch(
        [sum(ns) for ns in images],
        [
            # a process without items has no meaningful loss
            sum(n * x for n, x in zip(ns, xs, strict=True) if n) / sum(ns)
            for ns, xs in zip(images, losses, strict=True)
        ],
        [sum(hits) for hits in zip(*(one.correct for one in parts), strict=True)]
        if counted
        else [],
        first.overflowed,
        first.loss_scales,
        first.norms,
    )


def train_epoch(
    training: Training,
    batches: Iterable[Any],
    clock: StepClock,
    on_step: Callable[[int, Tensor], None],
    rates: Sequence[float] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> Callable[[], Epoch]:
    """Train on ``batches``, as `Training.step` takes them. Return a function that waits for the
    device and fetches the `Epoch`, so that the caller decides what its clock includes.

    ``on_step`` is called with each step's index and loss (float32, (), on the device); then the
    epoch ends if ``enough`` returns True. ``rates`` are the learning rates of the steps; by
    default the training's current one.
    """
    images: list[int] = []
    results: list[tuple[Tensor | None, ...]] = []
    clock.tick()
    for index, batch in enumerate(batches):
        if rates is not None:
            training.set_lr(rates[index])
        scale = training.current_scale()
        loss, *rest = training.step(batch)
        results.append((loss, *rest, scale))
        clock.tick()
        images.append(training.workload.count_units(count_items(batch)))
        on_step(index, loss)
        if enough():
            break

    def fetch() -> Epoch:
        columns = [[t for t in column if t is not None] for column in zip(*results, strict=True)]
        losses, correct, overflowed, norms, scales = (
            torch.stack(column).tolist() if column else [] for column in columns
        )
        return Epoch(images, losses, correct, overflowed, scales, norms)

    return fetch
