"""Calls whose order counts: those of one caller are opened one after the other, in the order in which they came.

Opening a call can take long, since it rebuilds the arguments; so it is done by a thread that may run user code, and not
by the one that reads. Frames are put in by the latter, with a work for each; a work opens the first that is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from telegrad.agent.scene import Hops, Scene, hops_of
from telegrad.wire.messages import SCENE, Frame, unload

if TYPE_CHECKING:
    from telegrad.agent.server import Caller

Opened = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # the function and the arguments of a call


class Entrance:
    """Where calls of one caller wait to be opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._frames: deque[Frame] = deque()
        self._opening = False

    def put(self, frame: Frame) -> None:
        with self._lock:
            self._frames.append(frame)

    def begin(self) -> Frame | None:
        """The next to be opened; None where there is none, or `end` will see to it. Else `end` must follow."""
        with self._lock:
            if self._opening or not self._frames:
                return None
            self._opening = True
            return self._frames.popleft()

    def end(self) -> bool:
        """It is open; whether there are more."""
        with self._lock:
            self._opening = False
            return bool(self._frames)


class Arrival:
    """A call that was opened."""

    __slots__ = ("_opened", "caller", "frame", "on_end", "scene")

    def __init__(self, caller: Caller, frame: Frame, opened: Opened) -> None:
        self.caller = caller
        self.frame = frame
        self._opened: Opened | None = opened
        self.on_end: Callable[[], None] | None = None  # called once, after its answer was sent
        self.scene: Scene | None = None  # in which it runs

    @property
    def args(self) -> tuple[Any, ...]:
        assert self._opened is not None
        return self._opened[1]

    @property
    def function(self) -> Callable[..., Any]:
        assert self._opened is not None
        return self._opened[0]

    @property
    def hops(self) -> Hops:
        return hops_of(unload(self.frame.body)[1]) if self.frame.flags & SCENE else ()

    def end(self) -> None:
        """It has run, and its answer was sent."""
        on_end = self.keep_end()
        if on_end is not None:
            on_end()

    def keep_end(self) -> Callable[[], None] | None:
        """What to call in the place of `end`, since it goes on."""
        on_end, self.on_end = self.on_end, None
        return on_end

    def take(self) -> Opened:
        """What to run; it is not kept here."""
        opened, self._opened = self._opened, None
        assert opened is not None
        return opened


class Doorkeeper(Protocol):
    """The room above that says when calls run whose order counts."""

    def heeds(self, name: bytes) -> bool:
        """Whether a function is one of those."""

    def admit(self, arrival: Arrival) -> bool:
        """Whether a call may run at once; else `Server.perform` will be called for it.

        Raises:
            UsageError: it must not run at all.
        """
