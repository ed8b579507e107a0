"""Trial of a user's network or workload on the CPU before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from bench.data.batches import count_items
from bench.data.loader import load_items
from bench.data.sources import SHAPE
from bench.errors import UsageError
from bench.failure import find_place
from bench.models.freezing import NONE, freeze, normalises_batches
from bench.models.weights import fit_weights
from bench.precision import PRECISIONS
from bench.text import name_first
from bench.training.building import materialise
from bench.training.loop import Training
from bench.workloads import Loss, Workload, WorkloadFacts, count_classes, split_heads

_TRIED = 2
"""Items in a trial batch: BatchNorm needs two."""

_CPU = torch.device("cpu")

_OTHERS = "train it by a --workload, which has data and a loss of its own"


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """Run ``action``, which runs the user's code. Raises UsageError: the action raised any error;
    the message is one line that begins with ``what``."""
    try:
        return action()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:300]
        said = ": ".join(filter(None, [what, type(error).__name__, message]))
        raise UsageError(f"{said}{find_place(error)}") from error


# ----------------------------------------------------------------------------------------- networks


def check_network(name: str, model: object) -> nn.Module:
    """Check the result of a user's model factory. Raises UsageError: it cannot be trained."""
    if isinstance(model, Workload):
        raise UsageError(f"model {name!r} returned a workload; give it as --workload {name}")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(model).__name__}; a factory returns a torch.nn.Module"
        )
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UsageError(f"model {name!r} has no weight to train: none requires a gradient")
    for weight, tensor in model.named_parameters():
        if tensor.is_meta or tensor.dtype.is_complex:
            kind = "meta, without numbers" if tensor.is_meta else _name_dtype(tensor)
            said = f"model {name!r}: its weight {weight} is {kind}"
            raise UsageError(f"{said}; build it of real numbers on the CPU")
    return model


def _name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def try_images(name: str, model: nn.Module, workload: Workload) -> int:
    """Run a forward pass in training mode on two images, float32 (2, *shape), on the network's own
    device, then train a step in fp32 as a case does; return the number of classes. Raises
    UsageError: the network does not support such images, or as `try_step`."""
    shape, device, what = workload.shape, next(model.parameters()).device, f"model {name!r}"
    images = torch.zeros(_TRIED, *shape, device=device)
    built = _list_state(model)
    model.train()
    given = "" if shape == SHAPE else f", those of --input {'x'.join(map(str, shape))}"
    tried = f"model {name!r} fails on {tuple(images.shape)} images{given}"
    try:
        outputs = attempt(tried, lambda: model(images))
    except UsageError as error:
        mend = f"give images that it takes by --input, or {_OTHERS}"
        other = [
            f"{weight} is {_name_dtype(tensor)}"
            for weight, tensor in model.named_parameters()
            if tensor.is_floating_point() and tensor.dtype != torch.float32
        ]
        if other:
            mend = (
                f"its weight {other[0]}, and images are float32: build it in float32, and give the "
                "number format by --precision"
            )
        raise UsageError(f"{error}; {mend}") from error
    logits, _ = split_heads(outputs)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"model {name!r} returns {type(outputs).__name__}; forward returns a tensor of logits, "
            f"(N, classes), alone, as .logits or first of several, or {_OTHERS}"
        )
    if logits.ndim != 2 or len(logits) != _TRIED:
        raise UsageError(
            f"model {name!r} gives {tuple(logits.shape)} for {_TRIED} images; forward returns "
            f"logits of shape ({_TRIED}, classes), or {_OTHERS}"
        )
    _refuse_changes(what, built, model)
    workload.classes = logits.shape[1]
    make = partial(Training, model, PRECISIONS["fp32"], device, lr=1e-3, workload=workload)
    training = attempt(f"{what}: a training in fp32 fails", make)
    labels = torch.zeros(_TRIED, dtype=torch.int64, device=device)
    try_step(what, training, (images, labels), "fp32")
    return workload.classes


