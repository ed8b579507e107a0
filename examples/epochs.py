"""A training script that tells what each epoch learnt, which `bench.search --command` decides by.

    python -m bench.search --command 'python examples/epochs.py --lr {lr} --width {width}' \
        --lr 0.001..1 --vary width 16 64 --epochs 5
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import bench


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(6000, 20)
    y = (x[:, :10].sin().sum(1) > x[:, 10:].cos().sum(1) - 6).long()
    (train_x, test_x), (train_y, test_y) = x.split([5000, 1000]), y.split([5000, 1000])
    model = nn.Sequential(nn.Linear(20, given.width), nn.ReLU(), nn.Linear(given.width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    for _ in range(given.epochs):
        for rows in torch.randperm(len(train_x)).split(100):
            loss = F.cross_entropy(model(train_x[rows]), train_y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model(test_x).argmax(1) == test_y
        bench.epoch(accuracy=right.float().mean())


if __name__ == "__main__":
    main()
