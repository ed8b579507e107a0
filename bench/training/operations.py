"""FLOP, bytes and number formats of operations as they run, of a user's script too.

A script's process loads this with the torch and the Python that it has, see `bench.workers.script`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._ops import HigherOrderOperator
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from bench.schema.work import (
    ANY_CONVOLUTION,
    COMPUTING,
    MOVES,
    NETWORK_REGION,
    Label,
    Work,
    WorkKind,
    base_name,
    find_part,
    label_convolution,
    place_kind,
    read_groups,
)

_NAMED: dict[WorkKind, str] = {
    WorkKind.MATMUL: "mm addmm bmm baddbmm addmv mv dot addbmm linear matmul _scaled_mm "
    "_grouped_mm linear_backward mkldnn_linear _addmm_activation",
    WorkKind.ATTENTION: "_scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention "
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward "
    "_flash_attention _efficient_attention _cudnn_attention",
    WorkKind.RECURRENT: "_cudnn_rnn lstm gru _thnn_fused_lstm_cell _thnn_fused_gru_cell "
    "mkldnn_rnn_layer _cudnn_rnn_flatten_weight",
    WorkKind.NORMALISATION: "native_batch_norm cudnn_batch_norm batch_norm "
    "_native_batch_norm_legit _batch_norm_with_update native_layer_norm layer_norm "
    "native_group_norm group_norm _fused_rms_norm rms_norm batch_norm_stats batch_norm_elemt "
    "batch_norm_gather_stats miopen_batch_norm _batch_norm_impl_index",
    WorkKind.REDUCTION: "sum mean amax amin max min argmax argmin norm linalg_vector_norm var "
    "var_mean std any all prod logsumexp cumsum topk sort avg_pool2d max_pool2d "
    "max_pool2d_with_indices adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d "
    "avg_pool1d max_pool1d avg_pool3d _amp_foreach_non_finite_check_and_unscale_ _foreach_norm "
    "equal",
    WorkKind.COPY: "clone copy contiguous fill zero zeros zeros_like ones ones_like full full_like "
    "new_zeros new_full new_ones arange scalar_tensor lift_fresh_copy lift_fresh _pin_memory "
    "_foreach_zero _foreach_copy _local_scalar_dense randn rand randint randperm normal uniform "
    "bernoulli random repeat linspace eye tril_indices triu_indices",
    WorkKind.CONCATENATION: "cat stack split split_with_sizes slice_backward slice_scatter "
    "narrow_copy constant_pad_nd pad _chunk_cat select_backward select_scatter new_empty_strided "
    "split_with_sizes_copy roll flip",
    WorkKind.INDEXING: "embedding embedding_dense_backward index index_select index_put index_add "
    "gather scatter scatter_add _unsafe_index _unsafe_index_put masked_select nonzero take "
    "index_copy masked_scatter _index_put_impl unfold_backward",
    WorkKind.EXCHANGE: "allreduce allgather _allgather_base reduce_scatter _reduce_scatter_base "
    "broadcast barrier alltoall alltoall_base all_reduce all_gather_into_tensor "
    "reduce_scatter_tensor all_to_all_single wait_tensor",
    WorkKind.ELEMENTWISE: "native_dropout native_dropout_backward dropout _softmax softmax "
    "_softmax_backward_data upsample_nearest2d upsample_bilinear2d glu_backward prelu",
    WorkKind.LOSS: "_log_softmax log_softmax _log_softmax_backward_data nll_loss_forward "
    "nll_loss_backward nll_loss nll_loss2d_forward nll_loss2d_backward cross_entropy_loss mse_loss "
    "mse_loss_backward binary_cross_entropy binary_cross_entropy_with_logits",
}
_KINDS = {name: kind for kind, names in _NAMED.items() for name in names.split()}

_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_FREE |= {"detach", "lift_fresh", "resize", "set", "_unsafe_view"}
_OVERWRITES = {"copy", "zero", "fill", "_foreach_copy", "_foreach_zero", "normal", "uniform"}
_PICKS = {"embedding", "index", "index_select", "gather", "_unsafe_index"}


class WorkCounter(TorchDispatchMode):
    """Counts the work of the operations that run within it, summed by label."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[Label, Work] = {}
        self._parts: list[WorkKind | None] = []

    @contextmanager
    def inside(self, part: WorkKind | None) -> Iterator[None]:
        """Assign the operations within to this part of the step; None for the network."""
        self._parts.append(part)
        try:
            yield
        finally:
            self._parts.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, out)
        return out

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count an operation that has run."""
        if func.namespace == "profiler" or _is_free(func):
            return
        label = find_label(func, args, out)
        if self._parts:
            label = replace(label, kind=place_kind(label.kind, self._parts[-1]))
        work = Work(
            1, _count_products(func, args, kwargs, out), count_bytes(func, args, kwargs, out)
        )
        self.work.setdefault(label, Work()).add(work)


@cache
def _is_free(func: Any) -> bool:
    return base_name(str(func)) in _FREE or bool(func.is_view)


@cache
def is_free_name(name: str) -> bool:
    """Return whether the operation with this `base_name` touches no element.

    >>> is_free_name("transpose"), is_free_name("clone")
    (True, False)
    """
    return name in _FREE or any(overload.is_view for overload in _list_overloads("aten", name))


@cache
def is_wrapper(name: str) -> bool:
    """Return whether an operation only calls others, which a `WorkCounter` then sees in its place.

    >>> is_wrapper("aten::conv2d"), is_wrapper("aten::convolution")
    (True, False)
    """
    space, _, plain = name.partition("::")
    names = [
        overload._schema.name + (f".{overload._overloadname}").removesuffix(".default")
        for overload in _list_overloads(space, plain)
        if "out" not in overload._overloadname and overload._overloadname[:4] != "prim"
    ]
    return bool(names) and all(map(_is_composite, names))


def _is_composite(name: str) -> bool:
    try:
        key = "CompositeImplicitAutograd"
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
    except RuntimeError:  # it exists in TorchScript only
        return True


def _list_overloads(space: str, name: str) -> list[Any]:
    place = getattr(torch.ops, space)
    packet = getattr(place, name, None) or getattr(place, f"{name}_", None)
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads()]


def find_label(func: Any, args: tuple[Any, ...], out: Any) -> Label:
    """Return the label of an operation that ran, from its name, shapes and number formats."""
    name = base_name(str(func))
    tensors = _list_tensors(args)
    format = _name_format(tensors or _list_tensors(out))
    if name in ANY_CONVOLUTION:
        # in the backward pass the weights are the third argument
        weight = args[2] if name.endswith("backward") else args[1]
        return label_convolution(weight.shape, read_groups(name, args), format)
    if name in MOVES:
        if name in ("copy", "_foreach_copy"):  # from the second half to the first
            half = len(tensors) // 2
            moves = list(zip(tensors[:half], tensors[half:]))
        else:
            moves = list(zip([out], tensors))
        for to, source in moves:
            if to.dtype != source.dtype:
                return Label(WorkKind.CAST, name, f"{_name_format([source])}→{_name_format([to])}")
        laid = any(to.stride() != source.stride() and to.numel() > 1 for to, source in moves)
        return Label(WorkKind.LAYOUT if laid else WorkKind.COPY, name, format)
    return Label(name_kind(name), name, format)


def _list_tensors(tree: Any) -> list[Tensor]:
    return [one for one in tree_flatten(tree)[0] if isinstance(one, Tensor)]


def _name_format(tensors: Sequence[Tensor]) -> str:
    floating = [t for t in tensors if t.is_floating_point()]
    return str((floating or tensors)[0].dtype).removeprefix("torch.") if tensors else ""


@cache
def name_kind(name: str) -> WorkKind:
    """Return the kind of an operation by its `base_name` alone. Operations not listed here are
    classified by torch's own tags, and backward operations by the forward one."""
    if name in _KINDS:
        return _KINDS[name]
    forward = name.removesuffix("_data").removesuffix("_backward")
    if name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return WorkKind.OPTIMIZER
    if name.startswith("_amp_"):
        return WorkKind.LOSS_SCALING
    if name.startswith("_foreach_"):
        return WorkKind.ELEMENTWISE
    tags = {tag for overload in _list_overloads("aten", name) for tag in overload.tags}
    if torch.Tag.pointwise in tags:
        return WorkKind.ELEMENTWISE
    if getattr(torch.Tag, "reduction", None) in tags:  # which torch 2.1 lacks
        return WorkKind.REDUCTION
    return name_kind(forward) if forward != name else WorkKind.OTHER


