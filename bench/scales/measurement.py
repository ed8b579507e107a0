"""An fp32 training whose gradients are counted, and trainings with loss scales beside it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.axis import Value
from bench.case import format_value, parse_value
from bench.data import Dataset
from bench.data.batches import stream
from bench.precision import PRECISIONS, is_dynamic, set_flags
from bench.scale_map import (
    Gradients,
    Kind,
    Overflow,
    ScaleCase,
    ScaledTraining,
    Tally,
    Way,
    find_window,
)
from bench.scales.formats import Cells, find_bounds
from bench.scales.gradients import (
    KINDS,
    Comparison,
    Counter,
    Rounding,
    attach,
    choose_format,
    find_layers,
    list_kept,
)
from bench.scales.options import RECOMMENDED, Question
from bench.training.building import build_network, build_training, seed_all
from bench.training.loop import Training, copy_state
from bench.training.loss_scale import build_loss_scale
from bench.training.switches import keep_switches
from bench.worker.preparation import open_supply
from bench.workloads import IMAGES, load_workload
from bench.workloads.images import Images

Say = Callable[[str], None]


def measure(question: Question, data: Dataset | None, say: Say) -> Iterator[ScaleCase]:
    """Answer a question, one precision after another; ``data`` is None for a user's workload.
    ``say`` is called with lines on the progress."""
    session, case = Session(question, data), question.case
    say(f"{case.model}, batch size {case.batch_size}: {question.steps} steps in fp32")
    reference, gradients = session.observe(say)
    for precision in question.precisions:
        found = session.describe(precision, reference, gradients[precision])
        # known only after the gradients; empty if there is none
        recommended = format_value(find_window(found, question.tolerance).use)
        settings = (recommended if s == RECOMMENDED else s for s in question.train)
        for setting in filter(None, dict.fromkeys(settings)):
            say(f"{precision}: {question.steps} steps at loss scale {setting}")
            found = add_training(found, session.train(precision, setting))
        yield found


def add_training(case: ScaleCase, training: ScaledTraining) -> ScaleCase:
    """Return ``case`` with one more training. If its static scale overflows there, that is added in
    the trained way; in the rounded way, the fp32 training tells the overflows of every scale."""
    overflows = dict(case.overflows)
    first = next((i for i, bad in enumerate(training.overflowed, 1) if bad), None)
    if case.way is Way.TRAINED and not is_dynamic(training.setting) and first is not None:
        scale = training.scales[0]
        known = overflows.get(scale)
        if scale in case.scales and (known is None or first < known.step):
            overflows[scale] = Overflow(first)
    return replace(case, overflows=overflows, trainings=(*case.trainings, training))


class Session:
    """The network and the stream of batches from which every training of a question starts."""

    def __init__(self, question: Question, data: Dataset | None) -> None:
        case = question.case
        self.question, self.device = question, torch.device(case.device)
        own = case.workload != IMAGES
        with keep_switches({}):
            self._workload = load_workload(case.workload) if own else Images(case.model, data)
            seed_all(case.seed)
            self._start = build_network(self._workload)
        self.layers = tuple(find_layers(self._start))
        self._batches = open_supply(case, self._workload, self.device)

    def prepare(self, precision: str, loss_scale: Value = None) -> Training:
        """Build a training from the initial weights, with the flags of its precision set."""
        assert loss_scale is None or isinstance(loss_scale, float | str)
        case = replace(self.question.case, precision=precision, loss_scale=loss_scale)
        return build_training(case, self._workload, self.device, copy.deepcopy(self._start))

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield steps from 1 and their batches, seeded so that dropout is the same every time."""
        for step, batch in enumerate(islice(stream(self._batches), self.question.steps), 1):
            seed_all(self.question.case.seed + step)
            yield step, batch

    def observe(self, say: Say) -> tuple[ScaledTraining, dict[str, Observation]]:
        q, training = self.question, self.prepare("fp32")
        trained = q.way is Way.TRAINED
        formats = [] if trained else [choose_format(name).name for name in q.precisions]
        cells = Cells(list(dict.fromkeys(formats)), q.scales)
        # in the trained way the probes count, and fp32 only gives the largest gradients
        at = () if trained else q.at
        counter = Counter(len(self.layers), cells, q.steps, at, self.device)
        probes = {name: Probe(self, name) for name in q.precisions} if trained else {}
        losses: list[Tensor] = []
        attach(training.model, counter)
        for step, batch in self.batches():
            counter.step = step
            weights = None
            if probes and step in q.at:
                weights = copy_state(training.model.state_dict())
            seen = [probe.comparison.remember for probe in probes.values() if weights]
            ends = [attach(training.model, remember) for remember in seen]
            set_flags(training.precision)  # building and running probes sets theirs
            losses.append(training.step(batch)[0])
            for end in ends:
                end()
            if weights is not None:
                for name, probe in probes.items():
                    say(f"{name}: gradients at step {step}, {len(q.scales)} scales")
                    probe.look(weights, step, batch)
        # the host does not wait for the device before this
        reference = _read_training("", losses, [1.0] * q.steps, [False] * q.steps)
        peaks, counts = counter.peaks.cpu(), counter.counts.tolist()
        if trained:
            return reference, {name: probe.read(peaks) for name, probe in probes.items()}
        read = partial(self._read_rounded, cells=cells, counts=counts, peaks=peaks)
        return reference, {name: read(name) for name in q.precisions}

    def masks(self, precision: str) -> list[tuple[int, Kind]]:
        kept = list_kept(self._start, precision, self._workload.keeps_fp32)
        return [(i, k) for i in range(len(kept)) for k in KINDS if k is Kind.OUTPUT or not kept[i]]

    def _read_rounded(
        self, precision: str, cells: Cells, counts: list[list[list[list[int]]]], peaks: Tensor
    ) -> Observation:
        q, format, masks = self.question, choose_format(precision), self.masks(precision)
        gradients = tuple(
            Gradients(step, scale, self.layers[i], kind, cells.read(counted, format.name, scale))
            for slot, step in enumerate(q.at)
            for i, kind in masks
            if any(counted := counts[slot][i][KINDS.index(kind)])
            for scale in q.scales
        )
        largest, places = self.find_peaks(peaks, masks)
        overflows = {}
        for scale in q.scales:
            limit = find_bounds(format, scale).overflowing
            # not `peak >= limit`: NaN overflows too
            over = (step for step, peak in enumerate(largest, 1) if not peak < limit)
            if step := next(over, None):
                overflows[scale] = Overflow(step, places[step - 1])
        return Observation(gradients, overflows, tuple(largest))

    def find_peaks(
        self, peaks: Tensor, masks: Sequence[tuple[int, Kind]]
    ) -> tuple[list[float], list[str]]:
        """Return the largest gradient of each step among ``masks``, and its place; NaN counts
        most."""
        columns = [peaks[:, i, KINDS.index(kind)] for i, kind in masks]
        values, indices = torch.stack(columns, dim=1).max(dim=1)
        names = [f"{kind.value} gradient of layer {self.layers[i]}" for i, kind in masks]
        return values.tolist(), [names[i] for i in indices.tolist()]

    def describe(self, precision: str, reference: ScaledTraining, seen: Observation) -> ScaleCase:
        q = self.question
        of = ("model", "dataset", "batch_size", "lr", "seed", "device")
        return ScaleCase(
            precision=precision,
            way=q.way,
            steps=q.steps,
            at=q.at,
            layers=self.layers,
            scales=q.scales,
            limit=find_bounds(choose_format(precision), 1.0).overflowing,
            trainings=(reference,),
            **seen._asdict(),
            **{name: getattr(q.case, name) for name in of},
        )

    def train(self, precision: str, setting: str) -> ScaledTraining:
        loss_scale = parse_value("loss_scale", setting, "--train")
        rounded = self.question.way is Way.ROUNDED
        training = self.prepare("fp32" if rounded else precision, loss_scale)
        if rounded:
            keeps = self._workload.keeps_fp32
            rounding = Rounding(self._start, precision, choose_format(precision), keeps)
            attach(training.model, rounding)
        scales, steps = [], []
        for _, batch in self.batches():
            scales.append(training.loss_scale.current().clone())
            steps.append(training.step(batch))
        losses, _, overflowed, _ = zip(*steps, strict=True)
        flags = torch.stack(overflowed).tolist()
        return _read_training(setting, losses, torch.stack(scales).tolist(), flags)


