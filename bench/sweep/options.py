"""The command line of a sweep, and the cases that it asks for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from bench.base.errors import UsageError, choose, nearest
from bench.base.origin import EXECUTORS
from bench.base.processes import provide_modules
from bench.base.text import count
from bench.machine.host import has_cuda, list_devices
from bench.networks.data import SYNTHETIC, find_layout
from bench.results.store.rows import Shard, parse_shard
from bench.schema.axis import Value
from bench.schema.case import AXES, Case
from bench.schema.flags import (
    AdvancedHelp,
    Parser,
    add_axes,
    add_flag,
    parse_number,
    parse_whole,
    read_axes,
)
from bench.schema.grid import fill_auto
from bench.schema.preset import Preset, default_preset, load_config, load_preset
from bench.schema.record import COLUMNS, Status
from bench.sweep.largest_batch import LargestBatch, name_family
from bench.workers.executors import ALL, Settings

CHEAP_FRACTION = 0.2
"""Cases of at most this fraction of an epoch are repeated by default."""

CHEAP_STEPS = 20
"""Cases of at most this many steps are too: about a fifth of 50,000 images at batch size 512."""

CHEAP_REPEATS = 3


@dataclass
class Options:
    """The command line, parsed and checked; ``axes`` are those given as flags. Fields have the
    names of flags, not all of which every command has."""

    axes: dict[str, list[Value]] = field(default_factory=dict)
    preset: Preset = field(default_factory=lambda: Preset("", "", ()))
    invocation: str = ""
    out: Path | None = None
    data_dir: Path | None = None
    retry: list[Status] = field(default_factory=list)
    timeout_s: float = 3600.0
    mix: bool = False
    allow_shared: bool = False
    cold: bool = False
    no_steps: bool = False
    executor: str = "subprocess"
    address: str | None = None
    lanes: int | None = None  # None for the executor's default, ALL for all
    repeats: int = 1
    same_seed: bool = False
    trace: bool = False
    dry_run: bool = False
    list: bool = False
    shard: Shard | None = None
    report: bool = True

    @property
    def settings(self) -> Settings:
        return Settings(self.timeout_s, self.allow_shared, self.address, self.cold)

    @property
    def here(self) -> bool:
        """Whether cases run on this machine."""
        return EXECUTORS[self.executor].here

    def resume(self, out: Path) -> str:
        """The command that resumes this one, in a folder that was chosen by default too."""
        given = any(word.partition("=")[0] == "--out" for word in shlex.split(self.invocation))
        return self.invocation if given else f"{self.invocation} --out {shlex.quote(str(out))}"


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m bench.sweep",
        usage="%(prog)s [--preset NAME | --config FILE] [--AXIS VALUE …] [--out DIR] […]",
        description="Train one epoch per case, over precisions, batch sizes and loss scales; "
        "record time, memory and learning.",
    )
    what = parser.add_argument_group("what to measure")
    add_flag(what, "--preset", "NAME", "a named grid of cases, see --list")
    add_flag(what, "--config", "FILE", "your own grid of cases, a TOML file", _read_path)
    add_flag(
        what,
        "--repeats",
        "N",
        f"fresh processes per case (default: 1; {CHEAP_REPEATS} with a --fraction up to "
        f"{CHEAP_FRACTION:g} or --steps up to {CHEAP_STEPS}, and for the cases of a short preset)",
        partial(parse_whole, least=1),
    )
    _add_switch(
        what,
        "--same-seed",
        AdvancedHelp(
            "give all repeats one seed, to check determinism (default: seed, seed + 1, …)"
        ),
    )
    add_axes(
        parser,
        "each takes one value or several, and overrides the preset's; a batch size may be a range "
        "of powers of two, 32..1024, or auto, the largest that fits in memory less a margin, or "
        "32..auto",
    )
    how = add_running(parser)
    _add_switch(
        how,
        "--trace",
        AdvancedHelp("profile, and keep each trace in the folder's traces/, for ui.perfetto.dev"),
    )
    how.add_argument(
        "--shard",
        metavar="K/N",
        type=parse_shard,
        help=AdvancedHelp(
            "run only part K of N, for job arrays; a folder that holds all parts is read as one "
            "sweep"
        ),
    )
    how.add_argument(
        "--no-report",
        dest="report",
        action="store_false",
        help=AdvancedHelp("print no report when all is measured"),
    )
    _add_switch(how, "--dry-run", "print the plan and check it, but train nothing")
    _add_switch(how, "--list", "print presets, precisions, models, …")
    return parser


def add_running(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags for running and storing cases, and for images. Return their group."""
    how = parser.add_argument_group("how to measure")
    add = partial(add_flag, how)
    add("--data-dir", "DIR", "where CIFAR-10 is (./data)", _read_path)
    add("--out", "DIR", "folder of the results (default: a new one in results/)", _read_path)
    how.add_argument(
        "--retry",
        nargs="+",
        metavar="STATUS",
        type=lambda text: choose("--retry", text, {str(status): status for status in Status}),
        default=[],
        help="run cases with these outcomes again, such as oom",
    )
    add(
        "--timeout",
        "S",
        AdvancedHelp("seconds a phase of a case may take (3600)"),
        partial(
            parse_number,
            right="a number of seconds, at least 0.001",
            fits=lambda seconds: 0.001 <= seconds < 1e9,
        ),
        3600.0,
        "timeout_s",
    )
    _add_switch(how, "--mix", AdvancedHelp("add to rows of another GPU, version or model"))
    _add_switch(how, "--allow-shared", "measure on a GPU that other processes use")
    _add_switch(
        how,
        "--cold",
        AdvancedHelp(
            "start each worker as a new Python process (default: fork it from one that has "
            "imported torch, which takes seconds less)"
        ),
    )
    _add_switch(
        how,
        "--no-steps",
        AdvancedHelp("leave a --command alone: look for no steps of torch's optimizers in it"),
    )
    add(
        "--lanes",
        "N",
        "cases to run at once, each on a GPU or share of the CPU cores: a number, or all; the GPUs "
        "must be of one kind (default: 1)",
        _parse_lanes,
    )
    by = "; ".join(f"{name}: {kind.about}" for name, kind in EXECUTORS.items())
    add("--executor", "NAME", AdvancedHelp(f"{by} (subprocess)"), default="subprocess")
    add(
        "--address",
        "HOST:PORT",
        AdvancedHelp(
            "the Ray cluster to join (default: $RAY_ADDRESS, or a new one of this machine)"
        ),
    )
    return how


