"""The checks that a sweep makes before it trains anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.apex import Apex, find_apex, refuse_apex
from bench.case import Case, fill_command, format_value, list_varying
from bench.command import hash_files, refuse_program
from bench.cores import count_cores
from bench.data import (
    SYNTHETIC,
    DatasetInfo,
    count_classes,
    count_images,
    find_layout,
    refuse_file,
)
from bench.data.progress import progress_bar
from bench.diagnosis.prediction import predict_seconds
from bench.diagnosis.rates import CONVOLUTIONS, find_emulated, find_halves, take_rates
from bench.doctor.judgement import write_warnings
from bench.doctor.machine import examine_machine
from bench.environment.device import Platform
from bench.environment.examination import ProcessAnswer, ask, with_inputs
from bench.environment.host import CPU_FLAGS, read_cpu_flags
from bench.errors import SeveralUsageError, UsageError
from bench.executors import Executor, Images
from bench.fingerprint import ExamineRequest, Fingerprint, check_outputs, name_subject
from bench.gpu.nvml import find_neighbours
from bench.grid import check_axes, check_batches
from bench.models import MODELS
from bench.models.weights import hash_weights
from bench.optimization import count_warmup_steps
from bench.precision import FP8_INSTALL, PRECISIONS, find_torchao, refuse_fp8
from bench.record import COMPARABLE, Environment, Place
from bench.sweep.options import Options, Plan
from bench.text import GIB, count, name_first
from bench.wall.records import name_family
from bench.wall.search import list_sizes
from bench.worker.messages import Lane
from bench.workloads import IMAGES, NO_DATASET, OWN, Workload
from bench.yardstick import Yardstick


@dataclass(frozen=True)
class Inputs:
    """Devices, models and images of the cases, by name, determined once."""

    platforms: Mapping[str, Platform]
    models: Mapping[str, Fingerprint | None]  # None if not examined, as in a dry run
    datasets: Mapping[str, DatasetInfo]
    warnings: Sequence[str] = ()  # about the machine and the cases
    apex: Apex | None = None
    starts: Mapping[str | None, str] = field(default_factory=dict)  # hashes of weights, by file
    # by device, the empty columns of rates, and why they are empty
    unrated: Mapping[str, dict[str, str]] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)  # models that are left out, and why

    def keep(self, plan: Plan) -> Plan:
        """Return a plan without the models that are left out."""
        return Plan(
            [case for case in plan.cases if name_subject(case) not in self.broken],
            [(case, text) for case, text in plan.searched if name_subject(case) not in self.broken],
            [case for case in plan.unknown if name_subject(case) not in self.broken],
        )

    @property
    def environments(self) -> dict[str, Environment]:
        return {device: platform.environment for device, platform in self.platforms.items()}

    def refuse(self, case: Case) -> str:
        """Return why the case cannot be run here at all, and what to do; empty if it can."""
        precision = PRECISIONS[case.precision]
        platform = self.platforms[case.device]
        if case.command is not None:
            return ""
        if reason := platform.refuse(precision) or platform.refuse_limit(case.memory_limit):
            return reason
        if precision.float8:
            model = self.models.get(name_subject(case))
            if model is not None and not model.products:
                return refuse_fp8(case.model)
            return "" if find_torchao() else FP8_INSTALL
        return refuse_apex(self.apex, case.opt_level, case.device) if precision.apex else ""

    def data(self, case: Case) -> DatasetInfo:
        """Return the images that the case trains on, or what is known of a workload's data."""
        if case.workload == IMAGES:
            return self.datasets[name_data(case)]
        if case.command is not None:
            return DatasetInfo(OWN, "", 0, 0, 0, "", "")
        model = self.models.get(name_subject(case))
        facts = model.workload if model else None
        samples = facts.samples if facts else Workload.samples  # if it was not examined
        classes = facts.classes if facts else None
        return DatasetInfo(OWN, "", samples, 0, classes or 0, "", "")

    def check_batches(self, case: Case) -> None:
        check_batches(case, self.data(case).train_images, self.has_batchnorm(case))

    def has_batchnorm(self, case: Case) -> bool:
        """Return whether the network may have BatchNorm that is not frozen; True if not
        examined."""
        model = self.models.get(name_subject(case))
        return model is None or (model.batchnorm and case.freeze not in model.still)

    def settle(self, case: Case) -> Case:
        """Return the case with what its workload sets, such as `OWN`. Raises UsageError: it
        cannot."""
        model = self.models.get(name_subject(case))
        facts = model.workload if model else None
        if not (facts and facts.optimizer):
            return case
        check_axes(case := replace(case, optimizer=OWN))
        return case

    def add_rates(self, device: str, found: Yardstick) -> Inputs:
        """Return a copy with the measured rates of a device."""
        platform = self.platforms[device]
        rated = replace(platform, environment=replace(platform.environment, **found.columns))
        return replace(
            self,
            platforms={**self.platforms, device: rated},
            unrated={**self.unrated, device: found.reasons},
        )

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

    def predict(self, case: Case) -> float | None:
        """Return a lower bound on a case's time, in s; None if its device or model was not
        measured."""
        model, data = self.models.get(name_subject(case)), self.data(case)
        rates = take_rates(asdict(self.platforms[case.device].environment))
        work = model.work if model else ()
        return predict_seconds(case, work, rates, data.train_images, data.test_images)

    def describe(self, case: Case) -> Environment:
        """Return the environment of the case: machine, images, model and initial weights."""
        environment = self.platforms[case.device].environment
        environment = with_inputs(environment, self.data(case), self.models.get(name_subject(case)))
        environment.start_fingerprint = self.starts.get(case.start)
        if case.command is not None:
            environment.train_images = environment.test_images = None
            environment.model_source = hash_files(case.command)
        return environment


