"""Questions about devices and models, answered by a separate process.

So a sweep itself never imports torch or the user's code, or holds a CUDA context.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import IO, Any

from bench.data import DatasetInfo
from bench.environment.device import Platform
from bench.environment.host import describe_card, describe_host
from bench.errors import UsageError
from bench.fingerprint import Fingerprint, parse_request, split_subject
from bench.plain import read_value
from bench.processes import command_module
from bench.record import Environment
from bench.text import last_line


@dataclass(frozen=True)
class DeviceAnswer:
    """Description of a device by torch: fields of `Environment`, or why it cannot be used."""

    environment: dict[str, Any] = field(default_factory=dict)
    fp16_native: bool = True
    error: str = ""
    bf16_native: bool = True


@dataclass(frozen=True)
class ProcessAnswer:
    """A fresh process's answer about torch, devices by name and models by name.

    ``error`` says why torch cannot be used at all. A model is a `Fingerprint`, or the line that
    says what is wrong with it. ``host`` describes the machine and the cores of the process; None
    means this machine.
    """

    error: str = ""
    devices: dict[str, DeviceAnswer] = field(default_factory=dict)
    models: dict[str, Fingerprint | str] = field(default_factory=dict)
    host: Environment | None = None

    def platform(self, device: str) -> Platform:
        """Return the device together with its host. Raises UsageError: torch is missing or broken,
        or cannot use the device."""
        if why := self.error or self.devices[device].error:
            raise UsageError(why)
        answer = self.devices[device]
        environment = replace(self.host or describe_host(), **answer.environment)
        if environment.gpu_uuid is not None and self.host is None:
            environment = replace(environment, **describe_card(environment.gpu_uuid))
        return Platform(environment, answer.fp16_native, answer.bf16_native)

    def fingerprint(self, model: str) -> Fingerprint:
        """Return the fingerprint of a ``model`` named by `bench.fingerprint.name_subject`. Raises
        UsageError: the model cannot be imported, built or run, or torch cannot be used."""
        found = self.error or self.models[model]
        if isinstance(found, str):
            raise UsageError(found)
        return found


ASK_S = 600.0
"""Time limit for an answer about torch, devices and models, in s."""

AnsweringProcess = AbstractContextManager[tuple[int, IO[bytes]]]
"""A process that answers: its id, and the stream to which it writes the answer, in one line. It
leads its own session, which is ended with it on exit."""


@contextmanager
def start_answering(
    names: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]
) -> Iterator[tuple[int, IO[bytes]]]:
    """Ask a new Python process; its error output is written to ``errors``."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command_module("bench.environment", *names),
        stdin=pipe,
        stdout=pipe,
        stderr=errors,
        start_new_session=True,  # so that whatever a user's model starts can be ended with it
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout
            process.communicate()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(
    devices: Sequence[str],
    models: Sequence[str] = (),
    *,
    timeout_s: float = ASK_S,
    look: Callable[[ProcessAnswer, int], None] = lambda answer, pid: None,
    variables: Mapping[str, str] | None = None,
    start: Callable[
        [Sequence[str], Mapping[str, str], IO[bytes]], AnsweringProcess
    ] = start_answering,
) -> ProcessAnswer:
    """Ask a fresh process about devices ("cuda" or "cpu") and about networks and workloads, written
    as by `bench.fingerprint.ExamineRequest`. ``look`` is called with the answer and the process id
    while the process still holds the devices; the environment ``variables`` choose the GPU;
    ``start`` starts the process."""
    late = False
    pid = 0
    answer: ProcessAnswer | None = None

    def end() -> None:
        nonlocal late
        late = True
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    with TemporaryFile() as errors:
        timer = threading.Timer(timeout_s, end)
        try:
            with start([*devices, *models], {**os.environ, **(variables or {})}, errors) as asked:
                pid, said_to = asked
                timer.start()  # only now is there a process to end
                with suppress(ValueError, TypeError):
                    answer = read_value(ProcessAnswer, json.loads(said_to.readline()))
                if answer is not None:
                    look(answer, pid)
        finally:
            timer.cancel()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if answer is not None:
        return answer
    if late and models:
        what = ", ".join(split_subject(parse_request(text).subject)[0] for text in models)
        return ProcessAnswer(
            f"model {what}: not built and run within {timeout_s:g} s; raise --timeout"
        )
    return ProcessAnswer(
        f"torch cannot be asked about the device: {last_line(said)}; install torch>=2.9"
    )


def probe(device: str) -> Platform:
    """Ask a fresh process to describe ``device`` ("cuda" or "cpu"). Raises UsageError: torch is
    missing or broken, or cannot use the device."""
    return ask([device]).platform(device)


def with_inputs(
    environment: Environment, data: DatasetInfo, model: Fingerprint | None
) -> Environment:
    """Return a copy of ``environment`` with the dataset and, if it was examined, the model."""
    inputs = replace(
        environment,
        dataset_fingerprint=data.fingerprint,
        dataset_source=data.source,
        train_images=data.train_images,
        test_images=data.test_images,
        dataset_classes=data.classes or None,
    )
    if model is not None:
        inputs.model_parameters = model.parameters
        inputs.model_structure = model.structure
        inputs.model_source = model.source
        if model.workload is not None:
            inputs.train_images = model.workload.units
            inputs.test_images = model.workload.test_units
            inputs.unit = model.workload.unit
    return inputs
