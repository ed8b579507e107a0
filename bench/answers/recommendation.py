"""The opening sentences of a report: what to train with, what it saves, and how sure that is.

The rule of choice is that of `bench.answers.choice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from operator import itemgetter

from bench.answers.choice import MOST_NAMED, tell_choice
from bench.answers.effects import PREPARING, find_later_starts
from bench.answers.elsewhere import find_fastest
from bench.answers.halving import find_trials, summarize
from bench.answers.power_limits import tell_power
from bench.answers.render.table import (
    Answer,
    name_case,
    remarks,
    write_ends,
    write_ratio,
    write_time,
)
from bench.answers.report_data import PLACE, ReportData, Target
from bench.answers.savings import SAVING_AXES, find_ways, tell_savings
from bench.answers.scaling import find_bounds
from bench.answers.settings import UNRANKED, Setting, choose_base, judge_speeds
from bench.base.limits import MIN_REPEATS, NEAR, STEADY
from bench.base.text import (
    GIB,
    capitalize,
    count,
    join_words,
    name_first,
    write_number,
    write_percent,
)
from bench.networks.workloads import OWN
from bench.profile.breakdown import list_changes, name_part
from bench.profile.step import write_ms
from bench.results.store.rows import group
from bench.results.study.axes import MACHINE, list_naming_axes, name_setting, order_values
from bench.results.study.comparable import refuse_alone, refuse_base
from bench.results.study.effects import judge_learning
from bench.results.study.estimate import TIME, Estimate, estimate
from bench.results.study.pairs import find_changes
from bench.results.study.quantities import QUANTITIES, is_number, over
from bench.results.study.remedies import SPARE_HOST, list_open
from bench.results.study.runs import Result, Run, differ_in_memory
from bench.results.study.warnings import WARNINGS
from bench.results.verdict import EquivalenceVerdict, Verdict
from bench.schema.axis import name_axis
from bench.schema.case import Case, free_axes, spell_value
from bench.schema.command import ask_for_seed
from bench.schema.record import REFUSED
from bench.schema.rules import takes

_APART = 2.0
"""Factor between the fastest run of a setting and the slowest of another, three runs each and in
turns, that is told although other programs ran."""

MOST_PLACES = 3  # with more of them, a table has a row of each in place of sentences

_BASELINES = ("tf32", "fp32")
"""Precisions that a recommendation is held against."""

_LEVERS = {
    "compile": "--compile",
    "cudnn_benchmark": "--cudnn-benchmark",
    "channels_last": "--channels-last",
}
"""Axes that change which format is the fastest; whether they were tried is said. On an H200 the
first two made every format faster, and fp32 by twice as much as fp16."""

_PRECISION = free_axes("precision")

_NOT_FATAL = tuple(
    name for name, warning in WARNINGS.items() if not warning.fatal and name != "foreign"
)


def recommend(found: ReportData) -> Iterator[Answer]:
    """Yield what each search found, and the answer for each machine and workload; of many a table
    has it."""
    for sweep in found.sweeps:
        rules = sweep.halving
        if rules and (trials := find_trials(sweep.rows, sweep.epochs, rules)):
            yield Answer(f"Search: {sweep.name}", tuple(summarize(trials, rules)))
    if len(found.places) > MOST_PLACES:
        yield Answer("Overall", tuple(_tell_overall(found)))
        return
    several = len({place.name for place in found.places}) > 1
    for place in found.places:
        about = place.machine + f", {place.name}" * several
        if saves := tuple(tell_savings(place)):
            yield Answer(f"Memory, {about}", saves)
        if powers := tuple(tell_power(found, place)):
            yield Answer(f"Power, {about}", powers)
        if sentences := tuple(filter(None, _tell(found, place))):
            yield Answer(about, sentences)


def _tell_overall(found: ReportData) -> Iterator[str]:
    """Yield what most of many places are best trained with, and where the others are."""
    every, several = len(found.places), len({place.machine for place in found.places}) > 1
    known = [place for place in found.places if place.recommended]
    by_setting = group(known, lambda place: _name_alike(found, place.recommended))
    for places in sorted(by_setting, key=len, reverse=True)[:MOST_NAMED]:
        where = [place.name + f" · {place.machine}" * several for place in places]
        recommended = places[0].recommended
        how = "" if recommended[0].best.precision == OWN else "in "
        what = f"{_name_act(recommended[0].best)} {how}{_name_alike(found, recommended)}"
        yield f"{what}: {name_first(where, MOST_NAMED)}."
    if len(known) < every:
        yield f"For {every - len(known):,} of {every:,} none is recommended."
    yield f"The first table has {name_places(found.places)}."


def name_places(places: Sequence[Target]) -> str:
    """Say for what there is an answer; a card that was measured in two folders is one."""
    networks = [*dict.fromkeys(place.name for place in places)]
    cards = {one.best.gpu_uuid or place.machine for place in places for one in place.tried}
    what = networks[0] if len(networks) == 1 else f"each of {len(networks):,} networks"
    where = f", on each of {len(cards):,} machines" if len(cards) > 1 else ""
    return f"what to train {what} with{where}"


def _tell(found: ReportData, place: Target) -> Iterator[str]:
    """Yield the sentences on a place; of several only those on time and memory."""
    chosen = place.chosen
    if place.searched:
        pass  # a search is for what learns best, not for what is fastest
    elif chosen is None:
        yield place.apart or _tell_unchosen(found, place)
    elif place.unknown:
        names = join_words([*map(name_axis, place.unknown)])
        fastest = place.choice.fastest if place.choice else chosen
        yield (
            f"Lowest time: {describe_setting(found, fastest)}, {write_time(fastest.best)} an "
            "epoch. "
            f"Whether another {names} trains as well is not known, so none is recommended; tell "
            "the loss by bench.step(loss=…) in the script, or give bench.report --for time."
        )
    elif place.unsteady:
        single = all(one.best.repeats == 1 for one in place.settings if one.timed)
        few = "Single runs" if single else f"Fewer than {MIN_REPEATS} runs"
        yield (
            f"Lowest time: {describe_setting(found, chosen)}, {write_time(chosen.best)} an epoch. "
            f"{few} on a CPU, whose times other programs change, are not ranked; use "
            f"--repeats {MIN_REPEATS}."
        )
    else:
        bases = _find_baselines(place, chosen)
        yield _tell_chosen(found, place, chosen, bases)
        yield from _tell_start(found, chosen)
        choice, alike = place.choice, {*place.alike}
        named = choice and len(alike) > 1 and {choice.fastest, *choice.open} <= alike
        if choice and not found.aim and not named:
            yield tell_choice(
                choice,
                lambda setting: setting.best.batch_size,
                lambda setting: setting.best.memory_bytes,
                lambda setting: f"{describe_setting(found, setting)}, {write_time(setting.best)}",
            )
        yield "" if found.aim else _tell_loss(found, place, chosen)
        yield _tell_pairs(place, chosen, bases)
        yield _tell_rivals(found, place, chosen)
        yield _tell_next(found, place)
        yield _tell_batch_sizes(place, chosen)
        lowest = min(
            (s for s in place.settings if s.timed and not s.best.trusted and not found.aim),
            key=lambda setting: setting.best.epoch_time_s,
            default=chosen,
        )
        if (1 + NEAR) * lowest.best.epoch_time_s < chosen.best.epoch_time_s:
            yield f"Lower, but with a warning: {_warning(found, lowest)}."
        if len(found.places) == 1:
            yield _tell_learning(found, place, chosen)
            yield _tell_certainty(found, place, chosen)
            yield _tell_untried(found, place, chosen)
    yield "" if find_ways(place) else _tell_largest(place)


def _tell_unchosen(found: ReportData, place: Target) -> str:
    lowest = place.lowest
    if lowest is None:
        unfit = next(filter(None, (refuse_alone(one.best) for one in place.settings)), "")
        if unfit:
            return f"No time can be compared with another: {unfit}."
        return "No case was timed." if place.settings else ""
    some = any(setting.best.trusted for setting in place.settings)
    if found.aim and some:
        return f"No case that can be trusted has a value for --for {found.aim}."
    which = "Half of the cases or more have" if some else "Every case has"
    sentence = f"{which} a warning, so none is recommended. Lowest time: {_warning(found, lowest)}."
    return " ".join([sentence, *_tell_apart(found, place, lowest)])


def _tell_apart(found: ReportData, place: Target, lowest: Setting) -> Iterator[str]:
    """Say how much longer others took in every run, where nothing is warned but what other
    programs did: they would have had to run beside each run of one setting, and of no other."""
    slower = []
    for setting in place.settings:
        pair = [lowest.best, setting.best]
        fatal = {n for n, d in WARNINGS.items() for row in pair if d.fatal and getattr(row, n)}
        if setting is lowest or not fatal <= {"contended", "noisy"}:
            continue
        fast, slow = (row.times if row.repeats >= MIN_REPEATS else [] for row in pair)
        least = over(min(slow, default=0), max(fast, default=0))
        if least >= _APART:
            slower.append(
                f"{describe_setting(found, setting)} took at least {least:.1f} times as long"
            )
    if slower:
        yield f"Even so, by any two of their runs, {name_first(slower, MOST_NAMED)}."


def _warning(found: ReportData, lowest: Setting) -> str:
    warnings = remarks(lowest.best, _NOT_FATAL)
    return f"{describe_setting(found, lowest)}, {write_time(lowest.best)}: {warnings}"


def describe_setting(found: ReportData, setting: Setting) -> str:
    """Name a setting in a sentence: ``fp16 at batch size 256 (loss scale 128)``."""
    elsewhere = ("precision", "batch_size", *PLACE, MACHINE, "seed")
    others = [axis for axis in list_naming_axes(found.varying) if axis not in elsewhere]
    more = ", ".join(filter(None, (name_case(setting.best, [axis]) for axis in others)))
    row = setting.best
    parts = [row.precision] if row.precision != OWN else []
    parts += [f"at batch size {row.batch_size}"] if row.batch_size else []
    if not parts:  # a command that chooses both
        return more or row.model
    return " ".join(parts) + (f" ({more})" if more else "")


def _name_alike(found: ReportData, alike: Sequence[Setting]) -> str:
    """Name settings of which any is as good: ``fp32 at batch size 64 (lr 0.1) or …``."""
    return name_first([describe_setting(found, one) for one in alike], MOST_NAMED, " or ")


def _say_with(row: Result, name: str) -> str:
    """Say that something was trained with a setting of this name."""
    return f"in {name}" if row.precision != OWN else name if row.batch_size else f"with {name}"


def _find_baselines(place: Target, chosen: Setting) -> list[Setting]:
    """Return a tf32 and a fp32 setting that differ from it in nothing but the precision and, see
    `choose_base`, the batch size; or else the setting that does without its levers."""
    bases = []
    for name in _BASELINES:
        alike = [s for s in place.tried if s.timed and s.best.precision == name]
        alike = [s for s in alike if s.differs_in(chosen, (*_PRECISION, "batch_size"))]
        if alike and name != chosen.best.precision:
            bases.append(choose_base(alike, chosen.best.batch_size))
    plain = (s for s in place.tried if s.timed and s.differs_in(chosen, _LEVERS))
    usual = (s for s in plain if all(getattr(s.best, a) == getattr(Case, a) for a in _LEVERS))
    return bases or [*islice(usual, 1)]


def _name_act(row: Result) -> str:
    return "Train" if row.command is None else "Run"


def _tell_chosen(
    found: ReportData, place: Target, chosen: Setting, bases: Sequence[Setting]
) -> str:
    """Say what to train with, how long it takes, and what it saves over the baselines."""
    row, alike = chosen.best, place.alike
    name = _name_alike(found, alike)
    sentence = f"{_name_act(row)} {place.model} on {place.machine}"
    sentence += f" {_say_with(row, name)}" * (name != row.model)
    if sum(setting.timed for setting in place.settings) == 1:  # nothing that it was better than
        several = sum(is_number(setting.best.epoch_time_s) for setting in place.settings) > 1
        sentence = f"Only one setting {'can be compared' if several else 'was timed'}, {name}"
    sentence += ", whose times cannot be told apart" * (len(alike) > 1)
    sentence += f": {join_words([write_time(one.best) for one in alike[:MOST_NAMED]])} an epoch"
    sentence += " (a time with a warning)" * (not row.trusted)
    if bases:
        sentence += ", the first against " if len(alike) > 1 else ", against "
        sentence += f"{join_words([_write_base(chosen, base) for base in bases])}"
    saved = _list_saved(row, bases[-1].best) if bases else []
    return sentence + (f", with {join_words(saved)}" if saved else "") + "."


def _tell_start(found: ReportData, chosen: Setting) -> Iterator[str]:
    """Say of each switch by which it starts later what that costs at each start."""
    if any(getattr(chosen.best, axis) != getattr(Case, axis) for axis in PREPARING):
        starts = {one.axis: one for one in find_later_starts(found) if one.on in chosen.cases}
        for start in starts.values():
            yield f"{capitalize(name_axis(start.axis))} {start.after} takes {start.cost}."


def _tell_pairs(place: Target, chosen: Setting, bases: Sequence[Setting]) -> str:
    """Say how many times as fast it is as a baseline at equal batch sizes, where one ratio does not
    tell: they differ, or it was held against the baseline at another one."""
    free = (*_PRECISION, "batch_size")
    rows = [chosen.best, *(s.best for s in place.tried if s.differs_in(chosen, free))]
    speeds, most, apart = list[str](), 0, False
    for base in (one.best for one in bases):
        both = (base.precision, chosen.best.precision)
        alike = [row for row in rows if row.precision in both and row.trusted]
        for found in filter(None, estimate(TIME, [*find_changes("precision", alike)], alike)):
            if found.apart or base.batch_size != chosen.best.batch_size:
                speeds.append(f"{_list_speeds(found, alike)} times as fast as {base.precision}")
                most, apart = max(most, found.pairs), apart or found.apart
    equal = "equal batch sizes" if most > 1 else "an equal batch size"
    differs = ", so the gain differs by batch size" * apart
    return f"At {equal} it is {join_words(speeds)}{differs}." if speeds else ""


def _list_speeds(found: Estimate, rows: Sequence[Result]) -> str:
    """Write the speed at each batch size or, of many, from which to which they are."""
    sizes = {row.cell: row.batch_size for row in rows}
    pairs = zip(found.cells, found.each, strict=True)
    speeds = sorted((sizes[before], 1 / ratio) for (before, _), ratio in pairs)
    if many := len(speeds) > MOST_NAMED:
        speeds.sort(key=itemgetter(1))
        speeds = [speeds[0], speeds[-1]]
    written = [f"{write_ratio(speed)} ({size})" for size, speed in speeds]
    return f"from {' to '.join(written)}" if many else join_words(written)


def _write_base(chosen: Setting, base: Setting) -> str:
    row, size = base.best, base.best.batch_size
    note = describe_tf32(row) if row.precision == "tf32" and row.device == "cuda" else ""
    note += "; " * bool(note)
    where = f" at batch size {size}" * (size != chosen.best.batch_size)
    levers = [axis for axis in _LEVERS if getattr(row, axis) != getattr(chosen.best, axis)]
    usual = [name_setting(axis, spell_value(getattr(row, axis))) for axis in levers]
    where += f" with {join_words(usual)}" if usual else ""
    time = f"{write_time(base.best)} in {row.precision}{where}"
    if why := refuse_base(row):
        return f"{time} ({note}which {why})"
    (speed,) = judge_speeds([(chosen.best, row)])
    assert speed.value is not None
    gain = f"{write_ratio(speed.value)} times as fast"
    if ends := write_ends((speed.low, speed.high), write_ratio, " to "):
        gain += f"; 95 %: {ends}"
    gain += ", not certain" * (speed.judge(STEADY) is Verdict.AMBIGUOUS)
    return f"{time} ({note}{gain}{'; a time with a warning' * (not row.trusted)})"


def describe_tf32(row: Result) -> str:
    """Return where a case in tf32 used it: torch's default is the first alone."""
    both = "matmul=tf32" in row.flags
    return "torch's default for convolutions" + ", and in matrix products" * both


