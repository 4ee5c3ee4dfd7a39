"""Tests of named and restorable values: one owner, standbys, lookups, and references that follow the value."""

import contextlib
import operator
import pathlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.rpc.cluster import start
from telegrad._core.rpc.restorable import ensure_present
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores import find_directory
from telegrad._core.stores.directory_client import EmbeddedDirectory
from telegrad._core.stores.find_directory import Pointer
from telegrad._core.stores.stores import open_store
from telegrad._core.threads import run_in_thread
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.publishing import registration
from telegrad.publishing.published import Publications
from tests.cluster import KEYS, PATIENCE, agents, in_background, in_threads, takes_less_than, wait_until
from tests.directory.engines import Middleman
from tests.rpc import members


class Crowd:
    """A dynamic group in this process, whose workers come and go."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.url = f"file://{folder}/store"
        self.workers: dict[str, Worker] = {}

    def add(self, name: str, rank: int = -1, **options: Any) -> Worker:
        own = TelegradOptions(**{"rpc_timeout": PATIENCE, **options})
        made = self.workers[name] = start(name, partial(open_store, self.url, rank, None, KEYS), own, current.enter)
        return made

    def lose(self, name: str) -> None:
        """End a worker, and wait until all others have noticed; calls that begin earlier fail."""
        self.workers.pop(name).end("")
        for other in self.workers.values():
            with contextlib.suppress(errors.UnknownWorker):
                while True:
                    with contextlib.suppress(errors.PeerError):
                        other.agent.call(name, operator.add, (1, 1), None)

    def on(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        return on(self.workers[name], function, *args)


def on(worker: Worker, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on a thread of that worker; return its result."""

    def run() -> Any:
        current.enter(worker)
        return function(*args)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(PATIENCE)


class Counter(members.Counter):
    def where(self) -> str:
        return current.agent().name

    def numbers(self) -> Iterator[int]:
        yield self.count

    def fail(self, error: Exception) -> None:
        self.count += 1
        raise error


kept: list[Any] = []


def keep(reference: rpc.RRef[Any]) -> None:
    kept.append(reference)


def where(reference: rpc.RRef[Counter]) -> str:
    return reference.rpc_sync().where()


def test_a_standby_takes_over_and_references_follow(crowd: Crowd) -> None:
    crowd.on("w1", rpc.publish, "counter", partial(Counter, 10))
    crowd.on("w2", rpc.publish, "counter", partial(Counter, 20))
    found = crowd.on("w0", rpc.lookup, "counter")
    assert crowd.on("w0", where, found) == "w1"
    crowd.lose("w1")
    assert crowd.on("w0", where, found) == "w2"
    assert crowd.on("w0", lambda: found.rpc_sync().add(1)) == 21
    assert found.owner_name() == "w2"


begun, gate = threading.Event(), threading.Event()


def hold() -> None:
    begun.set()
    gate.wait(PATIENCE)


def test_a_worker_that_leaves_with_the_owner_does_not_make_the_value(crowd: Crowd) -> None:
    """The group ends: w2 is held up by a call, and notices that w1, the owner, has left."""
    made: list[str] = []

    def make(name: str) -> Counter:
        made.append(name)
        return Counter()

    crowd.add("w3")
    for name in ("w1", "w2"):
        crowd.on(name, rpc.publish, "counter", partial(make, name))
    with ThreadPoolExecutor(3) as pool:
        held = pool.submit(crowd.on, "w3", rpc.rpc_sync, "w2", hold)
        assert begun.wait(PATIENCE)
        served = [pool.submit(crowd.workers[name].serve, ()) for name in ("w1", "w2")]
        wait_until(lambda: all(crowd.workers[name].membership.serving._only_serves for name in ("w1", "w2")))
        crowd.workers.pop("w0").shutdown(True, 0)
        served[0].result(PATIENCE)
        claims = crowd.workers["w2"].directory.claims
        wait_until(lambda: not claims["counter"].life)
        assert crowd.workers["w3"].agent.call("w2", len, ("later",), None) == len("later")
        gate.set()
        held.result(PATIENCE)
        served[1].result(PATIENCE)
    assert made == ["w1"]
    for name in ("w1", "w2"):
        del crowd.workers[name]


