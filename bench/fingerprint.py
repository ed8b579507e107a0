"""Three hashes that identify a model, and a check that it can be trained.

This is done once for a sweep, in a separate process (`bench.environment`). Each model is examined
in a fork of it, so that the imports of one are not counted as another's, and a model that ends its
process does not end the others. The sweep itself imports neither torch nor the user's code.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bench.data.loader import Loading, load_items
from bench.data.sources import CLASSES, SHAPE
from bench.data.synthetic import parse_shape
from bench.errors import UsageError
from bench.models import MODELS, build_model, is_timm, load_factory, split_model
from bench.models.freezing import NONE, freeze, normalises_batches
from bench.models.weights import fit_weights
from bench.precision import PRECISIONS
from bench.record import WorkRow
from bench.workloads import IMAGES, Loss, Workload, check_workload, count_items

if TYPE_CHECKING:
    import torch
    from torch import nn

    from bench.case import Case
    from bench.data.sources import Shape

_SKETCH_S = 10.0  # that a user's code may take on the meta device; DPN-92 takes 0.4

_TRIED = 2
"""Images that a user's model is tried on."""


@dataclass(frozen=True)
class Fingerprint:
    """What a model is: each the first 12 hex digits of a SHA-256.

    ``parameters`` is over name, shape and dtype of every parameter and buffer, ``structure`` over
    the printed module without memory addresses, ``source`` over the files that build it.
    ``outputs`` is the number of classes it tells apart; None for a built-in network, which is not
    run, and for a workload, whose network need not. ``products`` is the number of its layers that
    fp8 can convert, ``batchnorm`` whether it has BatchNorm, and ``still`` are those of the freezes
    asked for that leave none which normalises by the batch. ``work`` is what an item computes and
    moves in float32, as `bench.training.counting.sketch_work` has it; empty where that fails.
    """

    parameters: str
    structure: str
    source: str
    outputs: int | None = None
    workload: WorkloadFacts | None = None
    products: int = 0
    batchnorm: bool = True
    still: tuple[str, ...] = ()
    work: tuple[WorkRow, ...] = ()


@dataclass(frozen=True)
class WorkloadFacts:
    """What is known of a user's workload once it was examined.

    ``samples`` are the items of its training data; ``units`` how many units these are, of its
    ``unit``, and ``test_units`` those of its test data. ``optimizer`` is the class of its own,
    empty where it takes that of the case; ``dataset`` is whether it has one for ``--loader torch``.
    """

    samples: int
    units: int
    test_units: int
    unit: str
    optimizer: str = ""
    dataset: bool = False


def read_fingerprint(values: Mapping[str, Any]) -> Fingerprint:
    facts = values["workload"]
    still = tuple(values["still"])  # a list in JSON
    work = tuple(WorkRow(**row) for row in values["work"])
    facts = facts and WorkloadFacts(**facts)
    return Fingerprint(**{**values, "still": still, "workload": facts, "work": work})


_WORKLOAD = "workload:"


def name_subject(case: Case) -> str:
    """What is examined for a case: its workload; or its network, for its images and classes.

    >>> from bench.case import Case
    >>> name_subject(Case("m:f")), name_subject(Case("m:f", input="3x64x64", classes=100))
    ('m:f', 'm:f 3x64x64 100')
    """
    if case.workload != IMAGES:
        return _WORKLOAD + case.workload
    if case.input is None and case.classes is None:
        return case.model
    return f"{case.model} {case.input or '-'} {case.classes or '-'}"


def split_subject(text: str) -> tuple[str, str, Shape, int]:
    """Name, kind (model or workload), shape of an image and classes of a `name_subject`."""
    if text.startswith(_WORKLOAD):
        return text.removeprefix(_WORKLOAD), "workload", SHAPE, CLASSES
    name, shape, classes = [*text.split(), "-", "-"][:3]
    return (
        name,
        "model",
        SHAPE if shape == "-" else parse_shape(shape),
        CLASSES if classes == "-" else int(classes),
    )