def _list_saved(row: Result, base: Result) -> list[str]:
    """Return the memory and the energy beside those of the baseline, if they differ."""
    saved = []
    ours, theirs = row.memory_bytes, base.memory_bytes
    if row.memory_measure == base.memory_measure and differ_in_memory(row, base):
        saved.append(f"{ours / GIB:#.3g} instead of {theirs / GIB:#.3g} GiB")
    share = over(row.energy_per_epoch_j, base.energy_per_epoch_j)
    if is_number(share) and not refuse_base(base) and not (row.energy or base.energy):
        saved.append(f"{100 * share:.0f} % of {base.precision}'s energy")
    return saved


def _tell_rivals(found: ReportData, place: Target, chosen: Setting) -> str:
    """Say which other precisions are as fast and which slower, with the largest part of what
    one of these loses."""
    rivals = [
        setting
        for setting in place.settings
        if setting.timed and setting.differs_in(chosen, _PRECISION)
        if setting.best.trusted or setting.best.epoch_time_s > (1 + NEAR) * chosen.best.epoch_time_s
        if setting.best.precision not in _BASELINES
    ]
    rivals.sort(key=lambda setting: setting.best.epoch_time_s)
    judged: dict[str, list[Setting]] = {"as fast": [], "perhaps slower": [], "slower": []}
    for setting in rivals:
        (speed,) = judge_speeds([(chosen.best, setting.best)])
        near, verdict = speed.value is not None and speed.value < 1 + STEADY, speed.judge(STEADY)
        perhaps = "perhaps slower" if verdict is Verdict.AMBIGUOUS else "slower"
        judged["as fast" if near or verdict is Verdict.SAME else perhaps].append(setting)
    parts = []
    for word, those in judged.items():
        names = [_name_rival(place, s, chosen) for s in those[:MOST_NAMED]]
        if those:
            parts.append(f"{word} {'is' if len(names) == 1 else 'are'} {join_words(names)}")
    loss = next(
        filter(None, (_find_loss(found, place, chosen, one) for one in judged["slower"])), ""
    )
    return f"{capitalize('; '.join(parts))}{loss}." if parts else ""


