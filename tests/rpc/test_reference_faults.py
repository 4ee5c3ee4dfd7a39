"""Tests of references when workers are killed or connections break, and after the end of a group."""

import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.worker import current
from tests import links
from tests.cluster import PATIENCE, agents_here, free_port, group, in_threads, init, processes, wait_until
from tests.rpc.members import error_of, join
from tests.rpc.test_references import assert_empty, count, ones, value_of

ROUNDS = 50  # before the kill
rounds = itertools.count()
done = 0


def created() -> None:
    rpc.remote("worker1", ones).to_here()


def to_owner() -> None:
    rpc.rpc_sync("worker1", value_of, (rpc.remote("worker1", ones),))


def to_user() -> None:
    rpc.rpc_sync("worker1", value_of, (rpc.RRef(torch.ones(2)),))


def user_to_user() -> None:
    rpc.rpc_sync("worker2", value_of, (rpc.remote("worker1", ones),))


FLOWS = [
    (created, {"user": 0, "owner": 1}),
    (to_owner, {"user": 0, "owner": 1}),
    (to_user, {"owner": 0, "user": 1}),
    (user_to_user, {"middleman": 0, "owner": 1, "user": 2}),
]


def churn(flow: Callable[[], None]) -> list[tuple[type[errors.TelegradError], str]]:
    """Repeat a flow on three threads until it fails; return the errors."""
    raised = []

    def go() -> None:
        global done
        try:
            while True:
                flow()
                done = next(rounds)
        except errors.TelegradError as error:
            raised.append((type(error), str(error)))

    in_threads(go, go, go)
    assert len(raised) == 3
    return raised


def how_far() -> int:
    return done


def watch() -> None:
    wait_until(lambda: rpc.rpc_sync("worker0", how_far) >= ROUNDS)


@pytest.mark.parametrize(
    ("flow", "roles", "victim"),
    [(flow, roles, victim) for flow, roles in FLOWS for victim in roles],
    ids=[f"{flow.__name__}, {victim}" for flow, roles in FLOWS for victim in roles],
)
def test_a_killed_worker_leaves_no_references(flow: Callable[[], None], roles: dict[str, int], victim: str) -> None:
    with group(4) as workers:
        dead = workers[roles[victim]]
        workers[0].begin(churn, flow)
        workers[3].run(watch)
        dead.kill()
        if dead is not workers[0]:
            for kind, text in workers[0].end():
                assert issubclass(kind, (errors.PeerError, errors.RRefError)), (kind, text)
                assert dead.name in text
        assert_empty([worker for worker in workers if worker is not dead])


held: list[Any] = []


def hold(ref: rpc.RRef[torch.Tensor]) -> None:
    held.append(ref)


def hold_remote(on: str) -> None:
    hold(rpc.remote(on, ones))
    held[-1].to_here()


def use_held() -> list[tuple[type[Exception] | None, str]]:
    ref = held[-1]
    uses: list[Callable[[], object]] = [ref.to_here, ref.rpc_sync().sum, lambda: ref + 1]
    uses.append(lambda: rpc.rpc_sync(2, hold, held))
    return [error_of(use) for use in uses]


def owner_is_lost() -> None:
    wait_until(lambda: error_of(held[-1].to_here)[0] is errors.OwnerLost)  # once the loss is noticed


def test_uses_after_the_death_of_the_owner_name_it() -> None:
    with group(3) as workers:
        workers[0].run(hold_remote, "worker1")
        workers[1].kill()
        workers[1].join()
        workers[0].run(owner_is_lost)
        for kind, text in workers[0].run(use_held):
            assert kind is errors.OwnerLost
            assert "'worker1'" in text
            assert "died" in text


def third_fetches(ref_of: str) -> list[float]:
    hold_remote(ref_of)
    return rpc.rpc_sync("third", value_of, (held[-1],)).tolist()


def test_references_to_an_owner_that_left_a_dynamic_group_are_lost(tcp: str) -> None:
    with processes(3) as workers:
        workers[0].run(join, "first", tcp, 0)
        workers[1].run(join, "second", tcp)
        workers[2].run(join, "third", tcp)
        assert workers[0].run(third_fetches, "second") == [1, 1]
        workers[1].run(rpc.shutdown)
        workers[0].run(owner_is_lost)
        workers[1].run(join, "second", tcp)  # another one under the old name
        workers[0].run(owner_is_lost)
        assert workers[0].run(third_fetches, "second") == [1, 1]


