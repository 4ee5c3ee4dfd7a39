"""Gradients of leaves in one process: the sums of one context, and their averages over several ranks.

The sums are separate from `.grad`. But modules of several ranks work on `.grad`: inside of a context their gradients
are averaged there, and stored in the context.

DistributedDataParallel: the reducer reacts to the accumulation into `.grad`. So once a pass has found all gradients of
replicated parameters, it accumulates them there, in one call of the engine as the reducer requires, and removes them
again.

FSDP (`fully_shard`): the graph leads to unsharded parameters, which belong to FSDP. FSDP takes their gradients out of
`.grad`, reduces them over all ranks, and adds the results to `.grad` of the sharded parameters, which belong to the
user. It does this in a node at the inputs of each module, and for the rest in a callback that torch's engine calls at
the end of its pass.

So a hook puts the gradient of an unsharded parameter into its `.grad`, at the time when the engine would do so without
a context. While the graph runs, `.grad` of a sharded parameter holds its gradient in the context, and FSDP adds to it.
A pass calls the engine several times, so the callback is called once all nodes of the module have run.

All ranks must call the same collectives in the same order, but the messages with gradients come to each rank in a
different order. So all nodes of a module must wait for the same messages: then they run in one step, in the engine's
order. Other passes are refused before any of the nodes runs. All ranks refuse them, so no rank waits for another.

The FSDP names used here are private. If a version of torch lacks one, no module is found, and `guard` refuses the
callback.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from telegrad._core.forks import renewed
from telegrad._core.processes import instances
from telegrad.autograd import guard
from telegrad.autograd.send_recv import nodes_behind
from telegrad.errors import UsageError

Node = Any


# Sums


class Gradients:
    """The gradients of leaves. Each has its own memory, so code may change it in place, as it may change a `.grad`."""

    # The engine may return one tensor for several leaves, and functions may keep a gradient that they return. So the
    # first gradient of a leaf is kept itself only if nothing else refers to it or to its memory, and otherwise copied
    # (`_own`). A sum that was made here belongs to this object alone, and later gradients are added to it in place.

    def __init__(self) -> None:
        # guards changes of all fields below: passes and pipelines of one context add concurrently
        self._lock = threading.Lock()
        self._sums: dict[Tensor, Tensor] = {}
        # Addresses of the storages of the sums. Entries stay when a sum is replaced or taken. If other memory gets the
        # same address, its gradient is copied without need, which is no error.
        self._memory: set[int] = set()
        self._added: set[Tensor] = set()  # leaves whose sum was made here, so it may be changed in place
        # The state of the `.grad` of leaves before their first gradient. If it is unchanged when an optimizer of torch
        # steps, the program has not copied the gradients of this context to `.grad`.
        self._earlier: dict[Tensor, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def as_dict(self) -> dict[Tensor, Tensor]:
        """Return the current sums by leaves. The copy is atomic, so the caller needs no lock."""
        return dict(self._sums)

    def passed_over(self, leaf: Tensor) -> bool:
        """Return True if the leaf has a sum here, and its `.grad` has not changed since before the first gradient."""
        return leaf in self._sums and _state(leaf.grad) == self._earlier.get(leaf, _state(None))

    def clear(self) -> None:
        """Drop all sums, because the context has ended or an optimizer has used them."""
        with self._lock:
            gone = self._sums
            self._sums, self._memory, self._added = {}, set(), set()
            self._earlier.clear()
        del gone  # not under the lock: freeing tensors may run user code

    def take(self, leaf: Tensor) -> Tensor | None:
        """Remove and return the gradient of a leaf."""
        with self._lock:
            self._added.discard(leaf)
            return self._sums.pop(leaf, None)

    def replace(self, leaf: Tensor, gradient: Tensor | None) -> None:
        """Set the gradient of a leaf; None removes it."""
        with self._lock:
            self._added.discard(leaf)
            if gradient is None:
                self._sums.pop(leaf, None)
            else:
                self._sums[leaf] = gradient

    def add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool = False) -> Tensor:
        """Add to the gradient of `leaf`; return the sum, differentiable with `graph`. `shared`: it has other owners."""
        with self._lock:
            return self._add(leaf, gradient, graph, shared)

    def add_all(self, found: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        """Add gradients without graphs: leaf, gradient, and True if the gradient has other owners."""
        with self._lock, torch.no_grad():
            for leaf, gradient, shared in found:
                if leaf in self._added and not gradient.is_sparse:
                    known = self._sums[leaf]
                    known += gradient
                else:
                    self._add(leaf, gradient, False, shared)

    def _add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool) -> Tensor:
        known = self._sums.get(leaf)
        if known is None and leaf.grad is not None:
            self._earlier[leaf] = _state(leaf.grad)
        if graph:
            made = gradient if known is None else total(known, gradient)
        elif known is None:
            made = self._own(leaf, gradient, shared)
        else:
            with torch.no_grad():
                if leaf in self._added and not gradient.is_sparse:
                    known += gradient
                    return known
                made = total(known, gradient)
            if not made.is_sparse and has_memory(made):
                self._added.add(leaf)
        self._sums[leaf] = made
        return made

    def _own(self, leaf: Tensor, gradient: Tensor, shared: bool) -> Tensor:
        """Return the gradient itself if it owns its memory and has the leaf's layout, else a copy."""
        gradient = gradient.detach()
        if gradient.layout is not torch.strided or gradient.is_nested:
            return gradient.clone() if shared else gradient
        if type(gradient) is not Tensor and not has_memory(gradient):
            return gradient.clone()
        storage = gradient.untyped_storage()
        address = storage.data_ptr()
        fills = storage.nbytes() == gradient.nbytes and gradient.stride() == leaf.stride()
        if shared or not fills or address in self._memory:
            with torch._C.DisableTorchFunctionSubclass():  # a `.grad` is a plain tensor, too
                gradient = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            address = gradient.untyped_storage().data_ptr()
        self._memory.add(address)
        return gradient


