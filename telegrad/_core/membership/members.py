"""The members of a group, and their addresses.

Three types describe a worker, for different uses:

    Member      all that it publishes about itself: its addresses, its host, its devices
    Identity    the part that distinguishes it from all others, including earlier and later owners of its name;
                messages, references and contexts store this
    WorkerInfo  what users see: a name and a rank, which another worker may have later, and its role

A worker that joins with only a role has no name yet: it gets a name from its role and a number (`named`).

Related types describe connections: a `Hello` is what a worker claims in the handshake, before it is authenticated; a
`Peer` holds the calls from here to a worker, and a `Caller` those from a worker to here.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

from telegrad._core.checks import short_repr
from telegrad._core.texts import did_you_mean, plural
from telegrad.errors import InvalidName, UnknownWorker

LONGEST_NAME = 127
LONGEST_ROLE = 120  # a number after it makes a name
SHOWN = 16  # names in a message
HOST = "cpu"
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


class Identity(NamedTuple):
    """One worker, distinct from earlier and later workers with the same name."""

    name: str
    id: int
    incarnation: str


class Devices(NamedTuple):
    """Data that a worker publishes about its accelerators."""

    accelerators: int = 0
    maps: dict[str, dict[str, str]] = {}  # noqa: RUF012 - never changed; by the name of the worker that is called
    allowed: tuple[str, ...] = ()  # if not empty: the devices that calls may use

    def uses_of(self, name: str, others: Iterable[Devices]) -> set[str]:
        """Return the devices of this worker, `name`, that calls can use; `others` are those of the other workers."""
        used = {*self.allowed, *(source for map_ in self.maps.values() for source in map_)}
        used.update(target for other in others for target in other.maps.get(name, {}).values())
        return used - {HOST}


class Member(NamedTuple):
    """The information that a worker publishes about itself."""

    name: str
    id: int
    incarnation: str  # distinguishes a restarted worker from its earlier life
    program: str  # equal if the main programs are equal
    host: str  # equal if the kernel and the network are the same
    unix: str  # the name of its Unix socket, or empty
    tcp: tuple[str, int]
    devices: Devices = Devices()
    role: str = ""
    uses_tls: bool = False

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        return cls.of(json.loads(text))

    @classmethod
    def of(cls, told: list[Any]) -> Member:
        """Return a member from JSON. Later versions may append fields."""
        name, id_, incarnation, program, host, unix, (address, port), (count, maps, allowed), role, *more = told
        devices = Devices(count, maps, tuple(allowed))
        return cls(name, id_, incarnation, program, host, unix, (address, port), devices, role, more[:1] == [True])

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.id, self.incarnation)

    def __str__(self) -> str:
        address, port = self.tcp
        name = repr(self.name) if self.name else f"one of role {self.role!r}"
        rank = f"rank {self.id}" if self.id >= 0 else "no rank yet"
        return f"{name} ({rank}, at {f'[{address}]' if ':' in address else address}:{port})"


class _NameAndId(NamedTuple):
    name: str
    id: int


class WorkerInfo(_NameAndId):
    """Names a worker of the group. It comes from `get_worker_info`, and calls accept it. A pair with a `role`.

    Example:
        >>> name, rank = rpc.get_worker_info("worker1")
        >>> name, rank
        ('worker1', 2)
    """

    role: str = ""

    def __new__(cls, name: str, id: int, role: str = "") -> Self:  # noqa: A002 - its name in the API
        check_name(name)
        made = super().__new__(cls, name, id)
        if role:
            made.role = role
        return made

    def __repr__(self) -> str:
        role = f", role={self.role!r}" if self.role else ""
        return f"WorkerInfo(name={self.name!r}, id={self.id!r}{role})"


class View(NamedTuple):
    """The present workers by rank. Two views of one worker with the same version are equal."""

    version: int
    workers: tuple[WorkerInfo, ...]


def info(member: Member) -> WorkerInfo:
    """Return the information about a member that users see."""
    return WorkerInfo(member.name, member.id, member.role)


def named(members: Iterable[Member]) -> list[Member]:
    """Return the members by rank; members without a name get their role and a number: 0, 1, ... within each role."""
    by_rank = sorted(members, key=lambda member: member.id)
    taken = {member.name for member in by_rank}
    numbers = {member.role: itertools.count() for member in by_rank}
    return [each if each.name else each._replace(name=_free(each.role, numbers[each.role], taken)) for each in by_rank]


def _free(role: str, numbers: Iterator[int], taken: Collection[str]) -> str:
    return next(name for number in numbers if (name := f"{role}{number}") not in taken)


class Members:
    """A table of members of different names and ranks. Iteration is by rank."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._by_id = {member.id: member for member in sorted(members, key=lambda member: member.id)}
        self._by_name = {member.name: member for member in self._by_id.values()}

    def find(self, to: str | int) -> Member:
        """Return the member with that name or rank; raise UnknownWorker if there is none."""
        member = self._by_name.get(to) if isinstance(to, str) else self._by_id.get(to)
        if member is None:
            raise unknown(to, [each.name for each in self])
        return member

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __repr__(self) -> str:
        return f"<Members: {listed([member.name for member in self])}>"


