"""Weights to start from: read without being executed, fitted by name and shape, and told apart."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.base.errors import UsageError
from bench.networks.weights import fit_weights, hash_weights, read_weights
from bench.networks.workloads import Workload
from bench.results.store.reader import read_records
from bench.schema.case import Case, parse_value
from bench.sweep.__main__ import main as sweep
from bench.training.building import build_training
from bench.training.checkpoint import save_checkpoint
from tests.training_for_tests import CPU, batch, in_parts, small, training

find_head = Workload().find_head


def save(path: Path, value: Any) -> str:
    torch.save(value, path)
    return str(path)


class Trap:
    """A pickle that makes a file when it is loaded as pickle does."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"lr": 0.1}},
        lambda state: {
            "state_dict": {f"model.{name}": value for name, value in state.items()},
            "hyper_parameters": {"args": Namespace(lr=0.1, data=Path("cifar"))},
        },
        lambda state: {**state, "_extra_state": {"calls": 3}},
        lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()},
    ],
    ids=["plain", "state_dict", "lightning", "extra", "compiled"],
)
def test_the_usual_files_are_read(wrap: Any, tmp_path: Path) -> None:
    state = {name: v.half().float() for name, v in small(1).state_dict().items()}
    found = read_weights(save(tmp_path / "w.pt", wrap(state)))
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_checkpoint_of_a_sweep_is_read(tmp_path: Path) -> None:
    trained = training("fp16", build=small)
    trained.step(in_parts(*batch(8, 0), 8))
    save_checkpoint(tmp_path / "best.pt", trained, identity={}, epoch=1)
    found = read_weights(str(tmp_path / "best.pt"))
    kept = trained.model.state_dict()
    assert list(found) == list(kept)
    assert all(torch.equal(found[name], value) for name, value in kept.items())


def test_safetensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "w.safetensors"
    safetensors.save_file(small(1).state_dict(), path)
    found = read_weights(str(path))
    assert all(torch.equal(found[name], value) for name, value in small(1).state_dict().items())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="weights cannot be read from it"):
        read_weights(str(path))
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        read_weights(str(path))


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.write_bytes(pickle.dumps(Trap(p.with_name("m")))),
        lambda p: save(p, {"args": Namespace(a=Trap(p.with_name("m")))}),
        lambda p: save(p, small()),
        lambda p: p.write_bytes(b""),
        lambda p: p.mkdir(),
        lambda p: save(p, {}),
        lambda p: save(p, {"model": {"a": torch.zeros(1), "lr": 0.1}}),
    ],
)
def test_what_is_no_file_of_weights_is_refused_and_not_executed(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # even where the user's shell has torch load whatever a file holds
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "w.pt"
    write(path)
    expected = (
        "weights cannot be read from it without executing code .*; save the network's state_dict"
    )
    with pytest.raises(UsageError, match=expected) as refused:
        read_weights(str(path))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "m").exists()


def test_a_file_of_other_things_than_weights_is_told(tmp_path: Path) -> None:
    for found in ({}, {"model": {"a": torch.zeros(1), "lr": 0.1}}):
        with pytest.raises(UsageError, match=r"\(ValueError: it holds other things than weights\)"):
            read_weights(save(tmp_path / "w.pt", found))


def fit(tmp_path: Path, state: dict[str, Tensor], model: nn.Module) -> tuple[list[str], str]:
    fitting, note = fit_weights(model, save(tmp_path / "w.pt", state), find_head)
    return list(fitting), note


def test_a_head_of_another_size_starts_as_built(tmp_path: Path) -> None:
    state = small(1).state_dict()
    rest = [name for name in state if not name.startswith("4.")]
    other = {**state, "4.weight": torch.zeros(100, 1800), "4.bias": torch.zeros(100)}
    kept, note = fit(tmp_path, other, small())
    assert kept == rest
    assert note == (
        "the head starts as it was built: 4.weight is (100, 1800) in the file and (10, 1800) in "
        "the network, 4.bias is (100,) in the file and (10,) in the network"
    )
    bare = {name: state[name] for name in rest}
    assert fit(tmp_path, bare, small()) == (
        rest,
        "the head starts as it was built: the file lacks 4.weight, the file lacks 4.bias",
    )
    assert fit(tmp_path, state, small()) == (list(state), "")
    with torch.device("meta"):
        assert fit(tmp_path, state, small()) == (list(state), "")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    state = small(1).state_dict()
    wrong = {**state, "0.weight": torch.zeros(8, 3, 5, 5), "fc.weight": torch.zeros(1)}
    del wrong["1.bias"]
    with pytest.raises(UsageError) as refused:
        fit(tmp_path, wrong, small())
    assert str(refused.value).endswith(
        "w.pt does not fit the network: 0.weight is (8, 3, 5, 5) in the file and (8, 3, 3, 3) in "
        "the network, the file lacks 1.bias, the network lacks fc.weight"
    )
    with pytest.raises(UsageError, match=r"weight is \(3, 5\) in the file and \(2, 5\)"):
        fit(tmp_path, nn.Linear(5, 3).state_dict(), nn.Linear(5, 2))  # all head: nothing is left
    head = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    with pytest.raises(
        UsageError, match=r"network: 1\.weight is \(3, 5\) in the file and \(2, 5\) in"
    ):
        fit(tmp_path, nn.Sequential(nn.Flatten(), nn.Linear(5, 3)).state_dict(), head)
    with pytest.raises(UsageError, match=r"the file lacks 0\.weight"):
        fit(tmp_path, {"4.weight": state["4.weight"]}, small())


