"""Shards of a sweep, and the folder that they are joined in: together they are the whole sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_executor as fake
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.compare.__main__ import main as compare
from bench.errors import UsageError
from bench.grid import grid
from bench.merge import union
from bench.merge.__main__ import main as merge
from bench.record import EpochRow, RankRow, Status, Step, WorkRow
from bench.report.__main__ import main as report
from bench.search.__main__ import main as search
from bench.store.cells import LOGS, TRACES
from bench.store.plans import JOINED, Shard, parse_shard
from bench.store.reader import (
    read_epochs,
    read_ranks,
    read_records,
    read_steps,
    read_work,
    records_file,
)
from bench.store.writer import Store
from bench.sweep import __main__ as sweep
from bench.sweep.options import parse_arguments, plan_cases
from bench.sweep.shards import choose_part, estimate_cost, split_costs
from tests.planted.records import make_run

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

ROOT = Path(__file__).parents[1]
FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small"]
GRID = [*FAKE, "--precision", "fp32", "bf16", "bf16-amp", "--batch-size", "32..128"]
TWICE = [*GRID, "--repeats", "2"]
COMPARED = ["precision", "batch_size", "repeat", "run_seed", "status", "reason", "inferred"]
COMPARED += ["attempt", "epoch_time_s", "peak_device_bytes"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    """The report of a sweep is most of its time."""
    monkeypatch.setattr(sweep, "print_report", lambda out: None)
    monkeypatch.delenv(fake.ANSWERS, raising=False)
    monkeypatch.delenv(fake.MEMORY, raising=False)


def run(out: Path, flags: Sequence[str], rc: int = 0) -> Path:
    assert sweep.main([*flags, "--out", str(out)]) == rc
    return out


def run_shards(folder: Path, flags: Sequence[str], of: int) -> list[Path]:
    shards = [Shard(number, of) for number in range(1, of + 1)]
    return [run(folder / s.folder, [*flags, "--shard", str(s)]) for s in shards]


def join(out: Path, *folders: Path, rc: int = 0, mix: bool = False) -> Path:
    flags = ["--mix"] if mix else []
    assert merge([*map(str, folders), "--out", str(out), *flags]) == rc
    return out


def refuse(capsys: Capture, out: Path, *folders: Path) -> str:
    """What is said where folders are refused: one line."""
    capsys.readouterr()
    assert merge([*map(str, folders), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def measured(folder: Path) -> list[tuple[Any, ...]]:
    """What a sweep's runs came to, in an order of their own; sentinels are one for each shard."""
    rows = read_records(folder)
    rows = rows[~rows["sentinel"]].fillna(-1).sort_values(COMPARED)
    return list(rows[COMPARED].itertuples(index=False, name=None))


def read_files(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# ------------------------------------------------------------------------------------- the shards


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=40), st.integers(1, 12))
def test_parts_are_balanced(costs: list[float], parts: int) -> None:
    chosen = split_costs(costs, parts)
    loads = [sum(c for c, p in zip(costs, chosen, strict=True) if p == k + 1) for k in range(parts)]
    assert set(chosen) <= set(range(1, parts + 1))
    assert len(set(chosen)) == min(parts, len(costs)), "none is empty that need not be"
    assert max(loads) <= sum(costs) / parts + max(costs) * (1 + 1e-9)
    # a part is never so full that moving its last item to the emptiest would help
    assert max(loads) - min(loads) <= max(costs) * (1 + 1e-9) or len(costs) <= parts


@given(
    axes=st.fixed_dictionaries(
        {
            "precision": st.lists(
                st.sampled_from(["fp32", "bf16", "fp16", "bf16-amp"]), min_size=1, unique=True
            ),
            "batch_size": st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True),
            "seed": st.lists(st.integers(0, 3), min_size=1, unique=True),
            "steps": st.lists(st.sampled_from([None, 4, 300]), min_size=1, unique=True),
        }
    ),
    of=st.integers(1, 9),
)
def test_shards_are_the_whole_sweep_and_split_no_family(axes: dict[str, Any], of: int) -> None:
    cases = grid(axes)
    families = {(c.precision, c.seed, c.steps) for c in cases}
    if of > len(families):
        with pytest.raises(UsageError, match=f"give at most {len(families)} shards"):
            choose_part(Shard(1, of), lambda find: cases)
        return
    shards = []
    for number in range(1, of + 1):
        is_mine = choose_part(Shard(number, of), lambda find: cases)
        shards.append([case for case in cases if is_mine(case)])
    assert all(shards)
    assert sorted(cases, key=repr) == sorted((c for part in shards for c in part), key=repr)
    homes = [{(c.precision, c.seed, c.steps) for c in part} for part in shards]
    assert sum(map(len, homes)) == len(families)


