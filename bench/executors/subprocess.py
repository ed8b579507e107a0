"""Running each case in a fresh worker process, which is ended with every process it started.

CUDA errors are sticky and cuDNN's choices outlive a case, so no process measures twice.
"""

from __future__ import annotations

import os
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bench.cores import share_cores, usable_cpus
from bench.errors import UnsupportedError, UsageError
from bench.executors import ALL, Executor, Listener, Settings, Stopping
from bench.executors.ranks import Ranks, Worker, find_gpus
from bench.failure import classify, classify_death, count_oom_kills, list_kinds
from bench.gpu.device import CombinedDevice, Device, Unreadable
from bench.gpu.monitor import ENERGY, Monitor, Observation
from bench.gpu.nvml import Card, find_card, find_cards, open_device
from bench.record import MEASURED, REFUSED, Outcome, Status, write_missing
from bench.scratch import Scratch
from bench.text import GIB, count, join_words
from bench.worker.messages import END, GO_ON, EpochEnded, Job, Lane, Message, PhaseEntered

_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's is within it
_ATTEMPTS = 3
_BACK_OFF_S = 1.0
_CUT_SHORT = (Status.TIMEOUT, Status.INTERRUPTED)
_AWAITS_LOADER = re.compile(r"utils/data/dataloader\.py\", line \d+ in __next__").search
"""Whether the stacks of a worker show that it waits for a batch of torch's DataLoader."""


