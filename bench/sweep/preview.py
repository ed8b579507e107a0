"""The output of --dry-run, which checks a plan as a real start does, and of --list."""

from __future__ import annotations

from collections.abc import Iterator

from bench.axis import COMPILES, PARALLELS, axis_flag
from bench.case import AXES, Case, format_value
from bench.data import DATASETS
from bench.environment.host import has_cuda
from bench.grid import MICRO_BATCH
from bench.models import MODELS
from bench.models.freezing import FREEZES
from bench.optimization import OPTIMIZERS, SCHEDULES
from bench.precision import FP8_RECIPES, OPT_LEVELS, POLICIES, PRECISIONS
from bench.preset import load_preset, preset_names
from bench.rules import fill_value
from bench.store.plans import plan_runs
from bench.store.reader import read_rows
from bench.store.rows import LatestAttempt, Run, read_history
from bench.store.table import RECORDS
from bench.sweep.folder import refuse_other_seeds
from bench.sweep.options import Options, Plan
from bench.sweep.preflight import check_without_torch
from bench.sweep.schedule import REPEATS_S, describe_repeats, remaining_runs
from bench.text import count, name_first
from bench.workloads import COMMAND, IMAGES, OWN

_SHOWN = 12  # lines of cases
_VALUES = 8  # values listed of a setting


def preview(plan: Plan, options: Options) -> int:
    """Print what a sweep would run, and return the exit code. Raises UsageError: as a start."""
    inputs = check_without_torch(plan, options)
    if options.out:
        runs = plan_runs(inputs.plan.cases, options.repeats)
        refuse_other_seeds(options.out, runs, _read_history(options), options.same_seed)
    for line in [*describe_plan(inputs.plan, options), *inputs.warnings]:
        print(line)
    return 0


def describe_plan(plan: Plan, options: Options) -> Iterator[str]:
    """Describe the number of runs, what differs between their cases, and the settings that are not
    at their defaults."""
    cases = [*plan.cases, *(case for case, _ in plan.searched)]
    varies = [
        name
        for name in AXES
        if len({getattr(case, name) for case in cases}) > 1 and (plan.cases or name != "batch_size")
    ]
    others = [name for name in varies if name != "batch_size"]
    yield "runs: " + "; and ".join(_count_runs(plan, options))
    lines = [f"{index:>4}  {case.label(varies)}" for index, case in enumerate(plan.cases, 1)]
    for case, text in plan.searched:
        label = [case.label(others)] if others else []
        lines.append("   ?  " + " · ".join([*label, f"batch size {text}"]))
    yield from lines[:_SHOWN]
    if (more := len(lines) - _SHOWN) > 0:
        yield f"      and {more:,} more"
    if plan.searched:
        yield "   ?: found first, by a search that tries about eight batch sizes"
    yield from _name_sources(plan, options) or ["all settings are at their defaults"]
    if options.here and any(case.device == "cuda" for case in cases) and not has_cuda():
        yield (
            "warning: torch has no GPU here, so that a start on this machine is refused; use "
            "--device cpu, or start it where there is one"
        )


def _count_runs(plan: Plan, options: Options) -> Iterator[str]:
    if plan.cases:
        repeats, given = options.repeats, options.repeats_given
        planned = plan_runs(plan.cases, repeats)
        history = _read_history(options)
        left = remaining_runs(planned, history, options.retry, options.no_skip)
        done = len(planned) - len(left)
        fewer = (
            f"; fewer where the repeats would take more than {REPEATS_S / 60:g} minutes, unless "
            f"--repeats {repeats} is given"
        )
        yield (
            f"{len(planned):,} of {count(len(plan.cases), 'case')}, {describe_repeats(repeats)}"
            f"{f'; {done:,} already in --out' if done else ''}"
            f"{'' if given or repeats == 1 else fewer}"
        )
    if plan.searched:
        yield f"those of {count(len(plan.searched), 'batch size')} yet to be found"


def _read_history(options: Options) -> dict[Run, LatestAttempt]:
    """Return the runs in --out. A real start also checks the environment that they ran in."""
    if options.out is None or not (options.out / RECORDS).is_file():
        return {}
    return read_history(read_rows(options.out))


def _name_sources(plan: Plan, options: Options) -> list[str]:
    """List the settings that are not at their defaults, one line per source."""
    cases = [*plan.cases, *(case for case, _ in plan.searched)]
    preset, given = options.preset, options.given
    named = f"from {'preset ' * (preset.name in preset_names())}{preset.name}"
    lines = {named: list[str](), "from flags": list[str](), "chosen here": list[str]()}
    for name in AXES:
        values = [format_value(getattr(case, name)) for case in cases]
        if name == "batch_size" and plan.searched:
            values[len(plan.cases) :] = [text for _, text in plan.searched]
        elif all(_is_default(case, name) for case in cases):
            continue
        keys = {name, MICRO_BATCH} if name == "accumulate" else {name}
        texts = list(dict.fromkeys(filter(None, values)))
        if given & {*map(axis_flag, keys)} and keys & options.axes.keys():
            source = "from flags"
        elif any(keys & grid.keys() for grid in preset.grids) and name not in options.axes:
            source = named
        elif len(texts) == 1:
            source = "chosen here"
        else:
            continue  # drawn by a search: the cases' labels show it
        lines[source].append(f"{axis_flag(name)} {name_first(texts, _VALUES, ' ')}")
    return [f"{source}: {' '.join(settings)}" for source, settings in lines.items() if settings]


def _is_default(case: Case, name: str) -> bool:
    """Return whether an axis has its default, as a user workload's model and dataset always do."""
    if name in ("model", "dataset") and case.workload != IMAGES:
        return True
    if case.command is not None and getattr(case, name) in (OWN, COMMAND, 0):  # what it chooses
        return True
    return bool(getattr(case, name) == fill_value(name, case))


def print_registries() -> int:
    sections = {
        "presets": {name: load_preset(name).description for name in preset_names()},
        "precisions": {name: precision.help for name, precision in PRECISIONS.items()},
        "dynamic loss scales": {name: policy.help for name, policy in POLICIES.items()},
        "opt levels of fp16-apex": {name: level.help for name, level in OPT_LEVELS.items()},
        "recipes of fp8": {name: recipe.help for name, recipe in FP8_RECIPES.items()},
        "optimizers": {
            name: f"{kind.name}: lr {kind.lr:g}, {kind.settings}"
            for name, kind in OPTIMIZERS.items()
        },
        "schedules": SCHEDULES,
        "how the network is compiled (--compile)": COMPILES,
        "what --freeze takes": FREEZES,
        "how several GPUs train (--parallel)": PARALLELS,
        "models": {
            **MODELS,
            "package.module:factory": "your own torch.nn.Module, or 'nets:build(depth=16)'",
            "timm:NAME": "a network of the package timm",
        },
        "datasets": DATASETS,
        "workloads": {
            "images": "the network of --model on the images of --dataset",
            "package.module:factory": "your own bench.workloads.Workload",
        },
    }
    for title, entries in sections.items():
        print(f"{title}:", *(f"  {name:<24}{what}" for name, what in entries.items()), sep="\n")
    return 0
