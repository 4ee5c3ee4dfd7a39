"""An actor's side: read versions of weights."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from torch import Tensor, nn

from telegrad.errors import CallTimeout, DeltaRefused, PublisherLost, TelegradError, UsageError
from telegrad.ext import calls
from telegrad.ext.calls import DEFAULT, check_timeout, folded, limit_of, not_compiled, retry, target
from telegrad.ext.feedback import Wait, checks, report_in_background
from telegrad.ext.host import forks
from telegrad.ext.workers import Identity, WorkerInfo, current
from telegrad.weights import transfer
from telegrad.weights.deltas import apply_deltas, deltas_of
from telegrad.weights.protocols import SubscriberProtocol
from telegrad.weights.publisher import join, lost_error
from telegrad.weights.transfer import EndpointAddress, Outgoing, VersionInfo
from telegrad.weights.tree_layout import Layout
from telegrad.weights.weight_service import TICK, Closable, Endpoint, WeightsService
from telegrad.weights.weight_version import Version, check_module

# Seconds that the joining call waits longer than the publisher's worker does. So the caller gets that worker's error,
# which lists the publishers that exist, and not a plain timeout.
MARGIN = 5.0


@folded
class Subscriber(Closable):
    """Reads the versions of a `Publisher` on this or another worker; `for version in subscriber` yields each.

    Args:
        worker: the worker of the publisher.
        name: the name of the publisher. If it does not exist yet, the constructor waits for it.
        timeout: seconds for this wait; 0 for no limit, default: the timeout in the options.

    Raises:
        UnknownPublisher: that worker has no publisher of that name; the message lists those that it has.
        UnknownWorker: there is no such worker; with the option `wait_for_worker`, the constructor waits for it.
        UsageError: it is a `ShardedPublisher`, which is read by a `ShardedSubscriber`.

    Example:
        >>> publisher = telegrad.weights.Publisher("policy", nn.Linear(4, 2))
        >>> number = publisher.publish()
        >>> subscriber = telegrad.weights.Subscriber("driver", "policy")
        >>> actor = nn.Linear(4, 2)
        >>> subscriber.newest().load_into(actor)
        >>> subscriber.version, subscriber.behind
        (1, 0)
        >>> subscriber.close()
        >>> publisher.close()
    """

    def __init__(self, worker: str | int | WorkerInfo, name: str, timeout: float = DEFAULT) -> None:
        here = current.here()
        self.name: str = checks.text("name", name, "the name of what is published")
        self._agent = here.agent
        at = target(worker, "worker")
        left = retry.await_workers(retry.policy_of(None, False), [at], calls.PreparedCall(join), timeout)
        to = self._agent.identify(at)
        self.worker: str = to.name
        service = here.attached(WeightsService)
        about = f"wait for the publisher of {name!r} on worker {to.name!r}"
        with report_in_background(Wait("Subscriber", lambda: about, lambda: [to.name])):
            self._endpoint = SubscriberEndpoint(service, name, to, self._kind, limit_of(left, self._agent.timeout))
        # As in `Publisher`: no reference to this object, and a close on another thread.
        self._end = weakref.finalize(self, service.close_later, self._endpoint)
        self._end.atexit = False

    _kind = ""  # that of the publishers that it reads

    # Reading versions

    @not_compiled
    def newest(self, timeout: float = DEFAULT) -> Version:
        """Return the newest version on this host. Wait only if there is none.

        After the publisher has gone, this still returns the last version, until another publisher has its name.

        Args:
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, and there is no version here, or another one has its name.
            ShutDown: this worker has left its group.
            CallTimeout: no version arrived in time.
        """
        check_timeout(timeout)
        if self._endpoint.is_replaced():
            self._endpoint.check()
        self._endpoint.ask_for_newer()
        found = self._endpoint.find(1)
        return self._take(found) if found is not None else self._obtain("newest", lambda: 1, False, timeout)

    @not_compiled
    def at_least(self, number: int, timeout: float = DEFAULT) -> Version:
        """Wait for that version or a later one. Return the newest.

        Args:
            number: the lowest acceptable number.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, so the version cannot arrive.
            CallTimeout: the version did not arrive in time.
        """
        checks.count("number", number, 0, what="the number of a version")
        check_timeout(timeout)
        found = self._endpoint.find(number)
        return self._take(found) if found is not None else self._obtain("at_least", lambda: number, False, timeout)

    @not_compiled
    def refresh(self, max_behind: int = 0, timeout: float = DEFAULT) -> Version:
        """Return a version that is not too old.

        This worker knows all versions that a publisher published before it called this worker.

        Args:
            max_behind: how many versions the result may be behind the newest published one that is known here.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.

        Raises:
            PublisherLost: the publisher has gone, so the newest version is unknown.
            CallTimeout: no such version arrived in time.
        """
        checks.count("max_behind", max_behind, 0, what="a number of versions")
        check_timeout(timeout)
        endpoint, limit = self._endpoint, limit_of(timeout, self._agent.timeout)
        endpoint.check()
        until = monotonic() + limit if limit else float("inf")
        least = max(1, endpoint.published(limit) - max_behind)
        # The time left, rounded for the text of an error, but not 0, which means no limit.
        return self.at_least(least, limit and max(round(until - monotonic(), 3), 1e-3))

    def __iter__(self) -> Iterator[Version]:
        """Iterate over every version from now on, in order, until the publisher closes.

        The publisher keeps the versions that this reader has not reached yet, up to a bound (`keep`). A reader that is
        further behind continues with the oldest kept one, and skips numbers.

        Raises:
            PublisherLost: the publisher was lost.
        """
        begun = self.version or self._endpoint.published(self._agent.timeout)
        # Before the first item: from now on the publisher keeps versions for this reader.
        self._endpoint.taken(begun, True)
        try:
            while True:
                try:
                    yield self._after(max(begun, self.version), 0)
                except PublisherLost:
                    if self._endpoint.over:
                        return
                    raise
        finally:
            self._endpoint.taken(self.version, False)

    def _after(self, number: int, timeout: float) -> Version:
        """Return the version after that one, or the oldest later one that is kept."""
        # From now on, all new versions are kept for this reader.
        self._endpoint.every = True
        return self._obtain("iteration", lambda: max(number + 1, self._endpoint.machine.store.oldest), True, timeout)

    @property
    def version(self) -> int:
        """The number of the version that was read last; 0 before the first."""
        return self._endpoint.last.number if self._endpoint.last else 0

    @property
    def behind(self) -> int:
        """The number of versions published since the one that was read last."""
        return max(0, self._endpoint.published(self._agent.timeout) - self.version)

    # Loading

    def load_into(self, module: nn.Module | Mapping[str, Any]) -> None:
        """Copy the version that was read last, or else the newest, into a module; see `Version.load_into`.

        Args:
            module: a module, or its state dict.
        """
        check_module(module)
        (self._endpoint.last or self.newest()).load_into(module)

    def swap_into(self, module: nn.Module) -> None:
        """Make a module's tensors use the memory of the version that was read last, or else the newest.

        Args:
            module: a module that only reads its tensors.
        """
        check_module(module, swaps=True)
        (self._endpoint.last or self.newest()).swap_into(module)

    def _take(self, version: Version) -> Version:
        if version.number != self._endpoint.reported:
            self._endpoint.taken(version.number, self._endpoint.every)
        return version

    def _obtain(self, what: str, least: Callable[[], int], exact: bool, timeout: float) -> Version:
        endpoint, limit = self._endpoint, limit_of(timeout, self._agent.timeout)

        def look() -> Version | None:
            if not self._end.alive:
                raise UsageError(f"the subscriber to {self.name!r} was closed: create a new one")
            # `least` is evaluated at each attempt: while this thread waits, the publisher may drop the version that is
            # next. Look for the version before the publisher is checked: a version that is here can be read after
            # the publisher has gone.
            version = endpoint.find(least(), exact)
            if version is None:
                endpoint.check()
                endpoint.update(lambda: endpoint.machine.want(least(), exact, patient=True))
            return version

        def text() -> str:
            version = f"version {least()} of {self.name!r} on worker {self.worker!r}"
            return f"Subscriber.{what}: wait for {version}; the newest is {endpoint.known}"

        wait = Wait(f"Subscriber.{what}", text, lambda: [self.worker], worker=self._agent.name)
        found = endpoint.wait_until(look, wait, limit)
        if found is None:
            hint = "" if endpoint.known else ". Nothing is published yet: call publisher.publish() there"
            raise CallTimeout(
                f"version {least()} of {self.name!r} on worker {self.worker!r} did not arrive within {limit:g} s; the "
                f"newest known version is {endpoint.known}, the last one read {self.version}{hint}"
            )
        return self._take(found)

    @not_compiled
    def close(self) -> None:
        """End reading. Versions that were read stay valid."""
        # `detach` succeeds once, so either this call or the finalizer closes the endpoint.
        if self._end.detach() and not forks.is_inherited(self._agent):
            self._endpoint.close()

    def __repr__(self) -> str:
        return f"<Subscriber to {self.name!r} on {self.worker!r}: {self._endpoint if self._end.alive else 'closed'}>"


class SubscriberEndpoint(Endpoint[SubscriberProtocol]):
    def __init__(self, service: WeightsService, name: str, publisher: Identity, kind: str, limit: float) -> None:
        """Join. Wait for a publisher of that name, `limit` seconds at most, 0 for no limit."""
        super().__init__(service, service.party(publishes=False), SubscriberProtocol())
        self._name, self._publisher = name, publisher
        self.over = False  # the publisher was closed
        self._trouble = ""  # why the publisher cannot be reached, or that it was closed
        self._replaced = False  # another publisher has its name, and numbers its versions anew
        # A call to `publisher.join` is in flight; this endpoint joins again once it was answered.
        self._joining, self._joins_again = True, False
        self._layout: Layout | None = None
        self._common: set[int] = set()  # versions whose memory is shared with others on the host
        self._storing: set[tuple[int, int]] = set()  # pieces that threads write now, by the memory of their version
        self.last: Version | None = None  # the last one that the user has read
        self.reported = 0  # its number, as last reported to the publisher
        self.every = False  # the user reads every version
        # Receive messages before joining: the publisher sends the first ones before the answer of the call, and other
        # threads may handle them before this thread has that answer.
        service.add(self)
        try:
            found = service.agent.call(publisher, join, self._joining_args(kind, limit), None, limit and limit + MARGIN)
            self.machine.publisher = EndpointAddress(*found)
        except BaseException:
            service.remove(self)
            raise
        self._end_join("")

    # Joining

    def _joining_args(self, kind: str = "", limit: float = 0) -> tuple[Any, ...]:
        known, host = self.machine.publisher, self._service.agent.me.host
        return self._name, known and known.number, self.me, host, self.reported, self.every, kind, limit

    def join(self) -> None:
        """Join again, without waiting."""
        with self.changed:
            # The publisher may have answered the call in flight before it was lost, or before it forgot this endpoint.
            self._joins_again = self._joining
            if self._joining or self._replaced:
                return
            self._joining = True
            args = self._joining_args()
        try:
            self._service.agent.call_async(self._publisher, join, args, None).add_done_callback(self._joined)
        except TelegradError as error:
            self._end_join(str(error))

    def _joined(self, done: Any) -> None:
        try:
            self._replaced |= EndpointAddress(*done.wait()) != self.machine.publisher
            self._end_join("")
        except Exception as error:
            self._end_join(str(error))

    def _end_join(self, trouble: str) -> None:
        with self.changed:
            # Closed may have been handled while the answer of a successful join was under way, which must not hide it.
            self._joining, self._trouble = False, "it was closed" if self.over else trouble.partition("\n")[0]
        self.wake_waiters()
        # Not after a failure: its connection attempt is reported as a loss, and joining again would never end.
        if self._joins_again and not self._trouble:
            self.join()

    def _ask(self) -> None:
        """Join again, and wait for the answer."""
        self.join()
        with self.changed:
            self.changed.wait_for(lambda: not self._joining, self._service.agent.timeout or None)

    def is_replaced(self) -> bool:
        """Return True if the publisher has gone, and its worker was started again or has another one of its name."""
        if self._trouble and not self._replaced:
            with suppress(TelegradError):  # its worker has left
                self._replaced = self._service.agent.identify(self._publisher.name) != self._publisher
                # The worker is the same. Only an answer to `join` shows whether it has another publisher of the name.
                if self.over and not self._replaced:
                    self._ask()
        return self._replaced

    def check(self) -> None:
        """Raise PublisherLost if the publisher was closed, or cannot be reached in another attempt, else as `find`."""
        self._service.agent.check_open()
        # The connection may work again: join once more before the error is raised.
        if self._trouble and not self.is_replaced() and not self.over:
            self._ask()
        with self.changed:
            last = max(self.machine.store.newest_complete(), self.last.number if self.last else 0)
        if self._trouble or self._replaced:
            raise lost_error(self._name, self._publisher.name, "" if self._replaced else self._trouble, last)

    def lost(self, incarnation: str) -> None:
        super().lost(incarnation)
        if incarnation == self._publisher.incarnation:
            self.join()

    def close(self) -> None:
        self._service.remove(self)
        self.update(self.machine.leave)
        # Other threads may still handle messages that found this endpoint before it was removed. With `has_left` they
        # do nothing, since the versions that they refer to have no memory any more.
        with self.changed:
            self.has_left = True
            self.memory.clear()

    def on_tick(self) -> None:
        if not self._trouble:
            super().on_tick()

    # Messages

    def take(self, sender: EndpointAddress, message: Any, tensors: Any) -> None:
        # The joining call has not returned. The publisher knows this endpoint before any other does, so the sender of
        # the first message is taken for the publisher.
        self.machine.publisher = self.machine.publisher or sender
        if sender == self.machine.publisher and isinstance(message, transfer.JoinAgain):
            self.join()
        elif isinstance(message, transfer.Closed):
            with self.changed:
                self.over, self._trouble = True, "it was closed"
            self.wake_waiters()
        elif isinstance(message, transfer.WeightPiece):
            self._store(sender, message, tensors)
        else:
            memory = None
            if isinstance(message, transfer.VersionOpened):
                # Others of this host may map a version that arrives in pieces, so it is collected in common memory.
                memory = tensors[0] if message.whole else self._service.agent.memory.common(message.info.size)
            self.update(lambda: self._received(sender, message, memory))
            self.wake_waiters()

    def _received(self, sender: EndpointAddress, message: Any, memory: Tensor | None) -> Outgoing:
        if memory is not None and message.number not in self.machine.store.info:
            # Before the machine learns of the version, since it may answer waiting readers with it.
            self.memory[message.number] = memory
            if not message.whole or sender.incarnation == self.me.incarnation:
                # Others use the same memory: readers that this endpoint serves, or the publisher itself on this worker.
                # All other whole versions arrive in a private mapping or copy of their own.
                self._common.add(message.number)
        self._common &= self.memory.keys()
        return self.machine.receive(sender, message)

    def _store(self, sender: EndpointAddress, message: transfer.WeightPiece, content: Sequence[Tensor]) -> None:
        with self.changed:
            new, old = self.memory.get(message.number), self.memory.get(message.base)
            # A piece that was requested again may arrive twice. A second thread would write old bytes, where a delta
            # begins, after the first has ended and the version is complete. A version that is dropped and opened again
            # has other memory, into which the piece must be stored again.
            storing = id(new), message.piece
            if new is None or storing in self._storing or not self.machine.expects(message):
                return
            self._storing.add(storing)
            # The copy below is made without the lock, which other messages and readers need.
            place, info = self.piece(message), self.machine.store.info[message.number]
        try:
            deltas = deltas_of(message.heads, content)
            if message.base:
                apply_deltas(self._layout_of(info), info, old, new, message.piece, deltas)
            else:
                place.copy_(content[0])
        except BaseException as error:
            # Before the piece is requested again: its answer must not be ignored.
            self._storing.discard(storing)
            if not isinstance(error, DeltaRefused):
                raise
            self.update(lambda: self.machine.distrust(message.number))
            return

        def stored() -> Outgoing:
            self._storing.discard(storing)
            if self.memory.get(message.number) is not new:
                return []
            # The machine learns of the piece when its bytes are here: it then forwards them, and may declare the
            # version complete. The deltas are kept for the hosts that fetch from here.
            for number, delta in enumerate(deltas, message.base + 1):
                self.deltas.keep(number, message.piece, delta, info.size)
            return self.machine.receive(sender, message)

        self.update(stored)
        if self.machine.store.is_complete(message.number):
            self.wake_waiters()

    def _layout_of(self, info: VersionInfo) -> Layout:
        # Read once, and without the lock: another thread may store the layout of another version meanwhile.
        if (layout := self._layout) is None or layout.number != info.layout:
            self._layout = layout = Layout(info.layout, info.description)
        return layout

    def __repr__(self) -> str:
        return f"at version {self.last.number if self.last else 0} of {self.known}"

    @property
    def known(self) -> int:
        """The newest published version, as far as this worker knows."""
        return self.machine.store.newest

    def published(self, limit: float) -> int:
        """Return `known` once all messages that have arrived are handled; raise CallTimeout after `limit` seconds."""
        if not self.wait_for_messages(limit):
            raise CallTimeout(
                f"the newest version of {self._name!r} was not known within {limit:g} s, because this worker has not "
                "handled all messages that arrived"
            )
        return self.known

    def find(self, least: int, exact: bool = False) -> Version | None:
        """Return such a version if it is here. Raise ShutDown if this worker has left its group."""
        self._service.agent.check_open()
        with self.changed:
            store, last = self.machine.store, self.last
            number = least if exact else store.newest_complete()
            # The version that was read last is returned again as the same object, without another mapping. It may be
            # the only one left: an endpoint that becomes a source drops the versions that were lent to it.
            is_last = last is not None and (last.number == least if exact else last.number >= max(number, least))
            if is_last and not self.has_left:
                return last
            if self.has_left or number < least or not store.is_complete(number):
                return None
            info, memory, is_common = store.info[number], self.memory[number], number in self._common
        # Without the lock: these make a mapping, and unpickle the layout. `memory` keeps the bytes if the version is
        # dropped meanwhile. The user may write to a version, so it is a private copy-on-write view of memory that
        # others use.
        own = self._service.agent.memory.private(memory) if is_common else memory
        version = Version(number, self._layout_of(info), own, self._service.agent.memory.lasting(own))
        with self.changed:
            # Another thread may have read a newer version meanwhile.
            self.last = max(self.last or version, version, key=lambda each: each.number)
        return version

    def ask_for_newer(self) -> None:
        """If the source may have a newer version, request its newest, and wait for the answer for TICK seconds."""
        store = self.machine.store
        self.wait_for_messages(TICK)
        if self.machine.whole and store.newest > store.newest_complete() > 0 and not self._trouble:
            self.update(lambda: self.machine.want(store.newest_complete() + 1, exact=False, patient=False))
            with self.changed:
                self.changed.wait_for(lambda: not self.machine.waits, TICK)

    def taken(self, number: int, every: bool) -> None:
        self.reported, self.every = number, every
        self.update(lambda: self.machine.taken(number, every))
        # Memory of the version that was read before may be free now. Tell the source at once, and not with the next
        # message: it reuses the memory for the next version.
        if (source := self.machine.source) is not None:
            self._service.agent.give_back(source.worker)
