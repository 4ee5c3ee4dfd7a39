"""What users call: the functions of `telegrad.insight` that look at the group of this process."""

from __future__ import annotations

import pathlib

from telegrad.insight.reasons import told
from telegrad.insight.sources import OwnGroup, own_group
from telegrad.insight.web import Dashboard
from telegrad.rpc import current


def group() -> OwnGroup:
    """The group of this process, to be looked at.

    Raises:
        NotInitialized: this process is in no group.
    """
    return own_group()


def why() -> str:
    """What keeps the group from going on, in words; asks all workers, also those that are stuck.

    Raises:
        NotInitialized: this process is in no group.
    """
    return told(group().look())


def dump() -> pathlib.Path | None:
    """Write down what this worker is at, and what has happened lately; the file, None where none are wanted.

    Raises:
        NotInitialized: this process is in no group.
    """
    return current.here().witness.dump()


def dashboard(host: str = "127.0.0.1", port: int = 0) -> Dashboard:
    """Serve a live view of the group for browsers; its `url` says where, `close()` ends it.

    Raises:
        NotInitialized: this process is in no group.
    """
    return Dashboard(group(), told, host, port)
