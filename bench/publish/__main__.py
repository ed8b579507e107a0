"""`python -m bench.publish`: one folder to read anywhere, without a network or a server.

It holds the asv site, the report of every sweep under ``results/`` and an index of both. asv's
page loads its libraries from content networks; here they come from npm packages, pinned and
verified by `site/assets.json`, once, as the site is built.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.flags import Parser, run_command

SITE = Path(__file__).with_name("site")
CONFIG = Path("asv.conf.json")
VENDOR, SWEEPS = "vendor", "sweeps"


def main(argv: Sequence[str] | None = None) -> int:
    """Build the folder; the return code."""
    return run_command(publish, argv)


def publish(argv: Sequence[str]) -> int:
    """Build the folder in the project's root, where asv.conf.json is.

    Raises:
        UsageError: it is run elsewhere, npm or asv is missing, or a package is not the one pinned.
    """
    parser = Parser(prog="python -m bench.publish", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("html"), metavar="DIR", help="(html)")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), metavar="DIR", help="of sweeps (results)"
    )
    given = parser.parse(argv)
    if not CONFIG.is_file():
        raise UsageError(f"no {CONFIG} here; run it in the root of the project")
    given.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(given.out / SWEEPS, ignore_errors=True)  # a sweep may be gone since
    commits = publish_commits(given.out / "asv")
    sweeps = [report(file, given.out, file.parent.name) for file in find_sweeps(given.results)]
    references = [report(file, given.out, file.stem) for file in find_references(given.results)]
    write_index(given.out, commits, sweeps, references)
    print(f"published: {given.out / 'index.html'}")
    return 0


def publish_commits(out: Path) -> int:
    """Have asv collate its results into ``out``, and make the site stand alone.

    Returns:
        The commits it shows; 0, and no site, where nothing was tracked yet.

    Raises:
        UsageError: asv or npm is missing, asv fails, or a package is not the one pinned.
    """
    if find_spec("asv") is None:
        raise UsageError("asv is not installed; install this project's 'asv' extra")
    from bench.asv.importer import load_config, read_results, widen_benchmarks

    config = load_config()
    commits = {result.commit_hash for result in read_results(config)}
    if not commits:
        print("nothing tracked over commits yet; `asv run` does")
        return 0
    assets = fetch_assets(json.loads((SITE / "assets.json").read_text()))
    widen_benchmarks(config)
    command = [sys.executable, "-m", "asv", "publish", "--no-pull", "--html-dir", str(out)]
    asv = subprocess.run(command, capture_output=True, text=True, check=False)
    if asv.returncode:
        raise UsageError(f"asv publish failed: {_last_line(asv.stdout + asv.stderr)}")
    stand_alone(out, assets)
    return len(commits)


def fetch_assets(packages: Mapping[str, Any]) -> dict[str, bytes]:
    """Take files from npm packages.

    Args:
        packages: by ``name@version``, the package's ``integrity`` as npm gives it and its
            ``files``: the name asv's page has for one, and its path in the package.

    Returns:
        Each file's content, by asv's name for it.

    Raises:
        UsageError: npm is missing or fails, or a package is not the one pinned.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError("npm is not installed, and the site's libraries come from it; install it")
    with tempfile.TemporaryDirectory() as folder:
        # the empty project keeps npm from reading, or complaining of, the one it runs in
        (Path(folder) / "package.json").write_text("{}")
        command = [npm, "pack", "--json", "--prefer-offline", "--ignore-scripts", *packages]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if answer.returncode:
            errors = re.findall(r"^npm error (?!code )(.+)", answer.stderr, re.MULTILINE)
            why = errors[0] if errors else _last_line(answer.stderr)
            raise UsageError(f"npm cannot get the site's libraries: {why}")
        names = {entry["id"]: entry["filename"] for entry in json.loads(answer.stdout)}
        return {
            name: content
            for package, pinned in packages.items()
            for name, content in unpack(
                package, (Path(folder) / names[package]).read_bytes(), pinned
            ).items()
        }


def unpack(package: str, archive: bytes, pinned: Mapping[str, Any]) -> dict[str, bytes]:
    """Verify a package's archive and read the files wanted of it.

    Raises:
        UsageError: it is not the one pinned.
    """
    algorithm, _, digest = pinned["integrity"].partition("-")
    found = base64.b64encode(hashlib.new(algorithm, archive).digest()).decode()
    if found != digest:
        raise UsageError(
            f"npm package {package} is not the one pinned: its {algorithm} is {found}, not "
            f"{digest}; do not use it"
        )
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {
            name: tar.extractfile(f"package/{path}").read()  # type: ignore[union-attr]
            for name, path in pinned["files"].items()
        }


