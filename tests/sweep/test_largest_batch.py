"""The search for the largest batch, driven by made-up memory, and what it says in the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.results.store.rows import Row
from bench.schema.case import Case
from bench.schema.record import Status, flatten
from bench.sweep.largest_batch import (
    Ask,
    Ending,
    Goal,
    LargestBatch,
    Probe,
    ProbedFamily,
    list_sizes,
    make_probe,
    name_family,
)
from bench.sweep.probing import describe_largest_batch
from tests.planted.records import make_run

SIZES = range(8, 50_001, 8)
SILENT = (Status.ERROR, Status.TIMEOUT, Status.KILLED)
Answer = Callable[[Ask], Probe]


def search(answer: Answer, goal: Goal, most: int = 120) -> tuple[list[Probe], LargestBatch]:
    """Ask until the search ends; the probes and what they show."""
    probes: list[Probe] = []
    while asked := LargestBatch(probes, goal).asked:
        assert asked.batch_size in goal.sizes
        probes.append(answer(asked))
        assert len(probes) <= most
    return probes, LargestBatch(probes, goal)


def remember(
    memory: Callable[[int], float],
    available: float,
    noise: Callable[[], float] = lambda: 0.0,
) -> Answer:
    """Answer by a model of memory, readings being wrong by ``noise``."""

    def answer(ask: Ask) -> Probe:
        used = memory(ask.batch_size)
        if used > available:
            return Probe(ask.batch_size, Status.OOM, long=ask.long)
        return Probe(ask.batch_size, Status.OK, used + noise(), 0, ask.long)

    return answer


def largest(memory: Callable[[int], float], available: float) -> int | None:
    """The brute-force answer."""
    return max((size for size in SIZES if memory(size) <= available), default=None)


def check(largest_batch: LargestBatch, truth: int | None) -> None:
    """The largest batch is where a scan of all batch sizes has it."""
    assert largest_batch.largest == truth
    if truth is None:
        assert (largest_batch.ending, largest_batch.smallest_failing) == (
            Ending.NOTHING_FITS,
            SIZES[0],
        )
    elif truth == SIZES[-1]:
        assert (largest_batch.ending, largest_batch.smallest_failing) == (Ending.EVERY_SIZE, None)
    else:
        assert (largest_batch.ending, largest_batch.smallest_failing) == (Ending.FOUND, truth + 8)


largest_batches = st.floats(5, 13).map(lambda x: 2**x)
shares = st.floats(0, 1.5)
seeds = st.integers(0, 2**32)


@given(largest_batches, shares, st.floats(0, 2), seeds)
def test_a_line_with_noise_takes_at_most_twelve_probes(
    largest_batch: float, share: float, noise: float, seed: int
) -> None:
    """Readings may be wrong by a quarter of a step; whether a batch fits does not depend on it."""
    fixed, chance = share * largest_batch, random.Random(seed)

    def memory(size: int) -> float:
        return fixed + size

    answer = remember(memory, fixed + largest_batch, lambda: chance.uniform(-noise, noise))
    probes, found = search(answer, Goal(SIZES, fixed + largest_batch))
    check(found, largest(memory, fixed + largest_batch))
    assert probes[-1] == replace(probes[-1], batch_size=found.largest, long=True)
    assert len(probes) <= 12


def test_a_plateau_below_a_line_takes_few_probes() -> None:
    """As AdamW of 8 bits on a CPU, whose compiler takes more than small batches: from 64 to 120 it
    grew so little that 4,096 should have trained."""

    def memory(size: int) -> float:
        return max(335 + size / 1000, 300 + 0.269 * size) if size > 32 else 323.4

    probes, found = search(remember(memory, 400), Goal(range(8, 4097, 8), 400))
    assert (found.largest, found.smallest_failing) == (368, 376)
    assert [probe.batch_size for probe in probes][:4] == [32, 64, 120, 4096]
    assert len(probes) <= 11, "18 where steps doubled back from 4,096"


@st.composite
def models(draw: st.DrawFn) -> Callable[[int], float]:
    """Memory that grows with the batch, but is no line."""
    kind = draw(st.sampled_from(["square", "steep", "root", "blocks", "jump"]))
    fixed, block = draw(st.floats(0, 5000)), draw(st.integers(1, 3000))
    where, height = draw(st.integers(8, 8000)), draw(st.floats(0, 20_000))
    return {
        "square": lambda n: fixed + n + n * n / where,
        "steep": lambda n: fixed + n / 10 + height * (n / where) ** 8,
        "root": lambda n: fixed + 50 * math.sqrt(n) + n / 10,
        "blocks": lambda n: fixed + math.ceil(n / block) * block,
        "jump": lambda n: fixed + n + (height if n >= where else 0),
    }[kind]


BOUND = 12 + 4 * math.ceil(math.log2(len(SIZES) + 1)) + 2


@given(models(), st.floats(10, 60_000), st.just(1.0) | st.floats(1, 100), st.booleans(), seeds)
def test_memory_that_is_no_line_is_bracketed_all_the_same(
    memory: Callable[[int], float], available: float, times: float, read: bool, seed: int
) -> None:
    """What is available may be more than was told, so that batches train far beyond the prediction;
    and on a card that NVML cannot read, only what fits is known. A failure that says nothing of
    memory is tried again, and a loss that diverges says nothing of memory."""
    chance, failed = random.Random(seed), dict[Ask, int]()
    plain, share = remember(memory, times * available), random.Random(seed).choice((0, 0.3))

    def answer(ask: Ask) -> Probe:
        if chance.random() < share and failed.get(ask, 0) < 2:
            failed[ask] = failed.get(ask, 0) + 1
            return Probe(ask.batch_size, chance.choice(SILENT), long=ask.long)
        probe = plain(ask)
        if probe.trained and chance.random() < share:
            probe = replace(probe, status=Status.DIVERGED)
        return probe if read else replace(probe, used_bytes=None)

    goal = Goal(SIZES, available) if read else Goal(SIZES)
    probes, found = search(answer, goal, most=3 * BOUND)
    check(found, largest(memory, times * available))
    assert share or len(probes) <= BOUND


def test_a_longer_run_that_fails_moves_the_wall_down() -> None:
    """Memory that grows over the steps: four fit where sixteen do not."""
    memory = remember(lambda size: 100 + size, 612)

    def answer(ask: Ask) -> Probe:
        if ask.long and ask.batch_size > 440:
            return Probe(ask.batch_size, Status.OOM, long=True)
        return memory(ask)

    probes, found = search(answer, Goal(SIZES, 612))
    check(found, 440)
    assert [p.batch_size for p in probes if p.long and p.trained][-1] <= 440
    assert Probe(440, Status.OK, 540, 0, True) in probes
    assert found.recommended == 440, "480 would leave 5 % free, but was refused in a longer run"


def test_a_run_that_never_succeeds_ends_its_search() -> None:
    def answer(ask: Ask) -> Probe:
        if ask.batch_size > 200:
            return Probe(ask.batch_size, Status.KILLED, long=ask.long)
        return Probe(ask.batch_size, Status.OK, ask.batch_size, 0, ask.long)

    probes, found = search(answer, Goal(SIZES, 1000))
    assert found.ending is Ending.GAVE_UP
    assert [p.status for p in probes[-3:]] == [Status.KILLED] * 3
    assert found.largest == max(p.batch_size for p in probes if p.trained)
    assert not found.confirmed
    assert found.recommended is None, "no longer run confirmed anything"


def test_what_cannot_run_at_all_is_not_searched() -> None:
    probes, found = search(lambda ask: Probe(ask.batch_size, Status.UNSUPPORTED), Goal(SIZES, 1e9))
    assert (len(probes), found.ending) == (1, Ending.UNSUPPORTED)


def test_the_recommended_batch_leaves_the_margin() -> None:
    plain = remember(lambda size: 1000 + size, 2000)
    probes, found = search(plain, Goal(SIZES, 2000))
    assert (found.largest, found.recommended) == (1000, 896), "1000 + 896 <= 0.95 * 2000 < 1904"
    assert found.line is not None
    assert found.line.fixed_bytes == pytest.approx(1000)
    assert found.line.bytes_per_image == pytest.approx(1)
    assert found.probes == len(probes)
    assert LargestBatch(probes, Goal(SIZES, 2000), margin=0.2).recommended == 600
    assert LargestBatch(probes, Goal(SIZES, 2000), margin=0.0).recommended == 1000
    assert LargestBatch(probes[:-1], Goal(SIZES, 2000)).recommended is None, "not confirmed yet"


def test_the_recommended_batch_is_below_where_the_allocator_retries() -> None:
    plain = remember(lambda size: 1000 + size, 2000)

    def answer(ask: Ask) -> Probe:
        probe = plain(ask)
        if probe.trained and ask.batch_size > 320:
            return replace(probe, alloc_retries=3, used_bytes=2000)  # all there is is in its cache
        return probe

    probes, found = search(answer, Goal(SIZES, 2000))
    check(found, 1000)
    retried = [p.batch_size for p in probes if p.alloc_retries]
    assert found.thrashes_from == min(retried)
    assert f", from {min(retried)} on the allocator retries, " in describe_largest_batch(found)
    assert found.recommended is not None
    assert found.recommended < min(retried) < 0.95 * 2000 - 1000
    assert found.line is not None
    assert found.line.bytes_per_image == pytest.approx(1), "what is squeezed is on no line"


def test_sizes_leave_no_batch_of_one_image() -> None:
    assert list_sizes(Case(), 65) == (24, 40, 48, 56), "65 = 8 * 8 + 1 = 4 * 16 + 1 = 2 * 32 + 1"
    assert list_sizes(Case(accumulate=4), 64) == tuple(range(8, 65, 8))
    assert 9 not in list_sizes(Case(accumulate=8), 90, 1), "9 images in 8 micro-batches: 2 and 1"
    assert list_sizes(Case(accumulate=60), 400) == (120, 240, 360), "128 in threes are 43"
    assert list_sizes(Case(), 7) == ()
    assert list_sizes(Case(), 4, 1) == (2, 4), "one image is none for BatchNorm, nor is a last one"
    assert list_sizes(Case(), 4, 1, batchnorm=False) == (1, 2, 3, 4)


# ------------------------------------------------------------------------------------- its records


PHASES = ("warmup", "peak")
GIB = 2**30


CARD = name_family(Case(precision="bf16-amp", device="cuda"))


def add_rows(family: Case, *rows: dict[str, Any]) -> ProbedFamily:
    """The search that rows of probes are, each with its batch size and columns; ok by default."""
    trial = ProbedFamily(family)
    for columns in map(dict, rows):
        size, status = columns.pop("batch_size"), columns.pop("status", Status.OK)
        case = make_probe(family, size, columns.pop("long", False))
        columns = {"gpu_memory_bytes": 100 * GIB, "train_images": 50_000, **columns}
        trial.add(Row(flatten(make_run(case, status=status, probe=True, **columns))))
    return trial


@pytest.mark.parametrize("status", [Status.OOM, Status.OOM_SUSPECTED])
def test_a_refusal_beside_more_of_others_is_none(status: Status) -> None:
    """Three times it is tried; then the search says who may have had the memory."""
    fits = {"batch_size": 32, "baseline_device_bytes": 0, "peak_process_bytes": 20 * GIB}
    full = {"batch_size": 64, "baseline_device_bytes": 60 * GIB, "status": status}

    def find(*rows: dict[str, Any]) -> LargestBatch:
        trial = add_rows(CARD, *rows)
        return LargestBatch(trial.probes, trial.aim(50_000, 8))

    for count in (1, 2):
        largest_batch = find(fits, *(full for _ in range(count)))
        assert (largest_batch.ending, largest_batch.smallest_failing) == (None, None)
        assert largest_batch.available_bytes == 100 * GIB, "what was not believed says nothing"
    largest_batch = find(fits, full, full, full)
    assert (largest_batch.ending, largest_batch.largest, largest_batch.smallest_failing) == (
        Ending.GAVE_UP,
        32,
        None,
    )
    assert "while others used the GPU" in Ending.GAVE_UP.meaning
    steady = [{**row, "baseline_device_bytes": 60 * GIB} for row in (fits, full, full)]
    assert find(*steady).smallest_failing == 64, "as from the start"


@pytest.mark.parametrize(
    ("limit", "columns", "used"),
    [
        ("21GiB", {}, 12),
        (None, {}, 14),
        (None, {"warmup_process_bytes": None, "peak_process_bytes": None}, 15),
        (
            None,
            {f"{when}_{of}_bytes": None for when in PHASES for of in ("process", "device")},
            12,
        ),
    ],
    ids=["limit", "process", "device", "no NVML"],
)
def test_which_memory_counts(limit: str | None, columns: dict[str, Any], used: int) -> None:
    """A limit counts the allocator's 11 GiB and the context's 1; a spike in warm-up counts too."""
    peaks = {"reserved": 11, "process": 14, "device": 15}
    row = {f"warmup_{of}_bytes": number * GIB for of, number in peaks.items()}
    row |= {f"peak_{of}_bytes": (number - 1) * GIB for of, number in peaks.items()}
    row |= {"batch_size": 32, "context_bytes": GIB, **columns}
    (probe,) = add_rows(replace(CARD, memory_limit=limit), row).probes
    assert probe.used_bytes == used * GIB


def test_what_a_driver_moved_to_the_host_does_not_fit() -> None:
    """On Windows and in WSL a batch trains beyond the card's 100 GiB, of which others hold 2."""
    row = {"batch_size": 64, "baseline_device_bytes": 2 * GIB, "context_bytes": GIB}
    for reserved, retries, status in (
        *((97, 0, Status.OK), (98, 0, Status.OOM)),
        # at the largest batch of a card whose driver moves nothing, what was held at most is given
        # back before the context is whole
        *((98, 1, Status.OK), (99, 1, Status.OOM)),
    ):
        peak = {"peak_reserved_bytes": reserved * GIB, "warmup_alloc_retries": retries}
        trial = add_rows(CARD, {**row, **peak})
        assert [p.status for p in trial.probes] == [status]


