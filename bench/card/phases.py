"""The phases of a card: what each runs, what it needs, and in which order they have their turns.

All the times here are of an H200: nine RTX Titan cases are 195 s of training at whole epochs and 12
to 16 s each of set-up and warm-up, so a fifth of an epoch measures all nine in under three minutes.
A slower card fits fewer cases in, and says so.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from bench.apex import choose_interface, find_apex
from bench.card.folder import FIGURE, MAP_FILES, PAGE, Card, Entry, State, fold_map, unfold_map
from bench.errors import UnsupportedError
from bench.flags import join_flags
from bench.questions.loss_scales import summarize_scale_map
from bench.record import REPEATED, Status
from bench.scale_map import read_scale_map
from bench.store.cells import LOGS, RECORDS
from bench.store.plans import leave_out_known, plan_runs
from bench.store.reader import read_history, read_records
from bench.sweep.options import parse_arguments, plan_cases
from bench.text import count
from bench.wall.records import read_walls
from bench.wall.search import ANSWERED, STEP, Ending

ROOT = Path(__file__).parents[2]
GPU_TESTS = ("tests/gpu", "tests/data/test_batches.py")

FAILURES = (Status.ERROR, Status.KILLED, Status.TIMEOUT)
"""Outcomes of a case that make its phase a failed one, and are tried again next time."""


@dataclass(frozen=True)
class Ended:
    """A child process that has ended: by itself, or ``stopped`` because time was up."""

    returncode: int
    seconds: float
    stopped: bool
    stdout: str
    last: str


class Children(Protocol):
    """Runs a child process of the card, shows and logs what it prints, and ends it in time."""

    until: float
    """time.monotonic() at which what runs is stopped."""

    @property
    def interrupted(self) -> bool: ...

    def run(
        self,
        command: Sequence[str],
        enough: Callable[[], bool] = lambda: False,
        quiet: bool = False,
    ) -> Ended:
        """Run a command; SIGINT at the end of the time, or once ``enough()`` is true. The standard
        output of a ``quiet`` one is an answer, not to be shown."""


@dataclass(frozen=True)
class Scale:
    device: str
    dataset: str
    data_dir: Path | None
    fraction: float
    whole: float = 1.0
    """The fraction of the phase that measures whole epochs."""
    allow_shared: bool = False
    repeats: int = 3
    pairs: int = 2
    sweep: tuple[str, ...] = ()
    check: tuple[str, ...] = ("--batch-size", "256")
    map: tuple[str, ...] = (
        *("--model", "dpn92", "--precision", "fp16", "fp16-amp"),
        *("--scales", "1", "128", "2^16", "2^24"),
        *("--train", "1", "128", "2^16", "2^24", "dynamic"),
    )
    walls: tuple[str, ...] = (
        *("--model", "dpn92", "--precision", "fp32", "fp16", "bf16-amp"),
        *("--optimizer", "adamw"),  # as the presets: its state is the larger one
    )
    limit: str = "21GiB"
    profiles: tuple[str, ...] = ("--precision", "tf32", "bf16-amp")
    compiled: tuple[str, ...] = ("--precision", "fp16", "--loss-scale", "128")
    repeated: tuple[str, ...] = ("--precision", "fp32", "fp16", "bf16-amp", "--loss-scale", "128")
    until: str = "1%"
    """How well the epoch time of a case is to be known, which ends a part of an epoch early."""

    def sweep_flags(self, whole: bool = False, until: bool = True) -> list[str]:
        """What every sweep is told beside its preset: of ``whole`` epochs to evaluate, of others
        whether it may end as soon as its time is known."""
        fraction = self.whole if whole else self.fraction
        flags = [*self.sweep, "--dataset", self.dataset, "--fraction", f"{fraction:g}"]
        flags += ["--evaluate"] if whole else ["--until", self.until] if until else []
        flags += ["--device", self.device]
        flags += ["--data-dir", str(self.data_dir)] if self.data_dir else []
        return [*flags, "--allow-shared"] if self.allow_shared else flags

    def check_flags(self) -> list[str]:
        flags = ["--pairs", str(self.pairs), "--fraction", f"{self.fraction:g}"]
        return [*flags, "--device", self.device, "--json", *self.check]


def rehearse(fraction: float | None) -> Scale:
    """The scale of a CPU: a small network, synthetic images, four steps a case."""
    return Scale(
        device="cpu",
        dataset="synthetic",
        data_dir=None,
        fraction=fraction or 0.0005,
        whole=0.001,
        repeats=2,
        pairs=1,
        # fp16 is emulated on most CPUs: of dpn-small a step took 9 s at batch size 32
        sweep=("--model", "dpn-small", "--batch-size", "8"),
        check=("--model", "dpn-small", "--batch-size", "8", "--precision", "fp32"),
        map=(
            "--model",
            "dpn-small",
            "--batch-size",
            "8",
            "--at",
            "1",
            "--steps",
            "2",
            "--scales",
            "1",
            "128",
            "2^24",
            "--train",
            "128",
        ),
        walls=("--model", "dpn-small", "--precision", "fp32", "--step", "8"),
        limit="720MiB",
        profiles=("--precision", "bf16-amp"),
        compiled=("--precision", "fp32"),
        repeated=("--precision", "fp32", "bf16-amp"),
    )


Run = Callable[[Card, Scale, Children], Entry]


@dataclass(frozen=True)
class Phase:
    """One thing to show. ``needs_s`` is the shortest time worth starting it with: the first case of
    a sweep, all of what cannot be divided; ``rehearsal_s`` the same on a CPU."""

    name: str
    what: str
    needs_s: float
    rehearsal_s: float
    run: Run


def _sweep(
    *flags: str,
    own: Callable[[Scale], Sequence[str]] = lambda scale: (),
    whole: bool = False,
    until: bool = True,
) -> Run:
    """A phase that is a sweep, told these flags, its ``own`` of the scale, and the scale's."""

    def run(card: Card, scale: Scale, children: Children) -> Entry:
        # once, though a sweep repeats a part of an epoch by itself: the phase repeats comes last
        once = ["--repeats", "1"]
        arguments = join_flags(once, flags, own(scale), scale.sweep_flags(whole, until))
        before = count_runs(card.folder, arguments)
        if not before.left and not before.failed:
            return Entry(State.DONE, line=before.line)
        command = [sys.executable, "-m", "bench.sweep", *arguments, "--out", str(card.folder)]
        command += ["--retry", *map(str, FAILURES)] if before.failed else []
        # its report is of what is there so far; this card's own comes at the end
        ended = children.run(command, watch_time(card.folder / RECORDS, children), quiet=True)
        after = count_runs(card.folder, arguments)
        if ended.returncode == 2:
            return Entry(State.FAILED, returncode=2, line=ended.last)
        if children.interrupted and after.left:
            state = State.INTERRUPTED
        elif after.left and ended.stopped:
            state = State.CUT
        else:
            failed = after.left or after.failed or (ended.returncode and not ended.stopped)
            state = State.FAILED if failed else State.DONE
        return Entry(state, returncode=ended.returncode, line=after.line)

    return run


