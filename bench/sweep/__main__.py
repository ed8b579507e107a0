"""`python -m bench.sweep`: train every case once and record time, memory and learning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.base.processes import leave
from bench.networks.data import DATASETS
from bench.networks.freezing import FREEZES
from bench.networks.models import LENGTHS, MODELS
from bench.report import print_report
from bench.schema.axis import COMPILES, DYNAMICS, PARALLELS, RECOMPUTES
from bench.schema.flags import command
from bench.schema.optimization import OPTIMIZERS, SCHEDULES
from bench.schema.precision import FP8_RECIPES, OPT_LEVELS, POLICIES, PRECISIONS
from bench.schema.preset import load_preset, preset_names
from bench.sweep.execution import rehearse, run_sweep
from bench.sweep.options import parse_arguments, plan_cases


@command
def main(argv: Sequence[str]) -> int:
    """Run a sweep.

    Returns 0; 1 if the disk is full or nothing could be measured; 2 for a usage error; 130 or 143
    if it was stopped.
    """
    options = parse_arguments(argv)
    if options.list:
        print_registries()
        return 0
    plan = plan_cases(options)
    if options.dry_run:
        print(*rehearse(plan, options), sep="\n")
        return 0
    done = run_sweep(plan, options)
    for line in done.unsized:
        print(f"warning: no batch size for {line}", file=sys.stderr)
    if done.left:
        print(done.left, file=sys.stderr)
    elif options.report:
        print_report([str(done.folder)])
    if done.stopped:
        return 128 + done.stopped
    return 1 if done.left or done.failed else 0


def print_registries() -> None:
    """Print what the values of flags are, for --list."""
    sections = {
        "presets": {name: load_preset(name).description for name in preset_names()},
        "precisions": {name: precision.help for name, precision in PRECISIONS.items()},
        "dynamic loss scales": {name: policy.help for name, policy in POLICIES.items()},
        "opt levels of fp16-apex": {name: level.help for name, level in OPT_LEVELS.items()},
        "recipes of fp8": {name: recipe.help for name, recipe in FP8_RECIPES.items()},
        "optimizers": {
            name: f"{kind.name}: lr {kind.lr:g}, {kind.settings}; bytes a weight: {kind.state}"
            for name, kind in OPTIMIZERS.items()
        },
        "schedules": SCHEDULES,
        "how the network is compiled (--compile)": COMPILES,
        "for which shapes of a batch (--dynamic)": DYNAMICS,
        "what --freeze takes": FREEZES,
        "which activations are computed again (--recompute)": RECOMPUTES,
        "how several GPUs train (--parallel)": PARALLELS,
        "models": {
            **MODELS,
            "package.module:factory": "your own torch.nn.Module, or 'nets:build(depth=16)'",
        },
        "datasets": DATASETS,
        "workloads": {
            "images": "the network of --model on the images of --dataset",
            **dict.fromkeys(LENGTHS, "as --model: a GPT on synthetic texts of --length tokens"),
            "package.module:factory": "your own bench.Workload",
        },
    }
    for title, entries in sections.items():
        print(f"{title}:", *(f"  {name:<24}{what}" for name, what in entries.items()), sep="\n")


if __name__ == "__main__":
    leave(main())
