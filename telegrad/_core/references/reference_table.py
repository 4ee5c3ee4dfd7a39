"""The driver of the reference protocol: the handles, values and control messages of one worker.

One thread processes messages and ended handles in groups, so that many together cost little. It pauses between groups,
so that many thousands do not delay calls. It also frees values, without holding the lock.

`References` (reference_protocol.py) decides, and `ReliableDelivery` (`__init__.py`) numbers and repeats; both are pure.
This file feeds them events and carries out the results. The rules:

- Every event of the protocol is processed under `_lock`. Its effects are carried out without the lock: sending,
  failing slots, freeing values. A free may run a user's `__del__`, which may use references itself.
- References that come with a message are entered by the thread that reads the message, before the message is handled.
  So the effects of a connection's messages happen in the order in which they were sent.
- The end of a handle only puts an id into a queue, because the thread may be in a finalizer and hold any lock.
- The thread is started before the first handle exists whose end it must process. It is started outside of the lock,
  because a start may take long or fail.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Attachments
from telegrad._core.calls.futures import Future
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import describe, fresh
from telegrad._core.pickling.remote_text import as_main
from telegrad._core.references import Batch, Id, ReliableDelivery, remember
from telegrad._core.references.handles import (
    CREATE,
    CREATED,
    DELETED,
    Handle,
    Maker,
    ValueSlot,
    check_generation,
    error_for,
    failed,
    key_of,
    number,
    warn_of_leaks,
)
from telegrad._core.references.reference_protocol import OWNER_DIED, ControlMessage
from telegrad._core.threads import LONGEST_WAIT
from telegrad.errors import (
    GenerationOver,
    LimitReached,
    PeerError,
    PeerLost,
    RRefLost,
    TelegradError,
    UnknownWorker,
    UsageError,
)

GATHER = 1e-3  # seconds for which messages and ended handles are collected; calls have the interpreter meanwhile
MOST_AT_ONCE = 256  # ended handles between two such pauses: they take a quarter of a millisecond here and at the owner
MOST_HELD = 1 << 16  # limit of references held by one worker to values of this one; no more are created for it
MOST_REFUSED = 1 << 10
TRY_AGAIN = 0.1  # seconds after an unexpected failure

log = logging.getLogger("telegrad")


class Listed(NamedTuple):
    """A reference of a worker, for introspection."""

    number: str
    kind: str  # the type of a value of this worker; the owner of another value
    begun: float | None  # time of `perf_counter`; None for values of others
    line: str  # where it was created, if that is recorded


class ReferenceTable(Maker):
    """All references of one worker.

    Uses of a reference take no lock. They rely on each of these being one step of the interpreter: `get` of the
    dictionaries of shares, boxes, creations and sites, which change under the lock; to load or store one attribute of
    an object found there, or of a handle; to load `closed`.
    """

    def __init__(self, agent: Agent, wrap: Callable[[ReferenceTable, Handle], Any]) -> None:
        super().__init__(agent, wrap, self._serve)
        self._courier: ReliableDelivery[ControlMessage] = ReliableDelivery()
        self._refused: dict[Id, LimitReached] = {}  # the latest refused creations, for requests of their values
        self.closed = False
        agent.layers.references = self
        agent.on(Batch, self._on_batch)
        # A loss is reported by the thread that reads or connects. `_on_lost` goes through all references and sends, so
        # it runs on this table's thread instead.
        agent.lost.append(lambda who, reason: self._events.put(lambda: self._on_lost(who, reason)))

    def for_finalisers(self) -> Callable[[Callable[[], object]], None]:
        """Return a function that runs a given function on this table's thread, without taking a lock or sending."""
        self._thread.want()
        return self._events.put

    # Using references

    def reach(self, handle: Handle) -> Identity:
        """Return the owner to call; raises as `check`."""
        if self.over is not None:
            raise fresh(self.over)
        self.check(handle)
        try:
            return self.agent.peer(handle.owner).identity
        except PeerLost:  # it has left, and this worker does not know that yet
            self._on_death(key_of(handle.owner))
            self.check(handle)
            raise

    def check(self, handle: Handle) -> None:
        """Raise an error if a reference cannot be used."""
        if self.over is not None and handle.box is None:
            raise fresh(self.over)
        creation = self._creations.get(handle.id)
        error = None
        if creation is not None:
            creation.use()
            error = creation.error
        fault = handle.fault or self._machine.fault(handle.id)
        # If the owner has died, the creating call has failed with a PeerError as well. That the owner is lost tells the
        # user more than that the creation failed. An error of the function itself comes first, because it is the cause.
        says_more = fault in (OWNER_DIED, DELETED) and isinstance(error, PeerError)
        if error is not None and not says_more:
            raise failed(error)
        if fault:
            is_back = not self._machine.is_dead(key_of(handle.owner))
            raise error_for(fault, handle, (self._sites or {}).get(handle.id, ""), is_back)

    def creation(self, handle: Handle) -> Future[None] | None:
        """Return a future of the creating call, if this worker made it and it has not succeeded yet."""
        with self._lock:
            creation = self._creations.get(handle.id)
            if creation is None:
                return None
            creation.use()
            # `_on_created` sets `done` and reads `future` in one hold of the lock. So either it sees the future that is
            # stored here and completes it, or this thread sees `done` and has it completed. A call that has succeeded
            # without a future is no longer in `_creations`, so a late creation always has an error.
            late = creation.done and creation.future is None
            if creation.future is None:
                creation.future = Future()
                creation.future.call = creation
        if late:
            self.agent.later(self._told, creation)
        # So far, no thread may have been asked to read the answer: see `Creation.quick`.
        with contextlib.suppress(TelegradError):  # the owner has left: the call gets that error
            self.agent.expect(handle.owner.name)
        return creation.future

    def made_here(self, handle: Handle) -> bool:
        """Return True if this worker created the reference."""
        return handle.id[0] == self._me

    def fork_of(self, handle: Handle) -> Id | None:
        """Return the owner's id of this worker's share; None on the owner."""
        share = self._machine.shares.get(handle.id)
        return share.fork if share is not None else None

    def confirmed(self, handle: Handle) -> bool:
        """Return True if the owner knows this worker's fork."""
        share = self._machine.shares.get(handle.id)
        return handle.box is not None or (share is not None and share.confirmed and not share.fault)

    def box(self, ref: Id) -> ValueSlot:
        """Return the box of a value on its owner. Raise RRefLost if there is none, and none will come; LimitReached if
        it was not made for that."""
        known = self._boxes.get(ref)
        if known is not None:
            return known
        with self._lock:
            # A use may overtake the creating call, which another worker sends over its own connection. `seek` then asks
            # the creator whether that call will arrive, and the use waits at an empty slot. `_take_creation` has this
            # slot filled, or `_step` fails it.
            unknown = ref not in self._machine.owned
            if unknown:
                if ref in self._refused:
                    raise fresh(self._refused[ref])
                if not self._machine.seek(ref):
                    raise RRefLost(f"worker {self.agent.name!r} no longer has a value for the reference {number(ref)}")
                self._wake()
            box = self._boxes.setdefault(ref, ValueSlot())
        if unknown:
            self._thread.want()
        return box

    def known(self, ref: Id) -> ValueSlot | None:
        """Return the box if it already exists."""
        return self._boxes.get(ref)

    def give_up(self, handle: Handle) -> None:
        """Release a handle that the program still holds."""
        with self._lock:
            # The fault keeps `Handle.__del__` from counting the end again. Of two threads that give up one handle, only
            # the first one counts it.
            first, handle.fault = not handle.fault, handle.fault or DELETED
        if first:
            self._events.put(handle.id)

    # Data in messages of users

    def pack(self, references: Sequence[Handle], to: Identity, creation: Any) -> bytes:
        """Serialise references for a message, and the data of a creating call if there is one."""
        for handle in references:
            # Each table has a queue of its own, so the queue tells the groups of one process apart.
            if handle.ended is not self._events:
                check_generation(handle)
                raise UsageError(
                    f"the reference {number(handle.id)} belongs to a group that this worker has left; create it again "
                    "after init_rpc"
                )
            self.check(handle)
        if not references:
            return pickle.dumps(((), creation), 5)
        key = key_of(to)
        try:
            with self._lock:
                forks = [(each.id, self._machine.fork(each.id, key), tuple(each.owner)) for each in references]
            return pickle.dumps((forks, creation), 5)
        except BaseException:
            # Most likely there is no memory. Some forks may have been counted for a message that is never sent. The
            # receiver answers the question about them with MISSING, which releases them.
            with self._lock:
                self._machine.ask(key)
                self._wake()
            raise

    def receive(self, data: bytes, sender: Identity) -> Attachments:
        """Handle references in a message, and the data of a creating call or of the answer to one."""
        forks, creation = pickle.loads(data)
        key, machine = key_of(sender), self._machine
        refusal = landing = None
        if self._thread.thread is None:
            self._thread.want()
        with self._lock:
            # This comes first, because it revives a sender that was declared dead. Its references would otherwise be
            # taken for those of a dead owner.
            self._heard_from(key)
            handles = [self._arrive(ref, fork, Identity(*owner), key) for ref, fork, owner in forks]
            if creation is not None and creation[0] == CREATED:
                machine.created(creation[1], creation[2], key)
            elif creation is not None:
                # HERE has no limit: a worker holds a value that it creates on itself by a handle, and the limit counts
                # forks.
                refusal = self.excess(sender) if creation[0] == CREATE else None
                landing = self._take_creation(key, refusal, *creation)
            # Usually there is nothing to do, and the thread sleeps on: a reference that its owner sends, and the answer
            # to a creating call, need no control message.
            if machine.letters or machine.freed or machine.hopeless:
                self._wake()
        return Attachments([self._wrap(self, handle) for handle in handles], landing, refusal)

    def excess(self, holder: Identity) -> LimitReached | None:
        """Return an error if this worker keeps too many values for another."""
        count = self._machine.holders.counts.get(key_of(holder), 0)
        if count < MOST_HELD:
            return None
        return LimitReached(
            f"worker {self.agent.name!r} keeps {count:,} values to which worker {holder.name!r} holds references, the "
            "limit for one worker. Delete some references before creating more"
        )

    def _arrive(self, ref: Id, fork: Id, owner: Identity, sender: str) -> Handle:
        owner_key = key_of(owner)
        fault = self._machine.arrive(ref, fork, owner_key, sender)
        box = self._boxes.setdefault(ref, ValueSlot()) if owner_key == self._me and not fault else None
        return self._new_handle(ref, owner, box, fault)

    def _take_creation(self, sender: str, refusal: LimitReached | None, kind: int, ref: Id, fork: Id) -> ValueSlot:
        # Uses that have overtaken this call wait at a slot that exists already.
        box = self._boxes.get(ref) or ValueSlot()
        if refusal is not None:
            remember(self._refused, ref, refusal, MOST_REFUSED)
        elif kind == CREATE and self._machine.expect(ref, fork, sender):
            self._boxes[ref] = box  # otherwise nothing refers to the value
        # This receipt is sent with every outcome, also with an error or a refusal. It tells the creator that the call
        # has arrived, so that nothing remains to be confirmed. A worker that calls itself has no fork to confirm.
        box.answer = pickle.dumps(((), (CREATED, ref, fork) if kind == CREATE else None), 5)
        return box

    # The thread for control messages and ended handles

    def _serve(self) -> None:
        wait = LONGEST_WAIT
        # These live longer than one round. After an exception, the next round continues with the events that this one
        # has taken from the queue and not processed.
        acts, ended = deque[Callable[[], None]](), deque[Id]()
        while not self.closed:
            try:
                self._gather(acts, ended, wait)
                if self.closed:
                    return
                while acts:
                    acts.popleft()()
                wait = self._step(ended)
            except Exception:  # most likely without memory; try again
                log.exception("telegrad: processing reference events failed")
                wait = TRY_AGAIN

    def _gather(self, acts: deque[Callable[[], None]], ended: deque[Id], wait: float) -> None:
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=wait)
            time.sleep(GATHER)
            while True:
                if type(event) is tuple:
                    ended.append(event)
                elif event is not None:
                    acts.append(event)
                if len(ended) >= MOST_AT_ONCE:
                    return
                event = self._events.get_nowait()

    def _step(self, ended: deque[Id]) -> float:
        """Drop handles, free values, send messages; return the time until more is due."""
        now = monotonic()
        machine, courier = self._machine, self._courier
        with self._lock:
            self._woken = False
            while ended:
                ref = ended.popleft()
                machine.drop(ref)
                if (note := events.note) is not None:
                    note((events.FREED, moment := perf_counter(), moment, number(ref)))
            # A message leaves the list after it was posted. So after an exception the rest is posted later, and no
            # message twice. The next attempt reverses the rest again: the protocol allows any order.
            machine.letters.reverse()
            while machine.letters:
                courier.post(*machine.letters[-1])
                machine.letters.pop()
            # This comes before `freed`, which may contain the same reference. Threads wait at the slot in `_boxes`, so
            # the failure must get that slot, and not a new one after it was removed.
            hopeless = [(ref, self._boxes.setdefault(ref, ValueSlot())) for ref in machine.hopeless]
            machine.hopeless.clear()
            freed = [(self._boxes.pop(ref, None), self._creations.pop(ref, None)) for ref in machine.freed]
            if self._sites is not None:
                for ref in machine.freed:
                    self._sites.pop(ref, None)
            machine.freed.clear()
            outgoing = courier.outgoing(now)
            expected, self._expected = self._expected, set()
            wait = min(max(courier.next() - now, 0.0), LONGEST_WAIT)
        # The lock is not held from here on. If a send fails, `ReliableDelivery` repeats the batch.
        for to, batch in outgoing:
            self._send(to, batch)
        # The threads that made creating calls have returned without reading the answers. The reactor is asked here to
        # read them, once for all calls of a round to one owner.
        for owner in expected:
            with contextlib.suppress(TelegradError):
                self.agent.expect(owner)
        for ref, box in hopeless:
            lost = RRefLost(f"the call that should have created the value of the reference {number(ref)} never arrived")
            box.fail(describe(lost, self.agent.name))
        # The values end here, and failures that the program has not seen are logged. This is the last step, because it
        # may run slow code of the user, and nothing waits for it.
        del freed
        return wait

    def _send(self, to: str, batch: Batch) -> None:
        name, _, incarnation = to.rpartition("#")
        letters = [tuple(letter) for letter in batch.letters]  # their class takes ten times as long to pickle
        try:
            self.agent.notify(name, batch._replace(letters=letters), incarnation)
        except UnknownWorker:
            # The group no longer has this incarnation. `_on_death` begins to ask for a sign of life, and `bury` ends
            # that.
            self._on_death(to)
            with self._lock:
                self._courier.bury(to)
        except TelegradError as error:
            # This worker is leaving, or cannot look up the other; `ReliableDelivery` tries again.
            log.debug("telegrad: cannot send to %r yet: %s", name, error)

    def _on_batch(self, sender: Identity, batch: Batch) -> None:
        self._thread.want()
        key = key_of(sender)
        with self._lock:
            self._heard_from(key)
            for letter in self._courier.receive(key, batch, monotonic()):
                self._machine.receive(key, letter)
            self._wake()  # even without messages, because the batch may need a receipt

    # Broken connections and dead workers

    def _heard_from(self, key: str) -> None:
        """With the lock held: handle a sign of life of a worker, which may have been declared dead."""
        if self._machine.alive(key):
            self._courier.hurry(key, monotonic())
            self._wake()

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        key = key_of(who)
        if isinstance(reason, GenerationOver):
            return  # this worker moves on as well in a moment
        # PeerLost means that a connection broke, or that the process is stopped: the worker may be alive. With any
        # other reason it has left, or no connection to it could be made.
        if not isinstance(reason, PeerLost):
            self._on_death(key)
            return
        with self._lock:
            # Messages of that connection may be lost, and with them forks and creating calls. The worker is asked about
            # both. About a creating call that timed out or was cancelled it is asked only now: while its connection
            # works, the receipt still comes.
            self._machine.ask(key)
            for ref, creation in self._creations.items():
                if creation.cut_off and creation.owner == key:
                    self._machine.stillborn(ref, creation.fork, key)
            self._courier.hurry(key, monotonic())
        # The empty batch makes the agent connect again. If that fails, this method is called with another reason, and
        # the worker counts as dead.
        self._send(key, Batch(0, [], []))

    def _on_death(self, key: str) -> None:
        with self._lock:
            self._machine.dead(key)
            self._courier.forget(key, monotonic())
            self._wake()

    # Shutdown and introspection

    def flush(self, timeout: float = 5.0) -> None:
        """Wait until everything that ended before this call is processed."""
        if self._thread.thread is None:  # nothing has ended yet
            return
        # The function is queued twice. A round runs functions before it drops handles, so the first function runs
        # before the handles of its own round are dropped. The second one runs in a later round.
        done = threading.Event()
        self._events.put(lambda: self._events.put(done.set))
        if not self.closed:
            done.wait(timeout)

    def counts(self) -> dict[str, int]:
        """Return counts of the table's objects."""
        self.flush()
        with self._lock:
            shares, owned = self._machine.shares.values(), self._machine.owned.values()
            return {
                "owners": len(owned),
                "shared_owners": sum(bool(each.forks) for each in owned),
                "forks": sum(len(each.forks) for each in owned),
                "users": len(shares),
                "pending_users": sum(not share.confirmed for share in shares),
                "pending_forks": sum(len(share.children or ()) for share in shares),
                "pending_deletes": sum(not share.handles for share in shares),
                "pending_creations": sum(not creation.done for creation in self._creations.values()),
                "pending_letters": self._courier.unsettled,
            }

    def listed(self, most: int) -> list[Listed]:
        """Return the `most` oldest references to values of this worker, and as many to those of others."""
        found: list[tuple[Id, type | str, float | None]] = []
        with self._lock:  # types, because a value that loses its last reference must not be freed on this thread
            for ref, box in islice(self._boxes.items(), most):
                found.append((ref, type(box.value) if box.full and not box.failure else "no value", box.begun))
            for ref, share in islice(self._machine.shares.items(), most):
                found.append((ref, f"value of {share.owner.rpartition('#')[0]}", None))
        sites = self._sites or {}
        return [Listed(number(ref), _name(kind), begun, sites.get(ref, "")) for ref, kind, begun in found]

    def log_failures(self) -> None:
        """Log the failed creations of references that the program still has, but has never used."""
        with self._lock:
            failures = [creation.failure for creation in self._creations.values()]
        for failure in failures:
            if failure is not None:
                failure.log()

    def close(self, reason: PeerError) -> None:
        """Release everything; remaining handles cannot be used, for that reason, except for values in this process."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self.over = self.over or reason
            boxes, self._boxes = self._boxes, {}
            machine = self._machine
            held = [ref for each in (machine.shares, machine.owned) for ref, own in each.items() if own.handles]
        self._events.put(None)
        if self._sites is not None:
            warn_of_leaks(self._sites.get(ref, "") for ref in held)
        # The values end here and not under the lock, because that may run code of the user.
        del boxes


def _name(of: type | str) -> str:
    return as_main(of if isinstance(of, str) else f"{of.__module__}.{of.__qualname__}".removeprefix("builtins."))
