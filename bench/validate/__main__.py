"""`python -m bench.validate`: check that folders of results can be believed.

Each claim of a folder is one line; `bench.validate.claims` says how it is judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.base.errors import choose
from bench.base.plain import dump_document
from bench.base.processes import leave
from bench.base.text import count
from bench.results.store.reader import expand_folders, name_newest
from bench.schema.flags import Parser, add_format, command
from bench.validate.claims import FAULT, KNOWN, KNOWN_FAULTS, validate

MOST_FAULTS = 3
"""Faults of a claim that are printed; the first says where to look."""


@command
def main(argv: Sequence[str]) -> int:
    """Check folders. Returns 0; 1 if a check failed; 2 for a usage error."""
    parser = Parser(
        prog="python -m bench.validate",
        suggest=name_newest,
        description="Check folders of results before they are shared: that they can be read, were "
        "measured by known code in one environment, are complete, and hold no figure that their "
        "steps, their work, the data sheet of the card or the images contradict.",
        epilog=f"A line 'FOLDER: check: reason' in {KNOWN_FAULTS} beside the folder accepts a "
        "known fault: it is printed and does not count. docs/results.md has what no check can "
        "tell. Return code 1: a check failed. 2: a wrong flag.",
    )
    add = parser.add_argument
    add(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a sweep's folder, a folder of several, or a records file",
    )
    add_format(parser)
    given = parser.parse(argv)
    write = choose("--format", given.format, _FORMATS)
    results = [*map(validate, expand_folders(given.folders))]
    print(write(results), end="")
    return int(any(check["result"] == FAULT for found in results for check in found["checks"]))


def _write(result: dict[str, Any]) -> str:
    lines = [f"{result['folder']}: {result['subject']}".rstrip(": ")]
    for check in result["checks"]:
        shows = (
            f"nothing to check: no row of this harness has {lacks}"
            if (lacks := check.get("lacks"))
            else ""
        )
        lines.append(f"  {check['result']:<6} {check['name']:<12} {shows or check['shows']}")
        lines += [f"{'':21} {fault}" for fault in check["faults"][:MOST_FAULTS]]
        if (more := len(check["faults"]) - MOST_FAULTS) > 0:
            lines.append(f"{'':21} and {more} more; --format json has them")
        if check["result"] == KNOWN:
            lines.append(f"{'':21} known: {check['reason']}")
    if ignored := result["ignored_known_faults"]:
        lines.append(
            f"{ignored} accepts nothing, since a folder cannot excuse itself: a line "
            f"'FOLDER: check: reason' in {KNOWN_FAULTS} beside the folder does."
        )
    if result["discloses"]:
        lines.append(f"It discloses {'; '.join(result['discloses'])}.")
    ends = Counter(check["result"] for check in result["checks"])
    numbers = ", ".join(f"{number} {end}" for end, number in ends.items())
    return "\n".join([*lines, f"{count(ends.total(), 'check')}: {numbers}."])


_FORMATS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "text": lambda results: "\n\n".join(map(_write, results)) + "\n",
    "json": lambda results: dump_document("validate", 2, {"folders": results}),
}


if __name__ == "__main__":
    leave(main())
