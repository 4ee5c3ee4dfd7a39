"""Where a worker is put together: the one file that knows every part. Read it first.

    options -> store -> agent listens -> rendezvous -> the group's directory and key -> agent joins -> farewell

Everything below is told what it needs here; nothing below knows of this room.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from time import monotonic
from typing import Any

import torch

from telegrad.agent.agent import Agent, Settings
from telegrad.autograd.conductor import Conductor
from telegrad.devices.maps import Devices, faults
from telegrad.errors import CallTimeout, DeviceError, LeftEarly, PeerError, PeerLost, ShutDown, StoreLost, UsageError
from telegrad.group.address import answers, host_identity, own_address
from telegrad.group.dynamic import DynamicGroup, dynamic_group_lives, fixed_group_lives
from telegrad.group.farewell import (
    DONE,
    WAITING,
    Ask,
    Entered,
    Farewell,
    Leave,
    Left,
    Letter,
    Message,
    Missing,
    Quiet,
    Who,
)
from telegrad.group.members import Identity, Member, Members, check_name
from telegrad.group.reminder import Reminder
from telegrad.group.rendezvous import Roster, StoreOver, join_static, mixed
from telegrad.group.stores import Meeting, Place, join_store
from telegrad.rpc import actors
from telegrad.rpc.membership import Membership
from telegrad.rpc.options import TelegradOptions
from telegrad.rpc.references import RRef
from telegrad.rpc.values import open_roots
from telegrad.rref.keeper import Keeper

KEY_VARIABLE = "TELEGRAD_KEY"
ASK_AHEAD = 1.0  # seconds before it is told whom this worker awaits, to ask
KNOCK = 2.0  # seconds for a worker whose name or rank is wanted to show that it lives
FIRST_LOOK, LAST_LOOK = 5e-4, 0.02  # seconds between looks whether this worker is quiet, where that is wanted

log = logging.getLogger("telegrad")


class Worker:
    """An agent in its group. Made before the agent joins, since the others may say farewell from that moment on."""

    def __init__(
        self,
        agent: Agent,
        me: Member,
        directory: Members | DynamicGroup,
        handle: type[RRef[Any]],
        place: Place,
        entered: Callable[[], None],
    ) -> None:
        self.agent = agent
        self.me = me
        self.directory = directory
        self._lock = threading.Lock()  # guards _farewell
        self._farewell: Farewell | None = None
        self._changed = threading.Event()
        self._stories: dict[int, str] = {}  # of those who left early or died
        self.keeper = Keeper(agent, lambda: handle.__new__(handle))
        actors.serve(agent, self.keeper)
        self.conductor = Conductor(agent, lambda values: open_roots(self.keeper, values))
        if isinstance(directory, Members):
            self._farewell = Farewell(me.id, {member.id for member in directory})
            for message in (Entered, Ask, Quiet, Leave, Left, Who, Missing):
                agent.on(message, self._on_message)
            agent.lost.append(self._on_lost)
        self.membership = Membership(agent, me, directory, place, entered)

    def shutdown(
        self, graceful: bool, timeout: float, require: bool | Collection[str | int] = (), serving: bool = False
    ) -> None:
        """Leave the group; graceful: once nothing is in flight, for a group of fixed size anywhere in it.

        Raises:
            CallTimeout: the others did not want to shut down in time; this worker has left all the same.
            PeerLost: a required worker died or left early; this worker has left all the same.
        """
        deadline = monotonic() + timeout if timeout > 0 else float("inf")
        how = "it did not wait for them (graceful=False, a timeout, or an error)" if self._farewell else ""
        required = self._required(require)
        try:
            if graceful:
                self._say_farewell(deadline, timeout, serving)
                how = ""
        finally:
            self.end(how)
        if self._farewell is not None and graceful:
            self._check_parted(required)

    def serve(self, require: bool | Collection[str | int]) -> None:
        """Serve until the group ends, or until told to stop; then leave.

        Raises:
            PeerLost: a required worker of a group of fixed size died or left early.
            StoreLost: that of a dynamic group was lost.
        """
        if self._farewell is not None:
            self.shutdown(True, 0, require, serving=True)
            return
        try:
            self.membership.ended.wait()
        finally:
            self.shutdown(not self.membership.lost, 0)
        if self.membership.lost:
            raise StoreLost(self.membership.lost)

    def stop_serving(self) -> None:
        """Have `serve` end.

        Raises:
            UsageError: the group is of fixed size.
        """
        if self._farewell is not None:
            raise UsageError(
                f"worker {self.me.name!r} is in a group of fixed size, whose workers leave together: its serve() ends "
                "once all have called shutdown() or serve()"
            )
        self.membership.ended.set()

    def end(self, how: str) -> None:
        """Leave now."""
        self.membership.close()
        if isinstance(self.directory, DynamicGroup):
            self.directory.leave()
        self.agent.close(how=how)

    def end_with_the_program(self) -> None:
        """Its program has ended without `shutdown`."""
        self.end("its program ended without rpc.shutdown()" if self._farewell else "")

    def _required(self, require: bool | Collection[str | int]) -> list[Member]:
        if not isinstance(self.directory, Members):
            return []
        return list(self.directory) if require is True else [self.directory.find(to) for to in require or ()]

    def _check_parted(self, required: list[Member]) -> None:
        assert self._farewell is not None
        missed = [member for member in required if member.id in self._farewell.lost_ones]
        if missed:
            how = "; ".join(self._stories.get(member.id, f"worker {member.name!r} was lost") for member in missed)
            raise PeerLost(f"the group has ended without a worker that shutdown requires: {how}")

    def _say_farewell(self, deadline: float, timeout: float, serving: bool) -> None:
        farewell = self._farewell
        if farewell is not None:
            self._post(self._step(lambda: farewell.enter(self.agent.started if self.agent.idle else None)))
        reminder = Reminder(self._whom_shutdown_awaits)
        pause = FIRST_LOOK
        while not self._done():
            left = deadline - monotonic()
            if left <= 0:
                raise CallTimeout(
                    f"shutdown waited {timeout:g} s: {self._whom_shutdown_awaits()}. "
                    "Use graceful=False to leave without them"
                )
            # A server calls shutdown at once and serves from here for as long as it lives: it must not look then.
            looks = farewell is None or farewell.asked
            if not serving:
                self._remind(reminder)
                left = min(left, reminder.left)
            if self._changed.wait(min(left, pause if looks else threading.TIMEOUT_MAX)):
                self._changed.clear()
                pause = FIRST_LOOK
            else:
                pause = min(1.5 * pause, LAST_LOOK)

    def _remind(self, reminder: Reminder) -> None:
        """Before it is time to say whom this worker awaits, ask who that is."""
        if reminder.left < ASK_AHEAD and self._farewell is not None:
            self._post(self._step(self._farewell.ask_who))
        reminder.look()

    def _done(self) -> bool:
        if self._farewell is None:
            return self.agent.idle
        self._answer(self._farewell)
        return self._farewell.state == DONE

    def _answer(self, farewell: Farewell) -> None:
        """Tell the leader, if it has asked, once this worker is quiet."""
        while farewell.asked and self.agent.idle:
            # Again, under the lock: what is reported must be seen after the question came.
            self._post(self._step(lambda: farewell.quiet(self.agent.started) if self.agent.idle else []))

    def _whom_shutdown_awaits(self) -> str:
        if self._farewell is None:
            return f"calls of worker {self.me.name!r}, or to it, are still under way"
        missing = [self._name(id_) for id_ in sorted(self._farewell.missing)]
        if missing:
            return f"{', '.join(missing)} did not call shutdown (worker {self.me.name!r} has, and serves meanwhile)"
        return f"the others have not called shutdown, or calls are under way (worker {self.me.name!r} serves meanwhile)"

    def _name(self, id_: int) -> str:
        return repr(self.agent.find(id_).name)

    # The farewell's rim: a lock around the machine, the letters sent outside of it

    def _step(self, event: Callable[[], list[Letter]]) -> list[Letter]:
        with self._lock:
            return event()

    def _post(self, letters: list[Letter]) -> None:
        for to, message in letters:
            try:
                self.agent.notify(to, message)
            except PeerError:
                log.debug("telegrad: %r has gone already", to)

    def _on_message(self, sender: Identity, message: Message) -> None:
        farewell = self._farewell
        assert farewell is not None
        self._post(self._step(lambda: farewell.receive(sender.id, message)))
        self._answer(farewell)
        self._wake(farewell)

    def _on_lost(self, who: Identity, reason: PeerError) -> None:
        farewell, id_ = self._farewell, who.id
        assert farewell is not None
        if isinstance(reason, PeerLost) and farewell.inside:
            self._post([(id_, Entered())])  # a connection that broke is no death: that no new one can be made is
        elif not isinstance(reason, PeerLost):
            died = isinstance(reason, LeftEarly) or not isinstance(reason, ShutDown)
            if died:
                early = isinstance(reason, LeftEarly)
                self._tell_story(who, str(reason) if early else f"worker {who.name!r} was lost ({reason})")
            self._post(self._step(lambda: farewell.lost(id_, died)))
            self._wake(farewell)

    def _tell_story(self, who: Identity, story: str) -> None:
        """Of somebody who will not take part in the end of the group."""
        assert self._farewell is not None
        if self._farewell.state == WAITING:
            self._stories.setdefault(who.id, story)
            self.agent.warn_lost(who, f"{story}. Its group goes on, and will shut down, without it")

    def _wake(self, farewell: Farewell) -> None:
        """Have the thread in `shutdown` look, where there is something to see."""
        if farewell.asked or farewell.state == DONE:
            self._changed.set()


def start(
    name: str,
    meet: Callable[[float], Meeting],
    options: TelegradOptions,
    entered: Callable[[Agent], None],
    handle: type[RRef[Any]] = RRef,
) -> Worker:
    """Make a worker and bring it into its group.

    `meet` opens the store within a time. `entered` is called on each thread that will run user code. References are
    of the class `handle`.
    """
    check_name(name)
    timeout = options.rpc_timeout or float("inf")
    meeting = meet(timeout)
    agent = Agent(
        name,
        Settings(
            threads=options.num_worker_threads,
            timeout=options.rpc_timeout,
            transport=options.transport,
            shared_memory=options.shared_memory,
            silence=options.silence,
            tls=options.tls,
            devices=options.published(),
        ),
        own_address(options.address, meeting.host),
        entered,
    )
    try:
        me = agent.describe(meeting.rank, host_identity())
        key = options.key or os.environ.get(KEY_VARIABLE, "").encode() or None
        if meeting.world_size is None:
            if fixed_group_lives(meeting.store, _is_alive):
                raise mixed(me)
            group = DynamicGroup(meeting.store, meeting.serves)
            me, key = group.join(me, key, _is_alive)
            _check({me.name: me.devices}, whole=False)
            worker = Worker(agent, me, group, handle, meeting.place, partial(entered, agent))
        else:
            roster = _join_static(meeting, me, key, timeout)
            _check({member.name: member.devices for member in roster.members})
            key = roster.key
            worker = Worker(agent, me, roster.members, handle, meeting.place, partial(entered, agent))
        agent.join(me, key, worker.directory, _devices_of(me, worker.directory))
        worker.membership.begin()
        return worker
    except BaseException:
        agent.close()
        raise


def _join_static(meeting: Meeting, me: Member, key: bytes | None, timeout: float) -> Roster:
    """Meet the others in this store, or in the next at its place where this one was still that of another group."""
    assert meeting.world_size is not None
    until = monotonic() + timeout
    store = meeting.store
    while True:
        if dynamic_group_lives(store, _is_alive):
            raise mixed(me)
        try:
            return join_static(store, me, meeting.world_size, key, timeout, _is_alive)
        except StoreOver:
            host, port = meeting.place
            if host is None or port is None:
                raise
        timeout = until - monotonic()
        store = join_store(host, port, timeout)


def _is_alive(member: Member) -> bool:
    return answers(member.tcp, KNOCK)


def _check(group: dict[str, Devices], whole: bool = True) -> None:
    """Raise DeviceError where a device map cannot work; in a dynamic group, those to others come later."""
    fault = next(iter(faults(group, whole)), None)
    if fault is not None:
        raise DeviceError(fault)


def _devices_of(me: Member, directory: Members | DynamicGroup) -> list[int]:
    """The accelerators that calls can touch; in a dynamic group, others may come later."""
    others = [member.devices for member in directory] if isinstance(directory, Members) else []
    return sorted(torch.device(used).index for used in me.devices.uses_of(me.name, others))
