"""Values with a name, which are found wherever they live now: `publish` and `lookup`."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from telegrad import checks
from telegrad.agent.agent import Agent
from telegrad.agent.compiling import not_compiled
from telegrad.agent.deadlines import DEFAULT, limit_of
from telegrad.agent.naming import known_as
from telegrad.errors import NotPublished, ShutDown, TelegradError, UsageError
from telegrad.group.members import Member, listed
from telegrad.progress import Wait
from telegrad.rpc import current
from telegrad.rpc.bids import ASKS, NOTHING, OWNS, STANDS_BY, Bid, Rank
from telegrad.rpc.lasting import Lasting, pause, wait_for
from telegrad.rpc.references import RRef
from telegrad.rpc.worker import Worker

ROUND = 1.0  # seconds for the answer to a question, before it is asked again

log = logging.getLogger("telegrad")


def publish(name: str, factory: Callable[[], Any]) -> None:
    """Offer a value under a name: `lookup(name)` finds it from any worker, wherever it lives by then.

    Of all workers that publish the name one has the value, which it makes by `factory()`; the others stand by. When
    that worker has gone, another that stands by makes the value, or who comes back and publishes it again. So `factory`
    brings along what shall not be lost, such as the state of the last checkpoint. Returns once it is decided who has
    the value, and it is made where that is this worker.

    Args:
        name: any text.
        factory: a function without arguments that makes the value.

    Raises:
        UsageError: this worker publishes the name already.
        InvalidArgument: the name is empty, or `factory` cannot be called.
        Exception: what `factory` raised.

    Example:
        >>> rpc.publish("words", lambda: ["a", "b"])
        >>> rpc.rpc_sync("worker1", lambda: rpc.lookup("words").rpc_sync().index("b"))
        1
    """
    checks.text("name", name, "the name of a value")
    checks.function("factory", factory, "a function that makes the value")
    worker = current.here()
    worker.attached(Offers).add(Offer(name, factory, worker))


@not_compiled
def lookup(name: str, timeout: float = DEFAULT) -> RRef[Any]:
    """A reference to the value that is published under a name; waits until there is one.

    The reference follows the value: where its owner was lost, the next use finds the value at its new owner, and waits
    for it within that call's timeout.

    Args:
        name: the name that `publish` was given.
        timeout: seconds; 0 for no limit, left out that of the options.

    Returns:
        An `RRef`.

    Raises:
        NotPublished: there was none in time.
        InvalidArgument: the name is empty.
        Exception: what making the value raised.

    Example:
        >>> rpc.publish("letters", lambda: ["a", "b"])
        >>> rpc.lookup("letters").to_here()
        ['a', 'b']
    """
    checks.text("name", name, "the name of a value")
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    return Lasting.of(wait_for(agent, Named(name), limit, f"the value {name!r}"), Named(name))


class Named(NamedTuple):
    """The trail of a published value."""

    name: str

    def find(self, _: float) -> RRef[Any]:
        here = current.here()
        here.membership.refresh()
        state, found = here.attached(Offers).find(self.name)
        if found is not None:
            return found
        standing = [here.me] if state == STANDS_BY else []
        for member, (there, coming) in _asked(_others(here), _found_here, (self.name,)):
            if coming is not None:
                reference: RRef[Any] = coming
                return reference
            if there in (ASKS, OWNS):
                raise NotPublished(f"worker {member.name!r} is about to make it")
            if there == STANDS_BY:
                standing.append(member)
        if not standing:
            raise NotPublished(f"no worker publishes it; there are {listed(_names(here.membership.present()))}")
        lowest = min(standing, key=_rank)
        here.agent.call_async(lowest.identity, _reminded, (self.name,), None).heed()
        raise NotPublished(f"no worker has it now; {listed(_names(standing))} can take it over")

    def missing(self) -> list[str]:
        return []

    def wanted(self) -> str:
        return f"have a worker publish {self.name!r} again"

    def travels(self) -> Named:
        return self


class Offer:
    """What this worker publishes under a name."""

    def __init__(self, name: str, factory: Callable[[], Any], worker: Worker) -> None:
        self.name = name
        self.factory = factory
        self.worker = worker
        self.bid = Bid((worker.me.id, worker.me.incarnation))
        self.value: RRef[Any] | None = None  # stored once, when it was made
        self.deciding = False  # some thread asks the others
        self.again = False  # and shall once more

    def __repr__(self) -> str:
        return f"<Offer of {self.name!r}: {self.bid.state}>"


class Offers:
    """All that one worker publishes."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards all below, the bids, and the fields of offers but for `value`
        self._offers: dict[str, Offer] = {}
        self._watches = False
        agent.run_at_once(_found_here)
        agent.run_at_once(_bid_asked)

    def __repr__(self) -> str:
        return f"<Offers: {list(self._offers.values())}>"

    def add(self, offer: Offer) -> None:
        with self._lock:
            if offer.name in self._offers:
                raise UsageError(
                    f"worker {offer.worker.me.name!r} publishes a value under the name {offer.name!r} already"
                )
            self._offers[offer.name] = offer
            watches, self._watches = self._watches, True
        if not watches:
            offer.worker.membership.on_leave(lambda *_: self._somebody_left())
        self._decide(offer)

    def find(self, name: str) -> tuple[str, RRef[Any] | None]:
        """How this worker stands to a name, and its value where it is here."""
        with self._lock:
            offer = self._offers.get(name)
            return (NOTHING, None) if offer is None else (offer.bid.state, offer.value)

    def bid_asked(self, name: str, who: Rank) -> str:
        """Another asks for this worker's bid."""
        with self._lock:
            offer = self._offers.get(name)
            return NOTHING if offer is None else offer.bid.asked(who)

    def remind(self, name: str) -> None:
        """Somebody looks for the value, and finds none."""
        with self._lock:
            offer = self._offers.get(name)
        if offer is not None:
            self._decide_soon(offer)

    def _somebody_left(self) -> None:
        with self._lock:
            offers = list(self._offers.values())
        for offer in offers:
            self._decide_soon(offer)

    def _decide_soon(self, offer: Offer) -> None:
        self._agent.run(self._decide_and_tell, offer, False)

    def _decide_and_tell(self, offer: Offer) -> None:
        try:
            self._decide(offer)
        except Exception:
            if not self._agent.closed:
                log.exception("telegrad: the value %r could not be made here", offer.name)

    def _decide(self, offer: Offer) -> None:
        """Find out who has the value; make it where that is this worker."""
        with self._lock:
            offer.again = offer.deciding
            if offer.deciding or not offer.bid.begin():
                return
            offer.deciding = True
        state = STANDS_BY
        try:
            while True:
                answers = self._ask(offer)
                with self._lock:
                    again, offer.again = offer.again, False
                    state = offer.bid.answered(answers)
                    if state == OWNS or (state == STANDS_BY and not again):
                        break
                    offer.bid.begin()
        finally:
            with self._lock:
                offer.deciding = False
                if state != OWNS:
                    offer.bid.give_up()
        if state == OWNS:
            self._make(offer)

    def _make(self, offer: Offer) -> None:
        try:
            offer.value = RRef(offer.factory())
        except BaseException:
            with self._lock:
                del self._offers[offer.name]  # so that another can have it
            raise

    def _ask(self, offer: Offer) -> dict[Rank, str]:
        """What all answer who are there; who does not is asked again, until it is out of the group."""
        worker = offer.worker
        worker.membership.refresh()
        answers: dict[Rank, str] = {}

        def silent() -> list[Member]:
            return [each for each in _others(worker) if _rank(each) not in answers]

        def text() -> str:
            return f"publish({offer.name!r}): {listed(_names(silent()))} did not say yet who has the value"

        with Wait("publish", text, lambda: _names(silent()), worker=worker.me.name) as wait:
            while asked := silent():
                if self._agent.closed:
                    raise ShutDown(f"worker {worker.me.name!r} shut down")
                for member, state in _asked(asked, _bid_asked, (offer.name, offer.bid.me)):
                    answers[_rank(member)] = state
                if silent():
                    wait.look()
                    pause()
        return {who: answers[who] for who in map(_rank, _others(worker)) if who in answers}