@contextlib.contextmanager
def ended(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End "w1", while for a moment neither the directory nor the table of references tells "w0" of the loss."""
    worker, gone = crowd.workers["w0"], crowd.workers.pop("w1")
    worker.directory._applying.acquire()
    later = threading.Timer(0.2, worker.directory._applying.release)
    monkeypatch.setattr(worker.references, "reach", lambda handle: handle.owner)
    gone.end("")
    wait_until(lambda: not worker.agent.is_connected(gone.me.identity))
    later.start()
    yield
    later.join()


USES: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda ref: ref.rpc_sync().add(1),
    "rpc_async": lambda ref: ref.rpc_async().add(1).wait(),
    "remote": lambda ref: ref.remote().add(1).to_here(),
    "to_here": lambda ref: ref.to_here().count + 1,
    "rpc_stream": lambda ref: sum(ref.rpc_stream().numbers()) + 1,
    "sent": lambda ref: rpc.rpc_sync("w2", add_there, (ref,)),
}


def add_there(reference: rpc.RRef[Counter]) -> int:
    return reference.rpc_sync().add(1)


@pytest.mark.parametrize(("use", "was_sent"), [*((use, True) for use in USES), ("rpc_sync", False), ("to_here", False)])
def test_a_use_finds_the_new_owner_before_the_loss_is_reported(
    crowd: Crowd, use: str, was_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `was_sent`, the connection breaks between the check of it and the call."""
    crowd.on("w1", rpc.publish, "counter", partial(Counter, 10))
    crowd.on("w2", rpc.publish, "counter", partial(Counter, 20))
    found = crowd.on("w0", rpc.lookup, "counter")
    assert crowd.on("w0", where, found) == "w1"
    with ended(crowd, monkeypatch):
        if not was_sent:
            monkeypatch.setattr(crowd.workers["w0"].agent, "is_connected", lambda _: True)
        assert crowd.on("w0", USES[use], found) == 21
    assert found.owner_name() == "w2"


@pytest.mark.parametrize("kind", [errors.PeerUnreachable, errors.UnknownWorker, errors.ClaimLost])
def test_a_method_is_not_called_again_after_a_telegrad_error(crowd: Crowd, kind: type[errors.TelegradError]) -> None:
    crowd.on("w1", rpc.publish, "counter", Counter)
    found = crowd.on("w0", rpc.lookup, "counter")
    error = kind("of a worker that it has called")
    if isinstance(error, errors.ClaimLost):
        error.claim = tuple(found._strategy)
    with pytest.raises(kind, match="that it has called"):
        crowd.on("w0", lambda: found.rpc_sync().fail(error))
    assert crowd.on("w0", lambda: found.rpc_sync().add(0)) == 1


def test_an_owner_that_has_left_raises_claim_lost(crowd: Crowd) -> None:
    crowd.on("w1", rpc.publish, "counter", Counter)
    worker = crowd.workers["w1"]
    owned = worker.attached(Publications)._offers["counter"].owned
    assert owned is not None
    crowd.on("w1", owned.check)
    worker.directory.leave()
    with pytest.raises(errors.ClaimLost, match="the value 'counter': this worker has left the group"):
        crowd.on("w1", owned.check)


def test_an_owner_that_comes_back_owns_the_value_again(crowd: Crowd) -> None:
    crowd.on("w1", rpc.publish, "counter", Counter)
    found = crowd.on("w0", rpc.lookup, "counter")
    assert crowd.on("w0", lambda: found.rpc_sync().add(5)) == 5
    crowd.lose("w1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(crowd.on, "w0", lambda: found.rpc_sync().add(1))  # while no worker owns it
        crowd.add("w1")
        crowd.on("w1", rpc.publish, "counter", partial(Counter, 100))
        assert waiting.result(PATIENCE) == 101


def test_a_reference_that_was_sent_on_follows_too(crowd: Crowd) -> None:
    crowd.on("w1", rpc.publish, "counter", Counter)
    crowd.on("w0", lambda: rpc.rpc_sync("w2", keep, (rpc.lookup("counter"),)))  # w2 is in this process
    crowd.lose("w1")
    crowd.on("w0", rpc.publish, "counter", partial(Counter, 7))
    assert crowd.on("w2", lambda: kept[0].rpc_sync().add(1)) == 8
    kept.clear()


def test_greeting_a_worker_that_has_left_does_not_fail(crowd: Crowd) -> None:
    membership = crowd.workers["w0"].membership
    others = membership._others()
    crowd.lose("w1")
    with takes_less_than(5):  # nothing waits for it
        membership._greet(others)


def test_the_lookup_of_a_value_that_is_not_published_fails(crowd: Crowd) -> None:
    with pytest.raises(
        errors.NotPublished, match=r"'nothing' is not available after 0.2 s: no worker publishes it.*w0, w1"
    ):
        crowd.on("w0", rpc.lookup, "nothing", 0.2)


def test_a_lookup_waits_for_the_value(crowd: Crowd) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(crowd.on, "w0", rpc.lookup, "late")
        crowd.on("w2", rpc.publish, "late", Counter)
        assert crowd.on("w0", where, waiting.result(PATIENCE)) == "w2"


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
def test_a_failing_factory_raises_at_publish_and_another_worker_owns(crowd: Crowd, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("no value today")

    with pytest.raises(error, match="no value today"):
        crowd.on("w1", rpc.publish, "counter", fail)
    crowd.on("w1", rpc.publish, "counter", Counter)
    crowd.on("w2", rpc.publish, "counter", fail)  # stands by
    crowd.lose("w1")
    crowd.on("w0", rpc.publish, "counter", Counter)
    wait_until(lambda: crowd.on("w0", lambda: where(rpc.lookup("counter"))) == "w0")


def test_a_lookup_makes_a_standby_claim_a_value_without_an_owner(crowd: Crowd) -> None:
    begun, fails = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert fails.wait(PATIENCE)
        raise ArithmeticError("no value today")

    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(crowd.on, "w1", rpc.publish, "counter", fail)
        assert begun.wait(PATIENCE)
        crowd.on("w2", rpc.publish, "counter", Counter)  # stands by: w1 has claimed it
        fails.set()
        with pytest.raises(ArithmeticError):
            failing.result(PATIENCE)
    assert crowd.on("w0", lambda: where(rpc.lookup("counter"))) == "w2"


@pytest.fixture
def middlemen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Middleman]]:
    """Return the proxies on the path to the directory, one for each of its clients."""
    made: list[Middleman] = []

    def connect(pointer: Pointer, keys: Keyring, patience: float = PATIENCE) -> EmbeddedDirectory:
        made.append(Middleman(pointer.address))
        return EmbeddedDirectory(made[-1].address, keys, patience, pointer.path)

    monkeypatch.setattr(find_directory, "connect", connect)
    yield made
    for each in made:
        each.close()


def test_altered_replies_of_the_directory_do_not_break_a_claim(
    middlemen: list[Middleman], crowd: Crowd, caplog: pytest.LogCaptureFixture
) -> None:
    for each in middlemen:
        each.to_alter = 4
    crowd.on("w1", rpc.publish, "counter", partial(Counter, 10))
    crowd.on("w2", rpc.publish, "counter", partial(Counter, 20))
    assert any(each.altered for each in middlemen)
    assert crowd.on("w0", lambda: rpc.lookup("counter").rpc_sync().add(1)) == 11
    assert len(crowd.workers["w1"].membership.workers()) == 3
    assert "could not be handled" not in caplog.text


def test_a_worker_registers_though_its_first_connection_is_altered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has a fixed size: its members tell each other the address of the directory."""
    middlemen: list[Middleman] = []

    def connect(address: tuple[str, int], keys: Keyring, patience: float) -> EmbeddedDirectory:
        middlemen.append(Middleman(address))
        middlemen[-1].to_alter = 3 if len(middlemen) == 1 else 0
        return EmbeddedDirectory(middlemen[-1].address, keys, patience)

    monkeypatch.setattr(registration, "EmbeddedDirectory", connect)
    with agents(2) as workers:
        current.enter(workers[1])
        rpc.publish("counter", Counter)
        assert middlemen[0].altered
        assert rpc.lookup("counter").rpc_sync().where() == workers[1].me.name
    for each in middlemen:
        each.close()


@pytest.mark.parametrize("lacks", ["_join", "_start", "_look"])
def test_values_are_found_after_a_moment_without_a_free_thread(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_once(name: str, run: Callable[..., Any], *args: Any) -> None:
        if lacks in (run.__name__, getattr(args[1], "__name__", "")):
            monkeypatch.undo()
            raise RuntimeError("can't start new thread")
        run_in_thread(name, run, *args)

    with agents(2) as workers:
        current.enter(workers[1])
        monkeypatch.setattr(registration, "run_in_thread", fail_once)
        with contextlib.suppress(RuntimeError):
            rpc.publish("one", Counter)
        rpc.publish("two", Counter)
        with contextlib.suppress(RuntimeError, errors.NotPublished):
            rpc.lookup("nothing", 0.2)
        with pytest.raises(errors.NotPublished):  # and not that the directory does not answer
            rpc.lookup("nothing", 1.5 if lacks == "_look" else 0.2)


def test_a_claim_whose_reply_was_lost_is_released_when_publish_fails(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replies to the claims are lost until `publish` fails."""
    w1 = crowd.workers["w1"]
    directory = w1.directory.directory

    def claim_unheard(key: str, *args: Any) -> Any:
        swap(key, *args)
        raise errors.DirectoryLost("the answer was lost")

    swap = directory.swap
    with monkeypatch.context() as patch:
        patch.setattr(directory, "swap", claim_unheard)
        patch.setattr(w1.agent, "timeout", 0.3)
        with pytest.raises(errors.DirectoryLost, match="the answer was lost"):
            crowd.on("w1", rpc.publish, "counter", Counter)
        assert w1.directory.registry.owner("counter").life == w1.me.incarnation
    crowd.on("w2", rpc.publish, "counter", partial(Counter, 20))
    assert crowd.on("w0", where, crowd.on("w0", rpc.lookup, "counter")) == "w2"


def test_a_worker_cannot_publish_a_name_twice(crowd: Crowd) -> None:
    crowd.on("w1", rpc.publish, "counter", Counter)
    with pytest.raises(errors.UsageError, match="'w1' already publishes a value under the name 'counter'"):
        crowd.on("w1", rpc.publish, "counter", Counter)


# References made with `restore`: their values come back with their owners


def restart(crowd: Crowd, name: str) -> None:
    crowd.lose(name)
    crowd.add(name)


def twice(value: torch.Tensor) -> list[float]:
    return (2 * value).tolist()


def at_100(counter: Counter) -> None:
    counter.count = 100


@pytest.mark.parametrize(("restore", "found"), [(True, 5), (at_100, 100)])
def test_a_value_is_made_again_and_restored_when_its_owner_comes_back(crowd: Crowd, restore: Any, found: int) -> None:
    made = rpc.remote("w1", Counter, (5,), restore=restore)
    assert made.rpc_sync().add(1) == 6
    restart(crowd, "w1")
    assert (made.rpc_sync().add(0), made.rpc_sync().add(1)) == (found, found + 1)
    restart(crowd, "w1")
    assert made.rpc_sync().add(0) == found


def test_every_use_waits_until_the_owner_comes_back(crowd: Crowd) -> None:
    made = rpc.remote("w1", torch.ones, (2,), restore=True)
    assert made.to_here().tolist() == [1, 1]
    uses = [
        lambda: made.to_here().tolist(),
        lambda: (made + 1).to_here().tolist(),
        lambda: made.rpc_async().tolist().wait(),
        lambda: made.remote().mul(3).to_here().tolist(),
        lambda: made.future().wait(),
        lambda: rpc.rpc_sync("w2", twice, (made,)),
        lambda: rpc.rpc_sync("w2", lambda ref: ref.to_here().tolist(), (made,)),
    ]
    results = []
    for use in uses:
        crowd.lose("w1")
        with in_background(crowd.add, "w1", after=0.05):
            results.append(use())
    assert results == [[1, 1], [2, 2], [1, 1], [3, 3], None, [2, 2], [1, 1]]


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_for_the_owner_before_the_loss_is_reported(
    crowd: Crowd, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rpc.remote("w1", Counter, (5,), restore=True)
    assert made.rpc_sync().add(1) == 6
    with ended(crowd, monkeypatch), in_background(crowd.add, "w1", after=0.3):
        assert USES[use](made) == 6


def test_several_threads_and_workers_find_the_same_value(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    rpc.rpc_sync("w2", keep, (made,))  # w2 is in this process
    restart(crowd, "w1")

    def add(name: str, reference: Any) -> Any:
        current.enter(crowd.workers[name])
        return reference.rpc_sync().add(1)

    assert sorted(in_threads(*[lambda: add("w0", made)] * 4, *[lambda: add("w2", kept[0])] * 4)) == list(range(1, 9))
    kept.clear()


def test_a_value_that_was_found_is_kept_by_a_later_renewal(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    lost = made._handle
    restart(crowd, "w1")
    made.rpc_sync().add(1)
    found = made._handle
    made._renew(lost, PATIENCE, errors.OwnerLost())
    assert made._handle is found is not lost


def test_an_owner_that_does_not_come_back_is_lost(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    made.to_here()
    crowd.lose("w1")
    with pytest.raises(
        errors.OwnerLost, match=r"lost with worker 'w1', and was not restored within 0.3 s: start worker 'w1'"
    ) as caught:
        made.rpc_sync(timeout=0.3).add(1)
    assert "wait_for_worker" not in str(caught.value)  # advice for another kind of call


def test_an_error_of_making_or_restoring_is_raised_at_the_use(crowd: Crowd) -> None:
    broken = rpc.remote("w1", Counter, restore=lambda counter: counter.missing)
    broken.to_here()
    restart(crowd, "w1")
    with pytest.raises(AttributeError, match="missing"):
        broken.rpc_sync().add(1)
    with pytest.raises(ZeroDivisionError):
        rpc.remote("w1", divmod, (1, 0), restore=True).to_here()


def leave_by_exit(counter: Counter) -> None:
    raise SystemExit


def test_each_use_raises_if_restoring_raises_system_exit(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=leave_by_exit)
    made.to_here()
    restart(crowd, "w1")
    for _ in range(2):
        with pytest.raises(errors.RemoteError, match="SystemExit, which is no Exception, was raised"):
            made.to_here(timeout=10)


def test_a_value_that_exists_is_not_made_again(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    assert made.rpc_sync().add(3) == 3
    assert not ensure_present(made)
    restart(crowd, "w1")
    assert ensure_present(made)
    assert not ensure_present(made)


def test_without_restore_a_value_is_lost_for_good(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter)
    made.to_here()
    assert not ensure_present(made)
    crowd.lose("w1")
    with pytest.raises(errors.CannotRestore, match="give `restore`"):
        _revive_on(made)
    with pytest.raises(errors.OwnerLost):
        made.to_here()


def _revive_on(reference: rpc.RRef[Any]) -> None:
    """Call `ensure_present` until the loss of the owner is known."""
    while True:
        with contextlib.suppress(errors.ShutDown):
            ensure_present(reference)


def test_a_restored_value_without_references_is_freed(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    restart(crowd, "w1")
    made.rpc_sync().add(1)
    del made
    crowd.workers["w0"].references.flush()
    wait_until(lambda: not crowd.on("w1", rpc.debug_info)["owners"])
