"""Where a dynamic group may be found: its places, and whether members of it are on this host.

A newcomer that finds nobody who serves might serve by itself, and so begin a second group, where the first is only
about to have another server. So members who are at one of the places show that they stay there: each has a Unix socket
whose name tells the place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from urllib.parse import SplitResult, urlsplit

from telegrad.errors import UsageError
from telegrad.group.address import check_resolves, spelled

Spot = tuple[str, int]  # host and port

SOCKETS = "/proc/net/unix"
HAS_NAMES = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # sockets with names that are on no file system
ANSWER = 2.0  # seconds for the kernel to list them
# From linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h.
_SOCK_DIAG, _BY_FAMILY, _DUMP, _ERROR, _DONE = 4, 20, 0x301, 2, 3
_SHOW_NAME, _SHOW_UID, _NAME, _UID = 1, 0x40, 0, 7
_HEAD, _REQUEST, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBHIIIII"), struct.Struct("=HH")
_FOUND = 16  # bytes of a unix_diag_msg

log = logging.getLogger("telegrad")

_warned: set[int] = set()  # the users of whom that was said; any thread adds to it


def split(url: str) -> SplitResult:
    """Split a URL into its parts.

    Raises:
        UsageError: it is none.
    """
    try:
        return urlsplit(url)
    except ValueError as error:  # brackets that do not match, or a host that is no Unicode to be normalized
        raise UsageError(
            f"{url!r} is no URL ({error}): write tcp://HOST:PORT, an IPv6 address in brackets, file:///PATH or env://"
        ) from error


def spots(url: SplitResult) -> tuple[Spot, ...]:
    """The places that tcp://HOST:PORT,HOST:PORT names.

    Raises:
        UsageError: one of them is none.
    """
    return tuple(_spot(split(f"//{part.strip()}"), url) for part in url.netloc.split(","))


def _spot(part: SplitResult, url: SplitResult) -> Spot:
    try:
        host, port = part.hostname, part.port
    except ValueError:  # the port is no number, or too large
        host = port = None
    if not host or not port:
        raise UsageError(
            f"{url.geturl()!r} names no host and port (1 to 65535): write tcp://HOST:PORT, or for a dynamic group "
            "tcp://HOST:PORT,HOST:PORT; an IPv6 address in brackets"
        )
    return host, port


def resolving(places: tuple[Spot, ...]) -> tuple[Spot, ...]:
    """Those whose hosts have an address.

    Raises:
        UsageError: none has.
    """
    found = []
    wrong = None
    for host, port in places:
        try:
            check_resolves(host)
        except UsageError as error:
            wrong = error
        else:
            found.append((host, port))
    if not found and wrong is not None:
        raise wrong
    return tuple(found)


def own_place(places: tuple[Spot, ...], rank: int) -> Spot | None:
    """Where this worker should serve the store if nobody does."""
    if rank == 0:
        return next((place for place in places if is_here(place[0])), places[0])
    return places[0] if rank < 0 and is_here(places[0][0]) else None


def is_here(host: str) -> bool:
    """Whether that is an address of this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(spelled(host), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def is_free(port: int) -> bool:
    """Whether a store could be served there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for whoever listens there in this moment
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def stay_at(place: Spot, incarnation: str) -> socket.socket | None:
    """Show that this member stays there, until what is returned is closed."""
    if not HAS_NAMES:
        return None
    sign = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        sign.bind(f"\0{_name(place)}{incarnation}")
    except OSError:
        sign.close()
        return None
    return sign


def somebody_stays_at(place: Spot) -> bool:
    """Return True if members of a dynamic group of this user are on this host, which is at that place.

    Any user can bind any name, so a name of another user is passed over, with a warning. Where the kernel does not tell
    whose a name is (Linux before 5.3), each is believed.
    """
    if not HAS_NAMES:
        return False
    wanted = f"\0{_name(place)}".encode()
    for _ in range(2):  # the kernel may leave one out where others close theirs meanwhile
        for name, owner in _names():
            if not name.startswith(wanted):
                continue
            if owner in (None, os.getuid()):
                return True
            if owner not in _warned:
                _warned.add(owner)
                log.warning(
                    "telegrad: user %d of this host pretends that workers of %d are at %s:%d; it is not believed",
                    owner,
                    os.getuid(),
                    *place,
                )
    return False


def _names() -> Iterator[tuple[bytes, int | None]]:
    """Yield the names of the Unix sockets of this host, and the users who own them, where the kernel tells."""
    try:
        yield from _asked_names()
    except OSError:
        with contextlib.suppress(OSError), open(SOCKETS, "rb") as listed:
            for line in listed:
                yield b"\0" + line.rstrip(b"\n").partition(b"@")[2], None


def _asked_names() -> Iterator[tuple[bytes, int | None]]:
    """Do so by the kernel's NETLINK_SOCK_DIAG."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(ANSWER)
        wanted = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_UID, 0, 0)
        head = _HEAD.pack(_HEAD.size + len(wanted), _BY_FAMILY, _DUMP, 1, 0)
        kernel.sendto(head + wanted, (0, 0))
        while True:
            data, at = kernel.recv(1 << 16), 0
            while at < len(data):
                length, kind, *_ = _HEAD.unpack_from(data, at)
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    raise OSError("the kernel does not list its sockets")
                attributes = _attributes(data, at + _HEAD.size + _FOUND, at + length)
                uid = attributes.get(_UID)
                yield attributes.get(_NAME, b""), int.from_bytes(uid, sys.byteorder) if uid else None
                at += _aligned(length)


def _attributes(data: bytes, at: int, end: int) -> dict[int, bytes]:
    found = {}
    while at < end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        found[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    return found


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _name(place: Spot) -> str:
    host, port = place
    return f"telegrad-{os.getuid()}-at-{host}:{port}-"
