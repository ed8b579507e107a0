"""Initial weights of a training: reading the file of ``--start`` and fitting it to the network."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Container, Mapping
from hashlib import file_digest
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError
from bench.base.text import first_line, name_first

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which checkpoints store the weights, beside the optimizer's state and others."""

_TRAINING = "training"
"""Key under which a checkpoint of a sweep stores `Training.state`: weights and optimizer."""

_PREFIXES = ("module.", "_orig_mod.", "model.", "net.")
"""Prefixes that DistributedDataParallel and torch.compile add to each name, and those of the
network's place in another module, as in Lightning's."""

_EXTRA = "_extra_state"
"""The end of names under which modules keep what is no weight; a network keeps its own."""

_HARMLESS: list[Any] = [
    Namespace,
    (PosixPath, "pathlib.PosixPath"),
    (PosixPath, "pathlib._local.PosixPath"),  # Python 3.13
]
"""What scripts often save beside weights, the arguments that they were called with; making these
objects executes nothing."""

_SHOWN = 3  # tensors named in an error


def parse_start(text: str) -> str | None:
    """Check the path of a file of weights, without reading it, and return it, or None for ``none``.
    Raises ValueError: it cannot be the path of a file."""
    if text == "none":
        return None
    if not text.strip() or not text.isprintable():
        raise ValueError("give a file of weights, or 'none'")
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise ValueError("~ stands for no folder, as this user has no home; write it out") from None


def hash_weights(path: str) -> str:
    """Return the first 12 hex digits of a file's SHA-256. Raises UsageError: it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()[:12]
    except OSError as error:
        raise UsageError(f"--start {path}: {error.strerror}; give a file of weights") from error


def read_weights(path: str, own: Container[str] = ()) -> dict[str, Tensor]:
    """Read a file of weights to the CPU, without executing code that it may contain.

    Files whose name ends in ``.safetensors`` need that package. All others are read by torch with
    ``weights_only=True``: a state_dict, alone or as an entry of `_WRAPPERS`, or a checkpoint of a
    sweep. A prefix of `_PREFIXES` that all names share is removed, unless the network's ``own``
    names include one with it. Raises UsageError: it cannot be read, or holds other things than
    weights.
    """
    import torch

    try:
        if path.endswith(".safetensors"):
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            with torch.serialization.safe_globals(_HARMLESS):
                found = torch.load(path, map_location="cpu", weights_only=True)
        kept = found.get(_TRAINING)
        whole = kept if isinstance(kept, Mapping) else found
        inner = (whole[key] for key in _WRAPPERS if isinstance(whole.get(key), Mapping))
        weights: dict[str, Tensor] = {
            name: value for name, value in next(inner, found).items() if not name.endswith(_EXTRA)
        }
        if not weights or not all(isinstance(one, torch.Tensor) for one in weights.values()):
            raise ValueError("it holds other things than weights")
    except ImportError as error:
        raise UsageError(
            f"--start {path}: the package safetensors is not installed; pip install safetensors"
        ) from error
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise UsageError(
            f"--start {path}: weights cannot be read from it without executing code "
            f"({first_line(error)}); save the network's state_dict() alone, with torch.save or "
            "safetensors"
        ) from error
    while not any(name in own for name in weights) and (
        prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), "")
    ):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def fit_weights(
    model: nn.Module, path: str, find_head: Callable[[nn.Module], nn.Module]
) -> tuple[dict[str, Tensor], str]:
    """Read a file and select the weights that fit ``model``, which may be on torch's meta device.
    Return these, and a note for the reader if the head is not among them, else "".

    All names and shapes must match the network, except in the head: if it differs, it keeps its
    initial weights. BatchNorm layers may lack ``num_batches_tracked``, as in files from before
    torch 0.4.1; nothing is computed with it. Raises UsageError: as `read_weights`, or the weights
    do not fit; the message names the tensors and both shapes.
    """
    import torch

    state = model.state_dict(keep_vars=True)  # returns tied weights as one tensor
    own = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
    weights = read_weights(path, own)
    there = {id(own[name]) for name in weights if name in own}
    head = find_head(model)
    place = next(name for name, module in model.named_modules() if module is head)

    unlike = {
        name: f"{name} is {tuple(t.shape)} in the file and {tuple(own[name].shape)} in the network"
        for name, t in weights.items()
        if name in own and t.shape != own[name].shape
    }
    unlike |= {
        name: f"the file lacks {name}"
        for name, tensor in own.items()
        if id(tensor) not in there and not name.endswith("num_batches_tracked")
    }
    unlike |= {name: f"the network lacks {name}" for name in weights if name not in own}
    in_head = [name for name in unlike if place and name.startswith(f"{place}.")]
    wrong = [text for name, text in unlike.items() if name not in in_head]
    fitting = {
        n: t for n, t in weights.items() if n in own and not (in_head and n.startswith(f"{place}."))
    }
    if wrong or not fitting:
        why = name_first(wrong or [*unlike.values()], _SHOWN)  # or all of it is a head
        raise UsageError(f"--start {path} does not fit the network: {why}")
    note = name_first([unlike[name] for name in in_head], _SHOWN)
    return fitting, f"the head starts as it was built: {note}" if in_head else ""
