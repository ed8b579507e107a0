"""`python -m bench.report`: show the results of one or several sweeps."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from bench.answers.money import add_prices, read_prices
from bench.answers.settings import AIMS
from bench.base.errors import choose
from bench.base.processes import leave
from bench.results.store.reader import name_newest
from bench.results.study.axes import GROUPS
from bench.schema.flags import (
    Parser,
    add_filters,
    add_output,
    choose_format,
    command,
    writable,
    write_document,
)

REPORT_FORMATS = {
    "text": (
        "bench.answers.render.terminal:render",
        "the answer, the cases and three warnings; --full prints all tables",
    ),
    "md": ("bench.answers.render.documents:render_markdown", "all tables to paste"),
    "latex": ("bench.answers.render.documents:render_latex", "all tables for a paper (booktabs)"),
    "html": ("bench.report.html:render", "one self-contained page with figures"),
    "csv": ("bench.report.files:write_csv", "one row per case, every derived number, SI units"),
    "json": ("bench.report.files:write_json", "the same, with tables and warnings"),
    "readme": ("bench.report.exports:write_readme", "Markdown: the answer and the first table"),
    "model-card": ("bench.report.exports:write_model_card", "the same as parts of a model card"),
    "action": (
        "bench.report.exports:write_action",
        "JSON of github-action-benchmark, the smaller the better",
    ),
    "bencher": ("bench.report.exports:write_bencher", "JSON of Bencher's metric format"),
}
"""Functions that return a report as text, with what each is for."""


def build_parser() -> Parser:
    lines = "\n".join(f"  {name:<11}{help}" for name, (_, help) in REPORT_FORMATS.items())
    parser = Parser(
        prog="python -m bench.report",
        suggest=name_newest,
        description="Show the results of one or several sweeps.",
        epilog=f"formats:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sweeps", nargs="+", type=Path, metavar="RESULTS", help="a sweep's folder or records file")
    add_output(parser, "see below")
    add("--figures", type=Path, metavar="DIR", help="also write its figures there, as SVG and PNG")
    add_filters(parser, "precision=fp16,bf16 batch_size=512")
    add("--by", default="", metavar="AXIS", help="group the overview by this axis")
    aims = " or ".join(AIMS)
    add("--for", dest="aim", default="", metavar="AIM", help=f"recommend the least {aims}")
    add_prices(parser)
    add("--full", action="store_true", help="print all warnings, tables and notes")
    return parser


@command
def main(argv: Sequence[str]) -> int:
    """Show the results; returns 0, or 2 for a usage error."""
    options = build_parser().parse(argv)
    place, _ = choose_format(options, REPORT_FORMATS)
    if options.aim:
        choose("--for", options.aim, AIMS)
    from bench.report.document import build
    from bench.results.study.axes import parse_filter, parse_name
    from bench.results.study.sweeps import read_sweeps

    home = (options.output or Path("report")).resolve().parent
    where = [parse_filter(text) for text in options.where]
    by = parse_name("--by", options.by, GROUPS) if options.by else ""
    tariff = read_prices(options)
    report = build(read_sweeps(options.sweeps), home, where, by, options.aim, tariff)
    if tariff:
        tariff.refuse_unknown(report.everything)
    if options.figures:
        from bench.report.figures import write_figures

        with writable("--figures", options.figures):
            write_figures(report, options.figures)
    if options.format == "text" and options.output is None:
        from bench.answers.render.terminal import show

        show(report, options.full)
        return 0
    module, _, name = place.partition(":")
    render: Callable[..., str] = getattr(import_module(module), name)
    if options.format == "text":
        render = partial(render, full=options.full)
    write_document(render(report), options.output)
    return 0


if __name__ == "__main__":
    # all that a report makes lives until its end: looking for cycles took 2.2 of 7.2 CPU s
    gc.disable()
    leave(main())
