"""Command-line helpers: one-line errors, a flag for every axis, and help that fits a screen."""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

from bench.base.errors import StoreError, T, UsageError, choose, nearest
from bench.base.installation import DISTRIBUTION, find_version
from bench.base.processes import provide_home
from bench.base.text import (
    capitalize,
    clean,
    read_number,
    read_percent,
    read_whole,
    replace_file,
)
from bench.networks.data import SYNTHETIC
from bench.networks.models import LENGTHS
from bench.networks.workloads import IMAGES
from bench.schema.axis import Value, axis_flag
from bench.schema.case import (
    AXES,
    FOLLOWS,
    PARTS,
    SAME_QUESTION,
    SWITCHES,
    SYNTHETIC_AXES,
    UNFITTED,
)
from bench.schema.command import MEANT, combine_vary, place_varied
from bench.schema.grid import parse_values

_ALL = "--help-all"

OF_SWEEPS = {
    **dict.fromkeys(
        ("command", "vary"),
        "only bench.sweep, bench.fit, bench.advise and bench.search run a command",
    ),
    "power_limit": "only bench.sweep, bench.advise and bench.search set one",
}
"""Axes for which a parser has no flags that measures no sweep, and why."""

OF_OTHER_IMAGES = dict.fromkeys(
    SYNTHETIC_AXES, "its images are of 3x32x32 or a --workload's, unlike those of bench.sweep"
)
"""Axes that a command with images of its own has no flag for, and why."""

ABSENT: Mapping[str, Mapping[str, str]] = {
    "advise": {
        **dict.fromkeys(
            ("epochs", *SAME_QUESTION, "checkpoint"), "it decides how much is measured"
        ),
        **dict.fromkeys(("parallel", *FOLLOWS["parallel"]), "it advises on training on one GPU"),
    },
    "search": {
        **dict.fromkeys(PARTS, "trials train whole epochs"),
        "checkpoint": "a trial that was interrupted begins anew",
        "profile": "bench.sweep profiles the settings that were found",
        **dict.fromkeys(("parallel", *FOLLOWS["parallel"]), "each trial trains on one GPU"),
    },
    "fit": dict.fromkeys(("batch_size", *UNFITTED), "it chooses what its runs measure"),
}
"""Axes that commands which write a sweep's rows have no flag for, and why; bench.sweep has all."""


def describe(docstring: str | None) -> str:
    """Return a command's help text: its module's docstring without the command and backticks.

    >>> describe("`python -m bench.thing`: do ``this``.")
    'Do this.'
    """
    text = re.sub(r"^`[^`]*`: ", "", docstring or "").replace("`", "")
    return capitalize(text)


class AdvancedHelp(str):
    """The help of a flag that only ``--help-all`` shows."""


