"""Everything a GPU must show, by one command: its order, cut, interrupted and gone on with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import card
from bench.base.installation import HOME
from bench.base.text import GIB
from bench.fit import build_parser as build_fit
from bench.results.scale_map import MAP
from bench.results.store.reader import list_results, read_records
from bench.results.store.table import RECORDS
from bench.scales.__main__ import build_parser as build_scales
from bench.schema.record import Environment
from bench.sweep.options import parse_arguments, plan_cases
from bench.workers.examination import Platform
from tests.planted.records import ROOT
from tests.pytest_for_tests import Capture, Patch

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
from bench.workers.examination import Platform
from bench.schema.record import Environment

def tell_time():  # it is late once a step has said so, however fast this machine is
    return time.monotonic() + 1e6 * clock.exists()

clock = pathlib.Path(sys.argv[-1], "clock")
card.has_cuda = lambda: True
card.probe = lambda device: Platform(Environment(gpu="NVIDIA H200", capability="9.0"))
card.time = types.SimpleNamespace(monotonic=tell_time, sleep=time.sleep)
absent = lambda platform: "absent is not here"
lines = [line.split(maxsplit=3) for line in sys.argv.pop(1).splitlines()]
card.list_stages = lambda setup: [
    card.CardStage(name, int(least), words.split(), [absent] * (need == "absent"))
    for name, least, need, words in lines
]
sys.exit(card.main())
"""


