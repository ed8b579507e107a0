"""The progress of a command, told on standard error: on a terminal by live bars, drawn by rich;
elsewhere by a plain line every `EVERY_S` of each thing that still runs."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from bench.base import processes
from bench.base.text import clean, count, write_seconds

if TYPE_CHECKING:
    from rich.table import Table

EVERY_S = 30.0
"""How often what runs is told of where there is no terminal, in s."""

_DRAWN_PER_S = 2  # each takes 1 ms of a core, and with eight lanes 2 ms


@dataclass
class _Line:
    """A thing that runs, and the phase that it is in: its ``step``, from 1, of ``total``, 0 if that
    is not known; before its first step, how long it has taken."""

    name: str
    phase: str
    began: float
    due: float  # when it is told of next, where there is no terminal
    step: int = 0
    total: int = 0
    unit: str = "step"
    beside: str = ""

    def write(self) -> str:
        took = write_seconds(round(time.monotonic() - self.began))
        of = f" of {self.total:,}" if self.total else ""
        at = f"{self.unit} {self.step:,}{of}" if self.step else took
        return ", ".join(filter(None, [self.phase, at, self.beside]))


class Progress:
    """How much of a command is done, and a line for each thing that runs, below what is said. The
    terminal's standard output is put above them as well.

    Args:
        total: the number of things to do; None if that is not known.
        noun: what one of them is called.
        limit_s: after which it ends, whatever is done; the bar is then one of time.
    """

    def __init__(self, total: int | None, noun: str = "", limit_s: float | None = None) -> None:
        self.total, self.done, self._noun, self._limit_s = total, 0, noun, limit_s
        self.live = total != 0 and _is_live()  # drawn for nothing it would only flicker
        self._lines: dict[str, _Line] = {}
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._began, self._ends, self._notice = time.monotonic(), 0.0, ""
        self._widest = 0  # of what is said beside a bar
        self._console: Any = None
        self._screen: Any = None  # rich's

    def __enter__(self) -> Self:
        global _shown
        self._outer, _shown = _shown, self
        if self.live:
            from rich.console import Console
            from rich.live import Live

            screen: Any = _Terminal(sys.stderr)
            console = Console(file=screen, force_terminal=True, force_jupyter=False)
            self._console = console
            self._screen = Live(
                console=console,
                get_renderable=self._draw,
                transient=True,
                refresh_per_second=_DRAWN_PER_S,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._screen.start()
            console.show_cursor(True)  # so that SIGKILL cannot leave the terminal without one
            processes.announce = self._take_notice
        else:
            threading.Thread(target=self._tell_of_all, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        global _shown
        _shown = self._outer
        self._closed.set()
        if self._screen:
            processes.announce = None
            self._screen.stop()
            self._screen = None

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._screen:
            from rich.text import Text

            self._console.print(Text(clean(line)))
            return
        with self._lock:
            _Terminal(sys.stderr).write(f"{clean(line)}\n")

    def begin(self, name: str, phase: str = "", key: str = "", unit: str = "step") -> None:
        """Show a thing that begins to run, known by its ``key``; its steps are called ``unit``."""
        now = time.monotonic()
        with self._lock:
            self._lines[key] = _Line(clean(name), phase, now, now + EVERY_S, unit=unit)

    def enter(self, phase: str, key: str = "") -> None:
        """Show that it enters a phase."""
        with self._lock:
            line = self._lines[key]
            line.phase, line.began, line.beside = phase, time.monotonic(), ""
            line.step = line.total = 0

    def show(self, step: int, total: int = 0, beside: str = "", key: str = "") -> None:
        """Show the step that it takes, from 1, and what is known beside that."""
        with self._lock:
            line = self._lines[key]
            line.step, line.total, line.beside = step, total, beside
        self.tell()

    def end(self, key: str = "", done: int = 1, left_s: float = 0.0) -> None:
        """Show no more of it, and so many more things as done, of which the others take ``left_s``;
        0 if that is not known."""
        if done:
            self.done += done
            self._ends = time.monotonic() + left_s if left_s else 0.0
        with self._lock:
            self._lines.pop(key, None)

    def tell(self) -> None:
        """Print a line of each thing that runs if it is due, where there is no terminal."""
        if self.live:
            return
        with self._lock:
            due = [line for line in self._lines.values() if time.monotonic() >= line.due]
            for line in due:
                line.due = time.monotonic() + EVERY_S
                self.say(f"{line.name}: {line.write()}")

    def _tell_of_all(self) -> None:
        while not self._closed.wait(1):
            self.tell()

    def _take_notice(self, notice: str) -> None:
        self._notice = notice  # by a signal handler, which must not wait for a lock

    def _draw(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        width = self._console.width - len("^C ")  # which the terminal echoes behind the bars
        size = 8 if width < 100 else 24
        with self._lock:
            rows: list[tuple[str, float, float, str]]
            rows = [(one.name, one.total, one.step, one.write()) for one in self._lines.values()]
        if self._noun:
            rows.insert(0, self._sum_up())
        # as wide as any was before, so that the bars stand still
        self._widest = max([self._widest, *(len(beside) for *_, beside in rows)])
        name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        now = Column(no_wrap=True, min_width=min(self._widest, width // 2), overflow="ellipsis")
        grid = Table.grid(name, Column(width=size), now, padding=(0, 2, 0, 0))
        grid.expand, grid.width = True, width
        for text, total, done, beside in rows:
            bar = ProgressBar(total, done, width=size, complete_style="green") if total else ""
            grid.add_row(Text(text), bar, Text(beside))
        return grid

    def _sum_up(self) -> tuple[str, float, float, str]:
        passed, name = time.monotonic() - self._began, count(self.total or self.done, self._noun)
        name = f"{self.done:,} of {name}" if self.total else name
        took = write_seconds(round(passed))
        if self._notice:
            return name, self.total or 0, self.done, self._notice
        if self.total is None and self._limit_s:
            return name, self._limit_s, passed, f"{took} of {write_seconds(self._limit_s)}"
        if (left_s := self._ends - time.monotonic()) > 0:
            took += f", about {write_seconds(max(1, round(left_s)))} left"
        return name, self.total or 0, self.done, took


_shown: Progress | None = None


@contextmanager
def watch(name: str, unit: str = "step") -> Iterator[Callable[[int, int], None]]:
    """Show something that runs for seconds, below what is shown already. Yields what tells of its
    step, from 1, and of how many there are."""
    with ExitStack() as opened:
        progress, key = _shown or opened.enter_context(Progress(None)), f"{name} {time.monotonic()}"
        progress.begin(name, key=key, unit=unit)
        try:
            yield partial(progress.show, key=key)
        finally:
            progress.end(key, done=0)


def _is_live() -> bool:
    """Return whether standard error is a terminal that draws, and this thread has it now: a command
    in the background writes among the lines of others, and other threads beside the main one."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and sys.stderr.isatty()) or os.environ.get("TERM", "") in ("dumb", "unknown", ""):
        return False
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # it is not the one that controls this process
        return True


class _Terminal:
    """Standard error, of which nothing more is written once the terminal was closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ENOTTY):
                raise
            processes.discard_output()
        return len(text)

    def flush(self) -> None:
        """Do nothing: each write is flushed."""
