"""`python -m bench.publish`: write all reports to one folder that works offline.

It holds the asv site, the report of every sweep under ``results/``, all cards beside each other and
an index. asv's page loads its libraries from content networks; here they come from npm packages,
pinned and verified by `bench/asv/assets.json`, once, as the site is built.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.asv.site import ASSETS, fetch_assets, stand_alone
from bench.errors import UsageError
from bench.flags import Parser, command, describe
from bench.processes import leave
from bench.store.reader import read_rows
from bench.study.runs import list_runs
from bench.study.sweeps import list_results
from bench.text import count, last_line, name_first

CONFIG = Path("asv.conf.json")
INDEX = Path(__file__).with_name("report") / "templates" / "index.html"
SWEEPS = "sweeps"
CARDS = "cards.html"


def publish(results: Path, out: Path) -> Path:
    """Write all pages into ``out``; return the index. Raises UsageError as `publish_commits`
    does."""
    import jinja2

    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / SWEEPS, ignore_errors=True)  # a sweep may have been removed since
    commits = publish_commits(out / "asv")
    paths = list_results(results)
    sweeps = [report(path, out) for path in paths if path.is_dir()]
    references = [report(path, out) for path in paths if path.is_file()]
    readable = [page.source for page in (*sweeps, *references) if page.file]
    cards = bool(readable) and _write_page("cards", readable, out / CARDS) == ""
    template = jinja2.Environment(autoescape=True).from_string(INDEX.read_text("utf-8"))
    page = template.render(
        commits=commits, cards=CARDS if cards else None, sweeps=sweeps, references=references
    )
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def publish_commits(out: Path) -> int:
    """Have asv collate its results into ``out``, and make the site stand alone. Returns the number
    of commits shown; 0, without a site, if nothing was tracked yet. Raises UsageError: asv or npm
    is missing, asv fails, or a package is not the pinned one."""
    if find_spec("asv") is None:
        raise UsageError("asv is not installed: pip install -e '.[asv]'")
    from asv.config import Config
    from asv.results import iter_results

    config = Config.load()
    commits = {result.commit_hash for result in iter_results(config.results_dir)}
    if not commits:
        print("asv has no results yet; `asv run` makes them")
        return 0
    assets = fetch_assets(json.loads(ASSETS.read_text()))
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "--html-dir", str(out)]
    asv = subprocess.run(command, capture_output=True, text=True, check=False)
    if asv.returncode:
        raise UsageError(f"asv publish failed: {last_line(asv.stdout + asv.stderr)}")
    stand_alone(out, assets)
    return len(commits)


@dataclass(frozen=True)
class Page:
    """A report on the index; ``file`` is None if there is none, and ``note`` says why."""

    source: Path
    name: str
    file: str | None
    note: str


def report(source: Path, out: Path) -> Page:
    """Write the HTML report of one sweep into ``out``; a sweep without a report is not an error."""
    name = source.name.removesuffix(".csv")
    file = Path(SWEEPS) / f"{name}.html"
    (out / file).parent.mkdir(exist_ok=True)
    if failed := _write_page("report", [source], out / file):
        return Page(source, name, None, f"no report: {failed}")
    runs = list_runs(read_rows(source))
    devices = ", ".join(dict.fromkeys(run.gpu or "CPU" for run in runs))
    return Page(source, name, file.as_posix(), f"{devices}; {count(len(runs), 'record')}")


def _write_page(command: str, sources: Sequence[Path], file: Path) -> str:
    """Write a command's page about some sweeps. Returns why there is none, or an empty text."""
    words = ["-m", f"bench.{command}", *map(str, sources), "--format", "html", "-o", str(file)]
    answer = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    failed = last_line(answer.stderr) if answer.returncode else ""
    if failed:
        print(f"{name_first([str(source) for source in sources], 1)}: no {command}: {failed}")
    return failed


@command
def main(argv: Sequence[str]) -> int:
    """Build the folder; run in the project's root, where asv.conf.json is."""
    parser = Parser(prog="python -m bench.publish", description=describe(__doc__))
    for flag, default, what in (
        ("--out", "html", "folder to write (html)"),
        ("--results", "results", "folder of the sweeps (results)"),
    ):
        parser.add_argument(flag, type=Path, default=Path(default), metavar="DIR", help=what)
    given = parser.parse(argv)
    if not CONFIG.is_file():
        raise UsageError(f"no {CONFIG} here; run it in the root of the project")
    print(f"published: {publish(given.results, given.out)}")
    return 0


if __name__ == "__main__":
    leave(main())
