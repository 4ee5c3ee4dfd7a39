"""What a group does: why it waits, where the time goes, what it costs.

Its functions are imported when they are used: the commands look at groups from outside, and need no torch for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.insight.api import dashboard, dump, group, why
    from telegrad.insight.autograd_graph import GradientGraph, graph
    from telegrad.insight.collect import trace, tracing

_HOME = {
    "GradientGraph": "autograd_graph",
    "dashboard": "api",
    "dump": "api",
    "graph": "autograd_graph",
    "group": "api",
    "trace": "collect",
    "tracing": "collect",
    "why": "api",
}

__all__ = ["GradientGraph", "dashboard", "dump", "graph", "group", "trace", "tracing", "why"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
