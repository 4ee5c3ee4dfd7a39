"""Gradients on their way out of one worker's part of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.agent.agent import Agent
from telegrad.autograd.contexts import Context
from telegrad.autograd.passes import WITHOUT, Ledger, Order, Report, Shipment
from telegrad.group.members import Identity

SMALL = 4096  # bytes
NOWHERE = -1  # among `tensors`: stands for WITHOUT


class Parcel(NamedTuple):
    """A shipment on its way: of each message its number, and for each of its tensors which of `tensors`.

    None where the pass has not come to it.
    """

    order: tuple[Any, ...]
    key: tuple[str, int]
    gradients: list[tuple[int, list[int | None]]]
    report: tuple[Any, ...] | None = None  # that of its sender to the driver, without the order
    tensors: Sequence[Tensor] = ()


def wrap(shipment: Shipment, report: Report | None) -> tuple[Parcel, list[Tensor]]:
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
                tensors.append(gradient if shipment.order.create else _lean(gradient))
            own.append(place)
        slots.append((number, own))
    return Parcel(tuple(shipment.order), shipment.key, slots, None if report is None else report[1:]), tensors


def _lean(gradient: Tensor) -> Tensor:
    """Often one number is all there is of a gradient; to spread it out is less work than to describe that."""
    if gradient.layout is torch.strided and gradient.nbytes < SMALL and not gradient.is_contiguous():
        return gradient.contiguous()
    return gradient


def unwrap(parcel: Parcel) -> tuple[Shipment, Report | None]:
    tensors = (*parcel.tensors, WITHOUT)  # the last, where NOWHERE leads
    gradients = [
        (number, [None if place is None else tensors[place] for place in places]) for number, places in parcel.gradients
    ]
    order = Order(*parcel.order)
    report = None if parcel.report is None else Report(order, *parcel.report)
    return Shipment(order, parcel.key, gradients), report


class Outbox:
    """Gradients on their way out of one pass, gathered as long as more for the same worker is about to come."""

    def __init__(
        self,
        agent: Agent,
        context: Context,
        ledger: Ledger,
        gathers: Callable[[Outbox], None],
        failed: Callable[[Order, BaseException], None],
    ) -> None:
        """`gathers` is told when something begins to wait for company, and calls `send_early` soon."""
        self._agent = agent
        self._gathers = gathers
        self._failed = failed
        self._context = context
        self._ledger = ledger
        self._lock = threading.Lock()  # guards _ready and the ledger
        self._ready: dict[Identity, list[tuple[int, Sequence[Tensor | None]]]] = {}
        self.reached: set[str] = set()  # workers to whom something was sent
        self.brief = False  # this worker's part will not take long: what goes to the driver leaves with the report

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool) -> None:
        """`more`: the same step of the pass will bring others for that worker."""
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            gathered.append((number, gradients))
        waits = self._waits_for_report(worker)
        if not (waits or more):
            self.send(worker)
            return
        self._agent.streams.publish()  # another thread may send it
        if len(gathered) == 1:
            self._gathers(self)

    def _waits_for_report(self, worker: Identity) -> bool:
        return self.brief and worker.name == self._ledger.order.driver

    def flush(self) -> None:
        """Send what is there, but for what waits for the report."""
        for worker in list(self._ready):
            if not self._waits_for_report(worker):
                self.send(worker)

    def send_early(self) -> None:
        """The rest takes long."""
        self.brief = False
        try:
            self.flush()
        except Exception as error:
            self._failed(self._ledger.order, error)

    def send_with(self, report: Callable[[], Report]) -> bool:
        """Whether something goes to the driver, and takes the report along; the clock may just have sent it."""
        driver = self._ledger.order.driver
        return any(self.send(worker, report) for worker in list(self._ready) if worker.name == driver)

    def send(self, worker: Identity, report: Callable[[], Report] | None = None) -> bool:
        """Whether something is there for a worker: it leaves, and with it a `report`, made when all else is known."""
        with self._lock:
            gathered = self._ready.pop(worker, None)
            if gathered is None:
                return False
            shipment = self._ledger.ship(worker.name, gathered)
            self.reached.add(worker.name)
        self._agent.streams.adopt(*(each for _, gradients in gathered for each in gradients))
        parcel, tensors = wrap(shipment, report and report())
        context = self._context if shipment.order.create else None
        self._agent.notify(worker.name, parcel, worker.incarnation, tensors, context)
        return True
