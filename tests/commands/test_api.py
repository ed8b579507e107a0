"""From Python: the page runs in a notebook's kernel, and what is wrong is one line."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bench
from bench.base.errors import UsageError
from bench.report.__main__ import main as report
from bench.sweep import execution
from bench.sweep.options import parse_arguments, plan_cases
from tests.planted.records import ROOT

H100, H200 = (
    ROOT / "results" / name
    for name in ("nvidia-h100-80gb-hbm3-20261122-112118", "nvidia-h200-20261126-040407")
)


@pytest.mark.slow
def test_the_page_runs_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    page = (ROOT / "docs" / "python.md").read_text()
    (section,) = re.findall(r"<!-- notebook -->(.*?)<!-- /notebook -->", page, re.DOTALL)
    cells = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    # where there is a GPU the page measures it; here a network of one layer does
    for wanted, small in (("10,", '2, device="cpu",'), ("repeats=3", "repeats=1"), (", 128]", "]")):
        cells[0] = cells[0].replace(wanted, small)
    cells += ["sweep", "assert 'own_' in frame['model'][0], frame['model'][0]"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    monkeypatch.setenv("BENCH_RATES_S", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=240, resources=resources)
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()
    shown = notebook.cells[len(cells) - 2].outputs[-1]["data"]["text/html"]
    assert "Lowest time: " in shown or "Train " in shown
    assert (tmp_path / "results" / "notebook" / "records.csv").is_file()


def test_what_was_measured_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.read(H200)
    report([str(H200)])
    output = " ".join(capsys.readouterr().out.split())
    assert found.answer.startswith("Train dpn92 on NVIDIA H200 in fp16-amp at batch size 256")
    assert found.answer in output
    frame = found.frame()
    assert len(frame) == 22
    assert "epoch" in frame.attrs["columns"]["epoch_time_s"]
    times = frame[frame["fraction"] == 1].set_index(["precision", "batch_size"])["epoch_time_s"]
    assert times["fp32"][512] == pytest.approx(40.70, rel=1e-3)
    assert bench.read(H100, H200).frame()["machine"].nunique() == 2
    verdicts = bench.read(H100).compare(bench.read(H200))
    assert {*verdicts["metric"]} >= {"epoch_time_s", "energy_j"}
    single = verdicts[verdicts["metric"] != "peak_device_bytes"]  # of memory one run is exact
    assert {*single["verdict"]} == {"no verdict"}
    assert "needs 3 repeats a side" in verdicts.attrs["text"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"precison": "fp32"}, "unknown argument '--precison'; did you mean '--precision'?"),
        ({"model": lambda: None}, "give a function that is defined at the top of a module"),
        ({"precision": torch.bfloat16}, "--precision 'torch.bfloat16': "),
        ({"model": nn.Sequential(nn.Linear(1, 1))}, "model=Sequential: another process cannot"),
    ],
)
def test_mistakes_raise_before_anything_is_trained(
    given: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        bench.sweep(**{"model": "dpn-small", "out": tmp_path / "out", **given})
    assert expected in str(raised.value)
    assert not (tmp_path / "out" / "records.csv").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lr": np.float64(0.1)}, "--lr 0.1"),
        ({"lr": np.array([0.5, 0.1], np.float32)}, "--lr 0.5 0.1"),
        ({"lr": np.float32(0.1), "evaluate": np.bool_(True)}, "--lr 0.1 --evaluate on"),
        ({"batch_size": (np.int64(8) * n for n in (1, 2))}, "--batch-size 8 16"),
        ({"batch_size": range(8, 10), "repeats": np.int32(2)}, "--batch-size 8 9 --repeats 2"),
        ({"same_seed": True, "cold": False, "allow_shared": np.True_},
         "--same-seed --allow-shared"),
        ({"channels_last": [False, True]}, "--channels-last off on"),
        ({"steps": None, "loss_scale": None, "precision": None, "timeout": None}, "--steps none"),
        ({"steps": (None, 3), "data_dir": Path("data")}, "--steps none 3 --data-dir data"),
        ({"precision": "fp16", "loss_scale": ["2^15", "2**4"]},
         "--precision fp16 --loss-scale 32768 16"),
        ({"model": (one for one in ["dpn-small", "dpn26"])}, "--model dpn-small dpn26"),
    ],
)  # fmt: skip
def test_values_of_python_are_those_of_the_command(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def run(*asked_for: Any) -> Any:
        asked.extend(asked_for)
        return SimpleNamespace(folder=tmp_path, left="")

    monkeypatch.setattr(execution, "run_sweep", run)
    bench.sweep(**{"model": "dpn-small", **given, "out": tmp_path})
    model = [] if "--model" in words else ["--model", "dpn-small"]
    options = parse_arguments([*model, *words.split(), "--out", str(tmp_path)])
    plan, found = asked
    assert (plan, replace(found, invocation="")) == (
        plan_cases(options),
        replace(options, invocation=""),
    )


def test_a_dry_run_prints_what_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.sweep(model="dpn-small", precision=["fp32", "bf16"], dry_run=True, out=tmp_path / "out")
    assert "runs: 2, of 2 cases" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", [["-c"], []], ids=["-c", "standard input"])
def test_a_function_whose_source_is_not_kept_is_refused(how: list[str]) -> None:
    code = "import bench\ndef net(): pass\nbench.sweep(model=net, device='cpu', out='nowhere')"
    done = subprocess.run(
        [sys.executable, *how, *([code] if how else [])],
        input=code, capture_output=True, text=True, check=False,
    )  # fmt: skip
    *_, last = done.stderr.splitlines()
    assert last.startswith("bench.base.errors.UsageError: the source of net is not kept")


def test_own_axes_and_their_words_are_given_as_python_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("")
    bench.sweep(
        command=f"{sys.executable} t.py {{depth}} {{amp}} {{sets}}",
        vary={
            "depth": np.array([12]),
            "amp": {"off": "", "on": "--layers 1,2"},
            "sets": ["a=1,b=2"],
        },
        device="cpu",
        dry_run=True,
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["   1  amp off", "   2  amp on"]
    assert r"--vary depth 12 --vary sets 'a=1\,b=2' --device cpu" in lines[3]
    assert r"{amp:off=,on=--layers 1\,2}" in lines[3]
