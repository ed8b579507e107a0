"""Measure a case: set up, warm up, train the warm epochs, evaluate, check the precision."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.base.errors import UsageError
from bench.base.inject import Seen, watch
from bench.base.plain import read_value
from bench.base.processes import OtherWork, pause_collection, read_peak_memory
from bench.base.text import count
from bench.networks.data.batches import Supply, count_items
from bench.networks.data.loader import LoadedBatches, measure_rate
from bench.networks.models import MODELS, split_model
from bench.networks.weights import hash_weights
from bench.profile.step import PROFILED
from bench.profile.timeline import Timeline
from bench.schema.case import Case, count_probed, micro_batch
from bench.schema.optimization import COMPILING
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
    read_work,
)
from bench.training.labels import Judgement, Standing, judge_label
from bench.training.loop import Exchange, Training
from bench.training.memory import PARTS_BYTES, measure_parts, watch_gradients
from bench.training.operations import Compilations, count_compilations, read_compiled, read_flags
from bench.training.optimizers import learning_rates
from bench.training.parallel import GroupExchange, Processes, ProcessGroup, measure_exchange
from bench.training.profiling import profile_step
from bench.training.proof import LayerSetting, prove
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
    run = _Run(given, channel)
    run.warm_up()
    own = run.train()
    run.describe(own)
    if given.rendezvous:
        run.describe_group(own, given.rendezvous)
    if not run.group.rank:
        run.look_closer()
    channel.send(run.found)
    return run.found


class _Run:
    """A case in this process: what it trains, with which others, and what was ``found``."""

    def __init__(self, given: Job, channel: Channel) -> None:
        self.given, self.case, self.channel = given, given.case, channel
        self.found, self.group, compiled = Outcome(), ProcessGroup(), count_compilations()
        imported, lines = set(sys.modules), watch() if self.case.model not in MODELS else []
        with pause_collection():
            self.device = torch.device(self.case.device)
            self.gpus = [self.device]
            if self.case.parallel == "dp":
                self.gpus = [torch.device(self.case.device, i) for i in range(self.case.world_size)]
            self.limit = build_limit(self.case.memory_limit, self.case.device, given.gpu_uuid)
            self.limit.impose()
            synchronize(self.device)  # creates the context
            if meets := given.rendezvous:
                place = (meets.rank, meets.size, meets.store)
                self.group = Processes(*place, self.device, meets.timeout_s)
            self.batches, self.training = set_up(self.case, given.folder, self.group)
        self.found.measurement.setup_time_s = time.monotonic() - given.asked_at
        self._switches, self._compiled = read_switches(), compiled
        seen = self.found.seen = _see_files(given, self.training, imported, lines)
        edited = seen and list_edited(given.files, seen.files)
        self._known = KnownResults() if edited else given.known  # that of another version
        _describe_training(self.found, self.training)

    def warm_up(self) -> None:
        """Warm up, and start over."""
        found, m = self.found, self.found.measurement
        self.channel.enter("warmup")
        report = self.channel.reporter("warmup", 0, read_reserved(self.device))
        with watch_gradients(self.training.optimizer, self.training.parameters) as gradients:
            warm = warm_up_shapes(self.training, self.batches, report, self.group.now)
        self._count_compilations(self._compiled)
        with found.leave_out_on_error(*PARTS_BYTES):
            parts = measure_parts([self.training.optimizer], [self.training.model])
            vars(m).update(parts | {"gradients_bytes": gradients[0] if gradients else None})
        m.warmup_steps, m.warmup_time_s, m.warmup_steady = warm.steps, warm.time_s, warm.steady
        m.first_steps_time_s = warm.first_s
        _read_peaks(found, self.device, "warmup")
        self.limit.adjust()
        m.context_bytes = self.limit.context_bytes
        if self.limit.note:
            found.note(self.limit.note)
        if self.limit.context_bytes is None:
            found.leave_out("the case ran on a CPU", "context_bytes")
        start_over(self.training, self.batches, self.group.rank)
        m.warmup_alloc_retries = _count_retries(self.device)

    def train(self) -> list[TimedEpoch]:
        """Train and evaluate the epochs that no checkpoint has, and return all."""
        case, found, m = self.case, self.found, self.found.measurement
        rates = learning_rates(case, case.epochs * len(self.batches))
        files = Checkpoints(
            case, self.given.checkpoints, self.given.identity, found.fail_checkpoint
        )
        done, others = _resume(found, files, self.training)
        if isinstance(self.training.exchange, GroupExchange):
            self.training.exchange.watch()
        for index in range(len(done), case.epochs):
            done.append(self._train_epoch(index, rates, others))
            rows = list_epochs(case, done)
            if files.kept:
                progress = {
                    "epochs": [asdict(one) for one in done],
                    "others": others.sums,
                    "noted": {name: getattr(m, name) for name in _NOTED},
                }
                files.save(self.training, rows, progress)
            asks = self.given.judged and len(done) < case.epochs
            if asks and self.channel.ask(EpochEnded(rows[-1])) == END:
                m.truncated_after = len(done)
                break
        if self.device.type == "cpu":
            m.other_cores = OtherWork.add(self.group.gather(others)).cores()
        end_workers(self.batches)
        self.limit.lift()
        return done

    def _train_epoch(self, index: int, rates: list[float], others: OtherWork) -> TimedEpoch:
        m = self.found.measurement
        if accelerator := find_accelerator(self.device):
            for gpu in self.gpus:  # left by the previous evaluation
                accelerator.reset_peak_memory_stats(gpu)
        before, compiled = _count_retries(self.device), count_compilations()
        self.channel.enter("epoch", index)
        self.group.wait()
        with others.watch():
            fetch = train(self.training, self.batches, index, rates, self.channel, self.group)
        if not index:  # only torch's DataLoader has it
            m.loader_first_batch_s = getattr(self.batches, "first_batch_s", None)
        end_workers(self.batches)  # after a partial epoch; a whole one has ended its own
        self.channel.enter("evaluation", index)
        _read_peaks(self.found, self.device, "peak")
        if self.case.parallel == "dp":
            self._read_replicas()
        if before is not None:
            m.alloc_retries = (m.alloc_retries or 0) + (_count_retries(self.device) or 0) - before
        self._count_compilations(compiled, measured=True)
        epoch = fetch()
        # a failure after an epoch must not lose the epoch; of sharded weights all evaluate
        if self.case.evaluate and (not self.group.rank or self.training.sharded):
            with self.found.leave_out_on_error(*TESTED):
                epoch.tested = evaluate(self.training)
        return epoch

    def _count_compilations(self, before: Compilations, measured: bool = False) -> None:
        """Add what was compiled since ``before``, in the warm-up or in ``measured`` steps, by
        whoever called torch.compile: the case, its optimizer, or the user's code."""
        m, now = self.found.measurement, count_compilations()
        if self.case.compiled or (now - self._compiled).graphs:
            graphs = (now - before).graphs if measured else 0
            m.recompilations = (m.recompilations or 0) + (now - before).again
            m.epoch_recompilations = (m.epoch_recompilations or 0) + graphs
            m.uncompiled = (now - self._compiled).uncompiled

    def describe(self, own: Sequence[TimedEpoch]) -> None:
        """Fill in what the epochs of all processes show."""
        case, found, m = self.case, self.found, self.found.measurement
        if case.cuda_graphs or case.own_graphs:
            m.peak_allocated_bytes = None
            found.leave_out("torch does not count what a graph holds", "peak_allocated_bytes")
        done = join_epochs(self.group.gather(own))
        describe_time(found, self.training, done, self.batches)
        describe_learning(found, self.training, done)
        found.status, found.reason = conclude(m)
        found.steps = [*list_steps(case, done)]
        found.epochs = list_epochs(case, done) if case.epochs > 1 else []
        with found.leave_out_on_error("loader_samples_per_s"):
            _describe_loader(found, self.batches, self.training)
        m.switched_within = write_switches(find_changes(self._switches))
        if case.compile == Case.compile and case.optimizer not in COMPILING:
            m.compiled_within = read_compiled().get("unique_graphs")
        m.flags = " ".join(f"{name}={value}" for name, value in read_flags().items())

    def describe_group(self, own: Sequence[TimedEpoch], rendezvous: Rendezvous) -> None:
        """Fill in what each of several processes did, and what their exchange costs."""
        m, exchange, group = self.found.measurement, self.training.exchange, self.group
        assert isinstance(exchange, GroupExchange)
        m.comm_backend, m.wire_bytes = group.backend, exchange.wire_bytes
        m.buckets, m.gathered_bytes = exchange.buckets, exchange.gathered_bytes
        assert m.epoch_time_s
        assert m.measured_time_s
        times = [one.time_s for one in own]
        work = [] if self.case.sync_bn else exchange.read_work()
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
        self.found.ranks = group.gather(row)
        rates = group.gather(m.loader_samples_per_s)
        m.loader_samples_per_s = sum(filter(None, rates)) if all(rates) else None
        if not group.rank:
            follows = [*_EXCHANGED, *PROVEN, "flop_per_image", "step_bytes"]
            self.channel.send(replace(self.found, follows=follows))
        self._describe_exchange(exchange)

    def _describe_exchange(self, exchange: GroupExchange) -> None:
        """Measure the time that exchanging gradients adds to a step; then this process goes on
        alone. Raises Exception: it failed in this process, or in another one as noticed here."""
        m = self.found.measurement
        assert m.step_time_median_s
        if self.case.sync_bn:
            self.found.leave_out(_SYNC_BN, *_EXCHANGED)
        else:
            # errors are not caught: a process that went on after a failure would leave the others
            # waiting in NCCL. So it ends, and its parent keeps the measurement and ends them all
            exposed = measure_exchange(
                self.training, self.batches, self.group, m.step_time_median_s
            )
            m.sync_step_s, m.no_sync_step_s = exposed.sync_step_s, exposed.no_sync_step_s
            m.exposed_error_s = exposed.error_s
        end_workers(self.batches)
        exchange.end()
        self.training.exchange = Exchange()
        self.group.leave()

    def _read_replicas(self) -> None:
        """Record the peak of each GPU of torch's DataParallel since the last reset; over several
        epochs, the highest."""
        accelerator = find_accelerator(self.device)
        uuids = self.given.lane.gpus or [self.given.gpu_uuid] * len(self.gpus)
        if not self.found.ranks:
            self.found.ranks = [RankRow(i, uuid, None, None) for i, uuid in enumerate(uuids)]
        for row, gpu in zip(self.found.ranks, self.gpus, strict=True):
            peak = accelerator.max_memory_reserved(gpu)
            row.peak_reserved_bytes = max(row.peak_reserved_bytes or 0, peak)

    def _go_on_alone(self) -> None:
        """Replace the network by one that is whole, on one GPU, to be examined there."""
        case = replace(self.case, parallel=Case.parallel, world_size=Case.world_size)
        del self.batches, self.training
        gc.collect()  # fully_shard's hooks refer to each other
        if accelerator := find_accelerator(self.device):
            accelerator.empty_cache()
        self.batches, self.training = set_up(case, self.given.folder)

    def look_closer(self) -> None:
        """Find which arithmetic ran, count a step's FLOP and bytes, and profile steps if asked. Of
        a network that is sharded or copied over GPUs, one that is whole is looked at."""
        if self.training.sharded or self.case.parallel == "dp":
            with self.found.leave_out_on_error(*PROVEN, "flop_per_image", "step_bytes"):
                self._go_on_alone()
                self._look_closer()
                if self.case.parallel == "fsdp":
                    self.found.measurement.step_bytes, self.found.work = None, []
                    self.found.leave_out(_SHARES, "step_bytes")
        else:
            self._look_closer()

    def _look_closer(self) -> None:
        found, m, known = self.found, self.found.measurement, self._known
        sources = dict[str, str]()  # records from which a part is taken
        if "proof" in known.sources and known.values["flags"] == m.flags:
            sources["proof"] = known.sources["proof"]
            for name in (*PROVEN, "proof_notes"):
                setattr(m, name, known.values[name])
            found.missing |= known.missing
        else:
            self.channel.send(WorkBegun("checking the arithmetic"))
            with found.leave_out_on_error(*PROVEN):
                _prove(found, self.training, self.batches)
        with found.leave_out_on_error("flop_per_image"):
            if "flop" in known.sources:
                sources["flop"] = known.sources["flop"]
                m.flop_per_image = known.values["flop_per_image"]
            else:
                m.flop_per_image = count_flop(self.training.workload, self.case.freeze)
            if conversion := self.training.conversion:
                m.fp8_flop_share = conversion.flop_per_unit / m.flop_per_image
        if self.case.recompute != Case.recompute:
            with found.leave_out_on_error("recomputed_flop_per_image"):
                self._count_again()
        self._count_work(sources)
        m.shared = write_missing(sources) or None
        if self.case.profile:
            self.channel.send(replace(found, follows=list(PROFILE_COLUMNS)))
            self.channel.send(WorkBegun("profiling"))
            with found.leave_out_on_error(*PROFILE_COLUMNS):
                self._profile()

    def _count_again(self) -> None:
        """Count the FLOP of the network that are computed a second time. Raises UsageError: how
        many is torch.compile's choice."""
        case, m = self.case, self.found.measurement
        if case.compiled:
            raise UsageError("torch.compile chooses what is computed again, and tells of no FLOP")
        if m.flop_per_image is not None:
            every = count_flop(self.training.workload, case.freeze, case.recompute)
            m.recomputed_flop_per_image = every - m.flop_per_image

    def _count_work(self, sources: dict[str, str]) -> None:
        """Count the work of a step, or take it from a record that is added to ``sources``, and hold
        its number formats against the label."""
        found, known, counted = self.found, self._known, dict[Label, Work]()
        self.channel.send(WorkBegun("counting a step's work"))
        # last: counting and profiling train on, and the profiler's own memory must not be measured
        with found.leave_out_on_error("step_bytes", "labelled_flop_share"):
            if "work" in known.sources:
                sources["work"] = known.sources["work"]
                counted = read_work(known.work)
            else:
                counted = count_step(self.training, self.batches)
            found.measurement.step_bytes = round(sum(work.bytes for work in counted.values()))
            hold_to_label(found, judge_label(counted, self.case))
        found.work = join_work(counted, {})

    def _profile(self) -> None:
        step_s = self.found.measurement.step_time_median_s
        assert step_s
        try:
            line = profile_step(self.training, self.batches, step_s, self.given.trace)
        finally:
            end_workers(self.batches)
        describe_profile(self.found, line)


