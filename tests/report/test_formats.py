"""What each format writes: against snapshots, and against hostile names."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.case import Case
from bench.record import Record, Status
from bench.render import latex, markdown
from bench.report.csvfile import write_cell
from tests.planted.records import GIB, REFERENCE, make_record, measured, write_sweep
from tests.planted.sweeps import make_card

SNAPSHOTS = Path(__file__).with_name("snapshots")

Run = Callable[..., tuple[int, str, str]]

HOSTILE = [
    "=HYPERLINK(1) | `a` <b>x</b> [red]r[/red]",
    "@x\x1b[31m \u202e*bold* _em_ ~~del~~ \\| \\",
    "+1 $\\alpha$ & 50 % # {x} ^ ~ \\input{/etc/passwd}",
    "-2 ![i](http://x) &lt; \"quoted\", 'n'\u2028new",
]


@pytest.fixture(scope="module")
def rtx_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of the published cases on a made-up card: repeats, out of memory, a divergence."""
    card = {**make_card("NVIDIA H200"), "gpu": "Made-up card"}
    rows = []
    for precision, scale, factor in (
        ("fp32", None, 1.0),
        ("fp16", 128.0, 0.4),
        ("fp16", 64.0, 0.4),
    ):
        for batch in (128, 256, 512, 640):
            if scale == 64.0 and batch != 512:
                continue
            case = Case(precision=precision, loss_scale=scale, batch_size=batch)
            if batch == 640:
                rows.append(make_record(case, status=Status.OOM, reason="no memory left", **card))
                continue
            for repeat in (1, 2):
                values = measured(
                    factor * (100 + 1000 / batch) + 0.2 * repeat,
                    2**30 * (2 + batch / 50 * (1 if scale is None else 0.5)),
                    train_loss=2.05,
                    train_accuracy=0.291,
                    overflow_steps=None if scale is None else 3,
                )
                diverged = scale == 64.0 and repeat == 2
                status = Status.DIVERGED if diverged else Status.OK
                rows.append(make_record(case, repeat=repeat, status=status, **{**card, **values}))
    return write_sweep(tmp_path_factory.mktemp("snapshot") / "made-up", rows)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep whose card and reasons try to break out of every format."""
    rows = []
    for name in HOSTILE:
        values = {"torch": "2.13", "gpu": name, **measured(10, 2**30)}
        rows.append(make_record(Case(), **values))
        error = Case(batch_size=256)
        rows.append(make_record(error, status=Status.ERROR, reason=name, gpu=name, torch="2.13"))
    return write_sweep(tmp_path_factory.mktemp("hostile") / "=a|b<i>", rows)


@pytest.mark.parametrize("format", ["text", "md", "latex", "screen"])
@pytest.mark.parametrize("which", ["reference", "quick", "made-up"])
def test_snapshot(
    which: str,
    format: str,
    quick: Path,
    rtx_like: Path,
    report: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Set UPDATE_SNAPSHOTS=1 to write them anew, and read the diff."""
    path = {"reference": REFERENCE, "quick": quick, "made-up": rtx_like}[which]
    monkeypatch.chdir(path.parent)  # commands name the folder from here
    flags = {"screen": [], "text": ["--full"]}.get(format, ["--format", format])
    code, out, _ = report(path, *flags)
    assert code == 0
    file = SNAPSHOTS / f"{which}.{format}"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(out, encoding="utf-8")
    assert out == file.read_text(encoding="utf-8")


def split_row(line: str) -> list[str]:
    """Cells of a line of a GitHub table: split at pipes that no backslash escapes."""
    assert line.startswith("| ")
    assert line.endswith(" |")
    return re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [split_row(line) for line in block.splitlines() if not line.startswith("|-")
         and not line.startswith("|:")]
        for block in blocks
    ]  # fmt: skip


@pytest.mark.slow
def test_markdown_tables_parse_back_whole(
    hostile: Path, fake_cards: list[Path], report: Run
) -> None:
    for paths in ([hostile], fake_cards):
        code, out, _ = report(*paths, "--format", "md")
        assert code == 0
        tables = markdown_tables(out)
        assert tables
        for rows in tables:
            assert len({len(row) for row in rows}) == 1
            assert len(rows) > 1
        assert "<b>" not in out
        assert "<script>" not in out
        assert "\x1b" not in out


@given(st.text())
def test_markdown_cells_stay_one_cell(text: str) -> None:
    line = markdown._row(iter([text, "next"]))
    assert "\n" not in line
    assert len(split_row(line)) == 2


