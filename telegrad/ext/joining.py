"""How workers meet and join: stores, keys, addresses, and the start of a worker."""

from telegrad._core.joining import joining
from telegrad._core.joining.joining import shows_life, ttl_of
from telegrad._core.joining.rendezvous import call_off
from telegrad._core.pickling import main_program
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.security.tls import load_own
from telegrad._core.start.life import check_free, enter_group
from telegrad._core.stores import find_directory, stores, supervised
from telegrad._core.stores.board import OPEN, SERVED, Board
from telegrad._core.stores.find_directory import Keeping, connect
from telegrad._core.stores.group_keys import FILE, FILE_VARIABLE, find_keys, given_keys, of_environment, user_keys
from telegrad._core.stores.key_renewal import Renewal
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.stores.stores import Meeting
from telegrad._core.stores.tcp_store import reach_tcp, serve_on, serve_tcp

__all__ = [
    "FILE",
    "FILE_VARIABLE",
    "OPEN",
    "SERVED",
    "Board",
    "Keeping",
    "Keyring",
    "Meeting",
    "Renewal",
    "SealedStore",
    "call_off",
    "check_free",
    "connect",
    "enter_group",
    "find_directory",
    "find_keys",
    "given_keys",
    "joining",
    "load_own",
    "main_program",
    "new_key",
    "of_environment",
    "reach_tcp",
    "serve_on",
    "serve_tcp",
    "shows_life",
    "stores",
    "supervised",
    "ttl_of",
    "user_keys",
]
