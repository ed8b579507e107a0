"""The columns of some records as arrays, from which quantities and doubts are computed.

Formulas are the same for one record and for a hundred thousand. For few records, each step
takes numpy a hundredth of the time that pandas needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

from bench.case import Case
from bench.diagnosis.rates import COPY, RATES
from bench.gpu.peaks import list_peaks, peak_bandwidth, peak_flops
from bench.precision import OPT_LEVELS, PRECISIONS, Arithmetic
from bench.store.attempts import FEW

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    Array = np.ndarray[Any, Any]


def positive(values: Array) -> Array:
    """Return values for use as divisors: NaN where they are not above zero."""
    return leave_out(values, ~(values > 0))


def leave_out(values: Array, which: Array) -> Array:
    """Return values with NaN where ``which`` is true."""
    import numpy as np

    return np.where(which, math.nan, values)


def fill(values: Array, others: Any) -> Array:
    """Return values, with ``others`` where they are NaN."""
    import numpy as np

    return np.where(known(values), values, others)


def known(values: Array) -> Array:
    """Return which values are not NaN."""
    found: Array = values == values
    return found


def find_least(values: Array, group: Array) -> Array:
    """Return for each row the least value in its group; groups are numbered from 0."""
    import numpy as np

    least = np.full(group.max(initial=-1) + 1, np.inf)
    np.minimum.at(least, group, values)
    return least[group]


class Texts:
    """A column of text. Each of its ``distinct`` cells, by first appearance, is processed once."""

    def __init__(self, cells: pd.Series | Array) -> None:
        import numpy as np
        import pandas as pd

        if len(cells) < FEW:
            texts = cells.tolist()
            places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
            self.distinct = list(places)
            self._places = np.array([places[text] for text in texts], int)
        else:
            self._places, distinct = pd.factorize(cells, use_na_sentinel=False)
            self.distinct = list(distinct)

    def map(self, find: Callable[[str], Any], kind: type = float) -> Array:
        """Return the result of ``find`` on the text of each row."""
        import numpy as np

        found: Array = np.array([find(text) for text in self.distinct], kind)[self._places]
        return found

    def find(self, holds: Callable[[str], Any]) -> Array:
        return self.map(holds, bool)

    def any_of(self, which: Array) -> Array:
        import numpy as np

        counts: Array = np.bincount(self._places, which)[self._places]
        return counts > 0

    def __eq__(self, other: object) -> Array:  # type: ignore[override]
        return self.find(lambda text: text == other)

    def __ne__(self, other: object) -> Array:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]


class Columns:
    """The columns of a frame of records, and ``more`` beside it, as attributes: numbers and
    switches as arrays, text as `Texts`. The properties are inputs of formulas, computed once."""

    def __init__(self, frame: pd.DataFrame, more: Mapping[str, Array] | None = None) -> None:
        self._frame = frame
        self._more = {} if more is None else more

    def __len__(self) -> int:
        return len(self._frame)

    def __getattr__(self, name: str) -> Any:
        import numpy as np

        held: Any = self._more if name in self._more else self._frame
        if name not in held:
            raise AttributeError(name)
        cells = held[name]  # indexing the frame takes 20 µs
        values = Texts(cells) if cells.dtype.kind == "O" else np.asarray(cells)
        setattr(self, name, values)
        return values

    @cached_property
    def throughput(self) -> Array:
        """Images of an epoch over its time, in images/s."""
        return fill(self.images_per_s, self.train_images / self.epoch_time_s)

    @cached_property
    def step_noise(self) -> Array:
        """Median absolute deviation of step times over their median."""
        noise: Array = self.step_time_mad_s / positive(self.step_time_median_s)
        return noise

    @cached_property
    def busy_share(self) -> Array:
        """Kernel time of a profiled step on a GPU (`bench.study.summaries.find_busy`) over the
        median step without profiler."""
        share: Array = self.busy_step_s / positive(self.step_time_median_s)
        return share

    @cached_property
    def busy_epoch(self) -> Array:
        """Kernel time of an epoch on a GPU, in s: a lower bound of the epoch time."""
        busy: Array = self.busy_step_s * self.steps_per_epoch
        return busy

    @cached_property
    def exposed(self) -> Array:
        """Time that the exchange of gradients adds to a step, in s; noise may make it negative. NaN
        for one process, which exchanges nothing."""
        return leave_out(self.sync_step_s - self.no_sync_step_s, ~(self.world_size > 1))

    @cached_property
    def missed(self) -> Array:
        """Whether the error of the epoch time is larger than ``--until`` asked."""
        missed: Array = self.epoch_time_error > self.until.map(lambda asked: float(asked or "nan"))
        return missed

    @cached_property
    def ended(self) -> Array:
        """Whether ``--until`` ended the run before its epoch was over."""
        ended: Array = (self.until != "") & (self.part < 1) & ~self.missed
        return ended

    @cached_property
    def cut_by_steps(self) -> Array:
        """Whether ``--steps`` limited how much was measured."""
        cut: Array = (self.part < self.fraction) & ~self.ended
        return cut

    @cached_property
    def flops(self) -> Array:
        """FLOP/s: FLOP of an image, forward and backward, times the images/s of each GPU."""
        flops: Array = self.flop_per_image * self.throughput / self.world_size
        return flops

    @cached_property
    def moved(self) -> Array:
        """Memory traffic in bytes/s: of a step, as if nothing were fused, over the median step."""
        moved: Array = self.step_bytes / positive(self.step_time_median_s)
        return moved

    @cached_property
    def of_peaks(self) -> Array:
        """`flops` over the peak in the card's data sheet; impossible shares above 1 are kept."""
        return self._share(lambda arithmetic: self._look_up(lambda g: peak_flops(g, arithmetic)))

    @cached_property
    def of_bandwidth(self) -> Array:
        """`moved` over the bandwidth in the data sheet; impossible shares above 1 are kept."""
        share: Array = self.moved / self._look_up(peak_bandwidth)
        return share

    @cached_property
    def of_measured(self) -> Array:
        """`flops` over the rate of a large matrix product or convolution measured on this device,
        whichever is higher."""
        import numpy as np

        def find_rate(arithmetic: str) -> Array:
            both = (f"rate_{arithmetic}", f"rate_conv_{arithmetic}")
            found = (self.take_rate(column) for column in both if column in RATES)
            return reduce(np.fmax, found, np.full(len(self), math.nan))

        return self._share(find_rate)

    @cached_property
    def of_copy(self) -> Array:
        """`moved` over the bytes/s that a large copy reads and writes on this device. NaN for
        compiled code, which moves less than is counted, so that its share may exceed 1."""
        return leave_out(self.moved / positive(self.take_rate(COPY)), self.compile != Case.compile)

    def take_rate(self, column: str) -> Array:
        """Return a measured rate of the machine; NaN where it is above the data sheet."""
        rate = getattr(self, column)
        return leave_out(rate, rate > self._look_up(lambda gpu: list_peaks(gpu).get(column)))

    def _look_up(self, find: Callable[[str], float | None]) -> Array:
        return leave_out(self.gpu.map(lambda gpu: find(gpu) or math.nan), self.device != "cuda")

    def _share(self, find_rate: Callable[[str], Array]) -> Array:
        """Return `flops` over the rate of the arithmetic that ran; NaN where no rate is known.

        If several arithmetics were found (``tfloat32/float32``), the first one counts: that of the
        forward pass of the network's most expensive layer. If a share of the FLOP ran in fp8 and
        the rest in bf16, the combined rate is 1 / (share / fp8 + (1 - share) / bf16).
        """
        import numpy as np

        found = self.arithmetic.map(lambda names: names.partition("/")[0], object)
        label = self.precision.map(lambda name: PRECISIONS[name].arithmetic, object)
        level = self.opt_level.map(lambda name: OPT_LEVELS[name].arithmetic if name else "", object)
        label = np.where(level == "", label, level)
        ran = np.where(found == "", label, found)
        rate = np.full(len(ran), math.nan)
        for arithmetic in dict.fromkeys(ran.tolist()):
            rate = np.where(ran == arithmetic, find_rate(arithmetic), rate)
        if (narrow := ran == Arithmetic.FLOAT8).any():
            share = self.fp8_flop_share
            mixed = 1 / (share / rate + (1 - share) / find_rate(Arithmetic.BFLOAT16))
            rate = np.where(narrow, mixed, rate)
        of_rate: Array = self.flops / positive(rate)
        return of_rate
