"""Actors: objects whose methods run one after the other when other workers call them. And a lock in order of arrival.

The order is decided when calls are opened, which happens for each caller in the order of arrival. A waiting call keeps
its opened arguments, but no thread. Callers are served in turn, one call each.

The server asks `admit` for each opened call of a method. If the actor is idle, the call gets the turn and runs at once.
Otherwise it is put into the queue of the actor, which exists while a method runs. The end of a turn (`_end`) passes it
to the next call under the lock, so no call that has just arrived can take it.

A deadlock is a method that waits for a call which leads back to the same actor. Calls carry the hops that they were
made for, so it is found in either order. If the method waits already when the call arrives, `_enqueue` refuses the
call. If the call arrived first and the method then starts to wait, `_refuse` finds the call in the queue. No call falls
between the two checks: the method first adds the hop to `awaited`, and then takes the lock, under which calls are
enqueued.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from telegrad._core import checks
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Incoming
from telegrad._core.calls.call_context import ActorLock, CallContext, Hops, entered, hops
from telegrad._core.calls.futures import Signal
from telegrad._core.forks import in_child, renewed
from telegrad._core.references import Id
from telegrad._core.references.handles import ValueSlot
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.worker import current
from telegrad._core.worker.value_access import BATCHED, METHODS, TURN, TURNS, Method, MethodOfEach, methods
from telegrad.errors import RRefError, UsageError

C = TypeVar("C", bound=type)
_MARK = "_telegrad_actor"

_lock = renewed(threading.Lock())  # guards _all and methods.kind
_all: weakref.WeakSet[Actors] = weakref.WeakSet()
in_child(_all.clear)  # these belong to the parent's workers


def actor(cls: C) -> C:
    """Mark a class: methods of one object that are called through references run one after the other.

    Each caller's calls run in the order in which it made them. Callers are served in turn, one call each. Calls that
    wait hold no thread. An `async def` method keeps its turn until it ends. A method marked with
    `functions.async_execution` keeps its turn until it returns its future. A method in batches needs no turn. A method
    that yields (`rpc_stream`) has a turn for each item: others may run while it is suspended at a `yield`.

    A method must not wait for a call that comes back to its own object: that call is refused with a UsageError.

    Args:
        cls: the class; objects of it that no other worker calls behave as before.

    Returns:
        The same class.

    Raises:
        UsageError: it is no class, or one that cannot be changed, such as a built-in class.

    Example:
        >>> @rpc.actor
        ... class Counter:
        ...     value = 0
        ...     def add(self, number):
        ...         self.value += number
        ...         return self.value
        >>> counter = rpc.remote("worker1", Counter)
        >>> [future.wait() for future in [counter.rpc_async().add(1) for _ in range(3)]]
        [1, 2, 3]
    """
    if not isinstance(cls, type):
        raise UsageError(
            f"cls: @rpc.actor marks a class, not {checks.short_repr(cls)}: write it above `class {type(cls).__name__}:`"
        )
    try:
        setattr(cls, _MARK, _mark())
    except TypeError as error:  # a class implemented in C
        raise UsageError(
            f"cls: {cls.__name__} cannot be changed, and so not marked as an actor: derive your own class from it"
        ) from error
    return cls


class _Mark:
    """Enables actors also in processes that receive the class by value."""

    def __reduce__(self) -> Any:
        return _mark, ()


def _mark() -> _Mark:
    with _lock:
        # A callee without actors of its own orders only calls whose names have this prefix.
        methods.kind = TURN
        for each in _all:
            each.arm()
    return _Mark()


def steps_of(agent: Agent, value: Any, stream: Hashable, method: str) -> Callable[[], GeneratorTurn] | None:
    """Return a function that creates the turns for a stream of a method; None if the value is no actor."""
    if not hasattr(type(value), _MARK):
        return None
    # Under the lock, since another thread may add to the set while this one iterates over it.
    with _lock:
        actors = next(each for each in _all if each.agent is agent)
    return lambda: actors.step(value, stream, method)


def serve(agent: Agent, references: ReferenceTable) -> None:
    made = Actors(agent, references)
    with _lock:
        _all.add(made)
        if methods.kind == TURN:
            made.arm()


class GeneratorTurn:
    """The part of a generator method up to its next item. It takes turns like a call, but waits on its own thread."""

    def __init__(self, stream: Hashable, method: str) -> None:
        self.key = stream
        self.method = method
        self.hops: Hops = hops()
        self.call_context: CallContext | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.begins = Signal()  # done when the step may run, or fails if it is refused

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the turn, and hold it in the block."""
        self.begins.wait()
        try:
            with entered(self.call_context):
                yield
        finally:
            self.on_end()


