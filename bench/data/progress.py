"""Progress of a long preparation: a callback, and a progress bar that implements it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with a description, the amount done, and the total amount (None: unknown).
Progress = Callable[[str, int, int | None], None]


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress on standard error while the context lasts; the bar is removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}")
    console = Console(stderr=True)
    # in a file, rich would leave an empty line
    disable = not console.is_terminal
    with Bars(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=disable
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, amount="")
            amount = f"{done:,}" if total is None else f"{done:,} of {total:,}"
            bars.update(tasks[what], completed=done, total=total, amount=amount)

        yield show
