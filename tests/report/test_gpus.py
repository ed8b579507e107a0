"""Scaling over GPUs: lines, efficiency, exposed communication, stragglers, precision's tax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import (
    GRADIENTS,
    PARAMETERS,
    make_gpus,
    make_gpus_records,
    time_step,
    write_sweep,
)

from bench.case import Case
from bench.questions.gpus import SCALING, TAX
from bench.questions.lines import Line, Tax, find_taxes
from bench.record import Status
from bench.render.model import Table
from bench.render.text import render
from bench.report.document import Report, build
from bench.report.figures.groups import view_report
from bench.report.figures.sketches import SKETCHES
from bench.study.doubts import list_links
from bench.study.sweeps import read_sweep


def report(folder: Path, *cases: Any) -> Report:
    made = [one for case in cases for one in case]
    return build([read_sweep(write_sweep(folder / "sweep", made))])


@dataclass
class Scaling:
    """What a report has to say of several GPUs, without the rest of it, which takes longer."""

    cases: pd.DataFrame
    lines: list[Line]
    tables: list[Table]


def scale(folder: Path, *cases: Any) -> Scaling:
    made = [one for case in cases for one in case]
    found = build([read_sweep(write_sweep(folder / "sweep", made))])
    tables = [*SCALING.tabulate(found), *TAX.tabulate(found)]
    return Scaling(found.cases, found.lines, tables)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return build([read_sweep(make_gpus(tmp_path_factory.mktemp("gpus") / "sweep"))])


def take_line(made: Report, precision: str, strong: bool) -> Line:
    (line,) = (
        line
        for line in made.lines
        if line.strong is strong and line.points[0].row.precision == precision
    )
    return line


def take_table(made: Report | Scaling, name: str) -> Table:
    (table,) = (table for table in made.tables if table.name == name)
    return table


def read(table: Table, column: str) -> list[Any]:
    at = [head.name for head in table.heads].index(column)
    return [row[at].value for row in table.rows]


@pytest.mark.slow
@pytest.mark.parametrize("precision", GRADIENTS)
@pytest.mark.parametrize("strong", [False, True])
def test_efficiency_is_that_of_the_steps(whole: Report, precision: str, strong: bool) -> None:
    """Against the formula that made the rows: one GPU's images a second, times their number."""
    line = take_line(whole, precision, strong)
    assert line.base
    assert [point.gpus for point in line.all] == [1, 2, 4, 8]
    for point in line.points:
        gpus = point.gpus
        one = time_step(precision, 512 if strong else 64, 1)[0]
        many = time_step(precision, 512 // gpus if strong else 64, gpus)[0]
        wanted = one / many / gpus if strong else one / many
        assert point.efficiency == pytest.approx(wanted, rel=1e-9)
        assert point.speedup == pytest.approx(gpus * wanted, rel=1e-9)
        assert point.ends
        assert point.ends[0] < point.efficiency < point.ends[1]
        assert point.row.global_batch == (512 if strong else 64 * gpus)
        assert point.row.batch_size == point.row.global_batch / gpus


def test_weak_and_strong_are_different_tables(whole: Report) -> None:
    weak, strong = (take_table(whole, f"{kind}-scaling") for kind in ("weak", "strong"))
    assert read(weak, "world_size") == read(strong, "world_size") == [1, 2, 4, 8] * 3
    assert read(weak, "batch_size") == [64] * 12
    assert read(weak, "global_batch") == [64, 128, 256, 512] * 3
    assert read(strong, "batch_size") == [512, 256, 128, 64] * 3
    assert read(strong, "global_batch") == [512] * 12
    assert list(weak.groups.values()) == [
        f"{name} · batch size 64 on each GPU · ddp" for name in GRADIENTS
    ]
    assert "Each is compared with --parallel none." in weak.notes
    # the explanation that both share is said once
    assert sum("ring all-reduce" in note for note in (*weak.notes, *strong.notes)) == 1


def test_the_exchange_is_told(whole: Report) -> None:
    table = take_table(whole, "weak-scaling")
    sync, alone = time_step("bf16-amp", 64, 8)
    last = {head.name: row for head, row in zip(table.heads, table.rows[-1], strict=True)}
    assert last["exposed_s"].value == pytest.approx(sync - alone)
    assert last["exposed_s"].text == f"{1e3 * (sync - alone):.2f} ± {1e3 * alone / 100:.2f}"
    assert not last["remarks"].text.count("noise")
    assert last["exposed_share"].value == pytest.approx(1 - alone / sync)
    assert last["wire_bytes"].value == PARAMETERS * 4
    assert last["wire_rate"].value == pytest.approx(PARAMETERS * 4 * 2 * 7 / 8 / sync)
    half = read(table, "wire_bytes")[4:8]
    assert half[1:] == [PARAMETERS * 2] * 3
    assert half[0] is None, "one GPU exchanges nothing"


def test_a_straggler_is_named_and_doubted(whole: Report) -> None:
    table = take_table(whole, "weak-scaling")
    at = [head.name for head in table.heads].index("slowest")
    assert [row[at].text for row in table.rows[:4]] == ["–", "1, +0.1 %", "3, +0.2 %", "7, +8.4 %"]
    doubted = whole.cases[whole.cases["straggling"]]
    assert set(doubted["world_size"]) == {8}
    (notice,) = (n for n in whole.warnings if n.label == "Straggler")
    assert "ranks.csv" in notice.text
    assert "bench.doctor" in notice.text
    assert "nvidia-smi" in notice.text


def test_on_a_cpu_a_straggler_is_no_matter_of_cards(tmp_path: Path) -> None:
    made = report(tmp_path, make_gpus_records("fp32", 64, 2, device="cpu", late=0.5))
    (notice,) = (n for n in made.warnings if n.label == "Straggler")
    assert "bench.doctor" in notice.text
    assert "nvidia-smi" not in notice.text


def test_of_two_processes_the_slower_is_held_against_the_other(tmp_path: Path) -> None:
    made = scale(tmp_path, make_gpus_records("fp32", 64, 2, late=0.5))
    (point,) = made.lines[0].points
    assert point.row.straggle == pytest.approx(1.5 * 1.001 - 1)
    assert point.slowest == 1


# -------------------------------------------------------------------------------------------- tax


def test_the_tax_is_what_the_lead_loses(whole: Report) -> None:
    taxes = find_taxes(whole.lines)
    assert [(t.line.strong, t.line.points[0].row.precision) for t in taxes] == [
        (strong, name) for strong in (False, True) for name in ("fp16", "bf16-amp")
    ]
    for tax in taxes:
        strong, name = tax.line.strong, tax.line.points[0].row.precision

        def lead(gpus: int, strong: bool = strong, name: str = name) -> float:
            batch = 512 // gpus if strong else 64
            return time_step("fp32", batch, gpus)[0] / time_step(name, batch, gpus)[0]

        assert tax.speedups == pytest.approx({gpus: lead(gpus) for gpus in (1, 2, 4, 8)})
        assert tax.share == pytest.approx(1 - lead(8) / lead(1))
        assert tax.ends
        assert tax.ends[0] < tax.share < tax.ends[1]
    table = take_table(whole, "scaling-tax")
    # autocast's gradients are twice as many bytes as pure fp16's, and cost it more of its lead
    assert read(table, "wire_bytes") == [PARAMETERS * 2, PARAMETERS * 4] * 2
    half, full = read(table, "tax")[:2]
    assert half < full
    assert list(table.groups.values()) == [
        "batch size 64 on each GPU · ddp",
        "global batch 512 · ddp",
    ]


def test_the_interval_of_a_tax_covers_as_often_as_it_says() -> None:
    """95 of 100: four sets of five times whose logarithms are normal, with a true tax of 10 %."""
    import numpy as np

    from bench.questions.lines import _judge

    draw, covered, rounds = np.random.default_rng(1), 0, 2000
    for _ in range(rounds):
        sets = [
            np.exp(draw.normal(math.log(mean), spread, 5)).tolist()
            for mean, spread in ((8.0, 0.01), (4.0, 0.02), (1.0, 0.01), (0.5 / 0.9, 0.03))
        ]
        share, ends = _judge((sets[0], sets[1]), (sets[2], sets[3]))
        assert ends
        assert ends[0] < share < ends[1]
        covered += ends[0] <= 0.1 <= ends[1]
    assert 0.935 < covered / rounds < 0.97


def test_single_runs_have_no_interval(tmp_path: Path) -> None:
    cases = [make_gpus_records(name, 64, gpus, 1) for name in ("fp32", "fp16") for gpus in (1, 4)]
    made = scale(tmp_path, *cases)
    (tax,) = find_taxes(made.lines)
    assert tax.ends is None
    assert tax.line.points[0].ends is None
    notes = take_table(made, "scaling-tax").notes
    assert any("needs 3 runs of each of the four cases" in note for note in notes)


def test_a_tax_that_is_not_certain_is_said_to_be(tmp_path: Path) -> None:
    """On two GPUs with a large batch, all of the exchange is hidden behind the backward pass."""
    cases = [make_gpus_records(name, 512, gpus) for name in ("fp32", "fp16") for gpus in (1, 2)]
    made = scale(tmp_path, *cases)
    (tax,) = find_taxes(made.lines)
    assert tax.ends
    assert tax.ends[0] < 0 < tax.ends[1]
    said = take_table(made, "scaling-tax").notes
    assert any("not certain for fp16" in note for note in said)


# ---------------------------------------------------------------------- what is compared with what


def test_one_gpu_without_ddp_comes_before_ddp_on_one(tmp_path: Path) -> None:
    on_one = make_gpus_records("fp32", 64, 1, parallel="ddp")
    alone, four = make_gpus_records("fp32", 64, 1), make_gpus_records("fp32", 64, 4)
    made = scale(tmp_path / "a", on_one, four)
    (line,) = made.lines
    table = take_table(made, "weak-scaling")
    assert "Each is compared with --parallel ddp --world-size 1." in table.notes
    assert line.base
    assert line.base.row.parallel == "ddp"
    assert [point.gpus for point in line.points] == [4]
    made = scale(tmp_path / "b", on_one, alone, four)
    (line,) = made.lines
    assert line.base
    assert line.base.row.parallel == "none"
    assert [point.gpus for point in line.points] == [1, 4], "what DDP itself costs is seen"
    assert read(take_table(made, "weak-scaling"), "parallel") == ["none", "ddp", "ddp"]


def put_beside(records: list[Any], others: int = 3) -> list[Any]:
    for record, *_ in records:
        record.lanes_beside = others
    return records


def test_a_base_that_ran_alone_comes_before_one_that_did_not(tmp_path: Path) -> None:
    on_one = make_gpus_records("fp32", 64, 1, parallel="ddp")
    alone = put_beside(make_gpus_records("fp32", 64, 1))
    made = scale(tmp_path, alone, on_one, make_gpus_records("fp32", 64, 4))
    (line,) = made.lines
    assert line.base
    assert line.base.row.parallel == "ddp"
    assert [(point.row.parallel, point.gpus) for point in line.points] == [("none", 1), ("ddp", 4)]
    assert line.by_gpus[1] is line.base
    table = take_table(made, "weak-scaling")
    assert ["lanes" in row[-1].text for row in table.rows] == [False, True, False]


@pytest.mark.parametrize("slowed", ["fp32", "fp16"])
def test_a_tax_needs_two_bases_of_a_kind_that_ran_alone(tmp_path: Path, slowed: str) -> None:
    """Of one precision, --parallel none ran beside others: DDP on one GPU is left."""
    cases = [
        make_gpus_records(name, 64, gpus, parallel="ddp")
        for name in ("fp32", "fp16")
        for gpus in (1, 8)
    ]
    plain = {name: make_gpus_records(name, 64, 1) for name in ("fp32", "fp16")}
    for record, *_ in put_beside(plain[slowed]):
        record.measurement.epoch_time_s *= 2  # type: ignore[operator]
    lines = scale(tmp_path, *plain.values(), *cases).lines
    assert sorted(line.base.row.parallel for line in lines if line.base) == ["ddp", "none"]
    (tax,) = find_taxes(lines)
    lead = time_step("fp32", 64, 1)[0] / time_step("fp16", 64, 1)[0]
    assert tax.speedups[1] == pytest.approx(lead)


def test_a_base_that_ran_beside_others_is_doubted(tmp_path: Path) -> None:
    """Of 110 % it is not known how much the lanes beside the base made."""
    alone = put_beside(make_gpus_records("fp32", 64, 1))
    cases = [alone, make_gpus_records("fp32", 64, 2)]
    table = take_table(scale(tmp_path / "x", *cases), "weak-scaling")
    assert table.heads[-1].name == "remarks"
    first, second = (row[-1].text for row in table.rows)
    assert first == "beside other lanes"
    assert second.startswith("against one beside other lanes")
    made = report(tmp_path / "y", *cases)
    (notice,) = (n for n in made.warnings if n.label == "Beside other lanes")
    assert "--lanes quiet with another --out" in notice.text
    assert "3 of 6 runs" in notice.text


def test_lanes_beside_are_no_doubt_where_nothing_runs_on_several(tmp_path: Path) -> None:
    made = scale(tmp_path, put_beside(make_gpus_records("fp32", 64, 1)))
    assert not made.cases["beside"].any()


@pytest.mark.parametrize(
    ("added", "error", "said"),
    [(0.004, 0.001, "4.00 ± 1.00"), (0.001, 0.004, "1.00 ± 4.00"), (-0.001, 0.004, "-1.00 ± 4.00")],
)
def test_an_exchange_that_noise_hides_is_said_to_be(
    tmp_path: Path, added: float, error: float, said: str
) -> None:
    cases = [make_gpus_records("fp32", 64, gpus, 1, parallel="ddp") for gpus in (1, 2)]
    for records in cases:
        m = records[0][0].measurement
        m.sync_step_s, m.no_sync_step_s, m.exposed_error_s = 0.1 + added, 0.1, error
    table = take_table(scale(tmp_path, *cases), "weak-scaling")
    at = [head.name for head in table.heads].index("exposed_s")
    assert [row[at].text for row in table.rows] == ["–", said], "one process exchanges nothing"
    hidden = ["exchange not above noise"] if added < error else []
    told = [row[-1].text for row in table.rows] if table.heads[-1].name == "remarks" else []
    assert list(filter(None, told)) == hidden


@pytest.mark.parametrize("repeats", [1, 3])
def test_more_than_n_times_one_is_doubted(tmp_path: Path, repeats: int) -> None:
    """Two GPUs are 2 % below twice one here; where that one was slowed by 10 %, they are above."""
    one, two = (make_gpus_records("fp32", 512, gpus, repeats) for gpus in (1, 2))
    table = take_table(scale(tmp_path / "a", one, two), "weak-scaling")
    assert not any("above 100 %" in row[-1].text for row in table.rows)
    assert not any("Above 100 %" in note for note in table.notes)
    for record, *_ in one:
        record.measurement.epoch_time_s *= 1.1
    table = take_table(scale(tmp_path / "b", one, two), "weak-scaling")
    assert ["above 100 %" in row[-1].text for row in table.rows] == [False, True]
    assert any("The case on one was" in note for note in table.notes)


def test_each_table_explains_its_own_remarks(tmp_path: Path) -> None:
    """By strong scaling only; what both have in common stands below the first of them."""
    one, two, half = (
        make_gpus_records("fp32", size, gpus) for size, gpus in ((512, 1), (512, 2), (256, 2))
    )
    for (record, *_), (base, *_) in zip(half, one, strict=True):
        assert base.measurement.epoch_time_s
        record.measurement.epoch_time_s = 0.4 * base.measurement.epoch_time_s
    made = scale(tmp_path, one, two, half)
    explained = {
        name: any("Above 100 %" in note for note in take_table(made, f"{name}-scaling").notes)
        for name in ("weak", "strong")
    }
    assert explained == {"weak": False, "strong": True}


def test_ddp_on_one_gpu_is_not_more_gpus(tmp_path: Path) -> None:
    alone, on_one = (make_gpus_records("fp32", 64, 1, parallel=way) for way in ("none", "ddp"))
    for record, *_ in alone:
        record.measurement.epoch_time_s *= 1.5
    made = scale(tmp_path, alone, on_one, make_gpus_records("fp32", 64, 4))
    table = take_table(made, "weak-scaling")
    assert read(table, "world_size") == [1, 1, 4]
    assert ["above 100 %" in row[-1].text for row in table.rows] == [False, False, True]


def test_what_differs_between_runs_counts_where_it_is_more(tmp_path: Path) -> None:
    records = make_gpus_records("fp32", 64, 2, 3)
    for record, added in zip(records, (0.001, 0.005, 0.009), strict=True):
        m = record[0].measurement
        m.sync_step_s, m.no_sync_step_s, m.exposed_error_s = 0.1 + added, 0.1, 0.001
    (point,) = scale(tmp_path, records).lines[0].points
    assert point.exposed_error_s == pytest.approx(0.004)
    assert not point.hidden


def test_without_one_gpu_there_is_no_speedup(tmp_path: Path) -> None:
    made = scale(tmp_path, make_gpus_records("fp32", 64, 4))
    (line,) = made.lines
    assert (line.strong, line.base) == (False, None)
    assert math.isnan(line.points[0].efficiency)
    table = take_table(made, "weak-scaling")
    assert read(table, "gpu_efficiency") == [None]
    assert any("add --parallel none" in note for note in table.notes)


def test_what_differs_in_more_is_on_another_line(tmp_path: Path) -> None:
    """Another learning rate, compressed gradients, another way: each a line of its own."""
    four = {"gpus": 4, "batch": 64}
    made = scale(
        tmp_path,
        make_gpus_records("fp32", 64, 1),
        make_gpus_records("fp32", 64, 1, lr=0.1),
        make_gpus_records("fp32", **four),
        make_gpus_records("fp32", **four, grad_compression="fp16"),
        make_gpus_records("fp32", **four, parallel="dp"),
    )
    assert len(made.lines) == 3
    for line in made.lines:
        assert line.base
        assert line.base.row.lr == Case.lr
    table = take_table(made, "weak-scaling")
    assert any("dp (legacy)" in text for text in table.groups.values())
    assert any("grad compression fp16" in text for text in table.groups.values())
    assert any("dp is torch's DataParallel" in note for note in table.notes)


def test_what_failed_is_on_no_line(tmp_path: Path) -> None:
    failed = [(one[0], *one[1:]) for one in make_gpus_records("fp32", 64, 8)]
    for one in failed:
        one[0].status = Status.ERROR
    made = scale(tmp_path, make_gpus_records("fp32", 64, 1), failed)
    assert made.lines == []
    assert made.tables == []


def test_links_that_differ_are_told(tmp_path: Path) -> None:
    made = scale(
        tmp_path,
        make_gpus_records("fp32", 64, 1),
        make_gpus_records("fp32", 64, 2, links="NV18"),
        make_gpus_records("fp32", 64, 4, links="SYS"),
    )
    (note,) = (n for n in take_table(made, "weak-scaling").notes if "not linked alike" in n)
    assert "(2 GPUs: NV18; 4 GPUs: SYS)" in note
    assert not made.cases["unlike_links"].any(), "within each case they are alike"


@given(st.lists(st.sampled_from(["NV18", "NV4", "SYS", "PHB", "level 35"]), max_size=28))
def test_links_are_read_as_they_are_written(kinds: list[str]) -> None:
    text = ", ".join(f"{n}-{n + 1} {kind}" for n, kind in enumerate(kinds))
    assert list_links(text) == sorted(set(kinds))


# ------------------------------------------------------------------------ the rest of the report


def test_other_axes_are_compared_at_equal_world_sizes(whole: Report) -> None:
    sizes = whole.cases.set_index("cell")["world_size"]
    assert {effect.axis for effect in whole.effects} == {"precision", "batch_size", "world_size"}
    for effect in whole.effects:
        for before, after in effect.pairs:
            assert (sizes[before] == sizes[after]) == (effect.axis != "world_size")


@pytest.mark.slow
def test_ddp_is_compared_with_one_gpu_on_one_gpu(tmp_path: Path) -> None:
    made = report(
        tmp_path,
        make_gpus_records("fp32", 64, 1),
        make_gpus_records("fp32", 64, 1, parallel="ddp"),
        make_gpus_records("fp32", 64, 4),
    )
    (effect,) = (effect for effect in made.effects if effect.axis == "parallel")
    assert (effect.before, effect.after, len(effect.pairs)) == ("none", "ddp", 1)
    assert effect.time
    assert effect.time.ratio.value == pytest.approx(1.0, abs=1e-9)


def test_names_have_the_global_batch(whole: Report) -> None:
    case = Case(batch_size=64, parallel="ddp", world_size=8)
    axes = ["precision", "batch_size", "parallel", "world_size"]
    assert case.label(axes).endswith("parallel ddp · world size 8 · global batch 512")
    assert "global" not in case.label(["precision", "world_size"])
    assert "global" not in Case(batch_size=64).label(axes)
    assert Case(parallel="dp", world_size=2).label(["parallel"]) == "parallel dp (legacy)"
    sizes = read(take_table(whole, "overview"), "global_batch")
    assert sorted(set(sizes)) == [64, 128, 256, 512]
    assert "world size 8 · global batch 512" in " ".join(render(whole, full=True).split())


def test_floating_point_work_is_that_of_each_gpu(tmp_path: Path) -> None:
    made = []
    for gpus in (1, 4):
        for record, *rest in make_gpus_records("fp32", 512, gpus):
            record.measurement.flop_per_image = 1e9
            made.append((record, *rest))
    cases = scale(tmp_path, made).cases
    one, four = cases["achieved_flops"]
    assert four == pytest.approx(one)


def test_figures_show_lines_and_taxes(whole: Report) -> None:
    view = view_report(whole)
    found = {
        sketch.name: list(sketch.take(view)) for sketch in SKETCHES if "scaling" in sketch.name
    }
    assert [title for title, _ in found["gpu-scaling"]] == [
        "weak: batch size 64 on each GPU · ddp",
        "strong: global batch 512 · ddp",
    ]
    for strong, (_, data) in enumerate(found["gpu-scaling"]):
        for precision, part in data.groupby("precision"):
            line = take_line(whole, str(precision), bool(strong))
            wanted = {1: 1.0} | {point.gpus: point.speedup for point in line.points}
            assert dict(zip(part["GPUs"], part["speed-up over one (×)"], strict=True)) == wanted
    for tax, (_, data) in zip(_firsts(find_taxes(whole.lines)), found["scaling-tax"], strict=True):
        part = data[data["precision"] == tax.line.points[0].row.precision]
        assert dict(zip(part["GPUs"], part.iloc[:, 2], strict=True)) == tax.speedups


def _firsts(taxes: list[Tax]) -> list[Tax]:
    """Of weak and of strong scaling, the first tax."""
    return list({tax.line.strong: tax for tax in reversed(taxes)}.values())[::-1]


def test_on_a_cpu_they_are_processes(tmp_path: Path) -> None:
    cases = [
        make_gpus_records(name, 64, gpus, device="cpu")
        for name in ("fp32", "fp16")
        for gpus in (1, 2)
    ]
    weak, tax = scale(tmp_path, *cases).tables
    assert weak.title == "Scaling over processes: weak, the batch of each stays"
    assert weak.groups[0] == "fp32 · batch size 64 in each process · ddp"
    assert tax.title.endswith("by the number of processes")
    assert "GPU" not in " ".join(head.label + head.help for head in weak.heads)
