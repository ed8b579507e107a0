"""`python -m bench.overhead`: as `python -m bench.crosscheck --overhead`, for older commands."""

import sys

from bench.crosscheck.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--overhead", *sys.argv[1:]]))
