"""`python -m bench`: every command is listed, with the line of its own docstring."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from bench import __main__ as listing
from bench.report.__main__ import main as report
from tests.planted.records import ROOT
from tests.pytest_for_tests import Capture, Patch

INTERNAL = {
    "worker",
    "environment",
    "training.device_rates",
}
"""Modules that other modules start; people do not."""


def find_runnable() -> set[str]:
    """Every module of the package that runs as a program, named as after ``-m bench.``."""
    found = set()
    for file in (ROOT / "bench").rglob("*.py"):
        if '__name__ == "__main__"' in file.read_text():
            parts = file.relative_to(ROOT / "bench").with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__main__"))
    return found - {""}


def listed() -> list[str]:
    return [name for names in listing.COMMANDS.values() for name in names]


def test_every_command_is_listed_once() -> None:
    assert find_runnable() - INTERNAL == set(listed()), "add it to COMMANDS in bench/__main__.py"
    assert len(listed()) == len(set(listed()))


def test_the_list_shows_the_line_of_each_docstring(capsys: Capture) -> None:
    assert listing.main([]) == 0
    out = capsys.readouterr().out
    for name in listed():
        module = ROOT / "bench" / name
        file = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        (row,) = [line for line in out.splitlines() if line.startswith(f"  {name} ")]
        what = row.removeprefix(f"  {name}").strip()
        assert len(what.split()) > 2
        assert f": {what}." in file.read_text().partition("\n")[0]
    assert max(map(len, out.splitlines())) <= 80, "it should fit a terminal of 80 columns"


def write_help(module: str, flag: str, capsys: Capture) -> list[str]:
    with pytest.raises(SystemExit) as end:
        import_module(f"bench.{module}").main([flag])
    assert end.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "module",
    [
        name if (ROOT / "bench" / f"{name}.py").is_file() else f"{name}.__main__"
        for name in listed()
    ],
)
def test_a_help_fits_a_screen_and_describes_in_plain_sentences(
    module: str, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = write_help(module, "--help", capsys)
    assert len(lines) <= (46 if module.startswith("sweep") else 55)
    assert max(map(len, lines)) <= 100
    _, description, *_ = "\n".join(lines).split("\n\n")
    assert description[0].isupper()
    assert "`" not in description
    assert "python -m" not in description


@pytest.mark.parametrize("module", ["sweep.__main__", "fit"])
def test_all_settings_are_in_the_long_help(module: str, capsys: Capture) -> None:
    helps = [write_help(module, flag, capsys) for flag in ("--help", "--help-all")]
    short, whole = ({line.split()[0] for line in h if line.startswith("  --")} for h in helps)
    assert short < whole
    assert "--precision" in short
    assert "--channels-last" in whole - short


@pytest.mark.parametrize(
    ("words", "rc", "expected"),
    [
        ("bench.sweep --list", 0, "rtx-titan"),
        ("fit --lr", 2, "error: --lr"),
        ("swep", 2, "unknown command 'swep'; did you mean 'sweep'?"),
    ],
)
def test_a_command_given_as_a_word(words: str, rc: int, expected: str, capsys: Capture) -> None:
    assert listing.main(words.split()) == rc
    assert expected in "".join(capsys.readouterr())


def test_the_program_that_is_installed_runs_commands() -> None:
    """As the script that pip writes does."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = about["scripts"]["precision-bench"].split(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", code, "report", "no-such-folder"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no-such-folder: no records there" in done.stderr


def test_a_command_that_ends_loses_nothing() -> None:
    """Though what it imported is not taken apart: threads, what is to be done at exit, output."""
    code = """
import atexit, threading, time
from bench.base.processes import leave

class Kept:
    def __del__(self): print("taken apart")

kept = Kept()
atexit.register(print, "at exit", end="")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread, ", end=""))).start()
leave(3)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread, at exit", "")


CARD = str(ROOT / "results" / "nvidia-h200-20261126-040407")


def test_a_pipe_closed_early_leaves_no_traceback() -> None:
    """As by ``| head -1``: the reader has gone before anything is written."""
    piped = f"{{ {sys.executable} -um bench; echo rc $? >&2; }} | true"
    done = subprocess.run(piped, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr in ("rc 141\n", "rc 0\n")  # 0 if the reader was slower


@pytest.mark.parametrize(
    ("to", "code", "error"),
    [(">&-", 0, ""), (">/dev/full", 1, "error: the output: No space left on device\n")],
)
def test_an_output_that_is_closed_or_full_leaves_no_traceback(
    to: str, code: int, error: str
) -> None:
    line = f"{sys.executable} -m bench.report {CARD} {to}"
    done = subprocess.run(line, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, error)


def test_a_file_is_written_whole_or_kept(tmp_path: Path, capsys: Capture) -> None:
    """On a full disk; what is no file stays what it is."""
    (old := tmp_path / "x.html").write_text("old")
    (tmp_path / ".x.html.part").symlink_to("/dev/full")
    assert report([CARD, "-o", str(old)]) == 1
    full = "No space left on device; free some, or choose another place"
    assert capsys.readouterr().err == f"error: -o {old}: {full}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["x.html"]
    assert old.read_text() == "old"
    (own := tmp_path / ".x.html").write_text("of the user")
    (link := tmp_path / "y.html").symlink_to(old)
    assert report([CARD, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert old.read_text() != "old"
    assert own.read_text() == "of the user"
    os.mkfifo(pipe := tmp_path / "z.txt")
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    assert report([CARD, "-o", str(pipe)]) == 0
    assert os.read(reader, 100)
    os.close(reader)
    assert pipe.is_fifo()


# --------------------------------------------------------------------------- what an output encodes


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        (f"report {CARD} --full", "ascii"),
        ("sweep --help-all", "latin-1"),
        ("sweep --batch-size ×", "ascii"),
    ],
    ids=lambda words: words.replace(CARD, "CARD"),
)
def test_what_an_output_cannot_encode_is_replaced(
    words: str, encoding: str, monkeypatch: Patch
) -> None:
    name, *arguments = words.split()
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr("sys.stdout", streams[0])
    monkeypatch.setattr("sys.stderr", streams[1])
    with suppress(SystemExit):  # of --help
        import_module(f"bench.{name}.__main__").main(arguments)
    for stream in streams:
        stream.flush()
    output = b"".join(stream.buffer.getvalue() for stream in streams).decode(encoding)
    assert len(output) > 100
    if name == "report" and encoding == "ascii":
        assert "(loss scale dynamic): ?12.09 s" in output