def test_the_dear_families_are_spread() -> None:
    """Whole epochs and five steps: a shard has one of the two long families, not both."""
    short, long = grid({"seed": [0, 1, 2, 3], "steps": [5]}), grid({"seed": [4, 5]})
    assert estimate_cost(long[0]) > 2 * estimate_cost(short[0])
    is_mine = choose_part(Shard(1, 2), lambda find: [*short, *long])
    assert [is_mine(case) for case in [*short, *long]] == [True, False, True, False, True, False]


def test_a_search_is_counted_as_its_runs() -> None:
    """One shard has the search for a largest batch, and the other three whole epochs."""
    whole = grid({"precision": ["bf16", "fp16", "bf16-amp"]})

    def expand(find: Any) -> list[Case]:
        assert find(Case(), "auto") == ()
        return whole

    is_mine = choose_part(Shard(1, 2), expand)
    assert [is_mine(case) for case in [Case(), *whole]] == [True, False, False, False]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", "", "1 / 4"])
def test_what_is_no_shard_is_refused(text: str, capsys: Capture) -> None:
    assert sweep.main([*GRID, f"--shard={text}"]) == 2
    assert "give K/N with K from 1 to N" in capsys.readouterr().err


@given(st.integers(1, 999), st.integers(0, 999))
def test_a_shard_is_read_as_it_is_written(number: int, more: int) -> None:
    shard = Shard(number, number + more)
    assert parse_shard(str(shard)) == shard


def test_a_shard_has_a_folder_that_its_number_tells() -> None:
    """The same each time, so that a job that is started again goes on."""
    options = parse_arguments(["--preset", "precision", "--shard", "2/8"])
    assert options.out == Path("results/precision/shard-2-of-8")
    assert parse_arguments(["--shard", "2/8", "--out", "mine"]).out == Path("mine")


def test_a_shard_asks_for_no_more_than_its_own() -> None:
    flags = [*FAKE, "--precision", "fp32", "bf16", "--seed", "0", "1", "--memory-limit", "2GiB"]
    flags += ["--batch-size", "32", "32..auto"]
    whole = plan_cases(parse_arguments(flags), {})
    parts = [plan_cases(parse_arguments([*flags, "--shard", f"{k}/2"]), {}) for k in (1, 2)]
    assert sorted(map(repr, whole.cases)) == sorted(repr(c) for p in parts for c in p.cases)
    assert sorted(map(repr, whole.families)) == sorted(repr(f) for p in parts for f in p.families)
    # one search serves both seeds, and the batch size that is given: they are not torn apart
    for part in parts:
        assert len({case.precision for case in [*part.cases, *part.families]}) == 1
        assert {case.seed for case in part.cases} == {0, 1}


def test_a_folder_holds_one_shard(tmp_path: Path, capsys: Capture) -> None:
    out = run(tmp_path / "a", [*GRID, "--shard", "1/3"])
    before = read_files(out)
    for flags, held in (
        (["--shard", "2/3"], "shard 1/3; choose a folder for each shard"),
        ([], "shard 1/3; choose another folder"),
    ):
        run(out, [*GRID, *flags], rc=2)
        assert held in capsys.readouterr().err
    assert read_files(out) == before
    run(out, [*GRID, "--shard", "1/3"])
    assert len(read_records(out)) == 3


# --------------------------------------------------------------------------------------- the union


