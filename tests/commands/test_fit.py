"""`bench.fit` and `--batch-size auto`: searches by the fake executor, and one by real training."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from bench import fit
from bench.answers.scaling import find_searches
from bench.base.errors import UsageError
from bench.compare.comparison import read_side
from bench.machine.host import describe_host
from bench.networks.data import prepare
from bench.results.store.reader import read_records, read_rows
from bench.results.store.rows import read_history
from bench.results.study.runs import read_runs
from bench.results.study.sweeps import read_sweeps
from bench.schema.flags import join_flags
from bench.schema.grid import parse_values
from bench.schema.record import Status
from bench.sweep import __main__ as sweep
from bench.sweep import probing
from bench.sweep.largest_batch import Ending, read_largest_batches
from tests import fake_executor as fake
from tests.schemas_for_tests import read_document

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--model", "dpn-small"]
LIMIT = ["--memory-limit", "1GiB"]
LINE = "fixed=300MiB image=1MiB low=0.6"


@pytest.fixture
def memory(monkeypatch: Patch) -> Callable[[str], None]:
    """Tell the fake what a batch takes."""
    return lambda model: monkeypatch.setenv(fake.MEMORY, model)


def run_fit(out: Path, *flags: str, rc: int = 0) -> pd.DataFrame:
    assert fit.main(join_flags(FAKE, flags, ["--out", str(out)])) == rc
    return read_records(out)


def run_sweep(out: Path, *flags: str, rc: int = 0) -> pd.DataFrame:
    """Run a sweep in this process, without its report; its records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "print_report", lambda out: None)
        assert sweep.main(join_flags(FAKE, flags, ["--out", str(out)])) == rc
    return read_records(out)


def rows(frame: pd.DataFrame, *names: str) -> list[tuple[Any, ...]]:
    return list(frame[list(names)].itertuples(index=False, name=None))


# ------------------------------------------------------------------------------------ the command


def test_every_probe_is_a_record_and_the_table_says_what_they_show(
    tmp_path: Path, memory: Callable[[str], None], capsys: Capture
) -> None:
    memory(LINE)
    frame = run_fit(tmp_path, *LIMIT)
    assert frame["probe"].all()
    assert set(frame["steps"]) == {"4", "16"}
    largest_batches = read_largest_batches(read_rows(tmp_path))
    for family, largest_batch in largest_batches:
        assert largest_batch.largest == {"fp32": 720, "bf16-amp": 1200}[family.precision]
        assert largest_batch.probes <= 8
    captured = capsys.readouterr()
    assert [family.precision for family, _ in largest_batches] == ["fp32", "bf16-amp"]
    fp32, _ = captured.out.splitlines()
    assert fp32.startswith(
        "fp32: batch size 720 trains, 728 does not, 672 leaves 5 % of memory free, memory is 300 "
        "MiB and 1 an item ("
    )
    line = "] fp32 · batch size 720 · steps 16: trains, 1.00 GiB"
    assert line in captured.err, "its few steps tell nothing of speed or learning"
    assert "728 does not" not in captured.err, "the answer is printed once"


def test_the_same_command_goes_on_where_it_was_stopped(
    tmp_path: Path, memory: Callable[[str], None], monkeypatch: Patch, capsys: Capture
) -> None:
    """It says what fits so far, and how to go on."""
    memory(LINE)
    whole = run_fit(tmp_path / "whole", *LIMIT)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        fake.stop_at(3, patch)
        cut = run_fit(tmp_path / "cut", *LIMIT, rc=130)
    assert cut["status"].tolist()[2:] == ["interrupted"]
    largest = cut[cut["status"] == "ok"]["batch_size"].max()
    out, err = capsys.readouterr()
    assert f"batch size {largest} trains, the search has not ended" in out
    lines = err.splitlines()
    command = join_flags(FAKE, LIMIT, ["--out", str(tmp_path / "cut")])
    assert lines[-1] == f"not finished; to continue: python -m bench.fit {shlex.join(command)}"
    names = ("precision", "batch_size", "steps", "status")
    done = (frame := run_fit(tmp_path / "cut", *LIMIT))[frame["status"] != "interrupted"]
    assert rows(done, *names) == rows(whole, *names)
    assert len(run_fit(tmp_path / "cut", *LIMIT)) == len(frame), "nothing is left to do"


def test_a_sweep_that_was_stopped_says_what_is_to_be_found(
    tmp_path: Path, memory: Callable[[str], None], monkeypatch: Patch, capsys: Capture
) -> None:
    memory(LINE)
    fake.stop_at(1, monkeypatch)
    flags = ["--precision", "fp32", "--batch-size", "auto", "--out", str(tmp_path / "out")]
    assert sweep.main([*FAKE, *LIMIT, *flags]) == 130
    left = "stopped: 0 runs done, 0 runs left and 1 batch size to be found; to continue: python -m"
    assert capsys.readouterr().err.splitlines()[-1].startswith(left)


