"""Everything a GPU must show, by one command: rehearsed on a CPU, cut, interrupted and resumed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from runpy import run_path

import pytest

from bench.card import __main__ as command
from bench.card import agenda, phases
from bench.card import folder as folders
from bench.card.agenda import AGENDA, CLOSING_S, SHARES, run_agenda
from bench.card.children import ChildRunner, Ended
from bench.card.folder import (
    CHECKS,
    FILES,
    LOG,
    MOST_BYTES,
    MOST_FILES,
    PAGE,
    STATE,
    Card,
    Entry,
    State,
    check_limits,
    choose_card,
    tidy,
)
from bench.card.phases import GPU_TESTS, PHASES, PUBLISHED
from bench.card.scale import Scale, choose_scale, rehearse
from bench.card.summary import summarize
from bench.card.testrun import read_outcomes
from bench.case import Case
from bench.environment import packages
from bench.environment.device import Platform
from bench.errors import UsageError
from bench.record import Environment, Status
from bench.store.cells import LOGS, RECORDS
from bench.store.plans import plan_runs
from bench.store.reader import read_records
from bench.sweep.options import Options, parse_arguments, plan_cases
from bench.wall.search import Ending
from tests.models_for_tests import TRIES

ROOT = Path(__file__).parents[1]
IDENTITY = {"gpu": "NVIDIA H200", "torch": "2.11", "code": "abc", "dataset": "cifar10"}
FAKE = Scale("cpu", "synthetic", None, 0.01, sweep="--executor fake --model dpn-small")


@pytest.fixture
def card(tmp_path: Path) -> Card:
    folder = tmp_path / "card"
    folder.mkdir()
    identity = {**IDENTITY, "fraction": 0.2}
    return Card(folder, False, identity, started_at="2026-11-21T12:00:00+00:00")


# -------------------------------------------------------------------------------------- for real


NETWORK = "models_for_tests:hangs_once"
# A rehearsal of few tests, and of networks that train in seconds: dpn-small spends minutes on them.
SMALL = """
import sys
from dataclasses import replace
from bench.card import __main__ as card, phases

phases.GPU_TESTS = "tests/gpu/test_nvml.py"
rehearse = card.rehearse


def shrink(fraction):
    scale = rehearse(fraction)
    texts = {"sweep": scale.sweep, "map": scale.map}
    small = {name: text.replace("dpn-small", "NETWORK") for name, text in texts.items()}
    assert all("NETWORK" in text for text in small.values())
    walls = "--model models_for_tests:wide --precision fp32 --step 96"
    return replace(scale, **small, walls=walls, limit="512MiB")


