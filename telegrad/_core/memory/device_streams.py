"""Order of the work that the threads of a worker submit to its accelerators.

    work       calls and backward passes, on one stream of the worker's own per device
    arrivals   copies of data from other workers
    departures copies to the host of data for other workers

Nothing here waits for a device; streams wait for one another by events. Threads synchronize by the default stream of
each device: work begins after everything submitted there before, and what is submitted there after the end of the work
was reported runs after it. So the order on the host is also the order on the device.

Memory has a second rule. torch's allocator gives freed memory to the next tensor of the stream that allocated it, at
once: it assumes that all uses are on that stream. Here tensors are allocated on one stream and used on another all the
time. So each use on another stream is noted with `record_stream`, or the memory would be overwritten while a kernel
still reads it. Waits order the work, `record_stream` keeps the memory: a tensor that goes from stream to stream needs
both.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from telegrad._core.wire.tensors import HOST, Blob, DeviceBlob, keep_for

_accelerator = torch.accelerator
NO_TURN = nullcontext()  # one for all: it has no state


class Arrived:
    """A blob on an accelerator, complete after `event`."""

    __slots__ = ("blob", "event")

    def __init__(self, blob: Tensor, event: torch.Event | None = None) -> None:
        self.blob = blob
        self.event = event

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes


def kind() -> str | None:
    """Return the type of this machine's accelerators, if any. The check keeps the process able to fork."""
    found = _accelerator.current_accelerator()
    return None if found is None or not torch.get_device_module(found).device_count() else found.type


def count() -> int:
    found = kind()
    return torch.get_device_module(found).device_count() if found else 0


def device(index: int) -> torch.device:
    return torch.device(kind() or "cuda", index)


class Streams:
    def __init__(self, begin: Callable[[torch.device], None] = lambda _: None) -> None:
        """`begin` is called with each device at its first use."""
        self.used: tuple[int, ...] = ()  # the devices that calls can touch
        self._begin = begin
        # Guards _made, and changes of `used` and of _defaults. A device enters _defaults first: a thread that finds it
        # in `used`, without the lock, looks it up there.
        self._lock = threading.Lock()
        self._made: dict[tuple[str, int], torch.Stream] = {}
        self._defaults: dict[int, torch.Stream] = {}

    def use(self, index: int) -> None:
        with self._lock:
            if index not in self.used:
                kind = _accelerator.current_stream(index).device_type
                self._defaults[index] = torch.Stream(stream_id=0, device_index=index, device_type=kind)
                self._begin(device(index))
                self.used = (*self.used, index)

    def stream(self, purpose: str, index: int) -> torch.Stream:
        """Return the stream for `work`, `arrivals` or `departures` on a device."""
        with self._lock:
            made = self._made.get((purpose, index))
            if made is None:
                made = self._made[purpose, index] = torch.Stream(device=device(index))
            return made

    # Order of work

    def turn(self) -> AbstractContextManager[None]:
        """Run work of this thread inside, after all earlier work of this worker and of the default streams."""
        return self._turn() if self.used else NO_TURN

    @contextmanager
    def _turn(self) -> Iterator[None]:
        inner = [self.stream("work", index) for index in self.used]
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
        """Return the streams that work waits for at its begin, and that wait for it at its end."""
        default = self._defaults[own.device_index]
        if outer == own:  # a nested turn
            return ()
        return (default,) if outer == default else (default, outer)

    def aside(self) -> AbstractContextManager[Any]:
        """Process received data of this thread inside, ordered only after its arrival."""
        return on(*(self.stream("arrivals", index) for index in self.used)) if self.used else nullcontext()

    def publish(self) -> None:
        """Order work begun from now on by other threads after the work of this thread."""
        # The default stream is where other threads look: `join` and `turn` wait for it. Work that they submit after
        # they were notified runs behind this thread's.
        for index in self.used:
            _order(_accelerator.current_stream(index), self._defaults[index])

    def adopt(self, *values: Any) -> None:
        """Order this thread's work after the published work, and keep the memory of values of other threads for it."""
        self.join()
        self.keep(values)

    def keep(self, values: Iterable[Any]) -> None:
        """Do not reuse the memory of tensors before the work that this thread submits with them is done."""
        for value in values if self.used else ():
            if isinstance(value, Tensor) and value.device.index in self.used:
                keep_for(value, _accelerator.current_stream(value.device))

    def current(self) -> list[torch.Stream]:
        return [_accelerator.current_stream(index) for index in self.used]

    def follow(self, streams: Iterable[torch.Stream]) -> None:
        """Order the further work of this thread after the work on these streams."""
        for stream in streams:
            _order(stream, _accelerator.current_stream(stream.device_index))

    def join(self) -> None:
        """Order the further work of this thread after the published work."""
        for index in self.used:
            _order(self._defaults[index], _accelerator.current_stream(index))


