"""Which version of the user's files a case was made of."""

from __future__ import annotations

from typing import Any

from bench.base.inject import Seen
from bench.schema.case import Case
from bench.sweep.versions import Versions
from bench.workers.fingerprint import Fingerprint


def test_cases_that_open_other_files_are_of_one_version_until_one_changes() -> None:

    def begin() -> Versions:
        return Versions(models={"t:build": Fingerprint("", "", "", files={"t.py": "1"})})

    def settle(versions: Versions, **files: str) -> tuple[Any, list[str], bool]:
        seen = Seen({"t.py": "1", **{f"{name}.yaml": one for name, one in files.items()}})
        columns, edited, more = versions.settle(Case("t:build"), seen)
        return columns["model_source"], edited, more

    versions = begin()
    first, *_ = settle(versions, a="1")
    assert settle(versions, b="1") == (first, [], True)
    second, edited, more = settle(versions, a="2")
    assert (second != first, edited, more) == (True, ["a.yaml"], True)
    assert settle(versions, a="1") == (first, ["a.yaml"], False)
    assert settle(begin(), b="1")[0] == first, "as another shard names it"
