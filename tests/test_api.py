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


def test_the_page_runs_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    page = (ROOT / "docs" / "python.md").read_text()
    (told,) = re.findall(r"<!-- notebook -->(.*?)<!-- /notebook -->", page, re.DOTALL)
    cells = re.findall(r"```python\n(.*?)```", told, re.DOTALL)
    # where there is a GPU the page measures it; here a network of one layer does
    cells[0] = (
        cells[0].replace("steps=10,", 'steps=2, device="cpu",').replace("repeats=3", "repeats=1")
    )
    cells += ["sweep", "assert 'own_' in frame['model'][0], frame['model'][0]"]
    # a cell again measures nothing anew
    cells += [cells[0], "assert len(sweep.frame()) == 4 and sweep.frame()['runs'].sum() == 4"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    monkeypatch.setenv("BENCH_YARDSTICK_S", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=240, resources=resources)
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute()
    shown = notebook.cells[len(cells) - 4].outputs[-1]["data"]["text/html"]
    assert "<table" in shown
    assert "bf16-amp" in shown
    assert (tmp_path / "results" / "notebook" / "records.csv").is_file()


def test_what_was_measured_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    found = bench.read(H200)
    report([str(H200)])
    said = " ".join(capsys.readouterr().out.split())
    assert found.answer.startswith("Train dpn92 on NVIDIA H200 in fp16 at batch size 256")
    assert found.answer in said
    frame = found.frame()
    assert len(frame) == 22
    assert {*frame.columns} >= {"epoch_time_s", "memory_bytes", "energy_per_epoch_j", "status"}
    assert "epoch" in frame.attrs["columns"]["epoch_time_s"]
    times = found.pivot()
    assert times.loc[("fp16", "128"), 256] == pytest.approx(11.98, rel=1e-3)
    assert times.loc[("fp32", "none"), 512] == pytest.approx(40.70, rel=1e-3)
    assert bench.read(H100, H200).frame()["machine"].nunique() == 2


def test_a_figure_and_a_comparison_are_made() -> None:
    pytest.importorskip("seaborn")
    found = bench.read(H200)
    ax = found.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("batch size", "images/s")
    assert len(ax.get_legend().get_texts()) == 6
    verdicts = bench.read(H100).compare(found)
    rows = verdicts.frame()
    assert {*rows["metric"]} >= {"epoch_time_s", "energy_j"}
    assert {*rows["verdict"]} == {"no verdict"}
    assert "needs 3 repeats a side" in str(verdicts)
    assert "needs 3 repeats a side" in verdicts._repr_html_()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"precison": "fp32"}, "precison: there is no such axis; did you mean 'precision'?"),
        ({"precision": "fp61"}, "--precision 'fp61': did you mean 'fp16'?"),
        ({"model": lambda: None}, "give a function that is defined at the top of a module"),
        ({"model": nn.Sequential(nn.Linear(1, 1))}, "model=Sequential: another process cannot"),
        ({"model": "nosuch:build", "device": "cpu"}, "nosuch"),
        (
            {"model": None, "command": "python t.py", "batch_size": 4},
            "the command has no {batch_size}",
        ),
        ({"batch_size": 0}, "a batch size is a whole number of at least 1"),
        ({"vary": {"x": [1]}}, "--vary is for a placeholder in --command"),
    ],
)
def test_mistakes_raise_before_anything_is_trained(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        bench.sweep(**{"model": "dpn-small", "out": tmp_path / "out", **given})
    assert said in str(raised.value)
    assert not (tmp_path / "out" / "records.csv").exists()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no records there"):
        bench.read(tmp_path)


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
from bench.source import write_module
"""


def write_in_main(tail: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "notebook.py"
    file.write_text(NOTEBOOK + tail)
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)


def test_a_function_of_a_notebook_is_written_with_what_it_uses(tmp_path: Path) -> None:
    done = write_in_main("print(write_module(build)[0])", tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "written.py").write_text(done.stdout)
    code = "import written; print(written.build())"
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "(c): Block(" in made.stdout
    assert "weights" not in done.stdout


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = write_in_main("write_module(with_a_tensor)", tmp_path)
    said = "weights is a Tensor of the notebook, which another process cannot import; put the"
    assert said in done.stderr
