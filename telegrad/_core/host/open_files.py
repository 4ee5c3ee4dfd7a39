"""The limit on open files: each connection and each shared memory file needs a descriptor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from errno import EMFILE, ENFILE

from telegrad.errors import TelegradError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

TO_JOIN = 16  # descriptors to join and for the first call that shares memory: 8 and 7 on Linux
PER_WORKER = 2  # at least so many more for each other worker that it calls and is called by
MOST_LENT = 4096  # memory files of one worker at most
FOLDER = "/proc/self/fd"


def is_out(error: BaseException | None) -> bool:
    """Return True for an error that means that this process or this host has no descriptor left."""
    return isinstance(error, OSError) and error.errno in (EMFILE, ENFILE)


def error_text(error: BaseException) -> str:
    """Return the text of an error, with advice if the error means that no descriptor is left."""
    if not is_out(error):
        return str(error)
    if isinstance(error, OSError) and error.errno == ENFILE:
        return f"{error}: this host has reached its limit of open files (`sysctl fs.file-max`): raise it"
    limit = f"at most {_limit()} files" if _limit() else "no more files"
    return (
        f"{error}: this process may open {limit} (`ulimit -n`). A worker needs {TO_JOIN} descriptors beyond those of "
        f"its program, {PER_WORKER} for each other worker on its host and 8 for each on another one: raise the limit "
        "by `ulimit -n 4096` before the program starts"
    )


@contextlib.contextmanager
def translate_error(what: str, kind: type[TelegradError]) -> Iterator[None]:
    """Replace an error that means that no descriptor is left by an error of type `kind`, "`what`: ..."."""
    try:
        yield
    except OSError as error:
        cause = error if is_out(error) else error.__cause__
        if cause is None or not is_out(cause):
            raise
        raise kind(f"{what}: {error_text(cause)}") from error


def check() -> None:
    """Raise OSError if fewer descriptors are left than a worker needs to join: torch would then hang or exit."""
    limit = _limit()
    if limit and limit - _open() < TO_JOIN:
        raise OSError(EMFILE, os.strerror(EMFILE))


def to_lend() -> int:
    """Return how many memory files a worker may have: these use half of the descriptors, two each."""
    limit = _limit()
    return min(MOST_LENT, limit // 4) if limit else MOST_LENT


def _limit() -> int:
    """Return the number of files that this process may open; 0 if there is no limit or it cannot be read."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else 0
    return 0 if limit < 0 else limit


def _open() -> int:
    try:
        return len(os.listdir(FOLDER)) - 1  # without the descriptor of this listing
    except FileNotFoundError:
        return 3  # assume stdin, stdout and stderr if the system does not tell
