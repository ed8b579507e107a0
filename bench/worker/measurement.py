"""Measure a case: set up, warm up, train the warm epochs, evaluate, check the precision."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.case import FOLLOWS, Case, count_probed, micro_batch, whole_batch
from bench.data.batches import Share
from bench.diagnosis.step import PROFILED
from bench.environment import usable_cpus
from bench.errors import UsageError
from bench.gpu.nvml import describe_links
from bench.limits import find_ends
from bench.processes import pause_collection, read_cpu_time
from bench.record import (
    BESIDE,
    PROVEN,
    EpochRow,
    Known,
    Measurement,
    RankRow,
    Step,
    WorkRow,
    write_sources,
)
from bench.timeline import Timed
from bench.training.flop import count_flop
from bench.work import Label, Work
from bench.worker.channel import Channel, Reporter, read_memory
from bench.worker.checkpoints import NOT_REPEATABLE, STEPS, Checkpoints, compare_resumed
from bench.worker.limit import Limit, build_limit
from bench.worker.stopwatch import Stopwatch

if TYPE_CHECKING:
    import torch

    from bench.data.batches import Divided, Supply
    from bench.training.loop import Epoch, Training
    from bench.training.parallel import Group
    from bench.training.proof import Contradiction
    from bench.training.timing import Warmup
    from bench.worker.messages import Seat
    from bench.workloads import Workload


@dataclass
class Findings:
    """What a worker found: measurement, rows, why columns are empty, what belies its label.

    ``epochs`` is empty for a case of one epoch, which its measurement describes. ``until`` is the
    time.monotonic() up to which the columns of `bench.record.BESIDE` are filled, in s.
    """

    measurement: Measurement = field(default_factory=Measurement)
    steps: list[Step] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    work: list[WorkRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    contradiction: Contradiction | None = None
    until: float = 0.0


def measure(
    case: Case,
    folder: str,
    channel: Channel,
    started: float,
    gpu_uuid: str | None = None,
    checkpoints: str = "",
    identity: Mapping[str, str] | None = None,
    trace: str = "",
    on_follows: Callable[[Findings, Sequence[str]], object] = lambda found, columns: None,
    seat: Seat | None = None,
    began: float | None = None,
    known: Known | None = None,
) -> Findings:
    """Set up, warm up, train each warm epoch and evaluate after it: the whole life of a case.

    Args:
        folder: where `bench.data.prepare` left the dataset.
        started: time.monotonic() when the process was asked for.
        gpu_uuid: the GPU that it trains on, as NVML knows it.
        checkpoints: the folder of its checkpoints; empty where none are to stay.
        identity: what a checkpoint must be of to be resumed.
        trace: file for the trace of a profiled case; empty where it is not kept.
        on_follows: told what was found, and the columns that may yet be filled, before the
            profiler starts, or other processes are needed once more: either takes a crash or a
            hang of its own with it.
        seat: its place among the processes that train one network; None where it trains alone.
        began: time.monotonic() at the first line of the process (default: now).
        known: what earlier rows have found of it; the rest is found anew.

    Raises UsageError: the case trains in several processes, and there is no seat; and whatever ends
    the case.
    """
    watch = Stopwatch(started)
    watch.lap("process_start_s", began)
    found = Findings()
    m = found.measurement
    with pause_collection():
        import torch

        from bench.precision import read_flags
        from bench.training.building import build_training  # noqa: F401  (timed as an import)
        from bench.training.counting import count_step, join_work, read_work
        from bench.training.schedule import learning_rates
        from bench.training.timing import synchronize

        watch.lap("imports_s")
        device, limit = torch.device(case.device), build_limit(case, gpu_uuid)
        limit.impose()
        synchronize(device)  # which makes the context
        group = join_group(case, device, seat)
        watch.lap("device_context_s")
        workload, batches, training = set_up(case, folder, group, watch)
    m.setup_time_s = watch.total
    m.apex = training.apex
    if training.start_note:
        _note(found, training.start_note)
    if training.conversion:
        m.fp8_layers = str(training.conversion)
        for remark in training.conversion.notes:
            _note(found, remark)
        if (layers := training.conversion.unneeded) and not case.compiled:
            _note(
                found,
                f"of {layers} layers in fp8 torchao computes a gradient that training does not "
                "need, and that no FLOP are counted for; --compile on leaves it out",
            )
    if training.brings_optimizer:
        name = type(training.optimizer).__name__
        _note(found, f"the workload's own optimizer is {name}")

    channel.enter("warmup")
    report = Reporter(channel, device, "warmup", 0)
    watch.lap("other_s")
    warm = warm_up_shapes(training, batches, case, report, group.now)
    watch.lap("warmup")
    m.warmup_steps, m.warmup_time_s, m.warmup_steady = warm.steps, warm.time_s, warm.steady
    m.first_steps_time_s = warm.first_s
    _read_memory(device, "warmup", found)
    limit.adjust()
    _describe_context(limit, found)
    start_over(training, batches, case, group.rank)
    m.warmup_alloc_retries = _count_allocator_troubles(device).get("alloc_retries")

    rates = learning_rates(case, case.epochs * len(batches))
    files = Checkpoints(case, checkpoints, identity or {})
    done, others = _resume(files, training, case, found)
    watch_work(training)
    for index in range(len(done), case.epochs):
        _reset_peaks(device)  # of the evaluation before
        before = _count_allocator_troubles(device)
        channel.enter("epoch", index)
        group.wait()
        watch.lap("other_s")
        with others.watch():
            fetch = _train(training, batches, case, index, rates, channel)
        watch.lap("epoch")
        if not index:
            m.loader_first_batch_s = _read_first_batch(batches)
        if not case.persistent_workers:
            _end_workers(batches)  # of a part of an epoch; a whole one ended its own
        channel.enter("evaluation", index)
        _read_memory(device, "peak", found)
        _add_allocator_troubles(before, device, found)
        done.append(fetch())
        watch.lap("other_s")
        # what follows an epoch is not worth losing it for
        if case.evaluate and not group.rank:
            with forgive(found, *_TESTED):
                done[-1].tested = evaluate(training, workload, case)
        if case.checkpoint:
            files.save(training, _list_epochs(case, done), _pack(done, others, m))
        watch.lap("asked for")
        if len(done) < case.epochs and not channel.ask(_list_epochs(case, done)[-1]):
            m.truncated_after = len(done)
            break
    if device.type == "cpu":
        m.other_cores = OtherWork.add(group.gather(others)).cores()
    _end_workers(batches)
    limit.lift()
    if m.alloc_retries:
        _note(
            found, f"{m.alloc_retries} allocations retried within the epoch: memory was nearly full"
        )
    if case.cuda_graphs:
        m.peak_allocated_bytes = None
        found.missing["peak_allocated_bytes"] = "torch does not count what a graph holds"
    own, done = done, join_epochs(group.gather(done))
    _describe_time(found, case, done, batches, workload)
    _describe_learning(found, case, done, training)
    found.steps = _list_steps(case, done)
    found.epochs = _list_epochs(case, done) if case.epochs > 1 else []
    watch.lap("other_s")
    if case.checkpoint:
        _measure_checkpoint(files, training, batches, case, folder, found)

    with forgive(found, "loader_samples_per_s"):
        _describe_loader(found, batches, case, device)
    watch.lap("asked for")
    m.flags = " ".join(f"{name}={value}" for name, value in read_flags().items())
    if seat is not None:
        describe_group(found, case, training, own, group, seat)
        _describe_parts(found, watch)
        if not group.rank:
            on_follows(found, [*_EXCHANGED, *PROVEN, "flop_per_image", "step_bytes"])
        describe_exchange(found, training, batches, case, group)
        watch.lap("asked for")
        if group.rank:
            return found
    known = known or Known()
    sources: dict[str, str] = {}
    if "proof" in known.sources and known.values["flags"] == m.flags:
        sources["proof"] = known.sources["proof"]
        for name in (*PROVEN, "proof_notes"):
            setattr(m, name, known.values[name])
        found.missing |= known.missing
    else:
        with forgive(found, *PROVEN):
            _prove(training, batches, case, found)
    watch.lap("proof_s")
    with forgive(found, "flop_per_image"):
        if "flop" in known.sources:
            sources["flop"] = known.sources["flop"]
            m.flop_per_image = known.values["flop_per_image"]
        else:
            m.flop_per_image = count_flop(workload, case.freeze)
        if training.conversion:
            if (flop := training.conversion.flop_per_unit) is not None:
                m.fp8_flop_share = flop / m.flop_per_image
            else:
                found.missing["fp8_flop_share"] = training.conversion.unknown
    # last: both train on, and no memory is read after the profiler took its own
    counted: Mapping[Label, Work] = {}
    with forgive(found, "step_bytes"):
        if "work" in known.sources:
            sources["work"] = known.sources["work"]
            counted = read_work(known.work)
        else:
            counted = count_step(training, batches, case)
        m.step_bytes = round(sum(work.bytes for work in counted.values()))
    found.work = join_work(counted, {})
    m.shared = write_sources(sources) or None
    watch.lap("counting_s")
    _describe_parts(found, watch)
    if case.profile:
        on_follows(found, _PROFILED)
        with forgive(found, *_PROFILED):
            found.work = join_work(counted, _profile(training, batches, case, trace, found))
        watch.lap("asked for")
        _describe_parts(found, watch)
    return found


def _describe_parts(found: Findings, watch: Stopwatch) -> None:
    watch.lap("other_s")
    found.until = watch.until
    for name in BESIDE:
        setattr(found.measurement, name, watch.parts.get(name))


def describe_group(
    found: Findings,
    case: Case,
    training: Training,
    own: Sequence[TimedEpoch],
    group: Group,
    seat: Seat,
) -> None:
    from bench.training.parallel import Exchange

    m, exchange = found.measurement, training.exchange
    assert isinstance(exchange, Exchange)
    m.comm_backend, m.wire_bytes, m.buckets = group.backend, exchange.wire_bytes, exchange.buckets
    assert m.epoch_time_s
    assert m.measured_time_s
    times, work = [one.time_s for one in own], [] if case.sync_bn else exchange.read_work()
    row = RankRow(
        group.rank,
        seat.gpus[group.rank] if seat.gpus else None,
        # where a part of an epoch was measured, extrapolated as that of the slowest process
        sum(times) * m.epoch_time_s / m.measured_time_s,
        median(work) if work else None,
        sum(sum(one.epoch.images) for one in own),
        m.peak_reserved_bytes,
        None if seat.gpus else read_memory(cuda=False),
    )
    found.ranks = group.gather(row)
    known = [one for one in found.ranks if one.work_s is not None]
    if len(known) > 1:
        m.slowest_rank = max(known, key=lambda one: one.work_s or 0.0).rank
    else:
        found.missing["slowest_rank"] = _SYNC_BN if case.sync_bn else "there is one process"
    rates = group.gather(m.loader_samples_per_s)
    m.loader_samples_per_s = sum(filter(None, rates)) if all(rates) else None
    if len(seat.gpus) > 1:
        m.links, why = describe_links(seat.gpus)
        if why:
            found.missing["links"] = why
    else:
        found.missing["links"] = "there is one GPU" if seat.gpus else "the case ran on a CPU"


def describe_exchange(
    found: Findings, training: Training, batches: Supply, case: Case, group: Group
) -> None:
    """Measure what exchanging gradients adds to a step; then this process goes on alone. Raises
    Exception: it failed in this process, or in another that this one noticed."""
    from bench.training import parallel
    from bench.training.loop import Alone

    m, exchange = found.measurement, training.exchange
    assert isinstance(exchange, parallel.Exchange)
    assert m.step_time_median_s
    if case.sync_bn:
        found.missing |= dict.fromkeys(_EXCHANGED, _SYNC_BN)
    else:
        # nothing is forgiven: a process that went on after a failure would leave the others waiting
        # within NCCL, so it ends with it, and its parent keeps what was measured and ends them all
        exposed = parallel.measure_exchange(training, batches, case, group, m.step_time_median_s)
        m.sync_step_s, m.no_sync_step_s = exposed.sync_step_s, exposed.no_sync_step_s
        m.exposed_error_s = exposed.error_s
    _end_workers(batches)
    exchange.end()
    training.exchange = Alone()
    group.leave()


_EXCHANGED = ("sync_step_s", "no_sync_step_s", "exposed_error_s")

_SYNC_BN = "with --sync-bn the processes wait for each other in the forward pass too"


def join_group(case: Case, device: torch.device, seat: Seat | None) -> Group:
    """Join the processes that train ``case`` together. Raises UsageError: there are several, and
    this one was given no seat among them."""
    from bench.training.parallel import Group, Processes

    if case.parallel != "ddp":
        return Group()
    if seat is None:
        raise UsageError("--parallel ddp trains in processes that only bench.sweep starts")
    return Processes(seat.rank, seat.size, seat.store, device, seat.timeout_s)


def watch_work(training: Training) -> None:
    """Time from here on how long each process works before gradients are exchanged."""
    from bench.training.parallel import Exchange

    if isinstance(training.exchange, Exchange):
        training.exchange.watch()


def join_epochs(ranks: Sequence[Sequence[TimedEpoch]]) -> list[TimedEpoch]:
    """The epochs of all processes, of those of each: as long as the slowest took. The times of
    steps, and what the test data gave, are those of the first."""
    from bench.training.loop import merge

    return [
        replace(ones[0], epoch=merge([o.epoch for o in ones]), time_s=max(o.time_s for o in ones))
        for ones in zip(*ranks, strict=True)
    ]


def _profile(
    training: Training, batches: Supply, case: Case, trace: str, found: Findings
) -> Mapping[Label, Timed]:
    """Describe a profiled step; the time of each label in it."""
    from bench.training.profiling import profile_step

    m = found.measurement
    assert m.step_time_median_s
    try:
        line = profile_step(
            training, batches, case, m.step_time_median_s, Path(trace) if trace else None
        )
    finally:
        _end_workers(batches)
    m.profiled_steps, m.profiled_step_s = line.steps, line.step_s
    m.busy_s, m.input_wait_s, m.sync_wait_s = line.busy_s, line.input_wait_s, line.sync_wait_s
    return line.work


_PROFILED = ("profiled_steps", *PROFILED)


@dataclass(frozen=True)
class Tested:
    loss: float
    accuracy: float | None
    time_s: float


@dataclass
class TimedEpoch:
    """A measured epoch: what its steps left behind, each one's time in s and learning rate."""

    epoch: Epoch
    times: list[float]
    rates: Sequence[float]
    time_s: float
    tested: Tested | None = None

    @classmethod
    def unpack(cls, kept: Mapping[str, Any]) -> TimedEpoch:
        """Make again what `dataclasses.asdict` took apart."""
        from bench.training.loop import Epoch

        tested = kept["tested"] and Tested(**kept["tested"])
        return cls(**{**kept, "epoch": Epoch(**kept["epoch"]), "tested": tested})


