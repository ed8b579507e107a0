"""An independent training loop to compare the harness with: `python bench/crosscheck/bare.py`.

It shares no code with the harness except what is trained: the network's definition, models/dpn.py,
which is loaded by its path, or a user's workload with its network, batches and loss. Images,
augmentation, warm-up, precision and timing are written again here, as plainly as possible. The
images are random: a step's time does not depend on their content.

It waits for a line on standard input, so that a poller can read the memory before it starts. Then
it prints one JSON object: seconds, steps and images (units of a workload) of the measured steps,
when they began and ended (CLOCK_MONOTONIC), the peaks in bytes of tensors and of the memory that
torch's allocator held (null on a CPU), the seconds that making the batches takes alone, and the
modules of the harness that it imported besides those of the workload (none).
"""

import argparse
import json
import sys
import time
from importlib import import_module
from itertools import chain, count
from pathlib import Path

IMAGES = 50_000  # the size of CIFAR-10's training set
HARNESS = Path(__file__).parents[1]


class Cifar:
    """A network of models/dpn.py, on random images that stay on the device."""

    def __init__(self, model, size, device):  # type: ignore[no-untyped-def]
        import torch

        sys.path.insert(0, str(HARNESS / "models"))
        self.network = getattr(import_module("dpn"), model)()
        self.samples, self.size, self.device = IMAGES, size, device
        self.images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
        self.labels = torch.randint(0, 10, (IMAGES,), device=device)
        self.mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(1, 3, 1, 1)
        self.std = torch.tensor([0.2023, 0.1994, 0.2010], device=device).view(1, 3, 1, 1)
        self.channels = torch.arange(3, device=device).view(1, 3, 1, 1)
        self.side = torch.arange(32, device=device)

    def batches(self, epoch, steps, size=None):  # type: ignore[no-untyped-def]
        import torch

        order = torch.randperm(IMAGES, device=self.device)
        top, left = (torch.randint(0, 9, (IMAGES,), device=self.device) for _ in range(2))
        flip = torch.rand(IMAGES, device=self.device) < 0.5
        for step in range(steps):
            part = slice(step * self.size, step * self.size + (size or self.size))
            yield self.make_batch(order[part], top[part], left[part], flip[part])

    def make_batch(self, chosen, top, left, flip):  # type: ignore[no-untyped-def]
        """Crop randomly from 4 pixels of padding, flip randomly, normalise: as pytorch-cifar."""
        import torch
        import torch.nn.functional as F

        x = F.pad(self.images[chosen], (4, 4, 4, 4))
        rows = (top[:, None] + self.side).view(-1, 1, 32, 1)
        columns = (left[:, None] + self.side).view(-1, 1, 1, 32)
        each = torch.arange(len(chosen), device=self.device).view(-1, 1, 1, 1)
        x = x[each, self.channels, rows, columns]
        x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
        return (x.float() / 255 - self.mean) / self.std, self.labels[chosen]

    def compute_loss(self, network, batch):  # type: ignore[no-untyped-def]
        import torch.nn.functional as F

        x, y = batch
        logits = network(x)
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).sum()

    def build_optimizer(self, parameters, lr):  # type: ignore[no-untyped-def]
        return None

    def count(self, batch):  # type: ignore[no-untyped-def]
        return len(batch[1])


class UserWorkload:
    """A user's workload."""

    def __init__(self, name, size, device):  # type: ignore[no-untyped-def]
        sys.path += [str(HARNESS.parent), str(Path.cwd())]
        module, _, factory = name.partition(":")
        self.workload = getattr(import_module(module), factory)()
        self.network = self.workload.build_model()
        self.build_optimizer = self.workload.build_optimizer
        self.supply = self.workload.open_batches(
            batch_size=size, micro_batch=size, device=device, seed=0
        )
        self.samples = self.supply.samples

    def batches(self, epoch, steps, size=None):  # type: ignore[no-untyped-def]
        for batch in self.supply.divide(epoch, steps=steps, size=size):
            yield from batch.parts

    def compute_loss(self, network, batch):  # type: ignore[no-untyped-def]
        found = self.workload.compute_loss(network, batch)
        return getattr(found, "loss", found), getattr(found, "correct", None)

    def count(self, batch):  # type: ignore[no-untyped-def]
        import torch
        from torch.utils._pytree import tree_leaves

        first = next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        return self.workload.count_units(len(first))


def list_harness() -> set[str]:
    return {name for name in sys.modules if name.split(".")[0] == "bench"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["dpn92", "dpn26", "dpn_small"])
    parser.add_argument("--workload")
    parser.add_argument("--precision", choices=["fp32", "bf16-amp"], required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup-s", type=float, required=True)
    parser.add_argument("--device", required=True)
    given = parser.parse_args()
    sys.stdin.readline()

    import torch
    from torch.utils._pytree import tree_map_only

    device, size = torch.device(given.device), given.batch_size
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    task = (
        UserWorkload(given.workload, size, device)
        if given.workload
        else Cifar(given.model, size, device)
    )
    theirs = list_harness()
    model = task.network.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = task.build_optimizer(parameters, 0.01) or torch.optim.SGD(
        parameters, lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True
    )
    losses = torch.zeros((), device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    amp = given.precision == "bf16-amp"

    def network(*inputs, **named):  # type: ignore[no-untyped-def]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            outputs = model(*inputs, **named)
        return tree_map_only(
            torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, outputs
        )

    def train(batch):  # type: ignore[no-untyped-def]
        loss, correct = task.compute_loss(network, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add_(loss.detach())
        if correct is not None:
            hits.add_(correct)

    # warm up for a fixed time, whereas the harness waits until two windows agree
    whole, rest = divmod(task.samples, size)
    begun, endless = time.perf_counter(), (task.batches(epoch, whole) for epoch in count())
    for warmed, batch in enumerate(chain.from_iterable(endless), 1):
        train(batch)
        wait()
        if warmed >= 3 and time.perf_counter() - begun >= given.warmup_s:
            break
    if device.type == "cuda":
        # the least that an epoch needs: a step of each of its batch shapes
        torch.cuda.empty_cache()
        for items in filter(None, (size, rest)):
            for batch in task.batches(0, 1, items):
                train(batch)
    del batch, endless
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses.zero_()
    hits.zero_()
    wait()

    began, start_s, images = time.monotonic(), time.perf_counter(), 0
    for batch in task.batches(0, given.steps):
        train(batch)
        images += task.count(batch)
    wait()
    seconds, ended = time.perf_counter() - start_s, time.monotonic()
    allocated = reserved = None
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    batches_start = time.perf_counter()
    for _ in task.batches(0, given.steps):
        pass
    wait()
    batches_s = time.perf_counter() - batches_start
    assert float(losses) < float("inf"), "the loss is inf or NaN"
    answer = {
        "seconds": seconds,
        "steps": given.steps,
        "images": images,
        "began": began,
        "ended": ended,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "batches_s": batches_s,
        "shared": sorted(list_harness() - theirs),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