def unknown(to: str | int, names: list[str], advice: str = "", gone: Collection[str] = ()) -> UnknownWorker:
    """Return the error for a missing worker, with the known `names` and similar ones; `gone` were there before."""
    what = f"is named {short_repr(to)}" if isinstance(to, str) else f"has rank {short_repr(to)}"
    if to in gone:
        meant = " any more: that worker has left, or was lost."
    else:
        meant = (did_you_mean(to, names) if isinstance(to, str) and len(to) <= LONGEST_NAME else "") or "."
    return UnknownWorker(
        f"could not find destination: no worker {what}{meant} The group has: {listed(names)}. "
        f"Give the name or the rank that the worker was started with; it must have joined before it is called{advice}"
    )


def listed(names: list[str]) -> str:
    """Return the first SHOWN names as text."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or "nobody"


def check_role(role: str) -> None:
    """Raise InvalidName if `role` is not a valid role of a worker; "" means no role."""
    if role != "" and not (isinstance(role, str) and _NAME.fullmatch(role) and len(role) <= LONGEST_ROLE):
        raise InvalidName(
            f"{short_repr(role)} is not valid as a worker's role: a role has letters, digits, _, : and -, and at "
            f"most {LONGEST_ROLE} of them"
        )


def check_name(name: str) -> None:
    """Raise InvalidName if `name` is not a valid name of a worker."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise InvalidName(
            f"{short_repr(name)} cannot be a worker's name. Worker name must match [A-Za-z0-9_:-]*, must be non-empty "
            f"and shorter than {LONGEST_NAME + 1} characters"
        )


def missing_names(names: Collection[str], wanted: int | Collection[str]) -> list[str]:
    return [] if isinstance(wanted, int) else [name for name in wanted if name not in names]


def describe_missing(names: Collection[str], wanted: int | Collection[str], role: str = "") -> str:
    """Return which of the wanted workers are missing, as a text; "" for none."""
    there = ", ".join(sorted(names))
    if isinstance(wanted, int):
        of_role = f" of role {role!r}" if role else ""
        few = f"the group has {plural(len(names), 'worker')}{of_role}, not {wanted}"
        return "" if len(names) >= wanted else f"{few}: {there}" if names else few
    absent = ", ".join(map(repr, missing_names(names, wanted)))
    return f"{absent} missing; the group has {there}" if absent else ""


# Device maps: the device of another worker where the tensors of each device of this worker arrive. Devices are strings
# like "cuda:0"; the host's memory is "cpu". Devices without an entry: the host maps to the other host, and tensors of
# an accelerator cannot be sent.


def map_errors(group: Mapping[str, Devices], whole: bool = True) -> Iterable[str]:
    """Yield the faults in the device maps of a group; if not `whole`, only those between its members."""
    for name, mine in group.items():
        if whole and (strangers := sorted(set(mine.maps) - set(group))):
            yield (
                f"Node {name} has invalid target node names in its device maps: {', '.join(strangers)}. "
                f"The group has {', '.join(sorted(group))}"
            )
        if beyond := [device for device in mine.allowed if _index(device) >= mine.accelerators]:
            yield (
                f"Node {name} has devices with invalid indices in its option devices: {', '.join(beyond)}. "
                f"Worker {name} has {mine.accelerators} accelerators"
            )
        for to, map_ in sorted(mine.maps.items()):
            if to in group:
                yield from _faults_of(f"its device map for {to}", name, mine, map_, to, group[to])


def _faults_of(
    where: str, name: str, mine: Devices, map_: Mapping[str, str], to: str, theirs: Devices
) -> Iterable[str]:
    sources, targets = list(map_), list(map_.values())
    for kind, used, own, owner in (("source", sources, mine, name), ("target", targets, theirs, to)):
        beyond = [device for device in used if _index(device) >= own.accelerators]
        if beyond:
            yield (
                f"Node {name} has {kind} devices with invalid indices in {where}: {', '.join(beyond)}. "
                f"Worker {owner} has {own.accelerators} accelerators"
            )
        outside = [device for device in used if device != HOST and device not in own.allowed]
        if own.allowed and outside:
            yield (
                f"Node {name} has unexpected {kind} devices in {where}: {', '.join(outside)}. "
                f"The devices option of worker {owner} allows {', '.join(own.allowed)}: add them there"
            )
    if len(set(targets)) < len(targets):
        yield (
            f"Node {name} has duplicated target devices in {where}: {', '.join(sorted(targets))}. Results use the "
            "inverse map, so each device needs a target of its own"
        )


def _index(device: str) -> int:
    """Return the number of an accelerator, or -1 for the host."""
    return -1 if device == HOST else int(device.partition(":")[2] or 0)
