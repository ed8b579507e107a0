"""What searches look for, as data: by what and when one compares its trials, and how much memory
the largest batch leaves free.

Asynchronous successive halving (ASHA: Li et al., "A System for Massively Parallel Hyperparameter
Tuning", MLSys 2020) gives every trial ``grace`` epochs, and the better ones ``reduction`` times as
many, repeatedly. The epochs at which it decides are its rungs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.base.plain import read_value

SEARCH_METRICS = {
    "test_accuracy": "higher",
    "test_loss": "lower",
    "train_accuracy": "higher",
    "train_loss": "lower",
}
"""The columns of an epoch by which trials may be compared, and which direction is better."""


@dataclass(frozen=True)
class Halving:
    """How a search compares trials.

    Attributes:
        metric: a key of `SEARCH_METRICS`.
        epochs: length of a whole trial.
        grace: epochs before which no trial is ended.
        reduction: about one in this many trials at a rung continues.
        trials: the axes that distinguish each trial, with their values as in records, in the
            order in which they run.
    """

    metric: str
    epochs: int
    grace: int
    reduction: int
    trials: Sequence[Mapping[str, str]] = ()

    @property
    def higher(self) -> bool:
        return SEARCH_METRICS[self.metric] == "higher"

    @property
    def rungs(self) -> list[int]:
        """Return the numbers of epochs after which a trial may be ended, ascending.

        >>> Halving("test_loss", epochs=9, grace=1, reduction=3).rungs
        [1, 3]
        """
        rungs, epochs = [], self.grace
        while epochs < self.epochs:
            rungs.append(epochs)
            epochs *= self.reduction
        return rungs


def read_halving(kept: object) -> Halving | None:
    """Read the search from a folder's configuration; None if there is no valid one, as people may
    have edited it."""
    if not isinstance(kept, dict):
        return None
    try:
        found: Halving = read_value(
            Halving, {one.name: kept[one.name] for one in fields(Halving) if one.name in kept}
        )
    except (ValueError, TypeError):
        return None
    sound = (
        found.epochs > found.grace >= 1 and found.reduction >= 2 and found.metric in SEARCH_METRICS
    )
    return found if sound else None


FREE_MARGIN = 0.05
"""Share of memory that the recommended batch leaves free."""


def read_goal(kept: Any) -> tuple[int | None, float]:
    """Read the step and the margin of a folder's last search from ``search`` in its configuration;
    None and `FREE_MARGIN` by default."""
    goal = kept if isinstance(kept, dict) else {}
    step, margin = goal.get("step"), goal.get("margin")
    return (
        step if isinstance(step, int) and step > 0 else None,
        margin if isinstance(margin, float) and 0 <= margin < 1 else FREE_MARGIN,
    )