@dataclass(frozen=True)
class Asked:
    """A network or workload that is to be examined, by `name_subject`, and how it is to be trained:
    values of the axes `freeze` and `start`."""

    subject: str
    freezes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def __str__(self) -> str:
        tuned = [self.freezes, self.starts]
        return f"{self.subject} {json.dumps(tuned)}" if any(tuned) else self.subject


def parse_asked(text: str) -> Asked:
    subject, bracket, rest = text.partition(" [")  # no name has either
    freezes, starts = json.loads(f"[{rest}") if bracket else ((), ())
    return Asked(subject, tuple(freezes), tuple(starts))


def examine(
    name: str,
    kind: str = "model",
    shape: Shape = SHAPE,
    classes: int = CLASSES,
    freezes: Sequence[str] = (),
    starts: Sequence[str] = (),
    tell: Callable[[Fingerprint], object] = lambda found: None,
) -> Fingerprint:
    """Import and build ``name``, run a user's own once, and say what it is.

    What it is does not depend on what is frozen or where it starts; that this can be done is
    checked.

    Args:
        kind: ``model`` or ``workload``.
        freezes: as `bench.models.freezing.freeze` takes them.
        starts: files, as `bench.models.weights.load_weights` takes them.
        shape: of the images that a model is tried on: channels, height and width.
        classes: that a built-in network, or one of timm, is built for.

    Its work is sketched last, and ``tell`` is given all else before: a user's code may crash on
    torch's meta device, or never end.

    A workload is tried by `try_workload`. A user's model takes a training step's forward pass on
    two images, float32 (2, *shape), on the device that it puts itself on. A built-in network is
    built without memory (torch's meta device) and not run: DPN-92 would take 2 s.

    Call it in a process that has imported torch, and no model before. Raises UsageError, one line:
    it cannot be imported, built or run, or is no network for images; or the others do not go with
    it.
    """
    import torch

    from bench.training.counting import sketch_work
    from bench.training.float8 import find_products

    if kind == "workload":
        # what examines it is not the user's: its files are not to be hashed
        import_module("bench.training.loop")

    before = set(sys.modules)
    torch.manual_seed(0)  # as a worker does before it builds: a factory may draw its layers
    outputs = facts = None
    workload = Workload()
    workload.shape, workload.classes = shape, classes
    if name in MODELS:
        with torch.device("meta"):
            model = build_model(name, classes, shape)
    else:
        theirs = partial(build_model, name, classes, shape)
        make = theirs if is_timm(name) else partial(_make, name, kind)
        made = _try(f"{kind} {name!r} cannot be built", make)
        if kind == "workload":
            workload = check_workload(name, made)
            model = build_network(name, workload)
            check_head(name, workload, model)
        else:
            model = _check_network(name, made)
    still = check_tuning(f"{kind} {name!r}", model, workload, freezes, starts)
    if kind == "workload":
        facts = try_workload(name, workload, model, freezes)
    elif name not in MODELS:
        outputs = _run(name, model, shape)
        if is_timm(name):
            outputs = None  # its head is made for as many classes as the images have
    module, _ = split_model(name)
    files = {other: sys.modules[other] for other in set(sys.modules) - before}
    own = {other: found for other, found in files.items() if _is_own(found)}
    own[module] = sys.modules[module]
    texts = [text for other in sorted(own) for text in (other.encode(), _read(own[other]))]
    if is_timm(name):
        texts.append(sys.modules[module].__version__.encode())
    products = _try(f"{kind} {name!r}: find_head fails", lambda: find_products(model, workload))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = Fingerprint(
        _hash(f"{key} {tuple(t.shape)} {t.dtype}".encode() for key, t in tensors),
        _hash([re.sub(r"0x[0-9a-fA-F]+", "", repr(model)).encode()]),
        _hash(texts),
        outputs,
        facts,
        len(products),
        normalises_batches(model),
        still,
    )
    tell(found)
    with suppress(BaseException):  # of a user's code, which may look at values, or leave
        return replace(found, work=sketch_work(model, workload))
    return found