def test_merged_shards_are_the_sweep(tmp_path: Path, monkeypatch: Patch) -> None:
    """With a family that runs out of memory, one that fails, and repeats."""
    monkeypatch.setenv(fake.MEMORY, "fixed=100MiB image=4MiB low=0.5 capacity=500MiB")
    whole = run(tmp_path / "whole", TWICE)
    shards = run_shards(tmp_path, TWICE, 3)
    merged = join(tmp_path / "merged", *shards)
    assert measured(merged) == measured(whole)
    assert len(measured(whole)) == 18
    assert {"ok", "oom"} == set(read_records(merged)["status"])
    assert read_records(merged)["sentinel"].sum() == 3
    config = json.loads((merged / "config.json").read_text())
    asked = json.loads((whole / "config.json").read_text())
    assert sorted(map(repr, config["cases"])) == sorted(map(repr, asked["cases"]))
    assert config["command"].count("--shard") == 3
    assert (config["preset"], config["repeats"]) == (asked["preset"], 2)
    assert config["environment"] == asked["environment"]


def test_searches_of_shards_are_those_of_the_sweep(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(fake.MEMORY, "fixed=200MiB image=4MiB low=0.5")
    flags = [*FAKE, "--precision", "fp32", "bf16", "--memory-limit", "2GiB"]
    flags += ["--batch-size", "64..auto"]
    whole = run(tmp_path / "whole", flags)
    merged = join(tmp_path / "merged", *run_shards(tmp_path, flags, 2))
    assert measured(merged) == measured(whole)
    assert read_records(merged)["probe"].sum() == read_records(whole)["probe"].sum() > 4


def test_a_merged_sweep_is_read_as_any_other(tmp_path: Path, capsys: Capture) -> None:
    merged = join(tmp_path / "merged", *run_shards(tmp_path, TWICE, 3))
    rows = read_files(merged)["records.csv"]
    capsys.readouterr()
    assert report([str(merged)]) == 0
    assert "9 cases in 18 runs: 9 ok." in capsys.readouterr().out
    assert compare([str(merged), "--axis", "precision", "fp32", "bf16"]) in (0, 1)
    # to go on with it runs nothing that is there, and what is new
    run(merged, TWICE)
    assert read_files(merged)["records.csv"] == rows
    run(merged, [*GRID, "--repeats", "3"])
    more = read_records(merged)
    assert (more["repeat"] == 3).sum() == 9
    # and to merge again afterwards keeps these too
    join(merged, tmp_path / "shard-1-of-3")
    assert sorted(read_records(merged)["record_id"]) == sorted(more["record_id"])


def test_when_folders_come_does_not_matter(tmp_path: Path) -> None:
    first, second = run_shards(tmp_path, [*GRID, "--repeats", "1"], 2)
    at_once, slowly = tmp_path / "at-once", tmp_path / "slowly"
    join(slowly, first, rc=1)
    join(slowly, second)
    run(first, [*GRID, "--repeats", "2", "--shard", "1/2"])
    run(second, [*GRID, "--repeats", "2", "--shard", "2/2"])
    join(slowly, second)
    join(slowly, first)
    join(at_once, second, first)
    assert read_files(at_once) == read_files(slowly)
    join(at_once, first, second, at_once)
    assert read_files(at_once) == read_files(slowly)
    # and through another merged folder, which has the other shard
    join(tmp_path / "one", first, rc=1)
    join(tmp_path / "other", tmp_path / "one", second)
    records = read_files(tmp_path / "other")["records.csv"]
    assert records == read_files(at_once)["records.csv"]


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv(fake.ANSWERS, "batch_size=64:interrupted")
    first = run(tmp_path / "first", [*TWICE, "--shard", "1/3"])
    monkeypatch.delenv(fake.ANSWERS)
    third = run(tmp_path / "third", [*TWICE, "--shard", "3/3"])
    capsys.readouterr()
    join(tmp_path / "merged", first, third, rc=1)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "missing: shard 2/3; run its command, and merge its folder",
        f"missing: {first}: fp32 · batch size 64, repeat 1",
        f"missing: {first}: fp32 · batch size 64, repeat 2",
        f"missing: {first}: run its command again, and merge it again",
    ]
    run(first, [*TWICE, "--shard", "1/3"])
    second = run(tmp_path / "second", [*TWICE, "--shard", "2/3"])
    capsys.readouterr()
    join(tmp_path / "merged", first, second)
    assert capsys.readouterr().err == ""
    merged = read_records(tmp_path / "merged")
    assert set(merged[merged["batch_size"] == 64]["status"]) == {"interrupted", "ok"}


