"""`python -m bench.overhead`: as `python -m bench.crosscheck --overhead`, for older commands."""

import sys

from bench.crosscheck.__main__ import main
from bench.processes import leave

if __name__ == "__main__":
    leave(main(["--overhead", *sys.argv[1:]]))
