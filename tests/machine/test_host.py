"""What a case runs on: asked of a process of its own, and what that decides."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.base.errors import UsageError
from bench.machine import host
from bench.machine.host import (
    PACKAGES,
    describe_card,
    describe_host,
    describe_other,
    find_missing,
    find_variables,
    has_cuda,
)
from bench.machine.nvml import Card
from bench.schema.precision import PRECISIONS, Arithmetic
from bench.schema.record import Environment
from bench.training.device_rates import list_arithmetics
from bench.workers.examination import Platform, describe_device, probe
from tests.planted.records import ROOT
from tests.pytest_for_tests import Patch


def test_packages_are_those_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split(r"\W*>=", line)[0] for line in declared] == list(PACKAGES)
    assert find_missing() == (), "by the names they are imported as"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("cuda: Optional[str] = '13.0'", True), ('cuda = "12.8"', True), ("cuda: str = None", False)],
)
def test_a_cuda_build_is_known_without_importing_it(
    line: str, expected: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(host, "find_spec", lambda name: spec)
    monkeypatch.setattr(host, "find_cards", lambda: ([Card("GPU-aa", "NVIDIA H200")], ""))
    assert has_cuda.__wrapped__() is expected


def test_a_gpu_of_a_build_for_rocm_has_no_compute_capability(monkeypatch: Patch) -> None:
    """Its torch calls it cuda, and 9.4 would be a Hopper's, which has tf32 and fp8."""
    about = {"name": "AMD Instinct MI300X", "major": 9, "minor": 4, "uuid": "1", "total_memory": 1}
    card, ones = SimpleNamespace(**about), torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3_005_000)  # that of MIOpen
    found = describe_device("cuda", Environment())
    assert (found.error, found.environment.gpu) == ("", "AMD Instinct MI300X")
    assert {name for name, kind in PRECISIONS.items() if found.refuse(kind)} == {"tf32", "fp8"}
    assert not any(map(found.find_emulation, PRECISIONS.values()))
    measured = list_arithmetics(torch.device("cuda"))
    assert measured == [Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16]


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_a_broken_torch_is_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    broken = tmp_path / "torch" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('libcudart.so.12: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for which another server is started
    with pytest.raises(UsageError, match=r"libcudart.so.12: cannot open; install torch>=2.9"):
        probe("cpu")


def test_the_card_described_is_the_one_torch_uses(monkeypatch: Patch) -> None:
    """Not the first that NVML lists."""
    cards = [
        Card("GPU-aa", "NVIDIA T4", 0, driver="1.0", ecc=True),
        Card("GPU-bb", "NVIDIA H200", 1, driver="2.0", mig=False),
    ]
    monkeypatch.setattr(host, "find_cards", lambda: (cards, ""))

    def find(uuid: str) -> Environment:
        return Environment(**describe_card(uuid))

    found = find("GPU-bb")
    states = (found.driver, found.mig, found.ecc, found.persistence_mode)
    assert states == ("2.0", "off", None, None)
    assert find("GPU-aa").ecc == "on"
    assert find("GPU-cc").driver is None


def test_variables_that_change_results_are_of_the_host(monkeypatch: Patch) -> None:
    harmless = (
        "HOME=/root CUDA_VISIBLE_DEVICES=0 TORCHINDUCTOR_CACHE_DIR=/tmp/x CUDNN_LOGINFO_DBG=1 "
        "TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCHINDUCTOR_COMPILE_THREADS=4 TRITON_CACHE_DIR=/tmp/x"
    )
    changing = (
        "CUDA_LAUNCH_BLOCKING=1 CUDNN_CONV_WSCAP_DBG=100 NVIDIA_TF32_OVERRIDE=0 OMP_NUM_THREADS=4 "
        "PYTORCH_ALLOC_CONF=expandable_segments:True "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCHDYNAMO_DISABLE=1 "
        "TORCHINDUCTOR_CPP_GEMM_CACHE_BLOCKING=1,1,1 TORCHINDUCTOR_MAX_AUTOTUNE=1 "
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 TORCH_COMPILE_DISABLE=1"
    )
    for name in find_variables():
        monkeypatch.delenv(name)
    assert describe_host().variables is None
    for one in f"{harmless} {changing}".split():
        monkeypatch.setenv(*one.split("=", 1))
    assert describe_host().variables == changing


def gpu(capability: str) -> Platform:
    return Platform(Environment(gpu="NVIDIA Card", capability=capability))


CPU = Platform(Environment())


def cpu(rate_float16: float) -> Platform:
    """One whose rates were measured."""
    return Platform(Environment(rate_float32=1e11, rate_float16=rate_float16))


@pytest.mark.parametrize(
    ("platform", "precision", "refused", "emulated"),
    [
        (gpu("7.5"), "tf32", True, ""),
        (gpu("7.5"), "bf16-amp", False, "NVIDIA Card has no bfloat16 arithmetic"),
        (gpu("8.9"), "fp8", False, ""),
        (gpu("10.0"), "tf32", False, ""),  # though "10.0" sorts before "8.0"
        (CPU, "fp8", True, ""),
        (CPU, "tf32", True, ""),
        (CPU, "bf16", False, ""),
        (CPU, "fp16", False, "most CPUs have no float16 arithmetic"),
        (cpu(1e9), "fp16-amp", False, "a CPU has no float16 arithmetic"),
        (cpu(2e11), "fp16", False, ""),
    ],
)
def test_what_runs_where(platform: Platform, precision: str, refused: bool, emulated: str) -> None:
    chosen = PRECISIONS[precision]
    assert bool(platform.refuse(chosen)) is refused
    if not refused:
        assert platform.find_emulation(chosen) == emulated


def test_commit_says_whether_the_code_was_edited(tmp_path: Path, monkeypatch: Patch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(host, "_ROOT", tmp_path / "bench")
    assert describe_host().commit is None
    (tmp_path / "bench").mkdir()
    code = tmp_path / "bench" / "x.py"
    code.write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    commit = git("rev-parse", "--short=12", "HEAD")
    assert describe_host().commit == commit
    code.write_text("a = 2\n")
    assert describe_host().commit == f"{commit}+dirty"
    # a hook of git's has these of the repository that it is of
    subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    assert describe_host().commit == f"{commit}+dirty"
    # packages of an environment within a project are not of its commit
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr(host, "_ROOT", tmp_path / "venv")
    assert describe_host().commit is None


@pytest.mark.parametrize("module", ["__main__", "sweep", "report", "compare", "scales", "check"])
def test_help_imports_nothing_heavy(module: str) -> None:
    """What makes --help slow, rather than how slow it was: torch takes 1.6 s, pandas 0.3 s."""
    code = (
        "import atexit, json, runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "atexit.register(lambda: print(json.dumps([m for m in sys.modules if '.' not in m])))\n"
        "runpy.run_module(f'bench.{sys.argv[0]}', run_name='__main__')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("usage: ")
    loaded = set(json.loads(out.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "pandas", "seaborn", "matplotlib", "scipy", "pyarrow", "numpy"}


def test_a_row_of_a_command_is_of_the_card_that_it_chose() -> None:
    """Torch told of the usual one what stays where the other is of its kind."""
    usual = Card("GPU-a", "NVIDIA H200", memory_bytes=150_000_000_000, capability=(9, 0))
    like = replace(usual, uuid="GPU-b", ecc=True)
    other = Card("GPU-c", "NVIDIA L4", memory_bytes=24_000_000_000, capability=(8, 9))
    known = {"persistence_mode": None, "ecc": None, "mig": None}
    assert describe_other(usual, usual) == {}
    assert describe_other(like, usual) == {**known, "gpu_uuid": "GPU-b", "ecc": "on"}
    assert describe_other(other, usual) == {
        **known,
        "gpu_uuid": "GPU-c",
        "gpu": "NVIDIA L4",
        "gpu_memory_bytes": 24_000_000_000,
        "capability": "8.9",
    }
