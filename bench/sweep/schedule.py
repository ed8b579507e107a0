"""How often a sweep makes each run, with which seed, and which runs it need not make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from bench.axis import Value
from bench.case import AXES, Case
from bench.record import REPEATED, Outcome, Status
from bench.store.runs import Past, Run
from bench.text import write_seconds

MOST_LOST = 3
"""So often what runs is lost with its machine before the sweep goes on without it."""

CHEAP_FRACTION = 0.2
"""Cases of at most this part of an epoch are repeated without being asked to."""

CHEAP_STEPS = 20
"""Cases of at most so many steps are too: about a fifth of an epoch of 50,000 at batch size 512."""

CHEAP_REPEATS = 3

REPEATS_S = 300.0
"""Repeats that were not asked for take at most so many s together: a card is paid for by the
second, and on a slow CPU a hundredth of an epoch takes minutes."""


def default_repeats(fractions: Sequence[Value], steps: Sequence[Value]) -> int:
    """How often each case runs where ``--repeats`` is not given, by the values of ``--fraction``
    and ``--steps`` that are; a preset that sets its own is left as it is: ``quick`` promises to be
    done in a minute.

    A part of an epoch says how a whole one would go on within the same run. A shared machine
    changes its speed in blocks of tens of seconds (72 and 119 ms a step, each steady within 3 %),
    so only repeats, which are spread over the sweep, say how the next run will be. Three runs of a
    fifth are still cheaper than one whole epoch. `Pace` leaves out those that take too long.
    """
    for values, most in ((fractions, CHEAP_FRACTION), (steps, CHEAP_STEPS)):
        if values and all(isinstance(v, (int, float)) and v <= most for v in values):
            return CHEAP_REPEATS
    return 1


@dataclass
class Pace:
    """How long the first runs of cases, of which a pass has so many, took on so many lanes; further
    passes over the cases are predicted by it."""

    cases: int
    lanes: int
    seconds: list[float]

    def predict(self) -> float:
        """The s that one more pass over the cases takes; 0 where nothing has run yet."""
        if not self.seconds:
            return 0.0
        return sum(self.seconds) / len(self.seconds) * self.cases / max(1, self.lanes)

    def fit(self, wanted: int) -> int:
        """How often each case is to run, at most ``wanted`` times: as `REPEATS_S` allows.

        >>> Pace(2, 1, [100.0, 140.0]).fit(3), Pace(2, 1, [10.0]).fit(3), Pace(2, 1, [900]).fit(3)
        (2, 3, 1)
        """
        one = self.predict()
        return min(wanted, 1 + int(REPEATS_S / one)) if one else wanted

    def describe(self, wanted: int) -> str:
        """Say what `fit` leaves out, and the flag that runs it anyway."""
        fits = self.fit(wanted)
        return (
            f"note: each case runs {write_times(fits)}, not {wanted} times: one more pass over the "
            f"cases would take about {write_seconds(self.predict())}, and repeats that are not "
            f"asked for take at most {write_seconds(REPEATS_S)} together; --repeats {wanted} runs "
            "them all"
        )


def write_times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def describe_repeats(number: int, most: bool = False) -> str:
    """How often the cases of a plan run, at ``most`` where some repeats may not be needed.

    >>> describe_repeats(3), describe_repeats(1)
    ('each 3 times, and the first once more at the end', 'each once')
    """
    again = ", and the first once more at the end" if number > 1 else ""
    return f"each {'at most ' * most}{write_times(number)}{again}"


def choose_seed(run: Run, same_seed: bool) -> int:
    """The seed of a run: repeat N has the case's plus N - 1, or all repeats have the case's.

    One epoch's loss differs from seed to seed by more than most changes do, so repeats that shared
    a seed would show no spread where there is one. The sentinel repeats the first run.
    """
    case, repeat, _ = run
    return case.seed if same_seed else case.seed + repeat - 1


def remaining_runs(
    runs: Sequence[Run],
    history: Mapping[Run, Past],
    retry: Collection[Status],
    retry_inferred: bool = False,
) -> list[Run]:
    """The runs that have no outcome yet, or one that is to be tried again."""
    again = REPEATED | set(retry)

    def remains(run: Run) -> bool:
        past = history.get(run)
        return past is None or past.status in again or (retry_inferred and past.inferred)

    left = [run for run in runs if remains(run)]
    if left:
        # a sentinel closes the sweep: what came before more runs were added closes it no longer
        left += [run for run in runs if run[2] and run not in left]
    return left


class Losses:
    """How often each thing that runs was lost with its machine; pre-emption does not count. What
    was waited for in vain is not to be run again in the same sweep."""

    def __init__(self) -> None:
        self._lost = Counter[Hashable]()

    def allow(self, what: Hashable, outcome: Outcome) -> bool:
        """Whether ``what``, which ended as `lost`, is to be run again."""
        self._lost[what] += not outcome.preempted
        return not outcome.awaited and self._lost[what] < MOST_LOST


_list_others: Callable[[Case], tuple[Value, ...]] = attrgetter(*AXES.keys() - {"batch_size"})


class OomSkips:
    """The smallest batch that ran out of memory, by the ``family`` of a case, of those alike in all
    else by default; ``history`` is what ran before, less what is to be run again."""

    def __init__(
        self, history: Mapping[Run, Past], family: Callable[[Case], Hashable] = _list_others
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
        """The smaller batch that already ran out of memory, if there is one."""
        smallest = self._smallest.get(self._family(case))
        return smallest if smallest is not None and smallest < case.batch_size else None
