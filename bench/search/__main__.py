"""`python -m bench.search`: find the best settings for training, the poorer trials ended early.

Trials are cases of several epochs, drawn over learning rate, loss scale, batch size or any other
axis, and run like those of a sweep. After some epochs the poorer ones end, by ASHA; see
docs/search.md.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from bench.case import Case, telling_axes
from bench.environment import PACKAGES, refuse_missing
from bench.errors import UsageError
from bench.executors import Settings, build_executor
from bench.flags import run_command
from bench.halving import Halving, read_halving
from bench.record import MEASURED, EpochRow, Record, Status
from bench.search.ladder import Climber, Curve, Ladder
from bench.search.options import Search, parse_arguments
from bench.store.attempts import keep_latest
from bench.store.reader import read_cases, read_epochs, read_records
from bench.store.writer import Store, StoreError
from bench.sweep.__main__ import Loop, say_waiting, stop_signals
from bench.sweep.display import Display
from bench.sweep.options import Plan, print_cases
from bench.sweep.preflight import (
    default_out,
    describe_config,
    find_inputs,
    read_past,
    refuse_unwritable,
    try_models,
)
from bench.sweep.schedule import REPEATED
from bench.text import clean
from bench.wall.records import name_family

if TYPE_CHECKING:
    import pandas as pd

_WIDTH = 120  # columns where there is no terminal to ask and COLUMNS is not set


def main(argv: Sequence[str] | None = None) -> int:
    """Search for the best settings.

    Returns:
        0; 1 where no trial was measured or the disk is full; 2 for a usage error; 130 or 143 where
        it was stopped.
    """
    return run_command(search, argv)


def search(argv: Sequence[str]) -> int:
    """Do what the command line says; the return code.

    Raises:
        UsageError: it cannot be done.
    """
    asked = parse_arguments(argv, __doc__)
    if asked.dry_run:
        drawn = asked.plan(try_models(asked.plan().trials, asked.options))
        print_cases(Plan(drawn.trials), repeats=1)
        print(describe_rungs(drawn.halving))
        return 0
    try:
        return run_search(asked)
    except StoreError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return 1


def describe_rungs(halving: Halving) -> str:
    """What is decided when, and how many epochs that may take."""
    of = f"by {halving.metric}, about one in {halving.reduction} goes on"
    rungs = " and ".join(map(str, halving.rungs))
    least, most = (len(halving.trials) * n for n in (halving.rungs[0], halving.epochs))
    return f"rungs: after {rungs} of {halving.epochs} epochs, {of}; {least} to {most} epochs in all"


def run_search(asked: Search) -> int:
    """Run the trials into --out and print what they found; the return code."""
    options = asked.options
    refuse_unwritable(options.out)
    refuse_missing(name for name in PACKAGES if name != "nvidia-ml-py")  # whose lack is noted
    Ladder(asked.halving)  # refuses where Ray Tune is not installed
    inputs = find_inputs(asked.plan().trials, options)
    drawn = asked.plan(inputs.settle)
    trials, halving = drawn.trials, drawn.halving
    out = options.out or default_out(inputs.platforms)
    with Store(out, options.wait_s, say_waiting) as store:
        comparable, _ = read_past(out, trials, options, inputs)
        before = store.read_config()
        earlier = read_halving(before.get("halving"))
        refuse_other_search(out, earlier, halving)
        if earlier and len(earlier.trials) > len(trials):
            halving = earlier
        config = describe_config(trials, options, inputs, before)
        store.write_config({**config, "halving": halving.describe()})
        executor = build_executor(
            options.executor, Settings(options.timeout_s, options.allow_shared)
        )
        with stop_signals(executor) as stopped:
            loop = Loop(store, executor, inputs, options, [*inputs.warnings, *store.set_aside])
            past = read_trials(out, comparable, trials, halving.metric, options.retry)
            ended = run_trials(loop, trials, past, halving, stopped, asked.time_s)
    found = print_findings(out, halving)
    if stopped():
        print(f"stopped; run the same command with --out {out} to go on", file=sys.stderr)
        return 128 + stopped()
    if not ended:
        print(
            f"the time limit was reached; run the same command with --out {out} to go on",
            file=sys.stderr,
        )
    return 0 if found else 1


def refuse_other_search(out: Path, before: Halving | None, now: Halving) -> None:
    """Refuse to compare trials by other rules than those that ended the earlier ones.

    Raises:
        UsageError: a folder's search differs in more than the number of its trials.
    """
    if before is None:
        return
    changed = [
        f"--{name.replace('_', '-')} was {value}"
        for name, value in before.rules.items()
        if now.rules[name] != value
    ]
    both = min(len(before.trials), len(now.trials))
    if not changed and list(before.trials[:both]) != list(now.trials[:both]):
        changed = ["its trials were drawn of other settings, or by another --seed"]
    if changed:
        raise UsageError(
            f"--out {out}: has another search: {', '.join(changed)}; give the same, or choose "
            "another --out"
        )


@dataclass
class Trials:
    """The trials so far.

    Attributes:
        attempts: how often each was tried.
        done: how those ended that are not to be tried again.
        curves: of those of them that trained, in the order in which they ended.
    """

    attempts: dict[Case, int] = field(default_factory=dict)
    done: dict[Case, Status] = field(default_factory=dict)
    curves: list[Curve] = field(default_factory=list)

    def find_smaller(self, case: Case) -> int | None:
        """A batch size below that of ``case`` that ran out of memory, all that matters alike."""
        family = name_family(case)
        refused = [
            other.batch_size
            for other, status in self.done.items()
            if status is Status.OOM and name_family(other) == family
        ]
        smallest = min(refused, default=case.batch_size)
        return smallest if smallest < case.batch_size else None


def read_trials(
    out: Path,
    frame: pd.DataFrame,
    cases: Sequence[Case],
    metric: str,
    retry: Sequence[Status],
) -> Trials:
    """Read what a folder holds of the trials.

    Args:
        frame: its rows that new ones can be compared with.
        cases: the trials.
        retry: outcomes that are tried again.
    """
    trials, wanted = Trials(), set(cases)
    first = ~frame["probe"] & ~frame["sentinel"] & (frame["anchor"] == "") & (frame["repeat"] == 1)
    rows = keep_latest(frame[first])
    epochs = read_epochs(out)
    for case, row in zip(read_cases(rows), rows.to_dict("records"), strict=True):
        if case not in wanted:
            continue
        status = Status(row["status"])
        trials.attempts[case] = max(trials.attempts.get(case, 0), int(row["attempt"]))
        if status in REPEATED or status in retry:
            continue
        trials.done[case] = status
        if status in MEASURED:
            curve = epochs.loc[epochs["record_id"] == row["record_id"]].sort_values("epoch")
            values = curve[metric].tolist()
            trials.curves.append([None if math.isnan(value) else value for value in values])
    return trials


def run_trials(
    loop: Loop,
    cases: Sequence[Case],
    trials: Trials,
    halving: Halving,
    stopped: Callable[[], int],
    time_s: float,
) -> bool:
    """Run the trials that are left, one after the other; False where the time was over before.

    Each climbs a ladder of its own, made of all that ended before it. Several at a time would share
    one, and read it from the main thread.

    Raises:
        UsageError: a trial has not got the metric.
    """
    left = [case for case in cases if case not in trials.done]
    start = monotonic()
    with Display(
        loop.store.folder, len(left), len(cases) - len(left), telling_axes(cases)
    ) as shown:
        loop.show_on(shown)
        for case in left:
            if stopped():
                break
            if monotonic() - start >= time_s:
                return False
            watch = Watch(halving.metric, Ladder(halving, trials.curves).add())
            attempt = trials.attempts.get(case, 0) + 1
            smaller = trials.find_smaller(case)
            record = loop.measure((case, 1, False), attempt, stopped, smaller, enough=watch.judge)
            if record.status in REPEATED:
                continue
            trials.done[case] = record.status
            if record.status in MEASURED:
                trials.curves.append(watch.finish(record))
    return True


@dataclass
class Watch:
    """A running trial: its metric by epoch, put to the scheduler as it comes."""

    metric: str
    climber: Climber
    curve: list[float | None] = field(default_factory=list)

    def judge(self, row: EpochRow) -> bool:
        """Whether the trial is to end after this epoch. A loss that is no number ends it."""
        value = getattr(row, self.metric) if row.train_loss is not None else None
        self.curve.append(value)
        return self.climber.judge(len(self.curve), value)

    def finish(self, record: Record) -> Curve:
        """The whole curve, with the last epoch, after which nobody asks.

        Raises:
            UsageError: the metric is empty although the loss is a number.
        """
        m = record.measurement
        if m.truncated_after is None:
            self.curve.append(getattr(m, self.metric))
        if getattr(m, self.metric) is None and m.first_bad_step is None:
            raise UsageError(
                f"--metric {self.metric} is not known of these trials: {m.missing or 'no reason'}; "
                "give another --metric, and another --out"
            )
        return self.curve


def print_findings(out: Path, halving: Halving) -> bool:
    """Print the trials, the rungs and how to confirm the best; whether any trial was measured."""
    from rich.console import Console

    from bench.report.halving import confirm, tabulate_halving
    from bench.report.text import draw_table

    console = Console(highlight=False)
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = _WIDTH
    records = read_records(out)
    for table in tabulate_halving(records, read_epochs(out), halving):
        draw_table(table, console)
        console.print()
    commands = confirm(records, read_epochs(out), halving, out)
    if commands:
        print("Confirm the best on seeds that did not choose them, then compare:")
        for command in commands:
            print(f"  {command}")
    return bool(records["status"].isin(MEASURED).any())


if __name__ == "__main__":
    sys.exit(main())
