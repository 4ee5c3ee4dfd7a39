"""How processes find a group, without torch: keys, stores, directories, names. `starting` has the rest."""

from telegrad._core.membership.members import check_name, check_role
from telegrad._core.membership.rendezvous import call_off
from telegrad._core.pickling import main_program
from telegrad._core.security.keyring import (
    FILE,
    FILE_VARIABLE,
    Keyring,
    find_keys,
    given_keys,
    new_key,
    of_environment,
    user_keys,
)
from telegrad._core.security.tls import load_own
from telegrad._core.stores import find_directory
from telegrad._core.stores import launchers as supervised
from telegrad._core.stores.find_directory import DirectoryMonitor, connect
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedStore, SealRenewal

__all__ = [
    "FILE", "FILE_VARIABLE", "OPEN", "SERVED", "DirectoryMonitor", "KeyValueStore", "Keyring", "SealRenewal",
    "SealedStore", "call_off", "check_name", "check_role", "connect", "find_directory", "find_keys", "given_keys",
    "load_own", "main_program", "new_key", "of_environment", "supervised", "user_keys",
]  # fmt: skip