def try_step(what: str, training: Training, batch: Any, where: str) -> None:
    """Train a step on ``batch``, and reset. Raises UsageError: the step fails, or changes what a
    reset cannot bring back; the message begins with ``what``."""
    before = _list_state(training.model)
    attempt(f"{what}: a training step in {where} fails", partial(training.step, batch))
    _refuse_changes(what, before, training.model)
    attempt(f"{what}: the state that it was built with cannot be loaded again", training.reset)


def _refuse_changes(what: str, before: Mapping[str, _Kept], model: nn.Module) -> None:
    after, none = _list_state(model), _Kept("(nothing)")
    told = []
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name, none), after.get(name, none)
        if was != now:
            told.append(f"{name} {was.kind} into {'another' if was.kind == now.kind else now.kind}")
    if told:
        raise UsageError(
            f"{what}: training turns {name_first(told, 3)}, so no epoch could start from the same "
            "state again; make all weights and buffers where the network is built (torch's lazy "
            "layers may get their shapes later), and a cache with persistent=False"
        )


@dataclass(frozen=True)
class _Kept:
    """What a network keeps under a name; ``identity`` is that of the tensor that is trained."""

    kind: str
    identity: int = 0


def _list_state(model: nn.Module) -> dict[str, _Kept]:
    trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: _Kept(
            f"({_name_kinds([t])}{', trained' if name in trained else ''})", trained.get(name, 0)
        )
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor)
    }


def materialise_first(what: str, model: nn.Module, workload: Workload) -> None:
    """Give lazy layers their weights. Raises UsageError: the pass through the network fails."""
    passed = f"{what}: a first pass, which gives its lazy layers their shapes, fails"
    attempt(passed, partial(materialise, model, workload))


def check_tuning(
    what: str, model: nn.Module, workload: Workload, freezes: Sequence[str], starts: Sequence[str]
) -> tuple[str, ...]:
    """Check that a network can start from files and be frozen, without changing it; return those of
    ``freezes`` that leave no BatchNorm that normalises by the batch. Raises UsageError: it cannot;
    the message begins with ``what``."""
    still = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for path in starts:
            attempt(f"--start {path}", partial(fit_weights, model, path, workload.find_head))
        for setting in freezes:
            frozen = partial(freeze, model, setting, workload.find_head)
            if not normalises_batches(model, attempt(f"--freeze {setting}", frozen)):
                still.append(setting)
            for parameter in trained:
                parameter.requires_grad_()
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    return tuple(still)


# ---------------------------------------------------------------------------------------- workloads


