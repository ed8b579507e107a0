"""Building the training of a case, for measurements, checks and loss-scale maps alike."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bench.case import Case, list_micro_batches, whole_batch
from bench.models.weights import load_weights
from bench.optimization import scale_lr
from bench.precision import PRECISIONS, find_formats, is_batchnorm, set_flags
from bench.training.loop import Training
from bench.training.switches import keep_switches
from bench.workloads import IMAGES, Workload, load_workload
from bench.workloads.images import Images


def open_workload(case: Case, folder: str) -> Workload:
    """Return the workload of ``case``, with the dataset that `bench.data.prepare` wrote to
    ``folder``; a user's workload needs none. Raises UsageError: the workload cannot be made."""
    from bench.data import load

    if case.workload != IMAGES:
        return load_workload(case.workload)
    return Images(case.model, load(folder))


def build_network(workload: Workload) -> nn.Module:
    """Return the network of ``workload``, with weights in all layers."""
    model = workload.build_model()
    materialise(model, workload)
    return model


def materialise(model: nn.Module, workload: Workload) -> None:
    """Give torch's lazy layers their shapes and initial weights, by a forward pass on a batch of
    two that leaves the statistics of BatchNorm as they are."""
    if not any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        return
    device = next(model.parameters()).device
    batch = workload.make_batch(2, device, torch.Generator(device).manual_seed(0))
    model.train()
    for layer in filter(is_batchnorm, model.modules()):
        layer.eval()
    workload.compute_loss(model, batch)
    model.train()


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
    note, switched = "", dict[str, Any]()
    if model is None:
        with keep_switches(switched):
            model = build_network(workload)
        set_flags(PRECISIONS[case.precision])  # torch's older flags with them
        if case.start is not None:
            note = load_weights(model, case.start, workload.find_head)
    if case.sync_bn:
        # over all processes of a group, if any; otherwise it is ordinary BatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    training = make_training(case, model, device, workload)
    training.start_note, training.switched = note, switched
    return training


def make_training(
    case: Case, model: nn.Module, device: torch.device, workload: Workload | None = None
) -> Training:
    """Make the training of ``case``. Raises UnsupportedError: it needs something that is not
    installed."""
    formats = find_formats(case.precision, case.opt_level)
    kind = Training
    if formats.apex:
        from bench.training.apex import ApexTraining  # only if needed

        kind = ApexTraining
    return kind(
        model,
        formats,
        device,
        lr=scale_lr(case.lr, case.lr_scaling, whole_batch(case), case.base_batch),
        optimizer=case.optimizer,
        loss_scale=case.loss_scale,
        channels_last=case.channels_last,
        compile=case.compile,
        opt_level=case.opt_level,
        frozen=case.freeze,
        fp8_recipe=case.fp8_recipe,
        cuda_graphs=case.cuda_graphs,
        clip_grad=case.clip_grad,
        items=math.gcd(*list_micro_batches(case, workload.samples)) if workload else 1,
        workload=workload,
    )


def seed_all(seed: int) -> None:
    """Seed the generators that a model or a dataset may draw from: torch's, numpy's, Python's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
