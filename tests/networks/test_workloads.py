"""What a user brings to be trained: ten ways to break the protocol, and three ways to keep it."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.base.errors import UsageError
from bench.networks.data.batches import MadeBatches
from bench.networks.workloads import (
    IMAGES,
    OWN,
    Loss,
    Network,
    Workload,
    WorkloadFacts,
    load_workload,
)
from bench.schema.case import AXES, Case, list_varying, parse_value
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.record import Environment, Outcome, Status
from bench.schema.rules import settle
from bench.sweep.__main__ import main as sweep
from bench.sweep.inputs import Inputs
from bench.training.counting import count_flop
from bench.training.loop import Training
from bench.training.trial import attempt, check_network, try_workload
from bench.workers.examination import Platform
from bench.workers.fingerprint import name_subject
from examples import transformer
from tests.pytest_for_tests import Capture
from tests.training_for_tests import CPU, examine, run_case

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
    calls: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__(3, 2)
        self.register_buffer("calls", torch.tensor(0), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls.reshape(1) + 1
        return super().forward(x)


def network() -> nn.Module:
    return nn.Linear(3, 2)


def look(workload: Workload) -> WorkloadFacts:
    what = "workload 'm:f'"
    model = check_network(what, attempt(f"{what}: build_model fails", workload.build_model))
    return try_workload(what, workload, (), model)


def broken(**parts: Any) -> Workload:
    return type("Broken", (Right,), parts)()  # type: ignore[no-any-return]


def with_loss(change: Callable[[Loss], Any]) -> Workload:
    def compute_loss(self: Right, network: Network, batch: Any) -> Any:
        found = Right.compute_loss(self, network, batch)
        return change(found)

    return broken(compute_loss=compute_loss)


def with_batch(change: Callable[[Any], Any]) -> Workload:
    def make_batch(self: Right, size: int, *place: Any) -> Any:
        return change(Right.make_batch(self, size, *place))

    return broken(make_batch=make_batch)


def with_more_each_time() -> Workload:
    more: list[Tensor] = []

    def add(batch: Any) -> Any:
        more.append(torch.zeros(2))
        return batch | {"more": more[1:]}

    return with_batch(add)


def raising(*_: object) -> None:
    raise ValueError("no\nluck")


def test_what_keeps_the_protocol_is_known() -> None:
    assert look(Right()) == WorkloadFacts(samples=40, units=40, test_units=0, unit="rows")
    assert look(transformer.tiny()) == WorkloadFacts(
        320, 320 * 32, 24 * 32, "tokens", optimizer="AdamW"
    )
    assert look(load_workload(RESNET)).classes == 10
    look(broken(build_model=lambda self: Counting(persistent=False)))
    look(with_batch(lambda batch: batch | {"missing": torch.full((2,), torch.nan)}))
    assert not examine(f"{__name__}:Right", "workload").batchnorm
    assert examine(f"{__name__}:normalised", "workload").batchnorm


class Fourier(nn.Linear):
    """Has an operation without a kernel for bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.fft.rfft(x, n=4).abs())


