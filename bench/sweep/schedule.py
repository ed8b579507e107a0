"""The repeats and seeds of a sweep's runs, and the runs that need not be made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

from bench.axis import Value
from bench.case import AXES, Case
from bench.record import REPEATED, Outcome, Status
from bench.store.rows import LatestAttempt, Run

MOST_LOST = 3
"""After this many losses of a run's machine, the sweep gives the run up."""

CHEAP_FRACTION = 0.2
"""Cases of at most this fraction of an epoch are repeated by default."""

CHEAP_STEPS = 20
"""Cases of at most this many steps are too: about a fifth of 50,000 images at batch size 512."""

CHEAP_REPEATS = 3


def default_repeats(grids: Iterable[Mapping[str, Sequence[Value]]]) -> int:
    """Return the repeats per case without ``--repeats``, from ``fraction`` and ``steps`` of all
    grids.

    Part of an epoch predicts a whole epoch of the same run only. The speed of a shared machine
    changes in blocks of tens of seconds (72 and 119 ms a step, each steady within 3 %), so only
    repeats, spread over the sweep, predict the next run. Three runs of a fifth are still cheaper
    than one whole epoch.
    """

    def is_cheap(axes: Mapping[str, Sequence[Value]]) -> bool:
        return any(
            axes.get(name) and all(isinstance(v, (int, float)) and v <= most for v in axes[name])
            for name, most in (("fraction", CHEAP_FRACTION), ("steps", CHEAP_STEPS))
        )

    return CHEAP_REPEATS if all(map(is_cheap, grids)) else 1


def describe_repeats(number: int) -> str:
    """Describe how often the cases run.

    >>> describe_repeats(3), describe_repeats(1)
    ('each 3 times, and the first once more at the end', 'each once')
    """
    return f"each {number} times, and the first once more at the end" if number > 1 else "each once"


def choose_seed(run: Run, same_seed: bool) -> int:
    """Return the seed of a run: for repeat N the case's plus N - 1, or the case's for all repeats.

    The loss of one epoch differs more between seeds than most changes alter it, so repeats with the
    same seed would show no spread where there is one. The sentinel repeats the first run.
    """
    case, repeat, _ = run
    return case.seed if same_seed else case.seed + repeat - 1


def remaining_runs(
    runs: Sequence[Run],
    history: Mapping[Run, LatestAttempt],
    retry: Collection[Status],
) -> list[Run]:
    """Return the runs that have no outcome yet, or one that is to be retried."""
    again = REPEATED | set(retry)

    def remains(run: Run) -> bool:
        past = history.get(run)
        return past is None or past.status in again

    left = [run for run in runs if remains(run)]
    if left:
        # a sentinel comes last: an earlier one no longer does if more runs were added
        left += [run for run in runs if run[2] and run not in left]
    return left


class Losses:
    """Number of losses with the machine, of each run."""

    def __init__(self) -> None:
        self._lost = Counter[Hashable]()

    def allow(self, what: Hashable, outcome: Outcome) -> bool:
        """Count a loss of ``what``, and return whether it is to run again."""
        self._lost[what] += 1
        return self._lost[what] < MOST_LOST


_list_others: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES.keys() - {"batch_size"})


class OomSkips:
    """The smallest batch size that ran out of memory, by the ``family`` of a case: by default, all
    axes but the batch size. ``history`` has the earlier runs, less those to be retried."""

    def __init__(
        self,
        history: Mapping[Run, LatestAttempt],
        family: Callable[[Case], Hashable] = _list_others,
    ) -> None:
        self._smallest: dict[Hashable, int] = {}
        self._family = family
        for (case, _, _), past in history.items():
            if not past.inferred:
                self.note(case, past.status)

    def note(self, case: Case, status: Status) -> None:
        """Learn from an outcome. A suspected OOM proves nothing."""
        if status is Status.OOM:
            family = self._family(case)
            known = self._smallest.get(family, case.batch_size)
            self._smallest[family] = min(known, case.batch_size)

    def blocks(self, case: Case) -> int | None:
        """Return a smaller batch size that already ran out of memory, or None."""
        smallest = self._smallest.get(self._family(case))
        return smallest if smallest is not None and smallest < case.batch_size else None