class _Layout(argparse.HelpFormatter):
    """Help in which a flag that takes several values is written ``--flag VALUE …``, and that keeps
    lists, whose lines are indented, as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)  # room for --grad-compression [VALUE …]

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs in ("+", "*") and isinstance(action.metavar, str):
            return f"{action.metavar} …" if action.nargs == "+" else f"[{action.metavar} …]"
        return super()._format_args(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n  " in text else super()._fill_text(text, width, indent)


class _Short(_Layout):
    """A `_Layout` without the flags whose help is `AdvancedHelp`."""

    def add_argument(self, action: argparse.Action) -> None:
        if not isinstance(action.help, AdvancedHelp):
            super().add_argument(action)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.formatter_class = _Layout
        parser.print_help()
        parser.exit()


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(DISTRIBUTION, find_version(DISTRIBUTION) or "of a checkout that is not installed")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises `UsageError` instead of printing its whole usage.

    ``--help`` leaves out flags whose help is `AdvancedHelp`. Flags cannot be abbreviated. The axes
    in ``absent`` have no flag, and are refused with the reason given there. ``suggest`` returns
    what to give where an argument is missing.
    """

    def __init__(
        self,
        absent: Mapping[str, str] | None = None,
        suggest: Callable[[], str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**{"formatter_class": _Short, "allow_abbrev": False, **settings})
        self.absent, self._suggest = absent or {}, suggest
        self.add_argument("--version", action=_Version, nargs=0, help="show the version, and exit")

    def error(self, message: str) -> NoReturn:
        if self._suggest and " are required: " in message:
            message += f"; {self._suggest()}"
        raise UsageError(f"{message}; see {self._whole_help}")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``; ``invocation`` is the whole command line. Raises UsageError: a flag is
        unknown (the message names the nearest), ``absent``, or lacks its value."""
        words, command = {word.partition("=")[0] for word in argv}, self.prog.split()[-1]
        for flag, why in ((axis_flag(name), why) for name, why in self.absent.items()):
            # bench.check has its own --steps
            if flag in words and flag not in self._option_string_actions:
                raise UsageError(f"{flag}: {command} does not take it, because {why}; leave it out")
        given, unknown = self.parse_known_args(argv)
        if unknown:
            shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
            flags = [flag for action in shown for flag in action.option_strings]
            other = f"{self._whole_help} lists the right ones"
            for before, word in pairwise(argv):
                flag, sign, value = before.partition("=")
                action = self._option_string_actions.get(flag)
                if sign and action and action.nargs in ("+", "*") and word == unknown[0]:
                    raise UsageError(f"{before} {word}: give {flag} {value} {word}")
            if "--command" in flags and unknown[0][:1] != "-":
                other = f"a command stands in quotes after --command; {other}"
            near = nearest(unknown[0], flags, other)
            raise UsageError(f"unknown argument {unknown[0]!r}; {near}")
        given.invocation = spell_command([*self.prog.split(), *argv])
        return given

    @property
    def _whole_help(self) -> str:
        return _ALL if _ALL in self._option_string_actions else "--help"


def spell_command(words: Sequence[str]) -> str:
    """Return words as a shell reads them; one with single quotes stands in double ones if it can.

    >>> print(spell_command(["--command", "sh -c 'python t.py | tee log'"]))
    --command "sh -c 'python t.py | tee log'"
    """
    plain = ("'" in word and not set(word) & {*'"$`\\!'} for word in words)
    return " ".join(
        f'"{word}"' if one else shlex.quote(word) for word, one in zip(words, plain, strict=True)
    )


def join_flags(*parts: Sequence[str]) -> list[str]:
    """Join parts of a command line that begin with flags; the last occurrence of a flag counts.

    >>> join_flags(["--repeats", "1", "--mix"], ["--lr", "1", "2", "--repeats", "3"])
    ['--mix', '--lr', '1', '2', '--repeats', '3']
    >>> join_flags(["--budget=2m", "--mix"], ["--budget", "4m"])
    ['--mix', '--budget', '4m']
    """
    return list(chain.from_iterable(split_flags(chain.from_iterable(parts)).values()))


def change_flags(command: str, flags: Sequence[str]) -> str:
    """Return a command line of a module with ``flags`` in place of its own ones of these names.
    Raises ValueError: a quote is not closed.

    >>> change_flags("python -m bench.sweep --out a --lr 0.1", ["--out", "b"])
    'python -m bench.sweep --lr 0.1 --out b'
    """
    words = shlex.split(command)
    return spell_command([*words[:3], *join_flags(words[3:], flags)])


def split_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Group the words of a command line by flag; each group begins with its flag.

    >>> split_flags(["--lr", "1", "2", "--budget=2m"])
    {'--lr': ['--lr', '1', '2'], '--budget': ['--budget=2m']}
    """
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            found.pop(flag, None)
            values = found[flag] = [word]
        else:
            values.append(word)
    return found


def add_axes(parser: Parser, description: str) -> None:
    """Add a flag for every axis that the parser has; ``--help`` shows only the common ones."""
    axes = {name: axis for name, axis in AXES.items() if name not in parser.absent}
    if not all(axis.common for axis in axes.values()):
        parser.add_argument(
            _ALL, action=_HelpAll, nargs=0, help="show all settings; --help shows the most used"
        )
    group = parser.add_argument_group("axes", description)
    parser.set_defaults(axes=list(axes))
    for name, axis in axes.items():
        text = axis.help.replace("%", "%%")
        group.add_argument(
            axis_flag(name),
            nargs="*" if name in SWITCHES else "+",
            action="append" if name == "vary" else "extend",
            metavar=("NAME VALUE" if name == "vary" else "VALUE"),
            help=text if axis.common else AdvancedHelp(text),
        )


def read_axes(given: argparse.Namespace) -> dict[str, list[Value]]:
    """Return the axes given as flags of `add_axes`. Raises UsageError: they cannot be used."""
    axes: dict[str, list[Value]] = {}
    for name in given.axes:
        texts: list[str] | None = getattr(given, name)
        if name != "vary" and texts is not None:
            parsed = (parse_values(name, text, axis_flag(name)) for text in texts or ["on"])
            axes[name] = [*chain.from_iterable(parsed)]
    if own := getattr(given, "vary", None):
        if "command" not in axes:
            raise UsageError("--vary is for a placeholder in --command; give that too")
        commands = [None if value is None else str(value) for value in axes["command"]]
        varied, commands = place_varied(own, commands)
        axes["command"] = [*commands]
        for name in [name for name in varied if name in AXES and name not in MEANT]:
            if name in axes:
                raise UsageError(f"{axis_flag(name)} and --vary {name} are one axis; give one")
            where, texts = f"--vary {name}", varied.pop(name)
            axes[name] = [*chain.from_iterable(parse_values(name, text, where) for text in texts)]
        if varied:
            axes["vary"] = [*combine_vary(varied)]
    _refuse_brought(axes)
    if axes.keys() & {*SYNTHETIC_AXES}:
        axes.setdefault("dataset", [SYNTHETIC])  # also where a preset names another
    return axes


def _refuse_brought(axes: dict[str, list[Value]]) -> None:
    """Refuse what a workload brings itself, and a model that is one. Raises UsageError."""
    brought, models = ["dataset", *SYNTHETIC_AXES], axes.get("model", [])
    if any(name != IMAGES for name in axes.get("workload", [])):
        flag, brought = "--workload", ["model", *brought]
    elif models and {*models} <= {*LENGTHS}:
        flag = f"--model {models[0]}"
        if axes.get("dataset") == [SYNTHETIC]:  # which it is
            del axes["dataset"]
    else:
        return
    for name in brought:
        if name in axes:
            raise UsageError(
                f"{flag} brings its own {name}; leave out {axis_flag(name)}, or {flag.split()[0]}"
            )


def add_flag(
    group: argparse._ActionsContainer,
    flag: str,
    metavar: str,
    help: str,
    read: Callable[[str, str], Any] | None = None,
    default: Any = None,
    dest: str | None = None,
) -> None:
    """Add a flag with one value, converted by ``read`` from the flag and its text, as `parse_whole`
    and `parse_number` do. An empty text, as of a shell's variable that is not set, is refused."""

    def parse(text: str) -> Any:
        if not text and text != default:
            raise UsageError(f"{flag} '': give {metavar}, or leave out {flag}")
        return read(flag, text) if read else text

    group.add_argument(flag, metavar=metavar, help=help, type=parse, default=default, dest=dest)


def add_filters(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--where``, whose values `bench.results.study.axes.parse_filter` reads."""
    help = f"only these cases, such as {example}"
    parser.add_argument(
        "--where", nargs="+", action="extend", default=[], metavar="AXIS=VALUE", help=help
    )


def add_format(group: argparse._ActionsContainer, what: str = "") -> None:
    """Add ``--format`` of a command that prints text or, for programs, JSON."""
    help = f"{what}text or json (default: text)"
    group.add_argument("--format", default="text", metavar="FORMAT", help=help)


def add_output(parser: argparse.ArgumentParser, formats: str) -> None:
    """Add ``--format``, for `choose_format`, of which help says the ``formats``, and ``-o``, for
    `write_document`."""
    help = f"{formats} (default: that of the file's name, or text)"
    parser.add_argument("--format", metavar="FORMAT", help=help)
    help = "file to write (default: -, the terminal)"
    parser.add_argument(
        "-o", "--output", metavar="FILE", help=help, type=lambda f: None if f == "-" else Path(f)
    )


def choose_format(given: argparse.Namespace, formats: Mapping[str, T]) -> T:
    """Return the value of the format that is asked for, by ``--format`` or the name of the file of
    ``-o``, and set ``given.format`` to its name. Raises UsageError: there is no such format."""
    asked = given.format or (given.output.suffix[1:] if given.output else "")
    also = {"": "text", "txt": "text", "tex": "latex", "markdown": "md"}
    flag = "--format" if given.format else f"-o {given.output}: format"
    given.format = also.get(asked, asked)
    return choose(flag, given.format, formats)


@contextmanager
def writable(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError while writing to a flag's path into a UsageError, or a StoreError if the disk
    is full."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC
        fix = "free some, or choose another place" if full else "choose a place that can be written"
        why = f"{flag} {path}: {error.strerror or error}; {fix}"
        raise (StoreError if full else UsageError)(why) from error


def write_document(document: str, output: Path | None) -> None:
    """Write to the file given by ``-o``, whole or not at all, or to standard output. Raises
    UsageError: the file cannot be written; StoreError: the disk is full."""
    if output is None:
        sys.stdout.write(document)
        return
    with writable("-o", output):
        if output.exists() and not output.is_file():  # a pipe or a device, which stays one
            output.write_text(document, encoding="utf-8")
        else:
            replace_file(output.resolve(), document)


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Make the `main` of a command from a function of its arguments.

    A `UsageError` becomes one line on standard error for each of its arguments, and return code
    2, a `StoreError` return code 1. What the output cannot encode is written plainly. If the reader
    of standard output has gone, as with ``| head``, the command ends without a traceback and with
    the return code that a shell gives for SIGPIPE; where there is no space for it, with one line.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        provide_home()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:  # it is closed, as after >&-
                setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
            elif isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            code = run(sys.argv[1:] if argv is None else argv)
            sys.stdout.flush()  # here, where a closed pipe is caught, not at exit
            return code
        except (UsageError, StoreError) as error:
            for line in error.args:  # a path may hold any character
                print(f"error: {clean(str(line))}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ENOSPC):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:
                return 128 + signal.SIGPIPE
            print(f"error: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130

    return main


def parse_number(
    flag: str,
    text: str,
    right: str,
    fits: Callable[[float], bool] = lambda value: 0 < value < math.inf,
) -> float:
    """Parse a flag's number. Raises UsageError: it fails ``fits``; the message says ``right``."""
    if fits(value := read_number(text)):
        return value
    raise UsageError(f"{flag} {text[:40]!r}: give {right}")


def parse_percent(where: str, text: str) -> float:
    """Parse ``2%`` as 0.02. Raises UsageError: it is not a percentage from 0 to 1000."""
    if 0 <= (share := read_percent(text)) <= 10:
        return share
    raise UsageError(f"{where}: a margin is a percentage from 0 to 1000 %, such as 2%")


def parse_whole(flag: str, text: str, least: int, most: int | None = None) -> int:
    """Parse a flag's whole number. Raises UsageError: it is not one from ``least`` to ``most``."""
    if (number := read_whole(text, least, most)) is None:
        right = f" of at least {least}" if most is None else f", from {least} to {most}"
        raise UsageError(f"{flag} {text[:40]!r}: give a whole number{right}")
    return number
