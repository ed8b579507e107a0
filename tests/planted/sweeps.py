"""Whole sweeps to report on, in which what there is to say is known; nothing was measured.

`SWEEPS` names them, and `Folders` writes each, once it is asked for, as a real sweep writes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.schema.case import Case
from bench.schema.record import EpochRow, RankRow, Record, Status, Step, WorkRow
from bench.schema.work import WorkKind
from tests.planted.records import GIB, HOSTILE, Row, make_card, make_record, measured, write_sweep
from tests.planted.scripts import list_scripts
from tests.planted.warnings import list_drifted, list_warned

SPEEDUP = {"fp32": 1.0, "fp16": 3.1, "bf16-amp": 2.6}
"""Of a step of `list_gpus`, without exchange."""


def make_steps(case: Case, time_s: float, accuracy: float) -> list[Step]:
    """A learning curve that falls, of 50 logged steps."""
    steps = []
    for i in range(50):
        loss = 2.3 - 0.7 * (i / 50) + 0.05 * math.sin(9 * i)
        hits = int(case.batch_size * accuracy * (0.5 + i / 50))
        time = time_s / 390 * (1 + 0.04 * math.sin(7 * i))
        steps.append(Step(i, 1000, loss, 1000 * hits // case.batch_size, time))
    return steps


def list_foreign(name: str, slower: float) -> Iterator[Row]:
    """A card, by an executor that nobody knows, up to what does not fit; one case diverged and one
    was throttled."""
    card = {**make_card(name), "executor": "x"}
    for precision, batch in product(("fp32", "bf16-amp"), (128, 512, 1024)):
        case = Case(precision=precision, batch_size=batch)
        needs = GIB * (1.5 + batch * 0.055 / SPEEDUP[precision])
        if needs > card["gpu_memory_bytes"]:
            reason = "OutOfMemoryError: <script>alert('x')</script> | a\\b $x_1$ [red]not red[/red]"
            yield make_record(case, status=Status.OOM, reason=reason, **card)
            continue
        time_s = 42 * slower / SPEEDUP[precision] * (0.85 + 25 / batch)
        values = measured(time_s, needs, energy_j=480 * time_s, train_loss=2.0)
        yield make_record(case, **{**card, **values}), make_steps(case, time_s, 0.3)
    for batch, status in ((129, Status.DIVERGED), (130, Status.INVALID)):
        case = Case(precision="bf16-amp", batch_size=batch)
        yield make_record(case, status=status, **{**card, **measured(20, 5 * GIB)})


def list_quick() -> Iterator[Row]:
    """What the quick preset leaves on a CPU: synthetic images, part of an epoch, single runs."""
    for precision, factor in (("fp32", 1.0), ("bf16-amp", 1.6)):
        for batch in (64, 128, 256):
            case = Case(
                model="dpn-small", dataset="synthetic", precision=precision, batch_size=batch,
                fraction=0.05, device="cpu",
            )  # fmt: skip
            time_s = factor * (20 + 400 / batch)
            about = {"cpu": "AMD EPYC 9B14, 2 cores", "torch": "2.13.0+cpu", "code": "abc123"}
            about["dataset_fingerprint"] = "5eed"
            memory = dict.fromkeys(f"peak_{of}_bytes" for of in ("device", "reserved", "allocated"))
            memory["peak_process_bytes"] = int(GIB * (0.6 + batch / 400))
            learnt = {"measured_images": 512, "train_loss": 2.1, "train_accuracy": 0.25}
            values = {**measured(time_s, 0, 10000), **about, **memory, **learnt}
            yield make_record(case, **values), make_steps(case, time_s, 0.25)[:8]


SPEEDS = {
    "fp32": {32: 400, 64: 700, 128: 975, 256: 1000, 257: 800, 512: 1010, 1024: 1005},
    "fp16": {32: 500, 64: 950, 128: 1700, 256: 2400, 512: 3000, 1024: 3500, 2048: 4000},
}
"""Images/s by batch size of `list_scaling`: fp32 has a knee at 128 and a cliff after 256, fp16
goes on rising."""

LINES = {"fp32": (1.5 * GIB, 40 * 2**20), "fp16": (1.25 * GIB, 22 * 2**20)}
"""Bytes that no batch size changes, and bytes an image, of `list_scaling`."""


def list_scaling(repeats: int = 3, noise: float = 0.004) -> Iterator[Record]:
    """Two precisions over batch sizes on a card of 48 GiB, up to what does not fit.

    Repeats wobble by ``noise`` around `SPEEDS` in turn, so that medians are exact; memory is
    exactly on `LINES`.
    """
    card = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 48 * GIB}
    for precision, speeds in SPEEDS.items():
        fixed, image = LINES[precision]
        for batch, speed in speeds.items():
            case = make_scaled_case(precision, batch)
            for repeat in range(1, repeats + 1):
                values = measured(
                    50000 / speed / (1 + noise * (repeat - (repeats + 1) / 2)),
                    fixed + image * batch,
                    train_loss=2.0 + batch / 2000,
                )
                yield make_record(case, repeat=repeat, **{**card, **values})
        full = make_scaled_case(precision, 2 * max(speeds))
        yield make_record(full, status=Status.OOM, reason="OutOfMemoryError", **card)


def make_scaled_case(precision: str, batch: int, **axes: Any) -> Case:
    """A case of `list_scaling`."""
    scale = 128.0 if precision == "fp16" else None
    return Case(precision=precision, loss_scale=scale, batch_size=batch, **axes)


def make_probe(
    precision: str,
    batch: int,
    status: Status = Status.OK,
    retries: int = 0,
    steps: int = 4,
    **values: Any,
) -> Record:
    """A probe of the largest batch, beside `list_scaling`; its epoch time is nonsense."""
    fixed, image = LINES[precision]
    card = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 48 * GIB}
    if status is Status.OK:
        values = measured(1.0, fixed + image * batch, alloc_retries=retries, **values)
    case = make_scaled_case(precision, batch, steps=steps)
    return make_record(case, probe=True, status=status, **{**card, **values})


PROBES = [
    make_probe("fp32", 32),
    make_probe("fp32", 512),
    make_probe("fp32", 1192, Status.OOM),
    make_probe("fp32", 1184, retries=3),
    make_probe("fp32", 1184, retries=3, steps=16),
]
"""A search that ends at 1184."""


RATES = {
    "rate_float32": 50e12,
    "rate_tfloat32": 350e12,
    "rate_float16": 700e12,
    "rate_bfloat16": 700e12,
    "rate_copy": 4e12,
    "call_time_s": 5e-6,
}
"""What the card of `list_profiled` was measured to do."""

WORK = {
    (WorkKind.CONVOLUTION_1X1, "1×1, 304→512"): (180, 11.76e9, 117e6, 192, 26.5),
    (WorkKind.GROUPED, "3×3, 32 groups of 3→3"): (90, 0.48e9, 28e6, 60, 40),
    (WorkKind.NORMALISATION, "native_batch_norm_backward"): (98, 0, 190e6, 60, 28),
    (WorkKind.ELEMENTWISE, "threshold_backward"): (240, 0, 146e6, 40, 18),
    (WorkKind.CONCATENATION, "slice_backward"): (60, 0, 97e6, 14, 8),
    (WorkKind.CAST, "copy"): (160, 0, 0, 0, 7),
    (WorkKind.OPTIMIZER, "_foreach_add"): (12, 0, 0, 1.4, 1.4),
    (WorkKind.LOSS, "nll_loss_forward"): (4, 0, 1e3, 0.1, 0.1),
}
"""A step of `list_profiled`: calls, FLOP and bytes an item at fp32, and milliseconds of 512 items
at fp32 and at bf16-amp."""

HOST_S = 0.03
"""What the program needs to start all operations of such a step: no step is shorter."""


def list_profiled(repeats: int = 3) -> Iterator[Row]:
    """Profiled steps of fp32 and bf16-amp, at a batch size that fills the card and one too small.

    At batch size 512 the card waits for nothing; at 32 it waits for the program in bf16-amp. The
    grouped convolution is no faster in bfloat16 than it would be without tensor cores.
    """
    card = {**make_card("NVIDIA H200"), **RATES}
    for precision, batch in [(p, b) for p in ("fp32", "bf16-amp") for b in (32, 512)]:
        half = precision != "fp32"
        work = []
        for (kind, operation), (calls, flop, bytes, *ms) in WORK.items():
            format = (
                ("float32→" if kind is WorkKind.CAST else "") + "bfloat16" if half else "float32"
            )
            moved, time_s = bytes * batch / (2 if half else 1), ms[half] / 1e3 * batch / 512
            if ms[half]:
                work += [WorkRow(str(kind), operation, format, calls, flop * batch, moved, time_s)]
        busy_s = sum(row.time_s or 0 for row in work)
        step_s = max(busy_s, HOST_S) + 0.002
        case = Case(precision=precision, batch_size=batch, profile=True)
        for repeat in range(1, repeats + 1):
            this_s = step_s * (1 + 0.002 * (repeat - 2))
            values = measured(this_s * 50000 / batch, GIB * (2 + batch / 40))
            values |= {
                "step_time_median_s": this_s,
                "step_time_mad_s": this_s * 0.002,
                "step_bytes": round(sum(row.bytes or 0 for row in work)),
                "flop_per_image": sum(row.flop or 0 for row in work) / batch,
                "arithmetic": "bfloat16" if half else "float32",
                "profiled_steps": 5,
                "profiled_step_s": this_s * 1.2,
                "busy_s": busy_s,
                "input_wait_s": 0.0,
                "sync_wait_s": 0.0,
            }
            record = make_record(case, repeat=repeat, **{**card, **values})
            yield record, [], [], work


GRADIENTS = {"fp32": 4, "fp16": 2, "bf16-amp": 4}
"""Bytes of a gradient."""

PARAMETERS = 34_000_000


def time_step(precision: str, batch: int, gpus: int) -> tuple[float, float]:
    """A made-up step on some GPUs, in s: with gradients exchanged, and without.

    The exchange sends 2 (N - 1) / N of the gradients at 10 GB/s beside the second half of the step.
    """
    alone = batch * 0.8e-3 / SPEEDUP[precision]
    sent = 2 * (gpus - 1) / gpus * GRADIENTS[precision] * PARAMETERS
    return alone + max(0.0, sent / 10e9 - alone / 2), alone


def make_gpus_records(
    precision: str,
    batch: int,
    gpus: int,
    repeats: int = 3,
    late: float = 0.0,
    **axes: Any,
) -> list[tuple[Record, list[Step], list[EpochRow], list[WorkRow], list[RankRow]]]:
    """Repeats of a case on some GPUs, of which the last works longer by the share ``late``."""
    axes = {"parallel": "ddp" if gpus > 1 else "none", **axes}
    case = Case(
        precision=precision,
        batch_size=batch,
        world_size=gpus,
        loss_scale=128.0 if precision == "fp16" else None,
        **axes,
    )
    card = make_card("NVIDIA H200")
    made: list[tuple[Any, ...]] = []
    for repeat in range(1, repeats + 1):
        wobble = 1 + 0.002 * (repeat - (repeats + 1) / 2)
        sync, alone = (time * wobble for time in time_step(precision, batch, gpus))
        values = measured(sync * 50_000 / (batch * gpus), GIB * (2 + batch / 50))
        values |= {"step_time_median_s": sync, "step_time_mad_s": sync / 100}
        ranks: list[RankRow] = []
        if case.parallel == "ddp":
            values |= {
                "comm_backend": "nccl 2.27.5",
                "wire_bytes": GRADIENTS[precision] * PARAMETERS,
                "buckets": 5,
                "sync_step_s": sync,
                "no_sync_step_s": alone,
                "exposed_error_s": alone / 100,
            }
            works = [alone / 2 * (1 + 0.001 * rank) for rank in range(gpus)]
            works[-1] *= 1 + late
            ranks = [RankRow(n, f"GPU-{n}", values["epoch_time_s"], w) for n, w in enumerate(works)]
        record = make_record(case, repeat=repeat, **{**card, **values})
        made.append((record, [], [], [], ranks))
    return made


def list_gpus(repeats: int = 3) -> Iterator[Row]:
    """Three precisions on 1 to 8 GPUs, by weak scaling and by strong; one of the 8 straggles."""
    for precision in GRADIENTS:
        for gpus in (1, 2, 4, 8):
            late = 0.08 if gpus == 8 else 0.0
            sizes = dict.fromkeys((64, 512 // gpus))
            for batch in sizes:
                yield from make_gpus_records(precision, batch, gpus, repeats, late)


TIMED = {  # seconds of an epoch at batch sizes 128, 256 and 512; factor of the losses
    "fp32": ((100, 110, 92), 1.0),
    "tf32": ((56, 53, 52), 1.0),
    "fp16": ((48, 40, 39), 1.0002),
    "bf16": ((49, 40.2, 39.1), 1.1),
    "bf16-amp": ((52, 46, 45), 0.9),
}
"""Of `list_tuned`. At batch size 128 in half precision the card waits for the program."""


def list_tuned() -> Iterator[Row]:
    """What somebody leaves who looked for the best way to train a network on one card: precisions
    over batch sizes and seeds, switches, loaders, micro-batches, a limit of memory."""
    card = {**make_card("NVIDIA H200"), "cpu": "X, 4 cores"}

    def train(
        case: Case, time_s: float, gib: float, factor: float = 1.0, **values: Any
    ) -> list[Row]:
        rows: list[Row] = []
        for repeat, wobble in enumerate((-0.001, 0.0, 0.001), 1):
            learnt = {
                "train_loss": factor * (1.8 + repeat / 100 + case.batch_size / 5000),
                "test_accuracy": 0.42 - case.batch_size / 10000 + repeat / 1000,
                "setup_time_s": 2.0, "first_steps_time_s": 1.0, "warmup_time_s": 3.0,
                "energy_j": 500.0 * time_s,
            }  # fmt: skip
            ended = measured(time_s * (1 + wobble), gib * GIB, **{**learnt, **values})
            rows.append(make_record(case, repeat=repeat, **{**card, **ended}))
        return rows

    scale = {"fp16": 128.0}
    base, waits = Case(evaluate=True), {"busy_s": 0.034, "step_time_median_s": 0.045}
    for precision, (times, factor) in TIMED.items():
        case = replace(base, precision=precision, loss_scale=scale.get(precision))
        gib = 1.5 if precision in ("fp32", "tf32") else 0.8
        for batch, time_s in zip((128, 256, 512), times, strict=True):
            waits = (
                {"busy_s": 0.034, "step_time_median_s": 0.045} if batch == 128 and gib < 1 else {}
            )
            yield from train(
                replace(case, batch_size=batch), time_s, gib * (1 + batch / 128), factor, **waits
            )
    full = replace(base, batch_size=1024)
    yield make_record(full, status=Status.OOM, reason="OutOfMemoryError", **card)
    best = replace(base, precision="fp16", loss_scale=128.0, batch_size=256)
    yield from train(replace(best, channels_last=True), 41, 2.4, 1.0002)
    yield from train(replace(best, accumulate=4), 44, 1.2, 1.0002)
    yield from train(replace(best, loss_scale=1024.0), 40.1, 2.4, 1.0002)
    yield from train(replace(best, memory_limit="2GiB"), 47, 1.9, 1.0002)
    shared = {"neighbours": "pid 4242 (python): 2.1 GB", "neighbours_computing": 1}
    yield from train(replace(best, cudnn_benchmark=True), 33, 2.4, 1.0002, **shared)
    start = {"first_steps_time_s": 61.0, "warmup_time_s": 63.0}
    for precision, time_s in (("fp32", 99), ("bf16-amp", 42)):
        compiled = replace(base, precision=precision, batch_size=256, compile="default")
        yield from train(compiled, time_s, 2.4, TIMED[precision][1], **start)
    for workers, ratio in ((0, 3.0), (2, 1.5), (4, 1.001)):
        case = replace(best, loader="torch", workers=workers)
        alone = {"loader_first_batch_s": 0.5, "loader_samples_per_s": 3000.0}
        yield from train(case, 40 * ratio, 2.4, 1.0002, **alone)


POWERED = {  # by limit in W, seconds and J of an epoch
    "bf16-amp": {
        700: (40.0, 26_000),
        500: (41.0, 20_000),
        400: (41.6, 16_600),
        300: (47.0, 15_500),
    },
    "tf32": {700: (60.0, 39_000), 500: (61.0, 30_000), 400: (61.8, 29_700), 300: (70.0, 28_000)},
    "fp32": {700: (90.0, 58_000), 500: (93.0, None)},
}
"""Of `list_powered`. In bf16-amp, 300 W takes the least energy, and 18 % longer; in tf32 two limits
take as much; in fp32, of one the energy is not known."""


def list_powered() -> Iterator[Row]:
    """Power limits on one card, in three precisions; of a fourth in single runs. One limit was
    refused."""
    card = make_card("NVIDIA H200")
    for precision, limits in POWERED.items():
        for limit, (time_s, energy_j) in limits.items():
            case = Case(precision=precision, batch_size=512, power_limit=limit)
            for repeat, wobble in enumerate((1.0, 0.998, 1.003), 1):
                energy = energy_j and {
                    "energy_j": energy_j * wobble, "mean_power_w": energy_j / time_s}  # fmt: skip
                about = {**card, **measured(time_s * wobble, 12 * GIB), "power_limit_w": limit}
                about |= {"sm_clock_mhz": 1980.0 - (700 - limit), **(energy or {})}
                yield make_record(case, repeat=repeat, **about)
    for limit, time_s in ((700, 39.0), (500, 40.8)):
        case = Case(precision="fp16", loss_scale=128.0, batch_size=512, power_limit=limit)
        about = measured(time_s, 10 * GIB, energy_j=0.9 * limit * time_s)
        yield make_record(case, **{**card, **about})
    refused = Case(precision="bf16-amp", batch_size=512, power_limit=100)
    reason = "--power-limit 100: the GPU took 200 W instead"
    yield make_record(refused, status=Status.UNSUPPORTED, reason=reason, **card)


SWEEP = "python -m bench.sweep"

SWEEPS: dict[str, tuple[Callable[[], Iterable[Row]], str | None]] = {
    "foreign": (partial(list_foreign, "NVIDIA RTX 6000 Ada", 1.0), f"{SWEEP} --executor x"),
    "hostile": (partial(list_foreign, HOSTILE, 1.7), f"{SWEEP} --executor x"),
    "quick": (list_quick, f"{SWEEP} --preset quick --out results/quick"),
    "scaling": (list_scaling, SWEEP),
    "fit": (lambda: PROBES[:-1], None),
    "profiled": (list_profiled, f"{SWEEP} --profile"),
    "gpus": (list_gpus, f"{SWEEP} --parallel none ddp"),
    "powered": (list_powered, f"{SWEEP} --power-limit 700 500 400 300 100"),
    "warned": (list_warned, SWEEP),
    "drifted": (list_drifted, SWEEP),
    "scripts": (list_scripts, f"{SWEEP} --command 'python train.py'"),
    "tuned": (list_tuned, f"{SWEEP} --preset mine"),
}
"""The rows of each, and the command that is said to have measured them."""


class Folders(dict[str, Path]):
    """The folders of `SWEEPS`, each written when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Path:
        rows, command = SWEEPS[name]
        self[name] = write_sweep(self._folder / name, rows(), command)
        return self[name]
