"""Creates references to results of calls, on one worker or on many at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from telegrad._core import events
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.fanout import EachCall
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.remote_text import debugging
from telegrad._core.references.control_messages import Id, key_of, number
from telegrad._core.references.creation import Creation, tell_user
from telegrad._core.references.creation_sites import caller
from telegrad._core.references.handle import Handle
from telegrad._core.references.reference_protocol import References
from telegrad._core.references.value_slot import ValueSlot
from telegrad._core.threads import Background
from telegrad.errors import PeerError

CREATE, CREATED, HERE = range(3)  # kinds: a creating call, the answer to it, a creating call to the worker itself

Target = tuple[int, Id, Id]


class Maker:
    """The state of a `ReferenceTable`, and the calls that create references."""

    def __init__(self, agent: Agent, wrap: Callable[[Any, Handle], Any], serve: Callable[[], None]) -> None:
        """`wrap` creates the object for users from a handle. A thread runs `serve` once there are references."""
        self.agent = agent
        self._wrap = wrap
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # ids of ended handles, None (to wake up), functions
        self._thread = Background("telegrad-references", serve)
        self._lock = threading.Lock()  # guards all fields below, and `done` and `future` of creations
        self._sites: dict[Id, str] | None = {} if debugging() else None  # where references were created
        self._me, self._machine = "", References("")
        self._boxes: dict[Id, ValueSlot] = {}  # of owned references
        self._creations: dict[Id, Creation] = {}  # kept while the reference lives
        self._expected: set[str] = set()  # owners whose answers to creating calls may have no reader
        self._woken = False  # since the thread last checked
        self.name_is(agent.name)

    def name_is(self, name: str) -> None:
        """Set the worker's name, which may be assigned when it joins, before the first reference."""
        self._me = f"{name}#{self.agent.incarnation}"
        self._machine = References(self._me)

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

    def create(
        self,
        to: str | int | Identity,
        function: Any,
        args: Any,
        kwargs: Any,
        timeout: float,
        keeps: Any = None,
        asked: Any = None,
        heeded: bool = False,
    ) -> Any:
        """Create a value on a worker, where it stays; return a reference to it for users.

        With `heeded`, a failure is not logged: the caller gets it in another way.
        """
        handle, creation, target = self._begin(self.agent.identify(to))
        creation.used = heeded
        try:
            self.agent.call_for(creation, handle.owner, function, args, kwargs, timeout, keeps, target, asked)
        except BaseException:
            self._unmake(handle, target)
            raise
        self._begun([handle], [])
        return self._wrap(self, handle)

    def create_each(
        self, owners: Iterable[Identity], function: Any, args: Any, kwargs: Any, timeout: float, keeps: Any, asked: Any
    ) -> list[Any]:
        """As `create` on each of many workers, with one encoding. An error of one worker affects only its reference."""
        made = [self._begin(owner) for owner in owners]
        calls = [EachCall(creation, handle.owner, keeps, target) for handle, creation, target in made]
        try:
            self.agent.call_each(calls, function, args, kwargs, timeout, asked)
        except BaseException:
            for handle, _, target in made:
                self._unmake(handle, target)
            raise
        self._begun([handle for handle, *_ in made], [creation for _, creation, _ in made])
        return [self._wrap(self, handle) for handle, *_ in made]

    def _begin(self, owner: Identity) -> tuple[Handle, Creation, Target]:
        if owner == self.agent.me.identity:
            handle = self.own(ValueSlot())
            fork, kind = handle.id, HERE
        else:
            self._thread.want()
            with self._lock:
                ref, fork = self._machine.create(key_of(owner))
                handle = self._new_handle(ref, owner, None)
            kind = CREATE
        creation = Creation(handle.id, fork, key_of(owner), self._on_created)
        with self._lock:
            self._creations[handle.id] = creation
        return handle, creation, (kind, handle.id, fork)

    def _unmake(self, handle: Handle, target: Target) -> None:
        """Undo `_begin`: the call was never sent."""
        handle.fault = "never made"
        with self._lock:
            del self._creations[handle.id]
            (self._machine.drop if target[0] == HERE else self._machine.cancel)(handle.id)

    def _begun(self, handles: Iterable[Handle], creations: Iterable[Creation]) -> None:
        with self._lock:
            self._expected.update(handle.owner.name for handle in handles)
            for each in creations:
                if each.error is not None and not each.cut_off:  # the call may not have been sent
                    self._machine.stillborn(each.ref, each.fork, each.owner)
            self._wake()

    def _on_created(self, creation: Creation) -> None:
        with self._lock:
            creation.done, future = True, creation.future
            if creation.error is None and future is None:
                self._creations.pop(creation.ref, None)
            elif isinstance(creation.error, PeerError):
                self._machine.stillborn(creation.ref, creation.fork, creation.owner)
                self._wake()
        if future is not None:
            self.agent.later(self._told, creation)

    def _told(self, creation: Creation) -> None:
        """Complete the future; until then a second request for it gets the same future."""
        tell_user(creation)
        if creation.error is None:
            with self._lock:
                self._creations.pop(creation.ref, None)
