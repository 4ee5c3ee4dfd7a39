"""Outgoing gradients of one worker's part of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._core.agent.agent import Agent
from telegrad._core.membership.members import Identity
from telegrad.autograd.passes import NOWHERE, WITHOUT, Key, PackedShipment, PassReport, PassSpec
from telegrad.autograd.record import AutogradContext

SMALL = 4096  # bytes

Gradients = list[tuple[int, Sequence[Any]]]  # of messages, by their numbers


def packed(
    spec: PassSpec, key: Key, gradients: Gradients, report: PassReport | None
) -> tuple[PackedShipment, list[Tensor]]:
    """Return the message for gradients of several sent messages, with an optional report, and its tensors."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}  # a gradient often goes to several tensors of a message
    slots: list[tuple[int, list[int | None]]] = []
    for number, several in gradients:
        own: list[int | None] = []
        for gradient in several:
            if gradient is None or gradient is WITHOUT:
                own.append(None if gradient is None else NOWHERE)
                continue
            place = places.setdefault(id(gradient), len(tensors))
            if place == len(tensors):
                tensors.append(gradient if spec.create else _lean(gradient))
            own.append(place)
        slots.append((number, own))
    shipment = PackedShipment(tuple(spec), key, slots, None if report is None else report[1:])  # type: ignore[arg-type]
    return shipment, tensors


def _lean(gradient: Tensor) -> Tensor:
    """Return a small gradient in contiguous form.

    Its data is often one repeated number, and copying costs less than describing it.
    """
    if gradient.layout is torch.strided and gradient.nbytes < SMALL and not gradient.is_contiguous():
        return gradient.contiguous()
    return gradient


class Outbox:
    """Outgoing gradients of one pass, gathered while more for the same worker are about to come."""

    def __init__(
        self,
        agent: Agent,
        context: AutogradContext,
        spec: PassSpec,
        rides_with_report: bool,
        gathers: Callable[[Outbox], None],
    ) -> None:
        """`gathers` is called when gradients begin to wait for others; it must have `send_early` called soon.

        If this worker's part is expected to be short, gradients for the driver wait for the report and leave with it.
        """
        self.spec = spec
        self.rides_with_report = rides_with_report  # never True again after `send_early`
        self.reached: set[str] = set()  # workers to which something was sent
        self._agent = agent
        self._gathers = gathers
        self._context = context
        # Guards changes of the fields below while _ready holds anything. Gradients leave _ready when they are in _sent.
        # So a thread that finds nothing there, which needs no lock, can make the report.
        self._lock = threading.Lock()
        self._ready: dict[Identity, Gradients] = {}
        self._sent: list[tuple[Key, str]] = []  # since the last report
        self._keys = 0

    def key(self, worker: str) -> Key:
        """Record that a message is sent to a worker now; return its key."""
        self.reached.add(worker)
        self._keys += 1
        key = self._agent.name, self._keys
        self._sent.append((key, worker))
        return key

    def pop_sent(self) -> list[tuple[Key, str]]:
        """Remove and return the messages sent since the last report."""
        sent, self._sent = self._sent, []
        return sent

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Queue gradients for one message of a worker. `more`: the same step will bring others for that worker."""
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            first = not gathered
            gathered.append((number, gradients))
        if not (more or (self.rides_with_report and worker.name == self.spec.driver)):
            self.send(worker)
            return
        self._agent.streams.publish()  # another thread may send them
        if first:
            self._gathers(self)

    def flush(self) -> None:
        """Send all gradients except those that wait for the report."""
        for worker in self._waiting():
            if not (self.rides_with_report and worker.name == self.spec.driver):
                self.send(worker)

    def _waiting(self) -> Sequence[Identity]:
        """Return the workers for which gradients wait."""
        if not self._ready:
            return ()
        with self._lock:
            return list(self._ready)

    def send_early(self) -> None:
        """Stop waiting for other gradients, since this worker's part takes long."""
        self.rides_with_report = False
        self.flush()

    def send_with(self, report: Callable[[], PassReport]) -> bool:
        """Send the gradients for the driver together with the report.

        Return False if there are none, as after `send_early`.
        """
        sent = False
        for worker in self._waiting():
            if worker.name == self.spec.driver:
                sent |= self.send(worker, report)
        return sent

    def send(self, worker: Identity, report: Callable[[], PassReport] | None = None) -> bool:
        """Send the gradients for a worker, and the result of `report` with them. Return False if there are none."""
        with self._lock:
            gathered = self._ready.get(worker)
            if gathered is None:
                return False
            key = self.key(worker.name)
            del self._ready[worker]
        streams = self._agent.streams
        if streams.used:
            streams.adopt(*(each for _, gradients in gathered for each in gradients))
        shipment, tensors = packed(self.spec, key, gathered, report and report())
        context = self._context if self.spec.create else None
        self._agent.notify(worker.name, shipment, worker.incarnation, tensors, context)
        return True
