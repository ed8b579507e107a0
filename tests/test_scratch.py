"""Temporary folders: those of processes that were killed are removed by the next one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pytest_for_tests import Patch

from bench.scratch import Scratch

HOLD = """
from bench.scratch import Scratch
held = Scratch("lane")
print(held.name, flush=True)
input()
"""


def test_what_a_kill_leaves_goes_and_what_lives_stays(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    command, pipe = [sys.executable, "-c", HOLD], subprocess.PIPE
    holders = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    killed, alive = (Path(one.stdout.readline().strip()) for one in holders if one.stdout)
    for folder in (killed, alive):
        os.utime(folder, times=(time.time() - 100, time.time() - 100))
    holders[0].kill()
    holders[0].wait()
    with Scratch("compiled"):
        assert killed.exists(), "of another kind"
    link = killed.with_name(f"{killed.name}-link")
    link.symlink_to(killed)
    with Scratch("lane") as own, Scratch("lane") as young:
        assert {*tmp_path.iterdir()} == {alive, link, Path(own), Path(young)}
    holders[1].communicate("\n")
    assert {*tmp_path.iterdir()} == {link}
