"""Calls that have come, and their callers.

Calls of actors are ordered: those of one caller are opened one after the other, in the order in which they came.
Opening a call can take long, since it rebuilds the arguments; so it is done by a thread that may run user code, and not
by the one that reads. The latter adds the call to `Caller.ordered`, and a work that opens the first call there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from telegrad._core.calls.attachments import Attachments, Destination, GraphContext
from telegrad._core.calls.call_context import Hops, Scene, hops_of, setting
from telegrad._core.calls.cancelling import Served, finishes
from telegrad._core.devices.routes import for_answers
from telegrad._core.membership.members import Identity
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.transport.link import Link
from telegrad._core.transport.loopback import LoopEnd
from telegrad._core.wire.messages import SCENE, Message, split

Opened = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # the function and the arguments of a call


class Caller:
    """The worker at the other end of an accepted connection."""

    __slots__ = (
        *("calls", "cancelled", "control", "identity", "name", "opening", "ordered", "place", "queue", "read"),
        *("same_program", "slow"),
    )

    def __init__(self, identity: Identity, same_program: bool, map_: Iterable[tuple[str, str]]) -> None:
        """`map_` leads from its devices to those of this worker."""
        self.identity = identity
        self.name = identity.name
        self.same_program = same_program
        self.place = for_answers(identity.name, dict(map_))
        self.ordered: deque[Incoming] = deque()  # to be opened; taken by the thread that has `opening`
        self.opening = threading.Lock()
        self.queue: WorkQueue = WorkQueue()  # of its calls
        self.control: WorkQueue = WorkQueue(has_slots=False)  # of its control messages
        self.read = 0  # bytes that had been sent to it when it was last seen to have read all
        self.slow = 0  # calls that waited when they were found to be slow: that many more may (`Intake`)
        self.cancelled = 0  # calls, since the queue was last searched for such
        # By their numbers those that were not answered yet; no lock: each use is one operation of a dict.
        self.calls: dict[int, Incoming] = {}


class Incoming(Served):
    """A message that has come, mostly a call."""

    __slots__ = (
        *("args", "attachments", "begun", "caller", "came", "context", "function", "kwargs", "link", "message", "name"),
        *("on_end", "scene"),
    )

    came: float  # when, if it has a scene
    # Of an ordered call, once it is opened:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scene: Scene | None  # in which it runs
    on_end: Callable[[], None] | None  # called once, after its answer was sent

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
    def callers_scene(self) -> bytes | memoryview:
        """The description of the scene that the caller was in."""
        return split(self.message.body)[1] if self.message.flags & SCENE else b""

    def setting(self) -> AbstractContextManager[None]:
        """Inside, the caller's grad mode, context and scene hold."""
        flags = self.message.flags
        return setting(flags, self.callers_scene, self.context, self.came if flags & SCENE else 0.0)

    def opened(self, opened: Opened) -> None:
        """Keep the function and the arguments of an ordered call until it runs."""
        self.function, self.args, self.kwargs = opened
        self.scene = self.on_end = None

    def take(self) -> Opened:
        """Return what to run; it is not kept here any longer."""
        opened = self.function, self.args, self.kwargs
        del self.function, self.args, self.kwargs
        if self.cancelled:
            self.check_begins(finishes(*opened[:2]))
        return opened

    def take_end(self) -> Callable[[], None] | None:
        """Return what to call at the end of an ordered call; it is not kept here any longer."""
        on_end, self.on_end = self.on_end, None
        return on_end

    @property
    def hops(self) -> Hops:
        """Return for the sake of which calls of actors this one was made."""
        scene = self.callers_scene
        return hops_of(scene) if scene else ()

    @property
    def described(self) -> str:
        name = self.name or self.message.head.decode().replace(":", ".") or "a function"
        return f"the call of {name} by worker {self.caller.name!r}"


class Doorkeeper(Protocol):
    """The layer above that says when ordered calls run."""

    def heeds(self, name: bytes) -> bool:
        """Return True if calls of a function are ordered."""

    def admit(self, call: Incoming) -> bool:
        """Return True if a call may run at once; else `Server.perform` or `refuse` will be called for it.

        Raises:
            UsageError: it must not run at all.
        """
