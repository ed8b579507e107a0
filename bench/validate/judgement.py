"""The verdict on a folder: the faults of each claim, and which of them are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.study.sweeps import Sweep
from bench.text import count
from bench.validate.claims import CLAIMS
from bench.validate.evidence import (
    KNOWN_FAULTS,
    Evidence,
    list_disclosed,
    read_evidence,
    read_known_faults,
)

OK, NOTHING, KNOWN, FAULT = "ok", "none", "known", "FAULT"
"""The results of a check; `NOTHING` if a folder has no data for it."""


def validate(folder: Path, sweep: Sweep | None = None) -> dict[str, Any]:
    """Check one folder; ``sweep`` if it was read already.

    Returns:
        ``folder``, ``subject``, what it ``gives_away`` and ``checks``, each with its ``name``,
        ``result`` (ok, none, known or FAULT), what it ``shows``, its ``faults`` and, if they are
        known, the ``reason``. Files that cannot be read are the one fault of a single check,
        ``schema``.
    """
    schema = {"name": "schema", "shows": "every file is as the harness wrote it"}
    try:
        known, evidence = read_known_faults(folder), read_evidence(folder, sweep)
        if strange := known.keys() - {claim.name for claim in CLAIMS}:
            raise UsageError(f"{folder / KNOWN_FAULTS}: there is no check {', '.join(strange)}")
    except UsageError as error:
        fault = {**schema, "result": FAULT, "faults": [str(error)]}
        return {"folder": str(folder), "subject": "", "checks": [fault], "gives_away": []}
    checks: list[dict[str, Any]] = [{**schema, "result": OK, "faults": []}]
    for claim in CLAIMS:
        found = {"name": claim.name, "shows": claim.shows, "faults": [*claim.find(evidence)]}
        passed = NOTHING if claim.is_empty(evidence) else OK
        found["result"] = FAULT if found["faults"] else passed
        if claim.name in known:
            found["reason"] = known[claim.name]
            if found["faults"]:
                found["result"] = KNOWN
            else:
                found["result"] = FAULT
                found["faults"] = [f"{KNOWN_FAULTS} names it, and it has no fault; take it out"]
        checks.append(found)
    return {
        "folder": str(folder),
        "subject": _name_subject(evidence),
        "checks": checks,
        "gives_away": [*list_disclosed(folder, evidence.records)],
    }


def _name_subject(evidence: Evidence) -> str:
    """Return what was measured, and on what: ``13 rows, NVIDIA H200, torch 2.11.0+cu130``."""
    first = evidence.records.iloc[0]
    device = first["gpu"] or first["cpu"] or first["device"]
    own = "" if len(evidence.own) else "; not measured by this harness"
    return f"{count(len(evidence.records), 'row')}, {device}, torch {first['torch']}{own}"
