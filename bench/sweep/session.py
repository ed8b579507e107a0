"""What commands that run cases on lanes share: the executor, locked folders, stop signals."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.case import Case
from bench.environment.packages import PACKAGES, refuse_missing
from bench.executors import Executor, Lane, build_executor
from bench.processes import stop_signals
from bench.store.writer import Store
from bench.sweep.crew import Crew
from bench.sweep.display import Display
from bench.sweep.folder import default_out, refuse_unwritable
from bench.sweep.hardware import examine_lanes, open_lanes
from bench.sweep.loop import Loop, Source
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs
from bench.sweep.threads import hold_threads


@contextmanager
def start_session(
    options: Options, cases: Sequence[Case], families: Sequence[Case] = ()
) -> Iterator[Session]:
    """Open and examine the requested lanes, and hold them.

    The batch sizes of ``families`` are not known yet. Raises UsageError: --out cannot be written, a
    package is missing, or as `open_lanes` and `examine_lanes`.
    """
    refuse_unwritable(options.out)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # only noted if missing
    with ExitStack() as held:
        alone = options.here and options.lanes in (None, 1)
        if alone and all(c.device == "cpu" and c.world_size == 1 for c in [*cases, *families]):
            held.enter_context(hold_threads(options.out))
        executor = build_executor(options.executor, options.settings)
        held.enter_context(closing(executor))
        lanes = open_lanes(executor, [*cases, *families], options)
        known = examine_lanes(executor, lanes, cases, options, families)
        out = options.out or default_out(known[lanes[0]].platforms)
        yield Session(options, executor, known, out, held)


@dataclass
class Session:
    """The lanes of a command, with the inputs of each, and the folder that they measure into."""

    options: Options
    executor: Executor
    lanes: Mapping[Lane, Inputs]
    out: Path
    held: ExitStack  # closed at the end
    stopped: int = 0
    """The number of the signal that stopped a crew, 0 for none."""

    @property
    def inputs(self) -> Inputs:
        """The inputs of the first lane."""
        return next(iter(self.lanes.values()))

    @property
    def resume(self) -> str:
        """The command that resumes this one."""
        return self.options.resume(self.out)

    def open_loop(self) -> Loop:
        """Lock the folder, and return the loop of all lanes."""
        say = partial(print, "waiting for", file=sys.stderr, flush=True)
        store = Store(self.out, self.options.wait_s, say)
        self.held.enter_context(store)
        lanes = {lane.name: known for lane, known in self.lanes.items()}
        notes = [*self.inputs.warnings, *store.set_aside]
        return Loop(store, self.executor, lanes, self.options, notes)

    @contextmanager
    def start_crew(self) -> Iterator[Crew]:
        """Yield a crew of all lanes, until a signal."""
        with (
            stop_signals(self.executor.kill) as stopped,
            Crew(self.executor, self.lanes, stopped) as crew,
        ):
            yield crew
        self.stopped = stopped()

    def run(self, source: Source, display: Display) -> None:
        """Run all that a source has, shown on ``display``."""
        with self.start_crew() as crew, display:
            source.loop.show_on(display)
            crew.work(source)