def _order(first: torch.Stream, then: torch.Stream) -> None:
    """Order the further work of the second stream after the work of the first."""
    if first != then:
        then.wait_stream(first)


def read_on(stream: torch.Stream, bound: DeviceBlob) -> None:
    """Order the further work of `stream` after the creation of a blob, and keep the blob's memory until it is done."""
    # The blob was made by this thread, on its current stream; or by another one, which has recorded an event
    # (`set_apart`).
    if bound.ready is None:
        _order(_accelerator.current_stream(bound.blob.device), stream)
    else:
        stream.wait_event(bound.ready)
    bound.blob.record_stream(stream)


@contextmanager
def on(*streams: torch.Stream) -> Iterator[list[torch.Stream]]:
    """Make these this thread's current streams; yield the previous ones. `with stream` works in one thread only."""
    device_index = _accelerator.current_device_index()
    before = [_accelerator.current_stream(stream.device_index) for stream in streams]
    for stream in streams:
        _accelerator.set_stream(stream)
    _accelerator.set_device_index(device_index)  # set_stream has changed it
    try:
        yield before
    finally:
        for stream in before:
            _accelerator.set_stream(stream)
        _accelerator.set_device_index(device_index)


def wait_for_arrivals(blobs: Iterable[Any]) -> Sequence[Tensor]:
    """Return the blobs for use by this thread, whose current streams wait for blobs that are still arriving."""
    settled: list[Tensor] = []
    for blob in blobs:
        if type(blob) is Arrived and blob.event is not None:
            current = _accelerator.current_stream(blob.blob.device)
            current.wait_event(blob.event)
            blob.blob.record_stream(current)
        settled.append(blob.blob if type(blob) is Arrived else blob)
    return settled


def set_apart(blobs: Sequence[Blob]) -> Sequence[Blob]:
    """Return blobs that another thread may send later: copies of accelerator memory, made by this thread."""
    return [_set_apart(blob) if isinstance(blob, DeviceBlob) and not blob.blob.is_cpu else blob for blob in blobs]


def _set_apart(bound: DeviceBlob) -> DeviceBlob:
    with torch.inference_mode(False), torch.no_grad():
        # A copy, since the caller may change the tensor before the other thread sends it. The other thread has another
        # current stream, so the blob carries an event of this one.
        copy = bound.blob.clone()
    return DeviceBlob(copy, bound.device, _accelerator.current_stream(copy.device).record_event())


def copied(bound: DeviceBlob) -> Tensor | Arrived:
    """Return a copy on the target device of a blob, made on this thread's current stream."""
    if not bound.blob.is_cpu:
        read_on(_accelerator.current_stream(bound.blob.device), bound)
    with torch.inference_mode(False), torch.no_grad():
        if bound.device == HOST:
            return bound.blob.to("cpu", copy=True)
        made = bound.blob.to(device(bound.device), copy=True, non_blocking=not bound.blob.is_cpu)
        return Arrived(made, _accelerator.current_stream(bound.device).record_event())
