"""The learner's side: publish versions of weights."""

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.errors import CallTimeout, InvalidArgument, PublisherLost, UnknownPublisher, UsageError
from telegrad.ext.calls import folded, known_as, not_compiled
from telegrad.ext.feedback import Wait, checks
from telegrad.ext.host import forks
from telegrad.ext.workers import current, listed
from telegrad.rpc import RRef, rpc_sync
from telegrad.weights.deltas import DeltaEncoder, Deltas
from telegrad.weights.protocols import PublisherProtocol
from telegrad.weights.transfer import EndpointAddress, Outgoing, VersionInfo
from telegrad.weights.tree_layout import Layout, Rounding, Snapshots
from telegrad.weights.weight_service import TICK, Closable, Endpoint, WeightsService

PIECE = 1 << 20  # bytes per message between hosts
KEEP = 8  # maximum number of versions for subscribers that read every one


@folded
class Publisher(Closable):
    """Publishes versions of a learner's weights under a name, to the `Subscriber`s of any worker.

    The source is read only by `publish`. `close()`, leaving `with publisher:` or garbage collection ends the publisher.

    Args:
        name: the name that subscribers use.
        source: a module, a `RemoteModule`, a `Pipeline`, a reference to a module, a state dict or any other tree of
            tensors, or a function that returns one.
        keep: the maximum number of recent versions kept for subscribers that iterate over all of them.
        dtype: larger floating-point types are rounded to this type, such as `torch.bfloat16`. Or a function that gets a
            tensor's name and the tensor, and returns its type, or None to keep it.
        deltas: send only the differences to hosts that have the previous version. "fast" omits unchanged elements;
            "small" also spends a second per 100 MB to deflate changed bits, which helps on links slower than that;
            "off".

    Raises:
        UsageError: this worker already publishes under that name.
        InvalidArgument: the source cannot be published.

    Example:
        >>> publisher = telegrad.weights.Publisher("numbers", {"bias": torch.ones(2)})
        >>> publisher.publish()
        1
        >>> def read():
        ...     import telegrad
        ...     with telegrad.weights.Subscriber("driver", "numbers") as subscriber:
        ...         return subscriber.newest().state["bias"].sum()
        >>> rpc.rpc_sync("worker1", read)
        tensor(2.)
        >>> publisher.close()
    """

    _kind = ""  # "Sharded" if what it publishes is only for a ShardedSubscriber

    def __init__(
        self, name: str, source: Any, keep: int = KEEP, dtype: Rounding = None, deltas: Deltas = "fast"
    ) -> None:
        check_published(name, dtype, deltas)
        checks.count("keep", keep, what="a number of versions")
        self.name = name
        self._read = _reader_of(source)
        worker = current.here()
        self._agent = worker.agent
        self._service = worker.attached(WeightsService)
        # Guards _snapshots. A plan of copies fits the tensors of the tree that was laid out last, so no other thread
        # may lay out its tree before the version is filled. It also keeps the order of versions: the deltas of one
        # begin at the version before. Reentrant, since the program's function of types is called under it.
        self._publishing = threading.RLock()
        self._snapshots = Snapshots(dtype)
        self._encoder = DeltaEncoder(deltas)
        self._endpoint = PublisherEndpoint(self._service, name, keep, self._kind)
        self._service.add(self._endpoint, name)
        # The finalizer has no reference to this object, which it would keep alive. It may run on any thread, with any
        # lock held: see `close_later`.
        self._end = weakref.finalize(self, self._service.close_later, self._endpoint)
        self._end.atexit = False

    @not_compiled
    def publish(self, wait: float | None = None) -> int:
        """Publish the current state of the source.

        Return once the source was copied: it may be changed from then on.

        Args:
            wait: also wait until every subscriber has read this version or a later one, for at most this many seconds;
                0 for no limit.

        Returns:
            The number of this version, counted from 1.

        Raises:
            UsageError: the publisher was closed.
            ShutDown: this worker has left its group.
            InvalidArgument: the source contains a value that cannot be published; `CannotEncode` is possible, too.
            CallTimeout: a subscriber has not read it in time. The version was published all the same.
        """
        check_wait(wait)
        if not self._end.alive:
            raise UsageError(f"the publisher {self.name!r} was closed and cannot publish: create a new one")
        self._agent.check_open()
        # Without the lock: this runs user code, or calls other workers.
        tree = self._read()
        with self._publishing:
            snapshot = self._snapshots.of(tree)
            memory = self._agent.memory.common(snapshot.layout.size)
            snapshot.fill(memory)
            number = self._endpoint.publish(snapshot.layout, memory, self._encoder)
        if wait is not None:
            self._wait_for_readers(number, wait)
        return number

    @property
    def version(self) -> int:
        """The number of the newest version; 0 before the first."""
        return self._endpoint.machine.store.newest

    @property
    def versions(self) -> list[int]:
        """The versions whose memory this worker keeps: the newest, and those that others are about to read."""
        with self._endpoint.changed:
            return sorted(self._endpoint.memory)

    @property
    def subscribers(self) -> dict[str, int]:
        """The subscribers, with the version that the user of each has read last; 0 for none."""
        with self._endpoint.changed:
            return {
                party.worker if party.number == 1 else f"{party.worker} ({party.number})": read.number
                for party, read in self._endpoint.machine.taken.items()
            }

    def _wait_for_readers(self, number: int, timeout: float) -> None:
        endpoint = self._endpoint

        def is_over() -> bool | None:
            self._agent.check_open()
            return not endpoint.behind(number) or None

        def missing() -> list[str]:
            return [party.worker for party in endpoint.behind(number)]

        def text() -> str:
            return f"Publisher.publish: version {number} of {self.name!r} was not received yet by {listed(missing())}"

        wait = Wait("Publisher.publish", text, missing, worker=self._agent.name)
        if endpoint.wait_until(is_over, wait, timeout) is None:
            raise CallTimeout(
                f"version {number} of {self.name!r} was not received within {timeout:g} s by {listed(missing())}. It "
                "is published, and they can still receive it"
            )

    @not_compiled
    def close(self) -> None:
        """End publishing. Subscribers keep the versions that they have."""
        if self._end.detach() and not forks.is_inherited(self._service):
            self._endpoint.close()

    def __repr__(self) -> str:
        return f"<Publisher {self.name!r}: {self._endpoint if self._end.alive else 'closed'}>"


