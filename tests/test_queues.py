"""The scripts of docs/gpus.md: they are bash, and what they start is a sweep in shards."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.results.store.reader import read_records
from bench.results.study.sweeps import read_sweep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpus.md").read_text()
CASES = 12  # four precisions, three batch sizes
REPEATS = 3


def take(mark: str) -> str:
    """The block of code between the marks of its name."""
    found = re.search(f"<!-- {mark} -->\n```\\w+\n(.*?)```\n<!-- /{mark} -->", PAGE, re.DOTALL)
    assert found
    return found[1]


def write_program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a .venv whose sweeps are the fake's and print no report."""
    quick = "import sys; from bench.sweep import __main__ as sweep; "
    quick += "from tests.fake_executor import known; "
    quick += "sweep.print_report = lambda *folders: None\nwith known(): sys.exit(sweep.main())"
    fake = 'set -- "${@/#tf32/bf16}"; '  # which no CPU has
    fake += f"set -- -c '{quick}' \"${{@:3}}\" --executor fake --device cpu"
    fake = f'case "$2" in bench.sweep) {fake};; esac'
    write_program(tmp_path / "bin" / "python", f'{fake}\nexec {sys.executable} "$@"')
    write_program(tmp_path / ".venv" / "bin" / "activate", f'PATH="{tmp_path}/bin:$PATH"')
    (tmp_path / "data").mkdir()
    return tmp_path


def run(place: Path, script: str, *arguments: str, **variables: str) -> None:
    env = os.environ | variables | {"PATH": f"{place}/bin:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", script, "script", *arguments], cwd=place, env=env, check=True)


@pytest.mark.slow
def test_the_array_makes_the_sweep(place: Path) -> None:
    """Every task of the array, what is added on sbatch's command line, all read as one."""
    script = take("sbatch")
    found = re.search(r"^SHARDS=([0-9]+)", script, re.MULTILINE)
    assert found
    assert f"#SBATCH --array=1-{found[1]}\n" in script
    shards = int(found[1])
    for task in range(1, shards + 1):
        run(place, script, "--dataset", "synthetic", SLURM_ARRAY_TASK_ID=str(task))
    sweep = read_sweep(place / "results" / "queued")
    assert len(sweep.rows) == CASES * REPEATS + shards, "and a sentinel for each shard"
    assert {row.dataset for row in sweep.rows} == {"synthetic"}
    assert sweep.gaps == []


def test_each_pod_of_the_job_makes_the_shard_of_its_index(place: Path) -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(take("job"))["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert spec["completionMode"] == "Indexed"
    assert f"SHARDS={spec['completions']} " in script
    run(place, script, "--dataset", "synthetic", JOB_COMPLETION_INDEX="3", RESULTS="queued")
    records = read_records(place / "queued" / "shard-4-of-4")
    assert len(records) == CASES // 4 * REPEATS + 1
    assert set(records["precision"]) == {"bf16-amp"}


def test_the_script_for_ssh_is_bash() -> None:
    subprocess.run(["bash", "-n"], input=take("ssh"), text=True, check=True)
