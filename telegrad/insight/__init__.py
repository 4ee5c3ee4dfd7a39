"""What a group does: why it waits, where the time goes, what it costs.

Imports stand inside of the functions: the commands look at groups from outside, and need no torch for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib

    from telegrad.insight.collect import trace, tracing
    from telegrad.insight.export.autograd_graph import GradientGraph, graph
    from telegrad.insight.seen_groups import OwnGroup
    from telegrad.insight.web import Dashboard

__all__ = ["GradientGraph", "dashboard", "dump", "graph", "group", "trace", "tracing", "why"]

_GRAPH = "telegrad.insight.export.autograd_graph"
_COLLECT = "telegrad.insight.collect"
_HOME = {"GradientGraph": _GRAPH, "graph": _GRAPH, "trace": _COLLECT, "tracing": _COLLECT}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def group() -> OwnGroup:
    """The group of this process, to be looked at: `look()` asks all workers, `events()` gives what they have recorded.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> accounts, silent = telegrad.insight.group().look()
        >>> sorted(account["worker"] for account in accounts)
        ['driver', 'worker0', 'worker1']
    """
    from telegrad.insight.seen_groups import own_group

    return own_group()


def why() -> str:
    """What keeps the group from going on, in words; asks all workers, also those that are stuck.

    Returns:
        A text of some lines: who waits for whom and what, and what to look at.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> text = telegrad.insight.why()
        >>> "worker1" in text
        True
    """
    from telegrad.insight.report import told

    return told(group().look())


def dump() -> pathlib.Path | None:
    """Write down what this worker is at, and what has happened lately.

    Returns:
        The file; None where none are wanted (`TELEGRAD_DUMPS`).

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> file = telegrad.insight.dump()
    """
    from telegrad.ext.workers import current
    from telegrad.reporting.witness import witness_of

    return witness_of(current.here()).dump()


def dashboard(host: str | None = None, port: int = 0) -> Dashboard:
    """Serve a live view of the group for browsers.

    Args:
        host: at which address of this host, else the loopback address; who can reach it sees the group.
        port: at which port; 0 for a free one.

    Returns:
        What has the address, `url`, and `close()`.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> shown = telegrad.insight.dashboard()
        >>> shown.url
        'http://127.0.0.1:...'
        >>> shown.close()
    """
    from telegrad.ext.arguments import checks
    from telegrad.ext.processes import loopback
    from telegrad.insight.report import told
    from telegrad.insight.web import Dashboard

    if host is not None:
        checks.text("host", host, "an address of this host")
    checks.port("port", port)
    return Dashboard(group(), told, host or loopback(), port)
