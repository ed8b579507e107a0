"""`python -m bench.card`: run every measurement of a new GPU, nine minutes at a time.

Doctor, the GPU tests, the presets rtx-titan and precision, whole epochs, NVIDIA apex, the harness's
overhead, an independent cross-check, the loss-scale map and repeats, by priority, into one folder
under results/. The same command continues where it was stopped. Without a GPU it rehearses itself
on the CPU at a small scale.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bench.card.children import ROOT, Children, build_environment
from bench.card.folder import LOCK, LOG, Card, Entry, State, choose_card, tidy
from bench.card.phases import (
    AGENDA,
    CLOSING_REHEARSAL_S,
    CLOSING_S,
    PHASES,
    PUBLISHED,
    SHARES,
    Phase,
    Scale,
    rehearse,
    write_report,
)
from bench.data.sources import detect
from bench.environment.asking import probe
from bench.environment.device import Platform
from bench.environment.host import has_cuda
from bench.environment.packages import refuse_missing
from bench.errors import UsageError, choose
from bench.executors.server import lend_server
from bench.flags import Parser, command, describe, hold, parse_number
from bench.processes import leave
from bench.record import COMPARABLE
from bench.store.cells import RECORDS
from bench.sweep.folder import default_out, refuse_unwritable
from bench.text import clean

MINUTES = "CARD_MINUTES"


def build_parser() -> Parser:
    parser = Parser(prog="python -m bench.card", description=describe(__doc__))
    add = parser.add_argument
    minutes = os.environ.get(MINUTES) or "9"
    add("--minutes", metavar="N", default=minutes, help=f"time for all of it (${MINUTES}, or 9)")
    add("--out", type=Path, default=Path("results"), metavar="DIR", help="where its folder goes")
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
    """Show everything.

    Returns 0 where nothing failed, though time may have cut some of it; 1 where something failed or
    speaks against the numbers; 2 for a usage error; 130 or 143 where it was stopped.
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
        closing = CLOSING_REHEARSAL_S if rehearsal else CLOSING_S
        with (
            lend_server(build_environment(), ROOT) as lent,
            Children(card.folder / LOG, lent) as children,
        ):
            run_agenda(card, scale, children, begun, deadline - closing, given.only)
            children.closing = True
            children.until = max(deadline, time.monotonic() + closing) + 30
            started = time.monotonic()
            report = write_report(card, children)
            report.seconds = time.monotonic() - started
            here = card.folder.parent == ROOT / "results"
            if card.done(*PUBLISHED) and not card.rehearsal and here:
                publish(children)
        card.seconds += time.monotonic() - begun
        card.complete = all(card.finished(name) for name in PHASES)
        card.write()
        problems = tidy(card.folder)
    print("\n".join(summarize(card, report, problems, time.monotonic() - begun, given.minutes)))
    if children.stopped:
        return 128 + children.stopped
    bad = {State.FAILED, State.DOUBTFUL} & {e.state for e in (*card.phases.values(), report)}
    return 1 if bad or problems else 0


def run_agenda(
    card: Card, scale: Scale, children: Children, begun: float, end: float, only: Sequence[str] = ()
) -> None:
    """Give each phase of ``only``, or all, its turn by priority; the state is written after each.
    The time is from ``begun`` to ``end``, by time.monotonic(); the report is made after that."""
    rehearsal, finished = scale.device == "cpu", set[str]()
    for turn, name in enumerate(AGENDA):
        phase, now = PHASES[name], time.monotonic()
        share = 1.0 if name in AGENDA[:turn] else SHARES.get(name, 1.0)
        if children.stopped or (only and name not in only) or name in finished:
            continue
        if card.finished(name) and name != "doctor":  # a machine may have changed since
            continue
        before = card.phases.get(name)
        children.until = min(end, now + share * (end - begun))
        left, needs = end - now, phase.rehearsal_s if rehearsal else phase.needs_s
        if left < needs:
            reason = f"needs about {needs:.0f} s, {max(0, left):.0f} s were left"
            line = f"{before.line}; {reason}" if before and before.line else reason
            # what failed before has not been mended by there being no time now
            state = before.state if before else State.CUT
            card.phases[name] = Entry(state, before.seconds if before else 0.0, None, line)
        else:
            say(f"{name}: {phase.what}")
            card.phases[name] = run_phase(phase, card, scale, children, before)
            if card.finished(name):
                finished.add(name)
        card.write()


