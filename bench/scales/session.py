"""An fp32 training whose gradients are counted, and trainings with loss scales beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bench.base.progress import watch
from bench.networks.data import ImageArrays
from bench.networks.data.batches import stream
from bench.networks.workloads import IMAGES, Images, load_workload
from bench.results.scale_map import (
    GradientKind,
    Gradients,
    ScaleCase,
    ScaledTraining,
    Tally,
    find_window,
)
from bench.scales.gradients import (
    GRADIENT_KINDS,
    LIMITS,
    GradientCounter,
    attach,
    find_layers,
    list_kept,
    round_gradients,
)
from bench.schema.axis import Value
from bench.schema.case import Case, format_value, parse_value
from bench.schema.precision import POLICIES, PRECISIONS
from bench.training.building import build_training, seed_all
from bench.training.loop import Training
from bench.training.switches import keep_switches
from bench.workers.preparation import open_supply

AT = (1, 5, 20)
"""The steps at which gradients are counted: the first, and two after the weights have changed."""


def measure(case: Case, data: ImageArrays | None, scales: Sequence[float], steps: int) -> ScaleCase:
    """Find what ``scales``, which rise, do to the gradients of a case of 16 bits within its first
    ``steps``. Then train at 1, 128, the recommended scale and a dynamic one. ``data`` is None for a
    user's workload."""
    session, name = Session(case, data, steps), case.label(["model", "precision", "batch_size"])
    with watch(f"{name}, counted in fp32") as session.show:
        found = session.observe(scales)
    settings = ["1", "128"]
    while settings:
        setting = settings[0]
        with watch(f"{name}, at loss scale {setting}") as session.show:
            training = session.train(setting)
        found = replace(found, trainings=(*found.trainings, training))
        if session.real and setting not in POLICIES and any(training.overflowed):
            scale, first = training.scales[0], training.overflowed.index(True) + 1
            first = min(first, found.overflows.get(scale, first))
            found = replace(found, overflows={**found.overflows, scale: first})
        tried = {one.setting for one in found.trainings}
        use = find_window(found).use  # a lower one, where that of before overflowed in its training
        recommended = [] if use is None else [format_value(use)]
        settings = [s for s in ("1", "128", *recommended, "dynamic") if s not in tried]
    return found


class Session:
    """The network and the stream of batches from which every training of a case starts.

    On a GPU the trainings with loss scales are ``real``: those of the precision itself. On a CPU,
    which takes about 100 times as long in fp16, they compute in fp32 and round the gradients.
    """

    def __init__(self, case: Case, data: ImageArrays | None, steps: int) -> None:
        self.case, self.steps, self.device = case, steps, torch.device(case.device)
        self.show: Callable[[int, int], None] = lambda step, total: None
        self.real = self.device.type == "cuda"
        known = PRECISIONS[case.precision]
        self._format: torch.dtype = getattr(torch, known.autocast or known.weights)
        own = case.workload != IMAGES
        with keep_switches({}):
            self._workload = (
                load_workload(case.workload, case.length) if own else Images(case.model, data)
            )
            seed_all(case.seed)
            self._start = self._workload.build_model()
        self.layers = tuple(find_layers(self._start))
        self._kept = list_kept(self._start, case.precision, self._workload.keeps_fp32)
        self._batches = open_supply(case, self._workload, self.device)

    def prepare(self, precision: str, loss_scale: Value = None) -> Training:
        """Build a training from the initial weights, with the flags of its precision set."""
        assert loss_scale is None or isinstance(loss_scale, float | str)
        case = replace(self.case, precision=precision, loss_scale=loss_scale)
        return build_training(case, self._workload, self.device, copy.deepcopy(self._start))

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield steps from 1 and their batches, seeded so that dropout is the same every time."""
        for step, batch in enumerate(islice(stream(self._batches), self.steps), 1):
            self.show(step, self.steps)
            seed_all(self.case.seed + step)
            yield step, batch

    def observe(self, scales: Sequence[float]) -> ScaleCase:
        """Train in fp32 and count what each scale does to the gradients that are rounded."""
        training = self.prepare("fp32")
        at = tuple(step for step in AT if step <= self.steps)
        counter = GradientCounter(
            len(self.layers), self._format, scales, self.steps, at, self.device
        )
        losses: list[Tensor] = []
        attach(training.model, counter)
        for step, batch in self.batches():
            counter.step = step
            losses.append(training.step(batch)[0])
        # the host does not wait for the device before this
        fates, peaks = counter.fates.tolist(), counter.peaks.cpu()
        rounded = [
            (i, GRADIENT_KINDS.index(kind))
            for i, kept in enumerate(self._kept)
            for kind in GRADIENT_KINDS
            if not (kept and kind is GradientKind.WEIGHT)
        ]
        gradients = tuple(
            Gradients(step, scale, self.layers[i], GRADIENT_KINDS[kind], Tally(*counted))
            for slot, step in enumerate(at)
            for i, kind in rounded
            for scale, counted in zip(scales, fates[slot][i][kind], strict=True)
            if any(counted)
        )
        # NaN counts most
        largest = torch.stack([peaks[:, i, kind] for i, kind in rounded]).amax(0).tolist()
        limit, overflows = LIMITS[self._format], {}
        for scale in scales:
            # not `peak >= limit`: NaN overflows too
            over = (step for step, peak in enumerate(largest, 1) if not peak * scale < limit)
            if first := next(over, None):
                overflows[scale] = first
        of = ("model", "dataset", "precision", "batch_size", "lr", "seed", "device")
        reference = _read_training("", losses, [1.0] * self.steps, [False] * self.steps)
        return ScaleCase(
            **{name: getattr(self.case, name) for name in of},
            steps=self.steps,
            at=at,
            layers=self.layers,
            scales=tuple(scales),
            overflows=overflows,
            peaks=tuple(largest),
            limit=limit,
            gradients=gradients,
            trainings=(reference,),
        )

    def train(self, setting: str) -> ScaledTraining:
        """Train with a loss scale, as a flag spells it."""
        loss_scale = parse_value("loss_scale", setting, "--loss-scale")
        training = self.prepare(self.case.precision if self.real else "fp32", loss_scale)
        if not self.real:
            attach(training.model, round_gradients(self._kept, self._format))
        scales, steps = [], []
        for _, batch in self.batches():
            scales.append(training.loss_scale.current().clone())
            steps.append(training.step(batch))
        losses, _, overflowed, _ = zip(*steps, strict=True)
        flags = torch.stack(overflowed).tolist()
        return _read_training(setting, losses, torch.stack(scales).tolist(), flags)


def _read_training(
    setting: str, losses: Sequence[Tensor], scales: Sequence[float], overflowed: Sequence[bool]
) -> ScaledTraining:
    values = torch.stack(tuple(losses)).tolist()
    finite = (loss if math.isfinite(loss) else math.nan for loss in values)
    return ScaledTraining(setting, tuple(finite), tuple(scales), tuple(overflowed))
