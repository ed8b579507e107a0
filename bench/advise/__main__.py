"""`python -m bench.advise`: find what to train with here, within a budget of time.

It measures the setting that you use now, then others: precisions, batch sizes, compiling and other
switches that leave the network as it is, each at the best so far. Your batch size is kept, unless
another is shown to take a tenth less: then the smallest that is shown to be within a tenth of the
fastest is advised. Every run is a row of the folder; the same command continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from bench.advise.advisor import Advice, find_advice
from bench.advise.findings import LEVERS, list_levers, strip
from bench.answers.advice import BUDGET, parse_budget
from bench.base.errors import UsageError, choose, nearest
from bench.base.processes import leave
from bench.machine.host import has_cuda
from bench.schema.axis import Value, name_column, own_axis
from bench.schema.case import AXES, Case, parse_value
from bench.schema.command import list_places, list_worded, read_vary, write_vary
from bench.schema.flags import (
    ABSENT,
    Parser,
    add_axes,
    add_flag,
    add_format,
    command,
    describe,
    read_axes,
)
from bench.schema.grid import grid
from bench.schema.preset import ADVICE, Preset
from bench.sweep.options import add_running, choose_dataset, read_running


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.advise",
        absent=ABSENT["advise"],
        usage="%(prog)s [--model NAME] [--command TEXT] [--now AXIS=VALUE,…] […]",
        description=describe(__doc__),
        epilog="Return code: 0 with an answer, 3 without one, 2 for a usage error.",
    )
    group = parser.add_argument_group("what to find")
    add_flag(
        group,
        "--budget",
        "TIME",
        f"wall time, such as 90s, 10m or 1h; a run that would end more than a tenth of it later is "
        f"stopped ({BUDGET})",
        parse_budget,
        BUDGET,
    )
    add_flag(
        group,
        "--now",
        "AXIS=VALUE,…",
        "the setting that you use now (default: precision=fp32,batch_size=128, where flags allow "
        "them)",
        default="",
    )
    group.add_argument(
        "--for",
        dest="aim",
        choices=("time",),
        help="advise also values of --vary that no loss is known of, if they take less time",
    )
    add_format(group)
    add_axes(
        parser,
        "one value fixes a setting, several are tried; without a flag, "
        f"{', '.join(LEVERS['cuda'])} are tried; of a --command its placeholders, by the values of "
        "flags or those that it has words for",
    )
    add_running(parser)
    return parser


def _read_now(given: argparse.Namespace, axes: Mapping[str, Sequence[Value]]) -> Case:
    """Return the present setting, from ``--now`` and the values that flags give. Raises UsageError:
    an axis is unknown, a value is invalid, or settings cannot be combined."""
    present: dict[str, Any] = {}
    for name, values in axes.items():
        # of several values, the present one is the default, if it is among them
        usual = getattr(Case, name)
        present[name] = usual if usual in values else values[0]
    for size in axes.get("batch_size", []):
        if isinstance(size, str):
            raise UsageError(f"--batch-size {size}: give numbers; what does not fit is not tried")
    own = dict(read_vary(present.get("vary")))
    known = [*given.axes, *map(name_column, own)]
    for part in filter(None, (word.strip() for word in given.now.split(","))):
        name, sign, text = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or not sign:
            right = f"{name}=VALUE" if name in known else f"AXIS=VALUE; {nearest(name, known)}"
            raise UsageError(f"--now {part[:40]!r}: give {right}")
        if own_axis(name) in own:
            own[own_axis(name)] = text.strip()
        else:
            present[name] = parse_value(name, text.strip(), f"--now {name}")
    present.setdefault("device", "cuda" if has_cuda() else "cpu")
    if "command" in present:
        present |= _read_command(axes, present) | ({"vary": write_vary(own)} if own else {})
    else:
        present.setdefault("dataset", choose_dataset(given))
    (now,) = grid({name: [value] for name, value in present.items()}, asked=())
    now = strip(now)
    if now.command is not None and not any(
        len({*v}) > 1 for v in list_levers(now, axes, 0).values()
    ):
        raise UsageError(
            "--command: nothing in it has two values to try; put in braces what may vary, such as "
            "{batch_size} with --now batch_size=N, or {precision:fp32=,bf16-amp=--amp}"
        )
    return now


def _read_command(
    axes: Mapping[str, Sequence[Value]], present: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the present values of a command's placeholders that no flag gives: the first that each
    has words for. Raises UsageError: there are several commands, or no batch size."""
    if len(axes["command"]) > 1:
        raise UsageError("--command: bench.advise advises on one command; give one")
    text = str(present["command"])
    if "batch_size" in list_places(text) and "batch_size" not in present:
        raise UsageError(
            "--command: {batch_size} has no value; give the one that you use as "
            "--now batch_size=N, or several as --batch-size N …"
        )
    return {
        name: parse_value(name, values[0], "--command")
        for name, values in list_worded(text).items()
        if name in AXES and name not in present
    }


def write_text(answer: Advice) -> str:
    return "".join(f"{line}\n" for line in answer.write())


@command
def main(argv: Sequence[str]) -> int:
    """Find the setting to train with.

    Return 0 with an answer; 3 without one; 1 if the disk is full; 2 for a usage error; 130 or 143
    if it was stopped by a signal.
    """
    began = monotonic()
    given = build_parser().parse(argv)
    write = choose("--format", given.format, {"text": write_text, "json": Advice.write_json})
    axes = read_axes(given)
    now = _read_now(given, axes)
    options = read_running(given, axes, Preset(ADVICE, "", ({},)))
    if options.lanes not in (None, 1):
        raise UsageError("--lanes: bench.advise measures one case at a time; leave it out")
    answer = find_advice(now, options, given.budget, began + given.budget, given.aim == "time")
    print(write(answer), end="")
    if answer.stopped:
        return 128 + answer.stopped
    return 0 if answer.advised is not None else 3


if __name__ == "__main__":
    leave(main())
