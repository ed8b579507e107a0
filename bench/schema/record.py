"""A record is the result of a case: the outcome, what was measured, and the environment.

Every column of a records file is a field here, described once: type, unit, meaning.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Any

from bench.base.errors import UsageError
from bench.base.inject import Seen
from bench.base.text import Explained, count
from bench.schema.axis import Trait
from bench.schema.case import AXES, SYNTHETIC_AXES, Case, list_affecting
from bench.schema.work import WorkKind

SCHEMA = 11
"""The version of the tables. A new column needs no new one: a file without it is read as empty, or
with the axis's default. 11, of 2026-11, is without the columns and axes that nobody used."""

READER = "8645d459"
"""The commit that reads all versions before it."""


_GONE = """process_start_s imports_s device_context_s data_s building_s proof_s counting_s
teardown_s other_s links throttle_before throttle_after temperature_first_c temperature_last_c
neighbours_drawing neighbours_late step_time_max_index alloc_ooms
slowest_rank energy_source peak_lr setup_process_bytes pcie torch_interop_threads"""
GONE = frozenset(_GONE.split())
"""Columns that older files of this version have, and that nothing reads."""


class Status(Explained):
    OK = "ok", "measured"
    OOM = "oom", "out of memory"
    OOM_SUSPECTED = (
        "oom_suspected",
        "a CUDA library failed while memory was nearly full, or the worker crashed under a limit "
        "on a CPU",
    )
    DIVERGED = "diverged", "the loss became inf or NaN; speed and memory are still measured"
    UNSUPPORTED = "unsupported", "this device or build cannot run the case"
    INVALID = "invalid", "measured, but not reliable: throttled, shared or mislabelled"
    TIMEOUT = "timeout", "a phase took longer than --timeout"
    KILLED = "killed", "the worker was killed from outside"
    LOST = "lost", "the machine, or the process on it that ran the worker, went away"
    INTERRUPTED = "interrupted", "the sweep was stopped during the case"
    ERROR = "error", "the worker failed"


MEASURED = frozenset({Status.OK, Status.DIVERGED, Status.INVALID})
"""Outcomes that carry an epoch time."""

REFUSED = frozenset({Status.OOM, Status.OOM_SUSPECTED})
"""Outcomes of a case that did not get the memory that it asked for."""

REPEATED = frozenset({Status.INTERRUPTED, Status.LOST})
"""Outcomes of runs that the same command repeats without being asked to."""

RELIABLE = frozenset({Status.OK, Status.DIVERGED})
"""Outcomes whose time and memory can be compared: those in `MEASURED` that nothing disturbed.

A loss that became inf or NaN takes as much time and memory as any other, but cannot be compared.
"""


def column(help: str, default: Any = MISSING, **metadata: Any) -> Any:
    """Describe one column by its meaning. Its name gives the unit, its annotation the type and
    whether it may be empty."""
    return field(default=default, metadata={"help": help, **metadata})


def quantity(help: str, **metadata: Any) -> Any:
    """Describe a column that is empty by default."""
    return column(help, None, **metadata)


