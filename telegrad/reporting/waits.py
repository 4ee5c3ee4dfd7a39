"""Find the wait of this package that a thread is in, except waits for calls, from its stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from types import CodeType, FrameType
from typing import Any

from telegrad.ext.calls import PendingCall, futures
from telegrad.ext.graphs import Conductor
from telegrad.ext.references import ValueSlot
from telegrad.ext.starting import join, stores
from telegrad.ext.texts import progress
from telegrad.ext.workers import Leaving, Membership
from telegrad.reporting.stacks import is_library
from telegrad.reporting.worker_state import MEETINGS, WaitState

Missing = Callable[[], list[str]]
Names = dict[str, Any]


def wait_on(frames: Sequence[FrameType], missing: Missing) -> WaitState | None:
    """Return the wait below the innermost user code. `missing` returns the workers that a joining or leaving worker
    waits for.

    If several waits are found, the outermost is returned, because it is the most specific.
    """
    last = None
    for frame in reversed(frames):
        if not is_library(frame.f_code.co_filename):
            break
        describe = _WAITS.get(frame.f_code)
        found = describe(frame.f_locals, missing) if describe is not None else None
        last = found or last
    return last


def wait_of(thread: int | None) -> WaitState | None:
    """Return the wait of that thread that is announced to users, whatever function it is in."""
    told = next((each for each in reversed(progress.under_way()) if each.thread == thread), None)
    if told is None:
        return None
    text = told.text()
    about = text.partition(":")[0] if told.what in MEETINGS else text  # the rest names the missing workers
    return WaitState(what=told.what, on=list(told.missing()), about=about, age=monotonic() - told.begun)


def _joining(_: Names, missing: Missing) -> WaitState:
    return WaitState(what="init_rpc", on=missing(), about="the group to be complete")


def _parting(names: Names, missing: Missing) -> WaitState | None:
    if names["serving"]:
        return _serving(names, missing)
    return WaitState(what="shutdown", on=missing(), about="all to call shutdown, and their calls to end")


def _serving(*_: object) -> WaitState:
    return WaitState(what="serve", on=[], about="calls of others")  # blocks for as long as other workers need this one


def _meeting(names: Names, _: Missing) -> WaitState:
    return WaitState(
        what="store", on=[], about=f"the store at {names['host']}:{names['port']}, which does not answer yet"
    )


def _gathering(names: Names, _: Missing) -> WaitState:
    wanted, there = names["wanted"], {each.name for each in names["self"].workers()}
    on = [] if isinstance(wanted, int) else [name for name in wanted if name not in there]
    about = f"{wanted} workers" if isinstance(wanted, int) else ""
    age = monotonic() - names["wait"].begun if "wait" in names else 0.0
    return WaitState(what="workers", on=on, about=about, age=age)


def _passing(names: Names, _: Missing) -> WaitState:
    driven = names["driven"]
    return WaitState(what="backward", on=driven.owing, about=f"the end of {driven.spec}")


def _future(names: Names, _: Missing) -> WaitState | None:
    future = names["future"]
    age = perf_counter() - names["begun"] if "begun" in names else 0.0
    if isinstance(future, ValueSlot):
        about = "the value of a reference of this worker, which has not been created yet"
        return WaitState(what="value", on=[], about=about, age=age)
    if isinstance(getattr(future, "call", None), PendingCall):
        return None  # the list of calls has this one
    return WaitState(what="future", on=[], about=getattr(future, "about", "") or "a future that is not done", age=age)


_WAITS: dict[CodeType, Callable[[Names, Missing], WaitState | None]] = {
    join.join.__code__: _joining,
    stores.join_store.__code__: _meeting,
    Membership.wait_for.__code__: _gathering,
    Leaving.wait.__code__: _parting,
    Membership.wait_for_end.__code__: _serving,
    Conductor.wait.__code__: _passing,
    futures.wait_for.__code__: _future,
}
