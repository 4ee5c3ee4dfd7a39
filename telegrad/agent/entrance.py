"""Calls that have come: who has made them, and where those wait whose order counts.

Of one caller these are opened one after the other, in the order in which they came. Opening a call can take long,
since it rebuilds the arguments; so it is done by a thread that may run user code, and not by the one that reads. Calls
are put in by the latter, with a work for each; a work opens the first that is there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from telegrad.agent.attachments import Attachments, Destination, GraphContext
from telegrad.agent.cancelling import Served, finishes
from telegrad.agent.scene import Hops, Scene, hops_of, setting
from telegrad.agent.scheduler import WorkQueue
from telegrad.devices.routes import for_answers
from telegrad.group.members import Identity
from telegrad.transport.link import Link
from telegrad.transport.loopback import LoopEnd
from telegrad.wire.messages import SCENE, Message, split

Opened = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # the function and the arguments of a call


class Entrance:
    """Where calls of one caller wait to be opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all below
        self._calls: deque[Incoming] = deque()
        self._opening = False

    def put(self, call: Incoming) -> None:
        with self._lock:
            self._calls.append(call)

    def begin(self) -> Incoming | None:
        """The next to be opened; None where there is none, or `end` will see to it. Else `end` must follow."""
        with self._lock:
            if self._opening or not self._calls:
                return None
            self._opening = True
            return self._calls.popleft()

    def end(self) -> bool:
        """It is open; whether there are more."""
        with self._lock:
            self._opening = False
            return bool(self._calls)


class Caller:
    """Who is at the other end of an accepted connection."""

    __slots__ = (
        *("calls", "cancelled", "control", "entrance", "identity", "name", "place", "queue", "read"),
        *("same_program", "slow"),
    )

    def __init__(self, identity: Identity, same_program: bool, map_: Iterable[tuple[str, str]]) -> None:
        """`map_` leads from its devices to those of this worker."""
        self.identity = identity
        self.name = identity.name
        self.same_program = same_program
        self.place = for_answers(identity.name, dict(map_))
        self.entrance = Entrance()
        self.queue: WorkQueue = WorkQueue()  # of its calls
        self.control: WorkQueue = WorkQueue(has_slots=False)  # of its control messages
        self.read = 0  # bytes that had been sent to it when it was last seen to have read all
        self.slow = 0  # calls that waited when they were found to be slow: that many more may (`Intake`)
        self.cancelled = 0  # calls, since the queue was last searched for such
        # By their numbers those that were not answered yet; no lock: each use is one operation of a dict.
        self.calls: dict[int, Incoming] = {}


class Incoming(Served):
    """A message that has come, mostly a call."""

    __slots__ = ("attachments", "begun", "caller", "came", "context", "link", "message", "name")

    came: float  # when, if it has a scene

    def __init__(self, caller: Caller, link: Link | LoopEnd, message: Message) -> None:
        self.caller = caller
        self.link = link
        self.message = message
        self.begun = 0.0  # when it began to run
        self.name = ""  # of its function, for people; known once it was opened, if anybody listens
        self.attachments: Attachments | None = None  # what came along with it
        self.context: GraphContext | None = None  # in which it runs; known once its tensors were taken
        self.cancelled = False
        self.nested = None
        self.stop = None

    @property
    def destination(self) -> Destination | None:
        """Where its value goes, if that stays here."""
        return self.attachments.destination if self.attachments is not None else None

    @property
    def scene(self) -> bytes | memoryview:
        """What was told of the caller's."""
        return split(self.message.body)[1] if self.message.flags & SCENE else b""

    def setting(self) -> AbstractContextManager[None]:
        """Inside, the caller's grad mode, context and scene hold."""
        flags = self.message.flags
        return setting(flags, self.scene, self.context, self.came if flags & SCENE else 0.0)

    @property
    def described(self) -> str:
        name = self.name or self.message.head.decode().replace(":", ".") or "a function"
        return f"the call of {name} by worker {self.caller.name!r}"


class Arrival:
    """A call whose order counts, opened."""

    __slots__ = ("_opened", "call", "on_end", "scene")

    def __init__(self, call: Incoming, opened: Opened) -> None:
        self.call = call
        self._opened: Opened | None = opened
        self.on_end: Callable[[], None] | None = None  # called once, after its answer was sent
        self.scene: Scene | None = None  # in which it runs

    @property
    def caller(self) -> Caller:
        return self.call.caller

    @property
    def args(self) -> tuple[Any, ...]:
        assert self._opened is not None
        return self._opened[1]

    @property
    def function(self) -> Callable[..., Any]:
        assert self._opened is not None
        return self._opened[0]

    def is_really(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """What was called stands for this."""
        assert self._opened is not None
        self._opened = function, args, self._opened[2]

    @property
    def hops(self) -> Hops:
        scene = self.call.scene
        return hops_of(scene) if scene else ()

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
        if self.call.cancelled:
            self.call.check_begins(finishes(*opened[:2]))
        return opened


class Doorkeeper(Protocol):
    """The layer above that says when calls run whose order counts."""

    def heeds(self, name: bytes) -> bool:
        """Whether a function is one of those."""

    def admit(self, arrival: Arrival) -> bool:
        """Whether a call may run at once; else `Server.perform` will be called for it.

        Raises:
            UsageError: it must not run at all.
        """