def break_all() -> None:
    """Break every connection that this worker has made, as if the network had failed for a moment."""
    links.shut(links.made(current.here()))


def read_and_break(turns: int) -> dict[str, str]:
    """Read streams while connections break before, right after or amid them; return the errors by type."""
    raised: dict[str, str] = {}
    for turn in range(turns):
        if turn % 3 == 0:
            break_all()
        try:
            stream = rpc.rpc_stream("worker1", range, (20,), window=1 + turn % 4)
            if turn % 3 == 1:
                break_all()
            got = []
            for item in stream:
                got.append(item)
                if item == turn % 23:
                    break_all()
            assert got == list(range(20)), turn
        except errors.TelegradError as error:
            raised[type(error).__name__] = str(error)
    assert len(rpc.rpc_sync("worker1", ones)) == 2
    return raised


@pytest.mark.parametrize("turns", [60, pytest.param(3000, marks=pytest.mark.nightly)])
def test_streams_whose_connections_break_raise_peer_lost(turns: int) -> None:
    with group(2) as workers:
        assert not workers[0].run(read_and_break, turns, patience=300).keys() - {"PeerLost"}


gate = threading.Event()


def give_late() -> rpc.RRef[torch.Tensor]:
    assert gate.wait(PATIENCE)
    return rpc.RRef(torch.ones(2))


def break_while_it_runs() -> None:
    lost = rpc.rpc_async("worker1", give_late)
    rpc.rpc_sync("worker1", ones)  # so the first call has arrived already
    break_all()
    with pytest.raises(errors.PeerLost):
        lost.wait()


def open_after_a_loss() -> None:
    """Let `give_late` go on once this worker has handled the broken connection."""

    def open_gate() -> None:
        current.references().flush()
        gate.set()

    current.agent().lost.append(lambda *_: threading.Thread(target=open_gate).start())


def test_a_reference_in_an_answer_without_a_connection_is_freed() -> None:
    with group(2) as workers:
        workers[1].run(open_after_a_loss)
        workers[0].run(break_while_it_runs)
        assert_empty(workers)


# The end


def leak(debug: str) -> tuple[str, list[str]]:
    """Keep references beyond the end of their group; return one as text, and the log."""
    os.environ["TELEGRAD_DEBUG"] = debug
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)
    init(0, 1, free_port())
    kept = [rpc.RRef(torch.ones(1)), *(rpc.RRef(torch.ones(2)) for _ in range(3))]
    rpc.shutdown()
    with pytest.raises(errors.NotInitialized):
        rpc.remote("worker0", int)
    return f"{kept[0].local_value().item()} {kept[0]}", said


@pytest.mark.parametrize("debug", ["", "1"])
def test_leaked_references_are_listed_in_debug_mode(debug: str) -> None:
    with processes(1) as (process,):
        shown, said = process.run(leak, debug)
    assert "1.0 <RRef" in shown
    lines = [line for record in said for line in record.splitlines()]
    assert len(lines) == (3 if debug else 0)
    if debug:
        assert "references outlive their group (4)" in lines[0]
        assert sorted(line.strip().partition(" created at ")[0] for line in lines[1:]) == ["1", "3"]
        assert all(f"{__file__}:" in line for line in lines[1:])


def test_a_reference_of_a_former_group_cannot_be_sent() -> None:
    init(0, 1, free_port())
    ref, remote = rpc.RRef(torch.ones(1)), rpc.remote("worker0", ones)
    remote.to_here()
    rpc.shutdown()
    init(0, 1, free_port())
    try:
        with pytest.raises(errors.UsageError, match="has left"):
            rpc.rpc_sync("worker0", value_of, (ref,))
        assert ref.to_here().item() == 1
        assert count()["owners"] == 0
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("first", [0, 1])
def test_references_say_that_their_own_worker_has_shut_down(first: int) -> None:
    with agents_here(2) as workers:
        ref = rpc.remote("w1", ones)
        ref.to_here()
        workers[first].end("")
        workers[1 - first].end("")
        for use in (ref.to_here, ref.rpc_sync().sum, ref.rpc_async().sum, ref.remote().sum, lambda: ref + 1):
            with pytest.raises(errors.ShutDown, match="'w0' shut down: calls and references"):
                use()
