"""What waits until a worker can be called. The rim of `lobby`.

Whether a worker can be called is found out by a call of `hello`, one at a time for all who wait for it: it is looked up
anew by its name, so that who answers is whoever has the name by then.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any

from telegrad.agent.agent import Agent
from telegrad.agent.futures import Signal
from telegrad.agent.naming import known_as
from telegrad.errors import (
    CallTimeout,
    DirectoryLost,
    HandshakeError,
    PeerError,
    PeerUnreachable,
    ShutDown,
    UnknownWorker,
)
from telegrad.interrupts import raised_by_handler
from telegrad.progress import Wait
from telegrad.rpc.lobby import Fate, Lobby
from telegrad.wire.failures import fresh

PATIENCE = 5.0  # seconds for an answer to `hello`

_ABSENT = (UnknownWorker, PeerUnreachable, DirectoryLost)


@known_as("a look whether the worker is there")
def hello() -> None:
    """Nothing; but who answers is there."""


def fate_of(error: BaseException) -> Fate:
    """What an error tells of the call that has failed with it."""
    if isinstance(error, _ABSENT):
        return Fate.NOT_RUN
    if isinstance(error, PeerError) and not isinstance(error, HandshakeError):
        return Fate.MAY_HAVE_RUN
    return Fate.OVER


class Waiting(ABC):
    """Something that waits until a worker can be called. All but `cancel` is called by `Returns`."""

    waits = True
    rests_until = 0.0

    def __init__(self, returns: Returns, to: str | int, timeout: float) -> None:
        self.to = to
        self.limit(timeout)
        self.returns = returns
        self.over = Signal()

    def limit(self, timeout: float) -> None:
        """It has so many seconds from now, 0 for no limit."""
        self.timeout = timeout
        self.until = monotonic() + timeout if timeout else inf

    def left(self) -> float:
        """Seconds that it has still; 0 for no limit."""
        return max(1e-3, self.until - monotonic()) if self.timeout else 0.0

    @abstractmethod
    def go(self, _: None) -> None:
        """It can."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """It waits no longer."""

    @property
    @abstractmethod
    def described(self) -> str:
        """What it is."""

    def too_late(self) -> CallTimeout:
        return CallTimeout(
            f"{self.described} waited for the worker in vain: it could not be called within the set timeout "
            f"({self.timeout:g} s). {self.returns.why(self.to)}"
        )

    def wait(self) -> None:
        """Wait here until it is over, and say so where that takes long."""
        agent = self.returns.agent
        with Wait("wait_for_worker", self._text, self._missing, worker=agent.name) as wait:
            while not agent.wait_for(self.over, wait.left):
                wait.look()

    def _text(self) -> str:
        return f"{self.described}: {self.returns.why(self.to) or 'it was called again'}"

    def _missing(self) -> list[str]:
        return [self.to if isinstance(self.to, str) else f"rank {self.to}"]


class Returns:
    """All calls of one worker that wait for theirs."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.numbers = itertools.count(1)  # of idempotent calls; `next` is atomic
        self.may_come: Callable[[str | int], bool] = lambda to: True
        self._lock = threading.Lock()  # guards the lobby and _why
        self._lobby: Lobby[Waiting] = Lobby()
        self._why: dict[str | int, str] = {}  # the last look at a worker that is waited for has failed so
        agent.ticking.append(self._tick)
        agent.busy.append(lambda: not self._lobby.empty)

    def enter(self, waiting: Waiting) -> bool:
        """Have it wait; False where this worker leaves."""
        now = monotonic()
        with self._lock:
            if not self._lobby.enter(waiting, now):
                return False
            looks, upcoming = self._lobby.looks(now), self._lobby.next()
        self._go_on(looks, upcoming)
        return True

    def leave(self, waiting: Waiting) -> bool:
        """It waits no longer; whether it did."""
        with self._lock:
            return self._lobby.leave(waiting)

    def why(self, to: str | int) -> str:
        """Why a worker that is waited for could not be called."""
        return self._why.get(to, "")

    def _go_on(self, looks: list[str | int], upcoming: float) -> None:
        for to in looks:
            self.agent.run(self._look, to, False)  # which may have to ask the store
        if upcoming < inf:
            self.agent.wake_at(upcoming)

    def _tick(self, now: float) -> float:
        if self._lobby.empty:
            return inf
        with self._lock:
            late = self._lobby.expired(now)
            looks, upcoming = self._lobby.looks(now), self._lobby.next()
        for waiting in late:
            self.agent.later(waiting.fail, waiting.too_late())
        self._go_on(looks, upcoming)
        return upcoming

    def _look(self, to: str | int) -> None:
        try:
            self.agent.call_for(_Look(self, to), to, hello, None, None, PATIENCE, None)
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.found(to, error)

    def found(self, to: str | int, error: BaseException | None) -> None:
        """A look has ended: the worker can be called, or not."""
        now = monotonic()
        hopeless = error is not None and (_is_final(error) or not self.may_come(to))
        with self._lock:
            if error is None:
                self._why.pop(to, None)
                ready, failed = self._lobby.there(to, now), []
            else:
                self._why[to] = str(error).partition("\n")[0]
                ready, failed = [], self._lobby.not_there(to, now, hopeless)
            upcoming = self._lobby.next()
        for waiting in ready:
            self.agent.later(waiting.go, None)
        for waiting in failed:
            assert error is not None
            self.agent.later(waiting.fail, fresh(error))
        self._go_on([], upcoming)

    def close(self) -> None:
        """This worker leaves."""
        with self._lock:
            waiting = self._lobby.close()
        for each in waiting:
            each.fail(ShutDown(f"worker {self.agent.name!r} shut down while {each.described} waited for the worker"))

    def __repr__(self) -> str:
        return f"<Returns of {self.agent.name!r}: {self._lobby!r}>"


def _is_final(error: BaseException) -> bool:
    """Whether a look that has failed so need not be made again."""
    return fate_of(error) is Fate.OVER and not isinstance(error, CallTimeout)


class _Look:
    """The outcome of one look."""

    quick = False
    about: str

    def __init__(self, returns: Returns, to: str | int) -> None:
        self.call: Any = None
        self._returns = returns
        self._to = to

    def set_result(self, result: Any) -> None:
        self._returns.found(self._to, None)

    def set_exception(self, result: Any) -> None:
        self._returns.found(self._to, result)


class Presence(Waiting):
    """A thread that waits until a worker can be called."""

    def __init__(self, returns: Returns, to: str | int, timeout: float, what: str) -> None:
        super().__init__(returns, to, timeout)
        self._what = what

    def go(self, _: None) -> None:
        self.over.set_result()

    def fail(self, error: BaseException) -> None:
        self.over.set_exception(error)

    @property
    def described(self) -> str:
        return self._what

    def await_it(self) -> None:
        """Wait; raises why in vain."""
        if not self.returns.enter(self):
            raise ShutDown(f"worker {self.returns.agent.name!r} shut down")
        try:
            self.wait()
        finally:
            self.returns.leave(self)
        self.over.wait()
