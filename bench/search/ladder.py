"""Which trials may go on, at which rungs: Ray Tune's ASHA scheduler, called in this process.

Only Tune's scheduler is used, not its processes. They would run each trial in an actor on a cluster
of their own (4 s and 312 MB to start), which then starts the worker that measures, and they keep
trials in a store of their own, retry them, and change what a process inherits. A scheduler needs
none of that: its public methods ``on_trial_add`` and ``on_trial_result`` take a trial, of which
they read only ``trial_id``, and the result of an epoch, and return CONTINUE or STOP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from types import SimpleNamespace

from bench.errors import UsageError
from bench.halving import Halving

INSTALL = "bench.search needs Ray Tune: pip install -e '.[search]'"

Curve = Sequence[float | None]
"""The metric of each epoch of a trial so far; None if it is unknown, inf or NaN."""


_EPOCH = "epoch"


class Ladder:
    """The scheduler of one search; lanes may judge trials in several threads. It is built anew from
    the curves of the trials that have ended, in the order in which they did, so that a search can
    resume from its records. Raises UsageError: Ray Tune is not installed."""

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
        """Add a trial. Return a function of an epoch, from 1, and its metric that tells whether the
        trial is to end, as it does after the last epoch. A trial without a metric ends at once and
        counts at no rung: it can only get worse, and has no place in a percentile of the others."""
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
