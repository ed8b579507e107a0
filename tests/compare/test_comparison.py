"""What each planted comparison finds, as data; tests/golden has whole screens of some."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_for_tests import Capture, Patch

from bench.compare.__main__ import main as compare
from bench.study.quantities import METRICS
from bench.verdict import Claim, Verdict
from tests.planted.comparisons import COMPARISONS


def count(told: Iterable[str]) -> str:
    return ", ".join(f"{text} ×{n}" if n > 1 else text for text, n in Counter(told).items())


def tell(said: dict[str, Any]) -> Iterator[str]:
    """What a comparison's JSON has of findings: of each metric its verdicts, with the ratio or the
    speed and the numbers of runs; what learnt as well, over how many seeds; and what differs."""
    if said["axis"]:
        yield f"axis: {said['axis']}"
    for metric, findings in said["metrics"].items():
        told = []
        for found in findings:
            ratio = found.get("speed") or found.get("ratio")
            value = "" if ratio is None else f" {ratio:.3g}"
            told.append(f"{found['verdict']}{value} ({len(found['a'])}:{len(found['b'])})")
        if told:
            yield f"{metric}: {count(told)}"
    for metric, findings in said["equivalence"].items():
        told = [f"{found['verdict']} over {found['seeds']}" for found in findings]
        if told:
            yield f"{metric}: {count(told)}"
    spoilt = [
        text for findings in said["metrics"].values() for f in findings for text in f["spoilt"]
    ]
    if spoilt:
        yield f"spoilt: {', '.join(dict.fromkeys(spoilt))}"
    if said["differ"]:
        yield f"differ: {', '.join(name for name, *_ in said['differ'])}"
    if changed := [one["change"] for one in said["outcomes"] if one["change"]]:
        yield f"outcomes: {count(changed)}"
    if origins := {*said["origins"]} - {"measured"}:
        yield f"origin: {', '.join(origins)}"
    if alone := [
        f"{side} {len(said[f'only_in_{side}'])}" for side in "ab" if said[f"only_in_{side}"]
    ]:
        yield f"only in: {', '.join(alone)}"
    for gate in said["gates"]:
        judged = f"{gate['judged']} judged, {gate['unjudged']} not"
        yield f"{gate['gate']} {'passed' if gate['passed'] else 'failed'}: {judged}"


@pytest.mark.parametrize("name", COMPARISONS)
def test_what_is_found(name: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    planted = COMPARISONS[name]
    planted.write(tmp_path)
    code = compare([*planted.command.split(), "--format", "json"])
    out, err = capsys.readouterr()
    found = [*tell(json.loads(out))] if out else [err.strip()]
    assert "; ".join([*found, f"rc {code}"] if code else found) == planted.finds


def test_every_verdict_is_found_somewhere() -> None:
    found = " ".join(planted.finds for planted in COMPARISONS.values())
    words = {metric.word(verdict) for metric in METRICS.values() for verdict in Verdict}
    assert {
        word for word in (*words, *(claim.value for claim in Claim)) if word not in found
    } == set()
