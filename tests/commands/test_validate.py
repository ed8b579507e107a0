"""`python -m bench.validate`: each kind of tampering, planted in a copy of a committed folder."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from bench.validate.__main__ import MOST_FAULTS, main
from bench.validate.claims import CLAIMS, adds_up, validate

RESULTS = Path(__file__).parents[2] / "results"
DOCS = Path(__file__).parents[2] / "docs" / "results.md"
H100 = RESULTS / "nvidia-h100-80gb-hbm3-20261122-112118"
H200 = RESULTS / "nvidia-h200-20261126-040407"
CPU, ADVICE = RESULTS / "cpu-epyc-20261120", RESULTS / "advice-epyc-20261129"

Row = dict[str, str]


TABLES = ("records", "steps", "work")


class Folder:
    """A folder that is tampered with, its cells as text; `row` is one of fp16 at 512, `fp32` one of
    fp32 at 256."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, self.steps, self.work = (
            list(csv.DictReader(lines.read_text().splitlines())) if lines.is_file() else []
            for name in TABLES
            for lines in [path / f"{name}.csv"]
        )

    @property
    def row(self) -> Row:
        return self.find("fp16", "512")

    @property
    def fp32(self) -> Row:
        return self.find("fp32", "256")

    def write(self) -> None:
        for name in TABLES:
            if not (rows := getattr(self, name)):
                continue
            with (self.path / f"{name}.csv").open("w", newline="") as lines:
                out = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
                out.writeheader()
                out.writerows(rows)

    def find(self, precision: str, batch_size: str, **cells: str) -> Row:
        cells |= {"precision": precision, "batch_size": batch_size}
        return next(row for row in self.records if cells.items() <= row.items())

    def whole(self, precision: str = "fp16", batch_size: str = "256") -> Row:
        return self.find(precision, batch_size, fraction="1")

    def take_out(self, row: Row, *tables: str) -> None:
        for table in map(self.__getattribute__, tables or TABLES):
            for one in self.of(table, row):
                table.remove(one)

    def of(self, table: list[Row], row: Row) -> list[Row]:
        return [one for one in table if one["record_id"] == row["record_id"]]


def scale(row: Row, factor: float, *columns: str) -> None:
    for column in columns:
        if row[column]:
            row[column] = repr(float(row[column]) * factor)


TIMES = re.compile("(epoch|measured|step)_time_.*s$")


def speed_up(folder: Folder, row: Row, factor: float) -> None:
    """All times of a row and of its steps alike, with its energy, so that they still add up."""
    scale(row, factor, "energy_j", *filter(TIMES.match, row))
    scale(row, 1 / factor, "images_per_s")
    for step in folder.of(folder.steps, row):
        scale(step, factor, "time_s")


def count_more_work(folder: Folder) -> None:
    for row in folder.records:
        scale(row, 2, "flop_per_image")
    for row in folder.work:
        scale(row, 2, "flop")


def smooth_steps(folder: Folder) -> None:
    """Take the slowest step for a usual one, and leave the row as it is."""
    steps = folder.of(folder.steps, folder.fp32)
    slowest = max(steps, key=lambda step: float(step["time_s"]))
    slowest["time_s"] = steps[-1]["time_s"]


def shorten(folder: Folder) -> None:
    """The epoch, with the images a second that follow from it."""
    scale(folder.row, 0.99, "epoch_time_s")
    scale(folder.row, 1 / 0.99, "images_per_s")


def change(**cells: str) -> Callable[[Folder], None]:
    return lambda folder: folder.row.update(cells)


def change_all(**cells: str) -> Callable[[Folder], None]:
    def tamper(folder: Folder) -> None:
        for row in folder.records:
            row.update(cells)

    return tamper


