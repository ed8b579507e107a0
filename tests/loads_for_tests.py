"""Workloads whose datasets are slow, hang, fail or die on purpose; real workers load them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.networks.workloads import Workload

ITEM_S = 0.075
"""How long an item of the slow dataset sleeps."""

PIDS = "LOADS_FOR_TESTS_PIDS"
"""Environment variable: a file in which each worker that loads writes its process id."""


class Rows:
    """Items of four numbers and a label; ``spoil`` is what is wrong with an item of that number."""

    def __init__(self, items: int, spoil: Callable[[int], object] = int) -> None:
        self.items, self.spoil = items, spoil

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.spoil(number)
        return torch.full((4,), number / self.items), number % 2


class DrawingRows(Rows):
    """Its augmentation draws from numpy, Python and torch, as those of users do."""

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        x, label = super().__getitem__(number)
        return x + np.random.rand() + random.random() + torch.rand(4), label


class Loads(Workload):
    """A tiny network on a dataset, its own and that of `make_batch` alike."""

    samples, classes = 4000, 2

    def __init__(self, rows: Callable[[int], Any] = Rows) -> None:
        self.rows = rows

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        x = torch.rand(size, 4, device=device, generator=generator)
        return x, torch.randint(2, (size,), device=device, generator=generator)

    def build_dataset(self) -> Any:
        return self.rows(self.samples)


class Bare(Loads):
    """Has no dataset for a DataLoader."""

    def build_dataset(self) -> None:
        return None


def sleep(number: int) -> None:
    time.sleep(ITEM_S)


def in_worker() -> bool:
    """Whether this process is a worker of a DataLoader; it leaves its id."""
    if torch.utils.data.get_worker_info() is None:
        return False
    if place := os.environ.get(PIDS):
        with Path(place).open("a") as file:
            file.write(f"{os.getpid()}\n")
    return True


def fail(number: int) -> None:
    if in_worker() and number % 7 == 3:
        raise ValueError(f"item {number} is\nnot an item")


def hang(number: int) -> None:
    while in_worker() and number % 50 == 3:
        time.sleep(3600)


def end(sent: signal.Signals, number: int) -> None:
    """SIGBUS is what a page of shared memory ends with that is not there."""
    if in_worker():
        os.kill(os.getpid(), sent)


def find_no_room(number: int) -> None:
    """In shared memory, as torch says it."""
    if in_worker():
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_9_12_0>: No space left on "
            "device (28)"
        )


raising, dying, hanging, full, bus = (
    partial(Loads, rows)
    for rows in (
        partial(Rows, spoil=fail),
        partial(Rows, spoil=partial(end, signal.SIGKILL)),
        partial(Rows, spoil=hang),
        partial(Rows, spoil=find_no_room),
        partial(Rows, spoil=partial(end, signal.SIGBUS)),
    )
)
