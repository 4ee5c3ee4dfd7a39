"""Texts of exceptions and of their arguments, made in a time that does not depend on how large these are.

`str`, `repr` and a pickle of 64 MB of text hold the interpreter for tens of milliseconds each, in which no other call
of the worker goes on. So `is_large` first estimates the pickle, from lengths alone, and only what is small is formatted
whole. A `__str__` or `__repr__` of the user's own is called as it is: other threads run between its lines.
"""

from __future__ import annotations

import array
from collections import deque
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

LARGEST = 1 << 20  # bytes of an exception that is sent whole
LONGEST_TEXT = 1 << 16
MOST_OBJECTS = 10_000  # that are looked at one by one; numbers in a container count by their size only
SHOWN = 10  # elements of a large container

_TEXTS = (str, bytes, bytearray)
_CONTAINERS = (tuple, list, dict, set, frozenset, deque)
_NUMBERS = frozenset({float, bool, complex, type(None)})
_RULES = ("__reduce_ex__", "__reduce__", "__getstate__")
_ORDERED = frozenset({int, float, bool})


def cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[: LONGEST_TEXT // 2]}\n[...]\n{text[-LONGEST_TEXT // 2 :]}"


def is_large(value: Any, most: int = LARGEST) -> bool:
    """Return True where a pickle of the value takes more than about `most` bytes, or the value has too many parts.

    Memory that is pickled by rules of its own, as that of tensors, does not count.
    """
    seen: set[int] = set()
    waiting = [value]
    for _ in range(MOST_OBJECTS):
        if not waiting:
            return False
        each = waiting.pop()
        if type(each) in _NUMBERS or id(each) in seen:
            continue
        seen.add(id(each))
        size, parts = _size_and_parts(each)
        most -= size
        if most < 0:
            return True
        for part in parts:
            if not _are_numbers(part):
                if len(part) > MOST_OBJECTS:
                    return True
                waiting.extend(part)
    return bool(waiting)


def _size_and_parts(value: Any) -> tuple[int, tuple[Any, ...]]:
    """Return the bytes of a value without its elements, and what holds these."""
    if isinstance(value, int):
        return value.bit_length() // 8, ()
    if isinstance(value, _TEXTS):
        return len(value), ()
    if isinstance(value, array.array):
        return len(value) * value.itemsize, ()
    if isinstance(value, _CONTAINERS):
        return 8 * len(value), (value, value.values()) if isinstance(value, dict) else (value,)
    if isinstance(value, BaseException):
        return 0, ((value.args, vars(value)),)
    own = getattr(value, "__dict__", None)
    return 0, (own.values(),) if isinstance(own, dict) and _is_pickled_plainly(type(value)) else ()


def _is_pickled_plainly(kind: type) -> bool:
    """Return True where instances are pickled with all their attributes: not by name, nor by rules of their own."""
    rules = all(getattr(kind, name, None) is getattr(object, name, None) for name in _RULES)
    return rules and not issubclass(kind, ModuleType)


def _are_numbers(parts: Any) -> bool:
    """Return True where many parts are numbers that take no more than eight bytes each."""
    if len(parts) <= SHOWN or not _ORDERED.issuperset(map(type, parts)):
        return False
    return all(-(1 << 63) <= each < 1 << 63 for each in (min(parts), max(parts)))


def brief(value: Any, depth: int = 3) -> str:
    """Return the value's repr, cut; of a large container the first elements, and how many there are."""
    if not is_large(value, LONGEST_TEXT):
        return cut(repr(value))
    if isinstance(value, str):
        return cut(repr(cut(value)))
    if isinstance(value, bytes | bytearray):
        return cut(repr(bytes(value[:LONGEST_TEXT])))
    kind = type(value).__qualname__
    if isinstance(value, _CONTAINERS):
        values = value.items() if isinstance(value, dict) else value
        first = ", ".join(cut(brief(each, depth - 1)) for each in islice(values, SHOWN)) if depth else ""
        return cut(f"<{kind} of {len(value)}: {first}, ...>")
    if isinstance(value, BaseException):
        return cut(f"{kind}({', '.join(map(brief, value.args[:SHOWN]))})")
    if isinstance(value, int | array.array):
        return f"<{kind}, too large to be shown>"
    return cut(repr(value))  # its own code


def text_of(error: BaseException) -> str:
    """Return the text of an exception, cut.

    Raises:
        Exception: its own code does.
    """
    shown: Any = type(error).__str__
    args = error.args
    if isinstance(shown, FunctionType):
        return cut(str(error))  # its own code
    if shown is BaseException.__str__ and len(args) == 1:
        return cut(str(_light(args[0])))
    # The data of a UnicodeError takes no time, since only a position in it is told.
    if not is_large(args[:1] + args[2:] if isinstance(error, UnicodeError) else args):
        return cut(str(error))
    if len(args) == 1:
        return brief(args[0])
    if shown is OSError.__str__:
        return cut(str(OSError(*map(_light, OSError.__reduce__(error)[1]))))
    return cut(f"({', '.join(map(brief, args[:SHOWN]))}{', ...' if len(args) > SHOWN else ''})")


def _light(value: Any) -> Any:
    """Return what has the same text as the value, or that one cut."""
    if isinstance(value, str):
        return cut(value)
    return brief(value) if is_large(value) else value
