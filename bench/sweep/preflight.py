"""What precedes training: lanes are opened and examined, and cases are checked against them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.base.errors import UnsupportedError, UsageError
from bench.base.inject import Files, Seen
from bench.base.progress import watch
from bench.base.text import GIB, count, name_first
from bench.machine.host import has_cuda
from bench.machine.nvml import find_neighbours
from bench.networks.data import SYNTHETIC, DatasetInfo
from bench.networks.data.sources import CLASSES
from bench.networks.models import MODELS
from bench.networks.workloads import IMAGES, NO_DATASET, OWN, Workload, WorkloadFacts
from bench.profile.rates import Yardstick
from bench.results.store.reader import read_config
from bench.results.store.rows import SOURCES, plan_runs
from bench.schema.axis import axis_flag
from bench.schema.case import AXES, Case, fill_command, format_value, list_varying
from bench.schema.command import list_named, refuse_program
from bench.schema.precision import (
    FP8_INSTALL,
    PRECISIONS,
    Apex,
    find_version,
    refuse_apex,
    refuse_fp8,
)
from bench.schema.record import MODEL_PARTS, Environment, Place
from bench.schema.rules import check as check_case
from bench.schema.rules import check_batches, takes
from bench.sweep.options import Options, Plan
from bench.training.sources import Versions, name_contents
from bench.workers.examination import Machine, Platform, examine, guess_devices
from bench.workers.executors import Executor, Images, build_executor
from bench.workers.fingerprint import Fingerprint, list_requests, name_source, name_subject
from bench.workers.job import Lane
from bench.workers.judgement import write_warnings

_SHOWN = 12  # lines of cases in a dry run

_AT_ONCE = 8  # lanes examined at once, each by a process of its own


@dataclass(frozen=True)
class Inputs:
    """Devices, models and images of the cases, by name, determined once, and the ``plan`` that is
    left of the cases, with what workloads decide. A dry run lacks what only torch or decoding can
    tell."""

    platforms: Mapping[str, Platform]
    models: Mapping[str, Fingerprint]
    datasets: Mapping[str, DatasetInfo]
    plan: Plan = field(default_factory=Plan)
    warnings: Sequence[str] = ()
    apex: Apex | None = None
    starts: Mapping[str, str] = field(default_factory=dict)  # hashes of weights, by file
    versions: Versions = field(default_factory=Versions)  # of what the folder's rows trained
    named: dict[str, Files] = field(default_factory=dict)  # of each command, what it names
    # by device, the empty columns of rates, and why they are empty
    unrated: Mapping[str, dict[str, str]] = field(default_factory=dict)

    def refuse(self, case: Case) -> str:
        """Return why the case cannot be run here at all, and what to do; empty if it can."""
        precision = PRECISIONS[case.precision]
        platform = self.platforms[case.device]
        if case.command is not None:
            return ""
        if reason := platform.refuse(precision):
            return reason
        model = self.find_model(case)
        # it was tried on a CPU, which lacks kernels that a GPU has
        if model is not None and case.device == "cpu" and case.precision in model.failing:
            return model.failing[case.precision]
        if precision.float8:
            if model is not None and not model.products:
                return refuse_fp8(case.model)
            return "" if find_version("torchao") else FP8_INSTALL
        return refuse_apex(self.apex, case.device) if precision.apex else ""

    def warn_of_trial(self, case: Case) -> str:
        """Return a warning if the network failed its trial in the case's precision; else empty."""
        model = self.find_model(case)
        if model is None or case.precision not in model.failing:
            return ""
        ends = "is not measured: " if case.device == "cpu" else "may fail, as on a CPU "
        return f"warning: {case.precision} {ends}{model.failing[case.precision]}"

    def find_model(self, case: Case) -> Fingerprint | None:
        """Return the network or workload of the case; None if it was not examined."""
        return self.models.get(name_subject(case))

    def _find_facts(self, case: Case) -> WorkloadFacts | None:
        model = self.find_model(case)
        return model.workload if model else None

    def data(self, case: Case) -> DatasetInfo:
        """Return the images that the case trains on, or what is known of a workload's data."""
        if case.workload == IMAGES:
            return self.datasets[name_data(case)]
        samples, classes = Workload.samples, 0  # if it was not examined
        if case.command is not None:
            samples = 0
        elif facts := self._find_facts(case):
            samples, classes = facts.samples, facts.classes or 0
        return DatasetInfo(OWN, "", samples, 0, classes, "", "")

    def check_batches(self, case: Case) -> None:
        check_batches(case, self.data(case).train_images, self.has_batchnorm(case))

    def has_batchnorm(self, case: Case) -> bool:
        """Return whether the network may have BatchNorm that is not frozen; True if not
        examined."""
        model = self.find_model(case)
        return model is None or (model.batchnorm and case.freeze not in model.still)

    def settle(self, case: Case) -> Case:
        """Return the case with what its workload sets, such as `OWN`. Raises UsageError: it
        cannot."""
        facts = self._find_facts(case)
        if not (facts and facts.optimizer):
            return case
        check_case(case := replace(case, optimizer=OWN))
        return case

    def add_rates(self, device: str, found: Yardstick) -> Inputs:
        """Return a copy with the measured rates of a device."""
        environment = replace(self.platforms[device].environment, **found.columns)
        return self.at(device, Place("", environment, found.reasons))

    def at(self, device: str, place: Place) -> Inputs:
        """Return a copy with the environment and rates of a place where a case ran."""
        if place.environment is None:
            return self
        platform = replace(self.platforms[device], environment=place.environment)
        return replace(
            self,
            platforms={**self.platforms, device: platform},
            unrated={**self.unrated, device: dict(place.unrated)},
        )

    def describe(self, case: Case) -> Environment:
        """Return the environment of the case: machine, images, model and initial weights."""
        data, model, facts = self.data(case), self.find_model(case), self._find_facts(case)
        told: dict[str, Any] = {
            "dataset_fingerprint": data.fingerprint,
            "dataset_source": data.source,
            "train_images": facts.units if facts else data.train_images,
            "test_images": facts.test_units if facts else data.test_images,
            "dataset_classes": data.classes or None,
            "start_fingerprint": self.starts.get(case.start or ""),
        }
        if model:
            hashes = ("parameters", "structure", "source")
            told |= {f"model_{name}": getattr(model, name) for name in hashes}
        if (core := self.list_core(case)) or case.command is not None:
            told["model_source"] = self.versions.expect(name_source(case), core)
        if facts:
            told["unit"] = facts.unit
        if case.command is not None:
            told |= {"train_images": None, "test_images": None}
        return replace(self.platforms[case.device].environment, **told)

    def list_core(self, case: Case) -> Files:
        """Return the files that every case of its network or command is made of, as they were when
        they were examined."""
        if case.command is None:
            model = self.find_model(case)
            return model.files if model else {}
        return self.named.setdefault(case.command, name_contents(list_named(case.command)))

    def settle_version(self, case: Case, seen: Seen) -> tuple[dict[str, Any], list[str]]:
        """Return the columns that tell what a case was made of, as its own process saw it, and the
        files that are not as they were expected to be."""
        told, edited, core = dict(seen.found), list[str](), self.list_core(case)
        if core or seen.files:  # not a network of the harness
            subject = name_source(case)
            told["model_source"], edited = self.versions.settle(subject, core, seen.files)
        start = told.get("start_fingerprint")
        if case.start is not None and start not in (None, self.starts.get(case.start)):
            edited.append(case.start)
        return told, edited

    def list_files(self, case: Case) -> Files:
        """Return the files that a case is expected to be made of, as far as they are known."""
        core, subject = self.list_core(case), name_source(case)
        return self.versions.find(subject, self.versions.expect(subject, core)) or core

    def renew(self, case: Case, told: Mapping[str, Any]) -> Inputs:
        """Return a copy that expects of later cases what one was told to be made of."""
        models, starts = dict(self.models), dict(self.starts)
        if model := self.find_model(case):
            names = ("parameters", "structure", "source")
            hashes = {name: told[f"model_{name}"] for name in names if told.get(f"model_{name}")}
            models[name_subject(case)] = replace(model, **hashes)
        if case.start is not None and "start_fingerprint" in told:
            starts[case.start] = told["start_fingerprint"]
        return replace(self, models=models, starts=starts)


