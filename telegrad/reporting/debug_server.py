"""A debug server in each worker, which programs of the same user on the same host can query, even before the worker
joins a group.

It listens on a Unix socket in the abstract namespace, so nothing is left on the file system. The socket's name says
whose worker it is. On other systems than Linux, workers can be queried only from inside their group. A request is one
line of JSON, `{"topic": ..., "after": ...}`, and so is the response.

Any user of the host can bind such a name, and connect to it. So each side asks the kernel for the user of the other
side before it reads or sends anything. A worker answers its own user and root. A program queries workers of the user in
their name, which must be its own user unless it runs as root. Responses are limited in size and time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import selectors
import socket
import struct
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from errno import EMFILE, EMSGSIZE
from time import monotonic
from typing import Any, NamedTuple

from telegrad.ext.processes import HAS_UNIX, Thread
from telegrad.reporting.worker_state import ACCOUNT, DUMP, EVENTS, GROUP, GROUP_EVENTS, Malformed, decode

__all__ = [
    "ACCOUNT",
    "DUMP",
    "EVENTS",
    "GROUP",
    "GROUP_EVENTS",
    "DebugAddress",
    "DebugServer",
    "ask",
    "ask_all",
    "places",
]

PREFIX = "telegrad-desk"
HAS_DEBUG_SERVERS = HAS_UNIX
PATIENCE = 2.0  # seconds to receive a question, and to send the answer
LONGEST = 1 << 16  # bytes of a question
LARGEST = 16 << 20  # bytes of one worker's answer about itself, and of all answers of another user
OF_A_GROUP = 256 << 20  # bytes of an answer about a group, and of all answers of this user together
MOST_OF_A_USER = 1024  # workers of one user that are queried
AT_ONCE = 512  # workers that are queried concurrently
AGAIN = 0.005  # seconds until a retry, if a worker's accept queue is full
FINDING = 5.0  # maximum seconds to determine the users of all sockets that are named like workers
SOCKETS = "/proc/net/unix"
_NAME = re.compile(
    rb"@(" + PREFIX.encode() + rb"/([0-9]{1,10})/([0-9]{1,10})/(-1|[0-9]{1,7})/[0-9a-f]{1,16}/([\w:.#-]{1,255}))"
)

log = logging.getLogger("telegrad")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class DebugAddress(NamedTuple):
    """The address of a worker's debug server."""

    address: str  # without the leading zero byte
    pid: int
    stacks: int  # the file descriptor to which that process writes its stacks on a signal; -1: none
    worker: str
    user: int  # the user of the process


