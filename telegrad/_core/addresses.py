"""Address families and spellings of hosts. Only IPv6 addresses contain colons."""

from __future__ import annotations

import socket


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
