"""asv for real: two commits run, compared and published, and the site read in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.planted.records import ROOT

pytest.importorskip("asv", reason="asv is not installed (the 'asv' extra)")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
GRID = """
[[grid]]
model = "dpn-small"
dataset = "synthetic"
precision = ["fp32", "bf16-amp"]
batch_size = [64, 128]
"""
FIGURES = "track_(epoch_time|status)"
ANSWERS = "precision=bf16-amp:diverged"
# What becomes of bf16-amp at 128 in the first commit and in the second.
FULL = """
    if (job.case.precision, job.case.batch_size) == ("bf16-amp", 128):
        return Outcome(Status.OOM)
"""
HANG = """
    if (job.case.precision, job.case.batch_size) == ("bf16-amp", 128):
        with open(os.environ["TRAINED"] + ".pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)
"""
LIMITS = {"PREPARATION_S = 900": "PREPARATION_S = 12", "GRACE_S = 10": "GRACE_S = 2"}
# Added to each commit's harness: it says who it is, its epochs take longer, and its sweeps end
# without a report, which takes longer than they.
ANSWER = """

def _run(self, job, on_event, stopping, answer=FakeExecutor.run):
    import sys
    import time

    sys.modules["__main__"].print_report = lambda *folders: None
    with open(os.environ["TRAINED"], "a") as log:
        log.write("{commit} " + job.case.slug() + "\\n")
    {extra}
    outcome = answer(self, job, on_event, stopping)
    if outcome.measurement.epoch_time_s is not None:
        outcome.measurement.epoch_time_s += {seconds}
    return outcome


FakeExecutor.run = _run
held = known()
held.__enter__()
"""


def write(file: Path, before: str, now: str) -> None:
    """Have a file say something else."""
    text = file.read_text()
    assert f"\n{before}" in text
    file.write_text(text.replace(before, now))


@dataclass
class Project:
    """A fresh clone of a repository of two commits, which differ in their harness."""

    folder: Path
    environment: dict[str, str]
    log: Path
    output: str = ""

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of Python's in the project."""
        where: dict[str, Any] = {"cwd": self.folder, "env": self.environment, "check": check}
        python = [sys.executable, "-m", *command]
        return subprocess.run(python, **where, capture_output=True, text=True)

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
        command = ["git", "-C", str(self.folder), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(self, name: str, seconds: int, extra: str) -> None:
        """Commit a harness that takes ``seconds`` longer over an epoch."""
        fake = (ROOT / "tests" / "fake_executor.py").read_text()
        fake += ANSWER.format(commit=name, seconds=seconds, extra=extra)
        (self.folder / "bench" / "fake_executor.py").write_text(fake)
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", name)

    def trained(self) -> Counter[str]:
        """How often each case of each commit was trained."""
        return Counter(self.log.read_text().splitlines() if self.log.exists() else [])

    def result(self, commit: str, benchmark: str) -> list[float | None]:
        """What asv stored of a benchmark for a commit."""
        (file,) = (self.folder / ".asv" / "results").glob(
            f"*/{self.git('rev-parse', '--short=8', commit)}-host-*.json"
        )
        stored: list[float | None] = json.loads(file.read_text())["results"][benchmark][0]
        return stored


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Run asv over two commits."""
    base = tmp_path_factory.mktemp("asv")
    folder = base / "project"
    for name in ("bench", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "asv.conf.json", folder)
    for before, now in LIMITS.items():
        write(folder / "benchmarks" / "cases.py", before, now)
    known = '\nEXECUTORS["fake"] = ExecutorKind("bench.fake_executor:FakeExecutor")\n'
    with (folder / "bench" / "base" / "origin.py").open("a") as file:
        file.write(known)
    (folder / "grid.toml").write_text(GRID)
    environment = {
        **os.environ,
        "HOME": str(base),
        # a browser and npm keep what they fetched where the user has it
        "NPM_CONFIG_CACHE": os.environ.get("NPM_CONFIG_CACHE", str(Path.home() / ".npm")),
        "BENCH_PRESET": "grid.toml",
        "BENCH_SWEEP_FLAGS": "--executor fake",
        "BENCH_TIMEOUT": "1",
        "BENCH_FAKE_ANSWERS": ANSWERS,
        "TRAINED": str(base / "trained.log"),
        "PIP_NO_INDEX": "1",  # were anything installed, it would fail
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # each of dozens of processes would compile
    project = Project(folder, environment, base / "trained.log")
    project.git("init", "--quiet")
    (folder / ".gitignore").write_text(".asv/\n/html/\n__pycache__/\n")
    project.git("add", "asv.conf.json")
    project.git("commit", "--quiet", "-m", "no harness yet")
    project.commit("first", 0, FULL)
    project.commit("second", 5, HANG)
    (folder / "older.txt").write_text(project.git("rev-list", "--reverse", "HEAD~1"))
    project.run("asv", "machine", "--yes")
    # asv takes a process for each figure of each case; test_asv.py runs every benchmark
    for commits in ("HASHFILE:older.txt", "HEAD^!"):
        ran = project.run("asv", "run", commits, "-b", FIGURES, check=False)
        project.output += ran.stdout
        assert ran.returncode == 2, ran.stdout + ran.stderr  # asv's word for: something failed
    return project


@pytest.fixture(scope="module")
def site(project: Project) -> Path:
    """Publish what was run."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, and the site's libraries come from it")
    published = project.run("bench.publish", check=False)
    if "npm cannot get" in published.stderr:
        pytest.skip(published.stderr.strip())
    assert published.returncode == 0, published.stderr
    return project.folder / "html"


# ---------------------------------------------------------------------------------------- the run


def test_one_training_per_case_and_commit_by_its_own_harness(project: Project) -> None:
    trained = project.trained()
    assert len(trained) == 2 * 4
    assert set(trained.values()) == {1}, "two figures, one wait for what hangs"
    assert {line.split()[0] for line in trained} == {"first", "second"}  # not the working tree's
    for installed in ("site-packages", "*.whl"):
        assert not list((project.folder / ".asv").rglob(installed))


def test_outcomes_are_numbers_only_where_measured(project: Project) -> None:
    # fp32 at 64 and 128; bf16-amp at 64 (diverged) and 128 (out of memory, then it hangs)
    assert project.result("HEAD~1", "cases.track_status") == [0, 0, 1, 5]
    assert project.result("HEAD", "cases.track_status") == [0, 0, 1, 6]
    seconds = project.result("HEAD", "cases.track_epoch_time")
    assert seconds == [15 + 1000 / 64, 15 + 1000 / 128, 15 + 1000 / 64, None]
    assert str(project.result("HEAD~1", "cases.track_epoch_time")[3]) == "nan"
    with pytest.raises(ProcessLookupError):  # what hung was ended
        os.kill(int(Path(f"{project.log}.pid").read_text()), 0)


def test_a_commit_without_a_harness_does_not_stop_the_others(project: Project) -> None:
    # it must not be answered for by the harness of the working tree, either
    assert "has no bench.sweep to run" in project.output
    assert project.result("HEAD~2", "cases.track_status") is None


def test_compare_sees_what_changed(project: Project) -> None:
    table = project.run("asv", "compare", "HEAD~1", "HEAD").stdout
    assert re.search(
        r"\+ .*25\.6s .*30\.6s .*1\.20 .*track_epoch_time\('fp32', 'none', 64\)", table
    )


# --------------------------------------------------------------------------------------- the site


class Reader:
    """A page in a browser without a network, and what went wrong on it."""

    def __init__(self, page: Any, allowed: str) -> None:
        self.page, self.allowed = page, allowed
        self.wrong: list[str] = []
        page.route("**/*", self._answer)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.wrong.append(str(error)))

    def _answer(self, route: Any) -> None:
        if route.request.url.startswith((self.allowed, "data:")):
            route.continue_()
        else:
            self.wrong.append(f"left the site: {route.request.url}")
            route.abort()

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def open(self, url: str) -> Any:
        self.page.goto("about:blank")
        self.page.goto(url)
        return self.page

    def series(self) -> list[dict[str, Any]]:
        """What a plot drew: label and points of each series, in its own units."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => $("#main-graph").data("plot").getData().map(one => ({
                label: one.label, points: one.data.map(point => point.slice(0, 2))}))"""
        )
        return found