def _count_products(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOP of an operation, by torch's own formulas except for `count_gradients`: a
    multiply-add counts as two, and operations other than products as none."""
    packet = func.overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        return float(count_gradients(*(t.shape for t in args[:3]), *args[3:]))
    formula = _FORMULAS.get(_ALIKE.get(packet, packet))
    return float(_apply(formula, args, kwargs, out)) if formula else 0.0


def _apply(
    formula: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> int:
    """Apply a formula of torch's: to tensors, or to their shapes, as all in torch 2.1 and those do
    that later ones wrap, whose wrapper calls the output ``out`` in torch 2.2."""
    given = getattr(formula, "__wrapped__", formula)
    if given is formula and hasattr(flop_counter, "flop_registry"):
        return formula(*args, **kwargs, out_val=out)
    shapes = tree_map(lambda one: getattr(one, "shape", one), (args, kwargs, out))
    return int(given(*shapes[0], **shapes[1], out_shape=shapes[2]))


def count_gradients(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, **_: Any
) -> int:
    """Return the FLOP of ``aten.convolution_backward``, from its tensors' shapes and its other
    arguments. Up to torch 2.13, torch's formula counts the weight gradient of a grouped convolution
    as if it were not grouped, ``groups`` times too much."""
    transposed, needed = rest[4], rest[7]
    # an output element is a dot product over weight[1:], one group's inputs and the kernel; each of
    # its products occurs once in the gradient of the input and once in the weight's
    products = math.prod(x if transposed else grad) * math.prod(weight[1:])
    return int(2 * products * (int(needed[0]) + int(needed[1])))


_FORMULAS: dict[Any, Callable[..., int]] = (
    getattr(flop_counter, "flop_registry", None) or vars(flop_counter)["flop_mapping"]
)

_ATEN = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
_ALIKE = {
    getattr(_ATEN, name): getattr(_ATEN, like)
    for name, like in (
        (f"{_FLASH}_for_cpu", _FLASH),
        (f"{_FLASH}_for_cpu_backward", f"{_FLASH}_backward"),
        ("mkldnn_convolution", "convolution"),
    )
    if hasattr(_ATEN, name)  # the first two since torch 2.3
}
"""Operations without a formula in torch, and the operations whose formula applies."""


def count_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the bytes that an operation must read and write: each element of its tensors once.

    An expanded tensor counts by its stored elements. A tensor that is only overwritten is not read,
    and of a lookup table only the elements found are read. `_AGAIN` lists what is read or written
    more than once.
    """
    name = base_name(str(func))
    written: dict[int, Tensor] = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.update((id(t), t) for t in _list_tensors(value))
    read = {id(t): t for t in _list_tensors((args, kwargs))}
    made = {
        id(t): t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and id(t) not in written
    }
    if name in _OVERWRITES or (written and "out" in func._overloadname):
        read = {key: t for key, t in read.items() if key not in written}
    reads, writes = (sum(map(_size, part.values())) for part in (read, {**written, **made}))
    if name in _PICKS:
        table = max(map(_size, read.values()))
        reads += min(writes, table) - table
    again = _AGAIN[name](*args) if name in _AGAIN else ()
    return float(reads + writes + sum(map(_size, again)))


def _twice_in_training(x: Tensor, *rest: Any) -> list[Tensor]:
    return [x] if rest[4] else []


_AGAIN: dict[str, Callable[..., list[Tensor]]] = {
    # the gradients of input and weights are two kernels
    "convolution_backward": lambda grad, x, weight, *rest: [grad] * (rest[7][0] and rest[7][1]),
    # a channel's statistics need a pass over the whole batch before it is normalised
    "native_batch_norm": _twice_in_training,
    "cudnn_batch_norm": _twice_in_training,
    "native_batch_norm_backward": lambda grad, x, *rest: [grad, x] if rest[5] else [],
    "cudnn_batch_norm_backward": lambda x, grad, *rest: [x, grad],  # exists for training only
    "miopen_batch_norm": _twice_in_training,
    "miopen_batch_norm_backward": lambda x, grad, *rest: [x, grad],
    # zeros are written everywhere, then the gradient over part of them
    "slice_backward": lambda grad, *rest: [grad],
    "select_backward": lambda grad, *rest: [grad],
}
"""Tensors that an operation reads or writes a second time, since it works in two passes."""


def _size(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride())
    return math.prod(size for size, stride in pairs if stride or not size) * tensor.element_size()


# ------------------------------------------------------------------------------------------- sample


class Sample(WorkCounter):
    """Counts the operations of a user's training from `begin` to `end`, and neither ends nor bends
    it: what cannot be counted has a reason, ``failure``. Compiled code is left out; of that there
    are ``graphs``, -1 if their number changed, and ``calls``."""

    failure = ""
    graphs = calls = 0
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.unseen: dict[str, None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile begin meanwhile: it would leave a network eager for good (pytorch issue
        190286)."""
        return True

    def count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        try:
            if isinstance(func, HigherOrderOperator):  # what it runs is not dispatched again
                self.unseen[func.name()] = None
                return
            if func.namespace == "profiler":
                self._follow(func, args)
            super().count(func, args, kwargs, out)
            if not _is_counted(func):
                self.unseen[str(func.overloadpacket)] = None
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _follow(self, func: Any, args: tuple[Any, ...]) -> None:
        """Follow the regions of the script, of which torch marks parts of a step."""
        if "_record_function_enter" in func.name():
            before = self._parts[-1] if self._parts else None
            network = args[0] == NETWORK_REGION
            self._parts.append(None if network else find_part(args[0]) or before)
        elif self._parts:  # else of a region that was open before
            self._parts.pop()

    def begin(self) -> None:
        self.unseen = dict.fromkeys(filter(sys.modules.__contains__, _BESIDE))
        self.graphs = read_compiled().get("unique_graphs", 0)
        self._entered = False
        if _len_torch_dispatch_stack():
            self.failure = "another dispatch mode of the script was on"
        else:
            self.__enter__()
            self._entered = True
            self._watch_replays()
            self._leave_out_compiled()
            os.register_at_fork(after_in_child=self._leave)  # such as a DataLoader's workers

    def _watch_replays(self) -> None:
        """Note that a CUDA graph was replayed, whose operations are not dispatched again."""
        self._replay = replay = torch.cuda.CUDAGraph.replay

        @wraps(replay)
        def note(graph: torch.cuda.CUDAGraph) -> None:
            if _len_torch_dispatch_stack():  # not one of compiled code
                self.unseen["a replayed CUDA graph"] = None
            replay(graph)

        torch.cuda.CUDAGraph.replay = note  # type: ignore[assignment,method-assign]

    def _leave_out_compiled(self) -> None:
        """See nothing of what Inductor compiled, of which only some operations would show."""
        self._code = code = getattr(
            sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None
        )
        if code is None:
            return
        self._call = call = code.__call__

        @wraps(call)
        def run(compiled: Any, inputs: Any) -> Any:
            self.calls += 1
            with _disable_current_modes():
                return call(compiled, inputs)

        code.__call__ = run

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            if self._code is not None:
                self._code.__call__ = self._call
            torch.cuda.CUDAGraph.replay = self._replay  # type: ignore[method-assign]
            self.__exit__(None, None, None)

    def end(self, device: int = -1) -> dict[str, Any]:
        """Return what JSON can hold: ``work``, a list of kind, operation, format, calls, FLOP and
        bytes; torch's ``flags`` of arithmetic; the compute ``capability`` of the GPU of this index,
        (0, 0) of none; what it may not have seen, ``unseen``; and ``failure``."""
        if _is_compiled():
            self.failure = self.failure or COMPILED
            if read_compiled().get("unique_graphs", 0) != self.graphs:  # meanwhile
                self.graphs = -1
        self._leave()
        return {
            "work": self.list_rows(),
            "flags": read_flags(),
            "capability": torch.cuda.get_device_capability(device) if device >= 0 else (0, 0),
            "unseen": [*self.unseen],
            "failure": self.failure,
        }

    def list_rows(self) -> list[tuple[Any, ...]]:
        return [
            (str(label.kind), label.operation, label.format, one.calls, one.flop, one.bytes)
            for label, one in self.work.items()
        ]


def read_flags() -> dict[str, str]:
    """Return torch's flags of arithmetic, as they are now."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "matmul": _read_rounding(matmul),
        "fp16_reduction": str(matmul.allow_fp16_reduced_precision_reduction).lower(),
        "bf16_reduction": str(matmul.allow_bf16_reduced_precision_reduction).lower(),
        "conv": _read_rounding(getattr(cudnn, "conv", cudnn)),
        "cudnn_benchmark": str(cudnn.benchmark).lower(),
        "deterministic": str(cudnn.deterministic).lower(),
    }


def _read_rounding(backend: Any) -> str:
    """Return how products of float32 are rounded."""
    try:
        return str(backend.fp32_precision)
    except (AssertionError, AttributeError):  # before torch 2.9, where it was a switch
        return "tf32" if backend.allow_tf32 else "ieee"


COMPILED = "compiled code does not show its operations"

_BESIDE = (
    "transformer_engine",
    "flash_attn",
    "xformers",
    "apex",
    "bitsandbytes",
    "mamba_ssm",
    "causal_conv1d",
    "liger_kernel",
    "unsloth",
)
"""Packages that compute in kernels of their own, which are not among torch's operations."""


@cache
def _is_counted(func: Any) -> bool:
    """Return whether an operation's products are counted, if it may have any: a library's own
    operation, or a recurrent layer's, has no formula."""
    if func.namespace not in ("aten", "prim", "prims"):
        return func.namespace in ("profiler", "c10d", "_c10d_functional", "torchvision")
    products = name_kind(base_name(str(func))) in (*COMPUTING, WorkKind.RECURRENT)
    packet = func.overloadpacket
    return not products or _ALIKE.get(packet, packet) in _FORMULAS


def read_compiled(name: str = "stats") -> dict[str, int]:
    """Return what torch.compile has counted in this process, such as ``unique_graphs``; empty if it
    has compiled nothing."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return {} if dynamo is None else dict(dynamo.counters.get(name, {}))


class Compilations(NamedTuple):
    """What torch.compile has done in this process, for whoever called it."""

    graphs: int = 0
    """How many it compiled."""

    again: int = 0
    """How often it compiled a function that it had compiled before, as for another batch shape."""

    uncompiled: int = 0
    """Functions that it runs as written from then on, since they need more code than its limit
    allows. An optimizer may lift the limit for its own step."""

    def __sub__(self, before: Compilations) -> Compilations:
        return Compilations(*(now - then for now, then in zip(self, before, strict=True)))


def count_compilations() -> Compilations:
    if (dynamo := sys.modules.get("torch._dynamo.convert_frame")) is None:
        return Compilations()
    begun = dynamo.FRAME_COMPILE_COUNTER.values()  # by function, how often it began
    failed = read_compiled("unimplemented").items()
    left = sum(n for message, n in failed if _LIMIT.search(message.partition("\n")[0]))
    return Compilations(
        read_compiled().get("unique_graphs", 0), sum(begun) - len(begun) - left, left
    )


_LIMIT = re.compile(r"limit (exceeded|reached)")
"""How torch names that it left a function as written, after a word that its versions differ in."""


def _is_compiled() -> bool:
    """Return whether torch.compile has been called in this process, if for nothing that ran yet."""
    made = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    # None stands for what it is to leave alone, such as optimizers
    return bool(read_compiled("frames")) or any(map(callable, made.values()))
