"""What a group does: why it waits, where the time goes, what it costs."""

from telegrad.insight.api import dashboard, dump, group, why
from telegrad.insight.collect import trace, tracing
from telegrad.insight.gradients import GradientGraph, graph

__all__ = ["GradientGraph", "dashboard", "dump", "graph", "group", "trace", "tracing", "why"]
