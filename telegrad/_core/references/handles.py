"""The slots for values at their owner, the handles of references in a process, and the calls that create references.

A value lives as long as any worker holds a reference to it, also without a handle in its own process. In debug mode the
places are recorded where references are created, to list references that outlive their group.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_each import EachCall
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls.futures import Future, Signal, wait_for
from telegrad._core.calls.unretrieved import UnretrievedError
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.exceptions import fresh, rebuild
from telegrad._core.pickling.remote_text import debugging
from telegrad._core.processes import PACKAGE
from telegrad._core.references import Id
from telegrad._core.references.reference_protocol import OWNER_DIED, References
from telegrad._core.threads import Background
from telegrad.errors import CallCancelled, CallTimeout, GenerationOver, OwnerLost, PeerError, RRefError, RRefLost

CREATE, CREATED, HERE = range(3)  # kinds: a creating call, the answer to it, a creating call to the worker itself

DELETED = "deleted"  # fault of a handle that the program has released

SHOWN = 20  # maximal number of places to log

Target = tuple[int, Id, Id]

log = logging.getLogger("telegrad")


def number(ref: Id) -> str:
    """Return a reference's id as shown to users."""
    return f"{ref[0].rpartition('#')[0]}/{ref[1]}"


def key_of(who: Identity) -> str:
    """Return a key for this incarnation of a worker: a later worker of the same name has another key."""
    return f"{who.name}#{who.incarnation}"


class ValueSlot(Signal):
    """A signal that the value of a reference exists. It is filled once; other threads may wait for it."""

    __slots__ = ("answer", "begun", "failure")

    value: Any = Signal._value  # type: ignore[misc]
    full: Any = Signal._happened  # type: ignore[misc]  # as `done`, without a call; set after value and failure
    fulfil = Signal.set_result

    def __init__(self) -> None:
        super().__init__()
        self.begun = perf_counter()
        self.failure = b""  # serialised: an exception would keep alive the frames where it was raised
        self.answer = b""  # for the caller, if a call creates the value

    @classmethod
    def of(cls, value: Any) -> ValueSlot:
        box = cls()
        box.value, box._happened = value, True
        return box

    def fail(self, failure: bytes) -> None:
        # The failure is stored first: readers look at `full` without a lock, and at the failure after that.
        self.failure = failure
        self.set_result()

    def receipt(self) -> bytes:
        return self.answer

    def open(self) -> Any:
        """Return the value of a full box, or raise its error."""
        if self.failure:
            raise rebuild(self.failure)
        return self.value

    def wait(self) -> Any:
        return self.open()


class Handle:
    """A reference count held by a Python object; each reference that a user sees holds one handle."""

    __slots__ = ("box", "ended", "fault", "id", "owner")

    def __init__(
        self, ended: queue.SimpleQueue[Any], id_: Id, owner: Identity, box: ValueSlot | None, fault: str = ""
    ) -> None:
        """The handle's end puts its id into `ended`."""
        self.ended = ended
        self.id = id_
        self.owner = owner
        # Only on the owner. So a value outlives the table's record of it as long as this process has a handle: after
        # `close`, values of this process can still be used.
        self.box = box
        self.fault = fault  # why the handle is unusable; its end is then not counted

    def __del__(self) -> None:
        # Any thread may run this, even in the garbage collector while a lock is held: SimpleQueue takes no lock.
        if not self.fault:
            self.ended.put(self.id)

    def __repr__(self) -> str:
        return f"<RRef {number(self.id)} on {self.owner.name!r}{self.fault and f': {self.fault}'}>"


# Why the generation of these handles' table has ended, by the queue that all handles of the table have, and that
# outlives it with them.
_over: WeakKeyDictionary[queue.SimpleQueue[Any], GenerationOver] = WeakKeyDictionary()


def check_generation(handle: Handle) -> None:
    """Raise GenerationOver if the reference is of an earlier generation of an elastic group."""
    if (over := _over.get(handle.ended)) is not None:
        raise fresh(over)


def error_for(fault: str, handle: Handle, made: str, is_back: bool) -> RRefError:
    """Return the error for a fault. `made`: the place where the reference was created, or empty; `is_back`: this worker
    has heard from the owner since it counted the owner as dead."""
    about = f"the reference {number(handle.id)} to a value of worker {handle.owner.name!r}"
    about += f", created at {made}," if made else ""
    if fault == OWNER_DIED:
        ended = "could not be reached for a time, which ended the reference, and is back"
        how = ended if is_back else "died, left or could not be reached"
        return OwnerLost(f"{about} is lost: that worker {how}. Create the value again")
    if fault == DELETED:
        return RRefError(f"{about} was deleted before this worker left its group")
    return RRefLost(
        f"{about} is lost: a connection broke while it was being sent, or its owner declared this worker lost. Create "
        "or send it again"
    )


