"""What a thread that waits for the work of other workers does itself: it reads what they send, and handles it.

So an answer need not wake the leader first, and then the thread that waits. The thread does this for a moment only, as
long as no other thread wants the processor, and for notices; calls are left to the reactor.
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

MOMENT = 1e-3  # seconds without anything, after which it sleeps

log = logging.getLogger("telegrad")
_here = threading.local()  # .own: works that this thread has read and not run yet


@in_child
def _help_nobody() -> None:
    """Drop the messages that the forking thread has read: the parent handles them."""
    _here.own = None


def submit(reactor: Reactor, work: Work, queue: WorkQueue | None = None) -> None:
    """Have this thread run the work if it has read it in `run_for`, and else the reactor in the turn of `queue`."""
    own: deque[Work] | None = getattr(_here, "own", None)
    if own is None:
        reactor.submit(work, queue)
    else:
        own.append(work)


def run_for(future: Any, links: Sequence[Link], reactor: Reactor) -> None:
    """Until `future` is done or nothing comes for a moment, read these connections and run the works that come."""
    own: deque[Work] = deque()
    before, _here.own = getattr(_here, "own", None), own
    token = serving.set(None)  # the works are not for the sake of the call that this thread serves
    try:
        while not future.done():
            _read(future, links, own)
            if not own:
                break
            while own:
                work = own.popleft()
                while own:
                    reactor.submit(own.popleft())  # by other threads, since this work may wait for them
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
    """Read until something has come that this thread shall run."""
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
