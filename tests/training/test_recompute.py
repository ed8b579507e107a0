"""Recomputing activations changes memory and time, and no loss, weight or running statistic."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from bench.base.errors import UsageError
from bench.compare.__main__ import main as compare_main
from bench.networks.dpn import dpn_small
from bench.networks.workloads import Workload
from bench.report.__main__ import main as report_main
from bench.schema.rules import settle
from bench.sweep.__main__ import main as sweep_main
from bench.training.building import build_training
from bench.training.counting import count_flop
from bench.training.loop import Training
from bench.training.recompute import Recompute, find_blocks
from tests.training_for_tests import examine

CPU = torch.device("cpu")


class Dropped(Workload):
    """A DPN with BatchNorm, and with dropout in each block."""

    samples = 64

    def build_model(self) -> nn.Module:
        model = dpn_small()
        for block in model.stages:
            block.conv3 = nn.Sequential(block.conv3, nn.Dropout(0.2))
        return model


def build(recompute: str, workload: Workload | None = None, **settings: Any) -> Training:
    given = {"device": "cpu", "batch_size": 8, "lr": 0.01, "recompute": recompute}
    return build_training(settle(given | settings), workload or Dropped(), CPU)


def train(recompute: str, **settings: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the results of three steps, and the state after them."""
    training = build(recompute, **settings)
    micro = -(-8 // settings.get("accumulate", 1))
    batches = Dropped().open_batches(batch_size=8, micro_batch=micro, device=CPU, seed=0)
    torch.manual_seed(1)
    steps = [training.step(batch) for batch in batches.divide(steps=3)]
    return [loss for loss, *_ in steps], training.model.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16-amp", "optimizer": "adamw"},
        {"precision": "fp16", "loss_scale": "dynamic"},
        {"accumulate": 2, "channels_last": True},
        {"freeze": "stem,stages.0"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())) or "fp32",
)
def test_losses_weights_and_statistics_are_bit_for_bit(settings: dict[str, Any]) -> None:
    """Dropout draws the same again, and BatchNorm's statistics see a batch once."""
    losses, state = train("none", **settings)
    assert state["stages.0.bn1.num_batches_tracked"] == (
        0 if "freeze" in settings else 3 * settings.get("accumulate", 1)
    )
    for recompute in ("blocks", "full"):
        again, now = train(recompute, **settings)
        assert again == losses
        assert {name for name in state if not torch.equal(state[name], now[name])} == set()


def test_less_is_kept_for_the_backward_pass() -> None:
    """Bytes of storages that autograd keeps of a loss: a CPU has no allocator to ask."""

    def count_kept(recompute: str) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        batch = Dropped().make_batch(8, CPU, torch.Generator().manual_seed(0))
        training = build(recompute)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = training.compute_loss(batch)  # its graph holds what it keeps
        weights = {w.untyped_storage().data_ptr() for w in training.model.parameters()}
        assert found.loss.requires_grad
        return sum(size for address, size in kept.items() if address not in weights)

    none, blocks, full = map(count_kept, ("none", "blocks", "full"))
    assert blocks < none / 4
    assert full < blocks  # the stem too


def test_what_is_computed_again_is_counted_apart_from_the_models_own() -> None:
    model, blocks, full = (count_flop(Dropped(), recompute=r) for r in ("none", "blocks", "full"))
    stem = 2 * 32 * 32 * 16 * 27
    # gradients of weights and inputs are each as much as the forward pass, but of the images
    forward = (model + stem) / 3
    head = 2 * 272 * 10
    assert blocks - model < full - model <= forward
    assert full - model == pytest.approx(forward - head, rel=0.02)
    assert full - blocks == stem


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class Staged(nn.Module):
    """Stages of blocks, and beside them a head of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(5)))
        self.last = nn.ModuleList([nn.Linear(4, 4), Block()])
        self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_blocks_are_found_by_structure_or_by_the_names_of_a_workload() -> None:
    model = Staged()
    stages = [block for stage in model.stages for block in stage.children()]
    assert find_blocks(model) == [*stages, model.last[1]]
    assert Recompute("full").find(model) == [*stages, model.last[1], model.head]
    assert Recompute("blocks", "stages.*").find(model) == [*model.stages]
    assert Recompute("blocks", "stages.1.0, head").find(model) == [model.stages[1][0], model.head]
    several = nn.Transformer(8, 2, 2, 3, 8)
    assert find_blocks(several) == [*several.encoder.layers, *several.decoder.layers]
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert find_blocks(plain) == [*plain], "lists, where nothing else is repeated"
    assert Recompute("none").find(model) == Recompute("budget:0.5").find(model) == []
    with pytest.raises(UsageError, match="no part of the network is named 'layers'"):
        Recompute("blocks", "layers").find(model)


def flat() -> nn.Module:
    """Nothing in it repeats."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))


