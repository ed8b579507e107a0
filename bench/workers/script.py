"""What a training script says of itself, one line a step: `step` and `epoch`; or what is seen of it
where it says nothing, by `bench.workers.hook`.

Within `bench.sweep --command` they write to a file that the sweep reads; anywhere else they do
nothing. This module imports neither torch nor anything else that the script has not imported, and
nothing of the harness: it is also loaded by its path.
"""

from __future__ import annotations

import atexit
import gc
import json
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import wraps
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from math import prod
from operator import itemgetter
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

FILE = "BENCH_STEPS"
"""Environment variable: the file that a sweep reads the steps of a script from."""

PROFILE = "BENCH_PROFILE"
"""Environment variable: the file in which a sweep asks for a profile of so many of the next steps;
the trace of each process is written beside it, see `name_trace`."""

SEES = "BENCH_SEES_STEPS"
"""Environment variable: whether steps are looked for that the script does not tell of."""

LIMIT = "BENCH_MEMORY_LIMIT"
"""Environment variable: a list of the arguments of `bench.workers.limit.arm` but for the last; or
empty."""

LOST = "bench: the sweep is told of no more steps"
"""What the output of a script says, with the reason, where the steps cannot be told."""

SAMPLED = 2
"""The step whose operations are counted, from 0: one of the warm-up, and the first is odd."""

_LEAD = 4
"""Steps after which processes that train together begin to profile: as many may one be ahead."""

_PEAKS_S = 0.5  # between readings of torch's allocator


class _Mark(NamedTuple):
    """A boundary between steps: the time.monotonic() of the call, and an event on the GPU of this
    index."""

    moment: float
    event: Any = None
    device: int = -1


class Ended(NamedTuple):
    """What may be the end of a step that was seen: ``mark``, the boundary from which the next one
    begins, and the step's loss."""

    mark: _Mark
    next: _Mark
    loss: Any