@dataclass
class Measurement:
    """Raw readings of one case, in SI units. None where there is no value.

    The phases: set-up (process start to first step), warm-up (discarded steps), epoch (the warm
    epoch, between two device synchronisations), evaluation. Only the epoch is in `epoch_time_s`. If
    a case trains several epochs, each is followed by its evaluation, and "epoch" below means all of
    them together without the evaluations between; `EpochRow` has each separately.
    """

    # fmt: off
    setup_time_s: float | None = quantity("process start to the first step")
    warmup_time_s: float | None = quantity("warm-up steps of each batch shape that is measured")
    first_steps_time_s: float | None = quantity(
        "first warm-up step of each batch shape: autotuning, compilation, allocation")
    warmup_steps: int | None = quantity("steps of the warm-up")
    warmup_steady: bool | None = quantity("step times were steady when warm-up ended")
    epoch_time_s: float | None = quantity(
        "one warm epoch, the mean of several; extrapolated where fewer steps were measured")
    epoch_time_low_s: float | None = quantity(
        "lower end of the 95 % interval of an extrapolated epoch, within this run; with --until, "
        "also if its steps drift, and as wide as it asked")
    epoch_time_high_s: float | None = quantity("upper end of that interval")
    epoch_time_error: float | None = quantity(
        "how far that interval reaches from epoch_time_s, as a share of it")
    measured_time_s: float | None = quantity("wall time of the measured steps, of all epochs")
    measured_steps: int | None = quantity("steps measured, of all epochs")
    measured_images: int | None = quantity("images in the measured steps")
    steps_per_epoch: int | None = quantity("steps of a whole epoch")
    step_items: int | None = quantity(
        "items that more than half of the measured steps of a command had; empty if they vary")
    images_per_s: float | None = quantity("images of an epoch over epoch_time_s")
    step_time_median_s: float | None = quantity("median step")
    step_time_p95_s: float | None = quantity("95th percentile of steps")
    step_time_mad_s: float | None = quantity("median absolute deviation of steps")
    step_time_max_s: float | None = quantity("slowest step")
    step_time_first_s: float | None = quantity(
        "median of the full steps' first quarter, after the first tenth of them")
    step_time_last_s: float | None = quantity("median of the last quarter")
    eval_time_s: float | None = quantity("last evaluation on the test images")
    truncated_after: int | None = quantity(
        "epochs after which a search ended the case, whose axis has more; empty for a whole one")
    loader_first_batch_s: float | None = quantity(
        "start of the first epoch to its first batch, the start of --workers included")
    loader_samples_per_s: float | None = quantity(
        "items that --loader torch supplies without training, its start left out")

    warmup_allocated_bytes: int | None = quantity("peak of tensors, warm-up")
    warmup_reserved_bytes: int | None = quantity("peak of torch's allocator, warm-up")
    warmup_process_bytes: int | None = quantity("peak of the process, warm-up (NVML)")
    warmup_device_bytes: int | None = quantity(
        "peak of the device over its baseline, warm-up (NVML)")
    peak_allocated_bytes: int | None = quantity("peak of tensors, epoch")
    peak_reserved_bytes: int | None = quantity("peak of torch's allocator, epoch")
    peak_process_bytes: int | None = quantity(
        "peak of the process, epoch (NVML; on a CPU what it holds, without files)")
    peak_device_bytes: int | None = quantity("peak of the device over its baseline, epoch (NVML)")
    baseline_device_bytes: int | None = quantity(
        "device memory in use before the worker started (NVML, raw)")
    weights_bytes: int | None = quantity(
        "parameters and buffers of the network, of a command those of all its networks")
    gradients_bytes: int | None = quantity("gradients when the optimizer takes a step")
    optimizer_bytes: int | None = quantity(
        "state of the optimizer, and the weights that it alone has, such as masters in fp32")
    context_bytes: int | None = quantity(
        "memory of the process outside torch's allocator, which a memory limit on a GPU counts in")
    warmup_alloc_retries: int | None = quantity(
        "allocations retried after freeing the cache, before the epoch")
    alloc_retries: int | None = quantity("allocations retried after freeing the cache")

    train_loss: float | None = quantity(
        "mean cross-entropy over the measured steps, of the last epoch")
    train_accuracy: float | None = quantity(
        "accuracy over the measured steps, of the last epoch, as a fraction")
    test_loss: float | None = quantity(
        "mean cross-entropy over the test images, after the last epoch")
    test_accuracy: float | None = quantity(
        "accuracy on the test images, after the last epoch, as a fraction")
    first_bad_step: int | None = quantity(
        "first step whose loss was inf or NaN, from 0, counted over all epochs")
    overflow_steps: int | None = quantity("steps with inf or NaN in the scaled gradients")
    final_loss_scale: float | None = quantity("loss scale after the last step")
    clipped_steps: int | None = quantity(
        "steps without overflow whose gradients were scaled down to --clip-grad")
    grad_norm_median: float | None = quantity(
        "median norm of the unscaled gradients of a step, before they were clipped")

    resumed_epochs: int | None = quantity(
        "epochs that an earlier process, which was interrupted, had trained: they are in the row")

    gpus: int | None = quantity(
        "GPUs that a command trained on, as its processes were seen on or told of them")
    energy_j: float | None = quantity("energy of the measured steps")
    mean_power_w: float | None = quantity("energy over measured time")
    power_limit_w: float | None = quantity("enforced power limit, of all its GPUs together")
    sm_clock_mhz: float | None = quantity("median SM clock during the epoch")
    sm_clock_first_mhz: float | None = quantity(
        "median SM clock in the first quarter of the epoch")
    sm_clock_last_mhz: float | None = quantity("median SM clock in the last quarter")
    memory_clock_mhz: float | None = quantity("median memory clock")
    temperature_c: float | None = quantity("highest temperature during the epoch")
    throttle_during: str | None = quantity("throttle reasons seen during the epoch")
    neighbours: str | None = quantity(
        "other processes that computed on the card until the epoch ended: pid and bytes")
    neighbours_computing: int | None = quantity("how many these are")
    other_cores: float | None = quantity(
        "CPU cores that other processes used on average in an epoch on a CPU, without those that "
        "a quota leaves them")

    apex: str | None = quantity("what of NVIDIA apex trained: its version and interface")
    fp8_layers: str | None = quantity(
        "the linear layers that ran in fp8: how many of how many, and which")
    fp8_flop_share: float | None = quantity(
        "share of the network's FLOP, forward and backward, that these layers are")
    flags: str | None = quantity("arithmetic and cuDNN flags as read back in the worker")
    switched: str | None = quantity(
        "torch's switches that the user's code had set where it was imported or built, before they "
        "were set back")
    switched_within: str | None = quantity(
        "torch's switches that were changed after that, within steps, and were not set back")
    compiled_within: int | None = quantity(
        "graphs that torch.compile made for the user's own code, where the case's compile is off")
    recompilations: int | None = quantity(
        "where torch.compile ran, for --compile, an optimizer or your code: how often code was "
        "compiled again in warm-up and epochs, as for another shape of a batch or a weight")
    epoch_recompilations: int | None = quantity(
        "graphs that were compiled in measured steps, whose time they are part of, the first of "
        "a function too")
    uncompiled: int | None = quantity(
        "functions that were compiled as often as torch allows, and left as written then")
    arithmetic: str | None = quantity(
        "what the numeric probe found inputs rounded to, the most expensive layer's first")
    proof_layer: str | None = quantity("the layers of the network that were probed")
    conv_error: float | None = quantity("relative error of a convolution against float64")
    input_grad_error: float | None = quantity("relative error of its input gradient")
    weight_grad_error: float | None = quantity("relative error of its weight gradient")
    matmul_error: float | None = quantity("relative error of a matmul against float64")
    labelled_flop_share: float | None = quantity(
        "share of the FLOP of a step that ran in the number format of the precision, as counted; "
        "the rest ran in another, which the network chose itself")
    flop_per_image: float | None = quantity(
        "forward and backward, a grouped convolution's weight gradient counted as grouped")
    recomputed_flop_per_image: float | None = quantity(
        "FLOP that the backward pass computes a second time, with --recompute blocks or full; "
        "flop_per_image is without them")
    step_bytes: int | None = quantity(
        "least memory traffic of a step: what each of its operations, not compiled, reads and "
        "writes")

    profiled_steps: int | None = quantity("steps under the profiler")
    profiled_step_s: float | None = quantity("a step under the profiler")
    busy_s: float | None = quantity(
        "time of a profiled step in which kernels ran, any of them; on a CPU, operators")
    input_wait_s: float | None = quantity(
        "time of a profiled step in which none ran, because a batch was missing")
    sync_wait_s: float | None = quantity(
        "time of a profiled step in which none ran, since the program had waited for the GPU")

    comm_backend: str | None = quantity(
        "what exchanges gradients between processes, and its version")
    wire_bytes: int | None = quantity(
        "gradients that each process hands over to be averaged, of a step")
    buckets: int | None = quantity("parts that the gradients are exchanged in")
    gathered_bytes: int | None = quantity(
        "weights that each process gathers in a step, with --parallel fsdp")
    sync_step_s: float | None = quantity(
        "median step of blocks after the epoch, gradients exchanged")
    no_sync_step_s: float | None = quantity(
        "median step of blocks after the epoch, nothing exchanged")
    exposed_error_s: float | None = quantity(
        "half of the 95 % interval of the difference of these two, in this run")

    carried: str | None = quantity(
        "files that a command read and an earlier run of the folder had written: 'out/last.pt; …'")
    wrote: str | None = quantity(
        "files that a command wrote, but in {out}, from the current folder: 'out/last.pt; …'")
    missing: str | None = quantity("why columns are empty: 'column: reason; …'")
    notes: str | None = quantity("what a reader should know before using the row")
    proof_notes: str | None = quantity(
        "what a reader should know of the arithmetic that was found")
    shared: str | None = quantity(
        "what was not found anew, but is that of an earlier row of the folder, and whose: 'proof: "
        "record_id; flop: …; work: …' (arithmetic and errors; FLOP per image; bytes and work of a "
        "step)")
    # fmt: on


