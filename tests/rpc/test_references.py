"""Tests of remote references, in a group of processes."""

import copy
import gc
import io
import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from tests.cluster import PATIENCE, Process, agents_here, run_all, wait_until

KINDS = (
    "owners shared_owners forks users pending_users pending_forks pending_deletes pending_creations pending_messages"
)
NOTHING = dict.fromkeys(KINDS.split(), 0)
T = TypeVar("T")


@pytest.fixture(autouse=True)
def nothing_stays(workers: list[Process]) -> Iterator[None]:
    """Check that after each test no worker keeps any reference."""
    yield
    assert_empty(workers)


def assert_empty(workers: list[Process]) -> None:
    wait_until(lambda: run_all(workers, count) == [NOTHING] * len(workers))


def count(rank: int = 0) -> dict[str, int]:
    gc.collect()
    return rpc.debug_info()


def on_worker0(program: Callable[[], None]) -> Callable[[list[Process]], None]:
    """Make a test of a program, which runs on `worker0`."""

    def test(workers: list[Process]) -> None:
        workers[0].run(program)

    return test


# Functions that run on the workers


@dataclass
class Box:
    inside: Any


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def fail(self) -> NoReturn:
        raise ValueError(f"at {self.value}")

    @rpc.functions.async_execution
    def add_elsewhere(self, to: str, amount: int) -> rpc.Future[int]:
        return rpc.rpc_async(to, operator.add, (self.value, amount))

    async def add_soon(self, amount: int) -> int:
        return self.add(amount)

    def __call__(self, amount: int) -> int:
        return self.add(amount)


def here() -> str:
    return rpc.get_worker_info().name


def ones(size: int = 2) -> torch.Tensor:
    return torch.ones(size)


def make(on: str) -> rpc.RRef[torch.Tensor]:
    """Return a reference that worker `on` owns, made by this worker."""
    return rpc.RRef(torch.ones(2)) if on == here() else rpc.remote(on, ones)


def value_of(ref: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return ref.to_here()


def value_inside(holder: Any, key: Any = 0) -> torch.Tensor:
    return holder[key].to_here()


def value_of_box(box: Box) -> torch.Tensor:
    return box.inside.to_here()


def value_of_nested(ref: rpc.RRef[rpc.RRef[torch.Tensor]]) -> torch.Tensor:
    return ref.to_here().to_here()


def pass_on(ref: rpc.RRef[torch.Tensor], to: str, *further: str) -> torch.Tensor:
    return rpc.rpc_sync(to, pass_on, (ref, *further)) if further else rpc.rpc_sync(to, value_of, (ref,))


def hand_back(ref: T) -> T:
    return ref


def make_remote(on: str) -> rpc.RRef[torch.Tensor]:
    return rpc.remote(on, ones)


kept: dict[str, Any] = {}


def keep(name: str, ref: Any) -> None:
    kept[name] = ref


def use_kept(name: str) -> torch.Tensor:
    return kept[name].to_here()


def let_go(name: str) -> None:
    del kept[name]


# Making and using


def use_everything(on: str) -> None:
    ref = make(on)
    assert ref.owner_name() == on
    assert ref.owner() == rpc.get_worker_info(on)
    assert ref.is_owner() == (on == here())
    assert ref.future().wait() is None
    assert ref._get_future().wait() is None
    assert ref.to_here().tolist() == [1, 1]
    assert ref.confirmed_by_owner()
    assert on in repr(ref) or "Tensor" in repr(ref)
    if ref.is_owner():
        assert ref.local_value() is ref.to_here()
    else:
        with pytest.raises(errors.NotOwner, match="to_here"):
            ref.local_value()


@pytest.mark.parametrize("on", ["worker0", "worker1"])
def test_the_attributes_of_a_reference(workers: list[Process], on: str) -> None:
    workers[0].run(use_everything, on)


@on_worker0
def test_remote_takes_a_rank_or_worker_info_and_options() -> None:
    by_rank = rpc.remote(1, ones)
    by_info = rpc.remote(rpc.get_worker_info("worker1"), ones, kwargs={"size": 3}, timeout=PATIENCE)
    assert by_rank.owner_name() == by_info.owner_name() == "worker1"
    assert by_info.to_here(timeout=PATIENCE).shape == (3,)
    with pytest.raises(errors.UnknownWorker):
        rpc.remote("nobody", ones)
    with pytest.raises(errors.CannotEncode):
        rpc.remote("worker1", ones, (threading.Lock(),))  # type: ignore[arg-type]


def call_proxies(on: str) -> None:
    ref = rpc.remote(on, Counter, (3,)) if on != here() else rpc.RRef(Counter(3))
    assert ref.rpc_sync().add(1) == 4
    assert ref.rpc_sync(timeout=PATIENCE).add(1, times=2) == 6
    assert ref.rpc_async().add(1).wait() == 7
    assert ref.remote().add(1).to_here() == 8
    assert ref.rpc_sync().add_elsewhere("worker2", 10) == 18  # type: ignore[comparison-overlap]
    assert ref.rpc_async().add_elsewhere("worker2", 11).wait() == 19
    assert ref.remote().add_elsewhere("worker2", 12).to_here() == 20
    assert ref.rpc_sync().add_soon(2) == 10  # type: ignore[comparison-overlap]
    assert (ref(5).to_here(), ref.rpc_sync()(5)) == (15, 20)
    for call in (ref.rpc_sync().fail, lambda: ref.rpc_async().fail().wait(), lambda: ref.remote().fail().to_here()):
        with pytest.raises(ValueError, match="at 20"):
            call()
    with pytest.raises(AttributeError, match="no_such"):
        ref.rpc_sync().no_such()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"instead of __len__\(...\) use an operator"):
        ref.rpc_sync().__len__()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"rpc_sync\(\).value"):
        ref.value  # noqa: B018
    with pytest.raises(TypeError, match=r"'value' is an attribute of Counter, .* rref.to_here\(\).value"):
        ref.rpc_sync().value()  # type: ignore[operator]
    uncalled = ref.rpc_sync().value
    assert "rref.to_here().value is a copy" in repr(uncalled)
    for use in (lambda: bool(uncalled), lambda: uncalled == 20):
        with pytest.raises(errors.UsageError, match=r"'value' was not called: .* rref.to_here\(\).value"):
            use()


