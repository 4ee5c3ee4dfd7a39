"""Sockets: their options, the processes at their other ends, and the addresses and hosts that they are given.

Of all hosts, only IPv6 addresses contain colons. Choosing an own address sends no packet: connecting a datagram socket
only queries the routing table.
"""

import contextlib
import ipaddress
import os
import socket
import ssl
import struct
import sys
import uuid
from time import monotonic, sleep
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

from telegrad._core.texts import Wait, report_in_background
from telegrad.errors import UsageError

HAS_UNIX = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # with abstract names, which are on no file system
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_UNREAD = 0x5411  # SIOCOUTQ of Linux, not named in `socket`: bytes that were sent and that the other end has not read
# Linux doubles the retransmission timeout at each loss: four losses in a row take 3 s, and a renewal of a lease is
# late. With these options, the timeout stays at 0.2 s for six tries if few packets are in flight, and is at most 1 s.
_RESENDS = ((16, 1), (44, 1000))  # TCP_THIN_LINEAR_TIMEOUTS and TCP_RTO_MAX_MS (since Linux 6.15), unnamed in Python
BUFFER = 1 << 20  # send buffer of a Unix socket: blobs below the sharing threshold fit at once

ADDRESS_VARIABLE = "TELEGRAD_ADDRESS"
LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
ANY_PORT = 9  # the port of a route query does not matter
IN_A_POD = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets this variable in all pods
ASK_AGAIN = 0.5  # seconds between two queries for a name that may appear
ELSEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): its route is the default route
Spot = tuple[str, int]  # host and port


def unix_address(name: str) -> str:
    return f"\0{name}"


