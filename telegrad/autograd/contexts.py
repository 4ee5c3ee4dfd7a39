"""The contexts of one worker: how they begin, and how each worker learns of their ends.

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
import secrets
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad._core.agent.agent import Agent
from telegrad._core.membership.members import Identity
from telegrad.autograd.guard import install
from telegrad.autograd.record import OWNER_SHIFT, AutogradContext
from telegrad.errors import ContextEnded, ContextLost, LimitReached, PeerError, PeerLost, TelegradError, UnknownWorker

# The first two limit the state that one worker can make another one keep.
MOST_OPEN = 1 << 14  # contexts of one other worker
MOST_PASSES = 1 << 16  # backward passes in all contexts of one worker
REMEMBERED = 1 << 16  # ended contexts, for messages that come late
ASK_EVERY = 2.0  # seconds between questions about long-lived contexts


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
        agent.on(ContextQuestion, self._on_knock)
        agent.lost.append(self._on_lost)
        agent.ticking.append(self._tick)

    def __len__(self) -> int:
        return len(self._contexts)

    def begin(self) -> AutogradContext:
        """Create a context that this worker owns."""
        install()
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
        install()
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

    def _on_knock(self, sender: Identity, knock: ContextQuestion) -> None:
        for id_ in knock.contexts:
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
