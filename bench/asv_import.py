"""`python -m bench.asv_import results/NAME`: add the results of a sweep to the asv site."""

from __future__ import annotations

import sys

from bench.asv.importer import main

if __name__ == "__main__":
    sys.exit(main())
