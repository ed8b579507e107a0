"""`python -m with_fake bench.sweep …`: a command of the harness that knows `--executor fake`."""

from __future__ import annotations

import runpy
import sys

from tests.fake_executor import known

if __name__ == "__main__":
    del sys.argv[0]
    with known():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