def _train(
    training: Training,
    batches: Supply,
    case: Case,
    index: int,
    rates: Sequence[float],
    channel: Channel,
) -> Callable[[], TimedEpoch]:
    """Train epoch ``index`` between two device synchronisations, by the learning rates of each step
    of all epochs; what it read is fetched later."""
    from bench.training.loop import train_epoch
    from bench.training.timing import Certainty, StepClock, synchronize

    device, steps = training.device, count_steps(case, batches)
    clock, report = StepClock(device), Reporter(channel, device, "epoch", steps)
    first = index * len(batches)
    own = rates[first : first + steps]
    parts = batches.divide(index, steps=steps)
    arguments: tuple[Any, ...] = (training, parts, clock, report, own)
    if case.until is not None:
        full = batches.samples / whole_batch(case)
        arguments += (Certainty(case.until, clock, full, _count_ahead(case)),)
    synchronize(device)
    start = time.perf_counter()
    fetch = train_epoch(*arguments)
    synchronize(device)
    time_s = time.perf_counter() - start

    def read() -> TimedEpoch:
        times = clock.read()
        return TimedEpoch(fetch(), times, own[: len(times)], time_s)

    return read


def _count_ahead(case: Case) -> int:
    return math.ceil(case.workers * case.prefetch / case.accumulate)


