"""The optimizers of `OPTIMIZERS`, and the learning rate of each step.

torch's fused optimizers create a weight's state in its first step, for SGD uninitialised: a first
step that overflows and is skipped would leave it so. With a state of zeros the first step gives the
same result and allocates no memory. The state of others is zeros from their first step on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bench.base.errors import UnsupportedError, UsageError
from bench.networks.workloads import Workload
from bench.schema.case import Case, whole_batch
from bench.schema.optimization import (
    LEAST_SPECIAL,
    OFFLOADED,
    OPTIMIZERS,
    SPECIAL,
    count_warmup_steps,
    refuse_plain,
    scale_lr,
)
from bench.training.float8 import import_torchao
from bench.training.memory import find_local


def build_optimizer(
    name: str,
    parameters: Sequence[Tensor],
    lr: float,
    capturable: bool = False,
    special: Sequence[Tensor] | None = None,
) -> torch.optim.Optimizer:
    """Make the optimizer ``name`` of `OPTIMIZERS` for ``parameters``; by default all are
    ``special``, as `list_special` says of those of a network.

    `OptimizerKind.fused` ones are, but for SGD on half-precision weights on a CPU and on sharded
    ones. If ``capturable``, which only they can be, steps can be captured in a CUDA graph, and the
    learning rate is a tensor on the weights' device, float32, (). Raises UnsupportedError: torchao
    is not installed, or no weight is special.
    """
    special = parameters if special is None else special
    if name in SPECIAL and not special:
        raise UnsupportedError(refuse_plain(name, "the network"))
    if name == "muon":
        return _build_muon(parameters, special, lr)
    if name == OFFLOADED:
        return _build_offloaded(parameters, lr)
    optimizer = _BUILDERS[name](parameters, lr)
    if capturable:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(lr, device=group["params"][0].device)
            if "capturable" in group:  # AdamW's; torch refuses to capture it otherwise
                group["capturable"] = True
        # torch warns of steps that are not captured, such as those of a smaller last batch
        optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
    return optimizer


def list_special(name: str, model: nn.Module, workload: Workload) -> list[nn.Parameter]:
    """Return the weights of a network that an optimizer of `SPECIAL` steps otherwise than AdamW,
    and those of any other all.

    Muon's are the matrices of hidden layers: torch's takes two dimensions, and its authors leave
    embeddings and the head to AdamW.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "muon":
        outer: list[nn.Module] = [
            m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        ]
        try:
            outer.append(workload.find_head(model))
        except UsageError:  # no layer has weights
            return []
        left = {id(weight) for module in outer for weight in module.parameters()}
        return [p for p in trained if p.dim() == 2 and id(p) not in left]
    if name in SPECIAL:
        block = OPTIMIZERS[name].block or 1
        return [p for p in trained if p.numel() >= LEAST_SPECIAL and p.numel() % block == 0]
    return trained


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Set the state of every weight to zero, as it was before the first step, and let the host's
    copies of weights, if any, be those of the network."""
    for state in optimizer.state.values():
        for name, value in [(name, find_local(value)) for name, value in state.items()]:
            if is_traceable_wrapper_subclass(value):
                # of what is rounded, the table of the codes' values stays
                for part in {*value.__tensor_flatten__()[0]} - {"qmap"}:
                    getattr(value, part).zero_()
            elif isinstance(value, Tensor):
                value.zero_()
            else:
                state[name] = type(value)()
    copy_to_host(optimizer)


@torch.no_grad()
def copy_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that steps copies of the weights on the host those of the network."""
    for weight, host in getattr(optimizer, "param_d2h_map", {}).items():
        host.copy_(weight)


