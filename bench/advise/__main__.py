"""`python -m bench.advise`: find the setting that trains fastest here, within a budget of time.

--for finds the one that needs least memory or energy. It measures the setting that you use now,
then the most promising others: precision, batch size, compiling and other switches that leave the
network as it is. Every run is a row of the folder; the same command continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from bench.advise.advisor import find_advice
from bench.advise.options import parse_arguments
from bench.flags import command
from bench.processes import leave


@command
def main(argv: Sequence[str]) -> int:
    """Find the setting to train with.

    Return 0 with an answer; 3 without one; 1 if the disk is full; 2 for a usage error; 130 or 143
    if it was stopped by a signal.
    """
    began = monotonic()
    asked = parse_arguments(argv, __doc__)
    answer = find_advice(asked, began + asked.budget_s)
    print(asked.write(answer))
    if answer.stopped:
        return 128 + answer.stopped
    return 0 if answer.advised is not None else 3


if __name__ == "__main__":
    leave(main())
