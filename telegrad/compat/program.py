"""Run another program as if Python had started it directly.

Its module stays `__main__` after its code has ended, because other workers may still call its functions until the
interpreter exits. (`runpy` restores the former `__main__`.)
"""

from __future__ import annotations

import builtins
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any


def run_script(path: str) -> None:
    """Do the same as `python path`."""
    loader = SourceFileLoader("__main__", path)
    try:
        code = loader.source_to_code(loader.get_data(path), path)
    except OSError as error:
        sys.exit(f"python -m telegrad: can't open file {path!r}: {error.strerror}")
    _run(code, __file__=path, __loader__=loader, __cached__=None)


def run_module(name: str) -> None:
    """Do the same as `python -m name`."""
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        sys.exit(f"python -m telegrad: no module named {name}")
    sys.argv[0] = str(spec.origin)
    about = {"__spec__": spec, "__file__": spec.origin, "__loader__": spec.loader, "__cached__": spec.cached}
    _run(code, __package__=spec.parent, **about)


def _run(code: CodeType, **about: Any) -> None:
    module = ModuleType("__main__")
    vars(module).update(about, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))
