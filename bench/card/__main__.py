"""`python -m bench.card`: run every measurement of a new GPU, nine minutes at a time.

The doctor, the presets rtx-titan and precision, repeats, whole epochs, the GPU tests, compiling, an
bare loop beside, NVIDIA apex, memory limits, the loss-scale map, profiles and more, by
priority, into one folder under results/. The same command continues where it was stopped. Without
a GPU it rehearses itself on the CPU at a small scale.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.card.agenda import CLOSING_REHEARSAL_S, CLOSING_S, close, run_agenda
from bench.card.children import ROOT, ChildRunner, build_environment, say
from bench.card.folder import LOCK, LOG, State, choose_card, tidy
from bench.card.phases import PHASES
from bench.card.scale import choose_scale, identify, prepare_ahead, rehearse
from bench.card.summary import summarize
from bench.environment.asking import probe
from bench.environment.host import has_cuda
from bench.environment.packages import refuse_missing
from bench.errors import choose
from bench.executors.server import lend_server
from bench.flags import Parser, command, describe, hold, parse_number
from bench.processes import leave
from bench.sweep.folder import default_out, refuse_unwritable

MINUTES = "CARD_MINUTES"


def build_parser() -> Parser:
    parser = Parser(prog="python -m bench.card", description=describe(__doc__))
    add = parser.add_argument
    minutes = os.environ.get(MINUTES) or "9"
    add("--minutes", metavar="N", default=minutes, help=f"time for all of it (${MINUTES}, or 9)")
    add(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="DIR",
        help="parent of the card's folder (results)",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    part = "part of the epoch that each case measures (0.2; 1 is the whole epoch)"
    add("--fraction", metavar="F", help=part)
    names = f"run only these: {', '.join(PHASES)}"
    add("--only", nargs="+", metavar="PHASE", default=[], help=names)
    add("--new", action="store_true", help="start a new folder, even if an unfinished one is there")
    add("--allow-shared", action="store_true", help="measure on a GPU that other processes use")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Run the phases.

    Return 0 if nothing failed, even if time was too short for some of it; 1 if something failed or
    casts doubt on the numbers; 2 for a usage error; 130 or 143 if it was stopped by a signal.
    """
    begun = time.monotonic()
    given = build_parser().parse(argv)
    refuse_missing()
    deadline = begun + 60 * _parse_share("--minutes", given.minutes, 1e6)
    for name in given.only:
        choose("--only", name, PHASES)
    fraction = _parse_share("--fraction", given.fraction, 1) if given.fraction else None
    refuse_unwritable(given.out)
    rehearsal = not has_cuda()
    if rehearsal:
        # threads that wait for each other make a busy machine's training many times slower
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    platform = probe("cpu" if rehearsal else "cuda")
    gpu = platform.environment.gpu
    scale = rehearse(fraction) if rehearsal else choose_scale(given.data_dir, fraction)
    scale = replace(scale, allow_shared=given.allow_shared)
    card, remark = choose_card(
        given.out.absolute(),
        ("rehearsal-" if rehearsal else "") + default_out({"": platform}).name,
        identify(platform, scale),
        rehearsal=rehearsal,
        new=given.new,
    )
    card.folder.mkdir(parents=True, exist_ok=True)
    busy = f"{card.folder}: another bench.card is running there; wait for it to end"
    with hold(card.folder / LOCK, busy):
        title = gpu or "no GPU: this is a rehearsal on the CPU, at a small scale"
        say(f"{title}; {scale.dataset}, {100 * scale.fraction:g} % of an epoch; {card.folder}")
        if remark:
            say(remark)
        if not rehearsal:
            prepare_ahead(scale)
        closing = CLOSING_REHEARSAL_S if rehearsal else CLOSING_S
        with (
            lend_server(build_environment(), ROOT) as lent,
            ChildRunner(card.folder / LOG, lent) as children,
        ):
            run_agenda(card, scale, children, begun, deadline - closing, given.only)
            report = close(card, children, max(deadline, time.monotonic() + closing) + 30)
        card.seconds += time.monotonic() - begun
        card.complete = all(card.finished(name) for name in PHASES)
        card.write()
        problems = tidy(card.folder)
    print("\n".join(summarize(card, report, problems, time.monotonic() - begun, given.minutes)))
    if children.stopped:
        return 128 + children.stopped
    bad = {State.FAILED, State.DOUBTFUL} & {e.state for e in (*card.phases.values(), report)}
    return 1 if bad or problems else 0


def _parse_share(flag: str, text: str, most: float) -> float:
    right = f"a number above 0, at most {most:g}"
    return parse_number(flag, text, right, lambda value: 0 < value <= most)


if __name__ == "__main__":
    leave(main())
