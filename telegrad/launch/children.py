"""Child processes and their output: it is split into lines, and written to this program's own streams, prefixed with
names, and to one file for each process."""

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import RawIOBase
from math import inf
from pathlib import Path

from telegrad.errors import UsageError
from telegrad.ext.feedback import plural
from telegrad.ext.host import create, make_folder, new_session_options, signal_at_parents_end

PATIENCE = 1.0  # seconds until an incomplete line is shown
LONGEST = 1 << 16  # bytes
LAST_LINES = 10  # of a worker's output, in the message that it has ended the group
MOST_ALIKE = 1000  # folders of runs that begin in the same second
STREAMS = {"stdout": 1, "stderr": 2}
NAME = "telegrad"  # the prefix of the supervisor's own lines
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # terminal colour codes; red is for the supervisor
_OURS = 31


class Child:
    """A child process with its own session and process group; it and all that it starts end with this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], handled: Sequence[int]) -> None:
        """Start the process; raise OSError if it cannot be started. The `handled` signals act there by default."""
        self.process = subprocess.Popen(
            [_found(command[0], environment), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            preexec_fn=_before(os.getpid(), handled),
            **new_session_options(),
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._streams = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        self.pid = self.process.pid
        self.pipes = {name: stream.fileno() for name, stream in self._streams.items()}
        # `_bury` reads until a pipe is empty, which must not block. Only the reading ends change: the child's ends are
        # other open files.
        for pipe in self.pipes.values():
            os.set_blocking(pipe, False)

    def signal(self, number: int) -> None:
        """Send a signal to the process and its whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Close the pipes. Call it after the process ended."""
        for stream in self._streams.values():
            stream.close()


class LineBuffer:
    """The lines of one stream. Of a line overwritten after carriage returns, only the last version is shown."""

    def __init__(self) -> None:
        self._rest = b""
        self.due = inf  # when the incomplete line is to be shown

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Add data; return the lines that are complete now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= LONGEST:
            whole.append(self._rest)
            self._rest = b""
        if not self._rest:
            self.due = inf
        # The time counts from the first byte of the incomplete line. It is not extended by further bytes, or else a
        # progress bar that is updated more often than once in PATIENCE would not be shown before its end.
        elif whole or self.due == inf:
            self.due = now + PATIENCE
        return [_seen(line) for line in whole]

    def look(self, now: float) -> list[bytes]:
        """Return the incomplete line if it is due."""
        return self.flush() if now >= self.due else []

    def flush(self) -> list[bytes]:
        """Return the incomplete line."""
        rest, self._rest, self.due = self._rest, b"", inf
        return [_seen(rest)] if rest else []


def _seen(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Output:
    """The output of one run: a new folder, to which the link `latest` points."""

    def __init__(self, folder: str) -> None:
        """Make the folder; raise OSError if it cannot be made."""
        self.folder = _fresh(folder)
        colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._coloured = {stream: colours and os.isatty(descriptor) for stream, descriptor in STREAMS.items()}
        self._files: dict[str, RawIOBase] = {}
        self._colours: dict[str, int] = {NAME: _OURS}
        self._last: dict[str, deque[bytes]] = {}
        self._left_out = dict.fromkeys(STREAMS, 0)  # lines for which a stream had no room since it took the last ones

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def raw(self, name: str, data: bytes) -> None:
        """Append a worker's output to its file."""
        with contextlib.suppress(OSError):  # the disk is full: the other workers must not end because of it
            file = self._files.get(name)
            if file is None:
                # Unbuffered, so that the file has all that was read also if this process is killed.
                file = self._files[name] = create(self.path(name)).detach()
            # A disk that is nearly full, or a quota, may take only a part. The next attempt raises if that was all.
            while data:
                data = data[file.write(data) or len(data) :]

    def lines(self, name: str, stream: str, lines: Sequence[bytes]) -> None:
        """Write a worker's lines, if any, to this program's stream, or count them if its reader is behind."""
        if not lines:
            return
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._last.setdefault(name, deque(maxlen=LAST_LINES)).extend(lines)
        prefix = f"\033[{colour}m[{name}]\033[0m " if self._coloured[stream] else f"[{name}] "
        self._show(stream, b"".join(prefix.encode() + line + b"\n" for line in lines), len(lines))

    def _show(self, stream: str, data: bytes, count: int) -> None:
        # The supervisor restarts and ends workers on this thread, so it cannot wait for a reader that has stopped.
        left_out = self._left_out[stream]
        if left_out:  # the last write may have ended within a line
            data = f"\n[{NAME}] {plural(left_out, 'line')} left out here; {self.folder} has all\n".encode() + data
        with contextlib.suppress(OSError):  # the reader of the stream has gone
            rest = _write(STREAMS[stream], data, 0.0 if left_out else PATIENCE)
            self._left_out[stream] = left_out + min(count, rest.count(b"\n")) if rest else 0

    def say(self, text: str) -> None:
        """Write a line of the supervisor."""
        self.lines(NAME, "stderr", text.encode().splitlines())
        self.raw(NAME, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def last_lines(self, name: str) -> str:
        return "".join(f"\n    {line.decode(errors='replace')}" for line in self._last.get(name, ()))

    def close(self) -> None:
        for stream, left_out in self._left_out.items():
            if left_out:
                self._show(stream, b"", 0)
        for file in self._files.values():
            file.close()


def _fresh(folder: str) -> Path:
    """Make a new folder, and point `latest` to it. Other users may write in `folder`."""
    try:
        above = Path(make_folder(folder))
    except OSError as error:
        raise UsageError(f"logs: the folder {folder!r} cannot be made: {error.strerror}") from error
    stem = time.strftime("%Y-%m-%d_%H-%M-%S")
    for number in range(MOST_ALIKE):
        own = above / (f"{stem}_{number}" if number else stem)
        try:
            own.mkdir()
            break
        except FileExistsError:
            if number == MOST_ALIKE - 1:
                raise
    # The link is made under another name and renamed, which replaces an older `latest` in one step. The name is random
    # because another user could create a predictable one first. An OSError: the system has no links, or `latest`
    # belongs to another user.
    with contextlib.suppress(OSError):
        fresh = above / f".latest-{secrets.token_hex(8)}"
        fresh.symlink_to(own.name)
        fresh.replace(above / "latest")
    return Path(folder) / own.name


def _write(descriptor: int, data: bytes, patience: float) -> bytes:
    """Write data; return the rest if the reader makes no room within `patience`: terminals may be non-blocking."""
    while data and select.select((), (descriptor,), (), patience)[1]:
        with contextlib.suppress(BlockingIOError):
            data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]  # more may block a pipe that has room
    return data


def _found(program: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program; `python` is this process's interpreter."""
    if program == "python":
        return sys.executable
    found = shutil.which(program, path=environment.get("PATH"))
    if found is None:
        raise FileNotFoundError(f"no program {program!r} was found that can be run")
    return found


def _before(parent: int, handled: Sequence[int]) -> Callable[[], None]:
    """Return the function that the child runs before exec. This process has only one thread, so it may run any code."""

    def prepare() -> None:
        # Ignored and blocked signals are inherited through exec. A shell that starts this process in the background
        # makes it ignore SIGINT, and the worker could then not be interrupted.
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal_at_parents_end(signal.SIGKILL)
        # The kernel sends no signal for a parent that ended before the call above.
        if os.getppid() != parent:
            os._exit(1)

    return prepare