def test_what_is_missing_is_not_forgotten(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """A later merge of the rest names it too, also one of a folder that others were merged in."""
    monkeypatch.setenv(fake.ANSWERS, "batch_size=64:interrupted")
    first = run(tmp_path / "first", [*GRID, "--shard", "1/2"])
    monkeypatch.delenv(fake.ANSWERS)
    second = run(tmp_path / "second", [*GRID, "--shard", "2/2"])
    merged = join(tmp_path / "merged", first, rc=1)
    capsys.readouterr()
    merged = join(tmp_path / "more", merged, rc=1)
    assert "missing: shard 2/2" in capsys.readouterr().err
    join(merged, second, rc=1)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"missing: {first}: fp32 · batch size 64, repeat 1")
    assert said[-1] == f"missing: {first}: run its command again, and merge it again"
    run(first, [*GRID, "--shard", "1/2"])
    capsys.readouterr()
    join(merged, first)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("newer_first", [True, False])
def test_a_folder_itself_knows_best_what_it_planned(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, newer_first: bool
) -> None:
    """Whatever a folder that it was merged in knew of it."""
    sweep = run(tmp_path / "sweep", [*FAKE, "--batch-size", "128"])
    merged = join(tmp_path / "merged", sweep)
    monkeypatch.setenv(fake.ANSWERS, "batch_size=256:interrupted")
    run(sweep, [*FAKE, "--batch-size", "128", "256"])
    capsys.readouterr()
    both = (sweep, merged) if newer_first else (merged, sweep)
    join(tmp_path / "out", *both, rc=1)
    assert f"missing: {sweep}: fp32 · batch size 256, repeat 1" in capsys.readouterr().err


def test_a_sweep_that_went_on_in_a_merged_folder_is_not_forgotten(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    first, second = run_shards(tmp_path, GRID, 2)
    merged = join(tmp_path / "merged", first, second)
    monkeypatch.setenv(fake.ANSWERS, "batch_size=256:interrupted")
    run(merged, [*FAKE, "--batch-size", "256"])
    capsys.readouterr()
    for _ in range(2):
        join(merged, second, rc=1)
        assert f"missing: {merged}: fp32 · batch size 256, repeat 1" in capsys.readouterr().err


def test_a_trial_that_a_search_ended_early_is_not_missing(tmp_path: Path, capsys: Capture) -> None:
    flags = [*FAKE, "--lr", "0.01..1", "--batch-size", "64", "128", "--epochs", "9"]
    out = tmp_path / "search"
    assert search([*flags, "--samples", "8", "--out", str(out)]) == 0
    found = read_records(out)
    assert found["truncated_after"].notna().any()
    merged = join(tmp_path / "merged", out)
    assert len(read_records(merged)) == len(found)
    halving = json.loads((out / "config.json").read_text())["halving"]
    assert json.loads((merged / "config.json").read_text())["halving"] == halving
    # to a sweep of the same cases they are
    file = out / "config.json"
    file.write_text(
        json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "halving"})
    )
    capsys.readouterr()
    join(tmp_path / "again", out, rc=1)
    assert "repeat 1" in capsys.readouterr().err


def test_a_report_of_what_is_not_complete_says_so(tmp_path: Path, capsys: Capture) -> None:
    first, second, third = run_shards(tmp_path, GRID, 3)
    records = second / "records.csv"
    whole = records.read_text()
    records.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    out = join(tmp_path / "all", first, rc=1)

    def warn(folder: Path = out) -> str:
        capsys.readouterr()
        report([str(folder), "--full"])
        return " ".join(capsys.readouterr().out.split())

    assert "shard-1-of-3 is shard 1/3 of a sweep. Join all with bench.merge." in warn(first)

    assert "all is without shard 2/3; shard 3/3. Run shard 2/3; shard 3/3, and merge them" in warn()
    join(out, second, rc=1)
    said = warn()
    assert "all is without shard 3/3. Run shard 3/3, and merge it with bench.merge." in said
    assert "all has no row of 1 of the 6 runs that its folders planned" in said
    assert "Run the commands of its folders, unless they still grow, and merge." in said
    records.write_text(whole)
    join(out, second, third)
    assert "Incomplete" not in warn()


