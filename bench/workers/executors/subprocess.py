"""Running each case in a fresh worker process, which is ended with every process it started.

CUDA errors are sticky and cuDNN's choices outlive a case, so no process measures twice.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path

from bench.base.errors import UnsupportedError, UsageError
from bench.base.processes import (
    TemporaryFolder,
    describe_pause,
    list_stopped,
    share_cores,
    usable_cpus,
)
from bench.base.text import GIB, count, join_words
from bench.machine.host import describe_other
from bench.machine.monitor import ENERGY_COLUMNS, Monitors, Observation
from bench.machine.nvml import Card, find_card, find_cards, open_device, spell_uuid
from bench.machine.power import hold_limits
from bench.schema.failure import classify, classify_death, count_oom_kills, list_kinds, order_end
from bench.schema.record import MEASURED, REFUSED, Outcome, Status, write_missing
from bench.workers.executors import ALL, Executor, Listener, Settings, Stopping
from bench.workers.job import (
    END,
    GO_ON,
    EpochEnded,
    Job,
    Lane,
    Message,
    PhaseEntered,
    Rendezvous,
)
from bench.workers.server import EndedError, Process

_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # Triton's is within it
_ATTEMPTS = 3
_BACK_OFF_S = 1.0
_POLL_S = 0.1
# How long the other workers may take to report their end once one has failed, in s.
_GRACE_S = 3.0

# How much longer processes wait for each other than a phase may take, in s, so that the phase's
# deadline comes first, which has their stacks written.
_MARGIN_S = 60.0

_CUT_SHORT = (Status.TIMEOUT, Status.INTERRUPTED)


class SubprocessExecutor(Executor):
    """An executor that runs each case in its own worker. The parent reads the card while the worker
    trains. Lanes are GPUs, or equal shares of the cores that this process may use."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._running: list[Workers] = []

    @cached_property
    def _compiled(self) -> TemporaryFolder:
        return TemporaryFolder("compiled")

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        if wanted in (None, 1):
            return (Lane(),)
        cards, cores = [] if device == "cpu" else find_cards()[0], usable_cpus()
        there = len(cores) if device == "cpu" else len(cards)
        if wanted > there or not there:
            what = "CPU core" if device == "cpu" else "GPU"
            raise UsageError(
                f"--lanes: this process may use {count(there, what)}; give at most as many"
            )
        if device == "cpu":
            shares = share_cores(cores, there if wanted == ALL else wanted)
            return [Lane(f"cpu{i}", cores=own) for i, own in enumerate(shares)]
        cards = cards[: wanted or len(cards)]
        kinds = dict.fromkeys((card.name, round((card.memory_bytes or 0) / GIB)) for card in cards)
        if len(kinds) > 1:
            names = join_words([name + f" of {size} GiB" * bool(size) for name, size in kinds])
            raise UsageError(
                f"--lanes: the GPUs are of several kinds ({names}), whose rows cannot be compared; "
                "choose some of one kind with CUDA_VISIBLE_DEVICES"
            )
        return [Lane(f"gpu{card.index}", (card.uuid,)) for card in cards]

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        """Return the lane's GPU and others of its kind, or this process's cores in equal shares."""
        if size == 1:
            return lane
        if device == "cpu":
            there, what = len(cores := usable_cpus()), "CPU cores"
            names = [f"cpu{i}" for i in range(size)]
            place = Lane("", cores=tuple(cores[: len(cores) // size * size]))
        else:
            cards = find_cards()[0]
            own = find_card(lane.gpus[0], cards) if lane.gpus else None
            # until it is known which one torch takes: the kind of which there are most
            kinds = Counter(card.kind for card in cards).most_common(1)
            kind = own.kind if own else kinds[0][0] if kinds else None
            alike = [card for card in cards if card.kind == kind]
            alike.sort(key=lambda card: card is not own)
            there, what = len(alike), "GPUs of one kind"
            names = [f"gpu{card.index}" for card in alike[:size]]
            place = Lane("", tuple(card.uuid for card in alike[:size]))
        if size > there:
            raise UnsupportedError(
                f"world size {size} takes {size} {what}; this machine has {there}"
            )
        return replace(place, name="+".join(names)) if lane.name else place

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case; after a transient failure try again, up to three attempts in all."""
        for tries in range(_ATTEMPTS):
            if tries:
                time.sleep(_BACK_OFF_S * 2 ** (tries - 1))
            try:
                outcome = self._attempt(job, on_event, stopping)
            except UnsupportedError as error:
                outcome = Outcome(Status.UNSUPPORTED, str(error))
            except Exception as error:  # a fault of the machine; the sweep goes on
                outcome = classify(list_kinds(error), str(error))
            outcome.retries = tries
            if not outcome.transient:
                break
        return outcome

    def kill(self) -> None:
        """End the workers and all they started, at once; without a lock, for signal handlers."""
        for workers in list(self._running):
            workers.kill()

    def close(self) -> None:
        """Remove compiled code."""
        if "_compiled" in vars(self):
            self._compiled.cleanup()

    def choose_cache(self, job: Job) -> dict[str, str]:
        """Return the variable that gives a compiled case its own cache folder, empty at first.

        torch's default folder would outlive the sweep, and serve other cases that have the same
        kernels: on a CPU the same two cases started in 12.6 s the first time and in 7.3 s the
        second time. So the first repeat of a case compiles, and the others use its cache.
        """
        if not job.case.compiled or _CACHE in os.environ:
            return {}
        return {_CACHE: str(Path(self._compiled.name) / job.case.slug())}

    def _attempt(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        case, choice = job.case, _list_choice(job)
        awake, _ = describe_pause()
        uuids: Sequence[str | None] = [card.uuid for card in choice]
        if not uuids:  # a case on a CPU has none of its lane's
            uuids = (job.gpu_uuid and job.lane.gpus) or [job.gpu_uuid]
        cards = [open_device(uuid) for uuid in uuids]
        limited = list_limited(job.lane, job.gpu_uuid, case.command is not None)
        with (
            hold_limits(limited, case.power_limit) as find_changed,
            Monitors(cards, whole=case.command is not None) as monitor,
        ):
            answer, note = self._work(job, monitor, on_event, stopping)
            m, allow_shared = answer.measurement, self.settings.allow_shared
            spelt = {spell_uuid(card.partition("-")[2], choice) for card in answer.cards}
            monitor.named = [i for i, card in enumerate(choice) if card.uuid in spelt]
            seen = monitor.close(
                m.peak_reserved_bytes, m.warmup_reserved_bytes, allow_shared, m.measured_time_s
            )
            if case.power_limit is not None:
                other = find_changed() or _find_other_limit(case.power_limit, seen)
                seen.verdict = "; ".join(filter(None, [other, seen.verdict]))
        if paused := describe_pause(awake)[1]:
            again = f"while it ran, {paused}; its times may have that in them; --retry invalid"
            seen.verdict = "; ".join(filter(None, [f"{again} measures it anew", seen.verdict]))
        if note:
            seen.notes.append(note)
        outcome = _conclude(answer, seen, allow_shared)
        if choice:
            outcome.measurement.gpus = len(seen.cards) or None
        if outcome.seen and seen.cards and choice:
            found = describe_other(choice[seen.cards[0]], find_card(job.gpu_uuid or "", choice))
            outcome.seen.found |= found
        return outcome

    def _work(
        self, job: Job, monitor: Monitors, on_event: Listener, stopping: Stopping
    ) -> tuple[Outcome, str]:
        """Run the workers of a case to their end. Return what they tell of it, and a note of how
        they were started."""
        case, oom_kills = job.case, count_oom_kills()
        workers = Workers(job, self.choose_cache(job), self.settings)
        self._running.append(workers)
        answer: Outcome | None = None
        kept: Outcome | None = None
        done: int | None = None  # epochs; None before the first begins
        trained = False
        try:
            monitor.watch(workers.pids)
            for message in self._listen(workers, stopping, bool(case.command)):
                if isinstance(message, Outcome) and message.follows:
                    kept = message
                elif isinstance(message, Outcome):
                    answer = message
                    break
                elif isinstance(message, EpochEnded):
                    assert job.enough
                    workers.send(END if job.enough(message.row) else GO_ON)
                else:
                    on_event(message)
                if isinstance(message, PhaseEntered):
                    monitor.enter(message.phase)
                    trained = True  # or is about to
                    if message.phase != "warmup":
                        done = message.epoch + (message.phase == "evaluation")
                    workers.send(GO_ON)
        finally:
            returncode = workers.end(patiently=not answer or answer.status not in _CUT_SHORT)
            self._running.remove(workers)
        oom_kills = count_oom_kills() - oom_kills
        if answer is None:
            answer = classify_death(returncode, oom_kills, case, trained)
            answer.reason = workers.failed_rank + answer.reason
        if kept and answer.status not in MEASURED:
            why = dict.fromkeys(kept.follows, answer.reason)
            answer = replace(kept, missing={**kept.missing, **why})
        several = case.epochs > 1 and case.command is None  # which tells by itself how far it was
        if done is not None and several and answer.status not in MEASURED:
            answer.reason += f"; after {done} of {case.epochs} epochs"
        return answer, workers.note

    def _listen(self, workers: Workers, stopping: Stopping, command: bool) -> Iterator[Message]:
        """Yield the workers' messages, with a final `Outcome` if they are stopped or a phase, or a
        ``command`` as a whole, exceeds its deadline. Raises MessageError: what a worker sent is no
        message."""
        phase = "the command" if command else "set-up"
        deadline = time.monotonic() + self.settings.timeout_s
        awake, _ = describe_pause()
        for message in workers.messages():
            now, paused = describe_pause(awake)
            if paused:  # while it waited for this process, it had no time
                awake, deadline = now, time.monotonic() + self.settings.timeout_s
            if stopping():
                yield Outcome(Status.INTERRUPTED, "the sweep was stopped")
                return
            if time.monotonic() > deadline:
                stopped = list_stopped(workers.pids)
                reason = f"{phase} took longer than {self.settings.timeout_s:g} s"
                if stopped:
                    names = join_words([*map(str, stopped)])
                    reason += f", since process {names} was stopped, as by kill -STOP or a debugger"
                    reason += ": --retry timeout runs the case again"
                else:
                    reason += "; raise --timeout"
                if not {*workers.pids} <= {*stopped}:  # those can tell nothing
                    workers.dump_stacks()
                    reason += f"; the log has {'its output' if command else 'the stacks'}"
                yield Outcome(Status.TIMEOUT, reason)
                return
            if message is not None:
                yield message
            if isinstance(message, PhaseEntered) and not command:
                phase, deadline = message.phase, time.monotonic() + self.settings.timeout_s


def refuse_pair(device: str) -> str:
    """Return why two processes of this machine cannot train together; empty if they can."""
    try:
        SubprocessExecutor(Settings()).gather(Lane(), device, 2)
    except UnsupportedError as error:
        return str(error)
    return ""


def start_worker(
    job: Job, variables: Mapping[str, str], rendezvous: Rendezvous | None, cold: bool
) -> Process:
    """Start the process of a case, or one of several."""
    given = replace(
        job,
        checkpoints=job.checkpoints and job.checkpoints.absolute(),
        trace=job.trace and job.trace.absolute(),
        enough=None,
        judged=job.enough is not None,
        rendezvous=rendezvous,
        asked_at=time.monotonic(),
    )
    return Process(
        "bench.workers.worker:work",
        given,
        variables={**job.lane.variables, **variables},
        cores=job.lane.cores,
        log=job.log,
        cold=cold,
    )


class Workers:
    """The worker of a case, or those of one that trains in several processes.

    Of several, the first measures like the only worker of a case. All enter each phase together.
    The case ends as the first worker does, once all have ended. If any fails, the case ends as that
    one does: out of memory takes precedence, and a failure because peers were gone counts least;
    ``failed_rank`` then begins the reason.

    Each of several has one of the lane's GPUs, or a share of its cores.
    """

    def __init__(self, job: Job, variables: Mapping[str, str], settings: Settings) -> None:
        self._failed, self._deciding, self.failed_rank = False, 0, ""
        self._workers: list[Process] = []
        self._folder = TemporaryFolder("ranks")
        try:
            if job.case.grouped:
                self._start_ranks(job, variables, settings)
            else:
                self._workers.append(start_worker(job, variables, None, settings.cold))
        except BaseException:
            self.end(patiently=False)
            raise
        self.note = self._workers[0].note
        self.pids = [worker.pid for worker in self._workers]

    def _start_ranks(self, job: Job, variables: Mapping[str, str], settings: Settings) -> None:
        size, on_cpu = job.case.world_size, job.case.device == "cpu"
        gpus = [] if on_cpu else [*(job.lane.gpus or filter(None, [job.gpu_uuid]))]
        # with GPUs, the system chooses the cores, as it does for a single GPU
        cores = share_cores(job.lane.cores or usable_cpus(), size) if on_cpu else [()] * size
        store = str(Path(self._folder.name) / "store")
        # all run on this machine, whatever its host name resolves to
        name = "GLOO_SOCKET_IFNAME"
        given = {name: os.environ.get(name, "lo"), **variables}
        for rank in range(size):
            lane = replace(job.lane, gpus=job.lane.gpus[rank : rank + 1], cores=cores[rank])
            rendezvous = Rendezvous(rank, size, store, gpus, settings.timeout_s + _MARGIN_S)
            placed = replace(job, gpu_uuid=gpus[rank] if gpus else None, lane=lane)
            self._workers.append(start_worker(placed, given, rendezvous, settings.cold))

    def messages(self) -> Iterator[Message | None]:
        """Yield the first worker's messages, a phase once all have announced it, and None at least
        every 0.1 s. Raises MessageError: a worker sent what is no message."""
        waiting: dict[int, PhaseEntered | EpochEnded] = {}
        ends: dict[int, Outcome | None] = {}  # None for a worker that ended without a message
        decided = math.inf
        while len(ends) < len(self._workers) and time.monotonic() < decided:
            left = {r: worker for r, worker in enumerate(self._workers) if r not in ends}
            wait([worker.connection for worker in left.values()], _POLL_S)
            for rank, worker in left.items():
                message: Message | None = None
                with suppress(EndedError):
                    try:
                        message = worker.receive(0)
                    except TimeoutError:
                        continue
                if isinstance(message, PhaseEntered | EpochEnded):
                    waiting[rank] = message
                elif message is None or (isinstance(message, Outcome) and not message.follows):
                    ends[rank] = message
                    if not self._failed and (message is None or message.status not in MEASURED):
                        self._failed, decided = True, time.monotonic() + _GRACE_S
                elif not rank:
                    yield message
            if len(waiting) == len(self._workers):
                yield waiting[0]
                waiting.clear()
            yield None
        # one that ended without a message failed
        weights = {rank: order_end(end or Outcome(Status.ERROR)) for rank, end in ends.items()}
        self._deciding = rank = min(weights, key=weights.__getitem__)
        end = ends[rank]
        if self._failed and len(self._workers) > 1:
            self.failed_rank = f"rank {rank}: "
        if end is not None:
            yield replace(end, reason=self.failed_rank + end.reason) if self._failed else ends[0]

    def send(self, content: str = GO_ON) -> None:
        for worker in self._workers:
            worker.send(content)

    def dump_stacks(self) -> None:
        for worker in self._workers:
            worker.dump_stacks()

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def end(self, patiently: bool) -> int:
        """Let the workers end by themselves if ``patiently`` (of several after a failure, only the
        one that decided how the case ended); then SIGKILL all. Return the deciding worker's return
        code."""
        if several := len(self._workers) > 1:
            awaited = [self._deciding] if self._failed else range(len(self._workers))
            until = time.monotonic() + _GRACE_S
            for rank in awaited if patiently else ():
                self._workers[rank].wait(max(0.0, until - time.monotonic()))
            self.kill()
        codes = [worker.end(patiently or several) for worker in self._workers]
        self._folder.cleanup()
        return codes[self._deciding] if codes else 0


def _list_choice(job: Job) -> list[Card]:
    """Return the cards among which a command chooses; none for other cases, on a CPU, or where NVML
    knows none."""
    if job.case.device != "cuda" or job.case.command is None:
        return []
    there, _ = find_cards(environ={})  # a command may set CUDA_VISIBLE_DEVICES itself
    return [card for card in there if not job.lane.gpus or card.uuid in job.lane.gpus]


def list_limited(lane: Lane, uuid: str | None, command: bool) -> Sequence[str | None]:
    """Return the cards of a lane, whose first is this one, to which a power limit applies: of a
    command all that it can see, as it chooses among them."""
    if command and not lane.gpus:
        return [card.uuid for card in find_cards()[0]]
    return lane.gpus or [uuid]


def _find_other_limit(watts: int, seen: Observation) -> str:
    """Return what cards kept to instead of a power limit, in W each; empty if to that."""
    number, limit_w = len(seen.cards), seen.values.get("power_limit_w")
    if not number or limit_w is None or abs(limit_w / number - watts) < 1:
        return ""
    return f"its power limit was {limit_w / number:g} W, and not the {watts} W that were asked for"


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
        for name in ENERGY_COLUMNS:
            if values.pop(name, None) is not None:
                missing[name] = "another process trained the first epochs"
    m = replace(
        last.measurement,
        **values,
        missing=write_missing(missing) or None,
        notes="; ".join(filter(None, notes)) or None,
    )
    return replace(last, status=status, reason=reason, measurement=m, missing={})
