"""A worker: the object behind each thread's calls, which `init_rpc` creates; and the current worker of a thread."""

from __future__ import annotations

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from telegrad._core import forks
from telegrad._core.agent.agent import Agent
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import Settings
from telegrad._core.interrupts import uninterrupted
from telegrad._core.membership.dynamic import HAS_LEFT, DynamicGroup
from telegrad._core.membership.generation_monitor import GenerationMonitor
from telegrad._core.membership.join import Joined
from telegrad._core.membership.leaving import Leaving, LeavingTogether
from telegrad._core.membership.members import Member, Members
from telegrad._core.membership.membership import Membership
from telegrad._core.references.handles import Handle
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.stores.sealed_store import SealRenewal
from telegrad._core.threads import Here, results
from telegrad._core.wire.messages import OVER
from telegrad.autograd import speak_for
from telegrad.autograd.conductor import Conductor
from telegrad.errors import NotInitialized, PeerError, PeerLost, StoreUntrusted, UsageError

T = TypeVar("T")
_made: weakref.WeakSet[Worker] = weakref.WeakSet()  # of this process; a forked child must not use them
OpenRoots = Callable[[ReferenceTable, Sequence[Any]], Future[list[Tensor]]]


class Worker:
    """An agent with its references and backward passes and, after joining, its group."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        entered: Callable[[Worker], None],
        wrap: Callable[[ReferenceTable, Handle], Any],
        open_roots: OpenRoots,
        extensions: WorkerExtensions,
    ) -> None:
        """Start to listen. `entered` is called with this worker first on each thread that will run user code.

        `wrap` creates the object for users from a handle of a reference.
        """
        self._entered = partial(entered, self)
        self.agent = Agent(name, settings, lambda _: entered(self))
        self.references = ReferenceTable(self.agent, wrap)
        self.conductor = Conductor(self.agent, partial(open_roots, self.references))
        self.extensions = extensions
        # Called with each other worker that has left or was lost, under the lock of the membership: they must not wait.
        # Filled before the worker joins.
        self.at_gone: list[Callable[[Member], None]] = []
        self.at_return: list[Callable[[Member], None]] = []
        self.at_end: list[Callable[[], None]] = []  # called when this worker leaves; any thread may `append`
        # Called by a graceful shutdown, with its timeout, before the worker announces it; each may block.
        self.before_end: list[Callable[[float], None]] = []
        self.at_declared_lost: Callable[[PeerLost], None] = lambda _: None  # called once it has ended
        self.group_ends = False  # the group ends with this worker: its program has started the others
        self.turning: GenerationMonitor | None = None  # of an elastic group
        self.elastic: Any = None  # the same: an `elastic.Elastic`, which creates its next generations
        self._leaves = False  # set once, when `end` begins
        self._ending = threading.RLock()  # held by the thread that runs `end`
        self._lock = threading.Lock()  # guards changes of _attached
        self._attached: dict[Callable[[Agent], Any], Any] = {}
        _made.add(self)

    def attached(self, make: Callable[[Agent], T]) -> T:
        """Return what `make(agent)` has made for this worker; the first call makes it, under a lock."""
        # The lock is not reentrant, so `make` must not call this method.
        with self._lock:
            if make not in self._attached:
                self._attached[make] = make(self.agent)
            found: T = self._attached[make]
        return found

    def join(self, joined: Joined, used: Iterable[int]) -> None:
        """Join a group; calls may use the accelerators in `used`."""
        self.me, self.directory, keys, generation, renew_seals = joined
        directory = self.directory
        self.references.name_is(self.me.name)
        # Before the agent joins: from then on the others may send messages of the shutdown barrier.
        self.leaving: Leaving = Leaving(self.agent, self.me)
        self.membership = Membership(self.agent, self.me, directory, self._entered)
        if isinstance(directory, Members):
            self.leaving = together = LeavingTogether(self.agent, self.me, directory)
            self.membership.answered.append(together.remind)
            self.membership.on_dead = together.lose
            self.membership.returned.append(together.take_back)
        self.membership.gone += self.at_gone
        self.membership.returned += self.at_return
        self.membership.on_declared_lost = self._declared_lost
        if generation is not None:
            self.turning = GenerationMonitor(self.agent, self.me, generation)
            self.membership.gone.append(self.turning.note)
            self.membership.none_joins = "a new worker joins at the next rpc.rendezvous_again()"
            self.membership.answered.append(self.turning.remind)
            if isinstance(self.leaving, LeavingTogether):
                self.turning.went_on = self.leaving.went_on
        self.agent.join(self.me, keys, directory, used)
        self.membership.begin()
        if renew_seals is not None:
            renewal = SealRenewal(renew_seals)
            renewal.begin()
            self.at_end.append(renewal.close)
        self.extensions.each(lambda extension: extension.on_join(self))

    def required(self, require: bool | Collection[str | int], serving: bool = False) -> list[Member]:
        """Return the workers that this one must not lose: until the end of a fixed group, or while it is serving; raise
        UnknownWorker if one of them is not in the group."""
        if isinstance(require, bool):
            return list(self.directory) if require and isinstance(self.directory, Members) else []
        return [self.agent.find(to) for to in require] if serving or self.leaving.together else []

    def shutdown(self, graceful: bool, timeout: float, required: Sequence[Member] = (), serving: bool = False) -> None:
        """Leave the group. With `graceful`, first wait until no call is in flight, in a fixed group on any worker, or
        until another thread, or a signal handler, has left.

        Raises:
            CallTimeout: the others did not want to shut down in time; this worker has left all the same.
            PeerLost: a required worker was lost or left early, or this one was; this worker has left all the same.
        """
        # Told to the others, unless the wait ends in order. An exception leaves it as it is.
        how = "it did not wait for them (graceful=False, a timeout, or an error)"
        try:
            if graceful and not self._leaves:
                for act in self.before_end:
                    act(timeout)
                if not serving:
                    self.extensions.each(lambda extension: extension.on_leave(self))
                self.leaving.wait(timeout, serving)
                how = ""
        finally:
            self.end(how)
        if isinstance(self.directory, DynamicGroup) and self.directory.over not in ("", HAS_LEFT):
            raise PeerLost(self.directory.over)
        if graceful:
            self.leaving.check(required)

    def serve(self, required: Sequence[Member]) -> None:
        """Serve until the group ends or `stop_serving` is called; then leave.

        Raises:
            PeerLost: a required worker was lost, or left a group of fixed size early; this one was declared lost; the
                program of the worker that a dynamic group ends with has ended without shutdown.
        """
        if self.leaving.together:
            self.shutdown(True, 0, required, serving=True)
            return
        try:
            self.membership.wait_for_end(required)
        finally:
            self.shutdown(not self.membership.serving.missed, 0)
        if missed := self.membership.serving.missed:
            raise PeerLost(missed)

    def stop_serving(self) -> None:
        """Make `serve` return; raise UsageError if the group is of fixed size."""
        if self.leaving.together:
            kind = "a group of fixed size" if self.elastic is None else "an elastic group"
            raise UsageError(
                f"worker {self.me.name!r} is in {kind}, whose workers leave together: its serve() ends "
                "once all have called shutdown() or serve()"
            )
        self.membership.serving.ended.set()

    @uninterrupted
    def end(self, how: str, *, reason: PeerError | None = None, lost: bool = False) -> None:
        """Leave now. A fixed group gets `how`, unless this worker leaves in order; a dynamic one if it is `lost`.

        Calls in flight here, and later calls, fail for that `reason`. Of several threads one does this, and the others
        wait for it, except those that serve calls.
        """
        # The first thread waits for those that serve calls, such as one whose callback leaves the group.
        if self._ending.acquire(blocking=not self.agent.serves_here()):
            try:
                if not self._leaves:
                    self._end(how, reason, lost)
            finally:
                self._ending.release()

    def _end(self, how: str, reason: PeerError | None, lost: bool) -> None:
        self._leaves = True
        self.references.log_failures()  # first: calls in flight may fail only because of this end
        self.leaving.over()
        list(results(self.at_end))
        if self.turning is not None:
            self.turning.close()
        # Before the connections end: the membership must not report that as losses of the others.
        self.membership.close()
        self.agent.word_losses(lambda who, why: "")  # workers that hear of this end close their connections first
        if self.group_ends and how:
            how = OVER
        try:
            if isinstance(self.directory, DynamicGroup):
                self.directory.leave(how if lost else "")
        finally:
            self.agent.close(reason, how if self.leaving.together or lost else "")
            self.extensions.each(lambda extension: extension.close())

    def _declared_lost(self) -> None:
        """Stop this worker: the group continues without it, and may have given its name to another worker."""
        assert isinstance(self.directory, DynamicGroup)
        error = PeerLost(self.directory.over)
        self.end("it was declared lost", reason=error, lost=True)
        self.at_declared_lost(error)

    def end_with_the_program(self) -> None:
        """Leave when the program ends without `shutdown`."""
        self.end("its program ended without rpc.shutdown()", lost=True)

    def abandon(self) -> None:
        """In a forked child: close the descriptors, and let each use of this worker raise NotInitialized."""
        # In this order: these methods use the objects that are disabled after them.
        self.agent.abandon()
        self.extensions.each(lambda extension: extension.abandon())
        for part in (*self._attached.values(), self.agent, self.conductor, self.references, self):
            forks.disable_all(part)

    def __repr__(self) -> str:
        group = self.directory if hasattr(self, "directory") else "no group yet"
        return f"<Worker {self.agent.name!r}{', closed' if self.agent.closed else ''}, in {group}>"


class WorkerExtension:
    """An object beside each worker, from before the worker looks for its group until the worker has left.

    Subclass it, override methods, and pass the class to `register`. An exception of `__init__` or `on_start` ends the
    start of the worker.
    """

    def __init__(self, name: str) -> None:
        """Initialise before the worker looks for its group; `name` is its role if it has no name so far."""

    def on_start(self, worker: Worker, rank: int, size: int | None, place: str) -> None:
        """Called once the worker listens, before it joins the group of `size` workers that meets at `place`."""

    def on_join(self, worker: Worker) -> None:
        """Called once the worker is in its group, and has its name and rank there."""

    def on_leave(self, worker: Worker) -> None:
        """Called when the worker starts to wait for the others, before it leaves."""

    def close(self) -> None:
        """Called once the worker has left its group, or could not join it; perhaps twice."""

    def abandon(self) -> None:
        """Called in a forked child, in which the worker does not run: free inherited resources."""


E = TypeVar("E", bound=WorkerExtension)
_registered: list[type[WorkerExtension]] = []  # changed by imports only


def register(extension: type[WorkerExtension]) -> None:
    """Create an object of this class for each worker that starts later in this process."""
    if extension not in _registered:
        _registered.append(extension)


class WorkerExtensions:
    def __init__(self, name: str) -> None:
        self._all: list[WorkerExtension] = []
        try:
            for kind in _registered:
                self._all.append(kind(name))
        except BaseException:
            self.each(lambda extension: extension.close())
            raise

    def of_kind(self, kind: type[E]) -> E:
        """Return the extension of that class; raise LookupError if it was registered after the worker had started, or
        not at all."""
        for each in self._all:
            if isinstance(each, kind):
                return each
        raise LookupError(f"{kind.__name__} is not an extension of this worker; register it before init_rpc")

    def each(self, act: Callable[[WorkerExtension], None]) -> None:
        for extension in self._all:
            act(extension)


# The current worker

worker: Worker | None = None  # of this process; init_rpc stores it, one at a time; read without a lock
ended_by: BaseException | None = None  # error that ended the last membership, until shutdown or init_rpc
_has_left = False  # this process was in a group before; reset in a forked child
_here = Here()  # its worker, if a process has several


def here() -> Worker:
    """Return the worker of this thread; raise NotInitialized if this process is in no group."""
    found: Worker = _here.own or joined()
    return found


def agent() -> Agent:
    """Return the agent of this thread; raises as `here`."""  # not by `here`: each remote call needs it
    found: Worker = _here.own or worker or joined()
    return found.agent


def joined() -> Worker:
    """Return the worker of this process.

    Raises:
        NotInitialized: it is in no group.
        StoreUntrusted: it was, until the group's store was tampered with.
        PeerLost: it was, until it was declared lost.
    """
    if worker is None:
        forks.exit_if_user_code_ended()
        if isinstance(ended_by, StoreUntrusted | PeerLost):
            raise type(ended_by)(f"this process has left its group: {ended_by}")
        if _has_left:
            raise NotInitialized(
                "RPC has not been initialized: this process has left its group, by shutdown() or because the group has "
                "ended. Make calls before that; to join a group again, call init_rpc first"
            )
        hint = f". {forks.ADVICE}" if forks.process.depth or multiprocessing.parent_process() is not None else ""
        raise NotInitialized(f"RPC has not been initialized: this process is in no group, call init_rpc first{hint}")
    return worker


def references() -> ReferenceTable:
    found: Worker = _here.own or worker or joined()
    return found.references


def conductor() -> Conductor:
    found: Worker = _here.own or worker or joined()
    return found.conductor


def enter(own: Worker | None) -> None:
    """Make this thread run user code for `own`, or with None for the worker of this process."""
    _here.own = own


def replace(own: Worker, by: Worker) -> None:
    """Replace the worker of this process, for the next generation of its group."""
    if worker is own:
        _set(by, ended_by, _has_left)


def _set(new: Worker | None, because: BaseException | None, has_left: bool) -> None:
    global worker, ended_by, _has_left
    _has_left = has_left
    ended_by = because  # before `worker` is unset, which readers check first
    worker = new


def leave(own: Worker, because: BaseException | None = None) -> None:
    """Unset the worker of this process. No other can be set before, so the check and the store need no lock."""
    if worker is own:
        _set(None, because, has_left=True)


def forget() -> None:
    """In a forked child: disable the parent's workers."""
    _set(None, None, has_left=False)
    for own in list(_made):
        own.abandon()
    _made.clear()  # otherwise a child of this child would do so again
    # After `abandon`, which closes descriptors by means of objects that are in frames of the stack, too.
    forks.disable_stack()
    _here.__dict__.clear()


speak_for(conductor)
