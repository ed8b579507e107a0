"""The rungs that trials climb, and which trials may go on: Ray Tune's ASHA, asked in this process.

Tune's scheduler decides; Tune's processes are left out. They would run each trial in an actor on a
cluster of their own (4 s and 312 MB to start), which then starts the worker that measures, and they
keep trials in a store of their own, retry them, and change what a process inherits. A scheduler
needs none of that: its public methods ``on_trial_add`` and ``on_trial_result`` take a trial, of
which they look at ``trial_id`` alone, and an epoch's result, and answer CONTINUE or STOP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from types import SimpleNamespace

from bench.errors import UsageError
from bench.halving import Halving

INSTALL = "bench.search needs Ray Tune: pip install 'gpu-precision-bench[search]'"

Curve = Sequence[float | None]
"""The metric of each epoch of a trial so far; None where it is not known or no number."""


_EPOCH = "epoch"


class Ladder:
    """The scheduler of one search; trials on several lanes may be judged by several threads. It is
    made anew from the curves of the trials that have ended, in the order in which they did, so that
    a search goes on wherever its records end. Raises UsageError: Ray Tune is not installed."""

    def __init__(self, halving: Halving, curves: Iterable[Curve] = ()) -> None:
        try:
            from ray.tune.schedulers import AsyncHyperBandScheduler
        except ImportError as error:
            raise UsageError(f"{INSTALL} ({str(error).splitlines()[0]})") from None
        self._halving = halving
        self._scheduler = AsyncHyperBandScheduler(
            time_attr=_EPOCH,
            metric=halving.metric,
            mode="max" if halving.higher else "min",
            max_t=halving.epochs,
            grace_period=halving.grace,
            reduction_factor=halving.reduction,
        )
        self._added = 0
        self._lock = Lock()
        for curve in curves:
            judge = self.add()
            for epoch, value in enumerate(curve, 1):
                judge(epoch, value)

    def add(self) -> Callable[[int, float | None], bool]:
        """Let a trial begin at the foot. What is returned says whether it is to end after an epoch,
        from 1; the last one ends it anyway. One whose metric is no number ends at once and counts
        at no rung: it can only get worse, and a percentile of what others reached would have no
        place for it."""
        with self._lock:
            self._added += 1
            trial = SimpleNamespace(trial_id=str(self._added))
            self._scheduler.on_trial_add(None, trial)
        return partial(self._judge, trial)

    def _judge(self, trial: SimpleNamespace, epoch: int, value: float | None) -> bool:
        if value is None or epoch >= self._halving.epochs:
            return True
        result = {_EPOCH: epoch, self._halving.metric: value}
        with self._lock:
            answer: str = self._scheduler.on_trial_result(None, trial, result)
        return answer == self._scheduler.STOP  # type: ignore[no-any-return]
