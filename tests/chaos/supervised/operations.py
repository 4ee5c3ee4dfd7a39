"""The operations of a client, and the failures that are allowed if the called worker is killed, or leaves."""

import random
from collections.abc import Callable
from typing import Any

import telegrad.rpc as rpc
from telegrad.errors import CallTimeout, PeerError, RRefError, ShutDown, UnknownPublisher, UnknownWorker
from telegrad.weights import Subscriber
from tests.chaos.functions import publish, weights
from tests.chaos.operations import Wrong, expect
from tests.chaos.supervised.functions import Token, count, run
from tests.chaos.supervised.plan import ROLES
from tests.chaos.supervised.record import Life

PATIENCE = 30.0  # seconds of a call that waits for its worker; a killed one is back long before
BRIEFLY = 3.0  # seconds of operations that may wait in vain
ITEMS, USES = 20, 4
TABLE = "table"

Failures = tuple[type[BaseException], ...]


class Client:
    """The client of one thread; each operation gets the worker to call, the role of that, and a new key."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._restored: dict[str, Any] = {}  # references to values that are made anew
        self._table: Any = None

    # Calls that answer with the life in which they ran

    def plain(self, to: str, _: str, key: str) -> Life:
        return rpc.rpc_sync(to, run, (key,), timeout=PATIENCE)

    def patient(self, to: str, _: str, key: str) -> Life:
        return rpc.rpc_sync(to, run, (key,), timeout=PATIENCE, wait_for_worker=True)

    def repeated(self, to: str, _: str, key: str) -> Life:
        return rpc.rpc_sync(to, run, (key,), timeout=PATIENCE, idempotent=True)

    def once(self, to: str, _: str, key: str) -> Life:
        return rpc.rpc_async(to, run, (key,), timeout=PATIENCE, wait_for_worker=True, idempotent=True).wait()

    # Other operations

    def role(self, _: str, role: str, key: str) -> None:
        group = rpc.group(role)
        lives = group.rpc_sync(run, (key,), timeout=PATIENCE, wait_for_worker=True, idempotent=True)
        names = {life.name for life in lives}
        if len(names) != len(lives) or any(ROLES.get(name) != role for name in names):
            raise Wrong(f"{group} was answered by {lives}")

    def refer(self, to: str, _: str, key: str) -> None:
        reference = rpc.remote(to, Token, timeout=PATIENCE, wait_for_worker=True)
        lives = {reference.rpc_sync().of() for _ in range(USES)}
        _expect_one(to, lives)

    def restored(self, to: str, _: str, key: str) -> None:
        if to not in self._restored:
            self._restored[to] = rpc.remote(to, Token, timeout=PATIENCE, restore=True, wait_for_worker=True)
        _expect_one(to, {self._restored[to].rpc_sync(timeout=PATIENCE).of()})

    def look_up(self, _: str, __: str, key: str) -> None:
        """Use a looked-up reference, which follows the value; a new one must find the same."""
        if self._table is None or self._chance.random() < 0.2:
            self._table = rpc.lookup(TABLE, timeout=PATIENCE)
        self._table.rpc_sync(timeout=PATIENCE).of()

    def stream(self, to: str, _: str, key: str) -> None:
        items = list(rpc.rpc_stream(to, count, (ITEMS,), timeout=PATIENCE, wait_for_worker=True))
        _expect_one(to, {life for life, _ in items})
        if [number for _, number in items] != list(range(ITEMS)):
            raise Wrong(f"a stream of {to} gave {items}")

    def weigh(self, to: str, _: str, key: str) -> None:
        rpc.rpc_sync(to, publish, timeout=PATIENCE, wait_for_worker=True)
        with Subscriber(to, "weights", BRIEFLY) as reader:
            version = reader.newest(BRIEFLY)
            for name, wanted in weights(version.number).items():
                expect(f"{name} of version {version.number} of {to}", version.state[name], wanted)

    def forget(self) -> None:
        self._restored.clear()
        self._table = None


def _expect_one(to: str, lives: set[Life]) -> None:
    """Check that exactly one life answered, under the right name."""
    if len(lives) != 1 or any(life.name != to for life in lives):
        raise Wrong(f"{to} was called, and answered {', '.join(map(str, lives))}")


OPERATIONS: tuple[tuple[Callable[[Client, str, str, str], Life | None], Failures], ...] = (
    (Client.plain, (PeerError, UnknownWorker)),
    (Client.patient, (PeerError,)),
    (Client.repeated, (PeerError, UnknownWorker)),
    (Client.once, ()),
    (Client.role, (UnknownWorker,)),
    (Client.refer, (PeerError, RRefError)),
    (Client.restored, (PeerError,)),
    (Client.look_up, (PeerError,)),
    (Client.stream, (PeerError,)),
    (Client.weigh, (PeerError, RRefError, UnknownPublisher, UnknownWorker, CallTimeout)),
)
assert issubclass(ShutDown, PeerError)  # raised for a worker that has left
