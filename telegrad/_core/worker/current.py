"""The current worker of a thread."""

from __future__ import annotations

import multiprocessing

from telegrad._core import forks
from telegrad._core.agent.agent import Agent
from telegrad._core.references.reference_table import ReferenceTable
from telegrad._core.threads import Here
from telegrad._core.worker.worker import Worker, made
from telegrad.autograd import speak_for
from telegrad.autograd.conductor import Conductor
from telegrad.errors import NotInitialized, PeerLost, StoreUntrusted

worker: Worker | None = None  # of this process; init_rpc stores it, one at a time; read without a lock
ended_by: BaseException | None = None  # error that ended the last membership, until shutdown or init_rpc
_has_left = False  # this process was in a group before; reset in a forked child
_here = Here()  # its worker, if a process has several


def here() -> Worker:
    """Return the worker of this thread; raise NotInitialized if this process is in no group."""
    found: Worker = _here.own or joined()
    return found


def agent() -> Agent:
    """Return the agent of this thread; raises as `here`. Inlined for speed, since each remote call needs it."""
    found: Worker = _here.own or worker or joined()
    return found.agent


def joined() -> Worker:
    """Return the worker of this process.

    Raises:
        NotInitialized: it is in no group.
        StoreUntrusted: it was, until the group's store was tampered with.
        PeerLost: it was, until it was declared lost.
    """
    if worker is None:
        forks.exit_if_user_code_ended()
        if isinstance(ended_by, StoreUntrusted | PeerLost):
            raise type(ended_by)(f"this process has left its group: {ended_by}")
        if _has_left:
            raise NotInitialized(
                "RPC has not been initialized: this process has left its group, by shutdown() or because the group has "
                "ended. Make calls before that; to join a group again, call init_rpc first"
            )
        hint = f". {forks.ADVICE}" if forks.process.depth or multiprocessing.parent_process() is not None else ""
        raise NotInitialized(f"RPC has not been initialized: this process is in no group, call init_rpc first{hint}")
    return worker


def references() -> ReferenceTable:
    found: Worker = _here.own or worker or joined()
    return found.references


def conductor() -> Conductor:
    found: Worker = _here.own or worker or joined()
    return found.conductor


def enter(own: Worker | None) -> None:
    """Make this thread run user code for `own`, or with None for the worker of this process."""
    _here.own = own


def replace(own: Worker, by: Worker) -> None:
    """Replace the worker of this process, for the next generation of its group."""
    if worker is own:
        _set(by, ended_by, _has_left)


def _set(new: Worker | None, because: BaseException | None, has_left: bool) -> None:
    global worker, ended_by, _has_left
    _has_left = has_left
    ended_by = because  # before `worker` is unset, which readers check first
    worker = new


def leave(own: Worker, because: BaseException | None = None) -> None:
    """Unset the worker of this process. No other can be set before, so the check and the store need no lock."""
    if worker is own:
        _set(None, because, has_left=True)


def forget() -> None:
    """In a forked child: disable the parent's workers."""
    _set(None, None, has_left=False)
    for own in list(made):
        own.abandon()
    made.clear()  # otherwise a child of this child would do so again
    # After `abandon`, which closes descriptors by means of objects that are in frames of the stack, too.
    forks.disable_stack()
    _here.__dict__.clear()


speak_for(conductor)
