"""`python -m bench`: list the commands, each with one line, or run one of them.

A line is the first line of the command's own docstring, read without importing the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from bench.base.errors import UsageError, nearest
from bench.base.processes import leave
from bench.schema.flags import Parser, command

COMMANDS = {
    "Measure": ("advise", "sweep", "search", "fit", "scales", "card"),
    "Read the results": ("report", "compare", "why", "cards", "validate"),
    "Check the machine and the training": ("doctor", "check"),
    "Publish": ("export", "publish"),
}
"""The user-facing commands, by purpose. To add one, add the name of its module."""

_ROOT = Path(__file__).parent


def read_line(command: str) -> str:
    """Return what a command does, as the first line of its docstring says after its name."""
    file = _ROOT / f"{command}.py"
    if not file.is_file():
        file = _ROOT / command / "__main__.py"
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.partition("`: ")[2].rstrip('."')


def write_list() -> Iterator[str]:
    yield "usage: python -m bench.COMMAND [--help], or precision-bench COMMAND [--help]"
    width = max(len(name) for names in COMMANDS.values() for name in names)
    for purpose, names in COMMANDS.items():
        yield f"\n{purpose}:"
        yield from (f"  {name:<{width}}  {read_line(name)}" for name in names)
    yield "\nStart with:  python -m bench.doctor, then python -m bench.sweep"


@command
def main(argv: Sequence[str]) -> int:
    """List the commands, or run the one that is named. Returns 0, 2 for an unknown one, or what
    the command returns."""
    if argv[:1] == ["--version"]:
        Parser(prog="python -m bench").parse(argv)
    if argv and argv[0] not in ("-h", "--help"):
        names = [name for names in COMMANDS.values() for name in names]
        name = argv[0].removeprefix("bench.")
        if name not in names:
            raise UsageError(f"unknown command {argv[0]!r}; {nearest(name, names)}")
        module = import_module(f"bench.{name}")
        if hasattr(module, "__path__"):
            module = import_module(f"bench.{name}.__main__")
        return int(module.main(argv[1:]))
    print("\n".join(write_list()))
    return 0


def run() -> NoReturn:
    """Run as a program: that of ``python -m bench``, and precision-bench, which pip installs."""
    leave(main())


if __name__ == "__main__":
    run()