class DebugServer:
    """The debug server of one worker. It answers on its own thread, even if the worker's other threads are blocked."""

    def __init__(self, worker: str, stacks: int, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` returns a value that JSON can encode."""
        self._answer = answer
        self._socket: socket.socket | None = None
        if not HAS_DEBUG_SERVERS:
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            own = secrets.token_hex(8)  # unguessable, so that no other user can bind the name first
            listening.bind(f"\0{PREFIX}/{os.geteuid()}/{os.getpid()}/{stacks}/{own}/{worker}")
            listening.listen(128)  # any user can connect; `_tell` rejects other users
            self._socket = listening
            Thread(target=self._serve, args=(listening,), name="telegrad-desk").start()
        except (OSError, RuntimeError, MemoryError):  # a worker runs without its debug server, too
            self._socket = None
            listening.close()

    def close(self) -> None:
        """Stop answering."""
        listening, self._socket = self._socket, None
        if listening is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
            listening.close()

    def abandon(self) -> None:
        """Close the socket in a forked child; the parent keeps using it."""
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
            except OSError:  # the client has gone
                pass
            except Exception:  # keep serving the next clients
                log.exception("telegrad: a question about this worker could not be answered")

    def _tell(self, asking: socket.socket) -> None:
        """Answer one question, unless another user asks."""
        if _peer_at(asking).user in (os.geteuid(), 0):
            asked = json.loads(_question(asking))
            asking.settimeout(PATIENCE)
            asking.sendall(json.dumps(self._answer(asked["topic"], asked.get("after"))).encode() + b"\n")


def places() -> list[DebugAddress]:
    """Return the debug servers of this user's workers on this host; for root those of all users.

    Sockets of other users with names like a worker's are skipped, with a warning.
    """
    if not HAS_DEBUG_SERVERS:
        return []
    me, until = os.geteuid(), monotonic() + FINDING
    named = [(place, inode) for place, inode in _named() if me in (0, place.user)]
    found: dict[int, list[DebugAddress]] = defaultdict(list)  # by user
    others: list[DebugAddress] = []
    for place, inode in named:
        if monotonic() > until:
            log.warning("telegrad: %d sockets are named like those of workers; some were not queried", len(named))
            break
        peer = _peer_of(place, inode)
        if peer is not None and peer.user == place.user:
            found[peer.user].append(place._replace(pid=peer.pid or place.pid))
        elif peer is not None:
            others.append(place)
    if others:
        log.warning(
            "telegrad: %d sockets of other users are named like those of workers, such as %r: they are ignored",
            *(len(others), others[0].address),
        )
    each_first = itertools.zip_longest(*(own[:MOST_OF_A_USER] for own in found.values()))
    return [place for turn in each_first for place in turn if place is not None]


def ask(place: DebugAddress, topic: str, after: Any = None, patience: float = PATIENCE) -> Any:
    """Return the answer of a worker.

    Raises:
        OSError: the worker did not answer within `patience` seconds.
        Malformed: the answer is invalid.
    """
    answer = ask_all([place], topic, after, patience)[place]
    if isinstance(answer, Exception):
        raise answer
    return answer


def ask_all(
    asked: Iterable[DebugAddress], topic: str, after: Any = None, patience: float = PATIENCE
) -> dict[DebugAddress, Any]:
    """Return the answers of workers within `patience` seconds in all; an OSError or Malformed for each that failed."""
    asked = list(dict.fromkeys(asked))
    question = json.dumps({"topic": topic, "after": after}).encode() + b"\n"
    with _Questions(topic, question) as questions:
        told = questions.put(asked, monotonic() + patience)
    late = TimeoutError("it did not answer in time")
    return {place: _decoded(place, topic, told.get(place, late)) for place in asked}


def _decoded(place: DebugAddress, topic: str, line: bytes | Exception) -> Any:
    if isinstance(line, Exception):
        return line
    try:
        return decode(topic, line)
    except Malformed as error:
        return Malformed(f"process {place.pid} sent an invalid answer: {error}")


class _Questions:
    """One question to many workers, asked by one thread. Use it in a `with`."""

    def __init__(self, topic: str, question: bytes) -> None:
        self._is_of_groups = topic in (GROUP, GROUP_EVENTS)
        self._question = question
        self._selector = selectors.DefaultSelector()
        self._talks: dict[DebugAddress, _Query] = {}
        self._told: dict[DebugAddress, bytes | Exception] = {}
        self._read: Counter[int] = Counter()  # bytes of all answers kept, by user

    def __enter__(self) -> _Questions:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for talk in self._talks.values():
            talk.socket.close()
        self._selector.close()

    def put(self, asked: Iterable[DebugAddress], until: float) -> dict[DebugAddress, bytes | Exception]:
        """Ask until all have answered, or until that time."""
        waiting = deque(asked)
        while (waiting or self._talks) and (left := until - monotonic()) > 0:
            for _ in range(min(len(waiting), AT_ONCE - len(self._talks))):
                place = waiting.popleft()
                if not self._begin(place):
                    waiting.append(place)
            if not self._talks:
                time.sleep(AGAIN * bool(waiting))
            for key, _ in self._selector.select(min(left, AGAIN) if waiting else left) if self._talks else ():
                self._go_on(key.data)
        return self._told

    def _begin(self, place: DebugAddress) -> bool:
        """Connect and send the question. Return False if it has to be tried again later."""
        try:
            sock = _connected(place)
        except OSError as error:
            if isinstance(error, BlockingIOError) or (error.errno == EMFILE and self._talks):
                return False  # the worker's accept queue is full, or this process is out of descriptors
            self._told[place] = error
            return True
        try:
            peer = _peer_at(sock)
            if peer.user != place.user:
                raise PermissionError(f"its socket belongs to user {peer.user}")
            if sock.send(self._question) < len(self._question):
                raise OSError(EMSGSIZE, "the question does not fit into the buffer of its socket")
        except OSError as error:
            sock.close()
            self._told[place] = error
            return True
        self._talks[place] = talk = _Query(place, sock)
        self._selector.register(sock, selectors.EVENT_READ, talk)
        return True

    def _go_on(self, talk: _Query) -> None:
        try:
            part = talk.socket.recv(1 << 18)
            if not part:
                raise ConnectionError("it ended before its answer was complete")
            talk.answer += part
            self._limit(talk, len(part))
            if not part.endswith(b"\n"):
                return
            told: bytes | Exception = bytes(talk.answer)
        except BlockingIOError:
            return
        except (OSError, Malformed) as error:
            self._read[talk.place.user] -= len(talk.answer)
            told = error
        self._told[talk.place] = told
        self._selector.unregister(talk.socket)
        self._talks.pop(talk.place).socket.close()

    def _limit(self, talk: _Query, more: int) -> None:
        own = talk.place.user == os.geteuid()
        self._read[talk.place.user] += more
        most = OF_A_GROUP if own and self._is_of_groups else LARGEST
        if len(talk.answer) > most or self._read[talk.place.user] > (OF_A_GROUP if own else LARGEST):
            raise Malformed(f"process {talk.place.pid}, or all processes of its user, sent more than {most >> 20} MiB")


class _Query:
    """A connection with a question sent, and the part of the answer received so far."""

    def __init__(self, place: DebugAddress, sock: socket.socket) -> None:
        self.place = place
        self.socket = sock
        self.answer = bytearray()


# Sockets and their users


class _Peer(NamedTuple):
    pid: int  # 0: the process is in another PID namespace
    user: int


def _peer_at(sock: socket.socket) -> _Peer:
    """Return the process at the other end of a Unix socket, as the kernel recorded it."""
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return _Peer(pid, user)


def _peer_of(place: DebugAddress, inode: bytes) -> _Peer | None:
    """Return the process that owns a socket; None if it has gone or cannot be seen."""
    try:
        with _connected(place) as sock:
            return _peer_at(sock)
    except BlockingIOError:  # its queue is full, which any user can cause; /proc may still show the owner
        return _holder_of(place, inode)
    except OSError:
        return None


def _holder_of(place: DebugAddress, inode: bytes) -> _Peer | None:
    """Return the process that is named in the address, if it has the socket open."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{place.pid}/fd") as opened:
        if any(os.readlink(each.path) == f"socket:[{inode.decode()}]" for each in opened):
            return _Peer(place.pid, os.stat(f"/proc/{place.pid}").st_uid)
    return None


def _connected(place: DebugAddress) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(f"\0{place.address}")
    except BaseException:
        sock.close()
        raise
    return sock


def _named() -> list[tuple[DebugAddress, bytes]]:
    """Return the sockets of any user that are named like those of workers, and their inodes."""
    found = {}
    with contextlib.suppress(OSError), open(SOCKETS, "rb") as file:
        for line in file:  # names may have any bytes, including line ends
            fields = line.split(None, 7)
            if len(fields) == 8 and fields[3] == b"00010000" and (match := _NAME.fullmatch(fields[7].rstrip(b"\n"))):
                address, user, pid, stacks, worker = (part.decode() for part in match.groups())
                found[address] = DebugAddress(address, int(pid), int(stacks), worker, int(user)), fields[6]
    return list(found.values())


def _question(sock: socket.socket) -> bytes:
    until = monotonic() + PATIENCE
    line = b""
    while not line.endswith(b"\n"):
        sock.settimeout(max(1e-3, until - monotonic()))
        part = sock.recv(LONGEST)
        line += part
        if not part or len(line) > LONGEST or monotonic() > until:
            raise ConnectionError("it ended before its answer was complete")
    return line