def name_data(case: Case) -> str:
    """Return the key of a case's images: the dataset, and their shape and classes if given."""
    return " ".join(filter(None, [case.dataset, case.input, format_value(case.classes)]))


# ---------------------------------------------------------------------------------------- the check


def refuse_unwritable(out: Path | None) -> None:
    """Refuse an --out that cannot be created or written to, before anything takes time."""
    out = out or Path("results")
    place = out.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {place} is no folder that can be written to; choose one")


def refuse_programs(plan: Plan) -> None:
    """Refuse commands whose program or script is not there, which takes no examination."""
    cases = [*plan.cases, *plan.unsized]
    for command in dict.fromkeys(fill_command(case) for case in cases if case.command is not None):
        if why := refuse_program(command):
            raise UsageError(f"--command: {why}")


def check(
    plan: Plan,
    machine: Machine,
    options: Options,
    prepare: Callable[[Images], DatasetInfo],
    *,
    every: bool = False,
) -> Inputs:
    """Check the cases of a plan against the machine, and return what they train with, and warnings.

    What ``machine`` does not have is not known, as in a dry run, and so not checked. With ``every``
    each case must be able to run; else one of a precision that no flag gives gets a row that says
    why it cannot.

    Raises UsageError: torch cannot use a device, or it has less memory than a memory limit; a
    precision cannot run there; others use the card and --allow-shared is not given; a model or
    dataset is broken or missing, or they do not go together; a batch size does not fit.
    """
    cases = [*plan.cases, *plan.unsized]
    platforms = machine.use(dict.fromkeys(case.device for case in cases))
    for case in cases if "precision" in options.axes else ():
        platform = platforms.get(case.device) if case.command is None else None
        if platform and (why := platform.refuse(PRECISIONS[case.precision])):
            raise UsageError(f"--precision {case.precision}: {why}; leave it out")
    refuse_places(platforms, cases, options)
    models, datasets = _take_models(cases, machine, options), dict[str, DatasetInfo]()
    versions = Versions(read_config(options.out).get(SOURCES) if options.out else None)
    about = (machine.apex, machine.starts, versions)
    inputs = Inputs(platforms, models, datasets, plan, (), *about)
    settle = inputs.settle
    searched = [(settle(case), text) for case, text in plan.searched]
    plan = Plan(list(dict.fromkeys(map(settle, plan.cases))), searched)
    cases = [*plan.cases, *plan.unsized]
    for case in cases if every else ():
        if why := inputs.refuse(case):
            raise UsageError(f"--precision {case.precision}: {why}; leave it out")
    for name, case in {name_data(c): c for c in cases if c.workload == IMAGES}.items():
        asked = Images(case.dataset, options.data_dir, case.input, case.classes)
        datasets[name] = prepare(asked)
    for case in plan.cases:
        inputs.check_batches(case)
    warnings = list(dict.fromkeys(filter(None, map(inputs.warn_of_trial, cases))))
    if options.data_dir is not None and all(case.dataset == SYNTHETIC for case in cases):
        warnings.append(
            f"note: --data-dir {options.data_dir} is not used, because the images are synthetic; "
            f"give --dataset {Case.dataset} to train on it"
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
    """Refuse memory limits above a device's memory, and cards of this machine that others use."""
    for case in cases:
        if platform := platforms.get(case.device):
            platform.check_limit(case.memory_limit)
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


@watch("looking at what this machine can run")
def examine_lanes(
    executor: Executor, lanes: Sequence[Lane], plan: Plan, options: Options
) -> dict[Lane, Inputs]:
    """Return the inputs of each lane; on a cluster all are those of the first. Raises UsageError:
    as `check`."""
    first, *others = lanes
    cases = [*plan.cases, *plan.unsized]
    devices = list(dict.fromkeys(case.device for case in cases))
    machine = examine(
        devices,
        list_requests(cases),
        data_dir=options.data_dir,
        out=options.out,
        timeout_s=options.timeout_s,
        ask=partial(executor.examine, first),
    )
    inputs = check(plan, machine, options, partial(executor.prepare, first))
    inputs = replace(inputs, warnings=[*write_warnings(machine), *inputs.warnings])

    def look(lane: Lane) -> Inputs:
        """Return the inputs of another lane, which has another device of the same kind."""
        found = executor.examine(lane, devices, [], options.timeout_s)
        platforms = found.use(devices)
        refuse_places(platforms, cases, options)
        return replace(inputs, platforms=platforms)

    if not options.here:
        return dict.fromkeys(lanes, inputs)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(lanes, [inputs, *pool.map(look, others)], strict=True))


