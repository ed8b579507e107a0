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


LEARNS = """
import random, sys
import bench

draw = random.Random(*sys.argv[1:])
first = draw.gauss(2, 0.01)
for step in range(100):
    bench.step(items=4, loss={} * first / (1 + step / 100))
"""


def run_action(repository: Path, scratch: Path, **inputs: str) -> tuple[int, str, Path]:
    """Run the steps but the installation until one fails; return its code, what all printed, and
    the folder of results."""
    given = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()}
    given |= {"python": sys.executable} | {k.replace("_", "-"): v for k, v in inputs.items()}
    outputs, summary = scratch / "outputs", scratch / "summary"
    runner = {
        "RUNNER_TEMP": str(scratch),
        "GITHUB_ACTION_PATH": str(ROOT),
        "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(summary),
        "GITHUB_SHA": git(repository, "rev-parse", "HEAD"),
        "GITHUB_REPOSITORY": "an/owner",
        "GITHUB_WORKFLOW": "test",
        "GITHUB_JOB": "guard",
    }
    printed, folder = "", ""
    for step in ACTION["runs"]["steps"][1:]:
        known = {f"inputs.{name}": text for name, text in given.items()}
        known["steps.measure.outputs.folder"] = folder
        known |= {"github.event_name": "pull_request", "github.event.pull_request.number": "7"}
        own = {name: known.get(text[4:-3], "") for name, text in step["env"].items()}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=repository,
            env=os.environ | runner | own,
            capture_output=True,
            text=True,
        )
        printed += done.stdout + done.stderr
        folder = outputs.read_text().strip().rpartition("=")[2] if outputs.exists() else ""
        if done.returncode:
            break
    return done.returncode, printed, Path(folder)


