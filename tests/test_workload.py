"""What a user brings to be trained: ten ways to break the protocol, and three ways to keep it."""

from __future__ import annotations

import csv
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pytest_for_tests import Capture, Patch
from torch import Tensor, nn
from training_for_tests import CPU, compile_lightly, run_case

from bench.case import list_varying, parse_value
from bench.data.batches import MadeBatches, count_items
from bench.errors import UnsupportedError, UsageError
from bench.fingerprint import examine
from bench.flags import join_flags
from bench.grid import grid
from bench.precision import PRECISIONS
from bench.record import Outcome, Status
from bench.report.__main__ import main as report
from bench.sweep.__main__ import main as sweep
from bench.training.building import make_training
from bench.training.loop import Training
from bench.training.trial import Trial
from bench.workloads import IMAGES, OWN, Loss, Network, Workload, WorkloadFacts, load_workload
from bench.workloads.images import Images
from examples import transformer

TRANSFORMER, TWO = "examples.transformer:tiny", "examples.two_losses:tiny"
RESNET = "examples.resnet:tiny"


class Right(Workload):
    """Numbers to two classes; each test breaks something of it."""

    unit = "rows"
    samples = 40

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        x = torch.randn(size, 3, device=device, generator=generator)
        return {"x": x, "y": (x[:, 0] > 0).long()}

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        logits = network(batch["x"])
        return Loss(F.cross_entropy(logits, batch["y"]), (logits.argmax(1) == batch["y"]).sum())


def normalised() -> Workload:
    return broken(build_model=lambda self: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))


