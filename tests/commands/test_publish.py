"""The published folder: what it takes from npm, what it fixes, what it links."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bench.base.errors import UsageError
from bench.publish import __main__ as publish
from bench.publish.asv import site as asv_site
from bench.schema.case import Case
from tests.planted.records import ROOT, ran, write_sweep


def pack(files: dict[str, bytes]) -> bytes:
    """An npm package's archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_a_package_is_verified_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, forged = pack({"a.js": b"a()"}), pack({"a.js": b"evil()"})
    sha = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    pinned = {"integrity": f"sha512-{sha}", "files": {"a.js": "a.js"}}
    assert asv_site.unpack("a@1.0.0", archive, pinned) == {"a.js": b"a()"}

    def run(command: list[str], cwd: str, **_: Any) -> subprocess.CompletedProcess[str]:
        (Path(cwd) / "a.tgz").write_bytes(forged)
        answer = json.dumps([{"id": "a@1.0.0", "filename": "a.tgz"}])
        return subprocess.CompletedProcess(command, 0, answer, "")

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match="not the one pinned"):
        asv_site.fetch_assets({"a@1.0.0": pinned})


def test_the_mended_site_stands_alone(tmp_path: Path) -> None:
    """asv's own page, as `asv publish` lays it out for one benchmark without a result."""
    asv = pytest.importorskip("asv", reason="asv is not installed (the 'asv' extra)")
    site = shutil.copytree(Path(asv.__file__).parent / "www", tmp_path / "asv")
    (site / "graphs" / "summary").mkdir(parents=True)
    rows = [{"name": "a", "last_value": 1.5}, {"name": "a", "last_value": None}]
    (site / "graphs" / "summary.json").write_text(json.dumps(rows))
    (site / "index.json").write_text(json.dumps({"benchmarks": {"a": {}}}))
    packages = json.loads(asv_site.ASSETS.read_text())
    assets = {name: b"//" for package in packages.values() for name in package["files"]}
    # fails where asv renames the variable: then look for what limits the lines now
    assert "max_curves = 8;" in (site / "graphdisplay.js").read_text()
    asv_site.stand_alone(site, assets)
    html = (site / "index.html").read_text()
    loads = re.findall(r'<(?:script|link|img)\b[^>]*?\b(?:src|href)="([^"]+)"', html)
    assert len(loads) > 15
    for load in loads:
        assert "//" not in load
        assert (site / load).is_file() or load == "regressions.xml"  # made by asv publish
    assert {path.name for path in (site / "vendor").iterdir()} == set(assets)
    assert html.index("vendor/jquery") < html.index("fix.js")
    # what has no result is no missing file
    assert json.loads((site / "graphs" / "summary" / "a.json").read_text()) == []
    table = json.loads((site / "graphs" / "summary.json").read_text())
    assert table == [{"name": "a", "last_value": 1.5}]
    # a page from disk finds every file
    text = (site / "files.js").read_text()
    files = json.loads(text.removeprefix("window.asvFiles = ").removesuffix(";\n"))
    assert files == {
        file.relative_to(site).as_posix(): json.loads(file.read_text())
        for file in site.rglob("*.json")
    }
    # the first view shows every line
    assert "max_curves = 64;" in (site / "graphdisplay.js").read_text()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the published figures and one broken sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asv.conf.json").write_bytes((ROOT / "asv.conf.json").read_bytes())
    kept = tmp_path / "results" / "reference"
    kept.mkdir(parents=True)
    for file in (ROOT / "results" / "reference").glob("rtx-titan-2019*.csv"):  # with its curve
        shutil.copy(file, kept)
    broken = tmp_path / "results" / "<broken>"
    broken.mkdir()
    (broken / "records.csv").write_text("not,records\n")
    return tmp_path


@pytest.mark.slow
def test_reports_are_linked_and_a_broken_sweep_is_named(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("asv", reason="asv is not installed (the 'asv' extra)")
    stale = results / "html" / "sweeps" / "gone.html"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert publish.main([]) == 0
    index = (results / "html" / "index.html").read_text()
    links = re.findall(r'href="([^":]+)"', index)
    assert {"cards.html", "sweeps/rtx-titan-2019.html"} <= {*links}
    for link in links:
        assert "<svg" in (results / "html" / link).read_text()
    assert "&lt;broken&gt;" in index
    assert "no report: error:" in index
    assert not stale.exists()


def test_outside_a_checkout_reports_are_published_and_a_folder_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert publish.main([]) == 2
    assert capsys.readouterr().err.startswith("error: results: no such folder")
    write_sweep(tmp_path / "results" / "mine", ran(Case(), (20.0, 20.1, 19.9)))
    assert publish.main([]) == 0
    assert (tmp_path / "html" / "sweeps" / "mine.html").is_file()
    capsys.readouterr()

    # the disk is full when the page of all cards is written
    (tmp_path / "html" / ".cards.html.part").symlink_to("/dev/full")
    assert publish.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: -o html/cards.html: No space left on device; free some, or")
    assert not (tmp_path / "html" / "index.html").exists(), "it would name pages that are not there"
