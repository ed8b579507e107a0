"""`python -m bench.card`: run every measurement of a new GPU, nine minutes at a time.

Doctor, the GPU tests, the presets rtx-titan and precision, whole epochs, NVIDIA apex, the harness's
overhead, an independent cross-check, the loss-scale map and repeats, by priority, into one folder
under results/. The same command continues where it was stopped. Without a GPU it rehearses itself
on the CPU at a small scale.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.card.folder import LOCK, LOG, Card, Entry, State, choose_card, tidy
from bench.card.phases import (
    AGENDA,
    CLOSING_REHEARSAL_S,
    CLOSING_S,
    PHASES,
    PUBLISHED,
    ROOT,
    Ended,
    Phase,
    Scale,
    rehearse,
    write_report,
)
from bench.data.sources import detect
from bench.environment import Platform, has_cuda, probe, refuse_missing
from bench.errors import UsageError, nearest
from bench.flags import Parser, command, describe
from bench.record import COMPARABLE
from bench.sweep.preflight import default_out, refuse_unwritable
from bench.text import clean

MINUTES = "CARD_MINUTES"
_GRACE_S = 8.0  # a sweep stopped by SIGINT ends its worker in 3 s and prints its report


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
        help="where the folder of results is created",
    )
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    add(
        "--fraction",
        metavar="F",
        help="part of the epoch that each case measures (0.2; 1 is the whole epoch)",
    )
    add(
        "--only",
        nargs="+",
        metavar="PHASE",
        default=[],
        help=f"run only these: {', '.join(PHASES)}",
    )
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
    from filelock import FileLock, Timeout

    deadline = begun + 60 * _parse_number("--minutes", given.minutes, 1e6)
    for name in given.only:
        if name not in PHASES:
            raise UsageError(f"--only {name!r}: {nearest(name, list(PHASES))}")
    fraction = _parse_number("--fraction", given.fraction, 1) if given.fraction else None
    refuse_unwritable(given.out)
    rehearsal = not has_cuda()
    if rehearsal:
        # threads that wait for each other make a busy machine's training many times slower
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    platform = probe("cpu" if rehearsal else "cuda")
    scale = rehearse(fraction) if rehearsal else choose_scale(given.data_dir, fraction)
    scale = Scale(**{**vars(scale), "allow_shared": given.allow_shared})
    card, remark = choose_card(
        given.out.absolute(),
        ("rehearsal-" if rehearsal else "") + default_out({"": platform}).name,
        identify(platform, scale),
        rehearsal=rehearsal,
        new=given.new,
    )
    card.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(card.folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"{card.folder}: another bench.card is running there; wait for it to end"
        ) from None
    try:
        for line in filter(None, [_title(card, platform, scale), remark]):
            say(line)
        closing = CLOSING_REHEARSAL_S if rehearsal else CLOSING_S
        with Supervisor(card.folder / LOG) as children:
            run_agenda(card, scale, children, begun, deadline - closing, given.only)
            children.closing = True
            children.until = max(deadline, time.monotonic() + closing) + 30
            started = time.monotonic()
            report = write_report(card, children)
            report.seconds = time.monotonic() - started
            here = card.folder.parent == ROOT / "results"
            if card.done(*PUBLISHED) and not card.rehearsal and here:
                publish(children)
            stopped = children.stopped
        card.seconds += time.monotonic() - begun
        card.complete = all(card.finished(name) for name in PHASES)
        card.write()
        problems = tidy(card.folder)
    finally:
        (card.folder / LOCK).unlink(missing_ok=True)
        lock.release()
    print("\n".join(summarize(card, report, problems, time.monotonic() - begun, given.minutes)))
    if stopped:
        return 128 + stopped
    bad = {State.FAILED, State.DOUBTFUL} & {e.state for e in (*card.phases.values(), report)}
    return 1 if bad or problems else 0


def run_agenda(
    card: Card,
    scale: Scale,
    children: Supervisor,
    begun: float,
    end: float,
    only: Sequence[str] = (),
) -> None:
    """Give each phase of ``only``, or all, its turn by priority; the state is written after each.
    The time is from ``begun`` to ``end``, by time.monotonic(); the report is made after that."""
    rehearsal, finished = scale.device == "cpu", set[str]()
    for name, share in AGENDA:
        phase, now = PHASES[name], time.monotonic()
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
    phase: Phase, card: Card, scale: Scale, children: Supervisor, before: Entry | None
) -> Entry:
    """Run a phase; a fault in it is its outcome, and the others go on."""
    start = time.monotonic()
    try:
        entry = phase.run(card, scale, children)
    except UsageError as error:
        entry = Entry(State.FAILED, line=str(error))
    except Exception as error:
        entry = Entry(State.FAILED, line=clean(f"{type(error).__name__}: {error}"))
    entry.seconds = time.monotonic() - start + (before.seconds if before else 0.0)
    return entry


def identify(platform: Platform, scale: Scale) -> dict[str, object]:
    environment = platform.environment
    known = {name: getattr(environment, name) for name in COMPARABLE}
    del known["dataset_fingerprint"]  # the sweep itself compares it
    if environment.gpu is None:
        known["cpu"] = environment.cpu
    return {**known, "dataset": scale.dataset, "fraction": scale.fraction}


def publish(children: Supervisor) -> None:
    """Have the README's table made anew, from the newest card; `tests/test_readme.py` makes it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/test_readme.py", "-k", "test_measured_parts_are_current"]
    ended = children.run(command, environment={"UPDATE_README": "1"})
    if ended.returncode:
        say(f"the README was not written: {ended.last}")


