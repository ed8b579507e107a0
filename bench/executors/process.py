"""A worker process, from its assignment to its end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import copyfileobj
from typing import IO

from bench.executors import Job
from bench.executors.server import Servers
from bench.processes import hold_to, list_children
from bench.worker.messages import (
    GO_ON,
    Assignment,
    Message,
    Rendezvous,
    decode,
    encode,
    encode_names,
)

_POLL_S = 0.1
_GRACE_S = 3.0
_STACK = "most recent call first"  # how faulthandler begins a stack
_DUMPED_S = 5.0  # the longest wait for stacks: on a busy machine 0.5 s was too short
_LOG_BYTES = 1_000_000  # kept of the start and of the end of a worker's output


class Worker:
    """A running `bench.worker` in its own session, so that its process group can be killed."""

    failed_rank = ""
    """Prefix of the reason why it ended, if it is one of several workers."""

    def __init__(
        self,
        job: Job,
        variables: Mapping[str, str],
        rendezvous: Rendezvous | None = None,
        servers: Servers | None = None,
    ) -> None:
        self._recent = bytearray()  # the end of its output
        started = time.monotonic()
        with hold_to(job.lane.cores):
            environment = {**os.environ, **job.lane.variables, **variables}
            servers = servers or Servers(cold=True)
            self._process, self.note, self._messages = servers.launch(environment)
        self.pid, self.pids = self._process.pid, ()
        assert self._process.stdout is not None
        self._log = threading.Thread(
            target=_keep_log, args=(self._process.stdout, job.log, self._recent), daemon=True
        )
        self._log.start()
        assignment = Assignment(
            job.case,
            job.folder,
            started,
            job.gpu_uuid,
            str(job.checkpoints.absolute()) if job.checkpoints else "",
            job.identity,
            str(job.trace.absolute()) if job.trace else "",
            rendezvous,
            judged=job.enough is not None,
            known=job.known,
        )
        self.send(encode(assignment))

    def messages(self) -> Iterator[Message | None]:
        """Yield messages as they arrive, and None at least every 0.1 s, until the worker ends."""
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._messages, selectors.EVENT_READ)
            while True:
                if selector.select(_POLL_S):
                    data = os.read(self._messages, 1 << 16)
                    if not data:
                        return
                    *lines, buffer = (buffer + data).split(b"\n")
                    for line in lines:
                        yield decode(line)
                elif self._process.poll() is not None:
                    return  # dead, but a child of it holds the pipe open
                yield None

    def send(self, line: bytes = GO_ON) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def dump_stacks(self) -> str:
        """Have the stacks of all its threads written to the log, then those of its child processes.
        Return the output of the worker itself meanwhile, including its stacks."""
        self._recent.clear()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        stacks, until = "", time.monotonic() + _DUMPED_S
        while _STACK not in stacks and time.monotonic() < until and self._process.poll() is None:
            time.sleep(0.5)
            stacks = self._recent.decode(errors="replace")
        # DataLoader workers inherit the handler; a process without one is killed slightly early
        children = list_children(self.pid)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGUSR1)
        if children:
            time.sleep(0.5)  # on a busy machine 0.1 s was too short
        return stacks

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def end(self, patiently: bool) -> int:
        """Let the worker end by itself if ``patiently``, else send SIGTERM; then SIGKILL its group.
        Return its return code, negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            if not patiently:
                self._process.send_signal(signal.SIGTERM)
            self._process.wait(_GRACE_S)
        self.kill()
        returncode = self._process.wait()
        os.close(self._messages)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._log.join(_GRACE_S)
        return returncode


@contextmanager
def start_warm(
    servers: Servers, names: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
) -> Iterator[tuple[int, IO[bytes]]]:
    """Ask a process forked by a server, as `bench.environment.asking` asks a new Python process."""
    process, _, reader = servers.launch(environment)
    assert process.stdin is not None
    assert process.stdout is not None
    log = threading.Thread(target=copyfileobj, args=(process.stdout, errors), daemon=True)
    log.start()
    with os.fdopen(reader, "rb") as answers, process.stdout:
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(encode_names(names))
                process.stdin.flush()
            yield process.pid, answers
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a model's processes hold the log open
            process.wait()
            log.join(_GRACE_S)


def _keep_log(stream: IO[bytes], path: Path | None, recent: bytearray) -> None:
    """Keep the first and the last megabyte of a worker's output, the last also in ``recent``.

    If the log cannot be written, reading goes on; otherwise the worker would block for ever."""
    head, tail, kept, left_out = 0, deque[bytes](), 0, 0
    with stream, ExitStack() as opened:
        log: IO[bytes] | None = None
        while data := os.read(stream.fileno(), 1 << 16):
            recent += data
            del recent[:-_LOG_BYTES]
            if head < _LOG_BYTES:
                head += len(data)
                with suppress(OSError):
                    # opened at the first output: without any, no log; each attempt appends to it
                    log = log or opened.enter_context((path or Path(os.devnull)).open("ab", 0))
                    log.write(data)
            else:
                tail.append(data)
                kept += len(data)
                while kept > _LOG_BYTES:
                    kept -= (gone := len(tail.popleft()))
                    left_out += gone
        with suppress(OSError):
            if log and left_out:
                log.write(b"\n[%d bytes left out]\n" % left_out)
            if log:
                log.write(b"".join(tail))
