"""The command line of a search for the best settings, and the trials that it asks for."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path

from bench.base.errors import UsageError, choose
from bench.base.origin import EXECUTORS
from bench.machine.host import list_devices
from bench.results.store.reader import read_config
from bench.schema.axis import Value
from bench.schema.case import (
    Case,
    default_lr,
    format_value,
    list_axes,
    parse_value,
)
from bench.schema.command import list_places
from bench.schema.flags import (
    ABSENT,
    Parser,
    add_axes,
    add_flag,
    add_format,
    describe,
    parse_whole,
    read_axes,
)
from bench.schema.goals import SEARCH_METRICS, Halving, read_halving
from bench.schema.grid import refuse_auto
from bench.schema.precision import PRECISIONS
from bench.schema.preset import Preset
from bench.sweep.options import Options, Plan, add_running, plan_cases, read_running
from bench.sweep.preflight import check_without_torch, describe_plan

_EPOCHS, SAMPLES, GRACE, REDUCTION, METRIC = 9, 16, 1, 3, "test_accuracy"

_BATCHES = [64, 128, 256, 512]
LOSS_SCALES: list[Value] = [128.0, 1024.0, "dynamic"]
"""The default values to search; loss scales, for the precisions that scale a loss."""

AROUND = 10.0
"""The factor by which default learning rates may be below or above the optimizer's own."""

DIGITS = 3
"""Significant digits of a learning rate that is drawn: a tenth of a percent changes nothing, and
people have to write it."""

_MOST_SAMPLES = 10_000


@dataclass(frozen=True)
class Search:
    """The command line, parsed and checked."""

    options: Options  # as of a sweep over the lists of values
    cases: Sequence[Case]  # the trials
    halving: Halving
    format: str  # of what is found: text or json


def draw_trials(
    options: Options, samples: int, seed: int, rates: tuple[float, float] | None
) -> tuple[list[Case], list[dict[str, str]]]:
    """Draw the trials, and return them and the settings of each, which are of the axes that vary
    among all possible trials: they do not depend on the number of samples. Without values of ``lr``
    in the options, learning rates are drawn from the range ``rates``, or from around each
    optimizer's own, which of a command is not known. Raises UsageError: settings do not go
    together, or there is only one trial."""
    given: dict[str, list[Value]] = {"lr": [rates[0]]} if rates else {}
    grid = plan_cases(replace(options, axes=options.axes | given)).cases
    axes = {name for name in list_axes(grid) if len({getattr(case, name) for case in grid}) > 1}
    if "lr" in options.axes or (rates is None and "command" in options.axes):
        trials = random.Random(seed).sample(grid, len(grid))[:samples]
    else:
        axes.add("lr")
        trials = _draw_rates(grid, samples, seed, rates)
    if len(trials) < 2:
        raise UsageError(
            "there is one trial, and a search compares several; give --lr a range such as 0.01..1, "
            "or another axis or --vary several values"
        )
    named = [name for name in list_axes(trials) if name in axes]
    return trials, [{n: format_value(getattr(case, n)) for n in named} for case in trials]


def go_on(out: Path, halving: Halving) -> Halving:
    """Return a search with the trials of an earlier one in its folder, if that had more. Raises
    UsageError: that one is by other rules or of other trials."""
    earlier = read_halving(read_config(out).get("halving"))
    if earlier is None:
        return halving
    alike = all(map(eq, earlier.trials, halving.trials))
    if not alike or replace(earlier, trials=halving.trials) != halving:
        raise UsageError(
            f"--out {out}: has a search by another --metric, --epochs, --grace, --reduction or "
            "--seed, or of other settings; give the same, or choose another --out"
        )
    return max(halving, earlier, key=lambda one: len(one.trials))


def describe_search(asked: Search) -> Iterator[str]:
    """Describe the trials and epochs that a search would run. Raises UsageError: as a start."""
    trials, halving = asked.cases, asked.halving
    if asked.options.out is not None:
        go_on(asked.options.out, halving)
    inputs = check_without_torch(Plan([*trials]), asked.options)
    yield from describe_plan(inputs.plan, asked.options)
    rungs = " and ".join(map(str, halving.rungs))
    yield (
        f"rungs: after {rungs} of {halving.epochs} epochs, by {halving.metric}, about one in "
        f"{halving.reduction} goes on; {len(trials) * halving.rungs[0]} to "
        f"{len(trials) * halving.epochs} epochs in all"
    )
    yield from inputs.warnings


def _draw_rates(
    grid: Sequence[Case], samples: int, seed: int, rates: tuple[float, float] | None
) -> list[Case]:
    """Draw trials: each combination of the lists in turn, learning rates uniform on a log scale.
    The first trials are the same for any number of samples, so that a search can be extended."""
    chance, drawn = random.Random(seed), dict[Case, None]()
    # a limit, because a narrow range holds few numbers of `DIGITS` digits
    for index in range(20 * samples):
        if index % len(grid) == 0:
            order = chance.sample(grid, len(grid))
        case = order[index % len(grid)]
        own = default_lr(case.optimizer)
        low, high = rates or (own / AROUND, own * AROUND)
        rate = math.exp(chance.uniform(math.log(low), math.log(high)))
        drawn[replace(case, lr=min(max(float(f"{rate:.{DIGITS}g}"), low), high))] = None
        if len(drawn) == samples:
            break
    return list(drawn)