class Teller:
    """Writes a line of JSON a step, once its time and loss are known, without waiting for the
    device: of processes that train together the first one, and of others the one that was first.
    Each leaves a file of its own beside it, by its pid, so that they can be counted, with the UUID
    of its GPU.

    ``["who", {…}]`` is the process, and again where another GPU is used, or more is known of its
    steps. ``["step", moment, seconds, items, loss]``: time.monotonic() when the script had taken
    it, and null for what is not known. ``["epoch", {…}]`` is the end of an epoch with what was
    found then, ``["work", {…}]`` the work of a step, and ``["memory", {…}]`` bytes of memory,
    and ``["profile", {…}]`` that steps were profiled, or why they were not.
    ``["own"]``: the script has called `step`, and what was seen before does not count. Nothing but
    what the script gives wrong ends its training: where the file cannot be written, `LOST` is
    printed, and no more is told.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.own = False  # the script calls `step`
        # of `bench.workers.hook`, if it is there
        self.finish_seen: Callable[[], None] | None = None
        os.register_at_fork(after_in_child=self.reset)
        self.reset()
        if asked := os.environ.get(PROFILE):
            self.profile = AskedProfile(self, Path(asked))

    def reset(self) -> None:
        """Begin anew, as in a process that was forked."""
        self.profile = AskedProfile(self, None)  # of no process's child
        self.sampled = SampledStep(self)
        self.steps = 0  # that it has told of
        self.rank = 0  # any other only counts its steps, and profiles them
        self._open = self._silent = False  # open once there is a step
        self.device = -1  # the GPU that trains; -1 for none, which has no events
        self._began: _Mark | None = None  # the boundary before the next step
        self._waiting: deque[tuple[_Mark | None, _Mark, int | None, Any]] = deque()
        self._file, self._inode = -1, (0, 0)
        self._read = 0.0  # when torch's allocator was
        self._who: dict[str, Any] = {}
        self._limit: Any = None

    # ------------------------------------------------------------ what the script says

    def step(self, items: int | None, loss: Any) -> None:
        count = None if items is None else _read_items(items)
        if loss is not None:
            _refuse_loss(loss)
        with self:
            self._take_over()
            if self._begin(loss):
                self.sampled.end()
                self._append(_mark(self.device), count, None if loss is None else _take_loss(loss))
                if self.steps == SAMPLED and "torch" in sys.modules:
                    self.sampled.begin()
                    self._began = _mark(self.device)
                self.profile.go_on()
            elif self.rank:
                self.steps += 1
                self.profile.go_on()

    def epoch(self, loss: Any, accuracy: Any) -> None:
        given = {"loss": loss, "accuracy": accuracy}
        values = {
            name: None if value is None else _read_number(f"epoch({name}=…)", value)
            for name, value in given.items()
        }
        share = values["accuracy"]
        if share is not None and not 0 <= share <= 1:
            raise ValueError(
                f"bench.epoch(accuracy=…) takes a fraction from 0 to 1, and this is {share:g}"
            )
        with self:
            if self._open:
                if self.finish_seen is not None:
                    self.finish_seen()
                self._tell(wait=True)
                self.write("epoch", values)
                self.profile.drop()  # an evaluation is no part of a step
                self._began = _mark(self.device)

    def _take_over(self) -> None:
        """Take the script's word for its steps from now on."""
        if not self.own and self.steps:
            self.write("own")
            self.sampled.end()
            self.steps, self._began = 0, None
            self._waiting.clear()
        self.own = True

    # --------------------------------------------------------------- what the hook sees

    def end(
        self, before: Ended | None, loss: Any, whole: bool, optimizers: Collection[Any]
    ) -> Ended:
        """Return the end of a step, in place of one ``before`` it that was not yet the end. It is
        ``whole`` if all ``optimizers`` of the step before it have taken part in it."""
        if self.own or not self._begin(next(iter(optimizers), None)):
            if whole and self.own and self._open:
                self.sampled.look(optimizers)
            if whole and self.rank and not self.own:
                self.profile.go_on()
            return _NOTHING
        mark = _mark(self.device, before.mark if before else None)
        number = before.loss if before else None
        if loss is not None:
            with suppress(Exception):  # such as one that is not there outside of functorch
                number = _take_loss(loss)
        ended = Ended(mark, mark, number)
        if whole and self.steps == SAMPLED:
            self.sampled.end()
            self.sampled.look(optimizers)
            ended = ended._replace(next=_mark(self.device))
        if whole and self.steps == SAMPLED - 1 and not self.sampled.runs:
            self.sampled.begin()
            ended = ended._replace(next=_mark(self.device))
        if whole:
            self.profile.go_on()
        return ended

    def commit(self, ended: Ended, fresh: bool) -> None:
        """Tell of a step that has ended; what lay before a ``fresh`` one was no step."""
        if self.own or not self._open:
            self.steps += bool(self.rank and not self.own)
            return
        if fresh:
            self._began = None
        self._append(ended.mark, None, ended.loss)
        self._began = ended.next
        if self.steps > SAMPLED:
            self.sampled.end()

    def note(self, **facts: Any) -> None:
        """Tell something of the steps, if it is new."""
        if self._open and not self.own and not facts.items() <= self._who.items():
            self._who |= facts
            self.write("who", facts)

    def see_graph(self, options: dict[str, Any], graph: Any, inputs: Any) -> None:
        """torch.compile has a graph compiled."""
        if not self._silent:
            self.sampled.see_graph(options, graph, inputs)

    def mark_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what to give to an optimizer's step while one is looked at, else None. torch marks
        all of it as the optimizer, and a closure within is the network."""
        if not (self.sampled.runs or self.profile.runs):
            return None
        with self:
            name = import_own("bench.schema.work").NETWORK_REGION
            region = sys.modules["torch"].profiler.record_function(name)

            def mark(one: Any) -> Any:
                return region(one) if callable(one) else one

            return (args[0], *map(mark, args[1:])), {key: mark(kwargs[key]) for key in kwargs}
        return None

    def limit_memory(self, tell: Callable[[str], object]) -> None:
        """Limit the memory of this process, as a sweep asks. Raises MemoryError: it takes more by
        itself."""
        if limit := json.loads(os.environ.get(LIMIT) or "[]"):
            arm = import_own("bench.workers.limit").arm
            self._limit = arm(*limit, lambda: tell("limited"))

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is made of what runs now."""
        cuda = sys.modules["torch"].cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    # ---------------------------------------------------------------------------- steps

    def __enter__(self) -> None:
        """Let nothing that fails within be the script's problem."""

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._open, self._silent = False, True
        self._waiting.clear()
        self.sampled.end()
        with suppress(Exception):
            print(f"{LOST}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return True

    def _begin(self, loss: Any) -> bool:
        """Return whether this process tells of steps, and see to it that it does, and of the GPU of
        a loss, or of the weights of an optimizer."""
        if self._silent:
            return False
        if not self._open:
            self._begin_telling(loss)
        elif (device := _find_gpu(loss, self.device)) != self.device:
            self.device = device
            self.write("who", self._describe())
        return self._open

    def _append(self, mark: _Mark, items: int | None, loss: Any) -> None:
        self._waiting.append((self._began, mark, items, loss))
        self._began = mark
        self._tell()
        self.steps += 1
        if self._limit is not None and self.steps == SAMPLED + 1:
            with suppress(MemoryError):  # the next allocation fails
                self._limit.adjust()
            if self._limit.context_bytes is not None:
                self.write("memory", {"context_bytes": self._limit.context_bytes})

    def _begin_telling(self, loss: Any) -> None:
        self.rank = _read_group()[0]
        self._silent = self.rank != 0
        self.device = _find_gpu(loss, self.device)
        own = os.open(f"{self._path}.{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(own, (self._name_card() or "").encode())
        finally:
            os.close(own)
        if self._silent:
            return
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            self._silent = True
        else:
            self._open = True
            self.write("who", self._describe())
            _call_at_end(self._finish)

    def _describe(self) -> dict[str, Any]:
        """Return which process this is, among how many that take other items, whether torch knows
        their number, which GPU it trains on, and whether others share its items."""
        _, processes, known = _read_group()
        card = self._name_card()
        process = {"pid": os.getpid(), "processes": processes, "known": known, "card": card}
        return {**process, "own": self.own, "shares": known and processes < _count_processes()}

    def _name_card(self) -> str | None:
        if self.device < 0:
            return None
        properties = sys.modules["torch"].cuda.get_device_properties(self.device)
        return f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None

    def _finish(self) -> None:
        with self:
            if self._open:
                if self.finish_seen is not None:
                    self.finish_seen()
                self._tell(wait=True)
                self.profile.drop()

    def _tell(self, wait: bool = False) -> None:
        """Tell of the steps that the device has finished, or of all, for which it waits."""
        while self._waiting:
            began, now, items, loss = self._waiting[0]
            if wait and now.event is not None:
                now.event.synchronize()
            elif now.event is not None and not now.event.query():
                break
            self._waiting.popleft()
            took = None if began is None else now.moment - began.moment
            if began and began.event is not None and began.device == now.device:
                took = float(began.event.elapsed_time(now.event)) / 1e3
            self.write("step", now.moment, took, items, None if loss is None else float(loss))
        if self.device >= 0 and monotonic() > self._read + _PEAKS_S:
            self._read, cuda = monotonic(), sys.modules["torch"].cuda
            allocated = cuda.max_memory_allocated(self.device)
            reserved = cuda.max_memory_reserved(self.device)
            peaks = {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
            self.write("memory", peaks)

    def write(self, *values: Any) -> None:
        """Write a line, if this is the process that tells of steps."""
        if not self._open:
            return
        try:
            same = self._identify() == self._inode
        except OSError:
            same = False
        if not same:  # the script has closed all descriptors, and another file may have got this
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._inode = self._identify()
        os.write(self._file, f"{json.dumps(values)}\n".encode())

    def _identify(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_dev, found.st_ino


class SampledStep:
    """What is looked at of one step, that of `SAMPLED`: its operations, the graphs that
    torch.compile was given for it, and the memory of what is trained."""

    def __init__(self, teller: Teller) -> None:
        self._teller = teller
        self._sample: Any = None
        self._graphs: Any = None
        self._looked = False

    @property
    def runs(self) -> bool:
        return self._sample is not None

    def begin(self) -> None:
        try:
            self._sample = import_own("bench.training.operations").Sample()
            self._sample.begin()
        except Exception as error:  # the user's training goes on
            self._fail(error)

    def end(self) -> None:
        if self._sample is None:
            return
        sample, self._sample = self._sample, None
        try:
            work = sample.end(self._teller.device)
            if self._graphs is not None:
                doubt = self._graphs.explain(sample)
                work |= {"parts": [] if doubt else [*self._graphs.parts, work["work"]]}
                work |= {"doubt": doubt}
            self._teller.write("work", work)
        except Exception as error:  # such as that of a step that another thread ends
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._sample = None
        why = f"no operations were counted: {type(error).__name__}: {error}"
        self._teller.write("work", {"failure": why})

    def look(self, optimizers: Collection[Any]) -> None:
        """Tell once what memory weights, gradients and optimizers take."""
        if self._looked or self._teller.steps != SAMPLED or not optimizers:
            return
        self._looked = True
        try:
            sizes = import_own("bench.training.memory").measure_parts(optimizers)
        except Exception as error:
            sizes = {"failure": f"{type(error).__name__}: {error}"}
        self._teller.write("memory", sizes)

    def see_graph(self, options: dict[str, Any], graph: Any, inputs: Any) -> None:
        """Count a graph that is compiled before the step has ended."""
        if self._teller.steps <= SAMPLED:
            if self._graphs is None:
                self._graphs = import_own("bench.training.compiled").GivenGraphs()
            self._graphs.count(options, graph, inputs)


class AskedProfile:
    """The profile of some steps that a sweep asks for in a file, ``asked``; None where it asks for
    none."""

    def __init__(self, teller: Teller, asked: Path | None) -> None:
        self._teller, self._asked = teller, asked
        self._recording: Any = None
        self._number = self._before = 0  # steps to profile, and taken when that begins
        self._started = False  # the first of them is over, which includes the profiler's start

    @property
    def runs(self) -> bool:
        return self._recording is not None

    def go_on(self) -> None:
        """Begin to profile steps once the sweep asks for it, go on with it, or end it. It stands
        at a boundary between steps, at some more than once."""
        asked, steps = self._asked, self._teller.steps
        if asked is None:
            return
        try:
            if self._recording is None:
                if self._is_time(asked):
                    self._begin(asked)
            elif steps > self._before + self._number:
                recording, self._recording, self._asked = self._recording, None, None
                recording.end()
                trace = name_trace(asked, self._teller.rank)
                trace.with_suffix(".new").replace(trace)
                device = "cpu" if self._teller.device < 0 else "cuda"
                profile = {"steps": self._number, "device": device}
                self._teller.write("profile", {**profile, "processes": _count_processes()})
            elif steps == self._before + 1 and not self._started:
                self._started = True
                self._recording.begin()
        except Exception as error:  # the user's training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _is_time(self, asked: Path) -> bool:
        """Return whether to begin: processes that train together do at one step, which the first
        one says when it is asked."""
        steps = self._teller.steps
        if self._number:
            return steps >= self._before
        together = asked.with_suffix(".together")
        if self._teller.rank:
            if together.exists():
                self._number, self._before = map(int, together.read_text().split())
        elif asked.exists():
            self._number, self._before = int(asked.read_text()), steps
            if _count_processes() == 1:
                return True
            self._before += _LEAD
            new = asked.with_suffix(".first")
            new.write_text(f"{self._number} {self._before}")
            new.replace(together)
        return False

    def _begin(self, asked: Path) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            self._fail("the command imports no torch")
        elif torch.autograd._profiler_enabled():
            self._fail("a profiler of the script is at work")
        else:
            self._before, gpu = self._teller.steps, self._teller.device
            device = torch.device("cpu" if gpu < 0 else "cuda", max(gpu, 0))
            recording = import_own("bench.training.recording").Recording
            trace = name_trace(asked, self._teller.rank).with_suffix(".new")
            self._recording, self._started = recording(device, trace), False
            self._recording.start()

    def _fail(self, why: str) -> None:
        self._asked = None
        self.drop()
        self._teller.write("profile", {"failure": why})

    def drop(self) -> None:
        """End what is recorded, and forget it."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):
                recording.end()


def name_trace(asked: Path, rank: int = 0) -> Path:
    """Return the file of a process's trace, beside that in which it was asked for."""
    return asked.with_name(f"{asked.name}{rank}.json")


def _count_processes() -> int:
    """Return how many processes train together, if torch knows."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return 1


def _read_group() -> tuple[int, int, bool]:
    """Return this process's rank, how many processes take items of their own, and whether torch
    says so: a variable may be left over from another program."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
        return rank, max(1, size // _count_sharing()), True
    size = os.environ.get("WORLD_SIZE", "")
    return 0, int(size) if size.isdecimal() and int(size) else 1, False


_SHARING = ("tp", "tensor", "cp", "context", "sp", "sequence", "pp", "pipeline", "pipe", "stage")
"""Names of the dimensions of a mesh whose processes work on the same items."""


def _count_sharing() -> int:
    """Return how many processes work on the same items, as tensor-parallel ones do, by what knows
    of it: Megatron or DeepSpeed, or the named dimensions of torch's largest DeviceMesh."""
    world = sys.modules["torch.distributed"].get_world_size()
    for module, function in (
        ("megatron.core.parallel_state", "get_data_parallel_world_size"),
        ("deepspeed.utils.groups", "_get_data_parallel_world_size"),
    ):
        with suppress(Exception):  # it is there, and not in use
            if module in sys.modules:
                return int(world // getattr(sys.modules[module], function)())
    meshes = sys.modules.get("torch.distributed.device_mesh")
    found = [one for one in gc.get_objects() if meshes and type(one) is meshes.DeviceMesh]
    named = [(one.size(), one) for one in found if one.mesh_dim_names]
    if not named:
        return _count_sharded()
    _, largest = max(named, key=itemgetter(0))
    sizes = zip(largest.mesh_dim_names, largest.shape)
    return prod(size for name, size in sizes if name.lower().strip("_0123456789") in _SHARING)


def _count_sharded() -> int:
    """Return among how many processes weights are sharded that none of them gathers to use them, as
    of `parallelize_module` on a mesh without names; FSDP gathers those that it shards."""
    tensors, fsdp = map(sys.modules.get, ("torch.distributed.tensor", "torch.distributed.fsdp"))
    if tensors is None:
        return 1
    gathered = getattr(fsdp, "FSDPModule", ())
    sizes = {1}
    for one in gc.get_objects():
        if issubclass(type(one), gathered):
            return 1
        if issubclass(type(one), tensors.DTensor) and one.requires_grad and one.is_leaf:
            dims = zip(one.placements, one.device_mesh.shape)
            sizes.add(prod(size for placement, size in dims if placement.is_shard()))
    return max(sizes)


def _find_gpu(trains: Any, before: int) -> int:
    """Return the index of the GPU that trains: that of the loss, or of an optimizer's first weight,
    or the one that holds this process's tensors; the current one, if several do. -1 is none: an
    idle GPU times nothing."""
    for group in getattr(trains, "param_groups", ()):
        trains = group["params"][0] if group["params"] else None
        break
    if getattr(trains, "is_cuda", False):
        return int(trains.get_device())
    torch = sys.modules.get("torch")
    if before >= 0 or torch is None or not torch.cuda.is_initialized():
        return before
    used = [i for i in range(torch.cuda.device_count()) if torch.cuda.memory_allocated(i)]
    current = int(torch.cuda.current_device())
    return current if current in used or not used[:1] else used[0]


def _mark(device: int, instead: _Mark | None = None) -> _Mark:
    """Return a boundary that is here, with the event of one ``instead`` of which it is."""
    if device < 0:
        return _Mark(monotonic())
    cuda = sys.modules["torch"].cuda
    event = instead.event if instead and instead.device == device else None
    event = event or cuda.Event(enable_timing=True)
    event.record(cuda.current_stream(device))
    return _Mark(monotonic(), event, device)


_NOTHING = Ended(_Mark(0.0), _Mark(0.0), None)  # of what is not told


def _refuse_loss(loss: Any) -> None:
    if not getattr(loss, "is_cuda", False) or loss.numel() != 1:
        _read_number("step(loss=…)", loss)


def _take_loss(loss: Any) -> Any:
    """Return a number, or where a GPU will have written it once the step has ended: its event is on
    the same GPU."""
    if not getattr(loss, "is_cuda", False):
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    slot = sys.modules["torch"].empty((), device="cpu", pin_memory=True)
    return slot.copy_(loss.detach().reshape(()), non_blocking=True)


def _read_items(items: Any) -> int:
    number = operator.index(items) if hasattr(items, "__index__") else 0
    if number < 1:
        raise ValueError(
            "bench.step(items=…) takes a whole number of at least 1, such as len(x), and this is "
            f"{items!r:.60}"
        )
    return number


def _read_number(of: str, value: Any) -> float:
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"bench.{of} takes a number or a tensor of one element, and this is a "
            f"{type(value).__name__}{shape}"
        ) from None


_OWN: dict[str, Any] = {}  # modules of the harness, where the script has another `bench`


def import_own(name: str) -> Any:
    """Import a module of this harness, whichever package ``bench`` the script has, or none: it
    stays the script's."""
    start = next(p for p in Path(__file__).parents if not (p.parent / "__init__.py").exists())
    there = sys.modules.get("bench") or find_spec("bench")
    file = getattr(there, "__file__", None) or getattr(there, "origin", None)
    if file and os.path.realpath(file) == os.path.realpath(start / "__init__.py"):
        return import_module(name)
    hidden = _take_modules()
    try:
        sys.modules.update(_OWN)
        if not _OWN:
            spec = spec_from_file_location("bench", start / "__init__.py")
            assert spec is not None
            assert spec.loader is not None
            sys.modules["bench"] = package = module_from_spec(spec)
            spec.loader.exec_module(package)
        return import_module(name)
    finally:
        _OWN.update(_take_modules())
        sys.modules.update(hidden)


def _take_modules() -> dict[str, Any]:
    names = [name for name in sys.modules if name.partition(".")[0] == "bench"]
    return {name: sys.modules.pop(name) for name in names}


def _call_at_end(finish: Callable[[], None]) -> None:
    """Call this when the process ends, also as those end that multiprocessing forks."""
    atexit.register(finish)
    end = os._exit

    @wraps(end)
    def _exit(*args: Any, **kwargs: Any) -> Any:
        finish()
        end(*args, **kwargs)

    os._exit = _exit


def arm(tell: Callable[[str], object]) -> None:
    """Limit the memory of this process, which has imported torch, and see its steps by
    `bench.workers.hook`. ``tell`` takes what happens. Raises MemoryError."""
    if _teller is None:
        return
    _teller.limit_memory(tell)
    if os.environ.get(SEES):
        import_own("bench.workers.hook").arm(_teller, tell)


def _find_teller() -> Teller | None:
    """Return the one of this process, of which this module may have copies under other names."""
    path = os.environ.get(FILE, "")
    teller: Teller | None = vars(sys).setdefault("_bench_teller", Teller(path)) if path else None
    return teller


_teller = _find_teller()


def step(items: int | None = None, loss: Any = None) -> None:
    """Say that a training step has ended: call it once a step, after the optimizer's.

    In a sweep each step is timed from call to call, on a GPU by events of the current stream; no
    call waits for the device. Elsewhere it returns at once.

    Args:
        items: how many items the step was of, such as ``len(x)`` or tokens; under torchrun those of
            this process.
        loss: the step's loss, a number or a tensor of one element; it is read after the step.

    Raises ValueError or TypeError in a sweep: one of them is something else.
    """
    if _teller is not None:
        _teller.step(items, loss)


def epoch(loss: Any = None, accuracy: Any = None) -> None:
    """Say that an epoch, and its evaluation if there is one, has ended.

    What lies between its last step and this call is not counted in any step.

    Args:
        loss: what the evaluation found; a number or a tensor of one element.
        accuracy: its accuracy, as a fraction from 0 to 1.

    Raises ValueError or TypeError in a sweep: one of them is something else.
    """
    if _teller is not None:
        _teller.epoch(loss, accuracy)
