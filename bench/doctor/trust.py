"""Checks, by short trainings, of whether this machine's rows can be believed.

At most four minutes on a GPU, of which compiling takes half. A line for each check says what was
expected, and what was seen if that is something else.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.installation import CHECKOUT, in_checkout
from bench.base.processes import list_children
from bench.base.progress import Progress
from bench.base.text import count, parse_bytes
from bench.machine.nvml import find_neighbours
from bench.results.store.reader import read_rows
from bench.results.store.rows import Row
from bench.results.store.table import RECORDS
from bench.schema.record import Status
from bench.workers.examination import probe
from bench.workers.executors.subprocess import refuse_pair
from bench.workers.rating import RATES_VARIABLE

SETUP_S = 3.0
"""The longest set-up of a small case on a GPU, which took about 0.7 s on an H200."""

COUNTING_S = 5.0
"""By how much longer what follows the steps may take with autotuning."""

SAME_BYTES = 64 * 2**20
"""By how much the memory of an idle card may differ between two cases."""

DRIVER = "/dev/nvidia"
"""How the names of the driver's files begin."""

END_S = 30.0  # after a signal, or the end of another process


@dataclass(frozen=True)
class Observed:
    """What the commands of a check left: their latest rows, what they printed, return codes, and
    how long they took from the moment of an interference."""

    rows: Sequence[Row]
    printed: str
    codes: Sequence[int]
    device: str
    uuid: str | None
    ended_s: float = 0.0

    @property
    def late(self) -> bool:
        """Whether it ended too late; on a CPU, where others may have the cores, nothing is."""
        return self.device == "cuda" and self.ended_s > END_S


@dataclass(frozen=True)
class Expectation:
    """A check: what is expected of the ``commands``, with `WORDS`; ``judge`` returns what was seen
    if that is something else. ``harm`` is done to a command once a worker of it runs."""

    name: str
    expected: str
    commands: tuple[str, ...]
    judge: Callable[[Observed], str]
    gpu: bool = False
    harm: Callable[[subprocess.Popen[str], int], None] | None = None


# ----------------------------------------------------------------------------- what may be wrong


def _find_failed(seen: Observed) -> str:
    bad = [f"{row.status}: {row.reason}" for row in seen.rows if row.status != Status.OK]
    return bad[0] if bad else "" if seen.rows else seen.printed.strip()[-200:] or "no row"


def _judge_setup(seen: Observed) -> str:
    baselines = [row.number("baseline_device_bytes") for row in seen.rows]
    slow = max((row.number("setup_time_s") or 0.0 for row in seen.rows), default=0.0)
    known = [size for size in baselines if size is not None]
    wrong = [
        _find_failed(seen),
        *("a worker was started cold" for row in seen.rows if "started cold" in row.notes),
        f"a set-up of {slow:.1f} s" * (seen.device == "cuda" and slow > SETUP_S),
        *(f"others: {row.neighbours}" for row in seen.rows if row.neighbours),
    ]
    if known and max(known) - min(known) > SAME_BYTES:
        wrong.append(f"the card held {min(known):,.0f} and {max(known):,.0f} B before the cases")
    return next(filter(None, wrong), "")


def _judge_limit(seen: Observed) -> str:
    ordered = sorted(seen.rows, key=lambda row: row.batch_size)
    if len(ordered) != 2 or ordered[0].status != Status.OK:
        return _find_failed(seen)
    small, large = ordered
    most, limit = small.number("peak_process_bytes") or 0, parse_bytes(small.memory_limit)
    if most > limit:
        return f"batch size {small.batch_size} took {most:,.0f} B"
    if large.status != Status.OOM:
        return f"batch size {large.batch_size} was {large.status}: {large.reason}"
    return ""


def _judge_counting(seen: Observed) -> str:
    if wrong := _find_failed(seen):
        return wrong
    after: dict[bool, float] = {}
    for row in seen.rows:
        begun, ended = map(datetime.fromisoformat, (row.started_at, row.finished_at))
        parts = ("setup_time_s", "warmup_time_s", "measured_time_s")
        took = sum(row.number(name) or 0.0 for name in parts)
        after[row.cudnn_benchmark] = (ended - begun).total_seconds() - took
    more = after[True] - after[False]
    return f"{more:.1f} s longer with autotuning" if more > COUNTING_S else ""


