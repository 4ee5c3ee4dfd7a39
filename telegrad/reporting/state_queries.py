"""Queries between workers about their state. They wait neither for a slot nor for a user function to end."""

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
AT_ONCE = 0.1  # seconds, for the question about a call that timed out
BETWEEN = 0.1  # minimum seconds between two such questions to one callee
SILENT = "it did not answer within {:g} s, although its connection is open"


class Inspect(NamedTuple):
    """A query of a worker's state; `topic` says which part."""

    number: int
    topic: str
    after: float


class Inspected(NamedTuple):
    """The answer to an Inspect, as JSON."""

    number: int
    text: bytes


class _Round(NamedTuple):
    """A query sent to several workers."""

    answers: dict[str, bytes]
    came: threading.Event


class StateQueries:
    """Sends and answers the queries of one worker."""

    def __init__(self, agent: Agent, answer: Callable[[str, Any], Any]) -> None:
        """`answer(topic, after)` returns a value that JSON can encode; it is called on its own thread."""
        self._agent = agent
        self._answer = answer
        # When a callee may be asked again; unlocked, since an extra question is harmless.
        self._next_word: dict[str, float] = {}
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
        """Return the answers of the workers, and why the others gave none. Block until all answered, for `patience` at
        most."""
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
                    silent[name] = "it left the group, or died"
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
                silent[name] = f"its answer is invalid: {error}"
        return told, {name: safe(why) for name, why in silent.items() if name not in told}

    def last_word(self, callee: Identity, number: int) -> str:
        """Return the callee's state of a call from here, to append to a message; empty if it does not answer within
        AT_ONCE."""
        now = monotonic()
        if now < self._next_word.get(callee.name, 0.0):
            return ""  # many calls time out at once: only the first asks
        self._next_word[callee.name] = now + BETWEEN
        answers, _ = self.ask([callee.name], CALL, lambda _: number, AT_ONCE)
        return str(answers.get(callee.name) or "")

    def _on_ask(self, sender: Identity, message: Inspect) -> None:
        with contextlib.suppress(RuntimeError, MemoryError):  # no thread can be started: do not answer
            Thread(target=self._tell, args=(sender, message), name="telegrad-witness").start()

    def _tell(self, sender: Identity, message: Inspect) -> None:
        about = (sender.name, message.after) if message.topic == CALL else message.after
        text = json.dumps(self._answer(message.topic, about)).encode()
        with contextlib.suppress(TelegradError):  # the asking worker has gone
            self._agent.notify(sender.name, Inspected(message.number, text), sender.incarnation)

    def _on_told(self, sender: Identity, message: Inspected) -> None:
        asked = self._rounds.get(message.number)
        if asked is not None:
            asked.answers[sender.name] = message.text
            asked.came.set()
