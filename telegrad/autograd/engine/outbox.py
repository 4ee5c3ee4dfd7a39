"""Gradients on their way out of one worker's part of a pass."""

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
NOWHERE = -1  # among `tensors`: stands for WITHOUT


class PackedShipment(NamedTuple):
    """A shipment as it travels: of each message its number, and for each of its tensors which of `tensors`.

    None where the pass has not come to it.
    """

    spec: tuple[Any, ...]
    key: tuple[str, int]
    gradients: list[tuple[int, list[int | None]]]
    report: tuple[Any, ...] | None = None  # that of its sender to the driver, without the spec
    tensors: Sequence[Tensor] = ()


def packed(shipment: Shipment, report: Report | None) -> tuple[PackedShipment, list[Tensor]]:
    """A shipment as it travels, with a report that it takes along, and the tensors that go with it."""
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
    """Often one number is all there is of a gradient; to spread it out is less work than to describe that."""
    if gradient.layout is torch.strided and gradient.nbytes < SMALL and not gradient.is_contiguous():
        return gradient.contiguous()
    return gradient


def unpacked(parcel: PackedShipment) -> tuple[Shipment, Report | None]:
    """The shipment that has come, and the report that it took along."""
    tensors = (*parcel.tensors, WITHOUT)  # the last, where NOWHERE leads
    gradients = [
        (number, [None if place is None else tensors[place] for place in places]) for number, places in parcel.gradients
    ]
    spec = PassSpec(*parcel.spec)
    report = None if parcel.report is None else Report(spec, *parcel.report)
    return Shipment(spec, parcel.key, gradients), report


class Outbox:
    """Gradients on their way out of one pass, gathered as long as more for the same worker is about to come."""

    def __init__(
        self,
        agent: Agent,
        context: AutogradContext,
        ledger: Ledger,
        rides_with_report: bool,
        gathers: Callable[[Outbox], None],
    ) -> None:
        """`gathers` is told when something begins to wait for company, and has `send_early` called soon.

        What goes to the driver waits for the report and leaves with it, where this worker's part will not take long.
        """
        self.spec = ledger.spec
        self.rides_with_report = rides_with_report  # a flag: once `send_early` was called, it stays False
        self._agent = agent
        self._gathers = gathers
        self._context = context
        self._ledger = ledger
        # Guards _ready, and the ledger while anything is in there: what has gone from it is in the ledger. So whoever
        # finds nothing there for anybody can make the report. `repr` takes a copy of _ready without, which is atomic.
        self._lock = threading.Lock()
        self._ready: dict[Identity, list[tuple[int, Sequence[Tensor | None]]]] = {}

    def __repr__(self) -> str:
        ready = ", ".join(worker.name for worker in self._ready.copy()) or "nobody"
        return f"<Outbox of {self.spec}: gradients ready for {ready}>"

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool) -> None:
        """Gradients for one message of a worker; with `more` the same step will bring others for that worker."""
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            first = not gathered
            gathered.append((number, gradients))
        if not (more or (self.rides_with_report and worker.name == self.spec.driver)):
            self.send(worker)
            return
        self._agent.streams.publish()  # another thread may send it
        if first:
            self._gathers(self)

    def flush(self) -> None:
        """Send what is there, but for what waits for the report."""
        with self._lock:
            there = list(self._ready)
        for worker in there:
            if not (self.rides_with_report and worker.name == self.spec.driver):
                self.send(worker)

    def send_early(self) -> None:
        """Wait for no company any more, since what this worker does takes long."""
        self.rides_with_report = False
        self.flush()

    def send_with(self, report: Callable[[], Report]) -> bool:
        """Whether something goes to the driver, and takes the report along; the clock may just have sent it."""
        sent = False
        with self._lock:
            there = list(self._ready)
        for worker in there:
            if worker.name == self.spec.driver:
                sent |= self.send(worker, report)
        return sent

    def send(self, worker: Identity, report: Callable[[], Report] | None = None) -> bool:
        """Whether something is there for a worker: it leaves, and with it a `report`, made when all else is known."""
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
