"""References to restorable values: after the loss of the owner, the next use finds the value again or recreates it.

A strategy defines how. The reference then gets another handle. References that were sent before the loss stay lost
unless they have a strategy: a copy on another worker asks the value's creator for the new handle.

A call is repeated at the new owner only if the error shows that its function has not run (NOT_RUN). If the owner is
lost while a call is in flight, the call raises PeerLost, since the function may have run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from telegrad._core import checks
from telegrad._core.agent.agent import Agent
from telegrad._core.calls.call_context import DerivedTimeout
from telegrad._core.calls.call_names import known_as, not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT, limit_of
from telegrad._core.forks import renewed
from telegrad._core.membership.members import Identity
from telegrad._core.pickling.reducers import REDUCERS
from telegrad._core.pickling.remote_text import remote_traceback_of
from telegrad._core.references import Id
from telegrad._core.references.handles import Handle, number
from telegrad._core.rpc.conversion import convert
from telegrad._core.rpc.retry import ping
from telegrad._core.rpc.rref import RRef
from telegrad._core.texts import Wait
from telegrad._core.worker import current
from telegrad._core.worker.value_access import RefPlaceholder
from telegrad.autograd.contexts import Inside
from telegrad.errors import (
    CannotRestore,
    ClaimLost,
    InvalidArgument,
    NotInitialized,
    NotPublished,
    OwnerLost,
    PeerError,
    PeerLost,
    PeerUnreachable,
    RendezvousError,
    RRefError,
    RRefLost,
    ShutDown,
    TelegradError,
    UnknownWorker,
)

T = TypeVar("T")
S = TypeVar("S")

LOST = OwnerLost, RRefLost, PeerLost, PeerUnreachable, ShutDown, UnknownWorker  # errors of a value that may return
NOT_RUN = PeerUnreachable, UnknownWorker, ClaimLost  # the call has not run, unless its function raised the error
NOT_YET = PeerError, UnknownWorker, RendezvousError, RRefLost, NotPublished  # the strategy's worker is not back
PAUSE = 0.05  # seconds between two attempts

_renewing = renewed(threading.Lock())  # guards the replacement of a lost handle, of any reference

Restore = bool | Callable[[Any], Any]


class RecoveryStrategy(Protocol):
    """Finds a value again after a loss."""

    def check(self) -> None:
        """Raise one of LOST if the value is known to have moved. Each use calls this."""

    def find(self, limit: float) -> RRef[Any]:
        """Return a reference to the value, recreated if necessary; raise one of NOT_YET if a retry may help."""

    def describe(self) -> tuple[list[str], str]:
        """Return the workers that are waited for, and advice for the user."""

    def travels(self) -> RecoveryStrategy:
        """Return the strategy of a copy on another worker."""


class RestorableRRef(RRef[T]):
    __slots__ = ("_strategy",)

    _strategy: RecoveryStrategy

    @classmethod
    def of(cls, reference: RRef[Any], strategy: RecoveryStrategy) -> RestorableRRef[Any]:
        made = cls._of_handle(reference._table, reference._handle)
        made._strategy = strategy
        return made

    def _reach(self, timeout: float = DEFAULT) -> Identity:
        handle = self._handle
        try:
            self._strategy.check()
            owner = self._table.reach(handle)
            # A connection that breaks reports the death of an owner. Without one, only an attempt to call it can.
            if handle.slot is None and not self._table.agent.is_connected(owner):
                with Inside(None):  # keeps this call out of the autograd context of the user
                    self._table.agent.call(owner, ping, None, None, timeout)  # its death may be unknown here
            return owner
        except LOST as error:
            self._renew(handle, timeout, error)
        return super()._reach()

    def to_here(self, timeout: float = DEFAULT) -> T:
        def use(left: float) -> T:
            self._reach(left)  # the value may have been here, and have moved
            return super(RestorableRRef, self).to_here(left)

        return self._until_run(use, timeout)

    def _call(self, method: str, timeout: float, args: Any, kwargs: Any, asked: Any = None) -> Any:
        return self._until_run(lambda left: RRef._call(self, method, left, args, kwargs, asked), timeout)

    def _until_run(self, use: Callable[[float], S], timeout: float) -> S:
        """Use the value with a timeout; repeat after each failure which shows that the owner has not run the call."""
        agent = self._table.agent
        limit = limit_of(timeout, agent.timeout)
        until, left = monotonic() + limit if limit else inf, timeout
        while True:
            handle = self._handle
            try:
                return use(left)
            except NOT_RUN as error:
                wanted: Any = self._strategy
                # The function itself may have raised an error of one of these types: then the call has run. Such an
                # error is remote. A ClaimLost shows by its claim which value was refused. If it is this one, the owner
                # has refused the call before it ran; `Method` removes the claim of an error that a method has raised.
                has_not_run = error.claim == wanted if isinstance(error, ClaimLost) else not remote_traceback_of(error)
                if not has_not_run or monotonic() >= until:
                    raise
                self._renew(handle, self._left(until), error)
            left = DerivedTimeout.of(self._left(until), f"the {limit:g} s of this call")

    def _left(self, until: float) -> float:
        return max(until - monotonic(), PAUSE) if until < inf else 0.0

    def _check(self) -> None:
        self._reach()

    def _lent(self) -> RefPlaceholder:
        self._reach()
        return super()._lent()

    def _renew(self, handle: Handle, timeout: float, lost: BaseException) -> None:
        """Find the value again. Several threads may do so at once; all then use the first one's handle."""
        agent = self._table.agent
        if agent.closed:
            raise lost
        limit = limit_of(timeout, agent.timeout)
        about = f"the value of the reference {number(self._handle.id)}"
        try:
            found = wait_for(agent, self._strategy, limit, about)
        except NotPublished as error:
            kind = ClaimLost if isinstance(lost, ClaimLost) else OwnerLost
            raise kind(
                f"{about} was lost with worker {self._handle.owner.name!r}, and was not restored within {limit:g} s: "
                f"{self._strategy.describe()[1]}, or give the call a longer timeout. The last error: "
                f"{_fact(error if error.__cause__ is None else error.__cause__)}"
            ) from lost
        with _renewing:
            if self._handle is handle:  # otherwise another thread's handle is in use, and must not be dropped
                self._handle = found._handle
                self._strategy = found._strategy if isinstance(found, RestorableRRef) else self._strategy


