"""`make oracle OLD=<commit>`: are all numbers of an earlier commit still the same?

Both commits say what report, compare and validate find in the committed and planted sweeps, and
train some real cases on the CPU, each by its own commands. Numbers that both say must be equal,
those of trainings bit for bit; what only one of them says is listed. Texts are counted apart: each
sentence of an answer, and what a training says of itself, without its figures. Returns 1 if a
number or a text changed.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TREE = HERE.parents[1]

TWO = "--precision fp32 bf16-amp"
NET = "--model oracle_networks:small --dataset synthetic"
IMAGES = f"{NET} --steps 10 --batch-size 32"
OWN = "--workload oracle_networks:lines --batch-size 64 --epochs 2"
TRAINED: dict[str, str] = {
    "fp32 and bf16-amp": f"{IMAGES} {TWO}",
    "fp16, static": f"{IMAGES} --precision fp16 --loss-scale 128 4194304",
    "fp16-amp, dynamic": f"{IMAGES} --precision fp16-amp --loss-scale dynamic",
    "accumulate 3": f"{IMAGES} {TWO} --accumulate 3",
    "DDP of 2": f"{IMAGES} {TWO} --parallel ddp --world-size 2",
    "torch loader": f"{IMAGES} {TWO} --loader torch --workers 2",
    "freeze": f"{IMAGES} {TWO} --freeze bn",
    "memory limit": f"{NET} --steps 10 {TWO} --batch-size 32 40000 --memory-limit 1GiB",
    "own step": f"{OWN} {TWO} --optimizer adamw",
    "schedule": f"{OWN} {TWO} --schedule cosine --lr-warmup 2 --lr 0.05",
    "evaluation": f"{NET} {TWO} --batch-size 1000 --epochs 2 --evaluate on",
    "run again": f"{IMAGES} --precision fp32 --optimizer adamw --repeats 2",
    "killed": f"--workload oracle_networks:slow_lines --batch-size 64 {TWO} --epochs 4 "
    "--checkpoint on",
}
"""The flags of each sweep. The last is killed once it has written a checkpoint, and continued."""

OF_THE_RUN = re.compile(
    r".*(_s|_per_s|_bytes|_j|_w|_mhz|_c|_cores|_index|_at)$|rate_.*|rates_.*|epoch_time_error|"
    r"record_id|schema|session|log|host|commit|code|bench|neighbours.*|shared|"
    r"variables|retries|alloc_.*|warmup_steps|warmup_steady|slowest_rank|other_cores|"
    r"loader_.*|model_source|lane"
)
"""Columns that differ between two runs of one commit: times, memory, the machine's state."""

AXES = ("precision", "batch_size", "loss_scale", "compile", "cudnn_benchmark")
"""Axes of which two values are compared where a committed sweep has them."""

_WORDS = """
text title subject constants answers notes words about shows label remedy question outcomes columns
reason faults help path folder next_step command unit level heads evidence advice sentence stderr
proof_notes missing
"""
WORDS = frozenset(_WORDS.split())
"""Keys of JSON with text for people: what stands below them is counted as texts."""

FIGURES = re.compile(r"\S*/\S+|\b[0-9a-f]{7,}\b|\d[\d.,:e+-]*")
"""What a text of a training has of that run alone: its paths, ids and figures."""

NAMES = ("name", "axis", "before", "after", "label", "metric", "column", "cause", "folder")
"""Keys that say which element of a list one is, so that another that went moves no other."""

Leaf = str | float | bool | None


