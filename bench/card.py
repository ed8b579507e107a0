"""`python -m bench.card`: run every measurement of a new GPU, nine minutes at a time.

What a reader gains most by comes first; the same command goes on. Without a GPU it rehearses: every
command runs on the CPU with small inputs, and the figures are none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.base.errors import UsageError
from bench.base.installation import CHECKOUT, HOME, find_version, in_checkout
from bench.base.processes import leave, stop_signals
from bench.base.progress import Progress, watch
from bench.base.text import GIB, clean, last_line, read_clock, replace_file
from bench.machine.host import has_cuda
from bench.machine.nvml import find_cards
from bench.networks.data import find_layout
from bench.results.scale_map import MAP
from bench.results.store.table import RECORDS
from bench.schema.flags import Parser, command, describe, parse_number
from bench.schema.precision import (
    FP8_INSTALL,
    PRECISIONS,
    TRAINED,
    find_apex,
    refuse_apex,
)
from bench.schema.record import COMPARABLE
from bench.sweep.preflight import default_out, refuse_unwritable
from bench.workers.examination import Platform, probe
from bench.workers.executors.subprocess import refuse_pair

STATE = "card.json"
_ENDED, OPEN = ("done", "absent"), ("left", "cut", "interrupted")  # what failed is run again
GRACE_S = 8.0  # a sweep stopped by SIGINT ends its worker in 3 s

TITAN_GIB = 21
"""What is left of a TITAN RTX, the card of the page of 2019, for a network."""


@dataclass(frozen=True)
class Setup:
    """Where the stages run and what they are given: the folder ``out``, the ``dataset``, the flags
    that say where it is, ``data``, and those that let others use the card, ``shared``."""

    platform: Platform
    out: str
    dataset: str = "synthetic"
    data: Sequence[str] = ()
    shared: Sequence[str] = ()


@dataclass(frozen=True)
class CardStage:
    """A command, as Python takes it after -m, with the least seconds that are worth starting it
    with, or another case of it, and what tells, of a platform, why it cannot run there; empty if it
    can."""

    name: str
    least_s: float
    command: Sequence[str]
    lacks: Sequence[Callable[[Platform], str]] = ()


def _find_no_gpu(platform: Platform) -> str:
    return "" if platform.environment.gpu else "it is of an NVIDIA GPU"


def _find_no_apex(platform: Platform) -> str:
    return refuse_apex(find_apex(), "cuda" if platform.environment.gpu else "cpu")


def _find_no_compiler(platform: Platform) -> str:
    least = (7, 0)  # Triton's
    capability = platform.environment.capability
    old = capability is not None and tuple(map(int, capability.split("."))) < least
    return "torch.compile needs compute capability 7.0 or later" if old else ""


def _find_no_fp8(platform: Platform) -> str:
    lack = platform.refuse(PRECISIONS["fp8"])
    return lack or ("" if find_version("torchao") else FP8_INSTALL)


def _find_no_checkout(platform: Platform) -> str:
    there = in_checkout() and find_spec("pytest")
    return "" if there else "it is in a checkout of the repository, and needs pytest"


def list_lacks(platform: Platform) -> dict[str, str]:
    """Return the precisions that a card cannot run, or only emulates, with the reasons."""
    formats = {name: PRECISIONS[name] for name in TRAINED}
    found = {n: platform.refuse(p) or platform.find_emulation(p) for n, p in formats.items()}
    return {name: why for name, why in found.items() if why} if platform.environment.gpu else {}


def choose_limit(platform: Platform) -> int:
    """Return the GiB that a network has on a TITAN RTX, or on a smaller card nine tenths of its
    memory, since a limit above that limits nothing."""
    total = (platform.environment.gpu_memory_bytes or 0) / GIB
    return min(TITAN_GIB, int(0.9 * total)) if total else TITAN_GIB


@dataclass(frozen=True)
class Scale:
    """How much is measured, by flags of bench.sweep and, in ``map``, of bench.scales: the recipe
    of 2019 for each ``card`` and for ``repeats``, ``all`` precisions and sizes, a ``part`` of an
    epoch or the ``whole``, ``one`` case, that of ``fp16``, and what a smaller card can hold."""

    card: str
    repeats: str
    all: str
    part: str
    whole: str
    one: str
    fp16: str
    map: str
    limit: str


_TITAN = "--preset rtx-titan --cudnn-benchmark off"
FULL = Scale(
    card=_TITAN,
    repeats=f"{_TITAN} --precision fp32 fp16 --batch-size 256 --loss-scale 128",
    all="--precision fp32 tf32 fp16 fp16-amp bf16 bf16-amp --batch-size 256 512",
    part="--fraction 0.2 --until 5%",
    whole="--precision fp16 tf32 fp32 --batch-size 256",
    one="--batch-size 256",
    fp16="--precision fp16 --batch-size 256",
    map="--precision fp16 fp16-amp",
    limit="",
)
_TINY = "--model dpn-small --precision fp32 --batch-size 8"
SMALL = Scale(
    card=_TINY,
    repeats=_TINY,
    all=f"{_TINY} 16",
    part="--steps 2",
    whole=f"{_TINY} --steps 2",
    one=_TINY,
    fp16=_TINY,
    map="--batch-size 8 --steps 1 --scales 1 128",
    limit="--memory-limit 720MiB --model dpn-small --precision fp32 --step 48",
)
"""A rehearsal on a CPU."""


def list_stages(setup: Setup) -> list[CardStage]:
    """Return what is run, what a reader gains most by first. A compiled case took 70 to 78 s on an
    H200, an autotuned one up to 33 s more."""
    out, gpu = setup.out, setup.platform.environment.gpu
    device, scale = ["--device", "cuda" if gpu else "cpu"], FULL if gpu else SMALL
    into = ["--out", out, *device, *setup.shared]
    images = [*into, "--dataset", setup.dataset, *setup.data]
    again = ["--retry", "error", "killed", "timeout"]

    def sweep(*flags: str) -> list[str]:
        return ["bench.sweep", *images, *again, "--no-report", *" ".join(flags).split()]

    once = "--preset precision --repeats 1"
    some, every = f"{once} {scale.part}", f"{once} {scale.part} {scale.all}"
    few = f"{once} --steps 20 {scale.fp16}"
    fit = ["bench.fit", *images, *again, "--optimizer", "adamw"]
    limit = scale.limit or f"--memory-limit {choose_limit(setup.platform)}GiB"
    gpt = f"--no-report --repeats 1 --model gpt-small {scale.part}"
    fp8 = "--precision bf16-amp fp8 --batch-size 16 --compile"
    tests = ["pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    on_gpu, compiles = [_find_no_gpu], [_find_no_compiler]
    on_pair = [lambda _: refuse_pair("cuda")]
    graphs = "--precision fp16 --batch-size 128 --cuda-graphs"
    apex = "--precision fp16-apex fp16 --batch-size 256 --optimizer sgd"
    return [
        CardStage("doctor", 12, ["bench.doctor", "--out", out, *setup.data]),
        CardStage(
            "trust",
            60,
            ["bench.doctor", "--trust", "--out", f"{out}/trust", *device, *setup.shared],
        ),
        CardStage("rtx-titan", 30, sweep(scale.card, scale.part, "--repeats 1")),
        CardStage("precisions", 5, sweep(some, scale.one)),
        CardStage("tests", 30, tests, [_find_no_checkout]),
        CardStage("plain", 5, sweep(every, "--profile")),
        CardStage("autotuned", 60, sweep(every, "--cudnn-benchmark"), on_gpu),
        CardStage("compiled", 80, sweep(every, "--compile"), compiles),
        CardStage("both", 110, sweep(every, "--compile --cudnn-benchmark"), [*on_gpu, *compiles]),
        CardStage("epochs", 60, sweep(once, "--evaluate", scale.whole)),
        CardStage("as-2019", 60, sweep("--preset rtx-titan --repeats 1", scale.part), on_gpu),
        CardStage("repeats", 20, sweep(scale.repeats, scale.part, "--repeats 3")),
        CardStage("scales", 60, ["bench.scales", *images, *scale.map.split()]),
        CardStage("fit-limit", 30, [*fit, *limit.split()]),
        CardStage("fit", 30, fit, on_gpu),
        CardStage("graphs", 20, sweep(some, graphs), on_gpu),
        CardStage("apex", 30, sweep(some, apex), [_find_no_apex]),
        CardStage("fp8", 80, ["bench.sweep", *into, *gpt.split(), *fp8.split()], [_find_no_fp8]),
        CardStage("loader", 30, sweep(some, scale.fp16, "--loader torch --workers 0 4")),
        CardStage("checkpoint", 30, sweep(few, "--checkpoint")),
        CardStage("ddp", 30, sweep(few, "--parallel ddp --world-size 1")),
        CardStage("ddp-2", 30, sweep(few, "--parallel ddp --world-size 2"), on_pair),
        CardStage("bare-loop", 60, ["benchmarks.overhead", *device], [_find_no_checkout]),
        CardStage("report", 20, ["bench.report", out, "-o", f"{out}/report.html"]),
    ]


def plan_stage(stage: CardStage, platform: Platform) -> tuple[list[str], str]:
    """Return the command of a stage without the precisions that the card lacks; or why there is
    none."""
    if why := next(filter(None, (find(platform) for find in stage.lacks)), ""):
        return [], why
    lacks, flags = list_lacks(platform), [*stage.command]
    if "--precision" not in flags:
        return flags, ""
    begin = flags.index("--precision") + 1
    end = next((i for i, word in enumerate(flags[begin:], begin) if word[:2] == "--"), len(flags))
    kept = [name for name in flags[begin:end] if name not in lacks]
    return ([*flags[:begin], *kept, *flags[end:]], "") if kept else ([], lacks[flags[begin]])


def run(
    command: Sequence[str], log: Path, until: float, stopped: Callable[[], int], least_s: float = 0
) -> str:
    """Run Python, but not beyond a time.monotonic() or a signal, and begin no further case with
    less than ``least_s`` left. Return how it ended."""
    end, records = "", log.with_name(RECORDS)
    before = _measure(records)
    with log.open("a") as file:
        print(f"\n== {shlex.join(command)} ==", file=file, flush=True)
        options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        # a session of its own, so that Ctrl-C reaches it only from here
        options |= {"cwd": CHECKOUT if in_checkout() else None, "start_new_session": True}
        child = subprocess.Popen([sys.executable, *command], **options)
    while child.poll() is None:
        left, written = until - time.monotonic(), _measure(records)
        late = left < 0 or (written > before and left < least_s)
        before = written
        if not end and (stopped() or late):
            end, until = "interrupted" if stopped() else "cut", time.monotonic() + GRACE_S
            child.send_signal(signal.SIGINT)
        elif time.monotonic() > until:
            os.killpg(child.pid, signal.SIGKILL)
        time.sleep(0.1)
    # the doctor's 1 is an answer: something makes numbers unreliable
    fine = child.returncode in ((0, 1) if "bench.doctor" in command else (0,))
    return end or ("done" if fine else "failed")


def _measure(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def has_card() -> bool:
    """Return whether a GPU is there and not hidden, whether or not torch and NVML can use it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return bool(find_cards()[0]) or (not hidden and any(Path("/dev").glob("nvidia[0-9]*")))


