"""The list of checks: what each one shows, and what to do if it fails; and their answers as lines.

Importing this module is cheap; torch is imported by `bench.check.probes`.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.base.processes import name_signal
from bench.base.progress import Progress
from bench.base.text import clean, name_first
from bench.networks.workloads import IMAGES
from bench.schema.case import Case, list_varying
from bench.workers.server import EndedError, Process

NOT_RUN = "not run"


@dataclass(frozen=True)
class Finding:
    """The result of a check, which passes if ``low <= value <= high``, so NaN never passes.
    ``unit`` describes the value, and ``named`` lists the layers or samples at fault."""

    value: float
    unit: str
    low: float = -math.inf
    high: float = math.inf
    named: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Check:
    """A check: ``shows`` is what holds if it passes; ``fix`` says what a failure means."""

    name: str
    shows: str
    fix: str


class InapplicableError(Exception):
    """Raised if a check does not apply to the training; the message has at most 55 characters."""


class OutOfTimeError(Exception):
    """Raised in a check if the time of all checks is over."""


@dataclass(frozen=True)
class CheckResult:
    """What a check found, ``pass``, ``FAIL``, ``skipped`` or ``not run``; without a finding ``why``
    says why it does not apply or could not run."""

    check: Check
    result: str
    finding: Finding | None = None
    why: str = ""


# the most telling first, but those of 60 to 240 steps, first-steps and baseline, last
CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            "initial-loss",
            "before training, the loss is that of guessing, ln(classes)",
            "A loss many times larger is summed instead of averaged, or the last layer starts too "
            "large. A smaller one means that the labels leak in, or that the weights are trained "
            "already: for those, add --skip initial-loss first-steps.",
        ),
        Check(
            "gradients",
            "all weights to be trained receive gradients",
            "These layers are never used, detached from the loss, or behind something dead. Set "
            "requires_grad to False for weights that are frozen on purpose.",
        ),
        Check(
            "own-pixels",
            "the output for a sample depends on it, and on no other (evaluation mode)",
            "If it depends on others, the network mixes the samples of a batch: look for a view or "
            "reshape where permute or flatten(1) is meant, or a mean over dimension 0. If it does "
            "not depend on its own, the input is lost on its way: look for an argument that is not "
            "used, weights that are zero, or values that a ReLU or a clamp makes constant.",
        ),
        Check(
            "averaging",
            "the step does not depend on how many images a batch has",
            "A figure of 2 is that of a loss summed over the batch: average it, or every batch "
            "size needs a learning rate of its own. Below 0.6 it is divided twice.",
        ),
        Check(
            "overfit",
            "the network can memorise one batch of 32",
            "Something keeps it from learning at all: a learning rate that is too large or too "
            "small (--lr), gradients that do not arrive, a network that is too small.",
        ),
        Check(
            "seed",
            "the same seed gives the same steps",
            "Something draws random numbers that --seed does not reach: numpy's, or a generator "
            "of the model's own. Seed it in the model's factory.",
        ),
        Check(
            "memory",
            "nothing is retained from step to step",
            "Something keeps tensors of every step: a list of outputs, or a graph that backward "
            "did not free (retain_graph).",
        ),
        Check(
            "first-steps",
            "the loss falls over the first steps",
            "A rising or infinite loss needs a smaller --lr; one that stands still a larger --lr "
            "or more --steps. If overfit passes, look at the labels.",
        ),
        Check(
            "baseline",
            "it learns from the images, not only from the frequency of labels",
            "With every image blank it learns as well: the labels do not belong to the images, or "
            "the images do not reach the network. A network that only starts slowly needs more "
            "--steps. Where the data are random there is nothing to learn: add --skip first-steps "
            "baseline.",
        ),
    )
}


def run_checks(process: Process, names: Sequence[str]) -> bool:
    """Receive the answer of each of these checks, and return whether none failed; False too if
    there was time for none. Print a line as each check ends, then an explanation of each failure,
    how many passed, and what was not run."""
    start, answers = time.perf_counter(), list[CheckResult]()
    with Progress(len(names), "check") as progress:
        for name in names:
            progress.begin(name)
            answers.append(_receive(process, CHECKS[name]))
            progress.end()
            print(describe(answers[-1]), flush=True)
    failed = [found for found in answers if found.result == "FAIL"]
    for found in failed:
        print(explain(found))
    ran = sum(found.result not in ("skipped", NOT_RUN) for found in answers)
    took = f"in {time.perf_counter() - start:.0f} s"
    print(f"{ran - len(failed)} of {ran} checks passed, {took}")
    if late := [found.check.name for found in answers if found.result == NOT_RUN]:
        print(f"not run: {', '.join(late)}; --budget 10m runs all")
    print(flush=True)
    return not failed and (ran > 0 or not late)


def _receive(process: Process, check: Check) -> CheckResult:
    try:
        found: CheckResult = process.receive()
    except EndedError as error:
        code = process.wait() or 0
        end = name_signal(-code) if code < 0 else f"return code {code}"
        return CheckResult(
            check, "FAIL", why=f"the process of the checks ended with {end}: {error}"
        )
    return found


def head(case: Case, cases: Iterable[Case]) -> str:
    """Describe a case, and add the header of the table of its checks."""
    names = [n for n in list_varying(cases) if n not in ("model", "dataset", "device")]
    what = f"{case.model} on {case.dataset}" if case.workload == IMAGES else case.model
    title = f"{what}, {case.label(names)}, on {case.device}"
    return f"{title}\n{_row('check', '', 'figure', 'passes')}"


def _row(name: str, result: str, figure: str, bounds: str) -> str:
    return clean(f"{name:<13} {result:<7} {figure:<38} {bounds}")


def describe(found: CheckResult) -> str:
    """Return the line of a check, with the range in which it passes.

    >>> described = describe(CheckResult(CHECKS["seed"], "pass", Finding(0.5, "apart", high=1)))
    >>> described.split()
    ['seed', 'pass', '0.5', 'apart', 'at', 'most', '1']
    """
    if found.finding is None:
        figure = "could not be run" if found.result == "FAIL" else found.why
        return _row(found.check.name, found.result, figure, "")
    finding = found.finding
    bounds = f"{finding.low:.4g} to {finding.high:.4g}"
    if math.isinf(finding.low):
        bounds = f"at most {finding.high:.4g}"
    elif math.isinf(finding.high):
        bounds = f"at least {finding.low:.4g}"
    return _row(found.check.name, found.result, f"{finding.value:.4g} {finding.unit}", bounds)


def explain(found: CheckResult) -> str:
    named = name_first(found.finding.named if found.finding else [], 8, "; ")
    sentence = f"{found.check.name} failed. Expected: {found.check.shows}. {found.check.fix}"
    lines = [sentence, *(f"  {text}" for text in (found.why, named) if text)]
    return "\n".join(textwrap.fill(clean(text), 80, subsequent_indent="    ") for text in lines)
