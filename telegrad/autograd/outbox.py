"""Gradients on their way out of one worker's part of a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.agent.agent import Agent
from telegrad.agent.members import Identity
from telegrad.autograd.contexts import Context
from telegrad.autograd.passes import Ledger, Order, Shipment

SMALL = 4096  # bytes


class Parcel(NamedTuple):
    """A shipment on its way: of each message its number, and for each of its tensors which of `tensors`, or None."""

    order: tuple[Any, ...]
    key: tuple[str, int]
    gradients: list[tuple[int, list[int | None]]]
    tensors: Sequence[Tensor] = ()


def wrap(shipment: Shipment) -> tuple[Parcel, list[Tensor]]:
    tensors: dict[int, Tensor] = {}
    places: dict[int, int] = {}  # a gradient often goes to several tensors of a message
    slots = [
        (number, [None if each is None else places.setdefault(id(each), len(places)) for each in gradients])
        for number, gradients in shipment.gradients
    ]
    for _, gradients in shipment.gradients:
        tensors.update((id(each), each) for each in gradients if each is not None)
    lean = [_lean(tensor) for tensor in tensors.values()] if not shipment.order.create else [*tensors.values()]
    return Parcel(tuple(shipment.order), shipment.key, slots), lean


def _lean(gradient: Tensor) -> Tensor:
    """Often one number is all there is of a gradient; to spread it out is less work than to describe that."""
    if gradient.layout is torch.strided and gradient.nbytes < SMALL and not gradient.is_contiguous():
        return gradient.contiguous()
    return gradient


def unwrap(parcel: Parcel) -> Shipment:
    tensors = parcel.tensors
    gradients = [
        (number, [None if place is None else tensors[place] for place in places]) for number, places in parcel.gradients
    ]
    return Shipment(Order(*parcel.order), parcel.key, gradients)


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

    def add(self, worker: Identity, number: int, gradients: Sequence[Tensor | None], more: bool) -> None:
        """`more`: the same step of the pass will bring others for that worker."""
        with self._lock:
            gathered = self._ready.setdefault(worker, [])
            gathered.append((number, gradients))
        if not more:
            self.send(worker)
        elif len(gathered) == 1:
            self._gathers(self)

    def flush(self) -> None:
        """Send what is there."""
        for worker in list(self._ready):
            self.send(worker)

    def send_early(self) -> None:
        """The rest takes long."""
        try:
            self.flush()
        except Exception as error:
            self._failed(self._ledger.order, error)

    def send(self, worker: Identity) -> None:
        with self._lock:
            gathered = self._ready.pop(worker, None)
            if gathered is None:
                return
            shipment = self._ledger.ship(worker.name, gathered)
            self.reached.add(worker.name)
        parcel, tensors = wrap(shipment)
        context = self._context if shipment.order.create else None
        self._agent.notify(worker.name, parcel, worker.incarnation, tensors, context)
