"""Opens the rendezvous store: torch's own stores, by the same URLs as `init_process_group`.

The worker of rank 0 serves a store over TCP, and removes it as soon as a group of fixed size has formed. A worker that
joins the next group immediately may still find the old server. Therefore the server has a mark: OPEN while it is
served, OVER before any worker leaves that group. A worker that finds a store with OVER waits for the next.

The store of a dynamic or elastic group contains the address of the group's directory (`find_directory.py`). A group
whose directory is etcd or Redis has no store.
"""

import datetime
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import torch.distributed as dist

from telegrad._core.private_files import resolved
from telegrad._core.security.keyring import Keyring
from telegrad._core.sockets import Spot, accepts_connections, await_name, far_host, is_here, split, spot_of
from telegrad._core.stores.directory import Directory
from telegrad._core.stores.launchers import is_supervised, place
from telegrad._core.stores.raw_stores import PROBE, FileStore, meet_tcp, serve_tcp
from telegrad._core.stores.sealed_store import (
    GONE,
    OPEN,
    OVER,
    REFUSED,
    SERVED,
    KeyValueStore,
    SealedDirectory,
    SealedStore,
    read_server_mark,
    short,
)
from telegrad._core.texts import Wait, poll_intervals, report_in_background
from telegrad.errors import StorePortTaken, StoreUnreachable, StoreUntrusted, TelegradError, UsageError

LONGEST = 1800.0  # seconds, if a caller sets no limit
FAR_PROBE = 5.0  # seconds for a connection to be accepted, if there is time
TAKEN = 1.0  # seconds for the program at the port to prove that it is a store, if others may be tried
GOING = 4.0  # seconds for the store of an ended group to close, and for one on a busy host to answer
MARKED = 1.0  # seconds for a store that answers to be marked by its server, which does that first
STRANGE = 3.0  # seconds for which invalid answers are attributed to a server that is closing
MOST_WORKERS = 1 << 16  # finding the absent ones of more takes longer than most time limits
# The engines of directories by URL scheme. Imported on use, because a client library may be missing.
ENGINES = {
    "etcd": "telegrad.directories.etcd",
    "redis": "telegrad.directories.on_redis",
    "rediss": "telegrad.directories.on_redis",
}
ENGINE_PATIENCE = 10.0  # seconds for an operation of an engine


class RendezvousStore(NamedTuple):
    """An open store, and the parameters from its URL or the environment."""

    store: SealedStore
    host: str | None  # the host that serves the store, if any
    rank: int
    world_size: int | None
    port: int | None = None  # where another store may be served once this one is gone
    serves: bool = False  # the store ends with this process
    names: Sequence[str] = ()  # of the workers by rank, if known in advance
    location: str = ""  # for messages, if `host` and `port` do not give it, such as the path of a file
    coming: Any = None  # a `JoinRequest`, if the workers of an elastic group meet
    directory: Callable[[], Directory] | None = None  # connects to the group's directory, if no store points to it
    launched: bool = False  # a launcher started that directory

    @property
    def keys(self) -> Keyring:
        return self.store.keys

    @property
    def place(self) -> Spot | None:
        """The host and port where another store may be served once this one is gone; None if unknown."""
        return None if self.host is None or self.port is None else (self.host, self.port)

    @property
    def served(self) -> int | None:
        """The port at which this process serves the store, or None."""
        return self.port if self.serves else None

    @property
    def where(self) -> str:
        """The location of the store, for messages."""
        return self.location or spot(self.host or "", self.port)


def open_store(init_method: str, rank: int, world_size: int | None, keys: Keyring, timeout: float) -> RendezvousStore:
    """Open or serve the store that `init_method` names; its values are sealed with these keys.

    Raises:
        UsageError: the URL, the rank or the size is wrong, or a variable of the environment is missing.
        StorePortTaken: this worker should serve the store, but another program has its port.
        StoreUnreachable: no process serves the store.
    """
    url = split(init_method)
    query = parse_qs(url.query)
    if url.scheme in ENGINES:
        return _on_engine(init_method, url.scheme, rank, world_size, keys, timeout)
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
        return _from_env(rank, sized, timeout, keys)
    if url.scheme == "tcp":
        return _tcp(spot_of(url), rank, sized, timeout, keys)
    if url.scheme == "file":
        store = SealedStore(_file(init_method), keys)
        return RendezvousStore(store, None, rank, sized, location=init_method.partition("?")[0])
    return _registered(init_method, rank, sized, timeout, keys)


def _on_engine(url: str, engine: str, rank: int, size: int | None, keys: Keyring, timeout: float) -> RendezvousStore:
    """Open a dynamic or elastic group whose directory is a server of etcd or Redis."""
    if size is not None:
        raise UsageError(
            f"{engine}:// is for dynamic and elastic groups: leave world_size out; a group of fixed "
            "size meets at tcp://HOST:PORT, env:// or file:///PATH"
        )

    def connect() -> Directory:
        module = importlib.import_module(ENGINES[engine])
        directory = module.connect(url, min(timeout, ENGINE_PATIENCE))
        return SealedDirectory(directory, keys, directory.scope)

    name = f"{engine} at {url.rpartition('@')[2].rpartition('//')[2]}"  # without a password
    # No store points to this directory: this one is local, and unused.
    store = SealedStore(dist.HashStore(), keys)
    return RendezvousStore(store, far_host(url), rank, None, location=name, directory=connect)


