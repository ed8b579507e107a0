"""Processes that train one network, forked from one that has imported torch: `start_ranks`.

Each scenario runs in every process of a group and returns what its test looks at.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer would, in each process: as long as torch itself
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.networks.data.batches import Batches, Divided, MadeBatches, Share
from bench.networks.workloads import Loss, Workload
from bench.schema.case import Case, whole_batch
from bench.training import sharding
from bench.training.building import build_training
from bench.training.loop import Training, merge, train_epoch
from bench.training.memory import measure_parts, watch_gradients
from bench.training.parallel import GradientExchange, Processes, ProcessGroup, measure_exchange
from bench.training.sharding import ShardExchange
from bench.training.timing import Certainty, StepClock

CPU = torch.device("cpu")
CASE = Case(device="cpu", parallel="ddp", batch_size=4, lr=0.05)
SLEEP_S = 0.2
"""Long against what a busy machine adds to a step of milliseconds."""


def build() -> nn.Module:
    """A network without BatchNorm, whose result does not depend on how a batch is divided."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10))


class Exact(Training):
    """A training in float64 that keeps the gradients of each of its updates."""

    def __init__(self, case: Case) -> None:
        self.seen: list[Tensor] = []
        super().__init__(case, build().double(), CPU, Workload())

    def compute_loss(self, batch: Any, compiled: bool = True) -> Loss:
        x, y = batch
        logits = self.model(x.double())
        return Loss(F.cross_entropy(logits, y), (logits.argmax(1) == y).sum())

    def update(self) -> tuple[Tensor, Tensor | None]:
        self.seen.append(torch.cat([p.grad.flatten() for p in self.parameters]))
        return super().update()


def open_data(items: int, case: Case, share: Share) -> Batches:
    """So many images for a case, of which a process has a share."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (items, 3, 32, 32), dtype=np.uint8)
    sizes = {"batch_size": whole_batch(case), "micro_batch": -(-case.batch_size // case.accumulate)}
    batches = Batches(images, np.arange(items) % 10, **sizes, device=CPU, seed=0)
    batches.share = share
    return batches


def train(
    items: int, case: Case, group: ProcessGroup | None
) -> tuple[Exact, list[float], list[int]]:
    """Train an epoch of so many images; the training, mean losses, and images of each step."""
    training = Exact(case)
    share = Share(group.rank, group.size) if group else Share()
    if group is not None:
        training.exchange = GradientExchange(training, group)
    batches = open_data(items, case, share)
    epoch = train_epoch(training, batches.divide(), StepClock(CPU), lambda index, loss: None)()
    whole = merge(group.gather(epoch)) if group else epoch
    return training, whole.losses, whole.images


def _flatten(training: Training) -> Tensor:
    return torch.cat([_join(p).detach().flatten() for p in training.parameters])


def _join(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _hash(weights: Tensor) -> Any:
    return sha256(weights.numpy().tobytes())


def gradients(group: ProcessGroup) -> dict[str, Any]:
    """Gradients of each step, by number of images and micro-batches, beside one process's."""
    found = {}
    for items, accumulate in ((21, 1), (21, 2), (16, 1), (8 * group.size + 1, 1)):
        case = replace(CASE, world_size=group.size, accumulate=accumulate)
        shared, losses, images = train(items, case, group)
        alone, exact, every = train(items, case, None)
        found[f"{items} {accumulate}"] = {
            "errors": [
                float((a - b).norm() / b.norm())
                for a, b in zip(shared.seen, alone.seen, strict=True)
            ],
            "losses": [losses, exact],
            "images": [images, every],
            "weights": [t.digest() for t in map(_hash, group.gather(_flatten(shared)))],
        }
    return found


def clipped(group: ProcessGroup) -> dict[str, Any]:
    """Weights, and norms of the steps' gradients, clipped in all processes and in one."""
    case = replace(CASE, world_size=group.size, accumulate=2, clip_grad=0.5)
    ours, alone = (train(21, case, one)[0] for one in (group, None))
    return {
        "weights": [t.digest() for t in map(_hash, group.gather(_flatten(ours)))],
        "error": float((_flatten(ours) - _flatten(alone)).norm()),
        "norms": [float(seen.norm()) for seen in alone.seen],
    }


