"""What tests share: where the repository is, real images, whether there is a card."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.networks.data import DatasetInfo
    from tests.planted.sweeps import Folders

# a shell's background job ignores Ctrl-C, and would hand that on to every process a test starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores

# two threads that wait for each other make a busy machine's training many times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch finds compiled code again by what was compiled, and not by the instructions it may have
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{gettempdir()}/inductor-{capability}")

# `python` and the commands of packages are those of this environment, be it activated or not
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# the harness and the networks of the tests are found by what a test starts, wherever that runs
ROOT = Path(__file__).parents[1]
given = filter(None, [os.environ.get("PYTHONPATH")])
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *given])

# hundreds of sweeps that measure the same machine; tests of this set it themselves
os.environ.setdefault("BENCH_RATES_S", "0")

# nothing is too slow on a busy machine; a profile is what no test says for itself
with suppress(ImportError):  # the tests for a card need pytest alone
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests",
        deadline=None,
        max_examples=int(os.environ.get("BENCH_FUZZ", "20")),
        # each example writes the files of a test over those of the one before
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("tests")


@cache
def why_no_cuda() -> str:
    """Why the gpu tests skip; empty where they can run."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


took: Counter[str] = Counter()
"""How long each test of this session took, in s."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    took[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep how long each test took when it last ran, once for all processes of xdist."""
    cache = getattr(session.config, "cache", None)
    if cache and not hasattr(session.config, "workerinput"):
        cache.set("seconds", cache.get("seconds", {}) | took)


@pytest.hookimpl(optionalhook=True)  # the tests for a card need pytest alone
def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: each waits for others, or a timer, a sixth of the
    time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that took longest, or in a fresh clone with those of the most slow
    tests, for with one of five minutes among the last, one core was idle for as long. Skip the gpu
    tests, saying why, where there is no card; those that are slow there come last, so that less is
    lost where time cuts them."""
    cache, files = getattr(config, "cache", None), Counter[Path]()
    seconds = cache.get("seconds", {}) if cache else {}
    for item in items:
        usual_s = 3.0 if item.get_closest_marker("slow") else 0.1
        files[item.path] += seconds.get(item.nodeid, usual_s)
    items.sort(key=lambda item: -files[item.path])
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker("slow")
            if "BENCH_THOROUGH" not in os.environ:
                item.add_marker(pytest.mark.skip(reason="make thorough runs it"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked == items:
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if marked and (reason := why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what was imported, which took 4 % of the time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is as wide as it needs, and the fake answers ok, whatever the tests are run in."""
    for name in ("COLUMNS", "BENCH_FAKE_ANSWERS", "BENCH_FAKE_MEMORY", "BENCH_FAKE_LANES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    """The commands of this process know `--executor fake`, which answers without training."""
    from tests.fake_executor import known

    with known():
        yield


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked from servers of this test's own. One with other variables would end the
    server that other tests share, and to start that again takes five seconds of a core."""
    monkeypatch.setattr("bench.workers.server._servers", {})


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of this process end without their report, which takes longer than a small one."""
    monkeypatch.setattr("bench.sweep.__main__.print_report", lambda *folders: None)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """In this process, which test files share, nothing was ever compiled, nor will it have been:
    once something was, no step of a script is counted."""
    import torch
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders of the sweeps of tests/planted, by name; each is written when it is asked for."""
    from tests.planted.sweeps import Folders

    return Folders(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="session")
def data() -> DatasetInfo:
    """The synthetic images, as a worker opens them."""
    from bench.networks.data import prepare

    return prepare("synthetic", data_dir=None)


@pytest.fixture(scope="session")
def cifar10() -> Path:
    """A folder of the 60,000 real images, kept beside the repository."""
    folder = ROOT.parent / "shared" / "cifar10"
    if not folder.is_dir():
        pytest.skip(f"no real images: {folder} is not there")
    return folder