def test_what_fails_three_times_is_given_up_and_tried_again_on_request(
    tmp_path: Path, memory: Callable[[str], None], monkeypatch: Patch, capsys: Capture
) -> None:
    memory(LINE)
    monkeypatch.setenv(fake.ANSWERS, "precision=fp32:killed")
    frame = run_fit(tmp_path, *LIMIT, rc=1)
    largest_batches = dict(read_largest_batches(read_rows(tmp_path)))
    assert largest_batches.popitem()[1].largest is not None, "bf16-amp's was found"
    assert rows(frame[frame["precision"] == "fp32"], "batch_size", "status", "attempt") == [
        (32, "killed", attempt) for attempt in (1, 2, 3)
    ]
    assert "a run failed 3 times" in capsys.readouterr().out.replace("\n", " ")
    assert len(run_fit(tmp_path, *LIMIT, "--precision", "fp32", rc=1)) == len(frame)
    monkeypatch.delenv(fake.ANSWERS)
    frame = run_fit(tmp_path, *LIMIT, "--precision", "fp32", "--retry", "killed")
    again = frame[(frame["precision"] == "fp32") & (frame["batch_size"] == 32)]
    assert rows(again, "status", "attempt") == [
        *(("killed", attempt) for attempt in (1, 2, 3)),
        ("ok", 4),
    ]
    assert dict(read_largest_batches(read_rows(tmp_path))).popitem()[1].largest is not None


def test_probes_of_another_machine_are_later_attempts(
    tmp_path: Path, memory: Callable[[str], None], monkeypatch: Patch
) -> None:
    """So that none writes over the log of another."""
    memory(LINE)
    flags = [*LIMIT, "--precision", "fp32"]
    before = run_fit(tmp_path, *flags)
    other = replace(describe_host(), cpu="Another")
    monkeypatch.setattr(fake, "describe_host", lambda: other)
    frame = run_fit(tmp_path, *flags, "--mix")
    assert len(frame) == 2 * len(before)
    assert frame["attempt"].tolist() == len(before) * [1] + len(before) * [2]


def test_step_and_margin_are_those_of_the_json_the_report_and_a_later_sweep(
    tmp_path: Path, memory: Callable[[str], None], capsys: Capture
) -> None:
    memory(LINE)
    run_fit(
        tmp_path, *LIMIT, "--format=json", "--step", "16", "--margin", "20%", "--precision", "fp32"
    )
    document = read_document(capsys.readouterr().out)
    (answer,) = document["searches"]
    assert (answer["largest"], answer["smallest_failing"]) == (720, 736)
    assert answer["recommended"] == 512, "300 + 512 <= 0.8 * 1024 < 300 + 528"
    assert (document["step"], answer["margin"], answer["ending"]) == (16, 0.2, "found")
    run_sweep(tmp_path, *LIMIT, "--precision", "fp32", "--batch-size", "64")
    (read,) = read_sweeps([tmp_path])
    assert (read.step, read.margin) == (16, 0.2)
    (found,) = find_searches(read_runs([read]), [read])
    assert found.largest_batch.recommended == 512


# ------------------------------------------------------------------------------- --batch-size auto


def test_a_sweep_finds_the_largest_batch_then_measures(
    tmp_path: Path, memory: Callable[[str], None]
) -> None:
    memory(LINE)
    flags = [*LIMIT, "--precision", "fp32", "bf16-amp", "--batch-size", "256..auto"]
    frame = run_sweep(tmp_path, *flags)
    measured = frame[~frame["probe"]]
    assert rows(measured, "precision", "batch_size", "status") == [
        *(("fp32", n, "ok") for n in (256, 512, 672)),
        *(("bf16-amp", n, "ok") for n in (256, 512, 1024, 1120)),
    ]
    assert set(measured["steps"]) == {"12"}, "of the preset, and not of a probe"
    assert frame["probe"].tolist() == sorted(frame["probe"], reverse=True), "probes come first"
    assert len(run_sweep(tmp_path, *flags)) == len(frame), "all is there"
    cases = json.loads((tmp_path / "config.json").read_text())["cases"]
    assert len(cases) == len(measured)


