"""torch's TCPStore, with the backend available on this platform, listening on as few addresses as possible."""

from __future__ import annotations

import atexit
import datetime
import logging
import socket
import struct
import sys
from functools import partial
from time import monotonic
from typing import Any

import torch.distributed as dist

from telegrad._core.sockets import family_of, socket_address, text_of
from telegrad._core.stores.address import answers, is_address, listening_address, spelled
from telegrad._core.threads import Thread
from telegrad.errors import StoreUnreachable

log = logging.getLogger("telegrad")

ANYWHERE = ("0.0.0.0", "::")
CROWD = 1024  # connections waiting to be accepted
PROBE = 0.25  # seconds for a connection to be accepted
OWN_HOST = 2.0  # seconds for a connection from this host to itself, which the kernel alone makes
LEAST = 1e-3  # seconds for a read; 0 would mean non-blocking
# In torch's protocol, in the host's byte order: VALIDATE with its magic number, the first message of each client, and
# GETNUMKEYS, whose response is an int64.
_QUESTION = struct.pack("=BIB", 0, 0x3C85F7CE, 7)
_ANSWER = struct.Struct("=q")
_MOST_KEYS = 1 << 40  # a larger number is text, such as the first 8 bytes of another server's greeting
_store = partial(dist.TCPStore, wait_for_workers=False, use_libuv=sys.platform != "win32")  # torch has no libuv there


def check_is_store(host: str, port: int, patience: float) -> None:
    """Ask the program that listens at an address for its number of keys, as torch's clients do.

    torch's own client waits forever if another program accepts its connection and sends nothing, and a process that
    ends while a thread is in that client is aborted. So it is used only after a store has answered.

    Raises:
        TimeoutError: it does not answer within `patience` seconds.
        OSError: it is not a store, or no program listens there.
    """
    deadline = monotonic() + patience
    data = b""
    try:
        with socket.create_connection((spelled(host), port), patience) as sock:
            sock.sendall(_QUESTION)
            while len(data) < _ANSWER.size:
                sock.settimeout(max(deadline - monotonic(), LEAST))
                if not (more := sock.recv(_ANSWER.size - len(data))):
                    raise OSError("it closed the connection without an answer")
                data += more
    except TimeoutError:
        raise TimeoutError("it does not answer") from None
    if not 0 <= _ANSWER.unpack(data)[0] < _MOST_KEYS:
        raise OSError(f"its answer {data!r} is not from a store")


def listens(host: str, port: int, patience: float = 0) -> bool:
    return answers((host, port), max(patience, PROBE))


def meet_tcp(host: str, port: int, patience: float) -> Any:
    """Return the store there, or the error. In a thread: for a stopped store, torch waits forever, without Ctrl-C."""
    found: list[Any] = []
    try:
        check_is_store(host, port, patience)
    except OSError as error:
        return error

    def meet() -> None:
        allowed = datetime.timedelta(seconds=patience)
        try:
            found.append(reach_tcp(host, port, allowed))
        except RuntimeError as error:
            found.append(TimeoutError("it does not answer") if "timed out" in str(error) else error)

    meeting = Thread(target=meet, name="telegrad-store")
    meeting.start()
    meeting.join(patience)
    if not found:
        atexit.register(meeting.join, PROBE)  # a thread that leaves torch while the interpreter ends aborts it
        return TimeoutError("it does not answer")
    return found[0]


def reach_tcp(host: str, port: int, timeout: datetime.timedelta) -> Any:
    """Connect to a store that another process serves.

    Raises:
        RuntimeError: no process serves one there.
    """
    return _store(host, port, is_master=False, timeout=timeout)


def serve_tcp(host: str, port: int, shared: bool = False) -> tuple[Any, int]:
    """Serve a store; only at `host`, if that is an address of this machine. Return the store and its port.

    With `shared`, an existing store of this process at that port, for `torch.distributed` or an earlier group, is used
    as well.

    Raises:
        OSError: the port is taken.
        RuntimeError: torch cannot serve a store.
    """
    address = listening_address(host)
    if address in ANYWHERE and is_address(host) and host not in ANYWHERE:
        log.warning(
            "telegrad: %s is not an address of this host: the store of this group listens at all addresses of the "
            "host. Unless a NAT forwards that address to this host, correct MASTER_ADDR or init_method",
            host,
        )
    try:
        listener = socket.create_server(socket_address(address, port), family=family_of(address), backlog=CROWD)
    except OSError:
        if not shared:
            raise
        return _store(host, port, is_master=True, multi_tenant=True), port
    with listener:
        return serve_on(listener, shared)


def serve_on(listener: socket.socket, shared: bool = False) -> tuple[Any, int]:
    """Serve a store on a listening socket, which stays open for the caller; return the store and its port.

    Raises:
        StoreUnreachable: this process cannot connect to that socket.
    """
    bound = listener.getsockname()
    host, port = text_of(bound), bound[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # at which this process can connect
    try:  # torch connects to its own server, and would retry that for minutes, without Ctrl-C
        socket.create_connection((host, port), OWN_HOST).close()
    except OSError as error:
        raise StoreUnreachable(
            f"the store cannot be served: this host cannot connect to its own address {host} ({error}). "
            "Is its loopback interface up? `ip link set lo up`"
        ) from error
    served = listener.dup().detach()  # the store closes it
    return _store(host, port, is_master=True, master_listen_fd=served, multi_tenant=shared), port
