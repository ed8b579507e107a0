"""The ops of a training step, checked for what a GPU does badly.

A step really runs on the CPU. Two modes observe it: a `TorchDispatchMode` sees every op that
reaches a kernel, backward and optimizer included; a `TorchFunctionMode` sees the Python calls,
which alone say whether a device was named.

On a CPU every tensor's device is "cpu", so the place of a tensor on a machine with a GPU is tracked
instead:

- In host memory: what a factory call without ``device=`` makes (``torch.zeros(3)``), and what is
  computed from such tensors alone.
- On the GPU: everything else, such as what a call with ``device=`` makes, the result of
  ``.to(device)``, and whatever is computed from such tensors.
- A device given as a string, ``"cpu"``, is host memory; one given as a `torch.device` is the GPU,
  because that is how the harness passes its device.

A tensor of ``torch.from_numpy``, which no mode sees, counts as on the GPU.

Fake tensors on "cuda" are not used, because a CPU build of torch (2.13) ends the process when
autograd meets one, nor the meta device, which has no autocast.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode


class Rule(StrEnum):
    MIXED = "mixed dtypes in a multi-tensor call"
    READ = "a value read back to the host"
    COPY = "a copy between host and device"
    LAUNCHES = "more kernel launches than the budget"


@dataclass(frozen=True)
class Breach:
    """A rule that was broken, by which op, and where: ``file:line in function``."""

    rule: Rule
    op: str
    place: str
    detail: str = ""

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.rule}: {self.op}{detail} at {self.place}"


# ------------------------------------------------------------------------------- kernel launches

CHUNK, BLOCKS = 65_536, 320
MAX_TENSORS = (110, 64, 48, 36, 30)
"""Elements per block, blocks per launch, and tensors per launch by number of lists, from
aten/src/ATen/native/cuda/MultiTensorApply.cuh (torch 2.9 to 2.13)."""


def count_multi_tensor(sizes: Sequence[int], lists: int) -> int:
    """Return the number of kernels that a multi-tensor call launches, over this many parallel lists
    of tensors of one dtype, with these numbers of elements."""
    most = MAX_TENSORS[lists - 1]
    launches = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = math.ceil(size / CHUNK)
        for chunk in range(1, chunks + 1):
            blocks += 1
            last = chunk == chunks
            if blocks == BLOCKS or (last and tensors == most):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + bool(blocks)


_UNLAUNCHED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_local_scalar_dense",  # copies to the host, which is a breach
}


@cache
def _launches_nothing(op: torch._ops.OpOverload) -> bool:
    """Return whether an op only makes a view or memory, or is no work of the device."""
    aliases = [a.alias_info for a in op._schema.arguments if a.alias_info is not None]
    views = bool(aliases) and not any(alias.is_write for alias in aliases)
    return views or op.namespace == "profiler" or op._schema.name in _UNLAUNCHED


def count_launches(op: torch._ops.OpOverload, args: Sequence[Any]) -> int:
    """Return the approximate number of kernels that an op launches on a GPU.

    None for views and for memory that is not filled. One for each gradient that a convolution's
    backward computes. For a multi-tensor call over lists of one dtype, `count_multi_tensor`, and
    one more for a norm; over a list of mixed dtypes, one per tensor. One for anything else,
    although some ops take more: splits, layout changes, reductions in two passes.
    """
    if _launches_nothing(op):
        return 0
    lists = list(_tensor_lists(op, args))
    if lists:
        if any(_dtypes(tensors) for tensors in lists):
            return len(lists[0])
        sizes = [t.numel() for t in lists[0]]
        norm = "_foreach_norm" in op._schema.name
        return count_multi_tensor(sizes, len(lists)) + norm
    if op._schema.name == "aten::convolution_backward":
        return sum(args[-1])
    return 1


def _tensor_lists(op: torch._ops.OpOverload, args: Iterable[Any]) -> Iterable[Sequence[Tensor]]:
    name = op._schema.name.partition("::")[2]
    if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        for arg in args:
            if isinstance(arg, list | tuple) and arg and all(isinstance(t, Tensor) for t in arg):
                yield arg


def _dtypes(tensors: Sequence[Tensor]) -> str:
    found = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    return " and ".join(found) if len(found) > 1 else ""


# ------------------------------------------------------------------------------------- the modes

_HERE = Path(__file__).resolve()
_LIBRARIES = (
    str(Path(torch.__file__).resolve().parent),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
)


def _place() -> str:
    """Return the innermost line on the stack outside torch, Python and this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, str(_HERE), "<")):
            path, base = Path(file), _HERE.parents[2]
            shown = path.relative_to(base) if path.is_relative_to(base) else path.name
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown place"


