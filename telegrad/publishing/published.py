"""Named values, which can be looked up wherever they are: `publish` and `lookup`.

One key in the group's directory determines the owner of a value. The key is bound to the owner's lease
(`Registry.claim`). The revision that created the key is the fencing token. The owner serves the value while its lease
is valid by its own clock, and refuses later calls. By that clock, the lease ends before the directory gives the value
to another worker. A worker that knows a later token refuses to use the reference. An owner refuses requests with a
token higher than its own. A call names the value by the id of its reference, which belongs to one token.

Each offer of a worker has at most one busy thread, which claims the value and makes it. It calls the directory and the
factory without the lock. So after each of these steps it checks whether the offer still exists and which claim it has:
the program, or the end of a registration, may have changed that. An event during its work sets `again`, and the thread
claims the value once more at its end. So no event is lost, and no two threads call the factory at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple

from telegrad.errors import (
    CallTimeout,
    ClaimLost,
    NotPublished,
    PeerError,
    ShutDown,
    StoreUntrusted,
    TelegradError,
    UsageError,
)
from telegrad.ext.calls import DEFAULT, Agent, Deferred, Signal, folded, known_as, limit_of, not_compiled
from telegrad.ext.feedback import Wait, checks
from telegrad.ext.host import run_in_thread
from telegrad.ext.joining import DirectoryLost, DirectoryRefused, LeaseLost, check_key
from telegrad.ext.values import RestorableRRef, RRef, wait_for
from telegrad.ext.workers import PUBLISHED, UNUSABLE, DynamicGroup, current, listed
from telegrad.publishing.registration import PAUSE, ROUND, THREAD, OwnedSlot, Ownership, Registration, call_on_thread

LOOK = 0.25  # seconds between checks while waiting

log = logging.getLogger("telegrad")


@folded
def publish(name: str, factory: Callable[[], Any]) -> None:
    """Offer a value under a name: `lookup(name)` finds the value from any worker, on whichever worker it is then.

    Of all workers that publish the name, one owns the value, and calls `factory()` to make it. The others stand by. If
    the owner is lost, a worker that stands by makes the value, or the restarted owner when it publishes the name again.
    So `factory` must restore all state that must not be lost, for example from the last checkpoint. This function
    blocks until the owner is decided, and if it is this worker, until the value is made.

    Args:
        name: any text of up to 1,000 bytes in UTF-8, without null characters.
        factory: a function without arguments that makes the value.

    Raises:
        UsageError: this worker already publishes the name.
        InvalidArgument: the name is invalid, or `factory` cannot be called.
        RendezvousError: the group's directory did not report the owner within `rpc_timeout`.
        PeerLost: in a group that is not dynamic, the worker of rank 0, which keeps the directory, has already left.
        Exception: the error of `factory`.

    Example:
        >>> rpc.publish("words", lambda: ["a", "b"])
        >>> rpc.rpc_sync("worker1", lambda: rpc.lookup("words").rpc_sync().index("b"))
        1
    """
    _check_name(name)
    checks.function("factory", factory, "a function that creates the value")
    offers().add(Publication(name, factory))


@not_compiled
@folded
def lookup(name: str, timeout: float = DEFAULT) -> RRef[Any]:
    """Return a reference to the value that is published under a name. Block until there is one.

    The reference follows the value: if its owner is lost, the next use finds the value at its new owner, and waits for
    it within that call's timeout.

    Args:
        name: the name given to `publish`.
        timeout: seconds; 0 for no limit, default: the timeout in the options.

    Returns:
        An `RRef`.

    Raises:
        NotPublished: no value was published in time.
        ShutDown: another thread, or a signal handler, has called `shutdown`.
        RendezvousError: the group's directory did not report the owner in time.
        PeerLost: in a group that is not dynamic, the worker of rank 0, which keeps the directory, has already left.
        InvalidArgument: the name is invalid.
        Exception: the error of `factory`.

    Example:
        >>> rpc.publish("letters", lambda: ["a", "b"])
        >>> rpc.lookup("letters").to_here()
        ['a', 'b']
    """
    _check_name(name)
    agent = current.agent()
    limit = limit_of(timeout, agent.timeout)
    begun = monotonic()
    offers().registration.group(limit)
    try:
        return wait_for(agent, PublishedStrategy(name), limit, f"the value {name!r}", begun)
    except NotPublished as error:
        if isinstance(error.__cause__, UNUSABLE):
            raise type(error.__cause__)(str(error)) from error
        raise


def _check_name(name: str) -> None:
    checks.text("name", name, "the name of a value")
    check_key(f"{PUBLISHED}{name}")


class PublishedStrategy(NamedTuple):
    """How a reference to a published value finds it again."""

    name: str
    token: int = 0  # of the owner's claim

    def check(self) -> None:
        known = offers().registration.known_claim(self.name)
        if known is not None and known.token > self.token:
            raise ClaimLost(f"the value {self.name!r} now has another owner, or none")

    def find(self, limit: float) -> RRef[Any]:
        return offers().find(self.name, limit)

    def describe(self) -> tuple[list[str], str]:
        return [], f"have a worker publish {self.name!r} again"

    def travels(self) -> PublishedStrategy:
        return self


class Publication:
    def __init__(self, name: str, factory: Callable[[], Any]) -> None:
        self.name = name
        self.factory = factory
        self.owned: Ownership | None = None  # set while this worker owns the value, as far as it knows
        self.value: RRef[Any] | None = None  # set once it is made
        self.problem = ""  # why the directory has not told the owner so far
        self.is_busy = False  # a thread claims or makes the value
        self.again = False  # that thread must claim it once more afterwards

    def lose(self) -> Ownership | None:
        owned, self.owned, self.value = self.owned, None, None
        return owned


class Publications:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._worker = current.here()
        self._life = self._worker.me.incarnation
        # Guards all fields below but _hears_of_losses, and the fields of offers; _offers and _given_up are also read
        # without the lock.
        self._lock = threading.Lock()
        self._offers: dict[str, Publication] = {}
        self._given_up: set[int] = set()  # tokens of claims that were released, but may still be valid
        self._hears_of_losses = False
        self._shuts_down = threading.Event()
        self._worker.before_end.append(lambda _: self._shuts_down.set())
        self.registration = Registration(self._worker, _directory_of_group, self._claim_changed, self._lose_all)
        # Look-ups never wait, so they need no slot, and a worker whose slots are all in use answers them, too.
        agent.run_at_once(_directory_of_group)
        agent.run_at_once(_found_here)

    # Owning values

    def add(self, offer: Publication) -> None:
        """Claim the value, and make it if this worker gets the claim."""
        with self._lock:
            if offer.name in self._offers:
                raise UsageError(
                    f"worker {self._worker.me.name!r} already publishes a value under the name {offer.name!r}"
                )
            self._offers[offer.name] = offer
            offer.is_busy = True
        try:
            # The members of a dynamic group remove dead workers themselves. The flag is set once this has succeeded. If
            # two threads do it at the same time, a lost worker is declared lost twice, which does no harm.
            if self._worker.membership.is_fixed and not self._hears_of_losses:
                self._worker.membership.on_lost(self.registration.declare_lost)
                self._hears_of_losses = True
            if self._claim_in_time(offer):
                self._make(offer)
        except BaseException:
            self._withdraw(offer)
            raise
        finally:
            self._finish(offer)

    def _claim_in_time(self, offer: Publication) -> bool:
        claimed = Signal()
        call_on_thread(claimed, self._claim, offer)
        until = monotonic() + (self._agent.timeout or inf)

        def text() -> str:
            why = f": {offer.problem}" if offer.problem else ""
            return f"publish({offer.name!r}): the directory has not confirmed yet which worker owns the value{why}"

        with Wait("publish", text, worker=self._worker.me.name) as wait:
            while not self._agent.wait_for(claimed, LOOK):
                if monotonic() >= until:
                    raise DirectoryLost(f"{text()}. This took longer than rpc_timeout, {self._agent.timeout:g} s")
                wait.look()
        return bool(claimed.wait())

    def _claim(self, offer: Publication, stands_by: bool = False) -> bool:
        """Claim the value; return True if this worker has to make it. Block until the directory answers.

        Raises:
            ShutDown: this worker has left, or no longer publishes the value.
            PeerLost: the worker that would keep the directory has left.
            DirectoryRefused, StoreUntrusted: the directory cannot be used, and this worker does not stand by.
        """
        # True if the directory did not answer: this worker may have the claim. Then it must claim once more, even if it
        # no longer stands by, to keep the claim or to release it. A claim that is forgotten would keep the name without
        # a value for as long as this worker's lease is valid.
        unknown = False
        while not self._agent.closed and (unknown or self._stands_by(offer)):
            try:
                group = self.registration.group(0)
                claim = group.claim(offer.name)
                unknown = False
                if claim.life != self._life:
                    with self._lock:
                        offer.lose()
                    return False
                # The directory returns the claim that this worker has already. That claim was given up, and another
                # thread may delete it at any moment, so release it and get a new token.
                if claim.token in self._given_up:
                    group.registry.release(offer.name, claim)
                    continue
                owned = Ownership(offer.name, group, claim)
                is_new = self._take(offer, owned)
                # By this worker's clock the lease may have ended before the directory answered. Then claim again.
                if owned.holds:
                    return is_new
            except (LeaseLost, DirectoryLost) as error:
                offer.problem, unknown = str(error), isinstance(error, DirectoryLost)
            except (DirectoryRefused, StoreUntrusted) as error:
                if not stands_by:
                    raise
                if str(error) != offer.problem:
                    log.warning("telegrad: the value %r cannot be claimed here yet: %s", offer.name, error)
                offer.problem, unknown = str(error), True
            sleep(PAUSE)
        raise ShutDown(f"worker {self._worker.me.name!r} no longer publishes {offer.name!r}")

    def _take(self, offer: Publication, owned: Ownership) -> bool:
        """Store the claim by which this worker owns the value; return True if the value must be made."""
        with self._lock:
            offered = self._offers.get(offer.name)
            if offered is offer and offer.owned != owned:
                offer.owned, offer.value = owned, None
            is_new = offered is offer and offer.value is None
        # This offer was withdrawn meanwhile. If the worker has offered the name again, the claim now belongs to that
        # offer and stays: the directory has one claim of a worker for a name.
        if offered is None:
            self._give_up(owned)
        return is_new

    def _make(self, offer: Publication) -> None:
        owned = offer.owned
        if owned is None or not owned.holds:
            # No lock: this thread is the one that is busy with the offer, and reads `again` at its end.
            offer.again = True
            return
        # The slot has the claim with which the value is made. A later claim of this worker makes another value, in
        # another slot.
        table, slot = self._worker.references, OwnedSlot(owned)
        slot.fulfil(offer.factory())
        self._agent.streams.publish()
        made: RRef[Any] = RRef._of_handle(table, table.own(slot))
        with self._lock:
            # The registration may have ended while the factory ran. Then the value is dropped, since the next owner
            # makes its own.
            if offer.owned is owned:
                offer.value = made

    def _finish(self, offer: Publication) -> None:
        with self._lock:
            offer.is_busy = False
            again, offer.again = offer.again, False
        if again:
            self._agent.run(self._take_over, offer, False)

    def _stands_by(self, offer: Publication) -> bool:
        """Return True if this worker may take over the value; a leaving one may not, as the owner may leave with it."""
        if self._agent.closed or self._offers.get(offer.name) is not offer:
            return False
        leaving, serving = self._worker.leaving, self._worker.membership.serving
        return not (leaving.all_leave() if leaving.together else self._shuts_down.is_set() or serving.leaves)

    def _take_over(self, offer: Publication) -> None:
        """Claim a value that has no owner, or may have none, and make it, as `publish` does."""
        with self._lock:
            if not self._stands_by(offer):
                return
            # The busy thread may already have passed the point at which it would notice the reason for this call. It
            # claims once more at its end (`_finish` reads `again` under the same lock, so this is not missed).
            if offer.is_busy:
                offer.again = True
                return
            offer.is_busy = True
        try:
            with self._agent.waiting():
                is_mine = self._claim(offer, stands_by=True)
            if is_mine:
                self._make(offer)
        except BaseException:  # including errors of the factory
            self._withdraw(offer)
            if not self._agent.closed:
                log.exception("telegrad: the value %r could not be created here", offer.name)
        finally:
            self._finish(offer)

    def _claim_changed(self, name: str) -> None:
        """Take over a value that has lost its owner. Called by the thread that watches the directory."""
        # Called under the lock of the group, so the claim is made on another thread.
        offer, claim = self._offers.get(name), self.registration.known_claim(name)
        if offer is not None and claim is not None and not claim.life:
            self._agent.run(self._take_over, offer, False)

    def _lose_all(self, group: DynamicGroup) -> None:
        """Drop all values of an ended registration. With the next one, this worker may claim some of them again."""
        with self._lock:
            offers = list(self._offers.values())
            for offer in offers:
                # A claim of the next registration may be here already, and stays.
                if offer.owned is not None and offer.owned.group is group:
                    offer.lose()
        for offer in offers:
            self._agent.run(self._take_over, offer, False)

    def _withdraw(self, offer: Publication) -> None:
        """Stop publishing a value, which allows another worker to own it."""
        with self._lock:
            if self._offers.get(offer.name) is offer:
                del self._offers[offer.name]
            owned = offer.lose()
        if owned is not None:
            self._give_up(owned)

    def _give_up(self, owned: Ownership) -> None:
        with self._lock:
            self._given_up.add(owned.claim.token)
        run_in_thread(THREAD, self._release, owned)

    def _release(self, owned: Ownership) -> None:
        while not (self._agent.closed or owned.group.over):
            with contextlib.suppress(TelegradError):
                owned.group.registry.release(owned.name, owned.claim)
                return
            sleep(PAUSE)

    # Finding values

    def find(self, name: str, limit: float) -> RRef[Any]:
        """Return a reference to the value at its owner. Raises one of NOT_YET if the caller may try again."""
        group = self.registration.group(limit)
        try:
            return self._find(name, group, min(limit or ROUND, ROUND))
        except (NotPublished, PeerError):
            # The owners known here may be outdated if the directory does not answer. So ask it, which also makes the
            # caller report a silent directory as the reason, and not that no worker publishes the name.
            self.registration.check_directory(name)
            raise

    def _find(self, name: str, group: DynamicGroup, limit: float) -> RRef[Any]:
        claim = group.claims.get(name)
        present = self._worker.membership.present()
        if claim is None or not claim.life:
            raise NotPublished(f"no worker publishes it; the workers are {listed([each.name for each in present])}")
        if claim.life == self._life:
            token, value = self.value(name, claim.token)
            return RestorableRRef.of(value, PublishedStrategy(name, token))
        owner = next((each for each in present if each.incarnation == claim.life), None)
        if owner is None:
            raise NotPublished("its owner is no longer in the group, and no other worker has taken it over yet")
        try:
            found = self._agent.call(owner.identity, _found_here, (name, claim.token), None, limit)
        except CallTimeout as error:
            raise NotPublished(f"worker {owner.name!r}, which owns it, does not answer") from error
        if isinstance(found, NotPublished | ClaimLost):
            raise found
        token, value = found
        return RestorableRRef.of(value, PublishedStrategy(name, token))

    def value(self, name: str, token: int) -> tuple[int, RRef[Any]]:
        """Return the value that this worker owns with at least that token, and its own token."""
        with self._lock:
            offer = self._offers.get(name)
            owned, value = (offer.owned, offer.value) if offer is not None else (None, None)
        here = f"worker {self._worker.me.name!r}"
        if owned is None:
            raise NotPublished(f"{here} no longer owns it")
        own = owned.claim.token
        if own < token:
            raise ClaimLost(f"{here} owned {name!r} with the token {own}, but another worker owns it with {token}")
        owned.check()
        if value is None:
            raise NotPublished(f"{here} has not created it yet")
        return own, value


def offers() -> Publications:
    return current.here().attached(Publications)


# Called by other workers


@known_as("lookup of a published value")
def _found_here(name: str, token: int) -> tuple[int, RRef[Any]] | NotPublished | ClaimLost:
    try:
        return offers().value(name, token)
    except (NotPublished, ClaimLost) as error:
        return error  # not raised: the caller retries, and each raised error would be logged


@known_as("lookup of the group's directory")
def _directory_of_group() -> Any:
    return Deferred(offers().registration.address(), _directory_of_group)
