"""The order in which the phases of a card run, and the time that each of them gets."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench.card.children import ROOT, ChildRunner, say
from bench.card.folder import Card, Entry, State
from bench.card.phases import PHASES, PUBLISHED, Phase, write_readme, write_report
from bench.card.scale import Scale
from bench.errors import UsageError
from bench.text import clean

AGENDA = (
    *("doctor", "headline", "rtx-titan", "precision", "repeats", "epochs", "tests", "compile"),
    *("autotune", "graphs", "apex", "wall-limit", "scales", "tests", "wall"),
    *("overhead", "profiles", "ddp"),
)
"""Phases in order of priority; "tests" has two turns.

An H200 took 8 s for the doctor, 98 for the nine cases of 2019 with their profiles, 39 for the other
precisions, and 66 for whole epochs of two cases with their accuracy (2026-11-26). Planned are 60 s
for two more repeats of three cases, 60 for tests that train in one process, and 80 for compiled
and autotuned cases. What no card has shown yet comes first in the second
call.
"""

SHARES = {"tests": 0.12, "wall-limit": 0.4}
"""The largest share of the total time for the first turn of a phase; other phases may take all."""

CLOSING_S, CLOSING_REHEARSAL_S = 20.0, 12.0
"""Seconds kept at the end to stop what runs, write the report and fold the logs."""


def run_agenda(
    card: Card,
    scale: Scale,
    children: ChildRunner,
    begun: float,
    end: float,
    only: Sequence[str] = (),
) -> None:
    """Run each phase of ``only``, or all, by priority, between ``begun`` and ``end`` by
    time.monotonic(), and write the state after each. The report is made after that."""
    for turn, name in enumerate(AGENDA):
        if children.stopped or (only and name not in only):
            continue
        if card.finished(name) and name != "doctor":  # the machine may have changed since
            continue
        phase, now = PHASES[name], time.monotonic()
        before = card.phases.get(name, Entry(State.CUT))
        share = 1.0 if name in AGENDA[:turn] else SHARES.get(name, 1.0)
        children.until = min(end, now + share * (end - begun))
        left, needs = end - now, phase.rehearsal_s if scale.device == "cpu" else phase.needs_s
        if left < needs:
            reason = f"needs about {needs:.0f} s, {max(0, left):.0f} s were left"
            line = f"{before.line}; {reason}" if before.line else reason
            # a lack of time now does not mend an earlier failure
            entry = Entry(before.state, before.seconds, line=line)
        else:
            say(f"{name}: {phase.what}")
            entry = run_phase(phase, card, scale, children)
            entry.seconds = time.monotonic() - now + before.seconds
        card.phases[name] = entry
        card.write()


def run_phase(phase: Phase, card: Card, scale: Scale, children: ChildRunner) -> Entry:
    """Run a phase; an exception in it becomes its outcome, and the others go on."""
    if phase.absent and scale.device == "cpu":
        return Entry(State.ABSENT, line=phase.absent)
    try:
        return phase.run(card, scale, children)
    except Exception as error:
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        return Entry(State.FAILED, line=clean(f"{kind}{error}"))


def close(card: Card, children: ChildRunner, until: float) -> Entry:
    """Write the report, and for a card to be published the README, in time for ``until``."""
    children.closing, children.until = True, until
    started = time.monotonic()
    report = write_report(card, children)
    report.seconds = time.monotonic() - started
    here = card.folder.parent == ROOT / "results"
    if card.done(*PUBLISHED) and not card.rehearsal and here:
        write_readme(children)
    return report
