"""Hashes that identify a model, and a check that it can be trained.

They are computed once per sweep, for each model in a process of its own, so that the imports of one
are not counted for another, and a model that ends its process does not end the others. The sweep
itself imports neither torch nor user code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError
from bench.base.inject import Files, watch
from bench.base.processes import name_signal
from bench.networks.data.cifar10 import CIFAR10_SHAPE, CLASSES
from bench.networks.data.synthetic import parse_shape
from bench.networks.freezing import normalises_batches
from bench.networks.models import LENGTHS, MODELS, build_model, split_model
from bench.networks.modules import find_class
from bench.networks.workloads import (
    IMAGES,
    Workload,
    WorkloadFacts,
    check_workload,
    make_workload,
)
from bench.schema.case import Case
from bench.schema.optimization import SPECIAL
from bench.training.sources import hash_content, hash_files, identify_model, judge_process
from bench.workers.server import EndedError, MessageError, Process

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a model: each hash is the first 12 hex digits of a SHA-256.

    ``parameters`` hashes name, shape and dtype of every parameter and buffer, ``structure`` the
    printed module without memory addresses, ``source`` the ``files`` of the user's that build it,
    see `bench.training.sources`. ``outputs`` is the number of classes; None for a built-in network,
    which is not run, and for a workload, which need not have any. ``products`` is the number of
    layers that fp8 can convert, ``batchnorm`` whether the model has BatchNorm, ``convolves``
    whether it has convolution layers, and ``still`` the requested freezes that leave no layer
    normalising by the batch. ``failing`` are the requested precisions in which a CPU cannot train a
    step, and why, and ``plain`` the optimizers of `SPECIAL` that would be AdamW."""

    parameters: str
    structure: str
    source: str
    outputs: int | None = None
    workload: WorkloadFacts | None = None
    products: int = 0
    batchnorm: bool = True
    convolves: bool = True
    still: tuple[str, ...] = ()
    failing: Mapping[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=dict)
    plain: tuple[str, ...] = ()


Examined = Fingerprint | str
"""What was found of a network or workload, or the line that says what is wrong with it."""


def name_subject(case: Case) -> str:
    """Name what is examined for a case: its workload with a length if one is given, or its network
    with images and classes. A command is not examined.

    >>> from bench.schema.case import Case
    >>> name_subject(Case("m:f")), name_subject(Case("m:f", input="3x64x64", classes=100))
    ('m:f', 'm:f 3x64x64 100')
    """
    if case.workload != IMAGES:
        named = f"workload:{case.workload}"
        return named if case.length is None else f"{named} {case.length}"
    return " ".join(str(one) for one in (case.model, case.input, case.classes) if one is not None)


def name_source(case: Case) -> str:
    """Return the key of what a case is made of: its script, or its network or workload."""
    return name_subject(case) if case.command is None else case.model


@dataclass(frozen=True)
class Request:
    """The network or workload of a ``case``, to be examined, the values of the axes `freeze`,
    `start`, `precision` and `recompute` that it is to be trained with, and whether torch's
    DataParallel is to divide its batches."""

    case: Case
    freezes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    recomputes: tuple[str, ...] = ()
    divided: bool = False

    @property
    def subject(self) -> str:
        return name_subject(self.case)

    @property
    def what(self) -> str:
        return f"{'model' if self.case.workload == IMAGES else 'workload'} {self.case.model!r}"


def list_requests(cases: Iterable[Case]) -> list[Request]:
    """List the networks and workloads of ``cases``, commands aside, each once."""
    parts: dict[str, list[Case]] = {}
    for case in (case for case in cases if case.command is None):
        parts.setdefault(name_subject(case), []).append(case)
    asked = []
    for of in parts.values():
        frozen = dict.fromkeys(case.freeze for case in of if case.freeze != Case.freeze)
        starts = dict.fromkeys(case.start for case in of if case.start is not None)
        precisions = dict.fromkeys(case.precision for case in of)
        again = dict.fromkeys(case.recompute for case in of if case.recompute != Case.recompute)
        divided = any(case.parallel == "dp" for case in of)
        values = (tuple(frozen), tuple(starts), tuple(precisions), tuple(again), divided)
        asked.append(Request(of[0], *values))
    return asked


