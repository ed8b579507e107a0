"""`bench.compare` from stored records to verdicts, documents and return codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.case import AXES, SAME_QUESTION, Case
from bench.compare.__main__ import main
from bench.compare.gates import OUTCOME_FINDINGS
from bench.errors import UsageError
from bench.flags import parse_percent
from bench.record import COLUMNS, Environment, Measurement, Record, Status
from bench.store.writer import Store
from bench.study.metrics import METRICS

CASE = Case(dataset="synthetic", device="cpu")
SMALL = replace(CASE, batch_size=64)
FP16 = replace(CASE, precision="fp16", loss_scale=128.0)
APEX = replace(CASE, precision="fp16-apex", loss_scale=128.0)
HERE = Environment(torch="2.13.0", python="3.12.1", host="lab", train_images=50000)

SNAPSHOTS = Path(__file__).parent / "snapshots"

BASE = (20.0, 20.1, 19.9, 20.04, 19.96)
SLOWER = tuple(1.08 * t for t in BASE)


def record(case: Case, repeat: int, time_s: float | None = 10.0, **fields: Any) -> Record:
    """A row as the fake executor's sweeps write it."""
    values: dict[str, Any] = {
        "record_id": f"{case.slug()}-{repeat}-{fields.get('attempt', 1)}-{fields.get('sentinel')}",
        "case": case,
        "repeat": repeat,
        "run_seed": case.seed + repeat - 1,
        "sentinel": False,
        "probe": False,
        "anchor": "",
        "lane": "",
        "lanes_beside": 0,
        "attempt": 1,
        "status": Status.OK,
        "reason": "",
        "inferred": False,
        "executor": "fake",
        "started_at": "",
        "finished_at": "",
        "retries": 0,
        "log": "",
        "measurement": Measurement(epoch_time_s=time_s),
        "environment": HERE,
    }
    return Record(**{**values, **fields})


def runs(case: Case, times: Iterable[float], **fields: Any) -> list[Record]:
    return [record(case, i, time, **fields) for i, time in enumerate(times, 1)]