def choose_dataset(given: argparse.Namespace) -> str:
    """Return CIFAR-10 if the flags of `add_running` locate it, else synthetic images, which take as
    much time and memory, and no download."""
    return Case.dataset if find_layout(given.data_dir) else SYNTHETIC


def _add_switch(group: argparse._ArgumentGroup, flag: str, help: str) -> None:
    group.add_argument(flag, action="store_true", help=help)


def _refuse_names(own: Sequence[str], flags: Collection[str]) -> None:
    """Refuse own axes by whose name files and flags mean something else. Raises UsageError: it says
    what to give instead."""
    if not own:
        return
    from bench.results.study.quantities import QUANTITIES
    from bench.results.study.runs import SOURCE
    from bench.results.study.warnings import WARNINGS

    columns = {*COLUMNS, *QUANTITIES, *WARNINGS, *SOURCE}
    for name in own:
        if name not in AXES and (name in flags or name in columns):
            raise UsageError(
                f"--vary {name}: this is the name of a flag, or of a column of the results; give "
                f"another, as --vary own_{name} … with {{own_{name}}} in --command"
            )


def parse_arguments(argv: Sequence[str]) -> Options:
    given = build_parser().parse(argv)
    if given.preset and given.config:
        raise UsageError("--preset and --config are both given; use one")
    axes = read_axes(given)
    if given.trace and not any(axes.setdefault("profile", [True])):
        raise UsageError("--trace keeps the traces of profiles; leave out --profile off")
    if "command" in axes and given.preset:
        raise UsageError("--preset is a grid of the harness's own training; leave it out")
    if given.config:
        preset = load_config(given.config)
    elif "command" in axes:
        preset = Preset("command", "a command of one's own", ({},))
    else:
        device = "cuda" if "cuda" in list_devices(axes) else "cpu"
        preset = load_preset(given.preset or default_preset(device))
    # what a preset measures is cheap for its own settings, such as its network
    changed = any(
        {*axes.get(name, ())} - {*own} for grid in preset.grids for name, own in grid.items()
    )
    given.repeats = given.repeats or default_repeats([axes] if changed else preset.override(axes))
    if (shard := given.shard) and given.out is None:  # the same at every start
        folder = f"shard-{shard.number}-of-{shard.of}"
        given.out = Path("results", Path(preset.name).stem, folder)
    return read_running(given, axes, preset)


def default_repeats(grids: Iterable[Mapping[str, Sequence[Value]]]) -> int:
    """Return the repeats per case without ``--repeats``, from ``fraction`` and ``steps`` of all
    grids.

    Part of an epoch predicts a whole epoch of the same run only. The speed of a shared machine
    changes in blocks of tens of seconds (72 and 119 ms a step, each steady within 3 %), so only
    repeats, spread over the sweep, predict the next run. Three runs of a fifth are still cheaper
    than one whole epoch.
    """

    def is_cheap(axes: Mapping[str, Sequence[Value]]) -> bool:
        return any(
            axes.get(name) and all(isinstance(v, (int, float)) and v <= most for v in axes[name])
            for name, most in (("fraction", CHEAP_FRACTION), ("steps", CHEAP_STEPS))
        )

    return CHEAP_REPEATS if all(map(is_cheap, grids)) else 1


