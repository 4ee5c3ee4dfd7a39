"""Modules whose parts live on several workers: how to find, name and own the parts."""

from telegrad._core.modules.module_host import device_of, moved, parse_place
from telegrad._core.modules.module_tree import (
    Recoverable,
    RemotePart,
    branches,
    joined,
    restore_model,
    state_of,
    update_replicas,
)
from telegrad._core.modules.remote_module import RemoteModule, gradients_are_lost, hint_at_context, without_remote_state
from telegrad.optim.owner import LocalOptimizer

__all__ = [
    "LocalOptimizer", "Recoverable", "RemoteModule", "RemotePart", "branches", "device_of", "gradients_are_lost",
    "hint_at_context", "joined", "moved", "parse_place", "restore_model", "state_of", "update_replicas",
    "without_remote_state",
]  # fmt: skip
