"""Imported by Python when it starts in a process of a user's command, instead of another of this
name, which it imports then.

It imports nothing of the harness, and nothing that Python has not imported by then; whatever fails
in it is not the script's problem.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # without typing, which takes 2 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LISTING, SINCE = "BENCH_FILES", "BENCH_FILES_SINCE"
"""Environment variables: the file that is written to, and a time in ns, see `Watch`."""

HOOK = "BENCH_HOOK"
"""Environment variable: the module, by its path, whose ``arm`` sees the steps of a process that has
imported torch."""

TEXTS = (".py", ".sh", ".yaml", ".yml", ".toml", ".json", ".cfg", ".ini", ".conf", ".gin")
"""Ends of names of programs, and of what configures them."""

MOST_BYTES = 1 << 20
"""The size of the largest text: a larger one is data."""

_MOST_DATA, _MOST_WRITTEN = 100, 1000
_MOST_TOLD = 2000  # characters of an error
_EVENTS = {
    "open": (0, "read"),
    "cpython.run_file": (0, "runs"),
    "os.rename": (1, "wrote"),
    "os.mkdir": (0, "made"),
}
_WRITES = os.O_WRONLY | os.O_RDWR


class Watch:
    """Tells of each file that the process opens, once, by an audit hook of Python's, and of an
    error that ends it.

    A text is told with a hash of its content, as it is when it is opened. Of other files the first
    hundred are told, and all that were changed after ``since_ns``: of a data set, no more. Python's
    own files, and those of installed packages, are left aside.
    """

    def __init__(self, tell: Callable[[str], object], since_ns: int = 0) -> None:
        self._tell, self._since = tell, since_ns
        self._seen: set[tuple[str, str]] = set()
        self._busy: set[int] = set()  # threads that look at a file, by which they open it
        self._data = self._written = 0
        library = os.path.dirname(os.__file__)
        own = os.path.abspath(__file__).rpartition("/base/inject/")[0] + os.sep
        self._aside = (library, own, "/proc/", "/sys/", "/dev/")

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        at = _EVENTS.get(event)
        if at is None:  # 12 a step of torch's
            if event == "sys.excepthook":
                self.tell_process("raised", args[1].__name__, args[2])
            return
        path, how = args[at[0]], at[1]
        if how == "read" and args[2] & _WRITES:
            how = "added" if args[2] & os.O_APPEND else "wrote"
        me = get_ident()
        if me in self._busy or isinstance(path, int):
            return
        self._busy.add(me)
        try:
            self._look(os.path.abspath(os.fsdecode(path)), how)
        except Exception:  # no such file, no place to write: nothing of the script's
            pass
        finally:
            self._busy.discard(me)

    def tell_process(self, how: str, name: str, message: object = "") -> None:
        """Tell that this process has begun, with its Python, what of its steps is seen, or that an
        error ends it that nothing caught."""
        try:
            text = str(message)[:_MOST_TOLD]
            self._tell(write_line(how, str(os.getpid()), os.getppid(), name, text))
        except Exception:
            pass

    def tell_versions(self, *versions: object) -> None:
        """Tell those of Python, torch, CUDA and cuDNN, of which some may be None."""
        texts = (None if one is None else str(one) for one in versions)
        self._tell(write_line("versions", str(os.getpid()), *texts))

    def _look(self, path: str, how: str) -> None:
        if path.startswith(self._aside) or "/site-packages/" in path or "/dist-packages/" in path:
            return
        if path.endswith(".pyc"):  # in __pycache__, or where PYTHONPYCACHEPREFIX says
            if how == "read":
                find = sys.modules["_frozen_importlib_external"].source_from_cache
                self._look(os.path.abspath(find(path)), how)
            return
        if "/__pycache__/" in path or (how, path) in self._seen:
            return
        if how in ("wrote", "added", "made"):
            if self._written < _MOST_WRITTEN:
                self._written += 1
                self._seen.add((how, path))
                self._tell(write_line(how, path))
            return
        stat = os.stat(path)
        about = stat.st_mtime_ns, stat.st_size
        if (path.endswith(TEXTS) and stat.st_size <= MOST_BYTES) or how == "runs":
            with open(path, "rb") as file:
                content = _hash(file.read())
            self._seen.add((how, path))
            self._tell(write_line(how, path, *about, content))
            return
        new = stat.st_mtime_ns >= self._since > 0
        if not new and self._data >= _MOST_DATA:
            return
        self._data += not new
        self._seen.add((how, path))
        self._tell(write_line(how, path, *about))


class Finder:
    """Calls ``arm`` once torch is imported, and finds nothing itself. Many only look whether there
    is a torch, by `importlib.util.find_spec`, before it is imported."""

    def __init__(self, arm: Callable[[], object]) -> None:
        self._arm = arm

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                del spec.loader.exec_module
                run(module)
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                self._arm()

            spec.loader.exec_module = exec_module
        return spec


def _hash(content: bytes) -> str:
    try:
        from _sha2 import sha256
    except ImportError:  # before Python 3.12
        from _sha256 import sha256
    return str(sha256(content).hexdigest()[:12])


def write_line(*fields: object) -> str:
    return ascii(fields)


def _append_to(listing: str) -> Callable[[str], object]:
    def append(line: str) -> None:
        # opened for each line: the script may close all descriptors, and get this one's number
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(listing, flags, 0o600)
        try:
            os.write(descriptor, (line + "\n").encode("ascii"))
        finally:
            os.close(descriptor)

    return append


def _arm_hook() -> None:
    try:
        torch, python = sys.modules["torch"], sys.version.split()[0]
        versions = torch.__version__, torch.version.cuda, torch.backends.cudnn.version()
        _watch.tell_versions(python, *versions)
        if not os.environ.get(HOOK):
            return
        from importlib.util import module_from_spec, spec_from_file_location

        spec: Any = spec_from_file_location("_bench_script", os.environ[HOOK])
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.arm(lambda what: _watch.tell_process("hook", what))
    except MemoryError:  # a limit that was asked for
        raise
    except Exception as error:
        _watch.tell_process("hook", "failed", f"{type(error).__name__}: {error}")


def _import_hidden() -> None:
    """Import the `sitecustomize` that this one hides, as Python does where it finds one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


if __name__ == "sitecustomize":
    if os.environ.get(LISTING):
        try:
            _watch = Watch(_append_to(os.environ[LISTING]), int(os.environ.get(SINCE) or 0))
            _watch.tell_process("began", "", sys.executable)
            sys.addaudithook(_watch.see)
            sys.meta_path.insert(0, Finder(_arm_hook))  # type: ignore[arg-type]
        except Exception:
            pass
    _import_hidden()
