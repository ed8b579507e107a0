"""The README and docs: every command in them runs, and what they list is what the code says.

Run with UPDATE_README=1 to write the generated parts anew.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest

import bench
from bench.__main__ import COMMANDS as PROGRAMS
from bench.advise.advisor import Advice
from bench.advise.findings import Findings, list_levers, strip
from bench.answers.explanation import CURES
from bench.answers.report_data import ReportData, gather
from bench.check.checks import CHECKS
from bench.report.__main__ import main as report
from bench.report.document import build
from bench.results.store.reader import read_config, read_records, read_rows
from bench.results.store.rows import keep_latest
from bench.results.store.table import TABLES
from bench.results.study.sweeps import read_sweep
from bench.schema.axis import Value
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.search.__main__ import print_findings
from bench.sweep import options
from tests.planted.records import ran, write_sweep
from tests.pytest_for_tests import Capture, Patch

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
CPU = "cpu-epyc-20261120"
ADVICE = ROOT / "results" / "advice-epyc-20261129"  # what bench.advise measured, and said
SEARCH = ROOT / "results" / "search-epyc-20261129"  # of the script of docs/own-script.md
SCRIPT = ROOT / "results" / "script-epyc-20261129"
COMPILED = ROOT / "results" / "nvidia-h200-20261129-223915"
H100 = "nvidia-h100-80gb-hbm3-20261122-112118"
CARD_BATCH = "batch_size=512"  # the example of docs/why.md
PICTURE, FIGURE = "Images per second by batch size, per precision", "images-per-s.png"


def load(name: str) -> ModuleType:
    """A script of `docs/`, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


published, reference = load("published"), load("reference")
CARD = published.H200  # with profiles


def write_source() -> str:
    """Say what the table above it is of."""
    card = published.find_card(ROOT / "results")
    images = "real CIFAR-10" if card.identity["dataset"] == "cifar10" else "synthetic images"
    folder = f"../results/{card.folder.name}"
    text = (
        f"Each row is of one epoch of DPN-92: on {card.identity['gpu']} with {images}, on "
        f"{card.started_at[:10]} ([report]({folder}/report.html), "
        f"[records]({folder}/records.csv)), and on a TITAN RTX, as published in 2019."
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


def write_picture() -> str:
    """Show the picture of the newest card, which is drawn if there is none."""
    card = published.find_card(ROOT / "results")
    if os.environ.get("UPDATE_README") and not (card.folder / FIGURE).is_file():
        with TemporaryDirectory() as scratch:
            report([str(card.folder), "-o", f"{scratch}/page", "--figures", scratch])
            shutil.copy(Path(scratch, FIGURE), card.folder)
    assert (card.folder / FIGURE).is_file()
    return f"\n![{PICTURE}](results/{card.folder.name}/{FIGURE})\n"


def ask(command: str, *flags: str, card: Path = CARD) -> Any:
    """What a command that reads results says of a card."""
    program = importlib.import_module(f"bench.{command}")
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"bench.{command}.__main__")
    with redirect_stdout(io.StringIO()) as output:
        assert program.main([str(card), *flags, "--format", "json"]) == 0
    return json.loads(output.getvalue())


def quote(sentences: list[str]) -> str:
    return f"\n{fill(' '.join(sentences), '> ')}\n"


def quote_report() -> str:
    (answer,) = ask("report", card=published.find_card(ROOT / "results").folder)["answers"]
    return quote(answer["sentences"])


def quote_first() -> str:
    """The sentence that a report begins with."""
    (answer,) = ask("report", card=published.find_card(ROOT / "results").folder)["answers"]
    return quote(answer["sentences"][:1])


def write_table() -> str:
    return f"\n{published.write_table(published.find_card(ROOT / 'results'))}"


def write_short_table() -> str:
    return f"\n{published.write_short_table(published.find_card(ROOT / 'results'))}"


def write_compiled() -> str:
    """What compiling did on a card of the same name, beside the same precision uncompiled."""
    rows = read_records(COMPILED)
    rows = rows[(rows["precision"] == "fp16-amp") & (rows["batch_size"] == 256)]
    off, on = (rows[rows["compile"] == mode] for mode in ("off", "default"))
    before, after = (kind["epoch_time_s"].median() for kind in (off, on))
    later = (on["setup_time_s"] + on["warmup_time_s"]).median()
    later -= (off["setup_time_s"] + off["warmup_time_s"]).median()
    assert len(on) == 1
    return (
        f"\n- `--compile` took fp16-amp from ≈{before:.1f} to ≈{after:.2f} s an epoch, and "
        f"{later:.0f} s longer to start ([one run](results/{COMPILED.name}/records.csv)).\n"
    )