PROVEN = (
    "arithmetic",
    "proof_layer",
    "conv_error",
    "input_grad_error",
    "weight_grad_error",
    "matmul_error",
)
"""Columns that the proof fills; ``missing`` says why where it cannot."""


@dataclass
class Environment:
    """The hardware, software and data that a case ran with.

    Rows can only be compared if they agree on the fields marked ``comparable``. The mark names what
    the field belongs to: rows of different models, say, may differ in the fields of the model.
    """

    # fmt: off
    gpu: str | None = quantity("GPU name; empty on a CPU", comparable="device")
    gpu_uuid: str | None = quantity("GPU UUID")
    gpu_memory_bytes: int | None = quantity("memory of the GPU")
    capability: str | None = quantity("CUDA compute capability")
    driver: str | None = quantity("driver of the GPU", comparable="device")
    cpu: str | None = quantity("CPU model and the cores this process may use", comparable="device")
    torch: str | None = quantity("torch version", comparable="torch")
    cuda: str | None = quantity("CUDA version torch was built for", comparable="torch")
    cudnn: str | None = quantity("cuDNN version", comparable="torch")
    python: str | None = quantity("Python version")
    os: str | None = quantity("operating system")
    host: str | None = quantity("host name")
    bench: str | None = quantity("version of this harness")
    commit: str | None = quantity("git commit of this harness, +dirty if edited")
    code: str | None = quantity("hash of the harness's own source", comparable="device")
    dataset_fingerprint: str | None = quantity("hash of pixels and labels", comparable="dataset")
    model_parameters: str | None = quantity(
        "hash of the model's parameter names, shapes and dtypes", comparable="model")
    model_structure: str | None = quantity(
        "hash of the printed module", comparable="model")
    model_source: str | None = quantity(
        "hash of the source files that build the model", comparable="model")
    start_fingerprint: str | None = quantity(
        "hash of the file of --start", comparable="start")
    variables: str | None = quantity(
        "environment variables that change results, those that are set", comparable="device")
    torch_threads: int | None = quantity("threads of one torch operation on a CPU")
    cpu_governor: str | None = quantity("frequency governor of the CPU")
    persistence_mode: str | None = quantity("NVIDIA persistence mode: on or off")
    ecc: str | None = quantity("error correction of GPU memory: on or off")
    mig: str | None = quantity("MIG mode of the GPU: on or off")
    dataset_source: str | None = quantity("layout the images came from")
    train_images: int | None = quantity("training images in the dataset, or units")
    test_images: int | None = quantity("test images in the dataset, or units")
    dataset_classes: int | None = quantity(
        "classes of the images; empty for a workload, whose loss may be any")
    rate_float32: float | None = quantity(
        "FLOP/s of a large matrix product in float32, measured before the case")
    rate_tfloat32: float | None = quantity("the same in TF32")
    rate_float16: float | None = quantity("the same in float16")
    rate_bfloat16: float | None = quantity("the same in bfloat16")
    rate_float8: float | None = quantity("the same in float8")
    rate_conv_float32: float | None = quantity(
        "the same of convolutions, forward and backward, in float32 on a CPU")
    rate_conv_float16: float | None = quantity("that of convolutions in float16 on a CPU")
    rate_conv_bfloat16: float | None = quantity(
        "that of convolutions in bfloat16 on a CPU")
    rate_copy: float | None = quantity(
        "bytes read and written by a large copy, a second, measured before the case")
    call_time_s: float | None = quantity(
        "the smallest operation, of many one after the other")
    rate_tries: str | None = quantity(
        "of how many tries each of these is the best, more where it was measured again; on a GPU "
        "with the SM clock during that try")
    rates_at: str | None = quantity("when these rates were measured, UTC")
    unit: str | None = quantity(
        "what a workload counts: 'images' in this table are these; empty for images")
    # fmt: on