def test_a_workspace_that_did_not_fit_while_autotuning_is_no_lack_of_memory() -> None:
    """cuDNN tries ways to compute a convolution that take more than is left, and goes on."""
    row = {"batch_size": 64, "context_bytes": GIB, "peak_reserved_bytes": 9 * GIB}
    row |= {"warmup_alloc_retries": 3, "alloc_retries": 0}
    for case in (CARD, replace(CARD, compile="default")):
        assert [p.alloc_retries for p in add_rows(case, row).probes] == [3]
    for case in (replace(CARD, cudnn_benchmark=True), replace(CARD, compile="max-autotune")):
        assert [p.alloc_retries for p in add_rows(case, row).probes] == [0]
        late = add_rows(case, row | {"alloc_retries": 2}).probes
        assert [p.alloc_retries for p in late] == [2]


def test_a_family_is_what_takes_the_same_memory() -> None:
    case = Case(precision="fp16", loss_scale=128.0, batch_size=64, accumulate=2)
    same = replace(case, batch_size=256, lr=0.5, seed=3, steps=9, evaluate=True, schedule="cosine")
    assert name_family(case) == name_family(same)
    assert name_family(name_family(case)) == name_family(case)
    for other in (
        replace(case, accumulate=4),
        replace(case, memory_limit="1GiB"),
        replace(case, optimizer="adamw"),
        replace(case, channels_last=True),
    ):
        assert name_family(other) != name_family(case)


