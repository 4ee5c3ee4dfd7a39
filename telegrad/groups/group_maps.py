"""Maps: the calls of a function with each of many items, which are handed out to the workers of a group one by one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from telegrad.errors import CallCancelled, InvalidArgument
from telegrad.ext.calls import Agent, CallerContext
from telegrad.ext.feedback import checks
from telegrad.ext.host import raised_by_handler
from telegrad.groups.group_calls import GONE, GroupFuture, ResultSlot


def zipped(items: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a map; raise InvalidArgument if there are no items, or the lists have
    different lengths."""
    for each in items:
        if not checks.is_iterable(each):
            raise InvalidArgument(f"map takes lists of items, not {checks.short_repr(each)}")
    try:
        calls = list(zip(*items, strict=True))
    except ValueError as error:
        raise InvalidArgument("map got lists of different lengths: each call uses one item of each list") from error
    if not calls:
        raise InvalidArgument("map has no items: give it at least one")
    return calls


class MapFuture(GroupFuture[list[Any]]):
    """A future of a map. Each worker has one item at a time, and gets the next when it has finished one."""

    def __init__(
        self,
        agent: Agent,
        version: int,
        workers: Sequence[str],
        items: int,
        about: str,
        call: Callable[[ResultSlot, int], object],
    ) -> None:
        """`call(slot, place)` sends an item to the worker at that index."""
        super().__init__(agent, version, workers, range(items), about)
        self._call = call
        self._left = deque(self._slots)  # items not assigned yet; guarded by the lock, as is
        self._living = min(items, len(workers))  # the number of workers that have an item, or had one and may get more
        self._is_stopped = False  # stored before the calls to cancel are read
        self._turn = threading.local()  # `ended`: the slots that the loop of `_tell` on this thread goes on with
        self._context = CallerContext()  # other threads start later calls in the context of the current code

    def begin(self) -> MapFuture:
        try:
            # Take all first items before any call: else a fast worker could get an item meant for the next worker.
            for place, slot in enumerate([self._left.popleft() for _ in range(self._living)]):
                self._give(slot, place)
        except BaseException:
            self.heed()
            self.cancel()
            raise
        return self

    def _give(self, slot: ResultSlot, place: int) -> None:
        slot.place = place
        try:
            self._call(slot, place)
        except BaseException as error:
            # An error of the first item is raised to the caller of `map`: it is most likely an error of the program,
            # and no call was made yet. Later items end with their error like those that failed at a worker.
            if slot.key == 0 and not isinstance(error, GONE):
                raise
            interrupted = raised_by_handler(error)
            # A handler of a signal has raised this error, and it is raised again below. No further item must be sent
            # before that.
            slot.is_gone = slot.is_gone or interrupted
            slot.set_exception(error)
            if interrupted:
                raise
        # `cancel` stores the flag, then reads the calls in flight. It may have missed this one.
        if self._is_stopped and (call := slot.call) is not None:
            call.cancel()

    def _stop(self) -> bool:
        with self._lock:
            self._is_stopped = True
            left = list(self._left)
            self._left.clear()
        for slot in left:
            slot.set_exception(CallCancelled(f"{self.about} was cancelled before this item was sent"))
        return bool(left)

    def _tell(self, slot: ResultSlot) -> None:
        """Send the worker its next item before anything else, to keep it busy."""
        ended: deque[ResultSlot] | None = getattr(self._turn, "ended", None)
        if ended is not None:
            # A call below in this thread ended the slot. The loop there goes on with it: a recursion would be too deep
            # for many items that end at once, such as those that cannot be pickled.
            ended.append(slot)
            return
        self._turn.ended = ended = deque([slot])
        try:
            while ended:
                slot = ended.popleft()
                try:
                    self._hand_on(slot)
                finally:
                    super()._tell(slot)
        finally:
            del self._turn.ended
            # Some are left only if a handler of a signal has raised an error.
            for each in ended:
                self._tell(each)

    def _hand_on(self, slot: ResultSlot) -> None:
        """Give the next item to the worker of an ended one. If no worker is left, end the remaining items."""
        lost: list[ResultSlot] = []
        upcoming = None
        # A slot without a place was never given to a worker, so none is free for the next item: see `lost`.
        if slot.place >= 0:
            with self._lock:
                # A worker whose call was cancelled gets no more items, either: `cancel` cancels the calls in flight,
                # and must not be followed by the remaining items.
                if slot.is_gone or isinstance(slot.error, (*GONE, CallCancelled)):
                    self._living -= 1
                    if not self._living:  # no worker is left for the remaining items
                        lost = list(self._left)
                        self._left.clear()
                elif self._left:
                    upcoming = self._left.popleft()
        for each in lost:
            each.set_exception(slot.error)
        if upcoming is not None:
            # Not under the lock: this sends a call, and may end the slot at once with an error.
            self._context.run(self._give, upcoming, slot.place)
