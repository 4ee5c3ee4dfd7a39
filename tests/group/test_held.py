"""Tests of how a process holds the directory of its elastic group, and of the loss of it or of the store."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from telegrad._core.membership.form_generations import DirectoryLease, JoinRequest
from telegrad._core.membership.generations import COME, GENERATION, Arrival, Before, Formed, GroupSize, look
from telegrad._core.membership.join import join
from telegrad._core.membership.members import Member
from telegrad._core.sockets import is_here
from telegrad._core.stores.directory import DirectoryLost
from telegrad._core.stores.directory_server import ServerProcess
from telegrad._core.stores.find_directory import POINTER, Found, Pointer, connect, find_directory
from telegrad._core.stores.sealed_store import KeyValueStore
from telegrad._core.stores.stores import RendezvousStore, join_store
from tests.cluster import KEYS, PATIENCE, free_port, opened, wait_until

FORMED = Formed(1, (Member("w", 0, "life", "", "host", "", ("127.0.0.1", 1)),), limits="1")


class Place:
    """A rendezvous of several processes, which are objects of one process here."""

    def __init__(self, url: str, port: int = 0) -> None:
        self.url = url
        self._port = port
        self.made: list[DirectoryLease] = []

    def hold(self) -> DirectoryLease:
        held = DirectoryLease(self.url, KEYS, 60.0)
        if self.made and self._port:  # a process can serve its store twice
            store = join_store("127.0.0.1", self._port, KEYS, PATIENCE)
            held._meeting = RendezvousStore(store, "127.0.0.1", -1, None, self._port)
        meeting = held.meet(PATIENCE)
        found = find_directory(meeting.store, meeting.where, meeting.served, "127.0.0.1", time.monotonic() + PATIENCE)
        held.hold(meeting, found)
        self.made.append(held)
        return held


@pytest.fixture
def place() -> Iterator[Place]:
    port = free_port()
    made = Place(f"tcp://127.0.0.1:{port}", port)
    yield made
    for held in made.made:
        held.close()


def meeting_of(held: DirectoryLease) -> RendezvousStore:
    return held.meet(0)


def found_of(held: DirectoryLease) -> Found:
    assert held.found is not None
    return held.found


def keeper_of(held: DirectoryLease) -> ServerProcess:
    keeping = found_of(held).keeping
    assert keeping is not None
    assert keeping._keeper is not None
    return keeping._keeper


def form(held: DirectoryLease) -> None:
    held.directory.swap(GENERATION, FORMED.to_json().encode())


def test_another_process_serves_the_store_anew_with_the_same_directory(place: Place) -> None:
    first, second = place.hold(), place.hold()
    form(first)
    assert meeting_of(first).serves
    assert not meeting_of(second).serves
    store = meeting_of(second).store
    second.serve_again()
    assert meeting_of(second).store is store  # the store has not gone
    first.close()
    second.serve_again()
    assert meeting_of(second).serves
    assert look(place.hold().directory).running == FORMED


@pytest.mark.parametrize("why", ["launched", "elsewhere"])
def test_a_store_that_a_worker_must_not_serve_is_left_alone(place: Place, why: str) -> None:
    first, second = place.hold(), place.hold()
    if why == "launched":
        second.found = found_of(second)._replace(launched=True)
    else:
        second._meeting = meeting_of(second)._replace(host="192.0.2.7")
        assert not is_here("192.0.2.7")
    first.close()
    second.serve_again()
    assert not meeting_of(second).serves


def test_a_directory_killed_with_its_keeper_is_restarted_from_its_file(place: Place) -> None:
    first, second = place.hold(), place.hold()
    form(first)
    keeper = keeper_of(first)
    keeper._listener.close()  # as if that worker had died
    os.kill(keeper.pid, signal.SIGKILL)
    found_of(first).keeping._stop()
    second.restart()
    assert look(second.directory).running == FORMED
    second.renew()


def test_a_directory_of_another_host_is_not_started_here(place: Place) -> None:
    second = place.hold()
    found = found_of(second)
    assert found.pointer is not None
    elsewhere = found._replace(keeping=None, pointer=found.pointer._replace(machine="another"))
    for each in (elsewhere, elsewhere._replace(pointer=None), found._replace(keeping=None, launched=True)):
        second.found = each
        second.restart()
        assert found_of(second).keeping is None
    second.found = found


def test_the_last_process_that_closes_the_directory_ends_it(place: Place) -> None:
    first, second = place.hold(), place.hold()
    pointer = found_of(first).pointer
    assert pointer is not None
    first.close()
    assert os.path.exists(pointer.path)
    second.renew()
    second.close()
    wait_until(lambda: not os.path.exists(pointer.path))
    with pytest.raises(DirectoryLost, match="has left"):
        second.renew()
    second.close()
    second.serve_again()
    second.restart()


@pytest.mark.parametrize("waits", [True, False])
def test_a_lasting_store_has_no_pointer_once_the_group_has_ended(tmp_path: os.PathLike[str], waits: bool) -> None:
    place = Place(f"file://{tmp_path}/store")
    first, second = place.hold(), place.hold()
    form(first)
    if waits:
        second.directory.swap(COME + "life", Arrival(FORMED.members[0]).to_json().encode(), 0, second.lease)
    first.close(FORMED)
    pointer = KeyValueStore(opened(place.url, -1, None, PATIENCE).store).read(POINTER)
    assert bool(pointer) == waits
    running = look(second.directory).running
    assert running == FORMED._replace(has_ended=True)
    second.close()


def test_a_worker_that_comes_as_the_group_ends_restores_the_pointer(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last worker sees no other one, because this one has found the directory and has not arrived there yet."""
    place = Place(f"file://{tmp_path}/store")
    first, held = place.hold(), DirectoryLease(place.url, KEYS, 60.0)
    form(first)
    wait_for_the_next = JoinRequest.join

    def join_as_it_ends(*request: Any) -> Formed:
        first.close(FORMED)
        return wait_for_the_next(*request)

    monkeypatch.setattr(JoinRequest, "join", join_as_it_ends)
    coming = JoinRequest(held, KEYS, GroupSize(1, 1), Before(), -1, PATIENCE)
    late = FORMED.members[0]._replace(name="late", incarnation="another life")
    joined = join(coming.meet(PATIENCE), late, 0.0, PATIENCE, mock.Mock(**{"probe.return_value": None}))
    assert joined.generation is not None
    assert joined.generation.number == 2
    pointer = KeyValueStore(opened(place.url, -1, None, PATIENCE).store).read(POINTER)
    assert Pointer.from_json(pointer) == found_of(held).pointer
    held.close()


def test_a_process_that_does_not_end_the_group_leaves_the_pointer(tmp_path: os.PathLike[str]) -> None:
    place = Place(f"file://{tmp_path}/store")
    first, second = place.hold(), place.hold()
    form(first)
    first.close()
    pointer = Pointer.from_json(KeyValueStore(opened(place.url, -1, None, PATIENCE).store).read(POINTER))
    with contextlib.closing(connect(pointer, KEYS)) as directory:
        assert look(directory).running == FORMED
    second.close()