def wait_for(
    agent: Agent, strategy: RecoveryStrategy, limit: float, about: str, begun: float | None = None
) -> RRef[Any]:
    """Return the reference that a strategy finds, once it does. The limit counts from `begun` (monotonic), or from now.
    Raise NotPublished after `limit` seconds (0 for no limit), ShutDown if this worker leaves, or the error of creating
    the value."""
    until = (monotonic() if begun is None else begun) + limit if limit else inf
    why: Exception | None = None

    def text() -> str:
        return f"{about} is not available: {_fact(why)}"

    with Wait("finding a value", text, lambda: strategy.describe()[0], worker=agent.name) as wait:
        while True:
            left = until - monotonic()
            try:
                with Inside(None):  # keeps the value out of the autograd context of its user
                    return strategy.find(0 if left == inf else max(left, PAUSE))
            except (*NOT_YET, NotInitialized) as error:
                agent.check_open()  # this worker has left, which is the reason
                why = error
            if left <= PAUSE:
                raise NotPublished(f"{about} is not available after {limit:g} s: {why}") from why
            wait.look()
            with agent.waiting():
                sleep(PAUSE)


def _fact(error: BaseException | None) -> str:
    """Return the first sentence of an error: the next ones advise callers of functions, and a value has none."""
    return str(error).partition(". ")[0]


def ensure_present(reference: RRef[Any], timeout: float = DEFAULT) -> bool:
    """Ensure that a value exists now; return True if it had to be found again. Raise CannotRestore if it is permanently
    lost, and OwnerLost if it did not come back in time."""
    agent, handle = reference._table.agent, reference._handle
    try:
        owner = reference._table.reach(handle)
        if owner == agent.me.identity or agent.call(owner, _holds, handle.id, None, timeout):
            return False
        lost: Exception = RRefLost(f"worker {owner.name!r} no longer has a value for {reference!r}")
    except LOST as error:
        lost = error
    if isinstance(reference, RestorableRRef):
        reference._renew(handle, timeout, lost)
        return True
    if not isinstance(lost, RRefError):
        raise lost
    raise CannotRestore(
        f"the value of {reference!r} is lost, and cannot be created again: give `restore` to the call that creates it"
    ) from lost


@known_as("checking whether a value exists")
def _holds(maker: str, number: int) -> bool:
    return current.references().known((maker, number)) is not None


# Values that are recreated on a worker of the same name


class RecreateRecipe(NamedTuple):
    """How the creator of a reference recreates the value."""

    first: Id  # of the first value
    worker: str
    make: Callable[..., Any]
    args: Any
    kwargs: Any
    restore: Restore

    def check(self) -> None:
        pass

    def find(self, limit: float) -> RRef[Any]:
        found: RRef[Any] = current.agent().call(self.worker, remake, tuple(self), None, limit, self.make)
        return found

    def describe(self) -> tuple[list[str], str]:
        return [self.worker], f"start worker {self.worker!r} again"

    def travels(self) -> RecoveryStrategy:
        return Copied(self.first, current.agent().me.identity)