def write_script(columns: int = 100) -> str:
    """The command that measured a script, and the first lines of what it said."""
    command = read_config(SCRIPT)["command"].replace(f"results/{SCRIPT.name}", "results/script")
    wide = patch.dict(os.environ, {"COLUMNS": str(columns)})
    with redirect_stdout(io.StringIO()) as printed, wide:
        assert report([str(SCRIPT)]) == 0
    printed_text = printed.getvalue().replace(SCRIPT.name, "script")
    answer, _, rest = printed_text.partition("\nNext: ")
    table = rest[rest.index("Time of ") :].partition("\n\n")[0]
    shown = f"{answer}\n…\n\n{table}"
    return f"\n```sh\n{command}\n```\n\n```text\n{shown}\n```\n"


def write_causes() -> str:
    """Every cause that `bench.why` may name, with what may fix it."""
    fixed = {
        cause: [f"`{cure}`" if "--" in cure else cure for cure in cures]
        for cause, cures in CURES.items()
    }
    return "\n" + "".join(
        f"- {c.meaning}{': ' if what else ''}{', '.join(what)}\n" for c, what in fixed.items()
    )


def quote_why() -> str:
    """Its words, and what it was measured on."""
    document = ask("why", "--where", CARD_BATCH, "--axis", "precision", "fp32", "fp16")
    (pair,) = document["explanations"]
    warnings = ", ".join(warning.partition(":")[0].lower() for warning in document["warnings"])
    source = f"[Measured](../results/{CARD.name}/records.csv): {' '.join(document['conditions'])}"
    source += f" Warnings: {warnings}." if warnings else ""
    return f"{quote(pair['sentences'])}\n{fill(source)}\n"


def write_advice() -> str:
    """What bench.advise says of the records of a search whose budget was used."""
    rows = keep_latest(row for row in read_rows(ADVICE) if row.is_repeat)
    config = read_config(ADVICE)
    now = strip(rows[0].case)
    given: dict[str, list[Value]] = {"model": [now.model]}
    images = config["datasets"]["cifar10"]["train_images"]
    findings = Findings(now, list_levers(now, given, images), given)
    for row in rows:
        findings.add(row.case, row)
    found = gather(ReportData, [read_sweep(ADVICE)])
    folder = Path("results") / ADVICE.name
    answer = Advice(findings, {}, folder, config["command"], True, found=found)
    return "\n".join(answer.write()) + "\n"


def test_the_advice_is_what_is_said_of_its_records() -> None:
    kept = ADVICE / "answer.txt"
    if os.environ.get("UPDATE_README"):
        kept.write_text(write_advice())
    assert kept.read_text() == write_advice(), "UPDATE_README=1 writes it anew"


def test_a_report_on_the_search_names_what_cannot_be_told_apart_as_it_does() -> None:
    """The search named a setting as the lightest that a report, for its warning, leaves out."""
    (sentence,) = (line for line in write_advice().splitlines() if "cannot be told apart" in line)
    (answer,) = build([read_sweep(ADVICE)]).answers
    assert sentence in answer.sentences


def quote_advice() -> str:
    """What bench.advise said, which the folder keeps, and what that was measured on."""
    rows = read_records(ADVICE)
    row = rows.iloc[0]
    answer = (ADVICE / "answer.txt").read_text().splitlines()
    source = (
        f"{len(rows)} runs in {find_minutes(rows)} minutes on {row['cpu']}, torch {row['torch']}, "
        f"CIFAR-10, {row['started_at'][:10]} ([records](../results/{ADVICE.name}/records.csv)); "
        f"times are of up to {100 * rows['fraction'].max():g} % of an epoch."
    )
    commands = ("  python -m", "Next: python -m")
    lines = [line for line in answer if not line.startswith(commands) and not line.endswith(":")]
    return f"{quote(lines)}\n{fill(source)}\n"


def quote_search() -> str:
    """The screen of bench.search over a script, but for the commands that confirm the best."""
    halving = read_sweep(SEARCH).halving
    assert halving is not None
    with redirect_stdout(io.StringIO()) as screen, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        print_findings(SEARCH, halving, "text")
    answered, _, _ = screen.getvalue().partition("Confirm the best")
    lines = "\n".join(line.rstrip() for line in answered.strip().splitlines())
    return f"\n```text\n{lines}\n```\n"


