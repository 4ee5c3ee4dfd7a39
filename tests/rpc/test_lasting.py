"""References made with `restore`: their values come back with their owners."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.rpc.restorable import ensure_present
from telegrad._core.worker import current
from tests.cluster import PATIENCE, in_threads
from tests.rpc.test_publishing import USES, Counter, Crowd, ended, keep, kept


def restart(crowd: Crowd, name: str) -> None:
    crowd.lose(name)
    crowd.add(name)


def twice(value: torch.Tensor) -> list[float]:
    found: list[float] = (2 * value).tolist()
    return found


def at_100(counter: Counter) -> None:
    counter.count = 100


@pytest.mark.parametrize(("restore", "found"), [(True, 5), (at_100, 100)])
def test_a_value_is_made_anew_and_restored_as_its_owner_comes_back(crowd: Crowd, restore: Any, found: int) -> None:
    made = rpc.remote("w1", Counter, (5,), restore=restore)
    assert made.rpc_sync().add(1) == 6
    restart(crowd, "w1")
    assert made.rpc_sync().add(0) == found
    assert made.rpc_sync().add(1) == found + 1
    restart(crowd, "w1")
    assert made.rpc_sync().add(0) == found


def test_every_use_waits_for_the_return(crowd: Crowd) -> None:
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
        back = threading.Timer(0.05, crowd.add, ("w1",))
        back.start()
        results.append(use())
        back.join()
    assert results == [[1, 1], [2, 2], [1, 1], [3, 3], None, [2, 2], [1, 1]]


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_for_the_return_before_it_is_told_of_the_loss(
    crowd: Crowd, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rpc.remote("w1", Counter, (5,), restore=True)
    assert made.rpc_sync().add(1) == 6
    with ended(crowd, monkeypatch):
        back = threading.Timer(0.3, crowd.add, ("w1",))
        back.start()
        assert USES[use](made) == 6
        back.join()


def test_several_threads_and_workers_find_the_same_value(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    rpc.rpc_sync("w2", keep, (made,))  # w2 is in this process
    restart(crowd, "w1")

    def add(name: str, reference: Any) -> Any:
        current.enter(crowd.workers[name])
        return reference.rpc_sync().add(1)

    found = in_threads(*[lambda: add("w0", made)] * 4, *[lambda: add("w2", kept[0])] * 4)
    assert sorted(found) == list(range(1, 9))
    kept.clear()


def test_what_one_thread_has_found_is_not_dropped_for_what_another_finds(crowd: Crowd) -> None:
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
    ):
        made.rpc_sync(timeout=0.3).add(1)


def test_what_making_it_raises_is_told(crowd: Crowd) -> None:
    broken = rpc.remote("w1", Counter, restore=lambda counter: counter.missing)
    broken.to_here()
    restart(crowd, "w1")
    with pytest.raises(AttributeError, match="missing"):
        broken.rpc_sync().add(1)
    with pytest.raises(ZeroDivisionError):
        rpc.remote("w1", divmod, (1, 0), restore=True).to_here()


def leave_by_exit(counter: Counter) -> None:
    raise SystemExit


def test_each_that_asks_is_told_that_restoring_it_would_end_the_program(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=leave_by_exit)
    made.to_here()
    restart(crowd, "w1")
    for _ in range(2):
        with pytest.raises(errors.RemoteError, match="SystemExit was raised"):
            made.to_here(timeout=10)


def test_a_value_that_is_there_is_not_made_anew(crowd: Crowd) -> None:
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
    """Until it is known what has become of the owner."""
    while True:
        with contextlib.suppress(errors.ShutDown):
            ensure_present(reference)


def test_values_that_nobody_holds_are_freed(crowd: Crowd) -> None:
    made = rpc.remote("w1", Counter, restore=True)
    restart(crowd, "w1")
    made.rpc_sync().add(1)
    del made
    with ThreadPoolExecutor(1) as pool:
        crowd.workers["w0"].references.flush()
        owned = pool.submit(crowd.on, "w1", lambda: rpc.debug_info()["owners"])
        until = 0
        while owned.result(PATIENCE) and until < 100:
            owned, until = pool.submit(crowd.on, "w1", lambda: rpc.debug_info()["owners"]), until + 1
        assert owned.result(PATIENCE) == 0


def test_restore_is_a_function_or_true(crowd: Crowd) -> None:
    with pytest.raises(errors.InvalidArgument, match="`restore` must be a function"):
        rpc.remote("w1", Counter, restore="yes")  # type: ignore[call-overload]
