"""What the site does with a page: links to files outside of docs/ lead to the repository, flags are
not broken, and what the theme would load from elsewhere stands on the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.js")


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    home = f"{config['extra']['repository']}/blob/main/"
    return re.sub(r"\]\(\.\./(?=[^)]+\))", f"]({home}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    def mark(code: re.Match[str]) -> str:
        return re.sub(r"(?<![\w-])--[a-z][\w-]*", r'<span class="flag">\g<0></span>', code[0])

    return re.sub("<code>.*?</code>", mark, html, flags=re.DOTALL)


def on_post_page(output: str, **_: Any) -> str:
    script = f"<script>{_WORKER.read_text(encoding='utf-8')}</script>"
    return re.sub(r'<script src="[^"]*/iframe-worker/shim"></script>', lambda _: script, output)
