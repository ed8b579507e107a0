"""Every number of a case, once: how it is derived, named and written."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from bench.case import Case
from bench.diagnosis.rates import COPY, RATES
from bench.gpu.peaks import list_peaks, peak_bandwidth, peak_flops
from bench.precision import PRECISIONS, Arithmetic
from bench.record import COLUMNS
from bench.study.spread import Spread
from bench.text import GIB, write_number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Quantity:
    """A number of a case: how it is derived, named and written.

    ``derive`` takes a frame of records and returns one number a row, in SI units, NaN for none; it
    is None where the number needs another case too (see `summarize`). People read it over
    ``scale``, in ``unit``, to so many ``decimals`` or to four digits. ``whole`` numbers speak of a
    whole epoch, and are estimates where only a fraction of one was measured. A ``rate`` is over a
    time or an energy; its median over repeats is that of its inverse, so that it agrees with the
    time in the same row, also for an even number of repeats. ``spread`` is whether tables show how
    far repeats lie apart; files hold it for all. What was ``learnt`` is shown of whole epochs only,
    see `bench.questions.notes`; files hold it for all.
    """

    name: str
    label: str
    unit: str
    help: str
    better: str  # lower or higher
    derive: Callable[[pd.DataFrame], pd.Series] | None
    scale: float = 1
    decimals: int | None = None
    whole: bool = False
    rate: bool = False
    spread: bool = True
    learnt: bool = False

    @property
    def title(self) -> str:
        """Its label, with its unit in parentheses."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def write(self, value: float) -> str:
        """Write a value without its unit."""
        shown = value / self.scale
        return write_number(shown) if self.decimals is None else f"{shown:.{self.decimals}f}"

    def write_ends(self, low: float, high: float, value: float) -> str:
        """Write the ends of a spread to as many decimals as the value; nothing if all look alike.

        >>> QUANTITIES["epoch_time_s"].write_ends(76.56, 90.351, 88.8)
        '76.56–90.35'
        """
        decimals = len(self.write(value).partition(".")[2])
        ends = [f"{end / self.scale:,.{decimals}f}" for end in (low, high)]
        alike = ends[0] == ends[1] == f"{value / self.scale:,.{decimals}f}"
        return "" if alike else "–".join(ends)

    def add_unit(self, text: str) -> str:
        """Put the unit behind an already written number."""
        return f"{text}{self.unit}" if self.unit == "×" else f"{text} {self.unit}".rstrip()


