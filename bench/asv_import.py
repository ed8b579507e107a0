"""`python -m bench.asv_import results/NAME`: add the results of a sweep to the asv site.

Its records become asv results of the commit that measured them, so that nothing is trained again to
be shown there. Several repeats of a case become their median, and the worst of their outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.asv.results import import_sweep, load_config
from bench.flags import Parser, command, describe
from bench.processes import leave


@command
def main(argv: Sequence[str]) -> int:
    """Import every named sweep, each completely or not at all. Returns 2 if records are missing,
    belong to no commit, or clash with results that asv has."""
    parser = Parser(prog="python -m bench.asv_import", description=describe(__doc__))
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="RESULTS", help="a sweep's folder")
    for folder in parser.parse(argv).sweeps:
        for file in import_sweep(folder, load_config()):
            print(f"{folder}: {file}")
    return 0


if __name__ == "__main__":
    leave(main())