def write_modules(folder: Path) -> None:
    """The files that the pages tell a reader to save."""
    pages = "".join((DOCS / f"own-{what}.md").read_text() for what in ("model", "training"))
    files = re.findall(r"```python\n(.*?)```", pages, re.DOTALL)
    for name, text in zip(("mynet.py", "mywork.py", "mysteps.py"), files, strict=True):
        (folder / name).write_text(text)


def write_screen(command: str, end: str = "\0", more: Sequence[str] = ()) -> str:
    """A command with the first of what it prints on a CPU, with more flags than the page has."""
    name, *words = shlex.split(command.removeprefix("python -m bench."))
    program = importlib.import_module(f"bench.{name}.__main__")
    with (
        redirect_stdout(io.StringIO()) as printed,
        TemporaryDirectory() as scratch,
        pytest.MonkeyPatch.context() as patch,
    ):
        write_modules(Path(scratch))
        patch.syspath_prepend(scratch)
        patch.setenv("COLUMNS", "80")
        patch.setattr(options, "has_cuda", lambda: False)
        patch.chdir(ROOT)
        assert program.main([*words, *more]) == 0
    shown, cut, _ = printed.getvalue().partition(end)
    shown = shown.rstrip() + "\n\n…" * bool(cut)
    return f"\n```sh\n{command}\n```\n\n```text\n{shown}\n```\n"


COMPARE = f"python -m bench.compare results/{CPU} --axis precision fp32 bf16-amp"
VALIDATE = f"python -m bench.validate results/{WHY_SWEEP}"
REPORT = f"python -m bench.report results/{CARD.name} --where batch_size=256"
CARDS = f"python -m bench.cards results/{CARD.name} results/{H100}"
PLAN = (
    "python -m bench.sweep --preset quick --precision fp32 bf16-amp --batch-size 32 64 "
    "--repeats 3 --dry-run"
)
PROCESSES = (
    "python -m bench.sweep --preset quick --precision fp32 bf16-amp --batch-size 256 "
    "--parallel none ddp --world-size 2 --dry-run"
)
NETWORKS = (
    "python -m bench.sweep --model mynet:build 'mynet:build(width=64)' --precision fp32 bf16-amp "
    "--batch-size 128 --repeats 3 --dry-run"
)
WORK = (
    "python -m bench.sweep --workload mywork:majority --precision fp32 bf16-amp --batch-size 200 "
    "--fraction 1 --repeats 3 --dry-run"
)
ON_CPU = ("--device", "cpu", "--dataset", "synthetic", "--budget", "10m")
CHECK = "python -m bench.check --model mynet:build --precision fp32"


def write_python() -> str:
    """What the code that docs/python.md begins with prints: the sweep it asks for was measured."""
    command = shlex.split(read_config(SCRIPT)["command"])
    code, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.DOTALL)

    def find(out: str, **settings: Any) -> bench.Sweep:
        given = [v for values in settings.values() for v in np.atleast_1d(values)]
        assert out == "results/script"
        assert {*map(str, given)} <= {*command}
        return bench.read(SCRIPT)

    with redirect_stdout(io.StringIO()) as printed, patch.object(bench, "sweep", find):
        exec(code, {})
    answer, *table = (line.rstrip() for line in printed.getvalue().splitlines())
    return quote([answer]) + "\n```text\n" + "\n".join(table) + "\n```\n"


def find_minutes(rows: pd.DataFrame) -> int:
    """The time from the first run's start to the last one's end."""
    began, ended = (pd.to_datetime(rows[name]) for name in ("started_at", "finished_at"))
    return math.ceil((ended.max() - began.min()).total_seconds() / 60)


