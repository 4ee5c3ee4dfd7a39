"""The directory of a simulated group: the real table in a process that fails, and clients that lose messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

from telegrad._core.membership.registry import Ended, _registered
from telegrad._core.stores.directory import ABSENT, Compacted, DirectoryLost, Events, Lease, LeaseLost, Listing, Swap
from telegrad._core.stores.lease_table import LeaseTable, Limits

if TYPE_CHECKING:
    from tests.sim.dynamic_worker import Worker
    from tests.sim.dynamic_world import World

PATIENCE = 3.0  # seconds of a client for an answer
STOPPED = 1.5  # seconds; a server that did not run for longer lets all leases end later
UP, STANDS, DOWN = "up", "stands", "down"


class Server:
    """A directory in a process that is stopped and goes on, or is killed and starts again with its state."""

    name = "directory"

    def __init__(self, world: World, limits: Limits, rate: float) -> None:
        self.world = world
        self.table = LeaseTable(limits=limits)
        self._noted = 0  # the revision up to which changes were noted
        self._leases: set[int] = set()
        self.state = UP
        self.ended: dict[int, float] = {}  # when each lease has ended, in true time
        self.lives: dict[str, int] = {}  # the epochs of the lives that were published
        self.epochs: dict[str, int] = {}  # the last one, by name
        self.tokens: dict[str, int] = {}  # the last one that an owner was told, by value
        self.holders: dict[str, list[str]] = {}  # the lives that have claimed a name or a rank, by its key
        self.decisions: list[tuple[int, Ended]] = []  # each decided end of the group, with its revision
        self._rate = rate
        self._stopped_at = 0.0

    def __repr__(self) -> str:
        return f"the directory, which is {self.state}"

    @property
    def now(self) -> float:
        return self.world.now * self._rate

    def next_end(self) -> float:
        """Return the true time at which a lease ends, if none is renewed."""
        end = self.table.next_end() if self.state == UP else None
        return inf if end is None else max(end / self._rate, self.world.now)

    def expire(self) -> None:
        self.table.expire(self.now + 1e-9)
        self.note()

    def note(self) -> None:
        """Note what has changed since the last call."""
        table, since = self.table, self._noted
        leases = set(table.leases)
        for lease in self._leases - leases:
            self.ended[lease] = self.world.now
        is_quiet = table.revision == since and leases == self._leases
        self._noted, self._leases = table.revision, leases
        if is_quiet:
            return
        # Where one operation has changed more than is kept, it has deleted keys alone.
        for event in table.changes("", since)[1] if since >= table.compacted else ():
            if (entry := event.entry) is not None:
                kind, _, rest = entry.key.removeprefix("live/").partition("/")
                if kind == "ended":
                    self.decisions.append((entry.revision, Ended(*json.loads(entry.value.decode()))))
                elif kind in ("name", "rank"):
                    self.holders.setdefault(entry.key, []).append(entry.value.decode())
                elif kind == "member" and entry.created == entry.revision and _registered(entry) is not None:
                    self.world.note_published(rest, entry)
        self.world.check()

    def stop(self) -> None:
        self.state, self._stopped_at = STANDS, self.now

    def go_on(self) -> None:
        if self.state != STANDS:
            return
        self.state = UP
        if self.now - self._stopped_at > STOPPED:
            self.table.extend_leases(self.now - self._stopped_at)

    def kill(self) -> None:
        self.state = DOWN

    def restart(self) -> None:
        """Restart with the content of the file, which has all that any client was told."""
        if self.state != DOWN:
            return
        self.table.file.commit(self.table.revision)
        self.table.load(self.now)
        self.state = UP


class Link:
    """A worker's client. Its requests and their answers arrive late, twice or never."""

    def __init__(self, world: World, worker: Worker) -> None:
        self.world, self.worker = world, worker
        self.is_closed = False

    def grant(self, ttl: float) -> Lease:
        sent = self.worker.clock()
        return Lease(self._ask(lambda table, now: table.grant(ttl, now)), ttl, sent + ttl)

    def renew(self, lease: Lease) -> Lease:
        sent = self.worker.clock()
        self._ask(lambda table, now: table.renew(lease.id, now))
        return lease._replace(ends=sent + lease.ttl)

    def revoke(self, lease: Lease) -> None:
        repeats = not self.world.flaky  # some clients try once
        self._ask(lambda table, _: table.revoke(lease.id), may_repeat=repeats)

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        id_ = lease.id if lease and value is not None else 0
        return self._ask(lambda table, _: table.swap(key, value, expected, id_, self.worker.life), may_repeat=False)

    def list(self, prefix: str) -> Listing:
        return self._ask(lambda table, _: table.list(prefix))

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        return self._ask(lambda table, _: table.changes(prefix, since), wait=timeout)

    def close(self) -> None:
        self.is_closed = True

    def _ask(self, operation: Operation, may_repeat: bool = True, wait: float = 0.0) -> Any:
        self.world.fibers.check()
        if self.is_closed:
            raise DirectoryLost("this client was closed")
        request = Request(self, operation, may_repeat)
        request.begin(wait)
        while not request.is_over:
            self.world.fibers.suspend()
        if self.is_closed:
            raise DirectoryLost("this client was closed")
        if request.error is not None:
            raise request.error
        return request.value


