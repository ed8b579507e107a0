"""The opening sentences of a report: what to train with, what it saves, and how sure that is.

The rule of choice is that of `bench.questions.settings.choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter

from bench.case import Case, free_axes
from bench.diagnosis.explanation import list_changes, name_part, write_ms
from bench.limits import MIN_REPEATS, NEAR, STEADY
from bench.origin import LABELS
from bench.questions.batch_sizes import Bounds, find_bounds
from bench.questions.effects import judge_learning
from bench.questions.profiles import Profiled, make_side
from bench.questions.report_data import ReportData
from bench.questions.settings import NEUTRAL, Setting, choose, find_noise, judge_speeds
from bench.record import REFUSED
from bench.render.section import write_quantity
from bench.render.table import (
    Answer,
    Row,
    name_case,
    remarks,
    write_ends,
    write_ratio,
)
from bench.store.rows import group
from bench.study.axes import MACHINE, name_axis, order_values
from bench.study.doubts import DOUBTS
from bench.study.quantities import QUANTITIES, is_number, over
from bench.study.runs import SOURCE, Result, Run
from bench.text import GIB, capitalize, count, join_words, write_range
from bench.verdict import Claim, Equivalence, Verdict
from bench.workloads import OWN

PLACE = (*SOURCE, "model", "dataset")
"""What a recommendation is for: a network on its data, on one machine."""

Key = tuple[str, str, str, str]  # of `PLACE`
_PLACE: Callable[[Row], Key] = attrgetter(*PLACE)

MOST_PLACES = 3  # with more of them, a table has a row of each in place of sentences
MOST_NAMED = 4  # settings that a sentence names

BASELINES = {"tf32": "torch's default for convolutions; ", "fp32": ""}
"""Precisions that a recommendation is held against, with what is said of each on a GPU."""

GAINFUL = ("cudnn_benchmark", "compile")
"""Axes that made training faster on every card here; whether they were off is said."""

_PRECISION = free_axes("precision")

_NOT_FATAL = tuple(name for name, doubt in DOUBTS.items() if not doubt.fatal and name != "foreign")


def recommend(found: ReportData) -> Iterator[Answer]:
    """Yield the answer for each machine and workload; of many a table has it."""
    summary = (*found.origin,)
    places = list_places(found)
    if len(places) > MOST_PLACES:
        said = f"The first table has what to train each of {len(places):,} networks with."
        yield Answer("Overall", (*summary, said))
        return
    several = len({place.key[2:] for place in places}) > 1
    answers = []
    for place in places:
        model, dataset = place.key[2:]
        about = found.machines[place.machine]
        about += f", {model}{name_data(dataset)}" * several
        if told := tuple(filter(None, place.tell(len(places) > 1))):
            answers.append(Answer(about, told))
    if len(answers) == 1:
        yield replace(answers[0], sentences=(*summary, *answers[0].sentences))
        return
    if summary:
        yield Answer("Overall", summary)
    yield from answers


def name_data(dataset: str) -> str:
    return "" if dataset == OWN else f" on {dataset}"


def list_places(found: ReportData) -> list[Place]:
    """Return the places of a report with their settings, machine by machine."""
    settings = {_PLACE(alike[0].best): alike for alike in group(found.settings, _place_setting)}
    probes = {_PLACE(alike[0]): alike for alike in group(found.probes, _PLACE)}
    return [
        Place(found, key, settings.get(key, []), probes.get(key, []))
        for pair in found.machines
        for key in dict.fromkeys([*settings, *probes])
        if key[:2] == pair
    ]


def _place_setting(setting: Setting) -> Key:
    return _PLACE(setting.best)


@dataclass(frozen=True)
class Place:
    """The settings of a network and its data on one machine, and what is said of them."""

    found: ReportData
    key: Key
    settings: Sequence[Setting]
    probes: Sequence[Run]

    @property
    def lowest(self) -> Setting | None:
        """The setting of the lowest time, whatever its warnings; None if none was timed."""
        timed = [setting for setting in self.settings if setting.timed]
        return min(timed, key=lambda setting: setting.best.epoch_time_s, default=None)

    @cached_property
    def tried(self) -> list[Setting]:
        """The settings of the same place, those that a filter leaves out among them."""
        return [one for one in self.found.tried_settings if _place_setting(one) == self.key]

    @property
    def machine(self) -> tuple[str, str]:
        return self.key[:2]

    @cached_property
    def chosen(self) -> Setting | None:
        return choose(self.settings, self.found.aim)

    def tell(self, brief: bool) -> Iterator[str]:
        """Yield the sentences; only those on time and memory if they are to be ``brief``."""
        chosen = self.chosen
        if any(s.name == self.key[0] and s.halving is not None for s in self.found.sweeps):
            pass  # a search is for what learns best, which its own section says
        elif chosen is None:
            yield self._tell_unchosen()
        elif self._is_unsteady():
            yield (
                f"Lowest time: {self.name(chosen)}, {_time(chosen)} an epoch. "
                "Single runs on a CPU, whose times other programs change, are not ranked; use "
                f"--repeats {MIN_REPEATS}."
            )
        else:
            yield self._recommend(chosen)
            yield self._tell_rivals(chosen)
            yield self._tell_switches(chosen)
            yield self._tell_doubted(chosen)
            yield self._tell_batch_sizes(chosen)
            if not brief:
                yield " ".join(self._tell_learning(chosen))
                yield self._tell_certainty(chosen)
        yield self._tell_largest()

    def name(self, setting: Setting) -> str:
        """Name a setting in a sentence: ``fp16 at batch size 256 (loss scale 128)``."""
        said = ("precision", "batch_size", "model", "dataset", MACHINE, *NEUTRAL)
        others = [axis for axis in self.found.named if axis not in said]
        more = [text for axis in others if (text := name_case(setting.best, [axis]))]
        row = setting.best
        told = [row.precision] if row.precision != OWN else []
        told += [f"at batch size {row.batch_size}"] if row.batch_size else []
        if not told:  # a command that chooses both
            return ", ".join(more) or row.model
        return " ".join(told) + (f" ({', '.join(more)})" if more else "")

    # ------------------------------------------------------------------ what is recommended

    def _recommend(self, chosen: Setting) -> str:
        """Say what to train with, how long it takes, and what it saves over the baselines."""
        row = chosen.best
        what = f"Train {self.key[2]} on {self.found.machines[self.machine]}"
        if row.precision != OWN:
            what += " in"
        elif not row.batch_size and self.name(chosen) != row.model:
            what += " with"
        name = "" if self.name(chosen) == row.model else f" {self.name(chosen)}"
        told = f"{what}{name}: {_time(chosen)} an epoch"
        bases = self._find_baselines(chosen)
        against = []
        for base in bases:
            note = BASELINES[base.best.precision] if base.best.device == "cuda" else ""
            speed = self.write_speed(chosen, base)
            against.append(f"{_time(base)} in {base.best.precision} ({note}{speed})")
        told += f", against {join_words(against)}" if against else ""
        told += self._tell_fastest_baseline(chosen)
        saved = [*_list_saved(row, bases[-1].best)] if bases else []
        told += f", with {join_words(saved)}" if saved else ""
        return f"{told}."

    def _find_baselines(self, chosen: Setting) -> list[Setting]:
        """Return the tf32 and fp32 settings that differ from it in nothing but the precision."""
        return [
            setting
            for name in BASELINES
            for setting in self.tried
            if setting.timed and setting.best.precision == name and name != chosen.best.precision
            if setting.differs_in(chosen, _PRECISION)
        ]

    def _tell_fastest_baseline(self, chosen: Setting) -> str:
        """Compare with fp32 at its fastest, if it is much slower at this batch size or not there:
        a speed-up at a batch size at which fp32 is slow is misleading."""
        if chosen.best.precision == "fp32":
            return ""
        fp32 = [s for s in self.tried if s.timed and s.best.precision == "fp32"]
        others = [s for s in fp32 if s.differs_in(chosen, (*_PRECISION, "batch_size"))]

        def rank(setting: Setting) -> tuple[int, bool, float]:
            unlike = 0 if others else len(setting.list_unlike(chosen))
            return unlike, not setting.best.trusted, setting.best.epoch_time_s

        fastest = min(others or fp32, key=rank, default=None)
        same = [s for s in others if s.best.batch_size == chosen.best.batch_size]
        if fastest is None or (
            same and same[0].best.epoch_time_s <= (1 + NEAR) * fastest.best.epoch_time_s
        ):
            return ""
        unlike = [axis for axis in fastest.list_unlike(chosen) if axis not in _PRECISION]
        told = f"{_time(fastest)} in fp32 {_name_other(fastest, unlike)}"
        return f"{', and' if same else ', against'} {told} ({self.write_speed(chosen, fastest)})"

    def write_speed(self, after: Setting, before: Setting) -> str:
        """Return ``3.55 times as fast; 95 %: 3.41 to 3.70``, and whether the time before has a
        warning."""
        if not before.best.settled:
            return "which waits for the host and does not settle, so nothing is compared with it"
        (speed,) = judge_speeds([(after.best, before.best)])
        assert speed.value is not None
        said = f"{write_ratio(speed.value)} times as fast"
        if ends := write_ends((speed.low, speed.high), write_ratio, " to "):
            said += f"; 95 %: {ends}"
        said += ", not certain" * (speed.judge(STEADY) is Verdict.AMBIGUOUS)
        return said + "; a time with a warning" * (not before.best.trusted)

    def _tell_unchosen(self) -> str:
        lowest = self.lowest
        if lowest is None:
            return "No case was timed." if self.settings else ""
        if self.found.aim and any(setting.best.trusted for setting in self.settings):
            return f"No case that can be trusted has a value for --for {self.found.aim}."
        doubt = f"{self.name(lowest)}, {_time(lowest)}: {remarks(lowest.best, _NOT_FATAL)}"
        return f"Every case has a warning, so none is recommended. Lowest time: {doubt}."

    def _is_unsteady(self) -> bool:
        """Whether times differ by what else a CPU does: single runs of several settings on it. On
        two cores such runs made bf16-amp 3.05 times as fast as fp32, later 0.64 times, and three
        each on idle ones 1.49."""
        timed = [s.best for s in self.settings if s.timed and s.best.kind == "measured"]
        return len(timed) > 1 and all(
            row.device == "cpu" and row.repeats < MIN_REPEATS for row in timed
        )

    # ------------------------------------------------------------------ what else could be chosen

    def _tell_rivals(self, chosen: Setting) -> str:
        """Say which other precisions are as fast and which slower, with the largest part of what
        one of these loses."""
        told = {base.best.cell for base in self._find_baselines(chosen)}
        rivals = [
            setting
            for setting in self.settings
            if setting.timed and setting.best.trusted and setting.differs_in(chosen, _PRECISION)
            if setting.best.cell not in told
        ]
        rivals.sort(key=lambda setting: setting.best.epoch_time_s)
        alike, slower = list[Setting](), list[Setting]()
        for setting in rivals:
            (speed,) = judge_speeds([(chosen.best, setting.best)])
            near = speed.value is not None and speed.value < 1 + STEADY
            unclear = speed.judge(STEADY) in (Verdict.SAME, Verdict.AMBIGUOUS)
            (alike if near or unclear else slower).append(setting)
        parts = []
        for those, speed_word in ((alike, "as fast"), (slower, "slower")):
            if those:
                names = [f"{self._name_precision(s)} ({_time(s)})" for s in those[:MOST_NAMED]]
                if len(those) > MOST_NAMED:
                    names.append(f"{len(those) - MOST_NAMED} more")
                verb = "is" if len(those) == 1 else "are"
                parts.append(f"{speed_word} {verb} {join_words(names)}")
        if slower:
            parts[-1] += self._find_loss(chosen, slower)
        return f"{capitalize('; '.join(parts))}." if parts else ""

    def _tell_switches(self, chosen: Setting) -> str:
        """Say how long it takes with another value of any other axis, of the fastest few."""
        own = (*_PRECISION, "batch_size", *NEUTRAL)
        others = [s for s in self.settings if s.timed and s.best.trusted and s is not chosen]
        unlike = [(setting, setting.list_unlike(chosen)) for setting in others]
        one = [(s, names[0]) for s, names in unlike if len(names) == 1 and names[0] not in own]
        one.sort(key=lambda pair: pair[0].best.epoch_time_s)
        told = []
        for setting, axis in one[:MOST_NAMED]:
            told.append(f"{_name_other(setting, [axis])} it takes {_time(setting)}")
            if abs(over(setting.best.memory_bytes, chosen.best.memory_bytes) - 1) > STEADY:
                told[-1] += f" and {setting.best.memory_bytes / GIB:#.3g} GiB"
        return f"{capitalize(join_words(told))}." if told else ""

    def _tell_doubted(self, chosen: Setting) -> str:
        """Name the fastest setting that seems faster, but has a warning."""
        slow = chosen.best.epoch_time_s / (1 + STEADY)
        doubted = [s for s in self.settings if s.timed and not s.best.trusted]
        doubted = [setting for setting in doubted if setting.best.epoch_time_s < slow]
        if not doubted or self.found.aim not in ("", "time"):
            return ""
        best = min(doubted, key=lambda setting: setting.best.epoch_time_s)
        doubt = remarks(best.best, _NOT_FATAL)
        return f"Not trusted, though faster: {self.name(best)}, {_time(best)} ({doubt})."

    def _name_precision(self, setting: Setting) -> str:
        """Name a setting by its precision, with what follows from that if there were several."""
        row = setting.best
        same = [s.best for s in self.settings if s.best.precision == row.precision]
        vary = [a for a in _PRECISION if len({getattr(other, a) for other in same}) > 1]
        return name_case(row, ["precision", *vary])

    def _find_loss(self, chosen: Setting, slower: Sequence[Setting]) -> str:
        """Return what most of a slower setting's time is lost by, where both were profiled."""
        ours = self._find_profile(chosen)
        for setting in slower:
            theirs = self._find_profile(setting)
            if ours is None or theirs is None:
                continue
            a, b = make_side("precision", ours), make_side("precision", theirs)
            lost = b.step.step_s - a.step.step_s
            most = max(list_changes(a, b), key=lambda change: change.change_s)
            if lost > STEADY * a.step.step_s and most.change_s > lost / 2:
                return (
                    f": a step of {self._name_precision(setting)} takes {write_ms(lost)} ms "
                    f"longer, {write_ms(most.change_s)} of them in "
                    f"{name_part(most.name)}"
                )
        return ""

    def _find_profile(self, setting: Setting) -> Profiled | None:
        held = (self.found.steps.get(row.cell) for row in setting.cases)
        return next((one for one in held if one and one.profiled), None)

    def _tell_batch_sizes(self, chosen: Setting) -> str:
        """Say what smaller batches cost, and what larger ones save and take."""
        others = [s for s in self.settings if s.timed and s.differs_in(chosen, ("batch_size",))]
        others.sort(key=lambda setting: setting.best.batch_size)
        row = chosen.best
        smaller = [s for s in others if s.best.batch_size < row.batch_size]
        smaller = [s for s in smaller if s.best.epoch_time_s > row.epoch_time_s][-2:]
        larger = [s for s in others if s.best.batch_size > row.batch_size and s.best.trusted]
        larger = larger[:MOST_NAMED]
        parts = []
        if smaller:
            told = []
            for setting in reversed(smaller):
                told.append(f"{setting.best.batch_size} takes {_time(setting)}")
                if setting.best.host_bound:
                    busy = f"busy for {100 * setting.best.busy_share:.0f} % of a step"
                    told[-1] += f" because the GPU waits for the program ({busy})"
            parts.append(f"Batch size {join_words(told)}")
        if larger:
            sizes = join_words([str(s.best.batch_size) for s in larger])
            shares = [1 - s.best.epoch_time_s / row.epoch_time_s for s in larger]
            memory = [over(s.best.memory_bytes, row.memory_bytes) for s in larger]
            one = len(larger) == 1
            changes = [_write_saving(shares, one)]
            if max(memory) > 1 + STEADY:  # and all of them are known
                factors = f"{write_range(memory, lambda factor: f'{factor:.1f}')}"
                changes.append(f"take{'s' * one} {factors} times the memory")
            changed = join_words([*changes, *_compare_learnt(chosen, larger)])
            parts.append(
                f"{'' if parts else 'Batch size ' if one else 'Batch sizes '}{sizes} {changed}"
            )
        return f"{'; '.join(parts)}." if parts else ""

    # ---------------------------------------------------------------------------- how sure it is

    def _tell_learning(self, chosen: Setting) -> Iterator[str]:
        """Say whether it learns as the baseline does, as far as seeds show."""
        if chosen.best.precision == "fp32":
            return
        for one in judge_learning(self.found):
            if one.effect.after == chosen.best.precision and one.found.seeds >= MIN_REPEATS:
                words = {
                    Claim.EQUIVALENT: "is equivalent to",
                    Claim.BETTER: "is better than",
                    Claim.WORSE: "is worse than",
                    Claim.UNCLEAR: "cannot be told from",
                }[one.found.verdict]
                yield (
                    f"Over {one.found.seeds} seeds its {one.metric.label} {words} that of "
                    f"{one.effect.before}{_write_interval(one.found)}."
                )
                return
        bases = [s for s in self._find_baselines(chosen) if s.best.precision == "fp32"]
        for name, label in (("test_accuracy", "test accuracy"), ("train_loss", "loss")):
            for base in bases:
                values = [setting.find_learnt(name) for setting in (chosen, base)]
                known = [QUANTITIES[name].write(v) for v in values if v is not None]
                if len(known) == 2 and chosen.best.dataset != "synthetic":
                    ours, theirs = known
                    seeds = "one seed" if chosen.best.seeds == 1 else f"{chosen.best.seeds} seeds"
                    unit = " %" if name == "test_accuracy" else ""
                    yield (
                        f"After the epoch its {label} is {ours}{unit}, and fp32's {theirs}{unit}: "
                        f"{seeds} cannot tell them apart; "
                        f"use --repeats {MIN_REPEATS} --evaluate."
                    )
                    return

    def _tell_certainty(self, chosen: Setting) -> str:
        """Say how often it was measured, how far its repeats agree, and what was off."""
        row = chosen.best
        number, noise = find_noise(self.settings)
        said = "One run each" if row.repeats == 1 else f"Medians of {row.repeats} runs"
        if row.kind == "published":
            said = "Published figures" + (", one run each" if row.repeats == 1 else "")
        elif row.repeats == 1 and number:
            within = f"within {100 * max(noise, 0.001):.1f} %"
            said += f"; {count(number, 'setting')} measured more than once agreed {within}"
        elif row.repeats < MIN_REPEATS:
            said += f", so small differences may be chance; use --repeats {MIN_REPEATS}"
        off = [
            axis
            for axis in GAINFUL
            if row.device == "cuda"
            and row.kind == "measured"
            and all(getattr(s.best, axis) == getattr(Case, axis) for s in self.settings)
        ]
        if off:
            flags = join_words([f"--{name_axis(axis).replace(' ', '-')}" for axis in off])
            said += f". Not tried: {flags}"
        if row.device == "cpu" and len(self.settings) > 1:
            said += ". Ratios of a CPU say nothing of a GPU"
        return f"{said}."

    @property
    def bounds(self) -> Bounds:
        """The largest batch that fits in what is recommended, and the smallest that does not."""
        chosen = self.chosen
        rows: list[Result | Run] = [*(s.best for s in self.settings), *self.probes]
        return find_bounds([r for r in rows if chosen and r.precision == chosen.best.precision])

    def _tell_largest(self) -> str:
        """Name the largest batch that fits each precision, if any ran out of memory or a search for
        it still goes on. Only cases with the fewest micro-batches count, as these take less
        memory."""
        rows: list[Result | Run] = [*self.probes]
        rows += [row for setting in self.settings for row in setting.cases]
        least = min(row.accumulate for row in rows)
        ended = [row for row in rows if row.accumulate == least]
        if not any(row.status in REFUSED for row in ended):
            going = any(s.wall.ending is None for s in self.found.searches if s[:2] == self.machine)
            fits, _ = find_bounds(ended)
            every = f"Every batch size that was tried fits, up to {fits}; the search has not ended."
            return every if going and fits else ""
        unknown = f" ({LABELS['unknown']})" if {row.kind for row in ended} == {"unknown"} else ""
        limits = order_values("memory_limit", (row.memory_limit for row in ended))
        said = []
        for limit in limits:
            under = f" under {limit}" if limit else " without a limit"
            largest = ", ".join(_list_largest([row for row in ended if row.memory_limit == limit]))
            said.append(f"{under if len(limits) > 1 else ''}: {largest}")
        return f"Largest batch size that fits{unknown}{';'.join(said)}."