# ---------------------------------------------------------------------------------------- a dry run


GUESSED = ("gpu", "driver", "cpu", "torch", "code", "variables", *MODEL_PARTS)
"""The columns of `COMPARABLE` that are known without torch, those of a model if it was examined."""


def check_without_torch(
    plan: Plan, options: Options, prepare: Callable[[Images], DatasetInfo] = Images.count
) -> Inputs:
    """Check a plan as a start does, but ask torch only about the user's own networks, and about
    others that are frozen or start from a file, and decode no images unless ``prepare`` does.
    Raises UsageError: as `open_loop`."""
    refuse_unwritable(options.out)
    refuse_programs(plan)
    cases, known = [*plan.cases, *plan.unsized], dict[str, Platform]()
    if options.here:  # a cluster is only known once it was joined
        with closing(build_executor(options.executor, options.settings)) as executor:
            open_lanes(executor, cases, options)
        known = guess_devices()
    own = list_requests(filter(is_own, cases))
    machine = examine([], own, timeout_s=options.timeout_s) if own else Machine()
    inputs = check(plan, replace(machine, devices=known), options, prepare)
    emulated = warn_of_emulation([*inputs.plan.cases, *inputs.plan.unsized], known)
    return replace(inputs, warnings=[*inputs.warnings, *emulated])