class Halves(nn.Linear):
    """Computes in bfloat16 alone, as flash attention does."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype != torch.bfloat16:
            raise TypeError("it needs bfloat16")
        return super().forward(x)


def fourier() -> Workload:
    return broken(build_model=lambda self: Fourier(3, 2))


def halves() -> Workload:
    return broken(build_model=lambda self: Halves(3, 2))


def halves_of_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), Halves(3072, 10))


@pytest.mark.parametrize(
    ("kind", "factory", "passes", "fails"),
    [
        ("workload", "fourier", ("fp32", "tf32", "fp16", "bf16-amp"), ("bf16", "bf16-pure")),
        ("workload", "halves", ("bf16", "bf16-pure"), ("fp32", "tf32", "bf16-amp")),
        ("model", "halves_of_images", ("bf16",), ("fp32", "bf16-amp")),
    ],
)
def test_only_the_precisions_that_are_asked_for_are_tried(
    kind: str, factory: str, passes: Sequence[str], fails: Sequence[str]
) -> None:
    name = f"{__name__}:{factory}"
    few, whole = (examine(name, kind, precisions=p) for p in (passes, [*fails, *passes]))
    assert (few.failing, [*whole.failing]) == ({}, [*fails])
    assert replace(whole, failing={}) == few, "it is the same network"
    with pytest.raises(UsageError, match=f" in {fails[0]}[: ]"):
        examine(name, kind, precisions=fails)
    case = {"workload": name} if kind == "workload" else {}
    asked = Case(name, precision=fails[0], device="cpu", **case)
    about = Environment(capability="9.0", gpu="a card")
    platforms = {"cpu": Platform(Environment()), "cuda": Platform(about)}
    inputs = Inputs(platforms, {name_subject(asked): whole}, {})
    assert fails[0] in inputs.refuse(asked)
    assert not inputs.refuse(replace(asked, precision=passes[0]))
    assert f"warning: {fails[0]} is not measured: " in inputs.warn_of_trial(asked)
    on_gpu = replace(asked, device="cuda")  # may have the kernels that a CPU lacks
    assert (inputs.refuse(on_gpu), "may fail" in inputs.warn_of_trial(on_gpu)) == ("", True)


BROKEN: dict[str, tuple[Workload, str]] = {
    "samples": (broken(samples=1), "samples is 1; it must be a whole number of at least 2"),
    "no network": (broken(build_model=lambda self: 3), "returned int, and not a torch.nn.Module"),
    "no build_model": (broken(build_model=Workload.build_model), "build_model fails: "
     "NotImplementedError: give it a method build_model that returns the network"),
    "no make_test_batch": (broken(test_samples=4), "make_test_batch fails: NotImplementedError: "
     "give it a method make_test_batch, or leave out test_samples"),
    "exception": (broken(make_batch=raising),
     "make_batch fails: ValueError: no luck (test_workloads.py, line "),
    "items": (broken(make_batch=lambda self, size, device, generator: torch.zeros(3, 3)),
     "make_batch made float32 (3, 3); it makes as many items as it is asked for, 2"),
    "own random numbers": (broken(make_batch=lambda self, size, *_: torch.randn(size, 3)),
     "made two different batches from one seed; draw random numbers only from the generator"),
    "one tensor more": (with_more_each_time(), "made two different batches from one seed"),
    "shape": (with_loss(lambda found: found.loss.expand(2)),
     "compute_loss returned float32 (2,); the loss must be a tensor, float32 of shape ()"),
    "another network": (
        broken(
            own=nn.Linear(3, 2),
            build_model=lambda self: self.own,
            compute_loss=lambda self, network, batch: self.own(batch["x"]).sum(),
        ),
        "compute_loss does not call the network that it is given; call it, and no other, since",
    ),
    "detached": (with_loss(lambda found: found.loss.detach()), "do not detach it"),
    "correct": (with_loss(lambda found: Loss(found.loss, torch.tensor(5))),
     "correct is tensor(5); it must be an integer tensor of shape (), from 0 to what count_units"),
    "other weights": (
        broken(build_optimizer=lambda *_: torch.optim.SGD([torch.zeros(2)])),
        "build_optimizer returned SGD; it returns None or a torch.optim.Optimizer of the param",
    ),
    "buffer": (broken(build_model=lambda self: Counting(persistent=True)),
     "training makes another tensor of calls, so no epoch could start from the same state again"),
}  # fmt: skip


@pytest.mark.parametrize("way", BROKEN)
def test_a_broken_workload_is_told_how(way: str) -> None:
    workload, message = BROKEN[way]
    with pytest.raises(UsageError) as raised:
        look(workload)
    (line,) = str(raised.value).splitlines()
    assert line.startswith("workload 'm:f'")
    assert message in line


@pytest.mark.parametrize(
    ("kind", "factory", "message"),
    [
        (
            "workload",
            "network",
            "returned Linear; its factory returns a bench.Workload",
        ),
        (
            "model",
            "normalised",
            f"model '{__name__}:normalised' returned a workload; give it as --workload",
        ),
        ("workload", "wright", "module 'test_workloads' has no function 'wright'; did you mean"),
    ],
)
def test_a_workload_is_no_network(kind: str, factory: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        examine(f"{__name__}:{factory}", kind)
    assert message in str(raised.value)


class Baked(Right):
    """Says how long its items are, and makes them of another length."""

    length = 3


class Ragged(Right):
    """Makes texts of 1 to 8 tokens, of which each would count as 8."""

    unit, length = "tokens", 8

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 2), nn.Linear(2, 9))

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        longest = int(torch.randint(1, self.length + 1, (), device=device, generator=generator))
        return torch.randint(9, (size, longest), device=device, generator=generator)

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        return F.cross_entropy(network(batch).flatten(0, 1), batch.flatten())


class Counted(Ragged):
    def count_units(self, size: int) -> int:
        return round(4.5 * size)


def test_texts_of_several_lengths_are_counted_by_their_workload() -> None:
    with pytest.raises(UsageError, match=r"makes items of several lengths.* count_units\(size\)"):
        examine(f"{__name__}:Ragged", "workload")
    facts = examine(f"{__name__}:Counted", "workload").workload
    assert facts is not None
    assert facts.units == 180


def test_a_length_is_that_of_the_batches() -> None:
    asked = {"workload": [TRANSFORMER], "device": ["cpu"], "length": [8, 32, 64]}
    facts = [examine(TRANSFORMER, "workload", length).workload for length in (8, None, 64)]
    assert [one and (one.samples, one.units) for one in facts] == [
        (10240 // length, 10240) for length in (8, 32, 64)
    ]
    names = [name_subject(case) for case in grid(asked)]
    assert names == [f"workload:{TRANSFORMER} {length}" for length in (8, 32, 64)]
    for name, message in (
        ("Right", "does not say how long its sequences are; give it an attribute length"),
        ("Baked", "makes batches of the same shapes with --length 5 as without"),
    ):
        with pytest.raises(UsageError, match=message):
            examine(f"{__name__}:{name}", "workload", 5)
    found = run(TRANSFORMER, length=8)
    assert found.steps[0].images == 16 * 8
    assert found.measurement.measured_images == 10240


def test_a_model_that_is_a_workload() -> None:
    (case, *others) = grid({"model": ["gpt-tiny", "dpn92"], "length": [None, 32], "lr": [None]})
    named = ("gpt-tiny", "gpt-tiny", "synthetic", "adamw", 64)
    assert named == (case.model, case.workload, case.dataset, case.optimizer, case.length)
    assert [(one.model, one.length) for one in others] == [("gpt-tiny", 32), ("dpn92", None)]
    assert settle({name: getattr(case, name) for name in AXES}) == case
    examined = examine("gpt-tiny", "workload", 32)
    assert examined.workload == WorkloadFacts(8192, 2**18, 2**14, "tokens")
    assert examined != examine("gpt-tiny", "workload", 64)


def test_attention_is_counted_by_the_square_of_the_length() -> None:
    def count_items(length: int) -> float:
        return length * count_flop(load_workload("gpt-tiny", length))

    # of two layers with 64 features: 4 length² in each pass, of which there are three
    attention, rest = 2 * 3 * 4 * 64, 6 * (2 * 12 * 64**2 + 64 * 64)
    for length in (16, 32, 1024):
        assert count_items(length) == length * rest + length**2 * attention


def test_synthetic_texts_can_be_learnt() -> None:
    """As far as which token follows which: in the limit 1.41 nats a token and 75 % right."""
    case = settle({"model": "gpt-tiny", "batch_size": 16, "lr": 0.003, "device": "cpu"})
    found = run_case(replace(case, steps=160, evaluate=True))
    losses = [step.loss for step in found.steps]
    assert losses[0] == pytest.approx(math.log(64), abs=0.05)
    assert found.measurement.test_loss < 3.5
    assert found.measurement.test_accuracy > 0.2

    texts = load_workload("gpt-tiny").make_batch(999, CPU, torch.Generator().manual_seed(0))
    follows = (texts[:, 1:] == (texts[:, :-1] + 7) % 64).float().mean()
    assert 0.75 < follows < 0.78
    assert (texts.min(), texts.max()) == (0, 63)


def test_a_workload_has_no_model_and_no_dataset_of_ours() -> None:
    """One case however many of these a preset has; it is named by its model."""
    cases = grid({"workload": [TRANSFORMER, IMAGES], "model": ["dpn92", "dpn26"]})
    own = [case for case in cases if case.workload != IMAGES]
    assert [(case.model, case.dataset) for case in own] == [(TRANSFORMER, OWN)]
    assert [case.model for case in cases if case.workload == IMAGES] == ["dpn92", "dpn26"]
    assert TRANSFORMER in own[0].label(list_varying(cases))
    assert "workload" not in list_varying(cases)
    with pytest.raises(UsageError, match="is that of a --workload"):
        grid({"dataset": [OWN]})
    with pytest.raises(UsageError, match=r"give package\.module:factory"):
        parse_value("workload", "transformer", "--workload")


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
        found: Any = workload.compute_loss(model, next(batch.parts))
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


@pytest.mark.parametrize(
    ("workload", "precision"),
    [(TRANSFORMER, "bf16"), (TRANSFORMER, "fp16-amp"), (TWO, "fp16")],
)
def test_every_precision_trains_it(precision: str, workload: str) -> None:
    kind = PRECISIONS[precision]
    found = run(workload, precision=precision, loss_scale=kind.default_loss_scale, accumulate=2)
    losses = [step.loss for step in found.steps]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert found.status is Status.OK
    assert found.measurement.arithmetic == kind.arithmetic


def test_groups_of_a_workloads_optimizer_keep_their_ratio_and_a_reset_starts_it_afresh() -> None:
    """The state of NAdam does not start at zero."""

    def build(self: Workload, parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.NAdam(
            [{"params": parameters[:1], "lr": lr / 4}, {"params": parameters[1:]}], lr
        )

    case = Case(precision="bf16", lr=0.1, device="cpu")

    def begin() -> Training:
        torch.manual_seed(0)
        workload = broken(build_optimizer=build)
        return Training(case, workload.build_model(), CPU, workload)

    fresh, warmed = begin(), begin()
    batches = [Right().make_batch(8, CPU, torch.Generator().manual_seed(s)) for s in range(3)]
    warmed.set_lr(0.4)
    assert [group["lr"] for group in warmed.optimizer.param_groups] == [0.1, 0.4]
    for batch in batches:
        warmed.step(batch)
    warmed.reset()
    assert [group["lr"] for group in warmed.optimizer.param_groups] == [0.025, 0.1]
    for batch in batches:
        assert torch.equal(fresh.step(batch)[0], warmed.step(batch)[0])
        assert all(map(torch.equal, fresh.masters, warmed.masters))


class Heads(nn.Linear):
    """Its logits, as ``made`` puts them together with others."""

    def __init__(self, made: Callable[[Tensor], Any]) -> None:
        super().__init__(3072, 10)
        self.made = made

    def forward(self, x: Tensor) -> Any:
        return self.made(super().forward(x.flatten(1)))


GoogLeNetOutputs = namedtuple("GoogLeNetOutputs", ["logits", "aux_logits2", "aux_logits1"])


@pytest.mark.parametrize("made", [lambda x: GoogLeNetOutputs(x, x, None), lambda x: [x, x.sum()]])
def test_a_default_loss_takes_the_logits(made: Callable[[Tensor], Any]) -> None:
    ours = Training(Case(precision="bf16"), Heads(made), CPU, Workload())
    x, y = Workload().make_batch(8, CPU, torch.Generator().manual_seed(0))
    found = ours.compute_loss((x, y))
    logits = nn.Linear.forward(ours.model, x.bfloat16().flatten(1)).float()  # type: ignore[arg-type]
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, y))
    assert found.correct is not None
    assert int(found.correct) == int((logits.argmax(1) == y).sum())


def test_a_workload_need_not_say_what_is_right_nor_have_test_data() -> None:
    found = run(TWO, evaluate=True)
    m = found.measurement
    assert [step.correct for step in found.steps] == [None] * 7
    assert m.train_loss is not None
    assert m.train_accuracy is None
    assert found.missing["train_accuracy"] == "the workload does not say what is predicted right"
    assert found.missing["test_loss"] == "the workload has no test data; leave out --evaluate"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "no.such:f"], "--workload 'no.such:f' cannot be imported from"),
        (["--workload", TWO, "--model", "dpn92"], "--workload brings its own model; leave out"),
        (
            ["--workload", TWO, "--batch-size", "101"],
            "batch size 101 is above the dataset's 100 items",
        ),
        (
            ["--workload", TRANSFORMER, "--optimizer", "adamw"],
            f"--workload {TRANSFORMER} brings its own optimizer, AdamW; leave out --optimizer",
        ),
        (["--workload", RESNET, "--batch-size", "9"], "leaves a last batch of one item, and"),
        (
            ["--workload", "loads_for_tests:Bare", "--batch-size", "20", "--loader", "torch"],
            "workload 'loads_for_tests:Bare': it has no dataset for",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_case(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    assert sweep(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()
