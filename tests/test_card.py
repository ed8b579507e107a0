"""Everything a GPU must show, by one command: rehearsed, cut, interrupted and gone on with."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pytest_for_tests import Capture, Patch

from bench import card
from bench.environment import packages
from bench.environment.device import Platform
from bench.fit import build_parser as build_fit
from bench.record import Environment
from bench.scales.options import build_parser as build_scales
from bench.scales.options import read_options as read_scales
from bench.store.plans import plan_runs
from bench.store.reader import read_records
from bench.sweep.options import parse_arguments, plan_cases
from benchmarks.overhead import read_case

ROOT = Path(__file__).parents[1]
NAMES = [line.split()[0] for line in card.STEPS.splitlines()]

STEP = """
import pathlib, sys, time
name, seconds, code = sys.argv[1:]
print(name, "begins", flush=True)
if name == "late":
    pathlib.Path(__file__).with_name("clock").touch()
try:
    time.sleep(float(seconds))
except KeyboardInterrupt:
    sys.exit(f"{name} is stopped")
print(name, "ends")
sys.exit(int(code))
"""

CODE = """
import pathlib, sys, time, types
from bench import card

def tell_time():  # it is late once a step has said so, however fast this machine is
    return time.monotonic() + 1e6 * clock.exists()

clock = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "clock")
card.time = types.SimpleNamespace(monotonic=tell_time, sleep=time.sleep)
if len(sys.argv) > 1 and sys.argv[1].startswith("--steps="):
    card.STEPS = sys.argv.pop(1).removeprefix("--steps=")
