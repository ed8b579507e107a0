"""`python -m bench.advise`: find the setting that trains fastest here, within a budget of time.

It measures the setting that you use now, then what promises most: precision, batch size, compiling
and other switches that leave the network as it is. Every run is a row of the folder; the same
command goes on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from bench.advise.advisor import Advisor
from bench.advise.answer import Answer
from bench.advise.space import LEVERS, expect_start, list_levers, list_settings, read_scale, refuse
from bench.advise.standing import GOALS, PRICED, strip
from bench.axis import Value
from bench.case import Case, list_absent, parse_value
from bench.data import SYNTHETIC, find_layout
from bench.environment.host import has_cuda
from bench.errors import UsageError, choose, nearest
from bench.flags import (
    Parser,
    add_axes,
    add_flag,
    command,
    describe,
    parse_number,
    parse_percent,
    read_axes,
)
from bench.gpu.kinds import refuse_others
from bench.grid import grid
from bench.preset import Preset
from bench.processes import leave
from bench.sweep.display import Display
from bench.sweep.folder import default_out
from bench.sweep.hardware import examine_alike
from bench.sweep.options import Options, add_running, read_running
from bench.sweep.preflight import Inputs
from bench.sweep.session import continue_folder, hire_crew, open_loop, start_executor
from bench.text import parse_bytes

BUDGET = "10m"
MARGIN = "1%"
FORMATS: dict[str, Callable[[Answer], str]] = {
    "text": lambda answer: "\n".join(answer.write()),
    "json": lambda answer: json.dumps(answer.describe(), indent=2),
}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.advise",
        absent=list_absent("advise"),
        usage="%(prog)s [--model NAME] [--now AXIS=VALUE,…] [--budget TIME] [--out DIR] […]",
        description=describe(__doc__),
        epilog="Return code: 0 with an answer, 3 without one, 2 for a usage error.",
    )
    add = partial(add_flag, parser.add_argument_group("what to find"))
    wall = "wall time, such as 90s, 10m or 1h; a run that has begun is not cut off"
    add("--budget", "TIME", f"{wall} ({BUDGET})", parse_budget, BUDGET)
    usual = "default: precision=fp32,batch_size=128, where flags allow them"
    add("--now", "AXIS=VALUE,…", f"the setting that you use now ({usual})", default="")
    goals = {goal: goal for goal in GOALS}
    small = f"what is to be small: {', '.join(GOALS)} ({GOALS[0]})"
    add("--for", "GOAL", small, partial(choose, right=goals), GOALS[0], "goal")
    costs = "what an hour of this machine costs, in any currency; the answer has images for it"
    above = partial(parse_number, right="a number above 0, such as 2.49")
    add("--price", "P", costs, above)
    as_good = f"a training loss within this is as good ({MARGIN.replace('%', '%%')})"
    add("--margin", "P%", as_good, _parse_margin, MARGIN)
    add("--format", "FORMAT", "text or json (text)", partial(choose, right=FORMATS), "text")
    add_axes(
        parser,
        "one value fixes a setting, several are the ones to be tried; without a flag, "
        + ", ".join(dict.fromkeys(name for levers in LEVERS.values() for name in levers))
        + " and batch_size are tried",
    )
    add_running(parser)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Find the setting to train with.

    Returns 0 with an answer; 3 without one; 1 where the disk is full; 2 for a usage error; 130 or
    143 where it was stopped.
    """
    began = monotonic()
    given = build_parser().parse(argv)
    if given.price is None and given.goal == PRICED:
        raise UsageError(f"--for {PRICED} needs the price of an hour here, such as --price 2.49")
    now, axes = read_now(given)
    options = read_running(given, axes, Preset("advise", "", ({},)))
    if options.lanes not in (None, 1) or options.quiet:
        raise UsageError("--lanes: bench.advise measures one case at a time; leave it out")
    answer, stopped = find(now, given, options, began + given.budget)
    print(given.format(answer))
    if stopped:
        return 128 + stopped
    return 0 if answer.advised is not None else 3


def _parse_margin(flag: str, text: str) -> float:
    return parse_percent(f"{flag} {text!r}", text)


def parse_budget(flag: str, text: str) -> float:
    """Read ``90s``, ``10m`` or ``1h`` as s. Raises UsageError: it is no time above 0."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|m|min|h)", text.strip())
    seconds = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise UsageError(f"{flag} {text[:40]!r}: give a time above 0, such as 90s, 10m or 1h")
    return seconds


def read_now(given: argparse.Namespace) -> tuple[Case, dict[str, list[Value]]]:
    """The setting that is used now, and the values of axes that flags give.

    Raises UsageError: an axis is unknown, a value is not one that it can take, or settings do not
    go together.
    """
    axes = read_axes(given)
    present: dict[str, Any] = {name: values[0] for name, values in axes.items()}
    # of several that are to be tried, the default is the present one, if it is among them
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
    refuse_others([present["device"]], "bench.advise")
    if "dataset" not in present and not given.data_url and find_layout(given.data_dir) is None:
        present["dataset"] = SYNTHETIC
    (now,) = grid({name: [value] for name, value in present.items()}, asked=())
    return strip(now), axes


def find(
    now: Case, given: argparse.Namespace, options: Options, until: float
) -> tuple[Answer, int]:
    """Search until a time.monotonic(); the answer, and the number of the signal that stopped it."""
    axes = options.axes
    with start_executor(options) as executor:
        hardware = examine_alike(executor, [now], options, "which may need different settings")
        inputs = hardware.inputs
        now = strip(inputs.settle(now))
        items = inputs.data(now).train_images
        fixed = {n: v for n, v in axes.items() if n in (*LEVERS[now.device], "batch_size")}
        fixed |= {name: values for name, values in axes.items() if len(values) > 1}
        if given.goal == "memory":  # of which the smallest batch takes least
            fixed.setdefault("batch_size", [now.batch_size])
        levers = list_levers(now, fixed, items)
        out = options.out or default_out(inputs.platforms)
        scale = read_scale(out, now)
        said = {"loss_scale": scale} if scale else {}
        settings = list_settings(now, levers, {**said, **axes}, inputs)
        left_out = {
            str(value): why
            for value in levers.get("precision", ())
            if (why := refuse(replace(now, precision=str(value)), now, inputs))
        }
        with open_loop(hardware, executor, out, options) as loop:
            advisor = Advisor(
                loop,
                settings,
                continue_folder(loop, settings),
                given.goal,
                given.budget,
                until,
                room_bytes=find_room(now, inputs),
                judged=now.dataset != SYNTHETIC,
                margin=given.margin,
                start_s=expect_start,
                items=items,
            )
            with (
                hire_crew({loop: hardware}) as (crew, stopped),
                Display(out, None, len(advisor.known), [*levers], "the best setting") as display,
            ):
                loop.show_on(display)
                crew.work([advisor])
    answer = Answer(
        advisor.standing,
        given.goal,
        {name: values for name, values in levers.items() if len(values) > 1},
        left_out,
        options.resume(out),
        given.budget,
        out,
        given.price,
        items,
        bool(stopped()),
    )
    return answer, stopped()


def find_room(now: Case, inputs: Inputs) -> float:
    """Bytes that training may take: of the card, or of a CPU's memory half, as others need some."""
    import psutil

    if now.memory_limit:
        return parse_bytes(now.memory_limit)
    card = inputs.platforms[now.device].environment.gpu_memory_bytes
    return card or psutil.virtual_memory().available / 2


if __name__ == "__main__":
    leave(main())
