"""Tests of actors: the methods of one object run one after the other, in the order of each caller."""

import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import errors
from telegrad._core.worker.actors import _Queue
from telegrad.rpc import RRef, actor, functions, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, agents_here, group, next_turn, wait_until

pytestmark = pytest.mark.usefixtures("here")


@actor
class Log:
    """An actor that records its calls, and how many ran at once."""

    def __init__(self, gate: str | None = None) -> None:
        if gate is not None:
            assert gates[gate].wait(PATIENCE)
        self.seen: list[tuple[object, ...]] = []
        self.inside, self.most = 0, 0
        self.friend = None

    def note(self, *what: object) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.seen.append(what)
        self.inside -= 1
        return len(self.seen)

    def note_slowly(self, *what: object) -> None:
        """Record a call after a nested call, during which another thread may become the leader."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        rpc_sync("w0", abs, (-1,))
        self.seen.append(what)
        self.inside -= 1

    async def note_later(self, *what: object) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await next_turn()
        await rpc_async("w0", abs, (-1,))
        self.seen.append(what)
        self.inside -= 1

    def wait_for(self, gate: str) -> None:
        started.set()
        assert gates[gate].wait(PATIENCE)

    def fail(self) -> None:
        raise ArithmeticError("as asked")

    def all(self) -> tuple[int, list[tuple[Any, ...]]]:
        return self.most, list(self.seen)


class Heir(Log):
    """A subclass of an actor, which is an actor, too."""


class Plain:
    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> bool:
        return self.event.wait(PATIENCE)

    def set(self) -> None:
        self.event.set()


gates: dict[str, threading.Event] = {}
started = threading.Event()


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    gates[name] = threading.Event()
    started.clear()
    yield name
    gates[name].set()


def test_calls_run_in_the_order_in_which_they_were_made() -> None:
    log = remote("w1", Log)
    for number in range(200):
        log.rpc_async().note_slowly(number) if number % 3 else log.remote().note(number)
    most, seen = log.rpc_sync().all()
    assert (most, seen) == (1, [(number,) for number in range(200)])


def make_calls(log: RRef[Log], number: int, seed: int) -> None:
    """Make calls of all kinds, with arguments that are sent in different ways."""
    chance, calls = random.Random(seed + number), []
    for index in range(100):
        method = chance.choice(["note", "note_slowly", "note_later"])
        proxy = chance.choice([log.rpc_async, log.remote])()
        payload = torch.zeros(chance.choice([0, 1, 100, 10_000, 100_000]))
        calls.append(getattr(proxy, method)(number, index, len(payload), payload.sum(), chance.choice([1, Plain])))
    for each in calls:
        each.wait() if isinstance(each, torch.futures.Future) else each.to_here()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_the_order_holds_under_load_from_several_callers(transport: str) -> None:
    seed = int(os.environ.get("TELEGRAD_SEED") or random.randrange(1 << 30))
    print(f"SEED={seed}")
    with agents_here(4, transport=transport, num_worker_threads=4):
        log = remote("w1", Heir)
        for each in [rpc_async(f"w{number}", make_calls, (log, number, seed)) for number in range(4)]:
            each.wait()
        most, seen = log.rpc_sync().all()
    assert most == 1
    for number in range(4):  # the second of them is the owner itself
        assert [each[1] for each in seen if each[0] == number] == list(range(100))


def test_calls_that_wait_hold_no_thread_and_other_objects_go_on(gate: str) -> None:
    log, other, plain = remote("w1", Log), remote("w1", Log), remote("w1", Plain)
    log.rpc_sync().all()
    held = log.rpc_async().wait_for(gate)
    assert started.wait(PATIENCE)
    threads = threading.active_count()
    waiting = [log.rpc_async().note(number) for number in range(500)]
    assert other.rpc_sync(10).note("meanwhile") == 1
    plain.rpc_sync(10).set()
    assert rpc_sync("w1", abs, (-3,), timeout=10) == 3
    assert threading.active_count() < threads + 8
    assert not any(each.done() for each in waiting)
    gates[gate].set()
    held.wait()
    assert [each.wait() for each in waiting] == list(range(1, 501))


def test_calls_to_an_unfinished_actor_keep_their_order_and_hold_no_thread(gate: str) -> None:
    log = remote("w1", Log, (gate,))
    threads = threading.active_count()
    calls = [log.rpc_async().note(number) for number in range(100)]
    assert rpc_sync("w1", abs, (-3,), timeout=10) == 3
    assert threading.active_count() < threads + 8
    gates[gate].set()
    assert [each.wait() for each in calls] == list(range(1, 101))


def test_calls_to_an_actor_that_could_not_be_made_raise_its_error() -> None:
    broken = remote("w1", Log, ("no such gate",))
    for _ in range(3):
        with pytest.raises(KeyError, match="no such gate"):
            broken.rpc_async().note(1).wait()


def test_an_error_does_not_stop_the_queue() -> None:
    log = remote("w1", Log)
    calls = [log.rpc_async().fail() if number % 2 else log.rpc_async().note(number) for number in range(10)]
    for number, call in enumerate(calls):
        if number % 2:
            with pytest.raises(ArithmeticError, match="as asked"):
                call.wait()
        else:
            call.wait()
    with pytest.raises(AttributeError, match="nothing"):
        log.rpc_sync().nothing()  # type: ignore[attr-defined]
    assert log.rpc_sync().all()[1] == [(0,), (2,), (4,), (6,), (8,)]


def test_a_caller_does_not_wait_for_all_calls_of_another() -> None:
    queue: Any = _Queue(object())

    class Fake:
        def __init__(self, caller: str, number: int) -> None:
            self.caller = self
            self.identity, self.number = caller, number

    for caller, count in (("a", 5), ("b", 2), ("c", 1)):
        for number in range(count):
            queue.add(Fake(caller, number))
    order = [(each.identity, each.number) for each in iter(queue.next, None)]
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3), ("a", 4)]


@actor
class Asker:
    def __init__(self) -> None:
        self.value = 0

    def get(self) -> int:
        return self.value

    def keep(self, me: "RRef[Asker]", started: object = None) -> None:
        self.me = me

    def ask_myself(self) -> int:
        return self.me.rpc_sync().get()

    def ask_over(self, worker: str, way: str) -> int:
        return ask(worker, way, self.me)

    async def ask_later(self, worker: str) -> int:
        return await rpc_async(worker, passed_on, (self.me,))

    def wait_at_last(self, worker: str) -> int:
        future = rpc_async(worker, passed_on, (self.me,))
        reached.wait(PATIENCE)
        return future.wait()

    def leave_behind(self, worker: str) -> None:
        """Begin a call, and do not wait for it."""
        rpc_async(worker, add_one, (self.me,))

    def add(self) -> None:
        self.value += 1

    @functions.async_execution
    def soon(self) -> torch.futures.Future[int]:
        self.future: torch.futures.Future[int] = torch.futures.Future()
        return self.future

    def now(self, value: int) -> None:
        self.future.set_result(value)

    @functions.batch(max_size=3, max_wait=PATIENCE)
    async def doubled(self, values: list[int]) -> list[int]:
        return [2 * value for value in values]


reached = threading.Event()


def passed_on(asker: RRef[Asker]) -> int:
    reached.set()
    return asker.rpc_sync().get()


def add_one(asker: RRef[Asker]) -> None:
    asker.rpc_sync().add()


def ask(worker: str, way: str, asker: RRef[Asker]) -> int:
    if way == "sync":
        return rpc_sync(worker, passed_on, (asker,))
    if way == "twice":
        return rpc_sync(worker, rpc_sync, ("w3", passed_on, (asker,)))
    return rpc_async(worker, passed_on, (asker,)).wait()


def make_asker() -> RRef[Asker]:
    asker = remote("w1", Asker)
    asker.rpc_sync().keep(asker)
    return asker


DEADLOCK = r"waits for a call that calls Asker\.get of the same object"


@pytest.mark.parametrize("way", ["sync", "async", "twice"])
def test_a_call_that_would_wait_for_itself_is_refused(way: str) -> None:
    asker = make_asker()
    with pytest.raises(errors.UsageError, match=f"Asker.ask_over {DEADLOCK}"):
        asker.rpc_sync().ask_over("w2", way)
    with pytest.raises(errors.UsageError, match=f"Asker.ask_myself {DEADLOCK}"):
        asker.rpc_sync().ask_myself()
    with pytest.raises(errors.UsageError, match=f"Asker.ask_later {DEADLOCK}"):
        asker.rpc_async().ask_later("w2").wait()
    assert asker.rpc_sync().get() == 0


def test_waiting_for_a_call_that_already_called_back_is_refused() -> None:
    reached.clear()
    with pytest.raises(errors.UsageError, match=f"Asker.wait_at_last {DEADLOCK}"):
        make_asker().rpc_sync().wait_at_last("w2")


def test_a_call_back_of_a_call_without_a_wait_gets_its_turn() -> None:
    asker = make_asker()
    for _ in range(5):
        asker.rpc_sync().leave_behind("w2")
    wait_until(lambda: asker.rpc_sync().get() == 5)


def test_a_method_that_returns_a_future_lets_other_calls_run() -> None:
    asker = make_asker()
    soon = asker.rpc_async().soon()
    asker.rpc_sync().now(7)
    assert soon.wait() == 7
    assert [each.wait() for each in [asker.rpc_async().doubled(number) for number in range(3)]] == [0, 2, 4]


def test_two_references_to_one_object_share_its_turns(gate: str) -> None:
    first, second = rpc_sync("w1", two_references)
    held = first.rpc_async().wait_for(gate)
    assert started.wait(PATIENCE)
    call = second.rpc_async().note(1)
    assert rpc_sync("w1", abs, (-3,), timeout=10) == 3
    assert not call.done()
    gates[gate].set()
    held.wait()
    assert call.wait() == 1


def two_references() -> tuple[RRef[Log], RRef[Log]]:
    log = Log()
    return RRef(log), RRef(log)


def test_only_classes_can_be_actors() -> None:
    with pytest.raises(errors.UsageError, match="marks a class"):
        actor(two_references)  # type: ignore[type-var]
    with pytest.raises(errors.UsageError, match="list cannot be changed"):
        actor(list)


def drive(worker: str) -> list[int]:
    """Call an actor on another process, which gets its class by value."""

    class Counter:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def note(self, number: int) -> None:
            self.seen.append(number)

        def all(self) -> list[int]:
            return self.seen

    import telegrad.rpc as rpc

    counter = rpc.remote(worker, rpc.actor(Counter))
    for number in range(300):
        counter.rpc_async().note(number)
    return counter.rpc_sync().all()


def test_an_actor_class_sent_by_value_keeps_the_order_of_calls() -> None:
    with group(2) as processes:
        assert processes[0].run(drive, "worker1") == list(range(300))
