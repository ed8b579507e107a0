"""The layers of bench: each imports only from those before it, and commands are above them all."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from bench.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
LAYERS = [
    "base",
    "networks",
    "schema",
    "profile",
    "machine",
    "training",
    "results",
    "workers",
    "sweep",
    "answers",
]
SHARED = {
    "document": "the answer of a command, before it has a format",
    "options": "the command line of a command that trains, and the cases that it asks for",
    "effects": "what a change does: found in `results`, and told in `answers`",
    "command": "a user's command: as what is trained in `schema`, and its run in `workers`",
    "loop": "the loop of a sweep over its cases, and of a training over its steps",
    "table": "a table as CSV in `results`, and as what is shown in `answers`",
}
"""Names of several modules, and what each means in all of them."""

REGISTRY = "bench.base.origin"
"""It names the executors, of which rows tell, for `bench.workers.executors` to load."""

DOORS = [name for names in COMMANDS.values() for name in names]
TELLING = r"main$|build_parser$|_?(read|parse|choose|print|show|write)(_|$)"
"""The names of functions that read arguments, or show what was found."""


def read_imports() -> dict[str, set[str]]:
    """The modules of bench that each of them imports, at any time: within functions, for types
    alone, and by a name such as ``bench.networks.dpn:dpn92``."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in (ROOT / "bench").rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names = found.setdefault(module, set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}: import by the whole name"
                for one in node.names:
                    whole = f"{node.module}.{one.name}"
                    names.add(whole if whole in files else str(node.module))
            elif isinstance(node, ast.Import):
                names.update(one.name for one in node.names)
            elif isinstance(node, ast.Constant) and module != REGISTRY:
                names.add(str(node.value).partition(":")[0] if ":" in str(node.value) else "")
        names.intersection_update(files)
    return found


def find_layer(module: str) -> int:
    """The place of a module's layer; commands are above them, and what lists them on top."""
    names = [*module.split("."), ""]
    if names[1] in LAYERS and names[-2] != "__main__":
        return LAYERS.index(names[1])
    return len(LAYERS) + (module in ("bench", "bench.__main__"))


def test_imports_point_one_way() -> None:
    assert [
        f"{module} imports {other}"
        for module, others in read_imports().items()
        for other in others - {"bench"}
        if find_layer(other) > find_layer(module)
    ] == []


def test_a_name_means_one_thing() -> None:
    """No class, and no public constant, has the name of one in another module."""
    places: dict[str, set[str]] = {}
    for file in (ROOT / "bench").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            named = [node] if isinstance(node, ast.ClassDef) else []
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets += [node.target] if isinstance(node, ast.AnnAssign) else []
            parts = [p for t in targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
            names = [one.name for one in named] + [p.id for p in parts if isinstance(p, ast.Name)]
            for name in names:
                if not name.startswith("_"):
                    places.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_no_name_says_only_that_something_was_said() -> None:
    for file in [*ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        assert not names & {"told", "said", "held"}, f"{file}: name what it holds"


def test_a_module_s_name_stands_twice_only_where_its_folder_says_of_what_it_is() -> None:
    files = [f for f in (ROOT / "bench").rglob("*.py") if not f.name.startswith("__")]
    names = Counter(file.stem for file in files)
    assert {name for name, number in names.items() if number > 1} == SHARED.keys()


def test_no_module_is_in_a_circle() -> None:
    """Not even within a layer."""
    left = {module: others - {module, "bench"} for module, others in read_imports().items()}
    while leaves := [module for module, others in left.items() if not others & left.keys()]:
        for module in leaves:
            del left[module]
    assert left == {}


def test_a_command_parses_calls_and_prints() -> None:
    """All else is in the modules beside it: every class, and functions of other names."""
    doors = [ROOT / "bench" / name / "__main__.py" for name in DOORS]
    wrong = [
        f"{door.parent.name}: {node.name}"
        for door in doors
        if door.is_file()
        for node in ast.parse(door.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not re.match(TELLING, node.name)
    ]
    assert wrong == []
