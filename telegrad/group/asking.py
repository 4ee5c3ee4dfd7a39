"""A store that is asked on a thread of its own: torch waits for an answer as long as the system does, minutes.

Who asks waits for PATIENCE. Then the store has gone, for all who ask: where its host is silent, or its process stopped.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from telegrad.threads import Background

PATIENCE = 4.0  # seconds; what answers is a thread of torch's, which no interpreter holds up
GRACE = 0.25  # seconds for an answer that is under way, as the store is closed


class SilentStore(RuntimeError):
    """It does not answer."""


class _Question:
    def __init__(self, method: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._method = method
        self._args = args
        self._answer: Any = None
        self._error: BaseException | None = None
        self._told = threading.Lock()  # a signal: held until there is an answer
        self._told.acquire()

    def ask(self) -> None:
        try:
            self._answer = self._method(*self._args)
        except BaseException as error:
            self._error = error
        del self._method
        self._told.release()

    def wait(self) -> Any:
        if not self._told.acquire(timeout=PATIENCE):
            raise SilentStore(f"it does not answer for {PATIENCE:g} s")
        if self._error is not None:
            raise self._error
        return self._answer


class AskedAside:
    """Stands for a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._silent = False  # a question waits for an answer still
        self._gone = ""  # what was wrong, after which torch is not asked again; no lock: loaded and stored as a whole
        self._thread = Background("telegrad-store", self._main)
        self._thread.want()

    def compare_set(self, *args: Any) -> Any:
        return self._ask(self._store.compare_set, args)

    def set(self, *args: Any) -> Any:
        return self._ask(self._store.set, args)

    def add(self, *args: Any) -> Any:
        return self._ask(self._store.add, args)

    def multi_get(self, *args: Any) -> Any:
        return self._ask(self._store.multi_get, args)

    def num_keys(self) -> Any:
        return self._ask(self._store.num_keys, ())

    def list_keys(self) -> Any:
        return self._ask(self._store.list_keys, ())

    def close(self) -> None:
        """Ask no more; what waits for an answer is left to itself."""
        self._questions.put(None)
        if not self._silent:
            self._thread.join(GRACE)

    def _ask(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._gone:
            raise (SilentStore if self._silent else RuntimeError)(self._gone)
        question = _Question(method, args)
        self._questions.put(question)
        try:
            return question.wait()
        except RuntimeError as error:
            self._silent = isinstance(error, SilentStore)
            self._gone = str(error)
            raise

    def _main(self) -> None:
        while (question := self._questions.get()) is not None:
            question.ask()

    def __repr__(self) -> str:
        return f"<AskedAside: {self._store!r}{', ' * bool(self._gone)}{self._gone}>"
