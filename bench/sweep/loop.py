"""The runs of a sweep on its lanes, each with its record, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from bench.axis import Trait
from bench.case import Case, count_probed, format_value, list_affecting, micro_batch
from bench.doctor.earlier import describe_slowdown, read_earlier, read_rates
from bench.doctor.rates import choose_seconds, describe_rates, write_rate_warnings
from bench.errors import StoreError, UnsupportedError, UsageError
from bench.executors import Executor, Job, Lane
from bench.origin import find_origin
from bench.precision import PRECISIONS
from bench.record import (
    COMPARABLE,
    PROVEN,
    Environment,
    EpochRow,
    KnownResults,
    Outcome,
    Record,
    Status,
    WorkRow,
    flatten,
    read_missing,
    write_missing,
)
from bench.store.cells import CHECKPOINTS, LOGS, TRACES
from bench.store.reader import list_work, read_records, read_work
from bench.store.runs import Run, read_cases
from bench.store.writer import Store
from bench.sweep.checkpoints import KeptRun
from bench.sweep.display import Display, write_curve
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, warn_of_emulation
from bench.sweep.schedule import choose_seed
from bench.text import clean, read_clock
from bench.work import add_items

SHARED: dict[str, tuple[str, ...]] = {
    str(Trait.PROOF): (*PROVEN, "proof_notes", "flags"),
    str(Trait.FLOP): ("flop_per_image",),
    str(Trait.WORK): (),
}
"""What later cases take from a row instead of finding it again, with the columns of each part: the
proof of a precision, FLOP per image, and the work of a step, which is linear in the items of a
micro-batch."""

_FOUND = {"arithmetic", "conv_error", "matmul_error", "flop_per_image"}
"""Columns of these parts that are not empty in a row that found them."""

_MACHINE = (*COMPARABLE, "gpu_uuid", "torch_threads", "train_images")
"""Columns of an environment that every part is assumed to depend on."""

Found = dict[tuple[str, ...], tuple[Mapping[str, Any], int, list[WorkRow]]]
"""By part and all that it depends on: the cells of the first row that found it, the items in its
micro-batch, and its work."""


def _make_key(part: str, case: Case, machine: Mapping[str, Any]) -> tuple[str, ...]:
    axes = {name: getattr(case, name) for name in list_affecting(Trait(part))}
    if part == Trait.PROOF:
        axes["images"] = count_probed(case)
    if part == Trait.WORK and isinstance(case.loss_scale, float):
        axes["loss_scale"] = "static"
    if part != Trait.FLOP and PRECISIONS[case.precision].float8:
        # which of its layers are converted depends on the sizes of all micro-batches
        axes |= {"batch_size": case.batch_size, "accumulate": case.accumulate}
    values = [*axes.values(), *(machine[name] for name in _MACHINE)]
    return (part, *(format_value(clean(v) if isinstance(v, str) else v) for v in values))


def _learn(
    found: Found, case: Case, cells: Mapping[str, Any], work: Callable[[], Sequence[WorkRow]]
) -> None:
    """Keep the parts that a row found itself; the first row with a key counts."""
    if cells["status"] != Status.OK or find_origin(cells["executor"]) != "measured":
        return
    taken = read_missing(cells["shared"] or "", SHARED)
    for part, names in SHARED.items():
        key = _make_key(part, case, cells)
        if part in taken or key in found or any(cells[name] is None for name in _FOUND & {*names}):
            continue
        # rows without bytes were only timed
        rows = [row for row in work() if row.bytes is not None] if part == Trait.WORK else []
        if part != Trait.WORK or (rows and all(row.bytes_per_item is not None for row in rows)):
            found[key] = cells, micro_batch(case), rows


def describe_environment(known: Inputs, case: Case, outcome: Outcome) -> Environment:
    """Return the environment of a case, and what its outcome alone tells: what a command counts."""
    environment = known.describe(case)
    if outcome.unit:
        environment.unit, environment.train_images = outcome.unit, outcome.epoch_items
    return environment


@dataclass(frozen=True, eq=False)
class Ticket:
    """One run to make on a lane."""

    run: Run
    attempt: int = 1
    smaller: int | None = None  # a batch size that ran out of memory, so that this one is not run
    probe: bool = False  # a step of a search
    enough: Callable[[EpochRow], bool] | None = None  # as in `Job`

    @property
    def run_name(self) -> str:
        """What distinguishes its files from those of other runs of its case."""
        _, repeat, sentinel = self.run
        return "s" if sentinel else "p" if self.probe else str(repeat)

    @cached_property
    def slug(self) -> str:
        """The start of its file names; cached: it is used four times, and hashing takes 80 µs."""
        return self.run[0].slug()

    @property
    def file_name(self) -> str:
        return f"{self.slug}-{self.run_name}-{self.attempt}"


class Source(Protocol):
    """Decides what runs next on the lanes of a loop."""

    loop: Loop

    @property
    def left(self) -> bool:
        """Whether anything is left to start."""

    def take(self, lane: Lane, idle: Sequence[Lane]) -> Ticket | None:
        """Return what ``lane`` is to run next, or None. ``idle`` are all free lanes."""

    def settle(self, ticket: Ticket, record: Record, outcome: Outcome) -> None:
        """Learn how a ticket ended."""


@dataclass(eq=False)
class Loop:
    """The runs on the lanes; each record is written as soon as its run ends."""

    store: Store
    executor: Executor
    lanes: dict[str, Inputs]  # by name; at least one
    options: Options
    notes: list[str] = field(default_factory=list)  # lines that are shown once
    planned: Sequence[Case] = ()  # what is to run, each case once
    display: Display = field(init=False)
    rated: set[tuple[str, str]] = field(default_factory=set)  # lane and device

    @property
    def inputs(self) -> Inputs:
        """The inputs of the first lane; models and images are the same for all lanes."""
        return next(iter(self.lanes.values()))

    def show_on(self, display: Display) -> None:
        """Show the notes, once, and then all runs on ``display``."""
        self.display = display
        self.say_notes()

    def say_notes(self) -> None:
        self.say(self.notes)
        self.notes = []

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.display.say(line)

    def refuse(self, case: Case) -> str:
        """Return why a case is not to be run on these lanes; empty if it is."""
        inputs, precision = self.inputs, PRECISIONS[case.precision]
        if reason := inputs.refuse(case):
            return reason
        if "precision" in self.options.axes:
            return ""
        reason = inputs.platforms[case.device].discourage(precision)
        return f"{reason}; --precision {precision.name} measures it anyway" if reason else ""

    def begin(self, ticket: Ticket, lane: Lane) -> Job | Outcome:
        """Return the job of a ticket, or its outcome if nothing need be run."""
        case, repeat, sentinel = ticket.run
        self.display.begin(case, repeat, sentinel, lane.name)
        if ticket.smaller is not None:
            return Outcome(Status.OOM, f"batch size {ticket.smaller} already ran out of memory")
        if reason := self.refuse(case):
            return Outcome(Status.UNSUPPORTED, reason)
        try:
            place = self.executor.gather(lane, case.device, case.world_size)
        except UnsupportedError as error:
            return Outcome(Status.UNSUPPORTED, str(error))
        inputs = self.lanes[lane.name]
        seed = choose_seed(ticket.run, self.options.same_seed)
        job = Job(
            case if seed == case.seed else replace(case, seed=seed),
            folder=inputs.data(case).folder,
            gpu_uuid=inputs.platforms[case.device].environment.gpu_uuid,
            log=self.store.folder / LOGS / f"{ticket.file_name}.log",
            trace=self._place_trace(ticket),
            lane=place,
            enough=ticket.enough,
        )
        # a retry finds everything itself; and so does a case whose GPU is not known yet
        if ticket.attempt == 1 and self.options.here:
            job = replace(job, known=self.recall(case, inputs.describe(case)))
        if case.checkpoint and not ticket.probe:
            kept = self._keep_run(ticket)
            kept.open()
            identity = kept.identify(case, inputs.describe(case))
            job = replace(job, checkpoints=kept.folder, identity=identity)
        return job

    def finish(
        self,
        ticket: Ticket,
        lane: Lane,
        outcome: Outcome,
        started_at: str,
        place: Lane | None = None,
        beside: int = 0,
    ) -> Record:
        """Write and show the record of a ticket that has ended. ``lane`` took the ticket, which ran
        on ``place``, possibly with more GPUs, while at most ``beside`` other lanes were busy."""
        case, repeat, sentinel = ticket.run
        log, known = f"{LOGS}/{ticket.file_name}.log", self.lanes[lane.name]
        if at := outcome.place:
            known = known.at(case.device, at)
        if unrated := known.unrated.get(case.device):
            m = outcome.measurement
            m.missing = write_missing(read_missing(m.missing or "") | unrated)
        record = Record(
            record_id=uuid4().hex[:16],
            case=case,
            repeat=repeat,
            run_seed=choose_seed(ticket.run, self.options.same_seed),
            sentinel=sentinel,
            probe=ticket.probe,
            lane=at.lane if at else (place or lane).name,
            lanes_beside=beside,
            attempt=ticket.attempt,
            status=outcome.status,
            reason=outcome.reason,
            inferred=ticket.smaller is not None,
            executor=self.options.executor,
            started_at=started_at,
            finished_at=read_clock(),
            retries=outcome.retries,
            log=log if (self.store.folder / log).exists() else "",
            measurement=outcome.measurement,
            environment=describe_environment(known, case, outcome),
        )
        try:
            self.store.append(record, outcome.steps, outcome.epochs, outcome.work, outcome.ranks)
        except StoreError:
            # the disk may be full: print the measurement, so that it is not lost
            row = {name: v for name, v in flatten(record).items() if v not in (None, "")}
            self.display.say(f"not written: {row}")
            raise
        self.learn(record, outcome.work)
        if case.checkpoint and not ticket.probe:
            self._keep_run(ticket).finish(record)
        self.display.end(record, lane.name)
        if (trace := self._place_trace(ticket)) and trace.exists():
            self.display.say(f"trace, for https://ui.perfetto.dev: {trace}")
        if self.options.verbose:
            self.say(write_curve(outcome.steps, outcome.measurement.steps_per_epoch))
        return record

    def recall(self, case: Case, environment: Environment) -> KnownResults:
        """Return what earlier rows of the folder found that a case need not find again."""
        known, items = KnownResults(), micro_batch(case)
        for part, names in SHARED.items():
            first = self._found.get(_make_key(part, case, vars(environment)))
            # a model that was not examined may be another one; one item is not counted
            if not (first and environment.model_parameters) or (part == Trait.WORK and items == 1):
                continue
            cells, there, rows = first
            missing = read_missing(cells["missing"] or "")
            known.sources[part] = cells["record_id"]
            known.values.update((name, cells[name]) for name in names)
            known.missing.update((name, missing[name]) for name in names if name in missing)
            untimed = (replace(row, time_s=None, exclusive_s=None, kernels="") for row in rows)
            known.work.extend(add_items(row, items - there) for row in untimed)
        return known

    def learn(self, record: Record, work: Sequence[WorkRow]) -> None:
        _learn(self._found, record.case, flatten(record), lambda: work)

    @cached_property
    def _found(self) -> Found:
        """What the rows of the folder found, earlier ones included; read on first use."""
        found: Found = {}
        with suppress(UsageError):  # an unreadable file counts as empty
            frame = read_records(self.store.folder)
            frame = frame[frame["status"] == str(Status.OK)]
            table = read_work(self.store.folder)
            parts = dict(iter(table.groupby("record_id", sort=False)))
            for case, row in zip(read_cases(frame), frame.to_dict("records"), strict=True):
                cells = {str(name): None if v == "" or v != v else v for name, v in row.items()}
                rows = parts.get(row["record_id"], table[:0])
                _learn(found, case, cells, partial(list_work, rows))
        return found

    def rate(self, lane: Lane, device: str) -> None:
        """Measure the rates of a lane before its first case, unless its folder has them, and warn
        of slow ones and of precisions that the device emulates. On a cluster each node measures its
        own."""
        if (lane.name, device) in self.rated:
            return
        first = all(device != other for _, other in self.rated)
        self.rated.add((lane.name, device))
        if self.options.here and (seconds := choose_seconds(device)):
            self._find_rates(lane, device, seconds)
        if first:
            cases = [c for c in self.planned if c.device == device and not self.refuse(c)]
            inputs = self.lanes[lane.name]
            self.say(warn_of_emulation(cases, inputs.platforms, inputs.models))

    def _find_rates(self, lane: Lane, device: str, seconds: float) -> None:
        inputs = self.lanes[lane.name]
        platform = inputs.platforms[device]
        if (known := read_rates(platform, self.store.folder)).rates:
            self.lanes[lane.name] = inputs.add_rates(device, known)
            return
        environment = platform.environment
        title = " · ".join(filter(None, [lane.name, environment.gpu or "the CPU"]))
        name = environment.gpu or "the CPU"
        name = f"{lane.name}, {name}," if lane.name else name
        self.display.say(f"measuring what {name} can do now")
        found = self.executor.rate(lane, device, seconds)
        self.lanes[lane.name] = inputs.add_rates(device, found)
        self.display.say(f"{title}: {describe_rates(found, environment.gpu) or 'not known'}")
        self.say(f"note: {column} was not measured: {why}" for column, why in found.reasons.items())
        self.say(write_rate_warnings(found, environment.gpu))
        earlier = read_earlier(platform, self.store.folder.parent)
        if slower := describe_slowdown(found.rates, earlier):
            fix = "python -m bench.doctor names what else uses it, or slows it down"
            self.display.say(f"warning: {environment.gpu or environment.cpu} gives {slower}; {fix}")

    def _place_trace(self, ticket: Ticket) -> Path | None:
        if not (ticket.run[0].profile and self.options.trace):
            return None
        return self.store.folder / TRACES / f"{ticket.file_name}.json.gz"

    def _keep_run(self, ticket: Ticket) -> KeptRun:
        folder = f"{ticket.slug}-{ticket.run_name}"
        return KeptRun(self.store.folder / CHECKPOINTS / folder, ticket.run_name)