def name_data(case: Case) -> str:
    """Return the key of a case's images: the dataset, and their shape and classes if given."""
    return " ".join(filter(None, [case.dataset, case.input, format_value(case.classes)]))


def list_described(cases: Sequence[Case]) -> list[Case]:
    """Return one of ``cases`` for each distinct result of `Inputs.describe`."""
    return list({(name_data(c), c.device, c.model, c.start): c for c in cases}.values())


def find_inputs(
    cases: Sequence[Case],
    options: Options,
    families: Sequence[Case],
    executor: Executor,
    lane: Lane,
    beside: int = 0,
) -> Inputs:
    """Examine devices and models, decode the images, and refuse what cannot be trained on a lane.

    ``beside`` is how many other lanes may run at the same time. The batch sizes of ``families`` are
    not known yet. Raises UsageError: torch cannot use a device, or it has less memory than a memory
    limit; a precision given as a flag cannot run there; others use the card and --allow-shared is
    not given; a model or dataset is broken or missing; a model has nothing to freeze, or cannot
    start from the given weights.
    """
    known, cases = cases, [*cases, *families]
    starts = hash_starts(cases)
    devices = list(dict.fromkeys(case.device for case in cases))
    machine, answer = examine_machine(
        devices,
        list_examined(cases),
        data_dir=options.data_dir,
        out=options.out,
        timeout_s=options.timeout_s,
        watch_s=0.0,
        ask=partial(executor.examine, lane),
    )
    warnings = [*write_warnings(machine), *list_notes(cases, options.data_dir, beside)]
    platforms = {device: answer.platform(device) for device in devices}
    examined = [case for case in cases if case.command is None]
    refuse_precisions(examined, platforms, options.axes)
    _refuse_places(platforms, cases, options)
    refuse_programs(cases)
    models, broken = _take_models(
        examined, answer, options.data_dir, options.axes, options.keep_going
    )
    warnings += _warn_of_broken(broken)
    known, cases = (
        [case for case in of if name_subject(case) not in broken] for of in (known, cases)
    )
    prepare = partial(executor.prepare, lane)
    datasets = prepare_datasets(cases, options.data_dir, options.data_url, prepare)
    warnings += warn_of_missing_tests(cases, datasets)
    inputs = Inputs(platforms, models, datasets, warnings, find_apex(), starts, broken=broken)
    for case in known:
        inputs.check_batches(case)
    return inputs


