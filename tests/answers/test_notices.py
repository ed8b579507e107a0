"""What a report says first: drift, spread, determinism, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.answers.notices import choose_next, warn, write_notes
from bench.answers.render.table import NextStep
from bench.results.store.rows import latest
from bench.results.study.runs import Run, make_results, read_runs
from bench.results.study.sweeps import read_sweep, read_sweeps
from bench.schema.case import Case
from bench.schema.preset import ADVICE
from bench.schema.record import Record, Status
from tests.planted.records import GIB, make_record, make_run, measured, write_sweep
from tests.planted.results import read_results
from tests.planted.sweeps import Folders

FP32 = Case()
HALF = Case(precision="bf16-amp")


def ran(time_s: float, repeat: int = 1, case: Case = FP32, **values: Any) -> Record:
    card = {"gpu": "A card", "torch": "2.13"}
    return make_record(case, **{**card, **measured(time_s, GIB), "repeat": repeat, **values})


def close(time_s: float, hour: int, attempt: int = 1, lane: str = "") -> Record:
    started = f"2026-11-20T{hour:02}:00:00.000Z"
    return ran(time_s, sentinel=True, attempt=attempt, started_at=started, lane=lane)


def runs(times: Sequence[float]) -> list[Record]:
    return [ran(time, i) for i, time in enumerate(times, 1)]


def lose(size: int, status: Status) -> Record:
    return make_record(Case(batch_size=size), status=status, gpu="A card", torch="2.13")


def read(folder: Path, records: Sequence[Record]) -> list[Run]:
    return read_runs([read_sweep(write_sweep(folder / "sweep", records))])


def notices_of(every: Sequence[Run]) -> dict[str, str]:
    found = warn(every, make_results(latest(every)))
    return {notice.label: notice.text for notice in found}


LANES = [ran(100, 1, lane="a"), ran(110, 2, lane="b")]  # of which one takes 10 % longer

NOTED: dict[str, tuple[list[Record], dict[str, str]]] = {
    "a drift check within 2 % of some run": ([*runs((100, 101, 99.9)), close(103, 12)], {}),
    "a drift check beyond that": (
        [*runs((100, 101, 99.9)), close(104, 12)],
        {"Drift of +4.0 %": "took 4.0 % longer than before."},
    ),
    "drift on a slower lane": ([*LANES, close(110, 12, lane="b")], {"Spread": "1 of the 1"}),
    # of the second run a first attempt was throttled
    "a drift check beside the attempts that count": (
        [ran(180, 2, status=Status.INVALID), ran(100, 1), ran(101, 2, attempt=2), close(97, 12)],
        {"Drift of -3.5 %": "took 3.5 % less than before."},
    ),
    "what the same command runs again": (
        [*runs((1, 1)), lose(8, Status.INTERRUPTED), lose(16, Status.LOST)],
        {"No result": "2 of 4 runs. 1 interrupted, 1 lost. The same command runs them again."},
    ),
    "what needs a flag": (
        [*runs((1, 1)), lose(8, Status.INTERRUPTED), lose(16, Status.ERROR)],
        {"No result": "2 of 4 runs. 1 interrupted, 1 error. Run them again with --retry error."},
    ),
    "a file that several runs wrote": (
        [ran(1, i, wrote="last.bin; log.txt" if i < 3 else "own.bin") for i in (1, 2, 3)],
        {"Overwritten: last.bin, log.txt": "sweep wrote last.bin, log.txt, so that only the "
         "last one's is kept, and nothing of what was there before. Put {out} in --command, a "
         "folder that each run has for itself."},
    ),
}  # fmt: skip
"""Rows, and of each notice its label and a part of it."""


@pytest.mark.parametrize("name", NOTED)
def test_what_is_noted(name: str, tmp_path: Path) -> None:
    rows, expected = NOTED[name]
    found = notices_of(read(tmp_path, rows))
    assert found.keys() == expected.keys()
    assert {label: text for label, text in expected.items() if text not in found[label]} == {}


def test_the_power_limit_of_two_gpus_is_none_other_than_that_of_one(tmp_path: Path) -> None:
    pair = Case(parallel="ddp", world_size=2)
    for watts, other in ((1400.0, False), (1000.0, True)):
        rows = [ran(100, power_limit_w=700.0), ran(50, case=pair, power_limit_w=watts)]
        notices = notices_of(read(tmp_path / f"{watts}", rows))
        assert ("Other conditions" in notices) == other
        assert not other or "the power limit in W (700 or 500)" in notices["Other conditions"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"gpu_uuid": "GPU-1"}, {"gpu_uuid": "GPU-2"}, "which GPU ran them (GPU-1 or GPU-2)"),
        ({"gpu_uuid": "GPU-1", "lane": "a"}, {"gpu_uuid": "GPU-2", "lane": "b"}, ""),
        ({"torch_threads": 2}, {"torch_threads": 1}, "torch's threads (2 or 1)"),
        ({"torch_threads": 2}, {}, ""),  # not known
        ({"cpu_governor": "performance"}, {"cpu_governor": "powersave"}, "governor (performance"),
        ({"ecc": "on"}, {"ecc": "off"}, "ECC (on or off)"),
    ],
)
def test_conditions_that_no_setting_chose_are_noted(
    one: dict[str, Any], other: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    notices = notices_of(read(tmp_path, [ran(100, **one), ran(50, case=HALF, **other)]))
    assert ("Other conditions" in notices) == bool(expected)
    assert expected in notices.get("Other conditions", "")


def test_a_condition_is_named_once_with_what_holds_it(tmp_path: Path) -> None:
    pair = Case(parallel="ddp", world_size=2)
    ends = [(case, threads) for case in (FP32, pair) for threads in (1, 2)]
    rows = [ran(100, at, case=case, torch_threads=of) for at, (case, of) in enumerate(ends, 1)]
    text = notices_of(read(tmp_path, rows))["Other conditions"]
    assert text.count("torch's threads (1 or 2)") == 1
    assert "--power-limit" not in text


def test_conditions_of_one_card_in_two_folders_are_noted(tmp_path: Path) -> None:
    ends = [(FP32, 700.0), (HALF, 350.0)]
    rows = [ran(100, case=case, power_limit_w=watts, gpu_uuid="GPU-1") for case, watts in ends]
    sweeps = [read_sweep(write_sweep(tmp_path / f"{at}", [row])) for at, row in enumerate(rows)]
    assert "Other conditions" in notices_of(read_runs(sweeps))


# ------------------------------------------------------------------------------- the next step

GOOD = runs((100, 100.1, 99.9))
SHARED = [ran(50, i, Case(batch_size=64), neighbours_computing=1) for i in (1, 2, 3)]


def steps_of(*folders: Path) -> NextStep:
    sweeps = read_sweeps(folders)
    step = choose_next(sweeps, read_results(*sweeps)[1], ())
    assert step
    return step


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (runs((100,)), "--repeats 3 shows how far its time repeats"),
        (
            [*GOOD, lose(8, Status.ERROR)],
            "once what failed is mended, the same command with --retry error runs ",
        ),
        ([*GOOD, lose(8, Status.INTERRUPTED)], "run the same command again"),
        (GOOD, "page with a figure"),
        ([*GOOD, *SHARED], "do what the first warning says"),
        # a third repeat ran, and --repeats 3 would run none
        ([*GOOD[:2], ran(100, 3, status=Status.DIVERGED)], "do what the first warning says"),
        (
            [*GOOD[:2], make_record(FP32, repeat=3, status=Status.ERROR, gpu="A card")],
            "once what failed is mended, the same command with --retry error runs ",
        ),
    ],
)
def test_the_next_step_is_what_helps(records: list[Record], expected: str, tmp_path: Path) -> None:
    assert expected in steps_of(write_sweep(tmp_path / "s", records)).why


@pytest.mark.parametrize(
    ("records", "command", "goes_on"),
    [
        (runs((100,)), "--repeats 1 --lr 0.1", "--lr 0.1 --out {out} --repeats 3"),
        (
            [*GOOD, lose(8, Status.ERROR)],
            "--out there --lr 0.1",
            "--lr 0.1 --out {out} --retry error",
        ),
        ([*GOOD, lose(8, Status.INTERRUPTED)], "--lr 0.1", "--lr 0.1 --out {out}"),
        (runs((100,)), "--lr 0.1\npython -m bench.sweep --lr 0.2", None),
        (runs((100,)), "--out 'edited", None),
    ],
)
def test_the_command_that_goes_on_is_of_its_folder(
    records: list[Record], command: str, goes_on: str | None, tmp_path: Path
) -> None:
    """Also where a sweep chose the folder itself, as it would choose another; of several commands
    none stands for all rows."""
    out = write_sweep(tmp_path / "s", records, f"python -m bench.sweep {command}")
    wanted = "" if goes_on is None else f"python -m bench.sweep {goes_on.format(out=out)}"
    assert steps_of(out).command == wanted


def test_two_sweeps_are_compared_and_profiles_explained(tmp_path: Path, planted: Folders) -> None:
    both = steps_of(*(write_sweep(tmp_path / name, GOOD) for name in ("a", "b")))
    assert both.command.startswith("python -m bench.compare ")
    assert steps_of(planted["profiled"]).command.startswith("python -m bench.why ")


@pytest.mark.parametrize(("shared", "out"), [(0, "s"), (1, "s-again")])
def test_a_search_for_advice_goes_on_for_longer(shared: int, out: str, tmp_path: Path) -> None:
    """Where no time can be trusted, in another folder: these runs would stay."""
    run = make_run(epoch_time_s=100.0, neighbours_computing=shared)
    folder = write_sweep(tmp_path / "s", [run], "python -m bench.advise --model dpn92", ADVICE)
    step = steps_of(folder)
    flags = f"--model dpn92 --out {tmp_path / out} --budget 20m"
    assert step.command == f"python -m bench.advise {flags}"


def test_nothing_follows_from_nothing(tmp_path: Path) -> None:
    """As where a sweep was killed before its first case, while it looked at the machine."""
    sweep = read_sweep(write_sweep(tmp_path / "killed", []))
    assert choose_next([sweep], [], ()) is None


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"optimizer_bytes": 3 * GIB}, "batch size 128: its optimizer holds 3.00 of 8.00 GiB."),
        # the rest of the peak of tensors
        (
            {"peak_allocated_bytes": 7 * GIB, "gradients_bytes": GIB, "optimizer_bytes": GIB},
            "batch size 128: its activations, workspaces and data hold 4.00 of 8.00 GiB.",
        ),
        ({}, ""),
    ],
)
def test_what_holds_much_of_the_memory_is_named(
    sizes: dict[str, int], expected: str, tmp_path: Path
) -> None:
    most = ran(100, case=Case(batch_size=128))
    for name, size in ({"peak_device_bytes": 8 * GIB, "weights_bytes": GIB} | sizes).items():
        setattr(most.measurement, name, size)
    least = ran(100, case=Case(batch_size=64))
    least.measurement.peak_device_bytes = 2 * GIB
    results = make_results(latest(read(tmp_path, [most, least])))
    found = [note for note in write_notes(results, ["batch_size"]) if "Most memory" in note]
    assert [note.endswith(expected) for note in found] == [True] * bool(expected)
