"""One case in one process: `python -m bench.worker`, started by an executor.

The worker reads its job from standard input and writes events, one JSON object a line, to the file
descriptor the job names. At each phase it waits for a line on standard input, so that the parent
can take readings of the card at the boundary. What it prints otherwise is its log.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from bench.case import Case
from bench.errors import UsageError
from bench.outcome import Fault, classify
from bench.record import Measurement, Status, Step

if TYPE_CHECKING:
    import torch

    from bench.data import Dataset
    from bench.data.batches import Batches
    from bench.train import Training

PHASES = ("warmup", "epoch", "evaluation")
"""What follows set-up. A parent keeps a deadline for each and reads the card at each boundary."""

_REPORT_EVERY_S = 0.2


class Channel:
    """The worker's end of the conversation with its parent. Without a parent, it says nothing."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._out = None if descriptor is None else os.fdopen(descriptor, "w", buffering=1)

    def send(self, event: str, **values: Any) -> None:
        """Tell the parent something."""
        if self._out:
            self._out.write(json.dumps({"event": event, **values}) + "\n")

    def enter(self, phase: str) -> None:
        """Announce a phase and wait until the parent has taken its readings."""
        if self._out:
            self.send("phase", name=phase)
            sys.stdin.readline()


class Reporter:
    """Reports step and running loss without stopping the device.

    The loss is copied to pinned memory behind the step that made it, and read once it is there.
    """

    def __init__(self, channel: Channel, device: torch.device, phase: str, steps: int) -> None:
        self._channel, self._phase, self._steps = channel, phase, steps
        self._cuda = device.type == "cuda"
        self._due = time.perf_counter()
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def __call__(self, index: int, loss: torch.Tensor) -> None:
        """Report step ``index``, if it is time to."""
        if self._pending is not None:
            step, copy, event = self._pending
            if event.query():
                self._send(step, float(copy))
                self._pending = None
        elif time.perf_counter() >= self._due:
            if self._cuda:
                self._pending = self._copy(index, loss)
            else:
                self._send(index, float(loss))

    def _copy(self, index: int, loss: torch.Tensor) -> tuple[int, torch.Tensor, torch.cuda.Event]:
        import torch

        copy = torch.empty((), pin_memory=True)
        copy.copy_(loss, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return index, copy, event

    def _send(self, step: int, loss: float) -> None:
        self._channel.send(
            "step",
            phase=self._phase,
            step=step,
            steps=self._steps,
            loss=loss,
            memory_bytes=_memory_in_use(self._cuda),
        )
        self._due = time.perf_counter() + _REPORT_EVERY_S


def _memory_in_use(cuda: bool) -> int:
    """What the allocator holds, or the peak resident set on a CPU."""
    if cuda:
        import torch

        return torch.cuda.memory_reserved()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(
    case: Case, folder: str, channel: Channel, started: float
) -> tuple[Measurement, list[Step], dict[str, str]]:
    """Set up, warm up, train the warm epoch, evaluate: the whole life of a case.

    Args:
        folder: where `bench.data.prepare` left the dataset.
        started: time.monotonic() when the process was asked for.

    Returns:
        The measurement, the epoch's steps, and why columns are empty.
    """
    import torch

    from bench.precision import PRECISIONS, prove, read_flags
    from bench.timing import StepClock, extrapolate, summarize, synchronize
    from bench.train import train_epoch

    m, missing = Measurement(), dict[str, str]()
    precision, device = PRECISIONS[case.precision], torch.device(case.device)
    data, batches, training = set_up(case, folder)
    m.setup_time_s = time.monotonic() - started

    channel.enter("warmup")
    partial_s = _warm_up(training, batches, case, channel, m)
    _read_memory(device, "warmup", m, missing)
    _start_over(training, case, device)

    steps = math.ceil(case.fraction * len(batches))
    clock, report = StepClock(device), Reporter(channel, device, "epoch", steps)
    channel.enter("epoch")
    start = time.perf_counter()
    fetch = train_epoch(training, batches.epoch(0, steps=steps), clock, report)
    synchronize(device)
    m.measured_time_s = time.perf_counter() - start
    channel.enter("evaluation")
    _read_memory(device, "peak", m, missing)
    epoch, times = fetch(), clock.read()

    if case.evaluate:
        m.test_loss, m.test_accuracy, m.eval_time_s = _evaluate(training, data, case, missing)

    spread = summarize(times)
    m.measured_steps, m.steps_per_epoch = steps, len(batches)
    m.measured_images = sum(epoch.images)
    m.epoch_time_s = m.measured_time_s
    if steps < len(batches):
        full = len(data.train_images) // case.batch_size
        m.epoch_time_s = extrapolate(m.measured_time_s, times, full, partial_s)
    m.images_per_s = len(data.train_images) / m.epoch_time_s
    m.step_time_median_s, m.step_time_p95_s, m.step_time_mad_s = (
        spread.median,
        spread.p95,
        spread.mad,
    )
    m.step_time_max_s, m.step_time_max_index = spread.slowest, spread.slowest_index
    m.overflow_steps = sum(epoch.overflowed) if precision.scales_loss else None
    m.final_loss_scale = float(training.loss_scale.current()) if precision.scales_loss else None
    bad = (i for i, loss in enumerate(epoch.losses) if not math.isfinite(loss))
    m.first_bad_step = next(bad, None)
    mean = sum(n * loss for n, loss in zip(epoch.images, epoch.losses, strict=True))
    m.train_loss = _finite(mean / m.measured_images)
    m.train_accuracy = sum(epoch.correct) / m.measured_images

    m.flags = " ".join(f"{name}={value}" for name, value in read_flags().items())
    proof = prove(precision, device)
    m.arithmetic = proof.conv if proof.conv == proof.matmul else f"{proof.conv}/{proof.matmul}"
    m.conv_error, m.matmul_error = proof.conv_error, proof.matmul_error
    m.notes = proof.contradicts(precision) or None
    m.flop_per_image = _count_flop(case, missing)
    rows = zip(epoch.images, epoch.losses, epoch.correct, times, strict=True)
    curve = [Step(i, n, _finite(loss), hits, t) for i, (n, loss, hits, t) in enumerate(rows)]
    return m, curve, missing


def set_up(case: Case, folder: str) -> tuple[Dataset, Batches, Training]:
    """Set the flags, bring the images to the device and build the network: ready to train."""
    import torch

    from bench.data import load
    from bench.data.batches import Batches
    from bench.models import build_model
    from bench.precision import PRECISIONS, set_flags
    from bench.timing import synchronize
    from bench.train import Training

    device = torch.device(case.device)
    set_flags(PRECISIONS[case.precision])
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    _seed(case.seed)
    data = load(folder)
    batches = Batches(
        data.train_images,
        data.train_labels,
        batch_size=case.batch_size,
        device=device,
        seed=case.seed,
    )
    training = Training.of(case, build_model(case.model), device)
    synchronize(device)
    return data, batches, training


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)


