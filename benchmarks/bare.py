"""A training loop in plain torch, to hold the harness against: `python benchmarks/bare.py CASE`.

Only the network's definition is the harness's; images, crops, loss, optimizer and clock are written
here a second time. CASE is JSON, as `benchmarks/overhead.py` gives it, and so is the answer.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

IMAGES = 50_000  # the size of CIFAR-10's training set
WARMUP_S = {"cuda": 5.0, "cpu": 1.0}


def main(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    device, size, precision = torch.device(case["device"]), case["batch_size"], case["precision"]
    cuda, tf32 = device.type == "cuda", precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    sys.path.insert(0, case["models"])
    # the networks of dpn.py are named as its functions
    network = getattr(import_module("dpn"), case["model"].replace("-", "_"))().to(device)
    optimizer = torch.optim.SGD(
        network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True
    )
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (IMAGES,), device=device)
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.2023, 0.1994, 0.2010], device=device).view(1, 3, 1, 1)
    channels = torch.arange(3, device=device).view(1, 3, 1, 1)
    side = torch.arange(32, device=device)
    loss_sum = torch.zeros((), device=device)
    hits = torch.zeros((), dtype=torch.int64, device=device)

    def train(chosen: Any) -> None:
        # cropped randomly from 4 pixels of padding and flipped randomly, as by pytorch-cifar
        top, left = torch.randint(0, 9, (2, len(chosen), 1), device=device)
        each = torch.arange(len(chosen), device=device).view(-1, 1, 1, 1)
        rows, columns = (top + side).view(-1, 1, 32, 1), (left + side).view(-1, 1, 1, 32)
        x = F.pad(images[chosen], (4, 4, 4, 4))[each, channels, rows, columns]
        flip = torch.rand(len(chosen), 1, 1, 1, device=device) < 0.5
        x, y = (torch.where(flip, x.flip(3), x).float() / 255 - mean) / std, labels[chosen]
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-amp"):
            logits = network(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum.add_(loss.detach())
        hits.add_((logits.argmax(1) == y).sum())

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    order, begun = torch.randperm(IMAGES, device=device), wait()
    # for a fixed time, whereas the harness warms up until two windows agree
    while wait() - begun < WARMUP_S[device.type]:
        train(order[:size])
    if rest := IMAGES % size:
        train(order[:rest])
    batches = order.split(size)[: case["steps"]]
    start = wait()
    for chosen in batches:
        train(chosen)
    seconds = wait() - start
    assert float(loss_sum) < float("inf"), "the loss is inf or NaN"
    return {
        "seconds": seconds,
        "images": sum(map(len, batches)),
        "shared": [name for name in sys.modules if name.split(".")[0] == "bench"],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
