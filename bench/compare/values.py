"""Two sweeps, or two values of one axis, as the two sides of a comparison.

A case of one side is matched with the case of the other that has all axes equal, but for the one
that is compared, and for these:

- axes that follow from the compared one (`FOLLOWS`): a precision that scales its loss has a loss
  scale, and fp32 has none. Of several loss scales, each precision's main one is taken;
- ``fraction``, ``steps`` and ``profile``, which are how a case was measured. Where both sides
  measured an equal part of an epoch, these are matched; else the largest part of each. What depends
  on it is then not compared, see `bench.compare.comparison.compare`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from bench.case import (
    AXES,
    BARE,
    FOLLOWS,
    NAMED,
    SAME_QUESTION,
    Case,
    Value,
    find_leader,
    format_value,
    free_axes,
    main_loss_scale,
    parse_value,
    spell_value,
)
from bench.compare.comparison import Comparison, Part, Side, Subject
from bench.errors import UsageError, nearest


def parse_axis(texts: Sequence[str]) -> tuple[str, list[Value]]:
    """Read the name of an axis and no values or two.

    Raises:
        UsageError: the axis is unknown, there are not two values, or one cannot be of this axis.
    """
    name, *values = texts
    name = name.replace("-", "_")
    if name not in AXES:
        raise UsageError(f"--axis {texts[0]!r}: {nearest(name, list(AXES))}")
    if len(values) not in (0, 2):
        raise UsageError(
            f"--axis {' '.join(texts)}: give two values of {name}, "
            "after the sweeps: SWEEP --axis NAME VALUE VALUE"
        )
    parsed = [parse_value(name, text, f"--axis {name}") for text in values]
    if parsed and parsed[0] == parsed[1]:
        raise UsageError(f"--axis {' '.join(texts)}: give two different values of {name}")
    return name, parsed


def take_values(a: Side, b: Side | None, axis: str, values: Sequence[Value]) -> tuple[Side, Side]:
    """Take one value of ``axis`` from each sweep, or both from ``a``, and match their cases.

    Args:
        values: two; or none, where there is no other choice.

    Raises:
        UsageError: a sweep has no case of a value, or the values are not given and have to be.
    """
    sources = (a, b or a)
    if not values:
        held = [list_values(side, axis) for side in sources]
        values = held[0] if b is None else [value for found in held for value in found]
        if len(values) != 2 or any(len(found) == 0 for found in held) or values[0] == values[1]:
            raise UsageError(_ask_for_values(sources[: 1 if b is None else 2], axis))
    for side, value in zip(sources, values, strict=True):
        held_values = list_values(side, axis)
        if value not in held_values:
            raise UsageError(
                f"no case with {axis} {spell_value(value)} in {side.path}; "
                f"it has {_write(held_values)}"
            )
    one, two = (_take(side, axis, value) for side, value in zip(sources, values, strict=True))
    return match(one, two, axis)


def _ask_for_values(sides: Sequence[Side], axis: str) -> str:
    held = " and ".join(f"{side.path} has {_write(list_values(side, axis))}" for side in sides)
    if len({format_value(v) for side in sides for v in list_values(side, axis)}) < 2:
        more = "" if len(sides) < 2 else "; leave --axis out to compare equal cases"
        return f"--axis {axis}: needs two values, and {held}{more}"
    return f"--axis {axis}: name two values, as {held}"


def list_values(side: Side, axis: str) -> list[Value]:
    """The values of an axis in a sweep, in order; without that of cases it does not apply to."""
    values = dict.fromkeys(getattr(case, axis) for case in side.cases)
    return [value for value in values if value is not None or not find_leader(axis)]


def _write(values: Iterable[Value], most: int = 8) -> str:
    texts = [spell_value(value) for value in values]
    return ", ".join(texts[:most]) + (", …" if len(texts) > most else "") or "none"


def title_value(axis: str, value: Value) -> str:
    """What a side is called where nothing near it says the axis.

    >>> title_value("precision", "fp32"), title_value("compile", "off"), title_value("lr", 0.1)
    ('fp32', 'compile off', 'lr 0.1')
    """
    text = spell_value(value)
    return text if axis in BARE else f"{axis.replace('_', ' ')} {text}"


def _take(side: Side, axis: str, value: Value) -> Side:
    """The runs of a sweep whose case has this value."""
    kept = [i for i, case in enumerate(side.cases) if getattr(case, axis) == value]
    return replace(
        side,
        name=format_value(value) if AXES[axis].metadata["switch"] else title_value(axis, value),
        title=title_value(axis, value),
        records=side.records.iloc[kept].reset_index(drop=True),
        cases=[side.cases[i] for i in kept],
        rows={},
    )


def match(a: Side, b: Side, axis: str = "") -> tuple[Side, Side]:
    """Give the cases that are equal, but for ``axis`` if there is one, one subject; see above."""
    ours, theirs = (_group_main(side, axis) for side in (a, b))
    subjects: tuple[dict[Case, Subject], dict[Case, Subject]] = ({}, {})
    for key in dict.fromkeys([*ours, *theirs]):
        parts = [
            # of cases that follow from the axis, such as two learning rates, the last is taken
            {case: side.parts[case] for case in {_ask(case): case for case in held}.values()}
            for side, held in ((a, ours.get(key, [])), (b, theirs.get(key, [])))
        ]
        for cases, of_side in zip(parts, subjects, strict=True):
            for case, part in cases.items():
                asked = {name: getattr(case, name) for name in SAME_QUESTION}
                of_side[case] = Subject(replace(key, **asked), share=part.share)
        for one, two in _match_parts(*parts):
            subjects[1][two] = subjects[0][one]
    return _assign(a, subjects[0]), _assign(b, subjects[1])


def _ask(case: Case) -> tuple[Value, ...]:
    """How a case was to be measured."""
    return tuple(getattr(case, name) for name in SAME_QUESTION)


def _match_parts(ours: Mapping[Case, Part], theirs: Mapping[Case, Part]) -> list[tuple[Case, Case]]:
    """Pairs of cases that measured equal parts of an epoch; else the largest of each side.

    Of several with one part, those are matched first that were asked for alike, and so is one that
    failed before its part was known.
    """
    if not ours or not theirs:
        return []
    pairs: dict[Case, Case] = {}
    order = sorted(product(ours, theirs), key=lambda pair: _ask(pair[0]) != _ask(pair[1]))
    for one, two in order:
        x, y = ours[one], theirs[two]
        failed = _ask(one) == _ask(two) and not (x.known and y.known)
        if (x.share == y.share or failed) and one not in pairs and two not in pairs.values():
            pairs[one] = two
    if pairs:
        return list(pairs.items())
    one, two = (max(side, key=lambda case: side[case].share) for side in (ours, theirs))
    return [(one, two)]


def _group_main(side: Side, axis: str) -> dict[Case, list[Case]]:
    """The cases of a side by what has to be equal, without those of other loss scales."""
    groups: dict[Case, dict[Case, None]] = {}
    neutral: dict[str, Any] = {
        name: AXES[name].default for name in (*free_axes(axis), *SAME_QUESTION)
    }
    for case in side.cases:
        groups.setdefault(replace(case, **neutral), {})[case] = None
    if not FOLLOWS.get(axis):
        return {key: list(cases) for key, cases in groups.items()}
    usual = _main_scale(side.cases)
    return {key: _keep_main(list(cases), usual) for key, cases in groups.items()}


def _main_scale(cases: Sequence[Case]) -> str:
    return main_loss_scale(cases[0].precision, [format_value(c.loss_scale) for c in cases])


def _keep_main(cases: list[Case], usual: str) -> list[Case]:
    """Of cases that differ in what follows, or in how they were measured, those of the main."""
    scales = {format_value(case.loss_scale) for case in cases}
    scale = usual if usual in scales else _main_scale(cases)
    kept = [case for case in cases if format_value(case.loss_scale) == scale]
    for name in FOLLOWS["precision"][1:]:
        first = min((getattr(case, name) for case in kept), key=_order_value)
        kept = [case for case in kept if getattr(case, name) == first]
    return kept


def _order_value(value: Value) -> tuple[bool, str]:
    """A key that sorts nothing and off before all else."""
    return value not in (None, False), format_value(value)


def _assign(side: Side, subjects: dict[Case, Subject]) -> Side:
    rows: dict[Subject, list[int]] = {}
    for position, case in enumerate(side.cases):
        if case in subjects:
            rows.setdefault(subjects[case], []).append(position)
    return replace(side, rows=rows)


def list_left_out(side: Side, name: str) -> tuple[list[str], list[str]]:
    """The values of an axis that are compared on a side, and those that are not."""
    positions = [i for rows in side.rows.values() for i in rows]
    used = dict.fromkeys(format_value(getattr(side.cases[i], name)) for i in positions)
    every = dict.fromkeys(format_value(getattr(case, name)) for case in side.cases)
    return list(used), [value for value in every if value not in used]


def explain_unmatched(comparison: Comparison) -> str:
    """Why no case is in both sides, with the command that compares them where there is one."""
    one, two = comparison.a, comparison.b
    a, b = ({s.case for s in side.rows} for side in (one, two))
    if a & b:
        mixed = {n: None for side in (one, two) for s in side.rows for n, _ in s.environment}
        return f"within a side, runs of one case differ in {', '.join(mixed)}; none has an equal"
    parted = [
        name
        for name in AXES
        if not {getattr(case, name) for case in a} & {getattr(case, name) for case in b}
        and name not in SAME_QUESTION
    ]
    why = f"they share no value of {', '.join(parted)}" if parted else "no combination is shared"
    command = "" if comparison.axis else suggest(one, two, parted)
    return f"{why}; to compare these values: {command}" if command else why


def suggest(a: Side, b: Side, axes: Iterable[str]) -> str:
    """The command that compares two values of one of ``axes``, one a sweep; empty for none."""
    for axis in axes:
        pairs = product(list_values(a, axis), list_values(b, axis))
        for one, two in islice(pairs, 16):
            x, y = match(_take(a, axis, one), _take(b, axis, two), axis)
            if one != two and x.rows.keys() & y.rows.keys():
                sweeps = " ".join(shlex.quote(str(side.path)) for side in (a, b))
                return f"python -m bench.compare {sweeps} {_write_flag(axis, one, two)}"
    return ""


def _write_flag(axis: str, one: Value, two: Value) -> str:
    return f"--axis {axis} {shlex.quote(spell_value(one))} {shlex.quote(spell_value(two))}"


def explain_one_sweep(side: Side) -> str:
    """What can be compared where one sweep is given and no axis."""
    varying = {axis: values for axis in AXES if len(values := list_values(side, axis)) > 1}
    if not varying:
        return f"{side.path}: name a second sweep to compare with; nothing varies within this one"
    axis = next((name for name in NAMED if name in varying), next(iter(varying)))
    held = "; ".join(f"{name} ({_write(found)})" for name, found in varying.items())
    return (
        f"{side.path}: name a second sweep to compare with, or two values to compare within this "
        f"one, such as {_write_flag(axis, *varying[axis][:2])}; what varies: {held}"
    )
