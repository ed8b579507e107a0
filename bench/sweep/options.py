"""The command line of a sweep, and the cases that it asks for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.axis import COMPILES, PARALLELS, Value
from bench.case import Case
from bench.data import DATASETS
from bench.environment import has_cuda
from bench.errors import UsageError, nearest
from bench.executors import ALL, EXECUTORS, Settings
from bench.flags import Parser, Rare, add_axes, read_axes
from bench.grid import MICRO_BATCH, fill_auto
from bench.models import MODELS
from bench.models.freezing import FREEZES
from bench.optimization import OPTIMIZERS, SCHEDULES
from bench.precision import FP8_RECIPES, OPT_LEVELS, POLICIES, PRECISIONS
from bench.preset import (
    Preset,
    default_preset,
    load_config,
    load_preset,
    preset_names,
    read_micro_batch,
)
from bench.record import Status
from bench.store.plans import Shard, parse_shard
from bench.sweep.schedule import (
    CHEAP_FRACTION,
    CHEAP_REPEATS,
    CHEAP_STEPS,
    REPEATS_S,
    default_repeats,
)
from bench.sweep.shards import choose_part, default_folder
from bench.wall.answer import Wall
from bench.wall.records import name_family


@dataclass
class Options:
    """The command line, parsed and checked; ``axes`` holds those given as flags."""

    axes: dict[str, list[Value]]
    preset: Preset
    out: Path | None
    data_dir: Path | None
    data_url: str | None
    repeats: int
    timeout_s: float
    wait_s: float
    retry: list[Status]
    executor: str
    mix: bool
    allow_shared: bool
    cold: bool
    command: str
    repeats_given: bool = True  # else as many of them are made as `schedule.Pace` allows
    same_seed: bool = False
    no_skip: bool = False
    verbose: bool = False
    trace: bool = False
    dry_run: bool = False
    list: bool = False
    lanes: int | None = None  # None for what is usual of the executor, ALL for all there are
    quiet: bool = False
    anchors: bool = True
    shard: Shard | None = None
    address: str | None = None

    @property
    def settings(self) -> Settings:
        return Settings(self.timeout_s, self.allow_shared, self.address, self.cold)

    @property
    def trains(self) -> bool:
        return EXECUTORS[self.executor].trains

    def resume(self, out: Path) -> str:
        given = "--out" in self.given
        return self.command if given else f"{self.command} --out {shlex.quote(str(out))}"

    @property
    def given(self) -> set[str]:
        """The flags of the command, and its other words."""
        return {word.partition("=")[0] for word in shlex.split(self.command)}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.sweep",
        usage="%(prog)s [--preset NAME | --config FILE] [--AXIS VALUE …] [--out DIR] […]",
        description="Train one epoch per case, over precisions, batch sizes and loss scales; "
        "record time, memory and learning.",
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--preset", metavar="NAME", help="a named grid of cases, see --list")
    what.add_argument(
        "--config", metavar="FILE", type=Path, help="your own grid of cases, a TOML file"
    )
    what.add_argument(
        "--repeats",
        metavar="N",
        help=f"fresh processes per case (default: 1; {CHEAP_REPEATS} where a --fraction up to "
        f"{CHEAP_FRACTION:g} or --steps up to {CHEAP_STEPS} are given, as far as the repeats take "
        f"at most {REPEATS_S / 60:g} minutes)",
    )
    _add_switch(
        what,
        "--same-seed",
        Rare("give all repeats one seed, to check determinism (default: seed, seed + 1, …)"),
    )
    add_axes(
        parser,
        "each takes one value or several, and overrides the preset's; a batch size may be a range "
        "of powers of two, 32..1024, or auto, the largest that fits in memory less a margin, or "
        "32..auto",
    )
    what.add_argument(
        "--micro-batch",
        metavar="M",
        help=Rare("compute each batch in as few micro-batches as hold at most M images each"),
    )
    how = add_running(parser)
    _add_switch(how, "--no-skip", Rare("run batch sizes above one that ran out of memory"))
    _add_switch(how, "--verbose", Rare("print each case's curve, as in 2019"))
    _add_switch(
        how,
        "--trace",
        Rare("profile, and keep each trace in the folder's traces/, for ui.perfetto.dev"),
    )
    _add_switch(
        how,
        "--no-anchors",
        Rare("with --lanes, do not measure whether the lanes are alike and disturb each other"),
    )
    how.add_argument(
        "--shard",
        metavar="K/N",
        help=Rare("run only part K of N, for job arrays; bench.merge joins the folders"),
    )
    _add_switch(how, "--dry-run", "print the plan and check it, but train nothing")
    _add_switch(how, "--list", "print presets, precisions, models, …")
    return parser


def add_running(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags that say how runs are made and kept, and of which images; their group."""
    how = parser.add_argument_group("how to measure")
    how.add_argument("--data-dir", metavar="DIR", type=Path, help="where CIFAR-10 is (./data)")
    how.add_argument("--data-url", metavar="URL", help=Rare("a mirror of the CIFAR-10 archive"))
    how.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder of the results (default: a new one in results/)",
    )
    how.add_argument(
        "--retry",
        nargs="+",
        metavar="STATUS",
        default=[],
        help="run cases that ended like this again",
    )
    how.add_argument(
        "--timeout",
        metavar="S",
        default="3600",
        help=Rare("seconds a phase of a case may take (3600)"),
    )
    how.add_argument(
        "--wait",
        metavar="S",
        default="0",
        help=Rare("seconds to wait for another sweep on --out (0)"),
    )
    _add_switch(how, "--mix", Rare("add to rows of another GPU, version or model"))
    _add_switch(how, "--allow-shared", "measure on a GPU that other processes use")
    _add_switch(
        how,
        "--cold",
        Rare(
            "start each worker as a new Python (default: fork it from a process that has imported "
            "torch, which takes seconds less)"
        ),
    )
    how.add_argument(
        "--lanes",
        metavar="N",
        help="cases to run at once, each on a GPU or share of the CPU cores: a number, all, or "
        "quiet, which uses all but one at a time (default: 1)",
    )
    how.add_argument(
        "--executor",
        metavar="NAME",
        default="subprocess",
        help=Rare(
            "subprocess, on this machine, or ray, on the nodes of a Ray cluster (subprocess)"
        ),
    )
    how.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=Rare("the Ray cluster to join (default: $RAY_ADDRESS, or a new one of this machine)"),
    )
    return how


