"""Any bytes in: records, or one clear line out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.results.store.reader import read_records, read_rows
from bench.results.store.rows import read_history
from bench.results.store.table import RECORDS
from bench.results.store.writer import Store
from bench.schema.case import AXES, Case
from bench.schema.preset import parse_preset
from bench.schema.record import COLUMNS, STEP_COLUMNS, Step
from tests.frames_for_tests import read_steps
from tests.planted.records import make_run

WORDS = """
nan inf -1 1e999 1_0 0x1p3 +1 ' '' =1 " "" on ok fp16 dynamic 1e-400 .5 5. 1.0 -0 ٣ NA null \ufeff
"""
CELLS = st.sampled_from([*WORDS.split(), "", " 1 ", "\u2028", "9" * 400, "9" * 5000])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """A records file and its steps."""
    folder = tmp_path_factory.mktemp("good")
    with Store(folder) as store:
        for n in range(1, 4):
            case = Case(precision="fp16", loss_scale="dynamic", batch_size=64 * n)
            record = make_run(case, repeat=n, epoch_time_s=1.5 * n, reason="=é", notes="a,b")
            store.append(record, [Step(0, 8, 2.5, 1, 0.1), Step(1, 8, None, 2, 0.1)])
    return (folder / RECORDS).read_bytes(), (folder / "steps.csv").read_bytes()


def check(folder: Path, data: bytes, name: str = RECORDS) -> None:
    """Read ``data`` as records or as steps: typed columns, or one line that names the file."""
    file = folder / name
    file.write_bytes(data)
    try:
        if name == RECORDS:
            frame = read_records(folder)
            assert list(frame.columns) == list(COLUMNS)
            rows = read_rows(folder)
            assert all(isinstance(row.case, Case) for row in rows)
            read_history(rows)
        else:
            frame = read_steps(folder)
            assert list(frame.columns) == list(STEP_COLUMNS)
    except UsageError as error:
        message = str(error)
    else:
        return
    assert str(file) in message
    assert len(message.splitlines()) == 1
    assert len(message) < 800 + len(str(file))


@given(st.binary(max_size=300))
@example(b"")
@example(b"schema,schema\n1,1\n")
@example(b"schema" + b"," * 200_000 + b"\n")
@example(b"schema," + b"9" * 200_000 + b"\n")
def test_bytes(tmp_path: Path, data: bytes) -> None:
    check(tmp_path, data)


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=8), st.booleans())
def test_flipped_bytes(
    tmp_path: Path, good: tuple[bytes, bytes], flips: list[tuple[int, int]], steps: bool
) -> None:
    (tmp_path / RECORDS).write_bytes(good[0])
    data = bytearray(good[steps])
    for at, byte in flips:
        data[at % len(data)] = byte
    check(tmp_path, bytes(data), "steps.csv" if steps else RECORDS)


@given(st.dictionaries(st.sampled_from(list(COLUMNS)), CELLS | st.text(max_size=8), max_size=5))
def test_cells(tmp_path: Path, good: tuple[bytes, bytes], cells: dict[str, str]) -> None:
    """Values that are nearly right, in columns that check them."""
    header, row, _ = good[0].decode().split("\n", 2)
    values = dict(zip(header.split(","), row.replace('"a,b"', "ab").split(","), strict=True))
    values |= cells
    line = ",".join(f'"{v}"' if set(v) & set(',"') else v for v in values.values())
    data = f"{header}\n{row}\n{line}\n{row}\n".encode("utf-8", "surrogatepass")
    check(tmp_path, data)


def read_preset(data: bytes) -> None:
    try:
        preset = parse_preset(data, "mine.toml")
        for case in preset.cases({}, {"device": ["cpu"]}):
            assert isinstance(case, Case)
    except UsageError as error:
        message = str(error)
    else:
        return
    assert len(message.splitlines()) == 1
    assert len(message) < 1000


@given(st.binary(max_size=300))
@example(b"a = " + b"9" * 5000)
@example(b"a = " + b"[" * 100_000)
@example(b"[[grid]]\n" + b"k" * 1_000_000 + b" = 1")
@example(b"a = 0000-99-99")
def test_preset_bytes(data: bytes) -> None:
    read_preset(data)


TOML = st.recursive(
    st.booleans().map(lambda b: str(b).lower())
    | st.integers().map(str)
    | st.floats().map(str)
    | st.sampled_from(['"fp16"', '"dynamic"', '"none"', "'on'", '"a.b:c"', '"\\n"', "1e-3"])
    | st.text(max_size=5).map(lambda t: '"' + t.replace("\\", "").replace('"', "") + '"'),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=5,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*AXES, "description", "grid", "x y"]), TOML, max_size=6))
def test_presets_that_are_nearly_right(table: dict[str, str]) -> None:
    rows = "".join(f'"{key}" = {value}\n' for key, value in table.items())
    read_preset(f"[[grid]]\n{rows}".encode("utf-8", "surrogatepass"))
    read_preset(f"{rows}\n[[grid]]\n".encode("utf-8", "surrogatepass"))
