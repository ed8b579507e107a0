"""The work of a training step of a model in each precision, counted in a process of its own.

`python -m bench.doctor.counts cuda dpn92 512 fp32 bf16` trains on a few images and prints a line
of JSON for each precision: the fields of `Counted`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.case import Case
from bench.diagnosis.step import Rates, Step
from bench.errors import UsageError
from bench.grid import grid
from bench.plain import read_value
from bench.precision import PRECISIONS
from bench.processes import leave, run_module
from bench.record import WorkRow
from bench.text import first_line


@dataclass(frozen=True)
class Counted:
    model: str
    precision: str
    batch_size: int
    device: str
    work: tuple[WorkRow, ...] = ()
    error: str = ""

    def make_step(self, rates: Rates) -> Step:
        """Return the step for a diagnosis, on a machine of these rates; its time is not known."""
        return Step(0.0, self.work, rates, self.device, PRECISIONS[self.precision].float32)


def count_model(
    model: str, batch_size: int, device: str, precisions: Sequence[str], timeout_s: float = 120.0
) -> list[Counted]:
    """Count the work of a step in each of ``precisions``, on a few images of CIFAR-10's shape. The
    device ("cuda" or "cpu") must support them, and `bench.fingerprint.examine` must have found no
    fault with the model. ``timeout_s`` limits the time of all of them together."""
    asked = (device, model, str(batch_size), *precisions)
    said, why = run_module("bench.doctor.counts", *asked, timeout_s=timeout_s)
    if why is None:
        why = f"not counted within {timeout_s:g} s"
    whole = said[: said.rfind("\n") + 1].splitlines()  # if it was ended, a line may be incomplete
    counted: list[Counted] = [read_value(Counted, json.loads(line)) for line in whole]
    found = {one.precision: one for one in counted}
    return [
        found.get(name) or Counted(model, name, batch_size, device, error=why)
        for name in precisions
    ]


def count_cases(cases: Sequence[Case]) -> Iterator[Counted]:
    for case in cases:
        work, error = [], ""
        try:
            work = _count(case)
        except Exception as raised:  # a user's model may raise anything
            error = str(raised) if isinstance(raised, UsageError) else first_line(raised)
        about = (case.model, case.precision, case.batch_size, case.device)
        yield Counted(*about, tuple(work), error)


def _count(case: Case) -> list[WorkRow]:
    import torch

    from bench.data.batches import MadeBatches
    from bench.training.building import build_training
    from bench.training.counting import count_step, join_work
    from bench.workloads.images import Images

    device, workload = torch.device(case.device), Images(case.model)
    training = build_training(case, workload, device)
    batches = MadeBatches(
        workload.make_batch,
        case.batch_size,
        batch_size=case.batch_size,
        micro_batch=case.batch_size,
        device=device,
        seed=case.seed,
    )
    return join_work(count_step(training, batches, case), {})


def _main(arguments: Sequence[str]) -> None:
    device, model, batch_size, *precisions = arguments
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a user's model may print
    axes = {"model": [model], "precision": precisions, "device": [device]}
    for counted in count_cases(grid({**axes, "batch_size": [int(batch_size)]})):
        print(json.dumps(asdict(counted)), file=answers, flush=True)


if __name__ == "__main__":
    _main(sys.argv[1:])
    leave(0)
