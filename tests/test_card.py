"""Everything a GPU must show, by one command: rehearsed, cut, interrupted and gone on with."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_for_tests import Capture, Patch

from bench import card
from bench.case import AXES
from bench.environment import host
from bench.environment.machine import Platform
from bench.fit import build_parser as build_fit
from bench.record import Environment
from bench.scales.__main__ import build_parser as build_scales
from bench.store.plans import plan_runs
from bench.store.reader import read_records
from bench.sweep.options import parse_arguments, plan_cases
from bench.text import read_time
from bench.training.timing import FIRST_LOOK, LOOKS, extrapolate
from benchmarks.overhead import read_case
from tests.frames_for_tests import read_steps

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
from bench.environment.machine import Platform
from bench.record import Environment

def tell_time():  # it is late once a step has said so, however fast this machine is
    return time.monotonic() + 1e6 * clock.exists()

clock = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "clock")
if " step " in sys.argv[1]:
    card.probe = lambda device: Platform(Environment())  # torch would take 4 s to say so
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


# ------------------------------------------------------------- by the seconds that a card recorded


RECORDED = ROOT / "results" / "nvidia-h200-20261126-040407"


def read_parts(precision: str, batch_size: int) -> dict[str, float]:
    """Where the seconds of a case of an H200's folder went: of one without a whole epoch, at its
    batch size or the nearest, as a case without a profile that ends as `card.CARD` has it."""
    frame = read_records(RECORDED)
    frame = frame[(frame["fraction"] < 1) & (frame["precision"] == precision)]
    at = (frame["batch_size"] - batch_size).abs().idxmin()
    row, steps = frame.loc[at], read_steps(RECORDED)
    scale = batch_size / row["batch_size"]
    times = steps[steps["record_id"] == row["record_id"]]["time_s"].tolist()
    full, number = 50_000 / row["batch_size"], float(FIRST_LOOK)
    while number < len(times):
        own = times[: math.ceil(number)]
        if extrapolate(sum(own), own, full, drift=True).error <= 0.05:
            break
        number *= LOOKS
    parts = {"training": scale * sum(times[: math.ceil(number)])}
    parts |= {"warm-up": scale * row["warmup_time_s"], "set-up": row["setup_time_s"]}
    parts["proof and counting"] = row["proof_s"] + row["counting_s"]
    parts["end of the process and other"] = row["teardown_s"] + row["other_s"]
    return parts


def estimate_nine() -> dict[str, float]:
    """The seconds of the nine cases by part. What the folder does not tell is autotuning: its first
    steps were not recorded here."""
    cases = plan_cases(parse_arguments(["--preset", "rtx-titan", "--device", "cuda"])).cases
    total = Counter[str]()
    for case in cases:
        total.update(read_parts(case.precision, case.batch_size))
    found = read_records(RECORDED)["proof_s"].head(9).sum()
    # that which one case of each precision finds, the others take over
    found += read_records(RECORDED)["counting_s"].head(9).sum()
    total["proof and counting"] = found
    rows = read_records(RECORDED).head(9)
    moments = zip(rows["started_at"], rows["finished_at"], strict=True)
    took = sum(read_time(ended) - read_time(begun) for begun, ended in moments)
    phases = json.loads((RECORDED / card.STATE).read_text())["phases"]
    whole = sum(phases[name]["seconds"] for name in ("headline", "rtx-titan"))  # of these nine
    total["before and between the cases"] = whole - took
    return dict(total)


def test_the_page_says_what_the_nine_cases_take() -> None:
    parts = estimate_nine()
    said = ", ".join(f"{name} {seconds:.0f}" for name, seconds in sorted(
        parts.items(), key=lambda part: -part[1]))  # fmt: skip
    page = " ".join((ROOT / "docs" / "card.md").read_text().split())
    assert f"the nine cases take about {sum(parts.values()):.0f} s: {said}" in page


SECONDS = {
    "doctor": 7.5,
    "rtx-titan": 66,
    "precisions": 30,
    "plain": 90,
    "autotuned": 320,
    "compiled": 900,
    "both": 1100,
    "as-2019": 230,
}
SECONDS |= {"epochs": 98, "repeats": 30, "tests": 150, "scales": 49, "ddp": 50, "bare-loop": 76}
"""Those of an H200 and an H100 where they were recorded; for autotuning and compiling what bare
loops of an H200 took, in results/reference, times the cases."""


class Card:
    """A GPU whose commands take the seconds that they were recorded to take, on its own clock."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.now, self.ran = 0.0, list[str]()
        clock = SimpleNamespace(monotonic=lambda: self.now)
        platform = Platform(Environment(gpu="NVIDIA H200", capability="9.0", torch="2.11"))
        monkeypatch.setattr(card, "time", clock)
        monkeypatch.setattr(card, "has_cuda", lambda: True)
        monkeypatch.setattr(card, "probe", lambda device: platform)
        monkeypatch.setattr(card, "find_cards", lambda: ([object()], ""))
        monkeypatch.setattr(card, "find_apex", lambda: None)
        monkeypatch.setattr(card, "find_torchao", lambda: "0.18")
        monkeypatch.setattr(card, "run", self.run)
        self.left: dict[str, float] = {}

    def run(self, command: list[str], log: Path, until: float, stopped: Any) -> str:
        # each command is known by its own words
        text = shlex.join(command[1:])
        (name,) = [name for name in NAMES if name not in self.ran and is_of(name, text)][:1]
        takes = self.left.pop(name, SECONDS.get(name, 30.0))
        with log.open("a") as file:
            print(f"== {name} ==\n{name} has ended", file=file)
        if self.now + takes > until:
            self.left[name] = takes - (until - self.now)  # what is done is kept
            self.now = until
            return "cut"
        self.now += takes
        self.ran.append(name)
        return "done"


