"""What operations compute and move, against layers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import flop_counter

from bench.networks.data.batches import MadeBatches
from bench.networks.workloads import Images, Workload
from bench.schema.case import Case
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.work import Label, Work, WorkKind
from bench.training.counting import (
    _count_items,
    count_flop,
    count_step,
    join_work,
    read_work,
)
from bench.training.loop import Training
from bench.training.operations import WorkCounter, _apply, count_bytes, read_flags
from bench.training.switches import read_switches
from tests.training_for_tests import CPU, run_case


def sum_kinds(work: Mapping[Label, Work]) -> dict[WorkKind, Work]:
    kinds: dict[WorkKind, Work] = {}
    for label, one in work.items():
        kinds.setdefault(label.kind, Work()).add(one)
    return kinds


def count(run: Callable[[], Any]) -> dict[WorkKind, Work]:
    with WorkCounter() as counter:
        run()
    return sum_kinds(counter.work)


def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


X = full(2, 8, 4, 4)
N = X.numel()  # 256
POINT, WINDOW, GROUPS = full(6, 8, 1, 1), full(6, 8, 3, 3), full(8, 2, 3, 3)
A, B, TABLE, BIAS = full(3, 4), full(4, 5), full(100, 16), full(8, 1, 1)
PLACES, FIRST = torch.tensor([1, 1, 2]), torch.tensor([0] * 5)


@pytest.mark.parametrize(
    ("run", "kind", "flop", "elements"),
    [
        # 2 FLOP for each output element, input channel of its group and place of the window
        (lambda: F.conv2d(X, POINT), WorkKind.CONVOLUTION_1X1, 2 * 192 * 8, N + 48 + 192),
        (lambda: F.conv2d(X, WINDOW, padding=1), WorkKind.CONVOLUTION, 2 * 192 * 72, N + 432 + 192),
        (
            lambda: F.conv2d(X, GROUPS, padding=1, groups=4),
            *(WorkKind.GROUPED, 2 * N * 18, 2 * N + 144),
        ),
        (lambda: A @ B, WorkKind.MATMUL, 2 * 3 * 4 * 5, 12 + 20 + 15),
        (lambda: X + X, WorkKind.ELEMENTWISE, 0, N + N),  # one tensor twice is read once
        (lambda: X + BIAS, WorkKind.ELEMENTWISE, 0, N + 8 + N),
        (lambda: X.mul_(1), WorkKind.ELEMENTWISE, 0, 2 * N),
        (lambda: torch._foreach_mul([X, A], 2), WorkKind.ELEMENTWISE, 0, 2 * (N + 12)),
        (lambda: F.avg_pool2d(X, 4), WorkKind.REDUCTION, 0, N + 16),
        (lambda: torch.cat([X, X[:1]]), WorkKind.CONCATENATION, 0, 2 * (N + N // 2)),
        # what is normalised is read twice; 8 means and 8 deviations are written besides
        (lambda: F.batch_norm(X, None, None, training=True), WorkKind.NORMALISATION, 0, 3 * N + 16),
        (lambda: F.layer_norm(X, (4,)), WorkKind.NORMALISATION, 0, 2 * N + 2 * 64),
        # three rows of the table; the places are of 8 bytes
        (lambda: F.embedding(PLACES, TABLE), WorkKind.INDEXING, 0, 2 * 3 * 16 + 2 * 3),
        # a row that is taken five times is read once
        (lambda: F.embedding(FIRST, TABLE[:1]), WorkKind.INDEXING, 0, 16 + 5 * 16 + 2 * 5),
        (lambda: X.to(memory_format=torch.channels_last), WorkKind.LAYOUT, 0, 2 * N),
        (lambda: X.clone(), WorkKind.COPY, 0, 2 * N),
        (lambda: X.to(torch.bfloat16), WorkKind.CAST, 0, N + N // 2),
        # views cost nothing
        (lambda: X.permute(1, 0, 2, 3)[4:].detach().relu(), WorkKind.ELEMENTWISE, 0, N),
        (lambda: F.cross_entropy(A, PLACES), WorkKind.LOSS, 0, 2 * 12 + 12 + 2 * 3 + 2),
    ],
)  # fmt: skip
def test_an_operation_by_hand(
    run: Callable[[], Any], kind: WorkKind, flop: float, elements: int
) -> None:
    found = count(run)
    assert list(found) == [kind]
    assert found[kind].flop == flop
    assert found[kind].bytes == 4 * elements


def test_cudnn_normalises_in_as_many_passes_as_torch() -> None:
    """Its backward pass too reads what is normalised, and its gradient, twice."""
    gradients = []
    statistics = (full(8),) * 5
    for name, arguments in (
        ("native_batch_norm_backward", (X, X + 1, *statistics, True, 1e-5, [True] * 3)),
        ("cudnn_batch_norm_backward", (X + 1, X, *statistics, 1e-5, full(0))),
        ("miopen_batch_norm_backward", (X + 1, X, *statistics, 1e-5)),
    ):
        func = getattr(torch.ops.aten, name).default
        gradients.append(count_bytes(func, arguments, {}, (X + 2, full(8) + 1, full(8) + 2)))
    assert len(set(gradients)) == 1
    assert gradients[0] > 4 * 5 * N


def test_a_convolution_has_two_gradients() -> None:
    x, layer = X.clone().requires_grad_(), nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
    y = layer(x)
    gradient = torch.ones_like(y)
    (work,) = count(lambda: y.backward(gradient)).values()
    outputs, weights = y.numel(), layer.weight.numel()
    assert work.flop == 2 * 2 * outputs * weights // 8
    # the gradient is read for each; input and weights are read once, and their gradients written
    moved = 2 * outputs + 2 * N + 2 * weights
    assert work.bytes == 4 * moved


def case_of(precision: str = "fp32", batch_size: int = 64, accumulate: int = 1) -> Case:
    return Case("dpn-small", "synthetic", precision, PRECISIONS[precision].default_loss_scale,
                batch_size=batch_size, accumulate=accumulate, device="cpu")  # fmt: skip


def train(case: Case, workload: Workload) -> tuple[Training, MadeBatches]:
    batches = MadeBatches(
        workload.make_batch, 1000, batch_size=case.batch_size,
        micro_batch=case.batch_size // case.accumulate, device=CPU, seed=0,
    )  # fmt: skip
    return Training(case, workload.build_model(), CPU, workload), batches


def few_pixels() -> Images:
    """A DPN of one block on a quarter of the pixels."""
    images = Images("models_for_tests:one_block")
    images.shape = (3, 16, 16)
    return images


class Flat(Workload):
    """A linear layer on images: every byte can be told by hand."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))


