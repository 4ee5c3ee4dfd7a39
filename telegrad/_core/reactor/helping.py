"""Lets a thread that waits for other workers read and handle their messages itself.

An answer then need not wake first the leader and then the waiting thread. The thread reads only for a moment, only
while no other thread wants the processor, and only notices; calls are left to the reactor.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from telegrad._core.atfork import in_child
from telegrad._core.calls.cancelling import serving
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work, WorkQueue
from telegrad._core.reactor.spinning import Spin
from telegrad._core.transport.link import Link

MOMENT = 1e-3  # seconds without messages, after which the thread sleeps

log = logging.getLogger("telegrad")
_here = threading.local()  # .own: works that this thread has read but not run yet


@in_child
def _help_nobody() -> None:
    """Drop the messages that the forking thread has read: the parent handles them."""
    _here.own = None


def submit(reactor: Reactor, work: Work, queue: WorkQueue | None = None) -> None:
    """Run the work on this thread if `run_for` has read it; otherwise submit it to the reactor in `queue`."""
    own: deque[Work] | None = getattr(_here, "own", None)
    if own is None:
        reactor.submit(work, queue)
    else:
        own.append(work)


def run_for(future: Any, links: Sequence[Link], reactor: Reactor) -> None:
    """Read these connections and run their works until `future` is done or nothing arrives for a moment."""
    own: deque[Work] = deque()
    before, _here.own = getattr(_here, "own", None), own
    token = serving.set(None)  # the works do not belong to the call that this thread serves
    try:
        while not future.done():
            _read(future, links, own)
            if not own:
                break
            while own:
                work = own.popleft()
                while own:
                    reactor.submit(own.popleft())  # on other threads, since this work may wait for them
                work.run(work.argument)
    except Exception as error:
        if raised_by_handler(error):
            raise
        log.exception("telegrad: work of the agent failed")
    finally:
        _here.own = before
        serving.reset(token)
        for work in own:
            reactor.submit(work)


def _read(future: Any, links: Sequence[Link], own: deque[Work]) -> None:
    taken = [link for link in links if link.reading.take()]
    spin = Spin(perf_counter(), MOMENT, gives_way=True)
    try:
        while taken and not (own or future.done()):
            for link in taken:
                link.read()
            if not spin.again():
                break
    finally:
        for link in taken:
            link.stop_reading()
