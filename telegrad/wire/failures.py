"""How an exception travels: as itself where that can be, with what happened over there in its text."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

import cloudpickle

from telegrad.errors import RemoteError

LONGEST_TEXT = 1 << 16


def describe(error: BaseException, worker: str) -> bytes:
    """Everything that `rebuild` needs; never raises."""
    story = _story(error, worker)
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    plain = getattr(error, "_telegrad_plain", error)
    for attempt in (_whole, _parts):
        try:
            pickled = attempt(plain)
        except Exception:
            continue
        if pickled is not None:
            return pickle.dumps((pickled, name, story), 5)
    return pickle.dumps((None, name, story), 5)


def rebuild(data: bytes) -> BaseException:
    """The exception that was described, or a RemoteError that tells of it; never raises."""
    pickled, name, story = pickle.loads(data)
    try:
        error = _revive(pickled)
        if not isinstance(error, Exception):
            raise TypeError(name)  # what ends a process there must not end this one
        return _telling(error, story)
    except Exception:
        return RemoteError(f"{name} was raised, whose type cannot be rebuilt here.\n{story}")


def _story(error: BaseException, worker: str) -> str:
    """The remote traceback; of an error that came from yet another worker, that worker's story is part of it."""
    try:
        lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        lines = f"{type(error).__qualname__} (its text could not be made)\n"
    if len(lines) > LONGEST_TEXT:
        lines = f"{lines[: LONGEST_TEXT // 2]}\n[...]\n{lines[-LONGEST_TEXT // 2 :]}"
    return f"On worker {worker!r}:\n{lines}"


def _whole(error: BaseException) -> bytes | None:
    """Pickled by its own rules, where they give the same type back."""
    pickled: bytes = cloudpickle.dumps(error)
    return pickled if type(cloudpickle.loads(pickled)) is type(error) else None


def _parts(error: BaseException) -> bytes:
    """Its type, arguments and attributes, as far as they can be pickled."""
    attributes = {key: value for key, value in vars(error).items() if _travels(value)}
    args = tuple(arg if _travels(arg) else repr(arg) for arg in error.args)
    return cloudpickle.dumps((type(error), args, attributes))  # type: ignore[no-any-return]


def _travels(value: Any) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(value))
    except Exception:
        return False
    return True


def _revive(pickled: bytes | None) -> Any:
    if pickled is None:
        return None
    value = cloudpickle.loads(pickled)
    if isinstance(value, BaseException):
        return value
    kind, args, attributes = value
    error = kind.__new__(kind, *args)  # the constructor may want anything
    error.args = args
    error.__dict__.update(attributes)
    return error


# How the story becomes part of the text


class _Text(str):
    """Equal to the original argument; shown with the story."""

    __slots__ = ("story",)
    story: str

    def __str__(self) -> str:
        return f"{str.__str__(self)}\n{self.story}"

    def __repr__(self) -> str:
        return f"{str.__repr__(self)}\n{self.story}"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


_tellers: dict[type[BaseException], type[BaseException]] = {}


def _telling(error: Exception, story: str) -> Exception:
    kind = type(error)
    if (
        kind.__str__ in (BaseException.__str__, KeyError.__str__)
        and len(error.args) == 1
        and type(error.args[0]) is str
    ):
        text = _Text(error.args[0])
        text.story = story
        error.args = (text,)
        return error
    if kind not in _tellers:
        _tellers[kind] = _make_teller(kind)
    made = _tellers[kind].__new__(_tellers[kind], *error.args)
    made.args = error.args
    made.__dict__.update(vars(error))
    made.__dict__.update(_telegrad_plain=error, _telegrad_story=story)
    return made  # type: ignore[return-value]


def _make_teller(kind: type[BaseException]) -> type[BaseException]:
    """The same type to all who ask, but for a text that tells the story."""

    def tell(self: Any) -> str:
        return f"{self._telegrad_plain}\n{self._telegrad_story}"

    def reduce(self: Any) -> Any:
        return _same, (self._telegrad_plain,)

    members = {
        "__str__": tell,
        "__reduce__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (kind,), members)


def _same(error: BaseException) -> BaseException:
    return error
