"""The command line of a search for advice, and the setting that it starts from."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.advise.answer import Answer
from bench.advise.space import LEVERS, name_levers
from bench.advise.standing import GOALS, PRICED, strip
from bench.axis import Value
from bench.case import Case, list_absent, parse_value
from bench.environment.host import has_cuda
from bench.errors import UsageError, choose, nearest
from bench.flags import (
    Parser,
    add_axes,
    add_flag,
    describe,
    parse_number,
    parse_percent,
    read_axes,
)
from bench.grid import grid
from bench.preset import Preset
from bench.sweep.options import Options, add_running, choose_dataset, read_running

BUDGET = "10m"
MARGIN = "1%"
FORMATS: dict[str, Callable[[Answer], str]] = {
    "text": lambda answer: "\n".join(answer.write()),
    "json": lambda answer: json.dumps(answer.describe(), indent=2),
}


def build_parser(docstring: str | None) -> Parser:
    parser = Parser(
        prog="python -m bench.advise",
        absent=list_absent("advise"),
        usage="%(prog)s [--model NAME] [--now AXIS=VALUE,…] [--budget TIME] [--out DIR] […]",
        description=describe(docstring),
        epilog="Return code: 0 with an answer, 3 without one, 2 for a usage error.",
    )
    add = partial(add_flag, parser.add_argument_group("what to find"))
    wall = "wall time, such as 90s, 10m or 1h; a run that has begun is not cut off"
    add("--budget", "TIME", f"{wall} ({BUDGET})", parse_budget, BUDGET)
    usual = "default: precision=fp32,batch_size=128, where flags allow them"
    add("--now", "AXIS=VALUE,…", f"the setting that you use now ({usual})", default="")
    goals = {goal: goal for goal in GOALS}
    small = f"what to minimise: {', '.join(GOALS)} ({GOALS[0]})"
    add("--for", "GOAL", small, partial(choose, right=goals), GOALS[0], "goal")
    costs = "price of an hour of this machine, in any currency, to show images per unit of it"
    above = partial(parse_number, right="a number above 0, such as 2.49")
    add("--price", "P", costs, above)
    as_good = (
        f"a training loss that is higher by less counts as equal ({MARGIN.replace('%', '%%')})"
    )
    add("--margin", "P%", as_good, _parse_margin, MARGIN)
    add("--format", "FORMAT", "text or json (text)", partial(choose, right=FORMATS), "text")
    add_axes(
        parser,
        "one value fixes a setting, several are tried; without a flag, "
        + ", ".join(dict.fromkeys(name for levers in LEVERS.values() for name in levers))
        + " and batch_size are tried",
    )
    add_running(parser)
    return parser


@dataclass(frozen=True)
class Question:
    """A command line, parsed and checked."""

    now: Case  # the setting that is used now
    options: Options
    goal: str  # of `GOALS`
    budget_s: float
    margin: float
    price: float | None  # per hour
    write: Callable[[Answer], str]


def parse_arguments(argv: Sequence[str], docstring: str | None = None) -> Question:
    given = build_parser(docstring).parse(argv)
    if given.price is None and given.goal == PRICED:
        raise UsageError(f"--for {PRICED} needs the price of an hour here, such as --price 2.49")
    axes = read_axes(given)
    now = _read_now(given, axes)
    options = read_running(given, axes, Preset("advise", "", ({},)))
    if options.lanes not in (None, 1):
        raise UsageError("--lanes: bench.advise measures one case at a time; leave it out")
    several = [name for name, values in axes.items() if len(values) > 1]
    if not several and axes.keys() >= set(name_levers(now)):
        raise UsageError(
            "flags fix all that bench.advise tries; leave one out, or give it several values, such "
            "as --batch-size 64 128"
        )
    return Question(now, options, given.goal, given.budget, given.margin, given.price, given.format)


def _parse_margin(flag: str, text: str) -> float:
    return parse_percent(f"{flag} {text!r}", text)


def parse_budget(flag: str, text: str) -> float:
    """Parse ``90s``, ``10m`` or ``1h`` as s. Raises UsageError: it is not a time above 0."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|m|min|h)", text.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise UsageError(f"{flag} {text[:40]!r}: give a time above 0, such as 90s, 10m or 1h")
    return seconds


def _read_now(given: argparse.Namespace, axes: Mapping[str, Sequence[Value]]) -> Case:
    """Return the present setting, from ``--now`` and the values that flags give. Raises UsageError:
    an axis is unknown, a value is invalid, or settings cannot be combined."""
    present: dict[str, Any] = {name: values[0] for name, values in axes.items()}
    # if a flag gives several values, the present one is the default, if it is among them
    usual = {name: getattr(Case, name) for name, values in axes.items() if len(values) > 1}
    present |= {name: value for name, value in usual.items() if value in axes[name]}
    for size in axes.get("batch_size", []):
        if isinstance(size, str):
            raise UsageError(f"--batch-size {size}: give numbers; what does not fit is not tried")
    for part in filter(None, (word.strip() for word in given.now.split(","))):
        name, sign, text = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in given.axes or not sign:
            raise UsageError(f"--now {part[:40]!r}: give AXIS=VALUE; {nearest(name, given.axes)}")
        present[name] = parse_value(name, text.strip(), f"--now {name}")
    present.setdefault("device", "cuda" if has_cuda() else "cpu")
    present.setdefault("dataset", choose_dataset(given))
    (now,) = grid({name: [value] for name, value in present.items()}, asked=())
    return strip(now)
