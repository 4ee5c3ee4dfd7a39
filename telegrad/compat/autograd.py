"""`torch.distributed.autograd`."""

from __future__ import annotations

import contextlib
import re
from typing import Any, get_type_hints

import torch
from torch import Tensor

from telegrad import autograd
from telegrad._core.processes import instances
from telegrad._core.worker import current
from telegrad.autograd.contexts import OWNER_SHIFT, AutogradContext, entered_id
from telegrad.autograd.send_recv import RecvNode, Send, edge_of
from telegrad.errors import AutogradError, ContextEnded, TelegradError

__all__ = ["backward", "context", "get_gradients", "is_available"]

_ON_WORKER = re.compile(r"^On worker '([^']+)'.*:$", re.MULTILINE)  # the line of an error's text that names the worker

# The name that programs which inspect a graph expect.
RecvNode.__name__ = RecvNode.__qualname__ = "torch::distributed::autograd::RecvRpcBackward"


def is_available() -> bool:
    return True


class context:  # noqa: N801 - used like a function
    """A context for a forward and a backward pass across workers; use it as `with context() as context_id:`."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *_: object) -> None:
        self.autograd_context._entered.__exit__(None, None, None)


def _run_backward(context_id: int, roots: list[Tensor], retain_graph: bool) -> None:
    if not isinstance(context_id, int) or not isinstance(roots, (list, tuple)):
        raise TypeError("backward(): incompatible function arguments: give a context's id and a list of tensors")
    for root in roots:
        if isinstance(root, Tensor) and root.requires_grad and root.numel() == 1 and root.grad_fn is None:
            raise AutogradError("root does not have a valid gradient function: it is a leaf, nothing was computed")
    try:
        autograd.backward(context_id, roots, retain_graph)
    except TelegradError:
        raise
    except Exception as error:
        raise RuntimeError(f"Error on Node {_where(error)}: {error}") from error


def _where(error: Exception) -> int:
    """Return the rank of the worker that raised the error, as named in its text; otherwise this worker's rank."""
    agent = current.agent()
    with contextlib.suppress(IndexError, TelegradError):  # it names no worker, or one that has left
        return agent.identify(_ON_WORKER.findall(str(error))[-1]).id
    return agent.me.id


def _find_gradients(context_id: int) -> dict[Tensor, Tensor]:
    return autograd.get_gradients(context_id)


def dist_backward(context_id: int, roots: list[Tensor], retain_graph: bool = False) -> None:
    """Run the backward pass from `roots` across all workers, and accumulate the gradients of leaves in the context."""
    _run_backward(context_id, roots, retain_graph)


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of this worker's leaves that were accumulated in a context."""
    return _find_gradients(context_id)


# TorchScript code may call `dist_backward` and `get_gradients`, which it compiles. The two functions that they call
# stay in Python (`torch.jit.ignore`). TorchScript needs the annotations as types, not as strings.
for _function in (_run_backward, _find_gradients, dist_backward, get_gradients):
    _function.__annotations__ = get_type_hints(_function)
_run_backward = torch.jit.ignore(_run_backward)  # type: ignore[no-untyped-call]
_find_gradients = torch.jit.ignore(_find_gradients)  # type: ignore[no-untyped-call]
backward = dist_backward


class DistAutogradContext:
    """The parts of a context on this worker that programs may inspect."""

    def __init__(self, recorded: AutogradContext) -> None:
        self._context = recorded
        self._entered: Any = None

    def _context_id(self) -> int:
        return self._context.id

    def _known_worker_ids(self) -> set[int]:
        return {worker.id for worker in self._context.known} - {current.agent().me.id}

    def _send_functions(self) -> dict[int, SendFunction]:
        return {number: SendFunction(send) for number, send in self._context.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        # A context has no list of its Recv nodes, which live as long as the graphs of the received tensors. The search
        # through all objects is slow, but only programs that inspect graphs ask for this.
        nodes = [each for each in instances(RecvNode) if each.origin.context is self._context]
        keys = {node.origin.sender.id << OWNER_SHIFT | node.origin.number: node for node in nodes}
        return dict(sorted(keys.items()))


class SendFunction:
    """The node that receives the gradients of sent tensors, with the interface of `torch.autograd.graph.Node`."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        edges = [edge_of(edge) if isinstance(edge, Tensor) else edge for edge in self._send.edges]
        return tuple((edge.node, edge.output_nr) for edge in edges)


def _new_context() -> DistAutogradContext:
    """Enter a new context on this thread, until `_release_context`."""
    entering = autograd.context()
    made = _retrieve_context(entering.__enter__())
    made._entered = entering
    return made


def _release_context(context_id: int) -> None:
    """End a context on all workers."""
    contexts = current.conductor().contexts
    contexts.find(context_id)
    contexts.release(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(current.conductor().contexts.find(context_id))


def _current_context() -> DistAutogradContext:
    inside = entered_id()
    if inside is None:
        raise ContextEnded("this thread is in no distributed autograd context: enter one by `with context():`")
    return _retrieve_context(inside)


def _is_valid_context(context_id: int) -> None:
    _retrieve_context(context_id)


def _get_max_id() -> int:
    """Return the largest id that a context of this worker can have."""
    return (current.agent().me.id + 1 << OWNER_SHIFT) - 1


def _get_debug_info() -> dict[str, str]:
    conductor = current.conductor()
    return {
        "num_current_backward_passes": str(conductor.running),
        "num_autograd_contexts": str(len(conductor.contexts)),
    }


def _init(worker_id: int) -> None:
    """Do nothing: contexts are set up with the worker."""