def test_older_batchnorm_fits(tmp_path: Path) -> None:
    state = small(1).state_dict()
    del state["1.num_batches_tracked"]
    model = small()
    fitting, note = fit_weights(model, save(tmp_path / "w.pt", state), find_head)
    assert note == ""
    assert all(torch.equal(fitting[name], value) for name, value in state.items())


def test_a_training_starts_from_them_and_comes_back_to_them(tmp_path: Path) -> None:
    class Own(Workload):
        def build_model(self) -> nn.Module:
            return small()

    state = small(7).state_dict()
    state["1.running_mean"] += 3
    path = save(tmp_path / "w.pt", state)
    for precision in ("fp32", "bf16"):
        ours = build_training(Case(precision=precision, start=path, device="cpu"), Own(), CPU)
        ours.step((torch.randn(4, 3, 32, 32), torch.arange(4)))
        ours.reset()
        for name, value in ours.model.state_dict().items():
            assert torch.equal(value, state[name].to(value.dtype)), (precision, name)
        masters = {
            n: m for (n, _), m in zip(ours.model.named_parameters(), ours.masters, strict=True)
        }
        assert all(torch.equal(master, state[name]) for name, master in masters.items())


def test_the_axis_is_a_file_name() -> None:
    assert parse_value("start", "none", "--start") is None
    assert parse_value("start", "./a/w.pt", "--start") == "a/w.pt"
    assert parse_value("start", "~/w.pt", "--start") == str(Path.home() / "w.pt")
    for text in ("", "a\nb"):
        with pytest.raises(UsageError, match="give a file of weights, or 'none'"):
            parse_value("start", text, "--start")


NET = """
from torch import nn

def build():
    first = nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(256, 10))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's network, and weights of one that tells 100 classes apart."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    save_network("w.pt", 0.0)
    return tmp_path


def save_network(path: str, shift: float) -> None:
    torch.manual_seed(3)
    conv, norm, head = nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.Linear(256, 100)
    state = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), head).state_dict()
    torch.save({"state_dict": {n: v + shift for n, v in state.items()}}, path)


ASKED = ["--model", "net:build", "--device", "cpu", "--dataset", "synthetic", "--batch-size", "100"]


@pytest.mark.slow
def test_a_sweep_over_starts_and_freezes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*ASKED, "--precision", "bf16-amp", "--steps", "5", "--repeats", "1", "--out", "out"]
    assert sweep([*flags, "--start", "none", "w.pt", "--freeze", "backbone"]) == 0
    assert sweep([*flags, "--start", "none"]) == 0
    rows = {(r.start, r.freeze): r for r in read_records(here / "out").itertuples()}
    assert list(rows) == [("", "backbone"), ("w.pt", "backbone"), ("", "none")]
    assert {row.status for row in rows.values()} == {"ok"}
    tuned = rows["w.pt", "backbone"]
    assert tuned.start_fingerprint == hash_weights("w.pt")
    assert rows["", "backbone"].start_fingerprint == ""
    assert "the head starts as it was built: 4.weight is (100, 256)" in tuned.notes
    assert len({row.model_parameters + row.model_structure for row in rows.values()}) == 1
    assert rows["", "none"].flop_per_image > 1.5 * tuned.flop_per_image

    # a file that changed is another start
    save_network("w.pt", 1.0)
    assert sweep([*flags, "--start", "w.pt", "--freeze", "backbone"]) == 2
    errors = capsys.readouterr().err
    assert "has rows that would not be comparable: start_fingerprint was " in errors


def test_what_cannot_start_is_refused_before_any_case(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": Trap(here / "m")}, "evil.pt")
    flags = [*ASKED, "--precision", "fp32", "--out", "out"]
    assert sweep([*flags, "--start", "w.pt", "evil.pt"]) == 2
    error = capsys.readouterr().err
    assert "model 'net:build': --start evil.pt: weights cannot be read from it" in error
    assert sweep([*flags, "--start", "gone.pt"]) == 2
    assert "--start gone.pt: No such file or directory; give a file" in capsys.readouterr().err
    assert not (here / "m").exists()
    assert not (here / "out").exists()