def _pack(done: Sequence[TimedEpoch], others: OtherWork, m: Measurement) -> dict[str, Any]:
    return {
        "epochs": [asdict(one) for one in done],
        "others": others.sums,
        "noted": {name: getattr(m, name) for name in _NOTED},
    }


def _resume(
    files: Checkpoints, training: Training, case: Case, found: Findings
) -> tuple[list[TimedEpoch], OtherWork]:
    """Go on from the last checkpoint of this run, if there is one: the epochs that it has."""
    progress, m = files.resume(training), found.measurement
    done = [TimedEpoch.unpack(one) for one in progress["epochs"]] if progress else []
    m.resumed_epochs = len(done) if files.stay else None
    if progress is None:
        return [], OtherWork()
    for name, value in progress["noted"].items():
        setattr(m, name, value)
    files.keep_best(_list_epochs(case, done))  # which an interruption may have prevented
    which = f"{len(done)} of {case.epochs} epochs {'was' if len(done) == 1 else 'were'}"
    _note(
        found,
        f"{which} trained by an earlier process that was interrupted; what is sampled (memory of "
        "process and device, clocks, temperature, others on the GPU) is of this process alone",
    )
    if len(done) == case.epochs:
        reason = "an earlier process trained all epochs"
        found.missing |= {name: reason for name in _SPANNING if getattr(m, name) is None}
    return done, OtherWork(*progress["others"])


