"""Presets: TOML to cases, with flags over grids over defaults."""

from __future__ import annotations

import pytest

from bench.base.errors import UsageError
from bench.schema.axis import Value
from bench.schema.case import Case
from bench.schema.preset import load_preset, parse_preset, preset_names

CPU = {"device": ["cpu"]}


def test_those_that_come_with_the_harness() -> None:
    assert {"quick", "precision", "rtx-titan"} <= set(preset_names())
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == name
        assert preset.description
        assert "\n" not in preset.description
        assert preset.cases({}, CPU, lambda family, text: [64])


def test_the_2019_page_has_its_grid() -> None:
    cases = load_preset("rtx-titan").cases({}, {"device": ["cuda"]})
    assert [(case.precision, case.loss_scale, case.batch_size) for case in cases] == [
        *(("fp32", None, batch) for batch in (128, 256, 512)),
        *(("fp16", 128, batch) for batch in (128, 256, 512, 640)),
        *(("fp16", scale, 512) for scale in (64, 256)),
    ]
    assert all(case.model == "dpn92" for case in cases)


def test_dpn92_learns_as_on_the_page_of_2019() -> None:
    """By AdamW; what a flag or a workload decides is not the preset's."""
    preset = load_preset("precision")

    def recipes(**flags: list[Value]) -> set[tuple[str, float]]:
        cases = preset.cases({"batch_size": [64], **flags}, {"device": ["cuda"]})
        return {(case.optimizer, case.lr) for case in cases}

    assert recipes() == {("adamw", 3e-4)}
    assert recipes(optimizer=["sgd"]) == {("sgd", 0.01)}, "with a rate of its own"
    assert recipes(lr=[1e-3]) == {("adamw", 1e-3)}
    assert recipes(workload=["mine:work"]) == {("sgd", 0.01)}, "which may bring its own optimizer"
    with pytest.raises(UsageError, match="apex trains with SGD only; leave out one"):
        recipes(precision=["fp16-apex"])


def test_flags_override_grids_and_defaults_fill_in() -> None:
    preset = parse_preset(
        b"""
        description = "two blocks"
        [[grid]]
        batch_size = [64, 128]
        device = "cuda"
        [[grid]]
        precision = "bf16"
        lr = 0.1
        """,
        "mine",
    )
    assert preset.description == "two blocks"
    assert preset.cases({}, CPU) == [
        Case(batch_size=64, device="cuda"),
        Case(batch_size=128, device="cuda"),
        Case(precision="bf16", lr=0.1, device="cpu"),
    ]
    assert preset.cases({"batch_size": [8], "precision": ["fp32"], "device": ["cpu"]}, {}) == [
        Case(batch_size=8, device="cpu"),
        Case(batch_size=8, lr=0.1, device="cpu"),
    ]


def test_a_flag_replaces_the_other_limit_of_how_much_is_measured() -> None:
    """20 steps are not cut to the two that a preset's fraction leaves."""

    def parts(text: str, **flags: list[Value]) -> set[tuple[float, int | None]]:
        preset = parse_preset(f"[[grid]]\n{text}".encode(), "mine")
        return {(case.fraction, case.steps) for case in preset.cases(flags, CPU)}

    assert parts("fraction = 0.02", steps=[20]) == {(1.0, 20)}
    assert parts("steps = 20", fraction=[0.5]) == {(0.5, None)}
    assert parts("steps = 20\nfraction = 0.02") == {(0.02, 20)}, "both, where none is given"
    assert parts("fraction = 0.02", steps=[20], fraction=[0.5]) == {(0.5, 20)}
