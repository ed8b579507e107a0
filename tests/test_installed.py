"""The wheel in an environment of its own, outside the checkout: the commands people begin with.

The environment shares the packages of this one, torch first, but not what is installed of the
checkout. `make dist` gives the wheel of a release by BENCH_WHEEL.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.planted.records import ROOT

NETWORK = """
from torch import nn

def factory():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
"""
SCRIPT = """
import sys
import torch

model = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(int(sys.argv[1]), 64)).square().mean().backward()
    optimizer.step()
"""

APART = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Variables without that which would find the checkout, for pip too."""


@dataclass
class Installed:
    """The programs of an environment with the wheel, and an empty folder to work in."""

    programs: Path
    folder: Path

    def run(self, command: str, codes: Sequence[int] = (0,)) -> str:
        """Run a command as it is typed there; return what it printed."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env=APART | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout or done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    work = folder / "work"
    work.mkdir()
    (work / "mine.py").write_text(NETWORK)
    (work / "train.py").write_text(SCRIPT)
    wheel = os.environ.get("BENCH_WHEEL") or build_wheel(folder)
    venv.create(folder / "env", with_pip=False)
    programs = folder / "env" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python")]
    words = ["install", "--no-deps", "--no-index", "--quiet", wheel]
    subprocess.run([*pip, *words], check=True, env=APART)
    (own,) = (folder / "env" / "lib").glob("python*/site-packages")
    # a folder on such a line is searched, but its own .pth files, that of the checkout, are not
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(programs, work)


def build_wheel(folder: Path) -> str:
    """From a copy: setuptools writes beside what it builds."""
    source = folder / "source"
    shutil.copytree(ROOT / "bench", source / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("precision_bench.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return str(wheel)


def test_the_package_has_two_names_and_one_version(installed: Installed) -> None:
    code = "import bench, precision_bench as p; print(bench.__file__, p.Loss is bench.Loss)"
    place, same = installed.run(f"python -c '{code}'").split()
    assert Path(place).is_relative_to(installed.programs.parent)
    assert same == "True"
    versions = {
        installed.run(f"{name} --version") for name in ("precision-bench", "python -m bench")
    }
    versions |= {installed.run("precision-bench report --version")}
    (version,) = versions
    assert version.startswith("precision-bench 0.")


def test_a_network_is_measured_and_read(installed: Installed) -> None:
    small = "--dataset synthetic --precision fp32 --batch-size 4 8 --steps 4 --repeats 2"
    out = installed.run(f"precision-bench sweep --model mine:factory --device cpu {small} --out a")
    assert "2 cases in 4 runs: 2 ok" in out
    assert "factory" in installed.run("precision-bench report a")
    installed.run("precision-bench report a -o page.html")
    assert "<table" in (installed.folder / "page.html").read_text()
    assert "4" in installed.run("precision-bench compare a --axis batch_size 4 8", codes=(0, 1))
    assert "ok     code" in installed.run("precision-bench validate a")
    installed.run("precision-bench publish --results . --out html")
    assert "<table" in (installed.folder / "html" / "sweeps" / "a.html").read_text()


def test_a_script_is_measured(installed: Installed) -> None:
    command = "--command 'python train.py {batch_size}' --batch-size 16 32 --device cpu"
    installed.run(f"precision-bench sweep {command} --out b")
    with (installed.folder / "b" / "records.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["repeat"]]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(int(row["measured_steps"]) > 0 for row in rows)


def test_the_machine_is_examined(installed: Installed) -> None:
    # it may rightly find this machine busy
    assert json.loads(installed.run("python -m bench.doctor --format json", codes=(0, 1)))


def test_what_is_not_there_is_named(installed: Installed) -> None:
    code = 'from bench.base.installation import describe_extra as d; print(d("fp8"))'
    assert installed.run(f"python -c '{code}'") == "pip install 'precision-bench[fp8]'\n"
    assert "--results names that" in installed.run("precision-bench publish", codes=(2,))


def test_a_row_names_the_release_and_whether_it_was_edited(installed: Installed) -> None:
    code = "python -c 'import bench.machine.host as h; print(h.__file__, h.read_commit())'"
    place, release = installed.run(code).split()
    assert release == f"v{installed.run('precision-bench --version').split()[1]}"
    Path(place).write_text(Path(place).read_text() + "# edited\n")
    assert installed.run(code).split()[1] == f"{release}+dirty"
