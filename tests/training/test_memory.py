"""What weights, gradients and optimizers hold."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bench.training.memory import measure_parts, watch_gradients


def test_each_storage_counts_once_and_masters_are_the_optimizers() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)).half()
    net.append(net[0])  # a weight that is shared
    masters = [weight.detach().float().requires_grad_() for weight in net.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1, momentum=0.9)
    for master in masters:
        master.grad = torch.ones_like(master)
    weights = 4 * 4 + 4 + 4
    with watch_gradients(optimizer, net.parameters()) as gradients:
        optimizer.step()
        optimizer.step()
    optimizer.step()
    assert gradients == [4 * weights]
    optimizer.zero_grad()
    buffers = 2 * (4 + 4) + 8  # mean, variance, and a count
    assert measure_parts([optimizer], [net]) == {
        "weights_bytes": 2 * weights + buffers,
        "optimizer_bytes": 2 * 4 * weights,
    }


def test_networks_are_found_where_none_is_given() -> None:
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = measure_parts([optimizer])["weights_bytes"]
    frozen = copy.deepcopy(net)
    assert measure_parts([optimizer])["weights_bytes"] - before == 4 * (8 * 8 + 8)
    del frozen
