"""The source of a function of a notebook, as a module that another process can import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def write_module(function: Callable[..., Any]) -> tuple[str, str]:
    """Return a module with the imports, functions, classes and constants of the notebook up to the
    cell that defines ``function``, or of the script that does, and a hash of it. What else the
    function uses, such as a tensor, is missed when it is called."""
    main, nodes = vars(sys.modules["__main__"]), list[ast.stmt]()
    cells = [*dict.fromkeys(main.get("In") or [Path(main["__file__"]).read_text(encoding="utf-8")])]
    starts = f"def {function.__name__}(", f"class {function.__name__}"
    last = max(n for n, cell in enumerate(cells) if any(start in cell for start in starts))
    for cell in cells[: last + 1]:
        with suppress(SyntaxError):  # a magic command
            nodes += ast.parse(cell).body
    parts = [
        ast.unparse(node)
        for node in nodes
        if isinstance(node, _KEPT)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant))
    ]
    text = "\n\n\n".join(parts) + "\n"
    return text, sha256(text.encode()).hexdigest()[:8]
