"""Networks: the sizes that the 2019 page's network has, and the user's own."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.base.errors import UsageError
from bench.networks import dpn
from bench.networks.models import build_model, parse_model, split_arguments
from bench.networks.workloads import Images, parse_workload
from bench.schema.grid import parse_values
from bench.training.counting import count_flop
from tests.planted.records import ROOT


@pytest.mark.parametrize(("name", "parameters"), [("dpn92", 34_236_634), ("dpn-small", 155_850)])
def test_size_and_flop_by_hand(name: str, parameters: int) -> None:
    """Each layer's products come once forward, once for its weight and once for its input.

    The first layer's input needs no gradient. torch's counter says 17.19 GFLOP for dpn92, because
    it takes the weight gradient of a grouped convolution for that of an ungrouped one.
    """
    products: list[int] = []

    def count(layer: nn.Module, _: object, out: torch.Tensor) -> None:
        products.append(out[0].numel() * layer.weight[0].numel())  # type: ignore[index,operator]

    with torch.device("meta"):
        model = build_model(name)
        for layer in model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                layer.register_forward_hook(count)
        model(torch.empty(1, 3, 32, 32))
    assert sum(p.numel() for p in model.parameters()) == parameters
    flop = count_flop(Images(name))
    assert flop == 2 * (3 * sum(products) - products[0])
    documented = {"dpn92": dpn.dpn92, "dpn-small": dpn.dpn_small}[name].__doc__
    assert f"{flop / 1e9:.2f} GFLOP" in (documented or "")
    assert f"{parameters:,} parameters" in (documented or "")
    if name == "dpn92":  # the reference of the H200 is counted as the harness counts
        with (ROOT / "results" / "reference" / "h200-lab.csv").open() as lines:
            assert {float(row["flop_per_image"]) for row in csv.DictReader(lines)} == {flop}


def test_dual_paths_add_and_append() -> None:
    """A block keeps the trunk's channels, adds to the residual ones and appends the new ones."""
    from bench.networks.dpn import DualPathBlock, Stage

    block = DualPathBlock(12, Stage(1, 8, 8, 4), stride=1, project=False, groups=4).eval()
    nn.init.zeros_(block.conv3.weight)
    nn.init.constant_(block.bn3.bias, 0.5)  # the block's own output is 0.5 everywhere
    x = torch.rand(2, 12, 5, 5)
    y = block(x)
    assert y.shape == (2, 16, 5, 5)
    torch.testing.assert_close(y[:, :8], x[:, :8] + 0.5)
    torch.testing.assert_close(y[:, 8:12], x[:, 8:])
    torch.testing.assert_close(y[:, 12:], torch.full((2, 4, 5, 5), 0.5))


def test_a_missing_module_is_told_where_it_was_looked_for() -> None:
    for name in ("no_such_package:thing", "no_such.package:thing"):
        with pytest.raises(UsageError, match=f"--model 'no_such.* {Path.cwd()}: .*PYTHONPATH$"):
            build_model(name)


@pytest.mark.parametrize("given", ["net.py:build", "./nets/mlp.py:build", "net.py"])
def test_a_file_is_told_its_module(given: str) -> None:
    with pytest.raises(ValueError, match=r"give package\.module:factory, such as nets"):
        parse_workload(given)
    # as the model in a record, net.py is what a command trains
    with pytest.raises(UsageError, match=f"--model '{re.escape(given)}': give package.module"):
        parse_values("model", given, "--model")


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("nets:VGG( depth = 16 , act='relu' )", "nets:VGG(act=relu,depth=16)"),
        ("nets:f(a=True,b=none,c=None,d=.5,e=1e-3)", "nets:f(a=True,b=none,c=None,d=0.5,e=0.001)"),
        ("nets:f(a='5',b='None',c='')", "nets:f(a='5',b='None',c='')"),
    ],
)
def test_arguments_of_a_factory_have_one_spelling(given: str, spelled: str) -> None:
    for parse in (parse_model, parse_workload):
        assert parse(given) == parse(spelled) == spelled
    assert split_arguments(given) == split_arguments(spelled)


@pytest.mark.parametrize(
    "given",
    [
        "nets:VGG(16)",
        "nets:VGG(depth=16,depth=19)",
        "nets:VGG(f=os.system('x'))",
        "nets:VGG(depth=16) or 1",
    ],
)
def test_arguments_that_cannot_be_written(given: str) -> None:
    for parse in (parse_model, parse_workload):
        with pytest.raises(ValueError, match=r"its arguments cannot be read .*such as .depth=16"):
            parse(given)
