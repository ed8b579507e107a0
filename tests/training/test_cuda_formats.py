"""The formats of CUDA's forward passes, which torch's build for CUDA tells without a GPU: fake
tensors run its dispatch, and no kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from bench.schema.case import Case
from bench.schema.precision import PRECISIONS
from bench.schema.work import WorkKind
from bench.training.formats import cast
from bench.training.labels import judge_label
from bench.training.operations import WorkCounter

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a fake tensor on CUDA ends the process in torch's build for CPUs; see make test-wheel",
)


TRIED = ("fp32", "fp16", "fp16-amp", "bf16", "bf16-amp")


@contextmanager
def cast_by_itself(name: str | None) -> Iterator[None]:
    """`torch.autocast` switches itself off where it finds no GPU; torch's switches do not."""
    torch.set_autocast_enabled("cuda", name is not None)
    torch.set_autocast_dtype("cuda", getattr(torch, name or "float16"))
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def count_forward(precision: str) -> WorkCounter:
    known = PRECISIONS[precision]
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    network = cast(nn.Sequential(*layers, nn.Linear(16 * 36, 10)), known)
    weights = network.state_dict()  # a fake weight cannot be cast in place
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in weights.items()}
        images = torch.randn(4, 3, 8, 8, dtype=getattr(torch, known.weights))
        labels = torch.zeros(4, dtype=torch.long)
        with WorkCounter() as counter, cast_by_itself(known.autocast):
            F.cross_entropy(functional_call(network, state, images).float(), labels)
    return counter


@pytest.fixture(scope="module")
def found_on_cuda() -> dict[str, Any]:
    """What a process of its own found: one that had fake tensors on CUDA cannot be forked from,
    its loader workers end by a segmentation fault."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("precision", TRIED)
def test_all_products_of_a_forward_pass_are_in_the_format_of_its_label(
    found_on_cuda: dict[str, Any], precision: str
) -> None:
    shares = dict(found_on_cuda[precision]["shares"])
    assert shares.pop(precision) == 1.0
    others = {"fp32", "fp16", "bf16"} - {precision.removesuffix("-amp")}
    assert {shares[other] for other in others} == {0.0}


def test_cudnn_normalises_in_the_format_of_the_activations(found_on_cuda: dict[str, Any]) -> None:
    """bf16's runs torch's own kernel on older ones: see docs/why.md."""
    assert found_on_cuda["fp16-amp"]["norms"] == [["cudnn_batch_norm", "float16"]]


if __name__ == "__main__":
    found = {}
    for tried in TRIED:
        work = count_forward(tried).work
        norms = [label for label in work if label.kind is WorkKind.NORMALISATION]
        found[tried] = {
            "shares": {other: judge_label(work, Case(precision=other)).share for other in TRIED},
            "norms": [(label.operation, label.format) for label in norms],
        }
    print(json.dumps(found))
