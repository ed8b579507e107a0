"""Trial of a user's network or workload on the CPU before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.base.errors import UsageError
from bench.base.text import name_first
from bench.networks.data.batches import count_items
from bench.networks.data.loader import load_items
from bench.networks.freezing import NONE, freeze, normalises_batches
from bench.networks.weights import fit_weights
from bench.networks.workloads import Loss, Workload, WorkloadFacts, count_classes, find_logits
from bench.schema.axis import read_budget
from bench.schema.case import Case
from bench.schema.failure import find_place
from bench.schema.precision import PRECISIONS, Arithmetic
from bench.training.building import seed_all
from bench.training.loop import Training
from bench.training.parallel import refuse_inputs, refuse_outputs
from bench.training.recompute import Recompute

_TRIED = 2
"""Items in a trial batch: BatchNorm needs two."""

_ALIKE = 1e-3
"""The most by which gradients of one step that are computed twice differ, as a share of their norm:
by nothing on a CPU, but where an operation sums in no fixed order."""

_T = TypeVar("_T")

_CPU = torch.device("cpu")


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """Run ``action``, which runs the user's code. Raises UsageError: the action raised any error;
    the message is one line that begins with ``what``."""
    try:
        return action()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        message = " ".join(str(error).split())[:300]
        reason = ": ".join(filter(None, [what, type(error).__name__, message]))
        raise UsageError(f"{reason}{find_place(error)}") from error


def _make_batch(workload: Workload) -> Any:
    return workload.make_batch(_TRIED, _CPU, torch.Generator().manual_seed(0))


def check_network(what: str, model: object) -> nn.Module:
    """Check the result of a user's model factory. Raises UsageError: it cannot be trained."""
    if isinstance(model, Workload):
        raise UsageError(f"{what} returned a workload; give it as --workload")
    if not isinstance(model, nn.Module):
        raise UsageError(f"{what} returned {type(model).__name__}, and not a torch.nn.Module")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UsageError(f"{what} has no weight to train: none requires a gradient")
    return model