PROFILE_COLUMNS = ("profiled_steps", *PROFILED)


def describe_profile(found: Outcome, line: Timeline) -> None:
    """Fill in what a profile shows, beside the work that was counted."""
    m = found.measurement
    m.profiled_steps, m.profiled_step_s = line.steps, line.step_s
    m.busy_s, m.input_wait_s, m.sync_wait_s = line.busy_s, line.input_wait_s, line.sync_wait_s
    found.work = join_work(read_work(found.work), line.work)


_EXCHANGED = ("sync_step_s", "no_sync_step_s", "exposed_error_s")

_SHARES = "each process steps its share of the weights, and only a whole step can be counted"

_SYNC_BN = "with --sync-bn the processes wait for each other in the forward pass too"


def _see_files(
    given: Job, training: Training, imported: set[str], lines: Sequence[str]
) -> Seen | None:
    """Tell what a user's network and its start are, as this process read them, which had other
    modules ``imported``; None for a network of the harness without a start."""
    case, columns = given.case, dict[str, Any]()
    if case.start is not None:
        columns["start_fingerprint"] = hash_weights(case.start)
    if training.identity is None:
        return Seen(found=columns) if columns else None
    places = (given.folder, case.start, given.checkpoints, given.trace)
    but = [Path(place) for place in places if place]
    seen = judge_process(lines, imported, split_model(case.model)[0], but)
    columns["model_parameters"], columns["model_structure"] = training.identity
    return replace(seen, found=columns)


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