class Drawing(nn.Module):
    """Draws a factor by Python, of which torch's checkpoint keeps no state, unless it is given."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.factor = factor
        self.layer = nn.Sequential(nn.Linear(10, 10), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() if self.factor is None else self.factor
        y: Tensor = x + self.layer(factor * x)
        return y


def shared() -> nn.Module:
    """One block twice: a list of it is not what torch has as its blocks."""
    block = Drawing(0.5)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), nn.Sequential(block, block))


class Overwriting(Workload):
    """Its blocks overwrite their input, which is then not there to be computed again from."""

    def build_model(self) -> nn.Module:
        blocks = (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(9, 9)) for _ in range(2))
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 9), *blocks, nn.Linear(9, 10))


def test_a_network_that_cannot_is_refused_before_it_is_trained() -> None:
    name = f"{__name__}:flat"
    assert examine(name)
    with pytest.raises(UsageError, match=r"--recompute blocks: the network repeats no blocks"):
        examine(name, recomputes=["blocks"])
    with pytest.raises(UsageError, match=r"or give --recompute none$"):
        examine(name, recomputes=["full"])
    with pytest.raises(UsageError, match=r"repeats no blocks.*or give --recompute full$"):
        examine(f"{__name__}:shared", recomputes=["blocks"])
    assert examine(f"{__name__}:shared", recomputes=["full"])
    name = f"{__name__}:Overwriting"
    assert examine(name, "workload")
    with pytest.raises(UsageError, match=r"a training step with --recompute blocks fails: .*inpl"):
        examine(name, "workload", recomputes=["blocks"])


def spectral() -> nn.Module:
    """Each forward pass takes another step towards the largest singular values of two layers."""
    blocks = (nn.Sequential(spectral_norm(nn.Linear(10, 10)), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), *blocks)


def test_a_buffer_that_would_change_twice_is_refused() -> None:
    name = f"{__name__}:spectral"
    assert examine(name)
    with pytest.raises(UsageError, match=r"--recompute blocks would change \d\.0\..*a second time"):
        examine(name, recomputes=["blocks"])


def drawing() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), *(Drawing() for _ in range(3)))


def test_blocks_that_would_draw_other_numbers_are_refused() -> None:
    name = f"{__name__}:drawing"
    assert examine(name)
    for recompute in ("blocks", "full"):
        with pytest.raises(UsageError, match=rf"--recompute {recompute} gives other gradients"):
            examine(name, recomputes=[recompute])


def test_a_budget_is_refused_where_random_numbers_are_drawn() -> None:
    """torch.compile would draw others when it computes them again."""
    name = f"{__name__}:Dropped"
    assert examine(name, "workload", recomputes=["blocks", "full"])
    with pytest.raises(UsageError, match=r"--recompute budget:0.5 with a network that draws"):
        examine(name, "workload", recomputes=["budget:0.5"])
    assert examine(f"{__name__}:flat", recomputes=["budget:0.5"])


def read(out: Path) -> list[dict[str, str]]:
    with (out / "records.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_measures_it_and_a_comparison_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two processes too, which exchange gradients in the backward pass."""
    out = tmp_path / "out"
    words = "--model dpn-small --dataset synthetic --device cpu --precision fp32 --batch-size 16"
    words += f" --steps 2 --repeats 1 --recompute none blocks --out {out}"
    assert sweep_main(words.split()) == 0
    ddp = "--parallel ddp --world-size 2"
    assert sweep_main([*words.split(), *ddp.split()]) == 0
    for parallel in ("none", "ddp"):
        none, blocks = (r for r in read(out) if r["parallel"] == parallel and r["sentinel"] != "on")
        assert (none["recompute"], blocks["recompute"]) == ("none", "blocks")
        assert blocks["notes"] == "computed again in the backward pass: 4 DualPathBlock"
        for same in ("train_loss", "train_accuracy", "flop_per_image"):
            assert none[same] == blocks[same] != ""
        assert none["recomputed_flop_per_image"] == ""
        assert float(blocks["recomputed_flop_per_image"]) / float(none["flop_per_image"]) > 0.3
        assert int(blocks["step_bytes"]) > int(none["step_bytes"])
    capsys.readouterr()
    compare_main([str(out), "--axis", "recompute", "none", "blocks"])
    assert "2 cases with both values of recompute" in capsys.readouterr().out
    report_main([str(out), "--full"])
    shown = capsys.readouterr().out
    assert re.search(r"^ blocks .* 32\.4 ", shown, re.MULTILINE), "FLOP again, in percent"
    assert re.search(r"recompute: none → blocks ", shown), "its effect"