def list_tried(precisions: Iterable[str]) -> dict[str, list[str]]:
    """Return those of ``precisions`` that a CPU can try, each with those that it tells of too. Not
    float16, which a CPU may take minutes for, nor what needs other packages: if there are no
    others, float32, in which the network is built.

    >>> list_tried(["tf32", "bf16", "fp16", "fp32"])
    {'tf32': ['tf32', 'fp32'], 'bf16': ['bf16']}
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for name in precisions:
        kind = PRECISIONS[name]
        if not (kind.apex or kind.float8 or kind.arithmetic is Arithmetic.FLOAT16):
            found.setdefault((kind.weights, kind.autocast, kind.pure), []).append(name)
    return {alike[0]: alike for alike in found.values()} or {"fp32": []}


def try_precisions(
    what: str,
    workload: Workload,
    model: nn.Module,
    precisions: Iterable[str],
    build: Callable[[], nn.Module],
    whole: Callable[[nn.Module, str], _T],
) -> tuple[_T, dict[str, str]]:
    """Run the ``whole`` trial, `try_images` or `try_workload`, in the first of ``precisions`` in
    which it passes, and train a step in each other that a CPU can try. Return what the trial found,
    and why others fail. ``model`` is cast by none of them: those that cast get a network of their
    own by ``build``. Raises UsageError: it fails in all."""
    passed, failing = list[_T](), dict[str, str]()
    tried = list_tried(precisions)
    for precision in sorted(tried, key=lambda name: PRECISIONS[name].casts):
        try:
            first = not (passed or failing or PRECISIONS[precision].casts)
            network = model if first else attempt(f"{what} cannot be built again", build)
            if passed:
                try_step(what, network, workload, _make_batch(workload), precision)
            else:
                passed.append(whole(network, precision))
        except UsageError as error:
            failing |= dict.fromkeys(tried[precision], str(error))
    if not passed:
        raise UsageError(next(iter(failing.values())))
    return passed[0], failing


def try_images(what: str, workload: Workload, model: nn.Module, precision: str = "fp32") -> int:
    """Run a forward pass in training mode on two images, float32 (2, *shape), then train a step, as
    a case of ``precision`` does; return the number of classes. Raises UsageError: the network does
    not support such images, or as `try_step`."""
    images = torch.zeros(_TRIED, *workload.shape)
    training = attempt(
        f"{what}: a training in {precision} fails", partial(_start, model, workload, precision)
    )
    built = _list_state(training.model)
    tried = f"{what} fails on {tuple(images.shape)} images in {precision}"
    fix = "give others by --input, or data and a loss of its own by a --workload"
    logits = find_logits(attempt(f"{tried} ({fix})", partial(training.compute, images)))
    if not (isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == _TRIED):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(
            f"{what} gives {got} for {_TRIED} images; forward returns logits of shape "
            f"({_TRIED}, classes), or train it by a --workload, which has a loss of its own"
        )
    _refuse_changes(what, built, training.model)
    workload.classes = logits.shape[1]
    labels = torch.zeros(_TRIED, dtype=torch.int64)
    try_step(what, model, workload, (images, labels), precision)
    return workload.classes


def _start(
    model: nn.Module, workload: Workload, precision: str, frozen: str = NONE, again: str = "none"
) -> Training:
    case = Case(precision=precision, freeze=frozen, recompute=again, lr=1e-3, device="cpu")
    return Training(case, model, _CPU, workload)


def try_recompute(
    what: str,
    build: Callable[[], nn.Module],
    workload: Workload,
    precision: str,
    recompute: str,
) -> None:
    """Compute gradients with what ``recompute`` says computed again, and without. Raises
    UsageError: it fails, such as where a layer overwrites the input of what is computed again; the
    backward pass changes a buffer a second time, as that of spectral normalisation; the gradients
    are others, as with random numbers of Python's, which torch's checkpoint draws anew; or the
    network draws random numbers, of which torch.compile would draw others for a budget: in torch
    2.13 on a CPU, that made gradients of three layers with dropout wrong by 46 %."""
    network = attempt(f"{what} cannot be built again", build)
    training = _start(network, workload, precision)
    batch = _make_batch(workload)

    def differentiate() -> tuple[Tensor, dict[str, Tensor]]:
        training.reset()
        seed_all(0)
        training.backward(training.compute_loss(batch).loss)
        found = (p.grad.flatten().double() for p in training.parameters if p.grad is not None)
        buffers = {name: one.clone() for name, one in network.named_buffers()}
        return torch.cat([*found]), buffers

    failed = f"{what}: a training step with --recompute {recompute} fails"
    if read_budget(recompute) is not None:  # without torch.compile nothing is computed again
        seed_all(0)
        drawn = torch.get_rng_state()
        attempt(failed, partial(training.compute_loss, batch))
        if not torch.equal(drawn, torch.get_rng_state()):
            raise UsageError(
                f"{what}: --recompute {recompute} with a network that draws random numbers, as "
                "dropout does, gives wrong gradients in torch.compile; give --recompute blocks"
            )
        return
    right, buffers = attempt(f"{what}: a training step fails", differentiate)
    Recompute(recompute, workload.blocks).apply(network)
    gradients, now = attempt(failed, differentiate)
    if changed := [name for name, one in buffers.items() if not torch.equal(one, now[name])]:
        raise UsageError(
            f"{what}: --recompute {recompute} would change {name_first(changed, 3)} a second time "
            "in the backward pass, and so train otherwise; give --recompute none"
        )
    if float((gradients - right).norm()) > _ALIKE * float(right.norm()):
        raise UsageError(
            f"{what}: --recompute {recompute} gives other gradients, as where a block draws random "
            "numbers by Python or NumPy; draw them by torch, or give --recompute none"
        )


def try_division(
    what: str, build: Callable[[], nn.Module], workload: Workload, precision: str
) -> None:
    """Train a step of which torch's DataParallel could divide the batch. Raises UsageError: it
    could not."""
    network = attempt(f"{what} cannot be built again", build)
    training = _start(network, workload, precision)
    forward = training.forward

    def look(*inputs: Any, **named: Any) -> Any:
        refuse_inputs((inputs, named))
        outputs = forward(*inputs, **named)
        refuse_outputs(outputs)
        return outputs

    training.forward = look
    attempt(f"{what}: a training step fails", partial(training.step, _make_batch(workload)))


def try_step(
    what: str,
    model: nn.Module,
    workload: Workload,
    batch: Any,
    precision: str,
    frozen: str = NONE,
) -> None:
    """Train a step on ``batch``, and reset. Raises UsageError: the step fails, or changes what a
    reset cannot bring back; the message begins with ``what``."""
    where = f"{precision} with --freeze {frozen}" if frozen != NONE else precision
    make = partial(_start, model, workload, precision, frozen)
    training = attempt(f"{what}: a training in {where} fails", make)
    before = _list_state(training.model)
    attempt(f"{what}: a training step in {where} fails", partial(training.step, batch))
    _refuse_changes(what, before, training.model)
    attempt(f"{what}: the state that it was built with cannot be loaded again", training.reset)


_State = dict[str, tuple[torch.Size, torch.dtype, int | None]]


def _list_state(model: nn.Module) -> _State:
    """Return the kind of each tensor that a network keeps, and the identity of those trained."""
    trained = {name: id(p) for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: (t.shape, t.dtype, trained.get(name))
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor)
    }


def _refuse_changes(what: str, before: _State, model: nn.Module) -> None:
    after = _list_state(model)
    if changed := [n for n in {**before, **after} if before.get(n) != after.get(n)]:
        raise UsageError(
            f"{what}: training makes another tensor of {name_first(changed, 3)}, so no epoch could "
            "start from the same state again; make all weights and buffers where the network is "
            "built, and a cache with persistent=False"
        )


def check_tuning(
    what: str,
    model: nn.Module,
    workload: Workload,
    freezes: Sequence[str],
    starts: Sequence[str],
    recomputes: Sequence[str],
) -> tuple[str, ...]:
    """Check that a network can start from files, be frozen and has what the backward pass is to
    compute again, without changing it; return those of
    ``freezes`` that leave no BatchNorm that normalises by the batch. Raises UsageError: it cannot;
    the message begins with ``what``."""
    still = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for path in starts:
            attempt(f"--start {path}", partial(fit_weights, model, path, workload.find_head))
        for recompute in recomputes:
            Recompute(recompute, workload.blocks).find(model)
        for setting in freezes:
            frozen = partial(freeze, model, setting, workload.find_head)
            if not normalises_batches(model, attempt(f"--freeze {setting}", frozen)):
                still.append(setting)
            for parameter in trained:
                parameter.requires_grad_()
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    return tuple(still)


def try_workload(
    what: str,
    workload: Workload,
    freezes: Sequence[str],
    model: nn.Module,
    precision: str = "fp32",
) -> WorkloadFacts:
    """Compute the loss of a batch of two and its gradients, on the CPU in ``precision``, and check
    all results. Then train a step on the batch, also with each of ``freezes``, with new networks.
    Raises UsageError: the workload violates the protocol of `Workload`, or the step fails; the
    message begins with ``what`` and says how in one line."""
    trial = _Trial(what, workload)
    units = trial.count()
    batch = trial.make_batches()
    optimizer = trial.build_optimizer(model)
    trial.compute_loss(model, precision, batch, units)
    dataset = trial.open_dataset(batch)
    for frozen in (NONE, *freezes):
        try_step(what, workload.build_model(), workload, batch, precision, frozen)
    return list_facts(workload, type(optimizer).__name__ if optimizer else "", dataset)


def list_facts(workload: Workload, optimizer: str = "", dataset: bool = False) -> WorkloadFacts:
    """Return the facts of a workload, some of which a trial finds."""
    return WorkloadFacts(
        workload.samples,
        workload.count_units(workload.samples),
        workload.count_units(workload.test_samples) if workload.test_samples else 0,
        workload.unit.strip(),
        optimizer,
        dataset,
        count_classes(workload),
    )


def check_length(what: str, workload: Workload, usual: int) -> None:
    """Check that a workload makes batches of the length that it was given, not of its ``usual``
    one. Raises UsageError: both have the same shapes."""

    def make(length: int) -> list[torch.Size]:
        workload.length = length
        return [tensor.shape for tensor in _list_tensors(_make_batch(workload))]

    given = workload.length
    if given == usual:
        return
    made = f"{what}: make_batch fails with --length {given}"
    if attempt(made, partial(make, usual)) == attempt(made, partial(make, given)):
        raise UsageError(
            f"{what} makes batches of the same shapes with --length {given} as without; make "
            "network and batches by its attribute length, or leave out --length"
        )


@dataclass(frozen=True)
class _Trial:
    """The methods of a workload, each called and held to what `Workload` says of it."""

    what: str
    workload: Workload

    def require(self, right: bool, fault: str) -> None:
        if not right:
            raise UsageError(f"{self.what}: {fault}")

    def run(self, method: str, action: Callable[[], Any]) -> Any:
        return attempt(f"{self.what}: {method} fails", action)

    def count(self) -> int:
        """Return the units of two items."""
        workload = self.workload
        units: int = self.run("count_units", lambda: workload.count_units(_TRIED))
        for name, number, least in (
            ("samples", workload.samples, 2),
            ("test_samples", workload.test_samples, 0),
            ("count_units(2)", units, 1),
        ):
            right = type(number) is int and number >= least
            fault = f"{name} is {number!r}; it must be a whole number of at least {least}"
            self.require(right, fault)
        return units

    def make_batches(self) -> Any:
        """Return a training batch of two items, which one seed makes twice; of test items too, one
        can be made."""
        workload, make_batch = self.workload, partial(_make_batch, self.workload)
        batch = self._make("make_batch", make_batch)
        again = self._make("make_batch", make_batch)
        self.require(
            list(map(read_bits, _list_tensors(batch)))
            == list(map(read_bits, _list_tensors(again))),
            "make_batch made two different batches from one seed; draw random numbers only from "
            "the generator that it is given",
        )
        if workload.length and type(workload).count_units is Workload.count_units:
            seeds = map(torch.Generator().manual_seed, range(8))
            made = [workload.make_batch(_TRIED, _CPU, seed) for seed in seeds]
            self.require(
                len({tuple(t.shape for t in _list_tensors(one)) for one in made}) == 1,
                f"make_batch makes items of several lengths, and length says {workload.length} "
                f"{workload.unit}; give it a method count_units(size), which returns how many "
                "are in so many items on average, padding left out, or make all of one length",
            )
        if workload.test_samples >= _TRIED:
            self._make("make_test_batch", partial(workload.make_test_batch, 0, _TRIED, _CPU))
        return batch

    def _make(self, method: str, action: Callable[[], Any]) -> Any:
        batch = self.run(method, action)
        tensors = _list_tensors(batch)
        items = self.run(method, partial(count_items, batch))
        self.require(
            items == _TRIED and all(t.device == _CPU and not t.requires_grad for t in tensors),
            f"{method} made {_name_kinds(tensors)}; it makes as many items as it is asked for, "
            f"{_TRIED}, on the device that it is given, without gradients",
        )
        return batch

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        build = partial(self.workload.build_optimizer, trained, 1e-3)
        optimizer: torch.optim.Optimizer | None = self.run("build_optimizer", build)
        stepped = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
        self.require(
            optimizer is None
            or (isinstance(optimizer, torch.optim.Optimizer) and {*stepped} <= {*trained}),
            f"build_optimizer returned {type(optimizer).__name__}; it returns None or a "
            "torch.optim.Optimizer of the parameters that it is given, and no others",
        )
        return optimizer

    def compute_loss(self, model: nn.Module, precision: str, batch: Any, units: int) -> None:
        """Compute the loss of a batch of so many ``units``, and its gradients."""
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        start = partial(_start, model, self.workload, precision)
        training: Training = self.run(f"a training in {precision}", start)
        calls: list[object] = []

        def network(*inputs: Any, **named: Any) -> Any:
            calls.append(None)
            return training.compute(*inputs, **named)

        method = f"compute_loss in {precision}"
        made = self.run(method, lambda: self.workload.compute_loss(network, batch))
        self.require(
            bool(calls),
            "compute_loss does not call the network that it is given; call it, and no other, since "
            "only that one computes in the case's precision",
        )
        loss, correct = (made.loss, made.correct) if isinstance(made, Loss) else (made, None)
        self.require(
            isinstance(loss, Tensor) and (loss.shape, loss.dtype) == ((), torch.float32),
            f"compute_loss returned {_name_kinds([loss])}; the loss must be a tensor, float32 of "
            "shape (), the mean over the batch, or a Loss of it",
        )
        self.require(
            bool(loss.isfinite()) and loss.requires_grad,
            f"the loss of the first batch is {loss}; it must be finite, and depend on the "
            "network's weights: do not detach it, or compute it under torch.no_grad",
        )
        counts = isinstance(correct, Tensor) and not (correct.shape or correct.is_floating_point())
        self.require(
            correct is None or (counts and 0 <= int(correct) <= units),
            f"correct is {correct!r}; it must be an integer tensor of shape (), from 0 to what "
            f"count_units says, {units} for two items",
        )
        self.run(f"the backward pass in {precision}", loss.backward)
        graded = any(p.grad is not None for p in trained)
        self.require(graded, "no weight of the network receives a gradient")

    def open_dataset(self, batch: Any) -> bool:
        """Return whether there is a dataset, whose items are collated to batches like this one."""
        samples = self.workload.samples
        dataset = self.run("build_dataset", self.workload.build_dataset)
        if dataset is None:
            return False
        there = self.run("build_dataset: len()", partial(len, dataset))
        self.require(
            there == samples and hasattr(dataset, "__getitem__"),
            f"build_dataset returned a {type(dataset).__name__} of {there} items; it returns a "
            f"map-style dataset of as many as samples, {samples}",
        )
        loaded = load_items(dataset, batch_size=_TRIED, micro_batch=_TRIED, device=_CPU, seed=0)
        items = self.run("a batch of build_dataset", lambda: next(loaded.evaluation()))
        got, wanted = _name_kinds(tree_leaves(items)), _name_kinds(_list_tensors(batch))
        self.require(
            got == wanted,
            f"torch's default_collate of items of build_dataset gives {got}; make_batch gives "
            f"{wanted}",
        )
        return True


def _list_tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def read_bits(tensor: Tensor) -> bytes:
    """Return the exact content of a tensor of any dtype and layout, as torch saves it."""
    torch.save(tensor.detach().clone(), file := BytesIO())
    return file.getvalue()


def _name_kinds(values: Sequence[object]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__
        for value in values
    )
