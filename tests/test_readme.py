"""The README and docs: every command in them runs, and what they list is what the code says.

Run with UPDATE_README=1 to write the generated parts anew.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from pytest_for_tests import Capture, Patch

from bench.__main__ import COMMANDS as PROGRAMS
from bench.axis import axis_flag
from bench.card import STATE
from bench.case import AXES, Case, format_value
from bench.diagnosis.explanation import CURES
from bench.flags import join_flags
from bench.precision import PRECISIONS
from bench.record import Record, Status
from bench.report.__main__ import main as report
from bench.store.cells import RECORDS
from bench.store.reader import read_records
from bench.sweep import options
from bench.sweep.__main__ import main as sweep
from tests.planted.records import make_run, write_sweep

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
COMMANDS = list(
    dict.fromkeys(
        line.partition("#")[0].strip()
        for page in PAGES
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.partition("#")[0].strip()
    )
)
WHY_SWEEP = "cpu-profiles-20261122"  # with profiles; what the commands of docs/why.md read
ADVICE = ROOT / "results" / "advice-epyc-20261124"  # what bench.advise measured, and said
CARD_BATCH = "batch_size=512"  # the example of docs/why.md
PICTURE, FIGURE = "Images per second by batch size, per precision", "images-per-s.png"
PUBLISHED_PICTURE = "Published images per second, by precision, on a TITAN RTX and on an H200"


def load_published() -> ModuleType:
    """`docs/published.py`, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("published", DOCS / "published.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


published = load_published()
Card = published.Card
CARD = published.H200  # with profiles


def write_axes() -> str:
    defaults = {name: format_value(getattr(Case, name)) or "–" for name in AXES}
    return "\n" + "".join(
        f"- `{axis_flag(name)}` ({defaults[name]}): {axis.help}\n" for name, axis in AXES.items()
    )


def write_statuses() -> str:
    return "\n" + "".join(f"- `{s}`: {s.meaning}\n" for s in Status)


def write_source(card: Card | None) -> str:
    """Say what the table is of."""
    if card is None:
        text = (
            "For example, one epoch of DPN-92 on CIFAR-10: on a TITAN RTX (24 GB) in 2019, fp16 "
            "allowed a batch size that fp32 had no memory for; on an H200, TF32, bf16 and fp16, "
            "the last also with torch.compile, are 2.0 to 5.4 times as fast as fp32. These figures "
            "were published, and not measured by this harness; "
            "[docs/published.md](docs/published.md) has all of them. No GPU sweep is published "
            "here yet."
        )
    else:
        images = "real CIFAR-10" if card.identity["dataset"] == "cifar10" else "synthetic images"
        folder = f"results/{card.folder.name}"
        text = (
            f"One epoch of DPN-92, measured on {card.identity['gpu']}, with "
            f"{images}, on {card.started_at[:10]} ([report]({folder}/report.html), "
            f"[records]({folder}/records.csv)), above the figures of a TITAN RTX from 2019:"
        )
    return f"\n{fill(text)}\n"


def fill(text: str, indent: str = "") -> str:
    """Break it into lines, but not within a link or between a number and its percent sign."""
    lines = textwrap.wrap(
        text.replace(" %", "\N{NO-BREAK SPACE}%"),
        120,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def write_picture(card: Card | None) -> str:
    if card is None:
        light, dark = (f"docs/published-{theme}.svg" for theme in published.THEMES)
        return (
            "\n<picture>\n"
            f'  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
            f'  <img alt="{PUBLISHED_PICTURE}" src="{light}">\n'
            "</picture>\n"
        )
    if not (card.folder / FIGURE).is_file():
        return "\n"
    return f"\n![{PICTURE}](results/{card.folder.name}/{FIGURE})\n"


def ask(command: str, *flags: str, card: Path = CARD) -> Any:
    """What a command that reads results says of a card."""
    program = importlib.import_module(f"bench.{command}")
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"bench.{command}.__main__")
    with redirect_stdout(io.StringIO()) as said:
        assert program.main([str(card), *flags, "--format", "json"]) == 0
    return json.loads(said.getvalue())


def quote(sentences: list[str]) -> str:
    return f"\n{fill(' '.join(sentences), '> ')}\n"


def quote_report(card: Card | None) -> str:
    if card is None:
        return "\n"
    (answer,) = ask("report", card=card.folder)["answers"]
    return quote(answer["sentences"])


MEASURED = {
    "answer": quote_report,
    "source": write_source,
    "table": lambda card: f"\n{published.write_table(published.choose_sources(card))}",
    "picture": write_picture,
}
"""The parts that follow from the chosen sweep, by their marks."""


def write_causes() -> str:
    """Every cause that `bench.why` may name, with what may mend it."""
    mended = {
        cause: [cure if isinstance(cure, str) else f"`{cure.flag}`" for cure in cures]
        for cause, cures in CURES.items()
    }
    return "\n" + "".join(
        f"- {c.meaning}{': ' if what else ''}{', '.join(what)}\n" for c, what in mended.items()
    )


def quote_why() -> str:
    """Its words, and what it was measured on."""
    said = ask("why", "--where", CARD_BATCH, "--from", "fp32", "--to", "fp16")
    (pair,) = said["explanations"]
    doubts = ", ".join(doubt.partition(":")[0].lower() for doubt in said["doubts"])
    source = f"[Measured](../results/{CARD.name}/records.csv): {' '.join(said['conditions'])}"
    source += f" Doubts: {doubts}." if doubts else ""
    return f"\n{fill(source)}\n{quote(pair['words'])}"


def quote_advice() -> str:
    """What bench.advise said, which the folder keeps, and what that was measured on."""
    rows = read_records(ADVICE)
    row = rows.iloc[0]
    said = (ADVICE / "answer.txt").read_text().splitlines()
    source = (
        f"{len(rows)} runs in {find_minutes(rows)} minutes on {row['cpu']}, torch {row['torch']}, "
        f"CIFAR-10, {row['started_at'][:10]} ([records](results/{ADVICE.name}/records.csv)); times "
        f"are of up to {100 * rows['fraction'].max():g} % of an epoch."
    )
    lines = [line for line in said if not line.startswith("Next: ")]
    return f"{quote(lines)}\n{fill(source)}\n"


def find_minutes(rows: pd.DataFrame) -> int:
    """The time from the first run's start to the last one's end."""
    began, ended = (pd.to_datetime(rows[name]) for name in ("started_at", "finished_at"))
    return math.ceil((ended.max() - began.min()).total_seconds() / 60)


PARTS = {
    "advice": (README, quote_advice),
    "causes": (DOCS / "why.md", write_causes),
    "why": (DOCS / "why.md", quote_why),
    "axes": (DOCS / "sweep.md", write_axes),
    "statuses": (DOCS / "sweep.md", write_statuses),
    "learning": (DOCS / "published.md", lambda: f"\n{published.write_learning()}"),
}
"""The parts that follow from the code and the published records, and the page each is in."""


@pytest.mark.parametrize("mark", PARTS)
def test_generated_parts_are_current(mark: str) -> None:
    page, write = PARTS[mark]
    check_part(page, mark, write())


def test_the_advice_that_is_shown_is_that_of_its_rows() -> None:
    """The gain that it names, by the measurements of both settings, or what only looked."""
    rows = read_records(ADVICE)
    said = (ADVICE / "answer.txt").read_text()
    found = re.match(r"Stay with (.*?): the best .*? measured, (.*), has (\S+)× the speed", said)
    assert found, said
    times = []
    for name in found.groups()[:2]:
        size, *more = name.removeprefix("fp32, batch size ").split(", ")
        mine = rows[
            (rows["batch_size"] == int(size))
            & (rows["compile"] == ("default" if "compiled" in more else "off"))
            & (rows["channels_last"] == ("channels-last" in more))
        ]
        fine = mine[mine["until"] == "0.01"]
        times.append(math.exp((mine if fine.empty else fine)["epoch_time_s"].map(math.log).mean()))
    assert times[0] / times[1] == pytest.approx(float(found[3]), abs=0.006)


@pytest.mark.parametrize("mark", MEASURED)
def test_measured_parts_are_current(mark: str, tmp_path: Path) -> None:
    """Of the newest card; its picture is drawn if there is none."""
    card = published.find_card(ROOT / "results")
    if os.environ.get("UPDATE_README") and card and not (card.folder / FIGURE).is_file():
        report([str(card.folder), "-o", str(tmp_path / "page"), "--figures", str(tmp_path)])
        shutil.copy(tmp_path / FIGURE, card.folder)
    check_part(README, mark, MEASURED[mark](card))


def test_only_a_whole_table_of_a_real_card_is_shown(tmp_path: Path) -> None:
    def make(name: str, started: str, gpu: str | None = "NVIDIA H200", done: bool = True) -> Card:
        card = Card(tmp_path / name, {"gpu": gpu}, started)
        card.folder.mkdir()
        phases = {"rtx-titan": {"state": "done" if done else "cut"}}
        state = {"identity": card.identity, "started_at": started, "phases": phases}
        (card.folder / STATE).write_text(json.dumps(state))
        (card.folder / RECORDS).touch()
        return card

    assert published.find_card(tmp_path) is None
    make("rehearsed", "2026-11-24", gpu=None)
    make("half", "2026-11-23", done=False)
    assert published.find_card(tmp_path) is None
    old = make("old", "2026-11-21")
    newest = make("new", "2026-11-22")
    assert published.find_card(tmp_path) == newest
    (newest.folder / RECORDS).unlink()
    assert published.find_card(tmp_path) == old


def test_pictures_of_published_figures_are_current(tmp_path: Path) -> None:
    if os.environ.get("UPDATE_README"):
        published.write_pictures(DOCS)
    for file in published.write_pictures(tmp_path):
        assert file.read_text() == (DOCS / file.name).read_text(), "run docs/published.py"


def test_published_figures_are_those_of_the_records() -> None:
    """The page of 2019 and the H200, by hand: 203.831 s / 148.745 s, 36.81 s / 6.79 s."""
    table = published.write_table()
    assert "| TITAN RTX, 2019 | 256 | fp16 | 148.7 s | 336 | 1.37× | – | 13.0 GiB |" in table
    assert "| TITAN RTX, 2019 | 512 | fp32 | out of memory | – | – | – | – |" in table
    assert "| fp16 + torch.compile | ≈6.8 s | ≈7,363 | ≈5.42× | ≈2.72× |" in table
    said = write_source(None)
    ratios = [
        bar.speedup
        for bar in published.read_bars(published.SOURCES[1])
        if bar.speedup is not None and not bar.base
    ]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in " ".join(said.split())


def test_a_card_s_table_is_of_whole_epochs_with_their_accuracy(tmp_path: Path) -> None:
    """Of the cases that have any; the others stay estimates. Another recipe is none of them."""
    recipe = {"batch_size": 256, "optimizer": "adamw", "lr": 3e-4}
    part, whole = {"fraction": 0.2, "profile": True}, {"fraction": 1.0, "evaluate": True}

    def make(precision: str, time_s: float, accuracy: float | None = None, **axes: Any) -> Record:
        scale = PRECISIONS[precision].default_loss_scale
        case = Case(precision=precision, loss_scale=scale, device="cuda", **{**recipe, **axes})
        timed = {"epoch_time_s": time_s, "images_per_s": 50_000 / time_s}
        known = {"gpu": "NVIDIA H200", "torch": "2.11", "cudnn": "91900"}
        return make_run(case, **known, **timed, test_accuracy=accuracy)

    rows = [make("fp32", 44.0, **part), make("fp16", 13.0, **part), make("tf32", 22.0, **part)]
    rows += [make("fp16", 14.0, **part, optimizer="sgd", lr=0.01)]
    rows += [make("fp16", 10.0, **part, compile="default", cudnn_benchmark=True)]
    rows += [make("fp32", 25.0, **part, compile="default")]
    card = Card(tmp_path, {"gpu": "NVIDIA H200"}, "2026-11-21T12:00:00")
    write_sweep(tmp_path, rows)
    assert "accuracy" not in published.write_table(published.choose_sources(card))
    write_sweep(
        tmp_path, [make("fp32", 40.0, 0.4512, **whole), make("fp16", 16.0, 0.4498, **whole)]
    )
    table = published.write_table(published.choose_sources(card)).splitlines()
    assert table[0].endswith("| memory | test accuracy after it |")
    assert [line for line in table if line.startswith("| H200")] == [
        "| H200, 2026 | 256 | fp32 | 40.0 s | 1,250 | – | – | – | 45.1 % |",
        "| H200, 2026 | 256 | fp32 + torch.compile | ≈25.0 s | ≈2,000 | ≈1.60× | ≈0.88× | – | – |",
        "| H200, 2026 | 256 | tf32 | ≈22.0 s | ≈2,273 | ≈1.82× | – | – | – |",
        "| H200, 2026 | 256 | fp16 | 16.0 s | 3,125 | 2.50× | ≈1.38× | – | 45.0 % |",
        "| H200, 2026 | 256 | fp16 + autotuned + torch.compile | ≈10.0 s | ≈5,000 | ≈4.00× "
        "| ≈2.20× | – | – |",
    ]
    assert "whole epochs, ≈ estimated from 20 % of an epoch, after warm-up" in table[-2]
    assert "; adamw at lr 0.0003; memory" in table[-2]
    assert all(line.endswith("| – |") for line in table if line.startswith("| TITAN"))


def check_part(page: Path, mark: str, part: str) -> None:
    """Hold a part of a page against what it should be, or write it anew."""
    text = page.read_text()
    pattern = re.compile(f"(<!-- {mark} -->)(.*?)(<!-- /{mark} -->)", re.DOTALL)
    found = pattern.search(text)
    assert found, f"{page.name} has no place for {mark}"
    if os.environ.get("UPDATE_README"):
        page.write_text(pattern.sub(lambda m: m[1] + part + m[3], text))
        return
    assert found[2] == part, "run the tests with UPDATE_README=1"


def test_the_parts_of_a_card_name_its_folder(tmp_path: Path) -> None:
    identity = {"gpu": "NVIDIA H200", "dataset": "cifar10"}
    card = Card(tmp_path / "nvidia-h200", identity, "2026-11-21T12:00:00")
    assert "NVIDIA H200, with real CIFAR-10, on 2026-11-21" in write_source(card)
    assert "](results/nvidia-h200/records.csv)" in write_source(card)
    assert write_picture(card) == "\n", "no link to a picture that is not there"
    card.folder.mkdir()
    (card.folder / FIGURE).touch()
    assert write_picture(card) == f"\n![{PICTURE}](results/nvidia-h200/{FIGURE})\n"
    assert "published" not in write_source(card) + write_picture(card)
    assert "not measured by this harness" in " ".join(write_source(None).split())
    assert "docs/published-dark.svg" in write_picture(None)


def test_a_sweep_installs_no_more_than_it_needs(tmp_path: Path) -> None:
    """And what tests need comes on top, in the same environment."""
    installs = []
    for target in ("sweep", "suite"):
        command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        installs.append(re.findall(r"pip install .* (-e .*)", done.stdout))
    assert installs == [["-e ."], ["-e .", "-e '.[test,asv]'"]]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, cifar10: Path) -> Path:
    """A folder with the repository's files in it, real images in data/, and no results but ours."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("bench", "examples", "tests", "Makefile", "pyproject.toml", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    # what the pages call a network of the reader's own
    (folder / "your_package").mkdir()
    (folder / "your_package" / "your_module.py").write_text(
        "from torch import nn\n"
        "def factory(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))\n"
    )
    files = re.findall(r"```python\n(.*?)```", (DOCS / "own-model.md").read_text(), re.DOTALL)
    for name, text in zip(("mynet.py", "mywork.py", "mysteps.py"), files, strict=True):
        (folder / name).write_text(text)
    for place, name in (("results", WHY_SWEEP), ("results", "reference"), (FEW, "reference")):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / name).symlink_to(ROOT / "results" / name)
    (folder / "data").symlink_to(cifar10)
    before = folder / "results" / "before"
    flags = ("--preset", "quick", "--executor", "fake", "--repeats", "3")
    assert sweep([*flags, "--out", str(before)]) == 0
    scatter_times(before / "records.csv")
    shutil.copytree(before, before.with_name("after"))
    return folder


def scatter_times(records: Path) -> None:
    """Give the fake's equal repeats a spread of 0.1 %, without which none could be judged."""
    with records.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["epoch_time_s"] = str(float(row["epoch_time_s"]) * (1 + int(row["repeat"]) / 1000))
    with records.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