def test_a_sweep_in_the_merged_folder_makes_up_for_shards(tmp_path: Path, capsys: Capture) -> None:
    """It has one sentinel, where each shard has its own."""
    first, second, _ = run_shards(tmp_path, TWICE, 3)
    records = second / "records.csv"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    out = run(join(tmp_path / "all", first, second, rc=1), TWICE)
    capsys.readouterr()
    report([str(out)])
    assert "Incomplete" not in capsys.readouterr().out


def test_a_folder_without_its_configuration_is_joined_and_named(
    tmp_path: Path, capsys: Capture
) -> None:
    out = run(tmp_path / "a", GRID)
    (out / "config.json").unlink()
    join(tmp_path / "merged", out, rc=1)
    assert "a has no config.json that says what it planned" in capsys.readouterr().err
    assert len(read_records(tmp_path / "merged")) == 9


@pytest.mark.parametrize(
    "edit",
    [
        ('"repeats": 1', '"repeats": "1"'),
        ('"environment": {', '"environment": ["?"], "was": {'),
        ('"bf16-amp"', '"bf61-amp"'),
    ],
)
def test_a_folder_whose_configuration_was_edited_is_joined_and_named(
    tmp_path: Path, capsys: Capture, edit: tuple[str, str]
) -> None:
    out, other = run(tmp_path / "a", GRID), run(tmp_path / "b", [*GRID, "--seed", "1"])
    file = out / "config.json"
    assert edit[0] in file.read_text()
    file.write_text(file.read_text().replace(*edit))
    merged, told = tmp_path / "merged", "environment" not in edit[0]
    capsys.readouterr()
    join(merged, out, other, rc=int(told))
    said = capsys.readouterr().err
    again = "it is not there, or was edited; run its command again, and merge it again"
    line = f"missing: {out} has no config.json that says what it planned: {again}\n"
    assert said == (line if told else "")
    assert len(read_records(merged)) == 18
    run(out, GRID)
    join(merged, out)
    assert len(json.loads((merged / "config.json").read_text())["cases"]) == 18


def test_a_merged_configuration_that_was_edited_loses_no_case_and_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
    first, second = (run(tmp_path / name, [*GRID, "--seed", name]) for name in "12")
    merged = join(tmp_path / "merged", first, second)
    whole = read_files(merged)
    (merged / "config.json").write_text("{")
    capsys.readouterr()
    join(merged, second)
    assert capsys.readouterr().err == (
        f"note: {merged}/config.json was edited and could not be read, so the commands and "
        f"environments of {first} are not in it any more; merge these again\n"
    )
    assert len(json.loads((merged / "config.json").read_text())["cases"]) == 18
    join(merged, first)
    assert capsys.readouterr().err == ""
    assert read_files(merged) == whole


def test_runs_made_twice_are_named(tmp_path: Path, capsys: Capture) -> None:
    """Two machines that measured the same cases: both rows stay, tables count one."""
    first, second = (run(tmp_path / name, GRID) for name in "ab")
    join(tmp_path / "merged", first, second)
    assert "note: 9 runs of the same case and repeat stand" in capsys.readouterr().err
    assert len(read_records(tmp_path / "merged")) == 18


# ------------------------------------------------------------------- what stands beside the records