def build_parser(docstring: str | None) -> Parser:
    parser = Parser(
        prog="python -m bench.search",
        absent=ABSENT["search"],
        usage="%(prog)s [--command TEXT] [--lr LOW..HIGH] [--AXIS VALUE …] [--epochs E] […]",
        description=describe(docstring),
    )
    group = parser.add_argument_group("how to search")
    add = partial(add_flag, group)
    add(
        "--samples",
        "N",
        f"trials to make ({SAMPLES})",
        partial(parse_whole, least=2, most=_MOST_SAMPLES),
        SAMPLES,
    )
    add(
        "--metric",
        "NAME",
        f"what trials are compared by: {', '.join(SEARCH_METRICS)} ({METRIC})",
        default=METRIC,
    )
    add("--grace", "E", f"epochs that every trial trains ({GRACE})", default=str(GRACE))
    add(
        "--reduction",
        "R",
        f"about one in R of the compared trials continues, R times as long ({REDUCTION})",
        partial(parse_whole, least=2, most=1000),
        REDUCTION,
    )
    add_format(group, "of what is found, ")
    group.add_argument("--dry-run", action="store_true", help="print the trials and their epochs")
    add_axes(
        parser,
        "each takes one value or several, and --lr a range such as 0.001..0.1, from which rates "
        f"are drawn log-uniformly; defaults: --epochs {_EPOCHS}, --batch-size "
        f"{' '.join(map(str, _BATCHES))}, --loss-scale {' '.join(map(format_value, LOSS_SCALES))} "
        "for the precisions that scale a loss, and --lr from a tenth to ten times the optimizer's "
        "own, or of a --command none of these; --seed is also that of the draw",
    )
    add_running(parser)
    return parser


def parse_arguments(argv: Sequence[str], docstring: str | None = None) -> Search:
    given = build_parser(docstring).parse(argv)
    if given.executor in EXECUTORS and not EXECUTORS[given.executor].here:
        raise UsageError(
            f"--executor {given.executor}: bench.search decides while trials run, which it does on "
            "this machine alone; leave it out"
        )
    choose("--metric", given.metric, SEARCH_METRICS)
    choose("--format", given.format, dict.fromkeys(("text", "json")))
    rates = _take_range(given)
    own = read_axes(given)
    axes: dict[str, list[Value]] = {"epochs": [_EPOCHS], "seed": [Case.seed], **own}
    for name in ("epochs", "seed"):
        if len(axes[name]) > 1:
            raise UsageError(f"--{name} takes one value here, for all trials")
    epochs, seed = (int(str(axes[name][0])) for name in ("epochs", "seed"))
    if epochs < 2:
        raise UsageError("--epochs 1 leaves nothing to end early; give at least 2, or bench.sweep")
    grace = parse_whole("--grace", given.grace, 1, epochs - 1)
    for size in axes.get("batch_size", []):
        if isinstance(size, str):
            refuse_auto(Case(), size)
    if "command" in own:
        searched: Mapping[str, Sequence[Value]] = {}
        command = _choose_command(own, given.metric)
        if "epochs" not in list_places(command):
            del axes["epochs"]  # which it decides itself
    else:
        searched = _choose_searched(axes, given.metric)
    options = read_running(given, axes, Preset("search", "", (searched,)))
    cases, settings = draw_trials(options, given.samples, seed, rates)
    halving = Halving(given.metric, epochs, grace, given.reduction, settings)
    return Search(options, cases, halving, given.format)


def _choose_command(axes: Mapping[str, Sequence[Value]], metric: str) -> str:
    """Return the command to search. Raises UsageError: there are several, or it is not known how
    many epochs a whole trial has, or no command tells the metric."""
    if len(axes["command"]) > 1:
        raise UsageError("--command: bench.search compares trials of one command; give one")
    if metric == "train_accuracy":
        raise UsageError(f"--metric {metric}: a --command does not tell it; give another")
    command = str(axes["command"][0])
    if "epochs" not in axes and "epochs" not in list_places(command):
        raise UsageError(
            "the --command has no {epochs}; give --epochs N, the number of epochs that its script "
            "trains, or add {epochs} there"
        )
    return command


def _choose_searched(axes: dict[str, list[Value]], metric: str) -> Mapping[str, Sequence[Value]]:
    """Return the default values to search of the harness's own training, and have it evaluated if
    the metric needs that. Raises UsageError: it is not to be."""
    if metric.startswith("test"):
        if False in axes.get("evaluate", []):
            raise UsageError(
                f"--metric {metric} needs the test images; leave out --evaluate off, or give "
                "--metric train_loss"
            )
        axes["evaluate"] = [True]
    # loss scales are for fp16, which a CPU computes too slowly
    usual = "fp16" if list_devices(axes) == ["cuda"] else "fp32"
    searched: dict[str, Sequence[Value]] = {"batch_size": _BATCHES, "precision": [usual]}
    if any(PRECISIONS[str(name)].scales_loss for name in axes.get("precision", [usual])):
        searched["loss_scale"] = LOSS_SCALES
    return searched


def _take_range(given: argparse.Namespace) -> tuple[float, float] | None:
    """Take a range out of ``--lr`` and return it; None if its values are numbers."""
    if not any(".." in text for text in given.lr or ()):
        return None
    text, given.lr = " ".join(given.lr), None
    with suppress(UsageError, ValueError):
        low, high = (float(str(parse_value("lr", end, "--lr"))) for end in text.split(".."))
        if low < high:
            return low, high
    right = "a range is of two numbers above 0 and goes upwards, such as 0.001..0.1"
    raise UsageError(f"--lr {text[:40]!r}: {right}")