def _warm_up(
    training: Training, batches: Batches, case: Case, channel: Channel, m: Measurement
) -> float:
    """Warm both batch shapes; return the duration of a step of the partial one, 0 if none."""
    from bench.timing import warm_up

    report = Reporter(channel, training.device, "warmup", 0)
    full = len(batches.labels) // case.batch_size
    epochs = chain.from_iterable(batches.epoch(index, steps=full) for index in count(1))
    stream = enumerate(epochs)  # making batches is warmed up too

    def step() -> None:
        index, batch = next(stream)
        report(index, training.step(*batch)[0])

    warm = warm_up(step, training.device)
    m.warmup_steps, m.warmup_time_s, m.warmup_steady = warm.steps, warm.time_s, warm.steady
    rest = len(batches.labels) % case.batch_size
    if not rest:
        return 0.0
    _, (x, y) = next(stream)
    partial = warm_up(lambda: training.step(x[:rest], y[:rest]), training.device)
    m.warmup_steps += partial.steps
    m.warmup_time_s += partial.time_s
    return partial.step_s


def _start_over(training: Training, case: Case, device: torch.device) -> None:
    """Undo what warm-up did to weights, random numbers and memory statistics."""
    import torch

    from bench.timing import synchronize

    training.reset()
    _seed(case.seed)
    synchronize(device)
    if device.type == "cuda":
        # autotuning's workspaces would stand in the epoch's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _read_memory(device: torch.device, when: str, m: Measurement, missing: dict[str, str]) -> None:
    import torch

    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        setattr(m, f"{when}_allocated_bytes", stats["allocated_bytes.all.peak"])
        setattr(m, f"{when}_reserved_bytes", stats["reserved_bytes.all.peak"])
        m.alloc_retries, m.alloc_ooms = stats["num_alloc_retries"], stats["num_ooms"]
    else:
        for name in (f"{when}_allocated_bytes", f"{when}_reserved_bytes"):
            missing[name] = "torch keeps no account of CPU memory"


