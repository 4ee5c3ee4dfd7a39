"""Opens the store where workers meet: torch's own stores, by the same URLs as `init_process_group`.

The worker of rank 0 serves a store over TCP, and takes it away as soon as a group of fixed size has formed. A worker
that is back at once, for the next group, may still find the old server; so the server carries a mark: OPEN since it is
served, OVER from before anyone leaves that group. Whoever comes to a store that is OVER waits for the next.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlsplit

import torch.distributed as dist

from telegrad.errors import RendezvousError, StoreLost, StorePortTaken, StoreUnreachable, UsageError
from telegrad.group.address import check_resolves, spelled
from telegrad.progress import Wait, attended

LONGEST = 1800.0  # seconds, where a caller sets no limit
PROBE = 0.25  # seconds for a connection to be accepted
FAR_PROBE = 5.0  # the same, where there is time
TAKEN = 1.0  # seconds for whoever has the port to prove that it is a store
GOING = 4.0  # seconds for the store of a group that is over to go
REFUSED = 3.0  # seconds that answers which no store gives are put down to a server that is being taken away
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-4, 5e-2  # between two looks
SERVED, OPEN, OVER = "telegrad/served", "open", "over"
_ABSENT = "absent"  # no key has this value


Place = tuple[str | None, int | None]  # the host that serves a store, and the port; unknown where it is no such store


class Meeting(NamedTuple):
    """An open store, and what its URL or the environment said."""

    store: Any
    host: str | None  # where the store is served, if a host does
    rank: int
    world_size: int | None
    port: int | None = None  # where another store may be served once this one has gone
    serves: bool = False  # the store ends with this process
    names: Sequence[str] = ()  # of the workers by rank, where they are known beforehand
    file: str = ""  # where the store is one
    coming: Any = None  # a `generations.Coming`, where the workers of an elastic group meet

    @property
    def place(self) -> Place:
        return self.host, self.port

    @property
    def where(self) -> str:
        """The same, for people."""
        return self.file or spot(self.host or "", self.port)


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Meeting:
    """Open or serve the store that `init_method` names.

    Raises:
        UsageError: the URL, the rank or the size is wrong, or a variable of the environment is missing.
        StorePortTaken: this worker should serve the store, but another program has its port.
        StoreUnreachable: nobody serves the store.
    """
    url = urlsplit(init_method)
    query = parse_qs(url.query)
    try:
        rank = int(query.get("rank", [rank])[0])
        size = int(query.get("world_size", [-1 if world_size is None else world_size])[0])
    except ValueError as error:
        raise UsageError(f"rank and world_size in {init_method!r} must be numbers") from error
    sized = None if world_size is None and size == -1 else size
    if sized is not None and rank == -1:
        rank = _from_environment("RANK", "each worker's rank; set it, or pass rank=...")
    check_rank(rank, sized)
    timeout = min(timeout, LONGEST)
    if url.scheme == "env":
        return _from_env(rank, sized, timeout)
    if url.scheme == "tcp":
        host, port = _host_and_port(url)
        return _tcp(host, port, rank, sized, timeout)
    if url.scheme == "file":
        return Meeting(_file(init_method), None, rank, sized, file=init_method.partition("?")[0])
    return _registered(init_method, rank, sized, timeout)


def check_rank(rank: int, size: int | None) -> None:
    """Raise UsageError where no group can have that size, or no worker of it that rank."""
    if size is not None and size < 1:
        raise UsageError(
            f"world_size must be the number of the group's workers, at least 1, not {size}; "
            "without world_size the group is dynamic"
        )
    if size is not None and not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not within a group of {size}: ranks go from 0 to {size - 1}")


def _host_and_port(url: SplitResult) -> tuple[str, int]:
    try:
        host, port = url.hostname, url.port
    except ValueError:  # the port is no number, or too large
        host = port = None
    if not host or not port:
        raise UsageError(f"{url.geturl()!r} names no host and port: write tcp://HOST:PORT, an IPv6 address in brackets")
    return host, port


def _from_env(rank: int, size: int | None, timeout: float) -> Meeting:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError("init_method env:// needs the variable MASTER_ADDR, the host of rank 0; set it on all workers")
    port = _from_environment("MASTER_PORT", "a free port (1 to 65535) on the host of rank 0; set it on all workers")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it, for all attempts
        return Meeting(join_store(host, port, timeout, lasting=True), host, rank, size)
    return _tcp(host, port, rank, size, timeout)


def _from_environment(name: str, meaning: str) -> int:
    text = os.environ.get(name)
    if text is None:
        raise UsageError(f"the variable {name} is not set: {meaning}")
    if not text.isdecimal() or (name == "MASTER_PORT" and not 0 < int(text) < 65536):
        raise UsageError(f"the variable {name} is {text!r}: it must be {meaning}")
    return int(text)


def _file(init_method: str) -> Any:
    path = init_method.removeprefix("file://").partition("?")[0]
    if not path:
        raise UsageError(f"{init_method!r} names no file: write file:///PATH")
    try:
        open(path, "ab").close()  # torch would try for minutes, where Ctrl-C does not reach it
        return dist.FileStore(path, -1)
    except (OSError, RuntimeError) as error:
        raise StoreUnreachable(f"the file {path!r} cannot serve as a store: {_short(error)}") from error


def _registered(init_method: str, rank: int, size: int | None, timeout: float) -> Meeting:
    """A URL scheme that a program taught torch."""
    patience = datetime.timedelta(seconds=timeout)
    try:
        store, rank, found = next(dist.rendezvous(init_method, rank, -1 if size is None else size, timeout=patience))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"init_method {init_method!r} cannot be used: {_short(error)}. Use env://, tcp://HOST:PORT or file:///PATH"
        ) from error
    return Meeting(store, None, rank, found if found >= 0 else None)


def _tcp(host: str, port: int, rank: int, size: int | None, timeout: float) -> Meeting:
    check_resolves(host)
    if rank == 0 or (rank < 0 and is_here(host)):
        store, serves = _serve_or_share(host, port, rank, timeout)
    else:
        store, serves = join_store(host, port, timeout), False
    return Meeting(store, host, rank, size, port, serves)


def _serve_or_share(host: str, port: int, rank: int, timeout: float) -> tuple[Any, bool]:
    """A store that this process serves; else, and False, that of whoever was first, so that both hear of each other."""
    taken: StorePortTaken | None = None
    text = f"port {port}, where this worker should serve the store, is still in use"
    with Wait("init_rpc", lambda: text, place=spot(host, port)) as wait:
        for _ in _looks(monotonic() + min(GOING, timeout)):
            wait.look()
            try:
                return _serve(host, port), True
            except StorePortTaken as error:
                taken = error
            rival = _meet(host, port, min(TAKEN, timeout))
            mark = "" if isinstance(rival, Exception) else _mark(rival)
            if mark == OVER or not _listens(host, port):  # the last group's, which is about to be taken away
                continue
            if isinstance(rival, Exception) or (rank == 0 and mark != OPEN):
                break
            return rival, False
    assert taken is not None
    raise taken


def is_here(host: str) -> bool:
    """Whether that is this host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _serve(host: str, port: int) -> Any:
    try:
        # Many tenants: a process that serves this port already, for `torch.distributed` or an earlier group, shares it.
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, multi_tenant=True)
        store.set(SERVED, OPEN)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise StorePortTaken(
                f"port {port}, where this worker should serve the store, is in use by another program "
                f"(`ss -ltnp sport = :{port}` shows which): choose another MASTER_PORT, or port in init_method, "
                "the same on all workers"
            ) from error
        raise StoreUnreachable(f"the store cannot be served at {host}:{port}: {_short(error)}") from error
    return store


