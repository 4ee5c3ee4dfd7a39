"""A debug server in each worker, which programs of the same user on the same host can query, even before the worker
joins a group.

It listens on a Unix socket in the abstract namespace, so nothing is left on the file system. The socket's name says
whose worker it is. On other systems than Linux, workers can be queried only from inside their group. A request is one
line of JSON, `{"topic": ..., "after": ...}`, and so is the response.

Any user of the host can bind such a name, and connect to it. So each side asks the kernel for the user of the other
side before it reads or sends anything. A worker answers its own user and root. A program queries workers of the user in
their name, which must be its own user unless it runs as root. Responses are limited in size and time.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import secrets
import selectors
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from errno import EBADF, EINVAL, EMFILE, EMSGSIZE, ENOTSOCK
from time import monotonic
from typing import Any, NamedTuple

from telegrad.ext.host import HAS_UNIX, Thread, credentials
from telegrad.reporting import GROUP, GROUP_EVENTS, Malformed, decode

PREFIX = "telegrad-debug"
PATIENCE = 2.0  # seconds until a connection without a question is closed, and to send the answer
LONGEST = 1 << 16  # bytes of a question
LARGEST = 16 << 20  # bytes of one worker's answer about itself, and of all answers of another user
OF_A_GROUP = 256 << 20  # bytes of an answer about a group, and of all answers of this user together
MOST_OF_A_USER = 1024  # workers of one user that are queried
END = 0.5  # seconds for the thread to end
MOST_WAITING = 64  # connections to a worker that have not sent their question
AT_ONCE = 512  # workers that are queried concurrently
AGAIN = 0.005  # seconds until a retry, if a worker's accept queue is full
PAUSE = 0.1  # seconds until the server accepts again, if a connection could not be accepted
FINDING = 5.0  # maximum seconds to determine the users of all sockets that are named like workers
SOCKETS = "/proc/net/unix"
_NAME = re.compile(
    rb"@(" + PREFIX.encode() + rb"/([0-9]{1,10})/([0-9]{1,10})/(-1|[0-9]{1,7})/[0-9a-f]{1,16}/([\w:.#-]{1,255}))"
)

log = logging.getLogger("telegrad")


class DebugAddress(NamedTuple):
    address: str  # without the leading zero byte
    pid: int
    stacks: int  # the file descriptor to which that process writes its stacks on a signal; -1: none
    worker: str
    user: int  # the user of the process

    @property
    def own_pid(self) -> int:
        """The number of the process in its own namespace, as other workers know it."""
        return int(self.address.split("/")[2])


class DebugServer:
    """The debug server of one worker. It answers on its own thread, even if the worker's other threads are blocked."""

    def __init__(self, worker: str, stacks: int, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` returns a value that JSON can encode."""
        self._answer = answer
        self._socket: socket.socket | None = None
        if not HAS_UNIX:
            return
        listening = socket.socket(socket.AF_UNIX)
        try:
            # Any user can bind any name in the abstract namespace. Another user cannot guess this part, and so cannot
            # bind the name first.
            own = secrets.token_hex(8)
            listening.bind(f"\0{PREFIX}/{os.geteuid()}/{os.getpid()}/{stacks}/{own}/{worker}")
            listening.listen(128)  # any user can connect; `_serve` rejects other users
            self._socket = listening
            self._thread = Thread(target=self._serve, args=(listening,), name="telegrad-debug")
            self._thread.start()
        except (OSError, RuntimeError, MemoryError):  # a worker runs without its debug server, too
            self._socket = None
            listening.close()

    def close(self, in_child: bool = False) -> None:
        """Stop serving. In a forked child, only close the socket, which the parent keeps using."""
        listening, self._socket = self._socket, None
        if listening is None:
            return
        # The parent and the child share one socket, so `shutdown` in the child would end the parent's server.
        if in_child:
            listening.close()
        else:
            # `shutdown` wakes the thread from its `select`; `close` would not. The thread closes the socket itself: if
            # this thread did, another file could get the same descriptor while the thread still uses it.
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            self._thread.join(END)

    def _serve(self, listening: socket.socket) -> None:
        """Answer questions until the server is closed. A connection without a question delays no other."""
        # An OSError that reaches this `with` means that the listening socket has gone.
        with listening, selectors.PollSelector() as selector, contextlib.suppress(OSError):
            selector.register(listening, selectors.EVENT_READ)
            asking: dict[socket.socket, float] = {}  # connections without a question so far, and when they end
            while self._socket is listening:
                ready = [key.fileobj for key, _ in selector.select(PATIENCE if asking else None)]
                # A client sends its question right after it connects. So above MOST_WAITING the oldest connection is
                # idle most likely. `_tell` closes it, and one past its time, since no question is there.
                oldest = next(iter(asking)) if len(asking) > MOST_WAITING else None
                for sock, until in list(asking.items()):
                    if sock in ready or sock is oldest or monotonic() > until:
                        selector.unregister(sock)
                        del asking[sock]
                        with sock:
                            self._tell(sock)
                if listening in ready:
                    try:
                        sock, _ = listening.accept()
                    except OSError as error:
                        # `close` has shut it down, or the program has closed all descriptors.
                        if error.errno in (EBADF, EINVAL, ENOTSOCK):
                            raise
                        # As a rule no descriptor is free. The connection still waits, so an immediate retry would fail.
                        time.sleep(PAUSE)
                        continue
                    if credentials(sock)[1] in (os.geteuid(), 0):
                        selector.register(sock, selectors.EVENT_READ)
                        asking[sock] = monotonic() + PATIENCE
                    else:
                        sock.close()

    def _tell(self, sock: socket.socket) -> None:
        """Answer the question that a connection has sent."""
        try:
            # A client sends its question in one piece. It is there already, or the connection is to be closed: do not
            # wait for it. The answer may be larger than the buffer of the socket, and then waits for the client.
            sock.setblocking(False)
            line = sock.recv(LONGEST)
            if not line.endswith(b"\n"):
                raise ConnectionError("the question was not complete")
            asked = json.loads(line)
            sock.settimeout(PATIENCE)
            sock.sendall(json.dumps(self._answer(asked["topic"], asked.get("after"))).encode() + b"\n")
        except Exception:  # the client has gone, or sent no question: at DEBUG, as it may do so without end
            log.debug("telegrad: a question about this worker was not answered", exc_info=True)


def places() -> list[DebugAddress]:
    """Return the debug servers of this user's workers on this host; for root those of all users. Sockets of other users
    with names like a worker's are skipped, with a warning."""
    if not HAS_UNIX:
        return []
    me, until = os.geteuid(), monotonic() + FINDING
    named = [(place, inode) for place, inode in _named() if me in (0, place.user)]
    found: dict[int, list[DebugAddress]] = defaultdict(list)  # by user
    others: list[DebugAddress] = []
    for place, inode in named:
        if monotonic() > until:
            log.warning("telegrad: sockets are named like those of workers (%d); some were not queried", len(named))
            break
        if (peer := _peer_of(place, inode)) is not None:
            pid, user = peer
            if user == place.user:
                found[user].append(place._replace(pid=pid or place.pid))
            else:
                others.append(place)
    if others:
        log.warning(
            "telegrad: sockets of other users are named like those of workers (%d, such as %r): they are ignored",
            *(len(others), others[0].address),
        )
    # In turns, one of each user. For root, workers of a user with many sockets must not delay those of the others until
    # the time for all answers has passed.
    each_first = itertools.zip_longest(*(own[:MOST_OF_A_USER] for own in found.values()))
    return [place for turn in each_first for place in turn if place is not None]


def ask_all(
    asked: Iterable[DebugAddress], topic: str, after: Any = None, patience: float = PATIENCE
) -> dict[DebugAddress, Any]:
    """Return the answers of workers within `patience` seconds in all; an OSError or Malformed for each that failed."""
    asked = list(dict.fromkeys(asked))
    told: dict[DebugAddress, Any] = dict.fromkeys(asked, TimeoutError("it did not answer in time"))
    question = json.dumps({"topic": topic, "after": after}).encode() + b"\n"
    with _Questions(question, OF_A_GROUP if topic in (GROUP, GROUP_EVENTS) else LARGEST) as questions:
        told |= questions.put(asked, monotonic() + patience)
    for place, line in told.items():
        if isinstance(line, bytes):
            try:
                told[place] = decode(topic, line)
            except Malformed as error:
                told[place] = Malformed(f"process {place.pid} sent an invalid answer: {error}")
    return told


class _Questions(contextlib.AbstractContextManager["_Questions"]):
    """One question to many workers, asked by one thread. Use it in a `with`."""

    def __init__(self, question: bytes, most: int) -> None:
        self._question = question
        self._most = most  # bytes of one answer of this user
        self._selector = selectors.DefaultSelector()
        self._talks: dict[DebugAddress, tuple[socket.socket, bytearray]] = {}  # and the answers received so far
        self._told: dict[DebugAddress, bytes | Exception] = {}
        self._read: Counter[int] = Counter()  # bytes of all answers kept, by user

    def __exit__(self, *_: object) -> None:
        for sock, _answer in self._talks.values():
            sock.close()
        self._selector.close()

    def put(self, asked: Iterable[DebugAddress], until: float) -> dict[DebugAddress, bytes | Exception]:
        """Ask until all have answered, or until that time."""
        waiting = deque(asked)
        while (waiting or self._talks) and (left := until - monotonic()) > 0:
            for _ in range(min(len(waiting), AT_ONCE - len(self._talks))):
                place = waiting.popleft()
                # A Unix socket that does not block refuses a connection by EAGAIN while the accept queue of the worker
                # is full, and reports no later moment at which there is room: only a retry helps. A process without
                # free descriptors gets some once an answer has come.
                try:
                    self._begin(place)
                except OSError as error:
                    if isinstance(error, BlockingIOError) or (error.errno == EMFILE and self._talks):
                        waiting.append(place)
                    else:
                        self._told[place] = error
            if not self._talks:
                time.sleep(AGAIN * bool(waiting))
            for key, _ in self._selector.select(min(left, AGAIN) if waiting else left) if self._talks else ():
                self._go_on(key.data)
        return self._told

    def _begin(self, place: DebugAddress) -> None:
        """Connect and send the question."""
        sock = _connected(place)
        # The user was checked when the socket was found, but a socket of another user may have its name since then.
        try:
            _, user = credentials(sock)
            if user != place.user:
                raise PermissionError(f"its socket belongs to user {user}")
            if sock.send(self._question) < len(self._question):
                raise OSError(EMSGSIZE, "the question does not fit into the buffer of its socket")
        except OSError:
            sock.close()
            raise
        self._talks[place] = sock, bytearray()
        self._selector.register(sock, selectors.EVENT_READ, place)

    def _go_on(self, place: DebugAddress) -> None:
        sock, answer = self._talks[place]
        try:
            part = sock.recv(1 << 18)
            if not part:
                raise ConnectionError("it ended before its answer was complete")
            answer += part
            self._limit(place, len(answer), len(part))
            # JSON as `json.dumps` writes it has no line end, so this is the end of the answer.
            if not part.endswith(b"\n"):
                return
            self._told[place] = bytes(answer)
        except BlockingIOError:
            return
        except (OSError, Malformed) as error:
            self._read[place.user] -= len(answer)
            self._told[place] = error
        self._selector.unregister(sock)
        self._talks.pop(place)[0].close()

    def _limit(self, place: DebugAddress, size: int, more: int) -> None:
        own = place.user == os.geteuid()
        self._read[place.user] += more
        most = self._most if own else LARGEST
        if size > most or self._read[place.user] > (OF_A_GROUP if own else LARGEST):
            raise Malformed(f"process {place.pid}, or all processes of its user, sent more than {most >> 20} MiB")


# Sockets and their users


def _peer_of(place: DebugAddress, inode: bytes) -> tuple[int, int] | None:
    """Return the process (0 in another PID namespace) and user that own a socket; None if it is gone or hidden."""
    try:
        with _connected(place) as sock:
            return credentials(sock)
    except BlockingIOError:  # its queue is full, which any user can cause; /proc may still show the owner
        return _holder_of(place, inode)
    except OSError:
        return None


def _holder_of(place: DebugAddress, inode: bytes) -> tuple[int, int] | None:
    """Return the process that is named in the address and its user, if it has the socket open."""
    with contextlib.suppress(OSError), os.scandir(f"/proc/{place.pid}/fd") as opened:
        if any(os.readlink(each.path) == f"socket:[{inode.decode()}]" for each in opened):
            return place.pid, os.stat(f"/proc/{place.pid}").st_uid
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
        # Names may have any bytes, including line ends, so a line may be a forged part of a name. `places` believes
        # none of them: it asks the kernel which process listens at each address. The flags 00010000 mean that the
        # socket listens (__SO_ACCEPTCON).
        for line in file:
            fields = line.split(None, 7)
            if len(fields) == 8 and fields[3] == b"00010000" and (match := _NAME.fullmatch(fields[7].rstrip(b"\n"))):
                address, user, pid, stacks, worker = (part.decode() for part in match.groups())
                found[address] = DebugAddress(address, int(pid), int(stacks), worker, int(user)), fields[6]
    return list(found.values())