Operation = Callable[[LeaseTable, float], Any]


class Request:
    """A request of a client, while it travels."""

    def __init__(self, link: Link, operation: Operation, may_repeat: bool) -> None:
        self.link, self.operation, self.may_repeat = link, operation, may_repeat
        self.world, self.worker = link.world, link.worker
        self.is_over = False  # the client waits no more
        self.value: Any = None
        self.error: Exception | None = None
        self._fiber = self.world.fibers.check()
        self._is_waited_for = False  # the fiber is suspended

    def begin(self, wait: float) -> None:
        """Send the request; a watch is answered after a while."""
        world = self.world
        if not wait and world.random.random() < world.instant and world.reaches(self.worker, world.server):
            self.arrive()
            if self.is_over:
                return
        else:
            late = world.random.uniform(0.0, wait) if wait else 0.0
            world.after(late + world.delay(), self.arrive)
            wait = late
        self._is_waited_for = True
        world.after(wait + PATIENCE, self._give_up)

    def arrive(self) -> None:
        world, server = self.world, self.world.server
        if server.state == STANDS:
            world.after(world.random.uniform(0.1, 1.0), self.arrive)  # the request lies in the socket
        elif server.state == DOWN or not world.connects(self.worker, server):
            if world.random.random() < 0.3:
                world.after(world.random.uniform(0.1, 2.0), self.arrive)  # TCP sends the request again
            else:
                self._lose()
        else:
            self._execute()

    def _execute(self) -> None:
        world, server = self.world, self.world.server
        if self.is_over:
            world.count("request that arrives late")
        value, error = None, None
        try:
            value = self.operation(server.table, server.now)
        except (LeaseLost, Compacted) as raised:
            error = raised
            world.count(type(raised).__name__)
        server.note()
        if self._is_waited_for or world.random.random() > world.instant:
            world.after(world.delay(), self._answer, value, error)
        else:
            self._answer(value, error)

    def _answer(self, value: Any, error: Exception | None) -> None:
        if self.is_over:
            return
        world = self.world
        is_flaky = not world.is_calm and world.random.random() < world.flaky
        if is_flaky or not world.connects(world.server, self.worker) or world.server.state == DOWN:
            world.count("answer that is lost")
            self._lose()
        else:
            self._finish(value, error)

    def _lose(self) -> None:
        """Handle a broken connection: ask again over the next one, unless that could do the operation twice."""
        if self.is_over:
            return
        if self.may_repeat:
            self.world.count("request that is repeated")
            self.world.after(self.world.random.uniform(0.05, 1.0), self.arrive)
        elif self.world.random.random() < 0.5:
            self._finish(None, DirectoryLost("the connection broke"))

    def _give_up(self) -> None:
        if not self.is_over:
            self._finish(None, DirectoryLost("no answer"))

    def _finish(self, value: Any, error: Exception | None) -> None:
        self.is_over, self.value, self.error = True, value, error
        if self._is_waited_for:
            self.world.resume(self._fiber, self.worker)
