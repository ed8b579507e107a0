"""The phases of a card: what each runs, and the time that it needs.

A case of 2019 that may end early takes an H200 6 to 17 s with its profile, 4 to 9 s of them beside
training. A slower card completes fewer cases, and reports that.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.apex import choose_interface, find_apex
from bench.card.children import ROOT, ChildRunner, say
from bench.card.folder import FIGURE, MAP_FILES, PAGE, Card, Entry, State, fold_map, unfold_map
from bench.card.scale import Scale
from bench.errors import UnsupportedError
from bench.flags import join_flags
from bench.questions.loss_scales import summarize_scale_map
from bench.record import REPEATED, Status
from bench.store.cells import LOGS, RECORDS
from bench.store.plans import leave_out_known, plan_runs
from bench.store.reader import read_records
from bench.store.runs import read_history
from bench.store.scale_map import read_scale_map
from bench.sweep.options import parse_arguments, plan_cases
from bench.text import count, name_first
from bench.wall.records import read_walls
from bench.wall.search import ANSWERED, STEP, Ending

GPU_TESTS = "tests/gpu"

FAILURES = (Status.ERROR, Status.KILLED, Status.TIMEOUT)
"""Outcomes of a case that make its phase fail, and are tried again next time."""


Run = Callable[[Card, Scale, ChildRunner], Entry]


@dataclass(frozen=True)
class Phase:
    """One part of a card. ``needs_s`` is the shortest time worth starting it with: the first case
    of a sweep, or all of what cannot be divided. ``rehearsal_s`` is the same on a CPU, and
    ``absent`` says what a CPU lacks for it."""

    what: str
    needs_s: float
    rehearsal_s: float
    run: Run
    absent: str = ""


def _sweep(
    flags: str,
    own: Callable[[Scale], str] = lambda scale: "",
    whole: bool = False,
    until: bool = True,
) -> Run:
    """Return a phase that sweeps with these flags, its ``own`` and the scale's. ``whole`` epochs
    are evaluated; with ``until``, others may end as soon as their time is known."""

    def run(card: Card, scale: Scale, children: ChildRunner) -> Entry:
        part = f"--fraction {scale.whole if whole else scale.fraction:g}"
        # a sweep would repeat parts of an epoch by itself; a later --repeats overrides this one
        texts = ("--repeats 1", flags, own(scale), scale.sweep, part)
        ending = "--evaluate" if whole else f"--until {scale.until}" if until else ""
        arguments = join_flags(*(text.split() for text in (*texts, ending)), scale.place)
        before = count_runs(card.folder, arguments)
        if not before.left and not before.failed:
            return Entry(State.DONE, line=before.line)
        command = ["-m", "bench.sweep", *arguments, "--out", str(card.folder)]
        command += ["--retry", *map(str, FAILURES)] if before.failed else []
        # quiet, as its report is of the cases so far; the card's own comes at the end
        ended = children.run(command, watch_time(card.folder / RECORDS, children), quiet=True)
        after = count_runs(card.folder, arguments)
        if ended.returncode == 2:
            return ended.conclude(State.FAILED)
        if after.left and ended.stopped:
            return ended.conclude(ended.stopped, after.line)
        failed = after.left or after.failed or (ended.returncode and not ended.stopped)
        return ended.conclude(State.FAILED if failed else State.DONE, after.line)

    return run


def watch_time(records: Path, children: ChildRunner) -> Callable[[], bool]:
    """Return a function that says whether the next case would probably not end in time, judged by
    the longest so far. It is polled, and says so just after a case has ended, so that no case is
    started in vain."""

    def count_lines() -> int:
        return records.read_bytes().count(b"\n") if records.exists() else 0

    seen, since, longest = count_lines(), time.monotonic(), 0.0

    def enough() -> bool:
        nonlocal seen, since, longest
        now, lines = time.monotonic(), count_lines()
        if lines == seen:
            return False
        longest, since, seen = max(longest, now - since), now, lines
        return now + longest > children.until

    return enough


@dataclass(frozen=True)
class _Tally:
    """The runs of a sweep without an outcome, the failed ones, and one line about all."""

    left: int
    failed: int
    line: str


def count_runs(folder: Path, arguments: Sequence[str]) -> _Tally:
    options = parse_arguments(arguments)
    history, walls = {}, {}
    if (folder / RECORDS).is_file():
        records = read_records(folder)
        history, walls = read_history(records), dict(read_walls(records, STEP))
    cases = plan_cases(options, walls)
    plan = leave_out_known(plan_runs(cases.cases, options.repeats), history)
    done = [history[run].status for run in plan if run in history]
    done = [status for status in done if status not in REPEATED]
    statuses = ", ".join(f"{n} {status}" for status, n in Counter(done).items())
    runs = "runs" if options.repeats > 1 else "cases"
    line = f"{len(done)} of {len(plan)} {runs}" + (f": {statuses}" if statuses else "")
    line += f", {count(len(cases.unknown), 'largest batch size')} to find" if cases.unknown else ""
    left = len(plan) - len(done) + len(cases.unknown)
    return _Tally(left, sum(status in FAILURES for status in done), line)


CUT_LINE = "stopped: it did not end in time"


def _ask(
    name: str, flags: Callable[[Card, Scale], Sequence[str]], describe: Callable[[Any, int], str]
) -> Run:
    """Return a phase whose command prints JSON, which is kept; a command that was stopped leaves
    nothing. ``describe`` writes a line about the answer, from it and the return code."""

    def run(card: Card, scale: Scale, children: ChildRunner) -> Entry:
        ended = children.run([*flags(card, scale), "--json"], quiet=True)
        if ended.stopped:
            return ended.conclude(ended.stopped, CUT_LINE)
        answer = ended.read_answer()
        if answer is None:
            return ended.conclude(State.FAILED)
        card.write_checks(name, answer)
        state = {0: State.DONE, 1: State.DOUBTFUL}.get(ended.returncode)
        if state is None:
            return ended.conclude(State.FAILED)
        return ended.conclude(state, describe(answer, ended.returncode))

    return run


_DOCTOR = {
    0: "nothing found that makes numbers unreliable",
    1: "something makes numbers unreliable, see doctor in checks.json",
}


def _compare_bare(card: Card, scale: Scale, children: ChildRunner) -> Entry:
    command = ["-m", "benchmarks.overhead", "--device", scale.device, *scale.check.split()]
    ended = children.run([*command, "--fraction", f"{scale.fraction:g}"])
    if ended.stopped:
        return ended.conclude(ended.stopped, CUT_LINE)
    return ended.conclude(State.FAILED if ended.returncode else State.DONE)


_PYTEST_INTERRUPTED = 2


def _tests(card: Card, scale: Scale, children: ChildRunner) -> Entry:
    if find_spec("pytest") is None:
        return Entry(State.ABSENT, line="could not run: pytest is not installed")
    from bench.card.testrun import read_outcomes  # which imports pytest

    if not (ROOT / GPU_TESTS).exists():
        return Entry(
            State.ABSENT, line="could not run: only a checkout of the repository has the tests"
        )
    code = sha256(b"".join(file.read_bytes() for file in sorted((ROOT / "tests").rglob("*.py"))))
    if card.tests_code != code.hexdigest()[:12]:
        card.tests, card.tests_code = {}, code.hexdigest()[:12]
    file = card.folder / LOGS / "tests.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"test": test, "outcome": outcome} for test, outcome in card.tests.items() if outcome]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["-m", "pytest", "-v", "-s", "--color=no", "-p", "no:cacheprovider"]
    command += ["-m", "gpu", GPU_TESTS, "-p", "bench.card.testrun"]
    command += ["--card-until", str(children.until), "--card-outcomes", str(file)]
    ended = children.run(command)
    card.tests = read_outcomes(file)
    if not card.tests:
        return ended.conclude(State.FAILED, f"no test was collected: {ended.last}")
    counts = Counter(outcome or "not run" for outcome in card.tests.values())
    line = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    # on a GPU, tests that were all skipped have shown nothing
    nothing = scale.device == "cuda" and not counts["passed"]
    failed = [test.rpartition("::")[2] for test, said in card.tests.items() if said == "failed"]
    if failed:
        line += f"; failed: {name_first(failed, 3)}, see log.txt"
    if counts["not run"] and (ended.stopped or ended.returncode == _PYTEST_INTERRUPTED):
        return ended.conclude(ended.stopped or State.CUT, line)
    wrong = failed or counts["not run"] or nothing
    return ended.conclude(State.FAILED if wrong else State.DONE, line)


def write_report(card: Card, children: ChildRunner) -> Entry:
    if not (card.folder / RECORDS).is_file():
        return Entry(State.ABSENT, line="there are no records to report")
    unfold_map(card)
    figures = card.folder / LOGS / "figures"
    command = ["-m", "bench.report", str(card.folder), "--format", "html"]
    ended = children.run([*command, "-o", str(card.folder / PAGE), "--figures", str(figures)])
    if (picture := figures / FIGURE).is_file():
        picture.replace(card.folder / FIGURE)
    if ended.returncode:
        return ended.conclude(State.FAILED)
    there = (card.folder / FIGURE).is_file()
    return ended.conclude(State.DONE, f"{PAGE}, {FIGURE}" if there else PAGE)


def write_readme(children: ChildRunner) -> None:
    """Update the README's table from the newest card, by `tests/test_readme.py`."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/test_readme.py", "-k", "test_measured_parts_are_current"]
    ended = children.run(command, variables={"UPDATE_README": "1"})
    if ended.returncode:
        say(f"the README was not written: {ended.last}")


