"""Maps: items that are handed out to the workers of a group, one at a time to each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from typing import Any

import torch

from telegrad import checks
from telegrad.agent import profiling
from telegrad.agent.agent import Agent
from telegrad.agent.naming import user_name
from telegrad.errors import CallCancelled, InvalidArgument
from telegrad.group.members import WorkerInfo
from telegrad.interrupts import raised_by_handler
from telegrad.rpc import current, persistence
from telegrad.rpc.conversion import convert
from telegrad.rpc.groupcalls import GONE, GroupFuture, Share, begin_event
from telegrad.rpc.lobby import Manner
from telegrad.rpc.sharing import Sharing


def begin(
    version: int,
    workers: Sequence[WorkerInfo],
    function: Callable[..., Any],
    items: Sequence[Iterable[Any]],
    timeout: float,
    manner: Manner | None = None,
) -> GroupFuture:
    """Call `function` with each item, on whichever worker is free."""
    each = zipped(items)
    names = [worker.name for worker in workers]
    calls = [convert(function, args, None) for args in each]
    agent = current.agent()

    def call(share: Share, place: int) -> None:
        item = calls[share.number]
        if profiling.wanted():
            begin_event(agent, share, names[place], item, timeout, manner)
        elif manner is not None:
            persistence.begin(share, manner, names[place], item, timeout)
        else:
            agent.call_for(
                share, names[place], item.function, item.args, item.kwargs, timeout, item.keeps, asked=item.asked
            )

    return Handout(agent, version, names, len(calls), user_name(function), call).begin()


def zipped(items: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """The arguments of each call.

    Raises:
        InvalidArgument: there are none, or the lists are not as long as one another.
    """
    for each in items:
        if not checks.is_iterable(each):
            raise InvalidArgument(f"map takes lists of items, not {checks.shown(each)}")
    try:
        calls = list(zip(*items, strict=True))
    except ValueError as error:
        raise InvalidArgument("map was given lists of different lengths: each call takes one item of each") from error
    if not calls:
        raise InvalidArgument("map has no items: give it at least one")
    return calls


class Unusable(Exception):
    """A worker, or its value, is not to be given any more items, for that reason."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class Handout:
    """Items on their way through the workers of a group, each of which has one at a time."""

    def __init__(
        self,
        agent: Agent,
        version: int,
        workers: Sequence[str],
        items: int,
        about: str,
        call: Callable[[Share, int], None],
    ) -> None:
        """`call(share, place)` calls the worker at that place, for an item; it may raise Unusable."""
        self._future = GroupFuture(agent, version, workers, range(items), about)
        self._call = call
        self._lock = threading.Lock()  # guards _sharing
        self._sharing = Sharing(items, len(workers))
        # Later items are given by other threads, for the code that runs here now.
        self._mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._context = copy_context()

    def begin(self) -> GroupFuture:
        try:
            for number, place in self._sharing.begin():
                self._give(number, place)
        except BaseException:
            self._future.heed()
            self._future.cancel()
            raise
        return self._future

    def _give(self, number: int, place: int) -> None:
        share = self._future._shares[number]
        handed = _Handed(self, share, place)
        try:
            self._call(handed, place)  # type: ignore[arg-type]
        except Unusable as unusable:
            handed.set_exception(unusable.error, gone=True)
        except BaseException as error:
            if number == 0 and not isinstance(error, GONE):  # nothing was sent yet
                raise
            interrupted = raised_by_handler(error)
            handed.set_exception(error, gone=interrupted)
            if interrupted:
                raise

    def ended(self, place: int, error: BaseException | None, gone: bool) -> None:
        """A worker is through with an item: it gets the next one, unless it is gone."""
        with self._lock:
            next_one, lost = self._sharing.ended(place, gone)
        for number in lost:
            self._future._shares[number].set_exception(error)
        if next_one is None:
            return
        grad, inference = self._mode
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            self._context.copy().run(self._give, next_one, place)


class _Handed:
    """The outcome of one item's call."""

    quick = False
    about: str

    def __init__(self, handout: Handout, share: Share, place: int) -> None:
        self._handout = handout
        self._share = share
        self._place = place
        self.number = share.number

    @property
    def call(self) -> Any:
        return self._share.call

    @call.setter
    def call(self, call: Any) -> None:
        self._share.call = call

    def set_result(self, result: Any) -> None:
        self._handout.ended(self._place, None, False)
        self._share.set_result(result)

    def set_exception(self, result: Any, gone: bool = False) -> None:
        self._handout.ended(self._place, result, gone or isinstance(result, (*GONE, CallCancelled)))
        self._share.set_exception(result)