class _Queue:
    """The calls of one busy actor."""

    def __init__(self, value: Any) -> None:
        self.value = value  # keeps the id in use
        self.turn: ActorLock | None = None  # turn of the running method
        self.method = ""
        self._waiting: dict[Hashable, deque[Incoming | GeneratorTurn]] = {}  # by caller; the next caller comes first

    def add(self, arrival: Incoming | GeneratorTurn) -> None:
        caller = arrival.key if isinstance(arrival, GeneratorTurn) else arrival.caller.identity
        self._waiting.setdefault(caller, deque()).append(arrival)

    def next(self) -> Incoming | GeneratorTurn | None:
        """Remove and return the first call of the caller that has waited longest."""
        if not self._waiting:
            return None
        caller = next(iter(self._waiting))
        calls = self._waiting.pop(caller)
        if len(calls) > 1:
            self._waiting[caller] = calls  # as the last
        return calls.popleft()

    def take_for(self, hop: tuple[str, int]) -> list[Incoming | GeneratorTurn]:
        """Remove and return the calls that were made for a hop."""
        found = [each for calls in self._waiting.values() for each in calls if hop in each.hops]
        left = ((caller, [each for each in calls if hop not in each.hops]) for caller, calls in self._waiting.items())
        self._waiting = {caller: deque(calls) for caller, calls in left if calls}
        return found


