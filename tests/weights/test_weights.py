"""Publishers and subscribers of real workers: in this process, on one host, or on several simulated hosts."""

import contextlib
import gc
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import telegrad.rpc as rpc
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, InvalidArgument, PublisherLost, ShutDown, UnknownPublisher, UsageError
from telegrad.weights import Publisher, ShardedPublisher, Subscriber, Version
from telegrad.weights import publisher as publishing
from telegrad.weights.protocols import WINDOW, SubscriberProtocol
from telegrad.weights.subscriber import SubscriberEndpoint
from telegrad.weights.transfer import (
    Available,
    EndpointAddress,
    FetchFrom,
    PieceRequest,
    VersionInfo,
    VersionOpened,
    WeightPiece,
)
from telegrad.weights.tree_layout import Layout, Snapshots
from telegrad.weights.weight_service import WeightsService
from tests.cluster import PATIENCE, agents, in_threads, wait_until
from tests.rpc.test_publishing import Crowd
from tests.weights.trees import assert_equal


@contextlib.contextmanager
def speaking_for(worker: Worker) -> Iterator[None]:
    before = current._here.own
    current.enter(worker)
    try:
        yield
    finally:
        current.enter(before)


def on(worker: Worker, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with speaking_for(worker):
        return act(*args, **kwargs)


@contextlib.contextmanager
def on_hosts(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> Iterator[list[Worker]]:
    """Make a worker on each simulated host; they connect over TCP only."""
    here = threading.local()

    def of_rank(rank: int) -> dict[str, Any]:
        here.host = f"host {hosts[rank]}"  # each worker starts on a thread of its own
        return {}

    monkeypatch.setattr("telegrad._core.rpc.cluster.host_identity", lambda: here.host)
    monkeypatch.setattr(publishing, "PIECE", 1000)
    with agents(len(hosts), of_rank=of_rank) as workers:
        yield workers


def state(number: int, size: int = 5000) -> dict[str, Any]:
    return {"weight": torch.full((size,), float(number)), "bias": torch.full((7,), number), "step": number}


def numbered(size: int = 5000) -> Callable[[], dict[str, Any]]:
    """Return a source whose next state has the next number."""
    return map(partial(state, size=size), itertools.count(1)).__next__


def number_in(version: Version) -> int:
    found = {*version.state["weight"].tolist(), *version.state["bias"].tolist(), version.state["step"]}
    assert len(found) == 1, f"torn: {found}"
    return int(found.pop())


# Versions


def test_a_reader_gets_what_was_published() -> None:
    with agents(2) as (learner, actor):
        model = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100))
        policy = on(learner, Publisher, "policy", model)
        reader = on(actor, Subscriber, "w0", "policy")
        assert policy.publish() == 1
        version = reader.newest()
        assert version.number == reader.version == 1
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert list(version.state) == list(before)
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[operator]
        for name, value in before.items():
            assert torch.equal(version.state[name], value)
        twin = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100))
        reader.load_into(twin)
        torch.testing.assert_close(twin.state_dict(), before)
        wait_until(lambda: policy.subscribers == {"w1": 1})


def test_the_default_device_does_not_matter() -> None:
    with agents(2) as (learner, actor), torch.device("meta"):
        weights = {"weight": torch.ones(1000, device="cpu")}
        policy = on(learner, Publisher, "policy", weights)
        policy.publish()
        torch.testing.assert_close(on(actor, Subscriber, "w0", "policy").newest().state, weights)


def test_nothing_is_published_or_read_after_shutdown() -> None:
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        readers = [on(learner, Subscriber, "w0", "p"), on(actor, Subscriber, "w0", "p")]
        publisher.publish()
        last = [reader.newest() for reader in readers]
        parts = on(learner, ShardedPublisher, "parts", {"w0": partial(state, 1), "w1": partial(state, 1)})
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(publisher.publish, wait=0)
            wait_until(lambda: publisher.version == 2)
            for worker in (actor, learner):
                worker.agent.close()
            with pytest.raises(ShutDown, match="worker 'w0' shut down"):
                waiting.result(PATIENCE)
        acts = [publisher.publish, partial(publisher.publish, 1), parts.publish]
        for reader in readers:
            acts += [reader.newest, reader.refresh, partial(reader.at_least, 1), partial(reader.at_least, 9)]
            acts += [partial(next, iter(reader))]
        for act in acts:
            with pytest.raises(ShutDown, match="shut down: calls and references of its group cannot be used after"):
                act()
        assert [reader.version for reader in readers] == [number_in(each) for each in last] == [1, 1]


