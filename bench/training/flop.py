"""FLOP per image or other unit, counted on shapes alone."""

from __future__ import annotations

import math
from typing import Any

from bench.models.freezing import NONE, freeze
from bench.workloads import Workload


def count_flop(workload: Workload, frozen: str = NONE) -> float:
    """FLOP per unit, forward and backward, counted on shapes alone, without computing.

    torch's counter, with one correction: up to 2.13 it counts the weight gradient of a grouped
    convolution as if it were not grouped, ``groups`` times too much. For DPN-92 that makes 17.19
    GFLOP of 12.25.

    Of what is frozen only those gradients are counted that autograd computes: none of its weights,
    and none of the inputs of a layer that has nothing to train at or before it.
    """
    import torch
    from torch.utils._pytree import tree_map_only
    from torch.utils.flop_counter import FlopCounterMode

    from bench.workloads import Loss

    def backward(grad: Any, x: Any, w: Any, *rest: Any, **_: Any) -> int:
        transposed, needed = rest[4], rest[7]
        # an output element is a dot product over w[1:], one group's inputs and the kernel; each of
        # its products comes again once in the gradient of the input and once in the weight's
        products = math.prod(x if transposed else grad) * math.prod(w[1:])
        return int(2 * products * (int(needed[0]) + int(needed[1])))

    made = workload.make_batch(2, torch.device("cpu"), torch.Generator().manual_seed(0))
    with torch.device("meta"):
        network = workload.build_model()
        freeze(network, frozen, workload.find_head)
        batch = tree_map_only(torch.Tensor, lambda t: t.to("meta"), made)
        mapping = {torch.ops.aten.convolution_backward: backward}
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            found = workload.compute_loss(network, batch)
            (found.loss if isinstance(found, Loss) else found).backward()
    return float(counter.get_total_flops() / workload.count_units(2))
