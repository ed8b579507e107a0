"""What a row says was trained is what its own processes read, through the whole sweep."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.base.inject import Uncaught, arm, find_opened, find_uncaught, read_listing
from bench.compare.__main__ import main as compare
from bench.report.__main__ import main as report
from bench.results.store.reader import read_records
from bench.sweep.__main__ import main as sweep
from bench.sweep.display import Display
from bench.training.sources import judge_opened

QUICK = ["--device", "cpu", "--no-report"]

FILES = {
    "main.py": "import sys, runpy\nfrom pkg import lib\nprint(open(sys.argv[1][9:]).read())\n"
    "print(open('conf/base.yaml').read())\nopen('state.json', 'w').write('1')\n"
    "import subprocess; subprocess.run([sys.executable, 'pkg/child.py'], check=True)\n",
    "pkg/lib.py": "import pkg.deep\n",
    "pkg/deep.py": "",
    "pkg/child.py": "import os, multiprocessing as mp\ndef go():\n    import pkg.forked\n"
    "if __name__ == '__main__':\n    import sys; sys.path[0] = '.'\n"
    "    p = mp.get_context('fork').Process(target=go); p.start(); p.join()\n",
    "pkg/forked.py": "",
    "conf/base.yaml": "a: 1",
    "c.yaml": "b: 2",
    "unused.py": "",
    "state.json": "0",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def measured(project: Path) -> list[str]:
    """The flags of a sweep of two cases, which open other files than one another, and was made."""
    (project / "d.yaml").write_text("b: 3")
    command = f"{shlex.quote(sys.executable)} main.py --config={{which}}"
    given = ["--command", command, "--vary", "which", "c.yaml", "d.yaml", "--out", "out", *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert sweep(given) == 0
        rows = read_records(Path("out")).to_dict("records")
    assert [row["status"] for row in rows] == ["ok"] * len(rows)
    assert len({row["model_source"] for row in rows}) == 1, "two cases, one version"
    return given


@pytest.mark.parametrize(
    "edited", ["main.py", "pkg/deep.py", "pkg/forked.py", "conf/base.yaml", "c.yaml", "d.yaml"]
)
def test_an_edit_of_what_a_command_read_is_refused(
    project: Path, measured: list[str], edited: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    before = Path(edited).read_text()
    Path(edited).write_text(before + "\n# edited")
    for more in ([], ["--dry-run"]):
        capsys.readouterr()
        assert sweep([*measured, *more]) == 2
        assert f": {edited} changed since: model_source was" in capsys.readouterr().err
    Path(edited).write_text(before)
    assert sweep(measured) == 0
    assert "0 to run, 2 already there" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["unused.py", "state.json"])
def test_other_files_and_its_own_outputs_are_left_aside(
    project: Path, measured: list[str], other: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    Path(other).write_text("2")
    assert sweep(measured) == 0
    assert "0 to run, 2 already there" in capsys.readouterr().err


RESUMES = """
import os, sys
place = sys.argv[1]
os.makedirs(place, exist_ok=True)
last = os.path.join(place, "last.bin")
done = os.path.exists(last) and open(last, "rb").read()
open(last, "wb").write(b"1")
"""


def test_what_one_run_leaves_and_another_reads_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(RESUMES)
    Path("mine").mkdir()
    Path("mine/last.bin").write_text("my own")
    run = f"{shlex.quote(sys.executable)} t.py"
    given = ["--vary", "a", "1", "2", *QUICK]
    assert sweep(["--command", f"{run} mine {{a}}", *given, "--out", "shared"]) == 0
    errors = capsys.readouterr().err
    assert errors.count("warning: this run read mine/last.bin, which an earlier run wrote") == 1
    assert errors.count("warning: runs overwrite mine/last.bin, and what was there before") == 1
    first, second = read_records(Path("shared")).to_dict("records")
    assert (first["carried"], second["carried"]) == ("", "mine/last.bin")
    assert first["model_source"] == second["model_source"], "state is no version of a script"
    assert report(["shared"]) == 0
    warnings = capsys.readouterr().out
    went_on, lost = (f"! {what}: mine/last.bin" for what in ("Went on", "Overwritten"))
    assert 0 < warnings.find(went_on) < warnings.find(lost), warnings

    assert sweep(["--command", f"{run} {{out}} {{a}}", *given, "--out", "own"]) == 0
    assert "warning: this run read" not in (errors := capsys.readouterr().err)
    assert "overwrite" not in errors
    assert len([*Path("own/outputs").glob("*/last.bin")]) == 2
    assert {*read_records(Path("own"))["carried"]} == {""}


def test_a_module_that_no_word_names_is_known_when_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    Path("src/mine.py").write_text("")
    command = f"PYTHONPATH=src {shlex.quote(sys.executable)} -m mine"
    given = ["--command", command, "--out", "out", *QUICK]
    assert sweep(given) == 0
    assert sweep(given) == 0
    assert "0 to run, 1 already there" in capsys.readouterr().err
    Path("src/mine.py").write_text("# edited")
    assert sweep(given) == 2
    assert ": src/mine.py changed since: " in capsys.readouterr().err


LOGS = """
import logging, os, sys
logging.basicConfig(filename="train.log", level="INFO")
logging.info("begin")
open("cache.lock", "w").close()
with open(f"run_{sys.argv[1]}.txt", "w") as file:
    file.write("1")
