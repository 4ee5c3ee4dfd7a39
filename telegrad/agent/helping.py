"""What a thread that waits for the work of other workers can do itself: read what they send, and see to it.

So an answer need not wake the leader first, and then the thread that waits. It does this for a moment only, as long as
nobody else wants the processor, and for what was sent as a notice; calls are left to the reactor.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from telegrad.agent.cancelling import serving
from telegrad.agent.reactor import Reactor
from telegrad.agent.spinning import Spin
from telegrad.agent.works import Work, WorkQueue
from telegrad.atfork import in_child
from telegrad.interrupts import raised_by_handler
from telegrad.transport.link import Link

MOMENT = 1e-3  # seconds without anything, after which it sleeps

log = logging.getLogger("telegrad")
_here = threading.local()  # .own: what this thread has read and not seen to


@in_child
def _help_nobody() -> None:
    """Drop the messages that the forking thread has read: the parent handles them."""
    _here.own = None


def submit(reactor: Reactor, work: Work, queue: WorkQueue | None = None) -> None:
    """Have the thread that read this do it, if it helps so, and else the reactor in the turn of `queue`."""
    own: deque[Work] | None = getattr(_here, "own", None)
    if own is None:
        reactor.submit(work, queue)
    else:
        own.append(work)


def run_for(future: Any, links: Sequence[Link], reactor: Reactor) -> None:
    """Until `future` is done, or nothing comes for a moment, do what comes over these connections."""
    own: deque[Work] = deque()
    before, _here.own = getattr(_here, "own", None), own
    token = serving.set(None)  # what it does is not for the sake of the call that it serves
    try:
        while not future.done() and _read(future, links, own):
            while own:
                work = own.popleft()
                while own:
                    reactor.submit(own.popleft())  # by others, since this one may wait for them
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


def _read(future: Any, links: Sequence[Link], own: deque[Work]) -> bool:
    """Whether something came that this thread shall do."""
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
    return bool(own)
