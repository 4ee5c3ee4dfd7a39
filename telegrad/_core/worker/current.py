"""Which worker a thread speaks for."""

from __future__ import annotations

import multiprocessing
import threading

from telegrad._core import forks
from telegrad._core.agent.agent import Agent
from telegrad._core.references.table import ReferenceTable
from telegrad._core.worker.worker import Worker, made
from telegrad.autograd import api
from telegrad.autograd.conductor import Conductor
from telegrad.errors import NotInitialized, PeerLost, StoreUntrusted

worker: Worker | None = None  # of this process: init_rpc stores it, one at a time, others load it as it is
ended_by: BaseException | None = (
    None  # the error with which the process left its last group, until shutdown or init_rpc
)
_has_left = False  # this process, which is no fork of that one, was in a group before
_here = threading.local()  # .worker: whose thread this is; in a process with several the calls go out from it


def here() -> Worker:
    """The worker of this thread.

    Raises:
        NotInitialized: this process is in no group.
    """
    own: Worker | None = getattr(_here, "worker", None)
    return own if own is not None else joined()


def agent() -> Agent:
    """The agent of this thread; raises as `here`, and takes no second call, since each remote call asks for it."""
    own: Worker | None = getattr(_here, "worker", None)
    if own is not None:
        return own.agent
    return worker.agent if worker is not None else joined().agent


def joined() -> Worker:
    """The worker that this process is.

    Raises:
        NotInitialized: it is in no group.
        StoreUntrusted: it was, until the group's store was tampered with.
        PeerLost: it was, until it was declared lost.
    """
    if worker is None:
        if isinstance(ended_by, StoreUntrusted | PeerLost):
            raise type(ended_by)(f"this process has left its group: {ended_by}")
        if _has_left:
            raise NotInitialized(
                "RPC has not been initialized: this process has left its group, by shutdown() or since that has ended. "
                "Make calls before that; to join a group again, call init_rpc first"
            )
        raise NotInitialized(f"RPC has not been initialized: this process is in no group, call init_rpc first{_hint()}")
    return worker


def _hint() -> str:
    return f". {forks.ADVICE}" if forks.depth or multiprocessing.parent_process() is not None else ""


def references() -> ReferenceTable:
    """The references of this thread's worker."""
    return here().references


def conductor() -> Conductor:
    """The conductor of this thread's backward passes."""
    return here().conductor


def enter(own: Worker | None) -> None:
    """From now on this thread runs user code for `own`, or for the worker of this process."""
    _here.worker = own


def replace(own: Worker, by: Worker) -> None:
    """This process goes on as another worker: in the next generation of its group."""
    global worker
    if worker is own:
        worker = by


def leave(own: Worker, because: BaseException | None = None) -> None:
    """This process is that worker no more. No other can be set while it is, so nothing comes between look and store."""
    global worker, ended_by, _has_left
    if worker is own:
        _has_left = True
        ended_by = because  # before the other, which says that there is none
        worker = None


def forget() -> None:
    """In a forked child: it is none of the workers that its parent is."""
    global worker, ended_by, _has_left
    worker, ended_by, _has_left = None, None, False
    for own in list(made):
        own.abandon()
    made.clear()  # else a child of this child would do so again
    forks.disable_stack()
    _here.__dict__.clear()


api.speak_for(conductor)
