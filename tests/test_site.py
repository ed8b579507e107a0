"""The site of docs/: built as `make docs` does, without a dead link, and read from a disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.records import ROOT

PAGES = {page.stem for page in (ROOT / "docs").glob("*.md")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "docs"
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=quiet, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr  # a dead link or a page in no menu
    return out


def test_every_page_is_there_and_found_by_the_search(site: Path) -> None:
    assert {page.stem for page in site.glob("*.html")} == PAGES | {"404"}
    index = next(site.glob("search/search_index.*")).read_text()
    assert all(f"{name}.html" in index for name in PAGES - {"index"})


def test_pages_ask_no_network(site: Path) -> None:
    """What a browser loads of itself: scripts, styles, fonts, pictures."""
    for page in (site / f"{name}.html" for name in PAGES):
        loaded = re.findall(r'<(?:script|img|source)[^>]* src(?:set)?="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="([^"]+)"', page.read_text())
        assert loaded
        for place in loaded:
            assert not re.match(r"(https?:)?//", place), (page.name, place)
            assert (page.parent / place.partition("?")[0]).exists(), (page.name, place)


def test_schemas_are_there_as_files(site: Path) -> None:
    """And the page that names them leads to each."""
    page = (site / "results.html").read_text()
    for schema in (ROOT / "docs" / "schemas").glob("*.json"):
        assert (site / "schemas" / schema.name).read_bytes() == schema.read_bytes()
        assert f'href="schemas/{schema.name}"' in page


def test_files_outside_the_pages_are_linked_in_the_repository(site: Path) -> None:
    """As records, which the site does not hold."""
    links = re.findall(r'href="([^"]+)"', (site / "published.html").read_text())
    assert any(link.endswith("/blob/main/results/reference/README.md") for link in links)
    assert not [link for link in links if link.startswith("../")]


def test_a_flag_stays_whole(site: Path) -> None:
    """A browser may break a line after each hyphen: "-" and "-repeats"."""
    for name in PAGES:
        codes = re.findall("<code>.*?</code>", (site / f"{name}.html").read_text(), re.DOTALL)
        flags = [flag for code in codes for flag in re.findall(r".{16}(?<![\w-])--[a-z]", code)]
        assert all('"flag">' in flag for flag in flags), name


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_finds_a_page_from_a_disk(site: Path, width: int) -> None:
    """And no page is wider than the screen."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.route(re.compile("^(?!file:|data:)"), lambda route: route.abort())
        for name in (*sorted(PAGES), "own-script"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        if width < 700:
            page.click("label.md-header__button[for=__search]")
        page.locator("input.md-search__input").press_sequentially("loss scale")
        page.wait_for_selector(".md-search-result__link[href*='learning.html']", state="attached")
        browser.close()