PARTS = {
    "script": (README, write_script),
    "answer": (README, quote_first),
    "table": (README, write_short_table),
    "compiled": (README, write_compiled),
    "picture": (README, write_picture),
    "all": (DOCS / "published.md", write_table),
    "source": (DOCS / "published.md", write_source),
    "whole": (DOCS / "published.md", quote_report),
    "advice": (DOCS / "advise.md", quote_advice),
    "causes": (DOCS / "why.md", write_causes),
    "why": (DOCS / "why.md", quote_why),
    "own-script": (DOCS / "own-script.md", partial(write_script, 80)),
    "compare": (
        DOCS / "results.md",
        partial(write_screen, COMPARE, "\n\nPeak memory"),
    ),
    "report": (
        DOCS / "results.md",
        partial(write_screen, REPORT, "\n\nNext"),
    ),
    "plan": (DOCS / "sweep.md", partial(write_screen, PLAN)),
    "processes": (DOCS / "gpus.md", partial(write_screen, PROCESSES)),
    "networks": (DOCS / "own-model.md", partial(write_screen, NETWORKS)),
    "work": (DOCS / "own-training.md", partial(write_screen, WORK)),
    "checks": (DOCS / "learning.md", partial(write_screen, CHECK, more=ON_CPU)),
    "python": (DOCS / "python.md", write_python),
    "validate": (DOCS / "card.md", partial(write_screen, VALIDATE)),
    "cards": (DOCS / "card.md", partial(write_screen, CARDS, "\n\n 2. ")),
    "search": (DOCS / "own-script.md", quote_search),
    "axes": (DOCS / "settings.md", reference.write_axes),
    "values": (DOCS / "settings.md", reference.write_values),
    "warnings": (DOCS / "warnings.md", reference.write_warnings),
    "statuses": (DOCS / "warnings.md", reference.write_statuses),
    "commands": (DOCS / "commands.md", reference.write_commands),
    "quantities": (DOCS / "columns.md", reference.write_quantities),
    **{table: (DOCS / "columns.md", partial(reference.write_columns, table)) for table in TABLES},
    "learning": (DOCS / "published.md", lambda: f"\n{published.write_learning()}"),
}
"""The parts that follow from the code and the published records, and the page each is in."""


def hide_figures(text: str) -> str:
    return re.sub(r"[\d.]+(e-\d+)?|  +", "#", text)


@pytest.mark.parametrize(
    "mark", [pytest.param(mark, marks=[pytest.mark.slow] * (mark == "checks")) for mark in PARTS]
)
def test_generated_parts_are_current(mark: str) -> None:
    """Of what is measured meanwhile all but the figures, which alone are no reason to write it."""
    page, write = PARTS[mark]
    text, part = page.read_text(), write()
    pattern = re.compile(f"(<!-- {mark} -->)(.*?)(<!-- /{mark} -->)", re.DOTALL)
    found = pattern.search(text)
    assert found, f"{page.name} has no place for {mark}"
    same = hide_figures if mark == "checks" else str
    current = same(found[2]) == same(part)
    if os.environ.get("UPDATE_README") and not current:
        page.write_text(pattern.sub(lambda m: m[1] + part + m[3], text))
        return
    assert current, "run the tests with UPDATE_README=1"


def test_a_page_is_not_written_for_figures_that_are_measured_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setenv("UPDATE_README", "1")
    for part, written in (("9 of 9, in 4 s", "9 of 9, in 3 s"), ("none", "none")):
        page.write_text("<!-- checks -->9 of 9, in 3 s<!-- /checks -->")
        monkeypatch.setitem(PARTS, "checks", (page, lambda part=part: part))
        test_generated_parts_are_current("checks")
        assert page.read_text() == f"<!-- checks -->{written}<!-- /checks -->"


def test_pictures_of_published_figures_are_current(tmp_path: Path) -> None:
    if os.environ.get("UPDATE_README"):
        published.write_pictures(DOCS)
    for file in published.write_pictures(tmp_path):
        assert file.read_text() == (DOCS / file.name).read_text(), "run docs/published.py"


