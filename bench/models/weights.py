"""Initial weights of a training: reading the file of ``--start`` and fitting it to the network."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Container, Mapping
from hashlib import file_digest
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.text import name_first

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

_SAVE = "save the network's state_dict() alone, with torch.save or safetensors"


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
    except ImportError as error:
        raise UsageError(
            f"--start {path}: the package safetensors is not installed; pip install safetensors"
        ) from error
    except OSError as error:
        why = error.strerror or " ".join(str(error).split())[:200]
        raise UsageError(f"--start {path}: {why}; give a file of weights") from error
    except Exception as error:  # a damaged file makes torch raise almost anything
        raise UsageError(f"--start {path}: {_explain(error)}; {_SAVE}") from error
    if isinstance(found, Mapping):
        kept = found.get(_TRAINING)
        whole = kept if isinstance(kept, Mapping) else found
        inner = (whole[key] for key in _WRAPPERS if isinstance(whole.get(key), Mapping))
        found = next(inner, found)
        found = {n: v for n, v in found.items() if not (isinstance(n, str) and n.endswith(_EXTRA))}
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"--start {path}: holds {_name_kind(found)}, and no weights; {_SAVE}")
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            raise UsageError(
                f"--start {path}: holds {_name_kind(value)} as {str(name)[:60]!r} among or in "
                f"place of weights; {_SAVE}"
            )
    weights: dict[str, Tensor] = dict(found)
    while not any(name in own for name in weights) and (
        prefix := next((p for p in _PREFIXES if all(name.startswith(p) for name in weights)), "")
    ):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def _explain(error: Exception) -> str:
    """Say briefly why torch did not load a file; its own message is a page of advice."""
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return (
            f"holds {found[1]}, which loading would execute; only weights are loaded, and nothing "
            "was executed"
        )
    if "TorchScript" in str(error):
        return "this is a TorchScript program, and only weights are loaded"
    return "this is no file of weights, or it is damaged"


def _name_kind(value: object) -> str:
    return "nothing" if isinstance(value, Mapping) and not value else type(value).__name__


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

    def in_head(name: str) -> bool:
        return bool(place) and name.startswith(f"{place}.")

    shapes = [
        f"{name} is {tuple(weights[name].shape)} in the file and {tuple(t.shape)} in the network"
        for name, t in own.items()
        if name in weights and weights[name].shape != t.shape
    ]
    lacking = [
        name
        for name, tensor in own.items()
        if id(tensor) not in there and not name.endswith("num_batches_tracked")
    ]
    unknown = [name for name in weights if name not in own]
    note = ""
    said = {"": shapes, "the file lacks ": lacking, "the network lacks ": unknown}
    if differing := [
        what + text for what, texts in said.items() for text in texts if in_head(text)
    ]:
        note = f"the head starts as it was built: {name_first(differing, _SHOWN)}"
    others = {what: [text for text in texts if not in_head(text)] for what, texts in said.items()}
    wrong = [what + name_first(texts, _SHOWN) for what, texts in others.items() if texts]
    fitting = {n: t for n, t in weights.items() if n in own and not (note and in_head(n))}
    if wrong or not fitting:
        why = "; ".join(wrong) or "the file has nothing but weights of the head"
        raise UsageError(f"--start {path} does not fit the network: {why}")
    return fitting, note


def load_weights(model: nn.Module, path: str, find_head: Callable[[nn.Module], nn.Module]) -> str:
    """Load the weights that `fit_weights` selects into ``model``, which is on the CPU; return its
    note. Raises UsageError: as `fit_weights`."""
    fitting, note = fit_weights(model, path, find_head)
    model.load_state_dict(fitting, strict=False)
    return note
