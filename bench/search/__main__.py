"""`python -m bench.search`: find the best settings for training, the poorer trials ended early.

Trials are cases of several epochs, drawn over learning rate, loss scale, batch size or any other
axis, and run like those of a sweep. After some epochs the poorer ones end, by ASHA; see
docs/learning.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from bench.errors import UsageError
from bench.flags import command
from bench.halving import Halving, read_halving
from bench.processes import leave
from bench.record import MEASURED
from bench.search.ladder import Ladder
from bench.search.options import Search, parse_arguments
from bench.search.trials import Trials
from bench.store.reader import read_epochs, read_records
from bench.sweep.display import Display
from bench.sweep.folder import default_out, describe_config, read_past
from bench.sweep.hardware import examine_alike
from bench.sweep.options import Plan
from bench.sweep.preflight import try_models
from bench.sweep.preview import describe_plan, try_lanes
from bench.sweep.session import hire_crew, open_loop, start_executor
from bench.text import count

_WIDTH = 120  # columns where there is no terminal to ask and COLUMNS is not set


@command
def main(argv: Sequence[str]) -> int:
    """Search for the best settings.

    Returns 0; 1 where no trial was measured, all lanes were lost or the disk is full; 2 for a usage
    error; 130 or 143 where it was stopped.
    """
    asked = parse_arguments(argv, __doc__)
    if asked.options.dry_run:
        try_lanes(Plan(asked.plan().trials), asked.options)
        drawn = asked.plan(try_models(Plan(asked.plan().trials), asked.options).settle)
        print(*describe_plan(Plan(drawn.trials), asked.options), sep="\n")
        halving, trials = drawn.halving, len(drawn.trials)
        rungs = " and ".join(map(str, halving.rungs))
        print(
            f"rungs: after {rungs} of {halving.epochs} epochs, by {halving.metric}, about one in "
            f"{halving.reduction} goes on; {trials * halving.rungs[0]} to "
            f"{trials * halving.epochs} epochs in all"
        )
        return 0
    return run_search(asked)


def run_search(asked: Search) -> int:
    """Run the trials into --out and print what they found; the return code."""
    options = asked.options
    Ladder(asked.halving)  # refuses where Ray Tune is not installed
    with start_executor(options) as executor:
        hardware = examine_alike(executor, asked.plan().trials, options, "which round differently")
        inputs = hardware.inputs
        drawn = asked.plan(inputs.settle)
        halving = drawn.halving
        out = options.out or default_out(inputs.platforms)
        with open_loop(hardware, executor, out, options) as loop:
            comparable, _ = read_past(out, drawn.trials, options, inputs)
            before = loop.store.read_config()
            earlier = read_halving(before.get("halving"))
            refuse_other_search(out, earlier, halving)
            if earlier and len(earlier.trials) > len(halving.trials):
                halving = earlier
            config = describe_config(drawn.trials, options, inputs, before)
            loop.store.write_config({**config, "halving": asdict(halving)})
            trials = Trials(loop, halving, drawn.trials, comparable, monotonic() + asked.time_s)
            known = len(drawn.trials) - trials.waiting
            with (
                hire_crew({loop: hardware}) as (crew, stopped),
                Display(out, trials.waiting, known, trials.axes) as display,
            ):
                loop.show_on(display)
                crew.work([trials])
    found = print_findings(out, halving)
    if stopped():
        print(f"stopped; to go on: {options.resume(out)}", file=sys.stderr)
        return 128 + stopped()
    if trials.waiting:
        left = count(trials.waiting, "trial")
        print(f"{left} left; to go on: {options.resume(out)}", file=sys.stderr)
    # there was time for them, so that their lanes were lost
    return 0 if found and not trials.left else 1


def refuse_other_search(out: Path, before: Halving | None, now: Halving) -> None:
    """Refuse to compare trials by other rules than those that ended the earlier ones."""
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


def print_findings(out: Path, halving: Halving) -> bool:
    """Print the trials, the rungs and how to confirm the best; whether any trial was measured."""
    from bench.questions.halving import RUNGS, SEARCH, confirm, tell_rungs, tell_trials
    from bench.render.text import draw_table, open_console

    console = open_console(_WIDTH)
    records, epochs = read_records(out), read_epochs(out)
    trials = SEARCH.lay_out(tell_trials(records, epochs, halving))
    rungs = RUNGS.lay_out(tell_rungs(records, epochs, halving))
    for table in (*trials, *rungs):
        draw_table(table, console)
        console.print()
    commands = confirm(records, epochs, halving, out)
    if commands:
        print("Confirm the best on seeds that did not choose them, then compare:")
        for command in commands:
            print(f"  {command}")
    return bool(records["status"].isin(MEASURED).any())


if __name__ == "__main__":
    leave(main())
