"""asv's site, and changes to it: it loads nothing from other hosts, opens from disk and draws every
plot.

asv 0.6.6's page loads its libraries from CDNs and reads its data by requests that browsers refuse
for files. `tests/commands/test_publish.py` shows when a newer asv no longer needs this.
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
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.installation import describe_extra
from bench.base.text import last_line

ASSETS, FIX = (Path(__file__).with_name(name) for name in ("assets.json", "fix.js"))
VENDOR = "vendor"


def fetch_assets(packages: Mapping[str, Any]) -> dict[str, bytes]:
    """Fetch files from npm packages. Returns each file's content, by asv's name for it.

    ``packages`` maps ``name@version`` to the package's ``integrity``, as npm gives it, and its
    ``files``: asv's name for each, and its path in the package. Raises UsageError: npm is missing
    or fails, or a package is not the pinned one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError(
            "npm is not installed; install it, because the site's libraries come from it"
        )
    with tempfile.TemporaryDirectory() as folder:
        # an empty project keeps npm from reading the one it runs in, or complaining about it
        (Path(folder) / "package.json").write_text("{}")
        command = [npm, "pack", "--json", "--prefer-offline", "--ignore-scripts", *packages]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if answer.returncode:
            errors = re.findall(r"^npm error (?!code )(.+)", answer.stderr, re.MULTILINE)
            why = errors[0] if errors else last_line(answer.stderr)
            raise UsageError(f"npm cannot get the site's libraries: {why}")
        names = {entry["id"]: entry["filename"] for entry in json.loads(answer.stdout)}
        files: dict[str, bytes] = {}
        for package, pinned in packages.items():
            files |= unpack(package, (Path(folder) / names[package]).read_bytes(), pinned)
        return files


def unpack(package: str, archive: bytes, pinned: Mapping[str, Any]) -> dict[str, bytes]:
    """Verify that a package's archive is the pinned one, and return its wanted files."""
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


REMOTE = re.compile(
    r"""<(?P<tag>script|link)\b[^>]*?\b(?P<attribute>src|href)="(?:https?:)?//[^"]*/(?P<name>[^"/]+)"[^>]*>"""
)
"""A library that asv's page loads from a CDN."""


def stand_alone(out: Path, assets: Mapping[str, bytes]) -> None:
    """Make an asv site load nothing remote, open from disk, and draw every plot. Raises UsageError:
    its page needs a library that is not among ``assets``."""
    vendor = out / VENDOR
    vendor.mkdir()

    def localize(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in assets:
            raise UsageError(
                f"asv's page wants {name}, which no package in {ASSETS.name} holds; "
                "use asv 0.6.6, for which this was written"
            )
        (vendor / name).write_bytes(assets[name])
        relation = ' rel="stylesheet"' if match["tag"] == "link" else ""
        return f'<{match["tag"]}{relation} {match["attribute"]}="{VENDOR}/{name}">'

    page = out / "index.html"
    html = REMOTE.sub(localize, page.read_text(encoding="utf-8"))
    shutil.copy(FIX, out)
    html = html.replace("</head>", '  <script src="fix.js"></script>\n  </head>', 1)
    home = '<li><a href="../index.html">All reports</a></li>'
    html = html.replace('<li id="nav-li-" ', f'{home}\n\t<li id="nav-li-" ', 1)
    page.write_text(html, encoding="utf-8")
    # asv first shows the leading values of each parameter, up to 8 lines. In the 2019 grid that is
    # loss scale "none" only, so no line of fp16; fix.js drops lines without data.
    script = out / "graphdisplay.js"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("max_curves = 8;", "max_curves = 64;"), encoding="utf-8")
    # benchmarks that never ran get an empty graph instead of a missing file, and no list entry
    for name in json.loads((out / "index.json").read_text(encoding="utf-8"))["benchmarks"]:
        graph = out / "graphs" / "summary" / f"{name}.json"
        if not graph.exists():
            graph.write_text("[]")
    for table in (out / "graphs").rglob("summary.json"):
        rows = json.loads(table.read_text(encoding="utf-8"))
        table.write_text(json.dumps([row for row in rows if row["last_value"] is not None]))
    files = {
        file.relative_to(out).as_posix(): json.loads(file.read_text(encoding="utf-8"))
        for file in out.rglob("*.json")
    }
    text = json.dumps(files, separators=(",", ":"))
    (out / "files.js").write_text(f"window.asvFiles = {text};\n", encoding="utf-8")


def publish_commits(out: Path) -> bool:
    """Have asv collate its results into ``out``, and make the site stand alone. Returns whether
    anything was tracked yet; without, there is no site. Raises UsageError: asv or npm is missing,
    asv fails, or a package is not the pinned one."""
    if find_spec("asv") is None:
        raise UsageError(f"asv is not installed: {describe_extra('asv')}")
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