FEW = "few/results"  # all results that bench.cards finds, which would be those of the others

LINEAR = "your_package.your_module:factory"  # one layer, see `checkout`

# What stands in for the hours a command would take, or for what a test must not do; any other
# command runs as it is written.
STAND_INS = {
    "make sweep": (
        "make -o .venv/sweep sweep BIN=python "
        f"ARGS='--preset quick --model {LINEAR} --precision fp32 --batch-size 64 --fraction 0.001 "
        "--repeats 1 --out results/one'"
    ),
    # tests/test_card.py rehearses it for real
    "make card": "make -o .venv/ready --dry-run card",
    # the folder is the one that make sweep creates
    ". .venv/bin/activate": "grep '^VENV .*= .venv$' Makefile",
    "make test": "make -o .venv/ready --dry-run test",
    "pip install": "pip install --dry-run --no-deps --no-build-isolation -e .",
    # a cluster outlives the command that starts it; tests/test_cluster.py has some
    "RAY_worker_niceness=0": "python -m ray.scripts.scripts start --help",
    "ray status": "python -m ray.scripts.scripts status --help",
}


def put_flags(command: str, flags: str) -> str:
    """A command with some flags in place of its own."""
    program, *given = re.split(r" (?=--)", command, maxsplit=1)
    words = shlex.split(" ".join(given))
    return f"{program} {shlex.join(join_flags(words, shlex.split(flags)))}"


