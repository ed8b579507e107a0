"""What people get wrong, in a table: each gets one line that says what would be right, and rc 2.

Nothing is trained, written or created before that line.
"""

from __future__ import annotations

import math
import os
import pickle
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import card, fit
from bench.advise.__main__ import main as advise
from bench.base import progress
from bench.check.__main__ import main as check
from bench.compare.__main__ import main as compare
from bench.doctor.__main__ import main as doctor
from bench.export import main as export
from bench.publish.__main__ import main as publish
from bench.report.__main__ import main as report
from bench.results.store.reader import read_records
from bench.results.store.table import RECORDS
from bench.scales.__main__ import main as scales
from bench.schema.flags import join_flags
from bench.schema.record import SCHEMA
from bench.search.__main__ import main as search
from bench.sweep.__main__ import main as sweep
from bench.validate.__main__ import main as validate
from bench.why import main as why
from tests.planted.records import ROOT, make_run, write_sweep
from tests.pytest_for_tests import Capture, Patch

pytestmark = pytest.mark.usefixtures("fake")

FAKE = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic", "--precision", "fp32"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: Patch) -> None:
    """In an empty folder, so that whatever is created shows; and what takes half a minute on a busy
    machine is not told of, so that the error is the one line."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(progress, "EVERY_S", math.inf)


def expect(
    capsys: Capture, main: Callable[[Sequence[str]], int], arguments: Sequence[str], *parts: str
) -> None:
    __tracebackhide__ = True
    before = set(Path().rglob("*"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("\n")
    assert len(captured.err.splitlines()) == 1, captured.err
    assert len(captured.err) < 800, "one line, not a page"
    for part in parts:
        assert part in captured.err, captured.err
    assert set(Path().rglob("*")) == before, "nothing was created"


@pytest.mark.parametrize("main", [report, compare, why, validate, export])
def test_where_results_are_missing_the_newest_are_named(
    main: Callable[[Sequence[str]], int], capsys: Capture
) -> None:
    wrong: tuple[tuple[list[str], str], ...] = (
        ([], "are required: "),
        (["nosuch", *["--to", "wandb"] * (main is export)], "nosuch: no records there; "),
    )
    for arguments, what in wrong:
        expect(capsys, main, arguments, what, "give a folder that `bench.sweep --out` wrote")
    for name in ("old", "rehearsal-1", "new"):
        write_sweep(Path("results", name), [make_run()])
        (Path("results", name) / RECORDS).touch()
    os.utime(Path("results/old") / RECORDS, (0, 0))
    for arguments, what in wrong:
        expect(capsys, main, arguments, what, "the newest results here are in results/new")


FLAGS = [
    (["--batch-size", "0"], "--batch-size '0': a batch size is a whole number of at least 1"),
    (["--batch-size", "1"], "batch size 1 leaves a batch of one image, and BatchNorm needs two"),
    (["--batch-size", "64,128"], "--batch-size 64,128: give --batch-size 64 128"),
    (["--precision", "fp32,bf16"], "--precision fp32,bf16: give --precision fp32 bf16"),
    (["--fraction", "10%,", "20%"], "--fraction 10%,: give --fraction 10%"),
    (
        ["--command", "true {rate}", "--vary", "rate", "0.1,1e-2"],
        r"--vary rate 0.1 1e-2; a comma that is part of a value is written '\,'",
    ),
    (["--command", "true {a}", "--vary", "a", "1,2", "3"], "--vary a 1,2 3: give --vary a 1 2 3;"),
    (
        ["--command", "true {a}", "--vary", "a", "1,2", "3 4", "off=,on=--x"],
        "give --vary a 1 2 '3 4' off=,on=--x;",
    ),
    (
        ["--command", "true {a}", "--vary", "a", "b=it's,c="],
        "--command with the words of --vary: its quotes do not match (No closing quotation)",
    ),
    (
        ["--command", "true {a}", "--vary", "a", "b={x},c="],
        "--vary a b={x},c=: the words of a value can hold no braces",
    ),
    (
        ["--command", "true {a}", "--vary", "a", "b=1,c=2", "b=3,d=4"],
        "--vary a b=1,c=2 b=3,d=4: a value is given twice; leave out one",
    ),
    (
        ["--command", "true {a:b=,c=-c}", "--vary", "a", "b=,c=-c"],
        "--vary a and {a:…} both give words; leave out one",
    ),
    (
        ["--command", "true {a}", "--vary", "a"],
        "--vary a: give a name once, and then its values, such as --vary depth 12 24",
    ),
    (
        ["--command", "none", "true"],
        "--command none beside a command: give them in sweeps of their own",
    ),
    (
        ["--command", "true", "--preset", "quick"],
        "--preset is a grid of the harness's own training; leave it out",
    ),
    (["--timeout", "9", "python"], "unknown argument 'python'; a command stands in quotes after"),
    (["--batch-size", "50001"], "batch size 50001 is above the dataset's 50000 images"),
    (["--batch-size", "49999"], "batch size 49999 leaves a last batch of one image, and BatchNorm"),
    (["--precision", "fp61"], "--precision 'fp61': did you mean 'fp16'?"),
    (["--loss-scale", "128"], "none of the precisions measured scales a loss; add --precision"),
    (["--loss-scale", "0"], "--loss-scale '0': a loss scale is a finite number above 0, 'dynamic'"),
    *(
        (["--precision", "fp16", "--loss-scale", text], f"--loss-scale {shown}: a loss scale is "
         "from 2^-126 to 2^127, which is what float32 holds")
        for text, shown in (("1e40", "1e+40"), ("3e38", "3e+38"), ("1e-38", "1e-38"))
    ),
    (["--lr", "0"], "--lr '0': a learning rate is a finite number above 0"),
    (["--fraction", "1.5"], "--fraction '1.5': a fraction is a finite number above 0"),
    (["--evaluate", "yes"], "--evaluate 'yes': a boolean value is 'on' or 'off'"),
    (["--device", "gpu"], "--device 'gpu': right values: cuda, cpu"),
    (["--model", "=cmd|' /C calc'!A0"], "--model", "package.module:factory"),
    (["--model", "\x1b[31m\n\nred"], "--model '\\x1b[31m\\n\\nred'"),
    (["--input", "48x64x3"], "--input '48x64x3': channels come first; did you mean 3x48x64?"),
    (
        ["--dataset", "cifar10", "--input", "3x64x64"],
        "--input is given, but it is for synthetic images; add --dataset synthetic",
    ),
    (["--length", "64"], "--length is given, but images are no sequences; add --model gpt-small"),
    (["--model", "gpt-tiny", "--dataset", "cifar10"], "--model gpt-tiny brings its own dataset"),
    (
        ["--model", "gpt-tiny", "--loader", "torch"],
        "--loader torch with --model gpt-tiny cannot be: its texts are drawn on the device; leave",
    ),
    (["--dynamic", "auto"], "--dynamic is given, but nothing is compiled; add --compile on"),
    (["--preset", "quik"], "--preset 'quik': did you mean 'quick'?"),
    (["--preset", "quick", "--config", "a.toml"], "--preset and --config are both given; use one"),
    (["--config", "no\x1b[2J\nwhere"], "--config no [2J where: No such file or directory"),
    (["--timeout", "0"], "--timeout '0': give a number of seconds, at least 0.001"),
    (["--retry", "oops"], "--retry 'oops': right values: ok, oom"),
    (["--batch-size=64", "128"], "--batch-size=64 128: give --batch-size 64 128"),
    (["--out", ""], "--out '': give DIR, or leave out --out"),
    (["--batchsize", "64"], "unknown argument '--batchsize'; did you mean '--batch-size'?"),
    (["--input", "0x3x3"], "--input '0x3x3': the shape of an image is channels, height and width, "
     "such as 3x224x224, of at most 16,777,216 values"),
    (["--freeze", ","], "--freeze ',': give none, backbone, bn or names of layers or weights, such "
     "as layer1 or '*.bias', separated by commas"),
    (["--start", "~no.such.user/w.pt"],
     "~ stands for no folder, as this user has no home; write it out"),
    (["--power-limit", "100"], "--power-limit is of a GPU; give --device cuda, or leave it out"),
    (["--accumulate", "2", "--compile", "reduce-overhead", "--device", "cuda"],
     "--accumulate 2 with --compile reduce-overhead fails in torch: its graphs write over the "
     "gradients that are summed; give --compile default"),
    (["--precision", "fp16-pure", "--optimizer", "adam"], "--precision fp16-pure with --optimizer "
     "adam diverges: squares of gradients flush to zero in fp16; leave out one"),
    (["--address", "x:1"], "--address is that of a Ray cluster; give --executor ray with it"),
    (["--trace", "--profile", "off"], "--trace keeps the traces of profiles; leave out --profile"),
    (["--shard", "1/9"], "--shard 1/9: the sweep has 1 case apart from their batch sizes, which "
     "stay together; give at most 1 shard"),
    (["--until", "60%"], "how certain a time is to be is a share such as 1%, at most 50%, or"),
    (["--memory-limit", "1MiB"], "--memory-limit '1MiB': a memory limit is at least 64MiB, or"),
    (["--config", "."], "--config .: Is a directory; give a readable TOML file"),
    (["--lanes", "3", "--device", "cpu", "cuda"], "--lanes: the cases are of cpu and cuda; give"),
    (["--shard", "5/4"], "give K/N with K from 1 to N"),
    (["--recompute", "budget:0.5"],
     "--recompute budget:0.5 is a budget of torch.compile; give --compile too"),
    (["--recompute", "budget:1"], "or budget:F, with F from 0 to below 1"),
    (["--recompute", "some"], "what is computed again is none, blocks, full or budget:F"),
    (["--recompute", "blocks", "--precision", "fp16-apex"],
     "--precision fp16-apex is not measured; leave out one"),
    (["--parallel", "dp", "--world-size", "2"],
     "--parallel dp with --device cpu cannot be: torch's DataParallel"),
    (["--parallel", "dp", "--world-size", "2", "--cudnn-benchmark", "on", "--device", "cuda"],
     "--parallel dp with --cudnn-benchmark on would time cuDNN's algorithms again in every step"),
    (["--parallel", "fsdp", "--checkpoint", "on"],
     "--checkpoint on with --parallel fsdp cannot be: a checkpoint is of one process; leave"),
    (["--parallel", "ddp", "--profile", "on"],
     "--profile on with --parallel ddp cannot be: a profile is of one process, and does not show"),
    (["--parallel", "fsdp", "--optimizer", "muon"],
     "--parallel fsdp with --optimizer muon is not measured: its step exchanges weights too"),
    (["--parallel", "fsdp", "--optimizer", "adafactor"],
     "--parallel fsdp with --optimizer adafactor cannot be: torch's fails on weights that"),
    (["--parallel", "fsdp", "--compile", "reduce-overhead"],
     "--parallel fsdp with --compile reduce-overhead is not proven to train the same: that takes"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "parts"), [(f, p) for f, *p in FLAGS], ids=lambda v: str(v)[:40])
def test_flags(capsys: Capture, flags: list[str], parts: list[str]) -> None:
    expect(capsys, sweep, join_flags(FAKE, flags), *parts)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--optimizer adamw-8bit adamw-4bit", "adamw-8bit needs torchao>=0.18 beside torch>=2.11"),
        ("--optimizer adamw-offload", "adamw-offload keeps a GPU's state in the host's memory"),
        ("--precision fp16-apex", "NVIDIA apex needs an NVIDIA GPU"),
    ],
)
def test_a_sweep_of_which_no_case_can_run_is_refused(
    capsys: Capture, monkeypatch: Patch, flags: str, reason: str, dry: list[str]
) -> None:
    """Without torchao; one that another case can run beside has a row."""
    monkeypatch.setattr("bench.sweep.inputs.find_version", lambda package: None)
    words = join_flags(FAKE, flags.split())
    expect(capsys, sweep, [*words, *dry], "error: cannot be trained here: ", reason)
    if "--optimizer" in flags and not dry:
        words = join_flags(FAKE, [*flags.split(), "sgd"], ["--repeats", "1", "--out", "out"])
        assert sweep([*words, "--no-report"]) == 0
        ends = read_records(Path("out")).query("not sentinel").set_index("optimizer")["status"]
        assert ends.pop("sgd") == "ok"
        assert {*ends} == {"unsupported"}


TAKEN = "does not take it, because it"
OTHERS = [
    (fit.main, "", "--memory-limit 2GiB"),
    (fit.main, "--memory-limit 1GiB --margin 100%", "less than 100%"),
    (fit.main, "--batch-size 64", f"--batch-size: bench.fit {TAKEN} chooses what its runs"),
    (search, "--lr 1..0.1", "--lr '1..0.1': a range is of two numbers above 0"),
    (search, "--lr 0.1 --batch-size 64", "there is one trial, and a search compares several"),
    (search, "--steps 4", "--steps: bench.search does not take it, because trials train whole"),
    (search, "--evaluate off", "--metric test_accuracy needs the test images"),
    (search, "--executor ray", "--executor ray: bench.search decides while trials run"),
    (search, "--epochs 1", "--epochs 1 leaves nothing to end early"),
    (search, "--epochs 4 8", "--epochs takes one value here, for all trials"),
    (search, "--grace 9", "--grace '9': give a whole number, from 1 to 8"),
    (advise, "--budget soon", "--budget 'soon': give a time above 0, such as 90s, 10m or 1h"),
    (advise, "--now precison=fp16", "--now 'precison=fp16': give AXIS=VALUE; did you mean"),
    (advise, "--now precision", "--now 'precision': give precision=VALUE"),
    (advise, "--batch-size 32..auto", "--batch-size 32..auto: give numbers"),
    (advise, "--until 1%", f"--until: bench.advise {TAKEN} decides"),
    (advise, "--lanes 2", "--lanes: bench.advise measures one case at a time"),
]
IMAGES = "--dataset synthetic --device cpu"
TRAINING = [
    (scales, "--precision fp32", "--precision fp32: no loss scale is chosen for it; right"),
    (
        scales,
        "--scales 0",
        "--scales '0': a loss scale is from 2^-126 to 2^127, "
        "which is what float32 holds, such as 128 or 2^16",
    ),
    (scales, "--steps 0", "--steps '0': give a whole number of at least 1"),
    (scales, "--accumulate 2", f"--accumulate: bench.scales {TAKEN} trains"),
    (scales, "--batch-size 1", "batch size 1 leaves a batch of one image, and BatchNorm needs"),
    (scales, "--show nowhere", "--show nowhere: there is no scales.json"),
    (check, "--skip first-step", "did you mean 'first-steps'?"),
    (check, "--steps 3", "at least 20"),
    (check, "--device cpu cuda", "give one"),
    (check, "--precision fp16-apex", "check fp16, which is the recipe of O2"),
    *((main, "--input 3x64x64", "leave it out") for main in (check, scales)),
]


@pytest.mark.parametrize(
    ("main", "given", "words", "expected"),
    [
        *((main, FAKE, words, expected) for main, words, expected in OTHERS),
        *((main, IMAGES.split(), words, expected) for main, words, expected in TRAINING),
        *((main, [], "--workload no_such:work", "cannot be imported") for main in (check, scales)),
        (
            sweep,
            [],
            "--command {a} --vary a b=,c=",
            "--command: '' is no program that can be run here",
        ),
        (
            sweep,
            [],
            "--command 'true {batch-size}' --batch-size 64 --device cpu",
            "{batch-size} is no placeholder; write {batch_size}",
        ),
        (advise, [], "--command a b", "--command: bench.advise advises on one command; give one"),
        (doctor, [], "--device cpu", "are for --trust; add it, or leave them out"),
        (doctor, [], "--trust --device gpu", "--device gpu: give cuda or cpu"),
        (card.main, [], "--minutes 0", "--minutes '0': give a number above 0"),
    ],
)
def test_flags_of_other_commands(
    capsys: Capture,
    main: Callable[[Sequence[str]], int],
    given: Sequence[str],
    words: str,
    expected: str,
) -> None:
    expect(capsys, main, join_flags(given, shlex.split(words)), expected)


def test_places_that_cannot_be_written(capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        for dry in ([], ["--dry-run"]):
            flags = [*FAKE, "--out", str(out), *dry]
            expect(capsys, sweep, flags, f"--out {out}: ", "choose")
        for main, *words in ((card.main,), (doctor, "--trust"), (publish, "--results", str(ROOT))):
            expect(capsys, main, [*words, "--out", str(out)], f"--out {out}: ", "choose")
    if Path("/proc/version").exists():
        expect(capsys, sweep, [*FAKE, "--out", "/proc/here"], "--out /proc/here: ", "choose")


# ---------------------------------------------------------------------------------------- presets

PRESETS = [
    (b"", "has no cases; give at least one [[grid]] table of axes"),
    (b"[[grid]]\nbatch_size = 64\n[[grids]]", "unknown key 'grids'; did you mean 'grid'?"),
    (b"[[grid]]\nbatchsize = 64", "[[grid]] 1: unknown key 'batchsize'; did you mean 'batch_size'"),
    (b"[[grid]]\nbatch_size = [64, 0]", "[[grid]] 1: batch_size '0': a batch size is"),
    (b"[[grid]]\nbatch_size = []", "[[grid]] 1: batch_size: give one value or a list of values"),
    (b"[[grid]]\nprecision = 'half'", "precision 'half': right values: fp32, tf32, fp16"),
    (b"[[grid]]\nloss_scale = 128\nprecision = 'bf16'", "--loss-scale is given, but"),
    (b"\xff\xfe[", "not TOML: 'utf-8' codec can't decode"),
    (b"a = " + b"[" * 50_000, "not TOML"),
    (b"[[grid]]\n" + b"x" * 100_000 + b" = 1", "[[grid]] 1: unknown key 'xxx", "right values"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"), [(t, p) for t, *p in PRESETS], ids=lambda v: str(v)[:50]
)
def test_presets(capsys: Capture, tmp_path: Path, text: bytes, parts: list[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(text)
    flags = ["--executor", "fake", "--device", "cpu", "--dataset", "synthetic"]
    if b"loss_scale" not in text:
        flags += ["--precision", "fp32"] if b"precision" not in text else []
    where = [] if "--loss-scale" in parts[0] else [str(file)]
    expect(capsys, sweep, [*flags, "--config", str(file)], *where, *parts)


# ------------------------------------------------------------------------------- images and records


class Escape:
    """Unpickled carelessly, it makes a file."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return Path.touch, (Path("escaped"),)  # type: ignore[return-value]


