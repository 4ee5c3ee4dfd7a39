"""What a thread that waits for the work of other workers can do itself: read what they send, and see to it.

So an answer need not wake the leader first, and then the thread that waits. It does this for a moment only, as long as
nobody else wants the processor, and for what was sent as a notice; calls are left to the reactor.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from telegrad.agent.reactor import DISTURBED, Reactor, Work
from telegrad.transport.link import Link

MOMENT = 1e-3  # seconds without anything, after which it sleeps

log = logging.getLogger("telegrad")
_here = threading.local()  # .own: what this thread has read and not seen to
_yield = getattr(os, "sched_yield", lambda: None)


def submit(reactor: Reactor, work: Work) -> None:
    """Have the thread that read this do it, if it does such errands, and else the reactor."""
    own: deque[Work] | None = getattr(_here, "own", None)
    if own is None:
        reactor.submit(work)
    else:
        own.append(work)


def run_for(future: Any, links: Sequence[Link], reactor: Reactor) -> None:
    """Until `future` is done, or nothing comes for a moment, do what comes over these connections."""
    own: deque[Work] = deque()
    before, _here.own = getattr(_here, "own", None), own
    try:
        while not future.done() and _read(future, links, reactor, own):
            while own:
                work = own.popleft()
                while own:
                    reactor.submit(own.popleft())  # by others, since this one may wait for them
                work.run(work.argument)
    except Exception:
        log.exception("telegrad: work of the agent failed")
    finally:
        _here.own = before
        for work in own:
            reactor.submit(work)


def _read(future: Any, links: Sequence[Link], reactor: Reactor, own: deque[Work]) -> bool:
    """Whether something came that this thread shall do."""
    held = [link for link in links if link.reading.acquire(blocking=False)]
    for link in held:
        reactor.poller.watch(link, read=False)
    start = now = perf_counter()
    try:
        while held and not (own or future.done()):
            for link in held:
                link.read()
            last, now = now, perf_counter()
            if now - start > MOMENT or now - last > DISTURBED:
                break
            _yield()
    finally:
        for link in held:
            if link.closed is None:
                reactor.poller.watch(link, read=True)
            link.stop_reading()
            if link.closed is not None:
                reactor.poller.forget(link)
    return bool(own)