def stand_in(command: str) -> str:
    for start, other in STAND_INS.items():
        if command.startswith(start):
            return other
    if "--executor ray" in command:
        command = re.sub(r" --executor ray| --address \S+", "", command)
        command = command.replace("--device cuda", "--device cpu")
    if ("bench.sweep" in command and "--list" not in command) or re.search(
        r"bench\.(advise|fit|search)", command
    ):
        return f"{command.replace('python -m', 'python -m with_fake', 1)} --executor fake"
    if "bench.why" in command:  # the fake profiles nothing
        return re.sub(r"results/\w+", shlex.quote(str(ROOT / "results" / WHY_SWEEP)), command)
    if "bench.scales" in command and "--show" not in command:
        # a few steps of one linear layer; tests/test_scales.py maps in earnest
        small = f"--device cpu --model {LINEAR} --dataset synthetic --batch-size 4 --at 1 --train"
        out = "" if "--out" in command else " --out results/scales"
        return put_flags(command, f"{small} --scales 1 128{out}")
    if "bench.check" in command:
        slow = "initial-loss overfit first-steps baseline seed activations memory graphs evaluation"
        # one linear layer; tests/test_check.py checks networks that are worth it
        small = "" if "--workload" in command else f"--model {LINEAR} "
        # and there is nothing to download from
        small += f"--precision fp32 --skip {slow} --device cpu --data-dir none"
        small += " --data-url http://127.0.0.1:9"
        return put_flags(command, f"{small} --out results/checked")
    if "benchmarks.overhead" in command:
        return "python -m benchmarks.overhead --help"  # tests/test_asv.py measures one
    if "bench.doctor" in command:
        return f"{command} || test $? = 1"  # the doctor may rightly find this machine busy
    return command


