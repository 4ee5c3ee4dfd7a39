"""The contexts of one worker: in each, what one forward and backward pass has recorded here.

A context ends when its owner says so, and everybody passes the word on to those whom he knows to take part. That word
may be lost, in ways that its receiver cannot notice. So whoever holds a context of another worker for longer than a
moment asks the owner from time to time whether it has ended, and at once where a connection is lost over which the
word might have come. Contexts that end soon, which is the usual case, cost no question.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from telegrad.agent.agent import Agent
from telegrad.autograd.gradients import Gradients
from telegrad.autograd.graph import Origin, Send, receive, send
from telegrad.errors import ContextEnded, ContextLost, PeerError, PeerLost, TelegradError, UnknownWorker, UsageError
from telegrad.group.members import Identity

if TYPE_CHECKING:
    from telegrad.autograd.conductor import Part
    from telegrad.autograd.engine import LocalPass

REMEMBERED = 1 << 16  # contexts that have ended, for what comes late
OWNER_SHIFT = 48  # a context's id: its owner's rank, above a number that is random at first
LOOK_EVERY = 1.0  # seconds between looks for contexts that stay
ASK_AFTER, ASK_AT_MOST = 1.0, 10.0  # seconds: the first pause between questions, which doubles, and the longest

_RECORD = struct.Struct("<QQ")  # the context, and the message's number; then which slots are recorded, four bytes each

_current: ContextVar[int | None] = ContextVar("telegrad_context", default=None)


class Release(NamedTuple):
    """A context has ended."""

    context: int


class Knock(NamedTuple):
    """Is anybody there? And which of these contexts have ended? The word of it may have been lost."""

    contexts: tuple[int, ...]


class Doubt(NamedTuple):
    """The owner of a context cannot be reached from here. Whoever knows of it shall ask for himself."""

    context: int


class Entered:
    """A context manager: what runs inside belongs to a context."""

    __slots__ = ("_id", "_token")

    def __init__(self, id_: int) -> None:
        self._id = id_

    def __enter__(self) -> None:
        self._token = _current.set(self._id)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class Context:
    """One forward and backward pass, as far as this worker takes part."""

    pause = 0.0  # between two questions whether it has ended; none before the first look
    ask_at = 0.0

    def __init__(self, id_: int, numbers: Iterator[int]) -> None:
        self.id = id_
        self.gradients = Gradients()
        self.running: LocalPass | None = None  # which runs the graph at this moment
        self.parts: dict[tuple[str, int], Part] = {}  # in backward passes, by their drivers and numbers
        self.over: set[tuple[str, int]] = set()  # passes that have failed
        self.passes = itertools.count(1)
        self.lock = threading.Lock()  # guards what follows
        self.sends: dict[int, Send] = {}
        self.known: dict[str, Identity] = {}  # workers that have heard of it from here, or told of it
        self.inbox: deque[Any] = deque()  # for the passes
        self.busy = False  # a thread sees to the inbox
        self.calls: queue.SimpleQueue[bool] | None = None  # for a thread that sees to it whenever it is called
        self._numbers = numbers

    @property
    def owner(self) -> int:
        """The rank of the worker that began it."""
        return self.id >> OWNER_SHIFT

    def entered(self) -> Entered:
        """What runs inside of it belongs to this context."""
        return Entered(self.id)

    def meet(self, who: Identity) -> None:
        """A worker takes part, and has to hear of the end."""
        if self.known.get(who.name) != who:
            with self.lock:
                self.known[who.name] = who

    def knows(self, who: Identity) -> bool:
        """Whether that worker takes part, as far as this one has heard."""
        return self.known.get(who.name) == who

    def sent(self, tensors: Sequence[Tensor], to: Identity, what: Any, graph: bool) -> bytes:
        """Tensors leave: keep the edges of those that have a graph."""
        slots = [slot for slot, tensor in enumerate(tensors) if tensor.requires_grad] if graph else []
        number = 0
        self.meet(to)
        if slots:
            number = next(self._numbers)
            with self.lock:
                self.sends[number] = send([tensors[slot] for slot in slots], to.name, what)
        return _RECORD.pack(self.id, number) + struct.pack(f"<{len(slots)}I", *slots)

    def received(self, number: int, slots: Sequence[int], tensors: list[Tensor], sender: Identity) -> list[Tensor]:
        """Tensors have come: give a history to those that were recorded."""
        self.meet(sender)
        if slots:
            recorded = [tensors[slot].requires_grad_(False) for slot in slots]
            for slot, tensor in zip(slots, receive(recorded, Origin(self, sender, number)), strict=True):
                tensors[slot] = tensor
        return tensors

    def gradients_of(self, origin: Origin, gradients: Sequence[Tensor | None]) -> None:
        """A Recv runs."""
        if self.running is None:
            raise UsageError(
                f"the graph leads to tensors that came from worker {origin.sender.name!r} in context {self.id}. "
                "Run it with telegrad.autograd.backward, inside of that context"
            )
        self.running.ship(origin, gradients)

    def close(self) -> None:
        """Let go of everything."""
        with self.lock:
            self.sends.clear()
            self.inbox.clear()
        self.parts.clear()
        self.gradients.clear()


class Contexts:
    """All that this worker takes part in; and who else has to hear of their ends."""

    def __init__(self, agent: Agent, ended: Callable[[int], None]) -> None:
        """`ended` is called for each context that ends."""
        self._agent = agent
        self._tell_ended = ended
        self._lock = threading.Lock()  # guards _contexts and _ended
        self._contexts: dict[int, Context] = {}
        self._ended: dict[int, bool] = {}  # the latest, for what comes too late; whether this worker forsook them
        self._ids = itertools.count(secrets.randbits(OWNER_SHIFT - 1))
        self._numbers = itertools.count(1)
        agent.on(Release, lambda sender, message: self.release(message.context, sender))
        agent.on(Knock, self._on_knock)
        agent.on(Doubt, self._on_doubt)
        agent.lost.append(self._on_lost)
        agent.ticking.append(self._tick)
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._contexts)

    @property
    def passes(self) -> int:
        """How many backward passes this worker takes part in at this moment."""
        with self._lock:
            return sum(len(context.parts) for context in self._contexts.values())

    def begin(self) -> Context:
        """A new context, of this worker."""
        return self._add(self._agent.me.id << OWNER_SHIFT | next(self._ids) & ((1 << OWNER_SHIFT) - 1))

    def _add(self, id_: int) -> Context:
        context = Context(id_, self._numbers)
        with self._lock:
            return self._contexts.setdefault(id_, context)

    def get(self, id_: int) -> Context | None:
        """The context of that id, if this worker takes part in it."""
        return self._contexts.get(id_)

    def has_ended(self, id_: int) -> bool:
        """Whether this worker knows that the context has ended."""
        return id_ in self._ended

    def find(self, id_: int) -> Context:
        """The context of that id.

        Raises:
            ContextEnded: there is none here.
        """
        context = self._contexts.get(id_)
        if context is None:
            raise ContextEnded(
                f"Could not find autograd context with id: {id_} on worker {self._agent.name!r}. It has ended, or this "
                "worker took no part in it; use the id inside of the `with` block that gave it"
            )
        return context

    def join(self, id_: int) -> Context | None:
        """The context that another worker speaks of; None where it has ended."""
        context = self._contexts.get(id_)
        if context is None and id_ not in self._ended:
            return self._add(id_)
        return context

    def check_kept(self, id_: int) -> None:
        """Raise ContextLost where this worker let go of a context whose owner may live and go on with it."""
        if self._ended.get(id_):
            raise ContextLost(
                f"worker {self._agent.name!r} has let go of the autograd context with id: {id_}, since it could not "
                "reach its owner. Begin a new context"
            )

    def release(self, id_: int, sender: Identity | None = None) -> None:
        """End a context here, and with all who know of it from here."""
        self._end(id_, Release(id_), sender, forsaken=False)

    def _end(self, id_: int, word: Release | Doubt, sender: Identity | None, forsaken: bool) -> None:
        with self._lock:
            context = self._contexts.pop(id_, None)
            self._ended[id_] = forsaken
            if len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]
        if context is None:
            return
        with context.lock:
            known = list(context.known.values())
        for worker in known:
            if worker != sender and worker != self._agent.me.identity:
                self._tell(worker, word)
        self._tell_ended(id_)
        context.close()

    def _tell(self, worker: Identity, message: Any) -> None:
        with contextlib.suppress(TelegradError):  # it has left, and its contexts with it
            self._agent.notify(worker.name, message, worker.incarnation, patient=True)

    # For the agent

    def current(self) -> Context | None:
        """The context in which this thread's code runs."""
        id_ = _current.get()
        return self.join(id_) if id_ is not None else None

    def received(self, data: bytes, tensors: list[Tensor], sender: Identity) -> tuple[Context | None, Sequence[Tensor]]:
        id_, number = _RECORD.unpack_from(data)
        context = self.join(id_)
        if context is None:
            self.check_kept(id_)
            return None, tensors
        slots = struct.unpack_from(f"<{(len(data) - _RECORD.size) // 4}I", data, _RECORD.size)
        return context, context.received(number, slots, tensors, sender)

    # Ends of which the word was lost

    def _tick(self, now: float) -> float:
        if now >= self._next_look:
            self._next_look = now + LOOK_EVERY
            self._ask([context for context in self._foreign() if self._is_to_be_asked(context, now)])
        return self._next_look

    def _foreign(self) -> list[Context]:
        """The contexts of other workers."""
        with self._lock:
            contexts = list(self._contexts.values())
        return [context for context in contexts if context.owner != self._agent.me.id]

    def _is_to_be_asked(self, context: Context, now: float) -> bool:
        if now < context.ask_at:
            return False
        first = not context.pause
        context.pause = ASK_AFTER if first else min(2 * context.pause, ASK_AT_MOST)
        context.ask_at = now + context.pause
        return not first

    def _ask(self, contexts: list[Context]) -> None:
        """Ask the owners of contexts whether they have ended; one who has left the group says no more."""
        by_owner: dict[int, list[int]] = {}
        for context in contexts:
            by_owner.setdefault(context.owner, []).append(context.id)
        for rank, ids in by_owner.items():
            try:
                self._tell(self._agent.identify(rank), Knock(tuple(ids)))
            except UnknownWorker:
                for id_ in ids:
                    self.release(id_)
            except TelegradError:  # this worker leaves, or cannot look the other up now
                pass

    def _on_knock(self, sender: Identity, knock: Knock) -> None:
        for id_ in knock.contexts:
            context = self._contexts.get(id_)
            if context is None:
                self._tell(sender, Release(id_))
            else:
                context.meet(sender)  # which may have heard of it from one who has died

    # Connections that break, workers that die

    def knowing(self, who: Identity) -> list[Context]:
        """The contexts in which that worker takes part, as far as this one knows."""
        with self._lock:
            contexts = list(self._contexts.values())
        return [context for context in contexts if context.knows(who)]

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        """The owners must tell of their ends now: it may be one of them that was lost, or who would have told."""
        dead = not isinstance(reason, PeerLost)  # a connection that broke is no death: that no new one can be made is
        doubtful = []
        for context in self._foreign():
            if dead and context.owner == who.id:
                self._end(context.id, Doubt(context.id), who, forsaken=True)
            elif context.knows(who):
                doubtful.append(context)
        self._ask_now(doubtful)

    def _on_doubt(self, _: Identity, doubt: Doubt) -> None:
        context = self._contexts.get(doubt.context)
        if context is not None and context.owner != self._agent.me.id:
            self._ask_now([context])

    def _ask_now(self, contexts: list[Context]) -> None:
        for context in contexts:
            context.pause, context.ask_at = ASK_AFTER, monotonic() + ASK_AFTER
        self._ask(contexts)


def entered_id() -> int | None:
    """The id of the context in which this thread's code runs."""
    return _current.get()
