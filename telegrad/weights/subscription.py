"""A subscriber's endpoint: join, join again after a lost connection, and store versions."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from torch import Tensor

from telegrad.errors import DeltaRefused, PublisherLost, TelegradError, UnknownPublisher
from telegrad.ext.calls import known_as
from telegrad.ext.workers import Identity, current, listed
from telegrad.weights import weight_messages as messages
from telegrad.weights.deltas import Delta, apply_deltas
from telegrad.weights.publisher import PublisherEndpoint
from telegrad.weights.subscriber_protocol import SubscriberProtocol
from telegrad.weights.tree_layout import Layout
from telegrad.weights.weight_messages import EndpointAddress, VersionInfo
from telegrad.weights.weight_service import TICK, Endpoint, WeightsService
from telegrad.weights.weight_version import Version

MARGIN = 5.0  # seconds added to a call's timeout beyond the wait on the callee


class SubscriberEndpoint(Endpoint[SubscriberProtocol]):
    def __init__(self, service: WeightsService, name: str, publisher: Identity, limit: float) -> None:
        """Join. Wait for a publisher of that name, `limit` seconds at most, 0 for no limit."""
        super().__init__(service, service.party(publishes=False), SubscriberProtocol())
        self._name = name
        self._publisher = publisher
        self.over = False  # True once the publisher was closed
        self._trouble = ""  # why the publisher cannot be reached
        self._joining = False
        self._layout: Layout | None = None
        self._common: set[int] = set()  # versions whose memory is shared with others on the host
        self._last: Version | None = None  # the last one returned
        self._taken = (0, False)  # as last reported to the publisher
        service.add(self)
        try:
            timeout = limit and limit + MARGIN
            self.machine.publisher = EndpointAddress(
                *service.agent.call(publisher, _join, self._joining_args(limit), None, timeout)
            )
        except BaseException:
            service.remove(self)
            raise

    # Joining

    def _joining_args(self, limit: float = 0) -> tuple[Any, ...]:
        source = self.machine.publisher
        return self._name, source and source.number, self.me, self._service.agent.me.host, *self._taken, limit

    def join(self) -> None:
        """Join again, without waiting."""
        with self.changed:
            if self._joining or self.over or self.machine.publisher is None:
                return
            self._joining = True
            args = self._joining_args()
        try:
            future = self._service.agent.call_async(self._publisher, _join, args, None)
        except TelegradError as error:
            self._joined(str(error))
        else:
            future.add_done_callback(lambda done: self._joined(_failure(done)))

    def _joined(self, trouble: str) -> None:
        with self.changed:
            self._joining = False
            self._trouble = trouble
        self.wake_waiters()

    def check(self) -> None:
        """Raise PublisherLost if the publisher was closed, or cannot be reached in another attempt."""
        with self.changed:
            trouble, last = (
                self._trouble,
                max(self.machine.store.newest_complete(), self._last.number if self._last else 0),
            )
        if self.over:
            raise self._lost("it was closed", last)
        if trouble:
            self.join()
            with self.changed:
                self.changed.wait_for(lambda: not self._joining, self._service.agent.timeout or None)
                trouble = self._trouble
            if trouble:
                raise self._lost(trouble, last)

    def _lost(self, why: str, last: int) -> PublisherLost:
        readable = f"version {last} can still be read with newest()" if last else "no version of it has arrived"
        return PublisherLost(
            f"the publisher {self._name!r} on worker {self._publisher.name!r} is no longer available ({why}); "
            f"{readable}"
        )

    def lost(self, incarnation: str) -> None:
        super().lost(incarnation)
        if incarnation == self._publisher.incarnation:
            self.join()

    def close(self) -> None:
        self._service.remove(self)
        self.update(self.machine.leave)
        with self.changed:
            self.has_left = True
            self.memory.clear()
            self._last = None

    def on_tick(self) -> None:
        if not self.over and not self._trouble:
            super().on_tick()

    # Messages

    def take(self, sender: EndpointAddress, message: Any, tensors: Any) -> None:
        if self.machine.publisher is None:  # the joining call has not returned: the sender is the publisher
            self.machine.publisher = sender
        if sender == self.machine.publisher and isinstance(message, messages.JoinAgain):
            self.join()
        elif isinstance(message, messages.Closed):
            self.over = True
            self.wake_waiters()
        elif isinstance(message, messages.WeightPiece):
            self._store(sender, message, tensors)
        else:
            memory = tensors[0] if isinstance(message, messages.WholeVersion) else None
            if isinstance(message, messages.VersionOpened):
                memory = self._service.agent.memory.common(message.info.size)
            self.update(lambda: self._received(sender, message, memory))
            self.wake_waiters()

    def _received(self, sender: EndpointAddress, message: Any, memory: Tensor | None) -> Any:
        if memory is not None and message.number not in self.machine.store.info:
            self.memory[message.number] = memory
            if isinstance(message, messages.VersionOpened) or sender.incarnation == self.me.incarnation:
                self._common.add(message.number)
        self._common &= self.memory.keys()
        return self.machine.receive(sender, message)

    def _store(self, sender: EndpointAddress, message: messages.WeightPiece, content: Sequence[Tensor]) -> None:
        with self.changed:
            new, old = self.memory.get(message.number), self.memory.get(message.base)
            if new is None or not self.machine.expects(message):
                return
            place, info = self.piece(message), self.machine.store.info[message.number]
        deltas = []
        for heads in message.heads:
            count = sum(each[2] for each in heads)
            deltas.append(Delta(heads, [*content[:count]]))
            content = content[count:]
        if message.base:
            try:
                if old is None:
                    raise DeltaRefused(f"a delta starts from version {message.base}, which this worker no longer has")
                apply_deltas(self._layout_of(info), info, old, new, message.piece, deltas)
            except DeltaRefused:
                self.update(lambda: self.machine.distrust(message.number))
                return
        else:
            place.copy_(content[0])
        self.update(lambda: self._stored(sender, message, deltas, info.size))
        if self.machine.store.is_complete(message.number):
            self.wake_waiters()

    def _stored(self, sender: EndpointAddress, message: messages.WeightPiece, deltas: list[Delta], size: int) -> Any:
        for number, delta in enumerate(deltas, message.base + 1):
            self.deltas.keep(number, message.piece, delta, size)
        return self.machine.receive(sender, message)

    def _layout_of(self, info: VersionInfo) -> Layout:
        layout = self._layout
        if layout is None or layout.number != info.layout:
            layout = self._layout = Layout(info.layout, info.description)
        return layout

    # Called by the subscriber

    @property
    def known(self) -> int:
        """The newest published version, as far as this worker knows."""
        return self.machine.store.newest

    def next_after(self, number: int) -> int:
        return max(number + 1, self.machine.store.oldest)

    def find(self, least: int, exact: bool = False) -> Version | None:
        """Return such a version if it is here."""
        with self.changed:
            store, last = self.machine.store, self._last
            number = least if exact else store.newest_complete()
            if last is not None and (last.number == least if exact else last.number >= max(number, least)):
                return last
            if number < least or not store.is_complete(number):
                return None
            info, memory, is_common = store.info[number], self.memory[number], number in self._common
        version = Version(
            number, self._layout_of(info), self._service.agent.memory.private(memory) if is_common else memory
        )
        with self.changed:
            self._last = version
        return version

    def want(self, least: int, exact: bool) -> None:
        self.update(lambda: self.machine.want(least, exact, patient=True))

    def ask_for_newer(self) -> None:
        """If the source may have a newer version, request its newest, and wait for the answer for TICK seconds."""
        store = self.machine.store
        if self.machine.whole and store.newest > store.newest_complete() > 0 and not (self.over or self._trouble):
            self.update(lambda: self.machine.want(store.newest_complete() + 1, exact=False, patient=False))
            with self.changed:
                self.changed.wait_for(lambda: not self.machine.waits, TICK)

    def taken(self, number: int, every: bool) -> None:
        self._taken = number, every
        self.update(lambda: self.machine.taken(number, every))
        source = self.machine.source
        if source is not None:  # the source reuses the memory of old versions
            self._service.agent.give_back(source.worker)


def _failure(done: Any) -> str:
    try:
        done.wait()
    except Exception as error:
        return str(error).partition("\n")[0]
    return ""


# Functions that run on the publisher's worker


@known_as("Subscriber()")
def _join(
    name: str, number: int | None, party: EndpointAddress, host: str, taken: int, every: bool, timeout: float
) -> EndpointAddress:
    """Add a subscriber. Wait for the publisher of that name, unless `number` names one that must exist."""
    worker = current.here()
    service, agent = worker.attached(WeightsService), worker.agent
    until = monotonic() + timeout if timeout else float("inf")
    with agent.waiting(), service.changed:
        while name not in service.published and number is None:
            left = until - monotonic()
            if left <= 0 or agent.closed:
                names = sorted(service.published)
                there = (
                    f"its publishers are {listed([repr(each) for each in names])}" if names else "it has no publishers"
                )
                raise UnknownPublisher(
                    f"worker {agent.name!r} has no publisher {name!r}, and none was created within {timeout:g} s; "
                    f"{there}. Create it there with Publisher({name!r}, model), and keep the object"
                )
            service.changed.wait(min(left, TICK))
        endpoint = service.published.get(name)
    if endpoint is None or number not in (None, endpoint.me.number):
        raise PublisherLost(f"the publisher {name!r} was closed")
    assert isinstance(endpoint, PublisherEndpoint)
    endpoint.update(lambda: endpoint.machine.join(EndpointAddress(*party), host, taken, every))
    return endpoint.me
