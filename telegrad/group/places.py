"""Where a dynamic group may be found: its places, and whether members of it are on this host.

A newcomer that finds nobody who serves might serve by itself, and so begin a second group, where the first is only
about to have another server. So members who are at one of the places show that they stay there: each has a Unix socket
whose name tells the place.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from urllib.parse import SplitResult, urlsplit

from telegrad.errors import UsageError
from telegrad.group.address import check_resolves, spelled

Spot = tuple[str, int]  # host and port

SOCKETS = "/proc/net/unix"
HAS_NAMES = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # sockets with names that are on no file system


def spots(url: SplitResult) -> tuple[Spot, ...]:
    """The places that tcp://HOST:PORT,HOST:PORT names.

    Raises:
        UsageError: one of them is none.
    """
    return tuple(_spot(urlsplit(f"//{part.strip()}"), url) for part in url.netloc.split(","))


def _spot(part: SplitResult, url: SplitResult) -> Spot:
    try:
        host, port = part.hostname, part.port
    except ValueError:  # the port is no number, or too large
        host = port = None
    if not host or not port:
        raise UsageError(
            f"{url.geturl()!r} names no host and port: write tcp://HOST:PORT, or for a dynamic group "
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
    """Whether members of a dynamic group are on this host, which is at that place."""
    if not HAS_NAMES:
        return False
    wanted = f"@{_name(place)}"
    with contextlib.suppress(OSError):
        for _ in range(2):  # the kernel may leave one out where others close theirs meanwhile
            with open(SOCKETS, errors="replace") as listed:  # any user can bind a name of any bytes
                if any(wanted in line for line in listed):
                    return True
    return False


def _name(place: Spot) -> str:
    host, port = place
    return f"telegrad-{os.getuid()}-at-{host}:{port}-"
