"""What is said of planted and committed sweeps, compared whole with what was kept.

UPDATE_SNAPSHOTS=1 writes it anew; read the diff.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from pytest_for_tests import Capture, Patch
from rich.cells import cell_len

from bench.compare.__main__ import main as compare_sweeps
from bench.questions.notes import describe_constants, write_notes
from bench.questions.notices import warn
from bench.questions.recommendation import recommend
from bench.questions.report_data import ReportData, gather
from bench.render.documents import render_latex, render_markdown
from bench.render.model import Table
from bench.render.text import WIDTH, render
from bench.report.document import SECTIONS, Report, build
from bench.report.files import describe_effect, write_json
from bench.store.writer import Store
from bench.study.sweeps import REFERENCE, read_sweep, read_sweeps
from bench.text import clean
from bench.why import main as explain
from tests.planted.comparisons import COMPARISONS, Comparison
from tests.planted.documents import Made
from tests.planted.records import ROOT, list_committed, write_sweep
from tests.planted.situations import SITUATIONS
from tests.planted.situations.situation import Situation
from tests.planted.sweeps import Folders

GOLDEN = Path(__file__).with_name("golden")
RESULTS = {folder.name: folder for folder in list_committed("records.csv")}
LAB = REFERENCE.with_name("h200-lab.csv")  # measured, but not by this harness
JARGON = re.compile(r"welch|holm|tost|\bknee|\brung|sentinel", re.IGNORECASE)


def compare(name: str, said: str) -> None:
    """Hold a text against the file that has it."""
    file = GOLDEN / name.replace(" ", "-")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")


def shorten(value: Any) -> Any:
    """Without what is empty, and of numbers the digits that no order of additions changes."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) > 1e-9 else 0.0
    if isinstance(value, dict):
        kept = {key: shorten(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part not in (None, "", [], {})}
    return [*map(shorten, value)] if isinstance(value, list | tuple) else value


EXPLAINED = (
    "Speed: epoch time before",
    "Interval: 95 %, of the mean",
    "Equivalent: two one-sided",
    "Knee: the smallest",
    "Memory as a line",
    "Efficiency is the speed-up",
    "Exposed communication is",
)
"""How the notes begin that explain every table of a kind; tests/golden/reports has them whole."""


def take_tables(found: ReportData, situation: Situation) -> Iterator[Table]:
    """The tables that tell of a situation, without what explains all of their kind."""
    for section in SECTIONS:
        if section.name in situation.parts:
            for table in section.tabulate(found):
                kept = [note for note in table.notes if not note.startswith(EXPLAINED)]
                yield replace(table, notes=tuple(kept))


def tell(found: ReportData, situation: Situation) -> Iterator[str]:
    """The parts of a report that tell of a situation."""
    parts = situation.parts
    document = Made(
        situation.about,
        "",
        tuple(describe_constants(found.results, found.varying)) if "constants" in parts else (),
        (),
        tuple(recommend(found)) if "answers" in parts else (),
        (),
        tuple(take_tables(found, situation)),
        tuple(write_notes(found.results, found.varying)) if "notes" in parts else (),
        "",
        None,
    )
    yield render(document, full=True).strip() + "\n"
    if "doubts" in parts:
        for notice in warn(found.runs, found.results, found.everything, found.sweeps):
            yield f"! {notice.label}: {notice.text}\n"
    if "numbers" in parts:
        for effect in map(describe_effect, found.effects):
            yield f"{effect['axis']}: {effect['before']} → {effect['after']}\n"
            for metric, numbers in effect["metrics"].items():
                yield f"  {metric} {json.dumps(shorten(numbers), ensure_ascii=False)}\n"


@pytest.mark.parametrize(
    ("topic", "name"), [(topic, name) for topic, names in SITUATIONS.items() for name in names]
)
def test_situation(topic: str, name: str, tmp_path: Path) -> None:
    situation = SITUATIONS[topic][name]
    folder = write_sweep(tmp_path / "sweep", situation.rows)
    if situation.config:
        with Store(folder) as store:
            store.write_config(dict(situation.config))
    said = "".join(tell(gather([read_sweep(folder)]), situation))
    compare(f"{topic}/{name}.txt", said)


LEGEND = re.compile("  Speed: the time of| ─+$")
"""Lines of every comparison; tests/golden/compare/everything.text has them once."""


@pytest.fixture
def pair(name: str, tmp_path: Path, monkeypatch: Patch) -> Comparison:
    """A comparison whose sweeps are in the current folder."""
    monkeypatch.chdir(tmp_path)
    for sweep, rows in COMPARISONS[name].sweeps.items():
        write_sweep(Path(sweep), rows)
    return COMPARISONS[name]


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparison(name: str, pair: Comparison, capsys: Capture) -> None:
    code = compare_sweeps([*pair.command.split(), "--full"])
    out, err = capsys.readouterr()
    lines = [pair.about, f"$ python -m bench.compare {pair.command}"]
    lines += [line for line in f"{out}{err}".splitlines() if line and not LEGEND.match(line)]
    compare(f"compare/{name}.txt", "\n".join([*lines, f"rc {code}", ""]))


FORMATS_OF = {
    "everything": "text screen md json",
    "axis": "screen json",
    "equal to the last digit": "screen",
}


@pytest.mark.parametrize("name", FORMATS_OF)
def test_comparison_formats(name: str, pair: Comparison, capsys: Capture) -> None:
    for format in FORMATS_OF[name].split():
        kind = {"text": ["--full"], "screen": []}.get(format, ["--format", format])
        assert compare_sweeps([*pair.command.split(), *kind]) == 0
        said = capsys.readouterr().out
        compare(f"compare/{name}.{format}", lay_out_lines(said) if format == "json" else said)


WHY = {
    "batch-size-512": "--where batch_size=512",
    "batch-size-128": "--where batch_size=128 --from fp32 --to bf16-amp --full",
    "batch-size-128-fp16": "--where batch_size=128 --from fp32 --to fp16",
    "fp16-bf16-amp": "--axis precision fp16 bf16-amp --where batch_size=512 --full",
}


@pytest.mark.parametrize("name", WHY)
def test_why(name: str, monkeypatch: Patch, capsys: Capture) -> None:
    """Of the committed profiles of an H100."""
    monkeypatch.chdir(ROOT)
    folder = RESULTS["nvidia-h100-80gb-hbm3-20261122-113040"].relative_to(ROOT)
    assert explain([str(folder), *WHY[name].split()]) == 0
    compare(f"why/{name}.txt", f"$ python -m bench.why {WHY[name]}\n{capsys.readouterr().out}")


def lay_out_lines(text: str) -> str:
    """JSON in a line an element of its lists, without what is empty."""
    lines = []
    for key, value in json.loads(text).items():
        for name, part in value.items() if isinstance(value, dict) else [("", value)]:
            parts = part if isinstance(part, list) else [part]
            lines += [
                f"{key} {name} {json.dumps(shorten(one), ensure_ascii=False)}" for one in parts
            ]
    return "\n".join([*lines, ""])


# ------------------------------------------------------------------------------- whole reports

CARDS = ("card-1", "card-2", "card-3")

REPORTS: dict[str, tuple[tuple[str, ...], str]] = {
    "made-up": (("made-up",), "text screen md latex json"),
    "quick": (("quick",), "text screen md json"),
    "reference": ((), "text screen"),
    "h200-lab": ((), "screen"),
    "card-1": (CARDS[:1], "opening"),
    "cards": (CARDS, "screen"),
    "switches": (("switches",), "opening screen"),
    "recommended": (("recommended",), "text screen"),
    "fit": (("fit",), "text screen"),
    "fit-and-scaling": (("fit", "scaling"), "screen"),
    "profiled": (("profiled",), "text screen"),
    "gpus": (("gpus",), "text screen"),
    **dict.fromkeys(RESULTS, ((), "screen")),
    "cpu-epyc-20261120": ((), "text screen"),
}
"""The planted sweeps of each, or none of a committed one, and the formats that are kept of it."""


@pytest.fixture(scope="module")
def reports(planted: Folders) -> Callable[[str], Report]:
    """Of each name its report, made once, in the folder that its commands start from."""
    made: dict[str, Report] = {}

    def make(name: str) -> Report:
        if name not in made:
            committed = {**RESULTS, "reference": REFERENCE, LAB.stem: LAB}
            folders = [planted[part] for part in REPORTS[name][0]] or [committed[name]]
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(ROOT if name in {**RESULTS, LAB.stem: LAB} else folders[0].parent)
                asked = [path.relative_to(Path.cwd()) for path in folders]
                made[name] = build(read_sweeps(asked), read_sweep(REFERENCE))
                assert made[name].next_step  # which names the folder from here
        return made[name]

    return make


def lay_out_json(report: Report) -> str:
    """A report's JSON in a line a row, an effect's metric or a case, without what is empty."""
    document = json.loads(write_json(report))
    document |= {"tables": [], "effects": [], "cases": []} | {
        "tables": [
            line
            for table in document["tables"]
            for line in (
                {key: table[key] for key in ("name", "question", "level", "groups", "words")},
                [head["name"] for head in table["heads"]],
                *([cell["value"] for cell in row] for row in table["rows"]),
            )
        ],
        "effects": [
            [effect["axis"], effect["before"], effect["after"], name, numbers]
            for effect in document["effects"]
            for name, numbers in effect["metrics"].items()
        ],
        "columns": [[*document["columns"]]],
    }
    first, *others = cases = [*json.loads(write_json(report))["cases"]]
    alike = {key for key in first if all(case[key] == first[key] for case in others)}
    document["cases"] = [{key: case[key] for key in case if key not in alike} for case in cases]
    document["all cases"] = {key: first[key] for key in sorted(alike)}
    lines = []
    for key, value in document.items():
        parts = value if isinstance(value, list) else [value]
        lines += [f"{key}:", *(json.dumps(shorten(part), ensure_ascii=False) for part in parts)]
    return "\n".join(lines) + "\n"


def cut_tables(report: Report) -> Made:
    """A report with its first two tables only."""
    parts = {field.name: getattr(report, field.name) for field in fields(Made)}
    return Made(**parts | {"tables": report.tables[:2]})


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": lambda report: render(report, full=True),
    "opening": lambda report: render(cut_tables(report), full=True),
    "screen": render,
    "md": render_markdown,
    "latex": render_latex,
    "json": lay_out_json,
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, reports: Callable[[str], Report]) -> None:
    for format in REPORTS[name][1].split():
        compare(f"reports/{name}.{format}", FORMATS[format](reports(name)))


