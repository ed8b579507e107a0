"""Power limits: what a card is given for a case, and that it has its own again whatever ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from bench.base.errors import UnsupportedError
from bench.machine.power import POWER_FOLDER, hold_limits, refuse_limits, restore_limits
from bench.results.store.reader import read_records
from tests.machines_for_tests import GPU, MACHINES, FakeNvml, error
from tests.pytest_for_tests import Patch
from tests.workers_for_tests import find_workers, gone

SET = "nvmlDeviceSetPowerManagementLimit"
OTHER = GPU.replace("8932", "1111")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Where limits are written down: of no user's sweep."""
    monkeypatch.setenv(POWER_FOLDER, str(tmp_path / "power"))
    return tmp_path / "power"


def list_set(fake: FakeNvml) -> list[tuple[str, float]]:
    return [(call[1], call[2] / 1e3) for call in fake.calls if call[0] == SET]


# ------------------------------------------------------------------------------- for one case


def test_every_card_has_it_in_the_block_and_its_own_after_it(folder: Path) -> None:
    fake = FakeNvml((GPU, OTHER))
    fake.limits[OTHER] = 650_000
    with hold_limits([GPU, OTHER], 300, fake) as find_changed:
        assert fake.limits == {GPU: 300_000, OTHER: 300_000}
        assert sorted(file.name for file in folder.iterdir()) == sorted([GPU, OTHER])
        assert fake.open == 1, "a driver without a client forgets a limit"
        assert find_changed() == ""
    assert list_set(fake) == [(GPU, 300), (OTHER, 300), (OTHER, 650), (GPU, 700)]
    assert not [*folder.iterdir()]
    assert fake.open == 0


def test_what_was_there_is_written_down_before_anything_is_set(folder: Path) -> None:
    class Watched(FakeNvml):
        def __getattr__(self, name):
            if name == SET and not noted:
                noted.append((folder / GPU).read_text().split())
            return super().__getattr__(name)

    noted: list[list[str]] = []
    with hold_limits([GPU], 300, Watched()):
        pass
    assert noted == [["700.0", str(os.getpid())]]


def test_what_the_block_raises_comes_out_as_it_is() -> None:
    fake = FakeNvml()
    with pytest.raises(ValueError, match="so it is"), hold_limits([GPU], 300, fake):
        raise ValueError("so it is")
    assert list_set(fake) == [(GPU, 300), (GPU, 700)]


def test_without_one_nothing_is_set_nor_asked() -> None:
    fake = FakeNvml()
    with hold_limits([GPU], None, fake):
        pass
    assert restore_limits(nvml=fake) == []
    assert fake.calls == []


def test_a_card_that_has_it_needs_no_root(folder: Path) -> None:
    fake = FakeNvml(**{SET: error("NO_PERMISSION")})
    fake.limits[GPU] = 300_000
    assert refuse_limits(GPU, [300], True, fake) == ""
    with hold_limits([GPU], 300, fake):
        pass
    assert list_set(fake) == []
    assert not folder.exists()


def test_who_changes_it_meanwhile_is_noticed() -> None:
    fake = FakeNvml()
    with hold_limits([GPU], 300, fake) as find_changed:
        fake.limits[GPU] = 350_000
        assert find_changed() == "its power limit was changed to 350 W while it ran"
    assert fake.limits[GPU] == 700_000


def test_two_sweeps_do_not_set_one_card() -> None:
    fake = FakeNvml()
    with hold_limits([GPU], 300, fake):
        with (
            pytest.raises(UnsupportedError, match=f"another sweep has set that of {GPU}"),
            hold_limits([GPU], 400, fake),
        ):
            pass
        assert fake.limits[GPU] == 300_000
        assert restore_limits(nvml=fake) == [], "who holds it lives"
    assert fake.limits[GPU] == 700_000


