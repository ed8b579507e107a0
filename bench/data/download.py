"""The download of a dataset, and the progress of that and other long preparations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.data.sources import check_md5, one_line
from bench.errors import UsageError

if TYPE_CHECKING:
    from http.client import HTTPResponse


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


# ----------------------------------------------------------------------------------------- download


REMEDIES = (
    "give --data-dir a folder that holds CIFAR-10 (cifar-10-batches-py, Parquet or class folders) "
    "or train on --dataset synthetic"
)

TIMEOUT_S = 30.0  # without a byte
ATTEMPTS = 4
FIRST_WAIT_S = 0.5  # doubled before each further attempt: a machine without a network waits 3.5 s

# Worth another attempt: the server may answer differently in a moment.
_PASSING = {408, 425, 429, 500, 502, 503, 504}


def fetch(url: str, path: Path, md5: str, *, progress: Progress | None = None) -> None:
    """Download ``url`` to ``path`` unless it exists; the file appears once its sum is ``md5``.

    A partial download is kept in ``path`` + ``.part`` and resumed by the next attempt or run, or
    restarted if the server cannot resume. A second process waits for the first.

    Raises UsageError, with `REMEDIES`: the download fails for good, a package for it is not
    installed, or the sum differs; the download is then deleted.
    """
    from http.client import HTTPException

    from filelock import FileLock

    try:
        from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential
    except ImportError as error:
        raise UsageError(
            f"a download of CIFAR-10 needs the package tenacity, which is not installed for "
            f"{sys.executable}: {sys.executable} -m pip install tenacity; or {REMEDIES}"
        ) from error
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--data-url {url!r} is not an http:// or https:// address")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if path.exists():
                return
            for attempt in Retrying(
                stop=stop_after_attempt(ATTEMPTS),
                wait=wait_exponential(FIRST_WAIT_S),
                retry=retry_if_exception(_passes),
                reraise=True,
            ):
                with attempt:
                    _transfer(url, part, progress)
            try:
                with part.open("rb") as file:
                    check_md5(file, md5, f"what {url} sent", f"it was deleted; {REMEDIES}")
            except UsageError:
                part.unlink()
                raise
            part.replace(path)
    except (OSError, HTTPException, ValueError) as error:
        kept = part.stat().st_size if part.exists() else 0
        resume = f", {kept:,} bytes kept: the same command resumes" if kept else ""
        raise UsageError(
            f"cannot download CIFAR-10 from {url} to {path.parent} ({one_line(error)}{resume}); "
            + REMEDIES
        ) from error


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    """Make one attempt to complete ``part``, continuing from its end."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    have = part.stat().st_size if part.exists() else 0
    request = Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            _receive(response, part, have, f"downloading {part.stem}", progress)
    except HTTPError as error:
        if error.code != 416:
            raise
        # The server has nothing beyond the end of the part: it is whole, or of another file.
        if error.headers.get("Content-Range", "") != f"bytes */{have}":
            part.unlink()
            raise ConnectionError(f"the server has no byte {have:,}") from error


def _receive(
    response: HTTPResponse, part: Path, have: int, what: str, progress: Progress | None
) -> None:
    if response.status != 206:
        have = 0  # the server does not resume, and sends the file from its start
    elif not re.match(rf"bytes {have}-", response.headers.get("Content-Range", "")):
        part.unlink()
        raise ConnectionError("the server resumed elsewhere than it was asked to")
    length = response.headers.get("Content-Length")
    total = have + int(length) if length else None
    with part.open("ab" if have else "wb") as file:
        while block := response.read(1 << 16):
            file.write(block)
            have += len(block)
            if progress is not None:
                progress(what, have, total)
    # http.client does not raise an error for a short body
    if total is not None and have < total:
        raise ConnectionError(f"the server sent {have:,} of {total:,} bytes")


def _passes(error: BaseException) -> bool:
    """Return whether a failure may be temporary: of the network or a busy server, not the disk."""
    import ssl
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    if isinstance(error, HTTPError):
        return error.code in _PASSING
    if isinstance(error, URLError):
        return not isinstance(error.reason, ssl.SSLCertVerificationError)
    return isinstance(error, TimeoutError | ConnectionError | HTTPException)