# ---------------------------------------------------------------------------------------- commands

SCRIPT = name_family(
    Case(command="t.py {batch_size}", workload="command", device="cpu", memory_limit="1GiB")
)


def run_script(
    memory: Callable[[int], float],
    data: int = 10**9,
    reasons: Mapping[int, str] | None = None,
    processes: int = 1,
) -> tuple[list[int], LargestBatch]:
    """Search a script whose data hold no more than some items, and that fails at sizes for
    ``reasons``: the sizes tried, and the result. Each of its processes takes as much."""
    rows: list[dict[str, Any]] = []
    while True:
        trial = add_rows(SCRIPT, *rows)
        wall = LargestBatch(trial.probes, trial.aim(0, 8))
        if wall.asked is None:
            return [row["batch_size"] for row in rows], wall
        assert len(rows) < 40
        size = wall.asked.batch_size
        row: dict[str, Any] = {"batch_size": size, "long": wall.asked.long, "unit": "items"}
        if memory(size) > GIB:
            row["status"] = Status.OOM
        elif size > data:
            row |= {"unit": "runs", "missing": "measured_steps: too few were taken"}
        elif reasons and size in reasons:
            row |= {"status": Status.ERROR, "reason": reasons[size]}
        rows.append({"peak_process_bytes": round(processes * memory(size))} | row)