def _measure_checkpoint(
    files: Checkpoints,
    training: Training,
    batches: Supply,
    case: Case,
    folder: str,
    found: Findings,
) -> None:
    """Load the last checkpoint into a new network and compare the next steps; time the load. The
    new network comes from another seed, and its data are opened anew: nothing is left over that
    could help."""
    import torch

    from bench.training.building import build_training, open_workload
    from bench.training.checkpoint import trace

    m = found.measurement
    with forgive(found, *_SAVED):
        files.describe(m)
        live = trace(training, batches.divide(case.epochs, steps=STEPS))
        _end_workers(batches)  # what they prepare ahead would slow the load
        other = replace(case, seed=(case.seed + 1) % 2**31)

        def resume() -> dict[str, str]:
            workload = open_workload(case, folder)
            resumed = build_training(other, workload, training.device)
            kept, seconds = files.load_into(resumed)
            m.checkpoint_load_s = m.checkpoint_load_s or seconds
            supply = open_supply(replace(case, seed=kept["seed"]), workload, training.device)
            try:
                return trace(resumed, supply.divide(kept["epoch"], steps=STEPS))
            finally:
                _end_workers(supply)

        difference, repeats = compare_resumed(live, resume)
        if repeats:
            m.resume_exact, m.resume_difference = not difference, difference or None
        else:
            found.missing["resume_exact"] = NOT_REPEATABLE
    for name in _SAVED:
        if getattr(m, name) is not None:
            found.missing.pop(name, None)
    if m.checkpoint_bytes and m.checkpoint_save_s is None:
        found.missing["checkpoint_save_s"] = "an earlier process saved it"
    files.close()
    for note in files.notes:
        _note(found, note)
    if training.device.type == "cuda":
        # the proof is to find the memory that the new network had
        gc.collect()
        torch.cuda.empty_cache()