def compressed(group: ProcessGroup) -> dict[str, Any]:
    """Gradients that were exchanged in half precision: their errors, bytes and buckets."""
    found = {}
    for name in ("none", "fp16", "bf16"):
        case = replace(CASE, world_size=group.size, grad_compression=name)
        training = train(16, case, group)[0]
        exact = train(16, replace(case, grad_compression="none"), None)[0]
        exchange = training.exchange
        assert isinstance(exchange, GradientExchange)
        found[name] = {
            "error": float((training.seen[0] - exact.seen[0]).norm() / exact.seen[0].norm()),
            "wire": exchange.wire_bytes,
            "weights": sum(p.numel() for p in training.parameters),
        }
    return found


def divided_first(group: ProcessGroup) -> dict[str, Tensor]:
    """Gradients at the ends of float16's range: 40,000 in each process, and 1e-6."""

    class Given(Exact):
        def compute_loss(self, batch: Any, compiled: bool = True) -> Loss:
            first, *rest = (p.sum() for p in self.parameters)
            return Loss(first * 40_000 + sum(rest) * 1e-6)

    training = Given(replace(CASE, world_size=group.size, grad_compression="fp16"))
    training.exchange = GradientExchange(training, group)
    training.step(Divided(4, iter([torch.zeros(4, 1)]), 4 * group.size))
    return {"high": float(training.seen[0][0]), "low": float(training.seen[0][-1])}


def overflow(group: ProcessGroup) -> dict[str, Any]:
    """A gradient that overflows in the last process alone, under two dynamic scales."""

    def spoil(batch: Divided, bad: bool) -> Divided:
        parts: Iterator[Any] = ((x * (torch.inf if bad else 1), y) for x, y in batch.parts)
        return Divided(batch.size, parts, batch.whole)

    found = {}
    for scale in ("dynamic", "dynamic-apex-amp"):
        case = replace(CASE, world_size=group.size, precision="fp16", loss_scale=scale, lr=0.05)
        training = Training(case, build(), CPU, Workload())
        training.exchange = GradientExchange(training, group)
        batches = open_data(24, case, Share(group.rank, group.size))
        before = [p.clone() for p in training.masters]
        skipped = []
        for index, batch in enumerate(batches.divide()):
            bad = not index and group.rank == group.size - 1
            skipped.append(bool(training.step(spoil(batch, bad))[2]))
            if not index:
                kept = all(map(torch.equal, before, training.masters))
        found[scale] = {
            "skipped": group.gather(skipped),
            "kept": group.gather(kept),
            "scales": group.gather(float(training.current_scale())),
            "weights": group.gather([float(p.detach().double().sum()) for p in training.masters]),
            "wire": training.exchange.wire_bytes,  # type: ignore[attr-defined]
            "halves": sum(p.numel() for p in training.parameters if p.dtype == torch.float16),
        }
    return found


class Slow(Exact):
    """A training that sleeps in each step of the last process."""

    def __init__(self, case: Case, group: ProcessGroup) -> None:
        self._sleeps = group.rank == group.size - 1
        super().__init__(case)

    def compute_loss(self, batch: Any, compiled: bool = True) -> Loss:
        if self._sleeps:
            time.sleep(SLEEP_S)
        return super().compute_loss(batch, compiled)


def straggler(group: ProcessGroup) -> dict[str, Any]:
    """The last process sleeps in each step: step times and work of each, and what is exposed."""
    case = replace(CASE, world_size=group.size)
    training = Slow(case, group)
    exchange = training.exchange = GradientExchange(training, group)
    batches = open_data(40, case, Share(group.rank, group.size))
    clock = StepClock(CPU)
    clock.tick()
    for batch in batches.divide():
        training.step(batch)
        clock.tick()
    return {
        "steps": group.gather(median(clock.read()[1:])),
        "work": group.gather(median(exchange.read_work()[1:])),
        "exposed": measure_exchange(training, batches, group, SLEEP_S),
    }


