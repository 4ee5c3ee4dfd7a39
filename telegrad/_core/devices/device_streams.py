"""In which order the accelerators of a worker do what its threads ask for.

    work       what calls and backward passes do, on one stream of the worker's own per device
    arrivals   copies of what comes from other workers
    departures copies to the host of what goes to them

Nothing here waits for a device; streams wait for one another, by events. The default stream of a device is where the
threads of a worker meet: work begins after what was asked for there, and whoever asks for more there after the work was
told to be done, does so after it. So what happens before on the host happens before on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from telegrad._core.wire.tensors import HOST, Blob, Bound, keep_for

_accelerator = torch.accelerator


class Arrived:
    """A blob on an accelerator that is there for whoever waits for `event`."""

    __slots__ = ("blob", "event")

    def __init__(self, blob: Tensor, event: torch.Event | None = None) -> None:
        self.blob = blob
        self.event = event

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes


def kind() -> str | None:
    """The type of this machine's accelerators, if it has any. Asked so that a process can still be forked."""
    found = _accelerator.current_accelerator()
    return None if found is None or not torch.get_device_module(found).device_count() else found.type


def count() -> int:
    found = kind()
    return torch.get_device_module(found).device_count() if found else 0


def device(index: int) -> torch.device:
    """The accelerator of that number."""
    return torch.device(kind() or "cuda", index)


class Streams:
    """Those of one worker."""

    def __init__(self, begin: Callable[[torch.device], None] = lambda _: None) -> None:
        """`begin` is called with each device that comes into use."""
        self.used: tuple[int, ...] = ()  # the devices that calls can touch
        self._begin = begin
        self._lock = threading.Lock()  # guards _made, and changes of `used` and of _defaults, which has a device first
        self._made: dict[tuple[str, int], torch.Stream] = {}
        self._defaults: dict[int, torch.Stream] = {}

    def use(self, index: int) -> None:
        """From now on calls may touch that device."""
        with self._lock:
            if index not in self.used:
                self._defaults[index] = _default_stream(index)
                self._begin(device(index))
                self.used = (*self.used, index)

    def work(self, index: int) -> torch.Stream:
        return self._stream("work", index)

    def arrivals(self, index: int) -> torch.Stream:
        return self._stream("arrivals", index)

    def departures(self, index: int) -> torch.Stream:
        return self._stream("departures", index)

    def _stream(self, purpose: str, index: int) -> torch.Stream:
        with self._lock:
            made = self._made.get((purpose, index))
            if made is None:
                made = self._made[purpose, index] = torch.Stream(device=device(index))
            return made

    # Work

    def turn(self) -> AbstractContextManager[None]:
        """Inside, this thread asks for work: after all that was asked for before, on it or on the default streams."""
        return self._turn() if self.used else nullcontext()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        inner = [self.work(index) for index in self.used]
        with on(*inner) as outer:
            for own, stream in zip(inner, outer, strict=True):
                for early in self._around(own, stream):
                    own.wait_stream(early)
            try:
                yield
            finally:
                for own, stream in zip(inner, outer, strict=True):
                    for late in self._around(own, stream):
                        late.wait_stream(own)

    def _around(self, own: torch.Stream, outer: torch.Stream) -> tuple[torch.Stream, ...]:
        """The streams that a turn comes after when it begins, and before when it ends."""
        default = self._defaults[own.device_index]
        if outer == own:  # a turn inside of a turn
            return ()
        return (default,) if outer == default else (default, outer)

    def aside(self) -> AbstractContextManager[Any]:
        """Inside, this thread takes in what has come: after its arrival alone."""
        return on(*map(self.arrivals, self.used)) if self.used else nullcontext()

    def publish(self) -> None:
        """What this thread has asked for comes before what others begin from here on."""
        for index in self.used:
            _order(_accelerator.current_stream(index), self._defaults[index])

    def adopt(self, *values: Any) -> None:
        """This thread goes on with what others have made: after what was published, and its memory lasts as long."""
        self.join()
        self.keep(values)

    def keep(self, values: Iterable[Any]) -> None:
        """The memory of tensors is not used anew before what this thread asks for with them is done."""
        for value in values if self.used else ():
            if isinstance(value, Tensor) and value.device.index in self.used:
                keep_for(value, _accelerator.current_stream(value.device))

    def current(self) -> list[torch.Stream]:
        """Where this thread's work goes now."""
        return [_accelerator.current_stream(index) for index in self.used]

    def follow(self, streams: Iterable[torch.Stream]) -> None:
        """What this thread asks for from here on comes after what was asked for on these streams."""
        for stream in streams:
            _order(stream, _accelerator.current_stream(stream.device_index))

    def join(self) -> None:
        """What this thread asks for from here on comes after what was published."""
        for index in self.used:
            _order(self._defaults[index], _accelerator.current_stream(index))


def _order(first: torch.Stream, then: torch.Stream) -> None:
    """What the second is asked for from here on comes after what the first was asked for."""
    if first != then:
        then.wait_stream(first)


def read_on(stream: torch.Stream, bound: Bound) -> None:
    """`stream` is about to read a blob: after what made it, and its memory lasts as long."""
    if bound.ready is None:
        _order(_accelerator.current_stream(bound.blob.device), stream)
    else:
        stream.wait_event(bound.ready)
    bound.blob.record_stream(stream)


@contextmanager
def on(*streams: torch.Stream) -> Iterator[list[torch.Stream]]:
    """Inside, these are this thread's current streams; gives those that were. `with stream` serves but one thread."""
    device_index = _accelerator.current_device_index()
    before = [_accelerator.current_stream(stream.device_index) for stream in streams]
    for stream in streams:
        _accelerator.set_stream(stream)
    _accelerator.set_device_index(device_index)  # which the stream has changed
    try:
        yield before
    finally:
        for stream in before:
            _accelerator.set_stream(stream)
        _accelerator.set_device_index(device_index)


def settle(blobs: Iterable[Any]) -> Sequence[Tensor]:
    """Blobs as this thread may use them from here on: its current streams wait for those that are still arriving."""
    return [_settled(blob) if type(blob) is Arrived else blob for blob in blobs]


def _settled(arrived: Arrived) -> Tensor:
    if arrived.event is not None:
        current = _accelerator.current_stream(arrived.blob.device)
        current.wait_event(arrived.event)
        arrived.blob.record_stream(current)
    return arrived.blob


def set_apart(blobs: Sequence[Blob]) -> Sequence[Blob]:
    """Blobs that another thread may send later: a copy of what lies on an accelerator, as this thread would send it."""
    return [_set_apart(blob) if isinstance(blob, Bound) and not blob.blob.is_cpu else blob for blob in blobs]


def _set_apart(bound: Bound) -> Bound:
    with torch.inference_mode(False), torch.no_grad():
        copy = bound.blob.clone()
    return Bound(copy, bound.device, _accelerator.current_stream(copy.device).record_event())


def copied(bound: Bound) -> Tensor | Arrived:
    """A copy for somebody else, where the blob is bound for; asked for on this thread's current stream."""
    if not bound.blob.is_cpu:
        read_on(_accelerator.current_stream(bound.blob.device), bound)
    with torch.inference_mode(False), torch.no_grad():
        if bound.device == HOST:
            return bound.blob.to("cpu", copy=True)
        made = bound.blob.to(device(bound.device), copy=True, non_blocking=not bound.blob.is_cpu)
        return Arrived(made, _accelerator.current_stream(bound.device).record_event())


def _default_stream(index: int) -> torch.Stream:
    current = _accelerator.current_stream(index)
    return torch.Stream(stream_id=0, device_index=index, device_type=current.device_type)