def join_store(host: str, port: int, timeout: float, lasting: bool = False) -> Any:
    """Wait for a store that another serves, and connect to it."""
    place = spot(host, port)
    text = f"nobody serves the store at {place}; is the worker of rank 0 running?"
    with attended(Wait("init_rpc", lambda: text, lambda: ["rank 0"], place)) as wait:
        return find_store(host, port, timeout, lasting, wait.look)


def find_store(
    host: str, port: int, timeout: float, lasting: bool = False, meanwhile: Callable[[], None] = lambda: None
) -> Any:
    """Connect to a store that another serves; it may not be there yet, and a stranger may listen in its place."""
    until = monotonic() + timeout
    why = "it came too late"
    for left in _looks(until):
        meanwhile()
        if not _listens(host, port, min(left, FAR_PROBE)):  # torch would look again after half a second
            continue
        store = _meet(host, port, max(left, PROBE))
        if isinstance(store, Exception):
            why = _short(store)
            until = min(until, monotonic() + REFUSED)
        elif lasting or _mark(store) != OVER:
            return store
        else:
            why = "there is only the store of an earlier group"
        if monotonic() >= until:
            break
    if _listens(host, port):
        raise StoreUnreachable(
            f"what listens at {host}:{port} is not the group's store ({why}): "
            "another program may have that port; choose another one on all workers"
        )
    raise StoreUnreachable(
        f"nobody serves the store at {host}:{port} after {timeout:g} s: is the worker of rank 0 running, "
        "and are MASTER_ADDR and MASTER_PORT, or init_method, the same on all workers?"
    )


