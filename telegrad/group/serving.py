"""Serves a store in the place of one that was lost."""

from __future__ import annotations

import contextlib

from telegrad.errors import RendezvousError, StoreUnreachable
from telegrad.group.board import DYNAMIC, OPEN, SERVED, SETTLING, Board, short
from telegrad.group.sealing import SealedStore
from telegrad.group.stores import serve
from telegrad.group.tcp import serve_tcp
from telegrad.keyring import Keyring


def serve_anew(host: str, port: int, keys: Keyring) -> tuple[SealedStore, int]:
    """A store in the place of one that was lost, not yet open; at a free port, where that one is taken; and the port.

    Raises:
        RendezvousError: none can be served.
    """
    with contextlib.suppress(RendezvousError):
        store = serve(host, port, keys, SETTLING) if port else None
        if store is not None:
            if not Board(store, DYNAMIC).terms():
                return store, port
            Board(store).write(SERVED, OPEN)  # this process has served another there, which tells where to go now
    try:
        raw, port = serve_tcp(host, 0)
    except (OSError, RuntimeError) as error:
        raise StoreUnreachable(f"the store cannot be served at {host}: {short(error)}") from error
    store = SealedStore(raw, keys)
    Board(store).write(SERVED, SETTLING)
    return store, port
