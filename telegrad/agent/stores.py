"""Opens the store where workers meet: torch's own stores, by the same URLs as `init_process_group`."""

from __future__ import annotations

import datetime
import errno
import os
import socket
import threading
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from telegrad.errors import RendezvousError, StorePortTaken, StoreUnreachable, UsageError

LONGEST = 1800.0  # seconds, where a caller sets no limit
FIRST_TRY = 0.25
SHORTEST_PAUSE, LONGEST_PAUSE = 5e-4, 5e-2  # between two looks into the store


class Meeting(NamedTuple):
    """An open store, and what its URL or the environment said."""

    store: Any
    host: str | None  # where the store is served, if a host does
    rank: int
    world_size: int | None


def open_store(init_method: str, rank: int, world_size: int | None, timeout: float) -> Meeting:
    """Open or serve the store that `init_method` names.

    Raises:
        UsageError: the URL is wrong, or a variable of the environment is missing.
        StorePortTaken: this worker should serve the store, but another program has its port.
        StoreUnreachable: nobody serves the store.
    """
    url = urlsplit(init_method)
    query = parse_qs(url.query)
    rank = int(query.get("rank", [rank])[0])
    sized = query.get("world_size", [world_size])[0]
    size = None if sized is None or int(sized) < 0 else int(sized)
    if size is not None and rank < 0:
        rank = _from_environment("RANK", "rank=... is missing")
    if size is not None and not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not within a group of {size}: ranks go from 0 to {size - 1}")
    timeout = min(timeout, LONGEST)
    if url.scheme == "env":
        return _from_env(rank, size, timeout)
    if url.scheme == "tcp":
        if url.hostname is None or url.port is None:
            raise UsageError(f"{init_method!r} names no host and port: write tcp://HOST:PORT")
        return Meeting(_tcp(url.hostname, url.port, rank, timeout), url.hostname, rank, size)
    if url.scheme == "file":
        path = init_method.removeprefix("file://").partition("?")[0]
        if not path:
            raise UsageError(f"{init_method!r} names no file: write file:///PATH")
        try:
            return Meeting(dist.FileStore(path, -1), None, rank, size)
        except RuntimeError as error:
            raise StoreUnreachable(f"the file {path!r} cannot serve as a store: {_short(error)}") from error
    return _registered(init_method, rank, size, timeout)


def _registered(init_method: str, rank: int, size: int | None, timeout: float) -> Meeting:
    """A URL scheme that a program taught torch."""
    try:
        store, rank, found = next(
            dist.rendezvous(
                init_method, rank, size if size is not None else -1, timeout=datetime.timedelta(seconds=timeout)
            )
        )
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"init_method {init_method!r} cannot be used: {_short(error)}") from error
    return Meeting(store, None, rank, found if found >= 0 else None)


def _from_env(rank: int, size: int | None, timeout: float) -> Meeting:
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise UsageError("init_method env:// needs the variable MASTER_ADDR, the host of rank 0; set it on all workers")
    port = _from_environment("MASTER_PORT", "a free port on the host of rank 0; set it on all workers")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves the store itself
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"/worker/attempt_{attempt}", _join(host, port, timeout))
        return Meeting(store, host, rank, size)
    return Meeting(_tcp(host, port, rank, timeout), host, rank, size)


def _from_environment(name: str, meaning: str) -> int:
    try:
        return int(os.environ[name])
    except KeyError:
        raise UsageError(f"the variable {name} is not set: {meaning}") from None
    except ValueError:
        raise UsageError(f"the variable {name} is {os.environ[name]!r}, not a number: {meaning}") from None


def _tcp(host: str, port: int, rank: int, timeout: float) -> Any:
    if rank == 0:
        return _serve(host, port)
    if rank < 0 and _is_here(host):
        try:
            return _serve(host, port)
        except StorePortTaken:
            pass  # another worker of this host serves it, as a rule
    return _join(host, port, timeout)


def _is_here(host: str) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _serve(host: str, port: int) -> Any:
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=10))
    except (RuntimeError, dist.DistError) as error:
        if "EADDRINUSE" in str(error) or errno.errorcode[errno.EADDRINUSE] in str(error) or "in use" in str(error):
            raise StorePortTaken(
                f"port {port}, where this worker (rank 0) should serve the store, is in use by another program: "
                "choose another MASTER_PORT (or port in init_method), the same on all workers"
            ) from error
        raise StoreUnreachable(f"the store cannot be served at {host}:{port}: {_short(error)}") from error


def _join(host: str, port: int, timeout: float) -> Any:
    """Connect to a store that another serves; it may not be there yet, and a stranger may listen in its place."""
    found: list[Any] = []

    def meet() -> None:
        patience = datetime.timedelta(seconds=max(1.0, timeout))
        try:
            found.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience))
        except (RuntimeError, dist.DistError) as error:
            found.append(error)

    # In a thread, since torch's own wait can neither be interrupted nor does it end where a stranger is silent.
    meeting = threading.Thread(target=meet, name="telegrad-store", daemon=True)
    meeting.start()
    meeting.join(timeout)
    if found and not isinstance(found[0], Exception):
        return found[0]
    try:
        socket.create_connection((host, port), FIRST_TRY).close()
    except OSError as error:
        raise StoreUnreachable(
            f"nobody serves the store at {host}:{port} ({error}) after {timeout:g} s: is the worker of rank 0 running, "
            "and are MASTER_ADDR and MASTER_PORT the same on all workers?"
        ) from error
    raise StoreUnreachable(
        f"what listens at {host}:{port} is not the group's store: it does not answer as one. "
        "Another program may have that port; choose another one on all workers"
    )


def wait(store: Any, keys: list[str], until: float) -> bool:
    """Look for `keys` until all are there; whether they are. A wait inside of torch could not be interrupted."""
    pause = SHORTEST_PAUSE
    while True:
        try:
            if store.check(keys):
                return True
        except RuntimeError as error:
            raise RendezvousError(f"the store was lost while the workers met: {_short(error)}") from error
        if monotonic() >= until:
            return False
        sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _short(error: BaseException) -> str:
    """The first line of what torch says, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
