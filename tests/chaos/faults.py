"""The begin and the end of each kind of fault."""

import random
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from tests.chaos.plan import Fault
from tests.chaos.proxy import Connection, Door, Proxy, Weather
from tests.cluster import Process

MOST_DELAY = 0.2  # seconds
MOST_MORSEL = 40  # bytes
TRUNCATE_WITHIN = 200_000  # bytes
# Bytes that a squeezed worker may still take. With next to none, CPython's own Thread.start waits for ever for a thread
# that found no memory at its start, which only CPython could mend.
LEAST_SPARE, MOST_SPARE = 4 << 20, 64 << 20
PATIENCE = 2.0  # seconds that a replay waits for an answer: its worker may be stopped

Undo = Callable[[], None]


class ReplayAccepted(AssertionError):
    """A worker accepted a stranger that repeated the bytes of another worker."""


def begin(fault: Fault, proxy: Proxy, group: list[Process]) -> Undo:
    """Begin a fault and return the function that ends it."""
    victim = group[fault.victim]
    if not is_alive(victim):
        return _nothing
    if fault.kind in _TO_PROCESS:
        return _TO_PROCESS[fault.kind](victim, fault)
    door = proxy.doors[victim.name]
    if fault.kind == "replay":
        _replay(proxy, door)
        return _nothing
    undo = proxy.do(lambda: _TO_DOOR[fault.kind](door, fault))
    return lambda: proxy.do(undo)


def is_alive(process: Process) -> bool:
    return process.join(0) is None


def _nothing() -> None:
    """End a fault that ends by itself."""


# Faults of the network; on the proxy's thread


def _cut(door: Door, fault: Fault) -> Undo:
    """Reset one connection, or all."""
    if fault.amount < 0.5 and door.connections:
        _one_of(door, fault).end(reset=True)
    else:
        door.reset_all()
    return _nothing


def _truncate(door: Door, fault: Fault) -> Undo:
    """End a connection within its data."""
    if not door.connections:
        return _nothing
    connection = _one_of(door, fault)
    pipe = random.Random(fault.duration).choice(connection.pipes)
    pipe.budget = 1 + int(TRUNCATE_WITHIN * fault.amount**3)
    return lambda: connection.end(reset=False)


def _drop(door: Door, _: Fault) -> Undo:
    """Swallow all bytes, without an error for either side."""
    undo = _change(door, silent=True)

    def undo_and_reset() -> None:
        undo()
        door.reset_all()

    return undo_and_reset


def _refuse(door: Door, _: Fault) -> Undo:
    undo = _change(door, shut=True)
    door.reset_all()
    return undo


def _change(door: Door, **weather: float) -> Undo:
    """Change the weather at a door; return the function that makes it fair again."""
    vars(door.weather).update(weather)
    fair = {name: vars(Weather())[name] for name in weather}
    return lambda: vars(door.weather).update(fair)


def _one_of(door: Door, fault: Fault) -> Connection:
    return random.Random(fault.amount).choice(door.connections)


_TO_DOOR: dict[str, Callable[[Door, Fault], Undo]] = {
    "cut": _cut,
    "truncate": _truncate,
    "delay": lambda door, fault: _change(door, delay=MOST_DELAY * fault.amount),
    # a few bytes at a time
    "trickle": lambda door, fault: _change(door, morsel=1 + int(MOST_MORSEL * fault.amount**2)),
    "drop": _drop,
    "refuse": _refuse,
}


def _replay(proxy: Proxy, door: Door) -> None:
    """Send the first bytes of others' connections to the worker: no stream carries bytes twice, but a stranger may."""
    for opening in proxy.do(lambda: [connection.opening for connection in door.connections]):
        with suppress(OSError), socket.create_connection(door.target, PATIENCE) as sock:
            sock.sendall(opening)
            sock.settimeout(PATIENCE)
            said = b""
            while data := sock.recv(4096):
                said += data
                if b"P" in _kinds(said):
                    raise ReplayAccepted(f"the worker at {door.target} let in a repeated greeting")


def _kinds(said: bytes) -> bytes:
    """Return the kinds of the handshake's messages of a worker, each of which has its length before it."""
    kinds = b""
    while len(said) > 2:
        kinds += said[2:3]
        said = said[2 + int.from_bytes(said[:2], "little") :]
    return kinds


# Faults of processes


def _kill(victim: Process, _: Fault) -> Undo:
    victim.kill()
    victim.join()
    return _nothing


def _stop(victim: Process, _: Fault) -> Undo:
    victim.kill(signal.SIGSTOP)
    return lambda: victim.kill(signal.SIGCONT) if is_alive(victim) else None


def _squeeze(victim: Process, fault: Fault) -> Undo:
    """Leave a process hardly any more memory."""
    with open(f"/proc/{victim.pid}/statm") as file:
        pages = int(file.read().split()[0])
    before = resource.prlimit(victim.pid, resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + LEAST_SPARE + int(MOST_SPARE * fault.amount**3)
    resource.prlimit(victim.pid, resource.RLIMIT_AS, (limit, before[1]))

    def undo() -> None:
        with suppress(ProcessLookupError):  # the process did not survive
            resource.prlimit(victim.pid, resource.RLIMIT_AS, before)

    return undo


_TO_PROCESS: dict[str, Callable[[Process, Fault], Undo]] = {"kill": _kill, "stop": _stop, "squeeze": _squeeze}