@command
def main(argv: Sequence[str]) -> int:
    """Return 0; 1 if something failed; 2 for a usage error; 130 or 143 if a signal stopped it."""
    begun, usual = time.monotonic(), os.environ.get("CARD_MINUTES") or "9"
    parser = Parser(prog="python -m bench.card", description=describe(__doc__))
    add = parser.add_argument
    add("--minutes", metavar="N", default=usual, help="time for all of it ($CARD_MINUTES, or 9)")
    add("--out", type=Path, default="results", metavar="DIR", help="parent of the folder (results)")
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    add("--allow-shared", action="store_true", help="measure on a GPU that other processes use")
    given = parser.parse(argv)
    refuse_unwritable(given.out)
    minutes = parse_number("--minutes", given.minutes, "a number above 0")
    deadline = begun + 60 * minutes - GRACE_S
    rehearsal = not has_cuda()
    if rehearsal and has_card():
        raise UsageError("torch finds no GPU, though there is one; python -m bench.doctor says why")
    data = (given.data_dir or Path("data")).absolute()
    real = not rehearsal and (given.data_dir or find_layout(data))
    dataset = "cifar10" if real else "synthetic"
    platform = probe("cpu" if rehearsal else "cuda")
    # a folder for each card and day
    name = "rehearsal-" * rehearsal + default_out({"": platform}).name.rpartition("-")[0]
    folder = given.out.absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    out = str(folder).removeprefix(f"{CHECKOUT}{os.sep}")
    flags = ["--data-dir", str(data)] if real else []
    setup = Setup(platform, out, dataset, flags, ["--allow-shared"] * given.allow_shared)
    if rehearsal:
        print(
            "A rehearsal on the CPU, whose figures count for nothing: there is no NVIDIA GPU here; "
            "if there should be one, python -m bench.doctor says why it is not found."
        )
        # a compiler takes half a minute a case, and threads of small steps wait for each other
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    print(f"{platform.name}; {dataset} images; {folder}", flush=True)
    lacks = list_lacks(platform)
    for why in dict.fromkeys(lacks.values()):
        print(f"left out: {', '.join(name for name in lacks if lacks[name] == why)} ({why})")
    file = folder / STATE
    identity = {name: getattr(platform.environment, name) for name in COMPARABLE}
    new = {"identity": identity | {"dataset": dataset}, "started_at": read_clock(), "phases": {}}
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else new
    bar = Progress(None, "part", deadline - time.monotonic())
    with stop_signals(lambda: None) as stopped, bar:
        for name, phase in go_through(folder, state["phases"], setup, deadline, stopped):
            state["phases"][name] = phase
            states = {one["state"] for one in state["phases"].values()}
            state["complete"] = name == "report" and states <= {*_ENDED}
            bar.end()
            replace_file(file, json.dumps(state, indent=2) + "\n")
            took, line = phase["seconds"], phase["line"]
            print(f"{name:<10} {phase['state']:<11} {took:4.0f} s  {line}", flush=True)
    if not state["complete"]:
        print("the same command goes on")
    elif not rehearsal:
        offer(folder, out)
    return 128 + stopped() if stopped() else int("failed" in states)


