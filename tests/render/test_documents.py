"""Cells of Markdown and LaTeX, whatever is in them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from bench.render import documents


@given(st.text())
def test_markdown_cells_stay_one_cell(text: str) -> None:
    line = documents._row(iter([text, "next"]))
    assert "\n" not in line
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == 3


@given(st.text())
def test_latex_leaves_no_special_character_bare(text: str) -> None:
    escaped = documents.escape_latex(text)
    bare = re.sub(r"\\(?:[&%$#_{}]|text\w+\{\})|\$\\\w+\$|\$\^\\circ\$|\{\[\}|\{\]\}", "", escaped)
    assert not set(bare) & set("&%$#_{}~^\\<>|[]")
    assert "\n" not in escaped
