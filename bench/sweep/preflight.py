"""What precedes training: lanes are opened and examined, and cases are checked against them."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from bench.base.errors import UnsupportedError, UsageError
from bench.base.processes import OtherWork, choose_threads, count_cores, usable_cpus
from bench.base.text import GIB, count, name_first
from bench.machine.host import PACKAGES, THREADS, has_cuda, refuse_missing
from bench.machine.nvml import find_cards, find_neighbours
from bench.machine.power import refuse_limits, restore_limits
from bench.networks.data import SYNTHETIC, DatasetInfo
from bench.networks.data.cifar10 import CLASSES
from bench.networks.models import LENGTHS, MODELS
from bench.networks.workloads import IMAGES, NO_DATASET, OWN
from bench.results.store.reader import read_sources, read_there
from bench.results.store.rows import Row, count_checks, plan_runs
from bench.schema.case import (
    AXES,
    Case,
    fill_command,
    find_axis,
    list_axes,
    list_varying,
    spell_flag,
    supposes_items,
)
from bench.schema.command import refuse_program
from bench.schema.precision import PRECISIONS, find_apex
from bench.schema.record import MODEL_PARTS
from bench.schema.rules import takes
from bench.sweep.inputs import Inputs, name_data
from bench.sweep.largest_batch import USUAL
from bench.sweep.options import Options, Plan
from bench.sweep.versions import Versions
from bench.workers.examination import Machine, Platform, examine, guess_devices
from bench.workers.executors import Executor, ImageRequest, build_executor
from bench.workers.executors.subprocess import list_limited
from bench.workers.fingerprint import Fingerprint, list_requests, name_subject
from bench.workers.job import Lane
from bench.workers.judgement import write_warnings

_SHOWN = 12  # lines of cases in a dry run

_AT_ONCE = 8  # lanes examined at once, each by a process of its own

_WATCHED_S = 1.0  # for which the load of a CPU is watched


@dataclass(frozen=True)
class Settled:
    """A plan that can be run: its ``inputs``, with the cases that are left of it, where they go,
    and the lanes that an executor holds for them, with the devices of each."""

    options: Options
    inputs: Inputs
    executor: Executor
    lanes: dict[Lane, dict[str, Platform]]
    out: Path


@contextmanager
def settle(asked: Plan, options: Options) -> Iterator[Settled]:
    """Check a plan, open and examine its lanes, and hold them; and put back the power limits that
    killed sweeps left. Raises UsageError: --out cannot be written, a program or package is missing,
    or as `open_lanes` and `check`."""
    _refuse_at_once(asked, options)
    for line in restore_limits():
        print(line, file=sys.stderr, flush=True)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # only noted if missing
    cases = asked.all_cases
    number = choose_number(cases, options)
    if number is not None:
        print(
            f"note: an operation takes {count(number, 'thread')}, as many as cores were free "
            f"when the folder was begun; {THREADS[0]} sets another number",
            file=sys.stderr,
            flush=True,
        )
    with (
        hold_threads(number),
        closing(build_executor(options.executor, options.settings)) as executor,
    ):
        lanes = open_lanes(executor, cases, options)
        inputs, platforms = examine_lanes(executor, lanes, asked, options)
        out = options.out or default_out(inputs.platforms)
        yield Settled(options, inputs, executor, platforms, out)


def check_without_torch(
    asked: Plan,
    options: Options,
    rows: Sequence[Row] = (),
    prepare: Callable[[ImageRequest], DatasetInfo] = ImageRequest.count,
) -> Inputs:
    """Check a plan as a start does, but ask torch only about the user's own networks, and about
    others that are frozen or start from a file, and decode no images unless ``prepare`` does.
    ``rows`` are those of the folder. Raises UsageError: as `settle`."""
    _refuse_at_once(asked, options)
    cases, known = asked.all_cases, dict[str, Platform]()
    with hold_threads(choose_number(cases, options, rows) if rows else None):
        if options.here:  # a cluster is only known once it was joined
            with closing(build_executor(options.executor, options.settings)) as executor:
                open_lanes(executor, cases, options)
            known = guess_devices()
        own = list_requests(filter(is_own, cases))
        machine = examine([], own, timeout_s=options.timeout_s) if own else Machine()
    machine = replace(machine, devices=known, apex=find_apex())
    inputs = check(asked, machine, options, prepare)
    emulated = warn_of_emulation(inputs.plan.all_cases, known)
    return replace(inputs, warnings=[*inputs.warnings, *emulated])


def check_here(cases: Sequence[Case], options: Options) -> Inputs:
    """Check cases of one device that this process itself is to train. Raises UsageError: one cannot
    run, or as `check`."""
    machine = examine([cases[0].device], list_requests(cases))
    return check(Plan([*cases]), machine, options, ImageRequest.prepare, every=True)


GUESSED = ("gpu", "driver", "cpu", "torch", "code", "variables", *MODEL_PARTS)
"""The columns of `COMPARABLE` that are known without torch, those of a model if it was examined."""


def is_own(case: Case) -> bool:
    """Return whether torch has to tell of the network: it is the user's, frozen or begun from a
    file."""
    return case.model not in MODELS or case.start is not None or case.freeze != Case.freeze


# --------------------------------------------------------------------------- before any examination


def refuse_unwritable(out: Path | None) -> None:
    """Refuse an --out that cannot be created or written to, before anything takes time."""
    out = out or Path("results")
    place = next(at for at in (out.absolute(), *out.absolute().parents) if at.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {place} is no folder that can be written to; choose one")


def _refuse_at_once(plan: Plan, options: Options) -> None:
    """Refuse what takes no examination: a folder, or commands whose program or script is not
    there."""
    refuse_unwritable(options.out)
    cases = plan.all_cases
    for command in dict.fromkeys(fill_command(case) for case in cases if case.command is not None):
        if why := refuse_program(command):
            alone = all(len(str(case.command).split()) == 1 for case in cases)
            fix = "; put the whole command in quotes" if alone and len(cases) > 1 else ""
            raise UsageError(f"--command: {why}{fix}")


# ---------------------------------------------------------------------------------------- the check


def check(
    plan: Plan,
    machine: Machine,
    options: Options,
    prepare: Callable[[ImageRequest], DatasetInfo],
    *,
    every: bool = False,
) -> Inputs:
    """Check the cases of a plan against the machine, and return what they train with, and warnings.

    What ``machine`` does not have is not known, as in a dry run, and so not checked. With ``every``
    each case must be able to run, and else any; then one that cannot gets a row that says why.

    Raises UsageError: torch cannot use a device, or it has less memory than a memory limit; a
    precision that a flag gives cannot run there, or no case can; others use the card and
    --allow-shared is not given; a model or dataset is broken or missing, or they do not go
    together; a batch size does not fit.
    """
    cases = plan.all_cases
    platforms = machine.use(dict.fromkeys(case.device for case in cases))
    for case in cases if "precision" in options.axes else ():
        platform = platforms.get(case.device) if case.command is None else None
        if platform and (why := platform.refuse(PRECISIONS[case.precision])):
            raise UsageError(f"--precision {case.precision}: {why}; leave it out")
    refuse_places(platforms, cases, options)
    models, datasets = _take_models(cases, machine, options), dict[str, DatasetInfo]()
    sources = read_sources(options.out) if options.out else None
    versions = Versions(sources, models, machine.starts)
    inputs = Inputs(platforms, models, datasets, plan, (), machine.apex, versions)
    settle = inputs.settle
    searched = [(settle(case), text) for case, text in plan.searched]
    plan = Plan(list(dict.fromkeys(map(settle, plan.cases))), searched)
    cases = plan.all_cases
    refused = [*map(inputs.refuse, cases)]
    if any(refused) and (every or all(refused)):
        reasons = dict.fromkeys(filter(None, refused))
        raise UsageError(f"cannot be trained here: {name_first([*reasons], 3, '; ')}")
    for name, case in {name_data(c): c for c in cases if c.workload == IMAGES}.items():
        asked = ImageRequest(case.dataset, options.data_dir, case.input, case.classes)
        datasets[name] = prepare(asked)
    for case in plan.cases:
        inputs.check_batches(case)
    warnings = list(dict.fromkeys(filter(None, map(inputs.warn_of_trial, cases))))
    if options.data_dir is not None and all(case.dataset == SYNTHETIC for case in cases):
        warnings.append(
            f"note: --data-dir {options.data_dir} is not used, because the images are synthetic; "
            f"give --dataset {Case.dataset} to train on it"
        )
    if not options.no_steps and any(supposes_items(case) for case in cases):
        warnings.append(
            "note: a step that is seen in the command is taken to be of its {batch_size} items, "
            "times the processes that train together; --items N or bench.step(items=…) says more"
        )
    tested = [datasets.get(name_data(case)) for case in plan.cases if case.evaluate]
    if any(info and info.folder and not info.test_images for info in tested):
        warnings.append(
            "warning: there are no test images, so that --evaluate measures nothing; download them "
            "too, or leave out --evaluate"
        )
    return replace(inputs, plan=plan, warnings=warnings)


def refuse_places(
    platforms: Mapping[str, Platform], cases: Sequence[Case], options: Options
) -> None:
    """Refuse memory limits above a device's memory, power limits that its card cannot have, and
    cards of this machine that others use."""
    for case in cases:
        if platform := platforms.get(case.device):
            platform.check_limit(case.memory_limit)
    if options.here and (cuda := platforms.get("cuda")):
        _refuse_power(cuda.environment.gpu_uuid, cases, options)
    for platform in platforms.values():
        uuid = platform.environment.gpu_uuid
        if not uuid or options.allow_shared or not options.here:
            continue
        neighbours = find_neighbours(uuid) or ()
        if neighbours and neighbours[0].pid == os.getpid():
            raise UsageError(
                "this process uses the GPU itself, and holds memory that cases lack: restart it, "
                "such as the kernel of a notebook, and measure before anything else uses the GPU, "
                "or measure with --allow-shared"
            )
        if neighbours:
            who = ", ".join(
                f"pid {p.pid}" + (f" ({p.bytes / GIB:.1f} GiB)" if p.bytes else "")
                for p in neighbours
            )
            raise UsageError(
                f"the GPU is in use by {who}; end them, or measure with --allow-shared"
            )


def _refuse_power(uuid: str | None, cases: Sequence[Case], options: Options) -> None:
    limits = sorted({case.power_limit for case in cases if case.power_limit is not None})
    if not limits:
        return
    # without torch it is not known which it takes of GPUs of one kind
    uuid = uuid or next((card.uuid for card in find_cards()[0]), None)
    chooses = cases[0].command is not None and options.lanes in (None, 1)
    for card in filter(None, list_limited(Lane(), uuid, chooses)):
        if why := refuse_limits(card, limits, not options.dry_run):
            raise UsageError(f"--power-limit: {why}")
        if card != uuid and find_neighbours(card):
            raise UsageError(
                f"--power-limit: others use {card}, which a --command may choose: name the GPUs "
                "that it is to use by CUDA_VISIBLE_DEVICES"
            )


def _take_models(
    cases: Iterable[Case], machine: Machine, options: Options
) -> dict[str, Fingerprint]:
    """Return the models of ``cases``. Raises UsageError: some cannot be trained, each of which has
    a line."""
    models, broken = dict[str, Fingerprint](), dict[str, str]()
    for case in (case for case in cases if case.command is None):
        found = machine.models.get(subject := name_subject(case))
        if isinstance(found, Fingerprint):
            models[subject] = found
            found = _refuse_model(case, found, options)
        if found:
            broken.setdefault(subject, found)
    if broken:
        raise UsageError(*broken.values())
    return models


def _refuse_model(case: Case, found: Fingerprint, options: Options) -> str:
    """Return why a model cannot be trained by the case; empty if it can."""
    facts, workload = found.workload, f"--workload {case.model}"
    if case.workload == IMAGES:
        classes = case.classes or CLASSES
        if found.outputs not in (None, classes):
            return (
                f"model {case.model!r} gives {(2, found.outputs)} for 2 images; it must give "
                f"{(2, classes)}, one logit for each class; bench.sweep --classes {found.outputs} "
                "has synthetic images of as many"
            )
    elif case.loader != Case.loader and facts and not facts.dataset:
        return f"workload {case.model!r}: {NO_DATASET}"
    elif facts and facts.optimizer and "optimizer" in options.axes and case.optimizer != OWN:
        return f"{workload} brings its own optimizer, {facts.optimizer}; leave out --optimizer"
    elif case.optimizer == OWN and not (facts and facts.optimizer):
        return f"{workload} brings no optimizer of its own; leave out --optimizer {OWN}"
    return ""


# ---------------------------------------------------------------------------------------- the lanes


def open_lanes(executor: Executor, cases: Sequence[Case], options: Options) -> Sequence[Lane]:
    """Open the requested lanes. Raises UsageError: they are too many, of several kinds, or of
    several devices; or there are too few GPUs for a --world-size: says how many there are."""
    devices = list(dict.fromkeys(case.device for case in cases))
    if len(devices) > 1 and options.lanes not in (None, 1):
        raise UsageError(f"--lanes: the cases are of {' and '.join(devices)}; give one --device")
    lanes = executor.open_lanes(devices[0], options.lanes)
    sizes = dict.fromkeys((case.device, case.world_size) for case in cases)
    for device, size in sizes if "world_size" in options.axes else ():
        try:
            executor.gather(lanes[0], device, size)
        except UnsupportedError as error:
            raise UsageError(f"--world-size {size}: {error}") from None
    return lanes


def examine_lanes(
    executor: Executor, lanes: Sequence[Lane], asked: Plan, options: Options
) -> tuple[Inputs, dict[Lane, dict[str, Platform]]]:
    """Return what the cases train with, and the devices of each lane: of the others the same kinds
    as of the first, which on a cluster speaks for all. Raises UsageError: as `check`."""
    first, *others = lanes
    cases = asked.all_cases
    devices = list(dict.fromkeys(case.device for case in cases))
    machine = examine(
        devices,
        list_requests(cases),
        data_dir=options.data_dir,
        out=options.out,
        timeout_s=options.timeout_s,
        ask=partial(executor.examine, first),
    )
    inputs = check(asked, machine, options, partial(executor.prepare, first))
    inputs = replace(inputs, warnings=[*write_warnings(machine), *inputs.warnings])

    def look(lane: Lane) -> dict[str, Platform]:
        platforms = executor.examine(lane, devices, [], options.timeout_s).use(devices)
        refuse_places(platforms, cases, options)
        return platforms

    if not options.here:
        return inputs, dict.fromkeys(lanes, inputs.platforms)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        platforms = [inputs.platforms, *pool.map(look, others)]
    return inputs, dict(zip(lanes, platforms, strict=True))


def default_out(platforms: Mapping[str, Platform]) -> Path:
    """Return a new folder in ``results``, named after the devices."""
    names = "-".join(platform.environment.gpu or "cpu" for platform in platforms.values())
    words = "-".join(re.findall(r"[^\W_]+", names.lower()))
    return Path("results") / f"{words}-{datetime.now():%Y%m%d-%H%M%S}"


def choose_number(
    cases: Sequence[Case], options: Options, rows: Sequence[Row] | None = None
) -> int | None:
    """Return how many threads an operation of the workers takes that run alone on the CPU: as many
    as cores are free (`choose_threads`), or as before if ``rows`` of the folder, which are read
    where they are needed, are of a CPU. None for torch's default, or what a variable that the user
    has set says."""
    alone = options.here and options.lanes in (None, 1) and not {*THREADS} & {*os.environ}
    if not (alone and all(case.device == "cpu" and case.world_size == 1 for case in cases)):
        return None
    rows = read_there(options.out) if rows is None else rows
    for row in (row for row in reversed(rows) if row.device == "cpu"):
        kept = re.search(rf"\b{THREADS[0]}=([0-9]+)", row.variables)
        return int(kept[1]) if kept else None
    others = OtherWork()
    with others.watch():
        time.sleep(_WATCHED_S)
    return choose_threads(count_cores(), others.cores(), len(usable_cpus()))


@contextmanager
def hold_threads(number: int | None) -> Iterator[None]:
    """Let an operation of the workers that are started in the block take so many threads; None for
    as many as without it."""
    if number is None:
        yield
        return
    os.environ[THREADS[0]] = str(number)
    try:
        yield
    finally:
        del os.environ[THREADS[0]]


# ----------------------------------------------------------------------------------- what is said


def warn_of_emulation(
    cases: Sequence[Case],
    platforms: Mapping[str, Platform],
    models: Mapping[str, Fingerprint] | None = None,
) -> list[str]:
    """Return a warning for each reason why ``cases`` may be slow on the devices of ``platforms``,
    which emulate them: by their rates where they were measured, as no flag tells of some
    instructions. The convolutions' do not count if the network of ``models`` has none."""
    emulated: dict[str, dict[str, None]] = {}
    shorter = [
        flag for flag in ("--fraction", "--batch-size") if any(takes(case, flag) for case in cases)
    ]
    for case in cases:
        precision, platform = PRECISIONS[case.precision], platforms.get(case.device)
        if platform is None or platform.refuse(precision):
            continue
        model = (models or {}).get(name_subject(case))
        convolves = model is None or model.convolves
        if reason := platform.find_emulation(precision, convolves):
            emulated.setdefault(reason, {})[case.precision] = None
    return [
        f"warning: {name_first(list(names), 4)} may be slow: {reason}; "
        f"leave out of --precision what is too slow, or lower {' or '.join(shorter) or 'its work'}"
        for reason, names in emulated.items()
    ]


