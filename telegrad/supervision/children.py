"""Processes that end with this one, and all that they have started with them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from telegrad.ext.processes import own_session, signal_at_parents_end

PIECE = 1 << 16  # bytes
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Child:
    """One, with a session and a group of processes of its own."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """
        self._process = subprocess.Popen(
            [_found(command[0], environment), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            preexec_fn=_before(os.getpid()),
            **own_session(),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pid = self._process.pid
        self.pipes = {"stdout": self._process.stdout.fileno(), "stderr": self._process.stderr.fileno()}
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)

    def code(self) -> int | None:
        """How it has ended, if it has."""
        return self._process.poll()

    def tell(self, number: int) -> None:
        """Send a signal to it alone."""
        self._process.send_signal(number)

    def signal(self, number: int) -> None:
        """To it and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(self.pid, number)

    def close(self) -> None:
        """After its end: what it has left behind ends, too."""
        self.signal(signal.SIGKILL)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdout.close()
        self._process.stderr.close()


def read(pipe: int) -> bytes | None:
    """What there is; b"" at its end, None where nothing is there now."""
    try:
        return os.read(pipe, PIECE)
    except BlockingIOError:
        return None


def _found(program: str, environment: Mapping[str, str]) -> str:
    """`python` is the one that runs this."""
    if program == "python":
        return sys.executable
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise FileNotFoundError(f"there is no program {program!r} that can be run")
    return found


def _before(parent: int) -> Callable[[], None]:
    """What the child does before it becomes another program. This process has one thread, so it may do anything."""

    def prepare() -> None:
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)  # where this was started in the background, SIGINT is ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before that
            os._exit(1)

    return prepare
