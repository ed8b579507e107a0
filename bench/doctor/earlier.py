"""What a device could do when it was measured before, and whether it can do less now.

`python -m bench.doctor` measures anew and keeps that in the user's cache folder for an hour, and a
sweep keeps there what it had to measure. The rows of sweeps have it for good.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.data import find_cache
from bench.diagnosis.rates import (
    CALL,
    RATES,
    SAME_DEVICE,
    are_other_cpus,
    find_halves,
    find_losses,
    write_losses,
)
from bench.environment.device import Platform
from bench.errors import UsageError
from bench.gpu.cards import find_card, find_cards
from bench.plain import read_value
from bench.record import COMPARABLE, Environment
from bench.store.cells import RECORDS
from bench.store.reader import read_records
from bench.text import read_time, replace_file
from bench.yardstick import Yardstick, read_tries

if TYPE_CHECKING:
    import pandas as pd

FRESH_S = 3600.0
"""For how long rates stand: a card's power limit and its neighbours change from day to day."""


def recall(environment: Environment, seconds: float, cores: Sequence[int] = ()) -> Yardstick:
    """What a device could do within the last hour, by tries that took ``seconds`` for each rate, on
    ``cores`` of a CPU where they are not those of this process; no rates where that is not
    known."""
    try:
        kept = json.loads(_find_file(environment, cores).read_text(encoding="utf-8"))
        found: Yardstick = read_value(Yardstick, kept["yardstick"])
        alike = kept["of"] == _describe(environment, seconds)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Yardstick()
    return found if alike and find_age(found.measured_at) <= FRESH_S else Yardstick()


def keep(
    found: Yardstick, environment: Environment, seconds: float, cores: Sequence[int] = ()
) -> None:
    """Keep what was measured, or where that is not whole, forget what was before: rates that
    collapsed or could not be measured may be had the next time."""
    if not found.rates or found.reasons or found.collapsed:
        forget(environment, cores)
        return
    content = {"of": _describe(environment, seconds), "yardstick": asdict(found)}
    file = _find_file(environment, cores)
    with suppress(OSError):  # measured again, then
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(content, indent=2))


def forget(environment: Environment, cores: Sequence[int] = ()) -> None:
    """Have a device measured the next time, since its rates turned out to be wrong."""
    with suppress(OSError):
        _find_file(environment, cores).unlink()


def find_age(moment: str) -> float:
    """Seconds since a UTC time of a record; of none since 1970, in the future without end."""
    age_s = time.time() - read_time(moment)
    return age_s if age_s >= 0 else math.inf


def _find_file(environment: Environment, cores: Sequence[int]) -> Path:
    place = [environment.host, environment.gpu_uuid or environment.gpu or environment.cpu, *cores]
    name = sha256(json.dumps(place).encode()).hexdigest()[:16]
    return find_cache() / "rates" / f"{name}.json"


def _describe(environment: Environment, seconds: float) -> list[object]:
    """What rates are of: another driver, torch, harness or power limit has others."""
    device = [name for name, of in COMPARABLE.items() if of == ("device",)]
    uuid = environment.gpu_uuid
    card = find_card(uuid, find_cards()[0]) if uuid else None
    limit_w = card.power_limit_w if card else None
    return [*(getattr(environment, n) for n in (*device, "torch_threads")), limit_w, seconds]


# ------------------------------------------------------------------------------- in sweeps' rows

MOST_SWEEPS = 20
"""Earlier sweeps whose rates are looked at, the newest: to read one takes some 50 ms."""


@dataclass(frozen=True)
class Earlier:
    folder: Path
    day: str
    row: Mapping[Any, Any]


def read_earlier(platform: Platform, folder: Path) -> list[Earlier]:
    """The times at which a device was measured, in the sweeps of a folder, as ``results`` is."""
    files = []
    for file in folder.glob(f"*/{RECORDS}"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file))
    found = []
    for _, file in sorted(files, reverse=True)[:MOST_SWEEPS]:
        try:
            frame = read_records(file)
        except UsageError:  # of a newer version, or torn
            continue
        rows = _find_alike(frame, platform)
        found += [Earlier(file.parent, row["started_at"][:10], row) for row in rows]
    return found


def expect_rates(earlier: Sequence[Earlier]) -> dict[str, float]:
    """The best of each rate that was measured."""
    found: dict[str, float] = {}
    for name, rate in ((name, one.row[name]) for one in earlier for name in RATES):
        if not math.isnan(rate):
            found[name] = max(rate, found.get(name, 0.0))
    return found


def describe_slowdown(rates: Mapping[str, Any], earlier: Sequence[Earlier]) -> str:
    """Where the rates of a device are lower than at an earlier time, at its worst; or nothing. Of a
    CPU no more than its name and what it can compute is known to be the same."""
    lost = [(losses, one) for one in earlier if (losses := find_losses(rates, one.row))]
    if not lost:
        return ""
    losses, one = max(lost, key=lambda pair: max(pair[0].values()))
    what = "" if one.row["gpu"] else "a CPU of this name "
    return f"less than {what}in {one.folder} ({one.day}): {write_losses(losses)}"


def recall_rates(platform: Platform, folder: Path) -> Yardstick:
    """What this device could do by a sweep's folder, if its last row is fresh and has products. So
    a sweep that goes on within an hour of its last case keeps its rates. Where products are
    missing, they could not be measured or had collapsed; that may have passed."""
    if not (folder / RECORDS).is_file():
        return Yardstick()
    frame = read_records(folder)
    uuid = platform.environment.gpu_uuid or ""
    rows = _find_alike(frame[frame["gpu_uuid"] == uuid], platform)
    if not rows or find_age(rows[-1]["finished_at"]) > FRESH_S:
        return Yardstick()
    found = read_yardstick(rows[-1])
    return found if "rate_float32" in found.rates else Yardstick()


def read_yardstick(columns: Mapping[Any, Any]) -> Yardstick:
    """The rates in a record's columns, or in the fields of its `bench.record.Environment`."""
    rates = {name: columns[name] for name in (*RATES, CALL)}
    known = {n: float(rate) for n, rate in rates.items() if rate is not None and rate == rate}
    tries = read_tries(columns["rate_tries"] or "")
    return Yardstick(known, tries=tries, measured_at=columns["rates_at"] or "")


def _find_alike(frame: pd.DataFrame, platform: Platform) -> list[dict[Any, Any]]:
    """One row for each time that the same device was measured, the latest of that time."""
    frame = frame.drop_duplicates([*SAME_DEVICE, *RATES], keep="last")
    now = asdict(platform.environment)
    rows = frame[frame["rate_copy"].notna()].to_dict("records")
    alike = [row for row in rows if all((row[n] or None) == now[n] for n in SAME_DEVICE)]
    halves = platform.halves
    return [row for row in alike if not are_other_cpus(halves, find_halves(row))]
