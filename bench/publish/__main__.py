"""`python -m bench.publish`: write all reports to one folder that works offline.

It holds the asv site, the report of every sweep under ``results/``, all cards beside each other and
an index. asv's page loads its libraries from content networks; here they come from npm packages,
pinned and verified by `bench/publish/asv/assets.json`, once, as the site is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.base.errors import UsageError
from bench.base.processes import leave
from bench.publish.pages import ASV_CONFIG, publish
from bench.schema.flags import Parser, command, describe


@command
def main(argv: Sequence[str]) -> int:
    """Build the folder; with the asv site where asv.conf.json is, in the root of a checkout."""
    parser = Parser(prog="python -m bench.publish", description=describe(__doc__))
    add = parser.add_argument
    add("--out", type=Path, default=Path("html"), metavar="DIR", help="folder to write (html)")
    add("--results", type=Path, default=Path("results"), metavar="DIR", help="of sweeps (results)")
    given = parser.parse(argv)
    if not (given.results.is_dir() or ASV_CONFIG.is_file()):
        raise UsageError(f"{given.results}: no such folder; --results names that of the sweeps")
    print(f"published: {publish(given.results, given.out)}")
    return 0


if __name__ == "__main__":
    leave(main())