_REMOTE = re.compile(
    r"""<(?P<tag>script|link)\b[^>]*?\b(?P<attribute>src|href)="(?:https?:)?//[^"]*/(?P<name>[^"/]+)"[^>]*>"""
)


def stand_alone(out: Path, assets: Mapping[str, bytes]) -> None:
    """Make an asv site load nothing from elsewhere, open from disk, and draw every plot.

    Raises:
        UsageError: its page wants a library that is not among ``assets``.
    """
    vendor = out / VENDOR
    vendor.mkdir()

    def localize(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in assets:
            raise UsageError(
                f"asv's page wants {name}, which no package in {SITE / 'assets.json'} holds; "
                "asv 0.6.6 is what this is made for"
            )
        (vendor / name).write_bytes(assets[name])
        relation = ' rel="stylesheet"' if match["tag"] == "link" else ""
        return f'<{match["tag"]}{relation} {match["attribute"]}="{VENDOR}/{name}">'

    page = out / "index.html"
    html = _REMOTE.sub(localize, page.read_text(encoding="utf-8"))
    shutil.copy(SITE / "mend.js", out)
    html = html.replace("</head>", '  <script src="mend.js"></script>\n  </head>', 1)
    home = '<li><a href="../index.html">All reports</a></li>'
    html = html.replace('<li id="nav-li-" ', f'{home}\n\t<li id="nav-li-" ', 1)
    page.write_text(html, encoding="utf-8")
    _show_all_lines(out / "graphdisplay.js")
    _fill_gaps(out)
    files = {
        file.relative_to(out).as_posix(): json.loads(file.read_text(encoding="utf-8"))
        for file in out.rglob("*.json")
    }
    text = json.dumps(files, separators=(",", ":"))
    (out / "files.js").write_text(f"window.asvFiles = {text};\n", encoding="utf-8")


def _show_all_lines(script: Path) -> None:
    # asv first shows the leading values of each parameter, up to 8 lines. Of the 2019 grid that is
    # loss scale "none" alone, and so no line of fp16; mend.js drops what has no data.
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("max_curves = 8;", "max_curves = 64;"), encoding="utf-8")


def _fill_gaps(out: Path) -> None:
    """Give what was never run an empty graph instead of a missing file, and no line in the list."""
    for name in json.loads((out / "index.json").read_text(encoding="utf-8"))["benchmarks"]:
        graph = out / "graphs" / "summary" / f"{name}.json"
        if not graph.exists():
            graph.write_text("[]")
    for table in (out / "graphs").rglob("summary.json"):
        rows = json.loads(table.read_text(encoding="utf-8"))
        table.write_text(json.dumps([row for row in rows if row["last_value"] is not None]))


@dataclass(frozen=True)
class Page:
    """A report on the index; ``file`` is None where there is none, and ``note`` says why."""

    name: str
    file: str | None
    note: str


def find_sweeps(results: Path) -> list[Path]:
    """Records of the user's sweeps, the latest first."""
    return sorted(results.glob("*/records.csv"), key=lambda file: -file.stat().st_mtime)


def find_references(results: Path) -> list[Path]:
    """Published figures; a curve belongs to the file it is named after."""
    files = sorted((results / "reference").glob("*.csv"))
    return [file for file in files if not file.stem.endswith("-curve")]


def report(records: Path, out: Path, name: str) -> Page:
    """Write the HTML report of one sweep into ``out``; a sweep without one is no failure."""
    file = Path(SWEEPS) / f"{name}.html"
    (out / file).parent.mkdir(exist_ok=True)
    source = records.parent if records.name == "records.csv" else records
    command = ["-m", "bench.report", str(source), "--format", "html", "-o", str(out / file)]
    answer = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if answer.returncode:
        note = f"no report: {_last_line(answer.stderr)}"
        print(f"{source}: {note}")
        return Page(name, None, note)
    return Page(name, file.as_posix(), _describe(records))


def _describe(records: Path) -> str:
    from bench.store.reader import read_records

    frame = read_records(records)
    count = len(frame)
    devices = [gpu or "CPU" for gpu in dict.fromkeys(frame["gpu"])]
    return f"{', '.join(devices)}; {count} record{'s' if count != 1 else ''}"


def write_index(
    out: Path, commits: int, sweeps: Sequence[Page], references: Sequence[Page]
) -> None:
    """Write the page that links all others."""
    import jinja2

    template = jinja2.Environment(autoescape=True).from_string((SITE / "index.html").read_text())
    page = template.render(commits=commits, sweeps=sweeps, references=references)
    (out / "index.html").write_text(page, encoding="utf-8")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
