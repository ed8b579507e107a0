"""The output of --dry-run, which checks a plan as a real start does, and of --list."""

from __future__ import annotations

from collections.abc import Iterator

from bench.axis import COMPILES, PARALLELS, axis_flag
from bench.case import AXES, format_value, list_varying
from bench.data import DATASETS
from bench.environment.host import has_cuda
from bench.models import MODELS
from bench.models.freezing import FREEZES
from bench.optimization import OPTIMIZERS, SCHEDULES
from bench.precision import FP8_RECIPES, OPT_LEVELS, POLICIES, PRECISIONS
from bench.preset import load_preset, preset_names
from bench.store.reader import read_rows
from bench.store.rows import LatestAttempt, Run, plan_runs, read_history
from bench.store.table import RECORDS
from bench.sweep.options import Options, Plan
from bench.sweep.preflight import check_without_torch
from bench.sweep.schedule import describe_repeats, remaining_runs
from bench.text import count

_SHOWN = 12  # lines of cases


def preview(plan: Plan, options: Options) -> int:
    """Print what a sweep would run, and return the exit code. Raises UsageError: as a start."""
    inputs = check_without_torch(plan, options)
    for line in [*describe_plan(inputs.plan, options), *inputs.warnings]:
        print(line)
    return 0


def describe_plan(plan: Plan, options: Options) -> Iterator[str]:
    """Describe the number of runs, what differs between their cases, and what all have in common
    that is not the default."""
    cases = [*plan.cases, *(case for case, _ in plan.searched)]
    if plan.cases:
        yield f"runs: {_count_runs(plan, options)}"
    varies = list_varying(cases)
    labels = [case.label(varies) for case in plan.cases]
    others = [name for name in varies if name != "batch_size"] if plan.searched else []
    for case, text in plan.searched:
        label = [case.label(others)] if others else []
        labels.append(" · ".join([*label, f"batch size {text}, found by a search first"]))
    yield from (f"{index:>4}  {label}" for index, label in enumerate(labels[:_SHOWN], 1))
    if (more := len(labels) - _SHOWN) > 0:
        yield f"      and {more:,} more"
    common = [
        f"{axis_flag(name)} {format_value(getattr(cases[0], name))}"
        for name, axis in AXES.items()
        if len({getattr(case, name) for case in cases} - {axis.default, None}) == 1
        and name not in (*varies, *["batch_size"] * bool(plan.searched))
    ]
    if common:
        yield f"all with {' '.join(common)}"
    if options.here and any(case.device == "cuda" for case in cases) and not has_cuda():
        yield (
            "warning: torch has no GPU here, so that a start on this machine is refused; use "
            "--device cpu, or start it where there is one"
        )


def _count_runs(plan: Plan, options: Options) -> str:
    repeats = options.repeats
    planned = plan_runs(plan.cases, repeats)
    left = remaining_runs(planned, _read_history(options), options.retry)
    done = len(planned) - len(left)
    return (
        f"{len(planned):,} of {count(len(plan.cases), 'case')}, {describe_repeats(repeats)}"
        f"{f'; {done:,} already in --out' if done else ''}"
    )


def _read_history(options: Options) -> dict[Run, LatestAttempt]:
    """Return the runs in --out. A real start also checks the environment that they ran in."""
    if options.out is None or not (options.out / RECORDS).is_file():
        return {}
    return read_history(read_rows(options.out))


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
