"""The examples in docstrings are run."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [file for file in sorted((ROOT / "bench").rglob("*.py")) if ">>> " in file.read_text()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_an_example_gives_what_it_says(file: Path) -> None:
    parts = file.relative_to(ROOT).with_suffix("").parts
    module = import_module(".".join(part for part in parts if part != "__init__"))
    ran = doctest.testmod(module)
    assert ran.attempted
    assert not ran.failed
