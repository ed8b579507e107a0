"""Any bytes in: records, or one clear line out."""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.base.errors import UsageError
from bench.cards.__main__ import main as cards
from bench.compare.__main__ import main as compare
from bench.report.__main__ import main as report
from bench.results.store.reader import read_records, read_rows
from bench.results.store.rows import read_history
from bench.results.store.table import RECORDS
from bench.results.store.writer import Store
from bench.schema.case import AXES, Case
from bench.schema.preset import parse_preset
from bench.schema.record import COLUMNS, STEP_COLUMNS, Step
from bench.validate.__main__ import main as validate
from bench.why import main as why
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


MEASURED = [
    Path(__file__).parents[1] / "results" / name / RECORDS
    for name in ("script-epyc-20261129", "nvidia-h200-20261126-040407")
]
NUMBERS = st.sampled_from([name for name, of in COLUMNS.items() if of.type in (int, float)])


@given(
    st.sampled_from(MEASURED),
    NUMBERS,
    st.sampled_from(["0", "-1", "", "nan", "text", "1e-100", "1e100", "1e308"]),
    st.booleans(),
)
@example(MEASURED[0], "epoch_time_s", "0", True)
@example(MEASURED[0], "train_images", "-1", False)
@example(MEASURED[0], "dataset_classes", "-1", True)
@example(MEASURED[0], "measured_steps", "0", False)
@example(MEASURED[0], "images_per_s", "1e308", True)
@example(MEASURED[0], "train_loss", "1e308", True)
@example(MEASURED[0], "repeat", "1e100", False)
@example(MEASURED[1], "batch_size", "0", True)
@example(MEASURED[1], "rate_copy", "0", False)
def test_a_number_that_was_edited_breaks_no_command(
    tmp_path: Path, source: Path, name: str, value: str, every: bool
) -> None:
    edited = shutil.copytree(source.parent, tmp_path / "edited", dirs_exist_ok=True)
    with source.open() as file:
        head, *rows = csv.reader(file)
    if name not in head:  # it is newer than the file
        return
    for row in rows if every else rows[:1]:
        row[head.index(name)] = value
    with (edited / RECORDS).open("w") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])
    two = [str(edited), str(source.parent)]
    for main, arguments in (
        (report, two[:1]), (report, [*two[:1], "--full"]), (validate, two[:1]), (why, two[:1]),
        (compare, two), (cards, two),
    ):  # fmt: skip
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = main(arguments)
        assert code != 2 or len(errors.getvalue().splitlines()) == 1


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
