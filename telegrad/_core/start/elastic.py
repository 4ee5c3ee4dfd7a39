"""Elastic groups: their size changes between the steps of a program, in successive generations of fixed size.

Each generation has new workers in the same processes. No call, reference or context of one generation continues in the
next. The process keeps the directory and the size limits. A launcher that restarts the processes itself (torchrun)
determines the members of a generation, and the process ends with it.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from math import inf
from time import sleep
from typing import Any, NamedTuple

from telegrad._core.joining.directory_lease import DirectoryLease
from telegrad._core.joining.form_generations import JoinRequest
from telegrad._core.joining.generation_monitor import GenerationMonitor
from telegrad._core.joining.join import is_alive, ttl_of
from telegrad._core.joining.launched import find_place
from telegrad._core.joining.quorum import Before, GroupSize
from telegrad._core.membership.generation_steps import FINISH, HERE, LEAVING, SERVING, STAY
from telegrad._core.rpc.rref import RRef
from telegrad._core.start.cluster import start
from telegrad._core.stores.group_keys import find_keys
from telegrad._core.wire.messages import MOVED
from telegrad._core.worker import current
from telegrad._core.worker.options import TelegradOptions
from telegrad._core.worker.worker import Worker
from telegrad.errors import GenerationOver, GroupIncomplete, UsageError

LAUNCHED = "TORCHELASTIC_RUN_ID"  # environment variable set by torchrun's agents
LONG = 1e6  # seconds
FIRST = Before()


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
        self.turning_of(worker).begin(self._held, self._limits.most, is_alive, worker.membership.greet)
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
                _await_end(timeout)
            made = self.begin(before, timeout or inf)
        except BaseException as error:
            worker.end(f"it did not join the next generation of its group: {error or type(error).__name__}")
            current.leave(worker, error)
            raise
        made.conductor.contexts.succeed(worker.conductor.contexts)
        current.replace(worker, made)
        over = f"generation {turning.generation.number} of the group has ended; worker {made.me.name!r} is in"
        ended = GenerationOver(
            f"{over} generation {self.generation_of(made).number} now: repeat the call or create the reference there"
        )
        worker.references.over = ended
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
            worker = self._renew(worker, self.options.rpc_timeout)

    def leave(self, worker: Worker) -> None:
        """Announce that the worker leaves together with all others; any that have more to do continue without it."""
        self.turning_of(worker).stand(LEAVING)

    def _ended(self, worker: Worker) -> None:
        """Close the directory as the worker leaves; if the group ends, notify workers that wait for a generation."""
        turning = self.turning_of(worker)
        if self._held is not None and worker is self._worker:
            self._held.close(turning.generation if turning.finished and turning.leads else None)


def _await_end(timeout: float) -> None:
    """Block until the launcher ends this process, which it does once it has noticed the loss."""
    sleep(min(timeout or inf, LONG))
    raise GroupIncomplete(
        f"a worker of this generation was lost or left, but within {timeout:g} s the launcher did not restart the "
        "workers: check its log and its --max-restarts"
    )


def limits_of(least: int | None, most: int | None, size: int | None) -> GroupSize:
    """Return the size limits of a group.

    Raises:
        UsageError: no group can have these limits.
    """
    if size is not None:
        raise UsageError("init_rpc takes either world_size, or min_workers and max_workers")
    limits = GroupSize(1 if least is None else least, most or 0)
    if limits.least < 1 or (most is not None and most < limits.least):
        raise UsageError(
            f"min_workers must be at least 1, and max_workers at least min_workers: not {least} and {most}"
        )
    return limits