def _name_rival(place: Target, rival: Setting, chosen: Setting) -> str:
    """Name a setting by its precision, with its time and, where it is much longer, how often."""
    times = rival.best.epoch_time_s / chosen.best.epoch_time_s
    details = [write_time(rival.best)]
    details += [f"{times:.1f} times as long"] * (times >= MUCH)
    details += ["a time with a warning"] * (not rival.best.trusted)
    return f"{_name_precision(place, rival)} ({', '.join(details)})"


MUCH = 1.5
"""From this ratio on it is said how many times as long another precision takes."""


def _find_loss(found: ReportData, place: Target, chosen: Setting, slower: Setting) -> str:
    """Return what most of a slower setting's time is lost by, where both were profiled."""
    steps = ([found.steps.get(row.cell) for row in one.cases] for one in (chosen, slower))
    a, b = (next((s.breakdown for s in own if s and s.profiled), None) for own in steps)
    if a is None or b is None:
        return ""
    lost = b.step.step_s - a.step.step_s
    most = max(list_changes(a, b), key=lambda change: change.change_s)
    if lost <= STEADY * a.step.step_s or most.change_s <= lost / 2:
        return ""
    share = "all" if most.change_s >= lost else write_ms(most.change_s)
    return (
        f": a step of {_name_precision(place, slower)} takes {write_ms(lost)} ms longer, "
        f"{share} of them in {name_part(most.name)}"
    )