TAMPERINGS: dict[str, tuple[str, Callable[[Folder], None]]] = {
    "a cell that cannot be": (
        "schema: column 'epoch_time_s': 'fast': a finite number, or empty",
        change(epoch_time_s="fast"),
    ),
    "an edited commit called clean": (
        "code: commit 970e2a2a9d30 has the code ",
        change_all(commit="970e2a2a9d30"),
    ),
    "a row of another driver": (
        "environment: driver is not the same in all rows of cuda: 580.159.04, 570.86.15",
        change(driver="570.86.15"),
    ),
    "a row taken out": (
        "plan: has no row of 1 of the 6 runs that its last command planned (tf32 · batch size",
        lambda f: f.take_out(f.find("tf32", "256")),
    ),
    "a rate above the data sheet": (
        "rates: rate_float16 is 1.34e+15, and the card's data sheet says 9.895e+14",
        lambda f: scale(f.row, 2, "rate_float16"),
    ),
    "all times scaled alike": (
        "speed: 1.39 times the bytes/s of NVIDIA H100 80GB HBM3's memory",
        lambda f: speed_up(f, f.row, 0.3),
    ),
    "more FLOP than the card does": (
        "speed: 2.4 times the FLOP/s that NVIDIA H100 80GB HBM3 does",
        lambda f: scale(f.row, 50, "flop_per_image"),
    ),
    "half the energy": (
        "energy: its energy over its time is 255 W, its mean power 507.7 W",
        lambda f: scale(f.row, 0.5, "energy_j"),
    ),
    "more power than the limit": (
        "energy: 1020 W on average, and the limit was 700 W",
        lambda f: scale(f.row, 2, "energy_j", "mean_power_w"),
    ),
    "less reserved than allocated": (
        "memory: peak_allocated_bytes is 1.256e+10, more than peak_reserved_bytes, 7.283e+09",
        lambda f: scale(f.row, 0.5, "peak_reserved_bytes"),
    ),
    "a step smoothed": ("steps: step_time_median_s is 0.23049654, not 0.23049011", smooth_steps),
    "a median of its own": (
        "steps: step_time_median_s is 0.1283",
        lambda f: scale(f.row, 0.97, "step_time_median_s"),
    ),
    "a shorter epoch": ("epoch: its epoch takes 12.791 s, outside its interval", shorten),
    "a lower loss": (
        "learning: its loss is 2.7118, and 3.0131 by its steps",
        lambda f: scale(f.row, 0.9, "train_loss"),
    ),
    "more FLOP everywhere": ("work: 2.4502e+10 FLOP an image, not 1.2251e+10", count_more_work),
    "fp16 in fp32": (
        "proof: fp32 rounds to float32, and what ran is float16",
        lambda f: f.fp32.update(arithmetic="float16"),
    ),
    "other images": (
        "data: dataset_fingerprint is 0123456789abcdef, and CIFAR-10's is d519226402145e1e",
        change_all(dataset_fingerprint="0123456789abcdef"),
    ),
}


def relabel(folder: Folder) -> None:
    for row in folder.records:
        row["precision"] = "fp32" if row["precision"] == "tf32" else row["precision"]


def speed_up_all(folder: Folder) -> None:
    for row in folder.records:
        if row["precision"] == "fp16":
            speed_up(folder, row, 0.85)


def repeat_whole(folder: Folder, seeds: str = "023", factor: float = 1.0) -> None:
    """Each whole run again, as repeats 2 and 3, after the last one."""
    for row in [row for row in folder.records if row["fraction"] == "1"]:
        for repeat in "23":
            ended = datetime.fromisoformat(folder.records[-1]["finished_at"])
            copy = row | {
                "repeat": repeat,
                "run_seed": seeds[int(repeat) - 1],
                "record_id": f"{row['record_id'][:-1]}{repeat}",
                "started_at": ended.isoformat(),
                "finished_at": (ended + timedelta(minutes=1)).isoformat(),
            }
            folder.records.append(copy)
            steps = folder.of(folder.steps, row)
            folder.steps += [step | {"record_id": copy["record_id"]} for step in steps]
            if factor != 1:
                speed_up(folder, copy, factor ** int(repeat))


def rename(folder: Folder, card: str, **cells: str) -> None:
    for row in folder.records:
        row.update(gpu=card, **cells)
    config = folder.path / "config.json"
    config.write_text(config.read_text().replace("NVIDIA H200", card))


def cut_interval(folder: Folder) -> None:
    row = folder.find("fp16", "128", fraction="0.2")
    time_s = float(row["epoch_time_s"])
    row.update(epoch_time_low_s=repr(0.999 * time_s), epoch_time_high_s=repr(1.001 * time_s))


ENERGY = ("energy_j", "mean_power_w")
ENDS = "2020-01-01T00:00:00.000Z"

