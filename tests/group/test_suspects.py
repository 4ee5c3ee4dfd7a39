"""Tests of suspected losses: every order of answers and of times decides if a worker whose connection broke is dead."""

import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.membership import membership, suspects
from telegrad._core.membership.membership import Membership
from telegrad._core.membership.registry import MemberJoined, Registered
from telegrad._core.membership.suspects import AGAIN, PATIENCE, PROBE_DELAYS, Suspect
from telegrad.errors import PeerError, PeerLost, PeerSilent
from tests import cluster
from tests.cluster import agents

STEPS = 8  # irregular ones of a clock
MOST = len(PROBE_DELAYS) + (1 + STEPS) * round(PATIENCE / AGAIN)


class FakeProbes(list[Suspect]):
    """A replacement for the probes of `suspects`, which are answered by a function."""

    begin = list.append

    def __init__(self, probe: Callable[[int], bool | None]) -> None:
        super().__init__()
        self.probe = probe

    def answers(self) -> Iterator[tuple[Suspect, bool | None]]:
        while self:
            suspect = self.pop()
            yield suspect, self.probe(suspect.who.tcp)  # type: ignore[arg-type]


class Watch(Membership):
    """The part of a membership that settles suspects."""

    def __init__(self, count: int, probe: Callable[[int], bool | None], is_dynamic: bool = False) -> None:
        self._changed: Any = threading.Condition()
        self.answered: list[Any] = []
        self.on_dead: Any = lambda *_: None
        self._probes: Any = FakeProbes(probe)
        self.declared: list[int] = []
        declare_lost = lambda member, *_: self.declared.append(member.tcp)  # noqa: E731
        self._group: Any = SimpleNamespace(declare_lost=declare_lost) if is_dynamic else None
        self._me: Any = SimpleNamespace(name="me")
        self._next = ""
        self._parted, self._gone, self._closed = set(), {}, False
        self._silent, self._reached, self._wake = {}, {}, threading.Event()
        self._post: Any = SimpleNamespace(warn_lost=lambda *_: None)
        self._teller: Any = SimpleNamespace(of_ends=[])
        workers: list[Any] = [
            SimpleNamespace(
                name=f"w{number}",
                incarnation=str(number),
                identity=SimpleNamespace(incarnation=str(number)),
                tcp=number,
            )
            for number in range(count)
        ]
        self._present = {worker.incarnation: worker for worker in workers}
        self._suspects = [Suspect(worker, PeerLost("its connection broke"), 0.0, 0.0) for worker in workers]
        self._suspected = set(self._present)
        self.died: list[int] = []

    def _take_out(self, member: Any, lost: Any) -> None:
        self.died.append(member.tcp)
        self._present.pop(member.incarnation, None)


def clock(steps: Iterator[float]) -> Callable[[], float]:
    now = 0.0

    def read() -> float:
        nonlocal now
        now += next(steps, 0.2)
        return now

    return read


ANSWERS = st.lists(st.sampled_from([True, False, None]), min_size=MOST, max_size=MOST)


@given(
    st.lists(ANSWERS, min_size=1, max_size=3),
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 4.0]), max_size=STEPS),
    st.booleans(),
)
def test_every_doubt_ends(answers: list[list[bool | None]], steps: list[float], is_dynamic: bool) -> None:
    """A worker of a dynamic group that is out of reach is not taken for dead: the directory decides."""
    asked = [0] * len(answers)

    def probe(worker: int) -> bool | None:
        asked[worker] += 1
        return answers[worker][asked[worker] - 1]

    watch, now = Watch(len(answers), probe, is_dynamic), clock(iter(steps))
    with patch.object(membership, "monotonic", now):
        for _ in range(100):
            watch._check_suspects()
    assert watch._suspects == []
    for worker, given_ in enumerate(answers):
        last = given_[asked[worker] - 1]
        assert False not in given_[: asked[worker] - 1]
        assert not last or given_[: asked[worker]].count(True) == len(PROBE_DELAYS)
        found = watch.declared if is_dynamic else watch.died
        assert (worker in found) == (last is False or (last is None and not is_dynamic))
        assert (str(worker) in watch._suspected) == (not last)
    assert (watch.died if is_dynamic else watch.declared) == []