@dataclass
class Step:
    """One row of a learning curve: a training step, or several that a log reported together."""

    step: int = column("from 0; continues across epochs")
    images: int = column("images since the row before")
    loss: float | None = column("mean cross-entropy; empty if not finite")
    correct: int | None = column("how many of them were predicted right")
    time_s: float | None = column("duration of the step")
    loss_scale: float | None = column("what the loss was multiplied by", None)
    lr: float | None = column("learning rate of the step", None)


@dataclass
class EpochRow:
    """One row of epochs.csv: an epoch of a case that trains several."""

    epoch: int = column("from 0")
    time_s: float = column("duration of the epoch")
    train_loss: float | None = column("mean cross-entropy; empty if not finite")
    train_accuracy: float | None = column("as a fraction")
    test_loss: float | None = column("mean cross-entropy, after the epoch", None)
    test_accuracy: float | None = column("as a fraction, after the epoch", None)
    eval_time_s: float | None = column("evaluation on the test images", None)
    overflow_steps: int | None = column("steps that overflowed", None)


@dataclass(frozen=True)
class KernelTime:
    name: str
    time_s: float


def write_kernels(kernels: Sequence[KernelTime], others: Sequence[KernelTime] = ()) -> str:
    """Format the kernels of a row of work.csv as its cell; ``others`` are not named.

    >>> write_kernels([KernelTime("bn_fw_tr_1C11_kernel_NCHW", 0.0115)], [KernelTime("fill", 2e-6)])
    '0.0115 bn_fw_tr_1C11_kernel_NCHW; 2e-06 1 other'
    """
    parts = [f"{k.time_s:.4g} {k.name.replace(';', ',')}" for k in kernels]
    if others:
        parts.append(f"{sum(k.time_s for k in others):.4g} {count(len(others), 'other')}")
    return "; ".join(parts)