def test_a_sweep_installs_no_more_than_it_needs(tmp_path: Path) -> None:
    """And what tests need comes on top, in the same environment."""
    installs = []
    for target in ("sweep", "suite"):
        command = ["make", "--dry-run", f"VENV={tmp_path / 'venv'}", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        installs.append(re.findall(r"pip install .* (-e .*)", done.stdout))
    assert installs == [["-e ."], ["-e .", "-e '.[test,asv]'"]]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's files in it, and no results but ours. Without images in data/
    the fake invents some too; to decode the real ones took 13 s of a core."""
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
    write_modules(folder)
    kept = [("results", name) for name in (WHY_SWEEP, CPU, CARD.name, H100, "reference")]
    for place, name in (*kept, (FEW, "reference")):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / name).symlink_to(ROOT / "results" / name)
    for name in ("before", "after"):
        write_sweep(folder / "results" / name, ran(Case(), (20.0, 20.1, 19.9)))
    return folder


FEW = "few/results"  # all results that bench.cards finds, which would be those of the others

LINEAR = "your_package.your_module:factory"  # one layer, see `checkout`

# What stands in for the hours a command would take, or for what a test must not do; any other
# command runs as it is written.
STAND_INS = {
    "make sweep": "make -o .venv/sweep sweep BIN=python ARGS=--dry-run",
    "make card": "make -o .venv/ready --dry-run card",
    # the folder is the one that make sweep creates
    ". .venv/bin/activate": "grep '^VENV .*= .venv$' Makefile",
    "make test": "make -o .venv/ready --dry-run test",
    "pip install": "pip install --dry-run --no-deps --no-build-isolation -e .",
    # a cluster outlives the command that starts it; tests/workers/executors/test_ray.py has some
    "RAY_worker_niceness=0": "python -m ray.scripts.scripts start --help",
    "ray status": "python -m ray.scripts.scripts status --help",
}


def put_flags(command: str, flags: str) -> str:
    """A command with some flags in place of its own."""
    program, *given = re.split(r" (?=--)", command, maxsplit=1)
    words = shlex.split(" ".join(given))
    return f"{program} {shlex.join(join_flags(words, shlex.split(flags)))}"


def stand_in(command: str) -> str:
    command = re.sub(r"^precision-bench (\w+)", r"python -m bench.\1", command)
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
        # a few steps of one linear layer; tests/commands/test_scales.py maps in earnest
        small = f"--device cpu --model {LINEAR} --dataset synthetic --batch-size 4 --steps 1"
        out = "" if "--out" in command else " --out results/scales"
        return put_flags(command, f"{small} --scales 1 128{out}")
    if "bench.check" in command:
        # one check of one linear layer; commands/test_check.py has all, of real networks
        skipped = " ".join(CHECKS.keys() - {"averaging"})
        small = f"--model {LINEAR} --precision fp32 --device cpu --dataset synthetic"
        return put_flags(command, f"{small} --skip {skipped}")
    if "benchmarks.overhead" in command:
        return "python -m benchmarks.overhead --help"  # tests/commands/test_asv.py measures one
    if "bench.doctor" in command:
        return f"{command} || test $? = 1"  # the doctor may rightly find this machine busy
    return command


Run = Callable[[str], str]


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """What commands that have run have printed: several pages have some, or stand in for them."""
    return {}


@pytest.fixture
def run(checkout: Path, printed: dict[str, str], monkeypatch: Patch, capfd: Capture) -> Run:
    """Run a command once, and before it those that make what it reads; what it printed.

    What begins with ``python -m`` is run within this process, which has imported what it needs.
    """
    monkeypatch.setenv("BENCH_FAKE_MEMORY", "fixed=300MiB image=4MiB low=0.6")
    monkeypatch.syspath_prepend(checkout)
    monkeypatch.setattr("bench.base.processes.leave", sys.exit)

    def run(command: str) -> str:
        line = stand_in(command)
        if line in printed:
            return printed[line]
        for earlier in COMMANDS[: COMMANDS.index(command)]:
            if {*re.findall(r"--out (\S+)", earlier)} & {*command.split()}:
                run(earlier)
        all_cards = re.match(r"python -m bench.cards(?! results)", command)
        monkeypatch.chdir(checkout / Path(FEW).parent if all_cards else checkout)
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
        return printed.setdefault(line, out)

    return run


LONG = re.compile(r"bench\.(check|doctor|scales)|^pip|^RAY| html ")
"""Commands that take three seconds of a core or more."""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # what this process has imported
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if LONG.search(c) else []) for c in COMMANDS],
)
def test_commands_run(command: str, run: Run) -> None:
    if command.startswith("asv ") or command == "make publish":
        return  # these need a history of commits, which tests/commands/test_asv_site.py makes
    if re.search("bench.export .* (wandb|mlflow)", command):
        return  # these take seconds to be imported: commands/test_export.py gives them records
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
    assert {case.device for case in plan.all_cases} == {"cuda"}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for target in targets:
        assert (page.parent / target).exists(), target


def test_the_first_screen_has_what_a_reader_wants_first() -> None:
    """The reader's own script with an answer, an own network, and a table with its baseline."""
    screen = "\n".join(README.read_text().splitlines()[:60])
    wanted = [
        "pip install",
        "--command",
        "```text",
        "--model your_package",
        "<!-- answer -->",
        "| precision |",
    ]
    places = [screen.find(text) for text in wanted]
    assert -1 not in places
    assert places == sorted(places)
    assert "IEEE fp32" in screen


def test_the_front_page_is_read_in_two_minutes() -> None:
    words = [word for word in README.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= 700


def test_every_page_is_linked_and_every_command_is_on_one() -> None:
    index = (DOCS / "index.md").read_text()
    pages = [page.name for page in DOCS.glob("*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in index] == []
    assert "(docs/index.md)" in README.read_text()
    text = "".join(page.read_text() for page in PAGES)
    names = [name for names in PROGRAMS.values() for name in names]
    missing = [name for name in names if f"python -m bench.{name}" not in text]
    assert missing == [], "describe it in README.md or on a page of docs/"
