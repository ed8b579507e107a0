"""What the tests for a card need besides pytest, said in a line where it is missing."""

import pytest

from bench.environment.packages import refuse_missing
from bench.errors import UsageError

NEEDED = ("torch", "numpy", "scipy", "nvidia-ml-py", "psutil", "filelock")


def pytest_configure() -> None:
    try:
        refuse_missing(NEEDED)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error
