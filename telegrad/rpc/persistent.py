"""Calls that do not fail at once: they wait for their worker, or are made once more where they may have run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from time import monotonic
from typing import Any, NamedTuple

import torch

from telegrad.agent import scene
from telegrad.agent.cancelling import Served, serving
from telegrad.agent.futures import Outcome
from telegrad.agent.naming import user_name
from telegrad.agent.pending_call import PendingCall
from telegrad.errors import CallCancelled, TelegradError
from telegrad.rpc.ledger import Settled
from telegrad.rpc.lobby import Fate, Manner, rest, verdict
from telegrad.rpc.returns import Returns, Waiting, fate_of
from telegrad.wire.failures import fresh


class Asked(NamedTuple):
    """What a call runs."""

    function: Any
    args: Any
    kwargs: Any
    keeps: Any
    asked: Any  # what the user has called


class Persistent(Waiting):
    """A call that is made as often as its manner wants it: the outcome of each time, and one call to its own outcome.

    Later times run for the code that has begun it: in its context, its grad mode, its autocast.
    """

    quick = False
    about: str

    def __init__(
        self,
        returns: Returns,
        to: str | int,
        make: Callable[[float], Asked],
        timeout: float,
        manner: Manner,
        number: int,
        outcome: Outcome,
    ) -> None:
        """`make` tells what to call, when there is so much time left; `number` is that of an idempotent call."""
        super().__init__(returns, to, timeout)
        self._first: Asked | None = make(timeout)
        self._name = user_name(self._first.asked)
        self.waits = manner.waits
        self.outcome = outcome
        self._call: PendingCall | None = None  # while it is made
        self.parent: Served | None = None  # for the sake of which call it is
        self.done = False
        self._make = make
        self._manner = manner
        self._number = number
        self._lock = threading.Lock()  # guards that `done` is set once
        self._cancelled = ""  # why, once it was
        self._lost: BaseException | None = None  # the first failure after which it may have run
        self._repeats = 0
        self._last: PendingCall | None = None  # the last call that was made, unless the last could not be
        self._context = copy_context()
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._autocast = scene.described()[0] if torch._C._is_any_autocast_enabled() else b""

    # Making it

    def admit(self) -> None:
        """It is about to begin: from now on its outcome is told, and can end it."""
        parent = serving.get()
        if parent is not None:
            parent.admit(self)
        self.outcome.call = self
        if parent is not None:
            parent.hold(self)

    def begin(self) -> None:
        """Make it for the first time; raises what keeps it from being made at all."""
        self.admit()
        try:
            self._attempt()
        except BaseException as error:
            if not isinstance(error, Exception) or not self._goes_on(error):
                self.conclude()
                raise

    def take_first(self) -> Asked:
        """What to call the first time, by who sees to that in place of `begin`."""
        first, self._first = self._first, None
        assert first is not None
        return first

    def _attempt(self) -> None:
        agent, left, self._last = self.returns.agent, self.timeout, None
        if self._first is not None:
            asked = self.take_first()
        else:
            if left:
                left = scene.Share.of(self.left(), f"the {self.timeout:g} s of this call")
            asked = self._make(left)
        agent.call_for(self, self.to, *asked[:3], left, asked.keeps, asked=asked.asked)

    def go(self, _: None) -> None:
        grad, inference = self._modes
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            self._context.copy().run(self._again)

    def _again(self) -> None:
        if self._cancelled:
            self.fail(CallCancelled(self._cancelled))
            return
        try:
            with self._caster():
                self._attempt()
        except BaseException as error:
            self.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _caster(self) -> AbstractContextManager[None]:
        return scene.holding(self._autocast, 0.0) if self._autocast else nullcontext()

    # What comes of it

    def set_result(self, result: Any) -> None:
        if self.conclude():
            self._settle()
            self.outcome.set_result(result)
            self.over.set_result()

    def set_exception(self, result: Any) -> None:
        if not self._goes_on(result):
            self.fail(result)

    def _goes_on(self, error: BaseException) -> bool:
        """Whether it is made once more, after it has failed so."""
        fate = self._fate(error)
        if self._cancelled or self.returns.agent.closed or not verdict(self._manner, fate, self._lost is not None):
            return False
        if fate is Fate.MAY_HAVE_RUN:
            self._lost = self._lost or fresh(error)
            self.rests_until = monotonic() + rest(self._repeats)
            self._repeats += 1
        if not self.returns.enter(self):
            return False
        if self._cancelled and self.returns.leave(self):  # since it was looked at
            self.fail(CallCancelled(self._cancelled))
        return True

    def _fate(self, error: BaseException) -> Fate:
        """What a failure means: of a call that was answered, that it has run, whatever the function has raised."""
        return Fate.OVER if self._last is not None and self._last.answer is not None else fate_of(error)

    def fail(self, error: BaseException) -> None:
        if not self.conclude():
            return
        if self._fate(error) is Fate.OVER:
            self._settle()
        if self._lost is not None:  # so it is not true that it has not run
            if fate_of(error) is Fate.NOT_RUN:
                error, self._lost = self._lost, error
            error.__cause__ = error.__cause__ or self._lost
        self.outcome.about = self.described
        self.outcome.set_exception(error.with_traceback(None))
        self.over.set_result()

    def conclude(self) -> bool:
        """It has ended; whether this is the one who tells that."""
        with self._lock:
            done, self.done = self.done, True
        if not done:
            if self.parent is not None:
                self.parent.ended(self)
            self.outcome.call = self._first = None
        return not done

    def _settle(self) -> None:
        """The callee need not keep the answer any longer."""
        if self._number and self._last is not None:
            who = self._last.peer.identity
            with contextlib.suppress(TelegradError):
                self.returns.agent.notify(who.name, Settled(self._number), who.incarnation, patient=True)

    # As an outcome, as the call of its own one, and as one that is made for the sake of another

    @property
    def call(self) -> PendingCall | None:
        """The call that is under way."""
        return self._call

    @call.setter
    def call(self, call: PendingCall | None) -> None:
        self._call = call
        self._last = call or self._last

    @property
    def described(self) -> str:
        return f"{self._name} on worker {self.to!r}"

    @property
    def in_turn(self) -> scene.InTurn | None:
        call = self.call
        return None if call is None else call.in_turn

    def help(self) -> None:
        """Wait until it has ended, reading an answer by this thread where it can."""
        call = self.call
        if call is not None:
            call.help()
        if not self.over.done():
            self.wait()

    def cancel(self, why: str = "") -> bool:
        """End it now; False where it is over."""
        if self.done:
            return False
        self._cancelled = f"{self.described} was cancelled{why and ': '}{why}"
        call = self.call
        if (call is None or not call.cancel(why)) and self.returns.leave(self):
            self.fail(CallCancelled(self._cancelled))
        return True

    def __repr__(self) -> str:
        return f"<persistent call of {self.described}: {'over' if self.done else self._last or 'not made yet'}>"
