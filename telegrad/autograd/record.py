"""The records of one worker for one forward and backward pass: sends, receipts, and gradients of leaves.

Two objects join the graphs of two workers. The sender keeps a `Send`, the edges of the tensors in a message. The
receiver makes a `Recv` node for the received tensors, whose `Origin` names the `Send` that gets their gradients.

Torch's graph ends at a process, so the two objects know each other by the number of the message. In a backward pass
gradients enter a worker's graph at a `Send`. A `Recv` is an end of that graph, and runs as early as possible, because
another worker waits for its gradients. `AutogradContext` keeps the `Send`s of a worker, and by them the graph, until
the context ends.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._core.forks import in_child
from telegrad._core.membership.members import Identity
from telegrad._core.wire.tensors import as_views_of_shared
from telegrad.autograd.gradients import Gradients, edge_of
from telegrad.autograd.passes import PassSpec, Task
from telegrad.errors import UsageError

OWNER_SHIFT = 48  # bits of a context's id: the rank of its owner is above a number that starts at random
UNKNOWN = 0  # the number of a message sent under `no_grad`, whose tensors were not recorded
FIRST = 1 << 63  # the engine runs the ready node with the highest number first: outgoing gradients must not wait

# Appended to a message's body: the context, and the message's number; then the indices of the recorded slots, four
# bytes each.
_HEAD = struct.Struct("<QQ")
read_id = struct.Struct("<Q").unpack_from  # of the context

entered: ContextVar[int | None] = ContextVar("telegrad_context", default=None)
entered_id = entered.get  # of this thread's context, or None

# The addresses of contexts in which tensors were received; each use is one atomic operation. A forked child keeps them:
# graphs that it inherits must not run without the gradients of other workers there either.
receiving: set[int] = set()


in_child(lambda: entered.set(None))  # the context belongs to a worker of the parent process


class Send(NamedTuple):
    """A message that contained tensors: the edges at which their gradients will enter, which keep the graph alive.

    A leaf has no edge and is kept itself. A Python node is kept alive by the edge's token.
    """

    edges: list[GradientEdge | Tensor]
    to: str
    what: Any  # the function whose arguments or result they are

    def __str__(self) -> str:
        name = getattr(self.what, "__name__", None) or (self.what if isinstance(self.what, str) else "a call")
        return f"{len(self.edges)} tensor(s) sent to {self.to!r} with {name}"


class Origin:
    """The message that the tensors came in, which gets their gradients."""

    __slots__ = ("after", "context", "number", "sender")

    def __init__(self, context: AutogradContext, sender: Identity, number: int, after: int = 0) -> None:
        self.context = context
        self.sender = sender
        self.number = number  # given by the sender
        self.after = after  # the number of the last message that this worker had sent in the context before

    def may_lead_behind(self, first: float) -> bool:
        """Return True if gradients sent there may come back to tensors sent in message `first` or later."""
        return self.after >= first or self.number == UNKNOWN

    def refusal(self) -> UsageError:
        """Return the error for a gradient that came here while torch's engine ran the graph without a pass."""
        if self.number == UNKNOWN:
            return UsageError(
                f"a gradient leads to a tensor that worker {self.sender.name!r} sent in a call under torch.no_grad(), "
                "but the tensor has a graph there, because it was made under torch.enable_grad() or before the call. "
                "Make the call without no_grad, or detach the tensor"
            )
        return UsageError(
            f"the graph leads to tensors that came from worker {self.sender.name!r} in context {self.context.id}. "
            "Run it with telegrad.autograd.backward or telegrad.autograd.grad, inside that context"
        )


