"""Blocking code in a simulation: each act runs on a thread, of which one runs at a time, until it suspends itself.

The scheduler starts an act, and waits until it has ended or has suspended itself; later it resumes it. The scheduler
alone decides which act goes on next, so that a seed gives one order. Threads are used again for later acts.
"""

import contextlib
import threading
from collections.abc import Callable


class Killed(BaseException):
    """The process of this act has died."""


class Fiber:
    """A thread that runs acts."""

    def __init__(self, scheduler: "Fibers") -> None:
        self._scheduler = scheduler
        self.turn = threading.Lock()  # released when this fiber may go on
        self.turn.acquire()
        self.job: Callable[[], None] | None = None  # None while it is idle
        self.owner: object = None  # the worker that runs the act
        self.is_killed = False
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        while True:
            self.turn.acquire()
            assert self.job is not None
            try:
                with contextlib.suppress(Killed):
                    self.job()
            except BaseException as error:
                self._scheduler.error = error
            self.job, self.is_killed = None, False
            self._scheduler.give_back()


class Fibers:
    """The threads of a scheduler."""

    def __init__(self) -> None:
        self._back = threading.Lock()  # released when the scheduler may go on
        self._back.acquire()
        self._idle: list[Fiber] = []
        self._suspended: dict[Fiber, None] = {}
        self.current: Fiber | None = None
        self.error: BaseException | None = None  # the error with which an act has ended

    def start(self, job: Callable[[], None], owner: object = None) -> None:
        """Run an act until it ends or suspends itself."""
        fiber = self._idle.pop() if self._idle else Fiber(self)
        fiber.job, fiber.owner = job, owner
        self._run(fiber)

    def resume(self, fiber: Fiber, kill: bool = False) -> None:
        """Resume a suspended act, or end it."""
        fiber.is_killed = kill
        del self._suspended[fiber]
        self._run(fiber)

    def suspend(self) -> None:
        """Stop here until the scheduler resumes this act."""
        fiber = self.check()
        self._suspended[fiber] = None
        self.give_back()
        fiber.turn.acquire()
        self.check()

    def check(self) -> Fiber:
        """Return the fiber that runs; raise Killed if its process has died."""
        fiber = self.current
        assert fiber is not None
        if fiber.is_killed:
            raise Killed
        return fiber

    @property
    def suspended(self) -> list[Fiber]:
        return [*self._suspended]

    def kill_all(self) -> None:
        """End all suspended acts."""
        for fiber in list(self._suspended):
            with contextlib.suppress(Exception):
                self.resume(fiber, kill=True)

    def give_back(self) -> None:
        """Let the scheduler go on; the act that runs calls this."""
        self._back.release()

    def _run(self, fiber: Fiber) -> None:
        self.current = fiber
        fiber.turn.release()
        self._back.acquire()
        self.current = None
        if fiber.job is None:
            self._idle.append(fiber)
        error, self.error = self.error, None
        if error is not None:
            raise error


class Lock:
    """A lock of the simulated code: `step` runs before it is taken and after it was released."""

    def __init__(self, fibers: Fibers, step: Callable[[], None]) -> None:
        self._fibers, self._step = fibers, step
        self._is_held = False

    def __enter__(self) -> None:
        self._step()
        while self._is_held:
            self._fibers.suspend()
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._step()

    def _is_owned(self) -> bool:
        return self._is_held

    acquire, release = __enter__, __exit__
