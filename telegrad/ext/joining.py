"""How processes find a group, without torch: keys, stores, names, and the protocol of directory engines."""

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
from telegrad._core.stores import find_directory, launchers
from telegrad._core.stores.directory import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryRefused,
    DirectoryReset,
    Entry,
    Event,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
    check_key,
    check_ttl,
    check_value,
)
from telegrad._core.stores.directory_client import (
    EmbeddedDirectory,
    Result,
    Sessions,
    SocketSession,
    Unanswered,
    Unsent,
    left,
)
from telegrad._core.stores.find_directory import DirectoryMonitor, connect
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedStore, SealRenewal

__all__ = [
    "ABSENT", "FILE", "FILE_VARIABLE", "OPEN", "SERVED", "Compacted", "DirectoryLost", "DirectoryMonitor",
    "DirectoryRefused", "DirectoryReset", "EmbeddedDirectory", "Entry", "Event", "Events", "KeyValueStore", "Keyring",
    "Lease", "LeaseLost", "Listing", "Result", "SealRenewal", "SealedStore", "Sessions", "SocketSession", "Swap",
    "Unanswered", "Unsent", "call_off", "check_key", "check_name", "check_role", "check_ttl", "check_value", "connect",
    "find_directory", "find_keys", "given_keys", "launchers", "left", "load_own", "main_program", "new_key",
    "of_environment", "user_keys",
]  # fmt: skip
