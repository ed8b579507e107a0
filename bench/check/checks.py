"""The list of checks: what each one shows, and what to do if it fails.

Importing this module is cheap; torch is imported by `bench.check.findings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.check.subject import Subject


@dataclass(frozen=True)
class Finding:
    """The result of a check, which passes if ``low <= value <= high``, so NaN never passes.
    ``unit`` describes the value, ``named`` lists the layers, images or states at fault, and
    ``data`` holds further figures for the JSON file."""

    value: float
    unit: str
    low: float = -math.inf
    high: float = math.inf
    named: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)

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

    def run(self, subject: Subject) -> Finding:
        findings = import_module("bench.check.findings")
        return getattr(findings, f"check_{self.name.replace('-', '_')}")(subject)  # type: ignore[no-any-return]


class InapplicableError(Exception):
    """Raised if a check does not apply to the training; the message has at most 55 characters."""


@dataclass(frozen=True)
class Checked:
    """A check and its finding, None if it was skipped or could not run. ``error`` says why it could
    not run, ``lacks`` why it does not apply to the training."""

    check: Check
    finding: Finding | None = None
    error: str = ""
    lacks: str = ""

    @property
    def result(self) -> Result:
        if self.error:
            return Result.FAIL
        if self.finding is None:
            return Result.SKIPPED
        return Result.PASS if self.finding.passed else Result.FAIL


def answer(check: Check, subject: Subject) -> Checked:
    """Run a check. Any exception of the training counts as a failure."""
    try:
        return Checked(check, check.run(subject))
    except InapplicableError as error:
        return Checked(check, lacks=str(error))
    except Exception as error:
        return Checked(check, error=" ".join(f"{type(error).__name__}: {error}".split())[:300])


CHECKS: dict[str, Check] = {
    check.name: check
    for check in (
        Check(
            "batch",
            "the images and labels that enter the network are the dataset's",
            "The code that makes batches mixes up images, pixels or labels. Look at batch.png.",
        ),
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
            "or more --steps. If overfit passes, look at the labels in batch.png.",
        ),
        Check(
            "baseline",
            "it learns from the images, not only from the frequency of labels",
            "With every image blank it learns as well: the labels do not belong to the images "
            "(see batch.png), or the images do not reach the network. A network that only starts "
            "slowly needs more --steps. Where the data are random there is nothing to learn: add "
            "--skip first-steps baseline.",
        ),
        Check(
            "arithmetic",
            "a step computes in the number format of --precision",
            "The network, or the code that runs it, chooses a number format itself: a cast in its "
            "forward pass, weights of another dtype, or a torch.autocast of its own. Leave that to "
            "--precision, or compare its rows with nothing else.",
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
            "another initialisation, keeps them alive. See layers.png.",
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
            "Something keeps a result of every step with its graph, often the loss, as in "
            "total += loss: keep loss.detach() or loss.item() instead.",
        ),
        Check(
            "evaluation",
            "evaluating keeps no graph and changes nothing",
            "Evaluate under torch.no_grad(), after model.eval() and before model.train().",
        ),
    )
}
