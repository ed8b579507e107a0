"""The search for the largest batch of each family of cases, every probe a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bench.case import Case, telling_axes
from bench.record import flatten
from bench.store.reader import read_cases
from bench.sweep.display import Display
from bench.text import count
from bench.wall.answer import Wall, conclude
from bench.wall.records import Trial, make_probe, read_trials
from bench.wall.search import MARGIN, STEP, Ending, decide

if TYPE_CHECKING:
    import pandas as pd

    from bench.sweep.__main__ import Loop


def find_walls(
    loop: Loop,
    families: Sequence[Case],
    frame: pd.DataFrame,
    stopped: Callable[[], int],
    step: int = STEP,
    margin: float = MARGIN,
) -> dict[Case, Wall]:
    """Find the largest batch of each family, going on from the probes that ``frame`` holds.

    Args:
        loop: what makes and keeps each probe.
        families: as `bench.wall.records.name_family` names them.
        frame: the rows that new ones can be compared with.
        stopped: the number of the signal that asks to stop, or 0.
        step: images to which the walls are found.
        margin: share of memory that the recommended batches leave free.
    """
    # rows that are to be tried again count no more, but their attempts are numbered on
    trials = {
        trial.family: trial
        for trial in read_trials(frame[~frame["status"].isin(loop.options.retry)])
    }
    there = Counter(read_cases(frame[frame["probe"]]))
    known = sum(len(trials[family].probes) for family in families if family in trials)
    axes = telling_axes(families, but="batch_size")
    walls = {}
    with Display(loop.store.folder, None, known, [*axes, "batch_size", "steps"]) as display:
        loop.show_on(display)
        for family in families:
            trial = trials.get(family) or Trial(family)
            trial.batchnorm = loop.inputs.has_batchnorm(family)
            images = loop.inputs.data(family).train_images
            while not stopped():
                asked = decide(trial.probes, trial.aim(images, step))
                if isinstance(asked, Ending):
                    break
                case = make_probe(family, asked.batch_size, asked.long)
                there[case] += 1
                run = (case, 1, False)
                trial.add(flatten(loop.measure(run, there[case], stopped, probe=True)))
            goal = trial.aim(images, step)
            walls[family] = wall = conclude(trial.probes, goal, margin, trial.retried)
            name = family.label(axes) if axes else family.precision
            display.say(f"{name}: {describe_wall(wall)}")
            if trial.spilled:
                display.say(
                    f"{name}: the driver moved memory to the host; batch sizes that took more than "
                    "the GPU had free count as ones that do not fit"
                )
            if others := trial.describe_others():
                display.say(f"{name}: {others}")
    return walls


def describe_wall(wall: Wall) -> str:
    """What a search found, in one line."""
    if wall.ending is None:
        return "not found yet"
    words = [f"batch size {wall.largest} trains"] if wall.largest else []
    if wall.smallest_failing is not None:
        words.append(f"{'' if words else 'batch size '}{wall.smallest_failing} does not")
    if wall.recommended:
        words.append(f"{wall.recommended} leaves {100 * wall.margin:g} % of memory free")
    elif wall.largest and wall.ending in (Ending.FOUND, Ending.NO_WALL):
        words.append(f"none leaves {100 * wall.margin:g} % of memory free")
    if wall.ending not in (Ending.FOUND, Ending.NO_WALL):
        words.append(wall.ending.meaning)
    return ", ".join(words) + f" ({count(wall.probes, 'probe')})"