def _name_precision(place: Target, setting: Setting) -> str:
    """Name a setting by its precision, with what follows from that if there were several."""
    row = setting.best
    same = [s.best for s in place.settings if s.best.precision == row.precision]
    vary = [a for a in _PRECISION if len({getattr(other, a) for other in same}) > 1]
    return name_case(row, ["precision", *vary])


def _tell_next(found: ReportData, place: Target) -> str:
    """Name the setting of the lowest time or, where that is the chosen one, the next, with what is
    between them; other batch sizes have a sentence of their own, as what cannot be told from the
    chosen one has."""
    choice = place.choice
    if choice is None or found.aim:
        return ""
    named = (choice.chosen, choice.fastest, *choice.open)  # of one batch size each has its name
    if choice.open and len({setting.best.batch_size for setting in named}) == 1:
        return ""
    chosen, others = choice.chosen.best, [*choice.near, *choice.open]
    others = [s for s in others if s is not choice.chosen and s.best.precision not in _BASELINES]
    if not others:
        return ""
    first = min(others, key=lambda setting: setting.best.epoch_time_s)
    if first in (*place.alike, *_list_sizes(place, choice.chosen)):
        return ""
    what = "The lowest time" if first is choice.fastest else "The next"
    sentence = f"{what} is {describe_setting(found, first)}, {write_time(first.best)} "
    sentence += f"({_write_share(first.best, chosen)})"
    return f"{sentence}{_write_memory(first.best, chosen)}."