@pytest.mark.parametrize("on", ["worker0", "worker1"])
def test_calls_by_proxies(workers: list[Process], on: str) -> None:
    workers[0].run(call_proxies, on)


@on_worker0
def test_a_call_keeps_its_reference_alive() -> None:
    assert rpc.remote("worker1", Counter, (3,)).rpc_async().add(1).wait() == 4
    futures = [rpc.remote("worker1", Counter, (n,)).remote().add(1) for n in range(20)]
    assert [future.to_here() for future in futures] == list(range(1, 21))


@on_worker0
def test_timeouts_of_calls_by_proxies() -> None:
    ref = rpc.remote("worker1", threading.Event)
    with pytest.raises(errors.CallTimeout):
        ref.rpc_sync(timeout=0.05).wait()
    with pytest.raises(errors.CallTimeout):
        ref.rpc_async(timeout=0.05).wait().wait()
    ref.rpc_sync().set()


class Odd:
    """A class with methods whose names could clash with internal ones."""

    def of(self) -> str:
        return "of"

    def call_of(self) -> str:
        return "call_of"

    def add(self, function: str) -> str:
        return function


@on_worker0
def test_methods_and_arguments_of_any_name() -> None:
    ref: Any = rpc.remote("worker1", Odd)
    assert [ref.rpc_sync().of(), ref.rpc_sync().call_of()] == ["of", "call_of"]
    assert ref.add(function="a method that tensors have").to_here() == "a method that tensors have"


def test_using_a_reference_wakes_no_thread_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents_here(2) as (_, owner):
        ref = rpc.remote("w1", Counter)
        assert ref.to_here().value == 0
        owner.references.flush()
        woken = []
        monkeypatch.setattr(owner.references, "_wake", lambda: woken.append(True))
        assert ([ref.rpc_sync().add(1) for _ in range(5)], ref.to_here().value) == ([1, 2, 3, 4, 5], 5)
        assert not woken


# The debug view


@on_worker0
def test_debug_info_counts_references() -> None:
    local, own = rpc.RRef(1), rpc.RRef(2)
    rpc.rpc_sync("worker1", keep, ("x", own))
    other = make("worker1")
    other.future().wait()
    counts = rpc.debug_info()
    names = rpc._rref_context_get_debug_info()
    assert (counts["owners"], counts["shared_owners"], counts["forks"], counts["users"]) == (2, 1, 1, 1)
    assert names == {"num_owner_rrefs": "1", "num_forks": "1", "num_pending_users": "0", "num_pending_futures": "0"}
    rpc.rpc_sync("worker1", let_go, ("x",))
    gate = rpc.remote("worker1", threading.Event)
    pending = rpc.remote("worker1", ones_after, (gate,))
    gate.future().wait()
    assert rpc.debug_info()["pending_creations"] == rpc.debug_info()["pending_users"] == 1
    gate.rpc_sync().set()
    pending.future().wait()
    assert rpc.debug_info()["pending_creations"] == 0
    del local