def test_altered_images(capsys: Capture, tmp_path: Path, monkeypatch: Patch) -> None:
    """What else can be wrong with a folder of images is in tests/networks/data/test_sources.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps(Escape()))
    flags = join_flags(FAKE, ["--dataset", "cifar10", "--data-dir", str(tmp_path)])
    expect(capsys, sweep, flags, str(tmp_path), "data_batch_1", "truncated or altered")


def test_records(capsys: Capture, tmp_path: Path) -> None:
    """Whoever reads them: the report, a comparison, or a sweep that would add to them. What else
    can be wrong with a file is in test_store.py."""
    good = write_sweep(tmp_path / "good", [make_run(), make_run(repeat=2)])
    file, other = good / RECORDS, tmp_path / "other.csv"
    shutil.copy(file, other)
    bad = file.read_bytes().replace(f"\n{SCHEMA},".encode(), b"\n99,", 1)
    file.write_bytes(bad)
    expected = f"{file}: schema 99 is newer than the {SCHEMA} this harness reads"
    expect(capsys, report, [str(good)], expected)
    expect(capsys, report, [str(other), str(file)], expected)
    expect(capsys, compare, [str(other), str(good)], expected)
    expect(capsys, sweep, [*FAKE, "--out", str(good)], expected)
    assert file.read_bytes() == bad
