"""`python -m bench.report`: what it is asked and refuses, and what each format writes, against
hostile names; tests/golden has what it says."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.advise.__main__ import build_parser as build_advise
from bench.fit import build_parser as build_fit
from bench.report.__main__ import REPORT_FORMATS, main
from bench.results.store.table import write_lines
from bench.schema.case import Case
from bench.schema.preset import ADVICE
from bench.schema.record import Status
from bench.schema.rules import settle
from bench.search.options import build_parser as build_search
from bench.sweep.options import build_parser as build_sweep
from tests.planted.records import (
    FP16,
    FP32,
    REFERENCE,
    ROOT,
    at,
    learn,
    make_card,
    make_record,
    measured,
    ran,
    write_sweep,
)
from tests.planted.sweeps import Folders
from tests.planted.warnings import list_warned

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "no records there"),
        ([str(ROOT / "results")], "no records there; give one in it: "),
        (["{readme}"], "give a sweep's folder"),
        (["{reference}", "--format", "htlm"], "did you mean 'html'?"),
        (["{reference}", "-o", "{folder}/no/such/file"], "choose a place that can be written"),
        (["{reference}", "-o", "{folder}/page.pdf"], "page.pdf: format 'pdf': right values: text"),
        (["{reference}", "--where", "precision=fp61"], "did you mean 'fp16'?"),
        (["{reference}", "--where", "precision=bf16"], "no case has it; there is fp32"),
        (["{reference}", "--where", "precision"], "write AXIS=VALUE"),
        (["{reference}", "--by", "precison"], "did you mean 'precision'?"),
        (["{reference}", "--for", "tim"], "did you mean 'time'?"),
    ],
)
def test_bad_input_is_one_line_and_rc_2(
    arguments: list[str], expected: str, tmp_path: Path, report: Run
) -> None:
    readme = REFERENCE.with_name("README.md")
    places = {"reference": REFERENCE, "readme": readme, "folder": tmp_path}
    code, out, err = report(*(text.format(**places) for text in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert expected in err


def test_a_folder_without_rows_yet_is_no_error(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path / "new", [])
    for format in REPORT_FORMATS:
        code, out, err = report(folder, "--format", format)
        assert (code, err) == (0, "")
        assert format != "text" or "No run has ended here yet." in out


def test_output_goes_to_the_file_and_a_dash_is_the_terminal(tmp_path: Path, report: Run) -> None:
    printed = report(REFERENCE, "--format", "md", "-o", "-")[1]
    code, out, _ = report(REFERENCE, "--format", "md", "-o", tmp_path / "r.md")
    assert (code, out) == (0, "")
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == printed
    assert [*tmp_path.iterdir()] == [tmp_path / "r.md"]
    # the name of the file says its format, unless --format does
    for name, flags, begins in (
        ("named.md", (), printed[:80]),
        ("page.html", (), "<!doctype html>"),
        ("table.tex", (), "%"),
        ("page.txt", (), "rtx-titan-2019: "),
        ("text.html", ("--format", "text"), "rtx-titan-2019"),
        ("other.txt", ("--format", "markdown"), printed[:80]),
    ):
        assert report(REFERENCE, *flags, "-o", tmp_path / name)[0] == 0
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(begins), name


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m bench.report {REFERENCE} --format csv | head -c 1"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_baseline_that_is_left_out_still_counts(report: Run) -> None:
    """As in the table below, whose speed-ups are over it."""
    lab = str(REFERENCE.with_name("h200-lab.csv"))
    output = " ".join(report(lab, "--where", "precision=fp16", "compile=off")[1].split())
    assert "≈36.81 s in fp32 (3.35 times as fast), with 14.0 instead of 28.9 GiB" in output


def test_cases_of_own_classes_and_of_an_axis_that_is_none(tmp_path: Path, report: Run) -> None:
    """Both of what may be empty, as loss scales, and of what has none as a word."""
    cases = [replace(case, dataset="synthetic", classes=7) for case in (FP32, FP16)]
    rows = [row for case in cases for row in learn(case, [math.log(7)] * 3)]
    folder = write_sweep(tmp_path, rows)
    asked = ("--format", "json", "--where", "parallel=none", "classes=7", "loss-scale=none,128")
    document = json.loads(report(folder, *asked)[1])
    assert [case["classes"] for case in document["cases"]] == [7, 7]
    (effect,) = next(table for table in document["tables"] if table["name"] == "effects")["rows"]
    assert "cannot tell" in json.dumps(effect), "a loss of log 7 of seven classes is a guess"


def test_by_an_axis_groups_by_it_and_where_keeps_the_partners(tmp_path: Path, report: Run) -> None:
    cases = [case for size in (64, 128) for case in at(size, FP32, FP16)]
    times = {"fp32": 100, "fp16": 50}
    rows = [row for case in cases for row in ran(case, (times[case.precision],))]
    folder = write_sweep(tmp_path, rows)
    lines = [line.strip() for line in report(folder, "--by", "batch-size")[1].splitlines()]
    first, second = lines.index("batch size 64"), lines.index("batch size 128")
    assert first < second
    assert [lines[first + i].split()[0] for i in (1, 2)] == ["fp32", "fp16"]
    asked = ("--format", "json", "--where", "precision=fp16", "batch-size=64")
    (case,) = json.loads(report(folder, *asked)[1])["cases"]
    assert (case["precision"], case["batch_size"], case["speedup"]) == ("fp16", 64, 2)


def test_a_user_s_own_network_has_its_own_words(tmp_path: Path, report: Run) -> None:
    """Of its items, and not of images, of CIFAR-10 or of a GPU."""
    own = "mine:make"
    case = Case(model=own, workload=own, dataset="own", device="cpu")
    card = {**make_card("NVIDIA H200"), "gpu": "", "cpu": "AMD EPYC", "cuda": "", "cudnn": ""}
    values = measured(10, 2**30, peak_device_bytes=None, peak_process_bytes=2**30)
    folder = write_sweep(tmp_path, [make_record(case, **{**card, **values}, unit="tokens")])
    assert not re.search(r"CIFAR|GPU|images", report(folder)[1])


def test_what_was_asked_for_and_failed_is_on_the_first_screen(tmp_path: Path, report: Run) -> None:
    """Also where no case is recommended, since all have a warning."""
    lost = {"missing": "eval_time_s: ValueError: no luck", "warmup_steady": False}
    folder = write_sweep(tmp_path, ran(Case(evaluate=True), (10,), warmup_steps=9, **lost))
    output = " ".join(report(folder)[1].split())
    assert "Every case has a warning" in output
    why = "! --evaluate failed: ValueError: no luck (the only run): Remove the cause, of which the"
    assert why in output
    assert "not all done" not in output


def test_the_first_failure_is_on_the_first_screen_with_its_log(tmp_path: Path, report: Run) -> None:
    """And what it held until then is no memory that the case takes."""
    values = {"peak_device_bytes": 2**20, "epoch_time_s": None, "log": "logs/fp16-1.log"}
    ends = {"status": Status.ERROR, "reason": "ValueError: no such shape (net.py, line 3)"}
    rows = [*ran(FP32, (10,), 3), make_record(FP16, gpu="A card", **ends, **values)]
    output = " ".join(report(write_sweep(tmp_path, rows))[1].split())
    first = "The first: ValueError: no such shape (net.py, line 3) (logs/fp16-1.log in its folder)."
    assert f"! No result (1 of 2 runs): {first} Run them again with --retry error." in output
    assert "3.00" in output
    assert " 0.00" not in output


def test_a_command_without_settings_is_named_where_it_failed(tmp_path: Path, report: Run) -> None:
    ends = {"status": Status.ERROR, "reason": "the command ended with code 3", "epoch_time_s": None}
    rows = [make_record(settle({"command": "sh t.sh"}), **ends)]
    lines = report(write_sweep(tmp_path, rows), "--full")[1].splitlines()
    assert "t.sh: error: the command ended with code 3" in lines


HOSTILE = [
    "=HYPERLINK(1) | `a` <b>x</b> [red]r[/red] @x\x1b[31m \u202e*bold* _em_ ~~del~~ \\| \\",
    "-2 $\\alpha$ & 50 % # {x} ^ ~ \\input{/etc/passwd} &lt; \"quoted\", 'n'\u2028new",
]


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


def test_markdown_rows_have_as_many_cells_as_columns(hostile: Path, report: Run) -> None:
    """Where a line is split at pipes that no backslash escapes."""
    code, out, _ = report(hostile, "--format", "md")
    assert code == 0
    for block in re.findall(r"(?:^\|.*\n)+", out, re.MULTILINE):
        pipes = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in block.splitlines()}
        assert len(pipes) == 1
    assert not re.search(r"<b>|\x1b", out)


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
    for cell in (cell for row in rows for cell in row):
        assert not cell.startswith(("=", "@", "+")), cell
        assert not cell.startswith("-") or float(cell) < 0


@given(st.text() | st.floats() | st.booleans() | st.none())
def test_csv_cells_are_inert(value: object) -> None:
    ((cell,),) = csv.reader(io.StringIO(write_lines([[value]]).decode()))
    assert not isinstance(value, str) or not cell.startswith(tuple("=+-@＝＋－＠"))
    assert "nan" not in cell or isinstance(value, str)


MAKERS = {
    "sweep": build_sweep(),
    "advise": build_advise(),
    "search": build_search(None),
    "fit": build_fit(),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_what_helps_is_a_flag_that_the_command_of_the_rows_takes(
    maker: str, tmp_path: Path, report: Run
) -> None:
    """Or one of bench.sweep, which is named then: over all warnings, and in all sentences."""
    preset = {"advise": ADVICE}.get(maker, maker)
    once = Case(precision="bf16"), Case(precision="fp16", batch_size=64)
    warned = [*list_warned(), *(row for case in once for row in ran(case, (9,)))]
    noisy = write_sweep(tmp_path / "w", warned, f"python -m bench.{maker} --out w", preset)
    single = [row for case in once for row in ran(case, (9, 9.1), train_loss=9.0)]
    sound = write_sweep(tmp_path / "s", single, f"python -m bench.{maker} --out s", preset)
    taken = set()
    for folder in (noisy, sound):
        document = json.loads(report(folder, "--format", "json")[1])
        texts = [one["remedy"] for one in document["warnings"]]
        texts += [sentence for answer in document["answers"] for sentence in answer["sentences"]]
        for text in texts:
            advice, found, named = text.rpartition(" For --")
            own = re.split(r"\bbench\.", advice if found else text)[0]
            lacks = {*re.findall("--[a-z-]+", own)} - {*MAKERS[maker]._option_string_actions}
            assert lacks == {*re.findall("--[a-z-]+", f"--{named}" if found else "")}, text
            assert not found or text.endswith("use python -m bench.sweep.")
            taken |= lacks
        if (step := document["next_step"]) and step["command"]:
            _, _, name, *words = shlex.split(step["command"])
            if name.partition(".")[2] in MAKERS:
                MAKERS[name.partition(".")[2]].parse(words)
        assert "--repeats" not in (step or {"why": ""})["why"] or maker == "sweep"
    assert taken <= {*MAKERS["sweep"]._option_string_actions}
    assert ("--repeats" in taken) == (maker != "sweep")


def test_csv_and_json_say_the_same(planted: Folders, report: Run) -> None:
    """Of each case each number; those of one by hand."""
    rows = list(csv.DictReader(io.StringIO(report(planted["tuned"], "--format", "csv")[1])))
    document = json.loads(report(planted["tuned"], "--format", "json")[1])
    for row, case in zip(rows, document["cases"], strict=True):
        numbers = {name: value for name, value in case.items() if type(value) in (int, float)}
        assert len(numbers) > 10
        assert {name: float(row[name]) for name in numbers} == numbers
        assert row["status"] == case["status"]
    fp16 = [c for c in document["cases"] if (c["precision"], c["batch_size"]) == ("fp16", 256)]
    assert max(case["speedup"] or 0 for case in fp16) == pytest.approx(110 / 40)
    assert "speedup" in document["columns"]


def test_files_hold_the_ends_as_numbers(tmp_path: Path, report: Run) -> None:
    folder = write_sweep(tmp_path / "s", ran(Case(), (88.8, 76.6, 90.4)))
    (case,) = json.loads(report(folder, "--format", "json")[1])["cases"]
    assert (case["epoch_time_s_low"], case["epoch_time_s_high"]) == (76.6, 90.4)
    assert case["images_per_s_low"] == pytest.approx(50_000 / 90.4)
    assert (case["spread"], case["seeds"]) == ("range", 3)


def test_a_time_of_zero_is_none(tmp_path: Path, report: Run) -> None:
    """Only an edited file has one, and a logarithm of it would end the report."""
    rows = ran(FP32, (1.0, 20.0, 21.0))
    rows[0].measurement.epoch_time_s = 0.0
    write_sweep(tmp_path / "edited", rows)
    code, out, _ = report(tmp_path / "edited")
    assert code == 0
    assert "20.50" in out
