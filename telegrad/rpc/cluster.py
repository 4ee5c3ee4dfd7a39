"""Where a worker is put together: the one file that knows every part. Read it first.

    options -> store -> agent listens -> rendezvous -> the group's directory and key -> agent joins -> farewell

Everything below is told what it needs here; nothing below knows of this room.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from telegrad.agent.address import answers, host_identity, own_address
from telegrad.agent.agent import Agent, Settings
from telegrad.agent.farewell import DONE, Ask, Entered, Farewell, Leave, Left, Letter, Message, Quiet
from telegrad.agent.members import Identity, Member, Members, check_name
from telegrad.agent.rendezvous import DynamicGroup, join_static
from telegrad.agent.stores import Meeting
from telegrad.autograd.conductor import Conductor
from telegrad.devices.maps import Devices, faults
from telegrad.errors import CallTimeout, DeviceError, PeerError, PeerLost
from telegrad.rpc import actors
from telegrad.rpc.options import TelegradOptions
from telegrad.rpc.references import RRef
from telegrad.rpc.values import open_roots
from telegrad.rref.keeper import Keeper

KEY_VARIABLE = "TELEGRAD_KEY"
KNOCK = 2.0  # seconds for a worker whose name or rank is wanted to show that it lives
FIRST_LOOK, LAST_LOOK = 5e-4, 0.02  # seconds between looks whether this worker is quiet, where that is wanted

log = logging.getLogger("telegrad")


class Worker:
    """An agent in its group. Made before the agent joins, since the others may say farewell from that moment on."""

    def __init__(self, agent: Agent, me: Member, directory: Members | DynamicGroup, handle: type[RRef[Any]]) -> None:
        self.agent = agent
        self.directory = directory
        self._lock = threading.Lock()  # guards _farewell
        self._farewell: Farewell | None = None
        self._changed = threading.Event()
        self.keeper = Keeper(agent, lambda: handle.__new__(handle))
        actors.serve(agent, self.keeper)
        self.conductor = Conductor(agent, lambda values: open_roots(self.keeper, values))
        if isinstance(directory, Members):
            self._farewell = Farewell(me.id, {member.id for member in directory})
            for message in (Entered, Ask, Quiet, Leave, Left):
                agent.on(message, self._on_message)
            agent.lost.append(self._on_lost)

    def shutdown(self, graceful: bool, timeout: float) -> None:
        """Leave the group; graceful: once nothing is in flight, for a group of fixed size anywhere in it.

        Raises:
            CallTimeout: the others did not want to shut down in time; this worker has left all the same.
        """
        deadline = monotonic() + timeout if timeout > 0 else float("inf")
        try:
            if graceful:
                self._say_farewell(deadline, timeout)
        finally:
            if isinstance(self.directory, DynamicGroup):
                self.directory.leave()
            self.agent.close()

    def _say_farewell(self, deadline: float, timeout: float) -> None:
        farewell = self._farewell
        if farewell is not None:
            self._post(self._step(lambda: farewell.enter(self.agent.started if self.agent.idle else None)))
        pause = FIRST_LOOK
        while not self._done():
            left = deadline - monotonic()
            if left <= 0:
                missing = self._missing()
                raise CallTimeout(
                    f"shutdown waited {timeout:g} s for the others"
                    + (f"; {', '.join(missing)} did not call shutdown" if missing else "")
                    + ". Use graceful=False to leave without them"
                )
            # A server calls shutdown at once and serves from here for as long as it lives: it must not look then.
            looks = farewell is None or farewell.asked
            if self._changed.wait(min(left, pause if looks else threading.TIMEOUT_MAX)):
                self._changed.clear()
                pause = FIRST_LOOK
            else:
                pause = min(1.5 * pause, LAST_LOOK)

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

    def _missing(self) -> list[str]:
        if self._farewell is None or not isinstance(self.directory, Members):
            return []
        return [repr(member.name) for member in self.directory if member.id in self._farewell.missing]

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
            self._post(self._step(lambda: farewell.lost(id_)))
            self._wake(farewell)

    def _wake(self, farewell: Farewell) -> None:
        """Have the thread in `shutdown` look, where there is something to see."""
        if farewell.asked or farewell.state == DONE:
            self._changed.set()


def start(
    name: str,
    meet: Callable[[float], Meeting],
    options: TelegradOptions,
    generation: int,
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
            group = DynamicGroup(meeting.store, generation)
            me, key = group.join(me, key, lambda member: answers(member.tcp, KNOCK))
            _check({me.name: me.devices}, whole=False)
            worker = Worker(agent, me, group, handle)
        else:
            roster = join_static(meeting.store, me, meeting.world_size, key, timeout, generation)
            _check({member.name: member.devices for member in roster.members})
            key = roster.key
            worker = Worker(agent, me, roster.members, handle)
        agent.join(me, key, worker.directory, _devices_of(me, worker.directory))
        return worker
    except BaseException:
        agent.close()
        raise


def _check(group: dict[str, Devices], whole: bool = True) -> None:
    """Raise DeviceError where a device map cannot work; in a dynamic group, those to others come later."""
    fault = next(iter(faults(group, whole)), None)
    if fault is not None:
        raise DeviceError(fault)


def _devices_of(me: Member, directory: Members | DynamicGroup) -> list[int]:
    """The accelerators that calls can touch; in a dynamic group, others may come later."""
    others = [member.devices for member in directory] if isinstance(directory, Members) else []
    return sorted(torch.device(used).index for used in me.devices.uses_of(me.name, others))
