"""The table of references, and the texts of references and workers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.membership.members import Member
from telegrad._core.references.reference_protocol import DROPPED, ControlMessage
from telegrad._core.references.reference_table import MOST_AT_ONCE
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import PeerUnreachable, RRefError, UnknownWorker
from telegrad.rpc import RRef, remote
from tests.cluster import PATIENCE, agents_here, in_threads, wait_until


@pytest.fixture
def worker() -> Iterator[Worker]:
    with agents_here(2) as made:
        yield made[0]


def test_no_thread_starts_under_the_lock_of_a_table(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    held: dict[str, bool] = {}

    def look_and_start(thread: threading.Thread) -> None:
        held[thread.name] = worker.references._lock.locked()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", look_and_start)
    assert remote("w1", int).to_here() == RRef(0).to_here()
    assert held["telegrad-references"] is False


def test_a_reference_that_several_threads_give_up_is_deleted_once(worker: Worker) -> None:
    ref = RRef(1)
    table, handle = worker.references, ref._handle
    in_threads(*[lambda: table.give_up(handle)] * 8)
    table.flush()
    assert table.counts()["owners"] == 0
    assert [owned.handles for owned in table._machine.owned.values()] == []
    with pytest.raises(RRefError, match="was deleted"):
        ref.to_here()


def test_the_text_of_references_and_workers_needs_no_lock(worker: Worker) -> None:
    own, other = RRef(1), remote("w1", int)
    other.to_here()
    table, slot = worker.references, own._handle.slot
    assert slot is not None
    with worker.agent._reactor._lock, table._lock, worker.membership._changed, slot._lock:
        assert repr(own).endswith(" here: int>")
        assert repr(other).startswith("<RRef w0/")
        assert repr(worker) == "<Worker 'w0', in <Members: w0, w1>>"
    worker.end("")
    assert repr(worker) == "<Worker 'w0', closed, in <Members: w0, w1>>"


def test_a_connected_worker_that_is_not_listed_yet_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents_here(3, dynamic=True) as (owner, _, user):  # each member holds a connection to the next
        find, asked = owner.directory.find, threading.Semaphore(0)

        def find_nobody(to: str | int) -> Member:
            asked.release()
            raise UnknownWorker(f"no worker is named {to!r}")

        monkeypatch.setattr(owner.directory, "find", find_nobody)
        owner.agent.forget_names([])
        current.enter(user)
        reference = remote("w0", int)
        remote("w0", int).to_here()  # ends at once; the owner owes a receipt for it
        assert asked.acquire(timeout=PATIENCE)
        owner.references.flush()
        assert reference.to_here() == 0
        with pytest.raises(PeerUnreachable, match="not in the directory yet"):
            owner.agent.identify(user.agent.me.identity)
        monkeypatch.setattr(owner.directory, "find", find)
        del reference
        wait_until(lambda: not owner.references.counts()["owners"])


def test_a_message_is_posted_once_although_posting_fails(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    table = worker.references
    references = [remote("w1", int) for _ in range(4)]
    for reference in references:
        reference.to_here()
    post = table._delivery.post
    posted: list[tuple[str, ControlMessage]] = []

    def post_but_once(to: str, message: ControlMessage) -> None:
        if len(posted) == 2 and fails.acquire(blocking=False):
            raise MemoryError
        posted.append((to, message))
        post(to, message)

    fails = threading.Semaphore(1)
    monkeypatch.setattr(table._delivery, "post", post_but_once)
    with table._lock:  # the handles end in the same turn of the thread
        references.clear()
        del reference
    wait_until(lambda: len({message for _, message in posted if message.kind == DROPPED}) == 4)
    assert not fails.acquire(blocking=False)
    assert len(posted) == len(set(posted))


def test_a_value_that_a_worker_makes_on_itself_needs_no_control_message(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, posted = worker.references, list[tuple[Any, ...]]()
    monkeypatch.setattr(table._machine, "_post", lambda *message: posted.append(message))
    reference = remote("w0", int)
    assert reference.to_here() == 0
    wait_until(lambda: not table._creations)
    assert posted == []
    del reference
    wait_until(lambda: not table.counts()["owners"])


def test_messages_are_kept_only_for_present_workers() -> None:
    with agents_here(3, dynamic=True) as (owner, other, leaver):
        for user in (other, leaver):
            current.enter(user)
            remote("w0", int).to_here()
        lines = owner.references._delivery._lines
        wait_until(lambda: len(lines) == 2)
        leaver.end("")
        wait_until(lambda: [key.partition("#")[0] for key in list(lines)] == ["w1"])


def test_the_text_of_a_reference_does_not_wait(worker: Worker) -> None:
    """This holds although `confirmed_by_owner` of a reference of the drop-in mode waits."""
    from telegrad.compat.rpc import references

    plain, gate = remote("w1", threading.Event), threading.Event()
    patient: RRef[Any] = references.RRef._of_handle(worker.references, plain._handle)

    def look() -> None:
        repr(patient)
        gate.set()

    thread = threading.Thread(target=look)
    plain._handle.id = ("w1#gone", 1)  # never confirmed
    thread.start()
    assert gate.wait(PATIENCE / 10)


def test_many_handles_end_in_groups(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    table, step, sizes = worker.references, worker.references._step, list[int]()
    monkeypatch.setattr(table, "_step", lambda ended: (sizes.__iadd__([len(ended)]), step(ended))[1])
    put = table.for_finalisers()
    for _ in range(2 * MOST_AT_ONCE + 1):
        put(("nobody#", 1))  # type: ignore[arg-type]
    table.flush()
    assert (sum(sizes), max(sizes) <= MOST_AT_ONCE) == (2 * MOST_AT_ONCE + 1, True)
