"""What limits a setting, by the profile of one of its runs."""

from __future__ import annotations

from pathlib import Path

from bench.advise.standing import strip
from bench.case import Case
from bench.diagnosis.sentences import name_part
from bench.questions.profiles import STEP, make_step, take_runs
from bench.record import RELIABLE
from bench.store.reader import read_cases, read_records, read_work

MOST_PARTS, LEAST_PART = 3, 0.05
"""Parts of a step that are named, and the least share of it that such a part has."""


def tell_limits(folder: Path, setting: Case) -> str:
    """Say what the steps of a setting spend most time on; empty where none was profiled."""
    rows = read_records(folder)
    rows = rows[rows["profile"] & rows["status"].isin(RELIABLE) & rows[STEP].notna()]
    work = dict(list(read_work(folder).groupby("record_id", sort=False)))
    for case, name, run in zip(read_cases(rows), rows["record_id"], take_runs(rows), strict=True):
        step = make_step(case, [(run, work.get(name))]) if strip(case) == setting else None
        if step and (divided := step.breakdown):
            shares = {
                part.name: divided.find_time(part.name) / divided.step_s for part in divided.parts
            }
            most = sorted(shares.items(), key=lambda part: -part[1])[:MOST_PARTS]
            named = [
                f"{name_part(n)} {100 * share:.0f} %" for n, share in most if share > LEAST_PART
            ]
            return f"Why not more: of its step, {', '.join(named)}." if named else ""
    return ""
