"""Where programs of the same user on the same host may ask a worker, also before it has joined a group.

A Unix socket whose name in the abstract namespace says whose it is, so that nothing is on the file system; elsewhere
than on Linux workers can be asked from inside of their group only. One line of JSON comes, one goes:
`{"topic": ..., "after": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.transport.sockets import HAS_UNIX

ACCOUNT, GROUP, EVENTS, GROUP_EVENTS, DUMP = "account", "group", "events", "group events", "dump"  # topics
PREFIX = "telegrad-desk"
HAS_DESKS = HAS_UNIX
PATIENCE = 2.0  # seconds for a question to come whole, and for its answer to be taken
LONGEST = 1 << 16  # bytes of a question

log = logging.getLogger("telegrad")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Place(NamedTuple):
    """A desk as others find it."""

    address: str  # without the leading zero byte
    pid: int
    stacks: int  # the descriptor of the file to which that process writes its stacks on a signal; -1: none
    worker: str


class Desk:
    """One worker's; answers on a thread of its own, whatever the worker's other threads are at."""

    def __init__(self, worker: str, stacks: int, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` gives something that JSON can say."""
        self._answer = answer
        self._socket: socket.socket | None = None
        if not HAS_DESKS:
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"\0{PREFIX}/{os.getuid()}/{os.getpid()}/{stacks}/{id(self):x}/{worker}")
            listening.listen(8)
            self._socket = listening
            threading.Thread(target=self._serve, args=(listening,), name="telegrad-desk", daemon=True).start()
        except (OSError, RuntimeError, MemoryError):  # a worker that nobody can look at works all the same
            self._socket = None
            listening.close()

    def close(self) -> None:
        """No more questions."""
        listening, self._socket = self._socket, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
            listening.close()

    def abandon(self) -> None:
        """In a forked child: the parent goes on with it."""
        listening, self._socket = self._socket, None
        if listening is not None:
            listening.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                asking, _ = listening.accept()
            except OSError:
                return
            try:
                with asking:
                    self._tell(asking)
            except OSError:  # who asked has gone
                pass
            except Exception:  # the next one shall hear more
                log.exception("telegrad: a question about this worker could not be answered")

    def _tell(self, asking: socket.socket) -> None:
        """Answer one question, unless a stranger asks."""
        said = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(said)
        if uid in (os.getuid(), 0):
            asking.settimeout(PATIENCE)
            asked = json.loads(_line(asking))
            asking.sendall(json.dumps(self._answer(asked["topic"], asked.get("after"))).encode() + b"\n")


def places() -> list[Place]:
    """The desks of this user's workers on this host; root's question is answered by those of all."""
    if not HAS_DESKS:
        return []
    found = []
    whose = f"@{PREFIX}/" if os.getuid() == 0 else f"@{PREFIX}/{os.getuid()}/"
    with contextlib.suppress(OSError), open("/proc/net/unix") as file:
        for line in file:
            name = line.rpartition(" ")[2].strip()
            parts = name.split("/", 5)
            if name.startswith(whose) and len(parts) == 6 and line.split()[3] == "00010000":
                found.append(Place(name[1:], int(parts[2]), int(parts[3]), parts[5]))
    return list({place.address: place for place in found}.values())


def ask(place: Place, topic: str, after: Any = None, patience: float = PATIENCE) -> Any:
    """What a worker answers.

    Raises:
        OSError: it does not.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(patience)
        asking.connect(f"\0{place.address}")
        asking.sendall(json.dumps({"topic": topic, "after": after}).encode() + b"\n")
        return json.loads(_line(asking, most=1 << 30))


def _line(sock: socket.socket, most: int = LONGEST) -> bytes:
    parts: list[bytes] = []
    size = 0
    while not parts or not parts[-1].endswith(b"\n"):
        part = sock.recv(1 << 16)
        size += len(part)
        if not part or size > most:
            raise ConnectionError("it ended before it had said all")
        parts.append(part)
    return b"".join(parts)