class SubprocessExecutor(Executor):
    """An executor that runs each case in its own worker. The parent reads the card while the worker
    trains. Lanes are GPUs, or equal shares of the cores that this process may use."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._workers: list[Worker | Ranks] = []
        self._compiled: Scratch | None = None
        self._lock = threading.Lock()

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        if wanted in (None, 1):
            return (Lane(),)
        if device == "cpu":
            return _share_cores(usable_cpus(), wanted)
        cards, why = find_cards()
        if not cards:
            raise UsageError(f"--lanes: {why}; leave it out")
        if wanted > len(cards):
            raise UsageError(
                f"--lanes {wanted}: this machine has {count(len(cards), 'GPU')}; give at most "
                f"{len(cards)}"
            )
        cards = cards[: wanted or len(cards)]
        kinds = dict.fromkeys((card.name, round((card.memory_bytes or 0) / GIB)) for card in cards)
        if len(kinds) > 1:
            names = join_words([name + f" of {size} GiB" * bool(size) for name, size in kinds])
            raise UsageError(
                f"--lanes: the GPUs are of several kinds ({names}), whose rows cannot be compared; "
                "choose some of one kind with CUDA_VISIBLE_DEVICES"
            )
        return name_lanes(cards)

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        """Return the lane's GPU and others of its kind, or this process's cores in equal shares."""
        if size == 1:
            return lane
        if device == "cpu":
            cores = usable_cpus()
            if size > len(cores):
                raise UnsupportedError(
                    f"world size {size} takes {size} CPU cores; this machine has {len(cores)}"
                )
            name = "+".join(f"cpu{i}" for i in range(size)) if lane.name else ""
            return Lane(name, cores=tuple(cores[: len(cores) // size * size]))
        cards, why = find_cards()
        if not cards:
            raise UnsupportedError(f"world size {size} takes {size} GPUs: {why}")
        own = (lane.gpus and find_card(lane.gpus[0], cards)) or cards[0]
        kind = (own.name, own.memory_bytes)
        others = [c for c in cards if c.uuid != own.uuid and (c.name, c.memory_bytes) == kind]
        alike = [own, *others]
        if size > len(alike):
            raise UnsupportedError(
                f"world size {size} takes {size} GPUs of one kind; this machine has {len(alike)} "
                f"({own.name})"
            )
        name = "+".join(f"gpu{card.index}" for card in alike[:size]) if lane.name else ""
        return Lane(name, tuple(card.uuid for card in alike[:size]))

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case; after a transient failure try again, up to three attempts in all."""
        for tries in range(_ATTEMPTS):
            if tries:
                time.sleep(_BACK_OFF_S * 2 ** (tries - 1))
            try:
                outcome = self._attempt(job, on_event, stopping, tries == _ATTEMPTS - 1)
            except Exception as error:  # a fault of the machine; the sweep goes on
                place = job.log or Path(os.devnull)
                with suppress(OSError), place.open("a", encoding="utf-8") as log:
                    log.write(traceback.format_exc())
                fault = classify(list_kinds(error), str(error))
                outcome = Outcome(fault.status, fault.reason, transient=fault.transient)
            outcome.retries = tries
            if not outcome.transient:
                break
        return outcome

    def kill(self) -> None:
        """End the workers and all they started, at once; without a lock, for signal handlers."""
        for worker in list(self._workers):
            worker.kill()

    def close(self) -> None:
        """Remove compiled code."""
        if self._compiled is not None:
            self._compiled.cleanup()

    def choose_cache(self, job: Job) -> dict[str, str]:
        """Return the variable that gives a compiled case its own cache folder, empty at first.

        torch's default folder would outlive the sweep, and serve other cases that have the same
        kernels: on a CPU the same two cases started in 12.6 s the first time and in 7.3 s the
        second time. So the first repeat of a case compiles, and the others use its cache.
        """
        if not job.case.compiled or _CACHE in os.environ:
            return {}
        with self._lock:
            if self._compiled is None:
                self._compiled = Scratch("compiled")
        return {_CACHE: str(Path(self._compiled.name) / job.case.slug())}

    def _attempt(self, job: Job, on_event: Listener, stopping: Stopping, last: bool) -> Outcome:
        """Run the worker once. A card that NVML cannot open for the moment is worth another
        attempt, but at the last one the case runs without readings rather than not at all."""
        size, uuids = job.case.world_size, job.lane.gpus
        device: Device
        if 1 < size <= len(uuids):
            device = CombinedDevice([open_device(uuid) for uuid in uuids[:size]])
        else:
            device = open_device(job.gpu_uuid)
        if isinstance(device, Unreadable) and not last:
            fault = classify(["NVMLError"], device.reason)
            if fault.transient:
                return Outcome(fault.status, fault.reason, transient=True)
        command, oom_kills = job.case.command is not None, count_oom_kills()
        with Monitor(device, whole=command) as monitor:
            try:
                worker = start_worker(job, self.choose_cache(job), self.settings)
            except UnsupportedError as error:
                return Outcome(Status.UNSUPPORTED, str(error))
            self._workers.append(worker)
            answer: Outcome | None = None
            kept: Outcome | None = None
            done: int | None = None
            trained = False
            try:
                if isinstance(device, CombinedDevice):
                    device.pids = worker.pids
                monitor.watch(worker.pid)
                for message in self._listen(worker, stopping, command):
                    if isinstance(message, Outcome) and message.follows:
                        kept = message
                        continue
                    if isinstance(message, Outcome):
                        answer = message
                        break
                    if isinstance(message, EpochEnded):
                        assert job.enough
                        worker.send(END if job.enough(message.row) else GO_ON)
                        continue
                    on_event(message)
                    if isinstance(message, PhaseEntered):
                        monitor.enter(message.phase)
                        trained = True  # or is about to
                        if message.phase != "warmup":
                            done = message.epoch + (message.phase == "evaluation")
                        worker.send(GO_ON)
            finally:
                returncode = worker.end(patiently=not answer or answer.status not in _CUT_SHORT)
                self._workers.remove(worker)
            if answer is not None and answer.until:
                answer.measurement.teardown_s = time.monotonic() - answer.until
            if answer is None:
                oom_kills = count_oom_kills() - oom_kills
                fault = classify_death(returncode, oom_kills, job.case, trained)
                reason = worker.failed_rank + fault.reason
                answer = Outcome(fault.status, reason, transient=fault.transient)
            elif answer.status is Status.KILLED and count_oom_kills() > oom_kills:
                reason = f"{answer.reason} By the host's out-of-memory killer (host memory)"
                answer = replace(answer, reason=reason)
            if kept and answer.status not in MEASURED:
                why = dict.fromkeys(kept.follows, answer.reason)
                answer = replace(kept, missing={**kept.missing, **why})
            seen = monitor.close(
                answer.measurement.peak_reserved_bytes,
                answer.measurement.warmup_reserved_bytes,
                self.settings.allow_shared,
                answer.measurement.measured_time_s,
            )
        if worker.note:
            seen.notes.append(worker.note)
        outcome = _conclude(answer, seen, self.settings.allow_shared)
        if done is not None and job.case.epochs > 1 and outcome.status not in MEASURED:
            outcome.reason += f"; after {done} of {job.case.epochs} epochs"
        return outcome

    def _listen(
        self, worker: Worker | Ranks, stopping: Stopping, command: bool
    ) -> Iterator[Message]:
        """Yield the worker's messages, with a final `Outcome` if it is stopped or a phase, or a
        ``command`` as a whole, exceeds its deadline. Raises MessageError: what the worker sent is
        no message."""
        phase = "the command" if command else "set-up"
        deadline = time.monotonic() + self.settings.timeout_s
        for message in worker.messages():
            if stopping():
                yield Outcome(Status.INTERRUPTED, "the sweep was stopped")
                return
            if time.monotonic() > deadline:
                stacks = worker.dump_stacks()
                waited = ", waiting for its DataLoader" if _AWAITS_LOADER(stacks) else ""
                reason = (
                    f"{phase} took longer than {self.settings.timeout_s:g} s{waited}; "
                    f"raise --timeout; the log has {'its output' if command else 'the stacks'}"
                )
                yield Outcome(Status.TIMEOUT, reason)
                return
            if message is not None:
                yield message
            if isinstance(message, PhaseEntered) and not command:
                phase, deadline = message.phase, time.monotonic() + self.settings.timeout_s