EDITS: dict[str, tuple[str, Path, Callable[[Folder], object]]] = {
    "the time of a whole epoch × 0.9": (
        "epoch: 4173.2 images/s for 10.783 s are 45000 images, and an epoch has 50000",
        H200, lambda f: scale(f.whole(), 0.9, "epoch_time_s")),
    "its images a second × 1.2": (
        "epoch: 5007.8 images/s for 11.981 s are 60000 images, and an epoch has 50000",
        H200, lambda f: scale(f.whole(), 1.2, "images_per_s")),
    "those of a part × 1.2": (
        "epoch: 4644.1 images/s for 12.92 s are 60000 images, and an epoch has 50000",
        H100, lambda f: scale(f.row, 1.2, "images_per_s")),
    "memory of the device halved": (
        "memory: peak_device_bytes is 4.501e+09, and the process alone held 8.993e+09",
        H200, lambda f: f.whole().update(peak_device_bytes="4500914176")),
    "card renamed": (
        "card: NVIDIA B200 has compute capability 10.0, not 9.0",
        H200, lambda f: rename(f, "NVIDIA B200")),
    "card renamed, of that capability": (
        "card: NVIDIA B200 has 180 GiB of memory, and the row 139.8",
        H200, lambda f: rename(f, "NVIDIA B200", capability="10.0")),
    "card renamed in the records alone": (
        "environment: gpu is NVIDIA B300 in the rows, and NVIDIA H200 in config.json",
        H200, lambda f: [row.update(gpu="NVIDIA B300") for row in f.records]),
    "a start in 2020": (
        "order: started at 2020-01-01T00:00:00.000Z, before the rates of its machine were known",
        H200, lambda f: f.whole().update(started_at=ENDS)),
    "a start and an end in 2020": (
        "order: ran for 0 s, and its phases took 16.61 s",
        CPU, lambda f: f.records[3].update(started_at=ENDS, finished_at=ENDS)),
    "an end before its phases could": (
        "order: ran for 0 s, and its phases took 15.69 s",
        H200, lambda f: f.whole().update(finished_at=f.whole()["started_at"])),
    "a clock of 2500 MHz": (
        "card: sm_clock_mhz is 2500, and NVIDIA H200 runs at 1980 at most",
        H200, lambda f: f.whole().update(sm_clock_mhz="2500")),
    "kernels × 1.8": (
        "profile: its kernels and waits take 0.1074 s of a profiled step of 0.07962 s",
        H200, lambda f: scale(f.find("fp16", "256"), 1.8, "busy_s")),
    "kernels × 0.9": (
        "profile: busy_s is 0.05348, and 0.05942 by its operations in work.csv",
        H200, lambda f: scale(f.find("fp16", "256"), 0.9, "busy_s")),
    "tf32 called fp32": (
        "proof: fp32 rounds to float32, and what ran is tfloat32/float32",
        H200, relabel),
    "all times of fp16 × 0.85": (
        "profile: a step takes 0.05234 s, and its kernels alone take 0.05942 s",
        H200, speed_up_all),
    "whole runs copied as repeats": (
        "copies: its steps took the same times as those of fp32 · batch size 128",
        H200, lambda f: repeat_whole(f, "000")),
    "copies with other times and seeds": (
        "copies: its losses are those of fp32 · batch size 128",
        H200, lambda f: repeat_whole(f, factor=1.001)),
    "energy and power × 0.7": (
        "energy: its mean power is 386.7 W, and 546.1 W where the same case ran as fast (fp32 ·",
        H200, lambda f: scale(f.whole("fp32"), 0.7, *ENERGY)),
    "a repeat taken out": (
        "plan: has no row of 1 of the 19 runs that its last command planned (fp32 · batch size "
        "128",
        CPU, lambda f: f.take_out(f.records[7])),
    "a repeat taken out where no plan has it": (
        "plan: there is no repeat 2",
        ADVICE, lambda f: f.take_out(f.find("fp32", "128", repeat="2"))),
    "a row taken out, and its steps left": (
        "plan: steps.csv has 1 run that records.csv lacks (5bb1a93b5ebb4f84): a row was taken "
        "out, or the machine went down before it was written",
        H200, lambda f: f.take_out(f.find("tf32", "256"), "records")),
    "the slowest step": (
        "steps: step_time_max_s is 0.0574",
        H200, lambda f: scale(f.whole(), 0.9, "step_time_max_s")),
    "a larger batch's row": (
        "steps: its steps are of 640 images, and its batches of 512",
        H200, lambda f: f.find("fp16", "640").update(batch_size="512")),
    "an emptied cell": (
        "steps: measured_time_s is empty, and steps.csv has its steps",
        H200, lambda f: f.whole().update(measured_time_s="")),
}  # fmt: skip
"""Edits of committed folders, each with the check that finds it, and what that says."""

