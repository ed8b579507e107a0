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
"""How long rates are valid: a card's power limit and its neighbours change from day to day."""


def recall(environment: Environment, seconds: float, cores: Sequence[int] = ()) -> Yardstick:
    """Return the rates of a device that were measured within the last hour, or none. They must have
    been measured for ``seconds`` each, and on ``cores`` if these are not the process's own."""
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
    """Save what was measured. If that is incomplete, forget what was saved before instead: rates
    that collapsed or could not be measured may succeed the next time."""
    if not found.rates or found.reasons or found.collapsed:
        forget(environment, cores)
        return
    content = {"of": _describe(environment, seconds), "yardstick": asdict(found)}
    file = _find_file(environment, cores)
    with suppress(OSError):  # then it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(content, indent=2))


def forget(environment: Environment, cores: Sequence[int] = ()) -> None:
    """Delete a device's saved rates, which turned out to be wrong; it is then measured again."""
    with suppress(OSError):
        _find_file(environment, cores).unlink()


def find_age(moment: str) -> float:
    """Return the seconds since a UTC time in a record: since 1970 for none, inf in the future."""
    age_s = time.time() - read_time(moment)
    return age_s if age_s >= 0 else math.inf


def _find_file(environment: Environment, cores: Sequence[int]) -> Path:
    place = [environment.host, environment.gpu_uuid or environment.gpu or environment.cpu, *cores]
    name = sha256(json.dumps(place).encode()).hexdigest()[:16]
    return find_cache() / "rates" / f"{name}.json"


def _describe(environment: Environment, seconds: float) -> list[object]:
    """Return what rates depend on: driver, torch, harness, power limit and others."""
    device = [name for name, of in COMPARABLE.items() if of == ("device",)]
    uuid = environment.gpu_uuid
    card = find_card(uuid, find_cards()[0]) if uuid else None
    limit_w = card.power_limit_w if card else None
    return [*(getattr(environment, n) for n in (*device, "torch_threads")), limit_w, seconds]


# ------------------------------------------------------------------------------- in sweeps' rows

MOST_SWEEPS = 20
"""The most earlier sweeps whose rates are read, newest first: reading one takes about 50 ms."""


@dataclass(frozen=True)
class EarlierMeasurement:
    folder: Path
    day: str
    row: Mapping[Any, Any]


def read_earlier(platform: Platform, folder: Path) -> list[EarlierMeasurement]:
    """Return the earlier measurements of a device in the sweeps of a folder such as ``results``."""
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
        found += [EarlierMeasurement(file.parent, row["started_at"][:10], row) for row in rows]
    return found


def expect_rates(earlier: Sequence[EarlierMeasurement]) -> dict[str, float]:
    """Return the highest measured value of each rate."""
    found: dict[str, float] = {}
    for name, rate in ((name, one.row[name]) for one in earlier for name in RATES):
        if not math.isnan(rate):
            found[name] = max(rate, found.get(name, 0.0))
    return found


def describe_slowdown(rates: Mapping[str, Any], earlier: Sequence[EarlierMeasurement]) -> str:
    """Describe by how much rates are below the earlier sweep with the largest loss; empty if none
    is. A CPU is only known to have the same name and not to differ in its half precisions."""
    lost = [(losses, one) for one in earlier if (losses := find_losses(rates, one.row))]
    if not lost:
        return ""
    losses, one = max(lost, key=lambda pair: max(pair[0].values()))
    what = "" if one.row["gpu"] else "a CPU of this name "
    return f"less than {what}in {one.folder} ({one.day}): {write_losses(losses)}"


def recall_rates(platform: Platform, folder: Path) -> Yardstick:
    """Return the rates in a sweep's folder if its last row is less than an hour old and has
    products. So a sweep that is resumed within an hour keeps its rates. Missing products could not
    be measured or had collapsed, which may be over by now."""
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
    """Read the rates from a record's columns, or the fields of its `bench.record.Environment`."""
    rates = {name: columns[name] for name in (*RATES, CALL)}
    known = {n: float(rate) for n, rate in rates.items() if rate is not None and rate == rate}
    tries = read_tries(columns["rate_tries"] or "")
    return Yardstick(known, tries=tries, measured_at=columns["rates_at"] or "")


def _find_alike(frame: pd.DataFrame, platform: Platform) -> list[dict[Any, Any]]:
    """Return a row for each time that the same device was measured, the latest of that time."""
    frame = frame.drop_duplicates([*SAME_DEVICE, *RATES], keep="last")
    now = asdict(platform.environment)
    rows = frame[frame["rate_copy"].notna()].to_dict("records")
    alike = [row for row in rows if all((row[n] or None) == now[n] for n in SAME_DEVICE)]
    halves = platform.halves
    return [row for row in alike if not are_other_cpus(halves, find_halves(row))]