def _judge_script(seen: Observed) -> str:
    if wrong := _find_failed(seen):
        return wrong
    untold = any(row.number("step_time_median_s") is None for row in seen.rows)
    return "no time of its steps" if untold else ""


def _judge_fit(seen: Observed) -> str:
    fine = seen.codes == [0] and "leaves" in seen.printed
    return "" if fine else seen.printed.strip()[-200:]


def _judge_killed(seen: Observed) -> str:
    ends = [row.status for row in seen.rows]
    late = seen.late
    return "" if ends == [Status.KILLED] and not late else f"{ends} after {seen.ended_s:.0f} s"


def _judge_stopped(seen: Observed) -> str:
    if seen.codes != [128 + signal.SIGINT] or seen.late:
        return f"return code {seen.codes[0]} after {seen.ended_s:.0f} s"
    left = find_neighbours(seen.uuid) if seen.uuid else ()
    return f"left on the card: {', '.join(map(str, left))}" if left else ""


def _kill(child: subprocess.Popen[str], worker: int) -> None:
    os.kill(worker, signal.SIGKILL)


def _interrupt(child: subprocess.Popen[str], worker: int) -> None:
    child.send_signal(signal.SIGINT)


EXPECTATIONS = (
    Expectation(
        "set-up",
        f"two small cases, each set up in about 0.7 s (at most {SETUP_S:g}) from a process that "
        "has torch, on a card with the same memory held and no neighbour",
        ("{sweep} --batch-size 32 64",),
        _judge_setup,
    ),
    Expectation(
        "limit",
        "a small batch trains within a memory limit, and a large one runs out of memory",
        ("{sweep} --memory-limit {limit} --batch-size 16 {large}",),
        _judge_limit,
    ),
    Expectation(
        "graphs",
        "captured steps, with clipped gradients and without",
        ("{sweep} --cuda-graphs --clip-grad none 1 --batch-size 64",),
        _find_failed,
        gpu=True,
    ),
    Expectation(
        "autotuning",
        f"what follows the steps takes at most {COUNTING_S:g} s longer with it",
        ("{sweep} --batch-size 64", "{sweep} --batch-size 64 --cudnn-benchmark on"),
        _judge_counting,
        gpu=True,
    ),
    Expectation(
        "script",
        "the steps of a script are seen and timed, though it tells of none",
        ("bench.sweep {into} --command '{python} {root}/examples/train.py --steps 100'",),
        _judge_script,
    ),
    Expectation(
        "fit",
        "the largest batch under a memory limit is found",
        ("bench.fit {into} --dataset synthetic {small} --memory-limit {limit} --step 64",),
        _judge_fit,
        gpu=True,  # on a CPU its probes take minutes, and make card rehearses it
    ),
    Expectation(
        "ddp",
        "a network trained by DistributedDataParallel",
        ("{sweep} --batch-size 64 --parallel ddp --world-size {ranks}",),
        _find_failed,
    ),
    Expectation(
        "killed rank",
        f"a row that says killed, within {END_S:g} s",
        ("{sweep} --batch-size 32 --steps 5000 --parallel ddp --world-size {ranks}",),
        _judge_killed,
        harm=_kill,
    ),
    Expectation(
        "compiled",
        "a compiled network, with a last batch that is smaller",
        ("{sweep} --batch-size 96 --compile",),
        _find_failed,
    ),
    Expectation(
        "interrupted",
        f"Ctrl-C ends a compiled case within {END_S:g} s and leaves nothing on the card",
        ("{sweep} --batch-size 48 --steps 5000 --compile",),
        _judge_stopped,
        harm=_interrupt,
    ),
)

_USUAL = {"steps": "--steps", "untuned": "--cudnn-benchmark"}
"""Words of a sweep that stand for nothing where a check gives the flag itself."""

_RETRY = "--retry error killed timeout invalid lost"

WORDS = {
    "sweep": "bench.sweep {into} --dataset synthetic {small} --repeats 1 --no-report "
    "{steps} {untuned} " + _RETRY,
    "steps": "--steps 8",
}
SIZES = {
    "cuda": {
        # one case each, and not autotuned: six took 50 s on an H200, and autotuning 7 s of each
        "small": "--model dpn-small --precision fp16 --loss-scale 128",
        "untuned": "--cudnn-benchmark off",
        "limit": "3GiB",
        "large": "8192",
    },
    "cpu": {
        "small": "--model dpn-small --precision fp32",
        "untuned": "",
        "limit": "720MiB",
        "large": "512",
    },
}
"""What the words of `EXPECTATIONS` stand for, on each device. On a CPU batch size 16 took 584 MiB
with torch 2.15's build for CUDA, of which 370 are held before a network is built, and 214 with the
build for CPUs."""


