"""Shards of a sweep, and the folder that holds them: together they are read as the whole sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.compare.__main__ import main as compare
from bench.report.__main__ import main as report
from bench.results.store.reader import list_results, read_records
from bench.results.store.rows import Shard
from bench.results.store.writer import Store
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.record import Step
from bench.sweep import __main__ as sweep
from bench.sweep.options import choose_part, parse_arguments
from bench.validate.__main__ import main as validate
from tests import fake_executor as fake
from tests.frames_for_tests import read_steps
from tests.planted.records import make_run
from tests.pytest_for_tests import Capture, Patch

pytestmark = pytest.mark.usefixtures("fake", "unreported")

FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small"]
GRID = [*FAKE, "--precision", "fp32", "bf16", "bf16-amp", "--batch-size", "32..128"]
TWICE = [*GRID, "--repeats", "2"]
COMPARED = ["precision", "batch_size", "repeat", "run_seed", "status", "reason", "inferred"]
COMPARED += ["attempt", "epoch_time_s", "peak_device_bytes"]


def run(out: Path, flags: Sequence[str], rc: int = 0) -> Path:
    assert sweep.main([*flags, "--out", str(out)]) == rc
    return out


def run_shards(folder: Path, flags: Sequence[str], of: int) -> list[Path]:
    shards = [Shard(number, of) for number in range(1, of + 1)]
    return [
        run(folder / f"shard-{s.number}-of-{s.of}", [*flags, "--shard", str(s)]) for s in shards
    ]


def measured(folder: Path) -> list[tuple[Any, ...]]:
    """What a sweep's runs came to, in an order of their own; drift checks are one for each
    shard."""
    rows = read_records(folder)
    rows = rows[~rows["sentinel"]].fillna(-1).sort_values(COMPARED)
    return list(rows[COMPARED].itertuples(index=False, name=None))


def read_files(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


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
        with pytest.raises(UsageError, match=f"give at most {len(families)} shard"):
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


def test_a_shard_has_a_folder_that_its_number_tells() -> None:
    """The same each time, so that a job that is started again goes on."""
    options = parse_arguments(["--preset", "precision", "--shard", "2/8"])
    assert options.out == Path("results/precision/shard-2-of-8")
    assert parse_arguments(["--shard", "2/8", "--out", "mine"]).out == Path("mine")


def test_a_folder_holds_one_shard(tmp_path: Path, capsys: Capture) -> None:
    out = run(tmp_path / "a", [*GRID, "--shard", "1/3"])
    before = read_files(out)
    for flags, expected in (
        (["--shard", "2/3"], "shard 1/3; choose a folder for each shard"),
        ([], "shard 1/3; choose another folder"),
    ):
        run(out, [*GRID, *flags], rc=2)
        assert expected in capsys.readouterr().err
    assert read_files(out) == before
    run(out, [*GRID, "--shard", "1/3"])
    assert len(read_records(out)) == 3
    capsys.readouterr()
    run(tmp_path, GRID, rc=2)
    assert f"--out {tmp_path}: holds a; choose another folder" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["a"], "where a report reads the shards"


def test_shards_are_read_as_the_sweep(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """With a family that runs out of memory, and repeats; each shard has its own drift check."""
    monkeypatch.setenv(fake.MEMORY, "fixed=100MiB image=4MiB low=0.5 capacity=500MiB")
    whole, parts = run(tmp_path / "whole", TWICE), tmp_path / "parts"
    shards = run_shards(parts, TWICE, 3)
    assert measured(parts) == measured(whole)
    assert len(measured(whole)) == 18
    assert {"ok", "oom"} == set(read_records(parts)["status"])
    assert read_records(parts)["sentinel"].sum() == 3
    capsys.readouterr()
    assert report([str(parts), "--format", "json"]) == 0
    document = json.loads(output := capsys.readouterr().out)
    assert len(document["cases"]) == 9
    assert "without shard" not in str(document["warnings"])
    assert report([*map(str, shards), "--format", "json"]) == 0
    assert capsys.readouterr().out == output, (
        "the folders of its shards are the one that holds them"
    )
    assert compare([str(parts), str(whole)]) in (0, 1)
    assert "9 cases in both" in capsys.readouterr().out
    assert validate([str(parts)]) in (0, 1)
    assert "21 rows" in capsys.readouterr().out
    assert parts in list_results(tmp_path)
    assert not {*shards} & {*list_results(tmp_path)}


def test_searches_of_shards_are_those_of_the_sweep(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(fake.MEMORY, "fixed=200MiB image=4MiB low=0.5")
    flags = [*FAKE, "--precision", "fp32", "bf16", "--memory-limit", "2GiB"]
    flags += ["--batch-size", "64..auto"]
    whole, parts = run(tmp_path / "whole", flags), tmp_path / "parts"
    run_shards(parts, flags, 2)
    assert measured(parts) == measured(whole)
    assert read_records(parts)["probe"].sum() == read_records(whole)["probe"].sum() > 4


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    def warn(folder: Path) -> str:
        capsys.readouterr()
        assert report([str(folder), "--full"]) == 0
        return " ".join(capsys.readouterr().out.split())

    first, second = (tmp_path / "all" / name for name in ("first", "second"))
    run(first, [*GRID, "--shard", "1/3"])
    assert "first is without shard 2/3; shard 3/3. Run what is missing" in warn(first)
    monkeypatch.setenv(fake.ANSWERS, "batch_size=64:interrupted")
    run(second, [*GRID, "--shard", "2/3"])
    assert "all is without shard 3/3." in warn(tmp_path / "all")
    records = second / "records.csv"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:-1]))
    assert "all has no row of 1 of the 6 runs that its last command planned" in warn(first.parent)
    monkeypatch.delenv(fake.ANSWERS)
    run(second, [*GRID, "--shard", "2/3"])
    run(tmp_path / "all" / "third", [*GRID, "--shard", "3/3", "--data-dir", "elsewhere"])
    assert "without shard" not in warn(tmp_path / "all")
    assert "has no row" not in warn(tmp_path / "all")


def test_shards_of_several_sweeps_are_refused(tmp_path: Path, capsys: Capture) -> None:
    first = run(tmp_path / "a", [*GRID, "--shard", "1/2"])
    shutil.copytree(first, tmp_path / "again")
    assert report([str(tmp_path)]) == 2
    assert f"{tmp_path}: again is of another sweep than a" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "again")
    run(tmp_path / "b", [*GRID, "--shard", "2/3"])
    assert report([str(tmp_path)]) == 2
    assert f"{tmp_path}: b is of another sweep than a" in capsys.readouterr().err


def test_steps_are_read_from_all_shards(tmp_path: Path) -> None:
    for number, name in ((1, "b"), (2, "a")):
        record = make_run(Case(seed=number), record_id=name * 4)
        with Store(tmp_path / name) as store:
            store.append(record, [Step(0, 8, float(number), 4, 0.1)])
            store.write_config(
                {"command": f"bench.sweep --shard {number}/2", "shard": f"{number}/2"}
            )
    assert read_records(tmp_path)["record_id"].tolist() == ["bbbb", "aaaa"], "by their numbers"
    assert read_steps(tmp_path)["loss"].tolist() == [1.0, 2.0]
