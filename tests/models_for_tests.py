"""Networks that behave as badly as anybody's can. A worker is given them by name."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.base.errors import UnsupportedError
from bench.networks.workloads import Loss, Network, Workload

if TYPE_CHECKING:
    pass

PIDS = "BENCH_TEST_PIDS"
"""Environment variable: the file that `sleeps` writes its own and its child's process id to."""

TRIES = "BENCH_TEST_TRIES"
"""Environment variable: the file to which `busy` adds a line each time."""


class Tiny(nn.Module):
    """A convolution and a classifier; ``behave`` is called on the logits of every training step.

    Not on those of the two images that a sweep tries a model on before its first case, nor on the
    meta device, where it is looked at what the model computes.
    """

    def __init__(self, behave: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=4)
        self.head = nn.Linear(4 * 8 * 8, 10)
        self.behave = behave

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.conv(x).flatten(1))
        return self.behave(logits) if len(x) > 2 and not x.is_meta else logits


def good() -> nn.Module:
    return Tiny()


def exchanges_briefly() -> nn.Module:
    """Steps for exposed communication take no 6 s."""
    from bench.training import parallel

    parallel._SECONDS = 0.0
    return Tiny()


def wide() -> nn.Module:
    """Few weights, a few hundred KiB of activations for each image."""
    conv = nn.Conv2d(3, 64, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64 * 16, 10))


def raises() -> nn.Module:
    def behave(logits: Tensor) -> Tensor:
        raise RuntimeError("no such <luck> | =1+1\nnor a second line")

    return Tiny(behave)


def lacks() -> nn.Module:
    def behave(logits: Tensor) -> Tensor:
        raise UnsupportedError("there is no such device here")

    return Tiny(behave)


def not_a_number() -> nn.Module:
    return Tiny(lambda logits: logits * torch.nan)


def sleeps() -> nn.Module:
    """For ever, deaf to SIGTERM, with a child."""

    def behave(logits: Tensor) -> Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        if PIDS in os.environ:
            file = Path(os.environ[PIDS])
            file.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
            file.with_suffix(".new").rename(file)
        while True:
            time.sleep(3600)

    return Tiny(behave)


def exits() -> nn.Module:
    return Tiny(lambda logits: os._exit(9))


def kills_itself() -> nn.Module:
    return Tiny(lambda logits: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[func-returns-value,return-value,arg-type]


def crashes() -> nn.Module:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return Tiny(lambda logits: ctypes.string_at(0))  # type: ignore[return-value,arg-type]


def _leave_room(n_bytes: int) -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def allocates_tensors() -> nn.Module:
    """Until the limit on address space refuses."""
    tensors = []

    def behave(logits: Tensor) -> Tensor:
        _leave_room(2**29)
        while True:
            tensors.append(torch.ones(2**22))

    return Tiny(behave)


def fills() -> nn.Module:
    """Until a limit refuses; on a machine without one, 1.5 GiB."""
    tensors = []

    def behave(logits: Tensor) -> Tensor:
        for _ in range(24):
            tensors.append(torch.ones(2**24))
        tensors.clear()
        return logits

    return Tiny(behave)


def babbles() -> nn.Module:
    """100 MB to standard error, in lines, then trains well."""
    printed = False

    def behave(logits: Tensor) -> Tensor:
        nonlocal printed
        if not printed:
            printed = True
            line = b"so many words, " * 6 + b"and more\n"
            for _ in range(1000):
                os.write(2, line * (100_000 // len(line)))
            os.write(2, b"the last word\n")
        return logits

    return Tiny(behave)


def busy() -> nn.Module:
    """Busy the first time, then good."""
    with Path(os.environ[TRIES]).open("a") as file:
        file.write("tried\n")
    if len(Path(os.environ[TRIES]).read_text().splitlines()) == 1:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
    return Tiny()


def asks() -> nn.Module:
    """Asks whoever sits at the terminal."""

    def behave(logits: Tensor) -> Tensor:
        input("go on? ")
        return logits

    return Tiny(behave)


FACTS = "BENCH_TEST_FACTS"
"""Environment variable: the file that `tells` writes what it has as a process to."""


def tells() -> nn.Module:
    """Writes what its process has at the first step, then trains well."""

    def behave(logits: Tensor) -> Tensor:
        if not (file := Path(os.environ[FACTS])).exists():
            file.write_text(json.dumps(describe_process()))
        return logits

    return Tiny(behave)


def describe_process() -> dict[str, object]:
    """What a process has of its own, but for its ids and the time."""
    import gc
    import resource

    import numpy as np

    descriptors = [os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)]  # noqa: PTH115
    kinds = [place.partition(":")[0] for place in descriptors]
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return {
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "folder": str(Path.cwd()),
        "environment": {k: v for k, v in os.environ.items() if not k.startswith("BENCH_TEST_")},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "cores": sorted(os.sched_getaffinity(0)),
        "streams": [(s.encoding, s.line_buffering, s.seekable(), s.isatty()) for s in streams],
        "kinds": [*kinds, descriptors[1] == descriptors[2]],
        "open": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "path": sys.path,
        "collecting": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 100_000),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "dtype": str(torch.get_default_dtype()),
        "drawn": (float(torch.rand(())), float(np.random.rand())),
    }


def vandalizes() -> nn.Module:
    """Spoils what it can reach: settings, functions, signals, limits, threads; then the heap."""
    import gc
    import random
    import resource
    import threading

    import numpy as np
    import torch.nn.functional as F

    def behave(logits: Tensor) -> Tensor:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        torch.set_default_dtype(torch.float64)
        torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        gc.disable()
        gc.unfreeze()
        F.cross_entropy = lambda *_, **__: torch.zeros(())
        nn.Linear.forward = nn.Conv2d.forward = lambda self, x: x * torch.nan  # type: ignore
        os.environ.clear()
        os.chdir("/")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=time.sleep, args=(3600,)).start()
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        block = libc.malloc(64)
        ctypes.memset(block - 16, 0x41, 512)  # the heap's own notes, which free() finds broken
        libc.free(ctypes.c_void_p(block))
        return logits

    return Tiny(behave)


