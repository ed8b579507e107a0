"""Weights sharded over processes, of gloo on the CPU: the same training as with gradients averaged,
and less memory in each process."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.base.errors import UsageError
from bench.compare.__main__ import main as compare_main
from bench.report.__main__ import main as report_main
from bench.schema.case import Case, divide_items
from bench.schema.optimization import OPTIMIZERS
from bench.schema.rules import check_batches, go_together
from bench.sweep.__main__ import main as sweep_main
from tests import ranks_for_tests
from tests.ranks_for_tests import SHARDED, SLEEP_S

SIZES = (2, 3)
Found = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What the scenarios of `ranks_for_tests` gave, by the number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ("2,sharded,sharded_overflow,sharded_exposed", "3,sharded")
        command = [sys.executable, ranks_for_tests.__file__, folder, *asked]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environment, check=True, timeout=900)
        return {
            size: torch.load(Path(folder) / f"found{size}.pt", weights_only=False) for size in SIZES
        }


def find_rounding(settings: dict[str, Any]) -> float:
    """The relative rounding error of the format that gradients are exchanged and summed in."""
    name = settings.get("grad_compression") or settings.get("precision", "fp32")
    return 2.0 ** -{"bf16": 8, "bf16-pure": 8, "fp16": 11}.get(name, 24)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("settings", SHARDED, ids=lambda s: " ".join(map(str, s.values())) or "-")
def test_losses_are_those_of_averaged_gradients(
    found: Found, size: int, settings: dict[str, Any]
) -> None:
    """Within a few roundings of an exchanged gradient: both divide by the number of processes, one
    before the sum and one after it. The last batch is uneven."""
    ddp, fsdp = (found[size]["sharded"][repr(settings)][name] for name in ("ddp", "fsdp"))
    bound = 8 * find_rounding(settings)
    assert torch.equal(fsdp["start"], ddp["start"])
    assert not torch.equal(ddp["start"], ddp["weights"]), "it learns"
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=bound)
    assert fsdp["norms"] == pytest.approx(ddp["norms"], rel=bound)
    assert len(fsdp["norms"]) == (len(fsdp["losses"]) if "clip_grad" in settings else 0)
    if "optimizer" not in settings:  # it divides noise by itself where BatchNorm is blind
        assert fsdp["tested"] == pytest.approx(ddp["tested"], rel=bound)
        assert float((fsdp["weights"] - ddp["weights"]).norm()) < bound * float(
            ddp["weights"].norm()
        )
    blocks = "3 Sequential"
    assert fsdp["notes"][0] == f"sharded: {blocks}, and the rest of the network as one"
    assert blocks in fsdp["notes"][1] or "recompute" not in settings


@pytest.mark.slow
@pytest.mark.parametrize("settings", SHARDED, ids=lambda s: " ".join(map(str, s.values())) or "-")
def test_a_process_holds_its_share(found: Found, settings: dict[str, Any]) -> None:
    """Of weights, gradients and the optimizer's state, each. Buffers are not sharded, nor are the
    4 bytes a weight in which Adam counts steps."""
    ddp, fsdp = (found[2]["sharded"][repr(settings)][name] for name in ("ddp", "fsdp"))
    buffers, counts = 3 * (2 * 16 + 8), 4 * 16 * ("optimizer" in settings)
    for part, beside in (("weights", buffers), ("gradients", 0), ("optimizer", counts)):
        whole, own = (run["held"][f"{part}_bytes"] - beside for run in (ddp, fsdp))
        assert own == pytest.approx(whole / 2, abs=counts), part
    assert fsdp["wire"] == ddp["wire"]
    # all weights once, and those of blocks a second time, for the backward pass
    weights = ddp["held"]["weights_bytes"] - buffers
    assert weights < fsdp["gathered"] < 2 * weights
    assert ddp["gathered"] is None


def test_no_optimizer_shards_that_was_not_proven_to() -> None:
    """Whatever is added to them: torchao's were allowed, untried, as soon as they were there."""
    proven = {case.get("optimizer", "sgd") for case in SHARDED}
    cases = (Case(parallel="fsdp", world_size=2, optimizer=name) for name in OPTIMIZERS)
    assert {case.optimizer for case in cases if go_together(case)} == proven


@pytest.mark.slow
def test_all_skip_a_step_that_one_overflowed_in(found: Found) -> None:
    for settings, processes in found[2]["sharded_overflow"].items():
        assert processes == [([True, False, False], True, 2.0**15)] * 2, settings


@pytest.mark.slow
def test_communication_that_nothing_hides_is_found(found: Found) -> None:
    """Each of the gradients' exchanges takes `SLEEP_S`: one a block, and one for the rest."""
    run = found[2]["sharded_exposed"]
    exposed = run["exposed"]
    assert run["buckets"] == 4
    off = exposed.sync_step_s - exposed.no_sync_step_s - 4 * SLEEP_S
    assert abs(off) < SLEEP_S / 2 + 2 * exposed.error_s
    assert exposed.error_s < SLEEP_S
    assert run["same"] == [True, True], "the training is as it was"


