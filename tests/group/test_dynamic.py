"""Tests of a worker in a dynamic group: its lease, its view of other workers, and its life without a directory."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from telegrad import errors
from telegrad._core.membership import dynamic
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import LEFT, LOST, Change, Ended, MemberGone, MemberJoined
from telegrad._core.stores.directory import DirectoryLost, DirectoryRefused, DirectoryReset, Lease, LeaseLost
from tests.cluster import takes_less_than, wait_until
from tests.directory.harness import SOON
from tests.directory.naive import NaiveEngine
from tests.group.members import alive, member

LONG = 60.0  # a ttl that does not end within a test
PATIENCE = 0.2  # seconds of a client


lives = itertools.count()


class Worker:
    """A group as one worker has it, and the changes that were reported to this worker."""

    def __init__(
        self, engine: NaiveEngine, name: str, rank: int = -1, ttl: float = LONG, launched: bool = False
    ) -> None:
        self.group = DynamicGroup(engine.client(PATIENCE), ttl, launched)
        self.asked = member(name, rank, f"life {next(lives)}")
        self.told: list[Change] = []

    def join(self, is_alive: Callable[[Member], bool] = alive) -> Worker:
        self.me = self.group.join(self.asked, is_alive)
        return self

    def watch(self) -> Worker:
        self.group.begin(self.told.append)
        return self

    def gone(self) -> list[MemberGone]:
        return [each for each in self.told if isinstance(each, MemberGone)]

    def names(self) -> list[str]:
        return [each.name for each in self.group.members()]


def has_ended(engine: NaiveEngine) -> bool:
    return any(event.key == "live/ended" and event.entry for event in engine.state.events)


Make = Callable[..., Worker]


@pytest.fixture
def engine() -> NaiveEngine:
    return NaiveEngine()


@pytest.fixture
def make(engine: NaiveEngine) -> Iterator[Make]:
    made: list[Worker] = []

    def make(name: str, rank: int = -1, ttl: float = LONG, **options: bool) -> Worker:
        made.append(Worker(engine, name, rank, ttl, **options))
        return made[-1]

    yield make
    for each in made:
        each.group.leave()


# Names and ranks


def test_workers_join_find_each_other_and_leave(make: Make) -> None:
    a, b = make("a").join(), make("b").join().watch()
    assert (a.me.id, b.me.id) == (1, 2)
    assert a.group.identity == b.group.identity
    assert a.group.find("b") == a.group.find(2) == b.me
    assert b.group.find("a") == b.group.find(1) == a.me
    assert b.names() == ["a", "b"]
    a.group.leave()
    wait_until(b.gone)
    assert b.gone() == [MemberGone(a.me.incarnation, LEFT, "")]
    for to in ("a", 1):
        with pytest.raises(errors.UnknownWorker, match="The group has: b"):
            b.group.find(to)
    with pytest.raises(errors.UnknownWorker, match="no worker is named 'a' any more: that worker has left, or was"):
        b.group.find("a")
    a.group.leave()  # again does no harm
    c = make("a").join()
    assert c.me.id == 1
    assert b.group.find("a") == c.me
    assert c.names() == ["a", "b"]


@pytest.mark.parametrize(("name", "rank", "what"), [("a", -1, "the name 'a'"), ("b", 7, "the rank 7")])
def test_a_worker_that_is_refused_leaves_nothing_behind(make: Make, name: str, rank: int, what: str) -> None:
    first = make("a", 7).join()
    with pytest.raises(errors.WorkerTaken, match=what):
        make(name, rank).join()
    assert first.group.find("a") == first.group.find(7) == first.me
    assert make("c").join().me.id == 1
    assert make("b").join().me.id == 2


def test_a_name_is_taken_over_from_a_dead_member_alone(make: Make) -> None:
    dead, other = make("a").join(), make("b").join()
    asked: list[Member] = []

    def is_alive(each: Member) -> bool:
        asked.append(each)
        return each != dead.me

    with pytest.raises(errors.WorkerTaken):
        make("b").join(is_alive)
    assert asked == [other.me]
    again = make("a").join(is_alive)
    other.group.refresh()
    assert make("c").join().group.find("a") == again.me
    dead.group.leave()  # it does not free a name that another worker has by now
    assert make("d").join().group.find("a") == again.me


# The end of workers that only serve


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    ("first", "others", "leaver", "lost", "ends"),
    [
        (1, (0, 2), 0, "", "alone launched"),
        (0, (1, 2), 0, "", "alone launched"),
        (0, (1, 2), 0, "it failed", "alone"),  # a launcher restarts it
        (1, (2, 3), 1, "", "alone"),  # otherwise a launcher has made the group
        (1, (2, 3), 1, "it failed", "alone"),
        (1, (2, 3), 2, "", ""),
        (0, (1, 2), 1, "", ""),
    ],
)
def test_serving_workers_end_with_the_worker_that_made_the_group(
    engine: NaiveEngine,
    make: Make,
    launched: bool,
    first: int,
    others: tuple[int, ...],
    leaver: int,
    lost: str,
    ends: str,
) -> None:
    workers = {rank: make(f"w{rank}", rank, launched=launched).join() for rank in (first, *others)}
    workers[leaver].group.leave(lost)
    assert has_ended(engine) == (("launched" if launched else "alone") in ends.split())


@pytest.mark.parametrize(
    ("lost", "end"),
    [("", (LEFT, "worker 'boss' has left")), ("it failed", (LOST, "worker 'boss' was lost: it failed"))],
)
def test_the_end_of_a_group_is_reported_once_to_its_members(make: Make, lost: str, end: tuple[str, str]) -> None:
    boss, server = make("boss", 0).join(), make("server").join().watch()
    boss.group.leave(lost)
    wait_until(lambda: len(server.told) > 1)
    assert server.gone() == [MemberGone(boss.me.incarnation, end[0], lost)]
    assert [each for each in server.told if isinstance(each, Ended)] == [Ended(*end)]
    late = make("late").join().watch()
    again = make("boss", 0).join()
    wait_until(lambda: late.told)
    assert late.told == [MemberJoined(late.group._known[again.me.incarnation])]


def test_a_worker_that_joins_after_all_have_died_makes_the_group(engine: NaiveEngine, make: Make) -> None:
    dead = {make(f"dead{rank}", rank).join().me.incarnation for rank in (1, 2)}
    first = make("first").join(lambda other: other.incarnation not in dead)
    second = make("second").join(lambda other: other.incarnation not in dead)
    second.group.leave()
    assert not has_ended(engine)
    first.group.leave()
    assert has_ended(engine)


# The end of a life


def test_a_member_that_was_declared_lost_ends(
    engine: NaiveEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    boss, lost = make("boss", 0).join().watch(), make("w").join().watch()
    assert lost.group.holds
    wait_until(lambda: boss.told)
    boss.group.declare_lost(lost.me, "worker 'boss' found it dead")
    wait_until(lost.gone)
    wait_until(boss.gone)
    gone = MemberGone(lost.me.incarnation, LOST, "worker 'boss' found it dead")
    assert lost.gone() == boss.gone() == [gone]
    assert not lost.group.holds
    with pytest.raises(errors.PeerLost, match=r"'w' was declared lost \(worker 'boss' found it dead\).*Start it again"):
        lost.group.find("boss")
    again = make("w", lost.me.id).join()
    lost.group.leave()
    with pytest.raises(errors.PeerLost, match="was declared lost"):
        lost.group.find("boss")
    assert boss.group.registry.find("w") == again.group._known[again.me.incarnation]
    assert not has_ended(engine)


@pytest.mark.parametrize("forgotten", [False, True], ids=["changes", "read anew"])
def test_a_worker_that_was_cut_off_reports_only_its_own_loss(engine: NaiveEngine, make: Make, forgotten: bool) -> None:
    first, second, cut_off = make("a").join(), make("b").join(), make("w").join()
    for lost in (second, cut_off):
        first.group.registry.declare_lost(lost.me.incarnation, "unreachable")
    if forgotten:
        engine.forget()
    cut_off.watch()
    wait_until(cut_off.gone)
    cut_off.group.leave()  # its threads have ended
    assert [change.life for change in cut_off.gone()] == [cut_off.me.incarnation]


def test_the_first_worker_that_was_declared_lost_does_not_end_the_group(engine: NaiveEngine, make: Make) -> None:
    boss, other = make("boss", 0).join().watch(), make("w").join()
    other.group.declare_lost(boss.me, "dead")
    wait_until(boss.gone)
    boss.group.leave()
    assert not has_ended(engine)


def test_a_member_ends_if_its_directory_has_lost_its_state(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make("w").join()
    reset = DirectoryReset("it was restarted without its data")
    monkeypatch.setattr(worker.group.directory, "watch", Mock(side_effect=reset))
    worker.watch()
    wait_until(worker.gone)
    assert "without its data" in worker.group.over


# A directory that does not answer


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for record in caplog.records if words in (text := record.getMessage())]


def test_members_stay_known_while_the_directory_does_not_answer(
    engine: NaiveEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    a, b = make("a").join().watch(), make("b").join()
    wait_until(lambda: a.told)
    engine.kill()
    wait_until(lambda: lines(caplog, "does not answer"))
    assert a.group.find("b") == b.me
    with pytest.raises(DirectoryLost):
        a.group.find("c")
    with pytest.raises(DirectoryLost):
        make("c").join()
    wait_until(lambda: a.group.find("b") == b.me)
    engine.start()
    wait_until(lambda: lines(caplog, "answers again"))
    assert make("c").join().me.id == 3
    wait_until(lambda: a.names() == ["a", "b", "c"])
    assert not a.gone()
    assert len(lines(caplog, "does not answer")) == len(lines(caplog, "answers again")) == 1


@pytest.mark.parametrize("error", [DirectoryRefused, errors.StoreUntrusted])
def test_a_directory_that_cannot_be_used_is_reported_once(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    caplog.set_level(logging.WARNING)
    worker, asked = make("w", ttl=0.3).join(), list[str]()

    def refuse(name: str) -> Callable[..., None]:
        def refused(*_: object) -> None:
            asked.append(name)
            raise error("as it says")

        return refused

    with monkeypatch.context() as patch:
        for name in ("watch", "renew", "list", "swap"):
            patch.setattr(worker.group.directory, name, refuse(name))
        worker.watch()
        wait_until(lambda: min(asked.count("watch"), asked.count("renew")) > 3)
        told: list[str] = []
        worker.group._tell_lost(worker.me, "", lambda: told.append("unanswered"))
        assert told == ["unanswered"]
    wait_until(lambda: lines(caplog, "answers again"))
    assert len(lines(caplog, "directory of the group cannot be used (as it says)")) == 1
    assert not lines(caplog, "lease")
    assert not [record for record in caplog.records if record.exc_info]


def test_refused_renewals_are_reported_once_while_the_watch_goes_on(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that now asks new connections for a login refuses renewals in this way."""
    worker, asked = make("w", ttl=1.5).join(), list[float]()

    def refuse(_: object) -> None:
        asked.append(time.monotonic())
        raise DirectoryRefused("as it says")

    monkeypatch.setattr(worker.group.directory, "renew", refuse)
    worker.watch()
    wait_until(worker.gone)
    assert len(lines(caplog, "the lease in the group's directory could not be renewed: as it says")) == 1
    assert not [record for record in caplog.records if record.exc_info]
    assert len(asked) > 2