Run = Callable[[str], str]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What commands that have run have printed: several pages have some, or stand in for them."""
    return {}


@pytest.fixture
def run(checkout: Path, said: dict[str, str], monkeypatch: Patch, capfd: Capture) -> Run:
    """Run a command once, and before it those that make what it reads; what it printed.

    What begins with ``python -m`` is run within this process, which has imported what it needs.
    """
    monkeypatch.setenv("BENCH_FAKE_MEMORY", "fixed=300MiB image=4MiB low=0.6")
    monkeypatch.syspath_prepend(checkout)
    monkeypatch.setattr("bench.processes.leave", sys.exit)

    def run(command: str) -> str:
        line = stand_in(command)
        if line in said:
            return said[line]
        for earlier in COMMANDS[: COMMANDS.index(command)]:
            if {*re.findall(r"--out (\S+)", earlier)} & {*command.split()}:
                run(earlier)
        monkeypatch.chdir(checkout / Path(FEW).parent if "bench.cards" in command else checkout)
        capfd.readouterr()
        words = shlex.split(line)
        if words[:2] == ["python", "-m"] and not set("|>&;$") & set(line):
            monkeypatch.setattr(sys, "argv", words[2:])
            with pytest.raises(SystemExit) as end:
                runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            code = end.value.code or 0
        else:
            python = shlex.quote(sys.executable)
            typed = re.sub("^pip ", "python -m pip ", line)
            typed = re.sub("^python |(?<=BIN=)python ", f"{python} ", typed)
            code = subprocess.call(typed, shell=True)
        out, err = capfd.readouterr()
        assert code == 0, err
        return said.setdefault(line, out)

    return run


LONG = re.compile(r"bench\.check\b")
"""Commands that take seven seconds of a core or more."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # what this process has imported
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if LONG.search(c) else []) for c in COMMANDS],
)
def test_commands_run(command: str, run: Run) -> None:
    if command.startswith("asv ") or command == "make publish":
        # these need a history of commits, which is made and run there
        name = "bench.publish" if command == "make publish" else f'"{command.split()[1]}"'
        assert name in (ROOT / "tests" / "test_asv_site.py").read_text()
        return
    if "bench.export" in command:  # each tracker is imported there, which takes it seconds
        assert "python -m bench.export " in (ROOT / "tests" / "test_export.py").read_text()
        return
    printed = run(command)
    assert printed or {"-o", "--figures", ">"} & set(command.split())
    if "ray start" in command:
        assert all(flag in printed for flag in re.findall("--[a-z]+", command))


