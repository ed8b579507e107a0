"""Warnings of precisions that a device emulates, with lower bounds on the time of their cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.case import Case
from bench.data import DatasetInfo
from bench.data.synthetic import IMAGES
from bench.doctor.earlier import keep, recall
from bench.doctor.rates import choose_seconds, measure_rates, write_rate_warnings
from bench.environment.asking import ask
from bench.environment.host import CPU_FLAGS, read_cpu_flags
from bench.fingerprint import name_subject
from bench.gpu.cards import find_cards
from bench.precision import PRECISIONS
from bench.sweep.options import Options
from bench.sweep.preflight import Inputs, list_examined, name_data
from bench.text import name_first, write_seconds


def warn_of_emulation(cases: Sequence[Case], inputs: Inputs) -> list[str]:
    """Return a warning for each reason why ``cases`` are emulated, with the time of the longest."""
    emulated: dict[str, list[Case]] = {}
    for case in cases:
        if reason := _find_emulation(case, inputs):
            emulated.setdefault(reason, []).append(case)
    lines = []
    for reason, of in emulated.items():
        longest = max(of, key=lambda case: inputs.predict(case) or 0.0)
        seconds, usual = map(inputs.predict, (longest, replace(longest, precision="fp32")))
        told = ""
        if seconds and usual:
            if seconds <= usual:
                continue  # the rates contradict it
            told = (
                f"; a run of {longest.precision} at batch size {longest.batch_size} takes at least "
                f"{write_seconds(seconds)}, and of fp32 {write_seconds(usual)}, as estimated from "
                "the rates of this machine"
            )
        names = list(dict.fromkeys(case.precision for case in of))
        lines.append(
            f"warning: {name_first(names, 4)} {'is' if len(names) == 1 else 'are'} emulated: "
            f"{reason}{told}; leave out of --precision what is too slow, or lower --fraction or "
            "--batch-size"
        )
    return lines


def estimate_emulation(cases: Sequence[Case], options: Options) -> tuple[list[str], float]:
    """Return the warnings for a dry run, and a lower bound on a pass over the cases, in s.

    The warnings are those of `warn_of_emulation`, and doubts about the rates; the bound is 0 if
    nothing is emulated. Torch and the machine are queried, which takes some seconds, only if
    something may be emulated. No images are opened; the number of CIFAR-10 is assumed. Raises
    UsageError: torch cannot use the device, or a model is broken.
    """
    devices = list(dict.fromkeys(case.device for case in cases if _may_be_emulated(case)))
    if not devices or not options.trains:
        return [], 0.0
    cases = [case for case in cases if case.device in devices]
    answer = ask(devices, list_examined(cases), timeout_s=options.timeout_s)
    platforms = {device: answer.platform(device) for device in devices}
    models = {subject: answer.fingerprint(subject) for subject in map(name_subject, cases)}
    images = DatasetInfo("", "", IMAGES["train"], IMAGES["test"], 0, "", "")
    inputs = Inputs(platforms, models, dict.fromkeys(map(name_data, cases), images))
    if "precision" not in options.axes:
        cases = [c for c in cases if not platforms[c.device].discourage(PRECISIONS[c.precision])]
    lines = []
    for device in dict.fromkeys(case.device for case in cases if _find_emulation(case, inputs)):
        if seconds := choose_seconds(device):
            environment = inputs.platforms[device].environment
            if not (found := recall(environment, seconds)).rates:
                found = measure_rates(device, seconds)
                keep(found, environment, seconds)
            inputs = inputs.add_rates(device, found)
            lines += write_rate_warnings(found, environment.gpu)
    pass_s = sum(inputs.predict(case) or 0.0 for case in cases)
    return [*lines, *warn_of_emulation(cases, inputs)], pass_s


def _find_emulation(case: Case, inputs: Inputs) -> str:
    return inputs.platforms[case.device].find_emulation(PRECISIONS[case.precision])


def _may_be_emulated(case: Case) -> bool:
    """Return whether a device may emulate a precision, as far as it is known without torch."""
    precision = PRECISIONS[case.precision]
    if case.device == "cpu":
        needed = CPU_FLAGS.get(precision.arithmetic)
        return needed is not None and not needed & read_cpu_flags()
    cards = find_cards()[0]
    return bool(cards and cards[0].capability and cards[0].capability < precision.min_capability)
