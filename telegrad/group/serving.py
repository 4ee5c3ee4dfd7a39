"""Serves a store in the place of one that was lost."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from telegrad.errors import RendezvousError, StoreUnreachable
from telegrad.group.board import DYNAMIC, OPEN, SERVED, SETTLING, Board, short
from telegrad.group.stores import serve
from telegrad.group.tcp import tcp_store


def serve_anew(host: str, port: int) -> tuple[Any, int]:
    """A store in the place of one that was lost, not yet open; at a free port, where that one is taken; and the port.

    Raises:
        RendezvousError: none can be served.
    """
    with contextlib.suppress(RendezvousError):
        store = serve(host, port, SETTLING) if port else None
        if store is not None:
            if not Board(store, DYNAMIC).read("terms"):
                return store, port
            store.set(SERVED, OPEN)  # this process has served another there, which tells where to go now
    try:
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            port = listener.getsockname()[1]
            store = tcp_store(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.dup().detach(),  # the store closes it
                multi_tenant=False,
            )
        store.set(SERVED, SETTLING)
    except (OSError, RuntimeError) as error:
        raise StoreUnreachable(f"the store cannot be served at {host}: {short(error)}") from error
    return store, port