def read_kernels(cell: str) -> tuple[KernelTime, ...]:
    """Parse the kernels that `write_kernels` named; the rest of the row's time is of others.

    >>> read_kernels("0.0115 void at::native::vectorized<4, float>(int); 2e-06 3 others")
    (KernelTime(name='void at::native::vectorized<4, float>(int)', time_s=0.0115),)
    """
    parts = [part.split(" ", 1) for part in cell.split("; ")] if cell else []
    # no identifier begins with a number
    named = (part for part in parts if not re.fullmatch(r"[\d,]+ others?", part[1]))
    return tuple(KernelTime(name, float(time_s)) for time_s, name in named)


@dataclass
class WorkRow:
    """One row of work.csv: the operations of a step that have the same `bench.schema.work.Label`.

    ``exclusive_s`` divides each instant among the kernels that run then, and adds up to the time in
    which any of them runs; ``time_s`` adds up to more where kernels overlap. ``kernels`` is a cell
    of `write_kernels`.
    """

    # fmt: off
    kind: str = column("; ".join(f"{kind}: {kind.meaning}" for kind in WorkKind))
    operation: str = column("its name, or window, groups and channels of a convolution")
    format: str = column("number format of what it reads first, or the two of a cast")
    calls: int = column("operations of a step")
    flop: float | None = column("FLOP of a step; empty where not counted")
    bytes: float | None = column("least memory traffic of a step, not fused")
    time_s: float | None = column("time of a step, with --profile", None)
    exclusive_s: float | None = column(
        "that time, each instant divided among the kernels that run in it", None)
    kernels: str = column(
        "the kernels that make nearly all of time_s on a GPU, each with its part of it in s, the "
        "longest first, and how many others there were", "", optional=True)
    flop_per_item: float | None = column(
        "what another item in each micro-batch adds to flop; empty where that is not known", None)
    bytes_per_item: float | None = column("the same of bytes", None)
    # fmt: on


