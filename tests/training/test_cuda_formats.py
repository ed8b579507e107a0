"""The formats of CUDA's forward passes, which torch's build for CUDA tells without a GPU: fake
tensors run its dispatch, and no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from bench.precision import PRECISIONS, cast
from bench.training.counting import Counter, judge_formats
from bench.work import Kind, share_formats

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(),
    reason="a fake tensor on CUDA ends the process in torch's build for CPUs; see make test-wheel",
)


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


def count_forward(precision: str) -> Counter:
    known = PRECISIONS[precision]
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    network = cast(nn.Sequential(*layers, nn.Linear(16 * 36, 10)), known)
    held = network.state_dict()  # a fake weight cannot be cast in place
    with FakeTensorMode(), torch.device("cuda"), torch.no_grad():
        state = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in held.items()}
        images = torch.randn(4, 3, 8, 8, dtype=getattr(torch, known.weights))
        labels = torch.zeros(4, dtype=torch.long)
        with Counter() as counter, cast_by_itself(known.autocast):
            F.cross_entropy(functional_call(network, state, images).float(), labels)
    return counter


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16-amp", "bf16", "bf16-amp"])
def test_all_products_of_a_forward_pass_are_in_the_format_of_its_label(precision: str) -> None:
    work = count_forward(precision).work
    assert judge_formats(work, PRECISIONS[precision]) == (1.0, "")
    others = {"fp32", "fp16", "bf16"} - {precision.removesuffix("-amp")}
    told = {other: judge_formats(work, PRECISIONS[other])[0] for other in others}
    assert set(told.values()) == {0.0}, share_formats(work)


def test_cudnn_normalises_in_the_format_of_the_activations() -> None:
    """bf16's runs torch's own kernel on older ones: see docs/why.md."""
    work = count_forward("fp16-amp").work
    (norm,) = (label for label in work if label.kind is Kind.NORMALISATION)
    assert (norm.operation, norm.format) == ("cudnn_batch_norm", "float16")