SAID: dict[str, tuple[str, Path, Callable[[Folder], object]]] = {
    "a test accuracy of 52 %": (
        "Loss and accuracy on the test images", H200,
        lambda f: f.whole().update(test_accuracy="0.52")),
    "energy and power × 0.7, measured once": (
        "Energy and power, both changed alike", H200,
        lambda f: scale(f.find("bf16", "256"), 0.7, *ENERGY)),
    "tf32 taken out": (
        "A row of an earlier command, taken out of all tables", H200,
        lambda f: f.take_out(f.find("tf32", "256"))),
    "the last repeat taken out": (
        "the last repeat, taken out, is not", ADVICE,
        lambda f: f.take_out(f.find("fp32", "128", repeat="3"))),
    "all times of fp16 × 0.95": (
        "Times that were all changed alike", H200,
        lambda f: [speed_up(f, r, 0.95) for r in f.records if r["precision"] == "fp16"]),
    "whole runs copied, with other times": (
        "Copies of a run with other times", H200, lambda f: repeat_whole(f, "000", 1.001)),
    "a narrow interval": ("An interval that was narrowed", H200, cut_interval),
    "card renamed, of its kind": (
        "one renamed as another of the same memory and capability", H200,
        lambda f: rename(f, "NVIDIA H300")),
}  # fmt: skip
"""Edits that no check finds, each with what docs/results.md says of it."""


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_committed_folder_is_found(edit: str, tmp_path: Path) -> None:
    finding, source, tamper = EDITS[edit]
    name, _, fault = finding.partition(": ")
    folder = Folder(shutil.copytree(source, tmp_path / "edited"))
    before = find_faults(folder.path)
    assert name not in [check for check, faults in before.items() if faults]
    tamper(folder)
    folder.write()
    faults = find_faults(folder.path)
    assert fault in "\n".join(faults[name]), {
        check: faults[check] for check in faults if faults[check]
    }


@pytest.mark.parametrize("edit", SAID)
def test_what_no_check_finds_is_said(edit: str, tmp_path: Path) -> None:
    """One that is found one day has to be taken out of the page."""
    sentence, source, tamper = SAID[edit]
    folder = Folder(shutil.copytree(source, tmp_path / "edited"))
    before = find_faults(folder.path)
    tamper(folder)
    folder.write()
    assert find_faults(folder.path) == before
    assert sentence in " ".join(DOCS.read_text(encoding="utf-8").split())


def test_a_folder_cannot_excuse_itself(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "known-faults.txt").write_text("code: it was in a hurry\n")
    assert main([str(copy)]) == 1
    assert "cannot excuse itself" in capsys.readouterr().out


def find_faults(path: Path) -> dict[str, list[str]]:
    return {check["name"]: check["faults"] for check in validate(path)["checks"]}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(H100, tmp_path / "card")


@pytest.fixture(scope="module")
def sound() -> dict[str, list[str]]:
    return find_faults(H100)


def test_the_committed_folder_has_only_the_fault_that_it_names(sound: dict[str, list[str]]) -> None:
    assert [name for name, faults in sound.items() if faults] == ["code"]


@pytest.mark.parametrize("kind", TAMPERINGS)
def test_tampering_is_found(kind: str, sound: dict[str, list[str]], copy: Path) -> None:
    finding, tamper = TAMPERINGS[kind]
    name, _, fault = finding.partition(": ")
    folder = Folder(copy)
    tamper(folder)
    folder.write()
    faults = find_faults(copy)
    assert fault in "\n".join({*faults[name]} - {*sound[name]}), faults


def test_two_cards_may_take_the_power_of_both(copy: Path) -> None:
    """Whose row has their energy, their power and the sum of their limits."""
    folder = Folder(copy)
    scale(folder.row, 2, "energy_j", "mean_power_w", "power_limit_w")
    folder.row.update(world_size="2", parallel="ddp")
    folder.write()
    assert find_faults(copy)["energy"] == []


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/records.csv")), ids=lambda p: p.parent.name)
def test_committed_folders_are_sound_but_for_what_they_name(path: Path) -> None:
    assert main([str(path.parent)]) == 0