class Copied(NamedTuple):
    """The strategy of a received reference: its creator has the recipe."""

    first: Id
    maker: Identity

    def check(self) -> None:
        pass

    def find(self, limit: float) -> RRef[Any]:
        agent = current.agent()
        if agent.incarnation == self.maker.incarnation:
            return _found_again(*self.first, limit)
        found: RRef[Any] = agent.call(self.maker, _found_again, (*self.first, limit), None, limit)
        return found

    def describe(self) -> tuple[list[str], str]:
        name = self.maker.name
        return [name], f"worker {name!r}, its creator, must be alive and hold a reference, and its owner must return"

    def travels(self) -> RecoveryStrategy:
        return self


def check_restore(restore: Any) -> None:
    """Raise InvalidArgument if `restore` is invalid."""
    if not isinstance(restore, bool) and not callable(restore):
        raise InvalidArgument(
            "`restore` must be a function that is called with the value after it was created again, or True if no such "
            f"call is needed, not {checks.short_repr(restore)}"
        )


def make_restorable(
    reference: RRef[Any], make: Callable[..., Any], args: Any, kwargs: Any, restore: Restore
) -> RestorableRRef[Any]:
    """Return the same reference with a recipe: when its owner returns, the same function recreates the value."""
    recipe = RecreateRecipe(reference._handle.id, reference.owner_name(), make, args, kwargs, restore)
    made = RestorableRRef.of(reference, recipe)
    current.here().attached(RestorableValues).lasting[recipe.first] = made
    return made


class RestorableValues:
    """One worker's state of restorable values: as their creator, and as their owner."""

    def __init__(self, agent: Agent) -> None:
        # The references with recipes, by their first ids. Weak: only the program keeps a value alive. A copy on another
        # worker finds it here only as long as the creator still holds its reference.
        self.lasting: WeakValueDictionary[Id, RestorableRRef[Any]] = WeakValueDictionary()
        self._lock = threading.Lock()  # guards removals from _anew; `setdefault` is atomic
        # By the id of the first value: a future of the id of the recreated one. Not of a reference, which would keep
        # the value alive when the program has none any more.
        self._anew: dict[Id, Future[Id]] = {}

    def value(self, first: Id, make: Callable[[], RRef[Any]]) -> RRef[Any]:
        """Return a recreated value. Create it once for all that ask."""
        while True:
            coming: Future[Id] = Future()
            # The entry is the lock: the thread whose future is stored makes the value, the others wait for that future.
            found = self._anew.setdefault(first, coming)
            if found is coming:
                coming.heed()  # perhaps no other thread waits
                try:
                    made = make()
                except BaseException as error:
                    self._forget(first, coming)
                    coming.set_exception(error)  # type: ignore[arg-type]
                    raise
                coming.set_result(made._handle.id)
                return made
            known = _another(found.wait())
            if known is not None:
                return known
            self._forget(first, found)  # its last reference had ended

    def _forget(self, first: Id, future: Future[Id]) -> None:
        # Both steps under the lock: of two threads that found the same old entry, the slower one would otherwise remove
        # the entry that a third thread has made since.
        with self._lock:
            if self._anew.get(first) is future:
                del self._anew[first]


def _another(ref: Id) -> RRef[Any] | None:
    """Return another reference to a value of this worker, if it still exists."""
    table = current.references()
    slot = table.known(ref)
    return None if slot is None else RRef._of_handle(table, table.own(slot))


@known_as("restoring a value")
@not_compiled
def remake(first: Id, worker: str, make: Callable[..., Any], args: Any, kwargs: Any, restore: Restore) -> RRef[Any]:
    """At the owner: return the value, which exists if only its creator declared this worker dead; or recreate it."""

    def make_anew() -> RRef[Any]:
        call = convert(make, args, kwargs)
        table = current.references()
        made: RRef[Any] = table.create(table.agent.name, call, 0)
        # Restored before the reference is returned, so no use can see the value as it was created.
        value = made.to_here(0)
        if callable(restore):
            restore(value)
        return made

    if (there := _another(first)) is not None:
        return there
    return current.here().attached(RestorableValues).value(first, make_anew)


@known_as("asking for a restored value")
def _found_again(maker: str, number: int, limit: float) -> RRef[Any]:
    """At the creator of the reference: return a reference to the value, recreated if necessary."""
    lasting = current.here().attached(RestorableValues).lasting.get((maker, number))
    if lasting is None:
        raise RRefLost("the worker that created the value no longer holds a reference to it")
    ensure_present(lasting, limit)
    return RRef._of_handle(lasting._table, lasting._handle)


def _reduce(pickler: Any, reference: RestorableRRef[Any]) -> Any:
    with contextlib.suppress(TelegradError):  # sending a lost reference raises a better error
        reference._reach()
    plain: RRef[Any] = RRef._of_handle(reference._table, reference._handle)
    return RestorableRRef.of, (plain, reference._strategy.travels())


REDUCERS[RestorableRRef] = _reduce
