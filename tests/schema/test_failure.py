"""What a failure means, with what torch, numpy, the system and their libraries really say."""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.schema import failure
from bench.schema.case import Case
from bench.schema.failure import (
    NEARLY_FULL,
    classify,
    classify_death,
    find_place,
    list_kinds,
    list_libraries,
)
from bench.schema.record import Outcome, Status
from bench.workers.worker import read_free_share
from tests.pytest_for_tests import Patch

FULL, ROOMY = NEARLY_FULL / 2, 0.5


class NVMLError(Exception):
    """As pynvml's: its subclasses are made on the fly, one a return code."""


NvmlTimeout = type("NVMLError_Timeout", (NVMLError,), {})

OOM = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total"),
    MemoryError(),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorX' in the CUDA docs"),
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "InductorError: OutOfMemoryError: Tried to allocate 2 GiB",
    torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.28.9\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried",
    "std::bad_alloc",
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
]
SUSPECTED = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "GET was unable to find an engine to execute this computation",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp"',
]
"""They mean a lack of memory where it is nearly full."""

UNSUPPORTED = [
    "\"slow_conv2d_cpu\" not implemented for 'Half'",
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    "FlashAttention is not supported on this device",
    AssertionError("Torch not compiled with CUDA enabled"),
    "Current CUDA Device does not support bfloat16",
    "bfloat16 is only supported on GPUs with compute capability of at least 8.0",
    "Found Tesla P100 which is too old to be supported by the triton GPU compiler",
    "Cannot find a working triton installation. Either the package is not installed",
    "InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config",
    "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs",
    "Command '['/usr/bin/gcc', '/tmp/tmpb4/cuda_utils.c', '-O3', '-shared', '-fPIC', '-o', "
    "'/tmp/tmpb4/cuda_utils.cpython-312-x86_64-linux-gnu.so']' returned non-zero exit status 1.",
    AssertionError("libcuda.so cannot found!\nPossible files are located at ['/usr/lib/libcuda'"),
    "torch.compile is not supported on Python 3.15+",
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
]
TRANSIENT = [
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    "cudaErrorDevicesUnavailable",
    "CUDA error: system not yet initialized",
    NvmlTimeout("Timeout"),
    "NVML: Unknown Error",
    BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
]
PEERS = [
    "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
    torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2501, remote process"),
    torch.distributed.DistNetworkError("failed to recv, got 0 bytes"),
    torch.distributed.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0/1"),
]
ERRORS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "the word memory alone says nothing",
    KeyError("momentum"),
    SystemExit(3),
    OSError(errno.ENOENT, os.strerror(errno.ENOENT)),
    NVMLError("Insufficient Permissions"),
]
Errors = list[BaseException | str]
EVERY = (None, FULL, ROOMY)
MEANINGS: list[tuple[Errors, tuple[float | None, ...], Outcome]] = [
    (OOM, EVERY, Outcome(Status.OOM, "")),
    (SUSPECTED, (FULL,), Outcome(Status.OOM_SUSPECTED, "")),
    (SUSPECTED, (None, ROOMY, NEARLY_FULL * 1.01), Outcome(Status.ERROR, "")),
    (UNSUPPORTED, EVERY, Outcome(Status.UNSUPPORTED, "")),
    (TRANSIENT, EVERY, Outcome(Status.ERROR, "", transient=True)),
    (PEERS, EVERY, Outcome(Status.ERROR, "", peer=True)),
    (ERRORS, EVERY, Outcome(Status.ERROR, "")),
]
"""What exceptions mean, a RuntimeError where there is but its text, by the free share of the
memory."""


def judge(error: BaseException | str, *about: Any) -> Outcome:
    error = RuntimeError(error) if isinstance(error, str) else error
    return classify(list_kinds(error), str(error), *about)


@pytest.mark.parametrize(
    ("error", "shares", "fault"),
    [(error, shares, fault) for errors, shares, fault in MEANINGS for error in errors],
    ids=str,
)
def test_what_an_exception_means(
    error: BaseException | str, shares: tuple[float | None, ...], fault: Outcome
) -> None:
    for share in shares:
        assert replace(judge(error, share), reason="") == fault


@pytest.mark.parametrize("error", UNSUPPORTED[7:12], ids=str)
def test_what_a_compiler_lacks_is_said_with_what_installs_it(error: BaseException | str) -> None:
    assert judge(error).reason.startswith("torch.compile ")
    assert re.search("install|ldconfig", judge(error).reason)


LIMIT = Case(device="cpu", memory_limit="900MiB")


@pytest.mark.parametrize("error", ["could not create a primitive", "can't start new thread"])
def test_a_library_under_a_limit_ran_out_of_memory(error: str) -> None:
    fault = judge(error, None, LIMIT)
    assert fault.status is Status.OOM
    assert fault.reason.startswith("needs more than 900MiB of host memory: ")
    for case in (None, replace(LIMIT, memory_limit=None), replace(LIMIT, device="cuda")):
        assert judge(error, None, case).status is Status.ERROR
    on_gpu = judge(OOM[0], None, replace(LIMIT, device="cuda"))
    assert on_gpu.reason.startswith("needs more than 900MiB of GPU memory")


