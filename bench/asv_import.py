"""`python -m bench.asv_import results/NAME`: the command of `bench.asv.importer`."""

from __future__ import annotations

import sys

from bench.asv.importer import main

if __name__ == "__main__":
    sys.exit(main())