def refuse_programs(cases: Sequence[Case]) -> None:
    """Refuse commands whose program or script is not here. Raises UsageError."""
    for command in dict.fromkeys(fill_command(case) for case in cases if case.command is not None):
        if why := refuse_program(command):
            raise UsageError(f"--command: {why}")


def warn_of_missing_tests(
    cases: Sequence[Case], datasets: Mapping[str, DatasetInfo]
) -> Iterator[str]:
    """Yield a warning if --evaluate is given, and there are no images to test on."""
    asked = [case for case in cases if case.evaluate and case.workload == IMAGES]
    if any(not datasets[name_data(case)].test_images for case in asked):
        yield (
            "warning: there are no test images, so that --evaluate measures nothing; add a folder "
            "test/ beside train/, or leave out --evaluate"
        )


def gather_inputs(
    cases: Sequence[Case],
    answer: ProcessAnswer,
    given: Collection[str] = (),
    data_dir: Path | None = None,
    data_url: str | None = None,
) -> Inputs:
    """Return the inputs of cases on one device that a command trains itself, without lanes.

    ``answer`` comes from a process that was asked about the device and the `list_examined` of the
    cases; ``given`` are the axes given as flags. Raises UsageError: torch cannot use the device, a
    precision cannot run there, a model or workload is broken, the images are not available, or a
    batch size does not fit them.
    """
    device = cases[0].device
    models, _ = _take_models(cases, answer, data_dir, given)
    inputs = Inputs({device: answer.platform(device)}, models, {}, apex=find_apex())
    for case in cases:
        if why := inputs.refuse(case):
            raise UsageError(f"--precision {case.precision}: {why}; leave it out")
    with progress_bar() as progress:
        prepare = partial(Images.prepare, progress=progress)
        datasets = prepare_datasets(cases, data_dir, data_url, prepare)
    inputs = replace(inputs, datasets=datasets)
    for case in cases:
        inputs.check_batches(case)
    return inputs


def find_lane_inputs(
    first: Inputs, cases: Sequence[Case], options: Options, executor: Executor, lane: Lane
) -> Inputs:
    """Return the inputs of a lane other than the first, which has another device. Raises
    UsageError: as `find_inputs`; or the device is of another kind, so that its measurements would
    not be comparable with the first lane's."""
    answer = executor.examine(lane, list(first.platforms), [], options.timeout_s)
    platforms = {device: answer.platform(device) for device in first.platforms}
    _refuse_places(platforms, cases, options)
    found = replace(first, platforms=platforms)
    for case in list_described(cases):
        expected, there = first.describe(case), found.describe(case)
        for name in (*COMPARABLE, "gpu_memory_bytes"):
            mine, its = (_read_kind(one, name) for one in (expected, there))
            if its != mine:
                raise UsageError(
                    f"lane {lane.name}: its {name} is {its or 'none'}, where the first lane's is "
                    f"{mine or 'none'}; a sweep needs lanes of one kind: choose GPUs with "
                    "CUDA_VISIBLE_DEVICES"
                )
    return found


def _read_kind(environment: Environment, name: str) -> object:
    value = getattr(environment, name)
    # cards of the same name may have 40 or 80 GB, but not to the byte
    return f"{value / GIB:.0f} GiB" if name == "gpu_memory_bytes" and value else value


def refuse_precisions(
    cases: Sequence[Case], platforms: Mapping[str, Platform], given: Collection[str]
) -> None:
    """Refuse a precision given as a flag that cannot run on the device of its case, if that is one
    of ``platforms``. Raises UsageError: the message says what the precision needs."""
    for case in cases if "precision" in given else ():
        platform = platforms.get(case.device)
        if platform and (reason := platform.refuse(PRECISIONS[case.precision])):
            raise UsageError(f"--precision {case.precision}: {reason}; leave it out")


