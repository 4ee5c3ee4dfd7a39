"""Address families and spellings of hosts. Only IPv6 addresses contain colons."""

from __future__ import annotations

import socket
from typing import Any


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
