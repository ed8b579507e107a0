"""The rooms of CONTRIBUTING: each imports only from those that its table has above it.

Commands are the doors of some: no module imports one, and there is little in them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from bench.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
DOORS = [name for names in COMMANDS.values() for name in names]
TELLING = r"main$|build_parser$|_?(read|parse|choose|print|show|write)(_|$)"
"""The names of functions that read arguments, or show what was found."""


def table() -> list[list[str]]:
    """The rooms of each row of CONTRIBUTING's table, from the ground up."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = text.partition("## The rooms")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", rows, re.MULTILINE)
    return [re.findall(r"`([a-z_]+)(?:\.py|/)`", cell) for cell in cells]


def rooms() -> set[str]:
    """Files and packages of bench."""
    places = (ROOT / "bench").iterdir()
    return {p.stem for p in places if p.suffix == ".py" or (p / "__init__.py").is_file()}


def imports(room: str) -> Iterator[tuple[str, str]]:
    """What a room's files import of other rooms: file, room. Imports for types alone count too."""
    place = ROOT / "bench" / room
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "bench":
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bench."):
                names = [str(node.module).split(".")[1]]
            else:
                continue
            yield from ((str(file.relative_to(ROOT)), name) for name in names if name != room)


def test_every_room_has_its_row() -> None:
    named = [room for row in table() for room in row]
    assert len(named) == len(set(named))
    assert set(named) == rooms() - {"__init__"}


def test_rooms_import_from_those_above_them() -> None:
    order = {room: at for at, row in enumerate(table()) for room in row}
    upward = [
        f"{file} imports {other}"
        for room in order
        for file, other in imports(room)
        if order[other] > order[room]
    ]
    assert upward == []


def test_no_room_goes_round_in_a_circle() -> None:
    """Rooms of one row may import each other, but not in a circle."""
    edges = {room: {other for _, other in imports(room)} for room in rooms() - {"__init__"}}
    while leaves := [room for room, others in edges.items() if not others & edges.keys()]:
        for room in leaves:
            del edges[room]
    assert edges == {}


def test_no_module_imports_a_command() -> None:
    """What commands share lies below them."""
    commands = {
        f"bench.{name}" for name in (*DOORS, "overhead") if not (ROOT / "bench" / name).is_dir()
    }
    wrong = []
    for file in sorted((ROOT / "bench").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            if any(name.endswith(".__main__") or name in commands for name in names):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert wrong == []


def test_a_command_parses_calls_and_prints() -> None:
    """All else is in the modules of its room: every class, and functions of other names."""
    doors = [ROOT / "bench" / name / "__main__.py" for name in DOORS]
    wrong = [
        f"{door.parent.name}: {node.name}"
        for door in doors
        if door.is_file()
        for node in ast.parse(door.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not re.match(TELLING, node.name)
    ]
    assert wrong == []