class Counting(nn.Linear):
    def __init__(self, persistent: bool) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.tensor(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls.reshape(1) + 1
        return super().forward(x)


def network() -> nn.Module:
    return nn.Linear(3, 2)


def number() -> int:
    return 3


def look(workload: Workload) -> WorkloadFacts:
    trial = Trial("m:f", workload)
    return trial.run(trial.build_network())


def broken(**parts: Any) -> Workload:
    return type("Broken", (Right,), parts)()  # type: ignore[no-any-return]


def with_loss(change: Callable[[Loss], Any]) -> Workload:
    def compute_loss(self: Right, network: Network, batch: Any) -> Any:
        found = Right.compute_loss(self, network, batch)
        return change(found)

    return broken(compute_loss=compute_loss)


def raising(*_: object) -> None:
    raise ValueError("no\nluck")


def test_what_keeps_the_protocol_is_known() -> None:
    assert look(Right()) == WorkloadFacts(samples=40, units=40, test_units=0, unit="rows")
    assert look(transformer.tiny()) == WorkloadFacts(
        320, 320 * 32, 24 * 32, "tokens", optimizer="AdamW"
    )
    for network in (nn.LazyLinear(2), Counting(persistent=False)):
        look(broken(build_model=lambda self, network=network: network))
    assert not examine(f"{__name__}:Right", "workload").batchnorm
    assert examine(f"{__name__}:normalised", "workload").batchnorm


@dataclass
class Part:
    values: Any


BESIDE: dict[str, Callable[[], Any]] = {
    "nan": lambda: torch.full((2, 3), torch.nan),
    "minus zero": lambda: -torch.zeros(2),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "float8": lambda: torch.full((2,), torch.nan).to(torch.float8_e5m2),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "empty": lambda: torch.empty(2, 0),
    "nested": lambda: [{"a": (torch.ones(2), None, "text", float("nan"))}, Part(torch.ones(1))],
    "array": lambda: np.full(2, np.nan),
    "object": object,
}


@pytest.mark.parametrize("kind", BESIDE)
def test_batches_of_one_seed_are_compared_by_their_bits(kind: str) -> None:
    def make_batch(self: Right, *making: Any) -> Any:
        return {**Right.make_batch(self, *making), "z": BESIDE[kind]()}

    look(broken(make_batch=make_batch))


@pytest.mark.parametrize(
    "first_and_second",
    [
        (torch.zeros(2), -torch.zeros(2)),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (Part(torch.ones(2)), Part(torch.zeros(2))),
        (np.ones(2), np.zeros(2)),
        (torch.ones(2), [torch.ones(2)] * 2),
        (1.0, 2.0),
    ],
    ids=["sign", "dtype", "dataclass", "array", "number of tensors", "number"],
)
def test_batches_of_one_seed_that_differ_in_a_bit_are_refused(
    first_and_second: tuple[Any, Any],
) -> None:
    made = iter(first_and_second)

    def make_batch(self: Right, *making: Any) -> Any:
        return {**Right.make_batch(self, *making), "z": next(made)}

    with pytest.raises(UsageError, match="made two different batches from one seed"):
        look(broken(make_batch=make_batch))


BROKEN: dict[str, tuple[Workload, str]] = {
    "unit": (broken(unit=" "), "its unit is empty; name what is counted, such as 'tokens'"),
    "samples": (broken(samples=1), "samples is 1; it must be a whole number of at least 2"),
    "no network": (broken(build_model=lambda self: 3),
     "build_model returned int; it must return a torch.nn.Module"),
    "no method": (Workload(), "build_model fails: NotImplementedError: a workload has a method"),
    "nothing to train": (broken(build_model=lambda self: nn.Flatten()),
     "its network has no parameters that require gradients"),
    "exception": (broken(make_batch=raising),
     "make_batch fails: ValueError: no luck (test_workload.py, line "),
    "no tensor": (broken(make_batch=lambda *_: "text"),
     "make_batch returned no batch: a batch holds tensors"),
    "items": (broken(make_batch=lambda self, size, device, generator: torch.zeros(3, 3)),
     "make_batch made 3 items where 2 were asked for; its tensors have the shapes (3, 3)"),
    "device": (broken(make_batch=lambda self, size, *_: torch.zeros(size, 3, device="meta")),
     "make_batch made a tensor on meta where cpu was asked for"),
    "graph": (broken(make_batch=lambda self, size, *_: torch.zeros(size, 3, requires_grad=True)),
     "make_batch made a tensor that requires a gradient; detach it"),
    "own random numbers": (broken(make_batch=lambda self, size, *_: torch.randn(size, 3)),
     "made two different batches from one seed; draw random numbers only from the generator"),
    "shape": (with_loss(lambda found: found.loss.expand(2)),
     "compute_loss returned torch.float32 of shape (2,); the loss must be float32 of shape ()"),
    "dtype": (with_loss(lambda found: found.loss.half()), "returned torch.float16 of shape ()"),
    "no loss": (with_loss(lambda found: float(found.loss.detach())),
     "compute_loss returned float; it must return a tensor or a Loss"),
    "not finite": (with_loss(lambda f: f.loss * torch.inf), "returned inf for the first batch"),
    "another network": (
        broken(
            own=nn.Linear(3, 2),
            build_model=lambda self: self.own,
            compute_loss=lambda self, network, batch: self.own(batch["x"]).sum(),
        ),
        "compute_loss does not call the network that it is given; call it, and no other, since",
    ),
    "module": (
        broken(
            compute_loss=lambda self, network, batch: sum(map(Tensor.sum, network.parameters()))
        ),
        "compute_loss fails: AttributeError: 'function' object has no attribute 'parameters' (test",
    ),
    "detached": (with_loss(lambda found: found.loss.detach()),
     "the loss does not depend on the network's weights; do not detach it"),
    "correct": (with_loss(lambda found: Loss(found.loss, torch.tensor(5))),
     "correct is 5; it must be an integer tensor of shape (), from 0 to what count_units says,"),
    "optimizer": (broken(build_optimizer=lambda *_: "adam"),
     "build_optimizer returned str; it must return a torch.optim.Optimizer, or None"),
    "other weights": (broken(build_optimizer=lambda *_: torch.optim.SGD([torch.zeros(2)])),
     "build_optimizer made an optimizer of other tensors; give it only the parameters that"),
    "closure": (
        broken(build_optimizer=lambda self, parameters, lr: torch.optim.LBFGS(parameters, lr)),
        "a training step in fp32 fails: TypeError: ",
    ),
    "buffer": (broken(build_model=lambda self: Counting(persistent=True)),
     "training turns calls (int64 ()) into (int64 (1,)), so no epoch could start from the same"),
    "sparse gradients": (
        broken(
            build_model=lambda self: nn.EmbeddingBag(4, 2, sparse=True),
            make_batch=lambda self, size, *_: {
                "x": torch.ones(size, 3, dtype=torch.long),
                "y": torch.ones(size, dtype=torch.long),
            },
        ),
        "a training step in fp32 fails: ",
    ),
    "keeps_fp32": (broken(keeps_fp32=raising), "a training in bf16 fails: ValueError: no luck"),
}  # fmt: skip


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_workload_is_told_how(way: str) -> None:
    workload, message = BROKEN[way]
    with pytest.raises(UsageError) as raised:
        look(workload)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("workload 'm:f': ")
    assert message in line


def beheaded() -> Workload:
    return broken(find_head=lambda self, model: nn.Linear(3, 2))


def test_a_head_is_a_layer_of_the_network() -> None:
    with pytest.raises(UsageError) as raised:
        examine(f"{__name__}:beheaded", "workload", freezes=["backbone"])
    assert "find_head returned Linear that is no layer of the network; it must" in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "factory", "message"),
    [
        ("workload", "network", "returned Linear; its factory returns a bench.workloads.Workload"),
        ("workload", "number", "returned int; its factory returns a bench.workloads.Workload"),
        ("workload", "wright", "module 'test_workload' has no function 'wright'; did you mean"),
        ("model", "Right", "returned a workload; give it as --workload"),
    ],
)
def test_a_workload_is_no_network(kind: str, factory: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        examine(f"{__name__}:{factory}", kind)
    assert message in str(raised.value)


def test_a_workload_is_identified_by_its_network_and_its_files() -> None:
    one, other = (examine(f"{__name__}:Right", "workload") for _ in range(2))
    assert one == other
    assert one.workload == look(Right())
    assert examine(TWO, "workload").parameters != one.parameters


# ------------------------------------------------------------------------------------- the axis


def test_a_workload_has_no_model_and_no_dataset_of_ours() -> None:
    """One case however many of these a preset has; it is named by its model."""
    cases = grid({"workload": [TRANSFORMER, IMAGES], "model": ["dpn92", "dpn26"]})
    own = [case for case in cases if case.workload != IMAGES]
    assert [(case.model, case.dataset) for case in own] == [(TRANSFORMER, OWN)]
    assert [case.model for case in cases if case.workload == IMAGES] == ["dpn92", "dpn26"]
    assert TRANSFORMER in own[0].label(list_varying(cases))
    assert "workload" not in list_varying(cases)
    with pytest.raises(UsageError, match="--dataset own is that of a --workload"):
        grid({"dataset": [OWN]})
    with pytest.raises(UsageError, match=r"give package\.module:factory of your own"):
        parse_value("workload", "transformer", "--workload")


# --------------------------------------------------------------------------------- the batches


def numbers(size: int, device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.rand(size, 2, generator=generator, device=device)


def made(micro_batch: int = 4, seed: int = 0) -> MadeBatches:
    return MadeBatches(numbers, 10, batch_size=4, micro_batch=micro_batch, device=CPU, seed=seed)


def draw(batches: MadeBatches, epoch: int = 0, **settings: Any) -> list[list[Tensor]]:
    return [list(batch.parts) for batch in batches.divide(epoch, **settings)]


def test_batches_are_made_by_seed_epoch_step_and_micro_batch() -> None:
    whole = draw(made())
    assert [[len(part) for part in parts] for parts in whole] == [[4], [4], [2]]
    assert [[len(p) for p in parts] for parts in draw(made(3))] == [[3, 1], [3, 1], [2]]
    assert [batch.size for batch in made(3).divide()] == [4, 4, 2]
    again = draw(made())
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole, again, strict=True))
    different = [whole[0][0], whole[1][0], draw(made(), 1)[0][0], draw(made(seed=1))[0][0]]
    assert len({tuple(t.flatten().tolist()) for t in different}) == 4
    first, second = draw(made(2))[0]
    assert not torch.equal(first, second)
    assert len(draw(made(), steps=1)) == 1
    assert [len(parts[0]) for parts in draw(made(), steps=1, size=2)] == [2]
    assert [len(batch) for batch in made().evaluation(3)] == [3, 3, 3, 1]