def read(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


@pytest.mark.slow
def test_a_sweep_measures_it_beside_averaged_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = "--model dpn-small --dataset synthetic --device cpu --precision fp32 --batch-size 16"
    words += f" --steps 2 --repeats 1 --parallel none ddp fsdp --world-size 2 --out {out}"
    assert sweep_main(words.split()) == 0
    rows = {r["parallel"]: r for r in read(out / "records.csv") if r["sentinel"] != "on"}
    ddp, fsdp = rows["ddp"], rows["fsdp"]
    assert float(fsdp["train_loss"]) == pytest.approx(float(ddp["train_loss"]), rel=2.0**-21)
    for same in ("wire_bytes", "flop_per_image", "arithmetic", "labelled_flop_share"):
        assert fsdp[same] == ddp[same] != "", same
    assert int(fsdp["optimizer_bytes"]) == int(ddp["optimizer_bytes"]) / 2
    assert int(fsdp["gathered_bytes"]) > int(fsdp["wire_bytes"])
    assert float(fsdp["sync_step_s"]) > 0 < float(fsdp["no_sync_step_s"])
    assert (ddp["gathered_bytes"], fsdp["step_bytes"]) == ("", "")
    assert "step_bytes: each process steps its share of the weights" in fsdp["missing"]
    assert fsdp["notes"] == "sharded: 4 DualPathBlock, and the rest of the network as one"
    ranks = [r for r in read(out / "ranks.csv") if r["record_id"] == fsdp["record_id"]]
    assert [(r["rank"], r["images"], r["work_s"]) for r in ranks] == [
        ("0", "32", ""),
        ("1", "32", ""),
    ]
    assert all(int(r["peak_process_bytes"]) > 0 for r in ranks)
    capsys.readouterr()
    compare_main([str(out), "--axis", "parallel", "ddp", "fsdp"])
    assert "1 case with both values of parallel" in capsys.readouterr().out
    report_main([str(out), "--full"])
    shown = capsys.readouterr().out
    assert re.search(r"parallel: ddp → fsdp ", shown), "of as many processes"
    assert not re.search(r"parallel: none → ", shown), "which one alone is not"
    # and one process, which holds all
    alone = words.replace("none ddp fsdp --world-size 2", "fsdp --world-size 1 --evaluate")
    assert sweep_main(alone.split()) == 0
    one = next(r for r in read(out / "records.csv") if r["world_size"] == "1" != r["parallel"])
    assert one["status"] == "ok"


class Tied(nn.Module):
    """Of three blocks, the first two share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)), nn.Linear(3, 10)
        )
        self.blocks[1][0].weight = self.blocks[0][0].weight

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.blocks(images.mean((2, 3)))
        return logits


@pytest.mark.slow
def test_blocks_that_share_a_weight_are_of_the_rest(tmp_path: Path) -> None:
    words = f"--model {__name__}:Tied --precision fp32 --batch-size 8 --steps 3 --repeats 1"
    words += f" --device cpu --parallel ddp fsdp --world-size 2 --out {tmp_path / 'out'}"
    assert sweep_main(words.split()) == 0
    ddp, fsdp = (r for r in read(tmp_path / "out" / "records.csv") if r["sentinel"] != "on")
    assert fsdp["notes"] == "sharded: 1 Sequential, and the rest of the network as one"
    assert float(fsdp["train_loss"]) == pytest.approx(float(ddp["train_loss"]), rel=2.0**-21)


def test_a_process_without_a_batch_is_refused() -> None:
    """The others would wait for it at each block; averaged gradients wait in the end alone."""
    case = Case(parallel="fsdp", device="cpu", world_size=3, batch_size=13)
    assert divide_items(case, 50_000 % 39) == [1, 1, 0]
    lacks = (
        "batch size 13 on each of 3 processes leaves a last batch of 2 images, which not all of "
        "them compute in as many micro-batches, and --parallel fsdp needs that; give another"
    )
    with pytest.raises(UsageError, match=re.escape(lacks)):
        check_batches(case, 50_000, batchnorm=False)
    check_batches(replace(case, parallel="ddp"), 50_000, batchnorm=False)
    check_batches(case, 50_001, batchnorm=False)


@pytest.mark.parametrize(("items", "parts"), [(5, [2, 2, 1, 0]), (8, [2] * 4), (0, [0] * 4)])
def test_data_parallel_divides_as_torch_chunk(items: int, parts: list[int]) -> None:
    """Which scatters the inputs, in parts as large as the first."""
    assert divide_items(Case(parallel="dp", world_size=4), items) == parts
    chunks = torch.zeros(items).chunk(4) if items else ()
    assert [len(chunk) for chunk in chunks] == [part for part in parts if part]