def summarize(
    card: Card, report: Entry, problems: Sequence[str], seconds: float, minutes: str
) -> list[str]:
    """The screen at the end: every phase, what was cut and why, and how to go on."""
    gpu = card.identity.get("gpu") or "REHEARSAL on a CPU: these numbers say nothing about a GPU"
    files = [file for file in card.folder.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    lines = ["", f"{gpu}: {_clock(seconds)} of {minutes} min"]
    lines.append(f"{card.folder} ({len(files)} files, {size:.1f} MiB)")
    lines.append("")
    for name in PHASES:
        entry = card.phases.get(name)
        state = entry.state if entry else "not run"
        took = f"{entry.seconds:.0f} s" if entry and entry.seconds else "–"
        lines.append(f"  {name:<11} {state:<11} {took:>6}  {entry.line if entry else ''}".rstrip())
    lines.append(f"  {'report':<11} {report.state:<11} {report.seconds:>4.0f} s  {report.line}")
    lines.append("")
    lines += [f"limit broken: {problem}" for problem in problems]
    open_ones = [name for name in PHASES if not card.finished(name)]
    if open_ones:
        lines.append(f"to continue with {', '.join(open_ones)}: run the same command again")
    else:
        lines.append("complete")
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
    return lines


def say(line: str) -> None:
    print(clean(line), file=sys.stderr, flush=True)


@dataclass
class Supervisor:
    """Runs one child at a time: shows and logs what it prints, and stops it in time. A context
    manager that turns the first Ctrl-C or SIGTERM into a clean stop of the child, and the second
    into an immediate end."""

    log: Path
    until: float = float("inf")
    stopped: int = 0
    closing: bool = False
    """The report is made even where the user has asked for an end; asking again ends that too."""

    _child: subprocess.Popen[str] | None = None
    _before: dict[int, object] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        return bool(self.stopped)

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, _: object) -> None:
        if self.stopped:
            self._end_group()
            os._exit(128 + number)
        self.stopped = number
        # print() may have been interrupted half way and cannot be entered twice
        os.write(2, b"\nstopping: what is done is kept; again to stop at once\n")

    def run(
        self,
        command: Sequence[str],
        enough: Callable[[], bool] = lambda: False,
        quiet: bool = False,
        environment: dict[str, str] | None = None,
    ) -> Ended:
        start, path = time.monotonic(), os.environ.get("PYTHONPATH", "")
        paths = os.pathsep.join(filter(None, [str(ROOT), path]))
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n== {' '.join(command[1:])} ==\n")
            self._child = child = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # of its own, so that Ctrl-C comes to the child from here alone
                start_new_session=True,
            )
            assert child.stdout
            assert child.stderr
            out: list[str] = []
            errors: list[str] = []
            pumps = [
                threading.Thread(target=_pump, args=(stream, kept, places), daemon=True)
                for stream, kept, places in (
                    (child.stdout, out, () if quiet else (log, sys.stderr)),
                    (child.stderr, errors, (log, sys.stderr)),
                )
            ]
            for pump in pumps:
                pump.start()
            stopped = self._wait(child, enough)
            for pump in pumps:
                pump.join(5)
            self._child = None
        said = [line for line in (*out[-20:], *errors[-20:]) if line.strip()]
        last = clean(said[-1]).removeprefix("error: ") if said else f"rc {child.returncode}"
        seconds = time.monotonic() - start
        return Ended(child.returncode, seconds, stopped, "".join(out), last)

    def _wait(self, child: subprocess.Popen[str], enough: Callable[[], bool]) -> bool:
        """Wait for the child, asking it and then making it end; whether it was asked to."""
        asked = 0.0
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
                break
            now = time.monotonic()
            unwanted = self.stopped and not self.closing
            if not asked and (unwanted or now > self.until or enough()):
                asked = now
                child.send_signal(signal.SIGINT)
            elif asked and now > asked + _GRACE_S:
                self._end_group()
        return bool(asked)

    def _end_group(self) -> None:
        if self._child:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)


def _pump(stream: IO[str], kept: list[str], places: Sequence[IO[str]]) -> None:
    for line in stream:
        kept.append(line)
        for place in places:
            place.write(line)
            place.flush()


def choose_scale(data_dir: Path | None, fraction: float | None) -> Scale:
    """A card's scale: CIFAR-10 where it is found, and no download, which may take minutes."""
    folder = (data_dir or Path("data")).absolute()
    found = folder.is_dir() and detect(folder) is not None
    if data_dir and not found:
        raise UsageError(f"--data-dir {data_dir}: no CIFAR-10 there; see docs/sweep.md, Images")
    return Scale(
        "cuda", "cifar10" if found else "synthetic", folder if found else None, fraction or 0.2
    )


def _title(card: Card, platform: Platform, scale: Scale) -> str:
    name = platform.environment.gpu or "no GPU: this is a rehearsal on the CPU, at a small scale"
    return f"{name}; {scale.dataset}, {100 * scale.fraction:g} % of an epoch; {card.folder}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _parse_number(flag: str, text: str, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= high:
        raise UsageError(f"{flag} {text!r}: give a number above 0, at most {high:g}")
    return value


if __name__ == "__main__":
    sys.exit(main())