class Actors:
    def __init__(self, agent: Agent, references: ReferenceTable) -> None:
        self.agent = agent
        self._references = references
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards _queues with its values, and _coming
        self._queues: dict[int, _Queue] = {}  # of busy actors, by the object's id
        self._coming: dict[Id, deque[Incoming]] = {}  # calls of values that do not exist so far
        self._heeded = TURNS
        self._server = agent.set_call_scheduler(self)

    def arm(self) -> None:
        """Order also the calls of callers that know of no actors: this process has some."""
        self._heeded = METHODS
        self._server.orders = True

    # Interface for the server

    def heeds(self, name: bytes) -> bool:
        return name.startswith(self._heeded)

    def admit(self, arrival: Incoming) -> bool:
        if isinstance(arrival.function, MethodOfEach):
            ids, *args = arrival.args
            arrival.function, arrival.args = arrival.function.one, (*ids[self.agent.name], *args)
        maker, number = arrival.args[:2]
        try:
            slot = self._references.slot((maker, number))
        except RRefError:
            return True  # and fails
        return not self._waits_for_value((maker, number), slot, arrival) and self._may_run(slot.value, arrival)

    def _waits_for_value(self, ref: Id, slot: ValueSlot, arrival: Incoming) -> bool:
        with self._lock:
            # Look for earlier calls before looking whether the value exists: `_has_come` may still be admitting calls
            # that have waited for it, and this call must not overtake them.
            coming = self._coming.get(ref)
            first = coming is None
            if coming is None:
                if slot.full:
                    return False
                coming = self._coming[ref] = deque()
            coming.append(arrival)
        if first:
            self.agent.later(lambda _: slot.add_done_callback(lambda _: self._has_come(ref, slot)), None)
        return True

    def _may_run(self, value: Any, arrival: Incoming) -> bool:
        """Return True if a call may run now; otherwise it is queued."""
        kind = type(value)
        if not hasattr(kind, _MARK) or hasattr(type(getattr(kind, _name_of(arrival), None)), BATCHED):
            return True
        with self._lock:
            return self._enqueue(value, arrival)

    def step(self, value: Any, stream: Hashable, method: str) -> GeneratorTurn:
        """Return the next step of a stream of an actor's method."""
        step = GeneratorTurn(stream, method)
        try:
            with self._lock:
                begins = self._enqueue(value, step)
        except UsageError as fault:
            step.begins.set_exception(fault)
        else:
            if begins:
                step.begins.set_result()
        return step

    # With the lock held

    def _enqueue(self, value: Any, arrival: Incoming | GeneratorTurn) -> bool:
        queue = self._queues.get(id(value))
        if queue is None:
            queue = self._queues[id(value)] = _Queue(value)
            self._begin(queue, arrival)
            return True
        if queue.turn is not None and queue.turn.awaited.intersection(arrival.hops):
            raise _deadlock(queue, arrival)
        queue.add(arrival)
        return False

    def _begin(self, queue: _Queue, arrival: Incoming | GeneratorTurn) -> None:
        key = f"{self.agent.incarnation}:{next(self._numbers)}"
        queue.turn = ActorLock(key, lambda turn, hop: self._refuse(queue, turn, hop))
        queue.method = _name_of(arrival)
        arrival.call_context = CallContext(arrival.hops, queue.turn)
        arrival.on_end = lambda: self._end(queue)

    # Events

    def _has_come(self, ref: Id, slot: ValueSlot) -> None:
        """Admit the calls that wait for a value, which was made or failed, before calls that arrive later."""
        while True:
            with self._lock:
                coming = self._coming[ref]
                # In one step with the check, so that a call either is in the queue before it, or finds no queue and a
                # value.
                if not coming:
                    del self._coming[ref]
                    return
                arrival = coming.popleft()
            try:
                if self._may_run(slot.value, arrival):
                    self._server.perform(arrival)
            except BaseException as fault:
                self._server.refuse(arrival, fault)

    def _end(self, queue: _Queue) -> None:
        with self._lock:
            queue.turn = None
            arrival = queue.next()
            if arrival is None:
                del self._queues[id(queue.value)]
                return
            self._begin(queue, arrival)
        if isinstance(arrival, GeneratorTurn):
            arrival.begins.set_result()
        else:
            self._server.perform(arrival)

    def _refuse(self, queue: _Queue, turn: ActorLock, hop: tuple[str, int]) -> None:
        """A method starts to wait for a hop: refuse queued calls made for this hop, which would deadlock."""
        with self._lock:
            still = queue.turn is turn  # otherwise leftovers of the method wait, such as a callback
            refused = [(each, _deadlock(queue, each)) for each in queue.take_for(hop)] if still else []
        for arrival, error in refused:
            if isinstance(arrival, GeneratorTurn):
                arrival.begins.set_exception(error)
            else:
                self._server.refuse(arrival, error)


def _name_of(arrival: Incoming | GeneratorTurn) -> str:
    if isinstance(arrival, GeneratorTurn):
        return arrival.method
    function = arrival.function
    assert isinstance(function, Method)
    return function.__name__


def _deadlock(queue: _Queue, arrival: Incoming | GeneratorTurn) -> UsageError:
    kind = type(queue.value).__qualname__
    return UsageError(
        f"{kind}.{queue.method} waits for a call that calls {kind}.{_name_of(arrival)} of the same object, and an "
        "actor runs one method at a time: neither would ever end. Call the other method directly (self.method()), or "
        "do not wait for that call inside a method"
    )


class FifoLock:
    """Admits one thread at a time, in order of arrival: `with lock:`. A waiting thread releases its slot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both fields
        self._is_taken = False
        self._waiting: deque[Signal] = deque()  # by thread, in order; each happens when the thread gets the lock

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            admitted = Signal()
            self._waiting.append(admitted)
        try:
            current.agent().wait_for(admitted)
        except BaseException:
            with self._lock:
                has_lock = admitted not in self._waiting
                if not has_lock:
                    self._waiting.remove(admitted)
            if has_lock:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            following = self._waiting.popleft() if self._waiting else None
            self._is_taken = following is not None
        if following is not None:
            following.set_result()