_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class Watch:
    """An observer of what runs inside ``with``. From `judge` on it counts kernels in ``launches``,
    and collects broken rules in ``breaches``, each place once."""

    def __init__(self) -> None:
        self.launches = 0
        self.breaches: list[Breach] = []
        self._judging = self._inside = False
        self._places: Counter[tuple[str, str]] = Counter()
        # by storage, so that views and autograd's aliases are where their base is; the tensor keeps
        # the storage from being freed and its address from being reused
        self._host: dict[int, Tensor] = {}
        self._modes = (_Calls(self), _Ops(self))

    def __enter__(self) -> Watch:
        for mode in self._modes:
            mode.__enter__()
        self._inside = True
        return self

    def __exit__(self, *raised: Any) -> None:
        self._inside = False
        for mode in reversed(self._modes):
            mode.__exit__(*raised)

    def judge(self) -> None:
        """Reset the counts, and apply the rules from here on."""
        self.launches, self.breaches, self._judging = 0, [], True
        self._places.clear()

    def busiest(self) -> tuple[str, str]:
        (op, place), _ = self._places.most_common(1)[0]
        return op, place

    def without_calls(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``forward`` with its Python calls not observed, as code that was compiled without
        the observer would be recompiled for it. Its ops are still seen."""
        calls = self._modes[0]

        def run(*args: Any) -> Any:
            if not self._inside:
                return forward(*args)
            calls.__exit__(None, None, None)
            try:
                return forward(*args)
            finally:
                calls.__enter__()

        return run

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def place_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor

    def report(self, rule: Rule, op: str, detail: str = "") -> None:
        if self._judging:
            breach = Breach(rule, op, _place(), detail)
            if breach not in self.breaches:
                self.breaches.append(breach)

    def see(self, op: torch._ops.OpOverload, args: Sequence[Any], result: Any) -> None:
        """Judge one op that has run; ``args`` are all of its arguments."""
        given, name = list(_tensors(args)), op._schema.name
        host = [t for t in given if self.is_host(t)]
        if given and len(host) == len(given):
            for tensor in _tensors([result]):
                self.place_host(tensor)
            return
        if not self._judging:
            return
        launches = count_launches(op, args)
        self.launches += launches
        if launches:
            self._places[name, _place()] += launches
        for tensors in _tensor_lists(op, args):
            if mixed := _dtypes(tensors):
                self.report(Rule.MIXED, name, f"{len(tensors)} tensors of {mixed}")
                break
        if _reads_back(op, args):
            self.report(Rule.READ, name)
        # a host scalar is a kernel's argument, except in a copy or an index
        if any(t.dim() or name in _COPIES or name in _INDEXED for t in host):
            self.report(Rule.COPY, name, "one of its tensors is in host memory")

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a Python call, and track where its result would be."""
        name = f"torch.{getattr(func, '__name__', func)}"
        makes = func in _device_constructors()
        source = next((arg for arg in args[:1] if isinstance(arg, Tensor)), None)
        was_host = source is not None and self.is_host(source)
        onto = self._destination(func, args, kwargs) or ("host" if makes else "")
        if func in _READS and not was_host:
            self.report(Rule.READ, name)
        judging, self._judging = self._judging, self._judging and not (makes and onto == "host")
        result = func(*args, **kwargs)
        self._judging = judging
        if not onto or not isinstance(result, Tensor):
            return result
        if makes and func in _FROM_HOST and onto == "device" and (source is None or was_host):
            self.report(Rule.COPY, name, "a tensor is made of host values")
        elif source is not None and not makes and was_host is not (onto == "host"):
            self.report(Rule.COPY, name, f"to the {onto}")
        if onto == "device":
            self._host.pop(result.untyped_storage()._cdata, None)
        elif result is not source:  # on a CPU a call that moves nothing returns its argument
            self.place_host(result)
        return result

    def _destination(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> str:
        """Return where a Python call says its result is to be: "host", "device" or neither ("")."""
        if func is Tensor.cpu:
            return "host"
        device = kwargs.get("device", kwargs.get("other"))
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], torch.device | str | Tensor):
            device = args[1]
        if isinstance(device, Tensor):
            return "host" if self.is_host(device) else "device"
        if device is None:
            return ""
        return "host" if isinstance(device, str) else "device"


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _reads_back(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """Return whether an op's result, or its shape, depends on values on the device."""
    if op._schema.name in _INDEXED:  # tagged whatever the index is
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:2]))
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*op.tags})


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._watch.call(func, args, kwargs or {})


class _Ops(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as compiled, and see the ops it runs."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watch.see(func, [*args, *(kwargs or {}).values()], result)
        return result