@given(st.text())
def test_latex_leaves_no_special_character_bare(text: str) -> None:
    escaped = latex.escape(text)
    bare = re.sub(r"\\(?:[&%$#_{}]|text\w+\{\})|\$\\\w+\$|\$\^\\circ\$|\{\[\}|\{\]\}", "", escaped)
    assert not set(bare) & set("&%$#_{}~^\\<>|[]")
    assert "\n" not in escaped


@pytest.mark.slow
def test_latex_rows_have_as_many_cells_as_columns(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--format", "latex")
    for columns, body in re.findall(
        r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", out, re.DOTALL
    ):
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) > 1
        for row in rows:
            spanned = re.match(r"\\multicolumn\{(\d+)\}", row)
            if spanned:
                assert int(spanned[1]) == len(columns)
            else:
                assert len(re.findall(r"(?<!\\)&", row)) == len(columns) - 1


def test_text_obeys_no_markup_and_passes_no_control_code(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--full")
    assert "[red]r[/red]" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)


def test_csv_holds_no_formula(hostile: Path, report: Run) -> None:
    _, out, _ = report(hostile, "--format", "csv")
    rows = list(csv.reader(io.StringIO(out)))
    assert len(rows) == 1 + 2 * len(HOSTILE)
    assert len({len(row) for row in rows}) == 1
    for row in rows:
        for cell in row:
            assert not cell.startswith(("=", "@", "+")), cell
            assert not cell.startswith("-") or float(cell) < 0


@given(st.text() | st.floats() | st.booleans() | st.none())
def test_csv_cells_are_inert(value: object) -> None:
    cell = write_cell(value)
    assert not isinstance(value, str) or not cell.startswith(tuple("=+-@＝＋－＠"))
    assert "nan" not in cell or isinstance(value, str)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["=1+1", "＝1+1", "＋1", "－1", "＠a", " \x1b＝1+1", "'=1", "plain"]
)
def test_every_csv_has_one_guard_against_formulas(tmp_path: Path, text: str, report: Run) -> None:
    """The records, as the store writes them, and the report's CSV of the same text."""
    rows = [make_record(Case(), status=Status.ERROR, reason=text, gpu="A card", torch="2.13")]
    folder = write_sweep(tmp_path / "s", rows)
    _, printed, _ = report(folder, "--format", "csv")
    stored = (folder / "records.csv").read_text(encoding="utf-8")
    cells = [next(csv.DictReader(io.StringIO(said)))["reason"] for said in (stored, printed)]
    assert cells[0] == cells[1]
    assert not cells[0].startswith(tuple("=+-@＝＋－＠"))


KEY = ("precision", "loss_scale", "batch_size")