def test_a_batch_of_another_size_than_asked_for_is_refused() -> None:
    def at_most_three(size: int, device: torch.device, _: Any) -> Tensor:
        return torch.zeros(min(size, 3), 2, device=device)

    wrong = MadeBatches(at_most_three, 10, batch_size=4, micro_batch=4, device=CPU, seed=0)
    tested = MadeBatches(
        numbers, 10, batch_size=4, micro_batch=4, device=CPU, seed=0, make_in_order=at_most_three
    )
    first = tested.evaluation().__next__
    for use in (lambda: draw(wrong), lambda: list(wrong.evaluation()), first):
        with pytest.raises(UsageError, match="made a batch of 3 items where 4 were asked for"):
            use()


def test_items_are_counted_by_the_first_tensor() -> None:
    assert count_items({"text": "a", "x": (torch.zeros(3, 2), torch.zeros(1))}) == 3
    for nothing in ({}, "text", torch.zeros(())):
        with pytest.raises(ValueError, match="a batch holds tensors"):
            count_items(nothing)


# -------------------------------------------------------------------------------- the training


def run(workload: str, **settings: Any) -> Outcome:
    (case,) = grid({"workload": [workload], "device": ["cpu"], "batch_size": [16]})
    return run_case(replace(case, **settings))


def plain_transformer(steps: int) -> list[float]:
    """The same by hand: seeds, batches and AdamW, in fp32."""
    torch.manual_seed(0)
    workload = transformer.tiny()
    model = workload.build_model()
    optimizer = workload.build_optimizer(list(model.parameters()), 0.01)
    batches = workload.open_batches(batch_size=16, micro_batch=16, device=CPU, seed=0)
    losses = []
    for batch in batches.divide(0, steps=steps):
        optimizer.zero_grad()
        found = workload.compute_loss(model, next(batch.parts))
        found.loss.backward()
        optimizer.step()
        losses.append(float(found.loss.detach()))
    return losses


