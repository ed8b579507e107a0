"""`python -m bench.validate`: check that folders of results can be believed.

Each claim of a folder is one line; `bench.validate.claims` says how it is judged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.errors import UsageError, choose
from bench.flags import Parser, command
from bench.store.reader import records_file
from bench.text import count
from bench.validate.claims import CLAIMS
from bench.validate.evidence import KNOWN_FAULTS, Evidence, read_evidence, read_known_faults
from bench.validate.private import list_given_away

MOST_FAULTS = 3
"""Faults of a claim that are printed; the first says what to look at."""


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.validate",
        description="Check folders of results before they are shared: that they can be read, were "
        "measured by known code in one environment, are complete, and hold no figure that their "
        "steps, their work, the data sheet of the card or the images contradict.",
        epilog=f"A line 'check: reason' in a folder's {KNOWN_FAULTS} keeps a fault that is known: "
        "it is printed, and does not count. Return code 1: a check failed. 2: a wrong flag.",
    )
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="a sweep's folder or records file")
    add("--format", default="text", metavar="FORMAT", help="text or json (default: text)")
    add("--full", action="store_true", help="print every fault, not the first three of a check")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Check folders; returns 0, 1 where a check failed, or 2 for a usage error."""
    given = build_parser().parse(argv)
    write = choose("--format", given.format, FORMATS)
    for folder in given.folders:
        records_file(folder)
    results = [validate(folder) for folder in given.folders]
    print(write(results, given.full))
    return int(any(check["result"] == "FAULT" for found in results for check in found["checks"]))


def validate(folder: Path) -> dict[str, Any]:
    """Check one folder.

    Returns:
        ``folder``, ``subject`` and ``checks``, each with its ``name``, its ``result`` (ok, known or
        FAULT), what it ``shows``, its ``faults`` and, where they are known, the ``reason``, and
        what the folder ``gives_away``. Files that cannot be read are the one fault of the one check
        ``schema``.
    """
    schema = {"name": "schema", "shows": "every file is as the harness wrote it"}
    try:
        known, evidence = read_known_faults(folder), read_evidence(folder)
        if strange := known.keys() - {claim.name for claim in CLAIMS}:
            raise UsageError(f"{folder / KNOWN_FAULTS}: there is no check {', '.join(strange)}")
    except UsageError as error:
        fault = {**schema, "result": "FAULT", "faults": [str(error)]}
        return {"folder": str(folder), "subject": "", "checks": [fault], "gives_away": []}
    checks: list[dict[str, Any]] = [{**schema, "result": "ok", "faults": []}]
    for claim in CLAIMS:
        found = {"name": claim.name, "shows": claim.shows, "faults": [*claim.find(evidence)]}
        found["result"] = "FAULT" if found["faults"] else "ok"
        if claim.name in known:
            found["reason"] = known[claim.name]
            if found["faults"]:
                found["result"] = "known"
            else:
                found["result"] = "FAULT"
                found["faults"] = [f"{KNOWN_FAULTS} names it, and it has no fault; take it out"]
        checks.append(found)
    return {
        "folder": str(folder),
        "subject": _name_subject(evidence),
        "checks": checks,
        "gives_away": [*list_given_away(folder, evidence.records)],
    }


def _name_subject(evidence: Evidence) -> str:
    """What was measured on what: ``13 rows, NVIDIA H200, torch 2.11.0+cu130``."""
    first = evidence.records.iloc[0]
    device = first["gpu"] or first["cpu"] or first["device"]
    own = "" if len(evidence.own) else "; not measured by this harness"
    return f"{count(len(evidence.records), 'row')}, {device}, torch {first['torch']}{own}"


def _write(result: dict[str, Any], full: bool) -> str:
    lines = [f"{result['folder']}: {result['subject']}".rstrip(": ")]
    for check in result["checks"]:
        lines.append(f"  {check['result']:<6} {check['name']:<12} {check['shows']}")
        faults = check["faults"] if full else check["faults"][:MOST_FAULTS]
        lines += [f"{'':21} {fault}" for fault in faults]
        if more := len(check["faults"]) - len(faults):
            lines.append(f"{'':21} and {more} more; --full prints them")
        if check["result"] == "known":
            lines.append(f"{'':21} known: {check['reason']}")
    if result["gives_away"]:
        lines.append(f"It gives away {'; '.join(result['gives_away'])}.")
    wrong = sum(check["result"] == "FAULT" for check in result["checks"])
    checks = count(len(result["checks"]), "check")
    lines.append(f"{wrong} of {checks} failed." if wrong else f"All {checks} passed.")
    return "\n".join(lines)


FORMATS: dict[str, Callable[[list[dict[str, Any]], bool], str]] = {
    "text": lambda results, full: "\n\n".join(_write(result, full) for result in results),
    "json": lambda results, full: json.dumps(results, indent=2),
}


if __name__ == "__main__":
    sys.exit(main())
