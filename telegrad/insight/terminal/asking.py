"""What asks the source again and again, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from textual.app import App
from textual.timer import Timer

from telegrad.insight.source import Source
from telegrad.insight.watching import View, Watch
from telegrad.threads import Thread

T = TypeVar("T")


class Asking(App[None]):
    """Whatever may take long runs on threads beside the application's own."""

    def __init__(self, source: Source, interval: float) -> None:
        super().__init__()
        self.view: View | None = None
        self.failure = ""  # of the latest time that the source was asked
        self.paused = False
        self.interval = interval
        self._source = source
        self._watch = Watch()
        self.asking = False
        self.next_ask: Timer | None = None

    def renew(self) -> None:
        """Show what has changed."""
        raise NotImplementedError

    def aside(self, work: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Run `work` on a thread of its own, which keeps nobody from quitting, and give the app what came of it."""

        def run() -> None:
            try:
                outcome: T | Exception = work()
            except Exception as error:
                outcome = error
            self.call_later(then, outcome)

        Thread(target=run, name="telegrad-top").start()

    def _ask(self) -> None:
        if not self.asking:
            self.asking = True
            self.aside(lambda: self._watch.look(self._source), self._told)

    def _told(self, outcome: View | Exception) -> None:
        self.asking = False
        if isinstance(outcome, Exception):
            self.failure = f"{type(outcome).__name__}: {outcome}"
        else:
            self.view, self.failure = outcome, ""
        self._ask_later(self.interval)

    def _ask_later(self, seconds: float | None) -> None:
        """Ask after so many seconds, unless a pause is on or an answer is to come."""
        if self.next_ask is not None:
            self.next_ask.stop()
            self.next_ask = None
        if not self.paused and not self.asking and seconds is not None:
            self.next_ask = self.set_timer(seconds, self._ask)
        self.renew()
