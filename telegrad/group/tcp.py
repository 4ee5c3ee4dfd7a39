"""torch's store over TCP, in the form that torch has on this platform, listening no wider than it must."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import sys
from functools import partial
from typing import Any

import torch.distributed as dist

from telegrad.group.address import means_loopback, spelled

CROWD = 1024  # connections that wait to be accepted
_store = partial(dist.TCPStore, wait_for_workers=False, use_libuv=sys.platform != "win32")  # torch has no libuv there


def reach_tcp(host: str, port: int, timeout: datetime.timedelta) -> Any:
    """Connect to a store that another process serves.

    Raises:
        RuntimeError: nobody serves one there.
    """
    return _store(host, port, is_master=False, timeout=timeout)


def serve_tcp(host: str, port: int, shared: bool = False) -> tuple[Any, int]:
    """Serve a store at `host`, and nowhere else where that is an address of this machine; return it and its port.

    With `shared`, a store that this process serves at that port already, for `torch.distributed` or an earlier group,
    is used as well.

    Raises:
        OSError: the port is taken.
        RuntimeError: torch cannot serve a store.
    """
    address = listening_address(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=CROWD)
    except OSError:
        if not shared:
            raise
        return _store(host, port, is_master=True, multi_tenant=True), port
    with listener:
        return serve_on(listener, shared)


def serve_on(listener: socket.socket, shared: bool = False) -> tuple[Any, int]:
    """Serve a store on a listening socket, which stays open for its user; return it and its port."""
    host, port = listener.getsockname()[:2]
    served = listener.dup().detach()  # the store closes it
    return _store(_reachable(host), port, is_master=True, master_listen_fd=served, multi_tenant=shared), port


def listening_address(host: str) -> str:
    """Return the address of this machine that `host` means, or one that stands for all.

    A name that is not one of loopback may lead to a loopback address here, but not elsewhere: Debian's /etc/hosts gives
    a machine's own name 127.0.1.1. Behind a NAT or a service of Kubernetes, the host's address is none of this machine.
    """
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(spelled(host), 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                here = str(address[0])
                if means_loopback(host) or not ipaddress.ip_address(here.partition("%")[0]).is_loopback:
                    return here
    return "::" if _has_only_ipv6() else "0.0.0.0"


def _has_only_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return True
    return False


def _reachable(address: str) -> str:
    """Return where this process reaches a socket that is bound to an address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