def _write_share(row: Result, chosen: Result) -> str:
    share = round(row.epoch_time_s / chosen.epoch_time_s - 1, 3)
    return f"{write_percent(abs(share))} {'less' if share < 0 else 'more'}"


def _write_memory(row: Result, chosen: Result) -> str:
    share = over(row.memory_bytes, chosen.memory_bytes)
    known = is_number(share) and differ_in_memory(row, chosen)
    decimals = 1 if abs(share - 1) > 0.05 else 2
    return f", with {share:.{decimals}f} times the memory" if known else ""


def write_wait(row: Result) -> str:
    """Say of a time that it is not the GPU's."""
    fixes = [way for way in list_open(SPARE_HOST, row) if "--batch-size" not in way]
    return "because the GPU waits for the host" + (
        f", which {' or '.join(fixes)} may fix" if fixes else ""
    )


def _list_sizes(place: Target, chosen: Setting) -> list[Setting]:
    """Return the nearest smaller and larger batches: of each the setting in the precision of the
    chosen one or, without it, in the fastest."""
    row, free = chosen.best, ("batch_size", *_PRECISION)
    others = [s for s in place.settings if s.timed and s.differs_in(chosen, free)]
    others = [s for s in others if s.best.trusted or s.best.epoch_time_s > row.epoch_time_s]
    others = [s for s in others if s.best.precision not in _BASELINES or not _is_other(s, row)]
    others.sort(key=lambda s: (s.best.batch_size, _is_other(s, row), s.best.epoch_time_s))
    first = [next(alike) for _, alike in groupby(others, lambda s: s.best.batch_size)]
    smaller = [s for s in first if s.best.batch_size < row.batch_size]
    larger = [s for s in first if s.best.batch_size > row.batch_size]
    return [*smaller[-2:], *larger[:2]]