class Creation:
    """A call of this worker that creates the value of a reference; the outcome of that call."""

    __slots__ = (
        *("_told", "about", "begun", "call", "cut_off", "done", "error", "failure", "fork", "future", "helper"),
        *("owner", "ref", "used"),
    )

    # No code of the user runs when the call ends, so the thread that reads the answer completes it, and no reactor
    # thread is woken. The caller does not wait either. So the answer has no reader at first: `Maker` notes the owner in
    # `_expected`, and the thread of the table asks the reactor to read, once for all calls of a millisecond.
    quick = True

    def __init__(self, ref: Id, fork: Id, owner: str, told: Callable[[Creation], None]) -> None:
        self.ref = ref
        self.fork = fork
        self.owner = owner
        self.call: Any = None
        self.error: BaseException | None = None
        self.cut_off = False  # it ended without an answer, which may still come
        self.done = False
        self.used = 0.0  # when the program last requested the value, or learned of a failure otherwise
        self.about, self.begun = "", 0.0  # set if it has failed
        self.failure: UnretrievedError | None = None  # the same error, logged if the program has not seen it
        self.future: Future[None] | None = None  # for the user, if one was requested
        self.helper = 0  # thread that waits for the call in `help`, and completes the future if it reads the answer
        self._told = told

    def set_result(self, result: Any) -> None:
        self._told(self)

    def set_exception(self, result: BaseException) -> None:
        self.error = fresh(result)
        self.failure = UnretrievedError(self.about, self.error, self.begun)
        if self.used:
            self.failure.see(self.used)
        # Such a call may still run and create the value, and its receipt is processed whenever it comes. So the owner
        # is not asked about it before the connection breaks.
        self.cut_off = isinstance(result, CallCancelled | CallTimeout)
        self._told(self)

    def cancel(self) -> bool:
        """Cancel the call; return False if it is over."""
        call = self.call
        return call is not None and bool(call.cancel())

    def help(self) -> None:
        """Wait until the future is done; this thread reads the answer if it can."""
        call, future = self.call, self.future
        assert future is not None
        if call is not None:
            self.helper = threading.get_ident()
            try:
                call.help()
            finally:
                self.helper = 0
        wait_for(future)

    def use(self) -> None:
        """Note that the program learns of a failure otherwise."""
        self.used = perf_counter()
        if self.failure is not None:
            self.failure.see(self.used)

    def __repr__(self) -> str:
        return f"<Creation by {self.call!r}>"


def failed(error: BaseException) -> BaseException:
    """Return the error for a value that was not created: the exception of the function, or the failure of the call."""
    again = fresh(error)
    if isinstance(again, (CallCancelled, CallTimeout, PeerError)):
        again.args = (f"RRef creation failed, the value may not exist: {error}",)
    return again


