"""Checkpoints that are written beside the program: who waits for their end, and who hears of their failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from telegrad.agent.agent import Agent
from telegrad.agent.futures import Future
from telegrad.errors import CheckpointFailed
from telegrad.progress import Wait
from telegrad.rpc import current
from telegrad.threads import Thread
from telegrad.wire.failures import fresh, kept


class _Writing:
    """One of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.future: Future[str] = Future()
        self.future.about = f"checkpoint.save of {path!r}, beside the program,"
        self.over = threading.Event()
        self.error: BaseException | None = None  # stored before it is over

    @property
    def was_seen(self) -> bool:
        """Whether somebody has been told of its failure by the future."""
        failure = getattr(self.future, "failure", None)
        return failure is not None and failure.seen

    def said(self) -> str:
        return f"checkpoint.save: {self.path!r} is still written beside the program"


class Beside:
    """Those of one worker; one at a time, as far as it does not save on several threads."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards _under_way
        self._under_way: list[_Writing] = []

    def begin(self, path: str, complete: Callable[[], None]) -> Future[str]:
        """Have `complete()` called on a thread of its own; a future of the path."""
        writing, worker = _Writing(path), current.here()

        def run() -> None:
            current.enter(worker)
            try:
                complete()
            except BaseException as error:
                writing.error = kept(error)
                writing.over.set()  # before callbacks run, which may save again
                writing.future.set_exception(error)  # type: ignore[arg-type]
            else:
                writing.over.set()
                writing.future.set_result(path)

        thread = Thread(target=run, name="telegrad-checkpoint")
        with self._lock:
            self._under_way.append(writing)
        try:
            thread.start()
        except BaseException:  # there is no memory for it
            self._forget(writing)
            raise
        return writing.future

    def settle(self) -> None:
        """Wait for those that are written.

        Raises:
            CheckpointFailed: one of them has failed, of which nobody was told.
        """
        self.wait(0)
        for writing in self._all():
            self._forget(writing)
            if writing.error is not None and not writing.was_seen:
                writing.future.heed()
                kind, said = type(writing.error).__name__, str(writing.error).partition("\n")[0]
                raise CheckpointFailed(
                    f"nothing was saved now, since the checkpoint before, {writing.path!r}, which was written beside "
                    f"the program, was not completed: {kind}: {said}. Save again once that is seen to"
                ) from fresh(writing.error)

    def wait(self, timeout: float) -> None:
        """Until all are written, or have failed; at most so many seconds, 0 for no limit."""
        until = monotonic() + timeout if timeout else float("inf")
        for writing in self._all():
            if writing.over.is_set():
                continue
            with Wait("checkpoint.save", writing.said, worker=self._agent.name) as wait, self._agent.waiting():
                while not writing.over.wait(min(wait.left, max(0.0, until - monotonic()))) and monotonic() < until:
                    wait.look()

    def _all(self) -> list[_Writing]:
        with self._lock:
            return list(self._under_way)

    def _forget(self, writing: _Writing) -> None:
        with self._lock:
            if writing in self._under_way:
                self._under_way.remove(writing)