sys.exit(card.main())
"""


def start(out: Path, *flags: str, steps: str = "") -> subprocess.Popen[str]:
    """The command, with other steps in place of its own."""
    (out / "step.py").write_text(STEP)
    words = [f"--steps={steps}"] if steps else []
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *words, "--out", str(out), *flags],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(out)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command: subprocess.Popen[str], expected: int = 0) -> str:
    said, _ = command.communicate(timeout=1500)
    assert command.returncode == expected, said
    return said


def read(out: Path) -> tuple[Path, dict[str, Any]]:
    """The newest folder, and its state."""
    folder = max(out.glob("rehearsal-*"))
    return folder, json.loads((folder / card.STATE).read_text())


def tell(state: dict[str, Any]) -> dict[str, str]:
    return {name: phase["state"] for name, phase in state["phases"].items()}


def wait_until(command: subprocess.Popen[str], out: Path, line: str) -> None:
    end = time.monotonic() + 600
    while not any(line in log.read_text() for log in out.glob("*/log.txt")):
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


# ------------------------------------------------------------------------------ by other steps


def test_the_order_the_deadline_and_the_reasons(tmp_path: Path) -> None:
    steps = (
        "first 1 - step first 0 0\n"
        "apart 1 cuDNN step apart 0 0\n"
        "faulty 1 - step faulty 0 3\n"
        "late 1 - step late 600 0\n"
        "after 60 - step after 0 0\n"
        "report 0 - step report 0 0\n"
    )
    said = finish(start(tmp_path, "--minutes", "60", steps=steps), 1)
    folder, state = read(tmp_path)
    assert said.startswith("REHEARSAL on a CPU; synthetic images")
    assert said.endswith("the same command goes on\n")
    assert tell(state) == {
        **{"first": "done", "apart": "absent", "faulty": "failed"},
        **{"late": "cut", "after": "left", "report": "left"},
    }
    lines = {name: phase["line"] for name, phase in state["phases"].items()}
    assert lines["apart"] == "a CPU has no cuDNN"
    assert lines["faulty"] == "faulty ends"
    assert lines["late"] == "late is stopped"
    assert lines["after"] == "needs about 60 s, 0 are left"
    assert lines["report"] == "waits for late, after"
    assert all(re.search(f"^{name} .*{line}$", said, re.MULTILINE) for name, line in lines.items())
    log = (folder / "log.txt").read_text()
    assert re.findall(r"== -m step (\w+) ", log) == ["first", "faulty", "late"]

    # the same command goes on; what failed is tried again, and only then it is complete
    mended = steps.replace("late 600", "soon 0")
    (tmp_path / "clock").unlink()
    finish(start(tmp_path, "--minutes", "60", steps=mended), 1)
    assert read(tmp_path)[0] == folder
    state = read(tmp_path)[1]
    assert [name for name, found in tell(state).items() if found != "done"] == ["apart", "faulty"]
    assert not state["complete"]
    said = finish(start(tmp_path, "--minutes", "60", steps=mended.replace("0 3", "0 0")))
    assert f"python -m bench.validate {folder}" in said
    assert read(tmp_path)[1]["complete"]
    log = (folder / "log.txt").read_text()
    assert re.findall(r"== -m step (\w+) ", log) == [
        *("first", "faulty", "late"),
        *("faulty", "soon", "after", "report"),
        *("faulty", "report"),
    ]


def test_an_interruption_ends_the_step_and_names_the_rest(tmp_path: Path) -> None:
    steps = "first 1 - step first 0 0\nlong 1 - step long 600 0\nlast 1 - step last 0 0\n"
    command = start(tmp_path, steps=steps)
    wait_until(command, tmp_path, "long begins")
    command.send_signal(signal.SIGINT)
    said = finish(command, 130)
    assert re.search("^long +interrupted .*long is stopped$", said, re.MULTILINE)
    assert re.search("^last +left .*stopped before it$", said, re.MULTILINE)
    assert tell(read(tmp_path)[1]) == {"first": "done", "long": "interrupted", "last": "left"}


def test_another_version_begins_another_folder(tmp_path: Path) -> None:
    now = {"gpu": "NVIDIA H200", "torch": "2.12"}
    folders = {"old": now | {"torch": "2.11"}, "open": now, "whole": now}
    for name, identity in folders.items():
        (tmp_path / name).mkdir()
        state = {"identity": identity, "complete": name == "whole", "phases": {}}
        (tmp_path / name / card.STATE).write_text(json.dumps(state))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / card.STATE).write_text("{")
    assert card.choose_folder(tmp_path, "new", now)[0] == tmp_path / "open"
    folder, state = card.choose_folder(tmp_path, "new", now | {"code": "abc"})
    assert (folder, state["phases"]) == (tmp_path / "new", {})


# ------------------------------------------------------------------------------ by its own steps


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_rehearsed_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    """Nothing is assumed of which formats the CPU emulates, of its cores or of their speed."""
    command = start(tmp_path, "--minutes", "40")
    wait_until(command, tmp_path, "1 to run, into")
    command.send_signal(signal.SIGINT)
    finish(command, 130)
    folder, state = read(tmp_path)
    never = {"autotuned", "both", "wall", "graphs", "apex", "fp8"}
    for name, found in tell(state).items():
        expected = {"doctor": "done", "rtx-titan": "interrupted"}.get(name, "left")
        # a machine with GPUs and a torch for CPUs could do the last
        assert found == ("absent" if name in never else expected) or name == "ddp-2"

    said = finish(start(tmp_path, "--minutes", "40"))
    assert read(tmp_path)[0] == folder
    state = read(tmp_path)[1]
    assert [*state["phases"]] == NAMES
    absent = {name for name, found in tell(state).items() if found == "absent"}
    assert absent - {"ddp-2"} == never
    assert {found for name, found in tell(state).items() if name not in absent} == {"done"}, said
    assert "NVIDIA apex" in state["phases"]["apex"]["line"]
    assert "harness / bare = " in state["phases"]["bare-loop"]["line"]
    frame = read_records(folder)
    trained = frame[(frame["status"] == "ok") & ~frame["sentinel"] & ~frame["probe"]]
    assert set(trained["precision"]) == {"fp32"}
    assert {1, 2, 3} <= set(trained["repeat"])
    assert len(trained[(trained["repeat"] == 1) & (trained["batch_size"] == 16)]) == 2, "none twice"
    assert {"off", "default"} == set(trained["compile"])
    assert {"device", "torch"} == set(trained["loader"])
    assert {"none", "ddp"} == set(trained["parallel"])
    (whole,) = trained[trained["evaluate"]].to_dict("records")
    assert 0 < whole["test_accuracy"] < 1
    assert "Overview" not in (folder / "log.txt").read_text(), "one report, at the end"
    assert "Safe loss scales" in (folder / "report.html").read_text()


@pytest.mark.parametrize("words", [card.CARD, card.REHEARSAL])
def test_every_command_is_one_that_there_is(words: dict[str, str]) -> None:
    device = "cuda" if words is card.CARD else "cpu"
    words = words | {"out": "out", "device": device, "data": "", "images": "--dataset synthetic"}
    words |= {"into": f"--out out --device {device}"}
    runs = {}
    for line in card.STEPS.splitlines():
        name, _, need, text = line.split(maxsplit=3)
        if device == "cpu" and need not in card.LACKS:
            continue
        while "{" in text:
            text = text.format_map(words)
        module, *flags = shlex.split(text)
        if module == "bench.sweep":
            options = parse_arguments(flags)
            runs[name] = plan_runs(plan_cases(options).cases, options.repeats)
        elif module == "bench.scales":
            read_scales(build_scales().parse(flags))
        elif module == "bench.fit":
            build_fit().parse(flags)
        elif module == "benchmarks.overhead":
            read_case(flags)
    if device == "cpu":
        return
    cases = {name: {case for case, *_ in of} for name, of in runs.items()}
    assert cases["repeats"] < cases["rtx-titan"]
    assert [case.precision for case, *_ in runs["epochs"]] == ["fp16", "tf32", "fp32"]


def test_what_is_missing_is_named(monkeypatch: Patch) -> None:
    gpu = Platform(Environment(gpu="NVIDIA H200", capability="9.0"))
    old = Platform(Environment(gpu="TITAN RTX", capability="7.5"))
    monkeypatch.setattr(card, "find_spec", lambda name: None)
    monkeypatch.setattr(card, "find_cards", lambda: ([object()], ""))
    monkeypatch.setattr(card, "find_apex", lambda: None)
    monkeypatch.setattr(card, "find_torchao", lambda: None)
    monkeypatch.setattr(card, "ROOT", Path("/nowhere"))
    said = {need: lacks(gpu) for need, lacks in card.LACKS.items()}
    assert said["-"] == ""
    assert said["2-GPUs"] == "fewer than 2 GPUs"
    assert said["pytest"] == "pytest is not installed"
    assert said["checkout"] == "only a checkout has it"
    assert said["apex"].startswith("NVIDIA apex is not installed")
    assert said["fp8"].startswith("fp8 needs the package torchao")
    assert "compute capability 8.9" in card.LACKS["fp8"](old)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes '0': give a number above 0"),
        (["--data-dri", "x"], "did you mean '--data-dir'?"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: Capture) -> None:
    assert card.main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    lost = {"tenacity", "rich", "jinja2"}  # the first is for downloads, and none is made here
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in lost else object())
    monkeypatch.setattr(card, "probe", lambda device: pytest.fail("it went on"))
    assert card.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "error: rich, jinja2 are not installed" in said
    assert list(tmp_path.iterdir()) == []