@given(st.integers(40, 100_000))
def test_the_largest_batch_of_a_script_is_found_without_knowing_its_data(largest: int) -> None:
    tried, wall = run_script(lambda size: GIB * (0.25 + 0.75 * size / largest))
    assert (wall.ending, wall.largest) == (Ending.FOUND, largest // 8 * 8)
    assert len(tried) <= 25
    assert all(size <= 8 * max(before, 32) for before, size in pairwise(tried))


def test_what_processes_hold_together_is_not_held_against_the_limit_of_each() -> None:
    _, wall = run_script(lambda size: GIB * (0.25 + 0.75 * size / 400), processes=4)
    assert (wall.ending, wall.largest, wall.recommended) == (Ending.FOUND, 400, 376)


def test_a_script_that_makes_no_larger_batches_is_told_apart() -> None:
    tried, wall = run_script(lambda size: GIB * (0.5 + 1e-4 * (size % 3)))
    assert wall.ending is Ending.SAME
    assert 32 * 64 <= max(tried) <= 32 * 8**3
    _, wall = run_script(lambda size: GIB * (0.2 + min(size, 5000) / 50_000))
    assert wall.ending is Ending.NO_MORE
    _, wall = run_script(lambda size: GIB * (0.2 + size / 50_000), data=5000)
    assert (wall.ending, wall.largest) == (Ending.EVERY_SIZE, 5000)
    words = "batch size 5000 trains, the data allow no larger one, or too few steps with it, "
    assert words in describe_largest_batch(wall)


@pytest.mark.parametrize(
    ("limit", "steps", "seen"),
    [("1GiB", 3, False), ("1GiB", 4, True), (None, 2, True), ("1GiB", None, True)],
)
def test_a_script_that_ends_before_its_limit_holds_shows_nothing(
    limit: str | None, steps: int | None, seen: bool
) -> None:
    case = Case(command="python train.py {batch_size}", memory_limit=limit, device="cpu")
    trial = ProbedFamily(name_family(case))
    row = make_run(case, probe=True, unit="items", warmup_steps=1, measured_steps=steps)
    row.measurement.warmup_steps = 0 if steps is None else 1
    row.measurement.measured_steps = None if steps is None else steps - 1
    trial.add(Row(flatten(row)))
    assert [probe.seen for probe in trial.rows] == [seen]


def test_a_script_whose_steps_are_not_seen_runs_once() -> None:
    tried, wall = run_script(lambda size: 0.2 * GIB, data=0)
    assert (tried, wall.ending, wall.largest) == ([32], Ending.NO_STEPS, None)
    assert "(too few were taken)" in describe_largest_batch(wall)


@pytest.mark.parametrize(
    ("reasons", "sizes", "ending"),
    [
        ({32: "no data; after 2 steps", 8: "no data; after 9 steps"}, [32, 8], Ending.FAILS),
        ({32: "'32x' is no number", 8: "'8x' is no number"}, [32, 8], Ending.FAILS),
        ({32: "no data", 8: "another"}, [32, 8, 32, 32], Ending.GAVE_UP),
    ],
)
def test_a_script_that_fails_alike_at_two_sizes_is_tried_no_more(
    reasons: dict[int, str], sizes: list[int], ending: Ending
) -> None:
    tried, wall = run_script(lambda size: GIB / 4 + size, reasons=reasons)
    assert (tried, wall.ending) == (sizes, ending)
    assert reasons[tried[-1]].partition(";")[0] in describe_largest_batch(wall)
    _, wall = run_script(lambda size: GIB * (0.25 + size / 4000), reasons={32: reasons[32]})
    assert (wall.ending, wall.largest) == (Ending.FOUND, 3000), "it has a fault at one size alone"


def test_what_a_script_is_given_is_searched_apart_but_for_its_seed() -> None:
    case = Case(command="t.py {batch_size} {lr} {seed}", workload="command", lr=0.5, seed=3)
    assert (name_family(case).lr, name_family(case).seed) == (0.5, 0)
    case = replace(case, command="t.py {batch_size}")
    assert name_family(case) == name_family(replace(case, lr=0.1))
