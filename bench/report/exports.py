"""A report in the forms that other programs and pages take: two that follow benchmarks over commits
(github-action-benchmark's and Bencher's JSON), a README's Markdown and a model card's.

Of cases, those that ended well: what ran in another format than its label says, or failed, has no
figure there. Values are medians over repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bench.answers.render.documents import escape, table_lines, write_answers
from bench.answers.render.table import Prominence
from bench.base.plain import dump
from bench.base.text import join_words
from bench.report.document import Report
from bench.results.study.quantities import QUANTITIES
from bench.results.study.runs import Result
from bench.results.study.warnings import WARNINGS
from bench.schema.record import Status

_TRACKED = {"epoch_time_s": "time", "memory_bytes": "memory", "energy_per_epoch_j": "energy"}
"""Quantities of which less is better, and the names of their measures."""


def write_action(report: Report) -> str:
    """Return the JSON of github-action-benchmark's ``customSmallerIsBetter``: a list of entries
    with ``name``, ``unit``, ``value``, ``range`` where repeats have one, and as ``extra`` the
    hardware, versions and warnings."""
    entries = [
        {
            "name": f"{name}: {_TRACKED[quantity]}"
            + f" of {'an epoch' if row.period.whole else row.period}" * QUANTITIES[quantity].whole,
            "unit": QUANTITIES[quantity].unit,
            "value": value / QUANTITIES[quantity].scale,
            **({"range": _write_range(row, quantity)} if low == low else {}),
            "extra": "\n".join(_describe(row)),
        }
        for row, name in _list_cases(report)
        for quantity, value, low, _ in _read(row)
    ]
    return dump(entries)


def write_bencher(report: Report) -> str:
    """Return Bencher's metric format: for each case its measures with ``value``, in SI units, and
    where repeats have them the lowest and highest, ``lower_value`` and ``upper_value``."""
    return dump(
        {
            name: {
                _TRACKED[quantity]: {"value": value}
                | ({"lower_value": low, "upper_value": high} if low == low else {})
                for quantity, value, low, high in _read(row)
            }
            for row, name in _list_cases(report)
        }
    )


def write_readme(report: Report) -> str:
    """Return what belongs into a README: the answers, the first table and what it was measured
    on."""
    return "\n".join((*write_answers(report), *_draw_first(report), *_list_conditions(report)))


def write_model_card(report: Report) -> str:
    """Return three sections of a model card by the headings of Hugging Face's template, to put
    beside its others."""
    rows = report.results
    hardware = [f"{row.machine}{f', driver {row.driver}' * bool(row.driver)}" for row in rows]
    software = [
        ", ".join(
            f"{name} {version}"
            for name, version in (
                *(("torch", row.torch), ("CUDA", row.cuda), ("cuDNN", row.cudnn)),
                ("Python", row.python),
            )
            if version
        )
        for row in rows
    ]
    lines = ["#### Speeds, Sizes, Times", "", *write_answers(report), *_draw_first(report)]
    lines += [*_list_conditions(report), "### Compute Infrastructure", ""]
    lines += ["#### Hardware", "", *_list(hardware), "#### Software", "", *_list(software)]
    return "\n".join(lines)


def _list_cases(report: Report) -> Iterator[tuple[Result, str]]:
    """Yield the cases that ended well, of those measured in several ways the best, each with a name
    that tells it from the others and stays the same when it is measured again."""
    several = len({row.ran_on for row in report.results}) > 1
    for row in (setting.best for setting in report.settings):
        if row.status == Status.OK and row.kind != "unknown":
            name = row.first.case.label(report.varying or None)
            yield row, f"{row.ran_on} · {name}" if several else name


def _read(row: Result) -> Iterator[tuple[str, float, float, float]]:
    """Yield the quantities of a case that are known, each with its ends, NaN where it has none."""
    for name in _TRACKED:
        value = getattr(row, name)
        if value == value:
            yield name, value, getattr(row, f"{name}_low"), getattr(row, f"{name}_high")


def _write_range(row: Result, name: str) -> str:
    quantity = QUANTITIES[name]
    low, high = (getattr(row, f"{name}_{end}") / quantity.scale for end in ("low", "high"))
    where = f"of {row.repeats} repeats" if row.repeats > 1 else row.spread
    return f"{low:.6g} to {high:.6g} {where}"


def _describe(row: Result) -> Iterator[str]:
    yield f"{row.machine}, torch {row.torch}; time of {row.period}"
    if row.part < 1:
        yield f"estimated from {100 * row.part:.3g} % of it"
    if warned := [name.replace("_", " ") for name in WARNINGS if getattr(row, name)]:
        yield f"warnings: {join_words(warned)}"


def _draw_first(report: Report) -> Iterator[str]:
    for table in report.tables:
        if table.level is Prominence.TABLE:
            _, *lines = table_lines(table)  # the page has a heading of its own
            yield from lines
            return


def _list_conditions(report: Report) -> list[str]:
    warnings = [f"{warning.label}: {warning.text}" for warning in report.warnings]
    return _list([report.subject, *report.constants, *warnings])


def _list(sentences: Iterable[str]) -> list[str]:
    return [*(f"- {escape(sentence)}" for sentence in dict.fromkeys(sentences)), ""]