@dataclass(frozen=True)
class KnownResults:
    """Results of earlier rows that a case can reuse.

    ``sources`` gives the record that each of ``proof``, ``flop`` and ``work`` comes from, where
    known. ``values`` are columns of a `Measurement`, with the ``flags`` that the proof is valid
    for; ``missing`` says why some are empty, and ``work`` is the work of one step of this case.
    """

    sources: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    work: list[WorkRow] = field(default_factory=list)


@dataclass
class RankRow:
    """One row of ranks.csv: a process of a case that trains on several GPUs."""

    rank: int = column("from 0")
    gpu_uuid: str | None = column("its GPU; empty on a CPU")
    epoch_time_s: float | None = column("its epoch")
    work_s: float | None = column(
        "median time from the start of a step until its first gradients are handed over"
    )
    images: int | None = column("images that it trained on in the measured steps", None)
    peak_reserved_bytes: int | None = column("peak of torch's allocator", None)
    peak_process_bytes: int | None = column("peak of the process", None)
    computing_s: float | None = column(
        "of a command's profiled step, the time in which it did not only exchange with others, or "
        "wait for them",
        None,
    )
    waits_in: str | None = column("the exchange in which it spent most of the rest", None)


@dataclass(frozen=True)
class Place:
    """Where a case ran, if its executor chose: machine and GPU as the row's ``lane``, and if they
    could be examined their environment, and why rates are missing from it."""

    lane: str
    environment: Environment | None = None
    unrated: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of running a case: a status with its one-line reason, and what was measured.

    ``epochs`` is empty for a case of one epoch, which its measurement describes. ``transient``:
    another attempt may well succeed; ``peer``: it failed because a process that it trains with was
    gone. ``missing`` says why columns are empty, until the measurement does. ``follows`` lists the
    columns that the worker will fill in another outcome; if none comes, this one is final. ``seen``
    are the user's files, where the case's own process tells of them, and ``cards`` the GPUs, by
    UUID, that a command says it trained on.
    """

    status: Status = Status.OK
    reason: str = ""
    measurement: Measurement = field(default_factory=Measurement)
    steps: list[Step] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    work: list[WorkRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    unit: str = ""  # what a command counts, and how many of them its epoch time is of
    epoch_items: int = 0
    retries: int = 0
    place: Place | None = None
    seen: Seen | None = None
    cards: list[str] = field(default_factory=list)
    transient: bool = False
    peer: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    follows: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        m, notes = self.measurement, (self.measurement.notes or "").split("; ")
        if text not in notes:  # as after each epoch
            m.notes = "; ".join(filter(None, [*notes, text]))

    def leave_out(self, reason: str, *columns: str) -> None:
        self.missing |= dict.fromkeys(columns, reason)

    def fail_checkpoint(self, reason: str) -> None:
        self.note(reason)
        self.leave_out(reason, "checkpoint")

    @contextmanager
    def leave_out_on_error(self, *columns: str) -> Iterator[None]:
        """Catch any error and leave ``columns`` empty, with the error as the reason."""
        try:
            yield
        except UsageError as error:
            self.leave_out(str(error), *columns)
        except Exception as error:
            traceback.print_exception(error)  # to the log
            self.leave_out(f"{type(error).__name__}: {error}", *columns)


@dataclass(kw_only=True)
class Record:
    """One row. Identity, the case's axes, the outcome, the measurement, the environment."""

    record_id: str = column("joins a row to its steps")
    case: Case
    repeat: int = column("1 for the first run of a case, 2 for the second, …")
    run_seed: int = column("the seed of this run: repeats differ in it, see --same-seed")
    sentinel: bool = column("the first case run again at the end, to show drift")
    probe: bool = column("run to find the largest batch that fits")
    lane: str = column("the lane that it ran on; empty where there was one")
    lanes_beside: int | None = column("other lanes that ran a case meanwhile, at most")
    attempt: int = column("1, or more where an earlier attempt failed")
    status: Status = column("; ".join(f"{s}: {s.meaning}" for s in Status))  # noqa: RUF009
    reason: str = column("one line on the status")
    inferred: bool = column("not run: concluded from another case's outcome")
    executor: str = column("what ran it")
    started_at: str = column("UTC")
    finished_at: str = column("UTC")
    retries: int = column("transient failures retried")
    log: str = column("the worker's log, beside the records")
    measurement: Measurement
    environment: Environment