def describe_own_cpu() -> Platform:
    """Return this CPU, as far as it is known without torch."""
    flags = read_cpu_flags()
    halves = (not flags or bool(flags & having) for having in CPU_FLAGS.values())
    return Platform(Environment(), *halves)


def warn_of_unsupported(cases: Sequence[Case]) -> Iterator[str]:
    """Yield a note for each reason why precisions without a flag are not measured on this CPU."""
    cpu, refused = describe_own_cpu(), dict[str, dict[str, None]]()
    for name in dict.fromkeys(case.precision for case in cases if case.device == "cpu"):
        reason = cpu.refuse(PRECISIONS[name])
        if not reason and (reason := cpu.discourage(PRECISIONS[name])):
            reason += "; --precision measures it anyway"
        if reason:
            refused.setdefault(reason, {})[name] = None
    for reason, names in refused.items():
        yield f"note: {', '.join(names)} will have no time here: {reason}"


def warn_of_emulation(
    cases: Sequence[Case],
    platforms: Mapping[str, Platform],
    models: Mapping[str, Fingerprint | None] | None = None,
) -> list[str]:
    """Return a warning for each reason why ``cases`` are emulated on the devices of ``platforms``,
    by their rates where they were measured: no flag tells of some instructions. The convolutions'
    do not count if the network of ``models`` has none."""
    emulated: dict[str, dict[str, None]] = {}
    for case in cases:
        precision, platform = PRECISIONS[case.precision], platforms.get(case.device)
        if platform is None or platform.refuse(precision):
            continue
        rates, model = vars(platform.environment), (models or {}).get(name_subject(case))
        kinds = {row.kind for row in model.work} if model else set()
        native = find_halves(rates).get(precision.arithmetic)
        reason = "" if native else platform.find_emulation(precision)
        convolves = not kinds or not kinds.isdisjoint(CONVOLUTIONS)
        if reason := reason or find_emulated(precision.arithmetic, rates, convolves):
            emulated.setdefault(reason, {})[case.precision] = None
    return [
        f"warning: {name_first(names, 4)} {'is' if len(names) == 1 else 'are'} emulated: {reason}; "
        "leave out of --precision what is too slow, or lower --fraction or --batch-size"
        for reason, of in emulated.items()
        if (names := list(of))
    ]


def _refuse_places(
    platforms: Mapping[str, Platform], cases: Sequence[Case], options: Options
) -> None:
    """Refuse memory limits above a device's memory, and cards of this machine that others use."""
    for case in cases:
        platforms[case.device].check_limit(case.memory_limit)
    for platform in platforms.values():
        uuid = platform.environment.gpu_uuid
        if uuid and not options.allow_shared and options.here:
            refuse_neighbours(uuid)


def hash_starts(cases: Sequence[Case]) -> dict[str | None, str]:
    """Hash the weights that ``cases`` start from. Raises UsageError: a file is not readable."""
    return {name: hash_weights(name) for name in dict.fromkeys(c.start for c in cases) if name}


def list_notes(cases: Sequence[Case], data_dir: Path | None, beside: int) -> list[str]:
    """Return notes on ``cases`` to show before they run; ``beside`` is as in `warn_of_workers`."""
    return [
        *warn_of_workers(cases, beside),
        *warn_of_freezing(cases),
        *warn_of_data(cases, data_dir),
    ]


def warn_of_workers(cases: Sequence[Case], beside: int = 0) -> list[str]:
    """Return a note if DataLoaders have more workers than there are cores. ``beside`` is how many
    other lanes of this machine run a case at the same time."""
    most = max(c.workers * (c.world_size if c.world_size > 1 else 1 + beside) for c in cases)
    cores = count_cores()
    enough = math.ceil(cores)
    if most <= enough:
        return []
    of = count(enough, "CPU core") if cores == enough else f"{cores:g} CPU cores"
    return [
        f"note: {most} workers share {of}, and load no faster than {enough}; "
        f"lower --workers{' or --lanes' if beside else ''}"
    ]


