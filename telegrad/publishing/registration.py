"""A worker's registration in the directory of its group, which determines the owners of published values.

The members of a dynamic group are registered in its directory anyway. Other groups get a directory when a worker first
publishes or looks up a value: rank 0 starts it in a separate process, and sends its address on request. Once rank 0 has
left, any worker that knows the address sends it. Each worker that publishes or looks up a value registers there, under
a lease. The process ends once rank 0 has left and no lease is left.

If the registration of a worker has ended, because its lease was not renewed in time, the worker registers again.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any, NamedTuple

from telegrad.errors import (
    CallTimeout,
    ClaimLost,
    HandshakeError,
    PeerError,
    PeerLost,
    ShutDown,
    StoreUntrusted,
    TelegradError,
)
from telegrad.ext.calls import Signal, complete
from telegrad.ext.host import accepts_connections, run_in_thread
from telegrad.ext.joining import DirectoryLost, DirectoryMonitor, DirectoryRefused, EmbeddedDirectory, LeaseLost
from telegrad.ext.values import ValueSlot
from telegrad.ext.workers import (
    Change,
    Claim,
    DynamicGroup,
    LifeOver,
    Member,
    MemberGone,
    Worker,
    WorkerInfo,
    current,
    shows_life,
    ttl_of,
)

THREAD = "telegrad-claims"
ROUND = 1.0  # seconds to wait for an answer before asking again
PAUSE = 0.05  # seconds between two tries
PATIENCE = 5.0  # seconds for an operation on a directory
SILENT = 1.0  # seconds without an answer after which a directory counts as unavailable
CONNECT_TIMEOUT = 2.0  # seconds for a worker to show that it is alive

log = logging.getLogger("telegrad")
Address = tuple[str, int]


def call_on_thread(done: Signal, function: Callable[..., Any], *args: Any) -> bool:
    """Complete a signal by a call on another thread. If no thread can start, fail it and return False."""
    try:
        run_in_thread(THREAD, complete, done, function, *args)
    except RuntimeError as error:
        done.set_exception(error)
        return False
    return True


class Registration:
    def __init__(
        self,
        worker: Worker,
        directory_of_group: Callable[[], Any],
        on_claim: Callable[[str], None],
        on_lost: Callable[[DynamicGroup], None],
    ) -> None:
        """`directory_of_group` returns `address` of the worker on which it is called.

        `on_claim` is called with each value whose owner has changed; it must not block. `on_lost` is called once a
        registration has ended, and all claims made with it are lost.
        """
        self._worker, self._agent = worker, worker.agent
        self._directory_of_group, self._on_claim, self._on_lost = directory_of_group, on_claim, on_lost
        self._lock = threading.Lock()  # guards all fields below; most are also read without the lock
        self._joining: Signal | None = None  # the last attempt to register
        self._problem = ""  # why it has not succeeded so far
        self._group: DynamicGroup | None = None  # the registration
        self._address: Signal | None = None  # of the directory: host and port
        self._keeping: DirectoryMonitor | None = None
        self._is_closed = False
        self._is_asking = False  # a thread asks whether the directory answers, or did just now
        self._silent_since = 0.0  # time of the first question without an answer, or 0
        self._refusal: DirectoryRefused | StoreUntrusted | None = None  # the last answer, if it was a refusal
        if isinstance(worker.directory, DynamicGroup):
            worker.directory.on_claim = on_claim
            self._group, self._joining = worker.directory, Signal()
            self._joining.set_result(worker.directory)
        else:
            worker.at_end.append(self._close)

    def group(self, limit: float) -> DynamicGroup:
        """Return the registration; register if needed.

        Raises:
            DirectoryLost: registration took longer than `limit` seconds (0 for no limit).
            PeerLost: the worker that would keep the directory has left.
            ShutDown: this worker leaves.
        """
        joining = self._begin()
        if not self._agent.wait_for(joining, limit or -1):
            raise DirectoryLost(f"the directory of the group was not found within {limit:g} s: {self._problem}")
        group: DynamicGroup = joining.wait()
        return group

    def known(self) -> DynamicGroup | None:
        """Return the registration if it exists, else None. Start to register if this was not tried before."""
        if self._joining is None:
            self._begin()
        return self._group

    def known_claim(self, name: str) -> Claim | None:
        """Return the claim on a published value, as far as this worker knows."""
        group = self.known()
        return group.claims.get(name) if group is not None else None

    def address(self) -> Signal:
        """Return the address of the directory, which rank 0 starts; its value is None if it is not known here."""
        with self._lock:
            address, starts = self._address, False
            if address is None:
                address, starts = Signal(), self._worker.me.id == 0
                if starts:
                    self._address = address
                else:
                    address.set_result()
        if starts and not call_on_thread(address, self._start):
            with self._lock:
                self._address = None
        return address

    def declare_lost(self, worker: WorkerInfo, _: Exception) -> None:
        """Remove a worker from the directory if its process is dead. If it may be alive, its lease decides."""
        run_in_thread(THREAD, self._declare_lost, self._worker.directory.find(worker.id))

    def check_directory(self, name: str) -> None:
        """Ask the directory for the owner of a value, on another thread.

        Raises:
            DirectoryLost: the directory has not answered earlier questions for long.
            DirectoryRefused, StoreUntrusted: it refused the question, or other programs have written to it.
        """
        group = self.known()
        if group is None:
            return
        now = monotonic()
        with self._lock:
            # One question at a time, however many threads look up values. `_look` pauses before it permits the next
            # one.
            asks, self._is_asking = not self._is_asking, True
            # Not in the pause after an answer, in which no question waits for one.
            self._silent_since = self._silent_since or (now if asks else 0.0)
            silent, refusal = now - (self._silent_since or now), self._refusal
        if asks and not call_on_thread(Signal(), self._look, group, name):
            with self._lock:
                self._is_asking = False
        if refusal is not None:
            raise type(refusal)(str(refusal))
        if silent > SILENT:
            raise DirectoryLost(f"the directory of the group has not answered for {silent:.0f} s")

    def _look(self, group: DynamicGroup, name: str) -> None:
        refusal: DirectoryRefused | StoreUntrusted | None = None
        try:
            group.look_for_owner(name)
            with self._lock:
                self._silent_since, self._refusal = 0.0, None
            sleep(SILENT / 2)  # pause before the next question
        except (DirectoryRefused, StoreUntrusted) as error:
            refusal = error
        except TelegradError:
            pass
        finally:
            with self._lock:
                self._is_asking, self._refusal = False, refusal

    # The directory of a group that is not dynamic

    def _begin(self) -> Signal:
        with self._lock:
            joining = self._joining
            # Start again if the last attempt has failed, or if its registration has ended.
            if joining is not None and not (joining.done() and self._group is None):
                return joining
            joining = self._joining = Signal()
        call_on_thread(joining, self._join)
        return joining

    def _join(self) -> DynamicGroup:
        while not (self._agent.closed or self._is_closed):
            try:
                return self._joined(self._find())
            except (DirectoryLost, LeaseLost, LifeOver, HandshakeError) as error:
                # Try again until this worker leaves: the directory, or its keeper, may only be slow. A caller of
                # `group` that has a limit reports this reason.
                self._problem = str(error)
            sleep(PAUSE)
        raise ShutDown(f"worker {self._worker.me.name!r} shut down")

    def _joined(self, address: Address) -> DynamicGroup:
        me, agent = self._worker.me, self._agent
        group = DynamicGroup(EmbeddedDirectory(address, agent.keys, PATIENCE), ttl_of(agent.settings.silence))
        group.on_claim = self._on_claim
        try:  # an older registration of this worker that has not ended does not count as alive
            group.join(me, lambda member: member.incarnation != me.incarnation and shows_life(member))
            group.begin(partial(self._apply, group), lambda: agent.stands_for)
        except BaseException:
            group.leave()
            raise
        with self._lock:
            # `_close` may have run on another thread meanwhile. It could not end this registration, which it did not
            # see, so this thread ends it.
            is_closed = self._is_closed or agent.closed
            self._group = None if is_closed else group
            if self._address is None:
                self._address = Signal()
                self._address.set_result(address)
        if is_closed:
            group.leave()
            raise ShutDown(f"worker {me.name!r} shut down")
        return group

    def _find(self) -> Address:
        """Return the address of the directory."""
        members = self._worker.membership.present()
        keeper = next((member for member in members if member.id == 0), None)
        if keeper is not None and keeper.incarnation == self._worker.me.incarnation:
            told = self.address()
            self._agent.wait_for(told)
            own: Address = told.wait()
            return own
        known = self._address  # of another worker, so it is done
        address: Address | None = known.wait() if known is not None else None
        address = address or self._ask([keeper] if keeper is not None else members)
        if address is not None:
            return address
        if keeper is not None:
            raise DirectoryLost(f"worker {keeper.name!r}, which keeps the group's directory, does not answer")
        raise PeerLost(
            "the worker of rank 0, which keeps the directory of published values, is no longer in the group, and no "
            "other worker knows its address. Publish or look up a value while rank 0 is in the group"
        )

    def _ask(self, members: list[Member]) -> Address | None:
        """Ask these members for the address of the directory, and return an answer, or None."""
        coming = []
        for member in members:
            if member.incarnation != self._worker.me.incarnation:
                with contextlib.suppress(PeerError):
                    coming.append(self._agent.call_async(member.identity, self._directory_of_group, (), None, ROUND))
        for future in coming:
            future.heed()
        for future in coming:
            with contextlib.suppress(PeerError, CallTimeout):
                if (address := future.wait()) is not None:
                    return str(address[0]), int(address[1])
        return None

    def _start(self) -> Address:
        try:
            keeping = DirectoryMonitor(self._agent.keys, self._worker.me.tcp[0])
        except BaseException:
            with self._lock:
                self._address = None
            raise
        with self._lock:
            is_closed = self._is_closed
            # As in `_joined`: `_close` may have run before it could see the process.
            self._keeping = None if is_closed else keeping
        if is_closed:
            keeping.leave()
        return keeping.pointer.address

    def _declare_lost(self, member: Member) -> None:
        group = self.known()
        if group is not None and accepts_connections(member.tcp, CONNECT_TIMEOUT) is False:
            group.declare_lost(member, f"worker {self._worker.me.name!r} found it dead")

    def _apply(self, group: DynamicGroup, change: Change) -> None:
        is_mine = isinstance(change, MemberGone) and change.life == self._worker.me.incarnation
        if is_mine and not self._is_closed:  # if closed, the change is this worker's own leaving
            # On another thread: this one watches the directory under the lock of the group, and `leave` waits for its
            # end.
            self._agent.later(self._renew, group)

    def _renew(self, group: DynamicGroup) -> None:
        """Register again after the registration has ended although this worker is alive."""
        with self._lock:
            if self._group is group:
                self._joining = self._group = None
            is_closed = self._is_closed
        group.leave()
        if not is_closed:
            log.warning(
                "telegrad: worker %r did not renew its lease in the group's directory in time. It no longer owns "
                "the values that it published, and stands by to own them again",
                self._worker.me.name,
            )
            self._on_lost(group)

    def _close(self) -> None:
        """End the registration, because this worker leaves its group."""
        with self._lock:
            self._is_closed = True
            joining, group, keeping = self._joining, self._group, self._keeping
            self._joining = self._group = self._keeping = None
        if joining is not None:  # the thread that completes it may take seconds to start the directory
            joining.set_exception(ShutDown(f"worker {self._worker.me.name!r} shut down"))
        if group is not None:
            group.leave()
        if keeping is not None:
            keeping.leave()


# Claims that a registration made


class Ownership(NamedTuple):
    """A claim of this worker, and the directory registration that made it."""

    name: str
    group: DynamicGroup
    claim: Claim

    @property
    def holds(self) -> bool:
        return self.group.owns(self.name, self.claim)

    def check(self) -> None:
        """Raise ClaimLost if this worker must not act as the owner."""
        if not self.holds:
            late = "it did not renew its lease in the directory in time, so another worker may own the value now"
            worker = current.here()
            over = self.group.over if worker.directory is self.group else ""  # else only the registration has ended
            why = f"refuses calls to the value {self.name!r}: {over or late}. The call was not run"
            error = ClaimLost(f"worker {worker.me.name!r} {why}; use the reference again: it finds the owner")
            # Shows a RestorableRRef that this call was refused before it ran, so that it may be repeated at the next
            # owner. An error of the same class that the function itself raised has another claim, or none.
            error.claim = self.name, self.claim.token
            raise error


class OwnedSlot(ValueSlot):
    """A published value at its owner. It opens only while the worker may act as the owner."""

    __slots__ = ("_owned",)

    def __init__(self, owned: Ownership) -> None:
        super().__init__()
        self._owned = owned

    def open(self) -> Any:
        self._owned.check()
        return super().open()
