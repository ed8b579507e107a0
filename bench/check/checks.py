"""The list of checks: what each one shows, and what to do if it fails.

Importing this module is cheap; torch is imported by `bench.check.findings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.check.subject import Subject


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


class Result(StrEnum):
    PASS = "pass"
    FAIL = "FAIL"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """A check: ``shows`` is what holds if it passes; ``fix`` says what a failure means."""

    name: str
    shows: str
    fix: str


class InapplicableError(Exception):
    """Raised if a check does not apply to the training; the message has at most 55 characters."""


@dataclass(frozen=True)
class Answer:
    """What a check found; without a finding ``why`` says why it does not apply or could not run."""

    check: Check
    result: Result
    finding: Finding | None = None
    why: str = ""


def answer(check: Check, subject: Subject) -> Answer:
    """Run a check. Any exception of the training counts as a failure."""
    findings = import_module("bench.check.findings")
    try:
        finding = getattr(findings, f"check_{check.name.replace('-', '_')}")(subject)
    except InapplicableError as error:
        return Answer(check, Result.SKIPPED, why=str(error))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Answer(check, Result.FAIL, why=why)
    return Answer(check, Result.PASS if finding.passed else Result.FAIL, finding)


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
            "averaging",
            "the step does not depend on how many images a batch has",
            "A figure of 2 is that of a loss summed over the batch: average it, or every batch "
            "size needs a learning rate of its own. Below 0.6 it is divided twice.",
        ),
        Check(
            "own-pixels",
            "the output for a sample depends on its own pixels only (evaluation mode)",
            "The network mixes the samples of a batch: look for a view or reshape where permute "
            "or flatten(1) is meant, or a mean over dimension 0.",
        ),
        Check(
            "overfit",
            "the network can memorise one batch of 32",
            "Something keeps it from learning at all: a learning rate that is too large or too "
            "small (--lr), gradients that do not arrive, a network that is too small.",
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
        Check(
            "seed",
            "the same seed gives the same steps",
            "Something draws random numbers that --seed does not reach: numpy's, or a generator "
            "of the model's own. Seed it in the model's factory.",
        ),
        Check(
            "gradients",
            "all weights to be trained receive gradients",
            "These layers are never used, detached from the loss, or behind something dead. Set "
            "requires_grad to False for weights that are frozen on purpose.",
        ),
        Check(
            "batchnorm",
            "every BatchNorm's running statistics move in training",
            "These layers are in evaluation mode during training, or not used. If they are frozen "
            "on purpose, set requires_grad of their weight and bias to False too.",
        ),
        Check(
            "activations",
            "no layer is dead or infinite after the first steps",
            "Most channels of these layers have one value whatever the image: a smaller --lr, or "
            "another initialisation, keeps them alive.",
        ),
        Check(
            "memory",
            "nothing is retained from step to step",
            "Something keeps tensors of every step: a list of outputs, or a graph that backward "
            "did not free (retain_graph).",
        ),
        Check(
            "graphs",
            "no step's graph is kept",
            "Something keeps a result of every step with its graph, often the loss: keep "
            "loss.detach() or loss.item() instead.",
        ),
    )
}
