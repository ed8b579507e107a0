"""`python -m bench.rehearsal`: check a training step on the CPU for what a GPU does badly.

The step runs on the CPU, and every op of it is looked at (see `bench.rehearsal.dispatch`). Refused
are:

- a multi-tensor call (``torch._foreach_*``, a fused optimizer) over a list of mixed dtype: wrong on
  CUDA in torch 2.9 and 2.10, and one kernel per tensor in later versions;
- a value read back to the host (``.item()``, ``bool(tensor)``, ``nonzero``): the step waits for it;
- a copy between host and device within the step;
- more kernel launches than the budget in `bench.rehearsal.step.BUDGETS`.

Launches are counted by an approximation that `bench.rehearsal.dispatch.count_launches` states; they
are for comparing commits, precisions and policies with each other, not with a profiler.

A compiled row runs the graphs that ``torch.compile`` traced of the network op by op, before
inductor fuses them. The rules hold for these ops, and for the loss and the update, which are not
compiled. The launches of a compiled row are therefore an upper bound of what a GPU would see.

The return code is 1 where a rule is broken; the rule, the op and its place in the source are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.case import Case, axis_flag, parse_value
from bench.errors import UsageError
from bench.flags import Parser, command
from bench.models import check_model
from bench.precision import PRECISIONS
from bench.processes import leave
from bench.rehearsal.step import Rehearsal, rehearse, skip

if TYPE_CHECKING:
    from bench.rehearsal.dispatch import Breach

_SUMMARY = (
    "Run one training step of every precision and loss scaling on the CPU, count the kernels that "
    "a GPU would launch, and refuse what a GPU does badly: mixed dtypes in a multi-tensor call, "
    "values read back, copies between host and device, more launches than the budget. "
    "The return code is 1 where something is refused."
)


@command
def main(argv: Sequence[str]) -> int:
    """Rehearse and print; return 0, 1 if something was refused, or 2 for a usage error."""
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
    """Print the table and what was refused; return 1 if anything was, else 0."""
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