def caller() -> str:
    """Return the first line outside of this package."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn_of_leaks(places: Iterable[str]) -> None:
    """List the references that outlive their group, by the places where they were created."""
    counts = Counter(places)
    if counts:
        listed = "\n  ".join(sorted(f"{count} created at {place}" for place, count in counts.items())[:SHOWN])
        log.warning("telegrad: references outlive their group (%d):\n  %s", counts.total(), listed)


class Maker:
    """The state of a `ReferenceTable`, and the calls that create references."""

    def __init__(self, agent: Agent, wrap: Callable[[Any, Handle], Any], serve: Callable[[], None]) -> None:
        """`wrap` creates the object for users from a handle. A thread runs `serve` once there are references."""
        self.agent = agent
        self._wrap = wrap
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # ids of ended handles, None (to wake up), functions
        self._thread = Background("telegrad-references", serve)
        self.over: PeerError | None = None  # why no other worker can be reached any more; stored once
        # Nothing is sent, no slot is filled and no value is freed under it.
        self._lock = threading.Lock()  # guards all fields below, and `done` and `future` of creations
        self._sites: dict[Id, str] | None = {} if debugging() else None  # where references were created
        self._boxes: dict[Id, ValueSlot] = {}  # of owned references
        self._creations: dict[Id, Creation] = {}  # kept while the reference lives
        self._expected: set[str] = set()  # owners whose answers to creating calls may have no reader
        self._woken = False  # since the thread last checked
        self.name_is(agent.name)

    def name_is(self, name: str) -> None:
        """Set the worker's name, which may be assigned when it joins, before the first reference."""
        self._me = f"{name}#{self.agent.incarnation}"
        self._machine = References(self._me)

    def end_generation(self, over: GenerationOver) -> None:
        """Set the error of all later uses of references to values of other workers."""
        self.over = _over[self._events] = over

    def own(self, box: ValueSlot) -> Handle:
        """Create a reference to the value that is, or will be, in `box`."""
        self._thread.want()
        with self._lock:
            ref = self._machine.own()
            self._boxes[ref] = box
            return self._new_handle(ref, self.agent.me.identity, box)

    def _new_handle(self, ref: Id, owner: Identity, box: ValueSlot | None, fault: str = "") -> Handle:
        """Create a handle, with the lock held."""
        if self._sites is not None:
            self._sites.setdefault(ref, caller())
        if (note := events.note) is not None:
            note((events.MADE, now := perf_counter(), now, owner.name, number(ref)))
        return Handle(self._events, ref, owner, box, fault)

    def _wake(self) -> None:
        """With the lock held: wake the thread. The caller starts the thread outside of the lock."""
        if not self._woken:
            self._woken = True
            self._events.put(None)

    def create(self, to: str | int | Identity, call: PreparedCall, timeout: float) -> Any:
        """Create a value on a worker, where it stays; return a reference to it for users."""
        peer = self.agent.peer(to)
        handle, creation, target = self._begin(peer.identity)
        try:
            self.agent.call_for(creation, peer, call, timeout, target)
        except BaseException:
            self._unmake(handle, target)
            raise
        with self._lock:
            self._expected.add(peer.name)
            self._wake()
        return self._wrap(self, handle)

    def create_each(self, owners: Iterable[Identity], call: PreparedCall, timeout: float) -> list[Any]:
        """As `create` on each of many workers, with one encoding. An error of one worker affects only its reference."""
        made = [self._begin(owner) for owner in owners]
        callees = [EachCall(creation, handle.owner, target) for handle, creation, target in made]
        try:
            self.agent.call_each(callees, call, timeout)
        except BaseException:
            for handle, _, target in made:
                self._unmake(handle, target)
            raise
        with self._lock:
            self._expected.update(handle.owner.name for handle, *_ in made)
            for _, each, _ in made:
                # The error was reported to the outcome of one call, and that call may not have been sent at all. If it
                # has arrived, the owner ignores this, or confirms the fork.
                if each.error is not None and not each.cut_off:
                    self._machine.stillborn(each.ref, each.fork, each.owner)
            self._wake()
        return [self._wrap(self, handle) for handle, *_ in made]

    def _begin(self, owner: Identity) -> tuple[Handle, Creation, Target]:
        key, handle = key_of(owner), None
        if key == self._me:
            handle = self.own(ValueSlot())
        elif self._thread.thread is None:
            self._thread.want()
        with self._lock:
            if handle is not None:
                kind, ref, fork = HERE, handle.id, handle.id
            else:
                kind, (ref, fork) = CREATE, self._machine.create(key)
                handle = self._new_handle(ref, owner, None)
            creation = self._creations[ref] = Creation(ref, fork, key, self._on_created)
        return handle, creation, (kind, ref, fork)

    def _unmake(self, handle: Handle, target: Target) -> None:
        """Undo `_begin`: the call was not sent. If it has ended, as others may have that were sent, do nothing."""
        with self._lock:
            if target[0] == HERE:
                self._machine.drop(handle.id)
            elif not self._machine.cancel(handle.id):
                return
            handle.fault = "never made"  # `Handle.__del__` must not count an end: the record goes here
            self._creations.pop(handle.id, None)

    def _on_created(self, creation: Creation) -> None:
        with self._lock:
            creation.done, future = True, creation.future
            # `ReferenceTable.creation` stores the future under this lock. If none is stored now, it finds `done` later
            # and completes its future itself. A call that has failed stays, so that uses of the reference raise its
            # error.
            if creation.error is None and future is None:
                self._creations.pop(creation.ref, None)
            elif isinstance(creation.error, PeerError):
                self._machine.stillborn(creation.ref, creation.fork, creation.owner)
                self._wake()
        if future is None:
            return
        # Completing the future runs callbacks of the user. A thread that reads for others must not do that, but a
        # thread that waits for this very future may, which saves waking another one.
        if creation.helper == threading.get_ident():
            self._told(creation)
        else:
            self.agent.later(self._told, creation)

    def _told(self, creation: Creation) -> None:
        """Complete the future; until then a second request for it gets the same future."""
        future = creation.future
        assert future is not None
        future.call = None
        if creation.error is not None:
            future.set_exception(creation.error)  # type: ignore[arg-type]
            return
        future.set_result(None)
        with self._lock:
            self._creations.pop(creation.ref, None)
