"""A training script of a user's own that makes the mistake it is told to: `python this MISTAKE`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import bench


def main(mistake: str) -> int:
    if mistake == "oom":
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
    if mistake == "killed":  # which a shell tells by its own code
        os.execlp("sh", "sh", "-c", "sh -c 'kill -KILL $$'; exit $?")
    if mistake == "daemon":
        print(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
    if mistake == "returns":  # as a launcher does, or a shell's &
        subprocess.Popen(["sleep", "1.2"])
        return 0
    if mistake == "asks":
        input("go on? ")
    if mistake == "launched":  # as by torchrun, whose own error follows
        print('[rank1]:   File "/x/train.py", line 7\n[rank1]: ValueError: a shape does not fit')
        raise subprocess.CalledProcessError(1, "train.py")
    if mistake == "exits":
        print("ImportError: no flash attention, which is only slower\nno data in ./data")
        return 3
    if mistake == "late":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)
    if mistake in ("none", "silent", "daemon"):
        time.sleep(0.5 if mistake == "silent" else 0.05)  # its memory is sampled while it runs
    if mistake in ("silent", "daemon"):
        return 0
    if mistake == "epochs":
        bench.epoch(loss=9.0, accuracy=0.1)  # before the first step, as nanoGPT does
    if mistake == "bytes":
        os.write(1, b"\xff\xfe not UTF-8\n")
        return 1
    loss: dict[str, Any] = {"nan": float("nan"), "text": "high"}
    for step in range(60):
        time.sleep(0.012 if step else 0.05)
        if mistake == "dies" and step == 3:
            raise ValueError("a shape does not fit")
        bench.step(items=8, loss=loss.get(mistake, 2.0 / (step + 1)))
    if mistake == "worsens":
        bench.epoch(loss=float("nan"))
    if mistake == "epochs":
        bench.epoch(loss=0.5)
        bench.epoch(accuracy=0.75)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