_SAVED = ("checkpoint_bytes", "checkpoint_save_s", "checkpoint_load_s", "resume_exact")

_TESTED = ("test_loss", "test_accuracy", "eval_time_s")


@contextmanager
def forgive(found: Findings, *columns: str) -> Iterator[None]:
    """Leave ``columns`` empty, saying why, where what fills them fails."""
    try:
        yield
    except UsageError as error:
        found.missing |= dict.fromkeys(columns, str(error))
    except Exception as error:
        found.missing |= dict.fromkeys(columns, f"{type(error).__name__}: {error}")


def _describe_time(
    found: Findings, case: Case, done: Sequence[TimedEpoch], batches: Supply, workload: Workload
) -> None:
    from bench.training.timing import extrapolate, summarize

    m, times = found.measurement, [t for one in done for t in one.times]
    images = [n for one in done for n in one.epoch.images]
    spread = summarize(times)
    m.measured_time_s = sum(one.time_s for one in done)
    m.measured_steps, m.steps_per_epoch = len(times), len(batches)
    m.measured_images = sum(images)
    m.epoch_time_s = m.measured_time_s / len(done)
    if len(times) < len(batches):
        full_steps = batches.samples / whole_batch(case)
        ahead, drift = _count_ahead(case), case.until is not None
        whole = extrapolate(m.measured_time_s, times, full_steps, ahead, drift)
        m.epoch_time_s = whole.epoch_s
        m.epoch_time_low_s, m.epoch_time_high_s = whole.low_s, whole.high_s
        if whole.low_s is None:
            flag = "--fraction" if case.steps is None else "--steps"
            reason = f"{len(times)} steps are too few for an interval; raise {flag}"
            found.missing |= dict.fromkeys(("epoch_time_low_s", "epoch_time_high_s"), reason)
        else:
            m.epoch_time_error = whole.error
    m.images_per_s = workload.count_units(batches.samples) / m.epoch_time_s
    m.step_time_median_s, m.step_time_p95_s = spread.median, spread.p95
    m.step_time_mad_s = spread.mad
    m.step_time_max_s, m.step_time_max_index = spread.slowest, spread.slowest_index
    units = workload.count_units(whole_batch(case))
    full = [t for t, n in zip(times, images, strict=True) if n == units]
    if ends := find_ends(full):
        m.step_time_first_s, m.step_time_last_s = ends
    else:
        reason = f"{len(full)} steps are too few to tell a trend"
        found.missing |= dict.fromkeys(("step_time_first_s", "step_time_last_s"), reason)


def _describe_learning(
    found: Findings, case: Case, done: Sequence[TimedEpoch], training: Training
) -> None:
    m, last = found.measurement, done[-1]
    m.peak_lr = max(rate for one in done for rate in one.rates)
    if case.loss_scale is not None:
        m.overflow_steps = sum(sum(one.epoch.overflowed) for one in done)
        m.final_loss_scale = float(training.current_scale())
    losses = chain.from_iterable(one.epoch.losses for one in done)
    m.first_bad_step = next((i for i, x in enumerate(losses) if not math.isfinite(x)), None)
    loss, m.train_accuracy = _average(last.epoch)
    m.train_loss = _finite(loss)
    if m.train_accuracy is None:
        found.missing["train_accuracy"] = _UNCOUNTED
    if last.tested is None:
        return
    for name in _TESTED:  # an evaluation before the last one may have failed
        found.missing.pop(name, None)
    m.test_loss, m.test_accuracy = _finite(last.tested.loss), last.tested.accuracy
    m.eval_time_s = last.tested.time_s
    if m.test_loss is None:
        found.missing["test_loss"] = "it is inf or NaN"
    if m.test_accuracy is None:
        found.missing["test_accuracy"] = _UNCOUNTED


_UNCOUNTED = "the workload does not say what is predicted right"


def _average(epoch: Epoch) -> tuple[float, float | None]:
    images = sum(epoch.images)
    total = sum(n * loss for n, loss in zip(epoch.images, epoch.losses, strict=True))
    return total / images, sum(epoch.correct) / images if epoch.correct else None


def _list_steps(case: Case, done: Sequence[TimedEpoch]) -> list[Step]:
    """One row a step, counted on over the epochs."""
    steps: list[Step] = []
    for one in done:
        epoch = one.epoch
        scales = epoch.loss_scales if case.loss_scale is not None else [None] * len(one.times)
        correct: Sequence[int | None] = epoch.correct or [None] * len(one.times)
        rows = zip(epoch.images, epoch.losses, correct, one.times, scales, one.rates, strict=True)
        steps += [
            Step(i, n, _finite(loss), hits, t, scale, lr)
            for i, (n, loss, hits, t, scale, lr) in enumerate(rows, len(steps))
        ]
    return steps


