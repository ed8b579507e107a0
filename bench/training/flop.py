"""FLOP per image, counted on shapes alone."""

from __future__ import annotations

import math
from typing import Any


def count_flop(model: str) -> float:
    """FLOP per image, forward and backward, counted on shapes alone, without computing.

    torch's counter, with one correction: up to 2.13 it counts the weight gradient of a grouped
    convolution as if it were not grouped, ``groups`` times too much. For DPN-92 that makes 17.19
    GFLOP of 12.25.
    """
    import torch
    import torch.nn.functional as F
    from torch.utils.flop_counter import FlopCounterMode

    from bench.models import build_model

    def backward(grad: Any, x: Any, w: Any, *rest: Any, **_: Any) -> int:
        transposed, needed = rest[4], rest[7]
        # an output element is a dot product over w[1:], one group's inputs and the kernel; each of
        # its products comes again once in the gradient of the input and once in the weight's
        products = math.prod(x if transposed else grad) * math.prod(w[1:])
        return int(2 * products * (int(needed[0]) + int(needed[1])))

    with torch.device("meta"):
        network = build_model(model)
        x, y = torch.empty(2, 3, 32, 32), torch.empty(2, dtype=torch.long)
        mapping = {torch.ops.aten.convolution_backward: backward}
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            F.cross_entropy(network(x), y).backward()
    return float(counter.get_total_flops() / 2)
