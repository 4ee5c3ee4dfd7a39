"""The right to read a connection, which a waiting thread gives back before a handler of a signal runs on top of it.

A handler may make calls. It runs on the thread that it has interrupted. Where that thread has the right to read,
nobody would read the answers to the handler's calls, since the thread waits until the handler has returned. So the
right goes back first, to the leader or to the handler's own calls, and the interrupted wait begins anew afterwards.
"""

from __future__ import annotations

from typing import Any

from telegrad.interrupts import Resumed, gives_back
from telegrad.transport.link import Link


def hand_over(local: dict[str, Any]) -> bool:
    """Give back what a function holds that reads `link` as long as `held` has it; return whether it held anything."""
    if not local["held"]:
        return False
    local["held"].clear()
    local["link"].stop_reading()
    return True


@gives_back(hand_over)
def _read_once(link: Link, timeout: float, held: list[Link]) -> None:
    if not link.read():
        link.wait_readable(timeout)


def read_once(link: Link, timeout: float) -> None:
    """With the right to read, which ends with this: take what has come, or wait until something comes."""
    held = [link]
    try:
        _read_once(link, timeout, held)
    except Resumed:
        pass
    finally:
        if held:
            link.stop_reading()
