"""The page, opened in a browser: wide and narrow, light and dark, by keyboard, without network."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from PIL import Image

from bench.report.__main__ import main as write
from bench.report.document import build
from bench.report.figures import (
    COLOURS,
    DRAWINGS,
    FIXED_AXES,
    Panel,
    draw,
    find_frontier,
    list_figures,
    list_panels,
)
from bench.results.study.sweeps import read_sweeps
from bench.schema.case import Case
from tests.planted.records import FP16, FP32, ROOT, ran
from tests.planted.results import read_report
from tests.planted.sweeps import Folders

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EACH = pytest.mark.parametrize("name", ["quick", "profiled", "cards"])
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, planted: Folders) -> dict[str, Path]:
    """A page of each: a quick sweep, two cards, profiles."""
    folder = tmp_path_factory.mktemp("pages")
    sweeps = {
        "quick": [planted["quick"]],
        "cards": [planted["foreign"], planted["hostile"]],
        "profiled": [planted["profiled"]],
    }
    made = {name: folder / f"{name}.html" for name in sweeps}
    for name, page in made.items():
        assert write([*map(str, sweeps[name]), "--format", "html", "-o", str(page)]) == 0
    return made


def test_a_page_does_not_ask_for_itself(tmp_path: Path, planted: Folders) -> None:
    page = tmp_path / "page.html"
    assert write([str(planted["tuned"]), "-o", str(page)]) == 0
    assert "-o report.html" not in page.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@EACH
def test_the_page_stands_alone(pages: dict[str, Path], name: str) -> None:
    text = pages[name].read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    outline = Outline(text)
    assert not [t for t, a in outline.tags if "src" in a]
    assert all((a.get("href") or "").startswith("data:") for a in outline.named("link"))
    links = [a["href"] or "" for a in outline.named("a")]
    assert all(link.startswith("#") or not re.match(r"\w+:|/", link) for link in links)
    files = [link for link in links if link.endswith(".csv")]
    assert len(files) == (2 if name == "cards" else 1)
    assert all((pages[name].parent / unquote(link)).is_file() for link in files)
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [a["id"] for _, a in outline.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for th in outline.named("th"):
        assert th.get("scope") in ("col", "row", "rowgroup")
    for svg in outline.named("svg"):
        assert svg["aria-hidden"] == "true"  # its panel is the image, and names it
    images = [a for _, a in outline.tags if a.get("role") == "img"]
    assert len(images) == len(outline.named("svg")) == len(outline.named("figure")) > 0
    assert all(len(a["aria-label"] or "") > 30 for a in images)
    if name == "quick":  # what a link may lead to
        assert {"images-per-s", "time-memory", "table-effects", "records"} <= set(ids)
        # drawings bring no colour of their own, and name no address
        for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
            assert not re.search(r"#[0-9a-f]{6}\b(?!\")", re.sub(r'href="#\w+"', "", svg))
            assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)


def test_the_page_says_what_is_no_measurement_and_hostile_names_are_text(
    pages: dict[str, Path],
) -> None:
    text = pages["cards"].read_text(encoding="utf-8")
    assert "not known to be measured" in text
    assert "<script>alert" not in text
    assert "<V100>" not in text
    assert "Tesla &lt;V100&gt; | 32_GB &amp; \\co" in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


def open_page(browser: Browser, path: Path, **options: Any) -> Page:
    """Open a file with every other request refused; fail on anything said on the console."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
    context.route(re.compile(r"^(?!file:)"), lambda route: route.abort())
    page = context.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith(("file:", "data:")) or messages.append(request.url),
    )
    page.goto(path.as_uri())
    assert messages == []
    return page


Show = Callable[..., "Page"]


@pytest.fixture(scope="module")
def show(browser: Browser, pages: dict[str, Path]) -> Show:
    """Pages that are opened once; each test has them as they were, however others left them."""
    opened = cache(lambda name: open_page(browser, pages[name]))

    def show(name: str, width: int = 1280, unfold: bool = True) -> Page:
        page = opened(name)
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme="light", reduced_motion="reduce")
        folds = "unfold => document.querySelectorAll('.fold').forEach(fold => fold.open = unfold)"
        page.evaluate(folds, unfold)
        return page

    return show


def is_folded(page: Page, selector: str) -> list[bool]:
    """Whether each of the elements is in something that is folded."""
    folded: list[bool] = page.locator(selector).evaluate_all(
        "nodes => nodes.map(node => !node.checkVisibility({contentVisibilityAuto: true}))"
    )
    return folded


