"""Measure a user's own command: its wall time, and its steps if it tells them (`bench.script`)."""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch

from bench.case import Case, fill_command
from bench.command import split_command
from bench.errors import UsageError
from bench.failure import Fault, classify, find_place
from bench.limits import find_ends
from bench.precision import OWN, PRECISIONS, Arithmetic
from bench.processes import (
    adopt_orphans,
    die_with_parent,
    list_children,
    name_signal,
    read_held_memory,
)
from bench.record import EpochRow, Outcome, Status, Step
from bench.script import FILE, SAMPLED
from bench.text import count
from bench.training.counting import join_work, judge_formats
from bench.training.timing import Warmup, extrapolate, warm_up
from bench.work import Kind, Label, Work
from bench.worker.epochs import describe_interval, describe_steps, finite
from bench.worker.measurement import conclude
from bench.worker.messages import Channel, Job, Phase, StepTaken

ITEMS = 10_000
"""The items of an "epoch" of a command that does not say where its epochs end: its time is that of
as many items, whatever the batch size."""

_POLL_S = 0.02
_GRACE_S = 3.0
_REPORT_EVERY_S = 1.0
_TAIL_BYTES = 1 << 16  # of the output, to find what an error was
_LEAST_S = 1e-9  # of a step: the clock of a GPU may see none
_UNLIMITED = 40  # steps that warm-up supposes will be measured, if the command decides

_FRAME = re.compile(r'^ +File "', re.MULTILINE)  # a line before it that looks like an error is none
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException")
_ERROR = re.compile(
    r"^\S*?(\w+(?:Error|Exception|Interrupt|Exit|Warning))(?:: (.*))?$", re.MULTILINE
)


@dataclass
class _Taken:
    """A step that a script told of, by ``number`` from 0; ``time_s`` is None for its first one."""

    number: int
    moment: float
    time_s: float | None
    items: int
    loss: float | None


@dataclass
class _Told:
    """What a script has told so far, from the file that it writes."""

    path: Path
    steps: list[_Taken] = field(default_factory=list)
    epochs: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    work: dict[str, Any] = field(default_factory=dict)
    counted: bool = True  # whether it said how many items each of its steps has
    others: bool = False  # whether other processes of the command told of steps too
    _read: int = 0

    def count(self, steps: Sequence[_Taken]) -> int:
        """Return the items of steps, or their number if it does not say."""
        return sum(step.items for step in steps) if self.counted else len(steps)

    def update(self) -> None:
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                kind, _, rest = line.partition(" ")
                if kind == "s":
                    moment, took, items, loss = rest.split()
                    self.counted &= items != "-"
                    number = 1 if items == "-" else int(items)
                    known = [None if text == "-" else float(text) for text in (took, loss)]
                    taken = _Taken(len(self.steps), float(moment), known[0], number, known[1])
                    self.steps.append(taken)
                elif kind == "e":
                    self._end_epoch(json.loads(rest))
                elif kind == "w":
                    self.work = json.loads(rest)
                elif kind == "o":
                    self.others = True

    def _end_epoch(self, found: dict[str, float | None]) -> None:
        """Add an end of an epoch; one without steps, as an evaluation before the first, is none,
        but what it found is that of the one before."""
        if not self.epochs or self.epochs[-1][0] < len(self.steps):
            if self.steps:
                self.epochs.append((len(self.steps), found))
            return
        self.epochs[-1][1].update({name: x for name, x in found.items() if x is not None})


class _EndError(Exception):
    """The command has ended, and every step that it told of was taken."""