def _column(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda records: records[name].astype(float)


def throughput(records: pd.DataFrame) -> pd.Series:
    """Images of an epoch over its time."""
    return records["images_per_s"].fillna(records["train_images"] / records["epoch_time_s"])


def energy_per_epoch(records: pd.DataFrame) -> pd.Series:
    """Energy of the measured images, scaled to an epoch's."""
    return records["energy_j"] * records["train_images"] / positive(records["measured_images"])


def images_per_joule(records: pd.DataFrame) -> pd.Series:
    """Measured images over their energy."""
    return records["measured_images"] / positive(records["energy_j"])


def fragmentation(records: pd.DataFrame) -> pd.Series:
    """Share of the allocator's peak that no tensor used at theirs: 1 - allocated / reserved."""
    return 1 - records["peak_allocated_bytes"] / positive(records["peak_reserved_bytes"])


def achieved_flops(records: pd.DataFrame) -> pd.Series:
    """FLOP an image takes forward and backward, times the images/s of each GPU.

    NaN where that is above the data sheet of the card, as `traffic` and `peak_share` are.
    """
    return _count_flops(records).mask(records["of_peaks"] > 1)


def _count_flops(records: pd.DataFrame) -> pd.Series:
    return records["flop_per_image"] * throughput(records) / records["world_size"]


def traffic(records: pd.DataFrame) -> pd.Series:
    """Memory traffic of a step, as if nothing were fused, over the time of a median step."""
    return _count_traffic(records).mask(records["of_bandwidth"] > 1)


def _count_traffic(records: pd.DataFrame) -> pd.Series:
    return records["step_bytes"].astype(float) / positive(records["step_time_median_s"])


def peak_share(records: pd.DataFrame) -> pd.Series:
    """Achieved FLOP/s over the card's peak in the arithmetic that ran, see `_share_of_rates`."""
    return records["of_peaks"].mask(records["of_peaks"] > 1)


def find_beyond(records: pd.DataFrame) -> pd.Series:
    """Which rows have more FLOP or bytes a second than the data sheet of their card allows.

    Compiled code moves less than is counted, so that its bytes say nothing.
    """
    moved = (records["of_bandwidth"] > 1) & (records["compile"] == Case.compile)
    return (records["of_peaks"] > 1) | moved


def find_wrong_rates(records: pd.DataFrame) -> pd.Series:
    """Which rows have a rate of their machine that is above the data sheet of its card."""
    import pandas as pd

    found = pd.Series(False, records.index)
    for column in (name for name in RATES if records[name].notna().any()):
        found |= records[column].notna() & _take_rate(records, column).isna()
    return found


def _take_rate(records: pd.DataFrame, column: str) -> pd.Series:
    """A rate that the machine was measured to reach; NaN where it is above the data sheet."""
    rate = records[column].astype(float)
    return rate.mask(rate > _look_up(records, lambda gpu: list_peaks(gpu).get(column)))


def compare_with_card(records: pd.DataFrame) -> dict[str, pd.Series]:
    """FLOP/s and traffic over the data sheet of the card, also where that cannot be: above 1."""
    return {
        "of_peaks": _share_of_rates(
            records, lambda arithmetic: _look_up(records, lambda gpu: peak_flops(gpu, arithmetic))
        ),
        "of_bandwidth": _count_traffic(records) / _look_up(records, peak_bandwidth),
    }


def _look_up(records: pd.DataFrame, find: Callable[[str], float | None]) -> pd.Series:
    """What the data sheet of each row's card says; NaN for a CPU and cards that are not known."""
    values = map_distinct(records["gpu"], lambda gpu: find(gpu) or math.nan)
    return values.astype(float).where(records["device"] == "cuda")


def measured_share(records: pd.DataFrame) -> pd.Series:
    """Achieved FLOP/s over what a large product reached on this device, see `_share_of_rates`.

    Or a convolution, where that was more.
    """
    import pandas as pd

    def find_rates(arithmetic: str) -> pd.Series:
        both = (f"rate_{arithmetic}", f"rate_conv_{arithmetic}")
        held = [c for c in both if c in RATES and records[c].notna().any()]
        known = [_take_rate(records, column) for column in held]
        return pd.concat(known, axis=1).max(axis=1) if known else pd.Series(math.nan, records.index)

    return _share_of_rates(records, find_rates)


def _share_of_rates(records: pd.DataFrame, find_rates: Callable[[str], pd.Series]) -> pd.Series:
    """Achieved FLOP/s over a rate of the arithmetic that ran; NaN where there is none.

    Where several were found (``tfloat32/float32``), of the first: that of the forward pass of the
    network's most expensive layer. Where a share of the FLOP is fp8's and the rest bf16's, the rate
    is that of a card that does each at its own: 1 / (share / fp8 + (1 - share) / bf16).
    """
    import pandas as pd

    ran = map_distinct(records["arithmetic"], lambda names: names.partition("/")[0])
    if (unknown := ran == "").any():
        known = map_distinct(records["precision"], lambda name: PRECISIONS[name].arithmetic)
        ran = ran.mask(unknown, known)
    rate = pd.Series(math.nan, records.index)
    for arithmetic in ran.unique():
        rate = rate.mask(ran == arithmetic, find_rates(arithmetic))
    share = records["fp8_flop_share"].astype(float)
    mixed = 1 / (share / rate + (1 - share) / find_rates(Arithmetic.BFLOAT16))
    return _count_flops(records) / positive(rate.mask(ran == Arithmetic.FLOAT8, mixed))


def copy_share(records: pd.DataFrame) -> pd.Series:
    """Memory traffic over what a large copy reads and writes a second on this device.

    NaN for compiled code: it moves less than is counted, so that its share may be above all.
    """
    share = _count_traffic(records) / positive(_take_rate(records, COPY))
    return share.mask(records["compile"] != Case.compile)


def busy_share(records: pd.DataFrame) -> pd.Series:
    """Time in which a GPU ran any kernel, of a profiled step, over a median step without profile.

    NaN without a profile, and on a CPU.
    """
    share = records["busy_s"].astype(float) / positive(records["step_time_median_s"].astype(float))
    return share.where(records["device"] == "cuda")


def step_noise(records: pd.DataFrame) -> pd.Series:
    """Median absolute deviation of step times over their median."""
    return records["step_time_mad_s"] / positive(records["step_time_median_s"])


def checkpoint_share(records: pd.DataFrame) -> pd.Series:
    """Time to save a checkpoint over that of an epoch."""
    return records["checkpoint_save_s"] / positive(records["epoch_time_s"])


def exposed(records: pd.DataFrame) -> pd.Series:
    """What the exchange of gradients adds to a step; noise may make it negative.

    NaN for one process, which exchanges nothing.
    """
    added = records["sync_step_s"].astype(float) - records["no_sync_step_s"].astype(float)
    return added.where(records["world_size"] > 1)


def exposed_share(records: pd.DataFrame) -> pd.Series:
    """That, over a step with the exchange."""
    return exposed(records) / positive(records["sync_step_s"].astype(float))


def wire_rate(records: pd.DataFrame) -> pd.Series:
    """What a ring all-reduce sends from each GPU, over the time of a step.

    2 (N - 1) / N of the gradients (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
    clusters of workstations, 2009), as nccl-tests counts its bus bandwidth.
    """
    gpus = records["world_size"].astype(float)
    sent = records["wire_bytes"].astype(float) * 2 * (gpus - 1) / gpus
    return positive(sent) / positive(records["sync_step_s"].astype(float))


Numbers = TypeVar("Numbers", "pd.Series", "pd.DataFrame")


def map_distinct(cells: pd.Series, find: Callable[[Any], Any]) -> pd.Series:
    """What ``find`` says of each cell, asked once of each distinct one."""
    import pandas as pd

    places, distinct = pd.factorize(cells, use_na_sentinel=False)  # `Series.map` hashes each cell
    return pd.Series([find(cell) for cell in distinct]).take(places).set_axis(cells.index)


def find_rows(cells: pd.Series, holds: Callable[[Any], bool]) -> pd.Series:
    """Which cells ``holds`` is true of, asked once of each distinct one."""
    return cells.isin([cell for cell in cells.unique() if holds(cell)])


def positive(values: Numbers) -> Numbers:
    """Values above zero; NaN for the others, which nothing can be divided by."""
    return values.where(values > 0)


MEMORY: dict[str, str] = {
    "peak_device_bytes": "the device over its baseline (NVML)",
    "peak_process_bytes": "the process (NVML, or what it holds on a CPU)",
    "peak_reserved_bytes": "torch's allocator",
    "peak_allocated_bytes": "tensors",
}
"""What ``memory_bytes`` may be, best first: a machine's rows all take the first it has."""


def choose_memory(records: pd.DataFrame) -> pd.Series:
    """The column of `MEMORY` each row's memory is read from: the first its machine has filled."""
    import pandas as pd

    chosen = pd.Series("", index=records.index)
    for name in MEMORY:
        filled = records[name].notna().groupby(records["machine"]).transform("any")
        chosen = chosen.mask((chosen == "") & filled, name)
    return chosen


def memory(records: pd.DataFrame) -> pd.Series:
    """Peak memory of the epoch, by the measure of `choose_memory`."""
    import pandas as pd

    bytes = pd.Series(math.nan, index=records.index)
    for name in MEMORY:
        bytes = bytes.mask(records["memory_measure"] == name, records[name].astype(float))
    return bytes


QUANTITIES: dict[str, Quantity] = {
    q.name: q
    for q in (
        Quantity(
            "epoch_time_s",
            "epoch time",
            "s",
            "one training epoch",
            "lower",
            _column("epoch_time_s"),
            whole=True,
        ),
        Quantity(
            "images_per_s",
            "images/s",
            "",
            "images of an epoch over its time",
            "higher",
            throughput,
            whole=True,
            rate=True,
            spread=False,  # the time shows it
        ),
        Quantity(
            "speedup",
            "speed-up",
            "×",
            "epoch time of fp32 at the same batch size over this one's",
            "higher",
            None,
            decimals=2,
            whole=True,
        ),
        Quantity(
            "memory_bytes",
            "memory",
            "GiB",
            "peak of the epoch",
            "lower",
            memory,
            scale=GIB,
            decimals=2,
            spread=False,  # an allocator repeats; it would take room from what does not
        ),
        Quantity(
            "memory_saved",
            "memory saved",
            "%",
            "share of fp32's memory at the same batch size not needed; what every precision needs "
            "alike, such as the CUDA context and the dataset, is in both",
            "higher",
            None,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "peak_allocated_bytes",
            "tensors",
            "GiB",
            "peak of torch's tensors in the epoch, those of the dataset among them",
            "lower",
            _column("peak_allocated_bytes"),
            scale=GIB,
            decimals=2,
        ),
        Quantity(
            "tensors_saved",
            "tensors saved",
            "%",
            "share of the bytes of fp32's tensors at the same batch size not needed",
            "higher",
            None,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "train_loss",
            "loss",
            "",
            "mean cross-entropy over the measured steps",
            "lower",
            _column("train_loss"),
            decimals=3,
            learnt=True,
        ),
        Quantity(
            "train_accuracy",
            "accuracy",
            "%",
            "images predicted right over the measured steps",
            "higher",
            _column("train_accuracy"),
            scale=0.01,
            decimals=1,
            spread=False,  # the loss shows it
            learnt=True,
        ),
        Quantity(
            "test_loss",
            "test loss",
            "",
            "mean cross-entropy over the test images",
            "lower",
            _column("test_loss"),
            decimals=3,
            learnt=True,
        ),
        Quantity(
            "test_accuracy",
            "test accuracy",
            "%",
            "test images predicted right",
            "higher",
            _column("test_accuracy"),
            scale=0.01,
            decimals=1,
            learnt=True,
        ),
        Quantity(
            "overflow_steps",
            "overflows",
            "",
            "steps with inf or NaN in the scaled gradients",
            "lower",
            _column("overflow_steps"),
            decimals=0,
        ),
        Quantity(
            "energy_per_epoch_j",
            "energy",
            "J",
            "energy of one epoch",
            "lower",
            energy_per_epoch,
            whole=True,
        ),
        Quantity(
            "images_per_j",
            "efficiency",
            "images/J",
            "measured images over their energy",
            "higher",
            images_per_joule,
            rate=True,
        ),
        Quantity(
            "achieved_flops",
            "achieved",
            "TFLOP/s",
            "FLOP per image, forward and backward, times images/s; of each GPU",
            "higher",
            achieved_flops,
            scale=1e12,
            whole=True,
            rate=True,
        ),
        Quantity(
            "peak_share",
            "of peak",
            "%",
            "achieved FLOP/s over the card's peak in the arithmetic that ran",
            "higher",
            peak_share,
            scale=0.01,
            decimals=1,
            whole=True,
            rate=True,
        ),
        Quantity(
            "measured_share",
            "of measured",
            "%",
            "achieved FLOP/s over those of a large matrix product in the arithmetic that ran, "
            "measured on this device before its cases",
            "higher",
            measured_share,
            scale=0.01,
            decimals=1,
            whole=True,
            rate=True,
        ),
        Quantity(
            "traffic",
            "memory traffic",
            "GB/s",
            "what the operations of a step read and write, not compiled, over the time of a step",
            "higher",
            traffic,
            scale=1e9,
            rate=True,
        ),
        Quantity(
            "copy_share",
            "of a copy",
            "%",
            "memory traffic over that of a large copy, measured on this device before its cases",
            "higher",
            copy_share,
            scale=0.01,
            decimals=1,
            rate=True,
        ),
        Quantity(
            "fp8_flop_share",
            "FLOP in fp8",
            "%",
            "share of the network's FLOP that the layers converted to fp8 are",
            "higher",
            _column("fp8_flop_share"),
            scale=0.01,
            decimals=1,
            spread=False,  # repeats convert the same layers
        ),
        Quantity(
            "fragmentation",
            "fragmentation",
            "%",
            "share of the allocator's peak that no tensor used at theirs",
            "lower",
            fragmentation,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "step_time_median_s",
            "median step",
            "ms",
            "median step of the epoch",
            "lower",
            _column("step_time_median_s"),
            scale=1e-3,
        ),
        Quantity(
            "busy_share",
            "GPU busy",
            "%",
            "time in which kernels ran, of a profiled step, over a step that is not profiled",
            "higher",
            busy_share,
            scale=0.01,
            decimals=0,
        ),
        Quantity(
            "step_noise",
            "step noise",
            "%",
            "median absolute deviation of step times over their median",
            "lower",
            step_noise,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "loader_first_batch_s",
            "first batch",
            "s",
            "start of the epoch to the first batch of torch's DataLoader",
            "lower",
            _column("loader_first_batch_s"),
            spread=False,
        ),
        Quantity(
            "loader_samples_per_s",
            "loader alone",
            "items/s",
            "what torch's DataLoader supplies while nothing is trained",
            "higher",
            _column("loader_samples_per_s"),
            rate=True,
            spread=False,
        ),
        Quantity(
            "setup_time_s",
            "set-up",
            "s",
            "process start to the first step",
            "lower",
            _column("setup_time_s"),
        ),
        Quantity(
            "warmup_time_s",
            "warm-up",
            "s",
            "steps thrown away before the epoch",
            "lower",
            _column("warmup_time_s"),
        ),
        Quantity(
            "checkpoint_bytes",
            "checkpoint",
            "MiB",
            "file with all that training needs to go on",
            "lower",
            _column("checkpoint_bytes"),
            scale=2**20,
            spread=False,  # its size repeats
        ),
        Quantity(
            "checkpoint_save_s",
            "save",
            "s",
            "saving a checkpoint, until the disk has it",
            "lower",
            _column("checkpoint_save_s"),
        ),
        Quantity(
            "checkpoint_share",
            "save, of an epoch",
            "%",
            "time to save a checkpoint over that of an epoch",
            "lower",
            checkpoint_share,
            scale=0.01,
            whole=True,
            spread=False,  # the times show it
        ),
        Quantity(
            "checkpoint_load_s",
            "load",
            "s",
            "from a checkpoint's file to a training on the device",
            "lower",
            _column("checkpoint_load_s"),
        ),
        Quantity(
            "exposed_s",
            "exposed communication",
            "ms",
            "what the exchange of gradients adds to a step",
            "lower",
            exposed,
            scale=1e-3,
            decimals=2,
        ),
        Quantity(
            "exposed_error_s",
            "exposed communication, ±",
            "ms",
            "half of the 95 % interval of exposed communication, within a run",
            "lower",
            _column("exposed_error_s"),
            scale=1e-3,
            decimals=2,
        ),
        Quantity(
            "exposed_share",
            "exposed share",
            "%",
            "what the exchange of gradients adds to a step, over that step",
            "lower",
            exposed_share,
            scale=0.01,
            decimals=1,
        ),
        Quantity(
            "wire_bytes",
            "gradients",
            "MiB a step",
            "gradients that each process hands over to be averaged, of a step",
            "lower",
            _column("wire_bytes"),
            scale=2**20,
            spread=False,  # they repeat
        ),
        Quantity(
            "wire_rate",
            "on the wire",
            "GB/s",
            "what a ring all-reduce of gradients sends from each process, over the time of a step",
            "higher",
            wire_rate,
            scale=1e9,
            rate=True,
        ),
        Quantity(
            "straggle",
            "slowest process",
            "%",
            "how much longer than the others' median the slowest process works on a step before "
            "gradients are exchanged",
            "lower",
            _column("straggle"),
            scale=0.01,
            decimals=1,
        ),
    )
}


ALSO_FILLED = {"gpu_memory_bytes": "device", "cpu": "device", "train_images": "dataset"}


def take_median(numbers: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """The median of each column in each cell; of a rate, over its inverse."""
    rates = [q.name for q in QUANTITIES.values() if q.rate]
    medians = numbers.assign(**(1 / positive(numbers[rates]))).groupby(cell).median()
    return medians.assign(**(1 / medians[rates]))


def describe_columns() -> dict[str, str]:
    """What each number of a case is, with its unit, for readers of a file."""
    described = {
        "spread": "what the columns _low and _high are: " + ", ".join(Spread),
        "coverage": "how often they hold what they are for: the median of as many more runs, or "
        "the whole epoch within the run",
        "seeds": "how many seeds the repeats had",
        "start_time_s": "set-up, and the slowest first steps of all repeats, in s",
    }
    described.update({q.name: q.help for q in QUANTITIES.values()})
    described.update({name: column.help for name, column in COLUMNS.items() if column.help})
    return described


def is_number(value: Any) -> bool:
    """Whether a cell of a frame holds a finite number."""
    return isinstance(value, Real) and math.isfinite(value)