def train(tree: Path, out: Path, flags: str, killed: bool = False) -> None:
    """Run a sweep of ``tree``; if ``killed``, end all of it once a checkpoint is there, and run it
    again. Raises RuntimeError: it did not end well."""
    command = [sys.executable, "-m", "bench.sweep", *flags.split(), "--device", "cpu"]
    command += ["--out", str(out), *([] if "--repeats" in flags else ["--repeats", "1"])]
    paths = [str(tree), str(tree / "tests/oracle"), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    own |= {"BENCH_YARDSTICK_S": "0"}
    log = out.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=os.environ | own, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        if killed:
            while process.poll() is None and not [*out.rglob("last.pt")]:
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            train(tree, out, flags)
        elif process.wait() not in (0, 1):  # 1: a case failed
            raise RuntimeError(f"{' '.join(command)}: rc {process.returncode}\n{log.read_text()}")


def read_rows(out: Path) -> dict[str, Any]:
    """What a sweep holds of each run but `OF_THE_RUN`, with its steps and epochs."""
    found: dict[str, Any] = {}
    runs: dict[str, str] = {}
    for name in ("records", "steps", "epochs"):
        if (file := out / f"{name}.csv").is_file():
            with file.open(newline="") as opened:
                for row in csv.DictReader(opened):
                    kept: dict[str, Any]
                    kept = {k: v for k, v in row.items() if not OF_THE_RUN.match(k)}
                    kept |= {k: FIGURES.sub("…", kept[k]).split("; ") for k in WORDS & kept.keys()}
                    if name == "records":
                        axes = "precision loss_scale batch_size repeat attempt sentinel"
                        run = runs[row["record_id"]] = " ".join(row[a] for a in axes.split())
                        found[run] = kept
                    elif row["record_id"] in runs:
                        found[runs[row["record_id"]]].setdefault(file.name, []).append(kept)
    return found


def say(command: str, *arguments: object) -> Any:
    """The JSON that a command of the tree prints, or its code, and what it says on stderr."""
    module = importlib.import_module(f"bench.{command}")
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"bench.{command}.__main__")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = module.main([*map(str, arguments), "--format", "json"])
    found = json.loads(out.getvalue() or json.dumps({"rc": code}))
    return found | {"stderr": err.getvalue()} if err.getvalue() else found


def spell(value: object) -> str:
    """The value of an axis as a flag takes it."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def answer(tree: Path, scratch: Path) -> Iterator[tuple[str, Any]]:
    """Yield what the tree says of each committed and planted sweep, with a name."""
    from tests.planted.comparisons import COMPARISONS
    from tests.planted.records import list_committed
    from tests.planted.sweeps import SWEEPS, Folders

    committed = [folder.relative_to(tree) for folder in list_committed("records.csv")]
    committed += [file for file in sorted(Path("results/reference").glob("*.csv"))
                  if not file.stem.endswith("-curve")]  # fmt: skip
    planted = Folders(scratch / "planted")
    for folder in (*committed, *(planted[name] for name in SWEEPS)):
        report = say("report", folder)
        yield f"report {folder.name}", report
        yield f"validate {folder.name}", say("validate", folder)
        for axis in AXES if folder in committed else ():
            of_cases = [case[axis] for case in report["cases"] if case[axis] not in (None, "")]
            values = [*dict.fromkeys(map(spell, of_cases))]
            for other in values[1:]:
                name = f"compare {folder.name} --axis {axis} {values[0]} {other}"
                yield name, say("compare", folder, *name.split()[2:])
    for name, comparison in COMPARISONS.items():
        place = scratch / "compare" / name[:60].replace("/", "-")
        comparison.write(place)
        with contextlib.chdir(place):
            yield f"compare: {name}", say("compare", *comparison.command.split())


def ask(tree: Path, kind: str, scratch: Path) -> dict[str, Any]:
    """What the commands of ``tree``, which this process has not imported yet, say or train."""
    if kind == "said":
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "tests")]
        return dict(answer(tree, scratch))
    found = {}
    for name, flags in TRAINED.items():
        out = scratch / name.replace(" ", "-")
        train(tree, out, flags, killed=name == "killed")
        found[name] = read_rows(out)
    return found


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield each leaf of a JSON value with its path. Elements of a list are named by their `NAMES`
    where they have some; equal names are counted.

    >>> dict(flatten({"tables": [{"name": "steps", "rows": [1, 2]}]}))
    {'/tables/steps/name': 'steps', '/tables/steps/rows/0': 1, '/tables/steps/rows/1': 2}
    """
    if isinstance(value, dict):
        if "heads" in value and "rows" in value:  # a table: its columns are named
            names = [head["name"] for head in value["heads"]]
            value = {**value, "rows": [dict(zip(names, row)) for row in value["rows"]]}  # noqa: B905
        for key, part in value.items():
            yield from flatten(part, f"{path}/{key}")
    elif isinstance(value, list):
        seen: Counter[str] = Counter()
        for index, part in enumerate(value):
            name = str(index)
            if isinstance(part, dict) and (own := [k for k in NAMES if k in part]):
                values = (part[key] for key in own if not isinstance(part[key], dict))
                # of a folder its name: each commit has a place of its own
                name = " ".join(str(one).rpartition("/")[2] for one in values)
                seen[name] += 1
                name += f" #{seen[name]}" if seen[name] > 1 else ""
            yield from flatten(part, f"{path}/{name}")
    else:
        yield path, value


