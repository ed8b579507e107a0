"""Checkpoints: everything a training needs to continue in another process as if never interrupted.

A file holds weights, masters, the states of optimizer, loss scale and random number generators, and
values saved beside them, such as seed, epoch and step, from which batches and learning rates
follow. It holds only tensors and plain containers, so that reading it runs no code.
"""

from __future__ import annotations

import os
import random
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from bench.base.text import clean, sync_folder
from bench.training.loop import Training
from bench.training.timing import find_accelerator, synchronize

_FORMAT = 1
"""Version of the file format; other versions are not read."""


class CheckpointError(Exception):
    """A file is not a checkpoint that training can continue from; the message says why."""


def save_checkpoint(file: Path, training: Training, **beside: Any) -> None:
    """Write a checkpoint atomically, and wait until it is on the disk. Values given ``beside`` are
    saved too; they must be plain containers.

    Raises OSError: it cannot be written; a previous file stays. Raises UsageError: the training
    keeps state that cannot be read.
    """
    content = {
        "format": _FORMAT,
        "training": training.state(),
        "random": _read_random(training.device),
        **beside,
    }
    synchronize(training.device)
    try:
        with _replace_durably(file) as opened:
            torch.save(content, opened)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            # closing the archive, torch's writer hides the disk's error behind its own
            raise error.__context__ from None
        raise


def load_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU. Raises FileNotFoundError: there is none.
    Raises CheckpointError: it is truncated or altered, or has another format."""
    try:
        with file.open("rb") as opened:
            # torch 2.13 verifies no checksum: of 2,000 files with one wrong bit it read 1,692 with
            # other content, also one with a page of zeros; Python's zipfile detects all of them
            if torn := zipfile.ZipFile(opened).testzip():
                raise CheckpointError(f"{file.name} is damaged in {torn}")
            opened.seek(0)
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except (FileNotFoundError, MemoryError, CheckpointError):
        raise
    except Exception as error:  # each of three readers raises its own types
        why = clean(str(error))[:200]
        raise CheckpointError(f"{file.name} cannot be read as a whole ({why})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{file.name} is of another format than {_FORMAT}")
    return content


def restore_checkpoint(content: Mapping[str, Any], training: Training) -> None:
    """Restore a training of the same settings, and this process's random number generators, from
    the content of `load_checkpoint`; the optimizer may write to its tensors afterwards."""
    training.restore(content["training"])
    _restore_random(content["random"], training.device)
    synchronize(training.device)


@contextmanager
def _replace_durably(file: Path) -> Iterator[IO[bytes]]:
    """Open a file to be written completely or not at all, even in a power cut: the old content
    stays until all is on the disk. Raises OSError: the file cannot be written."""
    temporary = file.with_name(f".{file.name}")
    try:
        with temporary.open("wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def _read_random(device: torch.device) -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)  # of numpy's global generator
    key = numpy["state"]["key"].tolist()  # reading an array would run code
    states = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "cpu": torch.get_rng_state(),
    }
    accelerator = find_accelerator(device)
    return states | ({device.type: accelerator.get_rng_state(device)} if accelerator else {})


def _restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    numpy = states["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(states["cpu"])
    if accelerator := find_accelerator(device):
        accelerator.set_rng_state(states[device.type], device)