def is_own(case: Case) -> bool:
    """Return whether torch has to tell of the network: it is the user's, frozen or begun from a
    file."""
    return case.model not in MODELS or case.start is not None or case.freeze != Case.freeze


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
        runs = len(plan_runs(plan.cases, options.repeats))
        cases_named = count(len(plan.cases), "case")
        yield f"runs: {runs:,}, of {cases_named} with --repeats {options.repeats}"
    varies, others = list_varying(cases), list_varying(cases, but="batch_size")
    labels = [case.label(varies) for case in plan.cases]
    for case, text in plan.searched:
        labels.append(f"{case.label(others)} · batch size {text}, found by a search first")
    yield from (f"{index:>4}  {label}" for index, label in enumerate(labels[:_SHOWN], 1))
    if (more := len(labels) - _SHOWN) > 0:
        yield f"      and {more:,} more"
    own = all(case.command is not None for case in cases)  # which has its axes from --command
    common = [
        f"{axis_flag(name)} {shlex.quote(format_value(getattr(cases[0], name)))}"
        for name, axis in AXES.items()
        if len({getattr(case, name) for case in cases} - {axis.default, None}) == 1
        and name not in varies
        and (name in options.axes or not own)
    ]
    if common:
        yield f"all with {' '.join(common)}"
    if options.here and any(case.device == "cuda" for case in cases) and not has_cuda():
        yield (
            "warning: torch has no GPU here, so that a start on this machine is refused; use "
            "--device cpu, or start it where there is one"
        )
