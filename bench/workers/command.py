"""Measure a user's own command: its wall time, and its steps, as `bench.workers.reports` has them,
which it tells (`bench.workers.script`), or which are seen by torch's optimizers
(`bench.workers.hook`)."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.base.errors import UsageError
from bench.base.inject import (
    Seen,
    Uncaught,
    arm,
    find_happened,
    find_opened,
    find_uncaught,
    find_versions,
    keep_armed,
    read_listing,
)
from bench.base.processes import (
    TemporaryFolder,
    die_with_parent,
    list_children,
    name_processes,
    read_held_memory,
)
from bench.base.text import count, name_first
from bench.networks.workloads import OWN
from bench.profile.timeline import Timeline
from bench.schema.case import Case, fill_command, knows_epochs
from bench.schema.command import ITEMS, OUT, list_named, list_places, split_command
from bench.schema.record import MEASURED, Outcome, RankRow, Status, Step
from bench.schema.work import Label, Work, WorkKind
from bench.training.counting import join_work
from bench.training.labels import judge_parts
from bench.training.memory import PARTS_BYTES
from bench.training.operations import COMPILED
from bench.training.profiling import choose_steps, read_profile
from bench.training.sources import judge_opened, look_at, name_contents, name_file
from bench.training.timing import Warmup, extrapolate, warm_up
from bench.workers import script
from bench.workers.endings import find_fault
from bench.workers.epochs import describe_interval, describe_steps, finite
from bench.workers.job import END, Channel, EpochEnded, Job, WorkBegun
from bench.workers.measurement import (
    PROFILE_COLUMNS,
    conclude,
    describe_profile,
    hold_to_label,
)
from bench.workers.reports import Reports, TakenStep, average, find_usual, list_reported
from bench.workers.script import FILE, LIMIT, LOST, PROFILE, SAMPLED, SEES, name_trace

_LOST = re.compile(re.escape(LOST.encode()) + rb": ([^\n]+)\n")
_POLL_S = 0.02
_GRACE_S = 3.0
_LATER_S, _LATER = 0.5, 0.05  # than a command what it started may end, and as a share of its time
_TAIL_BYTES = 1 << 16  # of the output, to find what an error was
_LEAST_S = 1e-9  # of a step: the clock of a GPU may see none
_LONGEST_S, _SLOWER, _STARTS_S = 600.0, 5.0, 120.0
"""Of steps to profile, the longest time without the profiler, and how long they are waited for: so
many times as long, beside the profiler's start and end."""

_OTHERS_S = 30.0
"""How much later than the first of several processes the others may have written their traces."""

_UNLIMITED = 40  # steps that warm-up supposes will be measured, if the command decides


