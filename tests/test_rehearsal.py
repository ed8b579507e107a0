"""The rehearsal: today's step passes, and what a card would suffer from is refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import bench.training.loop
from bench.models import MODELS
from bench.precision import POLICIES, PRECISIONS
from bench.rehearsal import __main__ as rehearsal
from bench.rehearsal.__main__ import main, show
from bench.rehearsal.dispatch import (
    BLOCKS,
    CHUNK,
    MAX_TENSORS,
    Breach,
    Rule,
    Watch,
    count_multi_tensor,
)
from bench.rehearsal.step import BUDGETS, Policy, Rehearsal, policies, rehearse, skip
from bench.training.loop import Training

CPU = torch.device("cpu")
OURS = [name for name, precision in PRECISIONS.items() if not skip(precision)]


def only(rows: list[Rehearsal]) -> Breach:
    """The one breach of the one row."""
    (row,) = rows
    (breach,) = row.breaches
    return breach


# ------------------------------------------------------------------------------- today's step


def test_every_precision_and_policy_passes() -> None:
    rows = rehearse(compile=[False])
    assert [(row.precision, row.policy) for row in rows] == [
        (name, policy) for name in OURS for policy in policies(PRECISIONS[name])
    ]
    assert len({row.policy for row in rows}) == 3 + len(POLICIES)
    for row in rows:
        assert row.breaches == ()
        # a budget with more room than this would let a loop over a few weights through
        assert row.budget - 10 < row.launches <= row.budget


@pytest.mark.slow
def test_what_is_compiled_passes() -> None:
    """Of fp32 and fp16 test_readme.py sees it; tf32 and bf16-amp are compiled as these four are."""
    plain, compiled = BUDGETS["dpn-small", False], BUDGETS["dpn-small", True]
    assert len({compiled[name] - plain[name] for name in OURS}) == 1
    for row in rehearse(precisions=["fp16-amp", "bf16"], compile=[True]):
        assert row.breaches == ()
        assert row.budget - 10 < row.launches <= row.budget


def test_a_budget_is_stated_for_every_precision() -> None:
    assert {model for model, _ in BUDGETS} == set(MODELS)
    assert all(set(budget) == set(OURS) for budget in BUDGETS.values())


# --------------------------------------------------------------------------- yesterday's update


@torch.no_grad()
def mixed_update(self: Training) -> Tensor:
    """`Training.update` as it was, with a master for every weight, in one list of all."""
    pairs = [
        (m, p) for m, p in zip(self.masters, self.parameters, strict=True) if p.grad is not None
    ]
    for master, _ in pairs:
        if master.grad is None:
            master.grad = torch.empty_like(master)
    torch._foreach_copy_([m.grad for m, _ in pairs], [p.grad for _, p in pairs])
    self.model.zero_grad(set_to_none=True)
    overflowed = self.loss_scale.step(self.optimizer, self.masters)
    torch._foreach_copy_([p for _, p in pairs], [m for m, _ in pairs])
    return overflowed


class EveryMaster(Training):
    """A copy in fp32 of every weight, as it was."""

    def __init__(self, *args: object, **settings: object) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        if self.precision.masters:
            self.masters = [m.detach().clone().requires_grad_() for m in self.masters]
            self.optimizer = torch.optim.SGD(self.masters, 0.01, 0.9, fused=True)
            self.update = mixed_update.__get__(self)  # type: ignore[method-assign]


def test_lists_of_mixed_dtype_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.training.loop, "Training", EveryMaster)
    (row,) = rehearse(precisions=["bf16"], compile=[False])
    mixed = [breach for breach in row.breaches if breach.rule is Rule.MIXED]
    assert [breach.op for breach in mixed] == ["aten::_foreach_copy_"] * 2
    for breach in mixed:
        assert breach.detail == "53 tensors of bfloat16 and float32"
        assert breach.place.startswith("tests/test_rehearsal.py:")
        assert breach.place.endswith(" in mixed_update")
    # one kernel a tensor, for gradients and weights
    assert Rule.LAUNCHES in {breach.rule for breach in row.breaches}
    assert row.launches > 2 * 53


# ------------------------------------------------------------------------------ planted faults


READS = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "bool": lambda t: bool(t[0] > 0),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: torch.equal(t, t),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
}
COPIES = {
    "to": lambda t: torch.zeros(10).to(CPU),
    "to-keyword": lambda t: torch.zeros(10).to(device=CPU),
    "to-other": lambda t: torch.zeros(10).to(t),
    "copy_": lambda t: t.copy_(torch.ones(10)),
    "add": lambda t: t + torch.ones(10).mul(2),
    "index": lambda t: t[torch.arange(3)],
    "tensor": lambda t: torch.tensor([1.0, 2.0], device=CPU),
    "foreach": lambda t: torch._foreach_copy_([t], [torch.ones(10)]),
    "cpu": lambda t: t.cpu(),
    "to-cpu": lambda t: t.to("cpu"),
}


@pytest.mark.parametrize(
    ("rule", "name"),
    [*((Rule.READ, name) for name in READS), *((Rule.COPY, name) for name in COPIES)],
)
def test_what_waits_for_the_device_is_refused(rule: Rule, name: str) -> None:
    with Watch() as watch:
        x = torch.ones(10, device=CPU)
        watch.judge()
        {**READS, **COPIES}[name](x)
    (breach,) = watch.breaches
    assert breach.rule is rule
    assert breach.place.startswith("tests/test_rehearsal.py:")


def test_a_value_read_back_within_the_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training.update

    def update(self: Training) -> Tensor:
        self.masters[0].detach().flatten()[0].item()
        return made(self)

    monkeypatch.setattr(Training, "update", update)
    breach = only(rehearse(precisions=["bf16"], compile=[False]))
    assert breach.rule is Rule.READ
    assert breach.place.startswith("tests/test_rehearsal.py:")
    assert breach.place.endswith(" in update")


def test_a_start_reloaded_within_the_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the training itself keeps in host memory is known to be there."""
    made = Training.update

    def update(self: Training) -> Tensor:
        overflowed = made(self)
        self.model.load_state_dict(self._start)
        return overflowed

    monkeypatch.setattr(Training, "update", update)
    (row,) = rehearse(precisions=["fp32"], compile=[False])
    assert row.breaches[0].rule is Rule.COPY
    assert row.breaches[0].op == "aten::copy_"