def test_a_warm_up_that_is_too_long_for_what_was_found_is_refused(
    tmp_path: Path, memory: Callable[[str], None], capsys: Capture
) -> None:
    memory(LINE)
    flags = [*LIMIT, "--precision", "fp32", "--batch-size", "256..auto", "--lr-warmup"]
    images = prepare("synthetic", data_dir=None).train_images
    frame = run_sweep(tmp_path, *flags, str(-(-images // 512)), rc=2)
    assert frame["probe"].all(), "what was found is kept"
    assert "--lr-warmup" in capsys.readouterr().err


def test_what_fit_found_a_sweep_need_not_find(
    tmp_path: Path, memory: Callable[[str], None]
) -> None:
    memory(LINE)
    probes = run_fit(tmp_path, *LIMIT, "--precision", "fp32")
    flags = [*LIMIT, "--precision", "fp32", "--batch-size", "auto", "--lr", "0.1", "0.2"]
    frame = run_sweep(tmp_path, *flags)
    assert rows(frame[len(probes) :], "lr", "batch_size", "probe") == [
        (0.1, 672, False),
        (0.2, 672, False),
    ]


def test_images_that_are_not_there_are_not_downloaded(
    tmp_path: Path, monkeypatch: Patch, memory: Callable[[str], None]
) -> None:
    """They say nothing of memory."""
    memory(LINE)
    monkeypatch.chdir(tmp_path)
    flags = ["--executor", "fake", "--device", "cpu", "--model", "dpn-small", *LIMIT]
    assert fit.main([*flags, "--precision", "fp32", "--out", "found"]) == 0
    assert set(read_records(Path("found"))["dataset"]) == {"synthetic"}


def test_probes_are_no_runs_of_their_case(tmp_path: Path, memory: Callable[[str], None]) -> None:
    """A case of four steps is measured though a probe was the very same; nor are they compared."""
    memory(LINE)
    run_fit(tmp_path, *LIMIT, "--precision", "fp32")
    assert read_history(read_rows(tmp_path)) == {}
    with pytest.raises(UsageError, match="no records of a sweep"):
        read_side("A", tmp_path)
    flags = [*LIMIT, "--precision", "fp32", "--steps", "4", "--batch-size", "32", "728"]
    frame = run_sweep(tmp_path, *flags, "--repeats", "1")
    assert rows(frame[~frame["probe"]], "batch_size", "status", "inferred", "attempt") == [
        (32, "ok", False, 1),
        (728, "oom", False, 1),
    ]
    assert {run.batch_size for run in read_side("A", tmp_path).runs} == {32, 728}


def test_where_nothing_fits_nothing_is_measured(
    tmp_path: Path, memory: Callable[[str], None], capsys: Capture
) -> None:
    memory("fixed=2GiB image=1MiB")
    frame = run_sweep(tmp_path, *LIMIT, "--precision", "fp32", "--batch-size", "auto", rc=1)
    assert set(frame["status"]) == {Status.OOM}
    assert frame["probe"].all()
    assert "not even the smallest batch trains" in capsys.readouterr().err


def test_a_dry_run_shows_what_is_yet_to_be_found(capsys: Capture) -> None:
    flags = [*FAKE, *LIMIT, "--precision", "fp32", "bf16", "--batch-size", "64", "256..auto"]
    assert sweep.main([*flags, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "runs: 2, of 2 cases with --repeats 1",
        "   1  fp32 · batch size 64",
        "   2  bf16 · batch size 64",
        "   3  fp32 · batch size 256..auto, found by a search first",
        "   4  bf16 · batch size 256..auto, found by a search first",
        "searches: 2, each by about 7 probes of a few steps; how long all take is not known yet, "
        "and told after the first",
    ]
    assert (
        sweep.main([*FAKE, *LIMIT, "--precision", "fp32", "--batch-size", "auto", "--dry-run"]) == 0
    )
    alone = "searches: 1, by about 7 probes of a few steps; how long it takes is not known yet\n"
    assert alone in capsys.readouterr().out


def test_how_long_the_other_searches_take_is_told_after_each(
    tmp_path: Path, memory: Callable[[str], None], monkeypatch: Patch, capsys: Capture
) -> None:
    memory("fixed=64MiB image=1MiB")
    clock = count(0.0, 60.0)
    monkeypatch.setattr(probing, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    run_fit(tmp_path, *LIMIT, "--precision", "fp32", "bf16", "fp16")
    left = [line for line in capsys.readouterr().err.splitlines() if " left for " in line]
    assert [line.partition(": ")[2] for line in left] == [
        "about 2 min left for 2 other settings if they take as long",
        "about 60 s left for 1 other setting if they take as long",
    ]


@pytest.mark.parametrize("text", ["48..128", "64..32", "auto..64", "2.."])
def test_what_it_may_not_be(text: str) -> None:
    with pytest.raises(UsageError, match="--batch-size"):
        parse_values("batch_size", text, "--batch-size")


# ---------------------------------------------------------------------------------- a user's script

SCRIPT = """
import sys
import torch

size = int(sys.argv[1])
if "--small" in sys.argv:
    size = 1
weight = torch.nn.Parameter(torch.ones(2**18))
optimizer = torch.optim.SGD([weight], lr=1e-9)
while True:  # an item takes 2 MiB
    optimizer.zero_grad()
    (torch.ones(size, 1) * weight).square_().sum().backward()
    optimizer.step()
"""


def run_script(folder: Path, *flags: str, rc: int = 0) -> pd.DataFrame:
    folder.mkdir(exist_ok=True)
    (folder / "t.py").write_text(SCRIPT)
    given = ["--device", "cpu", "--memory-limit", "1GiB", "--out", str(folder / "out")]
    assert fit.main(join_flags(given, flags)) == rc
    return read_records(folder / "out")


@pytest.mark.slow
def test_the_largest_batch_of_an_unedited_script_is_found(tmp_path: Path, capsys: Capture) -> None:
    """Under a limit that its own processes have; each run ends after a few steps."""
    command = f"{sys.executable} {tmp_path}/t.py {{batch_size}}"
    frame = run_script(tmp_path, "--command", command, "--step", "32")
    ((_, wall),) = read_largest_batches(read_rows(tmp_path / "out"), 32)
    assert wall.ending is Ending.FOUND
    assert 128 <= (wall.largest or 0) <= 480
    assert {*frame["status"]} == {"ok", "oom"}
    assert frame["probe"].all()
    assert {*frame[frame["status"] == "ok"]["measured_steps"].astype(int)} == {4, 16}
    assert "leaves 5 % of memory free" in capsys.readouterr().out
    one = run_script(tmp_path / "less", "--command", command, "--memory-limit", "128MiB", rc=1)
    assert one["status"].eq("oom").all()
    output = capsys.readouterr().out
    assert "not even the smallest batch trains (MemoryLimitError: the process alone takes" in output


@pytest.mark.slow
def test_a_sweep_measures_a_script_at_the_largest_batch_that_it_finds(tmp_path: Path) -> None:
    """And at the powers of two below it; the same command has nothing left to do."""
    (tmp_path / "t.py").write_text(SCRIPT)
    command = f"{sys.executable} {tmp_path}/t.py {{batch_size}}"
    flags = ["--command", command, "--batch-size", "128..auto", "--device", "cpu", "--steps", "4"]
    flags += ["--memory-limit", "700MiB", "--repeats", "1", "--out", str(tmp_path / "out")]
    assert sweep.main([*flags, "--no-report"]) == 0
    frame = read_records(tmp_path / "out")
    ((_, wall),) = read_largest_batches(read_rows(tmp_path / "out"), 8)
    assert wall.ending is Ending.FOUND
    assert wall.largest is not None
    measured = frame[~frame["probe"]]
    below = [size for size in (128, 256) if size <= wall.largest]
    assert measured["batch_size"].tolist() == sorted({*below, wall.recommended})
    assert measured["status"].eq("ok").all()
    assert (measured["measured_steps"].eq(4) & measured["unit"].eq("items")).all()
    assert sweep.main([*flags, "--no-report"]) == 0
    assert len(read_records(tmp_path / "out")) == len(frame)


@pytest.mark.slow
def test_a_script_that_ignores_the_batch_or_fails_is_said_so(
    tmp_path: Path, capsys: Capture
) -> None:
    command = f"{sys.executable} {tmp_path}/t.py {{batch_size}}"
    run_script(tmp_path, "--command", f"{command} --small", rc=1)
    assert "as if it ignored {batch_size}" in capsys.readouterr().out
    frame = run_script(tmp_path / "bad", "--command", f"{command}x", rc=1)
    assert rows(frame, "batch_size", "status") == [(32, "error"), (8, "error")]
    (answer,) = capsys.readouterr().out.splitlines()
    assert "the command fails alike at each" in answer
    assert "(ValueError: invalid literal for int()" in answer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "--command has no {batch_size}, where each size to try is put"),
        ("{batch_size} {lr}", "{lr} has no value; write the value itself in the command"),
        ("{batch_size} --vary batch_size 8", "bench.fit chooses the sizes"),
        ("{batch_size} {x}", "{x} is neither an axis nor a --vary"),
        ("{batch_size} --memory-limit none", "give one, such as --memory-limit"),
    ],
)
def test_commands_that_cannot_be_searched_are_one_line(
    given: str, expected: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    places, sign, flags = given.partition("--")
    words = ["--memory-limit", "1GiB", "--command", f"python t.py {places}"]
    own = shlex.split(sign + flags)
    assert fit.main(join_flags(["--device", "cpu", *words], own)) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
