"""The host and port of a rendezvous URL, and whether the host is this one."""

from __future__ import annotations

import socket
from urllib.parse import SplitResult, urlsplit

from telegrad._core.stores.address import spelled
from telegrad.errors import UsageError

Spot = tuple[str, int]  # host and port


def split(url: str) -> SplitResult:
    """Split a URL into its parts.

    Raises:
        UsageError: it is not a URL.
    """
    try:
        return urlsplit(url)
    except ValueError as error:  # unbalanced brackets, or a host that cannot be normalized
        raise UsageError(
            f"{url!r} is not a URL ({error}): write tcp://HOST:PORT, an IPv6 address in brackets, file:///PATH or "
            "env://"
        ) from error


def spot_of(url: SplitResult) -> Spot:
    """Return the host and the port of tcp://HOST:PORT.

    Raises:
        UsageError: it names none, or several.
    """
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


def is_here(host: str) -> bool:
    """Return True if `host` is an address of this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(spelled(host), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
