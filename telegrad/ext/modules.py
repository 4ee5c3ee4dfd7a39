"""Modules whose parts live on several workers: how to find, name and own the parts."""

from telegrad._core.modules.module_host import device_of, moved
from telegrad._core.modules.module_tree import Branch, Recoverable, branches, joined, restore_model, state_of
from telegrad._core.modules.place import parse_place
from telegrad._core.modules.remote_module import RemoteModule, apart, gradients_are_lost, hint_at_context
from telegrad.optim.local import LocalOptimizer

__all__ = [
    "Branch",
    "LocalOptimizer",
    "Recoverable",
    "RemoteModule",
    "apart",
    "branches",
    "device_of",
    "gradients_are_lost",
    "hint_at_context",
    "joined",
    "moved",
    "parse_place",
    "restore_model",
    "state_of",
]
