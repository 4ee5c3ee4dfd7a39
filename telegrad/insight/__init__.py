"""Debugging and monitoring of a group: why it waits, where the time goes, and what it costs.

Imports are inside the functions, because the commands inspect groups from outside without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pathlib

    from telegrad.insight.autograd_graph import GradientGraph, graph
    from telegrad.insight.collect import trace, tracing
    from telegrad.insight.seen_groups import group
    from telegrad.insight.web import Dashboard

__all__ = ["GradientGraph", "dashboard", "dump", "graph", "group", "trace", "tracing", "why"]

_GRAPH = "telegrad.insight.autograd_graph"
_COLLECT = "telegrad.insight.collect"
_GROUPS = "telegrad.insight.seen_groups"
_HOME = {"GradientGraph": _GRAPH, "graph": _GRAPH, "trace": _COLLECT, "tracing": _COLLECT, "group": _GROUPS}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def why() -> str:
    """Explain what keeps the group waiting. All workers are asked, including blocked ones.

    Returns:
        A text of some lines: which workers wait for which, for what, and where to look.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> text = telegrad.insight.why()
        >>> "worker1" in text
        True
    """
    from telegrad.insight.report import told
    from telegrad.insight.seen_groups import group

    return told(group().look())


def dump() -> pathlib.Path | None:
    """Write the state and the latest events of this worker to a file.

    Returns:
        The file; None if dumps are off (`TELEGRAD_DUMPS`) or it failed.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> file = telegrad.insight.dump()
    """
    from telegrad.ext.workers import current
    from telegrad.reporting.introspection import introspection_of

    return introspection_of(current.here()).dump()


def dashboard(host: str | None = None, port: int = 0) -> Dashboard:
    """Serve a live view of the group for browsers.

    Args:
        host: the address of this host to listen on, by default the loopback address; the token in `url` gives access.
        port: the port; 0 for a free one.

    Returns:
        The server, with its address `url` and `close()`.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> shown = telegrad.insight.dashboard()
        >>> shown.url
        'http://127.0.0.1:...'
        >>> shown.close()
    """
    from telegrad.ext.feedback import checks
    from telegrad.ext.host import loopback
    from telegrad.insight.report import told
    from telegrad.insight.seen_groups import group
    from telegrad.insight.web import Dashboard

    if host is not None:
        checks.text("host", host, "an address of this host")
    checks.port("port", port)
    return Dashboard(group(), told, host or loopback(), port)
