"""`python -m bench.card`: run every measurement of a new GPU, nine minutes at a time.

What a reader gains most by comes first; the same command goes on. Without a GPU it rehearses: every
command runs on the CPU with small inputs, and the figures are none.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.base.errors import UnsupportedError, UsageError
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
    find_version,
    refuse_apex,
)
from bench.schema.record import COMPARABLE
from bench.sweep.preflight import default_out
from bench.workers.examination import Platform, probe
from bench.workers.executors import Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.job import Lane

ROOT, STATE = Path(__file__).parents[1], "card.json"
ENDED, OPEN = ("done", "absent"), ("left", "cut", "interrupted")  # what failed is run again
GRACE_S = 8.0  # a sweep stopped by SIGINT ends its worker in 3 s

STEPS = """\
doctor     12  -           bench.doctor --out {out} {data}
trust      60  -           bench.trust --out {out}/trust --device {device} {shared}
rtx-titan  30  -           {nine} {part} --repeats 1
precisions 5   -           {sweep} {part} {six}
tests      30  checkout    pytest -v -p no:cacheprovider -m gpu tests/gpu
plain      5   -           {sweep} {part} {all} --profile
autotuned  60  GPU         {sweep} {part} {all} --cudnn-benchmark
compiled   80  compiler    {sweep} {part} {all} --compile
both       110 GPU+compiler {sweep} {part} {all} --compile --cudnn-benchmark
epochs     60  -           {sweep} --evaluate {whole}
as-2019    60  GPU         {run} --preset rtx-titan --repeats 1 {part}
repeats    20  -           {headline} {part} --repeats 3
scales     60  -           bench.scales {into} {images} {map}
wall-limit 30  -           {fit} {limit}
wall       30  GPU         {fit}
graphs     20  GPU         {sweep} {part} --precision fp16 --batch-size 128 --cuda-graphs
apex       30  apex        {sweep} {part} {apex} --batch-size 256 --optimizer sgd
fp8        80  fp8         {fp8} {part} --precision bf16-amp fp8 --batch-size 16 --compile
loader     30  -           {sweep} {part} {fp16} --loader torch --workers 0 4
checkpoint 30  -           {sweep} --steps 20 {fp16} --checkpoint
ddp        30  -           {sweep} --steps 20 {fp16} --parallel ddp --world-size 1
ddp-2      30  two-GPUs    {sweep} --steps 20 {fp16} --parallel ddp --world-size 2
bare-loop  60  checkout    benchmarks.overhead --device {device}
report     20  -           bench.report {out} -o {out}/report.html
"""
"""Name, the least seconds that are worth starting it with, or another case of it, what it needs,
and the command. A compiled case took 70 to 78 s on an H200, an autotuned one up to 33 s more."""

CARD = {
    "run": "bench.sweep {into} {images} --retry error killed timeout --no-report",
    "sweep": "{run} --preset precision --repeats 1",
    "nine": "{run} --preset rtx-titan --cudnn-benchmark off",
    "headline": "{nine} --precision fp32 fp16 --batch-size 256 --loss-scale 128",
    "six": "--batch-size 256",
    "fp8": "bench.sweep {into} --no-report --repeats 1 --workload examples.transformer:gpt",
    "fit": "bench.fit {into} {images} --retry error killed timeout --optimizer adamw",
    "part": "--fraction 0.2 --until 5%",
    "all": "--precision fp32 tf32 fp16 fp16-amp bf16 bf16-amp --batch-size 256 512",
    "whole": "--precision fp16 tf32 fp32 --batch-size 256",
    "fp16": "--precision fp16 --batch-size 256",
    "map": "--precision fp16 fp16-amp",
    "apex": "--precision fp16-apex fp16",
    "limit": "--memory-limit {limit_gib}GiB",
}
_SMALL = "--model dpn-small --precision fp32 --batch-size 8"
REHEARSAL = CARD | {
    "nine": f"{{run}} {_SMALL}",
    "headline": f"{{run}} {_SMALL}",
    "six": _SMALL,
    "fp16": _SMALL,
    "all": f"{_SMALL} 16",
    "whole": f"{_SMALL} --steps 2",
    "part": "--steps 2",
    "map": "--batch-size 8 --steps 1 --scales 1 128",
    "limit": "--memory-limit 560MiB --model dpn-small --precision fp32 --step 48",
}
"""What the words in `STEPS` stand for, on a GPU and on a CPU."""

TITAN_GIB = 21
"""What is left of a TITAN RTX, the card of the page of 2019, for a network."""


def _find_no_compiler(platform: Platform) -> str:
    least = (7, 0)  # Triton's
    told = platform.environment.capability
    old = told is not None and tuple(map(int, told.split("."))) < least
    return "torch.compile needs compute capability 7.0 or later" if old else ""


def _find_no_pair(platform: Platform) -> str:
    try:
        SubprocessExecutor(Settings()).gather(Lane(), "cuda", 2)
    except UnsupportedError as error:
        return str(error)
    return ""


def _find_no_fp8(platform: Platform) -> str:
    lack = platform.refuse(PRECISIONS["fp8"])
    return lack or ("" if find_version("torchao") else FP8_INSTALL)


def _find_no_checkout(platform: Platform) -> str:
    there = (ROOT / "tests").is_dir() and find_spec("pytest")
    return "" if there else "it is in a checkout of the repository, and needs pytest"


ABSENT: dict[str, Callable[[Platform], str]] = {
    "-": lambda platform: "",
    "GPU": lambda platform: "" if platform.environment.gpu else "it is of an NVIDIA GPU",
    "apex": lambda p: refuse_apex(find_apex(), "cuda" if p.environment.gpu else "cpu"),
    "fp8": _find_no_fp8,
    "compiler": _find_no_compiler,
    "two-GPUs": _find_no_pair,
    "checkout": _find_no_checkout,
}
"""Why a need of `STEPS` is not met on a platform; empty if it is."""


def list_lacks(platform: Platform) -> dict[str, str]:
    """Return the precisions that a card cannot run, or only emulates, with the reasons."""
    formats = {name: PRECISIONS[name] for name in TRAINED}
    found = {n: platform.refuse(p) or platform.find_emulation(p) for n, p in formats.items()}
    return {name: why for name, why in found.items() if why} if platform.environment.gpu else {}


def choose_words(platform: Platform, **told: str) -> dict[str, str]:
    """Return what the words of `STEPS` stand for on a platform."""
    words = (CARD if platform.environment.gpu else REHEARSAL) | told
    total = (platform.environment.gpu_memory_bytes or 0) / GIB
    # nine tenths of a smaller card, since a limit above its memory limits nothing
    return words | {"limit_gib": str(min(TITAN_GIB, int(0.9 * total)) if total else TITAN_GIB)}


def plan_step(
    need: str, text: str, words: Mapping[str, str], platform: Platform
) -> tuple[list[str], str]:
    """Return the command of a step without the precisions that the card lacks; or why there is
    none."""
    lacks = list_lacks(platform)
    if why := next(filter(None, (ABSENT[each](platform) for each in need.split("+"))), ""):
        return [], why
    while "{" in text:
        text = text.format_map(words)
    flags = shlex.split(text)
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
        options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": ROOT}
        options["start_new_session"] = True  # so that Ctrl-C reaches it only from here
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
    minutes = parse_number("--minutes", given.minutes, "a number above 0")
    deadline = begun + 60 * minutes - GRACE_S
    rehearsal = not has_cuda()
    if rehearsal and has_card():
        raise UsageError("torch finds no GPU, though there is one; python -m bench.doctor says why")
    device = "cpu" if rehearsal else "cuda"
    data = (given.data_dir or Path("data")).absolute()
    real = not rehearsal and (given.data_dir or find_layout(data))
    dataset = "cifar10" if real else "synthetic"
    images = f"--data-dir {shlex.quote(str(data))}" if real else ""
    platform = probe(device)
    # a folder for each card and day
    name = "rehearsal-" * rehearsal + default_out({"": platform}).name.rpartition("-")[0]
    folder = given.out.absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    out = shlex.quote(str(folder).removeprefix(f"{ROOT}{os.sep}"))
    shared = "--allow-shared" * given.allow_shared
    words = choose_words(
        platform,
        **{"out": out, "data": images, "device": device, "shared": shared},
        images=f"--dataset {dataset} {images}",
        into=f"--out {out} --device {device} {shared}",
    )
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
        for name, phase in go_through(folder, state["phases"], words, platform, deadline, stopped):
            state["phases"][name] = phase
            states = {one["state"] for one in state["phases"].values()}
            state["complete"] = name == "report" and states <= {*ENDED}
            bar.end()
            replace_file(file, json.dumps(state, indent=2) + "\n")
            took, said = phase["seconds"], phase["line"]
            print(f"{name:<10} {phase['state']:<11} {took:4.0f} s  {said}", flush=True)
    print(f"python -m bench.validate {out}" if state["complete"] else "the same command goes on")
    return 128 + stopped() if stopped() else int("failed" in states)


def go_through(
    folder: Path,
    phases: Mapping[str, Any],
    words: Mapping[str, str],
    platform: Platform,
    deadline: float,
    stopped: Callable[[], int],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run the steps that are left, and yield what is to be kept of each: its state, seconds and
    last line."""
    log, steps = folder / "log.txt", [line.split(maxsplit=3) for line in STEPS.splitlines()]
    for name, least, need, text in steps:
        before, now = phases.get(name, {"state": "left", "seconds": 0.0}), time.monotonic()
        if before["state"] in ENDED and name not in ("doctor", "report"):
            continue
        others = [other for other, *_ in steps if other != name and other in phases]
        gaps = [other for other in others if phases[other]["state"] in OPEN]
        end, left = before["state"], max(0.0, deadline - now)
        asked, why = plan_step(need, text, words, platform)
        if why:
            end, said = "absent", why
        elif stopped() or left < float(least):
            said = "stopped" if stopped() else f"needs about {least} s, {left:.0f} are left"
        elif name == "report" and gaps:
            said = f"waits for {', '.join(gaps)}"
        else:
            for part in (MAP,) if name == "scales" else ():
                (folder / part).unlink(missing_ok=True)  # a part of a map would be refused
            with watch(shlex.join(["python", "-m", *asked])):
                end = run(["-m", *asked], log, deadline, stopped, float(least))
            told = log.read_text(errors="replace").rpartition(" ==\n")[2]
            said = clean(last_line(told))
            if name == "trust":  # a line for each of its checks
                print(*map(clean, told.splitlines()[:-1]), sep="\n")
        took = before["seconds"] + time.monotonic() - now
        yield name, {"state": end, "seconds": took, "line": said}


if __name__ == "__main__":
    leave(main())
