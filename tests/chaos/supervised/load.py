"""The load of one life: clients, a watcher for each worker, and a thread that measures delays of the machine."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import telegrad.rpc as rpc
from telegrad.errors import TelegradError
from tests.chaos.load import GRACE, all_joined, told
from tests.chaos.supervised import functions
from tests.chaos.supervised.operations import OPERATIONS, PATIENCE, Client, Failures
from tests.chaos.supervised.record import Life

CLIENTS = 2
PAUSE = 0.01  # seconds between two operations of a client
WATCH = 0.05  # seconds between two calls of a watcher
NAP = 0.005
NOISE = 0.01  # seconds; shorter delays are not noted
LATE = 0.1  # seconds; shorter calls are not noted


class Load:
    """Threads that run until they are stopped. `roles` has the workers that they call, and their roles."""

    def __init__(self, roles: dict[str, str], seed: int) -> None:
        self._roles = roles
        self._note = functions.record.note
        self._ended, self._nap = threading.Event(), threading.Event()
        jobs = [
            (self._serve, (client, random.Random(f"{seed}/{functions.record.life}/{client}")))
            for client in range(CLIENTS)
        ]
        self._threads = [threading.Thread(target=job, args=args, daemon=True) for job, args in jobs]
        self._threads += [threading.Thread(target=self._watch, args=(name,), daemon=True) for name in roles]
        self._threads.append(threading.Thread(target=self._measure, daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let all threads end; a thread that does not is a violation."""
        self._ended.set()
        if endless := all_joined(self._threads, PATIENCE + GRACE):
            self._note("wrong", endless)

    def _serve(self, number: int, chance: random.Random) -> None:
        client = Client(chance)
        done = 0
        while not self._ended.wait(PAUSE):
            operation, may_fail = chance.choice(OPERATIONS)
            to, role = chance.choice(list(self._roles.items()))
            life, done = functions.record.life, done + 1
            key = f"{operation.__name__} {life.name} {life.pid} {life.number} {number} {done}"
            began = time.monotonic()
            answer, failure = self._try(partial(operation, client, to, role, key), may_fail)
            self._note("ended", operation.__name__, to, key, answer, failure, time.monotonic() - began)
        client.forget()

    def _try(self, operation: Callable[[], Life | None], may_fail: Failures) -> tuple[Life | None, str]:
        try:
            return operation(), ""
        except BaseException as error:
            if not isinstance(error, may_fail):
                self._note("wrong", told(error))
            return None, type(error).__name__

    def _watch(self, name: str) -> None:
        """Note which life answers, and how late."""
        met: Life | None = None
        while not self._ended.wait(WATCH):
            began = time.monotonic()
            try:
                life = rpc.rpc_sync(name, functions.here, timeout=PATIENCE)
            except TelegradError:
                continue
            took = time.monotonic() - began
            if life != met:
                met = life
                self._note("met", life)
            elif took > LATE:
                self._note("late", life, began, took)

    def _measure(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self._nap.wait(NAP)
            late = time.monotonic() - began - NAP
            if late > NOISE:
                self._note("noise", late)
