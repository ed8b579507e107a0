"""From Python: the page runs in a notebook's kernel, and what is wrong is one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import bench
from bench.errors import UsageError
from bench.report.__main__ import main as report

ROOT = Path(__file__).parents[1]
H100, H200 = (
    ROOT / "results" / name
    for name in ("nvidia-h100-80gb-hbm3-20261122-112118", "nvidia-h200-20261126-040407")
)


@pytest.mark.slow
def test_the_page_runs_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    page = (ROOT / "docs" / "python.md").read_text()
    (told,) = re.findall(r"<!-- notebook -->(.*?)<!-- /notebook -->", page, re.DOTALL)
    cells = re.findall(r"```python\n(.*?)```", told, re.DOTALL)
    # where there is a GPU the page measures it; here a network of one layer does
    for wanted, small in (("10,", '2, device="cpu",'), ("repeats=3", "repeats=1"), (", 128]", "]")):
        cells[0] = cells[0].replace(wanted, small)
    cells += ["sweep", "assert 'own_' in frame['model'][0], frame['model'][0]"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    monkeypatch.setenv("BENCH_YARDSTICK_S", "0")
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
    said = " ".join(capsys.readouterr().out.split())
    assert found.answer.startswith("Train dpn92 on NVIDIA H200 in fp16 at batch size 256")
    assert found.answer in said
    frame = found.frame()
    assert len(frame) == 22
    assert "epoch" in frame.attrs["columns"]["epoch_time_s"]
    times = frame[frame["fraction"] == 1].set_index(["precision", "batch_size"])["epoch_time_s"]
    assert times["fp32", 512] == pytest.approx(40.70, rel=1e-3)
    assert bench.read(H100, H200).frame()["machine"].nunique() == 2
    verdicts = bench.read(H100).compare(bench.read(H200))
    assert {*verdicts["metric"]} >= {"epoch_time_s", "energy_j"}
    assert {*verdicts["verdict"]} == {"no verdict"}
    assert "needs 3 repeats a side" in verdicts.attrs["text"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precison": "fp32"}, "unknown argument '--precison'; did you mean '--precision'?"),
        ({"model": lambda: None}, "give a function that is defined at the top of a module"),
        ({"model": nn.Sequential(nn.Linear(1, 1))}, "model=Sequential: another process cannot"),
    ],
)
def test_mistakes_raise_before_anything_is_trained(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        bench.sweep(**{"model": "dpn-small", "out": tmp_path / "out", **given})
    assert said in str(raised.value)
    assert not (tmp_path / "out" / "records.csv").exists()


NOTEBOOK = """
import math
from collections import OrderedDict
from torch import nn
import torch
WIDTH = 8
class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width), scale_of(width))
def scale_of(width):
    return nn.Softplus(math.sqrt(width))
weights = torch.ones(3)
def build():
    return nn.Sequential(OrderedDict(a=nn.Flatten(), b=nn.LazyLinear(WIDTH), c=Block(WIDTH)))
def with_a_tensor():
    return nn.Linear(3, int(weights.sum()))
from bench.api import write_module
"""


def test_a_function_of_a_notebook_is_written_with_what_it_uses(tmp_path: Path) -> None:
    file = tmp_path / "notebook.py"
    file.write_text(f"{NOTEBOOK}print(write_module(build)[0])\n")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=True)
    written: dict[str, Any] = {}
    exec(done.stdout, written)
    assert "(c): Block(" in str(written["build"]())
    assert "weights =" not in done.stdout