def not_a_model() -> object:
    return "a string"


def small_card() -> nn.Module:
    """DPN-92 on a card that offers this process 1 % of its memory."""
    from bench.networks.models import build_model

    torch.cuda.set_per_process_memory_fraction(0.01)
    return build_model("dpn92")


def one_block() -> nn.Module:
    """A DPN of one block, for what takes its time for each kernel."""
    from bench.networks.dpn import DPN, Stage

    return DPN((Stage(1, 16, 32, 4),), stem=16, groups=8)


class Chosen(nn.Module):
    """Two layers, each of which computes in a format of its own choice, or in that of its weights
    where it has none."""

    def __init__(self, *formats: torch.dtype | None) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3 * 32 * 32, 32), nn.Linear(32, 10)
        self.formats = formats

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer, format in zip((self.stem, self.head), self.formats, strict=True):
            if format is None:
                x = layer(x)
                continue
            with torch.autocast(x.device.type, enabled=False):
                x = F.linear(x.to(format), layer.weight.to(format), layer.bias.to(format))
        return x.float()


def doubles() -> nn.Module:
    """Weights of float64, whatever was asked for."""
    return Chosen(torch.float64, torch.float64).double()


def single_head() -> nn.Module:
    """A head in float32 on purpose: 1 % of the FLOP."""
    return Chosen(None, torch.float32)


def single_stem() -> nn.Module:
    """All but its head in float32."""
    return Chosen(torch.float32, None)


class Cast(nn.Sequential):
    """Runs itself under an autocast of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = super().forward(x)
        return out.float()


def casts_itself() -> nn.Module:
    return Cast(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


class Rows(Workload):
    """Numbers to two classes: four steps an epoch at batch size 16."""

    unit = "rows"
    samples, test_samples = 60, 64

    def build_model(self) -> nn.Module:
        return nn.Linear(6, 2)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        x = torch.randn(size, 6, device=device, generator=generator)
        return x, (x[:, 0] > 0).long()

    def make_test_batch(self, first: int, size: int, device: torch.device) -> Any:
        return self.make_batch(size, device, torch.Generator(device).manual_seed(first))

    def compute_loss(self, network: Network, batch: Any) -> Tensor | Loss:
        x, y = batch
        logits = network(x)
        return Loss(F.cross_entropy(logits, y), (logits.argmax(1) == y).sum())


class Likelihood(Workload):
    """The negative logarithm of a density, which is narrow: below zero from the first step on."""

    unit, samples = "rows", 100

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 2, bias=False)

    def make_batch(self, size: int, device: torch.device, generator: torch.Generator) -> Any:
        return 0.01 * torch.randn(size, 8, generator=generator, device=device)

    def compute_loss(self, network: Network, batch: Any) -> Tensor:
        means = network(batch).float().mean(1)
        return 0.5 * ((batch[:, 0] - means) / 0.02).square().mean() - 3.5


def likelihood() -> Workload:
    return Likelihood()


def rows() -> Workload:
    return Rows()
