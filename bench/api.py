"""From Python: `bench.sweep` measures, and `bench.read` reads what was measured.

Both do what the commands do, with the same settings under the same names, and raise `UsageError`
where these end with return code 2.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.axis import axis_flag
from bench.case import AXES, SAME_QUESTION, format_value
from bench.errors import UsageError, nearest
from bench.processes import provide_home
from bench.source import write_module

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from bench.report.document import Report

MARGIN = 0.02  # the smallest difference that matters, as of bench.compare

Value = str | int | float | bool | None

Factory = str | Callable[[], Any]
"""A network or a workload: by name, or what makes it."""


def sweep(
    model: Factory | Sequence[Factory] | None = None,
    *,
    workload: Factory | Sequence[Factory] | None = None,
    command: str | None = None,
    vary: dict[str, Sequence[Value]] | None = None,
    repeats: int | None = None,
    out: str | os.PathLike[str] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    preset: str | None = None,
    timeout_s: float | None = None,
    **axes: Value | Sequence[Value],
) -> Sweep:
    """Measure every combination of some settings, as `python -m bench.sweep` does, and return what
    was found. With an ``out`` that already holds a part of it, only the rest is measured.

    Args:
        model: a network: a name such as ``"dpn92"``, ``"package.module:factory"``, or a function
            without arguments that returns a `torch.nn.Module`; or several. A function of a notebook
            is written to a module in ``out``, with what it uses.
        workload: likewise a function that returns a `bench.workloads.Workload`.
        command: in place of both, what starts a training script, with placeholders.
        vary: values of placeholders of one's own in ``command``, by name.
        repeats: fresh processes per case (default: that of the command).
        out: folder of the results (default: a new one in ``results``).
        data_dir: where CIFAR-10 is.
        preset: a named grid that the settings change (default: that of the command).
        timeout_s: seconds that a phase of a case, or a command, may take.
        axes: any other axis of `bench.case.Case`, a value or several: ``precision=["fp32",
            "bf16-amp"]``, ``batch_size=[64, 128]``, ``steps=20``, ``device="cpu"``.

    Raises UsageError: an axis or a value does not exist, settings do not go together, or a function
    cannot be imported by another process; nothing was trained then.
    """
    from bench.sweep.execution import run_sweep
    from bench.sweep.options import parse_arguments, plan_cases

    provide_home()
    folder = Path(out) if out else Path("results") / f"python-{datetime.now():%Y%m%d-%H%M%S}"
    settings: dict[str, Any] = {"command": command, **axes}
    for name, given in (("model", model), ("workload", workload)):
        several = given if isinstance(given, list | tuple) else [given]
        named = [_name_factory(name, one, folder) if callable(one) else one for one in several]
        settings[name] = given if given is None else named
    words = ["--out", str(folder)]
    for name, value in settings.items():
        if value is not None or name in axes:
            words += [axis_flag(_find_axis(name)), *map(_spell, _list(value))]
    for name, values in (vary or {}).items():
        words += ["--vary", name, *map(_spell, _list(values))]
    beside = {"repeats": repeats, "data-dir": data_dir, "preset": preset, "timeout": timeout_s}
    for flag, value in beside.items():
        words += [] if value is None else [f"--{flag}", str(value)]
    options = parse_arguments(words)
    done = run_sweep(plan_cases(options), options)
    if done.left:
        print(done.left, file=sys.stderr)
    return Sweep((done.folder,))


def read(*folders: str | os.PathLike[str]) -> Sweep:
    """Read the results of one sweep, or of several as one.

    Raises UsageError: a folder holds no results, or a file in it is damaged.
    """
    found = Sweep(tuple(map(Path, folders)))
    _ = found.report  # raises here, and not at the first use
    return found


def _find_axis(name: str) -> str:
    if name not in AXES:
        raise UsageError(f"{name}: there is no such axis; {nearest(name, [*AXES])}")
    return name


def _list(value: Value | Sequence[Value]) -> list[Value]:
    single = value is None or isinstance(value, str | bytes) or not isinstance(value, Iterable)
    return [value] if single else [*value]  # type: ignore[list-item,misc]


def _spell(value: Value) -> str:
    return "none" if value is None else format_value(value)


def _name_factory(kind: str, factory: Callable[[], Any], folder: Path) -> str:
    """Return ``package.module:factory`` of a function, by which another process imports it; write a
    function of a notebook to a module first. Raises UsageError: that cannot be."""
    name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", "")
    if not name.isidentifier():
        what = name or type(factory).__name__
        raise UsageError(
            f"{kind}={what}: another process cannot import it by a name; give a function that is "
            f"defined at the top of a module or a notebook: def build(): …"
        )
    if module != "__main__":
        return f"{module}:{name}"
    text, digest = write_module(factory)
    file = folder / f"own_{digest}.py"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    _add_path(folder.absolute())
    return f"{file.stem}:{name}"


def _add_path(folder: Path) -> None:
    """Have this process, and those that it starts, find modules in ``folder``."""
    sys.path.insert(0, str(folder))
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *given])


@dataclass(frozen=True)
class Sweep:
    """The results in some folders, read when first asked for.

    In a notebook it shows its answer, and the time of each setting.
    """

    folders: tuple[Path, ...]

    @cached_property
    def report(self) -> Report:
        """The whole report, as `python -m bench.report` shows it."""
        from bench.report.document import build
        from bench.study.sweeps import read_sweeps

        return build(read_sweeps(self.folders))

    @property
    def answer(self) -> str:
        """What is recommended, beside what else was tried, and how sure that is; as text."""
        said = (" ".join(answer.sentences) for answer in self.report.answers)
        return "\n\n".join([*self.report.origin, *said])

    def frame(self) -> pd.DataFrame:
        """Return one row a case: its settings, how it ended, and each quantity as the median of its
        runs, in SI units (``epoch_time_s`` in s, ``memory_bytes`` in bytes, ``test_accuracy`` as a
        fraction); NaN for what is not known. ``frame.attrs["columns"]`` describes every column."""
        import pandas as pd

        from bench.report.files import describe_columns, write_csv

        frame = pd.read_csv(io.StringIO(write_csv(self.report)), low_memory=False)
        frame.attrs["columns"] = describe_columns()
        return frame

    def pivot(self, quantity: str = "epoch_time_s", across: str = "batch_size") -> pd.DataFrame:
        """Return a quantity of `frame` by the settings that vary (rows) and by ``across``
        (columns); of several cases in one cell the first that measured most.

        Raises UsageError: there is no such column.
        """
        frame = self.frame()
        for name in (quantity, across):
            if name not in frame:
                raise UsageError(f"{name}: {nearest(name, [*map(str, frame.columns)])}")
        down = [name for name in self._varying(frame) if name != across] or ["precision"]
        whole = frame.sort_values("fraction", ascending=False, kind="stable")
        for name in down:  # an axis that a case does not have
            whole[name] = whole[name].astype(object).where(whole[name].notna(), "none")
        return whole.pivot_table(
            quantity, down, across, aggfunc="first", sort=False, dropna=True, observed=True
        ).sort_index(axis=1)

    def plot(self, quantity: str = "images_per_s", ax: Axes | None = None) -> Axes:
        """Draw a quantity of `frame`: over the batch sizes if there are several, else for each
        precision. Returns the axes, new ones without ``ax``."""
        import seaborn as sns
        from matplotlib import pyplot as plt

        from bench.study.quantities import QUANTITIES

        frame = self.frame().dropna(subset=[quantity])
        ax = ax or plt.subplots()[1]
        if known := QUANTITIES.get(quantity):
            frame[quantity] /= known.scale
        if frame["batch_size"].nunique() > 1:
            sns.lineplot(frame, x="batch_size", y=quantity, hue="precision", marker="o", ax=ax)
            ax.set_xscale("log", base=2)
            sizes = sorted(frame["batch_size"].unique())
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.set_xlabel("batch size")
        else:
            sns.barplot(frame, x="precision", y=quantity, ax=ax)
        if known:
            ax.set_ylabel(known.title)
        ax.set_ylim(bottom=0)
        return ax

    def compare(self, other: Sweep) -> Comparison:
        """Compare these results, the baseline, with others, as `python -m bench.compare` does.

        Raises UsageError: they cannot be compared.
        """
        from bench.compare.comparison import choose_metrics, compare, read_side, refuse_other_models
        from bench.compare.document import FORMATS

        a, b = read_side("A", self.folders[0]), read_side("B", other.folders[0])
        comparison = compare(a, b, choose_metrics(a, b), margin=MARGIN, equal=MARGIN)
        refuse_other_models(comparison)
        text, data = (FORMATS[name](comparison, [], False) for name in ("text", "json"))
        return Comparison(text, json.loads(data))

    def _varying(self, frame: pd.DataFrame) -> list[str]:
        named = [name for name in AXES if name in frame]
        beside = (*SAME_QUESTION, "epochs", "seed", "device")
        return [
            name for name in named if name not in beside and frame[name].nunique(dropna=False) > 1
        ]

    def _repr_html_(self) -> str:
        from html import escape

        said = "".join(f"<p>{escape(part)}</p>" for part in self.answer.split("\n\n"))
        with suppress(UsageError, KeyError, ValueError):
            said += self.pivot().to_html(float_format="{:,.4g}".format, na_rep="–")
        return said

    def __repr__(self) -> str:
        return f"bench.read({', '.join(shlex.quote(str(folder)) for folder in self.folders)})"


@dataclass(frozen=True)
class Comparison:
    """What differs between two sweeps: as ``text``, the verdicts and what they rest on; and as
    ``data``, what ``bench.compare --format json`` writes."""

    text: str
    data: dict[str, Any]

    def frame(self) -> pd.DataFrame:
        """Return one row a metric and case: ``a``, ``b``, their ``ratio`` with its 95 % interval,
        and the ``verdict``."""
        import pandas as pd

        rows = [
            {"metric": name, **{k: v for k, v in case.items() if not isinstance(v, list | dict)}}
            for name, cases in self.data["metrics"].items()
            for case in cases
        ]
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.text)}</pre>"
