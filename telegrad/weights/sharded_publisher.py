"""Publish and read weights that several workers own in parts. Each version is consistent over all owners.

Each owner publishes its parts independently. Then the driver publishes the contents: the owner of each part of each
tensor, and the owners' version numbers. So readers see a version only when all of its parts exist. They use only the
parts that its contents name, so parts of two versions never mix. Owners keep some versions before the newest, for
readers of older contents. A reader that still comes too late continues with newer contents.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from math import prod
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad.errors import CallTimeout, InvalidArgument, PeerError, UsageError
from telegrad.ext.calls import DEFAULT, call_all, folded, known_as, limit_of
from telegrad.ext.feedback import checks
from telegrad.ext.modules import RemotePart, branches, state_of, update_replicas
from telegrad.ext.workers import WorkerInfo
from telegrad.rpc import RRef, remote
from telegrad.weights.deltas import Deltas
from telegrad.weights.publisher import Publisher, check_published, check_wait
from telegrad.weights.shards import Box, Part, ShardCopy, is_within, plan, slices
from telegrad.weights.subscriber import Subscriber
from telegrad.weights.tree_layout import Rounding, place_of
from telegrad.weights.weight_service import Closable
from telegrad.weights.weight_version import Version

KEEP = 4  # versions kept per owner: a reader that takes longer than this many publications may find none complete
PARTS = ".parts"  # suffix of the names under which owners publish

State = Callable[[], Mapping[str, Any]]
_WANTED = "a list of names, or a dictionary with the Box of each"
Wanted = Iterable[str] | Mapping[str, Box | None] | None


class Shard(NamedTuple):
    """A part of a tensor in the state of an owner. It begins at `offsets` in a tensor of shape `shape`.

    Example:
        >>> telegrad.weights.Shard(torch.ones(2, 4), offsets=(2, 0), shape=(8, 4)).shape
        (8, 4)
    """

    tensor: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class Content(NamedTuple):
    part: Part
    shape: tuple[int, ...]  # of the whole tensor


class ManifestPublisher(Publisher):
    _kind = "Sharded"


class ManifestSubscriber(Subscriber):
    _kind = "Sharded"


@folded
class ShardedPublisher(Closable):
    """Publishes versions of weights that several workers own, under one name. This worker is the driver.

    Args:
        name: the name that subscribers use.
        source: a model that is spread over workers. Or for each worker a function that returns its part of the state:
            tensors by their names, with a `Shard` or `DTensor` for a part of a tensor.
        dtype: as for `Publisher`.
        deltas: as for `Publisher`.

    Raises:
        UsageError: this worker already publishes under that name.

    Example:
        >>> halves = nn.Sequential(*(telegrad.nn.RemoteModule(on, nn.Linear, (2, 2)) for on in ["worker0", "worker1"]))
        >>> publisher = telegrad.weights.ShardedPublisher("halves", halves)
        >>> publisher.publish()
        1
        >>> publisher.close()
    """

    def __init__(self, name: str, source: Any, dtype: Rounding = None, deltas: Deltas = "fast") -> None:
        check_published(name, dtype, deltas)
        self.name = name
        shares = _shares(source)
        self._spread = [part for share in shares.values() if not callable(share) for part in share if part.is_spread]
        self._contents: dict[str, list[Content]] = {}
        self._editions = dict.fromkeys(shares, 0)  # edition of each owner's contents that is known here
        self._manifest: dict[str, Any] = {}
        self._attempts = 0  # calls of `publish`
        self._publishing = threading.Lock()  # guards the four above
        # First, since it fails if this worker has a publisher of that name. An error of an owner is reported later.
        self._publisher = ManifestPublisher(name, self._manifest)
        with ExitStack() as stack:
            stack.push(self._publisher)
            made = [remote(at, ShardOwner, (name + PARTS, share, dtype, deltas)) for at, share in shares.items()]
            stack.pop_all()
        self._owners = dict(zip(shares, made, strict=True))

    def publish(self, wait: float | None = None) -> int:
        """Publish the current parts of all owners. They must not change during the call.

        Args:
            wait: as for `Publisher.publish`.

        Returns:
            The number of this version.

        Raises:
            WorkersFailed: several owners failed; if only one failed, its own error is raised. There is no new version.
            CallTimeout: as for `Publisher.publish`, like its other errors.
        """
        check_wait(wait)
        agent = self._publisher._agent
        agent.check_open()
        with ExitStack() as stack:
            # One thread at a time: later contents must name later versions, since owners drop older ones. The thread
            # before may need the slot of this one, if an owner is here.
            with agent.waiting():
                stack.enter_context(self._publishing)
            # First all owners get their parts: if one fails, none publishes, and new readers find the version before.
            # Then they publish, and then the driver the contents: a reader that sees the contents can get all parts.
            self._attempts += 1
            update_replicas(self._spread)
            self._ask_all("prepare", lambda at: (self._attempts,))
            published = self._ask_all("publish", lambda at: (self._attempts, self._editions[at]))
            for worker, (_, edition, contents) in published.items():
                if contents is not None:
                    self._editions[worker], self._contents[worker] = edition, contents
            self._manifest["contents"] = self._contents
            self._manifest["numbers"] = torch.tensor([number for number, *_ in published.values()], device="cpu")
            number = self._publisher.publish()
        if wait is not None:
            self._publisher._wait_for_readers(number, wait)
        return number

    def _ask_all(self, method: str, args: Callable[[str], tuple[Any, ...]]) -> dict[str, Any]:
        return call_all(
            self._owners, lambda at, owner: owner._call_async(method, DEFAULT, args(at), {}, "ShardedPublisher.publish")
        )

    @property
    def version(self) -> int:
        """The number of the newest version; 0 before the first."""
        return self._publisher.version

    def close(self) -> None:
        """End publishing. Subscribers keep the versions that they have."""
        self._publisher.close()
        for owner in self._owners.values():
            with suppress(PeerError):  # the owner was lost, and its part ended with it
                owner._call_async("close", DEFAULT, (), {}, "ShardedPublisher.close").wait()

    def __repr__(self) -> str:
        return f"<ShardedPublisher {self.name!r}: parts of {len(self._owners)} workers, {self._publisher._endpoint}>"


@known_as("ShardedPublisher()")
class ShardOwner:
    def __init__(self, name: str, share: list[RemotePart] | State, dtype: Rounding, deltas: Deltas) -> None:
        self._share = share
        self._state: dict[str, Tensor] = {}
        self._contents: list[Content] = []
        self._edition = 0  # of the contents
        self._prepared: tuple[int, list[tuple[Content, Tensor]]] = 0, []  # the number of an attempt, and its parts
        self._publishing = threading.Lock()  # guards the four above
        self._publisher = Publisher(name, self._state, KEEP, dtype, deltas)

    def _telegrad_runs(self, method: str) -> str:
        return f"ShardedPublisher.{'publish' if method == 'prepare' else method}"

    def prepare(self, attempt: int) -> None:
        """Get the parts for an attempt to publish."""
        share = self._share
        if callable(share):
            found = checks.mapping("the result of a function in source", share(), "a dictionary of tensors by names")
        else:
            found = {name: each for part in share for name, each in state_of(part).items()}
        described = [_described(name, value) for name, value in found.items()]
        # A call that the driver has given up may still run when the next one arrives.
        with self._publishing:
            if attempt > self._prepared[0]:
                self._prepared = attempt, described

    def publish(self, attempt: int, known: int) -> tuple[int, int, list[Content] | None]:
        """Publish the parts of an attempt; return the number of the version, the edition of its contents, and the
        contents if `known` is another edition."""
        with self._publishing:
            latest, described = self._prepared
            if attempt != latest:
                raise UsageError("a later call of publish() has begun")
            contents = [content for content, _ in described]
            self._state.clear()
            self._state.update({str(number): tensor for number, (_, tensor) in enumerate(described)})
            number = self._publisher.publish()
            # The contents have an entry for each tensor and rarely change. So the driver names the edition that it has,
            # and gets the contents only if they differ.
            if contents != self._contents or not self._edition:
                self._contents, self._edition = contents, self._edition + 1
            return number, self._edition, contents if known != self._edition else None

    def close(self) -> None:
        self._publisher.close()


def _shares(source: Any) -> dict[str, Any]:
    """Return the source of each worker."""
    if isinstance(source, nn.Module | RRef):
        shares: dict[str, Any] = {}
        for branch in branches(source):
            shares.setdefault(branch.root.owner_name(), []).append(branch)
        return shares
    if source and isinstance(source, Mapping) and all(callable(each) for each in source.values()):
        return dict(source)
    raise InvalidArgument(
        "source must be a model that is spread over several workers, or a dictionary from each worker's name to a "
        f"function that returns its state, not {checks.short_repr(source)}"
    )


def _described(name: str, value: Any) -> tuple[Content, Tensor]:
    # if not imported, there are no DTensors
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    tensor, offsets, shape = value, tuple[int, ...](), tuple[int, ...]()
    if isinstance(value, Shard):
        tensor, offsets, shape = value
    elif isinstance(value, distributed):
        rules = sys.modules["torch.distributed.tensor._utils"]
        if any(placement.is_partial() for placement in value.placements):
            raise InvalidArgument(f"{name!r} has partial placements, which are not summed yet: redistribute it first")
        _, offsets = rules.compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        tensor, offsets, shape = value.to_local(), tuple(offsets), tuple(value.shape)
    elif isinstance(value, Tensor):
        offsets, shape = (0,) * value.dim(), tuple(value.shape)
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name!r} cannot be published in parts: it is not a tensor, but {type(tensor).__name__}")
    box = Box(offsets, tuple(tensor.shape))
    if not is_within(box, shape):
        raise InvalidArgument(
            f"{name!r} is not a part of a tensor of shape {shape}: its offsets are {box[0]}, and its sizes {box[1]}"
        )
    return Content(Part(name, Box(tuple(offsets), box.sizes)), tuple(shape)), tensor.detach()


# Readers


@folded
class ShardedSubscriber(Closable):
    """Reads the versions of a `ShardedPublisher`.

    Args:
        worker: the worker of the publisher.
        name: the name of the publisher.
        wanted: names of tensors, or the wanted part of each (`{"layer.weight": Box((0, 0), (64, 128))}`; None means all
            of it). The parts need not match those of the owners. Default: all tensors.
        timeout: seconds to wait for the publisher; 0 for no limit, default: the timeout in the options.

    Raises:
        UnknownPublisher: that worker has no publisher of that name.
        UnknownWorker: there is no such worker.

    Example:
        >>> halves = nn.Sequential(*(telegrad.nn.RemoteModule(on, nn.Linear, (2, 2)) for on in ["worker0", "worker1"]))
        >>> publisher = telegrad.weights.ShardedPublisher("parts", halves)
        >>> number = publisher.publish()
        >>> subscriber = telegrad.weights.ShardedSubscriber("driver", "parts", wanted=["1.bias"])
        >>> subscriber.newest().state["1.bias"].shape
        torch.Size([2])
        >>> subscriber.close()
        >>> publisher.close()
    """

    def __init__(
        self, worker: str | int | WorkerInfo, name: str, wanted: Wanted = None, timeout: float = DEFAULT
    ) -> None:
        if isinstance(wanted, Mapping):
            for part in wanted.values():
                if part is not None and not isinstance(part, Box):
                    checks.raise_invalid("wanted", "names of tensors, or a Box or None for each name", wanted)
        elif wanted is not None:
            wanted = [checks.text("wanted", each, _WANTED) for each in checks.several("wanted", wanted, _WANTED)]
        self._name = name
        self._wanted = wanted
        self._timeout = timeout
        self._manifest = ManifestSubscriber(worker, name, timeout)
        self._owners: dict[str, Subscriber] = {}
        self._plan: Plan | None = None
        self._taken: Version | None = None

    def newest(self, timeout: float = DEFAULT) -> Version:
        """Return the newest version known here; see `Subscriber.newest`.

        Args:
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.
        """
        return self._obtain(self._manifest.newest, timeout)

    def at_least(self, number: int, timeout: float = DEFAULT) -> Version:
        """Return that version or a later one; see `Subscriber.at_least`.

        Args:
            number: the lowest acceptable number.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.
        """
        checks.count("number", number, 0, what="the number of a version")
        return self._obtain(lambda timeout: self._manifest.at_least(number, timeout), timeout)

    def refresh(self, max_behind: int = 0, timeout: float = DEFAULT) -> Version:
        """Return a version that is at most `max_behind` versions behind the newest; see `Subscriber.refresh`.

        Args:
            max_behind: the accepted number of newer versions.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Returns:
            A `Version`.
        """
        checks.count("max_behind", max_behind, 0, what="a number of versions")
        return self._obtain(lambda timeout: self._manifest.refresh(max_behind, timeout), timeout)

    @property
    def version(self) -> int:
        """The number of the version that was read last; 0 before the first."""
        return self._taken.number if self._taken is not None else 0

    def _obtain(self, read: Callable[[float], Version], timeout: float) -> Version:
        limit = limit_of(timeout, self._manifest._agent.timeout)
        until = monotonic() + limit if limit else float("inf")

        def left() -> float:
            if until == float("inf"):
                return 0
            if monotonic() >= until:
                raise CallTimeout(
                    f"no version of {self._name!r} was read within {limit:g} s; the last is {self.version}"
                )
            return until - monotonic()

        contents = read(left())
        while True:
            if self._taken is not None and self._taken.number == contents.number:
                return self._taken
            # An owner may have published again and dropped the part while this thread read the contents. It is useless
            # to wait for the same contents again, so the next ones are read.
            found = self._gather(contents, left)
            if found is not None:
                self._taken = found
                return found
            contents = self._manifest.at_least(contents.number + 1, left())

    def _gather(self, version: Version, left: Callable[[], float]) -> Version | None:
        """Return the wanted parts of a version, or None if an owner no longer keeps its part."""
        contents: dict[str, list[Content]] = version.state["contents"]
        # Read once: another thread may make the plan of other contents meanwhile.
        if (planned := self._plan) is None or planned.contents != contents:
            self._plan = planned = Plan(contents, self._wanted)
        numbers = dict(zip(contents, version.state["numbers"].tolist(), strict=True))
        parts: dict[str, dict[str, Tensor]] = {}
        for owner in planned.owners:
            if owner not in self._owners:
                self._owners[owner] = Subscriber(owner, self._name + PARTS, left())
        for owner in planned.owners:
            # Exactly the version that the contents name, and no later one. `_after` also makes the owner keep later
            # versions for this reader, which it needs for the next contents.
            part = self._owners[owner]._after(numbers[owner] - 1, left())
            if part.number != numbers[owner]:
                return None
            parts[owner] = part.state
        return Gathered(version.number, planned.state(parts))

    def close(self) -> None:
        """End reading. Versions that were read stay valid."""
        for subscriber in (self._manifest, *self._owners.values()):
            subscriber.close()

    def __repr__(self) -> str:
        return f"<ShardedSubscriber to {self._name!r} on {self._manifest.worker!r}: at version {self.version}>"


class Plan:
    def __init__(self, contents: dict[str, list[Content]], wanted: Wanted) -> None:
        self.contents = contents
        shapes: dict[str, tuple[int, ...]] = {}
        for part, shape in (content for theirs in contents.values() for content in theirs):
            if shapes.setdefault(part.name, shape) != shape:
                raise UsageError(f"owners publish {part.name!r} with the shapes {shapes[part.name]} and {shape}")
        boxes = wanted if isinstance(wanted, Mapping) else dict.fromkeys(shapes if wanted is None else wanted)
        missing = sorted(boxes.keys() - shapes.keys())
        if missing:
            raise UsageError(
                f"no worker publishes {', '.join(missing)}; the published names are {', '.join(sorted(shapes))}"
            )
        for name, box in boxes.items():
            if box is not None and not is_within(box, shapes[name]):
                raise UsageError(f"the wanted part of {name!r}, {box}, is not within its shape {shapes[name]}")
        self._parts = [Part(name, box or Box((0,) * len(shapes[name]), shapes[name])) for name, box in boxes.items()]
        self._copies: list[list[ShardCopy]] = [[] for _ in self._parts]
        owned = {owner: [content.part for content in theirs] for owner, theirs in contents.items()}
        for copy in plan(owned, self._parts):
            self._copies[copy.wanted].append(copy)
        self.owners = sorted({copy.owner for copies in self._copies for copy in copies})

    def state(self, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the state by name; parts like an owner's are not copied, and those of two names are joined once."""
        # A tied weight has several names. The state has one tensor for them, as far as they have the same parts.
        made: dict[Any, Tensor] = {}
        state: dict[str, Tensor] = {}
        for part, copies in zip(self._parts, self._copies, strict=True):
            sources = [parts[copy.owner][str(copy.owned)][slices(copy.source)] for copy in copies]
            places = ((copy.target, place_of(source)) for copy, source in zip(copies, sources, strict=True))
            same = (part.box.sizes, *places)
            if same not in made:
                made[same] = _joined(part, [copy.target for copy in copies], sources)
            state[part.name] = made[same].detach()
        return state


def _joined(part: Part, targets: list[Box], sources: list[Tensor]) -> Tensor:
    sizes = part.box.sizes
    if len(sources) == 1 and targets[0].sizes == sizes:
        return sources[0]
    types = {source.dtype for source in sources}
    if len(types) > 1:
        raise InvalidArgument(
            f"the parts of {part.name!r} are of several types, {', '.join(sorted(map(str, types)))}: its owners must "
            "publish the same type"
        )
    made = torch.empty(sizes, dtype=types.pop(), device="cpu")
    assert made.numel() == sum(prod(target.sizes) for target in targets)
    for target, source in zip(targets, sources, strict=True):
        made[slices(target)] = source
    return made


class Gathered(Version):
    """A version whose parts come from several workers."""

    def __init__(self, number: int, state: dict[str, Tensor]) -> None:
        self.number = number
        self._state = state
        self._layout = None

    def __repr__(self) -> str:
        return f"<Version {self.number}: {sum(each.nbytes for each in self._state.values())} bytes, gathered>"