def shut(sock: socket.socket) -> None:
    """End both directions of a connection, even while other threads use the socket.

    The method of a TLS socket ends TLS first, and another thread could then send or receive plaintext.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def unread(sock: HasDescriptor) -> bool:
    """Return True if the other end of a Unix socket has not read all data; False if that is unknown."""
    if not HAS_UNIX:
        return False
    import fcntl

    try:
        return any(fcntl.ioctl(sock.fileno(), _UNREAD, struct.pack("i", 0)))
    except (OSError, ValueError):  # closed
        return False


def tune_unix(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


def tune_tcp(sock: socket.socket, silence: float) -> None:
    """Send small frames at once, and retransmit lost ones soon.

    The kernels detect a host that is silent for `silence` seconds, not the processes: so a process with a busy
    interpreter is not declared lost. 0 disables that.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for number, setting in _RESENDS:
            with contextlib.suppress(OSError):  # an older kernel, or an emulation of Linux
                sock.setsockopt(socket.IPPROTO_TCP, number, setting)
    if not silence:
        return
    # An idle connection is probed after a quarter of `silence`, and lost after three probes without an answer, a
    # quarter each. Probes are not sent while data is unacknowledged: TCP_USER_TIMEOUT is the limit then.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, round(silence / 4))
    for option, value in (
        ("TCP_KEEPIDLE", probe),
        ("TCP_KEEPALIVE", probe),  # the name on macOS
        ("TCP_KEEPINTVL", probe),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(silence * 1000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def socket_address(address: str, port: int) -> Any:
    """Return an address for `bind` and `connect`, which ignore a scope in text, as that of `fe80::1%eth0`."""
    if ":" not in address:
        return address, port
    return socket.getaddrinfo(address, port, socket.AF_INET6, socket.SOCK_STREAM)[0][4]


def text_of(address: Any) -> str:
    """Return the host of a socket's address, with the scope of a link-local one."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


_CREDENTIALS = struct.Struct("iII")  # process, user, group
_NOBODY = (1 << 32) - 1  # the user if there is no process


def process_at(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0 if it is not visible from here, or is this process."""
    pid, _ = credentials(sock)
    return 0 if pid == os.getpid() else pid


def stranger_at(sock: socket.socket) -> str:
    """Return a description of the user at the other end of a Unix socket if it is not the user of this process.

    An unknown user counts as another user, too. Root is no exception: a process of root is another user's to a worker
    that does not run as root, and a worker of root accepts code from root only.
    """
    _, user = credentials(sock)
    mine = os.geteuid()
    if user == mine:
        return ""
    return f"uid {user}, while this worker has uid {mine}" if user >= 0 else "an unknown user"


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and user of the other end when it connected or began to listen; 0 and -1 if unknown."""
    try:
        said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (AttributeError, OSError):
        return 0, -1
    pid, user, _ = _CREDENTIALS.unpack(said)
    return pid, user if user != _NOBODY else -1


# Addresses and hosts


def host_identity() -> str:
    """Return an id that is equal for two processes only if they share a kernel and a network, and so their sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{uuid.getnode():x}/{socket.gethostname()}"


def loopback() -> str:
    """Return the loopback address of this host, which may have only IPv6."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError:
        return LOOPBACK_6
    return LOOPBACK


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def own_address(wanted: str | None, store_host: str | None) -> str:
    """Return the address to listen on and to publish: the wanted one, else the one that reaches the store's host; raise
    UsageError if the wanted address does not belong to this host, or the store's host has none."""
    wanted = wanted or os.environ.get(ADDRESS_VARIABLE)
    if wanted:
        return _checked(wanted)
    if store_host is not None:
        return local_address_towards(store_host)
    try:
        return _checked(socket.gethostname())
    except UsageError:
        return loopback()


def local_address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`; raise UsageError if `host` cannot be resolved."""
    choices = check_resolves(host)
    for family, _, _, _, address in sorted(choices, key=lambda choice: choice[0] != socket.AF_INET):
        found = _source(family, address)
        if found is None:
            continue
        if _is_loopback(found) and not means_loopback(host):
            # Debian's /etc/hosts gives a host's own name 127.0.1.1, which other hosts cannot use.
            return _source(socket.AF_INET, (ELSEWHERE, ANY_PORT)) or found
        return found
    return loopback()


def listening_address(host: str) -> str:
    """Return the address of this machine that `host` names, or the unspecified address. A name other than localhost may
    resolve to a loopback address only here: Debian's /etc/hosts gives a machine's own name 127.0.1.1. Behind a NAT or a
    Kubernetes service, the host's address does not belong to this machine."""
    with contextlib.suppress(OSError, ValueError):
        found = socket.getaddrinfo(spelled(host), 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                here = text_of(address)
                if means_loopback(host) or not _is_loopback(here):
                    return here
    return "::" if loopback() != LOOPBACK else "0.0.0.0"


def await_name(host: str, timeout: float) -> list[Any]:
    """Wait until a name resolves, in a pod of Kubernetes: another pod has its name only once it exists; raise
    UsageError if the store's host has no address."""
    if IN_A_POD not in os.environ:
        return check_resolves(host)
    until = monotonic() + timeout
    text = f"the name {host!r} is not known yet; is the pod of rank 0 running, behind a headless Service?"
    with report_in_background(Wait("init_rpc", lambda: text, lambda: ["rank 0"], host)) as wait:
        while True:
            try:
                return check_resolves(host)
            except UsageError:
                if monotonic() + ASK_AGAIN > until:
                    raise
            wait.look()
            sleep(ASK_AGAIN)


def check_resolves(host: str) -> list[Any]:
    """Return the store's addresses; raise UsageError without any, instead of waiting for a server there."""
    try:
        found = socket.getaddrinfo(spelled(host), ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver accepts
        raise UsageError(
            f"the store's host {host!r} cannot be resolved ({error}): correct MASTER_ADDR or init_method"
        ) from error
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    if all(each.is_multicast or str(each) == "255.255.255.255" for each in addresses):
        raise UsageError(
            f"the store's host {host!r} is a multicast or broadcast address, and workers cannot connect to it: give "
            "the address of the host of rank 0 in MASTER_ADDR or init_method"
        )
    if all(address[3:] == (0,) and ipaddress.ip_address(address[0]).is_link_local for *_, address in found):
        raise UsageError(
            f"the store's host {host!r} is a link-local address without its interface: write {host}%eth0, with the "
            "name that `ip addr` shows, in MASTER_ADDR or init_method"
        )
    return found


def spelled(host: str) -> Any:
    """Return a host's name for the resolver; as bytes if possible: a `str` makes it load Unicode tables (1 ms)."""
    return host.encode() if host.isascii() else host


def accepts_connections(address: tuple[str, int], patience: float) -> bool | None:
    """Return True if a program listens there; None if that is unknown because the host does not answer."""
    try:
        with socket.create_connection((spelled(address[0]), address[1]), patience) as probe:
            # The kernel may give a probe of a free port on this host that same port as its own: then it has connected
            # to itself.
            return bool(probe.getsockname() != probe.getpeername())
    except ConnectionRefusedError:
        return False
    except OSError:
        return None


def _source(family: int, address: tuple[str | int, ...] | tuple[int, bytes]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return text_of(probe.getsockname())
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def means_loopback(host: str) -> bool:
    """Return True if a host is given by a loopback address, or by a name that means loopback everywhere."""
    try:
        return _is_loopback(host)
    except ValueError:  # a name
        return host.lower().rstrip(".").split(".")[-1].startswith(("localhost", "ip6-localhost", "ip6-loopback"))


def _checked(wanted: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(wanted, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        found = getattr(found, "ipv4_mapped", None) or found
        # The kernel lets a datagram socket connect to each of the host's own addresses, but not to a broadcast address.
        if found.is_unspecified or found.is_multicast or not _source(family, (address[0], ANY_PORT, *address[2:])):
            raise OSError("it is not the address of a single host")
    except (OSError, ValueError) as error:  # ValueError: an invalid name, such as a part of over 63 bytes
        raise UsageError(
            f"{wanted!r} is not an address of this host ({error}); give one that `ip addr` shows, "
            f"in the option `address` or in {ADDRESS_VARIABLE}"
        ) from error
    return text_of(address)


def split(url: str) -> SplitResult:
    """Split a URL into its parts; raise UsageError if it is not a URL."""
    try:
        return urlsplit(url)
    except ValueError as error:  # unbalanced brackets, or a host that cannot be normalized
        raise UsageError(
            f"{url!r} is not a URL ({error}): write tcp://HOST:PORT, an IPv6 address in brackets, file:///PATH or "
            "env://"
        ) from error


def spot_of(url: SplitResult) -> Spot:
    """Return the host and the port of tcp://HOST:PORT; raise UsageError if it names none, or several."""
    if "," in url.netloc:
        raise UsageError(
            f"{url.geturl()!r} names several hosts, but a group meets at one. For a group that survives the loss of a "
            "host, keep its directory in etcd or Redis: init_method='etcd://HOST:2379' or 'redis://HOST:6379'"
        )
    try:
        host, port = url.hostname, url.port
    except ValueError:  # the port is not a number, or too large
        host = port = None
    if not host or not port:
        raise UsageError(
            f"{url.geturl()!r} names no host and port (1 to 65535): write tcp://HOST:PORT, an IPv6 address in brackets"
        )
    return host, port


def far_host(url: str) -> str | None:
    """Return the first host in the URL that is not this one: the route to it determines a worker's own address."""
    for text in split(url).netloc.rpartition("@")[2].split(","):
        host = split(f"//{text}").hostname
        if host and not means_loopback(host):
            with contextlib.suppress(UsageError):
                check_resolves(host)
                return host
    return None


def is_here(host: str) -> bool:
    """Return True if `host` is an address of this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(spelled(host), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
