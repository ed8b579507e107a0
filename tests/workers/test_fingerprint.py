"""What a model is and whether it can be trained: found out in a real process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.results.store.reader import read_records
from bench.schema.case import Case
from bench.schema.flags import join_flags
from bench.sweep import __main__ as sweep
from bench.workers.examination import Machine, ask_processes
from bench.workers.fingerprint import Fingerprint, Request, try_model
from tests.workers_for_tests import gone

BLOCKS = """
from torch import nn
def classify(): return nn.Linear(3072, 10)
"""

MYNET = """
print("a user's module may print")
import torch
from torch import nn
import blocks
def build(): return nn.Sequential(nn.Flatten(), blocks.classify())
def lambdas():
    model = build()
    model.extra_repr = lambda: str(object())
    return model
def drawn():
    layers = int(torch.randint(9, ()))
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), *[nn.ReLU()] * layers)
def raises(): raise ValueError("no\\nluck")
def exits(): import os; os._exit(9)
def crashes():
    import faulthandler, os, resource, signal; faulthandler.disable()  # pytest's prints a stack
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
def asks(): return input("Do you trust this repository? ") and build()
def number(): return 3
def still(): return build().requires_grad_(False)
def meta(): return build().to("meta")
def half(): return build().half()
def conv(): return nn.Conv2d(3, 4, 3)
def wide(): return nn.Sequential(nn.Flatten(), nn.Linear(3072, 100))
def sized(width: int, bias: bool = True):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, width, bias), nn.Linear(width, 10))
class GPT(nn.Linear):
    def __init__(self): super().__init__(2, 2)
    def forward(self, tokens): return nn.functional.embedding(tokens, self.weight)
def sleeps(): import time; time.sleep(600)
class Extra(nn.Linear):
    # keeps a number, and does with its state in a step what it is told
    def __init__(self, does=lambda self: None):
        super().__init__(3072, 10)
        self.calls, self.does = 0, does
    def get_extra_state(self): return {"calls": self.calls}
    def set_extra_state(self, state): self.calls = state["calls"]
    def forward(self, x):
        self.calls += 1
        self.does(self)
        return super().forward(x.flatten(1))
def caches(): return Extra(lambda m: m.register_buffer("c", torch.ones(m.calls), persistent=False))
def replaces(): return Extra(lambda m: setattr(m, "bias", nn.Parameter(torch.ones(10))))
def second_step(): return Extra(lambda m: m.calls > 1 and m.register_buffer("mask", torch.ones(2)))
class Forgets(Extra):
    set_extra_state = nn.Module.set_extra_state
class Locked(Extra):
    def get_extra_state(self): import threading; return threading.Lock()
class InPlace(Extra):
    def forward(self, x): return super().forward(x).exp().mul_(2).exp().mul_(2)
from dataclasses import dataclass
@dataclass
class Described:
    logits: object
class Heads(Extra):
    def forward(self, x): return Described(super().forward(x))
