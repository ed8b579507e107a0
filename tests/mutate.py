"""`python -m tests.mutate`: plant the faults of mutations.toml, one by one: does a test fail?

They are planted in a clone of this checkout, with what is not committed, and a test counts that
passes there without the fault. Prints a line for each, and the share caught; returns 1 if any fault
passed all tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HANGS_S = 1200
SHARED = ("pytest", "hypothesis", "pandas", "scipy.special", "torch", "torch._dynamo")
"""What tests import and no fault is planted in: seven CPU seconds, once for all faults."""


@dataclass(frozen=True)
class Mutation:
    """A fault: ``old`` occurs once in ``file``, and ``new`` in its place tells a user ``why``.
    ``tests`` are globs of files that hold what those of the room do not."""

    file: str
    old: str
    new: str
    why: str
    tests: Sequence[str] = ()

    def plant(self, text: str) -> str:
        return text.replace(self.old, self.new)

    def choose(self, root: Path) -> Iterator[list[str]]:
        """Yield the files of tests, in the order in which they run: what the mutation names, what
        is named as the module, the room, what imports the module, its examples, golden files."""
        *rooms, module = parts = Path(self.file).with_suffix("").parts[1:]
        named = [f"{room}/test_{module}*.py" for room in rooms] + [f"test_{module}.py"]
        whole = [f"{room}/test_*.py" for room in rooms] + [f"test_{room}.py" for room in rooms]
        imported = ".".join(("bench", *parts)).removesuffix(".__init__") + " import"
        importing = [name for name, text in read_tests(root).items() if imported in text]
        seen = set[Path]()
        for globs in (self.tests, named, whole, importing):
            found = {file for glob in globs for file in root.glob(f"tests/{glob}")} - seen
            seen |= found
            if found:
                yield sorted(str(file.relative_to(root)) for file in found)
        if ">>> " in (root / self.file).read_text(encoding="utf-8"):
            yield [f"tests/test_examples.py::test_an_example_gives_what_it_says[{self.file}]"]
        yield ["tests/test_golden.py"]


@cache
def read_tests(root: Path) -> dict[str, str]:
    files = (root / "tests").rglob("test_*.py")
    return {str(file.relative_to(root / "tests")): file.read_text("utf-8") for file in files}


def read_mutations() -> list[Mutation]:
    told = tomllib.loads((HERE / "mutations.toml").read_text(encoding="utf-8"))
    return [Mutation(**one) for one in told["mutation"]]


class Clone:
    """A clone in which faults are planted, and which tests pass there without one."""

    def __init__(self, place: Path) -> None:
        self.place, self.sound = place, dict[str, bool]()
        self._kept = self._git(HERE, "stash", "create") or self._git(HERE, "rev-parse", "HEAD")
        self._git(HERE, "clone", "--quiet", "--shared", "--no-checkout", HERE.parent, place)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload([*SHARED])
        self._check_out(self._kept)

    def _git(self, where: Path, *words: object) -> str:
        command = ["git", "-C", str(where), "-c", "user.name=mutate", "-c", "user.email=", *words]
        return subprocess.check_output([*map(str, command)], text=True).strip()

    def _check_out(self, commit: str) -> None:
        self._git(self.place, "checkout", "--quiet", "--force", "--detach", commit)

    def catch(self, mutation: Mutation) -> str:
        """Plant a fault, and return the test that catches it; empty if none does."""
        file = self.place / mutation.file
        file.write_text(mutation.plant(file.read_text(encoding="utf-8")), encoding="utf-8")
        # committed, as tests tell edited source from a commit's
        self._git(self.place, "commit", "--quiet", "--all", "--message", mutation.why)
        planted, caught = self._git(self.place, "rev-parse", "HEAD"), ""
        stages = [
            [*files, "-m", which]
            for which in ("not slow", "slow")
            for files in mutation.choose(self.place)
        ]
        for words in stages:
            while not caught and (failed := self._run(words)) and self.sound.get(failed, True):
                if failed not in self.sound:
                    self._check_out(self._kept)
                    self.sound[failed] = not self._run([failed])
                    self._check_out(planted)
                caught = failed if self.sound[failed] else ""
        self._check_out(self._kept)
        return caught

    def _run(self, asked: Sequence[str]) -> str:
        """Run tests until one fails, and return it; empty if all pass."""
        unsound = [f"--deselect={test}" for test, passes in self.sound.items() if not passes]
        here, there = self._processes.Pipe(duplex=False)
        words = [*asked, "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *unsound]
        child = self._processes.Process(target=run_tests, args=(there, self.place, words))
        child.start()
        there.close()
        failed = asked[0]  # where it hangs, or ends without a word
        with suppress(EOFError):
            failed = here.recv() if here.poll(HANGS_S) else failed
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return str(failed)


class Watch:
    """A plugin of pytest that keeps the first test, or file of tests, that failed."""

    failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed = self.failed or (report.nodeid if report.failed else "")

    pytest_collectreport = pytest_runtest_logreport


def run_tests(there: Connection, place: Path, words: list[str]) -> None:
    """Run pytest in the clone, in a process of its own, and send which test failed."""
    import pytest

    os.setsid()
    os.chdir(place)
    sys.path.insert(0, str(place))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    nothing, watch = os.open(os.devnull, os.O_RDWR), Watch()
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    code = pytest.main(words, plugins=[watch])
    fine = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    there.send("" if fine else watch.failed or words[0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    about = "faults with one of these in their file or their why"
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help=about)
    parser.add_argument("--from", dest="first", type=int, default=1, help="its number of the first")
    parser.add_argument("--every", type=int, default=1, help="plant each of so many: a sample")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # as of all tests, and before torch is imported
    numbered = list(enumerate(read_mutations(), 1))[given.first - 1 :: given.every]
    asked = [(n, m) for n, m in numbered if any(t in f"{m.file}: {m.why}" for t in given.only)]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutate-", ignore_cleanup_errors=True) as scratch:
        clone = Clone(Path(scratch, "clone"))
        for number, one in asked:
            begun, by = time.monotonic(), clone.catch(one)
            caught += bool(by)
            told = f"caught by {by}" if by else "PASSED"
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{number:3} {one.file}: {one.why}: {told} ({took})", flush=True)
    for test in (test for test, passes in clone.sound.items() if not passes):
        print(f"fails without a fault, and counts for none: {test}")
    print(f"{caught} of {len(asked)} caught: {100 * caught / max(1, len(asked)):.1f} %")
    return int(caught < len(asked))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
