"""`python -m bench.rehearsal`: check a training step on the CPU for what a GPU does badly.

The step runs on the CPU, and every op of it is looked at (see `bench.rehearsal.dispatch`). Refused
are:

- a multi-tensor call (``torch._foreach_*``, a fused optimizer) over a list of mixed dtype: wrong on
  CUDA in torch 2.9 and 2.10, and one kernel per tensor in later versions;
- a value read back to the host (``.item()``, ``bool(tensor)``, ``nonzero``): the step waits for it;
- a copy between host and device within the step;
- more kernel launches than the budget in `BUDGETS`.

Launches are counted by an approximation that `bench.rehearsal.dispatch.count_launches` states; they
are for comparing commits, precisions and policies with each other, not with a profiler.

A compiled row runs the graphs that ``torch.compile`` traced of the network op by op, before
inductor fuses them. The rules hold for these ops, and for the loss and the update, which are not
compiled. The launches of a compiled row are therefore an upper bound of what a GPU would see.

The return code is 1 where a rule is broken; the rule, the op and its place in the source are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.case import Case, axis_flag, format_value, parse_value
from bench.errors import UsageError
from bench.flags import Parser, command
from bench.models import check_model
from bench.precision import POLICIES, PRECISIONS, Precision
from bench.processes import leave

if TYPE_CHECKING:
    from bench.rehearsal.dispatch import Breach

_BUDGETED = ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp")

BUDGETS: dict[tuple[str, bool], dict[str, int]] = {
    subject: dict(zip(_BUDGETED, launches, strict=True))
    for subject, launches in {
        ("dpn-small", False): (183, 183, 201, 237, 188, 224),
        ("dpn-small", True): (230, 230, 248, 284, 235, 271),
        ("dpn26", False): (317, 317, 335, 395, 322, 382),
        ("dpn92", False): (1051, 1051, 1077, 1265, 1060, 1248),
    }.items()
}
"""Launches a step may take, by model and whether it is compiled, then by precision.

The most any loss scaling takes, and four to ten more: torch 2.9 and 2.13 count the same. A change
that needs more raises them here, and says what it gains.
"""


def skip(precision: Precision) -> str:
    """Say why a precision has no budget and is not rehearsed; empty where it is."""
    if precision.apex:
        return "apex needs an NVIDIA GPU, and its steps wait for the GPU"
    if precision.float8:
        return "its kernels are torchao's, and on a CPU they are emulated by others"
    return ""


@dataclass(frozen=True)
class Policy:
    """What is done about fp16's narrow range: a loss scale, and whether overflows are skipped."""

    loss_scale: float | str | None = None
    skip_overflow: bool = False

    def __str__(self) -> str:
        scale = format_value(self.loss_scale) or "none"
        return f"{scale}, skipping" if self.skip_overflow else scale


def policies(precision: Precision) -> list[Policy]:
    if not precision.scales_loss:
        return [Policy()]
    return [Policy(128.0), Policy(128.0, skip_overflow=True), *map(Policy, POLICIES)]


@dataclass(frozen=True)
class Rehearsal:
    """One step: the kernels it would launch, those it may, and the rules it broke. ``budget`` is
    None for a model that has none: its launches are counted and not judged."""

    precision: str
    policy: Policy
    compile: bool
    launches: int
    budget: int | None
    breaches: tuple[Breach, ...]


def rehearse(
    model: str = "dpn-small",
    precisions: Iterable[str] = tuple(PRECISIONS),
    compile: Iterable[bool] = (False, True),
    batch_size: int = 2,
) -> list[Rehearsal]:
    """Run a step of every precision and policy on the CPU, and say what a GPU would make of it.

    Args:
        precisions: names of `PRECISIONS`; those that `skip` speaks of are left out.
        compile: whether the network is traced by ``torch.compile`` (see above).
        batch_size: images a step; launches do not depend on it.

    Raises UsageError: there is no such model.
    """
    known = [PRECISIONS[name] for name in precisions if not skip(PRECISIONS[name])]
    return [
        row
        for compiled in compile
        for precision in known
        for row in _rehearse(model, precision, compiled, batch_size)
    ]