class Recv(torch.autograd.Function):
    """One node for all received tensors of one message. It sends their gradients to the sender of the tensors.

    Its only input, the anchor, is an empty leaf made for it alone: asking for its gradient makes the engine run the
    node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, origin: Origin, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.anchor = anchor
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        origin = ctx.origin
        running = origin.context.running
        if running is None:
            raise origin.refusal()
        running.ship(origin, gradients)
        return None, None, None


RecvNode: type = Recv._backward_cls
# skips the check for function transforms
_apply: Callable[..., Sequence[Tensor]] = super(torch.autograd.Function, Recv).apply


def receive(tensors: Sequence[Tensor], origin: Origin) -> Sequence[Tensor]:
    """Return the tensors with a Recv as history, which sends their gradients to their origin."""
    # the mode of the receiving thread, not that of the sender
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            return receive(tensors, origin)
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    received = _apply(anchor, origin, tensors)
    hurry = getattr(received[0].grad_fn, "_set_sequence_nr", None)
    if hurry is not None:
        hurry(FIRST)
    return received


class Inside:
    """A context manager: code that this thread runs inside belongs to the context with that id; None: to none."""

    __slots__ = ("_id", "_token")

    def __init__(self, id_: int | None) -> None:
        self._id = id_
        self._token: Token[int | None] | None = None  # None unless entered

    def __enter__(self) -> None:
        self._token = entered.set(self._id)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        entered.reset(self._token)


class Mailbox:
    """The tasks of one context. One thread at a time runs them; a thread that adds one to an idle mailbox starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields below
        self._tasks: list[Task] = []
        self.busy = False  # a thread runs the tasks; may be read without the lock
        self._calls: queue.SimpleQueue[bool] | None = None  # see `call`

    def put(self, task: Task, here: bool) -> bool:
        """Add a task. Return True if the caller must start a thread for it, or with `here` run it itself."""
        with self._lock:
            self._tasks.append(task)
            if self.busy:
                return False
            self.busy = True
            if self._calls is None or here:
                return True
            self._calls.put(True)
            return False

    def take(self) -> list[Task]:
        """Remove and return all tasks. If there are none, the calling thread is no longer responsible."""
        # Both in one step under the lock: a task that `put` added between them would find the mailbox busy, and no
        # thread would ever run it.
        with self._lock:
            tasks, self._tasks = self._tasks, []
            self.busy = bool(tasks)
            return tasks

    def put_back(self, tasks: list[Task]) -> None:
        """Put tasks that were taken and not done before those that were added since."""
        # The mailbox stays busy, so no thread begins at it until the caller has found one.
        with self._lock:
            self._tasks[:0] = tasks

    def call(self, calls: queue.SimpleQueue[bool] | None) -> None:
        """From now on wake the thread that waits on `calls`, by True, to run tasks. None ends this."""
        with self._lock:
            self._calls = calls