def check_tuning(
    what: str, model: nn.Module, workload: Workload, freezes: Sequence[str], starts: Sequence[str]
) -> tuple[str, ...]:
    """Check that a network, ``what`` in a UsageError, can start from files and be frozen, and leave
    it as it is; those of ``freezes`` that leave no BatchNorm which normalises by the batch."""
    still = []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for path in starts:
            _try(f"--start {path}", partial(fit_weights, model, path, workload.find_head))
        for setting in freezes:
            frozen = partial(freeze, model, setting, workload.find_head)
            if not normalises_batches(model, _try(f"--freeze {setting}", frozen)):
                still.append(setting)
            for parameter in trained:
                parameter.requires_grad_()
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error
    return tuple(still)


def _make(name: str, kind: str) -> object:
    return load_factory(name, f"--{kind}")()


def _check_network(name: str, model: object) -> nn.Module:
    from torch import nn

    if isinstance(model, Workload):
        raise UsageError(f"model {name!r} returned a workload; give it as --workload")
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(model).__name__}; a factory returns a torch.nn.Module"
        )
    if not list(model.parameters()):
        raise UsageError(f"model {name!r} has no parameters; there is nothing to train")
    return model


def _run(name: str, model: nn.Module, shape: Shape) -> int:
    import torch

    device = next(model.parameters()).device
    images = torch.zeros(_TRIED, *shape, device=device)
    model.train()
    given = "" if shape == SHAPE else f", those of --input {'x'.join(map(str, shape))}"
    tried = f"model {name!r} fails on {tuple(images.shape)} images{given}"
    logits = _try(tried, lambda: model(images))
    if not isinstance(logits, torch.Tensor):
        raise UsageError(
            f"model {name!r} returns {type(logits).__name__}; forward returns a tensor of logits, "
            "(N, classes)"
        )
    if logits.ndim != 2 or len(logits) != _TRIED:
        raise UsageError(
            f"model {name!r} gives {tuple(logits.shape)} for {_TRIED} images; forward returns "
            f"logits of shape ({_TRIED}, classes)"
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


def build_network(name: str, workload: Workload) -> nn.Module:
    """Build a workload's network. Raises UsageError: it cannot be built, or there is nothing in it
    to train."""
    from torch import nn

    model = _try(f"workload {name!r}: build_model fails", workload.build_model)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"workload {name!r}: build_model returned {type(model).__name__}; it must return "
            "a torch.nn.Module"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"workload {name!r}: its network has no parameters that require gradients")
    return model


def check_head(name: str, workload: Workload, model: nn.Module) -> None:
    """Check that a workload finds the head in its network. Raises UsageError: it does not."""
    head = _try(f"workload {name!r}: find_head fails", partial(workload.find_head, model))
    if not any(module is head for module in model.modules()):
        raise UsageError(
            f"workload {name!r}: find_head returned {type(head).__name__} that is no layer of the "
            "network; it must return one of the modules of the network that it is given"
        )