def watch_time(records: Path, children: Children) -> Callable[[], bool]:
    """Whether the case under way would probably not end in time: the longest so far decides. It is
    asked again and again, and says so just after a case has ended, so that the next one is not
    begun in vain."""
    seen, since, longest = _lines(records), time.monotonic(), 0.0

    def enough() -> bool:
        nonlocal seen, since, longest
        now, lines = time.monotonic(), _lines(records)
        if lines == seen:
            return False
        longest, since, seen = max(longest, now - since), now, lines
        return now + longest > children.until

    return enough


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@dataclass(frozen=True)
class _Tally:
    """How many runs of a sweep have no outcome yet, how many failed, and one line of all."""

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
    statuses_of = [history[run].status if run in history else None for run in plan]
    done = [status for status in statuses_of if status and status not in REPEATED]
    statuses = ", ".join(f"{n} {status}" for status, n in Counter(done).items())
    runs = "runs" if options.repeats > 1 else "cases"
    line = f"{len(done)} of {len(plan)} {runs}" + (f": {statuses}" if statuses else "")
    line += f", {count(len(cases.unknown), 'largest batch size')} to find" if cases.unknown else ""
    left = len(plan) - len(done) + len(cases.unknown)
    return _Tally(left, sum(status in FAILURES for status in done), line)


def _doctor(card: Card, scale: Scale, children: Children) -> Entry:
    command = [sys.executable, "-m", "bench.doctor", "--json", "--out", str(card.folder)]
    command += ["--data-dir", str(scale.data_dir)] if scale.data_dir else []
    ended = children.run(command, quiet=True)
    return _keep_answer(
        card,
        "doctor",
        ended,
        children,
        {
            0: "nothing found that makes numbers unreliable",
            1: "something makes numbers unreliable, see doctor in checks.json",
        },
    )