def test_a_known_fault_is_printed_with_its_reason_and_does_not_count(
    capsys: pytest.CaptureFixture[str], copy: Path
) -> None:
    """What identifies a machine is named too."""
    known = copy.with_name("known-faults.txt")
    known.write_text("other: code: it was in a hurry\ncard: code: so was this one: truly\n")
    assert main([str(copy)]) == 0
    output = capsys.readouterr().out
    assert "host vm; gpu_uuid GPU-53dc75af-" in output
    assert "known  code" in output
    assert "known: so was this one: truly (known-faults.txt beside the folder)" in output
    assert output.endswith("18 checks: 16 ok, 1 known, 1 none.\n")
    known.unlink()
    assert main([str(copy)]) == 1
    output = capsys.readouterr().out
    assert "FAULT  code         the code is a commit's, unedited" in output
    assert output.endswith("18 checks: 16 ok, 1 FAULT, 1 none.\n")


def test_a_fault_that_is_named_and_gone_is_a_fault(copy: Path) -> None:
    copy.with_name("known-faults.txt").write_text(
        "card: code: an old tree\ncard: energy: a sensor that stood still\n"
    )
    assert [c["name"] for c in validate(copy)["checks"] if c["result"] == "FAULT"] == ["energy"]
    copy.with_name("known-faults.txt").write_text("card: enrgy: a sensor that stood still\n")
    (check,) = validate(copy)["checks"]
    assert "there is no check enrgy" in check["faults"][0]


def test_json_has_every_check_and_no_folder_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each of which finds a tampering."""
    assert main([str(H100), "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["folders"]
    names = [check["name"] for check in found["checks"]]
    assert names == ["schema", *(c.name for c in CLAIMS)]
    findings = [finding for finding, _ in TAMPERINGS.values()]
    findings += [finding for finding, *_ in EDITS.values()]
    assert {*names} == {finding.partition(": ")[0] for finding in findings}
    assert main(["nowhere"]) == 2
    assert "no records there" in capsys.readouterr().err
    assert main([str(RESULTS), "--format", "json"]) == 0
    folders = [one["folder"] for one in json.loads(capsys.readouterr().out)["folders"]]
    assert {path.parent.name for path in RESULTS.glob("*/records.csv")} < {
        Path(folder).name for folder in folders
    }, "those that a folder holds, and the published ones"


def test_what_there_is_nothing_to_check_of_does_not_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Loops that this harness did not run, without steps or code."""
    assert main([str(RESULTS / "reference" / "h200-lab.csv")]) == 0
    output = capsys.readouterr().out
    assert "none   code         nothing to check: no row of this harness has times of day" in output
    assert "none   steps" in output


def test_honest_rows_of_short_runs_on_a_busy_machine_pass() -> None:
    """Of 5,000 at most one in 1,000 is refused; one that is wrong by a third is, from a second on.

    Steps of 2 ms to 1 s are lognormal, and a wait of 10 ms on average comes every 0.1 s on average.
    An epoch takes 0.1 ms more than its steps, and one in five the time slices of other programs.
    """
    rng = np.random.default_rng(0)
    refused = missed = long = 0
    for _ in range(5_000):
        steps, epochs = rng.integers(1, 21), int(rng.integers(1, 4))
        typical, spread = 2e-3 * 500 ** rng.random(), rng.uniform(0.01, 0.5)
        times = typical * rng.lognormal(0, spread, steps * epochs)
        times += [rng.exponential(0.01, rng.poisson(10 * time)).sum() for time in times]
        gaps = 1e-4 + rng.exponential(4e-3, epochs) * (rng.random(epochs) < 0.2)
        measured_s = times.sum() + gaps.sum()
        refused += not adds_up(list(times), measured_s, epochs)
        assert not adds_up(list(times), times.sum() / 1.33, epochs), "it holds its steps"
        if times.sum() > epochs and steps > 3:
            long += 1
            missed += adds_up(list(times), measured_s * 1.33, epochs)
    assert refused <= 5
    assert long > 250
    assert missed <= 0.01 * long


@pytest.mark.parametrize("number", [1, MOST_FAULTS, MOST_FAULTS + 1, MOST_FAULTS + 2])
def test_the_first_faults_are_listed_and_the_others_counted(
    number: int, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = validate(copy)
    found["checks"][0] |= {"result": "FAULT", "faults": [f"fault {i}" for i in range(number)]}
    monkeypatch.setattr("bench.validate.__main__.validate", lambda folder: found)
    assert main([str(copy)]) == 1
    out = capsys.readouterr().out
    assert len(re.findall(r"fault \d", out)) == min(number, MOST_FAULTS)
    more = re.findall(r"and (\d+) more; --format json has them", out)
    assert more == ([str(number - MOST_FAULTS)] if number > MOST_FAULTS else [])
