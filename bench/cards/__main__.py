"""`python -m bench.cards`: compare all cards that were measured.

It shows the time of each precision at a setting that all cards have and at each card's own fastest,
the speed-up over fp32 and tf32 and its reasons, and which card is faster, as `bench.compare` judges
it. Folders of another network, recipe, torch or version of the harness are listed separately, with
the reason; so is the card published in 2019.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from bench.answers.money import add_prices, read_prices
from bench.base.errors import UsageError
from bench.base.installation import HOME
from bench.base.processes import leave
from bench.schema.flags import Parser, add_output, choose_format, command, describe, write_document

_FORMATS = {
    "text": "bench.answers.render.terminal:render",
    "md": "bench.answers.render.documents:render_markdown",
    "html": "bench.report.html:render",
    "json": "bench.cards.document:write_json",
}
"""Functions that return a document as text."""

RESULTS = Path("results")


@command
def main(argv: Sequence[str]) -> int:
    """Compare cards; return 0, or 2 for a usage error."""
    parser = Parser(prog="python -m bench.cards", description=describe(__doc__))
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER",
        help="sweeps' folders, a folder of some, or records files (default: results)")  # fmt: skip
    add_output(parser, "text, md, html or json")
    add_prices(parser)
    add("--full", action="store_true", help="print all warnings, tables and notes")
    given = parser.parse(argv)
    tariff = read_prices(given)
    module, _, name = choose_format(given, _FORMATS).partition(":")
    from bench.cards.document import build
    from bench.results.store.reader import expand_folders, list_results
    from bench.results.study.sweeps import REFERENCE, read_sweeps

    also = [REFERENCE] if REFERENCE.is_file() else []
    paths = expand_folders(given.folders) or list_results(RESULTS)
    if given.folders and paths == given.folders:
        sweeps = read_sweeps([*paths, *also])
    else:  # of all in a folder, unreadable ones are left out
        paths = [path.resolve() for path in paths]
        sweeps = read_sweeps([*paths, *also], partial(print, "left out:", file=sys.stderr))
        if not {sweep.path for sweep in sweeps} & {*paths}:
            where = ", ".join(map(str, given.folders or [RESULTS]))
            raise UsageError(
                f"no sweeps under {where}/; name their folders. {HOME}/tree/main/results has "
                "those of cards that others measured"
            )
    found = build(sweeps, (given.output or Path("cards")).resolve().parent, tariff)
    if tariff:
        tariff.refuse_unknown(found.everything)
    render = getattr(import_module(module), name)
    if given.format == "text":
        render = partial(render, full=given.full)
    write_document(render(found), given.output)
    return 0


if __name__ == "__main__":
    leave(main())
