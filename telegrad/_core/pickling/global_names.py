"""The globals of the main program that a function or class reads, and those that workers lack.

Workers that import the driver's program have the globals that its source binds outside of the guard. All others exist
only in the driver: the code under the guard, or a function that the driver called, has created them.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from telegrad._core.pickling.main_program import MAIN, SPAWNED_MAIN, source_of

MAINS = (MAIN, SPAWNED_MAIN)
_CACHED = 4096
_READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_WRITES = {"STORE_GLOBAL", "DELETE_GLOBAL"}


class Lookups(NamedTuple):
    """Names of globals that code accesses."""

    read: frozenset[str]
    written: frozenset[str]


@functools.lru_cache(_CACHED)
def lookups_of(code: CodeType) -> Lookups:
    """Return the globals that the code, including functions and classes defined in it, reads and writes."""
    read, written = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            read.add(instruction.argval)
        elif instruction.opname in _WRITES:
            written.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = lookups_of(constant)
            read |= inner.read
            written |= inner.written
    return Lookups(frozenset(read), frozenset(written))


def lookups_from(thing: Any, names: dict[str, Any]) -> Lookups:
    """Return the globals that a function or class of the program, and all program code that it uses, read and write."""
    read: set[str] = set()
    written: set[str] = set()
    seen: set[int] = set()
    todo = [thing]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            todo += [getattr(each, "__wrapped__", None), *(each.__defaults__ or ()), *_closed_over(each)]
            if each.__module__ in MAINS:
                found = lookups_of(each.__code__)
                written |= found.written
                read |= found.read
                todo += [names[name] for name in found.read if name in names]
        elif isinstance(each, type):
            if each.__module__ in MAINS:
                todo += [*vars(each).values(), *each.__bases__]
        elif isinstance(each, MethodType | staticmethod | classmethod):
            todo.append(each.__func__)
        elif isinstance(each, property):
            todo += [each.fget, each.fset, each.fdel]
        elif isinstance(each, functools.partial):
            todo += [each.func, *each.args, *each.keywords.values()]
        elif type(each).__module__ in MAINS:  # code may call methods of this object
            todo.append(type(each))
        elif hasattr(each, "__wrapped__"):
            todo.append(each.__wrapped__)
    return Lookups(frozenset(read), frozenset(written))


def _closed_over(function: FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue


def names_of_main() -> dict[str, Any]:
    """Return the globals of this process's main program.

    `runpy`, which multiprocessing uses to import it in a spawned child, copies them into the module. Functions use the
    original dictionary.
    """
    names = vars(sys.modules[MAIN])
    if names.get("__name__") == SPAWNED_MAIN:
        for value in names.values():
            if type(value) is FunctionType and value.__module__ == SPAWNED_MAIN:
                return value.__globals__
    return names


# by the id of the object in the entry; entries are replaced as a whole
_known: dict[int, tuple[Any, frozenset[str]]] = {}


def lacks(thing: Any) -> bool:
    """Return True if a function or class uses a global that workers lack, or have with another value.

    If the guard or a function binds a name again, workers have its first value. If the function itself assigns the
    name, that is its state, and each worker has its own.
    """
    names = vars(sys.modules[MAIN])
    known = _known.get(id(thing))
    if known is None or known[0] is not thing:
        source = source_of(str(names.get("__file__")))
        read, written = lookups_from(thing, names)
        absent = frozenset() if source.stars else (read | written) - source.top
        again = (read & (source.main | source.declared)) - written
        if len(_known) >= _CACHED:
            _known.clear()
        known = _known[id(thing)] = thing, frozenset(name for name in absent | again if not name.startswith("__"))
    return any(name in names for name in known[1])