def examine_model(asked: Request) -> Fingerprint:
    """Import and build what is asked for, run a user's own once in each of the precisions, and
    return its fingerprint.

    The fingerprint does not depend on ``freezes``, ``starts``, ``recomputes`` and ``divided``,
    which are only checked; with each of the last two, a user's own trains a step. A model is tried
    on images of the case's input, by default CIFAR-10's, and a workload on sequences of the case's
    length, by default its own; a built-in network is built without memory (torch's meta device),
    and not run: DPN-92 would take 2 s.

    Call it in a process that has imported torch, and no model before. Raises UsageError, one line:
    the model cannot be imported, built or run in any of the precisions, or is no network for
    images; ``freezes``, ``starts`` or ``recomputes`` do not fit it; or it cannot be divided.
    """
    from torch.nn.modules.conv import _ConvNd

    from bench.training.float8 import find_products
    from bench.training.optimizers import list_special
    from bench.training.trial import (
        attempt,
        check_tuning,
        list_facts,
        list_tried,
        try_division,
        try_images,
        try_precisions,
        try_recompute,
        try_workload,
    )

    name, what, precisions = asked.case.model, asked.what, asked.precisions
    before, lines = set(sys.modules), watch() if name not in MODELS else []
    outputs = facts = None
    failing: Mapping[str, str] = {}
    workload, model = _build(asked.case, what)
    still = check_tuning(what, model, workload, asked.freezes, asked.starts, asked.recomputes)
    trial = partial(try_precisions, what, workload, model, precisions)
    if name in LENGTHS:
        facts = list_facts(workload)
    elif asked.case.workload != IMAGES:
        build = workload.build_model
        facts, failing = trial(build, partial(try_workload, what, workload, asked.freezes))
    elif name not in MODELS:
        build = partial(build_model, name)
        outputs, failing = trial(build, partial(try_images, what, workload))
    if name not in MODELS:
        tried = next(one for one in list_tried(precisions) if one not in failing)
        for recompute in asked.recomputes:
            try_recompute(what, build, workload, tried, recompute)
        if asked.divided:
            try_division(what, build, workload, tried)
    source, files = _read_source(name, lines, before, asked.starts)
    products = attempt(f"{what}: find_head fails", partial(find_products, model, workload))
    return Fingerprint(
        *identify_model(model),
        source,
        outputs,
        facts,
        len(products),
        normalises_batches(model),
        any(issubclass(find_class(module), _ConvNd) for module in model.modules()),
        still,
        failing,
        files,
        tuple(name for name in SPECIAL if not list_special(name, model, workload)),
    )


def _read_source(
    name: str, lines: Sequence[str], before: set[str], starts: Sequence[str]
) -> tuple[str, Files]:
    """Return the hash of what a network is made of, and the user's files among it."""
    module, _ = split_model(name)
    if name in MODELS:
        return hash_content(Path(str(sys.modules[module].__file__))), {}
    files = judge_process(lines, before, module, [*map(Path, starts)]).files
    return hash_files(files), files


def _build(case: Case, what: str) -> tuple[Workload, nn.Module]:
    """Return the workload, one for images of a model's, and its network."""
    import torch

    from bench.training.switches import keep_switches
    from bench.training.trial import attempt, check_length, check_network

    torch.manual_seed(0)  # as a worker does before it builds: a factory may use random numbers
    name, workload = case.model, Workload()
    with keep_switches({}):
        if case.workload != IMAGES:
            made = attempt(f"{what} cannot be built", partial(make_workload, name))
            usual = getattr(made, "length", 0)
            workload = check_workload(name, made, case.length)
            check_length(what, workload, usual)
            if name not in MODELS:
                model = attempt(f"{what}: build_model fails", workload.build_model)
                return workload, check_network(what, model)
            with torch.device("meta"):
                return workload, workload.build_model()
        workload.shape = CIFAR10_SHAPE if case.input is None else parse_shape(case.input)
        workload.classes = case.classes or CLASSES
        if name not in MODELS:
            made = attempt(f"{what} cannot be built", partial(build_model, name))
            return workload, check_network(what, made)
        with torch.device("meta"):
            return workload, build_model(name, workload.classes, workload.shape)


def try_model(asked: Request, timeout_s: float, **settings: Any) -> Examined:
    """Run `examine_model` in a process of its own, a `bench.workers.server.Process` with these
    settings. Return what it finds, or a line that says what is wrong. Raises TimeoutError."""
    with Process("bench.workers.fingerprint:answer", asked, **settings) as process:
        try:
            found: Examined = process.receive(timeout_s)
        except MessageError as error:
            return f"{asked.what} cannot be examined: {error}"
        except EndedError:
            code = process.wait() or 0
            end = f"with return code {code}" if code >= 0 else f"by {name_signal(-code)}"
            return f"{asked.what} ends its process {end} when it is built and run once"
    return found


def answer(connection: Connection, asked: Request) -> None:
    """Send what `examine_model` finds, or what is wrong."""
    try:
        connection.send(examine_model(asked))
    except UsageError as error:
        connection.send(str(error))
    except BaseException as error:
        connection.send(f"{asked.what} cannot be examined: {error!r}")
