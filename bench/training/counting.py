"""FLOP and bytes of a training step, counted as its operations run, or from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from bench.networks.data.batches import Divided, Supply
from bench.networks.freezing import NONE, freeze
from bench.networks.workloads import Loss, Workload, sketch_batch
from bench.profile.kernels import Vocabulary
from bench.profile.timeline import TimedOperations
from bench.schema.case import Case, micro_batch
from bench.schema.record import KernelTime, WorkRow, write_kernels
from bench.schema.work import (
    Label,
    Work,
    WorkKind,
    add_items,
)
from bench.training.loop import Training
from bench.training.operations import WorkCounter, is_free_name, is_wrapper, name_kind
from bench.training.recompute import Recompute
from bench.training.switches import keep_switches


def read_vocabulary() -> Vocabulary:
    """Return the facts about operations from torch's registry, for
    `bench.profile.timeline.summarize`."""
    return Vocabulary(name_kind, is_free_name, is_wrapper)


Inside = Callable[[WorkKind | None], Any]
"""Returns a context whose operations belong to a part of the step, None for the network; it also
decorates a function, which then runs within it."""


@contextmanager
def mark_parts(training: Training, inside: Inside) -> Iterator[None]:
    """Run the parts of each step within ``inside(part)`` while this context lasts."""
    scale, optimizer = (getattr(training, name, None) for name in ("loss_scale", "optimizer"))
    places: list[tuple[Any, str, WorkKind | None]] = [
        (training, "compute_loss", WorkKind.LOSS),
        (training, "_run", None),
        (training, "update", WorkKind.OPTIMIZER),
        (scale, "scale", WorkKind.LOSS_SCALING),
        (scale, "step", WorkKind.LOSS_SCALING),
        (optimizer, "step", WorkKind.OPTIMIZER),
    ]
    places = [place for place in places if hasattr(place[0], place[1])]  # apex lacks some
    with ExitStack() as stack:
        for owner, name, part in places:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, inside(part)(getattr(owner, name)))
        yield


def mark_input(batches: Iterable[Divided], inside: Inside) -> Iterator[Divided]:
    """Yield the same batches, made, as their micro-batches, within ``inside(WorkKind.INPUT)``."""
    for batch in _draw(batches, inside):
        yield Divided(batch.size, _draw(batch.parts, inside), batch.whole)


def _draw(things: Iterable[Any], inside: Inside) -> Iterator[Any]:
    source, absent = iter(things), object()
    while True:
        with inside(WorkKind.INPUT):
            one = next(source, absent)
        if one is absent:
            return
        yield one


def count_step(training: Training, batches: Supply) -> dict[Label, Work]:
    """Return the work of a step, summed by label, with the network not compiled.

    The FLOP and bytes of an operation are linear in the items of its micro-batch, so two steps of a
    few items determine them for any number; a third checks that they are linear. If not, because
    the network or its data decide what runs, a step of all items is counted. These steps change the
    training; whatever one raises is raised.
    """
    size = micro_batch(training.case)
    if size > _FEW[-1]:
        counts = [_count_items(training, batches, items) for items in _FEW]
        if line := _find_line([work for work, _ in counts]):
            found = {label: add_items(work, size - _FEW[0]) for label, work in line.items()}
            if any(overflowed for _, overflowed in counts):
                # such a step may leave the weights unchanged; another case's may not
                for work in found.values():
                    work.flop_per_item = work.bytes_per_item = None
            return found
    return _count_items(training, batches, size)[0]


_FEW = (2, 4, 8)  # items; BatchNorm needs two


def _find_line(counts: Sequence[Mapping[Label, Work]]) -> dict[Label, Work] | None:
    """Return the work of the first of `_FEW` and its increase per item; None if that varies."""
    first, second, third = counts
    if not first.keys() == second.keys() == third.keys():
        return None
    apart = _FEW[1] - _FEW[0]
    found = {}
    for label, work in first.items():
        more = second[label]
        flop, bytes = (more.flop - work.flop) / apart, (more.bytes - work.bytes) / apart
        found[label] = one = Work(work.calls, work.flop, work.bytes, flop, bytes)
        most = replace(third[label], flop_per_item=flop, bytes_per_item=bytes)
        if more.calls != work.calls or add_items(one, _FEW[2] - _FEW[0]) != most:
            return None
    return found


def _count_items(training: Training, batches: Supply, items: int) -> tuple[dict[Label, Work], bool]:
    """Train op by op on a batch of micro-batches of ``items`` items; return the work, and whether
    the step's gradients overflowed."""
    parts = training.case.accumulate
    compiled, training.forward = training.forward, training.model
    captured, training.captured = training.captured, None
    # shapes that no step has would be autotuned too, for 20 s and more
    tunes, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    counter = WorkCounter()
    try:
        # torch compiles nothing while operations are counted, not an optimizer's step either
        eager = torch.compiler.set_stance("force_eager")
        with eager, counter, mark_parts(training, counter.inside):
            # the data in order, which needs no DataLoader workers
            few = Divided(items * parts, islice(batches.evaluation(items), parts))
            _, _, overflowed, _ = training.step(next(mark_input([few], counter.inside)))
    finally:
        training.forward, training.captured = compiled, captured
        torch.backends.cudnn.benchmark = tunes
    return counter.work, bool(overflowed)