def _check(module: str, describe: Callable[[dict[str, object]], str]) -> Run:
    def run(card: Card, scale: Scale, children: Children) -> Entry:
        command = [sys.executable, "-m", f"bench.{module}", *scale.check_flags()]
        ended = children.run(command, quiet=True)
        entry = _keep_answer(card, module, ended, children, {})
        if entry.state in (State.DONE, State.DOUBTFUL):
            entry.line = describe(json.loads(ended.stdout))
        return entry

    return run


def _keep_answer(
    card: Card, name: str, ended: Ended, children: Children, lines: dict[int, str]
) -> Entry:
    """Keep the JSON that a check printed; what was cut leaves nothing half done."""
    if ended.stopped:
        state = State.INTERRUPTED if children.interrupted else State.CUT
        return Entry(state, returncode=ended.returncode, line="stopped: it did not end in time")
    line = lines.get(ended.returncode, ended.last)
    try:
        card.write_checks(name, json.loads(ended.stdout))
    except ValueError:
        return Entry(State.FAILED, returncode=ended.returncode, line=ended.last or "no answer")
    states = {0: State.DONE, 1: State.DOUBTFUL}
    state = states.get(ended.returncode, State.FAILED)
    return Entry(state, returncode=ended.returncode, line=line)


def _describe_overhead(answer: dict[str, object]) -> str:
    ratios = [float(ratio) for ratio in answer["ratios"]]  # type: ignore[attr-defined]
    spread = f" ({min(ratios):.4f} to {max(ratios):.4f})" if len(ratios) > 1 else ""
    return f"epoch time, harness / bare loop = {answer['ratio']:.4f}{spread}"


def _describe_crosscheck(answer: dict[str, object]) -> str:
    judged: dict[str, dict[str, object]] = answer["judgements"]  # type: ignore[assignment]
    parts = [
        f"{what} {100 * (float(str(j['ratio'])) - 1):+.2f} % {j['verdict']}"
        if j["ratio"] is not None
        else f"{what} {j['verdict']}"
        for what, j in judged.items()
    ]
    return ", ".join(parts) + ("; on a CPU this decides nothing" if answer["rehearsal"] else "")


def _tests(card: Card, scale: Scale, children: Children) -> Entry:
    if find_spec("pytest") is None:
        return Entry(State.ABSENT, line="could not run: pytest is not installed")
    from bench.card.testrun import read_outcomes  # which imports pytest

    if not all((ROOT / name).exists() for name in GPU_TESTS):
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
    command = [sys.executable, "-m", "pytest", "-v", "-s", "--color=no", "-p", "no:cacheprovider"]
    command += ["-m", "gpu", *GPU_TESTS, "-p", "bench.card.testrun"]
    command += ["--card-until", str(children.until), "--card-outcomes", str(file)]
    ended = children.run(command)
    card.tests = read_outcomes(file)
    counts = Counter(outcome or "not run" for outcome in card.tests.values())
    line = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    if not card.tests:
        state, line = State.FAILED, f"no test was collected: {ended.last}"
    elif counts["not run"] and (ended.stopped or ended.returncode == _PYTEST_INTERRUPTED):
        state = State.INTERRUPTED if children.interrupted else State.CUT
    else:
        # on a card, tests that all skip have shown nothing
        nothing = scale.device == "cuda" and not counts["passed"]
        failed_some = counts["failed"] or counts["not run"] or nothing
        state = State.FAILED if failed_some else State.DONE
    if failed := [test for test, outcome in card.tests.items() if outcome == "failed"]:
        line += f"; failed: {', '.join(test.rpartition('::')[2] for test in failed[:3])}"
        line += f" and {len(failed) - 3} more, see log.txt" if len(failed) > 3 else ", see log.txt"
    return Entry(state, returncode=ended.returncode, line=line)


_PYTEST_INTERRUPTED = 2


def write_report(card: Card, children: Children) -> Entry:
    if not (card.folder / RECORDS).is_file():
        return Entry(State.ABSENT, line="there are no records to report")
    unfold_map(card.folder)
    page, figures = card.folder / PAGE, card.folder / LOGS / "figures"
    command = [sys.executable, "-m", "bench.report", str(card.folder), "--format", "html"]
    ended = children.run([*command, "-o", str(page), "--figures", str(figures)])
    if (picture := figures / FIGURE).is_file():
        picture.replace(card.folder / FIGURE)
    if ended.returncode:
        return Entry(State.FAILED, returncode=ended.returncode, line=ended.last)
    return Entry(
        State.DONE,
        returncode=0,
        line=f"{PAGE}, {FIGURE}" if (card.folder / FIGURE).is_file() else PAGE,
    )


