"""What the cases of a plan train with: devices, models and images, determined once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.base.installation import find_version
from bench.networks.data import SYNTHETIC, DatasetInfo
from bench.networks.models import LENGTHS
from bench.networks.workloads import IMAGES, OWN, Workload, WorkloadFacts, load_workload
from bench.schema.case import Case, format_value
from bench.schema.optimization import OFFLOADED, OPTIMIZERS, refuse_offload, refuse_plain
from bench.schema.precision import (
    FP8_INSTALL,
    PRECISIONS,
    Apex,
    ask_for_torchao,
    refuse_apex,
    refuse_fp8,
)
from bench.schema.record import Environment
from bench.schema.rules import check as check_case
from bench.schema.rules import check_batches
from bench.sweep.options import Plan
from bench.sweep.versions import Versions
from bench.workers.examination import Platform
from bench.workers.fingerprint import Fingerprint, name_subject


@dataclass(frozen=True)
class Inputs:
    """Devices, models and images of the cases, by name, determined once, and the ``plan`` that is
    left of the cases, with what workloads decide. A dry run lacks what only torch or decoding can
    tell. ``platforms`` are those of the first lane."""

    platforms: dict[str, Platform]
    models: Mapping[str, Fingerprint]
    datasets: Mapping[str, DatasetInfo]
    plan: Plan = field(default_factory=Plan)
    warnings: Sequence[str] = ()
    apex: Apex | None = None
    versions: Versions = field(default_factory=Versions)  # of what the folder's rows trained

    def refuse(self, case: Case) -> str:
        """Return why the case cannot be run here at all, and what to do; empty if it can, or if its
        device is not known."""
        precision, platform = PRECISIONS[case.precision], self.platforms.get(case.device)
        if case.command is not None or platform is None:
            return ""
        if precision.float8 and (reason := platform.refuse_recipe(case.fp8_recipe)):
            return reason
        if reason := platform.refuse(precision):
            return reason
        model = self.find_model(case)
        # it was tried on a CPU, which lacks kernels that a GPU has
        if model is not None and case.device == "cpu" and case.precision in model.failing:
            return model.failing[case.precision]
        if reason := self._refuse_optimizer(case):
            return reason
        if precision.float8:
            if model is not None and not model.products:
                return refuse_fp8(case.model)
            return "" if find_version("torchao") else FP8_INSTALL
        return refuse_apex(self.apex, case.device) if precision.apex else ""

    def _refuse_optimizer(self, case: Case) -> str:
        kind, model = OPTIMIZERS.get(case.optimizer), self.find_model(case)
        if case.optimizer == OFFLOADED and case.device == "cpu":
            return refuse_offload()
        if kind and kind.torchao and not find_version("torchao"):
            return ask_for_torchao(case.optimizer)
        if model is not None and case.optimizer in model.plain:
            return refuse_plain(case.optimizer, case.model)
        return ""

    def warn_of_trial(self, case: Case) -> str:
        """Return a warning if the network failed its trial in the case's precision; else empty."""
        model = self.find_model(case)
        if model is None or case.precision not in model.failing:
            return ""
        ends = "is not measured: " if case.device == "cpu" else "may fail, as on a CPU "
        return f"warning: {case.precision} {ends}{model.failing[case.precision]}"

    def find_model(self, case: Case) -> Fingerprint | None:
        """Return the network or workload of the case; None if it was not examined."""
        return self.models.get(name_subject(case))

    def _find_facts(self, case: Case) -> WorkloadFacts | None:
        model = self.find_model(case)
        return model.workload if model else None

    def data(self, case: Case) -> DatasetInfo:
        """Return the images that the case trains on, or what is known of a workload's data."""
        if case.workload == IMAGES:
            return self.datasets[name_data(case)]
        samples, classes = Workload.samples, 0  # if it was not examined
        if case.command is not None:
            samples = 0
        elif facts := self._find_facts(case):
            samples, classes = facts.samples, facts.classes or 0
        elif case.workload in LENGTHS:
            samples = load_workload(case.workload, case.length).samples
        source = SYNTHETIC if case.workload in LENGTHS else ""
        return DatasetInfo(OWN, "", samples, 0, classes, source, "")

    def check_batches(self, case: Case) -> None:
        check_batches(case, self.data(case).train_images, self.has_batchnorm(case))

    def has_batchnorm(self, case: Case) -> bool:
        """Return whether the network may have BatchNorm that is not frozen; True if not
        examined, but for transformers of the harness."""
        model = self.find_model(case)
        if model is None:
            return case.workload not in LENGTHS
        return model.batchnorm and case.freeze not in model.still

    def settle(self, case: Case) -> Case:
        """Return the case with what its workload sets, such as `OWN`. Raises UsageError: it
        cannot."""
        facts = self._find_facts(case)
        if not (facts and facts.optimizer):
            return case
        check_case(case := replace(case, optimizer=OWN))
        return case

    def describe(self, case: Case, platform: Platform | None = None) -> Environment:
        """Return the environment of the case on a ``platform``, by default that of the first lane:
        machine, images, model and initial weights."""
        data, facts = self.data(case), self._find_facts(case)
        columns: dict[str, Any] = {
            "dataset_fingerprint": data.fingerprint,
            "dataset_source": data.source,
            "train_images": facts.units if facts else data.train_images,
            "test_images": facts.test_units if facts else data.test_images,
            "dataset_classes": data.classes or None,
            **self.versions.describe(case),
        }
        if facts:
            columns["unit"] = facts.unit
        if case.command is not None:
            columns |= {"train_images": None, "test_images": None}
        return replace((platform or self.platforms[case.device]).environment, **columns)


def name_data(case: Case) -> str:
    """Return the key of a case's images: the dataset, and their shape and classes if given."""
    return " ".join(filter(None, [case.dataset, case.input, format_value(case.classes)]))
