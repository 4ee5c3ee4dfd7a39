"""Dynamic groups over a directory under a seeded scheduler: partitions, lost answers, stops, deaths, errors.

    N1  names       at each moment at most one worker may act under a name
    N2  ranks       at each moment at most one worker may act under a rank
    T1  tokens      the fencing token of a value never falls: in the view of one worker, and from owner to owner
    T2  owners      at each moment at most one worker may act as the owner of a value
    C1  claims      a claim that its owner knows stands while its owner holds its lease, and has not given it up
    E1  epochs      of two lives with one name, the later one has the higher epoch, which is that of its member
    L1  over        a life that is over acts no more
    L2  leases      a worker acts only while the directory holds its lease
    L3  losses      after the last fault, a worker that is not in the directory learns that its life is over
    M1  members     after the last fault, each member knows all that live, as the directory does, and refuses none
    G1  ends        a worker hears of an end of the group only if that is written in the directory
    J1  refusals    a worker is refused a name or a rank only if another one has had it meanwhile
    J2  joins       after the last fault, each worker that wants to join has joined, or was refused
    X1  errors      no step meets an exception that its code does not expect

"At each moment" is in true time. Some worlds have failure detectors that declare living workers dead. Such a worker
loses its name, and the values that it owns, before it can know: N1, N2, T2 and C1 do not apply to it, and L2 allows it
the rest of its last lease. Receivers refuse it by its lower token or epoch, and L3 holds for it.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_dynamic.py` replays it alone.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import pytest

from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Change, Claim, Claimed, IsAlive, Registered, Registry
from telegrad._core.stores.directory import ABSENT, Entry, Lease
from telegrad.errors import WorkerTaken
from tests.seeds import ONLY, tonight
from tests.sim.dynamic_world import Kinds, run

PART = 200  # seeds
NIGHTLY = tonight([range(first, first + 2_495) for first in range(PART, 100_000, 2_495)])
FAULTS = (
    "answer that is lost",
    "clock that runs differently",
    "Compacted",
    "connection that breaks",
    "cut",
    "cut one way",
    "detector that is late",
    "detector that says alive of one that died",
    "detector that says dead of one that lives",
    "directory that is killed",
    "directory that stops and goes on",
    "LeaseLost",
    "member that is declared lost and lives",
    "process that dies",
    "process that stops and goes on",
    "request that arrives late",
    "request that is repeated",
    "worker that answers nobody",
)
ACTS = ("claimed", "end of the group that is heard of", "joined", "left", "refused", "released")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_all(seeds: Iterable[int], kinds: Kinds) -> Counter[str]:
    """Simulate a world for each seed; return how often each thing has happened."""
    counts: Counter[str] = Counter()
    for seed in ONLY or seeds:
        run(seed, kinds, counts)
    return counts


def test_the_invariants_of_a_dynamic_group_hold() -> None:
    counts = run_all(range(PART), Kinds())
    if not ONLY:
        assert [each for each in (*FAULTS, *ACTS) if not counts[each]] == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", NIGHTLY, ids=lambda seeds: f"{seeds.start}")
def test_the_invariants_of_a_dynamic_group_hold_in_many_worlds(seeds: range) -> None:
    run_all(seeds, Kinds())


def test_a_seed_gives_one_order_of_events() -> None:
    for seed in range(20):
        first, second = (run(seed, Kinds(), Counter()) for _ in range(2))
        assert first == second


# Wrong code, which the simulation finds


class TakesWhatOthersHave(Registry):
    """A claim replaces that of another."""

    def _claim(self, key: str, what: str, me: Member, lease: Lease, is_alive: IsAlive) -> None:
        found = self._read(key)
        self._directory.swap(key, me.incarnation.encode(), found.revision if found else ABSENT, lease)


class ClaimsNoNumber(Registry):
    """The lowest free rank is taken without a claim in the directory."""

    def _claim_free(self, prefix: str, first: int, taken: Collection[str], me: Member, lease: Lease) -> int:
        return next(number for number in range(first, 100) if f"{prefix}{number}" not in taken)


class CountsTokensByLeases(Registry):
    """The token of a claim is the id of its lease."""

    def claim(self, name: str, life: str, lease: Lease, *args: IsAlive) -> Claim:
        claim = super().claim(name, life, lease, *args)
        return claim._replace(token=lease.id) if claim.life == life else claim


class CountsEpochsByLeases(Registry):
    """The epoch of a life is the id of its lease."""

    def publish(self, me: Member, lease: Lease) -> Registered:
        return super().publish(me, lease)._replace(epoch=lease.id)


class ReleasesWhatStandsThere(Registry):
    """A claim is given up even if another worker owns the value by now."""

    def release(self, name: str, claim: Claim) -> None:
        if (owner := self.owner(name)) is not None:
            super().release(name, owner)


class RefusesForUnfinishedJoins(Registry):
    """A claim without a member is that of a worker that lives."""

    def _end_join(self, claim: Entry) -> None:
        raise WorkerTaken("somebody joins")


class ClaimsWithoutLease(Registry):
    """A rank stays claimed when its worker has gone."""

    def _claim_free(self, prefix: str, first: int, taken: Collection[str], me: Member, lease: Lease) -> int:
        return super()._claim_free(prefix, first, taken, me, lease._replace(id=0))


class OwnsForEver(DynamicGroup):
    """The owner of a value ignores the end of its lease."""

    def owns(self, name: str, claim: Claim) -> bool:
        return not self.over and self.claims.get(name, claim).token <= claim.token


class ActsOn(DynamicGroup):
    """A worker that was declared lost acts on until its lease ends."""

    @property
    def holds(self) -> bool:
        return self._clock() < self._lease.ends - 0.01


class TrustsItsClock(DynamicGroup):
    """The clock of the worker runs exactly as that of the directory."""

    @property
    def holds(self) -> bool:
        return not self.over and self._clock() < self._lease.ends


class DoesNotEnd(DynamicGroup):
    """A worker that was declared lost goes on."""

    def _declared_lost(self, why: str) -> None:
        pass


class JoinsAgain(DynamicGroup):
    """A worker that may have joined joins once more."""

    def _publish(self, me: Member) -> Registered:
        return self.registry.publish(me, self._lease)


class AppliesOldEnds(DynamicGroup):
    """The end of an earlier attempt to join is taken for that of a member."""

    def _is_outdated(self, revision: int, change: Change | Claimed) -> bool:
        return False


WRONG: list[tuple[str, type[Registry | DynamicGroup]]] = [
    ("N1", TakesWhatOthersHave),
    ("N2", ClaimsNoNumber),
    ("T1", CountsTokensByLeases),
    ("T2", OwnsForEver),
    ("C1", ReleasesWhatStandsThere),
    ("E1", CountsEpochsByLeases),
    ("L1", ActsOn),
    ("L2", TrustsItsClock),
    ("L3", DoesNotEnd),
    ("M1", JoinsAgain),
    ("G1", AppliesOldEnds),
    ("J1", RefusesForUnfinishedJoins),
    ("J2", ClaimsWithoutLease),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("broken", "wrong"), WRONG, ids=lambda each: getattr(each, "__name__", each))
def test_wrong_code_is_found(broken: str, wrong: type[Registry | DynamicGroup]) -> None:
    kinds = Kinds(registry=wrong) if issubclass(wrong, Registry) else Kinds(group=wrong)
    with pytest.raises(AssertionError, match=rf"SEED=\d+ Broken: {broken}:"):
        run_all(range(2_000), kinds)
