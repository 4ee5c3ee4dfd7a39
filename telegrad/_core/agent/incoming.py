"""Incoming calls and their callers, and the handlers of control messages.

Calls of actors are ordered: the calls of one caller are opened one after the other, in the order of arrival. Opening
unpickles the arguments and can take long. A thread that may run user code does it, not the reader thread. The reader
adds the call to `Caller.ordered`, and submits a work that opens the first call there.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from telegrad._core.calls.attachments import Attachments, Destination, GraphContext
from telegrad._core.calls.call_context import CallContext, Hops, hops_of, setting
from telegrad._core.calls.cancelling import Served, finishes
from telegrad._core.devices.routes import for_answers
from telegrad._core.membership.members import Identity
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.transport.link import Link
from telegrad._core.transport.loopback import LoopEnd
from telegrad._core.wire.messages import HAS_CALL_CONTEXT, Message, split
from telegrad.errors import UsageError

MOST_UNKNOWN = 20  # classes of messages that the log names

log = logging.getLogger("telegrad")

Opened = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # function and arguments of a call


class Caller:
    """The worker at the other end of an accepted connection."""

    __slots__ = (
        *("calls", "cancelled", "control", "identity", "name", "opening", "ordered", "place", "queue", "read"),
        *("same_program", "slow"),
    )

    def __init__(self, identity: Identity, same_program: bool, map_: Iterable[tuple[str, str]]) -> None:
        """`map_` maps devices of the caller to those of this worker."""
        self.identity = identity
        self.name = identity.name
        self.same_program = same_program
        self.place = for_answers(identity.name, dict(map_))
        self.ordered: deque[Incoming] = deque()  # to be opened by the thread that holds `opening`
        self.opening = threading.Lock()
        self.queue: WorkQueue = WorkQueue()  # for its calls
        self.control: WorkQueue = WorkQueue(has_slots=False)  # for its control messages
        self.read = 0  # bytes sent to it when it was last seen to have read everything
        self.slow = 0  # waiting calls when they were found to be slow; as many more may wait (`Intake`)
        self.cancelled = 0  # cancelled calls since the queue was last searched for them
        # Unanswered calls by their ids; no lock: each use is one operation of a dict.
        self.calls: dict[int, Incoming] = {}


class Incoming(Served):
    """A received message, usually a call."""

    __slots__ = (
        *("args", "attachments", "begun", "caller", "came", "context", "function", "kwargs", "link", "message", "name"),
        *("on_end", "scene"),
    )

    came: float  # time of arrival, set if the message has flags
    # Fields of an ordered call after it was opened:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    scene: CallContext | None  # scene in which it runs
    on_end: Callable[[], None] | None  # called once, after the answer was sent

    def __init__(self, caller: Caller, link: Link | LoopEnd, message: Message) -> None:
        self.caller = caller
        self.link = link
        self.message = message
        self.begun = 0.0  # when it began to run
        self.name = ""  # function name for events; set after opening if there are listeners
        self.attachments: Attachments | None = None  # data that came with it
        self.context: GraphContext | None = None  # autograd context; known after its tensors were taken
        self.cancelled = False
        self.nested = None
        self.stop = None

    @property
    def destination(self) -> Destination | None:
        return self.attachments.destination if self.attachments is not None else None

    @property
    def callers_scene(self) -> bytes | memoryview:
        return split(self.message.body)[1] if self.message.flags & HAS_CALL_CONTEXT else b""

    def setting(self) -> AbstractContextManager[None]:
        """Return a context manager that applies the caller's grad mode, context and scene."""
        flags = self.message.flags
        return setting(flags, self.callers_scene, self.context, self.came if flags & HAS_CALL_CONTEXT else 0.0)

    def opened(self, opened: Opened) -> None:
        self.function, self.args, self.kwargs = opened
        self.scene = self.on_end = None

    def take(self) -> Opened:
        opened = self.function, self.args, self.kwargs
        del self.function, self.args, self.kwargs
        if self.cancelled:
            self.check_begins(finishes(*opened[:2]))
        return opened

    def take_end(self) -> Callable[[], None] | None:
        on_end, self.on_end = self.on_end, None
        return on_end

    @property
    def hops(self) -> Hops:
        scene = self.callers_scene
        return hops_of(scene) if scene else ()

    @property
    def described(self) -> str:
        name = self.name or self.message.head.decode().replace(":", ".") or "a function"
        return f"the call of {name} by worker {self.caller.name!r}"


class CallScheduler(Protocol):
    """The layer above that decides when ordered calls run."""

    def heeds(self, name: bytes) -> bool:
        """Return True if calls of a function are ordered."""

    def admit(self, call: Incoming) -> bool:
        """Return True if a call may run at once; otherwise call `Server.perform` or `refuse` for it later.

        Raises:
            UsageError: it must not run at all.
        """


class Handlers:
    """The handlers of one worker, added before the first message can arrive."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Callable[..., Any], Callable[[Identity, Any], None]]] = {}  # by class
        self._unknown: set[str] = set()  # classes of messages that were dropped

    def add(self, message: type, handler: Callable[[Identity, Any], None]) -> None:
        if message.__name__ in self._of:
            raise UsageError(
                f"{message.__module__}.{message.__name__} has the same name as another class of control messages of "
                "this worker, and messages are identified by class name: rename it"
            )
        self._of[message.__name__] = message, handler

    def take(self, sender: Identity, message: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        kind, *fields = message
        if tensors:
            fields[-1] = tensors
        if kind not in self._of:
            if kind not in self._unknown and len(self._unknown) < MOST_UNKNOWN:
                self._unknown.add(kind)
                log.warning(
                    "telegrad: worker %r sends messages %.60r, which are dropped: no extension handles them here. "
                    "Import the extension here, too, before init_rpc",
                    sender.name,
                    kind,
                )
            return
        make, handler = self._of[kind]
        handler(sender, make(*fields))
