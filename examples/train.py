"""A training script as people have them: it knows nothing of what measures it.

    python -m bench.sweep --command 'python examples/train.py --batch-size {batch_size}' \
        --batch-size 64 128

The images are random: what is measured is the script.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--amp", action="store_true", help="bf16 by autocast")
    given = parser.parse_args()

    # torch's default is TF32 in convolutions, and a row labelled fp32 is held to it
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    for _ in range(given.steps):
        x = torch.randn(given.batch_size, 3, 32, 32, device=device)
        y = torch.randint(10, (given.batch_size,), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=given.amp):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
