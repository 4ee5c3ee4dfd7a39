"""Functions and classes without a name that leads back to them: these travel as their code.

Imported where that is wanted, which is seldom: cloudpickle would make each start longer.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import platform
import sys
from collections import ChainMap
from importlib.util import MAGIC_NUMBER
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle
from torch import Tensor

from telegrad.errors import CannotDecode
from telegrad.wire.reducers import reduce
from telegrad.wire.segments import SegmentWriter, Texts, expect_texts


def _reduce_code(code: CodeType) -> Any:
    # cloudpickle 3.1.3 and later leaves the file out, without which a remote traceback could not show its lines.
    parts = tuple(code.co_filename if part == _NO_FILE else part for part in _REDUCE_CODE(code)[1])
    return make_code, (code.co_name, MAGIC_NUMBER, platform.python_version(), parts)


def make_code(name: str, magic: bytes, version: str, parts: tuple[Any, ...]) -> CodeType:
    """Code that was sent; an interpreter that is given that of another Python ends the process.

    Raises:
        CannotDecode: it is of another one.
    """
    if magic != MAGIC_NUMBER:
        raise CannotDecode(
            f"the code of {name!r} is that of Python {version}, which this worker cannot run, as it is of Python "
            f"{platform.python_version()}: have both import it from a module, or run the same minor version everywhere"
        )
    return CodeType(*parts)


_NO_FILE = "<dynamic-code>"
_REDUCE_CODE = cloudpickle.Pickler.dispatch_table[CodeType]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


class ValuePickler(_Pickler):
    """Where something has no name."""

    same_program: bool
    tensors: list[Tensor]
    references: list[Any]
    plain: bool
    file: SegmentWriter
    texts: Texts | None = None

    reducer_override = reduce
    expect_texts = expect_texts

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
    file = io.BytesIO()
    _Pickler(file).dump(obj)
    return file.getvalue()


def register_spawned_main() -> None:
    """In a spawned child the main program's functions belong to `__mp_main__`, which no other process can import."""
    spawned = sys.modules.get("__mp_main__")
    if spawned is not None and "__mp_main__" not in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.register_pickle_by_value(spawned)
