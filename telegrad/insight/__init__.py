"""What a group does: why it waits, where the time goes, what it costs."""

from __future__ import annotations

import importlib
import pathlib
from typing import TYPE_CHECKING, Any

from telegrad.insight.sources import OwnGroup
from telegrad.rpc import current

if TYPE_CHECKING:
    from telegrad.insight.collect import trace, tracing
    from telegrad.insight.dashboard import Dashboard
    from telegrad.insight.gradients import graph

_LATER = {  # what is imported when it is used
    "graph": "gradients",
    "trace": "collect",
    "tracing": "collect",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"telegrad.insight.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def group() -> OwnGroup:
    """The group of this process, to be looked at.

    Raises:
        NotInitialized: this process is in no group.
    """
    return OwnGroup(current.here().witness)


def why() -> str:
    """What keeps the group from going on, in words; asks all workers, also those that are stuck.

    Raises:
        NotInitialized: this process is in no group.
    """
    from telegrad.insight.reasons import told

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
    from telegrad.insight.dashboard import Dashboard
    from telegrad.insight.reasons import told

    return Dashboard(group(), told, host, port)


__all__ = ["dashboard", "dump", "graph", "group", "trace", "tracing", "why"]
