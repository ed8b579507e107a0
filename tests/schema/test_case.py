"""Cases: what an axis takes, which cases a grid holds, and that a case is its own key."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.results.store.rows import parse_axis
from bench.schema.axis import COMPILES
from bench.schema.case import (
    AXES,
    NAMING_AXES,
    Case,
    format_value,
    list_varying,
    make_case,
    micro_batch,
    parse_value,
    spell_cases,
)
from bench.schema.grid import grid
from bench.schema.precision import OPT_LEVELS, POLICIES, PRECISIONS
from bench.schema.rules import check, check_batches

POSITIVE = st.floats(min_value=5e-324, max_value=1.7e308)

CASES = st.builds(
    Case,
    model=st.sampled_from(["dpn92", "dpn-small", "my.networks:small"]),
    dataset=st.sampled_from(["cifar10", "synthetic"]),
    precision=st.sampled_from(list(PRECISIONS)),
    loss_scale=st.none() | st.sampled_from(list(POLICIES)) | POSITIVE,
    opt_level=st.none() | st.sampled_from(list(OPT_LEVELS)),
    batch_size=st.integers(2, 10**9),
    lr=POSITIVE,
    fraction=st.floats(min_value=1e-300, max_value=1),
    **dict.fromkeys(("evaluate", "cudnn_benchmark", "channels_last"), st.booleans()),
    compile=st.sampled_from(list(COMPILES)),
    seed=st.integers(0, 2**31 - 1),
    device=st.sampled_from(["cuda", "cpu"]),
)


@given(CASES)
def test_a_case_is_read_back_from_what_is_written(case: Case) -> None:
    """Every digit: a case that came back another would be measured again for ever."""
    texts = {name: format_value(getattr(case, name)) for name in AXES}
    back = {
        name: None if text == "" else parse_value(name, text, name) for name, text in texts.items()
    }
    assert Case(**back) == case  # type: ignore[arg-type]


def test_graphs_of_torch_compile_sum_no_gradients() -> None:
    both = {"compile": ["reduce-overhead"], "accumulate": [2]}
    with pytest.raises(UsageError, match="give --compile default"):
        grid({**both, "device": ["cuda"]})
    grid({**both, "device": ["cpu"]})  # which has no such graphs


@given(CASES, CASES)
def test_slugs_name_files_and_tell_cases_apart(one: Case, other: Case) -> None:
    assert one.slug().isascii()
    assert not set(one.slug()) & set("/\\ :*?\"<>|'")
    assert (one.slug() == other.slug()) == (one == other)


@given(st.lists(CASES, max_size=9))
def test_cases_are_spelled_as_each_of_their_values_is(cases: list[Case]) -> None:
    """What they share once; of each what it is named by."""
    document = spell_cases(cases)
    spelled = [{**document["settings"], **own} for own in document["cases"]]
    assert spelled == [{n: format_value(getattr(c, n)) for n in AXES} for c in cases]
    assert not any(document["settings"].keys() & {*own, *NAMING_AXES} for own in document["cases"])
    for name in {*AXES} - document["settings"].keys() - {*NAMING_AXES}:
        assert len({own[name] for own in document["cases"]}) > 1 or not cases
    read = [make_case(*(parse_axis(name, texts[name]) for name in AXES)) for texts in spelled]
    assert read == cases


@pytest.mark.parametrize(
    ("axis", "text", "value"),
    [
        ("loss_scale", "none", 1.0),
        ("loss_scale", "dynamic-apex", "dynamic-apex"),
        ("opt_level", "none", None),
        ("until", "1%", 0.01),
        ("until", "none", None),
        ("evaluate", "on", True),
        ("compile", "False", "off"),  # as it was called in older files
        ("compile", "on", "default"),
        ("seed", "2147483647", 2**31 - 1),
        ("model", "a.b:c", "a.b:c"),
    ],
)
def test_values(axis: str, text: str, value: object) -> None:
    assert parse_value(axis, text, axis) == value


@pytest.mark.parametrize(
    ("axis", "text", "right"),
    [
        ("batch_size", "0.5", "at least 1"),
        ("batch_size", "9" * 5000, "whole number"),
        ("lr", "-0.1", "above 0"),
        ("loss_scale", "auto", "'none'"),
        ("loss_scale", "dynamic-torch", "'dynamic-apex-amp'"),
        ("opt_level", "O4", "right values: O0"),
        ("seed", "2147483648", "from 0 to 2147483647"),
        ("seed", "٣", "from 0 to 2147483647"),
        ("model", "a.b:", "package.module:factory"),
        ("dataset", "cifar100", "did you mean 'cifar10'?"),
    ],
)
def test_wrong_values_say_what_would_be_right(axis: str, text: str, right: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_value(axis, text, f"--{axis}")
    message = str(error.value)
    assert message.startswith(f"--{axis} {text[:60]!r}: ")
    assert right in message
    assert "\n" not in message


def test_the_batch_size_varies_fastest_and_the_rest_in_the_order_of_the_axes() -> None:
    """Each case once."""
    cases = grid({"batch_size": [64, 128, 64], "seed": [0, 1], "precision": ["fp32", "fp16"]})
    each = [*product(("fp32", "fp16"), (0, 1), (64, 128))]
    assert [(c.precision, c.seed, c.batch_size) for c in cases] == each
    scales = [case.loss_scale for case in cases]
    assert scales == [None] * 4 + [PRECISIONS["fp16"].default_loss_scale] * 4, "where one is used"


@given(st.integers(2, 400), st.integers(2, 400))
def test_a_batch_fits_or_is_refused(batch: int, images: int) -> None:
    case = Case(batch_size=batch)
    fits = batch <= images and images % batch != 1
    if fits:
        check_batches(case, images)
    else:
        with pytest.raises(UsageError, match=f"batch size {batch}"):
            check_batches(case, images)


@given(st.lists(CASES, min_size=1, max_size=4, unique=True))
def test_axes_that_vary_tell_cases_apart(cases: list[Case]) -> None:
    axes = list_varying(cases)
    assert set(NAMING_AXES) <= set(axes)
    assert len({tuple(getattr(case, name) for name in axes) for case in cases}) == len(cases)


def test_labels_leave_out_what_is_not_set() -> None:
    assert Case().label() == "fp32 · batch size 128"
    case = Case(precision="fp16", loss_scale=128.0, batch_size=512)
    assert case.label() == "fp16 · loss scale 128 · batch size 512"
    assert replace(case, evaluate=True).label(["evaluate", "compile"]) == "evaluate"
    assert math.isclose(float(format_value(0.1 + 0.2)), 0.1 + 0.2, rel_tol=0)


@given(st.integers(2, 3000), st.data())
def test_as_many_micro_batches_as_were_asked_for(batch_size: int, data: st.DataObject) -> None:
    """What is refused names a number that works."""
    number = data.draw(st.integers(1, batch_size))
    case = Case(batch_size=batch_size, accumulate=number)
    made = len(range(0, batch_size, micro_batch(case)))
    if made == number:
        check(case)
    else:
        with pytest.raises(UsageError, match="give --accumulate") as refused:
            check(case)
        works = int(str(refused.value).rpartition("--accumulate ")[2])
        assert works < number
        check(replace(case, accumulate=works))
