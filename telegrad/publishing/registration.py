"""A worker's registration in the directory of its group, which decides who owns a published value.

The members of a dynamic group are registered in its directory anyway. Other groups get a directory when a worker first
publishes or looks up a value: the worker of rank 0 starts it, in a process of its own, and tells the others its
address. Once that worker has gone, any other one that knows the address tells it. Each worker that publishes or looks
up a value registers there, under a lease. The process ends once rank 0 has left and no lease is left.

A worker whose registration has ended, since it did not renew its lease in time, registers anew.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep
from typing import Any

from telegrad.errors import CallTimeout, HandshakeError, PeerError, PeerLost, ShutDown, StoreUntrusted, TelegradError
from telegrad.ext.calls import Signal
from telegrad.ext.directories import DirectoryLost, DirectoryRefused, EmbeddedDirectory, LeaseLost
from telegrad.ext.joining import Keeping, shows_life, ttl_of
from telegrad.ext.processes import knock, run_beside
from telegrad.ext.workers import Change, Claim, DynamicGroup, Gone, LifeOver, Member, Worker, WorkerInfo

THREAD = "telegrad-claims"
ROUND = 1.0  # seconds for the answer to a question, before it is asked again
PAUSE = 0.05  # seconds between two tries
PATIENCE = 5.0  # seconds for an operation of a directory
SILENT = 1.0  # seconds without an answer after which a directory is taken not to answer
KNOCK = 2.0  # seconds for a worker to show that it lives

log = logging.getLogger("telegrad")
Address = tuple[str, int]


class Answer(Signal):
    """A result that one thread looks up for others."""

    __slots__ = ("problem", "value")

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None  # stored before it happens
        self.problem = ""  # why it has not happened yet

    def tell(self, value: Any) -> None:
        self.value = value
        self.set_result()

    def wait(self) -> Any:
        super().wait()
        return self.value

    def find(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a thread call a function whose result this is."""
        run_beside(THREAD, self._run, function, args)

    def _run(self, function: Callable[..., Any], args: Any) -> None:
        try:
            self.tell(function(*args))
        except Exception as error:
            self.set_exception(error)


