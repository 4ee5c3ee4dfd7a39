"""Faults of the network between the hosts of a group, and of its processes: each case returns its injected faults."""

import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.cluster import Process, pause
from tests.hosts import Network
from tests.partitions import checker, member, record
from tests.partitions.engines import APART, WORKERS, Embedded, Engine, EtcdCluster
from tests.partitions.record import Fault, Final
from tests.partitions.report import line

NEAR, FAR = frozenset({0, 1, 2, APART}), frozenset({3, 4})  # the directory is on the near side
NAMES = [f"worker{number}" for number in range(WORKERS)]
WARM = 2.0  # seconds before the first fault
HEALED = checker.SETTLE + 2.0  # seconds after the last one
PATIENCE = 90.0  # seconds for a worker to follow an order


Pairs = frozenset[tuple[int, int]]


class World(NamedTuple):
    """A group on hosts."""

    network: Network
    engine: Engine
    group: list[Process]
    silence: float

    def join(self) -> None:
        """Let all workers join that are not in the group."""
        addresses = self.network.addresses
        for number, process in enumerate(self.group):
            process.begin(member.join, number, self.engine.url, addresses[number], self.silence)
        for process in self.group:
            process.end(PATIENCE)
        self.all_run(member.wait_for_all, WORKERS)

    def all_run(self, function: Callable[..., object], *args: object) -> list[object]:
        for process in self.group:
            process.begin(function, *args)
        return [process.end(PATIENCE) for process in self.group]

    def fault(self, seconds: float, pairs: Iterable[tuple[int, int]], away: Iterable[int]) -> Fault:
        """Drop packets between pairs of hosts for some seconds."""
        pairs = frozenset(pairs)
        begins = time.monotonic()
        self.network.cut(pairs)
        pause(seconds)
        ends = time.monotonic()
        return Fault(begins, ends, self.network.heal(), _names(pairs), frozenset(NAMES[each] for each in away))


Case = Callable[[World], list[Fault]]


def _between(one: Iterable[int], other: Iterable[int]) -> Pairs:
    """Return the pairs of hosts on two sides, in both directions."""
    pairs = {(first, second) for first in one for second in other if first != second}
    return frozenset(pairs | {(second, first) for first, second in pairs})


def _names(pairs: Pairs) -> frozenset[tuple[str, str]]:
    return frozenset((NAMES[first], NAMES[second]) for first, second in pairs if max(first, second) < WORKERS)


def split(seconds: float) -> Case:
    return lambda world: [world.fault(seconds, _between(NEAR, FAR), FAR)]


def splits(world: World) -> list[Fault]:
    """Split the hosts several times, each time for less than the time in which a renewal must arrive."""
    found = []
    for _ in range(8):
        found.append(world.fault(world.silence / 3, _between(NEAR, FAR), FAR))
        pause(2.0)
    return found


def one_way(world: World) -> list[Fault]:
    """Drop packets from one member to another, then those of the other direction; both reach the directory."""
    found = [world.fault(3 * world.silence, {(1, 2)}, ())]
    pause(HEALED)
    return [*found, world.fault(3 * world.silence, {(2, 1)}, ())]


def directory_apart(world: World) -> list[Fault]:
    """Separate the first host that serves the directory from all others."""
    host = world.engine.hosts[0]
    others = set(range(WORKERS)) - {host}
    away: set[int] = {host} if isinstance(world.engine, EtcdCluster) else others
    return [world.fault(3 * world.silence, _between({host}, {*others, APART}), away)]


def loss(seconds: float) -> Case:
    def inject(world: World) -> list[Fault]:
        begins = time.monotonic()
        world.network.lose(20)
        pause(seconds)
        ends = time.monotonic()
        return [Fault(begins, ends, world.network.heal())]

    return inject


def stopped(seconds: float) -> Case:
    """Stop a worker's process for a while."""

    def inject(world: World) -> list[Fault]:
        pid = world.group[2].pid
        begins = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        pause(seconds)
        evidence = "(stopped)" in pathlib.Path(f"/proc/{pid}/status").read_text()
        ends = time.monotonic()
        os.kill(pid, signal.SIGCONT)
        pairs = _between({2}, range(WORKERS))
        return [Fault(begins, ends, evidence, _names(pairs), frozenset({NAMES[2]}))]

    return inject


def server_killed(world: World) -> list[Fault]:
    """Kill one server of the directory during a split, and restart it."""
    begins = time.monotonic()
    pairs = _between(NEAR, FAR)
    world.network.cut(pairs)
    pause(1.0)
    killed = time.monotonic()
    if isinstance(world.engine, Embedded):
        pid = world.group[0].run(member.server_pid)
        os.kill(pid, signal.SIGKILL)
        pause(2.0)
        evidence = world.group[0].run(member.server_pid) != pid
    else:
        restart = world.engine.begin_restart()
        pause(2.0)
        restart()
        evidence = True
    restarted = time.monotonic()
    pause(5 * world.silence)
    ends = time.monotonic()
    away = frozenset(NAMES[each] for each in FAR)
    return [Fault(begins, ends, world.network.heal(), _names(pairs), away), Fault(killed, restarted, evidence)]


def run(world: World, folder: pathlib.Path, name: str, case: Case, delay: float, slack: float) -> list[str]:
    """Bring the group together, inject the faults of the case, and return the violations in its record."""
    world.join()
    for number, process in enumerate(world.group):
        process.begin(member.start, str(folder / NAMES[number]), [each for each in NAMES if each != NAMES[number]])
    for process in world.group:
        process.end(PATIENCE)
    pause(WARM)
    faults = case(world)
    pause(HEALED)
    final = _final(world)
    world.all_run(member.finish)
    (folder.parent / f"{folder.name}.faults").write_text(repr((faults, final)))
    engine = world.engine
    found = checker.Record(record.read(folder), faults, final, world.silence, engine.slack + slack, engine.may_pause)
    print(f"\n{line(found, name)}")
    return checker.check(found, delay)


def _final(world: World) -> Final:
    """Ask a worker that is in the group; if all were lost, one that has joined anew."""
    lost = world.all_run(member.is_lost)
    if not all(lost):
        return world.group[lost.index(False)].run(member.final)
    world.all_run(member.finish)
    world.join()
    return world.group[0].run(member.final)._replace(members=frozenset(), claim=0)
