"""Write checkpoints in the background. The next save waits for them, and raises their errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from telegrad.errors import CheckpointFailed
from telegrad.ext.calls import Agent, Future
from telegrad.ext.processes import Thread
from telegrad.ext.texts import Wait
from telegrad.ext.workers import current


class PendingSave(NamedTuple):
    path: str
    future: Future[str]
    over: threading.Event  # set before the future's callbacks run, since these may save again

    def text(self) -> str:
        return f"checkpoint.save: {self.path!r} is still being written in the background"


class BackgroundSaves:
    """The background saves of one worker. Several are pending only if several threads save."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards _pending
        self._pending: list[PendingSave] = []
        current.here().before_end.append(self.wait)

    def begin(self, path: str, complete: Callable[[], None]) -> Future[str]:
        """Call `complete()` on a new thread; return a future of the path."""
        save, worker = PendingSave(path, Future(), threading.Event()), current.here()
        save.future.about = f"checkpoint.save of {path!r}, in the background,"

        def run() -> None:
            current.enter(worker)
            try:
                complete()
            except BaseException as error:
                save.future.set_exception(error)  # type: ignore[arg-type]
            else:
                save.future.set_result(path)

        # Call torch's method: with that of `Future`, an error would count as seen.
        super(Future, save.future).add_done_callback(lambda _: save.over.set())
        thread = Thread(target=run, name="telegrad-checkpoint")
        with self._lock:
            self._pending.append(save)
        try:
            thread.start()
        except BaseException:  # out of memory
            self._forget(save)
            raise
        return save.future

    def wait_for_previous(self) -> None:
        """Wait for all pending saves.

        Raises:
            CheckpointFailed: one has failed, and its future was not asked for the error.
        """
        self.wait(0)
        for save in self._all():
            self._forget(save)
            failure = getattr(save.future, "failure", None)
            if failure is None or failure.seen:
                continue
            save.future.heed()
            try:
                save.future.value()
            except BaseException as error:
                kind, said = type(error).__name__, str(error).partition("\n")[0]
                raise CheckpointFailed(
                    f"nothing was saved, because the previous checkpoint, {save.path!r}, which was written "
                    f"in the background, failed: {kind}: {said}. Fix the cause and save again"
                ) from error

    def wait(self, timeout: float) -> None:
        """Wait until all saves have ended, `timeout` seconds at most, 0 for no limit."""
        until = monotonic() + timeout if timeout else float("inf")
        for save in self._all():
            if save.over.is_set():
                continue
            with Wait("checkpoint.save", save.text, worker=self._agent.name) as wait, self._agent.waiting():
                while not save.over.wait(min(wait.left, max(0.0, until - monotonic()))) and monotonic() < until:
                    wait.look()

    def _all(self) -> list[PendingSave]:
        with self._lock:
            return list(self._pending)

    def _forget(self, save: PendingSave) -> None:
        with self._lock:
            if save in self._pending:
                self._pending.remove(save)