def _state(gradient: Tensor | None) -> tuple[int, int]:
    """Return a value that changes when a `.grad` is replaced or written to."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def has_memory(tensor: Tensor) -> bool:
    """Return False for a tensor that consists of others, such as a DTensor, and may have no memory of its own."""
    kind: Any = type(tensor)
    same: bool = kind is Tensor or kind.__torch_dispatch__ == Tensor.__torch_dispatch__
    return same


def total(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


# DistributedDataParallel

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
    """Track a replicated module. Torch calls this when a module gets a submodule, as a new replicated one does."""
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


def averaged(gradients: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """Average the gradients of these leaves over the replicas, and return them. Blocks until all replicas take part."""
    leaves = [node.variable for node in gradients]
    with contextlib.ExitStack() as stack:
        for turn in _turns_of(leaves):
            stack.enter_context(turn)
        # The reducer must see an ordinary pass: a callback that it queues belongs to the call of the engine below.
        if (thread := threading.get_ident()) in guard.running:
            guard.running.discard(thread)
            stack.callback(guard.running.add, thread)
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


# FSDP


class ShardedModule:
    """The modules below one FSDP root. `root` is torch's object that their states share."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.reduces = root.is_last_backward  # True if each pass reduces all gradients by its end
        self.groups: list[Any] = []  # parameter groups, each of which FSDP gathers and reduces as a unit
        self.sharded: list[Tensor] = []
        self.unsharded: list[Tensor] = []  # of the groups that have been gathered

    def add(self, group: Any) -> None:
        """Add a parameter group."""
        self.groups.append(group)
        self.reduces &= group.reduce_grads and group.all_reduce_grads
        self.sharded += [each.sharded_param for each in group.fsdp_params]
        self.unsharded += [each._unsharded_param for each in group.fsdp_params if hasattr(each, "_unsharded_param")]


