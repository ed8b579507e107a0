"""Three hashes that identify a model, and a check that it can be trained.

This is done once for a sweep, in a separate process (`bench.environment`). Each model is examined
in a fork of it, so that the imports of one are not counted as another's, and a model that ends its
process does not end the others. The sweep itself imports neither torch nor the user's code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bench.errors import UsageError
from bench.models import MODELS, build_model, split_model

if TYPE_CHECKING:
    from torch import nn

IMAGES = (2, 3, 32, 32)
"""The input a user's model is tried on: float32, (N, C, H, W)."""


@dataclass(frozen=True)
class Fingerprint:
    """What a model is: each the first 12 hex digits of a SHA-256.

    ``parameters`` is over name, shape and dtype of every parameter and buffer, ``structure`` over
    the printed module without memory addresses, ``source`` over the files that build it.
    ``outputs`` is the number of classes it tells apart; None for a built-in network, which is not
    run.
    """

    parameters: str
    structure: str
    source: str
    outputs: int | None = None


def examine(name: str) -> Fingerprint:
    """Import and build ``name``, run a user's own once, and say what it is.

    A user's model takes a training step's forward pass on `IMAGES`, on the device that it puts
    itself on. A built-in network is built without memory (torch's meta device) and not run:
    DPN-92 would take 2 s.

    Call it in a process that has imported torch, and no model before.

    Raises:
        UsageError: it cannot be imported, built or run, or is no network for images; one line.
    """
    import torch

    before = set(sys.modules)
    torch.manual_seed(0)  # as a worker does before it builds: a factory may draw its layers
    if name in MODELS:
        with torch.device("meta"):
            model = build_model(name)
        outputs = None
    else:
        model = _build(name)
        outputs = _run(name, model)
    module, _ = split_model(name)
    files = {other: sys.modules[other] for other in set(sys.modules) - before}
    own = {other: found for other, found in files.items() if _is_own(found)}
    own[module] = sys.modules[module]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return Fingerprint(
        _hash(f"{key} {tuple(t.shape)} {t.dtype}".encode() for key, t in tensors),
        _hash([re.sub(r"0x[0-9a-fA-F]+", "", repr(model)).encode()]),
        _hash(text for name in sorted(own) for text in (name.encode(), _read(own[name]))),
        outputs,
    )


def _build(name: str) -> nn.Module:
    model: nn.Module = _try(f"model {name!r} cannot be built", lambda: build_model(name))
    if not list(model.parameters()):
        raise UsageError(f"model {name!r} has no parameters; there is nothing to train")
    return model


def _run(name: str, model: nn.Module) -> int:
    import torch

    device = next(model.parameters()).device
    images = torch.zeros(IMAGES, device=device)
    model.train()
    logits = _try(f"model {name!r} fails on {IMAGES} images", lambda: model(images))
    if not isinstance(logits, torch.Tensor):
        raise UsageError(
            f"model {name!r} returns {type(logits).__name__}; forward returns a tensor of logits, "
            "(N, classes)"
        )
    if logits.ndim != 2 or len(logits) != IMAGES[0]:
        raise UsageError(
            f"model {name!r} gives {tuple(logits.shape)} for {IMAGES[0]} images; forward returns "
            f"logits of shape ({IMAGES[0]}, classes)"
        )
    return int(logits.shape[1])


def _try(what: str, action: Callable[[], Any]) -> Any:
    """Do ``action``, which runs the user's code; whatever it raises becomes one line."""
    try:
        return action()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if _is_own_file(frame.filename)]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        message = " ".join(str(error).split())[:300]
        raise UsageError(f"{what}: {type(error).__name__}: {message}{place}") from error


_LIBRARIES = tuple(
    Path(path).resolve()
    for key, path in sysconfig.get_paths().items()
    if key in ("stdlib", "platstdlib")
)
_HARNESS = Path(__file__).parent


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_file() and not _is_library(Path(file))


def _is_own_file(name: str) -> bool:
    file = Path(name)
    return file.is_file() and not _is_library(file) and _HARNESS not in file.parents


def _is_library(file: Path) -> bool:
    file = file.resolve()
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(installed) or any(folder in file.parents for folder in _LIBRARIES)


def _read(module: ModuleType) -> bytes:
    return Path(module.__file__).read_bytes() if module.__file__ else b""


def _hash(parts: Iterable[bytes]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]


def examine_in_fork(name: str) -> dict[str, Any]:
    """`examine` in a fork of this process: the fields of `Fingerprint`, or {"error": one line}."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        answer: dict[str, Any]
        try:
            answer = vars(examine(name))
        except UsageError as error:
            answer = {"error": str(error)}
        except BaseException as error:
            answer = {"error": f"model {name!r} cannot be examined: {error!r}"}
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    code = os.waitstatus_to_exitcode(status)
    end = f"with return code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    return {"error": f"model {name!r} ends its process {end} when it is built and run once"}


def check_outputs(name: str, found: Fingerprint, classes: int) -> None:
    """Refuse a model that does not tell as many classes apart as the images have.

    Raises:
        UsageError: it says both numbers.
    """
    if found.outputs not in (None, classes):
        raise UsageError(
            f"model {name!r} gives {(IMAGES[0], found.outputs)} for {IMAGES[0]} images; it must "
            f"give {(IMAGES[0], classes)}, one logit for each class"
        )
