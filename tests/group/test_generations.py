"""Tests of how generations of elastic groups form in a directory, with workers that are only entries there."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import errors
from telegrad._core.membership import form_generations
from telegrad._core.membership.form_generations import DirectoryLease, JoinRequest, Prober
from telegrad._core.membership.generation_monitor import GenerationMonitor, arrivals_in, is_wanted
from telegrad._core.membership.generations import COME, GENERATION, Arrival, Before, Formed, GroupSize, end, look
from telegrad._core.membership.members import Member
from telegrad._core.stores.directory import ABSENT, DirectoryLost, Swap
from telegrad._core.stores.find_directory import Found
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.texts import under_way
from tests.cluster import KEYS, PATIENCE, sealed, wait_until
from tests.directory.naive import NaiveClient, NaiveEngine

WAIT = 20.0
LONG = 60.0  # the ttl of a lease that does not end within a test


def member(name: str, life: int = 0) -> Member:
    return Member(name, -1, f"{name}/{life}", "program", "host", "", ("127.0.0.1", 1000 + len(name)))


class Place(Prober):
    """A directory for the workers of a test, and the incarnations that are dead."""

    def __init__(self) -> None:
        self.engine = NaiveEngine()
        self.directory = self.engine.client()
        self.dead: set[str] = set()
        self.over = False
        self.made: list[DirectoryLease] = []
        self._pool = ThreadPoolExecutor(8)

    def lives(self, who: Member) -> bool:
        assert not self.over, "the test is over"
        return who.incarnation not in self.dead

    def answer_probes(self, *_: object) -> None:
        """Do nothing: `probe` asks no worker."""

    def probe(self, who: Member) -> errors.HandshakeError | None:
        return errors.AuthenticationFailed("the keys differ") if who.name == "stranger" else None

    def held(self, client: NaiveClient | None = None, ttl: float = LONG) -> DirectoryLease:
        held = DirectoryLease("file:///nowhere", KEYS, ttl)
        meeting = RendezvousStore(sealed(dist.HashStore()), None, -1, None, location="the place")
        held.hold(meeting, Found(client or self.engine.client(PATIENCE)))
        self.made.append(held)
        return held

    def come(
        self,
        name: str,
        limits: GroupSize,
        before: Before | None = None,
        life: int = 0,
        timeout: float = WAIT,
        client: NaiveClient | None = None,
        lives: Callable[[Member], bool] | None = None,
    ) -> Future[Formed]:
        held = self.held(client)
        coming = JoinRequest(held, KEYS, limits, before or Before(), -1, timeout)
        return self._pool.submit(coming.join, held, member(name, life), lives or self.lives, self)

    def put(self, key: str, value: str) -> None:
        found = self.engine.state.entries.get(key)
        assert self.directory.swap(key, value.encode(), found.revision if found else ABSENT).done

    def wait_for(self, *names: str) -> None:
        """Wait until workers of these names want to be in the next generation."""
        wait_until(lambda: {each.member.name for each in look(self.directory).arrivals} >= set(names))

    def history(self) -> list[Formed]:
        """Return all generations that were the last one in the directory, in order."""
        events = self.engine.state.events
        return [Formed.from_json(each.entry.value) for each in events if each.key == GENERATION and each.entry]


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.over = True
    made.engine.kill()
    for held in made.made:
        held.over.set()  # as if its process was over: its lease is not renewed any more


def names(formed: Formed) -> list[str]:
    return [each.name for each in formed.members]


def before(formed: Formed, me: str, life: int = 0, without: tuple[str, ...] = ()) -> Before:
    return Before(formed.number, formed.group, tuple(f"{name}/0" for name in without), f"{me}/{life}")


def test_a_generation_forms_after_the_last_call(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_generations, "LAST_CALL", 0.2)
    coming = [place.come(name, GroupSize(2)) for name in "ab"]
    assert [sorted(names(future.result(WAIT))) for future in coming] == [["a", "b"]] * 2


def test_too_few_workers_are_reported(place: Place) -> None:
    with pytest.raises(errors.GroupIncomplete, match=r"0\.1 s for a group of 2 to 4 .* 1 worker of 2 to 4 joined: 'a'"):
        place.come("a", GroupSize(2, 4), timeout=0.1).result(WAIT)


def test_survivors_come_first_and_admit_a_worker_that_waits(place: Place) -> None:
    limits = GroupSize(2, 3)
    first = [place.come(name, limits) for name in "abc"]
    formed = first[0].result(WAIT)
    gone, *stay = names(formed)
    place.dead.add(f"{gone}/0")
    newcomer = place.come("x", limits)
    place.wait_for("x")
    assert is_wanted(arrivals_in(place.directory), formed, 4, place.lives)
    again = [place.come(name, limits, before(formed, name), 1) for name in stay]
    for future in [newcomer, *again]:
        assert names(future.result(WAIT)) == [*stay, "x"]
        assert future.result(WAIT)[:3:2] == (2, 2)


def test_a_worker_that_died_as_it_was_chosen_is_dropped_in_the_next(place: Place) -> None:
    limits = GroupSize(2, 2)
    chosen = Formed(1, (member("ghost")._replace(id=0), member("a")._replace(id=1)), 0, str(limits))
    first = place.come("a", limits)
    place.wait_for("a")
    place.put(GENERATION, chosen.to_json())  # written by the ghost, which dies then
    place.dead.add("ghost/0")
    formed = first.result(WAIT)
    assert names(formed) == ["ghost", "a"]
    coming = [place.come("a", limits, before(formed, "a"), 1), place.come("b", limits)]
    assert [names(future.result(WAIT)) for future in coming] == [["a", "b"]] * 2


def test_the_next_worker_decides_if_the_first_has_died(place: Place) -> None:
    limits = GroupSize(2, 3)
    place.put(COME + "ghost/0", Arrival(member("ghost"), limits=str(limits)).to_json())
    coming = [place.come(name, limits) for name in "abc"]
    place.wait_for(*"abc")
    with pytest.raises(TimeoutError):  # the ghost would decide
        coming[0].result(0.1)
    assert not place.history()
    place.dead.add("ghost/0")
    assert all(len(names(future.result(WAIT))) == 3 for future in coming)


def test_a_worker_that_the_first_cannot_connect_to_is_not_chosen(place: Place) -> None:
    coming = [place.come("a", GroupSize(2, 2))]
    place.wait_for("a")
    place.put(COME + "stranger/0", Arrival(member("stranger"), limits="2").to_json())
    coming.append(place.come("b", GroupSize(2, 2)))
    assert [names(future.result(WAIT)) for future in coming] == [["a", "b"]] * 2


def test_two_workers_of_the_same_name_do_not_both_join(place: Place) -> None:
    limits = GroupSize(2, 2)
    coming = [place.come("same", limits), place.come("same", limits, life=1)]
    wait_until(lambda: len(look(place.directory).arrivals) == 2)
    coming.append(place.come("other", limits))
    kinds = [type(future.exception(WAIT)) for future in coming]
    assert sorted(map(str, kinds)) == sorted(map(str, [type(None), type(None), errors.WorkerTaken]))


def test_a_late_worker_of_the_same_name_waits_until_the_name_is_free(place: Place) -> None:
    limits = GroupSize(1, 2)
    coming = [place.come(name, limits) for name in "ab"]
    formed = coming[0].result(WAIT)
    late = place.come("a", limits, life=1)
    place.wait_for("a")
    assert not is_wanted(arrivals_in(place.directory), formed, 3, place.lives)
    place.dead.add("a/0")
    again = place.come("b", limits, before(formed, "b"), 1)
    assert names(again.result(WAIT)) == names(late.result(WAIT)) == ["b", "a"]


def test_a_worker_with_other_limits_is_refused(place: Place) -> None:
    limits = GroupSize(2, 2)
    first = place.come("a", limits)
    place.wait_for("a")
    with pytest.raises(errors.RendezvousError, match=r"of 2 to 3 workers, but 'a' .* one of 2: .* max_workers"):
        place.come("c", GroupSize(2, 3)).result(WAIT)
    second = place.come("d", limits)
    assert first.result(WAIT) == second.result(WAIT)
    with pytest.raises(errors.RendezvousError, match="min_workers and max_workers"):
        place.come("c", GroupSize(2, 3), life=1).result(WAIT)


def test_a_generation_of_dead_workers_is_followed_despite_other_limits(place: Place) -> None:
    first = place.come("a", GroupSize(1, 1)).result(WAIT)
    place.dead.add("a/0")
    formed = place.come("b", GroupSize(1, 2), timeout=1.0).result(WAIT)
    assert (formed.number, names(formed), formed.limits) == (2, ["b"], "1 to 2")
    assert formed.group == first.group


def test_only_the_wait_of_a_spare_worker_is_no_sign_of_a_fault(place: Place) -> None:
    limits = GroupSize(2, 2)

    def kinds() -> dict[str, str]:
        return {wait.worker: wait.what for wait in under_way() if wait.worker in ("early", "late", "spare")}

    early = place.come("early", limits)
    wait_until(lambda: kinds() == {"early": "init_rpc"})
    formed = place.come("late", limits).result(WAIT)
    assert early.result(WAIT) == formed
    spare = place.come("spare", limits, timeout=1.0, client=place.engine.client(0.05))
    survivor = place.come("early", limits, before(formed, "early"), 1)
    wait_until(lambda: kinds() == {"spare": "next generation", "early": "move to the next generation"})
    assert place.come("late", limits, before(formed, "late"), 1).result(WAIT) == survivor.result(WAIT)
    wait_until(lambda: kinds() == {"spare": "next generation"})
    place.engine.kill()
    wait_until(lambda: kinds() == {"spare": "init_rpc"})
    with pytest.raises(DirectoryLost):
        spare.result(WAIT)


def test_a_worker_that_waits_for_a_group_that_ends_gets_an_error(place: Place) -> None:
    formed = place.come("a", GroupSize(1, 1)).result(WAIT)
    spare = place.come("b", GroupSize(1, 1), timeout=0.5)
    place.wait_for("b")
    with pytest.raises(TimeoutError):  # a spare worker waits longer than its time limit
        spare.result(1.0)
    assert not is_wanted(arrivals_in(place.directory), formed, 1, place.lives)
    assert end(place.directory, formed)
    with pytest.raises(errors.GroupEnded, match="after generation 1"):
        spare.result(WAIT)
    place.dead |= {"a/0", "b/0"}
    assert names(place.come("c", GroupSize(1, 1)).result(WAIT)) == ["c"]


def test_a_straggler_comes_back_as_a_new_member(place: Place) -> None:
    limits = GroupSize(1, 2)
    coming = [place.come(name, limits) for name in "ab"]
    formed = coming[0].result(WAIT)
    coming[1].result(WAIT)
    second = place.come("a", limits, before(formed, "a"), 1, timeout=0.3).result(WAIT)
    assert (second.number, names(second)) == (2, ["a"])
    late = place.come("b", limits, before(formed, "b"), 1, timeout=0.3)
    place.wait_for("b")
    with pytest.raises(TimeoutError):  # it forms no generation without the worker that runs
        late.result(0.7)
    third = place.come("a", limits, before(second, "a", 1), 2).result(WAIT)
    assert third == late.result(WAIT)
    assert (third.number, names(third), third.survivors) == (3, ["a", "b"], 1)


def test_a_worker_that_missed_a_generation_joins_the_next_one(place: Place) -> None:
    limits = GroupSize(1, 2)
    formed = Formed(2, (member("b", 1)._replace(id=0),), 1, str(limits))
    first = place.come("a", limits, timeout=0.3)
    place.wait_for("a")
    place.put(GENERATION, formed.to_json())  # the worker has missed generation 1, which it was in
    with pytest.raises(TimeoutError):
        first.result(0.5)
    second = place.come("b", limits, before(formed, "b", 1), 2)
    assert names(second.result(WAIT)) == names(first.result(WAIT)) == ["b", "a"]


# A directory that does not answer


class Losing(NaiveClient):
    """A client whose connection breaks after the write of some keys, which is done or not."""

    def __init__(self, engine: NaiveEngine, key: str, done: bool) -> None:
        super().__init__(engine, PATIENCE)
        self._key, self._done = key, done
        self.losses = 1

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: object = None) -> Swap:
        if not key.startswith(self._key) or not self.losses:
            return super().swap(key, value, expected, lease)  # type: ignore[arg-type]
        self.losses -= 1
        if self._done:
            super().swap(key, value, expected, lease)  # type: ignore[arg-type]
        raise DirectoryLost("the connection broke")


@pytest.mark.parametrize("key", ["group", COME, GENERATION])
@pytest.mark.parametrize("done", [True, False])
def test_a_write_with_an_unknown_outcome_forms_one_generation(place: Place, key: str, done: bool) -> None:
    clients = [Losing(place.engine, key, done) for _ in "ab"]
    coming = [place.come(name, GroupSize(2, 2), client=client) for name, client in zip("ab", clients, strict=True)]
    results = [future.result(WAIT) for future in coming]
    assert results[0] == results[1]
    assert [each.number for each in place.history()] == [1]
    assert any(client.losses == 0 for client in clients)
    assert not place.directory.list(COME).entries


def test_joining_workers_wait_while_the_directory_is_away(place: Place) -> None:
    clients = [place.engine.client(0.05) for _ in "ab"]
    coming = [place.come("a", GroupSize(2, 2), client=clients[0])]
    place.wait_for("a")
    place.engine.kill()
    with pytest.raises(TimeoutError):
        coming[0].result(0.3)
    place.engine.start()
    coming.append(place.come("b", GroupSize(2, 2), client=clients[1]))
    assert all(sorted(names(future.result(WAIT))) == ["a", "b"] for future in coming)


def test_a_directory_that_stays_away_is_reported_in_time(place: Place) -> None:
    coming = place.come("a", GroupSize(2, 2), timeout=0.3, client=place.engine.client(0.05))
    place.wait_for("a")
    place.engine.kill()
    with pytest.raises(DirectoryLost):
        coming.result(WAIT)


def test_a_worker_that_lost_its_lease_while_it_joined_starts_anew(place: Place) -> None:
    first = place.come("a", GroupSize(2, 2))
    place.wait_for("a")
    with place.engine.changed:
        for lease in list(place.engine.state.leases):
            place.engine.state.revoke(lease)
    wait_until(lambda: not place.directory.list(COME).entries)
    second = place.come("b", GroupSize(2, 2))
    assert first.result(WAIT) == second.result(WAIT)


def test_a_lease_is_renewed_while_it_is_held_and_then_ends(place: Place) -> None:
    held = place.held(ttl=3.0)
    first = held.lease
    wait_until(lambda: held.lease.ends > first.ends + 0.5)
    assert held.lease.id == first.id
    held.close()
    assert not place.engine.state.leases
    with pytest.raises(DirectoryLost, match="has left"):
        held.directory.list("")


def test_a_renewal_that_fails_does_not_end_the_renewals(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = queue.SimpleQueue[None]()

    def fail() -> None:
        tried.put(None)
        raise ZeroDivisionError

    held = place.held(ttl=0.06)
    monkeypatch.setattr(held, "renew", fail)
    for _ in range(3):  # the first one may have been called, and not have failed yet
        tried.get(timeout=5.0)
    assert "the lease in the group's directory could not be renewed" in caplog.text
    held.close()


def test_survivors_refuse_a_directory_that_has_forgotten_them(place: Place) -> None:
    formed = place.come("a", GroupSize(1, 1)).result(WAIT)
    other = Place()
    with pytest.raises(errors.DirectoryReset, match="start the group again"):
        other.come("a", GroupSize(1, 1), before(formed, "a"), 1).result(WAIT)
    assert not other.history()


def test_missed_changes_do_no_harm(place: Place) -> None:
    first = place.come("a", GroupSize(2, 2))
    place.wait_for("a")
    place.engine.forget()
    place.put("other", "change")
    place.engine.forget()
    assert names(place.come("b", GroupSize(2, 2)).result(WAIT)) == names(first.result(WAIT))


def test_simultaneous_decisions_form_one_generation_of_each_number(place: Place) -> None:
    """All workers reach their deadline at the same moment, so that all decide."""
    limits = GroupSize(1)
    coming = {name: place.come(name, limits, timeout=0.2) for name in "abcdef"}
    formed = {name: future.result(WAIT) for name, future in coming.items()}
    numbers = [each.number for each in place.history()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(name in names(each) for name, each in formed.items())
    assert len({each.number for each in formed.values()}) == len({each.to_json() for each in formed.values()})


def test_a_decision_after_that_of_another_worker_changes_nothing(place: Place) -> None:
    def lives(who: Member) -> bool:
        wait_until(place.history)  # asked about the other worker, before this one writes its decision
        return True

    first = place.come("a", GroupSize(2, 2), lives=lives)
    place.wait_for("a")
    second = place.come("b", GroupSize(2, 2), timeout=0.1)  # its deadline has passed, so that it decides, too
    assert first.result(WAIT) == second.result(WAIT)
    assert [each.number for each in place.history()] == [1]


@pytest.mark.parametrize("size", [None, "two"])
def test_torchrun_without_world_size_is_refused(monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", size or "")
    if size is None:
        monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(errors.UsageError, match=f"WORLD_SIZE is {size or ''!r}"):
        JoinRequest(None, KEYS, GroupSize(1, 1), Before(), -1, WAIT).meet(0)


def test_interrupts_reach_a_worker_that_waits(place: Place) -> None:
    def lives(_: Member) -> bool:
        raise KeyboardInterrupt

    place.come("a", GroupSize(1, 1)).result(WAIT)
    held = place.held()
    coming = JoinRequest(held, KEYS, GroupSize(1, 1), Before(), -1, WAIT)
    with pytest.raises(KeyboardInterrupt):
        coming.join(held, member("b"), lives, place)


class Silent:
    """Sends no message."""

    closed = False

    def __init__(self) -> None:
        self.lost: list[object] = []

    def on(self, *_: object) -> None:
        pass


def test_a_directory_is_not_reported_as_lost_by_a_worker_that_leaves_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    formed, held = place.come("a", GroupSize(1, 1)).result(WAIT), place.held()
    post: Any = Silent()
    monitor = GenerationMonitor(post, formed.members[0], formed)
    monitor._held = held, 1, place.lives
    held.found = None
    monitor._look()
    assert not caplog.text


def test_a_worker_is_removed_though_the_others_cannot_be_greeted(place: Place) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    post: Any = Silent()
    formed = Formed(1, tuple(member(name)._replace(id=rank) for rank, name in enumerate("ab")))
    monitor = GenerationMonitor(post, formed.members[0], formed)
    monitor.begin(None, 2, place.lives, fail)
    monitor.note(formed.members[1])
    wait_until(lambda: monitor._steps.alive == {0})
    monitor.close()