def is_of(name: str, text: str) -> bool:
    (line,) = (line for line in card.STEPS.splitlines() if line.split()[0] == name)
    template = line.split(None, 3)[3]
    words = card.CARD | {"out": "O", "device": "cuda", "data": "", "images": "", "into": ""}
    while "{" in template:
        template = template.format_map(words)
    own = [word for word in shlex.split(template) if word not in ("O", "O/report.html")]
    return set(own) <= {*shlex.split(text)}


def test_two_minutes_give_the_first_three_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    replay = Card(monkeypatch)
    assert card.main(["--minutes", "2", "--out", str(tmp_path)]) == 0
    assert replay.ran == ["doctor", "rtx-titan", "precisions"]
    (state,) = (json.loads(file.read_text()) for file in tmp_path.glob(f"*/{card.STATE}"))
    assert tell(state)["plain"] == "cut"
    assert [*tell(state)] == NAMES
    assert "done" not in [tell(state)[name] for name in NAMES[3:]]
    assert state["phases"]["report"]["line"].startswith("waits for plain, autotuned")
    said = capsys.readouterr().out
    assert said.endswith("the same command goes on\n")
    assert re.search("^apex +absent .*NVIDIA apex is not installed", said, re.MULTILINE)

    calls = 1
    while "report" not in replay.ran:
        replay.ran = [name for name in replay.ran if name != "doctor"]
        assert card.main(["--minutes", "9", "--out", str(tmp_path)]) == 0
        calls += 1
        assert calls < 10
    wanted = [name for name in NAMES if name not in ("doctor", "apex", "ddp-2")]
    assert [name for name in replay.ran if name != "doctor"] == wanted, "in order, each once"
    (state,) = (json.loads(file.read_text()) for file in tmp_path.glob(f"*/{card.STATE}"))
    assert state["complete"]


# ------------------------------------------------------------------------------ by its own steps


FEW = ("rtx-titan", "autotuned", "apex", "report")
"""Those that `make test` rehearses; `make thorough` does so with the whole list, which takes
four minutes. That the others are commands that there are is a test of its own."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_rehearsed_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    """Nothing is assumed of which formats the CPU emulates, of its cores or of their speed."""
    every = "BENCH_THOROUGH" in os.environ
    lines = [s for s in card.STEPS.splitlines() if every or s.split()[0] in FEW]
    names, steps = [line.split()[0] for line in lines], "\n".join(lines)
    command = start(tmp_path, "--minutes", "40", steps=steps)
    wait_until(command, tmp_path, "1 to run, into")
    command.send_signal(signal.SIGINT)
    finish(command, 130)
    folder, state = read(tmp_path)
    never = {"autotuned", "both", "as-2019", "wall", "graphs", "apex", "fp8"} & {*names}
    for name, found in tell(state).items():
        expected = {"doctor": "done", "rtx-titan": "interrupted"}.get(name, "left")
        # a machine with GPUs and a torch for CPUs could do the last
        assert found == ("absent" if name in never else expected) or name == "ddp-2"

    said = finish(start(tmp_path, "--minutes", "40", steps=steps))
    assert read(tmp_path)[0] == folder
    state = read(tmp_path)[1]
    assert [*state["phases"]] == names
    absent = {name for name, found in tell(state).items() if found == "absent"}
    assert absent - {"ddp-2"} == never
    assert {found for name, found in tell(state).items() if name not in absent} == {"done"}, said
    assert "NVIDIA apex" in state["phases"]["apex"]["line"]
    frame = read_records(folder)
    trained = frame[(frame["status"] == "ok") & ~frame["sentinel"] & ~frame["probe"]]
    assert set(trained["precision"]) == {"fp32"}
    assert not trained.duplicated([*AXES, "repeat"]).any(), "none twice"
    assert "Overview" not in (folder / "log.txt").read_text(), "one report, at the end"
    assert "Images per second" in (folder / "report.html").read_text()
    if every:
        (whole,) = trained[trained["evaluate"]].to_dict("records")
        assert 0 < whole["test_accuracy"] < 1
        assert "test accuracy" in (folder / "report.html").read_text()
        assert {1, 2, 3} <= set(trained["repeat"])
        assert "harness / bare = " in state["phases"]["bare-loop"]["line"]
        assert {"off", "default"} == set(trained["compile"])
        assert {"device", "torch"} == set(trained["loader"])
        assert {"none", "ddp"} == set(trained["parallel"])
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
            build_scales().parse(flags)
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


def test_a_wrong_word_or_a_missing_package_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    lost = {"rich", "jinja2"}
    monkeypatch.setattr(host, "find_spec", lambda name: None if name in lost else object())
    monkeypatch.setattr(card, "probe", lambda device: pytest.fail("it went on"))
    assert card.main(["--minutes", "0"]) == 2
    assert "--minutes '0': give a number above 0" in capsys.readouterr().err
    assert card.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "error: rich, jinja2 are not installed" in said
    assert list(tmp_path.iterdir()) == []
