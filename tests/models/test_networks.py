"""Networks: the sizes that the 2019 page's network has, and the user's own."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.errors import UsageError
from bench.fingerprint import examine
from bench.grid import parse_values
from bench.models import build_model, dpn, parse_model, read_arguments
from bench.training.counting import count_flop
from bench.workloads import parse_workload
from bench.workloads.images import Images

ROOT = Path(__file__).parents[2]


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
    said = {"dpn92": dpn.dpn92, "dpn-small": dpn.dpn_small}[name].__doc__
    assert f"{flop / 1e9:.2f} GFLOP" in (said or "")
    assert f"{parameters:,} parameters" in (said or "")
    if name == "dpn92":  # the reference of the H200 is counted as the harness counts
        with (ROOT / "results" / "reference" / "h200-lab.csv").open() as lines:
            assert {float(row["flop_per_image"]) for row in csv.DictReader(lines)} == {flop}


def test_dual_paths_add_and_append() -> None:
    """A block keeps the trunk's channels, adds to the residual ones and appends the new ones."""
    from bench.models.dpn import DualPathBlock, Stage

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
        with pytest.raises(UsageError, match=f"--model 'no_such.* in {Path.cwd()}, .*PYTHONPATH$"):
            build_model(name)


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("net.py:build", "give net:build"),
        ("./nets/mlp.py:build", "give nets.mlp:build"),
        ("net.py", "give net:FUNCTION, with the name of the function"),
    ],
)
def test_a_file_is_told_its_module(given: str, right: str) -> None:
    with pytest.raises(ValueError, match=f"^{right}$"):
        parse_workload(given)
    # as the model in a record, net.py is what a command trains
    with pytest.raises(UsageError, match=f"--model '{re.escape(given)}': {right}$"):
        parse_values("model", given, "--model")


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("nets:VGG()", "nets:VGG"),
        ("nets:VGG( depth = 16 , act='relu' )", "nets:VGG(act=relu,depth=16)"),
        ("nets:f(a=True,b=OFF,c=None,d=.5,e=1e-3)", "nets:f(a=on,b=off,c=none,d=0.5,e=0.001)"),
        ("nets:f(a='5',b=\"none\",c='')", "nets:f(a='5',b='none',c='')"),
    ],
)
def test_arguments_of_a_factory_have_one_spelling(given: str, spelled: str) -> None:
    for parse in (parse_model, parse_workload):
        assert parse(given) == parse(spelled) == spelled
    assert read_arguments(given) == read_arguments(spelled)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nets:VGG(16)", "'16': give arguments by name, such as (depth=16)"),
        ("nets:VGG(depth=16,depth=19)", "depth is given twice"),
        ("nets:VGG(depth=)", "depth=: an argument is a number, on, off, none, or text of letters"),
        ("nets:VGG(f=os.system('x'))", "write a function that calls this one"),
        ("nets:VGG(depth=16", "package.module:factory"),
        ("nets.py:VGG(depth=16)", "give nets:VGG(depth=16)"),
    ],
)
def test_arguments_that_cannot_be_written(given: str, message: str) -> None:
    for parse in (parse_model, parse_workload):
        with pytest.raises(ValueError, match=re.escape(message)):
            parse(given)


TIMM = """
from torch import nn
__version__ = "1.0.22"
def list_models(): return ["resnet18", "vit_tiny"]
def is_model(name): return name in list_models()
def create_model(name, pretrained, num_classes, in_chans=3, **settings):
    assert pretrained is False
    made = {"resnet18": net, "vit_tiny": vit}[name]
    return made(num_classes, in_chans, **settings)
def net(classes, channels, width=4):
    head = nn.Linear(16 * width, classes)
    pool = nn.AdaptiveAvgPool2d(4)
    return nn.Sequential(nn.Conv2d(channels, width, 8, 8), pool, nn.Flatten(), head)
def vit(classes, channels, img_size=(224, 224)):
    places = img_size[0] // 8 * (img_size[1] // 8)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 8, 8), nn.Flatten(), nn.Linear(4 * places, classes)
    )
"""


@pytest.fixture
def timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stand-in for timm with the three functions that are used of it."""
    (tmp_path / "timm.py").write_text(TIMM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    # of a file that is written again within a second the older bytecode would be taken
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("timm", None)


def test_a_network_of_timm_has_a_head_for_the_classes(timm: Path) -> None:
    """Its name, its classes, arguments; and a hash that tells versions apart."""
    name = parse_model("timm:resnet18(width=8)")
    assert name == "timm:resnet18(width=8)"
    assert build_model(name)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert examine(name).parameters != examine("timm:resnet18").parameters
    with pytest.raises(UsageError, match=r"cannot be built: TypeError: .*'depth'"):
        examine("timm:resnet18(depth=8)")
    with pytest.raises(ValueError, match="give --classes in place of num_classes"):
        parse_model("timm:resnet18(num_classes=5)")
    found = examine("timm:resnet18")
    assert found.outputs is None
    (timm / "timm.py").write_text(TIMM.replace("1.0.22", "1.0.23"))
    del sys.modules["timm"]
    invalidate_caches()
    newer = examine("timm:resnet18")
    assert newer.source != found.source
    assert newer.parameters == found.parameters
    with pytest.raises(UsageError, match=r"timm 1\.0\.23 has no such network; did you mean"):
        build_model("timm:resnet81")


def test_a_network_of_timm_is_built_for_its_images(timm: Path) -> None:
    """One that has a weight for each place of an image, as the other too."""
    for name in ("resnet18", "vit_tiny"):
        images = torch.zeros(2, 1, 64, 48)
        assert build_model(f"timm:{name}", 100, (1, 64, 48))(images).shape == (2, 100)


def test_without_timm_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"timm cannot be imported .* pip install timm"):
        build_model("timm:resnet18")