def _tell_batch_sizes(place: Target, chosen: Setting) -> str:
    """Say what the nearest smaller and larger batches take."""
    parts = list[str]()
    sizes = _list_sizes(place, chosen)
    for setting in sizes:
        one, learnt = setting.best, setting.find_learnt("test_accuracy")
        part = f"{one.batch_size} takes {write_time(one)}"
        part += f" in {_name_precision(place, setting)}" * _is_other(setting, chosen.best)
        if place.choice and setting is place.choice.fastest:
            part += f", the lowest time ({_write_share(one, chosen.best)})"
        if one.host_bound:
            part += f", {write_wait(one)}"
        part += _write_memory(one, chosen.best)
        if learnt is not None:
            what = "" if any("reaches" in one for one in parts) else " test accuracy"
            part += f", and reaches {100 * learnt:.0f} %{what}"
        parts.append(part)
    return f"Batch size {'; '.join(parts)}. {write_caveat([chosen, *sizes])}" if parts else ""


def _is_other(setting: Setting, row: Result) -> bool:
    return any(getattr(setting.best, axis) != getattr(row, axis) for axis in _PRECISION)


def write_caveat(settings: Sequence[Setting]) -> str:
    """Say what times and accuracies of several batch sizes do not tell."""
    known = [row for s in settings for row in s.cases if s.find_learnt("test_accuracy") is not None]
    caveat = "Throughput only: "
    if known:
        seeds = max(row.seeds for row in known)
        caveat += (
            f"accuracies are of {count(seeds, 'seed')} at one learning rate, and a larger batch "
        )
        caveat += "makes fewer updates; "
    return caveat + (
        "at another batch size tune the learning rate again, and compare at equal accuracy."
    )


