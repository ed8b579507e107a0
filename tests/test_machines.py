"""What every command does on machines that are not at hand, without training: `MACHINES`.

What each says is kept in tests/machines, a file a machine; UPDATE_SNAPSHOTS=1 writes it anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import card
from bench.advise.__main__ import _read_now
from bench.advise.__main__ import build_parser as build_advise
from bench.base.errors import UsageError
from bench.check.__main__ import build_parser as build_check
from bench.check.__main__ import choose_cases as choose_checked
from bench.fit import DEFAULT_PRECISIONS as FITTED
from bench.fit import build_parser as build_fit
from bench.machine.gpus import Depth
from bench.machine.host import has_cuda
from bench.machine.nvml import find_cards, open_device
from bench.scales.__main__ import build_parser as build_scales
from bench.scales.__main__ import choose_cases as choose_scaled
from bench.schema.flags import read_axes
from bench.schema.preset import Preset, preset_names
from bench.sweep.execution import rehearse
from bench.sweep.loop import Loop
from bench.sweep.options import Options, Plan, parse_arguments, plan_cases, read_running
from bench.sweep.preflight import check, open_lanes
from bench.workers.examination import Machine, examine, guess_devices
from bench.workers.executors import ALL, ImageRequest, Settings
from bench.workers.executors.subprocess import SubprocessExecutor
from bench.workers.judgement import judge
from tests.machines_for_tests import MACHINES
from tests.pytest_for_tests import Patch
from tests.test_golden import keep
from tests.test_readme import COMMANDS

ROOT = Path(__file__).parents[1]
DEVICE = {True: "cuda", False: "cpu"}


def plan(module: str, flags: list[str]) -> tuple[Plan, Options, bool]:
    """The cases of a command, its options, and whether each must be able to run."""
    if module == "bench.sweep":
        options = parse_arguments(flags)
        return plan_cases(options), options, False
    if module == "bench.fit":
        given = build_fit().parse(flags)
        axes = read_axes(given)
        names = FITTED[str(axes.get("device", [DEVICE[has_cuda()]])[0])]
        grid = {"precision": [*names], "batch_size": ["auto"], "dataset": ["synthetic"]}
        grid = {"batch_size": ["auto"]} if "command" in axes else grid
        options = read_running(given, axes, Preset("fit", "", (grid,)))
        return Plan(searched=plan_cases(options).searched), options, False
    if module == "bench.advise":
        given = build_advise().parse(flags)
        axes = read_axes(given)
        options = read_running(given, axes, Preset("advise", "", ({},)))
        return Plan([_read_now(given, axes)]), options, False
    given = (build_scales() if module == "bench.scales" else build_check()).parse(flags)
    axes = read_axes(given)
    cases = choose_scaled(axes, None) if module == "bench.scales" else choose_checked(axes)
    return Plan(cases), Options(axes if module == "bench.check" else {}), True


def start(module: str, flags: list[str], machine: Machine) -> str:
    """What a start says that it leaves out, or why it is refused; empty if all runs."""
    asked, options, every = plan(module, flags)
    if module in ("bench.sweep", "bench.fit", "bench.advise") and options.here:
        open_lanes(SubprocessExecutor(Settings()), asked.all_cases, options)
    inputs = check(asked, machine, options, ImageRequest.count, every=every)
    loop: Any = SimpleNamespace(inputs=inputs, options=options)
    left: dict[str, dict[str, None]] = {}
    for case in asked.all_cases:
        refuse = inputs.refuse if every else partial(Loop.refuse, loop)
        if case.command is None and (why := refuse(case)):
            left.setdefault(why, {})[case.precision] = None
    return "; ".join(f"leaves out {', '.join(names)}: {why}" for why, names in left.items())


def tell_card(machine: Machine) -> Iterator[str]:
    """What make card does with each of its steps."""
    platform = machine.devices[DEVICE[has_cuda()]]
    runs = []
    for stage in card.list_stages(card.Setup(platform, "results/x")):
        argv, why = card.plan_stage(stage, platform)
        if not why and argv[0] in ("bench.sweep", "bench.fit", "bench.scales"):
            why = start(argv[0], argv[1:], machine)
        if why:
            yield f"  {stage.name}: {why}"
        else:
            runs.append(stage.name)
    yield f"  run as they are: {' '.join(runs)}"
    yield f"  limit of fit-limit: {card.choose_limit(platform)} GiB"


SEARCHED = ("sweep", "fit", "advise", "scales", "check")
SHOWN = [
    c
    for c in COMMANDS
    if c.startswith(tuple(f"python -m bench.{name} " for name in SEARCHED))
    and not {"--list", "--show"} & {*c.split()}
]


def tell_commands(machine: Machine) -> Iterator[str]:
    """What the commands of README and docs are refused for, or leave out; and a dry run of each,
    where that is another thing."""
    for command in SHOWN:
        _, _, module, *flags = shlex.split(command)
        try:
            answer = start(module, flags, machine)
        except UsageError as error:
            answer = f"refused: {error}"
        if module == "bench.sweep" and "ray" not in flags:
            try:
                [*rehearse(*plan(module, flags)[:2])]
                dry = ""
            except UsageError as error:
                dry = f"refused: {error}"
            assert dry == (answer if answer.startswith("refused") else ""), command
        if answer:
            yield f"  {command}\n    {answer}"
    yield "  the others run as they are"


TOPICS = ("driver", "torch", "card", "MIG", "persistence", "neighbours", "readings", "clocks")
TOPICS += ("power limit", "precisions")


def tell() -> Iterator[str]:
    cards, why = find_cards()
    yield f"cards: {'; '.join(one.name for one in cards) or why}"
    machine = examine()
    for device, platform in guess_devices().items():
        now = machine.devices[device]
        same = (platform.name, platform.environment.capability) == (
            now.name,
            now.environment.capability,
        )
        assert same or now.error, "a dry run judges the card that a start takes"
    yield "\ndoctor:"
    for remark in judge(machine):
        if remark.topic in TOPICS:
            yield f"  {remark.level.name.lower()} {remark.topic}: {remark.what}"
            if remark.fix:
                yield f"    {remark.fix}"
    executor = SubprocessExecutor(Settings())
    try:
        lanes = executor.open_lanes("cuda", ALL)
        yield f"\nlanes: {' '.join(lane.name for lane in lanes)}"
    except UsageError as error:
        yield f"\nlanes: refused: {error}"
    if cards:
        reading = open_device(machine.devices["cuda"].environment.gpu_uuid).read(Depth.EDGE)[-1]
        lacks = [
            name
            for name in ("energy_j", "power_w", "device_bytes", "others")
            if getattr(reading, name) is None
        ]
        yield f"not read of a case: {', '.join(lacks) or 'nothing'}"
        yield f"neighbours that compute: {len(reading.others or ())}"
    yield "\nmake card:"
    yield from tell_card(machine)
    yield "\npresets:"
    for name in preset_names():
        try:
            answer = start("bench.sweep", ["--preset", name], machine) or "runs as it is"
        except UsageError as error:
            answer = f"refused: {error}"
        yield f"  {name}: {answer}"
    yield "\nREADME and docs:"
    yield from tell_commands(machine)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(ROOT)
    made = MACHINES[name]
    with made.enter(monkeypatch, tmp_path):
        text = "\n".join(tell()) + "\n"
    keep(f"../machines/{name}.txt", text)