class _Run:
    """The running command: its process, what it started, its output and files. ``follow`` yields
    the steps that it ``reports``, ``clock_s`` is the time of those that were taken."""

    def __init__(self, job: Job, folder: Path, channel: Channel) -> None:
        self._job, self.case, self.trace, self._channel = job, job.case, job.trace, channel
        case = job.case
        self.reports = Reports(case, folder / "steps")
        self.report = channel.reporter("warmup", 0, self.read_memory)
        self._asked = folder / "profile"
        self._happened: dict[str, Any] = {}
        self.left: dict[int, str] = {}  # what it started, and what still ran when it had ended
        self.lost = ""  # why it tells no more
        self.later_s = 0.0  # how much later than itself what it started ended
        self.uncaught: Uncaught | None = None  # what ended it, of errors in Python
        self.clock_s, self.follow = 0.0, self._follow()
        command, out = fill_command(case, str(job.outputs or OUT)), job.outputs
        variables, words = split_command(command)
        if out and OUT in list_places(str(case.command)):
            out.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **variables, FILE: str(folder / "steps")}
        if case.profile:
            environment[PROFILE] = str(self._asked)
        self._listing, self.named = folder / "files", list_named(command)
        hook = str(script.__file__) if job.sees_steps or case.memory_limit else ""
        environment |= arm(environment, self._listing, job.since_ns, hook)
        limit = [case.memory_limit, case.device, job.gpu_uuid] if case.memory_limit else []
        environment |= {SEES: "1" if job.sees_steps else "", LIMIT: json.dumps(limit)}
        self._look = name_contents(self.named)
        self.began_ns = time.time_ns()
        sys.stdout.flush()
        try:
            self._process = subprocess.Popen(
                keep_armed(words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            raise UsageError(f"{words[0]!r} cannot be started: {error.strerror}") from None
        # it has begun: to fork this process, which has torch, took 10 ms and more
        self.began = time.monotonic()
        self.ended_s, self._ended = math.nan, threading.Event()
        threading.Thread(target=self._await_end, daemon=True).start()
        self.recent = bytearray()
        self._copier = threading.Thread(target=self._copy, daemon=True)
        self._copier.start()

    def _await_end(self) -> None:
        self._process.wait()
        self.ended_s = time.monotonic() - self.began
        self._ended.set()

    def _copy(self) -> None:
        """Copy its output to the log."""
        stream = self._process.stdout
        assert stream is not None
        while data := os.read(stream.fileno(), 1 << 16):
            self.recent += data
            del self.recent[:-_TAIL_BYTES]
            if not self.lost and (found := _LOST.search(self.recent)):
                self.lost = found[1].decode(errors="replace").strip()
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def _follow(self) -> Iterator[TakenStep]:
        reports, ended = self.reports, False
        while reports.new or not ended:
            if not reports.new:
                ended = self._ended.wait(_POLL_S)
                reports.update()
            if reports.began_anew:
                reports.began_anew, self.follow = False, self._follow()
                raise _BeganAnewError
            if reports.new:
                step = reports.new.popleft()
                if self._job.judged and step.number in reports.epochs and self._judge(step.number):
                    return
                self.clock_s += max(step.time_s or 0.0, _LEAST_S)
                self.report(step.number, step)
                yield step

    def _judge(self, steps: int) -> bool:
        """Return whether it is to end with the epoch that so many steps ended, of which all is told
        once another step is. One whose loss is no longer a number is, and the last one ends by
        itself."""
        reports, case = self.reports, self.case
        epochs = {n: one for n, one in reports.epochs.items() if n <= steps}
        if knows_epochs(case) and len(epochs) >= case.epochs:
            return False
        row = list_reported(reports.steps, epochs)[-1]
        if not reports.list_bad(steps) and self._channel.ask(EpochEnded(row)) != END:
            return False
        reports.end_after(steps)
        return True

    def profile(self, steps: int, limit_s: float) -> Path | None:
        """Have it profile as many of its next steps, within a time. Return the trace; None, and
        ``reports.profiled`` says why, if there is none."""
        reports, new = self.reports, self._asked.with_suffix(".new")
        new.write_text(str(steps))
        new.replace(self._asked)
        until, ended = time.monotonic() + limit_s, False
        while not reports.profiled and not ended and time.monotonic() < until:
            ended = self._ended.wait(_POLL_S)
            reports.update()
        if not reports.profiled:
            what = "the command ended" if ended else f"{limit_s:,.0f} s passed"
            reports.profiled = {"failure": f"{what} before {count(steps + 1, 'more step')} did"}
        return None if "failure" in reports.profiled else name_trace(self._asked)

    def list_others(self) -> list[Path]:
        """Return the traces of the processes that train with the one that told of its own; empty if
        not all have written one in time, such as those on other machines."""
        ranks = range(1, self.reports.profiled["processes"])
        traces = [name_trace(self._asked, rank) for rank in ranks]
        until, ended = time.monotonic() + _OTHERS_S, False
        while not (there := all(map(Path.exists, traces))) and not ended:
            ended = self._ended.wait(_POLL_S) or time.monotonic() > until
        return traces if there else []

    def read_memory(self) -> int:
        with suppress(OSError):  # it has ended
            return read_held_memory(self._process.pid)
        return 0

    def explain_none(self) -> str:
        """Return why no steps were seen, once it has ended."""
        if not self._job.sees_steps:
            return "--no-steps leaves the command alone, and it does not call bench.step"
        return f"no steps were seen: {_explain(self._happened)}"

    @property
    def limited(self) -> bool:
        """Whether the memory of one of its processes was limited, once it has ended."""
        return "limited" in self._happened

    def see_files(self) -> Seen:
        """Tell which of the user's files it was made of, once it has ended. What it names is taken
        for it too, where no Python told of its files."""
        entries = read_listing(self._listing)
        opened, self.uncaught = find_opened(entries), find_uncaught(entries)
        self._happened = find_happened(entries)
        known = {one.path for one in opened}
        named = [look_at(path) for path in self.named if path.absolute() not in known]
        blind = not any(one.how == "read" for one in opened)
        found = [
            one
            for one in filter(None, named)
            if blind or one.path.suffix == ".sh" or one.path == self.named[0].absolute()
        ]
        found = [one for one in found if self._look.get(name_file(one.path)) == one.content]
        job, roots = self._job, [path.parent for path in self.named]
        but = [path.parent for path in (job.outputs, job.log) if path]
        seen = judge_opened([*opened, *found], roots, but, self.began_ns, job.since_ns)
        seen.found = find_versions(entries, self.reports.who.get("pid"))
        if job.case.device != "cuda":
            seen.found["cudnn"] = None  # which a row of a CPU does not name
        return seen

    def close(self, stop: bool) -> int:
        """Wait for its end, or bring it about, and that of what it started. Return its code,
        negative for a signal."""
        if stop:
            self._process.terminate()
        self._ended.wait(_GRACE_S if stop else None)
        until = time.monotonic() + _GRACE_S
        while list_children(os.getpid()) and time.monotonic() < until:
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(_POLL_S)
        later_s = time.monotonic() - self.began - self.ended_s
        if later_s > max(_LATER_S, _LATER * self.ended_s):  # as a shell's "&" leaves it
            self.ended_s, self.later_s = self.ended_s + later_s, later_s
        self.left = name_processes([] if stop else list_children(os.getpid()))
        for pid in list_children(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._ended.wait()
        self._copier.join(_GRACE_S)
        self.reports.close()
        code = self._process.returncode
        return 128 - code if code > 128 else code  # a shell says so of what it ran


class _BeganAnewError(Exception):
    """The command has called bench.step: what was seen of its steps before does not count."""


def _explain(known: Mapping[str, str]) -> str:
    if "began" not in known:
        return "Python did not tell of itself, as under -I, -E or -S, or in no Python at all"
    if "failed" in known:
        return f"this torch does not show them ({known['failed']}); call bench.step in the script"
    if "torch" not in known:
        return "the command imports no torch"
    if "captured" in known:
        return "they are replayed by a CUDA graph; call bench.step in the script"
    if "backward" not in known:
        return "torch ran no backward pass"
    if "step" not in known:
        return "no optimizer of torch's took a step; call bench.step in the script"
    return "too few were taken"


def measure_command(given: Job, channel: Channel) -> Outcome:
    """Run a command to its end, or with ``--steps`` until as many steps were measured. Raises
    UsageError: it cannot be started."""
    case, found = given.case, Outcome()
    with TemporaryFolder("command") as folder:
        run = _Run(given, Path(folder), channel)
        while True:
            with suppress(_BeganAnewError):
                warm, measured = _take_steps(case, run, channel)
                break
        stopped = case.steps is not None and len(measured) >= case.steps
        channel.enter("evaluation")
        timeline = _profile(found, run, measured, channel) if case.profile else None
        code = run.close(stopped or run.reports.ended_after is not None)
        found.seen, found.cards = run.see_files(), [*run.reports.cards]
    if stopped:
        found.note(f"ended after {count(len(measured), 'measured step')}, as --steps asks")
    elif run.reports.ended_after is None:
        _describe_end(found, run, code, case)
    _describe(found, case, run, warm, measured)
    if case.memory_limit and not run.limited and found.status in MEASURED:
        why = "it holds where Python imports torch with this harness beside it, and uses --device"
        found.status, found.reason = conclude(
            found.measurement, f"--memory-limit did not reach the command: {why}; leave it out"
        )
    if timeline is not None:
        describe_profile(found, timeline)
    channel.send(found)
    return found


def _take_steps(case: Case, run: _Run, channel: Channel) -> tuple[Warmup | None, list[TakenStep]]:
    """Return the warm-up of a command, None if it takes too few steps to be steady, and the steps
    to measure: as many as it is to take, or all. Raises _BeganAnewError."""
    channel.enter("warmup")
    warm: Warmup | None = None
    steps, cpu = case.steps or _UNLIMITED, torch.device("cpu")
    with suppress(StopIteration):
        warm = warm_up(lambda: next(run.follow), cpu, steps, lambda: run.clock_s)
    if warm is None:
        return None, []
    channel.enter("epoch")
    run.report = channel.reporter("epoch", case.steps or 0, run.read_memory, warm.steps)
    measured = [*islice(run.follow, case.steps)]
    if case.steps is None or len(measured) < case.steps:
        deque(run.follow, 0)
    # the warm-up may take the last step that there is: then all but the odd ones are measured
    return (warm, measured) if measured else (None, [])


def _profile(
    found: Outcome, run: _Run, measured: Sequence[TakenStep], channel: Channel
) -> Timeline | None:
    """Profile steps after the measured ones; None, and ``found`` says why, if that fails."""
    with found.leave_out_on_error(*PROFILE_COLUMNS):
        times, case = [step.time_s for step in measured if step.time_s is not None], run.case
        if not times or len(measured) < (case.steps or 0):
            raise UsageError("the command ended before the steps to profile")
        step_s = median(times)
        steps = choose_steps(step_s, case.device)
        if (needed_s := (steps + 1) * step_s) > _LONGEST_S:
            raise UsageError(
                f"to profile {count(steps, 'step')} takes {needed_s:,.0f} s or more, and "
                f"{_LONGEST_S:,.0f} s at most are given to it"
            )
        channel.send(WorkBegun("profiling"))
        trace = run.profile(steps, _STARTS_S + _SLOWER * needed_s)
        if trace is None:
            raise UsageError(f"no steps were profiled: {run.reports.profiled['failure']}")
        if (device := run.reports.profiled["device"]) != case.device:
            raise UsageError(f"the steps ran on {device}, and the case is of {case.device}")
        timeline = read_profile(trace, steps, device, run.trace)
        with suppress(ValueError):  # of another process
            others = [read_profile(one, steps, device) for one in run.list_others()]
            if others:
                found.ranks = [*starmap(_describe_rank, enumerate([timeline, *others]))]
        return timeline
    return None


def _describe_rank(rank: int, timeline: Timeline) -> RankRow:
    """Return what a process that trains with others did in a profiled step."""
    exchanges = defaultdict[str, float](float)
    for label, timed in timeline.work.items():
        if label.kind is WorkKind.EXCHANGE:
            exchanges[label.operation] += timed.time_s
    waits_in = max(exchanges, key=exchanges.__getitem__, default=None)
    computing_s = timeline.step_s - timeline.exchange_s
    return RankRow(rank, None, None, None, computing_s=computing_s, waits_in=waits_in)


_LACKS = re.compile(r"No such file or directory: '([^/'][^']*)'$")


def _describe_end(found: Outcome, run: _Run, code: int, case: Case) -> None:
    """Say how a command ended that was left to end by itself."""
    fault = find_fault(code, run.recent.decode(errors="replace"), case, run.uncaught)
    if fault is not None:
        after = f"; after {count(len(run.reports.steps), 'step')}" if run.reports.steps else ""
        if (error := run.uncaught) and error.message == "No module named 'torch'":
            fix = f"activate an environment that has it, or write {sys.executable}"
            after = f"; its Python is {error.python}: {fix}"
        if error and (lacks := _LACKS.search(error.message)):
            others = {script.parent for script in run.named} - {Path()}
            for there in (folder for folder in others if (folder / lacks[1]).exists()):
                after += f"; it is in {there}: sh -c 'cd {there} && …' starts the command there"
        found.status, found.reason = fault.status, fault.reason + after
        found.transient = fault.transient
    elif run.later_s and not run.left:
        found.note(f"what it started ended {run.later_s:.1f} s later: its time is until then")
    elif run.left:
        names = name_first([f"{name}, pid {pid}" for pid, name in run.left.items()], 3, "; ")
        one = count(len(run.left), "process")
        if run.reports.who.get("pid") in (None, *run.left):
            found.status, found.reason = conclude(
                found.measurement,
                f"it left {one} running ({names}), so that its time is not that of all its work: "
                "start the training in the foreground, or wait for it",
            )
        else:
            found.note(f"it left {one} running ({names}), which the sweep ended")


_OF_STEPS = ("warmup_steps", "warmup_time_s", "measured_steps", "step_time_median_s", "train_loss")


def _describe(
    found: Outcome, case: Case, run: _Run, warm: Warmup | None, measured: Sequence[TakenStep]
) -> None:
    m, reports = found.measurement, run.reports
    steps = reports.steps
    m.truncated_after = reports.ended_after
    found.epochs = list_reported(steps, reports.epochs)
    if found.epochs:
        m.test_loss, m.test_accuracy = found.epochs[-1].test_loss, found.epochs[-1].test_accuracy
        if m.test_loss is None and "loss" in [*reports.epochs.values()][-1]:
            found.leave_out("it is inf or NaN", "test_loss")
    if run.lost and steps:
        found.note(f"it told only of its first {count(len(steps), 'step')}: {run.lost}")
    if warm is None:  # too few to be steady: the first starts up, and to count takes another longer
        measured = [step for step in steps if step.number not in (0, SAMPLED)]
        found.leave_out("too few steps for a warm-up", "warmup_steps", "warmup_time_s")
    measured = [step for step in measured if step.time_s is not None]
    if not measured:
        found.unit, found.epoch_items = "runs", 1
        m.measured_time_s, m.measured_images = run.ended_s, 1
        if found.status in MEASURED:
            m.epoch_time_s, m.images_per_s = run.ended_s, 1 / run.ended_s
        found.leave_out(run.lost or run.explain_none(), *_OF_STEPS, "labelled_flop_share")
        return
    _describe_seen(found, reports, case)
    times = [step.time_s or 0.0 for step in measured]
    m.setup_time_s = steps[0].moment - run.began
    _describe_memory(found, reports)
    if warm:
        m.warmup_steps, m.warmup_time_s = warm.steps, warm.time_s
        m.warmup_steady = warm.steady
    found.unit = (
        "items" if reports.counted else "updates" if reports.who.get("in_turn") else "steps"
    )
    whole = steps[: next(iter(reports.epochs), 0)]
    found.epoch_items = reports.count(whole) or ITEMS
    m.measured_steps, m.measured_images = len(measured), reports.count(measured)
    m.measured_time_s, m.steps_per_epoch = sum(times), len(whole) or None
    if reports.counted:
        m.step_items = find_usual(steps[: measured[-1].number + 1], reports.epochs)
    full_steps = found.epoch_items * len(measured) / m.measured_images
    m.epoch_time_s = m.measured_time_s * full_steps / len(times)
    if full_steps > len(times):
        describe_interval(found, times, extrapolate(m.measured_time_s, times, full_steps))
    m.images_per_s = found.epoch_items / m.epoch_time_s
    describe_steps(m, times, times)
    _describe_losses(found, reports, case, measured)
    _describe_work(found, case, reports)


def _describe_memory(found: Outcome, reports: Reports) -> None:
    """Say what of its memory is known, of the process that tells its steps."""
    none = "no step of an optimizer of torch's was seen"
    none = "several optimizers step in turn" if reports.who.get("in_turn") else none
    why = reports.memory.pop("failure", none)
    vars(found.measurement).update(reports.memory)
    found.leave_out(why, *(name for name in PARTS_BYTES if name not in reports.memory))


def _describe_seen(found: Outcome, reports: Reports, case: Case) -> None:
    """Say what is not known of steps that the command does not tell of itself."""
    if reports.own:
        return
    passes, tell = reports.who.get("passes", 1), "give --items N, or bench.step(items=…)"
    if reports.who.get("in_turn"):
        reports.counted = False
        found.note("several optimizers step in turn: updates are counted, of any of them")
    elif passes > 1 and reports.counted and not case.items:
        found.note(
            f"a step has up to {passes} backward passes and is taken to be of one batch; if they "
            f"add up, {tell}"
        )


def _describe_losses(
    found: Outcome, reports: Reports, case: Case, measured: Sequence[TakenStep]
) -> None:
    m, first = found.measurement, measured[0].number
    for step in measured:
        loss = None if step.loss is None else finite(step.loss)
        found.steps.append(Step(step.number, reports.count([step]), loss, None, step.time_s))
    if bad := reports.list_bad(measured[-1].number + 1):
        m.first_bad_step = max(0, bad[0] - first)
    # how many steps the warm-up takes is chance, and the loss is to be the same without it
    m.train_loss = average(reports.steps[: case.steps])
    if found.epochs:
        m.train_loss = found.epochs[-1].train_loss
    if any(step.loss is None for step in measured):
        why = (
            "the command tells no loss"
            if reports.own
            else "which number is a step's loss is not known"
        )
        found.leave_out(f"{why}; give bench.step(loss=…)", "train_loss")
    if found.status is Status.OK:
        found.status, found.reason = conclude(m)


_COUNTED = ("flop_per_image", "step_bytes")


def _describe_work(found: Outcome, case: Case, reports: Reports) -> None:
    """Count the work of the sampled step, and hold its number formats against the label."""
    m, sample = found.measurement, reports.work
    why = sample.get("failure", "it has no torch, or ended too early to look at a step")
    parts = [*map(_read_rows, sample.get("parts", ()))] if why == COMPILED else []
    if why:
        found.leave_out(why, *_COUNTED)
        found.leave_out(sample.get("doubt") or why, "labelled_flop_share")
        if not parts:
            return
    else:
        parts = [work := _read_rows(sample["work"])]
        if reports.who.get("shares"):
            why = "it is counted in one process, which may do only a part of an item's work"
            found.leave_out(why, *_COUNTED)
        else:
            found.work = join_work(work, {})
            # counted in one of the processes
            items = reports.count(reports.steps[SAMPLED : SAMPLED + 1]) / reports.processes
            m.flop_per_image = sum(one.flop for one in work.values()) / items
            m.step_bytes = round(sum(one.bytes for one in work.values()))
    m.flags = " ".join(f"{name}={value}" for name, value in sample["flags"].items())
    found.leave_out("formats are counted in a command, and not rounding errors", "arithmetic")
    if case.precision == OWN:
        found.leave_out("the command has no {precision}", "labelled_flop_share")
        return
    capability, flags = (*sample["capability"],), sample["flags"]
    hold_to_label(found, judge_parts(parts, case, flags, capability, sample["unseen"]))


def _read_rows(rows: Sequence[Any]) -> dict[Label, Work]:
    return {
        Label(WorkKind(kind), operation, format): Work(calls, flop, bytes)
        for kind, operation, format, calls, flop, bytes in rows
    }
