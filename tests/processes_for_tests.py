"""What a `bench.run.Process` of a test does."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from multiprocessing.connection import Connection


def wait(told: Connection) -> None:
    """Say where it was forked, then wait until nobody listens, or the parent says something."""
    told.send(os.getppid())
    try:
        told.recv()
    except EOFError:
        return


def say(told: Connection, *content: object) -> int:
    print(*content)
    for one in content:
        told.send(one)
    return len(content)


def send_what_only_it_has(told: Connection) -> None:
    """Of a class that whoever reads it cannot import."""
    sys.modules["nowhere"] = type(sys)("nowhere")
    kind = type("Odd", (), {"__module__": "nowhere"})
    sys.modules["nowhere"].Odd = kind  # type: ignore[attr-defined]
    told.send(kind())


def be_late(told: Connection) -> None:
    """Its stacks come 1.5 s after they are asked for."""
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(1.5), faulthandler.dump_traceback()))
    told.send(None)
    while True:
        time.sleep(0.1)
