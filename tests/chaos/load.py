"""The load of one worker: clients on their own threads, and the results of their operations."""

import faulthandler
import logging
import random
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from telegrad import errors
from telegrad._core.calls import futures
from tests.chaos.board import Board
from tests.chaos.functions import Deliberate
from tests.chaos.operations import OPERATIONS, Client, Wrong

GRACE = 10.0  # seconds that an operation may take beyond its timeouts, on a busy machine
NAMED = (errors.PeerError, errors.CallTimeout, errors.RRefError, errors.ContextLost, Deliberate)
NO_MEMORY = ("can't allocate memory", "can't start new thread", "Cannot allocate memory", "std::bad_alloc")
TO_THE_DEAD = 0.1  # how often a client calls a worker that it knows to be dead


class Tally(NamedTuple):
    """The results of a worker's clients."""

    operations: Counter[str]
    errors: Counter[str]
    longest: float  # seconds of one operation
    violations: list[str]


class Load:
    """Clients that work until they are stopped."""

    def __init__(
        self, rank: int, board: Board, seed: int, clients: int, timeout: float, squeezed: bool, record: str
    ) -> None:
        """`squeezed`: memory may run out at any place. Violations are also written to the file `record` at once."""
        self._rank = rank
        self._board = board
        self._timeout = timeout
        self._squeezed = squeezed
        self._record = record
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards all fields below
        self._operations: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._longest = 0.0
        self._violations: list[str] = []
        self._threads = [
            threading.Thread(target=self._serve, args=(client, random.Random(f"{seed}/{rank}/{client}")), daemon=True)
            for client in range(clients)
        ]
        threading.excepthook = lambda args: self._internal("a thread ended", args.exc_value)
        logging.getLogger("telegrad").addHandler(Errors(self._internal))
        for thread in self._threads:
            thread.start()

    def stop(self) -> Tally:
        """Wait for the clients; a client that does not end is a violation."""
        self._ended.set()
        if endless := all_joined(self._threads, 2 * self._timeout + GRACE):
            self.violation(endless)
        with self._lock:
            return Tally(self._operations, self._errors, self._longest, self._violations)

    def _others(self, chance: random.Random) -> list[str]:
        """Return the workers that a client may call: all living ones, this one included; sometimes dead ones, too."""
        dead_too = chance.random() < TO_THE_DEAD
        workers = range(self._board.workers)
        return [f"worker{rank}" for rank in workers if dead_too or not self._board.is_dead(rank)]

    def _serve(self, number: int, chance: random.Random) -> None:
        client = Client(self._rank << 8 | number, lambda: self._others(chance), chance, self._timeout)
        choices, weights = zip(*OPERATIONS, strict=True)
        while not self._ended.is_set():
            operation = chance.choices(choices, weights)[0]
            began = time.monotonic()
            try:
                operation(client)
            except BaseException as error:
                outcome = self._judge(operation.__name__, error)
            else:
                outcome = ""
            took = time.monotonic() - began
            if took > 2 * self._timeout + GRACE:
                self.violation(f"{operation.__name__} took {took:.1f} s ({outcome or 'and succeeded'})")
            with self._lock:
                self._operations[operation.__name__] += 1
                self._longest = max(self._longest, took)
                if outcome:
                    self._errors[outcome] += 1
            self._board.note(self._rank, number, not outcome)
        client.forget()

    def _judge(self, operation: str, error: BaseException) -> str:
        """Return the name of an error, and note a violation if it is not an expected one."""
        if isinstance(error, Wrong):
            self.violation(f"wrong result of {operation}: {error}")
        elif not self._may_be(error):
            self.violation(f"{operation} ended with an error of no name:\n{told(error)}")
        name = type(error).__name__
        if isinstance(error, errors.CallTimeout) and f"({self._timeout:g} s)" in str(error):
            return f"{name} after {self._timeout:g} s"
        return name

    def _may_be(self, error: BaseException) -> bool:
        if isinstance(error, errors.WorkersFailed):
            return all(self._may_be(each) for each in error.errors.values())
        if isinstance(error, NAMED) and not isinstance(error, errors.AuthenticationFailed | errors.VersionMismatch):
            return True
        return self._squeezed and out_of_memory(error)

    def violation(self, text: str) -> None:
        with self._lock:
            self._violations.append(f"worker{self._rank}: {text}")
        with Path(self._record).open("a") as file:
            file.write(f"worker{self._rank}: {text}\n\0")

    def _internal(self, what: str, error: BaseException | None) -> None:
        """Note an error on a thread for whose result nobody waits."""
        if error is None or not (self._squeezed and out_of_memory(error)):
            self.violation(f"{what}:\n{told(error)}" if error else what)


class Errors(logging.Handler):
    """A handler that passes on all errors that Telegrad logs."""

    def __init__(self, tell: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(logging.ERROR)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if record.pathname != futures.__file__:  # of references that a client drops without reading them
            self._tell(record.getMessage(), record.exc_info[1] if record.exc_info else None)


def out_of_memory(error: BaseException) -> bool:
    """Return True if Python, torch or the system report a lack of memory."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)


def told(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))


def all_joined(threads: list[threading.Thread], patience: float) -> str:
    """Wait for threads to end; return the stacks if one does not."""
    until = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if not any(thread.is_alive() for thread in threads):
        return ""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return f"a call never ends:\n{file.read()}"