def run_phase(
    phase: Phase, card: Card, scale: Scale, children: Children, before: Entry | None
) -> Entry:
    """Run a phase; a fault in it is its outcome, and the others go on."""
    start = time.monotonic()
    try:
        if phase.absent and scale.device == "cpu":
            entry = Entry(State.ABSENT, line=phase.absent)
        else:
            entry = phase.run(card, scale, children)
    except Exception as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        entry = Entry(State.FAILED, line=clean(f"{kind}{error}"))
    entry.seconds = time.monotonic() - start + (before.seconds if before else 0.0)
    return entry


def identify(platform: Platform, scale: Scale) -> dict[str, object]:
    environment = platform.environment
    known = {name: getattr(environment, name) for name in COMPARABLE}
    del known["dataset_fingerprint"]  # the sweep itself compares it
    if environment.gpu is None:
        known["cpu"] = environment.cpu
    return {**known, "dataset": scale.dataset, "fraction": scale.fraction}


def publish(children: Children) -> None:
    """Have the README's table made anew, from the newest card; `tests/test_readme.py` makes it."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/test_readme.py", "-k", "test_measured_parts_are_current"]
    ended = children.run(command, variables={"UPDATE_README": "1"})
    if ended.returncode:
        say(f"the README was not written: {ended.last}")


def summarize(
    card: Card, report: Entry, problems: Sequence[str], seconds: float, minutes: str
) -> list[str]:
    """The screen at the end: every phase, what was cut and why, and how to go on."""
    gpu = card.identity.get("gpu") or "REHEARSAL on a CPU: these numbers say nothing about a GPU"
    files = [file for file in card.folder.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    took = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    lines = ["", f"{gpu}: {took} of {minutes} min"]
    lines += [f"{card.folder} ({len(files)} files, {size:.1f} MiB)", ""]
    for name in PHASES:
        entry, state, took, line = card.phases.get(name), "not run", "–", ""
        if entry:
            state, line = entry.state, entry.line
            took = f"{entry.seconds:.0f} s" if entry.seconds else took
        lines.append(f"  {name:<11} {state:<11} {took:>6}  {line}".rstrip())
    lines += [f"  {'report':<11} {report.state:<11} {report.seconds:>4.0f} s  {report.line}", ""]
    lines += [f"limit broken: {problem}" for problem in problems]
    left = ", ".join(name for name in PHASES if not card.finished(name))
    lines.append(f"to continue with {left}: run the same command again" if left else "complete")
    if card.identity["dataset"] == "synthetic" and not card.rehearsal:
        lines.append(
            "no CIFAR-10 was found, so the images are synthetic and the losses say "
            "nothing about CIFAR-10; give --data-dir"
        )
    if card.identity["fraction"] != 1 and not card.rehearsal:
        lines.append(
            f"each case measured {100 * float(card.identity['fraction']):g} % of an epoch; "
            "--fraction 1 measures whole epochs, into a new folder"
        )
    return [*lines, *_tell_how_to_contribute(card)]


def _tell_how_to_contribute(card: Card) -> Iterator[str]:
    """Two lines that add the folder to a clone of the project, and what it gives away."""
    if not (card.folder / RECORDS).is_file():
        return
    from bench.store.reader import read_records
    from bench.validate.evidence import list_given_away

    place = Path("results", card.folder.name)
    here = card.folder.parent == ROOT / "results"
    what = card.identity.get("gpu") or card.identity.get("cpu")
    yield f"to contribute it, in {'this' if here else 'a'} clone of the project:"
    bring = "" if here else f"cp -r {shlex.quote(str(card.folder))} results/ && "
    yield f"  {bring}python -m bench.validate {place}"
    yield f"  git add {place} && git commit -m {shlex.quote(f'Add results of {what}')}"
    yield f"it gives away {'; '.join(list_given_away(card.folder, read_records(card.folder)))}"


def say(line: str) -> None:
    print(clean(line), file=sys.stderr, flush=True)


def choose_scale(data_dir: Path | None, fraction: float | None) -> Scale:
    """A card's scale: CIFAR-10 where it is found, and no download, which may take minutes."""
    folder = (data_dir or Path("data")).absolute()
    found = folder.is_dir() and detect(folder) is not None
    if data_dir and not found:
        raise UsageError(f"--data-dir {data_dir}: no CIFAR-10 there; see docs/sweep.md, Images")
    return Scale(
        "cuda", "cifar10" if found else "synthetic", folder if found else None, fraction or 0.2
    )


def _parse_share(flag: str, text: str, most: float) -> float:
    right = f"a number above 0, at most {most:g}"
    return parse_number(flag, text, right, lambda value: 0 < value <= most)


if __name__ == "__main__":
    leave(main())