def write_folder(folder: Path, record_id: str, seed: int, **values: Any) -> Path:
    """A folder with one record, rows of it in every other table, its log and its trace."""
    record = make_run(
        Case(seed=seed), record_id=record_id, log=f"{LOGS}/same.log", epoch_time_s=1.0, **values
    )
    mark = float(seed + 1)
    with Store(folder) as store:
        store.append(
            record,
            [Step(0, 8, mark, 4, 0.1), Step(1, 8, mark / 2, 5, 0.1)],
            [EpochRow(0, mark, 1.0, 0.5)],
            [WorkRow("convolution", "3×3", "float32", seed + 1, 1e9, 1e6)],
            [RankRow(n, None, mark, mark / 2, 8, None, None) for n in (0, 1)],
        )
    (folder / TRACES).mkdir()
    (folder / LOGS / "same.log").write_text(f"printed by {record_id}")
    (folder / TRACES / "same.json.gz").write_bytes(record_id.encode())
    return folder


def test_curves_logs_and_traces_go_with_their_records(tmp_path: Path) -> None:
    late = {"started_at": "2026-11-20T11:00:00.000Z", "finished_at": "2026-11-20T11:01:00.000Z"}
    second = write_folder(tmp_path / "b", "bbbb", 1, **late)
    first = write_folder(tmp_path / "a", "aaaa", 0)
    merged = join(tmp_path / "merged", second, first, rc=1)
    assert read_records(merged)["record_id"].tolist() == ["aaaa", "bbbb"], "in order of time"
    steps = read_steps(merged)
    assert steps["record_id"].tolist() == ["aaaa", "aaaa", "bbbb", "bbbb"]
    assert steps["loss"].tolist() == [1.0, 0.5, 2.0, 1.0]
    for read, column, found in (
        (read_epochs, "time_s", [1.0, 2.0]),
        (read_work, "calls", [1, 2]),
        (read_ranks, "epoch_time_s", [1.0, 1.0, 2.0, 2.0]),
    ):
        assert read(merged)[column].tolist() == found
    for row in read_records(merged).itertuples():
        log = merged / str(row.log)
        assert log.read_text() == f"printed by {row.record_id}"
        trace = (merged / TRACES / log.name).with_suffix(".json.gz")
        assert trace.read_bytes() == str(row.record_id).encode()
    before = read_files(merged)
    join(merged, first, rc=1)
    assert read_files(merged) == before


def test_a_record_is_joined_only_with_its_rows(tmp_path: Path) -> None:
    """Rows of a run that has not ended, as a sweep that still runs has them, wait for it."""
    folder = write_folder(tmp_path / "a", "aaaa", 0)
    with (folder / "steps.csv").open("a") as file:
        file.write("cccc,0,8,2.0,4,0.1,,\n")
    merged = join(tmp_path / "merged", folder, rc=1)
    assert set(read_steps(merged)["record_id"]) == {"aaaa"}


@pytest.mark.parametrize("left", [0, 2, 4])
def test_a_merge_that_is_cut_off_loses_nothing(
    tmp_path: Path, monkeypatch: Patch, left: int
) -> None:
    """Before the first, third or last of the five tables is written: the records stand, and it can
    be done again."""
    first, second = (write_folder(tmp_path / n, n * 4, i) for i, n in enumerate("ab"))
    merged = join(tmp_path / "merged", first, rc=1)
    whole = join(tmp_path / "whole", first, second, rc=1)
    written, write = [], union.write_table

    def cut_off(path: Path, table: Any) -> None:
        if len(written) == left:
            raise KeyboardInterrupt
        written.append(path)
        write(path, table)

    monkeypatch.setattr(union, "write_table", cut_off)
    assert merge([str(second), "--out", str(merged)]) == 130
    assert read_records(merged)["record_id"].tolist() == ["aaaa"]
    read_steps(merged)
    monkeypatch.undo()
    join(merged, second, rc=1)
    assert read_files(merged) == read_files(whole)


# --------------------------------------------------------------------------------- what is refused


def test_an_unfinished_line_is_refused(tmp_path: Path, capsys: Capture) -> None:
    whole, torn = (write_folder(tmp_path / n, n * 4, i) for i, n in enumerate("ab"))
    with (torn / "steps.csv").open("a") as file:
        file.write("bbbb,2,8")
    said = refuse(capsys, tmp_path / "merged", whole, torn)
    assert f"{torn}/steps.csv: its last line is not finished; wait for its sweep" in said
    assert not (tmp_path / "merged").exists()


