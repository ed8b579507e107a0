"""`make oracle OLD=<commit>`: are all numbers of an earlier commit still the same?

Both commits dump every number that report, compare and validate say of the committed and planted
sweeps (`dump`), and train some real cases on the CPU (`cases`). Numbers that both say must be
equal, losses bit for bit; what only one of them says is listed. Returns 1 if a number changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.oracle.compare import compare, flatten, read_answer, write

HERE = Path(__file__).parent
TREE = HERE.parents[1]
KINDS = ("dump", "cases")


@contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """A checkout of a commit, which is removed again; the working tree itself for ``.``."""
    if commit == ".":
        yield TREE
        return
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        place = Path(scratch, "tree")
        git = ["git", "-C", str(TREE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def ask(commit: str, kind: str, out: Path) -> Path:
    """Write what a commit says to the folder ``out``, unless it is there already."""
    file = out / f"{kind}-{commit}.json"
    if commit == "." or not file.is_file():
        print(f"{kind} of {commit} …", file=sys.stderr)
        with check_out(commit) as tree:
            command = [sys.executable, str(HERE / f"{kind}.py"), str(tree), str(file)]
            subprocess.run(command, check=True)
    return file


def main() -> int:
    parser = argparse.ArgumentParser(prog="make oracle", description=__doc__)
    parser.add_argument("old", help="an earlier commit")
    parser.add_argument("new", nargs="?", default=".", help="a later one (default: this tree)")
    parser.add_argument("--only", choices=KINDS, help="only what is said, or only the trainings")
    parser.add_argument("--keep", type=Path, help="a folder for the dumps, to ask a commit once")
    given = parser.parse_args()
    changed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in KINDS:
            if given.only not in (None, kind):
                continue
            old, new = (
                json.loads(ask(commit, kind, folder).read_text())
                for commit in (given.old, given.new)
            )
            read = read_answer if kind == "dump" else lambda _, said: dict(flatten(said))
            sides = [{name: read(name, said) for name, said in side.items()} for side in (old, new)]
            found = compare(*sides, exact=kind == "cases")
            print(f"\n{kind}: {given.old} and {given.new}", *write(found), sep="\n")
            changed += len(found.changed)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
