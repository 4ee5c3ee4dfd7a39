"""Texts of exceptions and of their arguments, made in a time independent of their size.

`str`, `repr` and a pickle of 64 MB of text hold the GIL for tens of milliseconds each, and block all calls of the
worker. So `is_large` first estimates the size of the pickle from lengths, and only small values are formatted as a
whole. A user's own `__str__` or `__repr__` is always called: other threads run between its lines.
"""

from __future__ import annotations

import array
from collections import deque
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

LARGEST = 1 << 20  # bytes of an exception that is sent as a whole
LONGEST_TEXT = 1 << 16
MOST_OBJECTS = 10_000  # examined one by one; numbers in a container count by size only
SHOWN = 10  # elements shown of a large container

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
    """Return True if the pickle of a value takes more than about `most` bytes, or the value has too many parts.

    Memory with pickling rules of its own, such as that of tensors, does not count.
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
    """Return the size in bytes of a value without its elements, and the collections of its elements."""
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
    """Return True if instances are pickled with all attributes: neither by name nor by rules of their own."""
    rules = all(getattr(kind, name, None) is getattr(object, name, None) for name in _RULES)
    return rules and not issubclass(kind, ModuleType)


def _are_numbers(parts: Any) -> bool:
    """Return True for many numbers of at most eight bytes each."""
    if len(parts) <= SHOWN or not _ORDERED.issuperset(map(type, parts)):
        return False
    return all(-(1 << 63) <= each < 1 << 63 for each in (min(parts), max(parts)))


def brief(value: Any, depth: int = 3) -> str:
    """Return the repr of a value, shortened; of a large container its first elements and its length."""
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
    return cut(repr(value))  # calls the user's code


def text_of(error: BaseException) -> str:
    """Return the text of an exception, shortened.

    Raises:
        Exception: raised by the exception's own code.
    """
    shown: Any = type(error).__str__
    args = error.args
    if isinstance(shown, FunctionType):
        return cut(str(error))  # calls the user's code
    if shown is BaseException.__str__ and len(args) == 1:
        return cut(str(_light(args[0])))
    # The size of a UnicodeError's data does not matter, because its text contains only a position in it.
    if not is_large(args[:1] + args[2:] if isinstance(error, UnicodeError) else args):
        return cut(str(error))
    if len(args) == 1:
        return brief(args[0])
    if shown is OSError.__str__:
        return cut(str(OSError(*map(_light, OSError.__reduce__(error)[1]))))
    return cut(f"({', '.join(map(brief, args[:SHOWN]))}{', ...' if len(args) > SHOWN else ''})")


def _light(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value)
    return brief(value) if is_large(value) else value
