"""What the site does with a page: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    home = f"{config['repo_url']}/blob/main/"
    return re.sub(r"\]\(\.\./(?=[^)]+\))", f"]({home}", markdown)
