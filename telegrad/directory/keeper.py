"""Keeps the process that serves an embedded directory: starts it, and starts it again when it has ended.

The keeper holds the socket that listens, and hands it to each process that it starts. So the address stays, and clients
that connect while there is no server wait in the socket's queue. What the directory knows is in a file (`store.py`).
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

from telegrad.addresses import family_of
from telegrad.directory.server import BACKLOG
from telegrad.directory.store import LOG, remove
from telegrad.directory.table import DEFAULT, Limits
from telegrad.keyring import Keyring
from telegrad.private_files import open_regular, private_folder, replacing
from telegrad.processes import SAFE_PATH, named, own_session
from telegrad.threads import run_beside

PATIENCE = 5.0  # seconds for the process to end by itself
LAST_WORDS = 500  # bytes of what it has logged

log = logging.getLogger("telegrad")


class Keeper:
    """The process that serves, and its address. One thread at a time."""

    def __init__(
        self, keys: Keyring, host: str = "127.0.0.1", port: int = 0, path: str = "", limits: Limits = DEFAULT
    ) -> None:
        """Start it. `path` is the file, which may be that of a server that was killed; without it, a new one is made.

        Raises:
            OSError: the port is taken, or the process cannot be started.
        """
        self._keys, self._limits = keys, limits
        self.path = path or _private_path()
        self._listener = socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        try:
            self._process = self._start()
        except BaseException:
            self._listener.close()
            raise

    @property
    def pid(self) -> int:
        """The process that serves now."""
        return self._process.pid

    def restart_if_ended(self) -> bool:
        """Start the process again if it has ended; return True if it had. Call it now and then.

        Raises:
            OSError: it cannot be started.
        """
        if self._process.poll() is None:
            return False
        log.warning(
            "telegrad: the process of the group's directory ended with %s, and is started again; its last words: %s",
            named(self._process.returncode),
            self._last_words() or "none",
        )
        self._close_pipe(self._process)
        self._process = self._start()
        return True

    def leave(self) -> None:
        """Leave the process to itself: it ends once no lease is left."""
        self._listener.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(b"\0")  # since processes that this one has forked may hold the pipe
            self._process.stdin.flush()
        self._close_pipe(self._process)
        run_beside("telegrad-keeper", _reap, self._process)  # else it stays as a zombie

    def close(self) -> None:
        """End the process, and with it the directory."""
        self._listener.close()
        self._close_pipe(self._process)
        self._process.terminate()  # other processes may hold the pipe: those that this one has forked
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        remove(self.path)

    def _start(self) -> subprocess.Popen[bytes]:
        listener = self._listener.fileno()
        # It may outlive this process, so it must not hold the pipes that others read to the end of this one's output.
        with replacing(self.path + LOG) as output:
            process = subprocess.Popen(
                [sys.executable, *SAFE_PATH, "-m", "telegrad.directory.server", "0"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=output,
                pass_fds=[listener],
                **own_session(),
            )
        config = pickle.dumps((os.getpid(), listener, self._keys, self.path, self._limits))
        assert process.stdin is not None
        try:
            process.stdin.write(len(config).to_bytes(4, "little") + config)  # fits into the pipe
            process.stdin.flush()
        except BrokenPipeError:  # it has ended at once, as `restart_if_ended` will find
            pass
        return process

    def _last_words(self) -> str:
        with contextlib.suppress(OSError), open_regular(self.path + LOG) as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_WORDS))
            return output.read().decode("utf-8", "replace").strip()
        return ""

    def _close_pipe(self, process: subprocess.Popen[bytes]) -> None:
        """Close the pipe: a process that still runs ends."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, and what was written last cannot be
            process.stdin.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()


def _private_path() -> str:
    with private_folder("directory") as folder:
        name = f"{secrets.token_hex(8)}.sqlite"
        folder.create(name).close()  # for this user alone; SQLite makes the others likewise
        return os.path.join(folder.path, name)