@pytest.mark.parametrize("pause", [0.0, AGAIN])
def test_a_host_that_is_silent_for_two_seconds_is_lost(pause: float) -> None:
    """The silence shows by an error at once, as without a route, or by answers that do not come."""
    fate: Suspect | bool = Suspect(None, PeerLost("its connection broke"), 0.0, 0.0)  # type: ignore[arg-type]
    now = 0.0
    while isinstance(fate, Suspect):
        assert now < PATIENCE
        now = max(now, fate.due) + pause
        fate = fate.after(None, now)
    assert fate
    assert now == PATIENCE


def test_the_time_in_which_this_worker_did_not_run_is_no_silence_of_others() -> None:
    """It is stopped for a minute, and the others get as long to answer after that as before."""
    suspect: Suspect | bool = Suspect(None, PeerLost("its connection broke"), 0.0, 0.0)  # type: ignore[arg-type]
    for now in (AGAIN, 60.0, 60.0, 60.0 + PATIENCE - AGAIN):
        assert isinstance(suspect, Suspect)
        assert suspect.due <= now
        suspect = suspect.after(None, now)
    assert isinstance(suspect, Suspect)
    assert suspect.after(None, 60.0 + PATIENCE) is True


@pytest.mark.parametrize(
    ("why", "answer", "is_dynamic"),
    [(PeerLost, None, False), (PeerSilent, False, False), (PeerLost, False, False), (PeerLost, False, True)],
)
@pytest.mark.parametrize("lives", [True, False])
def test_a_worker_that_is_reached_while_it_is_doubted_is_probed_anew(
    why: type[PeerError], answer: bool | None, is_dynamic: bool, lives: bool
) -> None:
    """It is reached right before the answer that would make it count as lost."""
    probed = 0

    def probe(_: int) -> bool | None:
        nonlocal probed
        probed += 1
        if probed == 1:
            watch._on_reached(suspect.who.identity)
            return answer
        return lives

    watch = Watch(1, probe, is_dynamic)
    (suspect,) = watch._suspects
    watch._suspects = [suspect._replace(why=why("the reason"), begun=-PATIENCE)]
    with patch.object(membership, "monotonic", clock(iter([]))):
        watch._check_suspects()
        assert watch.died == watch.declared == []
        assert [(type(each.why), str(each.why), each.answered) for each in watch._suspects] == [
            (PeerLost, "the reason", 0)
        ]
        for _ in range(100):
            watch._check_suspects()
    assert watch._suspects == []
    assert (watch.declared if is_dynamic else watch.died) == ([] if lives else [0])


def test_a_check_that_fails_keeps_the_suspects() -> None:
    watch = Watch(2, lambda _: False)
    watch._find_dead = Mock(side_effect=OverflowError)
    with pytest.raises(OverflowError):
        watch._check_suspects()
    assert len(watch._suspects) + len(watch._probes) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="fills a queue whose length is Linux's")
def test_workers_on_silent_hosts_are_checked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses, and that of a worker that has died meanwhile, are reported as early as that of a single one."""
    monkeypatch.setattr(suspects, "PATIENCE", 1.0)
    with contextlib.ExitStack() as stack, agents(1) as (worker,):
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        silent = server.getsockname()
        stack.enter_context(socket.create_connection(silent))  # the queue is full: further packets are dropped
        dead = "127.0.0.1", cluster.free_port()
        found, told = worker.membership, queue.SimpleQueue[tuple[str, float]]()
        found.on_lost(lambda lost, _: told.put((lost.name, time.monotonic())))
        begun = time.monotonic()
        for number in range(1, 9):
            member = worker.me._replace(name=f"w{number}", id=number, incarnation=str(number), tcp=silent)
            if number == 8:
                member = member._replace(tcp=dead)
            found._present[member.incarnation] = member
            found._on_lost(member.identity, PeerLost("its connection broke"))
        names, times = zip(*(told.get(timeout=30.0) for _ in range(8)), strict=True)
    assert names[0] == "w8"
    assert set(names) == {f"w{number}" for number in range(1, 9)}
    assert times[1] - begun >= 1.0
    assert times[-1] - begun < 3.0  # one after the other they would take 7 s


def test_a_worker_that_died_before_it_was_seen_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(1, dynamic=True) as (worker,):
        asked = queue.SimpleQueue[str]()
        monkeypatch.setattr(worker.directory, "declare_lost", lambda member, *_: asked.put(member.name))
        tcp = "127.0.0.1", cluster.free_port()
        other = worker.me._replace(name="other", id=7, incarnation="life of other", tcp=tcp)
        worker.membership._on_lost(other.identity, PeerLost("its connection broke"))
        worker.membership._apply(MemberJoined(Registered(other, 1)))
        assert asked.get(timeout=cluster.PATIENCE) == "other"