def _reader_of(source: Any) -> Callable[[], Any]:
    """Return a function that returns the current state of a source."""
    if isinstance(source, nn.Module):  # includes remote modules and pipelines, whose state_dict asks the owners
        return source.state_dict
    if isinstance(source, RRef):
        return partial(rpc_sync, source.owner(), _state_of, (source,))
    if isinstance(source, Mapping | list | tuple | Tensor):
        return lambda: source
    if callable(source):
        return source  # type: ignore[no-any-return]
    raise InvalidArgument(
        f"source must be a module, a state dict, another tree of tensors, or a function that returns one, "
        f"not {checks.short_repr(source)}"
    )


@known_as("Publisher.publish")
def _state_of(reference: RRef[Any]) -> Any:
    value = reference.local_value()
    return value.state_dict() if isinstance(value, nn.Module) else value


class PublisherEndpoint(Endpoint[PublisherProtocol]):
    def __init__(self, service: WeightsService, name: str, keep: int, kind: str) -> None:
        me = service.party(publishes=True)
        super().__init__(service, me, PublisherProtocol(me, service.agent.me.host, keep))
        self._name = name
        self.kind = kind

    def __repr__(self) -> str:
        return f"at version {self.machine.store.newest}, {len(self.machine.taken)} subscribers"

    def publish(self, layout: Layout, memory: Tensor, encoder: DeltaEncoder) -> int:
        """Publish a version, on one thread at a time."""
        info = VersionInfo(layout.number, layout.description, layout.size, PIECE)
        # Deltas are made now, since the memory of the version before is reused soon after. Only other hosts get them:
        # this host maps the new memory. The lock is not held meanwhile, as encoding takes about a second per GB.
        with self.changed:
            base = self.machine.store.newest
            last = self.machine.store.info.get(base)
            fits = last is not None and last.layout == info.layout and self.machine.chain.leaves_the_host
            old = self.memory[base] if fits else None
        found = encoder.encode(layout, info, old, memory) if old is not None else {}

        def put() -> Outgoing:
            # First the bytes: the machine answers waiting requests with this version at once.
            self.memory[base + 1] = memory
            for piece, delta in found.items():
                self.deltas.keep(base + 1, piece, delta, info.size)
            return self.machine.publish(info)

        self.update(put)
        return base + 1

    def close(self) -> None:
        # Remove the name first: no later call to join finds this publisher, and each waits for one that works.
        self._service.remove(self, self._name)
        self.update(self.machine.close)

    def behind(self, number: int) -> list[EndpointAddress]:
        with self.changed:
            return self.machine.behind(number)


