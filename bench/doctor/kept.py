"""What a device could do when it was last measured, kept in the user's cache folder for an hour.

`python -m bench.doctor` measures anew and keeps that, and a sweep keeps what it had to measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from bench.data import find_cache
from bench.gpu.cards import find_card, find_cards
from bench.plain import read_value
from bench.record import COMPARABLE, Environment
from bench.text import replace_file
from bench.yardstick import Yardstick

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
    """Seconds since a UTC time of a record; of what is none, or in the future, without end."""
    try:
        then = datetime.fromisoformat(moment)
    except ValueError:
        return math.inf
    age_s = (datetime.now(UTC) - then).total_seconds() if then.tzinfo else math.inf
    return age_s if age_s >= 0 else math.inf


def _find_file(environment: Environment, cores: Sequence[int]) -> Path:
    place = [environment.host, environment.gpu_uuid or environment.cpu, *cores]
    name = sha256(json.dumps(place).encode()).hexdigest()[:16]
    return find_cache() / "rates" / f"{name}.json"


def _describe(environment: Environment, seconds: float) -> list[object]:
    """What rates are of: another driver, torch, harness or power limit has others."""
    device = [name for name, of in COMPARABLE.items() if of == ("device",)]
    uuid = environment.gpu_uuid
    card = find_card(uuid, find_cards()[0]) if uuid else None
    limit_w = card.power_limit_w if card else None
    return [*(getattr(environment, n) for n in (*device, "torch_threads")), limit_w, seconds]
