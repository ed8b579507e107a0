"""What commands that run cases on lanes share: the executor, locked folders, stop signals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
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
from bench.sweep.hardware import Hardware, examine_lanes, open_lanes, refuse_unlike
from bench.sweep.loop import Loop, Source
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs


@contextmanager
def start_session(
    options: Options, cases: Sequence[Case], families: Sequence[Case] = (), alike: str = ""
) -> Iterator[Session]:
    """Open and examine the requested lanes, and hold them.

    The batch sizes of ``families`` are not known yet. If all lanes must be of one class, ``alike``
    says why, as in `refuse_unlike`. Raises UsageError: --out cannot be written, a package is
    missing, or as `examine_lanes`.
    """
    refuse_unwritable(options.out)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # only noted if missing
    with ExitStack() as held:
        executor = build_executor(options.executor, options.settings)
        held.enter_context(closing(executor))
        lanes = open_lanes(executor, [*cases, *families], options)
        classes = examine_lanes(executor, lanes, cases, options, families)
        if alike:
            refuse_unlike(classes, alike)
        out = options.out or default_out(classes[0].inputs.platforms, options.executor)
        yield Session(options, executor, classes, out, held)


@dataclass
class Session:
    """The lanes of a command, by class of hardware, and the folder that they measure into."""

    options: Options
    executor: Executor
    classes: Sequence[Hardware]
    out: Path
    held: ExitStack  # closed at the end
    loops: dict[Loop, Hardware] = field(default_factory=dict)
    stopped: int = 0
    """The number of the signal that stopped a crew, 0 for none."""

    @property
    def inputs(self) -> Inputs:
        """The inputs of the first lane."""
        return self.classes[0].inputs

    @property
    def resume(self) -> str:
        """The command that resumes this one."""
        return self.options.resume(self.out)

    def open_loop(self, hardware: Hardware | None = None) -> Loop:
        """Lock the folder of a class of hardware, by default the first, and return its loop."""
        hardware = hardware or self.classes[0]
        say = partial(print, "waiting for", file=sys.stderr, flush=True)
        store = Store(self.out / hardware.folder, self.options.wait_s, say)
        self.held.enter_context(store)
        lanes = {lane.name: known for lane, known in hardware.lanes}
        notes = [*hardware.inputs.warnings, *store.set_aside]
        loop = Loop(store, self.executor, lanes, self.options, notes)
        self.loops[loop] = hardware
        return loop

    @contextmanager
    def start_crew(
        self, admit: Callable[[Lane], Loop | None] = lambda lane: None
    ) -> Iterator[Crew]:
        """Yield a crew of all lanes, each at work for its loop, until a signal. ``admit`` as in
        `Crew`."""
        most = 1 if self.options.quiet else 0
        with (
            stop_signals(self.executor.kill) as stopped,
            Crew(self.executor, stopped, most, admit) as crew,
        ):
            for loop, hardware in self.loops.items():
                for lane, _ in hardware.lanes:
                    crew.add(loop, lane)
            yield crew
        self.stopped = stopped()

    def run(self, source: Source, display: Display) -> None:
        """Run all that a source has, shown on ``display``."""
        with self.start_crew() as crew, display:
            source.loop.show_on(display)
            crew.work([source])