"""

BROKEN = {
    "mynte:build": "--model 'mynte:build' cannot be imported from /",
    "syntax:build": "model 'syntax:build' cannot be built: SyntaxError",
    "mynet:biuld": "module 'mynet' has no function 'biuld'; did you mean 'build'?",
    "mynet:raises": "model 'mynet:raises' cannot be built: ValueError: no luck (mynet.py, line 14)",
    "mynet:exits": "ends its process with return code 9 when it is built and run once",
    "mynet:crashes": "ends its process by SIGSEGV",
    "mynet:asks": "cannot be built: EOFError: EOF when reading a line (mynet.py, line 20)",
    "mynet:number": "model 'mynet:number' returned int, and not a torch.nn.Module",
    "mynet:still": "model 'mynet:still' has no weight to train: none requires a gradient",
    "mynet:half": "model 'mynet:half' fails on (2, 3, 32, 32) images in fp32 (give others by",
    "mynet:conv": "gives (2, 4, 30, 30) for 2 images; forward returns logits of shape (2, classes)",
    "mynet:GPT": "data and a loss of its own by a --workload): ",
    "mynet:sized": "cannot be built: TypeError: sized() missing 1 required positional",
    "mynet:sized(bais=False,width=8)": "got an unexpected keyword argument 'bais'",
    "mynet:Locked": "a training in fp32 fails: TypeError: cannot pickle",
    "mynet:Forgets": "model 'mynet:Forgets': a training in fp32 fails: RuntimeError: ",
    "mynet:replaces": "training makes another tensor of bias, so no epoch could start",
    "mynet:second_step": "training makes another tensor of mask",
    "mynet:InPlace": "model 'mynet:InPlace': a training step in fp32 fails: RuntimeError: one of",
}


def move_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``folder`` one of the user's own, with models in it, where the command is run."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("mynet.py").write_text(MYNET)
    Path("blocks.py").write_text(BLOCKS)
    Path("syntax.py").write_text("def build(: pass")
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return move_into(tmp_path, monkeypatch)


CLASSES = {"mynet:build": 10, "mynet:wide": 100, "mynet:caches": 10}
CLASSES |= {"mynet:Heads": 10, "mynet:sized(width=8)": 10, "mynet:sized(bias=False,width=8)": 10}
ALIKE = ["mynet:build", "mynet:lambdas", "mynet:drawn", "blocks:classify", "dpn-small"]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """What one process tells of all models, as they were written."""
    with pytest.MonkeyPatch.context() as patch:
        move_into(tmp_path_factory.mktemp("unedited"), patch)
        return ask(*BROKEN, *CLASSES, *ALIKE[1:])


def ask(*names: str, timeout_s: float = 600) -> Machine:
    return ask_processes([], [Request(Case(name)) for name in names], timeout_s)


def examine_here(name: str) -> Fingerprint:
    found = try_model(Request(Case(name)), 60)
    assert isinstance(found, Fingerprint), found
    return found


def of(answer: Machine, name: str) -> Fingerprint:
    found = answer.models[name]
    assert isinstance(found, Fingerprint), found
    return found


def test_one_process_tells_of_all_models_and_of_what_is_wrong_with_each(
    answer: Machine,
) -> None:
    assert answer.torch_error == ""
    for name, message in BROKEN.items():
        found = answer.models[name]
        assert isinstance(found, str), name
        assert message in found
        assert "\n" not in found
    assert {name: of(answer, name).outputs for name in CLASSES} == CLASSES
    assert of(answer, "dpn-small").outputs is None, "of ours it is known"
    assert of(answer, "dpn-small").convolves
    assert not of(answer, "mynet:build").convolves
    with_bias, without = (of(answer, name) for name in [*CLASSES][-2:])
    assert with_bias.source == without.source
    assert with_bias.structure != without.structure


def test_a_fingerprint_is_the_same_in_any_process_and_company(answer: Machine) -> None:
    again = ask(*ALIKE[::-1]).models
    for name, found in [*again.items(), ("mynet:build", examine_here("mynet:build"))]:
        assert found == answer.models[name]
    assert of(answer, "mynet:build").source == of(answer, "mynet:lambdas").source
    # its module was imported by the others, in forks of their own
    assert "fails on" in str(answer.models["blocks:classify"])


def write(file: str, old: str, new: str) -> None:
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


def test_a_model_that_hangs_is_ended_with_all_it_started() -> None:
    answer = ask("mynet:sleeps", timeout_s=4)
    reason = "model 'mynet:sleeps': not built and run within 4 s; raise --timeout"
    assert answer.models == {"mynet:sleeps": reason}


# ------------------------------------------------------------------------------------- a sweep

CPU = ["--device", "cpu", "--dataset", "synthetic", "--precision", "fp32"]


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    before = set(Path().rglob("*"))
    capsys.readouterr()
    assert sweep.main(join_flags(CPU, arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert set(Path().rglob("*")) - before <= set(Path().rglob("__pycache__/*")) | set(
        Path().rglob("__pycache__")
    )
    (line,) = captured.err.splitlines()
    return line


def test_a_model_of_other_classes_is_refused_before_any_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flags in ([], ["--dry-run"]):
        error = refused(["--out", "out", "--model", "dpn-small", "mynet:wide", *flags], capsys)
        assert "gives (2, 100) for 2 images; it must give (2, 10), " in error
        assert "one logit for each class; bench.sweep --classes 100 has" in error


@pytest.mark.slow
@pytest.mark.usefixtures("unreported")
def test_an_edited_model_is_not_mixed_with_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole story: run, edit, run again, run another model there, and mix after all."""
    short = [*CPU, "--fraction", "0.001", "--batch-size", "32", "--repeats", "1", "--out", "out"]
    mine = [*short, "--model", "mynet:build"]
    assert sweep.main(mine) == 0
    capsys.readouterr()
    assert sweep.main(mine) == 0
    assert "0 to run, 1 already there" in capsys.readouterr().err

    write("blocks.py", "3072, 10)", "3072, 10)  # a remark")
    error = refused([*short[len(CPU) :], "--model", "mynet:build"], capsys)
    assert error.startswith("error: --out out: has rows that would not be comparable: ")
    assert "model_source was " in error
    assert error.endswith("choose another --out, or add to them with --mix")

    write("blocks.py", "3072, 10)", "3072, 10, bias=False)")
    error = refused([*short[len(CPU) :], "--model", "mynet:build"], capsys)
    assert "model_parameters was " in error

    assert sweep.main([*short, "--model", "dpn-small"]) == 0, "rows of another model do not matter"
    assert sweep.main([*mine, "--mix"]) == 0
    frame = read_records(Path("out"))
    assert list(frame["model"]) == ["mynet:build", "dpn-small", "mynet:build"]
    for part in ("model_parameters", "model_structure", "model_source"):
        assert frame[part].str.fullmatch("[0-9a-f]{12}").all()
        assert frame[part].nunique() == 3
    assert set(frame["variables"].str.contains("OMP_NUM_THREADS=1")) == {True}
    assert set(frame["torch_threads"]) == {1}


def test_ctrl_c_ends_a_model_that_hangs(here: Path) -> None:
    begun = here / "begun"
    saying = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time"
    write("mynet.py", "import time; time", saying)

    def press() -> None:
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert sweep.main([*CPU, "--model", "mynet:sleeps"]) == 130
    assert gone([int(begun.read_text())])


SOME = ["mynet:build", "mynet:raises", "mynet:build(x=1)", "blocks:classify"]


def test_all_broken_networks_are_told_at_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([*CPU, "--out", "out", "--model", *SOME, "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] * 3
    assert "'mynet:raises' cannot be built: ValueError: no luck (mynet.py, line 14)" in lines[0]
    assert "'mynet:build(x=1)' cannot be built: TypeError: build() got an unexpected" in lines[1]
    assert not Path("out").exists()