def _time(setting: Setting) -> str:
    return write_quantity(QUANTITIES["epoch_time_s"], setting.best, spread=False)


def _name_other(setting: Setting, axes: Sequence[str]) -> str:
    """Name a setting by what differs in it: ``at batch size 64, without compile``."""
    words = []
    for axis in axes:
        text = name_case(setting.best, [axis])
        if axis == "batch_size":
            words.append(f"at {text}")
        else:
            words.append(f"with {text}" if text else f"without {name_axis(axis)}")
    return ", ".join(words)


def _write_interval(found: Equivalence) -> str:
    """Write the interval of a ratio, or of a difference where a loss is not above zero."""
    ends = write_ends((found.low, found.high), found.write, " to ")
    return f" (90 %: {ends}{' times' * (not found.unit)})" if ends else ""


def _list_saved(row: Row, base: Row) -> Iterator[str]:
    """Yield the memory and the energy beside those of the baseline, if they differ."""
    ours, theirs = row.memory_bytes, base.memory_bytes
    if row.memory_measure == base.memory_measure and abs(over(ours, theirs) - 1) > STEADY:
        yield f"{ours / GIB:#.3g} instead of {theirs / GIB:#.3g} GiB"
    ours, theirs = row.energy_per_epoch_j, base.energy_per_epoch_j
    known = is_number(ours) and is_number(theirs) and theirs > 0 and base.settled
    if known and not (row.energy or base.energy):
        yield f"{100 * ours / theirs:.0f} % of {base.precision}'s energy"