def read_running(
    given: argparse.Namespace, axes: dict[str, list[Value]], preset: Preset
) -> Options:
    """Build the options from the flags of `add_running` and others of a sweep."""
    if given.executor not in EXECUTORS:
        raise UsageError(f"--executor {given.executor!r}; {nearest(given.executor, [*EXECUTORS])}")
    if given.address and EXECUTORS[given.executor].here:
        raise UsageError("--address is that of a Ray cluster; give --executor ray with it")
    _refuse_names([name for name, *_ in getattr(given, "vary", None) or ()], vars(given))
    running = {f.name: getattr(given, f.name) for f in fields(Options) if f.name in given}
    for factory in (*axes.get("model", ()), *axes.get("workload", ())) if given.out else ():
        module, _, _ = str(factory).partition(":")
        if (given.out / f"{module}.py").is_file():  # written there for a function of a notebook
            provide_modules(given.out)
    return Options(**running | {"axes": axes, "preset": preset})


def _parse_lanes(flag: str, text: str) -> int:
    if text == "all":
        return ALL
    try:
        return parse_whole(flag, text, 1, 10_000)
    except UsageError as error:
        raise UsageError(f"{error}, or all") from None


def _read_path(flag: str, text: str) -> Path:
    return Path(text)


@dataclass
class Plan:
    """The cases of a sweep as far as they are known."""

    cases: list[Case] = field(default_factory=list)
    # cases whose largest batch is to be found, with ``auto`` or ``32..auto`` as given
    searched: list[tuple[Case, str]] = field(default_factory=list)

    @property
    def families(self) -> list[Case]:
        """The families to search."""
        return list(dict.fromkeys(name_family(case) for case, _ in self.searched))

    @property
    def all_cases(self) -> list[Case]:
        """The cases, then the families, and what is to be measured then, which have no batch sizes
        yet."""
        return [*self.cases, *self.families, *(case for case, _ in self.searched)]


def plan_cases(
    options: Options,
    largest_batches: Mapping[Case, LargestBatch] | None = None,
    settle: Callable[[Case], Case] = lambda case: case,
) -> Plan:
    """Expand preset and flags to cases, on a CUDA device if torch has one, with the results of
    searches in ``largest_batches``, by family; ``settle`` fills in what a workload decides, once
    examined.

    Raises UsageError: settings do not go together, or the largest batch cannot be searched: on a
    CPU without a memory limit.
    """
    plan, found = Plan(), largest_batches or {}

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
        largest_batch = found.get(name_family(case))
        if (
            largest_batch
            and largest_batch.ending
            and largest_batch.largest is not None
            and largest_batch.recommended is not None
        ):
            return fill_auto(text, largest_batch.largest, largest_batch.recommended)
        return []

    device = "cuda" if has_cuda() else "cpu"
    expand = partial(options.preset.cases, options.axes, {"device": [device]})
    is_mine = choose_part(options.shard, expand)
    plan.cases = list(dict.fromkeys(settle(case) for case in expand(find) if is_mine(case)))
    return plan


def choose_part(
    shard: Shard | None, expand: Callable[[Callable[[Case, str], Sequence[int]]], Sequence[Case]]
) -> Callable[[Case], bool]:
    """Return a function that tells whether a case is in the shard; without one, all are. The split
    depends on the command line alone, so that each of several jobs finds its part by itself.

    Families of cases are dealt to the shards in turn. Cases that differ only in their batch size
    stay together, with all their repeats: if one runs out of memory, the larger ones are not run.
    So do cases that share a search for the largest batch. ``expand`` returns all cases of the
    sweep, as `bench.schema.preset.Preset.cases` does, and calls its argument for each batch size
    still to be found; workloads and devices are not examined yet. Raises UsageError: there are more
    shards than families."""
    if shard is None:
        return lambda case: True
    searched: list[Case] = []

    def find(case: Case, text: str) -> Sequence[int]:
        searched.append(case)
        return ()

    cases = [*expand(find), *searched]
    name_part = name_family if searched else partial(replace, batch_size=0)
    families = list(dict.fromkeys(map(name_part, cases)))
    if shard.of > len(families):
        raise UsageError(
            f"--shard {shard}: the sweep has {count(len(families), 'case')} apart from their batch "
            f"sizes, which stay together; give at most {count(len(families), 'shard')}"
        )
    mine = {*families[shard.number - 1 :: shard.of]}
    return lambda case: name_part(case) in mine
