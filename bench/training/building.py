"""The training of a case, built the same way for a measurement, a check and a loss-scale map."""

from __future__ import annotations

import random

import torch
from torch import nn

from bench.case import Case
from bench.data import DatasetInfo
from bench.models import MODELS, build_model
from bench.precision import PRECISIONS, set_flags
from bench.training.loop import CLASSES, Training


def build_training(
    case: Case, data: DatasetInfo, device: torch.device, model: nn.Module | None = None
) -> Training:
    """Set the flags, seed the random numbers and build the network: ready to train.

    Args:
        model: trained in place of a new one of ``case.model``; on the CPU, in float32.

    Raises:
        UsageError: the model cannot be built.
        UnsupportedError: the case needs what is not installed.
    """
    set_flags(PRECISIONS[case.precision])
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    seed_all(case.seed)
    # a user's own model gives a logit for each class of the images; a built-in network has ten
    classes = CLASSES if case.model in MODELS else data.classes
    return Training.of(case, model or build_model(case.model), device, classes)


def seed_all(seed: int) -> None:
    """Seed the generators that a model may draw from: torch's and Python's."""
    random.seed(seed)
    torch.manual_seed(seed)
