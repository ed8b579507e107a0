"""How a command ended: from its code, and from the errors that its output ends in.

An output is the only witness where the code is another program's, as behind a pipe, or of a
launcher. An error that a program handled, and went on, did not end it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bench.base.inject import Uncaught
from bench.base.processes import name_signal
from bench.schema.case import Case
from bench.schema.failure import classify, find_place, order_end
from bench.schema.record import Outcome, Status

_COLOUR = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")

# torch marks what ended a rank; torchrun --tee, srun -l and ray mark every line
_MARK = re.compile(r"^(?:\[(rank\d+)\]: ?|\[(?:default)?\d+\]: ?|\d+: |\(\w*pid=\d+[^)]*\) ?)")

_HEAD = re.compile(r'Traceback \(most recent call last\)|^ {2}File "[^"]+", line \d+$')
_NAMED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_CRASH = re.compile(
    r"^(?:terminate called after throwing an instance of '(?P<cpp>[^']+)'"
    r"|libc\+\+abi: terminating .*?of type (?P<mac>[\w:]+)"
    r"|(?:\S+: line \d+: +\d+ )?(?P<shell>Segmentation fault|Aborted|Bus error|Killed"
    r"|Illegal instruction|Floating point exception)\b(?: \(core dumped\))?)"
)
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)")

_LAUNCHERS = re.compile(r"\b(?:ChildFailed|CalledProcess|ProcessExited|ProcessRaised|Signal)\w*$")
_SIGNALLED = re.compile(
    r"died with <Signals\.(SIG\w+)|terminated with signal (SIG\w+)"
    r"|Root Cause[\s\S]*?exitcode\s*:\s*-(\d+)"
)

# what others print once a program has failed
_AFTER = re.compile(
    r"^(?:\s*$|[ \t]+\S|[EWIF]\d{4} |\[[EWIF]\d{3,} |\[rank\d+\]:\[[EWIF]|(?:ERROR|WARNING):torch"
    r"|.*Warning: |Exception ignored |wandb: |make(?:\[\d+\])?: |srun: |slurmstepd: "
    r"|mpirun|-{5}|={5}|\d+(?:\.\d+)?user |(?:real|user|sys)\s+\d|Command exited with "
    r"|For debugging consider |CUDA kernel errors might |Compile with |Set the environment "
    r"|.*\d%\||.*(?:it/s|s/it)\]?\s*$|terminate called |Aborted|[╭╰│])"
)

_CAUSED = "The above exception was the direct cause"
_MOST_LINES = 20  # of the message of an error


@dataclass
class Crash:
    """An error in an output: ``name`` is its class, ``message`` the first line of what it says and
    ``text`` all of it. ``rank`` marks what ended a process of several, ``last`` whether nothing
    follows that a program itself writes, ``cause`` the error that it was raised from."""

    name: str
    message: str
    text: str
    frames: str
    rank: str = ""
    last: bool = False
    thread: bool = False
    cause: Crash | None = None

    @property
    def launched(self) -> bool:
        """Return whether it only says that another program failed."""
        return bool(_LAUNCHERS.search(self.name))


def list_crashes(output: str) -> list[Crash]:
    """Return the errors of an output, in order, but for those that Python says it ignored.

    >>> [(e.name, e.message, e.last) for e in list_crashes("Traceback (most recent call last):\\n"
    ...     '  File "t.py", line 1\\nValueError: no\\ngoing on')]
    [('ValueError', 'no', False)]
    """
    lines = _COLOUR.sub("", output).splitlines()
    plain = [_MARK.sub("", line) for line in lines]
    heads = [at for at, line in enumerate(plain) if _HEAD.search(line) or _CRASH.match(line)]
    found, last = list[Crash](), True
    for begin, end in reversed([*pairwise([*heads, len(lines)])]):
        at, name, first = _read_crash(plain, begin) or _read_exception(plain, begin, end)
        rest = plain[at + 1 : end]
        last = last and all(map(_AFTER.match, rest))
        before = next(filter(str.strip, reversed(plain[:begin])), "")
        if not name or before.startswith("Exception ignored "):
            continue
        mark, message = _MARK.match(lines[begin]), "\n".join([first, *rest[:_MOST_LINES]])
        crash = Crash(
            name, first, message, "\n".join(plain[begin : at + 1]), (mark and mark[1]) or "", last
        )
        crash.thread = before.startswith("Exception in thread ")
        if found and any(line.startswith(_CAUSED) for line in rest):
            found[-1].cause = crash
        found.append(crash)
        last = last and crash.launched
    return found[::-1]


def _read_exception(plain: Sequence[str], begin: int, end: int) -> tuple[int, str, str]:
    """Return the line that names the exception, its class and its message; no class if the output
    ends before."""
    for at in range(begin + 1, end):
        if named := _NAMED.match(plain[at]):
            message = (named[2] or "").strip()
            if message.endswith(":"):  # as torch.compile wraps what a backend raised
                message = " ".join([message, *plain[at + 1 : at + 2]])
            return at, named[1].rpartition(".")[2], message
    return end - 1, "", ""


def _read_crash(plain: Sequence[str], at: int) -> tuple[int, str, str] | None:
    if (crash := _CRASH.match(plain[at])) is None:
        return None
    for below, line in enumerate(plain[at + 1 : at + 4], at + 1):
        if what := _WHAT.match(line):
            return below, crash["cpp"] or crash["mac"] or "", what[1].strip()
    return at, crash["cpp"] or crash["mac"] or crash["shell"], ""


def find_fault(code: int, output: str, case: Case, uncaught: Uncaught | None) -> Outcome | None:
    """Return why a command failed, from its code, negative for a signal, its output, and the error
    that its process told of as it ended; None if it did not. Behind a pipe, or in the background of
    a shell, its code may be 0."""
    if -code in (signal.SIGKILL, signal.SIGTERM):
        return Outcome(Status.KILLED, f"the command ended by {name_signal(-code)} from outside")
    crashes = list_crashes(output)
    raised = _find_raised(uncaught, crashes)
    if code == 0:
        last = [*raised, *(crash for crash in crashes[-1:] if crash.last)]
        return _describe_silent(last[0], case, bool(raised)) if last else None
    launchers = [crash for crash in crashes if crash.launched]
    if (ended := _find_signal(launchers)) and not any(crash.rank for crash in crashes):
        status = Status.KILLED if ended in ("SIGKILL", "SIGTERM") else Status.ERROR
        return Outcome(status, f"a process of the command ended by {ended}")
    own = [crash for crash in crashes if not (crash.launched or crash.thread)]
    ranks = [crash for crash in own if crash.rank]
    # Python's code for an exception is 1; with another one, it went on after what it printed
    tries = ranks or raised
    tries = tries or [e for e in own[-1:] if e.last or launchers or code in (1, -signal.SIGABRT)]
    faults = [classify_crash(crash, case) for crash in tries]
    if faults:
        return min(faults, key=order_end)
    lines = [line.strip() for line in _COLOUR.sub("", output).splitlines() if line.strip()]
    name = f"the command ended with code {code}"
    if code < 0:
        name = f"the command ended with {name_signal(-code)}"
    final = lines[-1][:300] if lines else ""
    fault = classify([name], final, case=case)
    return replace(fault, reason=f"{name}: {final}" if final else name)


def _find_raised(uncaught: Uncaught | None, crashes: Sequence[Crash]) -> list[Crash]:
    """Return the error that ended a process, as the output has it if it does; none of a launcher,
    which only says that another program failed."""
    if uncaught is None:
        return []
    name = uncaught.name
    message = [line.strip() for line in uncaught.message.splitlines() if line.strip()]
    printed = [c for c in crashes if c.name == name and c.message == (message or [""])[0]]
    raised = Crash(name, message[0] if message else "", uncaught.message, "")
    return [crash for crash in (printed or [raised])[-1:] if not crash.launched]


def classify_crash(crash: Crash, case: Case) -> Outcome:
    """Classify an error by its class and message, or by the error that it was raised from."""
    fault = classify([crash.name], crash.text, case=case)
    reason = f"{crash.name}: {crash.message[:300]}" if crash.message else crash.name
    reason += find_place(crash.frames)
    if fault.status is Status.ERROR and crash.cause:
        first = classify_crash(crash.cause, case)
        if first.status is not Status.ERROR:
            fault, reason = first, f"{reason}, from {first.reason}"
    return replace(fault, reason=reason)


def _describe_silent(crash: Crash, case: Case, ended: bool) -> Outcome:
    fault = classify_crash(crash, case)
    why = "" if ended else ": if its work was done all the same, let it print a line after that"
    if "|" in str(case.command):
        why = ", as that of a pipe may be: bash -o pipefail -c '…' gives the code of what failed"
    if crash.thread:
        why = ", since only a thread ended by it"
    how = "a process of it ended by this" if ended else "its output ends in this"
    reason = f"{fault.reason}; {how}, though its code is 0{why}"
    return Outcome(fault.status, reason)


def _find_signal(launchers: Sequence[Crash]) -> str:
    """Return the signal that a launcher says has ended a process; empty if it says of none."""
    for crash in launchers:
        if found := _SIGNALLED.search(f"{crash.message}\n{crash.text}"):
            return found[1] or found[2] or name_signal(int(found[3]))
    return ""