def name_lanes(cards: Sequence[Card]) -> list[Lane]:
    """Return a lane per GPU, named by its index; MIG instances are numbered within their GPU."""
    numbers = Counter(card.index for card in cards)
    seen = Counter[int]()
    lanes = []
    for card in cards:
        part = f".{seen[card.index]}" if numbers[card.index] > 1 else ""
        seen[card.index] += 1
        lanes.append(Lane(f"gpu{card.index}{part}", (card.uuid,)))
    return lanes


def _share_cores(cores: Sequence[int], wanted: int) -> list[Lane]:
    """Return ``wanted`` lanes with equal shares of ``cores``; the remainder stays unused. Raises
    UsageError: there are fewer cores, or this system cannot pin processes to cores."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--lanes on a CPU needs Linux, to hold processes to cores; leave it out")
    if wanted > len(cores):
        raise UsageError(
            f"--lanes {wanted}: this process may use {count(len(cores), 'CPU core')}; give at most "
            f"{len(cores)}"
        )
    shares = share_cores(cores, len(cores) if wanted == ALL else wanted)
    return [Lane(f"cpu{i}", cores=own) for i, own in enumerate(shares)]


def _conclude(last: Outcome, seen: Observation, allow_shared: bool) -> Outcome:
    """Combine the worker's measurement with the monitor's observation of the card. If others
    computed on the card and that is not allowed, out of memory becomes an error: they may have held
    the memory, and a smaller batch could fail as well."""
    status, reason = last.status, last.reason
    if status in REFUSED and seen.values.get("neighbours_computing") and not allow_shared:
        status = Status.ERROR
        reason = f"out of memory while others used the GPU; see python -m bench.doctor; {reason}"
    notes = [last.measurement.notes, *seen.notes]
    if seen.verdict and status in MEASURED:
        # invalid takes precedence over the status that it would have had
        status, reason = Status.INVALID, "; ".join(filter(None, [seen.verdict, reason]))
    elif seen.verdict:
        notes.append(seen.verdict)
    missing, values = {**seen.missing, **last.missing}, dict(seen.values)
    if last.measurement.resumed_epochs:
        # an earlier process's energy is not known, but the row's steps and images are of both
        for name in ENERGY:
            if values.pop(name, None) is not None:
                missing[name] = "another process trained the first epochs"
    m = replace(
        last.measurement,
        **values,
        missing=write_missing(missing) or None,
        notes="; ".join(filter(None, notes)) or None,
    )
    return replace(last, status=status, reason=reason, measurement=m, missing={})


def start_worker(job: Job, variables: Mapping[str, str], settings: Settings) -> Worker | Ranks:
    """Start the worker of a job, or several that train one network. Raises UnsupportedError: the
    job's lane has too few GPUs."""
    if job.case.parallel == "ddp":
        return Ranks(job, variables, settings.timeout_s, settings.cold)
    if job.case.parallel == "dp":
        find_gpus(job)
    return Worker(job, variables, cold=settings.cold)
