"""Workers ask each other what they are at. Nothing of it waits for a slot, or for a function of the user to end."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from telegrad.errors import TelegradError, UnknownWorker
from telegrad.ext.calls import Agent
from telegrad.ext.processes import Thread
from telegrad.ext.texts import safe
from telegrad.ext.workers import Identity
from telegrad.reporting.decoding import CALL, Malformed, decode

PATIENCE = 1.5  # seconds
AT_ONCE = 0.1  # seconds, for the word on a call whose time is over
BETWEEN = 0.1  # seconds between two such questions
SILENT = "it did not answer within {:g} s, though its connection stands"


class Inspect(NamedTuple):
    """What are you at? `topic` says what the answer shall be about."""

    number: int
    topic: str
    after: float


class Inspected(NamedTuple):
    """The answer, as JSON."""

    number: int
    text: bytes


class _Round(NamedTuple):
    """A question to several workers."""

    answers: dict[str, bytes]
    came: threading.Event


class Inquiry:
    """One worker's questions and answers."""

    def __init__(self, agent: Agent, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` gives something that JSON can say; it is called on a thread of its own."""
        self._agent = agent
        self._answer = answer
        self._next_word: dict[str, float] = {}  # when a callee may be asked again; unlocked: one more is no harm
        self._numbers = itertools.count(1)  # `next` is atomic
        self._rounds: dict[int, _Round] = {}  # no lock: each use is one operation of a dict
        agent.on(Inspect, self._on_ask)
        agent.on(Inspected, self._on_told)
        agent.layers.last_word = self.last_word

    def ask(
        self,
        names: Iterable[str],
        topic: str,
        after: Callable[[str], float] = lambda _: 0.0,
        patience: float = PATIENCE,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The answers of those workers, and why the others gave none; takes as long as the slowest, or `patience`."""
        until = monotonic() + patience
        number = next(self._numbers)
        answers: dict[str, bytes] = {}
        silent: dict[str, str] = {}
        asked = self._rounds[number] = _Round(answers, threading.Event())
        try:
            for name in names:
                try:
                    self._agent.notify(name, Inspect(number, topic, after(name)))
                except UnknownWorker:
                    silent[name] = "it has left the group, or has died"
                except TelegradError as error:
                    silent[name] = str(error)
                else:
                    silent[name] = SILENT.format(patience)
            waited = {name for name, why in silent.items() if why == SILENT.format(patience)}
            while not waited <= answers.keys() and asked.came.wait(max(0.0, until - monotonic())):
                asked.came.clear()
        finally:
            del self._rounds[number]
        told: dict[str, Any] = {}
        for name, text in answers.copy().items():
            try:
                told[name] = decode(topic, text)
            except Malformed as error:
                silent[name] = f"its answer is none: {error}"
        return told, {name: safe(why) for name, why in silent.items() if name not in told}

    def last_word(self, callee: Identity, number: int) -> str:
        """What a worker is at with a call from here, for the end of a sentence; empty where it does not say so soon."""
        now = monotonic()
        if now < self._next_word.get(callee.name, 0.0):
            return ""  # many calls end at once: the first of them tells
        self._next_word[callee.name] = now + BETWEEN
        answers, _ = self.ask([callee.name], CALL, lambda _: number, AT_ONCE)
        return str(answers.get(callee.name) or "")

    def _on_ask(self, sender: Identity, message: Inspect) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # there is no thread left: it stays silent
            Thread(target=self._tell, args=(sender, message), name="telegrad-witness").start()

    def _tell(self, sender: Identity, message: Inspect) -> None:
        about = (sender.name, message.after) if message.topic == CALL else message.after
        text = json.dumps(self._answer(message.topic, about)).encode()
        with contextlib.suppress(TelegradError):  # who asked has gone
            self._agent.notify(sender.name, Inspected(message.number, text), sender.incarnation)

    def _on_told(self, sender: Identity, message: Inspected) -> None:
        asked = self._rounds.get(message.number)
        if asked is not None:
            asked.answers[sender.name] = message.text
            asked.came.set()