def offer(folder: Path, out: str) -> None:
    """Check a folder that is complete, and say how it is given to others: as a commit where there
    is a checkout, else as an archive beside it."""
    print(f"\npython -m bench.validate {shlex.quote(out)}", flush=True)
    if subprocess.run(
        [sys.executable, "-m", "bench.validate", str(folder)], check=False
    ).returncode:
        print(
            "To offer this card, first mend what is wrong: "
            f"{HOME}/blob/main/docs/card.md#check-a-folder-before-it-is-shared"
        )
    elif in_checkout():
        print(
            "To offer this card to others: git switch -c card, git add "
            f"{shlex.quote(out)}, git commit, and open a pull request with the form for a card."
        )
    else:
        archive = shutil.make_archive(str(folder), "zip", folder.parent, folder.name)
        print(
            f"To offer this card to others, attach {archive} to an issue: "
            f"{HOME}/issues/new?template=card.yml"
        )


def go_through(
    folder: Path,
    phases: Mapping[str, Any],
    setup: Setup,
    deadline: float,
    stopped: Callable[[], int],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the stages that are left, and yield what is to be kept of each: its state, seconds and
    last line."""
    log, stages = folder / "log.txt", list_stages(setup)
    for stage in stages:
        name, least = stage.name, stage.least_s
        before, now = phases.get(name, {"state": "left", "seconds": 0.0}), time.monotonic()
        if before["state"] in _ENDED and name not in ("doctor", "report"):
            continue
        others = [one.name for one in stages if one.name != name and one.name in phases]
        gaps = [other for other in others if phases[other]["state"] in OPEN]
        end, left = before["state"], max(0.0, deadline - now)
        asked, why = plan_stage(stage, setup.platform)
        if why:
            end, line = "absent", why
        elif stopped() or left < least:
            line = "stopped" if stopped() else f"needs about {least:g} s, {left:.0f} are left"
        elif name == "report" and gaps:
            line = f"waits for {', '.join(gaps)}"
        else:
            for part in (MAP,) if name == "scales" else ():
                (folder / part).unlink(missing_ok=True)  # a part of a map would be refused
            with watch(f"{name}: {shlex.join(asked)}"):
                end = run(["-m", *asked], log, deadline, stopped, least)
            output = log.read_text(errors="replace").rpartition(" ==\n")[2]
            line = clean(last_line(output))
            if name == "trust":  # a line for each of its checks
                print(*map(clean, output.splitlines()[:-1]), sep="\n")
        took = before["seconds"] + time.monotonic() - now
        yield name, {"state": end, "seconds": took, "line": line}


if __name__ == "__main__":
    leave(main())
