"""The action that guards a training of others: its steps, run by a shell as a runner does, in a
repository whose last commit is slower, and in one whose last commit is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.planted.records import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
SCRIPT = """
import time
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(1000):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep({})  # other work on this machine takes nothing of it
"""


def run_action(repository: Path, scratch: Path, **inputs: str) -> tuple[int, str]:
    """Run all steps but the installation; return the code of the last, and the summary."""
    given = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()}
    given |= {"python": sys.executable} | {k.replace("_", "-"): v for k, v in inputs.items()}
    summary = scratch / "summary"
    runner = {
        "RUNNER_TEMP": str(scratch),
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(scratch / "outputs"),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    code = 0
    for step in ACTION["runs"]["steps"][1:]:
        own = {name: fill(text, given) for name, text in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=repository,
            env=os.environ | runner | own,
            capture_output=True,
            text=True,
        )
        code = done.returncode
        assert code in (0, 1), done.stdout + done.stderr
    return code, summary.read_text()


def fill(text: str, given: dict[str, str]) -> str:
    """Put the inputs where an expression names them; nothing else is known here."""

    def find(match: re.Match[str]) -> str:
        of, _, name = match[1].partition(".")
        return given[name] if of == "inputs" else ""

    return re.sub(r"\$\{\{ (.*?) \}\}", find, text)


def git(repository: Path, *words: str) -> str:
    known = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository))
    done = subprocess.run(["git", *known, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder: Path, *seconds: float) -> list[str]:
    """A commit for each time of a step; their names."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    commits = []
    for number, step_s in enumerate(seconds):
        (folder / "train.py").write_text(SCRIPT.format(step_s) + f"# {number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "--quiet", "-m", f"{number}")
        commits.append(git(folder, "rev-parse", "HEAD"))
    return commits


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("after", "code"), [(0.033, 1), (0.03, 0)], ids=["slower", "equal"])
def test_a_step_that_takes_a_tenth_longer_fails_and_another_does_not(
    after: float, code: int, tmp_path: Path
) -> None:
    """However busy this machine is: more repeats are measured until they tell."""
    repository = tmp_path / "repository"
    base, _ = make_repository(repository, 0.03, after)
    found, summary = run_action(
        repository,
        tmp_path,
        command=f"{sys.executable} {{tree}}/train.py",
        base=base,
        sweep="--steps 40 --items 4 --device cpu",
        fail_on="slower:3%",
    )
    assert found == code, summary
    assert ("fail: slower:3%" in summary) is bool(code)
    assert "| 95 % interval |" in summary
    folder = tmp_path / "precision-bench" / "results"
    entries: list[dict[str, Any]] = json.loads((folder / "action.json").read_text())
    assert any(entry["name"].endswith("time") for entry in entries)
    assert json.loads((folder / "bencher.json").read_text())


def test_no_input_is_put_into_a_shell_as_code() -> None:
    """A branch may be called anything: steps get it by variables."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