class _Run:
    """The running command, and the steps that were taken from it."""

    def __init__(self, case: Case, folder: Path, channel: Channel) -> None:
        self.told, self._channel = _Told(folder / "steps"), channel
        self.taken, self.clock_s = 0, 0.0
        self.phase: Phase = "warmup"
        self._due = 0.0
        variables, words = split_command(fill_command(case))
        environment = {**os.environ, **variables, FILE: str(self.told.path)}
        adopt_orphans()
        sys.stdout.flush()
        try:
            self._process = subprocess.Popen(
                words,
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
        assert self._process.stdout is not None
        self.recent = bytearray()
        self._copier = threading.Thread(
            target=_copy, args=(self._process.stdout, self.recent), daemon=True
        )
        self._copier.start()

    def _await_end(self) -> None:
        # it stays to be reaped once `_ended` is set, and not before
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.ended_s = time.monotonic() - self.began
        self._ended.set()

    def take(self) -> _Taken:
        """Return its next step, as soon as it is told. Raises `_EndError`: there is none."""
        while self.taken >= len(self.told.steps):
            ended = self._ended.is_set()
            self.told.update()
            if self.taken < len(self.told.steps):
                break
            if ended:
                raise _EndError
            self._ended.wait(_POLL_S)
        step = self.told.steps[self.taken]
        self.taken += 1
        self.clock_s += max(step.time_s or 0.0, _LEAST_S)
        if (now := time.monotonic()) >= self._due:
            loss = math.nan if step.loss is None else step.loss
            held = 0
            for pid in list_children(os.getpid()):
                with suppress(OSError):
                    held += read_held_memory(pid)
            self._channel.send(StepTaken(self.phase, self.taken - 1, 0, loss, held))
            self._due = now + _REPORT_EVERY_S
        return step

    def wait(self) -> None:
        """Wait for its end, with what it tells left aside."""
        with suppress(_EndError):
            while True:
                self.take()

    def stop(self) -> None:
        """End it, as its measurement is complete: SIGTERM, and SIGKILL to what stays."""
        os.kill(self._process.pid, signal.SIGTERM)
        self._ended.wait(_GRACE_S)
        self._kill_rest()

    def close(self) -> tuple[int, list[str]]:
        """Return its code, negative for a signal, and the names of the processes that it left."""
        self._ended.wait()
        code = self._process.wait()
        until = time.monotonic() + _GRACE_S
        while list_children(os.getpid()) and time.monotonic() < until:
            _reap()
            time.sleep(_POLL_S)
        left = self._kill_rest()
        self._copier.join(_GRACE_S)
        # a shell says so of what it ran
        return (128 - code if code > 128 else code), left

    def _kill_rest(self) -> list[str]:
        import psutil

        names = []
        for pid in list_children(os.getpid()):
            with suppress(psutil.Error, ProcessLookupError):
                names.append(psutil.Process(pid).name())
                os.kill(pid, signal.SIGKILL)
        return names


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _copy(stream: IO[bytes], recent: bytearray) -> None:
    with stream:
        while data := os.read(stream.fileno(), 1 << 16):
            recent += data
            del recent[:-_TAIL_BYTES]
            while data:
                data = data[os.write(1, data) :]


def measure_command(given: Job, channel: Channel) -> Outcome:
    """Run a command to its end, or with ``--steps`` until as many steps were measured. Raises
    UsageError: it cannot be started."""
    case, found = given.case, Outcome()
    with TemporaryDirectory(prefix="bench-command-") as folder:
        run = _Run(case, Path(folder), channel)
        channel.enter("warmup")
        warm = _warm_up(run, case)
        measured: list[_Taken] = []
        if warm is not None:
            run.phase = "epoch"
            channel.enter("epoch")
            measured = _measure(run, case)
        stopped = case.steps is not None and len(measured) >= case.steps
        if stopped:
            run.stop()
        else:
            run.wait()
        channel.enter("evaluation")
        code, left = run.close()
        run.told.update()
    fault = None if stopped else _find_fault(code, left, run, case)
    if fault:
        found.status, found.reason, found.transient = fault.status, fault.reason, fault.transient
    _describe(found, case, run, warm, measured)
    if stopped:
        found.note(f"ended after {count(len(measured), 'measured step')}, as --steps asks")
    channel.send(found)
    return found


def _warm_up(run: _Run, case: Case) -> Warmup | None:
    """Take steps until they are steady, by the rule of the harness's own; None if the command tells
    of too few."""
    try:
        return warm_up(run.take, torch.device("cpu"), case.steps or _UNLIMITED, lambda: run.clock_s)
    except _EndError:
        return None


def _measure(run: _Run, case: Case) -> list[_Taken]:
    measured: list[_Taken] = []
    with suppress(_EndError):
        while case.steps is None or len(measured) < case.steps:
            measured.append(run.take())
    return measured


def _find_fault(code: int, left: Sequence[str], run: _Run, case: Case) -> Fault | None:
    """Return why a command failed, from its code and the end of its output; None if it did not."""
    after = f"; after {count(len(run.told.steps), 'step')}" if run.told.steps else ""
    if code == 0:
        if not left:
            return None
        return Fault(
            Status.ERROR,
            f"the command ended and left {len(left)} process{'es' * (len(left) > 1)} running "
            f"({', '.join(dict.fromkeys(left))}), which were ended; let it wait for what it starts",
        )
    if -code in (signal.SIGKILL, signal.SIGTERM):
        return Fault(Status.KILLED, f"the command ended by {name_signal(-code)} from outside")
    # torch marks what comes from one of several processes
    text = re.sub(r"^\[rank\d+\]: ?", "", run.recent.decode(errors="replace"), flags=re.MULTILINE)
    frame = _FRAME.search(text)
    errors = list(_ERROR.finditer(text, frame.end())) if frame else []
    if errors:
        # those of the script rather than of what started it, which follow
        error = next((one for one in reversed(errors) if one[1] not in _LAUNCHERS), errors[-1])
        name, said = error[1], (error[2] or "").strip()
        fault = classify([name], text, case=case)
        reason = name + (f": {said[:300]}" if said else "")
        return Fault(fault.status, f"{reason}{find_place(text)}{after}", fault.transient)
    fault = classify(["error"], text, case=case)
    said = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    how = name_signal(-code) if code < 0 else f"code {code}"
    reason = f"the command ended with {how}" + (f": {said.strip()[:200]}" if said else "")
    return Fault(fault.status, reason + after, fault.transient)


_OF_STEPS = ("warmup_steps", "warmup_time_s", "measured_steps", "step_time_median_s", "train_loss")
_NO_STEPS = "the command does not tell its steps; call bench.step in it"


def _describe(
    found: Outcome, case: Case, run: _Run, warm: Warmup | None, measured: Sequence[_Taken]
) -> None:
    m, told = found.measurement, run.told
    steps = told.steps
    if told.others:
        found.note("other processes of the command called bench.step too, which does not count")
    if steps and warm is None:  # too few to wait until they are steady: the first does not count,
        # nor does the one whose operations were counted, which takes longer
        counted = SAMPLED if told.work.get("work") else 0
        measured = [step for step in steps if step.number not in (0, counted)]
        few = f"its {count(len(steps), 'step')} were too few for a warm-up"
        found.note(few)
        found.leave_out(few, "warmup_steps", "warmup_time_s")
    if not measured:
        found.unit, found.epoch_items = "runs", 1
        m.epoch_time_s = m.measured_time_s = run.ended_s
        m.measured_images, m.images_per_s = 1, 1 / run.ended_s
        found.leave_out(_NO_STEPS if not steps else "it took too few steps", *_OF_STEPS)
        if found.status is not Status.OK:
            m.epoch_time_s = m.images_per_s = None
        return
    times = [step.time_s or 0.0 for step in measured]
    m.setup_time_s = steps[0].moment - run.began
    if warm:
        m.warmup_steps, m.warmup_time_s = warm.steps, warm.time_s
        m.warmup_steady = warm.steady
    items = told.count(measured)
    found.unit = "items" if told.counted else "steps"
    whole = steps[: told.epochs[0][0]] if told.epochs else ()
    found.epoch_items = told.count(whole) or ITEMS
    m.measured_steps, m.measured_images, m.measured_time_s = len(measured), items, sum(times)
    per_step = items / len(measured)
    m.steps_per_epoch = len(whole) or None
    _extrapolate(found, times, found.epoch_items / per_step)
    assert m.epoch_time_s
    m.images_per_s = found.epoch_items / m.epoch_time_s
    describe_steps(m, times)
    if ends := find_ends(times):
        m.step_time_first_s, m.step_time_last_s = ends
    _describe_losses(found, told, case, measured)
    _describe_work(found, case, told)


def _extrapolate(found: Outcome, times: Sequence[float], full_steps: float) -> None:
    m = found.measurement
    assert m.measured_time_s
    if full_steps <= len(times):
        m.epoch_time_s = m.measured_time_s * full_steps / len(times)
        return
    describe_interval(found, times, extrapolate(m.measured_time_s, times, full_steps))


def _describe_losses(found: Outcome, told: _Told, case: Case, measured: Sequence[_Taken]) -> None:
    m = found.measurement
    found.steps = [
        Step(step.number, told.count([step]), None if step.loss is None else finite(step.loss),
             None, step.time_s)
        for step in measured
    ]  # fmt: skip
    if any(step.loss is None for step in measured):
        found.leave_out("the command tells no loss; give bench.step(loss=…)", "train_loss")
    else:
        told_of = told.steps[: measured[-1].number + 1]
        bad = (step.number for step in told_of if not math.isfinite(step.loss or 0.0))
        if (first := next(bad, None)) is not None:
            m.first_bad_step = max(0, first - measured[0].number)
        # how many steps the warm-up takes is chance, and the loss is to be the same without it
        m.train_loss = _average(told.steps[: case.steps])
    begin = 0
    for number, (end, evaluated) in enumerate(told.epochs):
        own = told.steps[begin:end]
        begin = end
        took, loss = sum(step.time_s or 0.0 for step in own), _average(own)
        row = EpochRow(number, took, loss, None, evaluated["loss"], evaluated["accuracy"])
        found.epochs.append(row)
    if told.epochs:
        last = found.epochs[-1]
        m.test_loss, m.test_accuracy = last.test_loss, last.test_accuracy
        m.train_loss = last.train_loss
    if found.status is Status.OK:
        found.status, found.reason = conclude(m)


def _average(steps: Sequence[_Taken]) -> float | None:
    """Return the mean loss over the items of steps; None if it is not finite, or not known."""
    images = sum(step.items for step in steps)
    if not images or any(step.loss is None for step in steps):
        return None
    return finite(sum(step.items * (step.loss or 0.0) for step in steps) / images)


def _describe_work(found: Outcome, case: Case, told: _Told) -> None:
    """Count the work of the sampled step, and hold its number formats against the label."""
    m, sample = found.measurement, told.work
    columns = ("labelled_flop_share", "flop_per_image", "step_bytes")
    if not sample or sample["failure"]:
        why = sample.get("failure") or "it has no torch, or ended too early to look at a step"
        found.leave_out(why, *columns)
        return
    work = {
        Label(Kind(kind), operation, format): Work(calls, flop, bytes)
        for kind, operation, format, calls, flop, bytes in sample["work"]
    }
    m.flags = " ".join(f"{name}={value}" for name, value in sample["flags"].items())
    found.leave_out("formats are counted in a command, and not rounding errors", "arithmetic")
    found.work = join_work(work, {})
    items = told.count(told.steps[SAMPLED : SAMPLED + 1])
    # counted in one of the processes that share the items
    m.flop_per_image = sample["processes"] * sum(one.flop for one in work.values()) / items
    m.step_bytes = round(sum(one.bytes for one in work.values()))
    if case.precision == OWN:
        found.leave_out("the command has no {precision}", "labelled_flop_share")
        return
    m.labelled_flop_share, other = judge_label(work, case, sample["flags"])
    if m.labelled_flop_share is None:
        found.leave_out("a step multiplies nothing", "labelled_flop_share")
    if other and found.status in (Status.OK, Status.DIVERGED):
        found.status, found.reason = conclude(m, f"labelled {case.precision}, but {other}")


def judge_label(
    work: dict[Label, Work], case: Case, flags: dict[str, str]
) -> tuple[float | None, str]:
    """Judge as `judge_formats` does; and whether TF32, which reads float32, ran as fp32."""
    precision = PRECISIONS[case.precision]
    labelled, other = judge_formats(work, precision)
    if labelled and not other and case.device == "cuda":
        convolves = any("conv" in label.kind and one.flop for label, one in work.items())
        rounded = (convolves and flags["conv"] == "tf32") or flags["matmul"] == "tf32"
        if rounded and precision.arithmetic is Arithmetic.FLOAT32:
            other = (
                "torch's TF32 was on, its default for convolutions; label it tf32, or set "
                "torch.backends.cudnn.conv.fp32_precision = 'ieee' in the script"
            )
    return labelled, other