def _build_sgd(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    kind = OPTIMIZERS["sgd"]
    # the kernel for a CPU leaves most half-precision weights as they are (pytorch issue 191763)
    loops = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in parameters)
    loops |= any(find_local(p) is not p for p in parameters)  # torch 2.13 has none for DTensors
    optimizer = torch.optim.SGD(
        parameters, lr, kind.momentum, weight_decay=kind.weight_decay, fused=not loops
    )
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _build_adam(name: str, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    make = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    optimizer = make(parameters, lr, **_read_adam(name), fused=True)
    for parameter in parameters:
        optimizer.state[parameter] = {
            # on the device, so that a fused step does not count if it is skipped
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _read_adam(name: str) -> dict[str, Any]:
    kind = OPTIMIZERS[name]
    first, second = kind.betas
    return {"betas": (first, second), "weight_decay": kind.weight_decay}


def _build_muon(
    parameters: Sequence[Tensor], matrices: Sequence[Tensor], lr: float
) -> torch.optim.Optimizer:
    kind, own = OPTIMIZERS["muon"], {id(matrix) for matrix in matrices}
    muon = torch.optim.Muon(
        matrices, lr, kind.weight_decay, kind.momentum, adjust_lr_fn="match_rms_adamw"
    )
    others = [p for p in parameters if id(p) not in own]
    parts: list[torch.optim.Optimizer] = [muon]
    if others:
        parts.append(torch.optim.AdamW(others, lr, **_read_adam("muon"), fused=True))
    return _InTurn(parts)


class _InTurn(torch.optim.Optimizer):
    """Optimizers of one group of weights each, which step in turn, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([part.param_groups[0] for part in parts], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state  # a checkpoint replaces both
            part.step()


def _build_low_bit(name: str, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    optim = import_torchao("optim", name)
    make = {
        "adamw-8bit": optim.AdamW8bit,
        "adamw-4bit": optim.AdamW4bit,
        "adamw-fp8": optim.AdamWFp8,
    }[name]
    made: torch.optim.Optimizer = make(
        parameters, lr, **_read_adam(name), block_size=OPTIMIZERS[name].block
    )
    return made


def _build_offloaded(parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    """Make torchao's optimizer, with the state and the hooks that every other of torch has."""
    optim = import_torchao("optim", OFFLOADED)

    class Offloaded(optim.CPUOffloadOptimizer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self._optimizer_step_pre_hooks = OrderedDict[int, Any]()
            self._optimizer_step_post_hooks = OrderedDict[int, Any]()
            self._patch_step_function()
            settings = _read_adam(OFFLOADED)
            super().__init__(
                parameters, torch.optim.AdamW, minimal_size=LEAST_SPECIAL, lr=lr, **settings
            )

        def _list_own(self) -> list[torch.optim.Optimizer]:
            return [*([self.d_opt] if self.d_opt else []), *self.optim_dict.values()]

        @property
        def state(self) -> dict[Tensor, Any]:
            return {weight: s for one in self._list_own() for weight, s in one.state.items()}

        @property
        def param_groups(self) -> list[dict[str, Any]]:
            # torchao's keep the groups that loading a state replaces
            return [group for one in self._list_own() for group in one.param_groups]

    made: torch.optim.Optimizer = Offloaded()
    return made


_BUILDERS: Mapping[str, Callable[[Sequence[Tensor], float], torch.optim.Optimizer]] = {
    "sgd": _build_sgd,
    "adafactor": lambda parameters, lr: torch.optim.Adafactor(
        parameters, lr, weight_decay=OPTIMIZERS["adafactor"].weight_decay
    ),
    **{name: partial(_build_adam, name) for name in ("adam", "adamw")},
    **{name: partial(_build_low_bit, name) for name, kind in OPTIMIZERS.items() if kind.block},
}


# ----------------------------------------------------------------------------------------- schedule


_Build = Callable[[torch.optim.Optimizer, int, float], LRScheduler]

_SCHEDULES: Mapping[str, _Build] = {
    "constant": lambda sgd, steps, lr: lr_scheduler.ConstantLR(sgd, 1.0, steps),
    "linear": lambda sgd, steps, lr: lr_scheduler.LinearLR(sgd, 1.0, 0.0, steps),
    "cosine": lambda sgd, steps, lr: lr_scheduler.CosineAnnealingLR(sgd, steps),
    "polynomial": lambda sgd, steps, lr: lr_scheduler.PolynomialLR(sgd, steps, power=2),
    "onecycle": lambda sgd, steps, lr: lr_scheduler.OneCycleLR(
        sgd, lr, total_steps=steps, cycle_momentum=False
    ),
}


def learning_rates(case: Case, steps: int) -> list[float]:
    """Return the learning rate of each of the ``steps`` steps of all epochs of ``case``.

    With the base ``b = scale_lr(...)``, W warm-up steps and S = steps - W steps after them:

    - Warm-up step i = 0 ... W - 1 has ``b (i + 1) / (W + 1)``: the first is not 0, and all are
      below b.
    - Step j = 0 ... S - 1 after it has b (constant), ``b (1 - j / S)`` (linear),
      ``b (1 + cos(pi j / S)) / 2`` (cosine) or ``b (1 - j / S)^2`` (polynomial): the first is
      exactly b, and the last is not 0, which would follow at j = S.
    - onecycle has no other warm-up. It rises along half a cosine from ``b / 25`` to b at position
      ``0.3 S - 1``, which is a step only if 0.3 S is whole, and falls along another to
      ``b / 250,000`` at the last step: torch's defaults, from Smith and Topin, arXiv 1708.07120.
      With three steps or fewer none is in the rise, and a single step has the last value.

    Raises UsageError: the warm-up is longer than all steps.
    """
    lr = scale_lr(case.lr, case.lr_scaling, whole_batch(case), case.base_batch)
    rising = count_warmup_steps(case.lr_warmup, steps)
    weight = torch.zeros(1, requires_grad=True)

    def run(build: _Build, count: int) -> list[float]:
        if not count:
            return []
        sgd = torch.optim.SGD([weight], lr)
        scheduler = build(sgd, count, lr)
        rates = []
        for _ in range(count):
            rates.append(float(sgd.param_groups[0]["lr"]))
            sgd.step()  # it changes nothing: the weight has no gradient
            scheduler.step()
        return rates

    return [
        *run(lambda sgd, n, lr: lr_scheduler.LinearLR(sgd, 1 / (n + 1), 1.0, n), rising),
        *run(_SCHEDULES[case.schedule], steps - rising),
    ]
