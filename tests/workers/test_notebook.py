"""A function of a notebook is measured as it is now, whichever cells made it so, or refused."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.api import _name_factory
from bench.base.errors import UsageError
from bench.sweep.options import parse_arguments
from bench.workers.notebook import write_module

Patch = pytest.MonkeyPatch

NN = "from torch import nn\n"

CARRIED: dict[str, list[str]] = {
    "edited helper": [NN + "def head(): return nn.Linear(3, 1)", "def build(): return head()",
                      "def head(): return nn.Linear(3, 7)"],
    "cell put back": [NN + "def head(): return nn.Linear(3, 1)",
                      "def head(): return nn.Linear(3, 2)", "def build(): return head()",
                      "def head(): return nn.Linear(3, 1)"],
    "mutated": [NN + "width, layers = 4, [1]", "width *= 4; layers.append(5)",
                "def build(): return nn.Linear(width, sum(layers))"],
    "defaults": [NN + "w = 4", "def build(n=w, *, m=w): return nn.Linear(n, m)", "w = 9"],
    "class": [NN + "K = 3\nclass Base(nn.Linear):\n    k = K\n"
              "    def __init__(self): super().__init__(self.k, K)",
              "class Net(Base): pass", "def build(): return Net()", "K = 5; Base.k = 6"],
    "dataclass": ["from dataclasses import dataclass",
                  "@dataclass\nclass Config:\n    width: int = 3",
                  NN + "config = Config(); config.width = 6",
                  "def build(): return nn.Linear(config.width, 1)"],
    "star": ["from torch.nn import *\nfrom math import *",
             "def build(): return Sequential(Linear(3, int(sqrt(16))))"],
    "decorated": [NN + "from functools import cache\n@cache\ndef width(): return 5",
                  "def build(): return nn.Linear(width(), 1)"],
    "lambda": [NN + "head = lambda n=2: nn.Linear(n, 3)", "def build(): return head(4)"],
    "loop": [NN + "for w in (2, 6):\n    def build(): return nn.Linear(w, 1)"],
    "partial": [NN + "from functools import partial\nhead = partial(nn.Linear, bias=False)",
                "def build(): return head(3, 2)"],
    "torch": [NN + "import torch\nkind, place = torch.float64, torch.device('cpu')",
              "def build(): return nn.Linear(3, 2, dtype=kind, device=place)"],
    "dotted": ["import torch, torch.utils.checkpoint",
               "def build(): return torch.utils.checkpoint and torch.nn.Linear(2, 2)"],
    "magics": ["%cd -q .", NN + "import asyncio\nawait asyncio.sleep(0)\n"
               "def build(): return nn.Linear(2, 3)"],
    "older": [NN + "def head(): return nn.Linear(1, 2)\nold = head",
              "def head(): return nn.Linear(5, 5)",
              "def build(): return nn.Sequential(old(), head())"],
    "each other": [NN + "def a(n): return nn.Linear(n, 1) if n < 2 else b(n - 1)",
                   "def b(n): return a(n)", "def build(): return a(3)"],
    "a local name": [NN + "import torch\nx = torch.ones(3)",
                     "def build():\n    x = 3\n    return nn.Linear(x, 1)"],
    "a class": [NN + "class build(nn.Linear):\n    def __init__(self): super().__init__(2, 2)"],
}  # fmt: skip

REFUSED: dict[str, tuple[list[str], str, str, str]] = {
    "tensor": (["import torch\nweights = torch.ones(3)", "def build(): return weights"],
               "weights", "Tensor", ""),
    "closure": (["def make(n):\n    def f(): return n\n    return f\nhead = make(3)",
                 "def build(): return head()"], "head", "function",
                 " (it was made within another function)"),
    "network": ([NN + "body = nn.Linear(2, 2)", "def build(): return body"], "body", "Linear", ""),
    "bound method": ([NN + "class F:\n    def head(self): return 1\nh = F().head",
                      "def build(): return h()"], "h", "method", ""),
    "patched": ([NN + "class Net(nn.Linear):\n    def forward(self, x): return x",
                 "def f(self, x): return 2 * x\nNet.forward = f\ndef build(): return Net(2, 2)"],
                "Net", "type", " (it was edited or patched since, or is in a magic cell)"),
    "lock": (["import threading\nlock = threading.Lock()", "def build(): return lock"],
             "lock", "lock", ""),
    "large": (["table = list(range(100_000))", "def build(): return table"], "table", "list",
               " (it is too large)"),
}  # fmt: skip


def run(cells: list[str], monkeypatch: Patch) -> dict[str, Any]:
    """Run the cells as a notebook does, and return its names."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    monkeypatch.setitem(sys.modules, "__main__", shell.user_module)
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    names: dict[str, Any] = shell.user_ns
    return names


def rebuild(names: dict[str, Any]) -> Any:
    space: dict[str, Any] = {"__name__": "own"}
    text = write_module(names["build"], names)
    exec(compile(text, "own.py", "exec", dont_inherit=True), space)
    return space["build"]


@pytest.mark.parametrize("way", CARRIED)
def test_what_is_measured_is_what_the_notebook_has(way: str, monkeypatch: Patch) -> None:
    names = run(CARRIED[way], monkeypatch)
    assert str(rebuild(names)()) == str(names["build"]())
    assert write_module(names["build"], names) == write_module(names["build"], names)


@pytest.mark.parametrize("way", REFUSED)
def test_what_cannot_be_carried_is_refused_by_its_name(way: str, monkeypatch: Patch) -> None:
    cells, variable, kind, reason = REFUSED[way]
    names = run(cells, monkeypatch)
    with pytest.raises(UsageError) as raised:
        write_module(names["build"], names)
    assert str(raised.value) == (
        f"the variable '{variable}' of the notebook, of type {kind}, cannot be carried to another "
        f"process{reason}; make it within the function that uses it, or import it from a module"
    )


def test_a_module_that_was_edited_and_not_reloaded_is_refused(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "edited_parts.py"
    first = f"{NN}WIDTH = 2\ndef head(): return nn.Linear(WIDTH, 1)\n"
    for import_, use in (
        ("from edited_parts import head", "head()"),
        ("import edited_parts", "edited_parts.head()"),
    ):
        file.write_text(first)
        sys.modules.pop("edited_parts", None)
        importlib.invalidate_caches()
        names = run([import_, f"def build(): return {use}"], monkeypatch)
        assert str(rebuild(names)()) == str(names["build"]())
        for edited in (first.replace(", 1", ", 8"), first.replace("WIDTH = 2", "WIDTH = 4")):
            file.write_text(edited)
            with pytest.raises(UsageError) as raised:
                write_module(names["build"], names)
            what = "it was edited" if ", 8" in edited else "its WIDTH is another there"
            assert str(raised.value).endswith(
                f" of the notebook is from {file}, which is not what was imported ({what}): run "
                "importlib.reload(edited_parts) and the cells that import from it"
            )
    sys.modules.pop("edited_parts")


def test_commands_that_are_printed_to_go_on_find_the_function(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    names = run(CARRIED["mutated"], monkeypatch)
    name = _name_factory("model", names["build"], tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    options = parse_arguments(["--model", name, "--out", str(tmp_path)])
    assert options.axes["model"] == [name]
    assert sys.path[0] == str(tmp_path)
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(tmp_path), "before"])