def test_newest_at_least_and_refresh() -> None:
    with agents(2) as (learner, actor):
        current_state = state(0)
        publisher = on(learner, Publisher, "p", lambda: current_state)
        reader = on(actor, Subscriber, "w0", "p")
        with pytest.raises(CallTimeout, match="version 1 of 'p' on worker 'w0' did not arrive within"):
            reader.newest(timeout=0.1)
        for number in range(1, 5):
            current_state = state(number)
            assert publisher.publish() == number
            assert on(learner, rpc.rpc_sync, "w1", int) == 0  # after a call, the earlier versions are known
            bound = number % 3
            assert number_in(reader.refresh(max_behind=bound)) >= number - bound
            assert reader.behind <= bound
        assert number_in(reader.refresh()) == 4
        assert reader.newest() is reader.refresh() is reader.at_least(2)
        with pytest.raises(CallTimeout, match="the newest known version is 4, the last one read 4"):
            reader.at_least(5, timeout=0.05)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(on, actor, reader.at_least, 6)
            current_state = state(5)
            publisher.publish()
            current_state = state(6)
            publisher.publish()
            assert number_in(waiting.result(PATIENCE)) == 6


@pytest.mark.parametrize("at", [0, 1])
def test_a_version_that_precedes_a_call_is_known_despite_slow_threads(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    hear = SubscriberEndpoint.take

    def late(*args: Any) -> None:
        time.sleep(0.05)
        hear(*args)

    with agents(2) as workers:
        learner, actor = workers[0], workers[at]
        publisher = on(learner, Publisher, "p", numbered())
        reader = on(actor, Subscriber, "w0", "p")
        publisher.publish()
        reader.newest()
        monkeypatch.setattr(SubscriberEndpoint, "take", late)
        for number in range(2, 5):
            publisher.publish()
            assert on(learner, rpc.rpc_sync, f"w{at}", int) == 0
            assert on(actor, getattr, reader, "behind") == 1
            assert number_in(reader.refresh()) == number


def test_refresh_waits_for_pending_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr("telegrad.weights.weight_service.TICK", 0.1)
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "numbers", {"number": torch.zeros(1)})
        publisher.publish()
        reader = on(actor, Subscriber, "w0", "numbers")
        on(actor, reader.newest)
        server = actor.agent._server
        handle = server.handlers.take

        def late(*args: Any) -> None:
            assert held.wait(PATIENCE)
            handle(*args)

        server.handlers.take = late  # type: ignore[assignment]
        publisher.publish()
        wait_until(lambda: bool(server._notices))
        with pytest.raises(CallTimeout, match=r"newest version of 'numbers' was not known within 0\.15 s"):
            on(actor, reader.refresh, timeout=0.15)
        held.set()
        assert on(actor, reader.refresh).number == 2