@pytest.mark.slow
def test_csv_and_json_say_the_same(rtx_like: Path, report: Run) -> None:
    _, text, _ = report(rtx_like, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    _, text, _ = report(rtx_like, "--format", "json")
    document = json.loads(text)
    assert [row["status"] for row in rows] == [case["status"] for case in document["cases"]]
    key = {"precision": "fp16", "loss_scale": "128"}
    fp16 = next(r for r in rows if key | {"batch_size": "512"} == {n: r[n] for n in KEY})
    case = next(c for c in document["cases"] if key | {"batch_size": 512} == {n: c[n] for n in KEY})
    assert float(fp16["speedup"]) == case["speedup"]
    assert case["speedup"] == pytest.approx(
        (100 + 1000 / 512 + 0.3) / (0.4 * (100 + 1000 / 512) + 0.3)
    )
    assert float(fp16["published_epoch_time_s"]) == 140.061
    assert document["tables"][0]["rows"][0][:3] == [
        {"text": "fp32", "value": "fp32"},
        {"text": "none", "value": ""},
        {"text": "128", "value": 128},
    ]
    assert "speedup" in document["columns"]


@pytest.mark.slow
def test_other_outcomes_are_named_with_their_reasons(fake_cards: list[Path], report: Run) -> None:
    _, out, _ = report(fake_cards[0], "--full")
    for words in (
        "not measured",
        "out of memory?",
        "unsupported: bfloat16 is emulated on this card",
        "timeout: the epoch ran past 600 s",
        "killed: SIGKILL from outside the sweep",
        "diverged",
        "throttled: hardware thermal slowdown",
    ):
        assert words in out


@pytest.mark.slow
def test_estimates_and_synthetic_accuracy_are_marked(
    tmp_path: Path, quick: Path, report: Run
) -> None:
    _, out, _ = report(quick, "--full")
    overview = out[out.index("Overview") : out.index("What each change does")]
    found = re.compile(r" (fp32|bf16-amp) +(64|128|256) ")
    rows = [line for line in overview.splitlines() if found.match(line)]
    assert len(rows) == 6
    for row in rows:
        assert re.match(r" \S+ +\d+ +≈[\d.]+ +≈[\d.]+ ", row)
    assert "Only 5 % of an epoch was measured" in out
    assert "accuracy (%)" not in report(quick, "--format", "md")[1]
    whole = make_record(Case(dataset="synthetic"), **measured(9, GIB, train_accuracy=0.3))
    folder = write_sweep(tmp_path, [whole])
    assert "| synthetic accuracy (%) |" in report(folder, "--format", "md")[1]
    assert "peak of the process, on a CPU" in out
    assert "2019" not in out


@pytest.mark.slow
def test_published_figures_say_they_are_cold(rtx_like: Path, report: Run) -> None:
    _, out, _ = report(rtx_like, "--full")
    assert " 212.3 " in out
    assert "cold first epoch" in out
    _, out, _ = report(rtx_like, "--reference", "none")
    assert " 212.3 " not in out


@pytest.mark.slow
def test_several_sweeps_stand_side_by_side(fake_cards: list[Path], report: Run) -> None:
    _, out, _ = report(*fake_cards, "--full")
    table = out[out.index("side by side") :]
    assert table.index("NVIDIA H200") < table.index("NVIDIA RTX 6000 Ada")


def answer_of(folder: Path, rows: list[Record]) -> str:
    from bench.report.document import build
    from bench.study.sweeps import read_sweeps

    sentences = build(read_sweeps([write_sweep(folder, rows)])).answers[0].sentences
    others = ("All else equal", "Every batch size fits")
    return " ".join(said for said in sentences if not said.startswith(others))


@pytest.mark.slow
def test_the_answer_names_the_fastest_that_can_be_trusted(tmp_path: Path) -> None:
    fp32, fp16 = repeat(Case(), (200, 201, 199), 10), repeat(FP16, (100, 100.5, 99.5), 6)
    bf16 = repeat(Case(precision="bf16"), (50,), 6, neighbours_computing=1)
    said = answer_of(tmp_path / "a", [*fp32, *fp16, *bf16])
    assert said == (
        "Fastest of the rows without warnings: fp16 · batch size 128, "
        "100.0 (99.5–100.5) s an epoch (500.0 images/s), 2.00 times as fast as fp32 at that batch "
        "size with 40 % less memory. Faster, but with warnings: bf16 · batch size 128, 50.00 s: "
        "shared."
    )
    assert answer_of(tmp_path / "b", bf16) == (
        "Every case has a warning, so none is called the fastest. "
        "Lowest time: bf16 · batch size 128, 50.00 s: shared."
    )
    said = answer_of(tmp_path / "f", [*fp32, *fp16])
    assert said.startswith("Fastest: fp16 · batch size 128, ")
    fp32[0].measurement.warmup_steady = False
    assert "(the fp32 times have warnings)" in answer_of(tmp_path / "c", [*fp32, *fp16])
    assert "no other precision was faster" not in answer_of(tmp_path / "d", fp16)
    assert "there is no fp32 case here to compare it with" in answer_of(tmp_path / "e", fp16)


FP16 = Case(precision="fp16", loss_scale=128.0)


def repeat(case: Case, times: Sequence[float], gib: float, **values: Any) -> list[Record]:
    card = {"gpu": "A card", "torch": "2.13"}
    return [
        make_record(case, repeat=i, **{**card, **measured(time, gib * 2**30), **values})
        for i, time in enumerate(times, 1)
    ]


def test_nothing_is_called_the_fastest_from_single_runs(tmp_path: Path) -> None:
    said = answer_of(tmp_path, [*repeat(Case(), (200,), 10), *repeat(FP16, (100,), 6)])
    assert said.startswith("Single runs in all cases, so small differences may be chance")
    assert "use --repeats 3. Lowest time: fp16 · batch size 128, 100.0 s " in said
    assert "astest" not in said


@pytest.mark.slow
def test_a_speedup_where_fp32_is_slow_stands_beside_the_one_over_its_fastest(
    tmp_path: Path,
) -> None:
    """The committed CPU sweep: 2.60× at a batch size at which fp32 is far from its best."""
    small, large = Case(batch_size=64), Case(batch_size=256)
    bf16 = repeat(Case(precision="bf16-amp", batch_size=256), (57, 57.1, 56.9), 8)
    slow = repeat(large, (148, 148.1, 147.9), 10)
    said = answer_of(tmp_path / "a", [*bf16, *slow, *repeat(small, (89, 89.1, 88.9), 5)])
    assert said.endswith(
        "2.60 times as fast as fp32 at that batch size with 20 % less memory, "
        "1.56 times as fast as fp32 at its fastest (batch size 64)."
    )
    said = answer_of(tmp_path / "b", [*bf16, *slow, *repeat(small, (150, 150.1, 149.9), 5)])
    assert said.endswith("2.60 times as fast as fp32 at that batch size with 20 % less memory.")
    shared = repeat(large, (148, 148.1, 147.9), 10, neighbours_computing=1)
    said = answer_of(tmp_path / "c", [*bf16, *shared, *repeat(small, (89, 89.1, 88.9), 5)])
    assert "(that fp32 time has a warning), 1.56 times as fast as fp32 at its fastest" in said
    said = answer_of(tmp_path / "d", [*bf16, *shared])
    assert said.endswith("20 % less memory (the fp32 times have warnings).")


@pytest.mark.slow
def test_what_is_left_out_of_a_list_is_said_to_be_cases(tmp_path: Path) -> None:
    rows = [
        row
        for i in range(5)
        for row in repeat(Case(batch_size=64 + i), (50 + i,), 6, neighbours_computing=1)
    ]
    rows += repeat(Case(), (60, 60.1, 59.9), 6)
    assert answer_of(tmp_path / "a", rows).endswith(
        "fp32 · batch size 66, 52.00 s: shared; and 2 more cases."
    )
    said = answer_of(tmp_path / "b", [*rows[:4], *rows[5:]])
    assert said.endswith("fp32 · batch size 67, 53.00 s: shared.")


def test_two_runs_of_two_make_nothing_the_fastest(tmp_path: Path) -> None:
    """Of two equal cases both runs of one are below both of the other one time in three."""
    two = [*repeat(Case(), (200, 201), 10), *repeat(FP16, (100, 100.5), 6)]
    said = answer_of(tmp_path, two)
    assert said.startswith("Fewer than 3 runs in all cases, so small differences may be chance")
    assert "Lowest median: fp16 · batch size 128, " in said
    assert "astest" not in said


@pytest.mark.slow
def test_what_overlaps_is_not_told_apart(tmp_path: Path) -> None:
    bf16 = repeat(Case(precision="bf16"), (101, 103, 99.8), 6)
    slow = repeat(Case(batch_size=256), (101, 102, 103), 6)
    said = answer_of(tmp_path / "a", [*repeat(FP16, (100, 100.5, 99), 6), *bf16, *slow])
    assert said.startswith("Lowest median: fp16 · batch size 128, ")
    assert "overlap with those of bf16 · batch size 128, so the difference is not certain" in said
    assert "Fastest" not in said
    wild = repeat(Case(precision="tf32"), (103, 130, 90), 6)  # noisy, and no slower for certain
    said = answer_of(tmp_path / "b", [*repeat(FP16, (100, 100.5, 99), 6), *wild])
    assert "overlap with those of tf32 · batch size 128, so the difference is not certain" in said


@pytest.mark.slow
def test_a_single_run_is_not_beaten_for_certain(tmp_path: Path) -> None:
    """It shows no spread of its own, so it is taken to have that of the fastest case."""
    rows = repeat(FP16, (100, 101, 98), 6)
    said = answer_of(tmp_path / "a", [*rows, *repeat(Case(precision="bf16"), (101.5,), 6)])
    assert "overlap with those of bf16 · batch size 128, so the difference is not certain" in said
    said = answer_of(tmp_path / "b", [*rows, *repeat(Case(precision="bf16"), (104,), 6)])
    assert "Fastest: fp16 · " in said


@pytest.mark.slow
def test_rows_of_one_case_say_what_tells_them_apart(tmp_path: Path) -> None:
    """Added with --mix: the same case of an edited network, and on another version of torch."""
    networks = [
        make_record(Case(), model_source=source, **{**measured(time, 5), "torch": "2.13"})
        for source, time in (("821e784d0000", 10), ("d97f8d210000", 30))
    ]
    said = text_of(tmp_path / "a", networks)
    assert "network 821e784d" in said
    assert "network d97f8d21" in said
    versions = [
        make_record(Case(), torch=torch, **measured(time, 5))
        for torch, time in (("2.12", 10), ("2.13", 30))
    ]
    said = text_of(tmp_path / "b", versions)
    assert "torch 2.12" in said
    assert "torch 2.13" in said
    assert "network" not in said


def test_no_time_is_said_plainly(tmp_path: Path) -> None:
    lost = make_record(Case(), status=Status.ERROR, reason="boom", gpu="A card", torch="2.13")
    assert answer_of(tmp_path, [lost]) == "No case was timed."


def text_of(folder: Path, rows: list[Record]) -> str:
    from bench.render import text
    from bench.report.document import build
    from bench.study.sweeps import read_sweeps

    report = build(read_sweeps([write_sweep(folder, rows)]))
    heads = [head.label for table in report.tables for head in table.heads]
    return " ".join([*heads, *text.render(report, full=True).split()])


@pytest.mark.slow
def test_tables_say_what_stands_beside_a_number(tmp_path: Path) -> None:
    three = repeat(FP16, (88.8, 76.6, 90.4), 6)
    for run, loss in zip(three, (2.05, 2.04, 2.11), strict=True):
        run.measurement.train_loss = loss
    said = text_of(tmp_path / "three", three)
    assert "epoch time (s), range" in said
    assert "88.80 (76.60–90.40)" in said
    assert "2.050 (2.040–2.110)" in said
    assert "Medians of 3 runs; in parentheses the lowest and the highest of them." in said
    assert "Loss and accuracy: medians over 3 seeds." in said
    assert "median absolute deviation" not in said
    said = text_of(tmp_path / "five", repeat(FP16, (90, 91, 92, 93, 94), 6))
    assert "epoch time (s), interval" in said
    assert "92.00 (90.00–94.00)" in said
    assert (
        "the median of as many more runs under the same conditions falls inside it in 83 of" in said
    )
    within = {"epoch_time_low_s": 29.8, "epoch_time_high_s": 31.2, "train_loss": 2.0}
    part = Case(fraction=0.1)
    said = text_of(tmp_path / "one", repeat(part, (30.5,), 6, **within))
    assert "epoch time (s) [within the run]" in said
    assert "≈30.50 [29.80–31.20]" in said
    assert "95 % interval of the epoch, within this run" in said
    assert "Loss: one seed." in said
    both = [*repeat(part, (30.5,), 6, **within), *repeat(Case(batch_size=256), (9, 10), 6)]
    assert "≈30.50 [29.80–31.20]" in text_of(tmp_path / "both", both)


def test_memory_saved_says_what_is_in_it(tmp_path: Path) -> None:
    said = text_of(tmp_path, [*repeat(Case(), (200,), 10), *repeat(FP16, (100,), 6)])
    assert "Memory saved compares all of it, including the CUDA context and the dataset" in said
    assert "tensors saved compares torch's tensors only" in said
    assert re.search(r"6\.00 +40\.0 +40\.0", said)


def test_memory_saved_on_a_cpu_says_what_is_shared_there(tmp_path: Path) -> None:
    on_cpu = [replace(case, device="cpu") for case in (Case(), FP16)]
    said = text_of(tmp_path, [*repeat(on_cpu[0], (200,), 10), *repeat(on_cpu[1], (100,), 6)])
    assert "including Python, torch and the dataset" in said


@pytest.mark.slow
def test_files_hold_the_ends_as_numbers(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path / "s", repeat(FP16, (88.8, 76.6, 90.4), 6))
    _, text, _ = report(folder, "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(text))
    _, text, _ = report(folder, "--format", "json")
    (case,) = json.loads(text)["cases"]
    for values in (row, case):
        assert float(values["epoch_time_s_low"]) == 76.6
        assert float(values["epoch_time_s_high"]) == 90.4
        assert float(values["images_per_s_low"]) == pytest.approx(50_000 / 90.4)
        assert (values["spread"], int(values["seeds"])) == ("range", 3)
    assert not row["coverage"]


def test_class_folders_are_not_passed_off_as_the_archive(tmp_path: Path) -> None:
    facts = {**measured(10, 2**30), "dataset_source": "folders", "train_images": 300}
    record = make_record(Case(), **facts)
    from bench.report.document import build
    from bench.study.sweeps import read_sweeps

    said = markdown.render(build(read_sweeps([write_sweep(tmp_path / "s", [record])])))
    assert "Dataset: CIFAR-10 from class folders, 300 training images." in said


def test_a_number_is_not_parted_from_its_percent_sign() -> None:
    from rich.console import Console

    from bench.render.model import Cell, Head, Table
    from bench.render.text import draw_table

    console = Console(width=20, file=io.StringIO())
    heads = (Head("a", "a", number=False, wrap=True), Head("b", "b"))
    cell = Cell("64 → 65: it is 23 % slower")
    for width in range(14, 30):
        console.width = width
        draw_table(Table("t", "t", heads, ((cell, Cell("1")),), ()), console)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert "23 %" in drawn
    assert not re.search(r"^ *%", drawn, re.MULTILINE)
