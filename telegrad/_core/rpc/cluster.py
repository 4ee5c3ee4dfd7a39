"""Assembles a worker from all parts. Read this file first: it is the only one that knows every part.

    options -> store -> worker listens -> rendezvous -> the group's directory and key -> worker joins -> leaves

The layers below get everything they need from here, and do not import this file.

The size of an elastic group changes between the steps of a program, in successive generations of fixed size. Each
generation has new workers in the same processes. No call, reference or context of one generation continues in the next.
The process keeps the directory and the size limits. A launcher that restarts the processes itself (torchrun) determines
the members of a generation, and the process ends with it.
"""

import atexit
import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch

from telegrad._core import processes
from telegrad._core.calls.settings import Settings, TelegradOptions
from telegrad._core.calls.unretrieved import log_held
from telegrad._core.forks import in_child, renewed
from telegrad._core.interrupts import install
from telegrad._core.membership.dynamic import DynamicGroup, ttl_of
from telegrad._core.membership.form_generations import DirectoryLease, JoinRequest
from telegrad._core.membership.generation_monitor import GenerationMonitor
from telegrad._core.membership.generations import FINISH, HERE, LEAVING, SERVING, STAY, Before, GroupSize
from telegrad._core.membership.join import find_place, is_alive, join
from telegrad._core.membership.leaving import LEAVES
from telegrad._core.membership.members import Member, Members, check_name, check_role, map_errors
from telegrad._core.pickling import main_program
from telegrad._core.pickling.main_modules import own_scope
from telegrad._core.rpc import joint_calls, retry
from telegrad._core.rpc.rref import RRef
from telegrad._core.security.keyring import find_keys
from telegrad._core.sockets import host_identity, own_address
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.streams import producer, streams
from telegrad._core.threads import Exclusive
from telegrad._core.wire.messages import MOVED
from telegrad._core.worker import actors, current
from telegrad._core.worker.current import Worker, WorkerExtensions
from telegrad._core.worker.value_access import open_roots
from telegrad.errors import (
    AlreadyInitialized,
    DeviceError,
    GenerationOver,
    GroupIncomplete,
    RendezvousError,
    ShutDown,
    TelegradError,
    UsageError,
)

LAUNCHED = "TORCHELASTIC_RUN_ID"  # environment variable set by torchrun's agents
LONG = 1e6  # seconds
FIRST = Before()


def start(
    name: str | None,
    meet: Callable[[float], RendezvousStore],
    options: TelegradOptions,
    entered: Callable[[Worker], None],
    kind: type[RRef[Any]] = RRef,
    role: str = "",
) -> Worker:
    """Create a worker and let it join its group; without a name it is named after its role and a number.

    `meet` opens the store within a time. `entered` is called on each thread that will run user code. References have
    the class `kind`.
    """
    check_role(role)
    if name is not None:
        check_name(name)
    timeout = options.rpc_timeout or float("inf")
    # On an error, `undo` closes what exists by then, the newest first. At the end it is emptied: from then on
    # `Worker.end` closes the parts.
    with contextlib.ExitStack() as undo:
        extensions = WorkerExtensions(name or role)
        undo.callback(extensions.each, lambda extension: extension.close())
        processes.check_open_files()
        own: dict[str, Any] = {each: getattr(options, each) for each in Settings._fields if hasattr(options, each)}
        own |= {"devices": options.published(), "sends_modes": kind._sends_modes}
        meeting = meet(timeout)
        own["address"] = own_address(options.address, meeting.host)
        settings = Settings(threads=options.num_worker_threads, timeout=options.rpc_timeout, **own)
        # It listens before it joins: the others get its address with the member that `describe` returns, and may call
        # it as soon as they have that. So the handlers of all layers are added before the rendezvous.
        worker = Worker(name or role, settings, entered, kind._of_handle, open_roots, extensions)
        undo.callback(worker.agent.close)
        actors.serve(worker.agent, worker.references)
        producer.serve(worker)
        retry.serve(worker)
        streams.serve(worker)
        joint_calls.serve(worker)
        me = worker.agent.describe(meeting.rank, host_identity())._replace(name=name or "", role=role)
        extensions.each(lambda each: each.on_start(worker, meeting.rank, meeting.world_size, meeting.where))
        joined = join(meeting, me, options.silence, timeout, worker.agent.prober)
        if isinstance(joined.directory, DynamicGroup):
            undo.callback(joined.directory.leave)
        _check(joined.me, joined.directory)
        worker.join(joined, _devices_of(joined.me, joined.directory))
        undo.pop_all()
    return worker


def _check(me: Member, directory: Members | DynamicGroup) -> None:
    """Raise DeviceError if a device map cannot work; in a dynamic group, maps to other workers are checked later."""
    members = directory if isinstance(directory, Members) else [me]
    group = {member.name: member.devices for member in members}
    fault = next(iter(map_errors(group, whole=isinstance(directory, Members))), None)
    if fault is not None:
        raise DeviceError(fault)


