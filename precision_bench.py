"""`bench` by the name of the package that is installed: `import precision_bench`, or
``python -m precision_bench``. In a folder that has a bench.py of its own, `step` and `epoch` are
here for a script, and the command is precision-bench.
"""

from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_HERE = Path(__file__).with_name("bench")
_spec = spec_from_file_location("precision_bench.script", _HERE / "workers" / "script.py")
assert _spec is not None
assert _spec.loader is not None
_script = module_from_spec(_spec)
_spec.loader.exec_module(_script)

step, epoch = _script.step, _script.epoch


def __getattr__(name: str) -> Any:
    """What `bench` has. Raises ImportError: another bench hides it."""
    package = import_module("bench")
    if Path(package.__file__ or "").parent != _HERE:
        raise ImportError(f"{package.__file__} hides the package bench: rename that file")
    return getattr(package, name)


if __name__ == "__main__":
    __getattr__("__name__")  # refuses one that hides it
    import_module("bench.__main__").run()
