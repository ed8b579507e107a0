"""Building the training of a case, for measurements, checks and loss-scale maps alike."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.base.errors import UsageError
from bench.networks.models import MODELS
from bench.networks.modules import find_batchnorm
from bench.networks.weights import fit_weights
from bench.networks.workloads import IMAGES, Images, Workload, load_workload
from bench.schema.case import Case
from bench.schema.precision import PRECISIONS, find_formats
from bench.training.formats import set_flags
from bench.training.loop import Training
from bench.training.sources import identify_model
from bench.training.switches import keep_switches


def open_workload(case: Case, folder: str) -> Workload:
    """Return the workload of ``case``, with the dataset that `bench.networks.data.prepare` wrote to
    ``folder``; a user's workload needs none. Raises UsageError: the workload cannot be made."""
    from bench.networks.data import load

    if case.workload != IMAGES:
        return load_workload(case.workload, case.length)
    return Images(case.model, load(folder))


def build_training(
    case: Case, workload: Workload, device: torch.device, model: nn.Module | None = None
) -> Training:
    """Set the flags, seed the random numbers and build a training that is ready to start.
    ``model``, on the CPU in float32, is trained instead of a new network of the workload.

    Raises UsageError: the model cannot be built, its initial weights cannot be read or do not fit
    it, or it lacks the layers to freeze. Raises UnsupportedError: the case needs something that is
    not installed.
    """
    torch.backends.cudnn.benchmark = case.cudnn_benchmark
    set_flags(PRECISIONS[case.precision])
    seed_all(case.seed)
    note, switched, identity = "", dict[str, Any](), None
    if model is None:
        with keep_switches(switched):
            model = workload.build_model()
        identity = None if case.model in MODELS else identify_model(model)
        set_flags(PRECISIONS[case.precision])  # torch's older flags with them
        if case.start is not None:
            fitting, note = fit_weights(model, case.start, workload.find_head)
            model.load_state_dict(fitting, strict=False)
    if case.sync_bn:
        # over all processes of a group, if any; otherwise it is ordinary BatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if any(map(find_batchnorm, model.modules())):
            raise UsageError(
                "--sync-bn: BatchNorm that is scripted or traced cannot be converted; return the "
                "network as it is written, or leave out --sync-bn"
            )
    kind = Training
    if find_formats(case.precision, case.opt_level).apex:
        from bench.training.apex import ApexTraining  # only if needed

        kind = ApexTraining
    if case.parallel == "fsdp":
        from bench.training.sharding import ShardedTraining  # only if needed

        kind = ShardedTraining
    training = kind(case, model, device, workload)
    training.start_note, training.switched, training.identity = note, switched, identity
    return training


def seed_all(seed: int) -> None:
    """Seed the generators that a model or a dataset may draw from: torch's, numpy's, Python's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
