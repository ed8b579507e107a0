"""A poller of memory, which does nothing else: `python bench/crosscheck/poller.py PID [UUID]`.

With a UUID it reads all memory in use on that card, directly from pynvml. Without one it reads the
memory of process PID from /proc, without pages of files. It shares no code with the harness. Until
its standard input ends, it prints a line per reading: CLOCK_MONOTONIC in s, and bytes. The first
reading is taken before anything else happens.
"""

import os
import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path

EVERY_S = 0.005  # the harness reads every 15 ms
PAGE = os.sysconf("SC_PAGE_SIZE")


def read_card(uuid: str) -> Callable[[], int]:
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        # v1 includes memory that the driver reserves
        pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
    except (AttributeError, TypeError, pynvml.NVMLError):
        return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(card).used)
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).used)


def read_process(pid: int) -> Callable[[], int]:
    statm = Path(f"/proc/{pid}/statm")

    def read() -> int:
        resident, shared = statm.read_text().split()[1:3]
        return (int(resident) - int(shared)) * PAGE

    return read


def main() -> None:
    """Poll until standard input ends, or the process does."""
    pid, *uuid = sys.argv[1:]
    read = read_card(uuid[0]) if uuid else read_process(int(pid))
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            try:
                print(time.monotonic(), read(), flush=True)
            except (OSError, IndexError):
                return  # the process has ended
            if selector.select(EVERY_S):
                return


if __name__ == "__main__":
    main()
