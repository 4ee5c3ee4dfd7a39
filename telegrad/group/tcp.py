"""torch's store over TCP, in the form that torch has on this platform, listening no wider than it must."""

from __future__ import annotations

import datetime
import logging
import socket
import sys
from functools import partial
from typing import Any

import torch.distributed as dist

from telegrad.addresses import family_of
from telegrad.group.address import is_address, listening_address

log = logging.getLogger("telegrad")

ANYWHERE = ("0.0.0.0", "::")
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
    if address in ANYWHERE and is_address(host) and host not in ANYWHERE:
        log.warning(
            "telegrad: %s is no address of this host: the store of this group listens at all addresses of the host. If "
            "nothing leads from there to here, as a NAT does, correct MASTER_ADDR or init_method",
            host,
        )
    try:
        listener = socket.create_server((address, port), family=family_of(address), backlog=CROWD)
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


def _reachable(address: str) -> str:
    """Return where this process reaches a socket that is bound to an address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
