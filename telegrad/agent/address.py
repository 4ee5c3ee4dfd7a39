"""Which address a worker tells others, and whether two workers share a host."""

from __future__ import annotations

import os
import socket
import uuid

from telegrad.errors import UsageError

ADDRESS_VARIABLE = "TELEGRAD_ADDRESS"
LOOPBACK = "127.0.0.1"


def host_identity() -> str:
    """Equal for two processes exactly where they share a kernel and a network: so they reach one another's sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return f"{uuid.getnode():x}/{socket.gethostname()}"


def own_address(wanted: str | None, store_host: str | None) -> str:
    """The address to listen on and to publish: the wanted one, else the one that reaches the store's host.

    Raises:
        UsageError: the wanted address is none of this host's.
    """
    wanted = wanted or os.environ.get(ADDRESS_VARIABLE)
    if wanted:
        return _checked(wanted)
    if store_host is not None:
        return _towards(store_host)
    return _of_host_name()


def _checked(wanted: str) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(wanted, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError as error:
        raise UsageError(
            f"{wanted!r} is no address of this host ({error}); give one that `ip addr` shows, "
            f"in the option `address` or in {ADDRESS_VARIABLE}"
        ) from error
    return str(address[0])


def _towards(host: str) -> str:
    """Ask the routing table; connecting a datagram socket sends nothing."""
    try:
        choices = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"the store's host {host!r} cannot be resolved: {error}") from error
    for family, kind, protocol, _, address in sorted(choices, key=lambda choice: choice[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return LOOPBACK


def _of_host_name() -> str:
    try:
        return _checked(socket.gethostname())
    except UsageError:
        return LOOPBACK