class Registration:
    """Of one worker."""

    def __init__(
        self,
        worker: Worker,
        directory_of_group: Callable[[], Any],
        on_claim: Callable[[str], None],
        on_lost: Callable[[DynamicGroup], None],
    ) -> None:
        """`directory_of_group` gives `address` where it is called.

        `on_claim` is called with each value whose owner has changed; it must not block.

        `on_lost` is called once a registration has ended, and all that was claimed with it is lost.
        """
        self._worker, self._agent = worker, worker.agent
        self._directory_of_group, self._on_claim, self._on_lost = directory_of_group, on_claim, on_lost
        self._lock = threading.Lock()  # guards all below; _joining and _is_closed are loaded without
        self._joining: Answer | None = None  # of a DynamicGroup
        self._address: Answer | None = None  # of the directory: host and port
        self._keeping: Keeping | None = None
        self._is_closed = False
        self._is_asking = False  # a thread asks whether the directory answers, or did so a moment ago
        self._silent_since = 0.0  # it was asked then, and has not answered
        self._refusal: DirectoryRefused | StoreUntrusted | None = None  # with which it has answered last
        if isinstance(worker.directory, DynamicGroup):
            worker.directory.on_claim = on_claim
            self._joining = Answer()
            self._joining.tell(worker.directory)
        else:
            worker.at_end.append(self._close)

    def group(self, limit: float) -> DynamicGroup:
        """Return the registration; register where that was not done yet.

        Raises:
            DirectoryLost: that took longer than `limit` seconds (0 for no limit).
            PeerLost: the worker that would keep the directory has gone.
        """
        joining = self._begin()
        if not self._agent.wait_for(joining, limit or -1):
            raise DirectoryLost(f"the directory of the group was not found within {limit:g} s: {joining.problem}")
        group: DynamicGroup = joining.wait()
        return group

    def known(self) -> DynamicGroup | None:
        """Return the registration if there is one; begin to register where this was not tried before."""
        found: DynamicGroup | None = (self._joining or self._begin()).value
        return found

    def known_claim(self, name: str) -> Claim | None:
        """Return who owns a published value, as far as this worker knows."""
        group = self.known()
        return group.claims.get(name) if group is not None else None

    def address(self) -> Answer:
        """Return where the directory is; rank 0 starts it. The answer is None where this worker does not know."""
        starts = False
        with self._lock:
            address = self._address
            if address is None and self._worker.me.id == 0:
                address = self._address = Answer()
                starts = True
        if address is None:
            address = Answer()
            address.tell(None)
        if starts:
            address.find(self._start)
        return address

    def declare_lost(self, worker: WorkerInfo, _: Exception) -> None:
        """Take a worker out of the directory whose process is dead; the lease of one that may live decides."""
        run_beside(THREAD, self._declare_lost, self._worker.directory.find(worker.id))

    def check_directory(self, name: str) -> None:
        """Ask the directory who owns a value, on another thread.

        Raises:
            DirectoryLost: it was asked before, and has not answered for long.
            DirectoryRefused, StoreUntrusted: it refused that, or other programs have written to it.
        """
        group = self.known()
        if group is None:
            return
        now = monotonic()
        with self._lock:
            asks, self._is_asking = not self._is_asking, True
            self._silent_since = self._silent_since or now
            silent, refusal = now - self._silent_since, self._refusal
        if asks:
            run_beside(THREAD, self._look, group, name)
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
            sleep(SILENT / 2)  # until it is asked again
        except (DirectoryRefused, StoreUntrusted) as error:
            refusal = error
        except TelegradError:
            pass
        with self._lock:
            self._is_asking, self._refusal = False, refusal

    # The directory of a group that is not dynamic

    def _begin(self) -> Answer:
        with self._lock:
            joining, is_new = self._joining, False
            if joining is None or (joining.done() and joining.value is None):
                joining, is_new = Answer(), True
                self._joining = joining
        if is_new:
            joining.find(self._join, joining)
        return joining

    def _join(self, joining: Answer) -> DynamicGroup:
        while not (self._agent.closed or self._is_closed):
            try:
                return self._joined(self._find())
            except (DirectoryLost, LeaseLost, LifeOver, HandshakeError) as error:
                joining.problem = str(error)
            sleep(PAUSE)
        raise ShutDown(f"worker {self._worker.me.name!r} shut down")

    def _joined(self, address: Address) -> DynamicGroup:
        me, agent = self._worker.me, self._agent
        group = DynamicGroup(EmbeddedDirectory(address, agent.keys, PATIENCE), "", ttl_of(agent.settings.silence))
        group.on_claim = self._on_claim
        try:  # a registration of this worker that has not ended yet does not live
            group.join(me, lambda member: member.incarnation != me.incarnation and shows_life(member))
            group.begin(partial(self._apply, group), lambda: agent.stands_for)
        except BaseException:
            group.leave()
            raise
        with self._lock:
            is_closed = self._is_closed or agent.closed
            if self._address is None:
                self._address = Answer()
                self._address.tell(address)
        if is_closed:
            group.leave()
            raise ShutDown(f"worker {me.name!r} shut down")
        return group

    def _find(self) -> Address:
        """Return where the directory is."""
        members = self._worker.membership.present()
        keeper = next((member for member in members if member.id == 0), None)
        if keeper is not None and keeper.incarnation == self._worker.me.incarnation:
            told = self.address()
            self._agent.wait_for(told)
            own: Address = told.wait()
            return own
        with self._lock:
            known: Address | None = self._address.value if self._address is not None else None
        address = known or self._ask([keeper] if keeper is not None else members)
        if address is not None:
            return address
        if keeper is not None:
            raise DirectoryLost(f"worker {keeper.name!r}, which keeps the group's directory, does not answer")
        raise PeerLost(
            "the worker of rank 0, which keeps the directory in which values are published, has gone, and no other "
            "worker knows where that is. Publish or look up a value earlier, while rank 0 is there"
        )

    def _ask(self, members: list[Member]) -> Address | None:
        """Return where the directory is, as the first says who knows it."""
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
            keeping = Keeping(self._agent.keys, self._worker.me.tcp[0])
        except BaseException:
            with self._lock:
                self._address = None
            raise
        with self._lock:
            is_closed = self._is_closed
            self._keeping = None if is_closed else keeping
        if is_closed:
            keeping.leave()
        return keeping.pointer.address

    def _declare_lost(self, member: Member) -> None:
        group = self.known()
        if group is not None and knock(member.tcp, KNOCK) is False:
            group.declare_lost(member, f"worker {self._worker.me.name!r} found it dead")

    def _apply(self, group: DynamicGroup, change: Change) -> None:
        is_mine = isinstance(change, Gone) and change.life == self._worker.me.incarnation
        if is_mine and not self._is_closed:  # else it sees how this worker leaves
            self._agent.later(self._renew, group)

    def _renew(self, group: DynamicGroup) -> None:
        """The registration has ended, though this worker lives."""
        with self._lock:
            if self._joining is not None and self._joining.value is group:
                self._joining = None
            is_closed = self._is_closed
        group.leave()
        if not is_closed:
            log.warning(
                "telegrad: worker %r did not renew its lease in the group's directory in time. It owns none of the "
                "values any more that it has published, and stands by for them",
                self._worker.me.name,
            )
            self._on_lost(group)

    def _close(self) -> None:
        """This worker leaves its group."""
        with self._lock:
            self._is_closed = True
            joining, keeping = self._joining, self._keeping
            self._joining = self._keeping = None
        if joining is not None and joining.value is not None:
            joining.value.leave()
        if keeping is not None:
            keeping.leave()

    def __repr__(self) -> str:
        return f"<Registration of {self._worker.me.name!r}: {self._joining.value if self._joining else 'none'}>"