@pytest.mark.slow
@EACH
def test_a_page_opens_with_the_answer_folds_the_rest_and_fits(show: Show, name: str) -> None:
    page = show(name, unfold=False)
    check_opening(page)
    table = page.locator(".opening .scroll").first
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")
    # narrow tables stand beside the figures, where else nothing would
    left, right = table.bounding_box(), page.locator(".figures").bounding_box()
    assert left
    assert right
    beside = left["x"] + left["width"] <= right["x"]
    assert beside == (table.locator("thead th").count() <= 5)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 1000})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert all(is_folded(page, "main > section:not(.opening) table"))
        page.locator("#unfold").click()
        assert not any(is_folded(page, "figure, main .fold > .scroll"))
        check_fit(page, width)
        page.locator("#unfold").click()


def check_opening(page: Page) -> None:
    opening = page.locator(".opening")
    order = opening.evaluate(
        "node => ['.answer p', '.tables', '.warnings', 'figure']"
        ".map(name => [...node.querySelectorAll('*')].indexOf(node.querySelector(name)))"
    )
    there = [place for place in order if place >= 0]
    assert len(there) >= 3
    assert there == sorted(there)
    assert page.locator(".fold .title").count() == 0, "what is unfolded has its title already"
    assert opening.locator("figure").count() == 2
    assert "Next:" not in opening.inner_text(), "what to run is for who measured, not for readers"


LIST_BROKEN = r"""() => {
    const broken = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode;
        if (node.parentElement.closest('.hidden, script, style')) continue;
        for (const found of node.data.matchAll(/\d (%|s|ms|min|h|W|J|GiB|GB|TFLOP\/s)(?![\w/])/g)) {
            const range = document.createRange();
            range.setStart(node, found.index);
            range.setEnd(node, found.index + found[0].length);
            const tops = [...range.getClientRects()].map(one => Math.round(one.top));
            if (new Set(tops).size > 1) broken.push(node.data);
        }
    }
    return broken;
}"""


