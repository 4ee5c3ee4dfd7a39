"""DistributedDataParallel inside of a context: the gradients of its replicas are averaged, and then are the context's.

Its reducer listens to the real accumulation into `.grad`. So the gradients that a pass has found are accumulated there
once all of them are known, all in one call of the engine as the reducer wants it, and taken away again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad._core.atfork import renewed
from telegrad._core.host.live_objects import instances
from telegrad.autograd.engine.guard import no_pass

Node = Any

# Guards the two below; a look whether there is anything, or whether it is watched for, is atomic and goes without.
_lock = renewed(threading.Lock())
_seen: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # all that there are
_watching = not torch.distributed.is_available()  # or there is nothing to watch for

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of reducers; only added to; see `_outlive`

# Guards `.grad` of leaves while it shows a gradient of a context, to a hook or FSDP. So these run under it, for they
# look there; it is reentrant, since a hook may do what shows another.
showing = renewed(threading.RLock())

# The same for replicated leaves and their reducers, by process groups; only added to, under `_lock`. With one lock for
# all groups, ranks whose contexts reduce in different orders would wait for each other.
_turns: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def watch() -> None:
    """From now on know of all replicated modules, over whichever process group: `forward` may be called directly."""
    global _watching
    if not _watching:
        register_module_module_registration_hook(_notice)  # twice does no harm
        found = instances(DistributedDataParallel)
        with _lock:
            _seen.update(found)
            _watching = True


def _notice(module: Any, *_: Any) -> None:
    """A module is given a submodule, as each replicated one is when it is made."""
    if isinstance(module, DistributedDataParallel):
        with _lock:
            _seen.add(module)


def replicated() -> set[int]:
    """The ids of the parameters of such modules."""
    watch()
    if not _seen:
        return set()
    with _lock:
        modules = list(_seen)
    for module in modules:
        _outlive(module)
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _outlive(module: DistributedDataParallel) -> None:
    """Have the process group of a module live longer than its reducer, and die by Python's hand, which lets others run.

    A reducer that is the last to hold it would end it while it holds the interpreter: it joins the group's threads, and
    these wait for the interpreter if they have a tensor of Python's to give back.
    """
    reducer = vars(module).get("reducer")  # there is none yet while the module is made
    if reducer is not None:
        _groups[reducer] = module.process_group


def reduce(gradients: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """What the replicas make of the gradients of these leaves together; waits for them."""
    leaves = [node.variable for node in gradients]
    with contextlib.ExitStack() as stack:
        for turn in _turns_of(leaves):
            stack.enter_context(turn)
        stack.enter_context(_hidden(leaves))
        stack.enter_context(no_pass())
        for leaf in leaves:
            stack.enter_context(_silenced(leaf))
        torch.autograd.backward([GradientEdge(node, 0) for node in gradients], list(gradients.values()))
        return {node: leaf.grad.clone() for node, leaf in zip(gradients, leaves, strict=True) if leaf.grad is not None}


def _turns_of(leaves: Sequence[Tensor]) -> list[Any]:
    """Return the locks of the process groups over which these leaves are averaged, in the order for taking them."""
    ids = set(map(id, leaves))
    with _lock:
        modules = list(_seen)
    groups = {module.process_group for module in modules if not ids.isdisjoint(map(id, module.parameters()))}
    with _lock:
        return [_turns.setdefault(group, threading.RLock()) for group in sorted(groups, key=id)]


@contextlib.contextmanager
def _hidden(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Without what is in `.grad`; a copy of it comes back, since a reducer may write to its memory."""
    hidden = [leaf.grad.clone() if leaf.grad is not None else None for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in zip(leaves, hidden, strict=True):
            leaf.grad = gradient


@contextlib.contextmanager
def _silenced(leaf: Tensor) -> Iterator[None]:
    """Without the hooks that have been called already."""
    hooks = leaf._backward_hooks
    kept = dict(hooks or {})
    if hooks is not None:
        hooks.clear()
    try:
        yield
    finally:
        if hooks is not None:
            hooks.update(kept)
