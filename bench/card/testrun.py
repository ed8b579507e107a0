"""A pytest plugin: run tests up to a given time, write each outcome, continue next time.

`python -m pytest -p bench.card.testrun --card-until T --card-outcomes FILE`. No test is started
that would probably not end in time. FILE has a JSON line with the collected tests, then one for
each test that ended; tests that passed or were skipped are not run again.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAST_S = 5.0
"""The assumed time of a test, unless the longest so far took longer."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--card-until", type=float, required=True, help="time.monotonic() to end at")
    parser.addoption("--card-outcomes", type=Path, required=True, help="a file to go on in")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Keeper(config), "card-keeper")


class _Keeper:
    def __init__(self, config: pytest.Config) -> None:
        self._until = config.getoption("--card-until")
        self._file: Path = config.getoption("--card-outcomes")
        self._longest = LEAST_S

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out tests that are done; put first those that cost least and show most."""
        outcomes = read_outcomes(self._file)
        done = [item for item in items if outcomes.get(item.nodeid) in ("passed", "skipped")]
        with self._file.open("a") as file:
            file.write(json.dumps({"collected": [item.nodeid for item in items]}) + "\n")
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]
        # a test with the fixture `run` trains a case in a worker, as the sweeps do anyway
        items.sort(
            key=lambda item: (
                item.get_closest_marker("slow") is not None,
                "run" in getattr(item, "fixturenames", ()),
            )
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Stop after this test if the next would probably not end in time."""
        start = time.monotonic()
        result = yield
        now = time.monotonic()
        self._longest = max(self._longest, now - start)
        if now + self._longest > self._until:
            item.session.shouldstop = "time is up"
        return result  # type: ignore[return-value]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Finish undisturbed: at the same time the card stops sessions that have not ended."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            with self._file.open("a") as file:
                file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome}) + "\n")


def read_outcomes(file: Path) -> dict[str, str]:
    """Return the last outcome of each collected test; empty if it has not run."""
    collected: dict[str, str] = {}
    outcomes: dict[str, str] = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for line in map(json.loads, lines):
        if "collected" in line:
            collected = dict.fromkeys(line["collected"], "")
        else:
            outcomes[line["test"]] = line["outcome"]
    return {test: outcomes.get(test, "") for test in collected}
