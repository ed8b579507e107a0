"""A command in a terminal of its own, and what stands on its screen."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

pyte = pytest.importorskip("pyte", reason="pip install -e '.[test]'")


class Terminal:
    """A terminal of some size, in whose foreground a command runs."""

    def __init__(
        self,
        command: Sequence[str | Path],
        size: tuple[int, int] = (24, 100),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = pyte.HistoryScreen(size[1], size[0], history=1000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._leader, follower = pty.openpty()
        termios.tcsetwinsize(follower, size)
        given = {"TERM": "xterm-256color", **(environment or {})}
        known = {name: v for name, v in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env={**known, **given},
        )
        os.close(follower)
        self.written = b""

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size."""
        termios.tcsetwinsize(self._leader, (rows, columns))
        self.screen.resize(rows, columns)

    def write(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._leader, keys)

    def read(self, until: Callable[[list[str]], bool], timeout_s: float = 120) -> list[str]:
        """Read what is written until the screen is as asked, and return its lines. Raises
        TimeoutError: it is not, after so long."""
        end = time.monotonic() + timeout_s
        while not until(self.lines):
            if time.monotonic() > end:
                raise TimeoutError("\n".join(self.lines))
            if not select.select([self._leader], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self._leader, 1 << 16)
            except OSError:  # all ends are closed
                data = b""
            if not data:
                if until(self.lines):
                    break
                raise TimeoutError("it ended:\n" + "\n".join(self.lines))
            self.written += data
            self._stream.feed(data)
        return self.lines

    def finish(self) -> list[str]:
        """Read to the end of the command; return all lines, those above the screen first."""
        try:
            self.read(lambda _: False)
        except TimeoutError as error:
            if not str(error).startswith("it ended"):
                raise
        self.process.wait(60)
        return self.lines

    @property
    def lines(self) -> list[str]:
        """The lines down to the last that is not empty, those that scrolled away first."""
        above = [
            "".join(row[i].data for i in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        lines = [*above, *(line.rstrip() for line in self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines
