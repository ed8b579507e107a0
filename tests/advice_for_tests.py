"""The search of bench.advise on recorded and planted grids, whose times are known.

Nothing is trained: a run takes its recorded or planted time, with noise.
"""

from __future__ import annotations

import csv
import math
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from statistics import fmean

from bench.advise.settings import expect_start, guess, strip
from bench.advise.standing import UNTIL, Budget, Result, Space, Standing, choose
from bench.case import Case
from bench.precision import PRECISIONS
from bench.questions.settings import list_near
from bench.record import Status

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = Path(__file__).with_name("grids.csv")
"""Sweeps of all settings of three networks in fp32 by two CPU cores of a shared machine."""

ITEMS = 50_000
"""Items of an epoch: those of CIFAR-10."""


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

    ``noise`` is the standard deviation of the logarithm between two runs.
    """

    name: str
    now: Case
    times: dict[Case, float | None]
    noise: float = 0.01
    luck: int = 0  # what runs cost is drawn by it

    @property
    def right(self) -> Case:
        """What the rule chooses from the true times."""
        timed = {setting: time for setting, time in self.times.items() if time}
        return list_near(timed, timed.__getitem__, attrgetter("batch_size"))[0]

    def cost(self, case: Case) -> tuple[float, float]:
        """Seconds of a run beside its steps, and of its steps: of both up to three times more or
        less than is expected."""
        setting = strip(case)
        chance, time = draw(self.luck, setting), self.times.get(setting) or 0.0
        luck = [3 ** chance.uniform(-1, 1) for _ in range(2)]
        return expect_start(setting) * luck[0], case.fraction * time * luck[1]

    def measure(self, setting: Case) -> Case:
        time = self.times[setting]
        space = Space([setting], [0.0], epoch_s=lambda _: time, items=ITEMS)
        return Standing([], space).measure(setting)

    @property
    def whole_s(self) -> float:
        """Seconds that one run of each setting takes."""
        return sum(sum(self.cost(self.measure(setting))) for setting in self.times)

    def run(self, case: Case, chance: random.Random) -> Result:
        # what learns at the present batch size may not be of the grid
        time = self.times.get(strip(case), self.times[self.now])
        start_s, trained_s = self.cost(case)
        if time is None:
            return Result(case, Status.OOM, start_s)
        read = time * math.exp(chance.gauss(0, math.hypot(self.noise, UNTIL / 2)))
        return Result(case, Status.OK, start_s + trained_s, trained_s, read, read)


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
    name: str, seed: int, tell: Callable[[Case, random.Random], float], noise: float = 0.01
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
    return Grid(name, now, times, noise)


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


def advise(grid: Grid, budget_s: float, seed: int) -> tuple[Case, int]:
    """What the search advises, and how many runs it took."""
    grid = replace(grid, luck=seed)
    chance, known, spent = random.Random(seed), list[Result](), 0.0
    settings = [grid.now, *(setting for setting in grid.times if setting != grid.now)]
    prior = [guess(setting) for setting in settings]
    space = Space(settings, prior, judged=False, items=ITEMS)
    while case := choose(Standing(known, space), Budget(budget_s, budget_s - spent)):
        known.append(grid.run(case, chance))
        spent += known[-1].took_s
    return Standing(known, space).advised or grid.now, len(known)


def follow(grid: Grid, budget_s: float, seed: int) -> tuple[Case, int]:
    """What the rule chooses of the settings that the budget allows, in a random order."""
    grid = replace(grid, luck=seed)
    chance, settings, spent = random.Random(seed), list(grid.times), 0.0
    chance.shuffle(settings)
    times: dict[Case, float] = {}
    for setting in settings:
        result = grid.run(grid.measure(setting), chance)
        spent += result.took_s
        if spent > budget_s:
            break
        if result.time_s:
            times[setting] = result.time_s
    near = list_near(times, times.__getitem__, attrgetter("batch_size")) if times else [grid.now]
    return near[0], len(times)


def find_regret(grid: Grid, chosen: Case) -> float:
    """By which share the chosen setting is slower than the fastest."""
    time = grid.times[chosen]
    return math.inf if time is None else time / min(filter(None, grid.times.values())) - 1
