"""The screen at the end of a card: every phase, what was cut and why, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.card.children import ROOT
from bench.card.folder import Card, Entry
from bench.card.phases import PHASES
from bench.store.cells import RECORDS


def summarize(
    card: Card, report: Entry, problems: Sequence[str], seconds: float, minutes: str
) -> Iterator[str]:
    gpu = card.identity.get("gpu") or "REHEARSAL on a CPU: these numbers say nothing about a GPU"
    files = [file for file in card.folder.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files) / 2**20
    yield f"\n{gpu}: {int(seconds) // 60}:{int(seconds) % 60:02d} of {minutes} min"
    yield f"{card.folder} ({len(files)} files, {size:.1f} MiB)\n"
    for name in PHASES:
        state, line, took = "not run", "", "–"
        if entry := card.phases.get(name):
            state, line = entry.state, entry.line
            took = f"{entry.seconds:.0f} s" if entry.seconds else took
        yield f"  {name:<11} {state:<11} {took:>6}  {line}".rstrip()
    yield f"  {'report':<11} {report.state:<11} {report.seconds:>4.0f} s  {report.line}\n"
    yield from (f"limit broken: {problem}" for problem in problems)
    left = ", ".join(name for name in PHASES if not card.finished(name))
    yield f"to continue with {left}: run the same command again" if left else "complete"
    if card.identity["dataset"] == "synthetic" and not card.rehearsal:
        yield (
            "no CIFAR-10 was found, so the images are synthetic and the losses say "
            "nothing about CIFAR-10; give --data-dir"
        )
    if card.identity["fraction"] != 1 and not card.rehearsal:
        yield (
            f"each case measured {100 * float(card.identity['fraction']):g} % of an epoch; "
            "--fraction 1 measures whole epochs, into a new folder"
        )
    if (card.folder / RECORDS).is_file():
        yield from _describe_contributing(card)


def _describe_contributing(card: Card) -> Iterator[str]:
    """Yield commands that add the folder to a clone of the project, and what it discloses."""
    from bench.store.reader import read_records
    from bench.validate.evidence import list_disclosed

    place = Path("results", card.folder.name)
    here = card.folder.parent == ROOT / "results"
    what = card.identity.get("gpu") or card.identity.get("cpu")
    yield f"to contribute it, in {'this' if here else 'a'} clone of the project:"
    bring = "" if here else f"cp -r {shlex.quote(str(card.folder))} results/ && "
    yield f"  {bring}python -m bench.validate {place}"
    yield f"  git add {place} && git commit -m {shlex.quote(f'Add results of {what}')}"
    yield f"it discloses {'; '.join(list_disclosed(card.folder, read_records(card.folder)))}"
