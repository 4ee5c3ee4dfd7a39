"""Benchmarks of the embedded directory: `python -m benchmarks.directory [MEMBERS ...]`.

Measures the time of single operations of one client, and the time until forked members have joined and see each other:
each member begins a lease, claims a name and a rank, and watches the names. On a busy machine, compare the processor
times.
"""

from __future__ import annotations

import gc
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable
from time import perf_counter, sleep

from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.stores.directory_server import ServerProcess

TTL, PATIENCE = 600.0, 120.0
MEMBERS = (8, 64, 512)
_REPORT = struct.Struct("<3d")


def main(members: list[int]) -> None:
    keys = Keyring([new_key()])
    operations(keys)
    for count in members:
        together(keys, count)


def operations(keys: Keyring) -> None:
    """Print the times of single operations."""
    keeper = ServerProcess(keys)
    started = perf_counter()
    client = EmbeddedDirectory(keeper.address, keys, PATIENCE)
    client.list("")
    print(f"first answer of a new process   {1e3 * (perf_counter() - started):8.1f} ms")
    lease = client.grant(TTL)
    numbers = iter(range(10_000))
    each("grant", lambda: client.grant(TTL), 300)
    each("renew", lambda: client.renew(lease), 1000)
    each("swap, 100 bytes", lambda: client.swap(f"list/{next(numbers)}", bytes(100), lease=lease), 512)
    each("list of 512", lambda: client.list("list/"), 100)
    each("swap, 1 MiB", lambda: client.swap(f"large/{next(numbers)}", bytes(1 << 20)), 20)
    watching(client, EmbeddedDirectory(keeper.address, keys, PATIENCE))
    keeper.close()


def each(name: str, do: Callable[[], object], count: int) -> None:
    times = []
    for _ in range(count):
        started = perf_counter()
        do()
        times.append(perf_counter() - started)
    tell(name, times)


def tell(name: str, times: list[float]) -> None:
    times.sort()
    middle, late = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{name:31} {1e3 * middle:8.2f} ms   99%: {1e3 * late:.2f}")


def watching(writer: EmbeddedDirectory, watcher: EmbeddedDirectory) -> None:
    """Print the time from a change to its arrival at another client."""
    since, revision, times = writer.list("watched").revision, 0, []
    for _ in range(300):
        seen: list[float] = []

        def watch(since: int = since, seen: list[float] = seen) -> None:
            watcher.watch("watched", since, PATIENCE)
            seen.append(perf_counter())

        thread = threading.Thread(target=watch)
        thread.start()
        sleep(0.003)  # until the thread waits
        started = perf_counter()
        entry = writer.swap("watched", b"", revision).entry
        assert entry is not None
        since = revision = entry.revision
        thread.join()
        times.append(seen[0] - started)
    tell("swap to another client's watch", times)
    writer.close()
    watcher.close()


def together(keys: Keyring, count: int) -> None:
    """Print the time until `count` members see each other."""
    keeper = ServerProcess(keys)
    sleep(1.0)  # until the directory serves
    go, start = os.pipe()
    done, report = os.pipe()
    gc.freeze()
    pids = []
    for number in range(count):
        pids.append(os.fork())
        if not pids[-1]:
            code = 1
            try:
                os.read(go, 1)
                os.write(report, _REPORT.pack(*join(keeper.address, keys, number, count)))
                code = 0
            finally:
                os._exit(code)
    before, before_all = used_by(keeper.pid), of_children()
    started = perf_counter()
    os.write(start, bytes(count))
    reports = [_REPORT.unpack(os.read(done, _REPORT.size)) for _ in range(count)]
    took = [1e3 * (max(times) - started) for times in zip(*reports, strict=True)]
    server = used_by(keeper.pid) - before
    for pid in pids:
        os.waitpid(pid, 0)
    print(
        f"{count:4} members: all have a lease after {took[0]:.0f} ms, names and ranks {took[1]:.0f}, see all others "
        f"{took[2]:.0f}; processor: server {1e3 * server:.0f} ms, members {1e3 * (of_children() - before_all):.0f} ms"
    )
    for descriptor in (go, start, done, report):
        os.close(descriptor)
    keeper.close()


def join(address: tuple[str, int], keys: Keyring, number: int, count: int) -> list[float]:
    """Join as a member. Return the times at which it had its lease, had its claims, and saw all others."""
    client = EmbeddedDirectory(address, keys, PATIENCE)
    lease = client.grant(TTL)
    times = [perf_counter()]
    for key in (f"name/w{number}", f"rank/{number}"):
        assert client.swap(key, bytes(100), lease=lease).done
    times.append(perf_counter())
    listing = client.list("name/")
    seen, since = {entry.key for entry in listing.entries}, listing.revision
    while len(seen) < count:
        since, events = client.watch("name/", since, PATIENCE)
        seen.update(event.key for event in events)
    return [*times, perf_counter()]


def of_children() -> float:
    """Return the processor time of exited members, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def used_by(pid: int) -> float:
    """Return the processor time of a process, in seconds, or 0 if it is unknown."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[0]) / 1e9
    except OSError:
        return 0.0


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or list(MEMBERS))