def _add_switch(group: argparse._ArgumentGroup, flag: str, help: str) -> None:
    group.add_argument(flag, action="store_true", help=help)


def parse_arguments(argv: Sequence[str]) -> Options:
    given = build_parser().parse(argv)
    if given.preset and given.config:
        raise UsageError("--preset and --config are both given; use one")
    axes = read_axes(given)
    if given.micro_batch:
        axes[MICRO_BATCH] = [read_micro_batch(given.micro_batch, "--micro-batch")]
    if given.trace and not any(axes.setdefault("profile", [True])):
        raise UsageError("--trace keeps the traces of profiles; leave out --profile off")
    devices = axes.get("device") or ["cuda" if has_cuda() else "cpu"]
    name = given.preset or default_preset("cuda" if "cuda" in devices else "cpu")
    preset = load_config(given.config) if given.config else load_preset(name)
    repeats = (
        int(_parse_number("--repeats", given.repeats, whole=True))
        if given.repeats
        else default_repeats(axes.get("fraction", []), axes.get("steps", []))
    )
    options = read_running(given, axes, preset, shlex.join(["python", "-m", "bench.sweep", *argv]))
    shard = parse_shard(given.shard) if given.shard is not None else None
    return replace(
        options,
        shard=shard,
        out=options.out or (default_folder(shard, preset.name) if shard else None),
        repeats=repeats,
        repeats_given=bool(given.repeats),
        anchors=not given.no_anchors,
        **_take(given, "same_seed", "no_skip", "verbose", "trace", "dry_run", "list"),
    )


def read_running(
    given: argparse.Namespace, axes: dict[str, list[Value]], preset: Preset, command: str
) -> Options:
    """The options that the flags of `add_running` give, each case run once. Raises UsageError: a
    value is wrong."""
    if given.executor not in EXECUTORS:
        raise UsageError(f"--executor {given.executor!r}; {nearest(given.executor, [*EXECUTORS])}")
    if given.address and EXECUTORS[given.executor].here:
        raise UsageError("--address is that of a Ray cluster; give --executor ray with it")
    lanes, quiet = _parse_lanes(given.lanes)
    return Options(
        lanes=lanes,
        quiet=quiet,
        axes=axes,
        preset=preset,
        repeats=1,
        timeout_s=_parse_number("--timeout", given.timeout),
        wait_s=_parse_number("--wait", given.wait, low=0),
        retry=[_parse_status(text) for text in given.retry],
        command=command,
        **_take(given, "out", "data_dir", "data_url", "executor", "address"),
        **_take(given, "mix", "allow_shared", "cold"),
    )


def _take(given: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(given, name) for name in names}


def _parse_lanes(text: str | None) -> tuple[int | None, bool]:
    if text in (None, "all", "quiet"):
        return None if text is None else ALL, text == "quiet"
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 10_000):
        raise UsageError(f"--lanes {text[:40]!r}: give a whole number of at least 1, all or quiet")
    return int(text), False


