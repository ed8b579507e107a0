"""Causes of failures: one table from exceptions and dead processes to outcomes."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bench.base.processes import name_signal
from bench.base.text import clean
from bench.schema.case import Case
from bench.schema.record import MEASURED, REFUSED, Outcome, Status

NEARLY_FULL = 0.05
"""Free share of device memory below which an odd CUDA library failure may be an OOM."""


@dataclass(frozen=True)
class Rule:
    """Exceptions whose class and message match end a case with ``status``.

    ``kind`` is the name of any class among the exception's ancestors, or empty; ``message`` a
    regular expression searched for in the text. Rules with ``when_full`` hold only while device
    memory is nearly full, those with ``when_limited`` only under a memory limit on a CPU.
    ``transient`` failures are worth a retry, and ``peer`` ones follow from the end of another
    process that trains the same network. ``fix`` is what to do, where the message does not say it.
    """

    status: Status
    message: str = ""
    kind: str = ""
    when_full: bool = False
    when_limited: bool = False
    transient: bool = False
    peer: bool = False
    fix: str = ""


_PLACES = ("Backend", "Network", "Store")

# The first match counts. torch.OutOfMemoryError and torch.AcceleratorError are sibling classes, and
# the libraries below torch spell errors in their own ways.
RULES: tuple[Rule, ...] = (
    Rule(Status.OOM, kind="OutOfMemoryError"),
    Rule(Status.OOM, kind="MemoryError"),
    Rule(Status.OOM, kind="MemoryLimitError"),  # in a command, of which no ancestors are known
    Rule(Status.OOM, r"(?:CUDA|HIP)(?: \w+)? error[^\n]*out of memory"),
    # torch.compile wraps errors in exceptions of its own
    Rule(Status.OOM, r"CUDA out of memory|OutOfMemoryError"),
    # NCCL allocates outside torch's allocator, and names the reason in its last line
    Rule(Status.OOM, r"Cuda failure[^\n]*out of memory"),
    Rule(Status.OOM, r"Triton Error \[\w+\]: out of memory"),
    Rule(Status.OOM, r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"),
    Rule(Status.OOM, r"(?:(?:CU|HIP)BLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(?:STATUS_)?ALLOC_FAILED"),
    Rule(Status.OOM, r"CUDNN_STATUS_\w*ALLOCATION_FAILED"),  # cuDNN 9
    Rule(Status.OOM, r"DefaultCPUAllocator: (?:can't|not enough).*memory"),
    Rule(Status.OOM, r"std::bad_alloc|Cannot allocate memory"),
    # DataLoader workers out of shared memory: killed if a page is missing, else with a message
    Rule(
        Status.OOM,
        r"DataLoader worker \(pid[^)]*\) is killed by signal: Bus error"
        r"|unable to (?:\w+ )+(?:shared memory|file <)[^\n]*No space left on device",
        fix="/dev/shm is full; enlarge it (docker: --shm-size), or use fewer loader workers",
    ),
    Rule(
        Status.KILLED, r"DataLoader worker \(pid[^)]*\) is killed by signal: (?:Killed|Terminated)"
    ),
    # libraries that do not say why their request for memory was refused
    Rule(
        Status.OOM,
        r"could not (?:create|execute) a (?:memory|primitive)|can't start new thread"
        r"|failed to map segment from shared object|cannot (?:map|allocate memory)",
        when_limited=True,
    ),
    Rule(
        Status.OOM_SUSPECTED,
        r"CUDNN_STATUS_(?:NOT_INITIALIZED|NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)"
        r"|CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)"
        r"|unable to find an engine to execute"
        # torch's allocator asks NVML while it words an OOM, and asserts that it gets an answer
        r"|NVML_SUCCESS == r",
        when_full=True,
    ),
    Rule(Status.ERROR, r"gloo/\w+|Connection (?:closed|reset) by peer", peer=True),
    # errors of NCCL, and of the store through which processes find each other
    *(Rule(Status.ERROR, kind=f"Dist{of}Error", peer=True) for of in _PLACES),
    Rule(Status.ERROR, r"CUDA-capable device.*busy", transient=True),
    Rule(Status.ERROR, r"cudaErrorDevicesUnavailable|system not yet initialized", transient=True),
    Rule(Status.ERROR, r"NVML.*(?:Unknown Error|Timeout|In use by another)", transient=True),
    Rule(Status.ERROR, r"Unknown Error|Timeout|In use by another", "NVMLError", transient=True),
    # the host cannot start another process at the moment
    Rule(Status.ERROR, kind="BlockingIOError", transient=True),
    Rule(Status.UNSUPPORTED, r"not implemented for '(?:Half|BFloat16|ComplexHalf)'"),
    Rule(Status.UNSUPPORTED, r"no kernel image is available|HIP error: invalid device function"),
    Rule(Status.UNSUPPORTED, r"not supported on (?:this|your) (?:device|GPU|platform)"),
    Rule(Status.UNSUPPORTED, r"Device does not support bfloat16"),
    Rule(Status.UNSUPPORTED, r"Torch not compiled with CUDA enabled"),
    Rule(Status.UNSUPPORTED, r"bfloat16 is only supported on GPUs with compute capability"),
    # cards, Python versions and hosts that torch.compile does not support
    Rule(Status.UNSUPPORTED, r"too old to be supported by the triton GPU compiler"),
    Rule(
        Status.UNSUPPORTED,
        r"Cannot find a working triton installation",
        fix="torch.compile needs Triton: pip install triton",
    ),
    Rule(
        Status.UNSUPPORTED,
        r"Failed to find C compiler|No working C\+\+ compiler found",
        fix="torch.compile needs a C and a C++ compiler: apt-get install g++",
    ),
    # Triton builds a helper in C, and Python raises how that ended
    Rule(
        Status.UNSUPPORTED,
        r"Command '\[[^\n]*(?:cuda_utils|__triton_launcher)[^\n]*non-zero exit status",
        fix="torch.compile could not build its helper in C; the log says what it lacks, most often "
        "the headers of Python: apt-get install python3-dev",
    ),
    Rule(
        Status.UNSUPPORTED,
        r"libcuda\.so cannot found",  # as Triton spells it
        fix="torch.compile does not find the driver's libcuda.so: sudo ldconfig",
    ),
    Rule(
        Status.ERROR,
        r"^Caught StopIteration in replica",
        fix="the network asks for its own parameters() in forward, and the copies that torch's "
        "DataParallel makes have none; give --parallel ddp",
    ),
    # captured steps (--cuda-graphs) that wait for the device, or allocate on the host
    Rule(Status.UNSUPPORTED, r"when stream is capturing"),
    Rule(Status.UNSUPPORTED, r"(?:torch\.compile|Dynamo) is not supported on"),
)


def list_kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def classify(
    kinds: list[str], message: str, free_share: float | None = None, case: Case | None = None
) -> Outcome:
    """Classify an exception by the names of its class and that one's ancestors, nearest first, and
    its text. ``free_share`` of device memory is that at the time of the exception, 0 also if the
    allocator refused some; the memory limit of ``case`` is named if memory ran out."""
    first = next(filter(None, map(clean, message.splitlines())), "")
    if message.startswith("Caught "):  # in a DataLoader's worker, whose traceback is the message
        errors = re.findall(r"^[\w.]+: (.+)$", message, re.MULTILINE)
        first = clean(errors[-1]) if errors else first
    reason = f"{kinds[0]}: {first[:300]}" if first else kinds[0]
    limit = case.memory_limit if case else None
    on_host = case is not None and case.device == "cpu"
    for rule in RULES:
        if rule.kind and rule.kind not in kinds:
            continue
        if rule.when_full and (free_share is None or free_share > NEARLY_FULL):
            continue
        if rule.when_limited and not (limit and on_host):
            continue
        if re.search(rule.message, message, re.DOTALL):
            if rule.fix:
                reason = f"{rule.fix}: {reason}"
            elif limit and rule.status is Status.OOM:
                # the allocator's message, which the log has, is about one block
                of = "host" if on_host else "GPU"
                reason = f"needs more than {limit} of {of} memory: {first}"
            return Outcome(rule.status, reason, transient=rule.transient, peer=rule.peer)
    return Outcome(Status.ERROR, reason)


def is_harness(file: Path) -> bool:
    """Return whether a file is of this package, or of another copy of it, which a command may
    import."""
    return any(
        folder.name == "bench"
        and (folder / "workers" / "script.py").is_file()
        and (folder / "results" / "store").is_dir()
        for folder in file.parents
    )


def list_libraries() -> Iterator[Path]:
    """Yield the folders of Python's own library, and the one that holds torch: `pip install
    --target` gives it any name. In it nothing is the user's, unless the command runs there."""
    yield from (Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib"))
    torch, here = find_spec("torch"), Path.cwd().resolve()
    if torch and torch.origin:
        beside = Path(torch.origin).resolve().parents[1]
        if beside not in (here, *here.parents):
            yield beside


_LIBRARIES = [*list_libraries()]


def is_library(file: Path) -> bool:
    file = file.resolve()
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return bool(installed) or any(folder in file.parents for folder in _LIBRARIES)


def find_place(failed: BaseException | str) -> str:
    """Return the last line of the user's own code in an exception, or in the text of a traceback,
    as `` (net.py, line 12)``; empty if there is none."""
    if isinstance(failed, SyntaxError):  # its message has the line
        return ""
    if isinstance(failed, BaseException):
        failed = "".join(traceback.format_exception(failed))
    # torch.compile quotes the user's line in its message, a space further in
    frames = re.findall(r'^ {2,3}File "([^"<]+)", line ([0-9]+)', failed, re.MULTILINE)
    made = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/torchinductor_")
    for name, line in reversed(frames):
        file = Path(name)
        if not (is_library(file) or is_harness(file) or made in name):
            return f" ({file.name}, line {line})"
    return ""


def order_end(end: Outcome) -> int:
    """Return a sort key for the ends of processes that train one network, which ends as the first
    of them: out of memory counts most, and to have failed because peers were gone least."""
    if end.status in MEASURED:
        return 3
    return 2 if end.peer else 0 if end.status in REFUSED else 1


def classify_death(returncode: int, oom_kills: int, case: Case | None, trained: bool) -> Outcome:
    """Classify the end of a worker that reported no result, by its return code, negative for a
    signal, and the number of processes that the kernel's OOM killer ended meanwhile.

    Under a memory limit on a CPU, a library that does not check an allocation, or a thread that
    cannot be started, ends the process; that proves nothing about the batch. On a GPU the limit is
    the allocator's own, which raises an exception. No batch takes memory before the worker has
    ``trained``, or begun to warm up.
    """
    if returncode == -signal.SIGKILL and oom_kills > 0:
        return Outcome(Status.KILLED, "SIGKILL by the host's out-of-memory killer (host memory)")
    if returncode in (-signal.SIGKILL, -signal.SIGTERM):
        return Outcome(Status.KILLED, f"{name_signal(-returncode)} from outside the sweep")
    if returncode < 0:
        reason = f"the worker crashed with {name_signal(-returncode)}"
    else:
        reason = f"the worker exited with code {returncode} and reported no result"
    if case and case.memory_limit and case.device == "cpu" and trained and returncode:
        why = f"{reason}, under a memory limit of {case.memory_limit}; the log may say why"
        return Outcome(Status.OOM_SUSPECTED, why)
    return Outcome(Status.ERROR, reason)


def count_oom_kills() -> int:
    """Return the OOM kills of the kernel since boot."""
    counts = dict(map(str.split, Path("/proc/vmstat").read_text().splitlines()))
    return int(counts.get("oom_kill", 0))
