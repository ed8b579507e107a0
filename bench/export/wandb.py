"""Weights & Biases, offline: one folder per record, for ``wandb sync`` to upload.

A run is written to a separate folder, and moved to its place once it is complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from shlex import quote

# read when wandb is imported and its service starts: nothing is sent or printed
os.environ["WANDB_ERROR_REPORTING"] = "false"
os.environ["WANDB_SILENT"] = "true"

import wandb

from bench.export.runs import Run

_PARTIAL = ".partial"


class Offline:
    """A folder of offline runs, which stay local until ``wandb sync``."""

    def __init__(self, folder: Path, project: str) -> None:
        self._folder, self._project = folder / project, project
        self._place = self._folder / "wandb"
        self.hint = f"wandb sync {quote(str(self._place))}/offline-run-*"
        shutil.rmtree(self._folder / _PARTIAL, ignore_errors=True)
        # nothing about the exporting machine: it is not the one that measured
        self._settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            symlink=False,
            disable_git=True,
            disable_code=True,
            host="",
            program="bench.export",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_viewer=True,
            x_save_requirements=False,
        )

    def find_exported(self) -> set[str]:
        # offline-run-20261121_102030-ID; an id may have a hyphen too
        return {place.name.split("-", 3)[3] for place in self._place.glob("offline-run-*-*")}

    def export(self, run: Run) -> None:
        partial = self._folder / _PARTIAL / run.record_id
        partial.mkdir(parents=True, exist_ok=True)
        config = {
            **run.axes,
            "outcome": run.outcome,
            "readings": run.readings,
            "environment": run.environment,
        }
        with wandb.init(
            dir=partial,
            project=self._project,
            id=run.record_id,
            name=run.name,
            notes=str(run.outcome.get("warnings", "")),
            tags=run.flags,
            config=config,
            settings=self._settings,
        ) as written:
            for axis, points in (("step", run.steps), ("epoch", run.epochs)):
                if points:
                    written.define_metric(f"{axis}/number", hidden=True)
                    written.define_metric(f"{axis}/*", step_metric=f"{axis}/number")
                for point in points:
                    written.log({f"{axis}/number": point.number, **point.values})
            written.summary.update(run.results)
            written.finish(exit_code=0 if run.measured else 1)
        # the service would write the file milliseconds later; ending it takes 0.3 s
        wandb.teardown()
        (whole,) = (partial / "wandb").glob("offline-run-*")
        self._place.mkdir(parents=True, exist_ok=True)
        whole.rename(self._place / whole.name)
        shutil.rmtree(self._folder / _PARTIAL)
