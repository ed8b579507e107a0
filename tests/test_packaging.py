"""What stands around the package: its container, workflows, forms and citation."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.base import installation
from tests.planted.records import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its arguments on one line."""
    text = re.sub(
        r"\\\n\s*", "", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    )
    lines = [line.partition(" ") for line in text.splitlines() if line]
    return [(word, rest) for word, _, rest in lines]


def test_the_container_keeps_to_the_rules_of_containers() -> None:
    """hadolint's, which is no package here: a pinned image, lists of apt removed, no cache of pip,
    whole paths, words in place of a shell, and no root."""
    lines = read_instructions()
    assert {word for word, _ in lines} <= {
        *("ARG", "FROM", "LABEL", "RUN", "COPY", "USER", "ENV", "WORKDIR", "VOLUME"),
        *("ENTRYPOINT", "CMD"),
    }
    given = dict(rest.split("=", 1) for word, rest in lines if word == "ARG")
    (image,) = (rest for word, rest in lines if word == "FROM")
    tag = re.sub(r"\$\{(\w+)\}", lambda m: given[m[1]], image).partition(":")[2]
    assert re.match(r"\d+\.\d+\.\d+", tag)
    for run in (rest for word, rest in lines if word == "RUN"):
        assert "sudo" not in run
        assert ("apt-get" in run) <= ("--no-install-recommends" in run and "lists/*" in run)
        assert ("pip install" in run) <= ("--no-cache-dir" in run)
    users = [rest for word, rest in lines if word == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    assert all(rest.startswith("/") for word, rest in lines if word == "WORKDIR")
    assert all(rest.startswith("[") for word, rest in lines if word in ("ENTRYPOINT", "CMD"))


def test_the_container_is_given_what_the_package_is_made_of() -> None:
    copies = [rest.split()[:-1] for word, rest in read_instructions() if word == "COPY"]
    copied = {name for names in copies for name in names}
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    assert {"bench", *PROJECT["license-files"], PROJECT["readme"]} <= copied


def read_page() -> str:
    """What docs/card.md says to run for a container."""
    page = (ROOT / "docs" / "card.md").read_text()
    found = re.search("<!-- container -->\n```bash\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1].replace("\\\n", "")


def test_the_page_gives_a_container_the_folders_that_it_writes_to() -> None:
    (command,) = (json.loads(rest) for word, rest in read_instructions() if word == "CMD")
    folders = [word for word in command if word.startswith("/")]
    assert folders
    for folder in folders:
        assert f'-v "$PWD{folder}:{folder}"' in read_page()
        assert re.search(f"^mkdir -p .*{folder[1:]}", read_page(), re.M)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_container_is_built_and_run_as_the_page_says(tmp_path: Path) -> None:
    """But for the GPU, and for a user who has no name there: what it writes is that user's, and
    nothing is measured where it would be lost."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode:
        pytest.skip("no docker runs here")

    def run(script: str) -> subprocess.CompletedProcess[str]:
        words = {"-t precision-bench": f"-t {image}", "$(id -u):$(id -g)": "12345:12345"}
        for word, other in (words | {"--gpus all ": ""}).items():
            script = script.replace(word, other)
        return subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    image = "precision-bench-test"
    build, make, line = read_page().splitlines()
    built = run(f"cd {shlex.quote(str(ROOT))} && {build}")
    assert built.returncode == 0, built.stderr
    assert (
        run(f"{make} && chown 12345:12345 data results || chmod 777 data results").returncode == 0
    )
    line = re.sub(r"precision-bench$", image, line)
    assert run(f"{line} --version").stdout == f"precision-bench {PROJECT['version']}\n"
    case = (
        "--dataset synthetic --model dpn-small --batch-size 8 --precision fp32 --compile --steps 2"
    )
    done = run(f"{line} sweep {case} --device cpu --repeats 1 --out /results/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    record = tmp_path / "results" / "tiny" / "records.csv"
    assert record.stat().st_uid == 12345
    lost = run(re.sub(r'-v "\$PWD/results:/results"', "", line))
    assert lost.returncode == 2
    assert lost.stderr.startswith("error: --out /results: ")


def test_one_version_and_one_address_stand_everywhere() -> None:
    about = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert about["version"] == PROJECT["version"]
    assert about["license"] == PROJECT["license"]
    assert about["repository-code"] == HOME
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert HOME == installation.HOME
    assert all(address.startswith(HOME) for address in PROJECT["urls"].values())


@pytest.mark.parametrize("form", FORMS, ids=lambda file: file.stem)
def test_a_form_is_one(form: Path) -> None:
    about = yaml.safe_load(form.read_text())
    if form.stem == "config":
        return
    assert {"name", "description", "body"} <= {*about}
    names = [field["id"] for field in about["body"] if field["type"] != "markdown"]
    assert len({*names}) == len(names)
    assert all(field["attributes"]["label"] for field in about["body"])


def test_the_form_for_an_error_asks_for_the_doctor() -> None:
    assert "python -m bench.doctor --format json" in FORMS[-1].read_text()


def list_jobs() -> list[tuple[str, dict[str, Any]]]:
    return [job for file in WORKFLOWS for job in yaml.safe_load(file.read_text())["jobs"].items()]


def test_workflows_run_what_there_is() -> None:
    """Targets of make, on the versions of Python that the package names, with few rights."""
    makefile = (ROOT / "Makefile").read_text()
    lines = [step.get("run", "") for _, job in list_jobs() for step in job["steps"]]
    targets = re.findall(r"^\s*make (\S+)", "\n".join(lines), re.M)
    assert {"lint", "suite", "dist"} <= {*targets}
    for target in targets:
        name = target.replace(".venv", "$(VENV)")
        assert re.search(f"^{re.escape(name)}:", makefile, re.M), target
    (versions,) = (
        job["strategy"]["matrix"]["python"] for _, job in list_jobs() if "strategy" in job
    )
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert versions == named
    assert all(yaml.safe_load(file.read_text())["permissions"] for file in WORKFLOWS)
