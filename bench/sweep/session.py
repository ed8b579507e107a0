"""What all commands that run cases on lanes do: start an executor, open a folder, stop in time."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.case import Case, spell_cases
from bench.environment.packages import PACKAGES, refuse_missing
from bench.executors import Executor, Lane, build_executor
from bench.store.writer import Store
from bench.sweep.crew import Crew
from bench.sweep.folder import describe_config, read_past, refuse_unwritable
from bench.sweep.hardware import Hardware
from bench.sweep.loop import Loop
from bench.sweep.options import Options

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def start_executor(options: Options) -> Iterator[Executor]:
    """The executor of a sweep, once nothing is known to fail on the way. Raises UsageError: --out
    cannot be written, or a package is missing."""
    refuse_unwritable(options.out)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # whose lack is noted
    with closing(build_executor(options.executor, options.settings)) as executor:
        yield executor


@contextmanager
def open_loop(
    hardware: Hardware, executor: Executor, out: Path, options: Options
) -> Iterator[Loop]:
    """Hold the folder of a class of hardware within ``out``, which its lanes measure into."""
    say = partial(print, "waiting for", file=sys.stderr, flush=True)
    with Store(out / hardware.folder, options.wait_s, say) as store:
        lanes = {lane.name: known for lane, known in hardware.lanes}
        notes = [*hardware.inputs.warnings, *store.set_aside]
        yield Loop(store, executor, lanes, options, notes)


def continue_folder(
    loop: Loop, cases: Sequence[Case], search: Mapping[str, Any] | None = None
) -> pd.DataFrame:
    """The rows of a loop's folder that those of ``cases``, which a command chooses as it goes, can
    be compared with. Writes the configuration, in which the cases of a sweep that is there already
    stay. Raises UsageError: as `read_past`."""
    comparable, _ = read_past(loop.store.folder, cases, loop.options, loop.inputs)
    before = loop.store.read_config()
    config = describe_config([], loop.options, loop.inputs, before, search)
    planned = {name: before[name] for name in (*spell_cases([]), "repeats") if name in before}
    loop.store.write_config(config | planned)
    return comparable


@contextmanager
def hire_crew(
    work: Mapping[Loop, Hardware], admit: Callable[[Lane], Loop | None] = lambda lane: None
) -> Iterator[tuple[Crew, Callable[[], int]]]:
    """The lanes of each class of hardware at work for its loop, and what `stop_signals` yields;
    ``admit`` is as in `Crew`."""
    first = next(iter(work))
    most = 1 if first.options.quiet else 0
    with (
        stop_signals(first.executor) as stopped,
        Crew(first.executor, stopped, most, admit) as crew,
    ):
        for loop, hardware in work.items():
            for lane, _ in hardware.lanes:
                crew.add(loop, lane)
        yield crew, stopped


@contextmanager
def stop_signals(executor: Executor) -> Iterator[Callable[[], int]]:
    """Turn the first Ctrl-C or SIGTERM into a clean stop, and the second into an immediate one;
    yields a function that returns the number of the signal that came, 0 before."""
    received = 0

    def stop(number: int, _: object) -> None:
        nonlocal received
        if received:
            executor.kill()
            if os.isatty(2):
                os.write(2, b"\x1b[?25h\n")  # the live line hides the cursor
            os._exit(128 + number)
        received = number
        # print() may have been interrupted half way and cannot be entered twice
        os.write(2, b"\nstopping: what is done is kept; again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