def try_workload(
    name: str, workload: Workload, model: nn.Module, freezes: Sequence[str] = ()
) -> WorkloadFacts:
    """Take the loss of a batch of two and its gradients, on the CPU, and look at everything.

    Then take a training step of the batch in fp32 and in bf16, and one with each of ``freezes``.
    Raises UsageError: it breaks the protocol of `Workload`; one line says how.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    def refuse(what: str) -> UsageError:
        return UsageError(f"workload {name!r}: {what}")

    def attempt(method: str, action: Callable[[], Any]) -> Any:
        return _try(f"workload {name!r}: {method} fails", action)

    if not (isinstance(workload.unit, str) and workload.unit.strip()):
        raise refuse("its unit is empty; name what is counted, such as 'tokens'")
    counts = {"samples": (workload.samples, 2), "test_samples": (workload.test_samples, 0)}
    for what, (number, least) in counts.items():
        if type(number) is not int or number < least:
            raise refuse(f"{what} is {number!r}; it must be a whole number of at least {least}")
    units = attempt("count_units", lambda: workload.count_units(2))
    if type(units) is not int or units < 1:
        raise refuse(f"count_units(2) is {units!r}; it must be a whole number of at least 1")

    cpu = torch.device("cpu")

    def check_batch(method: str, batch: Any) -> list[torch.Tensor]:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        try:
            items = count_items(batch)
        except ValueError as error:
            raise refuse(f"{method} returned no batch: {error}") from error
        if items != 2:
            raise refuse(
                f"{method} made {items} items where 2 were asked for; its tensors have the shapes "
                f"{_shapes(tensors)}"
            )
        for tensor in tensors:
            if tensor.device != cpu:
                raise refuse(f"{method} made a tensor on {tensor.device} where cpu was asked for")
            if tensor.requires_grad:
                raise refuse(f"{method} made a tensor that requires a gradient; detach it")
        return tensors

    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        return attempt("make_batch", lambda: workload.make_batch(2, cpu, generator))

    batch = make()
    first, again = (check_batch("make_batch", b) for b in (batch, make()))
    if not all(map(torch.equal, first, again)):
        raise refuse(
            "make_batch made two different batches from one seed; draw random numbers only from "
            "the generator that it is given"
        )
    if workload.test_samples >= 2:
        tested = attempt("make_test_batch", lambda: workload.make_test_batch(0, 2, cpu))
        check_batch("make_test_batch", tested)

    model.train()
    calls = 0

    def network(*inputs: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return model(*inputs, **named)

    made = attempt("compute_loss", lambda: workload.compute_loss(network, batch))
    if not calls:
        raise refuse(
            "compute_loss does not call the network that it is given; call it, and no other, since "
            "only that one computes in the case's precision"
        )
    loss, correct = (made.loss, made.correct) if isinstance(made, Loss) else (made, None)
    if not isinstance(loss, torch.Tensor):
        raise refuse(
            f"compute_loss returned {type(loss).__name__}; it must return a tensor or a Loss"
        )
    if loss.shape != () or loss.dtype != torch.float32:
        raise refuse(
            f"compute_loss returned {loss.dtype} of shape {tuple(loss.shape)}; the loss must "
            "be float32 of shape (), the mean over the batch"
        )
    if not loss.isfinite():
        raise refuse(f"compute_loss returned {float(loss.detach())} for the first batch")
    if correct is not None and not (
        isinstance(correct, torch.Tensor)
        and correct.shape == ()
        and not correct.is_floating_point()
        and 0 <= int(correct) <= units
    ):
        shown = correct.tolist() if isinstance(correct, torch.Tensor) else correct
        raise refuse(
            f"correct is {shown!r}; it must be an integer tensor of shape (), from 0 to what "
            f"count_units says, {units} for two items"
        )
    if not loss.requires_grad:
        raise refuse(
            "the loss does not depend on the network's weights; do not detach it, or compute it "
            "under torch.no_grad"
        )
    attempt("the backward pass", loss.backward)
    if all(p.grad is None for p in model.parameters()):
        raise refuse("no weight of the network receives a gradient")
    optimizer = _try_optimizer(workload, model, attempt, refuse)
    dataset = attempt("build_dataset", workload.build_dataset)
    if dataset is not None:
        items = _try_dataset(workload, dataset, batch, attempt, refuse)
        attempt(
            "compute_loss of items of build_dataset", lambda: workload.compute_loss(network, items)
        )
    _try_steps(name, workload, batch, attempt, freezes)
    return WorkloadFacts(
        workload.samples,
        workload.count_units(workload.samples),
        workload.count_units(workload.test_samples) if workload.test_samples else 0,
        workload.unit.strip(),
        optimizer,
        dataset is not None,
    )


def _try_optimizer(
    workload: Workload,
    model: nn.Module,
    attempt: Callable[[str, Callable[[], Any]], Any],
    refuse: Callable[[str], UsageError],
) -> str:
    import torch

    parameters: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
    made = attempt("build_optimizer", lambda: workload.build_optimizer(parameters, 1e-3))
    if made is None:
        return ""
    if not isinstance(made, torch.optim.Optimizer):
        raise refuse(
            f"build_optimizer returned {type(made).__name__}; it must return a "
            "torch.optim.Optimizer, or None"
        )
    stepped = {id(p) for group in made.param_groups for p in group["params"]}
    if not stepped <= {id(p) for p in parameters}:
        raise refuse(
            "build_optimizer made an optimizer of other tensors; give it only the parameters that "
            "build_optimizer is given"
        )
    return type(made).__name__


def _try_dataset(
    workload: Workload,
    dataset: Any,
    batch: Any,
    attempt: Callable[[str, Callable[[], Any]], Any],
    refuse: Callable[[str], UsageError],
) -> Any:
    """Make a batch of the first two items of a dataset, and compare it with one of make_batch."""
    import torch
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise refuse(
            f"build_dataset returned {type(dataset).__name__}; it returns a map-style dataset, "
            "with __getitem__ and __len__"
        )
    if (items := attempt("build_dataset: len()", lambda: len(dataset))) != workload.samples:
        raise refuse(
            f"build_dataset has {items} items, and samples is {workload.samples}; an epoch is as "
            "many with either --loader, so make them equal"
        )
    loaded = load_items(
        dataset, batch_size=2, micro_batch=2, device=torch.device("cpu"), seed=0, loading=Loading()
    )
    made = attempt("a batch of build_dataset", lambda: next(loaded.evaluation()))
    if (got := _kinds(made)) != (wanted := _kinds(batch)):
        raise refuse(
            f"torch's default_collate of items of build_dataset gives {got}; make_batch gives "
            f"{wanted}"
        )
    return made


def _kinds(batch: Any) -> str:
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors)


def _try_steps(
    name: str,
    workload: Workload,
    batch: Any,
    attempt: Callable[[str, Callable[[], Any]], Any],
    freezes: Sequence[str],
) -> None:
    """Step once as a case does: where weights stay in fp32, where they are cast, with each freeze,
    which may leave an optimizer or a loss without what it needs."""
    import torch

    from bench.training.loop import Training

    plain = [("fp32", NONE), ("bf16", NONE)]
    for precision, frozen in [*plain, *(("fp32", frozen) for frozen in freezes)]:
        kind, model = PRECISIONS[precision], build_network(name, workload)
        where = f"{precision} with --freeze {frozen}" if frozen != NONE else precision
        make = partial(
            Training, model, kind, torch.device("cpu"), lr=1e-3, frozen=frozen, workload=workload
        )
        training = attempt(f"a training in {where}", make)
        attempt(f"a training step in {where}", partial(training.step, batch))


def _shapes(tensors: Iterable[torch.Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors)


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


def examine_in_fork(text: str) -> dict[str, Any]:
    """`examine` in a fork of this process, of what is `Asked`: the fields of `Fingerprint`, or
    {"error": one line}."""
    asked = parse_asked(text)
    name, kind, shape, classes = split_subject(asked.subject)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        with os.fdopen(writer, "w") as file:

            def tell(answer: Mapping[str, Any]) -> None:
                file.write(json.dumps(answer) + "\n")
                file.flush()

            try:
                found = examine(
                    *(name, kind, shape, classes, asked.freezes, asked.starts),
                    tell=lambda found: tell(asdict(found)),
                )
                tell(asdict(found))
            except UsageError as error:
                tell({"error": str(error)})
            except BaseException as error:
                tell({"error": f"{kind} {name!r} cannot be examined: {error!r}"})
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.readline()
        # of both lines the second is in the file's buffer, and the end of the pipe is seen
        if told and select.select([reader], [], [], _SKETCH_S)[0]:
            told = file.readline() or told
    if told:
        os.kill(pid, signal.SIGKILL)  # it may be sketching for ever
    _, status = os.waitpid(pid, 0)
    if told:
        answer: dict[str, Any] = json.loads(told)
        return answer
    code = os.waitstatus_to_exitcode(status)
    end = f"with return code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    return {"error": f"{kind} {name!r} ends its process {end} when it is built and run once"}


def check_outputs(name: str, found: Fingerprint, classes: int) -> None:
    """Refuse a model that does not tell as many classes apart as the images have. Raises
    UsageError: it says both numbers."""
    if found.outputs not in (None, classes):
        raise UsageError(
            f"model {name!r} gives {(_TRIED, found.outputs)} for {_TRIED} images; it must "
            f"give {(_TRIED, classes)}, one logit for each class"
        )