def _rehearse(
    model: str, precision: Precision, compiled: bool, batch_size: int
) -> Iterable[Rehearsal]:
    import torch

    from bench.rehearsal.dispatch import Breach, Rule, Watch
    from bench.training.loop import Training
    from bench.training.loss_scale import build_loss_scale
    from bench.workloads.images import Images

    device, workload = torch.device("cpu"), Images(model)
    watch = Watch()
    with watch:  # from the start, to follow what is made in host memory and what is moved
        training = Training(workload.build_model(), precision, device, lr=0.01, workload=workload)
        batch = workload.make_batch(batch_size, device, torch.Generator())
    if compiled:
        torch._dynamo.reset()
        traced = torch.compile(training.model, backend="aot_eager", dynamic=False)
        training.forward = watch.without_calls(traced)
    training.step(batch)  # a first step compiles, and makes the masters' gradients
    budget = BUDGETS.get((model, compiled), {}).get(precision.name)
    for policy in policies(precision):
        training.loss_scale = build_loss_scale(policy.loss_scale, device, policy.skip_overflow)
        watch.judge()
        with watch:
            training.step(batch)
        launches, breaches = watch.launches, list(watch.breaches)
        if budget is not None and launches > budget:
            excess = f"{launches} where {budget} are allowed"
            breaches.append(Breach(Rule.LAUNCHES, *watch.busiest(), excess))
        yield Rehearsal(precision.name, policy, compiled, launches, budget, tuple(breaches))


_SUMMARY = (
    "Run one training step of every precision and loss scaling on the CPU, count the kernels that "
    "a GPU would launch, and refuse what a GPU does badly: mixed dtypes in a multi-tensor call, "
    "values read back, copies between host and device, more launches than the budget. "
    "The return code is 1 where something is refused."
)


@command
def main(argv: Sequence[str]) -> int:
    """Rehearse and print; returns 0, 1 where something was refused, 2 for a usage error."""
    parser = Parser(prog="python -m bench.rehearsal", description=_SUMMARY)
    add = parser.add_argument
    add("--model", default="dpn-small", metavar="NAME", help="network (dpn-small)")
    names, switches = list(PRECISIONS), ["off", "on"]
    add("--precision", nargs="+", default=names, metavar="NAME", help="number formats (all)")
    add("--batch-size", default="2", metavar="N", help="images a step (2)")
    add("--compile", nargs="+", default=switches, metavar="VALUE", help="off, on (both)")
    given = parser.parse(argv)

    def read(name: str, *texts: str) -> list[Any]:
        return [parse_value(name, text, axis_flag(name)) for text in texts]

    (model,), (batch_size,) = read("model", given.model), read("batch_size", given.batch_size)
    check_model(model)
    if batch_size < 2:
        raise UsageError(f"--batch-size {batch_size}: give at least 2")
    names = read("precision", *given.precision)
    compiled = [value != Case.compile for value in read("compile", *given.compile)]
    rows = rehearse(model, names, compiled, batch_size)
    for name in names:
        if reason := skip(PRECISIONS[name]):
            print(f"skipped: {name}: {reason}")
    return show(rows)


def show(rows: Sequence[Rehearsal]) -> int:
    """Print the table and what was refused; 1 where something was, else 0."""
    line = "{:<10} {:<17} {:<9} {:>9} {:>7}  {}"
    print(line.format("precision", "loss scale", "compiled", "launches", "budget", "").rstrip())
    for row in rows:
        compiled, policy = "traced" if row.compile else "no", str(row.policy)
        budget = "-" if row.budget is None else row.budget
        refused = f"refused: {len(row.breaches)}" if row.breaches else "ok"
        print(line.format(row.precision, policy, compiled, row.launches, budget, refused))
    if any(row.compile for row in rows):
        print("traced: the ops torch.compile traced, before they are fused: an upper bound")
    if any(row.budget is None for row in rows):
        print("-: no budget is stated, so launches are counted but not judged")
    where: dict[Breach, list[str]] = {}
    for row in rows:
        for breach in row.breaches:
            which = f"{row.precision} ({row.policy}{', compiled' if row.compile else ''})"
            where.setdefault(breach, []).append(which)
    for breach, under in where.items():
        print(f"refused: {breach}, under {'; '.join(under)}")
    return 1 if where else 0


if __name__ == "__main__":
    leave(main())
