"""Command lines: one-line errors, a flag for every axis."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from bench.case import AXES, Value, axis_flag, parse_values
from bench.data import SYNTHETIC
from bench.errors import UsageError, nearest
from bench.text import clean
from bench.workloads import IMAGES


def describe(docstring: str | None) -> str:
    """What a command does, for its help: its module's docstring without the command and backticks.

    >>> describe("`python -m bench.thing`: do ``this``.")
    'Do this.'
    """
    text = re.sub(r"^`[^`]*`: ", "", docstring or "").replace("`", "")
    return text[:1].upper() + text[1:]


class Parser(argparse.ArgumentParser):
    """argparse, raising `UsageError` instead of printing its whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raise with argparse's message.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message}; see --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``.

        Raises:
            UsageError: a flag is unknown, with the nearest right one if any is near, or lacks its
                value.
        """
        given, unknown = self.parse_known_args(argv)
        if unknown:
            shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
            flags = [flag for action in shown for flag in action.option_strings]
            near = nearest(unknown[0], flags, "--help lists the right ones")
            raise UsageError(f"unknown argument {unknown[0]!r}; {near}")
        return given


def add_axes(
    parser: argparse.ArgumentParser, description: str, without: Collection[str] = ()
) -> None:
    """Add a flag that takes one value or several for every axis but those of ``without``."""
    group = parser.add_argument_group("axes", description)
    for name, axis in AXES.items():
        if name in without:
            continue
        # an on/off flag needs no value: --evaluate is --evaluate on
        some = "*" if axis.metadata["switch"] else "+"
        group.add_argument(
            axis_flag(name),
            nargs=some,
            metavar="VALUE",
            help=axis.metadata["help"].replace("%", "%%"),
        )


def refuse_flags(argv: Sequence[str], names: Collection[str], why: str) -> None:
    """Refuse the flags of axes that a command has not, for a better reason than that.

    Raises:
        UsageError: one is given; ``why`` says what it means, and what to do.
    """
    for flag in map(axis_flag, names):
        if any(word.partition("=")[0] == flag for word in argv):
            raise UsageError(f"{flag}: {why}")


CIFAR_ONLY = ("input", "classes")
"""Axes that a command has not which trains networks on images of CIFAR's shape, and workloads."""


def refuse_other_images(argv: Sequence[str], command: str) -> None:
    """Refuse other images than those of CIFAR's shape and classes.

    Raises:
        UsageError: a flag of `CIFAR_ONLY` is given.
    """
    why = f"{command} has images of 3x32x32; leave it out, give a --workload, or use bench.sweep"
    refuse_flags(argv, CIFAR_ONLY, why)


def read_axes(given: argparse.Namespace, without: Collection[str] = ()) -> dict[str, list[Value]]:
    """The axes given as flags of `add_axes`, parsed.

    Raises:
        UsageError: a value is not one its axis can take, or axes do not go together.
    """
    axes: dict[str, list[Value]] = {
        name: [
            value for text in texts or ["on"] for value in parse_values(name, text, axis_flag(name))
        ]
        for name in AXES
        if name not in without and (texts := getattr(given, name)) is not None
    }
    refuse_beside_workload(axes)
    if {"input", "classes"} & axes.keys():
        axes.setdefault("dataset", [SYNTHETIC])  # also where a preset names another
    return axes


def refuse_beside_workload(axes: Mapping[str, Collection[Value]]) -> None:
    """Refuse the axes that a user's workload decides by itself.

    Raises:
        UsageError: one is given beside it.
    """
    if any(name != IMAGES for name in axes.get("workload", [])):
        for name in ("model", "dataset", "input", "classes"):
            if name in axes:
                raise UsageError(
                    f"--workload brings its own {name}; leave out {axis_flag(name)}, or --workload"
                )


def add_filters(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--where``, whose values `bench.study.filters.parse_filter` reads."""
    parser.add_argument(
        "--where",
        nargs="+",
        action="extend",
        default=[],
        metavar="AXIS=VALUE",
        help=f"only these cases, such as {example}",
    )


@contextmanager
def writable(flag: str, path: Path) -> Iterator[None]:
    """Write to a path that a flag gave.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: {error.strerror or error}; choose a place that can be written"
        ) from error


def run_command(command: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Run a command; a `UsageError` becomes one line on standard error and return code 2.

    If the reader of standard output has gone, as with ``| head``, it ends with the return code that
    a shell gives for SIGPIPE, and without a traceback.
    """
    try:
        code = command(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()  # here, where a closed pipe is caught, and not as Python ends
        return code
    except UsageError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)  # a path may hold anything
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


def parse_percent(where: str, text: str) -> float:
    """Read ``2%`` as 0.02.

    Raises:
        UsageError: it is not a percentage from 0 to 1000, or has no ``%``.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        value = float(number) if sign and not rest and number.isascii() else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise UsageError(f"{where}: a margin is a percentage from 0 to 1000 %, such as 2%")
    return value / 100