def _map_scales(card: Card, scale: Scale, children: Children) -> Entry:
    command = [sys.executable, "-m", "bench.scales", *scale.map, "--out", str(card.folder)]
    command += ["--device", scale.device, "--dataset", scale.dataset]
    command += ["--data-dir", str(scale.data_dir)] if scale.data_dir else []
    command += ["--allow-shared"] if scale.allow_shared else []
    ended = children.run(command, quiet=True)
    if ended.stopped or ended.returncode:
        for file in (*card.folder.glob("scales.*"), *(card.folder / n for n in MAP_FILES)):
            file.unlink(missing_ok=True)  # one that lacks cases would be refused next time
    if ended.stopped:
        state = State.INTERRUPTED if children.interrupted else State.CUT
        return Entry(state, returncode=ended.returncode, line="stopped: it did not end in time")
    found = read_scale_map(card.folder) if ended.returncode == 0 else None
    if found is None:
        return Entry(State.FAILED, returncode=ended.returncode, line=ended.last or "no map")
    fold_map(card)
    return Entry(State.DONE, returncode=0, line=" ".join(summarize_scale_map(found).splitlines()))


def _find_walls(limited: bool) -> Run:
    def run(card: Card, scale: Scale, children: Children) -> Entry:
        command = [sys.executable, "-m", "bench.fit", *scale.walls, "--json"]
        command += ["--memory-limit", scale.limit] if limited else []
        command += ["--device", scale.device, "--dataset", scale.dataset]
        command += ["--out", str(card.folder), "--retry", *map(str, FAILURES)]
        command += ["--data-dir", str(scale.data_dir)] if scale.data_dir else []
        command += ["--allow-shared"] if scale.allow_shared else []
        ended = children.run(command, watch_time(card.folder / RECORDS, children), quiet=True)
        if ended.returncode == 2:
            return Entry(State.FAILED, returncode=2, line=ended.last)
        if ended.stopped:
            state = State.INTERRUPTED if children.interrupted else State.CUT
            return Entry(state, returncode=ended.returncode, line="goes on from its probes")
        try:
            walls = json.loads(ended.stdout)
        except ValueError:
            line = ended.last or "no answer"
            return Entry(State.FAILED, returncode=ended.returncode, line=line)
        line = "; ".join(
            f"{wall['precision']}: {wall['largest']} trains, {wall['smallest_failing']} does not, "
            f"{wall['probes']} probes"
            + (f" ({wall['ending']})" if wall["ending"] != Ending.FOUND else "")
            for wall in walls
        )
        answered = all(wall["ending"] in ANSWERED for wall in walls)
        state = State.DONE if walls and answered else State.FAILED
        return Entry(state, returncode=ended.returncode, line=line)

    return run


_HEADLINE = ("--batch-size", "256", "--loss-scale", "128")

_PROFILED = ("--profile", "on")
"""For all phases that share cases, so that none is measured again for its profile alone, which took
39 s a case on an H100."""


def _on_card(run: Run, why: str) -> Run:
    def absent(card: Card, scale: Scale, children: Children) -> Entry:
        if scale.device == "cpu":
            return Entry(State.ABSENT, line=why)
        return run(card, scale, children)

    return absent


def _apex(card: Card, scale: Scale, children: Children) -> Entry:
    try:
        choose_interface(find_apex(), None)
    except UnsupportedError as error:
        return Entry(State.ABSENT, line=f"could not run: {error}")
    # apex trains with SGD only, so that the fp16 beside it is not that of the other phases
    flags = ("--precision", "fp16-apex", "fp16", "--optimizer", "sgd")
    return _sweep(*flags, *_HEADLINE)(card, scale, children)


