"""The packages that this harness needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from bench.errors import UsageError

PACKAGES: dict[str, str] = {
    "torch": "torch",
    "numpy": "numpy",
    "nvidia-ml-py": "pynvml",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "pillow": "PIL",
    "rich": "rich",
    "psutil": "psutil",
    "filelock": "filelock",
    "tenacity": "tenacity",
    "seaborn": "seaborn",
    "scipy": "scipy",
    "jinja2": "jinja2",
}
"""The packages that this harness needs, and the module that each is imported as."""

_OF_DOWNLOADS = "tenacity"
"""Needed only for a download of CIFAR-10, which reports itself if it is missing."""


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_missing(packages: Iterable[str] = PACKAGES) -> tuple[str, ...]:
    wanted = (name for name in packages if name != _OF_DOWNLOADS)
    return tuple(name for name in wanted if find_spec(PACKAGES[name]) is None)


def refuse_missing(packages: Iterable[str] = PACKAGES) -> None:
    """Raise UsageError if packages are missing that will be needed later; it names them, and the
    command that installs them."""
    if missing := find_missing(packages):
        are = "is" if len(missing) == 1 else "are"
        raise UsageError(
            f"{', '.join(missing)} {are} not installed for {sys.executable}; "
            f"{describe_install(missing)}"
        )


def describe_install(packages: Iterable[str]) -> str:
    return f"{sys.executable} -m pip install {' '.join(packages)}"
