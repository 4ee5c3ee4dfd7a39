"""What a debugger meets tells its state, also while somebody holds the locks."""

from __future__ import annotations

import operator
import re
import time

import pytest

from telegrad._core.calls.futures import Future
from telegrad._core.wire.messages import CALL, Message
from telegrad._core.worker.worker import Worker


def test_an_agent_and_its_parts_tell_their_state(pair: list[Worker]) -> None:
    agent = pair[0].agent
    agent.call("w1", operator.add, (1, 2), None)
    peer = agent._connections.peer("w1")
    link = peer.link
    assert link is not None
    with peer.lock, agent._reactor._lock:
        told = repr(agent)
    assert re.fullmatch(
        r"<Agent 'w0': <Connections: \[<Peer 'w1': connected; 0 calls in flight>.*\], "
        r"and \d from others>; <Reactor: \d+ threads, 0 to look at; "
        r"<Scheduler: 0 of 16 slots busy, 0 works wait for one>>>",
        told,
    )
    assert re.fullmatch(r"<Link to 'w1': 0 to send; <ReadRight: (nobody|the leader)>>", repr(link))


@pytest.mark.parametrize(
    ("kind", "told"), [(CALL, "<CALL 7 'operator:add': 3 bytes>"), (99, "<99 7 'operator:add': 3 bytes>")]
)
def test_a_message_tells_what_it_is_and_not_all_it_says(kind: int, told: str) -> None:
    assert repr(Message(kind, 7, head=b"operator:add", body=b"abc")) == told


def test_a_future_tells_what_it_waits_for(pair: list[Worker]) -> None:
    agent = pair[0].agent
    future = agent.call_async("w1", time.sleep, (0.1,), None)
    assert re.fullmatch(r"<Future of <call \d+ of time.sleep on 'w1': in flight for \d+\.\d s>>", repr(future))
    future.wait()
    assert repr(future) == "<Future: done>"
    failed = agent.call_async("w1", operator.truediv, (1, 0), None)
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert repr(failed) == "<Future: ZeroDivisionError of _operator.truediv on worker 'w1'>"
    assert repr(Future()) == "<Future: not done>"