def _others(worker: Worker) -> list[Member]:
    return [member for member in worker.membership.present() if member.incarnation != worker.me.incarnation]


def _rank(member: Member) -> Rank:
    return member.id, member.incarnation


def _names(members: Iterable[Member]) -> list[str]:
    return [member.name for member in members]


def _asked(members: Iterable[Member], function: Callable[..., Any], args: Any) -> Iterator[tuple[Member, Any]]:
    """Call all at once, and give the answers as they come; those that do not come in time are left out."""
    agent = current.agent()
    ended: queue.SimpleQueue[tuple[Member, Any]] = queue.SimpleQueue()
    begun = 0
    for member in members:
        with contextlib.suppress(TelegradError):  # it has gone
            future = agent.call_async(member.identity, function, args, None, ROUND)
            future.add_done_callback(lambda done, member=member: ended.put((member, done)))  # type: ignore[misc]
            begun += 1
    for _ in range(begun):
        with agent.waiting():
            member, future = ended.get()
        with contextlib.suppress(TelegradError):
            yield member, future.wait()


# What others call


@known_as("lookup of a published value")
def _found_here(name: str) -> tuple[str, RRef[Any] | None]:
    return current.here().attached(Offers).find(name)


@known_as("publish")
def _bid_asked(name: str, who: Rank) -> str:
    return current.here().attached(Offers).bid_asked(name, who)


@known_as("lookup of a published value")
def _reminded(name: str) -> None:
    current.here().attached(Offers).remind(name)
