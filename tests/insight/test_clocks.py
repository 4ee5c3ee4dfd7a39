"""How clocks relate: made-up clocks with known offsets and drifts."""

from __future__ import annotations

import random

import pytest

from telegrad.insight.clocks import (
    CALLS,
    REFERENCE,
    SAME,
    UNKNOWN,
    Exchange,
    Relation,
    mark,
    of_profile,
    relate,
    spread,
    through,
    turned,
)


def exchanged(
    ahead: float, sent: float, there: float, back: float, serving: float = 0.0, drift: float = 0.0
) -> Exchange:
    """One with another clock that is `ahead` at zero, whose ways take so long."""
    came = sent + there
    left = came + serving
    return Exchange(sent, came + ahead + drift * came, left + ahead + drift * left, left + back)


def test_an_offset_lies_within_its_uncertainty() -> None:
    shaken = random.Random(7)
    for _ in range(200):
        ahead = shaken.uniform(-1e6, 1e6)
        found = relate([exchanged(ahead, i * 1e-4, *(shaken.expovariate(1e4) for _ in range(3))) for i in range(20)])
        assert abs(found.offset - ahead) <= found.uncertainty + 1e-9


def test_the_shortest_round_trip_counts() -> None:
    found = relate([exchanged(5.0, 0.0, 0.5, 0.1), exchanged(5.0, 1e-3, 1e-5, 1e-5), exchanged(5.0, 2e-3, 0.1, 0.9)])
    assert found.offset == pytest.approx(5.0)
    assert found.uncertainty == pytest.approx(1e-5)
    assert found.drift == 0


def test_what_the_other_takes_to_answer_is_no_uncertainty() -> None:
    assert relate([exchanged(-3.0, 0.0, 1e-5, 1e-5, serving=2.0)]).uncertainty == pytest.approx(1e-5)


def test_two_exchanges_far_apart_give_the_drift() -> None:
    found = relate([exchanged(5.0, at, 1e-5, 1e-5, drift=5e-5) for at in (10.0, 10.1, 20.0, 20.1)])
    assert found.drift == pytest.approx(5e-5, rel=0.05)
    for at in (10.0, 15.0, 30.0):
        assert found.to_reference(at + 5.0 + 5e-5 * at) == pytest.approx(at, abs=2e-5)
        assert found.ahead(at) == pytest.approx(5.0 + 5e-5 * at, abs=2e-5)


def test_a_drift_that_may_be_none_is_none() -> None:
    assert relate([exchanged(5.0, 0.0, 2e-5, 0.0), exchanged(5.0, 2.0, 0.0, 2e-5)]).drift == 0
    assert relate([exchanged(5.0, at, 1e-5, 1e-5, drift=1e-2) for at in (0.0, 0.1)]).drift == 0, "too near"


def test_hops_add_up() -> None:
    middle, further = Relation(100.0, 1e-5, 1e-6, 3.0), Relation(-20.0, 2e-5, 2e-6, 103.0)
    found = through(middle, further)
    assert found.offset == pytest.approx(80.0)
    assert found.uncertainty == pytest.approx(3e-5)
    assert found.drift == pytest.approx(3e-6)


def test_from_the_other_side() -> None:
    relation = Relation(100.0, 1e-5, 1e-6, 3.0)
    assert turned(relation).to_reference(relation.to_reference(200.0)) == pytest.approx(200.0, abs=1e-8)
    assert turned(relation).ahead(103.0) == -100.0
    assert turned(turned(relation)) == relation


def test_who_is_reached_through_others() -> None:
    compared = {("a", "b"): Relation(1.0, 1e-5), ("c", "b"): Relation(10.0, 1e-5), ("c", "d"): Relation(100.0, 1e-5)}
    found = spread("a", compared)
    assert {name: round(each.offset, 9) for name, each in found.items()} == {"a": 0.0, "b": 1.0, "c": -9.0, "d": 91.0}
    assert found["d"].uncertainty == pytest.approx(3e-5)
    assert spread("x", compared) == {"x": Relation(0.0, 0.0, how=REFERENCE)}


def test_of_two_ways_the_better_counts() -> None:
    both = {("a", "b"): Relation(1.0, 1e-3), ("b", "a"): Relation(-1.5, 1e-6)}
    assert spread("a", both)["b"].offset == 1.5


def test_the_marks_of_a_profile_place_it() -> None:
    regions = []
    for i in range(10):
        at = 50.0 + i * 1e-4
        regions.append((mark(at), at - 47.0 + 2e-6, at - 47.0 + 5e-6))
    found = of_profile([("work", 1.0, 2.0), *regions])
    assert found is not None
    assert found.offset == pytest.approx(-47.0, abs=1e-4)
    assert abs(found.offset + 47.0) <= found.uncertainty
    assert of_profile([("work", 1.0, 2.0)]) is None


def test_in_words() -> None:
    assert str(Relation(1.5e-3, 2e-5)) == "measured by exchanges: +1,500.0 µs, ± 20.0 µs"
    assert (
        str(Relation(0.0, 1e-6, -3e-6, how=CALLS))
        == "from recorded calls: +0.0 µs, ± 1.0 µs, drifts by -3.0 µs per second"
    )
    assert [str(Relation(0.0, 0.0, how=how)) for how in (REFERENCE, SAME, UNKNOWN)] == [REFERENCE, SAME, UNKNOWN]