def test_a_transformer_is_measured_in_tokens() -> None:
    found = run(TRANSFORMER, evaluate=True)
    m = found.measurement
    assert [step.loss for step in found.steps] == plain_transformer(20)
    assert [step.images for step in found.steps] == [16 * 32] * 20
    assert m.measured_images == 320 * 32
    assert m.images_per_s == pytest.approx(320 * 32 / m.epoch_time_s)
    assert m.train_accuracy == sum(step.correct for step in found.steps) / (320 * 32)
    assert 0 < m.test_accuracy < 1
    assert m.test_loss == pytest.approx(m.train_loss, rel=0.02)
    assert m.proof_layer == "linear layer, 32 to 128 features"
    assert m.arithmetic == "float32"
    assert m.notes == "the workload's own optimizer is AdamW"
    # 12 w² of a block, twice, and the head; two FLOP each, three times with the backward pass; what
    # is left is attention
    products = 2 * 12 * 32**2 + 32 * 16
    assert m.flop_per_image == pytest.approx(6 * products, rel=0.25)
    assert m.flop_per_image > 6 * products


def test_the_next_token_can_be_learnt() -> None:
    """20 steps do not leave the loss of a guess among 16, log 16 = 2.77; 160 reach 2.40."""
    m = run(TRANSFORMER, evaluate=True, epochs=8).measurement
    assert m.test_loss < 2.6


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        *((TRANSFORMER, name) for name in ("bf16-amp", "bf16", "fp16", "fp16-amp")),
        *((TWO, name) for name in ("bf16-amp", "fp16")),
    ],
)
def test_every_precision_trains_it(precision: str, workload: str) -> None:
    kind = PRECISIONS[precision]
    found = run(workload, precision=precision, loss_scale=kind.default_loss_scale, accumulate=2)
    losses = [step.loss for step in found.steps]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert found.status is Status.OK
    assert found.measurement.arithmetic == kind.arithmetic


def test_a_network_of_images_of_ones_own_trains() -> None:
    found = run(RESNET, precision="bf16-amp")
    assert (found.status, found.measurement.arithmetic) == (Status.OK, "bfloat16")


def test_what_a_workload_keeps_in_fp32_stays_there() -> None:
    workload = transformer.tiny()
    ours = Training(workload.build_model(), PRECISIONS["bf16"], CPU, lr=0.01, workload=workload)
    kept = {
        type(m).__name__
        for m in ours.model.modules()
        for p in m.parameters(recurse=False)
        if p.dtype == torch.float32
    }
    assert kept == {"LayerNorm"}
    assert ours.model.head.weight is ours.model.tokens.weight
    batch = workload.make_batch(2, CPU, torch.Generator())
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    ours.model.norm.register_forward_hook(
        lambda module, args, out: seen.append((args[0].dtype, out.dtype))
    )
    ours.step(batch)
    assert seen == [(torch.float32, torch.bfloat16)]


