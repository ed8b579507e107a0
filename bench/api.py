"""From Python: `bench.sweep` measures, and `bench.read` reads what was measured.

Both do what the commands do, with the same settings under the same names, and raise `UsageError`
where these end with return code 2.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base.errors import UsageError
from bench.base.processes import provide_home
from bench.schema.axis import Value, axis_flag
from bench.schema.case import AXES, spell_value
from bench.schema.command import quote_value, write_words
from bench.workers.notebook import MAIN, write_module

if TYPE_CHECKING:
    import pandas as pd

    from bench.report.document import Report

_MARGIN = 0.02  # the smallest difference that matters, as of bench.compare

Factory = str | Callable[[], Any]
"""A network or a workload: by name, or what makes it."""


def sweep(
    model: Factory | Sequence[Factory] | None = None,
    *,
    workload: Factory | Sequence[Factory] | None = None,
    vary: dict[str, Sequence[Value] | Mapping[Value, str]] | None = None,
    out: str | os.PathLike[str] | None = None,
    **flags: Value | Sequence[Value],
) -> Sweep:
    """Measure every combination of some settings, as `python -m bench.sweep` does, and return what
    was found. With an ``out`` that already holds a part of it, only the rest is measured.

    Args:
        model: a network: a name such as ``"dpn92"``, ``"package.module:factory"``, or a function
            without arguments that returns a `torch.nn.Module`; or several. A function of a notebook
            is written to a module in ``out``, with what it uses.
        workload: likewise a function that returns a `bench.Workload`.
        vary: values of placeholders of one's own in ``command``, by name; as a dict, the script's
            own words for each, such as ``{"amp": {"off": "", "on": "--amp"}}``.
        out: folder of the results (default: a new one in ``results``).
        flags: any other flag of the command, a value or several: ``precision=["fp32",
            "bf16-amp"]``, ``batch_size=[64, 128]``, ``repeats=3``, ``steps=20``, ``device="cpu"``.
            One without a value is True, such as ``dry_run=True``, which prints what would run;
            numbers may be numpy's, and several values a range or another iterable.

    Raises UsageError: a flag or a value does not exist, settings do not go together, or a function
    cannot be imported by another process; nothing was trained then.
    """
    from bench.sweep.execution import rehearse, run_sweep
    from bench.sweep.options import parse_arguments, plan_cases

    provide_home()
    folder = Path(out) if out else Path("results") / f"python-{datetime.now():%Y%m%d-%H%M%S}"
    for name, given in (("model", model), ("workload", workload)):
        if given is not None:
            several = _list(given) if not callable(given) else [given]
            flags[name] = [_name_factory(name, f, folder) if callable(f) else f for f in several]
    words = ["--out", str(folder)]
    for name, value in flags.items():
        words += _spell_flag(name, value)
    for name, values in (vary or {}).items():
        words += ["--vary", name, *_spell_own(values)]
    options = parse_arguments(words)
    plan = plan_cases(options)
    if options.dry_run:
        print(*rehearse(plan, options), sep="\n")
        return Sweep((folder,))
    done = run_sweep(plan, options)
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


def _spell_flag(name: str, value: object) -> list[str]:
    """Return a flag and its values as words of a command. A flag of the command that takes no value
    is given or not; None leaves out a flag that has no value ``none``."""
    values, axis = _list(value), AXES.get(name)
    if axis is None and isinstance(values[0] if values else None, bool):
        return [axis_flag(name)] * values[0]
    if values == [None] and (axis is None or axis.default is not None or name == "loss_scale"):
        return []
    return [axis_flag(name), *map(spell_value, values)]


def _spell_own(values: Value | Sequence[Value] | Mapping[Value, str]) -> list[str]:
    if isinstance(values, Mapping):
        return [write_words({spell_value(value): word for value, word in values.items()})]
    return [quote_value(spell_value(value)) for value in _list(values)]


def _list(given: Any) -> list[Any]:
    """Return the values of a flag, of which numpy's become Python's."""
    several = isinstance(given, Iterable) and not (
        isinstance(given, str | bytes) or _is_scalar(given)
    )
    return [_convert(value) for value in (given if several else [given])]


def _is_scalar(value: object) -> bool:
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0


def _convert(value: Any) -> Any:
    if not _is_scalar(value):
        return value
    found = value.item()
    with suppress(ValueError):  # torch writes tensor(…)
        return float(str(value)) if isinstance(found, float) else found  # float32's few digits
    return found


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
    if module != MAIN:
        return f"{module}:{name}"
    text = write_module(factory)
    file = folder / f"own_{sha256(text.encode()).hexdigest()[:8]}.py"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return f"{file.stem}:{name}"  # found there by the command, and so by what it prints to go on


@dataclass(frozen=True)
class Sweep:
    """The results in some folders, read when first asked for. In a notebook it shows its answer."""

    folders: tuple[Path, ...]

    @cached_property
    def report(self) -> Report:
        """The whole report, as `python -m bench.report` shows it."""
        from bench.report.document import build
        from bench.results.study.sweeps import read_sweeps

        return build(read_sweeps(self.folders))

    @property
    def answer(self) -> str:
        """What is recommended, beside what else was tried, and how sure that is; as text."""
        return "\n\n".join(" ".join(answer.sentences) for answer in self.report.answers)

    def frame(self) -> pd.DataFrame:
        """Return one row a case: its settings, how it ended, and each quantity as the median of its
        runs, in SI units (``epoch_time_s`` in s, ``memory_bytes`` in bytes, ``test_accuracy`` as a
        fraction); NaN for what is not known. ``frame.attrs["columns"]`` describes every column."""
        import pandas as pd

        from bench.report.files import describe_columns, write_csv

        frame = pd.read_csv(io.StringIO(write_csv(self.report)), low_memory=False)
        frame.attrs["columns"] = describe_columns()
        return frame

    def compare(self, other: Sweep) -> pd.DataFrame:
        """Compare these results, the baseline, with others, as `python -m bench.compare` does.

        Returns one row a metric and case: ``a``, ``b``, their ``ratio`` with its 95 % interval, and
        the ``verdict``; ``attrs["text"]`` is what the command prints. Raises UsageError: they
        cannot be compared.
        """
        import pandas as pd

        from bench.compare.comparison import choose_metrics, compare, read_side, refuse_other_models
        from bench.compare.document import FORMATS

        a, b = read_side("A", self.folders[0]), read_side("B", other.folders[0])
        comparison = compare(a, b, choose_metrics(a, b), margin=_MARGIN, equal=_MARGIN)
        refuse_other_models(comparison)
        rows = [
            {"metric": name, **{k: v for k, v in case.items() if not isinstance(v, list | dict)}}
            for name, cases in json.loads(FORMATS["json"](comparison, []))["metrics"].items()
            for case in cases
        ]
        frame = pd.DataFrame(rows)
        frame.attrs["text"] = FORMATS["text"](comparison, [])
        return frame

    def _repr_html_(self) -> str:
        from html import escape

        return "".join(f"<p>{escape(part)}</p>" for part in self.answer.split("\n\n"))
