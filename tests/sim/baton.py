"""Real threads, of which one runs at a time: at each edge of a lock a seed decides which goes on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Baton:
    """Passed from thread to thread."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._turns: dict[int, threading.Event] = {}  # of the threads that have not ended
        self._errors: list[BaseException] = []

    def run(self, *jobs: Callable[[], None]) -> None:
        """All of them to their ends."""
        threads = [threading.Thread(target=self._main, args=(number, job)) for number, job in enumerate(jobs)]
        self._turns = {number: threading.Event() for number in range(len(jobs))}
        for thread in threads:
            thread.start()
        self._give(self._any())
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a thread waits for ever"
        if self._errors:
            raise self._errors[0]

    def _main(self, number: int, job: Callable[[], None]) -> None:
        self._turns[number].wait()
        self._local.number = number
        try:
            job()
        except BaseException as error:
            self._errors.append(error)
        finally:
            del self._turns[number]
            if self._turns:
                self._give(self._any())

    _local = threading.local()

    def pass_on(self) -> None:
        """Perhaps another thread goes on now."""
        mine, next_ = self._local.number, self._any()
        if next_ != mine:
            self._turns[mine].clear()
            self._give(next_)
            self._turns[mine].wait()

    def _any(self) -> int:
        return self._chance.choice(sorted(self._turns))

    def _give(self, number: int) -> None:
        self._turns[number].set()


class Lock:
    """Passes the baton before it is taken and after it was given back; who finds it taken lets others go on."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._baton.pass_on()
        while not self._lock.acquire(blocking=False):
            self._baton.pass_on()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._baton.pass_on()