def with_optimizer(build: Callable[[list[Tensor], float], torch.optim.Optimizer]) -> Training:
    workload = broken(build_optimizer=lambda self, parameters, lr: build(parameters, lr))
    torch.manual_seed(0)
    return Training(workload.build_model(), PRECISIONS["bf16"], CPU, lr=0.1, workload=workload)


def test_groups_of_a_workloads_optimizer_keep_their_ratio() -> None:
    ours = with_optimizer(
        lambda parameters, lr: torch.optim.SGD(
            [{"params": parameters[:1], "lr": lr / 4}, {"params": parameters[1:]}], lr
        )
    )
    assert [group["lr"] for group in ours.optimizer.param_groups] == [0.025, 0.1]
    ours.set_lr(0.4)
    assert [group["lr"] for group in ours.optimizer.param_groups] == [0.1, 0.4]
    ours.reset()
    assert [group["lr"] for group in ours.optimizer.param_groups] == [0.025, 0.1]


@pytest.mark.parametrize(
    "build",
    [torch.optim.NAdam, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, dampening=0.5)],
    ids=["NAdam", "SGD with dampening"],
)
def test_a_reset_of_a_workloads_optimizer_is_bitwise_a_fresh_start(
    build: Callable[[list[Tensor], float], torch.optim.Optimizer],
) -> None:
    """The state of these does not start at zero."""
    fresh, warmed = with_optimizer(build), with_optimizer(build)
    batches = [Right().make_batch(8, CPU, torch.Generator().manual_seed(s)) for s in range(3)]
    for batch in batches:
        warmed.step(batch)
    warmed.reset()
    for batch in batches:
        assert torch.equal(fresh.step(batch)[0], warmed.step(batch)[0])
        assert all(map(torch.equal, fresh.masters, warmed.masters))


class Heads(nn.Module):
    """Three heads, which it returns as ``made`` puts them together."""

    def __init__(self, made: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.made = nn.ModuleList(nn.Linear(3072, 10) for _ in range(3)), made

    def forward(self, x: Tensor) -> Any:
        return self.made([head(x.flatten(1)) for head in self.heads])


GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])
InceptionOutputs = namedtuple("InceptionOutputs", ["logits", "aux_logits"])


@dataclass
class Classified:
    """As transformers' outputs: what torch knows nothing of, and so casts no part of."""

    logits: Tensor
    hidden_states: Any = None


class Ordered(OrderedDict[str, Any]):
    """As transformers' outputs are in truth."""


MADE: dict[str, tuple[Callable[[list[Tensor]], Any], tuple[float, float, float]]] = {
    "googlenet": (lambda of: GoogLeNetOutputs(*of), (1, 0.3, 0.3)),
    "one of two": (lambda of: GoogLeNetOutputs(of[0], of[1], None), (1, 0.4, 0)),
    "inception": (lambda of: InceptionOutputs(*of[:2]), (1, 0.4, 0)),
    "a dataclass": (lambda of: Classified(of[0], of[1]), (1, 0, 0)),
    "a mapping": (lambda of: Ordered(loss=None, logits=of[0], hidden=of[1]), (1, 0, 0)),
    "a tuple": (tuple, (1, 0, 0)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MADE)
def test_a_default_loss_takes_the_logits_and_named_auxiliary_heads(
    name: str, precision: str
) -> None:
    made, weights = MADE[name]
    ours = Training(Heads(made), PRECISIONS[precision], CPU, lr=0.1)
    x, y = Workload().make_batch(8, CPU, torch.Generator().manual_seed(0))
    found = ours.compute_loss((x, y))
    x = x.bfloat16() if precision == "bf16" else x
    logits = [head(x.flatten(1)).float() for head in ours.model.heads]  # type: ignore[union-attr]
    right = sum(w * F.cross_entropy(one, y) for w, one in zip(weights, logits, strict=True))
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, right)
    assert found.correct is not None
    assert int(found.correct) == int((logits[0].argmax(1) == y).sum())
    before = [head.weight.clone() for head in ours.model.heads]  # type: ignore[union-attr]
    ours.step((x, y))
    moved = [
        not torch.equal(head.weight, old)
        for head, old in zip(ours.model.heads, before, strict=True)  # type: ignore[arg-type]
    ]
    assert moved == [bool(weight) for weight in weights]


