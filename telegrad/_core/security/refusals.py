"""Limit log records about refused connections: a few lines a minute for each host, and a count of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

MOST_LINES = 5  # per host, in each PERIOD
PERIOD = 60.0  # seconds
MOST_HOSTS = 256  # hosts counted separately
OTHERS = "other hosts"


def host_of(origin: str) -> str:
    """Return the host of an origin, `host:port`, or the origin itself."""
    return origin.rpartition(":")[0] or origin


class Refusals:
    def __init__(self, most: int = MOST_LINES) -> None:
        self._most = most
        self._since: dict[str, float] = {}  # begin of the period of a host
        self._count: Counter[str] = Counter()  # refusals in the period

    def should_log(self, host: str, now: float) -> bool:
        """Count a refused connection of a host; return True if it should be logged."""
        if host not in self._since and len(self._since) >= MOST_HOSTS:
            host = OTHERS
        self._since.setdefault(host, now)
        self._count[host] += 1
        return self._count[host] <= self._most

    def left_out(self, now: float) -> list[tuple[str, int]]:
        """End the periods that are over; return the hosts with refusals that were not logged, and their number."""
        over = [host for host, since in self._since.items() if now - since >= PERIOD]
        counts = [(host, self._count.pop(host)) for host in over]
        for host in over:
            del self._since[host]
        return [(host, count - self._most) for host, count in counts if count > self._most]


def to_give_way(origins: Iterable[str]) -> int:
    """Return the index of the oldest connection of the host with the most, given the origins of all in order."""
    hosts: Sequence[str] = [host_of(origin) for origin in origins]
    most = Counter(hosts).most_common(1)[0][0]
    return hosts.index(most)
