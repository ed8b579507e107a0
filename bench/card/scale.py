"""How much a card measures, and of what; what the measurements of one folder must share."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.data import prepare
from bench.data.sources import detect
from bench.environment.device import Platform
from bench.errors import UsageError
from bench.record import COMPARABLE


@dataclass(frozen=True)
class Scale:
    """How much each phase measures, and of what. Text fields are flags, as in a shell."""

    device: str
    dataset: str
    data_dir: Path | None
    fraction: float
    whole: float = 1.0
    """The fraction of the phase that measures whole epochs."""
    allow_shared: bool = False
    repeats: int = 3
    sweep: str = ""
    check: str = "--batch-size 256 --pairs 2"
    map: str = (
        "--model dpn92 --precision fp16 fp16-amp --scales 1 128 2^16 2^24 "
        "--train 1 128 2^16 2^24 dynamic"
    )
    # the presets' optimizer, which has the larger state
    walls: str = "--model dpn92 --precision fp32 fp16 bf16-amp --optimizer adamw"
    limit: str = "21GiB"
    profiles: str = "--precision tf32 bf16-amp"
    compiled: str = "--precision fp16 --loss-scale 128"
    repeated: str = "--precision fp32 fp16 bf16-amp --loss-scale 128"
    until: str = "1%"
    """Relative error of a case's epoch time at which a part of an epoch ends early."""

    @property
    def images(self) -> list[str]:
        return ["--data-dir", str(self.data_dir)] if self.data_dir else []

    @property
    def place(self) -> list[str]:
        """The flags of every command that trains on the card."""
        shared = ["--allow-shared"] if self.allow_shared else []
        return ["--device", self.device, "--dataset", self.dataset, *self.images, *shared]


def rehearse(fraction: float | None) -> Scale:
    """Return the scale of a CPU: a small network, synthetic images, four steps a case."""
    return Scale(
        device="cpu",
        dataset="synthetic",
        data_dir=None,
        fraction=fraction or 0.0005,
        whole=0.001,
        repeats=2,
        # fp16 is emulated on most CPUs: a step of dpn-small took 9 s at batch size 32
        sweep="--model dpn-small --batch-size 8",
        check="--model dpn-small --batch-size 8 --pairs 1",
        map="--model dpn-small --batch-size 8 --at 1 --steps 2 --scales 1 128 2^24 --train 128",
        walls="--model dpn-small --precision fp32 --step 8",
        limit="720MiB",
        profiles="--precision bf16-amp",
        compiled="--precision fp32",
        repeated="--precision fp32 bf16-amp",
    )


def choose_scale(data_dir: Path | None, fraction: float | None) -> Scale:
    """Return a card's scale: CIFAR-10 if it is found, as a download may take minutes."""
    folder = (data_dir or Path("data")).absolute()
    found = folder.is_dir() and detect(folder) is not None
    if data_dir and not found:
        raise UsageError(f"--data-dir {data_dir}: no CIFAR-10 there; see docs/sweep.md, Images")
    return Scale(
        "cuda", "cifar10" if found else "synthetic", folder if found else None, fraction or 0.2
    )


def prepare_ahead(scale: Scale) -> threading.Thread:
    """Decode the images while the doctor measures: the first sweep on an H200's machine waited 5 s
    for it. Errors are left for that sweep to report."""

    def run() -> None:
        with suppress(UsageError):
            prepare(scale.dataset, data_dir=scale.data_dir)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def identify(platform: Platform, scale: Scale) -> dict[str, object]:
    environment = platform.environment
    known = {name: getattr(environment, name) for name in COMPARABLE}
    del known["dataset_fingerprint"]  # the sweep itself compares it
    if environment.gpu is None:
        known["cpu"] = environment.cpu
    return {**known, "dataset": scale.dataset, "fraction": scale.fraction}