def exposed(group: ProcessGroup) -> dict[str, Any]:
    """Sending gradients takes `SLEEP_S` in which nothing else happens."""
    case = replace(CASE, world_size=group.size)
    real = dist.all_reduce

    def slow(tensor: Tensor, *rest: Any, **named: Any) -> Any:
        if named.get("async_op"):
            time.sleep(SLEEP_S)
        return real(tensor, *rest, **named)

    training = Exact(case)
    training.exchange = GradientExchange(training, group)
    batches = open_data(40, case, Share(group.rank, group.size))
    for batch in batches.divide(0, steps=2):
        training.step(batch)
    weights = [p.clone() for p in training.parameters]
    dist.all_reduce = slow
    try:
        found = measure_exchange(training, batches, group, SLEEP_S)
    finally:
        dist.all_reduce = real
    same = all(map(torch.equal, weights, training.parameters))
    return {"exposed": found, "same": group.gather(same)}


def ended_early(group: ProcessGroup) -> list[list[int]]:
    """After how many steps each process ends an epoch that is to be certain: the steps of all are
    steady, but for the last process's first 20, or of it the last six have not ended."""

    class Clock(StepClock):
        def __init__(self, unsteady: int, late: int) -> None:
            self.begun, self.unsteady, self.late = 0, unsteady, late

        def read_ended(self) -> list[float]:
            self.begun += 1
            steps = range(max(0, self.begun - self.late))
            return [0.1 + (step % 2 + step) * (step < self.unsteady) for step in steps]

    last = group.rank == group.size - 1
    found = []
    for clock in (Clock(0, 0), Clock(20 * last, 0), Clock(0, 6 * last)):
        certain = Certainty(0.01, clock, 391, 0, group.gather)
        ended = next((n for n in range(1, 100) if certain()), 100)
        found.append(group.gather(ended))
    return found


class Blocks(Workload):
    """A network that repeats blocks, with BatchNorm."""

    samples = 53
    shape = (3, 8, 8)

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)

        def block() -> nn.Module:
            return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh())

        return nn.Sequential(
            nn.Conv2d(3, 4, 1),
            *(block() for _ in range(3)),
            nn.Flatten(),
            nn.Linear(256, 10),
        )


def _train_blocks(case: Case, group: ProcessGroup) -> Training:
    training = build_training(case, Blocks(), CPU)
    kind = ShardExchange if case.parallel == "fsdp" else GradientExchange
    training.exchange = kind(training, group)
    return training


SHARDED: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "adam"},
    {"optimizer": "adamw"},
    {"accumulate": 2, "clip_grad": 0.5},
    {"recompute": "blocks"},
    {"recompute": "full", "precision": "bf16"},
    {"freeze": "1", "optimizer": "adamw"},
    {"compile": "default"},
    {"precision": "bf16-amp"},
    {"precision": "bf16"},
    {"precision": "bf16-pure"},
    {"precision": "fp16", "loss_scale": "dynamic"},
    {"precision": "fp16", "loss_scale": 128.0, "clip_grad": 0.5},
    {"precision": "fp16-amp", "loss_scale": "dynamic", "optimizer": "adamw"},
    {"grad_compression": "bf16"},
)


