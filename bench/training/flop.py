"""FLOP per image or other unit, counted on shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from bench.models.freezing import NONE, freeze
from bench.workloads import Loss, Workload


def count_flop(workload: Workload, frozen: str = NONE) -> float:
    """FLOP per unit, forward and backward, counted on shapes alone, without computing.

    torch's counter, with the correction of `count_gradients`: for DPN-92, 12.25 GFLOP in place of
    17.19. Of what is frozen only those gradients are counted that autograd computes: none of its
    weights, and none of the inputs of a layer that has nothing to train at or before it.
    """
    batch = sketch_batch(workload, 2)
    with torch.device("meta"):
        network = workload.build_model()
        freeze(network, frozen, workload.find_head)
        mapping = {torch.ops.aten.convolution_backward: count_gradients}
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            found = workload.compute_loss(network, batch)
            (found.loss if isinstance(found, Loss) else found).backward()
    return float(counter.get_total_flops() / workload.count_units(2))


def count_gradients(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    """FLOP of ``aten.convolution_backward``, from its tensors' shapes and its other arguments. Up
    to torch 2.13, its own formula takes the weight gradient of a grouped convolution for one that
    is not grouped, ``groups`` times too much."""
    transposed, needed = rest[4], rest[7]
    # an output element is a dot product over weight[1:], one group's inputs and the kernel; each of
    # its products comes again once in the gradient of the input and once in the weight's
    products = math.prod(x if transposed else grad) * math.prod(weight[1:])
    return int(2 * products * (int(needed[0]) + int(needed[1])))


def sketch_batch(workload: Workload, items: int) -> Any:
    """A batch as the workload makes it, of shapes alone: on torch's meta device."""
    made = workload.make_batch(items, torch.device("cpu"), torch.Generator().manual_seed(0))
    return tree_map_only(torch.Tensor, lambda t: t.to("meta"), made)