def check_rank(rank: int, size: int | None) -> None:
    """Raise UsageError if a group cannot have that size, or its worker that rank."""
    if size is not None and not 1 <= size <= MOST_WORKERS:
        raise UsageError(
            f"world_size must be the number of the group's workers, 1 to {MOST_WORKERS}, not {size}; "
            "without world_size the group is dynamic"
        )
    if size is not None and not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not within a group of {size}: ranks go from 0 to {size - 1}")


def _from_env(rank: int, size: int | None, timeout: float, keys: Keyring) -> RendezvousStore:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError(
            "init_method env:// needs the variable MASTER_ADDR, the host of rank 0; set it on all workers, or start "
            "them with a launcher that sets it (mpirun, srun, ...)"
        )
    port = _from_environment("MASTER_PORT", "a free port (1 to 65535) on the host of rank 0; set it on all workers")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it, and for all attempts
        store = join_store(host, port, keys, timeout, lasting=True)
        return RendezvousStore(store, host, rank, size, location=spot(host, port))
    if is_supervised(host, port, os.environ):
        store = join_store(host, port, keys, timeout, lasting=True, marked=True)
        return RendezvousStore(store, host, rank, size, port)
    return _tcp((host, port), rank, size, timeout, keys)


def _from_environment(name: str, meaning: str) -> int:
    text = os.environ.get(name)
    if text is None:
        raise UsageError(f"the variable {name} is not set: {meaning}")
    if not text.isdecimal() or (name == "MASTER_PORT" and not 0 < int(text) < 65536):
        raise UsageError(f"the variable {name} is {text!r}: it must be {meaning}")
    return int(text)


def _file(init_method: str) -> Any:
    path = init_method.removeprefix("file://").partition("?")[0]
    # A relative path would be another file for each worker that has another working directory.
    if not path or "\0" in path or (sys.platform != "win32" and not path.startswith("/")):
        raise UsageError(f"{init_method!r} names no file: write file:///PATH, with three slashes and the whole path")
    try:
        path = resolved(path)
        # Windows has no `flock`, which the locks of this package's FileStore need.
        return FileStore(path) if sys.platform != "win32" else dist.FileStore(path, -1)
    except TelegradError:
        raise
    except (OSError, RuntimeError) as error:
        raise StoreUnreachable(f"the file {path!r} cannot serve as a store: {short(error)}") from error


def _registered(init_method: str, rank: int, size: int | None, timeout: float, keys: Keyring) -> RendezvousStore:
    """Open the store of a URL scheme that a program has registered in torch."""
    patience = datetime.timedelta(seconds=timeout)
    try:
        store, rank, found = next(dist.rendezvous(init_method, rank, -1 if size is None else size, timeout=patience))
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"init_method {init_method!r} cannot be used: {short(error)}. Use env://, tcp://HOST:PORT or "
            "file:///PATH; for a dynamic group also etcd://HOST:PORT/PREFIX or redis://HOST:PORT/DB"
        ) from error
    return RendezvousStore(SealedStore(store, keys), None, rank, found if found >= 0 else None)


def _tcp(place: Spot, rank: int, size: int | None, timeout: float, keys: Keyring) -> RendezvousStore:
    host, port = place
    await_name(host, timeout)
    store, serves = serve_or_join(place, rank, keys, timeout)
    return RendezvousStore(store, host, rank, size, port, serves)


def serve_or_join(place: Spot, rank: int, keys: Keyring, timeout: float) -> tuple[SealedStore, bool]:
    """Return the store of a group, and True if this process serves it: if it should, and no other does. If another
    process on this host has the port, the workers of both processes find each other in its store."""
    if rank > 0 or (rank < 0 and not is_here(place[0])):
        return join_store(*place, keys, timeout), False
    taken: StorePortTaken | None = None
    rival = _Site(place, keys)
    text = f"port {place[1]}, where this worker should serve the store, is still in use"
    with Wait("init_rpc", lambda: text, place=spot(*place)) as wait:
        marked, until = monotonic() + MARKED, monotonic() + min(GOING, timeout)
        for left in poll_intervals(monotonic() + timeout):
            wait.look()
            try:
                return serve(*place, keys), True
            except StorePortTaken as error:
                taken = error
            found = rival.look(PROBE, min(left, TAKEN))
            # A store with OVER, or one that does not answer, may be about to close: then try to serve again.
            if found not in (OVER, GONE):
                # Rank 0 shares a store only if it has the mark of a worker with the group's key. A worker without a
                # rank also takes a store without a mark, and meets the others there.
                if rival.store is not None and (rank != 0 or found == OPEN):
                    return rival.store, False
                if monotonic() > marked:
                    break
            # The port is taken for another program's. A worker without a rank waits on if the server there is silent:
            # that may be another worker, which is stopped or overloaded.
            if monotonic() > until and not (rank < 0 and rival.is_silent):
                break
    assert taken is not None
    raise rival.refused or taken


