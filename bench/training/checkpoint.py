"""Checkpoints: all that a training needs to go on in another process as if it had never ended.

A file holds weights, masters, the optimizer's state, the loss scale's, random numbers and what is
saved beside them; batches and learning rates follow from seed, epoch and step, which are. It holds
tensors and plain containers only, so that reading it runs no code.
"""

from __future__ import annotations

import os
import random
import zipfile
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.text import clean, replace_durably
from bench.training.accelerator import find_accelerator
from bench.training.loop import Training
from bench.training.timing import synchronize

FORMAT = 1
"""Version of a file; others are not read."""


class CheckpointError(Exception):
    """A file is no checkpoint that can be gone on from; says why."""


def save_checkpoint(file: Path, training: Training, **beside: Any) -> int:
    """Write a checkpoint, whole or not at all, and wait until the disk has it; its bytes. What is
    given ``beside`` is kept too, in plain containers.

    Raises OSError: it cannot be written; what was there before stands. Raises UsageError: what
    trains keeps a state that is not known.
    """
    content = {
        "format": FORMAT,
        "training": training.state(),
        "random": _read_random(training.device),
        **beside,
    }
    synchronize(training.device)
    try:
        with replace_durably(file) as opened:
            torch.save(content, opened)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            # closing its archive, torch's writer finds bytes missing and speaks over the disk
            raise error.__context__ from None
        raise
    return file.stat().st_size


def load_checkpoint(file: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU. Raises FileNotFoundError: there is none;
    CheckpointError: it is torn or altered, or of another format."""
    try:
        with file.open("rb") as opened:
            # torch 2.13 checks no sum: of 2,000 files with one wrong bit it read 1,692 as something
            # else, and one with a page of zeros; Python's own reader finds every one of them
            if torn := zipfile.ZipFile(opened).testzip():
                raise CheckpointError(f"{file.name} is damaged in {torn}")
            opened.seek(0)
            content = torch.load(opened, map_location="cpu", weights_only=True)
    except (FileNotFoundError, MemoryError, CheckpointError):
        raise
    except Exception as error:  # each of three readers raises its own
        why = clean(str(error))[:200]
        raise CheckpointError(f"{file.name} cannot be read as a whole ({why})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file.name} is of another format than {FORMAT}")
    return content


def restore_checkpoint(content: Mapping[str, Any], training: Training) -> None:
    """Have a training of the same settings, and this process's random numbers, go on from the
    content of `load_checkpoint`; the optimizer may write to its tensors afterwards."""
    training.restore(content["training"])
    _restore_random(content["random"], training.device)
    synchronize(training.device)


def _read_random(device: torch.device) -> dict[str, Any]:
    numpy = np.random.get_state(legacy=False)  # the one that is shared
    key = numpy["state"]["key"].tolist()  # an array would need code to be read
    states = {
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "cpu": torch.get_rng_state(),
    }
    read = find_accelerator(device).get_random
    return states | ({device.type: read(device)} if read else {})


def _restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    numpy = states["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
    torch.set_rng_state(states["cpu"])
    if write := find_accelerator(device).set_random:
        write(states[device.type], device)


def drop_cache(file: Path) -> None:
    """Have the system forget a file that is on the disk, so that reading it reads the disk. On
    Linux this needs no rights: of 200 MB just written and fsynced, none stayed in memory. A file in
    memory (tmpfs) stays there."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def trace(training: Training, batches: Iterator[Any]) -> dict[str, str]:
    """Train on ``batches`` and write down all that came of it, in order, each bit counting: a hash
    of each step's loss, overflow and loss scale, by their names, then of each tensor and number of
    the state. One tensor at a time comes to the host."""
    found: dict[str, str] = {}
    training.set_lr(training.lr)
    for number, batch in enumerate(batches, 1):
        found[f"loss scale of step {number}"] = _hash(training.current_scale())
        loss, _, overflowed = training.step(batch)
        found[f"loss of step {number}"] = _hash(loss)
        found[f"overflow of step {number}"] = _hash(overflowed)
    return found | {name: _hash(value) for name, value in _walk(training.state(), "")}


def find_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first entry of a trace that another does not have alike; empty where all are."""
    names = dict.fromkeys([*one, *other])
    return next((name for name in names if one.get(name) != other.get(name)), "")


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Name every tensor and number within plain containers: ``model.conv.weight``."""
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    else:
        yield name, value
        return
    for key, part in parts:
        yield from _walk(part, f"{name}.{key}" if name else str(key))


def _hash(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    held = value.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().data
    return f"{held.dtype} {tuple(held.shape)} {blake2b(data, digest_size=16).hexdigest()}"