# Operators


def operate(on: str, other: str) -> None:
    a: Any = make(on)
    b: Any = make(other)
    assert isinstance(a + b, rpc.RRef)
    assert (a + b).owner_name() == on
    results = {
        "binary": (a + b, [2, 2]),
        "with a value": (a * 3, [3, 3]),
        "reflected": (3 - a, [2, 2]),
        "unary": (-a, [-1, -1]),
        "item": (a[:1], [1]),
        "compared": (a <= b, [True, True]),
        "method": (a.add(b, alpha=2), [3, 3]),
        "named": (a.add(other=b), [2, 2]),
        "matrix": (a.reshape(1, 2).mm(b.reshape(2, 1)), [[2]]),
        "chain": ((a + b).mul(2).sum(dim=0, keepdim=True), [8]),
        "power": (2**a, [2, 2]),
        "matmul": ((a @ b).reshape(1), [2]),
    }
    for name, (ref, expected) in results.items():
        assert ref.to_here().tolist() == expected, name
    with pytest.raises(TypeError):
        list(a)
    with pytest.raises(TypeError):
        1 in a  # noqa: B015
    assert a != b
    assert bool(a)
    for use in (lambda: bool(a[0] < b[0]), lambda: max(a[0], b[0]), lambda: not a.add(b), lambda: bool(a @ b)):
        with pytest.raises(errors.UsageError, match=r"write ref\.rpc_sync\(\)\.method\(\)$"):
            use()


@pytest.mark.parametrize(("on", "other"), [("worker1", "worker1"), ("worker1", "worker2"), ("worker0", "worker1")])
def test_operators_run_at_the_owner(workers: list[Process], on: str, other: str) -> None:
    workers[0].run(operate, on, other)


# Sharing


Ask = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments
WAYS: dict[str, Callable[[rpc.RRef[torch.Tensor]], Ask]] = {
    "argument": lambda ref: (value_of, (ref,)),
    "list": lambda ref: (value_inside, ([ref],)),
    "dictionary": lambda ref: (value_inside, ({"x": ref}, "x")),
    "own class": lambda ref: (value_of_box, (Box(ref),)),
    "nested": lambda ref: (value_of_nested, (rpc.RRef(ref),)),
    "closure": lambda ref: (lambda: ref.to_here(), ()),
    "twice": lambda ref: (value_inside, ([ref, ref], 1)),
}