def git(repository: Path, *words: str) -> str:
    known = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository))
    done = subprocess.run(["git", *known, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def make_repository(folder: Path, *values: float, script: str = SCRIPT) -> list[str]:
    """A commit for each value in the script, by default the time of a step; their names."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    commits = []
    for number, value in enumerate(values):
        (folder / "train it.py").write_text(script.format(value) + f"# {number}\n")
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
    tmp_path = tmp_path / "a runner"  # a folder with a space
    tmp_path.mkdir()
    found, printed, folder = run_action(
        repository,
        tmp_path,
        command=f"{sys.executable} '{{tree}}/train it.py' --name \"it's\"",
        base=base,
        sweep="--steps 40\n--items '4' --device cpu",
        fail_on="slower:3%",
        repeats="5 10 20" if code else "5 10",  # an interval that may hold 3 % is a warning
    )
    assert found == code, printed
    summary = (tmp_path / "summary").read_text()
    assert ("fail: slower:3%" in summary) is bool(code)
    assert ("::error::slower:3%: " in printed) is bool(code)
    assert "| 95 % interval |" in summary
    assert str(tmp_path) not in summary
    assert re.search(r"^head (is|takes) [\d.]+ times as (fast|long) as base", summary, re.M)
    entries: list[dict[str, Any]] = json.loads((folder / "action.json").read_text())
    assert any(": time of " in entry["name"] for entry in entries)
    assert json.loads((folder / "bencher.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["", " {seed}"], ids=["no-seed", "seed"])
@pytest.mark.parametrize(("after", "code"), [(1.14, 1), (1.0, 0)], ids=["higher", "equal"])
def test_a_loss_of_equal_steps_that_became_higher_fails_and_another_does_not(
    after: float, code: int, seed: str, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    base, _ = make_repository(repository, 1.0, after, script=LEARNS)
    found, printed, folder = run_action(
        repository,
        tmp_path,
        command=f"{sys.executable} '{{tree}}/train it.py'{seed}",
        base=base,
        sweep="--steps 20 --device cpu",
        fail_on="higher:5%",
        repeats="5",
        undecided="fail",
    )
    assert found == code, printed
    (loss,) = json.loads((folder / "compare.json").read_text())["metrics"]["train_loss"]
    assert (loss["verdict"] == "higher") is bool(code)
    assert ("::error::higher:5%: train-it.py: training loss: 1.1" in printed) is bool(code)


def test_what_cannot_be_judged_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    base, _ = make_repository(repository, 1.0, 1.0, script=LEARNS)
    command = f"{sys.executable} '{{tree}}/train it.py'"
    words = {"sweep": "--steps 5 --device cpu", "fail_on": "higher:5%", "repeats": "1"}
    code, printed, _ = run_action(repository, tmp_path, command=command, base=base, **words)
    assert code == 0
    assert re.search("^::warning::not judged: higher:5%: .*seed", printed, re.M), printed


def test_what_cannot_be_compared_fails_with_the_reason(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    _, head = make_repository(repository, 0.0, 0.0)
    git(repository, "rm", "--quiet", "train it.py")
    git(repository, "commit", "--quiet", "-m", "none", "--amend")
    (gone,) = git(repository, "rev-parse", "HEAD").split()
    git(repository, "reset", "--quiet", "--hard", head)
    command = f"{sys.executable} '{{tree}}/train it.py'"
    for base, words, error in (
        (gone, {}, "cannot both be measured"),
        (gone, {"sweep": "--steps '"}, "quotes do not match"),
        (gone, {"undecided": "never"}, "give fail or warn"),
        (head, {}, "the head itself"),
        ("nowhere", {}, "fetch-depth: 0"),
        ("0" * 40, {}, "nothing to compare with"),
        ("", {}, "nothing to compare with"),
        ("--upload-pack=touch here", {}, "fetch-depth: 0"),
    ):
        code, printed, _ = run_action(repository, tmp_path, command=command, base=base, **words)
        assert code == 1
        assert re.search(f"^::error::.*{error}", printed, re.M), printed
    assert not (repository / "here").exists()


@pytest.mark.parametrize("token", ["reads", "writes"])
def test_a_head_that_crashes_fails_whatever_the_gate_and_the_token(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull request from a fork has a token that only reads; one that writes changes the comment
    that is there."""
    programs, log = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    gh = f'#!/bin/sh\necho "$@" >> "{log}"\n' + ("exit 1" if token == "reads" else "echo a/url")
    (programs / "gh").write_text(gh)
    (programs / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    repository = tmp_path / "repository"
    base, _ = make_repository(repository, 0.0, 0.0)
    (repository / "train it.py").write_text("raise SystemExit('no')")
    git(repository, "commit", "--quiet", "--all", "-m", "crash")
    code, printed, _ = run_action(
        repository,
        tmp_path,
        command=f"{sys.executable} '{{tree}}/train it.py'",
        base=base,
        sweep="--steps 5 --items 4 --device cpu",
        repeats="1",
        comment="true",
    )
    assert code == 1
    assert "::error::A side has no result" in printed
    assert ("::warning::The result is on the run's page alone" in printed) is (token == "reads")
    assert ("--method PATCH a/url" in log.read_text()) is (token == "writes")


def test_a_pull_request_is_compared_with_what_it_would_be_merged_into(tmp_path: Path) -> None:
    """Which is newer than the base that the event names, and which a shallow checkout lacks."""
    repository, shallow = tmp_path / "repository", tmp_path / "shallow"
    before, head = make_repository(repository, 0.0, 0.0)
    git(repository, "checkout", "--quiet", before)
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "newer")
    newer = git(repository, "rev-parse", "HEAD")
    git(repository, "merge", "--quiet", "-m", "merge", head)
    git(repository, "branch", "--force", "merged")
    git(tmp_path, "clone", "-q", "--depth", "1", "-b", "merged", f"file://{repository}", "shallow")
    code, printed, _ = run_action(shallow, tmp_path, command="python '{tree}/no such.py'")
    assert code == 1
    assert f"The base ({newer}) and the head cannot both be measured" in printed


def test_no_input_is_put_into_a_shell_as_code() -> None:
    """A branch may be called anything: steps get it by variables."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