def test_a_loss_is_kept_without_the_memory_that_it_was_computed_in() -> None:
    """torch's mse_loss returns a number in the memory of all elements' losses."""

    def compute_loss(self: Workload, network: Network, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(network(batch[0]), torch.zeros(len(batch[0]), 1))

    workload = broken(compute_loss=compute_loss, build_model=lambda self: nn.Linear(8, 1))
    ours = Training(workload.build_model(), PRECISIONS["fp32"], CPU, lr=0.1, workload=workload)
    loss, *_ = ours.step((torch.randn(16, 8), torch.zeros(16)))
    assert loss.untyped_storage().nbytes() == 4


def test_apex_does_not_train_with_a_workloads_optimizer() -> None:
    (case,) = grid({"precision": ["fp16-apex"]})
    workload = broken(build_optimizer=lambda self, parameters, lr: torch.optim.Adam(parameters, lr))
    with pytest.raises(UnsupportedError, match="the workload brings its own optimizer: choose"):
        make_training(case, workload.build_model(), CPU, workload)


def test_test_texts_of_the_example_do_not_depend_on_the_batch_size() -> None:
    workload = transformer.tiny()
    (alone,) = workload.make_test_batch(1, 1, CPU)
    first, second = workload.make_test_batch(0, 2, CPU)
    assert torch.equal(second, alone)
    assert not torch.equal(first, second)


def test_what_is_frozen_stays_and_nothing_is_said_to_be_right() -> None:
    found = run(TWO, evaluate=True)
    m = found.measurement
    assert [step.correct for step in found.steps] == [None] * 7
    assert m.train_loss is not None
    assert m.train_accuracy is None
    assert found.missing["train_accuracy"] == "the workload does not say what is predicted right"
    assert found.missing["test_loss"] == "the workload has no test data; leave out --evaluate"
    workload = load_workload(TWO)
    ours = Training(workload.build_model(), PRECISIONS["fp32"], CPU, lr=0.1, workload=workload)
    start = [p.clone() for p in ours.model.parameters()]
    ours.step(workload.make_batch(4, CPU, torch.Generator()))
    still = [
        name
        for (name, p), before in zip(ours.model.named_parameters(), start, strict=True)
        if torch.equal(p, before)
    ]
    assert still == [n for n, _ in ours.model.named_parameters() if n.startswith("backbone")]


# ------------------------------------------------------------------------------------ a sweep


def sweep_example(out: Path, workload: str, *arguments: str) -> list[dict[str, str]]:
    given = ["--workload", workload, "--device", "cpu", "--out", str(out)]
    assert sweep(join_flags(given, arguments)) == 0
    with (out / "records.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_usual_loss_tells_classes_apart_and_one_of_its_own_may_not(tmp_path: Path) -> None:
    for workload, classes in ((RESNET, "10"), (TRANSFORMER, "")):
        given = ["--precision", "fp32", "--batch-size", "8", "--steps", "2"]
        row, *_ = sweep_example(tmp_path / f"of{classes}", workload, *given)
        assert (row["status"], row["dataset_classes"]) == ("ok", classes)


@pytest.mark.slow
def test_a_transformer_is_swept_and_reported(tmp_path: Path, capsys: Capture) -> None:
    """Two precisions, each in a process of its own."""
    flags = ["--precision", "fp32", "bf16-amp", "--batch-size", "16"]
    rows = sweep_example(tmp_path / "out", TRANSFORMER, *flags)
    assert [(r["status"], r["precision"]) for r in rows] == [("ok", "fp32"), ("ok", "bf16-amp")]
    assert {(row["unit"], row["train_images"], row["model"], row["workload"]) for row in rows} == {
        ("tokens", str(320 * 32), TRANSFORMER, TRANSFORMER)
    }
    assert all(row["model_source"] and row["train_loss"] for row in rows)
    assert {row["optimizer"] for row in rows} == {OWN}
    capsys.readouterr()
    assert report([str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert "images/s" not in said
    assert report([str(tmp_path / "out"), "--format", "html", "-o", str(tmp_path / "x.html")]) == 0


def test_a_last_batch_of_one_item_is_trained_where_no_batchnorm_is(tmp_path: Path) -> None:
    """100 items are 11 times 9 and one."""
    (row,) = sweep_example(tmp_path / "out", TWO, "--precision", "fp32", "--batch-size", "9")
    assert (row["status"], row["optimizer"]) == ("ok", "sgd")


def test_a_batch_of_one_item_is_done_when_it_is_asked_for_again(tmp_path: Path) -> None:
    """That it steps its own optimizer is known before it is looked for among the records."""
    for _ in range(2):
        flags = ["--precision", "fp32", "--batch-size", "1"]
        rows = sweep_example(tmp_path / "out", TRANSFORMER, *flags)
        assert {(row["status"], row["optimizer"]) for row in rows} == {("ok", OWN)}
    assert len(rows) == 1, "once"


def test_a_workload_is_compiled(monkeypatch: Patch) -> None:
    compile_lightly(monkeypatch)
    found = run(f"{__name__}:Right", precision="bf16-amp", compile="default")
    plain = run(f"{__name__}:Right", precision="bf16-amp")
    assert found.status is Status.OK
    assert [s.loss for s in found.steps] == pytest.approx([s.loss for s in plain.steps], rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "no.such:f"], "--workload 'no.such:f': there is no module 'no'"),
        (["--workload", TWO, "--model", "dpn92"], "--workload brings its own model; leave out"),
        (["--workload", TWO, "--dataset", "cifar10"], "--workload brings its own dataset; leave"),
        (
            ["--workload", TWO, "--batch-size", "101"],
            "batch size 101 is above the dataset's 100 items",
        ),
        (
            ["--workload", TRANSFORMER, "--optimizer", "adamw"],
            f"--workload {TRANSFORMER} brings its own optimizer, AdamW; leave out --optimizer",
        ),
        (["--workload", RESNET, "--batch-size", "9"], "leaves a last batch of one item of"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_case(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert sweep(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_the_head_of_a_network_is_its_last_layer_with_weights() -> None:
    images, tokens = Images("dpn-small"), transformer.tiny()
    network = images.build_model()
    head = images.find_head(network)
    assert isinstance(head, nn.Linear)
    assert head.out_features == 10
    decoder = tokens.build_model()
    assert tokens.find_head(decoder) is decoder.head
    with pytest.raises(UsageError, match="no layer of the network has weights"):
        tokens.find_head(nn.ReLU())


def test_the_optimizers_of_the_page_step_schedule_and_continue(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Two kinds at once, at rates that fall, clipped; and a checkpoint holds the state of both."""
    page = (Path(__file__).parents[1] / "docs" / "own-model.md").read_text()
    for name in ("mywork", "mysteps"):
        (tmp_path / f"{name}.py").write_text(
            page.partition(f"<!-- {name} -->\n```python\n")[2].partition("```")[0]
        )
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    workload = load_workload("mysteps:Steps")
    assert Trial("mysteps:Steps", workload).run(workload.build_model()).optimizer == "Both"
    batches = [workload.make_batch(64, CPU, torch.Generator().manual_seed(n)) for n in range(6)]

    def begin() -> Training:
        torch.manual_seed(0)
        about: dict[str, Any] = {"lr": 0.1, "clip_grad": 0.5, "workload": workload}
        return Training(workload.build_model(), PRECISIONS["bf16"], CPU, **about)

    ours = begin()
    started = [master.clone() for master in ours.masters]
    for batch in batches[:3]:
        ours.step(batch)
    assert [group["lr"] for group in ours.optimizer.param_groups] == pytest.approx(
        [0.1 / 1.02, 0.01 / 1.02]
    )
    assert not any(map(torch.equal, ours.masters, started))
    torch.save(ours.state(), tmp_path / "state")
    again = begin()
    again.restore(torch.load(tmp_path / "state"))
    for batch in batches[3:]:
        assert torch.equal(ours.step(batch)[0], again.step(batch)[0])
    assert all(map(torch.equal, ours.masters, again.masters))
    rates = [[group["lr"] for group in one.optimizer.param_groups] for one in (ours, again)]
    assert rates[0] == rates[1]