class AutogradContext:
    """One worker's records of one forward and backward pass."""

    def __init__(self, id_: int, numbers: Iterator[int]) -> None:
        """`numbers` yields the numbers of recorded messages, which are unique on this worker."""
        self.id = id_
        self.owner = id_ >> OWNER_SHIFT  # the rank of the worker that began the context
        self.gradients = Gradients()
        self.autocast = b""  # in which passes of this worker run here only, see `Settings.sends_modes`
        self.passes = 0  # in which this worker has taken part; `Contexts` counts and guards them
        # A pass, which has `ship`; set by the thread that runs the graph, one at a time. A `Recv` finds the pass by its
        # context and not by the current thread: the engine may run it on the thread of an accelerator.
        self.running: Any = None
        self.tasks = Mailbox()
        # This worker's parts in passes, and tasks of passes whose roots are not available yet. No lock: each use is one
        # atomic operation of a dict. None: the pass has failed, and its messages are dropped.
        self.parts: dict[PassSpec, Any] = {}
        self.early: dict[PassSpec, list[Task]] = {}
        self._numbers = numbers
        # Guards changes of all fields below, and iteration over them. Reads without the lock are single dict
        # operations, and so atomic (`get`, `len`, `copy`), or read a flag that is set once.
        self._lock = threading.Lock()
        self.ended = False
        self._sends: dict[int, Send] = {}  # by message numbers
        self._last = 0  # the highest of these numbers; a read without the lock may return the previous one
        self._known: dict[str, Identity] = {}  # workers known to take part

    def __repr__(self) -> str:
        state = "has ended" if self.ended else "its graph runs" if self.running is not None else "nothing runs"
        known = ", ".join(self._known.copy()) or "no other worker"
        return (
            f"<AutogradContext {self.id} of rank {self.owner}: {len(self._sends)} sends, gradients of "
            f"{len(self.gradients)} leaves, {state}; known to {known}>"
        )

    # The default argument keeps the set reachable while the interpreter ends, when globals may be gone.
    def __del__(self, receiving: set[int] = receiving) -> None:
        receiving.discard(id(self))

    @property
    def sends(self) -> dict[int, Send]:
        """The sends until now, by message numbers."""
        with self._lock:
            return self._sends.copy()

    @property
    def known(self) -> list[Identity]:
        """The workers that take part, as far as this one knows; it must forward the end of the context to them."""
        with self._lock:
            return list(self._known.values())

    def entered(self) -> Inside:
        """Return a context manager: code that this thread runs inside belongs to this context."""
        return Inside(self.id)

    def meet(self, who: Identity) -> None:
        """Record that a worker takes part, and must be notified of the end."""
        if self._known.get(who.name) != who:
            with self._lock:
                self._known[who.name] = who

    def met(self, name: str) -> Identity | None:
        """Return the worker that takes part under that name. A restarted worker of that name does not take part."""
        return self._known.get(name)

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Record the edges of sent tensors that have a graph. Return the bytes to append to the message."""
        # Without `graph` the call runs under no_grad, and a tensor may have a graph all the same. Its slot is sent with
        # the number UNKNOWN: the receiver makes a `Recv` for it, which raises at the first gradient. As a plain leaf it
        # would take the gradient in silence.
        slots: list[int] = []
        edges: list[GradientEdge | Tensor] = []
        for slot, tensor in enumerate(tensors):
            if tensor.requires_grad and (graph or tensor.grad_fn is not None):
                if tensor.is_nested:
                    raise UsageError(
                        "a nested tensor that requires a gradient cannot be sent in an autograd context: send the list "
                        "of its parts, tensor.unbind(), or tensor.detach()"
                    )
                slots.append(slot)
                if graph:
                    edges.append(tensor if tensor.is_leaf else edge_of(tensor))
        number = UNKNOWN
        self.meet(to)
        if edges:
            number = next(self._numbers)
            kept = Send(edges, to.name, what)
            with self._lock:
                if not self.ended:  # else the graph would never be released
                    self._sends[number] = kept
                    self._last = max(self._last, number)
        return _HEAD.pack(self.id, number) + struct.pack(f"<{len(slots)}I", *slots)

    def received(self, said: bytes, tensors: list[Tensor], sender: Identity) -> list[Tensor]:
        """Replace received tensors that were recorded, as the message says, by tensors with a history."""
        self.meet(sender)
        _, number = _HEAD.unpack_from(said)
        slots = struct.unpack_from(f"<{(len(said) - _HEAD.size) // 4}I", said, _HEAD.size)
        if slots:
            receiving.add(id(self))
            # `unpack` returns a plain list if no memory can overlap, as in nearly all messages, and a subclass
            # otherwise.
            if type(tensors) is not list:
                tensors = as_views_of_shared(tensors)
            # `_last` is read without the lock. Every message on which this one depends was recorded before it was sent,
            # so its number is seen; a concurrent send of another thread may be missed, since no gradient leads to it.
            recorded = [tensors[slot].requires_grad_(False) for slot in slots]
            for slot, tensor in zip(slots, receive(recorded, Origin(self, sender, number, self._last)), strict=True):
                tensors[slot] = tensor
        return tensors

    def close(self) -> None:
        """Mark the context as ended, and release all records."""
        with self._lock:
            self.ended = True
            sends, self._sends = self._sends, {}
        sends.clear()  # not under the lock: graphs may hold user objects, whose finalizers run user code
        self.drop_parts()
        self.gradients.clear()

    def drop_parts(self) -> None:
        """Release the parts in passes: they refer to the graph, and to this context."""
        self.parts.clear()
        self.early.clear()
