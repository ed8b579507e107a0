"""What a `bench.workers.server.Process` of a test does."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

from bench.networks.models import load_factory


def wait(connection: Connection) -> None:
    """Say where it was forked, then wait until nobody listens, or the parent says something."""
    connection.send(os.getppid())
    try:
        connection.recv()
    except EOFError:
        return


def tell_script(connection: Connection, name: str) -> None:
    """Import a factory, and say what its module found when it was imported."""
    connection.send(load_factory(name)())


def pass_on(connection: Connection) -> None:
    """Have a forked process send an open file by multiprocessing, as a DataLoader's worker sends
    the memory of a batch."""
    queue: Any = get_context("fork").SimpleQueue()
    child = get_context("fork").Process(target=lambda: (queue.put(DupFd(1)), time.sleep(60)))
    child.start()
    connection.send(os.readlink(f"/proc/self/fd/{queue.get().detach()}").partition(":")[0])  # noqa: PTH115
    child.kill()


def tell_sockets(connection: Connection) -> None:
    """Say how many sockets and pipes it has beside its streams, and how many of these each program
    has that it starts."""
    links = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    found = [n for n, to in links.items() if n > 2 and to.startswith(("socket", "pipe"))]
    connection.send((len(found), sum(map(os.get_inheritable, found))))


def leave_behind(connection: Connection) -> None:
    """Say who forked it, and who lives on beneath it: a child in a session of its own, and a daemon
    whose parent has ended."""
    code = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\n"
    code += "print(os.getpid(), flush=True)\nos.close(1)\ntime.sleep(600)"
    daemon = subprocess.check_output([sys.executable, "-S", "-c", code])
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    connection.send((os.getppid(), os.getpid(), int(daemon), child.pid))
    time.sleep(600)


def say(connection: Connection, *content: object) -> int:
    print(*content)
    for one in content:
        connection.send(one)
    return len(content)


def send_what_only_it_has(connection: Connection) -> None:
    """Of a class that whoever reads it cannot import."""
    sys.modules["nowhere"] = type(sys)("nowhere")
    kind = type("Odd", (), {"__module__": "nowhere"})
    sys.modules["nowhere"].Odd = kind  # type: ignore[attr-defined]
    connection.send(kind())


def be_late(connection: Connection) -> None:
    """Its stacks come 1.5 s after they are asked for."""
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: (time.sleep(1.5), faulthandler.dump_traceback()))
    connection.send(None)
    while True:
        time.sleep(0.1)