def share(way: str, owner: str, to: str) -> None:
    function, args = WAYS[way](make(owner))
    assert rpc.rpc_sync(to, function, args).tolist() == [1, 1]
    assert rpc.rpc_async(to, function, args).wait().tolist() == [1, 1]
    assert rpc.remote(to, function, args).to_here().tolist() == [1, 1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("owner", ["worker0", "worker1", "worker2"])
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_references_can_be_sent_in_any_argument(workers: list[Process], way: str, owner: str, to: str) -> None:
    workers[0].run(share, way, owner, to)


@on_worker0
def test_a_reference_is_passed_along_many_workers() -> None:
    for owner in ("worker0", "worker1", "worker3"):
        ref = make(owner)
        path = ("worker1", "worker2", "worker3", "worker0", "worker0", "worker1")
        assert rpc.rpc_sync("worker1", pass_on, (ref, *path)).tolist() == [1, 1]


@on_worker0
def test_references_can_be_returned() -> None:
    assert rpc.rpc_sync("worker1", make_remote, ("worker2",)).to_here().tolist() == [1, 1]
    assert rpc.rpc_sync("worker1", make_remote, ("worker0",)).local_value().tolist() == [1, 1]
    assert rpc.rpc_sync("worker1", make_remote, ("worker1",)).owner_name() == "worker1"
    assert rpc.remote("worker1", make_remote, ("worker2",)).to_here().to_here().tolist() == [1, 1]
    ref = make("worker3")
    again = rpc.rpc_sync("worker1", hand_back, (ref,))
    assert again is not ref
    assert again.to_here().tolist() == [1, 1]
    boxes: Any = rpc.rpc_sync("worker2", hand_back, ([Box(ref), {"deep": (ref,)}],))
    assert boxes[1]["deep"][0].to_here().tolist() == [1, 1]


@on_worker0
def test_a_value_lives_while_any_worker_holds_a_reference() -> None:
    ref = make("worker1")
    rpc.rpc_sync("worker2", keep, ("x", ref))
    rpc.rpc_sync("worker1", keep, ("x", ref))
    del ref
    gc.collect()
    rpc.rpc_sync("worker2", let_go, ("x",))
    assert rpc.rpc_sync("worker1", use_kept, ("x",)).tolist() == [1, 1]
    rpc.rpc_sync("worker3", keep, ("x", rpc.rpc_sync("worker1", dict[str, int], ({"x": 1},))["x"]))
    rpc.rpc_sync("worker1", let_go, ("x",))
    rpc.rpc_sync("worker3", let_go, ("x",))


@on_worker0
def test_a_reference_cannot_be_pickled_outside_of_calls() -> None:
    ref = rpc.RRef(1)
    for attempt in (lambda: pickle.dumps(ref), lambda: torch.save(ref, io.BytesIO())):
        with pytest.raises(errors.UsageError, match="to_here"):
            attempt()
    assert copy.deepcopy([ref])[0].local_value() == 1
    error = ValueError(ref)
    with pytest.raises(Exception, match="reference"):
        rpc.rpc_sync("worker1", raise_with, (ref,))
    del error


def raise_with(ref: rpc.RRef[int]) -> None:
    raise ValueError("with a reference", ref)


# Failures


def fail() -> NoReturn:
    raise KeyError("why")


@on_worker0
def test_a_failed_creation_raises_at_each_use() -> None:
    for on in ("worker0", "worker1"):
        ref: Any = rpc.remote(on, fail)
        share = partial(rpc.rpc_sync, "worker2", value_of, (ref,))
        for use in (ref.to_here, ref.to_here, ref.future().wait, ref.rpc_sync().anything, share):
            with pytest.raises(KeyError, match="why"):
                use()


@on_worker0
def test_a_creation_that_fails_after_it_was_shared_raises_at_the_receiver() -> None:
    gate = rpc.remote("worker1", threading.Event)
    ref = rpc.remote("worker1", fail_after, (gate,))
    outcome = rpc.rpc_async("worker2", value_of, (ref,))
    gate.rpc_sync().set()
    with pytest.raises(KeyError, match="why"):
        outcome.wait()


def fail_after(gate: rpc.RRef[threading.Event]) -> None:
    gate.local_value().wait()
    fail()


@on_worker0
def test_a_creation_that_takes_too_long_times_out() -> None:
    gate = rpc.remote("worker1", threading.Event)
    ref = rpc.remote("worker1", ones_after, (gate,), timeout=0.05)
    with pytest.raises(errors.CallTimeout):
        ref.future().wait()
    with pytest.raises(errors.CallTimeout):
        ref.to_here()
    patient = rpc.remote("worker1", ones_after, (gate,))
    with pytest.raises(errors.CallTimeout):
        patient.to_here(timeout=0.05)
    own = rpc.remote(here(), ones_after, (gate,))
    with pytest.raises(errors.CallTimeout):
        own.to_here(timeout=0.05)
    gate.rpc_sync().set()
    assert (patient.to_here().tolist(), own.to_here().tolist()) == ([1, 1], [1, 1])


def ones_after(gate: rpc.RRef[threading.Event]) -> torch.Tensor:
    gate.rpc_sync().wait()
    return ones()


@on_worker0
def test_a_reference_can_be_shared_before_its_value_exists() -> None:
    gate = rpc.remote("worker1", threading.Event)
    ref = rpc.remote("worker1", ones_after, (gate,))
    waiting = [rpc.rpc_async(to, value_of, (ref,)) for to in ("worker2", "worker3", "worker1", "worker0")]
    assert not any(future.done() for future in waiting)
    gate.rpc_sync().set()
    assert [future.wait().tolist() for future in waiting] == [[1, 1]] * 4


# Many


def churn(rank: int, rounds: int) -> None:
    """Create references, share them with other workers, and drop them."""
    others = [f"worker{(rank + n) % 4}" for n in range(1, 4)]
    for start in range(0, rounds, 50):
        refs = [rpc.remote(others[n % 3], ones) if n % 2 else rpc.RRef(n) for n in range(start, start + 50)]
        for future in [rpc.rpc_async(others[(n + 1) % 3], hand_back, ([ref],)) for n, ref in enumerate(refs)]:
            (again,) = future.wait()
            again.to_here()


def run_churn(workers: list[Process], total: int) -> None:
    for rank, worker in enumerate(workers):
        worker.begin(churn, rank, total // len(workers))
    for worker in workers:
        worker.end(patience=20 * PATIENCE)


@pytest.mark.nightly
def test_a_hundred_thousand_references(workers: list[Process]) -> None:
    run_churn(workers, 5000)  # every table and pool has grown by then
    before = [worker.run(memory) for worker in workers]
    run_churn(workers, 100_000)
    assert_empty(workers)
    for worker, then in zip(workers, before, strict=True):
        assert worker.run(memory) < then + (16 << 20)


def memory() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