PHASES: dict[str, Phase] = {
    phase.name: phase
    for phase in (
        Phase("doctor", "what this machine can and cannot measure", 12, 4, _doctor),
        Phase(
            "headline",
            "rtx-titan's fp32 and fp16 at batch size 256, the comparison of the 2019 page",
            30,
            10,
            # the very cases of the preset, so that nothing is measured twice
            _sweep("--preset", "rtx-titan", *_HEADLINE, *_PROFILED),
        ),
        Phase(
            "rtx-titan",
            "the nine cases of 2019",
            30,
            10,
            _sweep("--preset", "rtx-titan", *_PROFILED),
        ),
        Phase(
            "precision",
            "every precision, with the parts of its step",
            25,
            10,
            _sweep("--preset", "precision", *_PROFILED),
        ),
        Phase(
            "repeats",
            "fp32, fp16 and bf16-amp again, in fresh processes",
            20,
            10,
            _sweep(
                *("--preset", "precision", *_PROFILED),
                own=lambda scale: ("--repeats", str(scale.repeats), *scale.repeated),
            ),
        ),
        Phase(
            "epochs",
            "whole epochs of the headline's cases, with their accuracy on the test images",
            70,
            40,
            _sweep("--preset", "rtx-titan", *_HEADLINE, whole=True),
        ),
        Phase("tests", "the GPU tests, those of the arithmetic first", 15, 8, _tests),
        Phase(
            "compile",
            "fp16 compiled",
            60,
            20,
            _sweep("--preset", "precision", "--compile", "on", own=lambda scale: scale.compiled),
        ),
        Phase(
            "autotune",
            "fp32 and fp16 with cudnn.benchmark",
            20,
            1,
            _on_card(
                _sweep(
                    *("--preset", "precision", "--precision", "fp32", "fp16"),
                    *("--loss-scale", "128", "--cudnn-benchmark", "on"),
                ),
                "a CPU has no cuDNN",
            ),
        ),
        Phase(
            "graphs",
            "fp16's whole step as a CUDA graph",
            20,
            1,
            # at batch size 128 an H100 waited for the host; at 256 it did not
            _on_card(
                _sweep(
                    *("--preset", "precision", "--precision", "fp16", "--loss-scale", "128"),
                    *("--batch-size", "128", "256", "--cuda-graphs", "on"),
                ),
                "a CPU has no CUDA graphs",
            ),
        ),
        Phase("apex", "NVIDIA apex beside our own fp16, where it is installed", 25, 1, _apex),
        Phase(
            "overhead",
            "what the harness adds to an epoch",
            65,
            12,
            _check("overhead", _describe_overhead),
        ),
        Phase(
            "crosscheck",
            "time and memory, measured again by independent code",
            65,
            14,
            _check("crosscheck", _describe_crosscheck),
        ),
        Phase(
            "wall-limit",
            "the largest batch that fits in 21 GiB, as on the card of 2019",
            25,
            8,
            _find_walls(limited=True),
        ),
        Phase(
            "wall",
            "the largest batch that fits on this card",
            25,
            1,
            _on_card(
                _find_walls(limited=False), "a CPU has no largest batch without a memory limit"
            ),
        ),
        Phase("scales", "which loss scales are safe for DPN-92", 60, 14, _map_scales),
        Phase(
            "profiles",
            "the parts of a step of tf32 and bf16-amp at other batch sizes",
            25,
            14,
            # two sizes beside the presets' 256: a small batch has limits of its own
            _sweep(
                *("--preset", "precision", "--batch-size", "128", "512", *_PROFILED),
                own=lambda scale: scale.profiles,
            ),
        ),
        Phase(
            "ddp",
            "the headline's cases by DistributedDataParallel in one process: what it costs alone",
            30,
            12,
            _sweep(
                *("--preset", "rtx-titan", *_HEADLINE, "--parallel", "ddp", "--world-size", "1"),
                until=False,  # its processes would end after different steps
            ),
        ),
    )
}

AGENDA: tuple[tuple[str, float], ...] = (
    ("doctor", 1),
    ("headline", 1),
    ("rtx-titan", 1),
    ("precision", 1),
    ("repeats", 1),
    ("epochs", 1),
    ("tests", 0.12),
    ("compile", 1),
    ("autotune", 1),
    ("crosscheck", 1),
    ("graphs", 1),
    ("apex", 1),
    ("wall-limit", 0.4),
    ("scales", 1),
    ("tests", 1),
    ("wall", 1),
    ("overhead", 1),
    ("profiles", 1),
    ("ddp", 1),
)
"""Turns in order of priority, each with the share of the whole time it may take at most.

The nine minutes as they are planned for an H100: the doctor 18 s, the nine cases of 2019 with their
profiles 110, every precision 50, two more repeats of three of them 60, whole epochs with their
accuracy 75, tests that train in one process 60, compiled and autotuned cases 80, the cross-check
45. These are estimates: they rest on what the parts of a case took on an H100 on 2026-11-22, where
nine cases took 271 s, and on the steps that they need to be known within 1 % (docs/card.md). What
no card has shown yet comes first in the second call.
"""

CLOSING_S, CLOSING_REHEARSAL_S = 20.0, 12.0
"""Kept at the end to stop what runs, write the report and fold the logs."""

PUBLISHED = ("headline", "rtx-titan")
"""Phases that must be done before the README shows a card's table."""
