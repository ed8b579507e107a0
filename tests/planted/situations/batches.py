"""Batch sizes, memory and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.case import Case
from bench.record import Record, Status
from bench.workloads import OWN
from tests.planted.records import GIB, make_record, measured
from tests.planted.situations.situation import MIB, once, plant
from tests.planted.sweeps import (
    LINES,
    PROBES,
    list_scaling,
    make_card,
    make_probe,
    make_scaled_case,
)

ADA = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 24 * GIB}


def line(
    model: str, sizes: Sequence[int], bend: float = 0, axes: Mapping[str, Any] = {}, **values: Any
) -> list[Record]:
    """Batch sizes whose memory is 1 GiB and 16 MiB an image, on 24 GiB; the largest misses."""
    return [
        make_record(
            Case(model=f"m:{model}", batch_size=size, **axes),
            **{**ADA, **measured(50.0, (GIB + 16 * MIB * size) * (1 + bend * (size == sizes[-1])))},
            **values,
        )
        for size in sizes
    ]


def end(case: Case, **values: Any) -> Record:
    """A run that did not fit."""
    return make_record(case, **{"status": Status.OOM, **values})


def ends(model: str, tops: Mapping[str, tuple[int, int | None]], **axes: Any) -> list[Record]:
    """Precisions timed once at 64 and at a largest batch, with the batch that does not fit."""
    rows = []
    for precision, (top, fails) in tops.items():
        case = Case(model=f"m:{model}", precision=precision, **axes)
        for size in (64, top):
            values = measured(50.0 - size / 100, GIB + 16 * MIB * size, train_loss=2.0)
            values = {**make_card("NVIDIA RTX 6000 Ada"), **values}
            rows.append(make_record(replace(case, batch_size=size), **values))
        if fails:
            rows.append(end(replace(case, batch_size=fails)))
    return rows


def search(largest: int) -> list[Record]:
    """A search of bf16 of `ends` that ends at a batch size."""

    def probe(size: int, status: Status = Status.OK, steps: int = 4) -> Record:
        values = measured(1.0, GIB + 16 * MIB * size) if status is Status.OK else {}
        case = Case(model="m:a", precision="bf16", batch_size=size, steps=steps)
        card = {**make_card("NVIDIA RTX 6000 Ada"), **values}
        card["gpu_memory_bytes"] = GIB + 16 * MIB * (largest + 4)
        return make_record(case, probe=True, status=status, **card)

    first = [probe(32), probe(96), probe(largest), probe(largest + 8, Status.OOM)]
    return [*first, probe(largest, steps=16)]


KNOWN, OPEN = {"fp32": (256, 512), "bf16": (512, 1024)}, {"fp32": (256, 512), "bf16": (512, None)}
FULL = make_probe("fp32", 1184, retries=2)
FULL.measurement.peak_device_bytes = 40 * GIB
TALL = make_scaled_case("fp32", 1128)
CARD_48 = {**make_card("NVIDIA RTX 6000 Ada"), "gpu_memory_bytes": 48 * GIB}
FEW_STEPS = {"measured_steps": 20, "steps_per_epoch": 200, "train_loss": 2.0}
PRECISIONS = ("fp32", "bf16")
BY_BATCH = "walls batches"
TEXTS = {"dataset": OWN, "model": "m:f", "workload": "m:f"}
HALVES = [once(Case(precision=name, batch_size=size, steps=20), time, **FEW_STEPS)
          for name, time in (("fp32", 50.0), ("bf16", 25.0)) for size in (64, 128)]  # fmt: skip
AT_64 = [once(Case(precision=name, batch_size=64), time, train_loss=2.0)
         for name, time in (("fp32", 60.0), ("bf16", 20.0))]  # fmt: skip


def counted(precision: str, size: int, loss: float, steps: int | None = 20) -> Record:
    """A run of an epoch, or of so many steps of one."""
    counts = {"measured_steps": 20, "steps_per_epoch": 50_000 // size} if steps else {}
    case = Case(precision=precision, batch_size=size, steps=steps)
    return once(case, train_loss=loss, **counts)


BATCHES = {
    "noise": plant(
        "Noise is no cliff.", "batches", list(list_scaling(noise=0.25)),
    ),
    "single runs": plant(
        "Of single runs it is said that they may be chance.",
        "batches", list(list_scaling(repeats=1)),
    ),
    "lines": plant(
        "Memory is predicted up to where it ends: (24 - 1) GiB / 16 MiB = 1472. Two sizes are no "
        "line. The line is judged by what it would have said of the largest: a bend of 6 % misses "
        "by 5.7 %, and nothing is predicted.",
        "batches",
        line("far", (64, 128, 256)), line("near", (64, 128, 256, 1000)), line("two", (64, 128)),
        line("limited", (64, 128, 400), axes={"memory_limit": "12GiB"}),
        line("bent", (64, 128, 256, 512), bend=0.3), line("judged", (64, 128, 256, 512), bend=0.06),
    ),
    "what was measured": plant(
        "What was measured overrules the line, which ends at 1472: a batch of 1200 that does not "
        "fit, and one of 1600 that does; 1440 and 1480 are near enough.",
        "batches",
        *(line(name, (64, 256, 1024)) for name in ("at1200", "at1440", "at1600", "at1480")),
        [end(Case(model=f"m:at{size}", batch_size=size), **ADA) for size in (1200, 1440)],
        [make_record(Case(model=f"m:at{size}", batch_size=size),
                     **{**ADA, **measured(50.0, 20 * GIB), "alloc_retries": 3})
         for size in (1600, 1480)],
    ),
    "what did not fit": plant(
        "Nothing is predicted beyond what did not fit, whatever the line says.",
        "batches",
        line("fits", (64, 128, 256)), line("ends", (64, 128, 256)),
        [end(Case(model="m:ends", batch_size=512), **ADA)],
    ),
    "available": plant(
        "What others left is available, by the measure memory is read in: 24, 21, 24 GiB.",
        "batches",
        line("alone", (64, 128, 256)),
        line("shared", (64, 128, 256), baseline_device_bytes=3 * GIB),
        line("context", (64, 128, 256), context_bytes=GIB // 2),
    ),
    "same case": plant(
        "A probe of the very same case supersedes no run, and is no drift: 40.20 s in 3 runs.",
        "overview doubts",
        [once(Case(batch_size=64, device="cpu"), 40 + 0.1 * r, repeat=r) for r in (1, 2, 3)],
        [once(Case(batch_size=64, device="cpu"), 40.2, sentinel=True),
         once(Case(batch_size=64, device="cpu"), 1.0, probe=True, attempt=7)],
    ),
    "other learning": plant(
        "How large a batch fits does not depend on the schedule: the search ran without it.",
        "batches",
        [make_record(make_scaled_case("fp32", size, schedule="cosine", evaluate=True, epochs=3),
                     **{**CARD_48, **measured(50.0, LINES["fp32"][0] + LINES["fp32"][1] * size)})
         for size in (32, 64, 128)],
        PROBES,
    ),
    "retries": plant(
        "What made the allocator retry is not on the line: it misses by nothing.",
        "batches", list(list_scaling()), [FULL],
    ),
    "cut off": plant(
        "What was cut off at its largest batch is not known to fit, and what was at a smaller one "
        "is; what cannot run here has no batch size.",
        "answers",
        ends("a", {"fp32": (256, None)}),
        [end(Case(model="m:a", precision=precision, batch_size=size),
             **make_card("NVIDIA RTX 6000 Ada"), status=status)
         for precision, size, status in (("fp32", 128, Status.TIMEOUT),
                                         ("bf16", 256, Status.INTERRUPTED),
                                         ("fp8", 256, Status.UNSUPPORTED))],
    ),
    "known ends": plant(
        "Only precisions whose end is known are at their largest; of others it is said why not.",
        "answers",
        ends("some", {**KNOWN, "tf32": (512, 1032), "bf16-amp": (512, None)}),
        ends("alone", OPEN), ends("same", {"fp32": (256, 512), "bf16": (256, 512)}),
        ends("none", {"fp32": (256, None), "bf16": (512, None)}),
    ),
    "retried": plant(
        "A case that retried lowers what is recommended: 1120.",
        "walls",
        list(list_scaling()), PROBES,
        [make_record(TALL, **measured(40.0, 40 * GIB, alloc_retries=2))],
    ),
    "unequal parts": plant(
        "In 20 steps 512 trains on twice as many images: no loss is compared.",
        "answers",
        [counted("fp32", 256, 2.256), counted("fp32", 128, 2.128), counted("bf16", 256, 2.256),
         counted("bf16", 512, 2.512), end(Case(batch_size=512, steps=20)),
         end(Case(precision="bf16", batch_size=1024, steps=20))],
    ),
    "all fits": plant(
        "Where everything fits, the largest that ran is nobody's largest.",
        "answers",
        [once(Case(precision="fp32", batch_size=size)) for size in (64, 128)],
        [once(Case(precision="bf16", batch_size=size)) for size in (64, 128, 256)],
    ),
    "one batch size": plant(
        "Nothing appears unless the batch size varies.",
        BY_BATCH, [once(Case(precision=name, batch_size=64)) for name in PRECISIONS],
    ),
    "limits": plant(
        "A largest batch belongs to its limit.",
        "answers overview",
        [once(Case(batch_size=size, memory_limit=limit)) if size <= fits
         else end(Case(batch_size=size, memory_limit=limit))
         for limit, fits in ((None, 512), ("9GiB", 256), ("21GiB", 512))
         for size in (256, 512, 1024)],
    ),
    "micro-batches": plant(
        "They stand beside the plain batch: +10 % time, -60 % memory; they do not make 1000 fit.",
        "answers",
        [once(Case(batch_size=256), 50.0, 10, train_loss=2.0),
         once(Case(batch_size=256, accumulate=4), 55.0, 4, train_loss=2.1),
         once(Case(batch_size=1000, accumulate=3), 52.0, 14, train_loss=2.3),
         end(Case(batch_size=1000))],
    ),
    "micro-batches of texts": plant(
        "They are other texts, so no loss is compared; a batch is of texts, not of tokens.",
        "effects",
        [once(Case(batch_size=256, accumulate=parts, **TEXTS), 50.0 + parts, train_loss=2.0,
              unit="tokens") for parts in (1, 4)],
    ),
}  # fmt: skip