def _map_scales(card: Card, scale: Scale, children: ChildRunner) -> Entry:
    command = ["-m", "bench.scales", *scale.map.split(), "--out", str(card.folder)]
    ended = children.run([*command, *scale.place], quiet=True)
    if ended.stopped or ended.returncode:
        for file in (*card.folder.glob("scales.*"), *(card.folder / n for n in MAP_FILES)):
            file.unlink(missing_ok=True)  # an incomplete map would be refused next time
    if ended.stopped:
        return ended.conclude(ended.stopped, CUT_LINE)
    found = read_scale_map(card.folder) if ended.returncode == 0 else None
    if found is None:
        return ended.conclude(State.FAILED)
    fold_map(card)
    return ended.conclude(State.DONE, " ".join(summarize_scale_map(found).splitlines()))


def _find_walls(limited: bool) -> Run:
    def run(card: Card, scale: Scale, children: ChildRunner) -> Entry:
        command = ["-m", "bench.fit", *scale.walls.split(), "--json", *scale.place]
        command += ["--memory-limit", scale.limit] if limited else []
        command += ["--out", str(card.folder), "--retry", *map(str, FAILURES)]
        ended = children.run(command, watch_time(card.folder / RECORDS, children), quiet=True)
        if ended.returncode == 2:
            return ended.conclude(State.FAILED)
        if ended.stopped:
            return ended.conclude(ended.stopped, "continues from its probes")
        walls = ended.read_answer()
        if walls is None:
            return ended.conclude(State.FAILED)
        line = "; ".join(
            f"{wall['precision']}: {wall['largest']} trains, {wall['smallest_failing']} does not, "
            f"{wall['probes']} probes"
            + (f" ({wall['ending']})" if wall["ending"] != Ending.FOUND else "")
            for wall in walls
        )
        answered = walls and all(wall["ending"] in ANSWERED for wall in walls)
        return ended.conclude(State.DONE if answered else State.FAILED, line)

    return run