def _list_epochs(case: Case, done: Sequence[TimedEpoch]) -> list[EpochRow]:
    rows = []
    for index, one in enumerate(done):
        loss, accuracy = _average(one.epoch)
        row = EpochRow(index, one.time_s, _finite(loss), accuracy)
        if one.tested is not None:
            row.test_loss, row.test_accuracy = _finite(one.tested.loss), one.tested.accuracy
            row.eval_time_s = one.tested.time_s
        if case.loss_scale is not None:
            row.overflow_steps = sum(one.epoch.overflowed)
        rows.append(row)
    return rows


def _prove(training: Training, batches: Supply, case: Case, found: Findings) -> None:
    from torch import nn

    from bench.data.batches import count_items
    from bench.training.proof import Setting, prove

    m, precision = found.measurement, training.precision
    # on a card as many as in a step, for which cuDNN has chosen its algorithms already: for two
    # it would choose, or with cudnn_benchmark time, those of every layer anew
    looked = micro_batch(case) if training.device.type == "cuda" else 2
    batch = next(batches.evaluation(looked))
    setting = Setting(
        precision,
        training.device,
        count_probed(case),
        training.memory_format,
        case.compile,
        frozen=not all(p.requires_grad for p in training.model.parameters()),
    )
    proof = prove(
        setting,
        lambda: training.compute_loss(batch, compiled=False),
        count_items(batch),
        training.conversion,
    )
    remarks = []
    recurrent = (m for m in training.model.modules() if isinstance(m, nn.RNNBase))
    if kinds := dict.fromkeys(type(module).__name__ for module in recurrent):
        which = ", ".join(kinds)
        remarks.append(f"recurrent layers ({which}) were not probed for their arithmetic")
    m.arithmetic = proof.arithmetic
    m.proof_layer = "; ".join(str(p.layer) for p in proof.layers)
    # of two layers the larger error: it is the one to look at
    m.conv_error = _finite(max(p.forward.error for p in proof.layers))
    inputs = [p.input_grad.error for p in proof.layers if p.input_grad]
    weights = [p.weight_grad.error for p in proof.layers if p.weight_grad]
    if inputs:
        m.input_grad_error = _finite(max(inputs))
    else:
        found.missing["input_grad_error"] = "what was probed is frozen, and all before it too"
    if weights:
        m.weight_grad_error = _finite(max(weights))
    else:
        found.missing["weight_grad_error"] = "what was probed is frozen"
    m.matmul_error = _finite(proof.matmul.error)
    found.contradiction = proof.contradicts(precision)
    if found.contradiction is None:
        remarks += proof.remarks(precision)
    m.proof_notes = "; ".join(remarks) or None


def set_up(
    case: Case, folder: str, group: Group | None = None, watch: Stopwatch | None = None
) -> tuple[Workload, Supply, Training]:
    """Set the flags, bring the data to the device and build the network: ready to train, for all of
    a ``group`` together; ``watch`` is told how long the data take, and the network."""
    import torch

    from bench.training.building import build_training, open_workload
    from bench.training.timing import synchronize

    device, workload = torch.device(case.device), open_workload(case, folder)
    share = Share(group.rank, group.size) if group else None
    batches = open_supply(case, workload, device, share)
    watch = watch or Stopwatch(0.0)
    watch.lap("data_s")
    training = build_training(case, workload, device)
    if case.parallel == "dp":
        from bench.training.parallel import replicate

        replicate(training, case.world_size)
    elif group is not None and case.parallel == "ddp":
        from bench.training.parallel import Exchange

        training.exchange = Exchange(training, case, group)
    synchronize(device)
    watch.lap("building_s")
    return workload, batches, training


def open_supply(
    case: Case, workload: Workload, device: torch.device, share: Share | None = None
) -> Supply:
    """The batches of training, made as ``case`` asks for, or this process's ``share`` of each.
    Raises UsageError: torch's DataLoader is to make them, and the workload has no dataset; or they
    are to be shared, and the workload makes batches of its own."""
    from bench.data.batches import Batches, Counted, MadeBatches
    from bench.data.loader import Loading

    about: dict[str, Any] = {
        "batch_size": whole_batch(case),
        # of torch's DataParallel, which divides it further
        "micro_batch": whole_batch(case) if case.parallel == "dp" else micro_batch(case),
        "device": device,
        "seed": case.seed,
    }
    share = share or Share()
    if case.loader == "device":
        batches = workload.open_batches(**about)
        if not isinstance(batches, Batches | MadeBatches):
            if share.of > 1:
                raise UsageError(
                    "the workload's open_batches makes batches of its own, which cannot be shared "
                    "by processes; leave out --parallel, or give it make_batch or --loader torch"
                )
            return Counted(batches, about["micro_batch"])
        batches.share = share
        return batches
    loading = Loading(**{name: getattr(case, name) for name in FOLLOWS["loader"]})
    loaded = workload.open_loader(**about, loading=loading)
    loaded.share = share
    return loaded


