"""`python -m bench.sweep`: train every case once and record time, memory and learning."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from bench.case import Case, telling_axes
from bench.doctor.rates import choose_seconds, describe_rates, measure_rates
from bench.environment import PACKAGES, refuse_missing
from bench.executors import Executor, Job, Settings, build_executor
from bench.flags import run_command
from bench.precision import PRECISIONS
from bench.record import EpochRow, Outcome, Record, Status, flatten
from bench.store.cells import CHECKPOINTS, LOGS, TRACES
from bench.store.reader import Past, Run, read_history
from bench.store.writer import Store, StoreError
from bench.sweep.checkpoints import KeptRun
from bench.sweep.display import Display, write_curve
from bench.sweep.options import (
    Options,
    Plan,
    parse_arguments,
    plan_cases,
    print_cases,
    print_registries,
)
from bench.sweep.preflight import (
    Inputs,
    default_out,
    describe_config,
    find_inputs,
    leave_out_batches,
    read_past,
    refuse_other_seeds,
    refuse_searches,
    refuse_unwritable,
    try_models,
)
from bench.sweep.probing import describe_wall, find_walls
from bench.sweep.schedule import OomSkips, choose_seed, plan_runs, remaining_runs
from bench.sweep.slowdown import describe_slowdown, recall_rates
from bench.text import clean
from bench.wall.answer import Wall
from bench.wall.search import MARGIN, STEP, Ending


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep.

    Returns:
        0; 1 where the disk is full or nothing could be measured; 2 for a usage error; 130 or 143
        where it was stopped.
    """
    return run_command(sweep, argv)


def sweep(argv: Sequence[str]) -> int:
    """Do what the command line says; the return code.

    Raises:
        UsageError: it cannot be done.
    """
    options = parse_arguments(argv)
    if options.list:
        return print_registries()
    plan = plan_cases(options, {})
    if options.dry_run:
        settle = try_models([*plan.cases, *plan.unsized], options)
        return print_cases(plan_cases(options, {}, settle), options.repeats)
    try:
        return run_sweep(plan, options)
    except StoreError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return 1


def run_sweep(asked: Plan, options: Options) -> int:
    """Measure the cases into --out and print the table; the return code."""
    refuse_unwritable(options.out)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # whose lack is noted
    inputs = find_inputs(asked.cases, options, asked.unsized)
    asked = plan_cases(options, {}, inputs.settle)
    families = asked.families
    refuse_searches(asked.searched, inputs)
    out = options.out or default_out(inputs.platforms)
    with Store(out, options.wait_s, say_waiting) as store:
        comparable, frame = read_past(out, [*asked.cases, *asked.unsized], options, inputs)
        done, before = read_history(comparable), read_history(frame)
        earlier = store.read_config()
        search = {"step": STEP, "margin": MARGIN} if families else None
        store.write_config(describe_config(asked.cases, options, inputs, earlier, search))
        executor = build_executor(
            options.executor, Settings(options.timeout_s, options.allow_shared)
        )
        with stop_signals(executor) as stopped:
            notes = [*inputs.warnings, *store.set_aside]
            loop = Loop(store, executor, inputs, options, notes)
            cases, measured, walls = asked.cases, False, dict[Case, Wall]()
            if families:
                walls = find_walls(loop, families, comparable, stopped)
                cases, left_out = leave_out_batches(
                    plan_cases(options, walls, inputs.settle).cases, inputs
                )
                loop.notes += left_out
                store.write_config(describe_config(cases, options, inputs, earlier, search))
                measured = any(wall.largest is not None for wall in walls.values())
            plan = plan_runs(cases, options.repeats)
            refuse_other_seeds(out, plan, done, options.same_seed)
            runs = remaining_runs(plan, done, options.retry, options.no_skip)
            skips = (
                None if options.no_skip else OomSkips({r: done[r] for r in done.keys() - set(runs)})
            )
            axes = telling_axes(case for case, _, _ in [*plan, *before])
            with Display(out, len(runs), len(plan) - len(runs), axes) as display:
                loop.show_on(display)
                measured |= loop.run(runs, before, skips, stopped)
    print_report(out)
    lost = {family: wall for family, wall in walls.items() if wall.ending and not wall.recommended}
    for family, wall in lost.items():
        name = family.label(telling_axes(families, but="batch_size"))
        print(f"warning: no batch size for {name}: {describe_wall(wall)}", file=sys.stderr)
    if stopped():
        print(f"stopped; run the same command with --out {out} to continue", file=sys.stderr)
        return 128 + stopped()
    failed = any(wall.ending is not Ending.UNSUPPORTED for wall in lost.values())
    return 1 if failed or ((runs or families) and not measured) else 0


