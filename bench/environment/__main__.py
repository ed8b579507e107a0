"""A process that is asked: `python -m bench.environment cuda mynet:build` prints, as JSON, what
needs torch to be known.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from bench.environment.response import respond
from bench.processes import leave, pause_collection, take_input


def _main(names: Sequence[str]) -> None:
    with pause_collection():
        import torch  # noqa: F401

    asker = take_input()
    gc.freeze()  # so that the garbage collector of a fork skips it all
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a user's model may print
    respond(names, answers, asker)


if __name__ == "__main__":
    _main(sys.argv[1:])
    leave(0)
