"""A dynamic group outlives whoever serves its store: killed, stopped, or gone in order; nobody else comes or goes."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import errors
from telegrad.group import asking, dynamic, joining, stores
from telegrad.group.asking import AskedAside, SilentStore
from telegrad.group.directory import Directory
from telegrad.group.dynamic import DynamicGroup
from telegrad.group.members import Member
from telegrad.rpc import cluster, current
from tests.cluster import KEYS, PATIENCE, Process, free_port, processes, sealed
from tests.rpc.test_membership import account, call, error_of, join, names, next_event, serve

SOON = 2.0  # seconds within which all goes on
LATE = 0.1  # seconds that a call among the others may take meanwhile


def here() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def gather(made: list[Process], where: str) -> None:
    """The first serves, as "boss" of rank 0; the others are a, b, c, ... and all know one another."""
    for process, (name, rank) in zip(made, [("boss", 0), ("a", -1), ("b", -1), ("c", -1), ("d", -1)], strict=False):
        process.run(join, name, where, rank, False)
    for process in made:
        process.run(rpc.wait_for_workers, len(made), PATIENCE)


def version() -> int:
    assert current.worker is not None
    return current.worker.membership.view().version


def seat() -> tuple[int, int, str, int]:
    """The term of the store, the rank of who serves it, and where."""
    assert current.worker is not None
    store = current.worker.directory.store
    return store.term, store.id, store.host, store.port


def wait_for_seat(term: int) -> tuple[int, int, str, int]:
    until = time.monotonic() + PATIENCE
    while seat()[0] < term and time.monotonic() < until:
        time.sleep(0.01)
    return seat()


def no_event(seconds: float) -> list[Any]:
    from tests.rpc.test_membership import events

    time.sleep(seconds)
    return [events.get() for _ in range(events.qsize())]


def port_of(where: str) -> int:
    return int(where.rpartition(":")[2])


def test_joins_leaves_and_look_ups_go_on_once_the_server_was_killed() -> None:
    where = here()
    with processes(6) as made:
        boss, a, b, c, new, other = made
        gather(made[:4], where)
        for process in (a, b, c):
            process.run(account)
        assert {c.run(next_event)[1] for _ in range(3)} == {"boss", "a", "b"}
        before = [process.run(version) for process in (a, b, c)]
        boss.kill()
        began = time.monotonic()
        new.run(join, "new", where, -1, False)
        assert c.run(call, "new") == 3
        assert new.run(call, "b") == 3
        assert time.monotonic() - began < SOON
        assert c.run(next_event) == ("lost", "boss")
        assert c.run(next_event) == ("join", "new", 3)
        assert [process.run(wait_for_seat, 2) for process in (a, b, c, new)] == [
            (2, 1, "127.0.0.1", port_of(where))
        ] * 4
        b.run(rpc.shutdown)
        assert c.run(next_event) == ("left", "b")
        assert new.run(names) == a.run(names) == ["a", "c", "new"]
        assert c.run(no_event, 0.5) == []
        assert [process.run(version) - was for process, was in zip((a, c), (before[0], before[2]), strict=True)] == [
            3,
            3,
        ]
        assert other.run(join, "other", where, 0, False) == 0  # rank 0 is free again


def test_server_after_server_dies() -> None:
    where = here()
    with processes(5) as made:
        gather(made, where)
        last = made[-1]
        last.run(account)
        for _ in range(4):
            last.run(next_event)
        for rank, process in enumerate(made[:-1]):
            process.kill()
            assert last.run(next_event)[0] == "lost"
            assert last.run(wait_for_seat, 2 + rank)[1] == rank + 1
        assert last.run(names) == ["d"]
        assert last.run(no_event, 0.3) == []


def test_two_die_at_once() -> None:
    where = here()
    with processes(4) as made:
        gather(made, where)
        made[0].kill()
        made[1].kill()
        assert made[2].run(wait_for_seat, 2)[:2] == made[3].run(wait_for_seat, 2)[:2] == (2, 2)
        made[2].run(rpc.wait_for_workers, 2)
        assert made[3].run(call, "b") == 3


def test_who_comes_while_nobody_serves_does_not_begin_another_group() -> None:
    where = here()
    with processes(7) as made:
        gather(made[:3], where)
        made[0].kill()
        for number, process in enumerate(made[3:]):
            process.begin(join, "boss" if number == 0 else f"new{number}", where, 0 if number == 0 else -1, False)
        for process in made[3:]:
            process.end()
        for process in made[1:]:
            process.run(rpc.wait_for_workers, ["a", "b", "boss", "new1", "new2", "new3"], PATIENCE)
        assert len({process.run(wait_for_seat, 2) for process in made[1:]}) == 1
        assert made[3].run(seat)[0] == 2
        assert made[3].run(lambda: rpc.get_worker_info().id) == 0


def test_a_store_that_goes_as_soon_as_it_was_found_is_followed_by_the_next() -> None:
    place = ("127.0.0.1", free_port())
    first = stores.serve(*place, KEYS)
    found = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
    del first
    later = stores.serve(*place, KEYS)
    me = Member("a", 1, "incarnation", "program", "host", "", ("127.0.0.1", 1))
    joined = joining.join(stores.Meeting(sealed(found), place[0], 1, None, place[1], places=(place,)), me, PATIENCE)
    directory = Directory(later)
    assert directory.board.terms()
    assert directory.members() == [joined.me]
    assert isinstance(joined.directory, DynamicGroup)
    joined.directory.leave()


def churn(where: str, prefix: str, seconds: float) -> int:
    """Come and go again and again; how often."""
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        join(f"{prefix}{count}", where, -1, False)
        assert call("a") == 3
        rpc.shutdown()
        count += 1
    return count


def test_members_come_and_go_while_servers_die() -> None:
    where = here()
    with processes(6) as made:
        gather(made[:4], where)
        for process, prefix in zip(made[4:], "xy", strict=True):
            process.begin(churn, where, prefix, 2.5)
        for process in (made[0], made[2]):  # the second serves by and by; "a" stays
            time.sleep(0.8)
            process.kill()
        assert min(process.end() for process in made[4:]) > 2
        made[3].run(wait_until, lambda: names() == ["a", "c"])
        assert made[1].run(names) == ["a", "c"]


def wait_until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def call_on_and_on(to: str, seconds: float) -> float:
    """The longest that a call has taken."""
    until = time.monotonic() + seconds
    longest = 0.0
    while (began := time.monotonic()) < until:
        rpc.rpc_sync(to, operator.add, (1, 2))
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.001)
    return longest


@pytest.mark.parametrize("late", [10 * LATE, pytest.param(LATE, marks=pytest.mark.nightly)])
def test_calls_among_the_others_are_not_held_up(late: float) -> None:
    where = here()
    with processes(4) as made:
        boss, a, b, c = made
        gather(made, where)
        for process, to in ((a, "b"), (b, "c"), (c, "a")):
            process.run(call, to)
            process.begin(call_on_and_on, to, 1.2)
        time.sleep(0.3)
        boss.kill()
        assert max(process.end() for process in (a, b, c)) < late


# Servers that leave in order


def test_a_server_that_leaves_is_followed_by_one_that_stays() -> None:
    where = here()
    with processes(5) as made:
        boss, a, b, c, new = made
        gather(made[:4], where)
        c.begin(serve)
        a.run(account)
        assert {a.run(next_event)[1] for _ in range(3)} == {"boss", "b", "c"}
        boss.run(rpc.shutdown)
        assert c.end() is None  # it only serves, and so ends with the first
        assert {a.run(next_event), a.run(next_event)} == {("left", "boss"), ("left", "c")}
        new.run(join, "new", where, -1, False)
        assert a.run(next_event) == ("join", "new", 3)
        a.run(rpc.shutdown)
        assert new.run(call, "b") == 3
        assert b.run(wait_for_seat, 3)[:2] == (3, 2)
        assert new.run(names) == ["b", "new"]


def test_a_server_that_took_over_may_leave_and_those_who_serve_stay() -> None:
    where = here()
    with processes(4) as made:
        boss, a, b, again = made
        gather(made[:3], where)
        b.begin(serve)
        boss.kill()
        a.run(wait_for_seat, 2)
        a.run(rpc.shutdown)
        assert again.run(join, "boss", where, 0, False) == 0
        assert again.run(call, "b") == 3
        assert again.run(seat)[:2] == (3, 2)
        again.run(rpc.shutdown)  # of rank 0: it is the one with whom they end
        assert b.end() is None


def test_a_store_that_somebody_else_keeps_may_go_too() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=False)
    where = f"tcp://127.0.0.1:{store.port}"
    with processes(3) as made:
        a, b, c = made
        for process, name in ((a, "a"), (b, "b")):
            process.run(join, name, where, 1 if name == "a" else 2, False)
        a.run(rpc.wait_for_workers, 2, PATIENCE)
        b.run(rpc.wait_for_workers, 2, PATIENCE)
        assert b.run(seat)[:2] == (1, -1)
        del store
        assert b.run(wait_for_seat, 2)[:2] == (2, 1)
        c.run(join, "c", where, 3, False)
        assert c.run(call, "b") == 3


# Servers that are only out of reach


@pytest.mark.nightly
def test_a_server_that_was_stopped_comes_over_once_it_goes_on() -> None:
    where = here()
    with processes(4) as made:
        boss, a, b, c = made
        gather(made[:3], where)
        a.run(account)
        for _ in range(2):
            a.run(next_event)
        boss.kill(signal.SIGSTOP)
        assert b.run(wait_for_seat, 2)[:2] == a.run(wait_for_seat, 2)[:2] == (3, 1)  # the first was passed over
        assert b.run(seat)[3] != port_of(where)
        assert b.run(call, "a") == 3
        boss.kill(signal.SIGCONT)
        assert boss.run(wait_for_seat, 3)[:2] == (3, 1)
        assert boss.run(call, "b") == b.run(call, "boss") == 3
        assert a.run(no_event, 0.5) == []
        c.run(join, "c", where, -1, False)  # there it is told where to go
        assert c.run(seat)[:2] == (3, 1)
        assert a.run(next_event) == ("join", "c", 3)
        boss.kill()
        assert a.run(next_event) == ("lost", "boss")


def lose_patience() -> None:
    asking.PATIENCE = 0.5


def stop_the_server(made: list[Process], where: str) -> None:
    """The group goes on, its store at another port."""
    for process in made[1:]:
        process.run(lose_patience)
    made[0].kill(signal.SIGSTOP)
    for process in made[1:]:
        assert process.run(wait_for_seat, 2)[:2] == (3, 1)
    assert made[1].run(seat)[3] != port_of(where)


def at_home(where: str) -> bool:
    return seat()[3] == port_of(where)


def test_the_store_comes_home_once_who_was_stopped_has_died() -> None:
    where = here()
    with processes(6) as made:
        boss, a, b, new, newer, again = made
        gather(made[:3], where)
        b.run(account)
        for _ in range(2):
            b.run(next_event)
        stop_the_server(made[:3], where)
        boss.kill()
        began = time.monotonic()
        new.run(join, "new", where, -1, False)
        assert time.monotonic() - began < SOON
        assert new.run(call, "b") == 3
        assert b.run(next_event) == ("lost", "boss")
        assert b.run(next_event) == ("join", "new", 3)
        for process in (a, b, new):
            assert process.run(seat) == (4, 1, "127.0.0.1", port_of(where))
        a.kill()
        newer.run(join, "newer", where, -1, False)
        assert newer.run(call, "new") == 3
        assert b.run(next_event) == ("lost", "a")
        assert b.run(next_event)[:2] == ("join", "newer")
        assert again.run(join, "boss", where, 0, False) == 0
        assert set(again.run(names)) == set(b.run(names)) == {"b", "boss", "new", "newer"}
        assert b.run(next_event)[:2] == ("join", "boss")
        assert b.run(no_event, 0.5) == []


def test_the_store_comes_home_once_who_was_stopped_has_left() -> None:
    where = here()
    with processes(4) as made:
        boss, a, b, new = made
        gather(made[:3], where)
        b.begin(serve)
        stop_the_server(made[:2], where)
        boss.kill(signal.SIGCONT)
        assert boss.run(wait_for_seat, 3)[:2] == (3, 1)
        a.run(account)
        assert {a.run(next_event)[:2] for _ in range(2)} == {("join", "boss"), ("join", "b")}
        boss.run(rpc.shutdown)
        assert b.end() is None  # it only serves, and so ends with the first
        assert {a.run(next_event) for _ in range(2)} == {("left", "boss"), ("left", "b")}
        a.run(wait_until, partial(at_home, where))
        new.run(join, "new", where, -1, False)
        assert new.run(names) == a.run(names) == ["a", "new"]


def pretend_to_be_elsewhere() -> None:
    vars(dynamic)["is_here"] = lambda host: False
    vars(cluster)["host_identity"] = lambda: "another host"


@pytest.mark.nightly
def test_the_store_comes_home_from_another_host() -> None:
    where = here()
    with processes(4) as made:
        boss, a, b, new = made
        b.run(pretend_to_be_elsewhere)
        gather(made[:3], where)
        b.run(lose_patience)
        boss.kill(signal.SIGSTOP)
        a.kill(signal.SIGSTOP)
        assert b.run(wait_for_seat, 4)[:2] == (4, 2)  # both were passed over
        a.kill(signal.SIGCONT)
        assert a.run(wait_for_seat, 4)[:2] == (4, 2)
        boss.kill()
        new.run(join, "new", where, -1, False)
        assert new.run(call, "b") == new.run(call, "a") == 3
        assert a.run(seat) == b.run(wait_for_seat, 5) == (5, 1, "127.0.0.1", port_of(where))


def test_who_comes_as_the_store_comes_home_finds_the_group() -> None:
    where = here()
    with processes(7) as made:
        gather(made[:3], where)
        stop_the_server(made[:3], where)
        for number, process in enumerate(made[3:]):
            process.begin(join, "boss" if number == 0 else f"new{number}", where, 0 if number == 0 else -1, False)
        time.sleep(0.2)  # they wait for the one that is stopped
        made[0].kill()
        for process in made[3:]:
            process.end()
        for process in made[1:]:
            process.run(rpc.wait_for_workers, ["a", "b", "boss", "new1", "new2", "new3"], PATIENCE)
            assert process.run(wait_for_seat, 4)[:2] == (4, 1)


def test_a_store_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PATIENCE", 0.1)
    answers = threading.Event()

    class Store:
        def add(self, key: str, more: int) -> int:
            assert answers.wait(PATIENCE)
            return more

        def set(self, key: str, value: str) -> None:
            raise ValueError(key)

    aside = AskedAside(Store())
    with pytest.raises(ValueError, match="key"):
        aside.set("key", "")
    with pytest.raises(SilentStore):
        aside.add("key", 1)
    with pytest.raises(RuntimeError, match="does not answer"):
        aside.set("key", "")  # at once: torch is not asked again
    answers.set()
    aside.close()
    assert "does not answer" in repr(aside)


# Several places


def test_several_places() -> None:
    port = free_port()
    places = f"tcp://127.0.0.1:{port},localhost:{free_port()}"
    with processes(3) as made:
        made[0].run(join, "boss", places, 0, False)
        made[1].run(join, "a", places, -1, False)
        assert made[1].run(call, "boss") == 3
        made[0].kill()
        assert made[1].run(wait_for_seat, 2)[3] == port
        made[2].run(join, "b", f"tcp://localhost:{free_port()},127.0.0.1:{port}", 5, False)
        assert made[2].run(call, "a") == 3


def test_several_places_by_the_environment() -> None:
    with processes(2) as made:
        port = str(free_port())
        for process, rank in zip(made, (0, 1), strict=True):
            process.run(set_place, "127.0.0.1,localhost", port)
            process.run(join, f"w{rank}", "env://", rank, False)
        assert made[1].run(call, "w0") == 3


def set_place(host: str, port: str) -> None:
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)


def test_a_group_of_fixed_size_meets_at_one_place() -> None:
    with processes(1) as (process,):
        kind, text = process.run(error_of, join_fixed)
        assert kind is errors.UsageError
        assert "meets at one place" in text


def join_fixed() -> None:
    options = rpc.TelegradOptions(init_method="tcp://127.0.0.1:1,127.0.0.1:2")
    rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
