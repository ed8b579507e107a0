"""A training loop of its own, to hold the harness against: `python bench/crosscheck/bare.py`.

It shares no code with the harness but the network's definition, models/dpn.py, which is the
workload and is loaded by its path. Images, augmentation, warm-up, precision and timing are written
again here, in the plainest way. The images are random: a step's time does not depend on
what is in them.

It waits for a line on standard input, so that a poller can read the memory before it starts. Then
it prints one JSON object: seconds, steps and images of the measured steps, when they began and
ended (CLOCK_MONOTONIC), the bytes that torch's allocator held at most but did not use (null on a
CPU), the seconds that making their batches takes by itself, and the modules of the harness that it
imported (none).
"""

import argparse
import json
import sys
import time
from pathlib import Path

IMAGES = 50_000  # as many as CIFAR-10 has to train on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["dpn92", "dpn26", "dpn_small"], required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16-amp"], required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup-s", type=float, required=True)
    parser.add_argument("--device", required=True)
    given = parser.parse_args()
    sys.stdin.readline()

    import torch
    import torch.nn.functional as F

    sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
    import dpn  # type: ignore[import-not-found, unused-ignore]

    device, size = torch.device(given.device), given.batch_size
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (IMAGES,), device=device)
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.2023, 0.1994, 0.2010], device=device).view(1, 3, 1, 1)
    channels = torch.arange(3, device=device).view(1, 3, 1, 1)
    side = torch.arange(32, device=device)

    def make_batch(start, order, top, left, flip):  # type: ignore[no-untyped-def]
        """Random crop out of 4 pixels of padding, random flip, normalised: as pytorch-cifar."""
        chosen = order[start : start + size]
        part = slice(start, start + len(chosen))
        x = F.pad(images[chosen], (4, 4, 4, 4))
        rows = (top[part, None] + side).view(-1, 1, 32, 1)
        columns = (left[part, None] + side).view(-1, 1, 1, 32)
        each = torch.arange(len(chosen), device=device).view(-1, 1, 1, 1)
        x = x[each, channels, rows, columns]
        x = torch.where(flip[part].view(-1, 1, 1, 1), x.flip(3), x)
        return (x.float() / 255 - mean) / std, labels[chosen]

    def draw():  # type: ignore[no-untyped-def]
        return (
            torch.randperm(IMAGES, device=device),
            torch.randint(0, 9, (IMAGES,), device=device),
            torch.randint(0, 9, (IMAGES,), device=device),
            torch.rand(IMAGES, device=device) < 0.5,
        )

    network = getattr(dpn, given.model)().to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True
    )
    losses = torch.zeros((), device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)
    amp = given.precision == "bf16-amp"

    def train(x, y):  # type: ignore[no-untyped-def]
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = network(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.add_(loss.detach())
        hits.add_((logits.argmax(1) == y).sum())

    # a fixed time of steps, whereas the harness waits until two windows agree
    draws, begun, warmed = draw(), time.perf_counter(), 0
    while warmed < 3 or time.perf_counter() - begun < given.warmup_s:
        train(*make_batch(warmed % (IMAGES // size) * size, *draws))
        wait()
        warmed += 1
    if device.type == "cuda":
        # what an epoch needs at least: a step of each of its batch shapes
        torch.cuda.empty_cache()
        for start in (0, IMAGES - IMAGES % size):
            x, y = make_batch(start, *draws)
            if len(x):
                train(x, y)
        torch.cuda.reset_peak_memory_stats()
    losses.zero_()
    hits.zero_()
    wait()

    began, start_s, count = time.monotonic(), time.perf_counter(), 0
    draws = draw()
    for step in range(given.steps):
        x, y = make_batch(step * size, *draws)
        train(x, y)
        count += len(y)
    wait()
    seconds, ended = time.perf_counter() - start_s, time.monotonic()
    unused = None
    if device.type == "cuda":
        unused = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()

    batches_start = time.perf_counter()
    for step in range(given.steps):
        make_batch(step * size, *draws)
    wait()
    batches_s = time.perf_counter() - batches_start
    assert float(losses) < float("inf"), "the loss is inf or NaN"
    print(
        json.dumps(
            {
                "seconds": seconds,
                "steps": given.steps,
                "images": count,
                "began": began,
                "ended": ended,
                "unused_bytes": unused,
                "batches_s": batches_s,
                "shared": sorted(name for name in sys.modules if name.split(".")[0] == "bench"),
            }
        )
    )


if __name__ == "__main__":
    main()
