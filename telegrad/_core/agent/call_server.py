"""Serves incoming calls: finds the function, restores the caller's context, sends the answer.

The reader thread only queues messages (`on_messages`): it is often the leader, and must not wait. A thread of the
reactor runs the call (`_run`). Calls of actors are first opened and admitted, in the caller's order (`_run_in_order`).
A call is in `Caller.calls` from its arrival until its answer was sent. Any error between the two must reach `_fail`,
which sends it as the answer: the caller would wait forever otherwise.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, perf_counter, sleep
from types import CoroutineType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core import events, processes
from telegrad._core.agent.backlog import FEW, BackPressure
from telegrad._core.agent.incoming import (
    Answers,
    Caller,
    CallScheduler,
    Handlers,
    Incoming,
    Layers,
    Refused,
    its_future,
)
from telegrad._core.calls import profiling
from telegrad._core.calls.call_context import entered, in_setting
from telegrad._core.calls.call_names import NAMED, NEXT_ITEMS, RUNS, shown_names, user_name
from telegrad._core.calls.cancelling import FINISHING, MUST_FINISH, finishes, serving
from telegrad._core.calls.futures import Future, Signal, forget
from telegrad._core.calls.settings import Settings
from telegrad._core.events import RAN
from telegrad._core.membership.members import Identity
from telegrad._core.memory.device_streams import NO_TURN, Streams
from telegrad._core.pickling.exceptions import readable
from telegrad._core.pickling.function_names import resolve
from telegrad._core.pickling.pickling import decode
from telegrad._core.reactor.leader_threads import EventLoop
from telegrad._core.reactor.reactor import Reactor, submit_here
from telegrad._core.reactor.scheduler import Work
from telegrad._core.transport.connect import LoopEnd
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import (
    CALL,
    CANCEL,
    HAS_CALL_CONTEXT,
    HAS_REFERENCES,
    KINDS,
    LOW_PRIORITY,
    NOTICE,
    REFUSAL,
    Message,
    split,
    unknown,
)
from telegrad.errors import CallCancelled, PeerError, ProtocolViolation, TelegradError

SHORT = 300e-6  # seconds; a function that took less last time, until its first wait, is expected to be short again
HANDING_OVER = 300e-6  # seconds that a hand-over of the lead may add to the measured time of a function
REFERENCE = 1 << 10  # bytes that a reference among the arguments is assumed to hold
ASYNC_MARK = "_telegrad_async_execution"
log = logging.getLogger("telegrad")


class Deferred(NamedTuple):
    """Returned by functions of this package whose value is that of a future or of a slot."""

    future: torch.futures.Future[Any] | Signal
    function: Any  # the function that made the future, or its name


class Server:
    """The callee's side of an agent."""

    def __init__(
        self,
        settings: Settings,
        reactor: Reactor,
        layers: Layers,
        streams: Streams,
        entered: Callable[[], None],
        undelivered: Callable[[Identity, PeerError], None],
    ) -> None:
        """`entered` is called on each new thread that runs user code.

        `undelivered` is called if an answer with references finds its connection closed.
        """
        self.name = ""
        self._reactor = reactor
        self._layers = layers
        self._streams = streams
        self.handlers = Handlers()
        self.answers = Answers(reactor, layers, streams, undelivered)
        self._runs = self._run  # one bound method for all calls: fewer objects for the garbage collector
        self.intake = BackPressure(reactor, settings.most_waiting, settings.most_waiting_bytes)
        self.answers.sent_memory = self.intake.sent
        self.loop = EventLoop(entered)
        self.call_scheduler: CallScheduler | None = None
        self.orders = False  # also ask the call_scheduler about functions that are known to be short
        self.wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # returns the function to run
        # By function name, which functions that are sent by value do not have: these count as one. A guess: single
        # reads and writes of any thread.
        self._short: dict[bytes, bool] = {}
        self._short_in_order: dict[bytes, bool] = {}  # the same for ordered functions
        self.at_once: set[bytes] = set()  # names of functions that need no slot; filled before the first call
        self.served = 0  # number of calls that have begun; approximate, since threads may miscount it
        # No lock: each use is one operation of a dict or a set.
        # Calls whose functions returned a future or a coroutine, and the coroutine
        self.going_on: dict[Incoming, CoroutineType[Any, Any, Any] | None] = {}
        self.in_turn: set[Incoming] = set()  # ordered calls that wait for their turn, or run
        self._notices: set[Incoming] = set()  # unhandled control messages, except patient ones

    @property
    def idle(self) -> bool:
        return not (self.going_on or self.in_turn) and self._reactor.idle

    def on_messages(self, caller: Caller, link: Link | LoopEnd, messages: Iterable[Message]) -> None:
        """Handle messages of a caller; raise ProtocolViolation if two calls have one number, or as `_take_other`
        does."""
        calls = caller.calls
        patient: list[Work] = []
        for message in messages:
            come = Incoming(caller, link, message)
            size = 0
            if message.flags:
                come.came = monotonic()
                if message.flags & HAS_REFERENCES:
                    come.attachments = self._layers.take_attachments(message, caller.identity)
                    size = REFERENCE * len(come.attachments.references)
            size += len(message.body)
            for blob in message.blobs:
                size += blob.nbytes
            if message.kind != CALL:
                self._take_other(caller, link, come, size, patient)
                continue
            if calls.setdefault(message.id, come) is not come:
                raise ProtocolViolation(f"two calls have the number {message.id}")
            if (come.attachments is not None and (excess := come.attachments.refusal) is not None) or (
                len(calls) > FEW and (excess := self.intake.excess(caller)) is not None
            ):
                # On another thread: describing an error takes longer than reading a call, and others wait for the
                # reader thread.
                self._reactor.submit(Work(partial(self.answers.refuse, excess), come, size=size), caller.control)
                continue
            head = message.head
            short = self._short.get(head)
            if (not short or self.orders) and self.call_scheduler is not None and self.call_scheduler.heeds(head):
                caller.ordered.append(come)
                work = Work(self._run_in_order, caller, not self._short_in_order.get(head), size)
                self._reactor.submit(work, caller.queue)
            # A pull of a stream must run although the function of the stream holds the last slot. A caller that does
            # not read its answers gets no exception: each of these calls makes an answer, too.
            elif head in self.at_once and not caller.queue.is_held_up:
                self._reactor.submit(Work(self._runs, come, size=size), caller.control)
            else:
                self._reactor.submit(Work(self._runs, come, not short, size), caller.queue)
        if patient or len(calls) > FEW or len(caller.control.works) > FEW:
            for work in patient:
                self._reactor.submit(work, caller.control)
            self.intake.check(caller, link)

    def _take_other(self, caller: Caller, link: Link | LoopEnd, come: Incoming, size: int, patient: list[Work]) -> None:
        """Handle a message that is no call, or raise ProtocolViolation for one that is no request either; add it to
        `patient` if it may wait for the calls that came with it."""
        message = come.message
        if message.kind == NOTICE:
            work = Work(self._notice, come, size=size)
            if message.flags & LOW_PRIORITY:
                patient.append(work)
            else:
                self._notices.add(come)
                submit_here(self._reactor, work, caller.control)
        elif message.kind == CANCEL:
            self._cancel(caller.calls.get(message.id))
            self.intake.cancelled(caller)
        elif message.kind < len(KINDS) or not message.id:
            raise ProtocolViolation(unknown(message.kind))
        else:  # a request of a kind that this version does not know; others have no known meaning
            log.warning("telegrad: worker %r sent %s", caller.name, unknown(message.kind))
            link.send(Message(REFUSAL, message.id, head=unknown(message.kind).encode()))

    def lost(self, caller: Caller) -> None:
        """Cancel the calls of a caller that has gone, except those whose values others may hold references to."""
        for call in list(caller.calls.values()):
            if call.destination is None:
                self._cancel(call)
        self.intake.lost(caller)

    def _cancel(self, call: Incoming | None) -> None:
        """Cancel a call unless it has ended; if it has not begun, it will not run."""
        if call is not None:
            call.cancelled = True
            if call.message.id not in call.caller.calls:  # it has ended meanwhile
                call.cancelled = False
            elif call.stop is not None or call.nested:
                self._reactor.submit(Work(Incoming.end, call))

    def _notice(self, come: Incoming) -> None:
        sender = come.caller.identity
        try:
            with self._streams.turn() if self._streams.used else NO_TURN:
                _, tensors = self._layers.take_tensors(come.message, sender, self.name)
                self.handlers.take(sender, pickle.loads(come.message.body), tensors)
        finally:
            self._notices.discard(come)
        if self.intake.stopped:
            self.intake.look(come.caller)

    def handle_notices(self, timeout: float) -> bool:
        """Wait until all control messages that have arrived so far are handled; return False on a timeout."""
        # A call may end before an earlier control message was handled, since threads take turns.
        until, come = monotonic() + timeout, self._notices.copy()
        if come:  # otherwise the thread keeps its lead and its slot
            with self._reactor.waiting():
                while not come.isdisjoint(self._notices) and monotonic() < until:
                    sleep(1e-4)
        return come.isdisjoint(self._notices)

    def _run(self, call: Incoming) -> None:
        try:
            if self._streams.used:
                with self._streams.turn():
                    self._serve(call)
            else:
                self._serve(call)
        except BaseException:
            self._fail(call, call.name)
        if self.intake.stopped:
            self.intake.look(call.caller)

    def _serve(self, call: Incoming, ordered: bool = False) -> None:
        self.served += 1
        start = call.begun = perf_counter()
        function: Any = None
        args: Any = None
        message = call.message
        try:
            function, args, kwargs = call.take() if ordered else self._open(call)
            if self.wrap is not None:
                function = self.wrap(function)
            if events.note is not None:
                known = shown_names.get(function) if type(function) in NAMED else None
                call.name = known or user_name(function, args)
            run = function
            if profiling.follower is not None:
                run = profiling.follower.in_place_of(function, args, self.name, call.caller.name)
            token = serving.set(call)
            try:
                if message.flags or call.context is not None:
                    with call.setting():
                        result = run(*args, **kwargs)
                else:
                    result = run(*args, **kwargs)
            finally:
                serving.reset(token)
                if not torch.is_grad_enabled():  # the function may have called `torch.set_grad_enabled(False)`
                    torch.set_grad_enabled(True)
            args = None  # memory lent for the arguments is then released together with the answer
            del kwargs
            durations = self._short_in_order if ordered else self._short
            # The time includes decoding, which keeps the leader from its connections, too. A function that is not known
            # to be short has run after a hand-over of the lead, which may have added to its time.
            limit = SHORT if durations.get(message.head) else SHORT + HANDING_OVER
            runner = self._reactor.here.own
            until = runner.waited if runner is not None else 0.0  # when it first waited
            durations[message.head] = (until or perf_counter()) - start < limit
            if type(result) is CoroutineType:
                self._await(call, result, result if hasattr(function, RUNS) else function, ordered)
            elif type(result) is Deferred:
                self._when_done(call, result.future, result.function)
            elif hasattr(function, ASYNC_MARK):
                self._when_done(call, its_future(function, result), function)
            else:
                answer = self.answers.made_of(call, result, function)
                del result  # as above: it may be one of the arguments
                _note(call)
                self.answers.send(call, answer)
        except BaseException:
            call.name = call.name or (user_name(function, args) if function is not None else "")
            self._fail(call, call.name)

    def _fail(self, call: Incoming, name: str, error: BaseException | None = None) -> None:
        """End a call, at any step of serving it, with an error: the given one, or the one that is being handled.

        The `except` blocks that call this have no variable for the error. Their frame is in its traceback, and keeps a
        copy of its variables once a debugger or `why()` has read them. With the error in that copy, the two would be a
        reference cycle, and the error would stay in memory.
        """
        error = sys.exc_info()[1] if error is None else error
        assert error is not None
        try:
            if call.message.id not in call.caller.calls:  # it has its answer
                log.error("telegrad: work of the agent failed", exc_info=error)
                return
            refused = error.args[0] if isinstance(error, Refused) else None
            if call.begun:
                _note(call, error if refused is None else refused)
            if refused is not None:
                self.answers.refuse(refused, call)
            else:
                self.answers.fail(call, error, name)
        except BaseException as fault:  # of a filter of the log, for example
            self.answers.give_up(call, fault)
        finally:
            self._end_going_on(call)

    def _open(self, call: Incoming) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        message, attachments = call.message, call.attachments
        body = message.body
        tensors: Sequence[Tensor] = ()
        if message.meta or message.flags:
            call.context, tensors = self._layers.take_tensors(message, call.caller.identity, self.name)
            body = split(message.body)[0] if message.flags & HAS_CALL_CONTEXT else message.body
        value = decode(body, tensors, attachments.references if attachments is not None else ())
        message.blobs = ()  # the tensors keep the memory that they need
        if attachments is not None:
            attachments.references.clear()  # their handles keep what they need
        if message.head:
            args, kwargs = value
            function = resolve(message.head.decode())
            if message.head not in self.intake.may_drop:
                self.intake.note(message.head, hasattr(function, MUST_FINISH))
        else:
            function, args, kwargs = value
        if call.cancelled:
            call.check_begins(finishes(function, args))
        return function, args, kwargs

    # Ordered calls

    def name_is(self, name: str) -> None:
        self.name = self.answers.name = name

    def _run_in_order(self, caller: Caller) -> None:
        # Each call in `ordered` has a work, and a work opens the first call there. If another thread is opening one, no
        # call is lost: each call is appended before its work is submitted, and that thread looks at `ordered` after it
        # has released `opening`.
        if not caller.opening.acquire(blocking=False):
            return
        call = None
        try:
            if caller.ordered:
                call = caller.ordered.popleft()
                may_run = self._admit(call)
        finally:
            caller.opening.release()
        # Before this call runs, which may take long: the caller's next call may be for another actor. One work opens
        # one call, so that the works of other callers have their turns between.
        if caller.ordered:
            self._reactor.submit(Work(self._run_in_order, caller, is_long=True), caller.queue)
        if call is not None and may_run:
            self._perform(call)

    def _admit(self, call: Incoming) -> bool:
        assert self.call_scheduler is not None
        try:
            with self._streams.turn():
                call.opened(self._open(call))
                # Before `admit`: another thread may run the call as soon as the call_scheduler knows it, and removes it
                # from `in_turn` then.
                self.in_turn.add(call)
                return self.call_scheduler.admit(call)
        except BaseException as error:
            self.refuse(call, error)
            return False

    def perform(self, call: Incoming) -> None:
        """Run a call that was not admitted at once."""
        is_long = not self._short_in_order.get(call.message.head)
        self._reactor.submit(Work(self._perform, call, is_long), call.caller.queue)

    def _perform(self, call: Incoming) -> None:
        try:
            with self._streams.turn(), entered(call.call_context):
                self._serve(call, ordered=True)
        except BaseException:
            self._fail(call, call.name)
        finally:
            self.in_turn.discard(call)
            if (on_end := call.take_end()) is not None:
                on_end()

    def refuse(self, call: Incoming, error: BaseException) -> None:
        """Fail a call that was not admitted at once and will not run."""
        self.in_turn.discard(call)
        name = user_name(call.function, call.args) if hasattr(call, "function") else ""
        self._fail(call, name, error)

    # Functions that continue after they return

    def _when_done(self, call: Incoming, future: Any, function: Any) -> None:
        if not isinstance(future, torch._C.Future | Signal):
            self._fail(call, user_name(function), future)
            return
        self.going_on[call] = None
        first = iter((True,))  # for the first of the functions below, which ends the call

        def done(future: Any) -> None:
            try:
                if next(first, False):
                    self._answer(call, future.wait(), function)
            except BaseException:
                self._fail(call, user_name(function))

        # Other code of the program may complete the future, or never do so. The call ends without it, as nobody waits
        # for the value: `shutdown` would wait for the call.
        def stop() -> None:
            if not (isinstance(future, Future) and future.cancel()) and call.destination is None and next(first, False):
                self._fail(call, user_name(function), CallCancelled(call.described))
                forget(future, done)

        # `stop` is stored before `cancelled` is read. A thread that cancels the call stores `cancelled` and then reads
        # `stop`, so one of the two stops the function.
        if call.stop is None and not finishes(function, ()):
            call.stop = stop
        if call.cancelled and not future.done():
            self._reactor.submit(Work(Incoming.end, call))
        future.add_done_callback(done)  # last, since an error of the above ends the call

    def _await(self, call: Incoming, awaitable: CoroutineType[Any, Any, Any], function: Any, ordered: bool) -> None:
        self.going_on[call] = awaitable
        # The turn of the actor ends with the coroutine, not with `_perform`. If the loop cannot start, `on_end` is put
        # back, and `_perform` ends the turn.
        on_end = call.take_end() if ordered else None

        async def run() -> None:
            try:
                serving.set(call)
                call.stop = self.loop.stopper(lambda: call.stop is not None)
                if call.cancelled and awaitable.cr_code not in FINISHING:
                    call.check_begins(finishes=False)
                self._answer(call, await in_setting(awaitable, call.setting, self._streams), function)
            except BaseException:
                self._fail(call, user_name(function))
            finally:
                if on_end is not None:
                    on_end()
                awaitable.close()  # perhaps it has not begun

        try:
            self.loop.run(run())
        except BaseException:
            awaitable.close()
            call.on_end = on_end
            what = f"worker {self.name!r} could not begin {user_name(function)}", TelegradError
            with processes.translate_error(*what):
                raise

    def _answer(self, call: Incoming, result: Any, function: Any) -> None:
        _note(call)
        self.answers.send(call, self.answers.made_of(call, result, function))
        self._end_going_on(call)

    def _end_going_on(self, call: Incoming) -> None:
        call.stop = None
        self.going_on.pop(call, None)


def _note(call: Incoming, error: Any = None) -> None:
    """Emit the event that an incoming call has ended."""
    if (note := events.note) is not None and (call.name or not call.cancelled):  # else it has not begun
        number = call.message.id
        failed = call.cancelled and not call.name.startswith(NEXT_ITEMS)
        # a cancelled call has been cancelled however its function ended
        failure = CallCancelled.__name__ * failed or ("" if error is None else type(readable(error)).__name__)
        note((RAN, call.begun, perf_counter(), call.caller.name, number, call.name, failure))
