"""What a script tells of its steps, and that telling it neither ends nor bends its training."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack

from bench.base.inject import arm, find_happened, find_versions, read_listing
from bench.workers.script import FILE, LOST, SAMPLED, SEES, Teller, _read_group


@pytest.fixture(autouse=True)
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.workers.script._call_at_end", lambda finish: None)


def read(path: Path, kind: str) -> list[Any]:
    lines = map(json.loads, path.read_text().splitlines())
    return [line[1:] for line in lines if line[0] == kind]


class _Event:
    def __init__(self, **_: Any) -> None:
        self.device = -1

    def record(self, stream: int) -> None:
        self.device = stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        assert self.device == other.device, "events of two GPUs have no time between them"
        return 1e3 * self.device


def fake_torch(allocated: list[int]) -> Any:
    """A torch with a GPU for each of these bytes held; the first is the current one."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(allocated),
        memory_allocated=lambda index: allocated[index],
        max_memory_allocated=lambda index: 7,
        max_memory_reserved=lambda index: 8,
        current_device=lambda: 0,
        current_stream=lambda index: index,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"card-{index}"),
        Event=_Event,
    )
    return SimpleNamespace(
        cuda=cuda, empty=lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: 2)
    )


class _Loss:
    is_cuda = True

    def __init__(self, device: int) -> None:
        self.get_device = lambda: device
        self.numel = lambda: 1
        self.detach = self.reshape = lambda *_: self