class Trial:
    """Trial of a user's workload on two items. Each method raises UsageError: the workload violates
    the protocol of `Workload`; the message says how in one line."""

    def __init__(self, name: str, workload: Workload) -> None:
        self.name, self.workload = name, workload

    def _refuse(self, what: str) -> UsageError:
        return UsageError(f"workload {self.name!r}: {what}")

    def _attempt(self, method: str, action: Callable[[], Any]) -> Any:
        return attempt(f"workload {self.name!r}: {method} fails", action)

    def build_network(self) -> nn.Module:
        model = self._attempt("build_model", self.workload.build_model)
        if not isinstance(model, nn.Module):
            raise self._refuse(
                f"build_model returned {type(model).__name__}; it must return a torch.nn.Module"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise self._refuse("its network has no parameters that require gradients")
        materialise_first(f"workload {self.name!r}", model, self.workload)
        return model

    def check_head(self, model: nn.Module) -> None:
        head = self._attempt("find_head", partial(self.workload.find_head, model))
        if not any(module is head for module in model.modules()):
            raise self._refuse(
                f"find_head returned {type(head).__name__} that is no layer of the network; it "
                "must return one of the modules of the network that it is given"
            )

    def run(self, model: nn.Module, freezes: Sequence[str] = ()) -> WorkloadFacts:
        """Compute the loss of a batch of two and its gradients, on the CPU, and check all results.
        Then train a step on the batch in fp32, in bf16, and with each of ``freezes``."""
        workload = self.workload
        units = self._check_numbers()
        batch, again = (self._attempt("make_batch", self._make_batch) for _ in range(2))
        tensors = self._check_batch("make_batch", batch)
        self._check_batch("make_batch", again)
        if _list_bits(batch) != _list_bits(again):
            raise self._refuse(
                "make_batch made two different batches from one seed; draw random numbers only "
                "from the generator that it is given"
            )
        if workload.test_samples >= 2:
            tested = self._attempt("make_test_batch", lambda: workload.make_test_batch(0, 2, _CPU))
            self._check_batch("make_test_batch", tested)
        model.train()
        calls = 0

        def network(*inputs: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            return model(*inputs, **named)

        made = self._attempt("compute_loss", lambda: workload.compute_loss(network, batch))
        if not calls:
            raise self._refuse(
                "compute_loss does not call the network that it is given; call it, and no other, "
                "since only that one computes in the case's precision"
            )
        loss = self._check_loss(made, units)
        self._attempt("the backward pass", loss.backward)
        if all(p.grad is None for p in model.parameters()):
            raise self._refuse("no weight of the network receives a gradient")
        optimizer = self._try_optimizer([p for p in model.parameters() if p.requires_grad])
        dataset = self._attempt("build_dataset", workload.build_dataset)
        if dataset is not None:
            items = self._try_dataset(dataset, tensors)
            what = "compute_loss of items of build_dataset"
            self._attempt(what, lambda: workload.compute_loss(network, items))
        self._try_steps(batch, freezes)
        return WorkloadFacts(
            workload.samples,
            workload.count_units(workload.samples),
            workload.count_units(workload.test_samples) if workload.test_samples else 0,
            workload.unit.strip(),
            optimizer,
            dataset is not None,
            count_classes(workload),
        )

    def _check_numbers(self) -> int:
        """Check the workload's numbers; return the number of units of two items."""
        workload = self.workload
        if not (isinstance(workload.unit, str) and workload.unit.strip()):
            raise self._refuse("its unit is empty; name what is counted, such as 'tokens'")

        def require(what: str, number: Any, least: int) -> None:
            if type(number) is not int or number < least:
                right = f"it must be a whole number of at least {least}"
                raise self._refuse(f"{what} is {number!r}; {right}")

        require("samples", workload.samples, 2)
        require("test_samples", workload.test_samples, 0)
        units = self._attempt("count_units", lambda: workload.count_units(2))
        require("count_units(2)", units, 1)
        return int(units)

    def _make_batch(self) -> Any:
        return self.workload.make_batch(2, _CPU, torch.Generator().manual_seed(0))

    def _check_batch(self, method: str, batch: Any) -> list[Tensor]:
        tensors = _list_tensors(batch)
        try:
            items = count_items(batch)
        except ValueError as error:
            raise self._refuse(f"{method} returned no batch: {error}") from error
        if items != 2:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise self._refuse(
                f"{method} made {items} items where 2 were asked for; its tensors have the shapes "
                f"{shapes}"
            )
        for tensor in tensors:
            if (place := tensor.device) != _CPU:
                raise self._refuse(f"{method} made a tensor on {place} where cpu was asked for")
            if tensor.requires_grad:
                raise self._refuse(f"{method} made a tensor that requires a gradient; detach it")
        return tensors

    def _check_loss(self, made: Any, units: int) -> Tensor:
        loss, correct = (made.loss, made.correct) if isinstance(made, Loss) else (made, None)
        if not isinstance(loss, Tensor):
            raise self._refuse(
                f"compute_loss returned {type(loss).__name__}; it must return a tensor or a Loss"
            )
        if loss.shape != () or loss.dtype != torch.float32:
            raise self._refuse(
                f"compute_loss returned {loss.dtype} of shape {tuple(loss.shape)}; the loss must "
                "be float32 of shape (), the mean over the batch"
            )
        if not loss.isfinite():
            raise self._refuse(f"compute_loss returned {float(loss.detach())} for the first batch")
        whole = isinstance(correct, Tensor) and not (correct.shape or correct.is_floating_point())
        if correct is not None and not (whole and 0 <= int(correct) <= units):
            shown = correct.tolist() if isinstance(correct, Tensor) else correct
            raise self._refuse(
                f"correct is {shown!r}; it must be an integer tensor of shape (), from 0 to what "
                f"count_units says, {units} for two items"
            )
        if not loss.requires_grad:
            raise self._refuse(
                "the loss does not depend on the network's weights; do not detach it, or compute "
                "it under torch.no_grad"
            )
        return loss

    def _try_optimizer(self, parameters: list[Tensor]) -> str:
        make = partial(self.workload.build_optimizer, parameters, 1e-3)
        made = self._attempt("build_optimizer", make)
        if made is None:
            return ""
        if not isinstance(made, torch.optim.Optimizer):
            raise self._refuse(
                f"build_optimizer returned {type(made).__name__}; it must return a "
                "torch.optim.Optimizer, or None"
            )
        stepped = {id(p) for group in made.param_groups for p in group["params"]}
        if not stepped <= {id(p) for p in parameters}:
            raise self._refuse(
                "build_optimizer made an optimizer of other tensors; give it only the parameters "
                "that build_optimizer is given"
            )
        return type(made).__name__

    def _try_dataset(self, dataset: Any, like: list[Tensor]) -> Any:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise self._refuse(
                f"build_dataset returned {type(dataset).__name__}; it returns a map-style dataset, "
                "with __getitem__ and __len__"
            )
        samples = self.workload.samples
        if (items := self._attempt("build_dataset: len()", lambda: len(dataset))) != samples:
            raise self._refuse(
                f"build_dataset has {items} items, and samples is {samples}; an epoch is as many "
                "with either --loader, so make them equal"
            )
        loaded = load_items(dataset, batch_size=2, micro_batch=2, device=_CPU, seed=0)
        made = self._attempt("a batch of build_dataset", lambda: next(loaded.evaluation()))
        if (got := _name_kinds(_list_tensors(made))) != (wanted := _name_kinds(like)):
            raise self._refuse(
                f"torch's default_collate of items of build_dataset gives {got}; make_batch gives "
                f"{wanted}"
            )
        return made

    def _try_steps(self, batch: Any, freezes: Sequence[str]) -> None:
        """Train one step as a case does: with weights in fp32, with cast weights, and with each
        freeze, which may leave an optimizer or a loss without the weights it needs."""
        tried = [("fp32", NONE), ("bf16", NONE), *(("fp32", frozen) for frozen in freezes)]
        for precision, frozen in tried:
            where = f"{precision} with --freeze {frozen}" if frozen != NONE else precision
            about: dict[str, Any] = {"lr": 1e-3, "frozen": frozen, "workload": self.workload}
            make = partial(Training, self.build_network(), PRECISIONS[precision], _CPU, **about)
            training = self._attempt(f"a training in {where}", make)
            try_step(f"workload {self.name!r}", training, batch, where)


def _list_tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _list_bits(batch: Any) -> list[object]:
    """Return all that a batch holds, in a form that is equal for equal bits only, as NaN and -0.0
    are not for torch; of objects that may have any form, their kind."""
    found: list[object] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            found.append(read_bits(leaf))
        elif is_dataclass(leaf):
            found.append(_list_bits([getattr(leaf, field.name) for field in fields(leaf)]))
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            found.append((leaf.dtype, leaf.shape, leaf.tobytes()))
        else:
            plain = isinstance(leaf, str | bytes | int | float | complex | None)
            found.append(repr(leaf) if plain else type(leaf))
    return found


def read_bits(tensor: Tensor) -> bytes:
    """Return the exact content of a tensor of any dtype and layout, as torch saves it."""
    torch.save(tensor.detach().clone(), file := BytesIO())
    return file.getvalue()


def _name_kinds(tensors: list[Tensor]) -> str:
    kinds = (f"{_name_dtype(t)} {tuple(t.shape)}" for t in tensors)
    return ", ".join(kinds)