def _tell_loss(found: ReportData, place: Target, chosen: Setting) -> str:
    """Say where another of the user's own values, another command, or another recipe, has a loss
    that is clearly lower: what these do to a training no time tells."""
    rivals = [s for s in place.settings if s.timed and s.differs_in(chosen, UNRANKED)]
    known = [s for s in (chosen, *rivals) if is_number(s.best.train_loss)]
    lowest = min(known, key=lambda setting: setting.best.train_loss, default=chosen)
    mine, least = chosen.best.train_loss, lowest.best.train_loss
    if chosen not in known or mine - least <= NEAR * abs(least):
        return ""
    write = QUANTITIES["train_loss"].write
    steps = {one.best.measured_steps for one in (chosen, lowest)}
    here, there = (
        f"{write(one.best.train_loss)} {_say_with(one.best, describe_setting(found, one))}"
        for one in (chosen, lowest)
    )
    return (
        f"The training loss is {here}, and {there}"
        f"{', over another number of steps' * (len(steps) > 1)}: look at what each learns before "
        "you choose by time."
    )


def tell_learnt(found: ReportData, place: Target, setting: Setting) -> Iterator[str]:
    """Yield what is known of how a setting learns beside others."""
    yield from filter(
        None, (_tell_loss(found, place, setting), _tell_learning(found, place, setting))
    )


def _tell_learning(found: ReportData, place: Target, chosen: Setting) -> str:
    """Say whether it learns as the baseline does, as far as seeds show; of synthetic images that
    says nothing."""
    if chosen.best.dataset == "synthetic":
        return ""
    several = len({run.run_seed for run in found.runs}) >= MIN_REPEATS
    for one in judge_learning(found.effects, found.results) if several else ():
        if one.effect.after == chosen.best.precision and one.found.seeds >= MIN_REPEATS:
            words = {
                EquivalenceVerdict.EQUIVALENT: "is equivalent to",
                EquivalenceVerdict.BETTER: "is better than",
                EquivalenceVerdict.WORSE: "is worse than",
                EquivalenceVerdict.UNCLEAR: "cannot be told from",
            }[one.found.verdict]
            ends = write_ends((one.found.low, one.found.high), one.found.write, " to ")
            part = " in the part of an epoch that was measured" * (not chosen.best.learnt_whole)
            why = f" (90 %: {ends})" if ends else f": {one.found.lack}" * bool(one.found.lack)
            # without {seed} its repeats are the same command, whatever seeds it draws
            seed = ask_for_seed(chosen.best.case.command)
            return (
                f"Over {one.found.seeds} {'runs' if seed else 'seeds'} its {one.metric.label}"
                f"{part} {words} that of {one.effect.before}{why}{seed * (not ends)}."
            )
    fp32 = [s for s in place.tried if s.best.precision == "fp32"]
    fp32 = [s for s in fp32 if s.differs_in(chosen, _PRECISION)][:1]
    for name, unit in (("test_accuracy", " %"), ("train_loss", "")):
        values = [setting.find_learnt(name) for setting in (chosen, *fp32)]
        known = [f"{QUANTITIES[name].write(v)}{unit}" for v in values if v is not None]
        if len(known) == 2:
            flags = f"--repeats {MIN_REPEATS}"
            flags += " --evaluate" * takes(chosen.best.case, "--evaluate")
            if chosen.best.repeats >= MIN_REPEATS:  # each of which had the same seed
                flags += " without --same-seed"
            return (
                f"After the epoch its {QUANTITIES[name].label} is {known[0]}, and fp32's "
                f"{known[1]}: too few seeds to tell them apart; use {flags}."
            )
    return ""


