"""`python -m bench.overhead`: as `python -m bench.crosscheck --overhead`, for older commands."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "--overhead")
    runpy.run_module("bench.crosscheck", run_name="__main__", alter_sys=True)
