"""DistributedDataParallel in a context: the gradients of its replicas are averaged, and stored in the context.

The reducer reacts to the accumulation into `.grad`. So once a pass has found all gradients of replicated parameters, it
accumulates them there, in one call of the engine as the reducer requires, and removes them again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad._core.atfork import renewed
from telegrad._core.host.resources import instances
from telegrad.autograd.engine.guard import no_pass

Node = Any

# Guards the set below. A test for emptiness is atomic, and goes without the lock.
_lock = renewed(threading.Lock())
_seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # all modules that exist

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by reducers; only added to; see `_outlive`

# Guards the `.grad` of leaves while it holds a gradient of a context, for a hook or FSDP. These read it there, so they
# run under the lock. It is reentrant, because a hook may cause another one to run.
showing = renewed(threading.RLock())

# Locks for replicated leaves and their reducers, by process groups; only added to, under `_lock`. With one lock for
# all groups, ranks whose contexts reduce in different orders would deadlock.
_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """Track all replicated modules from now on, for all process groups, because `forward` may be called directly."""
    if not torch.distributed.is_available():  # there are none
        return
    register_module_module_registration_hook(_notice)  # registering twice is harmless
    found = instances(DistributedDataParallel)
    with _lock:
        _seen.update(found)


def _notice(module: Any, *_: Any) -> None:
    """Track a replicated module.

    Torch calls this when a module gets a submodule, as each replicated one does when created.
    """
    if isinstance(module, DistributedDataParallel):
        with _lock:
            _seen.add(module)


def replicated() -> set[int]:
    """Return the ids of the parameters of all replicated modules."""
    watch()
    if not _seen:
        return set()
    with _lock:
        modules = list(_seen)
    for module in modules:
        _outlive(module)
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _outlive(module: DistributedDataParallel) -> None:
    """Keep the process group of a module alive longer than its reducer.

    If the reducer holds the last reference, it destroys the group without releasing the GIL: it joins the group's
    threads, and these deadlock if they need the GIL to free a Python tensor. If Python frees the group, the GIL is
    released.
    """
    reducer = vars(module).get("reducer")  # missing while the module is being created
    if reducer is not None:
        _groups[reducer] = module.process_group


def reduce(gradients: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """Average the gradients of these leaves over the replicas, and return them. Blocks until all replicas take part."""
    leaves = [node.variable for node in gradients]
    with contextlib.ExitStack() as stack:
        for turn in _turns_of(leaves):
            stack.enter_context(turn)
        stack.enter_context(no_pass())
        for leaf in leaves:
            # a copy, since a reducer may write to the memory of `.grad`
            stack.callback(setattr, leaf, "grad", leaf.grad.clone() if leaf.grad is not None else None)
            leaf.grad = None
            if (hooks := leaf._backward_hooks) is not None:  # they were called already
                stack.callback(hooks.update, dict(hooks))
                hooks.clear()
        torch.autograd.backward([GradientEdge(node, 0) for node in gradients], list(gradients.values()))
        return {node: leaf.grad.clone() for node, leaf in zip(gradients, leaves, strict=True) if leaf.grad is not None}


def _turns_of(leaves: Sequence[Tensor]) -> list[Any]:
    """Return the locks of the process groups over which these leaves are averaged, in locking order."""
    ids = set(map(id, leaves))
    with _lock:
        modules = list(_seen)
    groups = {module.process_group for module in modules if not ids.isdisjoint(map(id, module.parameters()))}
    with _lock:
        return [_turns.setdefault(group, threading.RLock()) for group in sorted(groups, key=id)]
