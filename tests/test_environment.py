"""What a case runs on: asked of a process of its own, and what that decides."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pytest_for_tests import Patch

from bench import cores
from bench.cores import read_governor
from bench.environment import host, source
from bench.environment.device import Platform
from bench.environment.examination import DeviceAnswer, ProcessAnswer, ask, describe_device, probe
from bench.environment.host import CPU_FLAGS, describe_host, has_cuda, read_cpu_flags
from bench.environment.packages import PACKAGES, find_missing
from bench.environment.source import hash_code
from bench.environment.variables import find_variables
from bench.errors import UsageError
from bench.gpu.cards import Card, Link
from bench.precision import PRECISIONS, Arithmetic
from bench.record import Environment
from bench.training.yardstick import list_arithmetics

ROOT = Path(__file__).parents[1]


def test_what_torch_says_of_a_device() -> None:
    import torch

    answer = ask(["cpu", "cuda"])
    found = answer.platform("cpu").environment
    assert found.torch == str(torch.__version__)
    assert (found.torch_threads or 0) >= 1
    assert found.torch_interop_threads is not None
    assert found.gpu is None
    assert found.host
    assert found.code == hash_code()
    assert "cores" in (found.cpu or "")
    if torch.version.cuda is None:
        refused = r"is a CPU build; install a CUDA build of torch, or use"
        with pytest.raises(UsageError, match=refused):
            answer.platform("cuda")


def test_packages_are_those_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [re.split(r"\W*>=", line)[0] for line in declared] == list(PACKAGES)
    assert find_missing() == (), "by the names they are imported as"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", True),
        ("cuda: str | None = '13.0'", True),
        ('cuda = "12.8"', True),
        ("cuda: Optional[str] = None", False),
    ],
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
    import torch

    card = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4, uuid="1", total_memory=1)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = describe_device("cuda")
    assert (found.error, found.environment["gpu"]) == ("", "AMD Instinct MI300X")
    platform = Platform(Environment(**found.environment))
    assert {name for name, kind in PRECISIONS.items() if platform.refuse(kind)} == {"tf32", "fp8"}
    assert not any(map(platform.find_emulation, PRECISIONS.values()))
    measured = list_arithmetics(torch.device("cuda"))
    assert measured == [Arithmetic.FLOAT32, Arithmetic.FLOAT16, Arithmetic.BFLOAT16]


@pytest.mark.parametrize("name", ["H\ufffd\ufffd", None])
def test_a_gpu_whose_name_is_not_utf8_is_described(name: str | None, monkeypatch: Patch) -> None:
    import torch

    class Properties:
        major, minor, uuid, total_memory = 9, 0, "1", 1

        @property
        def name(self) -> str:
            return name or b"\x87".decode()

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device=None: ones(*size))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    found = describe_device("cuda")
    assert (found.error, found.environment["gpu"]) == ("", "unknown GPU")


def test_a_broken_torch_is_one_line(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}")
    with pytest.raises(UsageError, match=r"libcudart.so.12: cannot open; install torch>=2.9"):
        probe("cpu")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"/torch.py hides torch: give it another name"):
        probe("cpu")


def test_the_card_described_is_the_one_torch_uses(monkeypatch: Patch) -> None:
    """Not the first that NVML lists."""
    cards = [
        Card("GPU-aa", "NVIDIA T4", 0, driver="1.0", ecc=True),
        Card("GPU-bb", "NVIDIA H200", 1, driver="2.0", mig=False, pcie=Link(4, 8, 5, 16)),
    ]
    monkeypatch.setattr(host, "find_cards", lambda: (cards, ""))

    def find(uuid: str) -> Environment:
        answer = DeviceAnswer({"gpu": "NVIDIA H200", "gpu_uuid": uuid})
        return ProcessAnswer(devices={"cuda": answer}).platform("cuda").environment

    found = find("GPU-bb")
    states = (found.driver, found.mig, found.ecc, found.persistence_mode)
    assert states == ("2.0", "off", None, None)
    assert found.pcie == "gen 4 x8, at most gen 5 x16"
    assert find("GPU-aa").ecc == "on"
    assert find("GPU-cc").driver is None


def test_variables_and_governor_are_of_the_host(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in find_variables():
        monkeypatch.delenv(name)
    assert describe_host().variables is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/x")
    assert describe_host().variables == "CUDA_LAUNCH_BLOCKING=1 OMP_NUM_THREADS=3"
    cpus = cores.usable_cpus()
    assert read_governor(tmp_path) is None
    for cpu, governor in zip(cpus, ("powersave", "performance"), strict=False):
        file = tmp_path / f"cpu{cpu}" / "cpufreq" / "scaling_governor"
        file.parent.mkdir(parents=True)
        file.write_text(f"{governor}\n")
    assert read_governor(tmp_path) == ("performance, powersave" if len(cpus) > 1 else "powersave")


def gpu(capability: str) -> Platform:
    return Platform(Environment(gpu="NVIDIA Card", capability=capability))


@pytest.mark.parametrize(
    ("platform", "precision", "refused", "discouraged"),
    [
        (gpu("9.0"), "tf32", False, False),
        (gpu("7.5"), "tf32", True, True),
        (gpu("7.5"), "bf16-amp", False, True),
        (gpu("8.9"), "fp8", False, False),
        (Platform(Environment()), "fp8", True, True),
        (gpu("10.0"), "tf32", False, False),  # 10 is above 8, though "10.0" sorts before "8.0"
        (Platform(Environment(), fp16_native=False), "fp16", False, True),
        (Platform(Environment()), "tf32", True, False),
        (Platform(Environment()), "bf16-amp", False, False),
    ],
)
def test_what_runs_where(
    platform: Platform, precision: str, refused: bool, discouraged: bool
) -> None:
    chosen = PRECISIONS[precision]
    assert bool(platform.refuse(chosen)) is refused
    assert bool(platform.discourage(chosen)) is discouraged


def test_both_halves_are_emulated_where_both_are() -> None:
    cpu = Platform(Environment(), fp16_native=False, bf16_native=False)
    found = {name: cpu.find_emulation(precision) for name, precision in PRECISIONS.items()}
    assert found["fp16"] == "this CPU has no fp16 arithmetic"
    assert found["bf16"] == found["bf16-amp"] == "this CPU has no bf16 arithmetic"
    assert found["fp32"] == Platform(Environment()).find_emulation(PRECISIONS["bf16"]) == ""
    turing = Platform(Environment(gpu="Tesla T4", capability="7.5"))
    assert turing.find_emulation(PRECISIONS["bf16"]) == "Tesla T4 has no bfloat16 arithmetic"


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("flags\t\t: fpu avx2\n", set()),
        ("flags\t\t: fpu avx512_bf16 avx512_fp16\nflags\t\t: fpu\n", set(CPU_FLAGS)),
        ("model name\t: bf16\n", set()),
    ],
)
def test_instructions_of_a_cpu(text: str, formats: set[Arithmetic], tmp_path: Path) -> None:
    (file := tmp_path / "cpuinfo").write_text(text)
    flags = read_cpu_flags(file)
    assert {format for format, needed in CPU_FLAGS.items() if needed & flags} == formats
    assert read_cpu_flags(tmp_path / "nowhere") == frozenset()


def test_commit_says_whether_the_code_was_edited(tmp_path: Path, monkeypatch: Patch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            [*command, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    monkeypatch.setattr(source, "_ROOT", tmp_path / "bench")
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


@pytest.mark.parametrize("module", ["sweep", "report", "compare", "doctor", "scales", "check"])
def test_help_imports_nothing_heavy(module: str) -> None:
    """What makes --help slow, rather than how slow it was: torch takes 1.6 s, pandas 0.3 s."""
    code = (
        "import sys, runpy, json\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try: runpy.run_module(f'bench.{sys.argv[0]}', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(json.dumps([m for m in sys.modules if '.' not in m]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("usage: ")
    loaded = set(json.loads(out.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "pandas", "seaborn", "matplotlib", "scipy", "pyarrow", "numpy"}


@pytest.fixture
def grouped(tmp_path: Path) -> Callable[..., cores.Quota | None]:
    """The quota of a process in these groups, of which the tree holds these files."""

    def read(groups: str, mounts: list[str], files: dict[str, str]) -> cores.Quota | None:
        (tmp_path / "cgroup").write_text(groups)
        lines = [f"31 23 0:28 {mount.replace('TOP', str(tmp_path))}\n" for mount in mounts]
        (tmp_path / "mountinfo").write_text("".join(lines))
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return cores.read_quota(tmp_path)

    return read


V1 = ["/ TOP rw shared:1 - tmpfs tmpfs rw,mode=755", "/ TOP/mem rw - cgroup cgroup rw,memory"]
V2 = ["/ TOP/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"]


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/", V2, {"unified/cpu.max": "30000 100000\n"}, 0.3),
        ("0::/a/b", V2, {"unified/a/b/cpu.max": "max 1000", "unified/a/cpu.max": "150 1000"}, 0.15),
        ("0::/a", V2, {"unified/a/cpu.max": "500 1000", "unified/cpu.max": "2000 1000"}, 0.5),
        ("0::/a", V2, {"unified/a/cpu.max": "max 100000"}, None),
        (
            "4:cpu,cpuacct:/x\n3:memory:/y\n0::/",
            [*V1, *V2, "/ TOP/cpu rw - cgroup cgroup rw,cpu,cpuacct"],
            {"cpu/x/cpu.cfs_quota_us": "150000", "cpu/x/cpu.cfs_period_us": "100000"}, 1.5,
        ),
        (
            "1:cpu:/docker/1f", ["/docker/1f TOP/cpu rw - cgroup cgroup rw,cpu"],
            {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "100000"}, 0.2,
        ),
        (
            "1:cpu:/docker/1f", ["/ TOP/cpu rw - cgroup cgroup rw,cpu"],
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None,
        ),
    ],
)  # fmt: skip
def test_a_quota_of_control_groups_is_found(
    groups: str, mounts: list[str], files: dict[str, str], quota: float | None, grouped: Any
) -> None:
    found = grouped(groups, mounts, files)
    assert (found and found.cores) == quota
    assert found is None or Path(found.file).exists()


def test_a_quota_is_the_number_of_cores(monkeypatch: Patch) -> None:
    monkeypatch.setattr(cores, "usable_cpus", lambda: [0, 1])
    for quota, number in ((None, "2 cores"), (0.3, "0.3 cores"), (1.0, "1 core"), (8.0, "2 cores")):
        told = quota and cores.Quota(quota, "cpu.max")
        monkeypatch.setattr(cores, "read_quota", lambda told=told: told)
        assert (describe_host().cpu or "").endswith(f", {number}")
    # others compute on one core of two, and take nothing from a third of one
    busy = cores.OtherWork(busy=13.0, own=3.0, wall=10.0)
    busy.on, busy.quota = [0, 1], cores.Quota(0.3, "cpu.max")
    assert busy.cores() == 0
    busy.sums = 20.0, 1.0, 10.0, 0.0
    assert busy.cores() == pytest.approx(0.2), "of 1.9 cores, 1.7 are beyond the quota"


def test_the_cores_were_busy_for_what_is_neither_idle_nor_a_guest_s(monkeypatch: Patch) -> None:
    """Linux counts a guest's time in user and nice too; other systems tell of less."""
    times = {"user": 5.0, "nice": 1.0, "system": 2.0, "idle": 90.0, "iowait": 7.0, "irq": 0.5}
    times |= {"softirq": 0.25, "steal": 3.0, "guest": 2.0, "guest_nice": 0.5}
    core, other = namedtuple("core", times), namedtuple("other", ["user", "idle"])
    told = [other(1000.0, 0.0), core(**times), other(4.0, 9.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: told)
    monkeypatch.setattr(cores, "usable_cpus", lambda: [1, 2, 7])
    assert cores.read_core_times() == (8.75 + 4.0, 3.0)