def _parse_number(flag: str, text: str, low: float = 0.001, whole: bool = False) -> float:
    right = "a whole number of at least 1" if whole else f"a number of seconds, at least {low:g}"
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    if not (1 if whole else low) <= value < 1e9:
        raise UsageError(f"{flag} {text!r}: give {right}")
    return value


def _parse_status(text: str) -> Status:
    if text not in list(Status):
        raise UsageError(f"--retry {text!r}: {nearest(text, [str(s) for s in Status])}")
    return Status(text)


def choose_cases(options: Options) -> list[Case]:
    """Expand preset and flags to cases, without those whose batch size is yet to be found; the
    device is the GPU where there is one. Raises UsageError: a loss scale is given that no chosen
    precision uses."""
    return plan_cases(options, {}).cases


@dataclass
class Plan:
    """The cases of a sweep as far as they are known.

    ``searched`` are the families whose largest batch is asked for, each with ``auto`` or
    ``32..auto`` as it was given; ``unknown`` those of them that no search has ended for.
    """

    cases: list[Case] = field(default_factory=list)
    searched: list[tuple[Case, str]] = field(default_factory=list)
    unknown: list[Case] = field(default_factory=list)

    def settle(self, settle: Callable[[Case], Case]) -> Plan:
        """The same, with what workloads decide, once they were examined."""
        searched = [(settle(case), text) for case, text in self.searched]
        unknown = [name_family(case) for case, _ in searched]
        return Plan(list(dict.fromkeys(map(settle, self.cases))), searched, unknown)

    @property
    def families(self) -> list[Case]:
        return list(dict.fromkeys(name_family(case) for case, _ in self.searched))

    @property
    def unsized(self) -> list[Case]:
        """What is searched, and the cases that are measured then, but for their batch size."""
        return [*self.families, *(case for case, _ in self.searched)]


def plan_cases(
    options: Options, walls: Mapping[Case, Wall], settle: Callable[[Case], Case] = lambda case: case
) -> Plan:
    """Expand preset and flags to cases, with the largest batches that are known.

    Args:
        walls: what searches found, by `bench.wall.records.name_family`.
        settle: fills in what a workload decides, once it was examined.

    Raises UsageError: settings do not go together, or nothing can be searched on a CPU because
    there is no memory limit.
    """
    plan = Plan()

    def find(case: Case, text: str) -> Sequence[int]:
        if not is_mine(case):
            return []
        if case.device == "cpu" and case.memory_limit is None:
            raise UsageError(
                "the largest batch is not looked for on a CPU without a limit, because its system "
                "kills what takes too much; give one, such as --memory-limit 2GiB"
            )
        case = settle(case)
        plan.searched.append((case, text))
        family = name_family(case)
        wall = walls.get(family)
        if wall is None or wall.ending is None:
            plan.unknown.append(family)
            return []
        if wall.largest is None or wall.recommended is None:
            return []
        return fill_auto(text, wall.largest, wall.recommended)

    device, axes = "cuda" if has_cuda() else "cpu", options.axes
    if any(isinstance(number, int) and number > 1 for number in axes.get("epochs", [])):
        # several epochs are whole ones, also where the preset measures a part of one
        axes = {"fraction": [Case.fraction], "steps": [Case.steps], **axes}
    is_mine = choose_part(
        options.shard, lambda find: options.preset.cases(axes, {"device": [device]}, find)
    )
    planned = options.preset.cases(axes, {"device": [device]}, find)
    plan.cases = list(dict.fromkeys(settle(case) for case in planned if is_mine(case)))
    return plan


def print_registries() -> int:
    sections = {
        "presets": {name: load_preset(name).description for name in preset_names()},
        "precisions": {name: precision.help for name, precision in PRECISIONS.items()},
        "dynamic loss scales": {name: policy.help for name, policy in POLICIES.items()},
        "opt levels of fp16-apex": {name: level.help for name, level in OPT_LEVELS.items()},
        "recipes of fp8": {name: recipe.help for name, recipe in FP8_RECIPES.items()},
        "optimizers": {name: kind.help for name, kind in OPTIMIZERS.items()},
        "schedules": SCHEDULES,
        "how the network is compiled (--compile)": COMPILES,
        "what --freeze takes": FREEZES,
        "how several GPUs train (--parallel)": PARALLELS,
        "models": {
            **MODELS,
            "package.module:factory": "your own torch.nn.Module",
            "timm:NAME": "a network of the package timm",
        },
        "datasets": DATASETS,
        "workloads": {
            "images": "the network of --model on the images of --dataset",
            "package.module:factory": "your own bench.workloads.Workload",
        },
    }
    for title, entries in sections.items():
        print(f"{title}:")
        for name, help in entries.items():
            print(f"  {name:<24}{help}")
    return 0
