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
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.data import find_layout
from bench.environment.host import has_cuda
from bench.environment.machine import probe
from bench.errors import UsageError
from bench.flags import Parser, command, describe, parse_number
from bench.gpu.nvml import find_cards
from bench.precision import find_apex, find_version
from bench.processes import leave, stop_signals
from bench.record import COMPARABLE
from bench.scale_map import MAP
from bench.sweep.folder import default_out
from bench.text import clean, last_line, read_clock, replace_file

ROOT, STATE = Path(__file__).parents[1], "card.json"
ENDED, OPEN = ("done", "absent"), ("left", "cut", "interrupted")  # what failed is run again
GRACE_S = 8.0  # a sweep stopped by SIGINT ends its worker in 3 s

STEPS = """\
doctor     12 -           bench.doctor --out {out} {data}
rtx-titan  30 -           {nine} {part} --repeats 1
precisions 5  -           {sweep} {part} {six}
plain      5  -           {sweep} {part} {all} --profile
autotuned  60 GPU         {sweep} {part} {all} --cudnn-benchmark
compiled   60 -           {sweep} {part} {all} --compile
both       60 GPU         {sweep} {part} {all} --compile --cudnn-benchmark
epochs     60 -           {sweep} --evaluate {whole}
as-2019    60 GPU         {run} --preset rtx-titan --repeats 1 {part}
repeats    20 -           {headline} {part} --repeats 3
tests      30 checkout    pytest -v -p no:cacheprovider -m gpu tests/gpu
scales     60 -           bench.scales {into} {images} {map}
wall-21GiB 30 -           {fit} {limit}
wall       30 GPU         {fit}
graphs     20 GPU         {sweep} {part} --precision fp16 --batch-size 128 --cuda-graphs
apex       30 apex        {sweep} {part} --precision fp16-apex fp16 --batch-size 256 --optimizer sgd
fp8        60 fp8         {fp8} {part} --precision bf16-amp fp8 --batch-size 16 --compile
loader     30 -           {sweep} {part} {fp16} --loader torch --workers 0 4
checkpoint 30 -           {sweep} --steps 20 {fp16} --checkpoint
ddp        30 -           {sweep} --steps 20 {fp16} --parallel ddp --world-size 1
ddp-2      30 2-GPUs      {sweep} --steps 20 {fp16} --parallel ddp --world-size 2
bare-loop  60 checkout    benchmarks.overhead --device {device}
report     20 -           bench.report {out} -o {out}/report.html
"""
"""Name, the least seconds that are worth starting it with, what it needs, and the command."""

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
    "limit": "--memory-limit 21GiB",
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

ABSENT: dict[str, Callable[[], bool]] = {
    "-": lambda: False,
    "GPU": lambda: not has_cuda(),
    "apex": lambda: not (has_cuda() and find_apex()),
    "fp8": lambda: not (has_cuda() and find_version("torchao")),
    "2-GPUs": lambda: len(find_cards()[0]) < 2,
    "checkout": lambda: not ((ROOT / "tests").is_dir() and find_spec("pytest")),
}
"""Whether a need of `STEPS` is not met here; checkout is one of the repository, with pytest."""


def run(command: Sequence[str], log: Path, until: float, stopped: Callable[[], int]) -> str:
    """Run Python, but not beyond a time.monotonic() or a signal. Return how it ended."""
    end = ""
    with log.open("a") as file:
        print(f"\n== {shlex.join(command)} ==", file=file, flush=True)
        options: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "cwd": ROOT}
        options["start_new_session"] = True  # so that Ctrl-C reaches it only from here
        child = subprocess.Popen([sys.executable, *command], **options)
    while child.poll() is None:
        if not end and (stopped() or time.monotonic() > until):
            end, until = "interrupted" if stopped() else "cut", time.monotonic() + GRACE_S
            child.send_signal(signal.SIGINT)
        elif time.monotonic() > until:
            os.killpg(child.pid, signal.SIGKILL)
        time.sleep(0.1)
    # the doctor's 1 is an answer: something makes numbers unreliable
    fine = child.returncode in ((0, 1) if "bench.doctor" in command else (0,))
    return end or ("done" if fine else "failed")


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
    words = (REHEARSAL if rehearsal else CARD) | {"out": out, "data": images, "device": device}
    words["images"] = f"--dataset {dataset} {images}"
    words["into"] = f"--out {out} --device {device}" + " --allow-shared" * given.allow_shared
    if rehearsal:
        print(
            "A rehearsal on the CPU, whose figures count for nothing: there is no NVIDIA GPU here; "
            "if there should be one, python -m bench.doctor says why it is not found."
        )
        # a compiler takes half a minute a case, and threads of small steps wait for each other
        os.environ |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    print(f"{platform.name}; {dataset} images; {folder}", flush=True)
    file, log = folder / STATE, folder / "log.txt"
    identity = {name: getattr(platform.environment, name) for name in COMPARABLE}
    new = {"identity": identity | {"dataset": dataset}, "started_at": read_clock(), "phases": {}}
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else new
    phases = state["phases"]
    with stop_signals(lambda: None) as stopped:
        for name, least, need, text in (line.split(maxsplit=3) for line in STEPS.splitlines()):
            before, now = phases.get(name, {"state": "left", "seconds": 0.0}), time.monotonic()
            if before["state"] in ENDED and name not in ("doctor", "report"):
                continue
            gaps = [n for n, p in phases.items() if n != name and p["state"] in OPEN]
            end, left = before["state"], max(0.0, deadline - now)
            if ABSENT[need]():
                end, said = "absent", f"{need} is not here"
            elif stopped() or left < float(least):
                said = "stopped" if stopped() else f"needs about {least} s, {left:.0f} are left"
            elif name == "report" and gaps:
                said = f"waits for {', '.join(gaps)}"
            else:
                for part in (MAP,) if name == "scales" else ():
                    (folder / part).unlink(missing_ok=True)  # a part of a map would be refused
                while "{" in text:
                    text = text.format_map(words)
                end = run(["-m", *shlex.split(text)], log, deadline, stopped)
                said = clean(last_line(log.read_text(errors="replace").rpartition(" ==\n")[2]))
            took = before["seconds"] + time.monotonic() - now
            phases[name] = {"state": end, "seconds": took, "line": said}
            states = {phase["state"] for phase in phases.values()}
            state["complete"] = name == "report" and states <= {*ENDED}
            replace_file(file, json.dumps(state, indent=2) + "\n")
            print(f"{name:<10} {end:<11} {took:4.0f} s  {said}", flush=True)
    print(f"python -m bench.validate {out}" if state["complete"] else "the same command goes on")
    return 128 + stopped() if stopped() else int("failed" in states)


if __name__ == "__main__":
    leave(main())
