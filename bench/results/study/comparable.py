"""What may stand together: of what a row's time is, and whether the rows of a comparison are of the
same.

A time is of an epoch, or where a command tells of none, of as many items; of one that does not
count its items, of as many steps, or updates of several optimizers; of one that tells nothing, of a
run. Times of other numbers of
items are compared for one number. How much a step or a run does is not known: its times are
compared only where the settings that may change it, `AMOUNT`, are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from bench.base.inject import VERSIONS
from bench.base.origin import LABELS
from bench.base.text import clean, join_words, name_first
from bench.networks.workloads import IMAGES
from bench.results.store.rows import Row, group
from bench.results.study.warnings import WARNINGS
from bench.schema.axis import Trait, is_own, name_axis, name_column
from bench.schema.case import (
    AXES,
    FOLLOWS,
    SAME_QUESTION,
    UNTIMED,
    Case,
    find_axis,
    list_affecting,
    list_axes,
)
from bench.schema.command import ITEMS, runs_from
from bench.schema.record import COMPARABLE, Environment

AMOUNT = ("batch_size", "accumulate", "world_size", "epochs", "fraction", "vary", "command")
"""Axes that may change how much a step or a run of a command does."""

_PER_ITEM = ("epoch_time_s", "epoch_time_low_s", "epoch_time_high_s")

TELL_ITEMS = "call bench.step(items=len(x)) in the script, and items a second are compared"

_TELL_ALWAYS = "let every run take more steps, and " + TELL_ITEMS


_R = TypeVar("_R", bound=Row)


class Period(NamedTuple):
    """What a time is of: ``number`` of ``what``, such as items or runs, which are an epoch if
    ``whole``. ``amount`` has the values of `AMOUNT` if these are not counted."""

    what: str
    number: float
    whole: bool
    amount: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.what == "runs":
            return "a run"
        number = f"{self.number:,.0f} {self.what}"
        return number if not self.whole else f"an epoch of {number}" if self.number else "an epoch"


def find_period(run: Row) -> Period:
    """Return what the time of a run is of, whether it has one or not."""
    number = 0.0 if math.isnan(run.train_images) else float(run.train_images)
    if run.command is None:
        return Period(run.unit or IMAGES, number, whole=True)
    if run.unit == "items":
        return Period(run.unit, number, whole=bool(run.steps_per_epoch == run.steps_per_epoch))
    return Period(run.unit, number, False, tuple(getattr(run, name) for name in AMOUNT))


def restate(runs: Iterable[Row]) -> None:
    """Give the times of rows that count the same, of one network and its data, but other numbers of
    them, as those of `ITEMS`. Data of other sizes in two sweeps are other data, but a script may
    tell now of epochs, now of none."""
    counted = [run for run in runs if run.timed and not run.period.amount and run.period.number]
    tell = attrgetter("model", "dataset", "period.what")
    for alike in group(counted, lambda run: (*tell(run), run.command is None and run.sweep)):
        if len({run.period for run in alike}) == 1:
            continue
        for run in alike:
            for name in _PER_ITEM:
                setattr(run, name, getattr(run, name) * ITEMS / run.train_images)
            vars(run).update(train_images=ITEMS, period=Period(run.period.what, ITEMS, whole=False))


def find_factor(a: Any, b: Any) -> float:
    """Return what a time of ``b``, a run or a result, is multiplied by to be of as many items as
    one of ``a``; both count them, or are of equal steps or runs."""
    ours, theirs = a.period.number, b.period.number
    return ours / theirs if ours and theirs else 1.0


def take_alike(runs: Sequence[Row]) -> list[Row]:
    """Return the runs whose times are of what those are that tell most: items before steps, these
    before a run. Without a time a run is of anything."""
    known = [run.period.what for run in runs if run.timed]
    most = min(known, key=lambda what: _LESS.index(what) if what in _LESS else -1, default="")
    return [run for run in runs if not run.timed or run.period.what == most]


_LESS = ("steps", "updates", "runs")  # what tells less than counted items, the least last


def refuse_together(runs: Iterable[Any]) -> str:
    """Return why the times of some runs, or results, say nothing of each other, and what fixes
    that, in one sentence; empty if they can be compared."""
    timed = [run for run in runs if run.timed]
    periods = [*dict.fromkeys(run.period for run in timed)]
    if len({(one.what, one.amount) for one in periods}) < 2:
        return ""
    named = [*dict.fromkeys(map(str, periods))]
    if len({one.what for one in periods}) > 1:
        fix = _TELL_ALWAYS if any(one.what == "runs" for one in periods) else TELL_ITEMS
        return f"Times of {join_words(named)} say nothing of each other: {fix}."
    varying = [
        name_axis(name)
        for name in list_axes(timed, AMOUNT)
        if len({getattr(run, name) for run in timed}) > 1
    ]
    what = f"A {periods[0].what[:-1]} with another {join_words(varying)}"
    return f"{what} may do more or less, so its time is not compared: {TELL_ITEMS}."


def refuse_alone(one: Any) -> str:
    """Return why nothing is compared with a run or a result, see `find_unfit`; empty if it can
    be. Of a run that went on from what an earlier one left, how much it had to do is not known
    where it does not count it."""
    if one.carried and one.period.what == "runs":
        return "went on from what an earlier run wrote"
    return str(one.steps_apart or one.items_apart)


def refuse_base(one: Any) -> str:
    """Return why the times of others are not compared with that of a result, as their baseline;
    empty if they can be. A time of steps that wait for the host, and do not settle, is known by
    repeats alone."""
    unsettled = one.unsettled and WARNINGS["unsettled"].forbids(one.repeats)
    return refuse_alone(one) or ("waits for the host and does not settle" if unsettled else "")


def refuse_pair(a: Any, b: Any) -> str:
    """Return why the times of two runs or results say nothing of each other; empty if they can be
    compared."""
    return refuse_alone(a) or refuse_alone(b) or refuse_together((a, b))


# ------------------------------------------------------------------------------- what was learnt


def refuse_part(a: Any, b: Any) -> str:
    """Return why sums over the measured steps of two runs or results, as of energy, say nothing of
    each other; empty if both measured as much of an epoch, as far as that is known."""
    if a.part == b.part or not (a.part_known and b.part_known):
        return ""
    fix = "use --fraction 1" if a.command is None else "end both by --steps"
    return f"{a.part:.3g} and {b.part:.3g} of an epoch cannot be compared; {fix}"


def refuse_learnt(a: Any, b: Any, axis: str) -> str:
    """Return why the losses and errors of two runs or results, which differ in ``axis`` if any, say
    nothing of each other: they are of other data, of another part of an epoch or, before the end of
    one, of a change to learning, which another version of the code is not. Empty if they can be
    compared."""
    own = () if a.workload == IMAGES else list_affecting(Trait.DRAWS)
    names = ("dataset_fingerprint", *list_affecting(Trait.DATA), *own)
    values = [(name, getattr(a, name), getattr(b, name)) for name in names]
    # a run that ended before its worker could look does not know its data
    unlike = [name for name, x, y in values if x != y and (name in AXES or (x and y))]
    if unlike:
        return f"losses on other data say nothing of each other: {name_first(unlike, 2)} differs"
    if why := refuse_part(a, b):
        return why
    learns = axis not in ("", "machine") and Trait.LEARNING in find_axis(axis).affects
    # versions of the code are compared as two folders are: did what equal steps learn change?
    versions = is_own(axis) and runs_from(a.command, name_column(axis))
    if a.part_known and a.part < 1 and learns and not versions:
        fix = "let the script train for one, and tell of it by bench.epoch(loss=…)"
        fix = "use --fraction 1" if a.command is None else fix
        return f"less than an epoch does not show what it does to learning; {fix}"
    return ""


# -------------------------------------------------------------------------- what a row says it is


def find_unfit(runs: Iterable[Row]) -> None:
    """Set of each run of a command what forbids to compare it, in words, empty if nothing does:
    ``steps_apart`` if repeats of its case took other numbers of steps, ``items_apart`` if its steps
    have another number of items than its batch size says."""
    timed = [run for run in runs if run.command is not None and run.timed]
    for alike in group(timed, attrgetter("sweep", "asked", "environment")):
        took = [_count_steps(run) for run in alike if run.is_repeat]
        if len({*took}) > 1:
            each = join_words([f"{n:,}" if n is not None else "more" for n in took])
            for run in alike:
                vars(run).update(steps_apart=f"other steps: repeats took {each}")
    counted = [run for run in timed if run.step_items > 0 and run.batch_size]
    for alike in group(counted, attrgetter("sweep", "environment", *_SAME_RATIO)):
        right = _find_ratio(alike)
        for run in alike:
            if not _agrees(run, right):
                size = f"its batch size is {run.batch_size:,}"
                vars(run).update(items_apart=f"steps of {run.step_items:,.0f} items: {size}")


def _count_steps(run: Row) -> int | None:
    """Return how many steps a script took; None if ``--steps`` ended it before its end. Of too few
    for a warm-up the first and the sampled one are not measured."""
    if run.measured_steps != run.measured_steps:
        return 0
    if run.steps is not None and run.measured_steps >= run.steps:
        return None
    warm = run.warmup_steps if run.warmup_steps == run.warmup_steps else 2
    return int(run.measured_steps + warm)


_SAME_RATIO = tuple(
    name
    for name in AXES
    if name not in ("batch_size", "precision", *FOLLOWS["precision"], *SAME_QUESTION, *UNTIMED)
)
"""Axes on which rows agree whose steps have as many items for each of their batch size."""


def _find_ratio(alike: Sequence[Row]) -> float | None:
    """Return how many items a step has for each of the batch size: one, if any row says so, or else
    what most settings agree on, as tokens may be 128 an item; None if no more agree on one than on
    another."""
    if any(_agrees(run, 1.0) for run in alike):
        return 1.0
    settings = {(r.batch_size, r.precision, r.step_items / r.batch_size) for r in alike}
    (best, most), *others = Counter(ratio for *_, ratio in settings).most_common()
    return None if others and others[0][1] == most else best


def _agrees(run: Row, ratio: float | None) -> bool:
    return ratio is not None and abs(run.step_items - ratio * run.batch_size) < 0.5


# ------------------------------------------------------------------------------------ what ran them


def tell_but(free: Collection[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that tells runs or results apart that differ in more than the axes
    ``free``: where they ran, all other axes, and what ran them."""
    names = (name for name in AXES if name not in free)
    tell: Callable[[Any], tuple[Any, ...]] = attrgetter("ran_on", *names, "environment", "kind")
    return tell


