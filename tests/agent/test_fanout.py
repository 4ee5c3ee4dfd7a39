"""Tests of one call to many workers: encoded once, sent before waiting for any answer, with an outcome for each."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_each import EachCall, _Encodings
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls.futures import Future
from telegrad._core.memory.warm_memory import SHARING
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, CannotEncode, PeerError, RemoteError, TelegradWarning, UnknownWorker
from tests.cluster import PATIENCE, agents, agents_here, in_threads
from tests.transport.test_common import scribble, total

MB = 1 << 20
LARGE = 1 << 18  # a low limit for these tests
OTHERS = ("w1", "w2", "w3")
needs_sharing = pytest.mark.skipif(not SHARING, reason="this platform has no memory files")


@pytest.fixture(params=["unix", "tcp"])
def workers(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    with agents_here(4, transport=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def soon_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telegrad._core.agent.call_each.COMMON_FROM", LARGE)


def call_each(agent: Agent, function: Any, *args: Any, to: Sequence[Any] = OTHERS, **options: Any) -> list[Future[Any]]:
    futures: list[Future[Any]] = [Future() for _ in to]
    agent.call_each(list(map(EachCall, futures, to)), PreparedCall(function, args), **options)
    return futures


def values(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.wait() for future in futures]


def here() -> str:
    return current.agent().name


# Encodings and copies


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets an entry each time the arguments of a call to many workers are encoded."""
    encode, made = _Encodings._encode, list[bool]()

    def encode_counted(encodings: _Encodings, same: bool) -> Any:
        made.append(same)
        return encode(encodings, same)

    monkeypatch.setattr(_Encodings, "_encode", encode_counted)
    return made


def test_workers_of_another_program_get_a_separate_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_encodings(monkeypatch)
    monkeypatch.setattr("telegrad._core.agent.agent.program", lambda: "this one")
    with agents(4) as workers:
        agent = workers[0].agent
        peer = agent._connections.peer("w2")
        peer.member = peer.member._replace(program="another")
        assert (values(call_each(agent, here)), sorted(made)) == (list(OTHERS), [False, True])


def test_each_worker_has_its_own_copy_of_large_arguments(workers: list[Worker]) -> None:
    agent, tensor = workers[0].agent, torch.ones(LARGE)
    for _ in range(3):
        assert values(call_each(agent, scribble, tensor)) == [2 * LARGE] * 3
    assert total(tensor) == LARGE


@needs_sharing
def test_several_workers_of_one_host_share_a_copy_of_the_arguments() -> None:
    with agents(4, transport="unix") as workers:
        agent = workers[0].agent
        pool = agent.memory
        tensor = torch.ones(LARGE)
        futures = call_each(agent, total, tensor)
        assert (len(pool._common), values(futures)) == (1, [LARGE] * 3)
        assert not any(each for (_, _, is_common), each in pool._shelf._unused.items() if not is_common)
        ready = agent.memory.common(tensor.nbytes).view(torch.float32)
        ready.fill_(2)
        before = len(pool._common)
        futures = call_each(agent, total, ready)
        assert len(pool._common) == before  # no copy of a tensor that lies in common memory already
        assert values(futures) == [2 * LARGE] * 3
        made = pool._bytes.total()
        assert values(call_each(agent, total, tensor, to=("w1", "w0"))) == [LARGE] * 2
        assert pool._bytes.total() > made  # a separate block
        assert total(ready) == 2 * LARGE


def test_a_call_with_too_little_shared_memory_succeeds() -> None:
    with agents(4, transport="unix", shared_memory=MB) as workers:
        assert values(call_each(workers[0].agent, total, torch.ones(MB))) == [MB] * 3


# Failures


def raise_on(name: str) -> str:
    if here() == name:
        raise ValueError(f"not on {name}")
    return here()


def test_unknown_workers_and_failures_do_not_affect_other_workers(workers: list[Worker]) -> None:
    futures = call_each(workers[0].agent, raise_on, "w2", to=("nobody", "w1", "w2", "w3", 17))
    assert [futures[1].wait(), futures[3].wait()] == ["w1", "w3"]
    for at in (0, 4):
        with pytest.raises(UnknownWorker):
            futures[at].wait()
    with pytest.raises(ValueError, match="not on w2") as caught:
        futures[2].wait()
    assert isinstance(caught.value, ValueError | RemoteError)


def test_an_argument_that_cannot_be_encoded_is_raised_once(workers: list[Worker]) -> None:
    agent = workers[0].agent
    futures: list[Future[Any]] = [Future() for _ in OTHERS]
    for argument in (threading.Lock(), freed()):
        with pytest.raises(CannotEncode):
            agent.call_each(list(map(EachCall, futures, OTHERS)), PreparedCall(here, (argument,)))
    assert not any(future.done() for future in futures)
    assert agent.started == 0


def freed() -> torch.Tensor:
    tensor = torch.ones(1 << 16)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_each_call_fails_after_the_caller_has_left() -> None:
    with agents(3) as workers:
        agent = workers[0].agent
        values(call_each(agent, here, to=("w1", "w2")))
        workers[0].end("")
        for future in call_each(agent, here, to=("w1", "w2")):
            with pytest.raises(PeerError):
                future.wait()


may_end = threading.Event()


def consume(value: Any = None) -> None:
    assert may_end.wait(PATIENCE)


def test_each_call_has_its_timeout() -> None:
    may_end.clear()
    with agents(3) as workers:
        for future in call_each(workers[0].agent, consume, to=("w1", "w2"), timeout=0.05):
            with pytest.raises(CallTimeout, match=r"consume on worker 'w[12]'"):
                future.wait()
        may_end.set()


def test_a_write_to_an_argument_during_the_calls_causes_a_warning() -> None:
    may_end.clear()
    with agents(3) as workers:
        tensor = torch.zeros(1 << 16)
        futures = call_each(workers[0].agent, consume, tensor, to=("w1", "w2"))
        tensor.add_(1)
        may_end.set()
        with pytest.warns(TelegradWarning, match="was modified while the call of"):
            values(futures)


def test_all_calls_are_sent_before_any_answer_is_waited_for() -> None:
    """A worker has no room until another has been called."""
    may_end.clear()
    with agents(3) as workers:
        agent = workers[0].agent
        values(call_each(agent, here, to=("w1", "w2")))
        peer = agent._connections.peer("w1")
        with peer.lock:
            peer.calls._most_calls = 1
        first = call_each(agent, consume, to=("w1",))
        (futures, _) = in_threads(lambda: call_each(agent, release_who_waits, to=("w1", "w2")), lambda: values(first))
        assert values(futures) == [None, None]


def release_who_waits() -> None:
    may_end.set()