Write = Callable[[str, Sequence[Record]], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a sweep into a folder of the working directory, and name it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # a pipe: tables are as wide as they need

    def write(name: str, records: Sequence[Record]) -> str:
        with Store(Path(name)) as store:
            for row in records:
                store.append(row)
        return name

    return write


@pytest.fixture
def machine(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Compare into JSON and read it."""

    def run(*argv: str, code: int = 0) -> Any:
        assert main([*argv, "--format", "json"]) == code
        return json.loads(capsys.readouterr().out)

    return run


def verdicts(document: Any, metric: str = "epoch_time_s") -> list[str]:
    return [finding["verdict"] for finding in document["metrics"][metric]]


# ------------------------------------------------------------------------------------- the answer


def test_each_case_gets_its_ratio_and_verdict(write: Write, machine: Callable[..., Any]) -> None:
    a = write("a", runs(CASE, BASE) + runs(SMALL, BASE) + runs(FP16, BASE))
    b = write(
        "b",
        runs(FP16, [0.9 * t for t in BASE]) + runs(CASE, SLOWER) + runs(SMALL, reversed(BASE)),
    )
    document = machine(a, b)
    assert verdicts(document) == ["slower", "same", "faster"]
    slower = document["metrics"]["epoch_time_s"][0]
    assert slower["case"]["batch_size"] == 128
    assert (slower["a"], slower["b"]) == (list(BASE), pytest.approx(SLOWER))
    assert (slower["n_a"], slower["n_b"]) == (5, 5)
    assert slower["speed"] == pytest.approx(1 / 1.08)
    assert slower["low"] < 1 / 1.08 < slower["high"]
    assert 0 < slower["p"] < slower["p_adjusted"] < 0.001
    assert slower["remarks"] == ["synthetic", "fake"]


def test_each_metric_has_its_words(write: Write, machine: Callable[..., Any]) -> None:
    def sweep(factor: float) -> list[Record]:
        jitter = (1, 1.001, 0.999)
        return [
            record(
                CASE,
                i,
                measurement=Measurement(
                    epoch_time_s=10 * factor * x,
                    peak_process_bytes=int(2**30 * factor),
                    train_loss=2 * factor * x,
                    energy_j=500 * factor * x,
                ),
            )
            for i, x in enumerate(jitter, 1)
        ]

    a, b = write("a", sweep(1)), write("b", sweep(1.1))
    up, down = machine(a, b), machine(b, a)
    for metric, higher, lower in (
        ("epoch_time_s", "slower", "faster"),
        ("peak_process_bytes", "more", "less"),  # no device memory on a CPU
        ("train_loss", "higher", "lower"),
        ("energy_j", "more", "less"),
    ):
        assert verdicts(up, metric) == [higher]
        assert verdicts(down, metric) == [lower]
    memory = up["metrics"]["peak_process_bytes"][0]
    assert memory["exact"]
    assert memory["p"] is None


def test_chosen_metrics_are_compared_alone(write: Write, machine: Callable[..., Any]) -> None:
    rows = [
        record(CASE, i, measurement=Measurement(epoch_time_s=i, test_loss=2.0)) for i in (1, 2, 3)
    ]
    a = write("a", rows)
    assert list(machine(a, a, "--metric", "test_loss", "train_loss")["metrics"]) == [
        "test_loss",
        "train_loss",
    ]


def test_metrics_are_columns_of_a_record() -> None:
    assert {metric.column for metric in METRICS.values()} <= set(COLUMNS)
    assert all(name == metric.name for name, metric in METRICS.items())


def test_accuracies_are_compared_as_errors(write: Write, machine: Callable[..., Any]) -> None:
    def sweep(*accuracies: float) -> list[Record]:
        return [
            record(CASE, i, measurement=Measurement(train_accuracy=x))
            for i, x in enumerate(accuracies, 1)
        ]

    a, b = write("a", sweep(0.20, 0.21, 0.19)), write("b", sweep(0.60, 0.61, 0.59))
    (finding,) = machine(a, b, "--metric", "train_top1_error")["metrics"]["train_top1_error"]
    assert finding["a"] == pytest.approx([0.80, 0.79, 0.81])
    assert finding["ratio"] == pytest.approx(0.5, rel=1e-3)
    assert finding["verdict"] == "lower"
    one = write("c", [replace(row, run_seed=0) for row in sweep(0.6, 0.61, 0.59)])
    (finding,) = machine(a, one, "--metric", "train_top1_error")["metrics"]["train_top1_error"]
    assert finding["lack"] == "one seed in B: differs by 50 %, no verdict"


def test_latest_attempts_count_and_sentinels_do_not(
    write: Write, machine: Callable[..., Any]
) -> None:
    failed = record(CASE, 1, None, status=Status.ERROR)
    again = record(CASE, 1, 20.0, attempt=2)
    sentinel = record(CASE, 2, 99.0, sentinel=True)
    a = write("a", [again, *runs(CASE, BASE)[1:], sentinel, failed])
    document = machine(a, a)
    assert document["metrics"]["epoch_time_s"][0]["a"] == list(BASE)
    assert document["a"]["runs"] == 5


def test_the_margin_decides(write: Write, machine: Callable[..., Any]) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert verdicts(machine(a, b, "--margin", "20%")) == ["same"]
    assert verdicts(machine(a, b, "--margin", "8%")) == ["ambiguous"]
    assert verdicts(machine(a, b, "--margin", "0.5%")) == ["slower"]


def test_evidence_is_adjusted_over_the_cases_of_a_metric(
    write: Write, machine: Callable[..., Any]
) -> None:
    cases = [replace(CASE, batch_size=2**n) for n in range(2, 6)]
    a = write("a", [r for case in cases for r in runs(case, BASE)])
    b = write("b", runs(cases[0], SLOWER) + [r for c in cases[1:] for r in runs(c, BASE)])
    first = machine(a, b)["metrics"]["epoch_time_s"][0]
    assert first["p_adjusted"] == pytest.approx(4 * first["p"])


def test_too_few_repeats_say_so(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", runs(CASE, BASE[:1])), write("b", runs(CASE, SLOWER[:1]))
    assert main([a, b, "--full"]) == 0
    out = capsys.readouterr().out
    assert "needs 3 repeats a side, has 1" in out
    assert "0.9259" in out
    assert "no verdict" in out


def test_missing_and_zero_values_say_so(write: Write, machine: Callable[..., Any]) -> None:
    def energies(*values: float | None) -> list[Record]:
        return [
            record(CASE, i, measurement=Measurement(energy_j=v)) for i, v in enumerate(values, 1)
        ]

    a = write("a", energies(5, 6, 7, None))
    zero = machine(a, write("b", energies(5, 0, 7)))["metrics"]["energy_j"][0]
    assert zero["ratio"] is None
    assert "a value in B is not positive: no ratio" in zero["remarks"]
    assert "A lacks 1 of its values" in zero["remarks"]
    none = machine(a, write("c", energies(None, None, None)))["metrics"]["energy_j"][0]
    assert "no value in B" in none["remarks"]


# ------------------------------------------------------------------------------------------- seeds


def losses(values: Sequence[float], seeds: Sequence[int]) -> list[Record]:
    return [
        record(CASE, i, run_seed=s, measurement=Measurement(train_loss=v, peak_device_bytes=2**30))
        for i, (v, s) in enumerate(zip(values, seeds, strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("a", "b", "judged", "lack"),
    [
        ([0, 0, 0], [0, 0, 0], "no verdict", "one seed: differs by 2.4 %, no verdict"),
        ([0], [0], "no verdict", "one seed: differs by 2.4 %, no verdict"),
        ([0, 1, 2], [0, 0, 0], "no verdict", "one seed in B: differs by 2.4 %, no verdict"),
        ([0, 0, 1], [0, 1, 1], "no verdict", "two seeds: needs three"),
        ([0, 0, 1], [0, 1, 2], "no verdict", "two seeds in A: needs three"),
        ([0, 1, 2], [0, 1, 2], "higher", ""),
        ([0, 1, 2], [5, 6, 7], "higher", ""),
    ],
)
def test_a_loss_is_judged_over_seeds(
    write: Write,
    machine: Callable[..., Any],
    a: list[int],
    b: list[int],
    judged: str,
    lack: str,
) -> None:
    one = write("a", losses([2.05 + 1e-4 * seed for seed in a], a))
    two = write("b", losses([2.10 + 1e-4 * seed for seed in b], b))
    code = int(judged == "higher")
    document = machine(one, two, "--fail-on", "higher:1%", code=code or 1)
    (finding,) = document["metrics"]["train_loss"]
    assert (finding["verdict"], finding["lack"]) == (judged, lack)
    assert (finding["seeds_a"], finding["seeds_b"]) == (a, b)
    assert bool(document["failures"]["higher:1%"]) == (judged == "higher")
    # bytes do not depend on the seed
    assert document["metrics"]["peak_device_bytes"][0]["exact"] == (len(a) > 2)


def test_seeds_that_one_side_lacks_are_left_out_and_that_is_said(
    write: Write, machine: Callable[..., Any]
) -> None:
    a = write("a", losses([1.0, 1.3, 0.9, 99.0], [0, 1, 2, 3]))
    b = write("b", losses([1.2, 1.5, 1.1], [0, 1, 2]))
    (finding,) = machine(a, b)["metrics"]["train_loss"]
    assert (finding["verdict"], finding["pairs"]) == ("higher", 3)
    assert "only the 3 seeds that both sides ran are compared" in finding["remarks"]
    (finding,) = machine(b, b)["metrics"]["train_loss"]
    assert finding["remarks"] == ["synthetic", "fake"]


def test_a_seed_of_one_side_alone_makes_no_difference(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """B was interrupted before its third seed, which is far off: the first two are equal."""
    a = write("a", losses([2.0, 2.1, 1.0], [0, 1, 2]))
    b = write("b", losses([2.0, 2.1], [0, 1]))
    (finding,) = machine(a, b)["metrics"]["train_loss"]
    assert (finding["ratio"], finding["pairs"]) == (pytest.approx(1), 2)
    assert finding["lack"] == "two seeds in B: needs three"
    assert "only the 2 seeds that both sides ran are compared" in finding["remarks"]
    assert finding["a"] == [2.0, 2.1, 1.0], "raw values stay"
    (found,) = machine(a, b)["equivalence"]["train_loss"]
    assert (found["ratio"], found["seeds"]) == (pytest.approx(1), 2)
    capsys.readouterr()
    assert main([a, b, "--metric", "train_loss", "--full"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "needs three" in x and "–" in x]
    assert "2.049  2.049" in line, "the means are of the seeds that are compared"


def test_losses_equal_in_every_seed_are_the_same(write: Write, machine: Callable[..., Any]) -> None:
    a = write("a", losses([2.0, 2.3, 1.9], [0, 1, 2]))
    (finding,) = machine(a, a)["metrics"]["train_loss"]
    assert (finding["verdict"], finding["ratio"], finding["exact"]) == ("same", 1, True)
    other = write("b", losses([2.0, 2.3, 1.9], [3, 4, 5]))
    (finding,) = machine(a, other)["metrics"]["train_loss"]
    assert (finding["verdict"], finding["exact"]) == ("ambiguous", False)


# -------------------------------------------------------------------- conditions and environments

CARD = replace(HERE, gpu="NVIDIA X", driver="580.1")


def measured(**values: Any) -> list[Record]:
    common = {"power_limit_w": 700.0, "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0}
    common |= {"step_time_first_s": 0.1, "step_time_last_s": 0.1, "measured_steps": 390}
    m = Measurement(**{**common, "warmup_steps": 40, "warmup_steady": True, **values})
    return [
        record(CASE, i, environment=CARD, measurement=replace(m, epoch_time_s=t))
        for i, t in enumerate(BASE, 1)
    ]


@pytest.mark.parametrize(
    ("values", "label", "before", "after"),
    [
        ({"power_limit_w": 350.0}, "power limit", "700.0 W", "350.0 W"),
        ({"power_limit_w": 699.0}, "power limit", "700.0 W", "699.0 W"),
        ({"power_limit_w": None}, "power limit", "700.0 W", "–"),
        ({"sm_clock_mhz": 1935.0}, "SM clock", "1,980 MHz", "1,935 MHz"),
        ({"memory_clock_mhz": 2619.0}, "memory clock", "3,201 MHz", "2,619 MHz"),
        ({"throttle_during": "software power cap"}, "at the power limit", "0 of 5", "5 of 5"),
        ({"throttle_during": "hardware thermal slowdown"}, "throttled", "0 of 5", "5 of 5"),
        ({"neighbours_computing": 1}, "shared the GPU", "–", "5 of 5"),
        ({"other_cores": 0.5}, "shared the CPU", "–", "5 of 5"),
        ({"warmup_steady": False}, "was not steady after warm-up", "0 of 5", "5 of 5"),
        ({"step_time_last_s": 0.104}, "changed within the epoch", "0 of 5", "5 of 5"),
    ],
)
def test_differing_conditions_are_told(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    machine: Callable[..., Any],
    values: dict[str, Any],
    label: str,
    before: str,
    after: str,
) -> None:
    a, b = write("a", measured()), write("b", measured(**values))
    assert main([a, b, "--full"]) == 0
    out = capsys.readouterr().out
    assert "no recorded difference" not in out
    (row,) = (
        line
        for line in out.partition("Differences in what ran them")[2].splitlines()
        if line.startswith(f" {label} ")
    )
    assert before in row
    assert after in row
    (differing,) = (c for c in machine(a, b)["conditions"] if c["differs"])
    (finding,) = machine(a, b)["metrics"]["epoch_time_s"]
    assert [s["condition"] for s in finding["spoilt"]] == [differing["name"]] * (
        differing["spoils_times"]
    )
    spoilt = f"{label}: B in 5 of 5 runs"
    assert (spoilt in finding["remarks"]) == differing["spoils_times"]
    assert (f"warning: do not rely on these times: {spoilt}. Close other" in out) == differing[
        "spoils_times"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"sm_clock_mhz": 1965.0},
        {"memory_clock_mhz": 3202.0},
        {"other_cores": 0.1},
        {"neighbours_computing": 0},
        {"throttle_during": "voltage reliability"},
        {"busy_s": 0.07, "step_time_median_s": 0.1},  # without a profile on both sides
    ],
)
def test_conditions_alike_are_not_told(
    write: Write, capsys: pytest.CaptureFixture[str], values: dict[str, Any]
) -> None:
    known = {"other_cores": 0.0, "neighbours_computing": 0}
    a, b = write("a", measured(**known)), write("b", measured(**{**known, **values}))
    assert main([a, b, "--full"]) == 0
    assert "no recorded difference in what ran them" in capsys.readouterr().out


def test_clocks_are_those_of_the_cases_in_both(write: Write, machine: Callable[..., Any]) -> None:
    """Another precision runs at another clock: that is no difference of the machine."""
    fast = [replace(row, case=FP16) for row in measured(sm_clock_mhz=1400.0)]
    a, b = write("a", measured()), write("b", measured() + fast)
    assert not any(condition["differs"] for condition in machine(a, b)["conditions"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("model_parameters", "parameters"),
        ("model_structure", "layers"),
        ("model_source", "source files"),
        ("start_fingerprint", "starting weights"),
    ],
)
def test_other_networks_of_one_name_are_refused(
    write: Write,
    capsys: pytest.CaptureFixture[str],
    machine: Callable[..., Any],
    column: str,
    what: str,
) -> None:
    mine = replace(CASE, model="mynet:build")
    a = write("a", runs(mine, BASE, environment=replace(HERE, **{column: "before"})))
    b = write("b", runs(mine, BASE, environment=replace(HERE, **{column: "after"})))
    assert main([a, b]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"error: A and B trained different networks: mynet:build changed in {what}; "
        "to compare them anyway, add --mix\n"
    )
    assert verdicts(machine(a, b, "--mix")) == ["same"]
    unknown = write("c", runs(mine, BASE))  # of an older schema
    assert main([a, unknown]) == 0
    elsewhere = write("d", runs(CASE, BASE, environment=replace(HERE, **{column: "after"})))
    assert main([a, elsewhere]) == 0  # no case in both


def on(gpu: str, times: Iterable[float], attempt: int = 1, **environment: str) -> list[Record]:
    here = replace(CARD, gpu=gpu, **environment)
    return [
        replace(row, record_id=f"{row.record_id}-{gpu}-{environment}")
        for row in runs(CASE, times, environment=here, attempt=attempt)
    ]


def twice(times: Iterable[float]) -> list[float]:
    return [2 * time for time in times]


def test_environments_mixed_within_a_side_are_not_pooled(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    mixed = write("mixed", on("X", BASE) + on("Y", twice(BASE), attempt=2))
    x, y, z = (write(name, on(name, BASE)) for name in "XYZ")
    for name, other, judged in (("X", x, "same"), ("Y", y, "faster")):
        document = machine(mixed, other)
        (finding,) = document["metrics"]["epoch_time_s"]
        assert (finding["environment"], finding["n_a"]) == ({"gpu": name}, 5)
        assert finding["verdict"] == judged
        assert [s["environment"]["gpu"] for s in document["only_in_a"]] == [
            {"X": "Y", "Y": "X"}[name]
        ]
    assert verdicts(machine(mixed, mixed)) == ["same", "same"]
    document = machine(mixed, z, "--fail-on", "slower", code=1)
    assert document["metrics"]["epoch_time_s"] == []
    assert len(document["only_in_a"]) == 2
    main([mixed, z, "--full"])
    out = capsys.readouterr().out
    assert (
        "no case in both: within a side, runs of one case differ in gpu; none has an equal" in out
    )
    assert " fp32 · batch size 128 · gpu Y\n" in out


def test_what_varies_beside_the_gpu_does_not_part_its_cases(
    write: Write, machine: Callable[..., Any]
) -> None:
    """A newer driver on the other side is what is compared; the GPU tells the cases apart."""
    a = write("a", on("X", BASE, driver="1") + on("Y", twice(BASE), driver="2"))
    b = write("b", on("X", BASE, driver="3"))
    (finding,) = machine(a, b)["metrics"]["epoch_time_s"]
    assert finding["environment"] == {"gpu": "X"}
    # two drivers of one GPU are two environments, and neither is B's
    a = write("c", on("X", BASE, driver="1") + on("X", twice(BASE), driver="2"))
    assert machine(a, b)["metrics"]["epoch_time_s"] == []
    # what differs from case to case alone is not pooled
    other = [replace(row, case=SMALL) for row in on("X", BASE, driver="2")]
    a = write("e", on("X", BASE, driver="1") + other)
    (finding,) = machine(a, b)["metrics"]["epoch_time_s"]
    assert finding["environment"] == {}


def test_a_run_that_failed_before_it_knew_its_machine_is_of_no_other(
    write: Write, machine: Callable[..., Any]
) -> None:
    lost = record(CASE, 5, None, status=Status.ERROR, environment=Environment())
    a = write("a", [*on("X", BASE[:4]), lost])
    (outcome,) = machine(a, write("b", on("X", BASE)))["outcomes"]
    assert (outcome["a"], outcome["change"]) == ({"ok": 4, "error": 1}, "fixed")


# ---------------------------------------------------------------------------------- outcomes, sides


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (["ok"] * 3, ["ok"] * 3, ""),
        (["ok"] * 3, ["oom"] * 3, "broken"),
        (["ok"] * 3, ["ok", "ok", "error"], "broken"),
        (["ok"] * 3, ["diverged"] * 3, "broken"),
        (["diverged"], ["timeout"], "broken"),
        (["ok", "oom"], ["oom", "oom"], "broken"),
        (["oom"] * 3, ["ok"] * 3, "fixed"),
        (["oom"], ["error"], "changed"),
        (["oom"], ["oom"], ""),
    ],
)
def test_outcome_changes_are_findings(
    write: Write, machine: Callable[..., Any], before: list[str], after: list[str], change: str
) -> None:
    def sweep(statuses: list[str]) -> list[Record]:
        return [record(CASE, i, status=Status(s)) for i, s in enumerate(statuses, 1)]

    a, b = write("a", sweep(before)), write("b", sweep(after))
    document = machine(a, b, "--fail-on", "broken", code=int(change == "broken"))
    assert [outcome["change"] for outcome in document["outcomes"]] == [change]
    assert bool(document["failures"]["broken"]) == (change == "broken")


def test_only_ok_counts_and_diverged_for_time_and_memory(
    write: Write, machine: Callable[..., Any]
) -> None:
    def sweep(status: Status) -> list[Record]:
        return [
            record(
                CASE,
                i,
                status=status,
                measurement=Measurement(
                    epoch_time_s=t, peak_device_bytes=2**30, train_loss=2.0, energy_j=t
                ),
            )
            for i, t in enumerate(BASE, 1)
        ]

    a = write("a", sweep(Status.OK))
    diverged = machine(a, write("b", sweep(Status.DIVERGED)))["metrics"]
    assert {name: found[0]["n_b"] for name, found in diverged.items()} == {
        "epoch_time_s": 5,
        "peak_device_bytes": 5,
        "train_loss": 0,
        "energy_j": 0,
    }
    assert "B diverged ×5" in diverged["epoch_time_s"][0]["remarks"]
    invalid = machine(a, write("c", sweep(Status.INVALID)))["metrics"]
    assert invalid["epoch_time_s"][0]["n_b"] == 0


def test_cases_on_one_side_are_listed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    a = write("a", runs(CASE, BASE) + runs(SMALL, BASE))
    b = write("b", runs(CASE, BASE) + runs(FP16, BASE))
    assert main([a, b, "--full"]) == 0
    out = capsys.readouterr().out
    of_a, of_b = out.partition("Only in A\n")[2].split("Only in B\n")
    assert of_a.splitlines()[2:] == [" fp32 · batch size 64", ""]
    assert of_b.splitlines()[2:] == [" fp16 · loss scale 128 · batch size 128"]
    assert main([a, b, "--fail-on", "missing"]) == 1
    assert "fail: missing: fp32 · batch size 64" in capsys.readouterr().err


def test_no_common_case_names_the_axis_that_parts_them(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(replace(CASE, lr=0.1), BASE))
    assert main([a, b, "--full"]) == 0
    assert "no case in both: they share no value of lr" in capsys.readouterr().out


def test_differing_environments_come_first_and_the_comparable_before_the_rest(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    there = replace(HERE, host="attic", torch="2.9.1", train_images=40000)
    a = write("a", runs(CASE, BASE))
    b = write("b", [*runs(CASE, BASE[:3], environment=there), record(CASE, 4)])
    assert machine(a, b)["environment"] == [
        {"name": "torch", "must_agree": True, "a": ["2.13.0"], "b": ["2.9.1", "2.13.0"]},
        {"name": "host", "must_agree": False, "a": ["lab"], "b": ["attic", "lab"]},
        {"name": "train_images", "must_agree": False, "a": ["50000"], "b": ["40000", "50000"]},
    ]
    main([a, b, "--full"])
    out = capsys.readouterr().out
    assert out.index("Differences in what ran them") < out.index("Epoch time in s")
    main([a, a, "--full"])
    assert "no recorded difference in what ran them" in capsys.readouterr().out
    # a side that mixes what must agree says so even where the other mixes the same
    assert [row["name"] for row in machine(b, b)["environment"]] == ["torch"]


def test_two_networks_on_both_sides_are_no_difference(
    write: Write, machine: Callable[..., Any]
) -> None:
    def of(source: str) -> Environment:
        return replace(HERE, model_source=source)

    small, large = replace(CASE, model="dpn-small"), replace(CASE, model="dpn92")
    rows = [*runs(small, BASE, environment=of("a")), *runs(large, BASE, environment=of("b"))]
    document = machine(write("a", rows), write("b", rows))
    assert document["environment"] == []
    rows[0] = replace(rows[0], environment=of("c"))  # of the same network, with --mix
    document = machine(write("c", rows), write("d", rows))
    assert [found["name"] for found in document["environment"]] == ["model_source"]


@pytest.mark.parametrize(
    ("case", "fields", "remark"),
    [
        (replace(CASE, fraction=0.5), {}, "extrapolated"),
        (CASE, {}, "synthetic"),
        (CASE, {}, "fake"),
        (CASE, {"executor": "published"}, "published"),
    ],
)
def test_doubtful_rows_are_labelled(
    write: Write, machine: Callable[..., Any], case: Case, fields: dict[str, Any], remark: str
) -> None:
    a = write("a", runs(case, BASE, **fields))
    assert remark in machine(a, a)["metrics"]["epoch_time_s"][0]["remarks"]
    plain = write("b", runs(replace(case, dataset="cifar10", fraction=1.0), BASE, executor="x"))
    assert machine(plain, plain)["metrics"]["epoch_time_s"][0]["remarks"] == []


def test_a_label_on_one_side_names_it(write: Write, machine: Callable[..., Any]) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, BASE, executor="subprocess"))
    assert "fake in A" in machine(a, b)["metrics"]["epoch_time_s"][0]["remarks"]


# ------------------------------------------------------------------------- two values of one axis

BF16 = replace(CASE, precision="bf16-amp")
FASTER = tuple(0.8 * t for t in BASE)


def at(case: Case, **axes: Any) -> Case:
    return replace(case, **axes)


def test_two_values_of_an_axis_are_judged_within_a_sweep(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*runs(CASE, BASE), *runs(BF16, FASTER), *runs(SMALL, BASE)]
    rows += [*runs(at(BF16, batch_size=64), BASE), *runs(at(BF16, batch_size=32), BASE)]
    sweep = write("sweep", [*rows, *runs(FP16, twice(BASE))])
    chosen = [sweep, "--axis", "precision", "fp32", "bf16-amp"]
    document = machine(*chosen)
    assert verdicts(document) == ["faster", "same"]
    assert document["axis"] == "precision"
    assert (document["a"]["name"], document["b"]["name"]) == ("fp32", "bf16-amp")
    assert (document["a"]["runs"], document["b"]["runs"]) == (10, 15)
    first = document["metrics"]["epoch_time_s"][0]
    assert first["speed"] == pytest.approx(1.25)
    assert first["p_adjusted"] == pytest.approx(2 * first["p"])  # two cases, one family
    assert "precision" not in first["case"]
    assert first["case"]["batch_size"] == 128
    assert (first["case_a"]["precision"], first["case_b"]["precision"]) == ("fp32", "bf16-amp")
    assert [case["batch_size"] for case in document["only_in_b"]] == [32]
    # the other way around, and against the gates
    back = machine(sweep, "--axis", "precision", "bf16-amp", "fp32", "--fail-on", "slower", code=1)
    assert verdicts(back) == ["slower", "same"]
    assert back["failures"]["slower"] == ["batch size 128: epoch time: speed 0.8000×"]
    assert main([*chosen, "--full"]) == 0
    out = capsys.readouterr().out
    assert "2 cases with both values of precision: dpn92 · synthetic · lr 0.01" in out
    assert "speed is the time of fp32 over that of bf16-amp" in out
    assert " case             fp32  bf16-amp  speed " in out
    assert "Only in bf16-amp\n case\n ─────────────\n batch size 32\n" in out


def test_two_values_of_an_axis_are_judged_over_two_sweeps(
    write: Write, machine: Callable[..., Any]
) -> None:
    a = write("a", [*runs(CASE, BASE), *runs(FP16, BASE)])
    b = write("b", [*runs(BF16, FASTER), *runs(CASE, twice(BASE))])
    document = machine(a, b, "--axis", "precision", "fp32", "bf16-amp")
    assert verdicts(document) == ["faster"]
    assert (document["a"]["path"], document["b"]["path"]) == ("a", "b")
    assert verdicts(machine(a, b, "--axis", "precision", "fp16", "fp32")) == ["slower"]


def test_values_may_be_left_out_where_there_are_only_two(
    write: Write, machine: Callable[..., Any]
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(BF16, FASTER))
    assert verdicts(machine(a, b, "--axis", "precision")) == ["faster"]
    assert verdicts(machine(b, a, "--axis", "precision")) == ["slower"]
    both = write("c", [*runs(CASE, BASE), *runs(BF16, FASTER)])
    assert verdicts(machine(both, "--axis", "precision")) == ["faster"]


DDP = at(CASE, parallel="ddp", world_size=2)
SYNCED = [at(DDP, device="cuda", sync_bn=on) for on in (False, True)]
LOADED = at(CASE, loader="torch", workers=4)
PINNED = [at(LOADED, device="cuda", pin_memory=pinned) for pinned in (False, True)]

ANY_AXIS: dict[str, tuple[Case, Case, str, str]] = {
    "model": (at(CASE, model="dpn-small"), CASE, "dpn-small", "dpn92"),
    "dataset": (CASE, at(CASE, dataset="cifar10"), "synthetic", "cifar10"),
    "precision": (CASE, at(FP16, loss_scale=64.0, skip_overflow=True), "fp32", "fp16"),
    "loss_scale": (FP16, at(FP16, loss_scale="dynamic"), "128", "dynamic"),
    "skip_overflow": (FP16, at(FP16, skip_overflow=True), "off", "on"),
    "opt_level": (at(APEX, opt_level="O1"), at(APEX, opt_level="O2"), "O1", "O2"),
    "fp8_recipe": (
        at(CASE, precision="fp8"),
        at(CASE, precision="fp8", fp8_recipe="rowwise"),
        "tensorwise",
        "rowwise",
    ),
    "batch_size": (CASE, SMALL, "128", "64"),
    "accumulate": (CASE, at(CASE, accumulate=4), "1", "4"),
    "memory_limit": (CASE, at(CASE, memory_limit="21GiB"), "none", "21GiB"),
    "lr": (CASE, at(CASE, lr=0.1), "0.01", "0.1"),
    "optimizer": (CASE, at(CASE, optimizer="adamw", lr=0.001), "sgd", "adamw"),
    "lr_scaling": (CASE, at(CASE, lr_scaling="linear", base_batch=64), "none", "linear"),
    "base_batch": (
        at(CASE, lr_scaling="sqrt"),
        at(CASE, lr_scaling="sqrt", base_batch=64),
        "128",
        "64",
    ),
    "lr_warmup": (CASE, at(CASE, lr_warmup="5%"), "0", "5%"),
    "schedule": (CASE, at(CASE, schedule="cosine"), "constant", "cosine"),
    "epochs": (CASE, at(CASE, epochs=2), "1", "2"),
    "steps": (CASE, at(CASE, steps=20), "none", "20"),
    "fraction": (CASE, at(CASE, fraction=0.1), "1", "0.1"),
    "until": (CASE, at(CASE, until=0.01), "none", "0.01"),
    "evaluate": (CASE, at(CASE, evaluate=True), "off", "on"),
    "checkpoint": (CASE, at(CASE, checkpoint=True), "off", "on"),
    "profile": (CASE, at(CASE, profile=True), "off", "on"),
    "cudnn_benchmark": (CASE, at(CASE, cudnn_benchmark=True), "off", "on"),
    "compile": (CASE, at(CASE, compile="default"), "off", "default"),
    "cuda_graphs": (CASE, at(CASE, cuda_graphs=True), "off", "on"),
    "channels_last": (CASE, at(CASE, channels_last=True), "off", "on"),
    "freeze": (CASE, at(CASE, freeze="bn"), "none", "bn"),
    "start": (CASE, at(CASE, start="w.pt"), "none", "w.pt"),
    "loader": (CASE, at(CASE, loader="torch", workers=2), "device", "torch"),
    "workers": (at(CASE, loader="torch"), at(CASE, loader="torch", workers=4), "0", "4"),
    "pin_memory": (PINNED[0], PINNED[1], "off", "on"),
    "persistent_workers": (LOADED, at(LOADED, persistent_workers=True), "off", "on"),
    "prefetch": (LOADED, at(LOADED, prefetch=4), "2", "4"),
    "input": (CASE, at(CASE, input="3x64x64"), "none", "3x64x64"),
    "classes": (CASE, at(CASE, classes=100), "none", "100"),
    "seed": (CASE, at(CASE, seed=7), "0", "7"),
    "workload": (CASE, at(CASE, workload="mine:net"), "images", "mine:net"),
    "device": (CASE, at(CASE, device="cuda"), "cpu", "cuda"),
    "parallel": (CASE, at(CASE, parallel="ddp", world_size=2), "none", "ddp"),
    "world_size": (DDP, at(DDP, world_size=4), "2", "4"),
    "grad_compression": (DDP, at(DDP, grad_compression="fp16"), "none", "fp16"),
    "bucket_mb": (DDP, at(DDP, bucket_mb=50), "25", "50"),
    "sync_bn": (SYNCED[0], SYNCED[1], "off", "on"),
}


@pytest.mark.parametrize("axis", ANY_AXIS)
def test_any_axis_is_compared_with_all_others_equal(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    """An axis without effect is the same; cases that differ elsewhere too stay unmatched."""
    assert set(ANY_AXIS) == set(AXES)
    one, two, *texts = ANY_AXIS[axis]
    free = axis in ("lr", "optimizer")
    other = at(two, **({"batch_size": 2} if free else {"lr": 0.5}))
    sweep = write("sweep", [r for case in (one, two, other) for r in runs(case, BASE)])
    document = machine(sweep, "--axis", axis, *texts)
    (finding,) = document["metrics"]["epoch_time_s"]
    assert (finding["verdict"], finding["speed"]) == ("same", pytest.approx(1))
    assert len(document["only_in_b"]) == 1
    assert finding["case_a"][axis] != finding["case_b"][axis]
    a, b = write("a", runs(one, BASE)), write("b", runs(two, BASE))
    if axis in SAME_QUESTION:  # how a case was measured parts no two folders
        assert verdicts(machine(a, b)) == ["same"]
        return
    # two folders that differ in the axis: the message names the command, and the command answers
    assert main([a, b, "--full"]) == 0
    said = f"to compare these values: python -m bench.compare a b --axis {axis} "
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("no case in both")]
    assert said + " ".join(texts) in line
    command = shlex.split(line.partition("bench.compare ")[2])
    assert verdicts(machine(*command)) == ["same"]


def test_a_switch_is_named_by_its_state(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write("sweep", [*runs(CASE, BASE), *runs(at(CASE, compile="default"), FASTER)])
    assert main([sweep, "--axis", "compile", "off", "on", "--fail-on", "faster", "--full"]) == 1
    out, err = capsys.readouterr()
    assert "speed is the time of off over that of default" in out
    assert "compile off (baseline)" in out
    assert err == "fail: faster: fp32 · batch size 128: epoch time: speed 1.250×\n"


def test_of_several_loss_scales_the_main_one_is_compared(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The default where it was run at this batch size, else the commonest."""
    usual = runs(FP16, [12.8 * t for t in BASE])
    lower = runs(at(FP16, loss_scale=64.0), [*BASE, *BASE, *BASE])
    skipping = runs(at(FP16, skip_overflow=True), twice(BASE))
    other = runs(at(FP16, loss_scale=256.0, batch_size=64), FASTER)
    rows = [*runs(CASE, BASE), *runs(SMALL, BASE), *lower, *usual, *skipping, *other]
    chosen = [write("sweep", rows), "--axis", "precision", "fp32", "fp16"]
    document = machine(*chosen)
    assert [f["speed"] for f in document["metrics"]["epoch_time_s"]] == pytest.approx(
        [1 / 12.8, 1.25]
    )
    scales = [f["case_b"]["loss_scale"] for f in document["metrics"]["epoch_time_s"]]
    assert scales == [128.0, 256.0]
    assert document["only_in_b"] == []
    assert main([*chosen, "--full"]) == 0
    said = "fp16: only loss scale 128 or 256 is compared, 64 left out; --axis loss_scale compares"
    assert said in capsys.readouterr().out
    # without the default, the commonest of the sweep, not of each batch size
    low, high = (at(FP16, loss_scale=scale) for scale in (64.0, 256.0))
    both = [r for case in (low, high, at(low, batch_size=64)) for r in runs(case, BASE)]
    sweep = write("common", [*runs(CASE, BASE), *runs(SMALL, BASE), *both])
    document = machine(sweep, "--axis", "precision", "fp32", "fp16")
    scales = [f["case_b"]["loss_scale"] for f in document["metrics"]["epoch_time_s"]]
    assert scales == [64.0, 64.0]


def measured_on(case: Case, fraction: float, times: Sequence[float]) -> list[Record]:
    case = at(case, fraction=fraction)
    return [
        record(
            case,
            i,
            measurement=Measurement(
                epoch_time_s=t, train_loss=2 + i / 100, energy_j=t, peak_process_bytes=2**30
            ),
        )
        for i, t in enumerate(times, 1)
    ]


def test_a_fraction_need_not_match_for_times_but_for_losses_and_energy(
    write: Write, machine: Callable[..., Any]
) -> None:
    sweep = write("sweep", [*measured_on(CASE, 1.0, BASE), *measured_on(BF16, 0.25, FASTER)])
    found = {
        name: findings[0]
        for name, findings in machine(sweep, "--axis", "precision")["metrics"].items()
    }
    assert found["epoch_time_s"]["verdict"] == "faster"
    assert "extrapolated: fraction 0.25 in bf16-amp" in found["epoch_time_s"]["remarks"]
    assert found["peak_process_bytes"]["verdict"] == "same"
    for name in ("train_loss", "energy_j"):
        assert found[name]["verdict"] == "no verdict"
        assert found[name]["lack"] == "fractions 1 and 0.25 of an epoch: not comparable"
        assert found[name]["lack"] in found[name]["remarks"]
    # equal fractions are matched first, and then all is compared
    more = [*measured_on(CASE, 1.0, BASE), *measured_on(CASE, 0.25, BASE)]
    sweep = write("more", [*more, *measured_on(BF16, 0.25, FASTER)])
    document = machine(sweep, "--axis", "precision")
    assert verdicts(document, "train_loss") == ["same"]
    assert verdicts(document, "energy_j") == ["less"]
    assert [case["fraction"] for case in document["only_in_a"]] == [1.0]


def test_a_profile_is_no_other_case(write: Write, machine: Callable[..., Any]) -> None:
    """Two folders that differ in --profile alone are compared, and so are runs beside them."""
    a = write("a", [*runs(CASE, BASE), *runs(SMALL, BASE)])
    b = write("b", runs(replace(CASE, profile=True), SLOWER))
    document = machine(a, b)
    assert verdicts(document) == ["slower"]
    (finding,) = document["metrics"]["epoch_time_s"]
    assert "profile" not in finding["case"]
    assert (finding["case_a"]["profile"], finding["case_b"]["profile"]) == (False, True)
    assert [case["batch_size"] for case in document["only_in_a"]] == [64]
    # where both ran both, each is compared with its like
    both = write("c", [*runs(CASE, BASE), *runs(replace(CASE, profile=True), SLOWER)])
    assert verdicts(machine(both, both)) == ["same", "same"]
    assert verdicts(machine(a, both)) == ["same"]


def test_another_fraction_is_compared_in_time_alone(
    write: Write, machine: Callable[..., Any]
) -> None:
    a = write("a", measured_on(CASE, 1.0, BASE))
    b = write("b", measured_on(CASE, 0.25, SLOWER))
    found = {name: findings[0] for name, findings in machine(a, b)["metrics"].items()}
    assert found["epoch_time_s"]["verdict"] == "slower"
    assert "extrapolated: fraction 0.25 in B" in found["epoch_time_s"]["remarks"]
    assert found["train_loss"]["lack"] == "fractions 1 and 0.25 of an epoch: not comparable"


def trained(case: Case, steps: int, of: int, times: Sequence[float]) -> list[Record]:
    """Runs with --steps, of an epoch of so many."""
    rows = measured_on(at(case, steps=steps), 1.0, times)
    for row in rows:
        row.measurement.measured_steps, row.measurement.steps_per_epoch = min(steps, of), of
    return rows


def test_a_few_steps_are_part_of_an_epoch(write: Write, machine: Callable[..., Any]) -> None:
    sweep = write("sweep", [*measured_on(CASE, 1.0, BASE), *trained(BF16, 20, 400, FASTER)])
    found = {n: f[0] for n, f in machine(sweep, "--axis", "precision")["metrics"].items()}
    assert found["epoch_time_s"]["verdict"] == "faster"
    assert "extrapolated: 20 steps in bf16-amp" in found["epoch_time_s"]["remarks"]
    lack = "fraction 1 of an epoch and 20 steps (0.05 of an epoch): not comparable"
    assert (found["train_loss"]["verdict"], found["train_loss"]["lack"]) == ("no verdict", lack)
    # two sweeps of one case: marked too
    a = write("a", trained(CASE, 20, 400, BASE))
    (finding,) = machine(a, a)["metrics"]["epoch_time_s"]
    assert "extrapolated" in finding["remarks"]
    # more steps than there are: a whole epoch
    b = write("b", [*trained(CASE, 500, 400, BASE), *measured_on(BF16, 1.0, FASTER)])
    document = machine(b, "--axis", "precision")
    assert verdicts(document, "train_loss") == ["same"]
    assert document["metrics"]["epoch_time_s"][0]["remarks"] == ["synthetic", "fake"]


def test_equal_parts_are_matched_and_not_equal_numbers_of_steps(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """40 steps at batch size 64 are of as many images as 20 at 128."""
    rows = [*trained(CASE, 20, 400, BASE), *trained(CASE, 30, 400, BASE)]
    sweep = write("sweep", [*rows, *trained(SMALL, 20, 800, BASE), *trained(SMALL, 40, 800, BASE)])
    chosen = [sweep, "--axis", "batch_size", "128", "64"]
    document = machine(*chosen)
    (finding,) = document["metrics"]["energy_j"]
    assert (finding["case_a"]["steps"], finding["case_b"]["steps"]) == (20, 40)
    assert (finding["verdict"], finding["n_a"], finding["n_b"]) == ("same", 5, 5)
    # as many images in twice as many steps: what was learnt by then is no effect of the batch size
    (finding,) = document["metrics"]["train_loss"]
    assert finding["verdict"] == "no verdict"
    assert finding["lack"].startswith("less than an epoch does not show")
    assert [case["steps"] for case in document["only_in_a"]] == [30]
    assert [case["steps"] for case in document["only_in_b"]] == [20]
    assert main([*chosen, "--full"]) == 0
    assert (
        "Only in batch size 64\n case\n ───────────────\n fp32 · steps 20\n"
        in capsys.readouterr().out
    )
    # none is equal: the largest, whose losses are not compared
    sweep = write("other", [*rows, *trained(SMALL, 20, 800, BASE)])
    (finding,) = machine(sweep, *chosen[1:])["metrics"]["train_loss"]
    lack = "30 steps (0.075 of an epoch) and 20 steps (0.025 of an epoch): not comparable"
    assert finding["lack"] == lack


def test_cases_that_differ_only_in_steps_are_each_compared(
    write: Write, machine: Callable[..., Any]
) -> None:
    """Whole epochs, a few steps, and more steps than there are; some ran out of memory."""
    rows = [
        row
        for case, times in ((CASE, BASE), (BF16, FASTER))
        for row in (
            *measured_on(case, 1.0, times),
            *trained(case, 20, 400, times),
            *trained(case, 500, 400, times),
        )
    ]
    full = at(CASE, steps=30), at(BF16, steps=30)
    rows += [*trained(full[0], 30, 400, BASE), record(full[1], 1, None, status=Status.OOM)]
    document = machine(write("sweep", rows), "--axis", "precision")
    found = document["metrics"]["train_loss"]
    asked = [(f["case_a"]["steps"], f["case_b"]["steps"]) for f in found]
    assert sorted(asked, key=str) == [(20, 20), (30, 30), (500, 500), (None, None)]
    lacks = {f["case"]["steps"]: f["lack"] for f in found}
    assert [lacks[n] for n in (20, 500, None)] == ["", "", ""]
    assert "comparable" not in lacks[30]
    changes = {row["case"]["steps"]: row["change"] for row in document["outcomes"]}
    assert changes == {None: "", 20: "", 500: "", 30: "broken"}


def test_values_run_on_several_machines_are_matched_by_machine(
    write: Write, machine: Callable[..., Any]
) -> None:
    def both(gpu: str, a: Sequence[float], b: Sequence[float]) -> list[Record]:
        return on(gpu, a) + [replace(r, case=BF16, record_id=f"b{r.record_id}") for r in on(gpu, b)]

    sweep = write("sweep", both("X", BASE, FASTER) + both("Y", twice(BASE), twice(twice(BASE))))
    document = machine(sweep, "--axis", "precision")
    found = {f["environment"]["gpu"]: f["verdict"] for f in document["metrics"]["epoch_time_s"]}
    assert found == {"X": "faster", "Y": "slower"}


def test_two_models_are_different_networks_on_purpose(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row
        for model, times in (("mynet:small", FASTER), ("mynet:large", BASE))
        for row in runs(
            at(CASE, model=model), times, environment=replace(HERE, model_structure=model)
        )
    ]
    sweep = write("sweep", rows)
    document = machine(sweep, "--axis", "model", "mynet:large", "mynet:small")
    assert verdicts(document) == ["faster"]
    assert document["environment"] == []
    # of two sweeps, networks of one name must still agree
    other = [
        replace(r, environment=replace(HERE, model_structure="x"), case=at(r.case, lr=0.1))
        for r in rows
    ]
    both = [sweep, write("other", other), "--axis", "lr"]
    assert main(both) == 2
    assert "lr 0.01 and lr 0.1 trained different networks" in capsys.readouterr().err
    assert main([*both, "--mix"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["a"],
            "a: name a second sweep to compare with, or two values to compare within this "
            "one, such as --axis precision fp32 fp16; what varies: precision (fp32, fp16, "
            "bf16-amp); batch_size (128, 64)",
        ),
        (["one"], "nothing varies within this one"),
        (
            ["a", "--axis", "precision", "fp32", "bf16"],
            "no case with precision bf16 in a; it has fp32, fp16, bf16-amp",
        ),
        (["a", "--axis", "precision", "fp32", "bf61"], "--axis precision 'bf61': did you mean"),
        (
            ["a", "--axis", "precison", "fp32", "fp16"],
            "--axis 'precison': did you mean 'precision'",
        ),
        (["a", "--axis", "precision", "fp32"], "give two values of precision"),
        (["a", "--axis", "precision", "fp32", "fp32"], "give two different values of precision"),
        (["a", "--axis", "precision"], "name two values, as a has fp32, fp16, bf16-amp"),
        (["a", "--axis", "lr"], "--axis lr: needs two values, and a has 0.01"),
        (["one", "one", "--axis", "precision"], "leave --axis out to compare equal cases"),
        (["one", "a", "--axis", "precision"], "name two values, as one has fp32 and a has fp32, "),
        (["--axis", "precision", "fp32", "fp16", "a"], "required: A"),
        (["a", "--equivalence-margin", "2"], "--equivalence-margin '2': a margin is a percentage"),
    ],
)
def test_what_cannot_be_compared_says_what_can(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    write("a", [r for case in (CASE, FP16, BF16, SMALL) for r in runs(case, BASE)])
    write("one", runs(CASE, BASE))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_nothing_in_common_but_the_axis_says_so(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = write("sweep", [*runs(CASE, BASE), *runs(at(BF16, batch_size=64), BASE)])
    assert main([sweep, "--axis", "precision", "--full"]) == 0
    out = capsys.readouterr().out
    assert "no case in both: they share no value of batch_size\n" in out
    # two axes apart: no command could answer
    assert (
        main([write("a", runs(CASE, BASE)), write("b", runs(at(SMALL, lr=1.0), BASE)), "--full"])
        == 0
    )
    assert "they share no value of batch_size, lr\n" in capsys.readouterr().out


def test_the_second_sweep_may_follow_a_flag(write: Write, machine: Callable[..., Any]) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert verdicts(machine(a, "--margin", "20%", b)) == ["same"]


# ------------------------------------------------------------------------------------ equivalence


def with_losses(
    case: Case, losses: Sequence[float], seeds: Iterable[int] = range(9)
) -> list[Record]:
    return [
        record(
            case,
            i,
            run_seed=seed,
            measurement=Measurement(train_loss=loss, test_accuracy=1 - loss / 4, epoch_time_s=1.0),
        )
        for i, (loss, seed) in enumerate(zip(losses, seeds, strict=False), 1)
    ]


LOSSES = (2.00, 2.20, 1.90, 2.10, 2.05)
NEAR = (1.001, 1.004, 0.998, 1.000, 1.003)


@pytest.mark.slow
def test_equivalence_of_losses_and_errors_is_judged(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    near = [x * y for x, y in zip(LOSSES, NEAR, strict=True)]
    rows = [
        *with_losses(CASE, LOSSES),
        *with_losses(BF16, near),
        *with_losses(SMALL, LOSSES),
        *with_losses(at(BF16, batch_size=64), [1.1 * x for x in near]),
        *with_losses(at(CASE, batch_size=32), LOSSES),
        *with_losses(at(BF16, batch_size=32), [1.018 * x for x in near]),
    ]
    chosen = [write("sweep", rows), "--axis", "precision"]
    document = machine(*chosen)
    assert list(document["equivalence"]) == ["train_loss", "test_top1_error"]
    for found in document["equivalence"].values():
        assert [f["verdict"] for f in found] == ["equivalent", "worse", "cannot tell"]
        assert [f["seeds"] for f in found] == [5, 5, 5]
        assert [f["seeds_needed"] is None for f in found] == [True, True, False]
        assert all(f["sentence"].startswith(f["verdict"]) for f in found)
    assert document["equivalence_margin"] == 0.02
    strict = machine(*chosen, "--equivalence-margin", "0.1%")["equivalence"]["train_loss"]
    assert [f["verdict"] for f in strict] == ["cannot tell", "worse", "worse"]
    assert main([*chosen, "--equivalence-margin", "0.1%", "--full"]) == 0
    said = "training loss equivalent within 0.1 %: 2 worse, 1 cannot tell\n"
    assert said in capsys.readouterr().out
    assert main([*chosen, "--full"]) == 0
    out = capsys.readouterr().out
    assert (
        "No loss of accuracy? training loss equivalent within 2 %: "
        "1 equivalent, 1 worse, 1 cannot tell\n" in out
    )
    assert "compared as pairs" in out
    assert main([*chosen, "--format", "md"]) == 0
    assert "| batch size 64 | 1.101 |" in capsys.readouterr().out


def test_equal_losses_of_networks_that_guess_show_nothing(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """ln 10 is 2.303; a network that learnt against one that guesses is a finding all the same."""
    guessing = [2.309, 2.310, 2.308]
    rows = [
        *with_losses(CASE, guessing),
        *with_losses(BF16, guessing),
        *with_losses(SMALL, [x - 0.8 for x in guessing]),
        *with_losses(at(BF16, batch_size=64), guessing),
        *with_losses(at(CASE, batch_size=32), [x - 0.1 for x in guessing]),
        *with_losses(at(BF16, batch_size=32), [x - 0.1 for x in guessing]),
    ]
    chosen = [write("sweep", rows), "--axis", "precision"]
    lack = "the loss is still that of guessing; train longer (--fraction, --steps or --epochs)"
    document = machine(*chosen)
    for metric in document["equivalence"]:
        first, second, _ = document["metrics"][metric]
        assert (first["verdict"], first["lack"]) == ("no verdict", lack)
        assert second["verdict"] == "higher"
    for found in document["equivalence"].values():
        assert [f["verdict"] for f in found] == ["cannot tell", "worse", "equivalent"]
        assert [f["lack"] for f in found] == [lack, "", ""]
        assert found[0]["ratio"] == pytest.approx(1)
        assert found[0]["low"] is None
    assert main([*chosen, "--full"]) == 0
    _, *tables = capsys.readouterr().out.split("No loss of accuracy?")
    assert len(tables) == 2
    for table in tables:
        assert lack in table
        assert "All cases: synthetic; fake." in table.partition("Two one-sided")[0]


def test_equivalence_of_part_of_an_epoch_says_so(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    part = [at(case, fraction=0.5) for case in (CASE, BF16)]
    sweep = write("sweep", [row for case in part for row in with_losses(case, LOSSES)])
    assert main([sweep, "--axis", "precision", "--metric", "train_loss", "--full"]) == 0
    out = capsys.readouterr().out
    assert "part of an epoch; synthetic; fake" in out.partition("No loss of accuracy?")[2]


def test_one_seed_cannot_show_equivalence_and_says_what_would(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    rows = [*with_losses(CASE, LOSSES, [0] * 5), *with_losses(BF16, LOSSES, [0] * 5)]
    chosen = [write("sweep", rows), "--axis", "precision", "--metric", "train_loss"]
    (found,) = machine(*chosen)["equivalence"]["train_loss"]
    assert found["verdict"] == "cannot tell"
    for form in ("text", "md"):
        assert main([*chosen, "--format", form, "--full"]) == 0
        out = capsys.readouterr().out
        assert "One seed cannot tell. Run the sweep again with --repeats 5" in out
        assert "seeds needed" not in out


# ------------------------------------------------------------------------------------ return codes


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        ("slower:5%", 1),
        ("slower", 1),
        ("slower:10%", 0),
        ("slower:8%", 0),  # 8 % slower, but not shown to be more
        ("faster:5%", 0),
        ("broken", 0),
        ("missing", 0),
        ("unjudged", 0),
    ],
)
def test_fail_on_a_verdict(
    write: Write, capsys: pytest.CaptureFixture[str], gate: str, code: int
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert main([a, b, "--fail-on", gate]) == code
    fails = f"fail: {gate}: fp32 · batch size 128: epoch time: speed 0.9259×\n"
    assert capsys.readouterr().err == fails * code


def test_a_gate_on_intervals_that_rule_nothing_out_has_checked_nothing(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.45, from 0.02 to 8.6, is no proof that nothing became 5 % slower."""
    wild = [30.0, 600.0, 330.0]
    a, b = write("a", runs(CASE, wild)), write("b", runs(CASE, [65.0, 37.0, 318.0]))
    assert main([a, b, "--fail-on", "slower:5%"]) == 1
    said = "the interval reaches beyond 5 % both ways; more repeats would tell"
    assert f"fail: slower:5%: no case could be judged: {said}" in capsys.readouterr().err
    other = Case(batch_size=256)
    both = [write(name, runs(CASE, wild) + runs(other, BASE)) for name in ("c", "d")]
    assert main([*both, "--fail-on", "slower:5%"]) == 0
    said = f"warning: --fail-on slower:5%: 1 of 2 cases could not be judged: {said}"
    assert said in capsys.readouterr().err


def test_fail_on_is_judged_against_its_own_margin(write: Write) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(CASE, SLOWER))
    assert main([a, b, "--margin", "20%", "--fail-on", "slower:5%"]) == 1
    assert main([a, b, "--margin", "20%", "--fail-on", "slower"]) == 0
    assert main([b, a, "--fail-on", "slower:5%", "--fail-on", "faster:5%"]) == 1


def test_a_gate_that_could_judge_nothing_fails(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write("a", runs(CASE, BASE[:1])), write("b", runs(CASE, SLOWER[:1]))
    assert main([a, b, "--fail-on", "slower:5%"]) == 1
    assert capsys.readouterr().err == (
        "fail: slower:5%: no case could be judged: needs 3 repeats a side, has 1\n"
    )
    assert main([a, b, "--fail-on", "unjudged"]) == 1
    assert "needs 3 repeats" in capsys.readouterr().err
    # nothing was measured that the gate speaks of
    assert main([a, b, "--fail-on", "lower", "--metric", "epoch_time_s", "test_loss"]) == 1
    assert "no case could be judged: no run has a value of test_loss" in capsys.readouterr().err


@pytest.mark.parametrize("gate", ["slower:5%", "slower", "broken", "unjudged"])
def test_a_gate_on_sweeps_that_share_nothing_fails(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any], gate: str
) -> None:
    a, b = write("a", runs(CASE, BASE)), write("b", runs(replace(CASE, lr=0.1), BASE))
    (result,) = machine(a, b, "--fail-on", gate, code=1)["gates"]
    command = "python -m bench.compare a b --axis lr 0.01 0.1"
    why = f"they share no value of lr; to compare these values: {command}"
    assert (result["passed"], result["judged"], result["why_unjudged"]) == (False, 0, [why])
    assert main([a, b, "--fail-on", gate]) == 1
    assert f"fail: {gate}: no case could be judged: {why}\n" in capsys.readouterr().err


def test_a_gate_says_how_many_cases_it_could_not_judge(
    write: Write, capsys: pytest.CaptureFixture[str], machine: Callable[..., Any]
) -> None:
    few = [replace(CASE, batch_size=b) for b in (32, 64)]
    a = write("a", [*runs(CASE, BASE), *(r for c in few for r in runs(c, BASE[:1]))])
    assert main([a, a, "--fail-on", "slower"]) == 0
    assert capsys.readouterr().err == (
        "warning: --fail-on slower: 2 of 3 cases could not be judged: "
        "needs 3 repeats a side, has 1 (2 times)\n"
    )
    (result,) = machine(a, a, "--fail-on", "slower")["gates"]
    assert (result["passed"], result["judged"], result["unjudged"]) == (True, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-on", "slowr:5%"], "--fail-on 'slowr:5%': did you mean 'slower'?"),
        (["--fail-on", "zzz"], "right values: faster, slower, less, more, lower, higher, broken"),
        (["--fail-on", "slower:"], "a percentage from 0 to 1000 %, such as 2%"),
        (["--fail-on", "slower:5"], "a percentage from 0 to 1000 %, such as 2%"),
        (["--fail-on", "slower:x%"], "a percentage"),
        (["--fail-on", "broken:5%"], "'broken' takes no percentage; leave '5%' out"),
        (["--fail-on", "slower", "--metric", "energy_j"], "add --metric epoch_time_s or"),
        (["--margin=-2%"], "--margin '-2%': a margin is a percentage"),
        (["--margin=nan%"], "a percentage"),
        (["--margin", "2%%"], "a percentage"),
        (["--metric", "epoch_time"], "--metric 'epoch_time': did you mean 'epoch_time_s'?"),
        (["--format", "jsn"], "--format 'jsn': did you mean 'json'?"),
        (["--colour"], "unknown argument '--colour'"),
        (["-o", "absent/file"], "-o absent/file: No such file or directory; choose a path"),
    ],
)
def test_usage_errors_are_one_line(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    a = write("a", runs(CASE, BASE))
    assert main([a, a, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_sides_without_records_are_refused(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    a, empty = write("a", runs(CASE, BASE)), write("empty", [])
    assert main([a, empty]) == 2
    assert capsys.readouterr().err == (
        "error: empty: no records yet; compare sweeps that have run\n"
    )
    assert main([a, "nowhere"]) == 2
    assert "nowhere: no records there" in capsys.readouterr().err
    assert main([]) == 2
    assert "required: A" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2%", " 2% ", "2.0%", "2 %"])
def test_percentages(text: str) -> None:
    assert parse_percent("", text) == 0.02


@pytest.mark.parametrize("text", ["", "%", "2", "0.02", "inf%", "1e4%", "２%", "5%%", "2%x"])
def test_no_percentages(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent("--margin", text)


# --------------------------------------------------------------------------------------- documents


@pytest.fixture
def sides(write: Write) -> tuple[str, str]:
    """A small comparison with something of everything."""
    full = replace(CASE, batch_size=512)
    a = runs(CASE, BASE) + runs(SMALL, BASE[:1]) + runs(FP16, BASE) + runs(full, BASE)
    b = runs(CASE, SLOWER, environment=replace(HERE, torch="2.9.1"))
    b += runs(SMALL, BASE[:1]) + [
        record(full, i, None, status=Status.OOM, inferred=i > 1) for i in range(1, 4)
    ]
    return write("a", a), write("b", b)


@pytest.mark.parametrize(("flags", "name"), [([], "compare"), (["--full"], "compare-full")])
def test_text(
    sides: tuple[str, str], flags: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*sides, *flags]) == 0
    out = capsys.readouterr().out
    if os.environ.get("UPDATE_SNAPSHOTS"):
        (SNAPSHOTS / f"{name}.txt").write_text(out, encoding="utf-8")
    assert out == (SNAPSHOTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("cases", [1, 60])
def test_a_comparison_fits_one_screen(
    cases: int, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 lines of 100 columns, whatever happened."""
    sizes = [at(CASE, batch_size=2 + i, lr=0.01 * (1 + i % 7)) for i in range(cases)]
    a = write("a", [row for case in sizes for row in runs(case, BASE)])
    lost = [record(at(CASE, batch_size=999), 1, None, status=Status.OOM)]
    b = write("b", [*(row for case in sizes for row in runs(case, SLOWER[:2])), *lost])
    assert main([a, b]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "no verdict" in lines[1]
    assert "--repeats 3" in out
    assert ("more rows are left out; --full has them" in " ".join(out.split())) == (cases > 1)


def test_markdown(sides: tuple[str, str], tmp_path: Path) -> None:
    assert main([*sides, "--format", "md", "-o", "out.md"]) == 0
    document = (tmp_path / "out.md").read_text(encoding="utf-8")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        (SNAPSHOTS / "compare.md").write_text(document, encoding="utf-8")
    assert document == (SNAPSHOTS / "compare.md").read_text(encoding="utf-8")
    for block in document.split("\n\n"):
        widths = {line.count("|") for line in block.splitlines() if line.startswith("|")}
        assert len(widths) <= 1


def test_tables_fit_the_terminal(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = at(CASE, model="a_package.of_networks:build_the_large_one")
    cases = [at(c, compile=mode) for c in (CASE, long) for mode in ("off", "default")]
    a = write("a", [r for case in cases for r in measured_on(case, 0.5, BASE)])
    b = write("b", [r for case in cases for r in measured_on(case, 0.5, SLOWER[:2])])
    assert main([a, b, "--full"]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "80")
    assert main([a, b, "--full"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    # nothing is left out: only breaks and gaps differ
    kept = [sorted("".join(out.replace("─", "").split())) for out in (narrow, wide)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_two_states_of_a_switch_fit_the_terminal(
    columns: int,
    write: Write,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of table and line: environments, conditions, losses, equivalence, spoilt times."""
    noise: dict[str, Any] = {"other_cores": 3.0, "warmup_steps": 4, "warmup_steady": False}
    far = replace(HERE, gpu="NVIDIA GeForce RTX 4090 Laptop GPU", torch="2.11.0+cu130.with.more")
    rows = [
        record(
            at(case, channels_last=on),
            i,
            environment=far if on else HERE,
            measurement=Measurement(
                epoch_time_s=time * (1 + i / 7), train_loss=2 + i / 9, test_accuracy=i / 9, **noise
            ),
        )
        for case in (CASE, at(SMALL, compile="default"), at(BF16, model="a_package.networks:large"))
        for on in (False, True)
        for i, time in enumerate(BASE, 1)
    ]
    sweep = write("sweep", rows)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([sweep, "--axis", "channels_last", "--full"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if len(line) > columns] == []
    assert "equivalent within 2 %" in " ".join(out.split())
    assert " ".join(out.split()).count("a new --out keeps the old rows") == 1, "said once"
    assert out.count("channels last") == 2, "only where the sides are introduced"
    assert "above 1 is faster" in " ".join(out.split())
    for verdict in ("ambiguous", "cannot tell"):
        assert verdict in out


HOSTILE = "x|y\x1b[31m\x9b2J`<script>\u202e*_"


def test_hostile_text_is_disarmed(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    environment = replace(HERE, torch=HOSTILE)
    a = write("a", runs(CASE, BASE))
    b = write("b", runs(CASE, BASE, environment=environment))
    assert main([a, b, "--full"]) == 0
    text = capsys.readouterr().out
    assert main([a, b, "--format", "md"]) == 0
    markdown = capsys.readouterr().out
    for out in (text, markdown):
        assert all(c.isprintable() or c == "\n" for c in out)
    (row,) = [line for line in markdown.splitlines() if "script" in line]
    assert "<" not in row
    assert row.replace("\\|", "").count("|") == 5
    assert "\\`" in row
    assert main([a, b, "--format", "json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_help_costs_no_heavy_import() -> None:
    code = (
        "import sys; from bench.compare.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'scipy', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert all(word in done.stdout for word in OUTCOME_FINDINGS)


@pytest.mark.slow
def test_a_closed_pipe_is_no_fault(write: Write) -> None:
    a = write("a", runs(CASE, BASE))
    command = f"{sys.executable} -m bench.compare {a} {a} | true"
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_opt_levels_are_not_mixed(
    write: Write, machine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of fp16-apex the runs without an opt level stand for it; the others are named."""
    levels = [at(APEX, opt_level=level) for level in ("O2", "O1")]
    rows = [*runs(levels[0], FASTER), *runs(APEX, BASE), *runs(levels[1], FASTER)]
    chosen = [
        write("sweep", [*runs(CASE, BASE), *rows]),
        "--axis",
        "precision",
        "fp32",
        "fp16-apex",
    ]
    assert verdicts(machine(*chosen)) == ["same"]
    assert main([*chosen, "--full"]) == 0
    said = "fp16-apex: only opt level none is compared, O2, O1 left out; --axis opt_level compares"
    assert said in " ".join(capsys.readouterr().out.split())
