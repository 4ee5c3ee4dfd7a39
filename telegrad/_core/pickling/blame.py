"""Find the part of a value that cannot be pickled, and name it: an argument, an element, a variable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import AsyncGeneratorType, FunctionType, GeneratorType, MethodType
from typing import Any

from telegrad._core.pickling.function_names import name_of
from telegrad._core.pickling.global_names import lookups_of
from telegrad._core.pickling.main_program import GUARD
from telegrad._core.pickling.reducers import BoundToProcess
from telegrad._core.pickling.remote_text import first_line
from telegrad.errors import CannotEncode, UsageError

DEEPEST = 12  # levels of parts that are examined
_ADVICE = "Send the data that it is built from, or keep it where it is and call functions there"
_ADVICE_FOR_VARIABLES = (
    "Create it inside of the function, or put both at the top level of a module that all workers import: then each "
    f"uses its own. Workers import a script, too, if a guard, `{GUARD}`, precedes the code for the driver alone"
)

Part = tuple[str, Any]  # how to reach it from the containing value, and the part


def find_unpicklable_part(
    value: Any, same_program: bool, can_dump: Callable[[Any, bool], bool], error: BaseException
) -> CannotEncode:
    """Return the error that names the part of a value or call that cannot be sent; `error` gives the reason.

    `same_program`: the other process runs the same main program.
    """
    where, within, advice = "", "", _ADVICE
    for _ in range(DEEPEST):
        if isinstance(error, UsageError) and any("__reduce_ex__" in vars(kind) for kind in type(value).__mro__[:-1]):
            return CannotEncode(
                f"{where.lstrip('.') or 'a value'}{within} cannot be sent: {first_line(error)}"
            )  # the error gives the reason
        parts = _parts_of(value, same_program, top=not where)
        bad = next((part for part in parts if not can_dump(part[1], same_program)), None)
        if bad is None:
            break
        step, part = bad
        if type(value) is FunctionType:
            function = where if where.startswith("the function") else f"{where or 'a value'}, a function,"
            where, within, advice = f"the variable `{step}`", f" that {function}{within} uses", _ADVICE_FOR_VARIABLES
        else:
            where += step
        value = part
    if isinstance(value, GeneratorType | AsyncGeneratorType):
        advice = "To send its items, call its function by rpc.rpc_stream"
    advice = error.advice if isinstance(error, BoundToProcess) else advice
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    where = where.lstrip(".") or "a value"
    return CannotEncode(f"{where}{within} ({kind}) cannot be sent: {first_line(error)}. {advice}")


def _parts_of(value: Any, same_program: bool, top: bool) -> Iterable[Part]:
    if isinstance(value, (tuple, list)):
        if top and [type(part) for part in value[-2:]] == [tuple, dict]:  # the arguments of a call
            yield from _parts_of_call(*value)
        else:
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (set, frozenset)):
        yield from ((f" (the member {part!r})", part) for part in value)
    elif type(value) is FunctionType:
        yield from _variables_of(value, same_program)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _parts_of_call(*call: Any) -> Iterable[Part]:
    *functions, args, kwargs = call
    yield from ((f"argument {number}", arg) for number, arg in enumerate(args))
    yield from ((f"argument {name!r}", arg) for name, arg in kwargs.items())
    yield from ((f"the function `{getattr(function, '__name__', function)}`", function) for function in functions)


def _variables_of(function: FunctionType, same_program: bool) -> Iterable[Part]:
    """Yield the variables that are sent with a function that is sent by value."""
    if name_of(function, same_program) is not None:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in sorted(lookups_of(function.__code__).read):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    defaults = function.__defaults__ or ()
    count = function.__code__.co_argcount
    yield from zip(function.__code__.co_varnames[count - len(defaults) : count], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from function.__dict__.items()
