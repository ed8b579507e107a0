"""Measure a case: set up, warm up, train the warm epochs, evaluate, check the precision."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.base.inject import Seen, watch
from bench.base.plain import read_value
from bench.base.processes import OtherWork, pause_collection, read_peak_memory
from bench.base.text import count
from bench.networks.data.batches import Supply, count_items
from bench.networks.data.loader import LoadedBatches, measure_rate
from bench.networks.models import MODELS, split_model
from bench.networks.weights import hash_weights
from bench.networks.workloads import Workload
from bench.profile.step import PROFILED
from bench.schema.case import Case, count_probed, micro_batch
from bench.schema.precision import read_flags
from bench.schema.record import (
    PROVEN,
    KnownResults,
    Measurement,
    Outcome,
    RankRow,
    Status,
    write_missing,
)
from bench.schema.work import Label, Work
from bench.training.counting import (
    count_flop,
    count_step,
    join_work,
    read_compiled,
    read_work,
)
from bench.training.labels import Judgement, Standing, judge_label
from bench.training.loop import Exchange, Training
from bench.training.optimizers import learning_rates
from bench.training.parallel import GradientExchange, Group, Processes, measure_exchange
from bench.training.profiling import profile_step
from bench.training.proof import Setting, prove
from bench.training.sources import judge_process, list_edited
from bench.training.switches import find_changes, read_switches, write_switches
from bench.training.timing import find_accelerator, synchronize
from bench.workers.checkpoints import Checkpoints
from bench.workers.epochs import (
    TESTED,
    TimedEpoch,
    describe_learning,
    describe_time,
    evaluate,
    finite,
    join_epochs,
    list_epochs,
    list_steps,
    read_reserved,
    train,
)
from bench.workers.job import END, Channel, EpochEnded, Job, Rendezvous, WorkBegun
from bench.workers.limit import build_limit
from bench.workers.preparation import (
    end_workers,
    set_up,
    start_over,
    warm_up_shapes,
)


def measure(given: Job, channel: Channel) -> Outcome:
    """Measure a case from start to end: set up, warm up, train and evaluate each epoch.

    The result is sent to the parent at the end. It is also sent, incomplete, before other processes
    are needed once more and before the profiler starts, as a crash or hang there would lose it.

    Any error that ends the case is raised.
    """
    case, found = given.case, Outcome()
    m = found.measurement
    imported, lines = set(sys.modules), watch() if case.model not in MODELS else []
    with pause_collection():
        device, limit = torch.device(case.device), build_limit(case, given.gpu_uuid)
        limit.impose()
        synchronize(device)  # creates the context
        group = Group()
        if meets := given.rendezvous:
            group = Processes(meets.rank, meets.size, meets.store, device, meets.timeout_s)
        workload, batches, training = set_up(case, given.folder, group)
    m.setup_time_s, switches = time.monotonic() - given.asked_at, read_switches()
    found.seen = _see_files(given, training, imported, lines)
    if found.seen and list_edited(given.files, found.seen.files):
        given = replace(given, known=KnownResults())  # that of another version
    _describe_training(found, case, training)

    channel.enter("warmup")
    report = channel.reporter("warmup", 0, read_reserved(device))
    warm = warm_up_shapes(training, batches, case, report, group.now)
    m.warmup_steps, m.warmup_time_s, m.warmup_steady = warm.steps, warm.time_s, warm.steady
    m.first_steps_time_s = warm.first_s
    _read_peaks(found, device, "warmup")
    limit.adjust()
    m.context_bytes = limit.context_bytes
    if limit.note:
        found.note(limit.note)
    if limit.context_bytes is None:
        found.leave_out("the case ran on a CPU", "context_bytes")
    start_over(training, batches, case, group.rank)
    m.warmup_alloc_retries = _count_retries(device)

    rates = learning_rates(case, case.epochs * len(batches))
    files = Checkpoints(case, given.checkpoints, given.identity, found.fail_checkpoint)
    done, others = _resume(found, files, training, case)
    if isinstance(training.exchange, GradientExchange):
        training.exchange.watch()
    for index in range(len(done), case.epochs):
        if accelerator := find_accelerator(device):
            accelerator.reset_peak_memory_stats(device)  # left by the previous evaluation
        before = _count_retries(device)
        channel.enter("epoch", index)
        group.wait()
        with others.watch():
            fetch = train(training, batches, case, index, rates, channel)
        if not index:  # only torch's DataLoader has it
            m.loader_first_batch_s = getattr(batches, "first_batch_s", None)
        end_workers(batches)  # after a partial epoch; a whole one has ended its own
        channel.enter("evaluation", index)
        _read_peaks(found, device, "peak")
        if before is not None:
            m.alloc_retries = (m.alloc_retries or 0) + (_count_retries(device) or 0) - before
        done.append(fetch())
        # a failure after an epoch must not lose the epoch
        if case.evaluate and not group.rank:
            with found.leave_out_on_error(*TESTED):
                done[-1].tested = evaluate(training, workload, case)
        rows = list_epochs(case, done)
        if files.kept:
            files.save(training, rows, _pack(done, others, m))
        if given.judged and len(done) < case.epochs and channel.ask(EpochEnded(rows[-1])) == END:
            m.truncated_after = len(done)
            break
    if device.type == "cpu":
        m.other_cores = OtherWork.add(group.gather(others)).cores()
    end_workers(batches)
    limit.lift()
    if case.cuda_graphs or case.own_graphs:
        m.peak_allocated_bytes = None
        found.leave_out("torch does not count what a graph holds", "peak_allocated_bytes")
    own, done = done, join_epochs(group.gather(done))
    describe_time(found, case, done, batches, workload)
    describe_learning(found, case, done, training)
    found.status, found.reason = conclude(m)
    found.steps = [*list_steps(case, done)]
    found.epochs = list_epochs(case, done) if case.epochs > 1 else []
    with found.leave_out_on_error("loader_samples_per_s"):
        _describe_loader(found, batches, case, device)
    m.switched_within = write_switches(find_changes(switches))
    if case.compile == Case.compile:
        m.compiled_within = read_compiled().get("unique_graphs")
    m.flags = " ".join(f"{name}={value}" for name, value in read_flags().items())
    if meets:
        describe_group(found, case, training, own, group, meets)
        if not group.rank:
            follows = [*_EXCHANGED, *PROVEN, "flop_per_image", "step_bytes"]
            channel.send(replace(found, follows=follows))
        describe_exchange(found, training, batches, case, group)
    if not group.rank:
        _look_closer(found, given, channel, training, batches, workload)
    channel.send(found)
    return found


def _see_files(
    given: Job, training: Training, imported: set[str], lines: Sequence[str]
) -> Seen | None:
    """Tell what a user's network and its start are, as this process read them, which had other
    modules ``imported``; None for a network of the harness without a start."""
    case, told = given.case, dict[str, Any]()
    if case.start is not None:
        told["start_fingerprint"] = hash_weights(case.start)
    if training.identity is None:
        return Seen(found=told) if told else None
    places = (given.folder, case.start, given.checkpoints, given.trace)
    but = [Path(place) for place in places if place]
    seen = judge_process(lines, imported, split_model(case.model)[0], but)
    told["model_parameters"], told["model_structure"] = training.identity
    return replace(seen, found=told)


def conclude(m: Measurement, contradiction: str = "") -> tuple[Status, str]:
    """Return the status of a measured case and its reason; invalid takes precedence."""
    reasons = [contradiction] if contradiction else []
    if m.first_bad_step is not None:
        where = f"step {m.first_bad_step} of {m.measured_steps}"
        reasons.append(f"the loss was inf or NaN from {where}")
    status = Status.DIVERGED if reasons else Status.OK
    return (Status.INVALID if contradiction else status), "; ".join(reasons)


def hold_to_label(found: Outcome, judgement: Judgement) -> None:
    """Set the outcome of a measurement by whether it ran in the number format of its label."""
    m, measured = found.measurement, found.status in (Status.OK, Status.DIVERGED)
    m.labelled_flop_share = judgement.share
    if judgement.standing is Standing.UNPROVEN:
        found.leave_out(judgement.reason, "labelled_flop_share")
    elif judgement.standing is Standing.INVALID and measured:
        found.status, found.reason = conclude(m, judgement.reason)


def _describe_training(found: Outcome, case: Case, training: Training) -> None:
    m, conversion = found.measurement, training.conversion
    m.apex, m.switched = training.apex, write_switches(training.switched)
    notes = [training.start_note, *(conversion.notes if conversion else ())]
    if conversion:
        m.fp8_layers = str(conversion)
    if training.brings_optimizer:
        notes.append(f"the workload's own optimizer is {type(training.optimizer).__name__}")
    for note in filter(None, notes):
        found.note(note)


# ------------------------------------------------------------------------------- several processes


def describe_group(
    found: Outcome,
    case: Case,
    training: Training,
    own: Sequence[TimedEpoch],
    group: Group,
    rendezvous: Rendezvous,
) -> None:
    m, exchange = found.measurement, training.exchange
    assert isinstance(exchange, GradientExchange)
    m.comm_backend, m.wire_bytes, m.buckets = group.backend, exchange.wire_bytes, exchange.buckets
    assert m.epoch_time_s
    assert m.measured_time_s
    times, work = [one.time_s for one in own], [] if case.sync_bn else exchange.read_work()
    row = RankRow(
        group.rank,
        rendezvous.gpus[group.rank] if rendezvous.gpus else None,
        # for a partial epoch, extrapolated by the same factor as the slowest process's time
        sum(times) * m.epoch_time_s / m.measured_time_s,
        median(work) if work else None,
        sum(sum(one.epoch.images) for one in own),
        m.peak_reserved_bytes,
        None if rendezvous.gpus else read_peak_memory(),
    )
    found.ranks = group.gather(row)
    rates = group.gather(m.loader_samples_per_s)
    m.loader_samples_per_s = sum(filter(None, rates)) if all(rates) else None


def describe_exchange(
    found: Outcome, training: Training, batches: Supply, case: Case, group: Group
) -> None:
    """Measure the time that exchanging gradients adds to a step; then this process goes on alone.
    Raises Exception: it failed in this process, or in another one as noticed here."""
    m, exchange = found.measurement, training.exchange
    assert isinstance(exchange, GradientExchange)
    assert m.step_time_median_s
    if case.sync_bn:
        found.leave_out(_SYNC_BN, *_EXCHANGED)
    else:
        # errors are not caught: a process that went on after a failure would leave the others
        # waiting in NCCL. So it ends, and its parent keeps the measurement and ends them all
        exposed = measure_exchange(training, batches, case, group, m.step_time_median_s)
        m.sync_step_s, m.no_sync_step_s = exposed.sync_step_s, exposed.no_sync_step_s
        m.exposed_error_s = exposed.error_s
    end_workers(batches)
    exchange.end()
    training.exchange = Exchange()
    group.leave()


_EXCHANGED = ("sync_step_s", "no_sync_step_s", "exposed_error_s")

_SYNC_BN = "with --sync-bn the processes wait for each other in the forward pass too"


# ---------------------------------------------------------------- epochs of an interrupted process


def _pack(done: Sequence[TimedEpoch], others: OtherWork, m: Measurement) -> dict[str, Any]:
    return {
        "epochs": [asdict(one) for one in done],
        "others": others.sums,
        "noted": {name: getattr(m, name) for name in _NOTED},
    }


def _resume(
    found: Outcome, files: Checkpoints, training: Training, case: Case
) -> tuple[list[TimedEpoch], OtherWork]:
    """Resume from this run's last checkpoint, if any; return its epochs and its `OtherWork`."""
    progress, m = files.resume(training), found.measurement
    done: list[TimedEpoch] = read_value(list[TimedEpoch], progress["epochs"]) if progress else []
    m.resumed_epochs = len(done) if files.kept else None
    if progress is None:
        return [], OtherWork()
    for name, value in progress["noted"].items():
        setattr(m, name, value)
    found.note(
        f"{count(len(done), 'epoch')} of {case.epochs} trained by an earlier process that was "
        "interrupted; what is sampled (memory of process and device, clocks, temperature, others "
        "on the GPU) is of this process alone"
    )
    if len(done) == case.epochs:
        unknown = (name for name in _NOTED if getattr(m, name) is None)
        found.leave_out("an earlier process trained all epochs", *unknown)
    return done, OtherWork(*progress["others"])