@dataclass(frozen=True)
class ColumnInfo:
    name: str
    type: type
    help: str
    optional: bool = False


def _columns(kind: type) -> Iterator[ColumnInfo]:
    for f in fields(kind):
        if text := f.metadata.get("help"):
            name, empty, _ = str(f.type).partition(" | None")
            type_ = {"bool": bool, "float": float, "int": int}.get(name, str)
            optional = bool(empty) or f.metadata.get("optional", False)
            yield ColumnInfo(f.name, type_, text, optional)


def _by_name(*columns: ColumnInfo) -> dict[str, ColumnInfo]:
    return {column.name: column for column in columns}


def _join(kind: type, what: str) -> dict[str, ColumnInfo]:
    """Return the columns of a table whose rows belong to records."""
    return _by_name(ColumnInfo("record_id", str, f"the record {what} belongs to"), *_columns(kind))


_record_id, *_outcome = _columns(Record)

COLUMNS: dict[str, ColumnInfo] = _by_name(
    ColumnInfo("schema", int, "version of this table"),
    _record_id,
    # an axis that may be empty is text: a loss scale is a number, the name of a rule or nothing
    *(
        ColumnInfo(name, str if axis.default is None else type(axis.default), axis.help)
        for name, axis in AXES.items()
    ),
    *_outcome,
    *_columns(Measurement),
    *_columns(Environment),
)
STEP_COLUMNS = _join(Step, "the step")
EPOCH_COLUMNS = _join(EpochRow, "the epoch")
WORK_COLUMNS = _join(WorkRow, "that the work")
RANK_COLUMNS = _join(RankRow, "that the process")

_OWNERS = {
    "device": ("device",),
    # a command, and a word of it, may choose the Python that runs it
    "torch": ("device", "command", "vary"),
    "dataset": list_affecting(Trait.DATA),
    "model": ("model", *SYNTHETIC_AXES, "length"),
    "start": ("start",),
}

COMPARABLE = {
    f.name: _OWNERS[f.metadata["comparable"]]
    for f in fields(Environment)
    if "comparable" in f.metadata
}
"""Environment columns on which rows of a sweep must agree if they agree on these axes."""

MODEL_PARTS = {
    "model_parameters": "parameters",
    "model_structure": "layers",
    "model_source": "source files",
    "start_fingerprint": "starting weights",
}
"""Environment columns that identify the network behind a model's name, and what each hashes."""

_list_cells = attrgetter(
    "record_id",
    *(f"case.{name}" for name in AXES),
    *(column.name for column in _outcome),
    *(f"measurement.{f.name}" for f in fields(Measurement)),
    *(f"environment.{f.name}" for f in fields(Environment)),
)


def flatten(record: Record) -> dict[str, Any]:
    return dict(zip(COLUMNS, (SCHEMA, *_list_cells(record)), strict=True))


def write_missing(reasons: Mapping[str, str]) -> str:
    """Format reasons by column for ``missing``, or the records of parts for ``shared``."""
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def read_missing(text: str, names: Container[str] = COLUMNS) -> dict[str, str]:
    """Parse the output of `write_missing`, by column or part; a reason may contain a semicolon.

    >>> read_missing("energy_j: no sensor; use another; notes: none")
    {'energy_j': 'no sensor; use another', 'notes': 'none'}
    """
    heads = [m for m in re.finditer(r"(?:^|; )(\w+): ", text) if m[1] in names]
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return {head[1]: text[head.end() : end] for head, end in zip(heads, ends, strict=False)}


ASKED = {
    "eval_time_s": "--evaluate",
    "profiled_steps": "--profile",
    "loader_samples_per_s": "the rate of --loader torch",
    "checkpoint": "--checkpoint",
}
"""What a case does beside training if asked, by the column for which ``missing`` says why not."""


def describe_unmet(missing: str) -> str:
    """Return what was asked for beside training and failed, with the reasons; empty if nothing did.

    >>> describe_unmet("energy_j: no sensor; eval_time_s: ValueError: no luck")
    '--evaluate failed: ValueError: no luck'
    """
    why = read_missing(missing)
    return "; ".join(
        f"{asked} failed: {' '.join(why[name].split())[:200]}"
        for name, asked in ASKED.items()
        if name in why
    )
