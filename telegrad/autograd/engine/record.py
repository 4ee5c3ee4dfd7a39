"""What one worker records of one forward and backward pass: what it sent, what it received, what leaves got.

Two things join the graphs of two workers: on one side a `Send`, the edges of the tensors that left in a message; on the
other a `Recv` node, on which hangs what came in it, with the `Origin` that says whose `Send` its gradients are for.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._core.atfork import in_child
from telegrad._core.membership.members import Identity
from telegrad._core.wire.unpacking import as_views_of_shared
from telegrad.autograd.engine.edges import edge_of
from telegrad.autograd.engine.gradients import Gradients
from telegrad.errors import UsageError

OWNER_SHIFT = 48  # a context's id: its owner's rank, above a number that is random at first
UNKNOWN = 0  # the number of a message that was sent under `no_grad`, so that nothing is known of what it took along
FIRST = 1 << 63  # of the nodes that are ready the engine runs that of the highest number: what leaves shall not wait

# Behind a message's body: the context, and the message's number; then which slots are recorded, four bytes each.
_HEAD = struct.Struct("<QQ")
read_id = struct.Struct("<Q").unpack_from  # of the context

_entered: ContextVar[int | None] = ContextVar("telegrad_context", default=None)
entered_id = _entered.get  # of the context in which this thread's code runs, if it does in one

# The addresses of contexts in which tensors were received; each use is one operation. A forked child keeps them: graphs
# that it inherits must not run without the gradients of other workers there either.
receiving: set[int] = set()


@in_child
def _leave() -> None:
    """The context in which the forking thread's code runs is one of the parent's workers'."""
    _entered.set(None)


class Send(NamedTuple):
    """A message that took tensors away: where their gradients will come in. A leaf stands for itself."""

    edges: list[GradientEdge | Tensor]
    to: str
    what: Any  # the function whose arguments or result they are

    def __str__(self) -> str:
        name = getattr(self.what, "__name__", None) or (self.what if isinstance(self.what, str) else "a call")
        return f"{len(self.edges)} tensor(s) sent to {self.to!r} with {name}"


class Origin:
    """Where the tensors of one message came from, and so where their gradients go."""

    __slots__ = ("after", "context", "number", "sender")

    def __init__(self, context: AutogradContext, sender: Identity, number: int, after: int = 0) -> None:
        self.context = context
        self.sender = sender
        self.number = number  # the message's, to its sender
        self.after = after  # the number of the last message that this worker had sent in the context by then

    def may_lead_behind(self, first: float) -> bool:
        """Return True if gradients that go there may come back to what was sent in message `first`, or later."""
        return self.after >= first or self.number == UNKNOWN

    def refusal(self) -> UsageError:
        """Return why a gradient that has come here cannot go on, where torch's engine runs the graph without a pass."""
        if self.number == UNKNOWN:
            return UsageError(
                f"a gradient leads to a tensor that worker {self.sender.name!r} sent in a call under torch.no_grad(), "
                "but that has a graph there, since it was made under torch.enable_grad() or before the call. Make the "
                "call without no_grad, or detach the tensor"
            )
        return UsageError(
            f"the graph leads to tensors that came from worker {self.sender.name!r} in context {self.context.id}. "
            "Run it with telegrad.autograd.backward or telegrad.autograd.grad, inside of that context"
        )

    def __repr__(self) -> str:
        return f"<Origin: message {self.number} of {self.sender.name!r} in context {self.context.id}>"


class Recv(torch.autograd.Function):
    """The received tensors of one message hang on one node, which passes their gradients on to their sender.

    Its only input, the anchor, is an empty leaf made for it alone: whoever wants its gradient makes the engine run
    the node.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, origin: Origin, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.anchor = anchor
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.origin.context.ship(ctx.origin, gradients)
        return None, None, None


RecvNode: type = Recv._backward_cls
_apply: Callable[..., Sequence[Tensor]] = super(torch.autograd.Function, Recv).apply  # without looking for transforms


def send(tensors: Sequence[Tensor], to: str, what: Any) -> Send:
    """What keeps the graph of tensors that leave; of a node in Python it is the edge's token that does."""
    return Send([tensor if tensor.is_leaf else edge_of(tensor) for tensor in tensors], to, what)


def receive(tensors: Sequence[Tensor], origin: Origin) -> Sequence[Tensor]:
    """The same tensors with a history: a Recv, whose gradients go to their origin."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():  # of whoever waits; they were sent in another
        with torch.inference_mode(False), torch.enable_grad():
            return receive(tensors, origin)
    anchor = torch.empty(0, requires_grad=True)
    received = _apply(anchor, origin, tensors)
    hurry = getattr(received[0].grad_fn, "_set_sequence_nr", None)
    if hurry is not None:
        hurry(FIRST)
    return received


class Running(Protocol):
    """A pass that runs the graph of a context."""

    def ship(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Gradients have come to a Recv: they leave."""