def test_a_screen_lays_out_no_more_than_it_shows() -> None:
    report = build([read_sweep(REFERENCE)])
    render(report)
    assert [table.name for table in report.opening] == ["times", "costs"]
    assert not {"tables", "notes", "environments"} & {*vars(report)}


@pytest.mark.parametrize("width", ["40", ""])
@pytest.mark.parametrize("name", REPORTS)
def test_every_screen_fits(
    name: str, width: str, reports: Callable[[str], Report], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    said = render(reports(name))
    lines = said.splitlines()
    assert max(map(cell_len, lines)) <= int(width or WIDTH)
    assert not JARGON.search(said)
    assert "--full" in said


def split_row(line: str) -> list[str]:
    """The cells of a line of a Markdown table, as a reader sees them."""
    cells = re.split(r"(?<!\\)\|", line)[1:-1]
    return [re.sub(r"\\(.)", r"\1", html.unescape(cell)).strip() for cell in cells]


@pytest.mark.parametrize("name", REPORTS)
def test_every_format_has_the_cells(name: str, reports: Callable[[str], Report]) -> None:
    """Markdown says each row as the report has it, and LaTeX and JSON have as many."""
    report = reports(name)
    said = [split_row(line) for line in render_markdown(report).splitlines() if line[:1] == "|"]
    rows = [[clean(cell.text) for cell in row] for table in report.tables for row in table.rows]
    assert [row for row in rows if row not in said] == []
    assert render_latex(report).count(r" \\" + "\n") >= len(rows)
    tables = json.loads(write_json(report))["tables"]
    assert [[cell["text"] for cell in row] for table in tables for row in table["rows"]] == [
        [cell.text for cell in row] for table in report.tables for row in table.rows
    ]


def test_every_text_is_compared() -> None:
    names = {f"{topic}/{name}.txt" for topic, names in SITUATIONS.items() for name in names}
    names |= {f"compare/{name}.txt" for name in COMPARISONS} | {f"why/{name}.txt" for name in WHY}
    names |= {
        f"compare/{name}.{format}" for name, of in FORMATS_OF.items() for format in of.split()
    }
    names |= {
        f"reports/{name}.{format}" for name, (_, of) in REPORTS.items() for format in of.split()
    }
    names.add("cards/oddities.md")  # of tests/test_cards.py
    files = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.*")}
    assert files == {name.replace(" ", "-") for name in names}