# ------------------------------------------------------------------------------------------- memory


# columns that span all epochs, and that a resuming process takes over from earlier ones
_NOTED = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "alloc_retries",
    "loader_first_batch_s",
)


def _read_peaks(found: Outcome, device: torch.device, when: str) -> None:
    """Record the allocator's peaks since the last reset; over several epochs, the highest."""
    m, kinds = found.measurement, ("allocated", "reserved")
    accelerator = find_accelerator(device)
    if accelerator is None:
        names = (f"{when}_{kind}_bytes" for kind in kinds)
        retries = ("warmup_alloc_retries", "alloc_retries")
        found.leave_out("torch does not report CPU memory", *names, *retries)
        return
    stats = accelerator.memory_stats(device)
    for kind in kinds:
        name = f"{when}_{kind}_bytes"
        setattr(m, name, max(getattr(m, name) or 0, stats[f"{kind}_bytes.all.peak"]))


def _count_retries(device: torch.device) -> int | None:
    accelerator = find_accelerator(device)
    return accelerator.memory_stats(device).get("num_alloc_retries") if accelerator else None


def _describe_loader(found: Outcome, batches: Supply, case: Case, device: torch.device) -> None:
    """Record the DataLoader's throughput without training; other batches have no loader."""
    if not isinstance(batches, LoadedBatches):
        return
    rate = measure_rate(batches, case.workers, lambda: synchronize(device))
    found.measurement.loader_samples_per_s = rate
    if rate is None:
        reason = "an epoch has no batch after the first of each worker; lower --workers"
        found.leave_out(reason, "loader_samples_per_s")