@dataclass
class Loop:
    """Each run to its record, written as it ends."""

    store: Store
    executor: Executor
    inputs: Inputs
    options: Options
    notes: list[str] = field(default_factory=list)
    display: Display = field(init=False)
    rated: set[str] = field(default_factory=set)  # devices whose rates were measured

    def show_on(self, display: Display) -> None:
        """Show runs on ``display`` from now on; first, once, the notes."""
        self.display = display
        for line in self.notes:
            display.say(line)
        self.notes = []

    def run(
        self,
        runs: Sequence[Run],
        before: Mapping[Run, Past],
        skips: OomSkips | None,
        stopped: Callable[[], int],
    ) -> bool:
        """Run all of ``runs`` or until stopped; whether any ended other than in failure.

        Args:
            before: the attempts that the records already hold.
            skips: which cases need not be run, if any may be skipped.
        """
        measured = False
        for run in runs:
            if stopped():
                break
            case = run[0]
            smaller = skips.blocks(case) if skips else None
            attempt = before[run].attempt + 1 if run in before else 1
            record = self.measure(run, attempt, stopped, smaller)
            if skips and smaller is None:
                skips.note(case, record.status)
            measured |= record.status not in (Status.ERROR, Status.KILLED, Status.TIMEOUT)
        return measured

    def measure(
        self,
        run: Run,
        attempt: int,
        stopped: Callable[[], int],
        smaller: int | None = None,
        probe: bool = False,
        enough: Callable[[EpochRow], bool] | None = None,
    ) -> Record:
        """Make one run, write its record and show it.

        Args:
            smaller: the batch size of which it is concluded that this one runs out of memory.
            probe: whether it is a step of a search.
            enough: whether it is to end after an epoch, see `Job`.
        """
        case, repeat, sentinel = run
        self._measure_rates(case.device)
        seed = choose_seed(run, self.options.same_seed)
        self.display.begin(case, repeat, sentinel)
        started = _now()
        which = "s" if sentinel else "p" if probe else repeat
        name = f"{case.slug()}-{which}-{attempt}"
        log, trace = f"{LOGS}/{name}.log", self.store.folder / TRACES / f"{name}.json.gz"
        kept = KeptRun(self.store.folder / CHECKPOINTS / f"{case.slug()}-{which}", str(which))
        if smaller is not None:
            outcome = Outcome(Status.OOM, f"batch size {smaller} already ran out of memory")
        else:
            job = Job(replace(case, seed=seed), log=self.store.folder / log, enough=enough)
            if case.profile and self.options.trace:
                job = replace(job, trace=trace)
            outcome = self._answer(job, kept, stopped)
        record = Record(
            record_id=uuid4().hex[:16],
            case=case,
            repeat=repeat,
            run_seed=seed,
            sentinel=sentinel,
            probe=probe,
            anchor="",
            lane="",
            lanes_beside=0,
            attempt=attempt,
            status=outcome.status,
            reason=outcome.reason,
            inferred=smaller is not None,
            executor=self.options.executor,
            started_at=started,
            finished_at=_now(),
            retries=outcome.retries,
            log=log if (self.store.folder / log).exists() else "",
            measurement=outcome.measurement,
            environment=self.inputs.describe(case),
        )
        self._keep(record, outcome)
        kept.finish(record)
        self.display.end(record)
        if trace.exists():
            self.display.say(f"trace, for https://ui.perfetto.dev: {trace}")
        if self.options.verbose:
            for line in write_curve(outcome.steps, outcome.measurement.steps_per_epoch):
                self.display.say(line)
        return record

    def _measure_rates(self, device: str) -> None:
        """Measure once what a device can do, before the first case that is to run there."""
        if device in self.rated or self.options.executor == "fake":
            return
        self.rated.add(device)
        if not (seconds := choose_seconds(device)):
            return
        environment = self.inputs.platforms[device].environment
        if rates := recall_rates(environment, self.store.folder):
            self.inputs = self.inputs.add_rates(device, rates)
            return
        name = environment.gpu or "the CPU"
        self.display.say(f"measuring what {name} can do now")
        found = measure_rates(device, seconds)
        self.inputs = self.inputs.add_rates(device, found.rates)
        environment = self.inputs.platforms[device].environment
        self.display.say(f"{name}: {describe_rates(found, environment.gpu) or 'not known'}")
        for column, why in found.reasons.items():
            self.display.say(f"note: {column} was not measured: {why}")
        for line in describe_slowdown(environment, self.store.folder.parent):
            self.display.say(line)

    def _answer(self, job: Job, kept: KeptRun, stopped: Callable[[], int]) -> Outcome:
        """Run a job whose data and GPU are yet to be filled in, unless it is refused."""
        case = job.case
        platform, precision = self.inputs.platforms[case.device], PRECISIONS[case.precision]
        reason = self.inputs.refuse(case)
        emulated = "" if "precision" in self.options.axes else platform.discourage(precision)
        if emulated and not reason:
            reason = f"{emulated}; --precision {precision.name} measures it anyway"
        if reason:
            return Outcome(Status.UNSUPPORTED, reason)
        folder, uuid = self.inputs.data(case).folder, platform.environment.gpu_uuid
        job = replace(job, folder=folder, gpu_uuid=uuid)
        if case.checkpoint:
            kept.open()
            identity = kept.identify(case, self.inputs.describe(case))
            job = replace(job, checkpoints=kept.folder, identity=identity)
        return self.executor.run(job, self.display.show, lambda: bool(stopped()))

    def _keep(self, record: Record, outcome: Outcome) -> None:
        try:
            self.store.append(record, outcome.steps, outcome.epochs, outcome.work, outcome.ranks)
        except StoreError:
            # the disk is full, the terminal is not: what was measured is not lost
            row = {name: v for name, v in flatten(record).items() if v not in (None, "")}
            self.display.say(f"not written: {row}")
            raise


def say_waiting(who: str) -> None:
    """Say on whom the sweep waits."""
    print(f"waiting for {who}", file=sys.stderr, flush=True)


@contextmanager
def stop_signals(executor: Executor) -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C or SIGTERM into a clean stop, and the second into an immediate one.

    Yields:
        A function that returns the number of the signal that came, 0 before.
    """
    received = 0

    def stop(number: int, _: object) -> None:
        nonlocal received
        if received:
            executor.kill()
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the live line hides the cursor
            os._exit(128 + number)
        received = number
        # print() may have been interrupted half way and cannot be entered twice
        os.write(2, b"\nstopping: what is done is kept; again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_report(out: Path) -> None:
    """Print the sweep's tables."""
    from bench.report.__main__ import main as report

    report([str(out)])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


if __name__ == "__main__":
    sys.exit(main())