"""


def test_a_log_that_all_runs_add_to_and_an_empty_lock_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(LOGS)
    run = f"{shlex.quote(sys.executable)} t.py {{a}}"
    assert sweep(["--command", run, "--vary", "a", "1", "2", *QUICK, "--out", "out"]) == 0
    assert "overwrite" not in capsys.readouterr().err
    rows = read_records(Path("out")).to_dict("records")
    assert [row["wrote"] for row in rows] == ["run_1.txt", "run_2.txt"]
    assert len({row["model_source"] for row in rows}) == 1
    assert report(["out"]) == 0
    assert "Overwritten" not in capsys.readouterr().out


NET = "from torch import nn\nimport part\ndef build():\n    return nn.Sequential(nn.AvgPool2d(4), "
NET += "nn.Flatten(), *part.make())\n"
PART = "from torch import nn\ndef make():\n    return nn.Linear(192, 10), nn.{}()\n"


@pytest.mark.slow
def test_a_network_edited_while_its_sweep_runs_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("net.py").write_text(NET)
    Path("part.py").write_text(PART.format("ReLU"))
    weights = {"2.weight": torch.zeros(10, 192), "2.bias": torch.zeros(10)}
    torch.save(weights, "w.pt")
    end = Display.end

    def edit(self: Display, *about: Any) -> None:
        end(self, *about)
        if "Sigmoid" in Path("part.py").read_text():
            return
        # of another size: Python takes an edit of one second and one size for the compiled file
        Path("part.py").write_text(PART.format("Sigmoid"))
        torch.save({**weights, "2.bias": torch.ones(10)}, "w.pt")

    monkeypatch.setattr(Display, "end", edit)
    given = ["--preset", "quick", "--dataset", "synthetic", "--batch-size", "8", "--steps", "2"]
    given += ["--model", "net:build", "--precision", "fp32", "--out", "out", "--repeats", "2"]
    given += ["--start", "w.pt"]
    assert sweep([*given, *QUICK]) == 0
    errors = capsys.readouterr().err
    assert (
        errors.count("warning: part.py, w.pt changed while the sweep ran; this run and later") == 1
    )
    first, *others = read_records(Path("out")).to_dict("records")  # two may begin in one second
    for name in ("model_source", "model_structure", "start_fingerprint"):
        assert {row[name] for row in others} == {others[0][name]}
        assert others[0][name] != first[name]
    assert "flop" not in str(others[0]["shared"]), "what another version found is not its own"
    assert sweep([*given, *QUICK]) == 2
    assert "; part.py changed since: " in capsys.readouterr().err


def test_the_script_runs_as_without_the_harness(tmp_path: Path) -> None:
    """A `sitecustomize` of the user's own is imported, the path is as it was, and neither an error
    nor a listing that cannot be written is told to it."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = 1")
    (tmp_path / "t.py").write_text("import sys; print(mine, sys.path, open('t.py').read(3))")
    own = {"PYTHONPATH": str(tmp_path / "own")}
    run = [sys.executable, "t.py"]
    about: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path, "check": True}
    plain = subprocess.run(run, env=own, **about)
    for listing in (tmp_path / "listing", tmp_path / "none" / "listing"):
        armed = subprocess.run(run, env=own | arm(own, listing, 0), **about)
        assert (armed.stdout, armed.stderr) == (plain.stdout, plain.stderr)
    seen = judge_opened(find_opened(read_listing(tmp_path / "listing")), [], ())
    assert [Path(name).name for name in seen.files] == ["sitecustomize.py", "t.py"]


@pytest.mark.parametrize(
    ("command", "ended"),
    [
        ("{py} t.py", True),
        ("{py} t.py 2>&1 | cat", True),
        ("{py} t.py & wait", True),
        ("{py} t.py; echo done", True),
        ("{py} fine.py; {py} t.py | cat", True),
        # a shell goes on, and a program in Python decides what the end of its own one means
        ("{py} t.py || {py} fine.py", False),
        ("{py} t.py | cat; {py} fine.py", False),
        ("{py} probe.py", False),
        ("{py} fine.py | cat", False),
        ("{py} caught.py", False),
    ],
)
def test_an_error_that_nothing_caught_ends_a_program(
    command: str, ended: bool, tmp_path: Path
) -> None:
    for name, text in {
        "t": "raise ValueError('no data\\nat all')",
        "fine": "raise SystemExit(1)",
        "probe": "import subprocess, sys; subprocess.call([sys.executable, 't.py'])",
        "caught": "import traceback\ntry: 1 / 0\nexcept ArithmeticError: traceback.print_exc()",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    listing = tmp_path / "listing"
    about: dict[str, Any] = {"cwd": tmp_path, "env": arm({}, listing, 0), "capture_output": True}
    subprocess.run(["/bin/sh", "-c", command.format(py=sys.executable)], **about)
    entries = read_listing(listing)
    assert find_uncaught(entries) == (Uncaught("ValueError", "no data\nat all") if ended else None)
    assert any(one.how == "runs" for one in find_opened(entries)), "files are told beside it"


def test_compare_names_the_files_that_two_folders_ran_other_versions_of(
    project: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also one that no word of the command names, so that both have one ``model_source``."""
    monkeypatch.chdir(project)
    (out,) = (measured[at + 1] for at, word in enumerate(measured) if word == "--out")
    deep = Path("pkg/deep.py")
    before = deep.read_text()
    deep.write_text(before + "\n# edited")
    assert sweep([other if other != out else "edited" for other in measured]) == 0
    deep.write_text(before)
    capsys.readouterr()
    compare([out, "edited"])
    assert "! They differ: the files pkg/deep.py." in capsys.readouterr().out
