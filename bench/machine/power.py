"""The power limits of cards: set for a case, and put back whatever happens.

A limit outlives what set it. So the one that a card had is written down before it is changed, in a
file named after the card, which is locked as long as the process lives that changed it. What a
killed process left is put back by the keeper of its workers (`bench.workers.server`) or, if that
was killed too, when the next sweep starts.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.base.errors import UnsupportedError
from bench.machine.nvml import NvmlMissingError, NvmlProblem, use_nvml

POWER_FOLDER = "BENCH_POWER_FOLDER"
"""The variable that names the folder of what cards had; by default `/run/precision-bench`, which a
restart empties, as it does what was set. That of a container is gone once this is killed."""

_POLL_S = 0.05


def _find_file(uuid: str) -> Path:
    return Path(os.environ.get(POWER_FOLDER) or "/run/precision-bench") / uuid


def _read(uuid: str, nvml: Any) -> float:
    """Return the power limit that a card was given, in W. Raises NvmlMissingError."""
    with use_nvml(nvml) as used:
        limit = used.nvmlDeviceGetPowerManagementLimit(used.nvmlDeviceGetHandleByUUID(uuid))
        return float(limit / 1e3)


def _set(uuid: str, watts: float, nvml: Any) -> None:
    """Raises NvmlMissingError: this process may not set it, or the card has none."""
    with use_nvml(nvml) as used:
        card = used.nvmlDeviceGetHandleByUUID(uuid)
        used.nvmlDeviceSetPowerManagementLimit(card, round(1e3 * watts))


def refuse_limits(uuid: str, limits: Collection[int], try_out: bool, nvml: Any = None) -> str:
    """Return why a card cannot be given each of these power limits, in W, and what to do; empty if
    it can.

    Nothing is changed. To ``try_out`` whether this process may set one, the limit that the card has
    is set again, unless no other is asked for. ``nvml`` replaces the module pynvml."""
    if uuid.startswith("MIG-"):
        return "a slice that MIG makes of a GPU has no power limit of its own; leave it out"
    try:
        now = _read(uuid, nvml)
        with use_nvml(nvml) as used:
            card = used.nvmlDeviceGetHandleByUUID(uuid)
            ends = used.nvmlDeviceGetPowerManagementLimitConstraints(card)
    except NvmlMissingError as missing:
        return f"this GPU takes none, as of most laptops ({missing}); leave it out"
    least, most = (end / 1e3 for end in ends)
    if beyond := [limit for limit in limits if not least <= limit <= most]:
        return f"this GPU takes {least:g} to {most:g} W, and not {beyond[0]}; give another"
    others = [limit for limit in limits if limit != now]
    if try_out and others:
        try:
            _set(uuid, now, nvml)
            _find_file(uuid).parent.mkdir(parents=True, exist_ok=True)
        except (OSError, NvmlMissingError) as error:
            return _refuse_setting(uuid, others[0], error)
    return ""


def _refuse_setting(uuid: str, watts: int, error: OSError | NvmlMissingError) -> str:
    why = str(error)
    if isinstance(error, OSError):
        why += f"; {POWER_FOLDER} names another folder"
    elif error.lack is NvmlProblem.NO_PERMISSION:
        why = "it takes root"
    return (
        f"this process cannot set it ({why}): start the sweep by sudo, or set it yourself, "
        f"{_command(uuid, watts)}, and give --power-limit {watts} alone"
    )


def _command(uuid: str, watts: float) -> str:
    return f"sudo nvidia-smi -i {uuid} -pl {watts:g}"


@contextmanager
def hold_limits(
    uuids: Collection[str | None], watts: int | None, nvml: Any = None
) -> Iterator[Callable[[], str]]:
    """Give cards a power limit, in W each, within the block, and then what they had before; None
    changes nothing. Yields a function that tells how others have changed it meanwhile, in a
    sentence; empty if they have not.

    Raises UnsupportedError: a card cannot have it, this process may not set it, or another one has
    set one just now."""
    if watts is None:
        yield lambda: ""
        return
    with ExitStack() as undone:
        known = [uuid for uuid in uuids if uuid]
        try:
            # without a client, and persistence mode, the driver forgets a limit
            opened = ExitStack()
            nvml = opened.enter_context(use_nvml(nvml))
            undone.callback(opened.close)  # what the block raises is no error of NVML
            for uuid in known:
                _hold(undone, uuid, watts, nvml)
        except NvmlMissingError as missing:
            raise UnsupportedError(f"--power-limit {watts}: {missing}") from None
        if len(known) < max(1, len(uuids)):
            raise UnsupportedError(f"--power-limit {watts}: NVML does not know every GPU of it")

        def find_changed() -> str:
            with suppress(NvmlMissingError):
                for uuid in known:
                    if (now := _read(uuid, nvml)) != watts:
                        return f"its power limit was changed to {now:g} W while it ran"
            return ""

        yield find_changed


def _hold(undone: ExitStack, uuid: str, watts: int, nvml: Any) -> None:
    file, now = _find_file(uuid), _read(uuid, nvml)
    if now == watts and not file.exists():
        return
    what = f"--power-limit {watts}"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        number = _lock(file, os.O_RDWR | os.O_CREAT)
        undone.callback(os.close, number)
        # of what was killed, it is what the card had before that
        before = _read_note(number)[0] or now
        os.pwrite(number, f"{before} {os.getpid()}".ljust(_NOTE_BYTES).encode(), 0)
        undone.callback(_put_back, file, number, nvml)
        _set(uuid, watts, nvml)
    except BlockingIOError:
        raise UnsupportedError(f"{what}: another sweep has set that of {uuid}") from None
    except (OSError, NvmlMissingError) as error:
        raise UnsupportedError(f"{what}: {_refuse_setting(uuid, watts, error)}") from None
    if (now := _read(uuid, nvml)) != watts:
        raise UnsupportedError(f"{what}: the GPU took {now:g} W instead")


_NOTE_BYTES = 64


def _read_note(number: int) -> tuple[float, int]:
    """Return the limit that a card had, in W, and the process that has changed it; zeros of a file
    that nothing was written to: then nothing was changed."""
    words = os.pread(number, _NOTE_BYTES, 0).split()
    return (float(words[0]), int(words[1])) if len(words) == 2 else (0.0, 0)


def _lock(file: Path, flags: int) -> int:
    """Open and lock a card's file, and return its number. Raises BlockingIOError: another process
    has; OSError: it cannot be opened."""
    while True:
        number = os.open(file, flags | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(number).st_nlink:
                return number
        except BaseException:
            os.close(number)
            raise
        os.close(number)  # who had it has removed it meanwhile


def _put_back(file: Path, number: int, nvml: Any) -> str:
    """Give a card what it had, and remove its file, which is locked. Return a line on that; empty
    if nothing was to be done."""
    line, (before, _) = "", _read_note(number)
    if before:
        try:
            if (now := _read(file.name, nvml)) != before:
                line = f"the power limit of {file.name} was left at {now:g} W by a sweep"
                _set(file.name, before, nvml)
                line = f"note: {line} that was killed, and is {before:g} W again"
        except NvmlMissingError as missing:
            line = line or f"the power limit of {file.name} was changed by a sweep"
            fix = _command(file.name, before)
            return f"warning: {line}, and cannot be put back ({missing}): {fix}"
    with suppress(OSError):
        file.unlink()
    return line


def restore_limits(of: int | None = None, wait_s: float = 0.0, nvml: Any = None) -> list[str]:
    """Put back what killed processes left or, if given, what process ``of`` did, for whose end it
    waits so long. Return a line on each card."""
    lines = []
    for file in sorted(_find_file("").glob("GPU-*")):
        until = time.monotonic() + wait_s
        with suppress(OSError), ExitStack() as opened:
            while of is None or _is_of(file, of):
                try:
                    opened.callback(os.close, number := _lock(file, os.O_RDONLY))
                    lines.append(_put_back(file, number, nvml))
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        break
                    time.sleep(_POLL_S)
    return [line for line in lines if line]


def _is_of(file: Path, pid: int) -> bool:
    with file.open("rb") as opened:
        return _read_note(opened.fileno())[1] == pid