def test_other_schemas_are_refused(tmp_path: Path, capsys: Capture) -> None:
    old, new = ROOT / "results" / "cpu-epyc-20261120", run(tmp_path / "new", GRID)
    schema = read_records(old)["schema"].iloc[0]
    said = refuse(capsys, tmp_path / "merged", old, new)
    assert f"{old} has schema {schema}" in said
    assert "run the sweeps' commands again with this version" in said
    # alone it is joined, in today's columns
    merged = join(tmp_path / "old", old)
    pd.testing.assert_frame_equal(
        *(read_records(f).drop(columns=["schema", "log"]) for f in (old, merged))
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"torch": "2.14.0"}, "torch is 2.13.0 in {a}, 2.14.0 in {b}"),
        ({"gpu": "NVIDIA Other"}, "gpu is NVIDIA Imaginary in {a}, NVIDIA Other in {b}"),
        ({"code": "ffff"}, "code is 0123456789ab in {a}, ffff in {b}"),
    ],
)
def test_rows_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: Capture, values: dict[str, Any], said: str
) -> None:
    first = write_folder(tmp_path / "a", "aaaa", 0)
    other = write_folder(tmp_path / "b", "bbbb", 1, **values)
    merged = tmp_path / "merged"
    text = refuse(capsys, merged, first, other)
    assert said.format(a=first, b=other) in text
    assert "--mix" in text
    assert not merged.exists()
    join(merged, first, rc=1)
    before = read_files(merged)
    assert said.format(a=merged, b=other) in refuse(capsys, merged, other)
    assert read_files(merged) == before
    join(merged, other, rc=1, mix=True)
    assert len(read_records(merged)) == 2


def test_what_a_row_never_knew_refuses_nothing(tmp_path: Path) -> None:
    first = write_folder(tmp_path / "a", "aaaa", 0)
    failed = {"torch": None, "gpu": None, "status": Status.ERROR}
    join(tmp_path / "merged", first, write_folder(tmp_path / "b", "bbbb", 1, **failed), rc=1)


def test_a_sweep_is_not_written_over(tmp_path: Path, capsys: Capture) -> None:
    first, second = (write_folder(tmp_path / n, n * 4, i) for i, n in enumerate("ab"))
    before = read_files(second)
    for folders in ([first], [first, second]):
        assert "bench.merge did not write" in refuse(capsys, second, *folders)
    assert read_files(second) == before


def test_an_edited_record_is_refused(tmp_path: Path, capsys: Capture) -> None:
    first = write_folder(tmp_path / "a", "aaaa", 0)
    other = write_folder(tmp_path / "b", "aaaa", 0)
    join(tmp_path / "merged", first, other, rc=1)  # a copy is no other record
    file = records_file(other)
    file.write_text(file.read_text().replace("2026-11-20T10:00", "2026-11-20T09:00"))
    said = refuse(capsys, tmp_path / "again", first, other)
    assert f"{other} and {first} differ in 'started_at' of record aaaa" in said


@pytest.mark.parametrize(
    ("name", "said"), [("none", "no folder there"), ("empty", "no records there")]
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, capsys: Capture, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    assert said in refuse(capsys, tmp_path / "merged", tmp_path / name)
    assert not (tmp_path / "merged").exists()


def test_plans_that_were_edited_are_refused(tmp_path: Path, capsys: Capture) -> None:
    merged = join(tmp_path / "merged", write_folder(tmp_path / "a", "aaaa", 0), rc=1)
    (merged / JOINED).write_text('{"folders": {"a": "1/2"}}')
    before = read_files(merged)
    said = refuse(capsys, merged, write_folder(tmp_path / "b", "bbbb", 1))
    assert f"{merged / JOINED}: it is not as bench.merge wrote it" in said
    assert read_files(merged) == before


def test_a_merge_waits_for_no_sweep(tmp_path: Path, capsys: Capture) -> None:
    merged = join(tmp_path / "merged", write_folder(tmp_path / "a", "aaaa", 0), rc=1)
    with Store(merged):
        assert "in use by pid" in refuse(capsys, merged, write_folder(tmp_path / "b", "bbbb", 1))