SWEEPS = [c for c in COMMANDS if re.match(r"python -m bench.sweep (?!.*--(device|config|list))", c)]


@pytest.mark.parametrize("command", SWEEPS)
def test_sweeps_are_planned_on_a_gpu_too(command: str, monkeypatch: Patch) -> None:
    """There the default preset is another one, and its settings must go with the flags."""
    monkeypatch.setattr(options, "has_cuda", lambda: True)
    monkeypatch.chdir(ROOT)
    plan = options.plan_cases(options.parse_arguments(shlex.split(command)[3:]), {})
    assert {case.device for case in [*plan.cases, *plan.unsized]} == {"cuda"}


def test_there_are_commands_to_test() -> None:
    assert {"make sweep", "make test"} < set(COMMANDS)
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        assert (page.parent / target).exists(), target


def test_every_page_is_linked_from_the_readme() -> None:
    text = README.read_text()
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


def test_the_first_screen_has_what_a_reader_wants_first() -> None:
    """One command, the reader's own network with an answer, and a table with its baseline."""
    screen = "\n".join(README.read_text().splitlines()[:40])
    wanted = ["make sweep", "--model your_package", "<!-- answer -->", "| GPU |"]
    places = [screen.find(text) for text in wanted]
    assert -1 not in places
    assert places == sorted(places)
    assert "IEEE fp32" in screen


def test_every_command_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    names = [name for names in PROGRAMS.values() for name in names]
    assert [name for name in names if f"python -m bench.{name}" not in text] == []
