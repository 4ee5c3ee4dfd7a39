"""Errors that mean that this process, or its device, has no memory left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from errno import ENOMEM

from telegrad.errors import TelegradError

# Parts of the texts of errors without a type of their own: from torch's allocators, and from OpenSSL.
_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "malloc failure")

_NO_THREAD = "can't start new thread"  # also raised if there is no memory for its stack


def is_out(error: BaseException | None) -> bool:
    """Return True for an error that means that no memory is left."""
    if isinstance(error, OSError):
        return error.errno == ENOMEM
    if isinstance(error, RuntimeError | ValueError) and not isinstance(error, TelegradError):
        return any(text in str(error) for text in _TEXTS)
    return isinstance(error, MemoryError)


def advice(error: BaseException, otherwise: str) -> str:
    """Return the advice for a value that could not be rebuilt: `otherwise`, unless the cause is lack of memory."""
    return "the process that received it has no memory left" if is_out(error) else otherwise


@contextlib.contextmanager
def explained(what: str, kind: type[TelegradError]) -> Iterator[None]:
    """Replace an error that means that no memory or thread is left by an error of type `kind`, "`what`: ..."."""
    try:
        yield
    except Exception as error:
        has_no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
        if not (has_no_thread or is_out(error)):
            raise
        lack = "has no memory left" + ", or has reached its limit of threads" * has_no_thread
        raise kind(f"{what}: this process {lack} ({str(error) or type(error).__name__})") from error