def test_a_refresh_does_not_wait_for_a_directory_that_is_known_to_be_lost(
    engine: NaiveEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make("w").join().watch()
    engine.kill()
    wait_until(lambda: lines(caplog, "does not answer"))
    with takes_less_than(100 * PATIENCE / 4):
        for _ in range(100):
            worker.group.refresh()
    engine.start()
    make("late").join()
    wait_until(lambda: worker.names() == ["late", "w"])


@pytest.mark.parametrize("known", [False, True], ids=["just now", "for long"])
def test_leaving_does_not_wait_for_a_directory_that_does_not_answer(
    engine: NaiveEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(dynamic, "PATIENCE", PATIENCE)
    worker = Worker(engine, "w")
    worker.group.directory = worker.group.registry._directory = engine.client(PATIENCE if known else LONG)
    worker.join().watch()
    engine.kill()
    if known:
        wait_until(lambda: lines(caplog, "does not answer"))
    with takes_less_than(PATIENCE + SOON):
        worker.group.leave()


# Missed changes


def test_a_member_catches_up_if_the_directory_has_forgotten_changes(engine: NaiveEngine, make: Make) -> None:
    worker, gone = make("w").join(), make("gone").join()
    worker.group.refresh()
    gone.group.leave()
    come = make("come").join()
    engine.forget()
    worker.watch()
    wait_until(lambda: worker.names() == ["come", "w"])
    assert worker.gone() == [
        MemberGone(gone.me.incarnation, LOST, "it disappeared while this worker received no changes")
    ]
    assert worker.told[-1] == MemberJoined(come.group._known[come.me.incarnation])


def test_a_member_learns_of_the_end_of_its_group_if_the_directory_has_forgotten_it(
    engine: NaiveEngine, make: Make
) -> None:
    make("boss", 0).join().group.leave()  # of an earlier group, which concerns no later member
    boss, server = make("boss", 0).join(), make("server").join()
    boss.group.leave()
    late = make("late").join()
    engine.forget()
    server.watch()
    late.watch()
    wait_until(lambda: "late" in server.names())
    wait_until(lambda: server.group._since == late.group._since)
    assert [each for each in server.told if isinstance(each, Ended)] == [Ended(LEFT, "worker 'boss' has left")]
    assert late.told == []
    engine.forget()
    make("boss", 0).join().group.leave()
    wait_until(lambda: any(isinstance(each, Ended) for each in late.told))


def test_a_change_that_cannot_be_handled_does_not_end_the_watch(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Change] = []

    def fail_once(change: Change) -> None:
        told.append(change)
        if len(told) == 1:
            raise ZeroDivisionError

    worker = make("w").join()
    worker.group.begin(fail_once)
    make("a").join()
    wait_until(lambda: lines(caplog, "could not be handled"))
    make("b").join()
    wait_until(lambda: len(told) == 2)
    assert worker.names() == ["a", "b", "w"]


def test_a_departure_during_a_renewal_is_no_loss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make("w").join().group

    def renew(_: Lease) -> Lease:
        group.leave()
        raise LeaseLost("it was revoked")

    monkeypatch.setattr(group.directory, "renew", renew)
    group._lease = group._lease._replace(ends=0.0)
    group.renew_if_due()
    with pytest.raises(errors.ShutDown, match="this worker has left the group"):
        group.find("w")


class KeptOnce:
    """A directory process that counts how often it is left running."""

    left = 0

    def leave(self) -> None:
        self.left += 1


def test_a_worker_that_leaves_twice_leaves_its_directory_running_once(make: Make) -> None:
    """A worker that was declared lost leaves once more when its program shuts down."""
    worker, kept = make("w").join(), KeptOnce()
    worker.group.keeps(None, kept)  # type: ignore[arg-type]
    worker.group.leave()
    worker.group.leave()
    assert kept.left == 1