# ----------------------------------------------------------------------------------- how they run


def check_server() -> str:
    """Return which process that stays, of those that others are forked from, holds files of the
    driver; empty if none. A process of it has just used the device."""
    for pid in list_children(os.getpid()):
        with suppress(OSError):
            files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
            if devices := [name for name in files if name.startswith(DRIVER)]:
                return f"process {pid} holds {', '.join(sorted({*devices}))}"
    return ""


def spell(text: str, words: dict[str, str], folder: Path) -> list[str]:
    """Return a command of a check, as Python takes it after -m, whose results go into a folder."""
    known = words | {"into": f"--out {shlex.quote(str(folder))} {words['where']}"}
    known |= {word: "" for word, flag in _USUAL.items() if flag in text}
    while "{" in text:
        text = text.format_map(known)
    return shlex.split(text)


def run_check(check: Expectation, words: dict[str, str], out: Path, uuid: str | None) -> str:
    """Run the commands of a check, each into a folder of its own in ``out``. Return what was seen
    if it is not what was expected."""
    rows, outputs, codes, ended = list[Row](), list[str](), list[int](), 0.0
    for number, text in enumerate(check.commands):
        folder = out / f"{check.name.replace(' ', '-')}-{number + 1}"
        child = subprocess.Popen(
            [sys.executable, "-m", *spell(text, words, folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        begun = time.monotonic()
        if check.harm and (worker := _await_worker(child)):
            begun = time.monotonic()
            check.harm(child, worker)
        outputs.append(child.communicate()[0])
        ended = time.monotonic() - begun
        codes.append(child.returncode)
        if (folder / RECORDS).is_file():
            latest = {row.case: row for row in read_rows(folder)}
            rows += latest.values()
    return check.judge(Observed(rows, outputs[-1], codes, words["device"], uuid, ended))


def _await_worker(child: subprocess.Popen[str]) -> int:
    """Return the id of a worker of a command, a moment after it began; 0 if the command ended."""
    while child.poll() is None:
        for pid in list_children(child.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("bench.worker"):
                    time.sleep(2)
                    return pid
        time.sleep(0.1)
    return 0


def choose_words(device: str, shared: bool) -> dict[str, str]:
    """Return what the words of `EXPECTATIONS` stand for."""
    about = {"device": device, "ranks": "1" if refuse_pair(device) else "2"}
    about["where"] = f"--device {device}" + " --allow-shared" * shared
    about |= {"python": shlex.quote(sys.executable), "root": str(CHECKOUT)}
    return WORDS | SIZES[device] | about


def go_through(device: str, out: Path, shared: bool) -> Iterator[tuple[str, str, str]]:
    """Run all checks; yield the name of each, what is expected, and what was seen instead."""
    platform = probe(device)
    if platform.environment.gpu:
        expected = "what others are forked from holds no file of the driver"
        yield "server", expected, check_server()
    words, uuid = choose_words(device, shared), platform.environment.gpu_uuid
    asked = [check for check in EXPECTATIONS if device == "cuda" or not check.gpu]
    if not in_checkout():
        asked = [check for check in asked if check.name != "script"]
    with Progress(len(asked), "check") as progress:
        for check in asked:
            progress.begin(check.name)
            seen = run_check(check, words, out, uuid)
            progress.end()
            yield check.name, check.expected, seen


def check_trust(device: str, out: Path, shared: bool) -> int:
    """Print a line for each check. Return how many were not as expected. Raises UsageError: there
    is no such device."""
    if device not in SIZES:
        raise UsageError(f"--device {device}: give cuda or cpu")
    os.environ[RATES_VARIABLE] = "0"  # rates tell nothing here
    wrong, number = [], 0
    for name, expected, seen in go_through(device, out.absolute(), shared):
        number += 1
        outcome = f"seen: {' '.join(seen.split())}; expected: {expected}" if seen else expected
        print(f"{'WRONG' if seen else 'ok':<6}{name:<12} {outcome}", flush=True)
        wrong += [name] if seen else []
    fine = f"{count(number, 'check')} as expected"
    print(f"not as expected: {', '.join(wrong)}" if wrong else fine)
    return len(wrong)
