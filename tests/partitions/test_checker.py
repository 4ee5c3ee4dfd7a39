"""Tests of the checker with made-up records: each rule finds its violations, and nothing in a right record."""

from collections.abc import Callable

import pytest

from tests.partitions import checker
from tests.partitions.checker import Record
from tests.partitions.record import (
    CALLED,
    DONE,
    LOST,
    OWNED,
    RAN,
    REFUSED,
    SAW,
    SERVED,
    TOLD,
    UNKNOWN,
    WROTE,
    Event,
    Fault,
    Final,
)

NEAR, FAR = ("a", "b"), ("c", "d")
ALL = NEAR + FAR
SILENCE = 3.0
BEGINS, ENDS, OVER = 12.0, 32.0, 50.0  # of the split, and of the record
CUT = frozenset(pair for near in NEAR for far in FAR for pair in ((near, far), (far, near)))
SPLIT = Fault(BEGINS, ENDS, 100, CUT, frozenset(FAR))
FINAL = Final(45.0, frozenset(NEAR), {"a": 3}, 7)
TOLD_AT = 34.0


def times(begins: float, ends: float) -> list[float]:
    return [begins + step / 2 for step in range(int(2 * (ends - begins)))]


def right() -> list[Event]:
    """Return the record of a split that went well: c and d were lost, and learned of it."""
    ran = [Event(at / 10, who, RAN) for who in ALL for at in range(int(OVER * 10) + 1)]
    calls = [
        Event(at + 0.01, one, CALLED, began=at, other=other)
        for side in (NEAR, FAR)
        for one in side
        for other in side
        if one != other
        for at in times(0.0, OVER if side == NEAR else TOLD_AT)
    ]
    across = [Event(at, one, CALLED, began=at - 0.1, other=other) for one, other in CUT for at in times(0.1, BEGINS)]
    saw = [
        Event(at, one, SAW, began=at, seen=ALL if at < BEGINS + SILENCE + 1 else NEAR)
        for one in NEAR
        for at in times(0.1, OVER)
    ]
    lost = [Event(BEGINS + SILENCE, near, LOST, other=far) for near in NEAR for far in FAR]
    told = [Event(TOLD_AT, far, TOLD) for far in FAR]
    owned = [Event(5.0, "c", OWNED, token=4), Event(14.9, "c", OWNED, token=4)]
    owned += [Event(15.1, "a", OWNED, token=7), Event(49.0, "a", OWNED, token=7)]
    wrote = [Event(4.0, "a", WROTE, token=1, outcome=DONE), Event(5.0, "a", WROTE, token=2, outcome=UNKNOWN)]
    wrote += [Event(6.0, "a", WROTE, token=3, outcome=REFUSED, seen=("2",))]
    wrote += [Event(7.0, "a", WROTE, token=3, outcome=DONE), Event(46.0, "a", WROTE, token=4, outcome=DONE)]
    return [*ran, *calls, *across, *saw, *lost, *told, *owned, *wrote]


def record(*more: Event, without: Callable[[Event], bool] = lambda _: False, **changes: Fault | Final) -> Record:
    events = [event for event in right() if not without(event)]
    fault, final = changes.get("fault", SPLIT), changes.get("final", FINAL)
    assert isinstance(fault, Fault)
    assert isinstance(final, Final)
    return Record([*events, *more], [fault], final, SILENCE)


def is_call(one: str, other: str, begins: float, ends: float) -> Callable[[Event], bool]:
    def holds(event: Event) -> bool:
        return event.act == CALLED and (event.worker, event.other) == (one, other) and begins <= event.at < ends

    return holds


def test_a_right_record_has_no_violations() -> None:
    assert checker.check(record(), 1.0) == []


WRONG = {
    "acted with token 4 after a did with 7": record(Event(15.2, "c", OWNED, token=4)),
    "both have token 7": record(Event(49.5, "b", OWNED, token=7)),
    "is there": record(final=FINAL._replace(numbers={"a": 2})),
    "found 1 where": record(Event(8.0, "a", WROTE, token=4, outcome=REFUSED, seen=("1",))),
    "found 9 where": record(Event(8.0, "a", WROTE, token=4, outcome=REFUSED, seen=("9",))),
    "owns the claim": record(final=FINAL._replace(claim=8)),
    "a got no answer of b": record(without=is_call("a", "b", 20.0, 22.0)),
    "c got no answer of d": record(without=is_call("c", "d", 20.0, 22.0)),
    "b does not call a": record(without=is_call("b", "a", ENDS, OVER)),
    "c is out of the directory and was not told": record(
        without=lambda event: event.act == TOLD and event.worker == "c"
    ),
    "and is in the directory": record(final=FINAL._replace(members=frozenset("abc"))),
    "was told 11.0 s after": record(Event(43.0, "c", TOLD), without=lambda e: e.act == TOLD and e.worker == "c"),
    "still saw c": record(Event(BEGINS + SILENCE + 2.5, "a", SAW, began=BEGINS + SILENCE + 2.5, seen=("a", "b", "c"))),
    "b renewed its lease, and a dropped it": record(Event(20.0, "a", SAW, began=20.0, seen=("a",))),
    "a renewed its lease, and b dropped it": record(Event(20.0, "b", LOST, other="a")),
    "a renewed its lease, and was declared lost": record(Event(20.0, "a", TOLD)),
    "a served c": record(Event(20.0, "a", SERVED, other="c")),
    "had no effect": record(fault=SPLIT._replace(evidence=0)),
    "across the cut": record(Event(21.0, "a", CALLED, began=20.0, other="c")),
}


@pytest.mark.parametrize("text", WRONG)
def test_the_violations_of_a_wrong_record_are_found(text: str) -> None:
    assert any(text in found for found in checker.check(WRONG[text], 1.0))


def test_a_pause_of_a_process_does_not_count_as_a_delay() -> None:
    missing = is_call("a", "b", 20.0, 22.0)
    ran = [event for event in right() if event.act == RAN and event.worker == "b" and 19.5 < event.at < 22.5]
    assert list(checker.calls_go_on(record(without=missing), 1.0))
    assert not list(checker.calls_go_on(record(without=lambda event: missing(event) or event in ran), 1.0))


def test_a_worker_whose_process_was_paused_may_be_lost() -> None:
    gone = Event(20.0, "b", LOST, other="a")
    assert list(checker.renewing_stay(record(gone)))
    assert not list(checker.renewing_stay(record(gone, without=lambda e: e.act == RAN and 15 < e.at < 19)))


def test_leases_may_end_while_the_directory_is_paused() -> None:
    told = Event(20.0, "a", TOLD)
    answered = [Event(at / 1.0, "a", WROTE, token=3, outcome=REFUSED, seen=("3",)) for at in range(4, 46)]
    for paused in (False, True):
        wrote = [event for event in answered if not (paused and 15 < event.at < 19)]
        events = [*right(), told, *wrote]
        made = Record(events, [SPLIT], FINAL, SILENCE, directory_may_pause=True)
        assert bool(list(checker.renewing_stay(made))) is not paused