def list_unlike(
    rows: Sequence[Row], case: Case, environment: Environment, columns: Iterable[str]
) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield each of ``columns`` in which a run of a case now would differ from rows, its value now,
    and these rows. What belongs to a network or a file is only compared with rows of the same data
    on the same device."""
    for name in columns:
        if case.command is not None and name in VERSIONS:
            continue  # its own Python tells them once it runs
        axes, now = {*COMPARABLE[name], "device"}, clean(getattr(environment, name) or "")
        if "device" not in COMPARABLE[name]:
            axes |= {*list_affecting(Trait.DATA)}
        alike = (row for row in rows if all(getattr(row.case, a) == getattr(case, a) for a in axes))
        if others := [row for row in alike if getattr(row, name) != now]:
            yield name, now, others


def tell_known(row: Row, column: str) -> str:
    """Return the value of one of `COMPARABLE`, empty if a row does not know it."""
    none = "none" if column == "variables" and row.torch else ""
    return str(getattr(row, column) or none)


CONDITIONS: dict[str, tuple[str, ...]] = {
    "kind": (),
    "gpu_uuid": ("device", "command", "vary"),
    "power_limit_w": ("power_limit",),
    "ecc": (),
    "mig": (),
    "cpu_governor": (),
    "torch_threads": ("device", "world_size", "parallel"),
    "lanes_beside": (),
}
"""What times depend on beside `COMPARABLE`, and the axes that choose it. Rows that differ in one of
these are compared, and it is said: a sweep goes on where a limit was changed, or on another card of
its kind."""


def tell_condition(run: Any, name: str) -> str:
    """Return the value of one of `CONDITIONS`, empty if a run does not know it: of the power limit
    that of each GPU in W, and of lanes whether there were others."""
    if name == "lanes_beside":
        return "some" if run.lanes_beside > 0 else "none"
    if name == "kind":
        return LABELS.get(run.kind, str(run.kind))
    value = run.gpu_power_limit_w if name == "power_limit_w" else getattr(run, name)
    return "" if value != value else f"{value:g}" if isinstance(value, float) else str(value)


def list_conditions(runs: Iterable[Any]) -> Iterator[tuple[str, list[str], list[Any]]]:
    """Yield the `CONDITIONS` in which runs that stand together differ though no axis chose it, with
    their values and these runs. Lanes have a GPU each."""
    runs = [*runs]
    for name, axes in CONDITIONS.items():
        lane = ("lane",) if name == "gpu_uuid" else ()
        yield from _list_differing(runs, name, ("ran_on", *lane, *axes), tell_condition)


def list_mixed(
    rows: Sequence[_R], columns: Iterable[str] = COMPARABLE, *within: str
) -> Iterator[tuple[str, list[str], list[_R]]]:
    """Yield each of ``columns`` in which rows differ that agree on all that it belongs to, and on
    what they are ``within``, with its values and these rows. A row that ended before its worker
    could look has none."""
    for name in columns:
        yield from _list_differing(rows, name, (*within, *COMPARABLE[name]), tell_known)


def _list_differing(
    rows: Iterable[_R], name: str, within: Iterable[str], tell: Callable[[_R, str], str]
) -> Iterator[tuple[str, list[str], list[_R]]]:
    """Yield the column, its values and the rows, for rows that agree on what they are ``within``
    and of which several know other values."""
    for alike in group(rows, attrgetter(*within)):
        values = [*filter(None, dict.fromkeys(tell(row, name) for row in alike))]
        if len(values) > 1:
            yield name, values, alike


def take_last(
    rows: Sequence[_R], columns: Iterable[str] = COMPARABLE
) -> tuple[list[_R], list[str]]:
    """Return the rows that agree with the last ones in these columns, see `list_mixed`, and how the
    others differ from them, in words."""
    unlike, differing = set[int](), list[str]()
    for name, values, alike in list_mixed(rows, columns):
        now = next(filter(None, (tell_known(row, name) for row in reversed(alike))))
        differing += [f"{name} was {before}, now {now}" for before in values if before != now]
        unlike.update(id(row) for row in alike if tell_known(row, name) not in ("", now))
    return [row for row in rows if id(row) not in unlike], differing
