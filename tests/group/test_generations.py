"""How generations of elastic groups form at a store, with workers that are no more than entries there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from torch.distributed import PrefixStore

from telegrad import errors
from telegrad.group import generations
from telegrad.group.board import Board
from telegrad.group.generations import BOARD, Coming, Formed, Ground, end_at, lives_at, waiting_at
from telegrad.group.members import Member
from telegrad.group.quorum import Arrival, Before, Limits
from telegrad.group.rendezvous import Terms, new_terms
from telegrad.group.stores import Meeting, open_store
from telegrad.keyring import Keyring, new_key
from tests.cluster import KEYS, PATIENCE, sealed

WAIT = 20.0


def member(name: str, life: int = 0) -> Member:
    return Member(name, -1, f"{name}/{life}", "program", "host", "", ("127.0.0.1", 1000 + len(name)))


class Place:
    """A file where they meet, and who is dead."""

    def __init__(self, path: Path) -> None:
        self.url = f"file://{path}"
        self.stores = 1  # so many, one after the other
        self.dead: set[str] = set()
        self.over = False
        self._opened: list[Meeting] = []
        self._pool = ThreadPoolExecutor(8)

    def lives(self, who: Member) -> bool:
        assert not self.over, "the test is over"
        return who.incarnation not in self.dead

    def come(
        self,
        name: str,
        limits: Limits,
        before: Before | None = None,
        life: int = 0,
        timeout: float = WAIT,
        keys: Keyring = KEYS,
    ) -> Future[Formed]:
        ground = Ground(self.url, keys)
        coming = Coming(ground, keys, limits, before or Before(), -1, timeout)
        coming.meet(0)
        return self._pool.submit(coming.join, ground, member(name, life), self.lives)

    def store(self) -> Board:
        return Board(self.ground().open(WAIT).store, BOARD)

    def ground(self) -> Ground:
        return Ground(self.url, KEYS)

    def prepared(self, limits: Limits) -> Board:
        """The first round of a group of which nobody has come yet but one that is gone."""
        root = self.store()
        root.claim_terms(new_terms(str(limits), member("first")).to_json())
        root.swap("round", "", "1")
        return Board(self.ground().open(WAIT).store, f"{BOARD}/1", group=root.group)

    def open(self, *arguments: Any) -> Meeting:
        """As `open_store`: the store that is there now. The file itself stays, since torch reads on where it was."""
        meeting = open_store(*arguments)
        self._opened.append(meeting)  # torch holds its half of a store of Python alone
        return meeting._replace(store=sealed(PrefixStore(f"store {self.stores}", meeting.store.raw), meeting.keys))

    def wait_until(self, seen: Callable[[Board], bool]) -> None:
        until = monotonic() + PATIENCE
        store = self.store()
        while not (store.terms() and seen(store)):
            assert monotonic() < until
            sleep(0.01)

    def wait_for_places(self, count: int, number: int = 1) -> None:
        raw = self.ground().open(WAIT).store

        def seen(root: Board) -> bool:
            board = Board(raw, f"{BOARD}/{number}", group=root.group)
            return board.number("places") >= count and bool(board.read(f"entry/{count}"))

        self.wait_until(seen)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path / "store")
    monkeypatch.setattr(generations, "open_store", made.open)
    yield made
    made.over = True


def names(formed: Formed) -> list[str]:
    return [each.name for each in formed.members]


def as_before(formed: Formed, me: str, life: int = 0, without: tuple[str, ...] = ()) -> Before:
    alive = tuple(each for each in formed.members if each.name not in without)
    return Before(formed.number, alive, (), f"{me}/{life}")


def test_all_who_come_form_the_first_one(place: Place) -> None:
    coming = [place.come(name, Limits(2, 3)) for name in "abc"]
    results = [future.result(WAIT) for future in coming]
    assert all(formed == results[0] for formed in results)
    assert (results[0].number, results[0].survivors, sorted(names(results[0]))) == (1, 0, ["a", "b", "c"])


def test_the_last_call(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "LAST_CALL", 0.2)
    coming = [place.come(name, Limits(2)) for name in "ab"]
    assert [sorted(names(future.result(WAIT))) for future in coming] == [["a", "b"]] * 2


def test_too_few_are_told(place: Place) -> None:
    with pytest.raises(errors.GroupIncomplete, match=r"0\.1 s for a group of 2 to 4 .* 1 worker of 2 to 4 came: 'a'"):
        place.come("a", Limits(2, 4), timeout=0.1).result(WAIT)


def test_survivors_come_first_and_let_in_who_waits(place: Place) -> None:
    limits = Limits(2, 3)
    first = [place.come(name, limits) for name in "abc"]
    formed = first[0].result(WAIT)
    gone, *stay = names(formed)
    place.dead.add(f"{gone}/0")
    newcomer = place.come("x", limits)
    place.wait_for_places(1, 2)
    assert waiting_at(place.ground().open(WAIT).store, formed, 4, place.lives)
    again = [place.come(name, limits, as_before(formed, name), 1) for name in stay]
    for future in [newcomer, *again]:
        assert names(future.result(WAIT)) == [*stay, "x"]
        assert future.result(WAIT)[:3:2] == (2, 2)


def test_one_who_died_as_it_waited_is_in_nobodys_way(place: Place) -> None:
    limits = Limits(2, 2)
    place.dead.add("dead/0")
    board = place.prepared(limits)
    board.write(f"entry/{board.increment('places')}", Arrival(member("dead")).to_json())
    coming = [place.come(name, limits) for name in "ab"]
    assert all(sorted(names(future.result(WAIT))) == ["a", "b"] for future in coming)


def test_one_who_died_as_it_was_chosen_is_replaced(place: Place) -> None:
    limits = Limits(2, 2)
    board = place.prepared(limits)
    board.write(f"entry/{board.increment('places')}", Arrival(member("ghost")).to_json())
    board.write("verdict", "[1, [1, 2], 0, []]")  # by the ghost, which dies then
    board.increment("places")
    board.write("entry/2", Arrival(member("ghost2")).to_json())
    coming = [place.come(name, limits) for name in "ab"]
    assert all(sorted(names(future.result(WAIT))) == ["a", "b"] for future in coming)


def test_a_chosen_one_that_never_takes_its_place(place: Place) -> None:
    limits = Limits(2, 3)
    board = place.prepared(limits)
    board.write(f"entry/{board.increment('places')}", Arrival(member("ghost")).to_json())
    coming = [place.come(name, limits) for name in "ab"]
    place.wait_for_places(3)
    place.dead.add("ghost/0")  # it had come first, and decides no more; or was chosen already
    place.come("c", limits)
    assert all(len(names(future.result(WAIT))) == 3 for future in coming)


def test_a_name_that_is_taken(place: Place) -> None:
    limits = Limits(2, 2)
    coming = [place.come("same", limits), place.come("same", limits, life=1)]
    place.wait_for_places(2)  # who comes later waits for a place that gets free
    coming.append(place.come("other", limits))
    kinds = [type(future.exception(WAIT)) for future in coming]
    assert sorted(map(str, kinds)) == sorted(map(str, [type(None), type(None), errors.WorkerTaken]))


def test_another_key_or_other_limits_are_told_to_who_has_them(place: Place) -> None:
    limits = Limits(2, 2)
    first = place.come("a", limits)
    place.wait_for_places(1)
    with pytest.raises(errors.AuthenticationFailed):
        place.come("b", limits, keys=Keyring([new_key()])).result(WAIT)
    with pytest.raises(errors.RendezvousError, match="min_workers and max_workers"):
        place.come("c", Limits(2, 3)).result(WAIT)
    second = place.come("d", limits)
    assert first.result(WAIT) == second.result(WAIT)


def test_terms_of_an_earlier_run_are_replaced(place: Place) -> None:
    first = place.come("a", Limits(1, 1)).result(WAIT)
    place.dead.add("a/0")
    formed = place.come("b", Limits(1, 2)).result(WAIT)
    assert names(formed) == ["b"]
    assert Terms.from_json(formed.terms).group == Terms.from_json(first.terms).group


def test_who_waits_for_a_group_that_ends_is_told(place: Place) -> None:
    formed = place.come("a", Limits(1, 1)).result(WAIT)
    spare = place.come("b", Limits(1, 1), timeout=0.5)
    place.wait_for_places(1, 2)
    sleep(1.0)  # a spare waits longer than its time
    assert not spare.done()
    assert not waiting_at(place.ground().open(WAIT).store, formed, 1, place.lives)
    end_at(place.ground().open(WAIT), formed)
    with pytest.raises(errors.GroupEnded, match="after generation 1"):
        spare.result(WAIT)
    place.dead |= {"a/0", "b/0"}
    assert names(place.come("c", Limits(1, 1)).result(WAIT)) == ["c"]


def test_whether_a_group_is_there(place: Place) -> None:
    store = place.ground().open(WAIT).store
    assert not lives_at(store, place.lives)
    place.come("a", Limits(1, 1)).result(WAIT)
    assert lives_at(store, place.lives)
    place.dead.add("a/0")
    assert not lives_at(store, place.lives)


def test_a_straggler_comes_back_as_a_new_one(place: Place) -> None:
    limits = Limits(1, 2)
    coming = [place.come(name, limits) for name in "ab"]
    formed = coming[0].result(WAIT)
    coming[1].result(WAIT)
    second = place.come("a", limits, as_before(formed, "a"), 1, timeout=0.3).result(WAIT)
    assert (second.number, names(second)) == (2, ["a"])
    late = place.come("b", limits, as_before(formed, "b"), 1)
    place.wait_for_places(1, 3)
    third = place.come("a", limits, as_before(second, "a", 1), 2).result(WAIT)
    assert third == late.result(WAIT)
    assert (third.number, names(third), third.survivors) == (3, ["a", "b"], 1)


def test_who_loses_its_connection_keeps_its_place(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([True, True])
    real = Board.wait

    def wait(board: Board, key: str, until: float, *meanwhile: Callable[[], None]) -> str:
        if key == "verdict" and next(losses, False):
            raise errors.StoreLost("for a moment")
        return real(board, key, until, *meanwhile)

    monkeypatch.setattr(Board, "wait", wait)
    coming = [place.come(name, Limits(2, 2)) for name in "ab"]
    assert all(sorted(names(future.result(WAIT))) == ["a", "b"] for future in coming)
    store = place.store()
    assert store.terms()
    assert Board(place.ground().open(WAIT).store, f"{BOARD}/1", group=store.group).number("places") == 2


def test_who_was_found_dead_is_not_awaited_after_the_store_was_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(2, 2)
    store = place.store()
    store.claim_terms(new_terms(str(limits), member("gone")).to_json())
    store.write("running", Formed(1, [member("gone")], 0).to_json())
    place.dead.add("gone/0")
    lost = threading.Event()
    wait = Board.wait

    def lossy(board: Board, key: str, until: float, *meanwhile: Callable[[], None]) -> str:
        if key == "verdict" and not lost.is_set():
            meanwhile[0]()  # which finds that it is dead
            lost.set()
            raise errors.StoreLost("for a moment")
        return wait(board, key, until, *meanwhile)

    monkeypatch.setattr(Board, "wait", lossy)
    first = place.come("a", limits)
    assert lost.wait(WAIT)
    second = place.come("b", limits)
    assert [names(future.result(WAIT)) for future in (first, second)] == [["a", "b"]] * 2


def test_who_loses_one_store_after_the_other_hears_that_its_generation_has_formed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lost_twice = threading.Event(), threading.Event()
    order, losses = iter([0, 1]), iter([True])
    wait, read = Board.wait, Board.read

    def lossy_wait(board: Board, key: str, *rest: Any) -> str:
        second = key == "ready" and next(order) == 1
        if second:
            assert first.wait(WAIT)
            place.stores += 1
            raise errors.StoreLost("its server has died")
        found = wait(board, key, *rest)
        if key == "ready":
            first.set()
        return found

    def lossy_read(board: Board, key: str) -> str:
        if key == "running" and first.is_set() and next(losses, False):
            lost_twice.set()
            raise errors.StoreLost("the next one has, too")
        return read(board, key)

    monkeypatch.setattr(Board, "wait", lossy_wait)
    monkeypatch.setattr(Board, "read", lossy_read)
    coming = [place.come(name, Limits(2, 2)) for name in "ab"]
    assert lost_twice.wait(WAIT)
    formed = next(future for future in as_completed(coming, WAIT)).result()
    waiting_at(place.ground().open(WAIT).store, formed, 2, place.lives)  # as its members do now and then
    assert [future.result(WAIT) for future in coming] == [formed, formed]


def test_who_comes_to_a_new_store_waits_for_those_who_wonder_whether_they_have_formed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "LAST_CALL", 0.1)
    limits = Limits(1, 4)
    formed = place.come("a", limits).result(WAIT)
    lost = threading.Event()
    wait = Board.wait

    def lossy(board: Board, key: str, *rest: Any) -> str:
        if key == "ready" and not lost.is_set():
            place.stores += 1
            lost.set()
            raise errors.StoreLost("its server has died")
        return wait(board, key, *rest)

    monkeypatch.setattr(Board, "wait", lossy)
    again = place.come("a", limits, as_before(formed, "a"), 1)
    assert lost.wait(WAIT)
    place.wait_until(lambda store: bool(store.read("running")))
    coming = [place.come(name, limits) for name in "bc"]
    results = [future.result(WAIT) for future in [again, *coming]]
    assert results[0].number == 2
    assert names(results[0])[0] == "a"
    assert results[1:] == results[:1] * 2


def test_who_hears_late_of_a_store_that_was_lost_leaves_the_next_one_alone(place: Place) -> None:
    ground = place.ground()
    lost = ground.open(WAIT)
    ground.forget(lost)
    found = ground.open(WAIT)
    ground.forget(lost)
    assert ground.held is found


def test_two_threads_that_look_for_the_store_find_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*arguments: Any) -> Meeting:
        sleep(0.05)
        return open_store(*arguments)

    monkeypatch.setattr(generations, "open_store", slowly)
    ground = place.ground()
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(ground.open, WAIT) for _ in range(2)]
        assert first.result() is second.result() is ground.held


def test_interrupts_reach_who_waits(place: Place) -> None:
    ended = threading.Event()

    def lives(_: Member) -> bool:
        ended.set()
        raise KeyboardInterrupt

    place.come("a", Limits(1, 1)).result(WAIT)
    ground = place.ground()
    coming = Coming(ground, KEYS, Limits(1, 1), Before(), -1, WAIT)
    with pytest.raises(KeyboardInterrupt):
        coming.join(ground, member("b"), lives)
    assert ended.is_set()