@pytest.mark.parametrize("uuids", [[], [None], [GPU, None]])
def test_no_case_has_a_limit_on_some_of_its_cards_only(
    uuids: list[str | None], folder: Path
) -> None:
    fake = FakeNvml()
    refused = pytest.raises(UnsupportedError, match="NVML does not know every GPU of it")
    with refused, hold_limits(uuids, 300, fake):
        pass
    assert fake.limits in ({}, {GPU: 700_000})
    assert not [*folder.glob("GPU-*")]


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ({SET: error("NO_PERMISSION")}, "--power-limit 300: this process cannot set it (it takes "
         f"root): start the sweep by sudo, or set it yourself, sudo nvidia-smi -i {GPU} -pl 300, "
         "and give --power-limit 300 alone"),
        ({SET: error("NOT_SUPPORTED")}, "--power-limit 300: this process cannot set it (NVML: Not "
         "Supported): start"),
        ({SET: None}, "--power-limit 300: the GPU took 700 W instead"),
        ({"nvmlDeviceGetHandleByUUID": error("NOT_FOUND")}, "--power-limit 300: NVML: Not Found"),
        ({"nvmlInit": error("LIBRARY_NOT_FOUND")}, "--power-limit 300: no NVIDIA driver"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_one_line_and_leaves_nothing(
    fail: dict[str, object], reason: str, folder: Path
) -> None:
    fake = FakeNvml(**fail)
    with pytest.raises(UnsupportedError) as refused, hold_limits([GPU], 300, fake):
        pass
    assert str(refused.value).startswith(reason)
    assert fake.limits == {}
    assert fake.open == 0
    assert not folder.exists() or not [*folder.iterdir()]


def test_a_folder_that_cannot_be_written_changes_nothing(folder: Path) -> None:
    folder.write_text("a file")
    fake = FakeNvml()
    assert f"{POWER_FOLDER} names another folder" in refuse_limits(GPU, [300], True, fake)
    with (
        pytest.raises(UnsupportedError, match=f"{POWER_FOLDER} names another folder"),
        hold_limits([GPU], 300, fake),
    ):
        pass
    assert {watts for _, watts in list_set(fake)} == {700}


# --------------------------------------------------------------------------- before any case


@pytest.mark.parametrize(
    ("machine", "limits", "why"),
    [
        ("h200", [175, 700], ""),
        ("h200", [300, 900], "this GPU takes 175 to 700 W, and not 900; give another"),
        ("h200", [174], "this GPU takes 175 to 700 W, and not 174; give another"),
        ("rtx-3060-laptop", [60], "this GPU takes none, as of most laptops (NVML: Not Supported); "
         "leave it out"),
        ("wsl2", [300], "this process cannot set it (NVML: Not Supported): start the sweep by "),
        ("mig-slice", [300], "a slice that MIG makes of a GPU has no power limit of its own; "),
        ("login-node", [300], "this GPU takes none, as of most laptops (no NVIDIA driver"),
    ],
)  # fmt: skip
def test_what_a_machine_takes(machine: str, limits: list[int], why: str) -> None:
    made = MACHINES[machine]
    fake = made.nvml
    uuid = made.environ.get("CUDA_VISIBLE_DEVICES", (*made.uuids, GPU)[0])
    found = refuse_limits(uuid, limits, True, fake)
    assert found.startswith(why)
    assert bool(found) == bool(why)
    assert {watts for _, watts in list_set(fake)} <= {made.boards[0].watts if made.boards else 0}


def test_a_dry_run_sets_nothing() -> None:
    fake = FakeNvml(**{SET: error("NO_PERMISSION")})
    assert refuse_limits(GPU, [300, 400], False, fake) == ""
    assert list_set(fake) == []
    assert "-pl 300" in refuse_limits(GPU, [300, 400], True, fake)


# ------------------------------------------------------------------------- what was killed


DRIVER = '''
"""A card whose limit is a file, as a driver keeps it when processes end."""
import pathlib, types
HERE = pathlib.Path(__file__).parent
def __getattr__(name):
    if not name.startswith("nvml"):
        raise AttributeError(name)
    def call(*given, **_):
        raise RuntimeError("Not Supported")
    return call
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "%(uuid)s"
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(card): return card
def nvmlDeviceGetName(card): return "NVIDIA H200"
def nvmlDeviceGetPowerManagementLimit(card): return int((HERE / "limit").read_text())
nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetPowerManagementLimit
def nvmlDeviceGetPowerManagementLimitConstraints(card): return [200000, 700000]
def nvmlDeviceGetComputeRunningProcesses(card):
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"\\0{HERE}/begun\\0".encode() in file.read_bytes():
                found.append(types.SimpleNamespace(pid=int(file.parent.name), usedGpuMemory=1))
        except OSError:
            pass
    return found
def nvmlDeviceSetPowerManagementLimit(card, limit):
    (HERE / "limit").write_text(str(limit))
    with (HERE / "set").open("a") as log: log.write(f"{limit}\\n")
'''
SWEEP = """
import sys
from pathlib import Path
import pytest
from bench.sweep.__main__ import main
from tests.machines_for_tests import MACHINES
folder, *flags = sys.argv[1:]
with pytest.MonkeyPatch.context() as patch, MACHINES["h200"].enter(patch, Path(folder, "made")):
    del sys.modules["pynvml"]
    sys.path.insert(0, folder)
    raise SystemExit(main(flags))
"""
SCRIPT = """
import pathlib, sys, time
begun, seconds, *limit = sys.argv[1:]
pathlib.Path(begun).touch()
for watts in limit:
    pathlib.Path(begun).with_name("limit").write_text(watts + "000")
time.sleep(float(seconds))
"""


class Sweep:
    """A sweep of a script, on the card of which `DRIVER` tells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pynvml.py").write_text(DRIVER % {"uuid": MACHINES["h200"].uuids[0]})
        (folder / "train.py").write_text(SCRIPT)
        (folder / "limit").write_text("700000")

    @property
    def limits(self) -> list[int]:
        """What was set, in W, but for the card's own that is set to try that out."""
        return [int(line) // 1000 for line in (self.folder / "set").read_text().split()][1:]

    @property
    def noted(self) -> list[Path]:
        return [*(self.folder / "power").glob("GPU-*")]

    @contextmanager
    def start(
        self, seconds: float, *flags: str, limit: str = ""
    ) -> Iterator[subprocess.Popen[str]]:
        """Start it; the script takes so many seconds, and sets a limit of its own, in W."""
        command = f"{sys.executable} train.py {self.folder}/begun {seconds} {limit}"
        given = ["--command", command, "--device", "cuda", "--no-report", "--repeats", "1", *flags]
        with subprocess.Popen(
            [sys.executable, "-c", SWEEP, str(self.folder), *given],
            env={**os.environ, "BENCH_RATES_S": "0", "PYTHONPATH": str(Path.cwd())},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def wait_for_script(self, process: subprocess.Popen[str]) -> None:
        wait_until((self.folder / "begun").exists, process)

    def wait_for_end(self, watts: int) -> None:
        """Wait until the card has this limit again, and no note of it is left."""
        wait_until(lambda: not self.noted)
        assert (self.folder / "limit").read_text() == f"{1000 * watts}"


def wait_until(met: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    until = time.monotonic() + 120
    while not met():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def find_keeper(process: subprocess.Popen[str]) -> psutil.Process:
    (keeper,) = psutil.Process(process.pid).children()
    return keeper


@pytest.mark.slow
def test_a_sweep_sets_each_case_s_own_and_then_the_card_s(sweep: Sweep) -> None:
    with sweep.start(0.5, "--power-limit", "none", "300", "400", "--out", "out") as process:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    assert sweep.limits == [300, 700, 400, 700]
    assert not sweep.noted
    rows = read_records(sweep.folder / "out")
    assert [*rows["power_limit"]] == ["", "300", "400"]
    assert [*rows["power_limit_w"]] == [700, 300, 400]
    assert [*rows["status"]] == ["ok"] * 3
    assert [*rows["gpus"]] == [1] * 3


@pytest.mark.slow
def test_a_row_whose_limit_others_changed_is_invalid(sweep: Sweep) -> None:
    with sweep.start(0.5, "--power-limit", "300", "--out", "out", limit="350") as process:
        process.communicate()
    (row,) = read_records(sweep.folder / "out").to_dict("records")
    assert row["status"] == "invalid"
    assert row["reason"].startswith("its power limit was changed to 350 W while it ran")
    assert sweep.limits == [300, 700]


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["worker", "sweep", "stopped"])
def test_whatever_is_killed_the_card_has_its_own_again(ended: str, sweep: Sweep) -> None:
    with sweep.start(3600, "--power-limit", "300", "--out", "out") as process:
        sweep.wait_for_script(process)
        assert sweep.limits == [300]
        assert len(sweep.noted) == 1
        (worker,) = find_workers(process.pid)
        number = signal.SIGTERM if ended == "stopped" else signal.SIGKILL
        os.kill(worker.pid if ended == "worker" else process.pid, number)
        sweep.wait_for_end(700)
        assert sweep.limits == [300, 700]
        assert gone([worker.pid])
        process.wait(60)


@pytest.mark.slow
def test_if_all_are_killed_the_next_sweep_puts_it_back_and_says_so(sweep: Sweep) -> None:
    with sweep.start(3600, "--power-limit", "300", "--out", "out") as process:
        sweep.wait_for_script(process)
        keeper = find_keeper(process)
        for pid in (keeper.pid, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert gone([keeper.pid])
    assert sweep.limits == [300]
    assert len(sweep.noted) == 1
    with sweep.start(0.1, "--out", "next") as process:
        _, errors = process.communicate()
    uuid = MACHINES["h200"].uuids[0]
    assert (
        f"note: the power limit of {uuid} was left at 300 W by a sweep that was killed, and is "
        "700 W again\n"
    ) in errors
    assert sweep.limits == [300, 700]
    assert not sweep.noted


@pytest.mark.slow
def test_a_limit_beyond_the_range_is_refused_before_anything(sweep: Sweep) -> None:
    with sweep.start(0.1, "--power-limit", "300", "701", "--out", "out") as process:
        _, errors = process.communicate()
    assert process.returncode == 2
    assert errors == (
        "error: --power-limit: this GPU takes 200 to 700 W, and not 701; give another\n"
    )
    assert not (sweep.folder / "set").exists()
    assert not (sweep.folder / "begun").exists()


def test_who_may_not_put_back_what_was_left_says_what_to_run(folder: Path) -> None:
    folder.mkdir()
    (folder / GPU).write_text("700.0 1234")
    fake = FakeNvml(**{SET: error("NO_PERMISSION")})
    fake.limits[GPU] = 300_000
    assert restore_limits(of=1, nvml=fake) == []
    (line,) = restore_limits(nvml=fake)
    assert line.startswith(f"warning: the power limit of {GPU} was left at 300 W by a sweep, and ")
    assert line.endswith(f": sudo nvidia-smi -i {GPU} -pl 700")
    assert (folder / GPU).exists()
    fake.limits[GPU] = 700_000  # as somebody did that
    assert restore_limits(nvml=fake) == []
    assert not (folder / GPU).exists()


def test_a_case_after_a_killed_one_gives_back_what_was_there_before_both(folder: Path) -> None:
    folder.mkdir()
    (folder / GPU).write_text("650.0 1234")
    fake = FakeNvml()
    fake.limits[GPU] = 300_000
    with hold_limits([GPU], 300, fake):
        pass
    assert fake.limits[GPU] == 650_000


@pytest.mark.parametrize("left", ["", "700.0", "no number 3"])
def test_a_file_that_was_not_written_whole_changed_nothing(left: str, folder: Path) -> None:
    folder.mkdir()
    (folder / GPU).write_text(left)
    fake = FakeNvml()
    assert restore_limits(nvml=fake) == []
    assert list_set(fake) == []
    assert not (folder / GPU).exists()