def _evaluate(
    training: Training, data: Dataset, case: Case, missing: dict[str, str]
) -> tuple[float | None, float | None, float | None]:
    from bench.data.batches import Batches

    if not len(data.test_images):
        missing["test_loss"] = missing["test_accuracy"] = "the dataset has no test images"
        return None, None, None
    start = time.perf_counter()
    batches = Batches(
        data.test_images,
        data.test_labels,
        batch_size=case.batch_size,
        device=training.device,
        seed=case.seed,
        augment=False,
    )
    loss, accuracy = training.evaluate(batches.evaluation())
    return _finite(loss), accuracy, time.perf_counter() - start


def _count_flop(case: Case, missing: dict[str, str]) -> float | None:
    """FLOP per image, forward and backward, counted on shapes alone, without computing."""
    import torch
    import torch.nn.functional as F
    from torch.utils.flop_counter import FlopCounterMode

    from bench.models import build_model

    try:
        with torch.device("meta"):
            model = build_model(case.model)
            x, y = torch.empty(2, 3, 32, 32), torch.empty(2, dtype=torch.long)
            with FlopCounterMode(display=False) as counter:
                F.cross_entropy(model(x), y).backward()
    except Exception as error:  # anybody's model; the count is no reason to lose the case
        missing["flop_per_image"] = f"the model cannot be counted on shapes: {error}"
        return None
    return float(counter.get_total_flops() / 2)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _free_share(case: Case) -> float | None:
    torch = sys.modules.get("torch")
    if case.device != "cuda" or torch is None:
        return None
    with suppress(Exception):  # after a sticky CUDA error the device answers nothing
        free, total = torch.cuda.mem_get_info()
        return float(free / total)
    return None


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: no orphan holds the GPU."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be asked for
            os._exit(1)


def _report_failure(channel: Channel, case: Case, error: BaseException) -> None:
    """Send what ended the case; its traceback goes to the log."""
    import traceback

    traceback.print_exception(error)
    if isinstance(error, UsageError):
        fault = Fault(Status.ERROR, str(error))
    else:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        fault = classify(kinds, str(error), _free_share(case))
    channel.send(
        "outcome", status=fault.status, reason=fault.reason, transient=fault.transient, values={}
    )


def main() -> int:
    """Read a job, measure it, send the outcome."""
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = json.loads(sys.stdin.readline())
    _die_with_parent(job["parent"])
    case, channel = Case(**job["case"]), Channel(job["events"])
    try:
        m, steps, missing = measure(case, job["folder"], channel, job["started"])
    except BaseException as error:
        _report_failure(channel, case, error)
        return 1
    status, reason = Status.OK, ""
    if m.notes:
        status, reason = Status.INVALID, m.notes
    if m.first_bad_step is not None:
        status = Status.DIVERGED
        reason = f"the loss was inf or NaN from step {m.first_bad_step} of {m.measured_steps}"
    channel.send(
        "outcome",
        status=status,
        reason=reason,
        transient=False,
        values={name: value for name, value in asdict(m).items() if value is not None},
        missing=missing,
        steps=[list(asdict(step).values()) for step in steps],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
