"""The ops of a training step on the CPU, watched for what a GPU does badly.

A `TorchDispatchMode` sees every op that reaches a kernel, backward and optimizer included; a
`TorchFunctionMode` sees the Python calls, which alone say whether a device was named. On a CPU
every tensor's device is "cpu", so where a tensor would be on a machine with a GPU is tracked:

- In host memory: what a factory call without ``device=`` makes (``torch.zeros(3)``), and what is
  computed from such tensors alone.
- On the GPU: everything else, such as what a call with ``device=`` makes, and the result of
  ``.to(device)``.
- A device given as a string, ``"cpu"``, is host memory; one given as a `torch.device` is the GPU,
  because that is how the harness passes its device.

Fake tensors on "cuda" are not used, because a CPU build of torch (2.13) ends the process when
autograd meets one, nor the meta device, which has no autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode


class Rule(StrEnum):
    MIXED = "mixed dtypes in a multi-tensor call"
    """Wrong on CUDA in torch 2.9 and 2.10, and one kernel per tensor in later versions."""
    READ = "a value read back to the host"
    COPY = "a copy between host and device"


_COPIES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_"}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_UNLAUNCHED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::_unsafe_view",
    "aten::_local_scalar_dense",  # copies to the host, which is a breach
}


class Watch:
    """An observer of what runs inside ``with``. From `judge` on it counts the ops that a GPU would
    launch in ``launches``, and collects broken rules and their ops in ``breaches``, each once."""

    def __init__(self) -> None:
        self.launches = 0
        self.breaches: dict[tuple[Rule, str], None] = {}
        self._judging = False
        # by storage, so that views and autograd's aliases are where their base is; the tensor keeps
        # the storage from being freed and its address from being reused
        self._host: dict[int, Tensor] = {}
        self._modes = (_Calls(self), _Ops(self))

    def __enter__(self) -> Watch:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*raised)

    def judge(self) -> None:
        """Reset the counts, and apply the rules from here on."""
        self.launches, self.breaches, self._judging = 0, {}, True

    @property
    def rules(self) -> set[Rule]:
        return {rule for rule, _ in self.breaches}

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def _place_host(self, tensor: Tensor) -> None:
        self._host[tensor.untyped_storage()._cdata] = tensor

    def _report(self, rule: Rule, op: str) -> None:
        if self._judging:
            self.breaches[rule, op] = None

    def see(self, op: torch._ops.OpOverload, args: Sequence[Any], result: Any) -> None:
        """Judge one op that has run; ``args`` are all of its arguments."""
        given, name = list(_tensors(args)), op._schema.name
        host = [t for t in given if self._is_host(t)]
        if given and len(host) == len(given):
            for tensor in _tensors([result]):
                self._place_host(tensor)
            return
        if not self._judging:
            return
        self.launches += _launches(op)
        if name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")):
            lists = [list(_tensors(arg)) for arg in args if isinstance(arg, list | tuple)]
            if any(len({t.dtype for t in tensors}) > 1 for tensors in lists):
                self._report(Rule.MIXED, name)
        if _reads_back(op, args):
            self._report(Rule.READ, name)
        # a host scalar is a kernel's argument, except in a copy or an index
        if any(t.dim() or name in _COPIES or name in _INDEXED for t in host):
            self._report(Rule.COPY, name)

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a Python call, and track where its result would be."""
        name = f"torch.{getattr(func, '__name__', func)}"
        makes = func in _device_constructors()
        source = next((arg for arg in args[:1] if isinstance(arg, Tensor)), None)
        was_host = source is not None and self._is_host(source)
        onto = self._destination(func, args, kwargs) or ("host" if makes else "")
        if func in _READS and not was_host:
            self._report(Rule.READ, name)
        judging, self._judging = self._judging, self._judging and not (makes and onto == "host")
        result = func(*args, **kwargs)
        self._judging = judging
        if not onto or not isinstance(result, Tensor):
            return result
        made = makes and func in _FROM_HOST and onto == "device" and (source is None or was_host)
        moved = source is not None and not makes and was_host is not (onto == "host")
        if made or moved:
            self._report(Rule.COPY, name)
        if onto == "device":
            self._host.pop(result.untyped_storage()._cdata, None)
        elif result is not source:  # on a CPU a call that moves nothing returns its argument
            self._place_host(result)
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
            return "host" if self._is_host(device) else "device"
        if device is None:
            return ""
        return "host" if isinstance(device, str) else "device"


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _launches(op: torch._ops.OpOverload) -> bool:
    """Return whether an op is more than a view, memory that is not filled, or no work of a GPU."""
    aliases = [a.alias_info for a in op._schema.arguments if a.alias_info is not None]
    views = bool(aliases) and not any(alias.is_write for alias in aliases)
    return not (views or op.namespace == "profiler" or op._schema.name in _UNLAUNCHED)


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._watch.see(func, [*args, *(kwargs or {}).values()], result)
        return result