_ROUNDING = "a type of floating numbers, or a function of a name and a tensor"


def check_published(name: Any, dtype: Any, deltas: Any) -> None:
    """Raise InvalidArgument for arguments that cannot be published with."""
    checks.text("name", name, 'a name, as in Publisher("policy", model)')
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            checks.raise_invalid("dtype", _ROUNDING, str(dtype))
    elif dtype is not None:
        checks.function("dtype", dtype, _ROUNDING, classes=False)
    checks.one_of("deltas", deltas, ("off", "fast", "small"))


def check_wait(wait: Any) -> None:
    if wait is not None:
        checks.seconds("wait", wait)


@known_as("Subscriber()")
def join(
    name: str, number: int | None, party: EndpointAddress, host: str, taken: int, every: bool, kind: str, timeout: float
) -> EndpointAddress:
    """Add a subscriber, and return its publisher.

    Wait for a publisher of that name, unless `number` names one that must exist. If another one has taken its name,
    return that one without adding the subscriber. Raise UsageError if it is of another kind.
    """
    worker = current.here()
    service, agent = worker.attached(WeightsService), worker.agent
    until = monotonic() + timeout if timeout else float("inf")
    wait = Wait("Subscriber()", lambda: f"there is no publisher {name!r} here", worker=agent.name)
    with wait, agent.waiting(), service.changed:
        while name not in service.published and number is None:
            agent.check_open()
            left = until - monotonic()
            if left <= 0:
                names = sorted(service.published)
                there = f"its publishers are {listed([*map(repr, names)])}" if names else "it has no publishers"
                raise UnknownPublisher(
                    f"worker {agent.name!r} has no publisher {name!r}, and none was created within {timeout:g} s; "
                    f"{there}. Create it there with Publisher({name!r}, model), and keep the object"
                )
            # The end of the agent does not notify this condition.
            service.changed.wait(min(left, TICK))
        endpoint = service.published.get(name)
    if endpoint is None:
        raise PublisherLost(f"the publisher {name!r} was closed")
    assert isinstance(endpoint, PublisherEndpoint)
    if number is None and endpoint.kind != kind:
        is_of = f"a {endpoint.kind}Publisher: read it by a {endpoint.kind}Subscriber"
        raise UsageError(f"{name!r} on worker {agent.name!r} is {is_of}")
    # A subscriber that joins again has a number. If it is not that of this publisher, the subscriber learns by the
    # answer that another one has the name, and does not follow it: versions are numbered anew.
    if number in (None, endpoint.me.number):
        endpoint.update(lambda: endpoint.machine.join(EndpointAddress(*party), host, taken, every))
    return endpoint.me


def lost_error(name: str, worker: str, why: str, last: int) -> PublisherLost:
    """Return the error of a subscriber that has read version `last`; `why` is empty if another publisher has the name:
    a subscriber stays with its own, since `behind` and `at_least` would compare numbers of two."""
    if not why:
        why, hint = "another one has its name", "create a new Subscriber: its versions are numbered anew"
    elif last:
        hint = f"version {last} can still be read with newest()"
    else:
        hint = "no version of it has arrived"
    return PublisherLost(f"the publisher {name!r} on worker {worker!r} is no longer available ({why}); {hint}")