def test_a_step_of_any_size_from_a_few_small_ones() -> None:
    case, workload = case_of(batch_size=64, accumulate=4), Flat()
    work = sum_kinds(count_step(*train(case, workload)))
    weights, part = 30720, 16
    # the first layer's input has no gradient
    assert work[WorkKind.MATMUL].flop == 64 * 2 * 2 * weights
    assert work[WorkKind.MATMUL].bytes == 4 * 4 * 2 * (part * 3072 + weights + part * 10)
    # weights, gradients and momentum, each read and written
    assert work[WorkKind.OPTIMIZER] == Work(1, 0, 4 * 6 * weights)
    assert WorkKind.OTHER not in work


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16-amp", "loss_scale": "dynamic"},
        {"precision": "bf16", "accumulate": 2, "freeze": "backbone", "optimizer": "adamw"},
    ],
)
def test_what_a_step_moves_is_a_line_to_the_byte(settings: dict[str, Any]) -> None:
    """A step of twenty items, counted itself, is what steps of two, four and eight had told."""
    case = replace(case_of(), batch_size=20 * settings.get("accumulate", 1), **settings)
    training, batches = train(case, few_pixels())
    works = count_step(training, batches)
    counted, _ = _count_items(training, batches, 20)
    assert {label: (w.calls, w.flop, w.bytes) for label, w in works.items()} == {
        label: (w.calls, w.flop, w.bytes) for label, w in counted.items()
    }
    assert all(work.bytes_per_item is not None for work in works.values())
    assert read_work(join_work(works, {})) == works, "rows tell what was counted"


class Tuning(Flat):
    """Notes torch's switches in each step."""

    seen: ClassVar[list[dict[str, Any]]] = []

    def compute_loss(self, network: Any, batch: Any) -> Any:
        self.seen.append(read_switches())
        return super().compute_loss(network, batch)


