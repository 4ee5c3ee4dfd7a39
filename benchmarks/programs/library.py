"""Which library the programs run on: nothing else in them says so. `LIBRARY=torch` is the reference, or the drop-in."""

import importlib
import os
from typing import Any

_ROOTS = {"telegrad": "telegrad", "torch": "torch.distributed"}
_HOMES = {"RemoteModule": "nn", "DistributedOptimizer": "optim"}
_ROOT = _ROOTS[os.environ.get("LIBRARY", "telegrad")]


def __getattr__(name: str) -> Any:
    """Imported when a program asks for it, so that each pays for what it uses."""
    if name in ("rpc", "autograd"):
        return importlib.import_module(f"{_ROOT}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{_ROOT}.{_HOMES[name]}"), name)
    raise AttributeError(name)
