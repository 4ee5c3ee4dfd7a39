"""The rows that the peers share with Telegrad."""

from __future__ import annotations

from benchmarks.calls import CALLS, calls_per_second
from benchmarks.measuring import MB
from benchmarks.peers.peer import Peer
from benchmarks.weights import WEIGHTS

IN_FLIGHT = "rpc_async, 1000 in flight"
_NAMES = {
    "empty rpc_sync, p50",
    "empty rpc_sync, p99",
    "1 KB tensor echo",
    IN_FLIGHT,
    *(f"{size} {direction}" for size in ("1 MB", "16 MB", "64 MB") for direction in ("to", "from")),
}
PUBLISHED = {f"{size} MB published to 4 workers": size * MB for size in (16, 256)}
ROWS = [row for row in (*CALLS, *WEIGHTS) if row.name in _NAMES | PUBLISHED.keys() and "host" in row.ways]


def measure(name: str, peer: Peer) -> float:
    """A row's figure, as for Telegrad; only futures are waited for in the peer's own way."""
    if name in PUBLISHED:
        return peer.publish(PUBLISHED[name])
    if name == IN_FLIGHT:
        return calls_per_second(peer, window=1000, total=10_000, wait_all=peer.wait_all)
    return next(row for row in ROWS if row.name == name).measure(peer)
