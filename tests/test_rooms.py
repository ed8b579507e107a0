"""The rooms of CONTRIBUTING: each imports only from those that its table has above it.

Commands are the doors of some: no module imports one, and there is little in them.
"""

from __future__ import annotations

import ast
import re
from functools import cache
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


@cache
def imports() -> list[tuple[str, str, set[str]]]:
    """Of each import of bench, those for types alone too: the file, its room, and the modules."""
    found = []
    for file in sorted((ROOT / "bench").rglob("*.py")):
        place = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text())):
            names = set[str]()
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{one.name}" for one in node.names} | {str(node.module)}
            elif isinstance(node, ast.Import):
                names = {one.name for one in node.names}
            modules = {name for name in names if name.startswith("bench.")}
            if modules:
                found.append((str(place), place.parts[1].removesuffix(".py"), modules))
    return found


@cache
def edges() -> set[tuple[str, str, str]]:
    """Which file of which room imports which other room."""
    found = {
        (file, room, name.split(".")[1]) for file, room, modules in imports() for name in modules
    }
    return {(file, room, other) for file, room, other in found if other != room}


def test_every_room_has_its_row() -> None:
    named = [room for row in table() for room in row]
    assert len(named) == len(set(named))
    assert set(named) == rooms() - {"__init__"}


def test_rooms_import_from_those_above_them() -> None:
    order = {room: at for at, row in enumerate(table()) for room in row}
    upward = [
        f"{file} imports {other}"
        for file, room, other in edges()
        if room in order and order[other] > order[room]
    ]
    assert upward == []


def test_no_room_goes_round_in_a_circle() -> None:
    """Rooms of one row may import each other, but not in a circle."""
    below = {room: {other for _, one, other in edges() if one == room} for room in rooms()}
    while leaves := [room for room, others in below.items() if not others & below.keys()]:
        for room in leaves:
            del below[room]
    assert below == {}


def test_no_module_imports_a_command() -> None:
    """What commands share lies below them."""
    commands = {
        f"bench.{name}" for name in (*DOORS, "overhead") if not (ROOT / "bench" / name).is_dir()
    }
    assert [
        file
        for file, _, modules in imports()
        if modules & commands or any(name.endswith(".__main__") for name in modules)
    ] == []


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


CROSSING = (
    "asv_site bad_input chaos commands examples extension fuzz golden input machines "
    "oracle queues readme rooms signed_losses"
)
"""Tests of what several rooms do together."""


def test_tests_are_named_after_what_they_test() -> None:
    """A folder after its room, and a file beside the folders after a room or a module of one."""
    modules = rooms() | {file.stem for file in (ROOT / "bench").rglob("*.py")}
    tests = ROOT / "tests"
    lost = [
        str(file.relative_to(ROOT))
        for file in tests.rglob("test_*.py")
        for name in [file.stem.removeprefix("test_") if file.parent == tests else file.parent.name]
        if name not in modules | {*CROSSING.split()}
    ]
    assert lost == []
