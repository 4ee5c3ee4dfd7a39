"""Runs the calls that arrive: finds the function, sets the scene, sends the answer."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from time import perf_counter
from types import CoroutineType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.agent import errands
from telegrad.agent.cargo import Cargo, Destination, Recorder, take_tensors
from telegrad.agent.entrance import Arrival, Doorkeeper, Entrance
from telegrad.agent.futures import Signal
from telegrad.agent.naming import RUNS, user_name
from telegrad.agent.peer import AnyLink
from telegrad.agent.reactor import IDLE, INSTANT, LONG, QUICK, Reactor, Work
from telegrad.agent.scene import entered, in_setting, setting
from telegrad.devices.routes import for_answers
from telegrad.devices.streams import Streams
from telegrad.errors import CannotEncode, PeerError, UsageError
from telegrad.group.members import Identity
from telegrad.transport.link import Link
from telegrad.wire.failures import describe
from telegrad.wire.functions import resolve
from telegrad.wire.messages import (
    CALL,
    CARRIES,
    FAILURE,
    NO_GRAD,
    NOTICE,
    PATIENT,
    RECORDED,
    RESULT,
    SCENE,
    Frame,
    load,
    unload,
)
from telegrad.wire.packing import pack
from telegrad.wire.pickling import decode, encode
from telegrad.wire.stories import first_line, told_before
from telegrad.wire.tensors import Blob

SHORT = 300e-6  # a function that took less last time, until it waited for something, is expected to be short again
HANDING_OVER = 300e-6  # what giving the lead away may add to the time that a function seems to take
ASYNC_MARK = "_telegrad_async_execution"
_NOTHING = encode(None, False).body
Parts = dict[str, Any]  # of a frame, by the names that `Link.send` gives them

log = logging.getLogger("telegrad")


class Caller:
    """Who is at the other end of an accepted connection."""

    __slots__ = ("entrance", "identity", "link", "name", "place", "same_program")

    def __init__(self, identity: Identity, same_program: bool, map_: Iterable[tuple[str, str]]) -> None:
        """`map_` leads from its devices to those of this worker."""
        self.identity = identity
        self.name = identity.name
        self.same_program = same_program
        self.place = for_answers(identity.name, dict(map_))
        self.link: AnyLink | None = None
        self.entrance = Entrance()


class Later(NamedTuple):
    """What a function of this package returns whose value will be that of a future, or of a box."""

    future: torch.futures.Future[Any] | Signal
    function: Any  # which made that future, or its name


class Server:
    """The callee's side of an agent."""

    def __init__(
        self,
        name: str,
        reactor: Reactor,
        entered: Callable[[], None],
        on_notice: Callable[[Identity, Any, Sequence[Tensor]], None],
        take_cargo: Callable[[Frame, Identity], Frame],
        undelivered: Callable[[Identity, PeerError], None],
    ) -> None:
        """`entered` is called on each new thread that runs user code, `on_notice` with each control message.

        `undelivered` is told where an answer that carries something finds no connection any more.
        """
        self._name = name
        self._reactor = reactor
        self._entered = entered
        self._on_notice = on_notice
        self._take_cargo = take_cargo
        self._undelivered = undelivered
        self.pack: Callable[[Sequence[Any], Identity, None], bytes]
        self.streams: Streams
        self.recorder: Recorder | None = None
        self.doorkeeper: Doorkeeper | None = None
        self.orders = False  # the doorkeeper is asked for functions that are known to be short, too
        self.wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # what to call instead
        self._short: dict[bytes, bool] = {}  # by the function's name
        self._short_in_order: dict[bytes, bool] = {}  # of those that the doorkeeper heeds
        self._lock = threading.Lock()  # guards _loop and _running
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = 0  # calls whose functions returned a future or a coroutine

    @property
    def idle(self) -> bool:
        return not self._running and self._reactor.idle

    def on_frames(self, caller: Caller, frames: Iterable[Frame]) -> None:
        for frame in frames:
            if frame.flags & CARRIES:
                frame = self._take_cargo(frame, caller.identity)
            if frame.kind == CALL:
                short = frame.head and self._short.get(frame.head)
                if (not short or self.orders) and self._heeds(frame.head):
                    caller.entrance.put(frame)
                    self._reactor.submit(Work(self._run_in_order, caller, self._cost_in_order(frame)))
                else:
                    self._reactor.submit(Work(self._run, (caller, frame), QUICK if short else LONG))
            elif frame.kind == NOTICE:
                if frame.flags & PATIENT:
                    self._reactor.submit(Work(self._notice, (caller, frame), IDLE))
                else:
                    errands.submit(self._reactor, Work(self._notice, (caller, frame), INSTANT))

    def _notice(self, work: tuple[Caller, Frame]) -> None:
        caller, frame = work
        with self.streams.turn():
            frame, tensors = take_tensors(frame, self.recorder, caller.identity)
            self._on_notice(caller.identity, pickle.loads(frame.body), tensors)

    def _run(self, work: tuple[Caller, Frame]) -> None:
        if self.streams.used:
            with self.streams.turn():
                self._serve(*work)
        else:
            self._serve(*work)

    def _serve(self, caller: Caller, frame: Frame, arrival: Arrival | None = None) -> None:
        start = perf_counter()
        function: Any = None
        args: Any = None
        try:
            if arrival is None:
                frame, tensors = take_tensors(frame, self.recorder, caller.identity)
                function, args, kwargs = open_call(frame, tensors)
                del tensors
            else:
                function, args, kwargs = arrival.take()
            if self.wrap is not None:
                function = self.wrap(function)
            if frame.flags:
                with setting(frame):
                    result = function(*args, **kwargs)
            elif frame.context is not None:
                with frame.context.entered():
                    result = function(*args, **kwargs)
            else:
                result = function(*args, **kwargs)
            args = None  # memory that was lent for them goes back together with the answer
            del kwargs
            if frame.head:
                known = self._short if arrival is None else self._short_in_order
                limit = SHORT if known.get(frame.head) else SHORT + HANDING_OVER
                known[frame.head] = self._reactor.worked_until() - start < limit
        except BaseException as error:
            self._fail(caller, frame, error, user_name(function, args) if function is not None else "")
        else:
            if type(result) is CoroutineType:
                self._await(caller, frame, result, result if hasattr(function, RUNS) else function, arrival)
            elif type(result) is Later:
                self._when_done(caller, frame, result.future, result.function)
            elif hasattr(function, ASYNC_MARK):
                self._when_done(caller, frame, its_future(function, result), function)
            else:
                answer = self._answer(caller, frame, result, function)
                del result  # as above: it may be one of the arguments
                self._send(caller, answer)

    def _answer(self, caller: Caller, call: Frame, result: Any, function: Any) -> Parts:
        """What to send."""
        self.streams.publish()  # whoever hears of the end may go on with what the function has left here
        destination = destination_of(call)
        if destination is not None:
            destination.fulfil(result)
            return {"kind": RESULT, "id": call.id, "flags": CARRIES, "body": load(_NOTHING, destination.receipt())}
        flags = 0
        try:
            body, tensors, references, buffers = encode(result, caller.same_program)
            meta, blobs = pack(tensors, caller.place, buffers) if tensors else (b"", ())
            if call.context is not None and any(tensor.requires_grad for tensor in tensors):
                flags, what = RECORDED, getattr(function, "__name__", None) or call.head.decode()
                body = load(body, call.context.sent(tensors, caller.identity, what, not call.flags & NO_GRAD))
            if references:
                flags, body = flags | CARRIES, load(body, self.pack(references, caller.identity, None))
        except BaseException as error:
            error, name = _about_result(error), user_name(function)
            self._note_failure(caller, error, name)
            return self._failure(call, error, name)
        parts = {"kind": RESULT, "id": call.id, "flags": flags, "meta": meta, "body": body}
        return {**parts, "blobs": _handed_over(blobs)} if blobs else parts

    def _fail(self, caller: Caller, call: Frame, error: BaseException, name: str) -> None:
        """Answer with an error; `name` is that of the function, or empty where it was not even found."""
        name = name or bytes(call.head).decode().replace(":", ".")
        self._note_failure(caller, error, name)
        self._send(caller, self._failure(call, error, name))

    def _failure(self, call: Frame, error: BaseException, name: str) -> Parts:
        self.streams.publish()
        flags, body = 0, describe(error, self._name, name)
        destination = destination_of(call)
        if destination is not None:
            destination.fail(body)
            flags, body = CARRIES, load(body, destination.receipt())
        return {"kind": FAILURE, "id": call.id, "flags": flags, "body": body}

    def _note_failure(self, caller: Caller, error: BaseException, name: str) -> None:
        if told_before(error, self._name):
            return  # it was raised here by an earlier call, which has noted it
        log.warning(
            "telegrad: worker %r: %s, called by worker %r, raised %s: %s",
            *(self._name, name or "a call", caller.name, type(error).__name__, first_line(error)),
        )

    def _send(self, caller: Caller, parts: Parts) -> None:
        link = caller.link
        assert link is not None
        later = self._reactor.batches()
        try:
            link.send(later=later, **parts)
            if later and isinstance(link, Link):
                self._reactor.sent_later(link)
        except PeerError as error:  # the caller has gone: nobody waits for the answer
            if parts.get("flags", 0) & CARRIES:
                self._undelivered(caller.identity, error)
        except Exception as error:
            link.fail(error)
            raise

    # Calls whose order counts

    def _heeds(self, name: bytes) -> bool:
        return self.doorkeeper is not None and self.doorkeeper.heeds(name)

    def _cost_in_order(self, frame: Frame) -> int:
        return QUICK if self._short_in_order.get(frame.head) else LONG

    def _run_in_order(self, caller: Caller) -> None:
        frame = caller.entrance.begin()
        if frame is None:
            return
        with self.streams.turn():
            arrival = self._admit(caller, frame)
        if caller.entrance.end():
            self._reactor.submit(Work(self._run_in_order, caller, LONG))
        if arrival is not None:
            self._perform(arrival)

    def _admit(self, caller: Caller, frame: Frame) -> Arrival | None:
        """Open a call; None where it shall not run now."""
        assert self.doorkeeper is not None
        try:
            frame, tensors = take_tensors(frame, self.recorder, caller.identity)
            arrival = Arrival(caller, frame, open_call(frame, tensors))
        except BaseException as error:
            self._fail(caller, frame, error, "")
            return None
        self._count(1)  # it may wait
        try:
            return arrival if self.doorkeeper.admit(arrival) else None
        except BaseException as error:
            self.refuse(arrival, error)
            return None

    def perform(self, arrival: Arrival) -> None:
        """Have a call run that was not admitted at once."""
        self._reactor.submit(Work(self._perform, arrival, self._cost_in_order(arrival.frame)))

    def _perform(self, arrival: Arrival) -> None:
        try:
            with self.streams.turn(), entered(arrival.scene):
                self._serve(arrival.caller, arrival.frame, arrival)
        finally:
            self._count(-1)
            arrival.end()

    def refuse(self, arrival: Arrival, error: BaseException) -> None:
        """A call that was not admitted at once will not run."""
        self._count(-1)
        self._fail(arrival.caller, arrival.frame, error, user_name(arrival.function, arrival.args))

    # Functions that go on after they returned

    def _when_done(self, caller: Caller, call: Frame, future: Any, function: Any) -> None:
        if not isinstance(future, torch._C.Future | Signal):
            self._fail(caller, call, future, user_name(function))
            return
        self._count(1)

        def done(future: Any) -> None:
            try:
                result = future.wait()
            except BaseException as error:
                self._fail(caller, call, error, user_name(function))
            else:
                self._send(caller, self._answer(caller, call, result, function))
            finally:
                self._count(-1)

        future.add_done_callback(done)

    def _await(
        self,
        caller: Caller,
        call: Frame,
        awaitable: Coroutine[Any, Any, Any],
        function: Any,
        arrival: Arrival | None,
    ) -> None:
        self._count(1)
        on_end = arrival.keep_end() if arrival is not None else None
        special = call.flags or call.context is not None or self.streams.used

        async def run() -> None:
            try:
                result = await (in_setting(awaitable, call, self.streams) if special else awaitable)
            except BaseException as error:
                self._fail(caller, call, error, user_name(function))
            else:
                self._send(caller, self._answer(caller, call, result, function))
            finally:
                self._count(-1)
                if on_end is not None:
                    on_end()

        asyncio.run_coroutine_threadsafe(run(), self._event_loop())

    def _count(self, change: int) -> None:
        with self._lock:
            self._running += change

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    threading.Thread(target=self._run_loop, args=(loop,), name="telegrad-asyncio", daemon=True).start()
                except BaseException:  # no memory, or no thread left: the next call tries again
                    loop.close()
                    raise
                self._loop = loop
            return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._entered()
        asyncio.set_event_loop(loop)
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def on_loop(self) -> bool:
        """Whether this thread runs the `async def` functions that others call."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            return False

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)


def open_call(frame: Frame, tensors: Sequence[Tensor]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and the arguments of a CALL."""
    references = frame.cargo.references if frame.cargo is not None else ()
    body = unload(frame.body)[0] if frame.flags & SCENE else frame.body
    value = decode(body, tensors, references)
    frame.blobs.clear()  # the tensors keep what they need
    if references:
        frame.cargo.references.clear()  # as do their handles
    if frame.head:
        args, kwargs = value
        return resolve(frame.head.decode()), args, kwargs
    function, args, kwargs = value
    return function, args, kwargs


def _handed_over(blobs: list[Blob]) -> Iterator[Blob]:
    """One by one, and held here no longer: what lies in a lent block frees it as soon as it is copied."""
    blobs.reverse()
    while blobs:
        yield blobs.pop()


def destination_of(call: Frame) -> Destination | None:
    cargo: Cargo | None = call.cargo
    return cargo.destination if cargo is not None else None


def its_future(function: Any, result: Any) -> Any:
    """The future that a function marked with async_execution returned, or the error that it is none."""
    if isinstance(result, torch._C.Future):
        return result
    name = getattr(function, "__qualname__", repr(function))
    if isinstance(getattr(function, "__wrapped__", None), torch.jit.ScriptFunction):
        kind = type(result).__name__
        return UsageError(f"{name}: Async functions must return an IValue of Future type, but got {kind}")
    return UsageError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
        f"{name} returned {type(result).__name__}"
    )


def _about_result(error: BaseException) -> BaseException:
    if isinstance(error, CannotEncode):
        said = CannotEncode(f"the function returned, but its result cannot be sent: {error}")
        said.__cause__ = error.__cause__
        return said
    return error
