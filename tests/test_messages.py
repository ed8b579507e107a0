"""Worker and parent understand each other, and nonsense is told from a message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.record import EpochRow, KnownResults, Measurement, Status, Step, WorkRow
from bench.worker.messages import (
    Assignment,
    EpochEnded,
    Finished,
    Message,
    MessageError,
    PhaseEntered,
    StepTaken,
    decode,
    decode_order,
    encode,
)

FINISHED = Finished(
    Status.DIVERGED,
    "the loss was inf or NaN from step 1 of 2",
    True,
    Measurement(epoch_time_s=3.0, measured_steps=2, warmup_steady=False, flags="matmul=ieee"),
    {"energy_j": "this is a\nCPU"},
    [Step(0, 128, 2.5, 9, 0.25, 65536.0), Step(1, 80, None, 0, None)],
    [EpochRow(0, 1.5, 2.25, 0.25, 2.0, 0.5, 0.125, 3), EpochRow(1, 1.5, None, 0.25)],
)


@pytest.mark.parametrize(
    "message",
    [
        PhaseEntered("warmup"),
        PhaseEntered("epoch", 2),
        StepTaken("epoch", 3, 20, 2.25, 2**40),
        EpochEnded(EpochRow(1, 1.5, None, 0.25, test_accuracy=0.125)),
        FINISHED,
        Finished(Status.OK),
    ],
)
def test_a_message_comes_back_as_it_was_sent(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line) == message


def test_a_loss_that_is_no_number_is_told() -> None:
    told = decode(encode(StepTaken("epoch", 0, 0, math.nan, 1)))
    assert math.isnan(told.loss)


def test_a_whole_number_is_a_float_where_one_is_due() -> None:
    told = decode(encode(Finished(Status.OK, measurement=Measurement(epoch_time_s=3))))
    assert isinstance(told, Finished)
    assert type(told.measurement.epoch_time_s) is float


def test_an_assignment_comes_back() -> None:
    case = Case(precision="fp16", loss_scale="dynamic", compile="default")
    known = KnownResults(
        {"work": "0123"}, {"flop_per_image": 1.5}, {}, [WorkRow("loss", "", "", 1, 2, 3)]
    )
    given = Assignment(case, "a folder", 1.5, None, "/checkpoints", {"code": "1"}, known=known)
    assert decode_order(encode(given).decode()) == given


def edited(**changes: Any) -> bytes:
    return json.dumps({**json.loads(encode(FINISHED)), **changes}).encode()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"no JSON", "Expecting value"),
        (b"\xff", "utf-8"),
        (b"[]", "[] is not of type dict"),
        (b"{}", "no kind None"),
        (b'{"kind": ["PhaseEntered"]}', "no kind"),
        (b'{"kind": "PhaseEntered"}', "missing 1 required"),
        (b'{"kind": "PhaseEntered", "phase": "dinner"}', "'dinner' is not one of warmup, epoch"),
        (b'{"kind": "PhaseEntered", "phase": ["epoch"]}', "['epoch'] is not one of"),
        (b'{"kind": "PhaseEntered", "phase": "epoch", "name": 1}', "no field 'name'"),
        (edited(status="fine"), "'fine' is not a valid Status"),
        (edited(transient="no"), "'no' is not of type bool"),
        (edited(reason=None), "None is not of type str"),
        (edited(measurement={"warp_speed": 9}), "measurement: no field 'warp_speed'"),
        (edited(measurement={"measured_steps": 2.5}), "2.5 is not of type int"),
        (edited(measurement={"measured_steps": True}), "True is not of type int"),
        (edited(measurement=[]), "0 values, where Measurement has"),
        (edited(missing={"energy_j": 1}), "1 is not of type str"),
        (edited(steps=[[0, 128, 2.5, 9]]), "4 values, where Step has 7"),
        (edited(steps=[[0, 128, "2.5", 9, 0.1, None, None]]), "'2.5' is not of type float"),
        (edited(steps=3), "3 is not of type list"),
        (edited(epochs=[[0, 1.5, 2.25]]), "3 values, where EpochRow has 8"),
        (edited(epochs=[[0.5, 1.5, 2.25, 0.5, None, None, None, None]]), "0.5 is not of type int"),
        (edited(epochs=[[0, None, 2.0, 0.5, None, None, None, None]]), "None is not of type float"),
        (b'{"kind": "PhaseEntered", "phase": "epoch", "epoch": "2"}', "'2' is not of type int"),
    ],
)
def test_what_is_no_message(line: bytes, why: str) -> None:
    with pytest.raises(MessageError, match="the worker sent") as error:
        decode(line)
    assert why in str(error.value)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)


def test_a_long_line_is_not_repeated_whole() -> None:
    with pytest.raises(MessageError) as error:
        decode(b"x" * 10_000)
    assert len(str(error.value)) < 400
