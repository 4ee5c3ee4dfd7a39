"""Device maps: the device of another worker where the tensors of each device of this worker arrive.

Devices are strings like "cuda:0"; the host's memory is "cpu". Devices without an entry: the host maps to the other
host, and tensors of an accelerator cannot be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

HOST = "cpu"


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