def test_refresh_takes_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for pending messages counts."""
    late = 0.0

    def now() -> float:
        return time.monotonic() + late

    def handle_slowly(_: float) -> bool:
        nonlocal late
        late += 9.95
        return True

    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        reader = on(actor, Subscriber, "w0", "p")
        for module in ("subscriber", "weight_service"):
            monkeypatch.setattr(f"telegrad.weights.{module}.monotonic", now)
        monkeypatch.setattr(actor.agent, "handle_notices", handle_slowly)
        begun = now()
        with pytest.raises(CallTimeout, match="version 1 of 'p' on worker 'w0' did not arrive"):
            reader.refresh(timeout=10)
        assert now() - begun < 15
        monkeypatch.undo()
        monkeypatch.setattr("telegrad.weights.subscriber.monotonic", itertools.count(0, 1e-5).__next__)
        with pytest.raises(CallTimeout, match=r"did not arrive within 0\.1 s"):
            reader.refresh(timeout=0.1)
        publisher.close()


def test_two_threads_may_publish_trees_of_different_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    arrange, mine, begun, over = Snapshots._arrange, threading.local(), threading.Event(), threading.Event()

    def arrange_slowly(layouts: Snapshots, tree: Any, *args: Any) -> Any:
        found = arrange(layouts, tree, *args)
        if len(tree) == 1:
            begun.set()
            over.wait(0.5)  # without a lock, the other thread would publish now
        return found

    def publish_first() -> int:
        mine.tree = {"a": torch.ones(3)}
        return on(worker, publisher.publish)

    def publish_second() -> int:
        mine.tree = {"b": torch.ones(2, 2), "c": torch.ones(5)}
        assert begun.wait(PATIENCE)
        number = on(worker, publisher.publish)
        over.set()
        return number

    monkeypatch.setattr(Snapshots, "_arrange", arrange_slowly)
    with agents(1) as (worker,), speaking_for(worker):
        publisher = Publisher("numbers", lambda: mine.tree)
        assert in_threads(publish_first, publish_second) == [1, 2]
        assert_equal(Subscriber("w0", "numbers").newest().state, {"b": torch.ones(2, 2), "c": torch.ones(5)})


def test_iterating_gives_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions arrive in order, none is left out within the bound, and other readers do not wait."""
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", numbered(), keep=4)
        reader = on(actor, Subscriber, "w0", "p")
        publisher.publish()
        reader.newest()
        versions = on(actor, iter, reader)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(on, actor, next, versions)
            wait_until(lambda: sum(each.every for each in [*publisher._endpoint.machine.taken.values()]) == 1)
            for _ in range(4):
                publisher.publish()
            assert number_in(first.result(PATIENCE)) == 2
            assert [number_in(on(actor, next, versions)) for _ in range(3)] == [3, 4, 5]
            for _ in range(10):
                publisher.publish()
            assert len(publisher.versions) == 4
            assert [number_in(on(actor, next, versions)) for _ in range(4)] == [12, 13, 14, 15]
            last = pool.submit(on, actor, next, versions, "the end")
            publisher.close()
            assert last.result(PATIENCE) == "the end"


def test_a_publisher_waits_for_a_slow_reader_only_if_asked_to() -> None:
    with agents(3) as (learner, actor, slow):
        publisher = on(learner, Publisher, "p", numbered())
        reader, sleeper = (on(worker, Subscriber, "w0", "p") for worker in (actor, slow))
        publisher.publish()
        old = sleeper.newest()
        for number in range(2, 30):
            publisher.publish()
            assert number_in(reader.at_least(number)) == number
            assert publisher.versions == [number]
        assert number_in(old) == 1
        with pytest.raises(CallTimeout, match=r"version 30 of 'p' was not received within 0.1 s by .*w2"):
            publisher.publish(wait=0.1)
        with ThreadPoolExecutor(2) as pool:
            taken = [pool.submit(on, worker, each.at_least, 31) for worker, each in ((actor, reader), (slow, sleeper))]
            assert publisher.publish(wait=PATIENCE) == 31
            assert [number_in(each.result(PATIENCE)) for each in taken] == [31, 31]


def test_memory_of_old_versions_is_reused() -> None:
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", numbered(500_000))
        reader = on(actor, Subscriber, "w0", "p")
        for number in range(1, 20):
            publisher.publish()
            assert reader.at_least(number).number == number
        assert sum(learner.agent.memory._bytes.values()) <= 4 * 2_500_000
        reader.close()
        publisher.close()
        del reader, publisher
        gc.collect()
        wait_until(lambda: not _lent(learner))


def _lent(worker: Worker) -> int:
    connections = worker.agent._connections
    connections.tick(time.monotonic())
    pool = connections.memory
    with pool._lock:
        pool._collect()
        return pool.lent + len(pool._common)


def test_swapped_weights_are_in_place_and_private() -> None:
    with agents(3) as (learner, actor, other):
        model, twin = nn.Linear(400, 300), nn.Linear(400, 300)
        publisher = on(learner, Publisher, "p", model)
        readers = [on(worker, Subscriber, "w0", "p") for worker in (actor, other)]
        publisher.publish()
        mine, theirs = (reader.newest() for reader in readers)
        parameters = [*twin.parameters()]
        mine.swap_into(twin)
        assert [*twin.parameters()] == parameters
        assert twin.weight.data_ptr() == mine.state["weight"].data_ptr()
        torch.testing.assert_close(twin.state_dict(), model.state_dict())
        with torch.no_grad():
            twin.weight.fill_(7)
        torch.testing.assert_close(theirs.state["weight"], model.state_dict()["weight"])