# ---------------------------------------------------------------- what ran, and where its time goes


def _look_closer(
    found: Outcome,
    given: Job,
    channel: Channel,
    training: Training,
    batches: Supply,
    workload: Workload,
) -> None:
    """Find which arithmetic ran, count a step's FLOP and bytes, and profile steps if asked."""
    case, known, m, sources = given.case, given.known, found.measurement, dict[str, str]()
    if "proof" in known.sources and known.values["flags"] == m.flags:
        sources["proof"] = known.sources["proof"]
        for name in (*PROVEN, "proof_notes"):
            setattr(m, name, known.values[name])
        found.missing |= known.missing
    else:
        channel.send(WorkBegun("checking the arithmetic"))
        with found.leave_out_on_error(*PROVEN):
            _prove(found, training, batches, case)
    with found.leave_out_on_error("flop_per_image"):
        if "flop" in known.sources:
            sources["flop"] = known.sources["flop"]
            m.flop_per_image = known.values["flop_per_image"]
        else:
            m.flop_per_image = count_flop(workload, case.freeze)
        if training.conversion:
            m.fp8_flop_share = training.conversion.flop_per_unit / m.flop_per_image
    channel.send(WorkBegun("counting a step's work"))
    # last: counting and profiling train on, and the profiler's own memory must not be measured
    counted: Mapping[Label, Work] = {}
    with found.leave_out_on_error("step_bytes", "labelled_flop_share"):
        if "work" in known.sources:
            sources["work"] = known.sources["work"]
            counted = read_work(known.work)
        else:
            counted = count_step(training, batches, case)
        m.step_bytes = round(sum(work.bytes for work in counted.values()))
        hold_to_label(found, judge_label(counted, case))
    found.work = join_work(counted, {})
    m.shared = write_missing(sources) or None
    if case.profile:
        columns = ("profiled_steps", *PROFILED)
        channel.send(replace(found, follows=list(columns)))
        channel.send(WorkBegun("profiling"))
        with found.leave_out_on_error(*columns):
            _profile(found, training, batches, case, given.trace, counted)