def spot(host: str, port: int | None) -> str:
    """A place, for people."""
    return host if port is None else f"{f'[{host}]' if ':' in host else host}:{port}"


def _listens(host: str, port: int, patience: float = 0) -> bool:
    try:
        with socket.create_connection((spelled(host), port), max(patience, PROBE)) as probe:
            return bool(probe.getsockname() != probe.getpeername())  # a free port may be given to its own seeker
    except OSError:
        return False


def _meet(host: str, port: int, patience: float) -> Any:
    """The store there, or the error. In a thread: where a stranger is silent torch waits without end or Ctrl-C."""
    found: list[Any] = []

    def meet() -> None:
        allowed = datetime.timedelta(seconds=patience)
        try:
            found.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=allowed))
        except RuntimeError as error:
            found.append(error)

    meeting = threading.Thread(target=meet, name="telegrad-store", daemon=True)
    meeting.start()
    meeting.join(patience)
    if not found:
        atexit.register(meeting.join, PROBE)  # a thread that leaves torch while the interpreter ends aborts it
        return TimeoutError("it does not answer")
    return found[0]


def _mark(store: Any) -> str:
    try:
        return Board(store).read(SERVED)
    except RendezvousError:  # it was taken away in this moment
        return OVER


class Board:
    """A store that is never asked to wait: torch's own waits cannot be interrupted, and report on stderr."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._prefix = prefix
        self._store: Any = dist.PrefixStore(prefix, store) if prefix else store

    def close(self) -> None:
        """Let go of the store: what this process serves goes, too."""
        self._store = None

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[Any]:
        store = self._store  # loaded once: another thread may close this board meanwhile
        if store is None:
            raise StoreLost("this worker has left the group")
        try:
            yield store
        except RuntimeError as error:
            raise StoreLost(
                f"the store was lost ({_short(error)}): "
                "the worker that serves it has ended or cannot be reached; see its log"
            ) from error

    def swap(self, key: str, expected: str, value: str) -> str:
        """Write `value` where `expected` is found ("" is nothing); what is there now."""
        with self._while_it_lasts() as store:
            return str(store.compare_set(key, expected, value).decode())

    def read(self, key: str) -> str:
        """What is there, "" for nothing."""
        found = self.swap(key, _ABSENT, _ABSENT)
        return "" if found == _ABSENT else found

    def write(self, key: str, value: str) -> None:
        """Seen by others before whatever this board does next, though not yet when this returns."""
        with self._while_it_lasts() as store:
            store.set(key, value)

    def count(self, key: str, more: int = 1) -> int:
        with self._while_it_lasts() as store:
            return int(store.add(key, more))

    def read_all(self, keys: list[str]) -> list[str]:
        """What is there under keys that are known to be there."""
        with self._while_it_lasts() as store:
            return [value.decode() for value in store.multi_get(keys)]

    def wait(self, key: str, until: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Look until something is there; "" when `until` came first."""
        for _ in _looks(until):
            found = self.read(key)
            if found:
                return found
            meanwhile()
        return ""

    def wait_for_count(self, key: str, count: int, until: float) -> None:
        """Look until it has been counted so often, or until `until`."""
        for _ in _looks(until):
            if self.count(key, 0) >= count:
                return

    def __repr__(self) -> str:
        kind = type(self._store).__name__ if self._store is not None else "closed"
        return f"<Board {self._prefix or 'without a prefix'}, {kind}>"


def _looks(until: float) -> Iterator[float]:
    """Times to look for something, at first in quick succession; yields the seconds left, at least once."""
    pause = SHORTEST_PAUSE
    while True:
        yield until - monotonic()
        left = until - monotonic()
        if left <= 0:
            return
        sleep(min(pause, left))
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _short(error: BaseException) -> str:
    """The first line of what torch says, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
