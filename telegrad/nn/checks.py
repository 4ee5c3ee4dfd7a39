"""What is noticed of a remote module here, before anything travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from telegrad.autograd.record import entered_id
from telegrad.checks import shown
from telegrad.errors import UsageError
from telegrad.hints import hint


def check_maker(module_cls: Any, args: Any, kwargs: Any) -> None:
    """Raise UsageError where these cannot make a module."""
    if isinstance(module_cls, nn.Module):
        raise UsageError(
            "RemoteModule takes what makes the module there, not a module: write RemoteModule(place, "
            f"{type(module_cls).__name__}, args, kwargs). For one that exists, load its state, too: "
            "RemoteModule(...).load_state_dict(module.state_dict())"
        )
    if not callable(module_cls):
        raise UsageError(
            f"RemoteModule takes a class, or a function that makes the module (module_cls), not {shown(module_cls)}"
        )
    if not isinstance(args, (tuple, list, type(None))):
        meant = "kwargs={...} for arguments by name" if isinstance(args, Mapping) else "(value,), with a comma"
        raise UsageError(f"the args of a RemoteModule are a tuple, not {shown(args)}: write {meant}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise UsageError(f"the kwargs of a RemoteModule are a dictionary by argument names, not {shown(kwargs)}")


def check_context_id(context_id: Any, method: str) -> None:
    """Raise UsageError where that cannot be the id of a context, the first argument of a method."""
    if not isinstance(context_id, int) or isinstance(context_id, bool) or context_id < 0:
        raise UsageError(
            f"{method}() takes the id of a context (context_id) first, not {shown(context_id)}: "
            f"write `with autograd.context() as context_id:`, and {method}(context_id...) inside"
        )


def gradients_are_lost(trains: bool, *inputs: Any) -> bool:
    """Whether a module that is called elsewhere should get gradients, or lead them on, but cannot.

    `trains`: it has parameters to be trained.
    """
    if not torch.is_grad_enabled() or entered_id() is not None:
        return False
    return trains or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(inputs))


def hint_at_context(what: str) -> None:
    """Say that a module was called where its gradients are lost."""
    hint(
        "no context",
        f"{what} was called outside of an autograd context: no gradients will flow through it, neither to its own "
        "parameters nor to what comes before it. Call it inside of `with telegrad.autograd.context() as context_id:`. "
        "Where no gradients are wanted, say so: call it inside of `with torch.no_grad():`, or after eval()",
    )
