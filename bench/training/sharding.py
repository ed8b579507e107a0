"""Training of one network whose weights are sharded over processes, by torch's fully_shard (FSDP2).

Each process has a part of every weight, of its gradient, and of the optimizer's state. Before a
block of the network runs, forward or backward, all gather its weights; after its backward pass,
each keeps its part of the mean gradient. What is beside the blocks is gathered once a step.

Weights have the number format of the precision, and autocast is as it is: MixedPrecisionPolicy only
has the format in which gradients are exchanged. So a network computes as with ``--parallel ddp``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bench.networks.workloads import Loss
from bench.training.loop import Training
from bench.training.parallel import EXCHANGED, GroupExchange, ProcessGroup
from bench.training.recompute import count_kinds, list_blocks


class ShardedTraining(Training):
    """A training of which this process has a part: weights are DTensors, sharded over their first
    dimension. All processes must build it, and call what runs the network, together."""

    def _move(self) -> None:
        super()._move()
        self.sharded = shard(
            self.model, self.workload.blocks, EXCHANGED[self.case.grad_compression]
        )
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        now = self.model.state_dict()
        # of the first process, kept on the CPU as the whole state was
        self._start = {name: _share(whole, now[name]) for name, whole in self._start.items()}


def _share(whole: Any, now: Any) -> Any:
    if not isinstance(now, DTensor):
        return whole
    return distribute_tensor(whole, now.device_mesh, now.placements).cpu()


def shard(model: nn.Module, blocks: str, exchanged: torch.dtype | None) -> str:
    """Shard ``model`` over all processes, each of its blocks by itself: those of the names in
    ``blocks``, or by default those it repeats. Gradients are exchanged in the format ``exchanged``,
    by default their own. A block that shares a weight with a module beside it is of the rest, since
    torch gathers a weight with one of them only. Return a note for the reader. Raises UsageError:
    as `list_blocks`."""
    policy, whole = MixedPrecisionPolicy(reduce_dtype=exchanged), _count_owners(model)
    parts = [
        part for part in list_blocks(model, blocks) if _count_owners(part).items() <= whole.items()
    ]
    kinds = count_kinds(parts) or "no blocks"
    for part in (*parts, model):
        # weights are gathered together, so that all are of one format: BatchNorm kept in fp32 apart
        if apart := _list_apart(part):
            fully_shard(apart, mp_policy=policy)
        fully_shard(part, mp_policy=policy)
    return f"sharded: {kinds}, and the rest of the network as one"


def _count_owners(part: nn.Module) -> Counter[nn.Parameter]:
    """Return how many modules of ``part`` have each of its weights as their own."""
    return Counter(p for module in part.modules() for p in module.parameters(recurse=False))


def _list_apart(part: nn.Module) -> list[nn.Module]:
    """Return the modules whose own weights have another format than most of ``part`` that is not
    sharded yet."""
    owners: dict[nn.Module, torch.dtype] = {}
    sizes: Counter[torch.dtype] = Counter()
    for module in part.modules():
        own = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
        if own:
            owners[module] = own[0].dtype
            sizes[own[0].dtype] += sum(p.numel() for p in own)
    most = max(sizes, key=sizes.__getitem__, default=None)
    return [module for module, dtype in owners.items() if dtype != most]


_Work = dist.Work | None
_Collective = Callable[..., _Work]
# torch 2.13 gave both other names, and warns of these
_GATHER: _Collective = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE: _Collective = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ShardExchange(GroupExchange):
    """Gathers weights and exchanges gradients of a `ShardedTraining` with the other processes.

    torch sums gradients in their own format, or that of ``--grad-compression``, and divides by the
    number of processes. While nothing is exchanged, a process copies its own parts in place of
    those of others: as many bytes, and a network that computes the same amount with other weights.
    """

    gathered_bytes: int = 0

    def __init__(self, training: Training, group: ProcessGroup) -> None:
        super().__init__(group)
        self._model = training.model
        gather, reduce = (_Communication(run) for run in (self._gather, self._reduce))
        for part in self._model.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(gather)  # type: ignore[arg-type]
                part.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]

    def begin(self, batch: Any) -> float:
        self.buckets = self.wire_bytes = self.gathered_bytes = 0
        return super().begin(batch)

    def run(self, compute: Callable[[], Loss], last: bool) -> Loss:
        self._model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return compute()

    def _gather(self, output_tensor: Tensor, input_tensor: Tensor, **about: Any) -> _Work:
        if self._model.training:  # an evaluation is no step
            self.gathered_bytes += output_tensor.nbytes
        if self.exchanging:
            return _GATHER(output_tensor, input_tensor, **about)
        for rank, part in enumerate(output_tensor.chunk(self._size)):
            if rank != dist.get_rank():  # its own part is there
                part.copy_(input_tensor)
        return None

    def _reduce(self, output_tensor: Tensor, input_tensor: Tensor, **about: Any) -> _Work:
        self.buckets, self.wire_bytes = self.buckets + 1, self.wire_bytes + input_tensor.nbytes
        if self.exchanging:
            return _REDUCE(output_tensor, input_tensor, **about)
        output_tensor.copy_(input_tensor.chunk(self._size)[dist.get_rank()])
        return None


class _Communication:
    """What `FSDPModule` takes as a collective, which names the memory to use."""

    def __init__(self, run: _Collective) -> None:
        self._run = run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **given: Any) -> _Work:
        return self._run(**given)