@pytest.mark.parametrize(
    ("free_gib", "cap", "reserved_gib", "refused", "status"),
    [
        (90, 0.25, 20.0, 0, Status.ERROR),
        (90, 0.25, 24.5, 0, Status.OOM_SUSPECTED),
        (1, 1.0, 20.0, 0, Status.OOM_SUSPECTED),
        (90, 1.0, 10.0, 1, Status.OOM_SUSPECTED),
    ],
    ids=["roomy", "full cap", "full card", "refused"],
)
def test_a_smaller_card_may_be_full_where_the_card_is_not(
    monkeypatch: Patch, free_gib: int, cap: float, reserved_gib: float, refused: int, status: Status
) -> None:
    """A card of 100 GiB, whose allocator is capped where there is a memory limit."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib * gib, 100 * gib))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: cap)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: int(reserved_gib * gib))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": refused})
    share = read_free_share(Case(device="cuda"))
    assert classify(["RuntimeError"], SUSPECTED[2], share).status is status
    assert read_free_share(Case(device="cpu")) is None
    # after a sticky error of CUDA the device answers nothing
    monkeypatch.setattr(torch.cuda, "memory_stats", Mock(side_effect=RuntimeError))
    assert read_free_share(Case(device="cuda")) is None


@pytest.mark.parametrize(
    ("message", "status", "expected"),
    [
        (
            "DataLoader worker (pid 812) is killed by signal: Bus error. It is possible that",
            Status.OOM,
            "/dev/shm is full; enlarge it (docker: --shm-size), or use fewer loader workers: ",
        ),
        (
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent "
            'call last):\n  File "x.py", line 7, in <module>\n    collate()\n    ~~~~~~~^^\n'
            "RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)\n",
            Status.OOM,
            "loader workers: RuntimeError: unable to write to file </torch_1_2_3>: No space left "
            "on device (28)",
        ),
        ("DataLoader worker (pid 812) is killed by signal: Killed. ", Status.KILLED, "(pid 812)"),
    ],
)
def test_what_a_loader_says_of_its_workers(message: str, status: Status, expected: str) -> None:
    for case in (None, LIMIT):
        fault = judge(message, FULL, case)
        assert fault.status is status
        assert expected in fault.reason
        assert "limit is" not in fault.reason, "its memory is not what is limited"


def test_a_copy_without_parameters_is_told_of() -> None:
    message = "Caught StopIteration in replica 1 on device 1.\nOriginal Traceback (most recent call"
    reason = judge(StopIteration(message)).reason
    assert reason.startswith("the network asks for its own parameters()")
    assert "give --parallel ddp" in reason


@given(st.text())
def test_the_reason_is_one_line_with_the_class(message: str) -> None:
    reason = classify(["RuntimeError"], message).reason
    assert len(reason.splitlines()) == 1
    assert reason.isprintable() or not message.isprintable()
    assert classify(["RuntimeError"], f"\n\n  first\n{message}").reason == "RuntimeError: first"
    assert len(classify(["RuntimeError"], "x" * 10_000).reason) < 400


NET = """
import torch
def fails(): return torch.ones(2) @ torch.ones(3)
"""


def test_a_failure_is_traced_to_the_last_line_of_the_users_code(tmp_path: Path) -> None:
    """Not to a line of torch below it, nor of the harness, of another copy of it either; and in
    what a command prints."""
    file = tmp_path / "net.py"
    file.write_text(NET)
    made: dict[str, Callable[[], object]] = {}
    exec(compile(NET, str(file), "exec"), made)
    with pytest.raises(RuntimeError) as caught:
        made["fails"]()
    for error in (caught.value, "".join(traceback.format_exception(caught.value))):
        assert find_place(error) == " (net.py, line 3)"
    script = tmp_path / "bench" / "workers" / "script.py"
    own = f'  File "{file}", line 4, in <module>\n  File "{script}", line 7, in f\n'
    script.parent.mkdir(parents=True)
    script.touch()
    assert find_place(own) == " (script.py, line 7)", "a user's own"
    (tmp_path / "bench" / "results" / "store").mkdir(parents=True)
    assert find_place(own) == " (net.py, line 4)"
    assert find_place(own.replace("script.py", "training/counting.py")) == " (net.py, line 4)"
    loaded = f'Caught KeyError in DataLoader worker process 0.\n  File "{file}", line 9, in get\n'
    assert find_place(RuntimeError(loaded)) == " (net.py, line 9)"
    assert find_place(RuntimeError("raised nowhere")) == ""


@pytest.mark.parametrize(
    ("returncode", "oom_kills", "status", "reason"),
    [
        (-9, 0, Status.KILLED, "SIGKILL from outside"),
        (-9, 1, Status.KILLED, "out-of-memory killer"),
        (-15, 1, Status.KILLED, "SIGTERM from outside"),
        (-40, 0, Status.ERROR, "crashed with signal 40"),
        (0, 0, Status.ERROR, "exited with code 0"),
    ],
)
def test_deaths(returncode: int, oom_kills: int, status: Status, reason: str) -> None:
    fault = classify_death(returncode, oom_kills, None, trained=False)
    assert fault.status is status
    assert reason in fault.reason
    assert not fault.transient
    for case, trained in ((LIMIT, False), (replace(LIMIT, device="cuda"), True), (Case(), True)):
        assert classify_death(returncode, oom_kills, case, trained) == fault
    limited = classify_death(returncode, oom_kills, LIMIT, trained=True)
    if status is Status.ERROR and returncode:
        assert limited.status is Status.OOM_SUSPECTED, "a crash proves nothing of the batch"
        assert limited.reason.startswith(f"{fault.reason}, under a memory limit of 900MiB")
    else:
        assert limited == fault


def test_what_is_installed_beside_torch_is_no_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pip install --target deps`: a network's hash would be of whatever was imported."""
    origin = str(tmp_path / "deps" / "torch" / "__init__.py")
    monkeypatch.setattr(failure, "find_spec", lambda name: SimpleNamespace(origin=origin))
    for here, known in (("own", True), ("deps", False), ("deps/own", False)):
        (tmp_path / here).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / here)
        assert (tmp_path / "deps" in list_libraries()) == known, here