def serve(host: str, port: int, keys: Keyring) -> SealedStore:
    """Serve a store at that address. Raise StorePortTaken if another program has the port, else StoreUnreachable."""
    try:
        store = SealedStore(serve_tcp(host, port, shared=True)[0], keys)
        KeyValueStore(store).write(SERVED, OPEN)
    except (OSError, RuntimeError) as error:
        if isinstance(error, TelegradError):
            raise
        # torch raises a RuntimeError, not an OSError with a number. The last text is Windows' error number.
        if any(sign in str(error) for sign in ("EADDRINUSE", "in use", "10048")):
            raise StorePortTaken(
                f"port {port}, where this worker should serve the store, is in use, and no store of this group answers "
                f"there (`ss -ltnp sport = :{port}` shows which program has it): if that is a worker of the group, it "
                "is stopped or overloaded; otherwise choose another MASTER_PORT, or port in init_method, on all "
                "workers"
            ) from error
        raise StoreUnreachable(f"the store cannot be served at {host}:{port}: {short(error)}") from error
    return store


def join_store(
    host: str, port: int, keys: Keyring, timeout: float, lasting: bool = False, marked: bool = False
) -> SealedStore:
    """Connect to a store that another process serves; it may not exist yet, and another program may have its port. With
    `marked`, the store is used only once it has a mark, whose seal reveals at once if a worker has another key."""
    address, until = spot(host, port), monotonic() + timeout
    text = f"no process serves the store at {address}; "
    text += "its launcher may still be starting it" if lasting else "is the worker of rank 0 running?"
    site = _Site((host, port), keys)
    with report_in_background(Wait("init_rpc", lambda: text, lambda: ["rank 0"], address)) as wait:
        for left in poll_intervals(until):
            wait.look()
            mark = site.look(min(left, FAR_PROBE), min(left, max(TAKEN, timeout - left)))
            if site.store is not None and (mark != OVER or lasting) and (mark or not marked):
                return site.store
            until = min(until, site.until)
            # A lasting store is not the one of an earlier program.
            if monotonic() >= until or (lasting and site.refused is not None):
                break
    if site.refused is not None:
        raise site.refused
    if accepts_connections((host, port), PROBE):
        silent = ", or its worker is stopped or overloaded" if site.is_silent else ""
        raise StoreUnreachable(
            f"the server at {host}:{port} is not the group's store{silent} ({site.why}): "
            "if another program has that port, choose another one on all workers"
        )
    raise StoreUnreachable(
        f"no process serves the store at {host}:{port} after {timeout:g} s: is the worker of rank 0 running, "
        "and are MASTER_ADDR and MASTER_PORT, or init_method, the same on all workers?"
    )


def spot(host: str, port: int | None) -> str:
    return host if port is None else place(host, port)


class _Site:
    """The server at an address. Connects once, because that may take torch seconds, and polls afterwards."""

    def __init__(self, place: Spot, keys: Keyring) -> None:
        self.place = place
        self.store: SealedStore | None = None
        self.refused: StoreUntrusted | None = None  # the store was not written with the key of this worker
        self._keys = keys
        self.why = "it started too late"  # why it cannot be used
        self.is_silent = False  # it has accepted a connection, and did not answer in time
        self.until = inf  # when to stop polling

    def look(self, probe: float, patience: float) -> str:
        """Connect if necessary, and return the store's mark."""
        # If nothing listens, torch's client sleeps for half a second before it tries again. A worker that comes before
        # the server would lose 250 to 750 ms by that, and all others would wait for it.
        if self.store is None and accepts_connections(self.place, max(probe, PROBE)):
            found = meet_tcp(*self.place, max(patience, PROBE))
            if not isinstance(found, Exception):
                self.store = SealedStore(found, self._keys)
            else:
                self.why, self.is_silent = short(found), isinstance(found, TimeoutError)
                if not self.is_silent:
                    self.until = min(self.until, monotonic() + STRANGE)
        mark = self._mark()
        if mark == GONE:
            self.store = None
        else:
            self.why = "it is not open yet" if not mark else "there is only the store of an earlier group"
        return mark

    def _mark(self) -> str:
        if self.store is None:
            return GONE
        try:
            return read_server_mark(self.store)
        except StoreUntrusted as error:
            # Count this worker once, not each time that it looks.
            if self.refused is None:
                KeyValueStore(self.store).add_hint(REFUSED)
            self.refused = error
            # Poll for a while: it may be an earlier program's store that is about to close.
            self.until = min(self.until, monotonic() + STRANGE)
            return GONE