def describe_plan(plan: Plan, options: Options) -> Iterator[str]:
    """Describe the number of runs, what differs between their cases, and what all have in common
    that is not the default."""
    cases = [*plan.cases, *(case for case, _ in plan.searched)]
    if plan.cases:
        runs = plan_runs(plan.cases, options.repeats)
        asked = f"{count(len(plan.cases), 'case')} with --repeats {options.repeats}"
        yield f"runs: {len(runs):,}, of {asked}{count_checks(runs)}"
    varies, others = list_varying(cases), list_varying(cases, but="batch_size")
    labels = [case.label(varies) for case in plan.cases]
    for case, text in plan.searched:
        labels.append(f"{case.label(others)} · batch size {text}, found by a search first")
    yield from (f"{index:>4}  {label}" for index, label in enumerate(labels[:_SHOWN], 1))
    if (more := len(labels) - _SHOWN) > 0:
        yield f"      and {more:,} more"
    if families := len(plan.families):
        each, duration = "each ", "all take is not known yet, and told after the first"
        if families == 1:
            each, duration = "", "it takes is not known yet"
        yield (
            f"searches: {families:,}, {each}by about {USUAL} probes of a few steps; how long "
            f"{duration}"
        )
    own = all(case.command is not None for case in cases)  # which has its axes from --command
    # what the name of a workload brings, of which --model names those of the harness
    named = (
        {"workload"} if all(case.workload in (IMAGES, *LENGTHS) for case in cases) else {"model"}
    )
    brought = named | {"dataset"} if all(case.workload != IMAGES for case in cases) else set()
    common = [
        shlex.join(spell_flag(name, getattr(cases[0], name)))
        for name in list_axes(cases)
        if len({getattr(case, name) for case in cases} - {find_axis(name).default, None}) == 1
        and name not in (*varies, *brought, *["workload"] * ("model" in varies))  # by its model
        and (name not in AXES or name in options.axes or not own)
    ]
    if common:
        yield f"all with {' '.join(common)}"
    if options.here and any(case.device == "cuda" for case in cases) and not has_cuda():
        yield (
            "warning: torch has no GPU here, so that a start on this machine is refused; use "
            "--device cpu, or start it where there is one"
        )
