"""Checks of the arguments of public functions. Each converter returns the value, or raises InvalidArgument.

The message names the parameter, says what it may be, and shows the value in at most SHOWN characters.
"""

import operator
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from numbers import Integral, Real
from typing import Any, NoReturn, TypeGuard

from telegrad.errors import InvalidArgument

SHOWN = 80  # characters of a value in a message
LONGEST = 1e9  # seconds: timers of the platforms take no more than about 30 years
FOR_EVER = "0 for no limit"


class _Short(reprlib.Repr):
    """Shorten texts like `reprlib.Repr`, without the values of tensors and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = SHOWN
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses by default to format integers of more than 4300 digits, with a ValueError.
        return f"<int of {x.bit_length()} bits>" if x.bit_length() > 200 else repr(x)

    def repr_str(self, x: str, level: int) -> str:
        return repr(x) if len(x) <= SHOWN else f"{x[: SHOWN // 2]!r}... ({len(x)} characters)"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x) if len(x) <= SHOWN else f"{x[: SHOWN // 2]!r}... ({len(x)} bytes)"

    def repr_instance(self, x: Any, level: int) -> str:
        kind = type(x)
        if isinstance(x, type):
            return f"the class {x.__qualname__}"
        plain: Any = object.__repr__
        if kind.__repr__ is plain or kind.__module__.partition(".")[0] in ("torch", "numpy"):
            return kind.__qualname__  # the values of a tensor do not help here, and are slow to format
        return super().repr_instance(x, level)

    repr_Parameter = repr_instance  # noqa: N815 - of torch


_short = _Short()


def short_repr(value: object) -> str:
    text = _short.repr(value)
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]}..."


def raise_invalid(name: str, what: str, value: object) -> NoReturn:
    """Raise InvalidArgument: the parameter `name` must be `what`."""
    raise InvalidArgument(f"{name} must be {what}, not {short_repr(value)}")


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def seconds(name: str, value: Any, zero: str = FOR_EVER, hint: str = "") -> Any:
    """Return a time unchanged. Return 0 for infinity where 0 means no limit."""
    if type(value) is float and value == inf and zero is FOR_EVER:
        return 0
    # Comparisons with NaN are False. So the range is written as a condition that must hold, here and in `number`.
    if not is_real(value) or not 0 <= value <= LONGEST:
        raise_invalid(name, f"a number of seconds, {zero}, and at most {LONGEST:,.0f}{hint}", value)
    return value if isinstance(value, int | float) else float(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Return True for integers, also those of NumPy, but neither for booleans nor for others with `__index__`."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def count(name: str, value: Any, least: int = 1, most: int = 1 << 62, what: str = "a whole number") -> int:
    if type(value) is not int and not is_whole(value):  # the type first, since each pass checks the id of its context
        raise_invalid(name, f"{what}, {least} or more", value)
    number = operator.index(value)
    if not least <= number <= most:
        raise_invalid(name, f"{what} from {least} to {most}" if most < 1 << 62 else f"{what}, {least} or more", value)
    return number


def number(name: str, value: Any, least: float) -> float:
    if not is_real(value) or not value >= least:
        raise_invalid(name, f"a number, {least:g} or more", value)
    try:
        return float(value)
    except OverflowError:
        raise_invalid(name, "a number that a float can hold", value)


def port(name: str, value: Any) -> int:
    return count(name, value, 0, 65535, "a port number")


def flag(name: str, value: Any, none: bool = False) -> Any:
    """Return True or False, or None where None means the default."""
    if value is not True and value is not False and not (none and value is None):
        raise_invalid(name, "True, False or None" if none else "True or False", value)
    return value


def text(name: str, value: Any, what: str = "a string", empty: bool = False) -> str:
    """Return a string that UTF-8 can encode, which excludes lone surrogates: other processes will receive it."""
    if not isinstance(value, str) or not (value or empty):
        raise_invalid(name, what, value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise_invalid(name, f"{what} that UTF-8 can encode", value)
    return value


def is_path(value: Any) -> bool:
    """Return True if the operating system can have this path: not empty, encodable and without null characters."""
    try:
        return isinstance(value, str | os.PathLike) and b"\0" not in (os.fsencode(value) or b"\0")
    except UnicodeEncodeError:
        return False


def path(name: str, value: Any) -> Any:
    if not is_path(value):
        raise_invalid(name, "the path of a file or folder, a str or a pathlib.Path", value)
    return value


def one_of(name: str, value: Any, choices: Collection[Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise_invalid(name, f"one of {', '.join(map(repr, choices))}", value)
    return value


def function(name: str, value: Any, what: str = "a function", classes: bool = True) -> Callable[..., Any]:
    if not callable(value) or (isinstance(value, type) and not classes):
        raise_invalid(name, what, value)
    found: Callable[..., Any] = value
    return found


def mapping(name: str, value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise_invalid(name, what, value)
    return value


def several(name: str, value: Any, what: str) -> list[Any]:
    """Return the members of a list, a tuple or another iterable that is neither text nor bytes."""
    if isinstance(value, str | bytes | bytearray | memoryview) or not is_iterable(value):
        raise_invalid(name, what, value)
    return list(value)


def is_iterable(value: Any) -> bool:
    """Return True for an iterable. A tensor or array without dimensions is none, although its class has `__iter__`."""
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def context_id(value: Any, method: str) -> None:
    """Raise InvalidArgument if the first argument of a method cannot be a context id."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise InvalidArgument(
            f"{method}() takes the id of a context (context_id) first, not {short_repr(value)}: "
            f"write `with autograd.context() as context_id:`, and {method}(context_id...) inside"
        )
