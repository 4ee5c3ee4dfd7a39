"""Listeners receive events, and the recorder keeps the last ones."""

from time import perf_counter
from typing import Any

import pytest

from telegrad._core import events
from telegrad._core.events import CALLED, RAN, Event
from telegrad._core.worker.current import Worker
from telegrad.reporting.process_state import LAST, Recorder, recorder
from telegrad.rpc import rpc_stream


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_listeners", [])
    monkeypatch.setattr(events, "note", None)


def test_each_listener_receives_events_until_its_removal(alone: None) -> None:
    first: list[Event] = []
    second: list[Event] = []
    one, other = first.append, second.append
    events.add(one)
    assert events.note is one  # without a wrapper
    events.add(other)
    assert events.note is not None
    events.note((RAN, 1.0, 2.0))
    events.remove(one)
    events.note((RAN, 2.0, 3.0))
    events.remove(other)
    events.remove(other)
    assert events.note is None
    assert (first, second) == ([(RAN, 1.0, 2.0)], [(RAN, 1.0, 2.0), (RAN, 2.0, 3.0)])


def test_the_last_events_are_kept(alone: None) -> None:
    kept = Recorder()
    kept.begin()
    kept.begin()  # another worker of this process
    assert events.note is not None
    for moment in range(LAST + 5):
        events.note((RAN, moment, moment + 1))
    kept.end()
    assert events.note is not None
    kept.end()
    assert events.note is None
    assert len(kept.events()) == LAST
    assert kept.events(LAST + 3) == [(RAN, LAST + 3, LAST + 4), (RAN, LAST + 4, LAST + 5)]


def fail() -> None:
    raise ValueError("as asked")


def test_calls_are_recorded_at_both_ends(pair: list[Worker]) -> None:
    begin = recorder.events()[-1][2] if recorder.events() else 0.0
    pair[0].agent.call("w1", abs, (-1,), None)
    with pytest.raises(ValueError, match="as asked"):
        pair[0].agent.call("w1", fail, None, None)
    assert pair[0].agent.call_async("w1", abs, (-1,), None).wait() == 1
    told: dict[str, list[Any]] = {}
    for kind, begun, ended, *rest in recorder.events(begin):
        assert begun <= ended
        told.setdefault(kind, []).append(rest)
    names = ["builtins.abs", f"{__name__}.fail", "builtins.abs"]
    assert [(peer, name, weight, failure) for peer, _, name, weight, failure in told[CALLED]] == [
        ("w1", name, 0, failure) for name, failure in zip(names, ("", "raised", ""), strict=True)
    ]
    assert [(caller, name, failure) for caller, _, name, failure in told[RAN]] == [
        ("w0", name, failure) for name, failure in zip(names, ("", "ValueError", ""), strict=True)
    ]
    assert [each[1] for each in told[CALLED]] == [each[1] for each in told[RAN]]  # the numbers of the calls


@pytest.mark.usefixtures("here")
def test_a_stream_that_is_read_to_its_end_has_no_failed_calls() -> None:
    begin = perf_counter()
    for _ in range(30):
        assert [*rpc_stream("w1", range, (300,))] == [*range(300)]
    ended = [(event[5], event[-1]) for event in recorder.events(begin) if event[0] in (CALLED, RAN)]
    assert all(name and not failure for name, failure in ended), ended