def _devices_of(me: Member, directory: Members | DynamicGroup) -> list[int]:
    """Return the accelerators that calls may use; in a dynamic group, later workers may use others."""
    others = [member.devices for member in directory] if isinstance(directory, Members) else []
    return sorted(torch.device(used).index for used in me.devices.uses_of(me.name, others))


class Generation(NamedTuple):
    """A generation of an elastic group: its number and size, and this worker's rank."""

    number: int
    rank: int
    size: int
    survivors: tuple[str, ...]  # members of the previous one, by rank: the first workers here, with its state


class Elastic:
    """The state that a process keeps across the generations of its group."""

    def __init__(
        self, name: str | None, role: str, rank: int, options: TelegradOptions, limits: GroupSize, kind: type[RRef[Any]]
    ) -> None:
        self._name = name
        self._role = role
        self.options = options
        self._limits = limits
        self._kind = kind
        launched = options.init_method.startswith("env:") and LAUNCHED in os.environ
        place, self._rank = find_place(options.init_method, rank)
        self._keys = find_keys(options.key)
        self._held = None if launched else DirectoryLease(place, self._keys, ttl_of(options.silence))
        self._worker: Worker | None = None  # in the latest generation of this process
        self._has_joined = False  # init_rpc was called, and no step has started since
        self._turning = threading.Lock()  # held by the thread that moves to the next generation, or requests it
        self._replacing = threading.Lock()  # guards that a worker either is replaced by the next one, or leaves
        self._leaves = threading.Event()  # this process joins no further generation

    def begin(self, before: Before = FIRST, timeout: float = 0) -> Worker:
        """Join the next generation; `before` is the previous one of this process."""
        limit = timeout or self.options.rpc_timeout or inf
        coming = JoinRequest(self._held, self._keys, self._limits, before, self._rank, limit)
        try:
            worker = start(self._name, coming.meet, self.options, current.enter, self._kind, self._role)
        except BaseException:
            if self._held is not None:
                self._held.close()
            raise
        self._worker = worker
        worker.elastic = self
        worker.at_end.append(partial(self._ended, worker))
        self._has_joined = before is FIRST
        may_join = lambda other: is_alive(other) and not worker.agent.prober.probe(other)  # noqa: E731
        self.turning_of(worker).begin(self._held, self._limits.most, may_join, worker.membership.greet)
        return worker

    def turning_of(self, worker: Worker) -> GenerationMonitor:
        """Return the `GenerationMonitor` of a worker, which tracks changes of its generation."""
        assert worker.turning is not None, "it is in no elastic group"
        return worker.turning

    def generation_of(self, worker: Worker) -> Generation:
        formed = self.turning_of(worker).generation
        survivors = tuple(member.name for member in formed.members[: formed.survivors])
        return Generation(formed.number, worker.me.id, len(formed.members), survivors)

    def again(self, worker: Worker, timeout: float) -> Worker:
        """Wait until all workers are between two steps; return the worker for the next step, which may be the same.

        Raises:
            UsageError: another thread does this just now.
            RendezvousError: there is no next generation, or none with this worker, which has left all the same.
            ShutDown: another thread, or a signal handler, leaves the group.
        """
        if not self._turning.acquire(blocking=False):
            raise UsageError(
                "rpc.rendezvous_again() is already running on another thread of this worker: call it on one thread"
            )
        try:
            joined, self._has_joined = self._has_joined, False
            if joined:  # the others have reached this point by their own calls of this function
                return worker
            turning = self.turning_of(worker)
            turning.stand(HERE)
            return worker if turning.wait(timeout) == STAY else self._renew(worker, timeout)
        finally:
            self._turning.release()

    def _renew(self, worker: Worker, timeout: float) -> Worker:
        turning = self.turning_of(worker)
        try:
            before = turning.before()
            worker.membership.close()  # before the others leave this generation, which must not be reported
            turning.close()
            if self._held is None:
                self._await_end(timeout)
            made = self.begin(before, timeout or inf)
            # The new worker replaces the old one before that ends, so that the process is a worker at any time.
            with self._replacing:
                if not (leaves := self._leaves.is_set()):
                    current.replace(worker, made)
            if leaves:
                made.end("its process left the group as this generation formed")
                raise ShutDown(LEAVES.format(made.me.name))
        except BaseException as error:
            # The old worker cannot stay: its membership is closed, and the others may be in the next generation.
            worker.end(f"it did not join the next generation of its group: {error!r}")
            current.leave(worker, error)
            if self._leaves.is_set() and isinstance(error, TelegradError):  # `leave` has closed the directory
                raise ShutDown(LEAVES.format(worker.me.name)) from error
            raise
        # `over` is set before the end, too: uses of the old references then raise GenerationOver, and no error of a
        # lost connection.
        over = f"generation {turning.generation.number} of the group has ended; worker {made.me.name!r} is in"
        ended = GenerationOver(
            f"{over} generation {self.generation_of(made).number} now. Create references, modules and optimizers again "
            "there, or restore them from a checkpoint; then repeat the call, in a new autograd context if it needs one"
        )
        made.conductor.contexts.succeed(worker.conductor.contexts, str(ended))
        worker.references.end_generation(ended)
        worker.end(MOVED, reason=ended)
        return made

    def serve(self, worker: Worker) -> Worker:
        """Serve in successive generations until the others leave; return the worker that must leave with them."""
        while True:
            turning = self.turning_of(worker)
            turning.stand(SERVING)
            try:
                told = turning.serve()
            except BaseException as error:
                worker.end(f"it was ended by {type(error).__name__}")
                current.leave(worker)
                raise
            if told == FINISH:
                return worker
            try:
                worker = self._renew(worker, self.options.rpc_timeout)
            except ShutDown:
                if not self._leaves.is_set():
                    raise
                return worker

    def leave(self, graceful: bool) -> Worker:
        """Join no further generation; return the worker that leaves. With `graceful`, announce that it leaves together
        with all others; any that have more to do continue without it."""
        with self._replacing:
            self._leaves.set()
            worker = current.joined()
        if graceful:
            self.turning_of(worker).stand(LEAVING)
        return worker

    def _ended(self, worker: Worker) -> None:
        """Close the directory as the worker leaves; if the group ends, notify workers that wait for a generation."""
        turning = self.turning_of(worker)
        # When the process moves on, `begin` has already stored the next worker, and the directory stays open for it.
        if self._held is not None and worker is self._worker:
            self._held.close(turning.generation if turning.finished and turning.leads else None)

    def _await_end(self, timeout: float) -> None:
        """Block until the launcher ends this process, which it does once it has noticed the loss."""
        self._leaves.wait(min(timeout or inf, LONG))
        raise GroupIncomplete(
            f"a worker of this generation was lost or left, but within {timeout:g} s the launcher did not restart the "
            "workers: check its log and its --max-restarts"
        )


