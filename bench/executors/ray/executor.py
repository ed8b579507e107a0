"""Lanes on a Ray cluster: one for each GPU of each node, or one for each node without GPUs."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.data import DatasetInfo
from bench.environment.asking import ProcessAnswer
from bench.environment.source import hash_code
from bench.environment.variables import find_variables
from bench.errors import UnsupportedError, UsageError
from bench.executors import (
    ALL,
    Executor,
    Images,
    Job,
    Lane,
    Listener,
    Settings,
    ShortageError,
    Stopping,
)
from bench.executors.ray.cluster import Cluster
from bench.executors.ray.station import HEARTBEAT_S, Place, Report, Station
from bench.gpu.cards import Card
from bench.origin import EXECUTORS
from bench.record import Outcome, Status
from bench.text import clean, count, last_line
from bench.yardstick import Yardstick

_OPEN_S = 120.0  # actors start one after the other, and each imports the harness
_SILENT_S = 12 * HEARTBEAT_S
_VERDICT_S = 30.0
_STOP_S = 30.0  # a worker has 3 s to end, then its memory is freed
_KILL_S = 3.0
_POLL_S = 0.1
_SAID = 300  # characters kept of Ray's messages
_TRIES = 3  # attempts to open a lane on a node


@dataclass(frozen=True)
class Node:
    """A node of the cluster as Ray knows it; ``label`` names it in lanes."""

    id: str
    label: str
    cpus: float
    gpus: int


@dataclass(eq=False)
class RemoteStation:
    """A station that an actor holds on ``node``; it has a lane once it has answered."""

    actor: Any
    node: Node
    answer: Any
    watch: Any
    card: Card | None = None
    lane: Lane = field(default_factory=Lane)

    @property
    def kind(self) -> object:
        return self.card and (self.card.name, self.card.memory_bytes)

    def is_beside(self, other: RemoteStation) -> bool:
        return self is not other and self.node.id == other.node.id and self.kind == other.kind


class RayExecutor(Executor):
    """An executor that runs each case in a worker on a cluster node, started and watched by an
    actor there. Ray's retries are off, as they would hide attempts: a lost lane is a lost case.
    Raises UsageError: there is no cluster, see `Cluster`."""

    stations = EXECUTORS["subprocess"].place
    """The executor that stations run cases with; tests use another."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._cluster = Cluster(settings.address)
        self._device, self._most = "", ALL
        self._opening: list[RemoteStation] = []
        self._open: dict[str, RemoteStation] = {}
        self._labels: dict[str, str] = {}  # by node id, including nodes that are gone
        # by node id: why its lanes could not be opened, and the number of failures since one was
        self._failures: dict[str, tuple[str, int]] = {}
        self._together: dict[object, int] = {}  # by kind: the most GPUs that one node ever had open
        self._gone: list[Lane] = []  # lost during a question
        self._busy: set[str] = set()  # lanes with a run, which itself notices that they are gone
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def open_lanes(self, device: str, wanted: int | None = None) -> Sequence[Lane]:
        """Open one lane for each GPU of the cluster, on a CPU for each node, or as many as wanted.

        This waits until all are open, but at most two minutes: lanes whose GPU is in use by others
        join later. Raises UsageError: there are not that many, or none can be opened; it says why.
        """
        self._device, self._most = device, wanted or ALL
        there = sum(self._count(node) for node in self._list_nodes())
        what = "GPU" if device == "cuda" else "node"
        if not there:
            flag = "--num-gpus, or use --device cpu" if device == "cuda" else "--num-cpus"
            raise UsageError(
                f"the Ray cluster {self._cluster.address} offers no {device}; start its nodes with "
                f"{flag}"
            )
        if self._most > there:
            raise UsageError(
                f"--lanes {self._most}: the Ray cluster {self._cluster.address} has "
                f"{count(there, what)}; give at most {there}"
            )
        lanes: list[Lane] = []
        until = time.monotonic() + _OPEN_S
        while True:
            lanes += self.join_lanes()
            if not self._opening or time.monotonic() > until:
                break
            time.sleep(_POLL_S)
        # gpu2 comes before gpu10
        lanes.sort(key=lambda lane: (lane.host, len(lane.name), lane.name))
        if not lanes:
            why = "; ".join(dict.fromkeys(why for why, _ in self._failures.values()))
            why = why or "others use all of it; see `ray status`"
            raise UsageError(f"no lane can be opened on the Ray cluster: {why}")
        return lanes

    def join_lanes(self) -> Sequence[Lane]:
        """Return lanes opened since the last call; start to open those that nodes are lacking."""
        with self._lock:
            self._begin_opening()
            return [*self._finish_opening()]

    def lose_lanes(self) -> Sequence[Lane]:
        import ray

        watched = {
            station.watch: station
            for name, station in [*self._open.items()]
            if name not in self._busy
        }
        gone, _ = ray.wait([*watched], num_returns=len(watched), timeout=0) if watched else ([], [])
        for watch in gone:
            self._lose(watched[watch])
        before, self._gone = self._gone, []
        return [*before, *(watched[watch].lane for watch in gone)]

    def gather(self, lane: Lane, device: str, size: int) -> Lane:
        """Return the lane's GPU and others of its kind, on its node or on one that has enough of
        them; on a CPU, the cores of the lane's node.

        One station starts all workers of a case. It may use the GPUs of the other stations, which
        belong to this sweep and are idle.
        """
        if size == 1:
            return lane
        own = self._open.get(lane.name)
        if own is None:
            raise ShortageError(f"lane {lane.name} is gone")
        if device == "cpu":
            try:
                found: Lane = self._ask(lane, "gather", lane, device, size)
            except _GoneError as error:
                raise ShortageError(str(error)) from error
            return replace(found, name=lane.name, host=lane.host)
        stations = [*self._open.values()]
        for first in (own, *stations):
            alike = [first, *(p for p in stations if p.is_beside(first))]
            if first.kind == own.kind and size <= len(alike):
                gpus = tuple(gpu for station in alike[:size] for gpu in station.lane.gpus)
                return replace(first.lane, gpus=gpus)
        takes = f"world size {size} takes {size} GPUs of one kind in one machine"
        most = max(self._together[own.kind], self._count_most(own.kind))
        if size <= most:
            raise ShortageError(f"{takes}; one node has or had {most}, and none has so many open")
        raise UnsupportedError(f"{takes}; no node of the cluster has more than {most}")

    def examine(
        self, lane: Lane, devices: Sequence[str], models: Sequence[str], timeout_s: float, **_: Any
    ) -> ProcessAnswer:
        try:
            answer: ProcessAnswer = self._ask(lane, "examine", lane, devices, models, timeout_s)
        except UsageError as error:
            return ProcessAnswer(str(error))
        return answer

    def prepare(self, lane: Lane, images: Images) -> DatasetInfo:
        folder = (images.data_dir or Path("data")).absolute()
        info: DatasetInfo = self._ask(lane, "prepare", lane, replace(images, data_dir=folder))
        return info

    def rate(self, lane: Lane, device: str, seconds: float) -> Yardstick:
        try:
            found: Yardstick = self._ask(lane, "rate", lane, device, seconds)
        except UsageError as error:
            return Yardstick(reasons={"rates": str(error)})
        return found

    def run(self, job: Job, on_event: Listener, stopping: Stopping) -> Outcome:
        """Run one case on its lane's node; `lost` if the node or the actor went away."""
        import ray

        station = self._open.get(job.lane.name)
        if station is None:
            return Outcome(Status.LOST, f"lane {job.lane.name} is gone")
        number = next(self._numbers)
        self._busy.add(job.lane.name)
        try:
            outcome = self._follow(station, number, job, on_event, stopping)
        except _SilentError as error:
            outcome = Outcome(Status.LOST, str(error))
        except ray.exceptions.RayTaskError as error:
            return Outcome(Status.ERROR, f"on {station.lane.name}: {clean(repr(error.cause))}")
        except ray.exceptions.OutOfMemoryError as error:
            reason = f"by Ray, from lack of host memory: {_explain(error)}"
            outcome = Outcome(Status.KILLED, reason)
        except ray.exceptions.RayError as error:
            preempted, why = self._find_cause(station, error, stopping)
            outcome = Outcome(Status.LOST, why, preempted=preempted)
        else:
            return outcome
        finally:
            self._busy.discard(job.lane.name)
        self._lose(station)
        if stopping():
            return Outcome(Status.INTERRUPTED, f"the sweep was stopped; {outcome.reason}")
        return outcome

    def kill(self) -> None:
        """End all stations and their cases, at once. A signal handler calls this, perhaps during a
        call to Ray, so another thread does the work."""
        ending = threading.Thread(target=self._end_stations, daemon=True)
        ending.start()
        ending.join(_KILL_S)
        self._cluster.end()

    def close(self) -> None:
        self._end_stations()
        self._cluster.close()

    def _follow(
        self, station: RemoteStation, number: int, job: Job, on_event: Listener, stopping: Stopping
    ) -> Outcome:
        """Send a job to a station and follow its reports to the last. Raises RayError: the station
        is gone. Raises _SilentError: it does not answer any more."""
        import ray

        reports = station.actor.run.options(num_returns="streaming").remote(number, job)
        heard, told = time.monotonic(), 0.0
        while True:
            # an untimed wait would not notice that the sweep is stopped
            ready, _ = ray.wait([reports], timeout=_POLL_S)
            now = time.monotonic()
            if stopping() and not told:
                station.actor.stop.remote(number)
                told = now
            if not ready:
                if told and now - told > _STOP_S:
                    raise _SilentError(f"{station.lane.name} did not stop within {_STOP_S:g} s")
                if now - heard > _SILENT_S:
                    raise _SilentError(f"{station.lane.name} said nothing for {_SILENT_S:g} s")
                continue
            heard = now
            report: Report = ray.get(next(reports))  # the last one has the outcome
            _keep(job.log, report.log, "ab")
            _keep(job.trace, report.trace, "wb")
            for event in report.events:
                on_event(event)
            if report.outcome is not None:
                return report.outcome

    def _find_cause(
        self, station: RemoteStation, error: Exception, stopping: Stopping
    ) -> tuple[bool, str]:
        """Return whether a station was lost because its machine was preempted, and the reason.

        At first Ray knows only that an actor does not answer. It says who ended the node once it
        has declared the node dead, up to half a minute later.
        """
        import ray

        until = time.monotonic() + _VERDICT_S
        while isinstance(error, ray.exceptions.ActorUnavailableError) and not stopping():
            if time.monotonic() > until:
                break
            try:
                ray.get(station.actor.describe.remote(), timeout=_KILL_S)
                break  # it is back, but its run is lost
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError as later:
                error = later
            time.sleep(_POLL_S)
        preempted = isinstance(error, ray.exceptions.RayActorError) and error.preempted
        if preempted:
            return preempted, f"{station.node.label} was taken away"
        alive = any(node.id == station.node.id for node in self._list_nodes())
        what = f"the lane's process on {station.node.label} ended" if alive else station.node.label
        return preempted, f"{what}{'' if alive else ' went away'}: {_explain(error)}"

    def _ask(self, lane: Lane, question: str, *arguments: Any) -> Any:
        """Have the executor at a lane's station answer. Raises UsageError or UnsupportedError as
        the executor does; UsageError: it failed otherwise; _GoneError: the station is gone."""
        import ray

        station = self._open.get(lane.name)
        if station is None:
            raise _GoneError(f"lane {lane.name} is gone")
        try:
            return ray.get(station.actor.ask.remote(question, *arguments))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, (UsageError, UnsupportedError)):
                raise error.cause from None
            raise UsageError(f"lane {lane.name}: {clean(repr(error.cause))}") from error
        except ray.exceptions.RayError as error:
            self._lose(station)
            self._gone.append(station.lane)
            raise _GoneError(f"lane {lane.name} was lost: {_explain(error)}") from error

    def _list_nodes(self) -> list[Node]:
        """Return the nodes that are alive, sorted by name; nodes of one host are numbered."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        ids = {node["NodeID"] for node in alive}
        for node in alive:
            if node["NodeID"] in self._labels:
                continue
            host = node["NodeManagerHostname"]
            taken = {label for id, label in self._labels.items() if id in ids}
            names = (host, *(f"{host}-{number}" for number in range(2, len(ids) + 2)))
            self._labels[node["NodeID"]] = next(name for name in names if name not in taken)
        nodes = [
            Node(
                node["NodeID"],
                self._labels[node["NodeID"]],
                node["Resources"].get("CPU", 0.0),
                int(node["Resources"].get("GPU", 0.0)),
            )
            for node in alive
        ]
        return sorted(nodes, key=lambda node: node.label)

    def _count(self, node: Node) -> int:
        return node.gpus if self._device == "cuda" else int(node.cpus >= 1)

    def _begin_opening(self) -> None:
        nodes = self._list_nodes()
        alive = {node.id for node in nodes}
        self._opening = [station for station in self._opening if station.node.id in alive]
        stations = [*self._open.values(), *self._opening]
        room = (self._most or sys.maxsize) - len(stations)
        for node in nodes:
            _, failures = self._failures.get(node.id, ("", 0))
            if failures >= _TRIES * self._count(node):
                continue
            lack = self._count(node) - sum(station.node.id == node.id for station in stations)
            for _ in range(min(lack, room)):
                self._opening.append(self._start(node))
                room -= 1

    def _start(self, node: Node) -> RemoteStation:
        """Start an actor on a node. On a CPU it takes all cores, like a worker, unless shared."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        whole = self._device == "cpu" and not self.settings.allow_shared
        actor = (
            ray.remote(Station)
            .options(
                num_gpus=int(self._device == "cuda"),
                num_cpus=int(node.cpus) if whole else 0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=4,  # to watch, run, stop and kill
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote(self.stations, self.settings, str(Path.cwd()), find_variables(os.environ))
        )
        return RemoteStation(actor, node, actor.describe.remote(), actor.watch.remote())

    def _finish_opening(self) -> Iterator[Lane]:
        """Open the lanes of the stations that have answered, or refuse them; yield the lanes."""
        import ray

        for station in [*self._opening]:
            ready, _ = ray.wait([station.answer], timeout=0)
            if not ready:
                continue
            self._opening.remove(station)
            try:
                place: Place = ray.get(station.answer)
            except ray.exceptions.RayError as error:
                self._give_up(station, _explain(error))
                continue
            if why := refuse(place, self.settings.allow_shared):
                self._give_up(station, why, _TRIES)
                continue
            self._failures.pop(station.node.id, None)
            station.card = place.card
            station.lane = self._name(station.node, place.card)
            self._enter(station)
            yield station.lane

    def _enter(self, station: RemoteStation) -> None:
        self._open[station.lane.name] = station
        beside = sum(other.is_beside(station) for other in self._open.values())
        self._together[station.kind] = max(self._together.get(station.kind, 0), 1 + beside)

    def _count_most(self, kind: object) -> int:
        """Return the most GPUs of a kind that one node may have, at most the number wanted. A GPU
        that is down or in use, perhaps since before this start, is assumed to be of that kind: a
        case with a shortage is tried again, an unsupported one never is."""
        other = Counter(
            station.node.id for station in [*self._open.values()] if station.kind != kind
        )
        most = max((node.gpus - other[node.id] for node in self._list_nodes()), default=0)
        return min(most, self._most or sys.maxsize)

    def _name(self, node: Node, card: Card | None) -> Lane:
        """Return a lane, named by its node and by its GPU's index in NVML."""
        if self._device == "cpu":
            return Lane(node.label, host=node.label)
        numbers = itertools.count() if card is None else itertools.count(card.index)
        names = (f"{node.label}-gpu{number}" for number in numbers)
        name = next(name for name in names if name not in self._open)
        return Lane(name, () if card is None else (card.uuid,), host=node.label)

    def _give_up(self, station: RemoteStation, why: str, times: int = 1) -> None:
        import ray

        with suppress(Exception):
            ray.kill(station.actor)
        told = f"{station.node.label}: {why}"
        _, before = self._failures.get(station.node.id, ("", 0))
        self._failures[station.node.id] = told, before + times
        print(f"warning: no lane on {told}", file=sys.stderr, flush=True)

    def _lose(self, station: RemoteStation) -> None:
        import ray

        with self._lock:
            if self._open.get(station.lane.name) is station:
                del self._open[station.lane.name]
        with suppress(Exception):
            ray.kill(station.actor)

    def _end_stations(self) -> None:
        import ray

        stations = [*self._open.values(), *self._opening]
        killed = [station.actor.kill.remote() for station in stations if station.lane.name]
        with suppress(Exception):
            ray.wait(killed, num_returns=len(killed), timeout=_KILL_S / 2)
        for station in stations:
            with suppress(Exception):
                ray.kill(station.actor)


class _GoneError(UsageError):
    """A station that was asked a question is gone."""


class _SilentError(Exception):
    """A station does not answer, and Ray has not noticed."""


def refuse(place: Place, allow_shared: bool = False) -> str:
    """Return why nothing can be measured at ``place``, and what to do; empty if it can."""
    if place.code != hash_code():
        return (
            f"its code of this harness is {place.code}, and here it is {hash_code()}; install the "
            "same on all nodes"
        )
    if place.niceness > 0:
        return (
            f"Ray runs its processes there at a niceness of {place.niceness}; set "
            "RAY_worker_niceness=0 where `ray start` is called"
        )
    if place.neighbours and not allow_shared:
        return f"the GPU is in use by {place.neighbours}; end them, or measure with --allow-shared"
    return ""


def _explain(error: Exception) -> str:
    """Return the text of a Ray error as one line, without lines that are only a name and a value.
    If an actor could not be created, the last line of the traceback says why."""
    if "Traceback" in str(error):
        return clean(last_line(str(error)))
    lines = [clean(line).strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not re.fullmatch(r"\w+: \S*", line)]
    return " ".join(told)[:_SAID]


def _keep(file: Path | None, data: bytes, mode: str) -> None:
    if file is not None and data:
        with suppress(OSError), file.open(mode) as kept:
            kept.write(data)
