"""Outgoing gradients of one worker's part of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.agent.agent import Agent
from telegrad._core.membership.members import Identity
from telegrad.autograd.engine.passes import WITHOUT, Ledger, PassSpec, Report, Shipment
from telegrad.autograd.engine.record import AutogradContext

SMALL = 4096  # bytes
NOWHERE = -1  # index among `tensors` that represents WITHOUT


class PackedShipment(NamedTuple):
    """A shipment on the wire: the number of each message, and for each of its tensors an index into `tensors`.

    The index is None for a tensor that the pass has not reached.
    """

    spec: tuple[Any, ...]
    key: tuple[str, int]
    gradients: list[tuple[int, list[int | None]]]
    report: tuple[Any, ...] | None = None  # the sender's report to the driver, without the spec
    tensors: Sequence[Tensor] = ()


def packed(shipment: Shipment, report: Report | None) -> tuple[PackedShipment, list[Tensor]]:
    """Return the wire form of a shipment, with an optional report, and the tensors to send with it."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}  # a gradient often goes to several tensors of a message
    slots: list[tuple[int, list[int | None]]] = []
    for number, gradients in shipment.gradients:
        own: list[int | None] = []
        for gradient in gradients:
            if gradient is None or gradient is WITHOUT:
                own.append(None if gradient is None else NOWHERE)
                continue
            place = places.setdefault(id(gradient), len(tensors))
            if place == len(tensors):
                tensors.append(gradient if shipment.spec.create else _lean(gradient))
            own.append(place)
        slots.append((number, own))
    return PackedShipment(tuple(shipment.spec), shipment.key, slots, None if report is None else report[1:]), tensors


def _lean(gradient: Tensor) -> Tensor:
    """Return a small gradient in contiguous form.

    Its data is often one repeated number, and copying costs less than describing it.
    """
    if gradient.layout is torch.strided and gradient.nbytes < SMALL and not gradient.is_contiguous():
        return gradient.contiguous()
    return gradient


def unpacked(parcel: PackedShipment) -> tuple[Shipment, Report | None]:
    """Return a received shipment, and its report if any."""
    tensors = (*parcel.tensors, WITHOUT)  # index NOWHERE (-1) is the last one
    gradients = [
        (number, [None if place is None else tensors[place] for place in places]) for number, places in parcel.gradients
    ]
    spec = PassSpec(*parcel.spec)
    report = None if parcel.report is None else Report(spec, *parcel.report)
    return Shipment(spec, parcel.key, gradients), report


class Outbox:
    """Outgoing gradients of one pass, gathered while more for the same worker are about to come."""

    def __init__(
        self,
        agent: Agent,
        context: AutogradContext,
        ledger: Ledger,
        rides_with_report: bool,
        gathers: Callable[[Outbox], None],
    ) -> None:
        """`gathers` is called when gradients begin to wait for others; it must have `send_early` called soon.

        If this worker's part is expected to be short, gradients for the driver wait for the report and leave with it.
        """
        self.spec = ledger.spec
        self.rides_with_report = rides_with_report  # never True again after `send_early`
        self._agent = agent
        self._gathers = gathers
        self._context = context
        self._ledger = ledger
        # Guards _ready, and the ledger while _ready holds anything: gradients that have left _ready are in the ledger.
        # So a thread that finds nothing there for any worker can make the report. `repr` copies _ready without the
        # lock, which is atomic.
        self._lock = threading.Lock()
        self._ready: dict[Identity, list[tuple[int, Sequence[Tensor | None]]]] = {}

    def __repr__(self) -> str:
        ready = ", ".join(worker.name for worker in self._ready.copy()) or "nobody"
        return f"<Outbox of {self.spec}: gradients ready for {ready}>"

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
        with self._lock:
            there = list(self._ready)
        for worker in there:
            if not (self.rides_with_report and worker.name == self.spec.driver):
                self.send(worker)

    def send_early(self) -> None:
        """Stop waiting for other gradients, since this worker's part takes long."""
        self.rides_with_report = False
        self.flush()

    def send_with(self, report: Callable[[], Report]) -> bool:
        """Send the gradients for the driver together with the report.

        Return False if there are none, as after `send_early`.
        """
        sent = False
        with self._lock:
            there = list(self._ready)
        for worker in there:
            if worker.name == self.spec.driver:
                sent |= self.send(worker, report)
        return sent

    def send(self, worker: Identity, report: Callable[[], Report] | None = None) -> bool:
        """Send the gradients for a worker, and the result of `report` with them. Return False if there are none."""
        with self._lock:
            gathered = self._ready.pop(worker, None)
            if gathered is None:
                return False
            shipment = self._ledger.ship(worker.name, gathered)
        streams = self._agent.streams
        if streams.used:
            streams.adopt(*(each for _, gradients in gathered for each in gradients))
        parcel, tensors = packed(shipment, report and report())
        context = self._context if shipment.spec.create else None
        self._agent.notify(worker.name, parcel, worker.incarnation, tensors, context)
        return True
