"""The connection to a Ray cluster that already runs, or to one started on this machine alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from bench.environment.packages import describe_install
from bench.errors import UsageError
from bench.executors.ray.caretaker import MARK
from bench.text import clean

ADDRESS = "RAY_ADDRESS"
"""Ray's own environment variable: the cluster to join if no address is given."""

LOCAL = "local"
"""The address that starts a cluster on this machine. Without it Ray may join a leftover cluster."""

AUTO = "auto"
"""The address of whichever cluster was started on this machine last."""

_CLIENT = "ray://"
_STORE_BYTES = 100 * 2**20  # little but traces is sent; Ray's default is a third of the memory
_LONGEST_FOLDER = 40  # a socket's path has at most 107 characters, and Ray needs 60 of them
_ANSWER_S = 5.0
_END_S = 10.0

_SETTINGS: Mapping[str, str] = {
    "RAY_worker_niceness": "0",  # Ray's own is 15
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns of a change in its next version
}


class Cluster:
    """A connection to Ray, one per process.

    ``address`` is ``HOST:PORT`` of the cluster to join, of which this machine must be a node. If it
    is None, the variable `ADDRESS` is used, or else a cluster is started on this machine, which
    ends with this process, however that ends. Raises UsageError: ray is not installed, there is no
    such cluster, or none can be started.
    """

    def __init__(self, address: str | None) -> None:
        if find_spec("ray") is None:
            raise UsageError(
                f"--executor ray: ray is not installed for {sys.executable}; "
                f"{describe_install(['ray'])}"
            )
        self._caretaker: subprocess.Popen[bytes] | None = None
        self.address = address or os.environ.get(ADDRESS) or LOCAL
        if self.address.startswith(_CLIENT):
            raise UsageError(
                f"--address {self.address}: the sweep must run on a node of the cluster; start it "
                "there, with --address HOST:6379"
            )
        if self.address not in (LOCAL, AUTO):
            _refuse_silent(self.address)
        try:
            if self.address == LOCAL:
                self._start()
            else:
                _connect(self.address)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            self.end()
            why = clean(next(iter(str(error).splitlines()), type(error).__name__))
            raise UsageError(_name_remedy(self.address, why)) from error

    def close(self) -> None:
        import ray

        with _own_signals():
            ray.shutdown()
        self.end()

    def end(self) -> None:
        """End all processes of the cluster that was started here, if any, at once."""
        if self._caretaker is None:
            return
        assert self._caretaker.stdin is not None
        self._caretaker.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._caretaker.wait(_END_S)

    def _start(self) -> None:
        place = tempfile.gettempdir()
        self.folder = folder = tempfile.mkdtemp(
            prefix="bench-ray-", dir=place if len(place) <= _LONGEST_FOLDER else "/tmp"
        )
        self._caretaker = subprocess.Popen(
            [sys.executable, "-m", "bench.executors.ray.caretaker", folder],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C does not end it
        )
        # files that killed workers leave behind are removed with the folder
        settings = {**_SETTINGS, MARK: folder, "TMPDIR": folder}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            _connect(
                LOCAL, include_dashboard=False, object_store_memory=_STORE_BYTES, _temp_dir=folder
            )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _refuse_silent(address: str) -> None:
    """Raise UsageError if nothing listens at ``address``: Ray would try for minutes, verbosely."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(_name_remedy(address, clean(str(error)))) from None


def _name_remedy(address: str, why: str) -> str:
    if address == LOCAL:
        return f"--executor ray: no local cluster can be started ({why}); see `ray start --help`"
    return (
        f"--address {address}: no Ray cluster can be joined there ({why}); start one with "
        "`ray start --head` there and `ray start --address` here, and set RAY_AUTH_MODE=token if "
        "it demands a token"
    )


def _connect(address: str, **settings: Any) -> None:
    import ray

    # Ray prints the last lines of a lost node's log into the tables on standard output
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    with _own_signals():
        ray.init(
            address=address,
            namespace="bench",
            log_to_driver=False,
            logging_level=logging.ERROR,
            **settings,
        )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers afterwards: `ray.init` sets one for SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
