"""`python -m bench.publish`: write all reports to one folder that works offline.

It holds the asv site, the report of every sweep under ``results/``, all cards beside each other and
an index. asv's page loads its libraries from content networks; here they come from npm packages,
pinned and verified by `bench/publish/asv/assets.json`, once, as the site is built.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.processes import leave
from bench.base.text import last_line
from bench.publish.asv.site import ASSETS, fetch_assets, stand_alone
from bench.results.study.sweeps import list_results
from bench.schema.flags import Parser, command, describe

CONFIG = Path("asv.conf.json")
INDEX = Path(__file__).parents[1] / "report" / "templates" / "index.html"
CARDS = "cards.html"


def publish(results: Path, out: Path) -> Path:
    """Write all pages into ``out``; return the index. Raises UsageError as `publish_commits`
    does."""
    import jinja2

    shutil.rmtree(out / "sweeps", ignore_errors=True)  # a sweep may have been removed since
    (out / "sweeps").mkdir(parents=True)
    tracked = publish_commits(out / "asv")
    pages, readable = [], []
    for path in list_results(results):
        name = path.name.removesuffix(".csv")
        file = f"sweeps/{name}.html"
        if failed := write_page("report", [path], out / file):
            file = ""
        else:
            readable.append(path)
        pages.append((name, file, failed))
    cards = readable and not write_page("cards", readable, out / CARDS)
    template = jinja2.Environment(autoescape=True).from_string(INDEX.read_text("utf-8"))
    page = template.render(tracked=tracked, cards=CARDS if cards else None, pages=pages)
    index = out / "index.html"
    index.write_text(page, encoding="utf-8")
    return index


def publish_commits(out: Path) -> bool:
    """Have asv collate its results into ``out``, and make the site stand alone. Returns whether
    anything was tracked yet; without, there is no site. Raises UsageError: asv or npm is missing,
    asv fails, or a package is not the pinned one."""
    if find_spec("asv") is None:
        raise UsageError("asv is not installed: pip install -e '.[asv]'")
    from asv.config import Config
    from asv.results import iter_results

    if not any(iter_results(Config.load().results_dir)):
        return False
    assets = fetch_assets(json.loads(ASSETS.read_text()))
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "--html-dir", str(out)]
    asv = subprocess.run(command, capture_output=True, text=True, check=False)
    if asv.returncode:
        raise UsageError(f"asv publish failed: {last_line(asv.stdout + asv.stderr)}")
    stand_alone(out, assets)
    return True


def write_page(command: str, sources: Sequence[Path], file: Path) -> str:
    """Write a command's page about some sweeps. Returns why there is none, or an empty text."""
    words = ["-m", f"bench.{command}", *map(str, sources), "--format", "html", "-o", str(file)]
    answer = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    failed = last_line(answer.stderr) if answer.returncode else ""
    if failed:
        print(f"{sources[0]}: no {command}: {failed}")
    return failed


@command
def main(argv: Sequence[str]) -> int:
    """Build the folder; run in the project's root, where asv.conf.json is."""
    parser = Parser(prog="python -m bench.publish", description=describe(__doc__))
    add = parser.add_argument
    add("--out", type=Path, default=Path("html"), metavar="DIR", help="folder to write (html)")
    add("--results", type=Path, default=Path("results"), metavar="DIR", help="of sweeps (results)")
    given = parser.parse(argv)
    if not CONFIG.is_file():
        raise UsageError(f"no {CONFIG} here; run it in the root of the project")
    print(f"published: {publish(given.results, given.out)}")
    return 0


if __name__ == "__main__":
    leave(main())
