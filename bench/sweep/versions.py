"""Which version of the user's files each case of a folder was made of, and which is to run next.

A row says by one hash, ``model_source``, which version of them ran. Cases open different files: two
are of one version if those that both opened are the same. The folder's configuration keeps the
files of each version. `bench.training.sources` tells what is seen of a case, and here is decided
what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.base.inject import Files, Seen
from bench.base.inject.sitecustomize import TEXTS
from bench.base.text import read_time
from bench.results.store.reader import Sources
from bench.results.store.rows import Row
from bench.schema.case import Case
from bench.schema.command import list_named
from bench.training.sources import hash_files, list_edited, look_at, name_contents
from bench.workers.fingerprint import Fingerprint, name_source, name_subject

_HASHES = ("parameters", "structure", "source")


class Versions:
    """The versions of what is trained in a folder, and which of them is expected of the next case.

    ``sources`` has those that the configuration keeps. ``models`` are the networks and workloads as
    they were examined, by `name_subject`, and ``starts`` the hashes of files of weights.
    """

    def __init__(
        self,
        sources: Sources | None = None,
        models: Mapping[str, Fingerprint] | None = None,
        starts: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = sources or {}
        self._starts = dict(starts or {})
        self._models = {  # their columns
            subject: {f"model_{part}": getattr(one, part) for part in _HASHES}
            for subject, one in (models or {}).items()
        }
        # by script or network, what every case of it is made of; of scripts, once it is asked for
        self._core = {subject: one.files for subject, one in (models or {}).items()}
        self._now: dict[str, str] = {}  # what is expected to run

    def describe(self, case: Case) -> dict[str, str | None]:
        """Return the columns that tell what the case is expected to be made of."""
        columns: dict[str, str | None] = dict(self._models.get(name_subject(case), {}))
        if self._list_core(case) or case.command is not None:
            columns["model_source"] = self._expect(case)
        return columns | {"start_fingerprint": self._starts.get(case.start or "")}

    def list_files(self, case: Case) -> Files:
        """Return the files that a case is expected to be made of, as far as they are known."""
        return self._find(case, self._expect(case)) or self._list_core(case)

    def list_changed(self, case: Case, name: str) -> list[str]:
        """Return the files of a version that are not what they were."""
        files = self._find(case, name).items()
        return [file for file, content in files if _hash_now(file) != content]

    def settle(self, case: Case, seen: Seen) -> tuple[dict[str, Any], list[str], bool]:
        """Learn what a case was made of, as its own process saw it. Return the columns that tell
        it, the files that are not as they were expected to be, and whether there are more files to
        keep. Later cases are expected to be like it."""
        columns, edited, more, core = dict(seen.found), list[str](), False, self._list_core(case)
        if core or seen.files:  # not a network of the harness
            columns["model_source"], edited, more = self._place(case, core, seen.files)
        start = columns.get("start_fingerprint")
        if case.start is not None and start not in (None, self._starts.get(case.start)):
            edited.append(case.start)
            self._starts[case.start] = start
        if edited and (model := self._models.get(name_subject(case))):
            model |= {name: columns[name] for name in model if columns.get(name)}
        return columns, edited, more

    def _place(self, case: Case, core: Files, files: Files) -> tuple[str, list[str], bool]:
        """Return the hash of the version that a case with these ``files`` was of, those of them
        that are not as in the version that was expected, and whether some are new to it."""
        subject, expected = name_source(case), self._expect(case)
        known = self.sources.setdefault(subject, {})
        edited = list_edited(known.get(expected, core), files)
        like = (name for name in (expected, *known) if not list_edited(known.get(name, {}), files))
        name = next((name for name in like if name in known), "")
        if not name:
            core = {name: files.get(name, content) for name, content in core.items()}
            name = hash_files(core)
            if name in known or not core:
                name = hash_files(files)
        version = known.setdefault(name, {})
        more = not files.keys() <= version.keys()
        version.update(files)
        self._now[subject] = name
        return name, edited, more

    def _expect(self, case: Case) -> str:
        """Return the hash of the version that would run now: the one that a case ended as last, or
        that whose files are as they were, or a new one."""
        subject = name_source(case)
        if subject not in self._now:
            self._now[subject] = self._look(case)
        return self._now[subject]

    def _look(self, case: Case) -> str:
        known, core = self.sources.get(name_source(case), {}), self._list_core(case)
        for name, files in known.items():
            if not list_edited(files, core) and not self.list_changed(case, name):
                return name
        last = next(reversed(known.values()), {})
        now = {name: _hash_now(name) for name in last}
        return hash_files({**now, **core} if known else core)

    def _list_core(self, case: Case) -> Files:
        """Return the files that every case of its network or command is made of, as they were when
        they were examined."""
        subject = name_subject(case) if case.command is None else case.command
        if subject not in self._core and case.command is not None:
            self._core[subject] = name_contents(list_named(case.command))
        return self._core.get(subject, {})

    def _find(self, case: Case, name: str) -> Files:
        return self.sources.get(name_source(case), {}).get(name, {})


def _hash_now(name: str) -> str:
    found = look_at(Path(name))
    return found.content if found else ""


class Left:
    """What the commands of earlier runs wrote, and when they ran, which the next ones may read."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._wrote, self._ran = set[str](), list[tuple[float, float]]()
        for row in (row for row in rows if row.case.command is not None):
            self.add(row.wrote.split("; "), row.started_at, row.finished_at)

    def add(self, wrote: Iterable[str], started_at: str, finished_at: str) -> None:
        self._wrote.update(filter(None, wrote))
        self._ran.append((1e9 * read_time(started_at), 1e9 * read_time(finished_at)))

    def find_carried(self, seen: Seen) -> list[str]:
        """Return the files that a run read and that an earlier one wrote. A text that was changed
        while one ran, and that it did not write, was edited."""
        return [
            name
            for name, changed_ns in seen.read.items()
            if name in self._wrote
            or (
                not name.endswith(TEXTS)
                and any(begin <= changed_ns <= end for begin, end in self._ran)
            )
        ]

    def find_overwritten(self, seen: Seen) -> list[str]:
        return [name for name in seen.wrote if name in self._wrote]

    def leave_aside(self, seen: Seen) -> Seen:
        """Return what a run was made of without what earlier runs wrote."""
        aside = {*self._wrote, *self.find_carried(seen)}
        return replace(
            seen, files={name: one for name, one in seen.files.items() if name not in aside}
        )