def _write_saving(shares: Sequence[float], one: bool) -> str:
    if max(map(abs, shares)) < 0.005:
        return f"take{'s' * one} as long"
    if min(shares) < 0:
        most = f"{'' if one else 'up to '}{100 * -min(shares):.0f}"
        return f"take{'s' * one} {most} % longer"
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"save{'s' * one} {low if low == high else f'{low} to {high}'} %"


def _compare_learnt(chosen: Setting, others: Sequence[Setting]) -> Iterator[str]:
    """Yield what larger batches learn in the same epoch, where all were evaluated whole."""
    accuracies = [setting.find_learnt("test_accuracy") for setting in (chosen, *others)]
    if any(accuracy is None for accuracy in accuracies):
        return
    ours, *theirs = [f"{100 * accuracy:.0f}" for accuracy in accuracies if accuracy is not None]
    reach = "reaches" if len(others) == 1 else "reach"
    yield f"{reach} {join_words(theirs)} % test accuracy against {ours} %"


def _list_largest(ended: Sequence[Result | Run]) -> Iterator[str]:
    for precision in order_values("precision", (row.precision for row in ended)):
        fits, fails = find_bounds([row for row in ended if row.precision == precision])
        if fits:
            yield f"{precision} {f'{fits} ({fails} does not)' if fails else f'at least {fits}'}"
        elif fails:
            yield f"{precision} none (not even {fails})"
