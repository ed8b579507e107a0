"""A device as torch sees it, and what it can run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.environment.host import read_cpu_flags
from bench.errors import UsageError
from bench.precision import Arithmetic, Precision, emulates_fp8
from bench.record import Environment
from bench.text import parse_bytes


@dataclass(frozen=True)
class Platform:
    """A device as torch sees it: its description for a record, and the halves it has natively."""

    environment: Environment
    fp16_native: bool = True
    bf16_native: bool = True

    def refuse(self, precision: Precision) -> str:
        """Return why the device cannot run ``precision`` at all; empty if it can."""
        if (self._capability or (0, 0)) >= precision.min_capability:
            return ""
        least = "Ampere" if precision.arithmetic == "tfloat32" else ""
        if precision.float8 and not (self.environment.gpu is None and emulates_fp8()):
            least = "compute capability " + ".".join(map(str, precision.min_capability))
        needs = f"{precision.name} needs an NVIDIA GPU of {least} or later; this is {self.name}"
        return needs if least else ""

    def find_emulation(self, precision: Precision) -> str:
        """Return why ``precision`` would run only as an emulation; empty if it would not."""
        if self._capability is not None:
            old = self._capability < precision.min_capability
            return f"{self.name} has no {precision.arithmetic} arithmetic" if old else ""
        halves = {"float16": ("fp16", self.fp16_native), "bfloat16": ("bf16", self.bf16_native)}
        half, native = halves.get(precision.arithmetic, ("", True))
        if not native:
            return f"{self.environment.gpu or 'this CPU'} has no {half} arithmetic"
        if self.environment.gpu is None and precision.float8:
            return f"{precision.name} is emulated on a CPU"
        return ""

    def discourage(self, precision: Precision) -> str:
        """Return why ``precision`` is measured only if it is asked for by name; else empty.

        On a CPU that emulates both halves, a step of DPN takes about 100 times as long in fp16 as
        in fp32. In bf16 it takes 3 times as long if oneDNN computes the convolutions.
        """
        if self.environment.gpu is None and precision.arithmetic == "bfloat16":
            return ""
        return self.find_emulation(precision)

    def refuse_limit(self, limit: str | None) -> str:
        """Return why no memory limit can be set here; empty if it can, or ``limit`` is None."""
        if limit is None or self.environment.gpu is not None or sys.platform == "linux":
            return ""
        return "a memory limit on a CPU needs Linux; leave out --memory-limit"

    def check_limit(self, limit: str | None) -> None:
        """Raise UsageError if a memory limit is above the memory of the device, as it would limit
        nothing; it says how much there is."""
        if limit is None:
            return
        import psutil

        total = self.environment.gpu_memory_bytes or psutil.virtual_memory().total
        if parse_bytes(limit) > total:
            raise UsageError(
                f"--memory-limit {limit} is above the {total / 2**30:.1f} GiB of {self.name}; "
                "give less, or leave it out"
            )

    @property
    def halves(self) -> dict[str, bool]:
        """Whether a CPU has instructions for each half precision, as for
        `bench.diagnosis.rates.find_halves`; empty for a GPU, and if unknown, as outside Linux."""
        if self.environment.gpu or not read_cpu_flags():
            return {}
        native = {Arithmetic.FLOAT16: self.fp16_native, Arithmetic.BFLOAT16: self.bf16_native}
        return {str(half): has for half, has in native.items()}

    @property
    def name(self) -> str:
        return self.environment.gpu or "a CPU"

    @property
    def _capability(self) -> tuple[int, ...] | None:
        """CUDA's compute capability; None if this is not an NVIDIA GPU."""
        told = self.environment.capability or ""
        return tuple(int(n) for n in told.split(".")) if told[:1].isdigit() else None