def _tell_certainty(found: ReportData, place: Target, chosen: Setting) -> str:
    """Say how often it was measured, and how far its repeats agree."""
    row = chosen.best
    # where none was repeated, settings measured in several ways tell the noise of a single run
    times = (
        (s, [one.epoch_time_s for one in s.cases if one.trust and is_number(one.epoch_time_s)])
        for s in place.settings
    )
    apart = [(max(values) / min(values) - 1, s) for s, values in times if len(values) > 1]
    alone = sum(setting.timed for setting in place.settings) == 1
    once = all(setting.best.repeats == 1 for setting in place.settings if setting.timed)
    each, medians = "One run each" if once else "One run of it", "Medians"
    if alone:
        each, medians = "One run", "Median"
    sentence = each if row.repeats == 1 else f"{medians} of {row.repeats} runs"
    if row.repeats == 1 and apart:
        sentence += f"; {_tell_agreement(found, apart)}"
    elif row.repeats < MIN_REPEATS:
        chance = (
            "how far its time repeats is not known"
            if alone
            else ("small differences may be chance")
        )
        sentence += f", so {chance}"
        sentence += f"; use --repeats {MIN_REPEATS}" * (row.runs < MIN_REPEATS)
    else:
        most = max(0.001, *(s.best.scatter for s in place.settings if is_number(s.best.scatter)))
        sentence += f", which spread by up to ±{100 * most:.1f} %"
    ratios = row.device == "cpu" and not alone
    return sentence + ". Ratios of a CPU say nothing of a GPU" * ratios + "."


def _tell_agreement(found: ReportData, apart: Sequence[tuple[float, Setting]]) -> str:
    """Say how far the runs of each setting differ, with a warning or without one."""
    alike = [share for share, _ in apart if share <= STEADY]
    unlike = sorted((one for one in apart if one[0] > STEADY), key=itemgetter(0), reverse=True)
    parts = list[str]()
    if alike:
        number = count(len(alike), "setting")
        number = f"{len(alike)} of {len(apart)} settings" if unlike else number
        parts.append(
            f"{number} measured more than once agreed within {100 * max(0.001, *alike):.1f} %"
        )
    parts += [
        f"{describe_setting(found, setting)} differed by {100 * share:.1f} %"
        for share, setting in unlike[:MOST_NAMED]
    ]
    return "; ".join(parts)


def _tell_untried(found: ReportData, place: Target, chosen: Setting) -> str:
    """Say which levers were not tried, and what another folder found with them on this card."""
    row = chosen.best
    ours = row.device == "cuda" and row.kind == "measured" and row.command is None
    off = [
        axis
        for axis in _LEVERS
        if ours
        and takes(row.case, _LEVERS[axis])
        and all(getattr(s.best, axis) == getattr(Case, axis) for s in place.settings)
    ]
    if not off:
        return ""
    sentence = (
        f"Not tried: {join_words([_LEVERS[axis] for axis in off])}, which may change the order."
    )
    known = find_fastest(row, off, [sweep.path for sweep in found.sweeps])
    if known is not None:
        case = known.row.case
        how = ", ".join(name_setting(a, spell_value(getattr(case, a))) for a in _LEVERS
                        if getattr(case, a) != getattr(Case, a))  # fmt: skip
        sentence += (
            f" With {how}, {case.precision} at batch size {case.batch_size} took "
            f"{write_number(known.time_s)} s on such a card ({known.where})."
        )
    return sentence


def _tell_largest(place: Target) -> str:
    """Name the largest batch that fits each precision, if any ran out of memory. Only cases
    with the fewest micro-batches count, as these take less memory. What saves memory is named, or
    `tell_savings` has it."""
    rows: list[Result | Run] = [*place.probes]
    rows += [row for setting in place.settings for row in setting.cases]
    least = min(row.accumulate for row in rows)
    ended = [row for row in rows if row.accumulate == least]
    if not any(row.status in REFUSED for row in ended):
        return ""
    largest = []
    for limit in order_values("memory_limit", (row.memory_limit for row in ended)):
        for precision in order_values("precision", (row.precision for row in ended)):
            alike = [r for r in ended if (r.memory_limit, r.precision) == (limit, precision)]
            ways = group(alike, lambda row: tuple(getattr(row, name) for name in SAVING_AXES))
            for way in ways:
                fits, fails = find_bounds(way)
                name = name_case(way[0], SAVING_AXES) if len(ways) > 1 else ""
                where = precision + f" with {name}" * bool(name)
                where += f" under {limit}" if limit else ""
                if fails:
                    largest.append(f"{where} {fits or 'none'} ({fails} does not)")
                elif fits:
                    largest.append(f"{where} at least {fits}")
    return f"Largest batch size that fits: {', '.join(largest)}." if largest else ""