@pytest.mark.parametrize(
    ("allocated", "losses", "cards", "times"),
    [
        ([0, 9, 0], [None] * 3, ["GPU-card-1"], [None, 1.0, 1.0]),  # not the idle first
        ([9, 9, 0], [_Loss(2)] * 3, ["GPU-card-2"], [None, 2.0, 2.0]),
        # between two of them the time is that of the calls
        ([9, 9, 0], [*map(_Loss, (1, 1, 2))], ["GPU-card-1", "GPU-card-2"], [None, 1.0, 0.0]),
    ],
)  # fmt: skip
def test_a_step_is_timed_on_the_gpu_that_trains(
    allocated: list[int], losses: list[Any], cards: list[str], times: list[float | None],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", fake_torch(allocated))
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setattr("bench.workers.script.SAMPLED", -1)
    teller = Teller(str(tmp_path / "steps"))
    for loss in losses:
        teller.step(4, loss)
    who = [one["card"] for (one,) in read(tmp_path / "steps", "who") if one["card"]]
    steps = read(tmp_path / "steps", "step")
    assert who == cards
    Teller(str(tmp_path / "steps")).step(4, losses[0])  # one that is not the first to tell
    assert (tmp_path / f"steps.{os.getpid()}").read_text() == cards[0]
    assert [time_s and int(time_s) for _, time_s, _, _ in steps] == times


@pytest.mark.parametrize("rank", ["", "1", "x"])
def test_variables_that_were_left_over_silence_nobody(
    rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", rank and "4")
    teller = Teller(str(tmp_path / "steps"))
    teller.step(4, 1.0)
    ((who,),) = read(tmp_path / "steps", "who")
    assert (who["pid"], who["known"]) == (os.getpid(), False)
    assert len(read(tmp_path / "steps", "step")) == 1
    # those who told steps are counted by their files
    assert [path.name for path in tmp_path.glob("steps.*")] == [f"steps.{os.getpid()}"]


@pytest.mark.parametrize(
    ("names", "shape", "processes"),
    [
        (("dp", "tp"), (2, 4), 2),
        (("pp", "dp_shard", "tp"), (2, 2, 2), 2),
        (("replicate", "shard"), (2, 4), 8),
        (("tp",), (8,), 1),
        (None, (2, 4), 8),
    ],
)
def test_processes_that_share_their_items_count_once(
    names: tuple[str, ...] | None, shape: tuple[int, ...], processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class DeviceMesh:
        mesh_dim_names = names

        def __init__(self) -> None:
            self.shape, self.size = shape, lambda: 8

    meshes = ModuleType("meshes")
    meshes.DeviceMesh = DeviceMesh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed.device_mesh", meshes)
    distributed = sys.modules["torch.distributed"]
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 8)):
        monkeypatch.setattr(distributed, name, partial(lambda value: value, value))
    kept = DeviceMesh()
    assert _read_group() == (0, processes, True), kept


def test_a_full_disk_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Teller(str(tmp_path / "gone" / "steps"))
    nowhere.step(4, 1.0)
    nowhere.step(4, 1.0)
    assert capsys.readouterr().err.count(f"{LOST}: FileNotFoundError") == 1
    teller = Teller(str(tmp_path / "steps"))
    teller.step(4, 1.0)

    def write(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("bench.workers.script.os.write", write)
        teller.step(4, 1.0)
    teller.step(4, 1.0)
    teller.epoch(loss=1.0, accuracy=None)
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert len(read(tmp_path / "steps", "step")) == 1
    with pytest.raises(ValueError, match="takes a whole number"):  # a mistake of the script's
        teller.step(0, 1.0)


def train(teller: Teller, run: Any, steps: int = 6) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    for step in range(steps):
        (weight * run(torch.randn(4, 3), step)).sum().backward()
        optimizer.step()
        teller.step(4, None)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("first", [SAMPLED, 0])
def test_a_network_that_is_first_compiled_in_the_counted_step_runs_compiled(
    first: int, tmp_path: Path
) -> None:
    called: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        def count(*args: Any) -> Any:
            called.append(1)
            return graph(*args)

        return count

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    made: Any = None

    def run(x: torch.Tensor, step: int) -> torch.Tensor:
        nonlocal made
        if step == first:
            made = torch.compile(double, backend=backend)
        y: torch.Tensor = made(x) if step >= SAMPLED else x
        return y

    train(Teller(str(tmp_path / "steps")), run)
    assert len(called) == 6 - SAMPLED
    ((work,),) = read(tmp_path / "steps", "work")
    assert work["failure"] == "compiled code does not show its operations"


@pytest.mark.usefixtures("uncompiled")
def test_a_counted_step_leaves_no_mode_behind(tmp_path: Path) -> None:
    teller, forked = Teller(str(tmp_path / "steps")), list[int]()

    def run(x: torch.Tensor, step: int) -> torch.Tensor:
        if step == SAMPLED:
            assert _len_torch_dispatch_stack() == 1
            if not (pid := os.fork()):  # as a DataLoader starts its workers
                os._exit(_len_torch_dispatch_stack())
            forked.append(os.waitpid(pid, 0)[1])
        return x @ torch.ones(3, 3)

    train(teller, run)
    assert (forked, _len_torch_dispatch_stack()) == ([0], 0)
    ((work,),) = read(tmp_path / "steps", "work")
    assert (work["failure"], work["unseen"]) == ("", [])
    assert sum(row[4] for row in work["work"]) == 2 * 4 * 3 * 3


ROOT = Path(__file__).parents[2]
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"][
    "per-file-target-version"
]


def test_what_a_script_loads_is_listed_and_any_python_since_3_9_can_read_it() -> None:
    """Nothing else of the harness is loaded into the process of a script: ruff holds what is to an
    older Python's library and grammar."""
    own = ROOT / "bench" / "workers" / "script.py"
    names = re.findall(r'import_own\("([\w.]+)"\)', own.read_text())
    assert len(names) >= 6
    load = (
        "import sys, torch; before = {*sys.modules}; from bench.workers import script\n"
        f"for name in {names}: script.import_own(name)\n"
        "for name in {*sys.modules} - before: print(getattr(sys.modules[name], '__file__', ''))"
    )
    ran = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True)
    files = {Path(one) for one in ran.stdout.split() if Path(one).is_relative_to(ROOT / "bench")}
    listed = {
        ROOT / f"{one.group(1)}{name}{one.group(3)}"
        for one in (re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", glob) for glob in LISTED)
        if one
        for name in one.group(2).split(",")
    }
    listed.add(ROOT / "bench/base/inject/sitecustomize.py")
    loaded = {one for one in files if len(ast.parse(one.read_text()).body) > 1}  # not a docstring
    assert loaded | {ROOT / "bench/base/inject/sitecustomize.py"} == listed
    for file in listed:
        ast.parse(file.read_text(), feature_version=(3, 9))
    for name in ("base/inject/sitecustomize", "workers/hook", "workers/script"):
        ast.parse((ROOT / "bench" / f"{name}.py").read_text(), feature_version=(3, 8))


PYTHONS = [
    os.environ.get("BENCH_OLD_PYTHON", sys.executable),
    *map(str, sorted((Path.home() / ".pyenv" / "versions").glob("3.[!67]*.*/bin/python"))),
]


@pytest.mark.parametrize("python", PYTHONS)
def test_another_python_is_watched_and_its_script_runs_as_it_is(
    python: str, tmp_path: Path
) -> None:
    """What stands for torch here shows nothing: the script runs, and tells its steps."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace as N\n__version__ = '1.0'\nversion = N(cuda=None)\n"
        "backends = N(cudnn=N(version=lambda: None))\ncuda = N(is_initialized=lambda: False)\n"
    )
    (tmp_path / "train.py").write_text("import torch, bench\n" + 2 * "bench.step(items=2)\n")
    listing, steps = tmp_path / "files", tmp_path / "steps"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), FILE: str(steps), SEES: "1"}
    environment |= arm(environment, listing, 0, str(ROOT / "bench" / "workers" / "script.py"))
    subprocess.run([python, "train.py"], cwd=tmp_path, env=environment, check=True)
    entries = read_listing(listing)
    assert find_versions(entries, None)["torch"] == "1.0"
    assert "AttributeError" in find_happened(entries)["failed"]
    assert [items for *_, items, _ in read(steps, "step")] == [2, 2]
