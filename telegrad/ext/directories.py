"""The protocol that a directory engine implements, and the functions for its clients."""

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

__all__ = [
    "ABSENT", "Compacted", "DirectoryLost", "DirectoryRefused", "DirectoryReset", "EmbeddedDirectory", "Entry",
    "Event", "Events", "Lease", "LeaseLost", "Listing", "Result", "Sessions", "SocketSession", "Swap", "Unanswered",
    "Unsent", "check_key", "check_ttl", "check_value", "left",
]  # fmt: skip
