"""The command line of a loss-scale map."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.axis import axis_flag
from bench.case import Case, format_value, parse_value
from bench.data import find_layout
from bench.environment.host import has_cuda
from bench.errors import UsageError, choose, nearest
from bench.flags import OF_OTHER_IMAGES, OF_SWEEPS, Parser, parse_number, refuse_beside_workload
from bench.precision import PRECISIONS
from bench.scale_map import TOLERANCE, Way
from bench.scales.formats import FORMATS, to_float32
from bench.workloads import IMAGES, OWN

POWERS = tuple(2.0**k for k in range(25))
"""The default scales: the powers of two from 1 to 2^24, which round nothing as factors."""

AT = (1, 5, 20)
"""The default steps: the first, and two after the weights have changed."""

RECOMMENDED = "recommended"
"""Stands for the scale that the map recommends, among the loss scales to train with."""

TRAIN = ("1", "128", RECOMMENDED, "dynamic")
"""The loss scales to train with by default, if gradients are rounded."""

_HALVES = [
    name
    for name, p in PRECISIONS.items()
    if (p.autocast or p.weights) != "float32" and not (p.apex or p.float8 or p.pure)
]
NARROW = tuple(dict.fromkeys([*_HALVES, *FORMATS]))
"""Precisions and formats whose gradients can flush and overflow."""

_DESCRIPTION = """\
Find out which loss scales are safe: train for some steps, and count for each
scale how many gradient values are flushed to zero and whether any overflow.
A network is trained on images of 3x32x32; --workload brings its own data.
"""

_EPILOG = """\
ways:
  trained  The precision itself computes the gradients. Default on a GPU.
  rounded  The gradients are computed in fp32, then scaled and rounded to the
           precision's format. Default on a CPU. What is lost inside a layer
           is not counted.