@pytest.fixture
def reader(site: Path) -> Iterator[tuple[Reader, str]]:
    """A browser, and where the site is: opened as a file, which forbids more than a server."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    base = site.as_uri()
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(20_000)
        yield Reader(page, base), base
        browser.close()


def test_the_site_reads_without_a_network(reader: tuple[Reader, str]) -> None:
    browser, base = reader
    page = browser.open(f"{base}/index.html")
    assert page.locator("a", has_text="commits").count() == 1
    page.locator("a", has_text="commits").click()

    # the grid
    page.wait_for_selector("#summarygrid-display .benchmark-plot canvas.flot-base")
    assert page.locator("#nav a", has_text="All reports").get_attribute("href") == "../index.html"
    names = page.locator(".benchmark-text").all_inner_texts()
    assert {"Epoch time", "Peak memory", "Train loss", "Top-1 error", "Energy"} <= set(names)
    page.wait_for_function("$('.benchmark-plot canvas.flot-base').length >= 6")

    # a benchmark over the commits: a line for each case with a figure, from the first to the second
    page = browser.open(f"{base}/asv/index.html#cases.track_epoch_time")
    page.wait_for_selector("#main-graph canvas.flot-base")
    lines = {one["label"]: [y for _, y in one["points"]] for one in browser.series()}
    assert lines == {
        "batch_size-64; precision-fp32": [25.625, 30.625],
        "batch_size-64; precision-bf16-amp": [25.625, 30.625],
        "batch_size-128; precision-fp32": [17.8125, 22.8125],
    }

    # precision, a string, on the x-axis: asv itself draws nothing here for two or more series
    page = browser.open(f"{base}/asv/index.html#cases.track_epoch_time?x-axis=precision")
    page.wait_for_selector("#main-graph canvas.flot-base")
    ticks = page.locator("#main-graph .flot-x-axis .flot-tick-label").all_inner_texts()
    assert ticks == ["fp32", "bf16-amp"]
    bars = {one["label"]: one["points"] for one in browser.series()}
    assert bars == {
        "batch_size-64; commit-last": [[0, 30.625], [1, 30.625]],
        "batch_size-128; commit-last": [[0, 22.8125]],  # no bar of zero where there is no figure
    }

    assert browser.wrong == []
