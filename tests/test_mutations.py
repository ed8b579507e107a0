"""The faults of mutations.toml are still faults of this code; `make mutations` plants them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutate import Mutation, read_mutations

ROOT = Path(__file__).parents[1]
BY_FILE: dict[str, list[Mutation]] = {}
for one in read_mutations():
    BY_FILE.setdefault(one.file, []).append(one)


@pytest.mark.parametrize("file", BY_FILE)
def test_each_fault_is_of_one_place_of_its_file(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    for one in BY_FILE[file]:
        assert text.count(one.old) == 1, one.why
        assert one.old != one.new, one.why
        ast.parse(one.plant(text))
        assert len(list(one.choose(ROOT))) > 1, f"{one.why}: no tests are named as its room"
        assert all(any(ROOT.glob(f"tests/{glob}")) for glob in one.tests), one.tests
