"""Save checkpoints one after the other and be killed at a random moment, again and again.

Each holds its number throughout. After each kill the file is read; prints the numbers found, and
how many kills left an unfinished file beside it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from bench.precision import PRECISIONS
from bench.training.checkpoint import load_checkpoint, save_checkpoint
from bench.training.loop import Training


def build() -> Training:
    cpu = torch.device("cpu")
    return Training(nn.Linear(400, 300), PRECISIONS["fp32"], cpu, lr=0.1)


def save_on(file: Path, number: int) -> None:
    """Save without end."""
    training = build()
    while True:
        number += 1
        with torch.no_grad():
            for weight in training.parameters:
                weight.fill_(number)
        save_checkpoint(file, training, number=number)


def main(folder: Path, kills: int) -> None:
    """Fork, kill, read."""
    file, number, torn, rng = folder / "last.pt", 0, 0, random.Random(kills)
    save_checkpoint(file, build(), number=0)
    for _ in range(kills):
        child = os.fork()
        if not child:
            save_on(file, number)
        time.sleep(rng.uniform(0.02, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += file.with_name(".last.pt").exists()
        kept = load_checkpoint(file)
        assert kept["number"] >= number, "an earlier file than the one that stood"
        number = kept["number"]
        values = {float(v) for w in kept["training"]["model"].values() for v in w.unique()}
        assert not number or values == {number}, "a file of two halves"
    print(number, torn)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
