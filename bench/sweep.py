"""`python -m bench.sweep`: cases, one after another, into a folder of records."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.case import AXES, Case, Value, check_batches, format_value
from bench.data import DATASETS, DatasetInfo, prepare
from bench.environment import Platform, describe_host, has_cuda, probe, with_dataset
from bench.errors import UsageError, nearest
from bench.executors import EXECUTORS, Executor, Job, Settings, build_executor
from bench.flags import Parser, add_axes, read_axes, run_command
from bench.models import MODELS
from bench.precision import PRECISIONS
from bench.preset import Preset, load_config, load_preset, preset_names
from bench.progress import Display
from bench.record import COMPARABLE, Environment, Outcome, Record, Status, flatten
from bench.schedule import Wall, plan_runs, remaining_runs
from bench.store import LOGS, Past, Run, Store, StoreError, clean, read_history, read_records


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
    cases = choose_cases(options)
    if options.dry_run:
        return print_cases(cases)
    try:
        return run_sweep(cases, options)
    except StoreError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return 1


def run_sweep(cases: list[Case], options: Options) -> int:
    """Measure the cases into --out and print the table; the return code."""
    refuse_unwritable(options.out)
    platforms = probe_platforms(cases, options)
    datasets = prepare_datasets(cases, options)
    out = options.out or default_out(platforms)
    with Store(out, options.wait_s, say_waiting) as store:
        done, before = read_past(out, cases, options, platforms, datasets)
        store.write_config(describe_config(cases, options, platforms, datasets))
        plan = plan_runs(cases, options.repeats)
        runs = remaining_runs(plan, done, options.retry, options.no_skip)
        wall = None if options.no_skip else Wall({r: done[r] for r in done.keys() - set(runs)})
        executor = build_executor(
            options.executor, Settings(options.timeout_s, options.allow_shared)
        )
        with Display(out, len(runs), len(done)) as display, stop_signals(executor) as stopped:
            for line in store.set_aside:
                display.say(line)
            loop = Loop(store, executor, display, platforms, datasets, options)
            measured = loop.run(runs, before, wall, stopped)
    print_report(out)
    if stopped():
        print(f"stopped: the same command with --out {out} goes on from here", file=sys.stderr)
        return 128 + stopped()
    return 0 if measured or not runs else 1


@dataclass
class Loop:
    """Each run to its record, written as it ends."""

    store: Store
    executor: Executor
    display: Display
    platforms: Mapping[str, Platform]
    datasets: Mapping[str, DatasetInfo]
    options: Options

    def run(
        self,
        runs: Sequence[Run],
        before: Mapping[Run, Past],
        wall: Wall | None,
        stopped: Callable[[], int],
    ) -> bool:
        """Run all of ``runs`` or until stopped; whether any ended other than in failure.

        Args:
            before: the attempts that the records already hold.
            wall: which cases need not be run, if any may be skipped.
        """
        measured = False
        for run in runs:
            if stopped():
                break
            case, repeat, sentinel = run
            self.display.begin(case, repeat, sentinel)
            started = _now()
            smaller = wall.blocks(case) if wall else None
            attempt = before[run].attempt + 1 if run in before else 1
            log = f"{LOGS}/{case.slug()}-{'s' if sentinel else repeat}-{attempt}.log"
            if smaller is not None:
                outcome = Outcome(Status.OOM, f"batch size {smaller} already ran out of memory")
            else:
                outcome = self._answer(case, self.store.folder / log, stopped)
            environment = with_dataset(
                self.platforms[case.device].environment, self.datasets[case.dataset]
            )
            record = Record(
                record_id=uuid4().hex[:16],
                case=case,
                repeat=repeat,
                sentinel=sentinel,
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
                environment=environment,
            )
            self._keep(record, outcome)
            self.display.end(record)
            if wall and smaller is None:
                wall.note(case, outcome.status)
            measured |= outcome.status not in (Status.ERROR, Status.KILLED, Status.TIMEOUT)
        return measured

    def _answer(self, case: Case, log: Path, stopped: Callable[[], int]) -> Outcome:
        platform, precision = self.platforms[case.device], PRECISIONS[case.precision]
        reason = platform.refuse(precision)
        emulated = "" if "precision" in self.options.axes else platform.discourage(precision)
        if emulated and not reason:
            reason = f"{emulated}; --precision {precision.name} measures it all the same"
        if reason:
            return Outcome(Status.UNSUPPORTED, reason)
        folder, uuid = self.datasets[case.dataset].folder, platform.environment.gpu_uuid
        job = Job(case, folder, uuid, log)
        return self.executor.run(job, self.display.show, lambda: bool(stopped()))

    def _keep(self, record: Record, outcome: Outcome) -> None:
        try:
            self.store.append(record, outcome.steps)
        except StoreError:
            # the disk is full, the terminal is not: what was measured is not lost
            row = {name: v for name, v in flatten(record).items() if v not in (None, "")}
            self.display.say(f"not written: {row}")
            raise


@dataclass
class Options:
    """The command line, parsed and checked; ``axes`` holds those given as flags."""

    axes: dict[str, list[Value]]
    preset: Preset
    out: Path | None
    data_dir: Path | None
    data_url: str | None
    repeats: int
    timeout_s: float
    wait_s: float
    retry: list[Status]
    executor: str
    mix: bool
    no_skip: bool
    allow_shared: bool
    dry_run: bool
    list: bool
    command: str


def build_parser() -> Parser:
    """The command line: a flag for every axis, and what is not an axis."""
    parser = Parser(
        prog="python -m bench.sweep",
        usage="%(prog)s [--preset NAME | --config FILE] [--AXIS VALUE …] [--out DIR] […]",
        description="Train one epoch per case, over precisions, batch sizes and loss scales; "
        "record time, memory and learning.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--preset", metavar="NAME", help="a named grid of cases, see --list")
    what.add_argument("--config", metavar="FILE", type=Path, help="a grid of your own, in TOML")
    what.add_argument("--repeats", metavar="N", default="1", help="fresh processes per case")
    add_axes(parser, "each takes one value or several, and overrides the preset's")
    data = parser.add_argument_group("images")
    data.add_argument("--data-dir", metavar="DIR", type=Path, help="where CIFAR-10 is (./data)")
    data.add_argument("--data-url", metavar="URL", help="a mirror of the CIFAR-10 archive")
    how = parser.add_argument_group("how")
    how.add_argument("--out", metavar="DIR", type=Path, help="results/ and GPU and time by default")
    how.add_argument("--retry", nargs="+", metavar="STATUS", default=[], help="run these again")
    how.add_argument("--timeout", metavar="S", default="3600", help="deadline of a phase (3600)")
    how.add_argument("--wait", metavar="S", default="0", help="wait for another sweep on --out")
    how.add_argument("--mix", action="store_true", help="add to rows of another GPU, torch or code")
    how.add_argument("--no-skip", action="store_true", help="try batches larger than one that OOMs")
    how.add_argument("--allow-shared", action="store_true", help="measure on a card others use")
    how.add_argument("--executor", default="subprocess", help=argparse.SUPPRESS)
    how.add_argument("--dry-run", action="store_true", help="print the cases and run nothing")
    how.add_argument("--list", action="store_true", help="print presets, precisions, models, …")
    return parser


def parse_arguments(argv: Sequence[str]) -> Options:
    """Parse and check a command line.

    Raises:
        UsageError: a flag or value is wrong.
    """
    given = build_parser().parse(argv)
    if given.preset and given.config:
        raise UsageError("--preset and --config are both given; use one")
    if given.executor not in EXECUTORS:
        raise UsageError(f"--executor {given.executor!r}; {nearest(given.executor, [*EXECUTORS])}")
    axes = read_axes(given)
    default = "rtx-titan" if "cuda" in axes.get("device", []) or _cuda_by_default(axes) else "quick"
    preset = load_config(given.config) if given.config else load_preset(given.preset or default)
    return Options(
        axes=axes,
        preset=preset,
        out=given.out,
        data_dir=given.data_dir,
        data_url=given.data_url,
        repeats=int(_parse_number("--repeats", given.repeats, whole=True)),
        timeout_s=_parse_number("--timeout", given.timeout),
        wait_s=_parse_number("--wait", given.wait, low=0),
        retry=[_parse_status(text) for text in given.retry],
        executor=given.executor,
        mix=given.mix,
        no_skip=given.no_skip,
        allow_shared=given.allow_shared,
        dry_run=given.dry_run,
        list=given.list,
        command=shlex.join(["python", "-m", "bench.sweep", *argv]),
    )


def _cuda_by_default(axes: Mapping[str, object]) -> bool:
    return "device" not in axes and has_cuda()


def _parse_number(flag: str, text: str, low: float = 0.001, whole: bool = False) -> float:
    right = "a whole number of at least 1" if whole else f"a number of seconds, at least {low:g}"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not (1 if whole else low) <= value < 1e9:
        raise UsageError(f"{flag} {text!r}: give {right}")
    return value


def _parse_status(text: str) -> Status:
    if text not in list(Status):
        raise UsageError(f"--retry {text!r}: {nearest(text, [str(s) for s in Status])}")
    return Status(text)


def choose_cases(options: Options) -> list[Case]:
    """Expand preset and flags to cases; the device is the GPU where there is one.

    Raises:
        UsageError: a loss scale is given that no chosen precision uses.
    """
    device = "cuda" if has_cuda() else "cpu"
    return options.preset.cases(options.axes, {"device": [device]})


def print_registries() -> int:
    """Print what can be named on the command line."""
    sections = {
        "presets": {name: load_preset(name).description for name in preset_names()},
        "precisions": {name: precision.help for name, precision in PRECISIONS.items()},
        "models": {**MODELS, "package.module:factory": "your own torch.nn.Module"},
        "datasets": DATASETS,
    }
    for title, entries in sections.items():
        print(f"{title}:")
        for name, help in entries.items():
            print(f"  {name:<24}{help}")
    return 0


def print_cases(cases: Sequence[Case]) -> int:
    """Print the cases: what varies, a line each; then what all share."""
    varies = [n for n in AXES if len({getattr(case, n) for case in cases}) > 1]
    shared = [n for n in AXES if n not in varies]
    for index, case in enumerate(cases, 1):
        print(f"{index:>4}  {case.label(varies or ['precision', 'loss_scale', 'batch_size'])}")
    settings = ((name, format_value(getattr(cases[0], name))) for name in shared)
    print("all:  " + ", ".join(f"{name} {text}" for name, text in settings if text))
    return 0


def refuse_unwritable(out: Path | None) -> None:
    """Refuse an --out that no folder can be made at, before anything costs time.

    Raises:
        UsageError: it is a file, or nothing can be written there.
    """
    place = (out or Path("results")).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(f"--out {out}: {place} is a file; choose a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {place} cannot be written to; choose a folder that can")


def probe_platforms(cases: Sequence[Case], options: Options) -> dict[str, Platform]:
    """Ask about each device the cases name, and refuse what was asked of it by name in vain.

    Raises:
        UsageError: torch cannot use the device; a precision given as a flag cannot run there; or
            others use the card and --allow-shared is not given.
    """
    devices = {case.device for case in cases}
    if options.executor == "fake":
        return {device: Platform(describe_host()) for device in devices}
    platforms = {device: probe(device) for device in devices}
    for case in cases:
        reason = platforms[case.device].refuse(PRECISIONS[case.precision])
        if reason and "precision" in options.axes:
            raise UsageError(f"--precision {case.precision}: {reason}; leave it out")
    for platform in platforms.values():
        uuid = platform.environment.gpu_uuid
        if uuid and not options.allow_shared:
            refuse_neighbours(uuid)
    return platforms


def refuse_neighbours(uuid: str) -> None:
    """Refuse a card that others use.

    Raises:
        UsageError: it names their processes.
    """
    from bench.gpu import find_neighbours

    # what draws a desktop does not count: it is noted in the records
    if neighbours := [p for p in find_neighbours(uuid) or () if not p.display]:
        who = ", ".join(map(str, neighbours))
        raise UsageError(f"the GPU is in use by {who}; end them, or measure with --allow-shared")


def prepare_datasets(cases: Sequence[Case], options: Options) -> dict[str, DatasetInfo]:
    """Decode every dataset the cases name, once, and check the batch sizes against it.

    Raises:
        UsageError: a dataset cannot be had or read, or a batch size does not fit it.
    """
    from bench.data import progress_bar

    with progress_bar() as progress:
        datasets = {
            name: prepare(name, data_dir=options.data_dir, url=options.data_url, progress=progress)
            for name in dict.fromkeys(case.dataset for case in cases)
        }
    for case in cases:
        check_batches(case, datasets[case.dataset].train_images)
    return datasets


def default_out(platforms: Mapping[str, Platform]) -> Path:
    """results/ and the GPU and the time."""
    names = (platform.environment.gpu or "cpu" for platform in platforms.values())
    words = "-".join("".join(c if c.isalnum() else " " for c in n).lower() for n in names).split()
    return Path("results") / f"{'-'.join(words)}-{datetime.now():%Y%m%d-%H%M%S}"


def say_waiting(who: str) -> None:
    """Say on whom the sweep waits."""
    print(f"waiting for {who}", file=sys.stderr, flush=True)


def read_past(
    out: Path,
    cases: Sequence[Case],
    options: Options,
    platforms: Mapping[str, Platform],
    datasets: Mapping[str, DatasetInfo],
) -> tuple[dict[Run, Past], dict[Run, Past]]:
    """What the records hold: the runs whose rows this sweep's can be compared with, and all.

    Raises:
        UsageError: some cannot be compared, and --mix is not given; it says in which respects.
    """
    frame = read_records(out)
    comparable, differing = frame["repeat"] >= 0, dict[str, None]()
    for device, dataset in dict.fromkeys((case.device, case.dataset) for case in cases):
        environment = with_dataset(platforms[device].environment, datasets[dataset])
        here = (frame["device"] == device) & (frame["dataset"] == dataset)
        for name in COMPARABLE:
            now = clean(getattr(environment, name) or "")
            unlike = here & (frame[name] != now)
            comparable &= ~unlike
            for before in frame[name][unlike].unique():
                differing[f"{name} was {before or 'none'}, now {now or 'none'}"] = None
    if differing and not options.mix:
        raise UsageError(
            f"--out {out}: holds rows that would not be comparable: {'; '.join(differing)}; "
            "choose another --out, or add to them with --mix"
        )
    past = read_history(frame)
    return (read_history(frame[comparable]) if differing else past), past


def describe_config(
    cases: Sequence[Case],
    options: Options,
    platforms: Mapping[str, Platform],
    datasets: Mapping[str, DatasetInfo],
) -> dict[str, Any]:
    """The resolved configuration: what was asked for, by which command, on what."""
    return {
        "command": options.command,
        "preset": options.preset.name,
        "repeats": options.repeats,
        "cases": [{name: format_value(getattr(case, name)) for name in AXES} for case in cases],
        "environment": {
            device: _known(platform.environment) for device, platform in platforms.items()
        },
        "datasets": {
            name: {k: v for k, v in asdict(info).items() if k != "folder"}
            for name, info in datasets.items()
        },
    }


def _known(environment: Environment) -> dict[str, Any]:
    return {name: value for name, value in asdict(environment).items() if value is not None}


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
