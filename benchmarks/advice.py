"""How good the advice is that a budget buys: the policy of bench.advise against known grids.

`python -m benchmarks.advice` prints, for recorded and for planted grids, how much slower than the
best setting the chosen one is (its regret), by the part of the whole grid's time that was spent,
beside two simple policies: the grid in its order, and in a random one. Nothing is trained: a run
takes its recorded or planted time, with noise.
"""

from __future__ import annotations

import csv
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from bench.advise.belief import guess
from bench.advise.policy import Budget, choose
from bench.advise.standing import (
    LOOK_UNTIL,
    MEASURE_UNTIL,
    Aim,
    Result,
    Space,
    Standing,
    Trial,
)
from bench.case import Case
from bench.precision import PRECISIONS
from bench.record import Status

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = Path(__file__).with_name("grids.csv")
"""Sweeps of all settings of three networks in fp32 by two CPU cores of a shared machine."""

PARTS = (0.1, 0.25, 0.5)
"""Parts of the time of the whole grid that are given as a budget."""


def draw(*about: object) -> random.Random:
    """Return random numbers that are always the same for ``about``. Of a case the settings that are
    not the default count, so that a new axis leaves them as they are."""

    def spell(one: object) -> str:
        if not isinstance(one, Case):
            return repr(one)
        values = ((f.name, getattr(one, f.name), f.default) for f in fields(one))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default)

    return random.Random(zlib.crc32("; ".join(map(spell, about)).encode()))


@dataclass(frozen=True)
class Grid:
    """Settings and what is true of them: the epoch's time in s; of one that does not fit, None.

    ``noise`` is the standard deviation of the logarithm between two runs, ``start_s`` what a run
    takes beside its steps, ``compile_s`` what compiling takes.
    """

    name: str
    now: Case
    times: dict[Case, float | None]
    noise: float = 0.01
    start_s: float = 6.0
    compile_s: float = 40.0

    @property
    def best_s(self) -> float:
        return min(time for time in self.times.values() if time)

    def guess_s(self, setting: Case) -> float:
        """What is expected of a start before any was seen."""
        return self.start_s + self.compile_s * setting.compiled

    def cost(self, trial: Trial) -> tuple[float, float]:
        """Seconds of a run beside its steps, and of its steps: of both up to three times more or
        less than is expected."""
        chance = draw(*vars(trial).values())
        time = self.times.get(trial.setting) or 0.0
        alone = Space(trial.setting, [trial.setting], [0.0], epoch_s=lambda setting: time)
        trained_s = Standing([], alone).find_case(trial).fraction * time
        luck = [3 ** chance.uniform(-1, 1) for _ in range(2)]
        return self.guess_s(trial.setting) * luck[0], trained_s * luck[1]

    @property
    def whole_s(self) -> float:
        """Seconds that one look at each setting takes."""
        return sum(sum(self.cost(Trial(setting, Aim.LOOK))) for setting in self.times)

    def run(self, trial: Trial, chance: random.Random) -> Result:
        # what learns at the present batch size may not be of the grid
        time = self.times.get(trial.setting, self.times[self.now])
        start_s, trained_s = self.cost(trial)
        if time is None:
            return Result(trial, Status.OOM, start_s)
        error = LOOK_UNTIL if trial.aim is Aim.LOOK else MEASURE_UNTIL
        read = time * math.exp(chance.gauss(0, math.hypot(self.noise, error / 2)))
        return Result(
            trial, Status.OK, start_s + trained_s, start_s, trained_s, read, error, value=read
        )


def read_grids() -> Iterator[Grid]:
    """The sweeps that are kept in results/, one grid each."""
    h100 = [*RESULTS.glob("nvidia-h100-*/records.csv")]
    kept = {
        "H100, DPN-92": read_rows(*h100),
        "H200, DPN-92": read_rows(RESULTS / "reference/h200-lab.csv"),
        "TITAN RTX, DPN-92, 2019": read_rows(RESULTS / "reference/rtx-titan-2019.csv"),
        "CPU, dpn-small": read_rows(RESULTS / "cpu-epyc-20261120/records.csv"),
    }
    for row in read_rows(GRIDS):
        kept.setdefault(f"shared CPU, {row['network']}", []).append(row)
    for name, rows in kept.items():
        times = dict(_read_times(rows))
        now = min((s for s in times if s.precision == "fp32"), key=_differ_from_usual)
        noise = 0.1 if name.startswith("shared") else 0.05 if name.startswith("CPU") else 0.01
        means = {setting: fmean(of) if of else None for setting, of in times.items()}
        yield Grid(name, now, means, noise)


def _differ_from_usual(setting: Case) -> tuple[bool, bool, int]:
    """What people use before they try anything comes first, of it the smallest batch."""
    return setting.compiled, setting.channels_last, setting.batch_size


def read_rows(*files: Path) -> list[dict[str, str]]:
    """The rows of CSV files."""
    rows: list[dict[str, str]] = []
    for file in files:
        with file.open(encoding="utf-8", newline="") as opened:
            rows += csv.DictReader(opened)
    return rows


def _read_times(rows: Sequence[dict[str, str]]) -> Iterator[tuple[Case, list[float]]]:
    """The settings of rows and their times; of one that did not fit, none."""
    found: dict[Case, list[float]] = {}
    for row in rows:
        setting = Case(
            model=row["model"],
            precision=row["precision"],
            loss_scale=PRECISIONS[row["precision"]].default_loss_scale,
            batch_size=int(row["batch_size"]),
            compile="off" if row.get("compile") in (None, "", "off") else "default",
            channels_last=row.get("channels_last") == "on",
            device=row["device"] or "cuda",
        )
        if row["epoch_time_s"]:
            found.setdefault(setting, []).append(float(row["epoch_time_s"]))
        elif row["status"] == "oom":
            found.setdefault(setting, [])
    yield from found.items()


def plant(
    name: str, seed: int, tell: Callable[[Case, random.Random], float], **more: float
) -> Grid:
    """A grid of four precisions, six batch sizes and two switches by a rule of the logarithm."""
    now = Case(batch_size=128)
    times: dict[Case, float | None] = {}
    names = ("fp32", "tf32", "fp16", "bf16-amp")
    sizes, compiles = (32, 64, 128, 256, 512, 1024), ("off", "default")
    for precision, size, compiled, last in product(names, sizes, compiles, (False, True)):
        setting = replace(
            now,
            precision=precision,
            loss_scale=PRECISIONS[precision].default_loss_scale,
            batch_size=size,
            compile=compiled,
            channels_last=last,
        )
        room = 256 if PRECISIONS[precision].arithmetic in _WIDE else 512
        log = tell(setting, draw(seed, setting))
        times[setting] = 60 * math.exp(log) if size <= room else None
    return Grid(name, now, times, **more)


_WIDE = ("float32", "tfloat32")


def _describe_plain(s: Case, jitter: random.Random) -> float:
    """Each lever has an effect of its own."""
    fast = PRECISIONS[s.precision].arithmetic not in _WIDE
    log = -0.9 * fast - 0.5 * (s.precision == "tf32") - 0.05 * math.log2(s.batch_size / 128)
    log += -0.3 * (s.compile != "off") + 0.1 * s.channels_last
    return log + jitter.gauss(0, 0.02)


def _describe_together(s: Case, jitter: random.Random) -> float:
    """Compiling and channels-last lose time each alone, and gain much together in bf16."""
    fast = PRECISIONS[s.precision].arithmetic not in _WIDE
    both = s.channels_last and s.compile != "off" and s.precision == "bf16-amp"
    log = -0.4 * fast - 0.1 * math.log2(s.batch_size / 128) * (s.batch_size <= 512)
    log += 0.05 * (s.compile != "off") + 0.1 * s.channels_last - 0.7 * both
    return log + jitter.gauss(0, 0.02)


def _describe_nothing(s: Case, jitter: random.Random) -> float:
    """Nothing helps: the present setting is the best."""
    changed = (s.precision != "fp32") + (s.compile != "off") + s.channels_last
    return 0.06 * changed + 0.05 * abs(math.log2(s.batch_size / 128)) + abs(jitter.gauss(0, 0.01))


def _describe_launch(s: Case, jitter: random.Random) -> float:
    """A step is bound by the host until it is large: only a larger batch helps."""
    log = -0.6 * math.log2(s.batch_size / 128) if s.batch_size <= 512 else -1.2
    return log - 0.2 * (s.compile != "off") + jitter.gauss(0, 0.02)


def list_grids() -> list[Grid]:
    """All grids that the policy is judged by."""
    return [
        *read_grids(),
        plant("planted: each by itself", 1, _describe_plain),
        plant("planted: two only together", 2, _describe_together),
        plant("planted: nothing helps", 3, _describe_nothing),
        plant("planted: bound by the host", 4, _describe_launch),
        plant("planted: each by itself, 5 % noise", 5, _describe_plain, noise=0.05),
    ]


def advise(grid: Grid, budget_s: float, seed: int) -> tuple[Case, float]:
    """What the policy chooses, and the seconds that it took."""
    chance, known, spent = random.Random(seed), list[Result](), 0.0
    settings = list(grid.times)
    prior = [guess(setting) for setting in settings]
    space = Space(grid.now, settings, prior, judged=False, start_s=grid.guess_s)
    while trial := choose(Standing(known, space), Budget(budget_s, budget_s - spent)):
        known.append(grid.run(trial, chance))
        spent += known[-1].took_s
    return Standing(known, space).advised or grid.now, spent


def follow(grid: Grid, budget_s: float, seed: int, shuffled: bool) -> Case:
    """The fastest of the settings, in order or in a random one, that the budget allows."""
    chance, settings = random.Random(seed), list(grid.times)
    if shuffled:
        chance.shuffle(settings)
    best, least, spent = grid.now, math.inf, 0.0
    for setting in settings:
        result = grid.run(Trial(setting, Aim.LOOK), chance)
        spent += result.took_s
        if spent > budget_s:
            break
        if result.value and result.value < least:
            best, least = setting, result.value
    return best


def find_regret(grid: Grid, chosen: Case) -> float:
    """By which share the chosen setting is slower than the best."""
    time = grid.times[chosen]
    return math.inf if time is None else time / grid.best_s - 1


def main(seeds: int = 20) -> None:
    """Print the table."""
    print(f"{'regret, mean of ' + str(seeds) + ' (share within 3 %)':36}", end="")
    print("".join(f"{f'{100 * part:.0f} % of the time':>34}" for part in PARTS))
    print(f"{'':36}" + f"{'advise':>12}{'in order':>11}{'random':>11}" * len(PARTS))
    for grid in list_grids():
        line = f"{grid.name + f' ({len(grid.times)})':36}"
        for part in PARTS:
            budget = part * grid.whole_s
            ways = (
                [advise(grid, budget, seed)[0] for seed in range(seeds)],
                [follow(grid, budget, seed, False) for seed in range(seeds)],
                [follow(grid, budget, seed, True) for seed in range(seeds)],
            )
            for place, way in enumerate(ways):
                regrets = [find_regret(grid, chosen) for chosen in way]
                right = sum(regret < 0.03 for regret in regrets) / seeds
                text = f"{100 * fmean(regrets):.1f} ({100 * right:.0f})"
                line += f"{text:>{11 + (place == 0)}}"
        print(line)


if __name__ == "__main__":
    main()
