"""What holds of any settings: their cases are found again, or a refusal says what to change."""

from __future__ import annotations

import re
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.results.store.rows import parse_axis
from bench.schema.axis import axis_flag
from bench.schema.case import AXES, Case, format_value, make_case
from bench.schema.flags import read_axes
from bench.schema.grid import grid
from bench.schema.precision import PRECISIONS
from bench.schema.rules import check, settle
from bench.sweep.options import build_parser

TEXTS = {
    "precision": " ".join(PRECISIONS),
    "loss_scale": "none 128 dynamic",
    "opt_level": "none O1",
    "fp8_recipe": "tensorwise rowwise",
    "batch_size": "8 33 100 8..32",
    "accumulate": "1 2 20",
    "memory_limit": "none 2GiB",
    "lr": "0.01 0.5",
    "optimizer": "sgd adamw own",
    "lr_scaling": "none sqrt",
    "base_batch": "128 64",
    "lr_warmup": "0 5%",
    "schedule": "constant onecycle",
    "epochs": "1 3",
    "steps": "none 4",
    "until": "none 1%",
    "checkpoint": "on off",
    "profile": "on off",
    "compile": "off on max-autotune",
    "cuda_graphs": "on off",
    "workload": "images mine:work command",
    "dataset": "cifar10 synthetic own",
    "input": "none 3x64x64",
    "loader": "device torch",
    "workers": "0 2",
    "parallel": "none ddp",
    "world_size": "1 2",
    "grad_compression": "none bf16",
    "sync_bn": "on off",
    "device": "cuda cpu",
}
CHOICES = st.lists(
    st.sampled_from([(name, text) for name, texts in TEXTS.items() for text in texts.split()]),
    min_size=1,
    max_size=8,
).map(dict)
PARSER = build_parser()


def expand(given: dict[str, str]) -> list[Case] | str:
    """The cases of flags with one word each, or why there are none."""
    words = [word for name, text in given.items() for word in (axis_flag(name), text)]
    try:
        return grid(read_axes(PARSER.parse(words)))
    except UsageError as error:
        return str(error)


def spell(case: Case) -> dict[str, str]:
    """The flags of all that a case does not have by itself."""
    own = ("model", "dataset") if case.workload != "images" else ()
    plain = settle({"precision": case.precision, "optimizer": case.optimizer})
    usual = asdict(Case()) | {name: getattr(plain, name) for name in ("loss_scale", "lr")}
    return {
        name: format_value(value)
        for name, value in asdict(case).items()
        if name not in own and value != usual[name]
    }


@given(CHOICES)
def test_what_flags_ask_for_is_asked_for_again_or_told_how(given: dict[str, str]) -> None:
    """A case is settled, and read back from its flags and its cells. A refusal says what to give,
    and ends where the flags that it names are left out."""
    found = expand(given)
    if isinstance(found, str):
        assert re.search(
            r"(; |, or )(give|add|leave (it )?out|lower|.*--parallel ddp trains)", found
        )
        named = {name for name in given if re.search(rf"{axis_flag(name)}\b", found)}
        assert named
        assert expand({name: given[name] for name in given.keys() - named}) != found
        return
    for case in found:
        check(case)
        assert settle(asdict(case)) == case
        assert expand(spell(case)) == [case]
    for case in found:
        assert make_case(*(parse_axis(n, format_value(getattr(case, n))) for n in AXES)) == case
