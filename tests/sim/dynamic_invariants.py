"""The invariants of a simulated dynamic group; `test_dynamic.py` lists them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from telegrad._core.membership.registry import MEMBERS, Ended, _registered
from telegrad._core.stores.directory import CLOCK_DRIFT, Entry

if TYPE_CHECKING:
    from tests.sim.dynamic_directory import Server
    from tests.sim.dynamic_worker import Worker

TTL = 6.0
DRIFT = CLOCK_DRIFT / 2  # by which a clock may be faster or slower than true time


class Broken(BaseException):
    """An invariant does not hold. The simulated code logs exceptions of other kinds, and goes on."""


class Checked:
    """A world whose invariants are checked after each event."""

    server: Server
    workers: list[Worker]
    wronged: set[str]
    counts: Counter[str]
    log: list[str]
    now: float
    lies: bool

    def note(self, text: str) -> None:
        self.log.append(f"{self.now:8.3f} {text}")

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def broken(self, text: str) -> NoReturn:
        raise Broken(text)

    def members(self) -> list[Worker]:
        """Return the processes that run and have joined."""
        return [worker for worker in self.workers if worker.is_alive and worker.has_joined]

    def check(self) -> None:
        """Check the invariants that hold at each moment."""
        acting: dict[tuple[str, str | int], Worker] = {}
        for worker in self.members():
            group = worker.group
            for value, claim in worker.claims.items():
                if group.owns(value, claim):
                    self._check_only("T2", acting, ("value", value), worker)
            worker.was_over |= bool(group.over)
            if not group.holds:
                continue
            if worker.was_over:
                self.broken(f"L1: {worker} acts, whose life is over")
            self._check_only("N1", acting, ("name", worker.me.name), worker)
            self._check_only("N2", acting, ("rank", worker.me.id), worker)
            self._check_lease(worker)
            self._check_claims(worker)

    def _check_only(
        self, what: str, acting: dict[tuple[str, str | int], Worker], key: tuple[str, str | int], worker: Worker
    ) -> None:
        """Check that only one worker acts, not counting one that was wrongly declared dead and has not heard of it."""
        other = acting.setdefault(key, worker)
        if other is worker or worker.life in self.wronged or other.life in self.wronged:
            return
        self.broken(f"{what}: {worker} and {other} act at once as {key}")

    def _check_lease(self, worker: Worker) -> None:
        ended = self.server.ended.get(worker.group._lease.id)
        if ended is None:
            return
        if worker.life not in self.wronged:
            self.broken(f"L2: {worker} acts, and its lease has ended")
        if self.now > ended + TTL * (1 + 3 * DRIFT):
            self.broken(f"L2: {worker} acts {self.now - ended:g} s after its lease was ended")

    def _check_claims(self, worker: Worker) -> None:
        for value, claim in worker.claims.items():
            entry, _ = self.server.table._entries.get(f"live/published/{value}", (None, ""))
            if worker.life in self.wronged:
                continue
            if entry is None or entry.value.decode() != worker.life:
                self.broken(f"C1: {worker} was told that it owns {value} by {claim}; the directory has {entry}")
            if entry.created != claim.token:
                self.broken(f"T1: {worker} was told that it owns {value} by {claim}; the directory has {entry}")

    def note_published(self, life: str, entry: Entry) -> None:
        """Note that a life was published, for the first time or anew."""
        name = next(worker for worker in self.workers if worker.life == life).me.name
        if entry.created <= self.server.epochs.get(name, 0):
            self.broken(f"E1: {life} has epoch {entry.created}; an earlier {name} had {self.server.epochs[name]}")
        self.server.epochs[name] = self.server.lives[life] = entry.created

    def check_epoch(self, worker: Worker) -> None:
        """Check the epoch that a worker got as it joined."""
        epoch = self.server.lives.get(worker.life)
        if epoch != worker.group._epoch:
            self.broken(f"E1: {worker} has epoch {worker.group._epoch}, in the directory {epoch}")

    def check_known(self, worker: Worker, value: str) -> None:
        """Check the owner of a value that a worker has just learned."""
        token = worker.group.claims[value].token
        if token < worker.tokens.get(value, 0):
            self.broken(f"T1: {worker} knew token {worker.tokens[value]} of {value}, now {token}")
        worker.tokens[value] = token

    def check_token(self, worker: Worker, value: str, token: int) -> None:
        """Check the token of a claim that a worker has just got."""
        if token < (last := self.server.tokens.get(value, 0)) and worker.life not in self.wronged:
            self.broken(f"T1: {worker} owns {value} by token {token}, an earlier owner had {last}")
        self.server.tokens[value] = max(last, token)

    def check_decided(self, worker: Worker, change: Ended) -> None:
        """Check that the directory has the end of the group that a worker has heard of."""
        self.count("end of the group that is heard of")
        if not any(at > worker.since and told == change for at, told in self.server.decisions):
            self.broken(f"G1: {worker} was told that the group has ended ({change.why}), which the directory never was")

    def check_refusal(self, worker: Worker, since: dict[str, int]) -> None:
        """Check that another worker had the name or the rank that this one was refused, at some time of its join.

        `since` has, by their keys, how many claims were made before the last one as the join began.
        """
        for key in (f"name/{worker.me.name}", f"rank/{worker.me.id}"):
            if set(self.server.holders.get(key, [])[since.get(key, 0) :]) - {worker.life}:
                return
        self.broken(f"J1: {worker} is refused, though no other has had its name or rank")

    def check_end(self) -> None:
        """Check the invariants that hold after a long time without faults."""
        entries = self.server.table.list(MEMBERS).entries
        roster = {entry.key.removeprefix(MEMBERS) for entry in entries if _registered(entry) is not None}
        for worker in self.workers:
            if worker.is_alive and not worker.has_joined:
                self.broken(f"J2: {worker} has not joined yet")
        for worker in self.members():
            if worker.group.over:
                if worker.life in roster:
                    self.broken(f"L3: the life of {worker} is over, and the directory has it")
                continue
            if worker.life not in roster:
                self.broken(f"L3: {worker} is not in the directory, and does not know")
            known = {member.incarnation for member in worker.group.members()}
            if known != roster:
                self.broken(f"M1: {worker} knows {sorted(known)}, the directory has {sorted(roster)}")
            present = {member.incarnation for member in worker.membership.present()}
            if present != roster and not self.lies:
                self.broken(f"M1: the membership of {worker} has {sorted(present)}, the directory {sorted(roster)}")
            if worker.post.cut_off & roster:
                self.broken(f"M1: {worker} refuses members: {sorted(worker.post.cut_off & roster)}")
        dead = roster - {worker.life for worker in self.members()}
        if dead:
            self.broken(f"M1: {sorted(dead)} have died, and the directory has them")