def _describe_training(found: Outcome, training: Training) -> None:
    m, conversion = found.measurement, training.conversion
    m.apex, m.switched = training.apex, write_switches(training.switched)
    notes = [training.start_note, training.sharded, training.recomputes]
    notes += conversion.notes if conversion else ()
    if conversion:
        m.fp8_layers = str(conversion)
    if training.brings_optimizer:
        notes.append(f"the workload's own optimizer is {type(training.optimizer).__name__}")
    for note in filter(None, notes):
        found.note(note)


# ---------------------------------------------------------------- epochs of an interrupted process


def _resume(
    found: Outcome, files: Checkpoints, training: Training
) -> tuple[list[TimedEpoch], OtherWork]:
    """Resume from this run's last checkpoint, if any; return its epochs and its `OtherWork`."""
    case, progress, m = training.case, files.resume(training), found.measurement
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
    "epoch_recompilations",
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


def _describe_loader(found: Outcome, batches: Supply, training: Training) -> None:
    """Record the DataLoader's throughput without training; other batches have no loader."""
    if not isinstance(batches, LoadedBatches):
        return
    device, workers = training.device, training.case.workers
    rate = measure_rate(batches, workers, lambda: synchronize(device))
    found.measurement.loader_samples_per_s = rate
    if rate is None:
        reason = "an epoch has no batch after the first of each worker; lower --workers"
        found.leave_out(reason, "loader_samples_per_s")


# ---------------------------------------------------------------- what ran, and where its time goes


def _prove(found: Outcome, training: Training, batches: Supply) -> None:
    case, m, precision = training.case, found.measurement, training.precision
    # on a GPU as many as in a step, for which cuDNN has already chosen its algorithms: for two it
    # would choose them again for every layer, or with cudnn_benchmark time them
    looked = 2 if training.device.type == "cpu" else micro_batch(case)
    batch = next(batches.evaluation(looked))
    setting = LayerSetting(
        precision,
        training.device,
        count_probed(case),
        training.memory_format,
        case.compile,
        case.any_shape,
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