def _end_workers(batches: Supply) -> None:
    from bench.data.loader import LoadedBatches

    if isinstance(batches, LoadedBatches):
        batches.close()


def _read_first_batch(batches: Supply) -> float | None:
    from bench.data.loader import LoadedBatches

    return batches.first_batch_s if isinstance(batches, LoadedBatches) else None


def _describe_loader(found: Findings, batches: Supply, case: Case, device: torch.device) -> None:
    """Note what the loader supplies while nothing is trained; the device's is not one apart."""
    from bench.data.loader import LoadedBatches, measure_rate
    from bench.training.timing import synchronize

    if not isinstance(batches, LoadedBatches):
        return
    rate = measure_rate(batches, case.workers, lambda: synchronize(device))
    found.measurement.loader_samples_per_s = rate
    if rate is None:
        reason = "an epoch has no batch after the first of each worker; lower --workers"
        found.missing["loader_samples_per_s"] = reason


def count_steps(case: Case, batches: Supply) -> int:
    steps = math.ceil(case.fraction * len(batches))
    return steps if case.steps is None else min(steps, case.steps)


def _measured_shapes(case: Case, batches: Supply) -> list[int]:
    """The batch sizes that ``case`` trains on: the last, smaller one in a whole epoch. And with
    ``--steps``, whose few steps are to tell whether an epoch would fit."""
    rest = batches.samples % whole_batch(case)
    whole = count_steps(case, batches) == len(batches)  # with --until too, as far as is known
    smaller = [rest] if rest and (whole or case.steps is not None) else []
    return [whole_batch(case), *smaller]


_UNTIL_STEPS = 40  # as many as most cases of an H100 need to be known within 1 %
_SMALLER_STEPS = 3  # of a shape that one step in an epoch has: one to tune, one more, one as it is


def warm_up_shapes(
    training: Training,
    batches: Supply,
    case: Case,
    on_step: Callable[[int, torch.Tensor], None],
    clock: Callable[[], float] | None = None,
) -> Warmup:
    """Warm each batch shape that is measured, with its micro-batches; say what it took.

    The smaller last batch stands in a whole epoch alone, for one step: three steps tune, compile
    and allocate for it. Where a ``--fraction`` is measured it is not run at all;
    `bench.training.timing.extrapolate` says what that may cost. With ``--steps`` it runs here, as
    often as full batches are measured, and is not measured. ``clock`` is as
    `bench.training.timing.warm_up` takes it.
    """
    from bench.training.timing import Warmup, synchronize, warm_up

    full = batches.samples // whole_batch(case)

    def supply(size: int) -> Iterator[Divided]:
        return chain.from_iterable(batches.divide(i, steps=full, size=size) for i in count(1))

    stream = enumerate(supply(whole_batch(case)))  # making batches is warmed up too

    def step() -> None:
        if case.cuda_graphs and training.captured is None:
            training.capture(next(stream)[1])
        index, batch = next(stream)
        on_step(index, training.step(batch)[0])

    measured = count_steps(case, batches)
    if case.until is not None:  # which measures on while steps drift
        measured = min(measured, _UNTIL_STEPS)
    warm = warm_up(step, training.device, measured, clock)
    smaller_steps = min(_SMALLER_STEPS, case.steps or _SMALLER_STEPS)
    for size in _measured_shapes(case, batches)[1:]:
        smaller = islice(supply(size), smaller_steps)
        batch = next(smaller, None)  # the epoch's order is drawn here
        moments = [time.perf_counter()]
        while batch is not None:
            training.step(batch)
            synchronize(training.device)
            moments.append(time.perf_counter())
            batch = next(smaller, None)
        warm = Warmup(
            warm.steps + smaller_steps,
            warm.time_s + moments[-1] - moments[0],
            warm.first_s + moments[1] - moments[0],
            warm.steady,
        )
    return warm


def start_over(training: Training, batches: Supply, case: Case, rank: int = 0) -> None:
    """Undo what warm-up did to weights, optimizer, random numbers, which differ by ``rank``, and
    memory statistics. Workers of a DataLoader end."""
    import torch

    from bench.training.building import seed_all
    from bench.training.timing import synchronize

    if training.device.type == "cuda":
        # autotuning's workspaces would stand in the epoch's peak, and an allocator just emptied
        # would grow anew inside the epoch: so empty it, then grow it by a step of each shape
        gc.collect()
        torch.cuda.empty_cache()
        for size in _measured_shapes(case, batches):
            training.step(next(batches.divide(1, steps=1, size=size)))
    _end_workers(batches)  # those of the warm-up; the epoch starts its own, as a script does
    training.reset()
    seed_all(case.seed + rank)
    synchronize(training.device)
    if training.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(training.device)