def test_counting_autotunes_no_shapes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the one switch that changes nothing else, which is set back."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    case = case_of(batch_size=20)
    training, batches = train(case, Tuning())
    before = read_switches()
    Tuning.seen.clear()
    count_step(training, batches)
    assert [{n for n in one if one[n] != before[n]} for one in Tuning.seen] == [
        {"cudnn.benchmark"}
    ] * 3
    assert read_switches() == before


class Squares(Flat):
    """Looks at each pair of items: what it moves is no line over them."""

    def compute_loss(self, network: Any, batch: Any) -> Any:
        pairs = torch.cdist(network(batch[0]), network(batch[0]))
        return pairs.mean()


def test_what_is_no_line_is_counted_whole() -> None:
    case = case_of(batch_size=20)
    training, batches = train(case, Squares())
    works = count_step(training, batches)
    assert works == _count_items(training, batches, 20)[0]
    assert all(work.bytes_per_item is None for work in works.values())


def test_a_step_that_overflowed_tells_nothing_of_other_batch_sizes() -> None:
    settings = {"precision": "fp16-amp", "loss_scale": "dynamic-apex"}
    case = replace(case_of(batch_size=20), **settings)
    training, batches = train(case, Flat())
    with torch.no_grad():
        training.model[1].weight.mul_(1e6)
    assert all(work.bytes_per_item is None for work in count_step(training, batches).values())


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_flop_are_those_that_are_counted_on_shapes(precision: str) -> None:
    case, workload = case_of(precision, batch_size=8), few_pixels()
    work = sum_kinds(count_step(*train(case, workload)))
    assert sum(w.flop for w in work.values()) == 8 * count_flop(workload)
    assert WorkKind.OTHER not in work
    assert (WorkKind.CAST in work) is (precision != "fp32")


def test_flop_of_a_normalization_that_averages_all_batches_are_known() -> None:
    """Which asks how many it has seen, as shapes alone do not know."""

    class Normalized(Flat):
        def build_model(self) -> nn.Module:
            return nn.Sequential(super().build_model(), nn.BatchNorm1d(10, momentum=None))

    assert count_flop(Normalized()) == count_flop(Flat())


def test_a_row_has_the_traffic_of_its_step() -> None:
    asked = {"workload": [f"{__name__}:Flat"], "device": ["cpu"], "accumulate": [2]}
    (case,) = grid({**asked, "precision": ["fp32"], "batch_size": [20]})
    case = replace(case, steps=2)
    found = run_case(case)
    works = count_step(*train(case, Flat()))
    assert found.measurement.step_bytes == round(sum(work.bytes for work in works.values()))
    assert found.measurement.step_bytes == round(sum(row.bytes or 0 for row in found.work))
    assert {row.kind for row in found.work} >= {WorkKind.MATMUL, WorkKind.OPTIMIZER, WorkKind.LOSS}


@pytest.mark.parametrize("error", [AttributeError, AssertionError])
def test_flags_of_an_older_torch_are_those_of_its_switches(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Switched:
        """A backend before torch 2.9; that of products asserts in torch 2.1."""

        allow_tf32 = True
        allow_fp16_reduced_precision_reduction = allow_bf16_reduced_precision_reduction = True

        def __getattr__(self, name: str) -> Any:
            raise error(name)

    monkeypatch.setattr(torch.backends.cuda, "matmul", Switched())
    assert read_flags()["matmul"] == "tf32"
    monkeypatch.setattr(Switched, "allow_tf32", False)
    assert read_flags()["matmul"] == "ieee"


def test_formulas_of_older_torches_take_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def formula(a_shape: Any, b_shape: Any, *, out_shape: Any) -> int:
        return int(2 * a_shape[0] * a_shape[1] * out_shape[1])

    @wraps(formula)
    def wrapped(*args: Any, out: Any) -> int:  # as torch 2.2 has it
        raise AssertionError

    assert _apply(wrapped, (A, B), {}, A @ B) == 2 * 3 * 4 * 5
    monkeypatch.delattr(flop_counter, "flop_registry")
    assert _apply(formula, (A, B), {}, A @ B) == 2 * 3 * 4 * 5
