"""A sweep killed again and again, on one lane or four, ends with its grid, once each.

No line is torn. BENCH_THOROUGH is the number of kills; `make thorough` takes 100.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.results.store.reader import read_records
from tests.frames_for_tests import read_steps
from tests.slow_sweep import STEPS

KILLS = int(os.environ.get("BENCH_THOROUGH", "5"))
CASES = 40 * KILLS
HERE = Path(__file__).parent


FLAGS = "--executor fake --device cpu --dataset synthetic --precision fp32 --batch-size 32"


def start(out: Path, lanes: int) -> subprocess.Popen[bytes]:
    flags = [*FLAGS.split(), "--lanes", str(lanes), "--out", out]
    command = [sys.executable, HERE / "slow_sweep.py", *flags, "--seed", *map(str, range(CASES))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, "BENCH_FAKE_ANSWERS": ""}, **quiet)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(KILLS)
    rows = killed = reported = 0
    while killed < KILLS:
        sweep = start(tmp_path, lanes=rng.choice((1, 4)))
        # not before it has begun: "40 to run, into …" is the second line it prints
        heard = sweep.stderr.readline() + sweep.stderr.readline() if rng.random() < 0.8 else b""
        time.sleep(rng.uniform(0, 0.5))
        sweep.send_signal(signal.SIGKILL)
        _, rest = sweep.communicate()
        assert sweep.returncode == -signal.SIGKILL, (heard + rest).decode()
        killed += 1
        reported += (heard + rest).count(b"set aside")
        if (tmp_path / "records.csv").exists():
            now = len(read_records(tmp_path))
            assert now >= rows, "a row that was there is gone"
            rows = now
            read_steps(tmp_path)
    assert 0 < rows < CASES, "the kills came while there was work to do"

    last = start(tmp_path, lanes=4)
    _, heard = last.communicate()
    assert last.returncode == 0, heard.decode()
    reported += heard.count(b"set aside")

    frame, steps = read_records(tmp_path), read_steps(tmp_path)
    assert sorted(frame["seed"]) == list(range(CASES))
    assert set(frame["attempt"]) == {1}
    assert frame["record_id"].is_unique
    counts = steps["record_id"].value_counts()
    assert (counts[frame["record_id"]] == STEPS).all()
    # a run that was cut short may leave steps without a row, never two runs' under one name
    assert len(set(counts.index) - set(frame["record_id"])) <= KILLS
    torn = 0
    for name in ("records.csv", "steps.csv"):
        assert (tmp_path / name).read_bytes().endswith(b"\n")
        aside = len(list(tmp_path.glob(f"{name}.torn-*")))
        assert aside <= killed
        torn += aside
    assert reported <= torn, "a kill may come before what was set aside is said, never after"
    assert torn or KILLS < 100, "no kill landed within a line; the test has lost its teeth"