_HEADLINE = "--preset rtx-titan --batch-size 256 --loss-scale 128"

_PROFILED = "--profile on"
"""For all phases that share cases, so that none is measured again for its profile alone, which took
39 s a case on an H100."""


def _apex(card: Card, scale: Scale, children: ChildRunner) -> Entry:
    try:
        choose_interface(find_apex(), None)
    except UnsupportedError as error:
        return Entry(State.ABSENT, line=f"could not run: {error}")
    # apex trains with SGD only, so fp16 is measured again, unlike in the other phases
    flags = "--precision fp16-apex fp16 --optimizer sgd --batch-size 256 --loss-scale 128"
    return _sweep(flags)(card, scale, children)


PHASES: dict[str, Phase] = {
    "doctor": Phase(
        "what this machine can and cannot measure",
        12,
        4,
        _ask(
            "doctor",
            lambda card, scale: ["-m", "bench.doctor", "--out", str(card.folder), *scale.images],
            lambda _, returncode: _DOCTOR[returncode],
        ),
    ),
    "headline": Phase(
        "rtx-titan's fp32 and fp16 at batch size 256, the comparison of the 2019 page",
        30,
        10,
        # the very cases of the preset, so that nothing is measured twice
        _sweep(f"{_HEADLINE} {_PROFILED}"),
    ),
    "rtx-titan": Phase("the nine cases of 2019", 30, 10, _sweep(f"--preset rtx-titan {_PROFILED}")),
    "precision": Phase(
        "every precision, with the parts of its step",
        25,
        10,
        _sweep(f"--preset precision {_PROFILED}"),
    ),
    "repeats": Phase(
        "fp32, fp16 and bf16-amp again, in fresh processes",
        20,
        10,
        _sweep(
            f"--preset precision {_PROFILED}",
            own=lambda scale: f"--repeats {scale.repeats} {scale.repeated}",
        ),
    ),
    "epochs": Phase(
        "whole epochs of the headline's cases, with their accuracy on the test images",
        70,
        40,
        _sweep(_HEADLINE, whole=True),
    ),
    "tests": Phase("the GPU tests, those of the arithmetic first", 15, 8, _tests),
    "compile": Phase(
        "fp16 compiled",
        60,
        20,
        _sweep("--preset precision --compile on", own=lambda scale: scale.compiled),
    ),
    "autotune": Phase(
        "fp32 and fp16 with cudnn.benchmark",
        20,
        1,
        _sweep("--preset precision --precision fp32 fp16 --loss-scale 128 --cudnn-benchmark on"),
        absent="a CPU has no cuDNN",
    ),
    "graphs": Phase(
        "fp16's whole step as a CUDA graph",
        20,
        1,
        # at batch size 128 an H100 waited for the host; at 256 it did not
        _sweep(
            "--preset precision --precision fp16 --loss-scale 128 --batch-size 128 256 "
            "--cuda-graphs on"
        ),
        absent="a CPU has no CUDA graphs",
    ),
    "apex": Phase("NVIDIA apex beside our own fp16, where it is installed", 25, 1, _apex),
    "overhead": Phase("the same steps by a bare loop in plain torch", 65, 12, _compare_bare),
    "wall-limit": Phase(
        "the largest batch that fits in 21 GiB, as on the card of 2019",
        25,
        8,
        _find_walls(limited=True),
    ),
    "wall": Phase(
        "the largest batch that fits on this card",
        25,
        1,
        _find_walls(limited=False),
        absent="a CPU has no largest batch without a memory limit",
    ),
    "scales": Phase("which loss scales are safe for DPN-92", 60, 14, _map_scales),
    "profiles": Phase(
        "the parts of a step of tf32 and bf16-amp at other batch sizes",
        25,
        14,
        # two sizes beside the presets' 256: a small batch has limits of its own
        _sweep(
            f"--preset precision --batch-size 128 512 {_PROFILED}", own=lambda scale: scale.profiles
        ),
    ),
    "ddp": Phase(
        "the headline's cases by DistributedDataParallel in one process: what it costs alone",
        30,
        12,
        # its processes would end after different steps
        _sweep(f"{_HEADLINE} --parallel ddp --world-size 1", until=False),
    ),
}

PUBLISHED = ("headline", "rtx-titan")
"""Phases that must be done before the README shows a card's table."""
