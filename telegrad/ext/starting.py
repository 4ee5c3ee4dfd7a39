"""How a worker starts: stores of torch, joining, entering a group."""

from telegrad._core.membership import join
from telegrad._core.membership.dynamic import ttl_of
from telegrad._core.membership.join import shows_life
from telegrad._core.start.life import check_free, enter_group
from telegrad._core.stores import stores
from telegrad._core.stores.raw_stores import reach_tcp, serve_on, serve_tcp
from telegrad._core.stores.stores import RendezvousStore

__all__ = [
    "RendezvousStore", "check_free", "enter_group", "join", "reach_tcp", "serve_on", "serve_tcp", "shows_life",
    "stores", "ttl_of",
]  # fmt: skip