def split(side: Mapping[str, Any]) -> tuple[dict[str, Leaf], Counter[tuple[str, str]]]:
    """The values of one side by their paths, and its texts, each with its key and how often it
    stands below it: one that moves within a list is the same text."""
    values, texts = dict[str, Leaf](), Counter[tuple[str, str]]()
    for path, leaf in flatten(dict(side)):
        keys = path.split("/")
        if words := [key for key in keys if key in WORDS]:
            texts["/".join((keys[1], *words)), str(leaf)] += leaf not in ("", None)
        else:
            values[path] = leaf
    return values, +texts


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many values and texts changed, and lines that tell which did, which values went and
    which came. A sum in another order, within 1e-9, is the same number; the cells of a training
    are texts. Commits before typed axes told those that may be empty as text."""
    (a, texts), (b, others) = split(old), split(new)
    changed = []
    for path in a.keys() & b.keys():
        one, other = a[path], b[path]
        if isinstance(one, float) and isinstance(other, float):
            same = math.isclose(one, other, rel_tol=1e-9)
        else:
            spelled = {"" if end is None else str(end) for end in (one, other)}
            same = one == other or (type(one) is not type(other) and len(spelled) == 1)
        if not same:
            changed.append(f"    {path}: {one!r} -> {other!r}")
    lines = [f"{len(a.keys() & b.keys()):,} values compared, {len(changed):,} changed"]
    lines += sorted(changed)[:40]
    for word, paths in (("went", a.keys() - b.keys()), ("came", b.keys() - a.keys())):
        lines.append(f"{len(paths):,} values {word}")
        kinds = Counter(path.split("/")[1] for path in paths)
        lines += [f"  {number:7,} {kind}" for kind, number in kinds.most_common()]
    went, came = texts - others, others - texts
    number = max(went.total(), came.total())
    lines.append(f"{texts.total():,} texts compared, {number:,} changed")
    differ = [(key, sign, text) for sign, ones in (("-", went), ("+", came)) for key, text in ones]
    lines += [f"    {sign} {key}: {text}" for key, sign, text in sorted(differ)[:80]]
    return len(changed) + number, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="make oracle", description=__doc__)
    parser.add_argument("old", help="an earlier commit")
    parser.add_argument("--only", choices=("said", "trained"), help="one of the two")
    parser.add_argument("--of", nargs=2, type=Path, help=argparse.SUPPRESS)  # a tree, and a file
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        if given.of:
            tree, file = given.of
            text = json.dumps(ask(tree, given.only, Path(scratch)))
            # a folder of this run, or of one side, is not a difference
            file.write_text(text.replace(scratch, "SCRATCH").replace(str(tree), "TREE"))
            return 0
        place, git, changed = Path(scratch, "tree"), ["git", "-C", str(TREE), "worktree"], 0
        subprocess.run([*git, "add", "--quiet", "--detach", place, given.old], check=True)
        try:
            for kind in [given.only] if given.only else ("said", "trained"):
                sides = []
                for tree in (place, TREE):
                    file = Path(scratch, "answer.json")
                    words = [given.old, "--only", kind, "--of", str(tree), str(file)]
                    subprocess.run([sys.executable, str(HERE / "__main__.py"), *words], check=True)
                    sides.append(json.loads(file.read_text()))
                number, lines = compare(*sides)
                print(f"\n{kind}:", *lines, sep="\n")
                changed += number
        finally:
            subprocess.run([*git, "remove", "--force", place], check=True)
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
