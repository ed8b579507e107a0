"""What of this package and of others is installed, and how the rest is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "precision-bench"
"""The name of the package that pip installs, and of its command."""

HOME = "https://github.com/precision-bench/precision-bench"
"""Where its repository is, for who has no checkout."""

CHECKOUT = Path(__file__).parents[2]
"""The folder of the repository where the package is used from it."""


def in_checkout() -> bool:
    """Return whether the package is used from a checkout: what only this holds, benchmarks of
    asv, tests and examples, is there."""
    return (CHECKOUT / "pyproject.toml").is_file()


def find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_extra(name: str) -> str:
    """Return the command that installs an optional part of the package."""
    return f"pip install {'-e ' * in_checkout()}'{'.' if in_checkout() else DISTRIBUTION}[{name}]'"