def count_flop(workload: Workload, frozen: str = NONE, recompute: str = Case.recompute) -> float:
    """Return the FLOP per unit, forward and backward, counted from shapes alone, with those that
    ``recompute``, blocks or full, computes again.

    For DPN-92 these are 12.25 GFLOP, and by torch's own counter 17.19: see `count_gradients`. Only
    gradients that autograd computes are counted: none of frozen weights, and none of the inputs of
    a layer with nothing to train at or before it.
    """
    with torch.device("meta"):
        with keep_switches({}):
            network = workload.build_model()
        for norm in network.modules():
            if isinstance(norm, _NormBase) and norm.momentum is None:
                norm.momentum = 0.1  # else it reads how many batches it has seen, of a meta tensor
        freeze(network, frozen, workload.find_head)
        Recompute(recompute, workload.blocks).apply(network)
        batch = sketch_batch(workload, 2)
        counter = WorkCounter()
        with counter:
            found = workload.compute_loss(network, batch)
            (found.loss if isinstance(found, Loss) else found).backward()
    work = counter.work
    return sum(one.flop for one in work.values()) / workload.count_units(2)


def join_work(
    counted: Mapping[Label, Work], timed: Mapping[Label, TimedOperations]
) -> list[WorkRow]:
    """Return one row per label, from counted work and measured times. A trace lacks the number
    format of lists of tensors: the time of a label without one is divided among the counted labels
    of the same operation in proportion to their bytes."""
    times = {label: one.scale(1) for label, one in timed.items() if label in counted}
    rest = {label: one for label, one in timed.items() if label not in counted}
    for label in [label for label in rest if not label.format]:
        alike = {
            other: work.bytes
            for other, work in counted.items()
            if (other.kind, other.operation) == (label.kind, label.operation)
        }
        if total := sum(alike.values()):
            one = rest.pop(label)
            for other, bytes in alike.items():
                times.setdefault(other, TimedOperations()).add(one.scale(bytes / total))
    rows = []
    for label, work in counted.items():
        time = _spell_time(times.get(label))
        per_item = (work.flop_per_item, work.bytes_per_item)
        rows.append(WorkRow(*_spell(label), work.calls, work.flop, work.bytes, *time, *per_item))
    for label, one in rest.items():
        calls = max(1, round(one.calls))
        rows.append(WorkRow(*_spell(label), calls, None, None, *_spell_time(one)))
    return rows


def read_work(rows: Iterable[WorkRow]) -> dict[Label, Work]:
    return {
        Label(WorkKind(row.kind), row.operation, row.format): Work(
            row.calls, row.flop or 0.0, row.bytes or 0.0, row.flop_per_item, row.bytes_per_item
        )
        for row in rows
    }


MOST_KERNELS = 6  # named of a row


def _spell_time(timed: TimedOperations | None) -> tuple[float | None, float | None, str]:
    if timed is None:
        return None, None, ""
    kernels = [KernelTime(name, time_s) for name, time_s in timed.kernels.items()]
    kernels.sort(key=lambda kernel: -kernel.time_s)
    cell = write_kernels(kernels[:MOST_KERNELS], kernels[MOST_KERNELS:])
    return timed.time_s, timed.exclusive_s, cell


def _spell(label: Label) -> tuple[str, str, str]:
    return str(label.kind), label.operation, label.format