def test_writes_to_a_lent_version_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the second reader of a host, too, which is the source once the first has left."""
    with on_hosts(monkeypatch, "A", "B", "B", "B") as (learner, *others):
        publisher = on(learner, Publisher, "p", {"weight": torch.zeros(1, 50_000)})
        model = nn.Linear(50_000, 1, bias=False)
        readers = []
        for worker in others[:2]:
            readers.append(on(worker, Subscriber, "w0", "p"))
            wait_until(lambda: len(publisher.subscribers) == len(readers))
        publisher.publish()
        readers[0].at_least(1)
        readers[1].at_least(1).swap_into(model)
        with torch.no_grad():
            model.weight.fill_(7)
        readers[0].close()
        wait_until(lambda: len(publisher.subscribers) == 1)
        late = on(others[2], Subscriber, "w0", "p")
        assert late.newest().state["weight"].max() == 0
        assert readers[1].newest().state["weight"].min() == 7  # its own write
        publisher.publish()
        assert readers[1].at_least(2).state["weight"].max() == late.at_least(2).state["weight"].max() == 0


# Mistakes


def test_messages_of_mistakes() -> None:
    with agents(2) as (learner, actor):
        model = nn.Linear(3, 2)
        publisher = on(learner, Publisher, "policy", model)
        with pytest.raises(UnknownPublisher, match=r"w0' has no publisher 'polcy'.*its publishers are 'policy'"):
            on(actor, Subscriber, "w0", "polcy", timeout=0.1)
        endless: list[Any] = [torch.ones(1)]
        endless.append(endless)
        with pytest.raises(InvalidArgument, match="contains itself"):
            on(learner, Publisher, "endless", {"a": endless}).publish()
        reader = on(actor, Subscriber, "w0", "policy")
        publisher.publish()
        with pytest.raises(
            InvalidArgument, match=r"not in it: more; only in it: bias; of another shape in it: weight \(\(4, 3"
        ):
            reader.newest().load_into({"weight": torch.rand(4, 3), "more": torch.rand(3)})
        with pytest.raises(InvalidArgument, match="other types: weight, bias"):
            reader.swap_into(nn.Linear(3, 2).double())
        reader.load_into(nn.Linear(3, 2).double())
        publisher.close()
        publisher.close()
        with pytest.raises(PublisherLost, match="version 1 can still be read"):
            reader.at_least(2)
        assert reader.newest().number == 1
        with pytest.raises(PublisherLost):
            reader.refresh()
        reader.close()
        with pytest.raises(UsageError, match="was closed"):
            reader.at_least(2)


def test_a_subscriber_may_start_before_its_publisher() -> None:
    with agents(2) as (learner, actor), ThreadPoolExecutor(1) as pool:
        early = pool.submit(on, actor, Subscriber, "w0", "late")
        wait_until(lambda: learner.attached(WeightsService).changed._waiters)  # type: ignore[attr-defined]
        publisher = on(learner, Publisher, "late", state(1))
        publisher.publish()
        assert number_in(early.result(PATIENCE).newest()) == 1


def test_readers_of_a_lost_publisher_get_an_error() -> None:
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        reader = on(actor, Subscriber, "w0", "p")
        publisher.publish()
        reader.newest()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(on, actor, reader.at_least, 2)
            wait_until(lambda: bool(reader._endpoint.machine.waits))
            learner.end("")
            with pytest.raises(
                PublisherLost, match=r"'p' on worker 'w0' is no longer available .*; version 1 can still be read"
            ):
                waiting.result(PATIENCE)
        assert number_in(reader.newest()) == 1


def assert_ended(reader: Subscriber, run: Callable[[Callable[[], Version]], object]) -> None:
    for read in (reader.newest, reader.refresh, partial(reader.at_least, 2)):
        with pytest.raises(PublisherLost, match=r"another one has its name\); create a new Subscriber"):
            run(read)


def test_targets_are_checked_before_the_wait_for_a_version() -> None:
    with agents(1) as (here,):
        publisher = on(here, Publisher, "p", state(1))
        reader = on(here, Subscriber, "w0", "p")
        for load in (reader.load_into, reader.swap_into):
            with pytest.raises(InvalidArgument, match="module"):
                load(3)
        publisher.close()


def test_a_reader_ends_once_another_publisher_has_the_name() -> None:
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        reader = on(actor, Subscriber, "w0", "p")
        publisher.publish()
        reader.newest()
        publisher.close()
        wait_until(lambda: reader._endpoint.over)
        assert reader.newest().number == 1
        successor = on(learner, Publisher, "p", state(2))
        successor.publish()
        assert_ended(reader, lambda read: read())
        assert number_in(on(actor, Subscriber, "w0", "p").newest()) == 2


def test_a_subscriber_that_joins_while_the_publisher_closes_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    update = publishing.PublisherEndpoint.update

    def closed_before(endpoint: publishing.PublisherEndpoint, act: Callable[[], Any]) -> None:
        if act != endpoint.machine.on_tick:  # the subscriber joins
            monkeypatch.setattr(publishing.PublisherEndpoint, "update", update)
            publisher.close()
        update(endpoint, act)

    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        monkeypatch.setattr(publishing.PublisherEndpoint, "update", closed_before)
        reader = on(actor, Subscriber, "w0", "p")
        with pytest.raises(PublisherLost, match="it was closed"):
            reader.newest(timeout=5)
        successor = on(learner, Publisher, "p", state(2))
        with pytest.raises(PublisherLost, match="another one has its name"):
            reader.newest()
        successor.close()


def test_a_reader_ends_once_the_worker_of_its_publisher_was_started_again(crowd: Crowd) -> None:
    publisher = crowd.on("w1", Publisher, "p", state(1))
    publisher.publish()
    reader = crowd.on("w0", Subscriber, "w1", "p")
    reader.newest()
    crowd.lose("w1")
    wait_until(lambda: bool(reader._endpoint._trouble))
    assert reader.newest().number == 1
    crowd.add("w1", 1)
    crowd.on("w0", rpc.wait_for_workers, ["w1"], PATIENCE)
    assert_ended(reader, partial(crowd.on, "w0"))


@pytest.mark.parametrize("name", ["call", "call_async"])  # to join first, and again
def test_a_loss_is_noticed_before_the_answer_to_a_join(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (learner, actor):
        publisher = on(learner, Publisher, "p", state(1))
        readers = [on(actor, Subscriber, "w0", "p")]
        ask = getattr(actor.agent, name)
        monkeypatch.setattr(SubscriberEndpoint, "take", lambda *_: None)  # the answers arrive before messages

        def lose_after(*args: Any) -> Any:
            answer, lost = ask(*args), PublisherLost("it ended")
            monkeypatch.setattr(actor.agent, "call_async", Mock(side_effect=lost))
            actor.attached(WeightsService)._lost(learner.me.identity, lost)
            return answer

        monkeypatch.setattr(actor.agent, name, lose_after)
        readers[0]._endpoint.join() if name == "call_async" else readers.append(on(actor, Subscriber, "w0", "p"))
        with pytest.raises(PublisherLost, match="it ended"):
            readers[-1].at_least(1, timeout=5)
        publisher.close()


def test_a_reader_waits_for_the_worker_of_its_publisher(crowd: Crowd) -> None:
    def subscribe() -> Subscriber:
        current.agent().settings = current.agent().settings._replace(wait_for_worker=True)
        return Subscriber("late", "p", PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(crowd.on, "w0", subscribe)
        crowd.add("late")
        publisher = crowd.on("late", Publisher, "p", state(3))
        publisher.publish()
        assert number_in(waiting.result(PATIENCE).newest()) == 3


def test_threads_may_read_versions_of_different_layouts() -> None:
    class Interrupted(Layout):
        """Another thread needs another layout while the number of this one is read."""

        @property
        def number(self) -> int:
            endpoint._layout = other
            return one.number

        @number.setter
        def number(self, number: int) -> None: ...

    with agents(1) as (here,):
        publisher = on(here, Publisher, "p", state(1))
        endpoint = on(here, Subscriber, "w0", "p")._endpoint
        one, other = (Snapshots(None).of(tree).layout for tree in ({"a": torch.ones(2)}, {"b": torch.ones(3)}))
        endpoint._layout = mine = Interrupted(one.number, one.description)
        assert endpoint._layout_of(VersionInfo(one.number, one.description, one.size, 1)) is mine
        publisher.close()


def test_an_older_version_does_not_replace_a_newer_one_as_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    layout_of = SubscriberEndpoint._layout_of

    def interrupted(endpoint: SubscriberEndpoint, info: VersionInfo) -> Layout:
        """Another thread reads a newer version while this one is made."""
        monkeypatch.undo()
        publisher.publish()
        assert reader.at_least(2).number == 2
        return layout_of(endpoint, info)

    with agents(1) as (worker,), speaking_for(worker):
        publisher = Publisher("p", numbered())
        publisher.publish()
        reader = Subscriber("w0", "p")
        monkeypatch.setattr(SubscriberEndpoint, "_layout_of", interrupted)
        assert (reader.newest().number, reader.version) == (1, 2)
        publisher.close()


# Hosts


def test_a_piece_of_many_costs_no_more_than_one_of_few() -> None:
    """A list of all missing pieces would show in the memory that is used while a piece arrives."""

    def used(pieces: int) -> int:
        machine = SubscriberProtocol(source)
        machine.receive(source, FetchFrom(1, source, False))
        machine.receive(source, Available(1, 1))
        machine.receive(source, VersionOpened(1, VersionInfo(1, b"layout", pieces, 1), False))
        most = 0
        for piece in range(10):
            arrived = WeightPiece(1, piece)
            tracemalloc.start()
            assert machine.expects(arrived)
            assert [request.piece for _, request in machine.receive(source, arrived)] == [piece + WINDOW]
            most = max(most, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        return most

    source = EndpointAddress("w0", "w0", -1)
    assert used(20_000) < used(100) + 10_000


def test_hosts_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts(monkeypatch, "A", "A", "B", "B", "C", "C") as workers:
        publisher = on(workers[0], Publisher, "p", numbered())
        readers = [on(worker, Subscriber, "w0", "p") for worker in workers[1:]]
        for number in range(1, 10):
            publisher.publish()
            assert [number_in(reader.at_least(number)) for reader in readers] == [number] * 5
        wait_until(lambda: publisher.versions == [9])
        assert len([reader for reader in readers if not reader._endpoint.machine.whole]) == 2
        assert len({reader._endpoint.machine.source.worker for reader in readers}) == 3


def test_the_first_of_a_host_leaves_or_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_hosts(monkeypatch, "A", "B", "B", "B", "C", "C") as workers:
        publisher = on(workers[0], Publisher, "p", numbered(50_000))
        readers = []
        for worker in workers[1:]:
            readers.append(on(worker, Subscriber, "w0", "p"))
            wait_until(lambda: len(publisher.subscribers) == len(readers))
        publisher.publish()
        assert all(number_in(reader.at_least(1)) == 1 for reader in readers)
        for leave in (readers[0].close, workers[2].end):
            publisher.publish()
            leave(*([""] if leave == workers[2].end else []))
            readers.pop(0)
            publisher.publish()
            number = publisher.version
            assert [number_in(reader.at_least(number)) for reader in readers] == [number] * len(readers)
        late = on(workers[1], Subscriber, "w0", "p")
        assert number_in(late.newest()) == publisher.version
        wait_until(lambda: publisher.versions == [publisher.version])


def test_a_request_to_a_closing_subscriber_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The subscriber's memory is freed, and the reader that asked gets another source."""
    hear = SubscriberEndpoint.take

    def late(endpoint: SubscriberEndpoint, sender: EndpointAddress, message: Any, tensors: Any) -> None:
        if isinstance(message, PieceRequest) and sender.worker == "w2" and endpoint._service.agent.name == "w1":
            on(workers[1], readers[0].close)
        hear(endpoint, sender, message, tensors)

    with on_hosts(monkeypatch, "A", "B", "C") as workers:
        publisher = on(workers[0], Publisher, "p", numbered(50_000))
        readers = [on(worker, Subscriber, "w0", "p") for worker in workers[1:]]
        wait_until(lambda: len(publisher.subscribers) == 2)
        publisher.publish()
        assert [number_in(reader.at_least(1)) for reader in readers] == [1, 1]
        monkeypatch.setattr(SubscriberEndpoint, "take", late)
        publisher.publish()
        assert number_in(readers[1].at_least(2)) == 2
        wait_until(lambda: len(publisher.subscribers) == 1)
    assert not caplog.records