def sharded_modules() -> list[ShardedModule]:
    """Return the FSDP modules of this process, by their roots. Return none if this version of torch has other names."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    found: dict[Any, ShardedModule] = {}
    try:
        if states is None or not states._module_state_mapping:
            return []
        for state in {reference() for reference in list(states._module_state_mapping.data.values())}:
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:  # torch 2.11
                if group is not None:
                    found.setdefault(state._state_ctx, ShardedModule(state._state_ctx)).add(group)
    except AttributeError:
        return []
    return list(found.values())


def unsharded_ids(modules: Iterable[ShardedModule]) -> set[int]:
    """Return the ids of the parameters whose gradients go to FSDP."""
    return {id(leaf) for module in modules for leaf in module.unsharded}


def averaged_ids() -> set[int]:
    """Return the ids of all parameters whose gradients several ranks average."""
    modules = sharded_modules()
    return replicated() | unsharded_ids(modules) if modules else replicated()


class ShardedPart:
    """The FSDP modules whose nodes a pass may run on this worker."""

    def __init__(self, modules: Sequence[ShardedModule], entries: Mapping[int, Iterable[Node]]) -> None:
        """Gradients enter at the nodes of `entries`: for entry 0 at the start of the pass, for others in messages.

        Raises:
            UsageError: FSDP cannot work in this pass.
        """
        waits = _waits(modules, entries)
        self._nodes = {root: list(nodes) for root, nodes in waits.items()}
        self._modules = [module for module in modules if module.root in self._nodes]
        self._callbacks: dict[Any, Callable[[], None]] = {}
        _check_order(waits.values())
        if not all(module.reduces for module in self._modules):
            raise UsageError(
                "an FSDP module (fully_shard) that does not reduce its gradients in each backward pass would carry "
                "them from one autograd context into the next: leave set_requires_gradient_sync, "
                "set_requires_all_reduce and set_is_last_backward at True. The gradients of all passes of one context "
                "are summed"
            )

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @contextlib.contextmanager
    def running(self, gradients: Gradients) -> Iterator[None]:
        """Set `.grad` inside as FSDP expects it, and move the gradients that FSDP computes to the context."""
        unsharded = [leaf for module in self._modules for leaf in module.unsharded if leaf.requires_grad]
        with showing, contextlib.ExitStack() as stack:
            for leaf in unsharded:
                stack.callback(leaf.register_hook(partial(_give, leaf)).remove)  # type: ignore[no-untyped-call]
            for parameter in (parameter for module in self._modules for parameter in module.sharded):
                stack.callback(_take_back, gradients, parameter, parameter.grad)
                parameter.grad = gradients.take(parameter)
            stack.callback(setattr, guard, "take_callback", guard.take_callback)
            guard.take_callback = self._take_callback
            try:
                yield
            except BaseException:
                for leaf in unsharded:
                    leaf.grad = None  # FSDP would add it to those of the next pass
                raise

    def _take_callback(self, callback: Any) -> bool:
        root = getattr(getattr(callback, "__self__", None), "_state_ctx", None)
        if root not in self._nodes:
            return False
        self._callbacks[root] = callback
        return True

    def finish(self, settled: Callable[[Node], bool]) -> None:
        """Call FSDP's callbacks of the modules whose nodes are all `settled` and have run."""
        for root in [root for root in self._callbacks if all(map(settled, self._nodes[root]))]:
            self._callbacks.pop(root)()


def _give(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Give FSDP the gradient of an unsharded parameter. Return zeros without memory; the pass ignores them."""
    with torch.no_grad():
        leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def _take_back(gradients: Gradients, parameter: Tensor, before: Tensor | None) -> None:
    """Move FSDP's result from `.grad` to the context, and add gradients that came there meanwhile."""
    made, parameter.grad = parameter.grad, before
    if made is not None:
        other = gradients.take(parameter)
        gradients.replace(parameter, made if other is None else total(made, other))


def _waits(modules: Iterable[ShardedModule], entries: Mapping[int, Iterable[Node]]) -> dict[Any, dict[Node, set[int]]]:
    """Return, by roots, the nodes of modules with the messages that each waits for."""
    owners = {id(each): module.root for module in modules for each in (*module.groups, *module.unsharded)}
    waits: dict[Any, dict[Node, set[int]]] = {}
    for entry, starts in entries.items():
        for node in nodes_behind(starts):
            own = getattr(node, "variable", None), getattr(node, "param_group", None)
            for root in (owners[id(each)] for each in own if id(each) in owners):
                # The roots, entry 0, are known on all ranks when the pass begins, so no order depends on them.
                waits.setdefault(root, {}).setdefault(node, set()).update([entry] if entry else [])
    return waits


def _check_order(waits: Iterable[Mapping[Node, set[int]]]) -> None:
    """Raise UsageError if nodes may run in a different order on other ranks."""
    kinds = [{frozenset(messages) for messages in nodes.values()} for nodes in waits]
    if any(len(each) > 1 for each in kinds) or len(set().union(*kinds) - {frozenset()}) > 1:
        raise UsageError(
            "the gradients of FSDP modules (fully_shard) come from other workers in several messages. These may arrive "
            "on each rank in a different order, but all ranks must reduce in the same order. Send the outputs of the "
            "modules in one call, and begin an autograd context for each forward pass. Split a module that makes a "
            "remote call in the middle: apply fully_shard to the part before the call and to the part after it, "
            "separately"
        )