def check_fit(page: Page, width: int) -> None:
    """Unfolded: what is wider than the page scrolls in its own box, and only tables are; no line
    ends between a number and its unit; the drawings' ink is the page's, light or dark."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = page.evaluate(
        "[...document.querySelectorAll('body *')].filter(node => !node.closest('.scroll, svg')"
        " && !node.matches('.hidden, .hidden *, .skip')"
        " && node.getBoundingClientRect().right > innerWidth + 1).map(node => node.outerHTML)"
    )
    assert cut == []
    assert page.evaluate(LIST_BROKEN) == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ink, paper = page.evaluate(
            "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        )
        dark = [sum(map(int, re.findall(r"\d+", colour))) < 3 * 128 for colour in (ink, paper)]
        assert dark == ([False, True] if scheme == "dark" else [True, False])
        text = page.locator("figure svg text").first
        assert text.evaluate("node => getComputedStyle(node).fill") == ink


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["nvidia-h200-20261126-040407", "nvidia-h100-80gb-hbm3-20261122-113040"]
)
def test_no_column_is_cut_off_on_paper(browser: Browser, tmp_path: Path, folder: str) -> None:
    """A4 with margins of 1 cm: tables of many columns were printed larger than the others."""
    assert write([str(ROOT / "results" / folder), "-o", str(tmp_path / "page.html")]) == 0
    page = open_page(browser, tmp_path / "page.html")
    page.set_viewport_size({"width": 718, "height": 1000})
    page.emulate_media(media="print")
    widths = "boxes => boxes.map(box => box.firstElementChild.offsetWidth - box.clientWidth)"
    assert max(page.locator(".scroll").evaluate_all(widths)) <= 0
    broken = page.evaluate(LIST_BROKEN)
    assert not [text for text in broken if text.endswith(" %")]
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [True, False])
def test_a_fold_is_opened_by_a_click_a_print_and_a_link(
    browser: Browser, pages: dict[str, Path], scripts: bool
) -> None:
    """Also where scripts do not run."""
    page = open_page(browser, pages["quick"], java_script_enabled=scripts)
    fold = page.locator(".fold", has=page.locator("#table-effects"))
    assert not page.locator("#table-effects").is_visible()
    fold.locator("> summary").click()
    assert page.locator("#table-effects").is_visible()
    page.emulate_media(media="print")
    folded = is_folded(page, "figure, main .fold > .scroll, .fold > .warnings")
    assert len(folded) > 2
    assert not any(folded)
    assert page.locator("#unfold").is_hidden()
    page.emulate_media(media="screen")
    page.goto("about:blank")
    page.goto(pages["quick"].as_uri() + "#table-effects")
    page.wait_for_selector("[aria-label^='What each change does'] table", timeout=20_000)
    page.context.close()


@pytest.mark.slow
def test_the_page_is_read_by_keyboard_and_its_links_open_what_they_lead_to(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = open_page(browser, pages["quick"])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("nav").get_by_text("Commands", exact=True).click()
    page.wait_for_selector("#commands", state="attached", timeout=20_000)
    # a print leaves the folds as they were, also of browsers whose style sheets cannot open one
    count = "document.querySelectorAll('.fold[open]').length"
    opened = page.evaluate(count)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(count) == page.locator(".fold").count() > opened > 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(count) == opened
    page.context.close()


def test_what_diverged_is_drawn_and_what_is_invalid_is_not(planted: Folders) -> None:
    (panel,) = list_panels(build(read_sweeps([planted["foreign"]])))
    assert {case.batch_size for case in panel.cases} & {129, 130} == {129}


def test_what_is_not_compared_is_not_drawn(planted: Folders) -> None:
    assert list_panels(build(read_sweeps([planted["scripts"]]))) == []


def test_a_line_holds_cases_that_differ_only_in_batch_size(planted: Folders) -> None:
    (panel,) = list_panels(build(read_sweeps([planted["tuned"]])))
    assert "compile off · channels last off" in panel.title
    cases = panel.cases
    for name in (*FIXED_AXES, "model", "dataset", "device"):
        assert len({getattr(case, name) for case in cases}) == 1, name
    places = [(case.precision, case.batch_size) for case in cases]
    assert len({*places}) == len(places)


def test_rates_are_drawn_by_batch_size_where_there_are_several(tmp_path: Path) -> None:
    """And loss scales are spoken of where a case has one."""
    shown = {}
    for name, cases in {
        "one": (FP32, FP16),
        "unscaled": (FP32, replace(FP32, batch_size=64)),
        "scaled": (FP16, replace(FP16, batch_size=64)),
    }.items():
        report = read_report(tmp_path / name, [row for case in cases for row in ran(case, (30,))])
        shown[name] = [
            (kind.name, "loss scale" in kind.caption)
            for kind, _ in list_figures(list_panels(report))
        ]
    costs = ("time-memory", False)
    assert shown == {
        "one": [costs],
        "unscaled": [("images-per-s", False), costs],
        "scaled": [("images-per-s", True), costs],
    }


def test_names_of_settings_at_one_place_stand_below_each_other(tmp_path: Path) -> None:
    rates = {0.01: (50, 50.1, 49.9), 0.1: (50.3, 50, 50.1)}
    rows = [row for lr, times in rates.items() for row in ran(replace(FP16, lr=lr), times)]
    (panel,) = list_panels(read_report(tmp_path, [*rows, *ran(FP32, (100,))]))
    (ax,) = draw(DRAWINGS[1], [panel], 1, str).axes
    assert [text.get_text() for text in ax.texts] == ["128\n128 · lr 0.1"]


def test_the_baseline_is_what_most_cases_have() -> None:
    """The H200's cases mostly have cuDNN's autotuning on, which is not the default."""
    report = build(read_sweeps([ROOT / "results" / "reference" / "h200-lab.csv"]))
    (panel,) = list_panels(report)
    assert "cudnn benchmark on · compile off · channels last off" in panel.title
    speeds = {c.batch_size: round(c.images_per_s, 1) for c in panel.cases if c.precision == "fp16"}
    assert speeds == {128: 2482.0, 512: 4544.0}


def test_the_baseline_is_whole_batches(tmp_path: Path) -> None:
    """Though there are fewer of them."""
    cases = [Case(batch_size=size) for size in (64, 128)]
    cases += [Case(batch_size=size, accumulate=2) for size in (64, 128, 256)]
    rows = [row for case in cases for row in ran(case, (30,))]
    (panel,) = list_panels(read_report(tmp_path, rows))
    assert {case.accumulate for case in panel.cases} == {1}


H100 = ROOT / "results" / "nvidia-h100-80gb-hbm3-20261122-113040"
H200 = ROOT / "results" / "nvidia-h200-20261126-040407"
CPU = ROOT / "results" / "cpu-epyc-20261120"


def test_a_mark_tells_repeats_warnings_and_what_is_recommended() -> None:
    """Of each figure: the marks that are hollow, those that are ringed, and the bars."""
    ringed = {H200: ("fp16-amp", 256), H100: ("fp16", 512), CPU: ("bf16-amp", 256)}
    hollow = {H200: {("fp16", 128)}, H100: {("fp16", 128), ("bf16-amp", 128)}, CPU: set()}
    for folder in ringed:
        report = build(read_sweeps([folder]))
        (panel,) = list_panels(report)
        chosen = {(c.precision, c.batch_size) for c in panel.cases if c.cell in panel.chosen}
        assert chosen == {ringed[folder]}
        for kind in DRAWINGS:
            (ax,) = draw(kind, [panel], 1, str).axes
            lines = ax.get_lines()
            assert len([x for x in lines if x.get_markersize() == 15]) == 1
            assert len([x for x in lines if x.get_markerfacecolor() == "#ffffff"]) == len(
                hollow[folder]
            )
            assert len(ax.containers) == (6 if folder == CPU else 0)
        assert {(c.precision, c.batch_size) for c in panel.cases if not c.trusted} == hollow[folder]


def test_repeats_that_agree_to_the_last_digit_have_a_bar_of_no_length(tmp_path: Path) -> None:
    """The reciprocal of the reciprocal of their images/s is another number."""
    rows = [row for size in (64, 128) for row in ran(Case(batch_size=size), (3.3, 3.3, 3.3))]
    (panel,) = list_panels(read_report(tmp_path, rows))
    (ax,) = draw(DRAWINGS[0], [panel], 1, str).axes
    assert len(ax.containers) == 2


def test_every_batch_size_has_a_tick_and_a_baseline_its_line(tmp_path: Path) -> None:
    def list_ticks(panel: Panel) -> list[str]:
        (ax,) = draw(DRAWINGS[0], [panel], 1, str).axes
        assert [*ax.get_xticks()] == sorted({c.batch_size for c in panel.cases})
        return [label.get_text() for label in ax.get_xticklabels()]

    (card,) = list_panels(build(read_sweeps([H200])))
    assert list_ticks(card) == ["128", "256", "512", "640"]
    sizes = (32, 64, 128, 129, 512, 640, 4096)
    rows = [row for size in sizes for row in ran(Case(batch_size=size), (30,))]
    (panel,) = list_panels(read_report(tmp_path, rows))
    assert list_ticks(panel) == [str(size) if size != 129 else "" for size in sizes]
    (panel,) = list_panels(build(read_sweeps([H100])))
    (ax,) = draw(DRAWINGS[0], [panel], 1, str).axes
    tf32 = [x for x in ax.get_lines() if x.get_color() == COLOURS["tf32"][0]]
    assert max(len(x.get_xdata()) for x in tf32) == 2


def test_the_frontier_is_what_none_beats_by_more_than_noise() -> None:
    (panel,) = list_panels(build(read_sweeps([H200])))
    found = [(case.precision, case.batch_size) for case in find_frontier(panel.every)]
    assert found == [("fp16", 128), ("fp16", 256), ("fp16-amp", 256), ("fp16", 512)]


@pytest.mark.slow
def test_what_is_recommended_is_in_view_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert write([str(H100), "-o", str(page)]) == 0
    context = browser.new_context(viewport={"width": 390, "height": 1000})
    shown = context.new_page()
    shown.goto(page.as_uri())
    cells = shown.locator(".opening td:has(strong)")
    assert cells.count() == 2
    for number in range(2):
        box = cells.nth(number).bounding_box()
        assert box
        assert box["x"] > 100
        assert box["x"] + box["width"] <= 390
    context.close()


def test_files_are_written(planted: Folders, tmp_path: Path) -> None:
    asked = ("--figures", tmp_path / "f", "-o", tmp_path / "r.txt")
    assert write([*map(str, (planted["quick"], *asked))]) == 0
    ElementTree.parse(tmp_path / "f" / "images-per-s.svg")
    for name in ("images-per-s", "time-memory"):
        with Image.open(tmp_path / "f" / f"{name}.png") as picture:
            assert picture.width > 600


def test_what_was_measured_at_one_batch_size_is_in_the_figure() -> None:
    """A logarithmic axis about one value was empty."""
    folder = ROOT / "results" / "nvidia-h200-20261129-223915"
    panels = list_panels(build(read_sweeps([folder])))
    (panel,) = (p for p in panels if len(p.cases) > 1)
    (ax,) = draw(DRAWINGS[0], [panel], 1, str).axes
    low, high = ax.get_xlim()
    assert low < panel.cases[0].batch_size < high
