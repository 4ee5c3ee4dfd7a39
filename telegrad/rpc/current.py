"""Which worker a thread speaks for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from telegrad.agent.agent import Agent
from telegrad.autograd import api
from telegrad.autograd.conductor import Conductor
from telegrad.errors import NotInitialized
from telegrad.group.members import check_name
from telegrad.rref.keeper import Keeper

if TYPE_CHECKING:
    from typing_extensions import Self

    from telegrad.rpc.cluster import Worker


class _NameAndId(NamedTuple):
    name: str
    id: int


class WorkerInfo(_NameAndId):
    """Names a worker of the group; from `get_worker_info`, to be given to calls."""

    __slots__ = ()

    def __new__(cls, name: str, id: int) -> Self:  # noqa: A002 - its name in the API
        check_name(name)
        return super().__new__(cls, name, id)


worker: Worker | None = None  # of this process, set by init_rpc and shutdown
_here = threading.local()  # .agent: whose thread this is; in a process with several agents the calls go out from it


def agent() -> Agent:
    """The agent of this thread.

    Raises:
        NotInitialized: this process is in no group.
    """
    own: Agent | None = getattr(_here, "agent", None)
    if own is not None:
        return own
    return worker.agent if worker is not None else joined().agent


def joined() -> Worker:
    """The worker that this process is.

    Raises:
        NotInitialized: it is in no group.
    """
    if worker is None:
        raise NotInitialized("RPC has not been initialized: this process is in no group, call init_rpc first")
    return worker


def keeper() -> Keeper:
    """The keeper of this thread's references."""
    rider = agent().rider
    assert isinstance(rider, Keeper)
    return rider


def conductor() -> Conductor:
    """The conductor of this thread's backward passes."""
    recorder = agent().recorder
    assert isinstance(recorder, Conductor)
    return recorder


def enter(own: Agent | None) -> None:
    """From now on this thread runs user code for `own`, or for the worker of this process."""
    _here.agent = own


def forget() -> None:
    """In a forked child: it is not the worker that its parent is."""
    global worker
    if worker is not None:
        worker.agent.abandon()
        worker = None
    _here.__dict__.clear()


api.speak_for(conductor)
