"""An asv plugin: every commit runs with the interpreter that runs asv; nothing is installed.

asv's own virtualenv mode installs torch again for each environment, and its ``existing`` mode takes
no range of commits. Here a commit is checked out into asv's folder, and its ``bench/`` comes first
on the path. GPU, driver, torch and preset become parameters of the results.

Environment variables: ``BENCH_PRESET`` is a preset's name or TOML file, ``BENCH_TIMEOUT`` the
timeout of each phase of a case in seconds, ``BENCH_SWEEP_FLAGS`` more flags for `bench.sweep`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asv.console import log
from asv.environment import Environment
from asv.util import ProcessError, UserError, check_output

from bench.base.errors import UsageError
from bench.machine.host import has_cuda
from bench.machine.nvml import find_cards
from bench.schema.axis import Value, name_column
from bench.schema.case import AXES, NAMING_AXES, Case, find_axis, format_value, list_axes
from bench.schema.flags import join_flags, parse_number
from bench.schema.preset import Preset, load_config, load_preset

GRID = "BENCH_ASV_GRID"
"""Environment variable set for the benchmarks: the cases, by their place in a parameter grid."""

_ROOT = Path(__file__).resolve().parents[3]


def choose_preset() -> Preset:
    """Return the preset of `BENCH_PRESET`; else the 2019 grid on a GPU, a small one on a CPU."""
    asked = os.environ.get("BENCH_PRESET") or ("rtx-titan" if has_cuda() else "")
    file = Path(asked or _ROOT / "benchmarks" / "cpu.toml")
    return load_config(file) if file.suffix == ".toml" else load_preset(asked)


def lay_out(cases: Sequence[Case]) -> dict[str, Any]:
    """Lay cases out for asv: names of parameters, the values of each, and a place for each case.

    The parameters are `NAMING_AXES`, and all others that vary among the cases. asv takes the
    product of all values; a place without a case is not available."""
    varying = [n for n in list_axes(cases) if len({getattr(case, n) for case in cases}) > 1]
    names = list(dict.fromkeys([*NAMING_AXES, *varying]))
    placed = [[_place(name, getattr(case, name)) for name in names] for case in cases]
    return {
        "names": [*map(name_column, names)],
        "params": [list(dict.fromkeys(column)) for column in zip(*placed, strict=True)],
        "cases": [
            {
                "slug": case.slug(),
                "values": values,
                # other axes are at a commit's defaults
                "axes": {n: value for n, value in asdict(case).items() if _is_needed(n, value)},
            }
            for case, values in zip(cases, placed, strict=True)
        ],
    }


def _place(name: str, value: Value) -> Value:
    """Return the value of a parameter: a number if the axis is numeric, else text."""
    default = find_axis(name).default
    if isinstance(default, bool) or not isinstance(default, int | float):
        return format_value(value) or "none"
    return value


def _is_needed(name: str, value: Value) -> bool:
    own = name in (*NAMING_AXES, "device") or value != AXES[name].default
    return own and value is not None


def describe_grid(preset: str, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the data for `benchmarks/`: the laid-out cases, the timeout, the sweep flags."""
    device = "cuda" if any(case.device == "cuda" for case in cases) else "cpu"
    text = os.environ.get("BENCH_TIMEOUT") or ("3600" if device == "cuda" else "600")
    own = ["--timeout", text, "--data-dir", str(_ROOT / "data")]
    return {
        "preset": preset,
        "device": device,
        "phase_s": parse_number("BENCH_TIMEOUT", text, "a number of seconds"),
        "flags": join_flags(own, shlex.split(os.environ.get("BENCH_SWEEP_FLAGS", ""))),
        **lay_out(cases),
    }


def setup() -> None:
    """Lay out the grid for the processes that asv starts. asv calls it on loading the plugin."""
    try:
        preset = choose_preset()
        cases = preset.cases({}, {"device": ["cuda" if has_cuda() else "cpu"]})
        os.environ[GRID] = json.dumps(describe_grid(Path(preset.name).stem, cases))
    except UsageError as error:
        raise UserError(str(error)) from error


class Host(Environment):  # type: ignore[misc]
    """The interpreter that runs asv, with a commit's checkout first on its path."""

    tool_name = "host"

    def __init__(
        self, conf: Any, python: str, requirements: Mapping[str, str], variables: Any
    ) -> None:
        """Describe this machine; asv passes its configuration and the Python version it wants."""
        grid = json.loads(os.environ[GRID])
        card = next(iter(find_cards()[0]), None) if grid["device"] == "cuda" else None
        self._requirements = {
            **requirements,
            "gpu": (card and card.name) or "none",
            "driver": (card and card.driver) or "none",
            "torch": version("torch") if find_spec("torch") else "none",
            "preset": grid["preset"],
        }
        super().__init__(conf, python, self._requirements, variables)

    @classmethod
    def matches(cls, python: str) -> bool:
        """Return whether this interpreter is the requested Python."""
        return python in (f"{sys.version_info.major}.{sys.version_info.minor}", "same")

    def check_presence(self) -> bool:
        return Path(self._path).is_dir()

    def _setup(self) -> None:
        Path(self._path).mkdir(parents=True, exist_ok=True)

    def install_project(self, conf: Any, repo: Any, commit_hash: str) -> None:
        """Check out the commit. Raises ProcessError: it has no harness to run; asv marks it as
        failed and continues."""
        self.checkout_project(repo, commit_hash)
        harness = Path(self._build_root) / "bench" / "sweep"
        # a module in older commits, a package since
        if not (harness.with_suffix(".py").is_file() or (harness / "__main__.py").is_file()):
            # Python would run the installed harness instead, with results filed under this commit
            missing = f"commit {commit_hash[:8]} has no bench.sweep to run"
            log.warning(missing)
            raise ProcessError([str(harness)], 1, "", missing)

    def run(self, args: Sequence[str], **options: Any) -> Any:
        """Run Python with the checkout, `PYTHONPATH` and the working directory on its path."""
        env = dict(options.pop("env", os.environ))
        # the folder that asv was started in comes last: a user's own model may be there
        folders = [self._build_root, env.get("PYTHONPATH"), str(Path.cwd())]
        path = os.pathsep.join(filter(None, folders))
        # asv's runner removes PYTHONPATH from sys.path unless ASV_PYTHONPATH is equal; the worker
        # that it starts needs PYTHONPATH itself
        env.update(self._global_env_vars, PYTHONPATH=path, ASV_PYTHONPATH=path)
        return check_output([sys.executable, *args], env=env, **options)