class Inside:
    """A context manager: what this thread runs inside of it belongs to the context of that id; with None, to none."""

    __slots__ = ("_id", "_token")

    def __init__(self, id_: int | None) -> None:
        self._id = id_
        self._token: Token[int | None] | None = None  # while inside

    def __enter__(self) -> None:
        self._token = _entered.set(self._id)

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _entered.reset(self._token)


class AutogradContext:
    """One forward and backward pass, as far as this worker takes part: what it has recorded."""

    def __init__(self, id_: int, numbers: Iterator[int]) -> None:
        """`numbers` are given to the messages that it records, and never to two of this worker."""
        self.id = id_
        self.gradients = Gradients()
        self.passes = 0  # in which this worker has taken part; `Contexts` counts them, and guards this
        self.running: Running | None = None  # set by whoever runs the graph, which one thread does at a time
        self._numbers = numbers
        # Guards changes of all below, and looks at all of one. Each look that goes without it is one operation of a
        # dict, and so atomic (`get`, `len`, `copy`), or sees a flag that is set once.
        self._lock = threading.Lock()
        self.ended = False
        self._sends: dict[int, Send] = {}  # by the numbers of messages
        self._last = 0  # the highest of these numbers; a look without the lock sees this or the one before
        self._known: dict[str, Identity] = {}  # workers that have heard of it from here, or told of it

    def __repr__(self) -> str:
        state = "has ended" if self.ended else "its graph runs" if self.running is not None else "nothing runs"
        known = ", ".join(self._known.copy()) or "nobody else"
        return (
            f"<AutogradContext {self.id} of rank {self.owner}: {len(self._sends)} sends, gradients of "
            f"{len(self.gradients)} leaves, {state}; known to {known}>"
        )

    def __del__(self) -> None:
        receiving.discard(id(self))

    @property
    def owner(self) -> int:
        """The rank of the worker that began it."""
        return self.id >> OWNER_SHIFT

    @property
    def sends(self) -> dict[int, Send]:
        """What was sent until now, by the numbers of the messages."""
        with self._lock:
            return self._sends.copy()

    @property
    def known(self) -> list[Identity]:
        """The workers that take part, as far as this one has heard; they have to hear of the end."""
        with self._lock:
            return list(self._known.values())

    def entered(self) -> Inside:
        """A context manager: what this thread runs inside of it belongs to this context."""
        return Inside(self.id)

    def meet(self, who: Identity) -> None:
        """A worker takes part, and has to hear of the end."""
        if self._known.get(who.name) != who:
            with self._lock:
                self._known[who.name] = who

    def met(self, name: str) -> Identity | None:
        """Who takes part under that name: one who has come back under it knows nothing of this context."""
        return self._known.get(name)

    def knows(self, who: Identity) -> bool:
        """Whether that worker takes part, as far as this one has heard."""
        return self._known.get(who.name) == who

    def may_be_of(self, who: Identity) -> bool:
        """Return True if that worker began it, or may have: another may have its rank later, and begin others."""
        holders = [each for each in self.known if each.id == self.owner]
        return who.id == self.owner and (not holders or who in holders)

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Tensors leave: keep the edges of those that have a graph; what the message shall say of it."""
        slots = [slot for slot, tensor in enumerate(tensors) if tensor.requires_grad]
        if not graph:
            slots = [slot for slot in slots if tensors[slot].grad_fn is not None]
        for slot in slots:
            if tensors[slot].is_nested:
                raise UsageError(
                    "a nested tensor that requires a gradient cannot be sent in an autograd context: send the list of "
                    "its parts, tensor.unbind(), or tensor.detach()"
                )
        number = UNKNOWN
        self.meet(to)
        if slots and graph:
            number = next(self._numbers)
            kept = send([tensors[slot] for slot in slots], to.name, what)
            with self._lock:
                if not self.ended:  # else nobody would ever let go of the graph
                    self._sends[number] = kept
                    self._last = max(self._last, number)
        return _HEAD.pack(self.id, number) + struct.pack(f"<{len(slots)}I", *slots)

    def received(self, said: bytes, tensors: list[Tensor], sender: Identity) -> list[Tensor]:
        """Tensors have come: give a history to those that were recorded, as the message says."""
        self.meet(sender)
        _, number = _HEAD.unpack_from(said)
        slots = struct.unpack_from(f"<{(len(said) - _HEAD.size) // 4}I", said, _HEAD.size)
        if slots:
            receiving.add(id(self))
            if type(tensors) is not list:
                tensors = as_views_of_shared(tensors)
            recorded = [tensors[slot].requires_grad_(False) for slot in slots]
            for slot, tensor in zip(slots, receive(recorded, Origin(self, sender, number, self._last)), strict=True):
                tensors[slot] = tensor
        return tensors

    def ship(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """Gradients have come to a Recv of this context: whoever runs the graph sends them on."""
        running = self.running
        if running is None:
            raise origin.refusal()
        running.ship(origin, gradients)

    def close(self) -> None:
        """The context has ended: let go of everything."""
        with self._lock:
            self.ended = True
            sends, self._sends = self._sends, {}
        sends.clear()  # not under the lock: what graphs hold may be the user's, and run code as it goes
        self.gradients.clear()