def sharded(group: ProcessGroup) -> dict[str, Any]:
    """The same training with gradients averaged, and with weights sharded: losses, weights, norms,
    and what a process holds."""
    found = {}
    for settings in SHARDED:
        case = replace(CASE, world_size=group.size, batch_size=8, **settings)
        runs = {}
        for parallel in ("ddp", "fsdp"):
            training = _train_blocks(replace(case, parallel=parallel), group)
            making = {"micro_batch": -(-8 // case.accumulate), "device": CPU, "seed": 0}
            batches = Blocks().open_batches(batch_size=whole_batch(case), **making)
            assert isinstance(batches, MadeBatches)
            batches.share = Share(group.rank, group.size)
            clock = StepClock(CPU)
            with watch_gradients(training.optimizer, training.parameters) as gradients:
                epoch = train_epoch(training, batches.divide(), clock, lambda index, loss: None)()
            whole = merge(group.gather(epoch))
            parts = measure_parts([training.optimizer], [training.model])
            loss, _ = training.evaluate([next(batches.evaluation(16))])
            weights = _flatten(training)
            training.reset()
            runs[parallel] = {
                "losses": whole.losses,
                "norms": whole.norms,
                "tested": loss,
                "weights": weights,
                "start": _flatten(training),
                "held": {**parts, "gradients_bytes": gradients[0]},
                "wire": training.exchange.wire_bytes,  # type: ignore[attr-defined]
                "gathered": training.exchange.gathered_bytes,  # type: ignore[attr-defined]
                "notes": (training.sharded, training.recomputes),
            }
        found[repr(settings)] = runs
    return found


def sharded_overflow(group: ProcessGroup) -> dict[str, Any]:
    """A gradient that overflows in the last process alone: all skip the step."""
    found = {}
    for settings in ({}, {"clip_grad": 0.5}, {"optimizer": "adamw"}):
        case = replace(CASE, world_size=group.size, parallel="fsdp", batch_size=8, **settings)
        case = replace(case, precision="fp16-amp", loss_scale="dynamic")
        training = _train_blocks(case, group)
        before, skipped = _flatten(training), []
        for step in range(3):
            x, y = Blocks().make_batch(8, CPU, torch.Generator().manual_seed(step))
            bad = not step and group.rank == group.size - 1
            batch = Divided(8, iter([(x * (torch.inf if bad else 1), y)]), 8 * group.size)
            skipped.append(bool(training.step(batch)[2]))
            if not step:
                kept = torch.equal(before, _flatten(training))
        scale = float(training.current_scale())
        found[repr(settings)] = group.gather((skipped, kept, scale))
    return found


def sharded_exposed(group: ProcessGroup) -> dict[str, Any]:
    """Every collective takes `SLEEP_S` in which nothing else happens; then all is as it was."""
    case = replace(CASE, world_size=group.size, parallel="fsdp", batch_size=8)
    training = _train_blocks(case, group)
    batches = Blocks().open_batches(batch_size=whole_batch(case), micro_batch=8, device=CPU, seed=0)
    assert isinstance(batches, MadeBatches)
    batches.share = Share(group.rank, group.size)
    for batch in batches.divide(0, steps=2):
        training.step(batch)
    weights, real = _flatten(training), sharding._REDUCE

    def slow(*given: Any, **about: Any) -> Any:
        time.sleep(SLEEP_S)
        return real(*given, **about)

    sharding._REDUCE = slow
    try:
        exposed = measure_exchange(training, batches, group, SLEEP_S)
    finally:
        sharding._REDUCE = real
    same = torch.equal(weights, _flatten(training))
    exchange = training.exchange
    assert isinstance(exchange, ShardExchange)
    return {"exposed": exposed, "same": group.gather(same), "buckets": exchange.buckets}


SCENARIOS: dict[str, Callable[[ProcessGroup], Any]] = {
    one.__name__: one
    for one in (
        gradients,
        clipped,
        compressed,
        divided_first,
        overflow,
        straggler,
        exposed,
        ended_early,
        sharded,
        sharded_overflow,
        sharded_exposed,
    )
}


def run_rank(rank: int, size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)  # more would wait for each other on few cores
    group = Processes(rank, size, str(folder / f"store{size}"), CPU, 120.0)
    found = {name: SCENARIOS[name](group) for name in names}
    group.leave()
    if not rank:
        torch.save(found, folder / f"found{size}.pt")


def main() -> int:
    """FOLDER SIZE,SCENARIO,… …: run each group, one after the other."""
    folder, failed = Path(sys.argv[1]), 0
    for asked in sys.argv[2:]:
        size, *names = asked.split(",")
        pids = []
        for rank in range(int(size)):
            if pid := os.fork():
                pids.append(pid)
                continue
            status = 1
            try:
                run_rank(rank, int(size), folder, names)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