def test_a_loop_over_the_weights_is_over_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training.update

    def update(self: Training) -> Tensor:
        for parameter in self.parameters:
            parameter.grad.mul_(1)  # type: ignore[union-attr]
        return made(self)

    monkeypatch.setattr(Training, "update", update)
    breach = only(rehearse(precisions=["fp32"], compile=[False]))
    assert breach.rule is Rule.LAUNCHES
    assert breach.op == "aten::mul_"
    assert breach.place.endswith(" in update")
    assert "232 where" in breach.detail


def test_faults_around_compiled_code_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Training.update

    def update(self: Training) -> Tensor:
        overflowed = made(self)
        bool(overflowed)
        return overflowed

    monkeypatch.setattr(Training, "update", update)
    (row,) = rehearse("models_for_tests:good", precisions=["bf16"], compile=[True])
    assert [breach.rule for breach in row.breaches] == [Rule.READ]


def test_what_costs_nothing_is_let_through() -> None:
    """A host scalar is a kernel's argument; work on host tensors is no business of the device."""
    with Watch() as watch:
        x = torch.ones(4, 4, device=CPU)
        watch.judge()
        x.view(16).t().detach()
        assert watch.launches == 0
        x * torch.tensor(2.0)
        x.to(CPU, torch.float16)
        torch.zeros(3, device=CPU)
        x[0, 1:3] = 0
        x[torch.zeros(2, dtype=torch.long, device=CPU)]
        host = torch.arange(5)
        assert host.sum().item() == 10
        assert host.tolist() == [*range(5)]
        (host + 1).to("cpu").numpy()
    assert watch.breaches == []
    assert watch.launches == 6


# ------------------------------------------------------------------------------------- launches


def test_multi_tensor_launches_of_known_lists() -> None:
    assert count_multi_tensor([], 1) == 0
    assert count_multi_tensor([0, 0], 1) == 0
    assert count_multi_tensor([1], 1) == 1
    assert count_multi_tensor([1] * 110, 1) == 1
    assert count_multi_tensor([1] * 111, 1) == 2
    assert count_multi_tensor([1] * 65, 2) == 2
    assert count_multi_tensor([CHUNK * BLOCKS], 1) == 1
    assert count_multi_tensor([CHUNK * BLOCKS + 1], 1) == 2


@settings(deadline=None)
@given(st.lists(st.integers(0, 40 * CHUNK), max_size=300), st.integers(1, 5))
def test_multi_tensor_launches_hold_what_they_can(sizes: list[int], lists: int) -> None:
    launches = count_multi_tensor(sizes, lists)
    blocks = sum(-(-size // CHUNK) for size in sizes)
    tensors = sum(map(bool, sizes))
    least = max(-(-blocks // BLOCKS), -(-tensors // MAX_TENSORS[lists - 1]))
    # a launch ends when it is full of blocks or of tensors; a split tensor counts in both of its
    most = blocks // BLOCKS + (tensors + launches) // MAX_TENSORS[lists - 1] + 1
    assert least <= launches <= most


# ------------------------------------------------------------------------------------ the command


def test_the_command_prints_a_table_and_fails_on_a_breach(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "bench/training/loop.py:1 in update"
    breach = Breach(Rule.READ, "aten::_local_scalar_dense", place)
    of = [Rehearsal("fp16", p, True, 5, 6, ()) for p in policies(PRECISIONS["fp16"])]
    wrong = Rehearsal("fp32", Policy(), False, 5, None, (breach,))
    assert show(of) == 0
    head, *rows, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["precision", "loss", "scale", "compiled", "launches", "budget"]
    assert [row[11:28].strip() for row in rows] == ["128", "128, skipping", *POLICIES]
    assert all(row.split()[-4:] == ["traced", "5", "6", "ok"] for row in rows)
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: [wrong])
    assert main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"refused: {Rule.READ}: aten::_local_scalar_dense at {place}, under fp32 (none)"


def test_what_cannot_be_rehearsed_is_skipped_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--precision", "fp16-apex", "fp8", "--compile", "off"]) == 0
    first, second, _head, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("skipped: fp16-apex: apex needs an NVIDIA GPU")
    assert second.startswith("skipped: fp8: its kernels are torchao's")
    assert rows == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "dpn93"], "did you mean 'dpn92'?"),
        (["--model", "no_such_module:net"], "there is no module 'no_such_module'"),
        (["--precision", "fp61"], "did you mean 'fp16'?"),
        (["--batch-size", "1"], "at least 2"),
        (["--compile", "both"], "--compile 'both': right values: off, default, reduce-overhead"),
    ],
)
def test_bad_input(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_budget_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "models_for_tests:good", "--precision", "fp32", "--compile", "off"]
    assert main(flags) == 0
    assert "no budget is stated" in capsys.readouterr().out
