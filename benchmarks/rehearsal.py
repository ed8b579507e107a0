"""Kernels one training step would launch on a GPU, by `bench.rehearsal` of each commit."""

from __future__ import annotations

import math

PRECISIONS = ("fp32", "tf32", "fp16", "fp16-amp", "bf16", "bf16-amp")
"""Those of `bench.precision` when this was written; one that a commit lacks is not available."""


def setup_cache() -> dict[str, int]:
    """Launches by precision, the most any loss scaling takes; empty for a commit from before."""
    try:
        from bench.precision import PRECISIONS as KNOWN
        from bench.rehearsal.__main__ import rehearse  # type: ignore[attr-defined]  # of all commits
    except ImportError:
        return {}
    names = [name for name in PRECISIONS if name in KNOWN]
    rows = rehearse("dpn-small", names, compile=[False])
    return {name: max(row.launches for row in rows if row.precision == name) for name in names}


vars(setup_cache).update(timeout=600, pretty_source="")


def track_launches(launches: dict[str, int], precision: str) -> float:
    """Kernels a step of dpn-small would launch on a GPU, counted on the CPU."""
    return launches.get(precision, math.nan)


vars(track_launches).update(
    pretty_name="Kernel launches per step",
    unit="launches",
    version="1",
    timeout=60,
    param_names=["precision"],
    params=[list(PRECISIONS)],
    pretty_source=track_launches.__doc__,
)
