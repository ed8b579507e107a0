"""What the tests for a card need besides pytest, said in a line where it is missing."""

import pytest

from bench.base.errors import UsageError
from bench.machine.host import refuse_missing

NEEDED = ("torch", "numpy", "scipy", "nvidia-ml-py", "psutil", "filelock")


def pytest_configure() -> None:
    try:
        refuse_missing(NEEDED)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from error


_TELLING = ("test_training.py", "test_nvml.py", "test_scale_map.py", "test_ddp.py")
"""The files, the most telling first: time on a lent GPU may end within them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _TELLING.index(item.path.name) if item.path.name in _TELLING else 9)