def start(out: Path, steps: str) -> subprocess.Popen[str]:
    """The command, with other steps in place of its own, as on a GPU."""
    (out / "step.py").write_text(STEP)
    return subprocess.Popen(
        [sys.executable, "-c", CODE, steps, "--minutes", "60", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(out)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command: subprocess.Popen[str], expected: int = 0) -> str:
    output, _ = command.communicate(timeout=250)
    assert command.returncode == expected, output
    return output


def read(out: Path) -> tuple[Path, dict[str, Any]]:
    """The folder, and its state."""
    (file,) = out.glob(f"*/{card.STATE}")
    return file.parent, json.loads(file.read_text())


def tell(state: dict[str, Any]) -> dict[str, str]:
    return {name: phase["state"] for name, phase in state["phases"].items()}


def test_the_order_the_deadline_and_the_reasons(tmp_path: Path) -> None:
    steps = (
        "first 1 - step first 0 0\n"
        "apart 1 absent step apart 0 0\n"
        "faulty 1 - step faulty 0 3\n"
        "late 1 - step late 600 0\n"
        "after 60 - step after 0 0\n"
        "report 0 - step report 0 0\n"
    )
    output = finish(start(tmp_path, steps), 1)
    folder, state = read(tmp_path)
    assert output.startswith("NVIDIA H200; synthetic images")
    assert output.endswith("the same command goes on\n")
    assert tell(state) == {
        **{"first": "done", "apart": "absent", "faulty": "failed"},
        **{"late": "cut", "after": "left", "report": "left"},
    }
    lines = {name: phase["line"] for name, phase in state["phases"].items()}
    assert lines["apart"] == "absent is not here"
    assert lines["faulty"] == "faulty ends"
    assert lines["late"] == "late is stopped"
    assert lines["after"] == "needs about 60 s, 0 are left"
    assert all(
        re.search(f"^{name} .*{line}$", output, re.MULTILINE) for name, line in lines.items()
    )

    # the same command goes on; what failed is tried again, and only then it is complete
    fixed = steps.replace("late 600", "soon 0")
    (tmp_path / "clock").unlink()
    finish(start(tmp_path, fixed), 1)
    state = read(tmp_path)[1]
    assert [name for name, found in tell(state).items() if found != "done"] == ["apart", "faulty"]
    assert not state["complete"]
    output = finish(start(tmp_path, fixed.replace("0 3", "0 0")))
    assert f"python -m bench.validate {folder}" in output
    assert read(tmp_path)[1]["complete"]
    log = (folder / "log.txt").read_text()
    assert re.findall(r"== -m step (\w+) ", log) == [
        *("first", "faulty", "late"),
        *("faulty", "soon", "after", "report"),
        *("faulty", "report"),
    ]


def test_an_interruption_ends_the_step_and_names_the_rest(tmp_path: Path) -> None:
    steps = "first 1 - step first 0 0\nlong 1 - step long 600 0\nlast 1 - step last 0 0\n"
    command = start(tmp_path, steps)
    while not any("long begins" in log.read_text() for log in tmp_path.glob("*/log.txt")):
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    command.send_signal(signal.SIGINT)
    output = finish(command, 130)
    assert re.search("^long +interrupted .*long is stopped$", output, re.MULTILINE)
    assert re.search("^last +left .*stopped$", output, re.MULTILINE)
    assert tell(read(tmp_path)[1]) == {"first": "done", "long": "interrupted", "last": "left"}


def plan(step: str, **about: Any) -> tuple[list[str], str]:
    """What is run of a step on a card, and why it is not."""
    platform = Platform(Environment(gpu="a card", capability="9.0", gpu_memory_bytes=80 * GIB))
    vars(platform.environment).update(about)
    (one,) = (one for one in card.list_stages(card.Setup(platform, "out")) if one.name == step)
    return card.plan_stage(one, platform)


def list_names(gpu: str | None = "a card") -> list[str]:
    setup = card.Setup(Platform(Environment(gpu=gpu)), "out")
    return [stage.name for stage in card.list_stages(setup)]


def test_every_command_is_one_that_there_is() -> None:
    """On what machines it runs is in tests/test_machines.py."""
    cases = {}
    for name in list_names():
        if not (asked := plan(name)[0]):
            continue  # no apex here, nor a second GPU
        module, *flags = asked
        if module == "bench.sweep":
            cases[name] = plan_cases(parse_arguments(flags)).cases
        elif module == "bench.scales":
            build_scales().parse(flags)
        elif module == "bench.fit":
            build_fit().parse(flags)
    assert {*cases["repeats"]} < {*cases["rtx-titan"]}
    assert [case.precision for case in cases["epochs"]] == ["fp16", "tf32", "fp32"]


def test_a_card_is_asked_for_nothing_that_it_lacks() -> None:
    old: dict[str, Any] = {"gpu": "NVIDIA TITAN RTX", "capability": "7.5"}
    for step, left in (
        ("plain", ["fp32", "fp16", "fp16-amp"]),
        ("epochs", ["fp16", "fp32"]),
    ):
        flags, _ = plan(step, **old)
        begin = flags.index("--precision") + 1
        assert flags[begin : begin + len(left)] == left
        assert flags[begin + len(left)].startswith("--")
    assert plan("fp8", **old) == (
        [],
        ("fp8 needs an NVIDIA GPU of compute capability 8.9 or later; this is NVIDIA TITAN RTX"),
    )
    assert plan("compiled", capability="6.1")[1].startswith(
        "torch.compile needs compute capability"
    )
    for gib, limit in ((80, "21GiB"), (24, "21GiB"), (16, "14GiB"), (4.75, "4GiB")):
        flags, _ = plan("fit-limit", gpu_memory_bytes=round(gib * GIB))
        assert flags[flags.index("--memory-limit") + 1] == limit


def test_no_case_is_begun_with_less_time_left_than_it_takes(tmp_path: Path) -> None:
    """A row that is written is the end of a case: here of the first, with 60 s left of 80."""
    (tmp_path / RECORDS).touch()
    code = (
        "import sys, time; open(sys.argv[1], 'a').write('row'); print('a case ends', flush=True);"
    )
    command = ["-c", f"{code} time.sleep(50)", str(tmp_path / RECORDS)]
    log, until = tmp_path / "log.txt", time.monotonic() + 60
    assert card.run(command, log, until, lambda: 0, 80) == "cut"
    assert time.monotonic() < until - 15
    quick = ["-c", f"{code} time.sleep(1)", str(tmp_path / RECORDS)]
    assert card.run(quick, log, until, lambda: 0, 5) == "done"


def test_a_package_that_pip_installed_runs_commands_where_the_user_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not among the packages, where ./data is nobody's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(card, "in_checkout", lambda: False)
    log = tmp_path / "log.txt"
    command = ["-c", "import os; print(os.getcwd())"]
    assert card.run(command, log, time.monotonic() + 60, lambda: 0) == "done"
    assert log.read_text().splitlines()[-1] == str(tmp_path)


def test_a_gpu_that_torch_does_not_find_is_not_rehearsed_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(card, "has_cuda", lambda: False)
    monkeypatch.setattr(card, "find_cards", lambda: ([object()], ""))
    assert card.main(["--out", str(tmp_path)]) == 2
    assert "there is one; python -m bench.doctor says why" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_rehearsal_is_among_no_results(tmp_path: Path) -> None:
    for name in ("rehearsal-cpu-20261128", "cpu-20261128"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORDS).touch()
    assert list_results(tmp_path) == [tmp_path / "cpu-20261128"]


@pytest.mark.thorough
@pytest.mark.timeout(3000)
def test_a_cpu_rehearses_every_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.card", "--minutes", "40", "--out", str(tmp_path)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=hidden, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("A rehearsal on the CPU, ")
    folder, state = read(tmp_path)
    assert folder.name.startswith("rehearsal-cpu-")
    assert state["complete"]
    lacking = {"autotuned", "both", "as-2019", "fit", "graphs", "apex", "fp8", "ddp-2"}
    assert tell(state) == {
        name: "absent" if name in lacking else "done" for name in list_names(None)
    }
    rows = read_records(folder)
    assert {"ok"} == set(rows[~rows["probe"]]["status"])
    assert {"off", "default"} == set(rows["compile"])
    assert {"none", "ddp"} == set(rows["parallel"])
    assert (folder / MAP).is_file()
    assert "fp32" in (folder / "report.html").read_text()


@pytest.mark.parametrize("checkout", [True, False])
def test_a_complete_folder_is_checked_and_offered(
    checkout: bool, tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    folder = Path(shutil.copytree(ROOT / "results" / "cpu-profiles-20261122", tmp_path / "cpu"))
    monkeypatch.setattr(card, "in_checkout", lambda: checkout)
    card.offer(folder, str(folder))
    output = capfd.readouterr().out
    assert "18 checks: " in output
    if checkout:
        assert output.endswith(
            f"To offer this card to others: git switch -c card, git add {folder}, git commit, and "
            "open a pull request with the form for a card.\n"
        )
    else:
        with zipfile.ZipFile(tmp_path / "cpu.zip") as archive:
            assert "cpu/records.csv" in archive.namelist()
        offer = f"To offer this card to others, attach {tmp_path / 'cpu.zip'} to an issue: "
        assert offer in output
        _, found, form = output.partition(f"{HOME}/issues/new?template=")
        assert found
        assert (ROOT / ".github" / "ISSUE_TEMPLATE" / form.strip()).is_file()

    rows = (folder / "records.csv").read_text()
    (folder / "records.csv").write_text(rows.replace(",ok,", ",of,", 1))
    card.offer(folder, str(folder))
    assert "first mend what is wrong" in capfd.readouterr().out