def warn_of_freezing(cases: Sequence[Case]) -> list[str]:
    """Return notes on weights that are frozen at their random initial values."""
    names = dict.fromkeys(c.freeze for c in cases if c.freeze != Case.freeze and c.start is None)
    return [
        f"note: --freeze {name} without --start keeps random weights; time and memory are those of "
        "fine-tuning, the loss is not; give --start FILE"
        for name in names
    ]


def warn_of_data(cases: Sequence[Case], data_dir: Path | None) -> list[str]:
    """Return a note if --data-dir is given, and no case trains on it."""
    if data_dir is None or any(case.dataset != SYNTHETIC for case in cases):
        return []
    return [
        f"note: --data-dir {data_dir} is not used, because the images are synthetic; give "
        f"--dataset {Case.dataset} to train on it"
    ]


def warn_of_download(cases: Sequence[Case], data_dir: Path | None) -> list[str]:
    """Return a note if a start downloads images. Raises UsageError: ``data_dir`` is a file."""
    names = {case.dataset for case in cases if case.workload == IMAGES} - {SYNTHETIC}
    if not names or find_layout(data_dir):
        return []
    folder = data_dir or Path("data")
    refuse_file(folder)
    return [
        f"note: {folder} holds no images, so that a start downloads CIFAR-10 into it "
        "(170 MB); give --data-dir if you have them elsewhere"
    ]


def list_examined(cases: Sequence[Case]) -> list[str]:
    """List the networks and workloads of ``cases`` as `ask` takes them."""
    parts: dict[str, list[Case]] = {}
    for case in (case for case in cases if case.command is None):
        parts.setdefault(name_subject(case), []).append(case)
    asked = []
    for subject, of in parts.items():
        frozen = dict.fromkeys(case.freeze for case in of if case.freeze != Case.freeze)
        starts = dict.fromkeys(case.start for case in of if case.start is not None)
        asked.append(str(ExamineRequest(subject, tuple(frozen), tuple(starts))))
    return asked


def try_models(plan: Plan, options: Options) -> Inputs:
    """Import, build and run the user's own models once, as a sweep does before its first case.

    Models of the harness are built only if weights are given or frozen. Batch sizes are checked if
    the number of images is known without decoding them. Raises UsageError: a model is broken or
    missing, a batch size does not fit, or weights are refused as in `find_inputs`.
    """
    cases = [*plan.cases, *plan.unsized]
    hash_starts(cases)
    refuse_programs(cases)
    models: dict[str, Fingerprint | None] = dict.fromkeys(map(name_subject, cases))
    own = [
        case
        for case in cases
        if case.command is None
        and (case.model not in MODELS or case.start is not None or case.freeze != Case.freeze)
    ]
    broken: dict[str, str] = {}
    if own:
        with progress_bar() as progress:
            answer = ask([], list_examined(own), timeout_s=options.timeout_s, progress=progress)
        asked = len(models)
        examined, broken = _take_models(
            own, answer, options.data_dir, options.axes, options.keep_going, asked
        )
        models |= examined
        cases = [case for case in cases if name_subject(case) not in broken]
    images = {name_data(case): case.dataset for case in cases if case.workload == IMAGES}
    datasets = {
        name: DatasetInfo(name, "", counted, 0, 0, "", "")
        for name, dataset in images.items()
        if (counted := count_images(dataset, options.data_dir))
    }
    inputs = Inputs({}, models, datasets, _warn_of_broken(broken), broken=broken)

    def is_counted(case: Case) -> bool:
        return case.workload != IMAGES or name_data(case) in datasets

    plan = inputs.keep(plan)
    for case in filter(is_counted, plan.cases):
        inputs.check_batches(case)
    refuse_searches([(case, text) for case, text in plan.searched if is_counted(case)], inputs)
    return inputs


