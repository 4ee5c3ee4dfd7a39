"""The contexts of one worker: their records, how they begin, and how each worker learns of their ends.

An `AutogradContext` keeps the `Send`s of this worker, and by them the graph, until the context ends.

A context ends when its owner releases it. Each worker forwards the release to all workers that it knows to take part. A
release may be lost, in ways that its receiver cannot notice. So a worker that has held contexts of another worker for
more than a moment asks the owner periodically which of them have ended. A worker asks at once if it loses a connection
over which the release might have come. Contexts that end soon, which is the usual case, cause no such message.

Messages of a context may arrive after its end. They must not begin it anew, since its owner would never release that
one. So a worker remembers ended contexts, and decides under one lock: `release` moves the id from the open to the ended
ones, and `join` makes a context only for an id that is in neither, and whose owner has another rank. An ended context
is remembered as lost if this worker gave up its owner: then a later use is an error, because a call that ran without a
record would lose gradients.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from telegrad._core.agent.agent import Agent
from telegrad._core.forks import in_child
from telegrad._core.membership.members import Identity
from telegrad._core.wire.tensors import as_views_of_shared
from telegrad.autograd.gradients import Gradients
from telegrad.autograd.guard import GuardedEngine, install
from telegrad.autograd.passes import PassSpec, Task
from telegrad.autograd.send_recv import UNKNOWN, Origin, Send, edge_of, receive, receiving
from telegrad.errors import (
    ContextEnded,
    ContextLost,
    LimitReached,
    PeerError,
    PeerLost,
    TelegradError,
    UnknownWorker,
    UsageError,
)

OWNER_SHIFT = 48  # bits of a context's id: the rank of its owner is above a number that starts at random
# The first two limit the state that one worker can make another one keep.
MOST_OPEN = 1 << 14  # contexts of one other worker
MOST_PASSES = 1 << 16  # backward passes in all contexts of one worker
REMEMBERED = 1 << 16  # ended contexts, for messages that come late
ASK_EVERY = 2.0  # seconds between questions about long-lived contexts

# Appended to a message's body: the context, and the message's number; then the indices of the recorded slots, four
# bytes each.
_HEAD = struct.Struct("<QQ")
read_id = struct.Struct("<Q").unpack_from  # of the context

entered: ContextVar[int | None] = ContextVar("telegrad_context", default=None)
entered_id = entered.get  # of this thread's context, or None
in_child(lambda: entered.set(None))  # the context belongs to a worker of the parent process


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
        if type(Variable._execution_engine) is not GuardedEngine:
            install()
        self.id = id_
        self.owner = id_ >> OWNER_SHIFT  # the rank of the worker that began the context
        self.gradients = Gradients()
        self.autocast = b""  # in which passes of this worker run here only, see `Settings.sends_modes`
        self.accumulated = False  # True once a pass that this worker drives has accumulated its gradients
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


class Release(NamedTuple):
    """The context has ended: its receiver releases it and forwards the release."""

    context: int


class ContextQuestion(NamedTuple):
    """Ask the owner which of these contexts have ended, as a release may be lost, and detect a lost owner."""

    contexts: tuple[int, ...]


class Contexts:
    """All contexts in which this worker takes part. Other workers that take part learn of their ends from here."""

    def __init__(self, agent: Agent, ended: Callable[[int], None]) -> None:
        """`ended` is called for each context that ends."""
        self._agent = agent
        self._tell_ended = ended
        # Guards changes of the next four fields. Reads without the lock are single dict operations (`get`, `in`, `len`,
        # a copy), and so atomic.
        self._lock = threading.Lock()
        self._contexts: dict[int, AutogradContext] = {}
        self._open: dict[int, int] = {}  # open contexts by the rank of their owner, without this worker's own
        self._passes: dict[int, int] = {}  # passes in open contexts, by the rank of their owner
        # recently ended contexts; True if this worker lost the owner; a text if their generation of the group has ended
        self._ended: dict[int, bool | str] = {}
        # A rank is given again after a worker has left. The random start keeps the new worker of that rank from using
        # ids that other workers remember as ended. `next` is atomic.
        self._ids = itertools.count(secrets.randbits(OWNER_SHIFT - 1))
        self._numbers = itertools.count(1)  # message numbers
        # only the timer thread uses these
        self._next_ask = 0.0
        self._old: set[int] = set()  # the contexts of other workers that existed at the last question
        agent.on(Release, lambda sender, message: self.release(message.context, sender))
        agent.on(ContextQuestion, self._on_question)
        agent.lost.append(self._on_lost)
        agent.ticking.append(self._tick)

    def __len__(self) -> int:
        return len(self._contexts)

    def begin(self) -> AutogradContext:
        """Create a context that this worker owns."""
        context = AutogradContext(
            self._agent.me.id << OWNER_SHIFT | next(self._ids) & ((1 << OWNER_SHIFT) - 1), self._numbers
        )
        with self._lock:
            self._contexts[context.id] = context
        return context

    def get(self, id_: int) -> AutogradContext | None:
        """Return the context with that id if this worker takes part in it."""
        return self._contexts.get(id_)

    def all(self) -> list[AutogradContext]:
        """Return the contexts in which this worker takes part. The copy is atomic."""
        return list(self._contexts.values())

    def has_ended(self, id_: int) -> bool:
        """Return True if this worker knows that the context has ended."""
        return id_ in self._ended

    def find(self, id_: int) -> AutogradContext:
        """Return the context with that id; raise ContextEnded if this worker has no such context."""
        context = self._contexts.get(id_)
        if context is None:
            raise self.error_of(
                id_,
                f"Could not find autograd context with id: {id_} on worker {self._agent.name!r}. It has ended, or this "
                "worker took no part in it; use the id inside the `with` block that created it",
            )
        return context

    def error_of(self, id_: int, text: str) -> ContextEnded:
        """Return the error for a context that has ended, with this text unless its generation has ended."""
        over = self._ended.get(id_)
        return ContextEnded(f"the autograd context with id: {id_} has ended: {over}" if isinstance(over, str) else text)

    def join(self, id_: int) -> AutogradContext | None:
        """Return the context that another worker refers to, and create it here if needed. Return None if it has ended.

        One of this worker's rank that is unknown here counts as ended. Raise LimitReached if its owner has MOST_OPEN
        contexts open here.
        """
        context = self._contexts.get(id_)
        if context is not None:
            return context
        made = AutogradContext(id_, self._numbers)
        with self._lock:
            # Again, now under the lock: since the look above, `release` may have ended the context, or another thread
            # may have joined it. `made` is dropped in both cases.
            if id_ in self._ended:
                return None
            if id_ not in self._contexts:
                # Only `begin` makes contexts of this worker's own. This one is of a former worker of its rank, or has
                # ended long ago and is forgotten: no owner would end it.
                if made.owner == self._agent.me.id:
                    return None
                if (others := self._open.get(made.owner, 0)) >= MOST_OPEN:
                    raise LimitReached(
                        f"worker {self._agent.name!r} takes part in {MOST_OPEN:,} autograd contexts of the worker of "
                        f"rank {made.owner}, the limit for one worker. Leave some of their `with` blocks first"
                    )
                self._open[made.owner] = others + 1
            return self._contexts.setdefault(id_, made)

    def ended(self, id_: int) -> AutogradContext:
        """Return a context that has ended, for messages that come late: nothing keeps it but their tensors."""
        context = AutogradContext(id_, self._numbers)
        context.close()
        return context

    def count_passes(self, context: AutogradContext, messages: int = 1) -> None:
        """Count messages that began a pass, or came too early for it: they are kept until its context ends; raise
        LimitReached if more than MOST_PASSES would be counted for the owner of the context."""
        owner = context.owner
        with self._lock:
            if (others := self._passes.get(owner, 0)) + messages > MOST_PASSES:
                raise LimitReached(
                    f"worker {self._agent.name!r} has taken part in {MOST_PASSES:,} backward passes in autograd "
                    f"contexts of the worker of rank {owner} that have not ended, the limit for one worker. Leave the "
                    "`with` block of a context after some passes, and begin a new one"
                )
            # An ended context has already given its count back, in `release`, and must not count again.
            if context.id in self._contexts:
                self._passes[owner] = others + messages
                context.passes += messages

    def check_kept(self, id_: int) -> None:
        """Raise ContextLost if this worker dropped a context that its owner may still use."""
        if self._ended.get(id_) is True:
            raise ContextLost(
                f"worker {self._agent.name!r} has dropped the autograd context with id: {id_}, because it could not "
                "reach its owner. Begin a new context"
            )

    def succeed(self, former: Contexts, over: str) -> None:
        """Take over from the worker of the last generation, which is `over`: its contexts have ended."""
        with former._lock:
            ended = {id_: isinstance(why, str) and why for id_, why in former._ended.items()}
            ended |= dict.fromkeys(former._contexts, over)
        with self._lock:
            self._ended.update(ended)

    def release(self, id_: int, sender: Identity | None = None, forsaken: bool = False) -> None:
        """End a context here and, unless this worker has `forsaken` its owner, on all workers that learned of it here.

        If the owner is lost, the other workers find that out themselves.
        """
        with self._lock:
            context = self._contexts.pop(id_, None)
            if context is not None:
                owner = context.owner
                for counts, count in ((self._passes, context.passes), (self._open, 1)):
                    left = counts.pop(owner, 0) - count
                    if left > 0:
                        counts[owner] = left
            self._ended[id_] = forsaken
            while len(self._ended) > REMEMBERED:  # a former worker may have left as many, see `succeed`
                del self._ended[next(iter(self._ended))]
        # The rest runs without the lock: it sends messages, and frees graphs whose finalizers may be user code. A
        # worker that comes to know the context from this one after the loop has read `known` learns of the end by its
        # question.
        if context is None:
            return
        if not forsaken:
            for worker in context.known:
                if worker != sender and worker.incarnation != self._agent.incarnation:
                    self._tell(worker, Release(id_))
        context.close()
        self._tell_ended(id_)

    def _tell(self, worker: Identity, message: Any) -> None:
        # No worker waits for these messages, so they are patient: they leave with the next message to the same worker,
        # or soon.
        with contextlib.suppress(TelegradError):  # the worker has left, so its contexts have ended
            self._agent.notify(worker.name, message, worker.incarnation, patient=True)

    # Lost releases

    def _tick(self, now: float) -> float:
        if now >= self._next_ask:
            self._next_ask = now + ASK_EVERY
            foreign = self._foreign()
            # On another thread: the lookup of an owner may wait for the directory, and timeouts for this thread.
            if doubtful := [context for context in foreign if context.id in self._old]:
                self._agent.later(self._ask, doubtful)
            self._old = {context.id for context in foreign}
        return self._next_ask

    def _foreign(self) -> list[AutogradContext]:
        """Return the contexts that other workers own."""
        return [context for context in self.all() if context.owner != self._agent.me.id]

    def _ask(self, contexts: list[AutogradContext]) -> None:
        """Ask the owners of contexts whether these have ended. Release contexts whose owner has left the group."""
        by_owner: dict[int, list[int]] = {}
        for context in contexts:
            by_owner.setdefault(context.owner, []).append(context.id)
        for rank, ids in by_owner.items():
            try:
                self._tell(self._agent.identify(rank), ContextQuestion(tuple(ids)))
            except UnknownWorker:
                for id_ in ids:
                    self.release(id_)
            except TelegradError:  # this worker leaves, or the lookup fails for now
                pass

    def _on_question(self, sender: Identity, question: ContextQuestion) -> None:
        for id_ in question.contexts:
            # An id that is unknown here belongs to a context that has ended, or to a former worker of this rank, which
            # is gone. In both cases the asking worker must release it.
            context = self._contexts.get(id_)
            if context is None:
                self._tell(sender, Release(id_))
            else:
                context.meet(sender)  # the sender may know the context from a worker that has died

    # Lost connections and dead workers

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        """Ask the owners at once: the lost worker may be one of them, or may have been about to forward a release."""
        # PeerLost means a broken connection; a worker is dead once no new connection can be made
        dead = not isinstance(reason, PeerLost)
        doubtful = []
        for context in self._foreign():
            # The news of a loss may come when another worker has the rank already. So the lost worker counts as the
            # owner only if the context knows no other worker of that rank.
            owners = [each for each in context.known if each.id == context.owner]
            if dead and who.id == context.owner and (not owners or who in owners):
                self.release(context.id, who, forsaken=True)
            elif context.met(who.name) == who:
                doubtful.append(context)
        self._ask(doubtful)