card.rehearse = shrink
sys.exit(card.main())
""".replace("NETWORK", NETWORK)


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "CARD_MINUTES": "40", "PYTHONPATH": path}
    # compilers take half a minute, and say nothing of a card: tests/test_profile.py has them
    environment |= {TRIES: str(out / "begun"), "TORCH_COMPILE_DISABLE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", SMALL, "--out", str(out), *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(1200)
def test_rehearsed_interrupted_within_a_case_and_gone_on_with(tmp_path: Path) -> None:
    first, begun = start(tmp_path, "--only", "headline"), tmp_path / "begun"
    end = time.monotonic() + 300
    while not begun.exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    said, shown = first.communicate(timeout=300)
    assert first.returncode == 130, shown
    (folder,) = tmp_path.glob("rehearsal-*")
    assert Card.read(folder).phases["headline"].state is State.INTERRUPTED
    assert read_records(folder)["status"].tolist() == ["interrupted"]
    assert "REHEARSAL on a CPU" in said
    assert "headline    interrupted" in said
    assert "report      done" in said
    assert "run the same command again" in said

    again = start(tmp_path)
    said, shown = again.communicate(timeout=2300)
    assert again.returncode in (0, 1), shown  # the doctor may find fault with this machine
    assert {*tmp_path.iterdir()} == {folder, begun}
    assert f"continuing in {folder}" in shown
    card = Card.read(folder)
    assert card.rehearsal
    states = {name: entry.state for name, entry in card.phases.items()}
    assert states.keys() == PHASES.keys()
    del states["doctor"]
    assert states.pop("wall") is State.ABSENT  # a CPU has none without a limit
    assert states.pop("apex") is State.ABSENT
    assert states.pop("autotune") is states.pop("graphs") is State.ABSENT  # nor cuDNN, nor graphs
    assert "NVIDIA apex is not installed" in card.phases["apex"].line
    assert set(states.values()) == {State.DONE}, said
    assert all(entry.seconds for entry in card.phases.values() if entry.state is State.DONE)
    assert set(card.tests.values()) <= {"skipped", "passed"}

    frame = read_records(folder)
    trained = frame[(frame["status"] == "ok") & ~frame["sentinel"] & ~frame["probe"]]
    assert {"fp32", "bf16-amp"} <= set(trained["precision"])
    told = ["precision", "loss_scale", "repeat", "profile", "parallel", "evaluate"]
    assert not trained.duplicated(told).any(), "none twice"
    assert (trained["measured_steps"] > 0).all()
    checks = json.loads((folder / CHECKS).read_text())
    assert "seconds: harness / bare = " in card.phases["overhead"].line
    line = card.phases["scales"].line
    assert f"{NETWORK}, batch size 8, synthetic images: scales from" in line
    assert set(checks["scales"]) == {"scales.json", "gradients.csv", "trainings.csv"}
    (whole,) = trained[trained["evaluate"]].to_dict("records")
    assert (whole["precision"], whole["optimizer"]) == ("fp32", "adamw")
    assert 0 < whole["test_accuracy"] < 1
    names = {file.name for file in folder.iterdir()}
    assert names <= set(FILES)
    assert {STATE, RECORDS, CHECKS, LOG, PAGE} <= names
    assert "Safe loss scales" in (folder / PAGE).read_text()
    assert Card.read(folder).rehearsal, "so that it is not shown in the README"


def test_cut_to_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No time but for the end: every phase is named, with what it needs."""
    monkeypatch.setattr(command, "has_cuda", lambda: False)
    monkeypatch.setattr(command, "probe", lambda device: Platform(Environment(cpu="a CPU")))
    monkeypatch.setattr(command, "lend_server", lambda *_: nullcontext({}))
    assert command.main(["--minutes", "0.05", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    card = Card.read(folder)
    assert card.rehearsal
    assert {entry.state for entry in card.phases.values()} == {State.CUT}
    for name in PHASES:
        assert f"  {name:<11} cut " in said
    assert "needs about 12 s, 0 s were left" in said
    assert {file.name for file in folder.iterdir()} <= set(FILES)


def test_a_missing_package_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"tenacity", "rich", "jinja2"}  # the first is for downloads, and none is made here
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in lost else object())
    monkeypatch.setattr(command, "probe", lambda device: pytest.fail("it went on"))
    assert command.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "error: rich, jinja2 are not installed" in said
    assert "-m pip install rich jinja2" in said
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_cannot_keep_it_from_being_told() -> None:
    """Nothing that may be missing is imported before that is looked for."""
    code = (
        "import sys, bench.card.__main__; from bench.environment.packages import PACKAGES;"
        "print({*PACKAGES.values(), 'pytest'} & sys.modules.keys())"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert said.stdout == "set()\n"


# ------------------------------------------------------------------------------ by the agenda


class Clock:
    """A clock that phases move."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


UNITS = {
    "doctor": [8.0],
    "headline": [26.0, 9.0],
    "rtx-titan": [12.0, 14.0, 9.0, 6.5, 6.5, 6.5, 8.5],
    "precision": [9.5, 9.5, 9.5, 10.5],
    "epochs": [49.0, 17.5],
    "tests": [*[1.0] * 45, *[4.0] * 20, *[8.0] * 5, *[15.0] * 10],
    "repeats": [14.0, 7.5, 8.0] * 2,
    "compile": [60.0],
    "autotune": [14.0, 10.0],
    "graphs": [9.0, 9.0],
    "overhead": [62.0],
    "profiles": [12.0] * 4,
    "ddp": [16.0] * 2,
}
"""Seconds: the first five, and the first 70 tests together, as an H200 took them; others are
planned."""


def simulate(
    minutes: float, monkeypatch: pytest.MonkeyPatch, card: Card
) -> tuple[dict[str, int], float]:
    """Run the agenda with phases that only take time; how many units of each were done."""
    clock, done = Clock(), Counter[str]()
    monkeypatch.setattr(agenda.time, "monotonic", clock.monotonic)

    def run(name: str):  # type: ignore[no-untyped-def]
        def run(_: Card, scale: Scale, children: ChildRunner) -> Entry:
            units = UNITS[name]
            while done[name] < len(units):
                if done[name] and clock.now + units[done[name]] > children.until:
                    return Entry(State.CUT, line=f"{done[name]} of {len(units)}")
                clock.now += units[done[name]]
                done[name] += 1
            return Entry(State.DONE, line="all of it")

        return run

    monkeypatch.setattr(
        agenda, "PHASES", {name: replace(p, run=run(name)) for name, p in PHASES.items()}
    )
    scale, children = Scale("cuda", "cifar10", None, 0.2), ChildRunner(card.folder / LOG)
    run_agenda(card, scale, children, clock.now, clock.now + 60 * minutes - CLOSING_S)
    return dict(done), clock.now - Clock.now


def test_three_minutes_show_the_nine_cases_and_every_precision(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seconds = simulate(3, monkeypatch, card)
    assert (done["headline"], done["rtx-titan"]) == (2, 7)
    assert done["precision"] == 4
    assert seconds <= 180 - CLOSING_S
    assert "overhead" not in done
    assert card.phases["overhead"].state is State.CUT
    said = "\n".join(summarize(card, Entry(State.DONE), [], seconds, "3"))
    assert "overhead    cut              –  needs about 65 s, " in said
    left = (
        "repeats, epochs, tests, compile, autotune, graphs, apex, overhead, "
        "wall-limit, wall, scales, profiles, ddp"
    )
    assert f"to continue with {left}" in said


def test_nine_minutes_measure_each_case_once_and_whole_epochs(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seconds = simulate(9, monkeypatch, card)
    measured = ("doctor", "headline", "rtx-titan", "precision", "repeats", "epochs")
    measured += ("compile", "autotune")
    assert {name: card.phases[name].state for name in measured} == dict.fromkeys(
        measured, State.DONE
    )
    assert done["tests"] >= 30, "those that train in one process"
    assert seconds <= 540 - CLOSING_S
    before = dict(done)
    done, _ = simulate(20, monkeypatch, card)  # gone on with: only what was left
    assert done.keys() == {"doctor", "tests", "overhead", "profiles", "ddp"}
    assert before["doctor"] == done["doctor"] == 1
    assert card.finished("tests")


def test_what_is_stopped_is_reported_all_the_same(tmp_path: Path) -> None:
    wait = ["-c", "import time; time.sleep(1); print('reported')"]
    children = ChildRunner(tmp_path / LOG, asked=lambda: signal.SIGINT)
    assert children.run(wait, quiet=True).stopped
    children.closing = True
    ended = children.run(wait, quiet=True)
    assert (ended.returncode, ended.stdout) == (0, "reported\n")
    children.until = time.monotonic()
    assert children.run(wait).stopped, "but not for ever"


def test_the_agenda_has_every_phase() -> None:
    assert set(AGENDA) == PHASES.keys()
    assert SHARES.keys() < PHASES.keys()
    assert all(0 < share < 1 for share in SHARES.values())
    assert set(PUBLISHED) < PHASES.keys()


@dataclass
class Answers:
    """Children that have ended already, each alike; what they were asked."""

    ended: Ended
    until: float = 1e12
    asked: list[str] = field(default_factory=list)

    def run(self, arguments: list[str], *_: object, **__: object) -> Ended:
        self.asked += arguments
        return self.ended


def plan(phase: str, card: Card, scale: Scale) -> tuple[Options, Entry]:
    """What the sweep of a phase is asked, and what the phase says of it."""
    children = Answers(Ended(0, None, "", ""))
    entry = PHASES[phase].run(card, scale, children)
    return parse_arguments(children.asked[2 : children.asked.index("--out")]), entry


CUDA = Scale("cuda", "synthetic", None, 0.2)


@pytest.mark.parametrize(
    ("phase", "runs", "rehearsed"),
    [
        ("headline", 2, 2),
        ("rtx-titan", 9, 4),
        ("precision", 6, 6),
        ("epochs", 2, 2),
        ("compile", 1, 1),
        ("profiles", 4, 1),
        ("ddp", 2, 2),
        ("repeats", 10, 5),
    ],
)
def test_a_sweep_measures_each_case_once_but_for_the_repeats(
    phase: str, runs: int, rehearsed: int, card: Card
) -> None:
    """A part of an epoch is otherwise repeated by default, and would take all the time there is."""
    for scale, expected in ((CUDA, runs), (rehearse(None), rehearsed)):
        options, entry = plan(phase, card, scale)
        assert entry.line.startswith(f"0 of {expected} ")
        assert len(plan_runs(plan_cases(options).cases, options.repeats)) == expected


def test_no_case_is_measured_again_only_to_be_profiled(card: Card) -> None:
    def cases(phase: str) -> set[Case]:
        return set(plan_cases(plan(phase, card, CUDA)[0]).cases)

    nine = cases("rtx-titan")
    assert all(case.profile for case in nine)
    assert cases("headline") < nine
    assert len(cases("repeats") & nine) == 2
    assert cases("repeats") < nine | cases("precision")
    assert {case.precision for case in cases("precision") & nine} == {"fp32", "fp16"}
    left = {(case.precision, case.batch_size) for case in cases("profiles") - nine}
    assert left == {(name, size) for name in ("bf16-amp", "tf32") for size in (128, 512)}


def test_the_doctor_looks_where_the_card_does(card: Card) -> None:
    children = Answers(Ended(0, None, "{}", ""))
    scale = replace(CUDA, data_dir=Path("/images"))
    assert PHASES["doctor"].run(card, scale, children).state is State.DONE
    assert children.asked[children.asked.index("--data-dir") + 1] == "/images"
    assert children.asked[children.asked.index("--out") + 1] == str(card.folder)


@pytest.mark.parametrize(
    ("phase", "ended", "entry"),
    [
        ("headline", Ended(130, State.CUT, "", "…"), (State.CUT, "0 of 2 cases")),
        ("doctor", Ended(2, None, "", "no GPU"), (State.FAILED, "no GPU")),
        ("overhead", Ended(130, State.CUT, "{}", "…"), (State.CUT, phases.CUT_LINE)),
    ],
)
def test_what_ends_early_is_no_answer(
    phase: str, ended: Ended, entry: tuple[State, str], card: Card
) -> None:
    found = PHASES[phase].run(card, CUDA, Answers(ended))
    assert (found.state, found.line) == entry
    assert card.read_checks() == {}


@pytest.mark.parametrize(("device", "state"), [("cuda", State.FAILED), ("cpu", State.DONE)])
def test_tests_that_all_skip_show_nothing_of_a_card(device: str, state: State, card: Card) -> None:
    class Skipping(Answers):
        def run(self, arguments: list[str], *_: object, **__: object) -> Ended:
            lines = ({"collected": ["a"]}, {"test": "a", "outcome": "skipped"})
            file = Path(arguments[arguments.index("--card-outcomes") + 1])
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return self.ended

    skipping, scale = Skipping(Ended(0, None, "", "")), replace(CUDA, device=device)
    found = PHASES["tests"].run(card, scale, skipping)
    assert (found.state, found.line) == (state, "1 skipped")


def test_a_fault_of_one_phase_is_its_outcome(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Entry:
        raise UsageError("the GPU is in use by pid 7")

    def crash(*_: object) -> Entry:
        raise ZeroDivisionError("oh")

    other = {name: replace(p, run=crash, absent="") for name, p in PHASES.items()}
    monkeypatch.setattr(agenda, "PHASES", {**other, "doctor": replace(PHASES["doctor"], run=fail)})
    run_agenda(card, FAKE, ChildRunner(card.folder / LOG), time.monotonic(), time.monotonic() + 600)
    assert card.phases["doctor"].line == "the GPU is in use by pid 7"
    assert card.phases["repeats"].line == "ZeroDivisionError: oh"
    assert {entry.state for entry in card.phases.values()} == {State.FAILED}
    assert Card.read(card.folder) == card


# ------------------------------------------------------------------------------------ its sweeps


def run_sweeps(card: Card, seconds: float, *names: str, scale: Scale = FAKE) -> Card:
    with ChildRunner(card.folder / LOG) as children:
        now = time.monotonic()
        run_agenda(card, scale, children, now, now + seconds, names)
    return card


@pytest.mark.slow
def test_presets_share_cases_and_none_runs_twice(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_FAKE_ANSWERS", "precision=fp16:killed")
    run_sweeps(card, 300, "headline")
    assert card.phases["headline"].state is State.FAILED
    assert card.phases["headline"].line == "2 of 2 cases: 1 ok, 1 killed"
    monkeypatch.delenv("BENCH_FAKE_ANSWERS")
    names = ("headline", "rtx-titan", "precision", "repeats")
    run_sweeps(card, 300, *names)
    lines = {name: entry.line for name, entry in card.phases.items()}
    assert lines == {
        "headline": "2 of 2 cases: 2 ok",  # what failed is tried again
        "rtx-titan": "9 of 9 cases: 9 ok",
        "precision": "6 of 6 cases: 5 ok, 1 unsupported",  # tf32, on a CPU
        "repeats": "7 of 7 runs: 7 ok",
    }
    assert {entry.state for entry in card.phases.values()} == {State.DONE}
    frame = read_records(card.folder)
    # of the six precisions the headline has two, and a second run tells each time of the fake
    assert len(frame) == 1 + 9 + 4 + 3 + 1
    log = (card.folder / LOG).read_text()
    run_sweeps(card, 300, *names)
    assert (card.folder / LOG).read_text() == log, "what is done is not started again"


def test_a_card_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A card that is not there, measured by the fake: its folder, its screen, its doubts."""
    gpu = Environment(gpu="NVIDIA H200", torch="2.11", code="abc", driver="580")
    monkeypatch.setattr(command, "has_cuda", lambda: True)
    monkeypatch.setattr(command, "probe", lambda device: Platform(gpu))
    monkeypatch.setattr(command, "lend_server", lambda *_: nullcontext({}))
    monkeypatch.setattr(agenda, "write_report", lambda *_: Entry(State.DONE))
    monkeypatch.setattr(agenda, "write_readme", lambda _: pytest.fail("it is not in results/"))
    scale = replace(FAKE, device="cuda", fraction=0.2)
    monkeypatch.setattr(command, "choose_scale", lambda *_: scale)
    flags = ["--out", str(tmp_path), "--only"]
    assert command.main([*flags, "headline", "rtx-titan"]) == 0
    said = capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("nvidia-h200-20")
    assert re.match(r"\nNVIDIA H200: \d+:\d\d of 9 min\n", said)
    assert "rtx-titan   done" in said
    assert "precision   not run" in said
    assert "each case measured 20 % of an epoch; --fraction 1 measures whole epochs" in said
    assert Card.read(folder).done(*PUBLISHED)
    assert not Card.read(folder).rehearsal
    failed = replace(PHASES["tests"], run=lambda *_: Entry(State.FAILED, line="is a CPU build"))
    monkeypatch.setattr(agenda, "PHASES", {**PHASES, "tests": failed})
    assert command.main([*flags, "tests"]) == 1
    assert "tests       failed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [folder]


def test_the_next_case_is_not_begun_in_vain(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    clock = Clock()
    monkeypatch.setattr(phases.time, "monotonic", clock.monotonic)
    records, children = tmp_path / RECORDS, ChildRunner(tmp_path / LOG, until=1055.0)
    enough = phases.watch_time(records, children)
    clock.now = 1020.0
    assert not enough()
    records.write_text("header\nrow\n")
    assert not enough(), "20 s a case, and 35 are left"
    clock.now = 1036.0
    assert not enough(), "asked within a case"
    records.write_text("header\nrow\nrow\n")
    assert enough(), "20 s the longest, and 19 are left"


def test_a_sweep_that_is_refused_says_why(card: Card) -> None:
    refused = replace(FAKE, sweep=f"{FAKE.sweep} --batch-size 60000")
    run_sweeps(card, 300, "headline", scale=refused)
    assert card.phases["headline"].state is State.FAILED
    assert "batch size 60000 is above the dataset's 50000 images" in card.phases["headline"].line


# ------------------------------------------------------------------------------------- its tests


def run_tests(folder: Path, seconds: float) -> tuple[int, dict[str, str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command += ["-p", "bench.card.testrun", "--card-until", str(time.monotonic() + seconds)]
    command += ["--card-outcomes", str(folder / "outcomes"), str(folder / "test_some.py")]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    outcomes = read_outcomes(folder / "outcomes")
    return done.returncode, {t.rpartition("::")[2]: outcome for t, outcome in outcomes.items()}


def test_tests_stop_between_two_and_go_on_with_the_rest(tmp_path: Path) -> None:
    seen, mended = tmp_path / "seen", tmp_path / "mended"
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "from pathlib import Path\n"
        "@pytest.fixture\ndef run(): pass\n"
        f"def see(text):\n with open({str(seen)!r}, 'a') as file: file.write(text)\n"
        f"def test_worker(run): see('w'); assert Path({str(mended)!r}).exists()\n"
        "def test_passes(): see('p')\n"
        f"def test_fails(): see('f'); assert Path({str(mended)!r}).exists()\n"
        "def test_skips(): pytest.skip('no card')\n"
    )
    returncode, outcomes = run_tests(tmp_path, seconds=600)
    assert returncode == 1
    assert outcomes == {
        "test_worker": "failed", "test_fails": "failed", "test_skips": "skipped",
        "test_passes": "passed",
    }  # fmt: skip
    assert seen.read_text() == "pfw", "what trains in a worker comes last"
    mended.touch()
    returncode, outcomes = run_tests(tmp_path, seconds=0)
    assert returncode == phases._PYTEST_INTERRUPTED
    assert (outcomes["test_fails"], outcomes["test_worker"]) == ("passed", "failed")
    assert seen.read_text() == "pfwf", "what passed is not run again"


def test_what_its_tests_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    configure = run_path(str(ROOT / GPU_TESTS / "conftest.py"))["pytest_configure"]
    configure()
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "psutil" else object())
    with pytest.raises(
        pytest.UsageError, match=r"psutil is not installed .* -m pip install psutil"
    ):
        configure()


def test_its_tests_need_nothing_else_and_end_with_the_slow_ones() -> None:
    """Every other package of the harness is lost, and all that tests of a CPU need."""
    needed = run_path(str(ROOT / GPU_TESTS / "conftest.py"))["NEEDED"]
    lost = [module for name, module in packages.PACKAGES.items() if name not in needed]
    code = (
        "import sys, pytest\n"
        f"sys.modules |= dict.fromkeys({[*lost, 'hypothesis']})\n"
        f"sys.exit(pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', {GPU_TESTS!r}]))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    names = re.findall(r"::(\w+)", done.stdout)
    first_slow = names.index("test_a_group_of_one_trains_as_one_alone")
    assert first_slow > names.index("test_cases_start_quickly"), "the last of test_training.py"


def test_make_runs_the_same_tests() -> None:
    assert f'-m "gpu and not slow" {GPU_TESTS} ' in (ROOT / "Makefile").read_text()


# ------------------------------------------------------------------------------------- its folder


def test_the_newest_unfinished_folder_of_this_card_goes_on(tmp_path: Path) -> None:
    made = {}
    for name, hour, complete, code in (
        ("older", 1, False, "abc"),
        ("newer", 2, False, "abc"),
        ("whole", 3, True, "abc"),
        ("other", 4, False, "def"),
    ):
        made[name] = Card(
            tmp_path / name,
            False,
            {**IDENTITY, "code": code},
            started_at=f"2026-11-21T0{hour}:00:00+00:00",
            complete=complete,
        )
        made[name].write()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / STATE).write_text("{")
    chosen, remark = choose_card(tmp_path, "new", IDENTITY, rehearsal=False)
    assert chosen == made["newer"]
    assert remark == f"continuing in {tmp_path / 'newer'}"
    for name in ("older", "newer"):
        made[name].complete = True
        made[name].write()
    chosen, remark = choose_card(tmp_path, "new", IDENTITY, rehearsal=False)
    assert chosen.folder == tmp_path / "whole"
    assert "is complete; --new measures everything again" in remark
    chosen, _ = choose_card(tmp_path, "whole", IDENTITY, rehearsal=False, new=True)
    assert chosen.folder == tmp_path / "whole-2"
    chosen, _ = choose_card(tmp_path, "new", IDENTITY, rehearsal=True)
    assert chosen.folder == tmp_path / "new", "a rehearsal never goes on in a card's folder"


def test_another_torch_or_code_is_said(tmp_path: Path) -> None:
    Card(tmp_path / "old", False, IDENTITY, started_at="2026").write()
    now = {**IDENTITY, "torch": "2.12", "code": "def"}
    chosen, remark = choose_card(tmp_path, "new", now, rehearsal=False)
    assert chosen.folder == tmp_path / "new"
    assert remark.endswith("torch was 2.11, now 2.12; code was abc, now def")


def test_failed_logs_are_kept_and_nothing_else_of_the_workings(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.write()
    (card.folder / LOGS).mkdir()
    for name in ("failed", "fine"):
        (card.folder / LOGS / f"{name}.log").write_text(f"{name}\n" * 10_000 + f"end of {name}\n")
    for name in (".lock", ".holder", folders.LOCK):
        (card.folder / name).touch()
    (card.folder / f"{RECORDS}.torn-20261121").write_text("half a li")
    rows = [("logs/failed.log", Status.ERROR), ("logs/fine.log", Status.OK), ("", Status.KILLED)]
    frame = __import__("pandas").DataFrame(rows, columns=["log", "status"])
    monkeypatch.setattr(folders, "read_records", lambda folder: frame)
    assert tidy(card.folder) == []
    assert {file.name for file in card.folder.iterdir()} == {STATE, LOG}
    log = (card.folder / LOG).read_text()
    assert "end of failed" in log
    assert "half a li" in log
    assert "fine" not in log
    assert len(log) < 40_000


def test_a_large_log_keeps_its_end(card: Card) -> None:
    (card.folder / LOG).write_text("x" * 5_000_000 + "the end")
    tidy(card.folder)
    text = (card.folder / LOG).read_text()
    assert text.startswith("[the beginning is left out]")
    assert text.endswith("the end")
    assert len(text) < 4.3e6


def grow(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(MOST_BYTES + 1)


def test_limits_take_away_what_is_derived_and_name_what_is_measured(card: Card) -> None:
    for name in FILES:
        (card.folder / name).touch()
    assert check_limits(card.folder) == []
    grow(card.folder / PAGE)
    assert check_limits(card.folder) == []
    assert not (card.folder / PAGE).exists()
    grow(card.folder / RECORDS)
    assert check_limits(card.folder) == ["records.csv: is larger than 16 MiB"]
    assert (card.folder / RECORDS).exists()


def test_limits_of_number_kind_and_name(card: Card) -> None:
    assert len(FILES) == MOST_FILES
    for name in (*FILES, "another"):
        (card.folder / name).touch()
    assert check_limits(card.folder) == ["11 files, where 10 are allowed; move away another"]
    (card.folder / "another").rename(card.folder / "n th")
    (card.folder / STATE).unlink()
    (card.folder / STATE).mkdir()
    assert check_limits(card.folder)[:2] == [
        "card.json: is not a plain file",
        "n th: has unusual characters in its name",
    ]


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes '0': give a number above 0"),
        (["--fraction", "2"], "--fraction '2': give a number above 0, at most 1"),
        (["--only", "presicion"], "--only 'presicion': did you mean 'precision'?"),
        (["--data-dri", "x"], "did you mean '--data-dir'?"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(flags) == 2
    assert message in capsys.readouterr().err


def test_without_cifar10_the_images_are_synthetic(
    tmp_path: Path, cifar10: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the summary says so."""
    assert choose_scale(cifar10, None).dataset == "cifar10"
    with pytest.raises(UsageError, match="no CIFAR-10 there"):
        choose_scale(tmp_path, None)
    monkeypatch.chdir(tmp_path)
    scale = choose_scale(None, None)
    assert (scale.dataset, scale.data_dir) == ("synthetic", None)
    card.identity["dataset"] = scale.dataset
    assert "no CIFAR-10 was found" in "\n".join(summarize(card, Entry(State.DONE), [], 1, "9"))


def test_two_printed_lines_contribute_the_folder_to_a_clone(card: Card, tmp_path: Path) -> None:
    """They check it and commit it; what it gives away is said below them."""
    clone = tmp_path / "clone"
    (clone / "results").mkdir(parents=True)
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", "init", "--quiet", str(clone)], check=True)
    shutil.copytree(ROOT / "results" / "cpu-profiles-20261122", card.folder, dirs_exist_ok=True)
    *_, check, commit, away = summarize(card, Entry(State.DONE), [], 1, "9")
    assert away == "it discloses the host name vm"
    for line in (check, commit):
        words = {
            "python": shlex.quote(sys.executable),
            "git commit": f"git {shlex.join(who)} commit",
        }
        for word, in_place in words.items():
            line = line.replace(word, in_place)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(line, shell=True, cwd=clone, env=environment, check=True)
    listed = subprocess.run(
        ["git", "ls-files"], cwd=clone, capture_output=True, text=True, check=True
    )
    assert f"results/{card.folder.name}/records.csv" in listed.stdout


def test_rehearsals_are_small() -> None:
    assert rehearse(None).fraction < 0.01
    assert rehearse(0.5).fraction == 0.5


@pytest.mark.parametrize(
    ("stdout", "state", "words"),
    [
        ([Ending.FOUND, Ending.UNSUPPORTED], State.DONE, "(unsupported)"),
        ([Ending.FOUND, Ending.NO_WALL], State.DONE, "(no_wall)"),
        ([Ending.FOUND, Ending.GAVE_UP], State.FAILED, "(gave_up)"),
        ([Ending.FOUND, Ending.CROWDED], State.FAILED, "(crowded)"),
        ([Ending.FOUND, None], State.FAILED, "(None)"),
        ([], State.FAILED, ""),
        (None, State.FAILED, "error: no space left on device"),
    ],
)
def test_searches_are_done_when_each_has_its_answer(
    card: Card, stdout: list[Ending | None] | None, state: State, words: str
) -> None:
    """One wall that was found does not speak for the others; a full disk prints no answer."""
    numbers = {"precision": "fp32", "largest": 64, "smallest_failing": 72, "probes": 5}
    walls = None if stdout is None else [{**numbers, "ending": ending} for ending in stdout]
    printed = "" if walls is None else json.dumps(walls)
    ended = Ended(1, None, printed, "error: no space left on device")
    entry = PHASES["wall-limit"].run(card, FAKE, Answers(ended))
    assert entry.state is state
    assert words in entry.line