A precision is fp16, fp16-amp, bf16 or bf16-amp. With --way rounded, the fp8
formats e4m3 and e5m2 can be given too. A scale is taken as float32, as torch
takes it.
"""


@dataclass(frozen=True)
class Question:
    """What to measure for one model or workload at one batch size."""

    case: Case  # what is trained, in fp32
    precisions: tuple[str, ...]
    way: Way
    steps: int
    at: tuple[int, ...]  # steps, from 1 and rising, at which gradients are counted
    scales: tuple[float, ...]  # rising, and each a float32 number
    train: tuple[str, ...]  # loss scales to train with, as flags spell them, or `RECOMMENDED`
    tolerance: float  # see `bench.scale_map.find_window`


@dataclass(frozen=True)
class Options:
    questions: tuple[Question, ...]
    data_dir: Path | None
    allow_shared: bool
    out: Path
    command: str


def build_parser() -> Parser:
    texts = {"description": _DESCRIPTION, "epilog": _EPILOG}
    absent = OF_OTHER_IMAGES | OF_SWEEPS
    parser = Parser(prog="python -m bench.scales", absent=absent, **texts)
    add = parser.add_argument_group("what to look at").add_argument
    add("--precision", nargs="+", default=["fp16"], metavar="NAME", help="number formats (fp16)")
    add("--batch-size", nargs="+", default=["128"], metavar="N", help="images per step (128)")
    add("--model", nargs="+", metavar="NAME", help="networks (dpn92 on a GPU, else dpn-small)")
    own = "your own workloads, package.module:factory, in place of networks"
    add("--workload", nargs="+", metavar="NAME", help=own)
    some = "loss scales, such as 128 or 2^16 (2^0 to 2^24)"
    add("--scales", nargs="+", metavar="S", help=some)
    at = " ".join(map(str, AT))
    counted = f"steps at which gradients are counted ({at})"
    add("--at", nargs="+", metavar="STEP", default=at.split(), help=counted)
    add("--steps", metavar="N", help="steps of each training (the last of --at)")
    train = (
        "loss scales to train with for --steps: numbers, 'dynamic' or 'recommended' "
        f"({' '.join(TRAIN)}; with --way trained, every scale)"
    )
    add("--train", nargs="*", metavar="SCALE", help=train)
    share = (
        "share of the values that a safe scale may flush to zero beyond the best scale "
        f"({TOLERANCE:g})"
    )
    add("--tolerance", default=str(TOLERANCE), metavar="SHARE", help=share)
    add("--lr", default=str(Case.lr), metavar="LR", help=f"learning rate ({Case.lr:g})")
    add("--seed", default="0", metavar="N", help="seed of weights and batches (0)")
    add = parser.add_argument_group("how").add_argument
    add("--way", metavar="WAY", help="how gradients are computed, see below")
    add("--device", metavar="NAME", help="cuda or cpu (cuda if there is one)")
    images = "cifar10 or synthetic (cifar10 if --data-dir holds it)"
    add("--dataset", metavar="NAME", help=images)
    add("--data-dir", type=Path, metavar="DIR", help="where CIFAR-10 is (./data)")
    add("--allow-shared", action="store_true", help="run on a GPU that others use")
    out = "folder to write the map to (default: results/scales-TIME)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--show", type=Path, metavar="DIR", help="show the map of a folder, and end")
    return parser


def read_options(given: argparse.Namespace) -> Options:
    """Check the command line, without torch. Raises UsageError: a flag or value is wrong."""
    device = _axis("device", given.device or ("cuda" if has_cuda() else "cpu"))
    way = Way.TRAINED if device == "cuda" else Way.ROUNDED
    if given.way is not None:
        way = choose("--way", given.way, {str(way): way for way in Way})
    scales = tuple(sorted({_parse_scale(text) for text in given.scales or []})) or POWERS
    at = tuple(sorted({_parse_step("--at", text) for text in given.at}))
    steps = _parse_step("--steps", given.steps) if given.steps else at[-1]
    if steps < at[-1]:
        raise UsageError(f"--steps {steps}: is below step {at[-1]} of --at; give at least {at[-1]}")
    precisions = tuple(dict.fromkeys(_parse_precision(n, way) for n in given.precision))
    subjects = _read_subjects(given, device)
    train = _parse_train(given.train, way, scales)
    tolerance = parse_number(
        "--tolerance", given.tolerance, "a share from 0 to 1, such as 0.01", lambda n: 0 <= n <= 1
    )
    lr, seed = _axis("lr", given.lr), _axis("seed", given.seed)
    sizes = dict.fromkeys(_axis("batch_size", text) for text in given.batch_size)
    about = (precisions, way, steps, at, scales, train, tolerance)
    questions = tuple(
        Question(replace(subject, batch_size=size, lr=lr, seed=seed), *about)
        for subject in subjects
        for size in sizes
    )
    out = given.out or Path("results") / f"scales-{datetime.now():%Y%m%d-%H%M%S}"
    return Options(questions, given.data_dir, given.allow_shared, out, given.invocation)


def _read_subjects(given: argparse.Namespace, device: str) -> list[Case]:
    flags = {name: getattr(given, name) for name in ("workload", "model", "dataset")}
    refuse_beside_workload({name: value for name, value in flags.items() if value})
    workloads = [_axis("workload", name) for name in given.workload or []]
    if own := [name for name in workloads if name != IMAGES]:
        return [Case(name, OWN, workload=name, device=device) for name in dict.fromkeys(own)]
    found = "cifar10" if given.data_dir or find_layout(None) else "synthetic"
    dataset = _axis("dataset", given.dataset) if given.dataset else found
    models = given.model or ["dpn92" if device == "cuda" else "dpn-small"]
    names = dict.fromkeys(_axis("model", name) for name in models)
    return [Case(name, dataset, device=device) for name in names]


def _axis(name: str, text: str) -> Any:
    return parse_value(name, text, axis_flag(name))


def _parse_precision(text: str, way: Way) -> str:
    known, why = PRECISIONS.get(text), ""
    if known and known.apex:
        why = "apex computes the gradients of fp16; use fp16"
    elif known and known.float8:
        why = (
            "torchao scales each tensor by itself, so no loss scale is needed; what its formats "
            "lose is shown by e4m3 and e5m2, with --way rounded"
        )
    elif known and text not in NARROW:
        why = f"its gradients are fp32 and need no scale; right values: {', '.join(NARROW)}"
    elif text not in NARROW:
        why = nearest(text, list(NARROW))
    elif not known and way is Way.TRAINED:
        why = "no network trains in it here; use --way rounded"
    if why:
        raise UsageError(f"--precision {text!r}: {why}")
    return text


def _parse_scale(text: str) -> float:
    base, power, exponent = text.partition("^")
    try:
        scale = to_float32(float(base) ** int(exponent) if power else float(text))
    except (ValueError, OverflowError, ZeroDivisionError):
        scale = 0.0
    if not 2.0**-126 <= scale < float("inf"):
        raise UsageError(f"--scales {text[:60]!r}: give numbers above 0, such as 128 or 2^16")
    return scale


def _parse_step(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text)):
        raise UsageError(f"{flag} {text[:60]!r}: give whole numbers from 1 to 999999")
    return int(text)


def _parse_train(texts: Sequence[str] | None, way: Way, scales: Sequence[float]) -> tuple[str, ...]:
    if texts is None:
        return TRAIN if way is Way.ROUNDED else (*map(format_value, scales), "dynamic")

    def spell(text: str) -> str:
        if text == RECOMMENDED:
            return text
        scale = _parse_scale(text) if "^" in text else text
        return format_value(parse_value("loss_scale", scale, "--train"))

    return tuple(dict.fromkeys(map(spell, texts)))
