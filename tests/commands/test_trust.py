"""Whether rows can be believed: what each check accepts, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.doctor import trust
from bench.doctor.__main__ import main
from bench.results.store.rows import Row
from bench.schema.record import Status
from bench.sweep.options import parse_arguments, plan_cases
from tests.pytest_for_tests import Capture, Patch

OK: dict[str, Any] = {
    "status": Status.OK, "reason": "", "notes": "", "neighbours": "", "setup_time_s": 0.7,
    "baseline_device_bytes": 3e8, "batch_size": 16, "memory_limit": "3GiB",
    "peak_process_bytes": 2e9, "cudnn_benchmark": False, "warmup_time_s": 1.0,
    "measured_time_s": 1.0, "step_time_median_s": 0.1,
    "started_at": "2026-11-29T10:00:00.000Z", "finished_at": "2026-11-29T10:00:05.000Z",
}  # fmt: skip
LARGE = {"batch_size": 512, "status": Status.OOM}
TUNED = {"cudnn_benchmark": True, "finished_at": "2026-11-29T10:00:09.000Z"}
LATE = {"cudnn_benchmark": True, "finished_at": "2026-11-29T10:00:30.000Z"}


def judge(name: str, *changes: dict[str, Any], **about: Any) -> str:
    (check,) = (check for check in trust.EXPECTATIONS if check.name == name)
    values = {"printed": "", "codes": [0], "device": "cuda", "uuid": None, **about}
    return check.judge(trust.Observed([Row(OK | change) for change in changes], **values))


@pytest.mark.parametrize(
    ("name", "rows", "about", "wrong"),
    [
        ("set-up", [{}, {}], {}, ""),
        ("set-up", [{}, {"setup_time_s": 9.0}], {}, "a set-up of 9.0 s"),
        ("set-up", [{"notes": "the worker was started cold, because"}], {}, "started cold"),
        ("set-up", [{}, {"neighbours": "pid 3: 5 B"}], {}, "others: pid 3: 5 B"),
        ("set-up", [{}, {"baseline_device_bytes": 9e8}], {}, "held 300,000,000 and 900,000,000 B"),
        ("set-up", [{"status": Status.ERROR, "reason": "no"}], {}, "error: no"),
        ("set-up", [], {"printed": "error: no images"}, "error: no images"),
        ("limit", [{}, LARGE], {}, ""),
        ("limit", [{}, LARGE | {"status": Status.OK}], {}, "batch size 512 was ok"),
        ("limit", [{"peak_process_bytes": 4e9}, LARGE], {}, "batch size 16 took 4,000,000,000 B"),
        ("autotuning", [{}, TUNED], {}, ""),
        ("autotuning", [{}, LATE], {}, "25.0 s longer with autotuning"),
        ("script", [{}], {}, ""),
        ("script", [{"step_time_median_s": None}], {}, "no time of its steps"),
        ("fit", [], {"printed": "320 leaves 5 % free"}, ""),
        ("fit", [], {"printed": "none fits", "codes": [1]}, "none fits"),
        ("killed rank", [{"status": Status.KILLED}], {}, ""),
        ("killed rank", [{"status": Status.KILLED}], {"ended_s": 90.0}, "after 90 s"),
        ("killed rank", [{}], {}, "ok"),
        ("interrupted", [], {"codes": [130]}, ""),
        ("interrupted", [], {"codes": [0]}, "return code 0"),
    ],
)
def test_what_a_check_accepts(
    name: str, rows: list[dict[str, Any]], about: dict[str, Any], wrong: str
) -> None:
    found = judge(name, *rows, **about)
    assert wrong in found
    assert bool(found) == bool(wrong)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_the_checks_train_is_what_they_say(device: str, tmp_path: Path) -> None:
    """How many cases each command of a sweep has, and which of them are autotuned."""
    words = trust.choose_words("cpu", False) | trust.SIZES[device] | {"where": f"--device {device}"}
    planned: dict[str, list[list[bool]]] = {}
    for check in trust.EXPECTATIONS:
        for text in check.commands if device == "cuda" or not check.gpu else ():
            program, *flags = trust.spell(text, words, tmp_path)
            if program == "bench.sweep" and "--command" not in flags:
                cases = plan_cases(parse_arguments(flags)).cases
                planned.setdefault(check.name, []).append([case.cudnn_benchmark for case in cases])
    one, two = [False], [False, False]
    on_gpu = {"graphs": [two], "autotuning": [one, [True]]} if device == "cuda" else {}
    assert planned == on_gpu | {
        "set-up": [two], "limit": [two], "ddp": [one],
        "killed rank": [one], "compiled": [one], "interrupted": [one],
    }  # fmt: skip


def test_what_an_interrupted_case_leaves_on_the_card_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setattr(trust, "find_neighbours", lambda uuid: ("pid 7 (python): 5 B",))
    assert (
        judge("interrupted", codes=[130], uuid="GPU-a") == "left on the card: pid 7 (python): 5 B"
    )


def test_a_process_that_others_are_forked_from_may_hold_no_driver(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    """The file stands in for the driver's."""
    file = tmp_path / "nvidia0"
    file.touch()
    code = "import sys; held = open(sys.argv[1]); print(flush=True); input()"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        monkeypatch.setattr(trust, "list_children", lambda pid: [child.pid])
        assert trust.check_server() == ""
        monkeypatch.setattr(trust, "DRIVER", str(file))
        assert trust.check_server() == f"process {child.pid} holds {file}"
        child.kill()


def test_a_line_for_each_check(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    ends = [("set-up", "two small cases", ""), ("graphs", "captured steps", "error:\n none")]
    monkeypatch.setattr(trust, "go_through", lambda *_: iter(ends))
    assert main(["--trust", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    set-up       two small cases",
        "WRONG graphs       seen: error: none; expected: captured steps",
        "not as expected: graphs",
    ]


@pytest.mark.slow
def test_a_killed_rank_and_an_interrupted_case_on_a_cpu(monkeypatch: Patch, tmp_path: Path) -> None:
    """With real workers; all other checks are run by the rehearsal of make card."""
    monkeypatch.setenv("BENCH_RATES_S", "0")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    words = trust.choose_words("cpu", shared=False)
    for name in ("killed rank", "interrupted"):
        (check,) = (check for check in trust.EXPECTATIONS if check.name == name)
        assert trust.run_check(check, words, tmp_path, None) == ""