def _take_models(
    cases: Sequence[Case],
    answer: ProcessAnswer,
    data_dir: Path | None,
    given: Collection[str],
    keep_going: bool | None = None,
    asked: int = 0,
) -> tuple[dict[str, Fingerprint], dict[str, str]]:
    """Return the models of ``cases`` that can be trained, and why others cannot.

    Raises UsageError: torch cannot be used; or some cannot be trained, each of which has a line,
    unless ``keep_going`` and others can. ``asked`` is how many models there are, by default those
    of ``cases``.
    """
    if answer.error:
        raise UsageError(answer.error)
    models, broken = {}, dict[str, str]()
    checked = {(name_data(c), name_subject(c), c.optimizer, c.loader): c for c in cases}
    for case in checked.values():
        subject = name_subject(case)
        try:
            models[subject] = answer.fingerprint(subject)
            _check_examined(case, models[subject], data_dir, given)
        except UsageError as error:
            broken.setdefault(subject, str(error))
    asked = asked or len({*models, *broken})
    others = asked - len(broken)
    if broken and not (keep_going and others):
        lines = [*broken.values()]
        if others and keep_going is not None:
            lines.append(
                f"{len(broken)} of {asked} models cannot be trained; --keep-going trains the others"
            )
        raise SeveralUsageError(lines)
    return models, broken


def _warn_of_broken(broken: Mapping[str, str]) -> list[str]:
    return [f"warning: left out: {why}" for why in broken.values()]


def _check_examined(
    case: Case, found: Fingerprint, data_dir: Path | None, given: Collection[str]
) -> None:
    if case.workload == IMAGES:
        check_outputs(case.model, found, case.classes or count_classes(case.dataset, data_dir))
        return
    facts = found.workload
    if case.loader != Case.loader and facts and not facts.dataset:
        raise UsageError(f"workload {case.model!r}: {NO_DATASET}")
    own = facts.optimizer if facts else ""
    if own and "optimizer" in given and case.optimizer != OWN:
        why = f"brings its own optimizer, {own}; leave out --optimizer"
    elif case.optimizer == OWN and not own:
        why = f"brings no optimizer of its own; leave out --optimizer {OWN}"
    else:
        return
    raise UsageError(f"--workload {case.model} {why}")


def refuse_neighbours(uuid: str) -> None:
    """Refuse a card that others use. Raises UsageError: the message names their processes."""
    # processes that draw a desktop do not count; the records note them
    if neighbours := [p for p in find_neighbours(uuid) or () if not p.display]:
        who = ", ".join(map(str, neighbours))
        raise UsageError(f"the GPU is in use by {who}; end them, or measure with --allow-shared")


def prepare_datasets(
    cases: Sequence[Case],
    data_dir: Path | None,
    url: str | None,
    prepare: Callable[[Images], DatasetInfo],
) -> dict[str, DatasetInfo]:
    """Decode every dataset of the cases once. Raises UsageError: as ``prepare``."""
    named = {name_data(case): case for case in cases if case.workload == IMAGES}
    return {
        name: prepare(Images(case.dataset, data_dir, url, case.input, case.classes))
        for name, case in named.items()
    }


def leave_out_batches(cases: Sequence[Case], inputs: Inputs) -> tuple[list[Case], list[str]]:
    """Leave out cases whose batch size, just found, does not fit their other settings. Return the
    others, and a line on each case that is left out."""
    kept, lines, axes = [], [], list_varying(cases)
    for case in cases:
        try:
            inputs.check_batches(case)
        except UsageError as error:
            lines.append(f"left out: {case.label(axes)}: {error}")
        else:
            kept.append(case)
    return kept, lines


def refuse_searches(searched: Sequence[tuple[Case, str]], inputs: Inputs) -> None:
    """Check cases whose batch size, such as ``32..auto``, is not found yet. Raises UsageError: the
    warm-up is longer than the training even at the smallest batch size."""
    for case, text in searched:
        images = inputs.data(case).train_images
        family, batchnorm = name_family(case), inputs.has_batchnorm(case)
        smallest = list_sizes(family, images, batchnorm=batchnorm)[:1]
        low = max([*smallest, int(text.rpartition("..")[0] or 1)])
        steps = math.ceil(images / (low * case.world_size))
        count_warmup_steps(case.lr_warmup, case.epochs * steps)
