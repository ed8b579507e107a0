"""The steps of a training script that tells of none, seen by torch's optimizers.

A step is the last step of an optimizer, or of a `GradScaler`, after a backward pass: the next pass
shows that it was the last one. So a step that a scaler skips is one, and an optimizer that is
stepped a group at a time, within the backward pass, or with closures takes one a pass. Nothing of
this is seen by torch.compile, which would break its graphs: where it has compiled an optimizer, a
step is known at the next pass, by weights that have changed.

Loaded into the processes of a command once they have imported torch; whatever fails in it is not
the script's problem.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from itertools import count
from threading import get_ident
from typing import Any, Literal

Happening = Literal["torch", "backward", "step", "captured"]
"""What a process tells of, once each, so that it can be said why no steps were seen: it has torch,
ran a backward pass, stepped an optimizer, and did so while a CUDA graph was captured."""


def arm(teller: Any, tell: Callable[[Happening], object]) -> None:
    """See what the torch of this process does, for a `Teller`. Raises AttributeError or
    ImportError: this version of torch lacks what is to be seen."""
    torch = sys.modules["torch"]
    hook = Hook(teller, tell)
    hook.happen("torch")
    variable = torch.autograd.Variable
    scaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # before torch 2.3
    step, scale = scaler.step, scaler.scale
    # before torch 2.3
    is_compiling = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling

    class Engine(type(variable._execution_engine)):  # type: ignore[misc]
        def run_backward(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            hook.begin_pass(outputs)
            try:
                return super().run_backward(outputs, *args, **kwargs)
            finally:
                hook.end_pass()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_compiling():
            return None
        hook.begin_step()
        return teller.mark_closure(args, kwargs)

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            hook.end_step(optimizer)

    @wraps(step)
    def step_scaled(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        done = step(self, optimizer, *args, **kwargs)
        if not is_compiling():
            hook.end_step(optimizer)
        return done

    @wraps(scale)
    def scale_loss(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if not is_compiling():
            hook.scale(outputs, scaled)
        return scaled

    if inductor := getattr(torch, "_TorchCompileInductorWrapper", None):
        compile_graph = inductor.__call__

        @wraps(compile_graph)
        def compile_given(self: Any, graph: Any, inputs: Any, **kwargs: Any) -> Any:
            with hook.compiling():
                hook.see_graph(getattr(self, "config", {}), graph, inputs)
                return compile_graph(self, graph, inputs, **kwargs)

        inductor.__call__ = compile_given
    sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook(before_step)
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(after_step)
    scaler.step, scaler.scale = step_scaled, scale_loss
    variable._execution_engine = Engine()  # which torch looks up for each pass
    teller.finish_seen = hook.finish
    os.register_at_fork(after_in_child=hook.reset)
    with suppress(AttributeError, ImportError):
        _hide(Engine.run_backward, step_scaled, scale_loss)
        _hide(hook.begin_pass, hook.end_pass, hook.end_step, hook.scale, all_within=True)


def _hide(*functions: Any, all_within: bool = False) -> None:
    """Have torch.compile leave functions alone, and what they call, where the frame of their caller
    is compiled."""
    compiler = import_module("torch._C._dynamo.eval_frame")
    action = compiler._FrameAction
    within = action.SKIP if all_within else action.DEFAULT
    for function in functions:
        strategy = compiler._FrameExecStrategy(action.SKIP, within)
        compiler.set_code_exec_strategy(function.__code__, strategy)


class Hook:
    """Tells a `Teller` of the steps of this process."""

    def __init__(self, teller: Any, tell: Callable[[Happening], object]) -> None:
        self._teller, self._tell = teller, tell
        self._happened: set[Happening] = set()
        self._optimizers: weakref.WeakKeyDictionary[Any, int]  # with a number each
        self._optimizers = weakref.WeakKeyDictionary()
        self._numbers = count(1)
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a process that was forked."""
        self._thread, self._depth = 0, 0
        self._passes = 0  # since the last step
        self._loss: Any = None
        self._scaled: Any = None  # a loss that a scaler has scaled, and what came of it
        self._ended: Any = None  # what may be the end of the step
        self._within = False  # it was in the backward pass, whose end may be later
        self._now: set[int] = set()
        self._last: set[int] = set()
        self._known: set[int] = set()
        self._eager = False  # an optimizer that torch.compile leaves alone has begun to step
        self._watched: list[tuple[Any, int]] | None = None

    def happen(self, what: Happening) -> None:
        if what not in self._happened:
            self._happened.add(what)
            self._tell(what)

    # ------------------------------------------------------------------ what torch calls

    def begin_pass(self, outputs: Any) -> None:
        """A backward pass begins; one within another, as checkpoints have them, is part of it."""
        self._depth += 1
        if self._depth > 1:
            return
        with self._teller:
            me = get_ident()
            if self._thread not in (0, me):
                raise RuntimeError(
                    "several threads run backward passes, each with steps of its own"
                )
            self._thread = me
            self.happen("backward")
            if not self._eager and "torch._dynamo" in sys.modules:
                self._look_at_weights()
            if self._ended is not None:
                self._commit()
            self._passes += 1
            self._loss = self._find_loss(outputs) if self._passes == 1 else None

    def end_pass(self) -> None:
        self._depth -= 1
        if not self._depth and self._within:
            self._within = False
            with self._teller:
                self._end_step()

    def begin_step(self) -> None:
        self._eager = True

    def end_step(self, optimizer: Any) -> None:
        """An optimizer has stepped, or a scaler has skipped that."""
        with self._teller:
            number = self._optimizers.get(optimizer)
            if number is None:
                number = self._optimizers[optimizer] = next(self._numbers)
            if not self._passes:
                return  # as to create its state
            self.happen("step")
            if self._teller.is_capturing():
                self.happen("captured")
                return
            self._now.add(number)
            if self._depth:
                self._within = True
            else:
                self._end_step()

    def scale(self, loss: Any, scaled: Any) -> None:
        """A scaler has made ``scaled`` of a loss."""
        with self._teller:
            if hasattr(loss, "detach"):
                self._scaled = weakref.ref(scaled), loss.detach()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A backward pass within is none of the script's: to count a graph runs one, and so does
        Inductor of torch 2.1, 19 when it is imported."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def see_graph(self, options: Any, graph: Any, inputs: Any) -> None:
        """torch.compile has a graph compiled."""
        with self._teller:
            self._teller.see_graph(options, graph, inputs)

    # ------------------------------------------------------------------------------ steps

    def _end_step(self) -> None:
        """Note the end of a step, unless another one follows before the next backward pass."""
        whole = self._now >= self._last  # all that took part in the step before
        self._ended = self._teller.end(self._ended, self._take_loss(), whole, self._optimizers)

    def _commit(self) -> None:
        ended, self._ended = self._ended, None
        fresh = self._now.isdisjoint(self._known)  # another training's first step
        if not fresh and self._now.isdisjoint(self._last):
            self._teller.note(in_turn=True)
        if self._passes > 1:
            self._teller.note(passes=self._passes)
        self._teller.commit(ended, fresh)
        self._known |= self._now
        self._last, self._now, self._passes = self._now, set(), 0

    def finish(self) -> None:
        """Take what ended last for a step: nothing follows."""
        if self._watched is not None and not self._eager:
            self._look_at_weights()
            self._known.clear()  # when it ended is not known, so that it has no time
        if self._ended is not None:
            self._commit()

    def _find_loss(self, outputs: Any) -> Any:
        """Return the only number that a backward pass begins at, before it was scaled; None if it
        begins at others."""
        outputs = (outputs,) if hasattr(outputs, "detach") else tuple(outputs)
        if len(outputs) != 1 or outputs[0].numel() != 1:
            return None
        (loss,), scaled = outputs, self._scaled
        self._scaled = None
        return scaled[1] if scaled and scaled[0]() is loss else loss.detach()

    def _take_loss(self) -> Any:
        """Return the loss of a step of one backward pass."""
        loss, self._loss = self._loss, None
        return loss if self._passes == 1 else None

    # ---------------------------------------------------------------- compiled optimizers

    def _look_at_weights(self) -> None:
        """Take weights that have changed since the last backward pass for a step of an optimizer
        that is compiled, of those that there are."""
        base, before = sys.modules["torch.optim.optimizer"].Optimizer, self._watched
        if before is None:
            found = [one for one in gc.get_objects() if issubclass(type(one), base)]
            groups = [group["params"] for one in found for group in one.param_groups]
            self._watched = [(weakref.ref(each[0]), each[0]._version) for each in groups if each]
            return
        now = [(ref, weight._version) for ref, _ in before if (weight := ref()) is not None]
        if now != before:
            self._watched = now
            self._now.add(0)
            self._ended = self._teller.end(self._ended, self._take_loss(), True, ())
