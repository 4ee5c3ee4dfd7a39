"""Child processes that end with this process, together with all processes that they start."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from telegrad.ext.processes import new_session_options, signal_at_parents_end

PIECE = 1 << 16  # bytes
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Child:
    """A child process with its own session and process group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process.

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
            **new_session_options(),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self.pid = self._process.pid
        self.pipes = {name: stream.fileno() for name, stream in self._streams.items()}
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)

    def code(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.poll()

    def tell(self, number: int) -> None:
        """Send a signal to the process, but not to its children."""
        self._process.send_signal(number)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Kill the rest of the group, and close the pipes. Call it after the process ended."""
        self.signal(signal.SIGKILL)
        for stream in self._streams.values():
            stream.close()


def read(pipe: int) -> bytes | None:
    """Return the available data; b"" at the end of the pipe, None if there is none now."""
    try:
        return os.read(pipe, PIECE)
    except BlockingIOError:
        return None


def _found(program: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program; `python` is this process's interpreter."""
    if program == "python":
        return sys.executable
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise FileNotFoundError(f"no program {program!r} was found that can be run")
    return found


def _before(parent: int) -> Callable[[], None]:
    """Return the function that the child runs before exec. This process has only one thread, so it may run any code."""

    def prepare() -> None:
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)  # SIGINT is ignored if this process was started in the background
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal_at_parents_end(signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)

    return prepare