def _prove(found: Outcome, training: Training, batches: Supply, case: Case) -> None:
    m, precision = found.measurement, training.precision
    # on a GPU as many as in a step, for which cuDNN has already chosen its algorithms: for two it
    # would choose them again for every layer, or with cudnn_benchmark time them
    looked = 2 if training.device.type == "cpu" else micro_batch(case)
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
    if any(isinstance(module, nn.RNNBase) for module in training.model.modules()):
        remarks.append("recurrent layers were not probed for their arithmetic")
    m.arithmetic = proof.arithmetic
    m.proof_layer = "; ".join(str(p.layer) for p in proof.layers)
    # the larger of the layers' errors is the one to look at
    m.conv_error = finite(max(p.forward.error for p in proof.layers))
    for kind in ("input_grad", "weight_grad"):
        probed = [one.error for p in proof.layers if (one := getattr(p, kind))]
        if probed:
            setattr(m, f"{kind}_error", finite(max(probed)))
        else:
            found.leave_out("what was probed, or all before it, is frozen", f"{kind}_error")
    m.matmul_error = finite(proof.matmul.error)
    contradiction = proof.contradicts(precision)
    found.status, found.reason = conclude(m, contradiction)
    if not contradiction:
        remarks += proof.remarks(precision)
    m.proof_notes = "; ".join(remarks) or None


def _profile(
    found: Outcome,
    training: Training,
    batches: Supply,
    case: Case,
    trace: Path | None,
    counted: Mapping[Label, Work],
) -> None:
    m = found.measurement
    assert m.step_time_median_s
    try:
        line = profile_step(training, batches, case, m.step_time_median_s, trace)
    finally:
        end_workers(batches)
    m.profiled_steps, m.profiled_step_s = line.steps, line.step_s
    m.busy_s, m.input_wait_s, m.sync_wait_s = line.busy_s, line.input_wait_s, line.sync_wait_s
    found.work = join_work(counted, line.work)
