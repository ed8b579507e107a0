"""The child processes of a card: one at a time, shown, logged and stopped in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.card.folder import Entry, State
from bench.processes import stop_signals
from bench.text import clean

ROOT = Path(__file__).parents[2]

_GRACE_S = 8.0  # a sweep stopped by SIGINT ends its worker in 3 s and prints its report


@dataclass(frozen=True)
class Ended:
    """A child process that has ended. ``stopped`` is None if it ended by itself, else why it was
    stopped: time was up, or the user asked for it. ``last`` is the last line that it printed."""

    returncode: int
    stopped: State | None
    stdout: str
    last: str

    def conclude(self, state: State, line: str = "") -> Entry:
        return Entry(state, returncode=self.returncode, line=line or self.last)

    def read_answer(self) -> Any:
        """Return the JSON that it printed; None if it printed none."""
        try:
            return json.loads(self.stdout)
        except ValueError:
            return None


def build_environment() -> dict[str, str]:
    """Return the environment of children: this process's, with this harness on the path."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": paths}


@dataclass
class ChildRunner:
    """Runner of one child process at a time: shows and logs its output, and stops it at ``until``,
    by time.monotonic(). A context manager that turns the first Ctrl-C or SIGTERM into a clean stop
    of the child, and the second into an immediate end. ``variables`` are set for every child."""

    log: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    until: float = float("inf")
    closing: bool = False
    """Whether the report is made, which a first request to stop does not end, but a second does."""

    asked: Callable[[], int] = lambda: 0
    """Returns the number of the signal by which the user stopped it; 0 if none."""

    _child: subprocess.Popen[str] | None = None
    _signals: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> ChildRunner:
        self.asked = self._signals.enter_context(stop_signals(self._end_group))
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    @property
    def stopped(self) -> int:
        return self.asked()

    def run(
        self,
        arguments: Sequence[str],
        enough: Callable[[], bool] = lambda: False,
        quiet: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run Python; send SIGINT when time is up or ``enough()`` is true. If ``quiet``, standard
        output is an answer and not shown. ``variables`` are set for this child."""
        # the log of a shared folder shows the commands, but not where this clone is
        arguments = [text.removeprefix(f"{ROOT}{os.sep}") for text in arguments]
        kept: dict[str, list[str]] = {"stdout": [], "stderr": []}
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n== {' '.join(arguments)} ==\n")
            self._child = child = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**build_environment(), **self.variables, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # its own, so that Ctrl-C reaches the child only through this class
                start_new_session=True,
            )
            pumps = []
            for name, lines in kept.items():
                places = () if quiet and name == "stdout" else (log, sys.stderr)
                given = (getattr(child, name), lines, places)
                pumps.append(threading.Thread(target=_pump, args=given, daemon=True))
                pumps[-1].start()
            asked = self._wait(child, enough)
            for pump in pumps:
                pump.join(5)
            self._child = None
        said = [line for lines in kept.values() for line in lines[-20:] if line.strip()]
        last = clean(said[-1]).removeprefix("error: ") if said else f"rc {child.returncode}"
        stopped = (State.INTERRUPTED if self.stopped else State.CUT) if asked else None
        return Ended(child.returncode, stopped, "".join(kept["stdout"]), last)

    def _wait(self, child: subprocess.Popen[str], enough: Callable[[], bool]) -> bool:
        """Wait for the child, ask it to stop and then kill it; return whether it was asked."""
        asked = 0.0
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
                break
            now = time.monotonic()
            unwanted = self.stopped and not self.closing
            if not asked and (unwanted or now > self.until or enough()):
                asked = now
                child.send_signal(signal.SIGINT)
            elif asked and now > asked + _GRACE_S:
                self._end_group()
        return bool(asked)

    def _end_group(self) -> None:
        if self._child:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)


def _pump(stream: IO[str], kept: list[str], places: Sequence[IO[str]]) -> None:
    for line in stream:
        kept.append(line)
        for place in places:
            place.write(line)
            place.flush()


def say(line: str) -> None:
    print(clean(line), file=sys.stderr, flush=True)