def limits_of(least: int | None, most: int | None, size: int | None) -> GroupSize:
    """Return the size limits of a group; raise UsageError if no group can have these limits."""
    if size is not None:
        raise UsageError("init_rpc takes either world_size, or min_workers and max_workers")
    limits = GroupSize(1 if least is None else least, most or 0)
    if limits.least < 1 or (most is not None and most < limits.least):
        raise UsageError(
            f"min_workers must be at least 1, and max_workers at least min_workers: not {least} and {most}"
        )
    return limits


# The worker of this process

log = logging.getLogger("telegrad")
_lock = renewed(Exclusive("init_rpc"))  # only its holder sets current.worker, and only if that is None


def enter_group(
    name: str | None,
    options: TelegradOptions,
    meet: Callable[[float], RendezvousStore],
    kind: type[RRef[Any]] = RRef,
    role: str = "",
) -> None:
    """Make this process a worker; the arguments are as for `cluster.start`."""
    enter(lambda: start(name, meet, options, current.enter, kind, role), options)


def enter(begin: Callable[[], Worker], options: TelegradOptions) -> None:
    # First, since the start of a worker can be interrupted, too.
    install()
    main_program.check_not_imported("init_rpc")
    own_scope()  # before calls change the globals: it notes their first values
    what = "this worker could not join", RendezvousError
    with _lock, processes.translate_error(*what):
        check_free()
        current.ended_by = None
        worker = current.worker = begin()
        worker.at_declared_lost = partial(current.leave, worker)
        # If it was declared lost before it had that callback, it has ended all the same.
        if worker.agent.closed:
            current.leave(worker)
            worker.agent.check_open()
    if options.dashboard is not None:
        show(worker, options.dashboard)


def show(worker: Worker, port: int) -> None:
    """Show the group to browsers until this worker leaves. `telegrad.insight` is a layer above: import it late."""
    try:
        shown = importlib.import_module("telegrad.insight").dashboard(port=port)
    except OSError as error:  # the worker has joined its group, which must continue
        log.warning("telegrad: worker %r cannot serve the dashboard: %s", worker.me.name, error)
        return
    worker.at_end.append(shown.close)
    log.warning("telegrad: worker %r serves the dashboard at %s", worker.me.name, shown.url)


def check_free() -> None:
    """Raise AlreadyInitialized if this process is a worker."""
    if current.worker is not None:
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {current.worker.agent.name!r}; leave that group "
            "first, by rpc.shutdown() or by the shutdown() of the object that telegrad.local returned"
        )


def _leave_at_exit() -> None:
    log_held()  # first: calls in flight may fail only because of this end
    if (worker := current.worker) is not None:
        worker.end_with_the_program()
        current.leave(worker)


in_child(current.forget)
# Functions of `atexit` run in reverse order, so those that the program adds after this import still have its worker.
atexit.register(_leave_at_exit)