def _reset_peaks(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _read_memory(device: torch.device, when: str, found: Findings) -> None:
    """Note the allocator's peaks since they were last reset: of several epochs the highest."""
    import torch

    m = found.measurement
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        for kind in ("allocated", "reserved"):
            before = getattr(m, f"{when}_{kind}_bytes") or 0
            peak = max(before, stats[f"{kind}_bytes.all.peak"])
            setattr(m, f"{when}_{kind}_bytes", peak)
    else:
        names = (
            *(f"{when}_{kind}_bytes" for kind in ("allocated", "reserved")),
            *("warmup_alloc_retries", *_TROUBLES),
        )
        found.missing |= dict.fromkeys(names, "torch does not report CPU memory")


def _describe_context(limit: Limit, found: Findings) -> None:
    found.measurement.context_bytes = limit.context_bytes
    if limit.note:
        _note(found, limit.note)
    if limit.context_bytes is None:
        found.missing["context_bytes"] = "the case ran on a CPU"


_TROUBLES = {"alloc_retries": "num_alloc_retries", "alloc_ooms": "num_ooms"}

_SPANNING = ("peak_allocated_bytes", "peak_reserved_bytes", *_TROUBLES)
"""Columns that are noted epoch by epoch, those of earlier processes included."""

_NOTED = (*_SPANNING, "loader_first_batch_s")
"""Columns that a process which resumes has from the earlier ones."""


def _count_allocator_troubles(device: torch.device) -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: stats[key] for name, key in _TROUBLES.items() if key in stats}


def _add_allocator_troubles(before: dict[str, int], device: torch.device, found: Findings) -> None:
    m = found.measurement
    for name, now in _count_allocator_troubles(device).items():
        setattr(m, name, (getattr(m, name) or 0) + now - before[name])


def _note(found: Findings, text: str) -> None:
    m = found.measurement
    m.notes = f"{m.notes}; {text}" if m.notes else text


class OtherWork:
    """How much of the cores that this process may use others use while it works."""

    def __init__(self, busy: float = 0.0, own: float = 0.0, wall: float = 0.0) -> None:
        """Go on from `sums`, in s of cores and of the clock."""
        self._busy, self._own, self._wall = busy, own, wall
        self.on = usable_cpus()

    @classmethod
    def add(cls, ranks: Sequence[OtherWork]) -> OtherWork:
        """That of processes that work side by side: none of them is another to the first. Cores
        that several of them share count once."""
        busy = {tuple(one.on): one.sums[0] for one in ranks}
        return cls(sum(busy.values()), sum(one.sums[1] for one in ranks), ranks[0].sums[2])

    @property
    def sums(self) -> tuple[float, float, float]:
        return self._busy, self._own, self._wall

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count what happens within; may be entered again."""
        start = self._read()
        yield
        busy, own, wall = (b - a for a, b in zip(start, self._read(), strict=True))
        self._busy, self._own, self._wall = self._busy + busy, self._own + own, self._wall + wall

    def cores(self) -> float:
        """Cores that others, the hypervisor's other guests among them, have used on average."""
        return max(0.0, self._busy - self._own) / self._wall if self._wall else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float]:
        import psutil

        # the processes that this one starts, such as a DataLoader's workers, are not others
        cpus, own, busy = psutil.cpu_times(percpu=True), read_cpu_time(), 0.0
        for index in usable_cpus():  # what runs on another lane's cores takes nothing from these
            if index < len(cpus):
                times = cpus[index]
                busy += sum(times) - times.idle - getattr(times, "iowait", 0.0)
                # the kernel counts a guest's time twice, and steal is time this machine was not
                # given
                busy -= getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return busy, own, time.monotonic()


def evaluate(training: Training, workload: Workload, case: Case) -> Tested:
    """Measure loss and accuracy on the test data, and how long that takes. Raises UsageError: there
    is none.

    Training goes on as if nothing had been evaluated: weights and BatchNorm's statistics stay, and
    what a model draws at random meanwhile is put back.
    """
    import torch

    from bench.training.timing import synchronize

    # made anew each time: kept, they would stand in the next epoch's memory
    batches = workload.open_tests(batch_size=micro_batch(case), device=training.device)
    cards = [training.device] if training.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cards):
            # evaluation mode is new to cuDNN and the compiler: a batch of each shape first, untimed
            size = min(batches.batch_size, batches.samples)
            rest = batches.samples % size or size
            training.evaluate(next(batches.evaluation(n)) for n in (size, rest))
            synchronize(training.device)
            start = time.perf_counter()
            loss, accuracy = training.evaluate(batches.evaluation())
            return Tested(loss, accuracy, time.perf_counter() - start)
    finally:
        training.resume()  # also where it failed half way: the next epoch trains


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
