"""Outgoing gradients of one worker's part of a pass.

Gradients for one worker that become ready in the same step share a message. The last gradients of a step wait for this
worker's report, which is known a moment later, and take it along, with the reports that other workers sent here. If the
step takes longer than expected, the timer thread sends all that waits: other workers need the gradients, and the driver
needs the reports to know the workers that have tasks.

Two threads send: the one that runs the tasks, and the timer thread. The report must name every message that has left
before it, because the driver counts them. This is the order that keeps it true:

1. A message gets its key, which puts it into `sent`, and then leaves `_ready`, both under the lock.
2. The thread that runs the tasks sends all that it finds in `_ready`, and only then takes `sent` for the report.

So gradients that the timer has taken from `_ready` are in `sent` before the other thread can find `_ready` empty. And
the thread that wants to send its report with the last gradients learns from `send` whether they were still there. If
not, the report goes to the driver by itself.
"""

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

SMALL = 4096  # bytes of a gradient that is sent in contiguous form
MOST_CARRIED = 16  # reports that travel with gradients; longer chains of workers send some to the driver meanwhile

Gradients = list[tuple[int, Sequence[Any]]]  # of messages, by their numbers


def packed(
    spec: PassSpec, key: Key, gradients: Gradients, reports: Sequence[PassReport] = ()
) -> tuple[PackedShipment, list[Tensor]]:
    """Return the message for gradients of several sent messages, with reports for the driver, and its tensors."""
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
                # Often one repeated number, which is copied faster than described.
                if not spec.create and gradient.layout is torch.strided and gradient.nbytes < SMALL:
                    gradient = gradient.contiguous()
                tensors.append(gradient)
            own.append(place)
        slots.append((number, own))
    said = [report[1:] for report in reports] if reports else ()
    shipment = PackedShipment(tuple(spec), key, slots, said)  # type: ignore[arg-type]
    return shipment, tensors


class Outbox:
    """Outgoing gradients of one pass, gathered while more for the same worker are about to come; and reports."""

    def __init__(
        self, agent: Agent, context: AutogradContext, spec: PassSpec, is_short: bool, gathers: Callable[[Outbox], None]
    ) -> None:
        """`gathers` is called when gradients or reports begin to wait; it must have `send_early` called soon.

        If this worker's part is expected to be short, the last gradients of a step wait for the report and leave with
        it. The driver's own report is no message.
        """
        self.spec = spec
        self.context = context
        self.worker = agent.name
        self.holds = is_short and spec.driver != agent.name  # never True again after `send_early` had to send
        self.reached: set[str] = set()  # workers to which something was sent
        self._agent = agent
        self._gathers = gathers
        self._held: Identity | None = None  # gradients for this worker wait for the report
        # Guards changes of `sent` and the fields below while _ready holds anything. Gradients leave _ready when they
        # are in `sent`. So a thread that finds nothing there, which needs no lock, can make the report. While _ready is
        # empty, the timer thread changes neither `sent` nor _keys, so `key` and `LocalPart.report` need no lock then.
        self._lock = threading.Lock()
        self._ready: dict[Identity, Gradients] = {}
        self.sent: list[tuple[Key, str]] = []  # messages since the last report, and their recipients
        self._carried: list[PassReport] = []  # of other workers
        self._keys = 0

    def key(self, worker: str) -> Key:
        """Record that a message is sent to a worker now; return its key."""
        self.reached.add(worker)
        self._keys += 1
        key = self.worker, self._keys
        self.sent.append((key, worker))
        return key

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool, last: bool) -> None:
        """Queue gradients for one message of a worker.

        `more`: the same step will bring others for that worker. `last`: it will bring no others at all.
        """
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            first = not gathered
            gathered.append((number, gradients))
        # Gradients wait for others of this step that go to the same worker. The last gradients of the step wait for the
        # report, if this worker's part is expected to be short.
        if last and self.holds:
            self._held = worker
        elif not more:
            self.send(worker)
            return
        if self._agent.streams.used:
            self._agent.streams.publish()  # another thread may send them
        if first:
            self._gathers(self)

    def flush(self) -> None:
        """Send all gradients except those that wait for the report."""
        for worker in list(self._ready):
            if not (self.holds and worker == self._held):
                self.send(worker)

    def carry(self, shipment: PackedShipment) -> Sequence[PassReport]:
        """Take the reports that came with gradients. Return the reports to send to the driver now."""
        with self._lock:
            self._carried += [PassReport(self.spec, *fields) for fields in shipment.reports]
        if self.holds and len(self._carried) <= MOST_CARRIED:
            self._gathers(self)
            return ()
        return self._pop_carried()

    def _pop_carried(self) -> Sequence[PassReport]:
        with self._lock:
            carried, self._carried = self._carried, []
            return carried

    def send_early(self) -> Sequence[PassReport]:
        """Stop waiting, since this worker's part takes long: send all gradients. Return the reports to send."""
        if self._ready or self._carried:
            self.holds = False
            self.flush()
        return self._pop_carried()

    def finish(self, report: Callable[[], PassReport]) -> Sequence[PassReport]:
        """Send all gradients, the last ones with the reports. Return the reports if there were no gradients."""
        # The report must come with the last message: it names the others. If the timer thread has just sent those
        # gradients, `send` returns False, and the caller sends the reports by themselves.
        waiting = list(self._ready)  # an atomic copy
        for worker in waiting[:-1]:
            self.send(worker)
        if waiting and self.send(waiting[-1], report):
            return ()
        return [*self._pop_carried(), report()] if self._carried else [report()]

    def send(self, worker: Identity, report: Callable[[], PassReport] | None = None) -> bool:
        """Send the gradients for a worker, with `report` and all other reports. Return False if there are none."""
        with self._lock:
            gathered = self._ready.get(worker)
            if gathered is None:
                return False
            key = self.key(worker.name)  # before the gradients leave `_ready`, see the header
            del self._ready[worker]
        streams = self._agent.streams
        if streams.used:
            streams.adopt(*(each for _, gradients in gathered for each in gradients))
        reports: Sequence[PassReport] = ()
        if report is not None:
            reports = [*self._pop_carried(), report()]
        shipment, tensors = packed(self.spec, key, gathered, reports)
        context = self.context if self.spec.create else None
        self._agent.notify(worker.name, shipment, worker.incarnation, tensors, context)
        return True
