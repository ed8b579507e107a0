"""How a command ended, from its code and its output."""

from __future__ import annotations

import pytest

from bench.base.inject import Uncaught
from bench.schema.case import Case
from bench.workers.endings import find_fault

_HEAD = 'Traceback (most recent call last):\n  File "/x/t.py", line 3, in <module>\n    f()\n'
_OOM = f"{_HEAD}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
_FAILED = f"{_HEAD}FileNotFoundError: no data\n"
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_LAUNCHER = f"{_HEAD}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n"
_ROOT = "Root Cause (first observed failure):\n[0]:\n  rank : 0\n  exitcode  : -9 (pid: 44)\n"


def _mark(rank: int, text: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


def test_a_pipe_is_named_only_where_there_is_one() -> None:
    command = "bash -c 'python t.py | tee log'"
    fault = find_fault(0, _FAILED, Case(command=command), None)
    assert fault
    assert "as that of a pipe may be: bash -o pipefail" in fault.reason


@pytest.mark.parametrize(
    ("code", "output", "status", "says"),
    [
        (1, _OOM, "oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (t.py,"),
        (1, f"{_OOM}going on\n{_FAILED}", "error", "FileNotFoundError: no data (t.py, line 3)"),
        (1, _OOM + _CONTEXT + _FAILED, "error", "FileNotFoundError: no data"),
        (1, f"{_OOM}{_CAUSE}{_HEAD}TrainError: step 3", "oom", "TrainError: step 3 (t.py, line 3)"),
        (3, f"{_OOM}going on\nno data", "error", "the command ended with code 3: no data"),
        (1, f"{_OOM}step 1\nstep 2\n", "oom", "OutOfMemoryError"),  # written when it ended
        (-9, _OOM, "killed", "SIGKILL from outside"),
        (137 - 256, _OOM, "oom", "OutOfMemoryError"),
        (0, f"step 1\n{_FAILED}", "error", "no data (t.py, line 3); its output ends in this, thou"),
        (0, _FAILED, "error", "its code is 0: if its work was done all the same, let it print a "),
        (0, f"{_FAILED}going on\n", "", ""),
        (0, f"{_FAILED}wandb: View run\n\n", "error", "its output ends in this"),
        (0, f"Exception in thread Thread-1 (f):\n{_FAILED}", "error", "only a thread ended by it"),
        (0, f"done\nException ignored in: <f>\n{_FAILED}", "", ""),
        (0, "Segmentation fault (core dumped)\n", "error", "Segmentation fault; its output ends"),
        (1, f"{_mark(1, _OOM)}{_mark(0, _HEAD)}[rank0]: DistBackendError: x\n{_LAUNCHER}", "oom",
         "OutOfMemoryError"),
        (1, _OOM + _LAUNCHER, "oom", "OutOfMemoryError"),
        (1, f"{_OOM}going on\n{_LAUNCHER}{_ROOT}", "killed", "a process of the command ended by S"),
        (-6, "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: "
         "out of memory\nframe #0: x\n", "oom", "c10::Error: CUDA error: out of memory"),
        (1, _FAILED.replace("Traceback", "\x1b[35mTraceback").replace("Error", "Error\x1b[0m"),
         "error", "FileNotFoundError: no data (t.py, line 3)"),
        (1, "╭─ Traceback (most recent call last) ─╮\n│ /x/t.py:3 in f  │\n╰───╯\nKeyError: 'a'\n",
         "error", "KeyError: 'a'"),
        (1, '  File "/x/t.py", line 1\n    x = = 1\nSyntaxError: invalid syntax\n', "error",
         "SyntaxError: invalid syntax"),
        (1, f"{_HEAD}BackendCompilerFailed: backend='inductor' raised:\nOutOfMemoryError: CUDA out "
         "of memory.\n", "oom", "raised: OutOfMemoryError: CUDA out of memory."),
    ],
)  # fmt: skip
def test_only_what_ended_it_decides(code: int, output: str, status: str, says: str) -> None:
    fault = find_fault(code, output, Case(command="x", device="cuda"), None)
    assert (str(fault.status) if fault else "", says in (fault.reason if fault else "")) == (
        status,
        True,
    ), fault


@pytest.mark.parametrize(
    ("code", "output", "uncaught", "status", "says"),
    [
        # what Python holds back for a pipe follows the error
        (0, f"{_FAILED}step 1\nstep 2\n", Uncaught("FileNotFoundError", "no data"), "error",
         "no data (t.py, line 3); a process of it ended by this, though its code is 0"),
        (0, "step 1\n", Uncaught("OutOfMemoryError", "CUDA out of memory. Tried"), "oom",
         "OutOfMemoryError: CUDA out of memory. Tried; a process of it ended by this"),
        (1, f"{_OOM}going on\nfailed\n", Uncaught("KeyError", "'a'"), "error", "KeyError: 'a'"),
        (1, _OOM + _LAUNCHER, Uncaught("ChildFailedError", ""), "oom", "OutOfMemoryError"),
        (0, f"{_FAILED}going on\n", None, "", ""),
    ],
)  # fmt: skip
def test_an_error_that_a_process_told_of_decides(
    code: int, output: str, uncaught: Uncaught | None, status: str, says: str
) -> None:
    fault = find_fault(code, output, Case(command="x", device="cuda"), uncaught)
    assert str(fault.status if fault else "") == status
    assert says in (fault.reason if fault else "")