class Observation(NamedTuple):
    gradients: tuple[Gradients, ...]
    overflows: dict[float, Overflow]
    peaks: tuple[float, ...]


class Probe:
    """Passes in a precision at the weights of the fp32 training, one for each scale."""

    def __init__(self, session: Session, precision: str) -> None:
        q, format = session.question, choose_format(precision)
        self._session, self.precision = session, precision
        self.training = session.prepare(precision, 1.0)
        passes = len(q.at) * len(q.scales)
        self.comparison = Comparison(len(session.layers), passes, format, session.device)
        attach(self.training.model, self.comparison.look)

    def look(self, weights: dict[str, Any], step: int, batch: Any) -> None:
        """Make one pass for each scale over the batch that the fp32 pass has seen."""
        q = self._session.question
        set_flags(PRECISIONS[self.precision])
        for scale in q.scales:
            self.training.model.load_state_dict(weights)
            self.training.loss_scale = build_loss_scale(scale, self._session.device)
            seed_all(q.case.seed + step)
            self.comparison.begin()
            self.training.step(batch)
        self.comparison.forget()

    def read(self, peaks: Tensor) -> Observation:
        q, masks = self._session.question, self._session.masks(self.precision)
        fates = self.comparison.fates.tolist()
        passes = [(step, scale) for step in q.at for scale in q.scales]
        gradients, overflows = [], dict[float, Overflow]()
        for (step, scale), counted in zip(passes, fates, strict=True):
            for i, kind in masks:
                tally = Tally(*counted[i][KINDS.index(kind)])
                if tally == Tally():
                    continue
                gradients.append(Gradients(step, scale, self._session.layers[i], kind, tally))
                if tally.overflowed and (scale not in overflows or step < overflows[scale].step):
                    overflows[scale] = Overflow(step)
        largest, _ = self._session.find_peaks(peaks, masks)
        return Observation(tuple(gradients), overflows, tuple(largest))


def _read_training(
    setting: str, losses: Sequence[Tensor], scales: Sequence[float], overflowed: Sequence[bool]
) -> ScaledTraining:
    values = torch.stack(tuple(losses)).tolist()
    finite = (loss if math.isfinite(loss) else math.nan for loss in values)
    return ScaledTraining(setting, tuple(finite), tuple(scales), tuple(overflowed))
