"""Functions and classes without a name that leads back to them: these travel as their code.

Imported where that is wanted, which is seldom: cloudpickle would make each start longer.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from types import ModuleType
from typing import Any

import cloudpickle
from torch import Tensor

from telegrad.wire.reducers import reduce


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Where something has no name."""

    same_program: bool
    tensors: list[Tensor]
    references: list[Any]
    plain: bool

    reducer_override = reduce

    def by_value(self, obj: Any) -> Any:
        return super().reducer_override(obj)

    def dump_by_value(self, obj: Any) -> bytes:
        return dump_by_value(obj)


def _module(module: ModuleType) -> Any:
    return importlib.import_module, (module.__name__,)


# Code brings along each module that it seems to name, such as torch.ops where it has an attribute `ops`.
for _kind in {type(module) for module in list(sys.modules.values())} - {ModuleType}:
    if issubclass(_kind, ModuleType):
        copyreg.pickle(_kind, _module)


def dump_by_value(obj: Any) -> bytes:
    register_spawned_main()
    return cloudpickle.dumps(obj)  # type: ignore[no-any-return]


def register_spawned_main() -> None:
    """In a spawned child the main program's functions belong to `__mp_main__`, which no other process can import."""
    spawned = sys.modules.get("__mp_main__")
    if spawned is not None and "__mp_main__" not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(spawned)
