"""What is said of planted and committed sweeps, compared whole with what was kept.

UPDATE_SNAPSHOTS=1 writes it anew; read the diff.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.questions.answers import answer
from bench.questions.material import Material, gather
from bench.questions.notes import describe_constants, write_notes
from bench.questions.notices import warn
from bench.render.model import Document
from bench.render.text import render
from bench.report.document import SECTIONS
from bench.report.jsonfile import describe_effect
from bench.store.writer import Store
from bench.study.sweeps import read_sweep
from tests.planted.records import write_sweep
from tests.planted.situations import SITUATIONS, Situation

GOLDEN = Path(__file__).with_name("golden")


def compare(name: str, said: str) -> None:
    """Hold a text against the file that has it."""
    file = GOLDEN / name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(said, encoding="utf-8")
    assert said == file.read_text(encoding="utf-8")


def shorten(value: Any) -> Any:
    """Without what is empty, and of numbers the digits that no order of additions changes."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        kept = {key: shorten(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part not in (None, "", [], {})}
    return [*map(shorten, value)] if isinstance(value, list | tuple) else value


def tell(found: Material, situation: Situation) -> Iterator[str]:
    """The parts of a report that tell of a situation."""
    parts = situation.parts
    document = Document(
        situation.about,
        "",
        tuple(describe_constants(found.cases, found.varying)) if "constants" in parts else (),
        tuple(answer(found)) if "answers" in parts else (),
        (),
        tuple(t for section in SECTIONS if section.name in parts for t in section.tabulate(found)),
        tuple(write_notes(found.cases, found.varying)) if "notes" in parts else (),
        "",
        None,
    )
    yield render(document, full=True).strip() + "\n"
    if "doubts" in parts:
        for notice in warn(found.records, found.cases, found.everything, found.sweeps):
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
    compare(f"{topic}/{name.replace(' ', '-')}.txt", said)
