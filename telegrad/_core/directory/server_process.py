"""Starts the process that serves an embedded directory, and restarts it when it has ended.

The keeper owns the listening socket, and passes it to each process that it starts. Therefore the address stays the
same, and clients that connect while no server runs wait in the socket's queue. The directory's state is in a file
(`lease_table.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from time import monotonic

from telegrad._core.directory.directory_server import BACKLOG, remove_all
from telegrad._core.directory.lease_table import DEFAULT, LOG, Limits
from telegrad._core.private_files import open_regular, private_folder, replacing
from telegrad._core.processes import SAFE_PATH, describe_exit, new_session_options
from telegrad._core.security.keyring import Keyring
from telegrad._core.sockets import family_of, socket_address
from telegrad._core.threads import run_in_thread

PATIENCE = 5.0  # seconds for the process to end by itself
LAST_WORDS = 500  # bytes of its log
LONGEST_REASON = 4096  # bytes of the reason that it reports when it ends
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 1.0  # seconds before a restart, if it ends for the same reason repeatedly
STEADY = 60.0  # seconds; after running for so long, it has ended for a new reason

log = logging.getLogger("telegrad")


class ServerProcess:
    """The serving process and its address."""

    def __init__(
        self, keys: Keyring, host: str = "127.0.0.1", port: int = 0, path: str = "", limits: Limits = DEFAULT
    ) -> None:
        """Start the process. `path` is its file, which a killed server may have left; by default, a new one is made.
        Raise OSError if the port is taken, or the process cannot be started."""
        self._keys, self._limits = keys, limits
        self.path = path
        if not path:
            with private_folder("directory") as folder:
                name = f"{secrets.token_hex(8)}.sqlite"
                folder.create(name).close()  # for this user only; SQLite makes its other files likewise
                self.path = os.path.join(folder.path, name)
        self._listener = socket.create_server(socket_address(host, port), family=family_of(host), backlog=BACKLOG)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        # Guards all that follows, and the listener: a worker may leave while the thread that restarts the process is at
        # it.
        self._lock = threading.Lock()
        self._has_ended = False  # the end of the process has been noted
        self._told = ""  # the reason of its last end, if it reported one
        self._pause = self._starts_at = 0.0  # seconds before it is restarted, and the time of that
        try:
            self._process = self._start()
        except BaseException:
            self._listener.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart_if_ended(self) -> bool:
        """Restart the process if it has ended, unless this is closed; return True if this was done. Call it regularly.
        After repeated ends for one reason, such as a full disk, restarts are delayed. Raise OSError if one fails."""
        with self._lock:
            if self._listener.fileno() == -1 or self._process.poll() is None:
                return False
            if not self._has_ended:
                self._has_ended = True
                self._note_end()
            if monotonic() < self._starts_at:
                return False
            self._close_pipe()
            self._process = self._start()
            self._has_ended = False
            return True

    def _note_end(self) -> None:
        """Log how the process has ended. If it has reported the same reason before, only delay the restart."""
        reason = self._reason()
        if reason and reason == self._told and monotonic() < self._starts_at + STEADY:
            self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        else:
            self._pause = 0.0
            log.warning(
                "telegrad: the process of the group's directory ended with %s, and is restarted; its last output: %s",
                describe_exit(self._process.returncode),
                reason or self._last_words() or "none",
            )
        self._told = reason
        self._starts_at = monotonic() + self._pause

    def leave(self) -> None:
        """Let the process run until no lease is left."""
        with self._lock:
            self._listener.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, and could not be restarted
            # The server takes any byte, like the end of the pipe, for the end of its keeper. Closing the pipe is not
            # enough: processes that this one has forked may hold it.
            self._process.stdin.write(b"\0")
            self._process.stdin.flush()
        self._close_pipe()
        # Otherwise it stays as a zombie.
        run_in_thread("telegrad-keeper", self._process.wait)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the process, and with it the directory."""
        with self._lock:
            self._listener.close()
        self._close_pipe()
        self._process.terminate()  # closing is not enough: forked processes may hold the pipe
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove_all(self.path)

    def _start(self) -> subprocess.Popen[bytes]:
        listener = self._listener.fileno()
        # It may outlive this process, so it must not hold pipes from which others read the end of this process's
        # output. Its output pipe carries the reason of its end, because a log on a full disk would be empty.
        with replacing(self.path + LOG) as output:
            process = subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-m", "telegrad._core.directory.directory_server", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=[listener],
                **new_session_options(),
            )
        config = pickle.dumps((os.getpid(), listener, self._keys, self.path, self._limits))
        assert process.stdin is not None
        try:
            process.stdin.write(len(config).to_bytes(4, "little") + config)  # fits into the pipe
            process.stdin.flush()
        except BrokenPipeError:  # it has ended at once, as `restart_if_ended` will find
            pass
        return process

    def _reason(self) -> str:
        """Return why the process has ended, if it reported a reason."""
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)  # forked processes may hold the pipe
        with contextlib.suppress(BlockingIOError):
            return os.read(self._process.stdout.fileno(), LONGEST_REASON).decode("utf-8", "replace")
        return ""

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), open_regular(self.path + LOG) as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_WORDS))
            return output.read().decode("utf-8", "replace").strip()
        return ""

    def _close_pipe(self) -> None:
        """Close the pipes; a process that still runs ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and the last data cannot be written
            self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
