"""Connect to a worker as a stranger, and measure the cost for the worker."""

import contextlib
import errno
import os
import pathlib
import socket
from collections.abc import Iterator

from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.noise import LONGEST, RECORD, RecordReader, RecordWriter
from telegrad._core.worker.current import Worker
from tests.cluster import PATIENCE

LATE = 1.0  # seconds between a worker's checks of handshake deadlines


def knock(worker: Worker) -> socket.socket:
    return socket.create_connection(worker.agent.me.tcp, 10)


def begin_to_knock(worker: Worker) -> socket.socket:
    """Begin a connection to a worker, which may be slow to accept it."""
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex(worker.agent.me.tcp) not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        raise ConnectionError
    return sock


def say(sock: socket.socket, data: bytes) -> None:
    """Send data, unless the worker closes the connection."""
    with contextlib.suppress(OSError):
        sock.sendall(data)


def wait_closed(sock: socket.socket, patience: float = PATIENCE) -> bytes:
    """Return the bytes that the worker sends until it closes the connection."""
    sock.settimeout(patience)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(4096):
            heard += data
    return heard


def listening() -> Iterator[tuple[str, int, str]]:
    """Yield the address, the port and the inode of each socket of this host that listens, as the kernel writes them."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                host, _, port = fields[1].rpartition(":")
                if fields[3] == "0A":
                    yield host, int(port, 16), fields[9]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Return the bytes of memory that this process uses."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def new_member(worker: Worker) -> Initiator:
    """Return the end of a connection that a member of the group makes to a worker."""
    return Initiator(worker.agent.keys, Hello("w0", 0, "another", ""), worker.agent.incarnation)


HAS_PROC = pathlib.Path("/proc/self/statm").exists()


class Visitor:
    """A member that is connected by TCP: it sends and receives encrypted records."""

    def __init__(self, sock: socket.socket, end: Initiator, behind: bytes = b"") -> None:
        """Run the handshake; `behind` is sent together with its last message."""
        self.sock = sock
        said = end.start()
        while not end.done:
            if behind and end._ciphers is not None:
                self._writer = RecordWriter(end._ciphers.sending)
                said += self._writer.encrypt(behind)
            sock.sendall(said)
            heard = sock.recv(4096)
            if not heard:
                raise ConnectionError("the worker closed the connection")
            said = end.receive(heard)
        assert end.leftover == b""
        assert end.ciphers is not None
        self._writer = RecordWriter(end.ciphers.sending)
        self._reader = RecordReader(end.ciphers.receiving)

    def say(self, data: bytes) -> None:
        for at in range(0, len(data), RECORD):
            self.sock.sendall(self._writer.encrypt(data[at : at + RECORD]))

    def hear(self) -> bytes:
        """Return the content of the next record, or b"" if the worker closes the connection."""
        content, came = memoryview(bytearray(LONGEST)), 0
        while not (count := self._reader.decrypt_into(content, came)):
            came = self.sock.recv_into(self._reader.buffer())
            if not came:
                return b""
        return bytes(content[:count])
